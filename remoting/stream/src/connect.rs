//! How an application connects to a worker.

use std::{
    io,
    net::{TcpStream, ToSocketAddrs},
    os::{fd::OwnedFd, unix::net::UnixStream},
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use base::tcp;
use remoting_proto::wire::{
    Api,
    hello::{self, Form, Hello, Refused},
};
use remoting_transport::{mapping, socket, window::Window};

use super::{
    address::{Address, Host},
    bridge::Bridge,
    channel::{Channel, Closer, Socket},
    tls,
};

/// Maximum time for a worker to accept a connection and to answer its hello.
pub const PATIENCE: Duration = Duration::from_secs(20);
/// Interval between attempts at a Unix socket whose queue is full, and the first pause before a
/// client that was not served comes again.
const AGAIN: Duration = Duration::from_millis(50);
/// Maximum pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Environment variables that name the files of [`tls::Client`], in its order.
const VARIABLES: [&str; 3] = ["GANTRY_TLS_CA", "GANTRY_TLS_CERT", "GANTRY_TLS_KEY"];

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A variable is missing.
    #[error(
        "{0} is not set: for tls:// it has to name a file in PEM (of GANTRY_TLS_CA, \
         GANTRY_TLS_CERT and GANTRY_TLS_KEY: the authority that has signed the worker's \
         certificate, this side's certificate, and its key)"
    )]
    Variable(&'static str),
    /// The host cannot be reached.
    #[error(
        "cannot connect with {0}: is gantry-accel serve --listen running there, and does a firewall \
         let this side through?"
    )]
    Host(Host, #[source] io::Error),
    /// The socket cannot be reached.
    #[error(
        "cannot connect with {path}: is gantry-accel serve --listen unix:{path} running, and may \
         this user write to the socket?",
        path = _0.display()
    )]
    Path(PathBuf, #[source] io::Error),
    /// Plain TCP to another machine.
    #[error("{0} is not this machine: without TLS nobody else is trusted; use tls://")]
    Elsewhere(Host),
    /// TLS cannot be set up.
    #[error(transparent)]
    Tls(#[from] tls::Error),
    /// The TLS handshake failed.
    #[error("the other side and this one do not come to terms by TLS")]
    Handshake(#[source] io::Error),
    /// No hello came.
    #[error(
        "no worker has said hello: all that the pool may have could be busy, or it has refused \
         this side's certificate; see the log of gantry-accel"
    )]
    Hello(#[source] io::Error),
    /// The other side's hello is refused.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// The other side offers another form of window.
    #[error(
        "the other side serves windows that are shared, and not streams: see gantry-accel serve --listen"
    )]
    Form,
    /// The window cannot be created.
    #[error(transparent)]
    Window(#[from] mapping::Error),
    /// The socket pair for the listener cannot be created.
    #[error("cannot make the threads' connection")]
    Pair(#[source] io::Error),
}

/// An application's connection to a worker elsewhere.
#[derive(Debug)]
pub struct Connected<A> {
    /// Rings and data of this side.
    pub window: Arc<Window>,
    /// The window's file.
    pub file: OwnedFd,
    /// Readable when there is a message that nobody waits for; closed when the worker has ended.
    pub nudges: UnixStream,
    /// Carries both over, once its directions run.
    pub bridge: Bridge<A>,
    /// Ends the connection: both directions, and with them the worker.
    pub closer: Closer,
}

/// The files that TLS needs, as named by the environment.
#[derive(Clone, Debug)]
pub struct Files([Option<PathBuf>; 3]);

impl Files {
    /// Reads the environment, which a running process may change concurrently.
    pub fn named() -> Self {
        Self(VARIABLES.map(|name| {
            let value = std::env::var_os(name).filter(|value| !value.is_empty());
            value.map(PathBuf::from)
        }))
    }

    fn client(&self) -> Result<tls::Client, Error> {
        let file = |at: usize| self.0[at].clone().ok_or(Error::Variable(VARIABLES[at]));
        Ok(tls::Client {
            authority: file(0)?,
            certificate: file(1)?,
            key: file(2)?,
        })
    }
}

impl Error {
    /// Whether the other side has closed the connection without a word: meanwhile another client
    /// has taken its worker, or the worker has ended, or there were too many. A client that comes
    /// again gets the next worker; one that is refused is told why.
    fn is_wordless(&self) -> bool {
        let (Self::Handshake(error) | Self::Hello(error)) = self else {
            return false;
        };
        matches!(
            error.kind(),
            io::ErrorKind::UnexpectedEof
                | io::ErrorKind::ConnectionReset
                | io::ErrorKind::ConnectionAborted
                | io::ErrorKind::BrokenPipe
        )
    }
}

/// Connects to a worker, within [`PATIENCE`] and until `until` at the latest.
pub fn connect<A: Api>(
    address: &Address,
    files: &Files,
    until: Option<Instant>,
) -> Result<Connected<A>, Error> {
    let latest = Instant::now() + PATIENCE;
    let until = until.map_or(latest, |until| until.min(latest));
    let mut pause = AGAIN;
    let (channel, theirs) = loop {
        match exchange::<A>(address, files, until) {
            Err(error) if error.is_wordless() && Instant::now() + pause < until => {
                thread::sleep(pause);
                pause = (2 * pause).min(LONGEST_PAUSE);
            }
            exchanged => break exchanged?,
        }
    };
    let theirs = Hello::check_for::<A>(&theirs)?;
    if theirs.form != Form::Stream {
        return Err(Error::Form);
    }
    let file = mapping::create(theirs.window)?;
    let window = Window::map(&file, theirs.window, theirs.ring)?;
    let (nudge, nudges) = UnixStream::pair().map_err(Error::Pair)?;
    let (reader, writer) = channel.split();
    let closer = reader.closer();
    let bridge = Bridge::client(&window, (reader, writer), nudge);
    Ok(Connected {
        window,
        file,
        nudges,
        bridge,
        closer,
    })
}

/// Exchanges hellos with a worker: returns the connection and the worker's answer.
fn exchange<A: Api>(
    address: &Address,
    files: &Files,
    until: Instant,
) -> Result<(Channel, [u8; hello::SIZE]), Error> {
    let channel = match address {
        Address::Unix(path) => Channel::plain(unix(path, until)?),
        Address::Tcp(host) => Channel::plain(machine(host, until, true)?),
        Address::Tls(host) => {
            let session = files.client()?.connect(host)?;
            Channel::secure(machine(host, until, false)?, session, until)
                .map_err(Error::Handshake)?
        }
    };
    let ours = Hello {
        form: Form::Stream,
        ..Hello::client::<A>()
    };
    let exchanged = channel
        .send_hello(&ours.to_bytes(), until)
        .and_then(|()| channel.receive_hello(until));
    Ok((channel, exchanged.map_err(Error::Hello)?))
}

fn unix(path: &Path, until: Instant) -> Result<Socket, Error> {
    loop {
        match socket::connect(path) {
            Ok(stream) => {
                stream
                    .set_nonblocking(false)
                    .map_err(|error| Error::Path(path.to_owned(), error))?;
                return Ok(Socket::new(stream.into()));
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < until => {
                thread::sleep(AGAIN);
            }
            Err(error) => return Err(Error::Path(path.to_owned(), error)),
        }
    }
}

fn machine(host: &Host, until: Instant, here: bool) -> Result<Socket, Error> {
    let failed = |error| Error::Host(host.clone(), error);
    let addresses = (host.name.as_str(), host.port)
        .to_socket_addrs()
        .map_err(failed)?;
    let mut last = io::ErrorKind::AddrNotAvailable.into();
    for address in addresses {
        if here && !address.ip().is_loopback() {
            return Err(Error::Elsewhere(host.clone()));
        }
        let left = until.saturating_duration_since(Instant::now());
        match TcpStream::connect_timeout(&address, left.max(AGAIN)) {
            Ok(stream) => {
                let stream = OwnedFd::from(stream);
                tcp::tune(&stream, tcp::SILENCE).map_err(failed)?;
                return Ok(Socket::new(stream));
            }
            Err(error) => last = error,
        }
    }
    Err(failed(last))
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        os::unix::net::UnixListener,
    };

    use remoting_proto::apis::opencl::OpenCl;
    use remoting_transport::window;

    use super::*;

    /// Connects to a server that gives each connection its next answer. Returns the result, and the
    /// number of connections.
    fn answered(
        name: &str,
        answers: &'static [&'static [u8]],
    ) -> (Result<Connected<OpenCl>, Error>, usize) {
        let path = std::env::temp_dir().join(format!("gantry-{name}-{}", std::process::id()));
        let listener = UnixListener::bind(&path).unwrap();
        let serving = thread::spawn(move || {
            for answer in answers {
                let (mut stream, _) = listener.accept().unwrap();
                stream.read_exact(&mut [0; hello::SIZE]).unwrap();
                stream.write_all(answer).unwrap();
            }
            listener.set_nonblocking(true).unwrap();
            answers.len() + usize::from(listener.accept().is_ok())
        });
        let address = Address::Unix(path.clone());
        let connected = connect::<OpenCl>(&address, &Files::named(), None);
        let count = serving.join().unwrap();
        std::fs::remove_file(path).unwrap();
        (connected, count)
    }

    #[test]
    fn who_was_not_served_comes_again() {
        let hello = Hello {
            form: Form::Stream,
            window: window::SMALLEST,
            ring: 1 << 16,
            ..Hello::client::<OpenCl>()
        };
        let answers: Vec<&[u8]> = vec![b"", b"", hello.to_bytes().to_vec().leak()];
        let (connected, count) = answered("again", answers.leak());
        assert_eq!(connected.unwrap().window.size(), window::SMALLEST);
        assert_eq!(count, 3);
    }

    #[test]
    fn who_was_refused_does_not_come_again() {
        let (refused, count) = answered("refused", &[&[0; hello::SIZE]]);
        assert!(matches!(refused, Err(Error::Refused(_))), "{refused:?}");
        assert_eq!(count, 1);
    }
}
