//! Tests the GPU as a driver uses it, with a driver of a few lines.

use std::sync::Arc;

use proptest::prelude::*;

use super::{
    bars::WINDOW_START,
    gpu::{Delays, Gpu, Next},
    mapping::{Mapping, memory_file},
};
use crate::{
    format::{
        Aperture, Gfn, PAGE, Target, VramPage,
        directory::{Pde, Table},
        instance::{self, InstanceBlock, Space},
        instruction::{Instruction, Operation, vector_add},
        pte::Pte,
        push::{GpEntry, Header, Run},
        ramfc::{self, Ramfc},
        userd,
    },
    registers::{Bar, ROOM, TRANSLATED, TRANSLATIONS},
};

const VRAM: u64 = 16 << 20;

/// The driver's layout of VRAM.
const DIRECTORY: u64 = 0x10_0000;
const TABLE: u64 = 0x12_0000;
const INSTANCE: u64 = 0x20_0000;
const USERD: u64 = 0x21_0000;
const RUN_LIST: u64 = 0x22_0000;
/// Virtual addresses of the ring, the push buffers and the data. They equal the addresses in VRAM.
const RING: u64 = 0x30_0000;
const PUSH: u64 = 0x31_0000;
const DATA: u64 = 0x40_0000;
/// Virtual address of the one page of system memory.
const RAM: u64 = 0x60_0000;
/// Its address in system memory.
const RAM_AT: u64 = 0x1234_5000;

/// A GPU with one channel, number 5.
struct Driver {
    gpu: Gpu,
    put: u32,
    now: u64,
}

impl Driver {
    fn new(map: bool) -> Self {
        let gpu = Gpu::new(VRAM, map, Delays::default(), 0).expect("there is room");
        let mut driver = Self {
            gpu,
            put: 0,
            now: 0,
        };
        let table = |number: u64| Table {
            aperture: Aperture::Vram,
            number: (number / PAGE) as u32,
        };
        let entry = Pde {
            small: Some(table(TABLE)),
            ..Pde::default()
        };
        driver.set(DIRECTORY, &entry.encode().to_le_bytes());
        for page in 0..VRAM / PAGE {
            driver.page(page, Target::Vram(VramPage(page as u32)), false);
        }
        driver.page(RAM / PAGE, Target::Ram(Gfn((RAM_AT / PAGE) as u32)), false);
        let mut block = [0; instance::BYTES];
        let space = Space {
            aperture: Aperture::Vram,
            number: (DIRECTORY / PAGE) as u32,
            limit: (1 << 40) - 1,
        };
        InstanceBlock {
            space,
            engines: [None; 7],
        }
        .encode(&mut block);
        let mut head = [0; ramfc::BYTES];
        Ramfc {
            userd: USERD + 5 * userd::STRIDE,
            signature: ramfc::SIGNATURE,
            gp_base: RING,
            gp_log2: 4,
            ..Ramfc::default()
        }
        .encode(&mut head);
        block[..ramfc::BYTES].copy_from_slice(&head);
        driver.set(INSTANCE, &block);
        driver.set(RUN_LIST, &5_u32.to_le_bytes());
        let writes = [
            (0x00_0140, 1),
            (0x00_2140, 0x7fff_ffff),
            (0x04_010c, u32::MAX),
            // Both BARs show the same address space.
            (0x00_1704, 1 << 31 | (INSTANCE / PAGE) as u32),
            (0x00_1714, 1 << 31 | (INSTANCE / PAGE) as u32),
            (0x00_2254, 1 << 28 | (USERD / PAGE) as u32),
            (0x00_3028, 3 << 30 | (INSTANCE / PAGE) as u32),
            (0x00_302c, 0x1f_0001),
            (0x00_2270, (RUN_LIST / PAGE) as u32),
        ];
        for (at, value) in writes {
            driver.write(at, value);
        }
        driver.list(1);
        driver
    }

    /// Sets the run list, with this number of channels, and waits until it has taken effect.
    fn list(&mut self, count: u32) {
        self.write(0x00_2274, 0x1f0_0000 | count);
        while self.read(0x00_227c) & 1 << 20 != 0 {
            self.now += 1000;
        }
        self.write(0x00_2a00, 1 << 28);
    }

    fn page(&mut self, page: u64, target: Target, read_only: bool) {
        let entry = Pte {
            read_only,
            ..Pte::linear(target)
        };
        self.set(TABLE + page * 8, &entry.encode().to_le_bytes());
    }

