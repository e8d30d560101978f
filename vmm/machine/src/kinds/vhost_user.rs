//! Devices whose queues another process serves (vhost-user), of whatever kind.

use std::path::{Path, PathBuf};

use devices::vhost_user::{self, Backend, Model, VhostUser};

use super::{
    super::{
        devices::{Made, MadeFunction, Surroundings},
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
    /// By which the back end was judged. It may have an address that was made up.
    model: Model,
    backend: Backend,
}

/// What connects to the back end of a device of a kind.
pub(super) fn opener(kind: &'static str, served: Served<'_>) -> Opener {
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
            model,
            backend,
        });
        Ok(())
    };
    Box::new(open)
}

/// Makes the device of a back end, and connects to that unless this was done before.
pub(super) fn make(
    served: Served<'_>,
    id: &str,
    surroundings: &Surroundings,
) -> Result<Made, DeviceError> {
    let Served { socket, model } = served;
    let is_its = |opened: &Opened| opened.socket == socket && opened.model.is_like(&model);
    let (backend, model) = match surroundings.images.take_kept(is_its) {
        Some(opened) => (opened.backend, opened.model),
        None => {
            let backend = Backend::connect(socket, &model);
            (backend.map_err(DeviceError::of)?, model)
        }
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
