//! Memory of the driver that a program maps comes from the program's slice: the driver gets it as descriptor memory,
//! which it pins. So the program needs no device file to map it, and every page that it shares with a device is known.

use std::os::fd::AsFd;

use base::Unpoisoned;
use nvidia_abi::status;

use crate::{
    call::{DESCRIPTOR, DESCRIPTOR_FLAGS, Made},
    check::{Denied, descriptor, long, put, word},
    files::{OpenFile, Pool},
    objects::{Object, Pages},
    session::{Session, errno},
};

/// Command words of calls that the worker makes by itself.
const MAKE_DESCRIPTOR: u32 = 0xc038_4627;
const FREE: u32 = 0xc010_4629;
const CREATE_RANGE: u32 = 0x49;
const FREE_RANGE: u32 = 0x22;
const MAP_EXTERNAL: u32 = 0x21;
/// A GPU, as an object.
const GPU: u32 = 0x80;
/// Attributes of memory: where the placement of its pages is, and the placement that is one piece.
const PLACEMENT: u32 = 27;
const CONTIGUOUS: u32 = 2;
/// The most pools of a file of unified memory.
const MOST_POOLS: usize = 64;
const PAGE: u64 = 4096;

impl Session {
    /// Descriptor memory that the program asks for: pages that it has taken before. The block has their offset.
    pub fn make_descriptor(&mut self, made: &Made<'_>, bytes: &mut [u8]) -> Result<i32, Denied> {
        let [client, parent, _, class, flags] = [0, 4, 8, 12, 16].map(|at| word(bytes, at));
        let (offset, last) = (long(bytes, 24), long(bytes, 32));
        if class != DESCRIPTOR {
            return Err(Denied::Status(status::INVALID_CLASS));
        }
        let length = last
            .checked_add(1)
            .filter(|_| DESCRIPTOR_FLAGS.contains(&flags) && offset.is_multiple_of(PAGE));
        let address = length.and_then(|length| self.slice().address(offset, length));
        let (Some(length), Some(address)) = (length, address) else {
            return Err(Denied::Status(status::INVALID_ARGUMENT));
        };
        self.check_room(client)?;
        put(bytes, 24, (address as u64).to_le_bytes());
        let result = self.issue(made, bytes);
        put(bytes, 24, offset.to_le_bytes());
        let result = result?;
        if result == 0 && word(bytes, 40) == status::OK {
            let slice = self.slice().clone();
            let pages = Pages {
                slice,
                offset,
                length,
                is_ours: false,
            };
            self.note_memory(client, word(bytes, 8), parent, DESCRIPTOR, Some(pages));
        }
        Ok(result)
    }

    /// System memory of the driver: pages of the slice.
    pub fn make_system(&mut self, made: &Made<'_>, bytes: &mut [u8]) -> Result<i32, Denied> {
        let [client, parent, handle, class] = [0, 4, 8, 12].map(|at| word(bytes, at));
        let block = made
            .call
            .inner_block()
            .ok_or(Denied::Status(status::INVALID_ARGUMENT))?
            .start;
        let length = long(bytes, block + 64)
            .checked_next_multiple_of(PAGE)
            .filter(|length| *length > 0);
        let length = length
            .filter(|_| handle != 0)
            .ok_or(Denied::Status(status::INVALID_ARGUMENT))?;
        // Pages of a file are in no order.
        if word(bytes, block + 24) >> PLACEMENT & 3 == CONTIGUOUS && length > PAGE {
            return Err(Denied::Status(status::INSUFFICIENT_RESOURCES));
        }
        let pages = self.describe(client, parent, handle, length)?;
        self.note_memory(client, handle, parent, class, Some(pages));
        put(bytes, block + 64, length.to_le_bytes());
        put(bytes, block + 88, (length - 1).to_le_bytes());
        Err(Denied::Status(status::OK))
    }

