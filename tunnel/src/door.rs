//! Connections to and from the network, until both sides have authenticated each other.

use std::{
    fmt::Display,
    io::{self, Read},
    net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs},
    os::{
        fd::{AsFd, AsRawFd},
        unix::net::UnixStream,
    },
    path::Path,
    sync::{
        Arc, Mutex,
        mpsc::{self, Receiver, Sender},
    },
    thread,
    time::{Duration, Instant},
};

use base::{Unpoisoned, note::Seldom, tcp::SILENCE};
use rustls::{ClientConnection, Connection, ServerConfig, ServerConnection, pki_types::ServerName};

use crate::{
    identity,
    strangers::{MOST, Strangers},
};

/// Maximum time for connecting, and for mutual authentication.
const PATIENCE: Duration = Duration::from_secs(10);

/// Interval between checks whether the VMM still waits.
const TICK: Duration = Duration::from_millis(100);

/// Interval between checks for an authenticated peer while handshakes are in progress: a VM that
/// moves over many connections establishes them one after the other.
const SOON: Duration = Duration::from_millis(5);

/// Why there is no tunnel.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The certificates or keys are unusable.
    #[error(transparent)]
    Identity(#[from] identity::Error),
    /// The address is malformed.
    #[error("{0:?} is no HOST:PORT")]
    Address(String),
    /// A network operation failed.
    #[error("cannot {action} {address}")]
    Network {
        /// `connect to` or `listen at`.
        action: &'static str,
        /// The address.
        address: String,
        /// The cause.
        source: io::Error,
    },
    /// The TLS handshake failed.
    #[error("no TLS with {address}")]
    Handshake {
        /// The peer's address.
        address: String,
        /// The cause.
        source: io::Error,
    },
    /// The VMM has hung up.
    #[error("the VMM does not wait any more")]
    Gone,
}

/// A connection whose two sides have authenticated each other.
pub struct Known {
    /// The connection.
    pub socket: TcpStream,
    /// The TLS state.
    pub tls: Connection,
}

/// Connects to a destination, whose certificate must name its host.
pub fn connect(to: &str, tls_dir: &Path) -> Result<Known, Error> {
    let config = identity::client(tls_dir)?;
    let bad = || Error::Address(to.to_owned());
    let (host, _) = to.rsplit_once(':').ok_or_else(bad)?;
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let name = ServerName::try_from(host.to_owned()).map_err(|_| bad())?;
    let network = |source| Error::Network {
        action: "connect to",
        address: to.to_owned(),
        source,
    };
    let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
    for address in to.to_socket_addrs().map_err(network)? {
        match TcpStream::connect_timeout(&address, PATIENCE) {
            Ok(socket) => {
                let handshake = |source| Error::Handshake {
                    address: to.to_owned(),
                    source,
                };
                let tls = ClientConnection::new(config, name)
                    .map_err(|error| handshake(io::Error::other(error)))?;
                return shake_hands(socket, tls.into()).map_err(handshake);
            }
            Err(error) => last = error,
        }
    }
    Err(network(last))
}

/// An address at which a source is awaited.
pub struct Door {
    listener: TcpListener,
    config: Arc<ServerConfig>,
    address: String,
    /// A channel for peers that have shown a trusted certificate, together with its sender.
    known: (Sender<Known>, Receiver<Known>),
    /// Peers that have not shown a certificate yet, no matter who waits.
    strangers: Strangers,
    said: Arc<Mutex<Seldom>>,
}

impl Door {
    /// Binds the address and listens.
    pub fn open(at: &str, tls_dir: &Path) -> Result<Self, Error> {
        let config = identity::server(tls_dir)?;
        let network = |source| Error::Network {
            action: "listen at",
            address: at.to_owned(),
            source,
        };
        let listener = TcpListener::bind(at).map_err(network)?;
        listener.set_nonblocking(true).map_err(network)?;
        Ok(Self {
            listener,
            config,
            address: at.to_owned(),
            known: mpsc::channel(),
            strangers: Strangers::default(),
            said: Arc::default(),
        })
    }

    /// The address.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// The port.
    pub fn port(&self) -> io::Result<u16> {
        Ok(self.listener.local_addr()?.port())
    }

