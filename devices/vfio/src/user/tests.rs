//! Tests against a server that speaks the protocol, through a function on a segment.

use std::{
    os::unix::net::UnixStream,
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use device_model::{
    memory::{AddressSpace, GuestMemory, GuestRam, HostMemory, Mapping},
    msi::MsiMessage,
    testing::guest_memory,
    thread::Unconfined,
};
use gantry_tests::{
    edu_server::{self, Line},
    liar::{DELAY, Liar, SPOILS, Spoil},
};
use pci::{
    BarIndex, Bdf,
    testing::{FakeLines, Rig},
};
use tempfile::TempDir;
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestAddressSpace, GuestRegionMmap, MmapRegion};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{Error, Patience, Surroundings, UserDevice};
use crate::{Device, Function, Irqs, Resources};

const RAM: usize = 1 << 20;
/// Bus address of the DMA engine's buffer.
const BUFFER: u64 = 0x4_0000;

/// Guest memory that other processes can map.
fn shared_memory(ranges: &[(u64, usize)]) -> GuestMemory {
    let regions = ranges.iter().map(|&(start, len)| {
        let file = tempfile::tempfile().unwrap();
        file.set_len(len as u64).unwrap();
        let region = MmapRegion::from_file(FileOffset::new(file, 0), len).unwrap();
        GuestRegionMmap::new(region, GuestAddress(start)).unwrap()
    });
    GuestMemory::new(GuestRam::from_regions(regions.collect()).unwrap())
}

/// Memory that was mapped into the guest, as (address, host address, length).
type Places = Arc<Mutex<Vec<(u64, usize, u64)>>>;

#[derive(Clone, Default)]
struct FakeSpace(Places);

struct FakeMapping(Places, u64);

impl AddressSpace for FakeSpace {
    fn map(
        &self,
        memory: HostMemory,
        _align: u64,
        at: Option<GuestAddress>,
    ) -> std::io::Result<Box<dyn Mapping>> {
        let at = at.unwrap().0;
        let place = (at, memory.address as usize, memory.len);
        self.0.lock().unwrap().push(place);
        Ok(Box::new(FakeMapping(Arc::clone(&self.0), at)))
    }
}

impl Mapping for FakeMapping {
    fn guest_address(&self) -> GuestAddress {
        GuestAddress(self.1)
    }
}

impl Drop for FakeMapping {
    fn drop(&mut self) {
        self.0.lock().unwrap().retain(|(at, ..)| *at != self.1);
    }
}

/// A server, and the means to connect to it.
struct Bench {
    socket: PathBuf,
    lost: Arc<AtomicUsize>,
    patience: Patience,
    _dir: TempDir,
}

impl Bench {
    /// With a well-behaved server.
    fn new() -> Self {
        Self::with_line(Line::Automasked)
    }

    fn with_line(line: Line) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("edu");
        let path = socket.clone();
        std::thread::spawn(move || edu_server::serve_with(&path, line).unwrap());
        // The socket file exists before the server listens.
        while UnixStream::connect(&socket).is_err() {
            std::thread::yield_now();
        }
        Self {
            socket,
            lost: Arc::default(),
            patience: Patience::default(),
            _dir: dir,
        }
    }

    /// With a relay in front of it that can corrupt replies.
    fn with_liar() -> (Self, Liar) {
        let mut bench = Self::new();
        let socket = bench.socket.with_extension("liar");
        let liar = Liar::start(&socket, bench.socket.clone()).unwrap();
        bench.socket = socket;
        (bench, liar)
    }

    fn connect(&self, memory: GuestMemory) -> Result<UserDevice, Error> {
        let lost = Arc::clone(&self.lost);
        let surroundings = Surroundings {
            memory,
            spawner: &Unconfined,
            thread: "_user0",
            patience: self.patience,
            lost: Box::new(move |_| {
                lost.fetch_add(1, Ordering::SeqCst);
            }),
        };
        UserDevice::connect(&self.socket, surroundings)
    }

    fn lost(&self) -> usize {
        self.lost.load(Ordering::SeqCst)
    }
}

/// A plugged-in device.
struct Plugged {
    rig: Rig,
    bdf: Bdf,
    space: FakeSpace,
    device: Arc<UserDevice>,
}

impl Plugged {
    fn new(bench: &Bench) -> Self {
        let mut rig = Rig::new();
        rig.memory = shared_memory(&[(0, RAM)]);
        let device = Arc::new(bench.connect(rig.memory.clone()).unwrap());
        let space = FakeSpace::default();
        let resources = Resources {
            msi: Arc::new(rig.msi.clone()),
            lines: Arc::<FakeLines>::default(),
            space: Arc::new(space.clone()),
        };
        let function = Function::new(Arc::clone(&device) as Arc<_>, resources, &[]).unwrap();
        let bdf = rig.plug(function);
        rig.enable(bdf, true);
        Self {
            rig,
            bdf,
            space,
            device,
        }
    }

