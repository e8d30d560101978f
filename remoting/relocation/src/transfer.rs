//! The order of the steps.

use base::Patience;

use super::{
    destination::{Arrival, DestinationPort, Prepared},
    failure::{Failure, NotMoved},
    source::{Serving, SourcePort, Stopped},
};

pub use super::plan::Plan;

/// Moves an application to where nothing is left to do but to let the destination serve it, which is certain to come:
/// the source has left. Cancelling makes the application stay, as long as the source has not been told to leave.
///
/// # Errors
/// The application stays: its worker resumes, if it lives. Or it is lost. The destination is dropped.
pub fn relocate<S: SourcePort, D: DestinationPort<State = S::State>>(
    source: &mut S,
    destination: D,
    plan: &Plan,
    patience: &Patience,
) -> Result<Arrival<D>, NotMoved> {
    let mut destination = Prepared::open(destination, patience)?;
    let mut serving = Serving::new(source, plan);
    let quiesced = loop {
        serving = match (serving.precopy(&mut destination, patience)?).quiesce(patience)? {
            Stopped::Quiesced(quiesced) => break quiesced,
            Stopped::Grew(serving) => serving,
        };
    };
    let saved = quiesced.save(patience)?;
    let copied = saved.restore(destination, patience)?;
    if patience.is_cancelled() {
        return Err(Failure::Cancelled.into());
    }
    // From here on the move is completed, whoever vanishes.
    copied.leave()
}
