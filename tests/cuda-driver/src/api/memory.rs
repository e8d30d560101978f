//! Memory, and attributes of pointers.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use cuda_definition::driver::types::*;

use super::{entry_points, graph_memory, offer, put};
use crate::driver::{
    Answer, MOST_DEVICES, Owner,
    context::{self, Context},
    devices,
    memory::{Allocation, Kind, memory, trusts},
    objects,
};

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

fn allocate(size: usize, kind: Kind, flags: c_uint) -> Answer<u64> {
    let context = context::current()?;
    memory().allocate(size as u64, kind, flags, context.owner())
}

/// Frees memory once nothing can be using it.
fn free(at: u64, kinds: &[Kind]) -> Answer {
    let own = context::current()?;
    for context in objects::contexts() {
        // A fault of another context does not concern this one.
        let _: Answer = context.synchronize();
    }
    memory().free(at, kinds)?;
    graph_memory::freed(at);
    own.check()
}

fn attribute(
    attribute: CUpointer_attribute,
    at: u64,
    found: Option<Allocation>,
    data: *mut c_void,
) -> Answer {
    use CUpointer_attribute as A;
    // Memory unknown to the driver has few attributes.
    let known = || found.ok_or(INVALID);
    // SAFETY: the caller has room for a value of the attribute's type.
    unsafe {
        match attribute {
            A::CU_POINTER_ATTRIBUTE_CONTEXT => put(data.cast(), known()?.owner.context),
            A::CU_POINTER_ATTRIBUTE_MEMORY_TYPE => {
                let host = matches!(known()?.kind, Kind::Host | Kind::Registered);
                let kind = if host {
                    CUmemorytype::CU_MEMORYTYPE_HOST
                } else {
                    CUmemorytype::CU_MEMORYTYPE_DEVICE
                };
                put(data.cast(), kind)
            }
            A::CU_POINTER_ATTRIBUTE_DEVICE_POINTER => known().and_then(|_| put(data.cast(), at)),
            A::CU_POINTER_ATTRIBUTE_HOST_POINTER => match known()?.kind.host() {
                true => put(data.cast(), at),
                false => Err(INVALID),
            },
            A::CU_POINTER_ATTRIBUTE_BUFFER_ID => put(data.cast(), known()?.id),
            A::CU_POINTER_ATTRIBUTE_IS_MANAGED => put(
                data.cast(),
                u32::from(found.is_some_and(|found| found.kind == Kind::Managed)),
            ),
            A::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL => put(data.cast(), known()?.owner.device),
            A::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR => put(data.cast(), known()?.start),
            A::CU_POINTER_ATTRIBUTE_RANGE_SIZE => put(data.cast(), known()?.size),
            A::CU_POINTER_ATTRIBUTE_MAPPED => put(data.cast(), u32::from(found.is_some())),
            A::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
            | A::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS => put(data.cast(), 0u32),
            _ => Err(CUresult::CUDA_ERROR_NOT_SUPPORTED),
        }
    }
}

