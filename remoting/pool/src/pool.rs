//! Worker processes: one per application, started before they are needed.
//!
//! The pool's process owns the socket, and only starts and ends workers. Each worker opens the host's driver, accepts
//! one connection, hands the pool a copy of it so that the next worker is started, and serves. When the other side
//! closes the connection, the pool kills the worker, whatever runs in it. The pool keeps its copy until the process is
//! gone: the other side sees the connection end only when the worker has ended.
//!
//! ```text
//!   start          Taken                    hang-up           process gone
//!  ───────> Waiting ─────> Serving(Speaking ───────> Ending) ──────────────> removed
//!            │  ^ │           │     │                   ^
//!            └──┘ │ dies      │     └> Silent ──────────┘
//!     over limit  └───────────┴─────────────────────────────> removed
//! ```

use std::{
    collections::VecDeque,
    io,
    net::Shutdown,
    os::{
        fd::{AsFd, AsRawFd, OwnedFd, RawFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
    sync::{Arc, mpsc::Sender},
    time::{Duration, Instant},
};

use base::{limits::Limit, poll};
use remoting_proto::{
    apis,
    wire::{
        api::ApiId,
        hello::{Form, Hello},
    },
};
use remoting_stream::{address::Host, tls};
use remoting_transport::{closer::Closer, mapping, peer_files, socket};

use super::{
    account::{MOST_WORKERS, Total},
    compiled::{self, sweep::Sweeper},
    confine, drivers,
    folders::Cache,
    group::{Groups, Limits},
    handshake::Refusals,
    listener::Listener,
    log::{Client, Log},
    moves::Moves,
    moving::{Departed, Destination, Leaving},
    options::{Library, Options},
    place::Place,
    slices,
    starter::Starter,
    status::Figures,
    stream::{self, Said},
    worker::{self, New, Remains, Worker},
};

pub use super::listener::ListenConfig;
pub(super) use super::worker::handle;

/// Descriptors that a pool needs regardless of whom it serves: its own, connections that it has [refused
/// lately](REFUSED), those for walking nested folders, and those for starting a worker.
const OWN_DESCRIPTORS: u64 = 64;
/// Descriptors for each worker: its channels, its pidfd, its standard error, its application's connection, and what that
/// is served with.
const DESCRIPTORS: u64 = 9;
/// Further ones where the device is shared: the socket to the worker, and the pidfd for the arbiter.
const SHARING_DESCRIPTORS: u64 = 2;

/// Refused connections that are kept open: closing with unread data resets the peer before it reads the
/// refusal.
const REFUSED: usize = 16;
/// Pause before retrying to start a worker.
const START_RETRY: Duration = Duration::from_secs(1);
/// How long no worker is started after one has died before it served anybody.
const DEATH_PAUSE: Duration = Duration::from_millis(100);
/// The same when many have died in a row, and others serve.
const DEATHS_PAUSE: Duration = Duration::from_secs(1);
/// How long no further worker is started beside one whose application comes from another worker: the driver
/// that it would open competes with that application's return. Who connects meanwhile ends that.
const RETURN: Duration = Duration::from_secs(5);
/// Number of consecutive deaths after which a pool gives up that serves nobody.
const MOST_DEATHS: u32 = 8;

/// Why a pool ends.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The socket cannot be opened.
    #[error(
        "cannot listen on {path}: is another pool running, is it no socket, or may this user not \
         write to its folder?"
    )]
    Listen {
        /// Its path.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The port cannot be opened.
    #[error(
        "cannot listen on {host}: is another pool running, or is it no address of this machine?"
    )]
    Port {
        /// The address.
        host: Host,
        /// The cause.
        source: io::Error,
    },
    /// A port without TLS that is not this machine's alone.
    #[error(
        "{0} is served by TLS only: name --tls-cert, --tls-key and --tls-client-ca; without TLS, by \
         --plain, an address of this machine alone (127.0.0.1, ::1) is served"
    )]
    Plain(Host),
    /// An option that only applies to a port.
    #[error(
        "{0} is for --listen tcp:ADDRESS:PORT, and a socket is served without TLS: leave it out"
    )]
    ForPorts(&'static str),
    /// A driver's library that belongs to no served API, or to one that is not named.
    #[error(
        "it is not known which of the APIs that are served --library {0} is for: name it as \
         --library API=FILE (such as cuda=libcuda.so.1), with an API that --api has"
    )]
    Library(Library),
    /// TLS cannot be set up.
    #[error(transparent)]
    Tls(#[from] tls::Error),
    /// The folder for the workers' files is unusable.
    #[error("cannot keep files in {}: let this user write there, or name another by --cache", folder.display())]
    Cache {
        /// The folder.
        folder: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The socket for requests to move applications cannot be opened.
    #[error("cannot listen on {} for requests to move applications", path.display())]
    Control {
        /// Its path.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// There is no page for the device memory of all applications.
    #[error(transparent)]
    Total(#[from] mapping::Error),
    /// A worker cannot be started.
    #[error("cannot start a worker process")]
    Start(#[source] io::Error),
    /// Workers end before they serve anybody.
    #[error("the last {0} workers ended before an application came: the messages above say why")]
    Dying(u32),
}

/// Listens, and keeps `spare` workers waiting, for ever. Each worker is `program` with the argument `worker` and those
/// of `options`. Readers of the pool's figures are told them at the path `metrics`.
pub fn run(
    config: ListenConfig,
    spare: usize,
    program: &Path,
    options: &Options,
    metrics: Option<&Path>,
) -> Result<(), Error> {
    let control = match &config {
        ListenConfig::Rings { control, .. } => control.clone(),
        ListenConfig::Streams { .. } => None,
    };
    if let Some(library) = options.stray_library() {
        return Err(Error::Library(library.clone()));
    }
    let place = config.place();
    // Before anybody can connect.
    let starter = Starter::new().map_err(Error::Start)?;
    let listener = Listener::open(config, options)?;
    base::note!(
        "gantry-accel: serving {} at {place}{}",
        options.named_apis(" and "),
        drivers::found(options)
    );
    let moves = Moves::listen(control.as_deref()).map_err(|source| Error::Control {
        path: control.unwrap_or_default(),
        source,
    })?;
    let figures = Figures::default();
    if let Some(path) = metrics
        && let Err(error) = figures.serve_at(path)
    {
        // Others may write to the folder of metrics sockets, and may have taken the name.
        base::note!(
            "gantry-accel: metrics are not served at {}: {error}",
            path.display()
        );
    }
    let closer = moves.closer.clone();
    let cache = Cache::open(&options.cache).map_err(|source| Error::Cache {
        folder: options.cache.clone(),
        source,
    })?;
    if !confine::has_landlock() {
        base::note!(
            "gantry-accel: this kernel has no Landlock: workers can read and write what this user \
             can, and keep nothing that they compile; boot one that has it, or run the pool as a \
             user of its own"
        );
    }
    if options.widest() == ApiId::Cuda && !confine::has_own_network() {
        base::note!(
            "gantry-accel: workers have this machine's network namespace, as neither it nor user \
             namespaces can be made here: what they name their sockets, other programs see and \
             cannot take"
        );
    }
    if let Some(without) = &options.without {
        base::note!(
            "gantry-accel: workers are not confined by {without}: only for finding out what a driver \
             needs, as applications may reach this machine"
        );
    }
    let mut options = options.clone();
    let limit = options.compiler_cache.0;
    let _open = limit.and_then(|_| keep(&mut options));
    if let Some(arbiter) = &options.arbiter
        && options.apis.contains(&ApiId::Cuda)
    {
        options.sliced = slices::work(program, &options, &cache.folder, arbiter);
    }
    let kept = limit.zip(options.compiled.clone());
    let kept = kept.map(|(limit, folder)| (folder, limit));
    let sweeper = Sweeper::default();
    sweeper.start(kept, &cache.folder).map_err(Error::Start)?;
    let files = Limit::raise().map_err(Error::Start)?;
    let total = options.memory_total.map(|_| Total::create()).transpose()?;
    let mut pool = Pool {
        most: bound(&listener, &options, files),
        spare: spare.max(1),
        remover: worker::remover().map_err(Error::Start)?,
        groups: groups(&options),
        moves,
        listener,
        program,
        options,
        cache,
        files,
        sweeper,
        log: Log::start().map_err(Error::Start)?,
        figures,
        starter,
        closer,
        total,
        waiting: Vec::new(),
        serving: Vec::new(),
        departed: Vec::new(),
        started: 0,
        deaths: 0,
        failure: None,
        short: false,
        held_back: None,
        recovers: None,
        refusals: Refusals::default(),
        refused: VecDeque::new(),
    };
    let error = loop {
        if let Err(error) = pool.refill().and_then(|patience| pool.step(patience)) {
            break error;
        }
    };
    // What workers have written may say why.
    pool.log.flush();
    Err(error)
}

/// A worker that waits for an application.
struct Waiting {
    worker: Worker,
    /// A connection that it was told to refuse.
    refused: Option<OwnedFd>,
}

/// A worker that serves an application.
pub(super) struct Serving {
    pub worker: Worker,
    /// The connection to its application.
    pub connection: Arc<OwnedFd>,
    /// The application's user, if there is a limit for users.
    pub user: Option<u32>,
    /// What its worker serves, if it has said so and it can be moved.
    pub place: Option<Arc<Place>>,
    pub phase: Phase,
    /// The worker that its application is being moved to.
    pub destination: Option<Destination>,
    /// The worker from which its application was moved, while that still has contents of the application's memory.
    pub source: Option<Worker>,
    /// Its worker has yet to reply to a move that has failed, and cannot be asked for another one.
    pub is_busy: bool,
    /// Set while it is to be served elsewhere.
    pub leaving: Option<Leaving>,
}

/// The phase of a serving worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// It may still say what it serves, and name the owner of its application.
    Speaking,
    /// It will send no further message.
    Silent,
    /// Its application has ended and it was killed.
    Ending,
}

/// The pool's state.
pub(super) struct Pool<'a> {
    pub listener: Listener,
    pub program: &'a Path,
    pub options: Options,
    pub cache: Cache,
    pub files: Limit,
    pub groups: Option<Groups>,
    /// Requests to move applications, and their outcomes.
    pub moves: Moves,
    pub sweeper: Sweeper,
    pub log: Log,
    pub figures: Figures,
    pub starter: Starter,
    pub remover: Sender<Remains>,
    pub closer: Closer,
    /// The device memory that all applications have together, if it is limited.
    total: Option<Total>,
    /// Maximum number of workers.
    most: usize,
    /// Workers to keep waiting.
    spare: usize,
    waiting: Vec<Waiting>,
    pub serving: Vec<Serving>,
    /// Applications that have been moved elsewhere.
    pub departed: Vec<Departed>,
    /// Workers started so far.
    pub started: u64,
    /// Workers that have died in a row before they served anybody.
    deaths: u32,
    /// The reason why the last of these could not serve, which has been logged.
    failure: Option<String>,
    /// Whether the machine had no resources for one more worker.
    short: bool,
    /// No worker is started before this time, unless somebody connects.
    held_back: Option<Instant>,
    /// No worker is started before this time: others have died.
    recovers: Option<Instant>,
    refusals: Refusals,
    /// Connections that were refused, the newest last.
    refused: VecDeque<OwnedFd>,
}

impl Pool<'_> {
    fn workers(&self) -> usize {
        self.waiting.len() + self.serving.len()
    }

    /// Starts workers until enough wait. Returns when to try again, if one could not be started.
    fn refill(&mut self) -> Result<Option<Duration>, Error> {
        while self.waiting.len() < self.spare && self.workers() < self.most {
            let now = Instant::now();
            let until = self.held_back.max(self.recovers);
            match until.map(|until| until.saturating_duration_since(now)) {
                Some(Duration::ZERO) | None => (self.held_back, self.recovers) = (None, None),
                left => return Ok(left),
            }
            self.started += 1;
            let counter = match &self.total {
                Some(total) => match total.counter() {
                    None => return Ok(Some(START_RETRY)),
                    counter => counter,
                },
                None => None,
            };
            let new = New {
                number: self.started,
                folder: self.cache.folder.join(self.started.to_string()),
                groups: self.groups.as_ref(),
                log: &self.log,
                starter: &self.starter,
                counter,
                standby: false,
            };
            let program = self.program;
            match worker::start(&self.listener, program, &self.options, self.files, new) {
                Ok(worker) => self.waiting.push(Waiting {
                    worker,
                    refused: None,
                }),
                // If there are workers, or if starting has worked before, the pool continues: descriptors, processes or
                // memory may be available again when some have ended.
                Err(error) if self.short || self.workers() > 0 => {
                    if !self.short {
                        base::note!(
                            "gantry-accel: cannot start a worker process ({error}): new applications \
                             wait until others have ended"
                        );
                    }
                    self.short = true;
                    return Ok(Some(START_RETRY));
                }
                Err(error) => return Err(Error::Start(error)),
            }
        }
        self.short = false;
        Ok(None)
    }

    /// Waits until a worker is taken, sends a message or ends, or its application ends, and handles the event.
    fn step(&mut self, patience: Option<Duration>) -> Result<(), Error> {
        self.note_figures();
        let (waiting, serving, departed) = (&self.waiting, &self.serving, &self.departed);
        let listener = self.held_back.map(|_| self.listener.socket.as_raw_fd());
        let event = first_event(
            &self.moves,
            waiting,
            serving,
            (departed, listener),
            patience,
        );
        match event.map_err(Error::Start)? {
            Event::None => {}
            Event::Coming => self.held_back = None,
            Event::Moves => self.move_applications(),
            // It has ended, follows another server, or sends something unasked.
            Event::Departed(index) => drop(self.departed.swap_remove(index)),
            Event::Ended(index) if self.serving[index].destination.is_some() => {
                self.source_ended(index);
            }
            Event::Ended(index) => {
                let ended = self.serving.swap_remove(index);
                if ended.leaving.is_none() && !has_hung_up(&ended.connection) {
                    self.figures.update(|status| status.lost += 1);
                }
                self.sweeper.ended(ended.worker.number);
                let connection = Some(ended.connection);
                ended.worker.end(connection, &self.remover, &self.closer);
                if let Some(source) = ended.source {
                    self.end_source(source);
                }
                if let Some(Leaving::Left(departure)) = ended.leaving {
                    self.has_left(departure);
                }
            }
            Event::HungUp(index) => {
                // Its end is noticed later: a driver may take some time.
                let serving = &mut self.serving[index];
                serving.phase = Phase::Ending;
                serving.worker.kill();
            }
            Event::Message(index) => self.owned(index),
            Event::Waiting(index) => {
                let waiting = self.waiting.swap_remove(index);
                self.answered(waiting)?;
            }
        }
        Ok(())
    }

    /// Notes how many workers there are, for readers.
    fn note_figures(&self) {
        let places = || self.serving.iter().filter_map(|one| one.place.as_deref());
        self.figures.update(|status| {
            status.waiting = self.waiting.len() as u64;
            status.serving = self.serving.len() as u64;
            status.machines = places().filter(|place| place.is_machines()).count() as u64;
            status.windows = places().fold(0, |sum, place| sum.saturating_add(place.window));
            status.most = self.most as u64;
            status.started = self.started;
        });
    }

    /// A serving worker has said what it serves, has named its application's owner, or has closed its channel.
    fn owned(&mut self, index: usize) {
        let serving = &mut self.serving[index];
        let mut message = [0; stream::LONGEST];
        let received = socket::receive(&serving.worker.channel, &mut message);
        let Ok((count, files)) = received else {
            serving.phase = Phase::Silent;
            return;
        };
        match Said::of(&message[..count], files.len()) {
            // Once, before anything of the application's runs; where it has been moved to, it is known already.
            Some(Said::Serves(window, attachment)) if serving.place.is_none() => {
                // Its worker checks the same: this one does not, so it was taken over.
                if let Err(wrong) = peer_files::check(&files) {
                    base::note!("gantry-accel: a worker is ended: {wrong}");
                    serving.phase = Phase::Ending;
                    serving.worker.kill();
                    return self.closer.close(files);
                }
                serving.place = Some(Arc::new(Place {
                    attachment: attachment.to_vec(),
                    window,
                    files,
                    closer: self.closer.clone(),
                }));
            }
            Some(Said::Owned(unit)) => {
                serving.phase = Phase::Silent;
                self.closer.close(files);
                self.sweeper.uses(serving.worker.number, unit.to_owned());
                if let Some(all) = &self.options.compiled {
                    compiled::note_use(all, unit);
                }
            }
            _ => {
                serving.phase = Phase::Silent;
                self.closer.close(files);
            }
        }
    }

    /// A waiting worker has been taken, asks for something, or has ended.
    fn answered(&mut self, waiting: Waiting) -> Result<(), Error> {
        let Waiting { worker, refused } = waiting;
        // By now it has closed its own copy of what it was told to refuse.
        self.refused.extend(refused);
        while self.refused.len() > REFUSED {
            self.closer.close(self.refused.pop_front());
        }
        let mut message = [0; stream::LONGEST];
        let received = socket::receive(&worker.channel, &mut message);
        let count = received.as_ref().map_or(0, |(count, _)| *count);
        let heard = received.map(|(_, files)| {
            let said = Said::of(&message[..count], files.len());
            (said, files)
        });
        match heard {
            Ok((Some(Said::Taken), mut files)) if !files.is_empty() => {
                self.deaths = 0;
                self.failure = None;
                if let Some(connection) = files.pop() {
                    self.taken(worker, connection);
                }
            }
            Ok((Some(Said::Threads), files)) => {
                self.closer.close(files);
                if !self.options.late {
                    base::note!(
                        "gantry-accel: the driver starts threads before it is asked for devices: it \
                         is opened when an application has connected; --compiler-cache off has it \
                         opened in advance"
                    );
                }
                self.options.late = true;
                worker.end(None, &self.remover, &self.closer);
            }
            Ok((Some(Said::Sign(request)), files)) => {
                self.closer.close(files);
                let answer = Said::answer(self.listener.keeper.as_ref(), request);
                // Fails if the worker has ended meanwhile, which is noticed as such.
                let _ = socket::send(&worker.channel, &answer, &[]);
                self.waiting.push(Waiting {
                    worker,
                    refused: None,
                });
            }
            Ok((Some(Said::Failed(why)), files)) => {
                self.closer.close(files);
                self.tell_failure(why);
                self.died(worker)?;
            }
            other => {
                self.closer.close(other.map(|(_, files)| files));
                if let Some(printed) = stream::printed(&message[..count]) {
                    self.tell_failure(&format!("a worker has printed: {printed}"));
                }
                self.died(worker)?;
            }
        }
        Ok(())
    }

    /// Logs why workers cannot serve anybody, once for all of them.
    fn tell_failure(&mut self, why: &str) {
        if self.failure.as_deref() != Some(why) {
            base::note!("gantry-accel: {why}");
            self.failure = Some(why.to_owned());
        }
    }

    /// A worker has ended before it served anybody.
    fn died(&mut self, worker: Worker) -> Result<(), Error> {
        self.deaths += 1;
        self.figures.update(|status| status.failed += 1);
        worker.end(None, &self.remover, &self.closer);
        if self.deaths >= MOST_DEATHS && self.serving.is_empty() {
            return Err(Error::Dying(self.deaths));
        }
        // The reason may be temporary.
        let pause = match self.deaths {
            0..MOST_DEATHS => DEATH_PAUSE,
            _ => DEATHS_PAUSE,
        };
        self.recovers = Some(Instant::now() + pause);
        Ok(())
    }

    /// A worker has an application: it serves it, unless its user has too many workers.
    fn taken(&mut self, worker: Worker, connection: OwnedFd) {
        // The other end of a stream may be on another machine.
        let local = self.listener.protocol.is_none();
        let user = local.then(|| socket::user(&connection).ok()).flatten();
        let alike = self.serving.iter().filter(|other| other.user == user);
        let why = if alike.count() >= self.listener.per_user {
            let most = self.listener.per_user;
            Some(format!(
                "it has {most} workers, as many as --per-user allows"
            ))
        } else if self.total.is_some() && self.serving.len() + 1 >= MOST_WORKERS {
            let most = self.serving.len();
            Some(format!(
                "the pool serves {most} applications, as many as a pool with --memory-total does"
            ))
        } else {
            None
        };
        if let Some((user, why)) = user.zip(why) {
            let refused = Some(refuse(connection));
            // Fails if the worker has ended meanwhile, which is noticed as such.
            let _ = socket::send(&worker.channel, &[stream::ENOUGH], &[]);
            self.figures.update(|status| status.refused += 1);
            self.refusals.note(&format!("user {user}"), &why);
            self.waiting.push(Waiting { worker, refused });
            return;
        }
        // As far as it has been read by nobody, as the worker does once it is told that it serves.
        let hello = local.then(|| socket::peek_hello(&connection)).flatten();
        if hello.is_some_and(|hello| Hello::is_from_another(&hello)) {
            self.held_back = Some(Instant::now() + RETURN);
        }
        let client = Client::of(&connection, self.listener.is_of_this_machine());
        self.log.serves(worker.id().cast_unsigned(), client);
        let connection = Arc::new(connection);
        self.figures.update(|status| status.served += 1);
        let _ = socket::send(&worker.channel, &[stream::SERVE], &[]);
        let folder = &worker.remains.folder.0;
        self.sweeper.serves(worker.number, folder, &connection);
        self.serving.push(Serving {
            worker,
            connection,
            user,
            place: None,
            phase: Phase::Speaking,
            destination: None,
            source: None,
            is_busy: false,
            leaving: None,
        });
    }
}

/// Tells a peer that it gets no further worker.
fn refuse(connection: OwnedFd) -> OwnedFd {
    let stream = UnixStream::from(connection);
    // Names no API: what the peer calls has not been read.
    let full = Hello::answer(apis::ALL[0], Form::Full, (0, 0));
    // There is room for it: nothing was written before. One that has gone has nothing to be told.
    let _ = socket::send_hello(&stream, full, &[]);
    let _ = stream.shutdown(Shutdown::Write);
    stream.into()
}

/// The limits of workers, if a control group was delegated to the pool.
fn groups(options: &Options) -> Option<Groups> {
    let limits = Limits::new(options.heap(), options.window.saturating_mul(1 << 20));
    Groups::open(limits).unwrap_or_else(|error| {
        base::note!(
            "gantry-accel: cannot use the control group that it was given ({error}): nothing limits \
             the memory and the processes of a worker together; is the pool alone in its group?"
        );
        None
    })
}

/// Maximum number of applications served at a time, bounded by the available descriptors.
fn bound(listener: &Listener, options: &Options, files: Limit) -> usize {
    let sharing = options.arbiter.as_ref().map_or(0, |_| SHARING_DESCRIPTORS);
    let room = files.room(OWN_DESCRIPTORS, DESCRIPTORS + sharing);
    // Of one user, if not of all.
    if room < listener.most.min(listener.per_user) {
        base::note!(
            "gantry-accel: {room} applications are served at a time, as this process may have {} \
             file descriptors: others wait; raise the hard limit (ulimit -Hn, or LimitNOFILE= of a \
             service)",
            files.hard
        );
    }
    let most = listener.most.min(room);
    match options.memory_total {
        Some(_) => most.min(MOST_WORKERS),
        None => most,
    }
}

/// Creates the folder for compiled programs, and keeps it open. None if nothing is kept; the reason is logged.
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
            base::note!(
                "gantry-accel: cannot keep what is compiled in {}: {error}; every application's \
                 programs are compiled anew",
                folder.display()
            );
            None
        }
    }
}

