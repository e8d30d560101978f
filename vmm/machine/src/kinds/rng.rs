//! Entropy.

use std::sync::Arc;

use devices::virtio::rng;
use vmm_config::RngConfig;

use super::{
    super::{
        devices::{DeviceKind, Made, MadeFunction, Surroundings},
        error::DeviceError,
    },
    Handle, thread_name,
};

impl DeviceKind for RngConfig {
    const NAME: &'static str = "rng";
    const CALLED: &'static str = "random number generator";

    fn make(&self, id: &str, surroundings: &Surroundings) -> Result<Made, DeviceError> {
        let options = rng::Options {
            thread_name: thread_name(Self::NAME, id),
            source: self.src.clone(),
        };
        let rng = rng::Rng::new(options, Arc::clone(&surroundings.spawner));
        let rng = rng.map_err(DeviceError::of)?;
        Ok(Made {
            function: MadeFunction::Virtio(Box::new(rng)),
            handle: Handle::None,
        })
    }
}
