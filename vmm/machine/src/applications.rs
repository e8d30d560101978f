//! Applications of accelerators when a machine is saved or migrated: they are stopped and saved here, and restored
//! where the machine continues. Until then the workers here can resume them. The applications of a migrating machine
//! are first copied, while they still run, to workers at the destination. The ports of those workers become part of the
//! machine's devices once the devices have arrived.
//!
//! A separate thread waits for workers, never the thread that owns the machine.

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
use vmm_config::{DRAIN_MS, HasCommonConfig, VmConfig};

use super::{Machine, error::MachineError};

/// How long an application's outstanding device work may take before the application is saved.
const DRAIN: Duration = Duration::from_millis(DRAIN_MS);
/// Time limit for all workers together to stop and save, or to restore: this includes copying memory contents and
/// building programs.
pub const LONG: Duration = Duration::from_secs(600);

/// Starts to stop all applications of these accelerators, with [`LONG`] as the time limit for all of them.
pub fn stop(ports: Vec<(String, Handle)>, cancel: Cancel) -> Result<Standing, MachineError> {
    Ok(Standing::new(ports, DRAIN, Patience::new(LONG, cancel))?)
}

/// Checks whether the applications of these accelerators can be moved, as far as that can be told while they run.
///
/// # Errors
/// Lists all reasons why some cannot be moved.
pub fn check_movable(ports: &[(String, Handle)], cancel: Cancel) -> Result<(), MachineError> {
    let reasons = immovable(ports, &Patience::new(LONG, cancel));
    match reasons.is_empty() {
        true => Ok(()),
        false => Err(saved::Error::Stays(reasons).into()),
    }
}

/// Waits until workers that did not finish copying their applications in time can be stopped.
pub fn wait_for_workers(copied: &Copied, cancel: Cancel) -> Result<(), MachineError> {
    Ok(copied.wait_for_workers(&Patience::new(LONG, cancel))?)
}

/// Number of bytes of memory that running applications have allocated since they were copied.
pub fn made(copied: &Copied, cancel: Cancel) -> u64 {
    copied.made(&Patience::new(LONG, cancel))
}

/// Creates an empty archive and its file.
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

/// Copies what has changed in running applications into a new file, which is returned.
pub fn copy(copied: &mut Copied, cancel: Cancel) -> Result<(Vec<CopiedPort>, File), MachineError> {
    let (mut archive, file) = archive()?;
    let ports = copied.round(&mut archive, &Patience::new(LONG, cancel))?;
    Ok((ports, file))
}

/// Saves the applications of a stopped machine into a new file, which is returned: only what has changed since they
/// were copied. The time limit starts anew, because memory may have been sent meanwhile.
pub fn depart(
    standing: Standing,
    copied: Copied,
    cancel: Cancel,
) -> Result<(Stopped, File), MachineError> {
    let standing = standing.wait(Patience::new(LONG, cancel)).after(copied);
    let (mut archive, file) = archive()?;
    Ok((standing.save(&mut archive)?, file))
}

/// Makes workers create copies of applications that still run elsewhere, through these ports.
///
/// # Errors
/// Lists all reasons why some cannot be copied.
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

/// Makes workers restore the applications of a machine that has arrived.
///
/// # Errors
/// Lists all reasons why some cannot be restored.
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

/// Where applications of an arrived machine will request contents that follow after it has started to run.
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

/// Ports of an arriving machine, by name, until its devices have arrived.
#[derive(Default)]
pub struct Ports(Mutex<BTreeMap<String, Accel>>);

impl Ports {
    /// Returns the port with this name, created on first use.
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

    /// Takes the port with this name for its device. `archive` is the archive that arrived with the machine.
    pub fn take(&self, id: &str, archive: Option<Arc<File>>) -> Option<Accel> {
        let mut port = self.0.lock_unpoisoned().remove(id)?;
        port.set_archive(archive);
        Some(port)
    }
}

impl Machine {
    /// The ports through which workers restore the copied applications of an arriving machine.
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

    /// Accelerators with applications that workers must restore before the machine runs.
    pub fn ports_to_take_up(&self) -> Vec<(String, Handle)> {
        let mut ports = self.devices.ports();
        ports.retain(|(_, port)| port.has_images());
        ports
    }
}
