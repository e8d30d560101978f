//! A call: the walk, the checks, the call itself, what is remembered and restored.

use std::{
    collections::HashSet,
    os::fd::OwnedFd,
    sync::{Arc, LazyLock, Mutex},
};

use base::{Unpoisoned, note};
use nvidia_abi::{Call, Kind, Listed, Meaning, Refusal, Source, status, walk};

use crate::{
    check::{Denied, check, long, put, word},
    device::Node,
    files::{OpenFile, View},
    objects::{FOREIGN, Mapped, Object, Pages},
    quota::{self, Charge, MEMORY_INFO},
    session::{Errno, Session, errno},
};

/// The escape that makes descriptor memory.
const MAKE_DESCRIPTOR: u32 = 0x27;
/// Classes of root clients.
const ROOTS: [u32; 3] = [0, 1, 0x41];
/// System memory.
const SYSTEM: u32 = 0x3e;
/// An address space of a GPU: the first that a context creates.
const ADDRESS_SPACE: u32 = 0x90f1;
/// Video memory.
pub const VIDEO: u32 = 0x40;
/// Descriptor memory.
pub const DESCRIPTOR: u32 = 0x71;
/// The page of data that the driver shares with all programs. They read it.
const SHARED_DATA: u32 = 0xde;
/// Doorbells of each generation, and that page.
const DEVICE_PAGES: [u32; 5] = [0xc361, 0xc461, 0xc561, 0xc661, SHARED_DATA];
/// Flags of descriptor memory: the program's own pages, in no order, cached, not mapped by the driver; for 8 MiB and
/// more, with a further one.
pub const DESCRIPTOR_FLAGS: [u32; 2] = [0x4000_1010, 0x4004_1010];
/// A policy of sharing: who may duplicate a client's objects.
const SHARE_POLICY: u32 = 0xd04;
/// Where a policy has its type; the type that stands for nobody, and that for the process that makes the calls.
const SHARE_TYPE_AT: usize = 8;
pub const SHARE_NOBODY: u16 = 0;
pub const SHARE_PROCESS: u16 = 4;
/// How the kernels of a context are interrupted: where that is said, and at any instruction (CILP); and the flag without
/// which the driver does not look at it.
const PREEMPTION: u32 = 0x2080_1210;
const PREEMPTION_AT: usize = 12;
const PREEMPTED_ANYWHERE: u32 = 2;
const SETS_PREEMPTION: u32 = 1;
/// The command word of control calls.
const CONTROL_CALL: u32 = 0xc020_462a;
/// The time slice of a channel group.
const SET_TIMESLICE: u32 = 0xa06c_0103;
/// Objects to a file, and from one; the processes that use a GPU.
const EXPORT: u32 = 0x3d0b;
const IMPORT: u32 = 0x3d0c;
/// Where an export has its objects; their number, and the place of the first in the file.
const EXPORTED_AT: usize = 76;
const EXPORT_COUNT_AT: usize = 2124;
const PROCESSES: u32 = 0x2080_018d;
/// The flag that lets other processes than the one that opened a file of unified memory use it.
const SHARED_UVM: u64 = 2;

/// The bytes of a call as they were delivered.
struct Delivered<'a> {
    bytes: &'a [u8],
    taken: usize,
}

impl Source for Delivered<'_> {
    fn take(&mut self, _: u64, length: usize) -> Result<(), Refusal> {
        let end = self.taken.checked_add(length).ok_or(Refusal::Malformed)?;
        self.bytes.get(..end).ok_or(Refusal::Malformed)?;
        self.taken = end;
        Ok(())
    }

    fn bytes(&self) -> &[u8] {
        &self.bytes[..self.taken]
    }
}

/// A call on its way.
pub struct Made<'a> {
    /// The file that it is for.
    pub file: &'a Arc<OpenFile>,
    /// Its command word.
    pub command: u32,
    /// What the walk found.
    pub call: &'a Call,
    /// Files that it names.
    pub named: Vec<Arc<OpenFile>>,
    /// The file of shared memory that came along.
    pub lent: Option<&'a OwnedFd>,
}

