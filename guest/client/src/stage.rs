//! The window space that the application's data passes through, and the commands that use it.
//!
//! A *stage* is filled before a command that reads it, or emptied into the application's memory (its data *lands*)
//! after a command that has written it. Its space becomes free when the worker releases it.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    sync::MutexGuard,
    thread,
    time::Duration,
};

use base::{Unpoisoned, lock::UnpoisonedRw};
use remoting_proto::wire::messages::{StageId, WindowRange};
use remoting_transport::window::Window;

use crate::{
    copy_threads::{self, Reader},
    driver::Driver,
    link::Link,
    space::Space,
};

/// How many released stages the order queue may contain beyond as many as are pending.
const SLACK: usize = 64;

/// How long to sleep when another thread has a stage whose command it has not sent yet, or while no space is given out.
const RETRY_DELAY: Duration = Duration::from_millis(1);
/// The minimum number of bytes of a state to copy at a time.
const LEAST_PART: u64 = 64 << 10;
/// The maximum number of retries. Only the encoding of a call lies between creating a stage and sending its command.
const RETRIES: u32 = 2000;

/// Memory of the application that a stage is filled from or emptied into, as rows. In the stage the rows are
/// contiguous. All lengths are in bytes.
#[derive(Clone, Copy, Debug)]
pub struct HostRegion {
    /// The start of the first row.
    pub start: *mut u8,
    /// The length of a row.
    pub row: usize,
    /// The number of rows per slice.
    pub rows: usize,
    /// The number of slices.
    pub slices: usize,
    /// The distance between the starts of two rows.
    pub row_pitch: usize,
    /// The distance between the starts of two slices.
    pub slice_pitch: usize,
}

// SAFETY: the application keeps the memory of a read valid until the read has completed, and may learn that through the
// API on any thread.
unsafe impl Send for HostRegion {}

impl HostRegion {
    /// A contiguous region.
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

