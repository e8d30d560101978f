//! Platforms and devices.

use std::{
    ffi::{CStr, c_char, c_void},
    ptr::null_mut,
    sync::OnceLock,
};

use remoting_proto::{
    apis::opencl::{
        calls::{self, DeviceId, Info, PlatformId, Target},
        codes,
        extensions::passes,
    },
    wire::Blob,
};

use crate::{
    abi::{Outcome, array, bytes, entry_points, give, properties, set},
    link,
    object::{self, Device, Handle, Object, Own, Platform, SUB_DEVICES, get},
    told,
};

/// Asks the worker.
pub fn ask(of: Target, parameter: u32) -> Outcome<Vec<u8>> {
    let Blob(value) = link::connected()?.ask(&Info { of, parameter })?;
    Ok(value)
}

/// The platforms, requested only once.
pub fn all() -> &'static [Own<Platform>] {
    static ALL: OnceLock<Vec<Own<Platform>>> = OnceLock::new();
    ALL.get_or_init(|| {
        let Some(link) = link::get() else {
            return Vec::new();
        };
        let offered = link.ask(&calls::Platforms {}).unwrap_or_default();
        (0u32..)
            .zip(offered)
            .map(|(index, devices)| {
                let id = PlatformId(index);
                let devices = devices
                    .into_iter()
                    .map(|offered| {
                        let device = Device {
                            id: offered.id,
                            platform: id,
                            kind: offered.kind,
                            parent: None,
                            largest_group: OnceLock::new(),
                            svm: OnceLock::new(),
                        };
                        Object::own(device, 1)
                    })
                    .collect();
                Object::own(Platform { id, devices }, 1)
            })
            .collect()
    })
}

entry_points! {
    fn clIcdGetPlatformIDsKHR(count: u32, platforms: *mut Handle<Platform>, count_ret: *mut u32) {
        if !platforms.is_null() && count == 0 || platforms.is_null() && count_ret.is_null() {
            return Err(codes::INVALID_VALUE);
        }
        let all = all();
        if all.is_empty() {
            return Err(codes::PLATFORM_NOT_FOUND_KHR);
        }
        for (index, platform) in all.iter().enumerate().take(count as usize) {
            set(platforms.wrapping_add(index), platform.pointer());
        }
        set(count_ret, all.len() as u32);
        Ok(())
    }
}

pub extern "C" fn clGetPlatformIDs(
    count: u32,
    platforms: *mut Handle<Platform>,
    count_ret: *mut u32,
) -> i32 {
    clIcdGetPlatformIDsKHR(count, platforms, count_ret)
}

fn extensions(native: &[u8], first: &str) -> Vec<u8> {
    let native = String::from_utf8_lossy(native);
    let mut list: Vec<_> = native
        .trim_end_matches('\0')
        .split_whitespace()
        .filter(|extension| passes(extension))
        .collect();
    if !first.is_empty() {
        list.insert(0, first);
    }
    let mut text = list.join(" ").into_bytes();
    text.push(0);
    text
}

/// The list with versions: `cl_name_version`, 4 bytes of version and 64 of name.
fn versioned(native: &[u8], first: bool) -> Vec<u8> {
    let mut list = Vec::new();
    if first {
        let mut icd = [0u8; 68];
        icd[..4].copy_from_slice(&(1u32 << 22).to_ne_bytes());
        icd[4..][..10].copy_from_slice(b"cl_khr_icd");
        list.extend(icd);
    }
    for entry in native.as_chunks::<68>().0 {
        let name = CStr::from_bytes_until_nul(&entry[4..]).unwrap_or_default();
        if name.to_str().is_ok_and(passes) {
            list.extend(entry);
        }
    }
    list
}

