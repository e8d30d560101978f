//! NVIDIA's management library, `libnvidia-ml.so.1`, for a guest: what programs query to find devices, answered through
//! the public CUDA driver API of whatever `libcuda.so.1` the loader finds.
//!
//! What that driver does not know is not supported (3): the version of the host's driver, utilization, current clocks,
//! temperatures, other processes. A device's memory is what its application may use: the quota.
//!
//! Gantry's driver answers queries of devices without `cuInit`, so that a process which only asks may fork, and its
//! children compute.

#![allow(missing_docs, non_snake_case, non_camel_case_types)]

pub mod driver;
mod refused;

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong};

use cuda_definition::driver::types::CUdevice_attribute as Attribute;
use driver::{Device, Driver};

/// `nvmlReturn_t`
pub type nvmlReturn_t = c_int;
/// A handle: the device's ordinal plus one, so that none is null.
pub type nvmlDevice_t = usize;

pub const SUCCESS: nvmlReturn_t = 0;
pub const UNINITIALIZED: nvmlReturn_t = 1;
pub const INVALID_ARGUMENT: nvmlReturn_t = 2;
pub const NOT_SUPPORTED: nvmlReturn_t = 3;
pub const NOT_FOUND: nvmlReturn_t = 6;
pub const INSUFFICIENT_SIZE: nvmlReturn_t = 7;
pub const DRIVER_NOT_LOADED: nvmlReturn_t = 9;
pub const VERSION_MISMATCH: nvmlReturn_t = 25;
pub const UNKNOWN: nvmlReturn_t = 999;

type Answer = Result<(), nvmlReturn_t>;

/// `nvmlMemory_t`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct nvmlMemory_t {
    pub total: c_ulonglong,
    pub free: c_ulonglong,
    pub used: c_ulonglong,
}

/// `nvmlMemory_v2_t`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct nvmlMemory_v2_t {
    /// Size and version, as known to the caller.
    pub version: c_uint,
    pub total: c_ulonglong,
    pub reserved: c_ulonglong,
    pub free: c_ulonglong,
    pub used: c_ulonglong,
}
/// `nvmlMemory_v2`
const MEMORY_2: c_uint = size_of::<nvmlMemory_v2_t>() as c_uint | 2 << 24;

/// The structure of callers of the first `nvmlDeviceGetPciInfo`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct nvmlPciInfo_v1_t {
    pub busId: [c_char; 16],
    pub domain: c_uint,
    pub bus: c_uint,
    pub device: c_uint,
    pub pciDeviceId: c_uint,
}

/// The structure of callers of `nvmlDeviceGetPciInfo_v2`, without the four reserved words that follow: nothing is
/// written there.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct nvmlPciInfo_v2_t {
    pub first: nvmlPciInfo_v1_t,
    pub pciSubSystemId: c_uint,
}

/// `nvmlPciInfo_t`, since `nvmlDeviceGetPciInfo_v3`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct nvmlPciInfo_t {
    pub busIdLegacy: [c_char; 16],
    pub domain: c_uint,
    pub bus: c_uint,
    pub device: c_uint,
    pub pciDeviceId: c_uint,
    pub pciSubSystemId: c_uint,
    pub busId: [c_char; 32],
}

/// `nvmlProcessInfo_v1_t`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct nvmlProcessInfo_v1_t {
    pub pid: c_uint,
    pub usedGpuMemory: c_ulonglong,
}

/// `nvmlProcessInfo_v2_t`, also of the third version of the functions.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct nvmlProcessInfo_v2_t {
    pub pid: c_uint,
    pub usedGpuMemory: c_ulonglong,
    pub gpuInstanceId: c_uint,
    pub computeInstanceId: c_uint,
}

/// The instance of a device that is not partitioned.
const NO_INSTANCE: c_uint = c_uint::MAX;

fn result(answer: Answer) -> nvmlReturn_t {
    answer.err().unwrap_or(SUCCESS)
}

/// Lists the processes that compute on a device: this one, if it has a context there. `record` makes its record.
///
/// # Safety
/// `count` is null or holds the number of records that there is room for at `to`.
unsafe fn list_processes<T>(
    handle: nvmlDevice_t,
    count: *mut c_uint,
    to: *mut T,
    record: impl FnOnce(c_uint, c_ulonglong) -> T,
) -> Answer {
    // SAFETY: the caller's promise.
    let room = *unsafe { count.as_ref() }.ok_or(INVALID_ARGUMENT)?;
    let used = device(handle)?.used()?;
    // SAFETY: as above.
    unsafe { put(count, c_uint::from(used.is_some()))? };
    match used {
        None => Ok(()),
        Some(_) if room == 0 => Err(INSUFFICIENT_SIZE),
        // SAFETY: as above.
        Some(used) => unsafe { put(to, record(std::process::id(), used)) },
    }
}