entry_points! {
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        let context = context::current()?;
        let (unused, all) = memory().info(context.device);
        offer(free, usize::try_from(unused).unwrap_or(usize::MAX));
        offer(total, usize::try_from(all).unwrap_or(usize::MAX));
        Ok(())
    }

    fn cuMemAlloc_v2(dptr: *mut CUdeviceptr, bytesize: usize) {
        put(dptr, allocate(bytesize, Kind::Device, 0)?)
    }

    fn cuMemAllocPitch_v2(
        dptr: *mut CUdeviceptr,
        pPitch: *mut usize,
        WidthInBytes: usize,
        Height: usize,
        ElementSizeBytes: c_uint,
    ) {
        if !matches!(ElementSizeBytes, 4 | 8 | 16) {
            return Err(INVALID);
        }
        let pitch = WidthInBytes.checked_next_multiple_of(512).ok_or(INVALID)?;
        put(dptr, allocate(pitch.checked_mul(Height).ok_or(INVALID)?, Kind::Device, 0)?)?;
        put(pPitch, pitch)
    }

    fn cuMemAllocManaged(dptr: *mut CUdeviceptr, bytesize: usize, flags: c_uint) {
        put(dptr, allocate(bytesize, Kind::Managed, flags)?)
    }

    fn cuMemFree_v2(dptr: CUdeviceptr) {
        if dptr == 0 { Ok(()) } else { free(dptr, &[Kind::Device, Kind::Managed]) }
    }

    fn cuMemAllocAsync(dptr: *mut CUdeviceptr, bytesize: usize, hStream: CUstream) {
        // The address is known at once. Using it too early is the program's mistake.
        let context = context::current()?;
        let stream = context.stream(hStream)?;
        let at = Pool::allocate(context.device, bytesize)?;
        graph_memory::capture_allocation(&stream, at);
        put(dptr, at)
    }

    fn cuMemAllocFromPoolAsync(dptr: *mut CUdeviceptr, bytesize: usize, pool: CUmemoryPool, hStream: CUstream) {
        let device = known(pool)?;
        let stream = context::current()?.stream(hStream)?;
        let at = Pool::allocate(device, bytesize)?;
        graph_memory::capture_allocation(&stream, at);
        put(dptr, at)
    }

    fn cuDeviceSetMemPool(dev: CUdevice, pool: CUmemoryPool) {
        super::device(dev)?;
        known(pool).map(drop)
    }

    fn cuMemPoolSetAccess(pool: CUmemoryPool, _map: *const CUmemAccessDesc, _count: usize) {
        known(pool).map(drop)
    }

    fn cuMemFreeAsync(dptr: CUdeviceptr, hStream: CUstream) {
        // The stream may belong to a context other than the current one.
        let current = context::current()?;
        let stream = current.stream(hStream).or_else(|_| objects::stream(hStream))?;
        let context = stream.context.upgrade().ok_or(CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED)?;
        let found = memory().find(dptr).filter(|found| found.start == dptr && found.kind == Kind::Device);
        found.ok_or(INVALID)?;
        if graph_memory::capture_free(&stream, dptr) {
            return Ok(());
        }
        context.submit(&stream, std::sync::Arc::new(move |_: &_| {
            graph_memory::freed(dptr);
            memory().free(dptr, &[Kind::Device])
        }))?;
        Ok(())
    }

    fn cuMemGetAddressRange_v2(pbase: *mut CUdeviceptr, psize: *mut usize, dptr: CUdeviceptr) {
        context::current()?;
        let found = memory().find(dptr).ok_or(CUresult::CUDA_ERROR_NOT_FOUND)?;
        offer(pbase, found.start);
        offer(psize, usize::try_from(found.size).unwrap_or(usize::MAX));
        Ok(())
    }

    fn cuMemAllocHost_v2(pp: *mut *mut c_void, bytesize: usize) {
        put(pp, allocate(bytesize, Kind::Host, 0)? as *mut c_void)
    }

    fn cuMemHostAlloc(pp: *mut *mut c_void, bytesize: usize, Flags: c_uint) {
        put(pp, allocate(bytesize, Kind::Host, Flags)? as *mut c_void)
    }

    fn cuMemFreeHost(p: *mut c_void) {
        free(p as u64, &[Kind::Host])
    }

    fn cuMemHostRegister_v2(p: *mut c_void, bytesize: usize, Flags: c_uint) {
        let context = context::current()?;
        memory().register(p as u64, bytesize as u64, Flags, context.owner())
    }

    fn cuMemHostUnregister(p: *mut c_void) {
        let answer = free(p as u64, &[Kind::Registered]);
        answer.map_err(|error| if error == INVALID { CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED } else { error })
    }

    fn cuMemHostGetDevicePointer_v2(pdptr: *mut CUdeviceptr, p: *mut c_void, Flags: c_uint) {
        context::current()?;
        let found = memory().find(p as u64).filter(|found| found.kind.host() && Flags == 0);
        found.ok_or(INVALID)?;
        put(pdptr, p as u64)
    }

    fn cuMemHostGetFlags(pFlags: *mut c_uint, p: *mut c_void) {
        context::current()?;
        let found = memory().find(p as u64).filter(|found| found.kind.host());
        put(pFlags, found.ok_or(INVALID)?.flags)
    }

    fn cuPointerGetAttribute(data: *mut c_void, attribute: CUpointer_attribute, ptr: CUdeviceptr) {
        context::initialised()?;
        self::attribute(attribute, ptr, memory().find(ptr), data)
    }

    fn cuPointerGetAttributes(
        numAttributes: c_uint,
        attributes: *mut CUpointer_attribute,
        data: *mut *mut c_void,
        ptr: CUdeviceptr,
    ) {
        context::initialised()?;
        if attributes.is_null() || data.is_null() {
            return Err(INVALID);
        }
        let found = memory().find(ptr);
        for number in 0..numAttributes as usize {
            let (one, to) = (attributes.add(number).read(), data.add(number).read());
            if self::attribute(one, ptr, found, to) == Err(INVALID) {
                // Attributes of foreign memory read as zero here.
                offer(to.cast::<u32>(), 0);
            }
        }
        Ok(())
    }

    fn cuDeviceGetDefaultMemPool(pool_out: *mut CUmemoryPool, dev: CUdevice) {
        super::device(dev)?;
        put(pool_out, handle(dev))
    }

    fn cuDeviceGetMemPool(pool: *mut CUmemoryPool, dev: CUdevice) {
        super::device(dev)?;
        put(pool, handle(dev))
    }

    fn cuMemPoolTrimTo(pool: CUmemoryPool, minBytesToKeep: usize) {
        let mut pool = Pool::of(known(pool)?);
        pool.reserved = pool.reserved.min(minBytesToKeep as u64);
        Ok(())
    }

    fn cuMemPoolSetAttribute(pool: CUmemoryPool, attr: CUmemPool_attribute, value: *mut c_void) {
        let device = known(pool)?;
        if attr == CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD {
            Pool::of(device).threshold = *value.cast::<u64>().as_ref().ok_or(INVALID)?;
        }
        Ok(())
    }

    fn cuMemPoolGetAttribute(pool: CUmemoryPool, attr: CUmemPool_attribute, value: *mut c_void) {
        let device = known(pool)?;
        match attr.0 {
            1..=3 => put(value.cast::<c_int>(), 1),
            4 => put(value.cast::<u64>(), Pool::of(device).threshold),
            5 => put(value.cast::<u64>(), Pool::of(device).reserved(device)),
            7 => put(value.cast::<u64>(), memory().pooled(device)),
            6 | 8 => put(value.cast::<u64>(), 0),
            _ => Err(INVALID),
        }
    }

    fn cuDeviceGetGraphMemAttribute(device: CUdevice, attr: CUgraphMem_attribute, value: *mut c_void) {
        // Graphs use the pool's memory here.
        super::device(device)?;
        match attr.0 {
            0..=3 => put(value.cast::<u64>(), 0),
            _ => Err(INVALID),
        }
    }
}

