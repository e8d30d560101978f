//! Connections that carry pages beside the first one, each with a thread of its own on both sides.
//!
//! The destination names a token when it has memory; a connection that begins with it belongs to the
//! migration. A round ends on each of them with a barrier, which is answered when all before it is in
//! memory, so that no page of a later round is overtaken by an older one.

use std::{
    mem,
    sync::{
        Arc, Mutex, RwLock,
        mpsc::{self, Receiver, Sender, SyncSender},
    },
    time::{Duration, Instant},
};

use base::{Unpoisoned, lock::UnpoisonedRw};

use super::{
    Error, Result,
    connection::{Connection, Pages},
    frame::{Header, Kind, protocol},
    pages::Arriving,
    progress::Progress,
    tunnel::Tls,
};

/// Most of them.
pub const MOST: u32 = 8;

/// Bytes of a token.
pub const TOKEN: usize = 16;

/// How long all of them may take to come.
pub const JOIN: Duration = Duration::from_secs(20);

/// How soon the source tries again: a tunnel lets one in at a time.
const AGAIN: Duration = Duration::from_millis(100);

/// Frames that wait for a connection.
const WAITING: usize = 2;

/// What a thread does.
pub type Body = Box<dyn FnOnce() + Send>;

/// By which a source's connections are known.
pub type Token = [u8; TOKEN];

/// One that nobody guesses.
pub fn token() -> Result<Token> {
    let mut token = [0; TOKEN];
    // SAFETY: the buffer has the length that is said.
    let got = unsafe { libc::getrandom(token.as_mut_ptr().cast(), TOKEN, 0) };
    match usize::try_from(got) {
        Ok(TOKEN) => Ok(token),
        _ => Err(Error::Machine("the kernel has no random bytes".to_owned())),
    }
}

/// What a thread of the source is given.
enum Order {
    /// Of a round: runs, and the pages of those that are not zero.
    Pages(u32, Vec<u8>, Vec<u8>),
    Barrier(u32, Sender<()>),
}

/// The source's connections for pages.
#[derive(Default)]
pub struct Lanes {
    orders: Vec<SyncSender<Order>>,
    /// Whose turn it is; 0: the first connection's.
    next: usize,
    /// Why one of them has ended.
    failed: Arc<Mutex<Option<Error>>>,
}

impl Lanes {
    /// Opens so many connections; `start` starts their threads.
    pub fn open(
        count: u32,
        (url, tls): (&str, Option<&Tls>),
        token: &Token,
        (stall, progress): (Duration, &Progress),
        start: &mut dyn FnMut(Body) -> std::result::Result<(), String>,
    ) -> Result<Self> {
        let mut lanes = Self::default();
        for _ in 0..count {
            let mut connection = join(url, tls, token, progress)?;
            connection.stall = stall;
            connection.doing = "sending memory";
            let (orders, of_thread) = mpsc::sync_channel(WAITING);
            let failed = Arc::clone(&lanes.failed);
            let body = move || {
                if let Err(error) = carry(&mut connection, &of_thread) {
                    failed.lock_unpoisoned().get_or_insert(error);
                }
            };
            start(Box::new(body)).map_err(Error::Machine)?;
            lanes.orders.push(orders);
        }
        Ok(lanes)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.orders.is_empty()
    }

    /// Whose turn it is to carry pages; `None`: the first connection's, which the destination would give
    /// up if it were silent for a whole round.
    pub fn turn(&mut self) -> Option<usize> {
        let turn = self.next;
        self.next = (turn + 1) % (self.orders.len() + 1);
        turn.checked_sub(1)
    }

    /// Sends a frame of pages by one of them: a list of runs, and a copy of their pages.
    pub fn send(&self, lane: usize, round: u32, list: Vec<u8>, pages: Vec<u8>) -> Result<()> {
        let order = Order::Pages(round, list, pages);
        self.orders[lane].send(order).map_err(|_| self.error())
    }

    /// Waits until all that was sent is in memory.
    pub fn barrier(&self, round: u32) -> Result<()> {
        let (done, all) = mpsc::channel();
        for lane in &self.orders {
            lane.send(Order::Barrier(round, done.clone()))
                .map_err(|_| self.error())?;
        }
        drop(done);
        match all.iter().count() == self.orders.len() {
            true => Ok(()),
            false => Err(self.error()),
        }
    }

    fn error(&self) -> Error {
        let failed = self.failed.lock_unpoisoned().take();
        failed.unwrap_or_else(|| Error::Machine("a connection for memory has ended".to_owned()))
    }
}

