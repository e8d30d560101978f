//! Devices whose queues another process serves (vhost-user), of whatever kind.

use std::{
    any::Any,
    path::{Path, PathBuf},
};

use devices::vhost_user::{self, Backend, Model, VhostUser};
use vmm_config::{Device, DiskConfig, FsConfig};

use super::{
    super::{
        devices::{DeviceKind, Made, MadeFunction, Surroundings},
        error::{DeviceError, MachineError},
        events::MachineEvent,
        images::Images,
    },
    Handle, Opener, thread_name,
};

/// What another process serves for a device.
pub(super) struct Served<'a> {
    /// The process's socket.
    pub(super) socket: &'a Path,
    /// The type of device.
    pub(super) model: Model,
}

/// A connection that was opened before its device is made.
struct Opened {
    socket: PathBuf,
    device_type: u16,
    /// Number of queues, by which its back end was judged.
    queues: u16,
    backend: Backend,
}

/// What connects to the back end of a device, if it has one.
pub(super) fn opener(device: &dyn Device) -> Option<(&'static str, Opener)> {
    let device: &dyn Any = device;
    let (kind, served) = if let Some(fs) = device.downcast_ref() {
        (FsConfig::NAME, super::fs::served(fs))
    } else {
        let disk = device.downcast_ref()?;
        (DiskConfig::NAME, super::disk::served(disk)?)
    };
    let Served { socket, model } = served;
    let socket = socket.to_owned();
    let open = move |id: &str, images: &Images| {
        let backend = Backend::connect(&socket, &model);
        let backend = backend.map_err(|source| MachineError::Device {
            kind,
            id: id.to_owned(),
            source: Box::new(DeviceError::of(source)),
        })?;
        images.keep(Opened {
            socket,
            device_type: model.device_type().number,
            queues: model.queues(),
            backend,
        });
        Ok(())
    };
    Some((kind, Box::new(open)))
}

/// Makes the device of a back end, and connects to that unless this was done before.
pub(super) fn make(
    served: Served<'_>,
    id: &str,
    surroundings: &Surroundings,
) -> Result<Made, DeviceError> {
    let Served { socket, model } = served;
    let is_its = |opened: &Opened| {
        opened.socket == socket
            && opened.device_type == model.device_type().number
            && opened.queues == model.queues()
    };
    let backend = match surroundings.images.take_kept(is_its) {
        Some(opened) => opened.backend,
        None => Backend::connect(socket, &model).map_err(DeviceError::of)?,
    };
    let (events, name) = (surroundings.events.clone(), id.to_owned());
    let options = vhost_user::Options {
        thread_name: thread_name("vu", id),
        socket: socket.to_owned(),
        model,
        lost: Box::new(move |reason| {
            events.send(MachineEvent::DeviceLost {
                id: name.clone(),
                reason,
            });
        }),
        patience: vhost_user::PATIENCE,
    };
    let made = VhostUser::new(
        backend,
        options,
        &surroundings.memory,
        &*surroundings.spawner,
    );
    let (device, handle) = made.map_err(DeviceError::of)?;
    Ok(Made {
        function: MadeFunction::Virtio(Box::new(device)),
        handle: Handle::BackEnd(handle),
    })
}
