//! Lanes: connections that carry pages beside the first one, each with a thread of its own on both sides.
//!
//! The destination issues a token when the machine has memory; a connection that begins with the token belongs to the
//! migration. Each page frame is followed by a barrier, which is acknowledged when everything before it is in memory. A
//! round ends when all barriers are acknowledged, so no page of a later round can be overtaken by an older one. Within
//! a round each page is sent once, and the order does not matter: a frame goes to whichever connection has room.
//!
//! Meanwhile the first connection carries no pages. An empty page frame now and then shows that the source is alive,
//! however slow the others are.

use std::{
    mem,
    sync::{
        Arc, Mutex, RwLock,
        mpsc::{self, Receiver, RecvTimeoutError, Sender, SyncSender, TrySendError},
    },
    time::{Duration, Instant},
};

use base::{Cancel, Unpoisoned, lock::UnpoisonedRw};

use super::{
    Error, Result,
    connection::{Connection, Movement, OtherSide, Pages},
    frame::{Header, Kind, MAX_PAGES, protocol},
    pages::{Arriving, PAGE},
    progress::Progress,
    tunnel::Tls,
};

/// Maximum number of lanes.
pub const MOST: u32 = 128;

/// Length of a token in bytes.
pub const TOKEN: usize = 16;

/// How long the source keeps trying to open one lane.
const JOIN: Duration = Duration::from_secs(20);

/// Additional time per lane until all have connected: they are opened one after the other, and each takes a few network
/// round trips.
const EACH: Duration = Duration::from_millis(500);

/// Retry interval of the source: a tunnel accepts one connection at a time.
const AGAIN: Duration = Duration::from_millis(20);

/// Maximum number of frames queued per lane.
const WAITING: usize = 2;

/// Maximum number of bytes of pages that are queued at the source or being sent, over all lanes.
const OUTSTANDING: usize = 24 << 20;

/// Body of a thread.
pub type Body = Box<dyn FnOnce() + Send>;

/// Identifies the connections of a source.
pub type Token = [u8; TOKEN];

/// Creates an unpredictable token.
pub fn token() -> Result<Token> {
    let mut token = [0; TOKEN];
    // SAFETY: the buffer has the given length.
    let got = unsafe { libc::getrandom(token.as_mut_ptr().cast(), TOKEN, 0) };
    match usize::try_from(got) {
        Ok(TOKEN) => Ok(token),
        _ => Err(Error::Machine("the kernel has no random bytes".to_owned())),
    }
}

/// An order for a lane's thread at the source.
enum Order {
    /// Send a page frame of a round: encoded runs, and the pages of the non-zero ones.
    Pages(u32, Vec<u8>, Vec<u8>),
    /// Report when everything before is in memory.
    Barrier(Sender<()>),
}

/// Time limit for opening `count` lanes.
pub fn patience(count: u32) -> Duration {
    JOIN + EACH * count
}

/// Where a source's lanes connect to.
pub struct To<'a> {
    /// The destination's URL.
    pub url: &'a str,
    /// TLS settings, if they are encrypted.
    pub tls: Option<&'a Tls>,
    /// The token that identifies them to the destination.
    pub token: &'a Token,
    /// How long the destination may keep silent.
    pub stall: Duration,
    /// The peer of the first connection.
    pub destination: &'a OtherSide,
    /// Cancels the migration.
    pub progress: &'a Progress,
}

/// The source's lanes.
pub struct Lanes {
    orders: Vec<SyncSender<Order>>,
    /// The lane that is tried first for the next frame.
    next: usize,
    /// Signals that a lane has room again or has failed.
    room: (SyncSender<()>, Receiver<()>),
    /// The error of the first lane that failed.
    failed: Arc<Mutex<Option<Error>>>,
    /// Ends all lanes: one has failed, or the sender is gone.
    end: Cancel,
}

impl Default for Lanes {
    fn default() -> Self {
        Self {
            orders: Vec::new(),
            next: 0,
            room: mpsc::sync_channel(1),
            failed: Arc::default(),
            end: Cancel::default(),
        }
    }
}

