//! Detects that a server has gone while no request is in progress.

use std::{io, os::unix::net::UnixStream, thread::JoinHandle};

use device_model::thread::{ThreadRole, ThreadSpawner};
use rustix::event::{PollFd, PollFlags, poll};

/// Starts a thread that calls `gone` when the other end of `stream`, or this one, is shut down.
pub fn watch(
    stream: UnixStream,
    name: &str,
    spawner: &dyn ThreadSpawner,
    gone: impl FnOnce() + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    let body = move || {
        // Does not poll for input: that is a reply for which another thread waits.
        let mut fds = [PollFd::new(&stream, PollFlags::RDHUP)];
        while let Err(rustix::io::Errno::INTR) = poll(&mut fds, None) {}
        gone();
    };
    spawner.spawn(ThreadRole::UserDevice, name, Box::new(body))
}