/// Whether the application at the other end of a connection has closed it.
fn has_hung_up(connection: &OwnedFd) -> bool {
    let mut entry = [libc::pollfd {
        fd: connection.as_raw_fd(),
        events: libc::POLLRDHUP,
        revents: 0,
    }];
    poll::poll(&mut entry, Some(Duration::ZERO)).is_ok_and(|ready| ready > 0)
}

/// An event of a worker.
enum Event {
    /// This waiting worker is taken, asks for something or has ended.
    Waiting(usize),
    /// This serving worker has ended.
    Ended(usize),
    /// The application of this worker has closed its connection.
    HungUp(usize),
    /// This serving worker has sent a message or closed its channel.
    Message(usize),
    /// This application, which has left, leaves for good.
    Departed(usize),
    /// Somebody wants applications moved, or a move is over.
    Moves,
    /// A connection has arrived.
    Coming,
    /// Timeout, or a signal.
    None,
}

/// Waits for the first event, at most for the patience if there is one.
fn first_event(
    moves: &Moves,
    waiting: &[Waiting],
    serving: &[Serving],
    (departed, listener): (&[Departed], Option<RawFd>),
    patience: Option<Duration>,
) -> io::Result<Event> {
    let poll = |fd, events| libc::pollfd {
        fd,
        events,
        revents: 0,
    };
    let ends = serving.iter().map(|serving| {
        let destination = serving.destination.as_ref();
        let seen = destination.is_some_and(|destination| destination.source_ended);
        let end = serving.worker.end.as_raw_fd();
        poll(if seen { -1 } else { end }, libc::POLLIN)
    });
    // A negative descriptor is passed over. What the other side says is for the worker to read.
    let connections = serving.iter().map(|serving| {
        let fd = match serving.phase {
            Phase::Speaking | Phase::Silent => serving.connection.as_raw_fd(),
            Phase::Ending => -1,
        };
        poll(fd, libc::POLLRDHUP)
    });
    let messages = serving.iter().map(|serving| {
        let fd = match serving.phase {
            Phase::Speaking => serving.worker.channel.as_raw_fd(),
            Phase::Silent | Phase::Ending => -1,
        };
        poll(fd, libc::POLLIN)
    });
    let leads = departed
        .iter()
        .map(|one| poll(one.lead.as_fd().as_raw_fd(), libc::POLLIN));
    // Last, as strangers can have a signature wanted at any time.
    let channels = waiting
        .iter()
        .map(|waiting| poll(waiting.worker.channel.as_raw_fd(), libc::POLLIN));
    let mut polled: Vec<_> = ends
        .chain(connections)
        .chain(messages)
        .chain([poll(moves.fd(), libc::POLLIN)])
        .chain([poll(listener.unwrap_or(-1), libc::POLLIN)])
        .chain(leads)
        .chain(channels)
        .collect();
    poll::poll(&mut polled, patience)?;
    let Some(index) = polled.iter().position(|entry| entry.revents != 0) else {
        return Ok(Event::None);
    };
    let served = serving.len();
    Ok(if index < served {
        Event::Ended(index)
    } else if index < 2 * served {
        Event::HungUp(index - served)
    } else if index < 3 * served {
        Event::Message(index - 2 * served)
    } else if index == 3 * served {
        Event::Moves
    } else if index == 3 * served + 1 {
        Event::Coming
    } else if index - 3 * served - 2 < departed.len() {
        Event::Departed(index - 3 * served - 2)
    } else {
        Event::Waiting(index - 3 * served - 2 - departed.len())
    })
}
