//! The handshake between a waiting worker and the applications that connect to it.
//!
//! A waiting worker answers every connection, and serves the first client that has authenticated
//! (by TLS, where that is required) and speaks its protocol version. A client that is refused costs
//! time but no process. A client that sends nothing, or one byte now and then, keeps no other out:
//! handshakes run in parallel, each in a thread of its own and for a bounded time, and when there are
//! too many the oldest are closed ([`Pending`]).
//!
//! Exactly one client receives the worker's hello. The connections of the other clients are closed
//! without one, and those clients connect again ([`connect`](remoting_stream::connect)).

use std::{
    error::Error,
    io::{self, Read, Write},
    net::TcpListener,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::net::{UnixListener, UnixStream},
    },
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use base::note::Seldom;
use remoting_proto::{
    apis,
    wire::{
        api::{ApiId, Spoken},
        hello::{self, Form, Hello},
    },
};
use remoting_stream::{
    channel::{Channel, Socket},
    tls,
};
use remoting_transport::socket;

use super::{
    compiled::owner::Owner,
    pending::{Admitted, Origin, Pending},
    stream::{self, Options, StreamProtocol},
};

/// How long a peer may take until it has sent its hello.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long to wait after accept(2) failed.
const ACCEPT_RETRY: Duration = Duration::from_millis(20);
/// Stack size of a handshake thread, in bytes.
const STACK: usize = 512 << 10;

/// The outcome of a handshake: the connection if the peer has this worker now; none if it has closed
/// its connection, or has to connect again because another peer has the worker.
type Outcome = Result<Option<Served>, Box<dyn Error + Send + Sync>>;
/// An application that has received the hello, and the API that it calls.
pub(super) type Served = (Channel, ApiId);

/// A listening socket, and what is spoken there.
#[derive(Debug)]
pub(super) enum Door {
    Unix(UnixListener),
    Tcp(TcpListener),
    Tls(TcpListener, tls::Server),
}

impl Door {
    /// Wraps a non-blocking listening socket: other workers accept from the same socket and may be
    /// faster. Reads the certificates, and is therefore called before the worker is sandboxed.
    pub fn new(
        listener: OwnedFd,
        kind: StreamProtocol,
        options: &Options,
    ) -> Result<Self, tls::Error> {
        Ok(match kind {
            StreamProtocol::Unix => Self::Unix(listener.into()),
            StreamProtocol::Tcp => Self::Tcp(listener.into()),
            StreamProtocol::Tls => {
                let file = |path: &Option<PathBuf>| path.clone().unwrap_or_default();
                let server = tls::Server::open(
                    &file(&options.tls_cert),
                    &file(&options.tls_client_ca),
                    &options.tls_schemes,
                    Arc::new(stream::ask),
                )?;
                Self::Tls(listener.into(), server)
            }
        })
    }

    fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(listener) => listener.as_fd(),
            Self::Tcp(listener) | Self::Tls(listener, _) => listener.as_fd(),
        }
    }

    /// The owner of the application at the other end of a connection, if the kernel or a verified
    /// certificate names it.
    pub fn owner(&self, channel: &Channel) -> Option<Owner> {
        match self {
            Self::Unix(_) => socket::user(channel.fd()).ok().and_then(Owner::of_user),
            Self::Tcp(_) => None,
            Self::Tls(_, server) => channel.subject(server).map(Owner::Subject),
        }
    }

    /// Accepts a connection; also returns its origin and a name for the log.
    fn accept(&self) -> io::Result<(OwnedFd, Origin, String)> {
        Ok(match self {
            Self::Unix(listener) => {
                let (stream, _) = listener.accept()?;
                let origin = Origin::of_process(&stream)?;
                (
                    stream.into(),
                    origin,
                    "a process of this machine".to_owned(),
                )
            }
            Self::Tcp(listener) | Self::Tls(listener, _) => {
                let (stream, peer) = listener.accept()?;
                (stream.into(), Origin::of(peer.ip()), peer.to_string())
            }
        })
    }

    /// Waits for the next application that may have this worker, and sends it the hello. `spoken` are the APIs that are
    /// served, `sizes` those of the window and of its rings, in bytes.
    pub fn next(&self, spoken: &[Spoken], sizes: (u64, u64)) -> io::Result<Served> {
        let (ring, bell) = UnixStream::pair()?;
        let handshake = Handshake {
            door: self,
            spoken,
            sizes,
            taken: AtomicBool::new(false),
            ring,
        };
        thread::scope(|scope| {
            let mut pending = Pending::default();
            let served = handshake.until_taken(scope, &mut pending, &bell);
            // The threads end before the worker serves: they use the channel to the pool.
            pending.dismiss();
            served
        })
    }
}

