//! Memory that the driver would map, and that the worker takes from the slice instead.

use std::os::unix::fs::{FileExt, MetadataExt};

use nvidia_abi::wire::{MANAGED, Operation};

use super::{ALLOCATE, GPU, MAP, Owner, SLICE, Served, ask, open, serve, word, words};

const SECOND_GPU: u32 = GPU + 1;
const SPACE: u32 = 0x5c00_0010;
const BASE: u64 = 0x2_0000_0000;
const REGISTER: u32 = 0x19;
const UNREGISTER: u32 = 0x1a;
const FREE_RANGE: u32 = 0x22;
const POOL: u32 = 0x44;
const CREATE_RANGE: u32 = 0x49;
const MAP_EXTERNAL: u32 = 0x21;

/// A program with a file of unified memory and the address spaces of two GPUs.
struct Program {
    owner: Owner,
    uvm: u32,
    _end: std::os::fd::OwnedFd,
}

impl Program {
    fn new(served: &Served) -> Self {
        let owner = Owner::new(served);
        let (uvm, _, end) = open(&owner.socket, "/dev/nvidia-uvm");
        assert_eq!(owner.allocate(owner.client, SECOND_GPU, 0x80, 56), 0);
        for (gpu, space) in [(GPU, SPACE), (SECOND_GPU, SPACE + 1)] {
            assert_eq!(owner.allocate(gpu, space, 0x90f1, 56), 0);
        }
        Self {
            owner,
            uvm,
            _end: end,
        }
    }

    /// Registers the address space of a GPU, the first or the second. Answers the status.
    fn register(&self, gpu: u32) -> u32 {
        let block = [
            (0, gpu),
            (16, self.owner.control),
            (20, self.owner.client),
            (24, SPACE + gpu),
        ];
        word(&self.owner.call(self.uvm, REGISTER, &words(32, &block)), 28)
    }

    fn unregister(&self, gpu: u32) -> u32 {
        word(
            &self
                .owner
                .call(self.uvm, UNREGISTER, &words(20, &[(0, gpu)])),
            16,
        )
    }

    fn range(length: usize, bytes: u64) -> Vec<u8> {
        let mut block = vec![0; length];
        block[..8].copy_from_slice(&BASE.to_le_bytes());
        block[8..16].copy_from_slice(&bytes.to_le_bytes());
        block
    }

    /// Makes a semaphore pool. Answers the result of the call and the status.
    fn pool(&self, bytes: u64) -> (i32, u32) {
        let block = Self::range(9248, bytes);
        let asked = ask(
            &self.owner.socket,
            Operation::Call,
            self.uvm,
            1,
            POOL.into(),
            &block,
        );
        let (answer, bytes, _) = asked.expect("it answers");
        let status = if answer.result == 0 {
            word(&bytes, 9240)
        } else {
            0
        };
        (answer.result, status)
    }
}

/// GPUs that map the range, with what contains the memory that they map.
fn mapped(served: &Served) -> Vec<(u8, u32)> {
    let state = served.device.0.lock().expect("no call has panicked");
    let mapped = state.mapped.iter();
    let is_there =
        |(_, _, memory): &&(u64, [u8; 16], (u32, u32))| state.objects.contains_key(memory);
    mapped
        .filter(is_there)
        .map(|(base, gpu, memory)| {
            assert_eq!(*base, BASE);
            (gpu[0], state.parents[memory])
        })
        .collect()
}

#[test]
fn each_gpu_maps_a_pool_while_it_is_registered() {
    let served = serve();
    let program = Program::new(&served);
    assert_eq!(program.pool(1 << 16), (0, 0x56), "nothing is registered");
    assert_eq!(program.register(0), 0);
    assert_eq!(program.pool(1 << 16), (0, 0));
    assert_eq!(mapped(&served), [(0, GPU)]);
    assert_eq!(program.register(1), 0);
    assert_eq!(mapped(&served), [(0, GPU), (1, SECOND_GPU)]);
    assert_eq!(program.unregister(0), 0);
    assert_eq!(mapped(&served), [(1, SECOND_GPU)], "the other one keeps it");
    assert!(!program.owner.has_whole_slice());
    let freed = program
        .owner
        .call(program.uvm, FREE_RANGE, &Program::range(24, 1 << 16));
    assert_eq!(word(&freed, 16), 0);
    assert_eq!(mapped(&served), []);
    assert!(program.owner.has_whole_slice());
}

