//! Waits for the source among arbitrary peers.
//!
//! A host's port is contacted by many: scanners, health checks, clients that use the wrong port. None of them delays
//! the source, and none ends the wait. The listener peeks at all connections without consuming a byte, until one has
//! sent the beginning of an offer. Connections that send something else, or nothing for a while, are turned away; their
//! number is bounded.

use std::{
    io,
    net::TcpListener,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, RawFd},
        unix::net::{UnixListener, UnixStream},
    },
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use super::{
    Error, Result,
    connection::{Address, Connection, OtherSide, Stream, TICK},
    frame::{HEADER, Header, Kind, MAGIC},
    lanes::{TOKEN, Token},
    progress::Progress,
    tunnel::Tls,
};

/// Maximum number of connections examined at once; a new one replaces the oldest.
const MOST_WAITING: usize = 16;

/// How long a connection may keep silent.
const SILENCE: Duration = Duration::from_secs(10);

/// Time limit for reading a frame that has already begun to arrive.
const COME: Duration = Duration::from_secs(2);

/// Number of connections that are turned away before the wait ends.
pub const MOST_STRANGERS: u32 = 256;

/// How long a tunnel that has listened before may fail to listen again: it may have been restarted, or may lack a
/// resource for a while.
const LISTENS_AGAIN: Duration = Duration::from_secs(10);

/// Interval for examining a connection again that has sent only part of the expected bytes.
const AGAIN: Duration = Duration::from_millis(5);

/// A listener that waits for the source.
pub struct Listener {
    socket: Socket,
    waiting: Vec<Waiting>,
    strangers: u32,
    /// How long a connection may keep silent.
    pub silence: Duration,
}

enum Socket {
    /// At a path, which is removed when this is dropped.
    Unix(UnixListener, PathBuf),
    /// At a port.
    Tcp(TcpListener),
    /// At an address whose port the tunnel has.
    Tunnel(Door),
}

/// An address at which a tunnel listens for one connection after the other.
struct Door {
    at: String,
    tls: Tls,
    /// The tunnel has listened there before.
    has_listened: bool,
    /// When listening started to fail.
    fails_since: Option<Instant>,
}

impl Door {
    /// The tunnel's end of the next connection; `None` if the tunnel does not listen at the moment. That ends neither
    /// the wait for a source nor a migration of which some connections have already arrived.
    fn listen(&mut self, progress: &Progress) -> Result<Option<UnixStream>> {
        let error = match self.tls.listen(&self.at, progress) {
            Ok(stream) => {
                self.has_listened = true;
                self.fails_since = None;
                return Ok(Some(stream));
            }
            Err(error) => error,
        };
        let is_first = self.fails_since.is_none();
        let since = *self.fails_since.get_or_insert_with(Instant::now);
        let passes = self.has_listened && since.elapsed() < LISTENS_AGAIN;
        if !passes || matches!(error, Error::Cancelled) {
            return Err(error);
        }
        if is_first {
            log::warn!("it is tried again for a while: {}", base::Chain(&error));
        }
        Ok(None)
    }
}

/// A peer that has connected and may be the source.
struct Waiting {
    stream: Stream,
    /// When it connected. `None`: only the tunnel is connected, no peer yet.
    since: Option<Instant>,
}

/// The further connections of a source that are awaited.
pub struct Awaited {
    /// The token that identifies them.
    pub token: Token,
    /// Time limit for all of them to connect.
    pub patience: Duration,
    /// The deadline that follows from it.
    pub end: Instant,
    /// The source; when it has ended, no more connections will arrive.
    pub source: OtherSide,
}

impl Awaited {
    /// Returns an error if no more connections can arrive.
    fn check(&self) -> Result<()> {
        if Instant::now() >= self.end {
            return Err(Error::Stalled {
                doing: "waiting for further connections of the source",
                seconds: self.patience.as_secs(),
            });
        }
        match self.source.has_ended(Duration::ZERO) {
            true => Err(self.source.broken()),
            false => Ok(()),
        }
    }
}

/// What a connection looks like so far.
enum Looks {
    /// It sends an offer.
    Source,
    /// It has not sent enough to tell.
    Unknown,
    /// It is not a source.
    Stranger,
}

