//! Loads RAM while the guest is already running (`memory_restore_mode=OnDemand`).
//!
//! RAM is registered with userfaultfd: when the guest or a device accesses a missing page, it waits
//! until the `_pagefault` thread has copied the page from the snapshot. When there are no faults,
//! the thread copies the rest in the background. It ends when everything has been copied; from then
//! on the snapshot may be deleted.
//!
//! Zero pages (holes in the file) are never copied: the kernel provides them on first access. The
//! same applies to memory that the guest gives back meanwhile (balloon, unplugged memory): the
//! kernel reports it before it discards the memory, and the snapshot's data for it is dropped.
//!
//! Huge pages are copied whole: userfaultfd fills in a page of the mapping's size or nothing.
//!
//! A page that cannot be loaded (the file was truncated, its storage fails, the host is out of huge
//! pages) is never replaced by zeroes. Whoever waits for it goes on waiting, the control loop is
//! told, and the process ends.

use std::{
    collections::VecDeque,
    fs::File,
    io,
    ops::Range,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    path::Path,
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use base::{
    Access, Cancel, Mapping,
    regular_file::{self, Links},
};
use devices::thread::{ThreadRole, ThreadSpawner};
use vmm_memory::{Ram, data};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::memory_file::{self, MemoryFileError, MemoryRange};

/// The device of userfaultfd.
pub const USERFAULTFD: &str = "/dev/userfaultfd";

/// Number of bytes copied per fault, aligned, unless the pages are larger. A power of two.
const FAULT_CHUNK: u64 = 64 << 10;

/// Number of bytes copied in the background between two checks for faults, unless the pages are
/// larger.
const AHEAD_CHUNK: u64 = 64 << 10;

/// Milliseconds without a fault after which background copying starts: while the guest faults in
/// its working set, it has the processor and the disk to itself.
const QUIET: libc::c_int = 2;

/// Lazy restore could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum LazyError {
    /// userfaultfd is not available.
    #[error(
        "cannot use userfaultfd: give Gantry CAP_SYS_PTRACE, or set vm.unprivileged_userfaultfd=1, \
         or restore with memory_restore_mode=Copy"
    )]
    Userfaultfd(#[source] io::Error),
    /// A region cannot be loaded lazily.
    #[error(
        "RAM at {guest:#x} cannot be restored on demand (a file on a disk cannot): \
         use memory_restore_mode=Copy"
    )]
    Register {
        /// Guest-physical address.
        guest: u64,
        /// The cause.
        source: io::Error,
    },
    /// Memory that is populated at the start would never be loaded.
    #[error(
        "memory with prefault=on cannot be restored on demand: \
         use memory_restore_mode=Copy, or switch prefault off"
    )]
    Prefault,
    /// The guest's memory is a private view of a file that may have contents.
    #[error(
        "RAM at {guest:#x} is backed by a file with shared=off, so it cannot be restored on demand: \
         use memory_restore_mode=Copy"
    )]
    PrivateFile {
        /// Guest-physical address.
        guest: u64,
    },
    /// What a memory file contained before could not be discarded.
    #[error("cannot discard the earlier contents of the file behind the RAM at {guest:#x}")]
    Discard {
        /// Guest-physical address.
        guest: u64,
        /// The cause.
        source: io::Error,
    },
    /// The snapshot's memory is not usable.
    #[error("cannot use the snapshot's memory")]
    File(#[from] MemoryFileError),
    /// The thread could not be started.
    #[error("cannot start the thread that brings memory in")]
    Thread(#[source] io::Error),
}

/// Guest memory could not be loaded: the guest is lost.
#[derive(Debug, thiserror::Error)]
pub enum MemoryLost {
    /// Data could not be copied from the file.
    #[error(
        "{len} bytes of the guest's memory cannot be copied from offset {offset} of the snapshot's \
         memory"
    )]
    Copy {
        /// Length in bytes.
        len: u64,
        /// Offset in the file, in bytes.
        offset: u64,
        /// The cause.
        source: io::Error,
    },
    /// Memory without data could not be filled in.
    #[error("{len} bytes of zeroes cannot be given to the guest")]
    Zero {
        /// Length in bytes.
        len: u64,
        /// The cause.
        source: io::Error,
    },
    /// The file was shortened during the restore.
    #[error("the snapshot's memory was truncated to {found} of {expected} bytes")]
    Truncated {
        /// Its length in bytes.
        found: u64,
        /// The length it had, in bytes.
        expected: u64,
    },
    /// The file does not answer.
    #[error("the snapshot's memory cannot be examined")]
    Examine(#[source] io::Error),
    /// Faults of the guest can no longer be received.
    #[error("cannot wait for page faults")]
    Wait(#[source] io::Error),
}

/// What happens when guest memory is lost.
pub struct OnLoss {
    /// Tells the control loop, which ends the VM.
    pub report: Box<dyn Fn(MemoryLost) + Send>,
    /// How long the control loop may take.
    pub patience: Duration,
    /// Ends the process if the control loop has not done so by then.
    pub end: fn(),
    /// Cancelled when nothing that uses the memory runs any more, but for what is about to end: then nobody is told, and who
    /// waits for lost memory gets zeroes.
    pub unwanted: Cancel,
}

/// The transfer in progress. Dropping it ends the thread, at the speed of the snapshot's storage, and
/// memory that has not been loaded is lost: drop it after everything that uses the memory.
pub struct LazyRestore {
    stop: EventFd,
    thread: Option<JoinHandle<()>>,
    /// Closed when the thread ends.
    uffd: Weak<Userfaultfd>,
    pulse: Arc<Pulse>,
    unwanted: Cancel,
}

/// What somebody who waits has asked [`LazyRestore::brings`]. An answer to another question says nothing about now.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Question(Option<u64>);

/// What the thread says of itself.
#[derive(Default)]
struct Pulse {
    /// How often it was asked whether its storage answers.
    asked: AtomicU64,
    /// Up to which time it has said so.
    answered: AtomicU64,
    /// Number of faults that it has read and not served.
    waiting: AtomicUsize,
}

impl Pulse {
    /// Asks whether the storage answers; returns the question's number.
    fn ask(&self) -> u64 {
        self.asked.fetch_add(1, Ordering::SeqCst) + 1
    }
}

impl LazyRestore {
    /// Registers `ram` and starts the transfer from the file at `path`.
    pub fn start(
        path: &Path,
        ram: &Ram,
        ranges: &[MemoryRange],
        spawner: &dyn ThreadSpawner,
        on_loss: OnLoss,
    ) -> Result<Self, LazyError> {
        let io_error = |action, source| {
            LazyError::File(MemoryFileError::Io {
                action,
                path: path.to_owned(),
                source,
            })
        };
        let file = regular_file::open(path, Links::Refuse);
        let file = file.map_err(|source| io_error("open", source))?;
        let pairs = memory_file::matching(&file, path, ram.regions(), ranges)?;
        let uffd = Arc::new(Userfaultfd::open().map_err(LazyError::Userfaultfd)?);
        // What was checked, not what the file has by now.
        let end = pairs.iter().map(|(_, range)| range.bytes().end).max();
        let source = view(&file, end.unwrap_or(0)).map_err(|source| io_error("map", source))?;
        let largest = pairs.iter().map(|(region, _)| region.mapping.page_size());
        let zeroes = zeroes(largest.max().unwrap_or(0)).map_err(LazyError::Thread)?;
        let mut areas = Vec::new();
        // Nothing is discarded before all of the memory is known to be usable.
        for (region, range) in &pairs {
            let guest = range.guest;
            let claimed = region.mapping.claim();
            claimed.map_err(|source| LazyError::Discard { guest, source })?;
            if region.mapping.is_named() && !region.mapping.is_shared() {
                return Err(LazyError::PrivateFile { guest });
            }
        }
        for (region, range) in &pairs {
            let start = region.mapping.address() as u64;
            uffd.register(start, range.len)
                .map_err(|source| LazyError::Register {
                    guest: range.guest,
                    source,
                })?;
            areas.push(Area {
                start,
                len: range.len,
                page: region.mapping.page_size(),
                offset: range.offset,
                // Finding the holes takes longer than everything else, so the guest starts first.
                extents: std::iter::once(0..range.len).collect(),
                examined: false,
            });
        }
        for (region, range) in &pairs {
            // Pages that are there already are never loaded.
            let discarded = region.mapping.discard_contents();
            let discarded = discarded.and_then(|_| region.mapping.release_claim());
            discarded.map_err(|source| LazyError::Discard {
                guest: range.guest,
                source,
            })?;
        }
        let stop = EventFd::new(EFD_NONBLOCK).map_err(LazyError::Thread)?;
        let (pulse, weak) = (Arc::<Pulse>::default(), Arc::downgrade(&uffd));
        let unwanted = on_loss.unwanted.clone();
        let transfer = Transfer {
            uffd,
            file,
            source,
            zeroes,
            areas,
            stop: stop.try_clone().map_err(LazyError::Thread)?,
            pulse: Arc::clone(&pulse),
            waiting: VecDeque::new(),
            ahead: (0, 0),
        };
        let thread = spawner
            .spawn(
                ThreadRole::PageFault,
                "_pagefault",
                Box::new(move || transfer.run(&on_loss)),
            )
            .map_err(LazyError::Thread)?;
        Ok(Self {
            stop,
            thread: Some(thread),
            uffd: weak,
            pulse,
            unwanted,
        })
    }
}

impl LazyRestore {
    /// Whether all memory has been loaded.
    pub fn is_finished(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Whether the snapshot's storage answers, for which this waits a second at most.
    pub fn answers(&self) -> bool {
        /// Storage that works has answered by then.
        const PATIENCE: Duration = Duration::from_secs(1);
        const LOOK: Duration = Duration::from_millis(1);
        let number = self.pulse.ask();
        let until = Instant::now() + PATIENCE;
        loop {
            if self.is_finished() || self.pulse.answered.load(Ordering::SeqCst) >= number {
                return true;
            }
            if Instant::now() >= until {
                return false;
            }
            thread::sleep(LOOK);
        }
    }

    /// Whether nobody waits for memory, or the snapshot's storage has answered since `question` was asked first.
    pub fn brings(&self, question: &mut Question) -> bool {
        let has_answered = match question.0 {
            Some(number) => self.pulse.answered.load(Ordering::SeqCst) >= number,
            None => {
                question.0 = Some(self.pulse.ask());
                false
            }
        };
        has_answered || !self.is_waited_for()
    }

    /// Nothing that uses the memory runs any more, but for what is about to end.
    pub fn give_up(&self) {
        self.unwanted.cancel();
    }

    /// Whether a thread waits for memory that has not been loaded.
    fn is_waited_for(&self) -> bool {
        let Some(uffd) = self.uffd.upgrade() else {
            return false;
        };
        let mut unread = [libc::pollfd {
            fd: uffd.0.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        }];
        let polled = base::poll::poll(&mut unread, Some(Duration::ZERO));
        polled.is_ok_and(|count| count > 0) || self.pulse.waiting.load(Ordering::SeqCst) > 0
    }
}

impl Drop for LazyRestore {
    fn drop(&mut self) {
        let stopped = self.stop.write(1);
        if let Some(thread) = self.thread.take()
            && stopped.is_ok()
            && thread.join().is_err()
        {
            log::error!("the thread that brings memory in panicked");
        }
    }
}

/// A region of RAM that is being loaded.
struct Area {
    /// Host virtual address.
    start: u64,
    len: u64,
    /// Size of its pages in bytes; `start` and `len` are multiples of it.
    page: u64,
    /// Offset in the file.
    offset: u64,
    /// Ranges of data within the region, ascending, in whole pages. They may contain holes unless
    /// the area is `examined`.
    extents: Vec<Range<u64>>,
    examined: bool,
}

impl Area {
    /// Drops the data in `gone` (offsets within the region), because the guest has given the memory
    /// back. Only whole pages are discarded.
    fn forget(&mut self, gone: &Range<u64>) {
        let gone = gone.start.next_multiple_of(self.page)..gone.end / self.page * self.page;
        if gone.is_empty() {
            return;
        }
        let extents = std::mem::take(&mut self.extents);
        for extent in extents {
            let before = extent.start..extent.end.min(gone.start);
            let after = extent.start.max(gone.end)..extent.end;
            self.extents
                .extend([before, after].into_iter().filter(|part| !part.is_empty()));
        }
    }

    /// Excludes the holes in the file.
    fn examine(&mut self, file: &File) -> io::Result<()> {
        self.examined = true;
        let mut data: Vec<Range<u64>> = Vec::new();
        for extent in &self.extents {
            let range = self.offset + extent.start..self.offset + extent.end;
            // Rounds to whole pages; the file has holes in multiples of its block size.
            for part in data::data_extents(file, range)? {
                let low = (part.start - self.offset) / self.page * self.page;
                let high = (part.end - self.offset).next_multiple_of(self.page);
                let part = low.max(extent.start)..high.min(extent.end);
                match data.last_mut() {
                    // Two pieces of data in one huge page.
                    Some(last) if part.start <= last.end => last.end = last.end.max(part.end),
                    _ => data.push(part),
                }
            }
        }
        self.extents = data;
        Ok(())
    }

    /// The end of the data that starts at `at` without a hole, up to `limit`; all are offsets.
    fn data_until(&self, file: &File, at: u64, limit: u64) -> io::Result<u64> {
        if self.examined {
            return Ok(limit);
        }
        // Page by page, because to find the end of the data a file system searches through all of
        // it.
        let mut end = at;
        while end < limit {
            let page = self.offset + end..self.offset + end + self.page;
            if !data::has_data(file, page)? {
                break;
            }
            end += self.page;
        }
        Ok(end.min(limit))
    }

    /// The first range of data at or after an offset.
    fn data_from(&self, offset: u64) -> Option<Range<u64>> {
        let index = self.extents.partition_point(|extent| extent.end <= offset);
        let extent = self.extents.get(index)?;
        Some(extent.start.max(offset)..extent.end)
    }
}

struct Transfer {
    uffd: Arc<Userfaultfd>,
    file: File,
    /// The file up to the end of the last area, as checked.
    source: Mapping,
    /// Zeroes for the largest page.
    zeroes: Mapping,
    areas: Vec<Area>,
    stop: EventFd,
    pulse: Arc<Pulse>,
    /// Addresses of faults that have not been served yet.
    waiting: VecDeque<u64>,
    /// Where background copying continues: index of an area, and an offset in it.
    ahead: (usize, u64),
}

impl Transfer {
    fn run(mut self, on_loss: &OnLoss) {
        match self.transfer() {
            Ok(Ended::Stopped) => {}
            Ok(Ended::Complete) => {
                for area in &self.areas {
                    if let Err(error) = self.uffd.unregister(area.start, area.len) {
                        log::error!("memory stays registered with userfaultfd: {error}");
                    }
                }
                log::info!("all of the snapshot's memory has been brought in");
            }
            Err(_) if self.has_to_stop() || on_loss.unwanted.is_cancelled() => {}
            Err(lost) => self.end(lost, on_loss),
        }
    }

    /// Whether the VM has ended.
    fn has_to_stop(&self) -> bool {
        let mut stop = [libc::pollfd {
            fd: self.stop.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        }];
        base::poll::poll(&mut stop, Some(Duration::ZERO)).is_ok_and(|count| count > 0)
    }

    /// Loads memory until all of it is there.
    fn transfer(&mut self) -> Result<Ended, MemoryLost> {
        let mut quiet = QUIET;
        loop {
            let Pulse {
                asked,
                answered,
                waiting,
            } = &*self.pulse;
            answered.store(asked.load(Ordering::SeqCst), Ordering::SeqCst);
            waiting.store(self.waiting.len(), Ordering::SeqCst);
            let timeout = if self.waiting.is_empty() { quiet } else { 0 };
            match self.look(timeout).map_err(MemoryLost::Wait)? {
                Wake::Stop => return Ok(Ended::Stopped),
                Wake::Event(Event::Fault(address)) => {
                    self.waiting.push_back(address);
                    waiting.store(self.waiting.len(), Ordering::SeqCst);
                    quiet = QUIET;
                }
                Wake::Event(Event::Removed(range)) => self.forget(&range),
                Wake::Nothing if self.waiting.is_empty() => {
                    if !self.copy_ahead()? {
                        return Ok(Ended::Complete);
                    }
                    quiet = 0;
                }
                Wake::Nothing => {}
            }
            if let Some(address) = self.waiting.pop_front()
                && self.serve(address)? == Copied::NotNow
            {
                self.waiting.push_back(address);
            }
        }
    }

    /// Has the VM ended. Until the process is gone, `self` keeps userfaultfd open: if it were
    /// closed, the kernel would fill in zeroes.
    fn end(&self, lost: MemoryLost, on_loss: &OnLoss) {
        /// Interval for looking at whether the memory is wanted.
        const LOOK: Duration = Duration::from_millis(20);
        (on_loss.report)(lost);
        let deadline = Instant::now() + on_loss.patience;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let mut stop = [libc::pollfd {
                fd: self.stop.as_raw_fd(),
                events: libc::POLLIN,
                revents: 0,
            }];
            let polled = base::poll::poll(&mut stop, Some(left.min(LOOK)));
            if stop[0].revents != 0 || on_loss.unwanted.is_cancelled() {
                return;
            }
            if left.is_zero() || polled.is_err() {
                return (on_loss.end)();
            }
        }
    }

    /// Waits for an event for up to `timeout` milliseconds.
    fn look(&self, timeout: libc::c_int) -> io::Result<Wake> {
        let mut fds = [
            libc::pollfd {
                fd: self.uffd.0.as_raw_fd(),
                events: libc::POLLIN,
                revents: 0,
            },
            libc::pollfd {
                fd: self.stop.as_raw_fd(),
                events: libc::POLLIN,
                revents: 0,
            },
        ];
        // SAFETY: the array outlives the call.
        if unsafe { libc::poll(fds.as_mut_ptr(), 2, timeout) } < 0 {
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
        if fds[1].revents != 0 {
            return Ok(Wake::Stop);
        }
        if fds[0].revents != 0 {
            // Before it is read, so that somebody who waits is seen at any time.
            let waiting = self.waiting.len() + 1;
            self.pulse.waiting.store(waiting, Ordering::SeqCst);
            if let Some(event) = self.uffd.event()? {
                return Ok(Wake::Event(event));
            }
        }
        Ok(Wake::Nothing)
    }

    /// Records memory that is given back, before the kernel discards it: the thread that gives it
    /// back waits until this event has been read.
    fn forget(&mut self, range: &Range<u64>) {
        for area in &mut self.areas {
            let low = range.start.max(area.start);
            let high = range.end.min(area.start + area.len);
            if low < high {
                area.forget(&(low - area.start..high - area.start));
            }
        }
    }

    /// Loads the memory around a faulting address.
    fn serve(&self, address: u64) -> Result<Copied, MemoryLost> {
        let Some(area) = self
            .areas
            .iter()
            .find(|area| (area.start..area.start + area.len).contains(&address))
        else {
            return Ok(Copied::Done);
        };
        let page = area.page;
        let at = (address - area.start) / page * page;
        let data = area.data_from(at).filter(|data| data.start == at);
        let end = match data {
            None => at,
            Some(data) => {
                let chunk = FAULT_CHUNK.max(page);
                let limit = ((at / chunk + 1) * chunk).min(data.end);
                // Copying zeroes is as correct as leaving a hole.
                let end = area.data_until(&self.file, at, limit).unwrap_or(limit);
                if end == at {
                    self.check_length()?;
                }
                end
            }
        };
        if end > at {
            // The faulting page is copied first.
            let copied = self.copy(area, at..at + page)?;
            if copied == Copied::Done {
                self.copy(area, at + page..end)?;
            }
            return Ok(copied);
        }
        let start = area.start + at;
        let zeroed = if page > 4096 {
            // The kernel has no huge page of zeroes for hugetlbfs. `zeroes` has the length of the
            // largest page.
            self.uffd.copy(start, self.zeroes.start() as u64, page)
        } else {
            self.uffd.zero(start, page).map(|()| page)
        };
        match zeroed.map_err(|error| (error.raw_os_error(), error)) {
            Ok(_) => Ok(Copied::Done),
            Err((Some(libc::EAGAIN), _)) => Ok(Copied::NotNow),
            Err((Some(libc::EEXIST), _)) => {
                self.uffd.wake(start, page);
                Ok(Copied::Done)
            }
            Err((_, source)) => Err(MemoryLost::Zero { len: page, source }),
        }
    }

    /// Copies some data that has not been requested yet; returns false if there is nothing left.
    fn copy_ahead(&mut self) -> Result<bool, MemoryLost> {
        let (index, offset) = self.ahead;
        let Some(area) = self.areas.get_mut(index) else {
            return Ok(false);
        };
        if !area.examined {
            if let Err(error) = area.examine(&self.file) {
                log::warn!("cannot find the holes in the snapshot, copying them: {error}");
            }
            self.check_length()?;
            return Ok(true);
        }
        let area = &self.areas[index];
        match area.data_from(offset) {
            None => self.ahead = (index + 1, 0),
            Some(data) => {
                let end = data.end.min(data.start + AHEAD_CHUNK.max(area.page));
                if self.copy(area, data.start..end)? == Copied::Done {
                    self.ahead = (index, end);
                }
            }
        }
        Ok(true)
    }

    /// Checks that a hole found just now was not the end of a file that has been truncated.
    fn check_length(&self) -> Result<(), MemoryLost> {
        let found = self.file.metadata().map_err(MemoryLost::Examine)?.len();
        let end = self.areas.iter().map(|area| area.offset + area.len).max();
        match end {
            Some(expected) if found < expected => Err(MemoryLost::Truncated { found, expected }),
            _ => Ok(()),
        }
    }

    /// Copies `range` of an area, skipping pages that are already present.
    fn copy(&self, area: &Area, mut range: Range<u64>) -> Result<Copied, MemoryLost> {
        while !range.is_empty() {
            let len = range.end - range.start;
            let offset = area.offset + range.start;
            let failed = |source| MemoryLost::Copy {
                len,
                offset,
                source,
            };
            // What lies behind the file in this process is not the guest's.
            if offset.saturating_add(len) > self.source.len() as u64 {
                return Err(failed(io::ErrorKind::UnexpectedEof.into()));
            }
            let start = area.start + range.start;
            // Cannot overflow: within the mapping.
            match self
                .uffd
                .copy(start, self.source.start() as u64 + offset, len)
            {
                Ok(copied) => range.start += copied,
                Err(error) if error.raw_os_error() == Some(libc::EEXIST) => {
                    // Who waits for a page that came by another way has not been woken.
                    self.uffd.wake(start, area.page);
                    range.start += area.page;
                }
                // Memory is being given back, so its event must be read first.
                Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => {
                    return Ok(Copied::NotNow);
                }
                // The snapshot was truncated meanwhile, or its storage fails.
                Err(error) => return Err(failed(error)),
            }
        }
        Ok(Copied::Done)
    }
}

/// Why the transfer has ended.
enum Ended {
    /// All memory is there.
    Complete,
    /// The machine is dropped.
    Stopped,
}

/// Result of a copy.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Copied {
    /// There is nothing left to do.
    Done,
    /// Must be retried after the next event.
    NotNow,
}

enum Wake {
    Stop,
    Event(Event),
    Nothing,
}

/// What userfaultfd reports.
enum Event {
    /// A thread waits for the page at this address.
    Fault(u64),
    /// Memory is about to be given back.
    Removed(Range<u64>),
}

/// Maps the first `len` bytes of a file read-only. Without any, the mapping has one page, which is
/// never read.
fn view(file: &File, len: u64) -> io::Result<Mapping> {
    let len = usize::try_from(len).map_err(io::Error::other)?;
    Mapping::private(file, 0, len.max(1), Access::Read)
}

/// Zeroes in the length of a page. They take no memory.
fn zeroes(page: u64) -> io::Result<Mapping> {
    let len = usize::try_from(page).map_err(io::Error::other)?;
    Mapping::anonymous(len.max(1), Access::Read)
}

/// `include/uapi/linux/userfaultfd.h`.
mod uapi {
    pub const API: u64 = 0xaa;
    pub const REGISTER_MODE_MISSING: u64 = 1;
    pub const FEATURE_EVENT_REMOVE: u64 = 1 << 3;
    pub const EVENT_PAGEFAULT: u8 = 0x12;
    pub const EVENT_REMOVE: u8 = 0x15;
    pub const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
    pub const UFFDIO_REGISTER: libc::c_ulong = 0xc020_aa00;
    pub const UFFDIO_UNREGISTER: libc::c_ulong = 0x8010_aa01;
    pub const UFFDIO_WAKE: libc::c_ulong = 0x8010_aa02;
    pub const UFFDIO_COPY: libc::c_ulong = 0xc028_aa03;
    pub const UFFDIO_ZEROPAGE: libc::c_ulong = 0xc020_aa04;
    /// On `/dev/userfaultfd`.
    pub const USERFAULTFD_IOC_NEW: libc::c_ulong = 0xaa00;

    #[repr(C)]
    #[derive(Default)]
    pub struct Api {
        pub api: u64,
        pub features: u64,
        pub ioctls: u64,
    }

    #[repr(C)]
    #[derive(Default)]
    pub struct Range {
        pub start: u64,
        pub len: u64,
    }

    #[repr(C)]
    #[derive(Default)]
    pub struct Register {
        pub range: Range,
        pub mode: u64,
        pub ioctls: u64,
    }

    #[repr(C)]
    #[derive(Default)]
    pub struct Copy {
        pub dst: u64,
        pub src: u64,
        pub len: u64,
        pub mode: u64,
        pub copied: i64,
    }

    #[repr(C)]
    #[derive(Default)]
    pub struct Zero {
        pub range: Range,
        pub mode: u64,
        pub zeroed: i64,
    }

    #[repr(C)]
    #[derive(Default)]
    pub struct Message {
        pub event: u8,
        pub reserved: [u8; 7],
        /// For a fault: flags, address, thread. For a removal: start, end.
        pub arguments: [u64; 3],
    }
}

struct Userfaultfd(OwnedFd);

impl Userfaultfd {
    fn open() -> io::Result<Self> {
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
        // SAFETY: a system call without pointers.
        let mut fd = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) } as libc::c_int;
        if fd < 0 {
            let error = io::Error::last_os_error();
            // Since Linux 6.1, access to the device node replaces the capability.
            let device = File::open(USERFAULTFD).map_err(|_| error)?;
            // SAFETY: the argument is a number.
            fd = unsafe { libc::ioctl(device.as_raw_fd(), uapi::USERFAULTFD_IOC_NEW, flags) };
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        // SAFETY: created just now, so it has no other owner.
        let uffd = Self(unsafe { OwnedFd::from_raw_fd(fd) });
        uffd.ioctl(
            uapi::UFFDIO_API,
            &mut uapi::Api {
                api: uapi::API,
                features: uapi::FEATURE_EVENT_REMOVE,
                ..Default::default()
            },
        )?;
        Ok(uffd)
    }

    fn ioctl<T>(&self, request: libc::c_ulong, argument: &mut T) -> io::Result<()> {
        // SAFETY: each request is used with its own struct, which outlives the call.
        let result =
            unsafe { libc::ioctl(self.0.as_raw_fd(), request, std::ptr::from_mut(argument)) };
        if result < 0 {
            Err(io::Error::last_os_error())
        } else {
            Ok(())
        }
    }

    fn register(&self, start: u64, len: u64) -> io::Result<()> {
        let range = uapi::Range { start, len };
        let mut register = uapi::Register {
            range,
            mode: uapi::REGISTER_MODE_MISSING,
            ..Default::default()
        };
        self.ioctl(uapi::UFFDIO_REGISTER, &mut register)
    }

    fn unregister(&self, start: u64, len: u64) -> io::Result<()> {
        self.ioctl(uapi::UFFDIO_UNREGISTER, &mut uapi::Range { start, len })
    }

    /// The next event, if one is pending.
    fn event(&self) -> io::Result<Option<Event>> {
        let mut message = uapi::Message::default();
        let size = size_of::<uapi::Message>();
        // SAFETY: the message is plain data of this size.
        let read = unsafe {
            libc::read(
                self.0.as_raw_fd(),
                std::ptr::from_mut(&mut message).cast(),
                size,
            )
        };
        if read < 0 {
            let error = io::Error::last_os_error();
            return match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(None),
                _ => Err(error),
            };
        }
        Ok(match message.event {
            uapi::EVENT_PAGEFAULT => Some(Event::Fault(message.arguments[1])),
            uapi::EVENT_REMOVE => Some(Event::Removed(message.arguments[0]..message.arguments[1])),
            _ => None,
        })
    }

    /// Copies up to `len` bytes to missing pages and wakes the threads that wait for them; returns
    /// the number of bytes copied.
    fn copy(&self, dst: u64, src: u64, len: u64) -> io::Result<u64> {
        let mut copy = uapi::Copy {
            dst,
            src,
            len,
            ..Default::default()
        };
        match self.ioctl(uapi::UFFDIO_COPY, &mut copy) {
            Ok(()) => Ok(len),
            // A partial copy: the kernel reports how much, and the rest will report its own error
            // next time.
            Err(_) if copy.copied > 0 => Ok(copy.copied.unsigned_abs()),
            Err(error) => Err(error),
        }
    }

    /// Fills missing pages with zeroes and wakes the threads that wait for them.
    fn zero(&self, start: u64, len: u64) -> io::Result<()> {
        let range = uapi::Range { start, len };
        let mut zero = uapi::Zero {
            range,
            ..Default::default()
        };
        self.ioctl(uapi::UFFDIO_ZEROPAGE, &mut zero)
    }

    /// Wakes the threads that wait for a page in this range; if it is still missing, they wait again.
    fn wake(&self, start: u64, len: u64) {
        if let Err(error) = self.ioctl(uapi::UFFDIO_WAKE, &mut uapi::Range { start, len }) {
            log::warn!("threads that wait for memory are not woken: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        os::unix::fs::FileExt,
        sync::mpsc::{self, Receiver},
        thread,
    };

    use super::*;

    const PAGE: u64 = 4096;
    const HUGE: u64 = 2 << 20;
    /// Nothing takes this long unless it hangs.
    const HANG: Duration = Duration::from_secs(60);

    #[test]
    fn who_waits_for_memory_and_whether_its_storage_answers_is_known() {
        let (transfer, memory) = transfer(4, false);
        let (uffd, pulse) = (Arc::downgrade(&transfer.uffd), Arc::clone(&transfer.pulse));
        let stop = transfer.stop.try_clone().unwrap();
        // Dropped after the sender, for which the thread waits.
        let lazy;
        let (go, goes) = mpsc::channel::<()>();
        let thread = thread::spawn(move || {
            goes.recv().unwrap();
            let _ = run(transfer).0.join();
        });
        lazy = LazyRestore {
            stop,
            thread: Some(thread),
            uffd,
            pulse,
            unwanted: Cancel::default(),
        };
        let [mut early, mut late] = [Question::default(); 2];
        assert!(!lazy.is_waited_for() && lazy.brings(&mut early));
        let byte = read(memory as u64);
        while !lazy.is_waited_for() {
            thread::yield_now();
        }
        assert!(!lazy.answers() && !lazy.brings(&mut early));
        // An answer to a question of another wait, as storage gives before it hangs.
        let Question(number) = early;
        lazy.pulse.answered.store(number.unwrap(), Ordering::SeqCst);
        assert!(!lazy.brings(&mut late) && !lazy.brings(&mut late));
        assert!(byte.try_recv().is_err());
        go.send(()).unwrap();
        assert_eq!(byte.recv_timeout(HANG), Ok(1));
        assert!(lazy.answers() && lazy.brings(&mut late));
        while lazy.is_waited_for() {
            thread::yield_now();
        }
    }

    #[test]
    fn what_is_given_back_is_cut_out_of_the_data() {
        let mut area = Area {
            start: 0,
            len: 0x10000,
            page: PAGE,
            offset: 0,
            extents: vec![0..0x4000, 0x6000..0x8000],
            examined: true,
        };
        area.forget(&(0x1000..0x7000));
        assert_eq!(area.extents, [0..0x1000, 0x7000..0x8000]);
        assert_eq!(area.data_from(0), Some(0..0x1000));
        assert_eq!(area.data_from(0x1000), Some(0x7000..0x8000));
        area.forget(&(0..0x10000));
        assert_eq!(area.data_from(0), None);
    }

    #[test]
    fn holes_are_left_out_once_the_area_is_examined() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(0x20000).unwrap();
        file.write_all_at(&[1; 0x2000], 0x4000).unwrap();
        file.write_all_at(&[1; 1], 0x10000).unwrap();
        let mut area = Area {
            start: 0,
            len: 0x1e000,
            page: PAGE,
            offset: 0x2000,
            extents: std::iter::once(0..0x1e000).collect(),
            examined: false,
        };
        assert_eq!(area.data_until(&file, 0, 0x8000).unwrap(), 0);
        assert_eq!(area.data_until(&file, 0x2000, 0x8000).unwrap(), 0x4000);
        assert_eq!(area.data_until(&file, 0x2000, 0x3000).unwrap(), 0x3000);
        area.forget(&(0x2000..0x3000));
        area.examine(&file).unwrap();
        assert_eq!(area.extents, [0x3000..0x4000, 0xe000..0xf000]);
    }

    /// A transfer of `pages` pages of ones into fresh memory, shared or private.
    fn transfer(pages: u64, shared: bool) -> (Transfer, *mut u8) {
        let kind = if shared {
            libc::MAP_SHARED
        } else {
            libc::MAP_PRIVATE
        };
        transfer_to(pages, PAGE, kind).unwrap()
    }

    /// A transfer of ones into fresh memory of pages of this size; `None` if the host has none.
    fn transfer_to(pages: u64, page: u64, kind: libc::c_int) -> Option<(Transfer, *mut u8)> {
        let file = tempfile::tempfile().unwrap();
        let len = pages * page;
        file.write_all_at(&vec![1; len as usize], 0).unwrap();
        // SAFETY: new memory at an address that the kernel picks; it is never unmapped.
        let memory = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len as usize,
                libc::PROT_READ | libc::PROT_WRITE,
                kind | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if memory == libc::MAP_FAILED {
            return None;
        }
        let uffd = Arc::new(Userfaultfd::open().unwrap());
        uffd.register(memory as u64, len).unwrap();
        let transfer = Transfer {
            uffd,
            source: view(&file, len).unwrap(),
            zeroes: zeroes(page).unwrap(),
            file,
            areas: vec![Area {
                start: memory as u64,
                len,
                page,
                offset: 0,
                extents: std::iter::once(0..len).collect(),
                examined: false,
            }],
            stop: EventFd::new(EFD_NONBLOCK).unwrap(),
            pulse: Arc::default(),
            waiting: VecDeque::new(),
            ahead: (0, 0),
        };
        Some((transfer, memory.cast()))
    }

    /// Lets a transfer run; the receivers hear of lost memory and of the process's end.
    fn run(transfer: Transfer) -> (thread::JoinHandle<()>, Receiver<MemoryLost>) {
        let (sender, lost) = mpsc::channel();
        let on_loss = OnLoss {
            report: Box::new(move |error| sender.send(error).unwrap()),
            patience: HANG,
            end: || {},
            unwanted: Cancel::default(),
        };
        (thread::spawn(move || transfer.run(&on_loss)), lost)
    }

    /// Reads the byte at an address on another thread, which may wait for ever.
    fn read(address: u64) -> Receiver<u8> {
        let (sender, byte) = mpsc::channel();
        thread::spawn(move || {
            // SAFETY: memory that `transfer` made, which is never unmapped.
            let byte = unsafe { (address as *const u8).read_volatile() };
            // Nobody listens if the test has ended.
            let _ = sender.send(byte);
        });
        byte
    }

    #[test]
    fn memory_that_is_given_back_during_the_transfer_stays_empty() {
        for (shared, advice) in [(false, libc::MADV_DONTNEED), (true, libc::MADV_REMOVE)] {
            let pages = 512;
            let (transfer, memory) = transfer(pages, shared);
            let at = |page: u64| {
                // SAFETY: within the memory that `transfer` made.
                unsafe { memory.add((page * PAGE) as usize) }
            };
            let (thread, _lost) = run(transfer);
            // SAFETY: reads what the transfer brings in.
            assert_eq!(unsafe { at(0).read_volatile() }, 1);
            // Gives back every second page while others are being copied.
            for page in (1..pages).step_by(2) {
                // SAFETY: this memory belongs to the test.
                let result = unsafe { libc::madvise(at(page).cast(), PAGE as usize, advice) };
                assert_eq!(result, 0, "{}", io::Error::last_os_error());
            }
            thread.join().unwrap();
            for page in 0..pages {
                // SAFETY: as above.
                let byte = unsafe { at(page).read_volatile() };
                assert_eq!(u64::from(byte), 1 - page % 2, "page {page}");
            }
        }
    }

    #[test]
    fn huge_pages_are_loaded_whole() {
        for kind in [libc::MAP_PRIVATE, libc::MAP_SHARED] {
            let Some((transfer, memory)) = transfer_to(4, HUGE, kind | libc::MAP_HUGETLB) else {
                eprintln!("skipped: no 4 free huge pages (/proc/sys/vm/nr_hugepages)");
                return;
            };
            let hole = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            // The second page begins with a hole, and the third is one.
            for (from, len) in [(HUGE, PAGE), (2 * HUGE, HUGE)] {
                // SAFETY: a system call without pointers.
                let punched = unsafe {
                    libc::fallocate(transfer.file.as_raw_fd(), hole, from as i64, len as i64)
                };
                assert_eq!(punched, 0);
            }
            let (thread, lost) = run(transfer);
            let at = |offset: u64| read(memory as u64 + offset).recv_timeout(HANG);
            for (offset, byte) in [
                (3 * HUGE + 5 * PAGE, 1),
                (2 * HUGE + 3, 0),
                (HUGE, 0),
                (2 * HUGE - 1, 1),
                (0, 1),
            ] {
                assert_eq!(at(offset), Ok(byte), "{offset:#x}");
            }
            thread.join().unwrap();
            assert!(lost.try_recv().is_err());
            // SAFETY: the memory that `transfer_to` made; nobody uses it any more.
            unsafe { libc::munmap(memory.cast(), 4 * HUGE as usize) };
        }
    }

    #[test]
    fn pieces_of_data_in_one_huge_page_are_one() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4 * HUGE).unwrap();
        for at in [HUGE + PAGE, HUGE + 64 * PAGE, 2 * HUGE - 1] {
            file.write_all_at(&[1], at).unwrap();
        }
        let mut area = Area {
            start: 0,
            len: 4 * HUGE,
            page: HUGE,
            offset: 0,
            extents: std::iter::once(0..4 * HUGE).collect(),
            examined: false,
        };
        assert_eq!(area.data_until(&file, 0, 4 * HUGE).unwrap(), 0);
        assert_eq!(area.data_until(&file, HUGE, 4 * HUGE).unwrap(), 2 * HUGE);
        area.examine(&file).unwrap();
        let whole = (Some(HUGE..2 * HUGE), 1);
        assert_eq!((area.data_from(0), area.extents.len()), whole);
        // A part of a huge page stays.
        area.forget(&(HUGE + PAGE..2 * HUGE));
        assert_eq!((area.data_from(0), area.extents.len()), whole);
    }

    #[test]
    fn nothing_behind_the_file_is_copied() {
        let (mut transfer, memory) = transfer(2, false);
        let neighbour = Mapping::anonymous(2 * PAGE as usize, Access::ReadWrite).unwrap();
        // SAFETY: within the mapping.
        unsafe {
            let second = neighbour.start().add(PAGE as usize);
            second.write_bytes(0xaa, PAGE as usize);
        }
        // As if only one page had been mapped.
        let mut source = Mapping::private(&transfer.file, 0, PAGE as usize, Access::Read).unwrap();
        // SAFETY: the first page of `neighbour`, which is not used or dropped any more.
        unsafe { source.move_to(neighbour.start() as usize) }.unwrap();
        std::mem::forget(neighbour);
        transfer.source = source;
        let lost = transfer.serve(memory as u64 + PAGE).unwrap_err();
        assert!(
            matches!(lost, MemoryLost::Copy { offset: PAGE, .. }),
            "{lost}"
        );
        // The page is still missing.
        transfer.uffd.zero(memory as u64 + PAGE, PAGE).unwrap();
    }

    #[test]
    fn a_page_that_cannot_be_read_ends_the_vm_and_is_no_zeroes() {
        for examined in [true, false] {
            let (mut transfer, memory) = transfer(4, false);
            transfer.areas[0].examined = examined;
            transfer.file.set_len(PAGE).unwrap();
            let (sender, report) = mpsc::channel();
            static END: std::sync::Mutex<Option<mpsc::Sender<()>>> = std::sync::Mutex::new(None);
            let (ended, end) = mpsc::channel();
            *END.lock().unwrap() = Some(ended);
            let on_loss = OnLoss {
                report: Box::new(move |error| sender.send(error).unwrap()),
                patience: Duration::ZERO,
                end: || {
                    END.lock().unwrap().take().unwrap().send(()).unwrap();
                    // As the process's end does: it takes the thread along, not its descriptors.
                    loop {
                        thread::park();
                    }
                },
                unwanted: Cancel::default(),
            };
            let byte = read(memory as u64 + 2 * PAGE);
            thread::spawn(move || transfer.run(&on_loss));
            let lost = report.recv_timeout(HANG).unwrap();
            match lost {
                MemoryLost::Copy { .. } => assert!(examined),
                MemoryLost::Truncated { found, expected } => {
                    assert_eq!((found, expected), (PAGE, 4 * PAGE));
                }
                other => panic!("{other}"),
            }
            // The control loop does nothing about it, because it waits for the page itself.
            end.recv_timeout(HANG).unwrap();
            assert!(byte.try_recv().is_err(), "there is a page that was lost");
        }
    }

    #[test]
    fn nobody_is_told_of_memory_that_is_lost_when_its_vm_has_ended() {
        let (mut transfer, memory) = transfer(4, false);
        transfer.areas[0].examined = true;
        transfer.file.set_len(PAGE).unwrap();
        let (sender, lost) = mpsc::channel();
        let on_loss = OnLoss {
            report: Box::new(move |error| sender.send(error).unwrap()),
            patience: HANG,
            end: || {},
            unwanted: Cancel::default(),
        };
        on_loss.unwanted.cancel();
        let byte = read(memory as u64 + 2 * PAGE);
        let thread = thread::spawn(move || transfer.run(&on_loss));
        assert_eq!(byte.recv_timeout(HANG), Ok(0));
        thread.join().unwrap();
        assert!(lost.try_recv().is_err());
    }

    #[test]
    fn a_lost_page_waits_for_the_vm_to_end() {
        let (mut transfer, memory) = transfer(4, false);
        transfer.areas[0].examined = true;
        transfer.file.set_len(PAGE).unwrap();
        let stop = transfer.stop.try_clone().unwrap();
        let byte = read(memory as u64 + 2 * PAGE);
        let (thread, lost) = run(transfer);
        lost.recv_timeout(HANG).unwrap();
        assert!(byte.try_recv().is_err());
        stop.write(1).unwrap();
        thread.join().unwrap();
    }
}
