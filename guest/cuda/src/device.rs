//! Devices, as the worker describes them.

use std::{
    cell::Cell,
    ffi::{CStr, c_char, c_int, c_uint},
};

use base::Unpoisoned;
use cuda_definition::driver::types::*;
use remoting_proto::apis::cuda::{
    calls::{DeviceInfo, Started},
    codes,
};

use crate::{
    context,
    entry::{self, Outcome, connected, entry_points, offer, put, put_text},
    link, names, visible,
};

/// The newest version of which all entry points exist.
const VERSION: u32 = 13000;

thread_local! {
    /// Whether this thread asks about devices only, without `cuInit`.
    static DESCRIBES: Cell<bool> = const { Cell::new(false) };
}

/// Makes this thread's queries of devices succeed without `cuInit`, and be of all devices, or no
/// longer: for Gantry's management library, after which a forked child may still call `cuInit`. Returns
/// what was before.
#[unsafe(no_mangle)]
pub extern "C" fn gantry_cuda_describes(describes: bool) -> bool {
    DESCRIBES.replace(describes)
}

/// Bytes of a device's memory that this process has allocated, for Gantry's management library. What
/// the device has in use is the whole machine's, or everybody's.
#[unsafe(no_mangle)]
pub extern "C" fn gantry_cuda_allocated(device: CUdevice) -> u64 {
    let Ok(link) = connected() else {
        return 0;
    };
    let memory = link.state.memory.lock_unpoisoned();
    memory.allocated(|context| context::is_of(context, device))
}

/// What the worker provides, whichever devices the program sees.
fn described() -> Outcome<&'static Started> {
    match link::known() {
        Some(known) => Ok(known),
        None => link::started(link::get().ok_or(codes::NO_DEVICE)?),
    }
}

fn info(device: CUdevice) -> Outcome<&'static DeviceInfo> {
    let ordinal = usize::try_from(device).map_err(|_| codes::INVALID_DEVICE)?;
    if DESCRIBES.get() {
        return described()?
            .devices
            .get(ordinal)
            .ok_or(codes::INVALID_DEVICE);
    }
    visible::device(connected()?, ordinal)
}

/// Checks that there is a device.
///
/// # Errors
/// There is none with this ordinal.
pub fn check(device: CUdevice) -> Outcome {
    info(device).map(drop)
}

/// Features that a device has natively but not here, so that programs do without them. The worker
/// shares no memory with other processes and has no descriptors for it. Memory that a program
/// registers has another address on the device, ordinary memory has none, and managed memory does
/// not migrate. Memory of the host's pools would be the worker's.
const ABSENT: &[CUdevice_attribute] = &[
    CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM,
    CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS,
    CUdevice_attribute::CU_DEVICE_ATTRIBUTE_DIRECT_MANAGED_MEM_ACCESS_FROM_HOST,
    CUdevice_attribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED,
    CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED,
    CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
    CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED,
    CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
    CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HOST_ALLOC_DMA_BUF_SUPPORTED,
    CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HOST_MEMORY_POOLS_SUPPORTED,
    CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HOST_NUMA_MEMORY_POOLS_SUPPORTED,
    CUdevice_attribute::CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED,
    CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES,
    CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED,
    CUdevice_attribute::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS,
    CUdevice_attribute::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES,
];

/// An attribute of a device.
pub fn attribute(device: CUdevice, number: u32) -> Outcome<i32> {
    let value = info(device)?.attributes.get(number as usize);
    match value {
        None | Some(&i32::MIN) => Err(codes::INVALID_VALUE),
        Some(_) if ABSENT.iter().any(|one| one.0 == number) => Ok(0),
        Some(value) => Ok(*value),
    }
}

entry_points! {
    fn cuInit(Flags: c_uint) {
        if Flags != 0 {
            return Err(codes::INVALID_VALUE);
        }
        let link = link::get().ok_or(codes::NO_DEVICE)?;
        names::prepare();
        // Before it is chosen what the worker numbers, for this process alone.
        entry::start()?;
        visible::choose(link).inspect_err(|_| entry::stop())
    }

    fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int) {
        info(ordinal)?;
        put(device, ordinal)
    }

    fn cuDeviceGetCount(count: *mut c_int) {
        let devices = match DESCRIBES.get() {
            true => described()?.devices.len(),
            false => connected().map(|_| visible::count())?,
        };
        put(count, c_int::try_from(devices).unwrap_or(c_int::MAX))
    }

    fn cuDeviceGetName(name: *mut c_char, len: c_int, dev: CUdevice) {
        put_text(name, len, &info(dev)?.name.0)
    }

    fn cuDeviceGetUuid(uuid: *mut CUuuid, dev: CUdevice) {
        put(uuid, CUuuid { bytes: info(dev)?.uuid.map(|byte| byte as c_char) })
    }

    fn cuDeviceGetUuid_v2(uuid: *mut CUuuid, dev: CUdevice) {
        put(uuid, CUuuid { bytes: info(dev)?.uuid.map(|byte| byte as c_char) })
    }

    fn cuDeviceTotalMem_v2(bytes: *mut usize, dev: CUdevice) {
        put(bytes, usize::try_from(info(dev)?.memory).unwrap_or(usize::MAX))
    }

    fn cuDeviceGetAttribute(pi: *mut c_int, attrib: CUdevice_attribute, dev: CUdevice) {
        put(pi, attribute(dev, attrib.0)?)
    }

    fn cuDeviceComputeCapability(major: *mut c_int, minor: *mut c_int, dev: CUdevice) {
        let of = |one: CUdevice_attribute| attribute(dev, one.0);
        put(major, of(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?)?;
        put(minor, of(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?)
    }

    fn cuDeviceGetPCIBusId(pciBusId: *mut c_char, len: c_int, dev: CUdevice) {
        put_text(pciBusId, len, &info(dev)?.bus.0)
    }

    fn cuDeviceGetByPCIBusId(dev: *mut CUdevice, pciBusId: *const c_char) {
        let link = connected()?;
        if pciBusId.is_null() {
            return Err(codes::INVALID_VALUE);
        }
        let wanted = CStr::from_ptr(pciBusId).to_bytes();
        let is_wanted = |ordinal: &usize| {
            visible::device(link, *ordinal).is_ok_and(|one| one.bus.0.eq_ignore_ascii_case(wanted))
        };
        let ordinal = (0..visible::count()).find(is_wanted);
        put(dev, c_int::try_from(ordinal.ok_or(codes::INVALID_DEVICE)?).unwrap_or(0))
    }


    fn cuModuleGetLoadingMode(mode: *mut CUmoduleLoadingMode) {
        connected()?;
        offer(mode, CUmoduleLoadingMode::CU_MODULE_EAGER_LOADING);
        Ok(())
    }

    // Nobody records.
    fn cuProfilerStart() {
        context::need_connected().map(drop)
    }

    fn cuProfilerStop() {
        context::need_connected().map(drop)
    }
}

entry_points! { everywhere:
    fn cuDriverGetVersion(driverVersion: *mut c_int) {
        let host = link::known().or_else(|| link::started(link::get()?).ok());
        let host = host.map_or(VERSION, |started| started.version);
        put(driverVersion, host.min(VERSION).cast_signed())
    }
}
