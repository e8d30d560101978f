//! Pinned memory, which is in the window, where the device reads and writes it directly. Without a
//! shared window it is ordinary memory. Managed memory is pinned memory, too: coherent, and not
//! migrated.

use std::{
    ffi::{c_int, c_uint, c_void},
    mem,
    sync::Mutex,
};

use base::{Mapping, Unpoisoned};
use cuda_definition::driver::types::*;
use remoting_proto::apis::cuda::{Kind, calls::Pin, codes};

use crate::{
    context::{self, Waited},
    device,
    entry::{Outcome, connected, entry_points, put},
    handles,
    link::Link,
    memory::{Known, What, find},
    paged::PLACES,
};

/// All flags that exist: `CU_MEMHOSTALLOC_PORTABLE` and the like.
const FLAGS: u32 = 0x7;
/// The same of registered memory: `CU_MEMHOSTREGISTER_READ_ONLY` is one more.
const REGISTER_FLAGS: u32 = 0xf;
/// `CU_MEMHOSTALLOC_DEVICEMAP` and `CU_MEMHOSTREGISTER_DEVICEMAP`, which all memory has where addresses are unified.
const DEVICE_MAP: u32 = 2;
/// `CU_DEVICE_CPU`
const HOST: CUdevice = -1;

/// Reserves a stretch of the window that the device knows, in one part if possible. Returns its
/// offset and its address on the device.
fn pinned(link: &Link, context: u32, length: u64) -> Outcome<(u64, u64)> {
    let mut tried = Vec::new();
    let found = loop {
        let whole = tried.len() < PLACES;
        let Some(offset) = link.reserve_lasting(length) else {
            // The places that were tried before are free again: one of them has to do.
            match tried.pop() {
                Some(offset) => break pin(link, context, offset, length, false),
                None => break Err(codes::OUT_OF_MEMORY),
            }
        };
        match pin(link, context, offset, length, whole) {
            Err(codes::NOT_SUPPORTED) if whole => tried.push(offset),
            found => break found,
        }
    };
    for offset in tried {
        link.free(offset, length);
    }
    found
}

fn pin(link: &Link, context: u32, offset: u64, length: u64, whole: bool) -> Outcome<(u64, u64)> {
    let pinned = link.ask(&Pin {
        context,
        offset,
        length,
        whole,
    });
    match pinned {
        Ok(device) => Ok((offset, device)),
        // The caller tries again.
        Err(codes::NOT_SUPPORTED) if whole => Err(codes::NOT_SUPPORTED),
        Err(code) => {
            link.free(offset, length);
            Err(code)
        }
    }
}

fn allocate(size: usize, what: What, flags: u32) -> Outcome<u64> {
    let link = connected()?;
    let context = context::need()?;
    if size == 0 {
        return Err(codes::INVALID_VALUE);
    }
    let length = size as u64;
    if !link.is_shared() {
        if what == What::Managed {
            return Err(codes::NOT_SUPPORTED);
        }
        // Forked children share it, as they share pinned memory.
        let mapping = Mapping::common(size).map_err(|_| codes::OUT_OF_MEMORY)?;
        let at = mapping.start() as u64;
        std::mem::forget(mapping);
        let mut memory = link.state.memory.lock_unpoisoned();
        memory.insert(at, length, what, flags, 0);
        return Ok(at);
    }
    let found = pinned(link, context, length);
    let (offset, device) = match found {
        Err(codes::OUT_OF_MEMORY) if free_kept(link, context)? => pinned(link, context, length)?,
        found => found?,
    };
    let at = link.pointer(offset, length)?;
    // Natively, forked children have pinned memory, and fault at managed memory.
    if what == What::Host {
        link.hand_out(offset, length);
    }
    // SAFETY: reserved just now, and not used by anyone else.
    unsafe { at.write_bytes(0, size) };
    let mut memory = link.state.memory.lock_unpoisoned();
    memory.insert(at as u64, length, what, flags, device);
    Ok(at as u64)
}

/// Pinned memory that was given up beside captures: work may still use it.
#[derive(Debug, Default)]
pub struct Kept(Mutex<Vec<Known>>);