    fn set(&mut self, at: u64, data: &[u8]) {
        assert!(self.gpu.write_vram(at, data));
    }

    fn word(&self, at: u64) -> u32 {
        let mut bytes = [0; 4];
        assert!(self.gpu.read_vram(at, &mut bytes));
        u32::from_le_bytes(bytes)
    }

    fn write(&mut self, at: u32, value: u32) {
        self.gpu.write_register(at, value, self.now);
    }

    fn read(&mut self, at: u32) -> u32 {
        self.gpu.read_register(at, self.now)
    }

    /// Requests a flush of this type, of the driver's address space.
    fn flush(&mut self, what: u32) {
        self.write(0x10_0cb8, ((DIRECTORY / PAGE) << 4) as u32);
        self.write(0x10_0cbc, 1 << 31 | what);
    }

    /// Waits for all flushes.
    fn flushed(&mut self) {
        while self.read(TRANSLATIONS) & TRANSLATED == 0 {
            self.now += 1000;
        }
    }

    /// Submits words without running the GPU.
    fn submit(&mut self, words: &[u32]) {
        let at = PUSH + u64::from(self.put) * 0x1000;
        for (index, word) in words.iter().enumerate() {
            self.set(at + index as u64 * 4, &word.to_le_bytes());
        }
        let entry = GpEntry {
            address: at,
            words: words.len() as u32,
        };
        self.set(
            RING + u64::from(self.put) * 8,
            &entry.encode().to_le_bytes(),
        );
        self.put = (self.put + 1) % 16;
        self.ring();
    }

    fn ring(&mut self) {
        let at = USERD + 5 * userd::STRIDE + userd::GP_PUT;
        assert!(
            self.gpu
                .write_bar(Bar::One, at, &self.put.to_le_bytes(), self.now)
        );
    }

    /// Runs the GPU until it has no immediate work, for at most this number of slices.
    fn work(&mut self, slices: u32) -> Next {
        for _ in 0..slices {
            self.now += 1000;
            match self.gpu.work(self.now) {
                Next::Now => {}
                next => return next,
            }
        }
        Next::Now
    }
}

fn run(subchannel: u8, address: u16, words: &[u32]) -> Vec<u32> {
    let run = Run {
        subchannel,
        address,
        count: words.len() as u16,
    };
    let mut all = vec![Header::Increasing(run).encode()];
    all.extend(words);
    all
}

fn copy(from: u64, to: u64, line: u32, lines: u32) -> Vec<u32> {
    let mut words = run(4, 0, &[0x90b5]);
    let high = |at: u64| (at >> 32) as u32;
    words.extend(run(
        4,
        0x30c,
        &[
            high(from),
            from as u32,
            high(to),
            to as u32,
            line,
            line,
            line,
            lines,
        ],
    ));
    words.extend(run(4, 0x300, &[0x110]));
    words
}

fn semaphore(at: u64, word: u32, operation: u32) -> Vec<u32> {
    run(0, 0x10, &[(at >> 32) as u32, at as u32, word, operation])
}

#[test]
fn a_copy_reaches_both_memories_and_tells_how_far_it_has_come() {
    let mut driver = Driver::new(false);
    let file = memory_file(c"ram", PAGE).expect("there is room");
    let ram = Mapping::new(&file, 0, PAGE).expect("it has that much");
    driver
        .gpu
        .ram()
        .lend(RAM_AT, &file, 0, PAGE)
        .expect("it has that much");
    ram.write(0, &[7; 64]);
    let mut words = copy(RAM, DATA + 0xfe0, 64, 1);
    words.extend(semaphore(DATA + 0x3000, 0x55, 2));
    words.extend(run(0, 0x20, &[0]));
    words.extend(run(0, 0x50, &[0x77]));
    driver.submit(&words);
    assert_eq!(driver.work(10), Next::Never);
    assert_eq!(driver.word(DATA + 0xfe0), 0x0707_0707);
    assert_eq!(driver.word(DATA + 0x101c), 0x0707_0707);
    assert_eq!(driver.word(DATA + 0x3000), 0x55);
    let page = USERD + 5 * userd::STRIDE;
    assert_eq!(driver.word(page + userd::GP_GET), 1);
    assert_eq!(
        driver.word(page + userd::GET),
        (PUSH as u32) + words.len() as u32 * 4
    );
    assert_eq!(driver.word(page + userd::REFERENCE), 0x77);
    // The non-stall interrupt.
    driver.write(0x00_2140, u32::MAX);
    assert_eq!(driver.read(0x00_25a4), 1);
    assert!(driver.gpu.line(driver.now));
    driver.write(0x00_25a8, 1);
    assert!(!driver.gpu.line(driver.now));
}