    /// Video memory that a program maps before anything else uses it: the driver's programs keep the state of channels
    /// there. Pages of the slice take its place under the same handle.
    pub fn replace_video(&mut self, client: u32, handle: u32) -> Result<Pages, Denied> {
        let mut objects = self.worker().objects.lock_unpoisoned();
        let object = objects
            .client(client)
            .and_then(|client| client.object(handle));
        let object = object
            .filter(|object| object.is_fresh)
            .ok_or(Denied::Status(status::NOT_SUPPORTED))?;
        let (parent, class, size) = (object.parent, object.class, object.size);
        drop(objects);
        let length = size
            .checked_next_multiple_of(PAGE)
            .filter(|length| *length > 0);
        let length = length.ok_or(Denied::Status(status::NOT_SUPPORTED))?;
        let status = self.free_object(client, parent, handle)?;
        if status != status::OK {
            return Err(Denied::Status(status));
        }
        let gone = self
            .worker()
            .objects
            .lock_unpoisoned()
            .remove(client, handle);
        gone.into_iter().for_each(Pages::release);
        let pages = self.describe(client, parent, handle, length)?;
        self.note_memory(client, handle, parent, class, Some(pages.clone()));
        Ok(pages)
    }

    /// A semaphore pool of unified memory: an external range over pages of the slice.
    pub fn make_pool(&mut self, made: &Made<'_>, bytes: &mut [u8]) -> Result<i32, Denied> {
        let (base, length) = (long(bytes, 0), long(bytes, 8));
        let left = made.file.left();
        let client = left
            .spaces
            .last()
            .copied()
            .filter(|_| left.pools.len() < MOST_POOLS);
        let client = client.ok_or(Denied::Status(status::NOT_SUPPORTED))?;
        drop(left);
        if length == 0 || !base.is_multiple_of(PAGE) || !length.is_multiple_of(PAGE) {
            return Err(Denied::Status(status::INVALID_ARGUMENT));
        }
        let mut objects = self.worker().objects.lock_unpoisoned();
        let known = objects
            .client(client)
            .filter(|client| self.has(client.file));
        let known = known
            .and_then(|client| Some((client.file, client.of_class(GPU)?, client.free_handle()?)));
        drop(objects);
        let (control, gpu, handle) = known.ok_or(Denied::Status(status::INVALID_CLIENT))?;
        self.check_room(client)?;
        let control = self
            .file(control)
            .ok_or(Denied::Status(status::INVALID_CLIENT))?;
        let pages = self.describe(client, gpu, handle, length)?;

        let mut range = [0; 24];
        put(&mut range, 0, base.to_le_bytes());
        put(&mut range, 8, length.to_le_bytes());
        let mut mapping = [0; 9264];
        mapping[..16].copy_from_slice(&range[..16]);
        // For each GPU how it is mapped, and their number: the same in both blocks, at other offsets.
        mapping[24..24 + 9216 + 8].copy_from_slice(&bytes[16..16 + 9216 + 8]);
        put(&mut mapping, 9248, descriptor(&control).to_le_bytes());
        put(&mut mapping, 9252, client.to_le_bytes());
        put(&mut mapping, 9256, handle.to_le_bytes());
        let mut status = self.by_itself(made.file, CREATE_RANGE, &mut range, 16)?;
        if status == status::OK {
            status = self.by_itself(made.file, MAP_EXTERNAL, &mut mapping, 9260)?;
            if status != status::OK {
                put(&mut range, 16, 0u32.to_le_bytes());
                self.by_itself(made.file, FREE_RANGE, &mut range, 16)?;
            }
        }
        if status != status::OK {
            self.free_object(client, gpu, handle)?;
            pages.release();
            return Err(Denied::Status(status));
        }
        self.note_memory(client, handle, gpu, DESCRIPTOR, None);
        made.file.left().pools.push(Pool {
            base,
            pages,
            object: (client, handle),
        });
        Err(Denied::Status(status::OK))
    }