impl Kept {
    fn is_empty(&self) -> bool {
        self.0.lock_unpoisoned().is_empty()
    }

    /// Waits for all work, and returns what nothing uses any more: what `wait` gives up, and what was kept before. What
    /// others keep meanwhile was not waited for. Beside captures, it is not certain what is used: all stays.
    fn settle(&self, wait: impl FnOnce() -> (Option<Known>, Waited)) -> (Vec<Known>, Outcome) {
        let mut before = mem::take(&mut *self.0.lock_unpoisoned());
        let (known, waited) = wait();
        before.extend(known);
        match waited {
            Waited::Done(outcome) => (before, outcome),
            Waited::Captured => {
                self.0.lock_unpoisoned().append(&mut before);
                (before, Ok(()))
            }
        }
    }
}

/// Gives up pinned memory when nothing uses it any more. Beside captures, that is not certain: it stays reserved until
/// more is given up, or an allocation finds no room.
///
/// # Errors
/// The driver's, of earlier work: it is not this memory's fault.
pub fn give_up(link: &Link, context: u32, at: u64) -> Outcome {
    let (unused, outcome) = link.state.kept.settle(|| {
        let waited = context::wait_for_all(link, context);
        let known = link.state.memory.lock_unpoisoned().remove(at);
        (known, waited)
    });
    unused.into_iter().for_each(|known| free(link, known));
    outcome
}

/// Frees what was kept, if no streams are captured any more; false if that is nothing.
///
/// # Errors
/// The driver's, of earlier work: it is not this memory's fault.
fn free_kept(link: &Link, context: u32) -> Outcome<bool> {
    let kept = &link.state.kept;
    if kept.is_empty() {
        return Ok(false);
    }
    let (unused, outcome) = kept.settle(|| (None, context::wait_for_all(link, context)));
    let is_any = !unused.is_empty();
    unused.into_iter().for_each(|known| free(link, known));
    outcome.map(|()| is_any)
}

fn free(link: &Link, known: Known) {
    let at = known.start;
    match link.window.offset_of(at as *const u8, known.size) {
        Some(offset) => link.free(offset, known.size),
        // SAFETY: mapped with this length, given up, and no longer in any list.
        None => drop(unsafe { Mapping::from_raw_parts(at as *mut u8, known.size as usize) }),
    }
}

fn host(link: &Link, at: u64) -> Outcome<Known> {
    let hosts = |what| matches!(what, What::Host | What::Managed | What::Registered);
    let known = find(link, at).filter(|known| hosts(known.what));
    known.ok_or(codes::INVALID_VALUE)
}