#[test]
fn a_channel_waits_for_its_semaphore() {
    let mut driver = Driver::new(false);
    let mut words = semaphore(DATA, 5, 4);
    words.extend(semaphore(DATA + 0x100, 1, 2 | 1 << 24));
    driver.submit(&words);
    assert!(matches!(driver.work(10), Next::At(_)));
    assert_eq!(driver.word(DATA + 0x100), 0);
    driver.set(DATA, &6_u32.to_le_bytes());
    assert_eq!(driver.work(10), Next::Never);
    assert_eq!(driver.word(DATA + 0x100), 1);
}

#[test]
fn a_bad_address_ends_the_channel_and_says_where() {
    let mut driver = Driver::new(false);
    driver.page(DATA / PAGE, Target::Vram(VramPage(0x400)), true);
    driver.submit(&copy(PUSH, DATA, 16, 1));
    assert_eq!(driver.work(10), Next::Never);
    assert_eq!(driver.read(0x00_259c), 1 << 0x15);
    let [instance, low, kind] = [0, 4, 12].map(|at| driver.read(0x00_2950 + at));
    assert_eq!((instance, low), ((INSTANCE / PAGE) as u32, DATA as u32));
    // The fault is a write to a read-only page.
    assert_eq!(kind & 0x8f, 0x86);
    // The channel stays stopped until its entry names another instance.
    driver.submit(&semaphore(DATA + 0x1000, 1, 2));
    assert_eq!(driver.work(10), Next::Never);
    assert_eq!(driver.word(DATA + 0x1000), 0);
}

#[test]
fn a_bad_method_stops_the_channel_until_it_is_seen() {
    let mut driver = Driver::new(false);
    let mut words = run(4, 0, &[0x90b5]);
    words.extend(run(4, 0x250, &[1]));
    words.extend(semaphore(DATA, 1, 2));
    driver.submit(&words);
    assert_eq!(driver.work(10), Next::Never);
    assert_eq!(driver.read(0x00_25a0), 1);
    assert_eq!(driver.read(0x04_00c0), 4 << 16 | 0x250);
    assert_eq!(driver.read(0x04_0120), 5);
    assert_eq!(driver.word(DATA), 0);
    driver.write(0x04_0108, u32::MAX);
    assert_eq!(driver.work(10), Next::Never);
    assert_eq!(driver.word(DATA), 1);
}

/// Copies this number of lines of 64 KiB onto the same page, over and over.
fn long_copy(lines: u32) -> Vec<u32> {
    let mut words = copy(DATA, DATA + 0x1000, 0xffff, lines);
    // The pitches.
    words[7] = 0;
    words[8] = 0;
    words
}

const KICKED: u32 = 5;
const KICKING: u32 = 5 | 1 << 20;

#[test]
fn a_kick_takes_effect_at_the_end_of_the_command() {
    let mut driver = Driver::new(false);
    let mut words = long_copy(32);
    words.extend(semaphore(DATA + 0x3000, 1, 2));
    driver.submit(&words);
    assert_eq!(driver.work(3), Next::Now);
    assert_eq!(driver.read(0x00_2650), 1 << 31 | 5, "the engine's channel");
    driver.write(0x00_302c, 0x1f_0000);
    driver.write(0x00_2634, 5);
    assert_eq!(driver.read(0x00_2634), KICKING, "inside the copy");
    assert_eq!(driver.work(3), Next::Now);
    assert_eq!(driver.read(0x00_2634), KICKING);
    assert_eq!(driver.work(100), Next::Never);
    assert_eq!(driver.read(0x00_2634), KICKED);
    assert_eq!(driver.word(DATA + 0x3000), 0, "behind the copy");
    driver.write(0x00_302c, 0x1f_0001);
    assert_eq!(driver.work(100), Next::Never);
    assert_eq!(driver.word(DATA + 0x3000), 1);
}

