//! Copies of rows, planes and arrays.

use std::{
    ffi::{c_int, c_void},
    ptr::{null, null_mut},
};

use cuda_definition::{driver::types::*, runtime::types::*};

use crate::{
    api::{Base, get, streamed},
    arrays::{element, row},
    context::{primary, ready},
    driver::driver,
    error::{Answer, Error},
};

/// One side of a copy.
#[derive(Clone, Copy)]
pub enum Side {
    /// Memory in rows of `pitch` bytes, with `rows` rows per plane.
    Linear {
        at: *mut c_void,
        pitch: usize,
        rows: usize,
    },
    /// An array, in which positions are counted in elements.
    Array(CUarray),
}

/// The start of a copy on a side.
#[derive(Clone, Copy, Default)]
pub struct Place {
    pub x: usize,
    pub y: usize,
    pub z: usize,
}

impl From<cudaPos> for Place {
    fn from(place: cudaPos) -> Self {
        Self {
            x: place.x,
            y: place.y,
            z: place.z,
        }
    }
}

/// The kinds of linear memory on both sides, by the direction that the caller specifies.
fn kinds(kind: cudaMemcpyKind) -> Answer<(CUmemorytype, CUmemorytype)> {
    use cudaMemcpyKind as K;
    let (host, device) = (
        CUmemorytype::CU_MEMORYTYPE_HOST,
        CUmemorytype::CU_MEMORYTYPE_DEVICE,
    );
    let unified = CUmemorytype::CU_MEMORYTYPE_UNIFIED;
    match kind {
        K::cudaMemcpyHostToHost => Ok((host, host)),
        K::cudaMemcpyHostToDevice => Ok((host, device)),
        K::cudaMemcpyDeviceToHost => Ok((device, host)),
        K::cudaMemcpyDeviceToDevice => Ok((device, device)),
        K::cudaMemcpyDefault => Ok((unified, unified)),
        _ => Err(Error::cudaErrorInvalidMemcpyDirection),
    }
}

/// Converts a copy for the driver. `size` is in elements if an array is involved, otherwise in bytes, rows and planes.
///
/// # Errors
/// The direction or an array is invalid.
pub fn volume(
    (from, from_place): (Side, Place),
    (to, to_place): (Side, Place),
    size: cudaExtent,
    kind: cudaMemcpyKind,
) -> Answer<CUDA_MEMCPY3D> {
    let (from_kind, to_kind) = kinds(kind)?;
    let bytes = match (from, to) {
        (Side::Array(array), _) | (_, Side::Array(array)) => element(array)?,
        _ => 1,
    };
    // SAFETY: numbers and pointers, for which zero is a valid value.
    let mut copy: CUDA_MEMCPY3D = unsafe { std::mem::zeroed() };
    let wide = |x: usize, by: usize| x.checked_mul(by).ok_or(Error::cudaErrorInvalidValue);
    match from {
        Side::Linear { at, pitch, rows } => {
            copy.srcMemoryType = from_kind;
            (copy.srcHost, copy.srcDevice) = (at, at as CUdeviceptr);
            (copy.srcPitch, copy.srcHeight) = (pitch, rows);
            copy.srcXInBytes = from_place.x;
        }
        Side::Array(array) => {
            copy.srcMemoryType = CUmemorytype::CU_MEMORYTYPE_ARRAY;
            copy.srcArray = array;
            copy.srcXInBytes = wide(from_place.x, bytes)?;
        }
    }
    (copy.srcY, copy.srcZ) = (from_place.y, from_place.z);
    match to {
        Side::Linear { at, pitch, rows } => {
            copy.dstMemoryType = to_kind;
            (copy.dstHost, copy.dstDevice) = (at, at as CUdeviceptr);
            (copy.dstPitch, copy.dstHeight) = (pitch, rows);
            copy.dstXInBytes = to_place.x;
        }
        Side::Array(array) => {
            copy.dstMemoryType = CUmemorytype::CU_MEMORYTYPE_ARRAY;
            copy.dstArray = array;
            copy.dstXInBytes = wide(to_place.x, bytes)?;
        }
    }
    (copy.dstY, copy.dstZ) = (to_place.y, to_place.z);
    copy.WidthInBytes = wide(size.width, bytes)?;
    (copy.Height, copy.Depth) = (size.height, size.depth);
    Ok(copy)
}

