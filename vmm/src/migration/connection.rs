//! Streams between two sides, which can be interrupted at any time.

use std::{
    io::{self, Read, Write},
    net::{TcpListener, TcpStream},
    os::{
        fd::{AsRawFd, RawFd},
        unix::net::{UnixListener, UnixStream},
    },
    path::PathBuf,
    time::{Duration, Instant},
};

use super::{
    Error, Result,
    frame::{HEADER, Header, Kind, protocol},
    progress::Progress,
};

/// How long a wait lasts before a look at whether somebody has cancelled it.
const TICK: Duration = Duration::from_millis(100);

/// How long the other side may keep silent, unless said otherwise.
pub const STALL: Duration = Duration::from_secs(30);

/// Bytes by which a buffer grows while contents arrive.
const STEP: usize = 1 << 20;

/// Where the other side is.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Address {
    /// `unix:PATH`, or `unix://PATH`.
    Unix(PathBuf),
    /// `tcp:HOST:PORT`, or `tcp://HOST:PORT`.
    Tcp(String),
}

impl Address {
    /// The address in a URL.
    pub fn parse(url: &str) -> Result<Self> {
        let failed = || Error::Url(url.to_owned());
        if let Some(path) = url.strip_prefix("unix:") {
            let path = path.strip_prefix("//").unwrap_or(path);
            if !path.is_empty() {
                return Ok(Self::Unix(path.into()));
            }
        } else if let Some(host) = url.strip_prefix("tcp:") {
            let host = host.strip_prefix("//").unwrap_or(host);
            let port = host.rsplit_once(':').map(|(_, port)| port.parse::<u16>());
            if matches!(port, Some(Ok(_))) {
                return Ok(Self::Tcp(host.to_owned()));
            }
        }
        Err(failed())
    }
}

/// Waits for the source.
pub enum Listener {
    /// At a path, which is removed with it.
    Unix(UnixListener, PathBuf),
    /// At a port.
    Tcp(TcpListener),
}

impl Listener {
    /// Listens at a URL.
    pub fn bind(url: &str) -> Result<Self> {
        let failed = |source| Error::Connect {
            action: "listen at",
            url: url.to_owned(),
            source,
        };
        match Address::parse(url)? {
            Address::Unix(path) => {
                let listener = base::socket::listen(&path).map_err(failed)?;
                listener.set_nonblocking(true).map_err(failed)?;
                Ok(Self::Unix(listener, path))
            }
            Address::Tcp(host) => {
                let listener = TcpListener::bind(host).map_err(failed)?;
                listener.set_nonblocking(true).map_err(failed)?;
                Ok(Self::Tcp(listener))
            }
        }
    }

    /// The first connection.
    pub fn accept(&self, progress: &Progress) -> Result<Connection> {
        loop {
            if progress.is_cancelled() {
                return Err(Error::Cancelled);
            }
            let mut fd = libc::pollfd {
                fd: self.as_raw_fd(),
                events: libc::POLLIN,
                revents: 0,
            };
            // SAFETY: one descriptor, in a local that outlives the call.
            unsafe { libc::poll(&raw mut fd, 1, TICK.as_millis() as libc::c_int) };
            let accepted = match self {
                Self::Unix(listener, _) => listener.accept().map(|(s, _)| Stream::Unix(s)),
                Self::Tcp(listener) => listener.accept().map(|(s, _)| Stream::Tcp(s)),
            };
            match accepted {
                Ok(stream) => return Connection::new(stream, progress.clone()),
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::WouldBlock
                            | io::ErrorKind::Interrupted
                            | io::ErrorKind::ConnectionAborted
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

impl AsRawFd for Listener {
    fn as_raw_fd(&self) -> RawFd {
        match self {
            Self::Unix(listener, _) => listener.as_raw_fd(),
            Self::Tcp(listener) => listener.as_raw_fd(),
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Self::Unix(_, path) = self
            && let Err(error) = std::fs::remove_file(&*path)
        {
            log::debug!("{} stays: {error}", path.display());
        }
    }
}

enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Stream {
    fn prepare(&self) -> io::Result<()> {
        match self {
            Self::Unix(stream) => {
                stream.set_nonblocking(false)?;
                stream.set_read_timeout(Some(TICK))?;
                stream.set_write_timeout(Some(TICK))
            }
            Self::Tcp(stream) => {
                stream.set_nonblocking(false)?;
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(TICK))?;
                stream.set_write_timeout(Some(TICK))
            }
        }
    }

    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => stream.read(bytes),
            Self::Tcp(stream) => stream.read(bytes),
        }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => stream.write(bytes),
            Self::Tcp(stream) => stream.write(bytes),
        }
    }
}

/// A connection to the other side.
pub struct Connection {
    stream: Stream,
    progress: Progress,
    /// How long the other side may keep silent.
    pub stall: Duration,
    /// What is going on, for messages.
    pub doing: &'static str,
    /// Somebody's wish to cancel is not looked at any more.
    pub uninterrupted: bool,
}

impl Connection {
    /// Connects to a URL.
    pub fn connect(url: &str, progress: &Progress) -> Result<Self> {
        let failed = |source| Error::Connect {
            action: "connect to",
            url: url.to_owned(),
            source,
        };
        let stream = match Address::parse(url)? {
            Address::Unix(path) => Stream::Unix(UnixStream::connect(path).map_err(failed)?),
            Address::Tcp(host) => Stream::Tcp(TcpStream::connect(host).map_err(failed)?),
        };
        Self::new(stream, progress.clone())
    }

