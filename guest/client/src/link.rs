//! The connection to the worker: calls out, answers in, and callbacks.

use std::{
    collections::HashMap,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    time::Duration,
};

use base::Unpoisoned;
use gantry_remoting::{
    link::{
        endpoint::{Receiver, Sender, Spin},
        port_bell::Doorbell,
        ring::{Consumer, Lines, Producer},
        window::{Slice, Window},
    },
    wire::{
        Flags, Header, Wire,
        messages::{self, Call},
    },
};

use crate::{
    callbacks::{Callback, Callbacks},
    driver::Driver,
    peer::Peer,
    stage::Stages,
};

/// How often a thread that sleeps in a call checks that the worker still lives.
pub const LIVENESS_TIMEOUT: Duration = Duration::from_millis(100);

/// No thread has made a call yet.
const NO_THREAD: usize = 0;
/// Several threads have made calls: no address.
const MANY_THREADS: usize = 1;

#[derive(Debug)]
struct Outgoing {
    sender: Sender<Slice, Doorbell>,
    sequence: u64,
    scratch: Vec<u8>,
}

#[derive(Debug)]
struct Incoming {
    /// None while a thread reads.
    receiver: Option<Box<Reader>>,
    answers: HashMap<u64, Vec<u8>>,
    /// Threads that wait for the receiver: returning it wakes them, and makes no system call if there
    /// are none.
    waiting: usize,
}

#[derive(Debug)]
struct Reader {
    ring: Receiver<Slice, Doorbell>,
    /// The message that was read last.
    body: Vec<u8>,
}

/// The connection.
pub struct Link<D: Driver> {
    /// The memory that worker and device share with this process, or this side's copy of it.
    pub window: Arc<Window>,
    /// Whether the worker sees this window, and not one of its own.
    pub shared: bool,
    outgoing: Mutex<Outgoing>,
    incoming: Mutex<Incoming>,
    arrived: Condvar,
    pub(crate) bell: Doorbell,
    pub(crate) peer: Peer,
    dead: AtomicBool,
    /// The thread that makes all calls, [`NO_THREAD`] or [`MANY_THREADS`].
    only: AtomicUsize,
    pub(crate) stages: Mutex<Stages>,
    pub(crate) callbacks: Mutex<Callbacks<D::Status>>,
    due: Mutex<mpsc::Sender<(Callback<D::Status>, D::Status)>>,
    spin: Duration,
    /// The same while the worker stays awake for the answer.
    attended: Duration,
    /// What the API's driver keeps with it.
    pub state: D::State,
}

impl<D: Driver> Link<D> {
    /// Over a window, in which the rings are; a waiting call polls for `spin`, and for `attended`
    /// while the worker stays awake for it. Callbacks that are due are sent to `due`.
    pub(crate) fn new(
        window: Arc<Window>,
        bell: Doorbell,
        peer: Peer,
        (spin, attended): (Duration, Duration),
        due: mpsc::Sender<(Callback<D::Status>, D::Status)>,
    ) -> Self {
        Self {
            outgoing: Mutex::new(Outgoing {
                sender: Sender::new(Producer::new(window.calls(), bell.clone()), spin),
                sequence: 0,
                scratch: Vec::new(),
            }),
            incoming: Mutex::new(Incoming {
                receiver: Some(Box::new(Reader {
                    ring: Receiver::new(Consumer::new(window.answers(), bell.clone())),
                    body: Vec::new(),
                })),
                answers: HashMap::new(),
                waiting: 0,
            }),
            arrived: Condvar::new(),
            bell,
            dead: AtomicBool::new(false),
            only: AtomicUsize::new(NO_THREAD),
            stages: Mutex::new(Stages::of(&window)),
            callbacks: Mutex::default(),
            due: Mutex::new(due),
            spin,
            attended,
            state: D::State::default(),
            shared: !matches!(peer, Peer::Stream),
            peer,
            window,
        }
    }

    /// Whether the window is a file that a worker of this machine has mapped: memory as any other.
    /// That of ports and gates has one address.
    pub fn is_file(&self) -> bool {
        matches!(self.peer, Peer::Worker)
    }

    /// For how long a waiting call polls before it sleeps.
    pub fn patience(&self) -> Duration {
        self.spin
    }

    /// Whether something is under way that ends with a message: data that is to land in the
    /// application's memory, or a callback.
    pub fn expects(&self) -> bool {
        self.stages.lock_unpoisoned().land() || self.callbacks.lock_unpoisoned().are_pending()
    }

