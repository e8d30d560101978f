//! Telling a process from the children that it forks.

use std::{
    io, ptr,
    sync::atomic::{AtomicPtr, AtomicU32, Ordering},
};

/// The page of all marks that are not set.
static UNSET: AtomicU32 = AtomicU32::new(NOT_SET);

/// What the kernel leaves of a mark in a child.
const WIPED: u32 = 0;
const NOT_SET: u32 = 1;
const OWN: u32 = 2;
/// The kernel does not wipe pages: the next word is the owner's process ID.
const BY_ID: u32 = 3;

/// A mark that a process sets and that no child of it has, however the child was made: fork(2), a
/// raw clone(2), or fork in a signal handler. A child that shares this process's memory until it
/// executes a program (vfork(2), posix_spawn(3)) has the mark.
///
/// Queries cost two loads, take no lock, and may be made in a signal handler and in a child of a
/// process with several threads.
#[derive(Debug)]
pub struct Mark(AtomicPtr<AtomicU32>);

impl Default for Mark {
    fn default() -> Self {
        Self::new()
    }
}

impl Mark {
    /// A mark that is not set.
    pub const fn new() -> Self {
        Self(AtomicPtr::new((&raw const UNSET).cast_mut()))
    }

    #[inline]
    fn word(&self) -> (*mut AtomicU32, u32) {
        let page = self.0.load(Ordering::Acquire);
        // SAFETY: the page of a mark is never unmapped.
        (page, unsafe { (*page).load(Ordering::Relaxed) })
    }

    /// Whether this process has set the mark.
    #[inline]
    pub fn is_own(&self) -> bool {
        match self.word() {
            (_, OWN) => true,
            (page, BY_ID) => is_owner(page),
            _ => false,
        }
    }

    /// Whether a process from which this one was forked has set the mark, and this one has not.
    #[inline]
    pub fn is_inherited(&self) -> bool {
        match self.word() {
            (_, WIPED) => true,
            (page, BY_ID) => !is_owner(page),
            _ => false,
        }
    }

    /// Sets the mark for this process. Allocates a page the first time.
    ///
    /// # Errors
    /// There is no memory for the page.
    pub fn set(&self) -> io::Result<()> {
        let before = self.0.load(Ordering::Acquire);
        if self.is_own() {
            return Ok(());
        }
        let page = page()?;
        let (good, bad) = (Ordering::AcqRel, Ordering::Acquire);
        if self.0.compare_exchange(before, page, good, bad).is_err() {
            // Another thread has set it.
            // SAFETY: this page, to which nobody has a pointer.
            unsafe { libc::munmap(page.cast(), PAGE) };
        }
        Ok(())
    }

    /// Clears the mark for this process and the children that it forks from now on. A page stays
    /// allocated.
    pub fn clear(&self) {
        self.0
            .store((&raw const UNSET).cast_mut(), Ordering::Release);
    }
}

const PAGE: usize = 4096;

/// Maps a page that says that this process is the owner.
fn page() -> io::Result<*mut AtomicU32> {
    let (access, flags) = (
        libc::PROT_READ | libc::PROT_WRITE,
        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
    );
    // SAFETY: a new mapping at an address of the kernel's choice.
    let page = unsafe { libc::mmap(ptr::null_mut(), PAGE, access, flags, -1, 0) };
    if page == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the page was just mapped, has room for two words, and is aligned for them.
    unsafe {
        let words = page.cast::<AtomicU32>();
        // Linux 4.14.
        let is_wiped = libc::madvise(page, PAGE, libc::MADV_WIPEONFORK) == 0;
        (*words.add(1)).store(std::process::id(), Ordering::Relaxed);
        (*words).store(if is_wiped { OWN } else { BY_ID }, Ordering::Relaxed);
        Ok(words)
    }
}

#[cold]
fn is_owner(page: *mut AtomicU32) -> bool {
    // SAFETY: a page with two words, which is never unmapped.
    unsafe { (*page.add(1)).load(Ordering::Relaxed) == std::process::id() }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a child finds, whose exit status is the answer's.
    fn in_child(make: impl FnOnce() -> libc::pid_t, ask: impl FnOnce() -> i32) -> i32 {
        let child = make();
        if child == 0 {
            let answer = ask();
            // SAFETY: ends the child without running anything else.
            unsafe { libc::_exit(answer) };
        }
        let mut status = 0;
        // SAFETY: a local.
        let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!(waited, child, "{}", io::Error::last_os_error());
        assert!(libc::WIFEXITED(status));
        libc::WEXITSTATUS(status)
    }

    fn told(mark: &Mark) -> i32 {
        i32::from(mark.is_own()) | i32::from(mark.is_inherited()) << 1
    }

    fn forked() -> libc::pid_t {
        // SAFETY: the children call nothing that takes a lock.
        unsafe { libc::fork() }
    }

    fn cloned() -> libc::pid_t {
        // SAFETY: as above; no new stack: the child continues on a copy of this one.
        unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) as libc::pid_t }
    }

    #[test]
    fn a_child_and_its_child_are_told_from_the_process() {
        static MARK: Mark = Mark::new();
        assert_eq!(told(&MARK), 0);
        assert_eq!(in_child(forked, || told(&MARK)), 0);
        MARK.set().unwrap();
        assert_eq!(told(&MARK), 1);
        assert_eq!(in_child(forked, || told(&MARK)), 2);
        assert_eq!(in_child(cloned, || told(&MARK)), 2);
        let grandchild = in_child(forked, || in_child(forked, || told(&MARK)));
        assert_eq!(grandchild, 2);
        MARK.set().unwrap();
        assert_eq!(told(&MARK), 1);
    }

    #[test]
    fn a_child_may_set_the_mark_for_itself() {
        static MARK: Mark = Mark::new();
        MARK.set().unwrap();
        let both = in_child(forked, || {
            MARK.set()
                .map_or(99, |()| told(&MARK) | in_child(forked, || told(&MARK)) << 2)
        });
        assert_eq!((both, told(&MARK)), (1 | 2 << 2, 1));
    }

    #[test]
    fn a_mark_that_was_cleared_is_nobodys() {
        static MARK: Mark = Mark::new();
        MARK.set().unwrap();
        MARK.clear();
        assert_eq!(told(&MARK), 0);
        assert_eq!(in_child(forked, || told(&MARK)), 0);
    }

    #[test]
    fn a_kernel_that_wipes_no_pages_is_replaced_by_process_ids() {
        let page = page().unwrap();
        // SAFETY: the page's word.
        unsafe { (*page).store(BY_ID, Ordering::Relaxed) };
        // SAFETY: the page's advice, taken back.
        unsafe { libc::madvise(page.cast(), PAGE, libc::MADV_KEEPONFORK) };
        let mark = Mark(AtomicPtr::new(page));
        assert_eq!(told(&mark), 1);
        assert_eq!(in_child(forked, || told(&mark)), 2);
    }
}
