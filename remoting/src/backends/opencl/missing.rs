//! Contents of buffers and images that have yet to come from where the application was.
//!
//! A command that names an object waits until its contents are there, and has them fetched next; one that
//! overwrites a whole buffer does not need them. What an object is a part of comes with all its parts: their
//! bytes are the same.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Arc, Condvar, Mutex, PoisonError, Weak},
};

use base::Unpoisoned;

use super::{
    Server,
    objects::{Kernel, MadeMem},
    provenance::MemRecord,
    records::{Argument, MOST_ARGUMENTS},
    state::Kept,
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
    /// Whether somebody fetches them.
    has_begun: bool,
}

/// The objects by their numbers, for the thread that fetches their contents, too.
#[derive(Debug)]
pub struct Numbers {
    state: Mutex<State>,
    changed: Condvar,
}

/// An object whose contents have not come.
#[derive(Debug)]
struct Awaited {
    /// What its bytes are a part of: nobody needs what is of none.
    record: Weak<MemRecord>,
    /// The driver has it until its contents have come, or the application has released it.
    kept: Arc<Kept>,
}

/// An object whose contents do not come.
#[derive(Debug)]
struct Lost {
    record: Weak<MemRecord>,
    why: String,
}

#[derive(Debug, Default)]
struct State {
    awaited: HashMap<u32, Awaited>,
    lost: HashMap<u32, Lost>,
    /// Those of the awaited that were not asked for: none is twice.
    unasked: BTreeSet<u32>,
    /// Bytes of those that are awaited.
    bytes: u64,
    /// Those that a command waits for.
    wanted: Vec<u32>,
    /// The one that is being fetched.
    coming: Option<u32>,
    /// The one that a command is about to overwrite.
    overwriting: Option<u32>,
    /// Nobody waits for them any more.
    given_up: bool,
}

/// What is to be fetched next.
pub struct Next {
    pub number: u32,
    pub object: Arc<Kept>,
    record: Weak<MemRecord>,
    /// Bytes that are still to come, its own included.
    pub left: u64,
}

impl Next {
    /// Contents of it have come that are so many bytes, from this one on, whatever these say.
    pub fn touch(&self, start: u64, length: u64) {
        // Of one that was released nothing is copied any more.
        if let Some(record) = self.record.upgrade() {
            record.touched.part(start, length);
        }
    }
}

impl State {
    fn is_live(record: &Weak<MemRecord>) -> bool {
        record.strong_count() > 0
    }

    /// One is not waited for any more. What the driver has of it is to be released without the lock.
    fn take(&mut self, number: u32) -> Option<Awaited> {
        let one = self.awaited.remove(&number)?;
        self.unasked.remove(&number);
        self.bytes = self.bytes.saturating_sub(one.kept.bytes());
        Some(one)
    }

    /// Forgets one that the application has released, unless it is being written.
    fn forget(&mut self, number: u32) -> Option<Awaited> {
        let lost = self.lost.get(&number);
        if lost.is_some_and(|one| !Self::is_live(&one.record)) {
            self.lost.remove(&number);
        }
        let awaited = self.awaited.get(&number);
        let is_released = awaited.is_some_and(|one| !Self::is_live(&one.record));
        match is_released && self.coming != Some(number) {
            true => self.take(number),
            false => None,
        }
    }

    /// The next one to ask for that a command does not overwrite just now.
    fn choose(&self) -> Option<u32> {
        let is_free = |number: &u32| self.overwriting != Some(*number);
        let is_left = |number: &u32| self.unasked.contains(number) && is_free(number);
        let wanted = self.wanted.iter().copied().find(is_left);
        wanted.or_else(|| self.unasked.iter().copied().find(is_free))
    }

    /// Whether the contents of one are there; those that nobody can need count as such. Why they never will be.
    fn has_come(&self, number: u32) -> Result<bool, Error> {
        match self.lost.get(&number) {
            Some(one) if Self::is_live(&one.record) => Err(Error::Lost(one.why.clone())),
            _ => {
                let awaited = self.awaited.get(&number);
                Ok(!awaited.is_some_and(|one| Self::is_live(&one.record)))
            }
        }
    }
}

