//! The part of NVIDIA's driver API that is used: public functions only, looked up at run time in `libcuda.so.1`.
//! Signatures are those of the CUDA driver API's documentation, with handles as plain numbers.

#![allow(non_snake_case)]

use std::{
    any::Any,
    ffi::{CStr, CString, c_char, c_int, c_uint, c_void},
    sync::Arc,
};

mod freed;
mod grants;

pub use grants::GrantPage;

use freed::Freed;

use crate::{layout::Ctl, memory::Memory};

/// An object of the driver.
type Handle = usize;
/// An address of device memory.
pub type Address = u64;

/// `CUDA_ERROR_NOT_READY`.
const NOT_READY: c_int = 600;

/// Why the GPU cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no driver.
    #[error("cannot open {library}: install NVIDIA's driver (it has libcuda.so.1)")]
    Open {
        /// The library that was to be opened.
        library: &'static str,
        /// Why it could not be opened.
        source: libloading::Error,
    },
    /// The driver is too old.
    #[error("the CUDA driver has no {function}: CUDA 11 or later is needed")]
    Missing {
        /// The missing function.
        function: &'static str,
        /// Why it could not be found.
        source: libloading::Error,
    },
    /// A call has failed.
    #[error("{function} failed: {name} ({code})")]
    Call {
        /// The function.
        function: &'static str,
        /// The error's name.
        name: String,
        /// The error's number.
        code: c_int,
    },
    /// A name contains a zero byte.
    #[error("a kernel's name has no zero bytes")]
    Name,
    /// Host memory could not be allocated.
    #[error("cannot allocate {bytes} bytes of the host's memory for the GPU")]
    Memory {
        /// The number of bytes.
        bytes: usize,
        /// Why it failed.
        source: std::io::Error,
    },
}

macro_rules! api {
    ($(fn $name:ident $symbol:literal ($($arg:ident: $type:ty),*);)*) => {
        struct Api {
            $($name: unsafe extern "C" fn($($type),*) -> c_int,)*
            _library: libloading::Library,
        }

        impl Api {
            fn open() -> Result<Self, Error> {
                const LIBRARY: &str = "libcuda.so.1";
                // SAFETY: the driver's initializers make no demands on their caller.
                let library = unsafe { libloading::Library::new(LIBRARY) }
                    .map_err(|source| Error::Open { library: LIBRARY, source })?;
                Ok(Self {
                    $($name: {
                        // SAFETY: the signature is the documentation's.
                        *unsafe {
                            library.get::<unsafe extern "C" fn($($type),*) -> c_int>(
                                concat!($symbol, "\0").as_bytes(),
                            )
                        }
                        .map_err(|source| Error::Missing { function: $symbol, source })?
                    },)*
                    _library: library,
                })
            }

            $(
                /// # Safety
                /// As the documentation requires: live handles, and valid pointers to what is read or written.
                #[allow(clippy::too_many_arguments, dead_code)]
                unsafe fn $name(&self, $($arg: $type),*) -> Result<(), Error> {
                    // SAFETY: passed on to the caller.
                    let code = unsafe { (self.$name)($($arg),*) };
                    self.check($symbol, code)
                }
            )*
        }
    };
}

