//! The connection beside the rings: it carries hellos and their files, wakes a client's listener,
//! and shows that the other side has ended.

use std::{
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
};

use remoting_proto::wire::hello::{self, Hello};

pub use base::socket::{
    FilesLost, connect, listen, listen_privately, process, receive, receive_exact, refuse_files,
    send, set_blocking, user,
};

/// Sends a hello, with files if there are any.
pub fn send_hello(stream: &UnixStream, hello: Hello, files: &[BorrowedFd<'_>]) -> io::Result<()> {
    send(stream, &hello.to_bytes(), files)
}

/// Receives a hello with its files.
pub fn receive_hello(stream: &UnixStream) -> io::Result<([u8; hello::SIZE], Vec<OwnedFd>)> {
    let mut bytes = [0; hello::SIZE];
    let files = receive_exact(stream, &mut bytes)?;
    Ok((bytes, files))
}

/// The next hello, without consuming it, if it has arrived completely.
pub fn peek_hello(stream: impl AsFd) -> Option<[u8; hello::SIZE]> {
    peek(stream)
}

/// The next `SIZE` bytes, without consuming them, if as many have arrived.
pub fn peek<const SIZE: usize>(stream: impl AsFd) -> Option<[u8; SIZE]> {
    let mut bytes = [0; SIZE];
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
    let to = bytes.as_mut_ptr().cast();
    // SAFETY: as many bytes as the local has. Files that come along stay in the socket.
    let count = unsafe { libc::recv(stream.as_fd().as_raw_fd(), to, bytes.len(), flags) };
    (usize::try_from(count) == Ok(bytes.len())).then_some(bytes)
}

/// Tells the client's listener that the answers hold something for it. Never blocks: a full socket
/// already tells it.
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
