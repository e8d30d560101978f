//! Non-blocking use of eventfds that another process also has.
//!
//! `O_NONBLOCK` belongs to the open file description, which is shared with every process to which a
//! descriptor was sent (`unix(7)`, `SCM_RIGHTS`): a worker or a vfio-user server may clear it at
//! any time, and a plain `read` would then block forever. Here each call itself requests not to
//! block.
//!
//! There is no such call for writes. Interrupts of devices whose eventfds are shared are raised
//! without them (`MsiVectors::raise`); doorbells are left to the kernel, and rung here by [`ring`]
//! where the kernel could not take them.

use std::{io, os::fd::AsRawFd};

use vmm_sys_util::eventfd::EventFd;

/// Reads and clears the counter of `event`, without blocking whatever its file's flags are.
///
/// # Errors
/// [`WouldBlock`](io::ErrorKind::WouldBlock) if the counter is zero. `EOPNOTSUPP` if the kernel is
/// older than Linux 5.8.
pub fn take(event: &EventFd) -> io::Result<u64> {
    /// The file's own position, which an eventfd does not have.
    const CURRENT: i64 = -1;
    let mut count = 0u64;
    let piece = libc::iovec {
        iov_base: (&raw mut count).cast(),
        iov_len: size_of::<u64>(),
    };
    // SAFETY: one vector of eight bytes, which outlive the call.
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

/// Signals `event`, unless it is already signalled.
///
/// Another process can make this block only if it fills the counter between the check and the
/// write. Use it only on threads whose blocking harms that process's user alone.
pub fn ring(event: &EventFd) {
    if !is_set(event) {
        // Fails only if the counter is full, in which case it is signalled.
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
