//! Copies and fills.

use std::{ops::ControlFlow, ptr::null_mut};

use cuda_definition::driver::types::{CUDA_MEMCPY2D, CUmemorytype, CUstream};
use remoting_proto::{
    apis::cuda::{
        calls::{Copy, CopyRows, Fill, Read, Write},
        codes,
    },
    wire::{Header, messages::WindowRange},
};
use remoting_transport::endpoint::Gone;

use super::{
    Server,
    backend::Submitted,
    cover::Extent,
    driver::{cu, outcome},
};

/// Bytes from the start of the first row to the end of the last.
fn extent(pitch: u64, width: u64, rows: u64) -> Option<u64> {
    match rows.checked_sub(1) {
        None => Some(0),
        Some(0) => Some(width),
        Some(others) if pitch >= width => others.checked_mul(pitch)?.checked_add(width),
        Some(_) => None,
    }
}

impl Server {
    /// Copies between the device and a range of the window, split where two registrations meet.
    /// During a capture a split copy is refused, because it must be a single node that the client
    /// may change.
    fn transfer(
        &mut self,
        context: u32,
        stream: u32,
        there: u64,
        place: &WindowRange,
        write: bool,
    ) -> Result<Submitted, i32> {
        let submitted = self.submit_to(context, stream)?;
        let (offset, length) = (place.offset, place.length);
        let here = self.window.at(offset, length);
        let here = here.ok_or(codes::INVALID_VALUE)?;
        if !self.is_clients(there, length) {
            return Err(codes::INVALID_VALUE);
        }
        let backend = &mut self.session.backend;
        let stretch = (offset, length);
        let _ = backend.cover.reach(
            &backend.api,
            &self.session.window,
            context,
            stretch,
            Extent::Ahead,
        );
        self.passes_through(context, stretch);
        if self.is_captured(submitted.raw) {
            self.may_be_node([Some(stretch), None])?;
        }
        let backend = &self.backend;
        let stream = submitted.raw as CUstream;
        let mut any = false;
        for (at, size) in backend.cover.parts(&self.window, offset, length) {
            let done = at - offset;
            let here = here.wrapping_add(done as usize);
            let there = there + done;
            let code = if write {
                let from = here.cast_const().cast();
                cu!(
                    backend.api,
                    cuMemcpyHtoDAsync_v2(there, from, size as usize, stream)
                )
            } else {
                cu!(
                    backend.api,
                    cuMemcpyDtoHAsync_v2(here.cast(), there, size as usize, stream)
                )
            };
            if let ControlFlow::Break(end) = submitted.part(&mut any, code) {
                return end;
            }
        }
        Ok(submitted)
    }

    pub(super) fn write(&mut self, header: Header, call: &Write) -> Result<(), Gone> {
        let outcome = self.transfer(call.context, call.stream, call.to, &call.from, true);
        self.conclude(header, call.context, call.from.stage, outcome)
    }

    pub(super) fn read(&mut self, header: Header, call: &Read) -> Result<(), Gone> {
        let outcome = self.transfer(call.context, call.stream, call.from, &call.to, false);
        self.conclude(header, call.context, call.to.stage, outcome)
    }

    pub(super) fn copy(&mut self, header: Header, call: &Copy) -> Result<(), Gone> {
        let outcome = (|| {
            let submitted = self.submit_to(call.context, call.stream)?;
            if !self.is_clients(call.to, call.size) || !self.is_clients(call.from, call.size) {
                return Err(codes::INVALID_VALUE);
            }
            let (stream, size) = (submitted.raw as CUstream, call.size as usize);
            outcome(cu!(
                self.backend.api,
                cuMemcpyDtoDAsync_v2(call.to, call.from, size, stream)
            ))?;
            Ok(submitted)
        })();
        self.conclude(header, call.context, None, outcome)
    }