    /// Address of a register in BAR 0, which is 32 bits wide.
    fn register(&self, offset: u64) -> u64 {
        let base = self.rig.config_read(self.bdf, 0x10) & !0xf;
        u64::from(base) + offset
    }

    fn read(&self, offset: u64) -> u32 {
        self.rig.read(self.register(offset))
    }

    fn write(&self, offset: u64, value: u32) {
        let address = self.register(offset);
        self.rig.write(address, &value.to_le_bytes());
    }

    fn write_wide(&self, offset: u64, value: u64) {
        let address = self.register(offset);
        self.rig.write(address, &value.to_le_bytes());
    }

    fn dma(&self, from: u64, to: u64, command: u64) {
        self.write_wide(0x80, from);
        self.write_wide(0x88, to);
        self.write_wide(0x90, 16);
        self.write_wide(0x98, command);
    }
}

#[test]
fn registers_of_another_process_answer() {
    let plugged = Plugged::new(&Bench::new());
    assert_eq!(plugged.rig.config_read(plugged.bdf, 0), 0x11e8_1234);
    assert_eq!(plugged.read(0), 0x0100_00ed);
    plugged.write(4, 0x1234_5678);
    assert_eq!(plugged.read(4), !0x1234_5678);
    plugged.write(8, 10);
    assert_eq!(plugged.read(8), 3_628_800);
}

#[test]
fn another_process_reads_and_writes_guest_memory_while_it_is_bus_master() {
    let plugged = Plugged::new(&Bench::new());
    let memory = plugged.rig.memory.memory();
    memory
        .write_slice(b"from the guest..", GuestAddress(0x1000))
        .unwrap();
    plugged.dma(0x1000, BUFFER, 1);
    plugged.dma(BUFFER, 0x2000, 3);
    let mut data = [0; 16];
    memory.read_slice(&mut data, GuestAddress(0x2000)).unwrap();
    assert_eq!(&data, b"from the guest..");
    plugged
        .rig
        .config_write(plugged.bdf, 4, &2_u16.to_le_bytes());
    plugged.dma(BUFFER, 0x3000, 3);
    memory.read_slice(&mut data, GuestAddress(0x3000)).unwrap();
    assert_eq!(data, [0; 16]);
}

#[test]
fn memory_that_the_server_gave_is_mapped_and_the_rest_of_its_bar_is_not() {
    let plugged = Plugged::new(&Bench::new());
    let bar = plugged.rig.bar64(plugged.bdf, BarIndex::new(2).unwrap());
    let places = plugged.space.0.lock().unwrap().clone();
    let [(at, host, len)] = places[..] else {
        panic!("{places:?}")
    };
    assert_eq!((at, len), (bar, edu_server::COUNTER));
    // One access as a message: this one.
    assert_eq!(plugged.rig.read(bar + edu_server::COUNTER), 1);
    plugged
        .rig
        .memory
        .memory()
        .write_slice(&[7; 16], GuestAddress(0))
        .unwrap();
    plugged.dma(0, BUFFER, 1);
    // SAFETY: mapped by the function, which is still plugged in.
    assert_eq!(unsafe { (host as *const u8).read_volatile() }, 7);
    plugged.rig.segment.unplug(plugged.bdf).unwrap();
    assert!(plugged.space.0.lock().unwrap().is_empty());
}

#[test]
fn interrupts_are_raised_by_the_server_itself() {
    let plugged = Plugged::new(&Bench::new());
    let message = |vector: u32| MsiMessage {
        address: 0xfee0_0000,
        data: 0x40 + vector,
    };
    for vector in 0..4_u32 {
        let entry = edu_server::MSIX_TABLE + 16 * u64::from(vector);
        plugged.write_wide(entry, message(vector).address);
        plugged.write_wide(entry + 8, u64::from(message(vector).data));
    }
    let msix = plugged.rig.capability(plugged.bdf, 0x11, 0).unwrap();
    plugged
        .rig
        .config_write(plugged.bdf, msix + 2, &0x8000_u16.to_le_bytes());
    plugged.write(0x60, 0b1010);
    let raised: Vec<_> = (0..4).map(|vector| plugged.rig.msi.take(vector)).collect();
    assert_eq!(raised, [0, 1, 0, 1]);
    // Disabled again: the server cannot raise anything.
    plugged
        .rig
        .config_write(plugged.bdf, msix + 2, &0_u16.to_le_bytes());
    plugged.write(0x60, 1);
    assert_eq!(plugged.rig.msi.take(0), 0);
}

