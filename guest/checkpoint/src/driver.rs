//! NVIDIA's driver library: its checkpoint functions, and what NVML knows of devices and processes.
//!
//! The functions are public since driver 570 (CUDA Driver API, "CUDA Checkpointing"). They act on another process,
//! which the driver reaches by its number.

use std::{
    ffi::{c_char, c_int, c_uint, c_void},
    fmt,
    ptr::null_mut,
    time::Duration,
};

use libloading::{Library, Symbol};

/// Bytes of the driver's argument blocks, and more: what a newer version adds is 0.
const BLOCK: usize = 128;
/// NVML's number of bytes where it is not known.
pub const UNKNOWN: u64 = u64::MAX;
/// Bytes of a device's UUID.
pub type Uuid = [u8; 16];

/// The driver library cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    /// It cannot be loaded.
    #[error("cannot load libcuda.so.1: is NVIDIA's driver installed on this machine?")]
    Library(#[source] libloading::Error),
    /// It is too old.
    #[error("the driver's library has no {name}: suspension needs driver 570 or newer")]
    Old {
        /// The function.
        name: &'static str,
        /// What the loader says.
        source: libloading::Error,
    },
    /// It finds no device.
    #[error("the driver does not start: cuInit answers {0}")]
    Start(Code),
}

/// What a function of the driver answered, other than success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Code(pub c_int);

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.0 {
            1 => "invalid value",
            2 => "out of memory",
            3 => "not initialized",
            100 => "no device",
            304 => "operating system call failed",
            401 => "illegal state",
            600 => "not ready",
            800 => "not permitted",
            801 => "not supported",
            999 => "unknown error",
            _ => return write!(f, "error {}", self.0),
        };
        write!(f, "error {} ({name})", self.0)
    }
}

/// The state of a process, as the driver sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It runs, or has never used the driver.
    Running,
    /// Its calls wait.
    Locked,
    /// The contents of its devices' memory are in its own memory.
    Checkpointed,
    /// It is lost.
    Failed,
    /// A state that this version does not know.
    Other(c_int),
}

type OnProcess = unsafe extern "C" fn(c_int, *mut c_void) -> c_int;
type GetState = unsafe extern "C" fn(c_int, *mut c_int) -> c_int;

/// The driver library, started.
pub struct Driver {
    lock: OnProcess,
    checkpoint: OnProcess,
    restore: OnProcess,
    unlock: OnProcess,
    state: GetState,
    _library: Library,
}

/// The first words of the block of a restoration.
#[repr(C)]
struct Pairs {
    pairs: *const [Uuid; 2],
    count: c_uint,
}

impl Driver {
    /// Loads and starts the library. That takes up to some seconds.
    ///
    /// # Errors
    /// There is none, it is too old, or it finds no device.
    pub fn open() -> Result<Self, DriverError> {
        // SAFETY: the library's initializers are those that every CUDA program runs.
        let library = unsafe { Library::new("libcuda.so.1") }.map_err(DriverError::Library)?;
        let on_process = |name: &'static str| {
            // SAFETY: the function has this type in all versions that have it.
            let function: Result<Symbol<'_, OnProcess>, _> =
                unsafe { library.get(name.as_bytes()) };
            function
                .map(|function| *function)
                .map_err(|source| DriverError::Old { name, source })
        };
        let name = "cuCheckpointProcessGetState";
        // SAFETY: as above.
        let state: Result<Symbol<'_, GetState>, _> = unsafe { library.get(name.as_bytes()) };
        let state = *state.map_err(|source| DriverError::Old { name, source })?;
        // SAFETY: as above.
        let start: Result<Symbol<'_, unsafe extern "C" fn(c_uint) -> c_int>, _> =
            unsafe { library.get(b"cuInit") };
        let start = *start.map_err(DriverError::Library)?;
        let driver = Self {
            lock: on_process("cuCheckpointProcessLock")?,
            checkpoint: on_process("cuCheckpointProcessCheckpoint")?,
            restore: on_process("cuCheckpointProcessRestore")?,
            unlock: on_process("cuCheckpointProcessUnlock")?,
            state,
            _library: library,
        };
        // SAFETY: a call without pointers.
        match unsafe { start(0) } {
            0 => Ok(driver),
            code => Err(DriverError::Start(Code(code))),
        }
    }

    /// The state of a process.
    ///
    /// # Errors
    /// The driver's.
    pub fn state(&self, process: u32) -> Result<State, Code> {
        let mut state = -1;
        // SAFETY: the driver writes one number.
        done(unsafe { (self.state)(process.cast_signed(), &raw mut state) })?;
        Ok(match state {
            0 => State::Running,
            1 => State::Locked,
            2 => State::Checkpointed,
            3 => State::Failed,
            other => State::Other(other),
        })
    }

    /// Lets the process's calls wait, and waits until those that are under way have ended, at most so long.
    ///
    /// # Errors
    /// The driver's.
    pub fn lock(&self, process: u32, limit: Duration) -> Result<(), Code> {
        let limit = u32::try_from(limit.as_millis()).unwrap_or(u32::MAX);
        let mut block = Block([0; BLOCK]);
        block.0[..4].copy_from_slice(&limit.to_ne_bytes());
        call(self.lock, process, &mut block)
    }

    /// Moves the contents of a locked process's device memory to its own memory, and frees its devices.
    ///
    /// # Errors
    /// The driver's.
    pub fn checkpoint(&self, process: u32) -> Result<(), Code> {
        call(self.checkpoint, process, &mut Block([0; BLOCK]))
    }

    /// The reverse of [`Driver::checkpoint`]. `pairs`: for each device, its UUID then and its UUID now; empty where
    /// they are the same.
    ///
    /// # Errors
    /// The driver's. The process is lost then.
    pub fn restore(&self, process: u32, pairs: &[[Uuid; 2]]) -> Result<(), Code> {
        let mut block = Block([0; BLOCK]);
        if !pairs.is_empty() {
            let words = Pairs {
                pairs: pairs.as_ptr(),
                // Devices of a machine are few.
                count: pairs.len() as c_uint,
            };
            // SAFETY: the block is longer than the words, and aligned for them.
            unsafe { block.0.as_mut_ptr().cast::<Pairs>().write(words) };
        }
        call(self.restore, process, &mut block)
    }

    /// The reverse of [`Driver::lock`].
    ///
    /// # Errors
    /// The driver's.
    pub fn unlock(&self, process: u32) -> Result<(), Code> {
        call(self.unlock, process, &mut Block([0; BLOCK]))
    }
}

