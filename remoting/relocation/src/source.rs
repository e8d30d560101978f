//! The worker that an application moves away from.

use std::{
    mem,
    time::{Duration, Instant},
};

use base::Patience;

use super::{
    destination::{Arrival, DestinationPort, Prepared},
    failure::{Failure, NotMoved},
    plan::Plan,
    rounds::{APPLICATION, Rounds, TIME},
};

pub use super::departed::Departed;

/// How the worker that serves an application is reached.
pub trait SourcePort {
    /// What holds a part of the application's state, as the destination gets it.
    type State;

    /// Has what is new since the last round be saved while the worker serves; `round` counts from 0, and round 0 starts
    /// anew. Returns it with its size in bytes. Refused if it takes more than `limit`.
    ///
    /// # Errors
    /// The worker refuses or is gone, or the patience is over.
    fn precopy(
        &mut self,
        round: u32,
        limit: Duration,
        patience: &Patience,
    ) -> Result<(Self::State, u64), Failure>;

    /// Has the worker stop when nothing is under way any more. `since` is the number of rounds so far, and how many bytes
    /// of memory objects may have been created since the last one: if there are more, the worker continues instead.
    ///
    /// # Errors
    /// The worker refuses or is gone, or the patience is over. Perhaps it stops later.
    fn quiesce(
        &mut self,
        plan: &Plan,
        since: (u32, u64),
        patience: &Patience,
    ) -> Result<Quiescence, Failure>;

    /// Has a stopped worker save what is new since these rounds. With postcopy, it may keep contents.
    ///
    /// # Errors
    /// The worker refuses, is gone or makes no progress, or the patience is over.
    fn save(
        &mut self,
        plan: &Plan,
        rounds: u32,
        patience: &Patience,
    ) -> Result<(Self::State, Contents), Failure>;

    /// Has a stopped worker never touch the application again.
    fn leave(&mut self) -> Leave;

    /// Ends a worker of which nobody knows whether it has left, unless it has ended, and waits until it has.
    ///
    /// # Errors
    /// It has not ended in time.
    fn end(&mut self) -> Result<(), Failure>;

    /// Has the worker serve again, or forget the rounds, whatever it was asked for. Waits for nothing.
    fn resume(&mut self);
}

/// Whether a worker has stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quiescence {
    /// It has.
    Still,
    /// It continues: too much memory is new.
    Grew,
}

/// Where the contents of a saved application's memory are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contents {
    /// All are in the state.
    Saved,
    /// The source keeps some until they are fetched.
    Kept,
}

/// What a worker answers that is to leave.
#[derive(Debug)]
pub enum Leave {
    /// It has left.
    Confirmed,
    /// It does not leave.
    Refused(Failure),
    /// It may have left, or do so later, or has ended.
    Unknown(Failure),
}

/// A worker that was asked for something, and resumes when this is dropped.
#[derive(Debug)]
struct Asked<'a, S: SourcePort> {
    port: &'a mut S,
    plan: &'a Plan,
}

impl<S: SourcePort> Drop for Asked<'_, S> {
    fn drop(&mut self) {
        self.port.resume();
    }
}

/// A worker that serves, and may have saved rounds.
#[derive(Debug)]
pub struct Serving<'a, S: SourcePort> {
    worker: Asked<'a, S>,
    rounds: Rounds,
    /// When there are no more rounds.
    until: Instant,
}

/// A worker that has stopped.
#[derive(Debug)]
pub struct Quiesced<'a, S: SourcePort> {
    worker: Asked<'a, S>,
    rounds: u32,
}

/// A stopped worker that has saved its application's state.
#[derive(Debug)]
pub struct Saved<'a, S: SourcePort> {
    worker: Asked<'a, S>,
    state: S::State,
    contents: Contents,
}

/// A stopped worker, and another one that has its application's state.
#[derive(Debug)]
pub struct Copied<'a, S: SourcePort, D> {
    worker: Asked<'a, S>,
    contents: Contents,
    destination: D,
}

