//! Shared virtual memory that the client has freed while commands may still use it.
//!
//! OpenCL requires applications to free only memory that no command uses any more. The worker does
//! not rely on that: its driver would let commands read and write whatever memory of this process
//! is mapped there by then. A freed allocation disappears for the client immediately. It is
//! returned to the driver (and to the quota) once all commands that were enqueued before in its
//! context have ended, and all buffers in it are gone.
//!
//! Drivers report the end of a queue's commands by the event of a marker. Each queue whose commands
//! are not known to have ended has one marker, and gets no further one until another command
//! follows: freeing a thousand allocations takes no more markers than freeing one.

use std::{ptr::null, sync::Arc};

use remoting_proto::apis::opencl::codes;
use remoting_session::{
    image::Immovable,
    quota::{Charge, Exceeded},
};

use super::{
    Server,
    driver::{
        api::{Api, Handle},
        cl, status,
    },
    objects::Queue,
    svm::Allocation,
};

/// What is known about the end of a queue's commands.
#[derive(Debug, Default)]
pub enum End {
    /// All have ended.
    #[default]
    Idle,
    /// The driver has received commands since the last marker.
    Open,
    /// This event, to which the queue holds a reference, follows all of them.
    Marked(Handle),
}

impl End {
    fn change(&mut self, api: &Api, to: Self) {
        if let Self::Marked(event) = std::mem::replace(self, to) {
            cl!(api, clReleaseEvent(event));
        }
    }

    /// Records that the driver receives a command.
    pub fn open(&mut self, api: &Api) {
        self.change(api, Self::Open);
    }

    /// Records that all commands are known to have ended, or that nobody asks any more.
    pub fn close(&mut self, api: &Api) {
        self.change(api, Self::Idle);
    }
}

/// The allocations freed between two commands.
#[derive(Debug)]
struct Group {
    allocations: Vec<Arc<Allocation>>,
    /// Events, to which the group holds references, behind all commands that may use the
    /// allocations.
    behind: Vec<Handle>,
    /// Whether the serving thread is going to be woken by them.
    armed: bool,
}

/// Allocations that the client has freed and the driver still has.
#[derive(Debug, Default)]
pub struct Freed {
    groups: Vec<Group>,
    /// Allocations that no command uses any more but that still contain buffers.
    lived_in: Vec<Arc<Allocation>>,
    /// Contexts of released queues, with events behind the last commands of these.
    parted: Vec<(Handle, Handle)>,
    /// Whether a queue was released without such an event: the end of its commands will never be
    /// known.
    has_unmarked: bool,
}

/// Whether a command has ended. If so, its event is released.
fn over(api: &Api, event: Handle) -> bool {
    let over = status(api, event) <= 0;
    if over {
        cl!(api, clReleaseEvent(event));
    }
    over
}

/// An event behind all commands of a queue, with a reference for the caller; `None` if they have
/// ended. Fails with the driver's code if it cannot create a marker.
pub(crate) fn end(api: &Api, queue: &mut Queue) -> Result<Option<Handle>, i32> {
    if matches!(queue.end, End::Open) {
        let mut event = 0;
        let code = cl!(
            api,
            clEnqueueMarkerWithWaitList(queue.raw, 0, null(), &raw mut event)
        );
        if code != 0 {
            return Err(code);
        }
        queue.end = End::Marked(event);
    }
    let End::Marked(event) = queue.end else {
        return Ok(None);
    };
    if status(api, event) <= 0 {
        queue.end.close(api);
        return Ok(None);
    }
    cl!(api, clRetainEvent(event));
    Ok(Some(event))
}

impl Freed {
    /// Whether there are no such allocations.
    pub fn is_empty(&self) -> bool {
        self.groups.is_empty() && self.lived_in.is_empty()
    }

    /// Returns unused allocations to the driver. Returns whether there were any.
    pub fn sweep(&mut self, api: &Api) -> bool {
        self.parted.retain(|(_, event)| !over(api, *event));
        let lived_in = &mut self.lived_in;
        self.groups.retain_mut(|group| {
            group.behind.retain(|event| !over(api, *event));
            let goes_on = !group.behind.is_empty();
            if !goes_on {
                lived_in.append(&mut group.allocations);
            }
            goes_on
        });
        let before = lived_in.len();
        for allocation in std::mem::take(lived_in) {
            match Arc::try_unwrap(allocation) {
                Ok(allocation) => allocation.free(api),
                Err(used) => lived_in.push(used),
            }
        }
        lived_in.len() < before
    }

    /// Events behind the last commands of released queues, with references for the caller.
    pub(crate) fn behind_parted(&mut self, api: &Api) -> Vec<Handle> {
        self.parted_ended(api);
        let events = self.parted.iter().map(|(_, event)| *event);
        events
            .inspect(|event| {
                cl!(api, clRetainEvent(*event));
            })
            .collect()
    }

