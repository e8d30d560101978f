//! The OpenCL functions that the worker calls, resolved at run time.
//!
//! Signatures follow the OpenCL 3.0 specification, with handles as plain numbers: the worker only stores them and
//! passes them back.

#![allow(non_snake_case)]

use std::ffi::{c_char, c_void};

#[cfg(test)]
pub(crate) use super::types::Build;
pub use super::types::{
    ContextCallback, EventCallback, Handle, ImageDesc, ImageFormat, Info, MemCallback,
    ProgramCallback, SetArgument,
};

/// Why OpenCL is not available.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The loader cannot be opened.
    #[error(
        "cannot open {path}: install an OpenCL loader (Debian: ocl-icd-libopencl1) or name another \
         one"
    )]
    Open {
        /// The path of the loader.
        path: String,
        /// The cause.
        source: libloading::Error,
    },
    /// The loader is too old.
    #[error("the OpenCL loader {path} has no {function}: a loader for OpenCL 3.0 is needed")]
    Missing {
        /// The path of the loader.
        path: String,
        /// The missing function.
        function: &'static str,
        /// The cause.
        source: libloading::Error,
    },
}

macro_rules! api {
    ($(fn $name:ident($($arg:ident: $type:ty),*) -> $result:ty;)*) => {
        /// The host's OpenCL.
        #[derive(Debug)]
        pub struct Api {
            $($name: unsafe extern "C" fn($($type),*) -> $result,)*
            /// Keeps the functions loaded, if they were.
            _library: Option<libloading::Library>,
        }

        impl Api {
            /// Opens the loader.
            pub fn open(path: &str) -> Result<Self, Error> {
                // SAFETY: an OpenCL loader's constructors have no preconditions.
                let library = unsafe { libloading::Library::new(path) }
                    .map_err(|source| Error::Open { path: path.to_owned(), source })?;
                Ok(Self {
                    $($name: {
                        // SAFETY: the signature is the specification's.
                        *unsafe {
                            library.get::<unsafe extern "C" fn($($type),*) -> $result>(
                                concat!(stringify!($name), "\0").as_bytes(),
                            )
                        }
                        .map_err(|source| Error::Missing {
                            path: path.to_owned(),
                            function: stringify!($name),
                            source,
                        })?
                    },)*
                    _library: Some(library),
                })
            }

            /// An OpenCL driver that does nothing; see [`null`](super::null).
            #[cfg(any(test, feature = "test-support"))]
            pub fn null() -> Self {
                use super::null::{Argument, Outcome};
                $(
                    unsafe extern "C" fn $name($($arg: $type),*) -> $result {
                        // SAFETY: the precondition is passed on to the caller.
                        $(unsafe { Argument::tell($arg) };)*
                        Outcome::success()
                    }
                )*
                Self {
                    $($name: $name as unsafe extern "C" fn($($type),*) -> $result,)*
                    _library: None,
                }
                .with_null()
            }

            /// Like `null`, with handles that carry their kind; see [`typed`](super::typed).
            #[cfg(any(test, feature = "test-support"))]
            pub fn typed() -> Self {
                use super::typed::{self, Give, Pass};
                $(
                    unsafe extern "C" fn $name($($arg: $type),*) -> $result {
                        // SAFETY: the precondition is passed on to the caller.
                        $(unsafe { Pass::pass($arg, stringify!($arg)) };)*
                        Give::give(stringify!($name))
                    }
                )*
                Self {
                    $($name: $name as unsafe extern "C" fn($($type),*) -> $result,)*
                    _library: None,
                }
                .with_null()
                .with_kernels(typed::kernel_info, typed::argument_info, typed::set_argument)
            }

            $(
                #[doc = concat!("`", stringify!($name), "`.")]
                ///
                /// # Safety
                /// As in the specification: live handles, and pointers to as much memory as the function reads or
                /// writes.
                #[allow(clippy::too_many_arguments)]
                pub unsafe fn $name(&self, $($arg: $type),*) -> $result {
                    // SAFETY: the precondition is passed on to the caller.
                    unsafe { (self.$name)($($arg),*) }
                }
            )*
        }
    };
}

#[cfg(any(test, feature = "test-support"))]
impl Api {
    /// Adds what [`null`](super::null) does besides returning success.
    fn with_null(mut self) -> Self {
        use super::null;
        self.clSetEventCallback = null::set_event_callback;
        self.clSetMemObjectDestructorCallback = null::set_mem_callback;
        self.clGetPlatformInfo = null::platform_info;
        self.clGetDeviceInfo = null::device_info;
        self.clSVMAlloc = null::svm_alloc;
        self
    }

