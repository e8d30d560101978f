//! The end of a worker's service.

/// Proof that a worker serves its application no more: it has confirmed that, or has ended.
#[derive(Debug)]
#[must_use = "nobody serves the application"]
pub struct Departed(());

impl Departed {
    /// For [`Copied::leave`](super::source::Copied::leave), and nobody else.
    pub(crate) fn proven() -> Self {
        Self(())
    }
}
