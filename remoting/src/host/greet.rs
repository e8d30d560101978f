//! Before an application is served: greeting who has connected, until one may have this worker.
//!
//! A worker that waits for an application makes itself known to whoever connects, and is taken only
//! by one that has shown a certificate (by TLS) and speaks its version. So who may not have a worker
//! costs time and no process. And who says nothing, or a byte now and then, keeps nobody else out:
//! several are greeted at once, each by a thread of its own and for a bounded time, and where there
//! are too many, some have to go ([`Crowd`]).
//!
//! One of those who may have the worker gets its hello; the connections of the others end without
//! one, and they come again ([`connect`](crate::link::stream::connect)).

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

use super::{
    compiled::owner::Owner,
    crowd::{Admitted, Crowd, Origin},
    stream::{self, Kind, Options},
};
use crate::{
    apis,
    link::{
        socket,
        stream::{
            channel::{Channel, Socket},
            tls,
        },
    },
    note::Seldom,
    wire::{
        api::ApiId,
        hello::{Form, Hello},
    },
};

/// How long a peer may take until it has said hello.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long to wait after a connection could not be accepted.
const BREATH: Duration = Duration::from_millis(20);
/// Bytes of the stack of a thread that greets.
const STACK: usize = 512 << 10;

/// What greeting somebody comes to: its connection if it has this worker now, and none if it has
/// left, or has to come again as another has the worker.
type Greeted = Result<Option<Served>, Box<dyn Error + Send + Sync>>;
/// An application that has got a hello, and the API that it calls.
pub(super) type Served = (Channel, ApiId);

/// A listening socket, and what is spoken there.
#[derive(Debug)]
pub(super) enum Door {
    Unix(UnixListener),
    Tcp(TcpListener),
    Tls(TcpListener, tls::Server),
}

impl Door {
    /// Over a listening socket that does not block: others wait for applications by the same socket,
    /// and may be faster. Reads the files that it needs: before the worker is confined.
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

    /// Whose application is at the other end of a connection that came by this door, if anybody
    /// says so who is to be trusted.
    pub fn owner(&self, channel: &Channel) -> Option<Owner> {
        match self {
            Self::Unix(_) => socket::user(channel.fd()).ok().and_then(Owner::of_user),
            Self::Tcp(_) => None,
            Self::Tls(_, server) => channel.subject(server).map(Owner::Subject),
        }
    }

    /// Who has connected, and where from.
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

    /// The next application that may have this worker, after its hello. `sizes` are those of the window
    /// and of its rings, for the answer.
    pub fn next(&self, sizes: (u64, u64)) -> io::Result<Served> {
        let (ring, bell) = UnixStream::pair()?;
        let greeting = Greeting {
            door: self,
            sizes,
            taken: AtomicBool::new(false),
            ring,
        };
        thread::scope(|scope| {
            let mut crowd = Crowd::default();
            let served = greeting.until_taken(scope, &mut crowd, &bell);
            // The threads end before the worker serves: they use what the pool gets to know by.
            crowd.dismiss();
            served
        })
    }
}

/// What those who greet have in common.
struct Greeting<'a> {
    door: &'a Door,
    /// The sizes of the window and of its rings, for the answer.
    sizes: (u64, u64),
    /// Whether somebody has the worker.
    taken: AtomicBool,
    /// Threads write a byte there when they have ended.
    ring: UnixStream,
}

