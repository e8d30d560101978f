//! MSI-X: the capability, the vector table and the pending bit array (PCI 3.0, 6.8.2).
//!
//! An unmasked vector is routed to an eventfd of the platform, so that raising it is one atomic
//! load and one write to the eventfd, from any thread. A masked vector is unrouted; raising it
//! takes a lock and sets its pending bit.

use std::{
    io,
    sync::{
        Mutex, MutexGuard, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
};

use base::Unpoisoned;
use device_model::{
    lifecycle::StateError,
    msi::{MsiMessage, MsiVectors},
    shared_event,
};
use serde::{Deserialize, Serialize};

use super::{
    bar::BarIndex,
    config::{ConfigError, ConfigSpace},
};

/// Maximum number of vectors of a function.
pub const MAX_VECTORS: u16 = 2048;
/// Size of a table entry in bytes.
pub const TABLE_ENTRY_SIZE: u64 = 16;

const CAPABILITY_ID: u8 = 0x11;
/// Message control: MSI-X is enabled.
const CONTROL_ENABLE: u16 = 1 << 15;
/// Message control: all vectors are masked.
const CONTROL_FUNCTION_MASK: u16 = 1 << 14;
/// Vector control: this vector is masked.
const VECTOR_MASKED: u32 = 1;

/// What happened to an interrupt.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Delivery {
    /// It was raised.
    Sent,
    /// The vector is masked; it will be raised when the guest unmasks it.
    Pending,
    /// The guest has not enabled MSI-X, or there is no such vector.
    Disabled,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    message: MsiMessage,
    masked: bool,
    pending: bool,
    routed: Option<MsiMessage>,
}

impl Default for Entry {
    fn default() -> Self {
        Self {
            message: MsiMessage::default(),
            // Vectors are masked after a reset (PCI 3.0, 6.8.2.9).
            masked: true,
            pending: false,
            routed: None,
        }
    }
}

struct State {
    enabled: bool,
    function_masked: bool,
    entries: Vec<Entry>,
}

/// A saved table.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct MsixState {
    enabled: bool,
    function_masked: bool,
    entries: Vec<MsixEntryState>,
}

/// A saved table entry.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct MsixEntryState {
    message: MsiMessage,
    masked: bool,
    pending: bool,
}

/// Vector table and pending bits, shared by the BAR, the capability and the threads that raise
/// interrupts.
pub struct MsixTable {
    vectors: OnceLock<Box<dyn MsiVectors>>,
    /// Whether writing a vector's eventfd reaches the guest. Changed only with `state` locked.
    open: Box<[AtomicBool]>,
    state: Mutex<State>,
    /// A failure of the platform is logged once, because the guest can trigger it at will.
    warned: AtomicBool,
}

impl MsixTable {
    /// Creates a table of `count` vectors (1 to [`MAX_VECTORS`]; other values are clamped), all
    /// masked.
    pub fn new(count: u16) -> Self {
        let count = usize::from(count.clamp(1, MAX_VECTORS));
        Self {
            vectors: OnceLock::new(),
            open: (0..count).map(|_| AtomicBool::new(false)).collect(),
            state: Mutex::new(State {
                enabled: false,
                function_masked: false,
                entries: vec![Entry::default(); count],
            }),
            warned: AtomicBool::new(false),
        }
    }

    /// Number of vectors.
    pub fn count(&self) -> u16 {
        // At most MAX_VECTORS.
        self.open.len() as u16
    }

    /// Size of the table in bytes.
    pub fn table_len(&self) -> u64 {
        self.open.len() as u64 * TABLE_ENTRY_SIZE
    }

    /// Size of the pending bit array in bytes.
    pub fn pending_len(&self) -> u64 {
        (self.open.len() as u64).div_ceil(64) * 8
    }

    /// Connects the table to the platform. Only the first call has an effect.
    pub fn attach(&self, vectors: Box<dyn MsiVectors>) {
        let mut state = self.lock();
        if self.vectors.set(vectors).is_ok() {
            self.update_all(&mut state);
        }
    }

