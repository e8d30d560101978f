//! Requests to a server and its replies, each within a time limit.

use std::{
    collections::VecDeque,
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

/// Maximum number of descriptors in a reply; a region's file is one.
const MAX_DESCRIPTORS: usize = 4;

/// Maximum number of messages whose replies have not been received.
const MAX_POSTED: usize = 32;

/// Why the communication with a server failed.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// No server is listening.
    #[error("nobody listens there: start the device's server first")]
    Connect(#[source] io::Error),
    /// The server has closed the connection.
    #[error("its server has closed the connection or died")]
    Closed,
    /// The server does not reply.
    #[error("its server has not answered {command:?} within {} s", limit.as_secs())]
    Timeout {
        /// The request.
        command: Command,
        /// The time limit.
        limit: Duration,
    },
    /// The socket failed.
    #[error("the connection to its server failed at {command:?}")]
    Socket {
        /// The request.
        command: Command,
        /// Why.
        source: io::Error,
    },
    /// A reply is invalid.
    #[error("its server's answer to {command:?} makes no sense")]
    Lie {
        /// The request.
        command: Command,
        /// What is wrong.
        source: Lie,
    },
    /// The server replied with an error.
    #[error("its server refuses {command:?}")]
    Refused {
        /// The request.
        command: Command,
        /// The server's reason.
        source: io::Error,
    },
    /// The server replied with an error to an earlier message, whose reply was not awaited.
    #[error("its server has refused an earlier {command:?}")]
    RefusedPosted {
        /// The request.
        command: Command,
        /// The server's reason.
        source: io::Error,
    },
}

impl Failure {
    /// Whether the connection is still usable: the server has only refused the request.
    pub fn is_refusal(&self) -> bool {
        matches!(self, Self::Refused { .. })
    }
}

/// A reply.
pub struct Answer {
    /// The data after the header.
    pub body: Vec<u8>,
    /// The descriptors that came with it.
    pub descriptors: Vec<OwnedFd>,
}

/// A connection to a server. It has one request in flight at a time, which takes three system calls.
pub struct Connection {
    stream: UnixStream,
    next: u16,
    limits: Limits,
    /// Messages whose replies have not been received yet, in order.
    posted: VecDeque<Sent>,
}

/// A message in flight.
#[derive(Clone, Copy)]
struct Sent {
    id: u16,
    command: Command,
    /// Maximum size of its reply in bytes.
    max: usize,
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").finish_non_exhaustive()
    }
}

/// The deadline for a reply, and the time limit that it was derived from.
#[derive(Clone, Copy, Debug)]
pub struct Deadline {
    at: Instant,
    limit: Duration,
}

impl Deadline {
    /// A deadline this long from now.
    pub fn after(limit: Duration) -> Self {
        Self {
            at: Instant::now() + limit,
            limit,
        }
    }

