//! The registers behind the ACPI methods that announce and eject PCI devices.
//!
//! ```text
//!   offset 0   up       slots with a new device; reading clears it
//!          4   down     slots that the guest is asked to release; reading clears it
//!          8   eject    write: bit n ejects slot n of the selected bus
//!         12   bus      selects the bus of the other registers: bus 0 of each segment, then the
//!                       buses of root ports
//!         16   event    event that the guest reports on: an argument of _OST
//!         20   status   outcome of the event: an argument of _OST (ACPI 6.5, table 6.27)
//!         24   slot     write: completes the report, which is for this slot
//! ```
//!
//! The VM announces a device or requests its removal, then raises the ACPI event whose handler
//! calls `\_SB.PHPR.PSCN` (see [`PciAml`](super::PciAml)). The guest's `_EJ0` arrives here as a
//! write to `eject`.

use std::sync::{Mutex, MutexGuard};

use base::Unpoisoned;
use device_model::bus::BusDevice;
use serde::{Deserialize, Serialize};

use super::bdf::{Bdf, SLOTS};

/// Size of the register block in bytes.
pub const HOTPLUG_SIZE: u64 = 28;

const UP: u64 = 0;
const DOWN: u64 = 4;
const EJECT: u64 = 8;
const BUS: u64 = 12;
const EVENT: u64 = 16;
const STATUS: u64 = 20;
const SLOT: u64 = 24;

/// Events of `_OST` that concern ejection: the request, and its processing.
const EJECT_EVENTS: [u32; 2] = [3, 0x103];
/// Status values of `_OST` that are not a refusal: success, and "in progress".
const NO_REFUSAL: [u32; 2] = [0, 0x84];

/// The guest's response for a slot.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum SlotEvent {
    /// The guest ejects the device.
    Ejected,
    /// The guest refuses to release the device, with a status code (ACPI 6.5, table 6.27).
    Refused(u32),
}

/// Handles a guest's response for a slot, which is named by its function 0. Called on a vCPU
/// thread, so it must only pass the event on.
pub type SlotHandler = Box<dyn Fn(Bdf, SlotEvent) + Send + Sync>;

/// The buses of all segments, in the order in which hot-plug numbers them.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct PciBuses(Vec<(u16, u8)>);

impl PciBuses {
    /// Creates the list for segments 0, 1 and so on, from the number of each segment's last bus.
    pub fn new(last: &[u8]) -> Self {
        let segments = || (0..).zip(last);
        let roots = segments().map(|(segment, _)| (segment, 0));
        let others =
            segments().flat_map(|(segment, last)| (1..=*last).map(move |at| (segment, at)));
        Self(roots.chain(others).collect())
    }

    /// The hot-plug number of a function's bus.
    pub fn number_of(&self, at: Bdf) -> Option<u16> {
        let mut buses = (0..).zip(&self.0);
        let (number, _) = buses.find(|(_, bus)| **bus == (at.segment, at.bus))?;
        Some(number)
    }

    /// A slot of a bus, if it supports hot-plug.
    fn slot(&self, number: u16, device: u8) -> Option<Bdf> {
        let &(segment, bus) = self.0.get(usize::from(number))?;
        let slots = if bus == 0 { 1..SLOTS } else { 0..1 };
        slots.contains(&device).then_some(Bdf {
            segment,
            bus,
            device,
            function: 0,
        })
    }
}

/// Announcements that the guest has not read yet, and the selected registers.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct HotplugState {
    /// Per bus: slots with a new device, and slots to release.
    pending: Vec<(u32, u32)>,
    selected: u32,
    /// The `_OST` event and status that are being written.
    answer: (u32, u32),
}

/// The register block.
pub struct HotplugController {
    state: Mutex<HotplugState>,
    buses: PciBuses,
    handler: SlotHandler,
}

impl HotplugController {
    /// Creates registers for these buses.
    pub fn new(buses: PciBuses, handler: SlotHandler) -> Self {
        Self {
            state: Mutex::new(HotplugState {
                pending: vec![(0, 0); buses.0.len()],
                ..HotplugState::default()
            }),
            buses,
            handler,
        }
    }

    /// Announces a new device in a function's slot. The guest reads this when it gets the ACPI
    /// event. False if there is no such slot.
    pub fn announce(&self, at: Bdf) -> bool {
        self.set(at, |(up, _), bit| *up |= bit)
    }

