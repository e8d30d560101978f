//! Copies of rows and planes between memory, arrays and the window, immediately or as graph nodes.

use std::{ops::ControlFlow, ptr::null_mut};

use cuda_definition::driver::types::*;
use remoting_proto::{
    apis::cuda::{
        Kind,
        calls::{AddCopyNode, CopyVolume, Request, SetCopyNode, Side},
        codes,
    },
    wire::Header,
};
use remoting_transport::endpoint::Gone;

use super::{
    Server,
    backend::Submitted,
    backlog::MOST_ROWS,
    cover::Extent,
    driver::{cu, outcome},
};

/// Bytes per row, number of rows, number of planes.
type Size = [u64; 3];

/// The source or destination of a copy, for the driver.
#[derive(Clone, Copy)]
struct End {
    kind: CUmemorytype,
    /// Start address, for memory.
    at: u64,
    array: CUarray,
    /// Bytes per row and rows per plane, for memory.
    pitch: (usize, usize),
    /// Start within an array: byte in the row, row, plane.
    place: (usize, usize, usize),
}

/// Bytes from the start of the first row to the end of the last.
fn extent(pitch: u64, height: u64, [width, rows, planes]: Size) -> Option<u64> {
    if rows.max(planes) > 1 && pitch < width || planes > 1 && height < rows {
        return None;
    }
    let planes = planes
        .checked_sub(1)?
        .checked_mul(pitch.checked_mul(height)?)?;
    let rows = rows.checked_sub(1)?.checked_mul(pitch)?;
    planes.checked_add(rows)?.checked_add(width)
}

/// Total bytes of all rows.
fn bytes([width, rows, planes]: Size) -> Option<u64> {
    width.checked_mul(rows)?.checked_mul(planes)
}

impl Server {
    /// Resolves a side, which must be the client's. Also returns its range of the window, if it is
    /// in the window.
    fn end(
        &mut self,
        context: u32,
        side: &Side,
        size: Size,
    ) -> Result<(End, Option<(u64, u64)>), i32> {
        let mut end = End {
            kind: CUmemorytype::CU_MEMORYTYPE_DEVICE,
            at: 0,
            array: null_mut(),
            pitch: (0, 0),
            place: (0, 0, 0),
        };
        let mut stretch = None;
        match *side {
            Side::Memory(at, pitch, height) => {
                let whole = extent(pitch, height, size).ok_or(codes::INVALID_VALUE)?;
                if !self.backend.memory.holds(at, whole) {
                    return Err(codes::INVALID_VALUE);
                }
                (end.at, end.pitch) = (at, (pitch as usize, height as usize));
            }
            Side::Array(array, x, y, z) => {
                let array = self.backend.objects.get(Kind::Array, array)?;
                end.kind = CUmemorytype::CU_MEMORYTYPE_ARRAY;
                end.array = array.raw as CUarray;
                end.place = (x as usize, y as usize, z as usize);
            }
            Side::Window(ref place) => {
                let (offset, length) = (place.offset, place.length);
                if bytes(size) != Some(length) {
                    return Err(codes::INVALID_VALUE);
                }
                let here = self.window.at(offset, length);
                let here = here.ok_or(codes::INVALID_VALUE)?;
                let backend = &mut self.session.backend;
                let _ = backend.cover.reach(
                    &backend.api,
                    &self.session.window,
                    context,
                    (offset, length),
                    Extent::Ahead,
                );
                self.passes_through(context, (offset, length));
                end.kind = CUmemorytype::CU_MEMORYTYPE_HOST;
                end.at = here as u64;
                end.pitch = (size[0] as usize, size[1] as usize);
                stretch = Some((offset, length));
            }
        }
        Ok((end, stretch))
    }