    fn alive(&self) -> bool {
        !self.dead.load(Ordering::Relaxed)
    }

    /// As `alive`, but also notices the end of a gate's server, which nobody tells of, and has a
    /// guest's agent look, which does so for who waits.
    pub(crate) fn still_alive(&self) -> bool {
        if let Doorbell::Gate(gate) = &self.bell
            && let Some(why) = gate.ended()
            && !self.dead.swap(true, Ordering::Relaxed)
        {
            base::note!("{}: {why}", D::NAME);
        }
        if let Peer::Agent(_, agent) = &self.peer {
            agent.check_worker();
        }
        self.alive()
    }

    /// Whether this is the only thread of the application that has ever been here.
    fn is_single_threaded(&self) -> bool {
        thread_local!(static HERE: u8 = const { 0 });
        // An address that no other thread has while this one lives.
        let me = HERE.with(|here| std::ptr::from_ref(here) as usize);
        let only = self.only.load(Ordering::Relaxed);
        if only == me {
            return true;
        }
        if only == NO_THREAD
            && self
                .only
                .compare_exchange(NO_THREAD, me, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
        {
            return true;
        }
        self.only.store(MANY_THREADS, Ordering::Relaxed);
        false
    }

    fn send<C: Call>(&self, call: &C, flags: Flags, later: bool) -> Result<u64, D::Status> {
        let flags = if self.is_single_threaded() {
            flags.with(Flags::ALONE)
        } else {
            flags
        };
        let mut outgoing = self.outgoing.lock_unpoisoned();
        let outgoing = &mut *outgoing;
        outgoing.sequence += 1;
        outgoing.scratch.clear();
        call.put(&mut outgoing.scratch);
        let header = Header {
            length: 0,
            opcode: C::OPCODE,
            flags,
            sequence: outgoing.sequence,
        };
        if !self.alive() {
            return Err(D::WORKER_LOST);
        }
        let (sender, body) = (&mut outgoing.sender, &outgoing.scratch);
        let sent = if later {
            sender.write(header, body, || self.still_alive())
        } else {
            sender.send(header, body, || self.still_alive())
        };
        sent.map_err(|_| D::WORKER_LOST)?;
        Ok(outgoing.sequence)
    }

    /// Sends a call and does not wait: some copies and stores, no system call unless the worker
    /// sleeps or the ring is full.
    pub fn post<C: Call<Answer = ()>>(&self, call: &C) -> Result<(), D::Status> {
        self.send(call, Flags::default(), false).map(drop)
    }

    /// Sends a call for which a sleeping worker is woken only with the next one: one that has no
    /// effect before that.
    pub fn post_with_next<C: Call<Answer = ()>>(&self, call: &C) -> Result<(), D::Status> {
        self.send(call, Flags::default(), true).map(drop)
    }

    /// Sends a call and waits for its answer.
    pub fn ask<C: Call>(&self, call: &C) -> Result<C::Answer, D::Status> {
        let sequence = self.send(call, Flags::ANSWER, false)?;
        self.wait(
            sequence,
            |body| match Result::<C::Answer, i32>::from_bytes(body) {
                Ok(answer) => answer.map_err(D::Status::from),
                Err(_) => Err(D::WORKER_LOST),
            },
        )
    }

    /// Waits for an answer. One of the waiting threads reads for all of them.
    fn wait<T>(
        &self,
        sequence: u64,
        decode: impl FnOnce(&[u8]) -> Result<T, D::Status>,
    ) -> Result<T, D::Status> {
        let mut incoming = self.incoming.lock_unpoisoned();
        loop {
            if let Some(body) = incoming.answers.remove(&sequence) {
                return decode(&body);
            }
            if let Some(mut reader) = incoming.receiver.take() {
                drop(incoming);
                let got = if self.read(&mut reader, Some(sequence)) {
                    decode(&reader.body)
                } else {
                    Err(D::WORKER_LOST)
                };
                self.return_reader(reader);
                return got;
            }
            if !self.alive() {
                return Err(D::WORKER_LOST);
            }
            // It may have waited for long already.
            self.bell.hurry(&self.window.answers().control().items.0);
            incoming = self.wait_for_reader(incoming);
        }
    }

    fn return_reader(&self, reader: Box<Reader>) {
        let mut incoming = self.incoming.lock_unpoisoned();
        incoming.receiver = Some(reader);
        let waiting = incoming.waiting;
        drop(incoming);
        if waiting > 0 {
            self.arrived.notify_all();
        }
    }

    fn wait_for_reader<'a>(
        &'a self,
        mut incoming: MutexGuard<'a, Incoming>,
    ) -> MutexGuard<'a, Incoming> {
        incoming.waiting += 1;
        let (mut incoming, _) = self
            .arrived
            .wait_timeout(incoming, LIVENESS_TIMEOUT)
            .unwrap_or_else(PoisonError::into_inner);
        incoming.waiting -= 1;
        incoming
    }

    /// Reads answers until the wanted one is there, or, if none is wanted, while there are some.
    /// Whether the wanted one is in the reader's body.
    fn read(&self, reader: &mut Reader, wanted: Option<u64>) -> bool {
        let mut spin = Spin::new(self.spin).or_attended(self.attended);
        loop {
            match reader.ring.poll(&mut reader.body) {
                Ok(Some(header)) => {
                    spin.reset();
                    match header.opcode {
                        messages::ANSWER if Some(header.sequence) == wanted => return true,
                        messages::ANSWER => {
                            let body = std::mem::take(&mut reader.body);
                            let mut incoming = self.incoming.lock_unpoisoned();
                            incoming.answers.insert(header.sequence, body);
                            let waiting = incoming.waiting;
                            drop(incoming);
                            if waiting > 0 {
                                self.arrived.notify_all();
                            }
                        }
                        messages::RELEASED => {
                            if let Ok((stage, good)) = Wire::from_bytes(&reader.body) {
                                self.released(stage, good);
                            }
                        }
                        messages::CALLBACK => {
                            if let Ok((number, status)) = <(u64, i32)>::from_bytes(&reader.body) {
                                self.run_callback(number, status.into());
                            }
                        }
                        other => D::message(self, other, &reader.body),
                    }
                }
                Ok(None) if wanted.is_none() || !self.alive() => return false,
                Ok(None) => reader.ring.wait(&mut spin, || !self.still_alive()),
                Err(_) => {
                    self.dead.store(true, Ordering::Relaxed);
                    return false;
                }
            }
        }
    }

    /// Reads what is there, unless another thread will.
    pub(crate) fn read_pending(&self) {
        let mut incoming = self.incoming.lock_unpoisoned();
        loop {
            if let Some(mut reader) = incoming.receiver.take() {
                drop(incoming);
                self.read(&mut reader, None);
                return self.return_reader(reader);
            }
            // The reader may leave before it sees what this thread was woken for.
            incoming = self.wait_for_reader(incoming);
        }
    }

    pub(crate) fn worker_lost(&self) {
        self.dead.store(true, Ordering::Relaxed);
        if let Doorbell::Port { page, .. } = &self.bell {
            // The port may be about to go.
            page.retire();
            self.window.retire();
        }
        self.bell.rouse(&self.window.answers().control().items.0);
        self.bell.rouse(&self.window.calls().control().room.0);
        self.arrived.notify_all();
        let callbacks = self.callbacks.lock_unpoisoned().take_all();
        for callback in callbacks {
            self.queue_callback(callback, D::WORKER_LOST);
        }
    }

    /// Keeps a callback and gives it a number.
    pub fn register_callback(&self, callback: Callback<D::Status>) -> u64 {
        let (number, wakes) = self.callbacks.lock_unpoisoned().register(callback);
        if wakes {
            self.wake_listener();
        }
        number
    }

    /// Forgets a callback.
    pub fn cancel_callback(&self, number: u64) {
        self.callbacks.lock_unpoisoned().take(number);
    }

    /// A callback is due, if it has not been forgotten.
    pub fn run_callback(&self, number: u64, status: D::Status) {
        if let Some(callback) = self.callbacks.lock_unpoisoned().take(number) {
            self.queue_callback(callback, status);
        }
    }

    /// Has the thread for callbacks call this next.
    pub fn queue_callback(&self, callback: Callback<D::Status>, status: D::Status) {
        let _ = self.due.lock_unpoisoned().send((callback, status));
    }

    /// Has [`Driver::expects_messages`] asked again: it may say something else from now on.
    pub fn wake_listener(&self) {
        if let Some(wanted) = self.peer.poll_event() {
            wanted.signal();
        }
    }
}
