//! Memory that is plugged and unplugged by virtio-mem.

use std::sync::Arc;

use devices::virtio::mem;
use vm_memory::GuestAddress;
use vmm_config::{CommonConfig, HasCommonConfig, MemoryZoneConfig};
use vmm_memory::Region;

use super::{
    super::{
        devices::{DeviceKind, Made, MadeFunction, Surroundings},
        error::DeviceError,
    },
    Handle, thread_name,
};

/// The virtio-mem device of a memory zone. It has no configuration of its own: a zone with
/// `hotplug_size` and the method `VirtioMem` has one.
pub struct ZoneMemory {
    common: CommonConfig,
    zone: String,
    address: u64,
    len: u64,
    /// Size in bytes of the host pages that back it.
    page: u64,
    requested: u64,
    prefault: bool,
}

impl ZoneMemory {
    /// Creates the device for a region of RAM.
    pub fn new(region: &Region, config: Option<&MemoryZoneConfig>) -> Self {
        Self {
            common: CommonConfig::named(format!("_mem_{}", region.zone)),
            zone: region.zone.clone(),
            address: region.guest,
            len: region.mapping.size() as u64,
            page: region.mapping.page_size(),
            requested: config.and_then(|zone| zone.hotplugged_size).unwrap_or(0),
            prefault: config.is_some_and(|zone| zone.prefault),
        }
    }
}

impl HasCommonConfig for ZoneMemory {
    fn common(&self) -> &CommonConfig {
        &self.common
    }

    fn common_mut(&mut self) -> &mut CommonConfig {
        &mut self.common
    }

    fn is_removable(&self) -> bool {
        false
    }
}

impl DeviceKind for ZoneMemory {
    const NAME: &'static str = "mem";
    const CALLED: &'static str = "memory device";

    fn make(&self, id: &str, surroundings: &Surroundings) -> Result<Made, DeviceError> {
        let options = mem::Options {
            thread_name: thread_name(Self::NAME, id),
            address: GuestAddress(self.address),
            len: self.len,
            block: self.page.max(mem::BLOCK),
            requested: self.requested,
            // The host may have no huge page left when the guest first touches one.
            populate: self.prefault || self.page > 4096,
            discards: Arc::clone(&surroundings.discards),
        };
        let mem = mem::Mem::new(options, Arc::clone(&surroundings.spawner));
        let mem = mem.map_err(DeviceError::of)?;
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