api! {
    fn init "cuInit" (flags: c_uint);
    fn device "cuDeviceGet" (device: *mut c_int, ordinal: c_int);
    fn device_name "cuDeviceGetName" (name: *mut c_char, length: c_int, device: c_int);
    fn attribute "cuDeviceGetAttribute" (value: *mut c_int, attribute: c_int, device: c_int);
    fn retain "cuDevicePrimaryCtxRetain" (context: *mut Handle, device: c_int);
    fn release "cuDevicePrimaryCtxRelease_v2" (device: c_int);
    fn set_current "cuCtxSetCurrent" (context: Handle);
    fn load "cuModuleLoadData" (module: *mut Handle, image: *const c_void);
    fn unload "cuModuleUnload" (module: Handle);
    fn function "cuModuleGetFunction" (function: *mut Handle, module: Handle, name: *const c_char);
    fn allocate "cuMemAlloc_v2" (at: *mut Address, bytes: usize);
    fn free "cuMemFree_v2" (at: Address);
    fn set_async "cuMemsetD8Async" (at: Address, value: u8, bytes: usize, stream: Handle);
    fn write "cuMemcpyHtoDAsync_v2" (to: Address, from: *const c_void, bytes: usize, stream: Handle);
    fn read "cuMemcpyDtoHAsync_v2" (to: *mut c_void, from: Address, bytes: usize, stream: Handle);
    fn register "cuMemHostRegister_v2" (at: *mut c_void, bytes: usize, flags: c_uint);
    fn unregister "cuMemHostUnregister" (at: *mut c_void);
    fn device_pointer "cuMemHostGetDevicePointer_v2" (to: *mut Address, at: *mut c_void, flags: c_uint);
    fn stream "cuStreamCreate" (stream: *mut Handle, flags: c_uint);
    fn destroy "cuStreamDestroy_v2" (stream: Handle);
    fn query "cuStreamQuery" (stream: Handle);
    fn synchronize "cuStreamSynchronize" (stream: Handle);
    fn launch "cuLaunchKernel" (
        function: Handle, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint,
        block_y: c_uint, block_z: c_uint, shared: c_uint, stream: Handle,
        parameters: *mut *mut c_void, extra: *mut *mut c_void
    );
    fn occupancy "cuOccupancyMaxActiveBlocksPerMultiprocessor" (
        blocks: *mut c_int, function: Handle, threads: c_int, shared: usize
    );
    fn error_name "cuGetErrorName" (error: c_int, name: *mut *const c_char);
}

impl Api {
    fn check(&self, function: &'static str, code: c_int) -> Result<(), Error> {
        if code == 0 {
            return Ok(());
        }
        let mut name = std::ptr::null();
        // SAFETY: returns a pointer to a constant, or null.
        let found = unsafe { (self.error_name)(code, &mut name) } == 0 && !name.is_null();
        let name = if found {
            // SAFETY: a constant of the driver's, terminated by a zero.
            unsafe { CStr::from_ptr(name) }
                .to_string_lossy()
                .into_owned()
        } else {
            "an unknown error".to_owned()
        };
        Err(Error::Call {
            function,
            name,
            code,
        })
    }
}

/// A GPU, through its primary context.
pub struct Gpu {
    api: Api,
    device: c_int,
    context: Handle,
    /// A stream for copies that do not wait for kernels on other streams.
    copies: Handle,
    freed: Freed,
    /// The GPU's name.
    pub name: String,
    /// The number of its multiprocessors.
    pub processors: u32,
    /// Its clock rate in kHz.
    pub clock: u32,
    /// The architecture of its code, such as `sm_90`.
    pub architecture: String,
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gpu")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

impl Gpu {
    /// Opens the GPU with this number.
    ///
    /// # Errors
    /// There is no driver, or no such GPU.
    pub fn open(number: u32) -> Result<Arc<Self>, Error> {
        let api = Api::open()?;
        let (mut device, mut context, mut copies) = (0, 0, 0);
        let mut name = [0; 256];
        // SAFETY: the results are locals of the given size.
        unsafe {
            api.init(0)?;
            api.device(&mut device, number as c_int)?;
            api.device_name(name.as_mut_ptr(), name.len() as c_int, device)?;
            api.retain(&mut context, device)?;
            api.set_current(context)?;
            api.stream(&mut copies, 1)?;
        }
        let attribute = |which| {
            let mut value = 0;
            // SAFETY: the result is a local.
            unsafe { api.attribute(&mut value, which, device) }.map(|()| value.unsigned_abs())
        };
        let processors = attribute(16)?;
        let clock = attribute(13)?;
        let (major, minor) = (attribute(75)?, attribute(76)?);
        // SAFETY: a zero-terminated name in a local.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }
            .to_string_lossy()
            .into_owned();
        Ok(Arc::new(Self {
            api,
            device,
            context,
            copies,
            freed: Freed::default(),
            name,
            processors,
            clock,
            architecture: format!("sm_{major}{minor}"),
        }))
    }

