//! All connections of a device.
//!
//! The muxer never blocks: sockets are non-blocking, every buffer is bounded, and the guest's
//! packets stay in their queue while there is no room for replies.

use std::{
    collections::{BTreeMap, VecDeque},
    io::{self, Read, Write},
    os::{
        fd::{AsRawFd, FromRawFd, RawFd},
        unix::{
            ffi::OsStrExt,
            net::{UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    connection::{Connection, Got, Stage},
    packet::{HEADER, HOST_CID, Header, STREAM, op},
};

/// Maximum number of connections and handshakes.
pub const MAX_CONNECTIONS: usize = 1023;

/// Maximum number of replies that wait for the guest; packets that could cause more of them wait,
/// too.
pub const MAX_ANSWERS: usize = 2048;

/// Maximum payload of one packet to the guest.
const MAX_PAYLOAD: usize = 64 << 10;

/// Timeout for a guest to respond to a request, or to agree to a shutdown.
const PATIENCE: Duration = Duration::from_secs(2);

/// Timeout for a client to name the port that it wants.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// Maximum length of a `CONNECT` line.
const MAX_LINE: usize = 32;

/// First port that is assigned to connections of the host.
const FIRST_HOST_PORT: u32 = 1 << 30;

/// Ports of a connection: (host port, guest port).
pub type Ports = (u32, u32);

/// A change to apply to the event loop.
#[derive(Debug)]
pub enum Watch {
    /// Watch a new descriptor (edge-triggered, both directions).
    Add(RawFd, u32),
    /// Stop watching a stream, then close it.
    Remove(UnixStream, u32),
}

struct Handshake {
    stream: UnixStream,
    since: Instant,
}

/// All connections of a device.
pub struct Muxer {
    cid: u64,
    path: PathBuf,
    listener: Arc<UnixListener>,
    connections: BTreeMap<Ports, Connection>,
    handshakes: BTreeMap<u32, Handshake>,
    tokens: BTreeMap<u32, Ports>,
    next_token: u32,
    next_port: u32,
    answers: VecDeque<Header>,
    /// Connections whose sockets may have data to read, served round-robin.
    readable: VecDeque<Ports>,
    /// Changes not yet applied to the event loop.
    pub watches: Vec<Watch>,
    buffer: Vec<u8>,
    /// Something can expire: a handshake, a request, or a shutdown.
    deadlines: bool,
    /// Clients wait for a file descriptor.
    starved: bool,
    /// Clients have been rejected since there was last room for one.
    crowded: bool,
}

impl Muxer {
    pub fn new(cid: u64, path: PathBuf, listener: Arc<UnixListener>) -> Self {
        Self {
            cid,
            path,
            listener,
            connections: BTreeMap::new(),
            handshakes: BTreeMap::new(),
            tokens: BTreeMap::new(),
            next_token: 0,
            next_port: FIRST_HOST_PORT,
            answers: VecDeque::new(),
            readable: VecDeque::new(),
            watches: Vec::new(),
            buffer: vec![0; MAX_PAYLOAD],
            deadlines: false,
            starved: false,
            crowded: false,
        }
    }

    pub fn listener(&self) -> &UnixListener {
        &self.listener
    }

    /// The descriptors that a new event loop has to watch.
    pub fn watched(&self) -> Vec<(RawFd, u32)> {
        let handshakes = self
            .handshakes
            .iter()
            .map(|(token, open)| (open.stream.as_raw_fd(), *token));
        let connections = self
            .connections
            .values()
            .map(|open| (open.stream.as_raw_fd(), open.token));
        handshakes.chain(connections).collect()
    }

    pub fn connections(&self) -> usize {
        self.connections.len()
    }

    /// Closes all streams, including those being set up, without telling the guest. Clients that
    /// have not been accepted yet remain.
    pub fn forget_streams(&mut self) {
        self.connections.clear();
        self.handshakes.clear();
        self.tokens.clear();
        self.answers.clear();
        self.readable.clear();
        self.watches.clear();
        self.deadlines = false;
    }

    /// Whether [`Muxer::expire`] and [`Muxer::accept`] have to be called later. Open streams alone
    /// need no timer.
    pub fn needs_clock(&self) -> bool {
        self.deadlines || self.starved
    }

    fn is_full(&self) -> bool {
        self.connections.len() + self.handshakes.len() >= MAX_CONNECTIONS
    }

    /// Whether there is a packet for the guest.
    pub fn has_output(&self) -> bool {
        !self.answers.is_empty() || !self.readable.is_empty()
    }

    /// Whether packets from the guest can be replied to.
    pub fn has_room(&self) -> bool {
        self.answers.len() < MAX_ANSWERS
    }

    fn new_token(&mut self) -> u32 {
        loop {
            self.next_token = (self.next_token + 1) % (1 << 30);
            let token = self.next_token;
            if !self.tokens.contains_key(&token) && !self.handshakes.contains_key(&token) {
                return token;
            }
        }
    }

    /// Accepts new clients of the host, as many as there are file descriptors for. The rest wait:
    /// call it again later.
    pub fn accept(&mut self) {
        // The listener is non-blocking; an excess client is rejected immediately.
        loop {
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.starved = false;
                    return;
                }
                Err(error) => {
                    if !std::mem::replace(&mut self.starved, true) {
                        log::warn!(
                            "vsock: clients of {} have to wait: {error}; with \"too many open \
                             files\", start with a higher limit (ulimit -n, LimitNOFILE=)",
                            self.path.display()
                        );
                    }
                    return;
                }
            };
            if self.is_full() {
                if !std::mem::replace(&mut self.crowded, true) {
                    log::warn!("vsock: clients are turned away, {MAX_CONNECTIONS} are connected");
                }
                continue;
            }
            self.crowded = false;
            if stream.set_nonblocking(true).is_err() {
                continue;
            }
            self.deadlines = true;
            let token = self.new_token();
            self.watches.push(Watch::Add(stream.as_raw_fd(), token));
            self.handshakes.insert(
                token,
                Handshake {
                    stream,
                    since: Instant::now(),
                },
            );
        }
    }

    /// Handles a watched descriptor that is ready.
    pub fn ready(&mut self, token: u32, hung_up: bool) {
        if self.handshakes.contains_key(&token) {
            self.handshake(token);
        } else if let Some(&ports) = self.tokens.get(&token) {
            if hung_up && let Some(connection) = self.connections.get_mut(&ports) {
                connection.host_ended = true;
            }
            self.flush(ports);
            self.mark_readable(ports);
        }
    }

    fn mark_readable(&mut self, ports: Ports) {
        let open = self
            .connections
            .get(&ports)
            .is_some_and(|c| c.stage == Stage::Open);
        if open && !self.readable.contains(&ports) {
            self.readable.push_back(ports);
        }
    }

    /// Reads `CONNECT <port>\n`, and not a byte more.
    fn handshake(&mut self, token: u32) {
        let Some(handshake) = self.handshakes.get(&token) else {
            return;
        };
        match read_port(&handshake.stream) {
            // A guest that does not process its packets cannot be sent a request.
            Ok(Some(_)) if !self.has_room() => self.drop_handshake(token),
            Ok(Some(port)) => {
                let Some(Handshake { stream, .. }) = self.handshakes.remove(&token) else {
                    return;
                };
                let Some(host_port) = self.free_port(port) else {
                    return;
                };
                let ports = (host_port, port);
                let stage = Stage::Connecting(Instant::now());
                self.deadlines = true;
                self.connections
                    .insert(ports, Connection::new(stream, stage, token));
                self.tokens.insert(token, ports);
                self.answer(ports, op::REQUEST, 0);
            }
            Ok(None) => {}
            Err(_) => self.drop_handshake(token),
        }
    }

    fn drop_handshake(&mut self, token: u32) {
        if let Some(handshake) = self.handshakes.remove(&token) {
            self.watches.push(Watch::Remove(handshake.stream, token));
        }
    }

    fn free_port(&mut self, guest_port: u32) -> Option<u32> {
        for _ in 0..=MAX_CONNECTIONS {
            let port = self.next_port;
            self.next_port = port.checked_add(1).unwrap_or(FIRST_HOST_PORT);
            if !self.connections.contains_key(&(port, guest_port)) {
                return Some(port);
            }
        }
        None
    }

    /// Queues a packet without payload.
    fn answer(&mut self, ports: Ports, op: u16, flags: u32) {
        let (buf_alloc, fwd_cnt) = self
            .connections
            .get_mut(&ports)
            .map_or((0, 0), Connection::credit);
        let header = Header {
            src_cid: HOST_CID,
            dst_cid: self.cid,
            src_port: ports.0,
            dst_port: ports.1,
            len: 0,
            kind: STREAM,
            op,
            flags,
            buf_alloc,
            fwd_cnt,
        };
        self.answers.push_back(header);
    }

    fn remove(&mut self, ports: Ports) {
        if let Some(connection) = self.connections.remove(&ports) {
            self.tokens.remove(&connection.token);
            self.readable.retain(|other| *other != ports);
            self.watches
                .push(Watch::Remove(connection.stream, connection.token));
        }
    }

    fn reset(&mut self, ports: Ports) {
        self.remove(ports);
        self.answer(ports, op::RST, 0);
    }

    /// The next packet for the guest, for a buffer of `room` bytes; `None` if there is none.
    pub fn next_packet(&mut self, room: usize) -> Option<(Header, &[u8])> {
        if let Some(header) = self.answers.pop_front() {
            return Some((header, &[]));
        }
        let room = room.saturating_sub(HEADER).min(MAX_PAYLOAD);
        if room == 0 {
            // No room for payload: the streams keep their turns.
            return None;
        }
        while let Some(ports) = self.readable.pop_front() {
            let Some(connection) = self.connections.get_mut(&ports) else {
                continue;
            };
            match connection.read(&mut self.buffer[..room]) {
                Got::Bytes(len) => {
                    // Round-robin: the other streams come first now.
                    self.readable.push_back(ports);
                    let (buf_alloc, fwd_cnt) = connection.credit();
                    let header = Header {
                        src_cid: HOST_CID,
                        dst_cid: self.cid,
                        src_port: ports.0,
                        dst_port: ports.1,
                        // At most `MAX_PAYLOAD`.
                        len: len as u32,
                        kind: STREAM,
                        op: op::RW,
                        flags: 0,
                        buf_alloc,
                        fwd_cnt,
                    };
                    return Some((header, &self.buffer[..len]));
                }
                // It is marked again by the next event, or by the guest's next credit update.
                Got::Nothing | Got::NoCredit => {}
                Got::End => {
                    self.deadlines = true;
                    let Some(flags) = connection.tell_end() else {
                        continue;
                    };
                    self.answer(ports, op::SHUTDOWN, flags);
                    return self.answers.pop_front().map(|header| (header, &[][..]));
                }
            }
        }
        None
    }

    /// Handles a packet from the guest.
    pub fn receive(&mut self, header: &Header, payload: &[u8]) {
        if header.src_cid != self.cid || header.dst_cid != HOST_CID {
            return;
        }
        let ports = (header.dst_port, header.src_port);
        if header.kind != STREAM {
            return self.answer(ports, op::RST, 0);
        }
        if header.op == op::REQUEST {
            return self.connect(ports, header);
        }
        let Some(connection) = self.connections.get_mut(&ports) else {
            if header.op != op::RST {
                self.answer(ports, op::RST, 0);
            }
            return;
        };
        connection.update_credit(header);
        match (header.op, connection.stage) {
            (op::RESPONSE, Stage::Connecting(_)) => {
                connection.stage = Stage::Open;
                let line = format!("OK {}\n", ports.0);
                // A fresh socket has room for a line; if it is closed, the next read reports that.
                let _ = connection.stream.write_all(line.as_bytes());
            }
            (op::RST, _) => self.remove(ports),
            (op::SHUTDOWN, _) => {
                if connection.shut_down(header.flags) {
                    self.reset(ports);
                } else {
                    self.flush(ports);
                }
            }
            (op::RW, Stage::Open) => {
                if connection.accept(payload) {
                    self.flush(ports);
                } else {
                    self.reset(ports);
                }
            }
            (op::CREDIT_UPDATE, _) => {}
            (op::CREDIT_REQUEST, _) => self.answer(ports, op::CREDIT_UPDATE, 0),
            // Data that a closing host would no longer read.
            (op::RW, Stage::Closing(_)) => {}
            _ => self.reset(ports),
        }
        // Any packet may have brought credit, and the guest need not repeat it.
        self.mark_readable(ports);
    }

    /// Handles a packet from the guest with a payload that is too long or missing: its stream has a
    /// gap.
    pub fn refuse(&mut self, header: &Header) {
        if header.src_cid == self.cid && header.dst_cid == HOST_CID && header.op != op::RST {
            self.reset((header.dst_port, header.src_port));
        }
    }

    /// Handles a connection request from the guest to a port of the host.
    fn connect(&mut self, ports: Ports, header: &Header) {
        if self.connections.contains_key(&ports) {
            return self.reset(ports);
        }
        if self.is_full() {
            return self.answer(ports, op::RST, 0);
        }
        let path = socket_path(&self.path, ports.0);
        match connect(&path) {
            Ok(stream) => {
                let token = self.new_token();
                self.watches.push(Watch::Add(stream.as_raw_fd(), token));
                let mut connection = Connection::new(stream, Stage::Open, token);
                connection.update_credit(header);
                self.connections.insert(ports, connection);
                self.tokens.insert(token, ports);
                self.answer(ports, op::RESPONSE, 0);
                self.mark_readable(ports);
            }
            Err(error) => {
                log::debug!(
                    "vsock: the guest does not reach {}: {error}",
                    path.display()
                );
                self.answer(ports, op::RST, 0);
            }
        }
    }

    /// Passes the guest's bytes to the socket.
    fn flush(&mut self, ports: Ports) {
        let Some(connection) = self.connections.get_mut(&ports) else {
            return;
        };
        let news = match connection.flush() {
            Ok(()) => None,
            Err(_) => connection.stop_output(),
        };
        if connection.is_finished() {
            self.reset(ports);
        } else if let Some(flags) = news {
            self.answer(ports, op::SHUTDOWN, flags);
        } else if connection.owes_credit() {
            self.answer(ports, op::CREDIT_UPDATE, 0);
        }
    }

    /// Ends handshakes, requests and shutdowns that have timed out.
    pub fn expire(&mut self, now: Instant) {
        let late = |since: Instant, limit| now.saturating_duration_since(since) > limit;
        let over: Vec<_> = self
            .connections
            .iter()
            .filter(|(_, connection)| match connection.stage {
                Stage::Connecting(since) | Stage::Closing(since) => late(since, PATIENCE),
                Stage::Open => false,
            })
            .map(|(ports, _)| *ports)
            .collect();
        for ports in over {
            self.reset(ports);
        }
        let silent: Vec<_> = self
            .handshakes
            .iter()
            .filter(|(_, handshake)| late(handshake.since, HANDSHAKE))
            .map(|(token, _)| *token)
            .collect();
        for token in silent {
            self.drop_handshake(token);
        }
        let open = |connection: &Connection| connection.stage == Stage::Open;
        self.deadlines = !self.handshakes.is_empty() || !self.connections.values().all(open);
    }
}

/// Path of the Unix socket for a port of the host.
fn socket_path(path: &Path, port: u32) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!("_{port}"));
    PathBuf::from(name)
}

