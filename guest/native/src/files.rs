//! Which descriptor of the program is which device file.
//!
//! A device file of the program is one end of a socket pair. The kernel gives each socket a number of its own, its
//! cookie, which no other socket ever has: it tells the file, whatever number the descriptor has by now. A socket that
//! was received or inherited is shown to the worker, which knows its own.

use std::{
    cell::Cell,
    io,
    mem::size_of,
    os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd, RawFd},
    sync::{
        Mutex, MutexGuard, Once, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use base::fork::Mark;
use nvidia_abi::{
    Kind,
    wire::{Operation, Request},
};

use crate::{
    connection::Connection,
    managed_ranges,
    mappings::{Inherited, Pinned, SliceFile},
};

/// A device file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct File {
    cookie: u64,
    /// Its number in messages.
    pub number: u32,
    /// Its kind.
    pub kind: Kind,
    /// What `stat` says: device and mode. 0: not known.
    pub attributes: (u64, u64),
}

/// What `stat` says of a path.
pub type Attributes = (u64, u64);

/// The program, as this library sees it.
#[derive(Default)]
pub struct Program {
    connection: Option<Connection>,
    files: Vec<File>,
    /// Cookies of files of the process that this one was forked from: contexts do not survive a fork.
    inherited: Vec<u64>,
    /// Cookies of sockets that are no device files.
    foreign: Vec<u64>,
    /// Memory of the program that lies in the slice.
    pub pinned: Vec<Pinned>,
    has_complained: bool,
}

/// The most cookies that are remembered.
const MOST: usize = 4096;

static PROGRAM: Mutex<Option<Program>> = Mutex::new(None);
/// This process, whose connection and files the program's are. A child that shares its memory until it executes a
/// program is it, too.
static OWN: Mark = Mark::new();
/// Whether the program has used a device file.
static IN_USE: AtomicBool = AtomicBool::new(false);

/// Whether the program has used a device file.
pub fn in_use() -> bool {
    IN_USE.load(Ordering::Relaxed)
}

