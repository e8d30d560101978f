//! Memory of the program that the driver pins: its pages are replaced by pages of the slice, at the same addresses,
//! and replaced again when the driver does not need them any longer.
//!
//! While contents are copied, other threads must not write. Their writes, and those of system calls, wait at a
//! write-protected page (`userfaultfd`) until the new pages are in place. What that cannot cover is refused: mappings
//! of files.
//!
//! Files of shared memory (`/dev/shm`) are not moved, as other processes have them, too: the file is lent to the worker.

use std::{
    fs, io,
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
        unix::fs::OpenOptionsExt,
    },
    ptr,
};

use libc::c_void;
use nvidia_abi::wire::Operation;

use crate::{
    files::Program,
    mappings::{Found, PAGE, Pinned, ZERO, is_memory, mappings},
    memory,
};

/// Memory that the driver is to pin.
pub enum Wanted {
    /// It lies in the slice now.
    Moved(Pinned),
    /// It is a file of shared memory, from this offset on.
    Lent(OwnedFd, u64),
}

impl Wanted {
    /// Where it is in the slice or the file.
    pub fn offset(&self) -> u64 {
        match self {
            Self::Moved(pinned) => pinned.offset,
            Self::Lent(_, offset) => *offset,
        }
    }

    /// The file that is lent.
    pub fn file(&self) -> Option<RawFd> {
        match self {
            Self::Moved(_) => None,
            Self::Lent(file, _) => Some(file.as_raw_fd()),
        }
    }
}

/// Operations of `userfaultfd`: their command words and blocks as the kernel publishes them.
mod fault {
    use std::{
        io,
        os::fd::{FromRawFd, OwnedFd},
    };

    pub const API_COMMAND: u64 = 0xc018_aa3f;
    pub const REGISTER: u64 = 0xc020_aa00;
    pub const WAKE: u64 = 0x8010_aa02;
    pub const PROTECT: u64 = 0xc018_aa06;
    /// The version; write protection, also of shared memory; and of pages that are not there yet (Linux 6.4).
    pub const API: u64 = 0xaa;
    pub const FEATURES: u64 = 1 | 1 << 12;
    pub const UNPOPULATED: u64 = 1 << 13;
    /// Registered memory stays registered when it is moved.
    pub const MOVES: u64 = 1 << 2;
    /// Only faults of the program itself: for users without rights.
    const USER_MODE_ONLY: i32 = 1;
    pub const REGISTER_MISSING: u64 = 1;
    pub const REGISTER_PROTECTED: u64 = 2;
    pub const PROTECT_ON: u64 = 1;
    pub const COPY: u64 = 0xc028_aa03;
    pub const WAKE_LATER: u64 = 1;

    /// A `userfaultfd` without memory.
    pub fn open() -> io::Result<OwnedFd> {
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
        let open = |flags: i32| {
            // SAFETY: a call without pointers.
            let file = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
            match i32::try_from(file) {
                // SAFETY: a new descriptor that nothing else owns.
                Ok(file) if file >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(file) }),
                _ => Err(io::Error::last_os_error()),
            }
        };
        open(flags).or_else(|_| open(flags | USER_MODE_ONLY))
    }
}

/// Writers to a range wait as long as it lives, and go on at the pages that are there then.
struct Stopped {
    file: OwnedFd,
    range: [u64; 2],
}

