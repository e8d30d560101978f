//! Shadow objects: what the driver made, and the call by which it can be made again.

use std::{
    collections::BTreeMap,
    ptr::{null, null_mut},
    sync::Arc,
    thread,
};

use super::{
    notice::{self, Leaf, Notice, Reporter},
    quota::{self, Charge},
    server::{Server, c_string, cl, outcome},
};
use crate::{
    opencl::{
        api::{Api, Handle, ImageDesc, ImageFormat},
        codes, image,
    },
    protocol::{
        Blob, Flags, Header, Wire,
        calls::{
            ArgumentKind, BuildProgram, CloneKernel, CompileProgram, ContextId, CreateBuffer,
            CreateContext, CreateImage, CreateKernel, CreateProgram, CreateQueue, CreateSampler,
            CreateSubBuffer, CreateSubDevices, CreateUserEvent, DeviceId, EventId, ImageShape,
            KernelId, LinkProgram, Offered, ProgramId, ProgramOrigin, QueueId, ReleaseMem,
            SamplerId, SetArgument, SetEventCallback, SetUserEventStatus, Specialize, Value,
        },
    },
    transport::link::Gone,
};

/// How many refused arguments of a kernel are remembered.
const MOST_REFUSED: usize = 64;

/// A device.
#[derive(Debug)]
pub struct Device {
    /// The driver's handle.
    pub raw: Handle,
    /// Its platform's place in the list.
    pub platform: usize,
    /// How it was made, if it is a sub-device.
    pub made: Option<CreateSubDevices>,
}

/// A context.
#[derive(Debug)]
pub struct Context {
    /// The driver's handle.
    pub raw: Handle,
    /// How it was made.
    pub made: CreateContext,
    /// Its platform's place in the list.
    pub platform: usize,
}

/// A queue.
#[derive(Debug)]
pub struct Queue {
    /// The driver's handle.
    pub raw: Handle,
    /// How it was made.
    pub made: CreateQueue,
    /// The first error of a command that nobody waited for, to be reported by who waits next.
    pub deferred: Option<i32>,
}

/// How a buffer or image was made.
#[derive(Debug)]
pub enum MadeMem {
    /// A buffer.
    Buffer(CreateBuffer),
    /// A part of a buffer.
    Sub(CreateSubBuffer),
    /// An image.
    Image(CreateImage),
}

/// A buffer or image.
#[derive(Debug)]
pub struct Mem {
    /// The driver's handle.
    pub raw: Handle,
    /// How it was made.
    pub made: MadeMem,
    /// Current mappings: offset and the driver's pointer.
    pub maps: Vec<(u64, usize)>,
}

impl Mem {
    /// Format and shape, if it is an image.
    pub fn image(&self) -> Option<&ImageShape> {
        match &self.made {
            MadeMem::Image(image) => Some(&image.shape),
            _ => None,
        }
    }
}

/// A sampler.
#[derive(Debug)]
pub struct Sampler {
    /// The driver's handle.
    pub raw: Handle,
    /// How it was made.
    pub made: CreateSampler,
}

/// How a program was made.
#[derive(Debug)]
pub enum MadeProgram {
    /// From something.
    Created(CreateProgram),
    /// By linking.
    Linked(LinkProgram),
}

/// A program.
#[derive(Debug)]
pub struct Program {
    /// The driver's handle.
    pub raw: Handle,
    /// Its context.
    pub context: ContextId,
    /// How it was made.
    pub made: MadeProgram,
    /// How it was built last.
    pub built: Option<BuildProgram>,
}

/// How a kernel was made.
#[derive(Debug)]
pub enum MadeKernel {
    /// From a program.
    Created(CreateKernel),
    /// From a kernel.
    Cloned(CloneKernel),
}

/// A kernel.
#[derive(Debug)]
pub struct Kernel {
    /// The driver's handle.
    pub raw: Handle,
    /// How it was made.
    pub made: MadeKernel,
    /// Its platform's version.
    pub version: u32,
    /// Arguments whose last values the driver has refused, when nobody waited for that.
    pub refused: BTreeMap<u32, i32>,
}

