//! Pause, restore, growth, configuration.

use std::{sync::atomic::Ordering, time::Duration};

use device_model::lifecycle::StateError;
use serde_json::json;

use super::{
    DATA, GET_ID, HEADER, IN, Image, OUT, Rig, STATUS, WRITE, grow, new_blk, on_both_engines,
    pattern, rings, wait_for,
};
use crate::{
    blk::{Blk, State},
    device::VirtioDevice,
};

#[test]
fn a_disk_is_not_quiet_while_it_grows() {
    let image = Image::raw(&pattern(64));
    let mut blk = new_blk(image.options()).unwrap();
    let growth = blk.handle().growth(128 * 512).unwrap();
    let busy = blk.quiesce(Duration::from_millis(1)).unwrap_err();
    assert!(busy.to_string().contains("disk"), "{busy}");
    // Whoever gives up, or has done it.
    drop(growth);
    blk.quiesce(Duration::ZERO).unwrap();
    let growth = blk.handle().growth(128 * 512).unwrap();
    growth().unwrap();
    blk.quiesce(Duration::ZERO).unwrap();
    blk.settled().unwrap();
    assert_eq!(image.content().len(), 128 * 512);
}

#[test]
fn every_queue_has_a_worker_of_its_own() {
    let image = Image::raw(&pattern(64));
    let mut options = image.options();
    options.num_queues = 3;
    options.affinity = vec![(1, vec![0])];
    let mut rig = Rig::new(options);
    for k in 0..3 {
        rig.header(HEADER, IN, k as u64);
        rig.describe(
            rings(k),
            0,
            &[(HEADER, 16, 0), (DATA, 512, WRITE), (STATUS, 1, WRITE)],
        );
        rig.offer(k, 0);
        rig.run(k);
        assert_eq!(rig.bytes(DATA, 512), pattern(64)[512 * k..512 * (k + 1)]);
    }
    let mut config = [0; 2];
    rig.blk.read_config(34, &mut config);
    assert_eq!(u16::from_le_bytes(config), 3);
}

#[test]
fn the_serial_number_is_stable_and_can_be_chosen() {
    let image = Image::raw(&pattern(8));
    let first = {
        let mut rig = Rig::new(image.options());
        assert_eq!(rig.request(GET_ID, 0, (DATA, 20, WRITE)), (0, 21));
        rig.bytes(DATA, 20)
    };
    let mut rig = Rig::new(image.options());
    rig.request(GET_ID, 0, (DATA, 20, WRITE));
    assert_eq!(rig.bytes(DATA, 20), first);
    assert!(first[0].is_ascii_digit());
    drop(rig);
    let mut options = image.options();
    options.serial = Some("a serial number that is too long".into());
    let mut rig = Rig::new(options);
    assert_eq!(rig.request(GET_ID, 0, (DATA, 7, WRITE)), (0, 8));
    rig.request(GET_ID, 0, (DATA, 20, WRITE));
    assert_eq!(rig.bytes(DATA, 20), b"a serial number that");
}

#[test]
fn a_paused_device_takes_up_its_queue_where_it_was() {
    on_both_engines(&pattern(64), |_, rig| {
        rig.request(IN, 3, (DATA, 512, WRITE));
        let queues = rig.blk.deactivate();
        assert_eq!(queues.len(), 1);
        assert!(rig.blk.deactivate().is_empty());
        // Offered while no worker runs, and without a kick afterwards.
        rig.header(HEADER, IN, 9);
        rig.describe(
            rings(0),
            0,
            &[(HEADER, 16, 0), (DATA, 512, WRITE), (STATUS, 1, WRITE)],
        );
        rig.offer(0, 0);
        rig.activate(queues);
        wait_for(|| rig.used_index(0) == 2);
        assert_eq!(rig.bytes(DATA, 512), pattern(64)[9 * 512..10 * 512]);
    });
}

