//! Disk images, and files of other devices, that are opened before their devices are made, by a thread that may wait for
//! storage.

use std::{
    any::Any,
    mem,
    sync::{Arc, Mutex},
};

use base::Unpoisoned;
use devices::{
    disk::{Disk, DiskOptions, claim::Claim},
    virtio::blk,
};
use vmm_config::{DiskConfig, HasCommonConfig};

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
    images: Vec<Image>,
    /// Of the image that is being opened.
    opening: Option<Arc<Claim>>,
    others: Vec<Box<dyn Any + Send>>,
    given_up: bool,
}

struct Image {
    /// How it was opened.
    options: DiskOptions,
    disk: Disk,
    claim: Arc<Claim>,
}

impl Images {
    /// Opens the images of disks, and locks them unless that is to happen later, at the speed of the storage. When they
    /// have been given up, none is locked or changed any more, and all are closed.
    ///
    /// # Errors
    /// The first image that cannot be opened or locked, by the name of its disk.
    pub fn open(&self, disks: &[DiskConfig], lock_later: bool) -> Result<(), MachineError> {
        let mut unnamed = 0;
        for disk in disks.iter().filter(|disk| disk.has_image()) {
            // As the machine is going to name it.
            let name = disk.common().id.clone().unwrap_or_else(|| {
                unnamed += 1;
                format!("_{}{}", DiskConfig::NAME, unnamed - 1)
            });
            let opened = image(disk, lock_later).and_then(|options| self.open_one(options));
            let has_ended = self.0.lock_unpoisoned().given_up;
            if has_ended {
                self.close();
                return Ok(());
            }
            opened.map_err(|source| MachineError::Device {
                kind: DiskConfig::NAME,
                id: name,
                source: Box::new(source),
            })?;
        }
        Ok(())
    }

    /// Keeps what was opened for another device until that is made, unless all has been given up.
    pub fn keep<T: Any + Send>(&self, opened: T) {
        let mut all = self.0.lock_unpoisoned();
        if !all.given_up {
            all.others.push(Box::new(opened));
        }
    }

    /// Takes what was opened for another device.
    pub fn take_kept<T: Any + Send>(&self, is_it: impl Fn(&T) -> bool) -> Option<T> {
        let mut all = self.0.lock_unpoisoned();
        let is_it = |one: &Box<dyn Any + Send>| one.downcast_ref().is_some_and(&is_it);
        let at = all.others.iter().position(is_it)?;
        all.others.swap_remove(at).downcast().ok().map(|one| *one)
    }

    fn open_one(&self, options: DiskOptions) -> Result<(), DeviceError> {
        let claim = Arc::<Claim>::default();
        {
            let mut all = self.0.lock_unpoisoned();
            if all.given_up {
                return Ok(());
            }
            all.opening = Some(Arc::clone(&claim));
        }
        let opened = Disk::open_for(&options, &claim).map_err(blk::Error::Disk);
        let mut all = self.0.lock_unpoisoned();
        all.opening = None;
        let disk = opened.map_err(DeviceError::of)?;
        all.images.push(Image {
            options,
            disk,
            claim,
        });
        Ok(())
    }

    /// Takes an image that is open like this.
    pub fn take(&self, options: &DiskOptions) -> Option<Disk> {
        let mut all = self.0.lock_unpoisoned();
        let at = all.images.iter().position(|its| its.options == *options)?;
        Some(all.images.swap_remove(at).disk)
    }

    /// Gives up what nobody has taken: whoever opens one of these images after that waits until it is unlocked. Does not
    /// wait for storage. Returns whether there is something to [close](Self::close).
    pub fn give_up(&self) -> bool {
        let mut all = self.0.lock_unpoisoned();
        all.given_up = true;
        let open = all.images.iter().map(|image| &image.claim);
        let claims: Vec<_> = open.chain(&all.opening).collect();
        claims.iter().for_each(|claim| claim.give_up());
        !claims.is_empty() || !all.others.is_empty()
    }

    /// Unlocks and closes all images that were given up, but for one that is being opened: it is unlocked, and closed when
    /// it is open. Takes as long as the storage likes.
    pub fn close(&self) {
        let (images, opening, _others) = {
            let mut all = self.0.lock_unpoisoned();
            let others = mem::take(&mut all.others);
            (mem::take(&mut all.images), all.opening.clone(), others)
        };
        let claims = images.iter().map(|image| &image.claim);
        claims.chain(&opening).for_each(|claim| claim.release());
    }
}
