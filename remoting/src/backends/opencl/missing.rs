//! Contents of buffers and images that have yet to come from where the application was.
//!
//! A command that names an object waits until its contents are there, and has them fetched next; one that
//! overwrites a whole buffer does not need them. What an object is a part of comes with all its parts: their
//! bytes are the same.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Condvar, Mutex, PoisonError, Weak},
};

use base::Unpoisoned;

use super::{
    Server,
    objects::{Kernel, MadeMem},
    provenance::MemRecord,
    records::{Argument, MOST_ARGUMENTS},
    state::Fetching,
    written::{place, root},
};
use crate::{
    apis::opencl::{
        OpenCl,
        calls::{MemId, Order, Request},
    },
    session::{checkpoint::Busy, image::Immovable, server::Error},
    wire::Api,
};

/// Why the application cannot leave for now.
pub(super) const ON_THEIR_WAY: &str =
    "contents of its memory are still on their way from where it was";

/// What has not come.
#[derive(Debug)]
pub struct Missing {
    numbers: Arc<Numbers>,
    /// By where the records are of what their bytes are a part of.
    by_place: HashMap<usize, Vec<u32>>,
    /// What fetches them, until it does.
    fetching: Option<Fetching>,
}

/// The objects by their numbers, for the thread that fetches their contents, too.
#[derive(Debug, Default)]
pub struct Numbers {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Those whose contents have not come, with the records of what their bytes are a part of: nobody needs what
    /// is of none.
    left: BTreeMap<u32, Weak<MemRecord>>,
    /// Those that a command waits for.
    wanted: Vec<u32>,
    /// The one that is being fetched.
    coming: Option<u32>,
    /// The one that a command is about to overwrite.
    overwriting: Option<u32>,
    /// Why no more come.
    lost: Option<String>,
    /// Nobody waits for them any more.
    given_up: bool,
}

impl State {
    /// Forgets those that the application has released.
    fn forget_released(&mut self) {
        let coming = self.coming;
        self.left
            .retain(|number, record| record.strong_count() > 0 || coming == Some(*number));
    }
}