#[test]
fn a_device_without_messages_asserts_its_line() {
    let bench = Bench::new();
    let device = bench.connect(shared_memory(&[(0, RAM)])).unwrap();
    let [assert, served] = [(); 2].map(|()| EventFd::new(EFD_NONBLOCK).unwrap());
    device.connect_line(&assert, &served).unwrap();
    device.write_config(4, &6_u16.to_le_bytes());
    device.write(0, 0x60, &1_u32.to_le_bytes());
    assert_eq!(assert.read().unwrap(), 1);
    device.disconnect(Irqs::Line).unwrap();
    device.write(0, 0x60, &1_u32.to_le_bytes());
    assert!(assert.read().is_err(), "nothing is asserted");
}

#[test]
fn a_line_is_asserted_again_when_the_guest_has_served_it() {
    // Number of assertions caused by a second interrupt that arrives before that.
    for (line, early) in [(Line::Automasked, 0), (Line::Free, 1)] {
        let bench = Bench::with_line(line);
        let device = bench.connect(shared_memory(&[(0, RAM)])).unwrap();
        let [assert, served] = [(); 2].map(|()| EventFd::new(EFD_NONBLOCK).unwrap());
        device.connect_line(&assert, &served).unwrap();
        device.write_config(4, &6_u16.to_le_bytes());
        let raise = || {
            device.write(0, 0x60, &1_u32.to_le_bytes());
            assert.read().unwrap_or(0)
        };
        assert_eq!([raise(), raise()], [1, early], "{line:?}");
        served.write(1).unwrap();
        assert_eq!(raise(), 1, "{line:?}");
    }
}

#[test]
fn private_memory_is_refused_with_the_cure() {
    let error = Bench::new().connect(guest_memory(RAM)).err().unwrap();
    assert!(matches!(error, Error::Private { guest: 0 }));
    assert!(error.to_string().contains("shared=on"), "{error}");
}

#[test]
fn nobody_at_the_socket_is_said_at_once() {
    let mut bench = Bench::new();
    bench.socket = "/nonexistent/socket".into();
    let error = bench.connect(shared_memory(&[(0, RAM)])).err().unwrap();
    let text = base::Chain(&error).to_string();
    assert!(text.contains("start the device's server first"), "{text}");
}

#[test]
fn memory_that_comes_later_is_reached_too() {
    let bench = Bench::new();
    let memory = shared_memory(&[(0, RAM), (1 << 30, RAM)]);
    let later = memory.memory();
    let (first, rest) = later
        .remove_region(GuestAddress(1 << 30), RAM as u64)
        .unwrap();
    let handle = GuestMemory::new(first.clone());
    let device = bench.connect(handle.clone()).unwrap();
    handle
        .lock()
        .unwrap()
        .replace(first.insert_region(rest).unwrap());
    device.memory_changed().unwrap();
    // Enable bus mastering; the device's DMA engine writes its buffer of zeroes.
    later.write_slice(&[9; 16], GuestAddress(1 << 30)).unwrap();
    device.write_config(4, &6_u16.to_le_bytes());
    for (register, value) in [(0x80, BUFFER), (0x88, 1 << 30), (0x90, 16), (0x98, 3)] {
        device.write(0, register, &u64::to_le_bytes(value));
    }
    let byte = || later.read_obj::<u8>(GuestAddress(1 << 30)).unwrap();
    assert_eq!(byte(), 0);
    // And it is no longer reachable after its removal.
    handle.lock().unwrap().replace(first);
    device.memory_changed().unwrap();
    later.write_obj(9_u8, GuestAddress(1 << 30)).unwrap();
    device.write(0, 0x98, &3_u64.to_le_bytes());
    assert_eq!(byte(), 9);
}

/// Runs `check` for each way to corrupt a reply, concurrently: some take until the timeout.
fn for_each_spoil(check: fn(Spoil)) {
    let rounds = SPOILS.map(|spoil| std::thread::spawn(move || check(spoil)));
    for (round, spoil) in rounds.into_iter().zip(SPOILS) {
        assert!(round.join().is_ok(), "{spoil:?}");
    }
}

/// Shorter than anyone would wait for a server that corrupts its replies, and longer than a
/// well-behaved one needs.
const SHORT: Duration = Duration::from_secs(3);

#[test]
fn whatever_a_server_says_in_the_beginning_its_device_is_refused() {
    for_each_spoil(|spoil| {
        let (mut bench, liar) = Bench::with_liar();
        bench.patience.open = SHORT;
        liar.spoil(spoil);
        assert!(bench.connect(shared_memory(&[(0, RAM)])).is_err());
    });
}