/// Converts a caller's description of a copy.
///
/// # Errors
/// As for [`volume`].
pub fn of_parameters(copy: &cudaMemcpy3DParms) -> Answer<CUDA_MEMCPY3D> {
    let from = side(copy.srcArray, copy.srcPtr);
    let to = side(copy.dstArray, copy.dstPtr);
    volume(
        (from, copy.srcPos.into()),
        (to, copy.dstPos.into()),
        copy.extent,
        copy.kind,
    )
}

fn side(array: cudaArray_t, memory: cudaPitchedPtr) -> Side {
    if array.is_null() {
        Side::Linear {
            at: memory.ptr,
            pitch: memory.pitch,
            rows: memory.ysize,
        }
    } else {
        Side::Array(array.cast())
    }
}

/// When a copy or a fill returns.
#[derive(Clone, Copy)]
pub enum When {
    /// When it is done, after the work of the default stream, as far as the API specifies that.
    Done(Base),
    /// When it has been submitted to a stream.
    Started(CUstream),
}

/// # Safety
/// Both sides are memory of their kind until the copy is done.
unsafe fn transfer(copy: &CUDA_MEMCPY3D, when: When) -> Answer {
    ready()?;
    if copy.WidthInBytes == 0 || copy.Height == 0 || copy.Depth == 0 {
        return Ok(());
    }
    // SAFETY: the caller's promise.
    unsafe {
        match when {
            When::Started(stream) => driver!(cuMemcpy3DAsync_v2(copy, stream)),
            When::Done(Base::Legacy) => driver!(cuMemcpy3D_v2(copy)),
            When::Done(base) => {
                let stream = base.stream(null_mut());
                driver!(cuMemcpy3DAsync_v2(copy, stream))?;
                driver!(cuStreamSynchronize(stream))
            }
        }
    }
}

/// # Safety
/// As for [`transfer`].
unsafe fn transfer_rows(copy: &CUDA_MEMCPY3D, when: When) -> Answer {
    ready()?;
    if copy.WidthInBytes == 0 || copy.Height == 0 {
        return Ok(());
    }
    let rows = CUDA_MEMCPY2D {
        srcXInBytes: copy.srcXInBytes,
        srcY: copy.srcY,
        srcMemoryType: copy.srcMemoryType,
        srcHost: copy.srcHost,
        srcDevice: copy.srcDevice,
        srcArray: copy.srcArray,
        srcPitch: copy.srcPitch,
        dstXInBytes: copy.dstXInBytes,
        dstY: copy.dstY,
        dstMemoryType: copy.dstMemoryType,
        dstHost: copy.dstHost,
        dstDevice: copy.dstDevice,
        dstArray: copy.dstArray,
        dstPitch: copy.dstPitch,
        WidthInBytes: copy.WidthInBytes,
        Height: copy.Height,
    };
    // SAFETY: the caller's promise.
    unsafe {
        match when {
            When::Started(stream) => driver!(cuMemcpy2DAsync_v2(&raw const rows, stream)),
            // This function accepts any pitch; the aligned one need not.
            When::Done(Base::Legacy) => driver!(cuMemcpy2DUnaligned_v2(&raw const rows)),
            When::Done(base) => {
                let stream = base.stream(null_mut());
                driver!(cuMemcpy2DAsync_v2(&raw const rows, stream))?;
                driver!(cuStreamSynchronize(stream))
            }
        }
    }
}

fn linear(at: *const c_void, pitch: usize) -> (Side, Place) {
    (
        Side::Linear {
            at: at.cast_mut(),
            pitch,
            rows: 0,
        },
        Place::default(),
    )
}

fn array(array: cudaArray_const_t, x: usize, y: usize) -> (Side, Place) {
    (Side::Array(array.cast_mut().cast()), Place { x, y, z: 0 })
}

