//! Interrupts to the client: an eventfd for the line, and one for the message.

use std::{
    fs::File,
    io::Write,
    os::fd::{AsFd, OwnedFd},
};

/// Eventfds, and what they have been told.
#[derive(Default)]
pub struct Lines {
    /// For the line.
    pub line: Option<File>,
    /// For the message.
    pub message: Option<File>,
    /// Signalled when the line is to be unmasked.
    unmask: Option<File>,
    /// The line has been asserted, and not unmasked since.
    masked: bool,
    level: bool,
}

/// By which way.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Way {
    /// Neither.
    None,
    /// The line: it is masked by being asserted, until the client unmasks it.
    Line,
    /// The message: at each rise of the level.
    Message,
}

impl Lines {
    /// The level is this now.
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

    /// The driver is ready for another message.
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

    /// The client will unmask the line by an eventfd.
    pub fn unmask_by(&mut self, eventfd: Option<File>) {
        self.unmask = eventfd;
    }

    /// A duplicate of that eventfd.
    pub fn unmask_eventfd(&self) -> Option<OwnedFd> {
        self.unmask.as_ref()?.as_fd().try_clone_to_owned().ok()
    }
}

/// Errors: the client is gone, or its counter is full and it will look.
fn signal(eventfd: Option<&File>) {
    if let Some(mut eventfd) = eventfd {
        let _ = eventfd.write(&1_u64.to_ne_bytes());
    }
}
