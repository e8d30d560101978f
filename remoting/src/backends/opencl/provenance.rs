//! What objects were made in and of: devices, contexts, buffers and images.
//!
//! Their numbers may be given to others while what was made of them lives. So whatever needs them to
//! be made again keeps their records, which do not change, and names them by their numbers only in
//! the calls that made it. Two objects that were made of the same one have the same record of it.
//!
//! A client may have parts made of parts. What would be deeper than [`DEEPEST`] is recorded as
//! lost: a record's end frees those that nobody else keeps, one inside the other.

use std::sync::Arc;

use super::{objects::MadeMem, touched::Touched, written::root};
use crate::apis::opencl::calls::{CreateContext, CreateSubDevices, DeviceId};

/// How many may have been made one of the other.
pub(crate) const DEEPEST: usize = 16;

/// How a device came to be.
#[derive(Debug)]
pub enum DeviceRecord {
    /// The host has it, and its number is its own for as long as the worker lives.
    Offered(DeviceId),
    /// It is a part of another one.
    Part(Part),
}

/// How a sub-device was made.
#[derive(Debug)]
pub struct Part {
    /// Of which device; none if that is lost.
    pub of: Option<Arc<DeviceRecord>>,
    /// The call, which has made others, too.
    pub call: Arc<CreateSubDevices>,
    /// Which of those that the call has made it is, from 0.
    pub place: usize,
    depth: usize,
}

impl DeviceRecord {
    /// Of the device that is at this place among those that a call has made of another one.
    pub fn part(of: &Arc<Self>, call: &Arc<CreateSubDevices>, place: usize) -> Self {
        let depth = of.depth();
        let is_lost = depth >= DEEPEST;
        Self::Part(Part {
            of: (!is_lost).then(|| Arc::clone(of)),
            call: Arc::clone(call),
            place,
            depth: if is_lost { 1 } else { depth + 1 },
        })
    }

    fn depth(&self) -> usize {
        match self {
            Self::Offered(_) => 0,
            Self::Part(part) => part.depth,
        }
    }
}

/// How a context came to be.
#[derive(Debug)]
pub struct ContextRecord {
    /// The call.
    pub call: CreateContext,
    /// Its devices, in the call's order.
    pub devices: Vec<Arc<DeviceRecord>>,
}

/// How a buffer or image came to be.
#[derive(Debug)]
pub struct MemRecord {
    /// The call.
    pub call: MadeMem,
    /// In which context: that of what it was made of, if it was.
    pub context: Arc<ContextRecord>,
    /// What it is a part or an image of; none if that is lost, or nothing.
    pub of: Option<Arc<MemRecord>>,
    /// What anything may have written; of what is a part or an image of another one, that one has it.
    pub touched: Touched,
    depth: usize,
}

impl MemRecord {
    /// Of what was made in a context, of something or not.
    pub fn new(call: MadeMem, context: Arc<ContextRecord>, of: Option<Arc<Self>>) -> Arc<Self> {
        if let Some(of) = &of {
            root(of).touched.all();
        }
        let of = of.filter(|of| of.depth < DEEPEST);
        Arc::new(Self {
            touched: Touched::of(&call),
            call,
            context,
            depth: of.as_ref().map_or(0, |of| of.depth + 1),
            of,
        })
    }
}

#[cfg(test)]
#[cfg(not(loom))]
#[path = "provenance_tests.rs"]
mod tests;
