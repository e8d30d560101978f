//! Mapping objects into the application's memory, and unmapping them.

use std::{ffi::c_void, ptr::null_mut, sync::atomic::Ordering};

use base::Unpoisoned;
use gantry_client::stage::HostRegion;
use remoting_proto::apis::opencl::{
    calls::{
        Call, ImageRect, Map, Marker, Order, ReadBuffer, StageId, Unmap, Unstage, WindowRange,
        WriteBuffer,
    },
    codes,
};

use crate::{
    abi::{Outcome, entry_points, handle, set, sizes},
    event::{Around, submit},
    link::{self, Link},
    object::{Event, Handle, Mapped, Mapping, Mem, Object, Queue, get},
    transfer::{allowed, image_memory, inside, landed, same_context},
};

/// Checks that an object can be mapped with these flags.
fn check_map(mem: &Object<Mem>, flags: u64) -> Outcome {
    let known = codes::MAP_READ | codes::MAP_WRITE | codes::MAP_WRITE_INVALIDATE_REGION;
    let invalidate = flags & codes::MAP_WRITE_INVALIDATE_REGION != 0;
    if flags & !known != 0 || invalidate && flags & (codes::MAP_READ | codes::MAP_WRITE) != 0 {
        return Err(codes::INVALID_VALUE);
    }
    if flags & codes::MAP_READ != 0 {
        allowed(mem, false)?;
    }
    if flags & (codes::MAP_WRITE | codes::MAP_WRITE_INVALIDATE_REGION) != 0 {
        allowed(mem, true)?;
    }
    Ok(())
}

/// Whether unmapping has to write back.
fn writes(flags: u64) -> bool {
    flags & (codes::MAP_WRITE | codes::MAP_WRITE_INVALIDATE_REGION) != 0
}

/// A mapping in progress. From before its command is sent, the window's memory must not be
/// replaced.
struct Exposed<'a>(&'a Link);

impl<'a> Exposed<'a> {
    fn new(link: &'a Link) -> Self {
        link.state.mapped.fetch_add(1, Ordering::SeqCst);
        Self(link)
    }

    /// Completes the mapping.
    fn remember(self, mem: &Object<Mem>, pointer: *mut u8, kind: Mapped, stage: Option<StageId>) {
        std::mem::forget(self);
        let mut maps = mem.it.maps.lock_unpoisoned();
        maps.push(Mapping {
            pointer: pointer as usize,
            stage,
            kind,
        });
    }

    /// Records that this many mappings have ended.
    fn end(link: &Link, count: usize) {
        link.state.mapped.fetch_sub(count, Ordering::SeqCst);
    }
}

impl Drop for Exposed<'_> {
    fn drop(&mut self) {
        Self::end(self.0, 1);
    }
}

pub extern "C" fn clEnqueueMapBuffer(
    queue: Handle<Queue>,
    mem: Handle<Mem>,
    blocking: u32,
    flags: u64,
    offset: usize,
    size: usize,
    count: u32,
    wait: *const Handle<Event>,
    event: *mut Handle<Event>,
    errcode_ret: *mut i32,
) -> *mut c_void {
    let call = || {
        let (queue, mem) = (get(queue)?, get(mem)?);
        same_context(queue, mem)?;
        let (offset, size) = (offset as u64, size as u64);
        let end = offset.checked_add(size).ok_or(codes::INVALID_VALUE)?;
        if size == 0 || end > mem.it.size || mem.it.image.is_some() {
            return Err(codes::INVALID_VALUE);
        }
        check_map(mem, flags)?;
        let link = link::connected()?;
        let around = Around { count, wait, event };
        let blocking = blocking != 0;
        let command = codes::COMMAND_MAP_BUFFER;
        if let Some((start, _)) = mem.it.lives {
            let pointer = link.pointer(start + offset, size)?;
            let exposed = Exposed::new(link);
            submit(queue, around, command, blocking, |order| {
                Ok(Map {
                    order,
                    mem: mem.it.id,
                    flags,
                    offset,
                    size,
                })
            })?;
            exposed.remember(mem, pointer, Mapped::Window(offset), None);
            return Ok(pointer.cast());
        }
        let start = link.reserve(size)?;
        link.hand_out(start, size);
        let pointer = link.pointer(start, size)?;
        let host = (!mem.it.host.is_null())
            .then(|| HostRegion::flat(mem.it.host.wrapping_add(offset as usize), size as usize));
        let exposed = Exposed::new(link);
        let stage = submit_map(
            link,
            queue,
            around,
            command,
            blocking,
            flags,
            start,
            size,
            host,
            |order, to| {
                Ok(ReadBuffer {
                    order,
                    mem: mem.it.id,
                    offset,
                    to,
                })
            },
        )?;
        let kind = Mapped::Copy {
            offset: start,
            length: size,
            host,
            origin: [offset, 0, 0],
            region: [size, 1, 1],
            write: writes(flags),
        };
        let pointer = host.map_or(pointer, |host| host.start);
        exposed.remember(mem, pointer, kind, stage);
        Ok(pointer.cast())
    };
    handle(call, errcode_ret)
}

