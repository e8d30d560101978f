//! Commands that move data between the window and objects.

use std::ptr::{null, null_mut};

use remoting_proto::{
    apis::opencl::{
        calls::{self, MemId, Order, WindowRange},
        codes, image,
    },
    wire::Header,
};
use remoting_transport::endpoint::Gone;

use super::{
    Server,
    commands::{Slot, Way, sizes},
    driver::{api::Handle, cl, enqueue},
};

/// The device side of a transfer of plain bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum There {
    /// A buffer, from this byte offset on.
    Buffer(MemId, u64),
    /// Shared virtual memory, from this address on.
    Svm(u64),
}

/// The device side as passed to the driver.
#[derive(Clone, Copy, Debug)]
enum Raw {
    Buffer(Handle, u64),
    Svm(*mut u8),
}

impl Server {
    fn raw(&self, there: &There, order: &Order, length: u64) -> Result<Raw, i32> {
        Ok(match *there {
            There::Buffer(mem, offset) => Raw::Buffer(self.backend.mems.get(mem.0)?.raw, offset),
            There::Svm(address) => {
                let context = self.svm_of(order)?.raw;
                let pointer = self.backend.svm.at(context, address, length);
                Raw::Svm(pointer.ok_or(codes::INVALID_VALUE)?)
            }
        })
    }

    /// Locates a range of the window, and registers it with the driver of the command's queue.
    fn near(
        &mut self,
        order: &Order,
        place: &WindowRange,
        needed: Option<u64>,
    ) -> Result<*mut u8, i32> {
        let pointer = self.place(place, needed)?;
        let home = self.backend.queues.get(order.queue.0)?.home;
        self.reach(home, place.offset, place.length);
        Ok(pointer)
    }

    /// Whether a command may be split in several: whether one event can stand for all of them.
    fn may_cut(&self, order: &Order) -> bool {
        self.backend
            .queues
            .get(order.queue.0)
            .is_ok_and(|queue| queue.in_order() && (order.event.is_none() || !queue.profiles()))
    }

