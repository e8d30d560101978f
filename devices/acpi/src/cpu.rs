//! CPU hot-plug: adding and removing vCPUs with the guest's cooperation.
//!
//! Registers (little endian, the rest reads 0):
//!
//! | offset | width | access | meaning |
//! |---|---|---|---|
//! | 0 | 4 | read, write | number of the vCPU to which the flags apply |
//! | 4 | 1 | read | bit 0: present; bit 1: insertion pending; bit 2: removal pending |
//! | 4 | 1 | write | bit 1, 2: acknowledge; bit 3: eject |
//! | 8 | 4 | read | lowest vCPU with anything pending, or all ones |
//!
//! The last register makes a scan cost a few exits, instead of several per possible vCPU.
//!
//! ```text
//!            insert             acknowledge
//!   Absent ─────────> Inserted ─────────────> Present <────── insert (cancels) ──────┐
//!     ^                  └───── remove ──────────┴── remove ──> RemovalRequested ────┤
//!     │                                                                 │ acknowledge│
//!     └────────────────────────── eject ────────────────────── RemovalSeen ──────────┘
//! ```
//!
//! The guest can eject only vCPUs that it was asked to release, so that the VMM never loses a vCPU
//! that it relies on.

use std::sync::{Mutex, MutexGuard};

use acpi_tables::{Aml, AmlSink, aml};
use arch::topology::MAX_VCPUS;
use base::Unpoisoned;
use device_model::{
    bus::BusDevice,
    guest_event::{GuestEvent, GuestEventHandler},
};
use serde::{Deserialize, Serialize};

use super::registers::{
    self, DEVICE_CHECK, EJECT_REQUEST, FOREVER, NO_EVENT, Raw, STATUS_PRESENT, controller,
};

/// Size of the registers in bytes.
pub const CPU_HOTPLUG_SIZE: u64 = 12;

const SELECT: u64 = 0;
const FLAGS: u64 = 4;

const FLAG_PRESENT: u8 = 1 << 0;
const FLAG_INSERTED: u8 = 1 << 1;
const FLAG_REMOVAL: u8 = 1 << 2;
const FLAG_EJECT: u8 = 1 << 3;

/// First ID that a local APIC structure cannot express, because 255 means "all".
const FIRST_X2APIC_ID: u32 = 255;

/// State of one vCPU slot.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub enum CpuSlot {
    /// There is no vCPU.
    Absent,
    /// There is a vCPU, and the guest has not looked since it was inserted.
    Inserted,
    /// There is a vCPU, and the guest knows it.
    Present,
    /// The guest is to release the vCPU, and has not looked since it was asked.
    RemovalRequested,
    /// The guest knows that it is to release the vCPU. It may refuse by doing nothing.
    RemovalSeen,
}

/// Saved state of the controller.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct CpuHotplugState {
    /// Number of the selected vCPU. May be any number.
    pub selected: u32,
    /// All slots, by vCPU number.
    pub slots: Vec<CpuSlot>,
}

/// Why the controller cannot make a change.
#[derive(Debug, Eq, PartialEq, thiserror::Error)]
pub enum CpuHotplugError {
    /// Invalid numbers of vCPUs.
    #[error("{boot} of {max} vCPUs cannot be: 1 to {MAX_VCPUS} vCPUs, at least one at boot")]
    Count {
        /// Number of vCPUs at boot.
        boot: u32,
        /// Maximum number of vCPUs.
        max: u32,
    },
    /// The vCPU number exceeds the maximum.
    #[error("vCPU {vcpu} does not exist, the machine has room for {max}")]
    NoSuchVcpu {
        /// Its number.
        vcpu: u32,
        /// Maximum number of vCPUs.
        max: u32,
    },
    /// The vCPU is already present.
    #[error("vCPU {0} is present already")]
    Present(u32),
    /// The vCPU is not present.
    #[error("vCPU {0} is not present")]
    Absent(u32),
    /// The first vCPU cannot be removed: firmware and kernels start on it.
    #[error("vCPU 0 cannot be removed")]
    BootVcpu,
    /// The saved state belongs to a different VM.
    #[error("the saved state has {saved} vCPU slots, the machine {max}, or lacks vCPU 0")]
    State {
        /// Number of slots in the saved state.
        saved: usize,
        /// Maximum number of vCPUs.
        max: u32,
    },
}

