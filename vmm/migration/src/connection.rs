//! Interruptible connections between source and destination.

use std::{
    io::{self, Read, Write},
    net::TcpStream,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use base::{
    Cancel,
    poll::poll,
    tcp::{self, SILENCE},
};
use rustix::net::sockopt;
use vm_memory::VolatileSlice;

use super::{
    Error, Result, dial,
    frame::{HEADER, Header, Kind, Run, decode_runs, protocol, runs_length},
    progress::Progress,
    tunnel::Tls,
    vectors,
};

/// Interval at which a blocking wait checks for cancellation.
pub(super) const TICK: Duration = Duration::from_millis(100);

/// Default timeout for silence of the peer.
pub const STALL: Duration = Duration::from_secs(30);

/// Maximum time without traffic on the first connection while memory is transferred: the destination gives up on a
/// source that is silent for longer than [`STALL`].
const QUIET: Duration = Duration::from_secs(5);

/// How long the peer's last message may be in transit after the peer, or another connection to it, has ended.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Maximum number of page frames in flight without an acknowledgment. In a slow network, queued data is sent
/// eventually, but progress is only visible in the acknowledgments; and while one of several connections still holds
/// the last frames of a round, all others wait.
pub(super) const UNANSWERED: usize = 4;

/// The contents of a page frame without pages.
const NO_PAGES: [u8; 4] = [0; 4];

/// Growth step of a receive buffer in bytes while contents arrive.
const STEP: usize = 1 << 20;

/// Address of the peer.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Address {
    /// `unix:PATH`, or `unix://PATH`.
    Unix(PathBuf),
    /// `tcp:HOST:PORT`, or `tcp://HOST:PORT`.
    Tcp(String),
}

impl Address {
    /// Parses the address in a URL.
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

/// A socket of either kind.
pub(super) enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
    /// To the tunnel, which encrypts all traffic.
    Tunnel(UnixStream),
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(stream) | Self::Tunnel(stream) => stream.as_fd(),
            Self::Tcp(stream) => stream.as_fd(),
        }
    }
}

impl Stream {
    fn prepare(&self) -> io::Result<()> {
        match self {
            Self::Unix(stream) | Self::Tunnel(stream) => {
                stream.set_nonblocking(false)?;
                stream.set_read_timeout(Some(TICK))?;
                stream.set_write_timeout(Some(TICK))
            }
            Self::Tcp(stream) => {
                stream.set_nonblocking(false)?;
                tcp::tune(stream, SILENCE)?;
                stream.set_read_timeout(Some(TICK))?;
                stream.set_write_timeout(Some(TICK))
            }
        }
    }

    fn try_clone(&self) -> io::Result<Self> {
        Ok(match self {
            Self::Unix(stream) => Self::Unix(stream.try_clone()?),
            Self::Tcp(stream) => Self::Tcp(stream.try_clone()?),
            Self::Tunnel(stream) => Self::Tunnel(stream.try_clone()?),
        })
    }

    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) | Self::Tunnel(stream) => stream.read(bytes),
            Self::Tcp(stream) => stream.read(bytes),
        }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) | Self::Tunnel(stream) => stream.write(bytes),
            Self::Tcp(stream) => stream.write(bytes),
        }
    }
}

/// The pages of a frame.
#[derive(Clone, Copy)]
pub enum Pages<'a> {
    /// A copy of them.
    Copied(&'a [u8]),
    /// A reference to them in guest memory. The guest may be changing them, so this is only for connections that [keep
    /// bytes](Connection::keeps_bytes): a checksum could be wrong.
    InPlace(&'a [VolatileSlice<'a>]),
}

/// Whether the peer has closed the connection or died, waiting up to `patience` for it. Peers never close only one
/// direction.
fn has_ended(stream: BorrowedFd<'_>, patience: Duration) -> bool {
    let mut entries = [libc::pollfd {
        fd: stream.as_raw_fd(),
        events: libc::POLLRDHUP,
        revents: 0,
    }];
    // A connection that cannot be polled fails when it is used.
    matches!(poll(&mut entries, Some(patience)), Ok(count) if count > 0)
}

/// The peer, as far as its state can be observed.
pub struct OtherSide {
    stream: OwnedFd,
    doing: &'static str,
}

