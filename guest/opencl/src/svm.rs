//! Coarse-grained shared virtual memory.
//!
//! The worker's driver chooses the address of an allocation, and this process uses the same address
//! for memory of its own, so that pointers mean the same on both sides. The host may access the
//! memory only between `clEnqueueSVMMap` and `clEnqueueSVMUnmap`, which copy the device's and the
//! host's changes. Commands in between, and pointers inside the memory, need no further work.
//!
//! If the window is shared and has room, this process's memory for an allocation is a part of the
//! window at a second address. The device's copies start and end there, and there are no other
//! copies.

use std::{
    collections::BTreeMap,
    ffi::c_void,
    io,
    ptr::null_mut,
    sync::{
        RwLock,
        atomic::{AtomicU64, Ordering},
    },
};

use base::lock::{Unpoisoned, UnpoisonedRw};
use gantry_client::stage::HostRegion;
use remoting_proto::{
    apis::opencl::{
        calls::{
            Marker, SetArgument, StageId, SvmAlloc, SvmCopy, SvmFill, SvmFree, SvmMigrate,
            SvmPointers, Value,
        },
        codes,
    },
    wire::Blob,
};

use crate::{
    abi::{Outcome, array, code, entry_points, list, run, set},
    event::{Around, decide, submit, undecided, when_complete},
    link::{self, Link},
    object::{self, Context, Device, Event, Handle, Kernel, Object, Own, Queue, Set, get},
    platform::limit,
    program::give_argument,
    transfer::{There, bytes_between, bytes_by},
};

/// The number of the worker's addresses to try: if another mapping is in the way, the worker
/// chooses another address.
const TRIES: u32 = 8;
/// The maximum alignment in bytes: that of the largest type of OpenCL C.
const LARGEST_TYPE: u32 = 128;

/// The lowest address of an allocation, of which all addresses are multiples.
const LOWEST: usize = 1 << 16;
const PAGE: usize = 4096;

/// Allocations use at most this fraction (one quarter) of the window's data; the rest is for other
/// transfers.
const SHARE: u64 = 4;

/// The number of bytes of the window that allocations use.
static IN_WINDOW: AtomicU64 = AtomicU64::new(0);

/// Memory of this process at an address that this process has not chosen.
#[derive(Debug)]
struct Reservation {
    start: usize,
    length: usize,
}

impl Reservation {
    /// Reserves memory, populated on demand. Fails if something else is in the way.
    fn at(address: u64, length: u64) -> io::Result<Self> {
        let (start, length) = (address as usize, length as usize);
        // Nothing may be mapped where null pointers point, which would be possible for root.
        if start < LOWEST || !start.is_multiple_of(PAGE) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE
            | libc::MAP_ANONYMOUS
            | libc::MAP_NORESERVE
            | libc::MAP_FIXED_NOREPLACE;
        // SAFETY: a new mapping that replaces none.
        let mapped = unsafe { libc::mmap(start as *mut c_void, length, access, flags, -1, 0) };
        if mapped == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let reservation = Self {
            start: mapped as usize,
            length,
        };
        // Kernels before 4.17 treat the address as a hint.
        if reservation.start == start {
            Ok(reservation)
        } else {
            Err(io::ErrorKind::AlreadyExists.into())
        }
    }