    /// Raises `vector`. Costs one atomic load and one write if it is unmasked.
    pub fn trigger(&self, vector: u16) -> io::Result<Delivery> {
        let Some(open) = self.open.get(usize::from(vector)) else {
            return Ok(Delivery::Disabled);
        };
        if open.load(Ordering::Acquire) {
            return self.signal(vector);
        }
        let mut state = self.lock();
        if open.load(Ordering::Acquire) {
            return self.signal(vector);
        }
        if !state.enabled {
            return Ok(Delivery::Disabled);
        }
        state.entries[usize::from(vector)].pending = true;
        Ok(Delivery::Pending)
    }

    /// Raises a vector whose eventfd another process also holds. The eventfd is not written,
    /// because that process may have filled its counter and made it blocking.
    pub fn raise_shared(&self, vector: u16) -> io::Result<()> {
        let mut state = self.lock();
        let enabled = state.enabled;
        let entry = state.entries.get_mut(usize::from(vector));
        let (Some(entry), Some(vectors)) = (entry, self.vectors()) else {
            return Ok(());
        };
        match entry.routed {
            Some(message) => return vectors.raise(vector, message),
            None => entry.pending |= enabled,
        }
        Ok(())
    }

    fn signal(&self, vector: u16) -> io::Result<Delivery> {
        if let Some(irqfd) = self.vectors.get().and_then(|all| all.made_irqfd(vector)) {
            irqfd.write(1)?;
        }
        Ok(Delivery::Sent)
    }

    /// Applies the guest's settings in the message control register.
    pub fn set_control(&self, enabled: bool, function_masked: bool) {
        let mut state = self.lock();
        if state.enabled == enabled && state.function_masked == function_masked {
            return;
        }
        state.enabled = enabled;
        state.function_masked = function_masked;
        if !enabled {
            for entry in &mut state.entries {
                entry.pending = false;
            }
        }
        self.update_all(&mut state);
        if !enabled {
            self.drain();
        }
    }

    /// Whether the guest has enabled MSI-X.
    pub fn is_enabled(&self) -> bool {
        self.lock().enabled
    }

    /// Whether an interrupt of the vector would be delivered now.
    pub fn is_unmasked(&self, vector: u16) -> bool {
        let state = self.lock();
        let entry = state.entries.get(usize::from(vector));
        state.enabled && !state.function_masked && entry.is_some_and(|entry| !entry.masked)
    }

    /// Clears the eventfds: interrupts raised through them and not yet delivered are lost.
    fn drain(&self) {
        for vector in 0..self.count() {
            if let Some(irqfd) = self.vectors().and_then(|all| all.made_irqfd(vector)) {
                // An error means that it was clear. Workers and servers hold it, too.
                let _ = shared_event::take(irqfd);
            }
        }
    }

    /// Returns to the power-on state: masks all vectors, and clears messages and pending bits.
    pub fn reset(&self) {
        let mut state = self.lock();
        state.enabled = false;
        state.function_masked = false;
        for entry in &mut state.entries {
            *entry = Entry {
                routed: entry.routed,
                ..Entry::default()
            };
        }
        self.update_all(&mut state);
        self.drain();
    }

    /// Handles a guest read of the table. Bytes beyond the last entry read as zero.
    pub fn read_table(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        let state = self.lock();
        let within = (offset % TABLE_ENTRY_SIZE) as usize;
        let Some(entry) = entry_at(offset).and_then(|at| state.entries.get(at)) else {
            return;
        };
        let mut bytes = [0; TABLE_ENTRY_SIZE as usize];
        bytes[..8].copy_from_slice(&entry.message.address.to_le_bytes());
        bytes[8..12].copy_from_slice(&entry.message.data.to_le_bytes());
        bytes[12..].copy_from_slice(&u32::from(entry.masked).to_le_bytes());
        for (to, from) in data.iter_mut().zip(&bytes[within..]) {
            *to = *from;
        }
    }

