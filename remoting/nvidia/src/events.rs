//! Hang-ups and events of files: one thread waits for both.

use std::{io, os::fd::OwnedFd, sync::Arc};

use base::{Unpoisoned, note};
use rustix::{
    buffer::spare_capacity,
    event::epoll::{self, CreateFlags, EventData, EventFlags},
    net::{SendFlags, send},
};

use crate::{files::OpenFile, server::Worker};

/// What to wait for.
pub struct Events(OwnedFd);

/// The sign of a device file's event, as opposed to the hang-up of a program's end.
const DEVICE: u64 = 1 << 32;

impl Events {
    /// Nothing to wait for.
    pub fn new() -> io::Result<Self> {
        Ok(Self(epoll::create(CreateFlags::CLOEXEC)?))
    }

    /// Waits for the last copy of the program's end.
    pub fn watch_end(&self, file: &OpenFile) -> io::Result<()> {
        let data = EventData::new_u64(file.number.into());
        // A hang-up is always reported.
        Ok(epoll::add(&self.0, file.end(), data, EventFlags::empty())?)
    }

    /// Tells the program of events of the device file from now on.
    pub fn watch_device(&self, file: &OpenFile) -> io::Result<()> {
        let data = EventData::new_u64(DEVICE | u64::from(file.number));
        // By edges: the driver forgets an event that was polled, a stand-in may not.
        let flags = EventFlags::IN | EventFlags::PRI | EventFlags::ET;
        match epoll::add(&self.0, file.device(), data, flags) {
            Err(rustix::io::Errno::EXIST) => Ok(()),
            result => Ok(result?),
        }
    }
}

/// Waits until the process ends.
pub fn run(worker: &Worker) {
    let mut list = Vec::with_capacity(64);
    loop {
        list.clear();
        match epoll::wait(&worker.events.0, spare_capacity(&mut list), None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return note!("gantry-nvidia: cannot wait for files: {error}"),
        }
        for event in &list {
            let data = event.data.u64();
            // The number was put into the low half.
            let number = data as u32;
            if data & DEVICE == 0 {
                worker.close(number);
            } else if let Some(file) = worker.files.lock_unpoisoned().get(number) {
                tell(&file);
            }
        }
    }
}

/// Sends a byte, unless one is still unread.
fn tell(file: &Arc<OpenFile>) {
    let mut unread = 0i32;
    // SAFETY: the call writes one int.
    let result = unsafe {
        libc::ioctl(
            std::os::fd::AsRawFd::as_raw_fd(&file.end()),
            libc::TIOCOUTQ,
            &mut unread,
        )
    };
    if result == 0 && unread == 0 {
        // A program's end that is full or gone needs no byte.
        let _ = send(file.end(), &[1], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    }
}