    /// The total size, without the gaps.
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
    /// This memory must be writable, and `size` bytes at `from` readable.
    unsafe fn scatter(&self, from: *const u8) {
        for (there, here) in self.rows() {
            // SAFETY: guaranteed by the caller.
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
    /// This memory must be readable, and `size` bytes at `into` writable.
    unsafe fn gather(&self, into: *mut u8, reader: Reader) {
        for (there, here) in self.rows() {
            // SAFETY: guaranteed by the caller.
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
    /// Whether the space stays in use after the command has completed.
    keeps_space: bool,
}

/// The size of the region at the beginning of the window's data that is reserved for the data of commands, limited to
/// an eighth of the window. Copies thus have room whatever the application keeps elsewhere.
const PASSAGE: u64 = 32 << 20;

/// How space is allocated.
type Take = fn(&mut Stages, &Window, u64) -> Option<u64>;

/// The allocation state of the window's data space.
#[derive(Debug, Default)]
pub struct Stages {
    space: Space,
    /// The end of the part of the window that this process has populated, from the window's start.
    populated: u64,
    pending: HashMap<StageId, Stage>,
    /// The oldest first. May contain stages that are no longer pending.
    order: VecDeque<StageId>,
    next: u32,
    /// How many of the pending stages land in the application's memory.
    landing: usize,
    /// The sizes of the application allocator's blocks, by offset.
    heap: BTreeMap<u64, u64>,
    /// Whether the application's threads currently get no space.
    closed: bool,
    /// The blocks of the window that children which this process forks inherit, by number.
    inherited: BTreeSet<u64>,
}

/// The size of the blocks that children inherit, since parts of the window that they do and do not
/// inherit are mappings of their own: that of a large page.
const BLOCK: u64 = 2 << 20;

/// Allows the application's threads to allocate window space again when it is dropped.
pub(crate) struct Reopens<'a, D: Driver>(&'a Link<D>);

impl<D: Driver> Drop for Reopens<'_, D> {
    fn drop(&mut self) {
        self.0.stages.lock_unpoisoned().closed = false;
    }
}

impl Stages {
    /// What prevents replacing the window's memory, if anything: something that has pointers to it.
    pub(crate) fn pinned(&self) -> Option<&'static str> {
        (!self.heap.is_empty()).then_some("its own memory is in the window (libgantry_malloc.so)")
    }

    /// The stretches in use, as their start and end.
    pub(crate) fn in_use(&self, window: &Window) -> Vec<(u64, u64)> {
        self.space.taken(window.data(), window.size())
    }

    /// Called after the window's memory was replaced by memory of which no page is mapped, and none is inherited.
    pub(crate) fn forget_pages(&mut self) {
        self.populated = 0;
        self.inherited.clear();
    }

    /// Lets children inherit a stretch, and what else is in its blocks. They go on to inherit it when it is free.
    fn hand_out(&mut self, window: &Window, offset: u64, length: u64) {
        let end = offset.saturating_add(length);
        for block in offset / BLOCK..end.div_ceil(BLOCK) {
            if self.inherited.insert(block) {
                let start = (block * BLOCK).max(window.data());
                let end = ((block + 1) * BLOCK).min(window.size());
                window.let_children_inherit(start, end - start);
            }
        }
    }

    /// The space of all of a window's data.
    pub fn of(window: &Window) -> Self {
        Self {
            space: Space::new(window.data(), window.size()),
            ..Self::default()
        }
    }

    /// Allocates and populates space, if there is any.
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

    /// Allocates and populates space at the end, if there is any.
    fn take_last(&mut self, window: &Window, length: u64) -> Option<u64> {
        self.take_at_end(window, length, 1)
    }

    /// The same, so that it crosses no multiple of [`BLOCK`] that a stretch of its length need not cross.
    fn take_last_block(&mut self, window: &Window, length: u64) -> Option<u64> {
        let align = length.checked_next_power_of_two()?.clamp(4096, BLOCK);
        self.take_at_end(window, length, align)
    }

    fn take_at_end(&mut self, window: &Window, length: u64, align: u64) -> Option<u64> {
        let passage = PASSAGE.min(window.size() / 8);
        let data = window.data();
        let offset = (self.space).take_last(length, data + passage, (data, align))?;
        if offset + length > self.populated {
            window.populate(offset, length);
        }
        Some(offset)
    }

    /// Adds a stage.
    fn add(&mut self, stage: Stage) -> StageId {
        let id = StageId(self.next);
        // Cannot be the number of a pending stage: there are never that many.
        self.next = self.next.wrapping_add(1);
        self.landing += usize::from(stage.destination.is_some());
        self.pending.insert(id, stage);
        self.order.push_back(id);
        id
    }

    /// Removes a stage that has been released.
    fn remove(&mut self, id: StageId) -> Option<Stage> {
        let stage = self.pending.remove(&id)?;
        self.landing -= usize::from(stage.destination.is_some());
        // Amortized, each stage is visited once or twice.
        if self.order.len() > 2 * self.pending.len() + SLACK {
            self.order.retain(|id| self.pending.contains_key(id));
        }
        Some(stage)
    }

    /// Makes a stage land nowhere. Returns whether it has not landed.
    fn abandon(&mut self, id: StageId) -> bool {
        let stage = self.pending.get_mut(&id);
        let lands = stage.is_some_and(|stage| stage.destination.take().is_some());
        self.landing -= usize::from(lands);
        lands
    }

    /// Whether any pending stage lands in the application's memory.
    pub fn land(&self) -> bool {
        self.landing > 0
    }

    /// If this is the oldest stage, moves it to the back, so that another one is waited for next.
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
    /// The window offset of application memory, if it is in the window and the worker sees it there.
    pub fn shared(&self, pointer: *const u8, length: u64) -> Option<u64> {
        if self.is_shared() {
            let own = self.window.offset_of(pointer, length);
            own.or_else(|| D::in_window(pointer, length))
        } else {
            None
        }
    }

    /// Who reads next what a command is to read from the window.
    pub fn reader(&self) -> Reader {
        if self.is_shared() {
            Reader::Device
        } else {
            Reader::Thread
        }
    }

    /// If the application's threads have no space, stops them from getting any until the returned guard is dropped.
    /// Threads that want space wait.
    pub(crate) fn close_unused(&self) -> Option<Reopens<'_, D>> {
        let mut stages = self.stages.lock_unpoisoned();
        stages.closed = stages.in_use(&self.window).is_empty();
        // Constructed only if it is to be returned: its drop takes the lock.
        stages.closed.then(|| Reopens(self))
    }

    /// Locks the window's space, once the application's threads may allocate from it.
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

    /// Reserves space in the window for memory that has a second address, if there is some right now.
    pub fn try_reserve_aliased(&self, length: u64) -> Option<u64> {
        let mut stages = self.open_stages();
        // Checked under the lock that is held while the worker is replaced.
        self.is_file().then(|| stages.take(&self.window, length))?
    }

    /// Reserves space in the window that the worker sees permanently, if there is some.
    pub fn reserve_shared(&self, length: u64) -> Option<u64> {
        self.reserve_in_common(length, Stages::take)
    }

    fn reserve_in_common(&self, length: u64, take: Take) -> Option<u64> {
        if !self.is_shared() {
            return None;
        }
        let offset = self.reserve_by(length, take).ok()?;
        // The worker may have been replaced meanwhile. From here on it cannot be replaced by one that does not share
        // the window, since a part of the window is in use.
        if self.is_shared() {
            return Some(offset);
        }
        self.free(offset, length);
        None
    }

