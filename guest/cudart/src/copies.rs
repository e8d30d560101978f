//! Copies and fills of linear memory, and of variables.

use std::ffi::{c_int, c_uchar, c_void};

use cuda_definition::{driver::types::*, runtime::types::*};

use crate::{
    api::{Base, entry_points, put, streamed},
    context::{primary, ready},
    driver::driver,
    error::{Answer, Error},
    memory::attributes,
    registry,
    volumes::When,
};

/// Starts a copy in a stream.
///
/// # Safety
/// Both sides are memory of their kind until the copy is done.
///
/// # Errors
/// The driver's, or the kind is invalid.
pub unsafe fn start(
    to: *mut c_void,
    from: *const c_void,
    size: usize,
    kind: cudaMemcpyKind,
    stream: CUstream,
) -> Answer {
    use cudaMemcpyKind as K;
    if size == 0 {
        return Ok(());
    }
    let (to_device, from_device) = (to as CUdeviceptr, from as CUdeviceptr);
    // SAFETY: the caller's promise.
    unsafe {
        match kind {
            K::cudaMemcpyHostToDevice => {
                driver!(cuMemcpyHtoDAsync_v2(to_device, from, size, stream))
            }
            K::cudaMemcpyDeviceToHost => {
                driver!(cuMemcpyDtoHAsync_v2(to, from_device, size, stream))
            }
            K::cudaMemcpyDeviceToDevice => {
                driver!(cuMemcpyDtoDAsync_v2(to_device, from_device, size, stream))
            }
            K::cudaMemcpyHostToHost | K::cudaMemcpyDefault => {
                driver!(cuMemcpyAsync(to_device, from_device, size, stream))
            }
            _ => Err(Error::cudaErrorInvalidMemcpyDirection),
        }
    }
}

/// Copies, and returns when the API specifies.
///
/// # Safety
/// As for [`start`].
///
/// # Errors
/// As for [`start`].
pub unsafe fn copy(
    to: *mut c_void,
    from: *const c_void,
    size: usize,
    kind: cudaMemcpyKind,
    base: Base,
) -> Answer {
    use cudaMemcpyKind as K;
    ready()?;
    if size == 0 {
        return Ok(());
    }
    let (to_device, from_device) = (to as CUdeviceptr, from as CUdeviceptr);
    // SAFETY: the caller's promise.
    unsafe {
        if base == Base::PerThread {
            let stream = base.stream(std::ptr::null_mut());
            start(to, from, size, kind, stream)?;
            return driver!(cuStreamSynchronize(stream));
        }
        match kind {
            K::cudaMemcpyHostToDevice => driver!(cuMemcpyHtoD_v2(to_device, from, size)),
            K::cudaMemcpyDeviceToHost => driver!(cuMemcpyDtoH_v2(to, from_device, size)),
            K::cudaMemcpyDeviceToDevice => driver!(cuMemcpyDtoD_v2(to_device, from_device, size)),
            K::cudaMemcpyHostToHost | K::cudaMemcpyDefault => {
                driver!(cuMemcpy(to_device, from_device, size))
            }
            _ => Err(Error::cudaErrorInvalidMemcpyDirection),
        }
    }
}

/// The address of a part of a variable.
///
/// # Errors
/// The variable is not registered, or the part is not within it.
pub fn part(symbol: *const c_void, count: usize, offset: usize) -> Answer<CUdeviceptr> {
    let (address, size) = registry::variable(symbol)?;
    match offset.checked_add(count) {
        Some(end) if end <= size => Ok(address + offset as u64),
        _ => Err(Error::cudaErrorInvalidValue),
    }
}

/// Checks the direction of a copy to a variable.
fn onto(kind: cudaMemcpyKind) -> Answer {
    use cudaMemcpyKind as K;
    match kind {
        K::cudaMemcpyHostToDevice | K::cudaMemcpyDeviceToDevice | K::cudaMemcpyDefault => Ok(()),
        _ => Err(Error::cudaErrorInvalidMemcpyDirection),
    }
}

/// Checks the direction of a copy from a variable.
fn out_of(kind: cudaMemcpyKind) -> Answer {
    use cudaMemcpyKind as K;
    match kind {
        K::cudaMemcpyDeviceToHost | K::cudaMemcpyDeviceToDevice | K::cudaMemcpyDefault => Ok(()),
        _ => Err(Error::cudaErrorInvalidMemcpyDirection),
    }
}

