use std::{
    sync::{
        Arc, Mutex,
        atomic::Ordering,
        mpsc::{self, Receiver, Sender},
    },
    time::Duration,
};

use device_model::thread::Unconfined;
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace};

use super::{BLOCK, Mem, Options};
use crate::{
    VirtioDevice,
    testing::simple::{Guest, GuestQueue},
};

const START: u64 = 4 * BLOCK;

fn options() -> Options {
    Options {
        thread_name: "_mem0".to_owned(),
        address: GuestAddress(START),
        len: 8 * BLOCK,
        block: BLOCK,
        populate: false,
        requested: 2 * BLOCK,
        discards: Default::default(),
    }
}

fn mem() -> Mem {
    Mem::new(options(), Arc::new(Unconfined)).unwrap()
}

#[test]
fn blocks_are_what_the_region_and_what_is_plugged_consist_of() {
    let with = |change: fn(&mut Options)| {
        let mut options = options();
        change(&mut options);
        Mem::new(options, Arc::new(Unconfined)).map(|mem| mem.handle().block())
    };
    assert_eq!(
        with(|options| options.block = 2 * BLOCK).unwrap(),
        2 * BLOCK
    );
    for change in [
        (|options| options.block = 0) as fn(&mut Options),
        |options| options.block = BLOCK / 2,
        |options| options.block = 3 * BLOCK,
        |options| options.block = 8 * BLOCK,
        |options| options.len += 1,
        |options| options.len = 0,
        |options| options.requested = 9 * BLOCK,
        |options| options.requested += 1,
        |options| options.address = GuestAddress(BLOCK / 2),
    ] {
        assert!(with(change).is_err());
    }
}

fn ask(queue: &GuestQueue, kind: u16, address: u64, blocks: u16) -> (u16, u16) {
    let mut request = kind.to_le_bytes().to_vec();
    request.resize(8, 0);
    request.extend(address.to_le_bytes());
    request.extend(blocks.to_le_bytes());
    request.resize(24, 0);
    let (len, response) = queue.request(&request, 10);
    assert_eq!(len, 10);
    let half = |at: usize| u16::from_le_bytes([response[at], response[at + 1]]);
    (half(0), half(8))
}

#[test]
fn blocks_are_plugged_as_far_as_requested_and_discarded_when_unplugged() {
    let guest = Guest::new();
    let queue = guest.queue(0, 16);
    let mut mem = mem();
    let handle = mem.handle();
    mem.activate(guest.activation(&[&queue])).unwrap();
    assert_eq!(ask(&queue, 0, START, 3), (1, 0), "more than requested");
    assert_eq!(ask(&queue, 0, START, 2), (0, 0));
    assert_eq!(ask(&queue, 0, START + BLOCK, 1), (3, 0), "plugged already");
    assert_eq!(handle.plugged(), 2 * BLOCK);
    assert_eq!(ask(&queue, 3, START, 2), (0, 0));
    assert_eq!(ask(&queue, 3, START, 4), (0, 2));
    assert_eq!(ask(&queue, 3, START + 2 * BLOCK, 2), (0, 1));
    let memory = guest.memory.memory();
    memory
        .write_slice(&[7; 64], GuestAddress(START + BLOCK))
        .unwrap();
    assert_eq!(ask(&queue, 1, START + BLOCK, 1), (0, 0));
    assert_eq!(
        memory.read_obj::<u8>(GuestAddress(START + BLOCK)).unwrap(),
        0
    );
    assert_eq!(ask(&queue, 1, START + BLOCK, 1), (3, 0), "not plugged");
    assert_eq!(ask(&queue, 2, 0, 0), (0, 0));
    assert_eq!(handle.plugged(), 0);
    mem.deactivate();
}

/// A follower that cannot reach the second block.
struct Follower;

impl crate::plugged::Follower for Follower {
    fn plugged(&self, address: u64, _len: u64) -> std::io::Result<()> {
        match address {
            START => Ok(()),
            _ => Err(std::io::ErrorKind::OutOfMemory.into()),
        }
    }

