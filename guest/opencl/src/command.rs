//! Commands that only involve the device.

use std::ffi::c_void;

use remoting_proto::{
    apis::opencl::{
        calls::{
            Barrier, CopyBuffer, CopyBufferRect, CopyBufferToImage, CopyImage, CopyImageToBuffer,
            FillBuffer, FillImage, Grid, Marker, Migrate, NdRange,
        },
        codes,
    },
    wire::Blob,
};

use crate::{
    abi::{Outcome, array, entry_points, list, sizes},
    event::submit,
    object::{Event, Handle, Kernel, Mem, Queue, get},
    platform::limit,
    transfer::same_context,
};

fn need(from: *const usize) -> Outcome<[u64; 3]> {
    sizes(from).ok_or(codes::INVALID_VALUE)
}

/// The work-items that a caller requests.
fn grid(
    dimensions: u32,
    offset: *const usize,
    global: *const usize,
    local: *const usize,
) -> Outcome<Grid> {
    const NO_SIZE: i32 = codes::INVALID_GLOBAL_WORK_SIZE;
    Ok(match dimensions {
        1 => Grid::Line(sizes(global).ok_or(NO_SIZE)?, sizes(local), sizes(offset)),
        2 => Grid::Plane(sizes(global).ok_or(NO_SIZE)?, sizes(local), sizes(offset)),
        3 => Grid::Space(sizes(global).ok_or(NO_SIZE)?, sizes(local), sizes(offset)),
        _ => return Err(codes::INVALID_WORK_DIMENSION),
    })
}

