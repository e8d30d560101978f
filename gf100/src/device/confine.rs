//! What the server's process may do once it listens. It needs memory, threads, its socket and the
//! descriptors that clients send, and nothing by name. Confine it before the worker starts, which
//! inherits this.

use base::confine::{Error, ONE_THREAD, THREADS};
use libc::c_long;

/// Additional system calls for serving: eventfds that clients send are checked and duplicated.
const CLIENTS: &[c_long] = &[libc::SYS_accept, libc::SYS_dup, libc::SYS_lseek];

/// Confines this thread and the threads that it starts.
pub fn confine() -> Result<(), Error> {
    base::confine::confine(&[ONE_THREAD, THREADS, CLIENTS])
}
