//! Interrupts by the port's line, for guests whose kernels give no program message-signalled ones.
//!
//! ```text
//!   worker ── the slice's eventfd ──> Service ── note ──> rung ── assert ──> guest's kernel
//!                                                          └──── take ─────> agent
//! ```
//!
//! KVM takes the workers' eventfds while MSI-X is on. While it is off, and the agent wants the line,
//! the service does. The status register says that a slice is noted (PCI 3.0, 6.2.3), which is what
//! `uio_pci_generic` looks at before it takes an interrupt for its own; it sets the interrupt-disable
//! bit then, and the agent clears it when it has taken the notes.

use std::{
    io,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
};

use base::Unpoisoned;
use pci::{Bdf, Line, Lines, line_of};
use vmm_sys_util::eventfd::EventFd;

/// The line, and what somebody is to look at.
///
/// Whoever makes the line due (a note, the agent that wants it, the disable bit that is cleared, the
/// machine's line that is joined) looks afterwards at what the others have done: in one order of all of
/// these, the last one asserts.
#[derive(Default)]
pub struct PortLine {
    /// The agent takes interrupts from it.
    wanted: AtomicBool,
    /// The guest's command register forbids it.
    disabled: AtomicBool,
    /// A bit for each slice whose worker has rung.
    rung: AtomicU64,
    /// Whether a slice's state has changed.
    changed: AtomicBool,
    /// How often it was asserted.
    asserted: AtomicU64,
    /// How often a worker has rung.
    rings: AtomicU64,
    joined: Mutex<Option<Joined>>,
}

struct Joined {
    line: Box<dyn Line>,
    /// For who waits for it; it may be left meanwhile.
    served: Arc<EventFd>,
}

impl PortLine {
    /// Connects with the machine's line of a slot, if that is not done.
    pub fn join(&self, lines: &dyn Lines, slot: Bdf) -> io::Result<()> {
        let mut joined = self.lock();
        if joined.is_none() {
            let line = lines.join(line_of(slot))?;
            let served = Arc::new(line.served().try_clone()?);
            *joined = Some(Joined { line, served });
        }
        drop(joined);
        self.update();
        Ok(())
    }

    /// Leaves the machine's line, which this port does not assert any more.
    pub fn leave(&self) {
        *self.lock() = None;
    }

    /// Whether the agent takes interrupts from it. What was noted before is forgotten.
    pub fn want(&self, wanted: bool) {
        self.rung.store(0, SeqCst);
        self.changed.store(false, SeqCst);
        self.wanted.store(wanted, SeqCst);
        self.update();
    }

    /// Whether the agent takes interrupts from it.
    pub fn is_wanted(&self) -> bool {
        self.wanted.load(SeqCst)
    }

    /// What is noted, for a snapshot: slices whose workers have rung, and whether a state has changed.
    pub fn noted(&self) -> (u64, bool) {
        (self.rung.load(SeqCst), self.changed.load(SeqCst))
    }

    /// Takes over what was noted when the port was saved.
    pub fn renote(&self, (rung, changed): (u64, bool)) {
        self.rung.store(rung, SeqCst);
        self.changed.store(changed, SeqCst);
        self.update();
    }

    /// What the guest's command register says.
    pub fn disable(&self, disabled: bool) {
        if self.disabled.swap(disabled, SeqCst) && !disabled {
            self.update();
        }
    }

    /// Notes that a slice's worker has rung. `slice` is below 64.
    pub fn note(&self, slice: usize) {
        self.rings.fetch_add(1, SeqCst);
        self.rung.fetch_or(1 << slice, SeqCst);
        self.update();
    }

    /// Notes that a slice's state has changed.
    pub fn note_change(&self) {
        self.changed.store(true, SeqCst);
        self.update();
    }

    /// Takes the note that a state has changed. Who looks at states looks after that.
    pub fn take_change(&self) {
        self.changed.store(false, SeqCst);
    }

    /// Takes the notes of the slices 0 to 31 (`half` 0) or 32 to 63 (1).
    pub fn take(&self, half: u32) -> u32 {
        let shift = 32 * (half & 1);
        let half = u64::from(u32::MAX) << shift;
        // Cut to the half.
        ((self.rung.fetch_and(!half, SeqCst) & half) >> shift) as u32
    }

    /// Whether something is noted: the status register's interrupt bit.
    pub fn is_due(&self) -> bool {
        self.is_wanted() && (self.rung.load(SeqCst) != 0 || self.changed.load(SeqCst))
    }

    /// What becomes readable when the guest has served an interrupt. The line is not asserted then:
    /// [`Self::update`] is to follow.
    pub fn served(&self) -> Option<Arc<EventFd>> {
        let joined = self.lock();
        joined.as_ref().map(|joined| Arc::clone(&joined.served))
    }

    /// Asserts the line if it is due.
    pub fn update(&self) {
        if !self.is_due() || self.disabled.load(SeqCst) {
            return;
        }
        if let Some(joined) = &*self.lock() {
            // Fails only if the counter is full: then it is asserted.
            let _ = joined.line.assert().write(1);
            self.asserted.fetch_add(1, SeqCst);
        }
    }

    /// How often it was asserted.
    pub fn asserted(&self) -> u64 {
        self.asserted.load(SeqCst)
    }

    /// How often a worker has rung for a sleeper.
    pub fn rings(&self) -> u64 {
        self.rings.load(SeqCst)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Joined>> {
        self.joined.lock_unpoisoned()
    }
}
