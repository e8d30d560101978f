//! A program that sends whatever it likes.

use std::{collections::HashMap, fs::File, os::fd::OwnedFd, thread, time::Duration};

use nvidia_abi::wire::{HEADER, Operation, Request, VERSION};
use rustix::net::SendFlags;

use super::{
    ALLOCATE, CONTROL, DOORBELL, FREE, GPU, MAP, Owner, SLICE, Served, ask, open, send, serve,
    word, words,
};

#[test]
fn a_program_that_reads_no_answers_is_disconnected() {
    let served = serve();
    let other = served.program();
    let program = served.program();
    let request = Request {
        operation: Operation::Pages,
        file: 0,
        a: 4096,
        b: 0,
        length: 0,
    };
    let mut sent = 0;
    // Nobody reads: the connection ends long before the socket is full.
    while rustix::net::send(&program, &request.to_bytes(), SendFlags::NOSIGNAL).is_ok() {
        sent += 1;
        assert!(sent < 1 << 16, "it is still connected");
    }
    open(&other, "/dev/nvidiactl");
}

#[test]
fn a_client_has_a_bounded_number_of_mappings() {
    let served = serve();
    let owner = Owner::new(&served);
    assert_eq!(owner.allocate(GPU, 7, DOORBELL, 2), 0);
    let (file, _, _end) = open(&owner.socket, "/dev/nvidia0");
    let mut first = 0;
    for round in 0..=1 << 16 {
        match owner.map(7, 4096, file) {
            (0, number) if round == 0 => first = number,
            (0, _) => {}
            (status, _) => {
                assert_eq!((round, status), (1 << 16, 0x1a));
                break;
            }
        }
        assert!(round < 1 << 16, "there is no end to them");
    }
    let unmap = [(0, owner.client), (4, GPU), (8, 7), (16, first)];
    owner.call(owner.control, 0xc020_464f, &words(32, &unmap));
    assert_eq!(owner.map(7, 4096, file).0, 0, "there is room for one again");
}

#[test]
fn a_clients_own_file_is_not_given_to_map_a_page_of_the_device() {
    let served = serve();
    let owner = Owner::new(&served);
    assert_eq!(owner.allocate(GPU, 7, DOORBELL, 2), 0);
    assert_ne!(owner.map(7, 4096, owner.control).0, 0);
    let shown = ask(&owner.socket, Operation::Map, owner.control, 0, 4096, &[]);
    let (answer, _, file) = shown.expect("it answers");
    assert!(answer.result < 0 && file.is_none());
    // Nor does a file that was given get a client.
    let (control, _, _end) = open(&owner.socket, "/dev/nvidiactl");
    assert_eq!(owner.map(7, 4096, control).0, 0);
    let root = owner.call(control, ALLOCATE, &words(48, &[(12, 0x41)]));
    assert_ne!(word(&root, 40), 0);
}

#[test]
fn what_is_no_request_ends_the_connection_only() {
    let served = serve();
    for packet in [
        &[][..],
        &[0; HEADER - 1],
        &[9; HEADER],
        &[0; HEADER],
        &[1; HEADER + 5],
    ] {
        let socket = served.connect();
        assert!(send(&socket, packet, None).is_none(), "{packet:?}");
    }
    served.program();
}

#[test]
fn nothing_is_answered_before_hello_and_no_second_hello() {
    let served = serve();
    let socket = served.connect();
    let early = ask(&socket, Operation::Pages, 0, 4096, 0, &[])
        .expect("it answers")
        .0;
    let wrong = ask(&socket, Operation::Hello, 0, 7, 0, &[])
        .expect("it answers")
        .0;
    assert_eq!(
        (early.result, wrong.result),
        (-libc::EPROTO, -libc::EPROTONOSUPPORT)
    );
    let again = ask(
        &served.program(),
        Operation::Hello,
        0,
        VERSION.into(),
        0,
        &[],
    )
    .expect("it answers")
    .0;
    assert_eq!(again.result, -libc::EPROTO);
}

