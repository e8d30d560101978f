//! Sharing GPUs by weight: an arbiter says how long the time slices of programs' contexts are, and stops them.
//!
//! ```text
//!   program --call--> Session --> Gated (notes, and starts what is stopped before calls that wait) --> device files
//!                arbiter <------> Shared (slices, stops, the record of context switches) --^
//! ```
//!
//! The worker does not see what programs submit. When they have work is read from the driver's record of context switches.
//! All programs of a worker are one client.

use std::{
    ffi::{c_int, c_ulong, c_void},
    io,
    os::{
        fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd},
        unix::net::UnixStream,
    },
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use base::{child::end_with, note};
use nvidia_abi::status;
use remoting_timeslice::{Error, Gate, Kernel, Shared};
use remoting_turns::{
    introduce::{attend_process, handle_of},
    message::Join,
    page::Mode,
    worker::{Sharing, share_slices},
};

use crate::device::{Attributes, Device, Node};

/// Engines that run kernels have such classes, from this one on (Volta's).
const COMPUTE: u32 = 0xc0;
const FIRST_ENGINE: u32 = 0xc000;
/// Channel groups, and what channels of a context share.
const GROUP: u32 = 0xa06c;
const CONTEXT_SHARE: u32 = 0x9067;
/// The program's name in the log.
const PROGRAM: &str = "gantry-nvidia";

/// How a worker takes part.
#[derive(Debug)]
pub struct Share {
    /// The socket to the process that [introduces](introducer) this one to arbiters.
    pub control: UnixStream,
    /// The client that all programs of the worker are.
    pub name: String,
    /// Its weight.
    pub weight: u32,
    /// As of [`Join::latency`].
    pub latency: u32,
}

impl Share {
    /// Takes part from now on, in threads that are confined as this one is.
    pub(crate) fn begin(self, gated: Gated) -> io::Result<()> {
        let join = Join {
            name: self.name,
            weight: self.weight,
            latency: self.latency,
            sliced: true,
        };
        let slices = Box::new(Shared::by_record(gated.0));
        let way = Arc::new(Way::default());
        share_slices(self.control, &join, slices, move |sharing| match sharing {
            Sharing::By(mode) => way.is(mode),
            Sharing::Abandoned => note!(
                "{PROGRAM}: the process that introduces this one to arbiters has ended: programs are not shared by weight until \
                 another {PROGRAM} serves them"
            ),
            Sharing::Ended => {
                way.said.store(true, Ordering::Relaxed);
                note!("{PROGRAM}: the arbiter has ended: programs are not shared by weight");
            }
            Sharing::Apart(why) => note!("{PROGRAM}: programs are not shared by weight: {why}"),
            Sharing::HangsUp(why) => note!("{PROGRAM}: programs are not shared by weight: {why}"),
        })
    }
}

/// The way in which the GPU is shared, as the log has it.
#[derive(Debug, Default)]
struct Way {
    is_turns: AtomicBool,
    /// Whether the log says that turns are taken.
    said: AtomicBool,
}

impl Way {
    /// An arbiter that has just been reached may be about to change it.
    const SETTLED: Duration = Duration::from_secs(3);

    fn is(self: &Arc<Self>, mode: Mode) {
        let is_turns = !mode.is_slices();
        let was = self.is_turns.swap(is_turns, Ordering::Relaxed);
        if !is_turns && self.said.swap(false, Ordering::Relaxed) {
            note!("{PROGRAM}: programs are shared by weight");
        }
        if was || !is_turns {
            return;
        }
        let way = self.clone();
        let say = move || {
            thread::sleep(Self::SETTLED);
            if way.is_turns.load(Ordering::Relaxed) && !way.said.swap(true, Ordering::Relaxed) {
                note!(
                    "{PROGRAM}: the arbiter has workers take turns, which programs here do not take: they use the GPU beside \
                     them, and no weight holds"
                );
            }
        };
        // Without it, a line is missing.
        let _ = thread::Builder::new().name("turns".to_owned()).spawn(say);
    }
}

/// Device files, for their gate.
pub(crate) struct Files(Box<dyn Device>);

impl Kernel for Files {
    unsafe fn ioctl(&self, file: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
        // SAFETY: whoever makes a call has the file open, or the number is of none, or of another one that knows no such
        // call; nothing is closed by it.
        let file = unsafe { BorrowedFd::borrow_raw(file) };
        // SAFETY: the caller's promise.
        let made = unsafe { self.0.call(file, request as u32, argument.cast()) };
        made.unwrap_or_else(|error| {
            let number = error.raw_os_error().unwrap_or(libc::EIO);
            // SAFETY: the place of this thread's error number.
            unsafe { *libc::__errno_location() = number };
            -1
        })
    }
}

