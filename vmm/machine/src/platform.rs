//! The fixed devices of every machine, besides processors, memory and PCI devices: the serial port,
//! the registers for reset and power-off, and the controllers that announce changes through ACPI.

use std::{sync::Arc, time::Duration};

use acpi_tables::Aml;
use arch::{layout, topology::Topology};
use devices::{
    acpi::{
        CPU_HOTPLUG_SIZE, CpuHotplug, CpuHotplugState, GED_SIZE, GedState, GenerationId,
        GenericEventDevice, MEMORY_HOTPLUG_SIZE, MemoryHotplug, MemoryHotplugState, Notification,
        PmTimer, PmTimerState, PowerRegisters, Watchdog, WatchdogState,
    },
    bus::{BusDevice, BusError},
    guest_event::GuestEventHandler,
    legacy::{Cmos, CmosState, DebugPort, I8042, I8042State, Serial, SerialAml, SerialState},
    pci::{HOTPLUG_SIZE, HotplugController, HotplugState, PciBuses, SlotEvent},
};
use hypervisor::Vm;
use serde::{Deserialize, Serialize};

use super::{
    buses::Buses,
    error::MachineError,
    events::{EventSender, MachineEvent},
    interrupts,
};

/// The fixed devices.
pub struct Platform {
    /// Notifies the guest of changes.
    pub ged: Arc<GenericEventDevice>,
    /// Hot-plug of vCPUs.
    pub cpus: Arc<CpuHotplug>,
    /// Hot-plug of memory.
    pub memory: Arc<MemoryHotplug>,
    /// Hot-plug of PCI devices.
    pub pci: Arc<HotplugController>,
    serial: Option<Arc<Serial>>,
    i8042: Arc<I8042>,
    cmos: Arc<Cmos>,
    pm_timer: Arc<PmTimer>,
    watchdog: Option<Arc<Watchdog>>,
}

/// State of the fixed devices.
#[derive(Serialize, Deserialize)]
pub struct PlatformState {
    ged: GedState,
    cpus: CpuHotplugState,
    memory: MemoryHotplugState,
    pci: HotplugState,
    serial: Option<SerialState>,
    i8042: I8042State,
    /// States of older versions have none.
    #[serde(default)]
    cmos: CmosState,
    pm_timer: PmTimerState,
    /// Only of machines that have one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    watchdog: Option<WatchdogState>,
}

impl PlatformState {
    /// Advances the timer as if the machine had run for this time since it was saved.
    pub fn advance(&mut self, by: Duration) {
        self.pm_timer.advance(by);
    }

    /// Memory that was hot-plugged by ACPI: address and length of each module.
    pub fn plugged_memory(&self) -> impl Iterator<Item = (u64, u64)> {
        self.memory
            .slots
            .iter()
            .map(|slot| (slot.base, slot.length))
    }
}

/// What the fixed devices depend on.
pub struct PlatformSetup<'a> {
    /// Raises their interrupts.
    pub vm: &'a Vm,
    /// The buses on which they are placed.
    pub buses: &'a Buses,
    /// Where they send events.
    pub events: &'a EventSender,
    /// The topology of all possible vCPUs.
    pub topology: Topology,
    /// Number of vCPUs at boot.
    pub boot_vcpus: u32,
    /// NUMA node of each vCPU that has one.
    pub node_of: &'a dyn Fn(u32) -> Option<u32>,
    /// PCI buses.
    pub pci_buses: PciBuses,
    /// Output of the serial port; `None` for no port.
    pub serial: Option<Box<dyn std::io::Write + Send>>,
    /// Whether there is a watchdog.
    pub watchdog: bool,
    /// RAM below and above 4 GiB at boot, in bytes.
    pub ram: [u64; 2],
    /// When the process started.
    pub start: std::time::Instant,
}

impl Platform {
    /// Creates the devices and attaches them to the buses.
    pub fn new(setup: PlatformSetup<'_>) -> Result<Self, MachineError> {
        let PlatformSetup {
            vm,
            buses,
            events,
            topology,
            boot_vcpus,
            node_of,
            pci_buses,
            serial,
            watchdog,
            ram: [below_4g, above_4g],
            start,
        } = setup;
        let line = |gsi| {
            interrupts::line(vm, gsi).map_err(|source| MachineError::Host {
                action: "wire an interrupt",
                source,
            })
        };
        let guest_events = || -> GuestEventHandler {
            let events = events.clone();
            Box::new(move |event| events.send(MachineEvent::Guest(event)))
        };
        let ged = Arc::new(GenericEventDevice::new(
            line(layout::GED_GSI)?,
            layout::GED_GSI,
            layout::GED_START,
            Notification::all(),
        ));
        let cpus = CpuHotplug::new(
            layout::CPU_HOTPLUG_START,
            boot_vcpus,
            topology.vcpus(),
            move |vcpu| topology.apic_id(vcpu),
            guest_events(),
        )?;
        let cpus = Arc::new(cpus.with_nodes(node_of));
        let memory = Arc::new(MemoryHotplug::new(layout::MEMORY_HOTPLUG_START));
        let ejected = events.clone();
        let pci = Arc::new(HotplugController::new(
            pci_buses,
            Box::new(move |slot, event| {
                ejected.send(match event {
                    SlotEvent::Ejected => MachineEvent::PciEjected { slot },
                    SlotEvent::Refused(status) => MachineEvent::PciRefused { slot, status },
                });
            }),
        ));
        let serial = match serial {
            Some(output) => {
                let serial = Serial::new(line(layout::SERIAL_GSI)?, output).map_err(|source| {
                    MachineError::Host {
                        action: "make a serial port",
                        source,
                    }
                })?;
                Some(Arc::new(serial))
            }
            None => None,
        };
        let i8042 = Arc::new(I8042::new(guest_events()));
        let cmos = Arc::new(Cmos::new(below_4g, above_4g, guest_events()));
        let pm_timer = Arc::new(PmTimer::new());
        let watchdog = watchdog.then(|| Arc::new(Watchdog::new(Arc::clone(events.watchdog()))));
        let platform = Self {
            ged,
            cpus,
            memory,
            pci,
            serial,
            i8042,
            cmos,
            pm_timer,
            watchdog,
        };
        let power = Arc::new(PowerRegisters::new(guest_events()));
        platform.connect(buses, power, start)?;
        Ok(platform)
    }