impl Listener {
    /// Listens at a URL; with TLS, only for peers that have a certificate.
    pub fn bind(url: &str, tls: Option<&Tls>) -> Result<Self> {
        let failed = |source| Error::Connect {
            action: "listen at",
            url: url.to_owned(),
            source,
        };
        let socket = match Address::parse(url)? {
            // The tunnel may take long, so it is only asked when a connection is awaited.
            Address::Tcp(at) if let Some(tls) = tls => Socket::Tunnel(Door {
                at,
                tls: tls.clone(),
                has_listened: false,
                fails_since: None,
            }),
            Address::Unix(path) => {
                let listener = base::socket::listen_privately(&path).map_err(failed)?;
                listener.set_nonblocking(true).map_err(failed)?;
                Socket::Unix(listener, path)
            }
            Address::Tcp(host) => {
                let listener = TcpListener::bind(host).map_err(failed)?;
                listener.set_nonblocking(true).map_err(failed)?;
                Socket::Tcp(listener)
            }
        };
        Ok(Self {
            socket,
            waiting: Vec::new(),
            strangers: 0,
            silence: SILENCE,
        })
    }

    /// Whether processes of other hosts can connect, without a certificate.
    pub fn is_open_to_hosts(&self) -> bool {
        match &self.socket {
            Socket::Unix(..) | Socket::Tunnel(..) => false,
            Socket::Tcp(listener) => !listener
                .local_addr()
                .is_ok_and(|address| address.ip().to_canonical().is_loopback()),
        }
    }

    /// The port at which clients reach it, for tests.
    #[cfg(test)]
    pub fn port(&self) -> Option<u16> {
        match &self.socket {
            Socket::Unix(..) | Socket::Tunnel(..) => None,
            Socket::Tcp(listener) => listener.local_addr().ok().map(|address| address.port()),
        }
    }

    /// Returns the next connection that begins with an offer.
    pub fn accept(&mut self, progress: &Progress) -> Result<Connection> {
        self.accept_with(Kind::Offer, None, progress)
    }

    /// Returns a further connection of the source that is being served.
    pub fn accept_lane(&mut self, awaited: &Awaited, progress: &Progress) -> Result<Connection> {
        loop {
            let mut connection = self.accept_with(Kind::Join, Some(awaited), progress)?;
            connection.deadline = Some(awaited.end.min(Instant::now() + COME));
            let mut contents = Vec::new();
            let joined = connection
                .receive(&[Kind::Join], &mut contents)
                .and_then(|_| match contents == awaited.token {
                    true => connection.send(Kind::Join, 0, &[]).map(|()| true),
                    false => Ok(false),
                });
            match joined {
                Ok(true) => {
                    connection.deadline = None;
                    return Ok(connection);
                }
                Err(Error::Cancelled) => return Err(Error::Cancelled),
                _ => self.turned_away("it belongs to another migration")?,
            }
        }
    }

    /// Returns the next connection that begins with a frame of the given kind.
    fn accept_with(
        &mut self,
        kind: Kind,
        awaited: Option<&Awaited>,
        progress: &Progress,
    ) -> Result<Connection> {
        loop {
            if let Some(awaited) = awaited {
                awaited.check()?;
            }
            if progress.is_cancelled() {
                return Err(Error::Cancelled);
            }
            self.accept_new(progress)?;
            self.wait();
            let mut at = 0;
            while at < self.waiting.len() {
                match self.waiting[at].looks(kind, self.silence) {
                    Looks::Source => {
                        let Waiting { stream, .. } = self.waiting.remove(at);
                        return Connection::new(stream, progress.clone());
                    }
                    Looks::Unknown => at += 1,
                    Looks::Stranger => {
                        self.waiting.remove(at);
                        self.turned_away(
                            "it sent something else than what is awaited, or nothing",
                        )?;
                    }
                }
            }
        }
    }

    /// Counts a peer that was not a source. The wait continues, unless there were too many.
    pub fn turned_away(&mut self, why: &str) -> Result<()> {
        self.strangers += 1;
        if self.strangers >= MOST_STRANGERS {
            return Err(Error::Strangers {
                count: self.strangers,
                last: why.to_owned(),
            });
        }
        log::warn!("a connection is turned away while a VM is awaited: {why}");
        Ok(())
    }