/// A copy of rows between memory and an array, with a width in bytes.
fn with_array(
    from: (Side, Place),
    to: (Side, Place),
    (width, height): (usize, usize),
    kind: cudaMemcpyKind,
) -> Answer<CUDA_MEMCPY3D> {
    let mut copy = volume(
        from,
        to,
        cudaExtent {
            width: 0,
            height,
            depth: 1,
        },
        kind,
    )?;
    copy.WidthInBytes = width;
    // Positions are in bytes in these calls, too.
    if let Side::Array(_) = from.0 {
        copy.srcXInBytes = from.1.x;
    }
    if let Side::Array(_) = to.0 {
        copy.dstXInBytes = to.1.x;
    }
    Ok(copy)
}

/// A rectangle of a stretch that continues in the next row.
#[derive(Debug, PartialEq, Eq)]
struct Part {
    /// The byte in a row, and the row.
    place: (usize, usize),
    /// Bytes per row, and rows.
    size: (usize, usize),
    /// The number of bytes of the stretch that precede it.
    before: usize,
}

/// Divides `count` bytes of an array, from a position on, into rectangles. A row has `row` bytes.
fn parts(row: usize, (mut x, mut y): (usize, usize), count: usize) -> Answer<Vec<Part>> {
    if x >= row {
        return Err(Error::cudaErrorInvalidValue);
    }
    let (mut parts, mut before) = (Vec::new(), 0);
    while before < count {
        let rest = count - before;
        let size = if x == 0 && rest >= row {
            (row, rest / row)
        } else {
            ((row - x).min(rest), 1)
        };
        parts.push(Part {
            place: (x, y),
            size,
            before,
        });
        before += size.0 * size.1;
        (x, y) = (0, y.saturating_add(size.1));
    }
    Ok(parts)
}

fn rows(
    to: (*mut c_void, usize),
    from: (*const c_void, usize),
    (width, height): (usize, usize),
    kind: cudaMemcpyKind,
) -> Answer<CUDA_MEMCPY3D> {
    if width > to.1 || width > from.1 {
        return Err(Error::cudaErrorInvalidPitchValue);
    }
    let extent = cudaExtent {
        width,
        height,
        depth: 1,
    };
    volume(linear(from.0, from.1), linear(to.0, to.1), extent, kind)
}

