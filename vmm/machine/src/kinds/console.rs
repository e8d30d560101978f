//! Consoles: their backends, and the virtio console.

use std::{path::PathBuf, sync::Arc};

use devices::{console::ConsoleMode as Backend, virtio::console};
use vmm_config::{ConsoleConfig, ConsoleMode};

use super::{
    super::{
        devices::{DeviceKind, Made, MadeFunction, Surroundings},
        error::{DeviceError, MachineError},
    },
    Handle, thread_name,
};

/// The backend of a console; `None` if there is no such device.
pub fn backend_mode(
    mode: ConsoleMode,
    file: Option<&PathBuf>,
    socket: Option<&PathBuf>,
) -> Result<Option<Backend>, MachineError> {
    let needed = |path: Option<&PathBuf>, what: &str| {
        path.cloned().ok_or_else(|| {
            MachineError::Invalid(format!("a console of mode {mode:?} needs a {what}"))
        })
    };
    Ok(Some(match mode {
        ConsoleMode::Off => return Ok(None),
        ConsoleMode::Null => Backend::Null,
        ConsoleMode::Tty => Backend::Tty,
        ConsoleMode::Pty => Backend::Pty,
        ConsoleMode::File => Backend::File(needed(file, "file")?),
        ConsoleMode::Socket => Backend::Socket(needed(socket, "socket")?),
    }))
}

impl DeviceKind for ConsoleConfig {
    const NAME: &'static str = "console";

    fn make(&self, id: &str, surroundings: &Surroundings) -> Result<Made, DeviceError> {
        let Some((output, size)) = surroundings.console.clone() else {
            return Err(DeviceError::Invalid("the console leads nowhere".to_owned()));
        };
        let options = console::Options {
            thread_name: thread_name(Self::NAME, id),
            size,
        };
        let spawner = Arc::clone(&surroundings.spawner);
        let console =
            console::Console::new(options, Box::new(output), spawner).map_err(|source| {
                DeviceError::Host {
                    action: "make a console",
                    source,
                }
            })?;
        let handle = Handle::Console {
            input: console.input(),
            device: console.handle(),
        };
        Ok(Made {
            function: MadeFunction::Virtio(Box::new(console)),
            handle,
        })
    }
}