#[test]
fn managed_memory_stays_where_it_is_and_a_migration_is_over_at_once() {
    const MANAGED_AT: u64 = BASE + (1 << 30);
    const MIGRATE: u32 = 0x33;
    let served = serve();
    let program = Program::new(&served);
    let map = |at: u64| {
        let asked = ask(
            &program.owner.socket,
            Operation::Map,
            program.uvm,
            at,
            1 << 16,
            &[],
        );
        asked.expect("it answers").0
    };
    assert_eq!(
        map(MANAGED_AT).result,
        -libc::ENOMEM,
        "no GPU is registered"
    );
    assert_eq!((program.register(0), program.pool(1 << 16)), (0, (0, 0)));
    let managed = map(MANAGED_AT);
    assert_eq!((managed.result, managed.a), (0, MANAGED));
    assert_eq!(map(MANAGED_AT).result, -libc::EINVAL, "it is in use");
    assert_eq!(map(MANAGED_AT + 1).result, -libc::EINVAL);
    let pool = map(BASE);
    assert_eq!((pool.result, pool.a), (0, nvidia_abi::wire::SLICE));
    // Migrates a range, and asks for a word to be written when that is done.
    let migrate = |at: u64, semaphore: u64| {
        let mut block = vec![0; 80];
        for (place, value) in [(0, at), (8, 4096), (40, semaphore)] {
            block[place..place + 8].copy_from_slice(&value.to_le_bytes());
        }
        block[48..52].copy_from_slice(&0x1234u32.to_le_bytes());
        word(&program.owner.call(program.uvm, MIGRATE, &block), 72)
    };
    let done = || {
        let mut word = [0; 4];
        let slice = std::fs::File::from(program.owner.slice.try_clone().expect("there is room"));
        slice
            .read_exact_at(&mut word, pool.b + 64)
            .expect("it is as long");
        u32::from_le_bytes(word)
    };
    assert_eq!(migrate(MANAGED_AT, 0), 0);
    for (at, semaphore) in [
        (BASE, 0),
        (0x1000, 0),
        (MANAGED_AT + (1 << 16), 0),
        (u64::MAX, 0),
        (MANAGED_AT, MANAGED_AT),
        (MANAGED_AT, BASE + 62),
        (MANAGED_AT, BASE + (1 << 16)),
        (MANAGED_AT, u64::MAX - 3),
    ] {
        assert_eq!(migrate(at, semaphore), 0x1e, "{at:x} {semaphore:x}");
    }
    assert_eq!(done(), 0);
    assert_eq!(migrate(MANAGED_AT, BASE + 64), 0);
    assert_eq!(done(), 0x1234);
    let state = served.device.0.lock().expect("no call has panicked");
    let mut commands = state.ranges.iter().map(|(command, _)| *command);
    assert!(
        commands.all(|command| command != MIGRATE),
        "the driver is not asked"
    );
}

