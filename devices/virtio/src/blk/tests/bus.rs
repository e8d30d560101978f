//! The device behind the PCI transport.

use std::sync::atomic::Ordering;

use pci::testing::Rig;
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace};

use virtio_bindings::bindings::virtio_blk::VIRTIO_BLK_F_DISCARD;

use super::{DATA, HEADER, IN, Image, NEXT, STATUS, WRITE, new_blk, pattern, wait_for};
use crate::{
    blk::config::has,
    device::VirtioDevice,
    pci::VirtioPciFunction,
    testing::{VirtioDriver, resources},
};

const QUEUE: [u64; 3] = [0x8000, 0x9000, 0xa000];

#[test]
fn a_driver_on_the_bus_reads_the_disk_and_reads_it_again_after_a_reset() {
    let image = Image::raw(&pattern(64));
    let blk = new_blk(image.options()).unwrap();
    let features = blk.features();
    let rig = Rig::new();
    let bdf = rig.plug(VirtioPciFunction::new(Box::new(blk), resources(&rig)).unwrap());
    let driver = VirtioDriver::new(&rig, bdf);
    let memory = rig.memory.memory();
    let put = |value: u64, at| memory.write_obj(value, GuestAddress(at)).unwrap();
    for sector in [5, 9] {
        assert_eq!(driver.features(), features);
        assert!(driver.negotiate(features));
        assert_eq!(u64::from_le_bytes(driver.device_config(0)), 64);
        driver.enable_msix(2);
        memory
            .write_slice(&[0; 0x3000], GuestAddress(QUEUE[0]))
            .unwrap();
        driver.enable_queue(0, 16, QUEUE);
        driver.start();
        put(u64::from(IN), HEADER);
        put(sector, HEADER + 8);
        let chain = [
            (HEADER, 16, NEXT),
            (DATA, 512, NEXT | WRITE),
            (STATUS, 1, WRITE),
        ];
        for (k, (address, len, flags)) in (0_u64..).zip(chain) {
            put(address, QUEUE[0] + 16 * k);
            let rest = len | u64::from(flags) << 32 | (k + 1) << 48;
            put(rest, QUEUE[0] + 16 * k + 8);
        }
        let index = GuestAddress(QUEUE[1] + 2);
        memory.store(1_u16, index, Ordering::Release).unwrap();
        driver.notify(0);
        wait_for(|| {
            let used = memory.load::<u16>(GuestAddress(QUEUE[2] + 2), Ordering::Acquire);
            used.unwrap() == 1
        });
        wait_for(|| rig.msi.take(1) == 1);
        let mut data = [0; 512];
        memory.read_slice(&mut data, GuestAddress(DATA)).unwrap();
        let at = 512 * sector as usize;
        assert_eq!(data[..], pattern(64)[at..at + 512]);
    }
}

#[test]
fn a_driver_that_discards_goes_on_where_nothing_is_given_back() {
    let image = Image::raw(&pattern(64));
    let plug = |rig: &Rig, sparse| {
        let mut options = image.options();
        options.disk.sparse = sparse;
        let blk = new_blk(options).unwrap();
        let features = blk.features();
        let function = VirtioPciFunction::new(Box::new(blk), resources(rig)).unwrap();
        (rig.plug(function), features)
    };
    let rig = Rig::new();
    let (bdf, features) = plug(&rig, true);
    if !has(features, VIRTIO_BLK_F_DISCARD) {
        return println!("skipped: this file system cannot punch holes");
    }
    let driver = VirtioDriver::new(&rig, bdf);
    assert!(driver.negotiate(features));
    driver.enable_msix(2);
    driver.enable_queue(0, 16, QUEUE);
    driver.start();
    let function = rig.segment.function(bdf).unwrap();
    function.lock().unwrap().pause().unwrap();
    let state = function.lock().unwrap().save().unwrap();
    drop((function, rig));
    // One that is suspended when it is taken there comes back with what it had.
    let rig = Rig::new();
    let (bdf, _) = plug(&rig, true);
    let driver = VirtioDriver::new(&rig, bdf);
    assert!(driver.negotiate(features));
    driver.set_status(0);
    let function = rig.segment.function(bdf).unwrap();
    function.lock().unwrap().pause().unwrap();
    let suspended = function.lock().unwrap().save().unwrap();
    drop((function, rig));
    let target = Rig::new();
    let (bdf, _) = plug(&target, false);
    target.segment.restore(bdf, suspended).unwrap();
    assert!(VirtioDriver::new(&target, bdf).negotiate(features));
    drop(target);
    let target = Rig::new();
    let (bdf, here) = plug(&target, false);
    assert!(!has(here, VIRTIO_BLK_F_DISCARD));
    target.segment.restore(bdf, state.clone()).unwrap();
    // Linux does not look at the offer again when it resumes from a suspension.
    let driver = VirtioDriver::new(&target, bdf);
    assert!(driver.negotiate(features));
    assert_eq!(driver.features(), here);
    assert!(!driver.negotiate(features | 1));
    driver.set_status(0);
    let function = target.segment.function(bdf).unwrap();
    function.lock().unwrap().pause().unwrap();
    let mut suspended = function.lock().unwrap().save().unwrap();
    // Of what it never had, nothing is taken up.
    let mut forged = state;
    *forged.pointer_mut("/transport/driver_features").unwrap() = (features | 1).into();
    target.segment.restore(bdf, forged).unwrap_err();
    drop((function, target));
    // Nor does it look if it is taken further while it is suspended.
    for forged in [0, 1] {
        let kept = suspended.pointer_mut("/transport/kept_features").unwrap();
        *kept = (kept.as_u64().unwrap() | forged).into();
        let next = Rig::new();
        let (bdf, _) = plug(&next, false);
        next.segment.restore(bdf, suspended.clone()).unwrap();
        let driver = VirtioDriver::new(&next, bdf);
        assert!(driver.negotiate(features));
        assert!(!driver.negotiate(features | 1));
    }
}
