//! Disk images, and files of persistent memory, that are opened before their devices are made, by a thread that may wait for
//! storage.

use std::{
    mem,
    sync::{Arc, Mutex},
};

use base::Unpoisoned;
use devices::{
    disk::{Disk, DiskOptions, claim::Claim},
    virtio::{blk, pmem},
};
use vmm_config::{Device, DiskConfig, HasCommonConfig, PmemConfig};

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
    memories: Vec<Memory>,
    given_up: bool,
}

struct Image {
    /// How it was opened.
    options: DiskOptions,
    disk: Disk,
    claim: Arc<Claim>,
}

/// A file of persistent memory.
struct Memory {
    config: PmemConfig,
    backing: pmem::Backing,
}

impl Images {
    /// Opens the images of disks, and locks them unless that is to happen later, at the speed of the storage. When they
    /// have been given up, none is locked or changed any more, and all are closed.
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

    /// Opens, locks and maps the file of persistent memory, at the speed of the storage.
    ///
    /// # Errors
    /// It cannot be used.
    pub fn open_memory(&self, config: &PmemConfig, id: &str) -> Result<(), MachineError> {
        let PmemConfig {
            file,
            size,
            discard_writes,
            ..
        } = config.clone();
        let opened = pmem::Backing::open(file, size, discard_writes);
        let backing = opened.map_err(|source| MachineError::Device {
            kind: PmemConfig::NAME,
            id: id.to_owned(),
            source: Box::new(DeviceError::of(source)),
        })?;
        let mut all = self.0.lock_unpoisoned();
        if !all.given_up {
            all.memories.push(Memory {
                config: config.clone(),
                backing,
            });
        }
        Ok(())
    }

    /// Takes the file of this memory if it is open.
    pub fn take_memory(&self, config: &PmemConfig) -> Option<pmem::Backing> {
        let mut all = self.0.lock_unpoisoned();
        let is_same = |its: &Memory| {
            let its = &its.config;
            (&its.file, its.size, its.discard_writes)
                == (&config.file, config.size, config.discard_writes)
        };
        let at = all.memories.iter().position(is_same)?;
        Some(all.memories.swap_remove(at).backing)
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
        !claims.is_empty() || !all.memories.is_empty()
    }

    /// Unlocks and closes all images that were given up, but for one that is being opened: it is unlocked, and closed when
    /// it is open. Takes as long as the storage likes.
    pub fn close(&self) {
        let (images, opening, _memories) = {
            let mut all = self.0.lock_unpoisoned();
            let memories = mem::take(&mut all.memories);
            (mem::take(&mut all.images), all.opening.clone(), memories)
        };
        let claims = images.iter().map(|image| &image.claim);
        claims.chain(&opening).for_each(|claim| claim.release());
    }
}