impl Numbers {
    /// The one to fetch next; none if all have come. Waits for commands that overwrite the last ones.
    pub(super) fn next(&self) -> Option<u32> {
        let mut state = self.state.lock_unpoisoned();
        loop {
            state.forget_released();
            if state.left.is_empty() || state.given_up {
                return None;
            }
            let is_free = |number: &u32| state.overwriting != Some(*number);
            let is_left = |number: &u32| state.left.contains_key(number) && is_free(number);
            let wanted = state.wanted.iter().copied().find(is_left);
            let first = || state.left.keys().copied().find(is_free);
            if let Some(number) = wanted.or_else(first) {
                state.coming = Some(number);
                return Some(number);
            }
            let woken = self.changed.wait(state);
            state = woken.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The contents of one are there, or why they never will be.
    pub(super) fn came(&self, number: u32, outcome: Result<(), String>) {
        let mut state = self.state.lock_unpoisoned();
        state.coming = None;
        match outcome {
            Ok(()) => drop(state.left.remove(&number)),
            Err(why) => {
                crate::note!(
                    "gantry-accel: contents of memory of an application that has moved are lost: {why}"
                );
                state.lost = Some(why);
            }
        }
    }
}

impl Missing {
    /// The contents of these objects.
    pub(super) fn new(records: &[(u32, Arc<MemRecord>)], fetching: Fetching) -> Self {
        let mut state = State::default();
        let mut by_place = HashMap::<_, Vec<_>>::new();
        for (number, record) in records {
            by_place.entry(place(record)).or_default().push(*number);
            state.left.insert(*number, Arc::downgrade(root(record)));
        }
        let numbers = Numbers {
            state: Mutex::new(state),
            changed: Condvar::new(),
        };
        Self {
            numbers: Arc::new(numbers),
            by_place,
            fetching: Some(fetching),
        }
    }

    /// What fetches them, once.
    pub(super) fn begin(&mut self) -> Option<(Fetching, Arc<Numbers>)> {
        let fetching = self.fetching.take()?;
        Some((fetching, Arc::clone(&self.numbers)))
    }

    /// Whether some have not come that the application may need.
    pub(super) fn is_awaited(&self) -> bool {
        let mut state = self.numbers.state.lock_unpoisoned();
        state.forget_released();
        !state.left.is_empty()
    }

    /// Whether that is in the way of a state that has all.
    pub(super) fn busy(&self) -> Option<Busy> {
        if !self.is_awaited() {
            return None;
        }
        Some(match &self.numbers.state.lock_unpoisoned().lost {
            None => Busy::Still(ON_THEIR_WAY),
            Some(why) => Busy::Never(Immovable::Has(format!(
                "contents of its memory were lost when it moved: {why}"
            ))),
        })
    }

    /// Whether the contents are there of all objects at these places, or of all that there are.
    fn have_come(&self, places: Option<&[usize]>) -> Result<bool, Error> {
        let mut state = self.numbers.state.lock_unpoisoned();
        state.forget_released();
        let missing: Vec<u32> = match places {
            None => state.left.keys().copied().collect(),
            Some(places) => places
                .iter()
                .filter_map(|place| self.by_place.get(place))
                .flatten()
                .filter(|number| state.left.contains_key(number))
                .copied()
                .collect(),
        };
        if missing.is_empty() {
            return Ok(true);
        }
        if let Some(why) = &state.lost {
            return Err(Error::Lost(why.clone()));
        }
        state.wanted = missing;
        Ok(false)
    }

    /// A command that is next overwrites all of the object at this place: its contents are not written any more
    /// until [`end_overwriting`](Self::end_overwriting). False if they are being, or are those of several.
    fn begin_overwriting(&self, place: usize) -> bool {
        let Some([number]) = self.by_place.get(&place).map(Vec::as_slice) else {
            return false;
        };
        let mut state = self.numbers.state.lock_unpoisoned();
        let is_free = state.coming != Some(*number) && state.left.contains_key(number);
        if is_free {
            state.overwriting = Some(*number);
        }
        is_free
    }

    /// The driver has the command that overwrites an object, if there is one.
    pub(super) fn overwritten(&mut self) {
        let mut state = self.numbers.state.lock_unpoisoned();
        if let Some(number) = state.overwriting {
            state.left.remove(&number);
        }
    }

    /// The driver has it, or has refused it.
    fn end_overwriting(&self) {
        self.numbers.state.lock_unpoisoned().overwriting = None;
        self.numbers.changed.notify_all();
    }
}

impl Drop for Missing {
    fn drop(&mut self) {
        self.numbers.state.lock_unpoisoned().given_up = true;
        self.numbers.changed.notify_all();
    }
}

/// What a request needs the contents of.
#[derive(Debug, Default)]
struct Needed {
    /// Of all objects.
    all: bool,
    /// By where the records are of what their bytes are a part of.
    places: Vec<usize>,
}

impl Server {
    /// Whether all contents are there that a request needs.
    pub(super) fn contents_have_come(
        &mut self,
        opcode: u16,
        request: &Request,
    ) -> Result<bool, Error> {
        let Some(missing) = &self.backend.missing else {
            return Ok(true);
        };
        if !missing.is_awaited() {
            self.backend.missing = None;
            return Ok(true);
        }
        if let Some(place) = self.overwrites(request)
            && missing.begin_overwriting(place)
        {
            return Ok(true);
        }
        let Needed { all, places } = self.needed(opcode, request);
        missing.have_come((!all).then_some(&places))
    }

    /// The command before was the one that overwrites.
    pub(super) fn end_overwriting(&self) {
        if let Some(missing) = &self.backend.missing {
            missing.end_overwriting();
        }
    }

    /// Where the record is of the buffer all of which a command writes, whatever it had. Not if something may
    /// still read it before: what waits for the application, as the command itself may.
    fn overwrites(&self, request: &Request) -> Option<usize> {
        let (order, id, offset, size): (&Order, _, _, _) = match request {
            Request::WriteBuffer(call) => (&call.order, call.mem, call.offset, call.from.length),
            Request::FillBuffer(call) => (&call.order, call.mem, call.offset, call.size),
            _ => return None,
        };
        let record = &self.backend.mems.get(id.0).ok()?.record;
        let MadeMem::Buffer(made) = &record.call else {
            return None;
        };
        let is_whole = offset == 0 && size == made.size;
        let waits = !order.wait.is_empty() || self.undecided > 0;
        (is_whole && !waits).then(|| place(record))
    }

    fn needed(&self, opcode: u16, request: &Request) -> Needed {
        let mut needed = Needed::default();
        let ids: &[MemId] = match request {
            Request::NdRange(call) => {
                if let Ok(kernel) = self.backend.kernels.get(call.kernel.0) {
                    self.need_arguments(&mut needed, kernel);
                }
                &[]
            }
            Request::ReadBuffer(call) => &[call.mem],
            Request::WriteBuffer(call) => &[call.mem],
            Request::BufferRect(call) => &[call.mem],
            Request::ImageRect(call) => &[call.mem],
            Request::CopyBuffer(call) => &[call.from, call.to],
            Request::CopyBufferRect(call) => &[call.from, call.to],
            Request::CopyImage(call) => &[call.from, call.to],
            Request::CopyImageToBuffer(call) => &[call.image, call.buffer],
            Request::CopyBufferToImage(call) => &[call.buffer, call.image],
            Request::FillBuffer(call) => &[call.mem],
            Request::FillImage(call) => &[call.mem],
            Request::Migrate(call) => &call.mems,
            Request::Map(call) => &[call.mem],
            Request::Unmap(call) => &[call.mem],
            // Shared virtual memory does not move, and an event has no contents.
            Request::SvmRead(_)
            | Request::SvmWrite(_)
            | Request::SvmCopy(_)
            | Request::SvmFill(_)
            | Request::SvmMigrate(_)
            | Request::SetUserEventStatus(_) => &[],
            // Of others that use the device nothing is known.
            other => {
                needed.all = OpenCl::cost(opcode, other).is_some();
                &[]
            }
        };
        for id in ids {
            // Of none the driver gets no command.
            if let Ok(mem) = self.backend.mems.get(id.0) {
                needed.places.push(place(&mem.record));
            }
        }
        needed
    }

    fn need_arguments(&self, needed: &mut Needed, kernel: &Kernel) {
        // Those beyond are not recorded.
        needed.all |= kernel.parameters.len() > MOST_ARGUMENTS;
        for (_, argument) in kernel.arguments.all() {
            match argument {
                Argument::Mem(Some(named)) => {
                    let lives = self.backend.mems.birth(named.id.0) == named.birth;
                    match self.backend.mems.get(named.id.0) {
                        Ok(mem) if lives => needed.places.push(place(&mem.record)),
                        // One that was released, perhaps a part of one that was not.
                        _ => needed.all = true,
                    }
                }
                Argument::Lost => needed.all = true,
                Argument::Svm(_)
                | Argument::Mem(None)
                | Argument::Bytes(_)
                | Argument::Sampler(_)
                | Argument::Local(_) => {}
            }
        }
    }
}

#[cfg(test)]
#[cfg(not(loom))]
#[path = "missing_tests.rs"]
mod tests;