    /// Waits for `flags`. Returns false on a timeout.
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
                // A signal wakes a vCPU thread; the reply is still to come.
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Connects to a server's socket. Does not block if the server does not accept connections.
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
    /// Negotiates the version with the server at the other end of `stream`.
    pub fn new(stream: UnixStream, deadline: Deadline) -> Result<Self, Failure> {
        stream.set_nonblocking(true).map_err(Failure::Connect)?;
        let mut connection = Self {
            stream,
            next: 0,
            limits: Limits { descriptors: 1 },
            posted: VecDeque::new(),
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

    /// The server's limits for one message.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// The socket, to notice when the server disconnects.
    pub fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Sends a message and waits for its reply of at most `max` bytes.
    pub fn ask(
        &mut self,
        command: Command,
        body: &[&[u8]],
        descriptors: &[BorrowedFd],
        max: usize,
        deadline: Deadline,
    ) -> Result<Answer, Failure> {
        let sent = self.send(command, body, descriptors, max, deadline)?;
        let mut answers = Answers::new(
            &self.stream,
            self.posted.iter().chain([&sent]).map(|sent| sent.max),
        );
        while let Some(earlier) = self.posted.pop_front() {
            answers.skip(earlier, deadline)?;
        }
        let reply = answers.reply(sent, deadline)?;
        answers.end(command)?;
        if let Some(errno) = reply.errno {
            let source = io::Error::from_raw_os_error(errno);
            return Err(Failure::Refused { command, source });
        }
        Ok(Answer {
            body: reply.body,
            descriptors: answers.descriptors,
        })
    }

    /// Sends a message whose reply of at most `max` bytes is not needed, like a posted write on PCI: one system call.
    /// The server handles messages in order, so this one has been handled when a later request is answered.
    pub fn post(
        &mut self,
        command: Command,
        body: &[&[u8]],
        max: usize,
        deadline: Deadline,
    ) -> Result<(), Failure> {
        if self.posted.len() == MAX_POSTED {
            let sizes = self.posted.iter().map(|sent| sent.max);
            let mut answers = Answers::new(&self.stream, sizes);
            while let Some(earlier) = self.posted.pop_front() {
                answers.skip(earlier, deadline)?;
            }
            answers.end(command)?;
        }
        let sent = self.send(command, body, &[], max, deadline)?;
        self.posted.push_back(sent);
        Ok(())
    }

    fn send(
        &mut self,
        command: Command,
        body: &[&[u8]],
        descriptors: &[BorrowedFd],
        max: usize,
        deadline: Deadline,
    ) -> Result<Sent, Failure> {
        let id = self.next;
        self.next = id.wrapping_add(1);
        let len: usize = body.iter().map(|part| part.len()).sum();
        let mut message = Vec::with_capacity(wire::HEADER + len);
        // The message is at most as long as a guest's access, or is one of the fixed messages.
        message.extend_from_slice(&wire::header(id, command, len as u32));
        body.iter().for_each(|part| message.extend_from_slice(part));
        let exchange = Exchange {
            stream: &self.stream,
            command,
            deadline,
        };
        exchange.send(&message, descriptors)?;
        Ok(Sent { id, command, max })
    }
}

/// The reply to one message.
struct Replied {
    body: Vec<u8>,
    errno: Option<i32>,
}

/// The replies to messages in flight, as they arrive.
struct Answers<'a> {
    stream: &'a UnixStream,
    /// Buffer with room for all of them.
    bytes: Vec<u8>,
    taken: usize,
    filled: usize,
    descriptors: Vec<OwnedFd>,
}

impl<'a> Answers<'a> {
    /// For messages whose replies have at most these sizes.
    fn new(stream: &'a UnixStream, sizes: impl Iterator<Item = usize>) -> Self {
        let room = sizes.map(|max| wire::HEADER + max).sum();
        Self {
            stream,
            bytes: vec![0; room],
            taken: 0,
            filled: 0,
            descriptors: Vec::new(),
        }
    }

    /// Receives the next reply, which must be that to `sent`.
    fn reply(&mut self, sent: Sent, deadline: Deadline) -> Result<Replied, Failure> {
        let command = sent.command;
        let exchange = Exchange {
            stream: self.stream,
            command,
            deadline,
        };
        let mut header = [0; wire::HEADER];
        header.copy_from_slice(self.next(wire::HEADER, &exchange)?);
        let lie = |source| Failure::Lie { command, source };
        let reply = Reply::parse(&header, sent.id, command, sent.max).map_err(lie)?;
        let body = self.next(reply.len, &exchange)?.to_vec();
        Ok(Replied {
            body,
            errno: reply.errno,
        })
    }

    /// Receives the reply to a message that nobody has waited for.
    fn skip(&mut self, sent: Sent, deadline: Deadline) -> Result<(), Failure> {
        let command = sent.command;
        match self.reply(sent, deadline)?.errno {
            None => Ok(()),
            Some(errno) => Err(Failure::RefusedPosted {
                command,
                source: io::Error::from_raw_os_error(errno),
            }),
        }
    }

    /// Checks that there is no further reply.
    fn end(&self, command: Command) -> Result<(), Failure> {
        match (self.filled - self.taken) as u64 {
            0 => Ok(()),
            value => Err(Failure::Lie {
                command,
                source: Lie::Value {
                    what: "the number of bytes after its answer, of which there are to be none,",
                    value,
                },
            }),
        }
    }

