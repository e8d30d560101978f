//! An end for processes whose storage does not let go of them.
//!
//! Devices wait for what the host still writes to the guest's memory before that goes away. When
//! the process ends, nobody needs to wait longer than storage that works can take: the kernel
//! takes everything back.

use std::{io, sync::mpsc, thread, time::Duration};

/// How long a machine may take to go away when the process ends.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Acts in the end, unless it is dropped before.
pub struct LastResort(
    #[expect(dead_code, reason = "the thread sees that it is dropped")] mpsc::Sender<()>,
);

impl LastResort {
    /// Has `act` carried out after `patience`, on a thread of its own.
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

/// Ends the process at once.
pub fn leave() {
    log::error!(
        "storage has not answered within {PATIENCE:?} and is not waited for any longer: what it \
         was asked to write may be lost"
    );
    // SAFETY: ends the process; nothing of it is used any more.
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
        // Its thread has ended without a word.
        seen.recv().unwrap_err();
    }
}