    /// Handles a guest write to the table: 4 or 8 bytes, aligned (6.8.2). Others are dropped.
    pub fn write_table(&self, offset: u64, data: &[u8]) {
        if !matches!(data.len(), 4 | 8) || !offset.is_multiple_of(data.len() as u64) {
            return;
        }
        let mut state = self.lock();
        for (word, bytes) in data.chunks_exact(4).enumerate() {
            // Cannot overflow in practice: the offset is within a BAR and the word is 0 or 1.
            let offset = offset.saturating_add(4 * word as u64);
            let Some(at) = entry_at(offset).filter(|&at| at < state.entries.len()) else {
                return;
            };
            let mut value = [0; 4];
            value.copy_from_slice(bytes);
            let value = u32::from_le_bytes(value);
            let entry = &mut state.entries[at];
            let message = &mut entry.message;
            match offset % TABLE_ENTRY_SIZE {
                0 => message.address = message.address & !0xffff_ffff | u64::from(value & !3),
                4 => message.address = message.address & 0xffff_ffff | u64::from(value) << 32,
                8 => message.data = value,
                _ => entry.masked = value & VECTOR_MASKED != 0,
            }
            self.update(&mut state, at);
        }
    }

    /// Handles a guest read of the pending bits.
    pub fn read_pending(&self, offset: u64, data: &mut [u8]) {
        let state = self.lock();
        for (at, byte) in data.iter_mut().enumerate() {
            let first = usize::try_from(offset)
                .ok()
                .and_then(|offset| offset.checked_add(at)?.checked_mul(8))
                .unwrap_or(usize::MAX);
            *byte = (0..8)
                .filter(|bit| {
                    let at = first.saturating_add(*bit);
                    let entry = state.entries.get(at);
                    entry.is_some_and(|entry| entry.pending || self.is_held(entry, at))
                })
                .fold(0, |byte, bit| byte | 1 << bit);
        }
    }

    /// Whether the eventfd of a vector that does not reach the guest has been written.
    fn is_held(&self, entry: &Entry, vector: usize) -> bool {
        // Fewer than MAX_VECTORS entries.
        let irqfd = self.vectors().and_then(|all| all.made_irqfd(vector as u16));
        let Some(irqfd) = irqfd.filter(|_| entry.routed.is_none()) else {
            return false;
        };
        shared_event::is_set(irqfd)
    }

    /// The platform's vectors, whose eventfds the kernel or another process may write.
    pub fn vectors(&self) -> Option<&dyn MsiVectors> {
        self.vectors.get().map(AsRef::as_ref)
    }

    /// Saves the table and the pending bits.
    pub fn save(&self) -> MsixState {
        let state = self.lock();
        let entries = state.entries.iter().map(|entry| MsixEntryState {
            message: entry.message,
            masked: entry.masked,
            pending: entry.pending,
        });
        MsixState {
            enabled: state.enabled,
            function_masked: state.function_masked,
            entries: entries.collect(),
        }
    }

    /// Loads a saved table and routes its vectors.
    pub fn restore(&self, saved: &MsixState) -> Result<(), StateError> {
        let mut state = self.lock();
        if saved.entries.len() != state.entries.len() {
            return Err(StateError::Mismatch(format!(
                "{} interrupt vectors were saved, the device has {}",
                saved.entries.len(),
                state.entries.len()
            )));
        }
        state.enabled = saved.enabled;
        state.function_masked = saved.function_masked;
        for (entry, from) in state.entries.iter_mut().zip(&saved.entries) {
            entry.message = from.message;
            entry.masked = from.masked;
            entry.pending = from.pending && saved.enabled;
        }
        self.update_all(&mut state);
        Ok(())
    }

    fn update_all(&self, state: &mut State) {
        for at in 0..state.entries.len() {
            self.update(state, at);
        }
    }

    /// Updates the platform's route of a vector from the table, and raises a pending interrupt.
    fn update(&self, state: &mut State, at: usize) {
        let Some(vectors) = self.vectors.get() else {
            return;
        };
        // Fewer than MAX_VECTORS entries.
        let vector = at as u16;
        let unmasked = state.enabled && !state.function_masked;
        let entry = &mut state.entries[at];
        let wanted = (unmasked && !entry.masked).then_some(entry.message);
        if wanted != entry.routed {
            if wanted.is_none() {
                self.open[at].store(false, Ordering::Release);
            }
            match vectors.route(vector, wanted) {
                Ok(()) => entry.routed = wanted,
                Err(error) => {
                    self.warn("route", vector, &error);
                    entry.routed = None;
                }
            }
            let open = entry.routed.is_some();
            self.open[at].store(open, Ordering::Release);
        }
        if let Some(message) = entry.routed.filter(|_| entry.pending) {
            entry.pending = false;
            if let Err(error) = vectors.raise(vector, message) {
                self.warn("raise", vector, &error);
            }
        }
    }