impl OtherSide {
    /// Waits up to `patience` and returns whether the peer has closed the connection or died. Data that it sent before
    /// may still be unread.
    pub fn has_ended(&self, patience: Duration) -> bool {
        has_ended(self.stream.as_fd(), patience)
    }

    /// Duplicates the handle for another thread.
    pub fn try_clone(&self) -> Result<Self> {
        match self.stream.try_clone() {
            Ok(stream) => Ok(Self { stream, ..*self }),
            Err(source) => Err(Error::Broken {
                doing: self.doing,
                source,
            }),
        }
    }

    /// The error to report when the peer has ended.
    pub fn broken(&self) -> Error {
        let failed = sockopt::socket_error(&self.stream).ok();
        let source = match failed.and_then(std::result::Result::err) {
            Some(error) => error.into(),
            None => io::ErrorKind::UnexpectedEof.into(),
        };
        Error::lost(self.doing, source)
    }
}

/// Time of the last traffic on any of several connections that share a network.
#[derive(Clone)]
pub struct Movement {
    began: Instant,
    /// Time of the last traffic, in milliseconds since `began`.
    last: Arc<AtomicU64>,
}

impl Default for Movement {
    fn default() -> Self {
        Self {
            began: Instant::now(),
            last: Arc::default(),
        }
    }
}

impl Movement {
    fn note(&self, now: Instant) {
        let since = now.saturating_duration_since(self.began).as_millis();
        let since = u64::try_from(since).unwrap_or(u64::MAX);
        self.last.fetch_max(since, Ordering::Relaxed);
    }

    /// Whether there has been no traffic for `stall`.
    fn is_over(&self, now: Instant, stall: Duration) -> bool {
        let last = Duration::from_millis(self.last.load(Ordering::Relaxed));
        now.saturating_duration_since(self.began)
            .saturating_sub(last)
            >= stall
    }
}

/// A connection to the peer.
pub struct Connection {
    stream: Stream,
    progress: Progress,
    /// How long the peer may keep silent.
    pub stall: Duration,
    /// The peer may keep silent longer while there is traffic on one of these connections: a slow network may serve
    /// others first.
    pub beside: Option<Movement>,
    /// Maximum time for which this side keeps silent while memory is transferred.
    pub quiet: Duration,
    /// When bytes were last sent.
    sent: Instant,
    /// Barriers that the peer has not acknowledged yet.
    unanswered: usize,
    /// The current activity, for error messages.
    pub doing: &'static str,
    /// Cancellation requests are ignored from now on.
    pub uninterrupted: bool,
    /// Ends the connection in the same way as the end of the migration.
    pub end: Cancel,
    /// Deadline of the current activity, however much data arrives.
    pub deadline: Option<Instant>,
    pace: Option<Pace>,
}

/// Limits the rate at which pages are sent.
struct Pace {
    bytes_per_second: u64,
    /// Time at which the data sent so far is within the rate limit.
    paid: Instant,
}

impl Pace {
    /// How far pages may be sent ahead of the rate limit: what the network buffers at once.
    const AHEAD: Duration = Duration::from_millis(10);

    /// How long to wait before sending `bytes` more bytes.
    fn wait(&mut self, bytes: usize, now: Instant) -> Duration {
        let ahead = self.paid.saturating_duration_since(now);
        let micros = (bytes as u64).saturating_mul(1_000_000) / self.bytes_per_second.max(1);
        self.paid = self.paid.max(now) + Duration::from_micros(micros);
        ahead.saturating_sub(Self::AHEAD)
    }
}

impl Connection {
    /// Sets the progress that can cancel the connection from now on.
    pub fn watch(&mut self, progress: Progress) {
        self.progress = progress;
    }

    /// Duplicates the connection for a new owner.
    pub fn try_clone(&self) -> Result<Self> {
        let stream = self.stream.try_clone().map_err(|source| Error::Broken {
            doing: self.doing,
            source,
        })?;
        Self::new(stream, self.progress.clone())
    }

    /// A handle that shows whether the peer has ended while nothing is being received.
    pub fn other_side(&self) -> Result<OtherSide> {
        let doing = self.doing;
        match self.stream.as_fd().try_clone_to_owned() {
            Ok(stream) => Ok(OtherSide { stream, doing }),
            Err(source) => Err(Error::Broken { doing, source }),
        }
    }

