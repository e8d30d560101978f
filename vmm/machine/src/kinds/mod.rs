//! The kinds of devices: how each is created from its configuration.

pub(super) mod accel;
mod balloon;
pub mod console;
pub mod disk;
mod fs;
mod gate_server;
mod gpu;
pub mod iommu;
pub mod mem;
mod net;
pub mod panic;
mod physical;
mod pmem;
mod rng;
mod root_port;
mod user;
mod vhost_user;
mod vsock;

use std::{any::Any, sync::Arc};

use vmm_config::Device;

use super::{
    devices::{DeviceKind as _, Surroundings},
    error::MachineError,
    events::MachineEvent,
    images::Images,
};
use crate::cpu::Calling;

/// A handle to a plugged device, for operations specific to its kind.
pub enum Handle {
    /// No specific operations.
    None,
    /// An accelerator whose applications can be moved.
    Accel(devices::accel::moving::Handle),
    /// A disk.
    Disk(devices::virtio::blk::Handle),
    /// A device other than a disk, whose contents are in this file: they are flushed with those of disks.
    Contents(std::sync::Arc<std::fs::File>),
    /// A balloon.
    Balloon(devices::virtio::balloon::Handle),
    /// Hot-pluggable memory of a zone.
    Memory {
        /// The zone.
        zone: String,
        /// Its virtio-mem device.
        device: devices::virtio::mem::Handle,
    },
    /// A server of other VMs' processes.
    GateServer(std::sync::Arc<devices::gate::Server>),
    /// A device that another process serves, as long as it is plugged in.
    User(std::sync::Weak<devices::vfio::user::UserDevice>),
    /// A virtio device whose queues another process serves.
    BackEnd(devices::vhost_user::Handle),
    /// A physical device, which is watched.
    Physical(super::alarms::Watch),
    /// A network card: the queues of its tap.
    Net(Vec<std::sync::Weak<std::fs::File>>),
    /// A vsock device: the Unix socket that the host connects to.
    Vsock(devices::named_socket::SharedSocket),
    /// A console.
    Console {
        /// Where its input goes.
        input: std::sync::Arc<dyn devices::console::InputSink>,
        /// The device.
        device: devices::virtio::console::Handle,
    },
}

/// Opens the file of the device that is to have this name.
pub type Opener = Box<dyn FnOnce(&str, &Images) -> Result<(), MachineError> + Send>;

/// The kind of a device without an image whose file, or whose connection to another process, is opened before the device
/// is made, and what opens it.
pub fn opener(device: &dyn Device) -> Option<(&'static str, Opener)> {
    let device: &dyn Any = device;
    if let Some((kind, served)) = served(device) {
        return Some((kind, vhost_user::opener(kind, served)));
    }
    let memory = device.downcast_ref::<vmm_config::PmemConfig>()?.clone();
    let open = move |id: &str, images: &Images| pmem::open(memory, id, images);
    Some((vmm_config::PmemConfig::NAME, Box::new(open)))
}

/// The kind of a device whose queues another process serves, and what that serves.
fn served(device: &dyn Any) -> Option<(&'static str, vhost_user::Served<'_>)> {
    if let Some(folder) = device.downcast_ref() {
        return Some((vmm_config::FsConfig::NAME, fs::served(folder)));
    }
    if let Some(card) = device.downcast_ref() {
        // What is invalid is said when the device is made.
        return Some((vmm_config::NetConfig::NAME, net::served(card)?.ok()?));
    }
    let disk = device.downcast_ref()?;
    Some((vmm_config::DiskConfig::NAME, disk::served(disk)?))
}

/// Resources for a gate port called `id`.
fn gate_resources(id: &str, surroundings: &Surroundings) -> devices::gate::Resources {
    let events = surroundings.events.clone();
    let id = id.to_owned();
    devices::gate::Resources {
        doorbells: Arc::clone(&surroundings.doorbells),
        memory: surroundings.memory.clone(),
        space: surroundings.physical.resources().space,
        vcpu: Arc::new(Calling),
        spawner: Arc::clone(&surroundings.spawner),
        report: Arc::new(move |event| {
            let id = id.clone();
            events.send(MachineEvent::Gate { id, event });
        }),
    }
}

/// Name of a device's thread: an underscore and the kind first, as management tools expect, then
/// the device's own name, truncated to what the kernel keeps.
fn thread_name(kind: &str, id: &str) -> String {
    let name = if id.starts_with(&format!("_{kind}")) {
        id.to_owned()
    } else {
        format!("_{kind}_{id}")
    };
    name.chars().take(11).collect()
}