    /// Makes a copy for the driver, and returns the window ranges that it reads or writes.
    fn volume(
        &mut self,
        context: u32,
        (to, from): (&Side, &Side),
        size: Size,
    ) -> Result<(CUDA_MEMCPY3D, [Option<(u64, u64)>; 2]), i32> {
        if bytes(size).is_none_or(|all| all == 0) {
            return Err(codes::INVALID_VALUE);
        }
        let (to, to_window) = self.end(context, to, size)?;
        let (from, from_window) = self.end(context, from, size)?;
        // SAFETY: numbers and pointers, for which zero is a valid value.
        let mut copy: CUDA_MEMCPY3D = unsafe { std::mem::zeroed() };
        (copy.srcMemoryType, copy.dstMemoryType) = (from.kind, to.kind);
        (copy.srcHost, copy.srcDevice) = (from.at as *const _, from.at);
        (copy.dstHost, copy.dstDevice) = (to.at as *mut _, to.at);
        (copy.srcArray, copy.dstArray) = (from.array, to.array);
        (copy.srcPitch, copy.srcHeight) = from.pitch;
        (copy.dstPitch, copy.dstHeight) = to.pitch;
        (copy.srcXInBytes, copy.srcY, copy.srcZ) = from.place;
        (copy.dstXInBytes, copy.dstY, copy.dstZ) = to.place;
        (copy.WidthInBytes, copy.Height, copy.Depth) =
            (size[0] as usize, size[1] as usize, size[2] as usize);
        Ok((copy, [to_window, from_window]))
    }

    /// Whether a window range spans two registrations: the driver does not accept such memory.
    pub(super) fn is_cut(&self, stretches: [Option<(u64, u64)>; 2]) -> bool {
        let cover = &self.backend.cover;
        stretches
            .into_iter()
            .flatten()
            .any(|(offset, length)| cover.parts(&self.window, offset, length).count() > 1)
    }

    /// Checks whether a copy through these ranges can be a single node of a graph, which the driver executes in order.
    ///
    /// # Errors
    /// The driver refuses to register one of them, or it spans two registrations.
    pub(super) fn may_be_node(&self, stretches: [Option<(u64, u64)>; 2]) -> Result<(), i32> {
        let cover = &self.backend.cover;
        let is_known = |(offset, length)| cover.holds(&self.window, offset, length);
        if !stretches.into_iter().flatten().all(is_known) {
            return Err(codes::OUT_OF_MEMORY);
        }
        match self.is_cut(stretches) {
            true => Err(codes::NOT_SUPPORTED),
            false => Ok(()),
        }
    }

    /// Whether a request may copy many rows one by one.
    pub(super) fn copies_many_rows(&self, request: &Request) -> bool {
        let Request::CopyVolume(call) = request else {
            return false;
        };
        let [_, rows, planes] = call.size;
        rows.saturating_mul(planes) > MOST_ROWS
            && [&call.to, &call.from].into_iter().any(|side| match side {
                Side::Window(place) => {
                    let is_within = self.window.at(place.offset, place.length).is_some();
                    is_within && self.is_cut([Some((place.offset, place.length)), None])
                }
                _ => false,
            })
    }

    pub(super) fn copy_volume(&mut self, header: Header, call: &CopyVolume) -> Result<(), Gone> {
        let stage = [&call.to, &call.from]
            .into_iter()
            .find_map(|side| match side {
                Side::Window(place) => place.stage,
                _ => None,
            });
        let outcome = (|| {
            let submitted = self.submit_to(call.context, call.stream)?;
            let sides = (&call.to, &call.from);
            let (copy, window) = self.volume(call.context, sides, call.size)?;
            if self.is_captured(submitted.raw) {
                self.may_be_node(window)?;
            } else if self.is_cut(window) {
                return self.copy_parts(submitted, &copy, window);
            }
            let stream = submitted.raw as CUstream;
            outcome(cu!(
                self.backend.api,
                cuMemcpy3DAsync_v2(&raw const copy, stream)
            ))?;
            Ok(submitted)
        })();
        self.conclude(header, call.context, stage, outcome)
    }

