//! Functions that the worker never calls, and that are therefore not in its table.

#![allow(non_snake_case)]

use std::ffi::{CString, c_char, c_void};

use remoting_opencl::driver::api::{Handle, ImageDesc, ImageFormat};

/// Calls one of them.
macro_rules! more {
    ($part:expr, $name:ident($($arg:expr),* $(,)?)) => {{
        let function = $part.more.$name;
        // SAFETY: handles are live, and pointers are to locals of the sizes that are passed along.
        unsafe { function($($arg),*) }
    }};
}

pub(crate) use more;

macro_rules! functions {
    ($(fn $name:ident($($arg:ty),*) -> $result:ty;)*) => {
        /// The loader's functions.
        #[derive(Clone, Copy)]
        pub struct More {
            $(pub $name: unsafe extern "C" fn($($arg),*) -> $result,)*
        }

        impl More {
            /// Looks them up in the loader, which is already open.
            pub fn open() -> Result<Self, String> {
                let loader = std::env::var("OPENCL_LOADER");
                let loader = loader.as_deref().unwrap_or("libOpenCL.so.1");
                let path = CString::new(loader).map_err(|error| error.to_string())?;
                // SAFETY: the path is a C string; the loader is already open.
                let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
                if library.is_null() {
                    return Err(format!("cannot open {loader}"));
                }
                Ok(Self {
                    $($name: {
                        let name = concat!(stringify!($name), "\0");
                        // SAFETY: the name is a C string, and the function of that name has the
                        // specification's signature.
                        let found = unsafe {
                            let found = libc::dlsym(library, name.as_ptr().cast());
                            std::mem::transmute::<
                                *mut c_void,
                                Option<unsafe extern "C" fn($($arg),*) -> $result>,
                            >(found)
                        };
                        found.ok_or(concat!("the loader has no ", stringify!($name)))?
                    },)*
                })
            }
        }
    };
}

/// A callback for an object.
pub type Notify = unsafe extern "C" fn(Handle, *mut c_void);

functions! {
    fn clSetContextDestructorCallback(Handle, Option<Notify>, *mut c_void) -> i32;
    fn clCreateContextFromType(*const isize, u64, *const c_void, *mut c_void, *mut i32) -> Handle;
    fn clRetainMemObject(Handle) -> i32;
    fn clRetainKernel(Handle) -> i32;
    fn clRetainDevice(Handle) -> i32;
    fn clRetainCommandQueue(Handle) -> i32;
    fn clRetainSampler(Handle) -> i32;
    fn clGetHostTimer(Handle, *mut u64) -> i32;
    fn clCreateKernelsInProgram(Handle, u32, *mut Handle, *mut u32) -> i32;
    fn clCreateSamplerWithProperties(Handle, *const u64, *mut i32) -> Handle;
    fn clCreateBufferWithProperties(Handle, *const u64, u64, usize, *mut c_void, *mut i32) -> Handle;
    fn clCreateImage2D(Handle, u64, *const ImageFormat, usize, usize, usize, *mut c_void, *mut i32) -> Handle;
    fn clCreateImageWithProperties(Handle, *const u64, u64, *const ImageFormat, *const ImageDesc, *mut c_void, *mut i32) -> Handle;
    fn clEnqueueMapImage(Handle, Handle, u32, u64, *const usize, *const usize, *mut usize, *mut usize, u32, *const Handle, *mut Handle, *mut i32) -> *mut c_void;
    fn clEnqueueTask(Handle, Handle, u32, *const Handle, *mut Handle) -> i32;
    fn clEnqueueMarker(Handle, *mut Handle) -> i32;
    fn clEnqueueBarrier(Handle) -> i32;
    fn clUnloadPlatformCompiler(Handle) -> i32;
    fn clGetExtensionFunctionAddressForPlatform(Handle, *const c_char) -> *mut c_void;
    fn clSetDefaultDeviceCommandQueue(Handle, Handle, Handle) -> i32;
    fn clSetProgramReleaseCallback(Handle, Option<Notify>, *mut c_void) -> i32;
    fn clCreatePipe(Handle, u64, u32, u32, *const isize, *mut i32) -> Handle;
    fn clGetPipeInfo(Handle, u32, usize, *mut c_void, *mut usize) -> i32;
}
