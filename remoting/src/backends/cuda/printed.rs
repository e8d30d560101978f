//! What kernels print: the driver writes it to this process's standard output when the host waits for
//! them, and the client prints it to its own.
//!
//! The standard output becomes memory of a fixed size. What does not fit is lost, as it is natively
//! where kernels print more than the device keeps. Whether there is anything is a look at its first
//! cache line, and now and then, as what is printed may begin with zeros, at the file's position.

use std::{
    io,
    os::fd::{AsRawFd, OwnedFd},
};

use base::{Access, Mapping, memfd};

/// Bytes that are kept until the client is told.
const SIZE: usize = 4 << 20;
/// Bytes of a message at most.
const MESSAGE: usize = 64 << 10;
/// The words that are looked at for something that is printed: a cache line.
const LOOK: usize = 8;
/// Of so many looks one is at the file's position.
const EVERY: u32 = 64;

/// What is known of a standard output.
#[derive(Debug)]
pub struct Printed {
    memory: Mapping,
    file: OwnedFd,
    /// Where what the client knows ends.
    told: usize,
    /// Looks that found nothing since the position was last asked for.
    looks: u32,
}

unsafe extern "C" {
    /// C's standard output, by which a driver prints.
    static mut stdout: *mut libc::FILE;
}

impl Printed {
    /// Puts memory in the place of this process's standard output, for good.
    ///
    /// # Errors
    /// There is no memory, or it cannot be limited.
    pub fn replace_output() -> io::Result<Self> {
        let file = OwnedFd::from(memfd::sealed(c"gantry-printed", SIZE as u64)?);
        let memory = Mapping::shared(&file, 0, SIZE, Access::ReadWrite)?;
        // SAFETY: plain calls on a descriptor that is open. C's stream has no buffer from here on, so that
        // nothing stays in it; no other thread of this process prints.
        unsafe {
            if libc::dup2(file.as_raw_fd(), libc::STDOUT_FILENO) < 0 {
                return Err(io::Error::last_os_error());
            }
            libc::setvbuf(stdout, std::ptr::null_mut(), libc::_IONBF, 0);
        }
        Ok(Self {
            memory,
            file,
            told: 0,
            looks: 0,
        })
    }

    fn start(&self) -> *mut u8 {
        self.memory.start()
    }

    /// What has been printed since, a message of it; none as a rule.
    pub fn take(&mut self) -> Option<Vec<u8>> {
        let words = self.start().cast::<u64>();
        // SAFETY: the first words of the mapping, which begins at a page; this process alone writes to
        // it, by the kernel.
        let seen = (0..LOOK).any(|index| unsafe { words.add(index).read_volatile() } != 0);
        if !seen && self.told == 0 && self.looks < EVERY {
            self.looks += 1;
            return None;
        }
        self.looks = 0;
        // SAFETY: plain calls on a descriptor that is open: both share one position.
        let end = unsafe { libc::lseek(self.file.as_raw_fd(), 0, libc::SEEK_CUR) };
        let end = usize::try_from(end).unwrap_or(0).min(SIZE);
        if self.told >= end {
            // All of it is told: from the beginning again.
            // SAFETY: within the mapping; nobody prints meanwhile, as the driver does so in calls.
            unsafe {
                std::ptr::write_bytes(self.start(), 0, end);
                libc::lseek(self.file.as_raw_fd(), 0, libc::SEEK_SET);
            }
            self.told = 0;
            return None;
        }
        let next = end.min(self.told + MESSAGE);
        let mut text = vec![0; next - self.told];
        // SAFETY: within the mapping.
        unsafe {
            let from = self.start().add(self.told);
            std::ptr::copy_nonoverlapping(from, text.as_mut_ptr(), text.len());
        }
        self.told = next;
        Some(text)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::ffi::c_void;

    use super::*;

    /// What a process has printed to its output, as a client is told: nothing, a line, and more than
    /// there is room for.
    fn told() -> bool {
        let Ok(mut printed) = Printed::replace_output() else {
            return false;
        };
        let print = |text: &[u8]| {
            // SAFETY: as many bytes as there are.
            unsafe {
                libc::write(
                    libc::STDOUT_FILENO,
                    text.as_ptr().cast::<c_void>(),
                    text.len(),
                )
            }
        };
        let mut all = || {
            let parts: Vec<_> = std::iter::from_fn(|| printed.take()).collect();
            parts.concat()
        };
        let nothing = all().is_empty();
        print(b"one\n");
        let one = all() == b"one\n" && all().is_empty();
        print(b"two\n");
        let two = all() == b"two\n";
        print(b"\0three\n");
        let zero = all() == b"\0three\n";
        // Zeros alone are told of some looks later.
        print(&[0; 100]);
        let zeros = (0..=EVERY).find_map(|_| Some(all()).filter(|text| !text.is_empty()));
        let zeros = zeros == Some(vec![0; 100]);
        let page = [b'x'; 4096];
        let fits = (0..SIZE / 4096 + 9)
            .filter(|_| print(&page) == 4096)
            .count();
        let full = all().len();
        print(b"three\n");
        nothing
            && one
            && two
            && zero
            && zeros
            && fits == SIZE / 4096
            && full == SIZE
            && all() == b"three\n"
    }

    #[test]
    fn what_is_printed_is_told_once_and_no_more_than_there_is_room_for() {
        // SAFETY: a process of its own, as its output is replaced; it ends at once.
        let status = unsafe {
            let child = libc::fork();
            if child == 0 {
                libc::_exit(i32::from(!told()));
            }
            let mut status = -1;
            libc::waitpid(child, &raw mut status, 0);
            status
        };
        assert_eq!(status, 0);
    }
}
