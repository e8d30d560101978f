//! Terminates a process whose storage does not respond.
//!
//! Before the guest's memory is unmapped, devices wait for outstanding host writes to it. When the
//! process exits anyway, there is no need to wait longer than working storage can take: the kernel
//! reclaims everything.

use std::{io, sync::mpsc, thread, time::Duration};

use vmm_snapshot::writing::Seal;

/// How long dropping a machine may take when the process exits.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// How much longer a snapshot or a core dump may take to get its name. All of it is on stable storage by then, so only
/// storage that hangs takes that long.
const NAMING: Duration = Duration::from_secs(240);

/// Runs an action after a timeout, unless it is dropped before.
pub struct LastResort(
    #[expect(dead_code, reason = "the thread sees that it is dropped")] mpsc::Sender<()>,
);

impl LastResort {
    /// Runs `act` after `patience`, on a thread of its own.
    pub fn start(patience: Duration, act: impl FnOnce() + Send + 'static) -> io::Result<Self> {
        let (alive, gone) = mpsc::channel();
        let body = move || {
            if gone.recv_timeout(patience) == Err(mpsc::RecvTimeoutError::Timeout) {
                act();
            }
        };
        thread::Builder::new()
            .name("_last_resort".to_owned())
            .spawn(body)?;
        Ok(Self(alive))
    }
}

/// Ends the process. If a snapshot is taking the place of an older one, that is waited for, unless its storage hangs.
pub fn leave() {
    leave_within(NAMING);
}

fn leave_within(naming: Duration) {
    let (mut waited, mut lost) = (PATIENCE, "what it was asked to write may be lost");
    if !Seal::close(Duration::ZERO) {
        say(
            log::Level::Warn,
            format!(
                "the VMM ends when its snapshot or core dump has its name, in {naming:?} at the latest; if it is killed \
                 before, the dump is incomplete, or neither the snapshot nor an older one in the same folder can be restored"
            ),
        );
        if !Seal::close(naming) {
            waited += naming;
            lost = "the snapshot or core dump has not got its name; an older snapshot in the same folder cannot be restored";
        }
    }
    say(
        log::Level::Error,
        format!(
            "the VMM has not ended within {waited:?}: storage does not answer, and is not waited for any longer; {lost}"
        ),
    );
    devices::console::restore_terminal();
    // SAFETY: ends the process, so nothing of it is used any more.
    unsafe { libc::_exit(libc::EXIT_FAILURE) };
}

/// Logs a line. The log may be on storage that does not answer, too, or its reader may stand still: it is not waited for
/// longer than a second.
fn say(level: log::Level, text: String) {
    const LONGEST: Duration = Duration::from_secs(1);
    let (is_logged, logged) = mpsc::channel();
    let body = move || {
        log::log!(level, "{text}");
        // Nobody waits for it if that took long.
        let _ = is_logged.send(());
    };
    let started = thread::Builder::new().name("_log".to_owned()).spawn(body);
    if started.is_ok() {
        // Otherwise the line is lost, not the end.
        let _ = logged.recv_timeout(LONGEST);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmm_snapshot::writing::Writing;

    /// A log that takes no line.
    struct Hangs;

    impl log::Log for Hangs {
        fn enabled(&self, _: &log::Metadata<'_>) -> bool {
            true
        }

        fn log(&self, _: &log::Record<'_>) {
            loop {
                thread::park();
            }
        }

        fn flush(&self) {}
    }

    #[test]
    fn a_snapshot_whose_storage_hangs_and_a_log_that_does_do_not_keep_the_process() {
        // SAFETY: the child does not return to the test harness.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            // The other way to end, should it hang.
            // SAFETY: a call without pointers.
            unsafe { libc::alarm(60) };
            log::set_boxed_logger(Box::new(Hangs)).unwrap();
            log::set_max_level(log::LevelFilter::Trace);
            let _held = Writing::new(0).seal();
            leave_within(Duration::ZERO);
        }
        let mut status = 0;
        // SAFETY: waits for the child that was just made.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert!(libc::WIFEXITED(status));
        assert_eq!(libc::WEXITSTATUS(status), libc::EXIT_FAILURE);
    }

    #[test]
    fn it_acts_only_when_what_was_to_happen_has_not_happened() {
        let (acted, seen) = mpsc::channel();
        let act = move || acted.send(()).unwrap();
        let waiting = LastResort::start(Duration::from_millis(1), act).unwrap();
        seen.recv().unwrap();
        drop(waiting);
        let (acted, seen) = mpsc::channel();
        let act = move || acted.send(()).unwrap();
        drop(LastResort::start(Duration::from_secs(3600), act).unwrap());
        // Its thread has ended without acting.
        seen.recv().unwrap_err();
    }
}
