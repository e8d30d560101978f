//! Memory that virtio-mem plugs in and out.

use std::sync::Arc;

use devices::virtio::mem;
use vm_memory::GuestAddress;

use super::{
    super::{
        devices::{Kind, Made, MadeFunction, Slot, Surroundings},
        error::DeviceError,
    },
    Handle, thread_name,
};

/// The device of a memory zone. It is not configured by itself: a zone with `hotplug_size` and
/// the method `VirtioMem` has one.
pub struct ZoneMemory {
    id: Option<String>,
    zone: String,
    address: u64,
    len: u64,
    requested: u64,
}

impl ZoneMemory {
    /// The device for `len` bytes at `address`, of which `requested` are to be plugged.
    pub fn new(zone: &str, address: u64, len: u64, requested: u64) -> Self {
        let id = Some(format!("_mem_{zone}"));
        Self {
            id,
            zone: zone.to_owned(),
            address,
            len,
            requested,
        }
    }
}

impl Kind for ZoneMemory {
    const NAME: &'static str = "mem";
    const REMOVABLE: bool = false;

    fn id(&mut self) -> &mut Option<String> {
        &mut self.id
    }

    fn slot(&self) -> Slot {
        Slot::default()
    }

    fn make(&self, id: &str, surroundings: &Surroundings) -> Result<Made, DeviceError> {
        let options = mem::Options {
            thread_name: thread_name(Self::NAME, id),
            address: GuestAddress(self.address),
            len: self.len,
            requested: self.requested,
            discards: Arc::clone(&surroundings.discards),
        };
        let mem = mem::Mem::new(options, Arc::clone(&surroundings.spawner))?;
        let handle = Handle::Memory {
            zone: self.zone.clone(),
            device: mem.handle(),
        };
        Ok(Made {
            function: MadeFunction::Virtio(Box::new(mem)),
            handle,
        })
    }
}