#[test]
fn files_of_others_and_guessed_tokens_are_refused() {
    let served = serve();
    let (one, two) = (served.program(), served.program());
    let (file, token, _end) = open(&one, "/dev/nvidiactl");
    for number in [file, 0, file + 1, u32::MAX] {
        let call = ask(&two, Operation::Call, number, 1, 0xc008_46d6, &[0; 8])
            .expect("it answers")
            .0;
        assert_eq!(call.result, -libc::EBADF);
        let map = ask(&two, Operation::Map, number, 0, 4096, &[])
            .expect("it answers")
            .0;
        assert_eq!(map.result, -libc::EBADF);
    }
    let mut guess = token;
    guess[0] ^= 1;
    for guess in [&guess[..], &[], &[0; 16], &[0; 17]] {
        assert_eq!(
            ask(&two, Operation::Adopt, 0, 0, 0, guess)
                .expect("it answers")
                .0
                .result,
            -libc::EBADF
        );
    }
    // A socket that is nobody's device file.
    let stranger = served.connect();
    let request = Request {
        operation: Operation::Identify,
        file: 0,
        a: 0,
        b: 0,
        length: 0,
    };
    let identified = send(&two, &request.to_bytes(), Some(&stranger))
        .expect("it answers")
        .0;
    assert_eq!(identified.result, -libc::ENOTTY);
}

#[test]
fn a_slice_has_no_more_than_its_length() {
    let served = serve();
    let program = served.program();
    for length in [0, (8 << 20) + 1, u64::MAX] {
        let pages = ask(&program, Operation::Pages, 0, length, 0, &[])
            .expect("it answers")
            .0;
        assert_eq!(pages.result, -libc::ENOMEM, "{length}");
    }
    for offset in [0, 1, u64::MAX] {
        // What was not taken is not given back.
        assert_eq!(
            ask(&program, Operation::Return, 0, offset, 0, &[])
                .expect("it answers")
                .0
                .result,
            0
        );
    }
}

#[test]
fn pages_that_are_returned_while_they_are_pinned_stay_taken() {
    let served = serve();
    let owner = Owner::new(&served);
    let ask = |operation, a| {
        ask(&owner.socket, operation, 0, a, 0, &[])
            .expect("it answers")
            .0
    };
    let pages = ask(Operation::Pages, 1 << 17).a as u32 + 4096;
    let block = [
        (0, owner.client),
        (4, GPU),
        (8, 7),
        (12, 0x71),
        (16, 0x4000_1010),
        (24, pages),
        (32, 0xffff),
        (48, u32::MAX),
    ];
    let described = owner.call(owner.control, 0xc038_4627, &words(56, &block));
    assert_eq!(word(&described, 40), 0);
    for _ in 0..2 {
        assert_eq!(ask(Operation::Return, pages.into()).result, 0);
        assert!(!owner.has_whole_slice());
    }
    owner.free(7);
    assert!(owner.has_whole_slice());
}

/// A call on the owner's own objects: the file that it is for, the command, and the bytes.
fn lend(owner: &Owner, handle: u32, offset: u32, last: u32, file: &OwnedFd) -> u32 {
    let block = words(
        56,
        &[
            (0, owner.client),
            (4, GPU),
            (8, handle),
            (12, 0x71),
            (16, 0x4000_1010),
            (24, offset),
            (32, last),
            (48, u32::MAX),
        ],
    );
    let request = Request {
        operation: Operation::Call,
        file: owner.control,
        a: 1,
        b: 0xc038_4627,
        length: block.len() as u32,
    };
    let packet = [&request.to_bytes()[..], &block].concat();
    let (answer, bytes, _) = send(&owner.socket, &packet, Some(file)).expect("it answers");
    assert_eq!(answer.result, 0);
    word(&bytes, 40)
}

