//! Worker processes: one per application, started before they are needed.
//!
//! The pool's process owns the socket and does nothing but start and end workers. Each worker opens
//! the host's driver, then accepts one connection and hands the pool a copy of it, so that the next
//! worker is started, and serves. When the other side closes the connection, the pool kills the
//! worker, whatever runs in it. Until the process is gone the pool keeps its copy: the other side
//! sees the connection end when the worker has ended, and not before.

use std::{
    fs::{DirBuilder, File},
    io::{self, Read, Write},
    net::TcpListener,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
        unix::{
            fs::DirBuilderExt,
            net::{UnixListener, UnixStream},
            process::CommandExt,
        },
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Arc,
    thread,
    time::Duration,
};

use super::{
    confine::{self, Confinement},
    quota::Quota,
    server::{self, Nudge, Server, Tuning},
    stream::{self, Door, Kind},
};
use crate::{
    account::Account,
    opencl::api,
    port::{self, Attachment, NoAttachment},
    protocol::hello::{self, Form, Hello, Refused, VERSION},
    transport::{
        bell::Futex,
        port_bell::{Events, Waker},
        socket,
        stream::{
            address::{Host, Listen},
            connect,
            tls::{self, Keeper},
        },
        window,
    },
    turns::{introduce, message::Join},
};

/// The descriptor on which a worker finds the pool's socket.
const LISTENER: i32 = 3;
/// The descriptor on which a worker that shares its device finds a socket to the pool.
const CONTROL: i32 = 4;

/// What the names of pools' folders begin with.
const FOLDER: &str = "gantry-accel-";
/// The file in it that the pool holds a lock on as long as it lives.
const LOCK: &str = "lock";

/// Options of workers.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// The OpenCL loader to open.
    #[arg(long, default_value = "libOpenCL.so.1", value_name = "FILE")]
    pub library: String,
    /// Size of each application's window in MiB: address space, and memory only where it is used.
    #[arg(long, default_value_t = 2048, value_name = "MIB")]
    pub window: u64,
    /// Microseconds to poll before sleeping.
    #[arg(long, default_value_t = 50, value_name = "MICROSECONDS")]
    pub spin: u64,
    /// Folder below which each worker gets one for its driver's caches, the only one that it may
    /// write to.
    #[arg(long, default_value = "/tmp", value_name = "FOLDER")]
    pub cache: PathBuf,
    /// Device memory in MiB that each of this machine's own applications may have; all that there
    /// is by default. Applications in guests have what their machine's accelerator is given.
    #[arg(
        long,
        default_value_t = 0,
        hide_default_value = true,
        value_name = "MIB"
    )]
    pub memory: u64,
    /// A folder or file that workers may read beside the usual ones (/usr, /opt and the like):
    /// where the host's driver is, if it is elsewhere.
    #[arg(long, value_name = "PATH")]
    pub readable: Vec<PathBuf>,
    /// Memory in MiB that each worker may have beside the window, its driver's included; half of
    /// this machine's by default.
    #[arg(long, value_name = "MIB")]
    pub heap: Option<u64>,
    /// Socket of the arbiter (gantry-arbiter) by which the device is shared with other pools.
    #[arg(long, value_name = "PATH")]
    pub arbiter: Option<PathBuf>,
    /// Whose this machine's own applications are: those of one name share one part of the device.
    /// Applications in guests are their virtual machine's.
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// The part of the device that this machine's own applications get, in proportion to those of
    /// others: 1 to 10,000.
    #[arg(long, default_value_t = 1, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub weight: u32,
    /// Milliseconds that a command may run on the device; one that runs longer costs its worker. No
    /// limit by default.
    #[arg(
        long,
        default_value_t = 0,
        hide_default_value = true,
        value_name = "MS"
    )]
    pub kernel_limit: u64,
    /// What streams need.
    #[command(flatten)]
    pub stream: stream::Options,
}