/// An event.
#[derive(Debug)]
pub struct Event {
    /// The driver's handle.
    pub raw: Handle,
    /// Its command's queue; none for a user event.
    pub queue: Option<QueueId>,
}

/// Puts what a creation made into its table.
macro_rules! keep {
    ($table:expr, $id:expr, $made:expr) => {{
        let made = $made;
        let outcome = made.as_ref().map(|_| ()).map_err(|code| *code);
        $table.put($id.0, made);
        outcome
    }};
}

/// The object if the code is success.
fn made(raw: Handle, code: i32) -> Result<Handle, i32> {
    match (raw, code) {
        (0, 0) => Err(codes::OUT_OF_RESOURCES),
        (raw, 0) => Ok(raw),
        (_, code) => Err(code),
    }
}

impl Server {
    pub(super) fn offered(&self) -> Vec<Vec<Offered>> {
        self.platforms
            .iter()
            .map(|platform| platform.devices.clone())
            .collect()
    }

    fn raw_devices(&self, ids: &[DeviceId]) -> Result<Vec<Handle>, i32> {
        ids.iter()
            .map(|id| self.devices.get(id.0).map(|device| device.raw))
            .collect()
    }

    pub(super) fn platform_version(&self, index: usize) -> u32 {
        self.platforms
            .get(index)
            .map_or(10, |platform| platform.version)
    }

    pub(super) fn create_sub_devices(&mut self, call: &CreateSubDevices) -> Result<u32, i32> {
        for id in &call.ids {
            self.devices.check(id.0)?;
        }
        let device = self.devices.get(call.device.0)?;
        let platform = device.platform;
        let mut properties: Vec<isize> = call.properties.iter().map(|p| *p as isize).collect();
        properties.push(0);
        let mut count = 0;
        let mut raws = vec![0; call.ids.len()];
        let pointer = if raws.is_empty() {
            null_mut()
        } else {
            raws.as_mut_ptr()
        };
        outcome(cl!(
            self.api,
            clCreateSubDevices(
                device.raw,
                properties.as_ptr(),
                raws.len() as u32,
                pointer,
                &raw mut count,
            )
        ))?;
        for (id, raw) in call.ids.iter().zip(raws).take(count as usize) {
            let device = Device {
                raw,
                platform,
                made: Some(call.clone()),
            };
            self.devices.put(id.0, Ok(device));
        }
        Ok(count)
    }

    pub(super) fn release_device(&mut self, id: DeviceId) -> Result<(), i32> {
        if self.devices.get(id.0)?.made.is_none() {
            return Ok(());
        }
        let device = self.devices.take(id.0).ok_or(codes::INVALID_DEVICE)?;
        outcome(cl!(self.api, clReleaseDevice(device.raw)))
    }

    pub(super) fn create_context(&mut self, call: CreateContext) -> Result<(), i32> {
        self.contexts.check(call.id.0)?;
        let id = call.id;
        keep!(self.contexts, id, self.make_context(call))
    }

    fn make_context(&mut self, call: CreateContext) -> Result<Context, i32> {
        // The driver may use it as long as the context lives, which may be longer than its
        // number is in use: it is kept, for the next context of this number.
        let reporter = self
            .reporters
            .entry(call.id)
            .or_insert_with(|| Reporter::new(&self.board, call.id));
        let reporter: *mut Reporter = &raw mut **reporter;
        let devices = self.raw_devices(&call.devices)?;
        let first = call.devices.first().ok_or(codes::INVALID_VALUE)?;
        let platform = self.devices.get(first.0)?.platform;
        let mut properties = [0isize; 3];
        if let Some(id) = call.platform {
            let named = self
                .platforms
                .get(id.0 as usize)
                .ok_or(codes::INVALID_PLATFORM)?;
            properties = [codes::CONTEXT_PLATFORM as isize, named.raw as isize, 0];
        }
        let mut code = 0;
        let raw = cl!(
            self.api,
            clCreateContext(
                properties.as_ptr(),
                devices.len() as u32,
                devices.as_ptr(),
                Some(notice::report),
                reporter.cast(),
                &raw mut code,
            )
        );
        Ok(Context {
            raw: made(raw, code)?,
            made: call,
            platform,
        })
    }

