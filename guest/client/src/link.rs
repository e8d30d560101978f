//! The connection to the worker: calls out, answers in, and callbacks.

use std::{
    collections::HashMap,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering},
        mpsc,
    },
    time::{Duration, Instant},
};

use base::{Unpoisoned, lock::UnpoisonedRw};
use remoting_proto::wire::{
    Flags, Header, Wire,
    messages::{self, Call},
};
use remoting_transport::{
    endpoint::{Receiver, Sender, Spin},
    port_bell::Doorbell,
    ring::{Consumer, Lines, Producer},
    window::{Slice, Window},
};

use crate::{
    callbacks::{Callback, Callbacks, LastingCallback},
    connect::{self, Environment},
    driver::Driver,
    peer::{Peer, Seat, Spins},
    stage::Stages,
    thread::spawn,
};

/// How often a thread that sleeps in a call checks that the worker is still alive.
pub const LIVENESS_TIMEOUT: Duration = Duration::from_millis(100);

/// No thread has made a call yet.
const NO_THREAD: usize = 0;
/// Several threads have made calls. Never the address of a thread-local.
const MANY_THREADS: usize = 1;

/// The worker is available.
const SERVED: u8 = 0;
/// Another worker is about to take over, now or later: no thread reads.
const CHANGING: u8 = 1;
/// The worker has ended.
const LOST: u8 = 2;

#[derive(Debug)]
pub(crate) struct Outgoing {
    pub(crate) sender: Sender<Slice, Doorbell>,
    sequence: u64,
    scratch: Vec<u8>,
}

#[derive(Debug)]
pub(crate) struct Incoming {
    /// None while a thread reads.
    pub(crate) receiver: Option<Box<Reader>>,
    /// Answers that another thread has read than the one that waits for them: at most one for each call of
    /// [`Link::awaited`].
    answers: HashMap<u64, Vec<u8>>,
    /// Number of threads that wait for the receiver. Returning the receiver wakes them, and makes no system call if
    /// there are none.
    waiting: usize,
}

#[derive(Debug)]
pub(crate) struct Reader {
    pub(crate) ring: Receiver<Slice, Doorbell>,
    /// The body of the last message that was read.
    body: Vec<u8>,
    spins: Spins,
}

/// The deadline for a worker's answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Due {
    by: Instant,
    /// How long the worker may stay silent without reporting progress, and the final deadline regardless of its
    /// reports.
    silent: Duration,
    end: Instant,
}

impl Due {
    /// A fixed deadline, regardless of the worker's progress reports.
    pub(crate) fn at(end: Instant) -> Self {
        Self {
            by: end,
            silent: Duration::ZERO,
            end,
        }
    }

    /// The worker must report progress at least once per `silent`, and answer by `end`.
    pub(crate) fn at_work(silent: Duration, end: Instant) -> Self {
        let mut due = Self {
            by: end,
            silent,
            end,
        };
        due.works(Instant::now());
        due
    }

    /// Records a progress report.
    fn works(&mut self, now: Instant) {
        if !self.silent.is_zero() {
            self.by = self.end.min(now + self.silent);
        }
    }
}

/// Calls callbacks that are due, in order.
pub(crate) fn call_all<S>(queue: &mpsc::Receiver<(Callback<S>, S)>) {
    for (callback, status) in queue {
        callback(status);
    }
}

/// Creates this process's ends of a window's rings.
pub(crate) fn ends(
    window: &Arc<Window>,
    bell: &Doorbell,
    spins: Spins,
) -> (Sender<Slice, Doorbell>, Reader) {
    let sender = Sender::new(Producer::new(window.calls(), bell.clone()), spins.spin);
    let reader = Reader {
        ring: Receiver::new(Consumer::new(window.answers(), bell.clone())),
        body: Vec::new(),
        spins,
    };
    (sender, reader)
}

