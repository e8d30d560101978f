//! Whole devices, driven through real queues in guest memory, on real files.

use std::{
    fs::{self, File},
    io::Write,
    os::{
        fd::{AsRawFd, FromRawFd},
        unix::fs::FileExt,
    },
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use imago::{FormatCreateBuilder, Storage, StorageCreateOptions, qcow2::Qcow2};
use tempfile::TempDir;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{Blk, Options, State};
use crate::{
    disk::{DiskOptions, ImageType, LockGranularity},
    memory::{GuestMemory, GuestRam},
    rate_limiter::{RateLimiter, RateLimiterConfig, TokenBucketConfig},
    thread::Unconfined,
    virtio::device::{Activation, ActiveQueue, StateError, VirtioDevice, VirtioInterrupt},
};

const QUEUE_SIZE: u16 = 16;
const RAM: usize = 4 << 20;
/// Where queue k's rings are: k pages of 64 KiB from here.
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

/// A disk image in a folder of its own, and options that open it.
struct Image {
    _dir: TempDir,
    path: PathBuf,
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
                backing_files: false,
                sparse: true,
                lock_granularity: LockGranularity::ByteRange,
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

/// A driver and the device it drives.
struct Rig {
    blk: Blk,
    memory: GuestMemory,
    interrupts: Arc<Interrupts>,
    kicks: Vec<EventFd>,
    /// Chains made available, and seen as used, per queue.
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

    /// Writes descriptors to `table`, chained, from number `first`.
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

    /// Kicks and waits until all that is available was used; the last entry's length.
    fn run(&mut self, k: usize) -> u32 {
        self.kicks[k].write(1).unwrap();
        wait_for(|| self.used_index(k) == self.available[k]);
        self.used[k] = self.available[k];
        let slot = u64::from(self.used[k].wrapping_sub(1) % QUEUE_SIZE);
        self.read(rings(k) + 0x2004 + 8 * slot + 4)
    }

    /// One request of three descriptors; its status and used length.
    fn request(&mut self, kind: u32, sector: u64, data: (u64, u32, u16)) -> (u8, u32) {
        self.header(HEADER, kind, sector);
        self.chain(&[(HEADER, 16, 0), data, (STATUS, 1, WRITE)])
    }

    /// A request of any shape whose status goes to STATUS.
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

/// Runs a test on a raw image with both engines.
fn on_both_engines(content: &[u8], test: impl Fn(&Image, &mut Rig)) {
    for io_uring in [true, false] {
        let image = Image::raw(content);
        let mut options = image.options();
        options.disk.io_uring = io_uring;
        options.disk.image_type = ImageType::Raw;
        test(&image, &mut Rig::new(options));
    }
}

#[test]
fn data_written_by_the_guest_is_in_the_file_and_reads_back() {
    on_both_engines(&pattern(64), |image, rig| {
        assert_eq!(rig.request(IN, 3, (DATA, 1024, WRITE)), (0, 1025));
        assert_eq!(rig.bytes(DATA, 1024), pattern(64)[3 * 512..5 * 512]);
        rig.fill(DATA, &[0xa5; 2048]);
        assert_eq!(rig.request(OUT, 60, (DATA, 2048, 0)), (0, 1));
        assert_eq!(rig.flush(), 0);
        assert_eq!(image.content()[60 * 512..], [0xa5; 2048]);
        assert_eq!(image.content()[..60 * 512], pattern(64)[..60 * 512]);
        let counters = rig.blk.counters();
        assert!(counters.contains(&("read_bytes", 1024)) && counters.contains(&("read_ops", 1)));
        assert!(counters.contains(&("write_bytes", 2048)) && counters.contains(&("write_ops", 1)));
    });
}

#[test]
fn the_layout_of_descriptors_is_the_drivers_choice() {
    on_both_engines(&pattern(64), |_, rig| {
        // Header in two parts; data in odd parts, the last of which has the status at its end.
        rig.header(HEADER, IN, 1);
        let status = DATA + 0x2000 + 412;
        rig.write(0xff_u8, status);
        let chain = [
            (HEADER, 5, 0),
            (HEADER + 5, 11, 0),
            (DATA, 100, WRITE),
            (DATA + 0x2000, 413, WRITE),
        ];
        assert_eq!(rig.chain(&chain).1, 513);
        assert_eq!(rig.read::<u8>(status), 0);
        let mut seen = rig.bytes(DATA, 100);
        seen.extend(rig.bytes(DATA + 0x2000, 412));
        assert_eq!(seen, pattern(64)[512..1024]);
    });
}

#[test]
fn indirect_descriptors_carry_more_segments_than_the_queue_has() {
    on_both_engines(&pattern(128), |_, rig| {
        let table = 0x8000;
        rig.header(HEADER, IN, 0);
        let mut chain = vec![(HEADER, 16, 0)];
        chain.extend((0..100).map(|k| (DATA + 1024 * k, 512, WRITE)));
        chain.push((STATUS, 1, WRITE));
        rig.describe(table, 0, &chain);
        let len = 16 * chain.len() as u32;
        assert_eq!(rig.chain(&[(table, len, INDIRECT)]), (0, 51201));
        for k in 0..100 {
            let at = 512 * k as usize;
            assert_eq!(rig.bytes(DATA + 1024 * k, 512), pattern(128)[at..at + 512]);
        }
    });
}

#[test]
fn a_queue_full_of_requests_completes_in_any_order() {
    on_both_engines(&pattern(64), |_, rig| {
        for round in 0..50_u64 {
            for slot in 0..5_u16 {
                let header = HEADER + 16 * u64::from(slot);
                let status = STATUS + u64::from(slot);
                let data = DATA + 512 * u64::from(slot);
                rig.write(0xff_u8, status);
                rig.header(header, IN, round + u64::from(slot));
                let chain = [(header, 16, 0), (data, 512, WRITE), (status, 1, WRITE)];
                rig.describe(rings(0), slot * 3, &chain);
                rig.offer(0, slot * 3);
            }
            rig.run(0);
            for slot in 0..5 {
                let at = 512 * (round + slot) as usize;
                assert_eq!(rig.read::<u8>(STATUS + slot), 0);
                assert_eq!(rig.bytes(DATA + 512 * slot, 512), pattern(64)[at..at + 512]);
            }
        }
        assert!(rig.interrupts.queue.load(Ordering::SeqCst) > 0);
    });
}

#[test]
fn every_queue_has_a_worker_of_its_own() {
    let image = Image::raw(&pattern(64));
    let mut options = image.options();
    options.num_queues = 3;
    options.affinity = vec![(1, vec![0])];
    let mut rig = Rig::new(options);
    for k in 0..3 {
        rig.header(HEADER, IN, k as u64);
        rig.describe(
            rings(k),
            0,
            &[(HEADER, 16, 0), (DATA, 512, WRITE), (STATUS, 1, WRITE)],
        );
        rig.offer(k, 0);
        rig.run(k);
        assert_eq!(rig.bytes(DATA, 512), pattern(64)[512 * k..512 * (k + 1)]);
    }
    let mut config = [0; 2];
    rig.blk.read_config(34, &mut config);
    assert_eq!(u16::from_le_bytes(config), 3);
}

#[test]
fn requests_outside_of_the_disk_or_in_part_sectors_fail() {
    on_both_engines(&pattern(8), |image, rig| {
        for (sector, len) in [
            (8, 512),
            (7, 1024),
            (u64::MAX, 512),
            (1 << 55, 512),
            (u64::MAX / 512, 512),
            (0, 511),
            (0, 513),
        ] {
            assert_eq!(rig.request(IN, sector, (DATA, len, WRITE)), (1, 1));
            assert_eq!(rig.request(OUT, sector, (DATA, len, 0)), (1, 1));
        }
        assert_eq!(rig.request(OUT, 7, (RAM as u64 - 256, 512, 0)), (1, 1));
        assert_eq!(rig.request(IN, 7, (u64::MAX - 5, 512, WRITE)), (1, 1));
        assert_eq!(image.content(), pattern(8));
        assert_eq!(rig.request(IN, 7, (DATA, 512, WRITE)), (0, 513));
    });
}

#[test]
fn chains_that_are_no_requests_are_handed_back_and_the_queue_goes_on() {
    on_both_engines(&pattern(8), |_, rig| {
        rig.header(HEADER, IN, 0);
        let untouched: [&[(u64, u32, u16)]; 5] = [
            &[(HEADER, 16, 0)],
            &[(HEADER, 16, 0), (DATA, 0, WRITE)],
            &[(DATA, 512, WRITE), (HEADER, 16, 0)],
            &[(HEADER, 16, 0), (RAM as u64, 1, WRITE)],
            &[(0x8000, 15, INDIRECT)],
        ];
        for chain in untouched {
            assert_eq!(rig.chain(chain), (0xff, 0), "{chain:?}");
        }
        // A short header, one that is not in RAM, no header.
        for chain in [
            [(HEADER, 15, 0), (STATUS, 1, WRITE)],
            [(u64::MAX - 3, 16, 0), (STATUS, 1, WRITE)],
            [(DATA, 512, WRITE), (STATUS, 1, WRITE)],
        ] {
            assert_eq!(rig.chain(&chain), (1, 1), "{chain:?}");
        }
        // A loop.
        rig.describe(
            rings(0),
            0,
            &[(HEADER, 16, NEXT), (DATA, 512, WRITE | NEXT)],
        );
        rig.write(1_u16, rings(0) + 16 + 14);
        rig.offer(0, 0);
        rig.run(0);
        assert_eq!(rig.request(99, 0, (DATA, 512, WRITE)), (2, 1));
        assert_eq!(rig.request(IN, 7, (DATA, 512, WRITE)), (0, 513));
        assert_eq!(rig.interrupts.resets.load(Ordering::SeqCst), 0);
    });
}

#[test]
fn a_queue_with_impossible_indices_is_given_up_and_the_device_still_stops() {
    on_both_engines(&pattern(8), |_, rig| {
        rig.write(1000_u16, rings(0) + 0x1002);
        rig.kicks[0].write(1).unwrap();
        wait_for(|| rig.interrupts.resets.load(Ordering::SeqCst) == 1);
        rig.kicks[0].write(1).unwrap();
        assert_eq!(rig.blk.deactivate().len(), 1);
        assert_eq!(rig.interrupts.resets.load(Ordering::SeqCst), 1);
        // After a reset by the driver it works again.
        rig.write(0_u16, rings(0) + 0x1002);
        let queue = rig.fresh_queue(0);
        rig.activate(vec![queue]);
        assert_eq!(rig.request(IN, 7, (DATA, 512, WRITE)), (0, 513));
    });
}

#[test]
fn a_head_outside_of_the_table_breaks_only_the_queue() {
    on_both_engines(&pattern(8), |_, rig| {
        rig.offer(0, 999);
        rig.kicks[0].write(1).unwrap();
        wait_for(|| rig.interrupts.resets.load(Ordering::SeqCst) == 1);
    });
}

#[test]
fn the_serial_number_is_stable_and_can_be_chosen() {
    let image = Image::raw(&pattern(8));
    let first = {
        let mut rig = Rig::new(image.options());
        assert_eq!(rig.request(GET_ID, 0, (DATA, 20, WRITE)), (0, 21));
        rig.bytes(DATA, 20)
    };
    let mut rig = Rig::new(image.options());
    rig.request(GET_ID, 0, (DATA, 20, WRITE));
    assert_eq!(rig.bytes(DATA, 20), first);
    assert!(first[0].is_ascii_digit());
    drop(rig);
    let mut options = image.options();
    options.serial = Some("a serial number that is too long".into());
    let mut rig = Rig::new(options);
    assert_eq!(rig.request(GET_ID, 0, (DATA, 7, WRITE)), (0, 8));
    rig.request(GET_ID, 0, (DATA, 20, WRITE));
    assert_eq!(rig.bytes(DATA, 20), b"a serial number that");
}

#[test]
fn a_read_only_disk_refuses_everything_that_changes_it() {
    let image = Image::raw(&pattern(64));
    let mut options = image.options();
    options.disk.read_only = true;
    let mut rig = Rig::new(options);
    assert_ne!(rig.blk.features() & 1 << 5, 0);
    assert_eq!(rig.request(OUT, 0, (DATA, 512, 0)).0, 1);
    assert_ne!(rig.range(DISCARD, 0, 8, 0), 0);
    assert_ne!(rig.range(WRITE_ZEROES, 0, 8, 0), 0);
    assert_eq!(rig.request(IN, 0, (DATA, 512, WRITE)).0, 0);
    assert_eq!(image.content(), pattern(64));
}

#[test]
fn discarded_and_zeroed_sectors_read_as_zeroes() {
    on_both_engines(&pattern(64), |_, rig| {
        let can = |bit: u64| rig.blk.features() & 1 << bit != 0;
        let (discard, zero) = (can(13), can(14));
        if discard {
            assert_eq!(rig.range(DISCARD, 8, 8, 0), 0);
            rig.request(IN, 15, (DATA, 1024, WRITE));
            assert_eq!(rig.bytes(DATA, 512), [0; 512]);
            assert_eq!(rig.bytes(DATA + 512, 512), pattern(64)[16 * 512..17 * 512]);
            assert_eq!(rig.range(DISCARD, 8, 8, 1), 2, "unmap is not for discard");
            assert_eq!(rig.range(DISCARD, 60, 8, 0), 1);
            assert_eq!(rig.range(DISCARD, u64::MAX, u32::MAX, 0), 1);
        } else {
            println!("skipped: this file system cannot punch holes");
        }
        if zero {
            for flags in [0, 1] {
                assert_eq!(rig.range(WRITE_ZEROES, 32, 3, flags), 0);
                rig.request(IN, 34, (DATA, 1024, WRITE));
                assert_eq!(rig.bytes(DATA, 512), [0; 512]);
                assert_eq!(rig.bytes(DATA + 512, 512), pattern(64)[35 * 512..36 * 512]);
            }
            assert_eq!(rig.range(WRITE_ZEROES, 32, 3, 2), 2, "reserved flag");
        } else {
            println!("skipped: this file system cannot zero ranges");
        }
    });
}

#[test]
fn without_sparse_nothing_is_given_back() {
    let image = Image::raw(&pattern(64));
    let mut options = image.options();
    options.disk.sparse = false;
    let mut rig = Rig::new(options);
    assert_eq!(rig.blk.features() & 1 << 13, 0);
    let mut unmap = [0xff];
    rig.blk.read_config(56, &mut unmap);
    assert_eq!(unmap, [0]);
    assert_eq!(rig.range(DISCARD, 0, 8, 0), 2);
}

#[test]
fn a_paused_device_takes_up_its_queue_where_it_was() {
    on_both_engines(&pattern(64), |_, rig| {
        rig.request(IN, 3, (DATA, 512, WRITE));
        let queues = rig.blk.deactivate();
        assert_eq!(queues.len(), 1);
        assert!(rig.blk.deactivate().is_empty());
        // Offered while nobody serves, without a kick afterwards.
        rig.header(HEADER, IN, 9);
        rig.describe(
            rings(0),
            0,
            &[(HEADER, 16, 0), (DATA, 512, WRITE), (STATUS, 1, WRITE)],
        );
        rig.offer(0, 0);
        rig.activate(queues);
        wait_for(|| rig.used_index(0) == 2);
        assert_eq!(rig.bytes(DATA, 512), pattern(64)[9 * 512..10 * 512]);
    });
}

#[test]
fn growing_a_disk_is_told_to_the_guest_and_shrinking_is_refused() {
    let image = Image::raw(&pattern(8));
    let mut rig = Rig::new(image.options());
    let handle = rig.blk.handle();
    let error = handle.resize(512).unwrap_err().to_string();
    assert!(error.contains("shrinking would cut off data"), "{error}");
    handle.resize(5000).unwrap_err();
    assert_eq!(rig.interrupts.config.load(Ordering::SeqCst), 0);
    handle.resize(64 * 512).unwrap();
    assert_eq!(rig.interrupts.config.load(Ordering::SeqCst), 1);
    let mut capacity = [0; 8];
    rig.blk.read_config(0, &mut capacity);
    assert_eq!(u64::from_le_bytes(capacity), 64);
    assert_eq!(rig.request(OUT, 63, (DATA, 512, 0)).0, 0);
    // While the device is inactive, the news waits.
    let queues = rig.blk.deactivate();
    handle.resize(65 * 512).unwrap();
    assert_eq!(rig.interrupts.config.load(Ordering::SeqCst), 1);
    rig.activate(queues);
    assert_eq!(rig.interrupts.config.load(Ordering::SeqCst), 2);
}

#[test]
fn the_saved_state_is_checked_against_the_image() {
    let image = Image::raw(&pattern(64));
    let mut blk = new_blk(image.options()).unwrap();
    blk.write_config(32, &[0]);
    let saved = blk.save().unwrap();
    drop(blk);
    let mut blk = new_blk(image.options()).unwrap();
    blk.restore(saved.clone()).unwrap();
    assert_eq!(blk.save().unwrap(), saved);
    let mut mode = [9];
    blk.read_config(32, &mut mode);
    assert_eq!(mode, [0]);
    for capacity in [0, 100, 65 * 512, u64::MAX] {
        let state = State {
            capacity,
            writeback: true,
        };
        let error = blk.restore(serde_json::to_value(state).unwrap());
        assert!(matches!(error, Err(StateError::Mismatch(_))), "{capacity}");
    }
    for text in ["{}", "[]", r#"{"capacity":-1,"writeback":true}"#] {
        let error = blk.restore(serde_json::from_str(text).unwrap());
        assert!(matches!(error, Err(StateError::Format(_))), "{text}");
    }
}

#[test]
fn writes_are_stable_at_once_when_the_driver_chose_write_through() {
    // What can be seen of it here: the request succeeds with RWF_DSYNC on both engines.
    on_both_engines(&pattern(8), |image, rig| {
        rig.blk.write_config(32, &[0]);
        rig.fill(DATA, &[1; 512]);
        assert_eq!(rig.request(OUT, 2, (DATA, 512, 0)).0, 0);
        assert_eq!(image.content()[1024..1536], [1; 512]);
    });
}

#[test]
fn configuration_reads_beyond_the_end_are_zero() {
    let image = Image::raw(&pattern(8));
    let blk = new_blk(image.options()).unwrap();
    for offset in [60, 1 << 20, u64::MAX] {
        let mut data = [0xff; 8];
        blk.read_config(offset, &mut data);
        assert_eq!(data, [0; 8]);
    }
    let mut data = [0xff; 8];
    blk.read_config(20, &mut data);
    assert_eq!(data[..4], 512_u32.to_le_bytes());
}

#[test]
fn an_image_of_unknown_type_cannot_be_turned_into_another_format_by_its_guest() {
    for io_uring in [true, false] {
        let image = Image::raw(&pattern(64));
        let mut options = image.options();
        options.disk.io_uring = io_uring;
        let mut rig = Rig::new(options);
        rig.fill(DATA, b"QFI\xfb\0\0\0\x03");
        assert_eq!(rig.request(OUT, 0, (DATA, 1024, 0)).0, 1);
        assert_eq!(image.content(), pattern(64));
        // Anything else may be written there: a partition table, for instance.
        rig.fill(DATA, &[0x33; 1024]);
        assert_eq!(rig.request(OUT, 0, (DATA, 1024, 0)).0, 0);
        assert_eq!(image.content()[..1024], [0x33; 1024]);
    }
    on_both_engines(&pattern(8), |image, rig| {
        rig.fill(DATA, b"QFI\xfb\0\0\0\x03");
        assert_eq!(rig.request(OUT, 0, (DATA, 512, 0)).0, 0, "stated to be raw");
        assert_eq!(image.content()[..4], *b"QFI\xfb");
    });
}

#[test]
fn direct_io_takes_misaligned_guest_memory() {
    for io_uring in [true, false] {
        let image = Image::raw(&pattern(64));
        let mut options = image.options();
        options.disk.io_uring = io_uring;
        options.disk.direct = true;
        let blk = match new_blk(options) {
            Ok(blk) => blk,
            Err(error) => {
                println!("skipped: no direct I/O in the folder for temporary files: {error}");
                return;
            }
        };
        let features = blk.features();
        let mut rig = Rig::with(blk, features);
        rig.fill(DATA + 3, &[0x5a; 4096]);
        assert_eq!(rig.request(OUT, 8, (DATA + 3, 4096, 0)).0, 0);
        assert_eq!(image.content()[8 * 512..16 * 512], [0x5a; 4096]);
        assert_eq!(rig.request(IN, 16, (DATA + 1, 4096, WRITE)).0, 0);
        assert_eq!(rig.bytes(DATA + 1, 4096), pattern(64)[16 * 512..24 * 512]);
    }
}

#[test]
fn qcow2_images_keep_what_the_guest_writes() {
    let image = Image::qcow2(64 << 20);
    {
        let mut rig = Rig::new(image.options());
        assert_eq!(rig.blk.handle().size(), 64 << 20);
        rig.fill(DATA, &pattern(8));
        assert_eq!(rig.request(OUT, 100_000, (DATA, 4096, 0)).0, 0);
        assert_eq!(rig.flush(), 0);
        assert_eq!(rig.request(IN, 0, (DATA, 512, WRITE)).0, 0);
        assert_eq!(rig.bytes(DATA, 512), [0; 512]);
        assert_eq!(rig.request(IN, 131_072, (DATA, 512, WRITE)).0, 1);
    }
    let mut rig = Rig::new(image.options());
    assert_eq!(rig.request(IN, 100_000, (DATA, 4096, WRITE)).0, 0);
    assert_eq!(rig.bytes(DATA, 4096), pattern(8));
    assert_eq!(rig.range(WRITE_ZEROES, 100_001, 1, 0), 0);
    assert_eq!(rig.range(WRITE_ZEROES, 100_003, 1, 1), 0);
    assert_eq!(rig.request(IN, 100_000, (DATA, 4096, WRITE)).0, 0);
    let mut expected = pattern(8);
    expected[512..1024].fill(0);
    expected[3 * 512..4 * 512].fill(0);
    assert_eq!(rig.bytes(DATA, 4096), expected);
    assert!(image.content().len() < 2 << 20, "it grows only as needed");
    rig.blk.handle().resize(128 << 20).unwrap_err();
}

#[test]
fn backing_files_are_opened_only_when_allowed() {
    let image = Image::qcow2(1 << 20);
    let base = image.path.with_file_name("base.img");
    fs::write(&base, pattern(2048)).unwrap();
    make_qcow2(&image.path, 1 << 20, Some((&base, "raw")));
    let error = new_blk(image.options()).err().unwrap().to_string();
    assert!(error.contains("backing_files=on"), "{error}");
    let mut options = image.options();
    options.disk.backing_files = true;
    let mut rig = Rig::new(options.clone());
    assert_eq!(rig.request(IN, 700, (DATA, 512, WRITE)).0, 0);
    assert_eq!(rig.bytes(DATA, 512), pattern(2048)[700 * 512..701 * 512]);
    rig.fill(DATA, &[1; 512]);
    assert_eq!(rig.request(OUT, 701, (DATA, 512, 0)).0, 0);
    assert_eq!(rig.request(IN, 700, (DATA, 1024, WRITE)).0, 0);
    assert_eq!(rig.bytes(DATA, 512), pattern(2048)[700 * 512..701 * 512]);
    assert_eq!(rig.bytes(DATA + 512, 512), [1; 512]);
    assert_eq!(fs::read(&base).unwrap(), pattern(2048));
    drop(rig);
    // An image that is its own backing file must not hang anything.
    make_qcow2(&image.path, 1 << 20, Some((&image.path, "qcow2")));
    assert!(new_blk(options).is_err());
}

#[test]
fn unusable_images_are_refused_with_the_reason_and_a_cure() {
    fn refused(options: Options) -> String {
        new_blk(options).err().unwrap().to_string()
    }
    let image = Image::raw(&pattern(8));
    let with = |change: fn(&mut Options)| {
        let mut options = image.options();
        change(&mut options);
        options
    };
    assert!(refused(with(|o| o.disk.path = "/".into())).contains("a directory"));
    assert!(refused(with(|o| o.disk.path = "/dev/null".into())).contains("a special file"));
    assert!(refused(with(|o| o.disk.path = "/nowhere".into())).contains("check the path"));
    assert!(refused(with(|o| o.disk.image_type = ImageType::Qcow2)).contains("no qcow2 header"));
    assert!(refused(with(|o| o.disk.image_type = ImageType::Vhdx)).contains("convert -O raw"));
    assert!(refused(with(|o| o.num_queues = 0)).contains("1 to 256"));
    assert!(refused(with(|o| o.queue_size = 100)).contains("power of two"));
    assert!(refused(with(|o| o.affinity = vec![(1, vec![0])])).contains("1 queues"));
    assert!(refused(Image::raw(&[]).options()).contains("is empty"));
    assert!(refused(Image::raw(&[1; 1000]).options()).contains("multiple of 512"));
    let odd = Image::qcow2(1000);
    assert!(refused(odd.options()).contains("`qemu-img resize"));
    let mut vhd = pattern(8);
    vhd[7 * 512..7 * 512 + 8].copy_from_slice(b"conectix");
    assert!(refused(Image::raw(&vhd).options()).contains("is VHD"));
    let qcow2 = Image::qcow2(64 << 20);
    let file = File::options().write(true).open(&qcow2.path).unwrap();
    file.set_len(70_000).unwrap();
    assert!(refused(qcow2.options()).contains("is truncated"));
    file.write_all_at(&[0xff; 60], 8).unwrap();
    new_blk(qcow2.options()).err().unwrap();
    let image = Image::raw(b"QFI\xfb");
    let mut short = image.options();
    short.disk.image_type = ImageType::Qcow2;
    assert!(refused(short).contains("is truncated"));
}

#[test]
fn two_disks_share_an_image_only_for_reading() {
    for granularity in [LockGranularity::ByteRange, LockGranularity::Full] {
        let image = Image::raw(&pattern(8));
        let options = |read_only| {
            let mut options = image.options();
            options.disk.read_only = read_only;
            options.disk.lock_granularity = granularity;
            options
        };
        let writer = new_blk(options(false)).unwrap();
        for read_only in [false, true] {
            let error = new_blk(options(read_only)).err().unwrap().to_string();
            assert!(error.contains("disk.img is in use elsewhere"), "{error}");
        }
        drop(writer);
        let _reader = new_blk(options(true)).unwrap();
        let _another = new_blk(options(true)).unwrap();
        new_blk(options(false)).err().unwrap();
    }
}

#[test]
fn queues_and_disks_that_share_a_rate_limit_all_go_on_in_the_end() {
    let limit = |size, refill_time| {
        Some(TokenBucketConfig {
            size,
            one_time_burst: None,
            refill_time,
        })
    };
    let limiter = RateLimiter::new(&RateLimiterConfig {
        bandwidth: limit(1024, 50),
        ops: limit(1, 10),
    });
    let limiter = Arc::new(Mutex::new(limiter.unwrap()));
    let (one, two) = (Image::raw(&pattern(64)), Image::raw(&pattern(64)));
    let mut rigs = [&one, &two].map(|image| {
        let mut options = image.options();
        options.num_queues = 2;
        options.rate_limiter = Some(Arc::clone(&limiter));
        Rig::new(options)
    });
    for rig in &mut rigs {
        for k in 0..2 {
            let header = HEADER + 16 * k as u64;
            let data = DATA + 0x1000 * k as u64;
            let status = STATUS + k as u64;
            rig.header(header, IN, 8 * k as u64);
            let chain = [(header, 16, 0), (data, 4096, WRITE), (status, 1, WRITE)];
            rig.describe(rings(k), 0, &chain);
            rig.offer(k, 0);
            rig.offer(k, 0);
            rig.kicks[k].write(1).unwrap();
        }
    }
    for rig in &mut rigs {
        for k in 0..2 {
            wait_for(|| rig.used_index(k) == 2);
            let data = DATA + 0x1000 * k as u64;
            assert_eq!(rig.bytes(data, 4096), pattern(64)[4096 * k..4096 * (k + 1)]);
        }
    }
}

#[test]
fn a_request_held_back_by_a_rate_limit_survives_a_pause() {
    let bandwidth = Some(TokenBucketConfig {
        size: 512,
        one_time_burst: None,
        refill_time: 60,
    });
    let config = RateLimiterConfig {
        bandwidth,
        ops: None,
    };
    let image = Image::raw(&pattern(64));
    let mut options = image.options();
    options.rate_limiter = Some(Arc::new(Mutex::new(RateLimiter::new(&config).unwrap())));
    let mut rig = Rig::new(options);
    rig.header(HEADER, IN, 5);
    let chain = [(HEADER, 16, 0), (DATA, 512, WRITE), (STATUS, 1, WRITE)];
    rig.describe(rings(0), 0, &chain);
    for _ in 0..3 {
        rig.offer(0, 0);
    }
    rig.kicks[0].write(1).unwrap();
    wait_for(|| rig.used_index(0) > 0);
    let queues = rig.blk.deactivate();
    assert_eq!(queues[0].queue.next_avail(), rig.used_index(0));
    rig.activate(queues);
    wait_for(|| rig.used_index(0) == 3);
    assert_eq!(rig.bytes(DATA, 512), pattern(64)[5 * 512..6 * 512]);
}

#[test]
fn an_image_that_shrinks_under_the_guest_gives_errors_and_no_stale_data() {
    on_both_engines(&pattern(64), |image, rig| {
        let file = File::options().write(true).open(&image.path).unwrap();
        file.set_len(16 * 512).unwrap();
        assert_eq!(rig.request(IN, 8, (DATA, 16 * 512, WRITE)).0, 1);
        assert_eq!(rig.request(IN, 15, (DATA, 512, WRITE)).0, 0);
    });
}

#[test]
fn a_write_that_the_host_refuses_is_an_error_and_the_device_goes_on() {
    for io_uring in [true, false] {
        // SAFETY: the name is a C string; the descriptor is new, and owned by the File.
        let file = unsafe {
            let fd = libc::memfd_create(c"disk".as_ptr(), libc::MFD_ALLOW_SEALING);
            assert!(fd >= 0);
            File::from_raw_fd(fd)
        };
        file.write_all_at(&pattern(8), 0).unwrap();
        let mut options = Image::raw(&[]).options();
        options.disk.path = format!("/proc/self/fd/{}", file.as_raw_fd()).into();
        options.disk.io_uring = io_uring;
        let mut rig = Rig::new(options);
        // SAFETY: no memory is involved.
        let sealed =
            unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_WRITE) };
        assert_eq!(sealed, 0);
        assert_eq!(rig.request(OUT, 1, (DATA, 512, 0)), (1, 1));
        assert_eq!(rig.request(IN, 1, (DATA, 512, WRITE)), (0, 513));
        assert_eq!(rig.bytes(DATA, 512), pattern(8)[512..1024]);
        let counters = rig.blk.counters();
        assert!(counters.contains(&("write_ops", 0)));
    }
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(48))]

    /// Whatever stands in the rings, the device neither panics nor hangs, touches nothing but
    /// its image and RAM, and stops when it is told to.
    #[test]
    fn no_content_of_the_rings_harms_the_device(
        descriptors in proptest::collection::vec(
            (0..0x20_u64, 0..3_u32, 0..8_u16, 0..QUEUE_SIZE), QUEUE_SIZE as usize),
        heads in proptest::collection::vec(0..QUEUE_SIZE + 1, 1..QUEUE_SIZE as usize),
        headers in proptest::collection::vec((0..16_u32, 0..10_u64), 32),
        io_uring in proptest::bool::ANY,
    ) {
        let image = Image::raw(&pattern(8));
        let mut options = image.options();
        options.disk.io_uring = io_uring;
        let mut rig = Rig::new(options);
        for (k, (kind, sector)) in headers.iter().enumerate() {
            rig.header(0x1000 * k as u64, *kind, *sector);
        }
        for (k, (page, len, flags, next)) in descriptors.iter().enumerate() {
            let at = rings(0) + 16 * k as u64;
            // Lengths of a header, a sector and a status; indirect tables lie in data.
            let len = [16, 512, 1][*len as usize];
            rig.write(page * 0x1000, at);
            rig.write(len, at + 8);
            rig.write(*flags, at + 12);
            rig.write(*next, at + 14);
        }
        for head in heads {
            rig.offer(0, head);
        }
        rig.kicks[0].write(1).unwrap();
        wait_for(|| {
            rig.used_index(0) == rig.available[0]
                || rig.interrupts.resets.load(Ordering::SeqCst) > 0
        });
        proptest::prop_assert_eq!(rig.blk.deactivate().len(), 1);
        proptest::prop_assert_eq!(image.content().len(), 8 * 512);
    }
}
