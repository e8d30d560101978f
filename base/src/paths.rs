//! Default paths of sockets and installed files.

use std::{
    env,
    path::{Path, PathBuf},
};

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
/// Folder of the service that grants leases, and of the sockets of leases.
pub const LEASES: &str = "/run/gantry-leases";
/// Folder of the sockets that gantry-exporter asks for metrics.
pub const METRICS: &str = "/run/gantry-metrics";
/// Directory of the CUDA libraries for programs of a guest, where they are installed by hand.
const CUDA_LIBRARIES: &str = "/usr/local/lib/gantry-cuda";
/// Name of such a directory in any place.
const CUDA_LIBRARIES_NAME: &str = "gantry-cuda";
/// Marks a system whose package manager owns the guest's agent and libraries.
pub const PACKAGED: &str = "/usr/lib/gantry/packaged";

/// Directory of the CUDA libraries for programs of a guest: `lib/gantry-cuda` beside the folder of the running program,
/// if it exists (packages: `/usr/bin` and `/usr/lib/gantry-cuda`; Python environments in the same way), otherwise that
/// of files installed by hand.
#[must_use]
pub fn cuda_libraries() -> PathBuf {
    let own = env::current_exe().ok();
    own.and_then(|program| beside(&program))
        .unwrap_or_else(|| CUDA_LIBRARIES.into())
}

fn beside(program: &Path) -> Option<PathBuf> {
    let prefix = program.parent()?.parent()?;
    let folder = prefix.join("lib").join(CUDA_LIBRARIES_NAME);
    folder.is_dir().then_some(folder)
}

/// Whether a library is one of Gantry's CUDA libraries, wherever they are installed.
#[must_use]
pub fn is_in_cuda_libraries(library: &Path) -> bool {
    let folder = library.parent();
    folder.is_some_and(|folder| folder.ends_with(CUDA_LIBRARIES_NAME))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_found_beside_the_folder_of_the_program() {
        let prefix = tempfile::TempDir::new().unwrap();
        let program = prefix.path().join("sbin/gantry-agent");
        assert_eq!(beside(&program), None);
        let folder = prefix.path().join("lib/gantry-cuda");
        std::fs::create_dir_all(&folder).unwrap();
        assert_eq!(beside(&program), Some(folder.clone()));
        assert_eq!(beside(Path::new("/")), None);
        assert!(is_in_cuda_libraries(&folder.join("libcuda.so.1")));
        assert!(!is_in_cuda_libraries(Path::new("/usr/lib/libcuda.so.1")));
    }
}
