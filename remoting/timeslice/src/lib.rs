//! Time slices of this process's contexts on NVIDIA GPUs: how long each is, and stops.
//!
//! ```text
//!   CUDA driver library --ioctl--> Gate::pass_on --> kernel
//!                                   |  notes groups and channels that were made
//!                                   |  starts what is stopped before a call that waits for channels
//!   Gate::set, Gate::stop --control calls--------> kernel
//! ```
//!
//! The GPU serves channel groups round robin, each for its time slice, and preempts kernels. The driver lets a process
//! set the slices of its own groups, and disable its own channels, without any privilege: by two published control
//! calls, SET_TIMESLICE and FIFO_DISABLE_CHANNELS. They need handles that the driver library keeps to itself. Whoever
//! uses this therefore defines the C function `ioctl` in its executable, so that the library's calls bind to it, and
//! passes them to [`ioctl`] here. It makes each call as it is, and notes what has been made and freed. These two
//! control calls are added, and GET_CONTEXT_ID for each new channel.
//!
//! A call that frees a stopped channel would wait for it in the driver, with the lock that starting it needs. Calls that
//! make or free objects, IDLE_CHANNELS and those that take channels from unified memory therefore start what is stopped
//! first, and nothing is stopped until they have returned; if it cannot be started, they fail. What nobody renews for
//! [`UNRENEWED`] is started, too: nothing stays stopped when whoever decides about it is gone.
//!
//! A process that makes other programs' calls has a gate of its own ([`Gate::new`]), before the driver. What such a program
//! wishes for its slices does not count ([`Gate::keep_slice`]), and a file that it closes ends its clients ([`Gate::close`]).
//!
//! Who has had the GPU for how long is read from the driver's record of context switches ([`switches`]). It names channels
//! by numbers, for which the driver is asked when they are made. It also shows, roughly, when contexts have work.
//!
//! [`Shared`] does this for all contexts of a worker as the arbiter says.

#![cfg_attr(not(test), deny(clippy::print_stderr, clippy::print_stdout))]

mod blocks;
mod notes;
mod shared;
pub mod switches;
mod work;

#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::{c_int, c_ulong, c_void},
    fs, io,
    path::Path,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

use base::{Chain, Unpoisoned, note::Seldom};
use blocks::{Channels, Control, Kind, Request, Switching};
use notes::Notes;
use remoting_turns::{Moment, slices::DRIVERS_SLICE};
pub use shared::Shared;

/// For how long a context stays stopped that nobody renews.
pub const UNRENEWED: Duration = Duration::from_millis(200);
/// For how long calls of programs that are not trusted wait at most for the end of a stop.
const HELD_BACK: Duration = Duration::from_secs(1);
/// The driver's statuses for an object or a client that there is not: NV_ERR_INVALID_CHANNEL, INVALID_CLIENT, INVALID_OBJECT,
/// INVALID_OBJECT_HANDLE and OBJECT_NOT_FOUND.
const GONE: [u32; 5] = [0x21, 0x23, 0x31, 0x33, 0x57];
/// With more numbers of channels that have ended, these are forgotten.
const MOST_NUMBERS: usize = 4096;
/// How often the record is read until it has nothing of a channel that has ended: the driver keeps some back for 34 ms.
pub const READ: u32 = 8;
/// Branches of the driver whose calls are known and were seen to work (measurements/sharing.md).
const BRANCHES: &[&str] = &["580"];

/// A context of this process on one GPU: an address space of the driver's. It has channel groups and their channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Context {
    client: u32,
    device: u32,
    space: u32,
}

/// The length of a time slice: 100 us to 100 ms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice(u32);

impl Slice {
    /// A slice of this many microseconds; `None` if the length is out of range.
    pub fn from_micros(micros: u32) -> Option<Self> {
        (100..=100_000).contains(&micros).then_some(Self(micros))
    }
}