entry_points! {
    fn clGetPlatformInfo(
        platform: Handle<Platform>, name: u32, size: usize, value: *mut c_void, size_ret: *mut usize
    ) {
        let id = get(platform)?.it.id;
        let ask = |name| ask(Target::Platform(id), name);
        let answer = match name {
            codes::PLATFORM_ICD_SUFFIX_KHR => b"GANTRY\0".to_vec(),
            codes::PLATFORM_EXTENSIONS => extensions(&ask(name)?, "cl_khr_icd"),
            codes::PLATFORM_EXTENSIONS_WITH_VERSION => versioned(&ask(name)?, true),
            codes::PLATFORM_VERSION => {
                let mut text = ask(name)?;
                text.truncate(text.len().saturating_sub(1));
                text.extend(b" Gantry\0");
                text
            }
            _ => ask(name)?,
        };
        give(&answer, size, value, size_ret)
    }

    fn clGetDeviceIDs(
        platform: Handle<Platform>, kind: u64, count: u32, devices: *mut Handle<Device>, count_ret: *mut u32
    ) {
        let platform = get(platform)?;
        if !devices.is_null() && count == 0 || devices.is_null() && count_ret.is_null() {
            return Err(codes::INVALID_VALUE);
        }
        let all = u64::from(u32::MAX);
        let known = codes::DEVICE_TYPE_DEFAULT
            | codes::DEVICE_TYPE_CPU
            | codes::DEVICE_TYPE_GPU
            | codes::DEVICE_TYPE_ACCELERATOR
            | codes::DEVICE_TYPE_CUSTOM;
        if kind == 0 || kind != all && kind & !known != 0 {
            return Err(codes::INVALID_DEVICE_TYPE);
        }
        let default = platform.it.devices.first().map(|device| device.it.id);
        let found: Vec<_> = platform
            .it
            .devices
            .iter()
            .filter(|device| {
                let is_default = Some(device.it.id) == default;
                if kind == all {
                    device.it.kind & codes::DEVICE_TYPE_CUSTOM == 0
                } else {
                    device.it.kind & kind != 0
                        || is_default && kind & codes::DEVICE_TYPE_DEFAULT != 0
                }
            })
            .collect();
        if found.is_empty() {
            return Err(codes::DEVICE_NOT_FOUND);
        }
        for (index, device) in found.iter().enumerate().take(count as usize) {
            set(devices.wrapping_add(index), device.pointer());
        }
        set(count_ret, found.len() as u32);
        Ok(())
    }
}

/// A numeric limit of a device.
pub fn limit(device: &Object<Device>, name: u32) -> Outcome<u64> {
    Ok(number(&told::own(device.it.id, name)?))
}

fn number(value: &[u8]) -> u64 {
    let mut number = [0; 8];
    let count = value.len().min(8);
    number[..count].copy_from_slice(&value[..count]);
    u64::from_le_bytes(number)
}

/// Whether this query is about pipes or device-side queues, which are not offered: devices report 0
/// even if the host's support them.
fn is_withheld(name: u32) -> bool {
    matches!(
        name,
        codes::DEVICE_PIPE_SUPPORT
            | codes::DEVICE_MAX_PIPE_ARGS
            | codes::DEVICE_PIPE_MAX_ACTIVE_RESERVATIONS
            | codes::DEVICE_PIPE_MAX_PACKET_SIZE
            | codes::DEVICE_QUEUE_ON_DEVICE_PROPERTIES
            | codes::DEVICE_QUEUE_ON_DEVICE_PREFERRED_SIZE
            | codes::DEVICE_QUEUE_ON_DEVICE_MAX_SIZE
            | codes::DEVICE_MAX_ON_DEVICE_QUEUES
            | codes::DEVICE_MAX_ON_DEVICE_EVENTS
            | codes::DEVICE_DEVICE_ENQUEUE_CAPABILITIES
    )
}

entry_points! {
    fn clGetDeviceInfo(
        device: Handle<Device>, name: u32, size: usize, value: *mut c_void, size_ret: *mut usize
    ) {
        let device = get(device)?;
        let id = device.it.id;
        let answer = match name {
            codes::DEVICE_PLATFORM => {
                let platform = all().get(device.it.platform.0 as usize);
                bytes(&[platform.map_or(null_mut(), |platform| platform.pointer())])
            }
            codes::DEVICE_PARENT_DEVICE => {
                let parent = device.it.parent.as_ref();
                bytes(&[parent.map_or(null_mut(), |parent| parent.pointer())])
            }
            codes::DEVICE_REFERENCE_COUNT => bytes(&[device.count()]),
            codes::DEVICE_EXTENSIONS => extensions(&told::answer(id, name)?, ""),
            codes::DEVICE_EXTENSIONS_WITH_VERSION => versioned(&told::answer(id, name)?, false),
            // Finer grains of shared virtual memory would need common memory.
            codes::DEVICE_SVM_CAPABILITIES => {
                let told = number(&told::answer(id, name)?);
                bytes(&[told & codes::DEVICE_SVM_COARSE_GRAIN_BUFFER])
            }
            _ if is_withheld(name) => vec![0; told::answer(id, name)?.len()],
            // Kernels run on the device only: native functions of the application are not
            // supported.
            codes::DEVICE_EXECUTION_CAPABILITIES => bytes(&[1u64]),
            _ => told::answer(id, name)?,
        };
        give(&answer, size, value, size_ret)
    }

    fn clCreateSubDevices(
        device: Handle<Device>, list: *const isize, count: u32, devices: *mut Handle<Device>,
        count_ret: *mut u32
    ) {
        let parent = get(device)?;
        let link = link::connected()?;
        // The only kind of list with an inner terminator: partition by counts.
        let first = array(list, 1);
        let properties: Vec<u64> = if first.first() == Some(&0x1087) {
            let mut all = vec![0x1087];
            let mut at = 1;
            loop {
                let next = array(list.wrapping_add(at), 1)[0] as u64;
                all.push(next);
                if next == 0 {
                    break all;
                }
                at += 1;
            }
        } else {
            properties(list).into_iter().map(|p| p as u64).collect()
        };
        if properties.is_empty() || !devices.is_null() && count == 0 {
            return Err(codes::INVALID_VALUE);
        }
        let mut call = calls::CreateSubDevices {
            device: parent.it.id,
            properties,
            ids: Vec::new(),
        };
        let there = link.ask(&call)?;
        set(count_ret, there);
        if devices.is_null() {
            return Ok(());
        }
        if count < there {
            return Err(codes::INVALID_VALUE);
        }
        call.ids = (0..there)
            .map(|_| DeviceId(SUB_DEVICES + link.state.ids.sub_devices.take()))
            .collect();
        if let Err(code) = link.ask(&call) {
            for id in &call.ids {
                link.state.ids.sub_devices.give(id.0 - SUB_DEVICES);
            }
            return Err(code);
        }
        for (index, id) in call.ids.into_iter().enumerate() {
            let device = Object::handle(Device {
                id,
                platform: parent.it.platform,
                kind: parent.it.kind,
                parent: Some(parent.keep()),
                largest_group: OnceLock::new(),
                svm: OnceLock::new(),
            });
            set(devices.wrapping_add(index), device);
        }
        Ok(())
    }

    fn clRetainDevice(device: Handle<Device>) {
        match &get(device)?.it.parent {
        Some(_) => object::retain(device),
        None => Ok(()),
    }
    }

    fn clReleaseDevice(device: Handle<Device>) {
        match &get(device)?.it.parent {
        Some(_) => object::release(device),
        None => Ok(()),
    }
    }

    fn clGetDeviceAndHostTimer(device: Handle<Device>, there: *mut u64, here: *mut u64) {
        let device = get(device)?;
        let (a, b) = link::connected()?.ask(&calls::Timers {
            device: device.it.id,
        })?;
        if there.is_null() || here.is_null() {
            return Err(codes::INVALID_VALUE);
        }
        set(there, a);
        set(here, b);
        Ok(())
    }
}

