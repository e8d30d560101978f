//! Interrupt lines that count assertions.

use std::{
    io,
    sync::{Arc, Mutex, Weak},
};

use base::Unpoisoned;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::{Line, Lines};

/// Interrupt lines that are counted together. Clones share them.
#[derive(Clone, Default)]
pub struct FakeLines(Arc<Mutex<Vec<Weak<FakeEvents>>>>);

struct FakeEvents {
    assert: EventFd,
    served: EventFd,
}

struct FakeLine(Arc<FakeEvents>);

impl FakeLines {
    fn joined(&self) -> Vec<Arc<FakeEvents>> {
        self.0
            .lock_unpoisoned()
            .iter()
            .filter_map(Weak::upgrade)
            .collect()
    }

    /// Number of functions that joined a line.
    pub fn users(&self) -> usize {
        self.joined().len()
    }

    /// Number of assertions since the last call.
    pub fn take(&self) -> u64 {
        let asserted = |events: &Arc<FakeEvents>| events.assert.read().unwrap_or(0);
        self.joined().iter().map(asserted).sum()
    }

    /// Signals that the guest has served an interrupt.
    pub fn serve(&self) {
        for events in self.joined() {
            // Fails only if the counter is full.
            let _ = events.served.write(1);
        }
    }
}

impl Lines for FakeLines {
    fn join(&self, _line: u8) -> io::Result<Box<dyn Line>> {
        let events = Arc::new(FakeEvents {
            assert: EventFd::new(EFD_NONBLOCK)?,
            served: EventFd::new(EFD_NONBLOCK)?,
        });
        self.0.lock_unpoisoned().push(Arc::downgrade(&events));
        Ok(Box::new(FakeLine(events)))
    }
}

impl Line for FakeLine {
    fn assert(&self) -> &EventFd {
        &self.0.assert
    }

    fn served(&self) -> &EventFd {
        &self.0.served
    }
}