impl Stopped {
    fn new(start: usize, length: usize) -> io::Result<Self> {
        let file = fault::open()?;
        let range = [start as u64, length as u64];
        let features = fault::FEATURES | fault::UNPOPULATED;
        if command(&file, fault::API_COMMAND, &mut [fault::API, features, 0]).is_err() {
            command(
                &file,
                fault::API_COMMAND,
                &mut [fault::API, fault::FEATURES, 0],
            )?;
            // SAFETY: pages of the program become present, with the contents that a read would see.
            let populated =
                unsafe { libc::madvise(start as *mut c_void, length, libc::MADV_POPULATE_READ) };
            if populated < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        command(
            &file,
            fault::REGISTER,
            &mut [range[0], range[1], fault::REGISTER_PROTECTED, 0],
        )?;
        command(
            &file,
            fault::PROTECT,
            &mut [range[0], range[1], fault::PROTECT_ON],
        )?;
        Ok(Self { file, range })
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        // Closing the file wakes whoever waits, too.
        let _ = command(&self.file, fault::WAKE, &mut self.range.clone());
    }
}

fn command<const N: usize>(file: &OwnedFd, command: u64, block: &mut [u64; N]) -> io::Result<()> {
    // SAFETY: each command here has the size of the array that its caller passes.
    let result = unsafe {
        libc::syscall(
            libc::SYS_ioctl,
            file.as_raw_fd(),
            command,
            block.as_mut_ptr(),
        )
    };
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

/// A descriptor's device and number, where it is a file that it can read and write.
fn writable_file(descriptor: RawFd) -> Option<(u64, u64)> {
    // SAFETY: zeroes are a valid value.
    let mut found: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes the value. The replaced functions would wait for the program.
    let (stat, flags) = unsafe {
        (
            libc::syscall(libc::SYS_fstat, descriptor, &raw mut found),
            libc::fcntl(descriptor, libc::F_GETFL),
        )
    };
    let is_writable = stat == 0 && flags >= 0 && flags & libc::O_ACCMODE == libc::O_RDWR;
    let is_file = found.st_mode & libc::S_IFMT == libc::S_IFREG;
    (is_writable && is_file).then_some((found.st_dev, found.st_ino))
}

/// Opens the file of a mapping: by its path, or by duplicating a descriptor of the program.
fn open(found: &Found) -> io::Result<OwnedFd> {
    let mut options = fs::OpenOptions::new();
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | libc::O_NOFOLLOW;
    let options = options.read(true).write(true).custom_flags(flags);
    if let Ok(file) = options.open(&found.path)
        && writable_file(file.as_raw_fd()) == Some(found.file)
    {
        return Ok(file.into());
    }
    let number = |entry: io::Result<fs::DirEntry>| entry.ok()?.file_name().to_str()?.parse().ok();
    let mut open = fs::read_dir("/proc/self/fd")?.filter_map(number);
    let open = open.find(|descriptor: &RawFd| writable_file(*descriptor) == Some(found.file));
    let open = open.ok_or_else(|| refused("it is a file that cannot be opened again"))?;
    // SAFETY: a call without pointers.
    let copy = unsafe { libc::fcntl(open, libc::F_DUPFD_CLOEXEC, 0) };
    if copy < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor that nothing else owns.
    let copy = unsafe { OwnedFd::from_raw_fd(copy) };
    // Another thread may have closed the first one meanwhile, and opened something else.
    if writable_file(copy.as_raw_fd()) == Some(found.file) {
        Ok(copy)
    } else {
        Err(refused("its file was closed meanwhile"))
    }
}

fn refused(text: &str) -> io::Error {
    io::Error::other(text)
}

/// Replaces the pages of a range by those of `new`, a mapping of the same length, with their contents.
///
/// # Safety
/// The range is memory of the program that may be read, and `new` belongs to the caller.
unsafe fn replace(start: usize, length: usize, new: *mut c_void) -> io::Result<()> {
    let stopped = Stopped::new(start, length)?;
    for at in (0..length).step_by(PAGE) {
        let from = (start + at) as *const u64;
        // SAFETY: the caller vouches for both ranges. Nobody writes to the old one: they wait. The pages are aligned.
        unsafe {
            let words = PAGE / size_of::<u64>();
            // The new pages are zero: those that were never written need not be touched.
            if (0..words).any(|word| from.add(word).read_volatile() != 0) {
                ptr::copy_nonoverlapping(from.cast::<u8>(), new.cast::<u8>().add(at), PAGE);
            }
        }
    }
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    // SAFETY: the new mapping takes the place of the old one, with the same contents.
    let moved = unsafe { libc::mremap(new, length, length, flags, start as *mut c_void) };
    if moved == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    drop(stopped);
    Ok(())
}

/// Maps new memory for [`replace`], and unmaps it if that fails.
///
/// # Safety
/// As for [`replace`].
unsafe fn replace_by(
    start: usize,
    length: usize,
    flags: i32,
    file: i32,
    offset: u64,
) -> io::Result<()> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let offset = offset.cast_signed();
    // SAFETY: a new mapping.
    let new = unsafe { memory::map(ptr::null_mut(), length, protection, flags, file, offset) };
    if new == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the caller's, and the mapping was made above.
    let replaced = unsafe { replace(start, length, new) };
    if replaced.is_err() {
        // SAFETY: it was made above, and has not been moved.
        let _ = unsafe { memory::unmap(new, length) };
    }
    replaced
}

/// Replaces pages of the slice, from `offset` on, by memory of the program's own, with the rights that the program gave
/// them meanwhile.
///
/// # Safety
/// The range is memory of the program.
unsafe fn own_again(
    start: usize,
    length: usize,
    protection: i32,
    slice: RawFd,
    offset: u64,
) -> io::Result<()> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let usual = libc::PROT_READ | libc::PROT_WRITE;
    let protect = |protection: i32| {
        // SAFETY: the program gets no rights that it did not have when the memory was pinned.
        match unsafe { libc::mprotect(start as *mut c_void, length, protection) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    };
    if protection & libc::PROT_READ == 0 {
        protect(protection | libc::PROT_READ)?;
    }
    // SAFETY: the caller's, and the range can be read.
    match unsafe { replace_by(start, length, flags, -1, 0) } {
        // The kernel does not write-protect a device's memory.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            // SAFETY: as above.
            unsafe { take_back(start, length, slice, offset)? };
        }
        replaced => replaced?,
    }
    if protection != usual {
        protect(protection)?;
    }
    Ok(())
}

