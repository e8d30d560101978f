//! Kernel and memory commands, as the driver calls that enqueue them.

use std::ptr::null;

use remoting_proto::{
    apis::opencl::{
        calls::{self, Order, StageId},
        codes,
    },
    wire::Header,
};
use remoting_transport::endpoint::Gone;

use super::{
    Server,
    commands::sizes,
    driver::{api::Handle, cl, enqueue},
    objects::Map,
};

/// Up to three sizes as passed to the driver; null for none.
fn pointer(numbers: Option<&[u64]>, to: &mut [usize; 3]) -> *const usize {
    let Some(numbers) = numbers else {
        return null();
    };
    for (to, number) in to.iter_mut().zip(numbers) {
        *to = *number as usize;
    }
    to.as_ptr()
}

impl Server {
    /// Enqueues a marker, which completes when everything that it waits for has. `stage` is
    /// released then.
    pub(super) fn marker(
        &mut self,
        header: Header,
        order: &Order,
        stage: Option<StageId>,
    ) -> Result<(), Gone> {
        self.enqueue(header, order, stage, |_, api, slot| {
            Ok(enqueue!(api, slot, clEnqueueMarkerWithWaitList()))
        })
    }

    pub(super) fn barrier(&mut self, header: Header, order: &Order) -> Result<(), Gone> {
        self.enqueue(header, order, None, |_, api, slot| {
            Ok(enqueue!(api, slot, clEnqueueBarrierWithWaitList()))
        })
    }

    pub(super) fn nd_range(&mut self, header: Header, c: &calls::NdRange) -> Result<(), Gone> {
        self.enqueue(header, &c.order, None, |server, api, slot| {
            let kernel = server.session.backend.kernels.get_mut(c.kernel.0)?;
            if let Some(code) = kernel.refused.values().next() {
                return Err(*code);
            }
            if !kernel
                .addresses
                .are_in(&server.session.backend.svm, kernel.home.raw)
            {
                return Err(codes::INVALID_KERNEL_ARGS);
            }
            let kernel = kernel.raw;
            let (global, local, offset) = c.grid.sizes();
            let [mut offsets, mut globals, mut locals] = [[0; 3]; 3];
            Ok(enqueue!(
                api,
                slot,
                clEnqueueNDRangeKernel(
                    kernel,
                    global.len() as u32,
                    pointer(offset, &mut offsets),
                    pointer(Some(global), &mut globals),
                    pointer(local, &mut locals)
                )
            ))
        })
    }

    pub(super) fn copy_buffer(
        &mut self,
        header: Header,
        c: &calls::CopyBuffer,
    ) -> Result<(), Gone> {
        self.enqueue(header, &c.order, None, |server, api, slot| {
            let mems = &server.backend.mems;
            let (from, to) = (mems.get(c.from.0)?.raw, mems.get(c.to.0)?.raw);
            Ok(enqueue!(
                api,
                slot,
                clEnqueueCopyBuffer(
                    from,
                    to,
                    c.offsets[0] as usize,
                    c.offsets[1] as usize,
                    c.size as usize
                )
            ))
        })
    }

    pub(super) fn copy_buffer_rect(
        &mut self,
        header: Header,
        c: &calls::CopyBufferRect,
    ) -> Result<(), Gone> {
        self.enqueue(header, &c.order, None, |server, api, slot| {
            let mems = &server.backend.mems;
            let (from, to) = (mems.get(c.from.0)?.raw, mems.get(c.to.0)?.raw);
            let [source, target] = c.origins.map(sizes);
            let region = sizes(c.region);
            Ok(enqueue!(
                api,
                slot,
                clEnqueueCopyBufferRect(
                    from,
                    to,
                    source.as_ptr(),
                    target.as_ptr(),
                    region.as_ptr(),
                    c.pitches[0][0] as usize,
                    c.pitches[0][1] as usize,
                    c.pitches[1][0] as usize,
                    c.pitches[1][1] as usize
                )
            ))
        })
    }

    pub(super) fn copy_image(&mut self, header: Header, c: &calls::CopyImage) -> Result<(), Gone> {
        self.enqueue(header, &c.order, None, |server, api, slot| {
            let mems = &server.backend.mems;
            let (from, to) = (mems.get(c.from.0)?.raw, mems.get(c.to.0)?.raw);
            let [source, target] = c.origins.map(sizes);
            let region = sizes(c.region);
            Ok(enqueue!(
                api,
                slot,
                clEnqueueCopyImage(from, to, source.as_ptr(), target.as_ptr(), region.as_ptr())
            ))
        })
    }