impl Session {
    /// Makes a call, whose segments are replaced by the answer's.
    pub fn call(
        &mut self,
        file: &Arc<OpenFile>,
        command: u32,
        argument: u64,
        lent: Option<&OwnedFd>,
        bytes: &mut [u8],
    ) -> Result<i32, Errno> {
        let mut delivered = Delivered { bytes, taken: 0 };
        let branch = self.worker().branch;
        let call =
            walk(branch, file.node.kind(), command, argument, &mut delivered).map_err(refused)?;
        if delivered.taken != bytes.len() {
            return Err(libc::EINVAL);
        }
        if lent.is_some() && (call.kind(), call.number) != (Kind::Frontend, MAKE_DESCRIPTOR) {
            return Err(libc::EINVAL);
        }
        let sent = bytes.to_vec();
        let made = check(self, &call, bytes).map(|named| Made {
            file,
            command,
            call: &call,
            named,
            lent,
        });
        let result = made.and_then(|made| self.make(&made, bytes));
        let result = match (result, call.status_at()) {
            (Err(Denied::Status(status)), Some(at)) => {
                put(bytes, at, status.to_le_bytes());
                Ok(0)
            }
            (Err(Denied::Status(_)), None) => Err(libc::EINVAL),
            (Err(Denied::Errno(error)), _) => Err(error),
            (Ok(result), _) => Ok(result),
        };
        restore(&call, bytes, &sent);
        if let Some(record) = &self.worker().record {
            record.call(
                file.number,
                &call,
                result,
                call.status_at().map(|at| word(bytes, at)),
            );
        }
        result
    }

    fn make(&mut self, made: &Made<'_>, bytes: &mut [u8]) -> Result<i32, Denied> {
        let order = self.worker().order.clone();
        let ordered = changes_memory(made.call, bytes).then(|| order.lock_unpoisoned());
        let is_open = || {
            let files = self.worker().files.lock_unpoisoned();
            files.get(made.file.number).is_some()
        };
        // What is noted of a file that is being closed would stay for ever.
        if ordered.is_some() && !is_open() {
            return Err(Denied::Errno(libc::EBADF));
        }
        match (made.call.kind(), made.call.number) {
            (Kind::Frontend, MAKE_DESCRIPTOR) => self.make_descriptor(made, bytes),
            (Kind::Frontend, 0x29) => self.free(made, bytes),
            (Kind::Frontend, 0x2a) => self.control(made, bytes),
            (Kind::Frontend, 0x2b) => self.allocate(made, bytes),
            (Kind::Frontend, 0x34) => self.duplicate(made, bytes),
            (Kind::Frontend, 0x35) => self.share_object(made, bytes),
            (Kind::Frontend, 0x4e) => self.map(made, bytes),
            (Kind::Frontend, 0x4f) => self.unmap(made, bytes),
            (Kind::Frontend, 0x5e) => self.moved(bytes),
            (Kind::Frontend, 201) => self.register(made, bytes),
            (Kind::Frontend, 206) => self.add_event(made, bytes),
            (Kind::Uvm, 0x19) => self.register_space(made, bytes),
            (Kind::Uvm, 0x1a | 0x26) => self.unregister(made, bytes),
            (Kind::Uvm, 0x1b) => self.register_channel(made, bytes),
            (Kind::Uvm, 0x1c) => self.unregister_channel(made, bytes),
            (Kind::Uvm, 0x1f | 0x2a..=0x2f | 0x33) => self.advise(made, bytes),
            (Kind::Uvm, 0x21) => self.map_external(made, bytes),
            (Kind::Uvm, 0x22) => self.free_range(made, bytes),
            (Kind::Uvm, 0x42) => self.unmap_external(made, bytes),
            (Kind::Uvm, 0x49) => self.create_range(made, bytes),
            (Kind::Uvm, 0x44) => self.make_pool(made, bytes),
            (Kind::Uvm, 0x3000_0001) => {
                let flags = long(bytes, 0);
                put(bytes, 0, (flags | SHARED_UVM).to_le_bytes());
                let result = self.issue(made, bytes);
                put(bytes, 0, flags.to_le_bytes());
                result
            }
            _ => self.issue(made, bytes),
        }
    }