impl Greeting<'_> {
    fn until_taken<'scope>(
        &'scope self,
        scope: &'scope thread::Scope<'scope, '_>,
        crowd: &mut Crowd,
        mut bell: &UnixStream,
    ) -> io::Result<Served> {
        let (sender, outcomes) = mpsc::channel::<(u64, Greeted)>();
        let mut refusals = Refusals::default();
        loop {
            let (rung, knocked) = self.wait(bell, crowd.closed(Instant::now()))?;
            if rung {
                let _ = bell.read(&mut [0; 64])?;
                for (number, outcome) in outcomes.try_iter() {
                    let peer = crowd.leave(number);
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
                // Who wanted to come has gone again, the network has, or there is no descriptor or
                // memory just now.
                Err(_) => {
                    thread::sleep(BREATH);
                    continue;
                }
            };
            let Ok(handle) = socket.try_clone() else {
                thread::sleep(BREATH);
                continue;
            };
            let Admitted {
                number,
                settled,
                displaced,
            } = crowd.admit(origin, name, handle);
            if let Some(name) = displaced {
                refusals.note(&name, "it said nothing, and others came");
            }
            let sender = sender.clone();
            let greet = move || {
                let outcome = self.greet(Socket::new(socket), &settled);
                // Who has served its turn is not waited for any more.
                let _ = sender.send((number, outcome));
                let _ = (&self.ring).write(&[0]);
            };
            let thread = thread::Builder::new().name("greet".to_owned());
            if thread.stack_size(STACK).spawn_scoped(scope, greet).is_err() {
                crowd.leave(number);
                thread::sleep(BREATH);
            }
        }
    }

    /// Waits until a thread has ended or, but not before the door opens, somebody has come: whether
    /// it was that.
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
            // Rounded up; a head start is short.
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

    fn greet(&self, socket: Socket, settled: &AtomicBool) -> Greeted {
        match self.exchange(socket, settled) {
            // Who leaves in the middle only wanted to know whether somebody listens.
            Err(error) if has_left(error.as_ref()) => Ok(None),
            outcome => outcome,
        }
    }

    fn exchange(&self, socket: Socket, settled: &AtomicBool) -> Greeted {
        let until = Instant::now() + PATIENCE;
        let channel = match self.door {
            Door::Unix(_) | Door::Tcp(_) => Channel::plain(socket),
            Door::Tls(_, server) => Channel::secure(socket, server.accept()?, until)?,
        };
        let theirs = channel.receive_hello(until)?;
        // Also to one of another build, so that it can name both versions.
        let ours = Hello::answer(apis::answering(&theirs), Form::Stream, self.sizes).to_bytes();
        let refused = match Hello::check(&theirs, &apis::ALL) {
            Ok(hello) if hello.form == Form::Stream => {
                // One alone: who has got a hello is served.
                if self.taken.swap(true, Ordering::Relaxed) {
                    return Ok(None);
                }
                if settled.swap(true, Ordering::Relaxed) {
                    self.taken.store(false, Ordering::Relaxed);
                    return Ok(None);
                }
                if let Err(error) = channel.send_hello(&ours, until) {
                    self.taken.store(false, Ordering::Relaxed);
                    return Err(error.into());
                }
                return Ok(Some((channel, hello.api)));
            }
            Ok(_) => "its driver wants a window that is shared".into(),
            Err(refused) => refused.into(),
        };
        channel.send_hello(&ours, until)?;
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

fn has_left(error: &(dyn Error + Send + Sync + 'static)) -> bool {
    error
        .downcast_ref::<io::Error>()
        .is_some_and(|error| error.kind() == io::ErrorKind::UnexpectedEof)
}

/// Says who was refused, and no more often than somebody reads it.
#[derive(Debug, Default)]
pub(super) struct Refusals(Seldom);

impl Refusals {
    pub fn note(&mut self, peer: &str, why: &str) {
        if let Some(unsaid) = self.0.due() {
            crate::note!("gantry-accel: {peer} was refused: {why}{unsaid}");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{net::TcpStream, path::Path};

    use super::{super::crowd::MOST, *};
    use crate::{
        apis::opencl::OpenCl,
        wire::{Api, api::Spoken, hello::SIZE},
    };

    const SIZES: (u64, u64) = (1 << 30, 1 << 20);

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    fn ours() -> Hello {
        Hello::answer(Spoken::of::<OpenCl>(), Form::Stream, SIZES)
    }

    /// What a driver says that may have a worker.
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
    fn drivers_of_another_version_or_form_are_refused_and_the_next_is_taken() {
        let name = format!("gantry-door-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let listener = UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        let door = Door::new(listener.into(), Kind::Unix, &Options::default()).unwrap();
        let taking = thread::spawn(move || door.next(SIZES).map(drop));
        let mut other = right();
        other.version.number += 1;
        // It learns of the worker's version, and can say so.
        let told = say(to(&path), other).unwrap();
        assert_eq!(Hello::check_for::<OpenCl>(&told), Ok(ours()));
        assert_eq!(say(to(&path), Hello::client::<OpenCl>()).unwrap(), told);
        assert!(!taking.is_finished());
        other.version = OpenCl::VERSION;
        assert_eq!(say(to(&path), other).unwrap(), told);
        taking.join().unwrap().unwrap();
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn who_says_nothing_or_little_keeps_nobody_out() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        // One after the other they would take minutes, and more of them than there are places.
        let silent: Vec<_> = (0..2 * MOST)
            .map(|index| {
                let mut stream = TcpStream::connect(address).unwrap();
                stream.write_all(&[0; SIZE][..index % 2]).unwrap();
                stream
            })
            .collect();
        listener.set_nonblocking(true).unwrap();
        let door = Door::new(listener.into(), Kind::Tcp, &Options::default()).unwrap();
        let taking = thread::spawn(move || door.next(SIZES).map(drop));
        let told = say(TcpStream::connect(address).unwrap(), right()).unwrap();
        assert_eq!(Hello::check_for::<OpenCl>(&told), Ok(ours()));
        taking.join().unwrap().unwrap();
        drop(silent);
    }

    #[test]
    fn of_two_who_may_have_a_worker_one_alone_gets_its_hello() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let door = Door::new(listener.into(), Kind::Tcp, &Options::default()).unwrap();
        let greeting = Greeting {
            door: &door,
            sizes: SIZES,
            taken: AtomicBool::new(false),
            ring: UnixStream::pair().unwrap().0,
        };
        let come = |dismissed| {
            let (here, there) = UnixStream::pair().unwrap();
            (&here).write_all(&right().to_bytes()).unwrap();
            let settled = AtomicBool::new(dismissed);
            let greeted = greeting.greet(Socket::new(there.into()), &settled);
            (here, greeted.unwrap())
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
