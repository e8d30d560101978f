//! Those who have connected and have not shown a certificate yet: a bounded number of them.
//!
//! One more takes the place of the oldest. Who says nothing, and has others like it, does not keep out a source, which
//! needs its place for a moment.

use std::{
    collections::VecDeque,
    io,
    net::{Shutdown, TcpStream},
    sync::{Arc, Mutex},
};

use base::Unpoisoned;

/// Most of them.
pub const MOST: usize = 16;

/// Those of a door.
#[derive(Clone, Default)]
pub struct Strangers(Arc<Mutex<All>>);

#[derive(Default)]
struct All {
    /// The next one's number.
    next: u64,
    /// From the oldest on; without a socket: it has come to an end with its certificate.
    sockets: VecDeque<(u64, Option<TcpStream>)>,
}

/// One of them, until it is dropped.
pub struct Stranger {
    number: u64,
    all: Strangers,
}

impl Strangers {
    /// One more, whose connection ends if so many follow.
    pub fn add(&self, socket: &TcpStream) -> io::Result<Stranger> {
        let socket = socket.try_clone()?;
        let mut all = self.0.lock_unpoisoned();
        while all.sockets.len() >= MOST
            && let Some((_, oldest)) = all.sockets.pop_front()
        {
            // It may have ended as well.
            let _ = oldest.map(|oldest| oldest.shutdown(Shutdown::Both));
        }
        let number = all.next;
        all.next += 1;
        all.sockets.push_back((number, Some(socket)));
        Ok(Stranger {
            number,
            all: self.clone(),
        })
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.lock_unpoisoned().sockets.is_empty()
    }
}

impl Stranger {
    /// Its connection is not ended any more, whoever follows; false if it had to make room.
    pub fn is_through(&self) -> bool {
        let mut all = self.all.0.lock_unpoisoned();
        let mut sockets = all.sockets.iter_mut();
        let own = sockets.find(|(number, _)| *number == self.number);
        own.is_some_and(|(_, socket)| socket.take().is_some())
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        let mut all = self.all.0.lock_unpoisoned();
        all.sockets.retain(|(number, _)| *number != self.number);
    }
}
