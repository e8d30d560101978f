//! Worker processes: one per application, started before they are needed.
//!
//! The pool's process owns the socket and does nothing but start and end workers. Each worker opens
//! the host's driver, then accepts one connection and hands the pool a copy of it, so that the next
//! worker is started, and serves. When the other side closes the connection, the pool kills the
//! worker, whatever runs in it. Until the process is gone the pool keeps its copy: the other side
//! sees the connection end when the worker has ended, and not before.

use std::{
    collections::VecDeque,
    io,
    net::{Shutdown, TcpListener},
    os::{
        fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
        unix::{
            net::{UnixListener, UnixStream},
            process::CommandExt,
        },
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    ptr::null_mut,
    sync::{
        Arc,
        mpsc::{self, RecvTimeoutError, Sender},
    },
    thread,
    time::Duration,
};

use super::{
    compiled::{self, sweep::Sweeper},
    confine,
    control::{self, NotMoved},
    folders::{Cache, Folder},
    greet::Refusals,
    group::{self, Group, Groups, Limits},
    moves::{Asker, Event, Moves, Request, Which},
    process::{CONTROL, LISTENER, Options},
    standby::MOVES,
    stream::{self, Kind, Said},
};
use crate::{
    apis,
    descriptors::{self, Limit},
    link::{
        closer::Closer,
        socket,
        stream::{
            address::{Host, Listen},
            connect,
            tls::{self, Keeper},
        },
    },
    turns::introduce,
    wire::hello::{Form, Hello},
};

/// Descriptors that a pool needs whomever it serves: its own, connections that it has [refused
/// lately](REFUSED), those with which folders in folders are looked through, and those with which a
/// worker is started.
const OWN_DESCRIPTORS: u64 = 64;
/// Descriptors for each worker: its channels, its end, and its application's connection.
const DESCRIPTORS: u64 = 4;
/// Further ones where the device is shared: to the worker, and its process for the arbiter.
const SHARING_DESCRIPTORS: u64 = 2;

/// How many connections that were refused are kept open for a while.
const REFUSED: usize = 16;

/// How long to wait before a worker is started that could not be.
const AGAIN: Duration = Duration::from_secs(1);

/// Where a pool listens, and for what.
#[derive(Clone, Debug)]
pub enum Place {
    /// At a Unix socket, for applications and machines that share memory with workers.
    Rings {
        /// Where.
        path: PathBuf,
        /// How many of one user have a worker at a time.
        per_user: usize,
        /// Where the pool's own user asks for applications to be moved.
        control: Option<PathBuf>,
    },
    /// For applications elsewhere, so many at a time.
    Streams {
        /// Where.
        listen: Listen,
        /// The private key of the certificate, if there is TLS.
        key: Option<PathBuf>,
        /// Whether a port is served without TLS, to this machine.
        plain: bool,
        /// How many applications at a time.
        most: usize,
    },
}

/// Why a pool ends.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The socket.
    #[error(
        "cannot listen on {path}: is another pool running, is it no socket, or may this user not \
         write to its folder?"
    )]
    Listen {
        /// Its path.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The port.
    #[error(
        "cannot listen on {host}: is another pool running, or is it no address of this machine?"
    )]
    Port {
        /// Which.
        host: Host,
        /// Why.
        source: io::Error,
    },
    /// A port without TLS.
    #[error(
        "{0} is served by TLS only: name --tls-cert, --tls-key and --tls-client-ca; without TLS, by \
         --plain, an address of this machine alone (127.0.0.1, ::1) is served"
    )]
    Plain(Host),
    /// What only a port has a use for.
    #[error(
        "{0} is for --listen tcp:ADDRESS:PORT, and a socket is served without TLS: leave it out"
    )]
    ForPorts(&'static str),
    /// TLS.
    #[error(transparent)]
    Tls(#[from] tls::Error),
    /// The folder for the workers' files.
    #[error("cannot keep files in {}: let this user write there, or name another by --cache", folder.display())]
    Cache {
        /// The folder.
        folder: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The socket for requests.
    #[error("cannot listen on {} for requests to move applications", path.display())]
    Control {
        /// Its path.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Starting a worker.
    #[error("cannot start a worker process")]
    Start(#[source] io::Error),
    /// Workers end before they serve anybody.
    #[error("the last {0} workers ended before an application came: see the messages above")]
    Dying(u32),
}

/// A listening socket, its kind if streams are served, and how many at a time: all, and of a user.
struct Listener {
    socket: OwnedFd,
    kind: Option<Kind>,
    most: usize,
    per_user: usize,
    keeper: Option<Keeper>,
}

impl Listener {
    fn open(place: Place, options: &Options) -> Result<Self, Error> {
        if let Some(option) = unused(&place, options) {
            return Err(Error::ForPorts(option));
        }
        let (listen, key, plain, most) = match place {
            Place::Rings { path, per_user, .. } => {
                return Ok(Self {
                    socket: bind(path)?.into(),
                    kind: None,
                    most: usize::MAX,
                    per_user,
                    keeper: None,
                });
            }
            Place::Streams {
                listen,
                key,
                plain,
                most,
            } => (listen, key, plain, most),
        };
        let (socket, kind, keeper) = match listen {
            Listen::Unix(path) => {
                let listener = bind(path)?;
                // Streams bring bytes alone. By rings' sockets slices of machines come, with files.
                socket::refuse_files(&listener);
                (listener.into(), Kind::Unix, None)
            }
            Listen::Tcp(host) => {
                let failed = |source| Error::Port {
                    host: host.clone(),
                    source,
                };
                let port = (host.name.as_str(), host.port);
                let listener = TcpListener::bind(port).map_err(failed)?;
                connect::tune(listener.as_fd()).map_err(failed)?;
                let here = listener.local_addr().map_err(failed)?.ip().is_loopback();
                let files = (
                    &options.stream.tls_cert,
                    &options.stream.tls_client_ca,
                    &key,
                );
                let (kind, keeper) = match files {
                    (Some(certificate), Some(authority), Some(key)) if !plain => {
                        let keeper = Keeper::open(key, certificate)?;
                        // What workers will do, tried here where it is said at once.
                        let none = Arc::new(|_: u16, _: &[u8]| Err(io::ErrorKind::Other.into()));
                        tls::Server::open(certificate, authority, &keeper.schemes(), none)?;
                        (Kind::Tls, Some(keeper))
                    }
                    (None, None, None) if plain && here => (Kind::Tcp, None),
                    _ => return Err(Error::Plain(host)),
                };
                (listener.into(), kind, keeper)
            }
        };
        Ok(Self {
            socket,
            kind: Some(kind),
            most,
            per_user: usize::MAX,
            keeper,
        })
    }
}

/// The first option for ports alone that was given for a socket: who gives one expects TLS.
fn unused(place: &Place, options: &Options) -> Option<&'static str> {
    let (key, plain) = match place {
        Place::Rings { .. } => (false, false),
        Place::Streams {
            listen: Listen::Tcp(_),
            ..
        } => return None,
        Place::Streams { key, plain, .. } => (key.is_some(), *plain),
    };
    let given = [
        (options.stream.tls_cert.is_some(), "--tls-cert"),
        (options.stream.tls_client_ca.is_some(), "--tls-client-ca"),
        (key, "--tls-key"),
        (plain, "--plain"),
    ];
    given
        .iter()
        .find_map(|(given, option)| given.then_some(*option))
}

fn bind(path: PathBuf) -> Result<UnixListener, Error> {
    socket::listen(&path).map_err(|source| Error::Listen { path, source })
}

/// Listens and keeps `spare` workers waiting, for ever. Each is `program` with the arguments
/// `worker` and those of `options`.
pub fn run(place: Place, spare: usize, program: &Path, options: &Options) -> Result<(), Error> {
    let control = match &place {
        Place::Rings { control, .. } => control.clone(),
        Place::Streams { .. } => None,
    };
    let listener = Listener::open(place, options)?;
    let moves = Moves::listen(control.as_deref()).map_err(|source| Error::Control {
        path: control.unwrap_or_default(),
        source,
    })?;
    let cache = Cache::open(&options.cache).map_err(|source| Error::Cache {
        folder: options.cache.clone(),
        source,
    })?;
    if !confine::has_landlock() {
        crate::note!(
            "gantry-accel: this kernel has no Landlock: workers can read and write what this user \
             can, and keep nothing that they compile; boot one that has it, or run the pool as a \
             user of its own"
        );
    }
    let mut options = options.clone();
    let limit = options.compiler_cache.0;
    let _open = limit.and_then(|_| keep(&mut options));
    let kept = limit.zip(options.compiled.clone());
    let kept = kept.map(|(limit, folder)| (folder, limit));
    let sweeper = Sweeper::default();
    sweeper.start(kept, &cache.folder).map_err(Error::Start)?;
    let remover = remover().map_err(Error::Start)?;
    let groups = groups(&options);
    let closer = Closer::default();
    let files = Limit::raise().map_err(Error::Start)?;
    let most = bound(&listener, &options, files);
    let mut waiting: Vec<Worker> = Vec::new();
    let mut serving: Vec<Worker> = Vec::new();
    let mut dying = 0;
    let mut started = 0u64;
    // Whether the machine has had nothing for one more worker.
    let mut short = false;
    let mut refusals = Refusals::default();
    // What those say meanwhile would make an error of an end that comes at once.
    let mut refused = VecDeque::new();
    loop {
        let mut patience = None;
        while waiting.len() < spare.max(1) && waiting.len() + serving.len() < most {
            started += 1;
            let folder = cache.folder.join(started.to_string());
            let new = New {
                number: started,
                folder,
                groups: groups.as_ref(),
                standby: false,
            };
            match start(&listener, program, &options, files, new) {
                Ok(worker) => waiting.push(worker),
                // Not at the cost of those that are there, or once it has worked: there may be
                // descriptors, processes or memory again when some have ended.
                Err(error) if short || waiting.len() + serving.len() > 0 => {
                    if !short {
                        crate::note!(
                            "gantry-accel: cannot start a worker process ({error}): those who come \
                             wait until others have ended"
                        );
                    }
                    patience = Some(AGAIN);
                    break;
                }
                Err(error) => return Err(Error::Start(error)),
            }
        }
        short = patience.is_some();
        // Blocks until a worker is taken or has ended, or its application has.
        let changed = first_changed(&moves, &waiting, &serving, patience).map_err(Error::Start)?;
        let mut worker = match changed {
            Changed::Nothing => continue,
            Changed::Moves => {
                let start = |number: &mut u64| {
                    *number += 1;
                    let new = New {
                        number: *number,
                        folder: cache.folder.join(number.to_string()),
                        groups: groups.as_ref(),
                        standby: true,
                    };
                    start(&listener, program, &options, files, new)
                };
                for event in moves.events() {
                    match event {
                        Event::Asked(Request::List, asker) => list(&serving, &asker),
                        Event::Asked(Request::Move(which, drain), asker) => {
                            for worker in chosen(&mut serving, which, &asker) {
                                worker.move_away(&moves, drain, &asker, || start(&mut started));
                            }
                        }
                        Event::Over(number, outcome, asker) => {
                            let ended = over(&mut serving, number, outcome, &asker, |worker| {
                                if let Some(connection) = &worker.connection {
                                    let folder = &worker.remains.folder.0;
                                    sweeper.serves(worker.number, folder, connection);
                                }
                            });
                            for worker in ended {
                                sweeper.ended(worker.number);
                                worker.end(&remover, &closer);
                            }
                        }
                    }
                }
                continue;
            }
            Changed::Waiting(index) => waiting.swap_remove(index),
            Changed::Ended(index) if serving[index].destination.is_some() => {
                // What is saved by now goes on in the other one.
                serving[index].has_ended = true;
                continue;
            }
            Changed::Ended(index) => {
                let worker = serving.swap_remove(index);
                sweeper.ended(worker.number);
                worker.end(&remover, &closer);
                continue;
            }
            Changed::Spoke(index) => {
                let worker = &mut serving[index];
                worker.heard = true;
                let mut message = [0; stream::LONGEST];
                let received = socket::receive(&worker.channel, &mut message);
                let received = received.map(|(count, files)| {
                    closer.close(files);
                    count
                });
                if let Ok(count) = received
                    && let Some(Said::Owned(unit)) = Said::of(&message[..count], 0)
                {
                    sweeper.uses(worker.number, unit.to_owned());
                    if let Some(all) = &options.compiled {
                        compiled::note_use(all, unit);
                    }
                }
                continue;
            }
            Changed::Alone(index) => {
                // Its end is noticed later: a driver may take its time.
                let worker = &mut serving[index];
                worker.alone = true;
                worker.kill();
                continue;
            }
        };
        // By now it has closed its own copy of what it was told to refuse.
        refused.extend(worker.connection.take());
        while refused.len() > REFUSED {
            closer.close(refused.pop_front());
        }
        let mut message = [0; stream::LONGEST];
        let received = socket::receive(&worker.channel, &mut message);
        let heard = received.map(|(count, files)| {
            let said = Said::of(&message[..count], files.len());
            (said, files)
        });
        match heard {
            Ok((Some(Said::Taken), mut files)) => {
                dying = 0;
                let connection = files.pop();
                worker.user = connection.as_ref().and_then(|connection| {
                    // Streams' other ends are not all of this machine.
                    let local = listener.kind.is_none();
                    local.then(|| socket::user(connection).ok())?
                });
                let alike = serving.iter().filter(|other| other.user == worker.user);
                if worker.user.is_some() && alike.count() >= listener.per_user {
                    worker.connection = connection.map(refuse).map(Arc::new);
                    // One that has ended meanwhile is noticed as such.
                    let _ = socket::send(&worker.channel, &[stream::ENOUGH], &[]);
                    let user = worker.user.take().unwrap_or_default();
                    refusals.note(
                        &format!("user {user}"),
                        &format!(
                            "it has {} workers, as many as --per-user allows",
                            listener.per_user
                        ),
                    );
                    waiting.push(worker);
                } else {
                    worker.connection = connection.map(Arc::new);
                    let _ = socket::send(&worker.channel, &[stream::SERVE], &[]);
                    if let Some(connection) = &worker.connection {
                        let folder = &worker.remains.folder.0;
                        sweeper.serves(worker.number, folder, connection);
                    }
                    serving.push(worker);
                }
            }
            Ok((Some(Said::Threads), files)) => {
                closer.close(files);
                if !options.late {
                    crate::note!(
                        "gantry-accel: the driver starts threads before it is asked for devices: it \
                         is opened when an application has come; --compiler-cache off has it opened \
                         in advance"
                    );
                }
                options.late = true;
                worker.end(&remover, &closer);
            }
            Ok((Some(Said::Sign(request)), files)) => {
                closer.close(files);
                let answer = Said::answer(listener.keeper.as_ref(), request);
                // One that has ended meanwhile is noticed as such.
                let _ = socket::send(&worker.channel, &answer, &[]);
                waiting.push(worker);
            }
            other => {
                closer.close(other.map(|(_, files)| files));
                dying += 1;
                worker.end(&remover, &closer);
                if dying == 8 {
                    return Err(Error::Dying(dying));
                }
                // Eight in a row are given up; until then the reason may pass.
                thread::sleep(Duration::from_millis(100));
            }
        }
    }
}

/// Tells somebody that there is no worker for one more.
fn refuse(connection: OwnedFd) -> OwnedFd {
    let stream = UnixStream::from(connection);
    // About no API: what the peer calls has not been read.
    let full = Hello::answer(apis::ALL[0], Form::Full, (0, 0));
    // There is room for it: nothing was written before. One that has gone has nothing to be told.
    let _ = socket::send_hello(&stream, full, &[]);
    let _ = stream.shutdown(Shutdown::Write);
    stream.into()
}

/// A thread that removes what workers leave, one after the other: a folder with millions of files
/// takes long, as do processes to end, and others are to be served meanwhile.
fn remover() -> io::Result<Sender<Remains>> {
    let (to, remains) = mpsc::channel::<Remains>();
    thread::Builder::new()
        .name("remove".to_owned())
        .spawn(move || {
            // Groups whose processes have not all ended.
            let mut left: Vec<Group> = Vec::new();
            loop {
                left.retain(|group| group.remove().is_err());
                let next = match left.is_empty() {
                    true => remains.recv().map_err(|_| RecvTimeoutError::Disconnected),
                    false => remains.recv_timeout(AGAIN),
                };
                match next {
                    Ok(Remains { folder, group }) => {
                        drop(folder);
                        left.extend(group);
                    }
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => return,
                }
            }
        })?;
    Ok(to)
}

/// What limits workers, if the pool was given a control group.
fn groups(options: &Options) -> Option<Groups> {
    let limits = Limits::new(options.heap(), options.window.saturating_mul(1 << 20));
    Groups::open(limits).unwrap_or_else(|error| {
        crate::note!(
            "gantry-accel: cannot use the control group that it was given ({error}): nothing limits \
             the memory and the processes of a worker together; is the pool alone in its group?"
        );
        None
    })
}

/// How many applications are served at a time: no more than there are descriptors for.
fn bound(listener: &Listener, options: &Options, files: Limit) -> usize {
    let sharing = options.arbiter.as_ref().map_or(0, |_| SHARING_DESCRIPTORS);
    let room = files.room(OWN_DESCRIPTORS, DESCRIPTORS + sharing);
    // Of one user, if not of all.
    if room < listener.most.min(listener.per_user) {
        crate::note!(
            "gantry-accel: {room} applications are served at a time, as this process may have {} \
             file descriptors: others wait; raise the hard limit (ulimit -Hn, or LimitNOFILE= of a \
             service)",
            files.hard
        );
    }
    listener.most.min(room)
}

/// A worker process, and what goes when it does.
#[derive(Debug)]
struct Worker {
    /// How many were started before it, and one.
    number: u64,
    child: Child,
    /// By which it hands over its connection.
    channel: UnixStream,
    /// The connection to its application, once it has one.
    connection: Option<Arc<OwnedFd>>,
    /// Whether nothing more is to be heard by the channel.
    heard: bool,
    /// The application's user, if it counts.
    user: Option<u32>,
    /// Whether its application has ended, so that it was killed.
    alone: bool,
    /// Readable when the process has ended.
    end: OwnedFd,
    /// By which its application is moved.
    control: UnixStream,
    /// The worker that its application is being moved to.
    destination: Option<Box<Worker>>,
    /// Whether the process has ended, and is still to be waited for.
    has_ended: bool,
    remains: Remains,
}

/// Tells which applications are served.
fn list(serving: &[Worker], asker: &Asker) {
    for worker in serving {
        let process = worker.peer().map_or("-".to_owned(), |id| id.to_string());
        asker.tell(&format!("process {process} worker {}", worker.child.id()));
    }
}

/// The workers whose applications are to be moved.
fn chosen<'a>(
    serving: &'a mut [Worker],
    which: Which,
    asker: &Asker,
) -> impl Iterator<Item = &'a mut Worker> {
    let is_meant = move |worker: &Worker| match which {
        Which::All => true,
        Which::Process(id) => {
            worker.peer() == Some(id) || i32::try_from(worker.child.id()) == Ok(id)
        }
    };
    if let Which::Process(id) = which
        && !serving.iter().any(is_meant)
    {
        asker.tell(&format!("error: no application of process {id} is served"));
    }
    let asker = asker.clone();
    serving.iter_mut().filter(move |worker| {
        let is_meant = is_meant(worker);
        if is_meant && worker.destination.is_some() {
            asker.tell("error: it is being moved already");
        }
        is_meant && worker.destination.is_none() && !worker.alone
    })
}

/// What becomes of an application that was carried over, or was not: those workers come back that
/// are to end. `serves` is told of the one that serves it from now on.
fn over(
    serving: &mut Vec<Worker>,
    number: u64,
    outcome: Result<(), NotMoved>,
    asker: &Asker,
    serves: impl FnOnce(&Worker),
) -> Vec<Worker> {
    let Some(index) = serving.iter().position(|worker| worker.number == number) else {
        return Vec::new();
    };
    let process = serving[index].peer().map_or(0, |id| id);
    let Some(mut destination) = serving[index].destination.take() else {
        return Vec::new();
    };
    let source = &serving[index];
    if let Err(error) = &outcome {
        asker.tell(&format!(
            "error: process {process} stays: {}",
            base::Chain(error)
        ));
    }
    if outcome.is_err() || source.alone {
        let mut ended = vec![*destination];
        if serving[index].has_ended {
            ended.push(serving.swap_remove(index));
        }
        return ended;
    }
    let source = serving.swap_remove(index);
    // From here on nobody else serves the window.
    source.kill();
    let mut exit = [libc::pollfd {
        fd: source.end.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    }];
    let _ = descriptors::poll(&mut exit, None);
    destination.connection.clone_from(&source.connection);
    destination.user = source.user;
    // One that has ended meanwhile is noticed as such.
    let _ = control::send(&destination.control, &control::Command::Go(), &[]);
    asker.tell(&format!(
        "process {process} moved from worker {} to {}",
        source.child.id(),
        destination.child.id()
    ));
    serves(&destination);
    serving.push(*destination);
    vec![source]
}

/// What a worker leaves behind.
#[derive(Debug)]
struct Remains {
    folder: Folder,
    group: Option<Group>,
}

impl Worker {
    /// Begins to move its application to a worker that is started for it.
    fn move_away(
        &mut self,
        moves: &Moves,
        drain: Duration,
        asker: &Asker,
        start: impl FnOnce() -> io::Result<Self>,
    ) {
        let Some(connection) = self.connection.clone() else {
            return;
        };
        let begun = start().and_then(|destination| {
            let channels = (&self.control, &destination.control);
            moves.start(self.number, channels, connection, drain, asker.clone())?;
            self.destination = Some(Box::new(destination));
            Ok(())
        });
        if let Err(error) = begun {
            asker.tell(&format!("error: cannot start a worker for it: {error}"));
        }
    }

    /// The application's process id, as far as that is known: a machine's is that of its VMM.
    fn peer(&self) -> Option<i32> {
        base::socket::process(self.connection.as_deref()?).ok()
    }

    /// Kills the process and all that it has started: linkers, or what kernels on a CPU like. It
    /// has a process group of its own, which nothing in it can leave.
    fn kill(&self) {
        // SAFETY: a plain call; the process has not been waited for, so that its id is its own.
        unsafe { libc::kill(-(self.child.id() as libc::pid_t), libc::SIGKILL) };
    }

    /// Ends it for good, and has what it leaves removed.
    fn end(mut self, remover: &Sender<Remains>, closer: &Closer) {
        self.kill();
        let _ = self.child.wait();
        reap(self.child.id());
        let group = self.remains.group.as_ref();
        if group.is_some_and(Group::was_short) {
            crate::note!(
                "gantry-accel: a worker has ended, as it had no more memory with all that it has \
                 started: --heap and --window say how much"
            );
        }
        closer.close((self.connection, self.channel));
        let _ = remover.send(self.remains);
    }
}

/// Waits for processes of a worker that has ended, as far as they are this process's own children and
/// have ended too: a pool that is the first process of a container, or a subreaper, gets those whose
/// parents have ended, and nobody else would ever wait for them. Before the group's number, which is
/// that of the worker, can belong to another.
fn reap(group: u32) {
    // SAFETY: a plain call; no status is asked for.
    while unsafe { libc::waitpid(-(group as libc::pid_t), null_mut(), libc::WNOHANG) } > 0 {}
}

/// Makes the folder for what is compiled, and keeps it open. None if nothing is kept, which is said.
fn keep(options: &mut Options) -> Option<OwnedFd> {
    if !confine::has_landlock() {
        return None;
    }
    let folder = compiled::folder(&options.cache);
    match compiled::create(&folder) {
        Ok(opened) => {
            options.compiled = Some(folder);
            Some(opened)
        }
        Err(error) => {
            crate::note!(
                "gantry-accel: cannot keep what is compiled in {}: {error}; every application's \
                 programs are compiled anew",
                folder.display()
            );
            None
        }
    }
}

/// A worker that is to be.
struct New<'a> {
    number: u64,
    folder: PathBuf,
    groups: Option<&'a Groups>,
    /// Whether it takes up another worker's application.
    standby: bool,
}