    /// Copies row by row, each row split where two registrations meet. One side is in the window.
    fn copy_parts(
        &self,
        submitted: Submitted,
        copy: &CUDA_MEMCPY3D,
        [to, from]: [Option<(u64, u64)>; 2],
    ) -> Result<Submitted, i32> {
        let ((offset, length), is_to) = match (to, from) {
            (Some(to), None) => (to, true),
            (None, Some(from)) => (from, false),
            _ => return Err(codes::NOT_SUPPORTED),
        };
        let (width, rows) = (copy.WidthInBytes as u64, copy.Height as u64);
        let all = self.backend.cover.parts(&self.window, offset, length);
        let ends: Vec<u64> = all.map(|(at, size)| at + size - offset).collect();
        let (mut done, mut any) = (0, false);
        while done < length {
            let next = (done / width + 1) * width;
            let end = ends.iter().copied().find(|end| *end > done);
            let until = end.unwrap_or(length).min(next);
            let (x, row) = (done % width, done / width);
            let mut part = *copy;
            (part.WidthInBytes, part.Height, part.Depth) = ((until - done) as usize, 1, 1);
            let (x, y, z) = (x as usize, (row % rows) as usize, (row / rows) as usize);
            // The window's side starts in the registration that contains it: the driver looks up
            // the registration by the start address.
            let (other_x, other_y, other_z) = if is_to {
                part.dstHost = copy.dstHost.wrapping_byte_add(done as usize);
                (&mut part.srcXInBytes, &mut part.srcY, &mut part.srcZ)
            } else {
                part.srcHost = copy.srcHost.wrapping_byte_add(done as usize);
                (&mut part.dstXInBytes, &mut part.dstY, &mut part.dstZ)
            };
            *other_x += x;
            *other_y += y;
            *other_z += z;
            let stream = submitted.raw as CUstream;
            let code = cu!(
                self.backend.api,
                cuMemcpy3DAsync_v2(&raw const part, stream)
            );
            if let ControlFlow::Break(end) = submitted.part(&mut any, code) {
                return end;
            }
            done = until;
        }
        Ok(submitted)
    }

    pub(super) fn add_copy_node(&mut self, call: &AddCopyNode) -> Result<u32, i32> {
        self.backend.objects.check_room()?;
        let context = self.enter(call.context)? as CUcontext;
        let (copy, window) = self.volume(call.context, (&call.to, &call.from), call.size)?;
        self.may_be_node(window)?;
        let graph = self.backend.objects.get(Kind::Graph, call.graph)?.raw as CUgraph;
        let after = self.nodes(&call.after)?;
        let mut added = null_mut();
        outcome(cu!(
            self.backend.api,
            cuGraphAddMemcpyNode(
                &raw mut added,
                graph,
                after.as_ptr(),
                after.len(),
                &raw const copy,
                context,
            )
        ))?;
        let objects = &mut self.backend.objects;
        Ok(objects.number(Kind::Node, added as usize, 0, call.graph))
    }

    pub(super) fn set_copy_node(&mut self, call: &SetCopyNode) -> Result<(), i32> {
        let context = self.enter(call.context)? as CUcontext;
        let (copy, window) = self.volume(call.context, (&call.to, &call.from), call.size)?;
        self.may_be_node(window)?;
        let (api, objects) = (&self.backend.api, &self.backend.objects);
        let node = objects.get(Kind::Node, call.node)?.raw as CUgraphNode;
        outcome(match call.executable {
            0 => cu!(api, cuGraphMemcpyNodeSetParams(node, &raw const copy)),
            id => {
                let graph = objects.get(Kind::Executable, id)?.raw as CUgraphExec;
                cu!(
                    api,
                    cuGraphExecMemcpyNodeSetParams(graph, node, &raw const copy, context)
                )
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn planes_end_with_the_last_row_s_bytes() {
        assert_eq!(extent(16, 4, [10, 3, 2]), Some(64 + 32 + 10));
        assert_eq!(extent(0, 0, [10, 1, 1]), Some(10));
        assert_eq!(extent(8, 4, [10, 3, 1]), None);
        assert_eq!(extent(16, 2, [10, 3, 2]), None);
        assert_eq!(extent(u64::MAX, u64::MAX, [1, 2, 2]), None);
        assert_eq!(extent(16, 4, [10, 0, 1]), None);
        assert_eq!(bytes([1 << 32, 1 << 32, 1]), None);
    }
}