/// The CPU hot-plug controller. Decodes [`CPU_HOTPLUG_SIZE`] bytes of memory space.
pub struct CpuHotplug {
    state: Mutex<CpuHotplugState>,
    address: u64,
    /// By vCPU number.
    apic_ids: Vec<u32>,
    /// By vCPU number; empty in a VM without NUMA nodes.
    nodes: Vec<Option<u32>>,
    events: GuestEventHandler,
}

impl CpuHotplug {
    /// Creates a controller with registers at `address` for a VM with at most `max` vCPUs (1 to
    /// 255), the first `boot` of which are present. `apic_id` returns their (x2)APIC IDs.
    ///
    /// `events` receives [`GuestEvent::CpuEjected`].
    pub fn new(
        address: u64,
        boot: u32,
        max: u32,
        apic_id: impl Fn(u32) -> u32,
        events: GuestEventHandler,
    ) -> Result<Self, CpuHotplugError> {
        if !(1..=MAX_VCPUS).contains(&max) || !(1..=max).contains(&boot) {
            return Err(CpuHotplugError::Count { boot, max });
        }
        let slot = |vcpu| {
            if vcpu < boot {
                CpuSlot::Present
            } else {
                CpuSlot::Absent
            }
        };
        Ok(Self {
            state: Mutex::new(CpuHotplugState {
                selected: 0,
                slots: (0..max).map(slot).collect(),
            }),
            address,
            apic_ids: (0..max).map(apic_id).collect(),
            nodes: Vec::new(),
            events,
        })
    }

    /// Tells the guest the NUMA node (proximity domain) of each vCPU that has one. The SRAT does so
    /// too, but Linux forgets its entry for a vCPU that is unplugged.
    #[must_use]
    pub fn with_nodes(mut self, node: impl Fn(u32) -> Option<u32>) -> Self {
        self.nodes = (0..self.max()).map(node).collect();
        self
    }

    /// Maximum number of vCPUs.
    pub fn max(&self) -> u32 {
        // `new` permits at most 255.
        self.apic_ids.len() as u32
    }

    /// State of vCPU `vcpu`; `None` if its number exceeds the maximum.
    pub fn slot(&self, vcpu: u32) -> Option<CpuSlot> {
        self.lock().slots.get(vcpu as usize).copied()
    }

    /// Number of vCPUs that the guest has or is about to get, including those being removed.
    pub fn present(&self) -> u32 {
        let absent = |slot: &&CpuSlot| **slot != CpuSlot::Absent;
        // At most 255.
        self.lock().slots.iter().filter(absent).count() as u32
    }

    /// Announces vCPU `vcpu`, whose thread must be ready to be started by the guest. Cancels a
    /// removal that the guest has not executed; then the vCPU simply stays.
    ///
    /// Call [`GenericEventDevice::notify`](super::GenericEventDevice::notify) afterwards, once for
    /// any number of changes.
    pub fn insert(&self, vcpu: u32) -> Result<(), CpuHotplugError> {
        self.change(vcpu, |slot| match slot {
            CpuSlot::Absent | CpuSlot::RemovalSeen => Ok(CpuSlot::Inserted),
            CpuSlot::RemovalRequested => Ok(CpuSlot::Present),
            CpuSlot::Inserted | CpuSlot::Present => Err(CpuHotplugError::Present(vcpu)),
        })
    }

