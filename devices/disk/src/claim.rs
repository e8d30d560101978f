//! Locks of images that a thread opens at the speed of their storage, and that nobody may want any more before it is done.
//!
//! ```text
//!   Unlocked ──> Locking ──> Reads <──> Writes
//!      ^                       │ nobody wants the image any more: another thread unlocks it,
//!      └───────────────────────┘ however long the thread that opens it waits for storage
//! ```
//!
//! An image that is being written to stays locked until that is over: nobody else may use it before.

use std::{
    path::Path,
    sync::{Arc, Condvar, Mutex, PoisonError, Weak},
    time::Duration,
};

use base::Unpoisoned;

use super::{error::DiskError, lock::Lock};

/// Claims that were given up while their image was locked, or about to be.
static GIVEN_UP: Mutex<Vec<Weak<Claim>>> = Mutex::new(Vec::new());

/// One of these claims has let go of its image, or another claim was given up.
static CHANGED: Condvar = Condvar::new();

/// Somebody's wish to have an image open, and its lock.
///
/// No claim is locked by a thread that waits for storage.
#[derive(Default)]
pub struct Claim {
    state: Mutex<State>,
    /// Its thread waits for no other claim: the image is in use elsewhere then.
    is_impatient: bool,
}

#[derive(Default)]
struct State {
    is_given_up: bool,
    held: Held,
}

#[derive(Default)]
enum Held {
    #[default]
    Unlocked,
    /// The file's lock is being taken, or released.
    Locking(Arc<Lock>),
    /// It is locked, and nothing changes it.
    Reads(Arc<Lock>),
    /// It is locked, and being changed.
    Writes(Arc<Lock>),
}

impl Held {
    fn lock(&self) -> Option<&Arc<Lock>> {
        match self {
            Self::Unlocked => None,
            Self::Locking(lock) | Self::Reads(lock) | Self::Writes(lock) => Some(lock),
        }
    }
}

impl Claim {
    /// A claim that waits for no other one.
    pub(super) fn impatient() -> Self {
        Self {
            is_impatient: true,
            ..Self::default()
        }
    }

    /// Records that nobody wants the image any more. The thread that opens it neither locks nor changes it from now on.
    /// Does not wait for storage.
    pub fn give_up(self: &Arc<Self>) {
        let is_held = {
            let mut state = self.state.lock_unpoisoned();
            state.is_given_up = true;
            state.held.lock().is_some()
        };
        let mut all = GIVEN_UP.lock_unpoisoned();
        all.retain(|claim| claim.strong_count() > 0);
        if is_held {
            all.push(Arc::downgrade(self));
        }
        // It may be waiting itself.
        CHANGED.notify_all();
    }

    /// Unlocks the image, unless it is being changed: then the thread that does this will unlock it. Takes as long as the
    /// storage likes.
    pub fn release(&self) {
        let lock = {
            let mut state = self.state.lock_unpoisoned();
            let Held::Reads(lock) = &state.held else {
                return;
            };
            let lock = Arc::clone(lock);
            state.held = Held::Locking(Arc::clone(&lock));
            lock
        };
        if let Err(error) = lock.release() {
            // Closing the image, which follows, unlocks it, too.
            log::warn!("the lock of a disk image cannot be released: {error}");
        }
        self.let_go();
    }

    /// Fails if nobody wants the image any more.
    pub(super) fn wanted(&self) -> Result<(), DiskError> {
        match self.state.lock_unpoisoned().is_given_up {
            true => Err(DiskError::Unwanted),
            false => Ok(()),
        }
    }

    /// Locks the image. If it is still locked by a claim of this process that was given up, waits for the end of that.
    pub(super) fn lock(&self, lock: &Arc<Lock>, path: &Path) -> Result<(), DiskError> {
        self.await_others(lock)?;
        {
            let mut state = self.state.lock_unpoisoned();
            if state.is_given_up {
                return Err(DiskError::Unwanted);
            }
            state.held = Held::Locking(Arc::clone(lock));
        }
        let taken = lock.take(path);
        match &taken {
            Ok(()) => self.state.lock_unpoisoned().held = Held::Reads(Arc::clone(lock)),
            Err(_) => self.let_go(),
        }
        taken.and_then(|()| self.wanted())
    }

