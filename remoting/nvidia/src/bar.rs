//! Where a guest sees pages of device files: places in a BAR of the machine's port.

use std::{
    collections::BTreeMap,
    io::{self, Read},
    os::{fd::BorrowedFd, unix::net::UnixStream},
    process,
    sync::{Arc, Mutex},
};

use base::{Unpoisoned, note, socket};
use remoting_proto::apis::nvidia::{PAGE, PageAnswer, PageRequest};

/// Places begin at multiples of this, so that no doorbells of two programs share a large page of the driver's.
const UNIT: u64 = 64 << 10;

/// The BAR, as far as the worker knows it: the machine refuses what lies outside.
pub struct Bar {
    /// For one request at a time.
    connection: Mutex<UnixStream>,
    /// The length of each place, by its offset.
    taken: Mutex<BTreeMap<u64, u64>>,
}

/// A place where the guest sees pages of a device file. When it is dropped, the guest does not see them any longer.
pub struct Place {
    bar: Arc<Bar>,
    offset: u64,
    length: u64,
}

impl Bar {
    /// The BAR of the machine at the other end of a connection, whose reads block.
    pub fn new(connection: UnixStream) -> Arc<Self> {
        Arc::new(Self {
            connection: Mutex::new(connection),
            taken: Mutex::default(),
        })
    }

    /// Shows the first `length` bytes of a device file, which a call has prepared for being mapped. The machine keeps
    /// `control` open as long, on which the client lives that has what is shown: if this process is killed, the driver
    /// does not free it before the guest has lost sight of it.
    ///
    /// # Errors
    /// The machine has no room, or cannot map the file.
    pub fn place(
        self: &Arc<Self>,
        file: BorrowedFd<'_>,
        control: BorrowedFd<'_>,
        length: u64,
        writable: bool,
    ) -> io::Result<Place> {
        let rounded = length.checked_next_multiple_of(PAGE);
        let length = rounded.filter(|length| *length > 0);
        // The driver maps no more than it was asked for: the rest of the last unit stays empty.
        let room = length.and_then(|length| length.checked_next_multiple_of(UNIT));
        let (Some(length), Some(room)) = (length, room) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let mut taken = self.taken.lock_unpoisoned();
        let mut offset = 0u64;
        for (&start, &other) in taken.iter() {
            if start - offset >= room {
                break;
            }
            // The machine has accepted it: it lies in the BAR.
            offset = start + other;
        }
        offset.checked_add(room).ok_or(io::ErrorKind::OutOfMemory)?;
        let request = PageRequest::Place {
            offset,
            length,
            writable,
        };
        self.ask(request, &[file, control])?;
        taken.insert(offset, room);
        Ok(Place {
            bar: self.clone(),
            offset,
            length,
        })
    }

    fn ask(&self, request: PageRequest, files: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut connection = self.connection.lock_unpoisoned();
        socket::send(&connection, &request.to_bytes(), files)?;
        let mut answer = [0; PageAnswer::SIZE];
        connection.read_exact(&mut answer)?;
        match PageAnswer::from_bytes(answer) {
            PageAnswer(0) => Ok(()),
            PageAnswer(error) => Err(io::Error::from_raw_os_error(error.cast_signed())),
        }
    }
}

impl Place {
    /// Where it begins in the BAR.
    pub fn offset(&self) -> u64 {
        self.offset
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let (offset, length) = (self.offset, self.length);
        let request = PageRequest::Remove { offset, length };
        if let Err(error) = self.bar.ask(request, &[]) {
            // The driver may give these pages to others as soon as this returns. They stay this process's until it ends,
            // which the machine notices.
            note!("gantry-nvidia: the machine does not give device pages back: {error}");
            process::exit(1);
        }
        self.bar.taken.lock_unpoisoned().remove(&offset);
    }
}

#[cfg(test)]
mod tests {
    use std::{fs::File, os::fd::AsFd, thread};

    use super::*;

    /// A machine with a BAR of this size, and what it was asked for.
    fn machine(size: u64) -> (Arc<Bar>, thread::JoinHandle<Vec<PageRequest>>) {
        let (worker, mut machine) = UnixStream::pair().expect("there are descriptors");
        let serve = move || {
            let mut asked = Vec::new();
            let mut bytes = [0; PageRequest::SIZE];
            while let Ok(files) = socket::receive_exact(&machine, &mut bytes) {
                let request = PageRequest::from_bytes(&bytes).expect("it is one");
                let (end, count) = match request {
                    PageRequest::Place { offset, length, .. } => (offset + length, 2),
                    PageRequest::Remove { offset, length } => (offset + length, 0),
                };
                assert_eq!(files.len(), count);
                let error = if end > size { libc::ENOSPC } else { 0 };
                let answer = PageAnswer(error.cast_unsigned()).to_bytes();
                io::Write::write_all(&mut machine, &answer).expect("it is read");
                asked.push(request);
            }
            asked
        };
        (Bar::new(worker), thread::spawn(serve))
    }

    #[test]
    fn a_place_is_taken_until_it_is_dropped_and_none_is_outside() {
        let (bar, machine) = machine(3 * UNIT);
        let file = File::open("/dev/null").expect("it is there");
        let place = |length, writable| bar.place(file.as_fd(), file.as_fd(), length, writable);
        let first = place(1, true).expect("there is room");
        let second = place(UNIT, false).expect("there is room");
        let third = place(4096, true).expect("there is room");
        let all = [&first, &second, &third].map(Place::offset);
        assert_eq!(all, [0, UNIT, 2 * UNIT]);
        let full = place(1, true).err().and_then(|error| error.raw_os_error());
        assert_eq!(full, Some(libc::ENOSPC));
        drop(second);
        assert!(place(UNIT + 1, true).is_err(), "the gap is too small");
        let again = place(UNIT, true).expect("there is room");
        assert_eq!(again.offset(), UNIT);
        for length in [0, u64::MAX] {
            assert!(place(length, true).is_err(), "{length}");
        }
        drop((first, third, again));
        drop(bar);
        let asked = machine.join().expect("it has not failed");
        let removed = asked
            .iter()
            .filter(|request| matches!(request, PageRequest::Remove { .. }));
        assert_eq!(removed.count(), 4);
        let placed = |offset, length, writable| PageRequest::Place {
            offset,
            length,
            writable,
        };
        assert_eq!(asked[0], placed(0, 4096, true), "no more than there is");
        assert_eq!(asked[1], placed(UNIT, UNIT, false));
    }
}