/// The handle of the first device's pool. Each device has one.
const POOLS: u64 = 0x7b00_0000_0000;

fn handle(device: CUdevice) -> CUmemoryPool {
    (POOLS + device as u64) as CUmemoryPool
}

/// What a pool reports as reserved. It is only a figure: memory is given back at once.
struct Pool {
    threshold: u64,
    reserved: u64,
}

impl Pool {
    fn of(device: i32) -> MutexGuard<'static, Self> {
        static ALL: [Mutex<Pool>; MOST_DEVICES as usize] = [const {
            Mutex::new(Pool {
                threshold: 0,
                reserved: 0,
            })
        }; MOST_DEVICES as usize];
        ALL[device as usize]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn allocate(device: i32, size: usize) -> Answer<u64> {
        let owner = Owner { context: 0, device };
        let at = memory().allocate(size as u64, Kind::Device, 0, owner)?;
        let mut pool = Self::of(device);
        pool.reserved = pool.reserved(device);
        Ok(at)
    }

    fn reserved(&self, device: i32) -> u64 {
        let kept = self.reserved.min(self.threshold);
        kept.max(memory().pooled(device))
    }
}

/// The device of a pool.
fn known(pool: CUmemoryPool) -> Answer<i32> {
    context::initialised()?;
    (0..devices())
        .find(|device| handle(*device) == pool)
        .ok_or(INVALID)
}

/// Whether host memory is known to the driver, so that copies need not read it at once.
pub fn pinned(at: u64, size: u64) -> bool {
    memory().holds(at, size)
}

/// Copies between addresses of any kind.
///
/// # Safety
/// The source is readable and the target writable until the copy is done.
pub unsafe fn copy(to: u64, from: u64, size: usize) {
    // SAFETY: the caller's promise; the ranges may overlap.
    unsafe { std::ptr::copy(from as *const u8, to as *mut u8, size) };
}

/// Returns an error unless all bytes belong to the device.
pub fn on_device(at: u64, size: usize, _context: &Context) -> Answer {
    if size == 0 || trusts() || memory().holds(at, size as u64) {
        Ok(())
    } else {
        Err(INVALID)
    }
}
