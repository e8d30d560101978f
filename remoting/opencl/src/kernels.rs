//! Kernels and their arguments.

use std::{
    collections::BTreeMap,
    ptr::{null, null_mut},
    sync::Arc,
};

use remoting_proto::{
    apis::opencl::{
        calls::{ArgumentKind, CloneKernel, CreateKernel, KernelId, SetArgument, Value},
        codes,
    },
    wire::Blob,
};

use super::{
    Server,
    driver::{api::Handle, c_string, cl, outcome},
    objects::{Kernel, keep, made},
    records::{Argument, Arguments},
    svm::Addresses,
    written::root,
};

/// Maximum number of refused arguments that are remembered per kernel.
const MOST_REFUSED: usize = 64;

/// The kind of value that a kernel takes as an argument.
///
/// A driver trusts whatever it is given as a handle, and takes an object of one kind for one of
/// another. A kernel may also print a handle that was passed as a number, which is an address in
/// this process. A value is therefore checked against this before the driver gets it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Parameter {
    /// The driver does not tell.
    Unknown,
    /// Plain bytes.
    Plain,
    /// Local memory.
    Local,
    /// A buffer or an address.
    Buffer,
    /// Like [`Buffer`](Self::Buffer), for memory that no kernel writes.
    Constant,
    /// An image.
    Image,
    /// An image that the kernel only reads.
    ReadOnlyImage,
    /// A sampler.
    Sampler,
    /// A device queue, which no application has.
    Queue,
}

impl Parameter {
    /// Determined by the address space, the type's name and an image's access, if they are known
    /// (clGetKernelArgInfo).
    fn new(space: Option<u32>, name: Option<&[u8]>, access: Option<u32>) -> Self {
        let Some(space) = space else {
            return Self::Unknown;
        };
        match (name, space) {
            (Some(b"sampler_t"), _) => Self::Sampler,
            (Some(b"queue_t"), _) => Self::Queue,
            (Some(name), _) if is_image(name) => match access {
                Some(codes::KERNEL_ARG_ACCESS_READ_ONLY) => Self::ReadOnlyImage,
                _ => Self::Image,
            },
            (_, codes::KERNEL_ARG_ADDRESS_LOCAL) => Self::Local,
            (_, codes::KERNEL_ARG_ADDRESS_GLOBAL) => Self::Buffer,
            (_, codes::KERNEL_ARG_ADDRESS_CONSTANT) => Self::Constant,
            _ => Self::Plain,
        }
    }

    fn takes(self, value: &Value) -> bool {
        match self {
            Self::Unknown => true,
            Self::Plain => matches!(value, Value::Bytes(_)),
            Self::Local => matches!(value, Value::Local(_)),
            Self::Buffer | Self::Constant => matches!(value, Value::Mem(_) | Value::Svm(_)),
            Self::Image | Self::ReadOnlyImage => matches!(value, Value::Mem(_)),
            Self::Sampler => matches!(value, Value::Sampler(_)),
            Self::Queue => false,
        }
    }

    /// The kind as reported to the application.
    fn kind(self) -> ArgumentKind {
        match self {
            Self::Unknown => ArgumentKind::Unknown(),
            Self::Plain | Self::Queue => ArgumentKind::Bytes(),
            Self::Local => ArgumentKind::Local(),
            Self::Buffer | Self::Constant | Self::Image | Self::ReadOnlyImage => {
                ArgumentKind::Mem()
            }
            Self::Sampler => ArgumentKind::Sampler(),
        }
    }

    /// Whether the kernel may write to the object.
    pub(crate) fn may_be_written(self) -> bool {
        !matches!(self, Self::Constant | Self::ReadOnlyImage)
    }
}

