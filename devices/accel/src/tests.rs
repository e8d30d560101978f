//! The port from the perspectives of guest and worker, without either.

use std::{
    collections::BTreeMap,
    io::{Read, Write},
    os::{
        fd::AsRawFd,
        unix::net::{UnixListener, UnixStream},
    },
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use device_model::{
    bus::Bus,
    memory::{AddressSpace, HostMemory, Mapping},
    testing::{FakeDoorbells, FakeMsi},
    thread::{ThreadRole, ThreadSpawner, Unconfined},
};
use pci::{
    BarIndex, Bdf, LifecycleError, PciFunction, PciSegment, Seat, SegmentConfig, Window,
    testing::FakeLines,
};
use proptest::prelude::*;
use remoting_proto::{
    apis::opencl::OpenCl,
    port::{
        ATTACHMENT, Attachment, Command, DOORBELL, MOST_SLICES, READY, REFUSED, State, registers,
        user_to_number,
    },
    wire::hello::Hello,
};
use remoting_transport::{account::Account, socket, window::SMALLEST};
use vm_memory::GuestAddress;

use super::*;

/// Records the mappings of window and device pages, by their addresses in the guest.
#[derive(Clone, Default)]
struct Space(Arc<Mutex<BTreeMap<u64, (usize, u64)>>>);

impl Space {
    /// The only mapping: address in the guest, address here, and length.
    fn window(&self) -> (u64, usize, u64) {
        let mapped = self.0.lock().unwrap();
        assert_eq!(mapped.len(), 1);
        mapped
            .first_key_value()
            .map(|(at, (base, len))| (*at, *base, *len))
            .unwrap()
    }
}

struct Placed(Space, u64);

impl AddressSpace for Space {
    fn map(
        &self,
        memory: HostMemory,
        _align: u64,
        at: Option<GuestAddress>,
    ) -> io::Result<Box<dyn Mapping>> {
        let at = at.unwrap().0;
        let before = self
            .0
            .lock()
            .unwrap()
            .insert(at, (memory.address as usize, memory.len));
        assert_eq!(before, None);
        Ok(Box::new(Placed(self.clone(), at)))
    }
}

impl Mapping for Placed {
    fn guest_address(&self) -> GuestAddress {
        GuestAddress(self.1)
    }
}

impl Drop for Placed {
    fn drop(&mut self) {
        self.0.0.lock().unwrap().remove(&self.1);
    }
}

mod apis;
mod moving;
mod pages;
mod suspended;

const SLICES: u32 = 4;
/// Major number of /dev/zero, which stands in for device files with pages.
const MEMORY_DEVICES: u32 = 1;

struct Rig {
    segment: Arc<PciSegment>,
    bdf: Bdf,
    function: Arc<Mutex<Accel>>,
    mmio: Arc<Bus>,
    msi: FakeMsi,
    lines: FakeLines,
    doorbells: FakeDoorbells,
    space: Space,
    pool: UnixListener,
    _folder: tempfile::TempDir,
}

fn options(folder: &std::path::Path) -> Options {
    Options {
        thread_name: "_accel0".to_owned(),
        apis: Apis::one(ApiId::OpenCl),
        socket: folder.join("pool"),
        slices: SLICES,
        slice_size: SMALLEST,
        device: "Some".to_owned(),
        weight: 3,
        latency: 2,
        memory: 1 << 30,
        pages: 0,
        client: "vm".to_owned(),
        compiled: "web".to_owned(),
        archive: None,
    }
}

fn rig() -> Rig {
    let folder = tempfile::tempdir().unwrap();
    let pool = UnixListener::bind(folder.path().join("pool")).unwrap();
    let options = options(folder.path());
    rig_of(folder, pool, options, None)
}

/// A rig with a port that is new or restored from a saved state.
fn rig_of(
    folder: tempfile::TempDir,
    pool: UnixListener,
    options: Options,
    saved: Option<serde_json::Value>,
) -> Rig {
    rig_with(folder, pool, options, saved, Arc::new(Unconfined))
}

fn rig_with(
    folder: tempfile::TempDir,
    pool: UnixListener,
    options: Options,
    saved: Option<serde_json::Value>,
    spawner: Arc<dyn ThreadSpawner>,
) -> Rig {
    let (msi, lines, doorbells, space) = (
        FakeMsi::default(),
        FakeLines::default(),
        FakeDoorbells::default(),
        Space::default(),
    );
    let resources = Resources {
        msi: Arc::new(msi.clone()),
        lines: Arc::new(lines.clone()),
        doorbells: Arc::new(doorbells.clone()),
        space: Arc::new(space.clone()),
        spawner,
    };
    let function = Accel::with_devices(options, resources, MEMORY_DEVICES).unwrap();
    let function = Arc::new(Mutex::new(function));
    let (mmio, pio) = (Arc::<Bus>::default(), Arc::<Bus>::default());
    let config = SegmentConfig {
        segment: 0,
        mmio32: Window::new(0xc000_0000, 1 << 28),
        mmio64: Window::new(1 << 40, 1 << 40),
        ..SegmentConfig::default()
    };
    let segment = PciSegment::new(config, Arc::clone(&mmio), pio);
    let bdf = match saved {
        Some(state) => segment.plug_saved(function.clone(), Seat::ANY, state),
        None => segment.plug(function.clone(), Seat::ANY, &[]),
    }
    .unwrap();
    // The guest enables memory decoding.
    segment.write_config(bdf, 4, &6u16.to_le_bytes());
    Rig {
        segment,
        bdf,
        function,
        mmio,
        msi,
        lines,
        doorbells,
        space,
        pool,
        _folder: folder,
    }
}

impl Rig {
    fn bar(&self, bar: u8) -> u64 {
        let function = self.function.lock().unwrap();
        function
            .config()
            .bar_address(BarIndex::new(bar).unwrap())
            .unwrap()
    }

    fn read(&self, offset: u64) -> u32 {
        let mut data = [0; 4];
        assert!(self.mmio.read(self.bar(0) + offset, &mut data));
        u32::from_le_bytes(data)
    }

    fn write(&self, offset: u64, value: u32) {
        self.mmio.write(self.bar(0) + offset, &value.to_le_bytes());
    }

    fn command(&self, slice: u64, command: Command) {
        self.write(registers::SLICE + 4 * slice, command as u32);
    }

    fn state(&self, slice: u64) -> State {
        State::from_number(self.read(registers::SLICE + 4 * slice)).unwrap()
    }

    fn becomes(&self, slice: u64, wanted: State) {
        let start = Instant::now();
        while self.state(slice) != wanted {
            assert!(
                start.elapsed() < Duration::from_secs(20),
                "{:?}",
                self.state(slice)
            );
            std::thread::yield_now();
        }
    }

    /// What a worker receives, and its connection.
    fn attached(&self) -> (UnixStream, Attachment, Vec<std::os::fd::OwnedFd>) {
        let (stream, _) = self.pool.accept().unwrap();
        let mut bytes = [0; ATTACHMENT];
        let files = socket::receive_exact(&stream, &mut bytes).unwrap();
        (stream, Attachment::from_bytes(&bytes).unwrap(), files)
    }

    fn open(&self, slice: u64) -> UnixStream {
        self.command(slice, Command::Open);
        let (mut stream, ..) = self.attached();
        stream.write_all(&[READY]).unwrap();
        self.becomes(slice, State::Open);
        stream
    }
}

#[test]
fn the_registers_say_what_the_port_has() {
    let rig = rig();
    assert_eq!(rig.read(registers::MAGIC), registers::MAGIC_VALUE);
    assert_eq!(rig.read(registers::VERSION), registers::INTERFACE);
    assert_eq!(rig.read(registers::API), ApiId::OpenCl.number());
    assert_eq!(rig.read(registers::SLICES), SLICES);
    assert_eq!(u64::from(rig.read(registers::SLICE_SIZE_LOW)), SMALLEST);
    assert_eq!(rig.read(registers::SLICE_SIZE_HIGH), 0);
    let (at, _, len) = rig.space.window();
    assert_eq!((at, len), (rig.bar(2), u64::from(SLICES) * SMALLEST));
    let bells: Vec<_> = (0..u64::from(SLICES))
        .map(|slice| rig.bar(1) + slice * DOORBELL)
        .collect();
    assert_eq!(rig.doorbells.addresses(), bells);
}

#[test]
fn a_worker_gets_its_slice_its_doorbell_and_its_interrupt_and_nothing_else() {
    let rig = rig();
    let (_, base, _) = rig.space.window();
    rig.command(2, Command::Open);
    let (_stream, attachment, files) = rig.attached();
    let expected = options(std::path::Path::new(""));
    assert_eq!(attachment.window, expected.slice_size);
    assert_eq!(attachment.client, expected.client);
    assert_eq!(attachment.device, expected.device);
    assert_eq!(attachment.weight, expected.weight);
    assert_eq!(attachment.latency, expected.latency);
    assert_eq!(attachment.memory, expected.memory);
    assert_eq!(attachment.slice, 2);
    assert_eq!(attachment.compiled, expected.compiled);
    assert_eq!(attachment.user, None);
    let [memory, mut doorbell, mut interrupt, account] =
        <[_; 4]>::try_from(files).unwrap().map(std::fs::File::from);
    assert_eq!(account.metadata().unwrap().len(), 4096);
    assert_eq!(memory.metadata().unwrap().len(), SMALLEST);
    // SAFETY: within the window, which has the given length.
    unsafe {
        (base as *mut u8)
            .add(2 * SMALLEST as usize + 77)
            .write_volatile(7)
    };
    let mut byte = [0];
    std::os::unix::fs::FileExt::read_exact_at(&memory, &mut byte, 77).unwrap();
    assert_eq!(byte, [7]);
    assert!(rig.doorbells.ring(rig.bar(1) + 2 * DOORBELL));
    let mut count = [0; 8];
    doorbell.read_exact(&mut count).unwrap();
    assert_eq!(u64::from_le_bytes(count), 1);
    interrupt.write_all(&1u64.to_le_bytes()).unwrap();
    assert_eq!(rig.msi.take(3), 1);
}

/// Does what a worker does to wake its application.
fn ring(files: &[std::os::fd::OwnedFd]) {
    let mut interrupt = std::fs::File::from(files[2].try_clone().unwrap());
    interrupt.write_all(&1u64.to_le_bytes()).unwrap();
}

impl Rig {
    /// Opens a slice; returns its worker, and the files that it received.
    fn served(&self, slice: u64) -> (UnixStream, Vec<std::os::fd::OwnedFd>) {
        self.command(slice, Command::Open);
        let (mut stream, _, files) = self.attached();
        stream.write_all(&[READY]).unwrap();
        self.becomes(slice, State::Open);
        (stream, files)
    }

    fn config(&self, offset: usize) -> u16 {
        let mut data = [0; 2];
        self.segment.read_config(self.bdf, offset, &mut data);
        u16::from_le_bytes(data)
    }

    /// Sets or clears bit 10 of the command register, which `uio_pci_generic` sets at an interrupt.
    fn forbid(&self, forbidden: bool) {
        let command = 6 | u16::from(forbidden) << 10;
        self.segment
            .write_config(self.bdf, 4, &command.to_le_bytes());
    }

    fn wants_interrupt(&self) -> bool {
        self.config(6) & 1 << 3 != 0
    }

    /// Waits until the line has been asserted.
    fn asserted(&self) {
        let start = Instant::now();
        while self.lines.take() == 0 {
            assert!(start.elapsed() < Duration::from_secs(20));
            std::thread::yield_now();
        }
    }

    /// Waits until the service has processed everything.
    fn wait_for_service(&self) {
        self.command(3, Command::Open);
        let _ = self.attached();
        self.becomes(3, State::Ended);
        self.command(3, Command::Close);
        self.becomes(3, State::Free);
    }

    /// Takes notes until all of these slices have been noted, and nothing is left.
    fn rung(&self, slices: u32) {
        let (start, mut rung) = (Instant::now(), 0);
        while rung != slices || self.wants_interrupt() {
            assert!(start.elapsed() < Duration::from_secs(20), "{rung:b}");
            // Slices that were opened are noted, too.
            self.read(registers::CHANGES);
            rung |= self.read(registers::RUNG_LOW);
            assert_eq!(self.read(registers::RUNG_HIGH), 0);
        }
    }
}

#[test]
fn who_has_no_messages_is_interrupted_by_the_line_and_told_for_which_slices() {
    let rig = rig();
    assert_eq!(rig.config(0x3c) >> 8, 1, "pin A");
    rig.write(registers::LINE, 1);
    assert_eq!(rig.read(registers::LINE), 1);
    let (_first, first) = rig.served(0);
    let (_second, second) = rig.served(2);
    rig.asserted();
    rig.rung(0);
    // As the kernel's driver does at an interrupt; no more arrive until the agent permits them.
    rig.forbid(true);
    rig.lines.serve();
    rig.lines.take();
    ring(&first);
    ring(&second);
    rig.rung(0b101);
    // A signal between the agent's check and that is not lost, either.
    ring(&first);
    while !rig.wants_interrupt() {
        std::thread::yield_now();
    }
    assert_eq!(rig.lines.take(), 0);
    rig.forbid(false);
    assert_ne!(rig.lines.take(), 0);
    // Nor are notes that a driver does not take.
    rig.lines.serve();
    rig.asserted();
    rig.rung(1);
    // Slices that are opened and closed do not count as sleepers.
    let counters = rig.function.lock().unwrap().counters();
    assert!(counters.contains(&("sleepers_woken", 3)), "{counters:?}");
}

#[test]
fn that_a_worker_has_ended_is_told_by_the_line() {
    let rig = rig();
    rig.write(registers::LINE, 1);
    let (stream, _files) = rig.served(0);
    rig.asserted();
    rig.rung(0);
    rig.lines.take();
    rig.lines.serve();
    drop(stream);
    rig.asserted();
    rig.becomes(0, State::Ended);
    rig.rung(0);
}

#[test]
fn the_line_is_for_who_wants_it_and_has_no_messages() {
    let rig = rig();
    let (_stream, files) = rig.served(1);
    ring(&files);
    rig.wait_for_service();
    assert_eq!((rig.lines.take(), rig.wants_interrupt()), (0, false));
    // Message control of the only capability: MSI-X is enabled.
    let control = usize::from(rig.config(0x34) & 0xff) + 2;
    let turn = |on: u16| {
        rig.segment
            .write_config(rig.bdf, control, &(on << 15).to_le_bytes())
    };
    turn(1);
    rig.write(registers::LINE, 1);
    rig.msi.take(2);
    ring(&files);
    rig.wait_for_service();
    assert_eq!((rig.lines.take(), rig.msi.take(2)), (0, 1));
    turn(0);
    ring(&files);
    rig.asserted();
    // The agent starts again.
    rig.write(registers::RESET, 1);
    assert_eq!(rig.read(registers::LINE), 0);
    assert!(!rig.wants_interrupt());
}

#[test]
fn a_paused_port_asserts_no_line_and_one_that_goes_on_what_it_kept() {
    let rig = rig();
    rig.write(registers::LINE, 1);
    let (stream, files) = rig.served(1);
    assert_eq!(rig.lines.users(), 1);
    rig.function.lock().unwrap().pause().unwrap();
    assert_eq!(rig.lines.users(), 0);
    ring(&files);
    rig.wait_for_service();
    assert!(rig.wants_interrupt());
    rig.function.lock().unwrap().resume().unwrap();
    rig.asserted();
    // The guest of a snapshot receives interrupts as before.
    drop(stream);
    rig.function.lock().unwrap().detach().unwrap();
    let state = rig.function.lock().unwrap().save().unwrap();
    let later = self::rig();
    later.segment.restore(later.bdf, state).unwrap();
    assert_eq!(later.read(registers::LINE), 1);
    later.segment.unplug(later.bdf).unwrap();
    assert_eq!(later.lines.users(), 0);
}

#[test]
fn a_worker_learns_whom_the_agent_has_named_for_its_slice_and_the_next_one_does_not() {
    let rig = rig();
    let user = user_to_number(Some(1000));
    rig.write(registers::OWNER + 4 * 2, user);
    // Slices that do not exist.
    rig.write(registers::OWNER + 4 * u64::from(SLICES), user);
    rig.write(registers::TABLE - 4, user);
    rig.command(2, Command::Open);
    let (stream, attachment, _) = rig.attached();
    assert_eq!(attachment.user, Some(1000));
    rig.command(1, Command::Open);
    let (_other, attachment, _) = rig.attached();
    assert_eq!(attachment.user, None);
    rig.command(2, Command::Close);
    drop(stream);
    rig.becomes(2, State::Free);
    rig.command(2, Command::Open);
    let (_stream, attachment, _) = rig.attached();
    assert_eq!(attachment.user, None);
}

#[test]
fn the_death_of_a_worker_ends_its_slice_alone() {
    let rig = rig();
    let first = rig.open(0);
    let _second = rig.open(1);
    let before = rig.read(registers::CHANGES);
    drop(first);
    rig.becomes(0, State::Ended);
    assert_eq!(rig.state(1), State::Open);
    assert!(rig.read(registers::CHANGES) > before);
    let counters = rig.function.lock().unwrap().counters();
    assert!(counters.contains(&("workers_lost", 1)), "{counters:?}");
    assert!(counters.contains(&("slices_in_use", 2)), "{counters:?}");
    rig.command(0, Command::Close);
    rig.becomes(0, State::Free);
}

#[test]
fn a_slice_that_is_closed_ends_its_worker_and_forgets_its_contents() {
    let rig = rig();
    let (_, base, _) = rig.space.window();
    let mut stream = rig.open(0);
    let byte = base as *mut u8;
    // SAFETY: within the window.
    unsafe { byte.write_volatile(9) };
    rig.command(0, Command::Close);
    assert_eq!(stream.read(&mut [0]).unwrap(), 0);
    // It was told to end, and has not ended yet.
    rig.command(0, Command::Open);
    assert_eq!(rig.state(0), State::Closing);
    drop(stream);
    rig.becomes(0, State::Free);
    // SAFETY: as above.
    assert_eq!(unsafe { byte.read_volatile() }, 0);
    let _again = rig.open(0);
}

#[test]
fn a_port_that_is_used_can_be_saved_when_its_workers_are_to_go() {
    let rig = rig();
    let mut stream = rig.open(2);
    let worker = std::thread::spawn(move || stream.read(&mut [0]).unwrap());
    let mut function = rig.function.lock().unwrap();
    function.detach().unwrap();
    function.save().unwrap();
    assert_eq!(worker.join().unwrap(), 0);
}

#[test]
fn device_memory_of_a_worker_that_has_ended_is_nobodys() {
    let rig = rig();
    let used = || {
        let counters = rig.function.lock().unwrap().counters();
        let mut found = counters
            .into_iter()
            .filter(|(name, _)| *name == "device_memory_bytes");
        found.next().unwrap().1
    };
    rig.command(1, Command::Open);
    let (mut stream, attachment, mut files) = rig.attached();
    stream.write_all(&[READY]).unwrap();
    rig.becomes(1, State::Open);
    let account = Account::map(&files.pop().unwrap()).unwrap();
    assert!(account.add(attachment.slice, 1 << 29, attachment.memory));
    assert!(!account.add(0, (1 << 29) + 1, attachment.memory));
    assert_eq!(used(), 1 << 29);
    drop(stream);
    rig.becomes(1, State::Ended);
    rig.command(1, Command::Close);
    rig.becomes(1, State::Free);
    assert_eq!(used(), 0);
}

#[test]
fn a_slice_that_no_worker_got_keeps_its_memory() {
    let rig = rig();
    let (_, base, _) = rig.space.window();
    // The pool is unreachable, so the slice is passed to nobody.
    std::fs::remove_file(rig._folder.path().join("pool")).unwrap();
    // SAFETY: within the window.
    unsafe { (base as *mut u8).write_volatile(9) };
    for _ in 0..100 {
        rig.command(0, Command::Open);
        rig.command(0, Command::Close);
        rig.becomes(0, State::Free);
    }
    // SAFETY: as above. A new file would read as zeroes.
    assert_eq!(unsafe { (base as *mut u8).read_volatile() }, 9);
}

#[test]
fn a_refusal_and_a_missing_pool_end_the_slice() {
    let rig = rig();
    rig.command(0, Command::Open);
    let (mut stream, ..) = rig.attached();
    stream.write_all(&[REFUSED]).unwrap();
    rig.becomes(0, State::Ended);
    // A worker of another release replies like this.
    rig.command(2, Command::Open);
    let (stream, ..) = rig.attached();
    socket::send_hello(&stream, Hello::client::<OpenCl>(), &[]).unwrap();
    rig.becomes(2, State::Ended);
    std::fs::remove_file(rig._folder.path().join("pool")).unwrap();
    rig.command(1, Command::Open);
    rig.becomes(1, State::Ended);
}

#[test]
fn a_port_that_is_used_cannot_be_saved_and_one_that_is_not_comes_back() {
    let first = rig();
    let stream = first.open(3);
    let busy = first.function.lock().unwrap().save();
    assert!(matches!(busy, Err(LifecycleError::WrongState(_))));
    first.write(registers::RESET, 1);
    drop(stream);
    first.becomes(3, State::Free);
    let state = first.function.lock().unwrap().save().unwrap();
    let second = rig();
    second.segment.restore(second.bdf, state).unwrap();
    assert_eq!(second.read(registers::MAGIC), registers::MAGIC_VALUE);
}

#[test]
fn unplugging_ends_workers_and_takes_memory_and_doorbells_away() {
    let rig = rig();
    let mut stream = rig.open(0);
    rig.segment.unplug(rig.bdf).unwrap();
    assert_eq!(stream.read(&mut [0]).unwrap(), 0);
    assert!(rig.space.0.lock().unwrap().is_empty());
    assert!(rig.doorbells.addresses().is_empty());
}

#[test]
fn sizes_that_make_no_port_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    for (slices, slice_size) in [
        (0, SMALLEST),
        (3, SMALLEST),
        (2 * MOST_SLICES, SMALLEST),
        (1, SMALLEST / 2),
        (1, SMALLEST + 4096),
        (64, 1 << 63),
    ] {
        let options = Options {
            slices,
            slice_size,
            ..options(folder.path())
        };
        let resources = Resources {
            msi: Arc::new(FakeMsi::default()),
            lines: Arc::new(FakeLines::default()),
            doorbells: Arc::new(FakeDoorbells::default()),
            space: Arc::new(Space::default()),
            spawner: Arc::new(Unconfined),
        };
        assert!(matches!(
            Accel::new(options, resources),
            Err(Error::Sizes { .. })
        ));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn no_access_of_a_guest_does_harm(
        accesses in prop::collection::vec(
            (0u8..2, 0u64..0x4000, 0usize..4, any::<u64>(), any::<bool>()), 1..40)
    ) {
        let rig = rig();
        for (bar, offset, width, value, write) in accesses {
            let len = 1 << width;
            let at = rig.bar(bar) + offset;
            if write {
                rig.mmio.write(at, &value.to_le_bytes()[..len]);
            } else {
                let mut data = [0; 8];
                rig.mmio.read(at, &mut data[..len]);
            }
        }
        prop_assert_eq!(rig.read(registers::MAGIC), registers::MAGIC_VALUE);
    }
}

/// What a hostile worker can do to its files: they no longer guarantee that calls do not block.
/// Reads of eventfds would, or writes if their counters are `full`.
fn misused(files: &[std::os::fd::OwnedFd], full: bool) {
    for event in files[1..3].iter().filter(|_| full) {
        let mut event = std::fs::File::from(event.try_clone().unwrap());
        event.write_all(&(u64::MAX - 1).to_le_bytes()).unwrap();
    }
    for file in files {
        // SAFETY: plain calls.
        unsafe { assert_eq!(libc::fcntl(file.as_raw_fd(), libc::F_SETFL, 0), 0) };
    }
}

/// Runs a call that must not wait for a worker on a thread of its own, because a failure would
/// never end.
fn finishes(rig: &Arc<Rig>, what: &str, call: impl FnOnce(&Rig) + Send + 'static) {
    let (done, is_done) = std::sync::mpsc::channel();
    let there = Arc::clone(rig);
    std::thread::spawn(move || {
        call(&there);
        // Only the test may drop the rig.
        drop(there);
        let _ = done.send(());
    });
    if is_done.recv_timeout(Duration::from_secs(20)).is_err() {
        // Dropping it would block as well.
        std::mem::forget(Arc::clone(rig));
        panic!("{what} waits for a worker that does not end");
    }
}

#[test]
fn a_worker_that_makes_its_doorbell_blocking_keeps_no_application_out() {
    let rig = Arc::new(rig());
    let (stream, files) = rig.served(0);
    misused(&files, false);
    drop((stream, files));
    finishes(&rig, "the port's service", |rig| {
        rig.becomes(0, State::Ended);
        rig.command(0, Command::Close);
        rig.becomes(0, State::Free);
        // The next application, and one of another slice.
        drop([rig.open(0), rig.open(1)]);
    });
}

#[test]
fn a_worker_that_makes_its_interrupt_blocking_stops_no_vcpu() {
    let rig = Arc::new(rig());
    let control = usize::from(rig.config(0x34) & 0xff) + 2;
    let (_stream, files) = rig.served(0);
    misused(&files, false);
    finishes(&rig, "switching MSI-X off", move |rig| {
        for on in [1u16, 0] {
            let value = (on << 15).to_le_bytes();
            rig.segment.write_config(rig.bdf, control, &value);
        }
        rig.write(registers::LINE, 1);
    });
    misused(&files, true);
    finishes(&rig, "a doorbell that KVM has not taken", |rig| {
        rig.mmio.write(rig.bar(1), &[1]);
        rig.write(registers::RESET, 1);
    });
}

#[test]
fn a_port_whose_worker_misuses_what_it_was_given_is_reset_unplugged_and_plugged_again() {
    let rig = Arc::new(rig());
    let (stream, files) = rig.served(0);
    misused(&files, false);
    finishes(&rig, "a reset", |rig| rig.write(registers::RESET, 1));
    drop((stream, files));
    finishes(&rig, "the port's service", |rig| {
        rig.becomes(0, State::Free);
        drop(rig.open(0));
    });
    finishes(&rig, "a reset of the function, and unplugging", |rig| {
        rig.segment.reset(rig.bdf).unwrap();
        rig.segment.unplug(rig.bdf).unwrap();
    });
    finishes(&rig, "plugging again", |rig| {
        let function = rig.function.clone();
        rig.segment.plug(function, Seat::ANY, &[]).unwrap();
    });
}
