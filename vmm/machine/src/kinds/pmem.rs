//! Persistent memory.

use std::sync::Arc;

use devices::virtio::pmem;
use vmm_config::PmemConfig;

use super::{
    super::{
        devices::{DeviceKind, Made, MadeFunction, Surroundings},
        error::{DeviceError, MachineError},
        images::Images,
    },
    Handle, thread_name,
};

/// A file that was opened before its device is made.
struct Opened {
    config: PmemConfig,
    backing: pmem::Backing,
}

/// Opens, locks and maps the file of the device of this name, at the speed of the storage.
///
/// # Errors
/// It cannot be used.
pub fn open(config: PmemConfig, id: &str, images: &Images) -> Result<(), MachineError> {
    let opened = pmem::Backing::open(config.file.clone(), config.size, config.discard_writes);
    let backing = opened.map_err(|source| MachineError::Device {
        kind: PmemConfig::NAME,
        id: id.to_owned(),
        source: Box::new(DeviceError::of(source)),
    })?;
    images.keep(Opened { config, backing });
    Ok(())
}

impl DeviceKind for PmemConfig {
    const NAME: &'static str = "pmem";

    fn make(&self, id: &str, surroundings: &Surroundings) -> Result<Made, DeviceError> {
        let options = pmem::Options {
            thread_name: thread_name(Self::NAME, id),
            file: self.file.clone(),
            size: self.size,
            discard_writes: self.discard_writes,
        };
        let is_its = |opened: &Opened| {
            let its = &opened.config;
            (&its.file, its.size, its.discard_writes)
                == (&self.file, self.size, self.discard_writes)
        };
        let opened = surroundings.images.take_kept(is_its);
        let space = Arc::clone(&surroundings.address_space);
        let spawner = Arc::clone(&surroundings.spawner);
        let pmem = match opened {
            Some(opened) => pmem::Pmem::with(opened.backing, options, space, spawner),
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
