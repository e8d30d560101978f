//! Entry points that versions after OpenCL 1.2 have added: whether the platform has them.

use std::ptr::null_mut;

use gantry_remoting::{apis::opencl::codes, backends::opencl::driver::api::Handle};

use super::{Part, device::cl};

/// Those that are called here, with their places in a driver's table (`struct _cl_icd_dispatch` of
/// `cl_icd.h`).
const ADDED: &[(&str, usize)] = &[
    ("clCreatePipe", 124),
    ("clGetPipeInfo", 125),
    ("clCreateSamplerWithProperties", 133),
    ("clCloneKernel", 137),
    ("clCreateProgramWithIL", 138),
    ("clGetDeviceAndHostTimer", 140),
    ("clGetHostTimer", 141),
    ("clGetKernelSubGroupInfo", 142),
    ("clSetDefaultDeviceCommandQueue", 143),
    ("clSetProgramReleaseCallback", 144),
    ("clSetProgramSpecializationConstant", 145),
    ("clCreateBufferWithProperties", 146),
    ("clCreateImageWithProperties", 147),
    ("clSetContextDestructorCallback", 148),
];

/// OpenCL 3.0, as `CL_PLATFORM_NUMERIC_VERSION` has it.
const VERSION_3_0: u32 = 3 << 22;

impl Part {
    /// Whether the platform has an entry point, and says so if it has not. Loaders call what stands
    /// in the driver's table without looking whether something does.
    pub fn has(&mut self, name: &str) -> bool {
        let place = ADDED.iter().find(|(added, _)| *added == name);
        let there = place.is_some_and(|(_, place)| self.is_3_0() && self.entry(*place) != 0);
        if !there {
            self.say(name, "not there");
        }
        there
    }

    /// Whether the platform is of OpenCL 3.0 or later; older ones do not know the question.
    fn is_3_0(&self) -> bool {
        let mut version = 0u32;
        let to = (&raw mut version).cast();
        let (id, name) = (self.device.platform, codes::PLATFORM_NUMERIC_VERSION);
        let code = cl!(
            self.device.api,
            clGetPlatformInfo(id, name, 4, to, null_mut())
        );
        code == 0 && version >= VERSION_3_0
    }

    /// What is at a place of the driver's table.
    fn entry(&self, place: usize) -> usize {
        let platform = self.device.platform as *const *const Handle;
        // SAFETY: an object of a driver that a loader has found begins with the address of the
        // driver's table (cl_khr_icd), which is as long as OpenCL 3.0's if the driver is of 3.0.
        unsafe { (*platform).add(place).read() }
    }
}
