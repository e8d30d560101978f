//! The first device that the loader finds, with a context, a queue, and kernels.

// Each program uses only a part of this.
#![allow(dead_code, unused_imports)]

use std::{
    ffi::{CStr, c_void},
    fmt, fs,
    path::Path,
    ptr::{null, null_mut},
};

use remoting_opencl::driver::{
    Api,
    api::{ContextCallback, Handle},
};
use remoting_proto::apis::opencl::codes;

/// Calls the driver.
macro_rules! cl {
    ($api:expr, $name:ident($($arg:expr),* $(,)?)) => {{
        let api = &$api;
        // SAFETY: handles are live until the end of the program, and pointers are to locals of the
        // sizes that are passed along.
        unsafe { api.$name($($arg),*) }
    }};
}

pub(crate) use cl;

/// A call that returned an error code.
#[derive(Clone, Copy, Debug)]
pub struct Failed {
    pub what: &'static str,
    pub code: i32,
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} failed with code {}", self.what, self.code)
    }
}

impl From<Failed> for String {
    fn from(failed: Failed) -> Self {
        failed.to_string()
    }
}

/// Turns an error code into an error that names what failed.
pub fn check(code: i32, what: &'static str) -> Result<(), Failed> {
    match code {
        0 => Ok(()),
        code => Err(Failed { what, code }),
    }
}

/// An open device.
pub struct Device {
    pub api: Api,
    pub platform: Handle,
    pub id: Handle,
    pub context: Handle,
    pub queue: Handle,
}

impl Device {
    /// Opens the device through the loader that `OPENCL_LOADER` names, or the default one. Reports
    /// about the context go to `report`, with the pointer.
    pub fn open(report: Option<(ContextCallback, *const c_void)>) -> Result<Self, Failed> {
        let loader = std::env::var("OPENCL_LOADER");
        let loader = loader.as_deref().unwrap_or("libOpenCL.so.1");
        let api = Api::open(loader).map_err(|_| Failed {
            what: "opening the OpenCL loader",
            // What loaders return if there is no platform.
            code: -1001,
        })?;
        let (mut platform, mut id, mut code) = (0, 0, 0);
        let found = cl!(api, clGetPlatformIDs(1, &raw mut platform, null_mut()));
        check(found, "finding a platform")?;
        let all = u64::from(u32::MAX);
        let found = cl!(
            api,
            clGetDeviceIDs(platform, all, 1, &raw mut id, null_mut())
        );
        check(found, "finding a device")?;
        let (callback, data) = report.unzip();
        let data = data.unwrap_or(null()).cast_mut();
        let context = cl!(
            api,
            clCreateContext(null(), 1, &raw const id, callback, data, &raw mut code)
        );
        check(code, "creating a context")?;
        let queue = cl!(api, clCreateCommandQueue(context, id, 0, &raw mut code));
        check(code, "creating a queue")?;
        Ok(Self {
            api,
            platform,
            id,
            context,
            queue,
        })
    }

    /// Builds a program and creates these kernels from it.
    pub fn kernels<const N: usize>(
        &self,
        source: &CStr,
        names: [&CStr; N],
    ) -> Result<[Handle; N], Failed> {
        let text = source.as_ptr();
        let mut code = 0;
        let program = cl!(
            self.api,
            clCreateProgramWithSource(self.context, 1, &raw const text, null(), &raw mut code)
        );
        check(code, "creating a program")?;
        self.build(program)?;
        self.kernels_of(program, names)
    }

    /// The same. Nothing is compiled if the file contains what [`keep`](Self::keep) has written.
    pub fn kernels_kept<const N: usize>(
        &self,
        file: Option<&Path>,
        source: &CStr,
        names: [&CStr; N],
    ) -> Result<[Handle; N], Failed> {
        match file.map(fs::read) {
            Some(Ok(binary)) => self.kernels_of(self.program_of(&binary)?, names),
            _ => self.kernels(source, names),
        }
    }

    /// Writes the compiled program of a kernel to a file, unless it exists. A driver may compile a
    /// kernel once more when it runs; the result then includes that, too.
    pub fn keep(&self, file: &Path, kernel: Handle) -> Result<(), Failed> {
        if file.exists() {
            return Ok(());
        }
        fs::write(file, self.binary(kernel)?).map_err(|error| Failed {
            what: "writing the binary",
            code: -error.raw_os_error().unwrap_or(1),
        })
    }