impl Numbers {
    /// The one to fetch next; none if all have been asked for. Waits for commands that overwrite the last ones.
    pub(super) fn next(&self) -> Option<Next> {
        let mut released = Vec::new();
        let mut state = self.state.lock_unpoisoned();
        let next = loop {
            if state.unasked.is_empty() || state.given_up {
                break None;
            }
            let Some(number) = state.choose() else {
                let woken = self.changed.wait(state);
                state = woken.unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            if let Some(one) = state.forget(number) {
                released.push(one);
                continue;
            }
            state.unasked.remove(&number);
            if let Some(one) = state.awaited.get(&number) {
                let object = Arc::clone(&one.kept);
                let record = Weak::clone(&one.record);
                let left = state.bytes;
                state.coming = Some(number);
                break Some(Next {
                    number,
                    object,
                    record,
                    left,
                });
            }
        };
        drop(state);
        next
    }

    /// The contents of one are there, or why they never will be.
    pub(super) fn came(&self, number: u32, outcome: Result<(), String>) {
        let mut state = self.state.lock_unpoisoned();
        state.coming = None;
        let one = state.take(number);
        // What was released meanwhile is nobody's loss.
        if let (Some(one), Err(why)) = (&one, outcome)
            && State::is_live(&one.record)
        {
            if state.lost.is_empty() {
                crate::note!(
                    "gantry-accel: contents of memory of an application that has moved are lost: {why}"
                );
            }
            let record = Weak::clone(&one.record);
            state.lost.insert(number, Lost { record, why });
        }
        drop(state);
    }
}

impl Missing {
    /// The contents of these objects, by their numbers.
    pub(super) fn new(objects: Vec<(u32, Arc<MemRecord>, Kept)>) -> Self {
        let mut state = State::default();
        let mut by_place = HashMap::<_, Vec<_>>::new();
        for (number, record, kept) in objects {
            by_place.entry(place(&record)).or_default().push(number);
            state.unasked.insert(number);
            state.bytes = state.bytes.saturating_add(kept.bytes());
            let one = Awaited {
                record: Arc::downgrade(root(&record)),
                kept: Arc::new(kept),
            };
            state.awaited.insert(number, one);
        }
        let numbers = Numbers {
            state: Mutex::new(state),
            changed: Condvar::new(),
        };
        Self {
            numbers: Arc::new(numbers),
            by_place,
            has_begun: false,
        }
    }

    /// What is to be fetched, once.
    pub(super) fn begin(&mut self) -> Option<Arc<Numbers>> {
        let has_begun = std::mem::replace(&mut self.has_begun, true);
        (!has_begun).then(|| Arc::clone(&self.numbers))
    }

    /// Whether some have not come that the application may need.
    pub(super) fn is_awaited(&self) -> bool {
        let state = self.numbers.state.lock_unpoisoned();
        let mut lost = state.lost.values();
        !state.awaited.is_empty() || lost.any(|one| State::is_live(&one.record))
    }

    /// Whether that is in the way of a state that has all.
    pub(super) fn busy(&self) -> Option<Busy> {
        let state = self.numbers.state.lock_unpoisoned();
        let mut lost = state.lost.values();
        if let Some(one) = lost.find(|one| State::is_live(&one.record)) {
            let why = &one.why;
            return Some(Busy::Never(Immovable::Has(format!(
                "contents of its memory were lost when it moved: {why}"
            ))));
        }
        (!state.awaited.is_empty()).then_some(Busy::Still(ON_THEIR_WAY))
    }

    /// Whether the contents are there of all objects at these places, or of all that there are.
    fn have_come(&self, places: Option<&[usize]>) -> Result<bool, Error> {
        let mut state = self.numbers.state.lock_unpoisoned();
        let Some(places) = places else {
            for number in state.lost.keys() {
                state.has_come(*number)?;
            }
            return Ok(state.awaited.is_empty());
        };
        let mut missing = Vec::new();
        let of_places = places.iter().filter_map(|place| self.by_place.get(place));
        for number in of_places.flatten() {
            if !state.has_come(*number)? {
                missing.push(*number);
            }
        }
        let have_come = missing.is_empty();
        if !have_come {
            state.wanted = missing;
        }
        Ok(have_come)
    }

    /// The application has released an object at this place, or a part of it.
    pub(super) fn released(&self, place: usize) {
        let Some(numbers) = self.by_place.get(&place) else {
            return;
        };
        let mut state = self.numbers.state.lock_unpoisoned();
        let forgotten = numbers.iter().filter_map(|number| state.forget(*number));
        let forgotten: Vec<_> = forgotten.collect();
        drop(state);
        drop(forgotten);
        self.numbers.changed.notify_all();
    }

    /// A command that is next overwrites all of the object at this place: its contents are not written any more
    /// until [`end_overwriting`](Self::end_overwriting). False if they are being, or are those of several.
    fn begin_overwriting(&self, place: usize) -> bool {
        let Some([number]) = self.by_place.get(&place).map(Vec::as_slice) else {
            return false;
        };
        let mut state = self.numbers.state.lock_unpoisoned();
        let is_missing = state.awaited.contains_key(number) || state.lost.contains_key(number);
        let is_free = is_missing && state.coming != Some(*number);
        if is_free {
            state.overwriting = Some(*number);
        }
        is_free
    }

    /// The driver has the command that overwrites an object, if there is one.
    pub(super) fn overwritten(&mut self) {
        let mut state = self.numbers.state.lock_unpoisoned();
        if let Some(number) = state.overwriting {
            state.lost.remove(&number);
            let one = state.take(number);
            drop(state);
            drop(one);
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