    /// Frees a range of addresses of unified memory, and what was made for it.
    pub fn free_range(&mut self, made: &Made<'_>, bytes: &mut [u8]) -> Result<i32, Denied> {
        let base = long(bytes, 0);
        let result = self.issue(made, bytes)?;
        if result != 0 || word(bytes, 16) != status::OK {
            return Ok(result);
        }
        let mut left = made.file.left();
        let pool = left.pools.iter().position(|pool| pool.base == base);
        let pool = pool.map(|at| left.pools.swap_remove(at));
        drop(left);
        if let Some(Pool {
            pages,
            object: (client, handle),
            ..
        }) = pool
        {
            let mut objects = self.worker().objects.lock_unpoisoned();
            let parent = objects
                .client(client)
                .and_then(|client| Some(client.object(handle)?.parent));
            drop(objects);
            if let Some(parent) = parent {
                self.free_object(client, parent, handle)?;
                self.worker()
                    .objects
                    .lock_unpoisoned()
                    .remove(client, handle);
            }
            pages.release();
        }
        Ok(result)
    }

    /// Takes pages of the slice, and has the driver pin them as descriptor memory.
    fn describe(
        &self,
        client: u32,
        parent: u32,
        handle: u32,
        length: u64,
    ) -> Result<Pages, Denied> {
        let control = self
            .worker()
            .objects
            .lock_unpoisoned()
            .client(client)
            .map(|client| client.file);
        let control = control.ok_or(Denied::Status(status::INVALID_CLIENT))?;
        let gpu = self.worker().files.lock_unpoisoned().gpu_of(control);
        let gpu = gpu.ok_or(Denied::Status(status::NOT_SUPPORTED))?;
        let offset = self
            .slice()
            .take(length)
            .ok_or(Denied::Status(status::NO_MEMORY))?;
        let pages = Pages {
            slice: self.slice().clone(),
            offset,
            length,
            is_ours: true,
        };
        let address = self
            .slice()
            .address(offset, length)
            .map_or(0, |address| address as u64);
        let mut block = [0; 56];
        for (at, word) in [
            (0, client),
            (4, parent),
            (8, handle),
            (12, DESCRIPTOR),
            (16, DESCRIPTOR_FLAGS[0]),
        ] {
            put(&mut block, at, word.to_le_bytes());
        }
        put(&mut block, 24, address.to_le_bytes());
        put(&mut block, 32, (length - 1).to_le_bytes());
        put(&mut block, 48, (-1i32).to_le_bytes());
        let status = self.by_itself(&gpu, MAKE_DESCRIPTOR, &mut block, 40);
        match status {
            Ok(status::OK) => Ok(pages),
            failed => {
                pages.release();
                Err(Denied::Status(failed?))
            }
        }
    }

    fn free_object(&self, client: u32, parent: u32, handle: u32) -> Result<u32, Denied> {
        let control = self
            .worker()
            .objects
            .lock_unpoisoned()
            .client(client)
            .map(|client| client.file);
        let control = control.and_then(|control| self.file(control));
        let control = control.ok_or(Denied::Status(status::INVALID_CLIENT))?;
        let mut block = [0; 16];
        for (at, word) in [(0, client), (4, parent), (8, handle)] {
            put(&mut block, at, word.to_le_bytes());
        }
        self.by_itself(&control, FREE, &mut block, 12)
    }

    /// Makes a call of the worker's own, whose block has no pointers and its status at `status_at`.
    fn by_itself(
        &self,
        file: &OpenFile,
        command: u32,
        block: &mut [u8],
        status_at: usize,
    ) -> Result<u32, Denied> {
        // SAFETY: each command here has the size of the array that its caller passes, and no pointer but one to pages
        // of the slice, which stay mapped.
        let result = unsafe {
            self.worker()
                .device
                .call(file.device().as_fd(), command, block.as_mut_ptr())
        };
        result.map_err(|error| Denied::Errno(errno(error)))?;
        Ok(word(block, status_at))
    }

    fn note_memory(&self, client: u32, handle: u32, parent: u32, class: u32, pages: Option<Pages>) {
        let size = pages.as_ref().map_or(0, |pages| pages.length);
        let object = Object {
            parent,
            class,
            size,
            is_fresh: false,
            pages,
        };
        let gone = self
            .worker()
            .objects
            .lock_unpoisoned()
            .add(client, handle, object);
        gone.into_iter().for_each(Pages::release);
    }
}
