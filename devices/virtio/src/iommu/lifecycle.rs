//! Lifecycle of drivers, devices and snapshots.

use std::{
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use device_model::{lifecycle::StateError, thread::Unconfined};

use super::{
    Access, AddError, Endpoints, Options, VirtioIommu,
    tests::{INVALID, OK, READ, Rig, attach, detach, iommu, map, unmap},
};
use crate::{
    VirtioDevice,
    testing::{iommu::Recorder, simple::Guest},
};

const PATIENCE: Duration = Duration::from_secs(20);

#[test]
fn a_reset_takes_everything_away() {
    let mut rig = Rig::new();
    rig.attach(1, 8);
    rig.map(1, 0x1000..=0x1fff, 0);
    rig.ask(&attach(2, 16, 1));
    assert_eq!(rig.iommu.deactivate().len(), 1);
    rig.iommu.reset();
    assert_eq!((rig.mapped(0), rig.identity(1)), (vec![], false));
    assert_eq!(rig.iommu.counters()[2], ("mappings", 0));
    let guest = Guest::new();
    let queue = guest.queue(0, 64);
    rig.iommu.activate(guest.activation(&[&queue])).unwrap();
    assert_eq!(queue.request(&detach(1, 8), 4).1[0], INVALID);
}

#[test]
fn what_a_driver_has_opened_is_closed_without_one() {
    let mut rig = Rig::new();
    rig.iommu.write_config(36, &[1]);
    // A reply shows that the worker has applied the setting.
    assert_eq!(rig.attach(1, 8), OK);
    assert!(rig.identity(1));
    rig.iommu.deactivate();
    rig.iommu.reset();
    assert!(
        rig.identity(1),
        "it stays open as long as the driver has said so"
    );
    close(&mut rig);
    assert!(!rig.identity(1));
    // Set and removed at once: the worker may not have seen it.
    let mut rig = Rig::new();
    rig.iommu.write_config(36, &[1]);
    assert_eq!(rig.attach(1, 8), OK);
    rig.iommu
        .quiesce(std::time::Duration::from_secs(9))
        .unwrap();
    rig.iommu.write_config(36, &[0]);
    rig.iommu.deactivate();
    rig.iommu.reset();
    assert!(!rig.identity(1));
}

/// Closes bypass and waits until it is closed.
fn close(rig: &mut Rig) {
    rig.iommu.write_config(36, &[0]);
    rig.guest
        .wait_until("bypass is closed", || !reads_open(rig));
}

/// Whether bypass reads as open in the configuration.
fn reads_open(rig: &Rig) -> bool {
    let mut bypass = [0];
    rig.iommu.read_config(36, &mut bypass);
    bypass == [1]
}

/// A VM whose driver opened bypass, which only device 24 uses, and has gone.
fn left_open() -> Rig {
    let mut rig = Rig::new();
    rig.iommu.write_config(36, &[1]);
    assert_eq!([rig.attach(1, 8), rig.attach(1, 16)], [OK; 2]);
    assert!(rig.identity(2));
    rig.iommu.prepare_reset(PATIENCE).unwrap();
    rig.iommu.deactivate();
    rig.iommu.reset();
    rig
}

#[test]
fn who_closes_bypass_without_a_driver_does_not_take_ram_away_on_a_vcpu() {
    let mut rig = left_open();
    close(&mut rig);
    for device in &rig.devices {
        let recorded = device.lock();
        assert!(!recorded.identity);
        let vcpu = thread::current().id();
        assert!(recorded.cleared_by.iter().all(|thread| *thread != vcpu));
    }
}

#[test]
fn who_closes_bypass_between_two_looks_at_a_reset_does_not_take_ram_away_on_a_vcpu() {
    let mut rig = Rig::new();
    rig.iommu.write_config(36, &[1]);
    assert_eq!([rig.attach(1, 8), rig.attach(1, 16)], [OK; 2]);
    assert!(rig.identity(2));
    // Complete, but the driver has not polled yet.
    rig.iommu.prepare_reset(PATIENCE).unwrap();
    rig.iommu.write_config(36, &[0]);
    rig.iommu.prepare_reset(PATIENCE).unwrap();
    rig.iommu.deactivate();
    rig.iommu.reset();
    assert!(!rig.identity(2));
    let cleared_by = rig.devices[2].lock().cleared_by.clone();
    assert!(!cleared_by.contains(&thread::current().id()));
}

#[test]
fn no_vcpu_waits_while_bypass_is_closed_and_it_reads_as_open() {
    let mut rig = left_open();
    let device = Arc::clone(&rig.devices[2]);
    let (ready, is_ready) = mpsc::channel();
    let (over, is_over) = mpsc::channel::<()>();
    thread::scope(|scope| {
        // The host is busy until a vCPU has continued, or has not.
        scope.spawn(move || {
            let _busy = device.lock();
            ready.send(()).unwrap();
            let _ = is_over.recv_timeout(PATIENCE);
        });
        is_ready.recv().unwrap();
        for _ in 0..3 {
            rig.iommu.write_config(36, &[0]);
            rig.iommu.reset();
            assert!(reads_open(&rig), "it is closed, or said to be");
        }
        drop(over);
    });
    rig.guest
        .wait_until("bypass is closed", || !reads_open(&rig));
    assert!(!rig.identity(2));
    // The next driver finds it closed and can open it.
    let queue = rig.guest.queue(0, 64);
    rig.iommu.activate(rig.guest.activation(&[&queue])).unwrap();
    rig.iommu.write_config(36, &[1]);
    assert_eq!(queue.request(&attach(1, 8, 0), 4).1[0], OK);
    assert!(rig.identity(2));
}

#[test]
fn bypass_that_is_opened_again_before_it_is_closed_stays_open() {
    let mut rig = left_open();
    let request = rig.endpoints.lock();
    rig.iommu.write_config(36, &[0]);
    rig.guest
        .wait_until("somebody is to close it", || rig.endpoints.is_awaited());
    rig.iommu.write_config(36, &[1]);
    drop(request);
    // The waiting thread finishes before this request completes.
    let queue = rig.guest.queue(0, 64);
    rig.iommu.activate(rig.guest.activation(&[&queue])).unwrap();
    assert_eq!(queue.request(&attach(1, 8, 0), 4).1[0], OK);
    let recorded = rig.devices[2].lock();
    assert!(recorded.identity && recorded.cleared_by.is_empty());
}

#[test]
fn devices_that_are_back_after_a_restore_have_their_mappings() {
    let mut rig = Rig::new();
    rig.attach(1, 8);
    rig.attach(1, 16);
    rig.ask(&map(1, 0x1000..=0x1fff, 0x5000, READ));
    rig.ask(&attach(2, 24, 1));
    rig.iommu.write_config(36, &[1]);
    rig.iommu.deactivate();
    let saved = rig.iommu.save().unwrap();
    // One device exists before the IOMMU, one is added after it, one is never added.
    let endpoints = Endpoints::new();
    let devices: [Arc<Recorder>; 2] = Default::default();
    endpoints.add(8, devices[0].clone()).unwrap();
    let mut iommu = iommu(&endpoints);
    iommu.restore(saved.clone()).unwrap();
    endpoints.add(24, devices[1].clone()).unwrap();
    let read = Access {
        read: true,
        write: false,
    };
    assert_eq!(devices[0].lock().mapped[&0x1000], (0x1000, 0x5000, read));
    assert!(devices[1].lock().identity);
    assert_eq!(iommu.counters()[2], ("mappings", 1));
    assert_eq!(iommu.save().unwrap(), saved);
    let guest = Guest::new();
    let queue = guest.queue(0, 64);
    iommu.activate(guest.activation(&[&queue])).unwrap();
    assert_eq!(queue.request(&unmap(1, 0x1000..=0x1fff), 4).1[0], OK);
    assert!(devices[0].lock().mapped.is_empty());
}

#[test]
fn a_state_that_cannot_be_is_refused() {
    let domain = |id: u32, endpoints: &str, mappings: &str| {
        format!(r#"{{"id":{id},"bypass":false,"endpoints":[{endpoints}],"mappings":[{mappings}]}}"#)
    };
    let good = domain(1, "8", "[0,4095,0,true,true]");
    let states = [
        (vec![good.clone()], true),
        (vec![good.clone(), domain(1, "9", "")], false),
        (vec![good.clone(), domain(2, "8", "")], false),
        (vec![domain(1, "", "")], false),
        (vec![domain(1 << 16, "8", "")], false),
        (vec![good.replace("false", "true")], false),
        (vec![domain(1, "8", "[4096,4095,0,true,true]")], false),
        (vec![domain(1, "8", "[0,4094,0,true,true]")], false),
        (vec![domain(1, "8", "[0,4095,1,true,true]")], false),
        (vec![domain(1, "8", "[0,4095,0,false,false]")], false),
        (
            vec![domain(1, "8", "[0,18446744073709551615,0,true,true]")],
            false,
        ),
        (
            vec![domain(1, "8", "[0,8191,18446744073709547520,true,true]")],
            false,
        ),
        (
            vec![domain(
                1,
                "8",
                "[0,8191,0,true,true],[4096,8191,0,true,true]",
            )],
            false,
        ),
    ];
    for (domains, fits) in states {
        let text = format!(r#"{{"bypass":false,"domains":[{}]}}"#, domains.join(","));
        let state = serde_json::from_str(&text).unwrap();
        assert_eq!(
            iommu(&Endpoints::new()).restore(state).is_ok(),
            fits,
            "{text}"
        );
    }
}

#[test]
fn a_reset_unmaps_all_of_a_device_at_once_and_on_the_iommus_own_thread() {
    let mut rig = Rig::new();
    rig.attach(1, 8);
    rig.attach(1, 16);
    for at in 0..200 {
        assert_eq!(rig.map(1, at * 0x2000..=at * 0x2000 + 0xfff, 0), OK);
    }
    rig.ask(&attach(2, 24, 1));
    rig.iommu.prepare_reset(PATIENCE).unwrap();
    for device in &rig.devices[..2] {
        let recorded = device.lock();
        assert_eq!((recorded.mapped.len(), recorded.unmappings), (0, 0));
        assert_eq!(recorded.cleared_by.len(), 1);
        assert_ne!(recorded.cleared_by[0], thread::current().id());
    }
    assert!(!rig.identity(2));
    rig.iommu.deactivate();
    rig.iommu.reset();
    assert_eq!(rig.iommu.counters()[2], ("mappings", 0));
    // The next driver, and its reset, find the worker in the same state as the first one did.
    let queue = rig.guest.queue(0, 64);
    rig.iommu.activate(rig.guest.activation(&[&queue])).unwrap();
    assert_eq!(queue.request(&attach(1, 8, 0), 4).1[0], OK);
    assert_eq!(queue.request(&map(1, 0..=0xfff, 0, READ), 4).1[0], OK);
    rig.iommu.prepare_reset(PATIENCE).unwrap();
    assert!(rig.mapped(0).is_empty());
}

#[test]
fn a_driver_that_resets_the_iommu_waits_no_longer_than_a_vcpu_may() {
    let mut rig = Rig::new();
    rig.attach(1, 8);
    rig.map(1, 0x1000..=0x1fff, 0);
    // The host is busy with it.
    let device = Arc::clone(&rig.devices[0]);
    let busy = device.lock();
    for patience in [0, 5, 0] {
        let waits = rig.iommu.prepare_reset(Duration::from_millis(patience));
        let waits = waits.unwrap_err().to_string();
        assert!(
            waits.contains("the host's IOMMU, which is unmapping"),
            "{waits}"
        );
    }
    drop(busy);
    rig.iommu.prepare_reset(PATIENCE).unwrap();
    assert!(rig.mapped(0).is_empty());
}

#[test]
fn who_plugs_a_device_waits_for_one_request_however_many_there_are() {
    let endpoints = Endpoints::new();
    for id in 0..100 {
        let request = endpoints.lock();
        thread::scope(|scope| {
            let device = Arc::new(Recorder::default());
            let plugs = scope.spawn(|| endpoints.add(id, device));
            while !endpoints.is_awaited() {
                thread::yield_now();
            }
            // The next request follows immediately.
            drop(request);
            assert!(endpoints.lock().reserved(id).is_ok(), "device {id} waits");
            plugs.join().unwrap().unwrap();
        });
    }
}

/// A saved domain 3 with endpoint 9 that maps a range.
fn saved(first: u64, last: u64) -> serde_json::Value {
    serde_json::json!({"bypass": false, "domains": [{
        "id": 3, "bypass": false, "endpoints": [9],
        "mappings": [[0, 0xfff, 0, true, true], [first, last, 0, true, false]],
    }]})
}

#[test]
fn what_a_host_reserves_is_not_restored_and_the_reason_says_what_to_do() {
    let device = Arc::new(Recorder::default());
    device.lock().reserved = Some(0x10_0000..=0x10_ffff);
    let says = |text: &str, reserved: &str| {
        for words in [
            "0x10f000 to 0x110fff",
            "endpoint 0x9",
            "domain 3",
            reserved,
            "boot the VM anew",
        ] {
            assert!(text.contains(words), "no {words:?} in {text:?}");
        }
    };
    // A device that is already present.
    let endpoints = Endpoints::new();
    endpoints.add(9, device.clone()).unwrap();
    let refused = iommu(&endpoints).restore(saved(0x10_f000, 0x11_0fff));
    let Err(StateError::Mismatch(text)) = refused else {
        panic!("{refused:?}");
    };
    says(&text, "0x100000 to 0x10ffff");
    assert!(device.lock().mapped.is_empty());
    // A device that is added later.
    let endpoints = Endpoints::new();
    iommu(&endpoints)
        .restore(saved(0x10_f000, 0x11_0fff))
        .unwrap();
    let refused = endpoints.add(9, device.clone()).unwrap_err();
    assert!(matches!(refused, AddError::Reserved(_)), "{refused}");
    says(&refused.to_string(), "0x100000 to 0x10ffff");
    assert!(device.lock().mapped.is_empty());
    // Any device that may be added later.
    let refused = iommu(&Endpoints::new()).restore(saved(0xfedf_f000, 0xfee0_0fff));
    let Err(StateError::Mismatch(text)) = refused else {
        panic!("{refused:?}");
    };
    assert!(text.contains("reserves 0xfee00000 to 0xfeefffff"), "{text}");
    let endpoints = Endpoints::new();
    let options = Options {
        thread_name: "_iommu".to_owned(),
        address_width: 48,
        reserved: vec![0x200_0000..=0x2ff_ffff, 0x10_0000..=0x10_0fff],
    };
    let mut amd = VirtioIommu::new(endpoints, options, Arc::new(Unconfined)).unwrap();
    let refused = amd.restore(saved(0xf_f000, 0x10_0fff)).unwrap_err();
    assert!(
        refused
            .to_string()
            .contains("reserves 0x100000 to 0x100fff"),
        "{refused}"
    );
    amd.restore(saved(0xf_f000, 0xf_ffff)).unwrap();
    // A mapping beside the reserved range is valid.
    let endpoints = Endpoints::new();
    let mut iommu = iommu(&endpoints);
    iommu.restore(saved(0xfedf_f000, 0xfedf_ffff)).unwrap();
}