    /// Waits until there may be something to do.
    fn wait(&self) {
        let of = |fd: BorrowedFd<'_>| libc::pollfd {
            fd: fd.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        let mut fds = vec![libc::pollfd {
            fd: self.socket.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        }];
        fds.extend(
            self.waiting
                .iter()
                .map(|waiting| of(waiting.stream.as_fd())),
        );
        // SAFETY: the count is that of the vector, which outlives the call.
        unsafe {
            libc::poll(
                fds.as_mut_ptr(),
                fds.len() as libc::nfds_t,
                TICK.as_millis() as libc::c_int,
            )
        };
        // A connection that has sent a part of the bytes stays readable, so polling would spin.
        if fds[0].revents == 0 && fds[1..].iter().any(|fd| fd.revents != 0) {
            thread::sleep(AGAIN);
        }
    }

    fn accept_new(&mut self, progress: &Progress) -> Result<()> {
        loop {
            let accepted = match &mut self.socket {
                // One after the other: the tunnel itself examines several at once.
                Socket::Tunnel(..) if !self.waiting.is_empty() => return Ok(()),
                Socket::Tunnel(door) => {
                    let end = door.listen(progress)?;
                    self.waiting.extend(end.map(Waiting::in_tunnel));
                    return Ok(());
                }
                Socket::Unix(listener, _) => listener.accept().map(|(s, _)| Stream::Unix(s)),
                Socket::Tcp(listener) => listener.accept().map(|(s, _)| Stream::Tcp(s)),
            };
            match accepted {
                Ok(stream) => {
                    if self.waiting.len() == MOST_WAITING {
                        self.waiting.remove(0);
                        self.turned_away("too many are connected at once")?;
                    }
                    self.waiting.push(Waiting {
                        stream,
                        since: Some(Instant::now()),
                    });
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted
                    ) => {}
                Err(source) => {
                    return Err(Error::Broken {
                        doing: "waiting for the source",
                        source,
                    });
                }
            }
        }
    }
}

impl Waiting {
    fn in_tunnel(stream: UnixStream) -> Self {
        Self {
            stream: Stream::Tunnel(stream),
            since: None,
        }
    }

    fn looks(&self, kind: Kind, silence: Duration) -> Looks {
        // Never blocks on a connection that has sent only a part: the token is peeked at like the header before it.
        let mut bytes = [0; HEADER + TOKEN];
        let wanted = match kind {
            Kind::Join => &mut bytes[..],
            _ => &mut bytes[..HEADER],
        };
        let length = wanted.len();
        // SAFETY: the buffer has the given length and outlives the call.
        let got = unsafe {
            libc::recv(
                self.stream.as_fd().as_raw_fd(),
                wanted.as_mut_ptr().cast(),
                length,
                libc::MSG_PEEK | libc::MSG_DONTWAIT,
            )
        };
        let patient = match self.since.is_none_or(|since| since.elapsed() < silence) {
            true => Looks::Unknown,
            false => Looks::Stranger,
        };
        let Ok(got) = usize::try_from(got) else {
            return match io::Error::last_os_error().kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => patient,
                _ => Looks::Stranger,
            };
        };
        let begins = got.min(MAGIC.len());
        if got == 0 || bytes[..begins] != MAGIC[..begins] {
            return Looks::Stranger;
        }
        let header = match bytes.first_chunk() {
            Some(head) if got >= HEADER => Header::decode(head),
            _ => return patient,
        };
        match header {
            Ok(header) if header.kind != kind => Looks::Stranger,
            Ok(_) if got < length => patient,
            Ok(_) => Looks::Source,
            Err(_) => Looks::Stranger,
        }
    }
}

impl Socket {
    /// A descriptor for poll(2); negative if there is nothing to wait for.
    fn as_raw_fd(&self) -> RawFd {
        match self {
            Self::Unix(listener, _) => listener.as_raw_fd(),
            Self::Tcp(listener) => listener.as_raw_fd(),
            Self::Tunnel(..) => -1,
        }
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        if let Self::Unix(_, path) = self
            && let Err(error) = std::fs::remove_file(&*path)
        {
            log::debug!("{} stays: {error}", path.display());
        }
    }
}