#[test]
fn a_channel_removed_inside_a_command_writes_on() {
    let mut driver = Driver::new(false);
    driver.submit(&long_copy(32));
    assert_eq!(driver.work(3), Next::Now);
    driver.write(0x00_302c, 0x1f_0000);
    driver.write(0x00_3028, 0);
    driver.set(DATA, &[7; 4]);
    assert_eq!(driver.work(100), Next::Never);
    assert_eq!(driver.word(DATA + 0x1000), 0x0707_0707);
}

#[test]
fn a_reset_of_its_engine_ends_a_channels_command() {
    let mut driver = Driver::new(false);
    driver.submit(&long_copy(0x1fff));
    assert_eq!(driver.work(3), Next::Now);
    driver.write(0x00_2634, 5);
    // The other engines, and then its own.
    for (on, kick) in [(1 << 6, KICKING), (1 << 7 | 1 << 12, KICKED)] {
        driver.write(0x00_0200, on);
        assert_eq!(driver.read(0x00_2634), kick);
    }
    assert_eq!(driver.work(3), Next::Never);
}

#[test]
fn a_channel_that_leaves_the_table_goes_on_at_another_number() {
    let mut driver = Driver::new(false);
    // Binds an object, and waits for a semaphore with more words queued behind it.
    let mut words = run(4, 0, &[0x90b5]);
    words.extend(semaphore(DATA, 5, 4));
    words.extend(&copy(PUSH, DATA + 0x1000, 16, 1)[2..]);
    driver.submit(&words);
    assert!(matches!(driver.work(10), Next::At(_)));
    let leaves = |driver: &mut Driver, number: u32| {
        driver.write(0x00_3004 + number * 8, 0x1f_0000);
        driver.write(0x00_2634, number);
        driver.write(0x00_3000 + number * 8, 0);
    };
    let enters = |driver: &mut Driver, number: u32| {
        driver.set(RUN_LIST, &number.to_le_bytes());
        driver.write(0x00_3000 + number * 8, 3 << 30 | (INSTANCE / PAGE) as u32);
        driver.write(0x00_3004 + number * 8, 0x1f_0001);
        driver.list(1);
    };
    leaves(&mut driver, 5);
    driver.set(DATA, &6_u32.to_le_bytes());
    assert_eq!(driver.work(10), Next::Never);
    enters(&mut driver, 9);
    assert_eq!(driver.work(10), Next::Never);
    assert_eq!(driver.word(DATA + 0x1000), driver.word(PUSH));
    assert_ne!(driver.word(PUSH), 0);
    // A cleared block belongs to a new channel, whatever was there before.
    leaves(&mut driver, 9);
    driver.set(INSTANCE + 0xc0, &[0; 8]);
    enters(&mut driver, 5);
    driver.submit(&run(4, 0x300, &[0x110]));
    assert_eq!(driver.work(10), Next::Never);
    assert_eq!(driver.read(0x00_25a0), 1, "no object is bound");
}

#[test]
fn a_kicked_channel_is_in_its_instance_block_and_goes_on_from_there() {
    let mut driver = Driver::new(false);
    driver.submit(&semaphore(DATA, 1, 2));
    assert_eq!(driver.work(10), Next::Never);
    driver.write(0x00_2634, 5);
    let mut head = [0; ramfc::BYTES];
    assert!(driver.gpu.read_vram(INSTANCE, &mut head));
    let mut state = Ramfc::parse(&head);
    assert_eq!((state.gp_get, state.gp_put), (1, 1));
    assert_eq!(state.get, PUSH + 5 * 4);
    // Invalid pointers are masked to the size of the ring.
    state.gp_get = 0x11;
    state.gp_put = 0x8000_0001;
    state.encode(&mut head);
    driver.set(INSTANCE, &head);
    driver.submit(&semaphore(DATA, 2, 2));
    assert_eq!(driver.work(10), Next::Never);
    assert_eq!(driver.word(DATA), 2);
}

#[test]
fn a_put_behind_the_ring_is_an_error() {
    let mut driver = Driver::new(false);
    driver.put = 16;
    driver.ring();
    assert_eq!(driver.work(10), Next::Never);
    assert_eq!(driver.read(0x00_25a0), 1);
}

