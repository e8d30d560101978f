//! What the first process of a guest does before all else.

use std::{arch::asm, ffi::CStr};

use anyhow::{Result, ensure};

/// The machine's debug console.
const TEXT: u16 = 0xe9;

/// Prints a line to the machine's debug console.
pub fn print(text: &str) {
    for byte in text.bytes().chain([b'\n']) {
        // SAFETY: the machine's port.
        unsafe { asm!("out dx, al", in("dx") TEXT, in("al") byte) };
    }
}

/// Mounts what programs expect, except /proc.
pub fn mount_all() -> Result<()> {
    mount(c"devtmpfs", c"/dev")?;
    mount(c"sysfs", c"/sys")?;
    mount(c"tmpfs", c"/tmp")
}

/// Mounts a file system of this kind, and makes the folder.
pub fn mount(kind: &CStr, to: &CStr) -> Result<()> {
    // SAFETY: zero-terminated strings.
    let done = unsafe {
        libc::mkdir(to.as_ptr(), 0o755);
        libc::mount(
            kind.as_ptr(),
            to.as_ptr(),
            kind.as_ptr(),
            0,
            std::ptr::null(),
        )
    };
    ensure!(
        done == 0,
        "cannot mount {kind:?}: {}",
        std::io::Error::last_os_error()
    );
    Ok(())
}
