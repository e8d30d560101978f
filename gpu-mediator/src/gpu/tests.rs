//! Tests arbitrarily hostile fronts of guests against the mediator on the model of the GPU.

use std::{
    fs::File,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    time::Duration,
};
use std::{path::PathBuf, time::Instant};

use base::{Access, Mapping, memfd};
use gf100::format::{Gfn, PAGE, Target};
use gf100::{
    device::{
        gpu::Delays,
        server::{Settings, serve},
    },
    format::{
        LARGE, VramPage,
        instruction::{Instruction, Operation},
        push::{GpEntry, Header, Run as Words},
    },
};
use wire::Event;

use super::{
    link::Packets,
    mediator::{Error, LOOK, Mediator},
    physical::{Failure, Physical},
    wire::{Directory, MOST_BATCHES, Request, Run, Size},
    *,
};
use crate::{Moment, policy::Name};

mod ram;

const MIB: u64 = 1 << 20;
const VRAM: u64 = 64 * MIB;
/// The GPU virtual addresses of guests' VRAM and RAM.
const VRAM_VA: u64 = 0x1000_0000;
const RAM_VA: u64 = 0x2000_0000;

/// The directory with the socket of a GPU's server, `gpu.sock`: one for each test.
fn model(name: &str) -> PathBuf {
    model_with(name, Delays::default())
}

fn model_with(name: &str, delays: Delays) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("gantry-gpu-{}-{name}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let path = folder.join("gpu.sock");
    std::thread::spawn(move || {
        let settings = Settings {
            vram: 256 * MIB,
            map: false,
            confine: false,
            delays,
        };
        serve(&path, settings).map_err(|error| panic!("{error}"))
    });
    folder
}

