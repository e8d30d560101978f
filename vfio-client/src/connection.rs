//! Questions to a server and its answers, each within a time limit.

use std::{
    fmt,
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    os::unix::net::UnixStream,
    path::Path,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
        SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags,
        SocketType,
    },
};
use vfio_user::Command;

use crate::wire::{self, Lie, Limits, Reply};

/// Most descriptors that one answer may carry; a region's file is one.
const MAX_DESCRIPTORS: usize = 4;

/// The conversation with a server failed.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// There is no server.
    #[error("nobody listens there: start the device's server first")]
    Connect(#[source] io::Error),
    /// It has gone.
    #[error("its server has closed the connection or died")]
    Closed,
    /// It does not answer.
    #[error("its server has not answered {command:?} within {} s", limit.as_secs())]
    Timeout {
        /// What it was asked.
        command: Command,
        /// How long it had.
        limit: Duration,
    },
    /// The socket failed.
    #[error("the connection to its server failed at {command:?}")]
    Socket {
        /// What it was asked.
        command: Command,
        /// Why.
        source: io::Error,
    },
    /// An answer cannot be right.
    #[error("its server's answer to {command:?} makes no sense")]
    Lie {
        /// What it was asked.
        command: Command,
        /// What is wrong.
        source: Lie,
    },
    /// It answered with an error.
    #[error("its server refuses {command:?}")]
    Refused {
        /// What it was asked.
        command: Command,
        /// The server's reason.
        source: io::Error,
    },
}

impl Failure {
    /// Whether the conversation can go on: the server has said no, and nothing else.
    pub fn is_refusal(&self) -> bool {
        matches!(self, Self::Refused { .. })
    }
}

/// An answer.
pub struct Answer {
    /// What follows the header.
    pub body: Vec<u8>,
    /// The descriptors that came along.
    pub descriptors: Vec<OwnedFd>,
}

/// A connection to a server: one question at a time.
pub struct Connection {
    stream: UnixStream,
    next: u16,
    limits: Limits,
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").finish_non_exhaustive()
    }
}

/// When an answer has to be there, and how long that was in the beginning.
#[derive(Clone, Copy, Debug)]
pub struct Deadline {
    at: Instant,
    limit: Duration,
}

impl Deadline {
    /// From now on.
    pub fn after(limit: Duration) -> Self {
        Self {
            at: Instant::now() + limit,
            limit,
        }
    }

