//! Commands that move data between the application's memory and objects.
//!
//! Memory in the window is used in place. Other memory passes through stages: stretches of the
//! window that are filled before a write, and emptied after a read.

use std::{collections::VecDeque, ffi::c_void, ptr::null_mut};

use gantry_client::{
    copy_threads::{self, Reader},
    stage::HostRegion,
};
use remoting_proto::apis::opencl::{
    calls::{
        BufferRect, ImageRect, ReadBuffer, StageId, SvmRead, SvmWrite, Unstage, WindowRange,
        WriteBuffer,
    },
    codes,
};

use crate::{
    abi::{Outcome, entry_points, sizes},
    event::{Around, submit},
    link::{self, Link},
    object::{Handle, Image, Mem, Object, Queue, get},
};

/// The maximum size of a transfer of ordinary memory that is not divided. In larger ones, copying a
/// piece between memory and window overlaps with the device's work on another piece.
const UNCUT: u64 = 256 << 10;
/// The maximum size of a piece. The device reaches 90 % of its throughput with pieces of half this
/// size.
const LARGEST_PIECE: u64 = 2 << 20;
/// The maximum number of pieces of a blocking transfer in flight: their stages are reused, and stay
/// in the processor's caches.
const PIECES: usize = 6;

/// The size of a transfer's pieces. There are several, so that there is something to overlap.
fn piece_size(size: u64) -> u64 {
    (size / 4)
        .next_multiple_of(4096)
        .clamp(UNCUT, LARGEST_PIECE)
}

/// The window's side of a transfer.
fn place(link: &Link, memory: HostRegion, write: bool) -> Outcome<WindowRange> {
    let size = memory.size() as u64;
    let flat = memory.rows * memory.slices <= 1;
    if flat && let Some(offset) = link.shared(memory.start, size) {
        return Ok(WindowRange {
            offset,
            length: size,
            stage: None,
        });
    }
    if write {
        // SAFETY: the application guarantees the memory that it writes, as the API requires.
        return unsafe { link.stage_copy(&memory) };
    }
    let offset = link.reserve(size)?;
    // SAFETY: the application keeps the memory of a read until it has completed, as the API
    // requires.
    Ok(unsafe { link.stage_into(offset, size, memory) })
}

/// The outcome of a transfer's command. The application may use the memory for something else if the command was refused
/// or has been waited for.
pub fn landed(
    link: &Link,
    blocking: bool,
    stage: impl IntoIterator<Item = StageId>,
    outcome: Outcome,
) -> Outcome {
    match outcome {
        Ok(()) if !blocking => Ok(()),
        outcome => link.landed(stage, outcome),
    }
}

/// The device's side of a transfer of plain bytes.
#[derive(Clone, Copy)]
pub enum There<'a> {
    /// A buffer, from this byte on.
    Buffer(&'a Object<Mem>, u64),
    /// Shared virtual memory from this address on, by a command of this type.
    Svm(u64, u32),
    /// Not the device: memory of the application from here on, by a command of this type. The data
    /// to copy there is read when the command is enqueued.
    Host(*mut u8, u32),
}

impl There<'_> {
    /// The position this many bytes further on.
    fn after(self, bytes: u64) -> Self {
        match self {
            Self::Buffer(mem, offset) => Self::Buffer(mem, offset + bytes),
            Self::Svm(address, command) => Self::Svm(address + bytes, command),
            Self::Host(to, command) => Self::Host(to.wrapping_add(bytes as usize), command),
        }
    }
}

