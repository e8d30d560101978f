//! The applications of a port in a snapshot: the contents of their slices, and the state that their
//! workers have saved.
//!
//! Everything is in one file, the [archive](remoting_relocation::archive), in pieces; their offsets
//! and checksums are in the port's state.

use std::time::Duration;

use base::{Chain, Patience};
use remoting_proto::port::State;
use remoting_transport::control::{AFTER_DRAIN, Command, SOON};

use super::{
    handle::{Handle, NATIVE, named},
    left::{Application, Left},
    lend::Borrowed,
    rounds::Copied,
    suspended::Suspended,
};

pub use super::{
    handle::Error,
    saved_slice::{SavedSlice, check_pieces},
};
pub use remoting_relocation::archive::{Archive, Piece, data_after};
pub use remoting_transport::control::image;

/// A port whose applications are being stopped and saved.
struct Port {
    /// ID of the port.
    id: String,
    handle: Handle,
    /// Its workers that have stopped.
    stopped: Vec<Borrowed>,
    /// Its workers that have not, kept so that they are not borrowed again.
    failed: Vec<Borrowed>,
}

/// Stopped applications of several ports, whose guest may run. They continue when this is dropped,
/// which does not block.
pub struct Standing {
    ports: Vec<Port>,
    /// What another host has already received.
    copied: Copied,
    drain: Duration,
    patience: Patience,
    /// Programs that are stopped by being suspended.
    _suspended: Suspended,
}

/// Stopped and saved applications. They continue when this is dropped.
pub struct Stopped(Standing);

impl Standing {
    /// Asks the workers of all applications of these ports to stop, and waits until all have. Each
    /// may first complete what its device is executing, for up to `drain`.
    ///
    /// # Errors
    /// All reasons why some do not stop. All continue.
    pub fn new(
        ports: Vec<(String, Handle)>,
        drain: Duration,
        patience: Patience,
    ) -> Result<Self, Error> {
        let suspended = Suspended::new(&ports, &patience).map_err(Error::Stays)?;
        let port = |(id, handle)| Port {
            id,
            handle,
            stopped: Vec::new(),
            failed: Vec::new(),
        };
        let mut standing = Self {
            ports: ports.into_iter().map(port).collect(),
            copied: Copied::new(Vec::new()),
            drain,
            patience,
            _suspended: suspended,
        };
        match standing.stop() {
            (_, reasons) if reasons.is_empty() => Ok(standing),
            (_, reasons) => Err(Error::Stays(reasons)),
        }
    }

    /// Sets the deadline for the following steps.
    #[must_use]
    pub fn wait(self, patience: Patience) -> Self {
        Self { patience, ..self }
    }

    /// Saves only what is new since these rounds.
    #[must_use]
    pub fn after(self, copied: Copied) -> Self {
        Self { copied, ..self }
    }

    /// Stops all that serve. Returns how many there were, and why some do not stop.
    fn stop(&mut self) -> (usize, Vec<String>) {
        let mut reasons = Vec::new();
        let mut asked = Vec::new();
        for (at, port) in self.ports.iter_mut().enumerate() {
            for mut borrowed in port.handle.lend_all() {
                let drain = u64::try_from(self.drain.as_millis()).unwrap_or(u64::MAX);
                // However much memory it has created lately.
                let sent = borrowed.send(&Command::Quiesce(drain, u64::MAX), &[]);
                asked.push((at, borrowed, sent));
            }
        }
        let count = asked.len();
        let patience = self.drain.saturating_add(AFTER_DRAIN);
        let patience = self.patience.at_most(patience);
        for (at, mut borrowed, sent) in asked {
            let port = &mut self.ports[at];
            match sent.and_then(|()| borrowed.answer(&patience)) {
                Ok(_) => port.stopped.push(borrowed),
                Err(why) => {
                    let named = named(&port.id, borrowed.slice as u32);
                    reasons.push(format!("{named}: {}", Chain(&why)));
                    port.failed.push(borrowed);
                }
            }
        }
        (count, reasons)
    }