    fn warn(&self, action: &str, vector: u16, error: &io::Error) {
        if !self.warned.swap(true, Ordering::Relaxed) {
            log::warn!("cannot {action} interrupt vector {vector}: {error}");
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock_unpoisoned()
    }
}

/// Index of the entry that covers a table offset.
fn entry_at(offset: u64) -> Option<usize> {
    usize::try_from(offset / TABLE_ENTRY_SIZE).ok()
}

/// The MSI-X capability in a configuration space.
#[derive(Clone, Copy, Debug)]
pub struct MsixCapability {
    control: usize,
}

impl MsixCapability {
    /// Appends the capability. Table and pending bits are each given as (BAR, offset); offsets are
    /// multiples of 8.
    pub fn add(
        config: &mut ConfigSpace,
        count: u16,
        table: (BarIndex, u32),
        pending: (BarIndex, u32),
    ) -> Result<Self, ConfigError> {
        let mut body = [0; 10];
        let last = count.clamp(1, MAX_VECTORS) - 1;
        let place = |(bar, offset): (BarIndex, u32)| (offset & !7) | u32::from(bar.get());
        body[..2].copy_from_slice(&last.to_le_bytes());
        body[2..6].copy_from_slice(&place(table).to_le_bytes());
        body[6..].copy_from_slice(&place(pending).to_le_bytes());
        let writable = CONTROL_ENABLE | CONTROL_FUNCTION_MASK;
        let at = config.add_capability(CAPABILITY_ID, &body, &writable.to_le_bytes())?;
        Ok(Self { control: at + 2 })
    }

    /// Places the capability of a passthrough device at its own offset. `body` holds the device's
    /// control, table and pending registers.
    pub fn place(
        config: &mut ConfigSpace,
        at: usize,
        body: &[u8; 10],
    ) -> Result<Self, ConfigError> {
        let mut body = *body;
        let writable = CONTROL_ENABLE | CONTROL_FUNCTION_MASK;
        let control = u16::from_le_bytes([body[0], body[1]]) & !writable;
        body[..2].copy_from_slice(&control.to_le_bytes());
        config.place_capability(at, CAPABILITY_ID, &body, &writable.to_le_bytes())?;
        Ok(Self { control: at + 2 })
    }

    /// Whether the guest has enabled MSI-X.
    pub fn is_enabled(&self, config: &ConfigSpace) -> bool {
        config.read_u16(self.control) & CONTROL_ENABLE != 0
    }

    /// Applies the message control register to the table. Call it after every write to
    /// configuration space.
    pub fn update(&self, config: &ConfigSpace, table: &MsixTable) {
        let control = config.read_u16(self.control);
        table.set_control(
            control & CONTROL_ENABLE != 0,
            control & CONTROL_FUNCTION_MASK != 0,
        );
    }
}

#[cfg(test)]
mod tests {
    use device_model::{msi::MsiController, testing::FakeMsi};

    use super::*;

    fn table() -> (MsixTable, FakeMsi) {
        let msi = FakeMsi::default();
        let table = MsixTable::new(3);
        table.attach(msi.allocate(3, 0).unwrap());
        (table, msi)
    }

    fn write(table: &MsixTable, vector: u64, message: MsiMessage, masked: bool) {
        table.write_table(vector * 16, &message.address.to_le_bytes());
        let rest = u64::from(message.data) | u64::from(masked) << 32;
        table.write_table(vector * 16 + 8, &rest.to_le_bytes());
    }

    const MESSAGE: MsiMessage = MsiMessage {
        address: 0x1_fee0_1000,
        data: 0x4021,
    };

