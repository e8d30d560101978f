//! Terminates a process whose storage does not respond.
//!
//! Before the guest's memory is unmapped, devices wait for outstanding host writes to it. When the
//! process exits anyway, there is no need to wait longer than working storage can take: the kernel
//! reclaims everything.

use std::{io, sync::mpsc, thread, time::Duration};

use crate::snapshot::writing::Seal;

/// How long dropping a machine may take when the process exits.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Interval for looking at a snapshot.
const LOOK: Duration = Duration::from_millis(100);

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

/// Ends the process, unless a snapshot is taking the place of an older one: that is waited for.
pub fn leave() {
    if !Seal::close() {
        log::warn!("the VMM ends when its snapshot has taken the place of the older one");
        while !Seal::close() {
            thread::sleep(LOOK);
        }
    }
    log::error!(
        "the VMM has not ended within {PATIENCE:?}: storage does not answer, and is not waited for any longer; what \
         it was asked to write may be lost"
    );
    devices::console::restore_terminal();
    // SAFETY: ends the process, so nothing of it is used any more.
    unsafe { libc::_exit(libc::EXIT_FAILURE) };
}

#[cfg(test)]
mod tests {
    use super::*;

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
