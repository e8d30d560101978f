//! The thread in which a device's queues are served.
//!
//! A worker is an event loop (crate `event-manager`) with a single subscriber, which owns the
//! device's queues and backend. It sleeps in `epoll_wait` while nothing happens. Stopping it
//! gives the subscriber back, so that ownership of the backend moves between the device and its
//! worker and is never shared.

use std::{io, sync::mpsc, thread};

use event_manager::{EventManager, EventOps, Events, MutEventSubscriber, SubscriberOps};
use vmm_sys_util::{
    epoll::EventSet,
    eventfd::{EFD_NONBLOCK, EventFd},
};

use crate::thread::{ThreadRole, ThreadSpawner};

/// Token of the stop event. Subscribers use smaller ones for their own events.
pub const STOP_TOKEN: u32 = u32::MAX;

/// What runs in a [`Worker`]: registers its file descriptors in `init`, serves them in `process`.
pub trait DeviceWorker: MutEventSubscriber + Send + 'static {
    /// Finishes what is in flight, in bounded time, before the worker stops.
    fn drain(&mut self) {}
}

/// A running event loop around a `T`.
pub struct Worker<T> {
    stop: EventFd,
    thread: thread::JoinHandle<()>,
    result: mpsc::Receiver<T>,
}

struct Stoppable<T> {
    inner: T,
    stop: EventFd,
    stopping: bool,
}

impl<T: DeviceWorker> MutEventSubscriber for Stoppable<T> {
    fn init(&mut self, ops: &mut EventOps) {
        if let Err(error) = ops.add(Events::with_data(&self.stop, STOP_TOKEN, EventSet::IN)) {
            log::error!("worker cannot watch its stop event: {error}");
            self.stopping = true;
        }
        self.inner.init(ops);
    }

    fn process(&mut self, events: Events, ops: &mut EventOps) {
        if events.data() == STOP_TOKEN {
            self.stopping = true;
        } else {
            self.inner.process(events, ops);
        }
    }
}

impl<T: DeviceWorker> Worker<T> {
    /// Starts a thread that serves `inner`. On failure `inner` is lost.
    pub fn spawn(
        spawner: &dyn ThreadSpawner,
        role: ThreadRole,
        name: &str,
        inner: T,
    ) -> io::Result<Self> {
        let stop = EventFd::new(EFD_NONBLOCK)?;
        let subscriber = Stoppable {
            inner,
            stop: stop.try_clone()?,
            stopping: false,
        };
        let mut manager = EventManager::new().map_err(io::Error::other)?;
        let (sender, result) = mpsc::sync_channel(1);
        let body = move || {
            let id = manager.add_subscriber(subscriber);
            while !manager
                .subscriber_mut(id)
                .is_ok_and(|subscriber| subscriber.stopping)
            {
                if let Err(error) = manager.run() {
                    log::error!("device event loop failed: {error}");
                    break;
                }
            }
            if let Ok(mut subscriber) = manager.remove_subscriber(id) {
                subscriber.inner.drain();
                // A send fails only if the device was dropped; then nobody wants the state.
                let _ = sender.send(subscriber.inner);
            }
        };
        let thread = spawner.spawn(role, name, Box::new(body))?;
        Ok(Self {
            stop,
            thread,
            result,
        })
    }

    /// Stops the loop and gives its subscriber back; `None` if the thread died.
    pub fn stop(self) -> Option<T> {
        if let Err(error) = self.stop.write(1) {
            log::error!("cannot stop a device worker: {error}");
            return None;
        }
        let inner = self.result.recv().ok();
        if self.thread.join().is_err() {
            log::error!("a device worker panicked");
        }
        inner
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::thread::Unconfined;

    struct Count {
        kick: EventFd,
        seen: mpsc::Sender<u64>,
        drained: bool,
    }

    impl MutEventSubscriber for Count {
        fn init(&mut self, ops: &mut EventOps) {
            ops.add(Events::with_data(&self.kick, 0, EventSet::IN))
                .unwrap();
        }
        fn process(&mut self, _events: Events, _ops: &mut EventOps) {
            self.seen.send(self.kick.read().unwrap()).unwrap();
        }
    }

    impl DeviceWorker for Count {
        fn drain(&mut self) {
            self.drained = true;
        }
    }

    #[test]
    fn a_worker_serves_kicks_and_gives_its_state_back_when_stopped() {
        let kick = EventFd::new(EFD_NONBLOCK).unwrap();
        let (sender, seen) = mpsc::channel();
        let count = Count {
            kick: kick.try_clone().unwrap(),
            seen: sender,
            drained: false,
        };
        let worker = Worker::spawn(&Unconfined, ThreadRole::Rng, "_count", count).unwrap();
        kick.write(3).unwrap();
        assert_eq!(seen.recv().unwrap(), 3);
        assert!(worker.stop().unwrap().drained);
    }
}
