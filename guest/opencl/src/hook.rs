//! The application's large allocations in the window, if `libgantry_malloc.so` is preloaded.

use std::{ffi::c_void, ptr::null_mut};

use gantry_remoting::transport::window::Window;

use crate::link;

/// `gantry_malloc_serve` of that library.
type Serve = extern "C" fn(
    extern "C" fn(usize) -> *mut c_void,
    extern "C" fn(*mut c_void) -> usize,
    extern "C" fn(*mut c_void),
    *mut c_void,
    usize,
);

extern "C" fn take(size: usize) -> *mut c_void {
    link::made()
        .and_then(|link| link.lend(size as u64))
        .map_or(null_mut(), <*mut u8>::cast)
}

extern "C" fn size(pointer: *mut c_void) -> usize {
    link::made().map_or(0, |link| link.lent(pointer.cast())) as usize
}

extern "C" fn give(pointer: *mut c_void) {
    if let Some(link) = link::made() {
        link.unlend(pointer.cast());
    }
}

/// Offers the window to the library, if it is there.
pub fn offer(window: &Window) {
    // SAFETY: the name is a C string, and what bears it is the function of that signature.
    let serve = unsafe {
        let found = libc::dlsym(libc::RTLD_DEFAULT, c"gantry_malloc_serve".as_ptr());
        std::mem::transmute::<*mut c_void, Option<Serve>>(found)
    };
    let length = window.size() - window.data();
    if let (Some(serve), Some(start)) = (serve, window.at(window.data(), length)) {
        serve(take, size, give, start.cast(), length as usize);
    }
}
