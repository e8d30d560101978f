//! Accelerators' applications that stand still while their machine is saved or leaves, and that are taken
//! up where it goes on. Until then the workers here can go on.
//!
//! Workers are waited for by a thread of its own, never by the one that owns the machine.

use std::{fs::File, time::Duration};

use ::devices::accel::{
    moving::Handle,
    saved::{Archive, Standing, Stopped, image},
};
use base::{Cancel, Patience};

use super::{Machine, error::MachineError};
use crate::api::model::DRAIN_MS;

/// How long an application may go on with what its device is at when it is to be saved.
const DRAIN: Duration = Duration::from_millis(DRAIN_MS);
/// How long workers have, all together, to stop and save, or to restore: contents of memory are copied,
/// and programs built.
pub const LONG: Duration = Duration::from_secs(600);

/// Stops all applications of these accelerators, which have so long for all of it.
pub fn stop(ports: Vec<(String, Handle)>, cancel: Cancel) -> Result<Standing, MachineError> {
    Ok(Standing::new(ports, DRAIN, Patience::new(LONG, cancel))?)
}

/// Saves the applications of a machine that stands still, in the file that comes back. They have so long
/// again: memory may have been sent meanwhile.
pub fn depart(standing: Standing, cancel: Cancel) -> Result<(Stopped, File), MachineError> {
    let standing = standing.wait(Patience::new(LONG, cancel));
    let host = |source| MachineError::Host {
        action: "save accelerators' applications",
        source,
    };
    let file = image().map_err(host)?;
    let mut archive = Archive::new(file.try_clone().map_err(host)?);
    Ok((standing.save(&mut archive)?, file))
}

/// Has workers take up the applications with which a machine has come.
///
/// # Errors
/// All reasons why some cannot.
pub fn take_up(ports: &[(String, Handle)], cancel: Cancel) -> Result<(), MachineError> {
    let patience = Patience::new(LONG, cancel);
    let taken = |(id, port): &(String, Handle)| {
        let reasons = port.take_up(&patience).err()?;
        Some(format!("{id}: {reasons}"))
    };
    let reasons: Vec<_> = ports.iter().filter_map(taken).collect();
    match reasons.is_empty() {
        true => Ok(()),
        false => Err(MachineError::TakeUp(reasons)),
    }
}

impl Machine {
    /// Accelerators with applications that workers have to take up before the machine runs.
    pub fn ports_to_take_up(&self) -> Vec<(String, Handle)> {
        let mut ports = self.devices.ports();
        ports.retain(|(_, port)| port.has_images());
        ports
    }
}
