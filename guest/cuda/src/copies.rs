//! Copies. Pinned memory is used in place. Other memory passes through stages of the window in
//! pieces, so that copying one piece between memory and window overlaps with the device's work on
//! another.

use std::{collections::VecDeque, ffi::c_void};

use cuda_definition::driver::types::*;
use gantry_client::{copy_threads, stage::HostRegion};
use remoting_proto::{
    apis::cuda::{
        Kind,
        calls::{Copy, CopyRows, Read, Write},
        codes,
    },
    wire::messages::{StageId, WindowRange},
};

use crate::{
    arrays::{End, Volume},
    capture::{capturing, submit},
    context,
    entry::{Outcome, connected, entry_points},
    handles,
    link::Link,
    memory::find,
    paged::{self, Rows},
    registered,
    streams::{copy_in, exact, wait},
};

/// The maximum size of a copy of ordinary memory that is not divided into pieces.
const UNCUT: usize = 256 << 10;
/// The largest piece.
pub const LARGEST_PIECE: usize = 2 << 20;
/// The maximum number of pieces of a copy to the host that are in flight: their stages stay in the
/// caches.
const PIECES: usize = 6;
/// The maximum number of pieces of a copy to the device that are in flight. A copy of any size uses
/// no more of the window than that: more would have to be mapped and registered with the driver
/// first.
const AHEAD: usize = 8;
/// The number of these pieces that are waited for at a time, with one request to the worker.
const BATCH: usize = 4;

/// The context, stream and kind of a copy.
#[derive(Clone, Copy, Debug)]
pub struct Order {
    pub context: u32,
    pub stream: u32,
    /// Whether the caller waits until it is done.
    pub wait: bool,
}

impl Order {
    /// # Errors
    /// There is no current context, or the stream is invalid.
    pub fn new(stream: CUstream, wait: bool) -> Outcome<Self> {
        connected()?;
        Ok(Self {
            context: context::need()?,
            stream: handles::valid(Kind::Stream, stream as u64)?,
            wait,
        })
    }
}

fn piece_size(size: usize) -> usize {
    let part = (size / 4).next_multiple_of(4096);
    part.clamp(UNCUT, LARGEST_PIECE)
}

/// Divides a stretch into pieces.
fn pieces(size: usize) -> impl Iterator<Item = (usize, usize)> {
    let length = if size <= UNCUT {
        size
    } else {
        piece_size(size)
    };
    (0..size)
        .step_by(length.max(1))
        .map(move |at| (at, length.min(size - at)))
}

fn window_place(link: &Link, pointer: *const u8, size: usize) -> Option<WindowRange> {
    Some(WindowRange {
        offset: link.shared(pointer, size as u64)?,
        length: size as u64,
        stage: None,
    })
}

/// A contiguous stretch of the program's memory, for a graph node.
fn flat(at: u64, size: usize) -> Rows {
    Rows {
        at,
        size: [size as u64, 1, 1],
        pitch: size as u64,
        height: 1,
    }
}

fn write(link: &Link, order: Order, to: u64, from: *const u8, size: usize) -> Outcome {
    let Order {
        context, stream, ..
    } = order;
    let call = |to, from| Write {
        context,
        stream,
        to,
        from,
    };
    if let Some(place) = window_place(link, from, size) {
        let call = call(to, place);
        return match order.wait {
            true => exact(link, context, stream, link.ask(&call)),
            false => submit(link, context, stream, &call),
        };
    }
    if capturing(link, context, stream) {
        let ask = |place| link.ask(&call(to, place));
        return paged::captured(stream, flat(from as u64, size), false, ask);
    }
    copy_threads::prepare(size as u64);
    let mut done = 0;
    if registered::holds(link, from as u64, size as u64) {
        while done < size {
            let length = registered::PIECE.min(size - done);
            let wait = order.wait && done + length == size;
            let memory = HostRegion::flat(from.wrapping_add(done).cast_mut(), length);
            let call = |place| call(to + done as u64, place);
            if !registered::write(link, Order { wait, ..order }, memory, call)? {
                break;
            }
            done += length;
        }
    }
    write_staged(
        link,
        order,
        to + done as u64,
        from.wrapping_add(done),
        size - done,
    )
}

