//! What the application's data goes through: stretches of the window, and the commands that use
//! them.
//!
//! A *stage* is filled before a command that reads it, or emptied into the application's memory (its
//! data *lands*) after one that has written it. Its space is free again when the worker has released it.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::MutexGuard,
    thread,
    time::Duration,
};

use base::{Unpoisoned, lock::UnpoisonedRw};
use gantry_remoting::{
    link::window::Window,
    wire::messages::{StageId, WindowRange},
};

use crate::{
    copy_threads::{self, Reader},
    driver::Driver,
    link::Link,
    space::Space,
};

/// How many stages their order may name that have been released, beside as many as have not.
const SLACK: usize = 64;

/// How long to sleep where another thread has a stage whose command it has not sent yet, or space is not given
/// out.
const RETRY_DELAY: Duration = Duration::from_millis(1);
/// The fewest bytes of a state that are carried at a time.
const LEAST_PART: u64 = 64 << 10;
/// How often at most. Only the encoding of a call stands between the two.
const RETRIES: u32 = 2000;

/// Memory of the application that a stage is filled from or emptied into: rows, which lie in the
/// stage without gaps. All lengths are in bytes.
#[derive(Clone, Copy, Debug)]
pub struct HostRegion {
    /// Where the first row begins.
    pub start: *mut u8,
    /// The length of a row.
    pub row: usize,
    /// Rows of a slice.
    pub rows: usize,
    /// How many slices there are.
    pub slices: usize,
    /// From one row's start to the next one's.
    pub row_pitch: usize,
    /// From one slice's start to the next one's.
    pub slice_pitch: usize,
}

// SAFETY: the application keeps the memory of a read valid until the read has completed, and says
// so by the API, from whichever thread.
unsafe impl Send for HostRegion {}

impl HostRegion {
    /// One stretch of memory.
    pub fn flat(start: *mut u8, size: usize) -> Self {
        Self {
            start,
            row: size,
            rows: 1,
            slices: 1,
            row_pitch: size,
            slice_pitch: size,
        }
    }

    /// Bytes without the gaps.
    pub fn size(&self) -> usize {
        self.row * self.rows * self.slices
    }

    fn rows(&self) -> impl Iterator<Item = (usize, usize)> {
        let this = *self;
        (0..this.slices).flat_map(move |slice| {
            (0..this.rows).map(move |row| {
                (
                    (slice * this.rows + row) * this.row,
                    slice * this.slice_pitch + row * this.row_pitch,
                )
            })
        })
    }

    /// Copies out of the window.
    ///
    /// # Safety
    /// This memory can be written, and `size` bytes at `from` can be read.
    unsafe fn scatter(&self, from: *const u8) {
        for (there, here) in self.rows() {
            // SAFETY: as the caller vouches.
            unsafe {
                copy_threads::copy(
                    from.add(there),
                    self.start.add(here),
                    self.row,
                    Reader::Thread,
                )
            };
        }
    }

    /// Copies into the window.
    ///
    /// # Safety
    /// This memory can be read, and `size` bytes at `into` can be written.
    unsafe fn gather(&self, into: *mut u8, reader: Reader) {
        for (there, here) in self.rows() {
            // SAFETY: as the caller vouches.
            unsafe { copy_threads::copy(self.start.add(here), into.add(there), self.row, reader) };
        }
    }
}

/// A stretch of the window that a command uses.
#[derive(Debug)]
struct Stage {
    offset: u64,
    length: u64,
    destination: Option<HostRegion>,
    /// Whether the space stays in use when the command has completed.
    keeps_space: bool,
}

/// Bytes at the beginning of the window's data that only commands' own data goes through, if they are not more than an
/// eighth of the window: whatever the application keeps elsewhere, copies have room.
const PASSAGE: u64 = 32 << 20;

/// How space is taken.
type Take = fn(&mut Stages, &Window, u64) -> Option<u64>;

/// The space of the window's data, and what uses it.
#[derive(Debug, Default)]
pub struct Stages {
    space: Space,
    /// The end of what this process has asked to be mapped at once, from the window's start.
    populated: u64,
    pending: HashMap<StageId, Stage>,
    /// The oldest first; with some that are not pending any more.
    order: VecDeque<StageId>,
    next: u32,
    /// How many of those that are pending land in the application's memory.
    landing: usize,
    /// What the application's allocator has, by its offset: how much.
    heap: BTreeMap<u64, u64>,
    /// Whether the application's threads get no space now.
    closed: bool,
}

/// Gives a window's space to the application's threads again when it is dropped.
pub(crate) struct Reopens<'a, D: Driver>(&'a Link<D>);

