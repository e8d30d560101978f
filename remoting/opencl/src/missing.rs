//! Contents of buffers and images that have not arrived yet from where the application was.
//!
//! A command that names an object waits until its contents have arrived, and has them fetched next. A command that
//! overwrites a whole buffer does not need them. An object that is part of another arrives together with all other
//! parts: they share bytes.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Arc, Condvar, Mutex, PoisonError, Weak},
};

use base::Unpoisoned;
use remoting_proto::{
    apis::opencl::{
        OpenCl,
        calls::{MemId, Order, Request},
    },
    wire::{Api, api::Cost},
};
use remoting_session::{checkpoint::Busy, image::Immovable, server::Error};

use super::{
    Server,
    objects::{Kernel, MadeMem},
    provenance::MemRecord,
    records::{Argument, MOST_ARGUMENTS},
    state::Kept,
    written::{place, root},
};

/// Why the application cannot leave at the moment.
pub(super) const ON_THEIR_WAY: &str =
    "contents of its memory are still on their way from where it was";

/// The contents that have not arrived.
#[derive(Debug)]
pub struct Missing {
    numbers: Arc<Numbers>,
    /// Object numbers, keyed by the address of the root's record, whose bytes the object shares.
    by_place: HashMap<usize, Vec<u32>>,
    /// Whether fetching has begun.
    has_begun: bool,
}

/// The objects by number, shared with the thread that fetches their contents.
#[derive(Debug)]
pub struct Numbers {
    state: Mutex<State>,
    changed: Condvar,
}

/// An object whose contents have not arrived.
#[derive(Debug)]
struct Awaited {
    /// The root whose bytes the object shares. Once it is gone, nobody needs them.
    record: Weak<MemRecord>,
    /// The driver keeps it until its contents have arrived, or the application has released it.
    kept: Arc<Kept>,
}

/// An object whose contents will not arrive.
#[derive(Debug)]
struct Lost {
    record: Weak<MemRecord>,
    why: String,
}

#[derive(Debug, Default)]
struct State {
    awaited: HashMap<u32, Awaited>,
    lost: HashMap<u32, Lost>,
    /// The awaited objects that have not been requested yet. Each is requested only once.
    unasked: BTreeSet<u32>,
    /// Total bytes of the awaited objects.
    bytes: u64,
    /// Objects that a command waits for.
    wanted: Vec<u32>,
    /// The object that is being fetched.
    coming: Option<u32>,
    /// The object that a command is about to overwrite.
    overwriting: Option<u32>,
    /// Nobody waits for them any more.
    given_up: bool,
}

/// What to fetch next.
pub struct Next {
    pub number: u32,
    pub object: Arc<Kept>,
    record: Weak<MemRecord>,
    /// Bytes that have yet to arrive, including its own.
    pub left: u64,
}

impl Next {
    /// Records that contents of this length have arrived from `start` on, whatever they are.
    pub fn touch(&self, start: u64, length: u64) {
        // Nothing is copied any more of an object that was released.
        if let Some(record) = self.record.upgrade() {
            record.touched.part(start, length);
        }
    }
}

impl State {
    fn is_live(record: &Weak<MemRecord>) -> bool {
        record.strong_count() > 0
    }

    /// Stops waiting for an object. The caller must release the driver's part of it without the lock.
    fn take(&mut self, number: u32) -> Option<Awaited> {
        let one = self.awaited.remove(&number)?;
        self.unasked.remove(&number);
        self.bytes = self.bytes.saturating_sub(one.kept.bytes());
        Some(one)
    }

    /// Forgets an object that the application has released, unless it is being written.
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

    /// The next object to request, skipping one that a command is overwriting.
    fn choose(&self) -> Option<u32> {
        let is_free = |number: &u32| self.overwriting != Some(*number);
        let is_left = |number: &u32| self.unasked.contains(number) && is_free(number);
        let wanted = self.wanted.iter().copied().find(is_left);
        wanted.or_else(|| self.unasked.iter().copied().find(is_free))
    }

