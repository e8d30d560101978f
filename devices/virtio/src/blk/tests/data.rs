//! Data paths of a well-behaved driver.

use std::sync::atomic::Ordering;

use super::{
    DATA, DISCARD, HEADER, IN, INDIRECT, Image, OUT, Rig, STATUS, WRITE, WRITE_ZEROES,
    on_both_engines, pattern, rings,
};
use crate::device::VirtioDevice;

#[test]
fn data_written_by_the_guest_is_in_the_file_and_reads_back() {
    on_both_engines(&pattern(64), |image, rig| {
        assert_eq!(rig.request(IN, 3, (DATA, 1024, WRITE)), (0, 1025));
        assert_eq!(rig.bytes(DATA, 1024), pattern(64)[3 * 512..5 * 512]);
        rig.fill(DATA, &[0xa5; 2048]);
        assert_eq!(rig.request(OUT, 60, (DATA, 2048, 0)), (0, 1));
        assert_eq!(rig.flush(), 0);
        assert_eq!(image.content()[60 * 512..], [0xa5; 2048]);
        assert_eq!(image.content()[..60 * 512], pattern(64)[..60 * 512]);
        let counters = rig.blk.counters();
        assert!(counters.contains(&("read_bytes", 1024)) && counters.contains(&("read_ops", 1)));
        assert!(counters.contains(&("write_bytes", 2048)) && counters.contains(&("write_ops", 1)));
    });
}

#[test]
fn the_layout_of_descriptors_is_the_drivers_choice() {
    on_both_engines(&pattern(64), |_, rig| {
        // The header in two parts, and data in parts of odd sizes; the last one ends with the
        // status.
        rig.header(HEADER, IN, 1);
        let status = DATA + 0x2000 + 412;
        rig.write(0xff_u8, status);
        let chain = [
            (HEADER, 5, 0),
            (HEADER + 5, 11, 0),
            (DATA, 100, WRITE),
            (DATA + 0x2000, 413, WRITE),
        ];
        assert_eq!(rig.chain(&chain).1, 513);
        assert_eq!(rig.read::<u8>(status), 0);
        let mut seen = rig.bytes(DATA, 100);
        seen.extend(rig.bytes(DATA + 0x2000, 412));
        assert_eq!(seen, pattern(64)[512..1024]);
    });
}

#[test]
fn indirect_descriptors_carry_more_segments_than_the_queue_has() {
    on_both_engines(&pattern(128), |_, rig| {
        let table = 0x8000;
        rig.header(HEADER, IN, 0);
        let mut chain = vec![(HEADER, 16, 0)];
        chain.extend((0..100).map(|k| (DATA + 1024 * k, 512, WRITE)));
        chain.push((STATUS, 1, WRITE));
        rig.describe(table, 0, &chain);
        let len = 16 * chain.len() as u32;
        assert_eq!(rig.chain(&[(table, len, INDIRECT)]), (0, 51201));
        for k in 0..100 {
            let at = 512 * k as usize;
            assert_eq!(rig.bytes(DATA + 1024 * k, 512), pattern(128)[at..at + 512]);
        }
    });
}

#[test]
fn a_queue_full_of_requests_completes_in_any_order() {
    on_both_engines(&pattern(64), |_, rig| {
        for round in 0..50_u64 {
            for slot in 0..5_u16 {
                let header = HEADER + 16 * u64::from(slot);
                let status = STATUS + u64::from(slot);
                let data = DATA + 512 * u64::from(slot);
                rig.write(0xff_u8, status);
                rig.header(header, IN, round + u64::from(slot));
                let chain = [(header, 16, 0), (data, 512, WRITE), (status, 1, WRITE)];
                rig.describe(rings(0), slot * 3, &chain);
                rig.offer(0, slot * 3);
            }
            rig.run(0);
            for slot in 0..5 {
                let at = 512 * (round + slot) as usize;
                assert_eq!(rig.read::<u8>(STATUS + slot), 0);
                assert_eq!(rig.bytes(DATA + 512 * slot, 512), pattern(64)[at..at + 512]);
            }
        }
        assert!(rig.interrupts.queue.load(Ordering::SeqCst) > 0);
    });
}

#[test]
fn a_read_only_disk_refuses_everything_that_changes_it() {
    let image = Image::raw(&pattern(64));
    let mut options = image.options();
    options.disk.read_only = true;
    let mut rig = Rig::new(options);
    assert_ne!(rig.blk.features() & 1 << 5, 0);
    assert_eq!(rig.request(OUT, 0, (DATA, 512, 0)).0, 1);
    assert_ne!(rig.range(DISCARD, 0, 8, 0), 0);
    assert_ne!(rig.range(WRITE_ZEROES, 0, 8, 0), 0);
    assert_eq!(rig.request(IN, 0, (DATA, 512, WRITE)).0, 0);
    assert_eq!(image.content(), pattern(64));
}

#[test]
fn discarded_and_zeroed_sectors_read_as_zeroes() {
    on_both_engines(&pattern(64), |_, rig| {
        let can = |bit: u64| rig.blk.features() & 1 << bit != 0;
        let (discard, zero) = (can(13), can(14));
        if discard {
            assert_eq!(rig.range(DISCARD, 8, 8, 0), 0);
            rig.request(IN, 15, (DATA, 1024, WRITE));
            assert_eq!(rig.bytes(DATA, 512), [0; 512]);
            assert_eq!(rig.bytes(DATA + 512, 512), pattern(64)[16 * 512..17 * 512]);
            assert_eq!(rig.range(DISCARD, 8, 8, 1), 2, "unmap is not for discard");
            assert_eq!(rig.range(DISCARD, 60, 8, 0), 1);
            assert_eq!(rig.range(DISCARD, u64::MAX, u32::MAX, 0), 1);
        } else {
            println!("skipped: this file system cannot punch holes");
        }
        if zero {
            for flags in [0, 1] {
                assert_eq!(rig.range(WRITE_ZEROES, 32, 3, flags), 0);
                rig.request(IN, 34, (DATA, 1024, WRITE));
                assert_eq!(rig.bytes(DATA, 512), [0; 512]);
                assert_eq!(rig.bytes(DATA + 512, 512), pattern(64)[35 * 512..36 * 512]);
            }
            assert_eq!(rig.range(WRITE_ZEROES, 32, 3, 2), 2, "reserved flag");
        } else {
            println!("skipped: this file system cannot zero ranges");
        }
    });
}

#[test]
fn without_sparse_nothing_is_given_back() {
    let image = Image::raw(&pattern(64));
    let mut options = image.options();
    options.disk.sparse = false;
    let mut rig = Rig::new(options);
    assert_eq!(rig.blk.features() & 1 << 13, 0);
    let mut unmap = [0xff];
    rig.blk.read_config(56, &mut unmap);
    assert_eq!(unmap, [0]);
    assert_eq!(rig.range(DISCARD, 0, 8, 0), 2);
}

#[test]
fn writes_are_stable_at_once_when_the_driver_chose_write_through() {
    // The observable part: the request succeeds with RWF_DSYNC on both engines.
    on_both_engines(&pattern(8), |image, rig| {
        rig.blk.write_config(32, &[0]);
        rig.fill(DATA, &[1; 512]);
        assert_eq!(rig.request(OUT, 2, (DATA, 512, 0)).0, 0);
        assert_eq!(image.content()[1024..1536], [1; 512]);
        if rig.blk.features() & 1 << 14 != 0 {
            assert_eq!(rig.range(WRITE_ZEROES, 2, 1, 0), 0);
            assert_eq!(image.content()[1024..1536], [0; 512]);
        }
    });
}