/// The port of a `CONNECT` line, once it is complete; consumes the line and nothing more.
fn read_port(stream: &UnixStream) -> io::Result<Option<u32>> {
    let mut line = [0; MAX_LINE];
    // SAFETY: the buffer outlives the call and has the given length.
    let seen = unsafe {
        libc::recv(
            stream.as_raw_fd(),
            line.as_mut_ptr().cast(),
            MAX_LINE,
            libc::MSG_PEEK,
        )
    };
    let seen = match usize::try_from(seen) {
        Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
        Ok(seen) => seen,
        Err(_) => {
            let error = io::Error::last_os_error();
            return if error.kind() == io::ErrorKind::WouldBlock {
                Ok(None)
            } else {
                Err(error)
            };
        }
    };
    let Some(end) = line[..seen].iter().position(|&byte| byte == b'\n') else {
        return if seen == MAX_LINE {
            Err(io::ErrorKind::InvalidData.into())
        } else {
            Ok(None)
        };
    };
    (&*stream).read_exact(&mut line[..=end])?;
    let port = std::str::from_utf8(&line[..end])
        .ok()
        .and_then(|text| text.strip_prefix("CONNECT "))
        .and_then(|port| port.trim().parse().ok());
    port.map(Some)
        .ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Connects without blocking: a listener with a full backlog refuses.
fn connect(path: &Path) -> io::Result<UnixStream> {
    let bytes = path.as_os_str().as_bytes();
    // SAFETY: all zeroes are a valid value of this plain struct.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    if bytes.len() >= address.sun_path.len() {
        return Err(io::ErrorKind::InvalidFilename.into());
    }
    for (slot, byte) in address.sun_path.iter_mut().zip(bytes) {
        *slot = byte.cast_signed();
    }
    let kind = libc::SOCK_STREAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: no pointers are involved.
    let fd = unsafe { libc::socket(libc::AF_UNIX, kind, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was created just now.
    let stream = unsafe { UnixStream::from_raw_fd(fd) };
    let len = size_of::<libc::sockaddr_un>() as libc::socklen_t;
    // SAFETY: the address is a sockaddr_un of that size, terminated by a zero.
    if unsafe { libc::connect(fd, (&raw const address).cast(), len) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(stream)
}
