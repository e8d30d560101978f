//! Processes that do not outlive the one that has started them.

use std::io;

/// Has this process, which has just been forked and starts another program, end with the thread that has forked it, by
/// SIGKILL.
///
/// # Errors
/// That one has ended already.
pub fn end_with(parent: u32) -> io::Result<()> {
    // SAFETY: plain calls, which are async-signal-safe.
    let now = unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        libc::getppid()
    };
    // There is no signal of an end that was before this.
    match now.unsigned_abs() == parent {
        true => Ok(()),
        false => Err(io::Error::from_raw_os_error(libc::ESRCH)),
    }
}

#[cfg(test)]
mod tests {
    use std::{os::unix::process::CommandExt, process::Command};

    use super::*;

    #[test]
    fn a_process_whose_parent_has_ended_before_it_could_be_told_does_not_start() {
        let started = |parent: u32| {
            let mut command = Command::new("true");
            // SAFETY: async-signal-safe calls between fork and exec.
            unsafe { command.pre_exec(move || end_with(parent)) };
            command.status()
        };
        let this = std::process::id();
        assert!(started(this).unwrap().success());
        // Another one has taken it over.
        let refused = started(this + 1).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::ESRCH));
    }
}