#[test]
fn only_shared_memory_is_lent_and_it_counts() {
    let served = serve();
    let owner = Owner::new(&served);
    let memory = |length: u64| {
        let file = tempfile::tempfile_in("/dev/shm").expect("there is room");
        file.set_len(length).expect("there is room");
        file
    };
    let file: OwnedFd = memory(2 * SLICE).into();
    let zero: OwnedFd = File::open("/dev/zero").expect("it is there").into();
    let program: OwnedFd = File::open("/proc/self/exe").expect("it is there").into();
    for (offset, last, file) in [
        (0, 0xfff, &zero),
        (0, 0xfff, &program),
        (0, 0xfff, &owner.socket),
        (2 * SLICE as u32, 0xfff, &file),
        (2 * SLICE as u32 - 0x1000, 0x1fff, &file),
    ] {
        assert_eq!(lend(&owner, 7, offset, last, file), 0x56, "{offset} {last}");
    }
    assert_eq!(lend(&owner, 7, 1, 0xfff, &file), 0x1f, "not at a page");
    let last = SLICE as u32;
    assert_eq!(lend(&owner, 7, 0, last, &file), 0x51, "more than a slice");
    assert_eq!(lend(&owner, 7, 0, last - 1, &file), 0);
    assert_eq!(lend(&owner, 8, 0, 0xfff, &file), 0x51, "nothing is left");
    owner.free(7);
    assert!(owner.has_whole_slice());
    // A file goes with descriptor memory only.
    let request = Request {
        operation: Operation::Call,
        file: owner.control,
        a: 1,
        b: ALLOCATE.into(),
        length: 48,
    };
    let block = words(48, &[(0, owner.client), (4, GPU), (8, 9), (12, 0x90e7)]);
    let packet = [&request.to_bytes()[..], &block].concat();
    let (answer, ..) = send(&owner.socket, &packet, Some(&file)).expect("it answers");
    assert_eq!(answer.result, -libc::EINVAL);
}

/// A program's connection, unless it is refused.
fn connected(served: &Served) -> Option<OwnedFd> {
    let program = served.connect();
    let hello = ask(&program, Operation::Hello, 0, VERSION.into(), 0, &[]);
    hello.map(|_| program)
}

#[test]
fn slices_of_programs_that_have_ended_are_bounded() {
    let served = serve();
    let owner = Owner::new(&served);
    let (control, token, _end) = open(&owner.socket, "/dev/nvidiactl");
    let root = owner.call(control, ALLOCATE, &words(48, &[(12, 0x41)]));
    let client = word(&root, 8);
    let (gpu, _, _gpu_end) = open(&owner.socket, "/dev/nvidia0");
    owner.call(gpu, 0xc004_46c9, &words(4, &[(0, control)]));
    // Each program leaves system memory of its slice in a client that it has adopted.
    let mut left = 0;
    while left < 1000
        && let Some(program) = connected(&served)
    {
        let adopted = ask(&program, Operation::Adopt, 0, 0, 0, &token).expect("it answers");
        let (file, handle) = (adopted.0.a as u32, 0x100 + left);
        let mut block = words(
            48 + 128,
            &[(0, client), (4, client), (8, handle), (12, 0x3e), (16, 1)],
        );
        block[48 + 64..48 + 68].copy_from_slice(&4096u32.to_le_bytes());
        let made = ask(&program, Operation::Call, file, 1, ALLOCATE.into(), &block);
        let (answer, bytes, _) = made.expect("it answers");
        assert_eq!((answer.result, word(&bytes, 40)), (0, 0));
        left += 1;
    }
    assert_eq!(left, 255, "all but that of the owner");
    // The owner is served all the time, and others are once an object is gone.
    let free = words(16, &[(0, client), (4, client), (8, 0x100)]);
    assert_eq!(word(&owner.call(control, FREE, &free), 12), 0);
    let wait = || {
        thread::sleep(Duration::from_millis(10));
        connected(&served).is_some()
    };
    assert!((0..6000).any(|_| wait()));
}

fn own_call(random: &mut fastrand::Rng, owner: &Owner, target: u32) -> (u32, u32, Vec<u8>) {
    let mut handle = || 0x100 + random.u32(..16);
    let (parent, handle) = (handle(), handle());
    let parent = *random.choice(&[owner.client, GPU, parent]).expect("some");
    let names = [(0, owner.client), (4, parent), (8, handle)];
    let block =
        |length: usize, further: &[(usize, u32)]| words(length, &[&names[..], further].concat());
    match random.u32(..5) {
        0 | 1 => {
            let classes = [
                (0x3e, 128),
                (0x40, 128),
                (0x80, 56),
                (0x2080, 4),
                (0x90f1, 56),
                (0xa06c, 20),
                (DOORBELL, 2),
                (0xc86f, 368),
            ];
            let (class, size) = *random.choice(&classes).expect("some");
            let mut block = block(48 + size, &[(12, class), (16, 1)]);
            if size == 128 {
                // Where memory has its length.
                block[48 + 64..48 + 68].copy_from_slice(&random.u32(1..1 << 18).to_le_bytes());
            }
            (owner.control, ALLOCATE, block)
        }
        2 => (owner.control, FREE, block(16, &[])),
        3 => {
            let length = random.u32(1..0x3000);
            (owner.control, MAP, block(56, &[(24, length), (48, target)]))
        }
        _ => {
            let share = [(8, 0xd04), (16, 1), (24, 12), (40, random.u32(..8))];
            (owner.control, CONTROL, block(32 + 12, &share))
        }
    }
}

