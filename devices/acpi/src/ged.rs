//! The generic event device (ACPI 6.5, 5.6.9): one interrupt for all hot-plug and power events.
//!
//! The interrupt's handler `_EVT` reads a register that indicates what has changed, and asks the
//! respective controllers for details. The register belongs to a separate device, `GEC`: Linux's
//! driver treats every entry in the resources of `GED` as an interrupt.

use std::{
    io,
    sync::atomic::{AtomicU8, Ordering},
};

use acpi_tables::{Aml, AmlSink, aml};
use device_model::bus::BusDevice;
use serde::{Deserialize, Serialize};
use vmm_sys_util::eventfd::EventFd;

use super::{
    generation,
    registers::{self, controller},
};

/// Size of the register in bytes.
pub const GED_SIZE: u64 = 1;

/// Notification value of a pressed power button (ACPI 6.5, 5.6.6).
const BUTTON_PRESSED: u8 = 0x80;

/// Notification value of a new generation ID.
const GENERATION_CHANGED: u8 = 0x80;

bitflags::bitflags! {
    /// Kinds of changes.
    #[derive(Clone, Copy, Debug, Eq, PartialEq)]
    pub struct Notification: u8 {
        /// CPUs: the guest calls `\_SB.CPUS.CSCN`.
        const CPU = 1 << 0;
        /// Memory: the guest calls `\_SB.MHPC.MSCN`.
        const MEMORY = 1 << 1;
        /// PCI functions: the guest calls `\_SB.PHPR.PSCN`.
        const PCI = 1 << 2;
        /// The power button `\_SB.PWRB` was pressed.
        const POWER_BUTTON = 1 << 3;
        /// The machine is a copy of a saved one: `\_SB.VGEN` has another value.
        const GENERATION = 1 << 4;
    }
}

/// Saved state of the device.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct GedState {
    /// Notifications that the guest has not read: bits of [`Notification`].
    pub pending: u8,
}

/// The event device. Decodes [`GED_SIZE`] bytes of memory space.
pub struct GenericEventDevice {
    pending: AtomicU8,
    kinds: Notification,
    irq: EventFd,
    gsi: u32,
    address: u64,
}

impl GenericEventDevice {
    /// Creates a device that raises `irq`, an edge-triggered irqfd for `gsi`, and whose register is
    /// at `address`.
    ///
    /// `kinds` are the notifications that will be used. The DSDT must contain the objects that they
    /// refer to; the power button is part of this device.
    pub fn new(irq: EventFd, gsi: u32, address: u64, kinds: Notification) -> Self {
        Self {
            pending: AtomicU8::new(0),
            kinds,
            irq,
            gsi,
            address,
        }
    }

    /// Notifies the guest of changes. Kinds that were not passed to [`GenericEventDevice::new`] are
    /// ignored.
    ///
    /// A guest without ACPI, or one that has not started its driver yet, misses the interrupt. The
    /// notification stays pending, and reaches the guest with the next interrupt.
    pub fn notify(&self, what: Notification) -> io::Result<()> {
        let what = what & self.kinds;
        if what.is_empty() {
            return Ok(());
        }
        // The guest may read the bit on another CPU before the interrupt is raised here; release
        // makes the controllers' state visible to a reader that sees the bit.
        self.pending.fetch_or(what.bits(), Ordering::Release);
        self.irq.write(1)
    }

    /// Saves the state.
    pub fn save(&self) -> GedState {
        GedState {
            pending: self.pending.load(Ordering::Acquire),
        }
    }

    /// Loads a saved state, and raises the interrupt again if notifications are pending.
    pub fn restore(&self, state: GedState) -> io::Result<()> {
        self.notify(Notification::from_bits_truncate(state.pending))
    }
}

impl BusDevice for GenericEventDevice {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if let (0, Some(first)) = (offset, data.first_mut()) {
            *first = self.pending.swap(0, Ordering::AcqRel);
        }
    }

    fn write(&self, _offset: u64, _data: &[u8]) {}
}

impl Aml for GenericEventDevice {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        let scan_cpus = aml::MethodCall::new("\\_SB_.CPUS.CSCN".into(), vec![]);
        let scan_memory = aml::MethodCall::new("\\_SB_.MHPC.MSCN".into(), vec![]);
        let scan_pci = aml::MethodCall::new("\\_SB_.PHPR.PSCN".into(), vec![]);
        let button = aml::Path::new("\\_SB_.PWRB");
        let press = aml::Notify::new(&button, &BUTTON_PRESSED);
        let copied = aml::Path::new(generation::PATH);
        let reseed = aml::Notify::new(&copied, &GENERATION_CHANGED);
        let reactions: [(Notification, &dyn Aml); 5] = [
            (Notification::CPU, &scan_cpus),
            (Notification::MEMORY, &scan_memory),
            (Notification::PCI, &scan_pci),
            (Notification::POWER_BUTTON, &press),
            (Notification::GENERATION, &reseed),
        ];

