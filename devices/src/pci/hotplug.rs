//! The registers behind the ACPI methods that announce and eject PCI devices.
//!
//! ```text
//!   offset 0   up       slots with a new device; reading clears it
//!          4   down     slots that the guest is asked to give up; reading clears it
//!          8   eject    write: bit n ejects slot n of the selected segment
//!         12   segment  which segment the other registers are about
//!         16   event    what the guest answers to: an argument of _OST
//!         20   status   its answer: an argument of _OST (ACPI 6.5, table 6.27)
//!         24   slot     write: that was the answer for this slot
//! ```
//!
//! The machine announces a device or asks for one back, then raises the ACPI event whose handler
//! calls `\_SB.PHPR.PSCN` (see [`PciAml`](super::PciAml)). The guest's `_EJ0` arrives here as a
//! write to `eject`.

use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use super::bdf::SLOTS;
use crate::bus::BusDevice;

/// Bytes of the register block.
pub const HOTPLUG_SIZE: u64 = 28;

const UP: u64 = 0;
const DOWN: u64 = 4;
const EJECT: u64 = 8;
const SEGMENT: u64 = 12;
const EVENT: u64 = 16;
const STATUS: u64 = 20;
const SLOT: u64 = 24;

/// Events of `_OST` that are about ejecting: the request, and its processing.
const EJECT_EVENTS: [u32; 2] = [3, 0x103];
/// Answers of `_OST` that are no refusal: success, and "in progress".
const NO_REFUSAL: [u32; 2] = [0, 0x84];

/// What the guest does about a slot.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum SlotEvent {
    /// It ejects the device.
    Ejected,
    /// It will not give the device up, and says why (ACPI 6.5, table 6.27).
    Refused(u32),
}

/// What the machine does when the guest does something about a slot: (segment, slot, what). Called
/// on a vCPU thread, so it only hands the request on.
pub type SlotHandler = Box<dyn Fn(u16, u8, SlotEvent) + Send + Sync>;

/// Announcements that the guest has not read yet.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct HotplugState {
    /// Per segment: slots with a new device, and slots to give up.
    pending: Vec<(u32, u32)>,
    selected: u32,
    /// The answer that is being written.
    #[serde(default)]
    answer: (u32, u32),
}

/// The register block.
pub struct HotplugController {
    state: Mutex<HotplugState>,
    handler: SlotHandler,
}

impl HotplugController {
    /// Registers for `segments` segments.
    pub fn new(segments: u16, handler: SlotHandler) -> Self {
        Self {
            state: Mutex::new(HotplugState {
                pending: vec![(0, 0); usize::from(segments)],
                ..HotplugState::default()
            }),
            handler,
        }
    }

    /// There is a new device. The guest looks when it gets the ACPI event. False if there is no
    /// such slot.
    pub fn announce(&self, segment: u16, slot: u8) -> bool {
        self.set(segment, slot, |(up, _), bit| *up |= bit)
    }

    /// The guest is asked to eject a device. False if there is no such slot.
    pub fn request_eject(&self, segment: u16, slot: u8) -> bool {
        self.set(segment, slot, |(_, down), bit| *down |= bit)
    }

    /// The guest is no longer asked to eject a device, unless it has read that already. False if
    /// there is no such slot.
    pub fn withdraw_request(&self, segment: u16, slot: u8) -> bool {
        self.set(segment, slot, |(_, down), bit| *down &= !bit)
    }

    fn set(&self, segment: u16, slot: u8, change: impl FnOnce(&mut (u32, u32), u32)) -> bool {
        if slot == 0 || slot >= SLOTS {
            return false;
        }
        match self.lock().pending.get_mut(usize::from(segment)) {
            Some(pending) => {
                change(pending, 1 << slot);
                true
            }
            None => false,
        }
    }

    /// The announcements, for a snapshot.
    pub fn save(&self) -> HotplugState {
        self.lock().clone()
    }

    /// Takes saved announcements over; those of segments that do not exist are dropped.
    pub fn restore(&self, saved: &HotplugState) {
        let mut state = self.lock();
        for (pending, saved) in state.pending.iter_mut().zip(&saved.pending) {
            *pending = *saved;
        }
        state.selected = saved.selected;
        state.answer = saved.answer;
    }

    /// Forgets all announcements: a guest that boots finds its devices by itself.
    pub fn reset(&self) {
        let mut state = self.lock();
        state.pending.fill((0, 0));
        state.selected = 0;
        state.answer = (0, 0);
    }

