//! Serves one queue pair with its tap queue.

use std::{
    os::fd::AsRawFd,
    sync::{Arc, atomic::Ordering},
};

use device_model::{throttle::Throttle, worker::DeviceWorker};
use event_manager::{EventOps, Events, MutEventSubscriber};
use vmm_sys_util::epoll::EventSet;

use super::{
    buffers::Buffers,
    control::ControlQueue,
    counters::Counters,
    receive::Receiver,
    tap::{HEADER, Tap},
};
use crate::served::{Chain, ServedQueue};

const KICK_RECEIVE: u32 = 0;
const KICK_TRANSMIT: u32 = 1;
const TAP: u32 = 2;
const RECEIVE_LIMIT: u32 = 3;
const TRANSMIT_LIMIT: u32 = 4;
const KICK_CONTROL: u32 = 5;

/// Serves a transmit queue.
pub struct Transmitter {
    /// The queue.
    pub queue: ServedQueue,
    /// Limits the rate of frames.
    pub throttle: Option<Throttle>,
    counters: Arc<Counters>,
    /// Reused for every frame.
    buffers: Buffers,
}

impl Transmitter {
    pub fn new(queue: ServedQueue, throttle: Option<Throttle>, counters: Arc<Counters>) -> Self {
        Self {
            queue,
            throttle,
            counters,
            buffers: Buffers::default(),
        }
    }

    /// Moves frames to the tap until the queue is empty or no tokens are left. Costs one `writev`
    /// per frame, and at most one interrupt.
    pub fn serve(&mut self, tap: &Tap) {
        let Self {
            queue,
            throttle,
            counters,
            buffers,
        } = self;
        queue.serve(|chain, ram| {
            buffers.clear();
            let Some(len) = buffers.add(chain, ram, false) else {
                return Chain::Used(0);
            };
            if let Some(throttle) = throttle
                && !throttle.admit(len as u64)
            {
                return Chain::Later;
            }
            // A frame that the tap does not accept is lost, as on any network.
            match tap.write(buffers.vectors()) {
                Ok(len) => {
                    counters.tx_frames.fetch_add(1, Ordering::Relaxed);
                    let bytes = len.saturating_sub(HEADER) as u64;
                    counters.tx_bytes.fetch_add(bytes, Ordering::Relaxed);
                }
                Err(error) => log::debug!("writing to {}: {error}", tap.name()),
            }
            Chain::Used(0)
        });
        buffers.clear();
    }
}

/// Serves a pair of queues.
pub struct PairWorker {
    pub receive: Receiver,
    pub transmit: Transmitter,
    /// Only the worker of the first pair has it.
    pub control: Option<ControlQueue>,
    pub tap: Tap,
}

impl MutEventSubscriber for PairWorker {
    fn init(&mut self, ops: &mut EventOps) {
        let edge = EventSet::IN | EventSet::EDGE_TRIGGERED;
        let mut add = |fd, token, set| {
            if let Err(error) = ops.add(Events::with_data_raw(fd, token, set)) {
                log::error!("a network card cannot watch its events: {error}");
            }
        };
        let receive_kick = self.receive.queue.active.kick.as_raw_fd();
        add(receive_kick, KICK_RECEIVE, EventSet::IN);
        let transmit_kick = self.transmit.queue.active.kick.as_raw_fd();
        add(transmit_kick, KICK_TRANSMIT, EventSet::IN);
        add(self.tap.as_raw_fd(), TAP, edge);
        if let Some(throttle) = &self.receive.throttle {
            add(throttle.as_raw_fd(), RECEIVE_LIMIT, EventSet::IN);
        }
        if let Some(throttle) = &self.transmit.throttle {
            add(throttle.as_raw_fd(), TRANSMIT_LIMIT, EventSet::IN);
        }
        if let Some(control) = &self.control {
            let kick = control.queue.active.kick.as_raw_fd();
            add(kick, KICK_CONTROL, EventSet::IN);
        }
    }

    fn process(&mut self, events: Events, _ops: &mut EventOps) {
        match events.data() {
            KICK_RECEIVE => {
                self.receive.queue.acknowledge_kick();
                self.receive.serve(&self.tap);
            }
            KICK_TRANSMIT => {
                self.transmit.queue.acknowledge_kick();
                self.transmit.serve(&self.tap);
            }
            TAP => {
                self.receive.tap_readable = true;
                self.receive.serve(&self.tap);
            }
            RECEIVE_LIMIT => {
                self.receive.throttle.iter_mut().for_each(Throttle::wake);
                self.receive.serve(&self.tap);
            }
            TRANSMIT_LIMIT => {
                self.transmit.throttle.iter_mut().for_each(Throttle::wake);
                self.transmit.serve(&self.tap);
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
