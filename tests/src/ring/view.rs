//! A guest's desk as seen from its host.

use std::{fs, fs::File, os::fd::AsRawFd, path::Path, ptr::null_mut};

use anyhow::{Context, Result, ensure};
use gantry_ring_client::desk::{self, Desk, State};

/// The mapped desk. It remains accessible as long as this value lives, whatever happens to the
/// guest.
pub struct View(*mut libc::c_void);

impl View {
    /// Maps the desk in this file, which is the guest's memory.
    ///
    /// # Errors
    /// It cannot be mapped.
    pub fn of(ram: &File) -> Result<Self> {
        // SAFETY: a new mapping at an address that the kernel chooses.
        let desk = unsafe {
            libc::mmap(
                null_mut(),
                size_of::<Desk>(),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                ram.as_raw_fd(),
                desk::ADDRESS.cast_signed(),
            )
        };
        let error = std::io::Error::last_os_error();
        ensure!(
            desk != libc::MAP_FAILED,
            "cannot map the guest's memory: {error}"
        );
        Ok(Self(desk))
    }

    /// Maps the desk in the memory of this gantry's guest, which must be shared (`--memory
    /// shared=on`).
    ///
    /// # Errors
    /// There is none, or it cannot be accessed.
    pub fn of_process(id: u32) -> Result<Self> {
        let folder = format!("/proc/{id}/fd");
        for entry in fs::read_dir(&folder).with_context(|| format!("cannot read {folder}"))? {
            let path = entry?.path();
            let is_ram = |to: &Path| to.to_string_lossy().starts_with("/memfd:guest-ram");
            if fs::read_link(&path).is_ok_and(|to| is_ram(&to)) {
                return Self::of(&File::options().read(true).write(true).open(path)?);
            }
        }
        anyhow::bail!("gantry ({id}) has no shared memory of a guest")
    }

    /// The desk.
    pub fn desk(&self) -> &Desk {
        // SAFETY: mapped as long as the value lives, and page aligned. All bytes are valid, and
        // both sides only use atomics.
        unsafe { &*self.0.cast() }
    }

    /// Checks whether the guest has failed.
    ///
    /// # Errors
    /// It has; the error says why.
    pub fn check(&self) -> Result<()> {
        let text: Vec<u8> = self.desk().text().collect();
        let text = String::from_utf8_lossy(&text);
        let last = text.lines().last().unwrap_or("it says nothing");
        ensure!(self.desk().state() != State::Failed, "the guest: {last}");
        Ok(())
    }
}

impl Drop for View {
    fn drop(&mut self) {
        // SAFETY: mapped by `of`, and the desk is borrowed from this value.
        unsafe { libc::munmap(self.0, size_of::<Desk>()) };
    }
}
