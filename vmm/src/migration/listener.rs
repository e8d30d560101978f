//! Waiting for the source, among whoever else connects.
//!
//! A port of a host hears from many: scanners, health checks, a client that has mistaken the port. None
//! of them keeps the source waiting, and none ends the wait. All that have connected are looked at
//! without taking a byte from them, until one has sent the beginning of an offer. Those that send
//! something else, or nothing for a while, are turned away; there is a bound on how many.

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

/// Connections that are looked at at once; one more takes the place of the oldest.
const MOST_WAITING: usize = 16;

/// How long one may keep silent.
const SILENCE: Duration = Duration::from_secs(10);

/// How long a frame may take that has come already.
const COME: Duration = Duration::from_secs(2);

/// Connections that are turned away before the wait ends.
pub const MOST_STRANGERS: u32 = 256;

/// How long a tunnel that has listened may fail to listen again: it may have been restarted, or be short of something.
const LISTENS_AGAIN: Duration = Duration::from_secs(10);

/// How soon one is looked at again that has sent a part of what is waited for.
const AGAIN: Duration = Duration::from_millis(5);

/// Waits for the source.
pub struct Listener {
    socket: Socket,
    waiting: Vec<Waiting>,
    strangers: u32,
}

enum Socket {
    /// At a path, which is removed with it.
    Unix(UnixListener, PathBuf),
    /// At a port.
    Tcp(TcpListener),
    /// At an address of which a tunnel has the port.
    Tunnel(Door),
}

/// An address at which a tunnel listens for one connection after the other.
struct Door {
    at: String,
    tls: Tls,
    /// It has listened there.
    has_listened: bool,
    /// Since when it does not any more.
    fails_since: Option<Instant>,
}

impl Door {
    /// The tunnel's end from which the next connection comes; none if it does not listen at the moment. That neither
    /// ends the wait for a source, nor a migration of which some connections have come.
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

/// Somebody who has connected and may be the source.
struct Waiting {
    stream: Stream,
    /// `None`: nobody has connected yet, but the tunnel.
    since: Option<Instant>,
}

/// Further connections of a source.
pub struct Awaited {
    /// By which they are known.
    pub token: Token,
    /// How long all of them may take to come.
    pub patience: Duration,
    /// When that is over.
    pub end: Instant,
    /// When it ends, no further one comes.
    pub source: OtherSide,
}

impl Awaited {
    /// Whether one may yet come.
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

/// What somebody is, as far as can be seen.
enum Looks {
    /// It sends an offer.
    Source,
    /// It has not sent enough.
    Unknown,
    /// It is none.
    Stranger,
}

impl Listener {
    /// Listens at a URL, for those with a certificate if it is to be encrypted.
    pub fn bind(url: &str, tls: Option<&Tls>) -> Result<Self> {
        let failed = |source| Error::Connect {
            action: "listen at",
            url: url.to_owned(),
            source,
        };
        let socket = match Address::parse(url)? {
            // The tunnel, which may take long, is asked by who waits.
            Address::Tcp(at) if let Some(tls) = tls => Socket::Tunnel(Door {
                at,
                tls: tls.clone(),
                has_listened: false,
                fails_since: None,
            }),
            Address::Unix(path) => {
                let listener = base::socket::listen(&path).map_err(failed)?;
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
        })
    }

    /// Where clients reach it, for tests.
    #[cfg(test)]
    pub fn port(&self) -> Option<u16> {
        match &self.socket {
            Socket::Unix(..) | Socket::Tunnel(..) => None,
            Socket::Tcp(listener) => listener.local_addr().ok().map(|address| address.port()),
        }
    }

    /// The next connection that begins with an offer.
    pub fn accept(&mut self, progress: &Progress) -> Result<Connection> {
        self.accept_with(Kind::Offer, None, progress)
    }

    /// A further connection of the source that is served.
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

    /// The next connection that begins with a frame of a kind.
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
                match self.waiting[at].looks(kind) {
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

    /// Somebody was no source: the wait goes on, unless there were too many.
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

    /// Until there may be something to do.
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
        // SAFETY: as many descriptors as the vector has, which outlives the call.
        unsafe {
            libc::poll(
                fds.as_mut_ptr(),
                fds.len() as libc::nfds_t,
                TICK.as_millis() as libc::c_int,
            )
        };
        // Who has sent a part is readable all the time.
        if fds[0].revents == 0 && fds[1..].iter().any(|fd| fd.revents != 0) {
            thread::sleep(AGAIN);
        }
    }

    fn accept_new(&mut self, progress: &Progress) -> Result<()> {
        loop {
            let accepted = match &mut self.socket {
                // One after the other: the tunnel looks at several at once.
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

    fn looks(&self, kind: Kind) -> Looks {
        // Nobody is waited for who has sent a part only: a token is looked at like what is before it.
        let mut bytes = [0; HEADER + TOKEN];
        let wanted = match kind {
            Kind::Join => &mut bytes[..],
            _ => &mut bytes[..HEADER],
        };
        let length = wanted.len();
        // SAFETY: the buffer has the length that is said, and outlives the call.
        let got = unsafe {
            libc::recv(
                self.stream.as_fd().as_raw_fd(),
                wanted.as_mut_ptr().cast(),
                length,
                libc::MSG_PEEK | libc::MSG_DONTWAIT,
            )
        };
        let patient = match self.since.is_none_or(|since| since.elapsed() < SILENCE) {
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
    /// A number that poll(2) takes; negative if there is nothing to wait for.
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
