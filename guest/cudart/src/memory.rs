//! Memory: allocations, registration, pools, and pointer attributes.

use std::{
    ffi::{c_int, c_uint, c_ulonglong, c_void},
    ptr::null_mut,
};

use cuda_definition::{driver::types::*, runtime::types::*};

use crate::{
    api::{entry_points, put, streamed},
    context::{device, ready},
    driver::driver,
    error::{Answer, Error},
};

/// Pitches are suitable for elements of up to 16 bytes.
const ELEMENT: c_uint = 16;

fn location(location: cudaMemLocation) -> CUmemLocation {
    CUmemLocation {
        r#type: CUmemLocationType_enum(location.r#type.0),
        id: location.id,
    }
}

/// The attributes of a pointer. Memory that the driver does not know has type 0 and device -2.
///
/// # Errors
/// The driver's.
pub fn attributes(pointer: *const c_void) -> Answer<cudaPointerAttributes> {
    use CUpointer_attribute as A;
    let (mut kind, mut managed, mut device) = (0u32, 0u32, -2);
    let (mut on_device, mut on_host) = (0u64, null_mut::<c_void>());
    let mut wanted = [
        A::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        A::CU_POINTER_ATTRIBUTE_IS_MANAGED,
        A::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
        A::CU_POINTER_ATTRIBUTE_DEVICE_POINTER,
        A::CU_POINTER_ATTRIBUTE_HOST_POINTER,
    ];
    let mut places: [*mut c_void; 5] = [
        (&raw mut kind).cast(),
        (&raw mut managed).cast(),
        (&raw mut device).cast(),
        (&raw mut on_device).cast(),
        (&raw mut on_host).cast(),
    ];
    let count = c_uint::try_from(wanted.len()).unwrap_or(0);
    // SAFETY: there are as many pointers, to values of the attributes' types, as attributes.
    unsafe {
        driver!(cuPointerGetAttributes(
            count,
            wanted.as_mut_ptr(),
            places.as_mut_ptr(),
            pointer as CUdeviceptr
        ))?;
    }
    let kind = match (CUmemorytype_enum(kind), managed) {
        (_, 1..) => cudaMemoryType::cudaMemoryTypeManaged,
        (CUmemorytype::CU_MEMORYTYPE_HOST, _) => cudaMemoryType::cudaMemoryTypeHost,
        (CUmemorytype_enum(0), _) => cudaMemoryType::cudaMemoryTypeUnregistered,
        _ => cudaMemoryType::cudaMemoryTypeDevice,
    };
    let known = kind != cudaMemoryType::cudaMemoryTypeUnregistered;
    Ok(cudaPointerAttributes {
        r#type: kind,
        device: if known { device } else { -2 },
        devicePointer: if known {
            on_device as *mut c_void
        } else {
            null_mut()
        },
        hostPointer: if known { on_host } else { pointer.cast_mut() },
        reserved: [0; 8],
    })
}

/// An allocation of zero bytes returns null without an error.
fn allocation(
    size: usize,
    to: *mut *mut c_void,
    make: impl FnOnce() -> Answer<CUdeviceptr>,
) -> Answer {
    if to.is_null() {
        return Err(Error::cudaErrorInvalidValue);
    }
    ready()?;
    let at = if size == 0 { 0 } else { make()? };
    // SAFETY: not null, and thus valid for writing a pointer by the caller's promise.
    unsafe { to.write(at as *mut c_void) };
    Ok(())
}

/// Allocates memory in rows, each at a multiple of the returned pitch.
unsafe fn pitched(width: usize, height: usize) -> Answer<(CUdeviceptr, usize)> {
    ready()?;
    let (mut at, mut pitch) = (0, 0);
    if width > 0 && height > 0 {
        // SAFETY: valid for writing the answers.
        unsafe {
            driver!(cuMemAllocPitch_v2(
                &raw mut at,
                &raw mut pitch,
                width,
                height,
                ELEMENT
            ))?
        };
    }
    Ok((at, pitch))
}

