//! The output of kernels: the driver writes it to this process's standard output when the host waits for them, and the
//! client prints it to its own.
//!
//! Standard output becomes a memory buffer of fixed size. What does not fit is lost, just as it is natively when
//! kernels print more than the device's buffer holds. To check for output, this reads the first cache line of the
//! buffer and occasionally, as output may begin with zeros, queries the file position.

use std::{
    io,
    os::fd::{AsRawFd, OwnedFd},
};

use base::{Access, Mapping, memfd};

/// Buffer size in bytes for output that the client has not received yet.
const SIZE: usize = 4 << 20;
/// Maximum size of a message in bytes.
const MESSAGE: usize = 64 << 10;
/// The number of words checked for output: one cache line.
const LOOK: usize = 8;
/// One check in this many queries the file position.
const EVERY: u32 = 64;

/// The state of a redirected standard output.
#[derive(Debug)]
pub struct Printed {
    memory: Mapping,
    file: OwnedFd,
    /// End of the output that the client has received.
    told: usize,
    /// Checks without output since the position was last queried.
    looks: u32,
}

unsafe extern "C" {
    /// C's standard output, through which a driver prints.
    static mut stdout: *mut libc::FILE;
}

impl Printed {
    /// Replaces this process's standard output with memory, permanently.
    ///
    /// # Errors
    /// There is no memory, or its size cannot be sealed.
    pub fn replace_output() -> io::Result<Self> {
        let file = OwnedFd::from(memfd::sealed(c"gantry-printed", SIZE as u64)?);
        let memory = Mapping::shared(&file, 0, SIZE, Access::ReadWrite)?;
        // SAFETY: plain calls on an open descriptor. C's stream is unbuffered from now on, so that nothing stays in it;
        // no other thread of this process prints.
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

    /// Takes new output, at most one message of it; usually there is none.
    pub fn take(&mut self) -> Option<Vec<u8>> {
        let words = self.start().cast::<u64>();
        // SAFETY: the first words of the mapping, which is page-aligned. Only this process writes to it, through the
        // kernel.
        let seen = (0..LOOK).any(|index| unsafe { words.add(index).read_volatile() } != 0);
        if !seen && self.told == 0 && self.looks < EVERY {
            self.looks += 1;
            return None;
        }
        self.looks = 0;
        // SAFETY: plain calls on an open descriptor; both descriptors share one position.
        let end = unsafe { libc::lseek(self.file.as_raw_fd(), 0, libc::SEEK_CUR) };
        let end = usize::try_from(end).unwrap_or(0).min(SIZE);
        if self.told >= end {
            // All output has been delivered: start over at the beginning.
            // SAFETY: within the mapping; nobody prints meanwhile, since the driver prints only during calls.
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

#[cfg(test)]
mod tests {
    use std::ffi::c_void;

    use super::*;

    /// Checks what a process's output yields: nothing, a line, and more than fits.
    fn told() -> bool {
        let Ok(mut printed) = Printed::replace_output() else {
            return false;
        };
        let print = |text: &[u8]| {
            // SAFETY: `text` has that many bytes.
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
        // Zeros alone are noticed some checks later.
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
        // SAFETY: the child is a process of its own, since its output is replaced; it ends at once.
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