entry_points! {
    fn cuMemAllocHost_v2(pp: *mut *mut c_void, bytesize: usize) {
        if bytesize == 0 {
            context::need_connected()?;
            return put(pp, std::ptr::null_mut());
        }
        put(pp, allocate(bytesize, What::Host, 0)? as *mut c_void)
    }

    fn cuMemHostAlloc(pp: *mut *mut c_void, bytesize: usize, Flags: c_uint) {
        if Flags & !FLAGS != 0 {
            return Err(codes::INVALID_VALUE);
        }
        if bytesize == 0 {
            context::need_connected()?;
            return put(pp, std::ptr::null_mut());
        }
        put(pp, allocate(bytesize, What::Host, Flags)? as *mut c_void)
    }

    fn cuMemAllocManaged(dptr: *mut CUdeviceptr, bytesize: usize, flags: c_uint) {
        // Global, or to the host.
        if !matches!(flags, 1 | 2) {
            connected()?;
            return Err(codes::INVALID_VALUE);
        }
        put(dptr, allocate(bytesize, What::Managed, flags)?)
    }

    fn cuMemFreeHost(p: *mut c_void) {
        let link = connected()?;
        if p.is_null() {
            return Ok(());
        }
        let context = context::need()?;
        let known = host(link, p as u64)?;
        if known.start != p as u64 || known.what != What::Host {
            return Err(codes::INVALID_VALUE);
        }
        // Copies may be in flight.
        give_up(link, context, known.start)
    }

    // Copies of registered memory pass through the window, in stream order.
    fn cuMemHostRegister_v2(p: *mut c_void, bytesize: usize, Flags: c_uint) {
        let link = connected()?;
        context::need()?;
        if p.is_null() || bytesize == 0 || Flags & !REGISTER_FLAGS != 0 {
            return Err(codes::INVALID_VALUE);
        }
        let end = (p as u64).checked_add(bytesize as u64).ok_or(codes::INVALID_VALUE)?;
        let mut memory = link.state.memory.lock_unpoisoned();
        if memory.overlaps(p as u64, end) {
            return Err(codes::HOST_MEMORY_ALREADY_REGISTERED);
        }
        memory.insert(p as u64, bytesize as u64, What::Registered, Flags, 0);
        Ok(())
    }

    fn cuMemHostUnregister(p: *mut c_void) {
        let link = connected()?;
        let context = context::need()?;
        match find(link, p as u64) {
            Some(known) if known.start == p as u64 && known.what == What::Registered => {}
            None if !p.is_null() => return Err(codes::HOST_MEMORY_NOT_REGISTERED),
            _ => return Err(codes::INVALID_VALUE),
        }
        // Copies may be in flight, and the program frees the memory next. An earlier error is not this memory's fault.
        let waited = context::wait_for_all(link, context);
        link.state.memory.lock_unpoisoned().remove(p as u64);
        match waited {
            Waited::Done(outcome) => outcome,
            // Its copies in streams that are not captured were waited for; not those in default streams, those that
            // destroyed streams have left, and those before a capture in the captured stream.
            Waited::Captured => Ok(()),
        }
    }

    fn cuMemHostGetDevicePointer_v2(pdptr: *mut CUdeviceptr, p: *mut c_void, Flags: c_uint) {
        let link = connected()?;
        context::need()?;
        let known = host(link, p as u64)?;
        if Flags != 0 {
            return Err(codes::INVALID_VALUE);
        }
        if known.device == 0 {
            return Err(codes::NOT_SUPPORTED);
        }
        put(pdptr, known.device + (p as u64 - known.start))
    }

    fn cuMemHostGetFlags(pFlags: *mut c_uint, p: *mut c_void) {
        let link = connected()?;
        context::need()?;
        let known = host(link, p as u64)?;
        // Those of managed memory are other ones.
        let flags = if known.what == What::Managed { 0 } else { known.flags };
        put(pFlags, flags | DEVICE_MAP)
    }

    // Managed memory is where both the host and the device see it: it cannot be moved anywhere
    // else.
    fn cuMemPrefetchAsync_v2(
        devPtr: CUdeviceptr,
        count: usize,
        location: CUmemLocation,
        flags: c_uint,
        hStream: CUstream,
    ) {
        let link = connected()?;
        context::need()?;
        if flags != 0 {
            return Err(codes::INVALID_VALUE);
        }
        check_managed(link, devPtr, count)?;
        check_location(location)?;
        handles::valid(Kind::Stream, hStream as u64).map(drop)
    }

    fn cuMemAdvise_v2(devPtr: CUdeviceptr, count: usize, advice: CUmem_advise, location: CUmemLocation) {
        let link = connected()?;
        context::need()?;
        check_managed(link, devPtr, count)?;
        match advice.0 {
            1 | 2 | 4 => Ok(()),
            3 | 5 | 6 => check_location(location).map_err(|_| codes::INVALID_VALUE),
            _ => Err(codes::INVALID_VALUE),
        }
    }

    fn cuMemPrefetchAsync(devPtr: CUdeviceptr, count: usize, dstDevice: CUdevice, hStream: CUstream) {
        cu(cuMemPrefetchAsync_v2(devPtr, count, location(dstDevice), 0, hStream))
    }

    fn cuMemAdvise(devPtr: CUdeviceptr, count: usize, advice: CUmem_advise, device: CUdevice) {
        cu(cuMemAdvise_v2(devPtr, count, advice, location(device)))
    }

    fn cuStreamAttachMemAsync(hStream: CUstream, dptr: CUdeviceptr, length: usize, flags: c_uint) {
        let link = connected()?;
        context::need()?;
        handles::valid(Kind::Stream, hStream as u64)?;
        let known = find(link, dptr).filter(|known| known.start == dptr && is_managed(known.what));
        let known = known.ok_or(codes::INVALID_VALUE)?;
        // Global, to the host, or to a single stream.
        match matches!(flags, 1 | 2 | 4) && (length == 0 || length as u64 == known.size) {
            true => Ok(()),
            false => Err(codes::INVALID_VALUE),
        }
    }

    fn cuMemPoolSetAttribute(pool: CUmemoryPool, attr: CUmemPool_attribute, value: *mut c_void) {
        if value.is_null() {
            return Err(codes::INVALID_VALUE);
        }
        let mut whole = 0u64;
        if is_number(attr) {
            whole = u64::from(value.cast::<c_int>().read_unaligned().cast_unsigned());
        } else {
            whole = whole.max(value.cast::<u64>().read_unaligned());
        }
        let words = [pool as u64, attr.0.into(), &raw const whole as u64];
        crate::forward::forward("cuMemPoolSetAttribute", &words)
    }

    fn cuMemPoolGetAttribute(pool: CUmemoryPool, attr: CUmemPool_attribute, value: *mut c_void) {
        let mut whole = 0u64;
        let words = [pool as u64, attr.0.into(), &raw mut whole as u64];
        crate::forward::forward("cuMemPoolGetAttribute", &words)?;
        if is_number(attr) {
            put(value.cast::<u32>(), whole as u32)
        } else {
            put(value.cast::<u64>(), whole)
        }
    }
}

