//! Queries for objects. The answers are the driver's, but the driver's own handles and addresses
//! never leave the worker: the client knows its own.

use std::{
    ffi::c_void,
    ptr::{null, null_mut},
};

use remoting_proto::{
    apis::opencl::{
        calls::{DeviceId, EventId, ImageFormats, Info, KernelId, ProgramId, Target},
        codes,
    },
    wire::{Blob, frame},
};

use super::{
    Server,
    driver::{
        api::{Handle, ImageFormat},
        cl, outcome,
    },
    objects::{Device, Kernel},
};

/// Whether an answer would be a handle or an address of this process.
fn is_private(of: &Target, parameter: u32) -> bool {
    match of {
        Target::Platform(..) | Target::Build(..) | Target::WorkGroup(..) => false,
        Target::Argument(..) | Target::SubGroup(..) | Target::Profiling(..) => false,
        Target::Device(..) | Target::Relied(..) => matches!(
            parameter,
            codes::DEVICE_PLATFORM | codes::DEVICE_PARENT_DEVICE
        ),
        Target::Context(..) => {
            matches!(
                parameter,
                codes::CONTEXT_DEVICES | codes::CONTEXT_PROPERTIES
            )
        }
        Target::Queue(..) => matches!(
            parameter,
            codes::QUEUE_CONTEXT | codes::QUEUE_DEVICE | codes::QUEUE_DEVICE_DEFAULT
        ),
        Target::Mem(..) => matches!(
            parameter,
            codes::MEM_HOST_PTR | codes::MEM_CONTEXT | codes::MEM_ASSOCIATED_MEMOBJECT
        ),
        Target::Image(..) => parameter == codes::IMAGE_BUFFER,
        Target::Sampler(..) => parameter == codes::SAMPLER_CONTEXT,
        Target::Program(..) => matches!(
            parameter,
            codes::PROGRAM_CONTEXT | codes::PROGRAM_DEVICES | codes::PROGRAM_BINARIES
        ),
        Target::Kernel(..) => matches!(parameter, codes::KERNEL_CONTEXT | codes::KERNEL_PROGRAM),
        Target::Event(..) => matches!(parameter, codes::EVENT_COMMAND_QUEUE | codes::EVENT_CONTEXT),
    }
}

/// Queries a value. Asks for its size first, unless it is small, as most values are.
fn ask(call: impl Fn(usize, *mut c_void, *mut usize) -> i32) -> Result<Blob, i32> {
    let mut small = [0u8; 64];
    let mut size = 0;
    if call(small.len(), small.as_mut_ptr().cast(), &raw mut size) == 0
        && let Some(value) = small.get(..size)
    {
        return Ok(Blob(value.to_vec()));
    }
    outcome(call(0, null_mut(), &raw mut size))?;
    if size > frame::LARGEST {
        return Err(codes::OUT_OF_HOST_MEMORY);
    }
    let mut value = vec![0u8; size];
    outcome(call(size, value.as_mut_ptr().cast(), null_mut()))?;
    Ok(Blob(value))
}

impl Server {
    fn raw_device(&self, id: Option<DeviceId>) -> Result<Handle, i32> {
        id.map_or(Ok(0), |id| {
            self.backend.devices.get(id.0).map(|device| device.raw)
        })
    }