    /// Asks the guest to eject a function's slot. False if there is no such slot.
    pub fn request_eject(&self, at: Bdf) -> bool {
        self.set(at, |(_, down), bit| *down |= bit)
    }

    /// Withdraws a request to eject. True if the guest had not read it: then the guest never learns
    /// of the request.
    pub fn withdraw_request(&self, at: Bdf) -> bool {
        let mut was_unread = false;
        self.set(at, |(_, down), bit| {
            was_unread = *down & bit != 0;
            *down &= !bit;
        });
        was_unread
    }

    fn set(&self, at: Bdf, change: impl FnOnce(&mut (u32, u32), u32)) -> bool {
        let number = self.buses.number_of(at);
        let number = number.filter(|number| self.buses.slot(*number, at.device).is_some());
        let Some(number) = number else { return false };
        match self.lock().pending.get_mut(usize::from(number)) {
            Some(pending) => {
                change(pending, 1 << at.device);
                true
            }
            None => false,
        }
    }

    /// Saves the announcements, for a snapshot.
    pub fn save(&self) -> HotplugState {
        self.lock().clone()
    }

    /// Loads saved announcements; those of buses that do not exist are dropped.
    pub fn restore(&self, saved: &HotplugState) {
        let mut state = self.lock();
        for (pending, saved) in state.pending.iter_mut().zip(&saved.pending) {
            *pending = *saved;
        }
        state.selected = saved.selected;
        state.answer = saved.answer;
    }

    /// Clears all announcements: a guest that boots discovers its devices by itself.
    pub fn reset(&self) {
        let mut state = self.lock();
        state.pending.fill((0, 0));
        state.selected = 0;
        state.answer = (0, 0);
    }

    /// The slot that the guest names by bus and slot number.
    fn slot(&self, bus: u32, slot: u32) -> Option<Bdf> {
        let (bus, slot) = (u16::try_from(bus).ok()?, u8::try_from(slot).ok()?);
        self.buses.slot(bus, slot)
    }

    fn lock(&self) -> MutexGuard<'_, HotplugState> {
        self.state.lock_unpoisoned()
    }
}

impl HotplugState {
    fn selected(&mut self) -> Option<&mut (u32, u32)> {
        self.pending.get_mut(usize::try_from(self.selected).ok()?)
    }
}

