//! Interrupts through the port's line, for guests whose kernels give programs no message-signalled
//! ones.
//!
//! ```text
//!   worker ── the slice's eventfd ──> Service ── note ──> rung ── assert ──> guest's kernel
//!                                                          └──── take ─────> agent
//! ```
//!
//! KVM handles the workers' eventfds while MSI-X is enabled. While it is disabled, and the agent
//! wants the line, the service handles them. The status register indicates that a slice has a note
//! (PCI 3.0, 6.2.3); `uio_pci_generic` checks it before it claims an interrupt. It then sets the
//! interrupt-disable bit, and the agent clears it when it has taken the notes.

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

/// The line, and the notes for the agent.
///
/// Every operation that may make the line due (a note, the agent that wants it, the disable bit
/// that is cleared, the VM's line that is joined) checks the effects of the others afterwards: in
/// any total order of them, the last one asserts the line.
#[derive(Default)]
pub struct PortLine {
    /// The agent uses interrupts from the line.
    wanted: AtomicBool,
    /// The guest's command register disables the line.
    disabled: AtomicBool,
    /// A bit for each slice whose worker has signalled.
    rung: AtomicU64,
    /// Whether a slice's state has changed.
    changed: AtomicBool,
    /// Number of assertions.
    asserted: AtomicU64,
    /// Number of signals from workers.
    rings: AtomicU64,
    joined: Mutex<Option<Joined>>,
}

struct Joined {
    line: Box<dyn Line>,
    /// Shared, because the line may be left while another thread waits for it.
    served: Arc<EventFd>,
}

impl PortLine {
    /// Joins the VM's line for a slot, unless it is already joined.
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

    /// Leaves the VM's line, which this port then does not assert any more.
    pub fn leave(&self) {
        *self.lock() = None;
    }

    /// Sets whether the agent uses interrupts from the line. Discards earlier notes.
    pub fn want(&self, wanted: bool) {
        self.rung.store(0, SeqCst);
        self.changed.store(false, SeqCst);
        self.wanted.store(wanted, SeqCst);
        self.update();
    }

    /// Whether the agent uses interrupts from the line.
    pub fn is_wanted(&self) -> bool {
        self.wanted.load(SeqCst)
    }

    /// The notes, for a snapshot: slices whose workers have signalled, and whether a state has
    /// changed.
    pub fn noted(&self) -> (u64, bool) {
        (self.rung.load(SeqCst), self.changed.load(SeqCst))
    }

    /// Restores the notes from a saved state.
    pub fn renote(&self, (rung, changed): (u64, bool)) {
        self.rung.store(rung, SeqCst);
        self.changed.store(changed, SeqCst);
        self.update();
    }

    /// Sets whether the guest's command register disables the line.
    pub fn disable(&self, disabled: bool) {
        if self.disabled.swap(disabled, SeqCst) && !disabled {
            self.update();
        }
    }

    /// Adds a note that a slice's worker has signalled. `slice` is below 64.
    pub fn note(&self, slice: usize) {
        self.rings.fetch_add(1, SeqCst);
        self.rung.fetch_or(1 << slice, SeqCst);
        self.update();
    }

    /// Adds a note that a slice's state has changed.
    pub fn note_change(&self) {
        self.changed.store(true, SeqCst);
        self.update();
    }

    /// Takes the note that a state has changed. Call it before reading the states.
    pub fn take_change(&self) {
        self.changed.store(false, SeqCst);
    }

    /// Takes the notes of the slices 0 to 31 (`half` 0) or 32 to 63 (1).
    pub fn take(&self, half: u32) -> u32 {
        let shift = 32 * (half & 1);
        let half = u64::from(u32::MAX) << shift;
        // Truncated to the half.
        ((self.rung.fetch_and(!half, SeqCst) & half) >> shift) as u32
    }

    /// Whether there is a note: the interrupt bit of the status register.
    pub fn is_due(&self) -> bool {
        self.is_wanted() && (self.rung.load(SeqCst) != 0 || self.changed.load(SeqCst))
    }

    /// An event that becomes readable when the guest has served an interrupt. The line is
    /// deasserted then: call [`Self::update`].
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
            // Fails only if the counter is full, in which case it is asserted.
            let _ = joined.line.assert().write(1);
            self.asserted.fetch_add(1, SeqCst);
        }
    }

    /// Number of assertions.
    pub fn asserted(&self) -> u64 {
        self.asserted.load(SeqCst)
    }

    /// Number of signals from workers to sleeping applications.
    pub fn rings(&self) -> u64 {
        self.rings.load(SeqCst)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Joined>> {
        self.joined.lock_unpoisoned()
    }
}