/// Whether an argument whose kind the driver does not tell may get a value, after the last one that the driver has
/// accepted. Eight plain bytes may have been a null pointer.
fn may_follow(last: Option<&Argument>, value: &Value) -> bool {
    match last {
        None | Some(Argument::Lost) => true,
        Some(Argument::Bytes(bytes)) => {
            bytes.len() == size_of::<Handle>() || matches!(value, Value::Bytes(_))
        }
        Some(Argument::Mem(_) | Argument::Svm(_)) => {
            matches!(value, Value::Mem(_) | Value::Svm(_))
        }
        Some(Argument::Sampler(_)) => matches!(value, Value::Sampler(_)),
        Some(Argument::Local(_)) => matches!(value, Value::Local(_)),
    }
}

/// Whether a type is an image type (OpenCL C 3.0, 6.3.3), and not a pointer to a type with a
/// similar name.
fn is_image(name: &[u8]) -> bool {
    let begins = [&b"image1d_"[..], b"image2d_", b"image3d_"];
    begins.iter().any(|begin| name.starts_with(begin)) && name.ends_with(b"_t")
}

impl Kernel {
    /// Remembers that the driver has refused an argument's value.
    pub(crate) fn refuse(&mut self, index: u32, code: i32) {
        // A driver refuses indices beyond the kernel's arguments, so legitimate ones are few.
        if self.refused.len() < MOST_REFUSED {
            self.refused.insert(index, code);
        }
    }
}

impl Server {
    pub(crate) fn create_kernel(&mut self, call: &CreateKernel) -> Result<Vec<ArgumentKind>, i32> {
        self.backend.kernels.check(call.id.0)?;
        let program = self.backend.programs.get(call.program.0)?;
        let (home, record) = (program.home, Arc::clone(&program.record));
        let is_untold = program.untold.any();
        let name = c_string(&call.name);
        let mut code = 0;
        let raw = cl!(
            self.backend.api,
            clCreateKernel(program.raw, name.as_ptr(), &raw mut code)
        );
        let raw = made(raw, code)?;
        let parameters = self.parameters(raw);
        let kinds = parameters.iter().map(|parameter| parameter.kind());
        let kinds = kinds.collect();
        let kernel = Kernel {
            raw,
            program: record,
            is_untold,
            name: call.name.clone(),
            arguments: Arguments::default(),
            home,
            refused: BTreeMap::new(),
            addresses: Addresses::default(),
            parameters: parameters.into(),
        };
        self.backend.kernels.put(call.id.0, Ok(kernel));
        Ok(kinds)
    }

