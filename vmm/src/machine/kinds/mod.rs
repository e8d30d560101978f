//! The kinds of devices: how each is made from its configuration.

pub mod console;
pub mod disk;

/// Reaches a plugged device, for what is particular to its kind.
pub enum Handle {
    /// Nothing particular.
    None,
    /// A disk.
    Disk(devices::virtio::blk::Handle),
}
