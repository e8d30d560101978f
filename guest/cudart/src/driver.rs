//! The driver, `libcuda.so.1`, as found by the loader: the vendor's, or the one that talks to a
//! worker.

use std::{
    ffi::{c_char, c_int, c_void},
    ptr::null_mut,
    sync::{
        OnceLock,
        atomic::{AtomicI32, AtomicPtr, Ordering},
    },
};

use base::fork::Mark;
use cuda_definition::runtime::types::cudaError;

use crate::error::{Answer, Error};

/// One of the driver's functions, looked up on its first call.
pub struct Entry {
    /// The symbol, terminated by a zero byte.
    symbol: &'static str,
    address: AtomicPtr<c_void>,
}

impl Entry {
    /// A function by its symbol, which must end in a zero byte.
    pub const fn new(symbol: &'static str) -> Self {
        Self {
            symbol,
            address: AtomicPtr::new(null_mut()),
        }
    }

    /// The function's address. Costs one atomic load after the first call.
    ///
    /// # Errors
    /// There is no driver, or it is too old to have this function.
    pub fn address(&self) -> Answer<*mut c_void> {
        let known = self.address.load(Ordering::Acquire);
        if !known.is_null() {
            return Ok(known);
        }
        let library = library().ok_or(cudaError::cudaErrorInsufficientDriver)?;
        // SAFETY: an open library, and a name that ends in a zero byte.
        let found = unsafe { libc::dlsym(library, self.symbol.as_ptr().cast::<c_char>()) };
        if found.is_null() {
            return Err(cudaError::cudaErrorCallRequiresNewerDriver);
        }
        self.address.store(found, Ordering::Release);
        Ok(found)
    }
}

fn library() -> Option<*mut c_void> {
    static LIBRARY: OnceLock<usize> = OnceLock::new();
    let library = *LIBRARY.get_or_init(|| {
        // SAFETY: opens a system library, as any program that is linked with it does.
        unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) as usize }
    });
    (library != 0).then_some(library as *mut c_void)
}

/// Calls one of the driver's functions, with the signature of the API's definition. Must be used in
/// an unsafe block: the arguments have to be what the function expects.
macro_rules! driver {
    ($name:ident($($argument:expr),* $(,)?)) => {{
        static ENTRY: $crate::driver::Entry =
            $crate::driver::Entry::new(concat!(stringify!($name), "\0"));
        match ENTRY.address() {
            Ok(address) => {
                let function = std::mem::transmute::<
                    *mut std::ffi::c_void,
                    cuda_definition::driver::signatures::$name,
                >(address);
                $crate::error::check(function($($argument),*))
            }
            Err(error) => Err(error),
        }
    }};
}
pub(crate) use driver;

/// What [`known_devices`] returns; 0 for none.
static DEVICES: AtomicI32 = AtomicI32::new(0);

/// Set while the driver is initialized, or another thread initializes it.
static STARTED: Mark = Mark::new();

/// Whether this process was forked from one that uses the runtime: every call fails, as natively,
/// before it takes a lock, which another thread of the parent may have held. Costs two loads.
#[inline]
pub fn is_forked() -> bool {
    STARTED.is_inherited()
}

/// Initializes the driver once.
///
/// # Errors
/// The driver's, on each call: there is no driver, or no device.
pub fn init() -> Answer {
    static DONE: OnceLock<Result<(), Error>> = OnceLock::new();
    if let Some(done) = DONE.get() {
        return *done;
    }
    if STARTED.set().is_err() {
        return Err(Error::cudaErrorMemoryAllocation);
    }
    // SAFETY: the only argument is flags, which are zero.
    let done = *DONE.get_or_init(|| unsafe { driver!(cuInit(0)) });
    if done.is_err() {
        STARTED.clear();
        return done;
    }
    let mut count = 0;
    // SAFETY: valid for writing the answer.
    if unsafe { driver!(cuDeviceGetCount(&raw mut count)) }.is_ok() {
        DEVICES.store(count, Ordering::Relaxed);
    }
    done
}

/// The number of devices when the driver was initialized, by this process or by the one that it was forked from. `None`
/// if it was not, or if there was no device.
pub fn known_devices() -> Option<c_int> {
    Some(DEVICES.load(Ordering::Relaxed)).filter(|count| *count > 0)
}
