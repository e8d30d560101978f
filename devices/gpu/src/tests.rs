//! What a guest's driver does with a virtual GPU, against the mediator and the model of the GPU:
//! registers, tables and instance blocks as nouveau writes them, and as it would never write them.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use base::{Access, Mapping as Memory};
use device_model::{
    bus::BusDevice,
    memory::{AddressSpace, GuestMemory},
};
use gf100::{
    device::{
        gpu::Delays,
        server::{Settings, serve},
    },
    format::{
        Aperture, Gfn, PAGE, Target, VramPage,
        directory::{Pde, Table},
        instance::{self, InstanceBlock, Space},
        pte::Pte,
        push::{GpEntry, Header, Run},
        ramfc::{self, Ramfc},
        userd::{self, Window},
    },
    recording::{Place, Record, Recording},
    registers::{BAR_FLUSH, BAR_FLUSHING, TRANSLATED, TRANSLATIONS},
};
use gpu_mediator::{
    gpu::{server, wire::Event},
    policy::Name,
};
use vm_memory::{FileOffset, GuestAddress, GuestRegionCollection, GuestRegionMmap, MmapRegion};

use super::{
    Options,
    fake_space::FakeSpace,
    front::{Bar0, Front, Shown},
};

mod changes;
mod floods;

const VRAM: u64 = 64 << 20;
const RAM: u64 = 1 << 20;

/// Pages of VRAM that the guest uses. Its tables are where the GPU cannot access them.
const DIRECTORY: u32 = 0x1100;
const SMALL: u32 = 0x1200;
const INSTANCE: u32 = 0x300;
const LIST: u32 = 0x301;
const RING: u32 = 0x302;
const PUSH: u32 = 0x303;
const BAR_DIRECTORY: u32 = 0x400;
const BAR_SMALL: u32 = 0x500;
const BAR_INSTANCE: u32 = 0x600;
const USERD: u32 = 0x700;

/// GPU addresses of the first pages of VRAM and RAM.
const VRAM_VA: u64 = 0x10_0000;
const RAM_VA: u64 = 0x400_0000;

/// Starts a GPU and a mediator, until the test's process ends.
fn mediator(folder: &Path) -> PathBuf {
    let (model, socket) = (folder.join("model"), folder.join("gpu"));
    let path = model.clone();
    std::thread::spawn(move || {
        let settings = Settings {
            vram: 256 << 20,
            map: false,
            confine: false,
            delays: Delays::default(),
        };
        serve(&path, settings).map_err(|error| panic!("{error}"))
    });
    wait("the model", || model.exists());
    let mut server = None;
    // Its socket is there before it listens.
    wait("the model's answer", || {
        let settings = server::Settings {
            policy: Name::Fair,
            // Nothing here runs forever.
            limit: Duration::from_secs(60),
        };
        match server::Server::new(&model, &socket, settings) {
            Ok(started) => server = Some(started),
            Err(error) => assert!(
                format!("{error:?}").contains("ConnectionRefused"),
                "{error:?}"
            ),
        }
        server.is_some()
    });
    let mut server = server.unwrap();
    std::thread::spawn(move || server.run());
    socket
}

