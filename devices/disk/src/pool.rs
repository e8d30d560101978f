//! An I/O engine with a few threads that use ordinary system calls: for kernels and containers
//! without io_uring, and for image formats that a library decodes.

use std::{
    collections::VecDeque,
    io,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
};

use base::Unpoisoned;
use device_model::thread::{ThreadRole, ThreadSpawner};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::io::{AsyncIo, Finished, FinishedQueue, Io};

/// Number of threads per queue: enough to keep a disk busy while one of them waits for a flush.
const THREADS: usize = 3;

/// An image with blocking operations.
pub trait Blocking: Send + Sync {
    /// Performs `io` completely.
    fn perform(&self, io: &mut Io) -> io::Result<()>;
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Io>,
    finished: FinishedQueue,
    /// Number of incomplete requests, including waiting ones.
    in_flight: usize,
    closed: bool,
}

struct Shared {
    image: Arc<dyn Blocking>,
    state: Mutex<State>,
    changed: Condvar,
    completion: EventFd,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock_unpoisoned()
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed
            .wait(state)
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self) {
        let mut state = self.lock();
        loop {
            if let Some(mut io) = state.jobs.pop_front() {
                drop(state);
                let result = self.image.perform(&mut io);
                state = self.lock();
                state.finished.push_back(Finished { io, result });
                state.in_flight -= 1;
                self.changed.notify_all();
                // Fails only if the counter is full, in which case it is readable anyway.
                let _ = self.completion.write(1);
            } else if state.closed {
                return;
            } else {
                state = self.wait(state);
            }
        }
    }
}

/// The threads that serve one queue.
pub struct Pool {
    shared: Arc<Shared>,
    started: VecDeque<Io>,
    threads: Vec<thread::JoinHandle<()>>,
}

impl Pool {
    /// Starts threads named `{name}_w0` and so on.
    pub fn new(
        image: Arc<dyn Blocking>,
        spawner: &dyn ThreadSpawner,
        name: &str,
    ) -> io::Result<Self> {
        let mut pool = Self {
            shared: Arc::new(Shared {
                image,
                state: Mutex::default(),
                changed: Condvar::new(),
                completion: EventFd::new(EFD_NONBLOCK)?,
            }),
            started: VecDeque::new(),
            threads: Vec::new(),
        };
        for number in 0..THREADS {
            let shared = Arc::clone(&pool.shared);
            let name = format!("{name}_w{number}");
            let body = Box::new(move || shared.serve());
            pool.threads
                .push(spawner.spawn(ThreadRole::Disk, &name, body)?);
        }
        Ok(pool)
    }
}

impl AsyncIo for Pool {
    fn completion(&self) -> &EventFd {
        &self.shared.completion
    }

    fn start(&mut self, io: Io) {
        self.started.push_back(io);
    }

    fn submit(&mut self) {
        if self.started.is_empty() {
            return;
        }
        let mut state = self.shared.lock();
        state.in_flight += self.started.len();
        state.jobs.append(&mut self.started);
        drop(state);
        self.shared.changed.notify_all();
    }

    fn take_finished(&mut self) -> Option<Finished> {
        self.shared.lock().finished.pop_front()
    }

    fn wait(&mut self) {
        self.submit();
        let mut state = self.shared.lock();
        while state.finished.is_empty() && state.in_flight > 0 {
            state = self.shared.wait(state);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.changed.notify_all();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                log::error!("a disk thread panicked");
            }
        }
    }
}
