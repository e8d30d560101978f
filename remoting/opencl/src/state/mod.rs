//! Saves an application's OpenCL objects and recreates them.
//!
//! The state is a log of the calls that made the objects, in an order in which they can be recreated: whatever an
//! object needs precedes it. The log includes released objects that others were made from. To keep numbers unique, all
//! objects are renumbered in the log, each kind from 0, and get the application's numbers once all are made.
//!
//! - `save`: from the records of the objects to the log; `contents`: bytes of buffers and images; `copies`: the changed
//!   ones among them.
//! - `precopy`: a part of the log and of the contents, while the application runs; `postcopy`: contents that follow
//!   after it has resumed elsewhere.
//! - `restore`: executes the log by the same methods as an application's calls. The log is trusted no more than these,
//!   and charged to the same quota.

mod contents;
mod copies;
mod log;
mod postcopy;
mod precopy;
mod restore;
mod save;

pub use precopy::{Kept, Precopied};

use std::sync::atomic::Ordering;

use remoting_proto::{
    apis::opencl::calls::{Answered, EventId, KernelId, MemId, QueueId, SetArgument},
    wire::{
        Blob, Wire,
        codec::{named, wire, with},
    },
};

use super::{Server, missing::Missing};
use remoting_session::{checkpoint::Busy, image::Immovable};

/// Why an application stays whose programs have variables at program scope.
const HAS_VARIABLES: &str =
    "its programs have variables at program scope (OpenCL C 2.0), whose values cannot be read";

wire! {
    /// A call.
    struct Entry {
        /// Its opcode.
        opcode: u16,
        /// Its encoded bytes.
        call: Blob,
    }

    /// The objects of a kind for which the application has numbers.
    struct Names {
        /// Numbers in the log, with the application's numbers.
        made: Vec<(u32, u32)>,
        /// The application's numbers of objects whose creation failed, with the codes.
        failed: Vec<(u32, i32)>,
    }

    /// A mapping of a buffer that lives in the window.
    struct Mapping {
        /// The buffer, by the application's number.
        mem: MemId,
        /// First byte.
        offset: u64,
        /// Size in bytes.
        size: u64,
    }

    /// An argument whose value the driver has refused while nobody waited for the result.
    struct Refused {
        /// The kernel.
        kernel: KernelId,
        /// The argument's index.
        index: u32,
        /// The driver's code.
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
        /// Its status.
        status: Status,
    }

    /// Bytes of a buffer or image.
    struct Bytes {
        /// The object's number in the log.
        mem: u32,
        /// Offset of the first byte in the object.
        from: u64,
        /// Their offset in the image file.
        at: u64,
        /// Their number.
        length: u64,
    }
}

wire! { enum
    /// The status of an event.
    Status {
        /// Complete or failed; with the profiling times measured by the driver.
        1 Over(status: i32, times: Vec<(u32, u64)>),
        /// A user event without a status; with the status and number of each callback.
        2 Undecided(callbacks: Vec<(i32, u64)>),
    }
}

wire! {
    /// All objects of an application.
    struct Objects {
        /// The kinds of the devices that it was offered, by platform: it continues with the devices that have the same
        /// numbers.
        offered: Vec<Vec<u64>>,
        /// What it was told about them: it continues only with devices that provide all of that.
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
        /// Numbers of events whose commands never reached the driver, with the codes.
        failed_events: Vec<(u32, i32)>,
        /// Errors of commands that nobody has waited for.
        deferred: Vec<(QueueId, i32)>,
        /// Kernel arguments, with the application's numbers.
        arguments: Vec<SetArgument>,
        /// Refused arguments.
        refused: Vec<Refused>,
        /// Mappings.
        maps: Vec<Mapping>,
        /// Events.
        events: Vec<SavedEvent>,
        /// Buffers and images, by number in the log, with the number of the callback that reports their destruction.
        destructors: Vec<(u32, u64)>,
        /// Contents.
        contents: Vec<Bytes>,
        /// Numbers in the log of the objects whose contents follow by postcopy.
        missing: Vec<u32>,
    }
}

wire! {
    /// The part that is made before the application arrives.
    struct Early {
        /// As in [`Objects`].
        offered: Vec<Vec<u64>>,
        /// As in [`Objects`].
        told: Vec<Answered>,
        /// Calls that were in no round.
        log: Vec<Entry>,
        /// Contexts' numbers in the log, with the application's numbers.
        contexts: Vec<(u32, u32)>,
        /// Contents that have changed since the last round.
        contents: Vec<Bytes>,
    }
}

/// Hash of the state's format.
pub(super) const SHAPE: u64 = with(with(named("OpenCL objects"), Objects::SHAPE), Early::SHAPE);

impl Server {
    /// Checks that nothing is in use that no image holds.
    fn all_can_be_saved(&self) -> Result<(), Immovable> {
        let programs = self.backend.programs.iter().map(|program| &program.record);
        let kernels = self.backend.kernels.iter().map(|kernel| &kernel.program);
        // Kernels keep the variables of programs that have been released.
        let has_variables = programs
            .chain(kernels)
            .any(|record| record.has_variables.load(Ordering::Acquire));
        match has_variables {
            true => Err(Immovable::Has(HAS_VARIABLES.to_owned())),
            false => Ok(()),
        }
    }

    /// What the driver is still busy with: commands, builds, callbacks.
    pub(super) fn driver_busy(&mut self) -> Option<Busy> {
        if self.backend.building > 0 {
            return Some(Busy::Still("programs are being built"));
        }
        if let Err(why) = self.all_can_be_saved() {
            return Some(Busy::Never(why));
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
mod postcopy_tests;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod window_tests;
