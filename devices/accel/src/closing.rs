//! Closing what a worker has sent, on threads of its own.
//!
//! A driver may take long to free what belongs to a file, and a file system that another process
//! serves may never answer. As long as a thread hangs, others close the rest.

use std::{
    collections::VecDeque,
    io,
    os::fd::OwnedFd,
    sync::{Arc, Mutex},
};

use base::Unpoisoned;
use device_model::thread::{ThreadRole, ThreadSpawner};

/// Maximum number of threads.
const MOST_THREADS: usize = 16;
/// With more files than these, a worker has sent them faster than they close.
const MOST: usize = 512;

/// Closes files of the workers of a port.
pub struct Closing {
    queue: Arc<Mutex<Queue>>,
    spawner: Arc<dyn ThreadSpawner>,
    thread_name: String,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<OwnedFd>,
    /// Number of threads, each of which closes a file.
    threads: usize,
}

impl Closing {
    /// Nothing is to be closed yet.
    pub fn new(spawner: Arc<dyn ThreadSpawner>, port: &str) -> Self {
        Self {
            queue: Arc::default(),
            spawner,
            thread_name: format!("{port}_cl"),
        }
    }

    /// Closes files, and those that still wait for a thread. Does not wait.
    ///
    /// # Errors
    /// No thread starts: they stay open at least until the next call.
    pub fn close(&self, files: Vec<OwnedFd>) -> io::Result<()> {
        {
            let mut queue = self.queue.lock_unpoisoned();
            queue.waiting.extend(files);
            if queue.waiting.is_empty() || queue.threads >= MOST_THREADS {
                return Ok(());
            }
            queue.threads += 1;
        }
        let queue = Arc::clone(&self.queue);
        let work = Box::new(move || while close_one(&queue) {});
        let started = self
            .spawner
            .spawn(ThreadRole::Accel, &self.thread_name, work);
        started.map(drop).inspect_err(|_| {
            self.queue.lock_unpoisoned().threads -= 1;
        })
    }

    /// Whether there are so many files that no worker may send more.
    pub fn is_full(&self) -> bool {
        let queue = self.queue.lock_unpoisoned();
        queue.waiting.len() + queue.threads > MOST
    }
}

/// False once there is nothing to close: the thread ends.
fn close_one(queue: &Mutex<Queue>) -> bool {
    let file = {
        let mut queue = queue.lock_unpoisoned();
        let file = queue.waiting.pop_front();
        if file.is_none() {
            queue.threads -= 1;
        }
        file
    };
    file.map(drop).is_some()
}