#[test]
fn growing_a_disk_is_told_to_the_guest_and_shrinking_is_refused() {
    let image = Image::raw(&pattern(8));
    let mut rig = Rig::new(image.options());
    let handle = rig.blk.handle();
    let error = grow(&handle, 512).unwrap_err().to_string();
    assert!(error.contains("shrinking would cut off data"), "{error}");
    grow(&handle, 5000).unwrap_err();
    assert_eq!(rig.interrupts.config.load(Ordering::SeqCst), 0);
    grow(&handle, 64 * 512).unwrap();
    assert_eq!(rig.interrupts.config.load(Ordering::SeqCst), 1);
    let mut capacity = [0; 8];
    rig.blk.read_config(0, &mut capacity);
    assert_eq!(u64::from_le_bytes(capacity), 64);
    assert_eq!(rig.request(OUT, 63, (DATA, 512, 0)).0, 0);
    // While the device is inactive, the notification is pending.
    let queues = rig.blk.deactivate();
    grow(&handle, 65 * 512).unwrap();
    assert_eq!(rig.interrupts.config.load(Ordering::SeqCst), 1);
    rig.activate(queues);
    assert_eq!(rig.interrupts.config.load(Ordering::SeqCst), 2);
}

#[test]
fn the_saved_state_is_checked_against_the_image() {
    let image = Image::raw(&pattern(64));
    let mut blk = new_blk(image.options()).unwrap();
    blk.write_config(32, &[0]);
    let saved = blk.save().unwrap();
    drop(blk);
    let mut blk = new_blk(image.options()).unwrap();
    blk.restore(saved.clone()).unwrap();
    assert_eq!(blk.save().unwrap(), saved);
    let mut mode = [9];
    blk.read_config(32, &mut mode);
    assert_eq!(mode, [0]);
    for capacity in [0, 100, 65 * 512, u64::MAX] {
        let state = State {
            capacity,
            writeback: true,
            block: None,
        };
        let error = blk.restore(serde_json::to_value(state).unwrap());
        assert!(matches!(error, Err(StateError::Mismatch(_))), "{capacity}");
    }
    for text in ["{}", "[]", r#"{"capacity":-1,"writeback":true}"#] {
        let error = blk.restore(serde_json::from_str(text).unwrap());
        assert!(matches!(error, Err(StateError::Format(_))), "{text}");
    }
}

#[test]
fn a_guest_keeps_the_blocks_that_it_knows() {
    let image = Image::raw(&pattern(64));
    let with = |size| {
        let mut options = image.options();
        options.disk.logical_block = Some(size);
        new_blk(options).unwrap()
    };
    let saved = |blk: Blk| blk.save().unwrap();
    let large = saved(with(4096));
    let mut small = with(512);
    small.restore(large.clone()).unwrap();
    let mut seen = [0; 8];
    small.read_config(20, &mut seen);
    assert_eq!(seen[..4], 4096_u32.to_le_bytes());
    // The physical block is of one logical block.
    assert_eq!(seen[4..], [0, 0, 1, 0]);
    assert_eq!(saved(small), large);
    let small = saved(with(512));
    let mut blk = with(4096);
    let error = blk.restore(small).unwrap_err().to_string();
    assert!(error.contains("use logical_block_size=512"), "{error}");
    // Snapshots of earlier versions do not say it.
    let capacity = 64 * 512;
    for (block, is_valid) in [
        (json!(null), true),
        (json!(0), false),
        (json!(4097), false),
        (json!(1 << 17), false),
    ] {
        let state = json!({"capacity": capacity, "writeback": true, "block": block});
        let restored = blk.restore(state);
        assert_eq!(restored.is_ok(), is_valid, "{block}");
        if let Err(error) = restored {
            assert!(!error.to_string().contains("logical_block_size"), "{error}");
        }
    }
    blk.restore(json!({"capacity": capacity, "writeback": true}))
        .unwrap();
}

#[test]
fn configuration_reads_beyond_the_end_are_zero() {
    let image = Image::raw(&pattern(8));
    let blk = new_blk(image.options()).unwrap();
    for offset in [60, 1 << 20, u64::MAX] {
        let mut data = [0xff; 8];
        blk.read_config(offset, &mut data);
        assert_eq!(data, [0; 8]);
    }
    let mut data = [0xff; 8];
    blk.read_config(20, &mut data);
    assert_eq!(data[..4], 512_u32.to_le_bytes());
}