    fn connect(
        &self,
        buses: &Buses,
        power: Arc<PowerRegisters>,
        start: std::time::Instant,
    ) -> Result<(), BusError> {
        let mmio: [(u64, u64, Arc<dyn BusDevice>); 4] = [
            (layout::GED_START, GED_SIZE, self.ged.clone()),
            (
                layout::CPU_HOTPLUG_START,
                CPU_HOTPLUG_SIZE,
                self.cpus.clone(),
            ),
            (
                layout::MEMORY_HOTPLUG_START,
                MEMORY_HOTPLUG_SIZE,
                self.memory.clone(),
            ),
            (layout::PCI_HOTPLUG_START, HOTPLUG_SIZE, self.pci.clone()),
        ];
        for (start, len, device) in mmio {
            buses.mmio.insert(start, len, device)?;
        }
        let mut ports: Vec<(u16, u16, Arc<dyn BusDevice>)> = vec![
            (
                layout::I8042_PORT,
                layout::I8042_PORT_COUNT,
                self.i8042.clone(),
            ),
            (
                layout::CMOS_PORT,
                layout::CMOS_PORT_COUNT,
                self.cmos.clone(),
            ),
            (layout::DEBUG_PORT, 1, Arc::new(DebugPort::new(start))),
            (layout::ACPI_RESET_PORT, 3, power),
            (
                layout::ACPI_PM_TIMER_PORT,
                layout::ACPI_PM_TIMER_PORT_COUNT,
                self.pm_timer.clone(),
            ),
        ];
        if let Some(serial) = &self.serial {
            ports.push((
                layout::SERIAL_PORT,
                layout::SERIAL_PORT_COUNT,
                serial.clone(),
            ));
        }
        if let Some(watchdog) = &self.watchdog {
            ports.push((
                layout::ACPI_WATCHDOG_PORT,
                layout::ACPI_WATCHDOG_PORT_COUNT,
                watchdog.clone(),
            ));
        }
        for (start, len, device) in ports {
            buses.pio.insert(start.into(), len.into(), device)?;
        }
        Ok(())
    }

    /// The serial port, for passing input to it.
    pub fn serial(&self) -> Option<&Arc<Serial>> {
        self.serial.as_ref()
    }

    /// The watchdog, if there is one.
    pub fn watchdog(&self) -> Option<&Watchdog> {
        self.watchdog.as_deref()
    }

    /// The part of the DSDT that describes these devices.
    pub fn aml(&self) -> Vec<Vec<u8>> {
        let bytes = |aml: &dyn Aml| {
            let mut bytes = Vec::new();
            aml.to_aml_bytes(&mut bytes);
            bytes
        };
        let mut all = vec![bytes(&*self.cpus), bytes(&*self.memory)];
        if self.serial.is_some() {
            let port = layout::SERIAL_PORT;
            all.push(bytes(&SerialAml {
                port,
                gsi: layout::SERIAL_GSI,
            }));
        }
        let address = layout::GENERATION_ID_START;
        all.push(bytes(&GenerationId { address }));
        // Last, because its methods refer to the others.
        all.push(bytes(&*self.ged));
        all
    }

    /// Saves the state; the vCPUs must be paused.
    pub fn save(&self) -> PlatformState {
        PlatformState {
            ged: self.ged.save(),
            cpus: self.cpus.save(),
            memory: self.memory.save(),
            pci: self.pci.save(),
            serial: self.serial.as_ref().map(|serial| serial.save()),
            i8042: self.i8042.save(),
            cmos: self.cmos.save(),
            pm_timer: self.pm_timer.save(),
            watchdog: self.watchdog().map(Watchdog::save),
        }
    }

    /// Restores a saved state, before the vCPUs run.
    pub fn restore(&self, state: PlatformState) -> Result<(), MachineError> {
        self.cpus.restore(state.cpus)?;
        self.memory.restore(state.memory)?;
        self.pci.restore(&state.pci);
        self.i8042.restore(state.i8042);
        self.cmos.restore(&state.cmos);
        self.pm_timer.restore(state.pm_timer);
        if let (Some(serial), Some(state)) = (&self.serial, state.serial) {
            serial.restore(state)?;
        }
        if let (Some(watchdog), Some(state)) = (&self.watchdog, state.watchdog) {
            watchdog.restore(state);
        }
        self.ged
            .restore(state.ged)
            .map_err(|source| MachineError::Host {
                action: "raise a saved interrupt",
                source,
            })
    }
}