/// Copies memory that is read now.
fn write_staged(link: &Link, order: Order, to: u64, from: *const u8, size: usize) -> Outcome {
    let Order {
        context, stream, ..
    } = order;
    let call = |to, from| Write {
        context,
        stream,
        to,
        from,
    };
    let mut under_way = VecDeque::with_capacity(AHEAD);
    for (at, length) in pieces(size) {
        if under_way.len() == AHEAD {
            // The worker reports all completed stages before it answers.
            let newest: Option<StageId> = under_way.drain(..BATCH).next_back();
            newest.map_or(Ok(()), |stage| link.wait_released(stage))?;
        }
        let memory = HostRegion::flat(from.wrapping_add(at).cast_mut(), length);
        // SAFETY: the caller's memory, valid as the API requires.
        let place = unsafe { link.stage_copy(&memory)? };
        under_way.extend(place.stage);
        let call = call(to + at as u64, place);
        if order.wait && at + length == size {
            // Streams that do not wait for this one must not overtake it.
            return exact(link, context, stream, link.ask(&call));
        }
        // The memory has been read, which is all that the caller waits for.
        link.post(&call)?;
    }
    Ok(())
}

fn read(link: &Link, order: Order, to: *mut u8, from: u64, size: usize) -> Outcome {
    let Order {
        context, stream, ..
    } = order;
    let call = |from, to| Read {
        context,
        stream,
        from,
        to,
    };
    if let Some(place) = window_place(link, to, size) {
        let call = call(from, place);
        return match order.wait {
            true => exact(link, context, stream, link.ask(&call)),
            false => submit(link, context, stream, &call),
        };
    }
    if capturing(link, context, stream) {
        let ask = |place| link.ask(&call(from, place));
        return paged::captured(stream, flat(to as u64, size), true, ask);
    }
    copy_threads::prepare(size as u64);
    let mut done = 0;
    if !order.wait && registered::holds(link, to as u64, size as u64) {
        while done < size {
            let length = registered::PIECE.min(size - done);
            let memory = HostRegion::flat(to.wrapping_add(done), length);
            let call = |place| call(from + done as u64, place);
            // SAFETY: the caller's memory, valid as the API requires.
            if !unsafe { registered::read(link, memory, call)? } {
                break;
            }
            done += length;
        }
        if done == size {
            return registered::land(link, order);
        }
    }
    read_staged(
        link,
        order,
        to.wrapping_add(done),
        from + done as u64,
        size - done,
    )
}

/// Copies to memory that contains the data when this function returns. Nothing is written to the memory any more then.
fn read_staged(link: &Link, order: Order, to: *mut u8, from: u64, size: usize) -> Outcome {
    let mut under_way = VecDeque::with_capacity(PIECES);
    let read = read_pieces(link, order, to, (from, size), &mut under_way);
    link.landed(under_way, read)
}

/// The same, except that pieces that are left `under_way` may be written to the memory later.
fn read_pieces(
    link: &Link,
    order: Order,
    to: *mut u8,
    (from, size): (u64, usize),
    under_way: &mut VecDeque<StageId>,
) -> Outcome {
    let Order {
        context, stream, ..
    } = order;
    let call = |from, to| Read {
        context,
        stream,
        from,
        to,
    };
    for (at, length) in pieces(size) {
        if under_way.len() == PIECES
            && let Some(oldest) = under_way.pop_front()
        {
            link.landed([oldest], link.wait_released(oldest))?;
        }
        let memory = HostRegion::flat(to.wrapping_add(at), length);
        let offset = link.reserve(length as u64)?;
        // SAFETY: the caller's memory, which is not written to after `read_staged` has returned.
        let place = unsafe { link.stage_into(offset, length as u64, memory) };
        under_way.extend(place.stage);
        let call = call(from + at as u64, place);
        if at + length == size {
            // In any case, memory that is not pinned contains its data when the call returns.
            return exact(link, context, stream, link.ask(&call));
        }
        link.post(&call)?;
    }
    Ok(())
}

