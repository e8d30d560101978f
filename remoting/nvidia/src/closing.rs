//! Closes files on a thread of its own: the driver may take long, and a call that holds up the order of calls may take
//! longer.

use std::{
    io,
    sync::{
        Arc,
        mpsc::{Sender, channel},
    },
    thread,
};

use base::Unpoisoned;

use crate::server::Worker;

/// Has files closed in the order in which their last copies were.
#[derive(Clone)]
pub struct Closing {
    worker: Arc<Worker>,
    // A file is sent once, so that it holds no more than there are files.
    numbers: Sender<u32>,
}

impl Closing {
    /// Starts the thread.
    pub fn start(worker: &Arc<Worker>) -> io::Result<Self> {
        let (numbers, closed) = channel();
        let closes = worker.clone();
        let run = move || closed.iter().for_each(|number| closes.close(number));
        thread::Builder::new().name("closing".into()).spawn(run)?;
        Ok(Self {
            worker: worker.clone(),
            numbers,
        })
    }

    /// Has a file closed whose last copy is, and waits neither for its end nor for its events any longer. Does nothing
    /// the second time.
    pub fn close(&self, number: u32) {
        let file = self.worker.files.lock_unpoisoned().get(number);
        if let Some(file) = file.filter(|file| file.leave()) {
            self.worker.events.forget(&file);
            // The thread lives as long as this.
            let _ = self.numbers.send(number);
        }
    }
}
