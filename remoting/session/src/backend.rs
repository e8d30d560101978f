//! The interface between a session and an accelerator API's backend.
//!
//! A backend owns the shadow objects of one application and calls the host's driver. Its methods take the
//! [session](Session) that it belongs to, through which it answers, releases stages, waits for fences and charges
//! quotas. The session knows nothing else of the API. Dispatch is static, so that a request costs no virtual call.

use std::{fmt::Debug, hash::Hash, sync::Arc, time::Duration};

use remoting_proto::wire::{Api, Header, messages::EventId};

use super::{
    checkpoint::Busy,
    image::{Contents, Immovable, Writer},
    postcopy::Remaining,
    precopy::Copying,
    server::{Error, Session},
};

/// Progress of the work behind a fence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// The device has not begun the work.
    Waiting,
    /// The device is executing it.
    Running,
    /// It has completed.
    Complete,
    /// It has failed, or its state is unknown.
    Failed,
}

impl Progress {
    /// Whether this is a final state.
    pub fn is_over(self) -> bool {
        matches!(self, Self::Complete | Self::Failed)
    }
}

/// The part of a driver that reports completion. Threads other than the serving one use it too.
pub trait Fences: Debug + Send + Sync + 'static {
    /// Identifies submitted work: an event, or a number on a timeline. [`retain`](Self::retain) and
    /// [`release`](Self::release) count the references to it.
    type Fence: Copy + Debug + Eq + Hash + Send + 'static;

    /// The progress of the work. Does not block.
    fn poll(&self, fence: Self::Fence) -> Progress;

    /// Adds a reference.
    fn retain(&self, fence: Self::Fence);

    /// Drops a reference.
    fn release(&self, fence: Self::Fence);

    /// From now on, fences can be asked for the time between two of them, if the driver can tell.
    fn time(&self) {}

    /// The time between the ends of the work before two fences, which is over, by the device's clock; `None` if it is not
    /// known.
    fn span(&self, from: Self::Fence, to: Self::Fence) -> Option<Duration> {
        let _ = (from, to);
        None
    }
}

/// A queue as the driver identifies it. Commands of an in-order queue run one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QueueKey {
    /// The driver's handle.
    pub raw: usize,
    /// Whether it is in order.
    pub in_order: bool,
}

/// Executes an API's requests.
pub trait Backend: Debug + Sized {
    /// The API.
    type Api: Api;
    /// The driver that is asked about fences.
    type Driver: Fences;
    /// What has been copied of the state while the session serves.
    type Precopied: Debug + Send;
    /// What the driver's threads and the backend's own threads tell the serving thread.
    type Notice: Debug + Send + 'static;

    /// The API's error code for a wait in which a fence has failed.
    const FENCE_FAILED: i32;
    /// The API's error code for an answer that is too long to be sent.
    const ANSWER_TOO_LONG: i32;

    /// Hash of the encoding of what [`checkpoint`](Self::checkpoint) returns.
    const STATE_SHAPE: u64 = 0;

    /// The driver.
    fn driver(&self) -> &Arc<Self::Driver>;

    /// Executes a request: answers it, or arranges for a later answer.
    ///
    /// # Errors
    /// The session ends. An error of the request alone is in its answer.
    fn execute(
        session: &mut Session<Self>,
        header: Header,
        request: <Self::Api as Api>::Request,
    ) -> Result<(), Error>;

    /// Handles a notice, in the serving thread.
    ///
    /// # Errors
    /// The session ends.
    fn notice(session: &mut Session<Self>, notice: Self::Notice) -> Result<(), Error>;

    /// Executes deferred work, if that is possible by now. Returns whether there was any.
    ///
    /// # Errors
    /// The session ends.
    fn resume(session: &mut Session<Self>) -> Result<bool, Error> {
        let _ = session;
        Ok(false)
    }

    /// Whether everything that a request needs has arrived: contents of memory may still be in transit from where the
    /// application was. If not, the session keeps the request, and those that follow it, until they have.
    ///
    /// # Errors
    /// The session ends: the contents will not arrive any more.
    fn has_come(
        session: &mut Session<Self>,
        opcode: u16,
        request: &<Self::Api as Api>::Request,
    ) -> Result<bool, Error> {
        let _ = (session, opcode, request);
        Ok(true)
    }

    /// Whether the backend is still at work in a way that allows no further request for now.
    fn is_busy(&self) -> bool;

    /// Whether the client has an event with this number.
    fn has_event(&self, id: EventId) -> bool;

    /// Flushes the client's queue with this number to the driver, if there is one.
    fn flush(&self, queue: u32);

