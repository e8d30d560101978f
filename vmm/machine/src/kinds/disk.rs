//! Disks.

use std::sync::{Arc, Mutex};

use devices::{
    disk,
    rate_limiter::{RateLimiter, RateLimiterConfig},
    virtio::blk::{self, SharedRateLimiter},
};
use vmm_config::DiskConfig;

use super::{
    super::{
        devices::{DeviceKind, Made, MadeFunction, Surroundings},
        error::DeviceError,
    },
    Handle, thread_name,
};

impl DeviceKind for DiskConfig {
    const NAME: &'static str = "disk";

    fn make(&self, id: &str, surroundings: &Surroundings) -> Result<Made, DeviceError> {
        let Some(path) = self.path.clone() else {
            return Err(DeviceError::Invalid("a disk needs a path".to_owned()));
        };
        let options = blk::Options {
            thread_name: thread_name(Self::NAME, id),
            disk: disk::DiskOptions {
                path,
                read_only: self.readonly,
                direct: self.direct,
                image_type: self.image_type,
                logical_block: self.logical_block_size,
                backing_files: self.backing_files,
                sparse: self.sparse,
                lock_granularity: self.lock_granularity,
                lock_later: surroundings.arriving,
                io_uring: true,
            },
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
        let disk = blk::Blk::new(options, Arc::clone(&surroundings.spawner));
        let disk = disk.map_err(DeviceError::of)?;
        let handle = Handle::Disk(disk.handle());
        Ok(Made {
            function: MadeFunction::Virtio(Box::new(disk)),
            handle,
        })
    }
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
