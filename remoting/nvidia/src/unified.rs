//! Ranges of unified memory over pages of the slice. The driver would map such a range at the program's address in the
//! process that makes the call, which is the worker. So it gets an external range instead, at the same address of each
//! GPU, over descriptor memory. Managed memory is such a range, too: it stays where it is, and GPUs reach it there.

use std::sync::atomic::{AtomicU32, Ordering};

use base::Unpoisoned;
use nvidia_abi::status;

use crate::{
    call::{DESCRIPTOR, Made},
    check::{Denied, descriptor, long, put, word},
    convert::PAGE,
    files::{Attributes, OpenFile, Reached, SharedRange, Space, Uuid},
    objects::Pages,
    session::Session,
};

/// Commands on the file of unified memory that the worker makes by itself.
const CREATE_RANGE: u32 = 0x49;
const FREE_RANGE: u32 = 0x22;
const MAP_EXTERNAL: u32 = 0x21;
const UNREGISTER_SPACE: u32 = 0x1a;
/// Commands on managed memory that are answered here.
const SET_GROUP: u32 = 0x1f;
const MIGRATE: u32 = 0x33;
/// A GPU, as an object.
const GPU: u32 = 0x80;
/// Where a pool has its attributes by GPU, and their number.
const ATTRIBUTES: usize = 16;
const ATTRIBUTES_COUNT: usize = 9232;
/// The most GPUs of a call.
const MOST_GPUS: u64 = 256;
/// The most ranges, and the most address spaces, of a file of unified memory.
const MOST_RANGES: usize = 4096;
const MOST_SPACES: usize = 64;

/// The identifier at the start of some bytes.
fn uuid(bytes: &[u8]) -> Uuid {
    bytes.first_chunk().copied().unwrap_or_default()
}

impl Session {
    /// Registers a GPU's address space with a file of unified memory. The GPU maps the ranges that are there already.
    pub fn register_space(&mut self, made: &Made<'_>, bytes: &mut [u8]) -> Result<i32, Denied> {
        let (gpu, client, space) = (uuid(bytes), word(bytes, 20), word(bytes, 24));
        let mut objects = self.worker().objects.lock_unpoisoned();
        let device = objects.client(client).and_then(|client| {
            let parent = client.object(space)?.parent;
            let is_gpu = client
                .object(parent)
                .is_some_and(|parent| parent.class == GPU);
            if is_gpu {
                Some(parent)
            } else {
                client.of_class(GPU)
            }
        });
        drop(objects);
        let left = made.file.left();
        if left.spaces.len() >= MOST_SPACES && left.spaces.iter().all(|known| known.gpu != gpu) {
            return Err(Denied::Status(status::INSUFFICIENT_RESOURCES));
        }
        drop(left);
        let result = self.issue(made, bytes)?;
        let Some(device) = device.filter(|_| Self::is_done(made, result, bytes)) else {
            return Ok(result);
        };
        let space = Space {
            gpu,
            client,
            device,
        };
        let mut left = made.file.left();
        left.spaces.retain(|known| known.gpu != gpu);
        left.spaces.push(space);
        let ranges = left.ranges.clone();
        drop(left);
        for range in &ranges {
            if let Err(denied) = self.extend(made.file, space, range) {
                let mut block = [0; 20];
                put(&mut block, 0, gpu);
                let undone = self.by_itself(made.file, UNREGISTER_SPACE, &mut block, 16);
                self.forget_gpu(made.file, gpu);
                return Err(undone.err().unwrap_or(denied));
            }
        }
        Ok(result)
    }

    /// Unregisters a GPU, or its address space.
    pub fn unregister(&mut self, made: &Made<'_>, bytes: &mut [u8]) -> Result<i32, Denied> {
        let result = self.issue(made, bytes)?;
        if Self::is_done(made, result, bytes) {
            self.forget_gpu(made.file, uuid(bytes));
        }
        Ok(result)
    }

    /// A GPU does not map any range of a file any longer.
    fn forget_gpu(&self, file: &OpenFile, gpu: Uuid) {
        let mut left = file.left();
        left.spaces.retain(|known| known.gpu != gpu);
        left.external.forget(gpu);
        let mut gone = Vec::new();
        for range in &mut left.ranges {
            gone.extend(range.reached.extract_if(.., |known| known.gpu == gpu));
        }
        drop(left);
        gone.into_iter().for_each(|known| self.let_go(known));
    }