/// Transfers one piece, in or out.
fn piece(
    queue: &Object<Queue>,
    there: There<'_>,
    blocking: bool,
    memory: HostRegion,
    write: bool,
    around: Around,
) -> Outcome<Option<StageId>> {
    let link = link::connected()?;
    let mut stage = None;
    let mut place = || -> Outcome<WindowRange> {
        let place = place(link, memory, write)?;
        stage = place.stage;
        Ok(place)
    };
    let sent = match (there, write) {
        (There::Buffer(mem, offset), true) => {
            let command = codes::COMMAND_WRITE_BUFFER;
            submit(queue, around, command, blocking, |order| {
                Ok(WriteBuffer {
                    order,
                    mem: mem.it.id,
                    offset,
                    from: place()?,
                })
            })
        }
        (There::Buffer(mem, offset), false) => {
            let command = codes::COMMAND_READ_BUFFER;
            submit(queue, around, command, blocking, |order| {
                Ok(ReadBuffer {
                    order,
                    mem: mem.it.id,
                    offset,
                    to: place()?,
                })
            })
        }
        (There::Host(to, command), _) => {
            submit(queue, around, command, blocking, |order| {
                let size = memory.size();
                let offset = link.reserve(size as u64)?;
                let landing = HostRegion::flat(to, size);
                // SAFETY: the application guarantees both, the second one until the command has
                // completed, as the API requires.
                let place = unsafe {
                    link.fill(offset, &memory, Reader::Thread)?;
                    link.stage_into(offset, size as u64, landing)
                };
                stage = place.stage;
                Ok(Unstage { order, place })
            })
        }
        (There::Svm(address, command), true) => submit(queue, around, command, blocking, |order| {
            Ok(SvmWrite {
                order,
                address,
                from: place()?,
            })
        }),
        (There::Svm(address, command), false) => {
            submit(queue, around, command, blocking, |order| {
                Ok(SvmRead {
                    order,
                    address,
                    to: place()?,
                })
            })
        }
    };
    landed(link, blocking, stage, sent)?;
    Ok(stage)
}

/// Checks that the host may access the object in this way.
pub fn allowed(mem: &Object<Mem>, write: bool) -> Outcome {
    let only = if write {
        codes::MEM_HOST_READ_ONLY
    } else {
        codes::MEM_HOST_WRITE_ONLY
    };
    if mem.it.flags & (only | codes::MEM_HOST_NO_ACCESS) != 0 {
        return Err(codes::INVALID_OPERATION);
    }
    Ok(())
}

/// Checks that a queue and an object belong to the same context.
pub fn same_context(queue: &Object<Queue>, mem: &Object<Mem>) -> Outcome {
    if queue.it.context.it.id != mem.it.context.it.id {
        return Err(codes::INVALID_CONTEXT);
    }
    Ok(())
}

/// A transfer of plain bytes between the device and one stretch of the application's memory.
pub fn bytes_between(
    queue: &Object<Queue>,
    there: There<'_>,
    blocking: bool,
    memory: HostRegion,
    write: bool,
    around: Around,
) -> Outcome {
    bytes_by(queue, there, blocking, memory, write, around, |_| ())
}

/// The same. `staged` is called with each stage through which bytes pass.
pub fn bytes_by(
    queue: &Object<Queue>,
    there: There<'_>,
    blocking: bool,
    memory: HostRegion,
    write: bool,
    around: Around,
    mut staged: impl FnMut(StageId),
) -> Outcome {
    let link = link::connected()?;
    let size = memory.size() as u64;
    let zero_copy = !matches!(there, There::Host(..)) && link.shared(memory.start, size).is_some();
    let timed = !around.event.is_null() && queue.it.properties & codes::QUEUE_PROFILING_ENABLE != 0;
    let space = link.window.size() - link.window.data();
    if !zero_copy {
        copy_threads::prepare(size);
    }
    // One event cannot stand for several commands out of order, nor report their combined times.
    let whole = zero_copy || size <= UNCUT || size <= space / 4 && (timed || !queue.it.in_order());
    if whole || !queue.it.in_order() {
        let stage = piece(queue, there, blocking, memory, write, around)?;
        stage.into_iter().for_each(staged);
        return Ok(());
    }
    let mut under_way = VecDeque::with_capacity(PIECES);
    let mut all = || -> Outcome {
        let length = piece_size(size);
        let mut at = 0;
        while at < size {
            // Does not wait in a non-blocking call: commands may be waiting for its caller.
            if blocking
                && under_way.len() == PIECES
                && let Some(oldest) = under_way.pop_front()
            {
                link.landed([oldest], link.wait_released(oldest))?;
            }
            let length = length.min(size - at);
            let (first, last) = (at == 0, at + length == size);
            let around = Around {
                count: if first { around.count } else { 0 },
                wait: if first { around.wait } else { std::ptr::null() },
                event: if last { around.event } else { null_mut() },
            };
            let part = HostRegion::flat(memory.start.wrapping_add(at as usize), length as usize);
            let stage = piece(
                queue,
                there.after(at),
                blocking && last,
                part,
                write,
                around,
            )?;
            stage.into_iter().for_each(&mut staged);
            under_way.extend(stage);
            at += length;
        }
        Ok(())
    };
    let outcome = all();
    landed(link, blocking, under_way, outcome)
}