    /// Asks the guest to release vCPU `vcpu`, or asks again. [`GuestEvent::CpuEjected`] reports
    /// when it has; a guest may take a long time, or refuse.
    ///
    /// Call [`GenericEventDevice::notify`](super::GenericEventDevice::notify) afterwards, once for
    /// any number of changes.
    pub fn remove(&self, vcpu: u32) -> Result<(), CpuHotplugError> {
        if vcpu == 0 {
            return Err(CpuHotplugError::BootVcpu);
        }
        self.change(vcpu, |slot| match slot {
            CpuSlot::Absent => Err(CpuHotplugError::Absent(vcpu)),
            _ => Ok(CpuSlot::RemovalRequested),
        })
    }

    /// Saves the state.
    pub fn save(&self) -> CpuHotplugState {
        self.lock().clone()
    }

    /// Loads a saved state.
    pub fn restore(&self, state: CpuHotplugState) -> Result<(), CpuHotplugError> {
        if state.slots.len() != self.apic_ids.len()
            || !matches!(state.slots.first(), Some(CpuSlot::Present))
        {
            return Err(CpuHotplugError::State {
                saved: state.slots.len(),
                max: self.max(),
            });
        }
        *self.lock() = state;
        Ok(())
    }

    fn change(
        &self,
        vcpu: u32,
        step: impl FnOnce(CpuSlot) -> Result<CpuSlot, CpuHotplugError>,
    ) -> Result<(), CpuHotplugError> {
        let max = self.max();
        let mut state = self.lock();
        let slot = state
            .slots
            .get_mut(vcpu as usize)
            .ok_or(CpuHotplugError::NoSuchVcpu { vcpu, max })?;
        *slot = step(*slot)?;
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, CpuHotplugState> {
        self.state.lock_unpoisoned()
    }
}

impl CpuSlot {
    fn flags(self) -> u8 {
        match self {
            Self::Absent => 0,
            Self::Inserted => FLAG_PRESENT | FLAG_INSERTED,
            Self::Present | Self::RemovalSeen => FLAG_PRESENT,
            Self::RemovalRequested => FLAG_PRESENT | FLAG_REMOVAL,
        }
    }

    /// State of the slot after the guest has written `flags`.
    fn written(self, flags: u8) -> Self {
        match self {
            Self::RemovalRequested | Self::RemovalSeen if flags & FLAG_EJECT != 0 => Self::Absent,
            Self::RemovalRequested if flags & FLAG_REMOVAL != 0 => Self::RemovalSeen,
            Self::Inserted if flags & FLAG_INSERTED != 0 => Self::Present,
            unchanged => unchanged,
        }
    }
}

impl CpuHotplugState {
    fn registers(&self) -> [u8; CPU_HOTPLUG_SIZE as usize] {
        let selected = self.slots.get(self.selected as usize);
        let pending = |slot: &CpuSlot| slot.flags() & (FLAG_INSERTED | FLAG_REMOVAL) != 0;
        let next = self.slots.iter().position(pending);
        // There are at most 255 slots.
        let next = next.map_or(NO_EVENT, |vcpu| vcpu as u32);
        let mut image = [0; CPU_HOTPLUG_SIZE as usize];
        image[..4].copy_from_slice(&self.selected.to_le_bytes());
        image[4] = selected.map_or(0, |slot| slot.flags());
        image[8..].copy_from_slice(&next.to_le_bytes());
        image
    }
}

impl BusDevice for CpuHotplug {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let image = self.lock().registers();
        registers::read(&image, offset, data);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        match (offset, data) {
            (SELECT, &[a, b, c, d]) => self.lock().selected = u32::from_le_bytes([a, b, c, d]),
            (FLAGS, &[flags]) => {
                let mut state = self.lock();
                let vcpu = state.selected;
                let Some(slot) = state.slots.get_mut(vcpu as usize) else {
                    return;
                };
                let before = *slot;
                *slot = before.written(flags);
                let ejected = before != CpuSlot::Absent && *slot == CpuSlot::Absent;
                drop(state);
                if ejected {
                    (self.events)(GuestEvent::CpuEjected(vcpu));
                } else if flags & FLAG_EJECT != 0 {
                    log::debug!("vCPU {vcpu}: the guest ejected it unasked; it stays");
                }
            }
            _ => {}
        }
    }
}

