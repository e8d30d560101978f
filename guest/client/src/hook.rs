//! Places the application's large allocations in the window, if `libgantry_malloc.so` is preloaded.
//!
//! A child that the process forks shares what is there. It allocates elsewhere, and frees nothing
//! there.

use std::{ffi::c_void, ptr::null_mut};

use remoting_transport::window::Window;

use crate::{connect::existing, driver::Driver};

/// The type of `gantry_malloc_serve` in that library.
type Serve = extern "C" fn(
    extern "C" fn(usize) -> *mut c_void,
    extern "C" fn(*mut c_void) -> usize,
    extern "C" fn(*mut c_void),
    *mut c_void,
    usize,
);

extern "C" fn take<D: Driver>(size: usize) -> *mut c_void {
    existing::<D>()
        .and_then(|link| link.heap_alloc(size as u64))
        .map_or(null_mut(), <*mut u8>::cast)
}

extern "C" fn size<D: Driver>(pointer: *mut c_void) -> usize {
    if let Some(link) = D::connection().of_parent() {
        // A wrong size would lose data.
        let size = link.heap_size_in_child(pointer.cast());
        return size.unwrap_or_else(|| std::process::abort()) as usize;
    }
    existing::<D>().map_or(0, |link| link.heap_size(pointer.cast())) as usize
}

extern "C" fn give<D: Driver>(pointer: *mut c_void) {
    if let Some(link) = existing::<D>() {
        link.heap_free(pointer.cast());
    }
}

/// Offers the window to the library, if it is loaded.
pub fn offer<D: Driver>(window: &Window) {
    // SAFETY: the name is a C string, and the function of that name has this signature.
    let serve = unsafe {
        let found = libc::dlsym(libc::RTLD_DEFAULT, c"gantry_malloc_serve".as_ptr());
        std::mem::transmute::<*mut c_void, Option<Serve>>(found)
    };
    let length = window.size() - window.data();
    if let (Some(serve), Some(start)) = (serve, window.at(window.data(), length)) {
        serve(
            take::<D>,
            size::<D>,
            give::<D>,
            start.cast(),
            length as usize,
        );
    }
}
