//! The driver, `libcuda.so.1`: whichever the loader finds, the vendor's or the one that speaks to a worker.

use std::{
    ffi::{c_char, c_void},
    ptr::null_mut,
    sync::{
        OnceLock,
        atomic::{AtomicPtr, Ordering},
    },
};

use cuda_definition::runtime::types::cudaError;

use crate::error::{Answer, Error};

/// One of the driver's functions, looked up when it is first called.
pub struct Entry {
    /// Ends in a zero byte.
    symbol: &'static str,
    address: AtomicPtr<c_void>,
}

impl Entry {
    /// A function by its symbol, which ends in a zero byte.
    pub const fn new(symbol: &'static str) -> Self {
        Self {
            symbol,
            address: AtomicPtr::new(null_mut()),
        }
    }

    /// Its address: one atomic load after the first time.
    ///
    /// # Errors
    /// There is no driver, or it is older than this function.
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
        // SAFETY: opening a library of the system's, as any program that is linked with it does.
        unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) as usize }
    });
    (library != 0).then_some(library as *mut c_void)
}

/// Calls one of the driver's functions, with the signature that the definition has. To be used in an
/// unsafe block: what is passed has to be what the function wants.
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

/// Initialises the driver once.
///
/// # Errors
/// The driver's, each time: there is none, or no device.
pub fn init() -> Answer {
    static DONE: OnceLock<Result<(), Error>> = OnceLock::new();
    // SAFETY: it takes nothing but flags, which are zero.
    *DONE.get_or_init(|| unsafe { driver!(cuInit(0)) })
}
