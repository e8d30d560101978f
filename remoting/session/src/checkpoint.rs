//! Stopping a session, saving it, and resuming it in another process.
//!
//! The process's control thread sends [`Order`]s, which reach the serving thread as notices:
//!
//! ```text
//!   Serving --Quiesce--> Draining --all has ended--> Quiesced --Save--> Quiesced
//!      ^                    |                            |
//!      '-----deadline-------'-----------Resume-----------'
//! ```
//!
//! While the session drains, it takes no call from the ring; calls taken earlier are executed, and answers are sent.
//! Once it is quiesced, it writes nothing to the rings: calls in the ring, and those that arrive meanwhile, are for the
//! session that resumes. That is this session, or another one that was [restored](Session::restore) over the same
//! window.

use std::{
    fs::File,
    sync::mpsc,
    time::{Duration, Instant},
};

use remoting_proto::wire::{
    Blob, Header,
    codec::wire,
    messages::{EventId, StageId},
};
use remoting_transport::{endpoint::Receiver, port_bell::Waker, window::Slice};

use super::{
    backend::{Backend, Fences, Progress},
    image::{Contents, Immovable, Writer},
    notice::Notice,
    postcopy::{Fetch, Remaining},
    precopy::{Asker, said},
    server::{Error, Session, Wait},
};

/// Polling interval of a draining session.
const LOOK: Duration = Duration::from_micros(100);
/// Upper bound of plausible line counts: no ring has passed this many lines.
const MOST_LINES: u64 = 1 << 60;

/// A request of the control thread.
#[derive(Debug)]
pub enum Order {
    /// Take no more calls, and wait until the device is idle, at most for this time. Continue if more than this many
    /// bytes of memory objects were created since the last round.
    Quiesce(Duration, u64),
    /// Save the state to this file.
    Save(File),
    /// Resume.
    Resume,
    /// Write the changes since the last round to this file, and continue serving; with the round's number.
    Precopy(File, Asker, u32),
    /// Save the changes since this many rounds to this file; with postcopy, or without.
    SaveRest(File, Asker, u32, bool),
    /// Never touch the window again, and save contents that were left out when they are asked for.
    Leave(mpsc::Receiver<Fetch>),
    /// Discard what is kept for a save. Nobody waits for the outcome.
    Forget(Asker),
    /// Report whether the state can be saved, and how many bytes of memory objects were created since the last round,
    /// and continue.
    Examine,
}

/// An order, and where to report that it has been executed, or why not.
#[derive(Debug)]
pub struct Ordered {
    /// The order.
    pub order: Order,
    /// The control thread's end.
    pub done: Tell,
}

/// The outcome of an order that was not refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The order was executed.
    Done,
    /// The order was executed, and the contents of some memory objects are still here, to be fetched.
    Keeps,
    /// The session continues: this many bytes of memory objects were created since the last round.
    Made(u64),
}

/// Receives an order's outcome.
pub type Tell = mpsc::Sender<Result<Outcome, String>>;

impl Ordered {
    pub(crate) fn answer(done: &Tell, outcome: Result<(), String>) {
        // The receiver ends only with the process.
        let _ = done.send(outcome.map(|()| Outcome::Done));
    }
}

/// Who asked the session to drain.
#[derive(Debug)]
pub enum Whose {
    /// The control thread, which will send further orders.
    Control(Tell),
    /// The client, which waits for the answer to this call and transfers its state itself ([`carry`](super::carry)),
    /// after this many rounds.
    Client(Header, u32),
}

/// Whether calls are taken.
#[derive(Debug, Default)]
pub enum Phase {
    /// They are.
    #[default]
    Serving,
    /// Calls taken earlier are being executed.
    Draining {
        /// When it is given up.
        until: Instant,
        /// Who asked for it.
        whose: Whose,
    },
    /// Stopped.
    Quiesced,
}

impl Phase {
    /// Whether calls are taken.
    pub fn serves(&self) -> bool {
        matches!(self, Self::Serving)
    }
}

