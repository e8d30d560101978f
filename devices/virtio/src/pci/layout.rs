//! Layout of the BAR, the common configuration structure and the capabilities.

use pci::{BarIndex, ConfigError, ConfigSpace};

/// The BAR that contains all registers.
pub(super) const BAR: BarIndex = BarIndex::ZERO;
/// Size of the BAR in bytes.
pub const BAR_SIZE: u64 = 0x1_0000;
/// Common configuration.
pub const COMMON_OFFSET: u64 = 0x0000;
/// ISR status.
pub const ISR_OFFSET: u64 = 0x1000;
/// Device-specific configuration.
pub const DEVICE_OFFSET: u64 = 0x2000;
/// Queue notifications.
pub const NOTIFY_OFFSET: u64 = 0x3000;
/// MSI-X table.
pub const TABLE_OFFSET: u64 = 0x4000;
/// MSI-X pending bit array, after the largest possible table.
pub const PENDING_OFFSET: u64 = 0xc000;

/// Distance in bytes between the notification addresses of two queues.
pub const NOTIFY_MULTIPLIER: u32 = 4;
/// Size in bytes of each of the first four parts.
const PART_LEN: u64 = 0x1000;
/// Maximum number of queues: one per notification address.
pub(super) const MAX_QUEUES: usize = (PART_LEN / NOTIFY_MULTIPLIER as u64) as usize;

/// Offsets in the common configuration structure (4.1.4.3).
pub mod common {
    /// Selects which 32 bits of the device features `DEVICE_FEATURE` shows.
    pub const DEVICE_FEATURE_SELECT: usize = 0;
    /// Features offered.
    pub const DEVICE_FEATURE: usize = 4;
    /// Selects which 32 bits of the driver features `DRIVER_FEATURE` shows.
    pub const DRIVER_FEATURE_SELECT: usize = 8;
    /// Features accepted.
    pub const DRIVER_FEATURE: usize = 12;
    /// MSI-X vector for configuration changes.
    pub const CONFIG_VECTOR: usize = 16;
    /// Number of queues.
    pub const NUM_QUEUES: usize = 18;
    /// Device status.
    pub const STATUS: usize = 20;
    /// Configuration generation; changes whenever the device configuration does.
    pub const GENERATION: usize = 21;
    /// Selects the queue that the fields below describe.
    pub const QUEUE_SELECT: usize = 22;
    /// Queue size in entries.
    pub const QUEUE_SIZE: usize = 24;
    /// MSI-X vector for used-buffer notifications.
    pub const QUEUE_VECTOR: usize = 26;
    /// 1 once the queue is set up.
    pub const QUEUE_ENABLE: usize = 28;
    /// Index of the queue's notification address.
    pub const QUEUE_NOTIFY: usize = 30;
    /// Address of the descriptor table, 64 bits.
    pub const QUEUE_DESC: usize = 32;
    /// Address of the available ring, 64 bits.
    pub const QUEUE_DRIVER: usize = 40;
    /// Address of the used ring, 64 bits.
    pub const QUEUE_DEVICE: usize = 48;
    /// Size of the structure in bytes.
    pub const LEN: usize = 56;
}

/// Bits of the device status (2.1).
pub mod status {
    /// The guest has found the device.
    pub const ACKNOWLEDGE: u8 = 1;
    /// The guest has a driver for the device.
    pub const DRIVER: u8 = 2;
    /// The driver is ready.
    pub const DRIVER_OK: u8 = 4;
    /// Feature negotiation is complete.
    pub const FEATURES_OK: u8 = 8;
    /// The device is broken until it is reset.
    pub const NEEDS_RESET: u8 = 64;
    /// The driver has given up on the device.
    pub const FAILED: u8 = 128;
}

/// No MSI-X vector.
pub(super) const NO_VECTOR: u16 = 0xffff;

const VENDOR_CAPABILITY: u8 = 0x09;

/// The part of the BAR that an access hits.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Part {
    Common,
    Isr,
    Device,
    Notify,
    Table,
    Pending,
}

impl Part {
    /// The part that contains `offset`, and the offset within it.
    pub(super) fn of(offset: u64) -> (Self, u64) {
        let (part, base) = match offset {
            PENDING_OFFSET.. => (Self::Pending, PENDING_OFFSET),
            TABLE_OFFSET.. => (Self::Table, TABLE_OFFSET),
            NOTIFY_OFFSET.. => (Self::Notify, NOTIFY_OFFSET),
            DEVICE_OFFSET.. => (Self::Device, DEVICE_OFFSET),
            ISR_OFFSET.. => (Self::Isr, ISR_OFFSET),
            _ => (Self::Common, COMMON_OFFSET),
        };
        (part, offset - base)
    }
}

/// Appends the virtio capabilities (4.1.4). Returns the offset of the one that provides access to
/// the BAR through configuration space.
pub(super) fn add_capabilities(config: &mut ConfigSpace) -> Result<usize, ConfigError> {
    const COMMON: u8 = 1;
    const NOTIFY: u8 = 2;
    const ISR: u8 = 3;
    const DEVICE: u8 = 4;
    let multiplier = NOTIFY_MULTIPLIER.to_le_bytes();
    for (kind, offset, len, rest) in [
        (COMMON, COMMON_OFFSET, common::LEN as u64, &[][..]),
        (ISR, ISR_OFFSET, 1, &[]),
        (DEVICE, DEVICE_OFFSET, PART_LEN, &[]),
        (NOTIFY, NOTIFY_OFFSET, PART_LEN, &multiplier),
    ] {
        let body = capability(kind, offset as u32, len as u32, rest);
        config.add_capability(VENDOR_CAPABILITY, &body, &[])?;
    }
    let body = capability(PciAccess::KIND, 0, 0, &[0; 4]);
    let mut writable = vec![0; body.len()];
    writable[PciAccess::BAR - 2] = 0xff;
    writable[PciAccess::OFFSET - 2..].fill(0xff);
    config.add_capability(VENDOR_CAPABILITY, &body, &writable)
}

/// Offsets in the configuration access capability (4.1.4.9).
pub(super) struct PciAccess;

impl PciAccess {
    const KIND: u8 = 5;
    pub(super) const BAR: usize = 4;
    pub(super) const OFFSET: usize = 8;
    pub(super) const LEN: usize = 12;
    pub(super) const DATA: usize = 16;
}

/// Body of `struct virtio_pci_cap`, without its first two bytes.
fn capability(kind: u8, offset: u32, len: u32, rest: &[u8]) -> Vec<u8> {
    // The structure has 16 bytes, and the rest at most 4.
    let mut body = vec![16 + rest.len() as u8, kind, BAR.get(), 0, 0, 0];
    body.extend(offset.to_le_bytes());
    body.extend(len.to_le_bytes());
    body.extend(rest);
    body
}