#[test]
fn whatever_a_server_says_later_costs_its_device_and_nothing_else() {
    for_each_spoil(|spoil| {
        let (mut bench, liar) = Bench::with_liar();
        bench.patience.answer = SHORT;
        let plugged = Plugged::new(&bench);
        assert_eq!(plugged.read(0), 0x0100_00ed);
        liar.spoil(spoil);
        let mut read = plugged.read(0);
        if spoil == Spoil::Twice {
            // The second of two equal replies is not a reply to the next request.
            read = plugged.read(0);
        }
        assert_eq!(read, u32::MAX);
        assert!(!plugged.device.is_alive());
        assert_eq!(bench.lost(), 1);
        // Nothing waits for it again: otherwise this would take more than half an hour.
        for _ in 0..1000 {
            plugged.write(4, 1);
            assert_eq!(plugged.read(4), u32::MAX);
        }
        plugged.rig.segment.unplug(plugged.bdf).unwrap();
    });
}

#[test]
fn a_server_that_goes_is_missed_without_being_asked() {
    let (bench, liar) = Bench::with_liar();
    let plugged = Plugged::new(&bench);
    liar.hang_up();
    while plugged.device.is_alive() {
        std::thread::yield_now();
    }
    assert_eq!(plugged.read(0), u32::MAX);
    // Plugging in the same device again works.
    drop(plugged);
    assert_eq!(bench.lost(), 1);
    assert_eq!(Plugged::new(&bench).read(0), 0x0100_00ed);
}

/// Runs a call that must not wait for a server on a thread of its own, because a failure would
/// never end.
fn finishes(plugged: &Arc<Plugged>, what: &str, call: impl FnOnce(&Plugged) + Send + 'static) {
    let (done, is_done) = std::sync::mpsc::channel();
    let there = Arc::clone(plugged);
    std::thread::spawn(move || {
        call(&there);
        drop(there);
        let _ = done.send(());
    });
    if is_done.recv_timeout(Duration::from_secs(20)).is_err() {
        // Dropping it would block as well.
        std::mem::forget(Arc::clone(plugged));
        panic!("{what} waits for a server that does not answer");
    }
}

#[test]
fn a_server_that_misuses_what_it_was_given_stops_nobody() {
    let (bench, liar) = Bench::with_liar();
    let plugged = Arc::new(Plugged::new(&bench));
    let (bdf, rig) = (plugged.bdf, &plugged.rig);
    let control = rig.capability(bdf, 0x11, 0).unwrap() + 2;
    let entry = |vector: u64| edu_server::MSIX_TABLE + 16 * vector;
    let message = MsiMessage {
        address: 0xfee0_0000,
        data: 0x40,
    };
    for vector in 0..4 {
        plugged.write_wide(entry(vector), message.address);
        plugged.write(entry(vector) + 8, message.data);
    }
    plugged.write(entry(0) + 12, 0);
    rig.config_write(bdf, control, &0x8000_u16.to_le_bytes());
    assert_eq!(rig.msi.route(0), Some(message));
    // At least the RAM and one interrupt.
    assert!(liar.misuse_descriptors().unwrap() > 1);
    finishes(&plugged, "a vector that is added", move |plugged| {
        plugged.write(entry(0) + 12, 1);
        plugged.write(entry(3) + 12, 0);
    });
    plugged.write(entry(0) + 12, 0);
    liar.misuse_descriptors().unwrap();
    finishes(&plugged, "switching MSI-X off", move |plugged| {
        plugged.rig.config_write(bdf, control, &0_u16.to_le_bytes());
    });
    rig.config_write(bdf, control, &0x8000_u16.to_le_bytes());
    liar.misuse_descriptors().unwrap();
    finishes(&plugged, "a reset", move |plugged| {
        plugged.rig.segment.reset(bdf).unwrap();
    });
    finishes(&plugged, "unplugging", move |plugged| {
        plugged.rig.segment.unplug(bdf).unwrap();
    });
    drop(plugged);
    assert_eq!(Plugged::new(&bench).read(0), 0x0100_00ed);
}

#[test]
fn an_access_has_one_deadline_however_many_messages_it_takes() {
    let cases: [fn(&Plugged); 2] = [
        // Three aligned pieces.
        |plugged| {
            plugged.read(1);
        },
        // The device's own register is read and written.
        |plugged| {
            let control = plugged.rig.capability(plugged.bdf, 0x11, 0).unwrap() + 2;
            let enable = 0x8000_u16.to_le_bytes();
            plugged.rig.config_write(plugged.bdf, control, &enable);
        },
    ];
    for access in cases {
        let (mut bench, liar) = Bench::with_liar();
        bench.patience.answer = DELAY * 3 / 2;
        let plugged = Plugged::new(&bench);
        liar.spoil(Spoil::Late);
        access(&plugged);
        assert_eq!(bench.lost(), 1, "it waited for each message");
    }
}

#[test]
fn a_device_that_is_dropped_was_not_lost() {
    let bench = Bench::new();
    drop(Plugged::new(&bench));
    assert_eq!(bench.lost(), 0);
}