/// Name of a vCPU's device: four characters, because there are at most 255.
fn name(vcpu: u32) -> String {
    format!("C{vcpu:03X}")
}

/// Interrupt controller structure for `_MAT` (ACPI 6.5, 5.2.12.2 and 5.2.12.12), enabled.
fn mat(vcpu: u32, apic_id: u32) -> Vec<u8> {
    const LOCAL_APIC: u8 = 0;
    const LOCAL_X2APIC: u8 = 9;
    const ENABLED: [u8; 4] = 1u32.to_le_bytes();
    let mut entry;
    if let (Ok(uid), Ok(id), true) = (
        u8::try_from(vcpu),
        u8::try_from(apic_id),
        vcpu < FIRST_X2APIC_ID && apic_id < FIRST_X2APIC_ID,
    ) {
        entry = vec![LOCAL_APIC, 8, uid, id];
        entry.extend_from_slice(&ENABLED);
    } else {
        entry = vec![LOCAL_X2APIC, 16, 0, 0];
        entry.extend_from_slice(&apic_id.to_le_bytes());
        entry.extend_from_slice(&ENABLED);
        entry.extend_from_slice(&vcpu.to_le_bytes());
    }
    entry
}

impl Aml for CpuHotplug {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        self.registers_aml(sink);
        let mut notify = Vec::new();
        let mut devices = Vec::new();
        for vcpu in 0..self.max() {
            let device = aml::Path::new(&name(vcpu));
            let is_this = aml::Equal::new(&aml::Arg(0), &vcpu);
            aml::If::new(&is_this, vec![&aml::Notify::new(&device, &aml::Arg(1))])
                .to_aml_bytes(&mut notify);
            self.device_aml(vcpu, &mut devices);
        }
        let max = self.max();
        let lock = || aml::Path::new("\\_SB_.PRES.CPLK");
        let acquire = aml::Acquire::new(lock(), FOREVER);
        let release = aml::Release::new(lock());
        let select = aml::Path::new("\\_SB_.PRES.CSEL");
        let next = aml::Path::new("\\_SB_.PRES.CNXT");
        let present = aml::Path::new("\\_SB_.PRES.CPEN");
        let inserted = aml::Path::new("\\_SB_.PRES.CINS");
        let removal = aml::Path::new("\\_SB_.PRES.CRMV");
        let eject = aml::Path::new("\\_SB_.PRES.CEJ0");
        let result = aml::Local(0);
        let find = aml::Store::new(&result, &next);
        let tell =
            |event: &'static u8| aml::MethodCall::new("CTFY".into(), vec![&aml::Local(0), event]);

        aml::Device::new(
            "\\_SB_.CPUS".into(),
            vec![
                &aml::Name::new("_HID".into(), &"ACPI0010"),
                &aml::Name::new("_CID".into(), &aml::EISAName::new("PNP0A05")),
                // Status of vCPU Arg0.
                &aml::Method::new(
                    "CSTA".into(),
                    1,
                    true,
                    vec![
                        &acquire,
                        &aml::Store::new(&select, &aml::Arg(0)),
                        &aml::Store::new(&result, &aml::ZERO),
                        &aml::If::new(
                            &aml::Equal::new(&present, &aml::ONE),
                            vec![&aml::Store::new(&result, &STATUS_PRESENT)],
                        ),
                        &release,
                        &aml::Return::new(&result),
                    ],
                ),
                // Notifies the operating system of event Arg1 of vCPU Arg0.
                &aml::Method::new("CTFY".into(), 2, true, vec![&Raw(&notify)]),
                // Ejects vCPU Arg0.
                &aml::Method::new(
                    "CEJ0".into(),
                    1,
                    true,
                    vec![
                        &acquire,
                        &aml::Store::new(&select, &aml::Arg(0)),
                        &aml::Store::new(&eject, &aml::ONE),
                        &release,
                    ],
                ),
                // Scans for changes. An event is acknowledged before it is passed on, so that one
                // that arrives in between is not lost.
                &aml::Method::new(
                    "CSCN".into(),
                    0,
                    true,
                    vec![
                        &acquire,
                        &find,
                        &aml::While::new(
                            &aml::LessThan::new(&result, &max),
                            vec![
                                &aml::Store::new(&select, &result),
                                &aml::If::new(
                                    &aml::Equal::new(&inserted, &aml::ONE),
                                    vec![
                                        &aml::Store::new(&inserted, &aml::ONE),
                                        &tell(&DEVICE_CHECK),
                                    ],
                                ),
                                &aml::If::new(
                                    &aml::Equal::new(&removal, &aml::ONE),
                                    vec![
                                        &aml::Store::new(&removal, &aml::ONE),
                                        &tell(&EJECT_REQUEST),
                                    ],
                                ),
                                &find,
                            ],
                        ),
                        &release,
                    ],
                ),
                &Raw(&devices),
            ],
        )
        .to_aml_bytes(sink);
    }
}