    /// Saves all applications one by one while their guest is stopped, including those that started
    /// meanwhile. The ports' own states contain them until the result is dropped.
    ///
    /// # Errors
    /// Some cannot be saved. All continue.
    pub fn save(mut self, archive: &mut Archive) -> Result<Stopped, Error> {
        match self.save_all(archive) {
            Ok(()) => Ok(Stopped(self)),
            Err(Error::Archive(_)) if self.patience.is_cancelled() => Err(Error::Cancelled),
            Err(why) => Err(why),
        }
    }

    fn save_all(&mut self, archive: &mut Archive) -> Result<(), Error> {
        let mut reasons = Vec::new();
        // An application that is being opened may be open at the next look.
        loop {
            let (count, more) = self.stop();
            reasons.extend(more);
            if count == 0 {
                break;
            }
        }
        let mut all = Vec::new();
        for port in &mut self.ports {
            let mut saved = Vec::new();
            for borrowed in &mut port.stopped {
                if !reasons.is_empty() {
                    // Saving takes long, and the result would not be used.
                    return Err(Error::Stays(reasons));
                }
                let one = self.copied.rest(&port.id, borrowed, &self.patience);
                let (image, known) = match one {
                    Ok(one) => one,
                    Err(why) => {
                        let named = named(&port.id, borrowed.slice as u32);
                        reasons.push(format!("{named}: {}", Chain(&why)));
                        continue;
                    }
                };
                let slice = (&port.handle, borrowed.slice);
                saved.push(known.add(slice, &image, archive, &self.patience)?.0);
            }
            port.rest(&mut saved, (archive, &self.patience), &mut reasons)?;
            all.push(saved);
        }
        if !reasons.is_empty() {
            return Err(Error::Stays(reasons));
        }
        archive.file().sync_all()?;
        if self.patience.is_cancelled() {
            return Err(Error::Cancelled);
        }
        for (port, saved) in self.ports.iter().zip(all) {
            *port.handle.saved() = Some(saved);
        }
        Ok(())
    }
}

impl Port {
    /// Adds the slices that are in use without a worker that was stopped.
    fn rest(
        &self,
        saved: &mut Vec<SavedSlice>,
        (archive, patience): (&mut Archive, &Patience),
        reasons: &mut Vec<String>,
    ) -> Result<(), Error> {
        let slices = &self.handle.attach.slices;
        let mine = self.stopped.iter().chain(&self.failed);
        let mine: Vec<_> = mine.map(|borrowed| borrowed.slice).collect();
        for slice in 0..slices.count() as usize {
            let state = slices.get(slice);
            if state == State::Free || mine.contains(&slice) {
                continue;
            }
            if self.handle.is_native() {
                reasons.push(format!("{}: {NATIVE}", self.id));
                continue;
            }
            if state == State::Open {
                reasons.push(format!(
                    "{} is being moved or saved",
                    named(&self.id, slice as u32)
                ));
                continue;
            }
            let window = archive.add(&self.handle.window(slice)?, patience)?;
            saved.push(self.handle.described(slice, state, window));
        }
        Ok(())
    }
}

impl Stopped {
    /// The applications continue elsewhere, and some of their contents follow: the workers stay,
    /// and belong to the result alone.
    pub fn leave(mut self) -> Left {
        let mut asked = Vec::new();
        for port in &mut self.0.ports {
            for mut borrowed in port.stopped.drain(..) {
                let of = Application {
                    port: port.id.clone(),
                    slice: borrowed.slice as u32,
                };
                let sent = borrowed.send(&Command::Leave(), &[]);
                asked.push((of, borrowed, sent));
            }
        }
        // One that hangs costs the others nothing: replies that arrived meanwhile are read.
        let patience = Patience::within(SOON);
        let mut left = Left::default();
        for (of, borrowed, sent) in asked {
            left.add(of, borrowed.left_for_good(sent, &patience));
        }
        left
    }

    /// The applications continue elsewhere: their workers end.
    pub fn end(mut self) {
        for port in &mut self.0.ports {
            port.stopped.drain(..).for_each(Borrowed::leave);
        }
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        for port in &self.0.ports {
            *port.handle.saved() = None;
        }
    }
}
