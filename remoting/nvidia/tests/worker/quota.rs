//! Video memory that programs may have.

use std::time::{Duration, Instant};

use super::{ALLOCATE, CONTROL, GPU, Owner, Served, open, serve_with, word, words};

const DUPLICATE: u32 = 0xc01c_4634;
const SHARE: u32 = 0xc018_4635;
const EXPORT: u32 = 0x3d0b;
const IMPORT: u32 = 0x3d0c;
const MEMORY_INFO: u32 = 0x2080_1303;
const MAP_EXTERNAL: u32 = 0x21;
const UNMAP_EXTERNAL: u32 = 0x42;
const FREE_RANGE: u32 = 0x22;
const CREATE_RANGE: u32 = 0x49;
const REGISTER_CHANNEL: u32 = 0x1b;
const UNREGISTER_CHANNEL: u32 = 0x1c;
const UNREGISTER: u32 = 0x26;
/// Where a GPU maps memory.
const BASE: u32 = 0x4000_0000;
const NO_MEMORY: u32 = 0x51;
/// What each object has, and what all programs may have.
const PIECE: u32 = 1 << 20;
const LIMIT: u64 = 3 << 19;

/// Allocates video memory. Answers the status.
fn take(owner: &Owner, handle: u32) -> u32 {
    let header = [
        (0, owner.client),
        (4, GPU),
        (8, handle),
        (12, 0x40),
        (16, 1),
        (48 + 64, PIECE),
    ];
    let allocated = owner.call(owner.control, ALLOCATE, &words(48 + 128, &header));
    word(&allocated, 40)
}

/// A control call. Answers the parameters.
fn control(owner: &Owner, command: u32, length: usize, parameters: &[(usize, u32)]) -> Vec<u8> {
    let mut all = vec![
        (0, owner.client),
        (4, owner.client),
        (8, command),
        (16, 1),
        (24, length as u32),
    ];
    all.extend(parameters.iter().map(|(at, word)| (32 + at, *word)));
    let answer = owner.call(owner.control, CONTROL, &words(32 + length, &all));
    assert_eq!(word(&answer, 28), 0, "{command:x}");
    answer[32..].to_vec()
}

fn programs() -> (Served, Owner, Owner) {
    let served = serve_with(Some(LIMIT));
    let (one, two) = (Owner::new(&served), Owner::new(&served));
    (served, one, two)
}

