//! Memory of the driver that a program maps comes from the program's slice: the driver gets it as descriptor memory,
//! which it pins. So the program needs no device file to map it, and every page that it shares with a device is known.

use std::{os::fd::AsFd, sync::Arc};

use base::Unpoisoned;
use nvidia_abi::status;

use crate::{
    call::{DESCRIPTOR, DESCRIPTOR_FLAGS, Made},
    check::{Denied, long, put, word},
    files::OpenFile,
    lent,
    objects::{FOREIGN, Object, Pages},
    session::{Session, errno},
    slice::Holder,
};

/// Command words of calls that the worker makes by itself.
const MAKE_DESCRIPTOR: u32 = 0xc038_4627;
const FREE: u32 = 0xc010_4629;
/// Attributes of memory: where the placement of its pages is, and the placement that is one piece.
const PLACEMENT: u32 = 27;
const CONTIGUOUS: u32 = 2;
pub const PAGE: u64 = 4096;

impl Session {
    /// Descriptor memory that the program asks for: pages that it has taken before, or of a file that it lends. The block
    /// has their offset.
    pub fn make_descriptor(&mut self, made: &Made<'_>, bytes: &mut [u8]) -> Result<i32, Denied> {
        let [client, parent, handle, class, flags] = [0, 4, 8, 12, 16].map(|at| word(bytes, at));
        let (offset, last) = (long(bytes, 24), long(bytes, 32));
        if class != DESCRIPTOR {
            return Err(Denied::Status(status::INVALID_CLASS));
        }
        let length = last
            .checked_add(1)
            .filter(|_| DESCRIPTOR_FLAGS.contains(&flags) && offset.is_multiple_of(PAGE));
        self.check_room(client)?;
        let length = length.ok_or(Denied::Status(status::INVALID_ARGUMENT))?;
        let (pages, mapping) = match made.lent {
            Some(file) => {
                let mapping = lent::map(file, offset, length);
                let mapping = mapping.map_err(|_| Denied::Status(status::NOT_SUPPORTED))?;
                // It counts as much as pages of the slice, of which none is touched.
                (self.take(length)?, Some(mapping))
            }
            // They stay taken while the driver has them, even if the program returns them.
            None => {
                let pages = Pages::of(self.slice(), offset, length);
                (pages.ok_or(Denied::Status(status::INVALID_ARGUMENT))?, None)
            }
        };
        let address = match &mapping {
            Some(mapping) => Some(mapping.start()),
            None => pages.slice.address(offset, pages.length),
        };
        let address = address.map_or(0, |address| address as u64);
        // The driver has the pages of a file when the call returns. The mapping ends here.
        let class = if mapping.is_some() {
            FOREIGN
        } else {
            DESCRIPTOR
        };
        let mut issue = || {
            put(bytes, 24, address.to_le_bytes());
            let result = self.issue(made, bytes);
            put(bytes, 24, offset.to_le_bytes());
            let is_done = matches!(result, Ok(0)) && word(bytes, 40) == status::OK;
            (result, is_done)
        };
        if handle != 0 {
            return self.beside_order([client, parent, handle, class], pages, issue);
        }
        // The driver chooses one. This is in the order of calls.
        let (result, is_done) = issue();
        if is_done {
            self.note_memory(client, word(bytes, 8), parent, class, Some(pages));
        } else {
            pages.release();
        }
        result
    }

    /// Makes memory of these pages outside of the order of calls, in which others free: its handle is neither another's
    /// nor being made, and what the driver has freed under it is noted as that.
    fn beside_order<T>(
        &self,
        [client, parent, handle, class]: [u32; 4],
        pages: Pages,
        issue: impl FnOnce() -> (Result<T, Denied>, bool),
    ) -> Result<T, Denied> {
        let objects = &self.worker().objects;
        let making = objects.lock_unpoisoned().begin(client, handle, parent);
        let Some(making) = making else {
            pages.release();
            return Err(Denied::Status(status::INVALID_ARGUMENT));
        };
        let (result, is_done) = issue();
        if is_done {
            let object = memory(parent, class, Some(pages));
            objects.lock_unpoisoned().finish(&making, Some(object));
        } else {
            objects.lock_unpoisoned().finish(&making, None);
            pages.release();
        }
        result
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
        let pages = self.take(length)?;
        self.beside_order([client, parent, handle, class], pages.clone(), || {
            let result = self.pin(client, parent, handle, &pages);
            let is_done = result.is_ok();
            (result, is_done)
        })?;
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
        // What can be missing is looked for before the object is freed.
        self.gpu_of(client)?;
        let pages = self.take(length)?;
        if let Err(denied) = self.free_object(client, parent, handle) {
            pages.release();
            return Err(denied);
        }
        let gone = self
            .worker()
            .objects
            .lock_unpoisoned()
            .remove(client, handle);
        gone.into_iter().for_each(Pages::release);
        if let Err(denied) = self.pin(client, parent, handle, &pages) {
            pages.release();
            return Err(denied);
        }
        self.note_memory(client, handle, parent, class, Some(pages.clone()));
        Ok(pages)
    }