/// Writes a result.
///
/// # Safety
/// `to` is null or valid for writing.
unsafe fn put<T>(to: *mut T, value: T) -> Answer {
    if to.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    // SAFETY: the caller's promise.
    unsafe { to.write_unaligned(value) };
    Ok(())
}

/// Writes a text with a terminating zero.
///
/// # Safety
/// There is room for `length` bytes.
unsafe fn put_text(to: *mut c_char, length: c_uint, text: &str) -> Answer {
    if to.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    if text.len() >= length as usize {
        return Err(INSUFFICIENT_SIZE);
    }
    // SAFETY: the caller's promise; the length was checked.
    unsafe {
        to.cast::<u8>()
            .copy_from_nonoverlapping(text.as_ptr(), text.len());
        to.add(text.len()).write(0);
    }
    Ok(())
}

/// A text of the caller's.
///
/// # Safety
/// It is null or ends in a zero.
unsafe fn text<'a>(from: *const c_char) -> Result<&'a str, nvmlReturn_t> {
    if from.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(from) };
    text.to_str().map_err(|_| INVALID_ARGUMENT)
}

fn device(handle: nvmlDevice_t) -> Result<Device, nvmlReturn_t> {
    let ordinal = handle.checked_sub(1).ok_or(INVALID_ARGUMENT)?;
    Driver::get()?.device(ordinal)
}

/// The first device that satisfies a condition.
fn find(wanted: impl Fn(&Device) -> bool) -> Result<nvmlDevice_t, nvmlReturn_t> {
    let driver = Driver::get()?;
    for ordinal in 0..driver.count()? {
        if wanted(&driver.device(ordinal)?) {
            return Ok(ordinal + 1);
        }
    }
    Err(NOT_FOUND)
}

/// The domain, bus and device of a PCI address with any number of digits.
pub fn address(text: &str) -> Option<(u32, u32, u32)> {
    let (domain, rest) = text.split_once(':')?;
    let (bus, rest) = rest.split_once(':')?;
    let device = rest.split('.').next()?;
    let number = |digits| u32::from_str_radix(digits, 16).ok();
    Some((number(domain)?, number(bus)?, number(device)?))
}

/// The `nvmlDeviceArchitecture_t` of a compute capability. Unknown for capabilities that are newer than this code.
fn architecture_of(capability: (c_int, c_int)) -> c_uint {
    match capability {
        (5, _) => 3,
        (6, _) => 4,
        (7, 0..5) => 5,
        (7, _) => 6,
        (8, 9) => 8,
        (8, _) => 7,
        (9, _) => 9,
        (10 | 12, _) => 10,
        _ => c_uint::MAX,
    }
}

/// The number of cores of a multiprocessor, by compute capability: the number of 32-bit operations per clock in the
/// CUDA programming guide.
fn cores_each(capability: (c_int, c_int)) -> Option<c_uint> {
    match capability {
        (6 | 8, 0) | (7, _) => Some(64),
        (5 | 6 | 8 | 9 | 10 | 12, _) => Some(128),
        _ => None,
    }
}

fn characters<const LENGTH: usize>(text: &str) -> [c_char; LENGTH] {
    let mut all = [0; LENGTH];
    // The last character stays zero.
    for (to, from) in all[..LENGTH - 1].iter_mut().zip(text.bytes()) {
        *to = from.cast_signed();
    }
    all
}

impl nvmlPciInfo_t {
    /// The part that the first version's structure has.
    fn first(&self) -> nvmlPciInfo_v1_t {
        nvmlPciInfo_v1_t {
            busId: self.busIdLegacy,
            domain: self.domain,
            bus: self.bus,
            device: self.device,
            pciDeviceId: self.pciDeviceId,
        }
    }
}

fn pci_info(handle: nvmlDevice_t) -> Result<nvmlPciInfo_t, nvmlReturn_t> {
    let device = device(handle)?;
    let (domain, bus, slot) = address(&device.bus).ok_or(NOT_SUPPORTED)?;
    Ok(nvmlPciInfo_t {
        busIdLegacy: characters(&format!("{domain:04X}:{bus:02X}:{slot:02X}.0")),
        domain,
        bus,
        device: slot,
        // The driver does not report the ID.
        pciDeviceId: 0,
        pciSubSystemId: 0,
        busId: characters(&format!("{domain:08X}:{bus:02X}:{slot:02X}.0")),
    })
}

