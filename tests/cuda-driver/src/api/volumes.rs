//! Copies and fills in two and three dimensions.

use std::{
    ffi::{c_uchar, c_void},
    sync::Arc,
};

use cuda_definition::driver::types::*;

use super::{
    entry_points,
    memory::{copy, on_device, pinned},
    offer,
};
use crate::driver::{
    Answer,
    context::{self, Context},
    memory::memory,
    objects,
    stream::Task,
};

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

/// One side of a copy, in bytes.
#[derive(Clone, Copy)]
struct Side {
    at: u64,
    pitch: u64,
    plane: u64,
}

impl Side {
    fn row(self, y: u64, z: u64) -> u64 {
        self.at + y * self.pitch + z * self.plane
    }
}

/// A copy of rows.
#[derive(Clone, Copy)]
struct Volume {
    to: Side,
    from: Side,
    width: usize,
    height: u64,
    depth: u64,
}

/// One side of a copy, as the API describes it.
fn side(
    (kind, array): (CUmemorytype, CUarray),
    host: u64,
    device: u64,
    (pitch, rows): (usize, usize),
    (x, y, z): (usize, usize, usize),
) -> Answer<Side> {
    let (mut pitch, mut rows) = (pitch, rows);
    let at = match kind {
        CUmemorytype::CU_MEMORYTYPE_ARRAY => {
            let array = objects::array(array)?;
            (pitch, rows) = (array.row, array.height());
            array.at
        }
        CUmemorytype::CU_MEMORYTYPE_HOST => host,
        CUmemorytype::CU_MEMORYTYPE_DEVICE | CUmemorytype::CU_MEMORYTYPE_UNIFIED => device,
        _ => return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED),
    };
    let (pitch, rows) = (pitch as u64, rows as u64);
    let plane = pitch.checked_mul(rows).ok_or(INVALID)?;
    let offset = || {
        let rows = (y as u64).checked_mul(pitch)?;
        let planes = (z as u64).checked_mul(plane)?;
        at.checked_add(x as u64)?
            .checked_add(rows)?
            .checked_add(planes)
    };
    Ok(Side {
        at: offset().ok_or(INVALID)?,
        pitch,
        plane,
    })
}

impl Volume {
    fn of_planes(copy: &CUDA_MEMCPY3D) -> Answer<Self> {
        let from = (copy.srcXInBytes, copy.srcY, copy.srcZ);
        let to = (copy.dstXInBytes, copy.dstY, copy.dstZ);
        let (host, device) = (copy.srcHost as u64, copy.srcDevice);
        let from = side(
            (copy.srcMemoryType, copy.srcArray),
            host,
            device,
            (copy.srcPitch, copy.srcHeight),
            from,
        )?;
        let (host, device) = (copy.dstHost as u64, copy.dstDevice);
        let to = side(
            (copy.dstMemoryType, copy.dstArray),
            host,
            device,
            (copy.dstPitch, copy.dstHeight),
            to,
        )?;
        let one = Self {
            to,
            from,
            width: copy.WidthInBytes,
            height: copy.Height as u64,
            depth: copy.Depth as u64,
        };
        one.checked(copy.dstMemoryType, copy.srcMemoryType)
    }

    fn of_rows(copy: &CUDA_MEMCPY2D) -> Answer<Self> {
        let (host, device) = (copy.srcHost as u64, copy.srcDevice);
        let place = (copy.srcXInBytes, copy.srcY, 0);
        let from = side(
            (copy.srcMemoryType, copy.srcArray),
            host,
            device,
            (copy.srcPitch, 0),
            place,
        )?;
        let (host, device) = (copy.dstHost as u64, copy.dstDevice);
        let place = (copy.dstXInBytes, copy.dstY, 0);
        let to = side(
            (copy.dstMemoryType, copy.dstArray),
            host,
            device,
            (copy.dstPitch, 0),
            place,
        )?;
        let one = Self {
            to,
            from,
            width: copy.WidthInBytes,
            height: copy.Height as u64,
            depth: 1,
        };
        one.checked(copy.dstMemoryType, copy.srcMemoryType)
    }

