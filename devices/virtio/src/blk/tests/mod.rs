//! Tests of whole devices, driven through real queues in guest memory, on real files.

mod bus;
mod data;
mod hostile;
mod images;
mod lifecycle;
mod limits;
mod stuck;

use std::{
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use device_model::{
    memory::{GuestMemory, GuestRam},
    thread::Unconfined,
};
use disk::{DiskError, DiskOptions, ImageType, LockGranularity};
use imago::{FormatCreateBuilder, Storage, StorageCreateOptions, qcow2::Qcow2};
use tempfile::TempDir;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{Blk, Handle, Options};
use crate::device::{Activation, ActiveQueue, VirtioDevice, VirtioInterrupt};

const QUEUE_SIZE: u16 = 16;
const RAM: usize = 4 << 20;
/// The rings of queue k are k times 64 KiB from here.
const RINGS: u64 = 0x10_0000;
const HEADER: u64 = 0x1000;
const STATUS: u64 = 0x2000;
const DATA: u64 = 0x10000;
const WRITE: u16 = 2;
const NEXT: u16 = 1;
const INDIRECT: u16 = 4;
const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;
const GET_ID: u32 = 8;
const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;

#[derive(Default)]
struct Interrupts {
    queue: AtomicU64,
    config: AtomicUsize,
    resets: AtomicUsize,
}

impl VirtioInterrupt for Interrupts {
    fn queue(&self, _index: u16) -> std::io::Result<()> {
        self.queue.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
    fn config(&self) -> std::io::Result<()> {
        self.config.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
    fn needs_reset(&self) {
        self.resets.fetch_add(1, Ordering::SeqCst);
    }
}

/// A disk image in its own folder, and options to open it.
struct Image {
    _dir: TempDir,
    path: PathBuf,
}

/// Grows a disk at once.
fn grow(disk: &Handle, bytes: u64) -> Result<(), DiskError> {
    disk.growth(bytes)?()
}

impl Image {
    fn raw(content: &[u8]) -> Self {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("disk.img");
        File::create(&path).unwrap().write_all(content).unwrap();
        Self { _dir: dir, path }
    }

    fn qcow2(size: u64) -> Self {
        let image = Self::raw(&[]);
        make_qcow2(&image.path, size, None);
        image
    }

    fn options(&self) -> Options {
        Options {
            thread_name: "_disk0".into(),
            disk: DiskOptions {
                path: self.path.clone(),
                read_only: false,
                direct: false,
                image_type: ImageType::Unknown,
                logical_block: None,
                backing_files: false,
                sparse: true,
                lock_granularity: LockGranularity::ByteRange,
                lock_later: false,
                io_uring: true,
            },
            num_queues: 1,
            queue_size: QUEUE_SIZE,
            serial: None,
            rate_limiter: None,
            affinity: Vec::new(),
        }
    }

    fn content(&self) -> Vec<u8> {
        fs::read(&self.path).unwrap()
    }
}

fn make_qcow2(path: &Path, size: u64, backing: Option<(&Path, &str)>) {
    let options = StorageCreateOptions::new().filename(path).overwrite(true);
    let file = imago::file::File::create_open(options).unwrap();
    let mut builder = Qcow2::<imago::file::File>::create_builder(file).size(size);
    if let Some((backing, format)) = backing {
        builder = builder.backing(backing.to_str().unwrap().into(), format.into());
    }
    builder.create().unwrap();
}

/// A driver and its device.
struct Rig {
    blk: Blk,
    memory: GuestMemory,
    interrupts: Arc<Interrupts>,
    kicks: Vec<EventFd>,
    /// Number of chains made available, and of chains seen as used, per queue.
    available: Vec<u16>,
    used: Vec<u16>,
    features: u64,
}

fn new_blk(options: Options) -> Result<Blk, super::Error> {
    Blk::new(options, Arc::new(Unconfined))
}

impl Rig {
    fn new(options: Options) -> Self {
        let blk = new_blk(options).unwrap();
        let features = blk.features();
        Self::with(blk, features)
    }

    fn with(blk: Blk, features: u64) -> Self {
        let ram = GuestRam::from_ranges(&[(GuestAddress(0), RAM)]).unwrap();
        let count = blk.queue_sizes().len();
        let mut rig = Self {
            blk,
            memory: GuestMemory::new(ram),
            interrupts: Arc::default(),
            kicks: (0..count)
                .map(|_| EventFd::new(EFD_NONBLOCK).unwrap())
                .collect(),
            available: vec![0; count],
            used: vec![0; count],
            features,
        };
        let queues = (0..count).map(|k| rig.fresh_queue(k)).collect();
        rig.activate(queues);
        rig
    }

    fn fresh_queue(&self, k: usize) -> ActiveQueue {
        let base = rings(k);
        let mut queue = Queue::new(QUEUE_SIZE).unwrap();
        queue.set_desc_table_address(Some(base as u32), None);
        queue.set_avail_ring_address(Some(base as u32 + 0x1000), None);
        queue.set_used_ring_address(Some(base as u32 + 0x2000), None);
        queue.set_ready(true);
        ActiveQueue {
            index: k as u16,
            queue,
            kick: self.kicks[k].try_clone().unwrap(),
        }
    }

    fn activate(&mut self, queues: Vec<ActiveQueue>) {
        self.blk
            .activate(Activation {
                memory: self.memory.clone(),
                interrupt: self.interrupts.clone(),
                queues,
                features: self.features,
            })
            .unwrap();
    }

    fn write<T: vm_memory::ByteValued>(&self, value: T, address: u64) {
        let memory = self.memory.memory();
        memory.write_obj(value, GuestAddress(address)).unwrap();
    }

    fn read<T: vm_memory::ByteValued>(&self, address: u64) -> T {
        let memory = self.memory.memory();
        memory.read_obj(GuestAddress(address)).unwrap()
    }

    fn fill(&self, address: u64, bytes: &[u8]) {
        let memory = self.memory.memory();
        memory.write_slice(bytes, GuestAddress(address)).unwrap();
    }

    fn bytes(&self, address: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let memory = self.memory.memory();
        memory
            .read_slice(&mut bytes, GuestAddress(address))
            .unwrap();
        bytes
    }

    fn header(&self, address: u64, kind: u32, sector: u64) {
        self.write(kind, address);
        self.write(0_u32, address + 4);
        self.write(sector, address + 8);
    }

    /// Writes a chain of descriptors to `table`, from index `first` on.
    fn describe(&self, table: u64, first: u16, chain: &[(u64, u32, u16)]) {
        for (k, (address, len, flags)) in chain.iter().enumerate() {
            let at = table + 16 * u64::from(first + k as u16);
            let more = if k + 1 < chain.len() { NEXT } else { 0 };
            self.write(*address, at);
            self.write(*len, at + 8);
            self.write(*flags | more, at + 12);
            self.write(first + k as u16 + 1, at + 14);
        }
    }

    /// Makes the chain that starts at descriptor `head` available.
    fn offer(&mut self, k: usize, head: u16) {
        let ring = rings(k) + 0x1000;
        let slot = u64::from(self.available[k] % QUEUE_SIZE);
        self.write(head, ring + 4 + 2 * slot);
        self.available[k] = self.available[k].wrapping_add(1);
        self.write(self.available[k], ring + 2);
    }

    fn used_index(&self, k: usize) -> u16 {
        self.read(rings(k) + 0x2002)
    }

    /// Kicks and waits until all available chains are used; returns the last entry's length.
    fn run(&mut self, k: usize) -> u32 {
        self.kicks[k].write(1).unwrap();
        wait_for(|| self.used_index(k) == self.available[k]);
        self.used[k] = self.available[k];
        let slot = u64::from(self.used[k].wrapping_sub(1) % QUEUE_SIZE);
        self.read(rings(k) + 0x2004 + 8 * slot + 4)
    }

    /// Runs a request of three descriptors; returns its status and used length.
    fn request(&mut self, kind: u32, sector: u64, data: (u64, u32, u16)) -> (u8, u32) {
        self.header(HEADER, kind, sector);
        self.chain(&[(HEADER, 16, 0), data, (STATUS, 1, WRITE)])
    }

    /// Runs a request of any shape whose status is at STATUS; returns its status and used length.
    fn chain(&mut self, chain: &[(u64, u32, u16)]) -> (u8, u32) {
        self.write(0xff_u8, STATUS);
        self.describe(rings(0), 0, chain);
        self.offer(0, 0);
        let len = self.run(0);
        (self.read(STATUS), len)
    }

    fn flush(&mut self) -> u8 {
        self.header(HEADER, FLUSH, 0);
        self.chain(&[(HEADER, 16, 0), (STATUS, 1, WRITE)]).0
    }

    fn range(&mut self, kind: u32, sector: u64, count: u32, flags: u32) -> u8 {
        self.write(sector, DATA);
        self.write(count, DATA + 8);
        self.write(flags, DATA + 12);
        self.request(kind, 0, (DATA, 16, 0)).0
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.blk.deactivate();
    }
}

fn rings(k: usize) -> u64 {
    RINGS + 0x10000 * k as u64
}

fn wait_for(condition: impl Fn() -> bool) {
    let since = Instant::now();
    while !condition() {
        assert!(since.elapsed() < Duration::from_secs(20), "no answer");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Sectors with different content.
fn pattern(sectors: usize) -> Vec<u8> {
    (0..sectors * 512)
        .map(|k| (k / 512 * 7 + k % 251) as u8)
        .collect()
}

/// Runs a test on a raw image with each engine.
fn on_both_engines(content: &[u8], test: impl Fn(&Image, &mut Rig)) {
    for io_uring in [true, false] {
        let image = Image::raw(content);
        let mut options = image.options();
        options.disk.io_uring = io_uring;
        options.disk.image_type = ImageType::Raw;
        test(&image, &mut Rig::new(options));
    }
}
