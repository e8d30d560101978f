//! Threads of the driver's own in a process that is the application's.

use std::thread::{self, Thread};

/// Spawns a thread that blocks all signals: those of the application are for its own threads.
pub fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> std::io::Result<Thread> {
    // SAFETY: plain calls on local signal sets.
    let old = unsafe {
        let (mut all, mut old) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const all, &raw mut old);
        old
    };
    let spawned = thread::Builder::new().name(name.to_owned()).spawn(work);
    // SAFETY: restores what was there.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const old, std::ptr::null_mut()) };
    spawned.map(|handle| handle.thread().clone())
}