    /// Connects to a URL, through the tunnel if it is to be encrypted.
    pub fn connect(url: &str, tls: Option<&Tls>, progress: &Progress) -> Result<Self> {
        let failed = |source| Error::Connect {
            action: "connect to",
            url: url.to_owned(),
            source,
        };
        let stream = match Address::parse(url)? {
            Address::Tcp(host) if let Some(tls) = tls => {
                Stream::Tunnel(tls.connect(&host, progress)?)
            }
            Address::Unix(path) => {
                let stream = dial::unix(&path, progress).map_err(failed)?;
                Stream::Unix(stream.ok_or(Error::Cancelled)?)
            }
            Address::Tcp(host) => {
                let stream = dial::tcp(&host, progress).map_err(failed)?;
                Stream::Tcp(stream.ok_or(Error::Cancelled)?)
            }
        };
        Self::new(stream, progress.clone())
    }

    /// Creates a connection from one end of a socket pair, for tests and fuzzers.
    pub fn of_unix(stream: UnixStream, progress: Progress) -> Result<Self> {
        Self::new(Stream::Unix(stream), progress)
    }

    pub(super) fn new(stream: Stream, progress: Progress) -> Result<Self> {
        stream.prepare().map_err(|source| Error::Broken {
            doing: "setting up the connection",
            source,
        })?;
        Ok(Self {
            stream,
            progress,
            stall: STALL,
            beside: None,
            quiet: QUIET,
            sent: Instant::now(),
            unanswered: 0,
            doing: "agreeing on what moves",
            uninterrupted: false,
            end: Cancel::default(),
            deadline: None,
            pace: None,
        })
    }

    /// Limits pages and archives to this many bytes per second from now on; `None` removes the limit.
    pub fn set_rate(&mut self, bytes_per_second: Option<u64>) {
        let now = Instant::now();
        self.pace = bytes_per_second.map(|bytes_per_second| Pace {
            bytes_per_second,
            paid: self.pace.as_ref().map_or(now, |pace| pace.paid),
        });
    }

    /// Time left until something must be sent so that the peer does not consider this side dead.
    pub fn quiet_left(&self) -> Duration {
        self.quiet.saturating_sub(self.sent.elapsed())
    }

    /// Sends an empty page frame of a round if nothing has been sent for long.
    pub fn keep_alive(&mut self, round: u32) -> Result<()> {
        match self.quiet_left().is_zero() {
            true => self.send(Kind::Pages, round, &NO_PAGES),
            false => Ok(()),
        }
    }

    /// Waits until `bytes` bytes of pages may be sent. With a round, keepalive frames of that round are sent meanwhile.
    pub fn keep_pace(&mut self, bytes: usize, round: Option<u32>) -> Result<()> {
        let Some(pace) = &mut self.pace else {
            return Ok(());
        };
        let mut left = pace.wait(bytes, Instant::now());
        while !left.is_zero() {
            if self.progress.is_cancelled() && !self.uninterrupted {
                return Err(Error::Cancelled);
            }
            let nap = left.min(TICK);
            std::thread::sleep(nap);
            left -= nap;
            if let Some(round) = round {
                self.keep_alive(round)?;
            }
        }
        Ok(())
    }

    /// Whether the transport itself guarantees the integrity of the data, so that no checksum is needed.
    pub fn keeps_bytes(&self) -> bool {
        matches!(self.stream, Stream::Unix(_) | Stream::Tunnel(_))
    }

    /// Sends a frame.
    pub fn send(&mut self, kind: Kind, round: u32, contents: &[u8]) -> Result<()> {
        if kind == Kind::Archive {
            self.keep_pace(contents.len(), None)?;
        }
        let header = Header::of(kind, round, contents, true);
        self.write_all(&header.encode())?;
        self.write_all(contents)
    }

    /// Sends a page frame, which begins with a list of runs, and a barrier after it.
    pub fn send_pages(&mut self, round: u32, list: &[u8], pages: Pages<'_>) -> Result<()> {
        self.hear(UNANSWERED - 1)?;
        self.send_only_pages(round, list, pages)?;
        self.barrier(round)
    }