    /// Allocates space for the application's allocator, if there is some right now.
    pub fn heap_alloc(&self, size: u64) -> Option<*mut u8> {
        // This driver uses the same allocator, possibly while it holds this very lock.
        let mut stages = self.stages.try_lock().ok()?;
        // A port's window may be removed. Checked under the lock that is held while the worker is replaced.
        if !self.is_file() || stages.closed {
            return None;
        }
        let offset = stages.take(&self.window, size)?;
        stages.hand_out(&self.window, offset, size);
        stages.heap.insert(offset, size);
        self.window.at(offset, size)
    }

    /// The size of the application allocator's block at this address, or 0.
    pub fn heap_size(&self, pointer: *const u8) -> u64 {
        self.size_among(&self.stages.lock_unpoisoned(), pointer)
    }

    /// The same in a child of the process. None if another thread of the process was changing it when it forked.
    pub(crate) fn heap_size_in_child(&self, pointer: *const u8) -> Option<u64> {
        let stages = self.stages.try_lock().ok()?;
        Some(self.size_among(&stages, pointer))
    }

    fn size_among(&self, stages: &Stages, pointer: *const u8) -> u64 {
        let offset = self.window.offset_of(pointer, 0);
        offset
            .and_then(|offset| stages.heap.get(&offset).copied())
            .unwrap_or(0)
    }

    /// Frees a block of the application's allocator.
    pub fn heap_free(&self, pointer: *const u8) {
        // Nothing allocated under this lock is in the window, so nothing in the window is freed under it.
        let mut stages = self.stages.lock_unpoisoned();
        if let Some(offset) = self.window.offset_of(pointer, 0)
            && let Some(size) = stages.heap.remove(&offset)
        {
            stages.space.give(offset, size);
        }
    }

    /// Reserves space for up to `most` bytes, if there is enough right now. Returns its offset and length.
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

    /// Reserves space in the window. If there is none, waits for commands that use it.
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
                // The worker does not know the stage yet: another thread is about to send its command.
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

    /// Whether the command that uses a stage is still running as far as the application can tell: its data has not
    /// landed.
    pub fn is_pending(&self, stage: StageId) -> bool {
        self.stages.lock_unpoisoned().pending.contains_key(&stage)
    }

    /// Waits until the command that uses a stage has completed and its data has landed.
    pub fn wait_released(&self, stage: StageId) -> Result<(), D::Status> {
        if self.is_pending(stage) {
            self.ask(&D::await_stage(stage))?;
        }
        Ok(())
    }

    /// Ends a read through these stages with an outcome. The application may use the memory for something else then, so
    /// what has not landed lands nowhere: a part of a read has failed, whose other commands are still running, or the
    /// worker says that they have ended although it has not released them.
    ///
    /// # Errors
    /// The outcome's. The data of a successful read is not there.
    pub fn landed<T>(
        &self,
        all: impl IntoIterator<Item = StageId>,
        outcome: Result<T, D::Status>,
    ) -> Result<T, D::Status> {
        // Data lands under this lock.
        let mut stages = self.stages.lock_unpoisoned();
        let mut is_late = false;
        for id in all {
            is_late |= stages.abandon(id);
        }
        match is_late {
            true => outcome.and(Err(D::WORKER_LOST)),
            false => outcome,
        }
    }

    /// Reserves space that the worker sees permanently, for long-lived use, if there is some. The space is at the
    /// window's end, outside the part that is reserved for the data of commands.
    pub fn reserve_lasting(&self, length: u64) -> Option<u64> {
        self.reserve_in_common(length, Stages::take_last)
    }

    /// As [`reserve_lasting`](Self::reserve_lasting), for what has to be within one part that the device knows: such parts
    /// begin and end at multiples of 2 MiB from the start of the window's data.
    pub fn reserve_block(&self, length: u64) -> Option<u64> {
        self.reserve_in_common(length, Stages::take_last_block)
    }

    /// As [`reserve_lasting`](Self::reserve_lasting), if there is enough right now.
    pub fn try_reserve_lasting(&self, length: u64) -> Option<u64> {
        let mut stages = self.open_stages();
        // Checked under the lock that is held while the worker is replaced.
        self.is_shared()
            .then(|| stages.take_last(&self.window, length))?
    }

    /// Frees space.
    pub fn free(&self, offset: u64, length: u64) {
        self.stages.lock_unpoisoned().space.give(offset, length);
    }

    /// Called before the program gets a pointer to reserved space: children that this process forks inherit it, and
    /// share it with this process.
    pub fn hand_out(&self, offset: u64, length: u64) {
        let mut stages = self.stages.lock_unpoisoned();
        stages.hand_out(&self.window, offset, length);
    }

    /// The address of reserved space.
    pub fn pointer(&self, offset: u64, length: u64) -> Result<*mut u8, D::Status> {
        self.window.at(offset, length).ok_or(D::WINDOW_FULL)
    }