impl BusDevice for HotplugController {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if data.len() != 4 {
            return;
        }
        let mut state = self.lock();
        let value = match offset {
            UP => state.selected().map(|(up, _)| std::mem::take(up)),
            DOWN => state.selected().map(|(_, down)| std::mem::take(down)),
            BUS => Some(state.selected),
            _ => None,
        };
        data.copy_from_slice(&value.unwrap_or(0).to_le_bytes());
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let Ok(bytes) = data.try_into() else { return };
        let value = u32::from_le_bytes(bytes);
        match offset {
            BUS => self.lock().selected = value,
            EJECT => {
                let selected = self.lock().selected;
                let slots = (0..SLOTS).filter(|slot| value & 1 << slot != 0);
                for slot in slots.filter_map(|slot| self.slot(selected, slot.into())) {
                    (self.handler)(slot, SlotEvent::Ejected);
                }
            }
            EVENT => self.lock().answer.0 = value,
            STATUS => self.lock().answer.1 = value,
            SLOT => {
                let (selected, (event, status)) = {
                    let state = self.lock();
                    (state.selected, state.answer)
                };
                let refused = EJECT_EVENTS.contains(&event) && !NO_REFUSAL.contains(&status);
                if let (Some(slot), true) = (self.slot(selected, value), refused) {
                    (self.handler)(slot, SlotEvent::Refused(status));
                }
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    type Ejected = Arc<Mutex<Vec<(Bdf, SlotEvent)>>>;

    fn at(segment: u16, bus: u8, device: u8) -> Bdf {
        Bdf {
            segment,
            bus,
            device,
            function: 0,
        }
    }

    fn controller() -> (HotplugController, Ejected) {
        let ejected = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&ejected);
        let eject = move |slot, event| log.lock().unwrap().push((slot, event));
        // Two segments; the second one has two root ports.
        let buses = PciBuses::new(&[0, 2]);
        (HotplugController::new(buses, Box::new(eject)), ejected)
    }

    fn read(controller: &HotplugController, offset: u64) -> u32 {
        let mut data = [0; 4];
        controller.read(offset, &mut data);
        u32::from_le_bytes(data)
    }

    #[test]
    fn an_announcement_is_read_once_and_only_in_its_segment() {
        let (controller, _) = controller();
        assert!(controller.announce(at(1, 0, 3)));
        assert!(controller.request_eject(at(1, 0, 4)));
        assert_eq!(read(&controller, UP), 0);
        controller.write(BUS, &1u32.to_le_bytes());
        assert_eq!(read(&controller, UP), 1 << 3);
        assert_eq!(read(&controller, UP), 0);
        assert_eq!(read(&controller, DOWN), 1 << 4);
        assert_eq!(read(&controller, DOWN), 0);
    }

    #[test]
    fn slots_that_do_not_exist_are_refused() {
        let (controller, _) = controller();
        assert!(!controller.announce(at(2, 0, 3)));
        assert!(!controller.announce(at(0, 0, 0)));
        assert!(!controller.request_eject(at(0, 0, 32)));
        assert!(!controller.announce(at(0, 1, 0)));
        assert!(!controller.announce(at(1, 1, 1)));
        assert!(controller.announce(at(1, 1, 0)));
    }

    #[test]
    fn an_eject_reaches_the_machine_for_existing_segments_only() {
        let (controller, ejected) = controller();
        controller.write(EJECT, &0x8000_0003u32.to_le_bytes());
        controller.write(BUS, &7u32.to_le_bytes());
        controller.write(EJECT, &u32::MAX.to_le_bytes());
        controller.write(EJECT, &[0xff]);
        let events = [1, 31].map(|slot| (at(0, 0, slot), SlotEvent::Ejected));
        assert_eq!(*ejected.lock().unwrap(), events);
    }

    #[test]
    fn a_bus_behind_a_root_port_has_one_slot() {
        let (controller, ejected) = controller();
        let behind = Bdf {
            function: 3,
            ..at(1, 2, 0)
        };
        assert!(controller.request_eject(behind));
        controller.write(BUS, &3_u32.to_le_bytes());
        assert_eq!(read(&controller, DOWN), 1);
        controller.write(EJECT, &u32::MAX.to_le_bytes());
        let events = [(at(1, 2, 0), SlotEvent::Ejected)];
        assert_eq!(*ejected.lock().unwrap(), events);
    }

    #[test]
    fn an_answer_is_a_refusal_if_it_is_to_a_request_and_no_success() {
        let (controller, events) = controller();
        let answer = |event: u32, status: u32, slot: u32| {
            controller.write(EVENT, &event.to_le_bytes());
            controller.write(STATUS, &status.to_le_bytes());
            controller.write(SLOT, &slot.to_le_bytes());
        };
        answer(3, 0, 4);
        answer(0x103, 0x84, 4);
        answer(1, 0x81, 4);
        for slot in [0, 32, 0x104, u32::MAX] {
            answer(3, 0x81, slot);
        }
        assert_eq!(*events.lock().unwrap(), []);
        answer(3, 0x81, 4);
        for bus in [2_u32, 4, u32::MAX] {
            controller.write(BUS, &bus.to_le_bytes());
            answer(3, 0x81, 4);
        }
        assert_eq!(
            *events.lock().unwrap(),
            [(at(0, 0, 4), SlotEvent::Refused(0x81))]
        );
    }

    #[test]
    fn a_request_that_is_withdrawn_is_not_read() {
        let (controller, _) = controller();
        controller.request_eject(at(0, 0, 4));
        controller.request_eject(at(0, 0, 5));
        assert!(controller.withdraw_request(at(0, 0, 4)));
        assert_eq!(read(&controller, DOWN), 1 << 5);
    }

    #[test]
    fn a_new_device_does_not_hide_that_the_old_one_has_to_go() {
        let (controller, _) = controller();
        controller.request_eject(at(0, 0, 4));
        controller.announce(at(0, 0, 4));
        assert_eq!(read(&controller, UP), 1 << 4);
        assert_eq!(read(&controller, DOWN), 1 << 4);
    }

    #[test]
    fn announcements_survive_a_snapshot() {
        let (before, _) = controller();
        before.announce(at(0, 0, 5));
        let (after, _) = controller();
        after.restore(&before.save());
        assert_eq!(read(&after, UP), 1 << 5);
    }
}
