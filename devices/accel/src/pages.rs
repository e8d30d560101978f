//! The memory behind BAR 4 of a port for native contexts, where a worker has pages of device files
//! shown.
//!
//! Wherever nothing is shown there are *blank* pages: memory of this process that reads as zero and
//! takes writes. They change into a device's pages and back while the guest has them mapped, so that
//! an access never meets a hole, and never a page that the driver has given to somebody else since.

use std::{
    collections::BTreeMap,
    io, mem,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, Mutex},
};

use base::{Access, Mapping, Unpoisoned, regular_file};
use remoting_proto::apis::nvidia::{PAGE, PageRequest};

use super::{Error, slices::Slices};

/// Major number of NVIDIA's device files, of which a worker may have pages shown.
pub const MAJOR: u32 = 195;
/// Maximum number of ranges: the kernel keeps a mapping for each, and one for the space after it, of
/// the 65,530 that a process has, and two files. A program has three.
const MOST_RANGES: usize = 256;

/// The memory behind BAR 4.
pub struct Pages {
    /// The guest's mapping of it must be removed before it is dropped.
    range: Mapping,
    major: u32,
    slices: Arc<Slices>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// What is shown, by its offset.
    shown: BTreeMap<u64, Shown>,
    /// Files that belong to nothing that is shown any longer.
    done: Vec<OwnedFd>,
    /// The host had no memory behind pages that were shown.
    revoked: bool,
}

struct Shown {
    length: u64,
    /// The file that is shown, too: otherwise the kernel closed it wherever it is removed.
    files: Vec<OwnedFd>,
}

/// Why a request is not carried out.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    /// A file is none of the devices'.
    #[error("has sent a file that is not an NVIDIA device file")]
    NoDevice,
    /// What the worker is answered.
    #[error(transparent)]
    Answer(#[from] io::Error),
}

impl Pages {
    /// Blank pages, `size` bytes of them. `major` is the number of the device files that may be shown.
    pub fn new(size: u64, major: u32, slices: Arc<Slices>) -> Result<Self, Error> {
        let failed = |source| Error::Memory {
            what: "reserve",
            size,
            source,
        };
        let len = usize::try_from(size).map_err(|_| failed(io::ErrorKind::OutOfMemory.into()))?;
        Ok(Self {
            range: Mapping::anonymous(len, Access::ReadWrite).map_err(failed)?,
            major,
            slices,
            state: Mutex::default(),
        })
    }

    /// Address of the first byte in this process.
    pub fn base(&self) -> *mut u8 {
        self.range.start()
    }

    /// Size in bytes.
    pub fn size(&self) -> u64 {
        self.range.len() as u64
    }

    /// Carries out a worker's request. Of the `files` that came with [`PageRequest::Place`], the first
    /// is shown. The second, if there is one, is kept open as long as that, too: what the driver frees
    /// when a worker's files are closed, it does not free before the guest sees blank pages again,
    /// even if the worker is killed.
    ///
    /// # Errors
    /// A file is not an NVIDIA device file. Others are answered, `EINVAL`: the range is not within the
    /// BAR, or not what was placed. `EEXIST`: something is shown there. `ENOSPC`: too many ranges.
    /// `ENODEV`: the device's pages were revoked. Otherwise those of mmap(2).
    pub fn carry_out(&self, request: PageRequest, files: &mut Vec<OwnedFd>) -> Result<(), Refused> {
        let mut state = self.state.lock_unpoisoned();
        match request {
            PageRequest::Place {
                offset,
                length,
                writable,
            } => self.place(&mut state, (offset, length), writable, files),
            PageRequest::Remove { offset, length } => {
                let shown = state.shown.get(&offset);
                let at = usize::try_from(offset).ok();
                let at = at.filter(|_| shown.is_some_and(|shown| shown.length == length));
                self.blank(at.ok_or_else(|| error(libc::EINVAL))?, length)?;
                let removed = state.shown.remove(&offset);
                state
                    .done
                    .extend(removed.into_iter().flat_map(|shown| shown.files));
                Ok(())
            }
        }
    }