impl Drop for Lanes {
    fn drop(&mut self) {
        self.end.cancel();
    }
}

impl Lanes {
    /// Opens `count` lanes; `start` starts the thread of each.
    pub fn open(
        count: u32,
        to: &To<'_>,
        start: &mut dyn FnMut(u32, Body) -> std::result::Result<(), String>,
    ) -> Result<Self> {
        let mut lanes = Self::default();
        let movement = Movement::default();
        for number in 0..count {
            let mut connection = join(to)?;
            connection.stall = to.stall;
            connection.beside = Some(movement.clone());
            connection.doing = "sending memory";
            connection.end = lanes.end.clone();
            let (orders, of_thread) = mpsc::sync_channel(WAITING);
            let (failed, end) = (Arc::clone(&lanes.failed), lanes.end.clone());
            let room = lanes.room.0.clone();
            let body = move || {
                for order in of_thread {
                    // If the channel is full, a signal is already pending.
                    let _ = room.try_send(());
                    if let Err(error) = carry(&mut connection, &order) {
                        let error = connection.why(error);
                        failed.lock_unpoisoned().get_or_insert(error);
                        // Other lanes may be waiting for a destination that no longer accepts data.
                        end.cancel();
                        let _ = room.try_send(());
                        return;
                    }
                }
            };
            start(number, Box::new(body)).map_err(Error::Machine)?;
            lanes.orders.push(orders);
        }
        Ok(lanes)
    }

    /// Number of bytes of pages per frame: fewer with many lanes, so that the total of queued data is bounded.
    pub fn frame(&self) -> usize {
        let frames = self.orders.len() * (WAITING + 1);
        let each = OUTSTANDING / frames.max(1);
        (each - each % PAGE as usize).min(MAX_PAGES)
    }

    /// Whether there are no lanes.
    pub fn is_empty(&self) -> bool {
        self.orders.is_empty()
    }

    /// Sends a page frame on a lane that has room: a list of runs, and a copy of their pages. Keeps the first
    /// connection alive meanwhile.
    pub fn send(
        &mut self,
        round: u32,
        list: Vec<u8>,
        pages: Vec<u8>,
        first: &mut Connection,
    ) -> Result<()> {
        let mut order = Order::Pages(round, list, pages);
        loop {
            for _ in 0..self.orders.len() {
                let lane = self.next;
                self.next = (lane + 1) % self.orders.len();
                match self.orders[lane].try_send(order) {
                    Ok(()) => return first.keep_alive(round),
                    Err(TrySendError::Full(back)) => order = back,
                    Err(TrySendError::Disconnected(_)) => return Err(self.error()),
                }
            }
            self.await_room(round, first)?;
        }
    }

    /// Waits until everything that was sent is in memory, and keeps the first connection alive meanwhile.
    pub fn barrier(&self, round: u32, first: &mut Connection) -> Result<()> {
        let (done, all) = mpsc::channel();
        let mut left: Vec<_> = self.orders.iter().collect();
        while !left.is_empty() {
            let mut ended = false;
            left.retain(|lane| match lane.try_send(Order::Barrier(done.clone())) {
                Ok(()) => false,
                Err(TrySendError::Full(_)) => true,
                Err(TrySendError::Disconnected(_)) => {
                    ended = true;
                    false
                }
            });
            if ended {
                return Err(self.error());
            }
            if !left.is_empty() {
                self.await_room(round, first)?;
            }
        }
        drop(done);
        let mut count = 0;
        while count < self.orders.len() {
            match all.recv_timeout(first.quiet_left()) {
                Ok(()) => count += 1,
                Err(RecvTimeoutError::Timeout) => first.keep_alive(round)?,
                Err(RecvTimeoutError::Disconnected) => return Err(self.error()),
            }
        }
        Ok(())
    }

