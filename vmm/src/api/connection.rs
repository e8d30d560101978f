//! One client's connection: bytes in, requests out; responses in, bytes out. Never blocks.

use std::{
    io, mem,
    os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
    time::{Duration, Instant},
};

use super::{
    ApiError, Request, Response, Status,
    http::{self, Head, Message},
    routes::{self, Refusal},
};

/// Bytes read at once.
const CHUNK: usize = 16 << 10;

/// Reads in a row before other connections get their turn.
const READS: usize = 16;

/// Descriptors that may come with a request: the queue pairs of a few network cards.
const MAX_FDS: usize = 64;

/// The most descriptors that Linux carries in one message (`SCM_MAX_FD`).
const SCM_MAX_FD: usize = 253;

/// How long a request may take to arrive, a response to leave, and a refused body to be thrown
/// away.
const TIMEOUT: Duration = Duration::from_secs(10);

/// What the connection is doing.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum State {
    /// Waiting for a request, or for the rest of one.
    Reading,
    /// A request is with the machine.
    Running {
        keep_alive: bool,
        /// It ends the VMM, which is answered with 200.
        ends: bool,
    },
    /// The response is the last; what still comes is thrown away until the client closes, so that
    /// it gets to read the response.
    Closing,
}

/// What became of a connection.
#[derive(Debug)]
pub enum Progress {
    /// It goes on.
    Open,
    /// A request has arrived.
    Request(Request),
    /// It is over.
    Closed,
}

/// One client's connection.
#[derive(Debug)]
pub struct Connection {
    socket: OwnedFd,
    state: State,
    input: Vec<u8>,
    head: Option<Head>,
    fds: Vec<OwnedFd>,
    output: Vec<u8>,
    /// Last sign of life.
    active: Instant,
    /// When the request or response in progress has to be done.
    deadline: Option<Instant>,
    end_of_input: bool,
}

impl Connection {
    /// A connection on a non-blocking socket.
    pub fn new(socket: OwnedFd, now: Instant) -> Self {
        Self {
            socket,
            state: State::Reading,
            input: Vec::new(),
            head: None,
            fds: Vec::new(),
            output: Vec::new(),
            active: now,
            deadline: None,
            end_of_input: false,
        }
    }

    /// Whether it may be closed in favour of a new one, and which is the better choice: those
    /// without a request begun first, then the least recently used.
    pub fn evictable(&self) -> Option<(bool, Instant)> {
        match self.state {
            State::Running { .. } => None,
            _ => Some((!self.input.is_empty(), self.active)),
        }
    }

    /// Whether a request is being carried out or a response on its way.
    pub fn is_busy(&self) -> bool {
        matches!(self.state, State::Running { .. }) || !self.output.is_empty()
    }

    /// When it has to be closed if nothing happens.
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Whether it waits for bytes. A client that does not read its response is not heard: what it
    /// sends meanwhile stays with the kernel.
    pub fn wants_input(&self) -> bool {
        let ready = match self.state {
            State::Reading => self.output.is_empty(),
            State::Running { .. } => false,
            State::Closing => true,
        };
        ready && !self.end_of_input
    }

    /// Whether it has bytes to send.
    pub fn wants_output(&self) -> bool {
        !self.output.is_empty()
    }

    /// Reads what has arrived.
    pub fn readable(&mut self, now: Instant) -> Progress {
        self.active = now;
        for _ in 0..READS {
            if !self.wants_input() {
                break;
            }
            match self.receive() {
                Ok(0) => self.end_of_input = true,
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => return Progress::Closed,
            }
            match self.advance(now) {
                Progress::Open => {}
                other => return other,
            }
        }
        self.flush(now)
    }

    /// Sends what there is room for.
    pub fn writable(&mut self, now: Instant) -> Progress {
        self.active = now;
        if self.send().is_err() {
            return Progress::Closed;
        }
        // The next request may wait in what has been read already (pipelining).
        match self.advance(now) {
            Progress::Open => self.flush(now),
            other => other,
        }
    }

    /// Takes the answer of the machine.
    pub fn answer(&mut self, answer: &Result<Response, ApiError>, now: Instant) -> Progress {
        let State::Running { keep_alive, ends } = self.state else {
            return Progress::Open;
        };
        let message = match answer {
            Ok(Response::Empty) if ends => Message::ok(),
            Ok(response) => Message::success(response),
            Err(error) => Message::error(error),
        };
        self.respond(&message, keep_alive, now);
        self.writable(now)
    }

    /// The deadline has passed: says so if that helps.
    pub fn expire(&mut self, now: Instant) -> Progress {
        if self.state != State::Reading || !self.output.is_empty() {
            return Progress::Closed;
        }
        let error = ApiError::message(
            Status::RequestTimeout,
            format!(
                "the request did not arrive within {} seconds",
                TIMEOUT.as_secs()
            ),
        );
        self.respond(&Message::error(&error), false, now);
        self.flush(now)
    }

    /// Sends, and says whether the connection goes on.
    fn flush(&mut self, now: Instant) -> Progress {
        if self.send().is_err() {
            return Progress::Closed;
        }
        let finished = match self.state {
            State::Running { .. } => false,
            State::Reading | State::Closing => self.end_of_input,
        };
        if finished && self.output.is_empty() {
            return Progress::Closed;
        }
        if self.state == State::Closing && self.output.is_empty() {
            // The client sees the end of the response even if it never stops sending.
            // SAFETY: no preconditions.
            unsafe { libc::shutdown(self.socket.as_raw_fd(), libc::SHUT_WR) };
        }
        let idle = self.state == State::Reading && self.input.is_empty() && self.output.is_empty();
        if idle || matches!(self.state, State::Running { .. }) {
            self.deadline = None;
        } else if self.deadline.is_none() {
            self.deadline = Some(now + TIMEOUT);
        }
        Progress::Open
    }

