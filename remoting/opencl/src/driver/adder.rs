//! A test device that only adds, synchronously and in place, for tests that check results.
//!
//! Buffers and shared virtual memory are memory of this process. Every kernel has two arguments: a
//! buffer or an address, and a 32-bit number. It adds the number to as many words there as it is
//! enqueued for. Everything else is as in [`null`](super::null).

use std::{
    ffi::c_void,
    sync::{Mutex, MutexGuard, PoisonError},
};

use remoting_proto::apis::opencl::codes;

use super::{
    api::{Api, Handle},
    null::{Argument, Outcome},
};

/// What a kernel adds to.
#[derive(Clone, Copy)]
enum Target {
    Buffer(Handle),
    /// Start address in shared virtual memory.
    Shared(usize),
}

/// Buffers by their nonzero handles, allocations, and the arguments that were set last.
struct Memory {
    buffers: Vec<Vec<u8>>,
    shared: Vec<Vec<u8>>,
    target: Target,
    number: u32,
}

static MEMORY: Mutex<Memory> = Mutex::new(Memory {
    buffers: Vec::new(),
    shared: Vec::new(),
    target: Target::Buffer(0),
    number: 0,
});

fn memory() -> MutexGuard<'static, Memory> {
    MEMORY.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Memory {
    fn buffer(&mut self, handle: Handle) -> Option<&mut Vec<u8>> {
        self.buffers.get_mut(handle.checked_sub(1)?)
    }

    /// A range of a buffer.
    fn part(&mut self, handle: Handle, offset: usize, size: usize) -> Option<&mut [u8]> {
        let end = offset.checked_add(size)?;
        self.buffer(handle)?.get_mut(offset..end)
    }

    /// The rest of an allocation, from an address to its end.
    fn from(&mut self, address: usize) -> Option<&mut [u8]> {
        self.shared.iter_mut().find_map(|allocation| {
            let offset = address.checked_sub(allocation.as_ptr() as usize)?;
            allocation.get_mut(offset..).filter(|rest| !rest.is_empty())
        })
    }
}

/// A driver whose `clEnqueueNDRangeKernel` adds; see the module's documentation.
#[must_use]
pub fn open() -> Api {
    Api::null()
        .with_memory(create, read, write, set, enqueue)
        .with_shared_memory(alloc, free, copy, point)
}

unsafe extern "C" fn create(
    _context: Handle,
    _flags: u64,
    size: usize,
    contents: *mut c_void,
    code: *mut i32,
) -> Handle {
    let mut bytes = vec![0; size];
    if !contents.is_null() {
        // SAFETY: the caller's memory, of the buffer's size.
        unsafe {
            contents
                .cast::<u8>()
                .copy_to_nonoverlapping(bytes.as_mut_ptr(), size)
        };
    }
    // SAFETY: null or writable.
    unsafe { code.tell() };
    let mut memory = memory();
    memory.buffers.push(bytes);
    memory.buffers.len()
}

/// `clEnqueueReadBuffer` and `clEnqueueWriteBuffer`, which differ in the direction of `copy`. It
/// receives the range of the buffer.
///
/// # Safety
/// `event` is null or writable.
unsafe fn transfer(
    (buffer, offset, size): (Handle, usize, usize),
    event: *mut Handle,
    copy: impl FnOnce(&mut [u8]),
) -> i32 {
    let mut memory = memory();
    let Some(part) = memory.part(buffer, offset, size) else {
        return codes::INVALID_VALUE;
    };
    copy(part);
    // SAFETY: the caller's promise.
    unsafe { event.tell() };
    i32::success()
}

#[allow(clippy::too_many_arguments)]
unsafe extern "C" fn read(
    _queue: Handle,
    buffer: Handle,
    _blocking: u32,
    offset: usize,
    size: usize,
    to: *mut c_void,
    _count: u32,
    _wait: *const Handle,
    event: *mut Handle,
) -> i32 {
    // SAFETY: the caller's memory, of that size.
    let copy = |part: &mut [u8]| unsafe { to.cast::<u8>().copy_from(part.as_ptr(), size) };
    // SAFETY: the caller's pointer, null or writable.
    unsafe { transfer((buffer, offset, size), event, copy) }
}

#[allow(clippy::too_many_arguments)]
unsafe extern "C" fn write(
    _queue: Handle,
    buffer: Handle,
    _blocking: u32,
    offset: usize,
    size: usize,
    from: *const c_void,
    _count: u32,
    _wait: *const Handle,
    event: *mut Handle,
) -> i32 {
    // SAFETY: as for `read`.
    let copy = |part: &mut [u8]| unsafe { from.cast::<u8>().copy_to(part.as_mut_ptr(), size) };
    // SAFETY: as above.
    unsafe { transfer((buffer, offset, size), event, copy) }
}

unsafe extern "C" fn set(_kernel: Handle, index: u32, size: usize, value: *const c_void) -> i32 {
    let mut memory = memory();
    match (index, size) {
        (0, 8) => {
            // SAFETY: the value has the size passed beside it.
            let buffer = unsafe { value.cast::<Handle>().read_unaligned() };
            memory.target = Target::Buffer(buffer);
        }
        // SAFETY: as above.
        (1, 4) => memory.number = unsafe { value.cast::<u32>().read_unaligned() },
        _ => return codes::INVALID_ARG_INDEX,
    }
    i32::success()
}

#[allow(clippy::too_many_arguments)]
unsafe extern "C" fn enqueue(
    _queue: Handle,
    _kernel: Handle,
    _dimensions: u32,
    _offset: *const usize,
    global: *const usize,
    _local: *const usize,
    _count: u32,
    _wait: *const Handle,
    event: *mut Handle,
) -> i32 {
    // SAFETY: there is at least one dimension.
    let items = unsafe { global.read() };
    let mut memory = memory();
    let (target, number) = (memory.target, memory.number);
    let words = match target {
        Target::Buffer(buffer) => memory.buffer(buffer).map(Vec::as_mut_slice),
        Target::Shared(address) => memory.from(address),
    };
    let Some(words) = words else {
        return codes::INVALID_KERNEL_ARGS;
    };
    for word in words.as_chunks_mut().0.iter_mut().take(items) {
        *word = u32::from_le_bytes(*word).wrapping_add(number).to_le_bytes();
    }
    // SAFETY: null or writable.
    unsafe { event.tell() };
    i32::success()
}

unsafe extern "C" fn alloc(_: Handle, _: u64, size: usize, _: u32) -> *mut c_void {
    let mut allocation = vec![0u8; size];
    let start = allocation.as_mut_ptr();
    memory().shared.push(allocation);
    start.cast()
}

unsafe extern "C" fn free(_: Handle, pointer: *mut c_void) {
    let start = pointer.cast::<u8>().cast_const();
    memory()
        .shared
        .retain(|allocation| allocation.as_ptr() != start);
}

#[allow(clippy::too_many_arguments)]
unsafe extern "C" fn copy(
    _queue: Handle,
    _blocking: u32,
    to: *mut c_void,
    from: *const c_void,
    size: usize,
    _count: u32,
    _wait: *const Handle,
    event: *mut Handle,
) -> i32 {
    let _memory = memory();
    // SAFETY: the caller guarantees both sides; the event is null or writable.
    unsafe {
        to.cast::<u8>().copy_from(from.cast(), size);
        event.tell();
    }
    i32::success()
}

unsafe extern "C" fn point(_kernel: Handle, index: u32, address: *const c_void) -> i32 {
    if index != 0 {
        return codes::INVALID_ARG_INDEX;
    }
    memory().target = Target::Shared(address as usize);
    i32::success()
}
