//! Where programs of Gantry find each other and what is installed, if nobody says otherwise.

/// Where a pool for OpenCL listens; in a guest, the agent.
pub const OPENCL_SOCKET: &str = "/run/gantry/opencl.sock";
/// Where a pool for CUDA listens; in a guest, the agent.
pub const CUDA_SOCKET: &str = "/run/gantry/cuda.sock";
/// Where the arbiter listens.
pub const ARBITER_SOCKET: &str = "/run/gantry-arbiter/socket";
/// Where gantry-tunnel listens.
pub const TUNNEL_SOCKET: &str = "/run/gantry-tunnel/socket";
/// The folder of the CUDA libraries that programs in a guest load.
pub const CUDA_LIBRARIES: &str = "/usr/local/lib/gantry-cuda";
