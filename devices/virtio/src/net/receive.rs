//! Frames from the tap to the guest.
//!
//! With mergeable buffers (virtio 1.2, 5.1.6.4) a frame takes as many chains as it needs. How many
//! that are is known only after reading it, and there is one read for each frame: so chains are
//! gathered for a frame as large as the last ones, and what goes beyond them is read into
//! `spill`, from where it is copied when the driver has made more chains available.

use std::{
    io,
    sync::{Arc, atomic::Ordering},
};

use device_model::throttle::Throttle;

use super::{
    buffers::Buffers,
    frames::Counters,
    tap::{HEADER, Tap},
};
use crate::served::{Next, ServedQueue, Taken};

/// A frame of Ethernet with its header: what is expected without experience.
const SMALL: usize = HEADER + 1518;

/// The largest frame with its header: a segment of 64 KiB with Ethernet's header and VLAN tags.
const LARGEST: usize = HEADER + 65536 + 64;

/// A frame of which the end waits in `spill`.
struct Pending {
    /// Bytes with the header.
    len: usize,
    /// Where the end starts.
    offset: usize,
}

/// A chain that was gathered.
struct Gathered {
    head: u16,
    len: usize,
    vectors: usize,
}

/// Why no more chains were gathered.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Stopped {
    /// There are enough.
    Enough,
    /// The driver has to make more available.
    Exhausted,
    /// No more can be gathered before those that there are have been used.
    Full,
    /// A chain was useless and went back. A driver may add such as fast as they go.
    Useless,
}

/// Serves a receive queue.
pub struct Receiver {
    /// The queue.
    pub queue: ServedQueue,
    /// Limits the frames.
    pub throttle: Option<Throttle>,
    /// Frames may be waiting at the tap. Edge triggered: without buffers of the guest the tap is
    /// left alone until a kick, and nothing spins.
    pub tap_readable: bool,
    counters: Arc<Counters>,
    work: Work,
}

/// What a step works with, beside the queue.
struct Work {
    buffers: Buffers,
    gathered: Vec<Gathered>,
    /// Reused for every frame.
    used: Vec<(u16, u32)>,
    /// Bytes that the next frame may have.
    expected: usize,
    /// Empty without mergeable buffers: what does not fit into one chain is lost then.
    spill: Box<[u8]>,
    pending: Option<Pending>,
}

impl Receiver {
    /// Serves `queue`; with `mergeable` a frame may take several chains.
    pub fn new(
        queue: ServedQueue,
        mergeable: bool,
        throttle: Option<Throttle>,
        counters: Arc<Counters>,
    ) -> Self {
        // Pages that are never written cost nothing.
        let spill = vec![0; if mergeable { LARGEST } else { 0 }];
        Self {
            queue,
            throttle,
            tap_readable: true,
            counters,
            work: Work {
                buffers: Buffers::default(),
                gathered: Vec::new(),
                used: Vec::new(),
                expected: SMALL,
                spill: spill.into_boxed_slice(),
                pending: None,
            },
        }
    }

    /// Moves frames to the guest, until there are none, no buffers, or no tokens. One `readv` for
    /// each frame and one at the end, and one interrupt at most.
    pub fn serve(&mut self, tap: &Tap) {
        let Self {
            queue,
            throttle,
            tap_readable,
            counters,
            work,
        } = self;
        if work.pending.is_none() && !*tap_readable {
            return;
        }
        queue.serve_groups(|taken| {
            if work.pending.is_some() {
                return work.finish(taken, counters);
            }
            // Frames that were read cannot be put back: they are charged afterwards.
            if !throttle.as_mut().is_none_or(Throttle::is_ready) {
                return Ok(Next::Later);
            }
            if !*tap_readable {
                return Ok(Next::Later);
            }
            if work.gather(taken, work.expected)? == Stopped::Useless {
                return Ok(Next::Step);
            }
            if work.gathered.is_empty() {
                return Ok(Next::MoreChains);
            }
            let Work { buffers, spill, .. } = work;
            match buffers.with_more(spill, |vectors| tap.read(vectors)) {
                // The end of a stream, which a tap has not.
                Ok(0) => {
                    *tap_readable = false;
                    Ok(Next::Later)
                }
                Ok(len) => {
                    if let Some(throttle) = throttle {
                        throttle.charge(len as u64);
                    }
                    work.received(taken, len, counters)
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(Next::Step),
                Err(error) => {
                    *tap_readable = false;
                    if error.kind() != io::ErrorKind::WouldBlock {
                        log::debug!("reading from {}: {error}", tap.name());
                    }
                    Ok(Next::Later)
                }
            }
        });
        // What was gathered is back in the queue, and the memory is let go.
        work.buffers.clear();
        work.gathered.clear();
    }
}

impl Work {
    fn mergeable(&self) -> bool {
        !self.spill.is_empty()
    }