#[test]
fn random_calls_neither_panic_nor_reach_other_programs() {
    let served = serve();
    let victim = Owner::new(&served);
    let client = victim.client.to_le_bytes();
    let owner = Owner::new(&served);
    let (target, _, _target_end) = open(&owner.socket, "/dev/nvidia0");
    let commands: Vec<u32> = nvidia_abi::Branch::R580.commands().collect();
    let classes = [
        0, 1, 0x3e, 0x40, 0x41, 0x71, 0x79, 0x80, 0x2080, 0xa06c, 0xc661, 0xc86f,
    ];
    let controls = [
        0x101,
        0xd01,
        0xd04,
        0x3d0b,
        0x3d0c,
        0x0080_170d,
        0x2080_1201,
        0x2080_018d,
        0x503c_0104,
    ];
    let mut random = fastrand::Rng::with_seed(580);
    let program = &owner.socket;
    let mut ends = Vec::new();
    // How many calls on own objects succeeded, by command.
    let mut done = HashMap::new();
    for round in 0..20_000 {
        if round % 2 == 0 {
            let (file, command, mut bytes) = own_call(&mut random, &owner, target);
            if random.bool() {
                let at = random.usize(..bytes.len());
                bytes[at] = random.u8(..);
            }
            let (answer, bytes, _) = ask(program, Operation::Call, file, 1, command.into(), &bytes)
                .expect("the connection lives");
            let status_at = match command {
                FREE => 12,
                CONTROL => 28,
                _ => 40,
            };
            if answer.result == 0 && word(&bytes, status_at) == 0 {
                *done.entry(command).or_insert(0) += 1;
            }
            continue;
        }
        if round % 200 == 1 {
            let path = *random
                .choice(&["/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia-uvm"])
                .expect("some");
            ends.push(open(program, path));
        }
        let command = *random.choice(&commands).expect("some");
        let length = match random.u32(..4) {
            0 => random.usize(..400),
            _ => (command >> 16 & 0x3fff) as usize + random.usize(..3) * random.usize(..2400),
        };
        let mut bytes: Vec<u8> = (0..length)
            .map(|_| if random.bool() { 0 } else { random.u8(..) })
            .collect();
        if length >= 4 && random.bool() {
            bytes[..4].copy_from_slice(&client);
        }
        if command & 0xff == 0x2b && length >= 48 {
            let class = *random.choice(&classes).expect("some");
            bytes[12..16].copy_from_slice(&u32::to_le_bytes(class));
            bytes[24..40].fill(0);
        }
        if command & 0xff == 0x2a && length >= 32 {
            let control = *random.choice(&controls).expect("some");
            bytes[8..12].copy_from_slice(&u32::to_le_bytes(control));
            bytes[12..16].fill(0);
            bytes[24..28].copy_from_slice(&(length as u32 - 32).to_le_bytes());
        }
        let operation = *random
            .choice(&[Operation::Call, Operation::Map, Operation::Pages])
            .expect("some");
        let argument = random.u64(..0x2000);
        let answer = ask(
            program,
            operation,
            random.u32(..200),
            argument,
            command.into(),
            &bytes,
        );
        assert!(answer.is_some(), "the connection lives: round {round}");
    }
    for command in [ALLOCATE, FREE, MAP, CONTROL] {
        let done = done.get(&command).copied().unwrap_or_default();
        assert!(done > 100, "{command:x}: {done}");
    }
    let state = served.device.0.lock().expect("no call has panicked");
    assert!(
        state
            .share_types
            .iter()
            .all(|share_type| [0, 4].contains(share_type))
    );
    let of_victim = state.objects.keys().filter(|(of, _)| *of == victim.client);
    assert_eq!(
        of_victim.count(),
        2,
        "nothing was added to the other program's client"
    );
    drop(state);
    served.program();
}