    pub(super) fn release_context(&mut self, id: ContextId) -> Result<(), i32> {
        match self.contexts.take(id.0) {
            Some(context) => outcome(cl!(self.api, clReleaseContext(context.raw))),
            None => Ok(()),
        }
    }

    pub(super) fn create_queue(&mut self, call: CreateQueue) -> Result<(), i32> {
        self.queues.check(call.id.0)?;
        let id = call.id;
        keep!(self.queues, id, self.make_queue(call))
    }

    fn make_queue(&self, call: CreateQueue) -> Result<Queue, i32> {
        let context = self.contexts.get(call.context.0)?.raw;
        let device = self.devices.get(call.device.0)?.raw;
        let mut code = 0;
        let raw = if call.further.is_empty() {
            cl!(
                self.api,
                clCreateCommandQueue(context, device, call.properties, &raw mut code)
            )
        } else {
            let mut properties = vec![u64::from(codes::QUEUE_PROPERTIES), call.properties];
            properties.extend(&call.further);
            properties.push(0);
            cl!(
                self.api,
                clCreateCommandQueueWithProperties(
                    context,
                    device,
                    properties.as_ptr(),
                    &raw mut code,
                )
            )
        };
        Ok(Queue {
            raw: made(raw, code)?,
            made: call,
            deferred: None,
        })
    }

    pub(super) fn release_queue(&mut self, id: QueueId) -> Result<(), i32> {
        match self.queues.take(id.0) {
            Some(queue) => outcome(cl!(self.api, clReleaseCommandQueue(queue.raw))),
            None => Ok(()),
        }
    }

    pub(super) fn create_buffer(&mut self, call: CreateBuffer) -> Result<(), i32> {
        self.mems.check(call.id.0)?;
        let id = call.id;
        let stage = call.contents.as_ref().and_then(|place| place.stage);
        let contents = call.contents.as_ref();
        let lives = call.lives.map(|offset| (offset, call.size));
        if let Some((offset, length)) =
            lives.or_else(|| contents.map(|place| (place.offset, place.length)))
            && self.window.at(offset, length).is_some()
        {
            self.reach(call.context, offset, length);
        }
        let mem = self.make_buffer(call);
        if let Some(stage) = stage {
            self.stage_free(stage, false);
        }
        keep!(self.mems, id, mem)
    }

    fn make_buffer(&self, call: CreateBuffer) -> Result<Mem, i32> {
        let context = self.contexts.get(call.context.0)?.raw;
        let host = codes::MEM_USE_HOST_PTR | codes::MEM_ALLOC_HOST_PTR | codes::MEM_COPY_HOST_PTR;
        let mut flags = call.flags & !host;
        let mut pointer = null_mut();
        if let Some(offset) = call.lives {
            flags |= codes::MEM_USE_HOST_PTR;
            pointer = self
                .window
                .at(offset, call.size)
                .ok_or(codes::INVALID_HOST_PTR)?;
        } else if let Some(place) = &call.contents {
            flags |= codes::MEM_COPY_HOST_PTR;
            pointer = self.place(place, Some(call.size))?;
        }
        // What lives in the window is no device's memory.
        let charge = match call.lives {
            Some(_) => None,
            None => Some(self.quota.charge(call.size)?),
        };
        let mut code = 0;
        let raw = cl!(
            self.api,
            clCreateBuffer(
                context,
                flags,
                call.size as usize,
                pointer.cast(),
                &raw mut code,
            )
        );
        Ok(Mem {
            raw: self.charged(made(raw, code)?, charge),
            made: MadeMem::Buffer(call),
            maps: Vec::new(),
        })
    }

    /// Keeps a charge until the driver says that the object is gone.
    fn charged(&self, raw: Handle, charge: Option<Charge>) -> Handle {
        if let Some(charge) = charge {
            let data = charge.into_raw();
            let code = cl!(
                self.api,
                clSetMemObjectDestructorCallback(raw, Some(quota::gone), data)
            );
            if code != 0 {
                // A driver that does not say when memory is free is not charged for it.
                // SAFETY: it refused the callback.
                unsafe { quota::gone(raw, data) };
            }
        }
        raw
    }

