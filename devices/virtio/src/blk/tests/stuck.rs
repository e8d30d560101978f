//! Storage that does not respond. No real storage does so reliably, so these tests use an engine
//! that completes requests on command.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use disk::{AsyncIo, Finished, Io, Operation};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{
    DATA, HEADER, IN, INDIRECT, Image, OUT, QUEUE_SIZE, Rig, STATUS, WRITE, WRITE_ZEROES, new_blk,
    pattern, rings, wait_for,
};
use crate::device::VirtioDevice;

/// The requests passed to the engine, and whether it completes them.
#[derive(Default)]
struct Storage {
    waiting: Vec<Io>,
    answers: bool,
}

struct Engine {
    storage: Arc<Mutex<Storage>>,
    completion: EventFd,
}

impl AsyncIo for Engine {
    fn completion(&self) -> &EventFd {
        &self.completion
    }
    fn start(&mut self, io: Io) {
        self.storage.lock().unwrap().waiting.push(io);
    }
    fn submit(&mut self) {}
    fn take_finished(&mut self) -> Option<Finished> {
        let mut storage = self.storage.lock().unwrap();
        let io = if storage.answers {
            storage.waiting.pop()?
        } else {
            return None;
        };
        Some(Finished { io, result: Ok(()) })
    }
    fn wait(&mut self) {}
}

#[test]
fn writes_and_zeroes_are_durable_by_themselves_unless_the_driver_can_flush_and_wants_to() {
    /// `VIRTIO_BLK_F_FLUSH`, and the register of `VIRTIO_BLK_F_CONFIG_WCE`.
    const FLUSHES: u64 = 1 << 9;
    const WRITEBACK: u64 = 32;
    for (flushes, writeback, expected) in [(true, 1, false), (true, 0, true), (false, 1, true)] {
        let image = Image::raw(&pattern(8));
        let storage = Arc::<Mutex<Storage>>::default();
        let mut blk = new_blk(image.options()).unwrap();
        let engine = Engine {
            storage: Arc::clone(&storage),
            completion: EventFd::new(EFD_NONBLOCK).unwrap(),
        };
        blk.replace_engine(0, Box::new(engine));
        let features = blk.features();
        if features & 1 << 14 == 0 {
            return println!("skipped: this file system cannot zero ranges");
        }
        let features = features & !if flushes { 0 } else { FLUSHES };
        let mut rig = Rig::with(blk, features);
        rig.blk.write_config(WRITEBACK, &[writeback]);
        let mut asked = Vec::new();
        for (at, (kind, range)) in [(OUT, [0; 16]), (WRITE_ZEROES, ONE_SECTOR)]
            .into_iter()
            .enumerate()
        {
            rig.header(HEADER, kind, 0);
            rig.fill(DATA, &range);
            let len = if kind == OUT { 512 } else { 16 };
            let chain = [(HEADER, 16, 0), (DATA, len, 0), (STATUS, 1, WRITE)];
            // Descriptors of the first one are still in use.
            let first = 3 * at as u16;
            rig.describe(rings(0), first, &chain);
            rig.offer(0, first);
            rig.kicks[0].write(1).unwrap();
            wait_for(|| storage.lock().unwrap().waiting.len() == at + 1);
            asked.push(storage.lock().unwrap().waiting[at].operation);
        }
        let durable = asked.iter().map(|operation| match operation {
            Operation::Write { durable } | Operation::WriteZeroes { durable, .. } => *durable,
            other => panic!("{other:?}"),
        });
        assert_eq!(durable.collect::<Vec<_>>(), [expected; 2]);
        storage.lock().unwrap().answers = true;
    }
}

/// Segment of a write-zeroes request: sector 0, one sector, no flags.
const ONE_SECTOR: [u8; 16] = [0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0];

#[test]
fn a_disk_whose_storage_does_not_answer_says_so_in_time_and_goes_on() {
    let image = Image::raw(&pattern(8));
    let storage = Arc::<Mutex<Storage>>::default();
    let completion = EventFd::new(EFD_NONBLOCK).unwrap();
    let mut blk = new_blk(image.options()).unwrap();
    let engine = Engine {
        storage: Arc::clone(&storage),
        completion: completion.try_clone().unwrap(),
    };
    blk.replace_engine(0, Box::new(engine));
    let features = blk.features();
    let mut rig = Rig::with(blk, features);
    let waiting = || storage.lock().unwrap().waiting.len();
    let offer = |rig: &mut Rig| {
        rig.header(HEADER, IN, 0);
        let chain = [(HEADER, 16, 0), (DATA, 512, WRITE), (STATUS, 1, WRITE)];
        rig.describe(rings(0), 0, &chain);
        rig.offer(0, 0);
        rig.kicks[0].write(1).unwrap();
    };
    offer(&mut rig);
    wait_for(|| waiting() == 1);
    let patience = Duration::from_millis(5);
    let error = rig.blk.quiesce(patience).unwrap_err().to_string();
    let path = image.options().disk.path.display().to_string();
    assert!(error.contains(&path), "{error}");
    assert!(error.contains("1 requests within 5ms"), "{error}");
    // Held back: nothing more reaches the storage until the device may continue.
    offer(&mut rig);
    rig.blk.quiesce(patience).unwrap_err();
    assert_eq!(waiting(), 1);
    rig.blk.carry_on();
    rig.kicks[0].write(1).unwrap();
    wait_for(|| waiting() == 2);
    storage.lock().unwrap().answers = true;
    completion.write(1).unwrap();
    wait_for(|| rig.used_index(0) == 2);
    rig.blk.quiesce(Duration::from_secs(20)).unwrap();
    let queues = rig.blk.deactivate();
    rig.activate(queues);
    offer(&mut rig);
    completion.write(1).unwrap();
    wait_for(|| rig.used_index(0) == 3);
}

