//! Entry points that were added after OpenCL 1.2: whether the platform has them.

use std::ptr::null_mut;

use remoting_opencl::driver::api::Handle;
use remoting_proto::apis::opencl::codes;

use super::{Part, device::cl};

/// The ones that are called here, with their indices in a driver's table (`struct _cl_icd_dispatch`
/// of `cl_icd.h`).
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

/// OpenCL 3.0, in the format of `CL_PLATFORM_NUMERIC_VERSION`.
const VERSION_3_0: u32 = 3 << 22;

impl Part {
    /// Whether the platform has an entry point. Reports it if not. Loaders call the entry in the
    /// driver's table without checking that there is one.
    pub fn has(&mut self, name: &str) -> bool {
        let place = ADDED.iter().find(|(added, _)| *added == name);
        let there = place.is_some_and(|(_, place)| self.is_3_0() && self.entry(*place) != 0);
        if !there {
            self.say(name, "not there");
        }
        there
    }

    /// Whether the platform supports OpenCL 3.0 or later. Older ones do not know the query.
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

    /// The entry at an index of the driver's table.
    fn entry(&self, place: usize) -> usize {
        let platform = self.device.platform as *const *const Handle;
        // SAFETY: an object of a driver that a loader has found begins with the address of the
        // driver's table (cl_khr_icd), which has the length of OpenCL 3.0's if the driver supports
        // 3.0.
        unsafe { (*platform).add(place).read() }
    }
}