    fn place(
        &self,
        state: &mut State,
        (offset, length): (u64, u64),
        writable: bool,
        files: &mut Vec<OwnedFd>,
    ) -> Result<(), Refused> {
        if !files.iter().all(|file| self.is_device(file.as_fd())) {
            return Err(Refused::NoDevice);
        }
        if state.revoked {
            return Err(error(libc::ENODEV).into());
        }
        let fits = offset.is_multiple_of(PAGE) && length.is_multiple_of(PAGE) && length > 0;
        let end = offset.checked_add(length).filter(|_| fits);
        let end = end.filter(|end| *end <= self.size());
        let end = end.ok_or_else(|| error(libc::EINVAL))?;
        let before = state.shown.range(..end).next_back();
        if before.is_some_and(|(at, shown)| at + shown.length > offset) {
            return Err(error(libc::EEXIST).into());
        }
        if state.shown.len() >= MOST_RANGES {
            return Err(error(libc::ENOSPC).into());
        }
        let file = files.first().ok_or_else(|| error(libc::EBADF))?;
        let access = match writable {
            true => Access::ReadWrite,
            false => Access::Read,
        };
        // Both fit, as the range lies in a mapping.
        let mapping = Mapping::shared(file, 0, length as usize, access)?;
        self.range.replace_part_by(offset as usize, mapping)?;
        let files = mem::take(files);
        state.shown.insert(offset, Shown { length, files });
        Ok(())
    }

    /// Whether a file is a device file of the right kind.
    fn is_device(&self, file: BorrowedFd<'_>) -> bool {
        regular_file::type_of(file).is_ok_and(|is| is == (libc::S_IFCHR, self.major))
    }

    /// Makes a range of the BAR blank.
    fn blank(&self, at: usize, length: u64) -> io::Result<()> {
        let length = usize::try_from(length).map_err(|_| error(libc::EINVAL))?;
        let blank = Mapping::anonymous(length, Access::ReadWrite)?;
        self.range.replace_part_by(at, blank)
    }

    fn clear_all(&self, state: &mut State) -> io::Result<()> {
        if state.shown.is_empty() {
            return Ok(());
        }
        self.blank(0, self.size())?;
        let shown = mem::take(&mut state.shown).into_values();
        state.done.extend(shown.flat_map(|shown| shown.files));
        Ok(())
    }

    /// Makes everything blank.
    ///
    /// # Errors
    /// The kernel has no memory for that: everything is shown as before.
    pub fn clear(&self) -> io::Result<()> {
        self.clear_all(&mut self.state.lock_unpoisoned())
    }

    /// Takes files that are no longer needed. Whoever closes them may have to wait for the driver.
    pub fn take_done(&self) -> Vec<OwnedFd> {
        mem::take(&mut self.state.lock_unpoisoned().done)
    }

    /// Makes everything blank because an access to the guest's memory fails for good, which may be one
    /// to a device that is gone. The worker is told to end. Returns false if nothing was shown, so that
    /// this has changed nothing.
    pub fn revoke(&self) -> bool {
        let mut state = self.state.lock_unpoisoned();
        if state.shown.is_empty() || self.clear_all(&mut state).is_err() {
            return false;
        }
        state.revoked = true;
        drop(state);
        self.slices.wake();
        true
    }

    /// Whether [`revoke`](Self::revoke) has made everything blank since the last worker was asked.
    pub fn is_revoked(&self) -> bool {
        self.state.lock_unpoisoned().revoked
    }

    /// Another worker may have pages shown.
    pub fn begin(&self) {
        self.state.lock_unpoisoned().revoked = false;
    }
}

fn error(number: libc::c_int) -> io::Error {
    io::Error::from_raw_os_error(number)
}
