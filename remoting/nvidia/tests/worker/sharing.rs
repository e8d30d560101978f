//! Programs that share a GPU by weight.

use std::{
    os::unix::net::UnixStream,
    sync::atomic::Ordering,
    thread,
    time::{Duration, Instant},
};

use gantry_nvidia::{sharing::Share, stand_in::Scheduled};
use remoting_turns::{
    fake::{self, Fake},
    page::sight,
};

use super::*;

/// Longer than anything takes, unless it hangs.
const PATIENCE: Duration = Duration::from_secs(60);
const SPACE: u32 = 0x5c00_0003;
const GROUP: u32 = 0x5c00_0010;
const COPIES: u32 = 0x5c00_0020;
const SET_TIMESLICE: u32 = 0xa06c_0103;

/// A worker, and an arbiter that has it set its slices.
fn serve_shared() -> (Served, Fake) {
    let folder = tempfile::tempdir().expect("there is room");
    let (control, pool) = UnixStream::pair().expect("there are descriptors");
    let device = StandIn::default();
    let join = fake::join();
    let share = Share {
        control,
        name: join.name,
        weight: join.weight,
        latency: join.latency,
    };
    let worker = Worker::shared(Box::new(device.clone()), SLICE, None, None, share);
    let served = Served::start(&worker.expect("the branch is known"), device, folder);
    let arbiter = Fake::meet_sliced(pool);
    arbiter.share_by_slices(true);
    (served, arbiter)
}

/// Waits until the worker says that it sees so much.
fn wait_for_sight(arbiter: &Fake, sight: u32) {
    let start = Instant::now();
    while arbiter.account.sight.load(Ordering::Relaxed) != sight {
        assert!(start.elapsed() < PATIENCE, "it does not say so");
        thread::sleep(Duration::from_millis(5));
    }
}

/// A program with two groups of channels: one runs kernels, one copies.
fn program(served: &Served) -> Owner {
    let owner = Owner::new(served);
    assert_eq!(owner.allocate(GPU, 0x5c00_0004, 0x2080, 4), 0);
    make_channels(&owner);
    owner
}

fn make_channels(owner: &Owner) {
    assert_eq!(owner.allocate(GPU, SPACE, 0x90f1, 56), 0);
    for (group, engine) in [(GROUP, 1), (COPIES, 9)] {
        let header = [
            (0, owner.client),
            (4, GPU),
            (8, group),
            (12, 0xa06c),
            (16, 1),
            (48 + 8, SPACE),
            (48 + 12, engine),
        ];
        let answer = owner.call(owner.control, ALLOCATE, &words(48 + 20, &header));
        assert_eq!(word(&answer, 40), 0);
        assert_eq!(owner.allocate(group, group + 1, 0xc86f, 368), 0);
    }
}

/// Sets the slice of a group, as a program's driver library does; answers the status, and the slice in the answer.
fn set(owner: &Owner, group: u32, micros: u32) -> (u32, u32) {
    let block = [
        (0, owner.client),
        (4, group),
        (8, SET_TIMESLICE),
        (16, 1),
        (24, 8),
        (32, micros),
    ];
    let answer = owner.call(owner.control, CONTROL, &words(40, &block));
    (word(&answer, 28), word(&answer, 32))
}

#[test]
fn a_programs_own_slices_count_only_where_no_arbiter_divides_the_gpu() {
    let (shared, _arbiter) = serve_shared();
    let slices = |served: &Served| {
        let owner = program(served);
        assert_eq!(set(&owner, GROUP, 30_000), (0, 30_000));
        assert_eq!(set(&owner, COPIES, 1024), (0, 1024));
        let state = served.device.0.lock().expect("it works");
        let set = state
            .scheduled
            .iter()
            .filter(|one| matches!(one, Scheduled::Slice(..)));
        let mut set: Vec<_> = set.copied().collect();
        set.dedup();
        set
    };
    let copies = Scheduled::Slice(COPIES, 1024);
    let kept = slices(&shared);
    assert!(kept.contains(&copies), "{kept:?}");
    assert!(kept.contains(&Scheduled::Slice(GROUP, 2048)), "{kept:?}");
    assert!(!kept.contains(&Scheduled::Slice(GROUP, 30_000)), "{kept:?}");
    let alone = slices(&serve());
    assert_eq!(alone, [Scheduled::Slice(GROUP, 30_000), copies]);
}

