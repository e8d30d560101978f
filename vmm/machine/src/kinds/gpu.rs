//! Virtual GPUs.

use std::sync::{Arc, Mutex};

use devices::gpu::{Gpu, Options, Resources};
use vmm_config::GpuConfig;

use super::{
    super::{
        devices::{DeviceKind, Made, MadeFunction, Surroundings},
        error::DeviceError,
    },
    Handle, thread_name,
};

impl DeviceKind for GpuConfig {
    const NAME: &'static str = "gpu";
    const CALLED: &'static str = "GPU";

    fn shares_ram(&self) -> bool {
        true
    }

    fn make(&self, id: &str, surroundings: &Surroundings) -> Result<Made, DeviceError> {
        let options = Options {
            socket: self.socket.clone(),
            vram: self.vram,
            channels: self.channels,
            weight: self.weight,
            remap: self.remap,
            lazy: self.lazy,
            watch: self.watch,
            record: self.record.clone(),
            thread_name: thread_name(Self::NAME, id),
        };
        let physical = surroundings.physical.resources();
        let resources = Resources {
            msi: Arc::clone(&surroundings.msi),
            lines: physical.lines,
            space: physical.space,
            memory: surroundings.memory.clone(),
            spawner: Arc::clone(&surroundings.spawner),
        };
        let gpu = Gpu::new(options, resources).map_err(DeviceError::of)?;
        Ok(Made {
            function: MadeFunction::Pci(Arc::new(Mutex::new(gpu))),
            handle: Handle::None,
        })
    }
}
