//! Interrupts to the client: one eventfd for the line (INTx), and one for the message (MSI).

use std::{
    fs::File,
    io::Write,
    os::fd::{AsFd, OwnedFd},
};

/// The eventfds, and their state.
#[derive(Default)]
pub struct Lines {
    /// For INTx.
    pub line: Option<File>,
    /// For the MSI.
    pub message: Option<File>,
    /// Signalled when the line is to be unmasked.
    unmask: Option<File>,
    /// Whether the line has been asserted and not yet unmasked.
    masked: bool,
    level: bool,
}

/// How interrupts are delivered.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Way {
    /// Not at all.
    None,
    /// By the line, which is masked when it is asserted, until the client unmasks it.
    Line,
    /// By a message on each rising edge of the level.
    Message,
}

impl Lines {
    /// Sets the current level.
    pub fn level(&mut self, level: bool, way: Way) {
        let rises = level && !self.level;
        self.level = level;
        match way {
            Way::Message if rises => signal(self.message.as_ref()),
            Way::Line if level && !self.masked => {
                self.masked = true;
                signal(self.line.as_ref());
            }
            _ => {}
        }
    }

    /// The driver is ready for the next message.
    pub fn rearm(&mut self, way: Way) {
        if way == Way::Message && self.level {
            signal(self.message.as_ref());
        }
    }

    /// The client unmasks the line.
    pub fn unmask(&mut self, way: Way) {
        self.masked = false;
        self.level(self.level, way);
    }

    /// Sets the eventfd by which the client will unmask the line.
    pub fn unmask_by(&mut self, eventfd: Option<File>) {
        self.unmask = eventfd;
    }

    /// Returns a duplicate of that eventfd.
    pub fn unmask_eventfd(&self) -> Option<OwnedFd> {
        self.unmask.as_ref()?.as_fd().try_clone_to_owned().ok()
    }
}

/// Errors are ignored: the client is gone, or the counter is full and the client will look.
fn signal(eventfd: Option<&File>) {
    if let Some(mut eventfd) = eventfd {
        let _ = eventfd.write(&1_u64.to_ne_bytes());
    }
}