/// Connects to a server that is starting: its socket may exist before anybody listens.
fn connect<T, E: std::fmt::Debug>(mut to: impl FnMut() -> Result<T, E>) -> T {
    let start = Instant::now();
    loop {
        match to() {
            Ok(connected) => return connected,
            Err(error) => assert!(start.elapsed() < Duration::from_secs(10), "{error:?}"),
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A separate GPU for a test.
fn gpu(name: &str, policy: Name, limit: Duration) -> Mediator {
    gpu_with(name, policy, limit, Delays::default())
}

/// One whose requests take other times.
fn gpu_with(name: &str, policy: Name, limit: Duration, delays: Delays) -> Mediator {
    let folder = model_with(name, delays);
    let physical = connect(|| Physical::connect(&folder.join("gpu.sock")));
    std::fs::remove_dir_all(folder).expect("it is ours");
    Mediator::new(physical, policy, limit).expect("it can be shared")
}

/// A VM; does what a front would do.
struct Guest {
    id: u32,
    vram: Mapping,
    ram: Mapping,
}

impl Guest {
    /// Creates a VM with 1 MiB of RAM from page 0x100, space 1, which maps the first 128 KiB of
    /// VRAM and the RAM in small pages, and channel 1.
    fn new(mediator: &mut Mediator) -> Self {
        Self::with(mediator, 128)
    }

    /// Like [`Self::new`], with this number of places on the GPU.
    fn with(mediator: &mut Mediator, channels: u8) -> Self {
        Self::weighing(mediator, channels, 1)
    }

    /// Like [`Self::with`], with a weight.
    fn weighing(mediator: &mut Mediator, channels: u8, weight: u32) -> Self {
        let guest = Self::bare_with(mediator, channels, weight);
        for (table, index, first) in [
            (1, VRAM_VA >> 27, Target::Vram(VramPage(0))),
            (2, RAM_VA >> 27, Target::Ram(Gfn(0x100))),
        ] {
            let at = ((if table == 1 { VRAM_VA } else { RAM_VA }) >> 12) % 0x8000;
            guest.table(mediator, table, at as u16, 32, first);
            guest.link(mediator, 1, index as u16, table);
        }
        guest.bind(mediator, 1).expect("there is a channel");
        guest
    }

    fn bare(mediator: &mut Mediator) -> Self {
        Self::bare_with(mediator, 128, 1)
    }

    fn bare_with(mediator: &mut Mediator, channels: u8, weight: u32) -> Self {
        let id = mediator
            .join(VRAM, channels, weight, None, Moment::now())
            .expect("there is room");
        let map = |file: &File, len| {
            Mapping::shared(file, 0, len as usize, Access::ReadWrite).expect("it can be mapped")
        };
        let vram = map(mediator.partition(id).expect("it has joined"), VRAM);
        let file = memfd::sealed(c"ram", MIB).expect("there is room");
        let ram = map(&file, MIB);
        let guest = Self { id, vram, ram };
        let request = Request::Ram {
            first: Gfn(0x100),
            count: 256,
            offset: 0,
        };
        let files = vec![OwnedFd::from(file)];
        mediator
            .request(id, request, files, Moment::now())
            .expect("it is sealed");
        guest
            .ask(mediator, Request::Space { space: 1 })
            .expect("it is new");
        guest
    }

    #[allow(
        clippy::needless_pass_by_value,
        reason = "a request is made for one call"
    )]
    fn ask(&self, mediator: &mut Mediator, request: Request) -> Result<(), Error> {
        // Encoded and parsed, as it would arrive.
        let request = Request::parse(&request.encode()).expect("it can be said");
        mediator.request(self.id, request, Vec::new(), Moment::now())
    }

    fn table(&self, mediator: &mut Mediator, table: u32, index: u16, count: u16, first: Target) {
        let size = Size::Small;
        self.ask(
            mediator,
            Request::Table {
                table,
                size,
                space: 1,
            },
        )
        .expect("it is new");
        let run = Run {
            index,
            count,
            first: Some(first),
            read_only: false,
            kind: 0,
        };
        let runs = vec![run];
        self.ask(mediator, Request::Map { table, runs })
            .expect("they are there");
    }

    fn link(&self, mediator: &mut Mediator, space: u32, index: u16, table: u32) {
        let entry = Directory {
            small: Some(table),
            ..Directory::default()
        };
        let link = Request::Link {
            space,
            index,
            entry,
        };
        self.ask(mediator, link).expect("both are there");
    }

    fn bind(&self, mediator: &mut Mediator, channel: u8) -> Result<(), Error> {
        let bind = Request::Bind {
            channel,
            space: 1,
            engines: Default::default(),
        };
        self.ask(mediator, bind)
    }

    /// Writes words at an offset in VRAM, and submits them.
    fn submit(&self, mediator: &mut Mediator, channel: u8, at: u64, words: &[u32]) {
        for (at, word) in (at as usize..).step_by(4).zip(words) {
            write(&self.vram, at, *word);
        }
        let entry = GpEntry {
            address: VRAM_VA + at,
            words: words.len() as u32,
        };
        let entries = vec![entry.encode()];
        let submit = Request::Submit { channel, entries };
        self.ask(mediator, submit).expect("there is room");
    }
}

fn write(memory: &Mapping, at: usize, word: u32) {
    assert!(at + 4 <= memory.len() && at.is_multiple_of(4));
    // SAFETY: within the mapping and aligned.
    unsafe { memory.start().add(at).cast::<u32>().write_volatile(word) };
}

fn read(memory: &Mapping, at: usize) -> u32 {
    assert!(at + 4 <= memory.len() && at.is_multiple_of(4));
    // SAFETY: within the mapping and aligned.
    unsafe { memory.start().add(at).cast::<u32>().read_volatile() }
}

/// Words for consecutive methods of a subchannel.
fn methods(subchannel: u8, address: u16, words: &[u32]) -> Vec<u32> {
    let header = Header::Increasing(Words {
        subchannel,
        address,
        count: words.len() as u16,
    });
    let mut all = vec![header.encode()];
    all.extend(words);
    all
}

fn release(at: u64, word: u32) -> Vec<u32> {
    methods(0, 0x10, &[(at >> 32) as u32, at as u32, word, 1 << 24 | 2])
}

fn acquire(at: u64, word: u32) -> Vec<u32> {
    methods(0, 0x10, &[(at >> 32) as u32, at as u32, word, 1])
}

fn copy(from: u64, to: u64, len: u32) -> Vec<u32> {
    let mut words = methods(4, 0, &[0x90b5]);
    let high = |at: u64| (at >> 32) as u32;
    let place = [
        high(from),
        from as u32,
        high(to),
        to as u32,
        len,
        len,
        len,
        1,
    ];
    words.extend(methods(4, 0x30c, &place));
    words.extend(methods(4, 0x300, &[0x110]));
    words
}

/// Lets the GPU work until a VM gets an event that `wanted` accepts.
fn until(mediator: &mut Mediator, guest: &Guest, wanted: impl Fn(&Event) -> bool) -> Event {
    let start = Instant::now();
    loop {
        mediator.tick(Moment::now()).expect("the GPU is there");
        mediator.interrupt().expect("the GPU is there");
        while let Some(event) = mediator.event(guest.id) {
            if wanted(&event) {
                return event;
            }
        }
        assert!(start.elapsed() < Duration::from_secs(20), "nothing comes");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn done(mediator: &mut Mediator, guest: &Guest, channel: u8) {
    until(mediator, guest, |event| *event == Event::Done { channel });
}

fn is_fault(event: &Event) -> bool {
    matches!(event, Event::Fault { .. })
}

const LONG: Duration = Duration::from_secs(60);

#[test]
fn two_guests_copy_at_once_and_see_their_own_memory_only() {
    let mut mediator = gpu("copies", Name::Fair, LONG);
    let guests = [Guest::new(&mut mediator), Guest::new(&mut mediator)];
    for (nth, guest) in (1_u32..).zip(&guests) {
        for at in (0..4096).step_by(4) {
            write(&guest.ram, at, nth << 16 | at as u32);
        }
        let mut words = copy(RAM_VA, VRAM_VA + 0x4000, 4096);
        words.extend(copy(VRAM_VA + 0x4000, RAM_VA + 0x2000, 4096));
        words.extend(release(RAM_VA + 0x8000, 77));
        guest.submit(&mut mediator, 1, 0, &words);
    }
    for (nth, guest) in (1_u32..).zip(&guests) {
        done(&mut mediator, guest, 1);
        for at in (0..4096).step_by(4) {
            assert_eq!(read(&guest.vram, 0x4000 + at), nth << 16 | at as u32);
            assert_eq!(read(&guest.ram, 0x2000 + at), nth << 16 | at as u32);
        }
        assert_eq!(read(&guest.ram, 0x8000), 77);
        assert_eq!(mediator.figures(guest.id).expect("it is there").refused, 0);
    }
}

#[test]
fn pages_that_are_not_the_guests_own_are_not_mapped_and_using_them_ends_the_channel_only() {
    let mut mediator = gpu("outside", Name::Fair, LONG);
    let (bad, good) = (Guest::new(&mut mediator), Guest::new(&mut mediator));
    let pages = (VRAM / PAGE) as u32;
    for (table, first) in [
        // Beyond its partition, where the other one's is; the very last page; RAM that it does not
        // have.
        (10, Target::Vram(VramPage(pages))),
        (11, Target::Vram(VramPage((1 << 28) - 1))),
        (12, Target::Ram(Gfn(0x200))),
        (13, Target::Ram(Gfn(0xff))),
    ] {
        let index = (table + 10) as u16;
        bad.table(&mut mediator, table, 0, 1, first);
        bad.link(&mut mediator, 1, index, table);
        let channel = table as u8;
        bad.bind(&mut mediator, channel).expect("there is one");
        let va = u64::from(index) << 27;
        bad.submit(&mut mediator, channel, 0, &release(va, 0xbad));
        let event = until(&mut mediator, &bad, is_fault);
        assert!(
            matches!(event, Event::Fault { channel: its, address, write: true, .. }
                if its == channel && address == va),
            "{event:?}"
        );
    }
    assert_eq!(mediator.figures(bad.id).expect("it is there").refused, 4);
    good.submit(&mut mediator, 1, 0, &release(RAM_VA, 5));
    done(&mut mediator, &good, 1);
    assert_eq!(read(&good.ram, 0), 5);
    bad.submit(&mut mediator, 1, 0, &release(RAM_VA, 6));
    done(&mut mediator, &bad, 1);
}

#[test]
fn a_large_page_of_which_only_the_first_byte_is_inside_is_not_mapped() {
    let mut mediator = gpu("straddle", Name::Fair, LONG);
    let guest = Guest::new(&mut mediator);
    let size = Size::Large;
    guest
        .ask(
            &mut mediator,
            Request::Table {
                table: 9,
                size,
                space: 1,
            },
        )
        .expect("it is new");
    let last = (VRAM / PAGE) as u32 - 1;
    let run = |index, first| Run {
        index,
        count: 1,
        first: Some(Target::Vram(VramPage(first))),
        read_only: false,
        kind: 0xdb,
    };
    let runs = vec![run(0, last), run(1, last + 1 - 32)];
    guest
        .ask(&mut mediator, Request::Map { table: 9, runs })
        .expect("they are there");
    let entry = Directory {
        large: Some(9),
        ..Directory::default()
    };
    let link = Request::Link {
        space: 1,
        index: 40,
        entry,
    };
    guest.ask(&mut mediator, link).expect("both are there");
    guest.submit(&mut mediator, 1, 0, &release((40 << 27) + LARGE, 8));
    done(&mut mediator, &guest, 1);
    assert_eq!(read(&guest.vram, (VRAM - LARGE) as usize), 8);
    guest.submit(&mut mediator, 1, 0, &release(40 << 27, 9));
    until(&mut mediator, &guest, is_fault);
}

#[test]
fn the_mediators_own_pages_cannot_be_written_or_replaced() {
    let mut mediator = gpu("control", Name::Fair, LONG);
    let guest = Guest::new(&mut mediator);
    guest.link(&mut mediator, 1, space::CONTROL, 1);
    let control = u64::from(space::CONTROL) << 27;
    guest.submit(&mut mediator, 1, 0, &release(control, 1));
    let event = until(&mut mediator, &guest, is_fault);
    assert!(matches!(event, Event::Fault { reason: 6, .. }), "{event:?}");
    assert_eq!(mediator.figures(guest.id).expect("it is there").refused, 1);
}

#[test]
fn tables_and_channels_are_bounded_and_used_ones_cannot_go() {
    let mut mediator = gpu("bounds", Name::Fair, LONG);
    let guest = Guest::new(&mut mediator);
    let mut refused = |request| guest.ask(&mut mediator, request).is_err();
    assert!(refused(Request::TableGone { table: 1 }), "it is linked");
    assert!(refused(Request::SpaceGone { space: 1 }), "it has a channel");
    assert!(refused(Request::Space { space: 1 }), "it is taken");
    for (table, space) in [(1, 1), (50, 2)] {
        let size = Size::Small;
        assert!(refused(Request::Table { table, size, space }));
    }
    let run = Run {
        index: 0x7fff,
        count: 2,
        first: None,
        read_only: false,
        kind: 0,
    };
    assert!(
        refused(Request::Map {
            table: 1,
            runs: vec![run]
        }),
        "behind its end"
    );
    let link = Request::Link {
        space: 1,
        index: 0,
        entry: Directory {
            large: Some(1),
            ..Directory::default()
        },
    };
    assert!(refused(link), "of the other size");
    assert!(refused(Request::Submit {
        channel: 99,
        entries: vec![0]
    }));
    assert!(guest.bind(&mut mediator, 1).is_err(), "it is bound");
}

#[test]
fn more_channels_than_the_gpu_has_take_turns_and_keep_what_engines_have_of_them() {
    let mut mediator = gpu("places", Name::Fair, LONG);
    let guests = [Guest::new(&mut mediator), Guest::new(&mut mediator)];
    for guest in &guests {
        for channel in (0..128).filter(|channel| *channel != 1) {
            guest.bind(&mut mediator, channel).expect("there are 128");
        }
        write(&guest.ram, 0, 0x5eed);
    }
    // Each channel binds its object and sets the destination. It copies when all others have done
    // so.
    let place = |channel: u8| 0x100 + u64::from(channel) * 8;
    for step in 0..2 {
        for channel in 0..128 {
            for guest in &guests {
                let mut words = copy(RAM_VA, RAM_VA + place(channel), 4);
                let launch = words.split_off(words.len() - 2);
                let words = if step == 0 { words } else { launch };
                guest.submit(&mut mediator, channel, u64::from(channel) * 64, &words);
            }
            for guest in &guests {
                done(&mut mediator, guest, channel);
            }
        }
    }
    for guest in &guests {
        for channel in 0..128 {
            assert_eq!(read(&guest.ram, place(channel) as usize), 0x5eed);
        }
        let figures = mediator.figures(guest.id).expect("it is there");
        assert!(figures.displaced > 0 && figures.ended == 0, "{figures:?}");
    }
}

#[test]
fn a_channel_that_waits_for_one_without_a_place_gives_its_own_up() {
    let mut mediator = gpu("stuck", Name::Fair, LONG);
    let guest = Guest::with(&mut mediator, 1);
    guest.bind(&mut mediator, 2).expect("there is one");
    guest.submit(&mut mediator, 1, 0, &acquire(RAM_VA, 1));
    mediator.tick(Moment::now()).expect("the GPU is there");
    guest.submit(&mut mediator, 2, 64, &release(RAM_VA, 1));
    done(&mut mediator, &guest, 1);
}

#[test]
fn channels_that_lose_their_places_while_they_wait_do_the_rest() {
    const CHANNELS: u8 = 12;
    let mut mediator = gpu("waits", Name::Fair, LONG);
    let guest = Guest::with(&mut mediator, 2);
    write(&guest.ram, 0x1000, 0x5eed);
    let at = |channel: u8| u64::from(channel) * 16;
    for channel in 1..=CHANNELS {
        if channel > 1 {
            guest.bind(&mut mediator, channel).expect("there is one");
        }
        // It sets the copy up, waits, and then starts it.
        let flag = RAM_VA + at(channel);
        let mut words = copy(RAM_VA + 0x1000, flag + 4, 4);
        let launch = words.split_off(words.len() - 2);
        words.extend(acquire(flag, 1));
        words.extend(launch);
        words.extend(release(flag + 8, 2));
        guest.submit(&mut mediator, channel, u64::from(channel) * 128, &words);
    }
    let start = Instant::now();
    while mediator.figures(guest.id).expect("it is there").displaced < 3 * u64::from(CHANNELS) {
        mediator.tick(Moment::now()).expect("the GPU is there");
        assert!(start.elapsed() < Duration::from_secs(20), "none loses it");
        std::thread::sleep(Duration::from_millis(1));
    }
    for channel in (1..=CHANNELS).rev() {
        let flag = at(channel) as usize;
        assert_eq!(
            (read(&guest.ram, flag + 4), read(&guest.ram, flag + 8)),
            (0, 0)
        );
        write(&guest.ram, flag, 1);
        done(&mut mediator, &guest, channel);
        assert_eq!(
            (read(&guest.ram, flag + 4), read(&guest.ram, flag + 8)),
            (0x5eed, 2)
        );
    }
}

#[test]
fn a_space_that_uses_its_vms_memory_up_ends_and_others_of_the_vm_go_on() {
    let mut mediator = gpu("greedy", Name::Fair, LONG);
    let guest = Guest::new(&mut mediator);
    let size = Size::Small;
    let mut ask = |request| guest.ask(&mut mediator, request);
    let bind = |channel| Request::Bind {
        channel,
        space: 2,
        engines: Default::default(),
    };
    ask(Request::Space { space: 2 }).expect("it is new");
    ask(bind(2)).expect("there is one");
    let link = |table| {
        let index = table as u16;
        let small = Some(table);
        let entry = Directory {
            small,
            ..Directory::default()
        };
        let space = 2;
        Request::Link {
            space,
            index,
            entry,
        }
    };
    let tables = 100..200;
    for table in tables.clone() {
        let space = 2;
        ask(Request::Table { table, size, space }).expect("it is new");
        ask(link(table)).expect("both are there");
    }
    let event = until(&mut mediator, &guest, is_fault);
    assert!(
        matches!(event, Event::Fault { channel: 2, .. }),
        "{event:?}"
    );
    let figures = mediator.figures(guest.id).expect("it is there");
    assert_eq!((figures.spaces_ended, figures.ended), (1, 1));
    // Its submissions are dropped, and a channel that is bound to it now ends at once.
    guest
        .ask(&mut mediator, bind(3))
        .expect("the space is there");
    until(&mut mediator, &guest, is_fault);
    for channel in [2, 3] {
        guest.submit(&mut mediator, channel, 0x1000, &release(RAM_VA, 2));
    }
    guest.submit(&mut mediator, 1, 0, &release(RAM_VA, 1));
    done(&mut mediator, &guest, 1);
    assert_eq!(read(&guest.ram, 0), 1);
    // Its numbers and memory are freed when its process disconnects.
    let mut ask = |request| guest.ask(&mut mediator, request);
    for channel in [2, 3] {
        ask(Request::Unbind { channel }).expect("it is bound");
    }
    ask(Request::SpaceGone { space: 2 }).expect("no channel has it");
    for table in tables {
        ask(Request::TableGone { table }).expect("no space has it");
    }
    ask(Request::Space { space: 2 }).expect("it is new");
    ask(bind(2)).expect("there is one");
    guest.table(&mut mediator, 100, 0, 32, Target::Vram(VramPage(0)));
    let at = (VRAM_VA >> 27) as u16;
    guest.table(&mut mediator, 101, 0, 0x100, Target::Ram(Gfn(0x100)));
    guest.link(&mut mediator, 2, at, 100);
    guest.link(&mut mediator, 2, (RAM_VA >> 27) as u16, 101);
    let figures = mediator.figures(guest.id).expect("it is there");
    assert_eq!(figures.spaces_ended, 1);
}

#[test]
fn who_has_more_than_its_part_gives_way_to_itself_and_not_the_one_that_has_most() {
    let mut mediator = gpu("parts", Name::Fair, LONG);
    let guest = Guest::new(&mut mediator);
    let mut ask = |request| guest.ask(&mut mediator, request).expect("it is new");
    for space in [2, 3] {
        ask(Request::Space { space });
        ask(Request::Bind {
            channel: space as u8,
            space,
            engines: Default::default(),
        });
    }
    // The first one has more than half before the other begins.
    let mut table = 100;
    for (space, count) in [(2, 18), (3, 20)] {
        for _ in 0..count {
            let size = Size::Small;
            ask(Request::Table { table, size, space });
            table += 1;
        }
    }
    let event = until(&mut mediator, &guest, is_fault);
    assert!(
        matches!(event, Event::Fault { channel: 3, .. }),
        "{event:?}"
    );
    let figures = mediator.figures(guest.id).expect("it is there");
    assert_eq!((figures.spaces_ended, figures.ended), (1, 1));
}

#[test]
fn memory_of_which_only_small_pieces_are_left_costs_a_space_and_not_the_front() {
    let mut mediator = gpu("pieces", Name::Fair, LONG);
    let guest = Guest::bare(&mut mediator);
    let mut ask = |request| guest.ask(&mut mediator, request);
    let space = 2;
    ask(Request::Space { space }).expect("it is new");
    let tables = 100..1230;
    for table in tables.clone() {
        let size = Size::Large;
        ask(Request::Table { table, size, space }).expect("it is new");
    }
    for table in tables.step_by(2) {
        ask(Request::TableGone { table }).expect("no space has it");
    }
    let figures = mediator.figures(guest.id).expect("it is there");
    assert_eq!(figures.spaces_ended, 0);
    // A channel needs a contiguous range of a large page's size.
    guest.bind(&mut mediator, 1).expect("there is room");
    let figures = mediator.figures(guest.id).expect("it is there");
    assert_eq!((figures.spaces_ended, figures.ended), (1, 0));
}

#[test]
fn a_command_that_fails_is_its_channels_though_another_has_its_place_when_that_is_heard() {
    let mut mediator = gpu("whose", Name::Fair, LONG);
    let guest = Guest::with(&mut mediator, 1);
    guest.bind(&mut mediator, 2).expect("there is one");
    let mut words = release(RAM_VA, 1);
    // There is no such class.
    words.extend(methods(7, 0, &[0xffff]));
    guest.submit(&mut mediator, 1, 0, &words);
    let start = Instant::now();
    while read(&guest.ram, 0) != 1 {
        mediator.tick(Moment::now()).expect("the GPU is there");
        assert!(start.elapsed() < Duration::from_secs(20), "nothing comes");
    }
    guest.submit(&mut mediator, 2, 64, &release(RAM_VA, 2));
    // It keeps its place long enough to lose it.
    let later = Moment::now() + Duration::from_secs(1);
    mediator.tick(later).expect("the GPU is there");
    let figures = mediator.figures(guest.id).expect("it is there");
    assert_eq!(figures.displaced, 1);
    mediator.interrupt().expect("the GPU is there");
    let mut events = std::iter::from_fn(|| mediator.event(guest.id));
    let event = events.find(|event| matches!(event, Event::Command { .. }));
    assert!(
        matches!(event, Some(Event::Command { channel: 1, .. })),
        "{event:?}"
    );
}

#[test]
fn who_waits_for_ever_loses_the_channel_and_delays_nobody() {
    let mut mediator = gpu("late", Name::Fair, Duration::from_millis(300));
    let (bad, good) = (Guest::new(&mut mediator), Guest::new(&mut mediator));
    bad.submit(&mut mediator, 1, 0, &acquire(RAM_VA, 1));
    for nth in 0..5 {
        good.submit(&mut mediator, 1, 0, &release(RAM_VA, nth));
        done(&mut mediator, &good, 1);
        assert_eq!(read(&good.ram, 0), nth);
    }
    until(&mut mediator, &bad, |event| {
        matches!(event, Event::Late { channel: 1, .. })
    });
    let unbind = Request::Unbind { channel: 1 };
    bad.ask(&mut mediator, unbind).expect("it is bound");
    bad.bind(&mut mediator, 1).expect("it is free");
    bad.submit(&mut mediator, 1, 0, &release(RAM_VA, 3));
    done(&mut mediator, &bad, 1);
}

#[test]
fn time_in_which_nothing_ran_does_not_end_a_channel() {
    let limit = Duration::from_secs(10);
    let mut mediator = gpu("paused", Name::Fair, limit);
    let guest = Guest::new(&mut mediator);
    guest.submit(&mut mediator, 1, 0, &acquire(RAM_VA, 1));
    let mut now = Moment::now();
    let mut tick = |passed| {
        now += passed;
        mediator.tick(now).expect("the GPU is there");
        std::iter::from_fn(|| mediator.event(guest.id))
            .any(|event| matches!(event, Event::Late { channel: 1, .. }))
    };
    assert!(!tick(Duration::ZERO));
    // This host was stopped.
    assert!(!tick(10 * limit), "it ends");
    let ticks = (0..2000).find(|_| tick(LOOK));
    assert!(ticks.is_some_and(|ticks| ticks >= 900), "{ticks:?}");
}

#[test]
fn a_channel_that_its_front_stops_goes_on_where_it_was() {
    let mut mediator = gpu("stopped-one", Name::Fair, LONG);
    let guest = Guest::with(&mut mediator, 1);
    guest.bind(&mut mediator, 2).expect("there is one");
    let stop = |mediator: &mut Mediator, stopped| {
        let channel = 1;
        guest
            .ask(mediator, Request::Stop { channel, stopped })
            .expect("it may");
    };
    let mut words = release(RAM_VA + 16, 1);
    words.extend(acquire(RAM_VA, 1));
    words.extend(release(RAM_VA + 20, 2));
    guest.submit(&mut mediator, 1, 0, &words);
    let start = Instant::now();
    while read(&guest.ram, 16) != 1 {
        mediator.tick(Moment::now()).expect("the GPU is there");
        assert!(start.elapsed() < Duration::from_secs(20), "nothing comes");
    }
    write(&guest.ram, 16, 0);
    stop(&mut mediator, true);
    write(&guest.ram, 0, 1);
    guest.submit(&mut mediator, 1, 128, &release(RAM_VA + 24, 3));
    // Another one gets its place, and its time does not run.
    for nth in 0..5 {
        guest.submit(&mut mediator, 2, 64, &release(RAM_VA + 28, nth));
        done(&mut mediator, &guest, 2);
    }
    let later = Moment::now() + 2 * LONG;
    mediator.tick(later).expect("the GPU is there");
    assert_eq!(mediator.running().next(), None);
    assert_eq!((read(&guest.ram, 20), read(&guest.ram, 24)), (0, 0));
    stop(&mut mediator, false);
    done(&mut mediator, &guest, 1);
    done(&mut mediator, &guest, 1);
    assert_eq!((read(&guest.ram, 20), read(&guest.ram, 24)), (2, 3));
    assert_eq!(read(&guest.ram, 16), 0, "what was done is not done again");
}

#[test]
fn a_stopped_channel_goes_on_in_its_next_turn() {
    let mut mediator = gpu("stopped", Name::Fair, LONG);
    let (one, other) = (Guest::new(&mut mediator), Guest::new(&mut mediator));
    let mut words = acquire(RAM_VA, 1);
    words.extend(release(RAM_VA + 16, 2));
    one.submit(&mut mediator, 1, 0, &words);
    for nth in 0..5 {
        other.submit(&mut mediator, 1, 0, &release(RAM_VA, nth));
        done(&mut mediator, &other, 1);
    }
    assert!(mediator.figures(one.id).expect("it is there").stopped > 0);
    write(&one.ram, 0, 1);
    done(&mut mediator, &one, 1);
    assert_eq!(read(&one.ram, 16), 2);
}

#[test]
fn turns_by_bandwidth_are_short_however_long_commands_are() {
    let mut mediator = gpu("band", Name::Band, LONG);
    let guests = [Guest::new(&mut mediator), Guest::new(&mut mediator)];
    for guest in &guests {
        guest.submit(&mut mediator, 1, 0, &acquire(RAM_VA, 1));
    }
    let start = Moment::now();
    let mut runs = Vec::new();
    // The first one may have arrived a period before the other.
    for millis in 0..200 {
        let now = start + Duration::from_millis(millis);
        mediator.tick(now).expect("the GPU is there");
        runs.extend(mediator.running().map(|(vm, _)| vm));
    }
    runs.dedup();
    assert!(runs.len() >= 65, "turns of {runs:?} in 200 ms");
}

#[test]
fn time_is_shared_by_weight() {
    const STEP: Duration = Duration::from_micros(200);
    for policy in [Name::Band, Name::Fair] {
        let mut mediator = gpu(&format!("weights-{policy}"), policy, LONG);
        let guests = [1, 3].map(|weight| Guest::weighing(&mut mediator, 128, weight));
        for guest in &guests {
            guest.submit(&mut mediator, 1, 0, &acquire(RAM_VA, 1));
        }
        let mut now = Moment::now();
        let mut steps = [0_u32; 2];
        for _ in 0..10_000 {
            now += STEP;
            mediator.tick(now).expect("the GPU is there");
            if let Some((vm, _)) = mediator.running().next() {
                steps[usize::from(vm == guests[1].id)] += 1;
            }
        }
        let share = f64::from(steps[1]) / f64::from(steps[0] + steps[1]);
        assert!((share - 0.75).abs() < 0.05, "{policy}: {share}");
    }
}

#[test]
fn every_policy_serves_both_and_submissions_are_bounded() {
    for name in Name::ALL {
        let mut mediator = gpu(&format!("policy-{name}"), name, LONG);
        let guests = [Guest::new(&mut mediator), Guest::new(&mut mediator)];
        for guest in &guests {
            for nth in 0..MOST_BATCHES as u64 {
                guest.submit(&mut mediator, 1, nth * 64, &release(RAM_VA + nth * 4, 9));
            }
            let entries = vec![0];
            let submit = Request::Submit {
                channel: 1,
                entries,
            };
            assert!(matches!(
                guest.ask(&mut mediator, submit),
                Err(Error::Full(1))
            ));
        }
        for guest in &guests {
            for _ in 0..MOST_BATCHES {
                done(&mut mediator, guest, 1);
            }
        }
    }
}

#[test]
fn what_a_guest_leaves_is_free_and_empty_for_the_next() {
    let mut mediator = gpu("leaves", Name::Fair, LONG);
    for _ in 0..8 {
        let guest = Guest::new(&mut mediator);
        assert_eq!(read(&guest.vram, 0), 0);
        guest.submit(&mut mediator, 1, 0, &acquire(RAM_VA, 1));
        mediator.tick(Moment::now()).expect("the GPU is there");
        mediator
            .leave(guest.id, Moment::now())
            .expect("the GPU is there");
    }
}

#[test]
fn a_front_that_maps_much_does_so_in_several_rounds() {
    const MAPS: usize = 6;
    let folder = model("rounds");
    let socket = folder.join("fronts.sock");
    let settings = server::Settings {
        policy: Name::Fair,
        limit: LONG,
    };
    let gpu = folder.join("gpu.sock");
    let mut server = connect(|| server::Server::new(&gpu, &socket, settings));
    let front = Packets::connect(&socket).expect("it listens");
    let send = |request: Request| front.send(&request.encode(), &[]).expect("there is room");
    let mut heard = |rounds: &mut usize| {
        let mut entry = [libc::pollfd {
            fd: front.as_fd().as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        }];
        loop {
            base::poll::poll(&mut entry, Some(Duration::ZERO)).expect("it can be asked");
            if entry[0].revents != 0 {
                let packet = front
                    .receive()
                    .expect("it is served")
                    .expect("it is served");
                break Event::parse(&packet.bytes).expect("it makes sense");
            }
            server
                .step(Some(Duration::from_millis(1)))
                .expect("the GPU is there");
            *rounds += 1;
        }
    };
    send(Request::Hello {
        version: wire::VERSION,
        vram: VRAM,
        channels: 1,
        weight: 1,
    });
    assert!(matches!(heard(&mut 0), Event::Welcome { .. }));
    send(Request::Space { space: 1 });
    send(Request::Table {
        table: 1,
        size: Size::Small,
        space: 1,
    });
    send(Request::Sync { number: 1 });
    assert_eq!(heard(&mut 0), Event::Synced { number: 1 });
    let run = Run {
        index: 0,
        count: 1 << 15,
        first: None,
        read_only: false,
        kind: 0,
    };
    for _ in 0..MAPS {
        let runs = vec![run; 2];
        send(Request::Map { table: 1, runs });
    }
    send(Request::Sync { number: 2 });
    let mut rounds = 0;
    assert_eq!(heard(&mut rounds), Event::Synced { number: 2 });
    assert!(rounds > MAPS, "{rounds} rounds");
    // Small ones do not.
    for number in 3..19 {
        send(Request::Sync { number });
    }
    let mut rounds = 0;
    for number in 3..19 {
        assert_eq!(heard(&mut rounds), Event::Synced { number });
    }
    assert!(rounds <= 3, "{rounds} rounds");
    std::fs::remove_dir_all(folder).expect("it is ours");
}

#[test]
fn a_front_that_does_not_say_hello_loses_its_place() {
    let folder = model("hello");
    let socket = folder.join("fronts.sock");
    let settings = server::Settings {
        policy: Name::Fair,
        limit: LONG,
    };
    let gpu = folder.join("gpu.sock");
    let mut server = connect(|| server::Server::new(&gpu, &socket, settings));
    std::thread::spawn(move || server.run());
    let front = || Packets::connect(&socket).expect("it listens");
    let (silent, good) = (front(), front());
    let ask = |request: Request| {
        good.send(&request.encode(), &[]).expect("it is taken");
        let packet = good.receive().expect("it is served").expect("it is served");
        Event::parse(&packet.bytes).expect("it makes sense")
    };
    let version = wire::VERSION;
    let vram = VRAM;
    let hello = Request::Hello {
        version,
        vram,
        channels: 1,
        weight: 1,
    };
    assert_eq!(ask(hello), Event::Welcome { version, vram });
    let mut entry = [libc::pollfd {
        fd: silent.as_fd().as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    }];
    base::poll::poll(&mut entry, Some(Duration::from_secs(20))).expect("it can be waited for");
    assert_ne!(entry[0].revents, 0, "it keeps its place");
    assert!(silent.receive().expect("it is closed").is_none());
    let number = 7;
    assert_eq!(ask(Request::Sync { number }), Event::Synced { number });
    std::fs::remove_dir_all(folder).expect("it is ours");
}

/// Submits something, and waits until the GPU has completed it.
fn complete(mediator: &mut Mediator, guest: &Guest) {
    guest.submit(mediator, 1, 0, &release(RAM_VA, 5));
    mediator.tick(Moment::now()).expect("the GPU is there");
    // The interrupt is the last effect of a submission.
    let start = Instant::now();
    while mediator.gpu().interrupt().read().is_err() {
        assert!(start.elapsed() < Duration::from_secs(20), "nothing comes");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_paused_vm_hears_of_what_is_done_and_has_no_turn_and_no_limit() {
    let mut mediator = gpu("held", Name::Fair, LONG);
    let (guest, other) = (Guest::new(&mut mediator), Guest::new(&mut mediator));
    let hold = |held, mediator: &mut Mediator| {
        guest.ask(mediator, Request::Hold { held }).expect("it may");
    };
    complete(&mut mediator, &guest);
    hold(true, &mut mediator);
    assert_eq!(mediator.event(guest.id), Some(Event::Done { channel: 1 }));
    hold(false, &mut mediator);
    // It would write a word when it finds another one.
    let mut words = acquire(RAM_VA, 1);
    words.extend(release(RAM_VA + 16, 2));
    guest.submit(&mut mediator, 1, 0, &words);
    let start = Moment::now();
    mediator.tick(start).expect("the GPU is there");
    assert_eq!(mediator.running().next(), Some((guest.id, 1)));
    hold(true, &mut mediator);
    write(&guest.ram, 0, 1);
    guest.submit(&mut mediator, 1, 64, &release(RAM_VA + 20, 3));
    mediator.tick(start + 2 * LONG).expect("the GPU is there");
    assert_eq!(mediator.running().next(), None);
    for nth in 0..5 {
        other.submit(&mut mediator, 1, 0, &release(RAM_VA, nth));
        done(&mut mediator, &other, 1);
    }
    assert_eq!(mediator.event(guest.id), None);
    assert_eq!((read(&guest.ram, 16), read(&guest.ram, 20)), (0, 0));
    hold(false, &mut mediator);
    done(&mut mediator, &guest, 1);
    done(&mut mediator, &guest, 1);
    assert_eq!((read(&guest.ram, 16), read(&guest.ram, 20)), (2, 3));
}

#[test]
fn what_a_channel_has_done_when_it_is_unbound_is_said() {
    let mut mediator = gpu("unbound", Name::Fair, LONG);
    let guest = Guest::new(&mut mediator);
    complete(&mut mediator, &guest);
    let unbind = Request::Unbind { channel: 1 };
    guest.ask(&mut mediator, unbind).expect("it is bound");
    assert_eq!(mediator.event(guest.id), Some(Event::Done { channel: 1 }));
}

#[test]
fn whoever_uses_all_of_its_memory_for_tables_takes_nobody_elses() {
    let mut mediator = gpu("tables", Name::Fair, Duration::from_secs(10));
    let greedy: Vec<_> = (0..2).map(|_| Guest::bare(&mut mediator)).collect();
    for guest in &greedy {
        for table in 10..2000 {
            let (size, space) = (Size::Small, 1);
            let asked = guest.ask(&mut mediator, Request::Table { table, size, space });
            asked.expect("it has a number");
        }
        let figures = mediator.figures(guest.id).expect("it is there");
        assert_eq!(figures.spaces_ended, 1, "they have a quota");
    }
    // The number of free pages is the same as before.
    let good = Guest::new(&mut mediator);
    for table in 10..20 {
        good.table(&mut mediator, table, 0, 1, Target::Vram(VramPage(0)));
    }
    for channel in 2..20 {
        good.bind(&mut mediator, channel).expect("there is room");
    }
}

#[test]
fn whoever_asks_is_shown_who_has_used_the_gpu() {
    let mut mediator = gpu("status", Name::Fair, LONG);
    let (busy, idle) = (Guest::new(&mut mediator), Guest::new(&mut mediator));
    busy.submit(&mut mediator, 1, 0, &release(RAM_VA, 5));
    done(&mut mediator, &busy, 1);
    let clients = mediator.clients(Moment::now());
    let its = |guest: &Guest| {
        let name = format!("virtual machine {}", guest.id);
        clients.iter().find(|client| client.name == name)
    };
    let (busy, idle) = (
        its(&busy).expect("it is there"),
        its(&idle).expect("it is there"),
    );
    assert_eq!((busy.calls, busy.turns, busy.memory), (1, 1, VRAM));
    assert!(busy.device_time > 0, "{busy:?}");
    assert_eq!((idle.calls, idle.turns, idle.device_time), (0, 0, 0));
}

#[test]
fn whoever_asks_is_shown_what_has_been_used_of_a_turn_that_is_not_over() {
    let mut mediator = gpu("unfinished", Name::Fair, LONG);
    let guest = Guest::new(&mut mediator);
    guest.submit(&mut mediator, 1, 0, &acquire(RAM_VA, 1));
    let start = Moment::now();
    mediator.tick(start).expect("the GPU is there");
    let time = Duration::from_secs(5);
    let clients = mediator.clients(start + time);
    assert_eq!(u128::from(clients[0].device_time), time.as_nanos());
}

#[test]
fn a_freed_page_is_allocated_again_only_after_a_flush() {
    let mut reserve = memory::Reserve::new(MIB).expect("there is memory");
    let first = reserve.take(64, 1).expect("it is free");
    let mut quota = space::Quota::new(first, 64);
    let page = quota.take(&mut reserve, 40, 1).expect("it is free");
    quota.give(page, 40);
    assert!(quota.awaits_flush());
    let other = quota.take(&mut reserve, 20, 1).expect("it is free");
    assert!(other.0 >= page.0 + 40, "{other:?}");
    assert!(!quota.fits(&[space::table(Size::Small)]));
    quota.give(other, 20);
    quota.flushed();
    assert!(quota.fits(&[space::table(Size::Small)]));
    assert_eq!(quota.take(&mut reserve, 40, 1).expect("it is free"), page);
}

#[test]
fn tables_that_come_and_go_end_no_space_for_want_of_a_flush() {
    let mut mediator = gpu("come-and-go", Name::Fair, Duration::from_secs(5));
    let guest = Guest::bare(&mut mediator);
    for round in 0..100 {
        for table in 10..15 {
            let size = Size::Small;
            let space = 1;
            let request = Request::Table { table, size, space };
            guest.ask(&mut mediator, request).expect("it is new");
        }
        for table in 10..15 {
            let request = Request::TableGone { table };
            guest.ask(&mut mediator, request).expect("it exists");
        }
        let figures = mediator.figures(guest.id).expect("it is there");
        assert_eq!(figures.spaces_ended, 0, "in round {round}");
    }
}

/// Longer than it takes to submit, and to run what was submitted.
const SLOW: Delays = Delays {
    flush: 50_000_000,
    run_list: 50_000_000,
};

#[test]
fn a_page_that_is_mapped_elsewhere_is_never_used_where_it_was() {
    let mut mediator = gpu_with("flush", Name::Fair, LONG, SLOW);
    let guest = Guest::new(&mut mediator);
    let word = |page: u64| read(&guest.vram, (page * PAGE) as usize);
    let submit = |mediator: &mut Mediator, number| {
        guest.submit(mediator, 1, 0, &release(VRAM_VA + 8 * PAGE, number));
        done(mediator, &guest, 1);
    };
    submit(&mut mediator, 1);
    for (number, page) in (2_u32..).zip(9..12) {
        let run = Run {
            index: ((VRAM_VA >> 12) % 0x8000) as u16 + 8,
            count: 1,
            first: Some(Target::Vram(VramPage(page))),
            read_only: false,
            kind: 0,
        };
        let (table, runs) = (1, vec![run]);
        guest
            .ask(&mut mediator, Request::Map { table, runs })
            .expect("they are there");
        submit(&mut mediator, number);
    }
    assert_eq!([8, 9, 10, 11].map(word), [1, 2, 3, 4]);
}

#[test]
fn a_gpu_that_does_not_finish_a_flush_is_lost() {
    let delays = Delays {
        flush: u64::MAX,
        ..Delays::default()
    };
    let mut mediator = gpu_with("hang", Name::Fair, LONG, delays);
    let guest = Guest::new(&mut mediator);
    guest.submit(&mut mediator, 1, 0, &release(VRAM_VA, 1));
    let failure = mediator.tick(Moment::now()).expect_err("it never ends");
    assert!(matches!(failure, Failure::Hangs(_)), "{failure}");
}

#[test]
fn each_new_channel_runs_however_long_a_run_list_takes() {
    let delays = Delays {
        run_list: SLOW.run_list,
        ..Delays::default()
    };
    let mut mediator = gpu_with("lists", Name::Fair, LONG, delays);
    let guest = Guest::new(&mut mediator);
    for channel in 1..=4 {
        if channel > 1 {
            guest.bind(&mut mediator, channel).expect("there is one");
        }
        let at = u64::from(channel) * 64;
        let words = release(RAM_VA + at, channel.into());
        guest.submit(&mut mediator, channel, at, &words);
        // It gets its place.
        mediator.tick(Moment::now()).expect("the GPU is there");
    }
    for channel in [4, 3, 2, 1] {
        let start = Instant::now();
        while read(&guest.ram, channel * 64) != channel as u32 {
            assert!(start.elapsed() < Duration::from_secs(20), "{channel}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Words that copy this many lines of 64 KiB of VRAM onto the same ones, which cannot be stopped.
fn long_copy(lines: u32) -> Vec<u32> {
    let mut words = copy(VRAM_VA, VRAM_VA + PAGE, 16 * PAGE as u32 - 1);
    // The pitches, and the number of lines.
    (words[7], words[8], words[10]) = (0, 0, lines);
    words
}

/// Offsets in VRAM of a kernel, and of the word that it writes.
const CODE: u64 = 0x800;
const WORD: u64 = 0x1ff0;

/// Submits a kernel that writes a word over and over, and lets it begin.
fn run_endless_kernel(mediator: &mut Mediator, guest: &Guest) {
    const ADDRESS: u8 = 2;
    const ONE: u8 = 4;
    let store = Operation::Store {
        address: ADDRESS,
        offset: 0,
    };
    let kernel = [
        (ADDRESS, Operation::Immediate((VRAM_VA + WORD) as u32)),
        (ADDRESS + 1, Operation::Immediate(0)),
        (ONE, Operation::Immediate(1)),
        (ONE, store),
        (0, Operation::Branch(-16)),
    ];
    for (at, (register, operation)) in (CODE as usize..).step_by(8).zip(kernel) {
        let raw = Instruction::new(register, operation).encode();
        write(&guest.vram, at, raw as u32);
        write(&guest.vram, at + 4, (raw >> 32) as u32);
    }
    let mut words = methods(1, 0, &[0x90c0]);
    words.extend(methods(1, 0x1608, &[0, (VRAM_VA + CODE) as u32]));
    // One thread, in one block.
    words.extend(methods(1, 0x3ac, &[1 << 16 | 1, 1, 0]));
    words.extend(methods(1, 0x238, &[1 << 16 | 1, 1]));
    words.extend(methods(1, 0x368, &[0x1000]));
    guest.submit(mediator, 1, 0, &words);
    let start = Instant::now();
    while read(&guest.vram, WORD as usize) == 0 {
        mediator.tick(Moment::now()).expect("the GPU is there");
        assert!(start.elapsed() < Duration::from_secs(20), "nothing comes");
    }
}

/// Whether the word stays as the CPU writes it.
fn is_quiet(guest: &Guest) -> bool {
    write(&guest.vram, WORD as usize, 0);
    std::thread::sleep(Duration::from_millis(50));
    read(&guest.vram, WORD as usize) == 0
}

#[test]
fn a_command_is_over_before_others_have_a_turn_and_is_whole() {
    let mut mediator = gpu("whole", Name::Fair, LONG);
    let (one, other) = (Guest::new(&mut mediator), Guest::new(&mut mediator));
    let mut words = long_copy(1000);
    words.extend(release(RAM_VA + 16, 2));
    one.submit(&mut mediator, 1, 0, &words);
    mediator.tick(Moment::now()).expect("the GPU is there");
    for nth in 1..4 {
        other.submit(&mut mediator, 1, 0, &release(RAM_VA, nth));
        done(&mut mediator, &other, 1);
        let (figures, is_left) = (mediator.figures(one.id), mediator.running().next());
        let figures = figures.expect("it is there");
        assert!(figures.submissions == 1 || figures.stopped > 0 && is_left.is_some());
    }
    done(&mut mediator, &one, 1);
    assert_eq!(read(&one.ram, 16), 2);
    assert_eq!(mediator.figures(one.id).expect("it is there").ended, 0);
}

#[test]
fn an_engine_serves_another_channel_after_a_command() {
    const COPIES: u32 = 0x300;
    let mut mediator = gpu("engine", Name::Fair, LONG);
    let guest = Guest::new(&mut mediator);
    guest.bind(&mut mediator, 2).expect("there is one");
    let mut words = long_copy(16);
    // The same again and again: one method with many words.
    words.push(3 << 29 | COPIES << 16 | 4 << 13 | 0x300 >> 2);
    words.extend([0x110; COPIES as usize]);
    guest.submit(&mut mediator, 1, 0, &words);
    let words = copy(VRAM_VA, VRAM_VA + 0x1_c000, 64);
    guest.submit(&mut mediator, 2, 0xf00, &words);
    done(&mut mediator, &guest, 2);
    assert!(mediator.running().any(|(_, channel)| channel == 1));
}

#[test]
fn a_command_without_end_is_lost_at_the_limit_and_nobody_elses() {
    let mut mediator = gpu("endless", Name::Fair, Duration::from_millis(300));
    let (bad, good) = (Guest::new(&mut mediator), Guest::new(&mut mediator));
    run_endless_kernel(&mut mediator, &bad);
    good.submit(&mut mediator, 1, 0, &release(RAM_VA, 5));
    done(&mut mediator, &good, 1);
    assert_eq!(read(&good.ram, 0), 5);
    until(&mut mediator, &bad, |event| {
        matches!(event, Event::Late { channel: 1, .. })
    });
    let unbind = Request::Unbind { channel: 1 };
    bad.ask(&mut mediator, unbind).expect("it is bound");
    bad.bind(&mut mediator, 1).expect("it is free");
    bad.submit(&mut mediator, 1, 0, &release(RAM_VA, 3));
    done(&mut mediator, &bad, 1);
}

#[test]
fn a_channel_that_has_been_unbound_writes_nothing_more() {
    let mut mediator = gpu("over", Name::Fair, LONG);
    let guest = Guest::new(&mut mediator);
    run_endless_kernel(&mut mediator, &guest);
    assert!(!is_quiet(&guest));
    let unbind = Request::Unbind { channel: 1 };
    guest.ask(&mut mediator, unbind).expect("it is bound");
    assert!(is_quiet(&guest));
    guest.bind(&mut mediator, 1).expect("it is free");
    guest.submit(&mut mediator, 1, 0, &release(RAM_VA, 3));
    done(&mut mediator, &guest, 1);
}

#[test]
fn a_front_is_told_that_a_channel_has_stopped_when_it_has() {
    let mut mediator = gpu("told", Name::Fair, LONG);
    let guest = Guest::new(&mut mediator);
    run_endless_kernel(&mut mediator, &guest);
    let (channel, stopped) = (1, true);
    let stop = Request::Stop { channel, stopped };
    guest.ask(&mut mediator, stop).expect("it is bound");
    let ask = Request::Sync { number: 9 };
    guest.ask(&mut mediator, ask).expect("it may");
    assert_eq!(mediator.event(guest.id), None, "the kernel runs");
    until(&mut mediator, &guest, |event| {
        *event == Event::Synced { number: 9 }
    });
    assert!(is_quiet(&guest));
}
