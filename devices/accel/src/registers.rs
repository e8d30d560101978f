//! Trapped accesses: the registers, the MSI-X table, and doorbells that KVM did not register.

use std::sync::Arc;

use device_model::{bus::BusDevice, shared_event};
use pci::MsixTable;
use remoting_proto::port::{Apis, DOORBELL, registers as at};
use vmm_sys_util::eventfd::EventFd;

use super::{line::PortLine, slices::Slices, wish::Mailbox};

/// BAR 0.
pub struct Registers {
    /// Commands and states.
    pub slices: Arc<Slices>,
    /// The APIs that applications may use.
    pub apis: Apis,
    /// Size of a slice in bytes.
    pub slice_size: u64,
    /// Interrupts.
    pub msix: Arc<MsixTable>,
    /// Interrupts while MSI-X is off.
    pub line: Arc<PortLine>,
    /// The host's requests to the agent.
    pub mailbox: Arc<Mailbox>,
}

impl Registers {
    fn value(&self, offset: u64) -> u32 {
        match offset {
            at::MAGIC => at::MAGIC_VALUE,
            at::VERSION => self.apis.interface(),
            at::SLICES => self.slices.count(),
            at::CHANGES => {
                self.line.take_change();
                self.slices.changes()
            }
            at::SLICE_SIZE_LOW => self.slice_size as u32,
            at::SLICE_SIZE_HIGH => (self.slice_size >> 32) as u32,
            at::API => self.apis.number(),
            at::WISH => self.mailbox.wish(),
            at::LINE => u32::from(self.line.is_wanted()),
            at::RUNG_LOW => self.line.take(0),
            at::RUNG_HIGH => self.line.take(1),
            _ if (at::ADDRESS..at::ADDRESS + at::ADDRESS_SIZE).contains(&offset) => {
                self.mailbox.address(offset - at::ADDRESS)
            }
            _ => slice_at(offset).map_or(0, |slice| self.slices.number(slice)),
        }
    }
}

/// The slice with a register at `offset`, in the register array from `first` up to `end`.
fn slice_between(offset: u64, first: u64, end: u64) -> Option<usize> {
    let place = offset.checked_sub(first)?;
    (offset < end && place.is_multiple_of(4)).then_some((place / 4) as usize)
}

/// The slice whose state is at `offset`.
fn slice_at(offset: u64) -> Option<usize> {
    slice_between(offset, at::SLICE, at::OWNER)
}

/// The slice whose owner is at `offset`.
fn owner_at(offset: u64) -> Option<usize> {
    slice_between(offset, at::OWNER, at::SLICE_API)
}

/// The slice whose API is at `offset`.
fn api_at(offset: u64) -> Option<usize> {
    slice_between(offset, at::SLICE_API, at::ADDRESS)
}

impl BusDevice for Registers {
    fn read(&self, offset: u64, data: &mut [u8]) {
        if offset >= at::PENDING {
            return self.msix.read_pending(offset - at::PENDING, data);
        }
        if offset >= at::TABLE {
            return self.msix.read_table(offset - at::TABLE, data);
        }
        data.fill(0);
        if data.len() == 4 {
            data.copy_from_slice(&self.value(offset).to_le_bytes());
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if offset >= at::PENDING {
            return;
        }
        if offset >= at::TABLE {
            return self.msix.write_table(offset - at::TABLE, data);
        }
        let Ok(bytes) = data.try_into() else { return };
        if offset == at::RESET {
            self.line.want(false);
            self.slices.close_all();
        } else if offset == at::OUTCOME {
            self.mailbox.tell(u32::from_le_bytes(bytes));
        } else if offset == at::LINE {
            self.line.want(u32::from_le_bytes(bytes) != 0);
            self.slices.wake();
        } else if let Some(at) = offset.checked_sub(at::REASON)
            && at < at::REASON_SIZE
        {
            self.mailbox.explain(at, bytes);
        } else if let Some(slice) = slice_at(offset) {
            self.slices.command(slice, u32::from_le_bytes(bytes));
        } else if let Some(slice) = owner_at(offset) {
            self.slices.set_owner(slice, u32::from_le_bytes(bytes));
        } else if let Some(slice) = api_at(offset) {
            self.slices.set_api(slice, u32::from_le_bytes(bytes));
        }
    }
}

/// BAR 1, for doorbells that KVM did not register.
pub struct Doorbells(pub Arc<[EventFd]>);

impl BusDevice for Doorbells {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&self, offset: u64, _data: &[u8]) {
        let bell = usize::try_from(offset / DOORBELL)
            .ok()
            .and_then(|slice| self.0.get(slice));
        if let Some(bell) = bell {
            shared_event::ring(bell);
        }
    }
}
