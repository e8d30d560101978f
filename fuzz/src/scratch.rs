//! Scratch files of a target.

use std::{
    fs::File,
    path::{Path, PathBuf},
    sync::LazyLock,
};

use tempfile::TempDir;

/// Created once, in memory: creating and removing a file on a disk takes longer than everything
/// else for an input.
static DIR: LazyLock<TempDir> = LazyLock::new(|| {
    let memory = Path::new("/dev/shm");
    let dir = if memory.is_dir() {
        tempfile::tempdir_in(memory)
    } else {
        tempfile::tempdir()
    };
    dir.expect("there is room")
});

/// Path of a file with this name.
pub fn path(name: &str) -> PathBuf {
    DIR.path().join(name)
}

/// Creates a file of `len` zeroes, and replaces an existing one.
pub fn zeroes(name: &str, len: u64) -> PathBuf {
    let path = path(name);
    let file = File::create(&path).expect("there is room");
    file.set_len(len).expect("there is room");
    path
}
