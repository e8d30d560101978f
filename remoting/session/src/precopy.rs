//! Pre-copy: copies parts of a session's state while it serves, so that less is left to copy while it is stopped.
//!
//! ```text
//!   source          to                    destination
//!   Precopy(0)      a file, while serving Prepare    makes the objects, writes the contents
//!   Precopy(1) ...  what is new since     Prepare
//!   Quiesce           another round, if much was made since
//!   SaveRest(2)     what is new since     Restore    the rest, and the objects' numbers
//! ```
//!
//! The serving thread only looks at its records; a separate thread copies the contents. A later round corrects what it
//! finds changed or gone since an earlier one. Rounds belong to whoever asked for them: a save for another one must not
//! leave out what they have copied.

use std::{fs::File, sync::Arc, thread};

use remoting_proto::wire::Blob;
use remoting_transport::{endpoint::Receiver, port_bell::Waker, window::Slice};

use super::{
    backend::Backend,
    checkpoint::{Ordered, Tell},
    image::{Contents, Immovable, Writer},
    server::Session,
};

/// Who moves an application.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asker {
    /// The worker's pool.
    Pool,
    /// The machine whose slice the worker serves.
    Machine,
    /// The application's own driver, by [calls](super::carry).
    Client,
}

/// Copies contents to a round's file: the long part of a round.
pub type Copying = Box<dyn FnOnce() -> Result<(), Immovable> + Send>;

/// What has been copied so far.
#[derive(Debug)]
pub(crate) struct Rounds<P> {
    asker: Asker,
    /// The number of rounds so far.
    count: u32,
    known: P,
}

impl<B: Backend> Session<B> {
    /// Begins a round that the control thread has ordered.
    pub fn precopy(&mut self, file: File, asker: Asker, round: u32, done: &Tell) {
        let answer = done.clone();
        let tell = move |copied| Ordered::answer(&answer, said(copied));
        if let Err(why) = self.begin_round(asker, round, Writer::new(file), tell) {
            Ordered::answer(done, said(Err(why)));
        }
    }

    /// Begins a round. Another thread reports its outcome by `tell`.
    ///
    /// # Errors
    /// The round has not begun, and `tell` is not called.
    pub(super) fn begin_round(
        &mut self,
        asker: Asker,
        round: u32,
        image: Writer,
        tell: impl FnOnce(Result<(), Immovable>) + Send + 'static,
    ) -> Result<(), Immovable> {
        let count = round.checked_add(1);
        let count = count.ok_or(Immovable::Wrong("a round's number"))?;
        if self.copying.strong_count() > 0 {
            // For an asker that has not waited for the previous round.
            return Err(Immovable::Has("its state is being copied".to_owned()));
        }
        let known = self.rounds_of(asker, round)?;
        let (known, copying) = B::precopy(self, known, image)?;
        let builder = thread::Builder::new().name("precopy".to_owned());
        let goes_on = Arc::new(());
        self.copying = Arc::downgrade(&goes_on);
        builder.spawn(move || {
            let copied = copying();
            drop(goes_on);
            tell(copied);
        })?;
        self.precopied = Some(Rounds {
            asker,
            count,
            known,
        });
        Ok(())
    }

    /// Refuses if rounds belong to another asker that this one must not disturb: an application must not end its own
    /// move by the pool or the machine, which have priority.
    pub(super) fn may_have_rounds(&self, asker: Asker) -> Result<(), Immovable> {
        let by_another = self.precopied.as_ref().is_some_and(|of| of.asker != asker);
        match by_another && asker == Asker::Client {
            true => Err(by_somebody_else()),
            false => Ok(()),
        }
    }

    /// What this many rounds have copied for an asker; nothing for zero rounds.
    pub(super) fn rounds_of(
        &mut self,
        asker: Asker,
        count: u32,
    ) -> Result<Option<B::Precopied>, Immovable> {
        self.may_have_rounds(asker)?;
        if count == 0 {
            self.precopied = None;
            return Ok(None);
        }
        let same = |one: &mut Rounds<_>| one.asker == asker && one.count == count;
        let same = self.precopied.take_if(same).ok_or_else(by_somebody_else)?;
        Ok(Some(same.known))
    }

    /// Saves the changes since this many rounds, for a quiesced session.
    pub(crate) fn save_rest(
        &mut self,
        calls: &Receiver<Slice, Waker>,
        file: File,
        (asker, rounds): (Asker, u32),
        postcopy: bool,
    ) -> Result<(), Immovable> {
        let known = self.rounds_of(asker, rounds)?;
        self.save(calls, known, Writer::new(file), postcopy)
    }

    /// Bytes of memory objects created since the last round began, or in total if there was none: all of them would be
    /// copied while the application is stopped.
    pub(super) fn made_since_rounds(&self) -> u64 {
        let rounds = self.precopied.as_ref();
        B::made_since(self, rounds.map(|of| &of.known))
    }

    /// Discards what is kept for a save.
    pub fn forget_rounds(&mut self, asker: Asker) {
        if self.precopied.as_ref().is_some_and(|of| of.asker == asker) {
            self.precopied = None;
        }
    }

    /// Restores a round in a new session; [`restore`](Self::restore) restores the rest. `charged` as there.
    ///
    /// # Errors
    /// The round is damaged, or the driver refuses to create something. The session must end.
    pub fn prepare(&mut self, file: File, charged: bool) -> Result<(), Immovable> {
        let (state, contents) = Contents::open::<B::Api, Blob>(file, B::STATE_SHAPE)?;
        self.quota.inherit(charged);
        let prepared = B::prepare(self, &state.0, &contents);
        self.quota.inherit(false);
        self.is_prepared = true;
        prepared
    }
}

fn by_somebody_else() -> Immovable {
    Immovable::Has("it is moved by somebody else".to_owned())
}

/// The outcome in the form that is reported to the control thread.
pub(crate) fn said(outcome: Result<(), Immovable>) -> Result<(), String> {
    outcome.map_err(|error| base::Chain(&error).to_string())
}
