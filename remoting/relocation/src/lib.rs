//! How an application moves from the worker that serves it to another one.
//!
//! ```text
//!   source        Serving ── precopy ──> Serving ── quiesce ──> Quiesced ── save ──> Saved ── restore ──> Copied ── leave ──> Arrival
//!   destination         ── open ──> Prepared ── prepare (each round) ──> Prepared ───────────── restore ───────────────────────── go ──> serves
//! ```
//!
//! Each state is a value that the next step consumes, so that no step can be left out or come too early. [`transfer`]
//! alone names their order. How a worker is reached is not known here: a [`SourcePort`] and a [`DestinationPort`] are
//! implemented where their transport is.
//!
//! | guarantee | held by |
//! |---|---|
//! | an application is never served twice | only [`Copied::leave`] makes an [`Arrival`], and nothing else lets its destination serve |
//! | if a step fails before, the source continues to serve | the source's states resume it when they are dropped |
//! | the source is not left before the destination has everything | only [`Saved::restore`] makes a [`Copied`] |
//! | an application that lacks contents of its memory does not serve | [`Copied::leave`] knows whether the source kept some |
//! | rounds end, whatever the workers say | [`rounds`] |
//!
//! This holds for moves between the workers of a pool, and for those that a VMM makes between pools. A guest's driver that
//! moves its own application, the migration of a VM and its snapshots take the same steps in an order of their own, and
//! share the rounds or the [`archive`] alone.
//!
//! [`SourcePort`]: source::SourcePort
//! [`DestinationPort`]: destination::DestinationPort
//! [`Arrival`]: destination::Arrival
//! [`Copied`]: source::Copied
//! [`Copied::leave`]: source::Copied::leave
//! [`Saved::restore`]: source::Saved::restore

pub mod archive;
pub mod blocks;
mod departed;
pub mod destination;
pub mod failure;
mod plan;
pub mod rounds;
pub mod source;
pub mod transfer;

#[cfg(test)]
mod tests;