    fn unplugged(&self, _address: u64, _len: u64) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn memory_that_a_physical_device_cannot_reach_is_not_plugged() {
    let guest = Guest::new();
    let queue = guest.queue(0, 16);
    let options = options();
    let blocks = Arc::clone(&options.discards);
    let follower = Arc::new(Follower);
    blocks
        .blocks()
        .follow(Arc::downgrade(&follower) as std::sync::Weak<_>);
    let mut mem = Mem::new(options, Arc::new(Unconfined)).unwrap();
    mem.activate(guest.activation(&[&queue])).unwrap();
    assert_eq!(ask(&queue, 0, START + BLOCK, 1), (1, 0));
    assert_eq!(ask(&queue, 0, START, 1), (0, 0));
    assert_eq!(mem.handle().plugged(), BLOCK);
    mem.deactivate();
    // When a VM is restored, its passthrough devices are added later.
    let state = mem.save().unwrap();
    let options = self::options();
    let discards = Arc::clone(&options.discards);
    let mut other = Mem::new(options, Arc::new(Unconfined)).unwrap();
    other.restore(state).unwrap();
    let plugged: Vec<_> = discards.blocks().lock().plugged().collect();
    assert_eq!(plugged, [(START, BLOCK)]);
}

/// A slow host: it signals through the first channel that it has started, and continues when told
/// to through the second one.
struct Slow(Mutex<(Sender<()>, Receiver<()>)>);

impl crate::plugged::Follower for Slow {
    fn plugged(&self, _address: u64, _len: u64) -> std::io::Result<()> {
        let ends = self.0.lock().unwrap();
        // Nobody listens any more to a host that goes on.
        let _ = ends.0.send(());
        ends.1.recv().map_err(std::io::Error::other)
    }