#[test]
fn files_show_what_the_window_and_bar_3_do() {
    let mut driver = Driver::new(true);
    let file = driver
        .gpu
        .bar3_file()
        .expect("it is mapped")
        .try_clone()
        .expect("a duplicate");
    let bar3 = Mapping::new(&file, 0, VRAM).expect("it is longer");
    let file = driver
        .gpu
        .window_file()
        .expect("it is mapped")
        .try_clone()
        .expect("a duplicate");
    let window = Mapping::new(&file, WINDOW_START, 1 << 20).expect("it is that long");
    // The BAR shows the memory itself, in both directions.
    bar3.write(DATA + 8, &[9; 4]);
    assert_eq!(driver.word(DATA + 8), 0x0909_0909);
    driver.set(DATA + 12, &[8; 4]);
    let mut seen = [0; 4];
    bar3.read(DATA + 12, &mut seen);
    assert_eq!(seen, [8; 4]);
    // Once the BAR shows nothing, the window shows the page.
    driver.write(0x00_1714, 0);
    driver.write(0x00_1700, (DATA >> 16) as u32);
    window.read(12, &mut seen);
    assert_eq!(seen, [8; 4]);
    window.write(16, &[5; 4]);
    assert_eq!(driver.word(DATA + 16), 0x0505_0505);
    // The window moves away, and the bytes stay.
    driver.write(0x00_1700, 0);
    assert_eq!(driver.word(DATA + 16), 0x0505_0505);
    assert_eq!(driver.word(DATA + 8), 0x0909_0909);
    // After a flush, the page is shown elsewhere in the BAR.
    driver.write(0x00_1714, 1 << 31 | (INSTANCE / PAGE) as u32);
    driver.page(3, Target::Vram(VramPage((DATA / PAGE) as u32)), false);
    driver.page(DATA / PAGE, Target::Vram(VramPage(3)), false);
    driver.flush(5);
    bar3.read(3 * PAGE + 8, &mut seen);
    assert_ne!(seen, [9; 4], "not yet");
    driver.flushed();
    bar3.read(3 * PAGE + 8, &mut seen);
    assert_eq!(seen, [9; 4]);
    bar3.write(DATA, &[3; 4]);
    assert_eq!(driver.word(3 * PAGE), 0x0303_0303);
}

#[test]
fn an_old_page_is_used_until_a_flush_of_its_space_has_finished() {
    let mut driver = Driver::new(false);
    let (page, elsewhere) = (DATA / PAGE, DATA + 0x8000);
    // Each time, the word at `DATA` is written.
    let mut next = 0;
    let mut written = |driver: &mut Driver| {
        next += 1;
        driver.submit(&semaphore(DATA, next, 2 | 1 << 24));
        assert_eq!(driver.work(3), Next::Never);
        (driver.word(DATA) == next, driver.word(elsewhere) == next)
    };
    let (old, new) = ((true, false), (false, true));
    assert_eq!(written(&mut driver), old);
    let target = Target::Vram(VramPage((elsewhere / PAGE) as u32));
    driver.page(page, target, false);
    assert_eq!(written(&mut driver), old, "without a flush");
    driver.flush(5);
    driver.flushed();
    assert_eq!(written(&mut driver), old, "the flush was for BARs only");
    driver.write(0x10_0cb8, 0x7777 << 4);
    driver.write(0x10_0cbc, 1 << 31 | 1);
    driver.flushed();
    assert_eq!(written(&mut driver), old, "it was for another space");
    driver.flush(1);
    assert_eq!(driver.read(TRANSLATIONS), ROOM - (1 << 16) - TRANSLATED);
    assert_eq!(written(&mut driver), old, "it has not finished");
    driver.flushed();
    assert_eq!(driver.read(TRANSLATIONS), ROOM);
    assert_eq!(written(&mut driver), new);
    // BAR 1 shows the same address space.
    let mut seen = [0; 4];
    driver.gpu.read_bar(Bar::One, DATA, &mut seen, driver.now);
    assert_eq!(u32::from_le_bytes(seen), driver.word(elsewhere));
}

#[test]
fn an_old_table_is_used_until_a_flush_has_finished() {
    let mut driver = Driver::new(false);
    // The next entry of the directory, with the same table.
    const ENTRY: u64 = DIRECTORY + 8;
    let mut entry = [0; 8];
    assert!(driver.gpu.read_vram(DIRECTORY, &mut entry));
    driver.set(ENTRY, &entry);
    // Writes to a page that was not used before.
    let written = |driver: &mut Driver, page: u64| {
        let at = DATA + page * PAGE;
        driver.submit(&semaphore((1 << 27) + at, 1, 2 | 1 << 24));
        assert_eq!(driver.work(3), Next::Never);
        driver.word(at) == 1
    };
    assert!(written(&mut driver, 0));
    driver.set(ENTRY, &[0; 8]);
    assert!(written(&mut driver, 1), "the old table is known");
    driver.flush(3);
    driver.flushed();
    assert!(!written(&mut driver, 2));
}

