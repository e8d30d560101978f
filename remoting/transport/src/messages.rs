//! A gate without a gate: each delegation is a message to the server's process, and a reply.
//!
//! For machines without an exitless gate, to test a program and a driver over one. A delegation
//! costs two messages and two wake-ups.

use std::{
    io::{self, Read, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::Path,
    ptr::NonNull,
};

use base::Mapping;

use super::{
    gate::{Delegate, Failed},
    mapping, socket,
};

/// Size of the shared memory in bytes: the maximum of a real gate, minus a page.
const SHARED: u64 = (16 << 20) - 4096;

/// Size of a request in bytes: a handler and its arguments.
const REQUEST: usize = 24;

/// The client's end.
#[derive(Debug)]
pub struct Messages {
    stream: UnixStream,
    shared: Mapping,
    file: OwnedFd,
}

impl Messages {
    /// Connects to a server that listens at `path`.
    pub fn connect(path: &Path) -> io::Result<Self> {
        let stream = UnixStream::connect(path)?;
        let (_, files) = socket::receive(&stream, &mut [0])?;
        let refused =
            || io::Error::other("the server serves no more applications: its log says why");
        let file = files.into_iter().next().ok_or_else(refused)?;
        let shared = mapping::map(&file, 0, SHARED).map_err(io::Error::other)?;
        Ok(Self {
            stream,
            shared,
            file,
        })
    }
}

impl Delegate for Messages {
    fn delegate(&self, handler: usize, first: u64, second: u64) -> Result<u64, Failed> {
        let ended = |error: io::Error| Failed::Ended(format!("the gate's server is gone: {error}"));
        let mut request = [0; REQUEST];
        for (bytes, word) in request
            .chunks_exact_mut(8)
            .zip([handler as u64, first, second])
        {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        (&self.stream).write_all(&request).map_err(ended)?;
        let mut answer = [0; 8];
        (&self.stream).read_exact(&mut answer).map_err(ended)?;
        Ok(u64::from_le_bytes(answer))
    }

    fn shared(&self) -> NonNull<[u8]> {
        self.shared.bytes()
    }

    fn memory(&self) -> Option<(OwnedFd, u64)> {
        Some((self.file.try_clone().ok()?, 0))
    }
}

/// The server's end: shares memory, then for each message calls `handler` with an index and the
/// memory, until the client ends.
pub fn serve(
    stream: &UnixStream,
    mut handler: impl FnMut(usize, NonNull<[u8]>) -> u64,
) -> io::Result<()> {
    let file = mapping::create(SHARED).map_err(io::Error::other)?;
    let shared = mapping::map(&file, 0, SHARED).map_err(io::Error::other)?;
    socket::send(stream, &[0], &[file.as_fd()])?;
    let mut request = [0; REQUEST];
    loop {
        match (&mut &*stream).read_exact(&mut request) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            done => done?,
        }
        let mut index = [0; 8];
        index.copy_from_slice(&request[..8]);
        let index = usize::try_from(u64::from_le_bytes(index)).unwrap_or(usize::MAX);
        let answer = handler(index, shared.bytes());
        (&mut &*stream).write_all(&answer.to_le_bytes())?;
    }
}