    /// Flushes all queues.
    fn flush_all(&self);

    /// Releases driver objects that the client has freed and that no work uses any more. Returns whether there were
    /// any.
    fn sweep(&mut self) -> bool;

    /// Tells the backend that fences the client waited for are final, although the driver was not asked to wait for
    /// them: it may have something left to do.
    fn waited(&mut self, fences: &[<Self::Driver as Fences>::Fence]) {
        let _ = fences;
    }

    /// Takes part of the kernels' printed output that has not been sent to the client.
    fn printed(&mut self) -> Option<Vec<u8>> {
        None
    }

    /// Adds the fences after which [`sweep`](Self::sweep) may find something, each only once.
    fn sweep_after(&mut self, fences: &mut Vec<<Self::Driver as Fences>::Fence>);

    /// The driver has called the client's callback with this number. Returns whether it still was expected to.
    fn called(&mut self, number: u64) -> bool {
        let _ = number;
        true
    }

    /// What the driver or the backend is still working on, if anything; a checkpoint waits for it. Meanwhile no call
    /// arrives and no command is submitted.
    fn busy(session: &mut Session<Self>) -> Option<Busy> {
        let _ = session;
        Some(Busy::Never(Immovable::Api(Self::Api::ID.name())))
    }

    /// Whether everything that the client has created can be restored, regardless of outstanding work.
    ///
    /// # Errors
    /// Names what cannot be restored.
    fn check_movable(session: &Session<Self>) -> Result<(), Immovable> {
        let _ = session;
        Err(Immovable::Api(Self::Api::ID.name()))
    }

    /// Whether the client decides the fence and has not done so yet.
    fn is_undecided(&self, fence: <Self::Driver as Fences>::Fence) -> bool {
        let _ = fence;
        false
    }

    /// The number of the client's event with this fence, if there is one.
    fn event_of(&self, fence: <Self::Driver as Fences>::Fence) -> Option<EventId> {
        let _ = fence;
        None
    }

    /// The fence of the client's event with this number.
    fn fence_of(&self, id: EventId) -> Option<<Self::Driver as Fences>::Fence> {
        let _ = id;
        None
    }

    /// Writes the changes since `known` to the image, or everything if that is none. The session serves meanwhile; long
    /// work is returned as [`Copying`].
    ///
    /// # Errors
    /// Names what cannot be restored.
    fn precopy(
        session: &mut Session<Self>,
        known: Option<Self::Precopied>,
        image: Writer,
    ) -> Result<(Self::Precopied, Copying), Immovable> {
        let _ = (session, known, image);
        Err(Immovable::Api(Self::Api::ID.name()))
    }

    /// Bytes of memory objects, outside the window, that were created since the last pre-copy round began, or in total
    /// if there was none.
    fn made_since(session: &Session<Self>, known: Option<&Self::Precopied>) -> u64 {
        let _ = (session, known);
        0
    }

    /// Restores what [`precopy`](Self::precopy) has written, in a new session. Neither the state nor the contents are
    /// trusted.
    ///
    /// # Errors
    /// The session must end.
    fn prepare(
        session: &mut Session<Self>,
        state: &[u8],
        contents: &Contents,
    ) -> Result<(), Immovable> {
        let _ = (session, state, contents);
        Err(Immovable::Api(Self::Api::ID.name()))
    }

    /// Returns the state of a session without outstanding work, except what was copied before. Contents of memory go to
    /// the image. With `postcopy`, contents of large objects stay here, to be saved later if the session does not
    /// resume. The session can resume afterwards.
    ///
    /// # Errors
    /// Names what cannot be restored.
    fn checkpoint(
        session: &mut Session<Self>,
        known: Option<Self::Precopied>,
        image: &mut Writer,
        postcopy: bool,
    ) -> Result<(Vec<u8>, Option<Remaining>), Immovable> {
        let _ = (session, known, image, postcopy);
        Err(Immovable::Api(Self::Api::ID.name()))
    }

    /// Restores a state in a new session. Neither the state nor the contents are trusted.
    ///
    /// # Errors
    /// The session must end.
    fn restore(
        session: &mut Session<Self>,
        state: &[u8],
        contents: &Contents,
    ) -> Result<(), Immovable> {
        let _ = (session, state, contents);
        Err(Immovable::Api(Self::Api::ID.name()))
    }
}

/// The fence type of a backend.
pub type FenceOf<B> = <<B as Backend>::Driver as Fences>::Fence;
/// The request type of a backend.
pub type RequestOf<B> = <<B as Backend>::Api as Api>::Request;
