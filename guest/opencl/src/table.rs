//! The dispatch table that the loader finds at the start of every object, in the order of the ICD
//! extension's `cl_icd_dispatch`, and the state of each entry point.

use std::ffi::c_void;

use crate::{command, context, event, mapping, memory, platform, program, refuse, svm, transfer};

/// What happens to a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Served.
    Served,
    /// Refused with this code, as the specification defines for devices without the feature.
    Refused(&'static str),
}

/// The table.
#[repr(transparent)]
pub struct Table([*const c_void; COUNT]);

// SAFETY: the pointers are to functions, and never change.
unsafe impl Sync for Table {}

macro_rules! function {
    (refused) => {
        refuse::refused as *const c_void
    };
    (refuse::$name:ident) => {
        refuse::$name as *const c_void
    };
    ($module:ident::$name:ident) => {
        $module::$name as *const c_void
    };
}

macro_rules! state {
    (refuse::clGetPipeInfo) => {
        State::Refused("CL_INVALID_MEM_OBJECT")
    };
    (refuse::gl_object) => {
        State::Refused("CL_INVALID_GL_OBJECT")
    };
    (refuse::gl_queue) => {
        State::Refused("CL_INVALID_CONTEXT")
    };
    (refuse::gl_3) => {
        State::Refused("CL_INVALID_CONTEXT")
    };
    (refuse::gl_4) => {
        State::Refused("CL_INVALID_CONTEXT")
    };
    (refuse::gl_6) => {
        State::Refused("CL_INVALID_CONTEXT")
    };
    (refuse::$name:ident) => {
        State::Refused("CL_INVALID_OPERATION")
    };
    (refused) => {
        State::Refused("CL_INVALID_OPERATION")
    };
    ($module:ident::$name:ident) => {
        State::Served
    };
}

macro_rules! table {
    ($($name:ident $($entry:ident)::+;)*) => {
        /// All entry points, by name.
        pub const STATES: &[(&str, State)] = &[$((stringify!($name), state!($($entry)::+)),)*];

        const COUNT: usize = STATES.len();

        /// The only table.
        pub static TABLE: Table = Table([$(function!($($entry)::+),)*]);
    };
}