    pub(super) fn create_sub_buffer(&mut self, call: CreateSubBuffer) -> Result<(), i32> {
        self.mems.check(call.id.0)?;
        let id = call.id;
        keep!(self.mems, id, self.make_sub_buffer(call))
    }

    fn make_sub_buffer(&self, call: CreateSubBuffer) -> Result<Mem, i32> {
        let of = self.mems.get(call.of.0)?.raw;
        let region = [call.origin as usize, call.size as usize];
        let mut code = 0;
        let raw = cl!(
            self.api,
            clCreateSubBuffer(
                of,
                call.flags,
                codes::BUFFER_CREATE_TYPE_REGION,
                region.as_ptr().cast(),
                &raw mut code,
            )
        );
        Ok(Mem {
            raw: made(raw, code)?,
            made: MadeMem::Sub(call),
            maps: Vec::new(),
        })
    }

    pub(super) fn create_image(&mut self, call: CreateImage) -> Result<(), i32> {
        self.mems.check(call.id.0)?;
        let id = call.id;
        let stage = call.contents.as_ref().and_then(|place| place.stage);
        let mem = self.make_image(call);
        if let Some(stage) = stage {
            self.stage_free(stage, false);
        }
        keep!(self.mems, id, mem)
    }

    fn make_image(&self, call: CreateImage) -> Result<Mem, i32> {
        let context = self.contexts.get(call.context.0)?.raw;
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
        // Images of a buffer have its memory; the driver refuses formats that it does not know.
        let charge = match (shape.of, needed) {
            (None, Some(bytes)) => Some(self.quota.charge(bytes)?),
            _ => None,
        };
        let format = ImageFormat {
            order: shape.order,
            data: shape.data,
        };
        let [width, height, depth] = shape.extent.map(|extent| extent as usize);
        let desc = ImageDesc {
            kind: shape.kind,
            width,
            height,
            depth,
            layers: shape.layers as usize,
            of: match shape.of {
                Some(id) => self.mems.get(id.0)?.raw,
                None => 0,
            },
            ..ImageDesc::default()
        };
        let mut code = 0;
        let raw = cl!(
            self.api,
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
            made: MadeMem::Image(call),
            maps: Vec::new(),
        })
    }

    pub(super) fn release_mem(&mut self, call: &ReleaseMem) -> Result<(), i32> {
        let Some(mem) = self.mems.take(call.id.0) else {
            if let Some(number) = call.callback {
                self.expected += 1;
                self.board.leave(Notice::Callback(number, 0));
            }
            return Ok(());
        };
        if let Some(number) = call.callback {
            self.expected += 1;
            let leaf = Leaf::into_raw(&self.board, Some(number));
            let code = cl!(
                self.api,
                clSetMemObjectDestructorCallback(mem.raw, Some(notice::mem), leaf)
            );
            if code != 0 {
                // SAFETY: the driver refused it.
                unsafe { Leaf::drop_raw(leaf) };
                self.board.leave(Notice::Callback(number, 0));
            }
        }
        outcome(cl!(self.api, clReleaseMemObject(mem.raw)))
    }

    pub(super) fn create_sampler(&mut self, call: CreateSampler) -> Result<(), i32> {
        self.samplers.check(call.id.0)?;
        let id = call.id;
        let sampler = self.contexts.get(call.context.0).and_then(|context| {
            let mut code = 0;
            let raw = cl!(
                self.api,
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
            })
        });
        keep!(self.samplers, id, sampler)
    }

    pub(super) fn release_sampler(&mut self, id: SamplerId) -> Result<(), i32> {
        match self.samplers.take(id.0) {
            Some(sampler) => outcome(cl!(self.api, clReleaseSampler(sampler.raw))),
            None => Ok(()),
        }
    }

    pub(super) fn create_program(&mut self, call: CreateProgram) -> Result<Vec<i32>, i32> {
        self.programs.check(call.id.0)?;
        let id = call.id;
        let mut statuses = Vec::new();
        let program = self.make_program(call, &mut statuses);
        keep!(self.programs, id, program).map(|()| statuses)
    }

    fn make_program(&self, call: CreateProgram, statuses: &mut Vec<i32>) -> Result<Program, i32> {
        let context = self.contexts.get(call.context.0)?;
        let (version, context) = (self.platform_version(context.platform), context.raw);
        let mut code = 0;
        let raw = match &call.origin {
            ProgramOrigin::Source(text) => {
                let (pointer, length) = (text.0.as_ptr().cast(), text.0.len());
                cl!(
                    self.api,
                    clCreateProgramWithSource(
                        context,
                        1,
                        &raw const pointer,
                        &raw const length,
                        &raw mut code,
                    )
                )
            }
            ProgramOrigin::Binary(binaries) => {
                let ids: Vec<_> = binaries.iter().map(|(id, _)| *id).collect();
                let devices = self.raw_devices(&ids)?;
                let lengths: Vec<_> = binaries.iter().map(|(_, blob)| blob.0.len()).collect();
                let pointers: Vec<_> = binaries.iter().map(|(_, blob)| blob.0.as_ptr()).collect();
                *statuses = vec![0; devices.len()];
                cl!(
                    self.api,
                    clCreateProgramWithBinary(
                        context,
                        devices.len() as u32,
                        devices.as_ptr(),
                        lengths.as_ptr(),
                        pointers.as_ptr(),
                        statuses.as_mut_ptr(),
                        &raw mut code,
                    )
                )
            }
            ProgramOrigin::Il(_) if version < 21 => return Err(codes::INVALID_OPERATION),
            ProgramOrigin::Il(il) => cl!(
                self.api,
                clCreateProgramWithIL(context, il.0.as_ptr().cast(), il.0.len(), &raw mut code)
            ),
            ProgramOrigin::BuiltIn(ids, names) => {
                let devices = self.raw_devices(ids)?;
                let names = c_string(names);
                cl!(
                    self.api,
                    clCreateProgramWithBuiltInKernels(
                        context,
                        devices.len() as u32,
                        devices.as_ptr(),
                        names.as_ptr(),
                        &raw mut code,
                    )
                )
            }
        };
        Ok(Program {
            raw: made(raw, code)?,
            context: call.context,
            made: MadeProgram::Created(call),
            built: None,
        })
    }

    pub(super) fn release_program(&mut self, id: ProgramId) -> Result<(), i32> {
        match self.programs.take(id.0) {
            Some(program) => outcome(cl!(self.api, clReleaseProgram(program.raw))),
            None => Ok(()),
        }
    }

    /// Runs what takes long in a thread of its own, which leaves the answer on the board.
    fn apart(
        &mut self,
        header: Header,
        raw: Handle,
        work: impl FnOnce(&Api) -> i32 + Send + 'static,
    ) -> Result<(), Gone> {
        cl!(self.api, clRetainProgram(raw));
        let (api, board) = (Arc::clone(&self.api), Arc::clone(&self.board));
        let spawned = thread::Builder::new()
            .name("build".to_owned())
            .spawn(move || {
                let code = work(&api);
                cl!(api, clReleaseProgram(raw));
                if header.flags.has(Flags::ANSWER) {
                    let mut body = Vec::new();
                    outcome(code).put(&mut body);
                    board.leave(Notice::Answer(header.sequence, body));
                }
            });
        if spawned.is_err() {
            cl!(self.api, clReleaseProgram(raw));
            return self.answer(header, &Err::<(), i32>(codes::OUT_OF_HOST_MEMORY));
        }
        Ok(())
    }

    pub(super) fn build_program(
        &mut self,
        header: Header,
        call: &BuildProgram,
    ) -> Result<(), Gone> {
        let found = self.raw_devices(&call.devices).and_then(|devices| {
            let program = self.programs.get_mut(call.id.0)?;
            program.built = Some(call.clone());
            Ok((program.raw, devices))
        });
        let (raw, devices) = match found {
            Ok(found) => found,
            Err(code) => return self.answer(header, &Err::<(), i32>(code)),
        };
        let options = c_string(&call.options);
        self.apart(header, raw, move |api| {
            let pointer = if devices.is_empty() {
                null()
            } else {
                devices.as_ptr()
            };
            cl!(
                api,
                clBuildProgram(
                    raw,
                    devices.len() as u32,
                    pointer,
                    options.as_ptr(),
                    None,
                    null_mut(),
                )
            )
        })
    }

    pub(super) fn compile_program(
        &mut self,
        header: Header,
        call: &CompileProgram,
    ) -> Result<(), Gone> {
        let found = self.raw_devices(&call.devices).and_then(|devices| {
            let headers = call
                .headers
                .iter()
                .map(|(id, _)| self.programs.get(id.0).map(|program| program.raw))
                .collect::<Result<Vec<_>, _>>()?;
            Ok((self.programs.get(call.id.0)?.raw, devices, headers))
        });
        let (raw, devices, headers) = match found {
            Ok(found) => found,
            Err(code) => return self.answer(header, &Err::<(), i32>(code)),
        };
        for &header in &headers {
            cl!(self.api, clRetainProgram(header));
        }
        let options = c_string(&call.options);
        let names: Vec<_> = call
            .headers
            .iter()
            .map(|(_, name)| c_string(name))
            .collect();
        self.apart(header, raw, move |api| {
            let mut pointers: Vec<_> = names.iter().map(|name| name.as_ptr()).collect();
            let count = headers.len() as u32;
            let some = count > 0;
            let code = cl!(
                api,
                clCompileProgram(
                    raw,
                    devices.len() as u32,
                    if devices.is_empty() {
                        null()
                    } else {
                        devices.as_ptr()
                    },
                    options.as_ptr(),
                    count,
                    if some { headers.as_ptr() } else { null() },
                    if some {
                        pointers.as_mut_ptr().cast_const()
                    } else {
                        null()
                    },
                    None,
                    null_mut(),
                )
            );
            for header in headers {
                cl!(api, clReleaseProgram(header));
            }
            code
        })
    }

    pub(super) fn link_program(&mut self, header: Header, call: LinkProgram) -> Result<(), Gone> {
        let found = self.programs.check(call.id.0).and_then(|()| {
            let context = self.contexts.get(call.context.0)?.raw;
            let devices = self.raw_devices(&call.devices)?;
            let inputs = call
                .inputs
                .iter()
                .map(|id| self.programs.get(id.0).map(|program| program.raw))
                .collect::<Result<Vec<_>, _>>()?;
            Ok((context, devices, inputs))
        });
        let (context, devices, inputs) = match found {
            Ok(found) => found,
            Err(code) => return self.answer(header, &Err::<(i32, bool), i32>(code)),
        };
        cl!(self.api, clRetainContext(context));
        for &input in &inputs {
            cl!(self.api, clRetainProgram(input));
        }
        let (api, board) = (Arc::clone(&self.api), Arc::clone(&self.board));
        let options = c_string(&call.options);
        let work = move || {
            let mut code = 0;
            let raw = cl!(
                api,
                clLinkProgram(
                    context,
                    devices.len() as u32,
                    if devices.is_empty() {
                        null()
                    } else {
                        devices.as_ptr()
                    },
                    options.as_ptr(),
                    inputs.len() as u32,
                    inputs.as_ptr(),
                    None,
                    null_mut(),
                    &raw mut code,
                )
            );
            for input in inputs {
                cl!(api, clReleaseProgram(input));
            }
            cl!(api, clReleaseContext(context));
            board.leave(Notice::Linked(header, call, raw, code));
        };
        let thread = thread::Builder::new().name("build".to_owned());
        if thread.spawn(work).is_err() {
            // The references go with the process, which has not even room for a thread.
            return self.answer(header, &Err::<(i32, bool), i32>(codes::OUT_OF_HOST_MEMORY));
        }
        Ok(())
    }

    /// Keeps what linking has made.
    pub(super) fn linked(
        &mut self,
        header: Header,
        call: LinkProgram,
        raw: Handle,
        code: i32,
    ) -> Result<(), Gone> {
        let id = call.id;
        let outcome = if raw == 0 {
            Ok((code, false))
        } else if let Err(code) = self.programs.check(id.0) {
            // The number was given to another program meanwhile.
            cl!(self.api, clReleaseProgram(raw));
            Err(code)
        } else {
            let program = Program {
                raw,
                context: call.context,
                made: MadeProgram::Linked(call),
                built: None,
            };
            self.programs.put(id.0, Ok(program));
            Ok((code, true))
        };
        self.answer(header, &outcome)
    }

    pub(super) fn specialize(&mut self, call: &Specialize) -> Result<(), i32> {
        let program = self.programs.get(call.id.0)?;
        let context = self.contexts.get(program.context.0)?;
        if self.platform_version(context.platform) < 22 {
            return Err(codes::INVALID_OPERATION);
        }
        outcome(cl!(
            self.api,
            clSetProgramSpecializationConstant(
                program.raw,
                call.constant,
                call.value.0.len(),
                call.value.0.as_ptr().cast(),
            )
        ))
    }

    pub(super) fn create_kernel(&mut self, call: &CreateKernel) -> Result<Vec<ArgumentKind>, i32> {
        self.kernels.check(call.id.0)?;
        let program = self.programs.get(call.program.0)?;
        let version = self
            .contexts
            .get(program.context.0)
            .map_or(10, |context| self.platform_version(context.platform));
        let name = c_string(&call.name);
        let mut code = 0;
        let raw = cl!(
            self.api,
            clCreateKernel(program.raw, name.as_ptr(), &raw mut code)
        );
        let raw = made(raw, code)?;
        let kinds = self.argument_kinds(raw);
        let kernel = Kernel {
            raw,
            made: MadeKernel::Created(call.clone()),
            version,
            refused: BTreeMap::new(),
        };
        self.kernels.put(call.id.0, Ok(kernel));
        Ok(kinds)
    }

    /// Finds out once what a kernel's arguments are, as far as the driver says.
    fn argument_kinds(&self, kernel: Handle) -> Vec<ArgumentKind> {
        let mut count = 0u32;
        cl!(
            self.api,
            clGetKernelInfo(
                kernel,
                codes::KERNEL_NUM_ARGS,
                size_of::<u32>(),
                (&raw mut count).cast(),
                null_mut(),
            )
        );
        (0..count)
            .map(|index| {
                let mut space = 0u32;
                let code = cl!(
                    self.api,
                    clGetKernelArgInfo(
                        kernel,
                        index,
                        codes::KERNEL_ARG_ADDRESS_QUALIFIER,
                        size_of::<u32>(),
                        (&raw mut space).cast(),
                        null_mut(),
                    )
                );
                let mut name = [0u8; 128];
                let mut length = 0;
                let named = cl!(
                    self.api,
                    clGetKernelArgInfo(
                        kernel,
                        index,
                        codes::KERNEL_ARG_TYPE_NAME,
                        name.len(),
                        name.as_mut_ptr().cast(),
                        &raw mut length,
                    )
                );
                if code != 0 {
                    return ArgumentKind::Unknown();
                }
                match space {
                    codes::KERNEL_ARG_ADDRESS_LOCAL => ArgumentKind::Local(),
                    codes::KERNEL_ARG_ADDRESS_GLOBAL | codes::KERNEL_ARG_ADDRESS_CONSTANT => {
                        ArgumentKind::Mem()
                    }
                    // A name too long for the array is neither of these.
                    _ if named != 0 => ArgumentKind::Bytes(),
                    _ if name.starts_with(b"sampler_t\0") => ArgumentKind::Sampler(),
                    _ if name.starts_with(b"image") => ArgumentKind::Mem(),
                    _ => ArgumentKind::Bytes(),
                }
            })
            .collect()
    }

    pub(super) fn clone_kernel(&mut self, call: &CloneKernel) -> Result<(), i32> {
        self.kernels.check(call.id.0)?;
        let of = self.kernels.get(call.of.0)?;
        if of.version < 21 {
            return Err(codes::INVALID_OPERATION);
        }
        let (version, refused) = (of.version, of.refused.clone());
        let mut code = 0;
        let raw = cl!(self.api, clCloneKernel(of.raw, &raw mut code));
        let kernel = made(raw, code).map(|raw| Kernel {
            raw,
            made: MadeKernel::Cloned(call.clone()),
            version,
            refused,
        });
        keep!(self.kernels, call.id, kernel)
    }

    pub(super) fn release_kernel(&mut self, id: KernelId) -> Result<(), i32> {
        match self.kernels.take(id.0) {
            Some(kernel) => outcome(cl!(self.api, clReleaseKernel(kernel.raw))),
            None => Ok(()),
        }
    }

    pub(super) fn set_argument(&mut self, call: &SetArgument) -> Result<(), i32> {
        let kernel = self.kernels.get(call.kernel.0)?.raw;
        let handle;
        let (size, pointer) = match &call.value {
            Value::Bytes(Blob(bytes)) => (bytes.len(), bytes.as_ptr().cast()),
            Value::Mem(None) => (size_of::<Handle>(), null()),
            Value::Mem(Some(id)) => {
                handle = self.mems.get(id.0)?.raw;
                (size_of::<Handle>(), (&raw const handle).cast())
            }
            Value::Sampler(id) => {
                handle = self.samplers.get(id.0)?.raw;
                (size_of::<Handle>(), (&raw const handle).cast())
            }
            Value::Local(size) => (*size as usize, null()),
        };
        outcome(cl!(
            self.api,
            clSetKernelArg(kernel, call.index, size, pointer)
        ))
    }

    /// Remembers whether the driver has refused an argument's value, until it gets another one:
    /// enqueuing the kernel fails meanwhile, since the value that it has is not the one that it
    /// was to have.
    pub(super) fn note_argument(&mut self, call: &SetArgument, outcome: Result<(), i32>) {
        if let Ok(kernel) = self.kernels.get_mut(call.kernel.0) {
            match outcome {
                // A driver refuses indices beyond the kernel's arguments: their number is small.
                Err(code) if kernel.refused.len() < MOST_REFUSED => {
                    kernel.refused.insert(call.index, code);
                }
                Err(_) => {}
                Ok(()) => {
                    kernel.refused.remove(&call.index);
                }
            }
        }
    }

    pub(super) fn create_user_event(&mut self, call: &CreateUserEvent) -> Result<(), i32> {
        self.events.check(call.id.0)?;
        let event = self.contexts.get(call.context.0).and_then(|context| {
            let mut code = 0;
            let raw = cl!(self.api, clCreateUserEvent(context.raw, &raw mut code));
            Ok(Event {
                raw: made(raw, code)?,
                queue: None,
            })
        });
        self.undecided += usize::from(event.is_ok());
        keep!(self.events, call.id, event)
    }

    pub(super) fn set_user_event_status(&mut self, call: &SetUserEventStatus) -> Result<(), i32> {
        let event = self.events.get(call.id.0)?;
        outcome(cl!(self.api, clSetUserEventStatus(event.raw, call.status)))?;
        // The driver accepts one status for each user event.
        self.undecided = self.undecided.saturating_sub(1);
        Ok(())
    }

    pub(super) fn release_event(&mut self, id: EventId) -> Result<(), i32> {
        match self.events.take(id.0) {
            Some(event) => outcome(cl!(self.api, clReleaseEvent(event.raw))),
            None => Ok(()),
        }
    }

    pub(super) fn set_event_callback(&mut self, call: &SetEventCallback) -> Result<(), i32> {
        let raw = match self.events.get(call.id.0) {
            Ok(event) => event.raw,
            Err(code) => {
                // The command never reached the driver: it is over, with an error.
                self.expected += 1;
                self.board.leave(Notice::Callback(call.callback, code));
                return Ok(());
            }
        };
        self.expected += 1;
        let leaf = Leaf::into_raw(&self.board, Some(call.callback));
        let code = cl!(
            self.api,
            clSetEventCallback(raw, call.at, Some(notice::event), leaf)
        );
        if code != 0 {
            // SAFETY: the driver refused it.
            unsafe { Leaf::drop_raw(leaf) };
            self.expected -= 1;
        }
        outcome(code)
    }
}