    pub(super) fn copy_rows(&mut self, header: Header, call: &CopyRows) -> Result<(), Gone> {
        let outcome = (|| {
            let submitted = self.submit_to(call.context, call.stream)?;
            for (at, pitch) in [call.to, call.from] {
                let size = extent(pitch, call.width, call.rows).ok_or(codes::INVALID_VALUE)?;
                if !self.is_clients(at, size) {
                    return Err(codes::INVALID_VALUE);
                }
            }
            // Rows of zero width may be arbitrarily many.
            if call.width == 0 || call.rows == 0 {
                return Ok(submitted);
            }
            let copy = CUDA_MEMCPY2D {
                srcXInBytes: 0,
                srcY: 0,
                srcMemoryType: CUmemorytype::CU_MEMORYTYPE_DEVICE,
                srcHost: null_mut(),
                srcDevice: call.from.0,
                srcArray: null_mut(),
                srcPitch: call.from.1 as usize,
                dstXInBytes: 0,
                dstY: 0,
                dstMemoryType: CUmemorytype::CU_MEMORYTYPE_DEVICE,
                dstHost: null_mut(),
                dstDevice: call.to.0,
                dstArray: null_mut(),
                dstPitch: call.to.1 as usize,
                WidthInBytes: call.width as usize,
                Height: call.rows as usize,
            };
            let stream = submitted.raw as CUstream;
            let code = cu!(
                self.backend.api,
                cuMemcpy2DAsync_v2(&raw const copy, stream)
            );
            if code != codes::NOT_SUPPORTED {
                return outcome(code).map(|()| submitted);
            }
            // A driver without 2D copies: copy row by row.
            let mut any = false;
            for row in 0..call.rows {
                let (to, from) = (call.to.0 + row * call.to.1, call.from.0 + row * call.from.1);
                let size = call.width as usize;
                let code = cu!(
                    self.backend.api,
                    cuMemcpyDtoDAsync_v2(to, from, size, stream)
                );
                if let ControlFlow::Break(end) = submitted.part(&mut any, code) {
                    return end;
                }
            }
            Ok(submitted)
        })();
        self.conclude(header, call.context, None, outcome)
    }

    pub(super) fn fill(&mut self, header: Header, call: &Fill) -> Result<(), Gone> {
        let outcome = (|| {
            let submitted = self.submit_to(call.context, call.stream)?;
            let width = call.count.checked_mul(u64::from(call.width));
            let size = width.and_then(|width| extent(call.pitch, width, call.rows));
            if !self.is_clients(call.at, size.ok_or(codes::INVALID_VALUE)?) {
                return Err(codes::INVALID_VALUE);
            }
            let (api, stream) = (&self.backend.api, submitted.raw as CUstream);
            let (at, value, count) = (call.at, call.value, call.count as usize);
            let (byte, short) = (value as u8, value as u16);
            let (pitch, rows) = (call.pitch as usize, call.rows as usize);
            outcome(match (call.width, call.rows) {
                (_, 0) => 0,
                (1, 1) => cu!(api, cuMemsetD8Async(at, byte, count, stream)),
                (2, 1) => cu!(api, cuMemsetD16Async(at, short, count, stream)),
                (4, 1) => cu!(api, cuMemsetD32Async(at, value, count, stream)),
                (1, _) => cu!(api, cuMemsetD2D8Async(at, pitch, byte, count, rows, stream)),
                (2, _) => cu!(
                    api,
                    cuMemsetD2D16Async(at, pitch, short, count, rows, stream)
                ),
                (4, _) => cu!(
                    api,
                    cuMemsetD2D32Async(at, pitch, value, count, rows, stream)
                ),
                _ => codes::INVALID_VALUE,
            })?;
            Ok(submitted)
        })();
        self.conclude(header, call.context, None, outcome)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_end_with_the_last_ones_bytes() {
        assert_eq!(extent(512, 100, 3), Some(1124));
        assert_eq!(extent(0, 100, 1), Some(100));
        assert_eq!(extent(0, 100, 0), Some(0));
        assert_eq!(extent(64, 100, 2), None);
        assert_eq!(extent(u64::MAX, 100, 3), None);
    }
}
