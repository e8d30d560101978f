//! Disk images that are opened before their devices are made, by a thread that may wait for storage.

use std::{mem, sync::Mutex};

use base::Unpoisoned;
use devices::{
    disk::{Disk, DiskOptions},
    virtio::blk,
};
use vmm_config::{Device, DiskConfig, HasCommonConfig};

use super::{
    devices::DeviceKind,
    error::{DeviceError, MachineError},
    kinds::disk::image,
};

/// Open images.
#[derive(Default)]
pub struct Images(Mutex<Opened>);

#[derive(Default)]
struct Opened {
    /// Each with how it was opened.
    disks: Vec<(DiskOptions, Disk)>,
    given_up: bool,
}

impl Images {
    /// Opens the images of disks, and locks them unless that is to happen later, at the speed of the storage. None is
    /// locked when they have been given up.
    ///
    /// # Errors
    /// The first image that cannot be opened or locked, by the name of its disk.
    pub fn open(&self, disks: &[DiskConfig], lock_later: bool) -> Result<(), MachineError> {
        let mut unnamed = 0;
        for disk in disks.iter().filter(|disk| disk.is_present()) {
            // As the machine is going to name it.
            let name = disk.common().id.clone().unwrap_or_else(|| {
                unnamed += 1;
                format!("_{}{}", DiskConfig::NAME, unnamed - 1)
            });
            let opened = image(disk, lock_later).and_then(|options| {
                let is_wanted = || !self.0.lock_unpoisoned().given_up;
                let opened = Disk::open_while(&options, &is_wanted).map_err(blk::Error::Disk);
                Ok((options, opened.map_err(DeviceError::of)?))
            });
            let opened = opened.map_err(|source| MachineError::Device {
                kind: DiskConfig::NAME,
                id: name,
                source: Box::new(source),
            })?;
            let mut all = self.0.lock_unpoisoned();
            if all.given_up {
                // Closing the image may take long.
                drop(all);
                return Ok(());
            }
            all.disks.push(opened);
        }
        Ok(())
    }

    /// Takes an image that is open like this.
    pub fn take(&self, options: &DiskOptions) -> Option<Disk> {
        let mut all = self.0.lock_unpoisoned();
        let at = all.disks.iter().position(|(of, _)| of == options)?;
        Some(all.disks.swap_remove(at).1)
    }

    /// Has no other image locked from now on.
    pub fn refuse(&self) {
        self.0.lock_unpoisoned().given_up = true;
    }

    /// Closes all images, also one that is being opened, when it is open. Takes as long as the storage likes.
    pub fn give_up(&self) {
        let disks = {
            let mut all = self.0.lock_unpoisoned();
            all.given_up = true;
            mem::take(&mut all.disks)
        };
        drop(disks);
    }
}
