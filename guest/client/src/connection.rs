//! A process's connection, which its children do not have.
//!
//! A child that is forked has a copy of everything that its parent's driver keeps, locks that other
//! threads held included, but shares the worker's end of the rings: a call of the child would be
//! taken for one of the parent's. So the child never uses its parent's connection:
//!
//! | the parent | its child |
//! |---|---|
//! | has not connected | connects when it needs to |
//! | has connected, and the program has nothing from it ([`Connection::start`]) | connects anew |
//! | has started | every call fails with [`Driver::FORKED`], before it takes a lock |
//!
//! The window's rings, and what of its data the program has no pointer to, are not mapped in the
//! child ([`Link::hand_out`](crate::Link::hand_out)). Its copies of the connection's descriptors are
//! never used: a worker ends when the last copy is closed, as a device's memory is freed natively.

use std::{
    io, ptr,
    sync::{
        OnceLock,
        atomic::{AtomicPtr, Ordering},
    },
};

use base::fork::Mark;

use crate::{driver::Driver, link::Link};

/// A process's connection: not tried yet, failed, or established until the process ends.
pub struct Connection<D: Driver> {
    /// Set while the program has something that only this process's worker knows.
    started: Mark,
    /// What this process has tried, or the process that it was forked from. Never freed.
    tried: AtomicPtr<Tried<D>>,
}

/// The connection of one process.
struct Tried<D: Driver> {
    by: Mark,
    link: OnceLock<Option<Link<D>>>,
}

impl<D: Driver> Default for Connection<D> {
    fn default() -> Self {
        Self::new()
    }
}

impl<D: Driver> Connection<D> {
    /// A connection that has not been tried yet.
    pub const fn new() -> Self {
        Self {
            started: Mark::new(),
            tried: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// Called before the program gets anything from the connection: from here on, children cannot
    /// use the API.
    ///
    /// # Errors
    /// There is no memory for a page.
    pub fn start(&self) -> io::Result<()> {
        self.started.set()
    }

    /// Called if the program has not got anything from the connection after all.
    pub fn stop(&self) {
        self.started.clear();
    }

    /// Whether this process has started. Costs two loads.
    #[inline]
    pub fn is_started(&self) -> bool {
        self.started.is_own()
    }

    /// Whether this process was forked from one that has started: it cannot use the API, and must not
    /// take any lock of the driver's. Costs two loads.
    #[inline]
    pub fn is_forked(&self) -> bool {
        self.started.is_inherited()
    }

    fn known(&self) -> Option<&'static Tried<D>> {
        // SAFETY: null, or allocated by `tried` and never freed.
        unsafe { self.tried.load(Ordering::Acquire).as_ref() }
    }

    /// What this process has tried. None if there is no memory.
    fn tried(&self) -> Option<&'static Tried<D>> {
        loop {
            let before = self.known();
            if let Some(own) = before.filter(|known| known.by.is_own()) {
                return Some(own);
            }
            let by = Mark::new();
            by.set().ok()?;
            let link = OnceLock::new();
            let new = Box::into_raw(Box::new(Tried { by, link }));
            let old = before.map_or(ptr::null_mut(), |known| ptr::from_ref(known).cast_mut());
            let (good, bad) = (Ordering::AcqRel, Ordering::Acquire);
            if self.tried.compare_exchange(old, new, good, bad).is_err() {
                // Another thread was first.
                // SAFETY: allocated above, and known to nobody else.
                drop(unsafe { Box::from_raw(new) });
            } else if let Some(Some(parents)) = before.and_then(|known| known.link.get()) {
                // SAFETY: the parent has not started, so that nobody has a pointer to its window, and
                // none of its threads that use it are in this process.
                unsafe { parents.window.leave_to_parent() };
            }
        }
    }

    /// The connection, which `open` establishes on first use in this process. None if there is no
    /// worker, or if this process [is forked](Self::is_forked) from one that has started.
    #[inline]
    pub fn get_or_init(&self, open: impl FnOnce() -> Option<Link<D>>) -> Option<&'static Link<D>> {
        if self.is_forked() {
            return None;
        }
        self.tried()?.link.get_or_init(open).as_ref()
    }

    /// Whether this process has tried to connect, and there is no worker.
    pub fn has_failed(&self) -> bool {
        let own = self.known().filter(|known| known.by.is_own());
        own.is_some_and(|own| matches!(own.link.get(), Some(None)))
    }

    /// The connection, if this process has established it.
    pub fn get(&self) -> Option<&'static Link<D>> {
        self.known()
            .filter(|known| known.by.is_own())?
            .link
            .get()?
            .as_ref()
    }

    /// The connection of the process that this one was forked from, until this one tries its own: whether or not that
    /// has started, blocks that were allocated in its window are here.
    pub(crate) fn of_parent(&self) -> Option<&'static Link<D>> {
        self.known()
            .filter(|known| !known.by.is_own())?
            .link
            .get()?
            .as_ref()
    }

    /// The connection, once the attempt to establish it has ended.
    pub(crate) fn wait(&self) -> Option<&'static Link<D>> {
        self.tried()?.link.wait().as_ref()
    }
}
