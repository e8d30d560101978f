//! The process behind a gate: serves one application after the other, each with a process of its own.
//!
//! What an application leaves behind ends with that process: handles, memory, the driver's state.

use std::{
    io,
    mem::ManuallyDrop,
    os::{
        fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
        unix::{net::UnixStream, process::CommandExt},
    },
    path::{Path, PathBuf},
    process::{Child, Command},
    sync::Arc,
    thread,
    time::Duration,
};

use base::gpus::{Choice, Selection};
use remoting_opencl::handlers::{self, Surroundings};
use remoting_opencl::{
    OpenClBackend,
    driver::{Api, api, cl},
};
use remoting_proto::wire::api::ApiId;
use remoting_session::{
    passive::{Offer, Passive},
    quota::Quota,
};
use remoting_transport::{
    closer::{Closer, Connection},
    messages, socket,
};
use vmfunc_gate::guest::{self, Ended};

use super::{
    confine::{self, Confinement, Pieces},
    drivers,
    folders::{Cache, Folder},
    pool,
    starter::Starter,
};

/// What a process behind a gate offers.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// The OpenCL loader to open.
    #[arg(long, default_value = "libOpenCL.so.1", value_name = "FILE")]
    pub library: String,
    /// The devices that are offered, joined by +: an index in the order of PCI addresses, a UUID or its beginning, a PCI
    /// address, or a part of a model's name; all by default.
    #[arg(
        long,
        default_value = "",
        hide_default_value = true,
        value_name = "DEVICE[+DEVICE...]"
    )]
    pub device: Selection,
    /// Device memory in MiB that the application may have; all that there is by default.
    #[arg(
        long,
        default_value_t = 0,
        hide_default_value = true,
        value_name = "MIB"
    )]
    pub memory: u64,
    /// A folder or file that an application's process may read beside the usual ones (/usr, /opt
    /// and the like): where the host's driver is, if it is elsewhere. For those that come by messages.
    #[arg(long, value_name = "PATH")]
    pub readable: Vec<PathBuf>,
    /// Folder below which each application's process gets one for its driver's caches and for
    /// headers of sources.
    #[arg(long, default_value = "/tmp", value_name = "FOLDER")]
    pub cache: PathBuf,
    /// Memory in MiB that is kept ready, locked, for what the application has carried out on its
    /// own CPU.
    #[arg(long, default_value_t = 64, value_name = "MIB")]
    pub heap: usize,
    /// Carry calls out on this machine's own CPU, not on the application's: for drivers that have
    /// threads, as those for CPUs do.
    #[arg(long)]
    pub own_cpu: bool,
}