    /// Maps the pages of a shared file mapping here as well. After an error, nothing is known to be
    /// mapped here any more.
    fn mirror(&mut self, there: *mut u8) -> io::Result<()> {
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        let start = self.start as *mut c_void;
        // SAFETY: with an old size of 0 nothing is unmapped there; what is replaced here belongs to
        // this reservation.
        let mapped = unsafe { libc::mremap(there.cast(), 0, self.length, flags, start) };
        if mapped == libc::MAP_FAILED {
            // Another thread may have got this range, which must not be taken from it.
            self.length = 0;
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if self.length == 0 {
            return;
        }
        // SAFETY: mapped by `at`, and freed by the application.
        unsafe { libc::munmap(self.start as *mut c_void, self.length) };
    }
}

/// A mapping: its start, its size, and whether the host writes to it.
#[derive(Clone, Debug)]
struct Mapped {
    start: usize,
    size: usize,
    writes: bool,
    /// The stages through which the device's bytes arrive, if there are any.
    stages: Vec<StageId>,
}

/// This process's memory for an allocation.
#[derive(Debug)]
struct Memory {
    reserved: Reservation,
    /// Its offset in the window and the length of that part, if it is in the window.
    window: Option<(u64, u64)>,
}

/// The pages that contain these bytes: their start, and the length from there to the last byte.
fn pages(address: u64, size: u64) -> (u64, u64) {
    let before = address % PAGE as u64;
    (address - before, size + before)
}

impl Memory {
    /// Allocates memory in the window if there is room, and otherwise anywhere. Nothing else may be
    /// in these pages.
    fn at(link: &Link, address: u64, size: u64) -> io::Result<Self> {
        let (address, length) = pages(address, size);
        let reserved = Reservation::at(address, length)?;
        let Some(offset) = share(link, length) else {
            return Ok(Self {
                reserved,
                window: None,
            });
        };
        let mut memory = Self {
            reserved,
            window: Some((offset, length)),
        };
        let mirrored = match link.pointer(offset, length) {
            Ok(there) => memory.reserved.mirror(there),
            Err(_) => Err(io::ErrorKind::NotFound.into()),
        };
        mirrored.map(|()| memory)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let (Some((offset, length)), Some(link)) = (self.window, link::get()) {
            link.free(offset, length);
            IN_WINDOW.fetch_sub(length, Ordering::Relaxed);
        }
    }
}

/// Reserves a part of the window, if one is available right now.
fn share(link: &Link, length: u64) -> Option<u64> {
    let most = (link.window.size() - link.window.data()) / SHARE;
    let fits = |used: u64| used.checked_add(length).filter(|sum| *sum <= most);
    IN_WINDOW
        .fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits)
        .ok()?;
    let offset = link.try_reserve_aliased(length);
    match offset {
        // Before it gets its second address, which children inherit if they inherit the first one.
        Some(offset) => link.hand_out(offset, length),
        None => drop(IN_WINDOW.fetch_sub(length, Ordering::Relaxed)),
    }
    offset
}

/// The window offset of these bytes of an allocation. Costs one atomic load if no allocation is in
/// the window.
pub fn in_window(pointer: *const u8, length: u64) -> Option<u64> {
    if IN_WINDOW.load(Ordering::Relaxed) == 0 {
        return None;
    }
    let pointer = pointer as usize;
    find(pointer, |start, allocation| {
        let left = allocation.size - (pointer - start);
        let Memory { reserved, window } = &allocation.memory;
        let (window, _) = (*window)?;
        (length <= left as u64).then_some(window + (pointer - reserved.start) as u64)
    })?
}

/// An allocation.
struct Allocation {
    /// Its memory in this process.
    memory: Memory,
    /// The size that the application has requested, in bytes.
    size: usize,
    context: Own<Context>,
    maps: Vec<Mapped>,
}

/// All allocations, by their start.
static ALL: RwLock<BTreeMap<usize, Allocation>> = RwLock::new(BTreeMap::new());

/// Calls `look` with the allocation that a pointer points into, if there is one.
fn find<T>(pointer: usize, look: impl FnOnce(usize, &Allocation) -> T) -> Option<T> {
    let all = ALL.read_unpoisoned();
    let (&start, allocation) = all.range(..=pointer).next_back()?;
    (pointer - start < allocation.size).then(|| look(start, allocation))
}

fn change<T>(pointer: usize, change: impl FnOnce(&mut Allocation) -> T) -> Option<T> {
    let mut all = ALL.write_unpoisoned();
    let (&start, allocation) = all.range_mut(..=pointer).next_back()?;
    (pointer - start < allocation.size).then(|| change(allocation))
}

/// Whether there are any allocations.
pub fn any() -> bool {
    !ALL.read_unpoisoned().is_empty()
}

/// Whether a pointer points into shared virtual memory.
pub fn is(pointer: *const c_void) -> bool {
    find(pointer as usize, |_, _| ()).is_some()
}

/// Whether all of this memory is shared virtual memory of a context.
pub fn has(context: &Object<Context>, pointer: *const c_void, size: usize) -> bool {
    let pointer = pointer as usize;
    find(pointer, |start, allocation| {
        allocation.context.it.id == context.it.id && size <= allocation.size - (pointer - start)
    })
    .unwrap_or(false)
}

/// Whether a device supports it. Kinds other than mapped buffers would need common memory.
fn offered(device: &Object<Device>) -> bool {
    *device.it.svm.get_or_init(|| {
        limit(device, codes::DEVICE_SVM_CAPABILITIES)
            .is_ok_and(|capabilities| capabilities & codes::DEVICE_SVM_COARSE_GRAIN_BUFFER != 0)
    })
}

