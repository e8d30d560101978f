//! Pinned memory, which is in the window, where the device reads and writes it directly. Without a
//! shared window it is ordinary memory. Managed memory is pinned memory, too: coherent, and not
//! migrated.

use std::{
    alloc::{Layout, alloc_zeroed, dealloc},
    ffi::{c_int, c_uint, c_void},
};

use base::Unpoisoned;
use cuda_definition::driver::types::*;
use gantry_remoting::apis::cuda::{
    calls::{ContextSynchronize, Pin},
    codes,
};

use crate::{
    context,
    entry::{Outcome, connected, entry_points, put},
    link::Link,
    memory::{What, find},
    streams::exact,
};

/// All flags that exist: `CU_MEMHOSTALLOC_PORTABLE` and the like.
const FLAGS: u32 = 0x7;
/// The number of places to try for memory which has to be contiguous for the device.
const PLACES: usize = 4;

fn layout(size: u64) -> Outcome<Layout> {
    Layout::from_size_align(size as usize, 4096).map_err(|_| codes::OUT_OF_MEMORY)
}

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
        // SAFETY: the size is not 0.
        let at = unsafe { alloc_zeroed(layout(length)?) } as u64;
        if at == 0 {
            return Err(codes::OUT_OF_MEMORY);
        }
        let mut memory = link.state.memory.lock_unpoisoned();
        memory.insert(at, length, what, flags, 0);
        return Ok(at);
    }
    let (offset, device) = pinned(link, context, length)?;
    let at = link.pointer(offset, length)?;
    // SAFETY: reserved just now, and not used by anyone else.
    unsafe { at.write_bytes(0, size) };
    let mut memory = link.state.memory.lock_unpoisoned();
    memory.insert(at as u64, length, what, flags, device);
    Ok(at as u64)
}

/// Frees pinned memory that nothing uses any more.
pub fn give_back(link: &Link, at: u64) {
    let Some(known) = link.state.memory.lock_unpoisoned().remove(at) else {
        return;
    };
    match link.window.offset_of(at as *const u8, known.size) {
        Some(offset) => link.free(offset, known.size),
        None => {
            if let Ok(layout) = layout(known.size) {
                // SAFETY: allocated with this layout, and no longer in any list.
                unsafe { dealloc(at as *mut u8, layout) };
            }
        }
    }
}

fn host(link: &Link, at: u64) -> Outcome<crate::memory::Known> {
    let hosts = |what| matches!(what, What::Host | What::Managed | What::Registered);
    let known = find(link, at).filter(|known| hosts(known.what));
    known.ok_or(codes::INVALID_VALUE)
}

entry_points! {
    fn cuMemAllocHost_v2(pp: *mut *mut c_void, bytesize: usize) {
        put(pp, allocate(bytesize, What::Host, 0)? as *mut c_void)
    }

    fn cuMemHostAlloc(pp: *mut *mut c_void, bytesize: usize, Flags: c_uint) {
        if Flags & !FLAGS != 0 {
            return Err(codes::INVALID_VALUE);
        }
        put(pp, allocate(bytesize, What::Host, Flags)? as *mut c_void)
    }

    fn cuMemAllocManaged(dptr: *mut CUdeviceptr, bytesize: usize, flags: c_uint) {
        put(dptr, allocate(bytesize, What::Managed, flags)?)
    }

    fn cuMemFreeHost(p: *mut c_void) {
        let link = connected()?;
        let context = context::need()?;
        let known = host(link, p as u64)?;
        if known.start != p as u64 || known.what != What::Host {
            return Err(codes::INVALID_VALUE);
        }
        // Copies may be in flight. An earlier error is not this memory's fault.
        let waited = link.ask(&ContextSynchronize { context });
        give_back(link, known.start);
        exact(link, context, 0, waited)
    }

    // Copies of registered memory pass through the window, as those of other memory do.
    fn cuMemHostRegister_v2(p: *mut c_void, bytesize: usize, Flags: c_uint) {
        let link = connected()?;
        context::need()?;
        if p.is_null() || bytesize == 0 {
            return Err(codes::INVALID_VALUE);
        }
        let mut memory = link.state.memory.lock_unpoisoned();
        if memory.find(p as u64).is_some() {
            return Err(codes::HOST_MEMORY_ALREADY_REGISTERED);
        }
        memory.insert(p as u64, bytesize as u64, What::Registered, Flags, 0);
        Ok(())
    }

    fn cuMemHostUnregister(p: *mut c_void) {
        let link = connected()?;
        context::need()?;
        let known = find(link, p as u64)
            .filter(|known| known.start == p as u64 && known.what == What::Registered);
        known.ok_or(codes::HOST_MEMORY_NOT_REGISTERED)?;
        link.state.memory.lock_unpoisoned().remove(p as u64);
        Ok(())
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
        put(pFlags, host(link, p as u64)?.flags)
    }

    // Managed memory is where both the host and the device see it: it cannot be moved anywhere
    // else.
    fn cuMemPrefetchAsync_v2(
        _devPtr: CUdeviceptr,
        _count: usize,
        _location: CUmemLocation,
        _flags: c_uint,
        _hStream: CUstream,
    ) {
        connected().map(drop)
    }

    fn cuMemAdvise_v2(_devPtr: CUdeviceptr, _count: usize, _advice: CUmem_advise, _location: CUmemLocation) {
        connected().map(drop)
    }

    fn cuMemPrefetchAsync(_devPtr: CUdeviceptr, _count: usize, _dstDevice: CUdevice, _hStream: CUstream) {
        connected().map(drop)
    }

    fn cuMemAdvise(_devPtr: CUdeviceptr, _count: usize, _advice: CUmem_advise, _device: CUdevice) {
        connected().map(drop)
    }

    fn cuStreamAttachMemAsync(_hStream: CUstream, _dptr: CUdeviceptr, _length: usize, _flags: c_uint) {
        connected().map(drop)
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

/// Whether a pool's attribute is an `int` rather than 64 bits.
fn is_number(attribute: CUmemPool_attribute) -> bool {
    (1..=3).contains(&attribute.0)
}
