//! Memory balloon.

use std::sync::Arc;

use devices::virtio::balloon;
use vmm_config::BalloonConfig;

use super::{
    super::{
        devices::{DeviceKind, Made, MadeFunction, Surroundings},
        error::DeviceError,
    },
    Handle, thread_name,
};

impl DeviceKind for BalloonConfig {
    const NAME: &'static str = "balloon";

    fn make(&self, id: &str, surroundings: &Surroundings) -> Result<Made, DeviceError> {
        let options = balloon::Options {
            thread_name: thread_name(Self::NAME, id),
            size: self.size,
            deflate_on_oom: self.deflate_on_oom,
            free_page_reporting: self.free_page_reporting,
            discards: Arc::clone(&surroundings.discards),
        };
        let balloon = balloon::Balloon::new(options, Arc::clone(&surroundings.spawner));
        let handle = Handle::Balloon(balloon.handle());
        Ok(Made {
            function: MadeFunction::Virtio(Box::new(balloon)),
            handle,
        })
    }
}