#[test]
fn a_flush_without_room_is_lost() {
    let mut driver = Driver::new(false);
    for pending in 0..=0xff {
        assert_eq!(driver.read(TRANSLATIONS) >> 16, 0xff - pending);
        driver.flush(1);
    }
    assert_eq!(driver.read(TRANSLATIONS) >> 16, 0);
    driver.now += 255 * 5_000;
    assert_eq!(driver.read(TRANSLATIONS), ROOM);
}

#[test]
fn a_run_list_takes_effect_later_and_tells_so() {
    let mut driver = Driver::new(false);
    let mut next = 0;
    // Whether the channel runs.
    let mut runs = |driver: &mut Driver| {
        next += 1;
        driver.submit(&semaphore(DATA, next, 2 | 1 << 24));
        driver.work(3);
        driver.word(DATA) == next
    };
    let is_pending = |driver: &mut Driver| driver.read(0x00_227c) & 1 << 20 != 0;
    let interrupts = |driver: &mut Driver| driver.read(0x00_2100) & 1 << 30 != 0;
    driver.write(0x00_2274, 0x1f0_0000);
    assert!(runs(&mut driver) && is_pending(&mut driver) && !interrupts(&mut driver));
    // Another one at the same time is lost.
    driver.write(0x00_2274, 0x1f0_0001);
    driver.now += 10_000;
    assert!(interrupts(&mut driver) && !is_pending(&mut driver));
    assert!(!runs(&mut driver));
    driver.list(1);
    assert!(runs(&mut driver));
}