/// Waits until a program can allocate: files are closed in the background.
fn take_soon(owner: &Owner, handle: u32) {
    let begin = Instant::now();
    while take(owner, handle) != 0 {
        assert!(
            begin.elapsed() < Duration::from_secs(60),
            "it stays counted"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn all_programs_together_have_no_more_than_the_limit() {
    let (_served, one, two) = programs();
    assert_eq!(take(&one, 7), 0);
    assert_eq!(take(&two, 7), NO_MEMORY);
    let info = [
        (0, 3),
        (4, 8),
        (8, 1 << 27),
        (12, 0x16),
        (16, 1 << 27),
        (20, 5),
        (24, 77),
    ];
    let shown = control(&two, MEMORY_INFO, 1028, &info);
    assert_eq!([8, 16, 24].map(|at| word(&shown, at)), [1536, 512, 77]);
    one.free(7);
    assert_eq!(take(&two, 7), 0);
    // A program that ends gives back what it had.
    drop(two);
    take_soon(&one, 8);
}

#[test]
fn memory_that_the_driver_refuses_is_not_counted() {
    let (served, one, _two) = programs();
    served
        .device
        .0
        .lock()
        .expect("it is whole")
        .failing
        .insert(ALLOCATE, 5);
    let header = [
        (0, one.client),
        (4, GPU),
        (8, 7),
        (12, 0x40),
        (16, 1),
        (48 + 64, PIECE),
    ];
    let request = words(48 + 128, &header);
    let answer = super::ask(
        &one.socket,
        super::Operation::Call,
        one.control,
        1,
        ALLOCATE.into(),
        &request,
    );
    assert_eq!(answer.expect("it answers").0.result, -5);
    served.device.0.lock().expect("it is whole").failing.clear();
    assert_eq!(take(&one, 7), 0);
}

#[test]
fn memory_that_the_driver_makes_larger_than_the_limit_is_freed() {
    let (served, one, _two) = programs();
    served.device.0.lock().expect("it is whole").least_size = LIMIT + 1;
    assert_eq!(take(&one, 7), NO_MEMORY);
    let mut state = served.device.0.lock().expect("it is whole");
    assert!(!state.objects.contains_key(&(one.client, 7)));
    state.least_size = LIMIT;
    drop(state);
    assert_eq!(take(&one, 7), 0);
    assert_eq!(take(&one, 8), NO_MEMORY);
}

#[test]
fn a_duplicate_keeps_memory_counted() {
    let (_served, one, two) = programs();
    assert_eq!(take(&one, 7), 0);
    let share = [(0, one.client), (4, 7), (12, 1), (16, 2)];
    one.call(one.control, SHARE, &words(24, &share));
    let duplicate = [
        (0, two.client),
        (4, GPU),
        (8, 100),
        (12, one.client),
        (16, 7),
    ];
    two.call(two.control, DUPLICATE, &words(28, &duplicate));
    one.free(7);
    assert_eq!(take(&one, 8), NO_MEMORY);
    two.free(100);
    assert_eq!(take(&one, 8), 0);
}

#[test]
fn memory_that_was_exported_to_a_file_stays_counted() {
    let (_served, one, two) = programs();
    assert_eq!(take(&one, 7), 0);
    let (file, token, end) = open(&one.socket, "/dev/nvidiactl");
    control(
        &one,
        EXPORT,
        2128,
        &[(0, file), (4, GPU), (76, 7), (2124, 1)],
    );
    one.free(7);
    assert_eq!(take(&one, 8), NO_MEMORY);
    let adopted = super::ask(&two.socket, super::Operation::Adopt, 0, 0, 0, &token);
    assert_eq!(adopted.expect("it answers").0.result, 0);
    control(
        &two,
        IMPORT,
        652,
        &[(0, file), (4, GPU), (8, 100), (648, 1)],
    );
    drop(end);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(take(&one, 8), NO_MEMORY);
    two.free(100);
    take_soon(&one, 8);
}

/// The first GPU maps the memory of an object.
fn map_by_gpu(owner: &Owner, uvm: u32, handle: u32) {
    let block = [
        (0, BASE),
        (8, PIECE),
        (9240, 1),
        (9248, owner.control),
        (9252, owner.client),
        (9256, handle),
    ];
    let mapped = owner.call(uvm, MAP_EXTERNAL, &words(9264, &block));
    assert_eq!(word(&mapped, 9260), 0);
}

#[test]
fn memory_that_a_gpu_maps_stays_counted() {
    let (_served, one, _two) = programs();
    let (uvm, _, end) = open(&one.socket, "/dev/nvidia-uvm");
    for (command, length) in [(UNMAP_EXTERNAL, 40), (FREE_RANGE, 24), (UNREGISTER, 20)] {
        assert_eq!(take(&one, 7), 0);
        let range = [(0, BASE), (8, PIECE)];
        one.call(uvm, CREATE_RANGE, &words(24, &range));
        map_by_gpu(&one, uvm, 7);
        one.free(7);
        assert_eq!(take(&one, 8), NO_MEMORY, "the driver keeps it");
        // The length does not say what is freed.
        one.call(uvm, FREE_RANGE, &words(24, &[(8, u32::MAX)]));
        assert_eq!(take(&one, 8), NO_MEMORY, "another range");
        let whole = match command {
            UNREGISTER => Vec::new(),
            FREE_RANGE => vec![(0, BASE)],
            _ => range.to_vec(),
        };
        one.call(uvm, command, &words(length, &whole));
        assert_eq!(take(&one, 8), 0, "{command:x}");
        one.free(8);
    }
    assert_eq!(take(&one, 7), 0);
    map_by_gpu(&one, uvm, 7);
    one.free(7);
    drop(end);
    take_soon(&one, 8);
}

#[test]
fn buffers_of_registered_channels_stay_counted() {
    const GROUP: u32 = 50;
    const CHANNEL: u32 = 60;
    // A group and a channel, but not two groups.
    let served = serve_with(Some(3 << 20));
    let one = Owner::new(&served);
    let (uvm, _, _end) = open(&one.socket, "/dev/nvidia-uvm");
    let make = || {
        assert_eq!(one.allocate(GPU, GROUP, 0xa06c, 20), 0);
        assert_eq!(one.allocate(GROUP, CHANNEL, 0xc86f, 368), 0);
        let block = [(16, one.control), (20, one.client), (24, CHANNEL)];
        let registered = one.call(uvm, REGISTER_CHANNEL, &words(56, &block));
        assert_eq!(word(&registered, 48), 0);
    };
    make();
    one.call(
        uvm,
        UNREGISTER_CHANNEL,
        &words(28, &[(16, one.client), (20, CHANNEL)]),
    );
    one.free(GROUP);
    make();
    one.free(GROUP);
    assert_eq!(one.allocate(GPU, GROUP, 0xa06c, 20), NO_MEMORY);
    one.call(uvm, UNREGISTER, &words(20, &[]));
    make();
}

#[test]
fn an_imported_object_keeps_its_own_memory_only() {
    let served = serve_with(Some(LIMIT + u64::from(PIECE)));
    let one = Owner::new(&served);
    assert_eq!([take(&one, 7), take(&one, 8)], [0, 0]);
    let (file, _, end) = open(&one.socket, "/dev/nvidiactl");
    let both = [(0, file), (4, GPU), (76, 7), (80, 8), (2124, 2 | 5 << 16)];
    control(&one, EXPORT, 2128, &both);
    let second = [(0, file), (4, GPU), (8, 100), (648, 1 | 6 << 16)];
    control(&one, IMPORT, 652, &second);
    let (other, _, other_end) = open(&one.socket, "/dev/nvidiactl");
    let again = [(0, other), (4, GPU), (76, 100), (2124, 1)];
    control(&one, EXPORT, 2128, &again);
    [7, 8, 100].into_iter().for_each(|handle| one.free(handle));
    drop(end);
    take_soon(&one, 9);
    assert_eq!(take(&one, 10), NO_MEMORY, "the other file has the second");
    drop(other_end);
    take_soon(&one, 10);
}

#[test]
fn objects_that_name_each_other_keep_no_endless_chain() {
    const CHANNEL: u32 = 0xc86f;
    let served = serve_with(Some(64 << 30));
    let one = Owner::new(&served);
    assert_eq!(one.allocate(GPU, 100, CHANNEL, 368), 0);
    let mut last = 100;
    let follow = |last: u32| {
        let header = [
            (0, one.client),
            (4, GPU),
            (8, last + 1),
            (12, CHANNEL),
            (16, 1),
            (48 + 32, last),
        ];
        let answer = one.call(one.control, ALLOCATE, &words(48 + 368, &header));
        word(&answer, 40)
    };
    // Ten times what a thread's stack would have room for, if it was given back by a call for each.
    while last < 40_000 && follow(last) == 0 {
        one.free(last);
        last += 1;
    }
    one.free(last);
    assert_eq!(take(&one, 7), 0, "the worker lives");
    assert!(last < 40_000, "there is no bound");
}

#[test]
fn channel_groups_count() {
    let (_served, one, _two) = programs();
    assert_eq!(one.allocate(GPU, 50, 0xa06c, 20), NO_MEMORY);
    let served = serve_with(Some(16 << 20));
    let one = Owner::new(&served);
    assert_eq!(one.allocate(GPU, 50, 0xa06c, 20), 0);
    let groups = (51..100).take_while(|handle| one.allocate(GPU, *handle, 0xa06c, 20) == 0);
    assert_eq!(groups.count(), 6, "9 MiB for four");
}