    /// The driver, with this GPU selected for the calling thread.
    fn api(&self) -> Result<&Api, Error> {
        // SAFETY: the context is live.
        unsafe { self.api.set_current(self.context) }?;
        Ok(&self.api)
    }

    /// Called before a kernel is launched that only ends when it is told to.
    pub(crate) fn kernel_begins(&self) {
        self.freed.begins();
    }

    /// Called when one of these has ended.
    pub(crate) fn kernel_ends(&self) {
        let memory = self.freed.ends();
        if memory.is_empty() {
            return;
        }
        if let Ok(api) = self.api() {
            for at in memory {
                // SAFETY: its owner is gone, and so is everything that used it.
                let _ = unsafe { api.free(at) };
            }
        }
    }

    /// Loads code: a cubin, a fatbin, or PTX terminated by a zero.
    ///
    /// # Errors
    /// It is not code for this GPU.
    pub fn load(self: &Arc<Self>, image: &[u8]) -> Result<Module, Error> {
        let mut image = image.to_vec();
        image.push(0);
        let mut handle = 0;
        // SAFETY: the image is complete, and terminated by a zero.
        unsafe { self.api()?.load(&mut handle, image.as_ptr().cast()) }?;
        Ok(Module(Arc::new(Loaded {
            gpu: Arc::clone(self),
            handle,
        })))
    }

    /// Allocates device memory that is all zero.
    ///
    /// # Errors
    /// There is not enough memory.
    pub fn allocate(self: &Arc<Self>, bytes: usize) -> Result<Buffer, Error> {
        let bytes = bytes.max(1);
        let mut at = 0;
        let api = self.api()?;
        // SAFETY: the result is a local; what is set was just allocated.
        unsafe {
            api.allocate(&mut at, bytes)?;
        }
        let buffer = Buffer {
            gpu: Arc::clone(self),
            at,
            bytes,
        };
        buffer.clear()?;
        Ok(buffer)
    }

    /// Allocates device memory with these values.
    ///
    /// # Errors
    /// There is not enough memory.
    pub fn upload<T: Copy>(self: &Arc<Self>, values: &[T]) -> Result<Buffer, Error> {
        let buffer = self.allocate(size_of_val(values))?;
        let api = self.api()?;
        // SAFETY: both sides have this many bytes.
        unsafe {
            api.write(
                buffer.at,
                values.as_ptr().cast(),
                size_of_val(values),
                self.copies,
            )?;
            api.synchronize(self.copies)?;
        }
        Ok(buffer)
    }

    /// Allows the GPU to access host memory until the result, which owns the memory, is dropped.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn register<M: AsRef<Memory>>(self: &Arc<Self>, memory: M) -> Result<Registered<M>, Error> {
        // Portable, and mapped for the device.
        const FLAGS: c_uint = 1 | 2;
        let api = self.api()?;
        let (at, bytes) = (memory.as_ref().at(), memory.as_ref().bytes());
        let mut device = 0;
        // SAFETY: the memory is mapped, and exists while it is registered.
        unsafe {
            api.register(at.cast(), bytes, FLAGS)?;
        }
        let mut registered = Registered {
            gpu: Arc::clone(self),
            memory,
            device: 0,
        };
        // SAFETY: it was just registered.
        unsafe { api.device_pointer(&mut device, at.cast(), 0) }?;
        registered.device = device;
        Ok(registered)
    }

    /// Creates a stream that waits for no other.
    ///
    /// # Errors
    /// The driver cannot create one.
    pub fn stream(self: &Arc<Self>) -> Result<Stream, Error> {
        let mut handle = 0;
        // SAFETY: the result is a local.
        unsafe { self.api()?.stream(&mut handle, 1) }?;
        Ok(Stream {
            gpu: Arc::clone(self),
            handle,
        })
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // SAFETY: nothing of it is in use any longer: everything in use holds a reference.
        unsafe {
            let _ = self.api.set_current(self.context);
            let _ = self.api.destroy(self.copies);
            let _ = self.api.release(self.device);
        }
    }
}