    /// Makes the call itself.
    pub fn issue(&self, made: &Made<'_>, bytes: &mut [u8]) -> Result<i32, Denied> {
        let start = bytes.as_mut_ptr();
        for pointer in made.call.pointers() {
            // Places are in the bytes.
            let address = pointer.to.map_or(0, |to| start.wrapping_add(to) as u64);
            put(bytes, pointer.at, address.to_le_bytes());
        }
        let argument = if bytes.is_empty() {
            std::ptr::null_mut()
        } else {
            start
        };
        // SAFETY: the walk has shown that the first segment is the block of the command, and the pointers in it and in
        // its inner block were set above to segments of the lengths that the tables give, or to nothing.
        let result = unsafe {
            self.worker()
                .device
                .call(made.file.device(), made.command, argument)
        };
        result.map_err(|error| Denied::Errno(errno(error)))
    }

    /// Whether a call that returned `result` has succeeded.
    pub fn is_done(made: &Made<'_>, result: i32, bytes: &[u8]) -> bool {
        result == 0
            && made
                .call
                .status_at()
                .is_none_or(|at| word(bytes, at) == status::OK)
    }

    fn allocate(&mut self, made: &Made<'_>, bytes: &mut [u8]) -> Result<i32, Denied> {
        let (client, parent) = (word(bytes, 0), word(bytes, 4));
        let class = made.call.inner.unwrap_or_default();
        self.check_room(client)?;
        if class == SYSTEM {
            return self.make_system(made, bytes);
        }
        let is_root = ROOTS.contains(&class);
        if is_root && (made.file.node != Node::Control || made.file.left().shows_device()) {
            return Err(Denied::Status(status::INVALID_ARGUMENT));
        }
        if let Some(gated) = self.worker().gated {
            gated
                .may_make(client, parent, class)
                .map_err(Denied::Status)?;
        }
        let charge = self.charge(made, bytes, class)?;
        let result = self.issue(made, bytes)?;
        if Self::is_done(made, result, bytes) {
            if let Some(charge) = &charge
                && !charge.raise_to(quota::bytes_of(class, made.call, bytes))
            {
                self.free_object(client, parent, word(bytes, 8))?;
                return Err(Denied::Status(status::NO_MEMORY));
            }
            let gated = self.worker().gated;
            if let Some(place) = gated.and_then(|one| one.interrupted_by(client, parent, class))
                && let Err(denied) = self.have_interrupted(made, client, place)
            {
                self.free_object(client, parent, word(bytes, 8))?;
                return Err(denied);
            }
            if class == ADDRESS_SPACE {
                self.slice().touch_ahead();
            }
            let handle = word(bytes, 8);
            let block = made.call.inner_block().filter(|_| class == VIDEO);
            let size = block.map_or(0, |block| long(bytes, block.start + 64));
            let mut objects = self.worker().objects.lock_unpoisoned();
            let gone = if is_root {
                objects.add_client(handle, made.file.number, self.user());
                Vec::new()
            } else {
                objects.add(
                    client,
                    handle,
                    Object {
                        parent,
                        class,
                        size,
                        is_fresh: true,
                        is_shared: false,
                        pages: None,
                        charge,
                    },
                )
            };
            drop(objects);
            gone.into_iter().for_each(Pages::release);
        }
        Ok(result)
    }

