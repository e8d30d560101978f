//! The library, opened once for all tests.

use std::{path::PathBuf, sync::OnceLock};

use libloading::Library;

/// Where Cargo places the library: next to this program.
pub fn path() -> PathBuf {
    let program = std::env::current_exe().expect("a test knows its own path");
    program.with_file_name("libgantry_cuda_driver.so")
}

/// Unused here, because tests run concurrently.
pub struct Turn;

/// Takes a turn, which needs no wait here.
pub fn turn() -> Turn {
    Turn
}

/// The library.
pub fn library() -> &'static Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        // SAFETY: the library runs no code of its own when opened.
        let library = unsafe { Library::new(path()) };
        library.expect("the driver is built with this test")
    })
}