/// What comes of stopping a worker.
#[derive(Debug)]
pub enum Stopped<'a, S: SourcePort> {
    /// It has stopped.
    Quiesced(Quiesced<'a, S>),
    /// It continues: so much memory is new that another round is worth its time.
    Grew(Serving<'a, S>),
}

impl<'a, S: SourcePort> Serving<'a, S> {
    /// A worker that was asked for nothing yet.
    pub fn new(port: &'a mut S, plan: &'a Plan) -> Self {
        Self {
            worker: Asked { port, plan },
            rounds: Rounds::new(APPLICATION),
            until: Instant::now() + TIME,
        }
    }

    /// The time for further rounds.
    fn left(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now())
    }

    /// Copies in rounds what can be copied while the worker serves. Copies nothing if the first round is refused:
    /// the reason may be gone once the worker has stopped.
    ///
    /// # Errors
    /// One of the two workers is gone or refuses, or the patience is over.
    pub fn precopy<D: DestinationPort<State = S::State>>(
        mut self,
        destination: &mut Prepared<D>,
        patience: &Patience,
    ) -> Result<Self, Failure> {
        loop {
            let began = Instant::now();
            let (round, left) = (self.rounds.count(), self.left());
            let (state, bytes) = match self.worker.port.precopy(round, left, patience) {
                Err(Failure::Refused(_)) if round == 0 => return Ok(self),
                copied => copied?,
            };
            destination.0.prepare(state, patience)?;
            self.rounds.add(bytes, began);
            if !self.rounds.is_due(self.left()) {
                return Ok(self);
            }
        }
    }

    /// Stops the worker, unless much is new.
    ///
    /// # Errors
    /// As for [`SourcePort::quiesce`].
    pub fn quiesce(mut self, patience: &Patience) -> Result<Stopped<'a, S>, Failure> {
        let most_new = match self.worker.plan.postcopy {
            true => u64::MAX,
            false => self.rounds.most_new(self.left(), u64::MAX),
        };
        let since = (self.rounds.count(), most_new);
        let worker = &mut self.worker;
        Ok(match worker.port.quiesce(worker.plan, since, patience)? {
            // The number of rounds is bounded, whatever the worker says.
            Quiescence::Grew if most_new < u64::MAX => Stopped::Grew(self),
            _ => Stopped::Quiesced(Quiesced {
                worker: self.worker,
                rounds: since.0,
            }),
        })
    }
}

impl<'a, S: SourcePort> Quiesced<'a, S> {
    /// Saves what the rounds have not copied.
    ///
    /// # Errors
    /// As for [`SourcePort::save`].
    pub fn save(self, patience: &Patience) -> Result<Saved<'a, S>, Failure> {
        let Self { worker, rounds } = self;
        let (state, contents) = worker.port.save(worker.plan, rounds, patience)?;
        Ok(Saved {
            worker,
            state,
            contents,
        })
    }
}

impl<'a, S: SourcePort> Saved<'a, S> {
    /// Creates the rest at the destination.
    ///
    /// # Errors
    /// As for [`DestinationPort::restore`].
    pub fn restore<D: DestinationPort<State = S::State>>(
        self,
        mut destination: Prepared<D>,
        patience: &Patience,
    ) -> Result<Copied<'a, S, D>, Failure> {
        let Self {
            worker,
            state,
            contents,
        } = self;
        destination.0.restore(state, patience)?;
        Ok(Copied {
            worker,
            contents,
            destination: destination.0,
        })
    }
}

impl<S: SourcePort, D: DestinationPort> Copied<'_, S, D> {
    /// Has the worker leave its application for good. If nobody knows whether it has, it ends: that, too, is proof that it
    /// does not serve.
    ///
    /// # Errors
    /// The worker refuses to leave, and resumes. Or the application is lost: its worker has ended and had contents of its
    /// memory, or was ended and lingers.
    pub fn leave(self) -> Result<Arrival<D>, NotMoved> {
        let port = &mut *self.worker.port;
        let ended = match port.leave() {
            Leave::Confirmed => None,
            Leave::Refused(why) => return Err(NotMoved::Stays(why)),
            // One that has only closed its channel is ended, too.
            Leave::Unknown(why) => {
                port.end().map_err(NotMoved::Lost)?;
                Some(why)
            }
        };
        match (ended, self.contents) {
            (Some(why), Contents::Kept) => Err(NotMoved::Lost(why)),
            _ => {
                // It is not resumed any more.
                mem::forget(self.worker);
                Ok(Arrival::new(self.destination, Departed::proven()))
            }
        }
    }
}
