//! What a guest's driver does with a virtual GPU, against the mediator and the model of the GPU: registers,
//! tables and instance blocks as nouveau writes them, and as it would never write them.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use base::{Access, Mapping as Memory};
use gf100::{
    device::server::{Settings, serve},
    format::{
        Aperture, Gfn, PAGE, Target, VramPage,
        directory::{Pde, Table},
        instance::{self, InstanceBlock, Space},
        pte::Pte,
        push::{GpEntry, Header, Run},
        ramfc::{self, Ramfc},
        userd::{self, Window},
    },
};
use gpu_mediator::{gpu::server, policy::Name};
use vm_memory::{FileOffset, GuestAddress, GuestRegionCollection, GuestRegionMmap, MmapRegion};

use super::{
    Options,
    front::{Bar0, Front, Shown},
};
use crate::{
    bus::BusDevice,
    memory::{AddressSpace, GuestMemory, HostMemory, Mapping},
};

const VRAM: u64 = 64 << 20;
const RAM: u64 = 1 << 20;

/// Where things are in VRAM, by page.
const DIRECTORY: u32 = 0x100;
const SMALL: u32 = 0x200;
const INSTANCE: u32 = 0x300;
const LIST: u32 = 0x301;
const RING: u32 = 0x302;
const PUSH: u32 = 0x303;
const BAR_DIRECTORY: u32 = 0x400;
const BAR_SMALL: u32 = 0x500;
const BAR_INSTANCE: u32 = 0x600;
const USERD: u32 = 0x700;

/// GPU addresses of VRAM's and RAM's first pages.
const VRAM_VA: u64 = 0x10_0000;
const RAM_VA: u64 = 0x400_0000;

struct NoSpace;
struct Placed(GuestAddress);

impl Mapping for Placed {
    fn guest_address(&self) -> GuestAddress {
        self.0
    }
}

impl AddressSpace for NoSpace {
    fn map(&self, _: HostMemory, _: u64, at: Option<GuestAddress>) -> io::Result<Box<dyn Mapping>> {
        Ok(Box::new(Placed(at.unwrap_or_default())))
    }
}

/// A GPU and a mediator, until the test's process ends.
fn mediator(folder: &Path) -> PathBuf {
    let (model, socket) = (folder.join("model"), folder.join("gpu"));
    let path = model.clone();
    std::thread::spawn(move || {
        let settings = Settings {
            vram: 256 << 20,
            map: false,
            confine: false,
        };
        serve(&path, settings).map_err(|error| panic!("{error}"))
    });
    wait("the model", || model.exists());
    let settings = server::Settings {
        policy: Name::Fair,
        limit: Duration::from_millis(500),
    };
    let mut server = server::Server::new(&model, &socket, settings).unwrap();
    std::thread::spawn(move || server.run());
    socket
}

