//! Disks.

use std::sync::{Arc, Mutex};

use devices::{
    disk::DiskOptions,
    rate_limiter::{RateLimiter, RateLimiterConfig},
    vhost_user::Model,
    virtio::blk::{self, SharedRateLimiter},
};
use vmm_config::DiskConfig;

use super::{
    super::{
        devices::{DeviceKind, Made, MadeFunction, Surroundings},
        error::DeviceError,
    },
    Handle, thread_name,
    vhost_user::{self, Served},
};

impl DeviceKind for DiskConfig {
    const NAME: &'static str = "disk";
    const BOOTABLE: bool = true;

    fn shares_ram(&self) -> bool {
        !self.has_image()
    }

    fn make(&self, id: &str, surroundings: &Surroundings) -> Result<Made, DeviceError> {
        if let Some(served) = served(self) {
            return vhost_user::make(served, id, surroundings);
        }
        let image = image(self, surroundings.arriving)?;
        let opened = surroundings.images.take(&image);
        let options = blk::Options {
            thread_name: thread_name(Self::NAME, id),
            disk: image,
            num_queues: self.num_queues,
            queue_size: self.queue_size,
            serial: self.serial.clone(),
            rate_limiter: limiter(self, surroundings)?,
            affinity: self
                .queue_affinity
                .iter()
                .flatten()
                .map(|affinity| (affinity.queue_index, affinity.host_cpus.clone()))
                .collect(),
        };
        let spawner = Arc::clone(&surroundings.spawner);
        let disk = match opened {
            Some(opened) => blk::Blk::with(opened, options, spawner),
            None => blk::Blk::new(options, spawner),
        };
        let disk = disk.map_err(DeviceError::of)?;
        let handle = Handle::Disk(disk.handle());
        Ok(Made {
            function: MadeFunction::Virtio(Box::new(disk)),
            handle,
        })
    }
}

/// What another process serves for a disk.
pub(super) fn served(disk: &DiskConfig) -> Option<Served<'_>> {
    let socket = disk.vhost_socket.as_deref().filter(|_| !disk.has_image())?;
    let model = Model::disk(disk.num_queues, disk.queue_size);
    Some(Served { socket, model })
}

/// How the image of a disk is opened.
pub fn image(disk: &DiskConfig, lock_later: bool) -> Result<DiskOptions, DeviceError> {
    let Some(path) = disk.path.clone() else {
        return Err(DeviceError::Invalid("a disk needs a path".to_owned()));
    };
    Ok(DiskOptions {
        path,
        read_only: disk.readonly,
        direct: disk.direct,
        image_type: disk.image_type,
        logical_block: disk.logical_block_size,
        backing_files: disk.backing_files,
        sparse: disk.sparse,
        lock_granularity: disk.lock_granularity,
        lock_later,
        io_uring: true,
    })
}

fn limiter(
    disk: &DiskConfig,
    surroundings: &Surroundings,
) -> Result<Option<SharedRateLimiter>, DeviceError> {
    match (&disk.rate_limiter_config, &disk.rate_limit_group) {
        (None, None) => Ok(None),
        (Some(config), None) => rate_limiter(config).map(Some),
        (None, Some(group)) => match surroundings.rate_limit_groups.get(group) {
            Some(limiter) => Ok(Some(Arc::clone(limiter))),
            None => Err(DeviceError::Invalid(format!(
                "there is no rate limit group {group:?}: define it in rate_limit_groups"
            ))),
        },
        (Some(_), Some(group)) => Err(DeviceError::Invalid(format!(
            "a disk of rate limit group {group:?} cannot have limits of its own"
        ))),
    }
}

/// Creates a rate limiter with full buckets.
pub fn rate_limiter(config: &RateLimiterConfig) -> Result<SharedRateLimiter, DeviceError> {
    let limiter = RateLimiter::new(config).map_err(|source| DeviceError::Host {
        action: "start a rate limit's timer",
        source,
    })?;
    Ok(Arc::new(Mutex::new(limiter)))
}