/// Reads what is mapped into its stretch of the window and, if the object is in the application's
/// own memory, on into that. If the contents do not matter, only waits. Returns the stage through
/// which the contents arrive, if there is one.
#[allow(clippy::too_many_arguments)]
fn submit_map<C: Call<Answer = ()>>(
    link: &Link,
    queue: &Object<Queue>,
    around: Around,
    command: u32,
    blocking: bool,
    flags: u64,
    start: u64,
    size: u64,
    host: Option<HostRegion>,
    read: impl FnOnce(Order, WindowRange) -> Outcome<C>,
) -> Outcome<Option<StageId>> {
    let mut stage = None;
    let submitted = if flags & codes::MAP_WRITE_INVALIDATE_REGION != 0 {
        submit(queue, around, command, blocking, |order| {
            Ok(Marker { order })
        })
    } else {
        submit(queue, around, command, blocking, |order| {
            let to = match host {
                // Through a stage of its own, which is released when the data has landed.
                Some(landing) => {
                    let offset = link.reserve(size)?;
                    // SAFETY: the memory is the buffer's, which the application keeps until then.
                    unsafe { link.stage_into(offset, size, landing) }
                }
                None => link.mapped(start, size),
            };
            stage = to.stage;
            read(order, to)
        })
    };
    let submitted = landed(link, blocking, stage, submitted);
    submitted.inspect_err(|_| link.free(start, size))?;
    Ok(stage)
}

pub extern "C" fn clEnqueueMapImage(
    queue: Handle<Queue>,
    mem: Handle<Mem>,
    blocking: u32,
    flags: u64,
    origin: *const usize,
    region: *const usize,
    row_pitch: *mut usize,
    slice_pitch: *mut usize,
    count: u32,
    wait: *const Handle<Event>,
    event: *mut Handle<Event>,
    errcode_ret: *mut i32,
) -> *mut c_void {
    let call = || {
        let (queue, mem) = (get(queue)?, get(mem)?);
        same_context(queue, mem)?;
        let image = mem.it.image.as_ref().ok_or(codes::INVALID_MEM_OBJECT)?;
        let (Some(origin), Some(region)) = (sizes(origin), sizes(region)) else {
            return Err(codes::INVALID_VALUE);
        };
        let has_slices = matches!(
            image.kind,
            codes::MEM_OBJECT_IMAGE3D
                | codes::MEM_OBJECT_IMAGE1D_ARRAY
                | codes::MEM_OBJECT_IMAGE2D_ARRAY
        );
        if row_pitch.is_null() || has_slices && slice_pitch.is_null() {
            return Err(codes::INVALID_VALUE);
        }
        inside(image, origin, region)?;
        check_map(mem, flags)?;
        let link = link::connected()?;
        let memory = image_memory(image, region, 0, 0, null_mut())?;
        let size = memory.size() as u64;
        let start = link.reserve(size)?;
        link.hand_out(start, size);
        let pointer = link.pointer(start, size)?;
        let around = Around { count, wait, event };
        let command = codes::COMMAND_MAP_IMAGE;
        let exposed = Exposed::new(link);
        let stage = submit_map(
            link,
            queue,
            around,
            command,
            blocking != 0,
            flags,
            start,
            size,
            None,
            |order, place| {
                Ok(ImageRect {
                    order,
                    mem: mem.it.id,
                    write: false,
                    origin,
                    region,
                    place,
                })
            },
        )?;
        let kind = Mapped::Copy {
            offset: start,
            length: size,
            host: None,
            origin,
            region,
            write: writes(flags),
        };
        exposed.remember(mem, pointer, kind, stage);
        set(row_pitch, memory.row_pitch);
        set(slice_pitch, if has_slices { memory.slice_pitch } else { 0 });
        Ok(pointer.cast())
    };
    handle(call, errcode_ret)
}

entry_points! {
    fn clEnqueueUnmapMemObject(queue: Handle<Queue>, mem: Handle<Mem>, pointer: *mut c_void; around) {
        let (queue, mem) = (get(queue)?, get(mem)?);
        same_context(queue, mem)?;
        let link = link::connected()?;
        let mapping = {
            let mut maps = mem.it.maps.lock_unpoisoned();
            let index = maps.iter().position(|map| map.pointer == pointer as usize);
            maps.remove(index.ok_or(codes::INVALID_VALUE)?)
        };
        Exposed::end(link, 1);
        let command = codes::COMMAND_UNMAP_MEM_OBJECT;
        // If the contents have not arrived yet, the application cannot have changed them: what is
        // here is outdated.
        let came = mapping.stage.is_none_or(|stage| !link.is_pending(stage));
        match mapping.kind {
            Mapped::Window(offset) => submit(queue, around, command, false, |order| {
                Ok(Unmap {
                    order,
                    mem: mem.it.id,
                    offset,
                })
            }),
            Mapped::Copy {
                offset,
                length,
                write,
                ..
            } if !write || !came => {
                // Its space becomes free when everything before it is done.
                submit(queue, around, command, false, |order| {
                    Ok(Unstage {
                        order,
                        place: link.stage(offset, length),
                    })
                })
            }
            Mapped::Copy {
                offset,
                length,
                host,
                origin,
                region,
                write: _,
            } => {
                if let Some(host) = host {
                    // SAFETY: the memory is the buffer's, which the application keeps until then.
                    unsafe { link.fill(offset, &host, link.reader())? };
                }
                if mem.it.image.is_some() {
                    submit(queue, around, command, false, |order| {
                        Ok(ImageRect {
                            order,
                            mem: mem.it.id,
                            write: true,
                            origin,
                            region,
                            place: link.stage(offset, length),
                        })
                    })
                } else {
                    submit(queue, around, command, false, |order| {
                        Ok(WriteBuffer {
                            order,
                            mem: mem.it.id,
                            offset: origin[0],
                            from: link.stage(offset, length),
                        })
                    })
                }
            }
        }
    }
}