#[repr(C, align(8))]
struct Block([u8; BLOCK]);

fn call(function: OnProcess, process: u32, block: &mut Block) -> Result<(), Code> {
    // SAFETY: the block is longer than any that the function reads; what it points to lives in the caller.
    done(unsafe { function(process.cast_signed(), (&raw mut *block).cast()) })
}

fn done(code: c_int) -> Result<(), Code> {
    if code == 0 { Ok(()) } else { Err(Code(code)) }
}

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

/// NVML refused.
#[derive(Debug, thiserror::Error)]
pub enum NvmlError {
    /// It cannot be loaded.
    #[error("cannot load libnvidia-ml.so.1")]
    Library(#[from] libloading::Error),
    /// A function failed.
    #[error("{name} answers {code}")]
    Call {
        /// Its name.
        name: &'static str,
        /// Its answer.
        code: c_int,
    },
}

impl Inventory {
    /// Asks NVML, which is closed again afterwards.
    ///
    /// # Errors
    /// It cannot be loaded, or a function fails.
    pub fn take() -> Result<Self, NvmlError> {
        const MOST: usize = 1024;
        // SAFETY: the library's initializers are those that every program which uses NVML runs.
        let library = unsafe { Library::new("libnvidia-ml.so.1") }?;
        let check = |name, code| match code {
            0 => Ok(()),
            code => Err(NvmlError::Call { name, code }),
        };
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
        nvml!("nvmlInit_v2", fn(),)?;
        let take = || -> Result<Self, NvmlError> {
            let mut version = [0u8; 96];
            nvml!(
                "nvmlSystemGetDriverVersion",
                fn(*mut c_char, c_uint),
                version.as_mut_ptr().cast(),
                80
            )?;
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
                let mut uuid = [0u8; 96];
                nvml!(
                    "nvmlDeviceGetUUID",
                    fn(*mut c_void, *mut c_char, c_uint),
                    device,
                    uuid.as_mut_ptr().cast(),
                    96
                )?;
                let mut model = [0u8; 96];
                nvml!(
                    "nvmlDeviceGetName",
                    fn(*mut c_void, *mut c_char, c_uint),
                    device,
                    model.as_mut_ptr().cast(),
                    96
                )?;
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
                    uuid: text(&uuid),
                    model: text(&model),
                    free,
                    used,
                    processes: processes
                        .iter()
                        .map(|entry| (entry.process, entry.bytes))
                        .collect(),
                });
            }
            Ok(Self {
                version: text(&version),
                gpus,
            })
        };
        let taken = take();
        nvml!("nvmlShutdown", fn(),)?;
        taken
    }

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

/// The bytes of a UUID such as `GPU-01234567-89ab-cdef-0123-456789abcdef`.
pub fn uuid(text: &str) -> Option<Uuid> {
    let digits: String = text.strip_prefix("GPU-")?.split('-').collect();
    if digits.len() != 32 || !digits.is_ascii() {
        return None;
    }
    let mut uuid = [0; 16];
    for (index, byte) in uuid.iter_mut().enumerate() {
        *byte = u8::from_str_radix(digits.get(2 * index..2 * index + 2)?, 16).ok()?;
    }
    Some(uuid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_read_as_nvml_writes_it() {
        let read = uuid("GPU-01234567-89ab-cdef-0123-456789abcdef").expect("it is one");
        assert_eq!(read[..4], [0x01, 0x23, 0x45, 0x67]);
        assert_eq!(read[15], 0xef);
        for text in [
            "",
            "GPU-",
            "01234567-89ab-cdef-0123-456789abcdef",
            "GPU-g1234567-89ab-cdef-0123-456789abcdef",
        ] {
            assert_eq!(uuid(text), None, "{text}");
        }
    }

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