    pub(crate) fn info(&mut self, call: &Info) -> Result<Blob, i32> {
        let p = call.parameter;
        if is_private(&call.of, p) {
            return Err(codes::INVALID_VALUE);
        }
        let api = &self.backend.api;
        match &call.of {
            Target::Platform(id) => {
                let raw = self
                    .backend
                    .platforms
                    .get(id.0 as usize)
                    .ok_or(codes::INVALID_PLATFORM)?
                    .raw;
                ask(|size, to, ret| cl!(api, clGetPlatformInfo(raw, p, size, to, ret)))
            }
            Target::Device(id) => self.device_info(*id, p),
            Target::Relied(id) => {
                let answer = self.device_info(*id, p)?;
                self.relies_on(*id, p, &answer);
                Ok(answer)
            }
            Target::Context(id) => {
                let raw = self.backend.contexts.get(id.0)?.raw;
                ask(|size, to, ret| cl!(api, clGetContextInfo(raw, p, size, to, ret)))
            }
            Target::Queue(id) => {
                let raw = self.backend.queues.get(id.0)?.raw;
                ask(|size, to, ret| cl!(api, clGetCommandQueueInfo(raw, p, size, to, ret)))
            }
            Target::Mem(id) => {
                let raw = self.backend.mems.get(id.0)?.raw;
                ask(|size, to, ret| cl!(api, clGetMemObjectInfo(raw, p, size, to, ret)))
            }
            Target::Image(id) => {
                let raw = self.backend.mems.get(id.0)?.raw;
                ask(|size, to, ret| cl!(api, clGetImageInfo(raw, p, size, to, ret)))
            }
            Target::Sampler(id) => {
                let raw = self.backend.samplers.get(id.0)?.raw;
                ask(|size, to, ret| cl!(api, clGetSamplerInfo(raw, p, size, to, ret)))
            }
            Target::Program(id) => {
                let raw = self.backend.programs.get(id.0)?.raw;
                ask(|size, to, ret| cl!(api, clGetProgramInfo(raw, p, size, to, ret)))
            }
            Target::Build(id, device) => {
                let raw = self.backend.programs.get(id.0)?.raw;
                let device = self.backend.devices.get(device.0)?.raw;
                ask(|size, to, ret| cl!(api, clGetProgramBuildInfo(raw, device, p, size, to, ret)))
            }
            Target::Kernel(id) => {
                let raw = self.backend.kernels.get(id.0)?.raw;
                ask(|size, to, ret| cl!(api, clGetKernelInfo(raw, p, size, to, ret)))
            }
            Target::WorkGroup(id, device) => {
                let raw = self.backend.kernels.get(id.0)?.raw;
                let device = self.raw_device(*device)?;
                ask(|size, to, ret| {
                    cl!(api, clGetKernelWorkGroupInfo(raw, device, p, size, to, ret))
                })
            }
            Target::Argument(id, index) => {
                let raw = self.backend.kernels.get(id.0)?.raw;
                ask(|size, to, ret| cl!(api, clGetKernelArgInfo(raw, *index, p, size, to, ret)))
            }
            Target::SubGroup(id, device, input) => self.sub_group_info(*id, *device, input, p),
            Target::Event(id) => self.event_info(*id, p),
            Target::Profiling(id) => self.profiling_info(*id, p),
        }
    }

    pub(super) fn device_info(&self, id: DeviceId, p: u32) -> Result<Blob, i32> {
        let &Device { raw, platform, .. } = self.backend.devices.get(id.0)?;
        if p == codes::DEVICE_SVM_CAPABILITIES && self.platform_version(platform) < 20 {
            // The driver may know the parameter, but the feature is not used with this version.
            return Err(codes::INVALID_VALUE);
        }
        let api = &self.backend.api;
        ask(|size, to, ret| cl!(api, clGetDeviceInfo(raw, p, size, to, ret)))
    }

    fn sub_group_info(
        &self,
        id: KernelId,
        device: Option<DeviceId>,
        input: &Blob,
        p: u32,
    ) -> Result<Blob, i32> {
        let kernel: &Kernel = self.backend.kernels.get(id.0)?;
        if self.platform_version(kernel.home.platform) < 21 {
            return Err(codes::INVALID_OPERATION);
        }
        let raw = kernel.raw;
        let device = self.raw_device(device)?;
        let input = &input.0;
        let from = if input.is_empty() {
            null()
        } else {
            input.as_ptr().cast()
        };
        ask(|size, to, ret| {
            cl!(
                self.backend.api,
                clGetKernelSubGroupInfo(raw, device, p, input.len(), from, size, to, ret)
            )
        })
    }

