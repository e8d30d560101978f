//! Peers that have connected but not shown a certificate yet, in a bounded number.
//!
//! A further one takes the place of the oldest. Many silent peers therefore cannot keep out a
//! source, which needs its place only for a moment.

use std::{
    collections::VecDeque,
    io,
    net::{Shutdown, TcpStream},
    sync::{Arc, Mutex},
};

use base::Unpoisoned;

/// Maximum number of strangers.
pub const MOST: usize = 16;

/// The strangers of a door.
#[derive(Clone, Default)]
pub struct Strangers(Arc<Mutex<All>>);

#[derive(Default)]
struct All {
    /// The number of the next stranger.
    next: u64,
    /// From the oldest on. Without a socket, the stranger's handshake has completed.
    sockets: VecDeque<(u64, Option<TcpStream>)>,
}

/// A stranger, until it is dropped.
pub struct Stranger {
    number: u64,
    all: Strangers,
}

impl Strangers {
    /// Adds a stranger, whose connection is closed if [`MOST`] others follow.
    pub fn add(&self, socket: &TcpStream) -> io::Result<Stranger> {
        let socket = socket.try_clone()?;
        let mut all = self.0.lock_unpoisoned();
        while all.sockets.len() >= MOST
            && let Some((_, oldest)) = all.sockets.pop_front()
        {
            // Its peer may have closed it already.
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
    /// Protects the stranger from eviction: its connection is not closed any more, whoever follows.
    /// Returns false if it was already evicted.
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
