//! Kernels and their arguments.

use std::{
    collections::BTreeMap,
    ptr::{null, null_mut},
    sync::Arc,
};

use super::{
    objects::{Kernel, keep, made},
    records::Arguments,
    server::{Server, c_string, cl, outcome},
    svm::Addresses,
};
use crate::{
    opencl::{api::Handle, codes},
    protocol::{
        Blob,
        calls::{ArgumentKind, CloneKernel, CreateKernel, KernelId, SetArgument, Value},
    },
};

/// How many refused arguments of a kernel are remembered.
const MOST_REFUSED: usize = 64;

/// Whether the value of such an argument is a handle of the driver.
fn is_handle(kind: &ArgumentKind) -> bool {
    matches!(kind, ArgumentKind::Mem() | ArgumentKind::Sampler())
}

impl Server {
    pub(super) fn create_kernel(&mut self, call: &CreateKernel) -> Result<Vec<ArgumentKind>, i32> {
        self.kernels.check(call.id.0)?;
        let program = self.programs.get(call.program.0)?;
        let (home, record) = (program.home, Arc::clone(&program.record));
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
            program: record,
            name: call.name.clone(),
            arguments: Arguments::default(),
            home,
            refused: BTreeMap::new(),
            addresses: Addresses::default(),
            kinds: kinds.clone().into(),
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
        let (home, refused, addresses) = (of.home, of.refused.clone(), of.addresses.clone());
        let (program, name) = (Arc::clone(&of.program), of.name.clone());
        let (arguments, kinds) = (of.arguments.clone(), Arc::clone(&of.kinds));
        if self.platform_version(home.platform) < 21 {
            return Err(codes::INVALID_OPERATION);
        }
        let mut code = 0;
        let raw = cl!(self.api, clCloneKernel(of.raw, &raw mut code));
        let kernel = made(raw, code).map(|raw| Kernel {
            raw,
            program,
            name,
            arguments,
            home,
            refused,
            addresses,
            kinds,
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
        let Kernel {
            raw, home, kinds, ..
        } = self.kernels.get(call.kernel.0)?;
        let (kernel, home) = (*raw, *home);
        let handle;
        let mut birth = 0;
        let (size, pointer) = match &call.value {
            // The driver would take them for a handle, and believe it.
            Value::Bytes(_) if kinds.get(call.index as usize).is_some_and(is_handle) => {
                return Err(codes::INVALID_ARG_VALUE);
            }
            Value::Bytes(Blob(bytes)) => (bytes.len(), bytes.as_ptr().cast()),
            Value::Mem(None) => (size_of::<Handle>(), null()),
            Value::Mem(Some(id)) => {
                handle = self.mems.get(id.0)?.raw;
                birth = self.mems.birth(id.0);
                (size_of::<Handle>(), (&raw const handle).cast())
            }
            Value::Sampler(id) => {
                handle = self.samplers.get(id.0)?.raw;
                birth = self.samplers.birth(id.0);
                (size_of::<Handle>(), (&raw const handle).cast())
            }
            Value::Local(size) => (*size as usize, null()),
            Value::Svm(address) => {
                // Drivers from before OpenCL 2.0 have no such function, not even for null.
                if !home.svm {
                    return Err(codes::INVALID_OPERATION);
                }
                let pointer = match address {
                    None => null_mut(),
                    // Kernels are trusted with what lies around it no more than with buffers.
                    Some(address) => {
                        (self.svm.at(home.raw, *address, 1)).ok_or(codes::INVALID_ARG_VALUE)?
                    }
                };
                outcome(cl!(
                    self.api,
                    clSetKernelArgSVMPointer(kernel, call.index, pointer.cast())
                ))?;
                let kernel = self.kernels.get_mut(call.kernel.0)?;
                kernel.addresses.set(call.index, *address);
                kernel.arguments.set(call.index, &call.value, 0);
                return Ok(());
            }
        };
        outcome(cl!(
            self.api,
            clSetKernelArg(kernel, call.index, size, pointer)
        ))?;
        let kernel = self.kernels.get_mut(call.kernel.0)?;
        kernel.addresses.set(call.index, None);
        kernel.arguments.set(call.index, &call.value, birth);
        Ok(())
    }

    /// Remembers whether the driver has refused an argument's value, which nobody `awaits`, until
    /// it gets another one: enqueuing the kernel fails meanwhile, since the value that it has is
    /// not the one that it was to have.
    pub(super) fn note_argument(
        &mut self,
        call: &SetArgument,
        outcome: Result<(), i32>,
        awaits: bool,
    ) {
        if let Ok(kernel) = self.kernels.get_mut(call.kernel.0) {
            match outcome {
                // A driver refuses indices beyond the kernel's arguments: their number is small.
                Err(code) if !awaits && kernel.refused.len() < MOST_REFUSED => {
                    kernel.refused.insert(call.index, code);
                }
                Err(_) => {}
                Ok(()) => {
                    kernel.refused.remove(&call.index);
                }
            }
        }
    }
}