    fn event_info(&self, id: EventId, p: u32) -> Result<Blob, i32> {
        let raw = match self.backend.events.get(id.0) {
            Ok(event) => event.raw,
            // The command never reached the driver: the reason is its status.
            Err(code) if p == codes::EVENT_COMMAND_EXECUTION_STATUS => {
                return Ok(Blob(code.to_le_bytes().to_vec()));
            }
            Err(code) => return Err(code),
        };
        ask(|size, to, ret| cl!(self.backend.api, clGetEventInfo(raw, p, size, to, ret)))
    }

    fn profiling_info(&self, id: EventId, p: u32) -> Result<Blob, i32> {
        let event = self.backend.events.get(id.0);
        let event = event.map_err(|_| codes::PROFILING_INFO_NOT_AVAILABLE)?;
        if let Some(times) = &event.times {
            let time = times.iter().find(|(name, _)| *name == p);
            let (_, time) = time.ok_or(codes::PROFILING_INFO_NOT_AVAILABLE)?;
            return Ok(Blob(time.to_le_bytes().to_vec()));
        }
        let raw = event.raw;
        ask(|size, to, ret| {
            cl!(
                self.backend.api,
                clGetEventProfilingInfo(raw, p, size, to, ret)
            )
        })
    }

    pub(crate) fn timers(&mut self, device: DeviceId) -> Result<(u64, u64), i32> {
        let device = self.backend.devices.get(device.0)?;
        if self.platform_version(device.platform) < 21 {
            return Err(codes::INVALID_OPERATION);
        }
        let (mut there, mut here) = (0, 0);
        outcome(cl!(
            self.backend.api,
            clGetDeviceAndHostTimer(device.raw, &raw mut there, &raw mut here)
        ))?;
        Ok((there, here))
    }

    pub(crate) fn image_formats(&mut self, call: &ImageFormats) -> Result<Vec<(u32, u32)>, i32> {
        let context = self.backend.contexts.get(call.context.0)?.raw;
        let mut count = 0;
        let api = &self.backend.api;
        outcome(cl!(
            api,
            clGetSupportedImageFormats(
                context,
                call.flags,
                call.kind,
                0,
                null_mut(),
                &raw mut count,
            )
        ))?;
        let mut formats = vec![ImageFormat::default(); count as usize];
        if count > 0 {
            outcome(cl!(
                api,
                clGetSupportedImageFormats(
                    context,
                    call.flags,
                    call.kind,
                    count,
                    formats.as_mut_ptr(),
                    null_mut(),
                )
            ))?;
        }
        Ok(formats
            .iter()
            .map(|format| (format.order, format.data))
            .collect())
    }

    pub(crate) fn program_binaries(&mut self, id: ProgramId) -> Result<Vec<Blob>, i32> {
        let program = self.backend.programs.get(id.0)?;
        // A build changes their sizes, and the driver is not told the size when it writes them.
        if program.builds.any() {
            return Err(codes::INVALID_PROGRAM_EXECUTABLE);
        }
        let (raw, api) = (program.raw, &self.backend.api);
        let sizes = ask(|size, to, ret| {
            cl!(
                api,
                clGetProgramInfo(raw, codes::PROGRAM_BINARY_SIZES, size, to, ret)
            )
        })?;
        let sizes: Vec<usize> = sizes
            .0
            .as_chunks()
            .0
            .iter()
            .map(|size| usize::from_ne_bytes(*size))
            .collect();
        let total = sizes
            .iter()
            .try_fold(0usize, |sum, size| sum.checked_add(*size));
        if total.is_none_or(|total| total > frame::LARGEST) {
            return Err(codes::OUT_OF_HOST_MEMORY);
        }
        let mut binaries: Vec<_> = sizes.iter().map(|size| vec![0u8; *size]).collect();
        let mut pointers: Vec<_> = binaries
            .iter_mut()
            .map(|binary| {
                if binary.is_empty() {
                    null_mut()
                } else {
                    binary.as_mut_ptr()
                }
            })
            .collect();
        outcome(cl!(
            api,
            clGetProgramInfo(
                raw,
                codes::PROGRAM_BINARIES,
                size_of_val(pointers.as_slice()),
                pointers.as_mut_ptr().cast(),
                null_mut(),
            )
        ))?;
        Ok(binaries.into_iter().map(Blob).collect())
    }
}
