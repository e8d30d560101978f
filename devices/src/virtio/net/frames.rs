//! One pair of queues and its queue of the tap.

use std::{
    io,
    os::fd::AsRawFd,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use event_manager::{EventOps, Events, MutEventSubscriber};
use virtio_queue::DescriptorChain;
use vm_memory::{GuestMemoryBackend, VolatileSlice};
use vmm_sys_util::epoll::EventSet;

use super::{
    control::ControlQueue,
    tap::{HEADER, Tap},
};
use crate::{
    memory::GuestRam,
    rate_limiter::{RateLimiter, TokenType},
    virtio::{
        served::{Chain, ServedQueue},
        worker::DeviceWorker,
    },
};

/// Buffers of one frame at most: what readv and writev take.
const MAX_BUFFERS: usize = 1024;

const KICK_RECEIVE: u32 = 0;
const KICK_TRANSMIT: u32 = 1;
const TAP: u32 = 2;
const RECEIVE_LIMIT: u32 = 3;
const TRANSMIT_LIMIT: u32 = 4;
const KICK_CONTROL: u32 = 5;

/// What a card has moved.
#[derive(Debug, Default)]
pub struct Counters {
    pub rx_bytes: AtomicU64,
    pub rx_frames: AtomicU64,
    pub tx_bytes: AtomicU64,
    pub tx_frames: AtomicU64,
}

/// Serves a pair of queues.
pub struct PairWorker {
    pub receive: ServedQueue,
    pub transmit: ServedQueue,
    /// With the first pair.
    pub control: Option<ControlQueue>,
    pub tap: Tap,
    pub counters: Arc<Counters>,
    /// Limits of the two directions.
    pub receive_limit: Option<RateLimiter>,
    pub transmit_limit: Option<RateLimiter>,
    /// Frames may be waiting at the tap. Edge triggered: without buffers of the guest the tap is
    /// left alone until a kick, and nothing spins.
    pub tap_readable: bool,
    /// Reused for every frame.
    pub vectors: Vec<libc::iovec>,
}

// SAFETY: the vectors are scratch space: filled, used and cleared within one call.
unsafe impl Send for PairWorker {}

/// Collects the buffers of a chain that the device may write (or read); false if there are too
/// many or any is not RAM.
fn collect(
    chain: DescriptorChain<&GuestRam>,
    ram: &GuestRam,
    writable: bool,
    vectors: &mut Vec<libc::iovec>,
) -> Option<usize> {
    vectors.clear();
    let mut total = 0_usize;
    for descriptor in chain {
        if descriptor.is_write_only() != writable {
            return None;
        }
        let mut address = descriptor.addr();
        let mut rest = descriptor.len() as usize;
        total = total.checked_add(rest)?;
        while rest > 0 {
            // A buffer may span regions of RAM.
            let (region, offset) = ram.to_region_addr(address)?;
            let available = vm_memory::GuestMemoryRegion::len(region).checked_sub(offset.0)?;
            let len = rest.min(usize::try_from(available).unwrap_or(usize::MAX));
            let slice: VolatileSlice<'_, ()> =
                vm_memory::GuestMemoryRegion::get_slice(region, offset, len).ok()?;
            if vectors.len() == MAX_BUFFERS {
                return None;
            }
            let base = slice.ptr_guard_mut().as_ptr().cast();
            vectors.push(libc::iovec {
                iov_base: base,
                iov_len: len,
            });
            address.0 = address.0.checked_add(len as u64)?;
            rest -= len;
        }
    }
    Some(total)
}

fn allowed(limiter: &mut Option<RateLimiter>, bytes: u64) -> bool {
    let Some(limiter) = limiter else { return true };
    if !limiter.consume(1, TokenType::Ops) {
        return false;
    }
    if !limiter.consume(bytes, TokenType::Bytes) {
        limiter.refund(1, TokenType::Ops);
        return false;
    }
    true
}

impl PairWorker {
    /// Moves frames from the tap to the guest, until there are none, no buffers, or no tokens.
    fn receive(&mut self) {
        let Self {
            receive,
            tap,
            counters,
            receive_limit,
            tap_readable,
            vectors,
            ..
        } = self;
        if !*tap_readable {
            return;
        }
        let limited =
            |limit: &Option<RateLimiter>| limit.as_ref().is_some_and(RateLimiter::is_blocked);
        if limited(receive_limit) {
            return;
        }
        receive.serve(|chain, ram| {
            if limited(receive_limit) {
                return Chain::Later;
            }
            let Some(room) = collect(chain, ram, true, vectors) else {
                return Chain::Used(0);
            };
            if room < HEADER {
                return Chain::Used(0);
            }
            match tap.read(vectors) {
                Ok(len) => {
                    set_one_buffer(vectors);
                    counters.rx_frames.fetch_add(1, Ordering::Relaxed);
                    counters.rx_bytes.fetch_add(len as u64, Ordering::Relaxed);
                    // What was read cannot be put back: the limit delays the next frame.
                    if let Some(limit) = receive_limit {
                        let _ = limit.consume(1, TokenType::Ops)
                            && limit.consume(len as u64, TokenType::Bytes);
                    }
                    // A frame and its header are far below 4 GiB.
                    Chain::Used(len as u32)
                }
                Err(error) => {
                    if error.kind() != io::ErrorKind::Interrupted {
                        *tap_readable = false;
                    }
                    if !matches!(
                        error.kind(),
                        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                    ) {
                        log::debug!("reading from {}: {error}", tap.name());
                    }
                    Chain::Later
                }
            }
        });
        vectors.clear();
    }

    /// Moves frames from the guest to the tap.
    fn transmit(&mut self) {
        let Self {
            transmit,
            tap,
            counters,
            transmit_limit,
            vectors,
            ..
        } = self;
        if transmit_limit.as_ref().is_some_and(RateLimiter::is_blocked) {
            return;
        }
        transmit.serve(|chain, ram| {
            let Some(len) = collect(chain, ram, false, vectors) else {
                return Chain::Used(0);
            };
            if !allowed(transmit_limit, len as u64) {
                return Chain::Later;
            }
            // A frame that the tap does not take is lost, as on any network.
            match tap.write(vectors) {
                Ok(len) => {
                    counters.tx_frames.fetch_add(1, Ordering::Relaxed);
                    counters.tx_bytes.fetch_add(len as u64, Ordering::Relaxed);
                }
                Err(error) => log::debug!("writing to {}: {error}", tap.name()),
            }
            Chain::Used(0)
        });
        vectors.clear();
    }
}

/// Writes `num_buffers` = 1 into the header, which the tap leaves alone (5.1.6.4).
fn set_one_buffer(vectors: &[libc::iovec]) {
    for (at, byte) in (HEADER - 2..).zip(1_u16.to_le_bytes()) {
        let mut offset = at;
        for vector in vectors {
            if offset < vector.iov_len {
                // SAFETY: `collect` made the vector from a slice of guest RAM of that length,
                // which is mapped while its caller holds the memory.
                unsafe {
                    vector
                        .iov_base
                        .cast::<u8>()
                        .add(offset)
                        .write_volatile(byte)
                };
                break;
            }
            offset -= vector.iov_len;
        }
    }
}

impl MutEventSubscriber for PairWorker {
    fn init(&mut self, ops: &mut EventOps) {
        let edge = EventSet::IN | EventSet::EDGE_TRIGGERED;
        let mut add = |fd, token, set| {
            if let Err(error) = ops.add(Events::with_data_raw(fd, token, set)) {
                log::error!("a network card cannot watch its events: {error}");
            }
        };
        add(
            self.receive.active.kick.as_raw_fd(),
            KICK_RECEIVE,
            EventSet::IN,
        );
        add(
            self.transmit.active.kick.as_raw_fd(),
            KICK_TRANSMIT,
            EventSet::IN,
        );
        add(self.tap.as_raw_fd(), TAP, edge);
        if let Some(limit) = &self.receive_limit {
            add(limit.as_raw_fd(), RECEIVE_LIMIT, EventSet::IN);
        }
        if let Some(limit) = &self.transmit_limit {
            add(limit.as_raw_fd(), TRANSMIT_LIMIT, EventSet::IN);
        }
        if let Some(control) = &self.control {
            add(
                control.queue.active.kick.as_raw_fd(),
                KICK_CONTROL,
                EventSet::IN,
            );
        }
        // Frames may be there from before.
        self.tap_readable = true;
    }

    fn process(&mut self, events: Events, _ops: &mut EventOps) {
        let rearm = |limit: &mut Option<RateLimiter>| {
            if let Some(Err(error)) = limit.as_mut().map(RateLimiter::handle_event) {
                log::error!("a rate limit's timer fails: {error}");
            }
        };
        match events.data() {
            KICK_RECEIVE => {
                self.receive.acknowledge_kick();
                self.receive();
            }
            KICK_TRANSMIT => {
                self.transmit.acknowledge_kick();
                self.transmit();
            }
            TAP => {
                self.tap_readable = true;
                self.receive();
            }
            RECEIVE_LIMIT => {
                rearm(&mut self.receive_limit);
                self.receive();
            }
            TRANSMIT_LIMIT => {
                rearm(&mut self.transmit_limit);
                self.transmit();
            }
            _ => {
                if let Some(control) = &mut self.control {
                    control.serve();
                }
            }
        }
    }
}

impl DeviceWorker for PairWorker {}