    /// Returns the next `len` bytes, for which there must be room.
    fn next(&mut self, len: usize, exchange: &Exchange) -> Result<&[u8], Failure> {
        let from = self.taken;
        self.taken += len;
        while self.filled < self.taken {
            let rest = &mut self.bytes[self.filled..];
            self.filled += exchange.receive(rest, &mut self.descriptors)?;
        }
        Ok(&self.bytes[from..self.taken])
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
            // Descriptors are sent with the first byte.
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

    /// Receives bytes; descriptors that come with them are added to `descriptors`.
    fn receive(&self, bytes: &mut [u8], descriptors: &mut Vec<OwnedFd>) -> Result<usize, Failure> {
        let mut space = vec![MaybeUninit::uninit(); control_space(MAX_DESCRIPTORS)];
        loop {
            // The reply has hardly ever arrived yet.
            self.wait(PollFlags::IN)?;
            // Dropping it also drops the descriptors that nobody has taken.
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let flags = RecvFlags::CMSG_CLOEXEC;
            let bytes = &mut [IoSliceMut::new(bytes)];
            match rustix::net::recvmsg(self.stream.as_fd(), bytes, &mut control, flags) {
                Ok(message) if message.bytes == 0 => return Err(Failure::Closed),
                Ok(message) => {
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
                    return Ok(message.bytes);
                }
                Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => {}
                Err(error) => return Err(self.socket(error)),
            }
        }
    }
}

/// Size in bytes of a control message with this many descriptors.
fn control_space(descriptors: usize) -> usize {
    rustix::cmsg_space!(ScmRights(descriptors))
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        thread,
    };

    use super::*;

    /// A server that waits for a group of messages and then answers them all at once. Messages with a body of 1 get an
    /// error.
    fn answering(groups: &'static [usize]) -> (Connection, thread::JoinHandle<UnixStream>) {
        let (here, mut there) = UnixStream::pair().unwrap();
        here.set_nonblocking(true).unwrap();
        let connection = Connection {
            stream: here,
            next: 0,
            limits: Limits { descriptors: 1 },
            posted: VecDeque::new(),
        };
        let serve = move || {
            for count in groups {
                let mut answers = Vec::new();
                for _ in 0..*count {
                    let mut message = [0; wire::HEADER + 1];
                    there.read_exact(&mut message).unwrap();
                    let failed = message[wire::HEADER] == 1;
                    // A reply, or an error reply.
                    message[8..12].copy_from_slice(&(1 | u32::from(failed) << 5).to_ne_bytes());
                    message[12..16].copy_from_slice(&u32::from(failed).to_ne_bytes());
                    answers.extend_from_slice(&message);
                }
                there.write_all(&answers).unwrap();
            }
            // Stays open until the test is over.
            there
        };
        (connection, thread::spawn(serve))
    }

    const COMMAND: Command = Command::RegionWrite;

    fn deadline() -> Deadline {
        Deadline::after(Duration::from_secs(60))
    }

    #[test]
    fn a_question_gets_its_own_answer_after_those_that_nobody_waits_for() {
        let (mut connection, server) = answering(&[3, 1, 33, 1]);
        for body in [2, 3] {
            connection.post(COMMAND, &[&[body]], 1, deadline()).unwrap();
        }
        let ask = |connection: &mut Connection, body| {
            let answer = connection.ask(COMMAND, &[&[body]], &[], 1, deadline());
            answer.unwrap().body
        };
        assert_eq!(ask(&mut connection, 4), [4]);
        assert_eq!(ask(&mut connection, 5), [5]);
        for _ in 0..MAX_POSTED {
            connection.post(COMMAND, &[&[6]], 1, deadline()).unwrap();
        }
        assert_eq!(ask(&mut connection, 7), [7]);
        assert_eq!(ask(&mut connection, 8), [8]);
        server.join().unwrap();
    }

    #[test]
    fn an_error_that_nobody_has_waited_for_is_no_answer_to_the_next_question() {
        let (mut connection, _server) = answering(&[2]);
        connection.post(COMMAND, &[&[1]], 1, deadline()).unwrap();
        let answer = connection.ask(COMMAND, &[&[2]], &[], 1, deadline());
        assert!(matches!(answer, Err(Failure::RefusedPosted { .. })));
    }

    #[test]
    fn what_is_posted_without_end_is_not_kept_without_end() {
        let (mut connection, server) = answering(&[MAX_POSTED, MAX_POSTED]);
        for _ in 0..=2 * MAX_POSTED {
            connection.post(COMMAND, &[&[2]], 1, deadline()).unwrap();
        }
        assert_eq!(connection.posted.len(), 1);
        server.join().unwrap();
    }
}