    fn unplugged(&self, _address: u64, _len: u64) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn while_the_host_gives_memory_nobody_waits_to_learn_how_much_is_plugged() {
    let guest = Guest::new();
    let queue = guest.queue(0, 16);
    let options = options();
    let blocks = Arc::clone(&options.discards);
    let ((begun, has_begun), (go_on, goes_on)) = (mpsc::channel(), mpsc::channel());
    let slow = Arc::new(Slow(Mutex::new((begun, goes_on))));
    blocks
        .blocks()
        .follow(Arc::downgrade(&slow) as std::sync::Weak<_>);
    let mut mem = Mem::new(options, Arc::new(Unconfined)).unwrap();
    mem.activate(guest.activation(&[&queue])).unwrap();
    let handle = mem.handle();
    let host = std::thread::spawn(move || {
        has_begun.recv().unwrap();
        let (told, is_told) = mpsc::channel();
        let control = std::thread::spawn(move || told.send(handle.plugged()));
        let plugged = is_told.recv_timeout(Duration::from_secs(20));
        // Let the host continue only now, whether or not the control thread waited for it.
        go_on.send(()).unwrap();
        let _ = control.join();
        plugged
    });
    assert_eq!(ask(&queue, 0, START, 1), (0, 0));
    assert_eq!(host.join().unwrap(), Ok(0), "the control thread has waited");
    assert_eq!(mem.handle().plugged(), BLOCK);
    mem.deactivate();
}

#[test]
fn a_request_that_takes_long_lets_the_device_stop_and_goes_on() {
    const STEP: u64 = 256 << 20;
    let options = || Options {
        address: GuestAddress(STEP),
        len: 4 * STEP,
        requested: 3 * STEP,
        ..options()
    };
    let guest = Guest::new();
    let queue = guest.queue(0, 16);
    let ((begun, has_begun), (go_on, goes_on)) = (mpsc::channel(), mpsc::channel());
    let slow = Arc::new(Slow(Mutex::new((begun, goes_on))));
    let first = options();
    let blocks = first.discards.blocks();
    blocks.follow(Arc::downgrade(&slow) as std::sync::Weak<_>);
    let mut mem = Mem::new(first, Arc::new(Unconfined)).unwrap();
    mem.activate(guest.activation(&[&queue])).unwrap();
    let plug = std::thread::scope(|scope| {
        let plug = scope.spawn(|| ask(&queue, 0, STEP, (3 * STEP / BLOCK) as u16));
        has_begun.recv().unwrap();
        assert!(mem.quiesce(Duration::ZERO).is_err());
        // The host gives all from now on.
        drop(has_begun);
        for _ in 0..STEP / BLOCK {
            go_on.send(()).unwrap();
        }
        mem.quiesce(Duration::from_secs(20)).unwrap();
        mem.deactivate();
        assert_eq!(mem.handle().plugged(), STEP, "it went on while it was held");
        let mut other = Mem::new(options(), Arc::new(Unconfined)).unwrap();
        other.restore(mem.save().unwrap()).unwrap();
        let activation = guest.activation(&[&queue]);
        activation.queues[0].kick.write(1).unwrap();
        other.activate(activation).unwrap();
        let plug = plug.join().unwrap();
        assert_eq!(ask(&queue, 0, STEP, 1), (3, 0), "plugged already");
        other.deactivate();
        // Another driver does not know of the request.
        mem.reset();
        assert_eq!(mem.save().unwrap().get("begun"), None);
        plug
    });
    assert_eq!(plug, (0, 0));
}

#[test]
fn requests_outside_of_the_region_are_errors() {
    let guest = Guest::new();
    let queue = guest.queue(0, 16);
    let mut mem = mem();
    mem.activate(guest.activation(&[&queue])).unwrap();
    for (address, blocks) in [
        (0, 1),
        (START - BLOCK, 1),
        (START + 1, 1),
        (START, 0),
        (START, 9),
        (START + 7 * BLOCK, 2),
        (u64::MAX - BLOCK + 1, u16::MAX),
    ] {
        for kind in [0, 1, 3, 77] {
            assert_eq!(
                ask(&queue, kind, address, blocks).0,
                3,
                "{kind} {address:#x} {blocks}"
            );
        }
    }
    assert_eq!(queue.request(&[0; 3], 10).1[0], 3);
    mem.deactivate();
}

#[test]
fn a_resize_is_announced_and_the_state_survives_a_snapshot() {
    let guest = Guest::new();
    let queue = guest.queue(0, 16);
    let mut mem = mem();
    mem.activate(guest.activation(&[&queue])).unwrap();
    mem.handle().resize(5 * BLOCK + 1);
    assert_eq!(guest.interrupts.config.load(Ordering::SeqCst), 1);
    assert_eq!(ask(&queue, 0, START + 3 * BLOCK, 5), (0, 0));
    mem.deactivate();
    let state = mem.save().unwrap();
    let mut other = self::mem();
    other.restore(state.clone()).unwrap();
    assert_eq!(other.save().unwrap(), state);
    assert_eq!(other.handle().plugged(), 5 * BLOCK);
    let mut config = [0; 8];
    other.read_config(48, &mut config);
    assert_eq!(u64::from_le_bytes(config), 5 * BLOCK);
    let guest = Guest::new();
    other
        .activate(guest.activation(&[&guest.queue(0, 16)]))
        .unwrap();
    assert_eq!(guest.interrupts.config.load(Ordering::SeqCst), 1);
    other.deactivate();
    let mut broken = state;
    broken["blocks"]["words"] = serde_json::json!([u64::MAX]);
    assert!(other.restore(broken).is_err());
}

#[test]
fn a_resize_while_the_guest_is_paused_is_announced_when_it_goes_on() {
    let guest = Guest::new();
    let queue = guest.queue(0, 16);
    let mut mem = mem();
    mem.activate(guest.activation(&[&queue])).unwrap();
    mem.deactivate();
    mem.handle().resize(BLOCK);
    assert_eq!(guest.interrupts.config.load(Ordering::SeqCst), 0);
    mem.activate(guest.activation(&[&queue])).unwrap();
    assert_eq!(guest.interrupts.config.load(Ordering::SeqCst), 1);
    mem.deactivate();
}
