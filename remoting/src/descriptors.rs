//! How many file descriptors a process may have that serves many, and waiting for all of them.
//!
//! The usual soft limit of 1,024 exists for programs that use `select`. What is here does not, and
//! takes what the hard limit allows; programs that it starts have the old limit.

use std::{
    io, thread,
    time::{Duration, Instant},
};

/// How long nothing is looked at where not all can be waited for together.
const BREATH: Duration = Duration::from_millis(20);

/// How many descriptors a process may have.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Limit {
    /// Now.
    pub soft: u64,
    /// At most.
    pub hard: u64,
}

impl Limit {
    /// That of this process.
    pub fn now() -> io::Result<Self> {
        let mut limit = libc::rlimit {
            rlim_cur: 0,
            rlim_max: 0,
        };
        // SAFETY: the structure outlives the call, which fills it.
        match unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } {
            0 => Ok(Self {
                soft: limit.rlim_cur,
                hard: limit.rlim_max,
            }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Makes it that of this process. Also between fork and exec: a system call, and nothing else.
    pub fn set(self) -> io::Result<()> {
        let limit = libc::rlimit {
            rlim_cur: self.soft,
            rlim_max: self.hard,
        };
        // SAFETY: the structure outlives the call, which reads it.
        match unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Raises the soft limit of this process up to the hard one. The limit before.
    pub fn raise() -> io::Result<Self> {
        let before = Self::now()?;
        if before.soft < before.hard {
            Self {
                soft: before.hard,
                ..before
            }
            .set()?;
        }
        Ok(before)
    }

    /// How many that take `each` descriptors the hard limit has room for, beside `own`; one at
    /// least.
    pub fn room(self, own: u64, each: u64) -> usize {
        let room = self.hard.saturating_sub(own) / each;
        usize::try_from(room).unwrap_or(usize::MAX).max(1)
    }
}

/// Waits until something has happened, for some time if that is bounded: how many entries say so.
/// None if the time is over or a signal has come.
///
/// The kernel refuses to look at more entries than there may be descriptors, also at those that are
/// open. If somebody has lowered the limit below that, they are looked at piece by piece.
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
            // The limit may be another one by now: the next time.
            ready += look(entries, Some(Duration::ZERO)).unwrap_or(0);
        }
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        if ready > 0 || left == Some(Duration::ZERO) {
            return Ok(ready);
        }
        thread::sleep(left.unwrap_or(BREATH).min(BREATH));
    }
}

/// The system call.
fn look(entries: &mut [libc::pollfd], patience: Option<Duration>) -> io::Result<usize> {
    let patience = patience.map(|patience| libc::timespec {
        tv_sec: libc::time_t::try_from(patience.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: libc::c_long::from(patience.subsec_nanos()),
    });
    let time = patience
        .as_ref()
        .map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: the array is as long as is said; the time outlives the call.
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

#[cfg(all(test, not(loom)))]
#[allow(clippy::unwrap_used)]
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

    /// Calls in a child process, whose limit is its own; whether it is as it should be.
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

    #[test]
    fn the_soft_limit_rises_to_the_hard_one_and_falls_again() {
        assert!(in_child(|| {
            let hard = Limit::now().unwrap().hard;
            let low = Limit { soft: 32, hard };
            low.set().unwrap();
            let before = Limit::raise().unwrap();
            let raised = Limit::now().unwrap();
            before.set().unwrap();
            before == low && raised == Limit { soft: hard, hard } && Limit::now().unwrap() == low
        }));
    }

    #[test]
    fn there_is_room_for_one_at_least() {
        let of = |hard| Limit { soft: 10, hard }.room(64, 3);
        assert_eq!((of(0), of(66), of(67), of(73)), (1, 1, 1, 3));
        assert!(of(u64::MAX) > 1 << 60);
    }
}