/// A process's connection to a worker.
pub struct Link<D: Driver> {
    /// The memory that worker and device share with this process, or this side's copy of it.
    pub window: Arc<Window>,
    /// Whether the worker sees this window rather than a copy of its own.
    shared: AtomicBool,
    /// Whether the window is a file that a worker on this machine has mapped.
    file: AtomicBool,
    /// How long a waiting call polls before it sleeps, in nanoseconds.
    patience: AtomicU64,
    pub(crate) outgoing: Mutex<Outgoing>,
    pub(crate) incoming: Mutex<Incoming>,
    /// The number of calls whose answer nobody has taken yet.
    awaited: AtomicUsize,
    arrived: Condvar,
    /// The current worker and how to reach it. Only read when a thread is about to sleep.
    seat: RwLock<Arc<Seat>>,
    /// [`SERVED`], [`CHANGING`] or [`LOST`].
    state_of_worker: AtomicU8,
    /// Whether no listener would notice the worker's end.
    deaf: AtomicBool,
    /// The deadline for the worker's answer. A worker that misses it counts as ended.
    answer_due: Mutex<Option<Due>>,
    /// The settings that were read from the environment.
    pub(crate) environment: Environment,
    /// The only thread that has made calls, [`NO_THREAD`] or [`MANY_THREADS`].
    only: AtomicUsize,
    pub(crate) stages: Mutex<Stages>,
    /// Read-locked by threads that write to the window, write-locked while its memory is replaced.
    pub(crate) writers: RwLock<()>,
    pub(crate) callbacks: Mutex<Callbacks<D::Status>>,
    due: Mutex<mpsc::Sender<(Callback<D::Status>, D::Status)>>,
    /// Where callbacks that only copy memory are sent when they are due, once there have been any. None if there is no
    /// thread for them.
    due_copies: OnceLock<Option<mpsc::Sender<(Callback<D::Status>, D::Status)>>>,
    /// The API driver's own state.
    pub state: D::State,
}

impl<D: Driver> Link<D> {
    /// Creates the connection over a window that contains the rings. Callbacks that are due are sent to `due`.
    pub(crate) fn new(
        window: Arc<Window>,
        seat: Arc<Seat>,
        due: mpsc::Sender<(Callback<D::Status>, D::Status)>,
        environment: Environment,
    ) -> Self {
        let (sender, reader) = ends(&window, &seat.bell, seat.spins);
        Self {
            outgoing: Mutex::new(Outgoing {
                sender,
                sequence: 0,
                scratch: Vec::new(),
            }),
            incoming: Mutex::new(Incoming {
                receiver: Some(Box::new(reader)),
                answers: HashMap::new(),
                waiting: 0,
            }),
            awaited: AtomicUsize::new(0),
            arrived: Condvar::new(),
            state_of_worker: AtomicU8::new(SERVED),
            deaf: AtomicBool::new(false),
            answer_due: Mutex::new(None),
            environment,
            only: AtomicUsize::new(NO_THREAD),
            stages: Mutex::new(Stages::of(&window)),
            writers: RwLock::new(()),
            callbacks: Mutex::default(),
            due: Mutex::new(due),
            due_copies: OnceLock::new(),
            state: D::State::default(),
            shared: AtomicBool::new(seat.peer.is_shared()),
            file: AtomicBool::new(seat.peer.is_file()),
            patience: AtomicU64::new(seat.spins.nanoseconds()),
            seat: RwLock::new(seat),
            window,
        }
    }

    /// Whether the worker sees this window rather than a copy of its own.
    pub fn is_shared(&self) -> bool {
        self.shared.load(Ordering::Relaxed)
    }

    /// Whether the window is a file that a worker on this machine has mapped, and thus ordinary memory. The window of a
    /// port or a gate has only one address.
    pub fn is_file(&self) -> bool {
        self.file.load(Ordering::Relaxed)
    }

    /// The current worker and how to reach it.
    pub(crate) fn seat(&self) -> Arc<Seat> {
        Arc::clone(&self.seat.read_unpoisoned())
    }

    /// Switches to another worker, even if the previous one has ended. No thread may read or write meanwhile.
    pub(crate) fn take_seat(&self, seat: Arc<Seat>) {
        self.shared.store(seat.peer.is_shared(), Ordering::Relaxed);
        self.file.store(seat.peer.is_file(), Ordering::Relaxed);
        self.patience
            .store(seat.spins.nanoseconds(), Ordering::Relaxed);
        *self.seat.write_unpoisoned() = seat;
        // Any thread that noticed the previous worker's end was reading before reads were held up.
        self.state_of_worker.store(SERVED, Ordering::Relaxed);
    }

