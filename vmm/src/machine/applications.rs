//! Accelerators' applications that stand still while their machine is saved or leaves, and that are taken
//! up where it goes on. Until then the workers here can go on. Those of a machine that leaves are copied
//! before, while they go on, to workers at ports that its devices are made of when they have come.
//!
//! Workers are waited for by a thread of its own, never by the one that owns the machine.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    sync::{Arc, Mutex},
    time::Duration,
};

use ::devices::accel::{
    Accel,
    left::{Application, Asking},
    moving::Handle,
    rounds::{Copied, CopiedPort, immovable},
    saved::{self, Archive, Standing, Stopped, check_pieces, image},
};
use base::{Cancel, Chain, Patience, Unpoisoned};

use super::{Machine, error::MachineError};
use crate::{
    api::model::DRAIN_MS,
    config::{HasCommonConfig, VmConfig},
};

/// How long an application may go on with what its device is at when it is to be saved.
const DRAIN: Duration = Duration::from_millis(DRAIN_MS);
/// How long workers have, all together, to stop and save, or to restore: contents of memory are copied,
/// and programs built.
pub const LONG: Duration = Duration::from_secs(600);

/// Stops all applications of these accelerators, which have so long for all of it.
pub fn stop(ports: Vec<(String, Handle)>, cancel: Cancel) -> Result<Standing, MachineError> {
    Ok(Standing::new(ports, DRAIN, Patience::new(LONG, cancel))?)
}

/// Checks whether the applications of these accelerators can go elsewhere, as far as that is known while they go on.
///
/// # Errors
/// All reasons why some cannot.
pub fn check_movable(ports: &[(String, Handle)], cancel: Cancel) -> Result<(), MachineError> {
    let reasons = immovable(ports, &Patience::new(LONG, cancel));
    match reasons.is_empty() {
        true => Ok(()),
        false => Err(saved::Error::Stays(reasons).into()),
    }
}

/// Waits until workers that have not copied their applications in time can be stopped.
pub fn wait_for_workers(copied: &Copied, cancel: Cancel) -> Result<(), MachineError> {
    Ok(copied.wait_for_workers(&Patience::new(LONG, cancel))?)
}

/// How many bytes of memory applications that go on have made since they were copied.
pub fn made(copied: &Copied, cancel: Cancel) -> u64 {
    copied.made(&Patience::new(LONG, cancel))
}

/// An empty archive, and its file.
fn archive() -> Result<(Archive, File), MachineError> {
    let make = || {
        let file = image()?;
        Ok((Archive::new(file.try_clone()?), file))
    };
    make().map_err(|source| MachineError::Host {
        action: "save accelerators' applications",
        source,
    })
}

/// Copies what is new of applications that go on, to the file that comes back.
pub fn copy(copied: &mut Copied, cancel: Cancel) -> Result<(Vec<CopiedPort>, File), MachineError> {
    let (mut archive, file) = archive()?;
    let ports = copied.round(&mut archive, &Patience::new(LONG, cancel))?;
    Ok((ports, file))
}

/// Saves the applications of a machine that stands still, in the file that comes back: what is new since
/// they were copied. They have so long again: memory may have been sent meanwhile.
pub fn depart(
    standing: Standing,
    copied: Copied,
    cancel: Cancel,
) -> Result<(Stopped, File), MachineError> {
    let standing = standing.wait(Patience::new(LONG, cancel)).after(copied);
    let (mut archive, file) = archive()?;
    Ok((standing.save(&mut archive)?, file))
}

/// Has workers make a copy of applications that go on elsewhere, by these ports.
///
/// # Errors
/// All reasons why some cannot.
pub fn prepare(
    ports: &[(CopiedPort, Handle)],
    archive: &File,
    cancel: Cancel,
) -> Result<(), MachineError> {
    let slices = ports.iter().flat_map(|(copied, _)| &copied.slices);
    check_pieces(slices).map_err(|why| MachineError::TakeUp(vec![Chain(&why).to_string()]))?;
    let patience = Patience::new(LONG, cancel);
    let prepared = |(copied, port): &(CopiedPort, Handle)| {
        let reasons = port.prepare(&copied.slices, archive, &patience).err()?;
        Some(format!("{}: {reasons}", copied.id))
    };
    let reasons: Vec<_> = ports.iter().filter_map(prepared).collect();
    match reasons.is_empty() {
        true => Ok(()),
        false => Err(MachineError::TakeUp(reasons)),
    }
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

/// Where applications with which a machine has come will ask for contents that follow, when it runs.
pub fn asking(ports: Vec<(String, Handle)>) -> Result<Vec<Asking>, String> {
    let mut all = Vec::new();
    for (port, handle) in ports {
        let asking = handle
            .asking()
            .map_err(|error| format!("there is no socket for what follows: {error}"))?;
        let of = |(slice, socket)| Asking {
            of: Application {
                port: port.clone(),
                slice,
            },
            socket,
            followed: handle.followed(),
        };
        all.extend(asking.into_iter().map(of));
    }
    Ok(all)
}

/// Ports of a machine that arrives, by name, until its devices have come.
#[derive(Default)]
pub struct Ports(Mutex<BTreeMap<String, Accel>>);

impl Ports {
    /// The one of this name, made if there is none.
    pub fn find<E>(&self, id: &str, make: impl FnOnce() -> Result<Accel, E>) -> Result<Handle, E> {
        let mut ports = self.0.lock_unpoisoned();
        if let Some(port) = ports.get(id) {
            return Ok(port.handle());
        }
        let port = make()?;
        let handle = port.handle();
        ports.insert(id.to_owned(), port);
        Ok(handle)
    }

    /// Takes the one of this name, for the device. `archive` is what came with it.
    pub fn take(&self, id: &str, archive: Option<Arc<File>>) -> Option<Accel> {
        let mut port = self.0.lock_unpoisoned().remove(id)?;
        port.set_archive(archive);
        Some(port)
    }
}

impl Machine {
    /// By which workers take up what was copied of the applications of a machine that arrives.
    pub fn ports_to_prepare(
        &self,
        config: &VmConfig,
        copied: Vec<CopiedPort>,
    ) -> Result<Vec<(CopiedPort, Handle)>, MachineError> {
        let mut seen = BTreeSet::new();
        let port = |copied: CopiedPort| {
            if !seen.insert(copied.id.clone()) {
                let twice = format!("a copy has {:?} twice", copied.id);
                return Err(MachineError::TakeUp(vec![twice]));
            }
            let mut accels = config.accels.iter().flatten();
            let named = accels.find(|one| one.common().id.as_ref() == Some(&copied.id));
            let named = named.ok_or_else(|| MachineError::NoDevice(copied.id.clone()))?;
            let port = self.devices.stand_by(named)?;
            Ok((copied, port))
        };
        copied.into_iter().map(port).collect()
    }

    /// Accelerators with applications that workers have to take up before the machine runs.
    pub fn ports_to_take_up(&self) -> Vec<(String, Handle)> {
        let mut ports = self.devices.ports();
        ports.retain(|(_, port)| port.has_images());
        ports
    }
}
