//! Resource limits of the process.
//!
//! The usual soft limit of 1,024 descriptors exists for programs that use `select`. Gantry's
//! programs do not use it, so they raise the soft limit to the hard limit. Programs that they start
//! get the old limit.

use std::io;

/// A resource of this process that the kernel limits (`getrlimit(2)`).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Resource {
    /// Open descriptors.
    Files,
    /// Bytes of locked memory.
    LockedMemory,
}

/// Returns the soft and hard limits of a resource.
fn limit_of(resource: Resource) -> io::Result<Limit> {
    let resource = match resource {
        Resource::Files => libc::RLIMIT_NOFILE,
        Resource::LockedMemory => libc::RLIMIT_MEMLOCK,
    };
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the structure outlives the call, which fills it.
    match unsafe { libc::getrlimit(resource, &raw mut limit) } {
        0 => Ok(Limit {
            soft: limit.rlim_cur,
            hard: limit.rlim_max,
        }),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Makes it an error, not the end of this process and of programs that it starts, that a file becomes larger than the
/// process's limit (`RLIMIT_FSIZE`): a log or a snapshot, for example. Call it first in `main`.
pub fn file_size_is_an_error() {
    // SAFETY: ignoring a signal has no preconditions, and cannot fail for one that exists.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

/// Maximum number of bytes that this process may lock in memory; `None` if unlimited.
pub fn locked_memory() -> io::Result<Option<u64>> {
    let Limit { soft, .. } = limit_of(Resource::LockedMemory)?;
    Ok((soft != libc::RLIM_INFINITY).then_some(soft))
}

/// Limits on the number of descriptors of a process.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Limit {
    /// Current limit.
    pub soft: u64,
    /// Maximum to which the soft limit can be raised.
    pub hard: u64,
}

impl Limit {
    /// Returns the limits of this process.
    pub fn now() -> io::Result<Self> {
        limit_of(Resource::Files)
    }

    /// Sets the limits of this process. This is a single system call, so it may be used between
    /// fork and exec.
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

    /// Raises the soft limit of this process to the hard limit. Returns the previous limits.
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

    /// Number of items that fit under the hard limit if each takes `each` descriptors and `own` are
    /// used otherwise; at least one.
    pub fn room(self, own: u64, each: u64) -> usize {
        let room = self.hard.saturating_sub(own) / each;
        usize::try_from(room).unwrap_or(usize::MAX).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn the_limit_of_locked_memory_is_the_kernel_s() {
        let text = std::fs::read_to_string("/proc/self/limits").unwrap();
        let line = text
            .lines()
            .find(|line| line.starts_with("Max locked memory"));
        let soft = line.unwrap().split_whitespace().nth(3).unwrap();
        let limit = locked_memory().unwrap();
        assert_eq!(
            limit.map_or("unlimited".to_owned(), |limit| limit.to_string()),
            soft
        );
    }
}
