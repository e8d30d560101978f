//! Connects the interrupts of a device to eventfds, through which they reach the guest.
//!
//! The device uses as many of the host's interrupt vectors as the guest unmasks. If the guest uses
//! three entries of a table with 2,048, it costs three vectors. Where the host cannot add vectors
//! later, it costs as many as the highest unmasked entry requires.

use std::{
    io,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
};

use base::Unpoisoned;
use device_model::msi::MsiVectors;
use pci::{Line, MsixTable};
use vmm_sys_util::eventfd::EventFd;

use super::device::{Device, IrqRun, Irqs};

/// The guest's choice.
#[derive(Clone, Copy)]
pub enum Wanted<'a> {
    /// No interrupts.
    Nothing,
    /// The interrupt line.
    Line(&'a dyn Line),
    /// This number of MSI messages.
    Msi(&'a dyn MsiVectors, u16),
    /// The unmasked vectors of the MSI-X table.
    Msix(&'a MsixTable),
}

/// The device's current mode.
enum Mode {
    Off,
    Line,
    Msi(u16),
    Msix(Connected),
}

/// The connected vectors of the table.
struct Connected {
    used: Vec<bool>,
    /// Number of vectors that the host has reserved.
    room: u16,
}

/// The interrupts of a device, shared by its configuration space and its vector table.
pub struct Interrupts {
    device: Arc<dyn Device>,
    mode: Mutex<Mode>,
    /// A failure that the guest can trigger at will is logged once.
    warned: AtomicBool,
}

impl Interrupts {
    /// Creates an instance with all interrupts off.
    pub fn new(device: Arc<dyn Device>) -> Self {
        Self {
            device,
            mode: Mutex::new(Mode::Off),
            warned: AtomicBool::new(false),
        }
    }

    /// Configures the device as the guest wants. Failures are retried at the next call.
    pub fn want(&self, wanted: Wanted) {
        let mut mode = self.lock();
        let changed = match (&mut *mode, wanted) {
            (Mode::Off, Wanted::Nothing) | (Mode::Line, Wanted::Line(_)) => Ok(()),
            (Mode::Msi(now), Wanted::Msi(_, count)) if *now == count => Ok(()),
            (Mode::Msix(connected), Wanted::Msix(table)) => {
                let wanted = (0..table.count()).filter(|vector| table.is_unmasked(*vector));
                self.connect_more(connected, table, &wanted.collect::<Vec<_>>())
            }
            (_, wanted) => self.switch(&mut mode, wanted),
        };
        self.report(changed);
    }

    /// Handles a guest write to a vector of the table.
    pub fn vector_changed(&self, table: &MsixTable, vector: u16) {
        let mut mode = self.lock();
        if let Mode::Msix(connected) = &mut *mode
            && table.is_unmasked(vector)
        {
            let changed = self.connect_more(connected, table, &[vector]);
            self.report(changed);
        }
    }

    fn switch(&self, mode: &mut Mode, wanted: Wanted) -> io::Result<()> {
        match mode {
            Mode::Off => {}
            Mode::Line => self.device.disconnect(Irqs::Line)?,
            Mode::Msi(_) => self.device.disconnect(Irqs::Msi)?,
            Mode::Msix(_) => self.device.disconnect(Irqs::Msix)?,
        }
        *mode = Mode::Off;
        *mode = match wanted {
            Wanted::Nothing => Mode::Off,
            Wanted::Line(line) => {
                self.device.connect_line(line.assert(), line.served())?;
                Mode::Line
            }
            Wanted::Msi(vectors, count) => {
                let fds = (0..count).map(|vector| vectors.irqfd(vector).map(Some));
                let fds: Vec<_> = fds.collect::<io::Result<_>>()?;
                self.device.connect(Irqs::Msi, 0, &fds)?;
                Mode::Msi(count)
            }
            Wanted::Msix(table) => {
                let used: Vec<_> = (0..table.count()).map(|at| table.is_unmasked(at)).collect();
                Mode::Msix(self.connect_table(table, used)?)
            }
        };
        Ok(())
    }

    /// Connects the vectors in use, while the device's MSI-X is off. MSI-X is enabled even without
    /// any: the driver may check, and without MSI-X the device would use its interrupt line.
    fn connect_table(&self, table: &MsixTable, used: Vec<bool>) -> io::Result<Connected> {
        let room = used.iter().rposition(|used| *used).unwrap_or(0) + 1;
        let fds: Vec<_> = (0..)
            .zip(&used[..room])
            .map(|(vector, used)| irqfd(table, vector, *used))
            .collect::<io::Result<_>>()?;
        self.device.connect(Irqs::Msix, 0, &fds)?;
        // At most as many as the table has.
        let room = room as u16;
        Ok(Connected { used, room })
    }

    fn connect_more(
        &self,
        connected: &mut Connected,
        table: &MsixTable,
        vectors: &[u16],
    ) -> io::Result<()> {
        let is_new = |vector: &u16| !connected.used.get(usize::from(*vector)).unwrap_or(&true);
        let new: Vec<_> = vectors.iter().copied().filter(is_new).collect();
        let Some(highest) = new.iter().max() else {
            return Ok(());
        };
        if *highest < connected.room || self.device.irqs_grow(Irqs::Msix) {
            // Adjacent vectors together, and all runs at once: a vCPU waits for a slow server.
            let runs = new.chunk_by(|one, next| one.checked_add(1) == Some(*next));
            let runs = runs.map(|run| {
                let fds = run.iter().map(|at| irqfd(table, *at, true));
                // A run is never empty.
                Ok((run[0], fds.collect::<io::Result<_>>()?))
            });
            let runs: Vec<IrqRun> = runs.collect::<io::Result<_>>()?;
            self.device.connect_runs(Irqs::Msix, &runs)?;
            for vector in new {
                connected.used[usize::from(vector)] = true;
                connected.room = connected.room.max(vector + 1);
            }
            return Ok(());
        }
        let mut used = connected.used.clone();
        for vector in new {
            used[usize::from(vector)] = true;
        }
        let before = connected.used.clone();
        self.device.disconnect(Irqs::Msix)?;
        let all = self.connect_table(table, used);
        *connected = match all {
            Ok(all) => all,
            // Keep the vectors that worked before.
            Err(error) => {
                *connected = self.connect_table(table, before)?;
                self.raise_used(connected, table);
                return Err(error);
            }
        };
        self.raise_used(connected, table);
        Ok(())
    }

    /// Raises all vectors in use: interrupts during the disconnection were lost, and drivers
    /// tolerate a spurious interrupt but not a missing one.
    fn raise_used(&self, connected: &Connected, table: &MsixTable) {
        for (vector, used) in (0..).zip(&connected.used) {
            if *used {
                self.report(table.raise_shared(vector));
            }
        }
    }

    fn report(&self, changed: io::Result<()>) {
        if let Err(error) = changed
            && !self.warned.swap(true, Ordering::Relaxed)
        {
            let device = self.device.name();
            log::warn!("device {device}: cannot change its interrupts: {error}");
        }
    }

    fn lock(&self) -> MutexGuard<'_, Mode> {
        self.mode.lock_unpoisoned()
    }
}

/// The eventfd of a vector, if it is in use.
fn irqfd(table: &MsixTable, vector: u16, used: bool) -> io::Result<Option<&EventFd>> {
    let vectors = table.vectors().filter(|_| used);
    vectors.map(|vectors| vectors.irqfd(vector)).transpose()
}