/// Defines entry points, some under several names.
macro_rules! entry_points {
    (@one $name:ident ($($argument:ident: $of:ty),* $(,)?) $body:block) => {
        #[unsafe(no_mangle)]
        #[allow(unused_unsafe, clippy::missing_safety_doc)]
        pub unsafe extern "C" fn $name($($argument: $of),*) -> nvmlReturn_t {
            // SAFETY: callers keep the API's promises about the pointers that they pass, as callers of any C library
            // do.
            let answer = || -> Answer { unsafe { $body } };
            result(answer())
        }
    };
    (@all ($($name:ident)*) $arguments:tt $body:block) => {
        $(entry_points! { @one $name $arguments $body })*
    };
    ($(fn [$($name:ident)*] $arguments:tt $body:block)*) => {
        $(entry_points! { @all ($($name)*) $arguments $body })*
    };
}

entry_points! {
    fn [nvmlInit nvmlInit_v2] () {
        Driver::start()
    }

    fn [nvmlInitWithFlags] (_flags: c_uint) {
        Driver::start()
    }

    fn [nvmlShutdown] () {
        Driver::end()
    }

    fn [nvmlSystemGetCudaDriverVersion nvmlSystemGetCudaDriverVersion_v2] (version: *mut c_int) {
        put(version, Driver::get()?.version()?)
    }

    fn [nvmlDeviceGetCount nvmlDeviceGetCount_v2] (count: *mut c_uint) {
        put(count, Driver::get()?.count()? as c_uint)
    }

    fn [nvmlDeviceGetHandleByIndex nvmlDeviceGetHandleByIndex_v2] (index: c_uint, to: *mut nvmlDevice_t) {
        let ordinal = index as usize;
        Driver::get()?.device(ordinal)?;
        put(to, ordinal + 1)
    }

    fn [nvmlDeviceGetHandleByUUID] (uuid: *const c_char, to: *mut nvmlDevice_t) {
        let wanted = text(uuid)?;
        put(to, find(|device| device.uuid == wanted)?)
    }

    fn [nvmlDeviceGetHandleByPciBusId nvmlDeviceGetHandleByPciBusId_v2] (bus: *const c_char, to: *mut nvmlDevice_t) {
        let wanted = address(text(bus)?).ok_or(INVALID_ARGUMENT)?;
        put(to, find(|device| address(&device.bus) == Some(wanted))?)
    }

    fn [nvmlDeviceGetIndex] (handle: nvmlDevice_t, index: *mut c_uint) {
        device(handle)?;
        put(index, handle as c_uint - 1)
    }

    fn [nvmlDeviceGetName] (handle: nvmlDevice_t, name: *mut c_char, length: c_uint) {
        put_text(name, length, &device(handle)?.name)
    }

    fn [nvmlDeviceGetUUID] (handle: nvmlDevice_t, uuid: *mut c_char, length: c_uint) {
        put_text(uuid, length, &device(handle)?.uuid)
    }

    fn [nvmlDeviceGetCudaComputeCapability] (handle: nvmlDevice_t, major: *mut c_int, minor: *mut c_int) {
        let capability = device(handle)?.capability;
        put(major, capability.0)?;
        put(minor, capability.1)
    }

    // The driver's modes have the same numbers.
    fn [nvmlDeviceGetComputeMode] (handle: nvmlDevice_t, mode: *mut c_uint) {
        put(mode, device(handle)?.attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_MODE)?)
    }

    fn [nvmlDeviceGetEccMode] (handle: nvmlDevice_t, current: *mut c_uint, pending: *mut c_uint) {
        let mode = device(handle)?.attribute(Attribute::CU_DEVICE_ATTRIBUTE_ECC_ENABLED)?;
        put(current, mode)?;
        put(pending, mode)
    }

    // In MHz, for multiprocessors and graphics, which share a clock, and for memory.
    fn [nvmlDeviceGetMaxClockInfo] (handle: nvmlDevice_t, which: c_uint, clock: *mut c_uint) {
        let which = match which {
            0 | 1 => Attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE,
            2 => Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE,
            3 => return Err(NOT_SUPPORTED),
            _ => return Err(INVALID_ARGUMENT),
        };
        put(clock, device(handle)?.attribute(which)? / 1000)
    }

    fn [nvmlDeviceGetMemoryBusWidth] (handle: nvmlDevice_t, bits: *mut c_uint) {
        let which = Attribute::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH;
        put(bits, device(handle)?.attribute(which)?)
    }

    fn [nvmlDeviceGetNumGpuCores] (handle: nvmlDevice_t, cores: *mut c_uint) {
        let device = device(handle)?;
        let each = cores_each(device.capability).ok_or(NOT_SUPPORTED)?;
        put(cores, each * device.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?)
    }

    fn [nvmlDeviceGetArchitecture] (handle: nvmlDevice_t, architecture: *mut c_uint) {
        put(architecture, architecture_of(device(handle)?.capability))
    }

    fn [nvmlDeviceGetPciInfo] (handle: nvmlDevice_t, to: *mut nvmlPciInfo_v1_t) {
        put(to, pci_info(handle)?.first())
    }

    fn [nvmlDeviceGetPciInfo_v2] (handle: nvmlDevice_t, to: *mut nvmlPciInfo_v2_t) {
        let info = pci_info(handle)?;
        put(to, nvmlPciInfo_v2_t { first: info.first(), pciSubSystemId: info.pciSubSystemId })
    }

    fn [nvmlDeviceGetPciInfo_v3] (handle: nvmlDevice_t, to: *mut nvmlPciInfo_t) {
        put(to, pci_info(handle)?)
    }

    fn [nvmlDeviceGetComputeRunningProcesses] (
        handle: nvmlDevice_t,
        count: *mut c_uint,
        to: *mut nvmlProcessInfo_v1_t,
    ) {
        list_processes(handle, count, to, |pid, usedGpuMemory| nvmlProcessInfo_v1_t { pid, usedGpuMemory })
    }

    fn [nvmlDeviceGetComputeRunningProcesses_v2 nvmlDeviceGetComputeRunningProcesses_v3] (
        handle: nvmlDevice_t,
        count: *mut c_uint,
        to: *mut nvmlProcessInfo_v2_t,
    ) {
        list_processes(handle, count, to, |pid, usedGpuMemory| nvmlProcessInfo_v2_t {
            pid,
            usedGpuMemory,
            gpuInstanceId: NO_INSTANCE,
            computeInstanceId: NO_INSTANCE,
        })
    }

    fn [nvmlDeviceGetMemoryInfo] (handle: nvmlDevice_t, to: *mut nvmlMemory_t) {
        let (free, total) = device(handle)?.memory()?;
        put(to, nvmlMemory_t { total, free, used: total - free })
    }

    fn [nvmlDeviceGetMemoryInfo_v2] (handle: nvmlDevice_t, to: *mut nvmlMemory_v2_t) {
        let version = to.as_ref().ok_or(INVALID_ARGUMENT)?.version;
        if version != MEMORY_2 {
            return Err(VERSION_MISMATCH);
        }
        let (free, total) = device(handle)?.memory()?;
        put(to, nvmlMemory_v2_t { version, total, reserved: 0, free, used: total - free })
    }
}