    /// Whether an object's contents have arrived; contents that nobody can need count as arrived. Fails with the reason
    /// if they never will.
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
    /// The object to fetch next; `None` once all have been requested. Waits for commands that overwrite the last ones.
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

    /// Records that an object's contents have arrived, or why they never will.
    pub(super) fn came(&self, number: u32, outcome: Result<(), String>) {
        let mut state = self.state.lock_unpoisoned();
        state.coming = None;
        let one = state.take(number);
        // Losing an object that was released meanwhile does not matter.
        if let (Some(one), Err(why)) = (&one, outcome)
            && State::is_live(&one.record)
        {
            if state.lost.is_empty() {
                base::note!(
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
    /// Starts with the contents of these objects, by number.
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

    /// Returns what to fetch, once.
    pub(super) fn begin(&mut self) -> Option<Arc<Numbers>> {
        let has_begun = std::mem::replace(&mut self.has_begun, true);
        (!has_begun).then(|| Arc::clone(&self.numbers))
    }

    /// Whether contents that the application may need have not arrived.
    pub(super) fn is_awaited(&self) -> bool {
        let state = self.numbers.state.lock_unpoisoned();
        let mut lost = state.lost.values();
        !state.awaited.is_empty() || lost.any(|one| State::is_live(&one.record))
    }

    /// Whether that prevents saving a complete state.
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

    /// Whether the contents of all objects at these places have arrived, or of all objects.
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

    /// Records that the application has released an object at this place, or a part of it.
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

    /// Prepares for the next command, which overwrites all of the object at this place: its contents are not written
    /// until [`end_overwriting`](Self::end_overwriting). Returns false if they are being written, or belong to several
    /// objects.
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

    /// Records that the driver has accepted the command that overwrites an object, if there is one.
    pub(super) fn overwritten(&mut self) {
        let mut state = self.numbers.state.lock_unpoisoned();
        if let Some(number) = state.overwriting {
            state.lost.remove(&number);
            let one = state.take(number);
            drop(state);
            drop(one);
        }
    }

    /// Records that the driver has accepted or refused the command.
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

/// The objects whose contents a request needs.
#[derive(Debug, Default)]
struct Needed {
    /// All objects.
    all: bool,
    /// The addresses of the records of their roots.
    places: Vec<usize>,
}

impl Server {
    /// Whether all contents that a request needs have arrived.
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

    /// Records that the previous command was the overwriting one.
    pub(super) fn end_overwriting(&self) {
        if let Some(missing) = &self.backend.missing {
            missing.end_overwriting();
        }
    }

    /// The place of the buffer that a command overwrites completely, whatever its contents were. `None` if something
    /// may still read the buffer before: earlier commands may wait for the application, and so may this one.
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
            // Shared virtual memory does not move, new objects bring their contents, and an event has none.
            Request::CreateBuffer(_)
            | Request::CreateImage(_)
            | Request::SvmRead(_)
            | Request::SvmWrite(_)
            | Request::SvmCopy(_)
            | Request::SvmFill(_)
            | Request::SvmMigrate(_)
            | Request::SetUserEventStatus(_) => &[],
            // Nothing is known about other requests that use the device.
            other => {
                needed.all = matches!(OpenCl::cost(opcode, other), Cost::Work(_));
                &[]
            }
        };
        for id in ids {
            // For a nonexistent object the driver gets no command.
            if let Ok(mem) = self.backend.mems.get(id.0) {
                needed.places.push(place(&mem.record));
            }
        }
        needed
    }

    fn need_arguments(&self, needed: &mut Needed, kernel: &Kernel) {
        // Arguments beyond the maximum are not recorded.
        needed.all |= kernel.parameters.len() > MOST_ARGUMENTS;
        for (_, argument) in kernel.arguments.all() {
            match argument {
                Argument::Mem(Some(named)) => {
                    let lives = self.backend.mems.birth(named.id.0) == named.birth;
                    match self.backend.mems.get(named.id.0) {
                        Ok(mem) if lives => needed.places.push(place(&mem.record)),
                        // A released object, possibly part of one that was not released.
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
#[path = "missing_tests.rs"]
mod tests;