    /// Transfers plain bytes between the device and a range of the window, split where the cover
    /// requires it.
    pub(crate) fn transfer(
        &mut self,
        header: Header,
        order: &Order,
        there: &There,
        place: &WindowRange,
        write: bool,
    ) -> Result<(), Gone> {
        let stays = self.may_stay(header);
        let way = if stays { Way::Done } else { Way::Answered };
        self.enqueue_as(way, header, order, place.stage, |server, api, slot| {
            let pointer = server.near(order, place, Some(place.length))?;
            let raw = server.raw(there, order, place.length)?;
            // The end of an in-order queue is the end of its last command. NVIDIA's driver
            // (580.159, H200) waits 0.3 to 0.7 us less for it than in a blocking command. Only a
            // blocking command reports that events in its wait list have failed.
            let in_order = server.backend.queues.get(order.queue.0)?.in_order();
            let finishes = stays && slot.count == 0 && in_order;
            let blocks = stays && !finishes;
            let finish = |code| match code {
                0 if finishes => {
                    slot.accepted.set(true);
                    cl!(api, clFinish(slot.queue))
                }
                code => code,
            };
            let enqueue = |slot: &Slot<'_>, done: u64, length: u64, wait: bool| {
                let (wait, length) = (u32::from(wait), length as usize);
                let here = pointer.wrapping_add(done as usize);
                let Slot {
                    queue,
                    count,
                    wait: events,
                    event,
                    ..
                } = *slot;
                match raw {
                    Raw::Buffer(mem, offset) => {
                        let there = offset.wrapping_add(done) as usize;
                        if write {
                            let here = here.cast_const().cast();
                            cl!(
                                api,
                                clEnqueueWriteBuffer(
                                    queue, mem, wait, there, length, here, count, events, event
                                )
                            )
                        } else {
                            let here = here.cast();
                            cl!(
                                api,
                                clEnqueueReadBuffer(
                                    queue, mem, wait, there, length, here, count, events, event
                                )
                            )
                        }
                    }
                    Raw::Svm(start) => {
                        let there = start.wrapping_add(done as usize);
                        let (to, from) = if write { (there, here) } else { (here, there) };
                        let (to, from) = (to.cast(), from.cast_const().cast());
                        cl!(
                            api,
                            clEnqueueSVMMemcpy(queue, wait, to, from, length, count, events, event)
                        )
                    }
                }
            };
            if !server.may_cut(order) {
                return Ok(finish(enqueue(slot, 0, place.length, blocks)));
            }
            let platform = server.backend.queues.get(order.queue.0)?.home.platform;
            let parts =
                server
                    .backend
                    .cover
                    .parts(&server.window, platform, place.offset, place.length);
            for (at, length) in parts {
                let done = at - place.offset;
                let (first, last) = (done == 0, done + length == place.length);
                let slot = Slot {
                    queue: slot.queue,
                    count: if first { slot.count } else { 0 },
                    wait: if first { slot.wait } else { null() },
                    event: if last { slot.event } else { null_mut() },
                    accepted: slot.accepted,
                };
                let code = enqueue(&slot, done, length, blocks && last);
                if code != 0 {
                    return Ok(code);
                }
                slot.accepted.set(true);
            }
            Ok(finish(0))
        })
    }

    pub(crate) fn buffer_rect(
        &mut self,
        header: Header,
        c: &calls::BufferRect,
    ) -> Result<(), Gone> {
        self.enqueue(header, &c.order, c.place.stage, |server, api, slot| {
            let mem = server.backend.mems.get(c.mem.0)?.raw;
            let [width, height, depth] = c.region;
            let needed = width
                .checked_mul(height)
                .and_then(|area| area.checked_mul(depth));
            let place = server.near(&c.order, &c.place, needed)?;
            let (origin, region) = (sizes(c.origin), sizes(c.region));
            let here = [0usize; 3];
            Ok(if c.write {
                enqueue!(
                    api,
                    slot,
                    clEnqueueWriteBufferRect(
                        mem,
                        0,
                        origin.as_ptr(),
                        here.as_ptr(),
                        region.as_ptr(),
                        c.pitches[0] as usize,
                        c.pitches[1] as usize,
                        0,
                        0,
                        place.cast()
                    )
                )
            } else {
                enqueue!(
                    api,
                    slot,
                    clEnqueueReadBufferRect(
                        mem,
                        0,
                        origin.as_ptr(),
                        here.as_ptr(),
                        region.as_ptr(),
                        c.pitches[0] as usize,
                        c.pitches[1] as usize,
                        0,
                        0,
                        place.cast()
                    )
                )
            })
        })
    }

    pub(crate) fn image_rect(&mut self, header: Header, c: &calls::ImageRect) -> Result<(), Gone> {
        self.enqueue(header, &c.order, c.place.stage, |server, api, slot| {
            let mem = server.backend.mems.get(c.mem.0)?;
            let shape = mem.image().ok_or(codes::INVALID_MEM_OBJECT)?;
            let pixel = image::pixel_size(shape.order, shape.data);
            let needed = c.region.iter().try_fold(
                pixel.ok_or(codes::INVALID_IMAGE_FORMAT_DESCRIPTOR)?,
                |a, b| a.checked_mul(*b),
            );
            let raw = mem.raw;
            let place = server.near(&c.order, &c.place, needed)?;
            let (origin, region) = (sizes(c.origin), sizes(c.region));
            Ok(if c.write {
                enqueue!(
                    api,
                    slot,
                    clEnqueueWriteImage(
                        raw,
                        0,
                        origin.as_ptr(),
                        region.as_ptr(),
                        0,
                        0,
                        place.cast()
                    )
                )
            } else {
                enqueue!(
                    api,
                    slot,
                    clEnqueueReadImage(
                        raw,
                        0,
                        origin.as_ptr(),
                        region.as_ptr(),
                        0,
                        0,
                        place.cast()
                    )
                )
            })
        })
    }
}

#[cfg(test)]
#[path = "transfers_tests.rs"]
mod tests;