    /// Uses a test's commands and events.
    #[cfg(test)]
    pub(crate) fn with_events(
        mut self,
        enqueue: Enqueue,
        status: Info,
        decide: unsafe extern "C" fn(Handle, i32) -> i32,
    ) -> Self {
        self.clEnqueueNDRangeKernel = enqueue;
        self.clGetEventInfo = status;
        self.clSetUserEventStatus = decide;
        self
    }

    /// Uses a test's platforms, without the functions that drivers before OpenCL 2.0 lack.
    #[cfg(test)]
    pub(crate) fn with_old(
        mut self,
        platform: Info,
        argument: unsafe extern "C" fn(Handle, u32, *const c_void) -> i32,
        alloc: unsafe extern "C" fn(Handle, u64, usize, u32) -> *mut c_void,
        uses: unsafe extern "C" fn(Handle, u32, usize, *const c_void) -> i32,
    ) -> Self {
        self.clGetPlatformInfo = platform;
        self.clSetKernelArgSVMPointer = argument;
        self.clSVMAlloc = alloc;
        self.clSetKernelExecInfo = uses;
        self
    }

    /// Uses commands that complete, and memory that is freed, when the test decides.
    #[cfg(test)]
    pub(crate) fn with_ends(
        mut self,
        marker: unsafe extern "C" fn(Handle, u32, *const Handle, *mut Handle) -> i32,
        status: Info,
        wait: unsafe extern "C" fn(u32, *const Handle) -> i32,
        free: unsafe extern "C" fn(Handle, *mut c_void),
    ) -> Self {
        self.clEnqueueMarkerWithWaitList = marker;
        self.clGetEventInfo = status;
        self.clWaitForEvents = wait;
        self.clSVMFree = free;
        self
    }

    /// Uses a test's answers about programs.
    #[cfg(test)]
    pub(crate) fn with_programs(mut self, info: Info) -> Self {
        self.clGetProgramInfo = info;
        self
    }

    /// Uses a test's way of writing to buffers and of waiting for queues.
    #[cfg(test)]
    pub(crate) fn with_writes(
        mut self,
        write: Write,
        finish: unsafe extern "C" fn(Handle) -> i32,
    ) -> Self {
        self.clEnqueueWriteBuffer = write;
        self.clFinish = finish;
        self
    }

    /// Uses buffers whose destruction the test reports.
    #[cfg(test)]
    pub(crate) fn with_mem_callback(
        mut self,
        set: unsafe extern "C" fn(Handle, Option<MemCallback>, *mut c_void) -> i32,
    ) -> Self {
        self.clSetMemObjectDestructorCallback = set;
        self
    }

    /// Uses a test's devices.
    #[must_use]
    pub fn with_devices(mut self, info: Info) -> Self {
        self.clGetDeviceInfo = info;
        self
    }

    /// Uses a test's builds of programs.
    #[cfg(test)]
    pub(crate) fn with_builds(mut self, build: Build) -> Self {
        self.clBuildProgram = build;
        self
    }

    /// Uses a test's samplers.
    #[must_use]
    pub fn with_samplers(
        mut self,
        create: unsafe extern "C" fn(Handle, u32, u32, u32, *mut i32) -> Handle,
    ) -> Self {
        self.clCreateSampler = create;
        self
    }

    /// Uses a test's kernels: queries for kernels and their arguments, and setting the arguments.
    #[must_use]
    pub fn with_kernels(
        mut self,
        info: Info,
        argument: unsafe extern "C" fn(Handle, u32, u32, usize, *mut c_void, *mut usize) -> i32,
        set: SetArgument,
    ) -> Self {
        self.clGetKernelInfo = info;
        self.clGetKernelArgInfo = argument;
        self.clSetKernelArg = set;
        self
    }

    /// Uses a test's queues.
    #[cfg(test)]
    pub(crate) fn with_queues(
        mut self,
        create: unsafe extern "C" fn(Handle, Handle, *const u64, *mut i32) -> Handle,
    ) -> Self {
        self.clCreateCommandQueueWithProperties = create;
        self
    }

    /// Uses sub-devices whose references the test counts.
    #[cfg(test)]
    pub(crate) fn with_parts(
        mut self,
        retain: unsafe extern "C" fn(Handle) -> i32,
        release: unsafe extern "C" fn(Handle) -> i32,
    ) -> Self {
        self.clRetainDevice = retain;
        self.clReleaseDevice = release;
        self
    }