    /// Queries the kernel's arguments once, as far as the driver tells.
    fn parameters(&self, kernel: Handle) -> Vec<Parameter> {
        let mut count = 0u32;
        cl!(
            self.backend.api,
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
                let number = |of: u32| {
                    let mut number = 0u32;
                    let code = cl!(
                        self.backend.api,
                        clGetKernelArgInfo(
                            kernel,
                            index,
                            of,
                            size_of::<u32>(),
                            (&raw mut number).cast(),
                            null_mut(),
                        )
                    );
                    (code == 0).then_some(number)
                };
                let space = number(codes::KERNEL_ARG_ADDRESS_QUALIFIER);
                let mut name = [0u8; 128];
                let mut length = 0;
                let named = cl!(
                    self.backend.api,
                    clGetKernelArgInfo(
                        kernel,
                        index,
                        codes::KERNEL_ARG_TYPE_NAME,
                        name.len(),
                        name.as_mut_ptr().cast(),
                        &raw mut length,
                    )
                );
                let name = (named == 0).then(|| name.split(|byte| *byte == 0).next());
                let access = number(codes::KERNEL_ARG_ACCESS_QUALIFIER);
                Parameter::new(space, name.flatten(), access)
            })
            .collect()
    }

    pub(crate) fn clone_kernel(&mut self, call: &CloneKernel) -> Result<(), i32> {
        self.backend.kernels.check(call.id.0)?;
        let of = self.backend.kernels.get(call.of.0)?;
        let (home, refused, addresses) = (of.home, of.refused.clone(), of.addresses.clone());
        let (program, name) = (Arc::clone(&of.program), of.name.clone());
        let is_untold = of.is_untold;
        let (arguments, parameters) = (of.arguments.clone(), Arc::clone(&of.parameters));
        if self.platform_version(home.platform) < 21 {
            return Err(codes::INVALID_OPERATION);
        }
        let mut code = 0;
        let raw = cl!(self.backend.api, clCloneKernel(of.raw, &raw mut code));
        let kernel = made(raw, code).map(|raw| Kernel {
            raw,
            program,
            is_untold,
            name,
            arguments,
            home,
            refused,
            addresses,
            parameters,
        });
        keep!(self.backend.kernels, call.id, kernel)
    }

    pub(crate) fn release_kernel(&mut self, id: KernelId) -> Result<(), i32> {
        match self.backend.kernels.take(id.0) {
            Some(kernel) => outcome(cl!(self.backend.api, clReleaseKernel(kernel.raw))),
            None => Ok(()),
        }
    }

    pub(crate) fn set_argument(&mut self, call: &SetArgument) -> Result<(), i32> {
        let Kernel {
            raw,
            home,
            arguments,
            parameters,
            ..
        } = self.backend.kernels.get(call.kernel.0)?;
        let (kernel, home) = (*raw, *home);
        // The driver refuses indices beyond the kernel's arguments.
        let parameter = parameters.get(call.index as usize);
        let refused = match parameter {
            Some(Parameter::Unknown) => !may_follow(arguments.get(call.index), &call.value),
            Some(parameter) => !parameter.takes(&call.value),
            None => false,
        };
        if refused {
            return Err(codes::INVALID_ARG_VALUE);
        }
        let handle;
        let mut birth = 0;
        let (size, pointer) = match &call.value {
            Value::Bytes(Blob(bytes)) => (bytes.len(), bytes.as_ptr().cast()),
            Value::Mem(None) => (size_of::<Handle>(), null()),
            Value::Mem(Some(id)) => {
                let mem = self.backend.mems.get(id.0)?;
                root(&mem.record).touched.all();
                handle = mem.raw;
                birth = self.backend.mems.birth(id.0);
                (size_of::<Handle>(), (&raw const handle).cast())
            }
            Value::Sampler(id) => {
                handle = self.backend.samplers.get(id.0)?.raw;
                birth = self.backend.samplers.birth(id.0);
                (size_of::<Handle>(), (&raw const handle).cast())
            }
            Value::Local(size) => (*size as usize, null()),
            Value::Svm(address) => {
                // Drivers before OpenCL 2.0 have no such function, not even for null.
                if !home.svm {
                    return Err(codes::INVALID_OPERATION);
                }
                let pointer = match address {
                    None => null_mut(),
                    // Kernels are not trusted with the memory around it any more than with that
                    // around buffers.
                    Some(address) => (self.backend.svm.at(home.raw, *address, 1))
                        .ok_or(codes::INVALID_ARG_VALUE)?,
                };
                outcome(cl!(
                    self.backend.api,
                    clSetKernelArgSVMPointer(kernel, call.index, pointer.cast())
                ))?;
                let kernel = self.backend.kernels.get_mut(call.kernel.0)?;
                kernel.addresses.set(call.index, *address);
                kernel.arguments.set(call.index, &call.value, 0);
                return Ok(());
            }
        };
        outcome(cl!(
            self.backend.api,
            clSetKernelArg(kernel, call.index, size, pointer)
        ))?;
        let kernel = self.backend.kernels.get_mut(call.kernel.0)?;
        kernel.addresses.set(call.index, None);
        kernel.arguments.set(call.index, &call.value, birth);
        Ok(())
    }

    /// Remembers whether the driver has refused an argument's value that nobody `awaits`, until the
    /// argument gets another value. Until then enqueuing the kernel fails, because its current
    /// value is not the intended one.
    pub(crate) fn note_argument(
        &mut self,
        call: &SetArgument,
        outcome: Result<(), i32>,
        awaits: bool,
    ) {
        if let Ok(kernel) = self.backend.kernels.get_mut(call.kernel.0) {
            match outcome {
                Err(code) if !awaits => kernel.refuse(call.index, code),
                Err(_) => {}
                Ok(()) => {
                    kernel.refused.remove(&call.index);
                }
            }
        }
    }
}