/// What prevents quiescing.
#[derive(Debug)]
pub enum Busy {
    /// A temporary condition.
    Still(&'static str),
    /// A permanent condition.
    Never(Immovable),
}

wire! {
    /// A call that waits for events that the client has not decided yet.
    struct Waiting {
        /// The call's sequence number.
        sequence: u64,
        /// Whether the answer reports an event's failure.
        failures: bool,
        /// A code that is the answer in any case.
        code: i32,
        /// The events.
        events: Vec<EventId>,
    }

    /// The part of a session's state that is independent of the API.
    struct Core {
        /// Total lines read from the ring of calls.
        read: u64,
        /// The part read so far of an incomplete message.
        partial: Blob,
        /// Total lines written to the ring of answers.
        written: u64,
        /// Stages whose release has not been reported to the client.
        released: Vec<(StageId, bool)>,
        /// Unanswered calls.
        waits: Vec<Waiting>,
        /// The backend's part.
        backend: Blob,
    }
}

/// Writes an image whose backend state is these bytes, whatever they mean, and whose session state is empty.
///
/// # Errors
/// The file cannot be written.
#[cfg(any(test, feature = "test-support"))]
pub fn write<B: Backend>(file: File, backend: &[u8]) -> Result<(), Immovable> {
    let core = Core {
        read: 0,
        partial: Blob::default(),
        written: 0,
        released: Vec::new(),
        waits: Vec::new(),
        backend: Blob(backend.to_vec()),
    };
    Writer::new(file).finish::<B::Api, _>(B::STATE_SHAPE, &core)
}

impl<B: Backend> Session<B> {
    /// Executes the control thread's pending orders, and continues unfinished ones.
    pub fn obey(&mut self, calls: &mut Receiver<Slice, Waker>) -> Result<(), Error> {
        while let Some(Ordered { order, done }) = self.orders.pop_front() {
            match order {
                Order::Examine => {
                    let movable = said(B::check_movable(self));
                    let _ = done.send(movable.map(|()| Outcome::Made(self.made_since_rounds())));
                }
                Order::Quiesce(patience, most) if self.phase.serves() => {
                    // A session that cannot be saved need not stop.
                    if let Err(why) = B::check_movable(self) {
                        Ordered::answer(&done, said(Err(why)));
                        continue;
                    }
                    let made = self.made_since_rounds();
                    if made > most {
                        let _ = done.send(Ok(Outcome::Made(made)));
                        continue;
                    }
                    let until = Instant::now() + patience;
                    let whose = Whose::Control(done);
                    self.phase = Phase::Draining { until, whose };
                    self.backend.flush_all();
                }
                Order::Save(file) if matches!(self.phase, Phase::Quiesced) => {
                    let saved = self.save(calls, None, Writer::new(file), false);
                    Ordered::answer(&done, said(saved));
                }
                Order::SaveRest(file, asker, rounds, postcopy)
                    if matches!(self.phase, Phase::Quiesced) =>
                {
                    let saved = said(self.save_rest(calls, file, (asker, rounds), postcopy));
                    let _ = done.send(saved.map(|()| match self.remaining {
                        Some(_) => Outcome::Keeps,
                        None => Outcome::Done,
                    }));
                }
                Order::Resume if !matches!(self.phase, Phase::Draining { .. }) => {
                    if matches!(self.phase, Phase::Quiesced) {
                        // The session that was to resume in its place may have changed this.
                        self.quota.level();
                    }
                    self.precopied = None;
                    self.remaining = None;
                    self.phase = Phase::Serving;
                    Ordered::answer(&done, Ok(()));
                }
                Order::Precopy(file, asker, round) if self.phase.serves() => {
                    self.precopy(file, asker, round, &done);
                }
                Order::Leave(fetches) if matches!(self.phase, Phase::Quiesced) => {
                    Ordered::answer(&done, Ok(()));
                    Remaining::serve(self.remaining.take(), fetches);
                    // The process is killed later.
                    loop {
                        std::thread::park();
                    }
                }
                Order::Forget(asker) => {
                    self.forget_rounds(asker);
                    Ordered::answer(&done, Ok(()));
                }
                Order::Quiesce(..)
                | Order::Save(_)
                | Order::SaveRest(..)
                | Order::Precopy(..)
                | Order::Leave(_)
                | Order::Resume => {
                    Ordered::answer(&done, Err("the worker is in another state".to_owned()));
                }
            }
        }
        match std::mem::take(&mut self.phase) {
            Phase::Draining { until, whose } => self.drain_until(calls, until, whose)?,
            phase => self.phase = phase,
        }
        if matches!(self.phase, Phase::Quiesced) {
            self.rest(calls);
        }
        Ok(())
    }

    fn drain_until(
        &mut self,
        calls: &Receiver<Slice, Waker>,
        until: Instant,
        whose: Whose,
    ) -> Result<(), Error> {
        let busy = self.busy()?;
        let failed = match busy {
            None => {
                self.before_sleep();
                match whose {
                    Whose::Control(done) => {
                        self.phase = Phase::Quiesced;
                        Ordered::answer(&done, Ok(()));
                    }
                    Whose::Client(header, rounds) => {
                        self.phase = Phase::Serving;
                        self.save_for_client(calls, header, rounds)?;
                    }
                }
                return Ok(());
            }
            Some(Busy::Still(_)) if Instant::now() < until => {
                self.phase = Phase::Draining { until, whose };
                std::thread::sleep(LOOK);
                return Ok(());
            }
            Some(Busy::Still(what)) => what.to_owned(),
            Some(Busy::Never(what)) => base::Chain(&what).to_string(),
        };
        self.phase = Phase::Serving;
        match whose {
            Whose::Control(done) => Ordered::answer(&done, Err(failed)),
            Whose::Client(header, _) => self.not_saved(header, failed)?,
        }
        Ok(())
    }