    /// A semaphore pool.
    pub fn make_pool(&mut self, made: &Made<'_>, bytes: &mut [u8]) -> Result<i32, Denied> {
        let (base, length) = (long(bytes, 0), long(bytes, 8));
        let count = long(bytes, ATTRIBUTES_COUNT);
        if count > MOST_GPUS {
            return Err(Denied::Status(status::INVALID_ARGUMENT));
        }
        let listed = bytes[ATTRIBUTES..ATTRIBUTES_COUNT].chunks_exact(size_of::<Attributes>());
        // They are as many as fit.
        let listed = listed.filter_map(|listed| listed.first_chunk().copied());
        let listed: Vec<Attributes> = listed.take(count as usize).collect();
        let of_space = |space: &Space| {
            let mut of_gpu = listed.iter().filter(|known| uuid(&known[..]) == space.gpu);
            of_gpu.next().copied()
        };
        let attributes = made
            .file
            .left()
            .spaces
            .iter()
            .filter_map(of_space)
            .collect();
        self.share(made.file, base, length, attributes, false)?;
        Err(Denied::Status(status::OK))
    }

    /// Managed memory, as it comes to be when a program maps a file of unified memory at `base`. Answers where it is in
    /// the slice.
    pub fn make_managed(&self, file: &OpenFile, base: u64, length: u64) -> Result<u64, Denied> {
        let length = length.checked_next_multiple_of(PAGE);
        let length = length.ok_or(Denied::Status(status::INVALID_ARGUMENT))?;
        self.share(file, base, length, Vec::new(), true)
    }

    /// Advice on managed memory. It has one place only.
    pub fn advise(&mut self, made: &Made<'_>, bytes: &mut [u8]) -> Result<i32, Denied> {
        let number = made.call.number;
        let at = if number == SET_GROUP { 8 } else { 0 };
        let (base, length) = (long(bytes, at), long(bytes, at + 8));
        let left = made.file.left();
        let place = |address: u64, length: u64, is_managed: bool| {
            let ranges = left.ranges.iter();
            let mut kind = ranges.filter(|range| range.is_managed == is_managed);
            kind.find_map(|range| Some((range.place(address, length)?, &range.pages)))
        };
        if place(base, length, true).is_none() {
            drop(left);
            return match number {
                // Of pages elsewhere the driver would look at those of this process.
                MIGRATE => Err(Denied::Status(status::INVALID_ADDRESS)),
                _ => self.issue(made, bytes),
            };
        }
        let (semaphore, payload) = (long(bytes, 40), word(bytes, 48));
        if number == MIGRATE && semaphore != 0 {
            let width = size_of::<u32>() as u64;
            let place = place(semaphore, width, false).filter(|_| semaphore.is_multiple_of(width));
            let address =
                place.and_then(|(place, pages)| pages.slice.address(pages.offset + place, width));
            let address = address.ok_or(Denied::Status(status::INVALID_ADDRESS))?;
            // SAFETY: the word lies in the slice, which stays mapped, and is aligned. The program writes it by atomic
            // instructions or not at all.
            unsafe { AtomicU32::from_ptr(address.cast()) }.store(payload, Ordering::Release);
        }
        Err(Denied::Status(status::OK))
    }

    /// Has all GPUs of a file map new pages of the slice at a program's address. Answers where they are in the slice.
    fn share(
        &self,
        file: &OpenFile,
        base: u64,
        length: u64,
        attributes: Vec<Attributes>,
        is_managed: bool,
    ) -> Result<u64, Denied> {
        let left = file.left();
        let spaces = left.spaces.clone();
        let has_room = left.ranges.len() < MOST_RANGES;
        drop(left);
        if spaces.is_empty() || !has_room {
            return Err(Denied::Status(status::NOT_SUPPORTED));
        }
        let is_whole = base.is_multiple_of(PAGE) && length.is_multiple_of(PAGE);
        if length == 0 || !is_whole || base.checked_add(length).is_none() {
            return Err(Denied::Status(status::INVALID_ARGUMENT));
        }
        let mut range = SharedRange {
            base,
            pages: self.take(length)?,
            is_managed,
            attributes,
            reached: Vec::new(),
        };
        if let Err(denied) = self.range_call(file, CREATE_RANGE, &range) {
            range.pages.release();
            return Err(denied);
        }
        for space in spaces {
            match self.reach(file, space, &range) {
                Ok(reached) => range.reached.push(reached),
                Err(denied) => {
                    // The pages stay taken if a GPU may still map them.
                    let freed = self.range_call(file, FREE_RANGE, &range);
                    range.reached.drain(..).for_each(|known| self.let_go(known));
                    if freed.is_ok() {
                        range.pages.release();
                    }
                    return Err(denied);
                }
            }
        }
        let offset = range.pages.offset;
        let mut left = file.left();
        if left.is_closed {
            drop(left);
            // The range goes with the file.
            range.reached.drain(..).for_each(|known| self.let_go(known));
            range.pages.release();
            return Err(Denied::Errno(libc::EBADF));
        }
        left.ranges.push(range);
        Ok(offset)
    }

