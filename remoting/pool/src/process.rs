//! A worker's process: it opens the host's driver, takes one application, and serves it.
//!
//! Whatever its [pool](super::pool) has put in its place it has from the start: the listening
//! socket, and its standard output as a channel to the pool.

use std::{
    fs::File,
    io::{self, Read, Write},
    os::{
        fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd},
        unix::{
            fs::FileExt,
            net::{UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use base::gpus::{Choice, WrongName};
use remoting_cuda::CudaBackend;
use remoting_opencl::{
    OpenClBackend, Server,
    driver::{api, cl},
};
use remoting_proto::{
    apis::{self, cuda::Cuda, opencl::OpenCl},
    port::{self, Attachment, NoAttachment},
    wire::{
        Api as _, Blob,
        api::{ApiId, Spoken},
        hello::{self, Form, Hello, NUMBER, Refused},
    },
};
use remoting_session::{
    backend::Backend,
    image::Immovable,
    quota::Quota,
    server::{self, Nudge, Session, Tuning},
};
use remoting_stream::tls;
use remoting_timeslice as timeslice;
use remoting_transport::{
    account::Account,
    bell::Futex,
    control,
    endpoint::Receiver,
    mapping,
    peer_files::{self, WrongFile},
    port_bell::{Events, Waker},
    socket,
    window::{self, RING},
};
use remoting_turns::{
    message::{IDLE, Join},
    slices::Slices,
};

use super::{
    account,
    compiled::{self, InUse, owner::Owner},
    confine::{self, Confinement, Later, Piece},
    handshake::{Door, answering},
    options::Options,
    standby::{self, Movable},
    stream,
};

/// The descriptor on which a worker finds the pool's socket.
pub(super) const LISTENER: i32 = 3;
/// The descriptor on which a worker that shares its device finds a socket to the pool.
pub(super) const CONTROL: i32 = 4;

/// Why such a pool refuses virtual machines: it would say for itself how much it may have, whose it is and what weight it has.
const PROGRAMS_ALONE: &str = "a pool with --memory-total serves programs of this host alone";

/// Why a worker ends.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Starting a thread.
    #[error("cannot start a thread")]
    Start(#[source] io::Error),
    /// TLS.
    #[error(transparent)]
    Tls(#[from] tls::Error),
    /// Time slices, which the pool has found to work.
    #[error("cannot set time slices")]
    Slices(#[source] timeslice::Error),
    /// The limit counts while a client is stopped.
    #[error(
        "the client has weight=idle, and this pool --kernel-limit, which goes on counting while an idle client is stopped: use a \
         weight from 1 to 10000, or a pool without --kernel-limit"
    )]
    Idle,
    /// The connection.
    #[error("the connection to the application failed")]
    Connection(#[source] io::Error),
    /// The other side.
    #[error("an application was refused")]
    Refused(#[from] Refused),
    /// A machine's attachment.
    #[error("a virtual machine was refused")]
    Attachment(#[from] NoAttachment),
    /// A machine's files.
    #[error("a virtual machine sent {0} files with its attachment, and not 4")]
    Files(usize),
    /// One of a machine's files.
    #[error("a virtual machine was refused")]
    File(#[from] WrongFile),
    /// The devices that it wants.
    #[error("the accelerator of a virtual machine wants devices that cannot be named so")]
    Device(#[source] WrongName),
    /// The account of device memory.
    #[error("cannot use the account of device memory that a virtual machine sent")]
    Account(#[source] io::Error),
    /// The pool's account of device memory.
    #[error("cannot use the pool's account of device memory")]
    Total(#[source] io::Error),
    /// A machine, in a pool for programs.
    #[error("a virtual machine was refused: {PROGRAMS_ALONE}")]
    Machine,
    /// The window.
    #[error(transparent)]
    Window(#[from] mapping::Error),
    /// The driver.
    #[error(transparent)]
    Driver(#[from] api::Error),
    /// The CUDA driver.
    #[error(transparent)]
    Cuda(#[from] remoting_cuda::driver::Error),
    /// Confinement.
    #[error(transparent)]
    Confine(#[from] confine::Error),
    /// Its own folder.
    #[error("cannot work in its own folder")]
    Folder(#[source] io::Error),
    /// Its own threads.
    #[error("a driver has started a thread while its worker waited for an application")]
    Threads,
    /// Another worker's application.
    #[error("cannot go on with another worker's application")]
    Restore(#[source] Immovable),
    /// Another worker's application, which stays there.
    #[error("another worker's application was refused: {0}")]
    Elsewhere(&'static str),
    /// An API that no pool serves.
    #[error("native contexts are served by gantry-nvidia")]
    Native,
    /// Serving ended.
    #[error(transparent)]
    Serving(#[from] server::Error),
}

/// Where a worker's application comes in.
enum Entrance {
    Rings(UnixListener),
    Streams(Door),
}

/// Serves one application that connects to the pool's socket.
pub fn work(options: &Options) -> Result<(), Error> {
    // SAFETY: the pool has put its socket there, and nothing else in this process uses it.
    let listener = unsafe { OwnedFd::from_raw_fd(LISTENER) };
    let entrance = match options.stream.stream {
        Some(kind) => {
            // A confined worker cannot do that any more.
            rustix::io::ioctl_fionbio(&listener, true)
                .map_err(|error| Error::Connection(error.into()))?;
            Entrance::Streams(Door::new(listener, kind, &options.stream)?)
        }
        None => Entrance::Rings(listener.into()),
    };
    let mut worker = Worker::confined(options)?;
    // What the one driver of a pool needs can be had before it is known who comes.
    if let (false, [api]) = (options.late, &options.apis[..]) {
        if let Err(error) = worker.open(*api) {
            return match !options.standby && stream::tell_failure(&error) {
                true => Ok(()),
                false => Err(error),
            };
        }
        if worker.later.is_some() && !compiled::alone(Duration::ZERO) {
            // What is taken from this thread later, the driver's would keep.
            let told = socket::send(&stream::channel(), &[stream::THREADS], &[]);
            return told.map_err(Error::Connection);
        }
    }
    if options.standby {
        drop(entrance);
        return standby::take_up(worker);
    }
    match entrance {
        Entrance::Rings(listener) => {
            let stream = next(&listener).map_err(Error::Connection)?;
            drop(listener);
            serve(worker, &stream)
        }
        Entrance::Streams(door) => serve_stream(worker, door),
    }
}

/// This process, as long as it serves nobody.
pub(super) struct Worker<'a> {
    pub(super) options: &'a Options,
    /// The device memory of an application of this machine.
    quota: Arc<Quota>,
    /// What is taken from it when it is known whose application it serves.
    later: Option<(Later, &'a Path)>,
    /// Where what its driver compiles is kept from then on.
    kept: Option<InUse>,
    api: Option<Arc<api::Api>>,
    cuda: Option<Arc<remoting_cuda::driver::Api>>,
}

impl<'a> Worker<'a> {
    /// Confines the process, before the driver starts threads of its own.
    pub(super) fn confined(options: &'a Options) -> Result<Self, Error> {
        let quota = account::quota(options).map_err(Error::Total)?;
        let own: &Path = &options.cache;
        let without = options.without();
        let readable = options.readable.iter().chain(&options.cuda_libraries);
        let readable: Vec<PathBuf> = readable.cloned().collect();
        let mut confinement = Confinement {
            writable: &[own],
            readable: &readable,
            memory: Some(options.heap()),
            api: options.widest(),
            without: &without,
        };
        // What is compiled is kept where Landlock keeps owners apart.
        let all = options.compiled.as_deref();
        let Some(all) = all.filter(|_| !without.has(Piece::Landlock)) else {
            confine::confine(confinement)?;
            return Ok(Self {
                options,
                quota,
                later: None,
                kept: None,
                api: None,
                cuda: None,
            });
        };
        let later = Some((Later::prepare(confinement)?, all));
        let both = [own, all];
        confinement.writable = &both;
        confine::confine(confinement)?;
        Ok(Self {
            options,
            quota,
            later,
            kept: None,
            api: None,
            cuda: None,
        })
    }

    /// How an application of this machine is served.
    pub(super) fn tuning(&self) -> Tuning {
        Tuning {
            spin: Duration::from_micros(self.options.spin),
            waker: Waker::Futex(Futex { patience: PATIENCE }),
            quota: Arc::clone(&self.quota),
        }
    }

    /// The driver.
    pub(super) fn api(&mut self) -> Result<Arc<api::Api>, Error> {
        if let Some(api) = &self.api {
            return Ok(Arc::clone(api));
        }
        let api = Arc::new(api::Api::open(self.options.library(ApiId::OpenCl))?);
        // Drivers do much when they are first asked; nobody waits for it yet.
        let mut count = 0;
        cl!(
            api,
            clGetPlatformIDs(0, std::ptr::null_mut(), &raw mut count)
        );
        self.api = Some(Arc::clone(&api));
        Ok(api)
    }

    /// The CUDA driver.
    fn cuda(&mut self) -> Result<Arc<remoting_cuda::driver::Api>, Error> {
        if let Some(cuda) = &self.cuda {
            return Ok(Arc::clone(cuda));
        }
        // Before the driver looks for places.
        if !self.options.without().has(Piece::Arena) {
            remoting_cuda::arena::fill().map_err(remoting_cuda::driver::Error::Arena)?;
        }
        let cuda = Arc::new(remoting_cuda::driver::Api::open(
            self.options.library(ApiId::Cuda),
            self.options.cuda_libraries.as_deref(),
        )?);
        self.cuda = Some(Arc::clone(&cuda));
        Ok(cuda)
    }

    /// Opens the driver of an API.
    fn open(&mut self, api: ApiId) -> Result<(), Error> {
        match api {
            ApiId::OpenCl => self.api().map(drop),
            ApiId::Cuda => self.cuda().map(drop),
            ApiId::Nvidia => Err(Error::Native),
        }
    }

    /// Opens a driver that has to be there before the window is mapped: it shares addresses with
    /// the application. Others may have threads, and wait until it is known whose they are.
    fn prepare_window(&mut self, api: ApiId) -> Result<(), Error> {
        match api {
            ApiId::OpenCl => Ok(()),
            ApiId::Cuda | ApiId::Nvidia => self.open(api),
        }
    }

    /// Gives up sending files, before anything of the application's runs.
    pub(super) fn send_no_files(&self) -> Result<(), Error> {
        Ok(confine::send_no_files(&self.options.without())?)
    }

    /// Becomes the worker of this owner's application, from here on with this owner's compiled
    /// programs and nobody else's. The pool learns of it, and nothing more.
    pub(super) fn belong(&mut self, owner: Option<&Owner>) -> Result<(), Error> {
        if let Some((later, all)) = self.later.take() {
            // The handshake threads have finished their work, but may not have ended yet.
            if !compiled::alone(Duration::from_secs(1)) {
                return Err(Error::Threads);
            }
            self.kept = compiled::enter(all, &self.options.cache, owner, later)?;
            if let Some(InUse { unit, .. }) = &self.kept {
                let message = [&[stream::OWNED], unit.as_bytes()].concat();
                socket::send(&stream::channel(), &message, &[]).map_err(Error::Connection)?;
            }
        }
        // What kernels print with printf must go somewhere: from here on to the error output.
        // SAFETY: plain calls on the two.
        if unsafe { libc::dup2(libc::STDERR_FILENO, libc::STDOUT_FILENO) } < 0 {
            return Err(Error::Connection(io::Error::last_os_error()));
        }
        Ok(())
    }
}

/// Who has connected next and may have a worker. The pool tells others why they get none, and has a
/// copy of their connections until this process has closed its own: what was sent to one may hang
/// as the last copy closes.
fn next(listener: &UnixListener) -> io::Result<UnixStream> {
    loop {
        let (stream, _) = listener.accept()?;
        if taken(stream.as_fd())? {
            return Ok(stream);
        }
    }
}

/// Hands the pool a copy of the connection to this worker's application: whether it may serve it. Not if the pool cannot
/// have it, as too many descriptors of this user's are in flight.
fn taken(connection: BorrowedFd<'_>) -> io::Result<bool> {
    let channel = stream::channel();
    match stream::hand_over(|| socket::send(&channel, &[stream::TAKEN], &[connection])) {
        Err(error) if stream::is_crowded(&error) => return Ok(false),
        sent => sent?,
    }
    let mut answer = [stream::ENOUGH];
    (&mut &*channel).read_exact(&mut answer)?;
    if answer != [stream::SERVE] {
        return Ok(false);
    }
    Ok(true)
}

/// The longest sleep of a serving thread.
pub(super) const PATIENCE: Duration = Duration::from_millis(200);

/// Serves whoever has connected: an application of this machine, or a slice of a virtual
/// machine's accelerator port.
fn serve(mut worker: Worker<'_>, connection: &UnixStream) -> Result<(), Error> {
    let options = worker.options;
    let (bytes, files) = match socket::receive_hello(connection) {
        // Whoever only looks whether a pool listens says nothing.
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
        hello => hello.map_err(Error::Connection)?,
    };
    let user = socket::user(connection).map_err(Error::Connection)?;
    if Attachment::begins(&bytes) {
        return serve_slice(worker, connection, user, &bytes, files);
    }
    let sizes = (options.window << 20, RING);
    let spoken = options.spoken();
    let ours = match Hello::check(&bytes, &spoken) {
        Ok(theirs) if theirs.form == Form::Asks => {
            return socket::send_hello(connection, theirs, &[]).map_err(Error::Connection);
        }
        Ok(theirs) => Hello::answer(apis::spoken(theirs.api), Form::File, sizes),
        Err(refused) => {
            let ours = answering(&spoken, &bytes);
            // So that the other side can name both versions, too.
            let _ = socket::send_hello(connection, Hello::answer(ours, Form::File, sizes), &[]);
            return Err(refused.into());
        }
    };
    let file: OwnedFd = mapping::create(ours.window)?;
    if ours.api == ApiId::OpenCl {
        stream::tell_place(&[], ours.window, &[file.as_fd()]).map_err(Error::Connection)?;
    }
    stream::hand_over(|| socket::send_hello(connection, ours, &[file.as_fd()]))
        .map_err(Error::Connection)?;
    // The driver may start threads, and what belongs to others is taken from a process without.
    worker.belong(Owner::of_user(user).as_ref())?;
    worker.send_no_files()?;
    worker.prepare_window(ours.api)?;
    let window = map(&file, ours.window, ours.api)?;
    drop(file);
    let listener = connection.try_clone().map_err(Error::Connection)?;
    let nudge = Nudge(Box::new(move || socket::nudge(&listener)));
    match ours.api {
        ApiId::Nvidia => Err(Error::Native),
        ApiId::OpenCl => {
            let way = (worker.tuning(), nudge);
            serve_window(worker.api()?, window, way, None, options)
        }
        ApiId::Cuda => {
            let way = (worker.tuning(), nudge);
            serve_cuda(worker.cuda()?, window, way, None, options)
        }
    }
}

/// Maps a window: where the application has it, too, if the API has addresses in common.
fn map(file: &OwnedFd, size: u64, api: ApiId) -> Result<Arc<window::Window>, Error> {
    let place = remoting_cuda::arena::WINDOW;
    if api == ApiId::Cuda && size <= place.end - place.start {
        // SAFETY: `arena::fill` has kept the place for this.
        if let Ok(window) = unsafe { window::Window::map_at(file, size, RING, place.start) } {
            return Ok(window);
        }
    }
    Ok(window::Window::map(file, size, RING)?)
}

/// Serves an application that calls CUDA. It cannot be moved to another worker.
fn serve_cuda(
    api: Arc<remoting_cuda::driver::Api>,
    window: Arc<window::Window>,
    (tuning, nudge): (Tuning, Nudge),
    attachment: Option<(&Attachment, &UnixStream)>,
    options: &Options,
) -> Result<(), Error> {
    let machine = attachment.map(|(_, machine)| machine);
    let attachment = attachment.map(|(attachment, _)| attachment);
    let choice = choice(attachment, options)?;
    std::env::set_current_dir(&options.cache).map_err(Error::Folder)?;
    let spin = tuning.spin;
    let mut backend = CudaBackend::new(api, &choice);
    if let Err(error) = backend.tell_printed() {
        base::note!("gantry-accel: what an application's kernels print is lost: {error}");
    }
    let (mut server, calls) = Session::new(backend, window, tuning, nudge);
    limit(&mut server, options)?;
    share(&mut server, options, owner(attachment, options))?;
    let movable = Movable::Not(standby::CUDA);
    standby::attend(Arc::clone(&server.board), movable, machine).map_err(Error::Start)?;
    Ok(server.run(calls, spin)?)
}

/// Serves the next application that comes by a stream.
fn serve_stream(mut worker: Worker<'_>, door: Door) -> Result<(), Error> {
    let options = worker.options;
    let size = options.window << 20;
    let file: OwnedFd = mapping::create(size)?;
    let window = window::Window::map(&file, size, RING)?;
    let served = door.next(&options.spoken(), (size, RING));
    let (channel, api) = served.map_err(Error::Connection)?;
    let owner = door.owner(&channel);
    drop(door);
    if !taken(channel.fd().as_fd()).map_err(Error::Connection)? {
        return Ok(());
    }
    worker.belong(owner.as_ref())?;
    worker.send_no_files()?;
    // Messages that nobody waits for are carried over like all others.
    let nudge = Nudge(Box::new(|| {}));
    match api {
        ApiId::Nvidia => Err(Error::Native),
        ApiId::OpenCl => {
            stream::start::<OpenCl>(&window, channel).map_err(Error::Start)?;
            let stays = Some(standby::STREAMS);
            let way = (worker.tuning(), nudge);
            serve_window(worker.api()?, window, way, stays, options)
        }
        ApiId::Cuda => {
            stream::start::<Cuda>(&window, channel).map_err(Error::Start)?;
            let way = (worker.tuning(), nudge);
            serve_cuda(worker.cuda()?, window, way, None, options)
        }
    }
}

/// The devices that an application is offered.
fn choice(attachment: Option<&Attachment>, options: &Options) -> Result<Choice, Error> {
    let wanted = attachment.map_or("", |attachment| &attachment.device);
    Ok(Choice {
        lent: options.devices.clone(),
        wanted: wanted.parse().map_err(Error::Device)?,
    })
}

/// What carries out the calls of an application that is offered these devices, in the folder that
/// is this process's own.
fn backend(api: Arc<api::Api>, choice: &Choice, options: &Options) -> Result<OpenClBackend, Error> {
    let mut backend = OpenClBackend::new(api, choice);
    // Named alike by all workers: drivers look by the options, too, for what they have compiled.
    std::env::set_current_dir(&options.cache).map_err(Error::Folder)?;
    backend.keep_files_in(Path::new(""));
    Ok(backend)
}

/// Serves an application that is not in a guest, at the other end of a window. `stays` says why it cannot be moved, if
/// it cannot.
fn serve_window(
    api: Arc<api::Api>,
    window: Arc<window::Window>,
    way: (Tuning, Nudge),
    stays: Option<&'static str>,
    options: &Options,
) -> Result<(), Error> {
    let (server, calls, spin) = session(api, window, way, None, options)?;
    let movable = stays.map_or_else(|| Movable::From(server.told()), Movable::Not);
    standby::attend(Arc::clone(&server.board), movable, None).map_err(Error::Start)?;
    Ok(server.run(calls, spin)?)
}

/// A session with an application of this machine or, with its attachment, of a virtual one; and the
/// calls that it gets, and how long it polls.
pub(super) fn session(
    api: Arc<api::Api>,
    window: Arc<window::Window>,
    (tuning, nudge): (Tuning, Nudge),
    attachment: Option<&Attachment>,
    options: &Options,
) -> Result<(Server, Receiver<window::Slice, Waker>, Duration), Error> {
    let spin = tuning.spin;
    let backend = backend(api, &choice(attachment, options)?, options)?;
    let (mut server, calls) = Server::new(backend, window, tuning, nudge);
    // As much as the process may have of its own.
    server.most_carried = options.heap();
    limit(&mut server, options)?;
    share(&mut server, options, owner(attachment, options))?;
    Ok((server, calls, spin))
}

/// Whose an application is, as it shares the device, and its part of it.
fn owner(attachment: Option<&Attachment>, options: &Options) -> Join {
    if let Some(attachment) = attachment {
        return Join {
            name: attachment.client.clone(),
            weight: attachment.weight,
            latency: attachment.latency,
            sliced: false,
        };
    }
    // SAFETY: a plain call.
    let parent = unsafe { libc::getppid() };
    let name = options.name.clone();
    Join {
        name: name.unwrap_or_else(|| format!("gantry-accel-{parent}")),
        weight: options.weight,
        latency: options.latency.unwrap_or(0),
        sliced: false,
    }
}

/// Serves an application in a guest, of which this process has the slice of the window, a doorbell
/// and an interrupt, and nothing else. `start` is the beginning of the machine's attachment.
fn serve_slice(
    mut worker: Worker<'_>,
    stream: &UnixStream,
    user: u32,
    start: &[u8; hello::SIZE],
    files: Vec<OwnedFd>,
) -> Result<(), Error> {
    let options = worker.options;
    if let Err(wrong) = peer_files::check(&files) {
        // Before the files are closed, which may take for ever.
        let _ = (&mut &*stream).write_all(&[port::REFUSED]);
        return Err(wrong.into());
    }
    // Before the rest, whose length another version may not know.
    let theirs = Attachment::version(start)?;
    let first = apis::spoken(options.apis[0]);
    if theirs.number != NUMBER {
        let theirs = Spoken {
            version: theirs,
            ..first
        };
        return Err(refuse_machine(stream, files.into_iter().next(), theirs).into());
    }
    let mut bytes = [0; port::ATTACHMENT];
    bytes[..hello::SIZE].copy_from_slice(start);
    (&mut &*stream)
        .read_exact(&mut bytes[hello::SIZE..])
        .map_err(Error::Connection)?;
    let attachment = Attachment::from_bytes(&bytes)?;
    let ours = apis::spoken(attachment.api);
    let is_served = options.apis.contains(&attachment.api);
    let differs = !is_served || theirs != ours.version;
    if attachment.takes_up {
        // The slice is still another worker's: nothing is written there.
        let why = match attachment.api {
            _ if options.memory_total.is_some() => PROGRAMS_ALONE,
            _ if differs => "this pool is of another build, or serves another API",
            ApiId::Nvidia => "native contexts are served by gantry-nvidia",
            ApiId::Cuda => standby::CUDA,
            ApiId::OpenCl => {
                return standby::take_up_slice(worker, stream, user, &attachment, files);
            }
        };
        let refusal = control::Reply::Refused(Blob(why.as_bytes().to_vec()));
        control::send(stream, &refusal, &[]).map_err(Error::Connection)?;
        return Err(Error::Elsewhere(why));
    }
    if options.memory_total.is_some() {
        // Before the files are closed, which may take for ever.
        let _ = (&mut &*stream).write_all(&[port::REFUSED]);
        return Err(Error::Machine);
    }
    if !is_served {
        return Err(refuse_api(stream, files.into_iter().next(), first, attachment.api).into());
    }
    if differs {
        let theirs = Spoken {
            api: attachment.api,
            version: theirs,
        };
        return Err(refuse_machine(stream, files.into_iter().next(), theirs).into());
    }
    if attachment.api == ApiId::OpenCl
        && let Err(error) = tell_slice(&attachment, &files)
    {
        // Before the files are closed, which may take for ever.
        let _ = (&mut &*stream).write_all(&[port::REFUSED]);
        return Err(error);
    }
    worker.belong(machine(&attachment, user).as_ref())?;
    worker.send_no_files()?;
    worker.prepare_window(attachment.api)?;
    let ready = accept_slice(&attachment, files);
    let answer = if ready.is_ok() {
        port::READY
    } else {
        port::REFUSED
    };
    (&mut &*stream)
        .write_all(&[answer])
        .map_err(Error::Connection)?;
    let (window, events, quota) = ready?;
    let tuning = Tuning {
        spin: Duration::from_micros(options.spin),
        waker: Waker::Guest(events),
        quota,
    };
    // Messages that nobody waits for are looked for in a guest.
    let nudge = Nudge(Box::new(|| {}));
    if attachment.api == ApiId::Cuda {
        let way = (tuning, nudge);
        let attachment = Some((&attachment, stream));
        return serve_cuda(worker.cuda()?, window, way, attachment, options);
    }
    let api = worker.api()?;
    let (server, calls, spin) = session(api, window, (tuning, nudge), Some(&attachment), options)?;
    let board = Arc::clone(&server.board);
    let movable = Movable::From(server.told());
    standby::attend(board, movable, Some(stream)).map_err(Error::Start)?;
    Ok(server.run(calls, spin)?)
}

/// Tells the pool which slice this worker serves, with its files.
pub(super) fn tell_slice(attachment: &Attachment, files: &[OwnedFd]) -> Result<(), Error> {
    if files.len() != 4 {
        return Err(Error::Files(files.len()));
    }
    let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
    let told = stream::tell_place(&attachment.to_bytes(), attachment.window, &files);
    told.map_err(Error::Connection)
}

/// Tells a machine of another build, and the application behind it, of which one this worker is.
/// Hellos and their places in a slice, the first of a machine's files, are the same in all builds.
fn refuse_machine(stream: &UnixStream, slice: Option<OwnedFd>, theirs: Spoken) -> Refused {
    let ours = apis::spoken(theirs.api);
    let answer = Hello::answer(ours, Form::Port, (0, 0));
    if let Some(slice) = slice.map(File::from) {
        let mut hello = answer;
        let mut sent = [0; hello::SIZE];
        // One of this build would find nothing wrong with that: it is told the machine's.
        if slice.read_exact_at(&mut sent, window::CLIENT_HELLO).is_ok()
            && Hello::check(&sent, &[ours]).is_ok()
        {
            hello.version = theirs.version;
        }
        let _ = slice.write_all_at(&hello.to_bytes(), window::REPLY);
    }
    // As soon as it has this, the machine tells the application to look.
    let _ = socket::send_hello(stream, answer, &[]);
    Refused::Version {
        api: theirs.api,
        ours: ours.version,
        theirs: theirs.version,
    }
}

/// Tells a machine, and its application, which API is served here, in place of the one that it calls.
fn refuse_api(stream: &UnixStream, slice: Option<OwnedFd>, ours: Spoken, theirs: ApiId) -> Refused {
    let answer = Hello::answer(ours, Form::Port, (0, 0));
    if let Some(slice) = slice.map(File::from) {
        let _ = slice.write_all_at(&answer.to_bytes(), window::REPLY);
    }
    let _ = socket::send_hello(stream, answer, &[]);
    Refused::Api {
        ours: ours.api,
        theirs: theirs.number(),
    }
}

/// Whose a guest's application is, if anything is kept for it.
pub(super) fn machine(attachment: &Attachment, user: u32) -> Option<Owner> {
    let name = attachment.compiled.clone();
    let of = |name| Owner::of_machine(user, name, attachment.user);
    Some(name).filter(|name| !name.is_empty()).and_then(of)
}

/// Checks the version of the application's hello and answers it, which is in the slice.
fn accept_slice(
    attachment: &Attachment,
    files: Vec<OwnedFd>,
) -> Result<(Arc<window::Window>, Arc<Events>, Arc<Quota>), Error> {
    let count = files.len();
    let Ok([memory, doorbell, interrupt, account]) = <[OwnedFd; 4]>::try_from(files) else {
        return Err(Error::Files(count));
    };
    let window = map(&memory, attachment.window, attachment.api)?;
    let spoken = apis::spoken(attachment.api);
    let ours = Hello::answer(spoken, Form::Port, (attachment.window, RING));
    let hello = window.client_hello();
    // Also for an application of another build, so that it can name both versions.
    window.reply(&ours.to_bytes());
    Hello::check(&hello, &[spoken])?;
    let events = Events {
        doorbell,
        interrupt,
        patience: PATIENCE,
    };
    let account = Account::map(&account).map_err(Error::Account)?;
    let quota = Quota::shared(attachment.memory, account, attachment.slice);
    Ok((window, Arc::new(events), quota))
}

/// Limits the time that a command may run, if there is a limit. The pool ends what this process has
/// started when it has ended.
fn limit<B: Backend>(server: &mut Session<B>, options: &Options) -> Result<(), Error> {
    if options.kernel_limit == 0 {
        return Ok(());
    }
    let exceeded = |ran: Duration| {
        base::note!(
            "gantry-accel: a command that has run for {:.1} s, more than --kernel-limit allows, ends \
             its worker",
            ran.as_secs_f64()
        );
        // SAFETY: ends the process at once: the driver's own clean-up would wait for the command.
        unsafe { libc::_exit(1) }
    };
    let limit = Duration::from_millis(options.kernel_limit);
    server.limit(limit, exceeded).map_err(Error::Start)
}

/// Shares the device with others, if there is an arbiter. Called before anything of the application's
/// is done: from here on the pool knows for whom this is, whatever becomes of this process.
fn share<B: Backend>(server: &mut Session<B>, options: &Options, owner: Join) -> Result<(), Error> {
    if options.arbiter.is_none() {
        return Ok(());
    }
    if owner.weight == IDLE && options.kernel_limit != 0 {
        return Err(Error::Idle);
    }
    // SAFETY: the pool has put the socket there, and nothing else in this process uses it.
    let control = unsafe { UnixStream::from_raw_fd(CONTROL) };
    let sliced = options.sliced && B::Api::ID == ApiId::Cuda;
    let slices = sliced.then(timeslice::of_this_process).transpose();
    let slices = slices.map_err(Error::Slices)?;
    let slices = slices.map(|gate| Box::new(timeslice::Shared::new(gate)) as Box<dyn Slices>);
    let join = Join {
        sliced: slices.is_some(),
        ..owner
    };
    server.share(control, &join, slices).map_err(Error::Start)
}

#[cfg(test)]
mod tests {
    use remoting_proto::wire::hello::Version;

    use super::*;

    #[test]
    fn a_machine_of_another_build_and_its_application_learn_of_both_versions() {
        let ours = Spoken::of::<OpenCl>();
        let other = |version| Spoken { version, ..ours };
        let machine = Version {
            number: NUMBER + 1,
            ..ours.version
        };
        let of = |version| Hello {
            version,
            ..Hello::client::<OpenCl>()
        };
        // The guest's driver is of the machine's build, of the worker's, or of a third one.
        let third = Version {
            fingerprint: !ours.version.fingerprint,
            ..ours.version
        };
        let version = ours.version;
        for (driver, told) in [(machine, version), (version, machine), (third, version)] {
            let file = mapping::create(window::SMALLEST).unwrap();
            let slice = window::Window::map(&file, window::SMALLEST, RING).unwrap();
            slice.write_client_hello(&of(driver).to_bytes());
            let (here, theirs) = UnixStream::pair().unwrap();
            let refused = refuse_machine(&here, Some(file), other(machine)).to_string();
            for version in [version, machine] {
                assert!(refused.contains(&version.to_string()), "{refused}");
            }
            let (answer, _) = socket::receive_hello(&theirs).unwrap();
            assert_eq!(
                Hello::check_for::<OpenCl>(&answer).unwrap().version,
                version
            );
            let hello = Hello {
                form: Form::Port,
                ..of(told)
            };
            assert_eq!(slice.answer(), hello.to_bytes());
        }
    }
}
