//! What the server's process may do once it listens: it needs memory, threads, its socket and the
//! descriptors that clients send, and nothing by its name. This comes before the worker, which inherits it.

use base::confine::{Error, ONE_THREAD, THREADS};
use libc::c_long;

/// What serving takes besides: eventfds that clients send are looked at and copied.
const CLIENTS: &[c_long] = &[libc::SYS_accept, libc::SYS_dup, libc::SYS_lseek];

/// Confines this thread and those that it starts.
pub fn confine() -> Result<(), Error> {
    base::confine::confine(&[ONE_THREAD, THREADS, CLIENTS])
}