/// Why slices cannot be set, or a context cannot be stopped.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The driver's version cannot be read.
    #[error("cannot read the version of NVIDIA's kernel driver")]
    Version(#[source] io::Error),
    /// The branch of the driver is not in the list.
    #[error("the driver's branch {0} is not known to have working time slices: use 580")]
    Branch(String),
    /// The context has no compute channels, or has ended.
    #[error("the context has no compute channels")]
    NoChannels,
    /// The context is stopped already.
    #[error("the context is already stopped")]
    Stopped,
    /// The context cannot be started again for now.
    #[error("the driver does not start the context that it has stopped")]
    NotStarted,
    /// There is no record of context switches.
    #[error("the driver's record of context switches cannot be read")]
    Record,
    /// A call that waits for channels is under way.
    #[error("the driver frees or creates channels: try again")]
    Busy,
    /// The call failed.
    #[error("the driver's control file does not take the call")]
    Call(#[source] io::Error),
    /// The driver refused.
    #[error("the driver refuses with status {0:#x}")]
    Refused(u32),
    /// The thread that starts what nobody renews.
    #[error("cannot start a thread")]
    Thread(#[source] io::Error),
}

impl Error {
    /// Whether other contexts may have none of it.
    fn is_of_one_context(&self) -> bool {
        matches!(
            self,
            Self::Refused(_) | Self::NotStarted | Self::NoChannels | Self::Stopped
        )
    }
}

/// Makes the system call `ioctl` of this process.
pub trait Kernel: Send + Sync {
    /// As the system call: -1 and `errno`, or a result.
    ///
    /// # Safety
    /// `argument` is what the file's driver expects for `request`.
    unsafe fn ioctl(&self, file: c_int, request: c_ulong, argument: *mut c_void) -> c_int;
}

/// The machine's kernel.
#[derive(Debug)]
pub struct Machine;

impl Kernel for Machine {
    unsafe fn ioctl(&self, file: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
        // SAFETY: the caller's promise.
        unsafe { libc::syscall(libc::SYS_ioctl, file, request, argument) as c_int }
    }
}

static GATE: Gate<Machine> = Gate::new(Machine);

/// Makes the system call, and notes what it has made or freed. For the definition of `ioctl` in an executable.
///
/// # Safety
/// As for the C function.
pub unsafe fn ioctl(file: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { GATE.pass_on(file, request, argument) }
}

/// The time slices of this process.
///
/// # Errors
/// The driver is of no branch that is known to have them.
pub fn of_this_process() -> Result<&'static Gate<Machine>, Error> {
    let text = fs::read_to_string("/proc/driver/nvidia/version").map_err(Error::Version)?;
    listed(&text)?;
    Ok(&GATE)
}

/// Whether a GPU of this machine is divided into instances (MIG): some have engines of their own, which the record of
/// context switches does not tell apart.
pub fn has_instances() -> bool {
    let below = |folder: &Path| fs::read_dir(folder).into_iter().flatten().flatten();
    let gpus = below(Path::new("/proc/driver/nvidia/capabilities"));
    gpus.flat_map(|gpu| below(&gpu.path().join("mig")).collect::<Vec<_>>())
        .any(|entry| entry.file_name().as_encoded_bytes().starts_with(b"gi"))
}

/// Whether the driver with this text about its version is of a listed branch.
fn listed(text: &str) -> Result<(), Error> {
    let versions = text.split_ascii_whitespace().filter_map(|word| {
        let (branch, rest) = word.split_once('.')?;
        let digits = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
        (digits(branch) && rest.split('.').all(digits)).then_some(branch)
    });
    match versions.clone().next() {
        Some(branch) if BRANCHES.contains(&branch) => Ok(()),
        branch => Err(Error::Branch(branch.unwrap_or("(none)").to_owned())),
    }
}

/// What is known about this process's calls, and what is stopped.
#[derive(Debug)]
pub struct Gate<K> {
    kernel: K,
    /// Whether the calls are those of programs that are not trusted.
    guarded: bool,
    state: Mutex<State>,
    /// Something was stopped or started.
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    notes: Notes,
    stopped: BTreeMap<Context, Stop>,
    /// The slices that were set.
    slices: BTreeMap<Context, Slice>,
    /// Counts stops.
    serial: u64,
    /// Number of calls under way that may wait for channels.
    waiting: u32,
    /// Whether there is a thread that starts what nobody renews.
    watched: bool,
    /// The numbers of all channels that were made, if they are wanted and known.
    numbers: Numbers,
    /// Lines about starts that fail.
    failing: Seldom,
}

/// Numbers of channels.
#[derive(Debug)]
enum Numbers {
    Unwanted,
    Known {
        /// By client and handle.
        existing: BTreeMap<(u32, u32), u32>,
        /// Those of channels that have ended, and how often the record was read since.
        ended: BTreeMap<u32, u32>,
    },
    /// The driver has not told one.
    Unknown,
}

impl State {
    /// Forgets what was known of channels and contexts that have ended.
    fn forget(&mut self) {
        let contexts: BTreeSet<Context> = self.notes.contexts().into_iter().collect();
        self.slices.retain(|context, _| contexts.contains(context));
        let Numbers::Known { existing, ended } = &mut self.numbers else {
            return;
        };
        let channels = self.notes.all_channels().into_iter();
        let here: BTreeSet<_> = channels
            .map(|(_, client, channel)| (client, channel))
            .collect();
        if ended.len() > MOST_NUMBERS {
            ended.clear();
        }
        existing.retain(|channel, number| {
            let is_here = here.contains(channel);
            if !is_here {
                ended.insert(*number, 0);
            }
            is_here
        });
    }
}

/// A stopped context.
#[derive(Debug)]
struct Stop {
    serial: u64,
    until: Moment,
    channels: Channels,
}

/// A context that is stopped. It is started when this is dropped.
#[derive(Debug)]
pub struct Stopped<K: Kernel + 'static> {
    gate: &'static Gate<K>,
    context: Context,
    serial: u64,
}

