//! Shared folders.

use devices::vhost_user::Model;
use vmm_config::FsConfig;

use super::{
    super::{
        devices::{DeviceKind, Made, Surroundings},
        error::DeviceError,
    },
    vhost_user::{self, Served},
};

impl DeviceKind for FsConfig {
    const NAME: &'static str = "fs";
    const CALLED: &'static str = "shared folder";

    fn shares_ram(&self) -> bool {
        true
    }

    fn make(&self, id: &str, surroundings: &Surroundings) -> Result<Made, DeviceError> {
        vhost_user::make(served(self), id, surroundings)
    }
}

/// What another process serves for a shared folder.
pub(super) fn served(fs: &FsConfig) -> Served<'_> {
    Served {
        socket: &fs.socket,
        model: Model::fs(&fs.tag, fs.num_queues, fs.queue_size),
    }
}
