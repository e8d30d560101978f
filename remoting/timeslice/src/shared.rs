//! The contexts of a worker that shares the GPU with others, as the arbiter says.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use base::{Chain, note::Seldom};
use remoting_turns::{
    Moment,
    slices::{DRIVERS_SLICE, Slices, Use, Worked},
};

use super::{Context, Error, Gate, Kernel, Slice, Stopped, switches::Switches};

/// All contexts of this process. What is stopped is started when this is dropped.
#[derive(Debug)]
pub struct Shared<K: Kernel + 'static> {
    gate: &'static Gate<K>,
    stopped: BTreeMap<Context, Stopped<K>>,
    switches: Switches,
    sees: Sees,
    failing: Seldom,
}

/// After which time what the driver refuses is tried again.
const AGAIN: Duration = Duration::from_secs(1);

/// What the process sees of its contexts' work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sees {
    /// Its requests.
    Requests,
    /// Nothing but the record of context switches. What is said about that and about stops was not tried yet.
    Untried {
        /// When to try.
        next: Moment,
    },
    /// The same; all works.
    Record,
    /// Something does not work.
    Nothing,
}

impl<K: Kernel> Shared<K> {
    /// Those of this gate's process, which knows when they have work.
    pub fn new(gate: &'static Gate<K>) -> Self {
        Self::with(gate, Sees::Requests)
    }

    /// Those of this gate's process, which does not see what is submitted: when they have work is read from the record of
    /// context switches. When there are contexts for the first time, it is tried whether there is that record, and whether
    /// they can be stopped and started.
    pub fn by_record(gate: &'static Gate<K>) -> Self {
        let next = Moment::START;
        Self::with(gate, Sees::Untried { next })
    }

    fn with(gate: &'static Gate<K>, sees: Sees) -> Self {
        gate.number_channels();
        Self {
            gate,
            stopped: BTreeMap::new(),
            switches: Switches::default(),
            sees,
            failing: Seldom::new(),
        }
    }

    /// Tries whether a context can be stopped and started, and whether there is a record of its use. One that the driver
    /// refuses does not tell anything about others.
    fn attempt(&mut self) -> Result<(), Error> {
        let mut tried = Err(Error::NoChannels);
        for context in self.gate.contexts() {
            tried = self.attempt_one(context);
            match &tried {
                Err(error) if error.is_of_one_context() => {}
                _ => break,
            }
        }
        tried?;
        self.look(Duration::ZERO).map(drop).ok_or(Error::Record)
    }

    fn attempt_one(&self, context: Context) -> Result<(), Error> {
        let slice = Slice::from_micros(DRIVERS_SLICE.as_micros() as u32);
        self.gate.set(context, slice.ok_or(Error::NoChannels)?)?;
        drop(self.gate.unschedule(context)?);
        match self.gate.is_stopped(context) {
            true => Err(Error::NotStarted),
            false => Ok(()),
        }
    }

    /// As [`Slices::works`], at this time.
    pub(super) fn works_at(&mut self, now: Moment) -> bool {
        if let Sees::Untried { next } = self.sees
            && next <= now
            && !self.gate.contexts().is_empty()
        {
            self.sees = match self.attempt() {
                Ok(()) => Sees::Record,
                // What channels are made or freed for comes first.
                Err(Error::Busy | Error::NoChannels | Error::Stopped) => self.sees,
                // It may have just ended, or be of a program that wants this to fail. What an arbiter says holds meanwhile.
                Err(error) if error.is_of_one_context() => {
                    self.failed("stop", &error);
                    Sees::Untried { next: now + AGAIN }
                }
                Err(error) => {
                    base::note!(
                        "contexts take no part in sharing the GPU by weight: {}",
                        Chain(&error)
                    );
                    Sees::Nothing
                }
            };
        }
        self.sees != Sees::Nothing
    }

    fn look(&mut self, round: Duration) -> Option<Use> {
        let contexts = self.gate.contexts().into_iter();
        let gpus: BTreeSet<u32> = contexts.filter_map(|one| self.gate.gpu(one)).collect();
        let numbers = self.gate.numbers()?;
        let used = self.switches.look(gpus, &numbers, round);
        self.gate.was_read();
        used
    }

    fn failed(&mut self, what: &str, error: &Error) {
        if let Some(unsaid) = self.failing.due() {
            base::note!("cannot {what} a context: {}{unsaid}", Chain(error));
        }
    }
}

impl<K: Kernel> Slices for Shared<K> {
    fn set(&mut self, slice: Duration) {
        let micros = slice.as_micros().clamp(100, 100_000) as u32;
        let Some(slice) = Slice::from_micros(micros) else {
            return;
        };
        for context in self.gate.contexts() {
            if self.gate.slice(context) == Some(slice) {
                continue;
            }
            match self.gate.set(context, slice) {
                // It has just ended.
                Ok(()) | Err(Error::NoChannels) => {}
                Err(error) => self.failed("set the time slice of", &error),
            }
        }
    }

    fn stop(&mut self) -> bool {
        for context in self.gate.contexts() {
            match self.gate.unschedule(context) {
                Ok(stopped) => {
                    self.stopped.insert(context, stopped);
                }
                // It has just ended.
                Err(Error::NoChannels) => {}
                Err(error) => {
                    // What channels are made or freed for comes first. All or none.
                    if !matches!(error, Error::Busy) {
                        self.failed("stop", &error);
                    }
                    self.stopped.clear();
                    return false;
                }
            }
        }
        !self.stopped.is_empty()
    }

    fn keep(&mut self) -> bool {
        let kept = self.stopped.values().all(Stopped::renew)
            && (self.gate.contexts()).iter().eq(self.stopped.keys());
        if !kept {
            self.stopped.clear();
        }
        kept
    }

    fn start(&mut self) {
        self.stopped.clear();
    }

    fn works(&mut self) -> bool {
        self.works_at(Moment::now())
    }

    fn used(&mut self, round: Duration) -> Option<Use> {
        let used = self.look(round);
        if used.is_none() && self.sees == Sees::Record {
            base::note!("contexts take no part in sharing the GPU by weight any longer");
            self.sees = Sees::Nothing;
        }
        used
    }

    fn worked(&mut self, stopped: bool, round: Duration) -> Worked {
        match self.sees {
            Sees::Requests => Worked::Known,
            _ => Worked::Recorded(self.switches.worked(stopped, round)),
        }
    }

    fn end_use(&mut self) {
        self.switches.end();
    }

    fn gpus(&self) -> u64 {
        let contexts = self.gate.contexts().into_iter();
        let gpus = contexts.filter_map(|context| self.gate.gpu(context));
        gpus.filter_map(|gpu| 1u64.checked_shl(gpu))
            .fold(0, |gpus, gpu| gpus | gpu)
    }
}