/// A mapping of this library's own, which is unmapped on drop.
struct Own(*mut c_void, usize);

impl Own {
    fn new(
        length: usize,
        protection: i32,
        flags: i32,
        file: RawFd,
        offset: u64,
    ) -> io::Result<Self> {
        let offset = offset.cast_signed();
        // SAFETY: a new mapping.
        let new = unsafe { memory::map(ptr::null_mut(), length, protection, flags, file, offset) };
        match new {
            libc::MAP_FAILED => Err(io::Error::last_os_error()),
            new => Ok(Self(new, length)),
        }
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        // SAFETY: it is this value's.
        let _ = unsafe { memory::unmap(self.0, self.1) };
    }
}

/// Moves a mapping to other addresses in a thread of its own, while this one takes the events of a `userfaultfd` that
/// the move waits for.
///
/// # Safety
/// What is at `to` may be replaced.
unsafe fn move_heard(events: &OwnedFd, from: usize, to: usize, length: usize) -> io::Result<()> {
    const EVENT_BYTES: usize = 32;
    // It gets no signals of the program.
    // SAFETY: a valid set, which is filled.
    let (mut all, mut before) = unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
    // SAFETY: valid sets.
    unsafe {
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
    }
    let mover = std::thread::Builder::new()
        .stack_size(64 << 10)
        .spawn(move || {
            let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
            let (from, to) = (from as *mut c_void, to as *mut c_void);
            // SAFETY: the caller's.
            match unsafe { libc::mremap(from, length, length, flags, to) } {
                libc::MAP_FAILED => Err(io::Error::last_os_error()),
                _ => Ok(()),
            }
        });
    // SAFETY: the set that was valid before.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, ptr::null_mut()) };
    let mover = mover?;
    while !mover.is_finished() {
        let mut event = [0u8; EVENT_BYTES];
        let mut polled = libc::pollfd {
            fd: events.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one entry; then at most the array. The system calls are made past the replaced functions.
        unsafe {
            let soon = libc::timespec {
                tv_sec: 0,
                tv_nsec: 100_000,
            };
            let none = ptr::null::<c_void>();
            libc::syscall(
                libc::SYS_ppoll,
                &raw mut polled,
                1,
                &raw const soon,
                none,
                8,
            );
            libc::read(events.as_raw_fd(), event.as_mut_ptr().cast(), EVENT_BYTES);
        }
    }
    mover.join().map_err(|_| io::ErrorKind::Other)?
}

/// As [`replace`], for pages of a slice that cannot be write-protected: memory of the program's own without contents
/// takes their place, and whoever accesses it waits until it has them.
///
/// # Safety
/// The range is memory of the program: pages of the slice from `offset` on.
unsafe fn take_back(start: usize, length: usize, slice: RawFd, offset: u64) -> io::Result<()> {
    let old = Own::new(length, libc::PROT_READ, libc::MAP_SHARED, slice, offset)?;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let new = Own::new(length, access, flags, -1, 0)?;
    let faults = fault::open()?;
    command(
        &faults,
        fault::API_COMMAND,
        &mut [fault::API, fault::MOVES, 0],
    )?;
    let mut range = [new.0 as u64, length as u64, fault::REGISTER_MISSING, 0];
    command(&faults, fault::REGISTER, &mut range)?;
    // SAFETY: the caller's.
    unsafe { move_heard(&faults, new.0 as usize, start, length)? };
    // It is the program's now.
    std::mem::forget(new);
    for at in (0..length).step_by(PAGE) {
        let from = (old.0 as usize + at) as *const u64;
        let words = PAGE / size_of::<u64>();
        // SAFETY: within the mapping, which nobody writes to any longer. Pages of zeroes come by themselves.
        if (0..words).all(|word| unsafe { from.add(word).read_volatile() } == 0) {
            continue;
        }
        let page = [
            (start + at) as u64,
            from as u64,
            PAGE as u64,
            fault::WAKE_LATER,
            0,
        ];
        while let Err(error) = command(&faults, fault::COPY, &mut page.clone()) {
            // Another thread moves memory, or there is none: again. Or it has unmapped the page.
            if !matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::ENOMEM)) {
                break;
            }
            std::thread::yield_now();
        }
    }
    // Closing the file wakes whoever waits.
    Ok(())
}

