use std::{
    fs, io,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use device_model::{
    lifecycle::StateError,
    memory::{AddressSpace, GuestMemory, GuestRam, HostMemory, Mapping},
    thread::Unconfined,
};
use tempfile::TempDir;
use virtio_queue::{
    QueueT,
    desc::{RawDescriptor, split::Descriptor},
    mock::MockSplitQueue,
};
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{Error, Options, Pmem, State};
use crate::{
    device::{Activation, ActiveQueue, VirtioDevice, VirtioInterrupt},
    testing::simple::Guest,
};

const MIB: u64 = 1 << 20;
const NEXT: u16 = 1;
const WRITE: u16 = 2;

/// An address space that only records its mappings.
#[derive(Clone, Default)]
struct Space(Arc<Mutex<Vec<(u64, HostMemory)>>>);

struct Placed {
    space: Space,
    at: u64,
}

impl AddressSpace for Space {
    fn map(
        &self,
        memory: HostMemory,
        align: u64,
        at: Option<GuestAddress>,
    ) -> io::Result<Box<dyn Mapping>> {
        let at = at.map_or(16 * align, |at| at.0);
        if at >= 1 << 40 {
            return Err(io::ErrorKind::AddrNotAvailable.into());
        }
        self.0.lock().unwrap().push((at, memory));
        let space = self.clone();
        Ok(Box::new(Placed { space, at }))
    }
}

impl Mapping for Placed {
    fn guest_address(&self) -> GuestAddress {
        GuestAddress(self.at)
    }
}

impl Drop for Placed {
    fn drop(&mut self) {
        let mut mapped = self.space.0.lock().unwrap();
        mapped.retain(|(at, _)| *at != self.at);
    }
}

impl Space {
    /// Writes as the guest would.
    fn write(&self, offset: usize, byte: u8) {
        let (_, memory) = self.0.lock().unwrap()[0];
        assert!((offset as u64) < memory.len);
        // SAFETY: the device that mapped the memory is alive, and the offset is within the mapping.
        unsafe { memory.address.add(offset).write_volatile(byte) };
    }
}

#[derive(Default)]
struct Interrupts {
    queue: AtomicUsize,
    resets: AtomicUsize,
}

impl VirtioInterrupt for Interrupts {
    fn queue(&self, _index: u16) -> io::Result<()> {
        self.queue.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
    fn config(&self) -> io::Result<()> {
        Ok(())
    }
    fn needs_reset(&self) {
        self.resets.fetch_add(1, Ordering::SeqCst);
    }
}

fn options(path: &Path) -> Options {
    Options {
        thread_name: "_pmem0".into(),
        file: path.to_owned(),
        size: None,
        discard_writes: false,
    }
}

fn file(size: u64) -> (TempDir, std::path::PathBuf) {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("pmem");
    fs::File::create(&path).unwrap().set_len(size).unwrap();
    (dir, path)
}

fn new(options: Options) -> Result<(Pmem, Space), Error> {
    let space = Space::default();
    let pmem = Pmem::new(options, Arc::new(space.clone()), Arc::new(Unconfined))?;
    Ok((pmem, space))
}

/// Activates `pmem` with one queue, for a driver with the given features.
fn activate(
    pmem: &mut Pmem,
    memory: &GuestMemory,
    mock: &MockSplitQueue<GuestRam>,
    features: u64,
) -> Arc<Interrupts> {
    let interrupts = Arc::<Interrupts>::default();
    let mut queue: virtio_queue::Queue = mock.create_queue().unwrap();
    queue.set_ready(true);
    pmem.activate(Activation {
        memory: memory.clone(),
        interrupt: interrupts.clone(),
        queues: vec![ActiveQueue {
            index: 0,
            queue,
            kick: EventFd::new(EFD_NONBLOCK).unwrap(),
        }],
        features,
    })
    .unwrap();
    interrupts
}

/// Sends chains to `pmem`; returns it, the results at 0x8000 + 16 k, and the interrupts.
fn drive(
    pmem: &mut Pmem,
    requests: &[Vec<(u64, u32, u16)>],
    types: &[(u64, u32)],
) -> (GuestMemory, Arc<Interrupts>) {
    let ram = GuestRam::from_ranges(&[(GuestAddress(0), 0x20000)]).unwrap();
    let memory = GuestMemory::new(ram);
    let snapshot = memory.memory();
    for (address, kind) in types {
        snapshot.write_obj(*kind, GuestAddress(*address)).unwrap();
    }
    snapshot
        .write_slice(&[0xff; 0x100], GuestAddress(0x8000))
        .unwrap();
    let mock = MockSplitQueue::create(&*snapshot, GuestAddress(0x10000), 256);
    let mut descriptors = Vec::new();
    for chain in requests {
        for (k, (address, len, flags)) in chain.iter().enumerate() {
            let more = if k + 1 < chain.len() { NEXT } else { 0 };
            let next = descriptors.len() as u16 + 1;
            let descriptor = Descriptor::new(*address, *len, flags | more, next);
            descriptors.push(RawDescriptor::from(descriptor));
        }
    }
    mock.add_desc_chains(&descriptors, 0).unwrap();
    // All features except event indices.
    let features = pmem.features() & !(1 << 29);
    let interrupts = activate(pmem, &memory, &mock, features);
    let since = Instant::now();
    while mock.used().idx().load() != requests.len() as u16
        && interrupts.resets.load(Ordering::SeqCst) == 0
    {
        assert!(since.elapsed() < Duration::from_secs(20), "no answer");
        std::thread::sleep(Duration::from_micros(200));
    }
    let queues = pmem.deactivate();
    assert_eq!(queues.len(), 1);
    (memory, interrupts)
}

fn result(memory: &GuestMemory, k: u64) -> u32 {
    let memory = memory.memory();
    memory.read_obj(GuestAddress(0x8000 + 16 * k)).unwrap()
}

#[test]
fn what_the_guest_writes_is_in_the_file_after_a_flush() {
    let (_dir, path) = file(4 * MIB);
    let (mut pmem, space) = new(options(&path)).unwrap();
    let mut config = [0; 20];
    pmem.read_config(0, &mut config);
    assert_eq!(config[..8], (32 * MIB).to_le_bytes());
    assert_eq!(config[8..16], (4 * MIB).to_le_bytes());
    assert_eq!(config[16..], [0; 4]);
    space.write(3 << 20, 0x77);
    let flush = vec![(0x1000, 4, 0), (0x8000, 4, WRITE)];
    let (memory, interrupts) = drive(&mut pmem, &[flush], &[(0x1000, 0)]);
    assert_eq!(result(&memory, 0), 0);
    assert!(interrupts.queue.load(Ordering::SeqCst) > 0);
    assert_eq!(fs::read(&path).unwrap()[3 << 20], 0x77);
    drop(pmem);
    assert!(space.0.lock().unwrap().is_empty());
}

#[test]
fn requests_that_make_no_sense_fail_and_the_queue_goes_on() {
    let (_dir, path) = file(2 * MIB);
    let (mut pmem, _space) = new(options(&path)).unwrap();
    let requests = [
        vec![(0x1004, 4, 0), (0x8000, 4, WRITE)],
        vec![(0x1000, 3, 0), (0x8010, 4, WRITE)],
        vec![(0x1000, 4, 0)],
        vec![(0x1000, 4, 0), (u64::MAX - 1, 4, WRITE)],
        vec![(u64::MAX - 1, 4, 0), (0x8040, 4, WRITE)],
        vec![(0x1000, 2, 0), (0x1002, 2, 0), (0x8050, 4, WRITE)],
    ];
    let (memory, interrupts) = drive(&mut pmem, &requests, &[(0x1000, 0), (0x1004, 7)]);
    assert_eq!(result(&memory, 0), 1);
    assert_eq!(result(&memory, 1), 1);
    assert_eq!(result(&memory, 5), 0);
    assert_eq!(interrupts.resets.load(Ordering::SeqCst), 0);
}

#[test]
fn discarded_writes_leave_the_file_alone() {
    let (_dir, path) = file(2 * MIB);
    let discard = |path: &Path| Options {
        discard_writes: true,
        ..options(path)
    };
    let (mut pmem, space) = new(discard(&path)).unwrap();
    // Two such devices may share the file, but not with one that writes to it.
    let _second = new(discard(&path)).unwrap();
    assert!(matches!(new(options(&path)), Err(Error::Locked { .. })));
    space.write(5, 1);
    let flush = vec![(0x1000, 4, 0), (0x8000, 4, WRITE)];
    let (memory, _) = drive(&mut pmem, &[flush], &[(0x1000, 0)]);
    assert_eq!(result(&memory, 0), 0);
    assert_eq!(fs::read(&path).unwrap()[5], 0);
}

#[test]
fn a_directory_gets_a_file_that_nobody_else_sees() {
    let dir = TempDir::new().unwrap();
    assert!(matches!(
        new(options(dir.path())),
        Err(Error::SizeMissing { .. })
    ));
    let made = new(Options {
        size: Some(6 * MIB),
        ..options(dir.path())
    });
    let (pmem, space) = match made {
        Ok(made) => made,
        Err(error) => {
            println!("skipped: no unnamed files here: {error}");
            return;
        }
    };
    space.write(6 << 20 >> 1, 1);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    drop(pmem);
}

#[test]
fn sizes_that_a_guest_cannot_map_are_refused() {
    let (_dir, path) = file(3 * MIB);
    assert!(matches!(new(options(&path)), Err(Error::Size { .. })));
    let with = |size| {
        new(Options {
            size: Some(size),
            ..options(&path)
        })
    };
    assert!(matches!(with(4 * MIB), Err(Error::TooSmall { .. })));
    assert!(matches!(with(0), Err(Error::Size { .. })));
    with(2 * MIB).unwrap();
    let (_dir, empty) = file(0);
    assert!(matches!(new(options(&empty)), Err(Error::Size { .. })));
    let missing = new(options(Path::new("/nowhere")));
    assert!(matches!(missing, Err(Error::Open { .. })));
    let special = new(options(Path::new("/dev/null")));
    assert!(matches!(special, Err(Error::NotAFile { .. })));
}

#[test]
fn a_restored_guest_finds_its_memory_where_it_was() {
    let (_dir, path) = file(2 * MIB);
    let (mut pmem, space) = new(options(&path)).unwrap();
    let state = |address, size| serde_json::to_value(State { address, size }).unwrap();
    for (address, size) in [(64 * MIB, 4 * MIB), (64 * MIB + 4096, 2 * MIB)] {
        let error = pmem.restore(state(address, size));
        assert!(matches!(error, Err(StateError::Mismatch(_))));
    }
    assert!(pmem.restore(serde_json::Value::Null).is_err());
    pmem.restore(state(64 * MIB, 2 * MIB)).unwrap();
    assert_eq!(space.0.lock().unwrap().len(), 1);
    assert_eq!(pmem.save().unwrap(), state(64 * MIB, 2 * MIB));
    let error = pmem.restore(state(1 << 40, 2 * MIB));
    assert!(matches!(error, Err(StateError::Host { .. })));
}

#[test]
fn impossible_ring_indices_break_the_queue_and_nothing_else() {
    let (_dir, path) = file(2 * MIB);
    let (mut pmem, _space) = new(options(&path)).unwrap();
    let ram = GuestRam::from_ranges(&[(GuestAddress(0), 0x20000)]).unwrap();
    let memory = GuestMemory::new(ram);
    let snapshot = memory.memory();
    let mock = MockSplitQueue::create(&*snapshot, GuestAddress(0x10000), 256);
    mock.avail().idx().store(0x8000);
    let features = pmem.features();
    let interrupts = activate(&mut pmem, &memory, &mock, features);
    let since = Instant::now();
    while interrupts.resets.load(Ordering::SeqCst) == 0 {
        assert!(since.elapsed() < Duration::from_secs(20), "no answer");
        std::thread::yield_now();
    }
    assert_eq!(pmem.deactivate().len(), 1);
}

#[test]
fn a_file_that_does_not_answer_is_waited_for_in_bounded_time() {
    let (_dir, path) = file(4 * MIB);
    let (mut pmem, _space) = new(options(&path)).unwrap();
    let guest = Guest::new();
    let queue = guest.queue(0, 16);
    pmem.activate(guest.activation(&[&queue])).unwrap();
    let at = queue.buffers();
    let flush = [(at, 4, false), (at + 64, 4, true)];
    // As the worker does before it flushes.
    assert!(pmem.flushes.begin());
    let patience = Duration::from_millis(5);
    let error = pmem.quiesce(patience).unwrap_err().to_string();
    assert!(error.contains(&path.display().to_string()), "{error}");
    // Held back until the device may continue.
    queue.submit(&flush);
    pmem.quiesce(patience).unwrap_err();
    assert_eq!(queue.poll_used(), None);
    pmem.flushes.end();
    pmem.quiesce(patience).unwrap();
    pmem.carry_on();
    queue.submit(&flush);
    assert_eq!([queue.wait_used(), queue.wait_used()], [4, 4]);
    pmem.deactivate();
}

#[test]
fn a_flush_of_a_large_file_is_given_up_between_its_steps() {
    let (_dir, path) = file(200 * MIB);
    let file = fs::File::options().write(true).open(path).unwrap();
    let steps = AtomicUsize::new(0);
    let held_after = |count| {
        let is_held = || steps.fetch_add(1, Ordering::Relaxed) + 1 == count;
        super::worker::flush_in_steps(&file, is_held).unwrap()
    };
    assert_eq!(held_after(2), None);
    assert_eq!(steps.swap(0, Ordering::Relaxed), 2);
    assert_eq!(held_after(5), Some(()));
    assert_eq!(steps.load(Ordering::Relaxed), 4, "steps of 64 MiB");
}
