//! What a session needs of an accelerator API's backend, and what a backend gets of a session.
//!
//! A backend owns the shadow objects of one application and calls the host's driver. Its methods
//! take the [session](Session) that it belongs to, by which it answers, releases stages, waits for
//! fences and charges quotas. The session itself knows nothing of the API but this: all is static,
//! so that a request costs no call through a table.

use std::{fmt::Debug, hash::Hash, sync::Arc};

use super::{
    checkpoint::Busy,
    image::{Contents, Immovable, Writer},
    postcopy::Remaining,
    precopy::Copying,
    server::{Error, Session},
};
use crate::wire::{Api, Header, messages::EventId};

/// How far the work is that a fence stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// The device has not begun it.
    Waiting,
    /// The device is at it.
    Running,
    /// It is done.
    Complete,
    /// It has failed, or nobody knows of it.
    Failed,
}

impl Progress {
    /// Whether the fence will not change any more.
    pub fn is_over(self) -> bool {
        matches!(self, Self::Complete | Self::Failed)
    }
}

/// The part of a driver that says when work has completed. Threads beside the serving one ask, too.
pub trait Fences: Debug + Send + Sync + 'static {
    /// Stands for work that was submitted: an event, a number on a timeline. References to it are
    /// counted by [`retain`](Self::retain) and [`release`](Self::release).
    type Fence: Copy + Debug + Eq + Hash + Send + 'static;

    /// How far the work is. Waits for nothing.
    fn poll(&self, fence: Self::Fence) -> Progress;

    /// Takes a reference more.
    fn retain(&self, fence: Self::Fence);

    /// Gives up a reference.
    fn release(&self, fence: Self::Fence);
}

/// A queue, as the driver tells it from others: commands of one that is in order run one after the
/// other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QueueKey {
    /// The driver's handle.
    pub raw: usize,
    /// Whether it is in order.
    pub in_order: bool,
}

/// What carries an API's requests out.
pub trait Backend: Debug + Sized {
    /// The API.
    type Api: Api;
    /// The driver, as its fences are asked about.
    type Driver: Fences;
    /// What has been copied of the state while the session serves.
    type Precopied: Debug + Send;
    /// What the driver's threads and the backend's own tell the serving thread.
    type Notice: Debug + Send + 'static;

    /// The API's code for a wait of whose fences one has failed.
    const FENCE_FAILED: i32;
    /// The API's code for an answer that is too long to be sent.
    const ANSWER_TOO_LONG: i32;

    /// Hash of the form of what [`checkpoint`](Self::checkpoint) returns.
    const STATE_SHAPE: u64 = 0;

    /// The driver.
    fn driver(&self) -> &Arc<Self::Driver>;

    /// Carries out a request: answers it, or sees to it that it is answered later.
    ///
    /// # Errors
    /// The session ends. What is wrong with the request alone is in its answer.
    fn execute(
        session: &mut Session<Self>,
        header: Header,
        request: <Self::Api as Api>::Request,
    ) -> Result<(), Error>;

    /// Does what a notice tells of, in the serving thread.
    ///
    /// # Errors
    /// The session ends.
    fn notice(session: &mut Session<Self>, notice: Self::Notice) -> Result<(), Error>;

    /// Carries out what was put off, if it can be by now. Whether there was something.
    ///
    /// # Errors
    /// The session ends.
    fn resume(session: &mut Session<Self>) -> Result<bool, Error> {
        let _ = session;
        Ok(false)
    }

    /// Whether all is here that a request needs: contents of memory may still be on their way from where the
    /// application was. The session keeps it until they have come, and those that follow it.
    ///
    /// # Errors
    /// The session ends: they do not come any more.
    fn has_come(
        session: &mut Session<Self>,
        opcode: u16,
        request: &<Self::Api as Api>::Request,
    ) -> Result<bool, Error> {
        let _ = (session, opcode, request);
        Ok(true)
    }

    /// Whether no request is to be taken for now, because of what the backend is still at.
    fn is_busy(&self) -> bool;

    /// Whether the client has an event of this number.
    fn has_event(&self, id: EventId) -> bool;

    /// Has the driver begin what it has of a queue of the client, if there is one of this number.
    fn flush(&self, queue: u32);

    /// The same of all queues.
    fn flush_all(&self);