entry_points! {
    fn clEnqueueNDRangeKernel(
        queue: Handle<Queue>, kernel: Handle<Kernel>, dimensions: u32, offset: *const usize,
        global: *const usize, local: *const usize; around
    ) {
        let (queue, kernel) = (get(queue)?, get(kernel)?);
        if queue.it.context.it.id != kernel.it.program.it.context.it.id {
            return Err(codes::INVALID_CONTEXT);
        }
        let grid = grid(dimensions, offset, global, local)?;
        if !kernel.it.is_ready() {
            return Err(codes::INVALID_KERNEL_ARGS);
        }
        if let (_, Some(local), _) = grid.sizes() {
            let device = &queue.it.device;
            let largest = match device.it.largest_group.get() {
                Some(largest) => *largest,
                None => {
                    let largest = limit(device, codes::DEVICE_MAX_WORK_GROUP_SIZE)?;
                    *device.it.largest_group.get_or_init(|| largest)
                }
            };
            let items = local.iter().try_fold(1u64, |a, b| a.checked_mul(*b));
            if items.is_none_or(|items| items == 0 || items > largest) {
                return Err(codes::INVALID_WORK_GROUP_SIZE);
            }
        }
        submit(queue, around, codes::COMMAND_NDRANGE_KERNEL, false, |order| {
            Ok(NdRange {
                order,
                kernel: kernel.it.id,
                grid,
            })
        })
    }

    fn clEnqueueTask(queue: Handle<Queue>, kernel: Handle<Kernel>; around) {
        let (queue, kernel) = (get(queue)?, get(kernel)?);
        if !kernel.it.is_ready() {
            return Err(codes::INVALID_KERNEL_ARGS);
        }
        submit(queue, around, codes::COMMAND_TASK, false, |order| {
            Ok(NdRange {
                order,
                kernel: kernel.it.id,
                grid: Grid::Line([1], Some([1]), None),
            })
        })
    }

    fn clEnqueueCopyBuffer(
        queue: Handle<Queue>, from: Handle<Mem>, to: Handle<Mem>, from_offset: usize, to_offset: usize,
        size: usize; around
    ) {
        let (queue, from, to) = (get(queue)?, get(from)?, get(to)?);
        same_context(queue, from)?;
        same_context(queue, to)?;
        let (a, b, size) = (from_offset as u64, to_offset as u64, size as u64);
        let fits = |at: u64, whole: u64| at.checked_add(size).is_some_and(|end| end <= whole);
        if size == 0 || !fits(a, from.it.size) || !fits(b, to.it.size) {
            return Err(codes::INVALID_VALUE);
        }
        if from.it.id == to.it.id && a < b + size && b < a + size {
            return Err(codes::MEM_COPY_OVERLAP);
        }
        submit(queue, around, codes::COMMAND_COPY_BUFFER, false, |order| {
            Ok(CopyBuffer {
                order,
                from: from.it.id,
                to: to.it.id,
                offsets: [a, b],
                size,
            })
        })
    }

    fn clEnqueueCopyBufferRect(
        queue: Handle<Queue>, from: Handle<Mem>, to: Handle<Mem>, from_origin: *const usize,
        to_origin: *const usize, region: *const usize, from_row_pitch: usize, from_slice_pitch: usize,
        to_row_pitch: usize, to_slice_pitch: usize; around
    ) {
        let (queue, from, to) = (get(queue)?, get(from)?, get(to)?);
        same_context(queue, from)?;
        same_context(queue, to)?;
        let origins = [need(from_origin)?, need(to_origin)?];
        let region = need(region)?;
        submit(queue, around, codes::COMMAND_COPY_BUFFER_RECT, false, |order| {
            Ok(CopyBufferRect {
                order,
                from: from.it.id,
                to: to.it.id,
                origins,
                region,
                pitches: [
                    [from_row_pitch as u64, from_slice_pitch as u64],
                    [to_row_pitch as u64, to_slice_pitch as u64],
                ],
            })
        })
    }

    fn clEnqueueCopyImage(
        queue: Handle<Queue>, from: Handle<Mem>, to: Handle<Mem>, from_origin: *const usize,
        to_origin: *const usize, region: *const usize; around
    ) {
        let (queue, from, to) = (get(queue)?, get(from)?, get(to)?);
        same_context(queue, from)?;
        same_context(queue, to)?;
        let origins = [need(from_origin)?, need(to_origin)?];
        let region = need(region)?;
        submit(queue, around, codes::COMMAND_COPY_IMAGE, false, |order| {
            Ok(CopyImage {
                order,
                from: from.it.id,
                to: to.it.id,
                origins,
                region,
            })
        })
    }

    fn clEnqueueCopyImageToBuffer(
        queue: Handle<Queue>, image: Handle<Mem>, buffer: Handle<Mem>, origin: *const usize,
        region: *const usize, offset: usize; around
    ) {
        let (queue, image, buffer) = (get(queue)?, get(image)?, get(buffer)?);
        same_context(queue, image)?;
        same_context(queue, buffer)?;
        let (origin, region) = (need(origin)?, need(region)?);
        submit(queue, around, codes::COMMAND_COPY_IMAGE_TO_BUFFER, false, |order| {
            Ok(CopyImageToBuffer {
                order,
                image: image.it.id,
                buffer: buffer.it.id,
                origin,
                region,
                offset: offset as u64,
            })
        })
    }

    fn clEnqueueCopyBufferToImage(
        queue: Handle<Queue>, buffer: Handle<Mem>, image: Handle<Mem>, offset: usize, origin: *const usize,
        region: *const usize; around
    ) {
        let (queue, image, buffer) = (get(queue)?, get(image)?, get(buffer)?);
        same_context(queue, image)?;
        same_context(queue, buffer)?;
        let (origin, region) = (need(origin)?, need(region)?);
        submit(queue, around, codes::COMMAND_COPY_BUFFER_TO_IMAGE, false, |order| {
            Ok(CopyBufferToImage {
                order,
                buffer: buffer.it.id,
                image: image.it.id,
                offset: offset as u64,
                origin,
                region,
            })
        })
    }

    fn clEnqueueFillBuffer(
        queue: Handle<Queue>, mem: Handle<Mem>, pattern: *const c_void, pattern_size: usize, offset: usize,
        size: usize; around
    ) {
        let (queue, mem) = (get(queue)?, get(mem)?);
        same_context(queue, mem)?;
        let end = offset.checked_add(size).ok_or(codes::INVALID_VALUE)?;
        if pattern.is_null()
            || !pattern_size.is_power_of_two()
            || pattern_size > 128
            || !offset.is_multiple_of(pattern_size)
            || !size.is_multiple_of(pattern_size)
            || end as u64 > mem.it.size
        {
            return Err(codes::INVALID_VALUE);
        }
        submit(queue, around, codes::COMMAND_FILL_BUFFER, false, |order| {
            Ok(FillBuffer {
                order,
                mem: mem.it.id,
                pattern: Blob(array(pattern.cast(), pattern_size)),
                offset: offset as u64,
                size: size as u64,
            })
        })
    }

    fn clEnqueueFillImage(
        queue: Handle<Queue>, mem: Handle<Mem>, colour: *const c_void, origin: *const usize,
        region: *const usize; around
    ) {
        let (queue, mem) = (get(queue)?, get(mem)?);
        same_context(queue, mem)?;
        let image = mem.it.image.as_ref().ok_or(codes::INVALID_MEM_OBJECT)?;
        let (origin, region) = (need(origin)?, need(region)?);
        crate::transfer::inside(image, origin, region)?;
        let colour: [u32; 4] = array(colour.cast(), 4)
            .try_into()
            .map_err(|_| codes::INVALID_VALUE)?;
        submit(queue, around, codes::COMMAND_FILL_IMAGE, false, |order| {
            Ok(FillImage {
                order,
                mem: mem.it.id,
                colour,
                origin,
                region,
            })
        })
    }

    fn clEnqueueMigrateMemObjects(
        queue: Handle<Queue>, mem_count: u32, mems: *const Handle<Mem>, flags: u64; around
    ) {
        let queue = get(queue)?;
        let known = codes::MIGRATE_MEM_OBJECT_HOST | codes::MIGRATE_MEM_OBJECT_CONTENT_UNDEFINED;
        let handles = list(mems, mem_count, codes::INVALID_VALUE)?;
        if handles.is_empty() || flags & !known != 0 {
            return Err(codes::INVALID_VALUE);
        }
        let mems = handles
            .into_iter()
            .map(|mem| {
                let mem = get(mem)?;
                same_context(queue, mem)?;
                Ok(mem.it.id)
            })
            .collect::<Outcome<_>>()?;
        submit(queue, around, codes::COMMAND_MIGRATE_MEM_OBJECTS, false, |order| Ok(Migrate { order, mems, flags }))
    }

    fn clEnqueueMarkerWithWaitList(queue: Handle<Queue>; around) {
        submit(get(queue)?, around, codes::COMMAND_MARKER, false, |order| Ok(Marker { order }))
    }

    fn clEnqueueBarrierWithWaitList(queue: Handle<Queue>; around) {
        submit(get(queue)?, around, codes::COMMAND_BARRIER, false, |order| Ok(Barrier { order }))
    }
}

pub extern "C" fn clEnqueueMarker(queue: Handle<Queue>, event: *mut Handle<Event>) -> i32 {
    if event.is_null() {
        return codes::INVALID_VALUE;
    }
    clEnqueueMarkerWithWaitList(queue, 0, std::ptr::null(), event)
}

pub extern "C" fn clEnqueueBarrier(queue: Handle<Queue>) -> i32 {
    clEnqueueBarrierWithWaitList(queue, 0, std::ptr::null(), std::ptr::null_mut())
}

pub extern "C" fn clEnqueueWaitForEvents(
    queue: Handle<Queue>,
    count: u32,
    events: *const Handle<Event>,
) -> i32 {
    if count == 0 || events.is_null() {
        return codes::INVALID_VALUE;
    }
    clEnqueueBarrierWithWaitList(queue, count, events, std::ptr::null_mut())
}
