//! Drivers that violate the ring's rules.

use std::sync::Arc;

use device_model::thread::Unconfined;
use proptest::prelude::*;

use super::{Endpoints, Options, VirtioIommu};
use crate::{
    VirtioDevice,
    testing::{
        iommu::Recorder,
        raw::{INDIRECT, NEXT, RawQueue, WRITE},
        simple::Guest,
    },
};

const SIZE: u16 = 16;

fn started(guest: &Guest, endpoints: Endpoints) -> (VirtioIommu, RawQueue) {
    let options = Options {
        thread_name: "_iommu".to_owned(),
        address_width: 48,
        reserved: Vec::new(),
    };
    let mut iommu = VirtioIommu::new(endpoints, options, Arc::new(Unconfined)).unwrap();
    let queue = RawQueue::new(guest, 0, SIZE);
    let mut activation = guest.activation(&[]);
    activation.queues = vec![queue.active()];
    iommu.activate(activation).unwrap();
    (iommu, queue)
}

#[test]
fn a_request_that_overlaps_its_own_answer_is_read_once() {
    let guest = Guest::new();
    let endpoints = Endpoints::new();
    let device = Arc::new(Recorder::default());
    endpoints.add(0, device).unwrap();
    let (mut iommu, queue) = started(&guest, endpoints.clone());
    // All in one place: the data reads as a PROBE of endpoint 5, and the reply overwrites it.
    let at = queue.free();
    let memory = vm_memory::GuestAddressSpace::memory(&guest.memory);
    vm_memory::Bytes::write_obj(&*memory, 5_u64 | 5 << 32, vm_memory::GuestAddress(at)).unwrap();
    queue.describe(queue.table(), 0, (at, 72), NEXT, 1);
    queue.describe(queue.table(), 1, (at, 516), WRITE, 0);
    queue.offer(0);
    queue.kick();
    guest.wait_until("the chain is used", || queue.used() == 1);
    assert_eq!(queue.used_len(0), 516);
    iommu.deactivate();
}

#[test]
fn an_endless_chain_gets_no_answer_and_the_next_one_does() {
    let guest = Guest::new();
    let endpoints = Endpoints::new();
    endpoints.add(0, Arc::new(Recorder::default())).unwrap();
    let (mut iommu, queue) = started(&guest, endpoints);
    queue.describe(queue.table(), 0, (queue.free(), 4), NEXT, 1);
    queue.describe(queue.table(), 1, (queue.free(), 4), NEXT, 0);
    // A table within a table.
    queue.describe(queue.free(), 0, (queue.free(), 64), INDIRECT, 0);
    queue.describe(queue.table(), 2, (queue.free(), 64), INDIRECT, 0);
    // DETACH of endpoint 0 from domain 0, in one-byte buffers for the request and the reply.
    let (table, bytes) = (queue.free() + 0x1000, queue.free() + 0x2000);
    let memory = vm_memory::GuestAddressSpace::memory(&guest.memory);
    vm_memory::Bytes::write_obj(&*memory, 2_u8, vm_memory::GuestAddress(bytes)).unwrap();
    for slot in 0..24 {
        let flags = match slot {
            0..20 => NEXT,
            20..23 => NEXT | WRITE,
            _ => WRITE,
        };
        let buffer = (bytes + u64::from(slot), 1);
        queue.describe(table, slot, buffer, flags, slot + 1);
    }
    queue.describe(queue.table(), 3, (table, 24 * 16), INDIRECT, 0);
    for (head, len) in [(0, 0), (2, 0), (3, 4)] {
        let number = queue.used();
        queue.offer(head);
        queue.kick();
        guest.wait_until("the chain is used", || queue.used() != number);
        assert_eq!(queue.used_len(number), len);
    }
    iommu.deactivate();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn whatever_the_rings_hold_the_device_can_be_stopped(
        descriptors in prop::collection::vec(
            (prop_oneof![0..40_u64 << 20, any::<u64>()], any::<u32>(), 0..8_u16, 0..20_u16),
            16,
        ),
        heads in prop::collection::vec(0..18_u16, 0..16),
    ) {
        let guest = Guest::new();
        let endpoints = Endpoints::new();
        endpoints.add(0, Arc::new(Recorder::default())).unwrap();
        let (mut iommu, queue) = started(&guest, endpoints);
        for (slot, (address, len, flags, next)) in (0..).zip(descriptors) {
            queue.describe(queue.table(), slot, (address, len), flags, next);
        }
        for head in heads {
            queue.offer(head);
        }
        queue.kick();
        prop_assert_eq!(iommu.deactivate().len(), 1);
    }
}