/// Device files whose calls are noted on their way. A worker has one for as long as its process lives.
#[derive(Clone, Copy)]
pub(crate) struct Gated(&'static Gate<Files>);

impl Gated {
    /// Notes the calls on these files.
    pub fn new(device: Box<dyn Device>) -> Self {
        Self(Box::leak(Box::new(Gate::guarded(Files(device)))))
    }

    /// Closes a file, which `close` does.
    pub fn close(self, file: RawFd, close: impl FnOnce()) {
        self.0.close(file, close);
    }

    /// Keeps the slice of a group that a program wishes to set; returns what to answer. `None`: the group runs no kernels.
    pub fn keep_slice(self, client: u32, group: u32) -> Option<u32> {
        if !self.0.is_group(client, group) {
            return Some(status::INVALID_OBJECT);
        }
        let kept = self.0.keep_slice(client, group)?;
        Some(kept.unwrap_or_else(|error| match error {
            Error::Refused(status) => status,
            _ => status::INVALID_ARGUMENT,
        }))
    }
}

/// Whether objects of this class run kernels.
fn runs_kernels(class: u32) -> bool {
    class & 0xff == COMPUTE && class >= FIRST_ENGINE
}

impl Gated {
    /// Whether a program may make an object of this class below this one: engines that run kernels only where they can be
    /// stopped, and no more than can be looked after of what contexts consist of.
    pub fn may_make(self, client: u32, parent: u32, class: u32) -> Result<(), u32> {
        let controlled = self.0.controlled_by(client, parent);
        if runs_kernels(class) && controlled.is_none() {
            return Err(status::INVALID_ARGUMENT);
        }
        match self.0.has_room(client, class) {
            true => Ok(()),
            false => Err(status::INSUFFICIENT_RESOURCES),
        }
    }

    /// The part of the GPU and the group for which is said how kernels are interrupted, if an object of this class runs some.
    pub fn interrupted_by(self, client: u32, channel: u32, class: u32) -> Option<(u32, u32)> {
        runs_kernels(class).then(|| self.0.controlled_by(client, channel))?
    }

    /// Whether a program may free an object: not that by which its contexts are stopped.
    pub fn may_free(self, client: u32, object: u32) -> bool {
        !self.0.is_needed(client, object)
    }

    /// Whether a program may have an object of this class in two clients: nothing that runs channels elsewhere.
    pub fn may_duplicate(class: u32) -> bool {
        class != GROUP && class != CONTEXT_SHARE
    }
}

impl Device for Gated {
    fn version(&self) -> io::Result<String> {
        self.0.kernel().0.version()
    }

    fn open(&self, node: Node) -> io::Result<OwnedFd> {
        self.0.kernel().0.open(node)
    }

    fn attributes(&self, node: Node) -> io::Result<Attributes> {
        self.0.kernel().0.attributes(node)
    }

    fn shows(&self, node: Node) -> bool {
        self.0.kernel().0.shows(node)
    }

    unsafe fn call(
        &self,
        file: BorrowedFd<'_>,
        command: u32,
        argument: *mut u8,
    ) -> io::Result<i32> {
        let file = file.as_raw_fd();
        // SAFETY: the caller's promise.
        let made = unsafe { self.0.pass_on(file, command.into(), argument.cast()) };
        match made {
            -1 => Err(io::Error::last_os_error()),
            made => Ok(made),
        }
    }
}

/// Starts a process that introduces this one to arbiters at a path, as a confined worker opens no sockets, and ends with it.
/// It hears first for which client, before any program is served, and whatever becomes of the worker later. This process has
/// one thread.
///
/// # Errors
/// The system refuses a socket, a descriptor or a process.
pub fn introducer(arbiter: &Path) -> io::Result<UnixStream> {
    let (control, theirs) = UnixStream::pair()?;
    let this = std::process::id();
    let handle = handle_of(this)?;
    // SAFETY: this process has one thread, so that no lock is held by another one.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            let introduce = || {
                if end_with(this).is_ok() {
                    close_but([theirs.as_raw_fd(), handle.as_raw_fd()]);
                    attend_process(PROGRAM, &handle, &theirs, arbiter);
                }
            };
            // Nothing of the other process goes on here.
            let _ = catch_unwind(AssertUnwindSafe(introduce));
            // SAFETY: ends this process; what it has copies of is not its own to end.
            unsafe { libc::_exit(0) }
        }
        _ => Ok(control),
    }
}

/// Closes all files but these and the standard ones.
fn close_but(kept: [RawFd; 2]) {
    let mut kept = kept.map(i32::cast_unsigned);
    kept.sort_unstable();
    let mut from = 3;
    for end in kept.into_iter().chain([u32::MAX]) {
        if from < end {
            // SAFETY: nothing in this process uses these files; it ends without closing them again.
            unsafe { libc::syscall(libc::SYS_close_range, from, end - 1, 0) };
        }
        from = end.saturating_add(1);
    }
}

