//! The kinds of devices: how each is made from its configuration.

mod accel;
mod balloon;
pub mod console;
pub mod disk;
pub mod mem;
mod net;
mod physical;
mod pmem;
mod rng;
mod root_port;
mod user;
mod vsock;

/// Reaches a plugged device, for what is particular to its kind.
pub enum Handle {
    /// Nothing particular.
    None,
    /// A disk.
    Disk(devices::virtio::blk::Handle),
    /// A balloon.
    Balloon(devices::virtio::balloon::Handle),
    /// Memory of a zone.
    Memory {
        /// The zone.
        zone: String,
        /// Its device.
        device: devices::virtio::mem::Handle,
    },
    /// A device of another process, as long as it is plugged in.
    User(std::sync::Weak<devices::vfio::user::UserDevice>),
    /// A device of the host, which is watched.
    Physical(super::alarms::Watch),
    /// A console.
    Console {
        /// Where its input goes.
        input: std::sync::Arc<dyn devices::console::InputSink>,
        /// The device.
        device: devices::virtio::console::Handle,
    },
}

/// Name of a device's thread: an underscore and the kind first, as management tools expect, then
/// the device's own name, cut to what the kernel keeps.
fn thread_name(kind: &str, id: &str) -> String {
    let name = if id.starts_with(&format!("_{kind}")) {
        id.to_owned()
    } else {
        format!("_{kind}_{id}")
    };
    name.chars().take(11).collect()
}
