//! What NVML knows of devices and processes (NVIDIA Management Library, `nvml.h`).

use std::{
    cell::OnceCell,
    ffi::{c_char, c_int, c_uint, c_void},
    ptr::null_mut,
};

use libloading::{Library, Symbol};

/// NVML's number of bytes where it is not known (`NVML_VALUE_NOT_AVAILABLE`).
pub const UNKNOWN: u64 = u64::MAX;

/// A device, as NVML shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// Its UUID, such as `GPU-12345678-...`.
    pub uuid: String,
    /// Its type, such as `NVIDIA H200`.
    pub model: String,
    /// Bytes of its memory that nobody uses.
    pub free: u64,
    /// Bytes of its memory that are in use.
    pub used: u64,
    /// Processes that use it for computing, and how many bytes each has.
    pub processes: Vec<(u32, u64)>,
}

/// What NVML knows.
#[derive(Debug, Default)]
pub struct Inventory {
    /// The driver's version, such as `580.159.04`.
    pub version: String,
    /// All devices.
    pub gpus: Vec<Gpu>,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct NvmlProcess {
    process: c_uint,
    bytes: u64,
    instances: [c_uint; 2],
}

type NoArguments = unsafe extern "C" fn() -> c_int;

fn check(name: &'static str, code: c_int) -> Result<(), NvmlError> {
    match code {
        0 => Ok(()),
        code => Err(NvmlError::Call { name, code }),
    }
}

/// NVML refused.
#[derive(Debug, thiserror::Error)]
pub enum NvmlError {
    /// It cannot be loaded.
    #[error("cannot load libnvidia-ml.so.1")]
    Library(#[from] libloading::Error),
    /// A function failed.
    #[error("{name} answers {code}{}", meaning(*.code))]
    Call {
        /// Its name.
        name: &'static str,
        /// Its answer.
        code: c_int,
    },
}

/// NVML. It is initialized when it is first asked, and shut down at the end: each time takes long.
#[derive(Default)]
pub struct Nvml(OnceCell<Library>);

/// What a code says of what has to be done.
fn meaning(code: c_int) -> &'static str {
    match code {
        9 => " (the driver is not loaded, or there is no device)",
        18 => {
            " (the libraries have another version than the driver, as where a VM comes to a host with another one)"
        }
        _ => "",
    }
}

impl Nvml {
    fn library(&self) -> Result<&Library, NvmlError> {
        if let Some(library) = self.0.get() {
            return Ok(library);
        }
        // SAFETY: the library's initializers are those that every program which uses NVML runs.
        let library = unsafe { Library::new("libnvidia-ml.so.1") }?;
        // SAFETY: the function has this type.
        check("nvmlInit_v2", unsafe {
            library.get::<NoArguments>(b"nvmlInit_v2")?()
        })?;
        Ok(self.0.get_or_init(|| library))
    }

    /// What it knows now.
    ///
    /// # Errors
    /// It cannot be loaded, or a function fails.
    pub fn inventory(&self) -> Result<Inventory, NvmlError> {
        const MOST: usize = 1024;
        let library = self.library()?;
        macro_rules! nvml {
            ($name:literal, fn($($kind:ty),*), $($value:expr),*) => {{
                // SAFETY: the function has this type, and what it writes to is as long as it is told.
                let code = unsafe {
                    let function: Symbol<'_, unsafe extern "C" fn($($kind),*) -> c_int> = library.get($name.as_bytes())?;
                    function($($value),*)
                };
                check($name, code)
            }};
        }
        /// A function whose last arguments are room for a string, and its length.
        macro_rules! string {
            ($name:literal, fn($($kind:ty),*), $($value:expr),*) => {{
                let mut bytes = [0u8; 96];
                let place = bytes.as_mut_ptr().cast();
                nvml!($name, fn($($kind,)* *mut c_char, c_uint), $($value,)* place, 96).map(|()| text(&bytes))
            }};
        }
        let version = string!("nvmlSystemGetDriverVersion", fn(),)?;
        let mut count = 0;
        nvml!("nvmlDeviceGetCount_v2", fn(*mut c_uint), &raw mut count)?;
        let mut gpus = Vec::new();
        for index in 0..count {
            let mut device = null_mut::<c_void>();
            nvml!(
                "nvmlDeviceGetHandleByIndex_v2",
                fn(c_uint, *mut *mut c_void),
                index,
                &raw mut device
            )?;
            let uuid = string!("nvmlDeviceGetUUID", fn(*mut c_void), device)?;
            let model = string!("nvmlDeviceGetName", fn(*mut c_void), device)?;
            let mut memory = [0u64; 3];
            nvml!(
                "nvmlDeviceGetMemoryInfo",
                fn(*mut c_void, *mut [u64; 3]),
                device,
                &raw mut memory
            )?;
            let mut processes = vec![NvmlProcess::default(); MOST];
            let mut found = MOST as c_uint;
            nvml!(
                "nvmlDeviceGetComputeRunningProcesses_v3",
                fn(*mut c_void, *mut c_uint, *mut NvmlProcess),
                device,
                &raw mut found,
                processes.as_mut_ptr()
            )?;
            processes.truncate(found as usize);
            let [_, free, used] = memory;
            gpus.push(Gpu {
                uuid,
                model,
                free,
                used,
                processes: processes
                    .iter()
                    .map(|entry| (entry.process, entry.bytes))
                    .collect(),
            });
        }
        Ok(Inventory { version, gpus })
    }
}

impl Drop for Nvml {
    fn drop(&mut self) {
        let Some(library) = self.0.get() else { return };
        // SAFETY: the function has this type.
        if let Ok(shut_down) = unsafe { library.get::<NoArguments>(b"nvmlShutdown") } {
            // SAFETY: it was initialized, and nothing of it is used any longer.
            unsafe { shut_down() };
        }
    }
}

impl Inventory {
    /// Bytes that a process has on all devices; `None` if none lists it, or if one does not know how many.
    pub fn bytes_of(&self, process: u32) -> Option<u64> {
        let entries = self.gpus.iter().flat_map(|gpu| &gpu.processes);
        let mut bytes = entries
            .filter(|entry| entry.0 == process)
            .map(|entry| (entry.1 != UNKNOWN).then_some(entry.1))
            .peekable();
        bytes.peek()?;
        bytes.try_fold(0, |sum: u64, bytes| Some(sum.saturating_add(bytes?)))
    }

    /// Bytes in use on all devices.
    pub fn used(&self) -> u64 {
        self.gpus
            .iter()
            .fold(0, |sum, gpu| sum.saturating_add(gpu.used))
    }
}

fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0);
    String::from_utf8_lossy(&bytes[..end.unwrap_or(bytes.len())]).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_a_process_are_summed_over_devices() {
        let gpu = |processes: &[(u32, u64)]| Gpu {
            uuid: String::new(),
            model: String::new(),
            free: 0,
            used: 10,
            processes: processes.to_vec(),
        };
        let inventory = Inventory {
            version: String::new(),
            gpus: vec![gpu(&[(1, 5), (2, 9)]), gpu(&[(1, 7), (2, UNKNOWN)])],
        };
        assert_eq!(inventory.bytes_of(1), Some(12));
        assert_eq!(inventory.bytes_of(2), None, "one does not know");
        assert_eq!(inventory.bytes_of(3), None);
        assert_eq!(inventory.used(), 20);
    }
}
