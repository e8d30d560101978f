//! The connection beside the rings: hellos and the files that go with them, wake-ups of a client's
//! listener, and the news that the other side has ended.

use std::{
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
};

pub use base::socket::{
    connect, listen, process, receive, receive_exact, refuse_files, send, set_blocking, user,
};

use crate::wire::hello::{self, Hello};

/// Sends a hello, with files if there are any.
pub fn send_hello(stream: &UnixStream, hello: Hello, files: &[BorrowedFd<'_>]) -> io::Result<()> {
    send(stream, &hello.to_bytes(), files)
}

/// Receives a hello, and the files that came with it.
pub fn receive_hello(stream: &UnixStream) -> io::Result<([u8; hello::SIZE], Vec<OwnedFd>)> {
    let mut bytes = [0; hello::SIZE];
    let files = receive_exact(stream, &mut bytes)?;
    Ok((bytes, files))
}

/// The hello that has come and was not read yet, if all of it has.
pub fn peek_hello(stream: impl AsFd) -> Option<[u8; hello::SIZE]> {
    peek(stream)
}

/// So many bytes that have come and were not read yet, if there are as many.
pub fn peek<const SIZE: usize>(stream: impl AsFd) -> Option<[u8; SIZE]> {
    let mut bytes = [0; SIZE];
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
    let to = bytes.as_mut_ptr().cast();
    // SAFETY: so many bytes of a local. Files that come along stay where they are.
    let count = unsafe { libc::recv(stream.as_fd().as_raw_fd(), to, bytes.len(), flags) };
    (usize::try_from(count) == Ok(bytes.len())).then_some(bytes)
}

/// Tells the client's listener that there is something for it among the answers. Never blocks: a
/// socket that is full already says so.
pub fn nudge(stream: &UnixStream) {
    // SAFETY: one byte from a constant.
    unsafe {
        libc::send(
            stream.as_raw_fd(),
            [0u8].as_ptr().cast(),
            1,
            libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT,
        );
    }
}
