//! Arrays, textures and surfaces, and copies of rows and planes that are not contiguous.

use std::ffi::c_void;

use cuda_definition::driver::types::*;
use gantry_client::stage::HostRegion;
use remoting_proto::{
    apis::cuda::{
        Kind,
        calls::{CopyVolume, Side},
        codes,
    },
    wire::messages::WindowRange,
};

use crate::{
    capture::{capturing, submit},
    copies::{LARGEST_PIECE, Order, is_device},
    entry::{Outcome, connected, entry_points},
    forward::forward,
    handles,
    link::Link,
    paged::{Paged, Rows},
    registered,
    streams::exact,
};

/// One end of a copy.
#[derive(Clone, Copy, Debug)]
pub enum End {
    /// Device memory: address, row pitch in bytes, rows per plane.
    Device(u64, u64, u64),
    /// An array's number, and the start of the part.
    Array(u32, [u64; 3]),
    /// The program's memory, described as for the device's.
    Host(u64, u64, u64),
}

/// A copy of rows and planes.
#[derive(Clone, Copy, Debug)]
pub struct Volume {
    pub to: End,
    pub from: End,
    /// Bytes per row.
    pub width: u64,
    pub rows: u64,
    pub planes: u64,
}

/// An end as the API describes it: its kind, its addresses, its array, row pitch in bytes and rows per plane, and the
/// start of the part.
type Said = (
    CUmemorytype,
    (u64, u64),
    CUarray,
    (usize, usize),
    (usize, usize, usize),
);

impl End {
    fn new(
        link: &Link,
        (kind, (host, device), array, (pitch, height), (x, y, z)): Said,
        (width, rows): (u64, u64),
    ) -> Outcome<Self> {
        use CUmemorytype as T;
        if kind == T::CU_MEMORYTYPE_ARRAY {
            let array = handles::valid(Kind::Array, array as u64)?;
            return Ok(Self::Array(array, [x, y, z].map(|one| one as u64)));
        }
        let pitch = if pitch == 0 { width } else { pitch as u64 };
        let height = if height == 0 { rows } else { height as u64 };
        let inside = || {
            let planes = (z as u64).checked_mul(height)?.checked_add(y as u64)?;
            planes.checked_mul(pitch)?.checked_add(x as u64)
        };
        let inside = inside().ok_or(codes::INVALID_VALUE)?;
        Ok(match kind {
            T::CU_MEMORYTYPE_HOST => Self::Host(host.wrapping_add(inside), pitch, height),
            T::CU_MEMORYTYPE_DEVICE => Self::Device(device.wrapping_add(inside), pitch, height),
            T::CU_MEMORYTYPE_UNIFIED if is_device(link, device) => {
                Self::Device(device.wrapping_add(inside), pitch, height)
            }
            T::CU_MEMORYTYPE_UNIFIED => Self::Host(device.wrapping_add(inside), pitch, height),
            _ => return Err(codes::INVALID_VALUE),
        })
    }

    /// The part that begins with this row and plane. None for the program's memory.
    fn side(self, row: u64, plane: u64) -> Option<Side> {
        match self {
            Self::Device(at, pitch, height) => {
                let rows = plane.wrapping_mul(height).wrapping_add(row);
                let at = at.wrapping_add(rows.wrapping_mul(pitch));
                Some(Side::Memory(at, pitch, height))
            }
            Self::Array(array, [x, y, z]) => {
                let (y, z) = (y.wrapping_add(row), z.wrapping_add(plane));
                Some(Side::Array(array, x, y, z))
            }
            Self::Host(..) => None,
        }
    }
}

impl Volume {
    /// Converts a program's description of a copy.
    ///
    /// # Errors
    /// An array handle is invalid, or an address is beyond all memory.
    pub fn new(link: &Link, c: &CUDA_MEMCPY3D) -> Outcome<Self> {
        let (width, rows) = (c.WidthInBytes as u64, c.Height as u64);
        let from = (
            c.srcMemoryType,
            (c.srcHost as u64, c.srcDevice),
            c.srcArray,
            (c.srcPitch, c.srcHeight),
            (c.srcXInBytes, c.srcY, c.srcZ),
        );
        let to = (
            c.dstMemoryType,
            (c.dstHost as u64, c.dstDevice),
            c.dstArray,
            (c.dstPitch, c.dstHeight),
            (c.dstXInBytes, c.dstY, c.dstZ),
        );
        Ok(Self {
            to: End::new(link, to, (width, rows))?,
            from: End::new(link, from, (width, rows))?,
            width,
            rows,
            planes: c.Depth as u64,
        })
    }