/// The byte that a fill repeats: the value's lowest.
fn byte(value: c_int) -> c_uchar {
    value.to_le_bytes()[0]
}

streamed! {
    fn cudaMemcpy / cudaMemcpy_ptds [base] (dst: *mut c_void, src: *const c_void, count: usize, kind: cudaMemcpyKind) {
        copy(dst, src, count, kind, base)
    }

    fn cudaMemcpyAsync / cudaMemcpyAsync_ptsz [base] (
        dst: *mut c_void,
        src: *const c_void,
        count: usize,
        kind: cudaMemcpyKind,
        stream: cudaStream_t,
    ) {
        ready()?;
        start(dst, src, count, kind, base.stream(stream))
    }

    fn cudaMemcpyToSymbol / cudaMemcpyToSymbol_ptds [base] (
        symbol: *const c_void,
        src: *const c_void,
        count: usize,
        offset: usize,
        kind: cudaMemcpyKind,
    ) {
        onto(kind)?;
        copy(part(symbol, count, offset)? as *mut c_void, src, count, kind, base)
    }

    fn cudaMemcpyFromSymbol / cudaMemcpyFromSymbol_ptds [base] (
        dst: *mut c_void,
        symbol: *const c_void,
        count: usize,
        offset: usize,
        kind: cudaMemcpyKind,
    ) {
        out_of(kind)?;
        copy(dst, part(symbol, count, offset)? as *const c_void, count, kind, base)
    }

    fn cudaMemcpyToSymbolAsync / cudaMemcpyToSymbolAsync_ptsz [base] (
        symbol: *const c_void,
        src: *const c_void,
        count: usize,
        offset: usize,
        kind: cudaMemcpyKind,
        stream: cudaStream_t,
    ) {
        onto(kind)?;
        start(part(symbol, count, offset)? as *mut c_void, src, count, kind, base.stream(stream))
    }

    fn cudaMemcpyFromSymbolAsync / cudaMemcpyFromSymbolAsync_ptsz [base] (
        dst: *mut c_void,
        symbol: *const c_void,
        count: usize,
        offset: usize,
        kind: cudaMemcpyKind,
        stream: cudaStream_t,
    ) {
        out_of(kind)?;
        start(dst, part(symbol, count, offset)? as *const c_void, count, kind, base.stream(stream))
    }

    fn cudaMemset / cudaMemset_ptds [base] (devPtr: *mut c_void, value: c_int, count: usize) {
        ready()?;
        let at = devPtr as CUdeviceptr;
        match (count, base) {
            (0, _) => Ok(()),
            (_, Base::Legacy) => driver!(cuMemsetD8_v2(at, byte(value), count)),
            (_, Base::PerThread) => {
                let stream = base.stream(std::ptr::null_mut());
                driver!(cuMemsetD8Async(at, byte(value), count, stream))?;
                settle(devPtr, stream)
            }
        }
    }

    fn cudaMemsetAsync / cudaMemsetAsync_ptsz [base] (
        devPtr: *mut c_void,
        value: c_int,
        count: usize,
        stream: cudaStream_t,
    ) {
        ready()?;
        if count == 0 {
            return Ok(());
        }
        driver!(cuMemsetD8Async(devPtr as CUdeviceptr, byte(value), count, base.stream(stream)))
    }

    fn cudaMemset2D / cudaMemset2D_ptds [base] (
        devPtr: *mut c_void,
        pitch: usize,
        value: c_int,
        width: usize,
        height: usize,
    ) {
        fill_rows(devPtr, pitch, value, width, height, When::Done(base))
    }

    fn cudaMemset2DAsync / cudaMemset2DAsync_ptsz [base] (
        devPtr: *mut c_void,
        pitch: usize,
        value: c_int,
        width: usize,
        height: usize,
        stream: cudaStream_t,
    ) {
        fill_rows(devPtr, pitch, value, width, height, When::Started(base.stream(stream)))
    }

    fn cudaMemset3D / cudaMemset3D_ptds [base] (pitchedDevPtr: cudaPitchedPtr, value: c_int, extent: cudaExtent) {
        fill_planes(pitchedDevPtr, value, extent, When::Done(base))
    }

    fn cudaMemset3DAsync / cudaMemset3DAsync_ptsz [base] (
        pitchedDevPtr: cudaPitchedPtr,
        value: c_int,
        extent: cudaExtent,
        stream: cudaStream_t,
    ) {
        fill_planes(pitchedDevPtr, value, extent, When::Started(base.stream(stream)))
    }
}