#[cfg(test)]
mod tests {
    use std::{os::fd::AsFd, sync::PoisonError};

    use super::*;
    use crate::{
        server::Worker,
        stand_in::{Scheduled, StandIn},
    };
    use base::Unpoisoned;

    const DEVICE: u32 = 0x5c00_0001;
    const SPACE: u32 = 0x5c00_0003;
    const GROUP: u32 = 0x5c00_0010;

    fn issue(device: &dyn Device, file: BorrowedFd<'_>, command: u32, block: &mut [u32]) {
        // SAFETY: the blocks of these tests are as long as their commands say.
        let made = unsafe { device.call(file, command, block.as_mut_ptr().cast()) };
        made.expect("the stand-in does all of it");
    }

    /// Makes a context with two channels on a file; returns its client.
    fn make_context(device: &dyn Device, file: BorrowedFd<'_>) -> u32 {
        let allocate = |client, parent, object, class, parameters: &mut [u32]| {
            let at = match parameters {
                [] => 0,
                _ => parameters.as_mut_ptr() as u64,
            };
            let words = [client, parent, object, class, at as u32, (at >> 32) as u32];
            let mut block = [0; 12];
            block[..6].copy_from_slice(&words);
            issue(device, file, 0xc030_462b, &mut block);
            block[2]
        };
        let client = allocate(0, 0, 0, 0x41, &mut []);
        allocate(client, client, DEVICE, 0x80, &mut [0; 14]);
        allocate(client, DEVICE, 0x5c00_0002, 0x2080, &mut [0]);
        allocate(client, DEVICE, SPACE, 0x90f1, &mut [0; 14]);
        allocate(client, DEVICE, GROUP, 0xa06c, &mut [0, 0, SPACE, 1, 0]);
        for channel in 1..=2 {
            allocate(client, GROUP, GROUP + channel, 0xc86f, &mut [0; 92]);
        }
        client
    }

    fn scheduled(device: &StandIn) -> Vec<Scheduled> {
        let mut state = device.0.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut state.scheduled)
    }

    #[test]
    fn what_is_stopped_goes_on_before_it_is_freed_or_its_file_is_closed() {
        let device = StandIn::default();
        let (control, _process) = UnixStream::pair().expect("there are descriptors");
        let share = Share {
            control,
            name: "test".to_owned(),
            weight: 1,
            latency: 0,
        };
        let shared = Worker::shared(Box::new(device.clone()), 1 << 20, None, None, share);
        let worker = shared.expect("the branch is known");
        let gated = worker.gated.expect("it has an arbiter");
        let opened = worker.device.open(Node::Control).expect("it opens");
        let added = worker.files.lock_unpoisoned().add(Node::Control, opened);
        let (file, program) = added.expect("there are descriptors");
        let client = make_context(&*worker.device, file.device().as_fd());
        let [context] = gated.0.contexts()[..] else {
            panic!("it has one");
        };
        let stopped = gated.0.stop(context).expect("the stand-in stops it");
        let mut free = [client, GROUP, GROUP + 1, 0];
        issue(&*worker.device, file.device(), 0xc010_4629, &mut free);
        assert!(!stopped.renew());
        drop(stopped);
        assert_eq!(
            scheduled(&device),
            [
                Scheduled::Stop(2),
                Scheduled::Start(2),
                Scheduled::Free(GROUP + 1)
            ]
        );
        // A program that is killed frees nothing.
        let stopped = gated.0.stop(context).expect("the stand-in stops it");
        drop(program);
        let number = file.number;
        drop(file);
        worker.close(number);
        assert!(!stopped.renew() && gated.0.contexts().is_empty());
        drop(stopped);
        assert_eq!(
            scheduled(&device),
            [Scheduled::Stop(1), Scheduled::Start(1)]
        );
    }

    #[test]
    fn only_files_that_are_named_stay_open() {
        let (one, other) = UnixStream::pair().expect("there are descriptors");
        // SAFETY: the new process makes system calls only, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            close_but([other.as_raw_fd(), other.as_raw_fd()]);
            // SAFETY: as above.
            unsafe {
                let is_open = |file: i32| libc::fcntl(file, libc::F_GETFD) >= 0;
                let right = is_open(other.as_raw_fd()) && !is_open(one.as_raw_fd()) && is_open(2);
                libc::_exit(i32::from(!right));
            }
        }
        let mut status = 0;
        // SAFETY: the child of above, and a local.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!(status, 0);
    }
}
