//! Applications that come by a stream: taking their connection, and serving it.
//!
//! A worker that waits for an application makes itself known to whoever connects, one after the
//! other, each for a bounded time, and is taken only by one that has shown a certificate (by TLS)
//! and speaks its version. So who may not have a worker costs time and no process.

use std::{
    io,
    mem::ManuallyDrop,
    net::TcpListener,
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd},
        unix::net::{UnixListener, UnixStream},
    },
    path::PathBuf,
    process::Command,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use clap::ValueEnum;

use crate::{
    protocol::hello::{Form, Hello, VERSION},
    transport::{
        socket,
        stream::{
            bridge::{Bridge, Ended},
            channel::{Channel, Socket},
            tls::{self, Keeper},
        },
        window::Window,
    },
};

/// How long a peer may take until it has said hello.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often it is said at most that somebody was refused.
const QUIET: Duration = Duration::from_secs(1);
/// How long to wait after a connection could not be accepted.
const BREATH: Duration = Duration::from_millis(20);
/// How long a signature of the pool is waited for.
const SIGNING: Duration = Duration::from_secs(5);

/// The first byte of a message to the pool: the worker is taken, and hands over its connection.
pub(super) const TAKEN: u8 = 1;
/// The first byte of a message to the pool: a signature is wanted. A scheme and a message follow.
pub(super) const SIGN: u8 = 2;
/// The longest message to the pool, in bytes; its answer may be twice as long.
pub(super) const LONGEST: usize = 512;

/// What kind of streams a worker takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Kind {
    /// Those of a Unix socket.
    Unix,
    /// Those of a port, without TLS.
    Tcp,
    /// Those of a port, by TLS.
    Tls,
}

/// How a worker takes streams; made by the pool from what it was told itself.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Options {
    /// The kind of streams.
    #[arg(long, hide = true)]
    pub stream: Option<Kind>,
    /// For a port: this machine's certificate, and those between it and its authority's, in PEM.
    #[arg(long, value_name = "FILE")]
    pub tls_cert: Option<PathBuf>,
    /// For a port: the certificates of the authority whose applications are served, in PEM.
    #[arg(long, value_name = "FILE")]
    pub tls_client_ca: Option<PathBuf>,
    /// Numbers of the schemes that the pool signs by.
    #[arg(long, hide = true, value_delimiter = ',')]
    pub tls_schemes: Vec<u16>,
}

/// A listening socket, and what is spoken there.
#[derive(Debug)]
pub(super) enum Door {
    Unix(UnixListener),
    Tcp(TcpListener),
    Tls(TcpListener, tls::Server),
}

impl Door {
    /// Over a listening socket. Reads the files that it needs: before the worker is confined.
    pub fn new(listener: OwnedFd, kind: Kind, options: &Options) -> Result<Self, tls::Error> {
        Ok(match kind {
            Kind::Unix => Self::Unix(listener.into()),
            Kind::Tcp => Self::Tcp(listener.into()),
            Kind::Tls => {
                let file = |path: &Option<PathBuf>| path.clone().unwrap_or_default();
                let server = tls::Server::open(
                    &file(&options.tls_cert),
                    &file(&options.tls_client_ca),
                    &options.tls_schemes,
                    Arc::new(ask),
                )?;
                Self::Tls(listener.into(), server)
            }
        })
    }

    fn accept(&self) -> io::Result<(Socket, String)> {
        let (socket, peer) = match self {
            Self::Unix(listener) => {
                let (stream, _) = listener.accept()?;
                (stream.into(), "a process of this machine".to_owned())
            }
            Self::Tcp(listener) | Self::Tls(listener, _) => {
                let (stream, peer) = listener.accept()?;
                (stream.into(), peer.to_string())
            }
        };
        Ok((Socket::new(socket), peer))
    }

    /// The next application that may have this worker, after its hello. `ours` is the answer.
    pub fn next(&self, ours: Hello) -> io::Result<Channel> {
        let mut refusals = Refusals::default();
        loop {
            let (socket, peer) = match self.accept() {
                Ok(accepted) => accepted,
                Err(error) if is_ours(&error) => return Err(error),
                // Who wanted to come has gone again, the network has, or there is no descriptor or
                // memory just now.
                Err(_) => {
                    thread::sleep(BREATH);
                    continue;
                }
            };
            match self.greet(socket, ours) {
                Ok(channel) => return Ok(channel),
                // Who leaves in the middle only wanted to know whether somebody listens.
                Err(error) if has_left(error.as_ref()) => {}
                Err(error) => refusals.note(&peer, error.as_ref()),
            }
        }
    }

    fn greet(&self, socket: Socket, ours: Hello) -> Result<Channel, Box<dyn std::error::Error>> {
        let until = Instant::now() + PATIENCE;
        let channel = match self {
            Self::Unix(_) | Self::Tcp(_) => Channel::plain(socket),
            Self::Tls(_, server) => Channel::secure(socket, server.accept()?, until)?,
        };
        let theirs = channel.receive_hello(until)?;
        // Also to one of another build, so that it can name both versions.
        channel.send_hello(&ours.to_bytes(), until)?;
        let refused = match Hello::check(&theirs) {
            Ok(hello) if hello.form == Form::Stream => return Ok(channel),
            Ok(_) => "its driver wants a window that is shared".into(),
            Err(refused) => refused.into(),
        };
        channel.refuse();
        Err(refused)
    }
}

/// Whether it is for the listener that nobody can be accepted, and not for a peer, the network or
/// the machine (accept(2)).
fn is_ours(error: &io::Error) -> bool {
    let code = error.raw_os_error();
    matches!(
        code,
        Some(libc::EBADF | libc::EINVAL | libc::ENOTSOCK | libc::EOPNOTSUPP)
    )
}

