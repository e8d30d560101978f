//! Why nothing is shown.

use std::{
    env, io,
    path::{Path, PathBuf},
};

use base::{gpus::Unmatched, paths::CUDA_SOCKET};
use gantry_nvml::{error_text, nvmlReturn_t};

/// The environment variable that names what serves CUDA to programs.
const VARIABLE: &str = "GANTRY_CUDA";

fn text(code: nvmlReturn_t) -> String {
    error_text(code).to_string_lossy().into_owned()
}

/// Why nothing is shown.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no driver.
    #[error(
        "there is no CUDA driver: put Gantry's libgantry_cuda.so as libcuda.so.1 where the loader looks or into {}, \
         or name its folder by --libraries (docs/user/cuda.md)",
        folder.display()
    )]
    NoLibrary {
        /// The folder in which it was looked for.
        folder: PathBuf,
        /// The loader's error.
        source: libloading::Error,
    },
    /// CUDA is turned off in the environment.
    #[error("the CUDA driver finds no device: {VARIABLE} is off; unset it")]
    Off,
    /// Nobody serves at the socket.
    #[error(
        "the CUDA driver finds no device, as nobody serves {0}: start gantry-agent, in a VM that has --accel api=cuda, \
         or on a host gantry-accel serve --api cuda --socket {0}; GANTRY_CUDA names another socket"
    )]
    NobodyServes(String),
    /// The server provides no device.
    #[error(
        "the CUDA driver finds no device at {0}: the log of gantry-agent (in a VM) or gantry-accel says why, and \
         gantry-accel probe --api cuda on the host whether its driver works"
    )]
    NoWorker(String),
    /// The requested device does not exist.
    #[error(transparent)]
    NoDevice(Unmatched),
    /// The driver has failed.
    #[error("the CUDA driver has failed ({}); has its worker ended?", text(*.0))]
    Driver(nvmlReturn_t),
    /// Writing the output has failed.
    #[error("cannot write to the standard output")]
    Output(#[source] io::Error),
}

impl Error {
    /// Determines why the driver has not started, as far as possible here. The driver itself has
    /// reported more.
    pub(crate) fn not_started() -> Self {
        let place = env::var(VARIABLE).unwrap_or_else(|_| CUDA_SOCKET.to_owned());
        match Path::new(&place) {
            _ if place == "off" => Self::Off,
            path if path.is_absolute() && !path.exists() => Self::NobodyServes(place),
            _ => Self::NoWorker(place),
        }
    }

    /// The program's exit status, which is that of nvidia-smi where it has one.
    pub fn status(&self) -> u8 {
        match self {
            Self::NoLibrary { .. } | Self::Off | Self::NobodyServes(_) | Self::NoWorker(_) => 9,
            Self::NoDevice(_) => 6,
            Self::Driver(_) | Self::Output(_) => 1,
        }
    }
}