    /// Whether an array is involved.
    pub fn has_array(&self) -> bool {
        matches!(self.to, End::Array(..)) || matches!(self.from, End::Array(..))
    }

    /// A side of a graph node's copy. If it is memory of the program that is not pinned, also returns its place in the
    /// window.
    ///
    /// # Errors
    /// There is no room in the window.
    pub fn node_side(&self, link: &Link, is_to: bool) -> Outcome<(Side, Option<Paged>)> {
        let end = if is_to { self.to } else { self.from };
        let End::Host(at, pitch, height) = end else {
            let side = end.side(0, 0).ok_or(codes::INVALID_VALUE)?;
            return Ok((side, None));
        };
        self.reach((at, pitch, height))
            .ok_or(codes::INVALID_VALUE)?;
        let size = [self.width, self.rows, self.planes];
        if let Some(pinned) = self.pinned(link).filter(|pinned| pinned.part == size) {
            return Ok((pinned.side(0, 0), None));
        }
        let rows = Rows {
            at,
            size,
            pitch,
            height,
        };
        let (paged, place) = Paged::new(link, rows, is_to)?;
        Ok((Side::Window(place), Some(paged)))
    }

    /// Executes the copy. Memory of the program that is not pinned passes through stages.
    pub fn copy(&self, order: Order) -> Outcome {
        let link = connected()?;
        let Self {
            to,
            from,
            width,
            rows,
            planes,
        } = *self;
        if width == 0 || rows == 0 || planes == 0 {
            return Ok(());
        }
        let (context, stream) = (order.context, order.stream);
        let call = |to, from, size| CopyVolume {
            context,
            stream,
            to,
            from,
            size,
        };
        if let (Some(to), Some(from)) = (to.side(0, 0), from.side(0, 0)) {
            return submit(
                link,
                context,
                stream,
                &call(to, from, [width, rows, planes]),
            );
        }
        if self.host().is_some_and(|host| self.reach(host).is_none()) {
            return Err(codes::INVALID_VALUE);
        }
        if let Some(pinned) = self.pinned(link) {
            return self.copy_pinned(link, order, &pinned);
        }
        if capturing(link, context, stream) {
            return Err(codes::STREAM_CAPTURE_UNSUPPORTED);
        }
        if self.copy_registered(link, order)? {
            return Ok(());
        }
        let group = (LARGEST_PIECE as u64 / width).clamp(1, rows);
        for plane in 0..planes {
            for row in (0..rows).step_by(group as usize) {
                let count = group.min(rows - row);
                let last = plane + 1 == planes && row + count == rows;
                let size = [width, count, 1];
                let region = |(at, pitch, height): (u64, u64, u64)| HostRegion {
                    start: (at + (plane * height + row) * pitch) as *mut u8,
                    row: width as usize,
                    rows: count as usize,
                    slices: 1,
                    row_pitch: pitch as usize,
                    slice_pitch: 0,
                };
                let ask = |call| exact(link, context, stream, link.ask::<CopyVolume>(call));
                match (to.side(row, plane), from) {
                    (Some(to), End::Host(at, pitch, height)) => {
                        // SAFETY: the caller's memory, valid as the API requires.
                        let place = unsafe { link.stage_copy(&region((at, pitch, height)))? };
                        let call = call(to, Side::Window(place), size);
                        if order.wait && last {
                            return ask(&call);
                        }
                        link.post(&call)?;
                    }
                    (None, _) => {
                        let (End::Host(at, pitch, height), Some(from)) =
                            (to, from.side(row, plane))
                        else {
                            return Err(codes::INVALID_VALUE);
                        };
                        let length = width * count;
                        let offset = link.reserve(length)?;
                        let region = region((at, pitch, height));
                        // SAFETY: the caller's memory, which is not written to after this function has returned.
                        let place = unsafe { link.stage_into(offset, length, region) };
                        let stage = place.stage;
                        link.landed(stage, ask(&call(Side::Window(place), from, size)))?;
                    }
                    _ => return Err(codes::INVALID_VALUE),
                }
            }
        }
        Ok(())
    }
}

/// Rows of pinned or managed memory.
struct Pinned {
    /// Where the first one is in the window.
    offset: u64,
    pitch: u64,
    height: u64,
    /// The size of the largest parts without gaps: bytes per row, rows, planes.
    part: [u64; 3],
}

impl Pinned {
    /// The part that begins with this row and plane.
    fn side(&self, row: u64, plane: u64) -> Side {
        Side::Window(WindowRange {
            // In the window, as are all rows.
            offset: self.offset + (plane * self.height + row) * self.pitch,
            length: self.part.iter().product(),
            stage: None,
        })
    }
}