    /// Whether all commands of released queues have ended, too.
    pub(crate) fn parted_ended(&mut self, api: &Api) -> bool {
        self.parted.retain(|(_, event)| !over(api, *event));
        self.parted.is_empty()
    }

    /// Checks that the end of all commands can be known. Otherwise nobody knows what commands have
    /// yet to write.
    ///
    /// # Errors
    /// A released queue has commands without a marker. This is permanent.
    pub(crate) fn all_marked(&self) -> Result<(), Immovable> {
        match self.has_unmarked {
            false => Ok(()),
            true => Err(Immovable::Has(
                "the driver does not say when commands end whose queue was released".to_owned(),
            )),
        }
    }

    /// Adds the oldest events for which this thread is not yet armed to be woken.
    pub(crate) fn arm(&mut self, events: &mut Vec<Handle>) {
        for group in self.groups.iter_mut().filter(|group| !group.armed) {
            group.armed = true;
            events.extend_from_slice(&group.behind);
        }
    }

    /// Waits until the driver has everything back, except allocations that contain buffers.
    fn wait(&mut self, api: &Api) {
        for group in &self.groups {
            let (count, events) = (group.behind.len() as u32, group.behind.as_ptr());
            // A failure shows in the events' status.
            cl!(api, clWaitForEvents(count, events));
        }
        self.sweep(api);
    }
}

impl Server {
    /// Takes over an allocation that the client has freed.
    pub(crate) fn keep_freed(&mut self, allocation: Arc<Allocation>) {
        let context = allocation.context();
        let api = Arc::clone(&self.backend.api);
        let freed = &mut self.session.backend.svm.freed;
        freed.sweep(&api);
        let mut behind = Vec::new();
        for queue in self.session.backend.queues.iter_mut() {
            if queue.home.raw != context {
                continue;
            }
            match end(&api, queue) {
                Ok(event) => behind.extend(event),
                // Nobody will know when it is unused, so it stays as long as the process, and so
                // does its charge.
                Err(_) => std::mem::forget(Arc::clone(&allocation)),
            }
        }
        let of_context = freed.parted.iter().filter(|(of, _)| *of == context);
        for &(_, event) in of_context {
            cl!(api, clRetainEvent(event));
            behind.push(event);
        }
        match freed.groups.last_mut() {
            Some(last) if last.behind == behind => {
                for event in behind {
                    cl!(api, clReleaseEvent(event));
                }
                last.allocations.push(allocation);
            }
            _ => freed.groups.push(Group {
                allocations: vec![allocation],
                behind,
                armed: false,
            }),
        }
        freed.sweep(&api);
    }

    /// Records that the client is about to release a queue whose commands continue.
    pub(crate) fn part(&mut self, queue: &mut Queue) {
        let context = queue.home.raw;
        self.session
            .backend
            .svm
            .freed
            .sweep(&self.session.backend.api);
        match end(&self.backend.api, queue) {
            Ok(Some(event)) => self.backend.svm.freed.parted.push((context, event)),
            Ok(None) => {}
            // As above.
            Err(_) => {
                let used = self.backend.svm.of(context);
                used.cloned().for_each(std::mem::forget);
                self.backend.svm.freed.has_unmarked = true;
            }
        }
        queue.end.close(&self.backend.api);
    }

    /// Charges the quota.
    pub(crate) fn charge_once(&self, bytes: u64) -> Result<Charge, i32> {
        let charge = self.quota.charge(bytes);
        charge.map_err(|Exceeded| codes::MEM_OBJECT_ALLOCATION_FAILURE)
    }

    /// Charges the quota. If it is exhausted, waits for freed memory, provided that only the driver
    /// is needed to complete the commands that may use it.
    pub(crate) fn charge(&mut self, bytes: u64) -> Result<Charge, i32> {
        let charge = self.charge_once(bytes);
        if charge.is_ok() || !self.make_room() {
            return charge;
        }
        self.charge_once(bytes)
    }

    /// Waits for freed memory. Returns whether room is known to have become available.
    pub(crate) fn make_room(&mut self) -> bool {
        if self.backend.svm.freed.is_empty() {
            return false;
        }
        let swept = self
            .session
            .backend
            .svm
            .freed
            .sweep(&self.session.backend.api);
        // Without threads nothing is waited for. A client that must decide user events has to be
        // able to continue.
        if !self.has_threads() || self.undecided > 0 {
            return swept;
        }
        let api = Arc::clone(&self.backend.api);
        self.backend.svm.freed.wait(&api);
        true
    }
}

#[cfg(test)]
#[path = "freed_tests.rs"]
mod tests;