    /// Builds a program for the device.
    pub fn build(&self, program: Handle) -> Result<(), Failed> {
        let built = cl!(
            self.api,
            clBuildProgram(program, 0, null(), c"".as_ptr(), None, null_mut())
        );
        check(built, "building the program")
    }

    /// Creates these kernels from a program that has been built.
    pub fn kernels_of<const N: usize>(
        &self,
        program: Handle,
        names: [&CStr; N],
    ) -> Result<[Handle; N], Failed> {
        let mut code = 0;
        let mut kernels = [0; N];
        for (kernel, name) in kernels.iter_mut().zip(names) {
            *kernel = cl!(
                self.api,
                clCreateKernel(program, name.as_ptr(), &raw mut code)
            );
            check(code, "creating a kernel")?;
        }
        Ok(kernels)
    }

    /// Creates a program that was compiled for this device before, from what
    /// [`binary`](Self::binary) returned.
    pub fn program_of(&self, binary: &[u8]) -> Result<Handle, Failed> {
        let (bytes, length) = (binary.as_ptr(), binary.len());
        let (mut status, mut code) = (0, 0);
        let program = cl!(
            self.api,
            clCreateProgramWithBinary(
                self.context,
                1,
                &raw const self.id,
                &raw const length,
                &raw const bytes,
                &raw mut status,
                &raw mut code
            )
        );
        check(code, "creating a program of a binary")?;
        self.build(program)?;
        Ok(program)
    }

    /// The compiled program of a kernel.
    pub fn binary(&self, kernel: Handle) -> Result<Vec<u8>, Failed> {
        let (mut program, mut size) = (0usize, 0usize);
        let to = (&raw mut program).cast();
        let got = cl!(
            self.api,
            clGetKernelInfo(kernel, codes::KERNEL_PROGRAM, 8, to, null_mut())
        );
        check(got, "asking for a program")?;
        let to = (&raw mut size).cast();
        let got = cl!(
            self.api,
            clGetProgramInfo(program, codes::PROGRAM_BINARY_SIZES, 8, to, null_mut())
        );
        check(got, "asking for a binary's size")?;
        let mut binary = vec![0u8; size];
        let mut place = binary.as_mut_ptr();
        let to = (&raw mut place).cast();
        let got = cl!(
            self.api,
            clGetProgramInfo(program, codes::PROGRAM_BINARIES, 8, to, null_mut())
        );
        check(got, "asking for a binary")?;
        Ok(binary)
    }

    /// Creates a buffer. `host` is the pointer that belongs to the flags.
    pub fn buffer(&self, flags: u64, size: usize, host: *mut c_void) -> Result<Handle, Failed> {
        let mut code = 0;
        let buffer = cl!(
            self.api,
            clCreateBuffer(self.context, flags, size, host, &raw mut code)
        );
        check(code, "creating a buffer")?;
        Ok(buffer)
    }

    /// Writes this many bytes into a buffer of that size, and reads them back to another place.
    pub fn there_and_back(
        &self,
        from: *const u8,
        to: *mut u8,
        length: usize,
    ) -> Result<(), Failed> {
        let buffer = self.buffer(0, length, null_mut())?;
        let (from, to) = (from.cast(), to.cast());
        let (queue, none, event) = (self.queue, null(), null_mut());
        let written = cl!(
            self.api,
            clEnqueueWriteBuffer(queue, buffer, 0, 0, length, from, 0, none, event)
        );
        check(written, "writing")?;
        let read = cl!(
            self.api,
            clEnqueueReadBuffer(queue, buffer, 1, 0, length, to, 0, none, event)
        );
        check(read, "reading")?;
        check(cl!(self.api, clReleaseMemObject(buffer)), "releasing")
    }

    /// Enqueues a kernel over this many items of one dimension, in groups of the driver's choice.
    /// Its event is written to `event` unless that is null. Returns the driver's code.
    pub fn enqueue(&self, queue: Handle, kernel: Handle, items: usize, event: *mut Handle) -> i32 {
        let (offset, group) = (null(), null());
        cl!(
            self.api,
            clEnqueueNDRangeKernel(
                queue,
                kernel,
                1,
                offset,
                &raw const items,
                group,
                0,
                null(),
                event
            )
        )
    }

    /// Sets an argument to a value: a handle or a number.
    pub fn set<T: Copy>(&self, kernel: Handle, index: u32, value: T) -> Result<(), Failed> {
        let pointer = (&raw const value).cast();
        let set = cl!(
            self.api,
            clSetKernelArg(kernel, index, size_of::<T>(), pointer)
        );
        check(set, "setting an argument")
    }
}