    /// Waits for the first peer that shows a trusted certificate. Others are turned away, each on a
    /// thread of its own, so that none delays the wait. Ends when `vmm` hangs up.
    pub fn wait(&self, vmm: &UnixStream) -> Result<Known, Error> {
        let Self {
            strangers, said, ..
        } = self;
        let (sender, known) = &self.known;
        loop {
            if let Ok(known) = known.try_recv() {
                return Ok(known);
            }
            if has_hung_up(vmm) {
                return Err(Error::Gone);
            }
            let is_expected = !strangers.is_empty();
            wait_for(&self.listener, if is_expected { SOON } else { TICK });
            let (socket, from) = match self.listener.accept() {
                Ok(accepted) => accepted,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                Err(error) => {
                    if let Some(unsaid) = said.lock_unpoisoned().due() {
                        base::note!(
                            "gantry-tunnel: cannot accept at {}: {error}{unsaid}",
                            self.address
                        );
                    }
                    thread::sleep(TICK);
                    continue;
                }
            };
            let stranger = match strangers.add(&socket) {
                Ok(stranger) => stranger,
                Err(error) => {
                    turned_away(said, from, error);
                    continue;
                }
            };
            let (config, sender) = (Arc::clone(&self.config), sender.clone());
            let of_thread = Arc::clone(said);
            let work = move || {
                let shaken = ServerConnection::new(config)
                    .map_err(io::Error::other)
                    .and_then(|tls| shake_hands(socket, tls.into()));
                match shaken {
                    _ if !stranger.is_through() => {
                        let why = format_args!(
                            "{MOST} others have come before it has shown a certificate"
                        );
                        turned_away(&of_thread, from, why);
                    }
                    // Nobody receives any more if the door is closed.
                    Ok(known) => drop(sender.send(known)),
                    Err(error) => turned_away(&of_thread, from, error),
                }
            };
            if let Err(error) = thread::Builder::new().spawn(work) {
                turned_away(said, from, format_args!("cannot start a thread: {error}"));
            }
        }
    }
}

/// Logs who is turned away and why, at a limited rate.
fn turned_away(said: &Mutex<Seldom>, from: SocketAddr, why: impl Display) {
    if let Some(unsaid) = said.lock_unpoisoned().due() {
        base::note!("gantry-tunnel: {from} is turned away: {why}{unsaid}");
    }
}

/// Performs the handshake, in which both sides show their certificates, in bounded time.
fn shake_hands(socket: TcpStream, mut tls: Connection) -> io::Result<Known> {
    let deadline = Instant::now() + PATIENCE;
    socket.set_nonblocking(false)?;
    // Only this tells the VMM that the other host is gone.
    base::tcp::tune(&socket, SILENCE)?;
    let mut socket = Bounded { socket, deadline };
    while tls.is_handshaking() || tls.wants_write() {
        tls.complete_io(&mut socket)?;
    }
    let socket = socket.socket;
    socket.set_read_timeout(None)?;
    socket.set_write_timeout(None)?;
    Ok(Known { socket, tls })
}

/// A socket that fails after a deadline.
struct Bounded {
    socket: TcpStream,
    deadline: Instant,
}

impl Bounded {
    fn left(&self) -> io::Result<Option<Duration>> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        match left.is_zero() {
            true => Err(io::ErrorKind::TimedOut.into()),
            false => Ok(Some(left)),
        }
    }
}

impl Read for Bounded {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.socket.set_read_timeout(self.left()?)?;
        self.socket.read(bytes)
    }
}

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.socket.set_write_timeout(self.left()?)?;
        self.socket.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.socket.flush()
    }
}

fn wait_for(fd: impl AsFd, time: Duration) {
    let mut poll = libc::pollfd {
        fd: fd.as_fd().as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one descriptor, in a local that outlives the call.
    unsafe { libc::poll(&raw mut poll, 1, time.as_millis() as libc::c_int) };
}

fn has_hung_up(vmm: &UnixStream) -> bool {
    let mut poll = libc::pollfd {
        fd: vmm.as_raw_fd(),
        events: 0,
        revents: 0,
    };
    // SAFETY: one descriptor, in a local that outlives the call.
    unsafe { libc::poll(&raw mut poll, 1, 0) };
    poll.revents & (libc::POLLHUP | libc::POLLERR) != 0
}