fn start(
    listener: &Listener,
    program: &Path,
    options: &Options,
    files: Limit,
    new: New<'_>,
) -> io::Result<Worker> {
    let cache = Folder::create(new.folder)?;
    let group = new.groups.map(|groups| groups.create(new.number));
    let remains = Remains {
        folder: cache,
        group: group.transpose()?,
    };
    let cache = &remains.folder.0;
    let entrance = remains.group.as_ref().map(Group::entrance).transpose()?;
    let mut command = Command::new(program);
    let (channel, theirs) = UnixStream::pair()?;
    let (moves, worker_moves) = UnixStream::pair()?;
    let mut given = vec![
        (listener.socket.as_raw_fd(), LISTENER),
        (worker_moves.as_raw_fd(), MOVES),
    ];
    let control = match &options.arbiter {
        Some(path) => {
            let (ours, theirs) = UnixStream::pair()?;
            given.push((theirs.as_raw_fd(), CONTROL));
            command.arg("worker").arg("--arbiter").arg(path);
            Some((ours, theirs, path))
        }
        None => {
            command.arg("worker");
            None
        }
    };
    if let Some(name) = &options.name {
        command.args(["--name", name]);
    }
    if let Some(kind) = listener.kind {
        stream::pass_on(
            &mut command,
            kind,
            listener.keeper.as_ref(),
            &options.stream,
        );
    }
    for path in &options.readable {
        command.arg("--readable").arg(path);
    }
    if let Some(folder) = &options.compiled {
        command.arg("--compiled").arg(folder);
    }
    if options.late {
        command.arg("--late");
    }
    if new.standby {
        command.arg("--standby");
    }
    command
        .args(["--weight", &options.weight.to_string()])
        .args(["--library", &options.library])
        .args(["--window", &options.window.to_string()])
        .args(["--spin", &options.spin.to_string()])
        .args(["--memory", &options.memory.to_string()])
        .args(["--kernel-limit", &options.kernel_limit.to_string()])
        .args(["--heap", &(options.heap() >> 20).to_string()])
        .arg("--cache")
        .arg(cache)
        .envs(compiled::variables(cache))
        .env("TMPDIR", cache)
        // The host's loader must not find this machine's own remoting driver.
        .env("GANTRY_OPENCL", "off")
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(OwnedFd::from(theirs));
    // SAFETY: only async-signal-safe calls between fork and exec.
    unsafe {
        command.pre_exec(move || {
            // First of all, so that nothing of it is in the pool's.
            if let Some(entrance) = &entrance {
                group::enter(entrance.as_fd())?;
            }
            // A worker does not outlive the pool.
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            // Drivers may use `select`. Somebody may have lowered the limit meanwhile.
            let _ = files.set();
            // First out of each other's way, then to their places, where they stay open.
            for (fd, _) in &mut given {
                *fd = libc::fcntl(*fd, libc::F_DUPFD_CLOEXEC, MOVES + 1);
            }
            for (fd, place) in &given {
                if *fd < 0 || libc::dup2(*fd, *place) < 0 {
                    return Err(io::Error::last_os_error());
                }
            }
            Ok(())
        });
    }
    let mut child = command.spawn()?;
    // With it goes this process's copy of the worker's end of the channel.
    drop(command);
    let attended = match control {
        Some((ours, _, path)) => introduce::attend(&child, ours, path.clone()),
        None => Ok(()),
    };
    let end = attended.and_then(|()| handle(&child)).inspect_err(|_| {
        let _ = child.kill();
        let _ = child.wait();
    })?;
    Ok(Worker {
        number: new.number,
        child,
        channel,
        connection: None,
        heard: false,
        user: None,
        alone: false,
        end,
        control: moves,
        destination: None,
        has_ended: false,
        remains,
    })
}

