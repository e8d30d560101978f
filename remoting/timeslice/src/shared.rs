//! The contexts of a worker that shares the GPU with others, as the arbiter says.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use base::{Chain, note::Seldom};
use remoting_turns::slices::{Slices, Use};

use super::{Context, Error, Gate, Kernel, Slice, Stopped, switches::Switches};

/// All contexts of this process. What is stopped is started when this is dropped.
#[derive(Debug)]
pub struct Shared<K: Kernel + 'static> {
    gate: &'static Gate<K>,
    stopped: BTreeMap<Context, Stopped<K>>,
    /// The slices that were set.
    slices: BTreeMap<Context, Slice>,
    switches: Switches,
    failing: Seldom,
}

impl<K: Kernel> Shared<K> {
    /// Those of this gate's process.
    pub fn new(gate: &'static Gate<K>) -> Self {
        gate.number_channels();
        Self {
            gate,
            stopped: BTreeMap::new(),
            slices: BTreeMap::new(),
            switches: Switches::default(),
            failing: Seldom::new(),
        }
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
        let contexts = self.gate.contexts();
        self.slices.retain(|context, _| contexts.contains(context));
        for context in contexts {
            if self.slices.get(&context) == Some(&slice) {
                continue;
            }
            match self.gate.set(context, slice) {
                Ok(()) => {
                    self.slices.insert(context, slice);
                }
                // It has just ended.
                Err(Error::NoChannels) => {}
                Err(error) => self.failed("set the time slice of", &error),
            }
        }
    }

    fn stop(&mut self) -> bool {
        for context in self.gate.contexts() {
            match self.gate.stop(context) {
                Ok(stopped) => {
                    self.stopped.insert(context, stopped);
                }
                Err(error) => {
                    // What channels are made or freed for comes first, or the context has just ended. All or none.
                    if !matches!(error, Error::Busy | Error::NoChannels) {
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

    fn used(&mut self) -> Option<Use> {
        let contexts = self.gate.contexts().into_iter();
        let gpus: BTreeSet<u32> = contexts.filter_map(|one| self.gate.gpu(one)).collect();
        let numbers = self.gate.numbers()?;
        self.switches.look(gpus, &numbers)
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
