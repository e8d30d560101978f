//! Persistent memory.

use std::sync::Arc;

use devices::virtio::pmem;
use vmm_config::PmemConfig;

use super::{
    super::{
        devices::{DeviceKind, Made, MadeFunction, Surroundings},
        error::DeviceError,
    },
    Handle, thread_name,
};

impl DeviceKind for PmemConfig {
    const NAME: &'static str = "pmem";

    fn make(&self, id: &str, surroundings: &Surroundings) -> Result<Made, DeviceError> {
        let options = pmem::Options {
            thread_name: thread_name(Self::NAME, id),
            file: self.file.clone(),
            size: self.size,
            discard_writes: self.discard_writes,
        };
        let opened = surroundings.images.take_memory(self);
        let space = Arc::clone(&surroundings.address_space);
        let spawner = Arc::clone(&surroundings.spawner);
        let pmem = match opened {
            Some(opened) => pmem::Pmem::with(opened, options, space, spawner),
            None => pmem::Pmem::new(options, space, spawner),
        };
        let pmem = pmem.map_err(DeviceError::of)?;
        let handle = pmem.contents().map_or(Handle::None, Handle::Contents);
        Ok(Made {
            function: MadeFunction::Virtio(Box::new(pmem)),
            handle,
        })
    }
}
