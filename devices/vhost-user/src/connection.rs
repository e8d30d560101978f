//! Messages to a back end and its answers, each until a deadline.

use std::{
    io,
    os::{
        fd::{AsRawFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::Path,
    time::{Duration, Instant},
};

use base::{poll::poll, socket};
use vhost::vhost_user::message::FrontendReq;

/// Size of a message's header: request, flags and size of what follows, 32 bits each.
const HEADER: usize = 12;
/// The most descriptors that come with an answer.
const MOST_FILES: usize = 1;
/// The flags' bits with the version of the protocol, and the version.
const VERSION_MASK: u32 = 0x3;
const VERSION: u32 = 0x1;
/// Flag of an answer.
const REPLY: u32 = 1 << 2;
/// Flag of a request whose success is to be answered (`REPLY_ACK`).
const NEED_REPLY: u32 = 1 << 3;

/// Why the communication with a back end failed.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// Nobody listens.
    #[error("nobody listens there: start the device's back end first")]
    Connect(#[source] io::Error),
    /// It has closed the connection.
    #[error("its back end has closed the connection or died")]
    Closed,
    /// It does not answer.
    #[error("its back end has not answered {request:?} within {} s", limit.as_secs())]
    Timeout {
        /// The request.
        request: FrontendReq,
        /// The time limit.
        limit: Duration,
    },
    /// The socket failed.
    #[error("the connection to its back end failed at {request:?}")]
    Socket {
        /// The request.
        request: FrontendReq,
        /// The cause.
        source: io::Error,
    },
    /// An answer is invalid.
    #[error("its back end's answer to {request:?} makes no sense: {what} is {value}")]
    Lie {
        /// The request.
        request: FrontendReq,
        /// What is wrong.
        what: &'static str,
        /// Its value.
        value: u64,
    },
    /// It has answered that it failed.
    #[error("its back end refuses {request:?} (status {status})")]
    Refused {
        /// The request.
        request: FrontendReq,
        /// What it said instead of 0.
        status: u64,
    },
    /// It has sent a message that no request has asked for.
    #[error("its back end has sent what nobody has asked for")]
    Unasked,
}

/// Until when an exchange of messages may take, and the time limit that this was derived from.
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

    /// Whether it has passed.
    pub(crate) fn is_over(&self) -> bool {
        self.at <= Instant::now()
    }
}

/// A connection to a back end, which has one request in flight at a time.
#[derive(Debug)]
pub struct Connection {
    stream: UnixStream,
    /// Every request is answered (`REPLY_ACK`).
    acknowledges: bool,
}

impl Connection {
    /// Connects to the socket of a back end, without waiting for it to accept.
    ///
    /// # Errors
    /// Nobody listens, or too many wait already.
    pub fn open(path: &Path) -> Result<Self, Failure> {
        let stream = socket::connect(path).map_err(Failure::Connect)?;
        Ok(Self {
            stream,
            acknowledges: false,
        })
    }

    /// From now on, the success of every request is answered.
    pub fn set_acknowledges(&mut self) {
        self.acknowledges = true;
    }

    /// Whether the success of every request is answered.
    pub fn is_acknowledging(&self) -> bool {
        self.acknowledges
    }

    /// The socket, which becomes readable when the back end is gone.
    pub fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Sends a request without an answer of its own, and waits for it to be carried out if the back end tells.
    ///
    /// # Errors
    /// It fails, or is not answered in time. The connection cannot be used any more.
    pub fn tell(
        &mut self,
        request: FrontendReq,
        body: &[u8],
        files: &[BorrowedFd<'_>],
        deadline: Deadline,
    ) -> Result<(), Failure> {
        if !self.acknowledges {
            return self.send(request, VERSION, body, files, deadline);
        }
        self.send(request, VERSION | NEED_REPLY, body, files, deadline)?;
        match self.answer_u64(request, deadline)? {
            0 => Ok(()),
            status => Err(Failure::Refused { request, status }),
        }
    }

    /// Sends a request and receives its answer of exactly `len` bytes, without descriptors.
    ///
    /// # Errors
    /// As for [`tell`](Self::tell).
    pub fn ask(
        &mut self,
        request: FrontendReq,
        body: &[u8],
        len: usize,
        deadline: Deadline,
    ) -> Result<Vec<u8>, Failure> {
        let (body, files) = self.ask_for_files(request, body, len, deadline)?;
        match files.len() as u64 {
            0 => Ok(body),
            value => Err(Failure::Lie {
                request,
                what: "the number of descriptors",
                value,
            }),
        }
    }

    /// As [`ask`](Self::ask), with the descriptors that came with the answer.
    ///
    /// # Errors
    /// As for [`tell`](Self::tell).
    pub fn ask_for_files(
        &mut self,
        request: FrontendReq,
        body: &[u8],
        len: usize,
        deadline: Deadline,
    ) -> Result<(Vec<u8>, Vec<OwnedFd>), Failure> {
        self.send(request, VERSION, body, &[], deadline)?;
        self.answer(request, len, deadline)
    }

    /// Sends a request and receives a number.
    ///
    /// # Errors
    /// As for [`tell`](Self::tell).
    pub fn ask_u64(&mut self, request: FrontendReq, deadline: Deadline) -> Result<u64, Failure> {
        self.send(request, VERSION, &[], &[], deadline)?;
        self.answer_u64(request, deadline)
    }

    fn answer_u64(&self, request: FrontendReq, deadline: Deadline) -> Result<u64, Failure> {
        let (body, files) = self.answer(request, 8, deadline)?;
        if !files.is_empty() {
            return Err(Failure::Lie {
                request,
                what: "the number of descriptors",
                value: files.len() as u64,
            });
        }
        let mut value = [0; 8];
        value.copy_from_slice(&body);
        Ok(u64::from_ne_bytes(value))
    }

    fn send(
        &self,
        request: FrontendReq,
        flags: u32,
        body: &[u8],
        files: &[BorrowedFd<'_>],
        deadline: Deadline,
    ) -> Result<(), Failure> {
        let mut message = Vec::with_capacity(HEADER + body.len());
        // At most the table of memory regions.
        for word in [u32::from(request), flags, body.len() as u32] {
            message.extend_from_slice(&word.to_ne_bytes());
        }
        message.extend_from_slice(body);
        loop {
            match socket::send(&self.stream, &message, files) {
                Ok(()) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.wait(request, libc::POLLOUT, deadline)?;
                }
                Err(error) => return Err(failed(request, error)),
            }
        }
    }

    fn answer(
        &self,
        request: FrontendReq,
        len: usize,
        deadline: Deadline,
    ) -> Result<(Vec<u8>, Vec<OwnedFd>), Failure> {
        let mut files = Vec::new();
        let mut header = [0; HEADER];
        self.receive(request, &mut header, &mut files, deadline)?;
        let word = |at: usize| {
            let mut word = [0; 4];
            word.copy_from_slice(&header[at..at + 4]);
            u32::from_ne_bytes(word)
        };
        let (of, flags, size) = (word(0), word(4), word(8));
        let lie = |what, value: u32| {
            Err(Failure::Lie {
                request,
                what,
                value: value.into(),
            })
        };
        if of != u32::from(request) {
            return lie("the request", of);
        }
        if flags & (VERSION_MASK | REPLY) != VERSION | REPLY {
            return lie("the field of flags", flags);
        }
        if size as usize != len {
            return lie("the size", size);
        }
        let mut body = vec![0; len];
        self.receive(request, &mut body, &mut files, deadline)?;
        Ok((body, files))
    }

    /// Fills `bytes`.
    fn receive(
        &self,
        request: FrontendReq,
        bytes: &mut [u8],
        files: &mut Vec<OwnedFd>,
        deadline: Deadline,
    ) -> Result<(), Failure> {
        let mut filled = 0;
        while filled < bytes.len() {
            self.wait(request, libc::POLLIN, deadline)?;
            match socket::receive(&self.stream, &mut bytes[filled..]) {
                Ok((0, _)) => return Err(Failure::Closed),
                Ok((count, more)) => {
                    filled += count;
                    files.extend(more);
                    // A back end could keep sending them, and they are the VMM's.
                    if files.len() > MOST_FILES {
                        return Err(Failure::Lie {
                            request,
                            what: "the number of descriptors",
                            value: files.len() as u64,
                        });
                    }
                }
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock
                    ) => {}
                Err(error) => return Err(failed(request, error)),
            }
        }
        Ok(())
    }

    fn wait(&self, request: FrontendReq, events: i16, deadline: Deadline) -> Result<(), Failure> {
        loop {
            let left = deadline.at.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Failure::Timeout {
                    request,
                    limit: deadline.limit,
                });
            }
            let mut entry = libc::pollfd {
                fd: self.stream.as_raw_fd(),
                events,
                revents: 0,
            };
            match poll(std::slice::from_mut(&mut entry), Some(left)) {
                // The time is up, or a signal has come.
                Ok(0) => {}
                Ok(_) => return Ok(()),
                Err(source) => return Err(Failure::Socket { request, source }),
            }
        }
    }
}

fn failed(request: FrontendReq, source: io::Error) -> Failure {
    match source.kind() {
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => Failure::Closed,
        _ => Failure::Socket { request, source },
    }
}