fn on_device(link: &Link, order: Order, to: u64, from: u64, size: usize) -> Outcome {
    let (context, stream) = (order.context, order.stream);
    let call = Copy {
        context,
        stream,
        to,
        from,
        size: size as u64,
    };
    submit(link, context, stream, &call)
}

/// Whether an address is in known memory of the device.
pub fn is_device(link: &Link, at: u64) -> bool {
    find(link, at).is_some_and(|known| known.what.is_device())
}

/// Checks that a stretch does not extend beyond the allocation that it begins in.
fn checked(link: &Link, at: u64, size: usize) -> Outcome {
    let known = find(link, at).ok_or(codes::INVALID_VALUE)?;
    let fits = (at - known.start).checked_add(size as u64);
    // Mapped memory may continue in the next mapping.
    if known.what == crate::memory::What::Mapped || fits.is_some_and(|end| end <= known.size) {
        return Ok(());
    }
    Err(codes::INVALID_VALUE)
}

/// A copy between addresses of any kind.
fn any(order: Order, to: u64, from: u64, size: usize) -> Outcome {
    let link = connected()?;
    if size == 0 {
        return Ok(());
    }
    match (is_device(link, to), is_device(link, from)) {
        (true, true) => {
            checked(link, to, size)?;
            checked(link, from, size)?;
            on_device(link, order, to, from, size)
        }
        (true, false) => {
            checked(link, to, size)?;
            write(link, order, to, from as *const u8, size)
        }
        (false, true) => {
            checked(link, from, size)?;
            read(link, order, to as *mut u8, from, size)
        }
        (false, false) => {
            let is_pinned = |at| checked(link, at, size).is_ok();
            if !order.wait && link.is_shared() && is_pinned(to) && is_pinned(from) {
                // SAFETY: both are the caller's memory, which stays valid until the copy is done.
                let copy = move || unsafe {
                    std::ptr::copy(from as *const u8, to as *mut u8, size);
                };
                return in_order(link, order, copy);
            }
            wait(link, (order.context, order.stream))?;
            // SAFETY: both are the caller's memory.
            unsafe { std::ptr::copy(from as *const u8, to as *mut u8, size) };
            Ok(())
        }
    }
}

/// A copy between addresses of any kind, which has read memory of the host when this returns.
fn at_once(order: Order, to: u64, from: u64, size: usize) -> Outcome {
    let link = connected()?;
    if is_device(link, from) || size == 0 {
        return any(order, to, from, size);
    }
    if !is_device(link, to) {
        return any(
            Order {
                wait: true,
                ..order
            },
            to,
            from,
            size,
        );
    }
    // Nodes read memory of the host at each launch.
    if capturing(link, order.context, order.stream) {
        return Err(codes::NOT_SUPPORTED);
    }
    checked(link, to, size)?;
    write_staged(link, order, to, from as *const u8, size)
}

/// Copies in stream order.
fn in_order(link: &Link, order: Order, work: impl FnOnce() + Send + 'static) -> Outcome {
    copy_in(link, (order.context, order.stream), move |status| {
        if status == 0 {
            work();
        }
    })
}

fn to_device(order: Order, to: u64, from: *const c_void, size: usize) -> Outcome {
    let link = connected()?;
    if size == 0 {
        return Ok(());
    }
    checked(link, to, size)?;
    if !is_device(link, to) || is_device(link, from as u64) {
        return any(order, to, from as u64, size);
    }
    write(link, order, to, from.cast(), size)
}

fn to_host(order: Order, to: *mut c_void, from: u64, size: usize) -> Outcome {
    let link = connected()?;
    if size == 0 {
        return Ok(());
    }
    checked(link, from, size)?;
    if !is_device(link, from) || is_device(link, to as u64) {
        return any(order, to as u64, from, size);
    }
    read(link, order, to.cast(), from, size)
}

/// A side of a rectangular copy.
#[derive(Clone, Copy)]
struct Side {
    at: u64,
    pitch: usize,
    is_device: bool,
}

