//! The ends of this process's children. They are waited for in one place: a thread that waits for all of them must not
//! take the exit status of the one that another thread needs.

use std::{
    io,
    os::{
        fd::{FromRawFd, OwnedFd},
        unix::process::ExitStatusExt,
    },
    process::{Command, ExitStatus},
    sync::Mutex,
};

use base::Unpoisoned;

/// Children whose exit status is needed, and that status once it is known.
static KEPT: Mutex<Vec<(libc::pid_t, Option<ExitStatus>)>> = Mutex::new(Vec::new());

/// Waits for a child that has ended, without blocking. `which` selects children as in waitpid(2). Returns zero if none
/// has ended, and a negative number if there are none.
pub fn ended(which: libc::pid_t) -> libc::pid_t {
    let mut kept = KEPT.lock_unpoisoned();
    let mut status = 0;
    // SAFETY: the kernel writes a local.
    let ended = unsafe { libc::waitpid(which, &raw mut status, libc::WNOHANG) };
    if let Some((_, known)) = kept.iter_mut().find(|(child, _)| *child == ended) {
        *known = Some(ExitStatus::from_raw(status));
    }
    ended
}

/// Readable when the process with this ID, of which there may be none, has ended.
pub fn end_of(process: libc::pid_t) -> Option<OwnedFd> {
    // SAFETY: a call without pointers.
    let file = unsafe { libc::syscall(libc::SYS_pidfd_open, process, 0) };
    let file = i32::try_from(file).ok().filter(|file| *file >= 0)?;
    // SAFETY: a new descriptor without another owner.
    Some(unsafe { OwnedFd::from_raw_fd(file) })
}

/// A child whose exit status is kept until it is asked for.
pub struct Kept {
    process: libc::pid_t,
    /// Readable when it has ended.
    pub end: OwnedFd,
}

impl Kept {
    /// Starts a command.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(command: &mut Command) -> io::Result<Self> {
        // Whoever started this process may have had it ignored, and then there would be no status.
        // SAFETY: the usual action of a signal.
        unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
        let mut kept = KEPT.lock_unpoisoned();
        let process = command.spawn()?.id().cast_signed();
        kept.push((process, None));
        drop(kept);
        match end_of(process) {
            Some(end) => Ok(Self { process, end }),
            None => {
                let error = io::Error::last_os_error();
                forget(process);
                Err(error)
            }
        }
    }

    /// Its exit status. `None`: it still runs.
    pub fn status(&self) -> Option<ExitStatus> {
        ended(self.process);
        let kept = KEPT.lock_unpoisoned();
        kept.iter().find(|(child, _)| *child == self.process)?.1
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        forget(self.process);
    }
}

fn forget(process: libc::pid_t) {
    let mut kept = KEPT.lock_unpoisoned();
    kept.retain(|(child, _)| *child != process);
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt;

    use super::*;

    #[test]
    fn a_status_is_known_where_ends_of_children_were_ignored() {
        let mut own = Command::new(std::env::current_exe().unwrap());
        own.args([
            "--exact",
            "--ignored",
            "children::tests::a_status_is_known_again",
        ]);
        // SAFETY: no handler, and nothing of this process.
        unsafe {
            own.pre_exec(|| {
                libc::signal(libc::SIGCHLD, libc::SIG_IGN);
                Ok(())
            })
        };
        let done = own.output().unwrap();
        assert!(done.status.success(), "{done:?}");
        assert!(
            String::from_utf8_lossy(&done.stdout).contains("1 passed"),
            "{done:?}"
        );
    }

    #[test]
    #[ignore = "run by the test above, with a signal ignored"]
    fn a_status_is_known_again() {
        let child = Kept::start(Command::new("sh").args(["-c", "exit 7"])).unwrap();
        let mut polled = libc::pollfd {
            fd: std::os::fd::AsRawFd::as_raw_fd(&child.end),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one pollfd.
        assert_eq!(unsafe { libc::poll(&raw mut polled, 1, 60_000) }, 1);
        assert_eq!(child.status().unwrap().code(), Some(7));
    }

    #[test]
    fn a_status_is_known_after_another_thread_has_reaped_the_child() {
        let child = Kept::start(Command::new("sh").args(["-c", "exit 7"])).unwrap();
        // As a thread does that waits for all children.
        while ended(child.process) == 0 {
            std::thread::yield_now();
        }
        assert_eq!(child.status().unwrap().code(), Some(7));
    }
}