fn wait(what: &str, mut is: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is() {
        assert!(
            start.elapsed() < Duration::from_secs(20),
            "{what} does not come"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A guest with channel 5, whose address space contains the first 8 MiB of VRAM and all of RAM.
struct Guest {
    front: Arc<Front>,
    space: Arc<FakeSpace>,
    registers: Bar0,
    bar1: Shown,
    ram: Memory,
    put: std::cell::Cell<u32>,
}

const CHANNEL: u32 = 5;

/// Addresses of the guest's BARs, and the page of BAR 1 where the table of small pages is shown.
const BAR0: u64 = 0xf000_0000;
const BAR1: u64 = 0xe000_0000;
const SHOWN: u64 = 1000;

impl Guest {
    fn new(socket: &Path) -> Self {
        Self::with(socket, |_| {})
    }

    fn with(socket: &Path, change: impl FnOnce(&mut Options)) -> Self {
        let guest = Self::made(socket, change, |_| {});
        guest.listen();
        wait("the BARs", || guest.is_shown());
        guest
    }

    /// Starts to handle messages of the mediator.
    fn listen(&self) {
        let worker = Arc::clone(&self.front);
        std::thread::spawn(move || worker.work(None));
    }

    /// A guest whose front receives messages, but handles none before it [listens](Self::listen).
    /// Its accesses leave nothing to be done then.
    fn deaf(socket: &Path) -> Self {
        let unlimited = Duration::from_secs(3600);
        Self::made(socket, |_| {}, |front| front.set_step(unlimited))
    }

    fn made(
        socket: &Path,
        change: impl FnOnce(&mut Options),
        prepare: impl FnOnce(&mut Front),
    ) -> Self {
        let file = sealed(RAM);
        let ram = Memory::shared(&file, 0, RAM as usize, Access::ReadWrite).unwrap();
        let region = MmapRegion::from_file(FileOffset::new(file, 0), RAM as usize).unwrap();
        let region = GuestRegionMmap::new(region, GuestAddress(0)).unwrap();
        let memory = GuestRegionCollection::from_regions(vec![region]).unwrap();
        let mut options = Options {
            socket: socket.to_owned(),
            vram: VRAM,
            channels: 128,
            weight: 1,
            remap: true,
            lazy: true,
            watch: true,
            record: None,
            thread_name: "gpu".to_owned(),
        };
        change(&mut options);
        let space = Arc::new(FakeSpace::default());
        let its: Arc<dyn AddressSpace> = Arc::clone(&space) as _;
        let mut front = Front::new(&options, &its, GuestMemory::new(memory)).unwrap();
        prepare(&mut front);
        let front = Arc::new(front);
        std::thread::spawn(front.receiver().unwrap());
        let guest = Self {
            registers: Bar0(Arc::clone(&front)),
            bar1: Shown(Arc::clone(&front), 0),
            front,
            space,
            ram,
            put: std::cell::Cell::new(0),
        };
        guest.start();
        guest
    }

    fn set(&self, at: u32, value: u32) {
        self.registers.write(at.into(), &value.to_le_bytes());
    }

    fn get(&self, at: u32) -> u32 {
        let mut word = [0; 4];
        self.registers.read(at.into(), &mut word);
        u32::from_le_bytes(word)
    }

    /// Writes to VRAM through the window in BAR 0.
    fn poke(&self, at: u64, word: u32) {
        self.set(0x00_1700, (at >> 16) as u32);
        self.set(0x70_0000 + (at & 0xffff) as u32, word);
    }

    fn poke64(&self, at: u64, word: u64) {
        self.poke(at, word as u32);
        self.poke(at + 4, (word >> 32) as u32);
    }

    fn poke_all(&self, page: u32, bytes: &[u8]) {
        let at = u64::from(page) * PAGE;
        for (at, word) in (at..).step_by(4).zip(bytes.chunks_exact(4)) {
            self.poke(at, u32::from_le_bytes([word[0], word[1], word[2], word[3]]));
        }
    }

    /// Writes entries of a small table.
    fn map(&self, table: u32, first: u64, targets: impl Iterator<Item = Target>) {
        let at = u64::from(table) * PAGE;
        for (index, target) in (first..).zip(targets) {
            self.poke64(at + index * 8, Pte::linear(target).encode());
        }
    }

    fn space(&self, directory: u32, table: u32) -> Space {
        let entry = Pde {
            small: Some(Table {
                aperture: Aperture::Vram,
                number: table,
            }),
            ..Pde::default()
        };
        self.poke64(u64::from(directory) * PAGE, entry.encode());
        Space {
            aperture: Aperture::Vram,
            number: directory,
            limit: (1 << 40) - 1,
        }
    }

    fn start(&self) {
        let pages = |first: u32, count: u32| (first..first + count).map(VramPage).map(Target::Vram);
        self.map(SMALL, VRAM_VA / PAGE, pages(0, 2048));
        self.map(SMALL, RAM_VA / PAGE, (0..256).map(Gfn).map(Target::Ram));
        self.space(DIRECTORY, SMALL);
        self.instance(INSTANCE, CHANNEL);

        self.map(BAR_SMALL, 0, pages(USERD, 128));
        let space = self.space(BAR_DIRECTORY, BAR_SMALL);
        let mut bytes = [0; instance::BYTES];
        let engines = Default::default();
        InstanceBlock { space, engines }.encode(&mut bytes);
        self.poke_all(BAR_INSTANCE, &bytes);
        self.set(0x00_1704, 1 << 31 | BAR_INSTANCE);
        self.set(0x00_2254, Window { start: 0 }.encode());
        self.channel();
    }

    /// Writes the instance block of a channel.
    fn instance(&self, page: u32, channel: u32) {
        let space = Space {
            aperture: Aperture::Vram,
            number: DIRECTORY,
            limit: (1 << 40) - 1,
        };
        let mut bytes = [0; instance::BYTES];
        let engines = Default::default();
        InstanceBlock { space, engines }.encode(&mut bytes);
        let mut head = [0; ramfc::BYTES];
        Ramfc {
            userd: u64::from(USERD + channel) * PAGE,
            signature: ramfc::SIGNATURE,
            gp_base: VRAM_VA + u64::from(RING) * PAGE,
            gp_log2: 9,
            ..Ramfc::default()
        }
        .encode(&mut head);
        bytes[..ramfc::BYTES].copy_from_slice(&head);
        self.poke_all(page, &bytes);
    }

    /// Creates the channel (again).
    fn channel(&self) {
        let at = 0x00_3000 + CHANNEL * 8;
        self.set(at + 4, 0x001f_0000);
        self.set(at, 0);
        self.poke(u64::from(INSTANCE) * PAGE, 0);
        self.poke(u64::from(INSTANCE) * PAGE + 0x14, 0);
        self.put.set(0);
        self.set(at, 0xc000_0000 | INSTANCE);
        self.set(at + 4, 0x001f_0001);
        self.poke64(u64::from(LIST) * PAGE, u64::from(CHANNEL) | 4 << 32);
        self.set(0x00_2270, LIST);
        self.set(0x00_2274, 0x01f0_0001);
    }

    /// Writes a word through BAR 1, as the guest does.
    fn write_bar1(&self, offset: u64, word: u32) {
        if !self.space.write(BAR1 + offset, word) {
            self.bar1.write(offset, &word.to_le_bytes());
        }
    }

    /// Shows the table of small pages in BAR 1, from page `page` of the BAR on.
    fn show_table(&self, page: u64) {
        self.map(
            BAR_SMALL,
            page,
            (SMALL..SMALL + 64).map(VramPage).map(Target::Vram),
        );
        self.flush_bar();
    }

    fn flush_bar(&self) {
        self.begin_to_flush_bar();
        wait("the flush", || self.is_flushed());
    }

    fn begin_to_flush_bar(&self) {
        self.set(0x10_0cb8, BAR_DIRECTORY << 4);
        self.set(0x10_0cbc, 1 << 31 | 5);
    }

    /// Whether all flushes are done.
    fn is_flushed(&self) -> bool {
        self.get(TRANSLATIONS) & TRANSLATED != 0
    }

    /// Whether the BARs show what their tables say.
    fn is_shown(&self) -> bool {
        self.get(BAR_FLUSH) & BAR_FLUSHING == 0
    }

    /// Remaps the first page of RAM's addresses to another page, by an entry that is written
    /// through BAR 1, where the table is shown from `page` on.
    fn remap_by_bar1(&self, page: u64, to: u32) {
        let entry = Pte::linear(Target::Ram(Gfn(to))).encode();
        let at = page * PAGE + RAM_VA / PAGE * 8;
        self.write_bar1(at, entry as u32);
        self.write_bar1(at + 4, (entry >> 32) as u32);
    }

    fn lands(&self, word: u32, page: u32) {
        self.release(RAM_VA, word);
        wait("the word", || {
            self.ram(page as usize * PAGE as usize) == word
        });
    }

    fn flush(&self) {
        self.set(0x10_0cb8, DIRECTORY << 4);
        self.set(0x10_0cbc, 1 << 31 | 1);
        wait("the flush", || self.is_flushed());
    }

    fn doorbell(&self, put: u32) {
        let at = u64::from(CHANNEL) * userd::STRIDE + userd::GP_PUT;
        self.bar1.write(at, &put.to_le_bytes());
    }

    /// Submits a semaphore release of a word to an address.
    fn release(&self, to: u64, word: u32) {
        self.prepare(to, word);
        self.doorbell(self.put.get());
    }

    /// Writes such a release to the ring, without ringing the doorbell.
    fn prepare(&self, to: u64, word: u32) {
        self.push(&semaphore(to, word, 1 << 24 | 2));
    }

    /// Writes up to 32 commands and a ring entry for them, without ringing the doorbell.
    fn push(&self, words: &[u32]) {
        let put = self.put.get();
        let at = u64::from(PUSH) * PAGE + u64::from(put) * 128;
        for (at, word) in (at..).step_by(4).zip(words) {
            self.poke(at, *word);
        }
        let entry = GpEntry {
            address: VRAM_VA + at,
            words: words.len() as u32,
        };
        self.poke64(u64::from(RING) * PAGE + u64::from(put) * 8, entry.encode());
        self.put.set(put + 1);
    }

    fn ram(&self, at: usize) -> u32 {
        assert!(at + 4 <= self.ram.len());
        // SAFETY: within the mapping and aligned.
        unsafe { self.ram.start().add(at).cast::<u32>().read_volatile() }
    }

    fn set_ram(&self, at: usize, word: u32) {
        assert!(at + 4 <= self.ram.len());
        // SAFETY: within the mapping and aligned.
        unsafe { self.ram.start().add(at).cast::<u32>().write_volatile(word) };
    }

    /// How far the ring was fetched, as the guest sees it.
    fn fetched(&self) -> u32 {
        let mut word = [0; 4];
        let at = u64::from(CHANNEL) * userd::STRIDE + userd::GP_GET;
        self.bar1.read(at, &mut word);
        u32::from_le_bytes(word)
    }

    fn works(&self, word: u32) {
        self.release(RAM_VA, word);
        let put = self.put.get();
        wait("the ring's end", || self.fetched() == put);
        // Fetched does not mean executed.
        wait("the semaphore", || self.ram(0) == word);
    }

    fn faults(&self) -> u32 {
        self.get(0x00_259c)
    }

    /// Returns the fault, and creates the channel again.
    fn take_fault(&self) -> [u32; 4] {
        wait("a fault", || self.faults() != 0);
        let unit = self.faults().trailing_zeros();
        let fault = [0, 4, 8, 12].map(|at| self.get(0x00_2800 + unit * 16 + at));
        self.set(0x00_259c, u32::MAX);
        self.channel();
        fault
    }

    fn counter(&self, name: &str) -> u64 {
        let counters = self.front.counters();
        counters
            .into_iter()
            .find(|(its, _)| *its == name)
            .unwrap()
            .1
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.front.end();
    }
}

fn sealed(len: u64) -> std::fs::File {
    let flags = rustix::fs::MemfdFlags::CLOEXEC | rustix::fs::MemfdFlags::ALLOW_SEALING;
    let file = std::fs::File::from(rustix::fs::memfd_create("ram", flags).unwrap());
    file.set_len(len).unwrap();
    rustix::fs::fcntl_add_seals(&file, rustix::fs::SealFlags::SHRINK).unwrap();
    file
}

#[test]
fn what_a_guest_does_is_recorded_with_what_the_gpu_reads_of_its_ram() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("recording");
    let guest = Guest::with(&mediator(folder.path()), |options| {
        options.remap = false;
        options.record = Some(path.clone());
    });
    // A ring entry in VRAM, for a push buffer in RAM that waits for a word there before it writes
    // another one.
    let command = |to: u64, word: u32, how: u32| {
        let run = Header::Increasing(Run {
            subchannel: 0,
            address: 0x10,
            count: 4,
        });
        [run.encode(), (to >> 32) as u32, to as u32, word, how]
    };
    let words = [
        command(RAM_VA + 0x100, 7, 1 << 24 | 4),
        command(RAM_VA, 41, 1 << 24 | 2),
    ]
    .concat();
    for (at, word) in (0x2000..).step_by(4).zip(&words) {
        guest.set_ram(at, *word);
    }
    let entry = GpEntry {
        address: RAM_VA + 0x2000,
        words: words.len() as u32,
    };
    guest.poke64(u64::from(RING) * PAGE, entry.encode());
    guest.put.set(1);
    guest.doorbell(1);
    guest.set_ram(0x100, 9);
    wait("the ring's end", || guest.fetched() == 1);
    assert_eq!(guest.ram(0), 41);
    guest.counter("doorbells");
    let recording = Recording::parse(&std::fs::read(&path).unwrap()).unwrap();
    assert_eq!(recording.vram, VRAM);
    let at = |is: &dyn Fn(&Record) -> bool| recording.records.iter().position(is);
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let pushed =
        at(&|record| matches!(record, Record::Ram { at: 0x2000, bytes: its } if *its == bytes));
    let bell = u64::from(CHANNEL) * userd::STRIDE + userd::GP_PUT;
    let rung = at(&|record| {
        matches!(record, Record::Access(run)
            if run.write && run.place == Place::Bar1 && (run.offset, run.value) == (bell, 1))
    });
    let released =
        at(&|record| matches!(record, Record::Ram { at: 0x100, bytes } if *bytes == [9, 0, 0, 0]));
    let done = at(&|record| {
        let (channel, get, entries) = (CHANNEL as u8, 1, 512);
        *record
            == Record::Done {
                channel,
                get,
                entries,
            }
    });
    let order = [pushed, rung, released, done];
    assert!(order.iter().all(Option::is_some), "{order:?}");
    assert!(order.is_sorted(), "{order:?}");
    // The recording is complete: the first access, and as many as there were exits.
    let accesses = recording.records.iter().filter_map(|record| match record {
        Record::Access(run) => Some(run.count),
        _ => None,
    });
    let exits: u64 = gantry_tests::gpuvm::EXIT_COUNTERS
        .iter()
        .map(|kind| guest.counter(kind))
        .sum();
    assert_eq!(accesses.sum::<u64>(), exits);
}

#[test]
fn a_driver_submits_and_hears_of_the_end() {
    let folder = tempfile::tempdir().unwrap();
    let guest = Guest::new(&mediator(folder.path()));
    guest.works(41);
    guest.works(42);
    wait("an interrupt", || guest.get(0x00_25a8) != 0);
    assert_eq!(guest.counter("doorbells"), 2);
    assert_eq!(guest.counter("syncs"), 1, "tables have not changed");
}

#[test]
fn what_a_stopped_channel_has_done_is_not_done_again() {
    let folder = tempfile::tempdir().unwrap();
    let guest = Guest::deaf(&mediator(folder.path()));
    guest.release(RAM_VA, 1);
    let is_done = |event: &Event| matches!(event, Event::Done { .. });
    wait("the end", || guest.front.has_heard(is_done));
    guest.set_ram(0, 0);
    let enable = 0x00_3004 + CHANNEL * 8;
    guest.set(enable, 0x001f_0000);
    assert!(!guest.front.has_heard(is_done), "the next work's end");
    guest.set(enable, 0x001f_0001);
    guest.listen();
    guest.release(RAM_VA + 4, 2);
    wait("what comes next", || guest.ram(4) == 2);
    assert_eq!(guest.ram(0), 0);
}

/// Words for consecutive methods of a subchannel.
fn methods(subchannel: u8, address: u16, words: &[u32]) -> Vec<u32> {
    let run = Header::Increasing(Run {
        subchannel,
        address,
        count: words.len() as u16,
    });
    let mut all = vec![run.encode()];
    all.extend(words);
    all
}

fn semaphore(at: u64, word: u32, how: u32) -> Vec<u32> {
    methods(0, 0x10, &[(at >> 32) as u32, at as u32, word, how])
}

#[test]
fn a_stopped_channel_goes_on_where_it_was_with_its_engines_state() {
    const FLAG: usize = 0x200;
    const ENABLE: u32 = 0x00_3004 + CHANNEL * 8;
    let [stop, go]: [fn(&Guest); 2] = [
        |guest| guest.set(ENABLE, 0x001f_0000),
        |guest| guest.set(ENABLE, 0x001f_0001),
    ];
    // As nouveau does since Linux 6.2 to give a channel one more engine.
    let kick: fn(&Guest) = |guest| {
        guest.set(ENABLE, 0x001f_0000);
        guest.set(0x00_2634, CHANNEL);
    };
    let list: [fn(&Guest); 2] = [
        |guest| guest.set(0x00_2274, 0x01f0_0000),
        |guest| guest.set(0x00_2274, 0x01f0_0001),
    ];
    let folder = tempfile::tempdir().unwrap();
    let socket = mediator(folder.path());
    let other = Guest::new(&socket);
    for [stop, go] in [[stop, go], [kick, go], list] {
        for is_idle in [false, true] {
            let guest = Guest::new(&socket);
            guest.set_ram(0x800, 0x5eed);
            // An object for copies, told what to copy, but not to copy.
            let mut words = methods(4, 0, &[0x90b5]);
            let from = (RAM_VA + 0x800) as u32;
            let to = (RAM_VA + 0x900) as u32;
            words.extend(methods(4, 0x30c, &[0, from, 0, to, 4, 4, 4, 1]));
            words.extend(semaphore(RAM_VA, 1, 1 << 24 | 2));
            guest.push(&words);
            guest.doorbell(1);
            wait("the ring's end", || guest.fetched() == 1);
            guest.set_ram(0, 0);
            if !is_idle {
                let mut words = semaphore(RAM_VA, 2, 1 << 24 | 2);
                words.extend(semaphore(RAM_VA + FLAG as u64, 7, 1 << 24 | 1));
                guest.push(&words);
                guest.doorbell(2);
                wait("its first word", || guest.ram(0) == 2);
                guest.set_ram(0, 0);
            }
            stop(&guest);
            guest.set_ram(FLAG, 7);
            let mut words = methods(4, 0x300, &[0x110]);
            words.extend(semaphore(RAM_VA + 4, 3, 1 << 24 | 2));
            guest.push(&words);
            guest.doorbell(guest.put.get());
            // In turns, so the channel's would have come.
            other.works(other.put.get() + 1);
            assert_eq!(guest.ram(4), 0, "it is stopped");
            go(&guest);
            wait("the last word", || guest.ram(4) == 3);
            assert_eq!(guest.ram(0x900), 0x5eed, "the copy");
            assert_eq!(guest.ram(0), 0, "what was done is not done again");
            assert_eq!((guest.faults(), guest.get(0x04_0108)), (0, 0));
        }
    }
}

#[test]
fn a_channel_whose_ring_is_moved_back_while_it_is_stopped_does_it_again() {
    let folder = tempfile::tempdir().unwrap();
    let socket = mediator(folder.path());
    for has_invalid_put in [false, true] {
        let guest = Guest::new(&socket);
        guest.works(1);
        if has_invalid_put {
            guest.doorbell(u32::MAX);
        }
        let enable = 0x00_3004 + CHANNEL * 8;
        guest.set(enable, 0x001f_0000);
        guest.set(0x00_2634, CHANNEL);
        guest.set_ram(0, 0);
        guest.poke(u64::from(INSTANCE) * PAGE + 0x14, 0);
        guest.set(enable, 0x001f_0001);
        if has_invalid_put {
            guest.doorbell(1);
        }
        wait("the word", || guest.ram(0) == 1);
    }
}

#[test]
fn a_fault_that_is_heard_when_the_ring_is_changed_ends_the_channel() {
    let folder = tempfile::tempdir().unwrap();
    let guest = Guest::deaf(&mediator(folder.path()));
    let outside = Target::Vram(VramPage((VRAM / PAGE) as u32));
    guest.map(SMALL, RAM_VA / PAGE, std::iter::once(outside));
    guest.release(RAM_VA, 1);
    let is_fault = |event: &Event| matches!(event, Event::Fault { .. });
    wait("a fault", || guest.front.has_heard(is_fault));
    // Another submission page, so the channel must be bound again.
    guest.instance(INSTANCE, CHANNEL + 1);
    let messages = guest.counter("messages");
    guest.doorbell(1);
    assert_eq!(guest.counter("messages"), messages + 2, "it leaves only");
    let [instance, low, high, _] = guest.take_fault();
    assert_eq!(instance, INSTANCE);
    assert_eq!(u64::from(high) << 32 | u64::from(low), RAM_VA);
}

#[test]
fn a_put_pointer_within_a_longer_write_is_a_doorbell() {
    let folder = tempfile::tempdir().unwrap();
    let guest = Guest::new(&mediator(folder.path()));
    guest.works(1);
    guest.prepare(RAM_VA, 2);
    let at = u64::from(CHANNEL) * userd::STRIDE + userd::GP_GET;
    let put = u64::from(guest.put.get()) << 32;
    guest.bar1.write(at, &put.to_le_bytes());
    wait("the word", || guest.ram(0) == 2);
    assert_eq!(guest.counter("doorbells"), 2);
}

#[test]
fn changed_tables_are_seen_after_a_flush() {
    let folder = tempfile::tempdir().unwrap();
    let guest = Guest::new(&mediator(folder.path()));
    guest.works(1);
    let index = RAM_VA / PAGE;
    guest.map(SMALL, index, std::iter::once(Target::Ram(Gfn(9))));
    guest.flush();
    guest.release(RAM_VA, 7);
    wait("the word", || guest.ram(9 * PAGE as usize) == 7);
    assert_eq!(guest.ram(0), 1);
    assert_eq!(guest.counter("entries_told"), 2048 + 256 + 1);
}

#[test]
fn tables_changed_often_are_compared_once_at_a_submission() {
    let folder = tempfile::tempdir().unwrap();
    let guest = Guest::new(&mediator(folder.path()));
    guest.works(1);
    let before = guest.counter("syncs");
    for page in 1..=8 {
        guest.map(
            SMALL,
            RAM_VA / PAGE,
            std::iter::once(Target::Ram(Gfn(page))),
        );
        guest.flush();
    }
    assert_eq!(guest.counter("syncs"), before);
    guest.release(RAM_VA, 7);
    wait("the word", || guest.ram(8 * PAGE as usize) == 7);
    assert_eq!(guest.counter("syncs"), before + 1);
}

#[test]
fn what_a_guest_maps_beyond_its_own_faults_and_its_neighbour_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let socket = mediator(folder.path());
    let (bad, good) = (Guest::new(&socket), Guest::new(&socket));
    good.works(1);
    for target in [
        Target::Vram(VramPage((VRAM / PAGE) as u32)),
        Target::Vram(VramPage((1 << 28) - 1)),
        Target::Ram(Gfn((RAM / PAGE) as u32)),
    ] {
        bad.map(SMALL, RAM_VA / PAGE, std::iter::once(target));
        bad.flush();
        bad.release(RAM_VA, 0xbad);
        let [instance, low, high, _] = bad.take_fault();
        assert_eq!(instance, INSTANCE, "as the guest numbers it");
        assert_eq!(u64::from(high) << 32 | u64::from(low), RAM_VA);
    }
    bad.map(SMALL, RAM_VA / PAGE, std::iter::once(Target::Ram(Gfn(0))));
    bad.flush();
    bad.works(3);
    good.works(2);
}

#[test]
fn pointers_to_nowhere_cost_the_channel_at_most() {
    let folder = tempfile::tempdir().unwrap();
    let socket = mediator(folder.path());
    let guest = Guest::new(&socket);
    // A submission beyond the ring.
    guest.doorbell(u32::MAX);
    wait("an error of the ring's pointers", || {
        guest.get(0x04_0108) != 0
    });
    guest.works(1);
    let instance = u64::from(INSTANCE) * PAGE;
    // Directory, tables and ring that are completely or partly outside VRAM.
    for (at, word) in [
        (instance + 0x200, 0xffff_f000_u64),
        (instance + 0x200, VRAM - PAGE),
        (instance + 0x200, 0x2002),
        (u64::from(DIRECTORY) * PAGE, u64::MAX),
        (u64::from(DIRECTORY) * PAGE, 0),
        (instance + 0x48, 0xff_ffff_fff8),
        (instance + 0x08, u64::MAX),
    ] {
        guest.channel();
        let old = [0, 4].map(|step| {
            guest.set(0x00_1700, ((at + step) >> 16) as u32);
            guest.get(0x70_0000 + ((at + step) & 0xffff) as u32)
        });
        guest.poke64(at, word);
        guest.flush();
        guest.doorbell(1);
        guest.set(0x00_2634, CHANNEL);
        guest.poke64(at, u64::from(old[1]) << 32 | u64::from(old[0]));
        guest.set(0x00_259c, u32::MAX);
        guest.channel();
        guest.flush();
        guest.works(word as u32);
    }
    // BARs, run lists and windows with arbitrary values.
    for value in [
        0x8fff_ffff,
        0xffff_ffff,
        (1 << 31) | ((VRAM / PAGE) as u32 - 1),
    ] {
        guest.set(0x00_1704, value);
        guest.set(0x00_1714, value);
        guest.set(0x00_1700, value);
        guest.set(0x00_2254, value);
        guest.set(0x00_2270, value);
        guest.set(0x00_2274, value);
        guest.set(0x10_0cb8, value);
        guest.set(0x10_0cbc, value);
    }
    guest.front.reset();
    guest.start();
    guest.works(5);
}

#[test]
fn a_table_that_names_itself_everywhere_is_one_shadow() {
    let folder = tempfile::tempdir().unwrap();
    let guest = Guest::new(&mediator(folder.path()));
    let entry = Pde {
        small: Some(Table {
            aperture: Aperture::Vram,
            number: SMALL,
        }),
        ..Pde::default()
    };
    for index in 1..8192 {
        guest.poke64(u64::from(DIRECTORY) * PAGE + index * 8, entry.encode());
    }
    guest.works(8);
    guest.release(RAM_VA + (100 << 27), 9);
    wait("the word", || guest.ram(0) == 9);
    assert_eq!(guest.counter("entries_compared"), 32768);
}

#[test]
fn a_written_entry_costs_no_exit_and_only_its_page_is_compared() {
    let folder = tempfile::tempdir().unwrap();
    let guest = Guest::new(&mediator(folder.path()));
    guest.front.place(1, Some(BAR1)).unwrap();
    guest.show_table(SHOWN);
    guest.lands(1, 0);
    // Initially the log has all pages written.
    guest.flush();
    guest.lands(2, 0);
    let (walks, compared) = (guest.counter("walks"), guest.counter("entries_compared"));
    for (word, page) in [(3, 9), (4, 11)] {
        guest.remap_by_bar1(SHOWN, page);
        guest.flush();
        guest.lands(word, page);
    }
    assert_eq!(guest.counter("bar_writes"), 0, "exits");
    assert_eq!(
        guest.counter("walks"),
        walks,
        "tables that were read as a whole"
    );
    assert_eq!(guest.counter("entries_compared"), compared + 2 * 512);
    guest.flush();
    guest.lands(5, 11);
    assert_eq!(guest.counter("entries_compared"), compared + 2 * 512);
}

#[test]
fn every_way_to_write_a_table_is_seen() {
    let folder = tempfile::tempdir().unwrap();
    let socket = mediator(folder.path());
    for (remap, lazy, watch) in [
        (true, true, true),
        (true, false, true),
        (false, true, true),
        (true, true, false),
        (false, false, false),
    ] {
        let guest = Guest::with(&socket, |options| {
            (options.remap, options.lazy, options.watch) = (remap, lazy, watch);
        });
        guest.front.place(1, Some(BAR1)).unwrap();
        guest.show_table(SHOWN);
        guest.works(1);
        let mut at = SHOWN;
        for page in 1..40 {
            match page % 8 {
                // Show it elsewhere in the BAR after a write there, and move the BAR.
                0 => {
                    guest.remap_by_bar1(at, page);
                    let gone = (0..64).map(|page| Target::Vram(VramPage(0x2000 + page)));
                    guest.map(BAR_SMALL, at, gone);
                    at += 100;
                    guest.show_table(at);
                }
                1 => {
                    guest.remap_by_bar1(at, page);
                    guest.front.place(1, None).unwrap();
                    guest.front.place(1, Some(BAR1)).unwrap();
                }
                // Move the submission window, which changes which pages are memory.
                2 => {
                    guest.remap_by_bar1(at, page);
                    guest.set(0x00_2254, 0);
                    guest.set(0x00_2254, Window { start: 0 }.encode());
                }
                // Through the window in BAR 0.
                3 | 4 => {
                    let target = Target::Ram(Gfn(page));
                    guest.map(SMALL, RAM_VA / PAGE, std::iter::once(target));
                }
                // By the GPU, into whose address space the table is mapped.
                5 => {
                    let index = (VRAM_VA >> 12) + 1;
                    let table = Target::Vram(VramPage(SMALL + (RAM_VA / PAGE / 512) as u32));
                    guest.map(SMALL, index, std::iter::once(table));
                    guest.flush();
                    let entry = Pte::linear(Target::Ram(Gfn(page))).encode();
                    let at = VRAM_VA + PAGE + RAM_VA / PAGE % 512 * 8;
                    guest.release(at, entry as u32);
                    let put = guest.put.get();
                    wait("the ring's end", || guest.fetched() == put);
                    wait("an end", || guest.get(0x00_25a8) != 0);
                    std::thread::sleep(Duration::from_millis(20));
                    let own = Target::Vram(VramPage(1));
                    guest.map(SMALL, index, std::iter::once(own));
                }
                _ => guest.remap_by_bar1(at, page),
            }
            guest.flush();
            guest.lands(page << 8, page);
            if guest.put.get() > 100 {
                guest.channel();
            }
        }
    }
}

#[test]
fn what_is_shown_of_registers_is_what_they_contain() {
    let folder = tempfile::tempdir().unwrap();
    let guest = Guest::new(&mediator(folder.path()));
    guest.front.place(0, Some(BAR0)).unwrap();
    let compare = || {
        let mut shown = 0;
        let pages = (0..0x70_0000).step_by(0x1000).chain(0x80_0000..0x80_1000);
        for at in pages.step_by(64) {
            if let Some(word) = guest.space.read(BAR0 + u64::from(at)) {
                assert_eq!(word, guest.get(at), "{at:#x}");
                shown += 1;
            }
        }
        assert!(shown > 10, "{shown}");
    };
    for at in [0x30_0000, 0x10_0c80, 0x02_2500, 0x10_0cb8, 0x40_9604] {
        if let Some(word) = guest.space.read(BAR0 + u64::from(at)) {
            assert_eq!(word, guest.get(at), "{at:#x}");
        }
    }
    assert_eq!(guest.space.read(BAR0 + 0x30_0000).unwrap() & 0xffff, 0xaa55);
    compare();
    for at in (0x1000..0x70_0000).step_by(0x3004) {
        guest.set(at & !3, at);
    }
    guest.set(0x10_0cb8, 0x77);
    assert_eq!(guest.space.read(BAR0 + 0x10_0cb8), Some(0x77));
    // Registers without side effects are written without an exit, others are not.
    assert!(guest.space.write(BAR0 + 0x41_8800, 0x1234));
    assert_eq!(guest.get(0x41_8800), 0x1234);
    for loud in [
        0x00_1700, 0x00_3000, 0x07_0000, 0x10_0cbc, 0x30_0000, 0x00_2634,
    ] {
        assert!(!guest.space.write(BAR0 + loud, 1), "{loud:#x}");
    }
    compare();
    for live in [0x00_0100, 0x00_2100, 0x00_9400, 0x04_0108, 0x10_a1c4] {
        assert_eq!(guest.space.read(BAR0 + live), None, "{live:#x}");
    }
    guest.front.reset();
    assert_eq!(guest.space.read(BAR0 + 0x10_0cb8), Some(0));
    compare();
}

#[test]
fn a_mediator_that_comes_back_is_told_all_that_it_needs() {
    let folder = tempfile::tempdir().unwrap();
    let guest = Guest::new(&mediator(folder.path()));
    // The channel has submitted nothing, so it continues, and VRAM keeps its contents.
    guest.front.cut();
    wait("the mediator", || guest.counter("reconnections") == 1);
    guest.works(1);
    assert_eq!(guest.faults(), 0);
    // This time the engines' state of the channel is lost, so it ends.
    guest.front.cut();
    let [instance, ..] = guest.take_fault();
    assert_eq!(instance, INSTANCE);
    wait("the mediator", || guest.counter("reconnections") == 2);
    guest.works(2);
}