fn side(
    link: &Link,
    kind: CUmemorytype,
    host: u64,
    device: u64,
    (x, y, pitch): (usize, usize, usize),
    width: usize,
) -> Outcome<Side> {
    use CUmemorytype as T;
    let pitch = if pitch == 0 { width } else { pitch };
    let inside = y.checked_mul(pitch).and_then(|rows| rows.checked_add(x));
    let inside = inside.ok_or(codes::INVALID_VALUE)? as u64;
    let (start, is_device) = match kind {
        T::CU_MEMORYTYPE_HOST => (host, false),
        T::CU_MEMORYTYPE_DEVICE => (device, true),
        T::CU_MEMORYTYPE_UNIFIED => (device, self::is_device(link, device)),
        // Copies with arrays take a different path.
        _ => return Err(codes::NOT_SUPPORTED),
    };
    Ok(Side {
        at: start.wrapping_add(inside),
        pitch,
        is_device,
    })
}

/// Converts a rectangle to a volume of one plane.
fn in_space(copy: &CUDA_MEMCPY2D) -> CUDA_MEMCPY3D {
    CUDA_MEMCPY3D {
        srcXInBytes: copy.srcXInBytes,
        srcY: copy.srcY,
        srcZ: 0,
        srcLOD: 0,
        srcMemoryType: copy.srcMemoryType,
        srcHost: copy.srcHost,
        srcDevice: copy.srcDevice,
        srcArray: copy.srcArray,
        reserved0: std::ptr::null_mut(),
        srcPitch: copy.srcPitch,
        srcHeight: 0,
        dstXInBytes: copy.dstXInBytes,
        dstY: copy.dstY,
        dstZ: 0,
        dstLOD: 0,
        dstMemoryType: copy.dstMemoryType,
        dstHost: copy.dstHost,
        dstDevice: copy.dstDevice,
        dstArray: copy.dstArray,
        reserved1: std::ptr::null_mut(),
        dstPitch: copy.dstPitch,
        dstHeight: 0,
        WidthInBytes: copy.WidthInBytes,
        Height: copy.Height,
        Depth: 1,
    }
}

unsafe fn rectangle(copy: *const CUDA_MEMCPY2D, stream: CUstream, wait: bool) -> Outcome {
    let link = connected()?;
    let order = Order::new(stream, wait)?;
    // SAFETY: the caller's promise.
    let copy = unsafe { copy.as_ref() }.ok_or(codes::INVALID_VALUE)?;
    let array = CUmemorytype::CU_MEMORYTYPE_ARRAY;
    if copy.srcMemoryType == array || copy.dstMemoryType == array {
        return Volume::new(link, &in_space(copy))?.copy(order);
    }
    let (width, rows) = (copy.WidthInBytes, copy.Height);
    let from = (copy.srcXInBytes, copy.srcY, copy.srcPitch);
    let to = (copy.dstXInBytes, copy.dstY, copy.dstPitch);
    let (kind, host) = (copy.srcMemoryType, copy.srcHost as u64);
    let from = side(link, kind, host, copy.srcDevice, from, width)?;
    let (kind, host) = (copy.dstMemoryType, copy.dstHost as u64);
    let to = side(link, kind, host, copy.dstDevice, to, width)?;
    rows_between(order, to, from, width, rows)
}

fn rows_between(order: Order, to: Side, from: Side, width: usize, rows: usize) -> Outcome {
    let link = connected()?;
    if width == 0 || rows == 0 {
        return Ok(());
    }
    let is_beyond = |side: &Side| {
        let before = (rows - 1).checked_mul(side.pitch);
        let length = before.and_then(|before| before.checked_add(width));
        length.is_none_or(|length| side.at.checked_add(length as u64).is_none())
    };
    if to.pitch < width || from.pitch < width || [&to, &from].into_iter().any(is_beyond) {
        return Err(codes::INVALID_VALUE);
    }
    let (context, stream) = (order.context, order.stream);
    if to.is_device && from.is_device {
        let call = CopyRows {
            context,
            stream,
            to: (to.at, to.pitch as u64),
            from: (from.at, from.pitch as u64),
            width: width as u64,
            rows: rows as u64,
        };
        return submit(link, context, stream, &call);
    }
    if to.pitch == width && from.pitch == width {
        return any(order, to.at, from.at, width * rows);
    }
    // One stage and one function for all rows.
    if let Some(volume) = registered_rows(link, to, from, width, rows)
        && !capturing(link, context, stream)
    {
        return volume.copy(order);
    }
    for row in 0..rows {
        let last = row + 1 == rows;
        let (to, from) = (
            to.at + (row * to.pitch) as u64,
            from.at + (row * from.pitch) as u64,
        );
        let order = Order {
            wait: order.wait && last,
            ..order
        };
        any(order, to, from, width)?;
    }
    Ok(())
}