/// The state that all handshake threads share.
struct Handshake<'a> {
    door: &'a Door,
    /// The APIs that are served.
    spoken: &'a [Spoken],
    /// The sizes of the window and of its rings, in bytes, for the hello.
    sizes: (u64, u64),
    /// Whether a client has the worker.
    taken: AtomicBool,
    /// Threads write a byte here when they end.
    ring: UnixStream,
}

impl Handshake<'_> {
    fn until_taken<'scope>(
        &'scope self,
        scope: &'scope thread::Scope<'scope, '_>,
        pending: &mut Pending,
        mut bell: &UnixStream,
    ) -> io::Result<Served> {
        let (sender, outcomes) = mpsc::channel::<(u64, Outcome)>();
        let mut refusals = Refusals::default();
        loop {
            let (rung, knocked) = self.wait(bell, pending.closed(Instant::now()))?;
            if rung {
                let _ = bell.read(&mut [0; 64])?;
                for (number, outcome) in outcomes.try_iter() {
                    let peer = pending.leave(number);
                    let refused = match outcome {
                        Ok(Some(served)) => return Ok(served),
                        Ok(None) => continue,
                        Err(error) => error,
                    };
                    if let Some(peer) = peer.filter(|peer| !peer.dismissed) {
                        refusals.note(&peer.name, &refused.to_string());
                    }
                }
            }
            if !knocked {
                continue;
            }
            let (socket, origin, name) = match self.door.accept() {
                Ok(accepted) => accepted,
                Err(error) if is_ours(&error) => return Err(error),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                // The peer has closed its connection already, the network failed, or there is no
                // descriptor or memory at the moment.
                Err(error) => {
                    refusals.note(
                        "a connection",
                        &format!("it cannot be accepted yet: {error}"),
                    );
                    thread::sleep(ACCEPT_RETRY);
                    continue;
                }
            };
            let handle = match socket.try_clone() {
                Ok(handle) => handle,
                Err(error) => {
                    refusals.note(&name, &error.to_string());
                    thread::sleep(ACCEPT_RETRY);
                    continue;
                }
            };
            let Admitted {
                number,
                committed,
                displaced,
            } = pending.admit(origin, name, handle);
            if let Some(name) = displaced {
                refusals.note(
                    &name,
                    "it sent no hello, and its place went to a newer connection",
                );
            }
            let sender = sender.clone();
            let run = move || {
                let outcome = self.run(Socket::new(socket), &committed);
                // After the worker has a client, nobody receives this.
                let _ = sender.send((number, outcome));
                let _ = (&self.ring).write(&[0]);
            };
            let thread = thread::Builder::new().name("handshake".to_owned());
            if let Err(error) = thread.stack_size(STACK).spawn_scoped(scope, run) {
                if let Some(peer) = pending.leave(number) {
                    refusals.note(&peer.name, &format!("cannot start a thread: {error}"));
                }
                thread::sleep(ACCEPT_RETRY);
            }
        }
    }

    /// Waits until a thread has ended or, after `closed`, a connection has arrived; returns which of
    /// the two it was.
    fn wait(&self, bell: &UnixStream, closed: Duration) -> io::Result<(bool, bool)> {
        let entry = |fd: BorrowedFd<'_>| libc::pollfd {
            fd: fd.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        let mut polled = [entry(bell.as_fd()), entry(self.door.fd())];
        let (count, patience) = match closed {
            Duration::ZERO => (2, -1),
            Duration::MAX => (1, -1),
            // Rounded up.
            closed => (1, closed.as_millis().min(1000) as libc::c_int + 1),
        };
        // SAFETY: as many entries as is said, at most.
        if unsafe { libc::poll(polled.as_mut_ptr(), count, patience) } < 0 {
            let error = io::Error::last_os_error();
            return match error.kind() {
                io::ErrorKind::Interrupted => Ok((false, false)),
                _ => Err(error),
            };
        }
        Ok((polled[0].revents != 0, polled[1].revents != 0))
    }

    fn run(&self, socket: Socket, committed: &AtomicBool) -> Outcome {
        match self.exchange(socket, committed) {
            // A peer that closes during the handshake only probed whether anybody listens.
            Err(error) if has_left(error.as_ref()) => Ok(None),
            outcome => outcome,
        }
    }

    fn exchange(&self, socket: Socket, committed: &AtomicBool) -> Outcome {
        let until = Instant::now() + PATIENCE;
        let channel = match self.door {
            Door::Unix(_) | Door::Tcp(_) => Channel::plain(socket),
            Door::Tls(_, server) => Channel::secure(socket, server.accept()?, until)?,
        };
        let theirs = channel.receive_hello(until)?;
        // Also sent to a client of another build or API, so that it can name both.
        let ours = answering(self.spoken, &theirs);
        let ours = Hello::answer(ours, Form::Stream, self.sizes).to_bytes();
        let refused = match Hello::check(&theirs, self.spoken) {
            Ok(hello) if hello.form == Form::Stream => {
                // Only one client: whoever receives the hello is served.
                if self.taken.swap(true, Ordering::Relaxed) {
                    return Ok(None);
                }
                if committed.swap(true, Ordering::Relaxed) {
                    self.taken.store(false, Ordering::Relaxed);
                    return Ok(None);
                }
                if let Err(error) = channel.send_hello(&ours, until) {
                    self.taken.store(false, Ordering::Relaxed);
                    return Err(error.into());
                }
                return Ok(Some((channel, hello.api)));
            }
            Ok(_) => "its driver asks for shared memory, which a stream does not have".into(),
            Err(refused) => refused.into(),
        };
        channel.send_hello(&ours, until)?;
        channel.refuse();
        Err(refused)
    }
}

