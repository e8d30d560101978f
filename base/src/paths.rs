//! Default paths of sockets and installed files.

/// Socket of a pool for OpenCL; in a guest, of the agent.
pub const OPENCL_SOCKET: &str = "/run/gantry/opencl.sock";
/// Socket of a pool for CUDA; in a guest, of the agent.
pub const CUDA_SOCKET: &str = "/run/gantry/cuda.sock";
/// Socket of gantry-nvidia.
pub const NVIDIA_SOCKET: &str = "/run/gantry/nvidia.sock";
/// Socket of a gantry-nvidia for the programs of a VM.
pub const NVIDIA_VM_SOCKET: &str = "/run/gantry/nvidia-vm.sock";
/// Socket of the arbiter.
pub const ARBITER_SOCKET: &str = "/run/gantry-arbiter/socket";
/// Socket of gantry-tunnel.
pub const TUNNEL_SOCKET: &str = "/run/gantry-tunnel/socket";
/// Directory of the CUDA libraries that programs in a guest load.
pub const CUDA_LIBRARIES: &str = "/usr/local/lib/gantry-cuda";