/// The copy of rows between the device and registered memory, as one.
fn registered_rows(link: &Link, to: Side, from: Side, width: usize, rows: usize) -> Option<Volume> {
    let host = if to.is_device { from } else { to };
    let size = (rows - 1).checked_mul(host.pitch)?.checked_add(width)?;
    if to.is_device == from.is_device || !registered::holds(link, host.at, size as u64) {
        return None;
    }
    let end = |side: Side| match side.is_device {
        true => End::Device(side.at, side.pitch as u64, rows as u64),
        false => End::Host(side.at, side.pitch as u64, rows as u64),
    };
    Some(Volume {
        to: end(to),
        from: end(from),
        width: width as u64,
        rows: rows as u64,
        planes: 1,
    })
}

unsafe fn cuboid(copy: *const CUDA_MEMCPY3D, stream: CUstream, wait: bool) -> Outcome {
    let link = connected()?;
    let order = Order::new(stream, wait)?;
    // SAFETY: the caller's promise.
    let c = unsafe { copy.as_ref() }.ok_or(codes::INVALID_VALUE)?;
    let volume = Volume::new(link, c)?;
    if volume.has_array() {
        return volume.copy(order);
    }
    let (width, rows) = (c.WidthInBytes, c.Height);
    let row = |z: usize, height: usize, y: usize| {
        let height = if height == 0 {
            y.checked_add(rows)?
        } else {
            height
        };
        z.checked_mul(height)?.checked_add(y)
    };
    for slice in 0..c.Depth {
        let z = |z: usize| z.checked_add(slice).ok_or(codes::INVALID_VALUE);
        let y = row(z(c.srcZ)?, c.srcHeight, c.srcY).ok_or(codes::INVALID_VALUE)?;
        let from = (c.srcXInBytes, y, c.srcPitch);
        let (kind, host) = (c.srcMemoryType, c.srcHost as u64);
        let from = side(link, kind, host, c.srcDevice, from, width)?;
        let y = row(z(c.dstZ)?, c.dstHeight, c.dstY).ok_or(codes::INVALID_VALUE)?;
        let to = (c.dstXInBytes, y, c.dstPitch);
        let (kind, host) = (c.dstMemoryType, c.dstHost as u64);
        let to = side(link, kind, host, c.dstDevice, to, width)?;
        rows_between(order, to, from, width, rows)?;
    }
    Ok(())
}

