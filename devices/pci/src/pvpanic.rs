//! The panic device: a register to which a guest writes that its kernel has panicked.
//!
//! It is QEMU's `pvpanic-pci` (its docs/specs/pvpanic.rst), for which Linux has the driver
//! `pvpanic-pci`. The device reports the event and does nothing else: what the guest does next is
//! the guest's decision.

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

use device_model::{
    bus::BusDevice,
    guest_event::{GuestEvent, GuestEventHandler},
};
use serde_json::Value;

use super::{
    bar::{BarIndex, BarKind, BarRequest},
    config::{ConfigError, ConfigSpace, Identity},
    function::{LifecycleError, PciFunction},
};

const IDENTITY: Identity = Identity {
    vendor: 0x1b36,
    device: 0x0011,
    subsystem_vendor: 0x1af4,
    subsystem: 0x1100,
    revision: 1,
    // A system peripheral of no other class.
    class: 0x08_8000,
};

/// The BAR has the minimum size; the register is its first byte.
const REGISTERS: BarRequest = BarRequest {
    index: BarIndex::ZERO,
    kind: BarKind::Memory32 {
        prefetchable: false,
    },
    size: 16,
};

/// The guest has panicked.
const PANICKED: u8 = 1 << 0;
/// The guest has panicked, and its crash kernel takes over.
const CRASH_LOADED: u8 = 1 << 1;

/// Maximum number of reports until the device is reset. A guest can write endlessly.
const MAX_REPORTS: u32 = 16;

/// The panic device.
pub struct PvPanic {
    config: ConfigSpace,
    register: Arc<Register>,
}

struct Register {
    events: GuestEventHandler,
    reports: AtomicU32,
}

impl PvPanic {
    /// Creates a device that reports [`GuestEvent::Panicked`] and [`GuestEvent::CrashLoaded`] to
    /// `events`.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] if the configuration space cannot be laid out.
    pub fn new(events: GuestEventHandler) -> Result<Self, ConfigError> {
        let mut config = ConfigSpace::new(IDENTITY);
        config.add_bar(REGISTERS)?;
        Ok(Self {
            config,
            register: Arc::new(Register {
                events,
                reports: AtomicU32::new(0),
            }),
        })
    }
}

impl Register {
    fn report(&self, event: GuestEvent) {
        let count = |reports: u32| (reports < MAX_REPORTS).then_some(reports + 1);
        let counted = self
            .reports
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, count);
        if counted.is_ok() {
            (self.events)(event);
        }
    }
}

impl BusDevice for Register {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if let (0, Some(first)) = (offset, data.first_mut()) {
            *first = PANICKED | CRASH_LOADED;
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let (0, Some(&what)) = (offset, data.first()) else {
            return;
        };
        if what & PANICKED != 0 {
            self.report(GuestEvent::Panicked);
        }
        if what & CRASH_LOADED != 0 {
            self.report(GuestEvent::CrashLoaded);
        }
    }
}

impl PciFunction for PvPanic {
    fn config(&self) -> &ConfigSpace {
        &self.config
    }

    fn config_mut(&mut self) -> &mut ConfigSpace {
        &mut self.config
    }

    fn bar_device(&self, index: BarIndex) -> Option<Arc<dyn BusDevice>> {
        (index == REGISTERS.index).then(|| Arc::clone(&self.register) as _)
    }

    fn pause(&mut self) -> Result<(), LifecycleError> {
        Ok(())
    }

    fn resume(&mut self) -> Result<(), LifecycleError> {
        Ok(())
    }

    fn save(&mut self) -> Result<Value, LifecycleError> {
        Ok(serde_json::to_value(self.config.save())?)
    }

    fn restore(&mut self, state: Value) -> Result<(), LifecycleError> {
        Ok(self.config.restore(&serde_json::from_value(state)?)?)
    }

    fn reset(&mut self) -> Result<(), LifecycleError> {
        self.config.reset();
        self.register.reports.store(0, Ordering::Relaxed);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    fn device() -> (PvPanic, Arc<Mutex<Vec<GuestEvent>>>) {
        let seen = Arc::<Mutex<Vec<GuestEvent>>>::default();
        let events = Arc::clone(&seen);
        let device = PvPanic::new(Box::new(move |event| events.lock().unwrap().push(event)));
        (device.unwrap(), seen)
    }

    fn register(device: &PvPanic) -> Arc<dyn BusDevice> {
        device.bar_device(BarIndex::ZERO).unwrap()
    }

    #[test]
    fn a_guest_finds_out_what_it_can_report_and_reports_it() {
        let (device, seen) = device();
        let register = register(&device);
        let mut can = [0; 1];
        register.read(0, &mut can);
        assert_eq!(can, [0b11]);
        register.write(0, &[1]);
        register.write(0, &[2]);
        assert_eq!(
            *seen.lock().unwrap(),
            [GuestEvent::Panicked, GuestEvent::CrashLoaded]
        );
    }

    #[test]
    fn other_accesses_report_nothing() {
        let (device, seen) = device();
        let register = register(&device);
        register.write(0, &[]);
        register.write(0, &[0xfc]);
        register.write(1, &[1]);
        register.write(u64::MAX, &[1, 1, 1, 1]);
        let mut data = [0xff; 4];
        register.read(1, &mut data);
        assert_eq!(data, [0; 4]);
        register.read(0, &mut []);
        assert!(seen.lock().unwrap().is_empty());
    }

    #[test]
    fn a_guest_that_panics_endlessly_is_not_reported_endlessly() {
        let (mut device, seen) = device();
        let register = register(&device);
        for _ in 0..1000 {
            register.write(0, &[0xff; 8]);
        }
        assert_eq!(seen.lock().unwrap().len(), MAX_REPORTS as usize);
        device.reset().unwrap();
        register.write(0, &[1]);
        assert_eq!(seen.lock().unwrap().len(), MAX_REPORTS as usize + 1);
    }

    #[test]
    fn its_place_survives_a_snapshot() {
        let (mut saved, _) = device();
        saved
            .config_mut()
            .set_bar_address(BarIndex::ZERO, 0xc000_1230);
        let state = saved.save().unwrap();
        let (mut restored, _) = device();
        restored.restore(state).unwrap();
        let address = restored.config().bar_address(BarIndex::ZERO);
        assert_eq!(address, Some(0xc000_1230));
        restored.restore(Value::from("no state")).unwrap_err();
    }
}