fn has_left(error: &(dyn std::error::Error + 'static)) -> bool {
    error
        .downcast_ref::<io::Error>()
        .is_some_and(|error| error.kind() == io::ErrorKind::UnexpectedEof)
}

/// Says who was refused, and no more often than somebody reads it.
#[derive(Debug, Default)]
struct Refusals {
    last: Option<Instant>,
    unsaid: u64,
}

impl Refusals {
    fn note(&mut self, peer: &str, error: &dyn std::error::Error) {
        if self.last.is_some_and(|last| last.elapsed() < QUIET) {
            self.unsaid += 1;
            return;
        }
        let unsaid = match std::mem::take(&mut self.unsaid) {
            0 => String::new(),
            count => format!(" (and {count} others before)"),
        };
        self.last = Some(Instant::now());
        eprintln!("gantry-accel: {peer} was refused: {error}{unsaid}");
    }
}

/// Tells a worker how it is to take streams.
pub(super) fn pass_on(
    command: &mut Command,
    kind: Kind,
    keeper: Option<&Keeper>,
    options: &Options,
) {
    if let Some(kind) = kind.to_possible_value() {
        command.args(["--stream", kind.get_name()]);
    }
    let files = [
        ("--tls-cert", &options.tls_cert),
        ("--tls-client-ca", &options.tls_client_ca),
    ];
    for (name, path) in files {
        if let Some(path) = path {
            command.arg(name).arg(path);
        }
    }
    if let Some(keeper) = keeper {
        let schemes: Vec<_> = keeper.schemes().iter().map(u16::to_string).collect();
        command.args(["--tls-schemes", &schemes.join(",")]);
    }
}

/// The hello of a worker.
pub(super) fn hello(window: u64, ring: u64) -> Hello {
    Hello {
        version: VERSION,
        form: Form::Stream,
        window,
        ring,
    }
}

/// The pool's channel: this process's standard output, until an application has taken it.
pub(super) fn channel() -> ManuallyDrop<UnixStream> {
    // SAFETY: the standard output is the pool's channel, and stays open.
    ManuallyDrop::new(unsafe { UnixStream::from_raw_fd(libc::STDOUT_FILENO) })
}

/// Has the pool sign.
fn ask(scheme: u16, message: &[u8]) -> io::Result<Vec<u8>> {
    let channel = channel();
    let mut request = vec![SIGN];
    request.extend(scheme.to_le_bytes());
    request.extend_from_slice(message);
    socket::send(&channel, &request, &[])?;
    let mut polled = libc::pollfd {
        fd: channel.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one entry, as is said.
    if unsafe { libc::poll(&raw mut polled, 1, SIGNING.as_millis() as libc::c_int) } != 1 {
        return Err(io::ErrorKind::TimedOut.into());
    }
    let mut answer = [0; LONGEST * 2];
    let (count, _) = socket::receive(&channel, &mut answer)?;
    match answer[..count] {
        [1, ref signature @ ..] => Ok(signature.to_vec()),
        _ => Err(io::ErrorKind::PermissionDenied.into()),
    }
}

/// The pool's answer to a request for a signature.
pub(super) fn answer(keeper: Option<&Keeper>, request: &[u8]) -> Vec<u8> {
    let signed = keeper.and_then(|keeper| {
        let (scheme, message) = request.split_first_chunk()?;
        keeper.sign(u16::from_le_bytes(*scheme), message)
    });
    match signed {
        Some(signature) => [&[1], &signature[..]].concat(),
        None => vec![0],
    }
}

/// Starts the threads that carry over what an application and this worker say to each other. When
/// the connection ends, this process does.
pub(super) fn start(window: &Arc<Window>, channel: Channel) -> io::Result<()> {
    let Bridge { outward, inward } = Bridge::worker(window, channel.split());
    let leave = |ended: Ended| {
        if !matches!(ended, Ended::Closed) {
            eprintln!("gantry-accel: an application's connection has ended: {ended}");
        }
        // SAFETY: ends the process at once: the driver's own clean-up could wait for kernels.
        unsafe { libc::_exit(0) }
    };
    thread::Builder::new()
        .name("outward".to_owned())
        .spawn(move || leave(outward.run()))?;
    thread::Builder::new()
        .name("inward".to_owned())
        .spawn(move || leave(inward.run()))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn say(path: &std::path::Path, hello: Hello) -> [u8; crate::protocol::hello::SIZE] {
        let until = Instant::now() + Duration::from_secs(20);
        let stream = UnixStream::connect(path).unwrap();
        let channel = Channel::plain(Socket::new(stream.into()));
        channel.send_hello(&hello.to_bytes(), until).unwrap();
        channel.receive_hello(until).unwrap()
    }

    #[test]
    fn drivers_of_another_version_or_form_are_refused_and_the_next_is_taken() {
        let name = format!("gantry-door-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let listener = UnixListener::bind(&path).unwrap();
        let door = Door::new(listener.into(), Kind::Unix, &Options::default()).unwrap();
        let ours = hello(1 << 30, 1 << 20);
        let taking = thread::spawn(move || door.next(ours).map(drop));
        let mut other = Hello::client();
        other.form = Form::Stream;
        other.version.number += 1;
        // It learns of the worker's version, and can say so.
        let told = say(&path, other);
        assert_eq!(Hello::check(&told), Ok(ours));
        assert_eq!(say(&path, Hello::client()), told);
        assert!(!taking.is_finished());
        other.version = VERSION;
        assert_eq!(say(&path, other), told);
        taking.join().unwrap().unwrap();
        std::fs::remove_file(path).unwrap();
    }
}