entry_points! {
    fn cuMemcpy(dst: CUdeviceptr, src: CUdeviceptr, ByteCount: usize) {
        any(Order::new(std::ptr::null_mut(), true)?, dst, src, ByteCount)
    }

    fn cuMemcpyAsync(dst: CUdeviceptr, src: CUdeviceptr, ByteCount: usize, hStream: CUstream) {
        any(Order::new(hStream, false)?, dst, src, ByteCount)
    }

    fn cuMemcpyHtoD_v2(dstDevice: CUdeviceptr, srcHost: *const c_void, ByteCount: usize) {
        to_device(Order::new(std::ptr::null_mut(), true)?, dstDevice, srcHost, ByteCount)
    }

    fn cuMemcpyHtoDAsync_v2(dstDevice: CUdeviceptr, srcHost: *const c_void, ByteCount: usize, hStream: CUstream) {
        to_device(Order::new(hStream, false)?, dstDevice, srcHost, ByteCount)
    }

    fn cuMemcpyDtoH_v2(dstHost: *mut c_void, srcDevice: CUdeviceptr, ByteCount: usize) {
        to_host(Order::new(std::ptr::null_mut(), true)?, dstHost, srcDevice, ByteCount)
    }

    fn cuMemcpyDtoHAsync_v2(dstHost: *mut c_void, srcDevice: CUdeviceptr, ByteCount: usize, hStream: CUstream) {
        to_host(Order::new(hStream, false)?, dstHost, srcDevice, ByteCount)
    }

    fn cuMemcpyDtoD_v2(dstDevice: CUdeviceptr, srcDevice: CUdeviceptr, ByteCount: usize) {
        any(Order::new(std::ptr::null_mut(), false)?, dstDevice, srcDevice, ByteCount)
    }

    fn cuMemcpyDtoDAsync_v2(dstDevice: CUdeviceptr, srcDevice: CUdeviceptr, ByteCount: usize, hStream: CUstream) {
        any(Order::new(hStream, false)?, dstDevice, srcDevice, ByteCount)
    }

    // One worker serves all devices, so addresses mean the same in all contexts.
    fn cuMemcpyPeerAsync(
        dstDevice: CUdeviceptr,
        _dstContext: CUcontext,
        srcDevice: CUdeviceptr,
        _srcContext: CUcontext,
        ByteCount: usize,
        hStream: CUstream,
    ) {
        any(Order::new(hStream, false)?, dstDevice, srcDevice, ByteCount)
    }

    fn cuMemcpyPeer(
        dstDevice: CUdeviceptr,
        dstContext: CUcontext,
        srcDevice: CUdeviceptr,
        srcContext: CUcontext,
        ByteCount: usize,
    ) {
        let link = connected()?;
        let order = Order::new(std::ptr::null_mut(), true)?;
        let is_between = context::wait_for_others(link, order.context, [dstContext, srcContext])?;
        any(order, dstDevice, srcDevice, ByteCount)?;
        match is_between {
            true => wait(link, (order.context, order.stream)),
            false => Ok(()),
        }
    }

    fn cuMemcpy2D_v2(pCopy: *const CUDA_MEMCPY2D) {
        rectangle(pCopy, std::ptr::null_mut(), true)
    }

    fn cuMemcpy2DUnaligned_v2(pCopy: *const CUDA_MEMCPY2D) {
        rectangle(pCopy, std::ptr::null_mut(), true)
    }

    fn cuMemcpy2DAsync_v2(pCopy: *const CUDA_MEMCPY2D, hStream: CUstream) {
        rectangle(pCopy, hStream, false)
    }

    fn cuMemcpy3D_v2(pCopy: *const CUDA_MEMCPY3D) {
        cuboid(pCopy, std::ptr::null_mut(), true)
    }

    fn cuMemcpy3DAsync_v2(pCopy: *const CUDA_MEMCPY3D, hStream: CUstream) {
        cuboid(pCopy, hStream, false)
    }

    fn cuMemcpyBatchAsync_v2(
        dsts: *mut CUdeviceptr,
        srcs: *mut CUdeviceptr,
        sizes: *mut usize,
        count: usize,
        attrs: *mut CUmemcpyAttributes,
        attrsIdxs: *mut usize,
        numAttrs: usize,
        hStream: CUstream,
    ) {
        let order = Order::new(hStream, false)?;
        if count == 0 || dsts.is_null() || srcs.is_null() || sizes.is_null() {
            return Err(codes::INVALID_VALUE);
        }
        if numAttrs > count || numAttrs > 0 && (attrs.is_null() || attrsIdxs.is_null()) {
            return Err(codes::INVALID_VALUE);
        }
        let mut next = 0;
        let mut is_read_now = false;
        for one in 0..count {
            // Each counts from the copy of its index on.
            while next < numAttrs && attrsIdxs.add(next).read() <= one {
                let access = (*attrs.add(next)).srcAccessOrder;
                is_read_now = access == CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL;
                next += 1;
            }
            let (to, from, size) = (dsts.add(one).read(), srcs.add(one).read(), sizes.add(one).read());
            match is_read_now {
                true => at_once(order, to, from, size)?,
                false => any(order, to, from, size)?,
            }
        }
        Ok(())
    }
}
