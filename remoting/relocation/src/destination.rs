//! The worker that an application moves to.

use base::Patience;

use super::{departed::Departed, failure::Failure};

/// How the worker that is to serve an application is reached. It ends when the port is dropped before [`go`](Self::go),
/// or whoever has the port ends it.
pub trait DestinationPort {
    /// What holds a part of the application's state, as the source's port gives it.
    type State;

    /// Waits until the worker is ready for a state.
    ///
    /// # Errors
    /// It refuses: its device lacks something that the application was told of, say. Or it is gone, or the patience is
    /// over.
    fn open(&mut self, patience: &Patience) -> Result<(), Failure>;

    /// Creates there what a round has brought.
    ///
    /// # Errors
    /// The worker refuses, is gone or hangs, or the patience is over.
    fn prepare(&mut self, state: Self::State, patience: &Patience) -> Result<(), Failure>;

    /// Creates the rest there.
    ///
    /// # Errors
    /// As for [`prepare`](Self::prepare).
    fn restore(&mut self, state: Self::State, patience: &Patience) -> Result<(), Failure>;

    /// Has the worker serve the application, which the source has left for good.
    ///
    /// # Errors
    /// The worker is gone, and the application with it.
    fn go(&mut self, proof: Departed) -> Result<(), Failure>;
}

/// A worker that has what the rounds so far have brought.
#[derive(Debug)]
pub struct Prepared<D>(pub(crate) D);

/// An application that has departed, and the worker that has everything of it and does not serve yet.
#[derive(Debug)]
pub struct Arrival<D> {
    worker: D,
    proof: Departed,
}

impl<D: DestinationPort> Prepared<D> {
    /// Waits until a worker that has nothing of the application is ready.
    ///
    /// # Errors
    /// As for [`DestinationPort::open`].
    pub fn open(mut port: D, patience: &Patience) -> Result<Self, Failure> {
        port.open(patience)?;
        Ok(Self(port))
    }
}

impl<D: DestinationPort> Arrival<D> {
    pub(crate) fn new(worker: D, proof: Departed) -> Self {
        Self { worker, proof }
    }

    /// Has the worker serve. Returns the way to it.
    ///
    /// # Errors
    /// As for [`DestinationPort::go`].
    pub fn go(self) -> Result<D, Failure> {
        let Self { mut worker, proof } = self;
        worker.go(proof)?;
        Ok(worker)
    }
}
