//! One client's connection: reads requests and writes responses, without ever blocking.

use std::{
    io, mem,
    os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
    time::{Duration, Instant},
};

use super::{
    Access, ApiError, Request, Response, Status,
    http::{self, Head, Message},
    routes::{self, Refusal},
};

/// Maximum number of bytes per read.
const CHUNK: usize = 16 << 10;

/// Maximum number of consecutive reads before other connections get their turn.
const READS: usize = 16;

/// Maximum number of descriptors with a request: enough for the queue pairs of a few network cards.
const MAX_FDS: usize = 64;

/// Maximum number of descriptors that Linux passes in one message (`SCM_MAX_FD`).
const SCM_MAX_FD: usize = 253;

/// Time limit for a request to arrive, for a response to be sent, and for a rejected body to be
/// discarded.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The only path for clients that may read metrics only.
const METRICS: &str = "/api/v1/vmm.metrics";

/// State of the connection.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum State {
    /// Waiting for a request or the rest of one.
    Reading,
    /// The machine is carrying out a request.
    Running {
        keep_alive: bool,
        /// The request ends the VMM, which is answered with 200.
        ends: bool,
    },
    /// The last response is being sent. Input is discarded until the client closes the connection,
    /// so that it can read the response.
    Closing,
}

/// Result of an operation on a connection.
#[derive(Debug)]
pub enum Progress {
    /// The connection stays open.
    Open,
    /// A request has arrived.
    Request(Request),
    /// The connection is to be closed.
    Closed,
}

/// One client's connection.
#[derive(Debug)]
pub struct Connection {
    socket: OwnedFd,
    access: Access,
    /// The client's user; not looked at for clients that may do anything, who are one user.
    user: Option<u32>,
    state: State,
    input: Vec<u8>,
    head: Option<Head>,
    fds: Vec<OwnedFd>,
    output: Vec<u8>,
    /// Time of the last activity.
    active: Instant,
    /// Deadline of the request or response in progress.
    deadline: Option<Instant>,
    end_of_input: bool,
}

impl Connection {
    /// Creates a connection on a non-blocking socket.
    pub fn new(socket: OwnedFd, access: Access, now: Instant) -> Self {
        let user = match access {
            Access::Full => None,
            Access::Metrics => base::socket::user(&socket)
                .ok()
                .map(base::socket::counted_as),
        };
        Self {
            socket,
            access,
            user,
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

    /// The client's user, if clients are limited by user.
    pub fn user(&self) -> Option<u32> {
        self.user
    }

    /// Whether it may be closed in favor of a new connection, and its rank among the candidates:
    /// connections without a partial request first, then the least recently used.
    pub fn evictable(&self) -> Option<(bool, Instant)> {
        match self.state {
            State::Running { .. } => None,
            _ => Some((!self.input.is_empty(), self.active)),
        }
    }

    /// Whether a request is being carried out or a response is being sent.
    pub fn is_busy(&self) -> bool {
        matches!(self.state, State::Running { .. }) || !self.output.is_empty()
    }

    /// When the connection must be closed if nothing happens.
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Whether it is waiting for input. As long as a client does not read its response, its input
    /// stays in the kernel's buffer.
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

    /// Reads available input.
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

    /// Sends as much as the socket accepts.
    pub fn writable(&mut self, now: Instant) -> Progress {
        self.active = now;
        if self.send().is_err() {
            return Progress::Closed;
        }
        // The next request may already be in the input buffer (pipelining).
        match self.advance(now) {
            Progress::Open => self.flush(now),
            other => other,
        }
    }

    /// Accepts the machine's reply.
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

    /// Handles an expired deadline; sends an error if that is still useful.
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

    /// Sends pending output, and returns whether the connection stays open.
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

    /// Looks for a complete request in the input buffer.
    fn advance(&mut self, now: Instant) -> Progress {
        // A client that does not read its responses gets no more of them.
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
            let request = match self.access {
                Access::Metrics if head.path != METRICS => Err(not_here(&head.path).into()),
                Access::Metrics | Access::Full => {
                    routes::route(&head.method, &head.path, body, fds)
                }
            };
            match request {
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

    /// Parses the head of the next request; returns false if it is incomplete.
    fn begin(&mut self, now: Instant) -> bool {
        match http::parse_head(&self.input) {
            Ok(None) => false,
            Ok(Some(head)) if self.access == Access::Metrics && head.body > 0 => {
                // It would have to be kept until it is complete.
                let message = "requests to a metrics socket have no body";
                let error = ApiError::message(Status::PayloadTooLarge, message);
                self.respond(&Message::error(&error), false, now);
                false
            }
            Ok(Some(head)) => {
                if head.expects_continue && self.input.len() < head.len + head.body {
                    self.output.extend_from_slice(http::CONTINUE);
                    // If this fails, sending the response will fail, too.
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

    /// Sends until the socket accepts no more.
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

    /// Reads once: bytes go to `input` (discarded when closing), descriptors to `fds`.
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
        // SAFETY: the header points to buffers of the stated lengths, which outlive the call.
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

fn not_here(path: &str) -> ApiError {
    let message = format!(
        "there is no '{path}' on a metrics socket, only {METRICS}; the API socket has everything"
    );
    ApiError::message(Status::NotFound, message)
}

/// Takes ownership of the descriptors of a received message.
fn take_fds(message: &libc::msghdr) -> Vec<OwnedFd> {
    let mut fds = Vec::new();
    // SAFETY: the kernel has filled in a valid header, whose control buffer is alive.
    let mut header = unsafe { libc::CMSG_FIRSTHDR(message) };
    while !header.is_null() {
        // SAFETY: CMSG_FIRSTHDR and CMSG_NXTHDR return headers inside the buffer.
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
                // SAFETY: the kernel has written that many descriptors, which are new and have no
                // other owner; they need not be aligned.
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