entry_points! {
    fn cudaMalloc(devPtr: *mut *mut c_void, size: usize) {
        allocation(size, devPtr, || {
            let mut at = 0;
            driver!(cuMemAlloc_v2(&raw mut at, size))?;
            Ok(at)
        })
    }

    fn cudaMallocManaged(devPtr: *mut *mut c_void, size: usize, flags: c_uint) {
        if size == 0 {
            return Err(Error::cudaErrorInvalidValue);
        }
        allocation(size, devPtr, || {
            let mut at = 0;
            driver!(cuMemAllocManaged(&raw mut at, size, flags))?;
            Ok(at)
        })
    }

    fn cudaMallocPitch(devPtr: *mut *mut c_void, pitch: *mut usize, width: usize, height: usize) {
        let (at, bytes) = pitched(width, height)?;
        put(devPtr, at as *mut c_void)?;
        put(pitch, bytes)
    }

    fn cudaMalloc3D(pitchedDevPtr: *mut cudaPitchedPtr, extent: cudaExtent) {
        let rows = extent.height.checked_mul(extent.depth).ok_or(Error::cudaErrorMemoryAllocation)?;
        let (at, pitch) = pitched(extent.width, rows)?;
        put(pitchedDevPtr, cudaPitchedPtr {
            ptr: at as *mut c_void,
            pitch,
            xsize: extent.width,
            ysize: extent.height,
        })
    }

    fn cudaMallocHost(ptr: *mut *mut c_void, size: usize) {
        allocation(size, ptr, || {
            let mut at = null_mut();
            driver!(cuMemHostAlloc(&raw mut at, size, 0))?;
            Ok(at as CUdeviceptr)
        })
    }

    fn cudaHostAlloc(pHost: *mut *mut c_void, size: usize, flags: c_uint) {
        allocation(size, pHost, || {
            let mut at = null_mut();
            driver!(cuMemHostAlloc(&raw mut at, size, flags))?;
            Ok(at as CUdeviceptr)
        })
    }

    fn cudaFree(devPtr: *mut c_void) {
        // Programs free null to initialize the runtime.
        ready()?;
        if devPtr.is_null() { Ok(()) } else { driver!(cuMemFree_v2(devPtr as CUdeviceptr)) }
    }

    fn cudaFreeHost(ptr: *mut c_void) {
        ready()?;
        if ptr.is_null() { Ok(()) } else { driver!(cuMemFreeHost(ptr)) }
    }

    fn cudaHostRegister(ptr: *mut c_void, size: usize, flags: c_uint) {
        ready()?;
        driver!(cuMemHostRegister_v2(ptr, size, flags))
    }

    fn cudaHostUnregister(ptr: *mut c_void) {
        ready()?;
        driver!(cuMemHostUnregister(ptr))
    }

    fn cudaHostGetDevicePointer(pDevice: *mut *mut c_void, pHost: *mut c_void, flags: c_uint) {
        ready()?;
        let mut at = 0;
        driver!(cuMemHostGetDevicePointer_v2(&raw mut at, pHost, flags))?;
        put(pDevice, at as *mut c_void)
    }

    fn cudaHostGetFlags(pFlags: *mut c_uint, pHost: *mut c_void) {
        ready()?;
        driver!(cuMemHostGetFlags(pFlags, pHost))
    }

    fn cudaMemGetInfo(free: *mut usize, total: *mut usize) {
        ready()?;
        driver!(cuMemGetInfo_v2(free, total))
    }

    fn cudaPointerGetAttributes(attributes: *mut cudaPointerAttributes, ptr: *const c_void) {
        ready()?;
        put(attributes, self::attributes(ptr)?)
    }

    fn cudaMemAdvise(devPtr: *const c_void, count: usize, advice: cudaMemoryAdvise, location: cudaMemLocation) {
        ready()?;
        let (at, place) = (devPtr as CUdeviceptr, self::location(location));
        driver!(cuMemAdvise_v2(at, count, CUmem_advise_enum(advice.0), place))
    }

    fn cudaMemRangeGetAttribute(
        data: *mut c_void,
        dataSize: usize,
        attribute: cudaMemRangeAttribute,
        devPtr: *const c_void,
        count: usize,
    ) {
        ready()?;
        let attribute = CUmem_range_attribute_enum(attribute.0);
        driver!(cuMemRangeGetAttribute(data, dataSize, attribute, devPtr as CUdeviceptr, count))
    }

    fn cudaMemRangeGetAttributes(
        data: *mut *mut c_void,
        dataSizes: *mut usize,
        attributes: *mut cudaMemRangeAttribute,
        numAttributes: usize,
        devPtr: *const c_void,
        count: usize,
    ) {
        ready()?;
        let at = devPtr as CUdeviceptr;
        driver!(cuMemRangeGetAttributes(data, dataSizes, attributes.cast(), numAttributes, at, count))
    }

    fn cudaDeviceGetDefaultMemPool(memPool: *mut cudaMemPool_t, device: c_int) {
        driver!(cuDeviceGetDefaultMemPool(memPool.cast(), self::device(device)?))
    }

    fn cudaDeviceGetMemPool(memPool: *mut cudaMemPool_t, device: c_int) {
        driver!(cuDeviceGetMemPool(memPool.cast(), self::device(device)?))
    }

    fn cudaDeviceSetMemPool(device: c_int, memPool: cudaMemPool_t) {
        driver!(cuDeviceSetMemPool(self::device(device)?, memPool.cast()))
    }

    fn cudaMemPoolTrimTo(memPool: cudaMemPool_t, minBytesToKeep: usize) {
        ready()?;
        driver!(cuMemPoolTrimTo(memPool.cast(), minBytesToKeep))
    }

    fn cudaMemPoolSetAttribute(memPool: cudaMemPool_t, attr: cudaMemPoolAttr, value: *mut c_void) {
        ready()?;
        driver!(cuMemPoolSetAttribute(memPool.cast(), CUmemPool_attribute_enum(attr.0), value))
    }

    fn cudaMemPoolGetAttribute(memPool: cudaMemPool_t, attr: cudaMemPoolAttr, value: *mut c_void) {
        ready()?;
        driver!(cuMemPoolGetAttribute(memPool.cast(), CUmemPool_attribute_enum(attr.0), value))
    }

    fn cudaMemPoolSetAccess(memPool: cudaMemPool_t, descList: *const cudaMemAccessDesc, count: usize) {
        ready()?;
        driver!(cuMemPoolSetAccess(memPool.cast(), descList.cast(), count))
    }

    fn cudaMemPoolGetAccess(
        flags: *mut cudaMemAccessFlags,
        memPool: cudaMemPool_t,
        location: *mut cudaMemLocation,
    ) {
        ready()?;
        driver!(cuMemPoolGetAccess(flags.cast(), memPool.cast(), location.cast()))
    }

    fn cudaMemPoolCreate(memPool: *mut cudaMemPool_t, poolProps: *const cudaMemPoolProps) {
        ready()?;
        // The same structure under two names: both layouts are asserted where they are defined.
        driver!(cuMemPoolCreate(memPool.cast(), poolProps.cast::<CUmemPoolProps>()))
    }

    fn cudaMemPoolDestroy(memPool: cudaMemPool_t) {
        ready()?;
        driver!(cuMemPoolDestroy(memPool.cast()))
    }

    fn cudaMemGetDefaultMemPool(
        memPool: *mut cudaMemPool_t,
        location: *mut cudaMemLocation,
        r#type: cudaMemAllocationType,
    ) {
        ready()?;
        let kind = CUmemAllocationType_enum(r#type.0);
        driver!(cuMemGetDefaultMemPool(memPool.cast(), location.cast(), kind))
    }

    fn cudaMemGetMemPool(
        memPool: *mut cudaMemPool_t,
        location: *mut cudaMemLocation,
        r#type: cudaMemAllocationType,
    ) {
        ready()?;
        let kind = CUmemAllocationType_enum(r#type.0);
        driver!(cuMemGetMemPool(memPool.cast(), location.cast(), kind))
    }

    fn cudaMemSetMemPool(
        location: *mut cudaMemLocation,
        r#type: cudaMemAllocationType,
        memPool: cudaMemPool_t,
    ) {
        ready()?;
        let kind = CUmemAllocationType_enum(r#type.0);
        driver!(cuMemSetMemPool(location.cast(), kind, memPool.cast()))
    }
}
const _: () = {
    assert!(size_of::<cudaMemPoolProps>() == size_of::<CUmemPoolProps>());
    assert!(size_of::<cudaMemAccessDesc>() == size_of::<CUmemAccessDesc>());
    assert!(size_of::<cudaMemLocation>() == size_of::<CUmemLocation>());
    assert!(size_of::<cudaMemcpyAttributes>() == size_of::<CUmemcpyAttributes>());
};

streamed! {
    fn cudaMallocAsync / cudaMallocAsync_ptsz [base] (devPtr: *mut *mut c_void, size: usize, hStream: cudaStream_t) {
        allocation(size, devPtr, || {
            let mut at = 0;
            driver!(cuMemAllocAsync(&raw mut at, size, base.stream(hStream)))?;
            Ok(at)
        })
    }

    fn cudaMallocFromPoolAsync / cudaMallocFromPoolAsync_ptsz [base] (
        ptr: *mut *mut c_void,
        size: usize,
        memPool: cudaMemPool_t,
        stream: cudaStream_t,
    ) {
        allocation(size, ptr, || {
            let mut at = 0;
            driver!(cuMemAllocFromPoolAsync(&raw mut at, size, memPool.cast(), base.stream(stream)))?;
            Ok(at)
        })
    }

    fn cudaFreeAsync / cudaFreeAsync_ptsz [base] (devPtr: *mut c_void, hStream: cudaStream_t) {
        ready()?;
        if devPtr.is_null() {
            return Ok(());
        }
        driver!(cuMemFreeAsync(devPtr as CUdeviceptr, base.stream(hStream)))
    }

    fn cudaMemPrefetchAsync / cudaMemPrefetchAsync_ptsz [base] (
        devPtr: *const c_void,
        count: usize,
        location: cudaMemLocation,
        flags: c_uint,
        stream: cudaStream_t,
    ) {
        ready()?;
        let (at, place) = (devPtr as CUdeviceptr, self::location(location));
        driver!(cuMemPrefetchAsync_v2(at, count, place, flags, base.stream(stream)))
    }

    fn cudaStreamAttachMemAsync / cudaStreamAttachMemAsync_ptsz [base] (
        stream: cudaStream_t,
        devPtr: *mut c_void,
        length: usize,
        flags: c_uint,
    ) {
        ready()?;
        driver!(cuStreamAttachMemAsync(base.stream(stream), devPtr as CUdeviceptr, length, flags))
    }

    fn cudaMemcpyBatchAsync / cudaMemcpyBatchAsync_ptsz [base] (
        dsts: *const *mut c_void,
        srcs: *const *const c_void,
        sizes: *const usize,
        count: usize,
        attrs: *mut cudaMemcpyAttributes,
        attrsIdxs: *mut usize,
        numAttrs: usize,
        stream: cudaStream_t,
    ) {
        ready()?;
        // The driver only reads these lists.
        let (to, from, sizes) = (dsts.cast_mut().cast(), srcs.cast_mut().cast(), sizes.cast_mut());
        let stream = base.stream(stream);
        driver!(cuMemcpyBatchAsync_v2(to, from, sizes, count, attrs.cast(), attrsIdxs, numAttrs, stream))
    }

    fn cudaMemPrefetchBatchAsync / cudaMemPrefetchBatchAsync_ptsz [base] (
        dptrs: *mut *mut c_void,
        sizes: *mut usize,
        count: usize,
        prefetchLocs: *mut cudaMemLocation,
        prefetchLocIdxs: *mut usize,
        numPrefetchLocs: usize,
        flags: c_ulonglong,
        stream: cudaStream_t,
    ) {
        ready()?;
        let (at, places, stream) = (dptrs.cast(), prefetchLocs.cast(), base.stream(stream));
        driver!(cuMemPrefetchBatchAsync(
            at, sizes, count, places, prefetchLocIdxs, numPrefetchLocs, flags, stream
        ))
    }

    fn cudaMemDiscardBatchAsync / cudaMemDiscardBatchAsync_ptsz [base] (
        dptrs: *mut *mut c_void,
        sizes: *mut usize,
        count: usize,
        flags: c_ulonglong,
        stream: cudaStream_t,
    ) {
        ready()?;
        driver!(cuMemDiscardBatchAsync(dptrs.cast(), sizes, count, flags, base.stream(stream)))
    }

    fn cudaMemDiscardAndPrefetchBatchAsync / cudaMemDiscardAndPrefetchBatchAsync_ptsz [base] (
        dptrs: *mut *mut c_void,
        sizes: *mut usize,
        count: usize,
        prefetchLocs: *mut cudaMemLocation,
        prefetchLocIdxs: *mut usize,
        numPrefetchLocs: usize,
        flags: c_ulonglong,
        stream: cudaStream_t,
    ) {
        ready()?;
        let (at, places, stream) = (dptrs.cast(), prefetchLocs.cast(), base.stream(stream));
        driver!(cuMemDiscardAndPrefetchBatchAsync(
            at, sizes, count, places, prefetchLocIdxs, numPrefetchLocs, flags, stream
        ))
    }
}
