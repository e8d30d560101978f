//! Fences: driver events that are recorded behind work, and reused.

use std::{collections::HashMap, sync::MutexGuard, time::Duration};

use base::Unpoisoned;
use cuda_definition::driver::types::{CUevent, CUstream};
use remoting_proto::apis::cuda::codes;
use remoting_session::backend::{Fences, Progress};

use super::driver::{Api, cu};

/// `CU_EVENT_DISABLE_TIMING`.
const NO_TIMING: u32 = 2;

/// A marker for submitted work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fence(u32);

/// An event, in use or free.
#[derive(Debug)]
struct Slot {
    /// The driver's event.
    event: usize,
    /// The driver's context of the event; 0 when the context is gone.
    context: usize,
    references: u32,
    /// An event of the client, which must not be reused.
    foreign: bool,
}

/// All events used as fences.
#[derive(Debug, Default)]
pub(super) struct Pool {
    slots: Vec<Slot>,
    /// Free events, by context.
    free: HashMap<usize, Vec<u32>>,
    /// Slots whose contexts are gone.
    empty: Vec<u32>,
    /// Whether new events record the time.
    timed: bool,
}

impl Pool {
    fn slot(&mut self, fence: Fence) -> &mut Slot {
        &mut self.slots[fence.0 as usize]
    }

    /// Records that an event of the client is about to be destroyed: waits for it fail.
    pub(super) fn forget_event(&mut self, event: usize) {
        let foreign = |slot: &&mut Slot| slot.foreign && slot.event == event;
        for slot in self.slots.iter_mut().filter(foreign) {
            slot.context = 0;
        }
    }

    fn add(&mut self, slot: Slot) -> u32 {
        if let Some(index) = self.empty.pop() {
            self.slots[index as usize] = slot;
            return index;
        }
        self.slots.push(slot);
        // A slot takes far more memory than its index.
        (self.slots.len() - 1) as u32
    }

    /// Records that a context is about to be destroyed with its events: the work that they stand
    /// for counts as failed.
    pub(super) fn forget(&mut self, context: usize) {
        for slot in self.slots.iter_mut().filter(|slot| slot.context == context) {
            slot.context = 0;
        }
        self.empty
            .extend(self.free.remove(&context).unwrap_or_default());
    }
}

impl Api {
    /// Locks the pool.
    pub(super) fn fences_lock(&self) -> MutexGuard<'_, Pool> {
        self.fences.lock_unpoisoned()
    }

    /// Records a fence behind all work in a stream of the current context, with one reference.
    ///
    /// # Errors
    /// The driver's error.
    pub(super) fn fence(&self, context: usize, stream: usize) -> Result<Fence, i32> {
        let mut pool = self.fences.lock_unpoisoned();
        let index = match pool.free.get_mut(&context).and_then(Vec::pop) {
            Some(index) => index,
            None => {
                let mut event = std::ptr::null_mut();
                let flags = if pool.timed { 0 } else { NO_TIMING };
                match cu!(self, cuEventCreate(&raw mut event, flags)) {
                    0 => {}
                    code => return Err(code),
                }
                let slot = Slot {
                    event: event as usize,
                    context,
                    references: 0,
                    foreign: false,
                };
                pool.add(slot)
            }
        };
        let fence = Fence(index);
        let event = pool.slot(fence).event;
        match cu!(self, cuEventRecord(event as CUevent, stream as CUstream)) {
            0 => {
                pool.slot(fence).references = 1;
                Ok(fence)
            }
            code => {
                pool.free.entry(context).or_default().push(index);
                Err(code)
            }
        }
    }
}

impl Api {
    /// Whether no work of the current context has failed, as far as the driver knows: every call reports that.
    pub(super) fn has_not_failed(&self) -> bool {
        let mut event = std::ptr::null_mut();
        let made = cu!(self, cuEventCreate(&raw mut event, NO_TIMING));
        if made == 0 {
            cu!(self, cuEventDestroy_v2(event));
        }
        matches!(made, 0 | codes::OUT_OF_MEMORY)
    }

    /// Whether the work before a fence is done, or its context is gone along with all of its work.
    /// Makes that context current.
    pub(super) fn is_done_or_gone(&self, fence: Fence) -> bool {
        self.poll(fence) == Progress::Complete || self.fences_lock().slot(fence).context == 0
    }

    /// Waits in the driver for a fence that has already been reached.
    pub(super) fn wait_over(&self, fence: Fence) {
        // Under the lock, so that the context cannot be destroyed meanwhile.
        let mut pool = self.fences.lock_unpoisoned();
        let slot = pool.slot(fence);
        if slot.context != 0 {
            self.enter(slot.context);
            cu!(self, cuEventSynchronize(slot.event as CUevent));
        }
    }

    /// A fence for the current recording of an event of the client, with one reference.
    pub(super) fn event_fence(&self, context: usize, event: usize) -> Fence {
        Fence(self.fences.lock_unpoisoned().add(Slot {
            event,
            context,
            references: 1,
            foreign: true,
        }))
    }
}

impl Fences for Api {
    type Fence = Fence;

    fn poll(&self, fence: Fence) -> Progress {
        // Under the lock, so that the context cannot be destroyed meanwhile.
        let mut pool = self.fences.lock_unpoisoned();
        let slot = pool.slot(fence);
        if slot.context == 0 {
            return Progress::Failed;
        }
        self.enter(slot.context);
        match cu!(self, cuEventQuery(slot.event as CUevent)) {
            0 => Progress::Complete,
            codes::NOT_READY => Progress::Running,
            _ => Progress::Failed,
        }
    }

    fn retain(&self, fence: Fence) {
        self.fences.lock_unpoisoned().slot(fence).references += 1;
    }

    fn time(&self) {
        self.fences.lock_unpoisoned().timed = true;
    }

    fn span(&self, from: Fence, to: Fence) -> Option<Duration> {
        // Under the lock, so that the context cannot be destroyed meanwhile.
        let pool = self.fences.lock_unpoisoned();
        let [from, to] = [from, to].map(|fence| &pool.slots[fence.0 as usize]);
        if to.context == 0 || from.context != to.context {
            return None;
        }
        self.enter(to.context);
        let mut millis = 0.0;
        let (from, to) = (from.event as CUevent, to.event as CUevent);
        let code = cu!(self, cuEventElapsedTime(&raw mut millis, from, to));
        (code == 0)
            .then(|| Duration::try_from_secs_f32(millis.max(0.0) / 1e3).ok())
            .flatten()
    }

    fn release(&self, fence: Fence) {
        let mut pool = self.fences.lock_unpoisoned();
        let slot = pool.slot(fence);
        slot.references -= 1;
        if slot.references == 0 {
            match slot.context {
                0 => pool.empty.push(fence.0),
                _ if slot.foreign => pool.empty.push(fence.0),
                context => pool.free.entry(context).or_default().push(fence.0),
            }
        }
    }
}