entry_points! {
    fn [clEnqueueReadBuffer: false, clEnqueueWriteBuffer: true] |write| (
        queue: Handle<Queue>, mem: Handle<Mem>, blocking: u32, offset: usize, size: usize,
        pointer: *mut c_void; around
    ) {
        let (queue, mem) = (get(queue)?, get(mem)?);
        same_context(queue, mem)?;
        let end = offset.checked_add(size).ok_or(codes::INVALID_VALUE)?;
        if pointer.is_null() || size == 0 || end as u64 > mem.it.size || mem.it.image.is_some() {
            return Err(codes::INVALID_VALUE);
        }
        allowed(mem, write)?;
        let memory = HostRegion::flat(pointer.cast(), size);
        let there = There::Buffer(mem, offset as u64);
        bytes_between(queue, there, blocking != 0, memory, write, around)
    }
}

/// Checks the origin, region and pitches of a rectangle in `size` bytes. Returns the resolved
/// pitches.
fn rectangle(
    origin: [u64; 3],
    region: [u64; 3],
    row_pitch: usize,
    slice_pitch: usize,
    size: Option<u64>,
) -> Outcome<[u64; 2]> {
    let (row_pitch, slice_pitch) = (row_pitch as u64, slice_pitch as u64);
    let row = if row_pitch == 0 { region[0] } else { row_pitch };
    let tight = region[1].checked_mul(row).ok_or(codes::INVALID_VALUE)?;
    let slice = if slice_pitch == 0 { tight } else { slice_pitch };
    if region.contains(&0) || row < region[0] || slice < tight || row == 0 || slice % row != 0 {
        return Err(codes::INVALID_VALUE);
    }
    let last = |axis: usize, pitch: u64| {
        origin[axis]
            .checked_add(region[axis] - 1)
            .and_then(|index| index.checked_mul(pitch))
    };
    let end = last(2, slice)
        .zip(last(1, row))
        .and_then(|(a, b)| a.checked_add(b))
        .zip(origin[0].checked_add(region[0]))
        .and_then(|(a, b)| a.checked_add(b))
        .ok_or(codes::INVALID_VALUE)?;
    if size.is_some_and(|size| end > size) {
        return Err(codes::INVALID_VALUE);
    }
    Ok([row, slice])
}

entry_points! {
    fn [clEnqueueReadBufferRect: false, clEnqueueWriteBufferRect: true] |write| (
        queue: Handle<Queue>, mem: Handle<Mem>, blocking: u32, buffer_origin: *const usize,
        host_origin: *const usize, region: *const usize, buffer_row_pitch: usize, buffer_slice_pitch: usize,
        host_row_pitch: usize, host_slice_pitch: usize, pointer: *mut c_void; around
    ) {
        let (queue, mem) = (get(queue)?, get(mem)?);
        same_context(queue, mem)?;
        let [there, here] = [buffer_origin, host_origin].map(sizes);
        let (Some(there), Some(here), Some(region)) = (there, here, sizes(region)) else {
            return Err(codes::INVALID_VALUE);
        };
        if pointer.is_null() || mem.it.image.is_some() {
            return Err(codes::INVALID_VALUE);
        }
        allowed(mem, write)?;
        let size = Some(mem.it.size);
        let pitches = rectangle(there, region, buffer_row_pitch, buffer_slice_pitch, size)?;
        let [row_pitch, slice_pitch] = rectangle(here, region, host_row_pitch, host_slice_pitch, None)?;
        let start = here[2] * slice_pitch + here[1] * row_pitch + here[0];
        let memory = HostRegion {
            start: pointer.cast::<u8>().wrapping_add(start as usize),
            row: region[0] as usize,
            rows: region[1] as usize,
            slices: region[2] as usize,
            row_pitch: row_pitch as usize,
            slice_pitch: slice_pitch as usize,
        };
        let link = link::connected()?;
        let command = if write {
            codes::COMMAND_WRITE_BUFFER_RECT
        } else {
            codes::COMMAND_READ_BUFFER_RECT
        };
        let mut stage = None;
        let sent = submit(queue, around, command, blocking != 0, |order| {
            let place = place(link, memory, write)?;
            stage = place.stage;
            Ok(BufferRect {
                order,
                mem: mem.it.id,
                write,
                origin: there,
                region,
                pitches,
                place,
            })
        });
        landed(link, blocking != 0, stage, sent)
    }
}

