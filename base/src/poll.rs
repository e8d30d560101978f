//! Waiting for any number of descriptors.

use std::{
    io, thread,
    time::{Duration, Instant},
};

use crate::limits::Limit;

/// Polling interval where the descriptors cannot all be polled in one call.
const BREATH: Duration = Duration::from_millis(20);

/// Waits until entries are ready, or until the timeout if there is one. Returns the number of ready
/// entries; 0 on a timeout or a signal.
///
/// The kernel refuses to poll more entries than the limit on descriptors, even if all are open. If
/// the limit was lowered below that number, the entries are polled in chunks.
pub fn poll(entries: &mut [libc::pollfd], patience: Option<Duration>) -> io::Result<usize> {
    let until = patience.and_then(|patience| Instant::now().checked_add(patience));
    loop {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        match look(entries, left) {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
            looked => return looked,
        }
        let piece = usize::try_from(Limit::now()?.soft).unwrap_or(usize::MAX);
        let mut ready = 0;
        for entries in entries.chunks_mut(piece.max(1)) {
            // The limit may have changed again; the next round handles that.
            ready += look(entries, Some(Duration::ZERO)).unwrap_or(0);
        }
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        if ready > 0 || left == Some(Duration::ZERO) {
            return Ok(ready);
        }
        thread::sleep(left.unwrap_or(BREATH).min(BREATH));
    }
}

/// Calls ppoll(2).
fn look(entries: &mut [libc::pollfd], patience: Option<Duration>) -> io::Result<usize> {
    let patience = patience.map(|patience| libc::timespec {
        tv_sec: libc::time_t::try_from(patience.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: libc::c_long::from(patience.subsec_nanos()),
    });
    let time = patience
        .as_ref()
        .map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: the array has the length that is passed; the timeout outlives the call.
    let count = unsafe {
        libc::ppoll(
            entries.as_mut_ptr(),
            entries.len() as libc::nfds_t,
            time,
            std::ptr::null(),
        )
    };
    if let Ok(count) = usize::try_from(count) {
        return Ok(count);
    }
    let error = io::Error::last_os_error();
    match error.kind() {
        io::ErrorKind::Interrupted => Ok(0),
        _ => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::Write,
        os::{fd::AsRawFd, unix::net::UnixStream},
    };

    use super::*;

    fn entry(stream: &UnixStream) -> libc::pollfd {
        libc::pollfd {
            fd: stream.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        }
    }

    /// Runs `call` in a child process, which has limits of its own. Returns whether it succeeded.
    fn in_child(call: impl FnOnce() -> bool) -> bool {
        // SAFETY: the child has this thread only, which makes system calls and ends.
        unsafe {
            let child = libc::fork();
            if child == 0 {
                libc::_exit(i32::from(!call()));
            }
            let mut status = 0;
            libc::waitpid(child, &raw mut status, 0);
            libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0
        }
    }

    #[test]
    fn of_more_than_there_may_be_descriptors_all_are_looked_at() {
        let pairs: Vec<_> = (0..9).map(|_| UnixStream::pair().unwrap()).collect();
        let mut entries: Vec<_> = pairs.iter().map(|(here, _)| entry(here)).collect();
        let (last, there) = (entries.len() - 1, &pairs[8].1);
        assert!(in_child(|| {
            let hard = Limit::now().unwrap().hard;
            Limit { soft: 4, hard }.set().unwrap();
            let none = poll(&mut entries, Some(Duration::from_millis(1)));
            (&mut &*there).write_all(&[1]).unwrap();
            let one = poll(&mut entries, None);
            none.is_ok_and(|count| count == 0)
                && one.is_ok_and(|count| count == 1)
                && entries[last].revents == libc::POLLIN
        }));
    }
}
