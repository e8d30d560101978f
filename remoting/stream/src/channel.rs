//! A connection that carries bytes, plain or with TLS. One half reads and the other writes, each in
//! a thread of its own.

use std::{
    io::{self, Read, Write},
    os::fd::{AsRawFd, OwnedFd},
    sync::{Arc, Mutex, MutexGuard},
    time::{Duration, Instant},
};

use base::Unpoisoned;
use remoting_proto::wire::hello;
use rustls::{Connection, IoState};

use super::tls;

/// Maximum bytes read from a TLS connection at a time.
const READ: usize = 64 << 10;
/// How long the peer of a refused connection has to read the reason.
const LINGER: Duration = Duration::from_millis(500);

/// A socket with timeouts. Its flags determine whether it blocks; the timeout applies in any case.
#[derive(Debug)]
pub struct Socket {
    fd: OwnedFd,
}

impl Socket {
    /// Wraps a connected, blocking stream socket.
    pub fn new(fd: OwnedFd) -> Self {
        Self { fd }
    }

    /// Waits until the socket is ready or the deadline has passed.
    fn ready(&self, events: libc::c_short, until: Instant) -> io::Result<()> {
        loop {
            let left = until.saturating_duration_since(Instant::now());
            // Checked even if there is data: a peer that always sends gets no more time than
            // others.
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let mut polled = libc::pollfd {
                fd: self.fd.as_raw_fd(),
                events,
                revents: 0,
            };
            // Rounded up, so that the last wait is not zero; far below the maximum.
            let left = left.as_millis().min(60_000) as libc::c_int + 1;
            // SAFETY: one entry, as is said.
            match unsafe { libc::poll(&raw mut polled, 1, left) } {
                0 => return Err(io::ErrorKind::TimedOut.into()),
                1 => return Ok(()),
                _ => {
                    let error = io::Error::last_os_error();
                    if error.kind() != io::ErrorKind::Interrupted {
                        return Err(error);
                    }
                }
            }
        }
    }

    fn receive(&self, into: &mut [u8], flags: libc::c_int) -> io::Result<usize> {
        loop {
            // SAFETY: the kernel writes at most as many bytes as `into` has.
            let got = unsafe {
                libc::recv(
                    self.fd.as_raw_fd(),
                    into.as_mut_ptr().cast(),
                    into.len(),
                    flags,
                )
            };
            match got {
                0.. => return Ok(got.unsigned_abs()),
                _ => {
                    let error = io::Error::last_os_error();
                    if error.kind() != io::ErrorKind::Interrupted {
                        return Err(error);
                    }
                }
            }
        }
    }

    fn send(&self, from: &[u8], flags: libc::c_int) -> io::Result<usize> {
        loop {
            let flags = flags | libc::MSG_NOSIGNAL;
            // SAFETY: the kernel reads as many bytes as `from` has.
            let sent =
                unsafe { libc::send(self.fd.as_raw_fd(), from.as_ptr().cast(), from.len(), flags) };
            match sent {
                0.. => return Ok(sent.unsigned_abs()),
                _ => {
                    let error = io::Error::last_os_error();
                    if error.kind() != io::ErrorKind::Interrupted {
                        return Err(error);
                    }
                }
            }
        }
    }

    fn shut_down(&self, how: libc::c_int) {
        // SAFETY: a plain call on an open descriptor.
        unsafe { libc::shutdown(self.fd.as_raw_fd(), how) };
    }

    /// Lets the peer read the last message: closing a connection with unread bytes resets it, and
    /// data in flight is lost.
    fn linger(&self) {
        self.shut_down(libc::SHUT_WR);
        let until = Instant::now() + LINGER;
        let mut bytes = [0; 4096];
        while self.ready(libc::POLLIN, until).is_ok() {
            if !matches!(self.receive(&mut bytes, libc::MSG_DONTWAIT), Ok(1..)) {
                return;
            }
        }
    }
}

/// A socket with a deadline.
struct Until<'a>(&'a Socket, Instant);

