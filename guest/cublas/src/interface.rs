//! The connection to the worker, which is that of the process's `libcuda.so.1`.

use std::{ffi::c_void, sync::OnceLock};

use base::fork::Mark;
use remoting_proto::apis::cuda::{
    codes,
    interface::{FINGERPRINT, Interface, SYMBOL},
};

/// The process's driver, as found by the loader.
fn driver() -> *mut c_void {
    static DRIVER: OnceLock<usize> = OnceLock::new();
    let driver = DRIVER.get_or_init(|| {
        // SAFETY: opens a system library, as any program that is linked with it does.
        unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) as usize }
    });
    *driver as *mut c_void
}

/// The address of one of the driver's functions, or null if it does not exist.
pub fn symbol(name: &std::ffi::CStr) -> *mut c_void {
    let driver = driver();
    if driver.is_null() {
        return driver;
    }
    // SAFETY: an open library and a string.
    unsafe { libc::dlsym(driver, name.as_ptr()) }
}

fn look() -> Option<&'static Interface> {
    let found = symbol(SYMBOL);
    if found.is_null() {
        eprintln!(
            "gantry: this cuBLAS needs Gantry's libcuda.so.1, and this process has another one or none"
        );
        return None;
    }
    // SAFETY: the symbol is Gantry's own and has this signature.
    let table = unsafe {
        std::mem::transmute::<*mut c_void, extern "C" fn(u64) -> *const Interface>(found)
    };
    // SAFETY: a static table of the driver's, or null.
    let table = unsafe { table(FINGERPRINT).as_ref() };
    if table.is_none() {
        eprintln!("gantry: libcuda.so.1 and this cuBLAS are of different versions of Gantry");
    }
    table
}

/// Set once the driver is used.
static STARTED: Mark = Mark::new();

/// Whether this process was forked from one that uses these libraries: every call fails, before it
/// takes a lock, which another thread of the parent may have held. Costs two loads.
#[inline]
pub fn is_forked() -> bool {
    STARTED.is_inherited()
}

/// The driver's table. Costs one atomic load after the first call.
///
/// # Errors
/// The process has no driver, or not Gantry's. This is reported once.
pub fn interface() -> Result<&'static Interface, i32> {
    static FOUND: OnceLock<Option<&'static Interface>> = OnceLock::new();
    let found = match FOUND.get() {
        Some(found) => *found,
        None => {
            STARTED.set().map_err(|_| codes::OUT_OF_MEMORY)?;
            *FOUND.get_or_init(look)
        }
    };
    found.ok_or(codes::NOT_INITIALIZED)
}
