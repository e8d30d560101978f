//! Offsets of the standard header (PCI 3.0, figure 6-1).

/// Vendor ID, 16 bits.
pub const VENDOR: usize = 0x00;
/// Device ID, 16 bits.
pub const DEVICE: usize = 0x02;
/// Command register, 16 bits.
pub const COMMAND: usize = 0x04;
/// Status register, 16 bits.
pub const STATUS: usize = 0x06;
/// Revision, then programming interface, subclass and class.
pub const REVISION: usize = 0x08;
/// Cache line size, 8 bits.
pub const CACHE_LINE: usize = 0x0c;
/// Header type, 8 bits.
pub const HEADER_TYPE: usize = 0x0e;
/// The first of six base address registers.
pub const BAR0: usize = 0x10;
/// The byte after the last base address register.
pub const BAR_END: usize = 0x28;
/// Subsystem vendor ID, 16 bits.
pub const SUBSYSTEM_VENDOR: usize = 0x2c;
/// Subsystem ID, 16 bits.
pub const SUBSYSTEM: usize = 0x2e;
/// Expansion ROM base address, 32 bits.
pub const ROM: usize = 0x30;
/// First capability, 8 bits.
pub const CAPABILITIES: usize = 0x34;
/// Interrupt line, 8 bits.
pub const INTERRUPT_LINE: usize = 0x3c;
/// Interrupt pin, 8 bits: 1 is A.
pub const INTERRUPT_PIN: usize = 0x3d;
/// For a bridge: status of the bus behind it, 16 bits (PCI-to-PCI Bridge 1.2, figure 3-1).
pub const SECONDARY_STATUS: usize = 0x1e;
