//! What a hostile driver writes into its rings.

use std::sync::atomic::Ordering;

use super::{
    DATA, HEADER, IN, INDIRECT, Image, NEXT, OUT, QUEUE_SIZE, RAM, Rig, STATUS, WRITE,
    on_both_engines, pattern, rings, wait_for,
};
use crate::device::VirtioDevice;

#[test]
fn requests_outside_of_the_disk_or_in_part_sectors_fail() {
    on_both_engines(&pattern(8), |image, rig| {
        for (sector, len) in [
            (8, 512),
            (7, 1024),
            (u64::MAX, 512),
            (1 << 55, 512),
            (u64::MAX / 512, 512),
            (0, 511),
            (0, 513),
        ] {
            assert_eq!(rig.request(IN, sector, (DATA, len, WRITE)), (1, 1));
            assert_eq!(rig.request(OUT, sector, (DATA, len, 0)), (1, 1));
        }
        assert_eq!(rig.request(OUT, 7, (RAM as u64 - 256, 512, 0)), (1, 1));
        assert_eq!(rig.request(IN, 7, (u64::MAX - 5, 512, WRITE)), (1, 1));
        assert_eq!(image.content(), pattern(8));
        assert_eq!(rig.request(IN, 7, (DATA, 512, WRITE)), (0, 513));
    });
}

#[test]
fn chains_that_are_no_requests_are_handed_back_and_the_queue_goes_on() {
    on_both_engines(&pattern(8), |_, rig| {
        rig.header(HEADER, IN, 0);
        let untouched: [&[(u64, u32, u16)]; 5] = [
            &[(HEADER, 16, 0)],
            &[(HEADER, 16, 0), (DATA, 0, WRITE)],
            &[(DATA, 512, WRITE), (HEADER, 16, 0)],
            &[(HEADER, 16, 0), (RAM as u64, 1, WRITE)],
            &[(0x8000, 15, INDIRECT)],
        ];
        for chain in untouched {
            assert_eq!(rig.chain(chain), (0xff, 0), "{chain:?}");
        }
        // A short header, one that is not in RAM, no header.
        for chain in [
            [(HEADER, 15, 0), (STATUS, 1, WRITE)],
            [(u64::MAX - 3, 16, 0), (STATUS, 1, WRITE)],
            [(DATA, 512, WRITE), (STATUS, 1, WRITE)],
        ] {
            assert_eq!(rig.chain(&chain), (1, 1), "{chain:?}");
        }
        // A loop.
        rig.describe(
            rings(0),
            0,
            &[(HEADER, 16, NEXT), (DATA, 512, WRITE | NEXT)],
        );
        rig.write(1_u16, rings(0) + 16 + 14);
        rig.offer(0, 0);
        rig.run(0);
        assert_eq!(rig.request(99, 0, (DATA, 512, WRITE)), (2, 1));
        assert_eq!(rig.request(IN, 7, (DATA, 512, WRITE)), (0, 513));
        assert_eq!(rig.interrupts.resets.load(Ordering::SeqCst), 0);
    });
}

#[test]
fn a_queue_with_impossible_indices_is_given_up_and_the_device_still_stops() {
    on_both_engines(&pattern(8), |_, rig| {
        rig.write(1000_u16, rings(0) + 0x1002);
        rig.kicks[0].write(1).unwrap();
        wait_for(|| rig.interrupts.resets.load(Ordering::SeqCst) == 1);
        rig.kicks[0].write(1).unwrap();
        assert_eq!(rig.blk.deactivate().len(), 1);
        assert_eq!(rig.interrupts.resets.load(Ordering::SeqCst), 1);
        // After a reset by the driver it works again.
        rig.write(0_u16, rings(0) + 0x1002);
        let queue = rig.fresh_queue(0);
        rig.activate(vec![queue]);
        assert_eq!(rig.request(IN, 7, (DATA, 512, WRITE)), (0, 513));
    });
}

#[test]
fn a_head_outside_of_the_table_breaks_only_the_queue() {
    on_both_engines(&pattern(8), |_, rig| {
        rig.offer(0, 999);
        rig.kicks[0].write(1).unwrap();
        wait_for(|| rig.interrupts.resets.load(Ordering::SeqCst) == 1);
    });
}

#[test]
fn an_image_of_unknown_type_cannot_be_turned_into_another_format_by_its_guest() {
    for io_uring in [true, false] {
        let image = Image::raw(&pattern(64));
        let mut options = image.options();
        options.disk.io_uring = io_uring;
        let mut rig = Rig::new(options);
        rig.fill(DATA, b"QFI\xfb\0\0\0\x03");
        assert_eq!(rig.request(OUT, 0, (DATA, 1024, 0)).0, 1);
        assert_eq!(image.content(), pattern(64));
        // Any other content may be written there, for example a partition table.
        rig.fill(DATA, &[0x33; 1024]);
        assert_eq!(rig.request(OUT, 0, (DATA, 1024, 0)).0, 0);
        assert_eq!(image.content()[..1024], [0x33; 1024]);
    }
    on_both_engines(&pattern(8), |image, rig| {
        rig.fill(DATA, b"QFI\xfb\0\0\0\x03");
        assert_eq!(rig.request(OUT, 0, (DATA, 512, 0)).0, 0, "stated to be raw");
        assert_eq!(image.content()[..4], *b"QFI\xfb");
    });
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(48))]

    /// Whatever the rings contain, the device neither panics nor hangs, accesses nothing but its
    /// image and RAM, and stops when asked to.
    #[test]
    fn no_content_of_the_rings_harms_the_device(
        descriptors in proptest::collection::vec(
            (0..0x20_u64, 0..3_u32, 0..8_u16, 0..QUEUE_SIZE), QUEUE_SIZE as usize),
        heads in proptest::collection::vec(0..QUEUE_SIZE + 1, 1..QUEUE_SIZE as usize),
        headers in proptest::collection::vec((0..16_u32, 0..10_u64), 32),
        io_uring in proptest::bool::ANY,
    ) {
        let image = Image::raw(&pattern(8));
        let mut options = image.options();
        options.disk.io_uring = io_uring;
        let mut rig = Rig::new(options);
        for (k, (kind, sector)) in headers.iter().enumerate() {
            rig.header(0x1000 * k as u64, *kind, *sector);
        }
        for (k, (page, len, flags, next)) in descriptors.iter().enumerate() {
            let at = rings(0) + 16 * k as u64;
            // Lengths of a header, a sector and a status; indirect tables are in the data area.
            let len = [16, 512, 1][*len as usize];
            rig.write(page * 0x1000, at);
            rig.write(len, at + 8);
            rig.write(*flags, at + 12);
            rig.write(*next, at + 14);
        }
        for head in heads {
            rig.offer(0, head);
        }
        rig.kicks[0].write(1).unwrap();
        wait_for(|| {
            rig.used_index(0) == rig.available[0]
                || rig.interrupts.resets.load(Ordering::SeqCst) > 0
        });
        proptest::prop_assert_eq!(rig.blk.deactivate().len(), 1);
        proptest::prop_assert_eq!(image.content().len(), 8 * 512);
    }
}