    pub(crate) fn with_memory(
        mut self,
        create: unsafe extern "C" fn(Handle, u64, usize, *mut c_void, *mut i32) -> Handle,
        read: Transfer<*mut c_void>,
        write: Transfer<*const c_void>,
        set: SetArgument,
        enqueue: Enqueue,
    ) -> Self {
        self.clCreateBuffer = create;
        self.clEnqueueReadBuffer = read;
        self.clEnqueueWriteBuffer = write;
        self.clSetKernelArg = set;
        self.clEnqueueNDRangeKernel = enqueue;
        self
    }

    /// Uses a test's allocations of shared virtual memory.
    #[cfg(test)]
    pub(crate) fn with_allocations(
        mut self,
        alloc: unsafe extern "C" fn(Handle, u64, usize, u32) -> *mut c_void,
    ) -> Self {
        self.clSVMAlloc = alloc;
        self
    }

    pub(crate) fn with_shared_memory(
        mut self,
        alloc: unsafe extern "C" fn(Handle, u64, usize, u32) -> *mut c_void,
        free: unsafe extern "C" fn(Handle, *mut c_void),
        copy: Copy,
        argument: unsafe extern "C" fn(Handle, u32, *const c_void) -> i32,
    ) -> Self {
        self.clSVMAlloc = alloc;
        self.clSVMFree = free;
        self.clEnqueueSVMMemcpy = copy;
        self.clSetKernelArgSVMPointer = argument;
        self
    }
}

/// `clEnqueueSVMMemcpy`.
#[cfg(any(test, feature = "test-support"))]
type Copy = unsafe extern "C" fn(
    Handle,
    u32,
    *mut c_void,
    *const c_void,
    usize,
    u32,
    *const Handle,
    *mut Handle,
) -> i32;
/// `clEnqueueReadBuffer` and `clEnqueueWriteBuffer`.
#[cfg(any(test, feature = "test-support"))]
type Transfer<P> = unsafe extern "C" fn(
    Handle,
    Handle,
    u32,
    usize,
    usize,
    P,
    u32,
    *const Handle,
    *mut Handle,
) -> i32;
/// `clEnqueueWriteBuffer`.
#[cfg(test)]
type Write = unsafe extern "C" fn(
    Handle,
    Handle,
    u32,
    usize,
    usize,
    *const c_void,
    u32,
    *const Handle,
    *mut Handle,
) -> i32;
/// `clEnqueueNDRangeKernel`.
#[cfg(any(test, feature = "test-support"))]
type Enqueue = unsafe extern "C" fn(
    Handle,
    Handle,
    u32,
    *const usize,
    *const usize,
    *const usize,
    u32,
    *const Handle,
    *mut Handle,
) -> i32;

