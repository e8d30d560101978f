//! Storage that does not answer. Nothing that a test could ask for behaves like that for sure, so
//! the engine is one that answers when it is told to.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{DATA, HEADER, IN, Image, Rig, STATUS, WRITE, new_blk, pattern, rings, wait_for};
use crate::{
    disk::{AsyncIo, Finished, Io},
    virtio::device::VirtioDevice,
};

/// What the engine has been given, and whether it answers.
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
    let error = rig.blk.settle(patience).unwrap_err().to_string();
    let path = image.options().disk.path.display().to_string();
    assert!(error.contains(&path), "{error}");
    assert!(error.contains("1 requests within 5ms"), "{error}");
    // Held back: nothing more reaches the storage, until the device may go on.
    offer(&mut rig);
    rig.blk.settle(patience).unwrap_err();
    assert_eq!(waiting(), 1);
    rig.blk.carry_on();
    rig.kicks[0].write(1).unwrap();
    wait_for(|| waiting() == 2);
    storage.lock().unwrap().answers = true;
    completion.write(1).unwrap();
    wait_for(|| rig.used_index(0) == 2);
    rig.blk.settle(Duration::from_secs(20)).unwrap();
    let queues = rig.blk.deactivate();
    rig.activate(queues);
    offer(&mut rig);
    completion.write(1).unwrap();
    wait_for(|| rig.used_index(0) == 3);
}