/// A descriptor that is readable when a process has ended, which has not been waited for.
pub(super) fn handle(child: &Child) -> io::Result<OwnedFd> {
    // SAFETY: a plain call; the child has not been waited for, so that its id is its own.
    let handle = unsafe { libc::syscall(libc::SYS_pidfd_open, child.id(), 0) };
    if handle < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just made and has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(handle as i32) })
}

/// Which worker has changed.
enum Changed {
    /// This one, which waited, is taken or has ended.
    Waiting(usize),
    /// This one, which served, has ended.
    Ended(usize),
    /// This one serves nobody any more.
    Alone(usize),
    /// This one, which serves, has something to say, or nothing more.
    Spoke(usize),
    /// None, but somebody wants applications moved, or one has been.
    Moves,
    /// None: all the time is over, or a signal has come.
    Nothing,
}

/// Waits until a worker has changed, for some time if that is bounded.
fn first_changed(
    moves: &Moves,
    waiting: &[Worker],
    serving: &[Worker],
    patience: Option<Duration>,
) -> io::Result<Changed> {
    let poll = |fd, events| libc::pollfd {
        fd,
        events,
        revents: 0,
    };
    let ends = serving.iter().map(|worker| {
        let end = Some(worker.end.as_raw_fd()).filter(|_| !worker.has_ended);
        poll(end.unwrap_or(-1), libc::POLLIN)
    });
    // A negative descriptor is passed over. What the other side says is for the worker to read.
    let connections = serving.iter().map(|worker| {
        let connection = worker.connection.as_ref().filter(|_| !worker.alone);
        poll(connection.map_or(-1, AsRawFd::as_raw_fd), libc::POLLRDHUP)
    });
    let heard = serving.iter().map(|worker| {
        let channel = Some(worker.channel.as_raw_fd()).filter(|_| !worker.heard);
        poll(channel.unwrap_or(-1), libc::POLLIN)
    });
    // Last, as strangers can have a signature wanted at any time.
    let channels = waiting
        .iter()
        .map(|worker| poll(worker.channel.as_raw_fd(), libc::POLLIN));
    let mut polled: Vec<_> = ends
        .chain(connections)
        .chain(heard)
        .chain([poll(moves.fd(), libc::POLLIN)])
        .chain(channels)
        .collect();
    descriptors::poll(&mut polled, patience)?;
    let Some(index) = polled.iter().position(|entry| entry.revents != 0) else {
        return Ok(Changed::Nothing);
    };
    let served = serving.len();
    Ok(if index < served {
        Changed::Ended(index)
    } else if index < 2 * served {
        Changed::Alone(index - served)
    } else if index < 3 * served {
        Changed::Spoke(index - 2 * served)
    } else if index == 3 * served {
        Changed::Moves
    } else {
        Changed::Waiting(index - 3 * served - 1)
    })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use clap::Parser;

    use super::*;

    /// Options of workers, as they are without any.
    #[derive(clap::Parser)]
    struct Given {
        #[command(flatten)]
        options: Options,
    }

    #[test]
    fn a_workers_orphans_do_not_stay_zombies_of_its_pool() {
        // SAFETY: plain calls; the child makes system calls and ends. A process of its own, as
        // orphans of other tests would become this one's children too.
        let status = unsafe {
            let pool = libc::fork();
            if pool == 0 {
                libc::_exit(i32::from(!leaves_none()));
            }
            let mut status = -1;
            libc::waitpid(pool, &raw mut status, 0);
            status
        };
        assert_eq!(status, 0);
    }

    /// Whether a process that gets orphans has no children when a worker and its group have ended.
    /// System calls alone: for a process that was forked.
    fn leaves_none() -> bool {
        // SAFETY: as above; information that nobody reads otherwise.
        unsafe {
            libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1);
            let worker = libc::fork();
            if worker == 0 {
                libc::setpgid(0, 0);
                for _ in 0..3 {
                    let linker = libc::fork();
                    if linker == 0 {
                        libc::_exit(0);
                    }
                    // Ended, and not waited for.
                    let mut info = std::mem::zeroed();
                    let how = libc::WEXITED | libc::WNOWAIT;
                    libc::waitid(libc::P_PID, linker as libc::id_t, &raw mut info, how);
                }
                libc::_exit(0);
            }
            libc::waitpid(worker, null_mut(), 0);
            reap(worker as u32);
            libc::waitpid(-1, null_mut(), libc::WNOHANG) < 0
        }
    }

    #[test]
    fn a_socket_is_not_served_without_the_tls_that_was_asked_for() {
        let stream = |listen: &str, key: Option<&str>, plain| Place::Streams {
            listen: listen.parse().unwrap(),
            key: key.map(PathBuf::from),
            plain,
            most: 1,
        };
        let rings = || Place::Rings {
            path: "/s".into(),
            per_user: 1,
            control: None,
        };
        let refused = |place, given: &[&str]| {
            let words = ["gantry-accel"].iter().chain(given);
            let options = Given::try_parse_from(words).unwrap().options;
            unused(&place, &options)
        };
        let all = ["--tls-cert", "c", "--tls-client-ca", "a"];
        assert_eq!(refused(rings(), &all), Some("--tls-cert"));
        assert_eq!(refused(rings(), &all[2..]), Some("--tls-client-ca"));
        let key = stream("unix:/s", Some("k"), false);
        assert_eq!(refused(key, &[]), Some("--tls-key"));
        assert_eq!(refused(stream("unix:/s", None, true), &[]), Some("--plain"));
        assert_eq!(refused(stream("unix:/s", None, false), &[]), None);
        assert_eq!(refused(rings(), &[]), None);
        let port = stream("tcp:127.0.0.1:1", Some("k"), false);
        assert_eq!(refused(port, &all), None);
    }
}