fn need(queue: &Object<Queue>) -> Outcome {
    if offered(&queue.it.device) {
        Ok(())
    } else {
        Err(codes::INVALID_OPERATION)
    }
}

/// Checks that all of this is shared virtual memory of a queue's context.
fn inside(queue: &Object<Queue>, pointer: *const c_void, size: usize) -> Outcome {
    if has(&queue.it.context, pointer, size) {
        Ok(())
    } else {
        Err(codes::INVALID_VALUE)
    }
}

fn alloc(context: Handle<Context>, flags: u64, size: usize, alignment: u32) -> Outcome<usize> {
    let context = get(context)?;
    let access = codes::MEM_READ_WRITE | codes::MEM_READ_ONLY | codes::MEM_WRITE_ONLY;
    let devices = &context.it.devices;
    if !devices.iter().any(|device| offered(device)) {
        return Err(codes::INVALID_OPERATION);
    }
    // Allocations begin at a page boundary, or else are aligned for the largest type.
    let aligns = alignment == 0 || alignment.is_power_of_two() && alignment <= LARGEST_TYPE;
    if size == 0 || flags & !access != 0 || flags.count_ones() > 1 || !aligns {
        return Err(codes::INVALID_VALUE);
    }
    for device in devices {
        if size as u64 > limit(device, codes::DEVICE_MAX_MEM_ALLOC_SIZE)? {
            return Err(codes::INVALID_BUFFER_SIZE);
        }
    }
    let link = link::connected()?;
    // Addresses that are taken in this process stay allocated in the worker until another one is
    // found.
    let mut conflicting = Vec::new();
    let found = loop {
        let asked = link.ask(&SvmAlloc {
            context: context.it.id,
            flags,
            size: size as u64,
            retries: conflicting.len() as u32,
        });
        let address = match asked {
            Ok(address) => address,
            Err(code) => break Err(code),
        };
        match Memory::at(link, address, size as u64) {
            Ok(memory) => break Ok((address as usize, memory)),
            Err(_) => conflicting.push(address),
        }
        if conflicting.len() as u32 == TRIES {
            break Err(codes::MEM_OBJECT_ALLOCATION_FAILURE);
        }
    };
    for address in conflicting {
        // If this cannot be sent, the worker is gone with everything that it had.
        let _ = link.post(&SvmFree { address });
    }
    let (start, memory) = found?;
    let allocation = Allocation {
        memory,
        size,
        context: context.keep(),
        maps: Vec::new(),
    };
    let mut all = ALL.write_unpoisoned();
    all.insert(start, allocation);
    Ok(start)
}

pub extern "C" fn clSVMAlloc(
    context: Handle<Context>,
    flags: u64,
    size: usize,
    alignment: u32,
) -> *mut c_void {
    let start = run(|| alloc(context, flags, size, alignment));
    start.map_or(null_mut(), |start| start as *mut c_void)
}

/// Frees an allocation: in this process first, so that its address is free when the worker reuses
/// it.
fn free(pointer: usize) {
    let freed = ALL.write_unpoisoned().remove(&pointer);
    let Some(Allocation {
        memory, context, ..
    }) = freed
    else {
        return;
    };
    drop(memory);
    if let Some(link) = link::get() {
        let address = pointer as u64;
        let _ = link.post(&SvmFree { address });
    }
    // In the worker, too, the context is freed last.
    drop(context);
}

pub extern "C" fn clSVMFree(context: Handle<Context>, pointer: *mut c_void) {
    let _ = run(|| {
        get(context)?;
        free(pointer as usize);
        Ok(())
    });
}

/// `clEnqueueSVMFree`'s callback: queue, number of pointers, the pointers, the application's data.
type FreeCallback = extern "C" fn(Handle<Queue>, u32, *mut *mut c_void, *mut c_void);

