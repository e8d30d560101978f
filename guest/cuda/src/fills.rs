//! Memory fills.

use std::ffi::{c_uchar, c_uint, c_ushort};

use cuda_definition::driver::types::*;
use remoting_proto::apis::cuda::{Kind, calls::Fill, codes};

use crate::{
    capture::submit,
    context,
    entry::{Outcome, connected, entry_points},
    handles,
    memory::find,
    streams::exact,
};

fn fill(
    at: u64,
    value: u32,
    width: u8,
    (count, pitch, rows): (usize, usize, usize),
    stream: Option<CUstream>,
) -> Outcome {
    let link = connected()?;
    let context = context::need()?;
    let stream_number = handles::valid(Kind::Stream, stream.map_or(0, |stream| stream as u64))?;
    let line = count
        .checked_mul(width.into())
        .ok_or(codes::INVALID_VALUE)?;
    let others = rows.saturating_sub(1).checked_mul(pitch);
    let size = others.and_then(|others| others.checked_add(line));
    let size = size.ok_or(codes::INVALID_VALUE)? as u64;
    if line == 0 || rows == 0 {
        return Ok(());
    }
    let known = find(link, at).ok_or(codes::INVALID_VALUE)?;
    let end = (at - known.start).checked_add(size);
    let fits =
        known.what == crate::memory::What::Mapped || end.is_some_and(|end| end <= known.size);
    if !fits || !at.is_multiple_of(width.into()) || rows > 1 && pitch < line {
        return Err(codes::INVALID_VALUE);
    }
    let call = Fill {
        context,
        stream: stream_number,
        at,
        value,
        width,
        count: count as u64,
        pitch: pitch as u64,
        rows: rows as u64,
    };
    // The caller may rely on the values being visible on return only for pinned memory.
    if stream.is_none() && !known.what.is_device() {
        return exact(link, context, stream_number, link.ask(&call));
    }
    submit(link, context, stream_number, &call)
}

entry_points! {
    fn cuMemsetD8_v2(dstDevice: CUdeviceptr, uc: c_uchar, N: usize) {
        fill(dstDevice, uc.into(), 1, (N, 0, 1), None)
    }

    fn cuMemsetD16_v2(dstDevice: CUdeviceptr, us: c_ushort, N: usize) {
        fill(dstDevice, us.into(), 2, (N, 0, 1), None)
    }

    fn cuMemsetD32_v2(dstDevice: CUdeviceptr, ui: c_uint, N: usize) {
        fill(dstDevice, ui, 4, (N, 0, 1), None)
    }

    fn cuMemsetD8Async(dstDevice: CUdeviceptr, uc: c_uchar, N: usize, hStream: CUstream) {
        fill(dstDevice, uc.into(), 1, (N, 0, 1), Some(hStream))
    }

    fn cuMemsetD16Async(dstDevice: CUdeviceptr, us: c_ushort, N: usize, hStream: CUstream) {
        fill(dstDevice, us.into(), 2, (N, 0, 1), Some(hStream))
    }

    fn cuMemsetD32Async(dstDevice: CUdeviceptr, ui: c_uint, N: usize, hStream: CUstream) {
        fill(dstDevice, ui, 4, (N, 0, 1), Some(hStream))
    }

    fn cuMemsetD2D8_v2(dstDevice: CUdeviceptr, dstPitch: usize, uc: c_uchar, Width: usize, Height: usize) {
        fill(dstDevice, uc.into(), 1, (Width, dstPitch, Height), None)
    }

    fn cuMemsetD2D16_v2(dstDevice: CUdeviceptr, dstPitch: usize, us: c_ushort, Width: usize, Height: usize) {
        fill(dstDevice, us.into(), 2, (Width, dstPitch, Height), None)
    }

    fn cuMemsetD2D32_v2(dstDevice: CUdeviceptr, dstPitch: usize, ui: c_uint, Width: usize, Height: usize) {
        fill(dstDevice, ui, 4, (Width, dstPitch, Height), None)
    }

    fn cuMemsetD2D8Async(dstDevice: CUdeviceptr, dstPitch: usize, uc: c_uchar, Width: usize, Height: usize, hStream: CUstream) {
        fill(dstDevice, uc.into(), 1, (Width, dstPitch, Height), Some(hStream))
    }

    fn cuMemsetD2D16Async(dstDevice: CUdeviceptr, dstPitch: usize, us: c_ushort, Width: usize, Height: usize, hStream: CUstream) {
        fill(dstDevice, us.into(), 2, (Width, dstPitch, Height), Some(hStream))
    }

    fn cuMemsetD2D32Async(dstDevice: CUdeviceptr, dstPitch: usize, ui: c_uint, Width: usize, Height: usize, hStream: CUstream) {
        fill(dstDevice, ui, 4, (Width, dstPitch, Height), Some(hStream))
    }
}
