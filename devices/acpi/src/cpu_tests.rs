//! The CPU hot-plug controller, driven through its registers as the guest's AML does it.

use std::sync::{Arc, mpsc};

use proptest::prelude::*;

use super::*;

fn controller(boot: u32, max: u32) -> (CpuHotplug, mpsc::Receiver<GuestEvent>) {
    let (sender, events) = mpsc::channel();
    let sender = Mutex::new(sender);
    let handler = move |event| sender.lock().unwrap().send(event).unwrap();
    let controller = CpuHotplug::new(0xfe80_0000, boot, max, |vcpu| 2 * vcpu, Box::new(handler));
    (controller.unwrap(), events)
}

fn read32(device: &CpuHotplug, offset: u64) -> u32 {
    let mut data = [0; 4];
    device.read(offset, &mut data);
    u32::from_le_bytes(data)
}

fn select(device: &CpuHotplug, vcpu: u32) -> u8 {
    device.write(0, &vcpu.to_le_bytes());
    let mut data = [0xff];
    device.read(4, &mut data);
    data[0]
}

#[test]
fn an_inserted_vcpu_is_found_by_a_scan_and_acknowledged() {
    let (device, _events) = controller(2, 255);
    assert_eq!(read32(&device, 8), NO_EVENT);
    device.insert(200).unwrap();
    device.insert(3).unwrap();
    assert_eq!(read32(&device, 8), 3);
    assert_eq!(select(&device, 3), 0b011);
    device.write(4, &[0b010]);
    assert_eq!(select(&device, 3), 0b001);
    assert_eq!(read32(&device, 8), 200);
    assert_eq!(device.slot(3), Some(CpuSlot::Present));
    assert_eq!(device.present(), 4);
}

#[test]
fn a_removed_vcpu_is_reported_when_the_guest_ejects_it() {
    let (device, events) = controller(4, 4);
    device.remove(2).unwrap();
    assert_eq!(read32(&device, 8), 2);
    assert_eq!(select(&device, 2), 0b101);
    device.write(4, &[0b100]);
    assert_eq!(read32(&device, 8), NO_EVENT);
    assert!(events.try_recv().is_err());
    device.write(4, &[0b1000]);
    assert_eq!(events.try_recv(), Ok(GuestEvent::CpuEjected(2)));
    assert_eq!(select(&device, 2), 0);
    device.write(4, &[0b1000]);
    assert!(events.try_recv().is_err());
    device.insert(2).unwrap();
}

#[test]
fn a_guest_cannot_eject_what_it_was_not_asked_for() {
    let (device, events) = controller(2, 4);
    for vcpu in [0, 1, 2, 3, 4, u32::MAX] {
        select(&device, vcpu);
        device.write(4, &[0xff]);
    }
    assert!(events.try_recv().is_err());
    assert_eq!(device.present(), 2);
}

#[test]
fn a_removal_can_be_taken_back_before_and_after_the_guest_saw_it() {
    let (device, events) = controller(2, 2);
    device.remove(1).unwrap();
    device.insert(1).unwrap();
    assert_eq!(device.slot(1), Some(CpuSlot::Present));
    device.remove(1).unwrap();
    select(&device, 1);
    device.write(4, &[0b100]);
    device.insert(1).unwrap();
    assert_eq!(device.slot(1), Some(CpuSlot::Inserted));
    // The guest was already ejecting it: too late, and it finds the vCPU again.
    device.write(4, &[0b1000]);
    assert!(events.try_recv().is_err());
    assert_eq!(select(&device, 1), 0b011);
}

#[test]
fn impossible_changes_are_errors() {
    let (device, _events) = controller(2, 4);
    assert_eq!(device.insert(1), Err(CpuHotplugError::Present(1)));
    assert_eq!(device.remove(0), Err(CpuHotplugError::BootVcpu));
    assert_eq!(device.remove(3), Err(CpuHotplugError::Absent(3)));
    let none = Err(CpuHotplugError::NoSuchVcpu { vcpu: 4, max: 4 });
    assert_eq!(device.insert(4), none);
    for (boot, max) in [(0, 1), (2, 1), (1, 0), (1, 256)] {
        let made = CpuHotplug::new(0, boot, max, |vcpu| vcpu, Box::new(|_| ()));
        assert!(made.is_err(), "{boot} of {max}");
    }
}

#[test]
fn the_state_survives_a_snapshot_and_another_machines_is_refused() {
    let (device, _events) = controller(2, 4);
    device.remove(1).unwrap();
    select(&device, 77);
    let saved = serde_json::to_string(&device.save()).unwrap();
    let (restored, _events) = controller(1, 4);
    restored
        .restore(serde_json::from_str(&saved).unwrap())
        .unwrap();
    assert_eq!(restored.save(), device.save());
    assert_eq!(read32(&restored, 8), 1);

    let (other, _events) = controller(2, 5);
    assert!(other.restore(device.save()).is_err());
    let mut state = device.save();
    state.slots[0] = CpuSlot::Absent;
    assert!(restored.restore(state).is_err());
}

#[test]
fn processors_beyond_the_local_apics_range_get_x2apic_structures() {
    assert_eq!(mat(3, 6), [0, 8, 3, 6, 1, 0, 0, 0]);
    let x2apic = [9, 16, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 128, 0, 0, 0];
    assert_eq!(mat(128, 256), x2apic);
    assert_eq!(mat(255, 1)[0], 9);
    assert_eq!(mat(1, 255)[0], 9);
}

proptest! {
    #[test]
    fn no_sequence_of_accesses_removes_more_than_was_asked_for(
        accesses in prop::collection::vec(
            (prop_oneof![Just(0u64), Just(4), Just(8), any::<u64>()],
             prop::collection::vec(prop_oneof![Just(0u8), Just(1), any::<u8>()], 0..9)),
            0..100,
        )
    ) {
        let ejected = Arc::<Mutex<Vec<GuestEvent>>>::default();
        let log = Arc::clone(&ejected);
        let handler = move |event| log.lock().unwrap().push(event);
        let device = CpuHotplug::new(0, 3, 4, |vcpu| vcpu, Box::new(handler)).unwrap();
        device.remove(1).unwrap();
        for (offset, mut data) in accesses {
            device.write(offset, &data);
            device.read(offset, &mut data);
        }
        let ejected = ejected.lock().unwrap();
        prop_assert!(ejected.is_empty() || *ejected == [GuestEvent::CpuEjected(1)]);
        prop_assert_eq!(device.slot(0), Some(CpuSlot::Present));
        prop_assert_eq!(device.slot(2), Some(CpuSlot::Present));
        prop_assert_eq!(device.slot(3), Some(CpuSlot::Absent));
    }
}