/// The description of a result.
pub fn error_text(error: nvmlReturn_t) -> &'static CStr {
    match error {
        SUCCESS => c"The operation was successful",
        UNINITIALIZED => c"The library has not been initialized",
        INVALID_ARGUMENT => c"An argument is invalid",
        NOT_SUPPORTED => c"Not supported by Gantry's management library",
        NOT_FOUND => c"Not found",
        INSUFFICIENT_SIZE => c"There is too little room for the answer",
        DRIVER_NOT_LOADED => c"There is no CUDA driver, or no worker",
        VERSION_MISMATCH => c"This version of a structure is not known",
        _ => c"Unknown error",
    }
}

/// `nvmlErrorString`
#[unsafe(no_mangle)]
pub extern "C" fn nvmlErrorString(error: nvmlReturn_t) -> *const c_char {
    error_text(error).as_ptr()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_alike_whatever_digits_they_have() {
        assert_eq!(address("0000:0b:00.0"), Some((0, 11, 0)));
        assert_eq!(address("00000000:0B:00.0"), address("0000:0b:00.0"));
        assert_eq!(address("0b:00.0"), None);
        assert_eq!(address("x:y:z"), None);
    }

    #[test]
    fn generations_are_told_by_their_compute_capability() {
        for (capability, architecture, cores) in [
            ((7, 0), 5, Some(64)),
            ((7, 5), 6, Some(64)),
            ((8, 0), 7, Some(64)),
            ((8, 6), 7, Some(128)),
            ((8, 9), 8, Some(128)),
            ((9, 0), 9, Some(128)),
            ((99, 0), u32::MAX, None),
        ] {
            assert_eq!(architecture_of(capability), architecture);
            assert_eq!(cores_each(capability), cores);
        }
    }

    #[test]
    fn texts_end_within_their_room() {
        let mut room = [7; 4];
        // SAFETY: there is this much room.
        unsafe {
            assert_eq!(put_text(room.as_mut_ptr(), 4, "abc"), Ok(()));
            assert_eq!(room, [97, 98, 99, 0]);
            assert_eq!(
                put_text(room.as_mut_ptr(), 4, "abcd"),
                Err(INSUFFICIENT_SIZE)
            );
            assert_eq!(put_text(room.as_mut_ptr(), 0, ""), Err(INSUFFICIENT_SIZE));
        }
        assert_eq!(characters::<4>("abcdef"), [97, 98, 99, 0]);
    }
}
