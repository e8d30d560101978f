//! Consoles.

use std::path::PathBuf;

use devices::console::ConsoleMode as Backend;

use super::super::error::MachineError;
use crate::config::{ConsoleMode, SerialConfig};

/// Where a console leads; `None` if there is no such device.
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

/// Where the serial port leads; `None` if there is none.
pub fn serial_mode(config: &SerialConfig) -> Result<Option<Backend>, MachineError> {
    backend_mode(config.mode, config.file.as_ref(), config.socket.as_ref())
}