    /// Marks the connection as having no worker for now: no thread reads until [`let_read`](Self::let_read).
    pub(crate) fn hold_up(&self) {
        self.state_of_worker.store(CHANGING, Ordering::Relaxed);
    }

    /// Sets whether no listener would notice the worker's end.
    pub(crate) fn be_deaf(&self, deaf: bool) {
        self.deaf.store(deaf, Ordering::Relaxed);
    }

    /// Sets the deadline after which a worker that no listener watches counts as ended.
    pub(crate) fn expire(&self, due: Due) {
        *self.answer_due.lock_unpoisoned() = Some(due);
    }

    /// Whether the worker has missed its deadline.
    pub(crate) fn is_late(&self) -> bool {
        let due = *self.answer_due.lock_unpoisoned();
        due.is_some_and(|due| Instant::now() >= due.by)
    }

    /// How long a waiting call polls before it sleeps.
    pub fn patience(&self) -> Duration {
        Duration::from_nanos(self.patience.load(Ordering::Relaxed))
    }

    /// Whether any outstanding operation ends with a message: data that is to land in the application's memory, or a
    /// callback.
    pub fn expects(&self) -> bool {
        self.stages.lock_unpoisoned().land() || self.callbacks.lock_unpoisoned().is_awaited()
    }

    /// Whether the connection has a worker, as far as this process has noticed.
    pub fn alive(&self) -> bool {
        self.state_of_worker.load(Ordering::Relaxed) == SERVED
    }

    /// Marks the worker as ended. Returns whether this had not been noticed before.
    pub(crate) fn lose(&self) -> bool {
        self.state_of_worker.swap(LOST, Ordering::Relaxed) != LOST
    }

    fn is_changing(&self) -> bool {
        self.state_of_worker.load(Ordering::Relaxed) == CHANGING
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.state_of_worker.load(Ordering::Relaxed) == LOST
    }

    /// As `alive`, but also detects an end that nothing reports: checks a gate's server, asks the guest's agent to
    /// check the worker, and, if no listener watches, checks the connection and the deadline itself.
    pub(crate) fn still_alive(&self) -> bool {
        let seat = self.seat();
        if let Doorbell::Gate(gate) = &seat.bell
            && let Some(why) = gate.ended()
            && self.lose()
        {
            base::note!("{}: {why}", D::NAME);
        }
        if let Peer::Agent(_, agent) = &seat.peer {
            agent.check_worker();
        }
        if self.deaf.load(Ordering::Relaxed) && (seat.has_ended() || self.is_late()) {
            self.lose();
        }
        self.alive()
    }

    /// Whether this is the only thread of the application that has ever made a call.
    fn is_single_threaded(&self) -> bool {
        thread_local!(static HERE: u8 = const { 0 });
        // An address that no other thread shares while this one lives.
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
        self.send_by(&mut self.outgoing.lock_unpoisoned(), call, flags, later)
    }

    fn send_by<C: Call>(
        &self,
        outgoing: &mut Outgoing,
        call: &C,
        flags: Flags,
        later: bool,
    ) -> Result<u64, D::Status> {
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
        let waits = usize::from(flags.has(Flags::ANSWER));
        // Before anybody can read the answer.
        self.awaited.fetch_add(waits, Ordering::Relaxed);
        let sent = if later {
            sender.write(header, body, || self.still_alive())
        } else {
            sender.send(header, body, || self.still_alive())
        };
        if sent.is_err() {
            self.awaited.fetch_sub(waits, Ordering::Relaxed);
            return Err(D::WORKER_LOST);
        }
        D::sent(C::OPCODE, body);
        Ok(outgoing.sequence)
    }

    /// Sends a call without waiting. Costs a few copies and stores, and no system call unless the worker sleeps or the
    /// ring is full.
    pub fn post<C: Call<Answer = ()>>(&self, call: &C) -> Result<(), D::Status> {
        self.send(call, Flags::default(), false).map(drop)
    }