pub extern "C" fn clGetHostTimer(device: Handle<Device>, here: *mut u64) -> i32 {
    let mut there = 0;
    clGetDeviceAndHostTimer(device, &raw mut there, here)
}

/// No extension with entry points of its own is supported, except the one that finds this driver.
pub extern "C" fn clGetExtensionFunctionAddress(name: *const c_char) -> *mut c_void {
    if crate::abi::text(name) == b"clIcdGetPlatformIDsKHR" {
        return clIcdGetPlatformIDsKHR as *mut c_void;
    }
    null_mut()
}

pub extern "C" fn clGetExtensionFunctionAddressForPlatform(
    _: Handle<Platform>,
    name: *const c_char,
) -> *mut c_void {
    clGetExtensionFunctionAddress(name)
}

entry_points! {
    fn clUnloadPlatformCompiler(platform: Handle<Platform>) {
        get(platform).map(drop)
    }
}

pub extern "C" fn clUnloadCompiler() -> i32 {
    codes::SUCCESS
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    #[test]
    fn a_device_with_queues_and_pipes_of_its_own_is_offered_without_them() {
        let _alone = testing::alone();
        let device = all()[0].it.devices[0].pointer();
        let ask = |name| {
            let (mut value, mut size) = (u64::MAX, 0);
            let to = (&raw mut value).cast();
            let code = clGetDeviceInfo(device, name, 8, to, &raw mut size);
            assert_eq!(code, 0, "{name:x}");
            // The bytes that are written.
            (value & u64::MAX >> (64 - 8 * size), size)
        };
        for name in [
            codes::DEVICE_QUEUE_ON_DEVICE_PROPERTIES,
            codes::DEVICE_DEVICE_ENQUEUE_CAPABILITIES,
        ] {
            assert_eq!(ask(name), (0, 8), "{name:x}");
        }
        for name in [
            codes::DEVICE_QUEUE_ON_DEVICE_PREFERRED_SIZE,
            codes::DEVICE_QUEUE_ON_DEVICE_MAX_SIZE,
            codes::DEVICE_MAX_ON_DEVICE_QUEUES,
            codes::DEVICE_MAX_ON_DEVICE_EVENTS,
            codes::DEVICE_PIPE_SUPPORT,
            codes::DEVICE_MAX_PIPE_ARGS,
            codes::DEVICE_PIPE_MAX_ACTIVE_RESERVATIONS,
            codes::DEVICE_PIPE_MAX_PACKET_SIZE,
        ] {
            assert_eq!(ask(name), (0, 4), "{name:x}");
        }
        // What the test device returns for everything else.
        assert_eq!(ask(codes::DEVICE_MAX_WORK_GROUP_SIZE), (testing::LIMIT, 8));
    }
}