    /// Waits for an order, and keeps all other notices for later.
    fn rest(&mut self, calls: &Receiver<Slice, Waker>) {
        let mut kept = Vec::new();
        while self.orders.is_empty() {
            let board = std::sync::Arc::clone(&self.board);
            calls.rest(|| board.any());
            for notice in self.board.take() {
                match notice {
                    Notice::Control(ordered) => self.orders.push_back(ordered),
                    notice => kept.push(notice),
                }
            }
        }
        for notice in kept {
            self.board.leave(notice);
        }
    }

    /// What the session is still working on, if anything.
    pub fn busy(&mut self) -> Result<Option<Busy>, Error> {
        if !self.holds_nothing() {
            return Ok(Some(Busy::Still("calls wait for the device")));
        }
        if self.board.any() {
            return Ok(Some(Busy::Still("callbacks are due")));
        }
        if self.carried.is_due() {
            return Ok(Some(Busy::Still("its client copies its state")));
        }
        self.retire_stages();
        if self.has_stages() {
            return Ok(Some(Busy::Still("commands use the window")));
        }
        let driver = std::sync::Arc::clone(self.backend.driver());
        let decided = |wait: &Wait<_>| {
            wait.fences.iter().all(|fence| {
                let progress: Progress = driver.poll(*fence);
                progress.is_over() || self.backend.is_undecided(*fence)
            })
        };
        if !self.waits().iter().all(decided) {
            return Ok(Some(Busy::Still(
                "commands that it waits for have not ended",
            )));
        }
        if let Some(busy) = B::busy(self) {
            return Ok(Some(busy));
        }
        // Includes what has ended since.
        Ok((self.poll_waits()? || self.board.any()).then_some(Busy::Still("answers are due")))
    }

    /// Saves the state of a quiesced session without what is already `known`. With `postcopy`, also without contents
    /// that are fetched later.
    ///
    /// # Errors
    /// Something cannot be restored, or the file cannot be written. The session can resume.
    pub fn save(
        &mut self,
        calls: &Receiver<Slice, Waker>,
        known: Option<B::Precopied>,
        mut writer: Writer,
        postcopy: bool,
    ) -> Result<(), Immovable> {
        let (backend, remaining) = B::checkpoint(self, known, &mut writer, postcopy)?;
        self.remaining = remaining;
        let (read, partial) = calls.read();
        let driver = self.backend.driver();
        let mut waits = Vec::new();
        for wait in self.waits() {
            let mut events = Vec::new();
            for fence in &wait.fences {
                if !driver.poll(*fence).is_over() {
                    let id = self.backend.event_of(*fence);
                    events.push(id.ok_or_else(|| {
                        Immovable::Has("a call waits for an event that was released".to_owned())
                    })?);
                }
            }
            waits.push(Waiting {
                sequence: wait.sequence,
                failures: wait.failures,
                code: wait.code,
                events,
            });
        }
        let core = Core {
            read,
            partial: Blob(partial.to_vec()),
            written: self.sender.written(),
            released: self.released_stages().to_vec(),
            waits,
            backend: Blob(backend),
        };
        writer.finish::<B::Api, _>(B::STATE_SHAPE, &core)
    }

    /// Restores a saved state in this session, which is new and serves nobody yet. Writes nothing to the rings: the
    /// session that was saved may still resume if this fails. `charged` tells whether the state's device memory is
    /// already charged to the account.
    ///
    /// # Errors
    /// The state is damaged, or the driver refuses to recreate something. The session must end.
    pub fn restore(&mut self, file: File, charged: bool) -> Result<(), Immovable> {
        let (core, contents) = Contents::open::<B::Api, Core>(file, B::STATE_SHAPE)?;
        self.quota.inherit(charged);
        let restored = B::restore(self, &core.backend.0, &contents);
        self.quota.inherit(false);
        restored?;
        self.is_prepared = false;
        if core.read >= MOST_LINES || core.written >= MOST_LINES {
            return Err(Immovable::Wrong("rings that have passed on too much"));
        }
        if core.partial.0.len() > remoting_proto::wire::frame::LARGEST {
            return Err(Immovable::Wrong("a message that is too long"));
        }
        for wait in core.waits {
            let mut fences = Vec::new();
            for id in wait.events {
                let fence = self.backend.fence_of(id);
                let fence = fence.ok_or(Immovable::Wrong("an event that is waited for"))?;
                self.backend.driver().retain(fence);
                fences.push(fence);
            }
            self.take_up_wait(wait.sequence, fences, wait.failures, wait.code);
        }
        for (stage, good) in core.released {
            self.stage_free(stage, good);
        }
        self.start_at = Some((core.read, core.partial.0, core.written));
        Ok(())
    }

    /// Continues the rings where the session was saved: from here on it serves.
    ///
    /// # Errors
    /// The rings cannot be used.
    pub fn take_up(&mut self, calls: &mut Receiver<Slice, Waker>) -> Result<(), Error> {
        if let Some((read, partial, written)) = self.start_at.take() {
            self.sender.go_on(written)?;
            calls.go_on(read, partial);
        }
        Ok(())
    }
}