    /// Sends a call that has no effect before the next one: a sleeping worker is woken only with the next call.
    pub fn post_with_next<C: Call<Answer = ()>>(&self, call: &C) -> Result<(), D::Status> {
        self.send(call, Flags::default(), true).map(drop)
    }

    /// Sends a call and waits for its answer.
    pub fn ask<C: Call>(&self, call: &C) -> Result<C::Answer, D::Status> {
        let sequence = self.send(call, Flags::ANSWER, false)?;
        self.answer::<C>(sequence)
    }

    /// As [`ask`](Self::ask), for a thread that holds the sending lock and so blocks all other calls.
    pub(crate) fn ask_by<C: Call>(
        &self,
        outgoing: &mut Outgoing,
        call: &C,
    ) -> Result<C::Answer, D::Status> {
        let sequence = self.send_by(outgoing, call, Flags::ANSWER, false)?;
        self.answer::<C>(sequence)
    }

    /// Sends a call and returns its number. The caller does not wait among the application's threads, but polls for the
    /// [answer](Self::answered).
    pub(crate) fn send_beside<C: Call>(
        &self,
        outgoing: &mut Outgoing,
        call: &C,
    ) -> Result<u64, D::Status> {
        self.send_by(outgoing, call, Flags::ANSWER, false)
    }

    /// Returns the answer to the call of this number, if it has arrived. Reads pending messages unless another thread
    /// is reading, and does not block other readers.
    pub(crate) fn answered<C: Call>(&self, sequence: u64) -> Option<Result<C::Answer, D::Status>> {
        self.try_read_pending();
        let body = self.incoming.lock_unpoisoned().answers.remove(&sequence);
        let answer = match body {
            Some(body) => Some(Self::decoded::<C>(&body)),
            None => (!self.still_alive()).then_some(Err(D::WORKER_LOST)),
        };
        let taken = usize::from(answer.is_some());
        self.awaited.fetch_sub(taken, Ordering::Relaxed);
        answer
    }

    fn decoded<C: Call>(body: &[u8]) -> Result<C::Answer, D::Status> {
        match Result::<C::Answer, i32>::from_bytes(body) {
            Ok(answer) => answer.map_err(D::Status::from),
            Err(_) => Err(D::WORKER_LOST),
        }
    }