    pub(super) fn copy_image_to_buffer(
        &mut self,
        header: Header,
        c: &calls::CopyImageToBuffer,
    ) -> Result<(), Gone> {
        self.enqueue(header, &c.order, None, |server, api, slot| {
            let image = server.backend.mems.get(c.image.0)?.raw;
            let buffer = server.backend.mems.get(c.buffer.0)?.raw;
            let (origin, region) = (sizes(c.origin), sizes(c.region));
            Ok(enqueue!(
                api,
                slot,
                clEnqueueCopyImageToBuffer(
                    image,
                    buffer,
                    origin.as_ptr(),
                    region.as_ptr(),
                    c.offset as usize
                )
            ))
        })
    }

    pub(super) fn copy_buffer_to_image(
        &mut self,
        header: Header,
        c: &calls::CopyBufferToImage,
    ) -> Result<(), Gone> {
        self.enqueue(header, &c.order, None, |server, api, slot| {
            let image = server.backend.mems.get(c.image.0)?.raw;
            let buffer = server.backend.mems.get(c.buffer.0)?.raw;
            let (origin, region) = (sizes(c.origin), sizes(c.region));
            Ok(enqueue!(
                api,
                slot,
                clEnqueueCopyBufferToImage(
                    buffer,
                    image,
                    c.offset as usize,
                    origin.as_ptr(),
                    region.as_ptr()
                )
            ))
        })
    }

    pub(super) fn fill_buffer(
        &mut self,
        header: Header,
        c: &calls::FillBuffer,
    ) -> Result<(), Gone> {
        self.enqueue(header, &c.order, None, |server, api, slot| {
            let mem = server.backend.mems.get(c.mem.0)?.raw;
            Ok(enqueue!(
                api,
                slot,
                clEnqueueFillBuffer(
                    mem,
                    c.pattern.0.as_ptr().cast(),
                    c.pattern.0.len(),
                    c.offset as usize,
                    c.size as usize
                )
            ))
        })
    }

    pub(super) fn fill_image(&mut self, header: Header, c: &calls::FillImage) -> Result<(), Gone> {
        self.enqueue(header, &c.order, None, |server, api, slot| {
            let mem = server.backend.mems.get(c.mem.0)?.raw;
            let (origin, region) = (sizes(c.origin), sizes(c.region));
            Ok(enqueue!(
                api,
                slot,
                clEnqueueFillImage(
                    mem,
                    c.colour.as_ptr().cast(),
                    origin.as_ptr(),
                    region.as_ptr()
                )
            ))
        })
    }

    pub(super) fn migrate(&mut self, header: Header, c: &calls::Migrate) -> Result<(), Gone> {
        self.enqueue(header, &c.order, None, |server, api, slot| {
            let mems: Vec<Handle> = c
                .mems
                .iter()
                .map(|id| server.backend.mems.get(id.0).map(|mem| mem.raw))
                .collect::<Result<_, _>>()?;
            Ok(enqueue!(
                api,
                slot,
                clEnqueueMigrateMemObjects(mems.len() as u32, mems.as_ptr(), c.flags)
            ))
        })
    }

    pub(super) fn map(&mut self, header: Header, c: &calls::Map) -> Result<(), Gone> {
        self.enqueue(header, &c.order, None, |server, api, slot| {
            let raw = server.backend.mems.get(c.mem.0)?.raw;
            let mut code = 0;
            let pointer = cl!(
                api,
                clEnqueueMapBuffer(
                    slot.queue,
                    raw,
                    0,
                    c.flags,
                    c.offset as usize,
                    c.size as usize,
                    slot.count,
                    slot.wait,
                    slot.event,
                    &raw mut code,
                )
            );
            if code == 0 {
                let mem = server.backend.mems.get_mut(c.mem.0)?;
                mem.maps.push(Map {
                    offset: c.offset,
                    size: c.size,
                    pointer: pointer as usize,
                });
            }
            Ok(code)
        })
    }

    pub(super) fn unmap(&mut self, header: Header, c: &calls::Unmap) -> Result<(), Gone> {
        self.enqueue(header, &c.order, None, |server, api, slot| {
            let mem = server.backend.mems.get_mut(c.mem.0)?;
            let index = mem.maps.iter().position(|map| map.offset == c.offset);
            let Map { pointer, .. } = mem.maps.remove(index.ok_or(codes::INVALID_VALUE)?);
            let raw = mem.raw;
            Ok(enqueue!(
                api,
                slot,
                clEnqueueUnmapMemObject(raw, pointer as *mut _)
            ))
        })
    }
}