    #[test]
    fn a_vector_is_routed_while_it_and_the_function_are_unmasked() {
        let (table, msi) = table();
        write(&table, 1, MESSAGE, false);
        assert_eq!(msi.route(1), None, "MSI-X is off");
        table.set_control(true, true);
        assert_eq!(msi.route(1), None, "the function is masked");
        assert_eq!(table.trigger(1).unwrap(), Delivery::Pending);
        table.set_control(true, false);
        assert_eq!(msi.route(1), Some(MESSAGE));
        assert_eq!(msi.take(1), 1);
        write(&table, 1, MESSAGE, true);
        assert_eq!(msi.route(1), None);
        assert_eq!(msi.route(0), None, "masked since power-on");
    }

    #[test]
    fn an_entry_reads_back_as_it_was_written() {
        let (table, _) = table();
        write(&table, 2, MESSAGE, true);
        let mut data = [0; 8];
        table.read_table(32, &mut data);
        assert_eq!(u64::from_le_bytes(data), MESSAGE.address);
        table.read_table(40, &mut data);
        assert_eq!(u64::from_le_bytes(data), 1 << 32 | u64::from(MESSAGE.data));
    }

    #[test]
    fn switching_msix_off_forgets_what_was_pending() {
        let (table, msi) = table();
        table.set_control(true, true);
        table.trigger(0).unwrap();
        table.set_control(false, true);
        write(&table, 0, MESSAGE, false);
        table.set_control(true, false);
        assert_eq!(msi.take(0), 0);
        assert_eq!(table.trigger(3).unwrap(), Delivery::Disabled, "no such");
    }

    #[test]
    fn a_masked_vector_that_the_kernel_raised_is_pending() {
        let (table, msi) = table();
        table.set_control(true, false);
        write(&table, 1, MESSAGE, true);
        table.vectors().unwrap().irqfd(1).unwrap().write(1).unwrap();
        let mut pending = [0; 8];
        table.read_pending(0, &mut pending);
        assert_eq!(u64::from_le_bytes(pending), 1 << 1);
        table.set_control(false, false);
        table.read_pending(0, &mut pending);
        assert_eq!(u64::from_le_bytes(pending), 0);
        assert_eq!(msi.take(1), 0, "MSI-X was switched off");
    }

    #[test]
    fn a_shared_vector_is_raised_without_its_eventfd() {
        let (table, msi) = table();
        table.set_control(true, false);
        write(&table, 1, MESSAGE, true);
        // Any blocking write to it would wait.
        let irqfd = table.vectors().unwrap().irqfd(1).unwrap();
        irqfd.write(u64::MAX - 1).unwrap();
        assert!(irqfd.write(1).is_err(), "it is full");
        table.raise_shared(1).unwrap();
        shared_event::take(irqfd).unwrap();
        assert_eq!(msi.take(1), 0, "it is masked");
        write(&table, 1, MESSAGE, false);
        assert_eq!(msi.take(1), 1);
        table.raise_shared(1).unwrap();
        assert_eq!(msi.take(1), 1);
        table.raise_shared(3).unwrap();
    }

    #[test]
    fn pending_interrupts_survive_a_snapshot() {
        let (before, _) = table();
        before.set_control(true, false);
        write(&before, 0, MESSAGE, true);
        before.trigger(0).unwrap();
        let (after, msi) = table();
        after.restore(&before.save()).unwrap();
        assert_eq!(msi.take(0), 0);
        write(&after, 0, MESSAGE, false);
        assert_eq!(msi.take(0), 1);
        assert_eq!(msi.route(0), Some(MESSAGE));
    }

    #[test]
    fn accesses_beyond_the_table_do_no_harm() {
        let (table, _) = table();
        for offset in [48, 0x7fff, u64::MAX - 7] {
            for len in [1, 2, 4, 8] {
                table.write_table(offset, &[0xff; 8][..len]);
                let mut data = [1; 8];
                table.read_table(offset, &mut data[..len]);
                assert_eq!(data[..len], [0; 8][..len]);
                table.read_pending(offset, &mut data[..len]);
                assert_eq!(data[..len], [0; 8][..len]);
            }
        }
    }
}