streamed! {
    fn cudaMemcpy2D / cudaMemcpy2D_ptds [base] (
        dst: *mut c_void,
        dpitch: usize,
        src: *const c_void,
        spitch: usize,
        width: usize,
        height: usize,
        kind: cudaMemcpyKind,
    ) {
        transfer_rows(&rows((dst, dpitch), (src, spitch), (width, height), kind)?, When::Done(base))
    }

    fn cudaMemcpy2DAsync / cudaMemcpy2DAsync_ptsz [base] (
        dst: *mut c_void,
        dpitch: usize,
        src: *const c_void,
        spitch: usize,
        width: usize,
        height: usize,
        kind: cudaMemcpyKind,
        stream: cudaStream_t,
    ) {
        let copy = rows((dst, dpitch), (src, spitch), (width, height), kind)?;
        transfer_rows(&copy, When::Started(base.stream(stream)))
    }

    fn cudaMemcpy2DToArray / cudaMemcpy2DToArray_ptds [base] (
        dst: cudaArray_t,
        wOffset: usize,
        hOffset: usize,
        src: *const c_void,
        spitch: usize,
        width: usize,
        height: usize,
        kind: cudaMemcpyKind,
    ) {
        ready()?;
        let copy = with_array(linear(src, spitch), array(dst, wOffset, hOffset), (width, height), kind)?;
        transfer_rows(&copy, When::Done(base))
    }

    fn cudaMemcpy2DToArrayAsync / cudaMemcpy2DToArrayAsync_ptsz [base] (
        dst: cudaArray_t,
        wOffset: usize,
        hOffset: usize,
        src: *const c_void,
        spitch: usize,
        width: usize,
        height: usize,
        kind: cudaMemcpyKind,
        stream: cudaStream_t,
    ) {
        ready()?;
        let copy = with_array(linear(src, spitch), array(dst, wOffset, hOffset), (width, height), kind)?;
        transfer_rows(&copy, When::Started(base.stream(stream)))
    }

    fn cudaMemcpy2DFromArray / cudaMemcpy2DFromArray_ptds [base] (
        dst: *mut c_void,
        dpitch: usize,
        src: cudaArray_const_t,
        wOffset: usize,
        hOffset: usize,
        width: usize,
        height: usize,
        kind: cudaMemcpyKind,
    ) {
        ready()?;
        let copy = with_array(array(src, wOffset, hOffset), linear(dst, dpitch), (width, height), kind)?;
        transfer_rows(&copy, When::Done(base))
    }

    fn cudaMemcpy2DFromArrayAsync / cudaMemcpy2DFromArrayAsync_ptsz [base] (
        dst: *mut c_void,
        dpitch: usize,
        src: cudaArray_const_t,
        wOffset: usize,
        hOffset: usize,
        width: usize,
        height: usize,
        kind: cudaMemcpyKind,
        stream: cudaStream_t,
    ) {
        ready()?;
        let copy = with_array(array(src, wOffset, hOffset), linear(dst, dpitch), (width, height), kind)?;
        transfer_rows(&copy, When::Started(base.stream(stream)))
    }

    fn cudaMemcpy2DArrayToArray / cudaMemcpy2DArrayToArray_ptds [base] (
        dst: cudaArray_t,
        wOffsetDst: usize,
        hOffsetDst: usize,
        src: cudaArray_const_t,
        wOffsetSrc: usize,
        hOffsetSrc: usize,
        width: usize,
        height: usize,
        kind: cudaMemcpyKind,
    ) {
        ready()?;
        let (from, to) = (array(src, wOffsetSrc, hOffsetSrc), array(dst, wOffsetDst, hOffsetDst));
        transfer_rows(&with_array(from, to, (width, height), kind)?, When::Done(base))
    }

    fn cudaMemcpyToArray / cudaMemcpyToArray_ptds [base] (
        dst: cudaArray_t,
        wOffset: usize,
        hOffset: usize,
        src: *const c_void,
        count: usize,
        kind: cudaMemcpyKind,
    ) {
        ready()?;
        for part in parts(row(dst.cast())?, (wOffset, hOffset), count)? {
            let from = linear(src.wrapping_byte_add(part.before), part.size.0);
            let to = array(dst, part.place.0, part.place.1);
            transfer_rows(&with_array(from, to, part.size, kind)?, When::Done(base))?;
        }
        Ok(())
    }

    fn cudaMemcpyFromArray / cudaMemcpyFromArray_ptds [base] (
        dst: *mut c_void,
        src: cudaArray_const_t,
        wOffset: usize,
        hOffset: usize,
        count: usize,
        kind: cudaMemcpyKind,
    ) {
        ready()?;
        for part in parts(row(src.cast_mut().cast())?, (wOffset, hOffset), count)? {
            let from = array(src, part.place.0, part.place.1);
            let to = linear(dst.wrapping_byte_add(part.before), part.size.0);
            transfer_rows(&with_array(from, to, part.size, kind)?, When::Done(base))?;
        }
        Ok(())
    }

    fn cudaMemcpy3D / cudaMemcpy3D_ptds [base] (p: *const cudaMemcpy3DParms) {
        ready()?;
        transfer(&of_parameters(&get(p)?)?, When::Done(base))
    }

    fn cudaMemcpy3DAsync / cudaMemcpy3DAsync_ptsz [base] (p: *const cudaMemcpy3DParms, stream: cudaStream_t) {
        ready()?;
        transfer(&of_parameters(&get(p)?)?, When::Started(base.stream(stream)))
    }

    fn cudaMemcpy3DPeer / cudaMemcpy3DPeer_ptds [base] (p: *const cudaMemcpy3DPeerParms) {
        ready()?;
        let copy = between_devices(&get(p)?)?;
        match base {
            Base::Legacy => driver!(cuMemcpy3DPeer(&raw const copy)),
            Base::PerThread => {
                let stream = base.stream(null_mut());
                driver!(cuMemcpy3DPeerAsync(&raw const copy, stream))?;
                driver!(cuStreamSynchronize(stream))
            }
        }
    }

    fn cudaMemcpy3DPeerAsync / cudaMemcpy3DPeerAsync_ptsz [base] (
        p: *const cudaMemcpy3DPeerParms,
        stream: cudaStream_t,
    ) {
        ready()?;
        let copy = between_devices(&get(p)?)?;
        driver!(cuMemcpy3DPeerAsync(&raw const copy, base.stream(stream)))
    }
}

