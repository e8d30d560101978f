//! Bringing RAM in while the guest runs already (`memory_restore_mode=OnDemand`).
//!
//! RAM is registered with userfaultfd: whoever touches a page that is not there yet, the guest or
//! a device, waits until the `_pagefault` thread has copied it from the snapshot. Between faults
//! the thread copies the rest, and ends when all is there; from then on the snapshot may be
//! deleted.
//!
//! Pages that were zero (holes in the file) are never copied: the kernel fills them in when they
//! are touched.

use std::{
    collections::VecDeque,
    fs::File,
    io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    path::Path,
    thread::JoinHandle,
};

use devices::thread::{ThreadRole, ThreadSpawner};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::memory_file::{self, MemoryFileError, MemoryRange};
use crate::memory::Ram;

/// Bytes that a fault brings in at once, aligned. A power of two and multiple of the page size.
const FAULT_CHUNK: u64 = 64 << 10;

/// Bytes that are copied between two looks for faults.
const FILL_CHUNK: u64 = 256 << 10;

const PAGE: u64 = 4096;

/// Lazy restore could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum LazyError {
    /// No userfaultfd.
    #[error(
        "cannot use userfaultfd: give Gantry CAP_SYS_PTRACE, or set vm.unprivileged_userfaultfd=1, \
         or restore with memory_restore_mode=Copy"
    )]
    Userfaultfd(#[source] io::Error),
    /// A region cannot be filled in lazily.
    #[error(
        "RAM at {guest:#x} cannot be restored on demand (huge pages cannot): \
         use memory_restore_mode=Copy"
    )]
    Register {
        /// Guest-physical address.
        guest: u64,
        /// Why.
        source: io::Error,
    },
    /// The snapshot's memory is not usable.
    #[error("cannot use the snapshot's memory")]
    File(#[from] MemoryFileError),
    /// A host resource could not be had.
    #[error("cannot start the thread that brings memory in")]
    Thread(#[source] io::Error),
}

/// The running transfer. Dropping it ends the thread, after which untouched memory is lost: drop
/// it with the machine.
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
        let source = FileView::new(&file).map_err(|source| io_error("map", source))?;
        let mut areas = Vec::new();
        for (region, range) in pairs {
            let start = region.mapping.address() as u64;
            uffd.register(start, range.len)
                .map_err(|source| LazyError::Register {
                    guest: range.guest,
                    source,
                })?;
            let extents = memory_file::data_extents(&file, &range)
                .map_err(|source| io_error("examine", source))?
                .into_iter()
                // To whole pages; the file has holes in multiples of its block size.
                .map(|extent| {
                    let low = (extent.start - range.offset) / PAGE * PAGE;
                    let high = (extent.end - range.offset)
                        .next_multiple_of(PAGE)
                        .min(range.len);
                    low..high
                })
                .collect();
            areas.push(Area {
                start,
                len: range.len,
                offset: range.offset,
                extents,
            });
        }
        let stop = EventFd::new(EFD_NONBLOCK).map_err(LazyError::Thread)?;
        let transfer = Transfer {
            uffd,
            source,
            areas,
            stop: stop.try_clone().map_err(LazyError::Thread)?,
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

/// A region of RAM that is brought in.
struct Area {
    /// Host virtual address.
    start: u64,
    len: u64,
    /// Offset in the file.
    offset: u64,
    /// Data within the region, ascending, in whole pages.
    extents: Vec<std::ops::Range<u64>>,
}

struct Transfer {
    uffd: Userfaultfd,
    source: FileView,
    areas: Vec<Area>,
    stop: EventFd,
}

impl Transfer {
    fn run(self) {
        let mut rest: VecDeque<(usize, std::ops::Range<u64>)> = self
            .areas
            .iter()
            .enumerate()
            .flat_map(|(index, area)| {
                area.extents
                    .iter()
                    .map(move |extent| (index, extent.clone()))
            })
            .collect();
        loop {
            match self.look() {
                Ok(Wake::Stop) => return,
                Ok(Wake::Fault(address)) => self.fault(address),
                Ok(Wake::Idle) => {}
                Err(error) => {
                    log::error!("cannot wait for page faults: {error}; the guest will hang");
                    return;
                }
            }
            match rest.pop_front() {
                Some((index, mut extent)) => {
                    let end = extent.end.min(extent.start + FILL_CHUNK);
                    self.fill(&self.areas[index], extent.start..end);
                    extent.start = end;
                    if !extent.is_empty() {
                        rest.push_front((index, extent));
                    }
                }
                None => break,
            }
        }
        // This also wakes whoever waits for a page of zeroes.
        for area in &self.areas {
            if let Err(error) = self.uffd.unregister(area.start, area.len) {
                log::error!("memory stays registered with userfaultfd: {error}");
            }
        }
        log::info!("all of the snapshot's memory has been brought in");
    }

    /// Looks for a fault, without waiting: there is always something to copy meanwhile.
    fn look(&self) -> io::Result<Wake> {
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
        if unsafe { libc::poll(fds.as_mut_ptr(), 2, 0) } < 0 {
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
        if fds[1].revents != 0 {
            return Ok(Wake::Stop);
        }
        if fds[0].revents != 0
            && let Some(address) = self.uffd.fault()?
        {
            return Ok(Wake::Fault(address));
        }
        Ok(Wake::Idle)
    }

    /// Brings in what is around a faulting address.
    fn fault(&self, address: u64) {
        let Some(area) = self
            .areas
            .iter()
            .find(|area| (area.start..area.start + area.len).contains(&address))
        else {
            return;
        };
        let at = (address - area.start) / PAGE * PAGE;
        let index = area.extents.partition_point(|extent| extent.end <= at);
        match area.extents.get(index) {
            Some(extent) if extent.contains(&at) => {
                let low = at / FAULT_CHUNK * FAULT_CHUNK;
                let chunk = low.max(extent.start)..(low + FAULT_CHUNK).min(extent.end);
                // The page that somebody waits for comes first.
                self.fill(area, at..at + PAGE);
                self.fill(area, chunk);
            }
            _ => {
                if let Err(error) = self.uffd.zero(area.start + at, PAGE) {
                    log::error!("cannot fill in a page of zeroes: {error}");
                }
            }
        }
    }

    /// Copies `range` of an area, leaving alone the pages that are there already.
    fn fill(&self, area: &Area, mut range: std::ops::Range<u64>) {
        while !range.is_empty() {
            let source = self.source.address + area.offset + range.start;
            match self
                .uffd
                .copy(area.start + range.start, source, range.end - range.start)
            {
                Ok(copied) => range.start += copied,
                Err(error) if error.raw_os_error() == Some(libc::EEXIST) => range.start += PAGE,
                Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => {}
                Err(error) => {
                    // The snapshot was cut short under us: there is nothing right to put there.
                    log::error!("guest memory is lost, cannot copy from the snapshot: {error}");
                    return;
                }
            }
        }
    }
}

enum Wake {
    Stop,
    Fault(u64),
    Idle,
}

/// A read-only view of a whole file.
struct FileView {
    address: u64,
    len: usize,
}

impl FileView {
    fn new(file: &File) -> io::Result<Self> {
        let len = usize::try_from(file.metadata()?.len()).map_err(io::Error::other)?;
        // SAFETY: the kernel picks the address; nothing refers to the mapping as Rust memory.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len.max(1),
                libc::PROT_READ,
                libc::MAP_PRIVATE,
                file.as_raw_fd(),
                0,
            )
        };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self {
            address: address as u64,
            len: len.max(1),
        })
    }
}

