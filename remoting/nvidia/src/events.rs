//! Hang-ups and events of files: one thread waits for both.

use std::{io, os::fd::OwnedFd, sync::Arc};

use base::{Unpoisoned, note, socket::has_unread};
use rustix::{
    buffer::spare_capacity,
    event::epoll::{self, CreateFlags, EventData, EventFlags},
    net::{SendFlags, send},
};

use crate::{closing::Closing, files::OpenFile, server::Worker};

/// What to wait for.
pub struct Events(OwnedFd);

/// The sign of a device file's event, as opposed to the hang-up of a program's end.
const DEVICE: u64 = 1 << 32;

impl Events {
    /// Nothing to wait for.
    pub fn new() -> io::Result<Self> {
        Ok(Self(epoll::create(CreateFlags::CLOEXEC)?))
    }

    /// Waits for the last copy of the program's end, if the agent of a guest does not.
    pub fn watch_end(&self, file: &OpenFile) -> io::Result<()> {
        let Some(end) = file.end() else { return Ok(()) };
        let data = EventData::new_u64(file.number.into());
        // A hang-up is always reported.
        Ok(epoll::add(&self.0, end, data, EventFlags::empty())?)
    }

    /// Waits neither for a file's end nor for its events any longer.
    pub fn forget(&self, file: &OpenFile) {
        for watched in file.end().into_iter().chain([file.device()]) {
            // One that was never watched is not there.
            let _ = epoll::delete(&self.0, watched);
        }
    }

    /// How many are ready now.
    #[cfg(test)]
    pub fn ready(&self) -> io::Result<usize> {
        let mut list = Vec::with_capacity(4);
        let none = rustix::event::Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        Ok(epoll::wait(
            &self.0,
            spare_capacity(&mut list),
            Some(&none),
        )?)
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
pub fn run(worker: &Arc<Worker>, closing: &Closing) {
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
                closing.close(number);
                continue;
            }
            // Others may have the files while this waits for room.
            let file = worker.files.lock_unpoisoned().get(number);
            if let Some(file) = file {
                tell(worker, &file);
            }
        }
    }
}

/// Sends the program a byte, unless one is still unread; a guest's program, by its agent.
fn tell(worker: &Worker, file: &OpenFile) {
    if let Some(machine) = &worker.machine {
        machine.tell_event(file.number);
    } else if let Some(end) = file.end().filter(|end| !has_unread(end)) {
        // A program's end that is full or gone needs no byte.
        let _ = send(end, &[1], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    }
}