impl Read for Until<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.0.ready(libc::POLLIN, self.1)?;
        self.0.receive(into, libc::MSG_DONTWAIT)
    }
}

impl Write for Until<'_> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.0.ready(libc::POLLOUT, self.1)?;
        self.0.send(from, libc::MSG_DONTWAIT)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[derive(Debug)]
struct Shared {
    socket: Socket,
    tls: Option<Mutex<Connection>>,
}

fn lock(connection: &Mutex<Connection>) -> MutexGuard<'_, Connection> {
    connection.lock_unpoisoned()
}

/// A connection whose ends have not exchanged hellos yet.
#[derive(Debug)]
pub struct Channel {
    shared: Shared,
}

impl Channel {
    /// Without TLS.
    pub fn plain(socket: Socket) -> Self {
        Self {
            shared: Shared { socket, tls: None },
        }
    }

    /// The identity of a server's peer, if it uses TLS.
    pub fn subject(&self, server: &tls::Server) -> Option<[u8; 32]> {
        server.subject(&lock(self.shared.tls.as_ref()?))
    }

    /// With TLS. When this returns, each side has authenticated the other; fails after `until`.
    pub fn secure(socket: Socket, mut tls: Connection, until: Instant) -> io::Result<Self> {
        let mut timed = Until(&socket, until);
        while tls.is_handshaking() {
            if let Err(error) = tls.complete_io(&mut timed) {
                // Lets the peer receive the reason.
                socket.linger();
                return Err(error);
            }
        }
        let tls = Some(Mutex::new(tls));
        Ok(Self {
            shared: Shared { socket, tls },
        })
    }

    /// Sends a hello.
    pub fn send_hello(&self, bytes: &[u8; hello::SIZE], until: Instant) -> io::Result<()> {
        let mut timed = Until(&self.shared.socket, until);
        let Some(tls) = &self.shared.tls else {
            return timed.write_all(bytes);
        };
        let mut tls = lock(tls);
        tls.writer().write_all(bytes)?;
        while tls.wants_write() {
            tls.write_tls(&mut timed)?;
        }
        Ok(())
    }

    /// Receives the peer's hello, until `until` at the latest. Returns
    /// [`UnexpectedEof`](io::ErrorKind) if the peer closed the connection without sending a byte.
    pub fn receive_hello(&self, until: Instant) -> io::Result<[u8; hello::SIZE]> {
        let mut timed = Until(&self.shared.socket, until);
        let mut bytes = [0; hello::SIZE];
        let mut got = 0;
        while got < bytes.len() {
            let count = match &self.shared.tls {
                None => timed.read(&mut bytes[got..])?,
                Some(tls) => decrypted(&mut lock(tls), &mut timed, &mut bytes[got..])?,
            };
            match count {
                0 if got == 0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                0 => {
                    let why = format!("a hello ended after {got} bytes");
                    return Err(io::Error::new(io::ErrorKind::InvalidData, why));
                }
                _ => got += count,
            }
        }
        Ok(bytes)
    }

    /// Closes a connection so that the peer receives what it was sent.
    pub fn refuse(self) {
        self.shared.socket.linger();
    }

    /// The connection's descriptor.
    pub fn fd(&self) -> &OwnedFd {
        &self.shared.socket.fd
    }

    /// Splits the connection into its two halves.
    pub fn split(self) -> (Reader, Writer) {
        let shared = Arc::new(self.shared);
        let secret = if shared.tls.is_some() { READ } else { 0 };
        let reader = Reader {
            shared: Arc::clone(&shared),
            secret: vec![0; secret].into_boxed_slice(),
            start: 0,
            end: 0,
        };
        let writer = Writer {
            shared,
            secret: Vec::new(),
        };
        (reader, writer)
    }
}

/// Reads decrypted bytes; zero if the peer has closed the connection.
fn decrypted(tls: &mut Connection, timed: &mut Until, into: &mut [u8]) -> io::Result<usize> {
    loop {
        match tls.reader().read(into) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            done => return done,
        }
        if tls.read_tls(timed)? == 0 {
            return Ok(0);
        }
        process(tls)?;
    }
}