    fn range_call(&self, file: &OpenFile, command: u32, range: &SharedRange) -> Result<(), Denied> {
        let mut block = [0; 24];
        put(&mut block, 0, range.base.to_le_bytes());
        put(&mut block, 8, range.pages.length.to_le_bytes());
        self.by_itself(file, command, &mut block, 16)
    }

    /// Has a GPU map a range that is there.
    fn extend(&self, file: &OpenFile, space: Space, range: &SharedRange) -> Result<(), Denied> {
        if range.reached.iter().any(|known| known.gpu == space.gpu) {
            return Ok(());
        }
        let reached = self.reach(file, space, range)?;
        let mut left = file.left();
        let is_same = |known: &&mut SharedRange| {
            known.base == range.base && known.pages.offset == range.pages.offset
        };
        let Some(known) = left.ranges.iter_mut().find(is_same) else {
            // Another program has freed it meanwhile.
            drop(left);
            self.let_go(reached);
            return Ok(());
        };
        known.reached.push(reached);
        Ok(())
    }

    /// Has the driver pin the pages of a range for a GPU, and map them.
    fn reach(&self, file: &OpenFile, space: Space, range: &SharedRange) -> Result<Reached, Denied> {
        let Space {
            gpu,
            client,
            device,
        } = space;
        self.check_room(client)?;
        let mut objects = self.worker().objects.lock_unpoisoned();
        let known = objects
            .client(client)
            .and_then(|client| Some((self.file(client.file)?, client.free_handle()?)));
        drop(objects);
        let (control, object) = known.ok_or(Denied::Status(status::INVALID_CLIENT))?;
        self.pin(client, device, object, &range.pages)?;
        // It is freed with the client at the latest, and so are the pages, even if the file is closed before.
        self.note_memory(client, object, device, DESCRIPTOR, range.pages.share());
        let reached = Reached {
            gpu,
            client,
            object,
        };
        let mut mapping = [0; 9264];
        put(&mut mapping, 0, range.base.to_le_bytes());
        put(&mut mapping, 8, range.pages.length.to_le_bytes());
        // The rest of what is not listed is the driver's choice: 0.
        let listed = range
            .attributes
            .iter()
            .find(|known| uuid(&known[..]) == gpu);
        put(&mut mapping, 24, gpu);
        if let Some(listed) = listed {
            put(&mut mapping, 24, *listed);
        }
        put(&mut mapping, 9240, 1u64.to_le_bytes());
        put(&mut mapping, 9248, descriptor(&control).to_le_bytes());
        put(&mut mapping, 9252, client.to_le_bytes());
        put(&mut mapping, 9256, object.to_le_bytes());
        let mapped = self.by_itself(file, MAP_EXTERNAL, &mut mapping, 9260);
        if let Err(denied) = mapped {
            self.let_go(reached);
            return Err(denied);
        }
        Ok(reached)
    }

    /// Frees what a GPU knows the pages of a range by.
    fn let_go(&self, reached: Reached) {
        let Reached { client, object, .. } = reached;
        let mut objects = self.worker().objects.lock_unpoisoned();
        let parent = objects
            .client(client)
            .and_then(|client| Some(client.object(object)?.parent));
        drop(objects);
        // One that is gone was freed with its client or its GPU. One that the driver keeps is freed like that later.
        if let Some(parent) = parent
            && self.free_object(client, parent, object).is_ok()
        {
            let mut objects = self.worker().objects.lock_unpoisoned();
            let gone = objects.remove(client, object);
            drop(objects);
            gone.into_iter().for_each(Pages::release);
        }
    }

    /// Frees a range of addresses, and what was made for it.
    pub fn free_range(&mut self, made: &Made<'_>, bytes: &mut [u8]) -> Result<i32, Denied> {
        let base = long(bytes, 0);
        let result = self.issue(made, bytes)?;
        if !Self::is_done(made, result, bytes) {
            return Ok(result);
        }
        made.file.left().external.free(base);
        let mut left = made.file.left();
        let at = left.ranges.iter().position(|range| range.base == base);
        let range = at.map(|at| left.ranges.swap_remove(at));
        drop(left);
        if let Some(SharedRange { pages, reached, .. }) = range {
            reached.into_iter().for_each(|known| self.let_go(known));
            pages.release();
        }
        Ok(result)
    }
}