/// Checks that a region is inside an image.
pub fn inside(image: &Image, origin: [u64; 3], region: [u64; 3]) -> Outcome {
    let mut extent = image.extent.map(|extent| extent.max(1));
    match image.kind {
        codes::MEM_OBJECT_IMAGE1D_ARRAY => extent[1] = image.layers,
        codes::MEM_OBJECT_IMAGE2D_ARRAY => extent[2] = image.layers,
        _ => {}
    }
    let fits = (0..3).all(|axis| {
        region[axis] > 0
            && origin[axis]
                .checked_add(region[axis])
                .is_some_and(|end| end <= extent[axis])
    });
    if fits {
        Ok(())
    } else {
        Err(codes::INVALID_VALUE)
    }
}

/// The application's side of an image transfer.
pub fn image_memory(
    image: &Image,
    region: [u64; 3],
    row_pitch: usize,
    slice_pitch: usize,
    pointer: *mut c_void,
) -> Outcome<HostRegion> {
    let row = (region[0] * image.pixel) as usize;
    let row_pitch = if row_pitch == 0 { row } else { row_pitch };
    // The layers of a 1D image array are a slice pitch apart.
    let (rows, slices) = if image.kind == codes::MEM_OBJECT_IMAGE1D_ARRAY {
        (1, region[1] as usize)
    } else {
        (region[1] as usize, region[2] as usize)
    };
    let tight = row_pitch * rows;
    let slice_pitch = if slice_pitch == 0 { tight } else { slice_pitch };
    if row_pitch < row || slice_pitch < tight {
        return Err(codes::INVALID_VALUE);
    }
    Ok(HostRegion {
        start: pointer.cast(),
        row,
        rows,
        slices,
        row_pitch,
        slice_pitch,
    })
}

entry_points! {
    fn [clEnqueueReadImage: false, clEnqueueWriteImage: true] |write| (
        queue: Handle<Queue>, mem: Handle<Mem>, blocking: u32, origin: *const usize, region: *const usize,
        row_pitch: usize, slice_pitch: usize, pointer: *mut c_void; around
    ) {
        let (queue, mem) = (get(queue)?, get(mem)?);
        same_context(queue, mem)?;
        let image = mem.it.image.as_ref().ok_or(codes::INVALID_MEM_OBJECT)?;
        let (Some(origin), Some(region)) = (sizes(origin), sizes(region)) else {
            return Err(codes::INVALID_VALUE);
        };
        if pointer.is_null() {
            return Err(codes::INVALID_VALUE);
        }
        inside(image, origin, region)?;
        allowed(mem, write)?;
        let memory = image_memory(image, region, row_pitch, slice_pitch, pointer)?;
        let link = link::connected()?;
        let command = if write {
            codes::COMMAND_WRITE_IMAGE
        } else {
            codes::COMMAND_READ_IMAGE
        };
        let mut stage = None;
        let sent = submit(queue, around, command, blocking != 0, |order| {
            let place = place(link, memory, write)?;
            stage = place.stage;
            Ok(ImageRect {
                order,
                mem: mem.it.id,
                write,
                origin,
                region,
                place,
            })
        });
        landed(link, blocking != 0, stage, sent)
    }
}