impl<D: Driver> Drop for Reopens<'_, D> {
    fn drop(&mut self) {
        self.0.stages.lock_unpoisoned().closed = false;
    }
}

impl Stages {
    /// What is in the way of other memory for the window, if something is: who has pointers to it.
    pub(crate) fn pinned(&self) -> Option<&'static str> {
        (!self.heap.is_empty()).then_some("its own memory is in the window (libgantry_malloc.so)")
    }

    /// Stretches that are in use: where they begin and end.
    pub(crate) fn in_use(&self, window: &Window) -> Vec<(u64, u64)> {
        self.space.taken(window.data(), window.size())
    }

    /// The window has other memory, of which no page is mapped.
    pub(crate) fn forget_pages(&mut self) {
        self.populated = 0;
    }

    /// All of a window's data.
    pub fn of(window: &Window) -> Self {
        Self {
            space: Space::new(window.data(), window.size()),
            ..Self::default()
        }
    }

    /// Space, if there is some, and its memory.
    fn take(&mut self, window: &Window, length: u64) -> Option<u64> {
        let offset = self.space.take(length)?;
        let end = offset + length;
        if end > self.populated {
            let from = self.populated.max(window.data());
            window.populate(from, end - from);
            self.populated = end;
        }
        Some(offset)
    }

    /// Space at the end, if there is some, and its memory.
    fn take_last(&mut self, window: &Window, length: u64) -> Option<u64> {
        let passage = PASSAGE.min(window.size() / 8);
        let offset = self.space.take_last(length, window.data() + passage)?;
        if offset + length > self.populated {
            window.populate(offset, length);
        }
        Some(offset)
    }

    /// A new stage.
    fn add(&mut self, stage: Stage) -> StageId {
        let id = StageId(self.next);
        // Not the number of one that is in use: there are not so many.
        self.next = self.next.wrapping_add(1);
        self.landing += usize::from(stage.destination.is_some());
        self.pending.insert(id, stage);
        self.order.push_back(id);
        id
    }

    /// A stage that has been released.
    fn remove(&mut self, id: StageId) -> Option<Stage> {
        let stage = self.pending.remove(&id)?;
        self.landing -= usize::from(stage.destination.is_some());
        // Each is looked at once or twice for each that is added.
        if self.order.len() > 2 * self.pending.len() + SLACK {
            self.order.retain(|id| self.pending.contains_key(id));
        }
        Some(stage)
    }

    /// Whether there are some that land in the application's memory.
    pub fn land(&self) -> bool {
        self.landing > 0
    }

    /// Waits for another one next, if this is the oldest.
    fn pass_over(&mut self, id: StageId) {
        if self.order.front() == Some(&id) {
            self.order.rotate_left(1);
        }
    }

    /// The oldest stage that has not been released.
    fn oldest(&mut self) -> Option<StageId> {
        loop {
            let id = *self.order.front()?;
            if self.pending.contains_key(&id) {
                return Some(id);
            }
            self.order.pop_front();
        }
    }
}

impl<D: Driver> Link<D> {
    /// Where in the window memory of the application is, if the worker sees it there.
    pub fn shared(&self, pointer: *const u8, length: u64) -> Option<u64> {
        if self.is_shared() {
            let own = self.window.offset_of(pointer, length);
            own.or_else(|| D::in_window(pointer, length))
        } else {
            None
        }
    }

    /// Who looks next at what a command is to read from the window.
    pub fn reader(&self) -> Reader {
        if self.is_shared() {
            Reader::Device
        } else {
            Reader::Thread
        }
    }

