//! Buffers, images and samplers.

use std::{ptr::null_mut, sync::Arc};

use remoting_proto::apis::opencl::{
    calls::{CreateBuffer, CreateImage, CreateSampler, CreateSubBuffer, ReleaseMem, SamplerId},
    codes, image,
};
use remoting_session::{notice::Notice, quota::Charge};

use super::{
    Server,
    callbacks::{self, Leaf},
    driver::{
        api::{Handle, ImageDesc, ImageFormat},
        cl, outcome,
    },
    objects::{MadeMem, Mem, Sampler, keep, made},
    provenance::MemRecord,
    written::place,
};

impl Server {
    pub(crate) fn create_buffer(&mut self, call: CreateBuffer) -> Result<(), i32> {
        self.backend.mems.check(call.id.0)?;
        let id = call.id;
        let stage = call.contents.as_ref().and_then(|place| place.stage);
        let contents = call.contents.as_ref();
        let lives = call.lives.map(|offset| (offset, call.size));
        if let Some((offset, length)) =
            lives.or_else(|| contents.map(|place| (place.offset, place.length)))
            && self.window.at(offset, length).is_some()
            && let Ok(context) = self.backend.contexts.get(call.context.0)
        {
            self.reach(context.home(), offset, length);
        }
        let mem = self.make_buffer(call);
        if let Some(stage) = stage {
            self.stage_free(stage, false);
        }
        keep!(self.backend.mems, id, mem)
    }

    fn make_buffer(&mut self, call: CreateBuffer) -> Result<Mem, i32> {
        let context = self.backend.contexts.get(call.context.0)?;
        let (home, record) = (context.home(), Arc::clone(&context.record));
        let context = home.raw;
        let host = codes::MEM_USE_HOST_PTR | codes::MEM_ALLOC_HOST_PTR | codes::MEM_COPY_HOST_PTR;
        let mut flags = call.flags & !host;
        let mut pointer = null_mut();
        let svm = call
            .svm
            .map(|address| self.svm_for_buffer(context, address, call.size))
            .transpose()?;
        if let Some(address) = call.svm {
            flags |= codes::MEM_USE_HOST_PTR;
            pointer = address as *mut u8;
        } else if let Some(offset) = call.lives {
            flags |= codes::MEM_USE_HOST_PTR;
            pointer = self
                .window
                .at(offset, call.size)
                .ok_or(codes::INVALID_HOST_PTR)?;
        } else if let Some(place) = &call.contents {
            flags |= codes::MEM_COPY_HOST_PTR;
            pointer = self.place(place, Some(call.size))?;
        }
        // Memory in the window takes no device memory, and shared virtual memory is charged
        // elsewhere.
        let charge = match (call.svm, call.lives) {
            (None, None) => Some(self.charge(call.size)?),
            _ => None,
        };
        let mut code = 0;
        let raw = cl!(
            self.backend.api,
            clCreateBuffer(
                context,
                flags,
                call.size as usize,
                pointer.cast(),
                &raw mut code,
            )
        );
        let raw = self.charged(made(raw, code)?, charge);
        if let Some(allocation) = svm {
            self.svm_until_gone(raw, allocation);
        }
        Ok(Mem {
            raw,
            record: MemRecord::new(MadeMem::Buffer(call), record, None),
            home,
            maps: Vec::new(),
        })
    }

    /// Keeps a charge until the driver reports that the object is gone.
    fn charged(&self, raw: Handle, charge: Option<Charge>) -> Handle {
        if let Some(charge) = charge {
            let data = callbacks::charge_into_raw(charge);
            let code = cl!(
                self.backend.api,
                clSetMemObjectDestructorCallback(raw, Some(callbacks::gone), data)
            );
            if code != 0 {
                // If a driver does not report when memory is free, the memory is not charged.
                // SAFETY: the driver refused the callback.
                unsafe { callbacks::gone(raw, data) };
            }
        }
        raw
    }

    pub(crate) fn create_sub_buffer(&mut self, call: CreateSubBuffer) -> Result<(), i32> {
        self.backend.mems.check(call.id.0)?;
        let id = call.id;
        keep!(self.backend.mems, id, self.make_sub_buffer(call))
    }

    fn make_sub_buffer(&self, call: CreateSubBuffer) -> Result<Mem, i32> {
        let Mem {
            raw: of,
            record,
            home,
            ..
        } = self.backend.mems.get(call.of.0)?;
        let region = [call.origin as usize, call.size as usize];
        let mut code = 0;
        let raw = cl!(
            self.backend.api,
            clCreateSubBuffer(
                *of,
                call.flags,
                codes::BUFFER_CREATE_TYPE_REGION,
                region.as_ptr().cast(),
                &raw mut code,
            )
        );
        Ok(Mem {
            raw: made(raw, code)?,
            record: MemRecord::new(
                MadeMem::Sub(call),
                Arc::clone(&record.context),
                Some(Arc::clone(record)),
            ),
            home: *home,
            maps: Vec::new(),
        })
    }