    /// Turns reserved space into a stage, which is freed when its command has completed.
    pub fn stage(&self, offset: u64, length: u64) -> WindowRange {
        self.stage_of(Stage {
            offset,
            length,
            destination: None,
            keeps_space: false,
        })
    }

    /// Turns reserved space into a stage of a command that writes to it. The space is freed when the command has
    /// completed and its data has landed.
    ///
    /// # Safety
    /// The destination must be writable until then, and must not be larger than the reserved space.
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

    /// Copies the application's memory into reserved space, for `reader` to read.
    ///
    /// # Safety
    /// The memory must be readable.
    pub unsafe fn fill(
        &self,
        offset: u64,
        from: &HostRegion,
        reader: Reader,
    ) -> Result<(), D::Status> {
        let into = self.pointer(offset, from.size() as u64)?;
        let _here = self.writers.read_unpoisoned();
        // SAFETY: the caller guarantees the memory; the window has this many bytes there.
        unsafe { from.gather(into, reader) };
        Ok(())
    }

    /// A range of reserved space that a command writes to and that stays reserved.
    pub fn mapped(&self, offset: u64, length: u64) -> WindowRange {
        // A shared window stays shared while a part of it is in use.
        if self.is_shared() {
            return WindowRange {
                offset,
                length,
                stage: None,
            };
        }
        // The release of the stage tells the bridge that the data has to be copied over.
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

    /// Creates a stage with a copy of the application's memory.
    ///
    /// # Safety
    /// The memory must be readable.
    pub unsafe fn stage_copy(&self, from: &HostRegion) -> Result<WindowRange, D::Status> {
        let length = from.size() as u64;
        let offset = self.reserve(length)?;
        // SAFETY: guaranteed by the caller.
        unsafe { self.fill(offset, from, self.reader())? };
        Ok(self.stage(offset, length))
    }

    /// Handles the worker's release of a stage, whose command has succeeded (`good`) or failed.
    pub fn released(&self, id: StageId, good: bool) {
        // The lock is held while the data lands: a thread that finds the stage released also finds its data in place.
        let mut stages = self.stages.lock_unpoisoned();
        let Some(stage) = stages.remove(id) else {
            return;
        };
        if let (true, Some(destination)) = (good, stage.destination)
            && let Some(from) = self.window.at(stage.offset, destination.size() as u64)
        {
            // SAFETY: the creator of the stage guarantees the memory until the release; the window has as many bytes
            // there as the destination has room for.
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
        // No matter how often it is called.
        assert_eq!(stages.oldest(), Some(first));
        assert_eq!(stages.oldest(), Some(first));
        assert!(stages.remove(first).is_some() && stages.remove(first).is_none());
        assert_eq!(stages.oldest(), None);
    }

    #[test]
    fn an_abandoned_stage_does_not_land_and_its_space_becomes_free() {
        let mut stages = Stages::default();
        let memory = HostRegion::flat(std::ptr::null_mut(), 1);
        let ids = [(); 2].map(|()| {
            stages.add(Stage {
                destination: Some(memory),
                keeps_space: false,
                ..stage()
            })
        });
        stages.abandon(ids[0]);
        assert!(stages.land());
        // No matter how often, and which are gone.
        for id in ids {
            stages.abandon(id);
        }
        assert!(!stages.land());
        for id in ids {
            let stage = stages.remove(id).unwrap();
            assert!(stage.destination.is_none() && !stage.keeps_space);
            stages.abandon(id);
        }
        assert!(!stages.land());
    }

    #[test]
    fn nothing_lands_once_a_read_has_ended_whatever_the_worker_says() {
        let (link, mut worker) = crate::testing::link();
        let mut memory = [1u8; 64];
        let offset = link.reserve(128).unwrap();
        let mut stage = |offset| {
            let destination = HostRegion::flat(memory.as_mut_ptr(), 64);
            // SAFETY: the memory exists until the end of the test.
            let place = unsafe { link.stage_into(offset, 64, destination) };
            place.stage.unwrap()
        };
        let [first, second] = [stage(offset), stage(offset + 64)];
        // The first has landed when the read ends; its worker only says so of the second.
        worker.release(first);
        worker.answer(1, 0);
        let read = link.ask(&crate::testing::Test::await_stage(second));
        assert_eq!(link.landed([first], read), Ok(()));
        assert_eq!(link.landed([second], read), Err(-1));
        assert_eq!(memory, [0; 64]);
        memory.fill(2);
        worker.release(second);
        link.read_pending();
        assert!(!link.is_pending(second));
        assert_eq!(memory, [2; 64]);
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
        // A stage that is no longer the oldest stays where it is.
        stages.pass_over(ids[0]);
        assert_eq!(stages.oldest(), Some(ids[1]));
    }
}