table! {
    clGetPlatformIDs platform::clGetPlatformIDs;
    clGetPlatformInfo platform::clGetPlatformInfo;
    clGetDeviceIDs platform::clGetDeviceIDs;
    clGetDeviceInfo platform::clGetDeviceInfo;
    clCreateContext context::clCreateContext;
    clCreateContextFromType context::clCreateContextFromType;
    clRetainContext context::clRetainContext;
    clReleaseContext context::clReleaseContext;
    clGetContextInfo context::clGetContextInfo;
    clCreateCommandQueue context::clCreateCommandQueue;
    clRetainCommandQueue context::clRetainCommandQueue;
    clReleaseCommandQueue context::clReleaseCommandQueue;
    clGetCommandQueueInfo context::clGetCommandQueueInfo;
    clSetCommandQueueProperty refuse::clSetCommandQueueProperty;
    clCreateBuffer memory::clCreateBuffer;
    clCreateImage2D memory::clCreateImage2D;
    clCreateImage3D memory::clCreateImage3D;
    clRetainMemObject memory::clRetainMemObject;
    clReleaseMemObject memory::clReleaseMemObject;
    clGetSupportedImageFormats memory::clGetSupportedImageFormats;
    clGetMemObjectInfo memory::clGetMemObjectInfo;
    clGetImageInfo memory::clGetImageInfo;
    clCreateSampler memory::clCreateSampler;
    clRetainSampler memory::clRetainSampler;
    clReleaseSampler memory::clReleaseSampler;
    clGetSamplerInfo memory::clGetSamplerInfo;
    clCreateProgramWithSource program::clCreateProgramWithSource;
    clCreateProgramWithBinary program::clCreateProgramWithBinary;
    clRetainProgram program::clRetainProgram;
    clReleaseProgram program::clReleaseProgram;
    clBuildProgram program::clBuildProgram;
    clUnloadCompiler platform::clUnloadCompiler;
    clGetProgramInfo program::clGetProgramInfo;
    clGetProgramBuildInfo program::clGetProgramBuildInfo;
    clCreateKernel program::clCreateKernel;
    clCreateKernelsInProgram program::clCreateKernelsInProgram;
    clRetainKernel program::clRetainKernel;
    clReleaseKernel program::clReleaseKernel;
    clSetKernelArg program::clSetKernelArg;
    clGetKernelInfo program::clGetKernelInfo;
    clGetKernelWorkGroupInfo program::clGetKernelWorkGroupInfo;
    clWaitForEvents event::clWaitForEvents;
    clGetEventInfo event::clGetEventInfo;
    clRetainEvent event::clRetainEvent;
    clReleaseEvent event::clReleaseEvent;
    clGetEventProfilingInfo event::clGetEventProfilingInfo;
    clFlush context::clFlush;
    clFinish context::clFinish;
    clEnqueueReadBuffer transfer::clEnqueueReadBuffer;
    clEnqueueWriteBuffer transfer::clEnqueueWriteBuffer;
    clEnqueueCopyBuffer command::clEnqueueCopyBuffer;
    clEnqueueReadImage transfer::clEnqueueReadImage;
    clEnqueueWriteImage transfer::clEnqueueWriteImage;
    clEnqueueCopyImage command::clEnqueueCopyImage;
    clEnqueueCopyImageToBuffer command::clEnqueueCopyImageToBuffer;
    clEnqueueCopyBufferToImage command::clEnqueueCopyBufferToImage;
    clEnqueueMapBuffer mapping::clEnqueueMapBuffer;
    clEnqueueMapImage mapping::clEnqueueMapImage;
    clEnqueueUnmapMemObject mapping::clEnqueueUnmapMemObject;
    clEnqueueNDRangeKernel command::clEnqueueNDRangeKernel;
    clEnqueueTask command::clEnqueueTask;
    clEnqueueNativeKernel refused;
    clEnqueueMarker command::clEnqueueMarker;
    clEnqueueWaitForEvents command::clEnqueueWaitForEvents;
    clEnqueueBarrier command::clEnqueueBarrier;
    clGetExtensionFunctionAddress platform::clGetExtensionFunctionAddress;
    clCreateFromGLBuffer refuse::gl_4;
    clCreateFromGLTexture2D refuse::gl_6;
    clCreateFromGLTexture3D refuse::gl_6;
    clCreateFromGLRenderbuffer refuse::gl_4;
    clGetGLObjectInfo refuse::gl_object;
    clGetGLTextureInfo refuse::gl_object;
    clEnqueueAcquireGLObjects refuse::gl_queue;
    clEnqueueReleaseGLObjects refuse::gl_queue;
    clGetGLContextInfoKHR refused;
    clGetDeviceIDsFromD3D10KHR refused;
    clCreateFromD3D10BufferKHR refuse::foreign_4;
    clCreateFromD3D10Texture2DKHR refuse::foreign_5;
    clCreateFromD3D10Texture3DKHR refuse::foreign_5;
    clEnqueueAcquireD3D10ObjectsKHR refused;
    clEnqueueReleaseD3D10ObjectsKHR refused;
    clSetEventCallback event::clSetEventCallback;
    clCreateSubBuffer memory::clCreateSubBuffer;
    clSetMemObjectDestructorCallback memory::clSetMemObjectDestructorCallback;
    clCreateUserEvent event::clCreateUserEvent;
    clSetUserEventStatus event::clSetUserEventStatus;
    clEnqueueReadBufferRect transfer::clEnqueueReadBufferRect;
    clEnqueueWriteBufferRect transfer::clEnqueueWriteBufferRect;
    clEnqueueCopyBufferRect command::clEnqueueCopyBufferRect;
    clCreateSubDevicesEXT refused;
    clRetainDeviceEXT platform::clRetainDevice;
    clReleaseDeviceEXT platform::clReleaseDevice;
    clCreateEventFromGLsyncKHR refuse::gl_3;
    clCreateSubDevices platform::clCreateSubDevices;
    clRetainDevice platform::clRetainDevice;
    clReleaseDevice platform::clReleaseDevice;
    clCreateImage memory::clCreateImage;
    clCreateProgramWithBuiltInKernels program::clCreateProgramWithBuiltInKernels;
    clCompileProgram program::clCompileProgram;
    clLinkProgram program::clLinkProgram;
    clUnloadPlatformCompiler platform::clUnloadPlatformCompiler;
    clGetKernelArgInfo program::clGetKernelArgInfo;
    clEnqueueFillBuffer command::clEnqueueFillBuffer;
    clEnqueueFillImage command::clEnqueueFillImage;
    clEnqueueMigrateMemObjects command::clEnqueueMigrateMemObjects;
    clEnqueueMarkerWithWaitList command::clEnqueueMarkerWithWaitList;
    clEnqueueBarrierWithWaitList command::clEnqueueBarrierWithWaitList;
    clGetExtensionFunctionAddressForPlatform platform::clGetExtensionFunctionAddressForPlatform;
    clCreateFromGLTexture refuse::gl_6;
    clGetDeviceIDsFromD3D11KHR refused;
    clCreateFromD3D11BufferKHR refuse::foreign_4;
    clCreateFromD3D11Texture2DKHR refuse::foreign_5;
    clCreateFromD3D11Texture3DKHR refuse::foreign_5;
    clCreateFromDX9MediaSurfaceKHR refuse::foreign_6;
    clEnqueueAcquireD3D11ObjectsKHR refused;
    clEnqueueReleaseD3D11ObjectsKHR refused;
    clGetDeviceIDsFromDX9MediaAdapterKHR refused;
    clEnqueueAcquireDX9MediaSurfacesKHR refused;
    clEnqueueReleaseDX9MediaSurfacesKHR refused;
    clCreateFromEGLImageKHR refuse::foreign_6;
    clEnqueueAcquireEGLObjectsKHR refused;
    clEnqueueReleaseEGLObjectsKHR refused;
    clCreateEventFromEGLSyncKHR refuse::foreign_4;
    clCreateCommandQueueWithProperties context::clCreateCommandQueueWithProperties;
    clCreatePipe refuse::clCreatePipe;
    clGetPipeInfo refuse::clGetPipeInfo;
    clSVMAlloc svm::clSVMAlloc;
    clSVMFree svm::clSVMFree;
    clEnqueueSVMFree svm::clEnqueueSVMFree;
    clEnqueueSVMMemcpy svm::clEnqueueSVMMemcpy;
    clEnqueueSVMMemFill svm::clEnqueueSVMMemFill;
    clEnqueueSVMMap svm::clEnqueueSVMMap;
    clEnqueueSVMUnmap svm::clEnqueueSVMUnmap;
    clCreateSamplerWithProperties memory::clCreateSamplerWithProperties;
    clSetKernelArgSVMPointer svm::clSetKernelArgSVMPointer;
    clSetKernelExecInfo svm::clSetKernelExecInfo;
    clGetKernelSubGroupInfoKHR program::clGetKernelSubGroupInfo;
    clCloneKernel program::clCloneKernel;
    clCreateProgramWithIL program::clCreateProgramWithIL;
    clEnqueueSVMMigrateMem svm::clEnqueueSVMMigrateMem;
    clGetDeviceAndHostTimer platform::clGetDeviceAndHostTimer;
    clGetHostTimer platform::clGetHostTimer;
    clGetKernelSubGroupInfo program::clGetKernelSubGroupInfo;
    clSetDefaultDeviceCommandQueue refuse::clSetDefaultDeviceCommandQueue;
    clSetProgramReleaseCallback refuse::clSetProgramReleaseCallback;
    clSetProgramSpecializationConstant program::clSetProgramSpecializationConstant;
    clCreateBufferWithProperties memory::clCreateBufferWithProperties;
    clCreateImageWithProperties memory::clCreateImageWithProperties;
    clSetContextDestructorCallback context::clSetContextDestructorCallback;
}