impl<K: Kernel> Stopped<K> {
    /// The context stays stopped for [`UNRENEWED`] from now on. Returns whether it still is: it was started if it was
    /// not renewed in time, or for a call that waits for channels.
    pub fn renew(&self) -> bool {
        let mut state = self.gate.state.lock_unpoisoned();
        match state.stopped.get_mut(&self.context) {
            Some(stop) if stop.serial == self.serial => {
                stop.until = Moment::now() + UNRENEWED;
                true
            }
            _ => false,
        }
    }
}

impl<K: Kernel> Drop for Stopped<K> {
    fn drop(&mut self) {
        let mut state = self.gate.state.lock_unpoisoned();
        let is_own = |stop: &Stop| stop.serial == self.serial;
        if state.stopped.get(&self.context).is_some_and(is_own) {
            self.gate.start(&mut state, self.context);
        }
    }
}

impl<K: Kernel> Gate<K> {
    /// A gate before this kernel.
    pub const fn new(kernel: K) -> Self {
        Self::with(kernel, false)
    }

    /// A gate before this kernel for programs that are not trusted. Each object that a client with channels frees may lie below
    /// one that is stopped, whatever the call says.
    pub const fn guarded(kernel: K) -> Self {
        Self::with(kernel, true)
    }

    const fn with(kernel: K, guarded: bool) -> Self {
        Self {
            kernel,
            guarded,
            state: Mutex::new(State {
                notes: Notes::new(guarded),
                stopped: BTreeMap::new(),
                slices: BTreeMap::new(),
                serial: 0,
                waiting: 0,
                watched: false,
                numbers: Numbers::Unwanted,
                failing: Seldom::new(),
            }),
            changed: Condvar::new(),
        }
    }

    /// The kernel.
    pub fn kernel(&self) -> &K {
        &self.kernel
    }

