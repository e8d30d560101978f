//! What objects were made in and from: devices, contexts, buffers and images.
//!
//! The numbers of these may be reused while objects made from them live. Whatever needs them to be
//! recreated therefore keeps their records, which do not change, and names them by number only in
//! the calls that made it. Two objects made from the same one share its record.
//!
//! A client may create parts of parts. What would be deeper than [`DEEPEST`] is recorded as lost,
//! because dropping a record recursively drops those that nobody else holds.

use std::sync::Arc;

use remoting_proto::apis::opencl::calls::{CreateContext, CreateSubDevices, DeviceId};

use super::{objects::MadeMem, touched::Touched, written::root};

/// Maximum depth of objects made from each other.
pub(crate) const DEEPEST: usize = 16;

/// How a device was made.
#[derive(Debug)]
pub enum DeviceRecord {
    /// The host offers it, and its number is fixed for as long as the worker lives.
    Offered(DeviceId),
    /// It is a part of another device.
    Part(Part),
}

/// How a sub-device was made.
#[derive(Debug)]
pub struct Part {
    /// Its parent device; `None` if that is lost.
    pub of: Option<Arc<DeviceRecord>>,
    /// The call, which may have made further parts.
    pub call: Arc<CreateSubDevices>,
    /// Its index among the parts that the call made, from 0.
    pub place: usize,
    depth: usize,
}

impl DeviceRecord {
    /// The record of the device at this index among those that a call made from another one.
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

/// How a context was made.
#[derive(Debug)]
pub struct ContextRecord {
    /// The call.
    pub call: CreateContext,
    /// Its devices, in the call's order.
    pub devices: Vec<Arc<DeviceRecord>>,
}

/// How a buffer or image was made.
#[derive(Debug)]
pub struct MemRecord {
    /// The call.
    pub call: MadeMem,
    /// Its context: that of its parent, if it has one.
    pub context: Arc<ContextRecord>,
    /// Its parent, of which it is a part or an image; `None` if that is lost, or there is none.
    pub of: Option<Arc<MemRecord>>,
    /// What may have been written. Not used if there is a parent: the parent's is used instead.
    pub touched: Touched,
    depth: usize,
}

impl MemRecord {
    /// The record of an object made in a context, with or without a parent.
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
#[path = "provenance_tests.rs"]
mod tests;