    fn await_others(&self, lock: &Lock) -> Result<(), DiskError> {
        /// Interval for looking at claims: a claim that is dropped sends no notification.
        const LOOK: Duration = Duration::from_millis(100);
        let is_locked = |claim: &Arc<Self>| {
            let state = claim.state.lock_unpoisoned();
            state.held.lock().is_some_and(|held| held.is_of(lock))
        };
        loop {
            self.wanted()?;
            let all: Vec<Arc<Self>> = {
                let all = GIVEN_UP.lock_unpoisoned();
                all.iter().filter_map(Weak::upgrade).collect()
            };
            if self.is_impatient || !all.iter().any(is_locked) {
                return Ok(());
            }
            // The last reference to a claim closes its file, which may take long.
            drop(all);
            let waited = CHANGED.wait_timeout(GIVEN_UP.lock_unpoisoned(), LOOK);
            drop(waited.unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// Does something that may change the image, unless nobody wants it any more.
    pub(super) fn change<T>(&self, change: impl FnOnce() -> T) -> Result<T, DiskError> {
        let switch = |state: &mut State, to: fn(Arc<Lock>) -> Held| {
            if let Some(lock) = state.held.lock().cloned() {
                state.held = to(lock);
            }
        };
        {
            let mut state = self.state.lock_unpoisoned();
            if state.is_given_up {
                return Err(DiskError::Unwanted);
            }
            switch(&mut state, Held::Writes);
        }
        let changed = change();
        switch(&mut self.state.lock_unpoisoned(), Held::Reads);
        self.wanted().map(|()| changed)
    }

    fn let_go(&self) {
        self.state.lock_unpoisoned().held = Held::Unlocked;
        // Whoever waits has looked at this claim either before, and is woken, or after that.
        drop(GIVEN_UP.lock_unpoisoned());
        CHANGED.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, path::PathBuf, sync::mpsc, thread};

    use super::*;
    use crate::{Disk, DiskOptions, ImageType, LockGranularity};

    fn options(path: PathBuf) -> DiskOptions {
        DiskOptions {
            path,
            read_only: false,
            direct: false,
            image_type: ImageType::Raw,
            logical_block: None,
            backing_files: false,
            sparse: true,
            lock_granularity: LockGranularity::ByteRange,
            lock_later: false,
            io_uring: false,
        }
    }

    /// An image that is open, with its claim, and how another thread opens it.
    fn open() -> (
        tempfile::TempDir,
        Disk,
        Arc<Claim>,
        mpsc::Receiver<Result<Disk, DiskError>>,
    ) {
        let dir = tempfile::tempdir().unwrap();
        let options = options(dir.path().join("disk"));
        fs::write(&options.path, [0; 4096]).unwrap();
        let claim = Arc::<Claim>::default();
        let disk = Disk::open_for(&options, &claim).unwrap();
        let locked = Disk::open(&options);
        assert!(matches!(locked, Err(DiskError::Locked { .. })));
        claim.give_up();
        let (sender, opened) = mpsc::channel();
        thread::spawn(move || {
            let again = Arc::<Claim>::default();
            sender.send(Disk::open_for(&options, &again)).unwrap();
        });
        (dir, disk, claim, opened)
    }

    #[test]
    fn who_opens_an_image_waits_for_a_claim_that_was_given_up() {
        let (_dir, _disk, claim, opened) = open();
        let waits = opened.recv_timeout(Duration::from_millis(50));
        assert!(waits.is_err(), "it is still locked");
        claim.release();
        let again = opened.recv().unwrap();
        assert!(again.is_ok(), "{:?}", again.err());
    }

    #[test]
    fn an_image_that_is_changed_stays_locked_until_that_is_over() {
        let dir = tempfile::tempdir().unwrap();
        let options = options(dir.path().join("disk"));
        fs::write(&options.path, [0; 4096]).unwrap();
        let claim = Arc::<Claim>::default();
        let _disk = Disk::open_for(&options, &claim).unwrap();
        let is_locked = || matches!(Disk::open(&options), Err(DiskError::Locked { .. }));
        let changed = claim.change(|| {
            claim.give_up();
            claim.release();
            assert!(is_locked());
        });
        assert!(matches!(changed, Err(DiskError::Unwanted)));
        assert!(is_locked());
        claim.release();
        assert!(!is_locked());
        let changed = claim.change(|| unreachable!("nobody wants it"));
        assert!(matches!(changed, Err(DiskError::Unwanted)));
    }

    #[test]
    fn a_claim_that_is_given_up_waits_for_no_other_one() {
        let (dir, _disk, _claim, opened) = open();
        let waiting = Arc::<Claim>::default();
        let (again, options) = (Arc::clone(&waiting), options(dir.path().join("disk")));
        let waits = thread::spawn(move || Disk::open_for(&options, &again));
        thread::sleep(Duration::from_millis(20));
        waiting.give_up();
        let given_up = waits.join().unwrap();
        assert!(matches!(given_up, Err(DiskError::Unwanted)));
        assert!(opened.try_recv().is_err(), "the other one waits on");
    }
}
