//! Reads of eventfds that another process has as well.
//!
//! `O_NONBLOCK` belongs to the open file description, which everybody shares to whom a descriptor
//! was sent (`unix(7)`, `SCM_RIGHTS`): a worker or a vfio-user server may clear it at any time, and
//! a plain `read` would then wait for ever. Here the call itself says that it does not wait.
//!
//! There is no such call for writes. Interrupts of devices whose eventfds others hold are raised
//! without them (`MsiVectors::raise`); doorbells are left to the kernel, and rung here by [`ring`]
//! where it could not take them.

use std::{io, os::fd::AsRawFd};

use vmm_sys_util::eventfd::EventFd;

/// Takes the counter of `event`, and does not wait whatever the state of its file is.
///
/// # Errors
/// [`WouldBlock`](io::ErrorKind::WouldBlock) if the counter is zero. `EOPNOTSUPP` says that the
/// kernel is older than Linux 5.8.
pub fn take(event: &EventFd) -> io::Result<u64> {
    /// The file's own position, of which an eventfd has none.
    const CURRENT: i64 = -1;
    let mut count = 0u64;
    let piece = libc::iovec {
        iov_base: (&raw mut count).cast(),
        iov_len: size_of::<u64>(),
    };
    // SAFETY: one piece, of eight bytes that outlive the call.
    let read = unsafe {
        libc::syscall(
            libc::SYS_preadv2,
            event.as_raw_fd(),
            &raw const piece,
            1usize,
            CURRENT,
            CURRENT,
            libc::RWF_NOWAIT,
        )
    };
    match read {
        8 => Ok(count),
        0.. => Err(io::ErrorKind::UnexpectedEof.into()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Whether the counter of `event` is not zero.
pub fn is_set(event: &EventFd) -> bool {
    let mut poll = libc::pollfd {
        fd: event.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one structure, which outlives the call.
    unsafe { libc::poll(&raw mut poll, 1, 0) == 1 }
}

/// Signals `event`, unless that was done and nobody has looked since.
///
/// Another process can make this wait only if it fills the counter between the look and the write;
/// so it is for threads whose waiting costs that process's user alone.
pub fn ring(event: &EventFd) {
    if !is_set(event) {
        // Fails only if the counter is full: then it is signalled.
        let _ = event.write(1);
    }
}

#[cfg(test)]
mod tests {
    use vmm_sys_util::eventfd::EFD_NONBLOCK;

    use super::*;

    #[test]
    fn an_event_is_taken_without_waiting_whoever_has_made_it_blocking() {
        for flags in [0, EFD_NONBLOCK] {
            let event = EventFd::new(flags).unwrap();
            let nothing = take(&event).unwrap_err();
            assert_eq!(nothing.kind(), io::ErrorKind::WouldBlock);
            event.write(3).unwrap();
            assert_eq!(take(&event).unwrap(), 3);
            assert!(take(&event).is_err());
        }
    }
}