    /// Has kernels of a group be interrupted at any instruction, whatever the program says of that, or does not.
    fn have_interrupted(
        &self,
        made: &Made<'_>,
        client: u32,
        (subdevice, group): (u32, u32),
    ) -> Result<(), Denied> {
        let mut parameters = [0u32; 8];
        (parameters[0], parameters[1]) = (SETS_PREEMPTION, group);
        parameters[PREEMPTION_AT / 4] = PREEMPTED_ANYWHERE;
        let at = parameters.as_mut_ptr() as u64;
        let size = size_of_val(&parameters) as u32;
        let mut block = [
            client,
            subdevice,
            PREEMPTION,
            0,
            at as u32,
            (at >> 32) as u32,
            size,
            0,
        ];
        // SAFETY: a control call with the parameters that its command has; both outlive it.
        let result = unsafe {
            let block = block.as_mut_ptr().cast();
            self.worker()
                .device
                .call(made.file.device(), CONTROL_CALL, block)
        };
        result.map_err(|error| Denied::Errno(errno(error)))?;
        match block[7] {
            status::OK => Ok(()),
            status => Err(Denied::Status(status)),
        }
    }

    /// Counts the video memory that a new object takes or keeps.
    fn charge(&self, made: &Made<'_>, bytes: &[u8], class: u32) -> Result<Option<Charge>, Denied> {
        let wanted = quota::bytes_of(class, made.call, bytes);
        let kept = self.named_charges(made.call, bytes);
        // The driver may choose the size of video memory.
        if class != VIDEO && wanted == 0 && kept.is_empty() {
            return Ok(None);
        }
        let charge = self.worker().account.charge(wanted, kept);
        charge.map(Some).ok_or(Denied::Status(status::NO_MEMORY))
    }

    /// The video memory of objects that the inner block of a call names.
    fn named_charges(&self, call: &Call, bytes: &[u8]) -> Vec<Charge> {
        let own = word(bytes, 0);
        let mut objects = self.worker().objects.lock_unpoisoned();
        let mut kept = Vec::new();
        let mut keep = |client: u32, handle: u32| {
            let object = objects
                .client(client)
                .and_then(|client| client.object(handle));
            kept.extend(object.and_then(|object| object.charge.clone()));
        };
        for operand in call.operands().filter(|operand| operand.block != 0) {
            match operand.meaning {
                Meaning::Object { client_at } => {
                    let client =
                        client_at.map_or(own, |at| word(bytes, operand.block + usize::from(at)));
                    keep(client, word(bytes, operand.at));
                }
                Meaning::Objects { count, .. } => {
                    for index in 0..usize::from(count) {
                        keep(own, word(bytes, operand.at + 4 * index));
                    }
                }
                _ => {}
            }
        }
        kept
    }

    /// The video memory of the objects that a call exports, in order.
    fn exported_charges(&self, bytes: &[u8], block: usize) -> Vec<Option<Charge>> {
        let client = word(bytes, 0);
        let count = usize::from(word(bytes, block + EXPORT_COUNT_AT) as u16);
        let mut objects = self.worker().objects.lock_unpoisoned();
        let mut charge_of = |index: usize| {
            let handle = word(bytes, block + EXPORTED_AT + 4 * index);
            let object = objects.client(client)?.object(handle)?;
            object.charge.clone()
        };
        (0..count).map(&mut charge_of).collect()
    }

    fn free(&mut self, made: &Made<'_>, bytes: &mut [u8]) -> Result<i32, Denied> {
        let (client, handle) = (word(bytes, 0), word(bytes, 8));
        let gated = self.worker().gated;
        if gated.is_some_and(|gated| !gated.may_free(client, handle)) {
            return Err(Denied::Status(status::INVALID_ARGUMENT));
        }
        let places = {
            let mut objects = self.worker().objects.lock_unpoisoned();
            objects.take_places(client, handle)
        };
        // The guest loses sight of what the driver frees. Waits for the machine.
        drop(places);
        let result = self.issue(made, bytes)?;
        if Self::is_done(made, result, bytes) {
            let gone = self
                .worker()
                .objects
                .lock_unpoisoned()
                .remove(client, handle);
            gone.into_iter().for_each(Pages::release);
        }
        Ok(result)
    }

