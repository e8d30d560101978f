//! Pre-copy: what of a session's state can be copied while it serves, so that less is left to copy
//! while it stands still.
//!
//! ```text
//!   source          to                    destination
//!   Precopy(0)      a file, while serving Prepare    makes the objects, writes the contents
//!   Precopy(1) ...  what is new since     Prepare
//!   Quiesce           another round, if much was made since
//!   SaveRest(2)     what is new since     Restore    the rest, and the objects' numbers
//! ```
//!
//! The serving thread only looks at its records; contents are copied by a thread of their own. What a
//! round has and a later one finds changed, or gone, the later one corrects. Rounds belong to who has
//! asked for them: what one has had, a save for another one is not to leave out.

use std::{fs::File, sync::Arc, thread};

use super::{
    backend::Backend,
    checkpoint::{Ordered, Tell},
    image::{Contents, Immovable, Writer},
    server::Session,
};
use crate::{
    link::{endpoint::Receiver, port_bell::Waker, window::Slice},
    wire::Blob,
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

/// Copies contents to a round's file: what takes long.
pub type Copying = Box<dyn FnOnce() -> Result<(), Immovable> + Send>;

/// What has been copied.
#[derive(Debug)]
pub(crate) struct Rounds<P> {
    asker: Asker,
    /// How many rounds there have been.
    count: u32,
    known: P,
}

impl<B: Backend> Session<B> {
    /// Begins a round, as the control thread has ordered.
    pub(crate) fn precopy(&mut self, file: File, asker: Asker, round: u32, done: &Tell) {
        let answer = done.clone();
        let tell = move |copied| Ordered::answer(&answer, said(copied));
        if let Err(why) = self.begin_round(asker, round, Writer::new(file), tell) {
            Ordered::answer(done, said(Err(why)));
        }
    }

    /// Begins a round. What has come of it is told by another thread.
    ///
    /// # Errors
    /// It has not begun, and nobody is told anything.
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
            // For one who has not waited for it.
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

    /// Whether nobody else has rounds whom this one is not to disturb: an application does not end its own
    /// move by the pool or the machine, which go before it.
    pub(super) fn may_have_rounds(&self, asker: Asker) -> Result<(), Immovable> {
        let by_another = self.precopied.as_ref().is_some_and(|of| of.asker != asker);
        match by_another && asker == Asker::Client {
            true => Err(by_somebody_else()),
            false => Ok(()),
        }
    }

    /// What has been copied by so many rounds for somebody: nothing by none.
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

    /// Saves what is new since so many rounds, of a session that is quiesced.
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

    /// How many bytes of memory objects were made since the last round began, or ever if there was none: all of them
    /// would be copied while the application stands still.
    pub(super) fn made_since_rounds(&self) -> u64 {
        let rounds = self.precopied.as_ref();
        B::made_since(self, rounds.map(|of| &of.known))
    }

    /// Gives up what is kept for a save.
    pub(crate) fn forget_rounds(&mut self, asker: Asker) {
        if self.precopied.as_ref().is_some_and(|of| of.asker == asker) {
            self.precopied = None;
        }
    }

    /// Makes what a round has brought, in a new session: [`restore`](Self::restore) makes the rest.
    /// `charged` as there.
    ///
    /// # Errors
    /// It is damaged, or the driver does not make something. The session is to end.
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

/// An outcome as who has ordered hears of it.
pub(crate) fn said(outcome: Result<(), Immovable>) -> Result<(), String> {
    outcome.map_err(|error| base::Chain(&error).to_string())
}