impl Drop for FileView {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, used by nobody else.
        unsafe { libc::munmap(self.address as *mut _, self.len) };
    }
}

/// `include/uapi/linux/userfaultfd.h`.
mod uapi {
    pub const API: u64 = 0xaa;
    pub const REGISTER_MODE_MISSING: u64 = 1;
    pub const EVENT_PAGEFAULT: u8 = 0x12;
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
        pub flags: u64,
        pub address: u64,
        pub thread: u64,
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
            // Linux 6.1 and newer: access to the device node stands in for the capability.
            let device = File::open("/dev/userfaultfd").map_err(|_| error)?;
            // SAFETY: the argument is a number.
            fd = unsafe { libc::ioctl(device.as_raw_fd(), uapi::USERFAULTFD_IOC_NEW, flags) };
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        // SAFETY: created just now, owned by nobody else.
        let uffd = Self(unsafe { OwnedFd::from_raw_fd(fd) });
        uffd.ioctl(
            uapi::UFFDIO_API,
            &mut uapi::Api {
                api: uapi::API,
                ..Default::default()
            },
        )?;
        Ok(uffd)
    }

    fn ioctl<T>(&self, request: libc::c_ulong, argument: &mut T) -> io::Result<()> {
        // SAFETY: each request is called with the struct that belongs to it, which outlives the
        // call.
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

    /// The address of the next fault, if one is pending.
    fn fault(&self) -> io::Result<Option<u64>> {
        let mut message = uapi::Message::default();
        let size = size_of::<uapi::Message>();
        // SAFETY: the message is plain data of that size.
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
        let fault = read as usize == size && message.event == uapi::EVENT_PAGEFAULT;
        Ok(fault.then_some(message.address))
    }

    /// Copies up to `len` bytes to missing pages and wakes who waits for them; says how many.
    fn copy(&self, dst: u64, src: u64, len: u64) -> io::Result<u64> {
        let mut copy = uapi::Copy {
            dst,
            src,
            len,
            ..Default::default()
        };
        match self.ioctl(uapi::UFFDIO_COPY, &mut copy) {
            Ok(()) => Ok(len),
            // Part of it: the kernel says how much, and the rest reports its own error next time.
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