    /// Takes chains until they have room for `wanted` bytes; one, if they cannot be merged.
    fn gather(
        &mut self,
        taken: &mut Taken<'_>,
        wanted: usize,
    ) -> Result<Stopped, virtio_queue::Error> {
        loop {
            let enough = self.mergeable() && self.buffers.len() >= wanted;
            if enough || (!self.mergeable() && !self.gathered.is_empty()) {
                return Ok(Stopped::Enough);
            }
            let Some(chain) = taken.take()? else {
                return Ok(if taken.is_all() {
                    Stopped::Full
                } else {
                    Stopped::Exhausted
                });
            };
            let head = chain.head_index();
            let before = self.buffers.count();
            let added = self.buffers.add(chain, taken.ram(), true);
            let vectors = self.buffers.count() - before;
            match added {
                // Each buffer has to hold a header (5.1.6.3.1).
                Some(len) if len >= HEADER => self.gathered.push(Gathered { head, len, vectors }),
                _ => {
                    self.buffers.keep(before);
                    if !self.gathered.is_empty() {
                        taken.put_back();
                        return Ok(Stopped::Full);
                    }
                    taken.publish(&[(head, 0)])?;
                    return Ok(Stopped::Useless);
                }
            }
        }
    }

    /// A frame of `len` bytes was read into what was gathered, and the rest into `spill`.
    fn received(
        &mut self,
        taken: &mut Taken<'_>,
        len: usize,
        counters: &Counters,
    ) -> Result<Next, virtio_queue::Error> {
        self.buffers.mark_written(taken.ram(), len);
        let offset = self.buffers.len();
        // After a large frame room for another one is kept for some time.
        let decayed = self.expected - self.expected / 8;
        self.expected = len.max(decayed).clamp(SMALL, LARGEST);
        if len > offset {
            self.pending = Some(Pending { len, offset });
            return self.finish(taken, counters);
        }
        self.deliver(taken, len, counters)
    }

    /// Delivers the frame that waits for chains, if it fits now.
    fn finish(
        &mut self,
        taken: &mut Taken<'_>,
        counters: &Counters,
    ) -> Result<Next, virtio_queue::Error> {
        let Some(Pending { len, offset }) = self.pending else {
            return Ok(Next::Step);
        };
        match self.gather(taken, len)? {
            Stopped::Enough => {
                let end = &self.spill[..len - offset];
                self.buffers.write(taken.ram(), offset, end);
                self.pending = None;
                self.deliver(taken, len, counters)
            }
            Stopped::Useless => Ok(Next::Step),
            Stopped::Exhausted => Ok(Next::MoreChains),
            // It never fits: it is lost, as on any network.
            Stopped::Full => {
                self.pending = None;
                Ok(Next::Step)
            }
        }
    }

    /// Gives the chains that a frame of `len` bytes takes to the driver.
    fn deliver(
        &mut self,
        taken: &mut Taken<'_>,
        len: usize,
        counters: &Counters,
    ) -> Result<Next, virtio_queue::Error> {
        self.used.clear();
        let (mut rest, mut vectors) = (len, 0);
        for chain in &self.gathered {
            let part = rest.min(chain.len);
            // A frame is far below 4 GiB.
            self.used.push((chain.head, part as u32));
            vectors += chain.vectors;
            rest -= part;
            if rest == 0 {
                break;
            }
        }
        // `num_buffers`, which the tap leaves alone; at most a queue's worth.
        let count = self.used.len() as u16;
        self.buffers
            .write(taken.ram(), HEADER - 2, &count.to_le_bytes());
        taken.publish(&self.used)?;
        self.buffers.forget(vectors);
        self.gathered.drain(..self.used.len());
        counters.rx_frames.fetch_add(1, Ordering::Relaxed);
        let bytes = len.saturating_sub(HEADER) as u64;
        counters.rx_bytes.fetch_add(bytes, Ordering::Relaxed);
        Ok(Next::Step)
    }
}