    fn respond(&mut self, message: &Message, keep_alive: bool, now: Instant) {
        self.output.extend(message.encode(keep_alive));
        self.state = if keep_alive {
            State::Reading
        } else {
            self.input = Vec::new();
            self.fds.clear();
            State::Closing
        };
        self.deadline = Some(now + TIMEOUT);
    }

    /// Looks for a request in what has been read.
    fn advance(&mut self, now: Instant) -> Progress {
        // A client that does not read its responses gets no further ones.
        while self.state == State::Reading && self.output.is_empty() {
            if self.head.is_none() && !self.begin(now) {
                return Progress::Open;
            }
            let Some(head) = &self.head else { continue };
            let end = head.len + head.body;
            if self.input.len() < end {
                return Progress::Open;
            }
            let Some(head) = self.head.take() else {
                continue;
            };
            let rest = self.input.split_off(end);
            let request = mem::replace(&mut self.input, rest);
            let fds = mem::take(&mut self.fds);
            let body = &request[head.len..];
            match routes::route(&head.method, &head.path, body, fds) {
                Ok(request) => {
                    let ends = matches!(request, Request::VmmShutdown);
                    let keep_alive = head.keep_alive;
                    self.state = State::Running { keep_alive, ends };
                    self.deadline = None;
                    return Progress::Request(request);
                }
                Err(Refusal { error, allow }) => {
                    let mut message = Message::error(&error);
                    if let Some(method) = allow {
                        message = message.allow(method);
                    }
                    self.respond(&message, head.keep_alive, now);
                    if self.send().is_err() {
                        return Progress::Closed;
                    }
                }
            }
        }
        Progress::Open
    }

    /// Reads the head of the next request; false if it is not complete.
    fn begin(&mut self, now: Instant) -> bool {
        match http::parse_head(&self.input) {
            Ok(None) => false,
            Ok(Some(head)) => {
                if head.expects_continue && self.input.len() < head.len + head.body {
                    self.output.extend_from_slice(http::CONTINUE);
                    // A failure shows again with the response.
                    let _ = self.send();
                }
                self.head = Some(head);
                true
            }
            Err(error) => {
                self.respond(&Message::error(&error), false, now);
                false
            }
        }
    }

    /// Sends until there is no more room.
    fn send(&mut self) -> io::Result<()> {
        while !self.output.is_empty() {
            // SAFETY: pointer and length are those of a vector.
            let sent = unsafe {
                libc::send(
                    self.socket.as_raw_fd(),
                    self.output.as_ptr().cast(),
                    self.output.len(),
                    libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT,
                )
            };
            match usize::try_from(sent) {
                Ok(sent) => drop(self.output.drain(..sent)),
                Err(_) => match io::Error::last_os_error() {
                    error if error.kind() == io::ErrorKind::Interrupted => {}
                    error if error.kind() == io::ErrorKind::WouldBlock => break,
                    error => return Err(error),
                },
            }
        }
        Ok(())
    }

    /// Reads once: bytes to `input` (nowhere when closing), descriptors to `fds`.
    fn receive(&mut self) -> io::Result<usize> {
        let mut chunk = [0_u8; CHUNK];
        let mut control = [0_u64; (SCM_MAX_FD * size_of::<RawFd>()).div_ceil(8) + 2];
        let mut vector = libc::iovec {
            iov_base: chunk.as_mut_ptr().cast(),
            iov_len: chunk.len(),
        };
        // SAFETY: zeroes are a valid message header.
        let mut message: libc::msghdr = unsafe { mem::zeroed() };
        message.msg_iov = &raw mut vector;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = size_of_val(&control);
        // SAFETY: the header points to buffers of the lengths that it says, which live on.
        let received = unsafe {
            libc::recvmsg(
                self.socket.as_raw_fd(),
                &raw mut message,
                libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT,
            )
        };
        let received = usize::try_from(received).map_err(|_| io::Error::last_os_error())?;
        let fds = take_fds(&message);
        if self.state == State::Reading {
            self.input.extend_from_slice(&chunk[..received]);
            self.fds.extend(fds);
            if self.fds.len() > MAX_FDS {
                let message = "more descriptors came with a request than it can take";
                return Err(io::Error::other(message));
            }
        }
        Ok(received)
    }
}

impl AsRawFd for Connection {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

/// Takes ownership of the descriptors of a received message.
fn take_fds(message: &libc::msghdr) -> Vec<OwnedFd> {
    let mut fds = Vec::new();
    // SAFETY: the kernel has filled in a valid header, whose control buffer is alive.
    let mut header = unsafe { libc::CMSG_FIRSTHDR(message) };
    while !header.is_null() {
        // SAFETY: CMSG_FIRSTHDR and CMSG_NXTHDR return headers inside of the buffer.
        let (level, kind, len) = unsafe {
            (
                (*header).cmsg_level,
                (*header).cmsg_type,
                (*header).cmsg_len,
            )
        };
        if level == libc::SOL_SOCKET && kind == libc::SCM_RIGHTS {
            // SAFETY: pure arithmetic.
            let start = unsafe { libc::CMSG_LEN(0) } as usize;
            for index in 0..len.saturating_sub(start) / size_of::<RawFd>() {
                // SAFETY: the kernel has written that many descriptors, all new and owned by
                // nobody else; they need not be aligned.
                fds.push(unsafe {
                    let data = libc::CMSG_DATA(header).cast::<RawFd>();
                    OwnedFd::from_raw_fd(data.add(index).read_unaligned())
                });
            }
        }
        // SAFETY: as for CMSG_FIRSTHDR.
        header = unsafe { libc::CMSG_NXTHDR(message, header) };
    }
    fds
}