pub extern "C" fn clEnqueueSVMFree(
    queue: Handle<Queue>,
    pointer_count: u32,
    pointers: *const *mut c_void,
    notify: Option<FreeCallback>,
    data: *mut c_void,
    count: u32,
    wait: *const Handle<Event>,
    event: *mut Handle<Event>,
) -> i32 {
    code(|| {
        let queue = get(queue)?;
        need(queue)?;
        let pointers: Vec<usize> = list(pointers, pointer_count, codes::INVALID_VALUE)?
            .into_iter()
            .map(|pointer| pointer as usize)
            .collect();
        // The memory is freed between two markers. The command's event is that of the second
        // marker, which waits for this thread's event, and so do all later commands of an in-order
        // queue.
        let marker = |count: u32, wait: *const Handle<Event>| -> Outcome<Handle<Event>> {
            let mut event = null_mut();
            let around = Around {
                count,
                wait,
                event: &raw mut event,
            };
            submit(queue, around, codes::COMMAND_SVM_FREE, false, |order| {
                Ok(Marker { order })
            })?;
            Ok(event)
        };
        // In an out-of-order queue it waits for all earlier commands, which is allowed.
        let due = marker(count, wait)?;
        let freed = undecided(&queue.it.context)?;
        let own =
            marker(1, [freed.pointer()].as_ptr()).inspect_err(|code| decide(&freed, *code))?;
        let (kept, data) = (queue.keep(), data as usize);
        let (told, word) = (pointers, freed.clone());
        let ordered = when_complete(due, move |status| {
            // A command that was not executed frees nothing.
            if status >= 0 {
                match notify {
                    Some(notify) => {
                        let mut pointers: Vec<_> = (told.iter())
                            .map(|pointer| *pointer as *mut c_void)
                            .collect();
                        let list = pointers.as_mut_ptr();
                        notify(kept.pointer(), pointer_count, list, data as *mut c_void);
                    }
                    None => told.into_iter().for_each(free),
                }
            }
            decide(&word, status.min(0));
        });
        object::release(due)?;
        if let Err(code) = ordered {
            decide(&freed, code);
        }
        if ordered.is_err() || event.is_null() {
            object::release(own)?;
        } else {
            set(event, own);
        }
        ordered
    })
}