impl Volume {
    /// The memory of the program: address, row pitch in bytes, rows per plane.
    fn host(&self) -> Option<(u64, u64, u64)> {
        match (self.to, self.from) {
            (End::Host(at, pitch, height), _) | (_, End::Host(at, pitch, height)) => {
                Some((at, pitch, height))
            }
            _ => None,
        }
    }

    /// Bytes from the start of the first row of the program's memory to the end of the last, which is at an address.
    fn reach(&self, (at, pitch, height): (u64, u64, u64)) -> Option<u64> {
        let before = self.planes.checked_sub(1)?.checked_mul(height)?;
        let before = before.checked_add(self.rows.checked_sub(1)?)?;
        let length = before.checked_mul(pitch)?.checked_add(self.width)?;
        at.checked_add(length).map(|_| length)
    }

    /// The memory of the program, if the device accesses it in place.
    fn pinned(&self, link: &Link) -> Option<Pinned> {
        let host = self.host()?;
        let offset = link.shared(host.0 as *const u8, self.reach(host)?)?;
        let (_, pitch, height) = host;
        let (width, rows, planes) = (self.width, self.rows, self.planes);
        // Products of what is in the window.
        let is_flat = rows == 1 || pitch == width;
        let part = match is_flat {
            true if planes == 1 || pitch * height == width * rows => [width, rows, planes],
            true => [width, rows, 1],
            false => [width, 1, 1],
        };
        Some(Pinned {
            offset,
            pitch,
            height,
            part,
        })
    }

    /// Executes the copy of pinned or managed memory, which the device reads or writes in the order of the stream.
    fn copy_pinned(&self, link: &Link, order: Order, pinned: &Pinned) -> Outcome {
        let (context, stream) = (order.context, order.stream);
        let [_, group, layers] = pinned.part;
        for plane in (0..self.planes).step_by(layers as usize) {
            for row in (0..self.rows).step_by(group as usize) {
                let window = pinned.side(row, plane);
                let (to, from) = match (self.to.side(row, plane), self.from.side(row, plane)) {
                    (Some(to), None) => (to, window),
                    (None, Some(from)) => (window, from),
                    _ => return Err(codes::INVALID_VALUE),
                };
                let call = CopyVolume {
                    context,
                    stream,
                    to,
                    from,
                    size: pinned.part,
                };
                let is_last = plane + layers == self.planes && row + group == self.rows;
                match order.wait && is_last {
                    true => exact(link, context, stream, link.ask(&call))?,
                    false => submit(link, context, stream, &call)?,
                }
            }
        }
        Ok(())
    }

    /// Executes the copy in one piece if the memory of the program is registered and there is room for a stage.
    fn copy_registered(&self, link: &Link, order: Order) -> Outcome<bool> {
        let Some((at, pitch, height)) = self.host() else {
            return Ok(false);
        };
        // Rows that overlap have more bytes than the memory that they are in.
        if pitch < self.width || self.planes > 1 && height < self.rows {
            return Ok(false);
        }
        let size = [self.width, self.rows, self.planes];
        let slice_pitch = pitch.checked_mul(height);
        let region = HostRegion {
            start: at as *mut u8,
            row: self.width as usize,
            rows: self.rows as usize,
            slices: self.planes as usize,
            row_pitch: pitch as usize,
            slice_pitch: slice_pitch.ok_or(codes::INVALID_VALUE)? as usize,
        };
        if !registered::holds_region(link, &region) {
            return Ok(false);
        }
        let (context, stream) = (order.context, order.stream);
        let call = |to, from| CopyVolume {
            context,
            stream,
            to,
            from,
            size,
        };
        match (self.to.side(0, 0), self.from.side(0, 0)) {
            (Some(to), None) => {
                registered::write(link, order, region, |place| call(to, Side::Window(place)))
            }
            (None, Some(from)) if !order.wait => {
                let call = |place| call(Side::Window(place), from);
                // SAFETY: the caller's memory, valid as the API requires.
                let is_sent = unsafe { registered::read(link, region, call)? };
                if is_sent {
                    registered::land(link, order)?;
                }
                Ok(is_sent)
            }
            _ => Ok(false),
        }
    }
}

/// A row of an array, from a byte offset on.
fn row(array: CUarray, offset: usize) -> Outcome<End> {
    let array = handles::valid(Kind::Array, array as u64)?;
    Ok(End::Array(array, [offset as u64, 0, 0]))
}

fn copy_row(to: End, from: End, width: usize, order: Order) -> Outcome {
    let volume = Volume {
        to,
        from,
        width: width as u64,
        rows: 1,
        planes: 1,
    };
    volume.copy(order)
}