/// A disk of 8 GiB on storage that completes requests on command.
fn rig_on(storage: &Arc<Mutex<Storage>>, num_queues: u16) -> (Image, Rig, EventFd) {
    let image = Image::raw(&[]);
    let file = std::fs::File::options().write(true).open(&image.path);
    file.unwrap().set_len(8 << 30).unwrap();
    let mut options = image.options();
    options.num_queues = num_queues;
    let mut blk = new_blk(options).unwrap();
    let completion = EventFd::new(EFD_NONBLOCK).unwrap();
    let engine = Engine {
        storage: Arc::clone(storage),
        completion: completion.try_clone().unwrap(),
    };
    blk.replace_engine(0, Box::new(engine));
    let features = blk.features();
    (image, Rig::with(blk, features), completion)
}

impl Rig {
    /// Makes a read available whose chain names the same 2 MiB of memory `pieces` times.
    fn offer_read(&mut self, head: u16, pieces: usize) {
        const TABLE: u64 = 0x4_0000;
        const SHARED: u64 = 0x20_0000;
        self.header(HEADER, IN, 0);
        let mut chain = vec![(HEADER, 16, 0)];
        chain.extend(std::iter::repeat_n((SHARED, 2 << 20, WRITE), pieces));
        chain.push((STATUS, 1, WRITE));
        self.describe(TABLE, 0, &chain);
        self.describe(
            rings(0),
            head,
            &[(TABLE, 16 * chain.len() as u32, INDIRECT)],
        );
        self.offer(0, head);
    }
}

#[test]
fn a_long_request_is_done_in_steps_and_put_back_between_them() {
    const STEP: u64 = 4 << 20;
    let storage = Arc::<Mutex<Storage>>::default();
    let (_image, mut rig, completion) = rig_on(&storage, 1);
    let waiting = || -> Vec<(u64, u64)> {
        let storage = storage.lock().unwrap();
        let place = |io: &Io| (io.offset, io.len);
        storage.waiting.iter().map(place).collect()
    };
    rig.offer_read(0, 1000);
    rig.kicks[0].write(1).unwrap();
    wait_for(|| waiting() == [(0, STEP)]);
    // The storage answers this step only when somebody already waits for the device.
    rig.blk.quiesce(Duration::from_millis(5)).unwrap_err();
    storage.lock().unwrap().answers = true;
    completion.write(1).unwrap();
    rig.blk.quiesce(Duration::from_secs(20)).unwrap();
    assert_eq!(rig.used_index(0), 0, "the request is not complete");
    storage.lock().unwrap().answers = false;
    let queues = rig.blk.deactivate();
    rig.activate(queues);
    // It starts again, and is complete after all of its steps.
    wait_for(|| waiting() == [(0, STEP)]);
    storage.lock().unwrap().answers = true;
    completion.write(1).unwrap();
    wait_for(|| rig.used_index(0) == 1);
    assert_eq!(rig.read::<u8>(STATUS), 0);
    assert_eq!(rig.read::<u32>(rings(0) + 0x2008), (2000 << 20) + 1);
}

#[test]
fn the_bytes_that_storage_processes_at_a_time_are_limited() {
    let storage = Arc::<Mutex<Storage>>::default();
    // Of 64 MiB, each queue has a half.
    let (_image, mut rig, completion) = rig_on(&storage, 2);
    for head in 0..QUEUE_SIZE {
        rig.offer_read(head, 2);
    }
    rig.kicks[0].write(1).unwrap();
    wait_for(|| storage.lock().unwrap().waiting.len() == 8);
    let error = rig.blk.quiesce(Duration::from_millis(5)).unwrap_err();
    assert!(error.to_string().contains("8 requests"), "{error}");
    rig.blk.carry_on();
    storage.lock().unwrap().answers = true;
    completion.write(1).unwrap();
    wait_for(|| rig.used_index(0) == QUEUE_SIZE);
}

#[test]
fn a_range_is_zeroed_in_steps_that_end_between_clusters() {
    let storage = Arc::<Mutex<Storage>>::default();
    let (_image, mut rig, completion) = rig_on(&storage, 1);
    if rig.features & 1 << 14 == 0 {
        return println!("skipped: this file system cannot zero ranges");
    }
    // 100 MiB from sector 1.
    rig.header(HEADER, WRITE_ZEROES, 0);
    rig.write(1_u64, DATA);
    rig.write(100_u32 << 11, DATA + 8);
    rig.write(0_u32, DATA + 12);
    rig.describe(
        rings(0),
        0,
        &[(HEADER, 16, 0), (DATA, 16, 0), (STATUS, 1, WRITE)],
    );
    rig.offer(0, 0);
    rig.kicks[0].write(1).unwrap();
    wait_for(|| !storage.lock().unwrap().waiting.is_empty());
    {
        let mut storage = storage.lock().unwrap();
        let first = &storage.waiting[0];
        let (offset, len) = (first.offset, first.len);
        assert_eq!((offset, offset + len), (512, 64 << 20));
        storage.answers = true;
    }
    completion.write(1).unwrap();
    wait_for(|| rig.used_index(0) == 1);
    assert_eq!(rig.read::<u8>(STATUS), 0);
}