#[derive(Debug)]
struct Loaded {
    gpu: Arc<Gpu>,
    handle: Handle,
}

impl Drop for Loaded {
    fn drop(&mut self) {
        if let Ok(api) = self.gpu.api() {
            // SAFETY: no kernel of it is left.
            let _ = unsafe { api.unload(self.handle) };
        }
    }
}

/// Loaded code.
#[derive(Clone, Debug)]
pub struct Module(Arc<Loaded>);

impl Module {
    /// A kernel, by its name.
    ///
    /// # Errors
    /// There is no kernel of this name.
    pub fn kernel(&self, name: &str) -> Result<Kernel, Error> {
        let name = CString::new(name).map_err(|_| Error::Name)?;
        let mut handle = 0;
        // SAFETY: the module is loaded, and the name is terminated by a zero.
        unsafe {
            let api = self.0.gpu.api()?;
            api.function(&mut handle, self.0.handle, name.as_ptr())?;
        }
        Ok(Kernel {
            module: self.clone(),
            handle,
        })
    }
}

/// A kernel.
#[derive(Clone, Debug)]
pub struct Kernel {
    module: Module,
    handle: Handle,
}

impl Kernel {
    /// The number of blocks, of this many threads and bytes of dynamic shared memory, that run concurrently on the
    /// whole GPU.
    ///
    /// # Errors
    /// A block cannot be that large.
    pub fn resident(&self, threads: u32, shared: u32) -> Result<u32, Error> {
        let gpu = &self.module.0.gpu;
        let mut blocks = 0;
        // SAFETY: the kernel is loaded.
        unsafe {
            let api = gpu.api()?;
            api.occupancy(&mut blocks, self.handle, threads as c_int, shared as usize)?;
        }
        Ok(blocks.unsigned_abs().max(1) * gpu.processors)
    }
}

/// A kernel's parameters, in order. Each has the size of its C type.
#[derive(Debug, Default)]
pub struct Args(Vec<Box<dyn Any + Send>>);

impl Args {
    /// No parameters.
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends a parameter.
    #[must_use]
    pub fn with<T: Copy + Send + 'static>(mut self, value: T) -> Self {
        self.0.push(Box::new(value));
        self
    }

    /// Appends a C structure, as bytes with an alignment of 16.
    #[must_use]
    pub fn with_bytes(mut self, bytes: &[u8]) -> Self {
        let mut lines = vec![0u128; bytes.len().div_ceil(16)].into_boxed_slice();
        for (line, part) in lines.iter_mut().zip(bytes.chunks(16)) {
            let mut whole = [0; 16];
            whole[..part.len()].copy_from_slice(part);
            *line = u128::from_le_bytes(whole);
        }
        // The box of a slice is a fat pointer; its contents are what is needed.
        self.0.push(Box::new(Raw(lines)));
        self
    }

    fn pointers(&self) -> impl Iterator<Item = *mut c_void> + '_ {
        self.0
            .iter()
            .map(|value| match value.downcast_ref::<Raw>() {
                Some(Raw(lines)) => lines.as_ptr().cast_mut().cast(),
                None => (&raw const **value).cast_mut().cast(),
            })
    }
}

struct Raw(Box<[u128]>);

/// Device memory. Freeing it waits for the kernels of this process.
#[derive(Debug)]
pub struct Buffer {
    gpu: Arc<Gpu>,
    at: Address,
    bytes: usize,
}

impl Buffer {
    /// Its address.
    pub fn at(&self) -> Address {
        self.at
    }

    /// Sets all bytes to zero.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn clear(&self) -> Result<(), Error> {
        let api = self.gpu.api()?;
        // SAFETY: it has this many bytes.
        unsafe {
            api.set_async(self.at, 0, self.bytes, self.gpu.copies)?;
            api.synchronize(self.gpu.copies)
        }
    }

    /// Copies it to the host: as many values as fit.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn download<T: Plain>(&self) -> Result<Vec<T>, Error> {
        let count = self.bytes / size_of::<T>();
        let mut values = Vec::<T>::with_capacity(count);
        let api = self.gpu.api()?;
        // SAFETY: there is room for this many, and every bit pattern is a valid value.
        unsafe {
            let bytes = count * size_of::<T>();
            api.read(values.as_mut_ptr().cast(), self.at, bytes, self.gpu.copies)?;
            api.synchronize(self.gpu.copies)?;
            values.set_len(count);
        }
        Ok(values)
    }
}