impl Program {
    /// Has the worker share the memory from `start` to `start + last`: a file of shared memory is lent, other memory moves
    /// to the slice.
    pub fn pin(&mut self, start: u64, last: u64) -> io::Result<Wanted> {
        let length = last
            .checked_add(1)
            .and_then(|length| length.checked_next_multiple_of(PAGE as u64));
        let end = length.and_then(|length| start.checked_add(length));
        let (Some(length), Some(end)) = (length, end) else {
            return Err(refused("its length is invalid"));
        };
        if !start.is_multiple_of(PAGE as u64) {
            return Err(refused("it does not begin at a page"));
        }
        let (start, length, end) = (start as usize, length as usize, end as usize);
        let mut covered = start;
        let is_device = self.slice().is_some_and(|(_, slice)| slice.is_device());
        let mut copied = Vec::new();
        let all = mappings(start, length)?;
        let file = all.first().filter(|found| found.is_file());
        for found in &all {
            if found.start > covered {
                return Err(refused("a part of it is not mapped"));
            }
            covered = found.end;
            // Of what may not be read there is no copy, and the pages of the slice may be written.
            if found.protection != libc::PROT_READ | libc::PROT_WRITE {
                return Err(refused(
                    "a part of it is not readable and writable, or is executable",
                ));
            }
            if let Some(file) = file {
                let place = |found: &Found| found.offset.wrapping_sub(found.start as u64);
                if !found.is_file() || found.file != file.file || place(found) != place(file) {
                    return Err(refused("a part of it is another file than the rest"));
                }
                continue;
            }
            let is_private = !found.is_shared
                && (found.path.is_empty()
                    || found.path.starts_with('[')
                    || found.path == "/dev/zero");
            if !is_private && found.path != ZERO {
                return Err(refused("it is a file, or a part of it is"));
            }
            if is_private || is_device {
                copied.push(found.start.max(start)..found.end.min(end));
            }
        }
        if covered < end {
            return Err(refused("a part of it is not mapped"));
        }
        if let Some(file) = file {
            // The mapping begins at the range or before it.
            let offset = file.offset + (start - file.start) as u64;
            let file = open(file)?;
            if !is_memory(&file) {
                return Err(refused("it is a file on a disk"));
            }
            return Ok(Wanted::Lent(file, offset));
        }
        let connection = self.connection()?;
        let offset = connection
            .ask(Operation::Pages, 0, length as u64, 0)?
            .answer
            .a;
        let slice = connection.slice.as_raw_fd();
        // SAFETY: the range is mapped memory of the program, which asked for its pages to be shared.
        let replaced = unsafe { replace_by(start, length, libc::MAP_SHARED, slice, offset) };
        if let Err(error) = replaced {
            connection.ask(Operation::Return, 0, offset, 0)?;
            return Err(error);
        }
        Ok(Wanted::Moved(Pinned {
            start,
            length,
            offset,
            copied,
            object: [0; 3],
        }))
    }

    /// Puts memory of its own back where the program still has the slice's.
    pub fn put_back(&mut self, pinned: &Pinned) {
        let &Pinned {
            start,
            length,
            offset,
            ..
        } = pinned;
        let Some((slice, shown)) = self.slice() else {
            return;
        };
        for found in pinned.mappings(shown) {
            let from = found.start.max(start);
            let length = found.end.min(start + length) - from;
            let offset = offset + (from - start) as u64;
            // SAFETY: the range is the program's memory, mapped from the slice.
            let owned = unsafe { own_again(from, length, found.protection, slice, offset) };
            if let Err(error) = owned {
                // The pages stay in the slice, and nobody else gets them.
                eprintln!("gantry-nvidia: memory stays shared with the device: {error}");
                return;
            }
        }
        if let Ok(connection) = self.connection() {
            let _ = connection.ask(Operation::Return, 0, offset, 0);
        }
    }

    /// The driver has freed an object: memory that was pinned for it, or for what it contained, is put back.
    pub fn unpin(&mut self, client: u32, handle: u32) {
        let is_gone = |pinned: &Pinned| {
            let [of, parent, own] = pinned.object;
            of == client && [own, parent, of].contains(&handle)
        };
        while let Some(at) = self.pinned.iter().position(is_gone) {
            let pinned = self.pinned.swap_remove(at);
            self.put_back(&pinned);
        }
    }
}