    /// Waits until a lane may have room.
    fn await_room(&self, round: u32, first: &mut Connection) -> Result<()> {
        if self.failed.lock_unpoisoned().is_some() {
            return Err(self.error());
        }
        // The only possible failure is a timeout: the sending end is held here, too.
        let _ = self.room.1.recv_timeout(first.quiet_left());
        first.keep_alive(round)
    }

    fn error(&self) -> Error {
        let failed = self.failed.lock_unpoisoned().take();
        failed.unwrap_or_else(|| Error::Machine("a connection for memory has ended".to_owned()))
    }
}

/// Opens a connection that begins with the token.
fn join(to: &To<'_>) -> Result<Connection> {
    let end = Instant::now() + JOIN;
    loop {
        let connection = Connection::connect(to.url, to.tls, to.progress);
        let joined = connection.and_then(|mut connection| {
            connection.send(Kind::Join, 0, to.token)?;
            connection.receive(&[Kind::Join], &mut Vec::new())?;
            Ok(connection)
        });
        match joined {
            Err(_) if to.progress.is_cancelled() => return Err(Error::Cancelled),
            Err(_) if to.destination.has_ended(Duration::ZERO) => {
                return Err(to.destination.broken());
            }
            Err(error) if Instant::now() >= end => return Err(error),
            Err(_) => std::thread::sleep(AGAIN),
            joined => return joined,
        }
    }
}

/// Carries out an order in a lane's thread at the source.
fn carry(connection: &mut Connection, order: &Order) -> Result<()> {
    match order {
        Order::Pages(round, list, pages) => {
            connection.send_pages(*round, list, Pages::Copied(pages))?;
        }
        Order::Barrier(done) => {
            connection.hear(0)?;
            // The waiting thread may already have failed because of another connection.
            let _ = done.send(());
        }
    }
    Ok(())
}

/// RAM that is received on several connections; taken out when no more may arrive.
#[derive(Clone)]
pub struct Memory(Arc<RwLock<Option<Arriving>>>);

impl Memory {
    /// The RAM of a machine that does not run yet.
    pub fn new(memory: Arriving) -> Self {
        Self(Arc::new(RwLock::new(Some(memory))))
    }

    /// Receives the contents of a page frame, which are untrusted. Returns the number of bytes of pages.
    pub fn receive(&self, header: Header, connection: &mut Connection) -> Result<u64> {
        match &*self.0.read_unpoisoned() {
            Some(memory) => memory.receive(header, connection),
            None => Err(protocol("pages after the state")),
        }
    }

    /// Stops receiving: waits for frames that are being received, which must be over soon, and takes the memory out.
    pub fn close(&self) -> Result<Arriving> {
        let memory = mem::take(&mut *self.0.write_unpoisoned());
        memory.ok_or_else(|| protocol("the state came twice"))
    }
}

/// Why a lane of the destination has failed, unless the source ended it.
pub type Failed = Arc<Mutex<Option<Error>>>;