    /// Makes the system call, and notes what it has made or freed.
    ///
    /// # Safety
    /// As for the C function `ioctl`.
    pub unsafe fn pass_on(&self, file: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
        // SAFETY: the caller's promise.
        let pass = || unsafe { self.kernel.ioctl(file, request, argument) };
        // SAFETY: the caller's promise: a call of this number has this block.
        let Some(before) = (unsafe { Request::read(request, argument) }) else {
            return pass();
        };
        let waits = {
            let mut state = self.state.lock_unpoisoned();
            let waits = state.notes.waits(&before);
            if waits {
                state = self.hold_back(state);
                state.waiting += 1;
                self.start_all(&mut state);
                let own =
                    |context: &Context| before.client().is_none_or(|one| one == context.client);
                if state.stopped.keys().any(own) {
                    // The call would wait in the driver, with the lock that a start needs.
                    state.waiting -= 1;
                    // SAFETY: the place of this thread's error number.
                    unsafe { *libc::__errno_location() = libc::EIO };
                    return -1;
                }
            }
            waits
        };
        let result = pass();
        let error = io::Error::last_os_error().raw_os_error();
        let mut state = self.state.lock_unpoisoned();
        if waits {
            state.waiting -= 1;
        }
        if result == 0 {
            // SAFETY: as above. The driver has filled in what it answers.
            if let Some(after) = unsafe { Request::read(request, argument) } {
                state.notes.note(file, &after);
                self.follow(&mut state, file, &after, waits);
            }
        }
        drop(state);
        // The lock may have made calls.
        // SAFETY: the place of this thread's error number.
        unsafe { *libc::__errno_location() = error.unwrap_or(0) };
        result
    }

    /// Closes a file, with which its clients end: what is stopped is started first, and nothing is stopped until the file is
    /// closed.
    pub fn close(&self, file: c_int, close: impl FnOnce()) {
        let mut state = self.hold_back(self.state.lock_unpoisoned());
        state.waiting += 1;
        self.start_all(&mut state);
        // Another file may have its number as soon as it is closed.
        state.notes.close(file);
        state.stopped.retain(|_, stop| stop.channels.file != file);
        state.forget();
        drop(state);
        close();
        self.state.lock_unpoisoned().waiting -= 1;
    }