    fn lock(&self) -> MutexGuard<'_, HotplugState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl HotplugState {
    fn selected(&mut self) -> Option<&mut (u32, u32)> {
        self.pending.get_mut(usize::try_from(self.selected).ok()?)
    }

    /// The selected segment, if it exists.
    fn segment(&self) -> Option<u16> {
        let segment = u16::try_from(self.selected).ok()?;
        (usize::from(segment) < self.pending.len()).then_some(segment)
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
            SEGMENT => Some(state.selected),
            _ => None,
        };
        data.copy_from_slice(&value.unwrap_or(0).to_le_bytes());
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let Ok(bytes) = data.try_into() else { return };
        let value = u32::from_le_bytes(bytes);
        match offset {
            SEGMENT => self.lock().selected = value,
            EJECT => {
                let Some(segment) = self.lock().segment() else {
                    return;
                };
                for slot in (1..SLOTS).filter(|slot| value & 1 << slot != 0) {
                    (self.handler)(segment, slot, SlotEvent::Ejected);
                }
            }
            EVENT => self.lock().answer.0 = value,
            STATUS => self.lock().answer.1 = value,
            SLOT => {
                let (segment, (event, status)) = {
                    let state = self.lock();
                    (state.segment(), state.answer)
                };
                let slot = u8::try_from(value)
                    .ok()
                    .filter(|slot| (1..SLOTS).contains(slot));
                let refused = EJECT_EVENTS.contains(&event) && !NO_REFUSAL.contains(&status);
                if let (Some(segment), Some(slot), true) = (segment, slot, refused) {
                    (self.handler)(segment, slot, SlotEvent::Refused(status));
                }
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    type Ejected = Arc<Mutex<Vec<(u16, u8, SlotEvent)>>>;

    fn controller() -> (HotplugController, Ejected) {
        let ejected = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&ejected);
        let eject = move |segment, slot, event| log.lock().unwrap().push((segment, slot, event));
        (HotplugController::new(2, Box::new(eject)), ejected)
    }

    fn read(controller: &HotplugController, offset: u64) -> u32 {
        let mut data = [0; 4];
        controller.read(offset, &mut data);
        u32::from_le_bytes(data)
    }

    #[test]
    fn an_announcement_is_read_once_and_only_in_its_segment() {
        let (controller, _) = controller();
        assert!(controller.announce(1, 3));
        assert!(controller.request_eject(1, 4));
        assert_eq!(read(&controller, UP), 0);
        controller.write(SEGMENT, &1u32.to_le_bytes());
        assert_eq!(read(&controller, UP), 1 << 3);
        assert_eq!(read(&controller, UP), 0);
        assert_eq!(read(&controller, DOWN), 1 << 4);
        assert_eq!(read(&controller, DOWN), 0);
    }

    #[test]
    fn slots_that_do_not_exist_are_refused() {
        let (controller, _) = controller();
        assert!(!controller.announce(2, 3));
        assert!(!controller.announce(0, 0));
        assert!(!controller.request_eject(0, 32));
    }

    #[test]
    fn an_eject_reaches_the_machine_for_existing_segments_only() {
        let (controller, ejected) = controller();
        controller.write(EJECT, &0x8000_0003u32.to_le_bytes());
        controller.write(SEGMENT, &7u32.to_le_bytes());
        controller.write(EJECT, &u32::MAX.to_le_bytes());
        controller.write(EJECT, &[0xff]);
        let events = [1, 31].map(|slot| (0, slot, SlotEvent::Ejected));
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
        controller.write(SEGMENT, &2u32.to_le_bytes());
        answer(3, 0x81, 4);
        assert_eq!(*events.lock().unwrap(), [(0, 4, SlotEvent::Refused(0x81))]);
    }

    #[test]
    fn a_request_that_is_withdrawn_is_not_read() {
        let (controller, _) = controller();
        controller.request_eject(0, 4);
        controller.request_eject(0, 5);
        assert!(controller.withdraw_request(0, 4));
        assert_eq!(read(&controller, DOWN), 1 << 5);
    }

    #[test]
    fn a_new_device_does_not_hide_that_the_old_one_has_to_go() {
        let (controller, _) = controller();
        controller.request_eject(0, 4);
        controller.announce(0, 4);
        assert_eq!(read(&controller, UP), 1 << 4);
        assert_eq!(read(&controller, DOWN), 1 << 4);
    }

    #[test]
    fn announcements_survive_a_snapshot() {
        let (before, _) = controller();
        before.announce(0, 5);
        let (after, _) = controller();
        after.restore(&before.save());
        assert_eq!(read(&after, UP), 1 << 5);
    }
}
