//! The threads between one side's rings and the connection.

use std::{
    io,
    os::unix::net::UnixStream,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use remoting_proto::wire::{
    Flags, Header,
    api::{Api, Part, WindowUse},
    frame::HEADER,
    messages::{CALLBACK, REPORT},
};
use remoting_transport::{
    bell::{Bell, Futex},
    endpoint::{Gone, Spin},
    ring::{Consumer, Lines, Producer},
    socket,
    window::{Slice, Window},
};

use super::{
    carried::{Owed, Reading},
    channel::{Reader, Writer},
    frame::{BATCH, CHUNK, DATA, Received},
};

/// Maximum sleep of a thread at a ring: the delay until it notices that the connection has ended.
const BELL: Futex = Futex {
    patience: Duration::from_secs(1),
};

/// With at least this many processors, some may poll.
const ENOUGH: usize = 4;
/// A little more than a round trip: a peer that asks again and again finds nobody asleep.
const LONG: Duration = Duration::from_micros(100);
/// With fewer processors, they are left to threads that have work.
const SHORT: Duration = Duration::from_micros(20);

/// How long a thread that waits at a ring of a bridge polls before sleeping.
pub fn spin() -> Duration {
    spin_for(LONG)
}

/// Same as [`spin`], with `long` as the time where there are enough processors.
pub fn spin_for(long: Duration) -> Duration {
    match thread::available_parallelism() {
        Ok(count) if count.get() >= ENOUGH => long,
        _ => SHORT,
    }
}

/// Why nothing is carried any more.
#[derive(Debug, thiserror::Error)]
pub enum Ended {
    /// The peer has closed the connection.
    #[error("the other side has closed the connection")]
    Closed,
    /// The connection is broken.
    #[error("the connection is broken")]
    Connection(#[from] io::Error),
    /// One side has broken the rules of frames or of the ring.
    #[error(transparent)]
    Gone(#[from] Gone),
    /// The peer has sent data for a range outside the window's data.
    #[error("the other side sent {length} bytes for place {offset} of a window that ends at {end}")]
    Outside {
        /// The offset in the window.
        offset: u64,
        /// The number of bytes.
        length: usize,
        /// The size of the window.
        end: u64,
    },
}

/// Which end of the connection this process is.
#[derive(Debug)]
enum Side {
    /// The application's end; this socket nudges its listener.
    Client(UnixStream),
    /// The worker's end.
    Worker,
}

/// The shared state of the two threads.
#[derive(Debug)]
struct Common {
    window: Arc<Window>,
    owed: Owed,
    ended: AtomicBool,
}

/// The two directions of one side, each run by a thread of its own.
#[derive(Debug)]
pub struct Bridge<A> {
    /// From the ring to the connection.
    pub outward: Outward<A>,
    /// From the connection to the ring.
    pub inward: Inward<A>,
}

impl<A: Api> Bridge<A> {
    /// Bridges an application's window and its connection. `nudge` is signalled for messages that
    /// nobody waits for, and closed when the connection has ended.
    pub fn client(window: &Arc<Window>, halves: (Reader, Writer), nudge: UnixStream) -> Self {
        let (from, to) = (window.calls(), window.answers());
        Self::new(window, (from, to), halves, Side::Client(nudge))
    }

    /// Bridges a worker's window and its connection.
    pub fn worker(window: &Arc<Window>, halves: (Reader, Writer)) -> Self {
        let (from, to) = (window.answers(), window.calls());
        Self::new(window, (from, to), halves, Side::Worker)
    }

    fn new(
        window: &Arc<Window>,
        (from, to): (Slice, Slice),
        (reader, writer): (Reader, Writer),
        side: Side,
    ) -> Self {
        let common = Arc::new(Common {
            window: Arc::clone(window),
            owed: Owed::new(window.size()),
            ended: AtomicBool::new(false),
        });
        let is_client = matches!(side, Side::Client(_));
        let outward = Outward {
            common: Arc::clone(&common),
            ring: Consumer::new(from, BELL),
            writer,
            calls: is_client.then(Reading::default),
            batch: Vec::with_capacity(BATCH + CHUNK),
            body: Vec::new(),
        };
        let inward = Inward {
            hand: Hand {
                calls: (!is_client).then(Reading::default),
                ring: Producer::new(to, BELL),
                side,
                common,
            },
            reader,
            received: Received::default(),
        };
        Self { outward, inward }
    }
}

/// From a ring to the connection.
#[derive(Debug)]
pub struct Outward<A> {
    common: Arc<Common>,
    ring: Consumer<Slice, Futex>,
    writer: Writer,
    /// On a client: decodes its calls as they pass.
    calls: Option<Reading<A>>,
    /// Bytes to be written.
    batch: Vec<u8>,
    body: Vec<u8>,
}

impl<A: Api> Outward<A> {
    /// Carries the contents of the ring until the connection ends.
    pub fn run(mut self) -> Ended {
        let ended = self.carry().err().unwrap_or(Ended::Closed);
        // Ends the other direction as well.
        self.writer.close();
        ended
    }

    fn carry(&mut self) -> Result<(), Ended> {
        let mut spin = Spin::new(spin());
        while !self.common.ended.load(Ordering::Relaxed) {
            if self.step()? {
                spin.reset();
            } else if !spin.again() {
                let common = &self.common;
                self.ring
                    .sleep(Duration::ZERO, || common.ended.load(Ordering::Relaxed));
            }
        }
        Ok(())
    }

    /// Carries what is there, up to a batch. Returns whether there was anything.
    pub fn step(&mut self) -> Result<bool, Ended> {
        while self.batch.len() < BATCH && self.frame()? {}
        if self.batch.is_empty() {
            return Ok(false);
        }
        self.flush()?;
        Ok(true)
    }

    /// Takes a frame from the ring, if there is one, and appends it to the batch after the data
    /// that belongs to it.
    fn frame(&mut self) -> Result<bool, Ended> {
        if !self.ring.is_ready() {
            return Ok(false);
        }
        let mut bytes = [0; HEADER];
        self.ring.peek(&mut bytes);
        let header = Header::from_bytes(&bytes);
        let length = header.length as usize;
        if HEADER.saturating_add(length) > self.ring.longest() {
            return Err(Gone::Length(length).into());
        }
        let mut body = std::mem::take(&mut self.body);
        body.resize(length, 0);
        self.ring.take(HEADER, &mut body);
        let part = match &mut self.calls {
            Some(calls) => match calls.frame(header, &body)? {
                Some(WindowUse::Read(part)) => Some(part),
                _ => None,
            },
            None => self.common.owed.due(header, &body),
        };
        if let Some(part) = part {
            self.data(part)?;
        }
        self.batch.extend_from_slice(&bytes);
        self.batch.extend_from_slice(&body);
        self.body = body;
        Ok(true)
    }

    /// Appends a range of the window, chunk by chunk.
    fn data(&mut self, (mut offset, mut left): Part) -> Result<(), Ended> {
        // An invalid range is for the worker to refuse.
        if self.common.window.at(offset, left).is_none() {
            return Ok(());
        }
        while left > 0 {
            let length = left.min(CHUNK as u64);
            let Some(from) = self.common.window.at(offset, length) else {
                return Ok(());
            };
            let header = Header {
                length: length as u32,
                opcode: DATA,
                flags: Flags::default(),
                sequence: offset,
            };
            self.batch.extend_from_slice(&header.to_bytes());
            let at = self.batch.len();
            self.batch.resize(at + length as usize, 0);
            // SAFETY: the window has these bytes, the batch has just got room for them, and a
            // concurrent writer of the window changes only the copied bytes.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    from.cast_const(),
                    self.batch.as_mut_ptr().add(at),
                    length as usize,
                );
            }
            if self.batch.len() >= BATCH {
                self.flush()?;
            }
            // Within the window: no overflow.
            offset += length;
            left -= length;
        }
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.writer.write_all(&self.batch)?;
        self.batch.clear();
        Ok(())
    }
}

/// From the connection to a ring.
#[derive(Debug)]
pub struct Inward<A> {
    reader: Reader,
    received: Received,
    hand: Hand<A>,
}

impl<A: Api> Inward<A> {
    /// Carries what arrives until the connection ends.
    pub fn run(mut self) -> Ended {
        let ended = loop {
            match self.step() {
                Ok(0) => break Ended::Closed,
                Ok(_) => {}
                Err(ended) => break ended,
            }
        };
        let common = &self.hand.common;
        common.ended.store(true, Ordering::Relaxed);
        self.reader.close();
        // The other direction sleeps at its ring.
        for ring in [common.window.calls(), common.window.answers()] {
            BELL.ring(&ring.control().items.0);
        }
        ended
    }

    /// Receives once, and carries what is complete. Returns the number of bytes received.
    pub fn step(&mut self) -> Result<usize, Ended> {
        let count = self.reader.read(self.received.space())?;
        self.received.fill(count);
        let mut nudges = false;
        while let Some((header, body)) = self.received.take()? {
            nudges |= self.hand.frame(header, body)?;
        }
        self.hand.ring.announce();
        if let (true, Side::Client(listener)) = (nudges, &self.hand.side) {
            socket::nudge(listener);
        }
        Ok(count)
    }
}

/// Delivers frames.
#[derive(Debug)]
struct Hand<A> {
    common: Arc<Common>,
    ring: Producer<Slice, Futex>,
    side: Side,
    /// On a worker: decodes calls as they pass.
    calls: Option<Reading<A>>,
}

impl<A: Api> Hand<A> {
    /// Puts one frame into the ring, or data into the window. Returns whether the listener is to be
    /// nudged.
    fn frame(&mut self, header: Header, body: &[u8]) -> Result<bool, Ended> {
        if header.opcode == DATA {
            self.data(header.sequence, body)?;
            return Ok(false);
        }
        if let Some(calls) = &mut self.calls
            && let Some(WindowUse::Write(stage, part)) = calls.frame(header, body)?
        {
            self.common.owed.owe(stage, part)?;
        }
        if HEADER + body.len() > self.ring.longest() {
            return Err(Gone::Length(body.len()).into());
        }
        let bytes = header.to_bytes();
        while !self.ring.write(&bytes, body).map_err(Gone::from)? {
            self.ring
                .wait_for_room(HEADER + body.len())
                .map_err(Gone::from)?;
        }
        Ok(matches!(header.opcode, CALLBACK | REPORT))
    }

    fn data(&self, offset: u64, bytes: &[u8]) -> Result<(), Ended> {
        let window = &self.common.window;
        let Some(to) = window.at(offset, bytes.len() as u64) else {
            return Err(Ended::Outside {
                offset,
                length: bytes.len(),
                end: window.size(),
            });
        };
        // SAFETY: the window has room for these bytes there; they come from private memory.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        Ok(())
    }
}