/// Why nothing is served behind a gate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The driver cannot be opened.
    #[error(transparent)]
    Driver(#[from] api::Error),
    /// The socket that replaces a gate.
    #[error(
        "cannot listen on {path}: is another process there, or may this user not write to its \
         folder?"
    )]
    Listen {
        /// Its path.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The connection that replaces a gate failed.
    #[error("the connection to the application failed")]
    Connection(#[source] io::Error),
    /// Confinement.
    #[error(transparent)]
    Confine(#[from] confine::Error),
    /// The gate failed.
    #[error(transparent)]
    Gate(#[from] guest::Error),
    /// The heap cannot be locked in memory.
    #[error("cannot lock {0} MiB in memory: run as root, or allow it more (ulimit -l)")]
    Memory(usize, #[source] io::Error),
    /// The process for an application failed, and has said why.
    #[error("the process for the next application has ended: see the message above")]
    Ended,
    /// A client was ended inside the server's kernel.
    #[error("an application was ended in this machine's kernel: boot the machine again")]
    Lost,
    /// A process for an application cannot be started.
    #[error("cannot start a process for an application")]
    Start(#[source] io::Error),
}

/// A worker with an open driver.
fn open(options: &Options) -> Result<Passive<OpenClBackend>, Error> {
    let api = Api::open(&options.library)?;
    // Drivers do much work on their first call; nobody waits for it yet.
    let mut count = 0;
    cl!(
        api,
        clGetPlatformIDs(0, std::ptr::null_mut(), &raw mut count)
    );
    let choice = Choice {
        lent: options.device.clone(),
        wanted: Selection::default(),
    };
    let mut backend = OpenClBackend::new(Arc::new(api), &choice);
    backend.keep_files_in(&options.cache);
    Ok(Passive::new(Offer {
        backend,
        quota: Quota::new(options.memory.saturating_mul(1 << 20)),
        own: options.own_cpu,
    }))
}

/// Prepares a process for one application, with a role of `program`, and creates its folder.
fn process(
    program: &Path,
    role: &str,
    options: &Options,
    (all, number): (&Cache, u64),
) -> Result<(Command, Folder), Error> {
    let cache = Folder::create(all.folder.join(number.to_string())).map_err(Error::Start)?;
    let mut command = Command::new(program);
    let this = std::process::id();
    // SAFETY: async-signal-safe calls between fork and exec.
    unsafe {
        command.pre_exec(move || base::child::end_with(this));
    }
    command
        .arg(role)
        .args(["--library", &options.library])
        .args(["--device", &options.device.to_string()])
        .args(["--memory", &options.memory.to_string()])
        .args(["--heap", &options.heap.to_string()])
        .arg("--cache")
        .arg(&cache.0)
        .envs(drivers::environment());
    for variable in ["POCL_CACHE_DIR", "CUDA_CACHE_PATH", "TMPDIR"] {
        command.env(variable, &cache.0);
    }
    for path in &options.readable {
        command.arg("--readable").arg(path);
    }
    if options.own_cpu {
        command.arg("--own-cpu");
    }
    Ok((command, cache))
}

/// Serves one application after the other behind the gate of this virtual machine, until somebody resumes the machine.
/// Each is served by `program` with the argument `paired`.
pub fn stand(program: &Path, options: &Options) -> Result<(), Error> {
    let all = Cache::open(&options.cache).map_err(Error::Start)?;
    for number in 1.. {
        let (mut command, cache) = process(program, "paired", options, (&all, number))?;
        let status = command
            .stdin(std::process::Stdio::null())
            .status()
            .map_err(Error::Start);
        drop(cache);
        match status?.code() {
            Some(code) if code == i32::from(NEXT) => {}
            Some(0) => break,
            // The process has said why.
            _ => return Err(Error::Ended),
        }
    }
    Ok(())
}

/// Exit code of a process whose application has left.
pub const NEXT: u8 = 3;

/// Serves the next application that pairs. Returns whether others may come.
pub fn paired(options: &Options) -> Result<bool, Error> {
    let surroundings = Surroundings {
        shared: guest::shared,
        slow: guest::slow,
    };
    handlers::install(
        open(options)?,
        surroundings,
        options.heap.saturating_mul(1 << 20),
    )
    .map_err(|source| Error::Memory(options.heap, source))?;
    let mut server = guest::Server::register(&handlers::HANDLERS)?;
    match server.serve(handlers::own)? {
        Ended::ClientGone => Ok(true),
        Ended::Resumed => Ok(false),
        Ended::Lost => Err(Error::Lost),
    }
}

/// Maximum number of applications that are served by messages at a time.
const MOST: usize = 16;
/// How long to accept no application after one could not be accepted.
const PAUSE: Duration = Duration::from_millis(100);

/// Accepts applications by messages, for ever. Each is served by `program` with the argument `connected`. For an
/// application that cannot be served, the connection is closed.
pub fn listen(path: PathBuf, program: &Path, options: &Options) -> Result<(), Error> {
    let listener = socket::listen(&path).map_err(|source| Error::Listen { path, source })?;
    let starter = Starter::new().map_err(Error::Start)?;
    let closer = Closer::default();
    let all = Cache::open(&options.cache).map_err(Error::Start)?;
    // Every served application holds a reference.
    let served = Arc::new(());
    let mut number = 0u64;
    loop {
        let accepted = listener.accept().map_err(Error::Connection);
        // What has been sent by it may not close.
        let accepted = accepted.map(|(stream, _)| Connection::new(stream, &closer));
        if accepted.is_ok() && Arc::strong_count(&served) > MOST {
            base::note!("gantry-accel: {MOST} applications are served: another one is refused");
            continue;
        }
        number += 1;
        let started = accepted.and_then(|connection| {
            let process = process(program, "connected", options, (&all, number))?;
            connect(&starter, process, connection, Arc::clone(&served)).map_err(Error::Start)
        });
        if let Err(error) = started {
            let source = std::error::Error::source(&error);
            let why = source.map(ToString::to_string).unwrap_or_default();
            base::note!("gantry-accel: an application is not served: {error}: {why}");
            thread::sleep(PAUSE);
        }
    }
}

/// Starts the process for a connection, and a thread that ends it with the application and removes its folder.
fn connect(
    starter: &Starter,
    (mut command, cache): (Command, Folder),
    connection: Connection,
    served: Arc<()>,
) -> io::Result<()> {
    command.process_group(0);
    let child = starter.start(&[connection.as_fd()], move |files| {
        command.stdin(files.into_iter().next().ok_or(io::ErrorKind::InvalidData)?);
        command.spawn()
    })?;
    let attended = Attended::new(child, cache)?;
    thread::Builder::new()
        .name("attend".to_owned())
        .spawn(move || {
            attended.wait(&connection);
            // The other side sees the end of the connection when the process has ended.
            drop(attended);
            drop((connection, served));
        })?;
    Ok(())
}

/// A process for an application and its folder; dropping it ends both.
struct Attended {
    child: Child,
    _cache: Folder,
    /// Readable when the process has ended.
    end: OwnedFd,
}

impl Attended {
    fn new(mut child: Child, cache: Folder) -> io::Result<Self> {
        match pool::handle(&child) {
            Ok(end) => Ok(Self {
                child,
                _cache: cache,
                end,
            }),
            Err(error) => {
                let _ = child.kill();
                let _ = child.wait();
                Err(error)
            }
        }
    }

    /// Waits until the process or its application has ended.
    fn wait(&self, connection: &UnixStream) {
        let poll = |fd, events| libc::pollfd {
            fd,
            events,
            revents: 0,
        };
        let mut polled = [
            poll(self.end.as_raw_fd(), libc::POLLIN),
            poll(connection.as_raw_fd(), libc::POLLRDHUP),
        ];
        // SAFETY: two entries. Only what ends the process interrupts this thread.
        unsafe { libc::poll(polled.as_mut_ptr(), 2, -1) };
    }
}

impl Drop for Attended {
    fn drop(&mut self) {
        // Everything that it has started is in its process group, as in a pool.
        // SAFETY: a plain call; the process has not been waited for, so that its id is its own.
        unsafe { libc::kill(-(self.child.id() as libc::pid_t), libc::SIGKILL) };
        let _ = self.child.wait();
    }
}

/// Serves the application whose connection is the standard input.
pub fn connected(options: &Options) -> Result<(), Error> {
    // Before the driver starts threads of its own.
    confine::confine(Confinement {
        writable: &[&options.cache],
        readable: &options.readable,
        memory: None,
        api: ApiId::OpenCl,
        without: &Pieces::default(),
    })?;
    let mut passive = open(options)?;
    // SAFETY: the parent has put it there, and it stays open.
    let stream = ManuallyDrop::new(unsafe { UnixStream::from_raw_fd(libc::STDIN_FILENO) });
    // SAFETY: the memory is mapped until the last message, and nobody else uses it here.
    let handler = |index, shared| unsafe { passive.delegated(index, shared) };
    messages::serve(&stream, handler).map_err(Error::Connection)
}