/// Where a pool listens, and for what.
#[derive(Clone, Debug)]
pub enum Place {
    /// At a Unix socket, for applications and machines that share memory with workers.
    Rings(PathBuf),
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

impl Options {
    /// Bytes of memory that each worker may have of its own.
    fn heap(&self) -> u64 {
        self.heap.map_or_else(
            || {
                // SAFETY: plain calls.
                let pages = unsafe { libc::sysconf(libc::_SC_PHYS_PAGES) };
                // SAFETY: as above.
                let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
                // Neither is negative on Linux.
                pages.unsigned_abs() * page.unsigned_abs() / 2
            },
            |mib| mib.saturating_mul(1 << 20),
        )
    }
}

/// Why a pool or worker ends.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The socket.
    #[error(
        "cannot listen on {path}: is another pool running, is it no socket, or is the folder missing?"
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
    /// TLS.
    #[error(transparent)]
    Tls(#[from] tls::Error),
    /// Starting a worker.
    #[error("cannot start a worker process")]
    Start(#[source] io::Error),
    /// Workers end before they serve anybody.
    #[error("the last {0} workers ended before an application came: see the messages above")]
    Dying(u32),
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
    /// The account of device memory.
    #[error("cannot use the account of device memory that a virtual machine sent")]
    Account(#[source] io::Error),
    /// The window.
    #[error(transparent)]
    Window(#[from] window::Error),
    /// The driver.
    #[error(transparent)]
    Driver(#[from] api::Error),
    /// Confinement.
    #[error(transparent)]
    Confine(#[from] confine::Error),
    /// Serving ended.
    #[error(transparent)]
    Serving(#[from] server::Error),
}

/// A listening socket, its kind if streams are served, and how many at a time.
struct Listener {
    socket: OwnedFd,
    kind: Option<Kind>,
    most: usize,
    keeper: Option<Keeper>,
}

impl Listener {
    fn open(place: Place, options: &Options) -> Result<Self, Error> {
        let (listen, key, plain, most) = match place {
            Place::Rings(path) => {
                return Ok(Self {
                    socket: bind(path)?.into(),
                    kind: None,
                    most: usize::MAX,
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
            Listen::Unix(path) => (bind(path)?.into(), Kind::Unix, None),
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
            keeper,
        })
    }
}

fn bind(path: PathBuf) -> Result<UnixListener, Error> {
    socket::listen(&path).map_err(|source| Error::Listen { path, source })
}

/// Listens and keeps `spare` workers waiting, for ever. Each is `program` with the arguments
/// `worker` and those of `options`.
pub fn run(place: Place, spare: usize, program: &Path, options: &Options) -> Result<(), Error> {
    let listener = Listener::open(place, options)?;
    let cache = Cache::open(&options.cache).map_err(Error::Start)?;
    if !confine::has_landlock() {
        eprintln!(
            "gantry-accel: this kernel has no Landlock: workers can read and write what this user \
             can; boot one that has it, or run the pool as a user of its own"
        );
    }
    let mut waiting: Vec<Worker> = Vec::new();
    let mut serving: Vec<Worker> = Vec::new();
    let mut dying = 0;
    let mut started = 0u64;
    loop {
        while waiting.len() < spare.max(1) && waiting.len() + serving.len() < listener.most {
            started += 1;
            let folder = cache.folder.join(started.to_string());
            waiting.push(start(&listener, program, options, folder)?);
        }
        // Blocks until a worker is taken or has ended, or its application has.
        let changed = first_changed(&waiting, &serving).map_err(Error::Start)?;
        let mut worker = match changed {
            Changed::Waiting(index) => waiting.swap_remove(index),
            Changed::Ended(index) => {
                serving.swap_remove(index).end();
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
        let mut message = [0; stream::LONGEST];
        let received = socket::receive(&worker.channel, &mut message);
        match received.map(|(count, files)| (&message[..count], files)) {
            Ok(([stream::TAKEN], mut files)) if files.len() == 1 => {
                dying = 0;
                worker.connection = files.pop();
                serving.push(worker);
            }
            Ok(([stream::SIGN, request @ ..], _)) => {
                let answer = stream::answer(listener.keeper.as_ref(), request);
                // One that has ended meanwhile is noticed as such.
                let _ = socket::send(&worker.channel, &answer, &[]);
                waiting.push(worker);
            }
            _ => {
                dying += 1;
                worker.end();
                if dying == 8 {
                    return Err(Error::Dying(dying));
                }
                // Eight in a row are given up; until then the reason may pass.
                thread::sleep(Duration::from_millis(100));
            }
        }
    }
}

/// A worker process and its folder, which goes when it does.
#[derive(Debug)]
struct Worker {
    child: Child,
    /// By which it hands over its connection.
    channel: UnixStream,
    /// The connection to its application, once it has one.
    connection: Option<OwnedFd>,
    /// Whether its application has ended, so that it was killed.
    alone: bool,
    /// Readable when the process has ended.
    end: OwnedFd,
    cache: PathBuf,
}

impl Worker {
    /// Kills the process and all that it has started: linkers, or what kernels on a CPU like. It
    /// has a process group of its own, which nothing in it can leave.
    fn kill(&self) {
        // SAFETY: a plain call; the process has not been waited for, so that its id is its own.
        unsafe { libc::kill(-(self.child.id() as libc::pid_t), libc::SIGKILL) };
    }

    /// Ends it for good.
    fn end(mut self) {
        self.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.cache);
    }
}

/// The folder of a pool, with one for each of its workers. A pool that was killed leaves its
/// folder behind; the next pool removes it: its lock is free then.
#[derive(Debug)]
pub(super) struct Cache {
    /// Where it is.
    pub(super) folder: PathBuf,
    _lock: File,
}

impl Cache {
    pub(super) fn open(below: &Path) -> io::Result<Self> {
        for entry in std::fs::read_dir(below)?.filter_map(Result::ok) {
            let left = entry.file_name().to_string_lossy().starts_with(FOLDER);
            let path = entry.path();
            if left && File::open(path.join(LOCK)).is_ok_and(|lock| lock.try_lock().is_ok()) {
                let _ = std::fs::remove_dir_all(path);
            }
        }
        let folder = below.join(format!("{FOLDER}{}", std::process::id()));
        let mut builder = DirBuilder::new();
        // Other users' processes have no business with what is compiled here.
        builder.mode(0o700).create(&folder)?;
        let lock = File::create(folder.join(LOCK))?;
        lock.lock()?;
        Ok(Self {
            folder,
            _lock: lock,
        })
    }
}

fn start(
    listener: &Listener,
    program: &Path,
    options: &Options,
    cache: PathBuf,
) -> Result<Worker, Error> {
    std::fs::create_dir(&cache).map_err(Error::Start)?;
    let mut command = Command::new(program);
    let (channel, theirs) = UnixStream::pair().map_err(Error::Start)?;
    let mut given = vec![(listener.socket.as_raw_fd(), LISTENER)];
    let control = match &options.arbiter {
        Some(path) => {
            let (ours, theirs) = UnixStream::pair().map_err(Error::Start)?;
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
    command
        .args(["--weight", &options.weight.to_string()])
        .args(["--library", &options.library])
        .args(["--window", &options.window.to_string()])
        .args(["--spin", &options.spin.to_string()])
        .args(["--memory", &options.memory.to_string()])
        .args(["--kernel-limit", &options.kernel_limit.to_string()])
        .args(["--heap", &(options.heap() >> 20).to_string()])
        .arg("--cache")
        .arg(&cache)
        // One application's compiled kernels are none of another's business.
        .env("POCL_CACHE_DIR", &cache)
        .env("CUDA_CACHE_PATH", &cache)
        .env("TMPDIR", &cache)
        // The host's loader must not find this machine's own remoting driver.
        .env("GANTRY_OPENCL", "off")
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(OwnedFd::from(theirs));
    // SAFETY: only async-signal-safe calls between fork and exec.
    unsafe {
        command.pre_exec(move || {
            // A worker does not outlive the pool.
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            // First out of each other's way, then to their places, where they stay open.
            for (fd, _) in &mut given {
                *fd = libc::fcntl(*fd, libc::F_DUPFD_CLOEXEC, CONTROL + 1);
            }
            for (fd, place) in &given {
                if *fd < 0 || libc::dup2(*fd, *place) < 0 {
                    return Err(io::Error::last_os_error());
                }
            }
            Ok(())
        });
    }
    let child = command.spawn().map_err(Error::Start)?;
    // With it goes this process's copy of the worker's end of the channel.
    drop(command);
    if let Some((ours, _, path)) = control {
        introduce::attend(&child, ours, path.clone()).map_err(Error::Start)?;
    }
    // SAFETY: a plain call; the child has not been waited for, so that its id is its own.
    let end = unsafe { libc::syscall(libc::SYS_pidfd_open, child.id(), 0) };
    if end < 0 {
        return Err(Error::Start(io::Error::last_os_error()));
    }
    // SAFETY: the descriptor was just made and has no other owner.
    let end = unsafe { OwnedFd::from_raw_fd(end as i32) };
    Ok(Worker {
        child,
        channel,
        connection: None,
        alone: false,
        end,
        cache,
    })
}

/// Which worker has changed.
enum Changed {
    /// This one, which waited, is taken or has ended.
    Waiting(usize),
    /// This one, which served, has ended.
    Ended(usize),
    /// This one serves nobody any more.
    Alone(usize),
}

fn first_changed(waiting: &[Worker], serving: &[Worker]) -> io::Result<Changed> {
    let poll = |fd, events| libc::pollfd {
        fd,
        events,
        revents: 0,
    };
    let channels = waiting
        .iter()
        .map(|worker| poll(worker.channel.as_raw_fd(), libc::POLLIN));
    let ends = serving
        .iter()
        .map(|worker| poll(worker.end.as_raw_fd(), libc::POLLIN));
    // A negative descriptor is passed over. What the other side says is for the worker to read.
    let connections = serving.iter().map(|worker| {
        let connection = worker.connection.as_ref().filter(|_| !worker.alone);
        poll(connection.map_or(-1, AsRawFd::as_raw_fd), libc::POLLRDHUP)
    });
    let mut polled: Vec<_> = channels.chain(ends).chain(connections).collect();
    loop {
        // SAFETY: the array is as long as is said.
        let count = unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, -1) };
        if count > 0
            && let Some(index) = polled.iter().position(|entry| entry.revents != 0)
        {
            return Ok(match index.checked_sub(waiting.len()) {
                None => Changed::Waiting(index),
                Some(index) if index < serving.len() => Changed::Ended(index),
                Some(index) => Changed::Alone(index - serving.len()),
            });
        }
        let error = io::Error::last_os_error();
        if count < 0 && error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
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
        Some(kind) => Entrance::Streams(Door::new(listener, kind, &options.stream)?),
        None => Entrance::Rings(listener.into()),
    };
    // Before the driver starts threads of its own.
    confine::confine(Confinement {
        cache: &options.cache,
        readable: &options.readable,
        memory: Some(options.heap()),
    })?;
    let api = Arc::new(api::Api::open(&options.library)?);
    // Drivers do much when they are first asked; nobody waits for it yet.
    let mut count = 0;
    server::cl!(
        api,
        clGetPlatformIDs(0, std::ptr::null_mut(), &raw mut count)
    );
    match entrance {
        Entrance::Rings(listener) => {
            let (stream, _) = listener.accept().map_err(Error::Connection)?;
            drop(listener);
            taken(stream.as_fd()).map_err(Error::Connection)?;
            serve(api, &stream, options)
        }
        Entrance::Streams(door) => serve_stream(api, door, options),
    }
}

/// Hands the pool a copy of the connection to this worker's application.
fn taken(connection: BorrowedFd<'_>) -> io::Result<()> {
    socket::send(&stream::channel(), &[stream::TAKEN], &[connection])?;
    // What kernels print with printf must go somewhere: from here on to the error output.
    // SAFETY: plain calls on the two.
    if unsafe { libc::dup2(libc::STDERR_FILENO, libc::STDOUT_FILENO) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// The size of each ring's data in bytes.
const RING: u64 = 1 << 20;
/// The longest sleep of a serving thread.
const PATIENCE: Duration = Duration::from_millis(200);

/// Serves whoever has connected: an application of this machine, or a slice of a virtual
/// machine's accelerator port.
fn serve(api: Arc<api::Api>, stream: &UnixStream, options: &Options) -> Result<(), Error> {
    let (bytes, files) = socket::receive_hello(stream).map_err(Error::Connection)?;
    if bytes.starts_with(&port::MAGIC) {
        return serve_slice(api, stream, options, &bytes, files);
    }
    let ours = Hello {
        version: VERSION,
        form: Form::File,
        window: options.window << 20,
        ring: RING,
    };
    if let Err(refused) = Hello::check(&bytes) {
        // So that the other side can name both versions, too.
        let _ = socket::send_hello(stream, ours, &[]);
        return Err(refused.into());
    }
    let file: OwnedFd = window::create(ours.window)?;
    socket::send_hello(stream, ours, &[file.as_fd()]).map_err(Error::Connection)?;
    let window = window::Window::map(&file, ours.window, RING)?;
    let listener = stream.try_clone().map_err(Error::Connection)?;
    let nudge = Nudge(Box::new(move || socket::nudge(&listener)));
    serve_window(api, window, nudge, options)
}

/// Serves the next application that comes by a stream.
fn serve_stream(api: Arc<api::Api>, door: Door, options: &Options) -> Result<(), Error> {
    let hello = stream::hello(options.window << 20, RING);
    let file: OwnedFd = window::create(hello.window)?;
    let window = window::Window::map(&file, hello.window, RING)?;
    let channel = door.next(hello).map_err(Error::Connection)?;
    drop(door);
    taken(channel.fd().as_fd()).map_err(Error::Connection)?;
    stream::start(&window, channel).map_err(Error::Start)?;
    // Messages that nobody waits for are carried over like all others.
    serve_window(api, window, Nudge(Box::new(|| {})), options)
}

/// Serves an application that is not in a guest, at the other end of a window.
fn serve_window(
    api: Arc<api::Api>,
    window: Arc<window::Window>,
    nudge: Nudge,
    options: &Options,
) -> Result<(), Error> {
    let tuning = Tuning {
        spin: Duration::from_micros(options.spin),
        waker: Waker::Futex(Futex { patience: PATIENCE }),
        device: String::new(),
        quota: Quota::new(options.memory.saturating_mul(1 << 20)),
    };
    let spin = tuning.spin;
    let (mut server, calls) = Server::new(api, window, tuning, nudge);
    server.keep_files_in(&options.cache);
    limit(&mut server, options)?;
    // SAFETY: a plain call.
    let parent = unsafe { libc::getppid() };
    let name = options.name.clone();
    let name = name.unwrap_or_else(|| format!("gantry-accel-{parent}"));
    share(&mut server, options, name, options.weight)?;
    Ok(server.run(calls, spin)?)
}

/// Serves an application in a guest, of which this process has the slice of the window, a doorbell
/// and an interrupt, and nothing else. `start` is the beginning of the machine's attachment.
fn serve_slice(
    api: Arc<api::Api>,
    stream: &UnixStream,
    options: &Options,
    start: &[u8; hello::SIZE],
    files: Vec<OwnedFd>,
) -> Result<(), Error> {
    let mut bytes = [0; port::ATTACHMENT];
    bytes[..hello::SIZE].copy_from_slice(start);
    (&mut &*stream)
        .read_exact(&mut bytes[hello::SIZE..])
        .map_err(Error::Connection)?;
    let attachment = Attachment::from_bytes(&bytes)?;
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
        waker: Waker::Guest(Arc::clone(&events)),
        device: attachment.device,
        quota,
    };
    let spin = tuning.spin;
    let nudge = Nudge(Box::new(move || events.interrupt()));
    let (mut server, calls) = Server::new(api, window, tuning, nudge);
    server.keep_files_in(&options.cache);
    limit(&mut server, options)?;
    share(&mut server, options, attachment.client, attachment.weight)?;
    Ok(server.run(calls, spin)?)
}

/// Checks versions and answers the application's hello, which is in the slice.
fn accept_slice(
    attachment: &Attachment,
    files: Vec<OwnedFd>,
) -> Result<(Arc<window::Window>, Arc<Events>, Arc<Quota>), Error> {
    if attachment.version != VERSION {
        return Err(Refused::Version {
            ours: VERSION,
            theirs: attachment.version,
        }
        .into());
    }
    let count = files.len();
    let Ok([memory, doorbell, interrupt, account]) = <[OwnedFd; 4]>::try_from(files) else {
        return Err(Error::Files(count));
    };
    let window = window::Window::map(&memory, attachment.window, RING)?;
    let ours = Hello {
        version: VERSION,
        form: Form::Port,
        window: attachment.window,
        ring: RING,
    };
    let greeting = window.greeting();
    // Also for an application of another build, so that it can name both versions.
    window.reply(&ours.to_bytes());
    Hello::check(&greeting)?;
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
fn limit(server: &mut Server, options: &Options) -> Result<(), Error> {
    if options.kernel_limit == 0 {
        return Ok(());
    }
    let exceeded = |ran: Duration| {
        eprintln!(
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

/// Shares the device with others, if there is an arbiter.
fn share(server: &mut Server, options: &Options, name: String, weight: u32) -> Result<(), Error> {
    if options.arbiter.is_none() {
        return Ok(());
    }
    // SAFETY: the pool has put the socket there, and nothing else in this process uses it.
    let control = unsafe { UnixStream::from_raw_fd(CONTROL) };
    let join = Join { name, weight };
    server.share(control, join).map_err(Error::Start)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_killed_pools_folder_is_removed_and_a_living_ones_is_not() {
        let below = std::env::temp_dir().join(format!("gantry-pool-test-{}", std::process::id()));
        let (dead, living) = (below.join("gantry-accel-1"), below.join("gantry-accel-2"));
        for folder in [&dead, &living] {
            std::fs::create_dir_all(folder.join("7")).unwrap();
            File::create(folder.join(LOCK)).unwrap();
        }
        let held = File::open(living.join(LOCK)).unwrap();
        held.lock().unwrap();
        let cache = Cache::open(&below).unwrap();
        assert!(!dead.exists() && living.exists() && cache.folder.exists());
        std::fs::remove_dir_all(below).unwrap();
    }
}