/// Waits for a fill in a stream, unless only the device sees the memory.
///
/// # Errors
/// The driver's, of any work of the stream.
fn settle(at: *mut c_void, stream: CUstream) -> Answer {
    match attributes(at) {
        Ok(known) if known.r#type == cudaMemoryType::cudaMemoryTypeDevice => Ok(()),
        // SAFETY: the driver checks the handle.
        _ => unsafe { driver!(cuStreamSynchronize(stream)) },
    }
}

/// # Safety
/// Only numbers are passed; the driver checks addresses.
unsafe fn fill_rows(
    at: *mut c_void,
    pitch: usize,
    value: c_int,
    width: usize,
    height: usize,
    when: When,
) -> Answer {
    ready()?;
    if width == 0 || height == 0 {
        return Ok(());
    }
    let stream = match when {
        When::Started(stream) => stream,
        When::Done(Base::Legacy) => {
            // SAFETY: numbers only.
            return unsafe {
                driver!(cuMemsetD2D8_v2(
                    at as CUdeviceptr,
                    pitch,
                    byte(value),
                    width,
                    height
                ))
            };
        }
        When::Done(base) => base.stream(std::ptr::null_mut()),
    };
    // SAFETY: numbers only.
    unsafe {
        driver!(cuMemsetD2D8Async(
            at as CUdeviceptr,
            pitch,
            byte(value),
            width,
            height,
            stream
        ))?;
        match when {
            When::Started(_) => Ok(()),
            When::Done(_) => settle(at, stream),
        }
    }
}

/// # Safety
/// As for [`fill_rows`].
unsafe fn fill_planes(to: cudaPitchedPtr, value: c_int, extent: cudaExtent, when: When) -> Answer {
    // A plane consists of `ysize` rows, of which `height` are filled.
    let plane = to
        .pitch
        .checked_mul(to.ysize)
        .ok_or(Error::cudaErrorInvalidValue)?;
    if extent.height == to.ysize || extent.depth <= 1 {
        let rows = extent
            .height
            .checked_mul(extent.depth)
            .ok_or(Error::cudaErrorInvalidValue)?;
        // SAFETY: numbers only.
        return unsafe { fill_rows(to.ptr, to.pitch, value, extent.width, rows, when) };
    }
    for number in 0..extent.depth {
        let offset = number
            .checked_mul(plane)
            .ok_or(Error::cudaErrorInvalidValue)?;
        let at = to.ptr.wrapping_byte_add(offset);
        // SAFETY: numbers only.
        unsafe { fill_rows(at, to.pitch, value, extent.width, extent.height, when)? };
    }
    Ok(())
}

entry_points! {
    // There is no variant for the per-thread default stream.
    fn cudaMemcpyPeerAsync(
        dst: *mut c_void,
        dstDevice: c_int,
        src: *const c_void,
        srcDevice: c_int,
        count: usize,
        stream: cudaStream_t,
    ) {
        ready()?;
        let (to, from) = (primary(dstDevice)?, primary(srcDevice)?);
        driver!(cuMemcpyPeerAsync(dst as CUdeviceptr, to, src as CUdeviceptr, from, count, stream.cast()))
    }

    fn cudaMemcpyPeer(dst: *mut c_void, dstDevice: c_int, src: *const c_void, srcDevice: c_int, count: usize) {
        ready()?;
        let (to, from) = (primary(dstDevice)?, primary(srcDevice)?);
        driver!(cuMemcpyPeer(dst as CUdeviceptr, to, src as CUdeviceptr, from, count))
    }

    fn cudaGetSymbolAddress(devPtr: *mut *mut c_void, symbol: *const c_void) {
        put(devPtr, registry::variable(symbol)?.0 as *mut c_void)
    }

    fn cudaGetSymbolSize(size: *mut usize, symbol: *const c_void) {
        put(size, registry::variable(symbol)?.1)
    }
}