impl Drop for Buffer {
    /// While any job runs the memory is kept: the driver frees nothing while a kernel runs.
    fn drop(&mut self) {
        if self.gpu.freed.free(self.at)
            && let Ok(api) = self.gpu.api()
        {
            // SAFETY: whatever used it has ended, or waits for this.
            let _ = unsafe { api.free(self.at) };
        }
    }
}

/// Types for which every bit pattern is valid.
///
/// # Safety
/// There is no invalid bit pattern, and no padding.
pub unsafe trait Plain: Copy {}
// SAFETY: every bit pattern is a valid number.
unsafe impl Plain for u8 {}
// SAFETY: every bit pattern is a valid number.
unsafe impl Plain for u32 {}
// SAFETY: every bit pattern is a valid number.
unsafe impl Plain for u64 {}
// SAFETY: every bit pattern is a valid number.
unsafe impl Plain for i64 {}
// SAFETY: every bit pattern is a valid number.
unsafe impl Plain for f32 {}

/// Host memory that the GPU can access.
#[derive(Debug)]
pub struct Registered<M: AsRef<Memory>> {
    gpu: Arc<Gpu>,
    memory: M,
    device: Address,
}

impl<M: AsRef<Memory>> Registered<M> {
    /// Its address for the GPU.
    pub fn device(&self) -> Address {
        self.device
    }

    /// The memory.
    pub fn memory(&self) -> &Memory {
        self.memory.as_ref()
    }
}

impl<M: AsRef<Memory>> Drop for Registered<M> {
    fn drop(&mut self) {
        if let Ok(api) = self.gpu.api() {
            // SAFETY: it was registered, and is still mapped.
            let _ = unsafe { api.unregister(self.memory.as_ref().at().cast()) };
        }
    }
}

impl AsRef<Memory> for Memory {
    fn as_ref(&self) -> &Memory {
        self
    }
}

/// A stream of kernels that run in order.
#[derive(Debug)]
pub struct Stream {
    gpu: Arc<Gpu>,
    handle: Handle,
}

impl Stream {
    /// Launches a kernel, with a control block before its parameters if it takes one. Returns before it ends.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn launch(
        &self,
        kernel: &Kernel,
        blocks: u32,
        threads: u32,
        shared: u32,
        ctl: Option<&Ctl>,
        args: &Args,
    ) -> Result<(), Error> {
        let ctl = ctl.map(|ctl| (&raw const *ctl).cast_mut().cast());
        let mut parameters: Vec<_> = ctl.into_iter().chain(args.pointers()).collect();
        // SAFETY: the caller is responsible for the parameters, as for the kernel: what it does with the GPU's memory
        // only harms this process's context.
        unsafe {
            self.gpu.api()?.launch(
                kernel.handle,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                shared,
                self.handle,
                parameters.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        }
    }

    /// Whether all kernels have ended.
    ///
    /// # Errors
    /// One of them has failed.
    pub fn idle(&self) -> Result<bool, Error> {
        // SAFETY: the stream is live.
        match unsafe { self.gpu.api()?.query(self.handle) } {
            Ok(()) => Ok(true),
            Err(Error::Call { code, .. }) if code == NOT_READY => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Waits until all kernels have ended.
    ///
    /// # Errors
    /// One of them has failed.
    pub fn wait(&self) -> Result<(), Error> {
        // SAFETY: the stream is live.
        unsafe { self.gpu.api()?.synchronize(self.handle) }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Ok(api) = self.gpu.api() {
            // SAFETY: the driver keeps it until its kernels have ended.
            let _ = unsafe { api.destroy(self.handle) };
        }
    }
}
