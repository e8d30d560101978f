//! Disk images that are opened before their machine is made, by a thread that may wait for storage.

use std::{collections::BTreeMap, sync::Mutex};

use base::Unpoisoned;
use devices::{disk::Disk, virtio::blk};
use vmm_config::{Device, DiskConfig, HasCommonConfig};

use super::{
    devices::DeviceKind,
    error::{DeviceError, MachineError},
    kinds::disk::image,
};

/// Open images by the name of their disk.
#[derive(Default)]
pub struct Images(Mutex<BTreeMap<String, Disk>>);

impl Images {
    /// Opens and locks the images of disks, at the speed of the storage.
    ///
    /// # Errors
    /// The first image that cannot be opened or locked, by the name of its disk.
    pub fn open(disks: &[DiskConfig]) -> Result<Self, MachineError> {
        let mut images = BTreeMap::new();
        for disk in disks.iter().filter(|disk| disk.is_present()) {
            let Some(id) = disk.common().id.clone() else {
                continue;
            };
            let opened = image(disk, false).and_then(|options| {
                let opened = Disk::open(&options).map_err(blk::Error::Disk);
                opened.map_err(DeviceError::of)
            });
            let opened = opened.map_err(|source| MachineError::Device {
                kind: DiskConfig::NAME,
                id: id.clone(),
                source: Box::new(source),
            })?;
            images.insert(id, opened);
        }
        Ok(Self(Mutex::new(images)))
    }

    /// Takes the image of a disk, if it is open.
    pub fn take(&self, id: &str) -> Option<Disk> {
        self.0.lock_unpoisoned().remove(id)
    }
}
