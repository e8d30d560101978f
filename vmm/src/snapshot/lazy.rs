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

use std::{
    collections::VecDeque,
    fs::File,
    io,
    ops::Range,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    path::Path,
    thread::JoinHandle,
};

use base::{Access, Mapping};
use devices::thread::{ThreadRole, ThreadSpawner};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::memory_file::{self, MemoryFileError, MemoryRange};
use crate::memory::Ram;

/// Number of bytes copied per fault, aligned. A power of two and a multiple of the page size.
const FAULT_CHUNK: u64 = 64 << 10;

/// Number of bytes copied in the background between two checks for faults.
const AHEAD_CHUNK: u64 = 64 << 10;

/// Milliseconds without a fault after which background copying starts: while the guest faults in
/// its working set, it has the processor and the disk to itself.
const QUIET: libc::c_int = 2;

const PAGE: u64 = 4096;

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
        "RAM at {guest:#x} cannot be restored on demand (huge pages cannot): \
         use memory_restore_mode=Copy"
    )]
    Register {
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

/// The transfer in progress. Dropping it ends the thread, and memory that has not been loaded is
/// lost: drop it together with the machine.
pub struct LazyRestore {
    stop: EventFd,
    thread: Option<JoinHandle<()>>,
}

impl LazyRestore {
    /// Registers `ram` and starts the transfer from the file at `path`.
    pub fn start(
        path: &Path,
        ram: &Ram,
        ranges: &[MemoryRange],
        spawner: &dyn ThreadSpawner,
    ) -> Result<Self, LazyError> {
        let io_error = |action, source| {
            LazyError::File(MemoryFileError::Io {
                action,
                path: path.to_owned(),
                source,
            })
        };
        let file = File::open(path).map_err(|source| io_error("open", source))?;
        let pairs = memory_file::matching(&file, path, ram, ranges)?;
        let uffd = Userfaultfd::open().map_err(LazyError::Userfaultfd)?;
        let source = view(&file).map_err(|source| io_error("map", source))?;
        let mut areas = Vec::new();
        for (region, range) in pairs {
            let start = region.mapping.address() as u64;
            uffd.register(start, range.len)
                .map_err(|source| LazyError::Register {
                    guest: range.guest,
                    source,
                })?;
            areas.push(Area {
                start,
                len: range.len,
                offset: range.offset,
                // Finding the holes takes longer than everything else, so the guest starts first.
                extents: std::iter::once(0..range.len).collect(),
                examined: false,
            });
        }
        let stop = EventFd::new(EFD_NONBLOCK).map_err(LazyError::Thread)?;
        let transfer = Transfer {
            uffd,
            file,
            source,
            areas,
            stop: stop.try_clone().map_err(LazyError::Thread)?,
            waiting: VecDeque::new(),
            ahead: (0, 0),
        };
        let thread = spawner
            .spawn(
                ThreadRole::PageFault,
                "_pagefault",
                Box::new(move || transfer.run()),
            )
            .map_err(LazyError::Thread)?;
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }
}

impl LazyRestore {
    /// Whether all memory has been loaded.
    pub fn is_finished(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }
}

impl Drop for LazyRestore {
    fn drop(&mut self) {
        let stopped = self.stop.write(1);
        if let (Ok(()), Some(thread)) = (stopped, self.thread.take())
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
    /// Offset in the file.
    offset: u64,
    /// Ranges of data within the region, ascending, in whole pages. They may contain holes unless
    /// the area is `examined`.
    extents: Vec<Range<u64>>,
    examined: bool,
}

impl Area {
    /// Drops the data in `gone` (offsets within the region), because the guest has given the memory
    /// back.
    fn forget(&mut self, gone: &Range<u64>) {
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
        let mut data = Vec::new();
        for extent in &self.extents {
            let range = self.offset + extent.start..self.offset + extent.end;
            // Rounds to whole pages; the file has holes in multiples of its block size.
            data.extend(
                memory_file::data_extents(file, range)?
                    .into_iter()
                    .map(|part| {
                        let low = (part.start - self.offset) / PAGE * PAGE;
                        let high = (part.end - self.offset).next_multiple_of(PAGE);
                        low.max(extent.start)..high.min(extent.end)
                    }),
            );
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
        while end < limit && memory_file::is_data(file, self.offset + end)? {
            end = limit.min(end + PAGE);
        }
        Ok(end)
    }

    /// The first range of data at or after an offset.
    fn data_from(&self, offset: u64) -> Option<Range<u64>> {
        let index = self.extents.partition_point(|extent| extent.end <= offset);
        let extent = self.extents.get(index)?;
        Some(extent.start.max(offset)..extent.end)
    }
}

struct Transfer {
    uffd: Userfaultfd,
    file: File,
    source: Mapping,
    areas: Vec<Area>,
    stop: EventFd,
    /// Addresses of faults that have not been served yet.
    waiting: VecDeque<u64>,
    /// Where background copying continues: index of an area, and an offset in it.
    ahead: (usize, u64),
}

impl Transfer {
    fn run(mut self) {
        let mut quiet = QUIET;
        loop {
            let timeout = if self.waiting.is_empty() { quiet } else { 0 };
            match self.look(timeout) {
                Ok(Wake::Stop) => return,
                Ok(Wake::Event(Event::Fault(address))) => {
                    self.waiting.push_back(address);
                    quiet = QUIET;
                }
                Ok(Wake::Event(Event::Removed(range))) => self.forget(&range),
                Ok(Wake::Nothing) if self.waiting.is_empty() => {
                    if !self.copy_ahead() {
                        break;
                    }
                    quiet = 0;
                }
                Ok(Wake::Nothing) => {}
                Err(error) => {
                    log::error!("cannot wait for page faults: {error}; the guest will hang");
                    return;
                }
            }
            if let Some(address) = self.waiting.pop_front()
                && self.serve(address) == Copied::NotNow
            {
                self.waiting.push_back(address);
            }
        }
        for area in &self.areas {
            if let Err(error) = self.uffd.unregister(area.start, area.len) {
                log::error!("memory stays registered with userfaultfd: {error}");
            }
        }
        log::info!("all of the snapshot's memory has been brought in");
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
        if fds[0].revents != 0
            && let Some(event) = self.uffd.event()?
        {
            return Ok(Wake::Event(event));
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
    fn serve(&self, address: u64) -> Copied {
        let Some(area) = self
            .areas
            .iter()
            .find(|area| (area.start..area.start + area.len).contains(&address))
        else {
            return Copied::Done;
        };
        let at = (address - area.start) / PAGE * PAGE;
        let data = area.data_from(at).filter(|data| data.start == at);
        let end = data.map_or(at, |data| {
            let limit = ((at / FAULT_CHUNK + 1) * FAULT_CHUNK).min(data.end);
            // Copying zeroes is as correct as leaving a hole.
            area.data_until(&self.file, at, limit).unwrap_or(limit)
        });
        if end > at {
            // The faulting page is copied first.
            let copied = self.copy(area, at..at + PAGE);
            if copied == Copied::Done {
                self.copy(area, at + PAGE..end);
            }
            return copied;
        }
        match self.uffd.zero(area.start + at, PAGE) {
            Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => Copied::NotNow,
            Err(error) => {
                log::error!("cannot fill in a page of zeroes: {error}");
                Copied::Done
            }
            Ok(()) => Copied::Done,
        }
    }

    /// Copies some data that has not been requested yet; returns false if there is nothing left.
    fn copy_ahead(&mut self) -> bool {
        let (index, offset) = self.ahead;
        let Some(area) = self.areas.get_mut(index) else {
            return false;
        };
        if !area.examined {
            if let Err(error) = area.examine(&self.file) {
                log::warn!("cannot find the holes in the snapshot, copying them: {error}");
            }
            return true;
        }
        let area = &self.areas[index];
        match area.data_from(offset) {
            None => self.ahead = (index + 1, 0),
            Some(data) => {
                let end = data.end.min(data.start + AHEAD_CHUNK);
                if self.copy(area, data.start..end) == Copied::Done {
                    self.ahead = (index, end);
                }
            }
        }
        true
    }

    /// Copies `range` of an area, skipping pages that are already present.
    fn copy(&self, area: &Area, mut range: Range<u64>) -> Copied {
        while !range.is_empty() {
            let source = self.source.start() as u64 + area.offset + range.start;
            match self
                .uffd
                .copy(area.start + range.start, source, range.end - range.start)
            {
                Ok(copied) => range.start += copied,
                Err(error) if error.raw_os_error() == Some(libc::EEXIST) => range.start += PAGE,
                // Memory is being given back, so its event must be read first.
                Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => return Copied::NotNow,
                Err(error) => {
                    // The snapshot was truncated meanwhile, so the correct data no longer exists.
                    log::error!("guest memory is lost, cannot copy from the snapshot: {error}");
                    break;
                }
            }
        }
        Copied::Done
    }
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

/// Maps a whole file read-only. The mapping of an empty file has one page, which is never read.
fn view(file: &File) -> io::Result<Mapping> {
    let len = usize::try_from(file.metadata()?.len()).map_err(io::Error::other)?;
    Mapping::private(file, 0, len.max(1), Access::Read)
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
            let device = File::open("/dev/userfaultfd").map_err(|_| error)?;
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

    fn zero(&self, start: u64, len: u64) -> io::Result<()> {
        let range = uapi::Range { start, len };
        let mut zero = uapi::Zero {
            range,
            ..Default::default()
        };
        match self.ioctl(uapi::UFFDIO_ZEROPAGE, &mut zero) {
            Err(error) if error.raw_os_error() != Some(libc::EEXIST) => Err(error),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{os::unix::fs::FileExt, thread};

    use super::*;

    #[test]
    fn what_is_given_back_is_cut_out_of_the_data() {
        let mut area = Area {
            start: 0,
            len: 0x10000,
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
        let file = tempfile::tempfile().unwrap();
        let len = pages * PAGE;
        file.write_all_at(&vec![1; len as usize], 0).unwrap();
        let kind = if shared {
            libc::MAP_SHARED
        } else {
            libc::MAP_PRIVATE
        };
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
        assert_ne!(memory, libc::MAP_FAILED);
        let uffd = Userfaultfd::open().unwrap();
        uffd.register(memory as u64, len).unwrap();
        let transfer = Transfer {
            uffd,
            source: view(&file).unwrap(),
            file,
            areas: vec![Area {
                start: memory as u64,
                len,
                offset: 0,
                extents: std::iter::once(0..len).collect(),
                examined: false,
            }],
            stop: EventFd::new(EFD_NONBLOCK).unwrap(),
            waiting: VecDeque::new(),
            ahead: (0, 0),
        };
        (transfer, memory.cast())
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
            let thread = thread::spawn(move || transfer.run());
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
}
