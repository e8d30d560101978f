//! Sockets between guest and host.

use std::sync::Arc;

use devices::virtio::vsock;

use super::{
    super::{
        devices::{Kind, Made, MadeFunction, Slot, Surroundings},
        error::DeviceError,
    },
    Handle, thread_name,
};
use crate::config::VsockConfig;

impl Kind for VsockConfig {
    const NAME: &'static str = "vsock";

    fn id(&mut self) -> &mut Option<String> {
        &mut self.id
    }

    fn slot(&self) -> Slot {
        Slot {
            segment: self.pci_segment,
            device: self.pci_device_id,
            ..Slot::default()
        }
    }

    fn make(&self, id: &str, surroundings: &Surroundings) -> Result<Made, DeviceError> {
        let options = vsock::Options {
            thread_name: thread_name(Self::NAME, id),
            cid: self.cid,
            socket: self.socket.clone(),
        };
        let vsock = vsock::Vsock::new(options, Arc::clone(&surroundings.spawner))?;
        Ok(Made {
            function: MadeFunction::Virtio(Box::new(vsock)),
            handle: Handle::None,
        })
    }
}
