//! Why nothing is shown.

use std::{
    env, io,
    path::{Path, PathBuf},
};

use base::paths::CUDA_SOCKET;
use gantry_nvml::{error_text, nvmlReturn_t};

use crate::facts::Selector;

/// Names what serves CUDA to programs.
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
         or name its folder by --libraries (docs/user/accelerator.md)",
        folder.display()
    )]
    NoLibrary {
        /// Where it was looked for.
        folder: PathBuf,
        /// What the loader says.
        source: libloading::Error,
    },
    /// The environment wants no CUDA.
    #[error("the CUDA driver finds no device: {VARIABLE} is off; unset it")]
    Off,
    /// There is nothing at the socket.
    #[error(
        "the CUDA driver finds no device, as nobody serves {0}: start gantry-agent, in a VM that has --accel api=cuda, \
         or on a host gantry-accel serve --api cuda --socket {0}; GANTRY_CUDA names another socket"
    )]
    NobodyServes(String),
    /// What serves there gives no device.
    #[error(
        "the CUDA driver finds no device at {0}: the log of gantry-agent (in a VM) or gantry-accel says why, and \
         gantry-accel probe --api cuda on the host whether its driver works"
    )]
    NoWorker(String),
    /// A device that was named is not there.
    #[error("there is no device {0}: gantry-smi -L lists those that there are")]
    NoDevice(Selector),
    /// The driver has failed.
    #[error("the CUDA driver has failed ({}); has its worker ended?", text(*.0))]
    Driver(nvmlReturn_t),
    /// The output has failed.
    #[error("cannot write to the standard output")]
    Output(#[source] io::Error),
}

impl Error {
    /// Why the driver has not started, as far as can be seen from here; it has said more itself.
    pub(crate) fn not_started() -> Self {
        let place = env::var(VARIABLE).unwrap_or_else(|_| CUDA_SOCKET.to_owned());
        match Path::new(&place) {
            _ if place == "off" => Self::Off,
            path if path.is_absolute() && !path.exists() => Self::NobodyServes(place),
            _ => Self::NoWorker(place),
        }
    }

    /// The program's exit status; nvidia-smi's where it has one.
    pub fn status(&self) -> u8 {
        match self {
            Self::NoLibrary { .. } | Self::Off | Self::NobodyServes(_) | Self::NoWorker(_) => 9,
            Self::NoDevice(_) => 6,
            Self::Driver(_) | Self::Output(_) => 1,
        }
    }
}
