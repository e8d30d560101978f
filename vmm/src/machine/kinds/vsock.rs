//! Sockets between guest and host.

use std::sync::Arc;

use devices::virtio::vsock;

use super::{
    super::{
        devices::{DeviceKind, Made, MadeFunction, Surroundings},
        error::DeviceError,
    },
    Handle, thread_name,
};
use crate::config::VsockConfig;

impl DeviceKind for VsockConfig {
    const NAME: &'static str = "vsock";

    fn make(&self, id: &str, surroundings: &Surroundings) -> Result<Made, DeviceError> {
        let options = vsock::Options {
            thread_name: thread_name(Self::NAME, id),
            cid: self.cid,
            socket: self.socket.clone(),
        };
        let vsock = vsock::Vsock::new(options, Arc::clone(&surroundings.spawner));
        let vsock = vsock.map_err(DeviceError::of)?;
        Ok(Made {
            function: MadeFunction::Virtio(Box::new(vsock)),
            handle: Handle::None,
        })
    }
}