thread_local! {
    /// Whether this thread has the program.
    static HAS_PROGRAM: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread has the program, and must not wait for it.
pub fn has_program() -> bool {
    HAS_PROGRAM.get()
}

/// The program, for this thread alone.
pub struct Locked(MutexGuard<'static, Option<Program>>);

impl std::ops::Deref for Locked {
    type Target = Program;

    fn deref(&self) -> &Program {
        // `program` has filled it.
        self.0.as_ref().expect("it is filled while locked")
    }
}

impl std::ops::DerefMut for Locked {
    fn deref_mut(&mut self) -> &mut Program {
        // As above.
        self.0.as_mut().expect("it is filled while locked")
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        HAS_PROGRAM.set(false);
    }
}

/// Waits for the program.
pub fn program() -> Locked {
    static FORKS: Once = Once::new();
    // SAFETY: the functions are valid for ever.
    FORKS.call_once(|| unsafe {
        libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(in_child));
    });
    let mut program = PROGRAM.lock().unwrap_or_else(PoisonError::into_inner);
    HAS_PROGRAM.set(true);
    let known = program.get_or_insert_default();
    if !OWN.is_own() {
        known.forked();
        if let Err(error) = OWN.set() {
            // Until there is memory, nothing lasts longer than a call.
            eprintln!("gantry-nvidia: cannot tell this process from its children: {error}");
        }
    }
    Locked(program)
}

/// The lock of a thread that forks, and of what memory the child gets a copy. The child has the lock's memory, but not
/// the thread that would unlock it.
struct Forking {
    inherited: Vec<Inherited>,
    _program: MutexGuard<'static, Option<Program>>,
}

struct Held(std::cell::UnsafeCell<Option<Forking>>);

// SAFETY: only the thread that has the lock uses it: from before the fork until after.
unsafe impl Sync for Held {}

static HELD: Held = Held(std::cell::UnsafeCell::new(None));

extern "C" fn before_fork() {
    let program = PROGRAM.lock().unwrap_or_else(PoisonError::into_inner);
    HAS_PROGRAM.set(true);
    let inherited = program.iter().flat_map(Program::inherited).collect();
    let forking = Forking {
        inherited,
        _program: program,
    };
    // SAFETY: this thread has the lock.
    unsafe { *HELD.0.get() = Some(forking) };
}

extern "C" fn after_fork() {
    // SAFETY: this thread, or its copy in the child, has the lock.
    let forking = unsafe { (*HELD.0.get()).take() };
    // The next thread that forks finds nothing.
    drop(forking);
    HAS_PROGRAM.set(false);
}

extern "C" fn in_child() {
    // SAFETY: as in `after_fork`, which follows.
    if let Some(forking) = unsafe { &mut *HELD.0.get() } {
        managed_ranges::clear();
        forking.inherited.iter().for_each(Inherited::copy);
    }
    after_fork();
}

/// The number that the kernel has for a socket. `None`: no socket.
fn cookie(file: RawFd) -> Option<u64> {
    let mut cookie = 0u64;
    let mut length = size_of::<u64>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes.
    let result = unsafe {
        let place = (&raw mut cookie).cast();
        libc::getsockopt(file, libc::SOL_SOCKET, libc::SO_COOKIE, place, &mut length)
    };
    (result == 0).then_some(cookie)
}

impl Program {
    /// This is another process than the one that the files are of.
    fn forked(&mut self) {
        // The parent's.
        drop(self.connection.take());
        self.inherited
            .extend(self.files.drain(..).map(|file| file.cookie));
        self.pinned.clear();
        managed_ranges::clear();
    }

    /// The connection to the worker. The first time that there is none, a line says so.
    pub fn connection(&mut self) -> io::Result<&mut Connection> {
        if self.connection.is_none() {
            match Connection::new() {
                Ok(connection) => self.connection = Some(connection),
                Err(error) => {
                    if !std::mem::replace(&mut self.has_complained, true) {
                        eprintln!("gantry-nvidia: cannot connect to the worker: {error}");
                    }
                    return Err(io::Error::from_raw_os_error(libc::ENODEV));
                }
            }
            IN_USE.store(true, Ordering::Relaxed);
        }
        // It was set above.
        self.connection
            .as_mut()
            .ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// The slice, and how mappings of it are shown.
    pub fn slice(&self) -> Option<(RawFd, SliceFile)> {
        let connection = self.connection.as_ref()?;
        Some((connection.slice.as_raw_fd(), connection.shown))
    }

    /// What a child gets a copy of.
    fn inherited(&self) -> Vec<Inherited> {
        let inherited = |(_, shown)| {
            let pinned = self.pinned.iter();
            pinned.flat_map(move |pinned: &Pinned| pinned.inherited(shown))
        };
        self.slice().into_iter().flat_map(inherited).collect()
    }

    /// Leaves a worker that has ended, unless the program has a device file of it: a program that was suspended goes on
    /// with another worker.
    fn leave_ended(&mut self) {
        let has_ended = |connection: &Connection| connection.has_ended();
        if !self.connection.as_ref().is_some_and(has_ended) || self.has_files() {
            return;
        }
        for pinned in std::mem::take(&mut self.pinned) {
            self.put_back(&pinned);
        }
        self.connection = None;
        self.files.clear();
        self.foreign.clear();
        // The next worker has other files by the same numbers.
        managed_ranges::clear();
    }

    /// Whether a descriptor of this process is a device file.
    fn has_files(&self) -> bool {
        let Ok(open) = std::fs::read_dir("/proc/self/fd") else {
            return true;
        };
        let number =
            |entry: io::Result<std::fs::DirEntry>| entry.ok()?.file_name().to_str()?.parse().ok();
        open.filter_map(number)
            .any(|file| self.known(file).is_some())
    }

    /// What `stat` says of a device file's path.
    pub fn attributes(&mut self, path: &[u8]) -> io::Result<Attributes> {
        self.leave_ended();
        let request = Request {
            operation: Operation::Stat,
            file: 0,
            a: 0,
            b: 0,
            length: 0,
        };
        let reply = self.connection()?.send(request, path, None, true)?;
        Ok((reply.answer.a, reply.answer.b))
    }

    /// Opens a device file.
    pub fn open(&mut self, path: &[u8], flags: libc::c_int) -> io::Result<RawFd> {
        let attributes = self.attributes(path)?;
        let cloexec = flags & libc::O_CLOEXEC != 0;
        let request = Request {
            operation: Operation::Open,
            file: 0,
            a: flags as u64,
            b: 0,
            length: 0,
        };
        let reply = self.connection()?.send(request, path, None, cloexec)?;
        let file = reply.file.ok_or(io::ErrorKind::InvalidData)?.into_raw_fd();
        if flags & libc::O_NONBLOCK != 0 {
            // SAFETY: a call without pointers.
            unsafe { libc::fcntl(file, libc::F_SETFL, libc::O_NONBLOCK) };
        }
        let noted = self.note(file, reply.answer.a, reply.answer.b, attributes);
        if let Err(error) = noted {
            // SAFETY: the descriptor was made above.
            drop(unsafe { OwnedFd::from_raw_fd(file) });
            return Err(error);
        }
        Ok(file)
    }

    fn note(
        &mut self,
        file: RawFd,
        number: u64,
        kind: u64,
        attributes: Attributes,
    ) -> io::Result<File> {
        let cookie = cookie(file).ok_or(io::ErrorKind::InvalidData)?;
        let number = u32::try_from(number).map_err(|_| io::ErrorKind::InvalidData)?;
        let kind = Kind::from_number(kind).ok_or(io::ErrorKind::InvalidData)?;
        if self.files.len() >= MOST {
            // The oldest is most likely closed; if not, it is adopted again.
            self.files.remove(0);
        }
        let file = File {
            cookie,
            number,
            kind,
            attributes,
        };
        self.files.push(file);
        Ok(file)
    }

    /// The device file behind a descriptor. `None`: it is none.
    pub fn find(&mut self, file: RawFd) -> io::Result<Option<File>> {
        let Some(cookie) = cookie(file) else {
            return Ok(None);
        };
        // The newest first: those are in use.
        if let Some(known) = self.files.iter().rev().find(|known| known.cookie == cookie) {
            return Ok(Some(*known));
        }
        if self.inherited.contains(&cookie) {
            return Err(io::Error::from_raw_os_error(libc::EBADF));
        }
        if self.foreign.contains(&cookie) {
            return Ok(None);
        }
        let identify = Request {
            operation: Operation::Identify,
            file: 0,
            a: 0,
            b: 0,
            length: 0,
        };
        match self.connection()?.send(identify, &[], Some(file), true) {
            Ok(reply) => {
                let adopt = Request {
                    operation: Operation::Adopt,
                    ..identify
                };
                let adopted = self
                    .connection()?
                    .send(adopt, &reply.bytes, None, true)?
                    .answer;
                self.note(file, adopted.a, adopted.b, (0, 0)).map(Some)
            }
            Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => {
                if self.foreign.len() >= MOST {
                    self.foreign.clear();
                }
                self.foreign.push(cookie);
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// The device file behind a descriptor, if this process has used it before.
    pub fn known(&self, file: RawFd) -> Option<File> {
        let cookie = cookie(file)?;
        self.files
            .iter()
            .rev()
            .find(|known| known.cookie == cookie)
            .copied()
    }
}