    /// Has the application's threads get no space until what is returned is dropped, if they have none: those
    /// that want some wait.
    pub(crate) fn close_unused(&self) -> Option<Reopens<'_, D>> {
        let mut stages = self.stages.lock_unpoisoned();
        stages.closed = stages.in_use(&self.window).is_empty();
        // Not made if it is not to be dropped, which takes the lock.
        stages.closed.then(|| Reopens(self))
    }

    /// The window's space, once it is the application's threads' to take.
    fn open_stages(&self) -> MutexGuard<'_, Stages> {
        loop {
            let stages = self.stages.lock_unpoisoned();
            if !stages.closed {
                return stages;
            }
            drop(stages);
            thread::sleep(RETRY_DELAY);
        }
    }

    /// Space in the window for memory that has a second address, if there is some at once.
    pub fn try_reserve_aliased(&self, length: u64) -> Option<u64> {
        let mut stages = self.open_stages();
        // Looked at under the lock, under which another worker comes.
        self.is_file().then(|| stages.take(&self.window, length))?
    }

    /// Space in the window that the worker sees for good, if there is some.
    pub fn reserve_shared(&self, length: u64) -> Option<u64> {
        self.reserve_in_common(length, Stages::take)
    }

    fn reserve_in_common(&self, length: u64, take: Take) -> Option<u64> {
        if !self.is_shared() {
            return None;
        }
        let offset = self.reserve_by(length, take).ok()?;
        // Another worker may have come meanwhile. From here on none comes that does not share the
        // window, as a part of it is in use.
        if self.is_shared() {
            return Some(offset);
        }
        self.free(offset, length);
        None
    }

    /// Space for the application's allocator, if there is some at once.
    pub fn heap_alloc(&self, size: u64) -> Option<*mut u8> {
        // The allocator is also this driver's own, which may be at work with this very lock.
        let mut stages = self.stages.try_lock().ok()?;
        // A port's window may go. Looked at under the lock, under which another worker comes.
        if !self.is_file() || stages.closed {
            return None;
        }
        let offset = stages.take(&self.window, size)?;
        stages.heap.insert(offset, size);
        self.window.at(offset, size)
    }

    /// How much the application's allocator has there.
    pub fn heap_size(&self, pointer: *const u8) -> u64 {
        let stages = self.stages.lock_unpoisoned();
        let offset = self.window.offset_of(pointer, 0);
        offset
            .and_then(|offset| stages.heap.get(&offset).copied())
            .unwrap_or(0)
    }

    /// The application's allocator gives space back.
    pub fn heap_free(&self, pointer: *const u8) {
        // Nothing that is allocated under this lock is in the window, and so freed under it.
        let mut stages = self.stages.lock_unpoisoned();
        if let Some(offset) = self.window.offset_of(pointer, 0)
            && let Some(size) = stages.heap.remove(&offset)
        {
            stages.space.give(offset, size);
        }
    }

    /// Space for some bytes, as many as `most`, if there is enough at once: where, and how many.
    pub(crate) fn reserve_part(&self, most: u64) -> Option<(u64, u64)> {
        let mut stages = self.stages.lock_unpoisoned();
        let mut length = most;
        while length >= most.min(LEAST_PART) {
            if let Some(offset) = stages.take(&self.window, length) {
                return Some((offset, length));
            }
            length /= 2;
        }
        None
    }

    /// Space in the window; waits for commands that use it if there is none.
    pub fn reserve(&self, length: u64) -> Result<u64, D::Status> {
        self.reserve_by(length, Stages::take)
    }

    fn reserve_by(&self, length: u64, take: Take) -> Result<u64, D::Status> {
        let mut retries = 0;
        loop {
            let oldest = {
                let mut stages = self.open_stages();
                if let Some(offset) = take(&mut stages, &self.window, length) {
                    return Ok(offset);
                }
                stages.oldest()
            };
            let stage = oldest.ok_or(D::WINDOW_FULL)?;
            self.ask(&D::await_stage(stage))?;
            let mut stages = self.stages.lock_unpoisoned();
            if stages.pending.contains_key(&stage) {
                // The worker does not know it: another thread is about to send its command.
                stages.pass_over(stage);
                drop(stages);
                retries += 1;
                if retries > RETRIES {
                    return Err(D::WINDOW_FULL);
                }
                thread::sleep(RETRY_DELAY);
            }
        }
    }

    /// Whether the command that uses a stage goes on, as far as the application can know: its data
    /// has not landed.
    pub fn is_pending(&self, stage: StageId) -> bool {
        self.stages.lock_unpoisoned().pending.contains_key(&stage)
    }

    /// Waits until the command that uses a stage has completed, and its data has landed.
    pub fn wait_released(&self, stage: StageId) -> Result<(), D::Status> {
        if self.is_pending(stage) {
            self.ask(&D::await_stage(stage))?;
        }
        Ok(())
    }

    /// Space that the worker sees for good, for what stays in use for long, if there is some: at the window's end, and
    /// not where only commands' data goes through.
    pub fn reserve_lasting(&self, length: u64) -> Option<u64> {
        self.reserve_in_common(length, Stages::take_last)
    }

    /// Gives space back.
    pub fn free(&self, offset: u64, length: u64) {
        self.stages.lock_unpoisoned().space.give(offset, length);
    }

    /// Where reserved space is.
    pub fn pointer(&self, offset: u64, length: u64) -> Result<*mut u8, D::Status> {
        self.window.at(offset, length).ok_or(D::WINDOW_FULL)
    }

    /// Makes reserved space a stage: it is given back when its command has completed.
    pub fn stage(&self, offset: u64, length: u64) -> WindowRange {
        self.stage_of(Stage {
            offset,
            length,
            destination: None,
            keeps_space: false,
        })
    }

    /// Makes reserved space a stage of a command that writes to it: it is given back when the
    /// command has completed, after its data has landed.
    ///
    /// # Safety
    /// The memory where it lands can be written until then, and has no more bytes than are reserved.
    pub unsafe fn stage_into(
        &self,
        offset: u64,
        length: u64,
        destination: HostRegion,
    ) -> WindowRange {
        self.stage_of(Stage {
            offset,
            length,
            destination: Some(destination),
            keeps_space: false,
        })
    }

    /// Copies the application's memory into reserved space, for `reader` to look at.
    ///
    /// # Safety
    /// The memory can be read.
    pub unsafe fn fill(
        &self,
        offset: u64,
        from: &HostRegion,
        reader: Reader,
    ) -> Result<(), D::Status> {
        let into = self.pointer(offset, from.size() as u64)?;
        let _here = self.writers.read_unpoisoned();
        // SAFETY: the caller vouches for the memory; the window has so many bytes there.
        unsafe { from.gather(into, reader) };
        Ok(())
    }

    /// Reserved space that a command writes to and that stays reserved.
    pub fn mapped(&self, offset: u64, length: u64) -> WindowRange {
        // With a part of it in use a window that is shared stays so.
        if self.is_shared() {
            return WindowRange {
                offset,
                length,
                stage: None,
            };
        }
        // By the stage's release the worker says that the data is to come over.
        self.stage_of(Stage {
            offset,
            length,
            destination: None,
            keeps_space: true,
        })
    }

    fn stage_of(&self, stage: Stage) -> WindowRange {
        let Stage { offset, length, .. } = stage;
        let id = self.stages.lock_unpoisoned().add(stage);
        WindowRange {
            offset,
            length,
            stage: Some(id),
        }
    }

    /// A stage with a copy of the application's memory.
    ///
    /// # Safety
    /// The memory can be read.
    pub unsafe fn stage_copy(&self, from: &HostRegion) -> Result<WindowRange, D::Status> {
        let length = from.size() as u64;
        let offset = self.reserve(length)?;
        // SAFETY: as the caller vouches.
        unsafe { self.fill(offset, from, self.reader())? };
        Ok(self.stage(offset, length))
    }

    /// The worker has released a stage, whose command has succeeded or not.
    pub fn released(&self, id: StageId, good: bool) {
        // The lock is held while data lands: who finds the stage gone finds its data in place.
        let mut stages = self.stages.lock_unpoisoned();
        let Some(stage) = stages.remove(id) else {
            return;
        };
        if let (true, Some(destination)) = (good, stage.destination)
            && let Some(from) = self.window.at(stage.offset, destination.size() as u64)
        {
            // SAFETY: who made the stage vouched for the memory until it is released; the window has
            // as many bytes there as it has room for.
            unsafe { destination.scatter(from) };
        }
        if !stage.keeps_space {
            stages.space.give(stage.offset, stage.length);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stage() -> Stage {
        Stage {
            offset: 0,
            length: 0,
            destination: None,
            keeps_space: true,
        }
    }

    #[test]
    fn stages_that_were_released_take_no_memory_though_an_older_one_was_not() {
        let mut stages = Stages::default();
        let first = stages.add(stage());
        for _ in 0..100_000 {
            let next = stages.add(stage());
            assert!(stages.remove(next).is_some());
        }
        assert!(stages.order.len() <= SLACK + 4, "{}", stages.order.len());
        // However often it is asked for.
        assert_eq!(stages.oldest(), Some(first));
        assert_eq!(stages.oldest(), Some(first));
        assert!(stages.remove(first).is_some() && stages.remove(first).is_none());
        assert_eq!(stages.oldest(), None);
    }

    #[test]
    fn a_stage_that_is_passed_over_hides_none_behind_it_and_is_not_forgotten() {
        let mut stages = Stages::default();
        let ids = [(); 3].map(|()| stages.add(stage()));
        let mut seen = Vec::new();
        for _ in 0..4 {
            let oldest = stages.oldest().unwrap();
            seen.push(oldest);
            stages.pass_over(oldest);
        }
        assert_eq!(seen, [ids[0], ids[1], ids[2], ids[0]]);
        // One that is not the oldest any more stays where it is.
        stages.pass_over(ids[0]);
        assert_eq!(stages.oldest(), Some(ids[1]));
    }
}