entry_points! {
    fn clEnqueueSVMMemcpy(
        queue: Handle<Queue>, blocking: u32, to: *mut c_void, from: *const c_void, size: usize; around
    ) {
        let queue = get(queue)?;
        need(queue)?;
        let (blocking, command) = (blocking != 0, codes::COMMAND_SVM_MEMCPY);
        if size == 0 {
            return submit(queue, around, command, blocking, |order| {
                Ok(Marker { order })
            });
        }
        if to.is_null() || from.is_null() {
            return Err(codes::INVALID_VALUE);
        }
        if (to as usize).abs_diff(from as usize) < size {
            return Err(codes::MEM_COPY_OVERLAP);
        }
        let (there, here) = (is(to), is(from));
        if there {
            inside(queue, to, size)?;
        }
        if here {
            inside(queue, from, size)?;
        }
        match (there, here) {
            (true, true) => submit(queue, around, command, blocking, |order| {
                Ok(SvmCopy {
                    order,
                    from: from as u64,
                    to: to as u64,
                    size: size as u64,
                })
            }),
            (true, false) => {
                let memory = HostRegion::flat(from.cast_mut().cast(), size);
                let there = There::Svm(to as u64, command);
                bytes_between(queue, there, blocking, memory, true, around)
            }
            (false, true) => {
                let memory = HostRegion::flat(to.cast(), size);
                let there = There::Svm(from as u64, command);
                bytes_between(queue, there, blocking, memory, false, around)
            }
            (false, false) => {
                let memory = HostRegion::flat(from.cast_mut().cast(), size);
                let there = There::Host(to.cast(), command);
                bytes_between(queue, there, blocking, memory, true, around)
            }
        }
    }

    fn clEnqueueSVMMemFill(
        queue: Handle<Queue>, pointer: *mut c_void, pattern: *const c_void, pattern_size: usize, size: usize; around
    ) {
        let queue = get(queue)?;
        need(queue)?;
        if pointer.is_null()
            || pattern.is_null()
            || !pattern_size.is_power_of_two()
            || pattern_size > 128
            || !(pointer as usize).is_multiple_of(pattern_size)
            || size == 0
            || !size.is_multiple_of(pattern_size)
        {
            return Err(codes::INVALID_VALUE);
        }
        inside(queue, pointer, size)?;
        submit(queue, around, codes::COMMAND_SVM_MEMFILL, false, |order| {
            Ok(SvmFill {
                order,
                address: pointer as u64,
                pattern: Blob(array(pattern.cast(), pattern_size)),
                size: size as u64,
            })
        })
    }

    fn clEnqueueSVMMap(
        queue: Handle<Queue>, blocking: u32, flags: u64, pointer: *mut c_void, size: usize; around
    ) {
        let queue = get(queue)?;
        need(queue)?;
        let write = codes::MAP_WRITE | codes::MAP_WRITE_INVALIDATE_REGION;
        let invalidate = flags & codes::MAP_WRITE_INVALIDATE_REGION != 0;
        if pointer.is_null()
            || size == 0
            || flags & !(codes::MAP_READ | write) != 0
            || invalidate && flags != codes::MAP_WRITE_INVALIDATE_REGION
        {
            return Err(codes::INVALID_VALUE);
        }
        inside(queue, pointer, size)?;
        let (blocking, command) = (blocking != 0, codes::COMMAND_SVM_MAP);
        let mut stages = Vec::new();
        if invalidate {
            submit(queue, around, command, blocking, |order| {
                Ok(Marker { order })
            })?;
        } else {
            let memory = HostRegion::flat(pointer.cast(), size);
            let there = There::Svm(pointer as u64, command);
            let staged = |stage| stages.push(stage);
            bytes_by(queue, there, blocking, memory, false, around, staged)?;
        }
        if blocking {
            stages = Vec::new();
        }
        change(pointer as usize, |allocation| {
            allocation.maps.push(Mapped {
                start: pointer as usize,
                size,
                writes: flags & write != 0,
                stages,
            });
        });
        Ok(())
    }

    fn clEnqueueSVMUnmap(queue: Handle<Queue>, pointer: *mut c_void; around) {
        let queue = get(queue)?;
        need(queue)?;
        inside(queue, pointer, 1)?;
        let start = pointer as usize;
        let place = |maps: &[Mapped]| maps.iter().position(|map| map.start == start);
        let mapped = find(start, |_, allocation| {
            place(&allocation.maps).map(|at| allocation.maps[at].clone())
        });
        let mapped = mapped.flatten().ok_or(codes::INVALID_VALUE)?;
        let link = link::connected()?;
        // If the contents have not arrived yet, the host cannot have changed them: what is here is
        // outdated.
        let came = !mapped.stages.iter().any(|stage| link.is_pending(*stage));
        let command = codes::COMMAND_SVM_UNMAP;
        if mapped.writes && came {
            let memory = HostRegion::flat(pointer.cast(), mapped.size);
            let there = There::Svm(pointer as u64, command);
            bytes_between(queue, there, false, memory, true, around)?;
        } else {
            submit(queue, around, command, false, |order| Ok(Marker { order }))?;
        }
        // If the command was refused, the mapping remains.
        change(start, |allocation| {
            place(&allocation.maps).map(|at| allocation.maps.remove(at))
        });
        Ok(())
    }

    fn clEnqueueSVMMigrateMem(
        queue: Handle<Queue>, pointer_count: u32, pointers: *const *const c_void, sizes: *const usize,
        flags: u64; around
    ) {
        let queue = get(queue)?;
        need(queue)?;
        let known = codes::MIGRATE_MEM_OBJECT_HOST | codes::MIGRATE_MEM_OBJECT_CONTENT_UNDEFINED;
        let pointers = list(pointers, pointer_count, codes::INVALID_VALUE)?;
        if pointers.is_empty() || flags & !known != 0 {
            return Err(codes::INVALID_VALUE);
        }
        let mut sizes = array(sizes, pointers.len());
        sizes.resize(pointers.len(), 0);
        let mut ranges = Vec::with_capacity(pointers.len());
        for (pointer, size) in pointers.into_iter().zip(sizes) {
            inside(queue, pointer, size.max(1))?;
            ranges.push((pointer as u64, size as u64));
        }
        let command = codes::COMMAND_SVM_MIGRATE_MEM;
        submit(queue, around, command, false, |order| {
            Ok(SvmMigrate {
                order,
                ranges,
                flags,
            })
        })
    }

    fn clSetKernelArgSVMPointer(kernel: Handle<Kernel>, index: u32, pointer: *const c_void) {
        let kernel = get(kernel)?;
        let context = &kernel.it.program.it.context;
        if !context.it.devices.iter().any(|device| offered(device)) {
            return Err(codes::INVALID_OPERATION);
        }
        if !pointer.is_null() && !has(context, pointer, 1) {
            return Err(codes::INVALID_ARG_VALUE);
        }
        let mut set = kernel.it.set.lock_unpoisoned();
        let known = set
            .get_mut(index as usize)
            .ok_or(codes::INVALID_ARG_INDEX)?;
        let call = SetArgument {
            kernel: kernel.it.id,
            index,
            value: Value::Svm((!pointer.is_null()).then_some(pointer as u64)),
        };
        give_argument(known, Set::Svm, &call)
    }

    fn clSetKernelExecInfo(kernel: Handle<Kernel>, name: u32, size: usize, value: *const c_void) {
        let kernel = get(kernel)?;
        let context = &kernel.it.program.it.context;
        if !context.it.devices.iter().any(|device| offered(device)) {
            return Err(codes::INVALID_OPERATION);
        }
        if value.is_null() || size == 0 {
            return Err(codes::INVALID_VALUE);
        }
        match name {
            codes::KERNEL_EXEC_INFO_SVM_PTRS if size.is_multiple_of(size_of::<usize>()) => {
                let addresses: Vec<usize> = array(value.cast(), size / size_of::<usize>());
                if !(addresses.iter()).all(|address| has(context, *address as *const c_void, 1)) {
                    return Err(codes::INVALID_VALUE);
                }
                link::connected()?.ask(&SvmPointers {
                    kernel: kernel.it.id,
                    addresses: addresses
                        .into_iter()
                        .map(|address| address as u64)
                        .collect(),
                })
            }
            // No device here can access memory that is not allocated this way.
            codes::KERNEL_EXEC_INFO_SVM_FINE_GRAIN_SYSTEM if size == size_of::<u32>() => {
                match array(value.cast::<u32>(), 1)[0] {
                    0 => Ok(()),
                    _ => Err(codes::INVALID_OPERATION),
                }
            }
            _ => Err(codes::INVALID_VALUE),
        }
    }
}

