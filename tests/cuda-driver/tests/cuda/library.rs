//! The library, opened once for all tests.

use std::{path::PathBuf, sync::OnceLock};

use libloading::Library;

/// Where Cargo puts the library: beside this program.
pub fn path() -> PathBuf {
    let program = std::env::current_exe().expect("a test knows its own path");
    program.with_file_name("libgantry_cuda_driver.so")
}

/// Tests run at the same time here.
pub struct Turn;

/// Whose turn it is.
pub fn turn() -> Turn {
    Turn
}

/// The library.
pub fn library() -> &'static Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        // SAFETY: opening it runs no code of its own.
        let library = unsafe { Library::new(path()) };
        library.expect("the driver is built with this test")
    })
}