/// What is spoken here of the API that a peer's hello names; of one that is not served, that of another one.
pub(super) fn answering(spoken: &[Spoken], theirs: &[u8; hello::SIZE]) -> Spoken {
    let of_theirs = |one: &&Spoken| one.api.number() == Hello::api_number(theirs);
    let found = spoken.iter().find(of_theirs).or(spoken.first());
    found.copied().unwrap_or_else(|| apis::answering(theirs))
}

/// Whether accept(2) failed because of the listening socket itself, not because of a peer, the network
/// or a shortage of resources.
fn is_ours(error: &io::Error) -> bool {
    let code = error.raw_os_error();
    matches!(
        code,
        Some(libc::EBADF | libc::EINVAL | libc::ENOTSOCK | libc::EOPNOTSUPP)
    )
}

fn has_left(error: &(dyn Error + Send + Sync + 'static)) -> bool {
    error
        .downcast_ref::<io::Error>()
        .is_some_and(|error| error.kind() == io::ErrorKind::UnexpectedEof)
}

/// Logs refused peers, at a limited rate.
#[derive(Debug, Default)]
pub(super) struct Refusals(Seldom);

impl Refusals {
    pub fn note(&mut self, peer: &str, why: &str) {
        if let Some(unsaid) = self.0.due() {
            base::note!("gantry-accel: {peer} was refused: {why}{unsaid}");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{net::TcpStream, path::Path};

    use super::{super::pending::MOST, *};
    use remoting_proto::{
        apis::{cuda::Cuda, opencl::OpenCl},
        wire::{Api, hello::SIZE},
    };

    const SIZES: (u64, u64) = (1 << 30, 1 << 20);

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    fn ours() -> Hello {
        Hello::answer(Spoken::of::<OpenCl>(), Form::Stream, SIZES)
    }

    /// The hello of a driver that may have a worker.
    fn right() -> Hello {
        Hello {
            form: Form::Stream,
            ..Hello::client::<OpenCl>()
        }
    }

    fn say(stream: impl Into<OwnedFd>, hello: Hello) -> io::Result<[u8; SIZE]> {
        let channel = Channel::plain(Socket::new(stream.into()));
        channel.send_hello(&hello.to_bytes(), soon())?;
        channel.receive_hello(soon())
    }

    fn to(path: &Path) -> UnixStream {
        UnixStream::connect(path).unwrap()
    }

    #[test]
    fn drivers_of_another_version_form_or_api_cost_no_worker() {
        let name = format!("gantry-door-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let listener = UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        let door = Door::new(listener.into(), StreamProtocol::Unix, &Options::default()).unwrap();
        let taking = thread::spawn(move || door.next(&[Spoken::of::<OpenCl>()], SIZES).map(drop));
        let mut other = right();
        other.version.number += 1;
        // It receives the worker's version, and can report it.
        let told = say(to(&path), other).unwrap();
        assert_eq!(Hello::check_for::<OpenCl>(&told), Ok(ours()));
        assert_eq!(say(to(&path), Hello::client::<OpenCl>()).unwrap(), told);
        let cuda = Hello {
            form: Form::Stream,
            ..Hello::client::<Cuda>()
        };
        assert_eq!(say(to(&path), cuda).unwrap(), told);
        assert!(!taking.is_finished());
        other.version = OpenCl::VERSION;
        assert_eq!(say(to(&path), other).unwrap(), told);
        taking.join().unwrap().unwrap();
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_silent_client_keeps_nobody_out() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        // More connections than the limit; one after the other they would take minutes.
        let silent: Vec<_> = (0..2 * MOST)
            .map(|index| {
                let mut stream = TcpStream::connect(address).unwrap();
                stream.write_all(&[0; SIZE][..index % 2]).unwrap();
                stream
            })
            .collect();
        listener.set_nonblocking(true).unwrap();
        let door = Door::new(listener.into(), StreamProtocol::Tcp, &Options::default()).unwrap();
        let taking = thread::spawn(move || door.next(&[Spoken::of::<OpenCl>()], SIZES).map(drop));
        let told = say(TcpStream::connect(address).unwrap(), right()).unwrap();
        assert_eq!(Hello::check_for::<OpenCl>(&told), Ok(ours()));
        taking.join().unwrap().unwrap();
        drop(silent);
    }

    #[test]
    fn of_two_clients_only_one_receives_the_hello() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let door = Door::new(listener.into(), StreamProtocol::Tcp, &Options::default()).unwrap();
        let handshake = Handshake {
            door: &door,
            spoken: &[Spoken::of::<OpenCl>()],
            sizes: SIZES,
            taken: AtomicBool::new(false),
            ring: UnixStream::pair().unwrap().0,
        };
        let come = |dismissed| {
            let (here, there) = UnixStream::pair().unwrap();
            (&here).write_all(&right().to_bytes()).unwrap();
            let committed = AtomicBool::new(dismissed);
            let outcome = handshake.run(Socket::new(there.into()), &committed);
            (here, outcome.unwrap())
        };
        let (mut dismissed, none) = come(true);
        assert!(none.is_none());
        assert_eq!(dismissed.read(&mut [0]).unwrap(), 0);
        let (mut first, channel) = come(false);
        assert!(channel.is_some());
        first.read_exact(&mut [0; SIZE]).unwrap();
        let (mut second, none) = come(false);
        assert!(none.is_none());
        assert_eq!(second.read(&mut [0]).unwrap(), 0);
    }
}