    /// Waits for `flags`; false if the time is over.
    fn wait(&self, stream: &UnixStream, flags: PollFlags) -> io::Result<bool> {
        loop {
            let left = self.at.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            let left = Timespec {
                tv_sec: left.as_secs().try_into().unwrap_or(i64::MAX),
                tv_nsec: left.subsec_nanos().into(),
            };
            match poll(&mut [PollFd::new(stream, flags)], Some(&left)) {
                Ok(0) => return Ok(false),
                Ok(_) => return Ok(true),
                // A signal that has a vCPU look up; the answer is still to come.
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Connects to a server's socket, without waiting for one that accepts nobody.
pub fn connect(path: &Path) -> io::Result<UnixStream> {
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket.into())
}

impl Connection {
    /// Agrees on a version with the server at the other end of `stream`.
    pub fn new(stream: UnixStream, deadline: Deadline) -> Result<Self, Failure> {
        stream.set_nonblocking(true).map_err(Failure::Connect)?;
        let mut connection = Self {
            stream,
            next: 0,
            limits: Limits { descriptors: 1 },
        };
        let command = Command::Version;
        let answer = connection.ask(
            command,
            &[&wire::version()],
            &[],
            wire::MAX_VERSION,
            deadline,
        )?;
        connection.limits =
            wire::parse_version(&answer.body).map_err(|source| Failure::Lie { command, source })?;
        Ok(connection)
    }

    /// What the server can take in one message.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// The socket, to see when the server goes.
    pub fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Sends a message and waits for its answer, of `max` bytes at most.
    pub fn ask(
        &mut self,
        command: Command,
        body: &[&[u8]],
        descriptors: &[BorrowedFd],
        max: usize,
        deadline: Deadline,
    ) -> Result<Answer, Failure> {
        let id = self.next;
        self.next = id.wrapping_add(1);
        let exchange = Exchange {
            stream: &self.stream,
            command,
            deadline,
        };
        let len: usize = body.iter().map(|part| part.len()).sum();
        let mut message = Vec::with_capacity(wire::HEADER + len);
        // What is sent is at most as long as a guest's access, or one of the fixed messages.
        message.extend_from_slice(&wire::header(id, command, len as u32));
        body.iter().for_each(|part| message.extend_from_slice(part));
        exchange.send(&message, descriptors)?;

        let mut received = Vec::new();
        let mut header = [0; wire::HEADER];
        exchange.receive(&mut header, &mut received)?;
        let lie = |source| Failure::Lie { command, source };
        let reply = Reply::parse(&header, id, command, max).map_err(lie)?;
        let mut body = vec![0; reply.len];
        exchange.receive(&mut body, &mut received)?;
        if let Some(errno) = reply.errno {
            let source = io::Error::from_raw_os_error(errno);
            return Err(Failure::Refused { command, source });
        }
        Ok(Answer {
            body,
            descriptors: received,
        })
    }
}

struct Exchange<'a> {
    stream: &'a UnixStream,
    command: Command,
    deadline: Deadline,
}

impl Exchange<'_> {
    fn socket(&self, source: impl Into<io::Error>) -> Failure {
        let source = source.into();
        match source.kind() {
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => Failure::Closed,
            _ => Failure::Socket {
                command: self.command,
                source,
            },
        }
    }

    fn wait(&self, flags: PollFlags) -> Result<(), Failure> {
        match self.deadline.wait(self.stream, flags) {
            Ok(true) => Ok(()),
            Ok(false) => Err(Failure::Timeout {
                command: self.command,
                limit: self.deadline.limit,
            }),
            Err(error) => Err(self.socket(error)),
        }
    }

    fn send(&self, message: &[u8], descriptors: &[BorrowedFd]) -> Result<(), Failure> {
        let mut space = vec![MaybeUninit::uninit(); control_space(descriptors.len())];
        let mut sent = 0;
        while sent < message.len() {
            let mut control = SendAncillaryBuffer::new(&mut space);
            // Descriptors belong to the first byte.
            if sent == 0 && !descriptors.is_empty() {
                control.push(SendAncillaryMessage::ScmRights(descriptors));
            }
            let rest = [IoSlice::new(&message[sent..])];
            let flags = SendFlags::NOSIGNAL;
            match rustix::net::sendmsg(self.stream.as_fd(), &rest, &mut control, flags) {
                Ok(count) => sent += count,
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => self.wait(PollFlags::OUT)?,
                Err(error) => return Err(self.socket(error)),
            }
        }
        Ok(())
    }

    /// Fills `bytes`; what comes along joins `descriptors`.
    fn receive(&self, bytes: &mut [u8], descriptors: &mut Vec<OwnedFd>) -> Result<(), Failure> {
        let mut space = vec![MaybeUninit::uninit(); control_space(MAX_DESCRIPTORS)];
        let mut filled = 0;
        while filled < bytes.len() {
            // Dropped with the descriptors that nobody takes out of it.
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let rest = &mut [IoSliceMut::new(&mut bytes[filled..])];
            let flags = RecvFlags::CMSG_CLOEXEC;
            match rustix::net::recvmsg(self.stream.as_fd(), rest, &mut control, flags) {
                Ok(message) if message.bytes == 0 => return Err(Failure::Closed),
                Ok(message) => {
                    filled += message.bytes;
                    for message in control.drain() {
                        if let RecvAncillaryMessage::ScmRights(more) = message {
                            descriptors.extend(more);
                        }
                    }
                    let too_many = descriptors.len() > MAX_DESCRIPTORS;
                    if too_many || message.flags.contains(ReturnFlags::CTRUNC) {
                        return Err(Failure::Lie {
                            command: self.command,
                            source: Lie::Value {
                                what: "the number of descriptors, of which it may send fewer,",
                                value: descriptors.len() as u64,
                            },
                        });
                    }
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => self.wait(PollFlags::IN)?,
                Err(error) => return Err(self.socket(error)),
            }
        }
        Ok(())
    }
}

/// Bytes of a control message with so many descriptors.
fn control_space(descriptors: usize) -> usize {
    rustix::cmsg_space!(ScmRights(descriptors))
}