/// A connection that begins with the token.
fn join(url: &str, tls: Option<&Tls>, token: &Token, progress: &Progress) -> Result<Connection> {
    let end = Instant::now() + JOIN;
    loop {
        let joined = Connection::connect(url, tls, progress).and_then(|mut connection| {
            connection.send(Kind::Join, 0, token)?;
            connection.receive(&[Kind::Join], &mut Vec::new())?;
            Ok(connection)
        });
        match joined {
            Err(_) if progress.is_cancelled() => return Err(Error::Cancelled),
            Err(error) if Instant::now() >= end => return Err(error),
            Err(_) => std::thread::sleep(AGAIN),
            joined => return joined,
        }
    }
}

/// A thread of the source: until nobody gives it anything more.
fn carry(connection: &mut Connection, orders: &Receiver<Order>) -> Result<()> {
    for order in orders {
        match order {
            Order::Pages(round, list, pages) => {
                connection.send_pages(round, &list, Pages::Copied(&pages))?;
            }
            Order::Barrier(round, done) => {
                connection.send(Kind::Barrier, round, &[])?;
                connection.receive(&[Kind::Barrier], &mut Vec::new())?;
                // Whoever waits may have failed by another connection.
                let _ = done.send(());
            }
        }
    }
    Ok(())
}

/// RAM that arrives by several connections; taken out when no more may arrive.
#[derive(Clone)]
pub struct Memory(Arc<RwLock<Option<Arriving>>>);

impl Memory {
    /// Of a machine that does not run yet.
    pub fn new(memory: Arriving) -> Self {
        Self(Arc::new(RwLock::new(Some(memory))))
    }

    /// Receives the contents of a frame of pages, which may be anything. Returns the bytes of pages.
    pub fn receive(&self, header: Header, connection: &mut Connection) -> Result<u64> {
        match &*self.0.read_unpoisoned() {
            Some(memory) => memory.receive(header, connection),
            None => Err(protocol("pages after the state")),
        }
    }

    /// Nothing more is received: waits for what is being received, which has to be over soon.
    pub fn close(&self) -> Result<Arriving> {
        let memory = mem::take(&mut *self.0.write_unpoisoned());
        memory.ok_or_else(|| protocol("the state came twice"))
    }
}

/// A thread of the destination: takes pages over until the connection ends, or no more may arrive.
pub fn take(mut connection: Connection, memory: &Memory, progress: &Progress) {
    let mut next = || -> Result<()> {
        let header = connection.receive_header(&[Kind::Pages, Kind::Barrier])?;
        if header.kind == Kind::Barrier {
            connection.receive_contents(header, &mut Vec::new())?;
            return connection.send(Kind::Barrier, header.round, &[]);
        }
        let bytes = memory.receive(header, &mut connection)?;
        progress.update(|info| info.sent_bytes += bytes);
        Ok(())
    };
    loop {
        if let Err(error) = next() {
            // The source sees that it has ended, and fails if it still needs it.
            log::debug!("a connection for memory has ended: {}", base::Chain(&error));
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{io::Write, os::unix::net::UnixStream, thread};

    use super::*;
    use crate::migration::{
        frame::{Run, encode_runs},
        pages::Region,
        progress::Direction,
    };

    #[test]
    fn a_frame_that_never_ends_neither_holds_the_state_up_nor_changes_memory_later() {
        let region = Region::unused(0, 2 << 20).unwrap();
        let mapping = Arc::clone(&region.mapping);
        let memory = Memory::new(Arriving::new(vec![region]));
        let (mut here, there) = UnixStream::pair().unwrap();
        let progress = Progress::new(Direction::Incoming, "test");
        let connection = Connection::of_unix(there, progress.clone()).unwrap();
        let receiving = {
            let (memory, progress) = (memory.clone(), progress.clone());
            thread::spawn(move || take(connection, &memory, &progress))
        };
        let run = Run {
            guest: 0,
            pages: 2,
            zero: false,
        };
        let mut list = Vec::new();
        encode_runs(&[run], &mut list);
        let header = Header::of_pages(0, &list, 2 * 4096, None);
        here.write_all(&header.encode()).unwrap();
        here.write_all(&list).unwrap();
        here.write_all(&[1; 4096]).unwrap();
        // SAFETY: within the mapping; the thread beside writes it.
        let byte = |at: usize| unsafe { mapping.address().add(at).read_volatile() };
        while byte(4095) != 1 {
            thread::yield_now();
        }
        progress.cancel();
        memory.close().unwrap();
        // Nobody takes it any more.
        let _ = here.write_all(&[1; 4096]);
        receiving.join().unwrap();
        assert_eq!(byte(4096), 0);
    }
}
