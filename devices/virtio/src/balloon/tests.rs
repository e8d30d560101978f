use std::sync::{Arc, atomic::Ordering};

use device_model::thread::Unconfined;
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace};

use super::{Balloon, Options};
use crate::{VirtioDevice, testing::simple::Guest};

const REPORTING: u64 = 1 << 5;

fn balloon() -> Balloon {
    let options = Options {
        thread_name: "_balloon0".to_owned(),
        size: 8192,
        deflate_on_oom: true,
        free_page_reporting: true,
        discards: Default::default(),
    };
    Balloon::new(options, Arc::new(Unconfined))
}

fn byte(guest: &Guest, at: u64) -> u8 {
    guest.memory.memory().read_obj(GuestAddress(at)).unwrap()
}

#[test]
fn pages_that_the_guest_gives_up_go_back_to_the_host() {
    let guest = Guest::new();
    let mut balloon = balloon();
    guest
        .memory
        .memory()
        .write_slice(&[7; 0x5000], GuestAddress(0x80_0000))
        .unwrap();
    let (inflate, deflate) = (guest.queue(0, 16), guest.queue(1, 16));
    balloon
        .activate(guest.activation(&[&inflate, &deflate]))
        .unwrap();
    // Out of order, with a duplicate, and one far outside RAM.
    let pfns: Vec<u8> = [0x802_u32, 0x801, 0x801, 0xffff_ffff]
        .iter()
        .flat_map(|pfn| pfn.to_le_bytes())
        .collect();
    inflate.request(&pfns, 0);
    let bytes: Vec<_> = (0..5)
        .map(|page| byte(&guest, 0x80_0000 + page * 0x1000))
        .collect();
    assert_eq!(bytes, [7, 0, 0, 7, 7]);
    assert_eq!(balloon.counters(), [("discarded_bytes", 0x2000)]);
    deflate.request(&pfns, 0);
    assert_eq!(balloon.deactivate().len(), 2);
}

#[test]
fn the_guest_hears_of_a_new_size_and_says_what_it_has_done() {
    let guest = Guest::new();
    let mut balloon = balloon();
    let handle = balloon.handle();
    let (inflate, deflate) = (guest.queue(0, 16), guest.queue(1, 16));
    balloon
        .activate(guest.activation(&[&inflate, &deflate]))
        .unwrap();
    handle.set_size(1 << 20);
    assert_eq!(guest.interrupts.config.load(Ordering::SeqCst), 1);
    let mut wanted = [0; 4];
    balloon.read_config(0, &mut wanted);
    assert_eq!(u32::from_le_bytes(wanted), 256);
    balloon.write_config(4, &10_u32.to_le_bytes());
    assert_eq!(handle.actual(), 40960);
    // Fields that a driver may not write.
    balloon.write_config(0, &[9; 4]);
    balloon.write_config(4, &[9; 8]);
    assert_eq!(handle.actual(), 40960);
    balloon.deactivate();
    let mut other = self::balloon();
    other.restore(balloon.save().unwrap()).unwrap();
    assert_eq!(other.handle().actual(), 40960);
}

#[test]
fn free_ranges_go_back_to_the_host_and_odd_ones_do_not() {
    let guest = Guest::new();
    let mut balloon = balloon();
    guest
        .memory
        .memory()
        .write_slice(&[7; 0x5000], GuestAddress(0x80_0000))
        .unwrap();
    let queues = [guest.queue(0, 16), guest.queue(1, 16), guest.queue(2, 16)];
    let all: Vec<_> = queues.iter().collect();
    balloon
        .activate(guest.activation_with(&all, REPORTING))
        .unwrap();
    queues[2].raw(&[(0x80_0000, 0x1000, true), (0x80_2000, 0x1fff, true)]);
    queues[2].raw(&[(0x80_4001, 0x1000, true), (u64::MAX - 0xfff, 0x2000, true)]);
    let bytes: Vec<_> = (0..5)
        .map(|page| byte(&guest, 0x80_0000 + page * 0x1000))
        .collect();
    assert_eq!(bytes, [0, 7, 0, 7, 7]);
    assert_eq!(balloon.deactivate().len(), 3);
}

#[test]
fn a_size_set_while_the_guest_is_paused_is_announced_when_it_goes_on() {
    let guest = Guest::new();
    let mut balloon = balloon();
    let (inflate, deflate) = (guest.queue(0, 16), guest.queue(1, 16));
    balloon
        .activate(guest.activation(&[&inflate, &deflate]))
        .unwrap();
    balloon.deactivate();
    balloon.handle().set_size(1 << 20);
    assert_eq!(guest.interrupts.config.load(Ordering::SeqCst), 0);
    // The same holds if the pause was for a snapshot and another process continues.
    let mut other = self::balloon();
    other.restore(balloon.save().unwrap()).unwrap();
    for (interrupts, balloon) in [(1, balloon), (2, other)] {
        let mut balloon = balloon;
        balloon
            .activate(guest.activation(&[&inflate, &deflate]))
            .unwrap();
        assert_eq!(guest.interrupts.config.load(Ordering::SeqCst), interrupts);
        balloon.deactivate();
    }
}
