//! Copies and fills.

use std::{
    ffi::{c_uchar, c_uint, c_ushort, c_void},
    sync::Arc,
};

use cuda_definition::driver::types::*;

use super::{
    entry_points,
    memory::{copy, on_device, pinned},
};
use crate::driver::{
    Answer,
    context::{self, Context},
    memory::memory,
    stream::Task,
};

/// A copy in which each side's address tells whether it is on the host or on the device.
struct Transfer {
    to: u64,
    from: u64,
    size: usize,
}

impl Transfer {
    /// The copy as work. As with the real driver, pageable memory is read now and written before the call returns: the
    /// second value says whether to wait.
    ///
    /// # Safety
    /// Host memory of `size` bytes stays valid until the copy is done.
    unsafe fn task(self) -> (Task, bool) {
        let Self { to, from, size } = self;
        let bytes = size as u64;
        if size > 0 && !pinned(from, bytes) {
            // SAFETY: the caller's promise.
            let staged = unsafe { std::slice::from_raw_parts(from as *const u8, size) }.to_vec();
            let task: Task = Arc::new(move |_: &_| {
                // SAFETY: the caller's promise; device memory stays mapped.
                unsafe { copy(to, staged.as_ptr() as u64, size) };
                Ok(())
            });
            return (task, !pinned(to, bytes));
        }
        let task: Task = Arc::new(move |_: &_| {
            // What was freed meanwhile is no place to copy to.
            // SAFETY: the caller's promise; a device's memory stays mapped.
            unsafe { copy(to, from, size) };
            Ok(())
        });
        (task, size > 0 && !pinned(to, bytes))
    }

    unsafe fn now(self) -> Answer {
        let context = context::current()?;
        // SAFETY: the caller's promise.
        let (task, _) = unsafe { self.task() };
        context.run(task)
    }

    unsafe fn later(self, stream: CUstream) -> Answer {
        let context = context::current()?;
        let stream = context.stream(stream)?;
        // SAFETY: the caller's promise.
        let (task, wait) = unsafe { self.task() };
        if let Some(mark) = context.submit(&stream, task)?
            && wait
        {
            mark.wait();
            context.check()?;
        }
        Ok(())
    }
}

fn checked(context: &Context, to: Option<u64>, from: Option<u64>, size: usize) -> Answer {
    for at in [to, from].into_iter().flatten() {
        on_device(at, size, context)?;
    }
    Ok(())
}

fn fill(at: u64, value: u32, width: usize, count: usize, context: &Context) -> Answer<Task> {
    let size = count
        .checked_mul(width)
        .ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
    on_device(at, size, context)?;
    if !at.is_multiple_of(width as u64) {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    Ok(Arc::new(move |_: &_| {
        let bytes = value.to_le_bytes();
        // SAFETY: checked above; device memory stays mapped. Kernels may read it at the same time, which is the
        // program's mistake; both sides only see bytes.
        let memory = unsafe { std::slice::from_raw_parts_mut(at as *mut u8, size) };
        for one in memory.chunks_exact_mut(width) {
            one.copy_from_slice(&bytes[..width]);
        }
        Ok(())
    }))
}

fn fill_now(at: u64, value: u32, width: usize, count: usize) -> Answer {
    let context = context::current()?;
    let task = fill(at, value, width, count, &context)?;
    let stream = context.stream(std::ptr::null_mut())?;
    // Asynchronous to the host, as natively, unless the memory is the host's.
    let mark = context.submit(&stream, task)?;
    if memory().find(at).is_some_and(|found| found.kind.host())
        && let Some(mark) = mark
    {
        mark.wait();
    }
    Ok(())
}

fn fill_later(at: u64, value: u32, width: usize, count: usize, stream: CUstream) -> Answer {
    let context = context::current()?;
    let task = fill(at, value, width, count, &context)?;
    let stream = context.stream(stream)?;
    context.submit(&stream, task)?;
    Ok(())
}

entry_points! {
    fn cuMemcpy(dst: CUdeviceptr, src: CUdeviceptr, ByteCount: usize) {
        Transfer { to: dst, from: src, size: ByteCount }.now()
    }

    fn cuMemcpyAsync(dst: CUdeviceptr, src: CUdeviceptr, ByteCount: usize, hStream: CUstream) {
        Transfer { to: dst, from: src, size: ByteCount }.later(hStream)
    }

    fn cuMemcpyHtoD_v2(dstDevice: CUdeviceptr, srcHost: *const c_void, ByteCount: usize) {
        checked(&*context::current()?, Some(dstDevice), None, ByteCount)?;
        Transfer { to: dstDevice, from: srcHost as u64, size: ByteCount }.now()
    }

    fn cuMemcpyDtoH_v2(dstHost: *mut c_void, srcDevice: CUdeviceptr, ByteCount: usize) {
        checked(&*context::current()?, None, Some(srcDevice), ByteCount)?;
        Transfer { to: dstHost as u64, from: srcDevice, size: ByteCount }.now()
    }

    fn cuMemcpyDtoD_v2(dstDevice: CUdeviceptr, srcDevice: CUdeviceptr, ByteCount: usize) {
        checked(&*context::current()?, Some(dstDevice), Some(srcDevice), ByteCount)?;
        Transfer { to: dstDevice, from: srcDevice, size: ByteCount }.later(std::ptr::null_mut())
    }

    fn cuMemcpyHtoDAsync_v2(dstDevice: CUdeviceptr, srcHost: *const c_void, ByteCount: usize, hStream: CUstream) {
        checked(&*context::current()?, Some(dstDevice), None, ByteCount)?;
        Transfer { to: dstDevice, from: srcHost as u64, size: ByteCount }.later(hStream)
    }

    fn cuMemcpyDtoHAsync_v2(dstHost: *mut c_void, srcDevice: CUdeviceptr, ByteCount: usize, hStream: CUstream) {
        checked(&*context::current()?, None, Some(srcDevice), ByteCount)?;
        Transfer { to: dstHost as u64, from: srcDevice, size: ByteCount }.later(hStream)
    }

    fn cuMemcpyDtoDAsync_v2(dstDevice: CUdeviceptr, srcDevice: CUdeviceptr, ByteCount: usize, hStream: CUstream) {
        checked(&*context::current()?, Some(dstDevice), Some(srcDevice), ByteCount)?;
        Transfer { to: dstDevice, from: srcDevice, size: ByteCount }.later(hStream)
    }

    fn cuMemsetD8_v2(dstDevice: CUdeviceptr, uc: c_uchar, N: usize) {
        fill_now(dstDevice, u32::from(uc), 1, N)
    }

    fn cuMemsetD16_v2(dstDevice: CUdeviceptr, us: c_ushort, N: usize) {
        fill_now(dstDevice, u32::from(us), 2, N)
    }

    fn cuMemsetD32_v2(dstDevice: CUdeviceptr, ui: c_uint, N: usize) {
        fill_now(dstDevice, ui, 4, N)
    }

    fn cuMemsetD8Async(dstDevice: CUdeviceptr, uc: c_uchar, N: usize, hStream: CUstream) {
        fill_later(dstDevice, u32::from(uc), 1, N, hStream)
    }

    fn cuMemsetD16Async(dstDevice: CUdeviceptr, us: c_ushort, N: usize, hStream: CUstream) {
        fill_later(dstDevice, u32::from(us), 2, N, hStream)
    }

    fn cuMemsetD32Async(dstDevice: CUdeviceptr, ui: c_uint, N: usize, hStream: CUstream) {
        fill_later(dstDevice, ui, 4, N, hStream)
    }
}