fn host(at: *const c_void, width: usize) -> End {
    End::Host(at as u64, width as u64, 1)
}

/// A description with handles replaced by numbers.
///
/// # Safety
/// It is valid as the API requires.
unsafe fn described(description: *const CUDA_RESOURCE_DESC) -> Outcome<CUDA_RESOURCE_DESC> {
    use CUresourcetype as T;
    // SAFETY: the caller's promise.
    let mut sent = *unsafe { description.as_ref() }.ok_or(codes::INVALID_VALUE)?;
    // SAFETY: the kind determines which part of the union is valid.
    unsafe {
        match sent.resType {
            T::CU_RESOURCE_TYPE_ARRAY => {
                let handle = sent.res.array.hArray as u64;
                let number = handles::valid(Kind::Array, handle)?;
                sent.res.array.hArray = number as usize as CUarray;
            }
            T::CU_RESOURCE_TYPE_MIPMAPPED_ARRAY => {
                let handle = sent.res.mipmap.hMipmappedArray as u64;
                let number = handles::valid(Kind::Mipmap, handle)?;
                sent.res.mipmap.hMipmappedArray = number as usize as CUmipmappedArray;
            }
            _ => {}
        }
    }
    Ok(sent)
}

entry_points! {
    fn cuTexObjectCreate(
        pTexObject: *mut CUtexObject,
        pResDesc: *const CUDA_RESOURCE_DESC,
        pTexDesc: *const CUDA_TEXTURE_DESC,
        pResViewDesc: *const CUDA_RESOURCE_VIEW_DESC,
    ) {
        let resource = described(pResDesc)?;
        let words = [pTexObject as u64, &raw const resource as u64, pTexDesc as u64, pResViewDesc as u64];
        forward("cuTexObjectCreate", &words)
    }

    fn cuSurfObjectCreate(pSurfObject: *mut CUsurfObject, pResDesc: *const CUDA_RESOURCE_DESC) {
        let resource = described(pResDesc)?;
        forward("cuSurfObjectCreate", &[pSurfObject as u64, &raw const resource as u64])
    }

    fn cuMemcpyHtoA_v2(dstArray: CUarray, dstOffset: usize, srcHost: *const c_void, ByteCount: usize) {
        let order = Order::new(std::ptr::null_mut(), true)?;
        copy_row(row(dstArray, dstOffset)?, host(srcHost, ByteCount), ByteCount, order)
    }

    fn cuMemcpyHtoAAsync_v2(
        dstArray: CUarray,
        dstOffset: usize,
        srcHost: *const c_void,
        ByteCount: usize,
        hStream: CUstream,
    ) {
        let order = Order::new(hStream, false)?;
        copy_row(row(dstArray, dstOffset)?, host(srcHost, ByteCount), ByteCount, order)
    }

    fn cuMemcpyAtoH_v2(dstHost: *mut c_void, srcArray: CUarray, srcOffset: usize, ByteCount: usize) {
        let order = Order::new(std::ptr::null_mut(), true)?;
        copy_row(host(dstHost, ByteCount), row(srcArray, srcOffset)?, ByteCount, order)
    }

    fn cuMemcpyAtoHAsync_v2(
        dstHost: *mut c_void,
        srcArray: CUarray,
        srcOffset: usize,
        ByteCount: usize,
        hStream: CUstream,
    ) {
        let order = Order::new(hStream, false)?;
        copy_row(host(dstHost, ByteCount), row(srcArray, srcOffset)?, ByteCount, order)
    }

    fn cuMemcpyDtoA_v2(dstArray: CUarray, dstOffset: usize, srcDevice: CUdeviceptr, ByteCount: usize) {
        let order = Order::new(std::ptr::null_mut(), true)?;
        let from = End::Device(srcDevice, ByteCount as u64, 1);
        copy_row(row(dstArray, dstOffset)?, from, ByteCount, order)
    }

    fn cuMemcpyAtoD_v2(dstDevice: CUdeviceptr, srcArray: CUarray, srcOffset: usize, ByteCount: usize) {
        let order = Order::new(std::ptr::null_mut(), true)?;
        let to = End::Device(dstDevice, ByteCount as u64, 1);
        copy_row(to, row(srcArray, srcOffset)?, ByteCount, order)
    }

    fn cuMemcpyAtoA_v2(
        dstArray: CUarray,
        dstOffset: usize,
        srcArray: CUarray,
        srcOffset: usize,
        ByteCount: usize,
    ) {
        let order = Order::new(std::ptr::null_mut(), true)?;
        copy_row(row(dstArray, dstOffset)?, row(srcArray, srcOffset)?, ByteCount, order)
    }
}
