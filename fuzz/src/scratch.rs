//! Files of a target.

use std::{
    fs::File,
    path::{Path, PathBuf},
    sync::LazyLock,
};

use tempfile::TempDir;

/// In memory, and made once: to make and remove a file on a disk takes longer than all the rest
/// of an input.
static DIR: LazyLock<TempDir> = LazyLock::new(|| {
    let memory = Path::new("/dev/shm");
    let dir = if memory.is_dir() {
        tempfile::tempdir_in(memory)
    } else {
        tempfile::tempdir()
    };
    dir.expect("there is room")
});

/// A place for a file of that name.
pub fn path(name: &str) -> PathBuf {
    DIR.path().join(name)
}

/// A file of `len` zeroes, whatever it was before.
pub fn zeroes(name: &str, len: u64) -> PathBuf {
    let path = path(name);
    let file = File::create(&path).expect("there is room");
    file.set_len(len).expect("there is room");
    path
}