fn process(tls: &mut Connection) -> io::Result<IoState> {
    tls.process_new_packets()
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

/// The reading half.
#[derive(Debug)]
pub struct Reader {
    shared: Arc<Shared>,
    /// Encrypted bytes that were received and not processed yet.
    secret: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Reader {
    /// A handle that closes the connection for both halves.
    pub fn closer(&self) -> Closer {
        Closer(Arc::clone(&self.shared))
    }

    /// Waits for bytes; zero if the peer has closed the connection.
    pub fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let Some(tls) = &self.shared.tls else {
            return self.shared.socket.receive(into, 0);
        };
        loop {
            let mut connection = lock(tls);
            match connection.reader().read(into) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // Includes an end without TLS's closing alert: the other side may have been killed.
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(0),
                done => return done,
            }
            if self.start < self.end {
                let mut rest = &self.secret[self.start..self.end];
                self.start += connection.read_tls(&mut rest)?;
                process(&mut connection)?;
                continue;
            }
            drop(connection);
            self.start = 0;
            self.end = self.shared.socket.receive(&mut self.secret, 0)?;
            if self.end == 0 {
                return Ok(0);
            }
        }
    }

    /// Closes the connection, for the other half as well.
    pub fn close(&self) {
        self.shared.socket.shut_down(libc::SHUT_RDWR);
    }
}

/// Closes a connection whose halves are owned elsewhere.
#[derive(Clone, Debug)]
pub struct Closer(Arc<Shared>);

impl Closer {
    /// Closes the connection, for both halves.
    pub fn close(&self) {
        self.0.socket.shut_down(libc::SHUT_RDWR);
    }
}

/// The writing half.
#[derive(Debug)]
pub struct Writer {
    shared: Arc<Shared>,
    /// Encrypted bytes that are to be sent.
    secret: Vec<u8>,
}

impl Writer {
    /// Writes all bytes; blocks while the peer does not take them.
    pub fn write_all(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        let Some(tls) = &self.shared.tls else {
            return send_all(&self.shared.socket, bytes);
        };
        while !bytes.is_empty() {
            let mut connection = lock(tls);
            let taken = connection.writer().write(bytes)?;
            bytes = &bytes[taken..];
            while connection.wants_write() {
                connection.write_tls(&mut self.secret)?;
            }
            drop(connection);
            send_all(&self.shared.socket, &self.secret)?;
            self.secret.clear();
        }
        Ok(())
    }

    /// Closes the connection, for the other half as well.
    pub fn close(&self) {
        self.shared.socket.shut_down(libc::SHUT_RDWR);
    }
}

fn send_all(socket: &Socket, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        let sent = socket.send(bytes, 0)?;
        bytes = &bytes[sent..];
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_peer_that_always_sends_has_no_more_time_than_one_that_does_not() {
        let (here, mut there) = UnixStream::pair().unwrap();
        let channel = Channel::plain(Socket::new(here.into()));
        there.write_all(&[0; 2 * hello::SIZE]).unwrap();
        let now = Instant::now();
        let late = channel.receive_hello(now).unwrap_err();
        assert_eq!(late.kind(), io::ErrorKind::TimedOut);
        assert!(channel.receive_hello(now + Duration::from_secs(60)).is_ok());
    }

    #[test]
    fn who_has_left_without_a_word_is_told_from_who_has_said_something_else() {
        for (said, kind) in [
            (&b""[..], io::ErrorKind::UnexpectedEof),
            (b"\x15\x03\x03", io::ErrorKind::InvalidData),
        ] {
            let (here, mut there) = UnixStream::pair().unwrap();
            there.write_all(said).unwrap();
            drop(there);
            let until = Instant::now() + Duration::from_secs(60);
            let left = Channel::plain(Socket::new(here.into())).receive_hello(until);
            assert_eq!(left.unwrap_err().kind(), kind);
        }
    }
}