    pub(crate) fn create_image(&mut self, call: CreateImage) -> Result<(), i32> {
        self.backend.mems.check(call.id.0)?;
        let id = call.id;
        let stage = call.contents.as_ref().and_then(|place| place.stage);
        let mem = self.make_image(call);
        if let Some(stage) = stage {
            self.stage_free(stage, false);
        }
        keep!(self.backend.mems, id, mem)
    }

    fn make_image(&mut self, call: CreateImage) -> Result<Mem, i32> {
        let context = self.backend.contexts.get(call.context.0)?;
        let (home, record) = (context.home(), Arc::clone(&context.record));
        let context = home.raw;
        let shape = &call.shape;
        let host = codes::MEM_USE_HOST_PTR | codes::MEM_ALLOC_HOST_PTR | codes::MEM_COPY_HOST_PTR;
        let mut flags = call.flags & !host;
        let mut pointer = null_mut();
        let needed = image::pixel_size(shape.order, shape.data).and_then(|pixel| {
            shape
                .extent
                .iter()
                .chain([&shape.layers])
                .try_fold(pixel, |bytes, &count| bytes.checked_mul(count.max(1)))
        });
        if let Some(place) = &call.contents {
            flags |= codes::MEM_COPY_HOST_PTR;
            let needed = needed.ok_or(codes::INVALID_IMAGE_FORMAT_DESCRIPTOR)?;
            pointer = self.place(place, Some(needed))?;
        }
        // Images of a buffer use its memory; the driver refuses formats that it does not know.
        let charge = match (shape.of, needed) {
            (None, Some(bytes)) => Some(self.charge(bytes)?),
            _ => None,
        };
        let format = ImageFormat {
            order: shape.order,
            data: shape.data,
        };
        let of = shape.of.map(|id| self.backend.mems.get(id.0)).transpose()?;
        let (raw_of, of) = match of {
            Some(of) => (of.raw, Some(Arc::clone(&of.record))),
            None => (0, None),
        };
        let [width, height, depth] = shape.extent.map(|extent| extent as usize);
        let desc = ImageDesc {
            kind: shape.kind,
            width,
            height,
            depth,
            layers: shape.layers as usize,
            of: raw_of,
            ..ImageDesc::default()
        };
        let mut code = 0;
        let raw = cl!(
            self.backend.api,
            clCreateImage(
                context,
                flags,
                &raw const format,
                &raw const desc,
                pointer.cast(),
                &raw mut code,
            )
        );
        Ok(Mem {
            raw: self.charged(made(raw, code)?, charge),
            record: MemRecord::new(MadeMem::Image(call), record, of),
            home,
            maps: Vec::new(),
        })
    }

    pub(crate) fn release_mem(&mut self, call: &ReleaseMem) -> Result<(), i32> {
        let Some(mem) = self.backend.mems.take(call.id.0) else {
            if let Some(number) = call.callback {
                self.expected += 1;
                self.board.leave(Notice::Callback(number, 0));
            }
            return Ok(());
        };
        let place = place(&mem.record);
        if let Some(number) = call.callback {
            self.expected += 1;
            let leaf = Leaf::into_raw(&self.board, number);
            let code = cl!(
                self.backend.api,
                clSetMemObjectDestructorCallback(mem.raw, Some(callbacks::mem), leaf)
            );
            if code == 0 {
                let record = Arc::downgrade(&mem.record);
                self.backend.destructors.insert(number, record);
            } else {
                // SAFETY: the driver refused it.
                unsafe { Leaf::drop_raw(leaf) };
                self.board.leave(Notice::Callback(number, 0));
            }
        }
        let released = outcome(cl!(self.backend.api, clReleaseMemObject(mem.raw)));
        drop(mem);
        if let Some(missing) = &self.backend.missing {
            missing.released(place);
        }
        released
    }

    pub(crate) fn create_sampler(&mut self, call: CreateSampler) -> Result<(), i32> {
        self.backend.samplers.check(call.id.0)?;
        let id = call.id;
        let sampler = self
            .backend
            .contexts
            .get(call.context.0)
            .and_then(|context| {
                let mut code = 0;
                let raw = cl!(
                    self.backend.api,
                    clCreateSampler(
                        context.raw,
                        u32::from(call.normalized),
                        call.addressing,
                        call.filter,
                        &raw mut code,
                    )
                );
                Ok(Sampler {
                    raw: made(raw, code)?,
                    made: call,
                    context: Arc::clone(&context.record),
                })
            });
        keep!(self.backend.samplers, id, sampler)
    }

    pub(crate) fn release_sampler(&mut self, id: SamplerId) -> Result<(), i32> {
        match self.backend.samplers.take(id.0) {
            Some(sampler) => outcome(cl!(self.backend.api, clReleaseSampler(sampler.raw))),
            None => Ok(()),
        }
    }
}