    fn answer<C: Call>(&self, sequence: u64) -> Result<C::Answer, D::Status> {
        let answer = self.wait(sequence, Self::decoded::<C>);
        self.awaited.fetch_sub(1, Ordering::Relaxed);
        answer
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
            if !self.is_changing()
                && let Some(mut reader) = incoming.receiver.take()
            {
                drop(incoming);
                if self.read(&mut reader, Some(sequence)) {
                    let got = decode(&reader.body);
                    self.return_reader(reader);
                    return got;
                }
                self.return_reader(reader);
                incoming = self.incoming.lock_unpoisoned();
                if !self.is_lost() {
                    // Another worker is taking over.
                    continue;
                }
            }
            if self.is_lost() {
                return Err(D::WORKER_LOST);
            }
            // The reader may have been waiting for a long time already.
            let bell = &self.seat().bell;
            bell.hurry(&self.window.answers().control().items.0);
            incoming = self.wait_for_reader(incoming);
        }
    }

    /// Stops all threads from reading until [`let_read`](Self::let_read). Waits until the current reader has stopped.
    /// Returns None if the worker has ended.
    pub(crate) fn hold_readers(&self) -> Option<Box<Reader>> {
        let (from, to) = (SERVED, CHANGING);
        let (good, bad) = (Ordering::Relaxed, Ordering::Relaxed);
        let changed = self.state_of_worker.compare_exchange(from, to, good, bad);
        changed.ok()?;
        let mut incoming = self.incoming.lock_unpoisoned();
        loop {
            if let Some(reader) = incoming.receiver.take() {
                return Some(reader);
            }
            // Wakes a sleeping reader, so that it sees that it has to stop.
            let bell = &self.seat().bell;
            bell.rouse(&self.window.answers().control().items.0);
            incoming = self.wait_for_reader(incoming);
        }
    }

    /// Lets threads read again, with this reader.
    pub(crate) fn let_read(&self, reader: Box<Reader>) {
        let (from, to) = (CHANGING, SERVED);
        let (good, bad) = (Ordering::Relaxed, Ordering::Relaxed);
        // Fails if the worker has ended meanwhile.
        let _ = self.state_of_worker.compare_exchange(from, to, good, bad);
        self.return_reader(reader);
        self.arrived.notify_all();
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

    /// Reads messages until the wanted answer arrives or, if none is wanted, while there are any. Returns whether the
    /// reader's body holds the wanted answer.
    fn read(&self, reader: &mut Reader, wanted: Option<u64>) -> bool {
        let mut spin = Spin::new(reader.spins.spin).or_attended(reader.spins.attended);
        loop {
            match reader.ring.poll(&mut reader.body) {
                Ok(Some(header)) => {
                    spin.reset();
                    match header.opcode {
                        messages::ANSWER if Some(header.sequence) == wanted => return true,
                        messages::ANSWER => {
                            let body = std::mem::take(&mut reader.body);
                            let mut incoming = self.incoming.lock_unpoisoned();
                            // Nobody has asked for that many.
                            if incoming.answers.len() >= self.awaited.load(Ordering::Relaxed) {
                                drop(incoming);
                                self.lose();
                                return false;
                            }
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
                        messages::WORKS => {
                            if let Some(due) = &mut *self.answer_due.lock_unpoisoned() {
                                due.works(Instant::now());
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
                    self.lose();
                    return false;
                }
            }
        }
    }

    /// Reads pending messages, unless another thread is reading right now.
    pub(crate) fn try_read_pending(&self) {
        let reader = self.incoming.lock_unpoisoned().receiver.take();
        if let Some(mut reader) = reader {
            self.read(&mut reader, None);
            self.return_reader(reader);
        }
    }

    /// Reads pending messages, or waits until another thread has.
    pub(crate) fn read_pending(&self) {
        let mut incoming = self.incoming.lock_unpoisoned();
        loop {
            if let Some(mut reader) = incoming.receiver.take() {
                drop(incoming);
                self.read(&mut reader, None);
                return self.return_reader(reader);
            }
            // The current reader may stop before it sees the message that this thread was woken for.
            incoming = self.wait_for_reader(incoming);
        }
    }

    pub(crate) fn worker_lost(&self) {
        self.lose();
        let bell = &self.seat().bell;
        if let Doorbell::Port { page, .. } = bell {
            // The port may be about to be removed.
            page.retire();
            self.window.retire();
        }
        bell.rouse(&self.window.answers().control().items.0);
        bell.rouse(&self.window.calls().control().room.0);
        self.arrived.notify_all();
        let mut callbacks = self.callbacks.lock_unpoisoned();
        let (all, copies) = (callbacks.take_all(), callbacks.take_copies());
        drop(callbacks);
        all.for_each(|callback| self.queue_callback(callback, D::WORKER_LOST));
        copies.for_each(|callback| self.queue_copy(callback, D::WORKER_LOST));
    }

    /// Registers a callback and returns its number.
    pub fn register_callback(&self, callback: Callback<D::Status>) -> u64 {
        let (number, wakes) = self.callbacks.lock_unpoisoned().register(callback);
        if wakes {
            self.wake_listener();
        }
        number
    }

    /// Registers a callback that only copies memory, and returns its number. It has a thread of its own: the other
    /// callbacks are the application's functions, which may wait for each other's results.
    pub fn register_copy(&self, callback: Callback<D::Status>) -> u64 {
        let (number, wakes) = self.callbacks.lock_unpoisoned().register_copy(callback);
        if wakes {
            self.wake_listener();
        }
        number
    }

    /// Removes a callback that only copies memory, unless it has been called.
    pub fn take_copy(&self, number: u64) -> Option<Callback<D::Status>> {
        self.callbacks.lock_unpoisoned().take_copy(number)
    }

    /// Registers a callback that is called repeatedly, and returns its number.
    pub fn register_lasting_callback(&self, callback: LastingCallback<D::Status>) -> u64 {
        let mut callbacks = self.callbacks.lock_unpoisoned();
        let (number, wakes) = callbacks.register_lasting(callback);
        drop(callbacks);
        if wakes {
            self.wake_listener();
        }
        number
    }

    /// Registers a callback that no thread waits for, and returns its number.
    pub fn register_unawaited_callback(&self, callback: Callback<D::Status>) -> u64 {
        let mut callbacks = self.callbacks.lock_unpoisoned();
        let (number, wakes) = callbacks.register_unawaited(callback);
        drop(callbacks);
        if wakes {
            self.wake_listener();
        }
        number
    }

    /// Cancels a callback.
    pub fn cancel_callback(&self, number: u64) {
        let mut callbacks = self.callbacks.lock_unpoisoned();
        callbacks.take(number);
        callbacks.end_lasting(number);
    }

    /// Queues the callback of this number, unless it has been cancelled.
    pub fn run_callback(&self, number: u64, status: D::Status) {
        let mut callbacks = self.callbacks.lock_unpoisoned();
        let (once, lasting) = (callbacks.take(number), callbacks.lasting(number));
        let copy = callbacks.take_copy(number);
        drop(callbacks);
        if let Some(callback) = copy {
            self.queue_copy(callback, status);
        }
        if let Some(callback) = once {
            self.queue_callback(callback, status);
        }
        if let Some(callback) = lasting {
            let call = move |status| {
                if !callback(status)
                    && let Some(link) = connect::existing::<D>()
                {
                    link.cancel_callback(number);
                }
            };
            self.queue_callback(Box::new(call), status);
        }
    }

    /// Queues a callback for the callback thread.
    pub fn queue_callback(&self, callback: Callback<D::Status>, status: D::Status) {
        let _ = self.due.lock_unpoisoned().send((callback, status));
    }

    /// Queues a callback for the thread that copies, or for the callback thread if there is none.
    fn queue_copy(&self, callback: Callback<D::Status>, status: D::Status) {
        let copies = self.due_copies.get_or_init(|| {
            let (due, queue) = mpsc::channel();
            spawn("gantry-copies", move || call_all(&queue)).ok()?;
            Some(due)
        });
        match copies {
            Some(copies) => drop(copies.send((callback, status))),
            None => self.queue_callback(callback, status),
        }
    }

    /// Makes the listener evaluate [`Driver::expects_messages`] again, since its result may have changed.
    pub fn wake_listener(&self) {
        if let Some(wanted) = self.seat().peer.poll_event() {
            wanted.signal();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    use remoting_proto::{apis::cuda::calls::Await, wire::messages::StageId};

    use crate::testing;

    #[test]
    fn a_worker_that_answers_what_nobody_has_asked_is_lost() {
        let (link, mut worker) = testing::link();
        thread::scope(|scope| {
            scope.spawn(|| {
                let stage = StageId(0);
                assert_eq!(link.ask(&Await { stage }), Ok(()));
                assert_eq!(link.ask(&Await { stage }), Err(7));
            });
            // What has been asked, whoever reads it.
            for code in [0, 7] {
                let sequence = worker.called();
                worker.answer(sequence, code);
                link.try_read_pending();
            }
        });
        assert!(link.alive());
        worker.answer(1 << 63, 0);
        link.read_pending();
        assert!(link.is_lost());
        assert_eq!(link.incoming.lock_unpoisoned().answers.len(), 0);
    }

    #[test]
    fn who_says_that_it_is_at_work_has_longer_but_not_for_ever() {
        let (silent, now) = (Duration::from_secs(120), Instant::now());
        let end = now + 3 * silent;
        let mut due = Due::at_work(silent, end);
        assert!(due.by >= now + silent && due.by < now + 2 * silent);
        due.works(now + silent);
        assert_eq!(due.by, now + 2 * silent);
        due.works(now + 2 * silent + silent / 2);
        assert_eq!(due.by, end);
        let mut due = Due::at(end);
        due.works(now);
        assert_eq!(due.by, end);
    }
}