#[cfg(test)]
mod tests {
    use remoting_transport::{
        mapping,
        window::{self, Window},
    };

    use super::*;

    const PAGE: u64 = super::PAGE as u64;
    /// Addresses far from those that kernels choose, one for each test.
    const FREE: [u64; 2] = [0x2000_0000_0000, 0x2100_0000_0000];

    #[test]
    fn nothing_that_is_mapped_already_is_replaced() {
        let there = vec![7u8; 4 * PAGE as usize];
        let page = (there.as_ptr() as u64).next_multiple_of(PAGE);
        assert!(Reservation::at(page, PAGE).is_err());
        assert!(Reservation::at(page - PAGE, 16 * PAGE).is_err());
        assert!(there.iter().all(|byte| *byte == 7));
    }

    #[test]
    fn nothing_is_where_null_pointers_point_or_beside_pages() {
        for address in [0, PAGE, LOWEST as u64 - PAGE, FREE[0] + 8] {
            assert!(Reservation::at(address, PAGE).is_err(), "{address:#x}");
        }
    }

    #[test]
    fn bytes_are_in_the_pages_from_their_first_one_s_to_their_last_one_s() {
        assert_eq!(pages(5 * PAGE, 1), (5 * PAGE, 1));
        assert_eq!(pages(5 * PAGE + 64, PAGE), (5 * PAGE, PAGE + 64));
    }

    #[test]
    fn an_address_is_free_again_after_its_reservation() {
        let first = Reservation::at(FREE[0], PAGE).unwrap();
        assert!(Reservation::at(FREE[0], PAGE).is_err());
        drop(first);
        Reservation::at(FREE[0], PAGE).unwrap();
    }

    #[test]
    fn a_mirror_of_the_window_is_the_same_memory_and_leaves_it_where_it_is() {
        let file = mapping::create(window::SMALLEST).unwrap();
        let window = Window::map(&file, window::SMALLEST, 1 << 16).unwrap();
        let there = window.at(window.data(), 2 * PAGE).unwrap();
        let mut memory = Reservation::at(FREE[1], 2 * PAGE).unwrap();
        memory.mirror(there).unwrap();
        let here = memory.start as *mut u8;
        // SAFETY: both are two pages that nobody else uses.
        unsafe {
            here.write_volatile(5);
            there.add(PAGE as usize).write_volatile(6);
            assert_eq!(there.read_volatile(), 5);
            assert_eq!(here.add(PAGE as usize).read_volatile(), 6);
            drop(memory);
            assert_eq!(there.read_volatile(), 5);
        }
    }
}