    /// Gives back to the driver what the client has freed and no work uses any more. Whether there
    /// was something.
    fn sweep(&mut self) -> bool;

    /// Fences that the client waited for are over, which the driver has not been asked to wait for: it
    /// may have something left to do.
    fn waited(&mut self, fences: &[<Self::Driver as Fences>::Fence]) {
        let _ = fences;
    }

    /// What kernels have printed and the client has not been told, a part of it.
    fn printed(&mut self) -> Option<Vec<u8>> {
        None
    }

    /// Adds the fences after which [`sweep`](Self::sweep) may find something, each of them once.
    fn sweep_after(&mut self, fences: &mut Vec<<Self::Driver as Fences>::Fence>);

    /// The client is told that its callback of this number is due.
    fn called(&mut self, number: u64) {
        let _ = number;
    }

    /// What the driver or the backend is still at, if anything: a checkpoint waits for it. No call
    /// comes meanwhile, and no command is submitted.
    fn busy(session: &mut Session<Self>) -> Option<Busy> {
        let _ = session;
        Some(Busy::Never(Immovable::Api(Self::Api::ID.name())))
    }

    /// Whether all that the client has made can be made again, whatever is under way.
    ///
    /// # Errors
    /// What cannot is named.
    fn check_movable(session: &Session<Self>) -> Result<(), Immovable> {
        let _ = session;
        Err(Immovable::Api(Self::Api::ID.name()))
    }

    /// Whether a fence is one that the client decides, and has not yet.
    fn is_undecided(&self, fence: <Self::Driver as Fences>::Fence) -> bool {
        let _ = fence;
        false
    }

    /// The number of the event that is this fence, if the client has one.
    fn event_of(&self, fence: <Self::Driver as Fences>::Fence) -> Option<EventId> {
        let _ = fence;
        None
    }

    /// The fence of the client's event of this number.
    fn fence_of(&self, id: EventId) -> Option<<Self::Driver as Fences>::Fence> {
        let _ = id;
        None
    }

    /// Writes to the image what is not in what has been copied before, if anything has. The session
    /// serves meanwhile; what takes long is returned.
    ///
    /// # Errors
    /// What cannot be made again is named.
    fn precopy(
        session: &mut Session<Self>,
        known: Option<Self::Precopied>,
        image: Writer,
    ) -> Result<(Self::Precopied, Copying), Immovable> {
        let _ = (session, known, image);
        Err(Immovable::Api(Self::Api::ID.name()))
    }

    /// How many bytes of memory objects were made since the last round of pre-copy began, or ever without one,
    /// outside of the window.
    fn made_since(session: &Session<Self>, known: Option<&Self::Precopied>) -> u64 {
        let _ = (session, known);
        0
    }

    /// Makes what [`precopy`](Self::precopy) has written, in a new session. Neither it nor the contents
    /// are trusted.
    ///
    /// # Errors
    /// The session is to end.
    fn prepare(
        session: &mut Session<Self>,
        state: &[u8],
        contents: &Contents,
    ) -> Result<(), Immovable> {
        let _ = (session, state, contents);
        Err(Immovable::Api(Self::Api::ID.name()))
    }

    /// The state of a session that nothing is under way of, without what has been copied before.
    /// Contents of memory go to the image; with `postcopy` those of large objects remain here, to be
    /// saved later if the session does not go on. It can go on afterwards.
    ///
    /// # Errors
    /// What cannot be made again is named.
    fn checkpoint(
        session: &mut Session<Self>,
        known: Option<Self::Precopied>,
        image: &mut Writer,
        postcopy: bool,
    ) -> Result<(Vec<u8>, Option<Remaining>), Immovable> {
        let _ = (session, known, image, postcopy);
        Err(Immovable::Api(Self::Api::ID.name()))
    }

    /// Makes a state again, in a new session. Neither it nor the contents are trusted.
    ///
    /// # Errors
    /// The session is to end.
    fn restore(
        session: &mut Session<Self>,
        state: &[u8],
        contents: &Contents,
    ) -> Result<(), Immovable> {
        let _ = (session, state, contents);
        Err(Immovable::Api(Self::Api::ID.name()))
    }
}

/// The fences of a backend.
pub type FenceOf<B> = <<B as Backend>::Driver as Fences>::Fence;
/// The requests of a backend.
pub type RequestOf<B> = <<B as Backend>::Api as Api>::Request;
