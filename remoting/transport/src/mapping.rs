//! A window's file, and its mapping into a process.

use std::{
    fs::File,
    io,
    os::{fd::OwnedFd, unix::fs::FileTypeExt},
    sync::{Arc, atomic::Ordering},
};

use base::{Access, Mapping, memfd};

use super::window::{Impossible, Window};

/// Why a window cannot be created or mapped.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The sizes are impossible.
    #[error(transparent)]
    Impossible(#[from] Impossible),
    /// The file is smaller than its owner says.
    #[error("the window's file has {actual} bytes and not the {claimed} that were announced")]
    Truncated {
        /// Size of the file.
        actual: u64,
        /// Announced size.
        claimed: u64,
    },
    /// The system refused.
    #[error("cannot {what} a window of {size} bytes")]
    System {
        /// The operation that failed.
        what: &'static str,
        /// Size in bytes.
        size: u64,
        /// The cause.
        source: io::Error,
    },
    /// The window had lost its memory when the system refused to give it another one.
    #[error("the window's memory is lost")]
    Lost(#[source] io::Error),
}

/// Creates the file behind a window. Its size is sealed, so that no peer can cause a fault by shortening it.
pub fn create(size: u64) -> Result<OwnedFd, Error> {
    let failed = |source| Error::System {
        what: "create",
        size,
        source,
    };
    Ok(memfd::sealed(c"gantry-window", size)
        .map_err(failed)?
        .into())
}

/// Maps a range of a file for reading and writing.
pub(super) fn map(file: &OwnedFd, offset: u64, size: u64) -> Result<Mapping, Error> {
    let failed = |what, source| Error::System { what, size, source };
    let file_of = file
        .try_clone()
        .and_then(|file| File::from(file).metadata())
        .map_err(|source| failed("look at", source))?;
    let (actual, claimed) = (file_of.len(), offset.saturating_add(size));
    // The system reports no length for a device.
    if actual < claimed && !file_of.file_type().is_char_device() {
        return Err(Error::Truncated { actual, claimed });
    }
    Mapping::shared(file, offset, size as usize, Access::ReadWrite)
        .map_err(|source| failed("map", source))
}

impl Window {
    /// Maps a window whose rings have `ring` bytes each.
    pub fn map(file: &OwnedFd, size: u64, ring: u64) -> Result<Arc<Self>, Error> {
        Self::new(file, 0, size, ring, false)
    }

    /// Same as [`map`](Self::map), at an address that this process has reserved for it: replaces whatever is mapped
    /// there.
    ///
    /// # Safety
    /// Nobody relies on what is mapped there.
    pub unsafe fn map_at(
        file: &OwnedFd,
        size: u64,
        ring: u64,
        at: u64,
    ) -> Result<Arc<Self>, Error> {
        Self::check(size, ring)?;
        let mut mapping = map(file, 0, size)?;
        // SAFETY: as the caller says.
        let moved = unsafe { mapping.move_to(at as usize) };
        let source = |source| Error::System {
            what: "move",
            size,
            source,
        };
        moved.map_err(source)?;
        Ok(Self::mapped(mapping, ring, false))
    }

    /// Moves a window that has no other owner to an address where nothing is mapped. If something is mapped there, the
    /// window stays where it is.
    pub fn moved(mut window: Arc<Self>, at: u64) -> Arc<Self> {
        let Some(own) = Arc::get_mut(&mut window) else {
            return window;
        };
        let flags = libc::MAP_PRIVATE
            | libc::MAP_ANONYMOUS
            | libc::MAP_NORESERVE
            | libc::MAP_FIXED_NOREPLACE;
        // SAFETY: new addresses only; nothing that is mapped is replaced.
        let kept = unsafe {
            libc::mmap(
                at as *mut _,
                own.size as usize,
                libc::PROT_NONE,
                flags,
                -1,
                0,
            )
        };
        if kept as u64 == at
            && let Some(mapping) = &mut own.mapping
        {
            // SAFETY: the range was reserved just now.
            if unsafe { mapping.move_to(at as usize) }.is_ok() {
                own.base = mapping.start();
            }
        }
        window
    }

    /// Maps a slice of an accelerator port's window, starting at `offset`. The guest's kernel maps it write-combining,
    /// and some processors do reorder such writes: fences enforce every ordering that the rings rely on.
    pub fn map_slice(
        file: &OwnedFd,
        offset: u64,
        size: u64,
        ring: u64,
    ) -> Result<Arc<Self>, Error> {
        Self::new(file, offset, size, ring, true)
    }

    /// Maps a window that begins at `offset` of a file, or of a device with memory.
    pub fn map_at_offset(
        file: &OwnedFd,
        offset: u64,
        size: u64,
        ring: u64,
    ) -> Result<Arc<Self>, Error> {
        Self::new(file, offset, size, ring, false)
    }

    fn new(
        file: &OwnedFd,
        offset: u64,
        size: u64,
        ring: u64,
        weak: bool,
    ) -> Result<Arc<Self>, Error> {
        Self::check(size, ring)?;
        Ok(Self::mapped(map(file, offset, size)?, ring, weak))
    }

    /// Maps the pages of a range of the data at once, where the kernel can. This takes a sixth of the time of faulting
    /// them in one by one.
    pub fn populate(&self, offset: u64, length: u64) {
        if let Some(start) = self.at(offset, length) {
            let inside = start as usize % 4096;
            // SAFETY: the pages are within the mapping (which starts at a page boundary), and populating them has no
            // visible effect on their contents.
            unsafe {
                libc::madvise(
                    start.wrapping_sub(inside).cast(),
                    length as usize + inside,
                    libc::MADV_POPULATE_WRITE,
                );
            }
        }
    }

    /// Replaces this window's memory by a range of another file, starting at `offset`; the window's addresses stay.
    /// Concurrent accesses see either memory; rings must be taken anew afterwards. `weak` as for a port's window
    /// ([`map_slice`](Self::map_slice)).
    ///
    /// # Errors
    /// The file is too short, the kernel refuses, or the memory is not this window's own mapping. After
    /// [`Error::Lost`], private zeroes are in the window's place; after any other error it is unchanged.
    pub fn replace(&self, file: &OwnedFd, offset: u64, weak: bool) -> Result<(), Error> {
        let failed = |source| Error::System {
            what: "replace",
            size: self.size,
            source,
        };
        let own = self.mapping.as_ref();
        let own = own.ok_or_else(|| failed(io::ErrorKind::Unsupported.into()))?;
        let other = map(file, offset, self.size)?;
        if let Err(error) = own.replace_by(other) {
            // The kernel may have unmapped the old memory: nothing else may be mapped at these addresses.
            own.detach();
            return Err(Error::Lost(error));
        }
        self.weak.store(weak, Ordering::Relaxed);
        Ok(())
    }

    /// Keeps the window from children that this process forks: a child must not use its parent's rings. Of a device's
    /// memory only the rings are kept from them, since what is kept stays so.
    pub fn keep_from_children(&self) {
        if let Some(mapping) = &self.mapping {
            let length = if self.weak.load(Ordering::Relaxed) {
                self.data() as usize
            } else {
                mapping.len()
            };
            // A child that has the rings does not use them, either.
            let _ = mapping.inherit(0, length, false);
        }
    }

    /// Lets children inherit a range of the data (whole pages), which they then share with this process.
    pub fn let_children_inherit(&self, offset: u64, length: u64) {
        if self.weak.load(Ordering::Relaxed) || self.at(offset, length).is_none() {
            return;
        }
        if let Some(mapping) = &self.mapping {
            let _ = mapping.inherit(offset as usize, length as usize, true);
        }
    }

    /// Called in a child that inherits the data of its parent's window and has no pointer to it: frees its addresses.
    /// Does nothing where [`keep_from_children`](Self::keep_from_children) has left no data to a child.
    ///
    /// # Safety
    /// Nobody accesses the window in this process, ever again.
    pub unsafe fn leave_to_parent(&self) {
        if self.weak.load(Ordering::Relaxed) && self.mapping.is_some() {
            let (start, length) = (self.data(), self.size - self.data());
            // SAFETY: within the mapping, which is inherited as a whole but for the rings; the caller's promise.
            unsafe { libc::munmap(self.base.add(start as usize).cast(), length as usize) };
        }
    }

    /// Replaces the window's memory by private memory, for threads that may still access it after the device behind it
    /// has gone. Does nothing if the memory is not this window's own mapping.
    pub fn retire(&self) {
        if let Some(mapping) = &self.mapping {
            mapping.detach();
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::window::{REPLY, SMALLEST};
    use remoting_proto::wire::hello;

    #[test]
    fn places_outside_of_the_data_are_no_places() {
        let window = Window::map(&create(SMALLEST).unwrap(), SMALLEST, 1 << 16).unwrap();
        assert!(window.at(window.data(), 16).is_some());
        assert!(window.at(window.data() - 1, 16).is_none());
        assert!(window.at(SMALLEST - 15, 16).is_none());
        assert!(window.at(u64::MAX - 3, 16).is_none());
    }

    #[test]
    fn a_window_whose_file_is_too_short_is_refused() {
        let file = create(SMALLEST).unwrap();
        assert!(matches!(
            Window::map(&file, 2 * SMALLEST, 1 << 16),
            Err(Error::Truncated { .. })
        ));
    }

    #[test]
    fn a_slice_has_its_place_in_the_file_and_ends_with_it() {
        let file = create(2 * SMALLEST).unwrap();
        let second = Window::map_slice(&file, SMALLEST, SMALLEST, 1 << 16).unwrap();
        second.reply(&[7; hello::SIZE]);
        let whole = Window::map(&file, 2 * SMALLEST, 1 << 16).unwrap();
        let at = whole.at(SMALLEST + REPLY, 1).unwrap();
        // SAFETY: within the mapping.
        assert_eq!(unsafe { at.read() }, 7);
        for offset in [SMALLEST + 4096, u64::MAX - 4095] {
            assert!(Window::map_slice(&file, offset, SMALLEST, 1 << 16).is_err());
        }
    }

    #[test]
    fn a_window_gets_other_memory_at_its_own_address() {
        let (first, second) = (create(SMALLEST).unwrap(), create(2 * SMALLEST).unwrap());
        let window = Window::map(&first, SMALLEST, 1 << 16).unwrap();
        let at = window.at(window.data(), 8).unwrap();
        // SAFETY: within the window, here and below.
        unsafe { at.write_volatile(1) };
        let short = window.replace(&second, 2 * SMALLEST, true);
        assert!(matches!(short, Err(Error::Truncated { .. })));
        window.replace(&second, SMALLEST, true).unwrap();
        assert_eq!(window.at(window.data(), 8), Some(at));
        // SAFETY: as above.
        unsafe {
            assert_eq!(at.read_volatile(), 0);
            at.write_volatile(2);
        }
        let there = Window::map_slice(&second, SMALLEST, SMALLEST, 1 << 16).unwrap();
        // SAFETY: as above.
        assert_eq!(unsafe { there.at(there.data(), 8).unwrap().read() }, 2);
    }

    #[test]
    fn a_child_has_of_a_window_only_what_it_is_let_inherit() {
        const BLOCK: u64 = 2 << 20;
        let file = create(4 * SMALLEST).unwrap();
        for weak in [false, true] {
            let window = Window::new(&file, 0, 4 * SMALLEST, 1 << 16, weak).unwrap();
            window.keep_from_children();
            window.let_children_inherit(window.data() + BLOCK, BLOCK);
            window.let_children_inherit(u64::MAX - BLOCK, BLOCK);
            let start = window.at(window.data(), 0).unwrap();
            let places = [
                start.wrapping_sub(window.data() as usize),
                start,
                start.wrapping_add(BLOCK as usize),
                start.wrapping_add(2 * BLOCK as usize),
            ];
            // SAFETY: the child only makes system calls.
            let child = unsafe { libc::fork() };
            if child == 0 {
                let mut seen = 0u8;
                let has = places.map(|at| {
                    // SAFETY: one entry, for a page that may be missing.
                    i32::from(unsafe { libc::mincore(at.cast(), 4096, &raw mut seen) } == 0)
                });
                let told = has.iter().fold(0, |told, has| told << 1 | has);
                // SAFETY: ends the child without running anything else.
                unsafe { libc::_exit(told) };
            }
            let mut status = 0;
            // SAFETY: a local.
            unsafe { libc::waitpid(child, &raw mut status, 0) };
            assert!(libc::WIFEXITED(status));
            // Of a device's memory, the rings are kept from it.
            let expected = if weak { 0b0111 } else { 0b0010 };
            assert_eq!(libc::WEXITSTATUS(status), expected, "{weak}");
        }
    }

    #[test]
    fn the_file_cannot_be_shortened_by_a_peer() {
        let file = create(SMALLEST).unwrap();
        assert!(File::from(file).set_len(4096).is_err());
    }
}