fn wait(what: &str, is: impl Fn() -> bool) {
    let start = Instant::now();
    while !is() {
        assert!(
            start.elapsed() < Duration::from_secs(20),
            "{what} does not come"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A guest with channel 5, whose addresses are the first 8 MiB of VRAM and all of RAM.
struct Guest {
    front: Arc<Front>,
    registers: Bar0,
    bar1: Shown,
    ram: Memory,
    put: std::cell::Cell<u32>,
}

const CHANNEL: u32 = 5;

impl Guest {
    fn new(socket: &Path) -> Self {
        let file = sealed(RAM);
        let ram = Memory::shared(&file, 0, RAM as usize, Access::ReadWrite).unwrap();
        let region = MmapRegion::from_file(FileOffset::new(file, 0), RAM as usize).unwrap();
        let region = GuestRegionMmap::new(region, GuestAddress(0)).unwrap();
        let memory = GuestRegionCollection::from_regions(vec![region]).unwrap();
        let options = Options {
            socket: socket.to_owned(),
            vram: VRAM,
            channels: 128,
            weight: 1,
            eager: false,
            thread_name: "gpu".to_owned(),
        };
        let space: Arc<dyn AddressSpace> = Arc::new(NoSpace);
        let front = Front::new(&options, &space, GuestMemory::new(memory)).unwrap();
        let front = Arc::new(front);
        std::thread::spawn(front.receiver().unwrap());
        let worker = Arc::clone(&front);
        std::thread::spawn(move || worker.work(None));
        let guest = Self {
            registers: Bar0(Arc::clone(&front)),
            bar1: Shown(Arc::clone(&front), 0),
            front,
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

    /// Entries of a small table.
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
        let space = self.space(DIRECTORY, SMALL);
        let mut bytes = [0; instance::BYTES];
        let engines = Default::default();
        InstanceBlock { space, engines }.encode(&mut bytes);
        let mut head = [0; ramfc::BYTES];
        Ramfc {
            userd: u64::from(USERD + CHANNEL) * PAGE,
            signature: ramfc::SIGNATURE,
            gp_base: VRAM_VA + u64::from(RING) * PAGE,
            gp_log2: 9,
            ..Ramfc::default()
        }
        .encode(&mut head);
        bytes[..ramfc::BYTES].copy_from_slice(&head);
        self.poke_all(INSTANCE, &bytes);

        self.map(BAR_SMALL, 0, pages(USERD, 128));
        let space = self.space(BAR_DIRECTORY, BAR_SMALL);
        let mut bytes = [0; instance::BYTES];
        InstanceBlock { space, engines }.encode(&mut bytes);
        self.poke_all(BAR_INSTANCE, &bytes);
        self.set(0x00_1704, 1 << 31 | BAR_INSTANCE);
        self.set(0x00_2254, Window { start: 0 }.encode());
        self.channel();
    }

    /// Makes the channel (anew).
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

    fn flush(&self) {
        self.set(0x10_0cb8, DIRECTORY << 4);
        self.set(0x10_0cbc, 1 << 31 | 1);
    }

    fn doorbell(&self, put: u32) {
        let at = u64::from(CHANNEL) * userd::STRIDE + userd::GP_PUT;
        self.bar1.write(at, &put.to_le_bytes());
    }

    /// Submits a release of a word to an address.
    fn release(&self, to: u64, word: u32) {
        let run = Header::Increasing(Run {
            subchannel: 0,
            address: 0x10,
            count: 4,
        });
        let put = self.put.get();
        let at = u64::from(PUSH) * PAGE + u64::from(put) * 32;
        let words = [
            run.encode(),
            (to >> 32) as u32,
            to as u32,
            word,
            1 << 24 | 2,
        ];
        for (at, word) in (at..).step_by(4).zip(words) {
            self.poke(at, word);
        }
        let entry = GpEntry {
            address: VRAM_VA + at,
            words: 5,
        };
        self.poke64(u64::from(RING) * PAGE + u64::from(put) * 8, entry.encode());
        self.put.set(put + 1);
        self.doorbell(put + 1);
    }

    fn ram(&self, at: usize) -> u32 {
        assert!(at + 4 <= self.ram.len());
        // SAFETY: within the mapping and aligned.
        unsafe { self.ram.start().add(at).cast::<u32>().read_volatile() }
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
        // Fetched is not executed yet.
        wait("the semaphore", || self.ram(0) == word);
    }

    fn faults(&self) -> u32 {
        self.get(0x00_259c)
    }

    /// The fault, and a channel as new.
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
fn a_driver_submits_and_hears_of_the_end() {
    let folder = tempfile::tempdir().unwrap();
    let guest = Guest::new(&mediator(folder.path()));
    guest.works(41);
    guest.works(42);
    wait("an interrupt", || guest.get(0x00_25a8) != 0);
    assert_eq!(guest.counter("doorbells"), 2);
    assert_eq!(guest.counter("walks"), 1, "tables have not changed");
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
    assert_ne!(guest.get(0x04_0108), 0, "an error of the ring's pointers");
    guest.works(1);
    let instance = u64::from(INSTANCE) * PAGE;
    // Directory, tables and ring outside of VRAM, or partly.
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
    // BARs, run lists and windows of anything.
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