    /// Checks that every row declared as device memory is device memory.
    fn checked(self, to: CUmemorytype, from: CUmemorytype) -> Answer<Self> {
        let context = context::current()?;
        for (kind, side) in [(to, self.to), (from, self.from)] {
            if self.height > 1 && side.pitch < self.width as u64 {
                return Err(INVALID);
            }
            if kind == CUmemorytype::CU_MEMORYTYPE_DEVICE
                || kind == CUmemorytype::CU_MEMORYTYPE_ARRAY
            {
                for (y, z) in self.rows() {
                    on_device(side.row(y, z), self.width, &context)?;
                }
            }
        }
        Ok(self)
    }

    fn rows(self) -> impl Iterator<Item = (u64, u64)> {
        (0..self.depth).flat_map(move |z| (0..self.height).map(move |y| (y, z)))
    }

    /// Whether any row of a side is memory unknown to the driver.
    fn pageable(self, side: Side) -> bool {
        self.rows()
            .any(|(y, z)| !pinned(side.row(y, z), self.width as u64))
    }

    /// The copy as work. As with the real driver, pageable memory is read before the call returns.
    ///
    /// # Safety
    /// Host memory stays valid until the copy is done.
    unsafe fn task(self) -> Task {
        if self.pageable(self.from) {
            let mut staged = Vec::new();
            for (y, z) in self.rows() {
                // SAFETY: the caller's promise.
                staged.extend_from_slice(unsafe {
                    std::slice::from_raw_parts(self.from.row(y, z) as *const u8, self.width)
                });
            }
            return Arc::new(move |_: &_| {
                for ((y, z), row) in self.rows().zip(staged.chunks_exact(self.width)) {
                    // SAFETY: the caller's promise; device memory stays mapped.
                    unsafe { copy(self.to.row(y, z), row.as_ptr() as u64, self.width) };
                }
                Ok(())
            });
        }
        Arc::new(move |_: &_| {
            for (y, z) in self.rows() {
                // SAFETY: as above.
                unsafe { copy(self.to.row(y, z), self.from.row(y, z), self.width) };
            }
            Ok(())
        })
    }

    fn empty(self) -> bool {
        self.width == 0 || self.height == 0 || self.depth == 0
    }