/// Whether memory may be managed. Variables of modules are, if they were declared so, which is not known here.
fn is_managed(what: What) -> bool {
    matches!(what, What::Managed | What::Variable)
}

/// Checks that a stretch is managed memory.
fn check_managed(link: &Link, at: u64, count: usize) -> Outcome {
    let known = find(link, at).filter(|known| is_managed(known.what));
    let known = known.ok_or(codes::INVALID_VALUE)?;
    match count > 0 && count as u64 <= known.size - (at - known.start) {
        true => Ok(()),
        false => Err(codes::INVALID_VALUE),
    }
}

/// Checks that memory can be in a location.
fn check_location(location: CUmemLocation) -> Outcome {
    use CUmemLocationType as T;
    match location.r#type {
        T::CU_MEM_LOCATION_TYPE_DEVICE => device::check(location.id),
        T::CU_MEM_LOCATION_TYPE_HOST
        | T::CU_MEM_LOCATION_TYPE_HOST_NUMA
        | T::CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT => Ok(()),
        _ => Err(codes::INVALID_VALUE),
    }
}

/// A device, or the host, as the first versions of calls name it.
fn location(device: CUdevice) -> CUmemLocation {
    let r#type = match device {
        HOST => CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST,
        _ => CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
    };
    CUmemLocation { r#type, id: device }
}

/// The result of another entry point.
fn cu(result: CUresult) -> Outcome {
    match result.0 {
        0 => Ok(()),
        code => Err(code.cast_signed()),
    }
}

/// Whether a pool's attribute is an `int` rather than 64 bits.
fn is_number(attribute: CUmemPool_attribute) -> bool {
    (1..=3).contains(&attribute.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Memory;

    #[test]
    fn what_others_keep_meanwhile_was_not_waited_for() {
        let mut memory = Memory::default();
        let known = |start| {
            memory.insert(start, 1, What::Host, 0, 0);
            memory.remove(start)
        };
        let [first, second, third] = [1, 2, 3].map(known);
        let starts = |known: Vec<Known>| known.iter().map(|known| known.start).collect::<Vec<_>>();
        let kept = Kept::default();
        let (unused, _) = kept.settle(|| (first, Waited::Captured));
        assert_eq!(starts(unused), [0; 0]);
        let (unused, _) = kept.settle(|| {
            let (unused, _) = kept.settle(|| (third, Waited::Captured));
            assert_eq!(starts(unused), [0; 0]);
            (second, Waited::Done(Ok(())))
        });
        assert_eq!(starts(unused), [1, 2]);
        let (unused, _) = kept.settle(|| (None, Waited::Done(Ok(()))));
        assert_eq!(starts(unused), [3]);
    }
}
