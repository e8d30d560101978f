//! The driver's own threads in the application's process.

use std::thread::{self, Thread};

/// Spawns a thread that blocks all signals: the application's signals are for its own threads.
pub fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> std::io::Result<Thread> {
    // SAFETY: plain calls on local signal sets.
    let old = unsafe {
        let (mut all, mut old) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const all, &raw mut old);
        old
    };
    let spawned = thread::Builder::new().name(name.to_owned()).spawn(work);
    // SAFETY: restores the previous mask.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const old, std::ptr::null_mut()) };
    spawned.map(|handle| handle.thread().clone())
}