    /// Takes zeroed pages of the slice.
    pub fn take(&self, length: u64) -> Result<Pages, Denied> {
        let offset = self.slice().take(length, Holder::Object);
        let offset = offset.ok_or(Denied::Status(status::NO_MEMORY))?;
        Ok(Pages {
            slice: self.slice().clone(),
            offset,
            length,
        })
    }

    /// Has the driver pin pages as descriptor memory.
    pub fn pin(&self, client: u32, parent: u32, handle: u32, pages: &Pages) -> Result<(), Denied> {
        let gpu = self.gpu_of(client)?;
        let address = pages.slice.address(pages.offset, pages.length);
        let address = address.ok_or(Denied::Status(status::NO_MEMORY))? as u64;
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
        put(&mut block, 32, (pages.length - 1).to_le_bytes());
        put(&mut block, 48, (-1i32).to_le_bytes());
        self.by_itself(&gpu, MAKE_DESCRIPTOR, &mut block, 40)
    }

    /// A GPU's file that was registered with the control file of a client. For descriptor memory any GPU's will do: the
    /// object that contains it says which GPU it is for.
    fn gpu_of(&self, client: u32) -> Result<Arc<OpenFile>, Denied> {
        let control = self.control_of(client)?;
        let gpu = self.worker().files.lock_unpoisoned().gpu_of(control);
        gpu.ok_or(Denied::Status(status::NOT_SUPPORTED))
    }

    /// The number of the control file of a client.
    fn control_of(&self, client: u32) -> Result<u32, Denied> {
        let mut objects = self.worker().objects.lock_unpoisoned();
        let control = objects.client(client).map(|client| client.file);
        control.ok_or(Denied::Status(status::INVALID_CLIENT))
    }

    pub fn free_object(&self, client: u32, parent: u32, handle: u32) -> Result<(), Denied> {
        let control = self.file(self.control_of(client)?);
        let control = control.ok_or(Denied::Status(status::INVALID_CLIENT))?;
        let mut block = [0; 16];
        for (at, word) in [(0, client), (4, parent), (8, handle)] {
            put(&mut block, at, word.to_le_bytes());
        }
        self.by_itself(&control, FREE, &mut block, 12)
    }

    /// Makes a call of the worker's own, whose block has no pointers and its status at `status_at`.
    pub fn by_itself(
        &self,
        file: &OpenFile,
        command: u32,
        block: &mut [u8],
        status_at: usize,
    ) -> Result<(), Denied> {
        // SAFETY: each command that is made like this has the size of the array that its caller passes, and no pointer
        // but one to pages of a slice, which stay mapped.
        let result = unsafe {
            self.worker()
                .device
                .call(file.device().as_fd(), command, block.as_mut_ptr())
        };
        result.map_err(|error| Denied::Errno(errno(error)))?;
        match word(block, status_at) {
            status::OK => Ok(()),
            failed => Err(Denied::Status(failed)),
        }
    }

    pub fn note_memory(
        &self,
        client: u32,
        handle: u32,
        parent: u32,
        class: u32,
        pages: Option<Pages>,
    ) {
        let object = memory(parent, class, pages);
        let gone = self
            .worker()
            .objects
            .lock_unpoisoned()
            .add(client, handle, object);
        gone.into_iter().for_each(Pages::release);
    }
}

fn memory(parent: u32, class: u32, pages: Option<Pages>) -> Object {
    Object {
        parent,
        class,
        size: pages.as_ref().map_or(0, |pages| pages.length),
        is_fresh: false,
        is_shared: false,
        pages,
        charge: None,
    }
}