    fn control(&mut self, made: &Made<'_>, bytes: &mut [u8]) -> Result<i32, Denied> {
        let block = made.call.inner_block().map_or(0, |block| block.start);
        match made.call.inner {
            // All programs' calls come from this process: "the same user" or "everybody" would be other workers, too.
            Some(SHARE_POLICY) if block != 0 => {
                let at = block + SHARE_TYPE_AT;
                let wished = [bytes[at], bytes[at + 1]];
                if u16::from_le_bytes(wished) != SHARE_NOBODY {
                    put(bytes, at, SHARE_PROCESS.to_le_bytes());
                }
                let result = self.issue(made, bytes);
                put(bytes, at, wished);
                result
            }
            Some(EXPORT) if block != 0 => {
                let first = word(bytes, block + EXPORT_COUNT_AT) >> 16;
                let charges = self.exported_charges(bytes, block);
                let result = self.issue(made, bytes)?;
                if let (true, Some(file)) = (Self::is_done(made, result, bytes), made.named.first())
                {
                    let places = (first..).map(|place| place as u16).zip(charges);
                    let charges = places.filter_map(|(place, charge)| Some((place, charge?)));
                    file.left().exported.extend(charges);
                }
                Ok(result)
            }
            Some(MEMORY_INFO) if block != 0 => {
                let result = self.issue(made, bytes)?;
                self.worker().account.show(&mut bytes[block..]);
                Ok(result)
            }
            Some(IMPORT) if block != 0 => {
                let (client, parent) = (word(bytes, 0), word(bytes, block + 4));
                self.check_room(client)?;
                let result = self.issue(made, bytes)?;
                if Self::is_done(made, result, bytes) {
                    let [count, first] =
                        [0, 16].map(|shift| (word(bytes, block + 648) >> shift) as u16);
                    let handles = (0..count.min(128)).map(|index| {
                        let handle = word(bytes, block + 8 + 4 * usize::from(index));
                        (first.wrapping_add(index), handle)
                    });
                    let exported = |place| {
                        let file = made.named.first()?;
                        file.left().exported.get(&place).cloned()
                    };
                    for (place, handle) in handles.filter(|(_, handle)| *handle != 0) {
                        let object = Object {
                            parent,
                            class: FOREIGN,
                            size: 0,
                            is_fresh: false,
                            is_shared: false,
                            pages: None,
                            charge: exported(place),
                        };
                        let mut objects = self.worker().objects.lock_unpoisoned();
                        objects
                            .add(client, handle, object)
                            .into_iter()
                            .for_each(Pages::release);
                    }
                }
                Ok(result)
            }
            // Kernels that are not interrupted would have no end of their slices.
            Some(PREEMPTION) if block != 0 && self.worker().gated.is_some() => {
                let at = block + PREEMPTION_AT;
                let (flags, wished) = (word(bytes, block), word(bytes, at));
                put(bytes, block, (flags | SETS_PREEMPTION).to_le_bytes());
                put(bytes, at, PREEMPTED_ANYWHERE.to_le_bytes());
                let result = self.issue(made, bytes);
                put(bytes, block, flags.to_le_bytes());
                put(bytes, at, wished.to_le_bytes());
                result
            }
            // What an arbiter says holds.
            Some(SET_TIMESLICE) if block != 0 && self.worker().gated.is_some() => {
                let (client, group) = (word(bytes, 0), word(bytes, 4));
                let gated = self.worker().gated;
                match gated.and_then(|gated| gated.keep_slice(client, group)) {
                    Some(status) => Err(Denied::Status(status)),
                    None => self.issue(made, bytes),
                }
            }
            // Numbers of processes of this machine are not the program's.
            Some(PROCESSES) if block != 0 => {
                let result = self.issue(made, bytes)?;
                bytes[block + 8..].fill(0);
                Ok(result)
            }
            _ => self.issue(made, bytes),
        }
    }