#[test]
fn pages_of_a_closed_file_stay_taken_while_gpus_have_them() {
    let served = serve();
    let program = Program::new(&served);
    assert_eq!((program.register(0), program.pool(1 << 16)), (0, (0, 0)));
    let Program {
        owner,
        uvm,
        _end: end,
    } = program;
    drop(end);
    let wait_for = |is_over: &dyn Fn() -> bool| {
        let begin = std::time::Instant::now();
        while !is_over() {
            assert!(begin.elapsed().as_secs() < 300, "it hangs");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    };
    wait_for(&|| {
        let map = ask(&owner.socket, Operation::Map, uvm, 1, 4096, &[]);
        map.expect("it answers").0.result == -libc::EBADF
    });
    assert_eq!(mapped(&served), [(0, GPU)]);
    assert!(!owner.has_whole_slice());
    owner.free(owner.client);
    assert_eq!(mapped(&served), []);
    wait_for(&|| owner.has_whole_slice());
}

#[test]
fn a_pool_that_cannot_be_mapped_leaves_nothing() {
    let served = serve();
    let program = Program::new(&served);
    assert_eq!((program.register(0), program.register(1)), (0, 0));
    for command in [0xc038_4627, CREATE_RANGE, MAP_EXTERNAL] {
        let failing = |error: Option<i32>| {
            let mut state = served.device.0.lock().expect("no call has panicked");
            match error {
                Some(error) => drop(state.failing.insert(command, error)),
                None => state.failing.clear(),
            }
        };
        failing(Some(libc::EIO));
        assert_eq!(program.pool(1 << 16), (-libc::EIO, 0), "{command:x}");
        failing(None);
        let state = served.device.0.lock().expect("no call has panicked");
        assert!(
            state.objects.values().all(|class| *class != 0x71),
            "{command:x}"
        );
        drop(state);
        assert!(program.owner.has_whole_slice(), "{command:x}");
    }
    assert_eq!(program.pool(1 << 16), (0, 0));
}

#[test]
fn a_gpu_that_cannot_map_the_pools_is_not_registered() {
    let served = serve();
    let program = Program::new(&served);
    assert_eq!(program.register(0), 0);
    assert_eq!(program.pool(1 << 16), (0, 0));
    let state = || served.device.0.lock().expect("no call has panicked");
    state().failing.insert(MAP_EXTERNAL, libc::EIO);
    let block = [
        (0, 1),
        (16, program.owner.control),
        (20, program.owner.client),
        (24, SPACE + 1),
    ];
    let asked = ask(
        &program.owner.socket,
        Operation::Call,
        program.uvm,
        1,
        REGISTER.into(),
        &words(32, &block),
    );
    assert_eq!(asked.expect("it answers").0.result, -libc::EIO);
    assert_eq!(state().ranges.last(), Some(&(UNREGISTER, 1)));
    state().failing.clear();
    assert_eq!(mapped(&served), [(0, GPU)]);
    assert_eq!(program.register(1), 0);
    assert_eq!(mapped(&served), [(0, GPU), (1, SECOND_GPU)]);
}

#[test]
fn an_address_space_that_is_unregistered_makes_room() {
    let served = serve();
    let program = Program::new(&served);
    for round in 0..100 {
        assert_eq!(program.register(0), 0, "round {round}");
        assert_eq!(program.unregister(0), 0);
    }
    for round in 0..100 {
        assert_eq!(program.register(0), 0, "the same GPU again: round {round}");
    }
}

#[test]
fn video_memory_that_the_slice_has_no_room_for_stays() {
    let served = serve();
    let owner = Owner::new(&served);
    let (file, _, _end) = open(&owner.socket, "/dev/nvidia0");
    let allocate = |handle: u32, size: u64| {
        let header = [
            (0, owner.client),
            (4, GPU),
            (8, handle),
            (12, 0x40),
            (16, 1),
        ];
        let mut block = words(48 + 128, &header);
        block[48 + 64..48 + 72].copy_from_slice(&size.to_le_bytes());
        assert_eq!(word(&owner.call(owner.control, ALLOCATE, &block), 40), 0);
    };
    let class = |handle: u32| {
        let state = served.device.0.lock().expect("no call has panicked");
        state.objects.get(&(owner.client, handle)).copied()
    };
    allocate(7, 2 * SLICE);
    assert_eq!(owner.map(7, 4096, file).0, 0x51);
    assert_eq!(class(7), Some(0x40));
    allocate(8, SLICE);
    let map = [(0, owner.client), (4, GPU), (8, 8), (24, 4096), (48, file)];
    let failing = |fails: bool| {
        let mut state = served.device.0.lock().expect("no call has panicked");
        state.failing.clear();
        if fails {
            state.failing.insert(0xc010_4629, libc::EIO);
        }
    };
    failing(true);
    let asked = ask(
        &owner.socket,
        Operation::Call,
        owner.control,
        1,
        MAP.into(),
        &words(56, &map),
    );
    assert_eq!(asked.expect("it answers").0.result, -libc::EIO);
    failing(false);
    assert_eq!(class(8), Some(0x40));
    assert_eq!(owner.map(8, 4096, file).0, 0, "its pages were given back");
}

#[test]
fn a_context_finds_pages_that_were_touched_ahead() {
    let served = serve();
    let owner = Owner::new(&served);
    let slice = std::fs::File::from(owner.slice.try_clone().expect("there is room"));
    let committed = || slice.metadata().expect("it is a file").blocks() * 512;
    assert_eq!(committed(), 0, "no context so far");
    assert_eq!(owner.allocate(GPU, SPACE, 0x90f1, 56), 0);
    let begin = std::time::Instant::now();
    while committed() < SLICE {
        assert!(begin.elapsed().as_secs() < 300, "{}", committed());
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}