        let what = aml::Local(0);
        let register = aml::Path::new("GDAT");
        let read = aml::Store::new(&what, &register);
        let mut scan: Vec<u8> = Vec::new();
        read.to_aml_bytes(&mut scan);
        for (kind, reaction) in reactions {
            if self.kinds.contains(kind) {
                let bit = kind.bits();
                // The zero target means that the result is not stored.
                let set = aml::And::new(&aml::ZERO, &what, &bit);
                aml::If::new(&set, vec![reaction]).to_aml_bytes(&mut scan);
            }
        }

        controller(
            "\\_SB_.GEC_",
            "Generic Event Controller",
            (self.address, GED_SIZE),
            &[
                &aml::OpRegion::new(
                    "GDST".into(),
                    aml::OpRegionSpace::SystemMemory,
                    &self.address,
                    &GED_SIZE,
                ),
                &aml::Field::new(
                    "GDST".into(),
                    aml::FieldAccessType::Byte,
                    aml::FieldLockRule::NoLock,
                    aml::FieldUpdateRule::WriteAsZeroes,
                    vec![aml::FieldEntry::Named(*b"GDAT", 8)],
                ),
                &aml::Method::new("ESCN".into(), 0, true, vec![&registers::Raw(&scan)]),
            ],
            sink,
        );
        aml::Device::new(
            "\\_SB_.GED_".into(),
            vec![
                &aml::Name::new("_HID".into(), &"ACPI0013"),
                &aml::Name::new("_UID".into(), &aml::ZERO),
                &aml::Name::new(
                    "_CRS".into(),
                    &aml::ResourceTemplate::new(vec![&aml::Interrupt::new(
                        true, true, false, false, self.gsi,
                    )]),
                ),
                &aml::Method::new(
                    "_EVT".into(),
                    1,
                    true,
                    vec![&aml::MethodCall::new("\\_SB_.GEC_.ESCN".into(), vec![])],
                ),
            ],
        )
        .to_aml_bytes(sink);
        if self.kinds.contains(Notification::POWER_BUTTON) {
            aml::Device::new(
                button,
                vec![
                    &aml::Name::new("_HID".into(), &aml::EISAName::new("PNP0C0C")),
                    &aml::Name::new("_UID".into(), &aml::ZERO),
                ],
            )
            .to_aml_bytes(sink);
        }
    }
}

#[cfg(test)]
mod tests {
    use vmm_sys_util::eventfd::EFD_NONBLOCK;

    use super::*;

    fn device(kinds: Notification) -> (GenericEventDevice, EventFd) {
        let irq = EventFd::new(EFD_NONBLOCK).unwrap();
        let clone = irq.try_clone().unwrap();
        (GenericEventDevice::new(clone, 5, 0xfe80_2000, kinds), irq)
    }

    fn read(device: &GenericEventDevice) -> u8 {
        let mut data = [0xff];
        device.read(0, &mut data);
        data[0]
    }

    #[test]
    fn notifications_add_up_until_they_are_read_once() {
        let (device, irq) = device(Notification::all());
        device.notify(Notification::CPU).unwrap();
        device.notify(Notification::POWER_BUTTON).unwrap();
        assert_eq!(irq.read().unwrap(), 2);
        assert_eq!(read(&device), 0b1001);
        assert_eq!(read(&device), 0);
    }

    #[test]
    fn kinds_that_the_guest_was_not_told_about_raise_no_interrupt() {
        let (device, irq) = device(Notification::CPU);
        device.notify(Notification::PCI).unwrap();
        assert!(irq.read().is_err());
        assert_eq!(read(&device), 0);
    }

    #[test]
    fn odd_accesses_lose_no_notification() {
        let (device, _irq) = device(Notification::all());
        device.notify(Notification::MEMORY).unwrap();
        let mut data = [0xff; 4];
        device.read(1, &mut data);
        device.read(u64::MAX, &mut data);
        device.read(0, &mut []);
        device.write(0, &[0xff; 8]);
        assert_eq!(data, [0; 4]);
        device.read(0, &mut data);
        assert_eq!(data, [0b10, 0, 0, 0]);
    }

    #[test]
    fn unread_notifications_survive_a_snapshot() {
        let (device_a, _irq) = device(Notification::all());
        device_a.notify(Notification::PCI).unwrap();
        let (device_b, irq) = device(Notification::all());
        device_b.restore(device_a.save()).unwrap();
        assert_eq!(irq.read().unwrap(), 1);
        assert_eq!(read(&device_b), 0b100);
        device_b.restore(GedState { pending: 0xe0 }).unwrap();
        assert!(irq.read().is_err());
    }
}