    /// Of a pair of sockets, for tests and fuzzers.
    pub fn of_unix(stream: UnixStream, progress: Progress) -> Result<Self> {
        Self::new(Stream::Unix(stream), progress)
    }

    fn new(stream: Stream, progress: Progress) -> Result<Self> {
        stream.prepare().map_err(|source| Error::Broken {
            doing: "setting up the connection",
            source,
        })?;
        Ok(Self {
            stream,
            progress,
            stall: STALL,
            doing: "agreeing on what moves",
            uninterrupted: false,
        })
    }

    /// Whether bytes arrive as they were sent without a checksum of ours.
    pub fn keeps_bytes(&self) -> bool {
        matches!(self.stream, Stream::Unix(_))
    }

    /// Sends a frame.
    pub fn send(&mut self, kind: Kind, round: u32, contents: &[u8]) -> Result<()> {
        let checked = kind != Kind::Pages || !self.keeps_bytes();
        let header = Header::of(kind, round, contents, checked);
        self.write_all(&header.encode())?;
        self.write_all(contents)
    }

    /// Receives the next frame, which has to be one of `expected`. The other side's reason to give
    /// up is an error.
    pub fn receive(&mut self, expected: &[Kind], contents: &mut Vec<u8>) -> Result<Header> {
        let mut bytes = [0; HEADER];
        self.read_exact(&mut bytes)?;
        let header = Header::decode(&bytes)?;
        if header.kind != Kind::Failed && !expected.contains(&header.kind) {
            return Err(protocol(format!("{:?} while {}", header.kind, self.doing)));
        }
        contents.clear();
        while contents.len() < header.length {
            // What arrives is what takes memory, not what was said.
            let from = contents.len();
            contents.resize(header.length.min(from + STEP), 0);
            self.read_exact(&mut contents[from..])?;
        }
        header.check(contents)?;
        if header.kind == Kind::Failed {
            let reasons: Vec<String> = serde_json::from_slice(contents)
                .map_err(|_| protocol("it failed without saying why"))?;
            // Shown to users and in logs.
            let clean = |text: &String| -> String {
                text.chars()
                    .filter(|c| !c.is_control())
                    .take(1000)
                    .collect()
            };
            return Err(Error::Refused(reasons.iter().take(64).map(clean).collect()));
        }
        Ok(header)
    }

    /// Tells the other side why it is over; it may be gone.
    pub fn send_failure(&mut self, reasons: &[String]) {
        self.uninterrupted = true;
        self.stall = Duration::from_secs(2);
        if let Ok(text) = serde_json::to_vec(reasons)
            && text.len() <= Kind::Failed.limit()
            && let Err(error) = self.send(Kind::Failed, 0, &text)
        {
            log::debug!("the other side does not hear why: {error}");
        }
    }

    fn read_exact(&mut self, mut bytes: &mut [u8]) -> Result<()> {
        let mut since = Instant::now();
        while !bytes.is_empty() {
            let read = self.stream.read(bytes);
            let count = self.judge(read, &mut since)?;
            bytes = &mut std::mem::take(&mut bytes)[count..];
        }
        Ok(())
    }

    fn write_all(&mut self, mut bytes: &[u8]) -> Result<()> {
        let mut since = Instant::now();
        while !bytes.is_empty() {
            let written = self.stream.write(bytes);
            let count = self.judge(written, &mut since)?;
            bytes = &bytes[count..];
        }
        Ok(())
    }

    fn judge(&self, moved: io::Result<usize>, since: &mut Instant) -> Result<usize> {
        if self.progress.is_cancelled() && !self.uninterrupted {
            return Err(Error::Cancelled);
        }
        let doing = self.doing;
        match moved {
            Ok(0) => Err(Error::Broken {
                doing,
                source: io::ErrorKind::UnexpectedEof.into(),
            }),
            Ok(count) => {
                *since = Instant::now();
                Ok(count)
            }
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock
                        | io::ErrorKind::TimedOut
                        | io::ErrorKind::Interrupted
                ) =>
            {
                if since.elapsed() >= self.stall {
                    return Err(Error::Stalled {
                        doing,
                        seconds: self.stall.as_secs(),
                    });
                }
                Ok(0)
            }
            Err(source) => Err(Error::Broken { doing, source }),
        }
    }
}
