//! The thread that serves a device's queues.
//!
//! A worker is an event loop (crate `event-manager`) with a single subscriber, which owns the
//! device's queues and backend. It sleeps in `epoll_wait` while there are no events. Stopping it
//! returns the subscriber, so that ownership of the backend moves between the device and its worker
//! and is never shared.
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

/// The subscriber of a [`Worker`]: registers its file descriptors in `init`, and serves them in
/// `process`.
pub trait DeviceWorker: MutEventSubscriber + Send + 'static {
    /// Completes requests in flight, in bounded time, before the worker stops.
    fn drain(&mut self) {}
}

/// A worker that could not be started, together with its subscriber.
#[derive(Debug)]
pub struct NotStarted<T> {
    /// The cause.
    pub source: io::Error,
    /// The subscriber, unchanged.
    pub inner: T,
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
    /// Starts a thread that serves `inner`. On failure `inner` is dropped.
    pub fn spawn(
        spawner: &dyn ThreadSpawner,
        role: ThreadRole,
        name: &str,
        inner: T,
    ) -> io::Result<Self> {
        Self::start(spawner, role, name, inner).map_err(|failed| failed.source)
    }

    /// Starts a thread that serves `inner`, or returns it on failure: for subscribers that cannot
    /// be created again.
    pub fn start(
        spawner: &dyn ThreadSpawner,
        role: ThreadRole,
        name: &str,
        inner: T,
    ) -> Result<Self, NotStarted<T>> {
        match Self::prepare(spawner, role, name) {
            Ok((worker, subscribers)) => match subscribers.send(inner) {
                Ok(()) => Ok(worker),
                Err(mpsc::SendError(inner)) => Err(NotStarted {
                    source: io::Error::other("the new thread has ended at once"),
                    inner,
                }),
            },
            Err(source) => Err(NotStarted { source, inner }),
        }
    }

    /// Starts a thread that waits for its subscriber.
    fn prepare(
        spawner: &dyn ThreadSpawner,
        role: ThreadRole,
        name: &str,
    ) -> io::Result<(Self, mpsc::SyncSender<T>)> {
        let stop = EventFd::new(EFD_NONBLOCK)?;
        let stopped = stop.try_clone()?;
        let mut manager = EventManager::<Stoppable<T>>::new().map_err(io::Error::other)?;
        let (subscribers, subscriber) = mpsc::sync_channel(1);
        let (sender, result) = mpsc::sync_channel(1);
        let body = move || {
            let Ok(inner) = subscriber.recv() else {
                return;
            };
            let subscriber = Stoppable {
                inner,
                stop: stopped,
                stopping: false,
            };
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
                // A send fails only if the device was dropped; then the state is not needed.
                let _ = sender.send(subscriber.inner);
            }
        };
        let thread = spawner.spawn(role, name, Box::new(body))?;
        let worker = Self {
            stop,
            thread,
            result,
        };
        Ok((worker, subscribers))
    }

    /// Whether the thread has ended.
    pub fn is_dead(&self) -> bool {
        self.thread.is_finished()
    }

    /// Stops the loop and returns its subscriber; `None` if the thread died.
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

    /// A host that cannot create any more threads.
    struct Exhausted;

    impl ThreadSpawner for Exhausted {
        fn spawn(
            &self,
            _role: ThreadRole,
            _name: &str,
            _body: Box<dyn FnOnce() + Send>,
        ) -> io::Result<thread::JoinHandle<()>> {
            Err(io::ErrorKind::WouldBlock.into())
        }
    }

    #[test]
    fn what_a_worker_would_have_owned_comes_back_if_it_cannot_start() {
        let kick = EventFd::new(EFD_NONBLOCK).unwrap();
        let (sender, seen) = mpsc::channel();
        let count = Count {
            kick,
            seen: sender,
            drained: false,
        };
        let failed = Worker::start(&Exhausted, ThreadRole::Rng, "_count", count)
            .err()
            .unwrap();
        assert_eq!(failed.source.kind(), io::ErrorKind::WouldBlock);
        failed.inner.seen.send(7).unwrap();
        assert_eq!(seen.recv().unwrap(), 7);
    }
}