api! {
    fn clGetPlatformIDs(num_entries: u32, platforms: *mut Handle, num_platforms: *mut u32) -> i32;
    fn clGetPlatformInfo(platform: Handle, param_name: u32, param_value_size: usize, param_value: *mut c_void, param_value_size_ret: *mut usize) -> i32;
    fn clGetDeviceIDs(platform: Handle, device_type: u64, num_entries: u32, devices: *mut Handle, num_devices: *mut u32) -> i32;
    fn clGetDeviceInfo(device: Handle, param_name: u32, param_value_size: usize, param_value: *mut c_void, param_value_size_ret: *mut usize) -> i32;
    fn clCreateContext(properties: *const isize, num_devices: u32, devices: *const Handle, notify: Option<ContextCallback>, user_data: *mut c_void, errcode_ret: *mut i32) -> Handle;
    fn clRetainContext(context: Handle) -> i32;
    fn clReleaseContext(context: Handle) -> i32;
    fn clGetContextInfo(context: Handle, param_name: u32, param_value_size: usize, param_value: *mut c_void, param_value_size_ret: *mut usize) -> i32;
    fn clCreateCommandQueue(context: Handle, device: Handle, properties: u64, errcode_ret: *mut i32) -> Handle;
    fn clReleaseCommandQueue(command_queue: Handle) -> i32;
    fn clGetCommandQueueInfo(command_queue: Handle, param_name: u32, param_value_size: usize, param_value: *mut c_void, param_value_size_ret: *mut usize) -> i32;
    fn clCreateBuffer(context: Handle, flags: u64, size: usize, host_ptr: *mut c_void, errcode_ret: *mut i32) -> Handle;
    fn clRetainMemObject(memobj: Handle) -> i32;
    fn clReleaseMemObject(memobj: Handle) -> i32;
    fn clGetSupportedImageFormats(context: Handle, flags: u64, image_type: u32, num_entries: u32, image_formats: *mut ImageFormat, num_image_formats: *mut u32) -> i32;
    fn clGetMemObjectInfo(memobj: Handle, param_name: u32, param_value_size: usize, param_value: *mut c_void, param_value_size_ret: *mut usize) -> i32;
    fn clGetImageInfo(image: Handle, param_name: u32, param_value_size: usize, param_value: *mut c_void, param_value_size_ret: *mut usize) -> i32;
    fn clCreateSampler(context: Handle, normalized_coords: u32, addressing_mode: u32, filter_mode: u32, errcode_ret: *mut i32) -> Handle;
    fn clReleaseSampler(sampler: Handle) -> i32;
    fn clGetSamplerInfo(sampler: Handle, param_name: u32, param_value_size: usize, param_value: *mut c_void, param_value_size_ret: *mut usize) -> i32;
    fn clCreateProgramWithSource(context: Handle, count: u32, strings: *const *const c_char, lengths: *const usize, errcode_ret: *mut i32) -> Handle;
    fn clCreateProgramWithBinary(context: Handle, num_devices: u32, device_list: *const Handle, lengths: *const usize, binaries: *const *const u8, binary_status: *mut i32, errcode_ret: *mut i32) -> Handle;
    fn clRetainProgram(program: Handle) -> i32;
    fn clReleaseProgram(program: Handle) -> i32;
    fn clBuildProgram(program: Handle, num_devices: u32, device_list: *const Handle, options: *const c_char, notify: Option<ProgramCallback>, user_data: *mut c_void) -> i32;
    fn clGetProgramInfo(program: Handle, param_name: u32, param_value_size: usize, param_value: *mut c_void, param_value_size_ret: *mut usize) -> i32;
    fn clGetProgramBuildInfo(program: Handle, device: Handle, param_name: u32, param_value_size: usize, param_value: *mut c_void, param_value_size_ret: *mut usize) -> i32;
    fn clCreateKernel(program: Handle, kernel_name: *const c_char, errcode_ret: *mut i32) -> Handle;
    fn clReleaseKernel(kernel: Handle) -> i32;
    fn clSetKernelArg(kernel: Handle, arg_index: u32, arg_size: usize, arg_value: *const c_void) -> i32;
    fn clGetKernelInfo(kernel: Handle, param_name: u32, param_value_size: usize, param_value: *mut c_void, param_value_size_ret: *mut usize) -> i32;
    fn clGetKernelWorkGroupInfo(kernel: Handle, device: Handle, param_name: u32, param_value_size: usize, param_value: *mut c_void, param_value_size_ret: *mut usize) -> i32;
    fn clGetEventInfo(event: Handle, param_name: u32, param_value_size: usize, param_value: *mut c_void, param_value_size_ret: *mut usize) -> i32;
    fn clRetainEvent(event: Handle) -> i32;
    fn clReleaseEvent(event: Handle) -> i32;
    fn clGetEventProfilingInfo(event: Handle, param_name: u32, param_value_size: usize, param_value: *mut c_void, param_value_size_ret: *mut usize) -> i32;
    fn clFlush(command_queue: Handle) -> i32;
    fn clFinish(command_queue: Handle) -> i32;
    fn clWaitForEvents(num_events: u32, event_list: *const Handle) -> i32;
    fn clEnqueueReadBuffer(command_queue: Handle, buffer: Handle, blocking_read: u32, offset: usize, size: usize, ptr: *mut c_void, num_events_in_wait_list: u32, event_wait_list: *const Handle, event: *mut Handle) -> i32;
    fn clEnqueueWriteBuffer(command_queue: Handle, buffer: Handle, blocking_write: u32, offset: usize, size: usize, ptr: *const c_void, num_events_in_wait_list: u32, event_wait_list: *const Handle, event: *mut Handle) -> i32;
    fn clEnqueueCopyBuffer(command_queue: Handle, src_buffer: Handle, dst_buffer: Handle, src_offset: usize, dst_offset: usize, size: usize, num_events_in_wait_list: u32, event_wait_list: *const Handle, event: *mut Handle) -> i32;
    fn clEnqueueReadImage(command_queue: Handle, image: Handle, blocking_read: u32, origin: *const usize, region: *const usize, row_pitch: usize, slice_pitch: usize, ptr: *mut c_void, num_events_in_wait_list: u32, event_wait_list: *const Handle, event: *mut Handle) -> i32;
    fn clEnqueueWriteImage(command_queue: Handle, image: Handle, blocking_write: u32, origin: *const usize, region: *const usize, input_row_pitch: usize, input_slice_pitch: usize, ptr: *const c_void, num_events_in_wait_list: u32, event_wait_list: *const Handle, event: *mut Handle) -> i32;
    fn clEnqueueCopyImage(command_queue: Handle, src_image: Handle, dst_image: Handle, src_origin: *const usize, dst_origin: *const usize, region: *const usize, num_events_in_wait_list: u32, event_wait_list: *const Handle, event: *mut Handle) -> i32;
    fn clEnqueueCopyImageToBuffer(command_queue: Handle, src_image: Handle, dst_buffer: Handle, src_origin: *const usize, region: *const usize, dst_offset: usize, num_events_in_wait_list: u32, event_wait_list: *const Handle, event: *mut Handle) -> i32;
    fn clEnqueueCopyBufferToImage(command_queue: Handle, src_buffer: Handle, dst_image: Handle, src_offset: usize, dst_origin: *const usize, region: *const usize, num_events_in_wait_list: u32, event_wait_list: *const Handle, event: *mut Handle) -> i32;
    fn clEnqueueMapBuffer(command_queue: Handle, buffer: Handle, blocking_map: u32, map_flags: u64, offset: usize, size: usize, num_events_in_wait_list: u32, event_wait_list: *const Handle, event: *mut Handle, errcode_ret: *mut i32) -> *mut c_void;
    fn clEnqueueUnmapMemObject(command_queue: Handle, memobj: Handle, mapped_ptr: *mut c_void, num_events_in_wait_list: u32, event_wait_list: *const Handle, event: *mut Handle) -> i32;
    fn clEnqueueNDRangeKernel(command_queue: Handle, kernel: Handle, work_dim: u32, global_work_offset: *const usize, global_work_size: *const usize, local_work_size: *const usize, num_events_in_wait_list: u32, event_wait_list: *const Handle, event: *mut Handle) -> i32;
    fn clSetEventCallback(event: Handle, command_exec_callback_type: i32, notify: Option<EventCallback>, user_data: *mut c_void) -> i32;
    fn clCreateSubBuffer(buffer: Handle, flags: u64, buffer_create_type: u32, buffer_create_info: *const c_void, errcode_ret: *mut i32) -> Handle;
    fn clSetMemObjectDestructorCallback(memobj: Handle, notify: Option<MemCallback>, user_data: *mut c_void) -> i32;
    fn clCreateUserEvent(context: Handle, errcode_ret: *mut i32) -> Handle;
    fn clSetUserEventStatus(event: Handle, execution_status: i32) -> i32;
    fn clEnqueueReadBufferRect(command_queue: Handle, buffer: Handle, blocking_read: u32, buffer_origin: *const usize, host_origin: *const usize, region: *const usize, buffer_row_pitch: usize, buffer_slice_pitch: usize, host_row_pitch: usize, host_slice_pitch: usize, ptr: *mut c_void, num_events_in_wait_list: u32, event_wait_list: *const Handle, event: *mut Handle) -> i32;
    fn clEnqueueWriteBufferRect(command_queue: Handle, buffer: Handle, blocking_write: u32, buffer_origin: *const usize, host_origin: *const usize, region: *const usize, buffer_row_pitch: usize, buffer_slice_pitch: usize, host_row_pitch: usize, host_slice_pitch: usize, ptr: *const c_void, num_events_in_wait_list: u32, event_wait_list: *const Handle, event: *mut Handle) -> i32;
    fn clEnqueueCopyBufferRect(command_queue: Handle, src_buffer: Handle, dst_buffer: Handle, src_origin: *const usize, dst_origin: *const usize, region: *const usize, src_row_pitch: usize, src_slice_pitch: usize, dst_row_pitch: usize, dst_slice_pitch: usize, num_events_in_wait_list: u32, event_wait_list: *const Handle, event: *mut Handle) -> i32;
    fn clCreateSubDevices(device: Handle, properties: *const isize, num_devices: u32, out_devices: *mut Handle, num_devices_ret: *mut u32) -> i32;
    fn clRetainDevice(device: Handle) -> i32;
    fn clReleaseDevice(device: Handle) -> i32;
    fn clCreateImage(context: Handle, flags: u64, image_format: *const ImageFormat, image_desc: *const ImageDesc, host_ptr: *mut c_void, errcode_ret: *mut i32) -> Handle;
    fn clCreateProgramWithBuiltInKernels(context: Handle, num_devices: u32, device_list: *const Handle, kernel_names: *const c_char, errcode_ret: *mut i32) -> Handle;
    fn clCompileProgram(program: Handle, num_devices: u32, device_list: *const Handle, options: *const c_char, num_input_headers: u32, input_headers: *const Handle, header_include_names: *const *const c_char, notify: Option<ProgramCallback>, user_data: *mut c_void) -> i32;
    fn clLinkProgram(context: Handle, num_devices: u32, device_list: *const Handle, options: *const c_char, num_input_programs: u32, input_programs: *const Handle, notify: Option<ProgramCallback>, user_data: *mut c_void, errcode_ret: *mut i32) -> Handle;
    fn clGetKernelArgInfo(kernel: Handle, arg_indx: u32, param_name: u32, param_value_size: usize, param_value: *mut c_void, param_value_size_ret: *mut usize) -> i32;
    fn clEnqueueFillBuffer(command_queue: Handle, buffer: Handle, pattern: *const c_void, pattern_size: usize, offset: usize, size: usize, num_events_in_wait_list: u32, event_wait_list: *const Handle, event: *mut Handle) -> i32;
    fn clEnqueueFillImage(command_queue: Handle, image: Handle, fill_color: *const c_void, origin: *const usize, region: *const usize, num_events_in_wait_list: u32, event_wait_list: *const Handle, event: *mut Handle) -> i32;
    fn clEnqueueMigrateMemObjects(command_queue: Handle, num_mem_objects: u32, mem_objects: *const Handle, flags: u64, num_events_in_wait_list: u32, event_wait_list: *const Handle, event: *mut Handle) -> i32;
    fn clEnqueueMarkerWithWaitList(command_queue: Handle, num_events_in_wait_list: u32, event_wait_list: *const Handle, event: *mut Handle) -> i32;
    fn clEnqueueBarrierWithWaitList(command_queue: Handle, num_events_in_wait_list: u32, event_wait_list: *const Handle, event: *mut Handle) -> i32;
    fn clCreateCommandQueueWithProperties(context: Handle, device: Handle, properties: *const u64, errcode_ret: *mut i32) -> Handle;
    fn clCloneKernel(source_kernel: Handle, errcode_ret: *mut i32) -> Handle;
    fn clCreateProgramWithIL(context: Handle, il: *const c_void, length: usize, errcode_ret: *mut i32) -> Handle;
    fn clGetDeviceAndHostTimer(device: Handle, device_timestamp: *mut u64, host_timestamp: *mut u64) -> i32;
    fn clGetKernelSubGroupInfo(kernel: Handle, device: Handle, param_name: u32, input_value_size: usize, input_value: *const c_void, param_value_size: usize, param_value: *mut c_void, param_value_size_ret: *mut usize) -> i32;
    fn clSetProgramSpecializationConstant(program: Handle, spec_id: u32, spec_size: usize, spec_value: *const c_void) -> i32;
    fn clSVMAlloc(context: Handle, flags: u64, size: usize, alignment: u32) -> *mut c_void;
    fn clSVMFree(context: Handle, svm_pointer: *mut c_void) -> ();
    fn clEnqueueSVMMemcpy(command_queue: Handle, blocking_copy: u32, dst_ptr: *mut c_void, src_ptr: *const c_void, size: usize, num_events_in_wait_list: u32, event_wait_list: *const Handle, event: *mut Handle) -> i32;
    fn clEnqueueSVMMemFill(command_queue: Handle, svm_ptr: *mut c_void, pattern: *const c_void, pattern_size: usize, size: usize, num_events_in_wait_list: u32, event_wait_list: *const Handle, event: *mut Handle) -> i32;
    fn clEnqueueSVMMigrateMem(command_queue: Handle, num_svm_pointers: u32, svm_pointers: *const *const c_void, sizes: *const usize, flags: u64, num_events_in_wait_list: u32, event_wait_list: *const Handle, event: *mut Handle) -> i32;
    fn clSetKernelArgSVMPointer(kernel: Handle, arg_index: u32, arg_value: *const c_void) -> i32;
    fn clSetKernelExecInfo(kernel: Handle, param_name: u32, param_value_size: usize, param_value: *const c_void) -> i32;
}
