//! Moves frames from the tap to the guest.
//!
//! With mergeable buffers (virtio 1.2, 5.1.6.4) a frame takes as many chains as it needs. That
//! number is known only after the frame is read, and there is one read per frame. Chains are
//! therefore gathered for a frame as large as the recent ones. The excess is read into `spill`, and
//! copied from there when the driver has made more chains available.

use std::{
    io,
    sync::{Arc, atomic::Ordering},
};

use device_model::throttle::Throttle;

use super::{
    buffers::Buffers,
    counters::Counters,
    tap::{HEADER, Tap},
};
use crate::served::{Next, ServedQueue, Taken};

/// An Ethernet frame with its header: the expected size without history.
const SMALL: usize = HEADER + 1518;

/// The maximum frame with its header: a segment of 64 KiB with Ethernet header and VLAN tags.
const LARGEST: usize = HEADER + 65536 + 64;

/// A frame whose end is still in `spill`.
struct Pending {
    /// Length in bytes, including the header.
    len: usize,
    /// Offset at which that end starts.
    offset: usize,
}

/// A gathered chain.
struct Gathered {
    head: u16,
    len: usize,
    vectors: usize,
}

/// Why gathering stopped.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Stopped {
    /// There is enough room.
    Enough,
    /// The driver has to make more chains available.
    Exhausted,
    /// No more can be gathered until the present ones have been used.
    Full,
    /// An unusable chain was returned. A driver may add such chains as fast as they are returned.
    Useless,
}

/// Serves a receive queue.
pub struct Receiver {
    /// The queue.
    pub queue: ServedQueue,
    /// Limits the rate of frames.
    pub throttle: Option<Throttle>,
    /// Frames may be waiting at the tap. Edge-triggered: while the guest provides no buffers, the
    /// tap is not polled until a kick, so nothing spins.
    pub tap_readable: bool,
    counters: Arc<Counters>,
    work: Work,
}

/// The working state of a step, beside the queue.
struct Work {
    buffers: Buffers,
    gathered: Vec<Gathered>,
    /// Reused for every frame.
    used: Vec<(u16, u32)>,
    /// Expected size of the next frame in bytes.
    expected: usize,
    /// Empty without mergeable buffers: the part that exceeds one chain is lost then.
    spill: Box<[u8]>,
    pending: Option<Pending>,
}

impl Receiver {
    /// Serves `queue`; with `mergeable`, a frame may take several chains.
    pub fn new(
        queue: ServedQueue,
        mergeable: bool,
        throttle: Option<Throttle>,
        counters: Arc<Counters>,
    ) -> Self {
        // Pages that are never written use no memory.
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

    /// Moves frames to the guest until there are no frames, no buffers or no tokens left. Costs one
    /// `readv` per frame and one at the end, and at most one interrupt.
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
            // Frames that have been read cannot be put back, so they are charged afterwards.
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
                // End of a stream, which a tap does not have.
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
        // What was gathered is back in the queue; release the guest memory.
        work.buffers.clear();
        work.gathered.clear();
    }
}

impl Work {
    fn mergeable(&self) -> bool {
        !self.spill.is_empty()
    }

    /// Gathers chains until they have room for `wanted` bytes; only one if they cannot be merged.
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
                // Each buffer must hold a header (5.1.6.3.1).
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

    /// Handles a frame of `len` bytes that was read into the gathered chains and `spill`.
    fn received(
        &mut self,
        taken: &mut Taken<'_>,
        len: usize,
        counters: &Counters,
    ) -> Result<Next, virtio_queue::Error> {
        self.buffers.mark_written(taken.ram(), len);
        let offset = self.buffers.len();
        // Keep room for another large frame for some time.
        let decayed = self.expected - self.expected / 8;
        self.expected = len.max(decayed).clamp(SMALL, LARGEST);
        if len > offset {
            self.pending = Some(Pending { len, offset });
            return self.finish(taken, counters);
        }
        self.deliver(taken, len, counters)
    }

    /// Delivers the pending frame, if it fits now.
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
            // It can never fit, so it is lost, as on any network.
            Stopped::Full => {
                self.pending = None;
                Ok(Next::Step)
            }
        }
    }

    /// Returns the chains that hold a frame of `len` bytes to the driver.
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
        // `num_buffers`, which the tap does not set; at most one queue's worth.
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