    /// Asks the peer to acknowledge when everything sent before is in memory.
    pub fn barrier(&mut self, round: u32) -> Result<()> {
        self.send(Kind::Barrier, round, &[])?;
        self.unanswered += 1;
        Ok(())
    }

    /// Waits until at most `most` barriers are unacknowledged; 0 means that all sent pages are in memory.
    pub fn hear(&mut self, most: usize) -> Result<()> {
        while self.unanswered > most {
            self.receive(&[Kind::Barrier], &mut Vec::new())?;
            self.unanswered -= 1;
        }
        Ok(())
    }

    fn send_only_pages(&mut self, round: u32, list: &[u8], pages: Pages<'_>) -> Result<()> {
        let (copied, memory) = match pages {
            Pages::Copied(copied) => (copied, &[][..]),
            Pages::InPlace(memory) => (&[][..], memory),
        };
        let bytes = copied.len() + memory.iter().map(VolatileSlice::len).sum::<usize>();
        self.keep_pace(list.len() + bytes, Some(round))?;
        let crc = (!self.keeps_bytes()).then(|| {
            let mut crc = crc32fast::Hasher::new();
            crc.update(list);
            crc.update(copied);
            crc.finalize()
        });
        let header = Header::of_pages(round, list, bytes, crc).encode();
        let total = header.len() + list.len() + bytes;
        let mut since = Instant::now();
        let mut done = 0;
        while done < total {
            let socket = self.stream.as_fd();
            let sent = vectors::send(socket, &[&header, list, copied], memory, done);
            done += self.judge(sent, &mut since)?;
            self.sent = since;
        }
        Ok(())
    }