#[test]
fn no_program_stops_channels_or_starts_them() {
    let (shared, _arbiter) = serve_shared();
    for served in [serve(), shared] {
        let owner = program(&served);
        for command in [0x2080_110a, 0x2080_110b] {
            let block = [
                (0, owner.client),
                (4, 0x5c00_0004),
                (8, command),
                (16, 1),
                (24, 536),
            ];
            let bytes = words(32 + 536, &block);
            let (control, call) = (owner.control, CONTROL.into());
            let answer = ask(&owner.socket, Operation::Call, control, 1, call, &bytes);
            assert_eq!(answer.expect("it answers").0.result, -libc::EINVAL);
        }
    }
}

#[test]
fn a_worker_that_cannot_read_its_clients_use_says_that_it_takes_no_part() {
    let (served, arbiter) = serve_shared();
    wait_for_sight(&arbiter, sight::RECORD);
    let owner = program(&served);
    // The stand-in stops and starts what the worker tries, and has no record.
    wait_for_sight(&arbiter, sight::NOTHING);
    let tried = served.device.0.lock().expect("it works").scheduled.clone();
    let expected = [
        Scheduled::Slice(GROUP, 2048),
        Scheduled::Unschedule(1),
        Scheduled::Start(1),
    ];
    assert!(tried.ends_with(&expected), "{tried:?}");
    drop(owner);
}

#[test]
fn no_program_runs_kernels_where_they_cannot_be_stopped_or_interrupted() {
    const SUBDEVICE: u32 = 0x5c00_0004;
    let (shared, _arbiter) = serve_shared();
    let alone = serve();
    for (served, allowed) in [(&alone, true), (&shared, false)] {
        let owner = program(served);
        let is_allowed = |status: u32| assert_eq!(status == 0, allowed, "{status:x}");
        // Engines below a channel without a group, and below one of a group that copies.
        assert_eq!(owner.allocate(GPU, 0x5c00_0030, 0xc86f, 368), 0);
        is_allowed(owner.allocate(0x5c00_0030, 0x5c00_0031, 0xcbc0, 16));
        is_allowed(owner.allocate(COPIES + 1, COPIES + 2, 0xcbc0, 16));
        assert_eq!(owner.allocate(GROUP + 1, GROUP + 2, 0xcbc0, 16), 0);
        // It is interrupted before the program asks for anything.
        let scheduled = served.device.0.lock().expect("it works").scheduled.clone();
        let is_set = scheduled.contains(&Scheduled::Preemption(Some(2)));
        assert_eq!(is_set, !allowed);
        // Engines of a client that has not made what its channels are controlled by.
        let uncontrolled = Owner::new(served);
        make_channels(&uncontrolled);
        is_allowed(uncontrolled.allocate(GROUP + 1, GROUP + 2, 0xcbc0, 16));
        // The same group in another client.
        let root = owner.call(owner.control, ALLOCATE, &words(48, &[(12, 0x41)]));
        let duplicate = [
            (0, word(&root, 8)),
            (4, word(&root, 8)),
            (8, 0x5c00_0040),
            (12, owner.client),
            (16, GROUP),
        ];
        let answer = owner.call(owner.control, 0xc01c_4634, &words(28, &duplicate));
        is_allowed(word(&answer, 24));
        is_allowed(set(&owner, GPU, 1024).0);
        // Kernels that run to their end.
        let block = [
            (0, owner.client),
            (4, SUBDEVICE),
            (8, 0x2080_1210),
            (16, 1),
            (24, 32),
            (32 + 4, GROUP + 1),
        ];
        let answer = owner.call(owner.control, CONTROL, &words(64, &block));
        let seen = [28, 32, 32 + 12].map(|at| word(&answer, at));
        assert_eq!(seen, [0, 0, 0]);
        let scheduled = served.device.0.lock().expect("it works").scheduled.clone();
        // Without its flag, the driver would take no notice of the mode.
        let mode = if allowed { None } else { Some(2) };
        assert!(scheduled.contains(&Scheduled::Preemption(mode)));
        // More objects than can be looked after.
        let mut made =
            (0..5000).map(|number| owner.allocate(GPU, 0x5d00_0000 + number, 0x90f1, 56));
        assert_eq!(made.all(|status| status == 0), allowed);
        // That by which channels are stopped.
        let block = [(0, owner.client), (4, GPU), (8, SUBDEVICE)];
        let answer = owner.call(owner.control, FREE, &words(16, &block));
        is_allowed(word(&answer, 12));
    }
}
