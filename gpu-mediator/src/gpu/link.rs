//! Packets between a front and the mediator: each is one message, with its descriptors.

use std::{
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::Path,
    time::Duration,
};

use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen, socket_with,
};

use super::wire::MOST;

/// How long a front waits for room in its connection.
const PATIENCE: Duration = Duration::from_secs(10);

fn socket(flags: SocketFlags) -> io::Result<OwnedFd> {
    let flags = flags | SocketFlags::CLOEXEC;
    Ok(socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        flags,
        None,
    )?)
}

/// The socket to which fronts connect.
pub struct Listener(OwnedFd);

impl Listener {
    /// Listens at a path. A stale socket that nobody listens on is replaced.
    pub fn bind(path: &Path) -> io::Result<Self> {
        let address = SocketAddrUnix::new(path)?;
        let refused = rustix::net::connect(socket(SocketFlags::NONBLOCK)?, &address);
        if refused == Err(rustix::io::Errno::CONNREFUSED) {
            std::fs::remove_file(path)?;
        }
        let fd = socket(SocketFlags::NONBLOCK)?;
        bind(&fd, &address)?;
        listen(&fd, 16)?;
        Ok(Self(fd))
    }

    /// Accepts the next front, if one is waiting.
    pub fn accept(&self) -> io::Result<Packets> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        Ok(Packets(accept_with(&self.0, flags)?.into()))
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A connection.
#[derive(Debug)]
pub struct Packets(UnixStream);

/// A received message.
pub struct Packet {
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// Descriptors that came with it.
    pub files: Vec<OwnedFd>,
}

impl Packets {
    /// Connects to the mediator. The connection is blocking.
    pub fn connect(path: &Path) -> io::Result<Self> {
        // If the mediator does not accept connections, this is an error and does not wait.
        let fd = socket(SocketFlags::NONBLOCK)?;
        rustix::net::connect(&fd, &SocketAddrUnix::new(path)?)?;
        let stream = UnixStream::from(fd);
        base::socket::set_blocking(&stream, true)?;
        // A stalled mediator loses the connection, since the sender holds a lock.
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(Self(stream))
    }

    /// Creates a connected pair; only the first end is non-blocking.
    pub fn pair() -> io::Result<(Self, Self)> {
        let (here, there) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        rustix::io::ioctl_fionbio(&here, true)?;
        Ok((Self(here.into()), Self(there.into())))
    }

    /// Sends a message.
    pub fn send(&self, message: &[u8], files: &[BorrowedFd<'_>]) -> io::Result<()> {
        loop {
            match base::socket::send(&self.0, message, files) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                sent => return sent,
            }
        }
    }

    /// Receives a message; `None` if the peer has disconnected. `WouldBlock` if the connection is
    /// non-blocking and there is no message.
    pub fn receive(&self) -> io::Result<Option<Packet>> {
        let mut bytes = vec![0; MOST + 1];
        let (count, files) = loop {
            match base::socket::receive(&self.0, &mut bytes) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                received => break received?,
            }
        };
        if count > MOST {
            return Err(io::ErrorKind::InvalidData.into());
        }
        bytes.truncate(count);
        Ok((count > 0).then_some(Packet { bytes, files }))
    }

    /// Shuts the connection down; a receiver notices this.
    pub fn shut_down(&self) {
        // It may be shut down already.
        let _ = self.0.shutdown(std::net::Shutdown::Both);
    }

    /// Returns another handle of the connection.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self(self.0.try_clone()?))
    }
}

impl AsFd for Packets {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