/// The table as text, for the documentation.
#[cfg(test)]
fn document() -> String {
    let mut text = String::from(
        "# Entry points of the OpenCL driver\n\n\
         Generated from `guest/opencl/src/table.rs`; a test compares them.\n\n\
         | entry point | state |\n|---|---|\n",
    );
    for (name, state) in STATES {
        let state = match state {
            State::Served => "served".to_owned(),
            State::Refused(code) => format!("refused: `{code}`"),
        };
        text += &format!("| `{name}` | {state} |\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_the_layout_of_the_icd_extension() {
        let at = |name| STATES.iter().position(|(known, _)| *known == name);
        assert_eq!(COUNT, 149);
        assert_eq!(at("clGetPlatformIDs"), Some(0));
        assert_eq!(at("clGetExtensionFunctionAddress"), Some(65));
        assert_eq!(at("clCreateSubDevices"), Some(93));
        assert_eq!(at("clSetContextDestructorCallback"), Some(148));
    }

    #[test]
    fn all_that_devices_need_not_refuse_is_served() {
        let gap = |name: &str| {
            ["GL", "D3D", "DX9", "EGL", "Pipe", "EXT"]
                .iter()
                .any(|part| name.contains(part))
        };
        let missing: Vec<_> = STATES
            .iter()
            .filter(|(name, state)| *state != State::Served && !gap(name))
            .map(|(name, _)| *name)
            .collect();
        let refused = [
            "clSetCommandQueueProperty",
            "clEnqueueNativeKernel",
            "clSetDefaultDeviceCommandQueue",
            "clSetProgramReleaseCallback",
        ];
        assert_eq!(missing, refused);
    }

    #[test]
    fn the_documentation_is_what_the_table_says() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/ENTRY_POINTS.md");
        if std::env::var_os("GANTRY_WRITE_DOCS").is_some() {
            std::fs::write(path, document()).unwrap();
        }
        let there = std::fs::read_to_string(path).unwrap_or_default();
        assert!(
            there == document(),
            "run `GANTRY_WRITE_DOCS=1 cargo test -p gantry-opencl` and commit {path}"
        );
    }
}