    unsafe fn now(self) -> Answer {
        let context = context::current()?;
        if self.empty() {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        context.run(unsafe { self.task() })
    }

    unsafe fn later(self, stream: CUstream) -> Answer {
        let context = context::current()?;
        let stream = context.stream(stream)?;
        if self.empty() {
            return Ok(());
        }
        let wait = self.pageable(self.to);
        // SAFETY: the caller's promise.
        if let Some(mark) = context.submit(&stream, unsafe { self.task() })?
            && wait
        {
            mark.wait();
            context.check()?;
        }
        Ok(())
    }
}

/// A copy as a graph node: host memory is read and written when the graph runs.
///
/// # Safety
/// Memory on both sides is valid whenever the graph runs.
pub unsafe fn node(copied: &CUDA_MEMCPY3D) -> Answer<Task> {
    let volume = Volume::of_planes(copied)?;
    Ok(Arc::new(move |_: &_| {
        for (y, z) in volume.rows() {
            // SAFETY: the caller's promise.
            unsafe { copy(volume.to.row(y, z), volume.from.row(y, z), volume.width) };
        }
        Ok(())
    }))
}

/// A fill of rows, as work.
pub fn fill(
    at: u64,
    pitch: usize,
    value: u32,
    element: usize,
    (width, height): (usize, usize),
    context: &Context,
) -> Answer<Task> {
    let bytes = width.checked_mul(element).ok_or(INVALID)?;
    if !matches!(element, 1 | 2 | 4) || (height > 1 && pitch < bytes) {
        return Err(INVALID);
    }
    for row in 0..height as u64 {
        on_device(at + row * pitch as u64, bytes, context)?;
    }
    Ok(Arc::new(move |_: &_| {
        let value = value.to_le_bytes();
        for row in 0..height as u64 {
            let start = (at + row * pitch as u64) as *mut u8;
            // SAFETY: checked above; device memory stays mapped.
            let row = unsafe { std::slice::from_raw_parts_mut(start, bytes) };
            for one in row.chunks_exact_mut(element) {
                one.copy_from_slice(&value[..element]);
            }
        }
        Ok(())
    }))
}

entry_points! {
    fn cuMemcpy2D_v2(pCopy: *const CUDA_MEMCPY2D) {
        Volume::of_rows(pCopy.as_ref().ok_or(INVALID)?)?.now()
    }

    fn cuMemcpy2DUnaligned_v2(pCopy: *const CUDA_MEMCPY2D) {
        Volume::of_rows(pCopy.as_ref().ok_or(INVALID)?)?.now()
    }

    fn cuMemcpy2DAsync_v2(pCopy: *const CUDA_MEMCPY2D, hStream: CUstream) {
        Volume::of_rows(pCopy.as_ref().ok_or(INVALID)?)?.later(hStream)
    }

    fn cuMemcpy3D_v2(pCopy: *const CUDA_MEMCPY3D) {
        Volume::of_planes(pCopy.as_ref().ok_or(INVALID)?)?.now()
    }

    fn cuMemcpy3DAsync_v2(pCopy: *const CUDA_MEMCPY3D, hStream: CUstream) {
        Volume::of_planes(pCopy.as_ref().ok_or(INVALID)?)?.later(hStream)
    }

    fn cuMemcpyPeer(
        dstDevice: CUdeviceptr,
        dstContext: CUcontext,
        srcDevice: CUdeviceptr,
        srcContext: CUcontext,
        ByteCount: usize,
    ) {
        objects::context(dstContext)?;
        objects::context(srcContext)?;
        line(dstDevice, srcDevice, ByteCount)?.now()
    }

    fn cuMemcpyPeerAsync(
        dstDevice: CUdeviceptr,
        dstContext: CUcontext,
        srcDevice: CUdeviceptr,
        srcContext: CUcontext,
        ByteCount: usize,
        hStream: CUstream,
    ) {
        objects::context(dstContext)?;
        objects::context(srcContext)?;
        line(dstDevice, srcDevice, ByteCount)?.later(hStream)
    }

    fn cuMemsetD2D8_v2(dstDevice: CUdeviceptr, dstPitch: usize, uc: c_uchar, Width: usize, Height: usize) {
        let context = context::current()?;
        let task = fill(dstDevice, dstPitch, u32::from(uc), 1, (Width, Height), &context)?;
        context.run(task)
    }

    fn cuMemsetD2D8Async(
        dstDevice: CUdeviceptr,
        dstPitch: usize,
        uc: c_uchar,
        Width: usize,
        Height: usize,
        hStream: CUstream,
    ) {
        let context = context::current()?;
        let task = fill(dstDevice, dstPitch, u32::from(uc), 1, (Width, Height), &context)?;
        let stream = context.stream(hStream)?;
        context.submit(&stream, task).map(|_| ())
    }

    // Location and preferred location of memory make no difference here.
    fn cuMemPrefetchAsync_v2(
        devPtr: CUdeviceptr,
        count: usize,
        _location: CUmemLocation,
        _flags: u32,
        hStream: CUstream,
    ) {
        let context = context::current()?;
        context.stream(hStream)?;
        on_device(devPtr, count, &context)
    }

    fn cuMemAdvise_v2(devPtr: CUdeviceptr, count: usize, _advice: CUmem_advise, _location: CUmemLocation) {
        on_device(devPtr, count, &*context::current()?)
    }

    fn cuMemRangeGetAttribute(
        data: *mut c_void,
        dataSize: usize,
        _attribute: CUmem_range_attribute,
        devPtr: CUdeviceptr,
        count: usize,
    ) {
        on_device(devPtr, count, &*context::current()?)?;
        if dataSize < 4 || memory().find(devPtr).is_none() {
            return Err(INVALID);
        }
        offer(data.cast::<i32>(), 0);
        Ok(())
    }
}

fn line(to: u64, from: u64, size: usize) -> Answer<Volume> {
    let side = |at| Side {
        at,
        pitch: size as u64,
        plane: size as u64,
    };
    let one = Volume {
        to: side(to),
        from: side(from),
        width: size,
        height: 1,
        depth: 1,
    };
    let device = CUmemorytype::CU_MEMORYTYPE_DEVICE;
    one.checked(device, device)
}
