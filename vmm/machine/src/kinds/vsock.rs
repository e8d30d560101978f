//! Sockets between guest and host.

use std::sync::Arc;

use devices::virtio::vsock;
use vmm_config::VsockConfig;

use super::{
    super::{
        devices::{DeviceKind, Made, MadeFunction, Surroundings},
        error::DeviceError,
    },
    Handle, thread_name,
};

impl DeviceKind for VsockConfig {
    const NAME: &'static str = "vsock";

    fn make(&self, id: &str, surroundings: &Surroundings) -> Result<Made, DeviceError> {
        let options = vsock::Options {
            thread_name: thread_name(Self::NAME, id),
            cid: self.cid,
            socket: self.socket.clone(),
        };
        let spawner = Arc::clone(&surroundings.spawner);
        let given = surroundings.given.socket(&options.socket);
        let vsock = match given.map_err(DeviceError::of)? {
            Some(socket) => vsock::Vsock::on_socket(options, socket, spawner),
            None => vsock::Vsock::new(options, spawner),
        };
        let vsock = vsock.map_err(DeviceError::of)?;
        let handle = Handle::Vsock(vsock.shared_socket());
        Ok(Made {
            function: MadeFunction::Virtio(Box::new(vsock)),
            handle,
        })
    }
}