#[test]
fn a_partition_is_shared_by_its_file() {
    let mut driver = Driver::new(false);
    let file = Arc::new(memory_file(c"partition", 4 * PAGE).expect("there is room"));
    let partition = Mapping::new(&file, 0, 4 * PAGE).expect("it has that much");
    let range = DATA..DATA + 4 * PAGE;
    driver
        .gpu
        .back(range.clone(), file, 0)
        .expect("it is whole pages");
    partition.write(PAGE, &[6; 4]);
    assert_eq!(driver.word(DATA + PAGE), 0x0606_0606);
    driver.submit(&copy(DATA + PAGE, DATA + 2 * PAGE, 4, 1));
    assert_eq!(driver.work(10), Next::Never);
    let mut seen = [0; 4];
    partition.read(2 * PAGE, &mut seen);
    assert_eq!(seen, [6; 4]);
    driver.gpu.unback(range).expect("it is whole pages");
    assert_eq!(driver.word(DATA + PAGE), 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn whatever_is_submitted_ends_or_yields(
        words in proptest::collection::vec(any::<u32>(), 1..64),
        entries in proptest::collection::vec(any::<u64>(), 0..64),
        map: bool,
    ) {
        let mut driver = Driver::new(map);
        for (page, entry) in entries.iter().enumerate() {
            driver.set(TABLE + page as u64 * 8, &entry.to_le_bytes());
        }
        driver.write(0x10_0cbc, 1 << 31 | 7);
        let mut all = run(4, 0, &[0x90b5]);
        all.extend(run(2, 0, &[0x9039]));
        all.extend(words);
        driver.submit(&all);
        driver.work(4);
    }
}

/// Words that launch the kernel in the last page of `PUSH`, on blocks of 64 threads.
fn launch(blocks: u32, constants: &[u32]) -> Vec<u32> {
    let mut words = run(1, 0, &[0x90c0]);
    words.extend(run(1, 0x1608, &[0, CODE as u32]));
    words.extend(run(1, 0x2380, &[0x100, 0, CONSTANTS as u32]));
    words.extend(run(1, 0x1694, &[1]));
    let mut all = vec![0];
    all.extend(constants);
    words.extend(run(1, 0x238c, &all));
    words.extend(run(1, 0x3ac, &[1 << 16 | 64, 1]));
    words.extend(run(1, 0x3b4, &[0]));
    words.extend(run(1, 0x238, &[1 << 16 | blocks, 1]));
    words.extend(run(1, 0x368, &[0x1000]));
    words
}

const CODE: u64 = 0x50_0000;
const CONSTANTS: u64 = 0x50_1000;

fn set_code(driver: &mut Driver, code: &[u64]) {
    for (at, instruction) in (CODE..).step_by(8).zip(code) {
        driver.set(at, &instruction.to_le_bytes());
    }
}

#[test]
fn a_kernel_adds_vectors() {
    let mut driver = Driver::new(true);
    let (a, b, sum) = (DATA, DATA + 0x1_0000, DATA + 0x2_0000);
    let count = 1000_u32;
    for index in 0..=count {
        let at = u64::from(index) * 4;
        driver.set(a + at, &index.wrapping_mul(0x9e37_79b9).to_le_bytes());
        driver.set(b + at, &(!index).to_le_bytes());
    }
    set_code(&mut driver, &vector_add());
    let constants = [a as u32, 0, b as u32, 0, sum as u32, 0, count];
    let mut words = launch(16, &constants);
    words.extend(run(0, 0x10, &[0, DATA as u32 + 0x3_0000, 7, 1 << 24 | 2]));
    driver.submit(&words);
    assert_eq!(driver.work(1000), Next::Never);
    for index in 0..count {
        let at = sum + u64::from(index) * 4;
        let expected = index.wrapping_mul(0x9e37_79b9).wrapping_add(!index);
        assert_eq!(driver.word(at), expected, "word {index}");
    }
    assert_eq!(driver.word(sum + u64::from(count) * 4), 0, "behind the end");
    assert_eq!(driver.word(DATA + 0x3_0000), 7, "after the kernel");
}

#[test]
fn a_query_of_the_3d_class_writes_its_word_or_a_counter_and_drawing_is_refused() {
    const NO_TIME: u32 = 1 << 28;
    const COUNTER: u32 = 2;
    let mut driver = Driver::new(false);
    let query = |at: u64, what| run(3, 0x1b00, &[(at >> 32) as u32, at as u32, 0x77, what]);
    for at in (DATA..DATA + 0x300).step_by(4) {
        driver.set(at, &[0xff; 4]);
    }
    let mut words = run(3, 0, &[0x9097]);
    words.extend(query(DATA, 0));
    words.extend(query(DATA + 0x100, NO_TIME));
    words.extend(query(DATA + 0x200, COUNTER | NO_TIME));
    // Starts drawing vertices.
    words.extend(run(3, 0x1618, &[0]));
    words.extend(semaphore(DATA + 0x300, 1, 2));
    driver.submit(&words);
    assert_eq!(driver.work(10), Next::Never);
    let written = [0, 0x100, 0x200].map(|offset| driver.word(DATA + offset));
    assert_eq!(written, [0x77, 0x77, 0]);
    let time = |driver: &Driver, at| [8, 12].map(|offset| driver.word(at + offset));
    assert_ne!(time(&driver, DATA), [u32::MAX; 2]);
    assert_eq!(time(&driver, DATA + 0x100), [u32::MAX; 2], "without time");
    assert_eq!(
        driver.read(0x04_00c0),
        3 << 16 | 0x1618,
        "an illegal method"
    );
    assert_eq!(driver.word(DATA + 0x300), 0, "the channel is stopped");
}

#[test]
fn a_kernel_without_sense_ends_its_launch_one_without_end_runs() {
    let mut driver = Driver::new(true);
    set_code(&mut driver, &[u64::MAX]);
    driver.submit(&launch(1, &[]));
    driver.work(10);
    assert_ne!(driver.read(0x04_0108), 0, "an illegal instruction");
    driver.write(0x04_0108, u32::MAX);
    let branch = Instruction::new(0, Operation::Branch(-8)).encode();
    set_code(&mut driver, &[branch]);
    driver.submit(&launch(1, &[]));
    assert_eq!(driver.work(50), Next::Now, "it runs for ever, in slices");
    driver.write(0x00_302c, 0x1f_0000);
    driver.write(0x00_2634, 5);
    assert_eq!(driver.work(10), Next::Now);
    assert_eq!(driver.read(0x00_2634), KICKING);
    driver.write(0x00_0200, !(1 << 12));
    assert_eq!(driver.work(10), Next::Never);
    assert_eq!(driver.read(0x00_2634), KICKED);
}