    fn map(&mut self, made: &Made<'_>, bytes: &mut [u8]) -> Result<i32, Denied> {
        let (client, handle) = (word(bytes, 0), word(bytes, 8));
        let (offset, length) = (long(bytes, 16), long(bytes, 24));
        let target = made
            .named
            .first()
            .ok_or(Denied::Status(status::INVALID_ARGUMENT))?;
        self.check_room(client)?;
        let mut pages = self.pages_of(client, handle)?;
        let class = self.class_of(client, handle);
        if pages.is_none() && class == VIDEO {
            pages = Some(self.replace_video(client, handle)?);
        }
        let (view, address) = if let Some(pages) = pages {
            let end = offset.checked_add(length);
            if !offset.is_multiple_of(4096)
                || length == 0
                || end.is_none_or(|end| end > pages.length)
            {
                return Err(Denied::Status(status::INVALID_ARGUMENT));
            }
            let status_at = made.call.status_at().unwrap_or_default();
            put(bytes, status_at, status::OK.to_le_bytes());
            (
                View::Slice(pages.slice, pages.offset + offset, length),
                None,
            )
        } else if DEVICE_PAGES.contains(&class) {
            // The program gets the file. Whoever has that of a client can make any call on the client.
            if self
                .worker()
                .objects
                .lock_unpoisoned()
                .has_client_of(target.number)
            {
                return Err(Denied::Status(status::INVALID_ARGUMENT));
            }
            let result = self.issue(made, bytes)?;
            if !Self::is_done(made, result, bytes) {
                return Ok(result);
            }
            let is_writable = class != SHARED_DATA;
            let view = View::Device {
                length,
                is_writable,
            };
            (view, Some(long(bytes, 32)))
        } else {
            return Err(Denied::Status(status::NOT_SUPPORTED));
        };
        let number = self.worker().mapping_number();
        if let Some(client) = self.worker().objects.lock_unpoisoned().client(client) {
            client.mapped.insert(
                number,
                Mapped {
                    object: handle,
                    address,
                    file: target.number,
                    place: None,
                },
            );
        }
        target.left().view = Some(view);
        put(bytes, 32, number.to_le_bytes());
        Ok(0)
    }

    fn unmap(&mut self, made: &Made<'_>, bytes: &mut [u8]) -> Result<i32, Denied> {
        let (client, number) = (word(bytes, 0), long(bytes, 16));
        let mut objects = self.worker().objects.lock_unpoisoned();
        let client = objects
            .client(client)
            .ok_or(Denied::Status(status::INVALID_CLIENT))?;
        // The driver looks by the object, too: objects may have one address.
        let is_its = |mapped: &Mapped| mapped.object == word(bytes, 8);
        if !client.mapped.get(&number).is_some_and(is_its) {
            return Err(Denied::Status(status::INVALID_ARGUMENT));
        }
        let mapped = client
            .mapped
            .remove(&number)
            .ok_or(Denied::Status(status::INVALID_ARGUMENT))?;
        drop(objects);
        let Some(address) = mapped.address else {
            return Err(Denied::Status(status::OK));
        };
        // As before a free.
        drop(mapped.place);
        put(bytes, 16, address.to_le_bytes());
        let result = self.issue(made, bytes);
        put(bytes, 16, number.to_le_bytes());
        result
    }

    /// The program tells where it has mapped: it will name that address.
    fn moved(&mut self, bytes: &mut [u8]) -> Result<i32, Denied> {
        let (client, from, to) = (word(bytes, 0), long(bytes, 16), long(bytes, 24));
        let mut objects = self.worker().objects.lock_unpoisoned();
        let client = objects
            .client(client)
            .ok_or(Denied::Status(status::INVALID_CLIENT))?;
        if client.mapped.contains_key(&to) && to != from {
            return Err(Denied::Status(status::INVALID_ARGUMENT));
        }
        let mapped = client
            .mapped
            .remove(&from)
            .ok_or(Denied::Status(status::INVALID_ARGUMENT))?;
        client.mapped.insert(to, mapped);
        Err(Denied::Status(status::OK))
    }

    fn register(&mut self, made: &Made<'_>, bytes: &mut [u8]) -> Result<i32, Denied> {
        let result = self.issue(made, bytes)?;
        if let (0, Some(control)) = (result, made.named.first()) {
            made.file.left().control = Some(control.number);
        }
        Ok(result)
    }