/// A lane's thread at the destination: receives pages until the connection ends or no more may arrive. It allocates a
/// list of runs at most: pages go directly into memory.
pub fn take(mut connection: Connection, memory: &Memory, progress: &Progress, failed: &Failed) {
    let next = |connection: &mut Connection| -> Result<()> {
        let header = connection.next_header()?;
        match header.kind {
            Kind::Pages => {}
            Kind::Barrier => {
                connection.receive_contents(header, &mut Vec::new())?;
                return connection.send(Kind::Barrier, header.round, &[]);
            }
            // Not even failure reasons are accepted: those arrive on the first connection.
            kind => return Err(protocol(format!("{kind:?} by a connection for memory"))),
        }
        let bytes = memory.receive(header, connection)?;
        progress.update(|info| info.sent_bytes += bytes);
        Ok(())
    };
    loop {
        if let Err(error) = next(&mut connection) {
            // The source notices the end of the connection, and fails if it still needs it.
            log::debug!("a connection for memory has ended: {}", base::Chain(&error));
            if matches!(error, Error::Protocol(_) | Error::Machine(_)) {
                connection.send_failure(&[error.to_string()]);
                failed.lock_unpoisoned().get_or_insert(error);
            }
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{io::Write, os::unix::net::UnixStream, thread};

    use super::*;
    use crate::{
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
            thread::spawn(move || take(connection, &memory, &progress, &Failed::default()))
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
        // SAFETY: within the mapping, which the other thread writes.
        let byte = |at: usize| unsafe { mapping.address().add(at).read_volatile() };
        while byte(4095) != 1 {
            thread::yield_now();
        }
        progress.cancel();
        memory.close().unwrap();
        // Nobody reads it any more.
        let _ = here.write_all(&[1; 4096]);
        receiving.join().unwrap();
        assert_eq!(byte(4096), 0);
    }

    #[test]
    fn a_destination_says_by_the_connection_that_fails_why_it_does() {
        let memory = Memory::new(Arriving::new(vec![Region::unused(0, 1 << 20).unwrap()]));
        let (here, there) = UnixStream::pair().unwrap();
        let progress = Progress::new(Direction::Incoming, "test");
        let [mut here, there] =
            [here, there].map(|end| Connection::of_unix(end, progress.clone()).unwrap());
        let failed = Failed::default();
        here.send(Kind::Go, 0, &[]).unwrap();
        take(there, &memory, &progress, &failed);
        // A thread that was sending when the connection ended gets the reason, too.
        let broken = here.send(Kind::Barrier, 0, &[]).unwrap_err();
        let said = here.why(broken).to_string();
        assert!(said.contains("Go by a connection for memory"), "{said}");
        assert!(failed.lock_unpoisoned().is_some());
    }

    /// The source's end of `count` lanes, and the orders that they receive.
    fn lanes(count: usize) -> (Lanes, Vec<Receiver<Order>>) {
        let mut lanes = Lanes::default();
        let channels = (0..count).map(|_| mpsc::sync_channel(WAITING));
        let (orders, given) = channels.unzip();
        lanes.orders = orders;
        (lanes, given)
    }

    #[test]
    fn a_connection_that_takes_nothing_does_not_keep_others_from_what_there_is() {
        const FRAMES: usize = 20;
        let (mut lanes, given) = lanes(3);
        let room = lanes.room.0.clone();
        let (here, _there) = UnixStream::pair().unwrap();
        let progress = Progress::new(Direction::Outgoing, "test");
        let mut first = Connection::of_unix(here, progress).unwrap();
        // If no lane has room, the sender retries soon.
        first.quiet = Duration::from_millis(10);
        let sending = thread::spawn(move || {
            for round in 0..FRAMES as u32 {
                let sent = lanes.send(round, Vec::new(), Vec::new(), &mut first);
                sent.unwrap();
            }
        });
        let (slow, others) = given.split_first().unwrap();
        let mut rounds = Vec::new();
        let began = Instant::now();
        // All frames but those that are queued for the slow lane.
        while rounds.len() < FRAMES - WAITING {
            for other in others {
                if let Ok(Order::Pages(round, ..)) = other.try_recv() {
                    rounds.push(round);
                    let _ = room.try_send(());
                }
            }
            assert!(began.elapsed() < JOIN, "{rounds:?}");
            thread::yield_now();
        }
        sending.join().unwrap();
        rounds.extend(slow.try_iter().map(|order| match order {
            Order::Pages(round, ..) => round,
            Order::Barrier(_) => panic!("nobody waits"),
        }));
        rounds.sort_unstable();
        assert!(rounds.iter().copied().eq(0..FRAMES as u32), "{rounds:?}");
    }

    #[test]
    fn what_waits_for_all_connections_is_bounded_however_many_there_are() {
        for count in 0..=MOST as usize {
            let frame = lanes(count).0.frame();
            assert!(frame > 0 && frame.is_multiple_of(PAGE as usize) && frame <= MAX_PAGES);
            assert!(count * (WAITING + 1) * frame <= OUTSTANDING, "{count}");
        }
        assert_eq!(
            [1, 8, 128].map(|count| lanes(count).0.frame()),
            [1 << 20, 1 << 20, 64 << 10]
        );
    }
}
