//! NVIDIA's driver library: its checkpoint functions.
//!
//! The functions are public since driver 570 (CUDA Driver API, "CUDA Checkpointing"). They act on another process,
//! which the driver reaches by its number.

use std::{
    ffi::{c_int, c_uint, c_void},
    fmt,
    sync::OnceLock,
    time::Duration,
};

use base::note;
use libloading::{Library, Symbol};

/// Bytes of the driver's argument blocks, and more: what a newer version adds is 0.
const BLOCK: usize = 128;
/// What functions answer that need `cuInit` first (`CUDA_ERROR_NOT_INITIALIZED`).
const NOT_INITIALIZED: Code = Code(3);
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
type Init = unsafe extern "C" fn(c_uint) -> c_int;

/// The driver library. Its functions for other processes need not have it initialized, which takes up to some seconds: that
/// is done when one of them wants it.
pub struct Driver {
    init: Init,
    initialized: OnceLock<Result<(), Code>>,
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
    /// Loads the library.
    ///
    /// # Errors
    /// The library is missing or too old.
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
        let init: Result<Symbol<'_, Init>, _> = unsafe { library.get(b"cuInit") };
        Ok(Self {
            init: *init.map_err(DriverError::Library)?,
            initialized: OnceLock::new(),
            lock: on_process("cuCheckpointProcessLock")?,
            checkpoint: on_process("cuCheckpointProcessCheckpoint")?,
            restore: on_process("cuCheckpointProcessRestore")?,
            unlock: on_process("cuCheckpointProcessUnlock")?,
            state,
            _library: library,
        })
    }

    /// Makes a call, and once more if the library has to be initialized first.
    fn done(&self, mut call: impl FnMut() -> c_int) -> Result<(), Code> {
        let outcome = done(call());
        if outcome != Err(NOT_INITIALIZED) || self.initialized.get().is_some() {
            return outcome;
        }
        self.start().inspect_err(|code| {
            note!("gantry-checkpoint: the driver does not start: cuInit answers {code}");
        })?;
        done(call())
    }

    /// Initializes the library; one that was tried before has the outcome of then. Where this fails, no program could be
    /// restored, and each would be lost.
    ///
    /// # Errors
    /// The driver's.
    pub fn start(&self) -> Result<(), Code> {
        // SAFETY: a call without pointers.
        *(self.initialized).get_or_init(|| done(unsafe { (self.init)(0) }))
    }

    fn call(&self, function: OnProcess, process: u32, block: &mut Block) -> Result<(), Code> {
        // SAFETY: the block is longer than any that the function reads; what it points to lives in the caller.
        self.done(|| unsafe { function(process.cast_signed(), (&raw mut *block).cast()) })
    }

    /// The state of a process.
    ///
    /// # Errors
    /// The driver's.
    pub fn state(&self, process: u32) -> Result<State, Code> {
        let mut state = -1;
        // SAFETY: the driver writes one number.
        self.done(|| unsafe { (self.state)(process.cast_signed(), &raw mut state) })?;
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
        self.call(self.lock, process, &mut block)
    }

    /// Moves the contents of a locked process's device memory to its own memory, and frees its devices.
    ///
    /// # Errors
    /// The driver's.
    pub fn checkpoint(&self, process: u32) -> Result<(), Code> {
        self.call(self.checkpoint, process, &mut Block([0; BLOCK]))
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
        self.call(self.restore, process, &mut block)
    }

    /// The reverse of [`Driver::lock`].
    ///
    /// # Errors
    /// The driver's.
    pub fn unlock(&self, process: u32) -> Result<(), Code> {
        self.call(self.unlock, process, &mut Block([0; BLOCK]))
    }
}

#[repr(C, align(8))]
struct Block([u8; BLOCK]);

fn done(code: c_int) -> Result<(), Code> {
    if code == 0 { Ok(()) } else { Err(Code(code)) }
}

/// The bytes of a UUID such as `GPU-01234567-89ab-cdef-0123-456789abcdef`.
pub fn uuid(text: &str) -> Option<Uuid> {
    let digits: String = text.strip_prefix("GPU-")?.split('-').collect();
    if digits.len() != 32 || !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
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
}