fn between_devices(copy: &cudaMemcpy3DPeerParms) -> Answer<CUDA_MEMCPY3D_PEER> {
    let context = |number: c_int| primary(number);
    let (from, to) = (
        side(copy.srcArray, copy.srcPtr),
        side(copy.dstArray, copy.dstPtr),
    );
    let kind = cudaMemcpyKind::cudaMemcpyDeviceToDevice;
    let plain = volume(
        (from, copy.srcPos.into()),
        (to, copy.dstPos.into()),
        copy.extent,
        kind,
    )?;
    Ok(CUDA_MEMCPY3D_PEER {
        srcXInBytes: plain.srcXInBytes,
        srcY: plain.srcY,
        srcZ: plain.srcZ,
        srcLOD: 0,
        srcMemoryType: plain.srcMemoryType,
        srcHost: null(),
        srcDevice: plain.srcDevice,
        srcArray: plain.srcArray,
        srcContext: context(copy.srcDevice)?,
        srcPitch: plain.srcPitch,
        srcHeight: plain.srcHeight,
        dstXInBytes: plain.dstXInBytes,
        dstY: plain.dstY,
        dstZ: plain.dstZ,
        dstLOD: 0,
        dstMemoryType: plain.dstMemoryType,
        dstHost: null_mut(),
        dstDevice: plain.dstDevice,
        dstArray: plain.dstArray,
        dstContext: context(copy.dstDevice)?,
        dstPitch: plain.dstPitch,
        dstHeight: plain.dstHeight,
        WidthInBytes: plain.WidthInBytes,
        Height: plain.Height,
        Depth: plain.Depth,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stretch_of_an_array_goes_on_in_the_next_row() {
        let part = |place, size, before| Part {
            place,
            size,
            before,
        };
        let found = |row, place, count| parts(row, place, count).ok();
        assert_eq!(found(16, (0, 0), 64), Some(vec![part((0, 0), (16, 4), 0)]));
        let wanted = [
            part((8, 1), (8, 1), 0),
            part((0, 2), (16, 2), 8),
            part((0, 4), (4, 1), 40),
        ];
        assert_eq!(found(16, (8, 1), 44), Some(wanted.into()));
        assert_eq!(found(16, (4, 0), 8), Some(vec![part((4, 0), (8, 1), 0)]));
        assert_eq!(found(16, (16, 0), 8), None);
        assert_eq!(found(0, (0, 0), 8), None);
    }

    #[test]
    fn a_copy_says_what_its_sides_are_and_no_row_is_wider_than_its_pitch() {
        let (to, from) = (0x100 as *mut c_void, 0x200 as *const c_void);
        let kind = cudaMemcpyKind::cudaMemcpyHostToDevice;
        let copy = rows((to, 64), (from, 32), (16, 3), kind).expect("it fits");
        assert_eq!(copy.srcMemoryType, CUmemorytype::CU_MEMORYTYPE_HOST);
        assert_eq!(copy.dstMemoryType, CUmemorytype::CU_MEMORYTYPE_DEVICE);
        assert_eq!((copy.dstDevice, copy.srcHost), (0x100, from));
        assert_eq!((copy.WidthInBytes, copy.Height, copy.Depth), (16, 3, 1));
        let wide = rows((to, 8), (from, 32), (16, 3), kind);
        assert_eq!(wide.err(), Some(Error::cudaErrorInvalidPitchValue));
        let nowhere = rows((to, 64), (from, 32), (16, 3), cudaMemcpyKind(9));
        assert_eq!(nowhere.err(), Some(Error::cudaErrorInvalidMemcpyDirection));
    }
}
