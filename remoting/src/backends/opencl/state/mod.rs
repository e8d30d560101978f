//! An application's OpenCL objects, saved and made again.
//!
//! The state is a log of calls, those by which the objects were made, in an order in which they can
//! be made again: what an object needs stands before it. Objects that the application has released
//! but others are made of are among them; so that no two have the same number, all are numbered anew
//! in the log, each kind from 0, and get the application's numbers when all are made.
//!
//! - `save`: from the records of the objects to the log; `contents`: bytes of buffers and images;
//!   `copies`: those of them that have changed.
//! - `precopy`: a part of the log and of the contents, while the application goes on; `postcopy`: contents that
//!   follow once it goes on elsewhere.
//! - `restore`: carries the log out, by the same methods as an application's calls: it is trusted no
//!   more than these, and charged to the same quota.

mod contents;
mod copies;
mod postcopy;
mod precopy;
mod restore;
mod save;

pub use precopy::{Kept, Precopied};

use super::{Server, missing::Missing};
use crate::{
    apis::opencl::calls::{Answered, EventId, KernelId, MemId, QueueId, SetArgument},
    session::checkpoint::Busy,
    wire::{
        Blob, Wire,
        codec::{named, wire, with},
    },
};

wire! {
    /// A call.
    struct Entry {
        /// Its number.
        opcode: u16,
        /// Its bytes.
        call: Blob,
    }

    /// The objects of a kind that the application has numbers for.
    struct Names {
        /// Numbers in the log, and the application's.
        made: Vec<(u32, u32)>,
        /// The application's numbers of those that could not be made, and why.
        failed: Vec<(u32, i32)>,
    }

    /// A mapping of a buffer that lives in the window.
    struct Mapping {
        /// Which, as the application names it.
        mem: MemId,
        /// First byte.
        offset: u64,
        /// Bytes.
        size: u64,
    }

    /// An argument whose value the driver has refused, when nobody waited for that.
    struct Refused {
        /// Of which kernel.
        kernel: KernelId,
        /// Which.
        index: u32,
        /// The code.
        code: i32,
    }

    /// An event.
    struct SavedEvent {
        /// Its number.
        id: EventId,
        /// Its command's queue.
        queue: Option<QueueId>,
        /// Its context's number in the log.
        context: u32,
        /// How far it is.
        status: Status,
    }

    /// Bytes of a buffer or an image.
    struct Bytes {
        /// Its number in the log.
        mem: u32,
        /// The first of them there.
        from: u64,
        /// Where they are in the image.
        at: u64,
        /// How many.
        length: u64,
    }
}

wire! { enum
    /// How far an event is.
    Status {
        /// Complete, or failed; with the times that the driver has measured.
        1 Over(status: i32, times: Vec<(u32, u64)>),
        /// A user event without a status; with the callbacks at which status.
        2 Undecided(callbacks: Vec<(i32, u64)>),
    }
}

wire! {
    /// All objects of an application.
    struct Objects {
        /// The kinds of the devices that it was offered, by platform: it goes on with those that
        /// have the same numbers.
        offered: Vec<Vec<u64>>,
        /// What it was told of them: it goes on with those that lack nothing of it.
        told: Vec<Answered>,
        /// The calls.
        log: Vec<Entry>,
        /// Devices.
        devices: Names,
        /// Contexts.
        contexts: Names,
        /// Queues.
        queues: Names,
        /// Buffers and images.
        mems: Names,
        /// Samplers.
        samplers: Names,
        /// Programs.
        programs: Names,
        /// Kernels.
        kernels: Names,
        /// Numbers of events whose commands never reached the driver, and why.
        failed_events: Vec<(u32, i32)>,
        /// Errors of commands that nobody has waited for.
        deferred: Vec<(QueueId, i32)>,
        /// Arguments of kernels, as the application names all.
        arguments: Vec<SetArgument>,
        /// Arguments that were refused.
        refused: Vec<Refused>,
        /// Mappings.
        maps: Vec<Mapping>,
        /// Events.
        events: Vec<SavedEvent>,
        /// Buffers and images, by their number in the log, whose end is to be told by the callback of
        /// this number.
        destructors: Vec<(u32, u64)>,
        /// Contents.
        contents: Vec<Bytes>,
        /// Numbers in the log of those whose contents follow by postcopy.
        missing: Vec<u32>,
    }
}

wire! {
    /// What is made before the application comes.
    struct Early {
        /// As in [`Objects`].
        offered: Vec<Vec<u64>>,
        /// As in [`Objects`].
        told: Vec<Answered>,
        /// Calls that were in no round.
        log: Vec<Entry>,
        /// Contexts' numbers in the log, and the application's.
        contexts: Vec<(u32, u32)>,
        /// Contents that have changed since the last round.
        contents: Vec<Bytes>,
    }
}

/// Hash of the form of the state.
pub(super) const SHAPE: u64 = with(with(named("OpenCL objects"), Objects::SHAPE), Early::SHAPE);

impl Server {
    /// What the driver is still at: commands, builds, callbacks.
    pub(super) fn driver_busy(&mut self) -> Option<Busy> {
        if self.backend.building > 0 {
            return Some(Busy::Still("programs are being built"));
        }
        if let Err(why) = self.backend.svm.freed.all_marked() {
            return Some(Busy::Never(why));
        }
        if let Some(busy) = self.backend.missing.as_ref().and_then(Missing::busy) {
            return Some(busy);
        }
        if !self.backend.ended() {
            return Some(Busy::Still(if self.undecided > 0 {
                "commands have not ended; some may wait for user events that are not decided"
            } else {
                "commands have not ended"
            }));
        }
        let pending = self.backend.pending_callbacks();
        (self.expected > pending).then_some(Busy::Still("callbacks are due"))
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod postcopy_tests;
#[cfg(test)]
#[cfg(not(loom))]
mod tests;
#[cfg(test)]
#[cfg(not(loom))]
mod window_tests;