    /// Receives the contents of a page frame, which are untrusted: stores the pages at the slices that `place` returns,
    /// whose lengths match the non-zero runs. Returns the number of bytes of pages.
    pub fn receive_pages<'m>(
        &mut self,
        header: Header,
        place: impl FnOnce(&[Run]) -> Result<Vec<VolatileSlice<'m>>>,
    ) -> Result<usize> {
        let mut count = [0; 4];
        // Also rejects contents without a count.
        runs_length(count, header.length)?;
        self.read_exact(&mut count)?;
        let mut list = vec![0; runs_length(count, header.length)?];
        self.read_exact(&mut list)?;
        let bytes = header.length - count.len() - list.len();
        let memory = place(&decode_runs(&list, bytes)?)?;
        let mut since = Instant::now();
        let mut done = 0;
        while done < bytes {
            let got = vectors::receive(self.stream.as_fd(), &memory, done);
            done += self.judge(got, &mut since)?;
        }
        header.check_crc(|| {
            let mut crc = crc32fast::Hasher::new();
            crc.update(&count);
            crc.update(&list);
            let mut page = [0; 4096];
            for slice in &memory {
                let mut at = 0;
                // Cannot fail: `at` is within the slice.
                while let Ok(rest) = slice.offset(at)
                    && !rest.is_empty()
                {
                    let copied = rest.copy_to(&mut page[..]);
                    crc.update(&page[..copied]);
                    at += copied;
                }
            }
            crc.finalize()
        })?;
        Ok(bytes)
    }

    /// Sends a frame about a file, together with the file descriptor.
    pub fn send_file(&mut self, contents: &[u8], file: BorrowedFd<'_>) -> Result<()> {
        self.write_all(&Header::of(Kind::File, 0, contents, true).encode())?;
        let mut since = Instant::now();
        loop {
            let Stream::Unix(stream) = &self.stream else {
                return Err(protocol("files go over Unix sockets only"));
            };
            // This few bytes are sent as a whole or not at all.
            let sent = base::socket::send(stream, contents, &[file]).map(|()| contents.len());
            if self.judge(sent, &mut since)? > 0 {
                return Ok(());
            }
        }
    }

    /// Receives a frame about a file, and the single file descriptor that must come with it.
    pub fn receive_file(&mut self, contents: &mut Vec<u8>) -> Result<OwnedFd> {
        let header = self.receive_header(&[Kind::File])?;
        // The descriptor is attached to the contents, which are a message of their own.
        contents.clear();
        contents.resize(header.length, 0);
        let mut files = Vec::new();
        let mut since = Instant::now();
        let mut got = 0;
        while got < contents.len() {
            let Stream::Unix(stream) = &self.stream else {
                return Err(protocol("files go over Unix sockets only"));
            };
            let count = match base::socket::receive(stream, &mut contents[got..]) {
                Ok((count, more)) => {
                    files.extend(more);
                    Ok(count)
                }
                Err(error) => Err(error),
            };
            got += self.judge(count, &mut since)?;
            if files.len() > 1 {
                return Err(protocol("several files came at once"));
            }
        }
        header.check(contents)?;
        files
            .pop()
            .ok_or_else(|| protocol("a frame about a file came without it"))
    }

    /// Receives the next frame, which must be one of `expected`. If the peer reports a failure, its reasons are
    /// returned as an error.
    pub fn receive(&mut self, expected: &[Kind], contents: &mut Vec<u8>) -> Result<Header> {
        let header = self.receive_header(expected)?;
        self.receive_contents(header, contents)?;
        Ok(header)
    }

    /// Receives the header of the next frame. The caller must then receive the contents, too.
    pub fn receive_header(&mut self, expected: &[Kind]) -> Result<Header> {
        let header = self.next_header()?;
        if header.kind == Kind::Failed {
            return Err(self.reasons(header)?);
        }
        if !expected.contains(&header.kind) {
            return Err(protocol(format!("{:?} while {}", header.kind, self.doing)));
        }
        Ok(header)
    }

    /// Reads the peer's failure reasons from a frame whose header has been received.
    fn reasons(&mut self, header: Header) -> Result<Error> {
        let mut contents = Vec::new();
        self.receive_contents(header, &mut contents)?;
        let reasons: Vec<String> = serde_json::from_slice(&contents)
            .map_err(|_| protocol("it failed without saying why"))?;
        // Sanitized, because they are shown to users and in logs.
        let clean = |text: &String| -> String {
            text.chars()
                .filter(|c| !c.is_control())
                .take(1000)
                .collect()
        };
        let reasons = reasons.iter().take(64).map(clean).collect();
        Ok(Error::Refused(reasons))
    }

    /// Finds the actual cause of an error that ended the migration. A peer that gives up sends its reasons and closes
    /// its connections; a thread that is sending, or uses another connection, sees the closed connection first.
    pub fn why(&mut self, error: Error) -> Error {
        match error {
            Error::Broken { .. } | Error::HostGone { .. } => self.last_words().unwrap_or(error),
            error => error,
        }
    }

    /// The peer's failure reasons, after any frames that were sent before them.
    fn last_words(&mut self) -> Option<Error> {
        self.uninterrupted = true;
        self.deadline = Some(Instant::now() + LAST_WORDS);
        let mut skipped = [0; 4096];
        loop {
            let header = self.next_header().ok()?;
            if header.kind == Kind::Failed {
                return self.reasons(header).ok();
            }
            let mut left = header.length;
            while left > 0 {
                let part = left.min(skipped.len());
                self.read_exact(&mut skipped[..part]).ok()?;
                left -= part;
            }
        }
    }

    /// Receives the header of the next frame, of any kind.
    pub fn next_header(&mut self) -> Result<Header> {
        let mut bytes = [0; HEADER];
        self.read_exact(&mut bytes)?;
        Header::decode(&bytes)
    }

    /// Receives the contents of the frame whose header has been received.
    pub fn receive_contents(&mut self, header: Header, contents: &mut Vec<u8>) -> Result<()> {
        // Leftovers of an earlier frame are overwritten, so they need not be zeroed.
        contents.truncate(header.length);
        let mut filled = 0;
        while filled < header.length {
            // Memory grows with the data that arrives, not with the announced length.
            let end = header.length.min(filled + STEP);
            if contents.len() < end {
                contents.resize(end, 0);
            }
            self.read_exact(&mut contents[filled..end])?;
            filled = end;
        }
        header.check(contents)
    }

    /// Tells the peer why the migration failed; the peer may be gone.
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
            self.sent = since;
            bytes = &bytes[count..];
        }
        Ok(())
    }

    fn judge(&self, moved: io::Result<usize>, since: &mut Instant) -> Result<usize> {
        if (self.progress.is_cancelled() || self.end.is_cancelled()) && !self.uninterrupted {
            return Err(Error::Cancelled);
        }
        let doing = self.doing;
        if self.deadline.is_some_and(|end| Instant::now() >= end) {
            let seconds = self.stall.as_secs();
            return Err(Error::Stalled { doing, seconds });
        }
        match moved {
            Ok(0) => Err(Error::Broken {
                doing,
                source: io::ErrorKind::UnexpectedEof.into(),
            }),
            Ok(count) => {
                *since = Instant::now();
                if let Some(beside) = &self.beside {
                    beside.note(*since);
                }
                Ok(count)
            }
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                ) =>
            {
                // Do not wait for the kernel to report that the peer no longer accepts data.
                if has_ended(self.stream.as_fd(), Duration::ZERO) {
                    let source = io::ErrorKind::UnexpectedEof.into();
                    return Err(Error::Broken { doing, source });
                }
                let now = Instant::now();
                let is_over = |beside: &Movement| beside.is_over(now, self.stall);
                if now.saturating_duration_since(*since) >= self.stall
                    && self.beside.as_ref().is_none_or(is_over)
                {
                    return Err(Error::Stalled {
                        doing,
                        seconds: self.stall.as_secs(),
                    });
                }
                Ok(0)
            }
            Err(source) => Err(Error::lost(doing, source)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_name_sockets_and_ports() {
        let unix = |path: &str| Address::Unix(path.into());
        assert_eq!(Address::parse("unix:/a").unwrap(), unix("/a"));
        assert_eq!(Address::parse("unix:///a").unwrap(), unix("/a"));
        let tcp = Address::Tcp("[::1]:80".to_owned());
        assert_eq!(Address::parse("tcp:[::1]:80").unwrap(), tcp);
        for bad in ["", "unix:", "tcp:host", "tcp:host:99999", "http://x", "/a"] {
            assert!(matches!(Address::parse(bad), Err(Error::Url(_))), "{bad}");
        }
    }

    #[test]
    fn who_is_silent_is_waited_for_as_long_as_something_moves_beside_it() {
        let stall = Duration::from_secs(30);
        let movement = Movement::default();
        let at = |seconds| movement.began + Duration::from_secs(seconds);
        assert!(!movement.is_over(at(29), stall) && movement.is_over(at(30), stall));
        movement.clone().note(at(25));
        // A thread that notes an older time does not turn the clock back.
        movement.note(at(20));
        assert!(!movement.is_over(at(54), stall) && movement.is_over(at(55), stall));
    }

    #[test]
    fn who_cannot_send_hears_why_the_other_side_has_ended() {
        let (here, there) = UnixStream::pair().unwrap();
        let progress = Progress::new(crate::progress::Direction::Outgoing, "test");
        let [mut here, mut there] =
            [here, there].map(|end| Connection::of_unix(end, progress.clone()).unwrap());
        here.stall = Duration::from_secs(5);
        there.send_failure(&["no room".to_owned()]);
        // The peer reads nothing more, but another holder keeps the connection open.
        let Stream::Unix(stream) = &there.stream else {
            unreachable!("it is one");
        };
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let pages = vec![7; 16 << 20];
        let error = here.send_pages(0, &NO_PAGES, Pages::Copied(&pages));
        let why = here.why(error.unwrap_err());
        assert!(
            matches!(&why, Error::Refused(reasons) if reasons == &["no room"]),
            "{why:?}"
        );
    }

    #[test]
    fn pages_go_out_at_the_rate_that_is_allowed_whatever_their_size() {
        let start = Instant::now();
        let mut pace = Pace {
            bytes_per_second: 1 << 20,
            paid: start,
        };
        // Data for sixteen seconds, in two sizes.
        let mut now = start;
        for size in [1 << 20, 64 << 10] {
            for _ in 0..(8 << 20) / size {
                now += pace.wait(size, now);
            }
        }
        let took = now - start;
        assert!((15..=16).contains(&took.as_secs()), "{took:?}");
        // Unused capacity is not accumulated.
        now += Duration::from_secs(100);
        assert_eq!(pace.wait(1 << 20, now), Duration::ZERO);
        assert!(pace.wait(1, now) > Duration::from_millis(900));
    }
}