    fn add_event(&mut self, made: &Made<'_>, bytes: &mut [u8]) -> Result<i32, Denied> {
        let result = self.issue(made, bytes)?;
        if let (true, Some(file)) = (Self::is_done(made, result, bytes), made.named.first()) {
            let watched = self.worker().events.watch_device(file);
            watched.map_err(|error| Denied::Errno(errno(error)))?;
        }
        Ok(result)
    }

    /// Whether there may be another object or mapping of a client, or another client.
    pub fn check_room(&self, client: u32) -> Result<(), Denied> {
        if self.worker().objects.lock_unpoisoned().has_room(client) {
            Ok(())
        } else {
            Err(Denied::Status(status::INSUFFICIENT_RESOURCES))
        }
    }

    /// The pages of the slice behind an object, if the worker gave it some.
    fn pages_of(&self, client: u32, handle: u32) -> Result<Option<Pages>, Denied> {
        let mut objects = self.worker().objects.lock_unpoisoned();
        let client = objects
            .client(client)
            .ok_or(Denied::Status(status::INVALID_CLIENT))?;
        let object = client
            .object(handle)
            .ok_or(Denied::Status(status::INVALID_OBJECT))?;
        Ok(object.pages.clone().filter(|_| object.class != FOREIGN))
    }

    fn class_of(&self, client: u32, handle: u32) -> u32 {
        let mut objects = self.worker().objects.lock_unpoisoned();
        let object = objects
            .client(client)
            .and_then(|client| client.object(handle).map(|object| object.class));
        object.unwrap_or_default()
    }
}

/// Whether a call makes objects, ends them, or has something keep their memory. Such calls are made one after the other:
/// between a call and what is noted of it, another one could give the handle to other memory.
fn changes_memory(call: &Call, bytes: &[u8]) -> bool {
    match (call.kind(), call.number) {
        // Pinning takes as long as there are pages, and no video memory: it has its handle for itself meanwhile.
        (Kind::Frontend, MAKE_DESCRIPTOR) => word(bytes, 8) == 0,
        (Kind::Frontend, 0x2b) => call.inner != Some(SYSTEM),
        // A group's handle is not another one's until its slice is set.
        (Kind::Frontend, 0x2a) => matches!(call.inner, Some(EXPORT | IMPORT | SET_TIMESLICE)),
        (Kind::Frontend, number) => matches!(number, 0x29 | 0x34 | 0x4e | 0x4f),
        (Kind::Uvm, number) => matches!(number, 0x1a..=0x1c | 0x21 | 0x22 | 0x26 | 0x42 | 0x49),
    }
}

/// Puts back what the program must not see: addresses and descriptors of this process.
fn restore(call: &Call, bytes: &mut [u8], sent: &[u8]) {
    let pointers = call.pointers().iter().map(|pointer| (pointer.at, 8));
    let hidden = call.operands().filter(|operand| {
        matches!(
            operand.meaning,
            Meaning::File32 | Meaning::File64 | Meaning::Masked { .. }
        )
    });
    for (at, width) in pointers.chain(hidden.map(|operand| (operand.at, operand.meaning.width()))) {
        if let (Some(place), Some(value)) =
            (bytes.get_mut(at..at + width), sent.get(at..at + width))
        {
            place.copy_from_slice(value);
        }
    }
}

/// What a call that was refused returns. Each number that a list lacks is printed once.
fn refused(refusal: Refusal) -> Errno {
    static PRINTED: LazyLock<Mutex<HashSet<(u8, u32)>>> = LazyLock::new(Mutex::default);
    const MOST: usize = 256;
    match refusal {
        Refusal::Fault => libc::EFAULT,
        Refusal::Malformed => libc::EINVAL,
        Refusal::Unlisted { list, number, .. } => {
            let mut printed = PRINTED.lock_unpoisoned();
            if printed.len() < MOST && printed.insert((list as u8, number)) {
                let list = match list {
                    Listed::Escape | Listed::Uvm => "call",
                    Listed::Control => "control",
                    Listed::Class => "class",
                };
                note!("gantry-nvidia: {list} {number:x} is not allowed");
            }
            libc::EINVAL
        }
    }
}