impl CpuHotplug {
    fn registers_aml(&self, sink: &mut dyn AmlSink) {
        let field = |access, entries| {
            aml::Field::new(
                "PRST".into(),
                access,
                aml::FieldLockRule::NoLock,
                aml::FieldUpdateRule::WriteAsZeroes,
                entries,
            )
        };
        controller(
            "\\_SB_.PRES",
            "CPU Hotplug Controller",
            (self.address, CPU_HOTPLUG_SIZE),
            &[
                &aml::Mutex::new("CPLK".into(), 0),
                &aml::OpRegion::new(
                    "PRST".into(),
                    aml::OpRegionSpace::SystemMemory,
                    &self.address,
                    &CPU_HOTPLUG_SIZE,
                ),
                &field(
                    aml::FieldAccessType::DWord,
                    vec![
                        aml::FieldEntry::Named(*b"CSEL", 32),
                        aml::FieldEntry::Reserved(32),
                        aml::FieldEntry::Named(*b"CNXT", 32),
                    ],
                ),
                &field(
                    aml::FieldAccessType::Byte,
                    vec![
                        aml::FieldEntry::Reserved(32),
                        aml::FieldEntry::Named(*b"CPEN", 1),
                        aml::FieldEntry::Named(*b"CINS", 1),
                        aml::FieldEntry::Named(*b"CRMV", 1),
                        aml::FieldEntry::Named(*b"CEJ0", 1),
                    ],
                ),
            ],
            sink,
        );
    }

    fn device_aml(&self, vcpu: u32, sink: &mut dyn AmlSink) {
        let apic_id = self.apic_ids.get(vcpu as usize).copied().unwrap_or(vcpu);
        let hid = aml::Name::new("_HID".into(), &"ACPI0007");
        let uid = aml::Name::new("_UID".into(), &vcpu);
        let mat = aml::Name::new("_MAT".into(), &aml::BufferData::new(mat(vcpu, apic_id)));
        let status = aml::MethodCall::new("CSTA".into(), vec![&vcpu]);
        let status = aml::Return::new(&status);
        let status = aml::Method::new("_STA".into(), 0, false, vec![&status]);
        let mut children: Vec<&dyn Aml> = vec![&hid, &uid, &mat, &status];
        let node = self.nodes.get(vcpu as usize).copied().flatten();
        let node = node.map(|node| aml::Name::new("_PXM".into(), &node));
        if let Some(node) = &node {
            children.push(node);
        }
        let eject = aml::MethodCall::new("CEJ0".into(), vec![&vcpu]);
        let eject = aml::Method::new("_EJ0".into(), 1, false, vec![&eject]);
        // The first vCPU cannot be removed.
        if vcpu != 0 {
            children.push(&eject);
        }
        aml::Device::new(aml::Path::new(&name(vcpu)), children).to_aml_bytes(sink);
    }
}

#[cfg(test)]
#[path = "cpu_tests.rs"]
mod tests;