    /// A call of programs that are not trusted ends no stop: it waits until that is over.
    fn hold_back<'a>(&self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        let until = Moment::now() + HELD_BACK;
        while self.guarded && !state.stopped.is_empty() {
            let left = until.since(Moment::now());
            if left.is_zero() {
                break;
            }
            state = self.wait(state, Some(left));
        }
        state
    }

    fn start_all(&self, state: &mut State) {
        let stopped: Vec<Context> = state.stopped.keys().copied().collect();
        for context in stopped {
            self.start(state, context);
        }
    }

    /// What follows from a call that was noted; `waits` tells whether it may have ended channels.
    fn follow(&self, state: &mut State, file: c_int, request: &Request, waits: bool) {
        match *request {
            Request::Allocate {
                client,
                object,
                kind: Some(kind),
                status: 0,
                ..
            } => {
                if matches!(kind, Kind::Channel { .. }) {
                    self.number(state, file, client, object);
                }
                // Another group of a context whose slice is set.
                let context = state.notes.context_of(client, object);
                if let Some(slice) = context.and_then(|context| state.slices.get(&context)) {
                    // If it is refused, the next change sets it.
                    let _ = self.control(file, &mut Control::slice(client, object, slice.0));
                }
            }
            Request::Free { status: 0, .. } if waits => state.forget(),
            _ => {}
        }
    }

    /// A program wishes to set the slice of a group. That of a group that runs kernels is set to what it is, or to the
    /// driver's own; returns the driver's status. `None`: the group runs no kernels, or does not exist.
    ///
    /// # Errors
    /// The call fails.
    pub fn keep_slice(&self, client: u32, group: u32) -> Option<Result<u32, Error>> {
        let state = self.state.lock_unpoisoned();
        let context = state.notes.context_of(client, group)?;
        let file = state.notes.file(client)?;
        let micros = match state.slices.get(&context) {
            Some(slice) => slice.0,
            None => DRIVERS_SLICE.as_micros() as u32,
        };
        let kept = self.control(file, &mut Control::slice(client, group, micros));
        Some(match kept {
            Err(Error::Refused(status)) => Ok(status),
            kept => kept.map(|()| 0),
        })
    }

    /// Whether an object is a channel group that is noted.
    pub fn is_group(&self, client: u32, object: u32) -> bool {
        self.state.lock_unpoisoned().notes.is_group(client, object)
    }

    /// Whether a program may make another object of this class: there is a bound for those that are noted, so that looks at
    /// contexts are short.
    pub fn has_room(&self, client: u32, class: u32) -> bool {
        let has_room = |kind| self.state.lock_unpoisoned().notes.has_room(client, kind);
        Kind::of(class, |_| 0).is_none_or(has_room)
    }

    /// The part of the GPU that controls a channel which runs kernels, and the channel's group.
    pub fn controlled_by(&self, client: u32, channel: u32) -> Option<(u32, u32)> {
        let state = self.state.lock_unpoisoned();
        state.notes.controlled_by(client, channel)
    }

    /// Whether contexts cannot be stopped any more without this object.
    pub fn is_needed(&self, client: u32, object: u32) -> bool {
        self.state.lock_unpoisoned().notes.is_needed(client, object)
    }

    /// The slice of a context, if it was set.
    pub fn slice(&self, context: Context) -> Option<Slice> {
        self.state.lock_unpoisoned().slices.get(&context).copied()
    }

    /// Whether a context is stopped.
    pub fn is_stopped(&self, context: Context) -> bool {
        self.state.lock_unpoisoned().stopped.contains_key(&context)
    }

    /// The contexts that have compute channels.
    pub fn contexts(&self) -> Vec<Context> {
        self.state.lock_unpoisoned().notes.contexts()
    }

    /// The number of the context's GPU, as the kernel's driver counts.
    pub fn gpu(&self, context: Context) -> Option<u32> {
        self.state.lock_unpoisoned().notes.gpu(context)
    }

    /// Numbers of channels are wanted from now on: [`Self::numbers`].
    pub fn number_channels(&self) {
        let mut state = self.state.lock_unpoisoned();
        if matches!(state.numbers, Numbers::Unwanted) {
            state.numbers = Numbers::Known {
                existing: BTreeMap::new(),
                ended: BTreeMap::new(),
            };
            for (file, client, channel) in state.notes.all_channels() {
                self.number(&mut state, file, client, channel);
            }
        }
    }

    /// The numbers of this process's channels, if they are known: no other channel of the machine has one of them. Those of
    /// channels that have ended are among them until the record was read [`READ`] times ([`Self::was_read`]); then another
    /// process's channel may have them.
    pub fn numbers(&self) -> Option<BTreeSet<u32>> {
        match &self.state.lock_unpoisoned().numbers {
            Numbers::Known { existing, ended } => {
                Some(existing.values().chain(ended.keys()).copied().collect())
            }
            Numbers::Unwanted | Numbers::Unknown => None,
        }
    }

    /// The record of context switches was read.
    pub fn was_read(&self) {
        if let Numbers::Known { ended, .. } = &mut self.state.lock_unpoisoned().numbers {
            ended.retain(|_, reads| {
                *reads += 1;
                *reads < READ
            });
        }
    }

    fn number(&self, state: &mut State, file: c_int, client: u32, channel: u32) {
        let Numbers::Known { existing, .. } = &mut state.numbers else {
            return;
        };
        match self.ask_number(file, client, channel) {
            Ok(Some(number)) => drop(existing.insert((client, channel), number)),
            // What has ended does not use the GPU.
            Ok(None) => {}
            Err(error) => {
                base::note!(
                    "a channel's number is not known, so use is not known by the GPU's record: {}",
                    Chain(&error)
                );
                state.numbers = Numbers::Unknown;
            }
        }
    }

    /// The number of a channel; `None` if it has ended.
    fn ask_number(&self, file: c_int, client: u32, channel: u32) -> Result<Option<u32>, Error> {
        let mut ask = Control::ask_number(client, channel);
        match self.control(file, &mut ask) {
            Ok(()) => Ok(Some(ask.number())),
            Err(Error::Refused(status)) if GONE.contains(&status) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Sets the slice of the context's compute groups.
    ///
    /// # Errors
    /// The context has no compute channels, or the driver refuses.
    pub fn set(&self, context: Context, slice: Slice) -> Result<(), Error> {
        let mut state = self.state.lock_unpoisoned();
        let groups = state.notes.groups(context);
        if groups.is_empty() {
            return Err(Error::NoChannels);
        }
        for (file, group) in groups {
            self.control(file, &mut Control::slice(context.client, group, slice.0))?;
        }
        state.slices.insert(context, slice);
        Ok(())
    }

    /// Takes the context's kernels off the GPU, until what is returned is dropped.
    ///
    /// # Errors
    /// The context has no compute channels, or is stopped; a call that waits for channels is under way; or the driver
    /// refuses.
    pub fn stop(&'static self, context: Context) -> Result<Stopped<K>, Error> {
        self.switch_off(context, Switching::Off)
    }

    /// Has the context get no further slice, until what is returned is dropped. The driver takes less time for that than for
    /// [`Self::stop`]. A running kernel stays on the GPU until its slice is over, and as long as nobody else has work.
    ///
    /// # Errors
    /// As of [`Self::stop`].
    pub fn unschedule(&'static self, context: Context) -> Result<Stopped<K>, Error> {
        self.switch_off(context, Switching::Unscheduled)
    }

    fn switch_off(&'static self, context: Context, to: Switching) -> Result<Stopped<K>, Error> {
        let mut state = self.state.lock_unpoisoned();
        self.watch(&mut state)?;
        if state.waiting > 0 {
            return Err(Error::Busy);
        }
        if state.stopped.contains_key(&context) {
            return Err(Error::Stopped);
        }
        let mut channels = state.notes.channels(context).ok_or(Error::NoChannels)?;
        let done = match self.switch(&channels, to) {
            // The others are stopped, which a program cannot prevent by one that has ended.
            Err(Error::Refused(_)) => self.switch_each(&mut state, &mut channels, to),
            done => done,
        };
        if channels.channels.is_empty() {
            return Err(Error::NoChannels);
        }
        state.serial += 1;
        let serial = state.serial;
        let stop = Stop {
            serial,
            until: Moment::now() + UNRENEWED,
            channels,
        };
        state.stopped.insert(context, stop);
        self.changed.notify_all();
        if let Err(error) = done {
            // A part may be stopped.
            self.start(&mut state, context);
            return Err(error);
        }
        Ok(Stopped {
            gate: self,
            context,
            serial,
        })
    }

    /// Starts a stopped context. If the driver refuses, it is tried again later.
    fn start(&self, state: &mut State, context: Context) {
        let Some(mut stop) = state.stopped.remove(&context) else {
            return;
        };
        let started = match self.switch(&stop.channels, Switching::On) {
            // The driver does not say which of them are gone.
            Err(Error::Refused(_)) => self.switch_each(state, &mut stop.channels, Switching::On),
            started => started,
        };
        match started {
            Ok(()) => self.changed.notify_all(),
            Err(error) => {
                stop.until = Moment::now() + UNRENEWED;
                state.stopped.insert(context, stop);
                if let Some(unsaid) = state.failing.due() {
                    base::note!("cannot start a stopped context, trying again: {error}{unsaid}");
                }
            }
        }
    }

    /// Stops or starts each channel that there still is. Those that have ended are forgotten, and removed from `channels`.
    fn switch_each(
        &self,
        state: &mut State,
        channels: &mut Channels,
        to: Switching,
    ) -> Result<(), Error> {
        let (mut done, mut here) = (Ok(()), Vec::new());
        let all = std::mem::take(&mut channels.channels);
        let count = all.len();
        // The parts of what was refused, the first one last.
        let halves = |all: &[u32]| {
            let (first, second) = all.split_at(all.len() / 2);
            [second.to_vec(), first.to_vec()]
        };
        let mut parts = Vec::from(halves(&all));
        while let Some(part) = parts.pop() {
            let some = Channels {
                channels: part.clone(),
                ..channels.clone()
            };
            match (self.switch(&some, to), &part[..]) {
                (Err(Error::Refused(_)), [_, _, ..]) => {
                    parts.extend(halves(&part));
                    continue;
                }
                // The driver may miss something else that the call names.
                (Err(Error::Refused(status)), &[channel]) if GONE.contains(&status) => {
                    match self.ask_number(channels.file, channels.client, channel) {
                        Ok(None) => {
                            state.notes.forget(channels.client, channel);
                            continue;
                        }
                        // It cannot be stopped, and does not stay stopped.
                        _ if to != Switching::On => done = done.and(Err(Error::Refused(status))),
                        _ => {}
                    }
                }
                (switched, _) => done = done.and(switched),
            }
            here.extend(part);
        }
        if here.len() < count {
            state.forget();
        }
        channels.channels = here;
        done
    }

    /// Stops or starts channels.
    fn switch(&self, channels: &Channels, to: Switching) -> Result<(), Error> {
        let mut done = Ok(());
        for mut control in channels.controls(to) {
            let one = self.control(channels.file, &mut control);
            // All parts are started, whatever becomes of one.
            done = done.and(one);
        }
        done
    }

    fn control(&self, file: c_int, control: &mut Control) -> Result<(), Error> {
        // The library keeps the file open for as long as its client exists, and what is noted about a client is gone
        // when it is freed. If the number names another file nevertheless, that file knows no such call or client.
        let block = control.block();
        // SAFETY: the block is a control call whose parameters lie in `control`, which outlives the call.
        let result = unsafe { self.kernel.ioctl(file, Control::REQUEST, block) };
        if result != 0 {
            return Err(Error::Call(io::Error::last_os_error()));
        }
        match control.status() {
            0 => Ok(()),
            status => Err(Error::Refused(status)),
        }
    }

    /// Starts the thread that starts what nobody renews, if it has not been started.
    fn watch(&'static self, state: &mut State) -> Result<(), Error> {
        if !state.watched {
            let thread = thread::Builder::new().name("timeslice".to_owned());
            let started = thread.spawn(|| self.start_unrenewed());
            started.map_err(Error::Thread)?;
            state.watched = true;
        }
        Ok(())
    }

    fn start_unrenewed(&self) {
        let mut state = self.state.lock_unpoisoned();
        loop {
            let now = Moment::now();
            let expired = state.stopped.iter().filter(|(_, stop)| stop.until <= now);
            let expired: Vec<Context> = expired.map(|(context, _)| *context).collect();
            for context in expired {
                self.start(&mut state, context);
            }
            let next = state.stopped.values().map(|stop| stop.until).min();
            state = self.wait(state, next.map(|until| until.since(Moment::now())));
        }
    }

    /// Waits until something is stopped or started, or for this time.
    fn wait<'a>(
        &self,
        state: MutexGuard<'a, State>,
        time: Option<Duration>,
    ) -> MutexGuard<'a, State> {
        match time {
            Some(time) => {
                let waited = self.changed.wait_timeout(state, time);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
            None => self
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner),
        }
    }
}
