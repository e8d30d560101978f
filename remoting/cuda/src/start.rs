//! Information about the driver and its devices.

use std::ffi::{CStr, c_char};

use base::gpus::{self, Choice, Gpu, Unmatched};
use cuda_definition::driver::types::{CUdevice_attribute_enum, CUuuid, cudaError_enum};
use remoting_proto::{
    apis::cuda::{
        Kind,
        calls::{DeviceInfo, Started},
        codes,
    },
    wire::Blob,
};

use super::{
    Server,
    driver::{Api, cu, outcome},
};

/// Attribute numbers are below this.
const ATTRIBUTES: u32 = 160;

fn text(call: impl FnOnce(*mut c_char, i32) -> i32) -> Vec<u8> {
    let mut buffer = [0u8; 256];
    // The last byte stays zero.
    if call(buffer.as_mut_ptr().cast(), 255) != 0 {
        return Vec::new();
    }
    let text = CStr::from_bytes_until_nul(&buffer);
    text.map_or(Vec::new(), |text| text.to_bytes().to_vec())
}

fn name(api: &Api, device: i32) -> Vec<u8> {
    text(|buffer, length| cu!(api, cuDeviceGetName(buffer, length, device)))
}

/// The PCI address, as the driver prints it.
fn bus(api: &Api, device: i32) -> Vec<u8> {
    text(|buffer, length| cu!(api, cuDeviceGetPCIBusId(buffer, length, device)))
}

/// What a device is selected by.
fn gpu(api: &Api, device: i32) -> Gpu {
    let mut uuid = CUuuid { bytes: [0; 16] };
    let has_uuid = cu!(api, cuDeviceGetUuid_v2(&raw mut uuid, device)) == 0;
    let name = String::from_utf8_lossy(&name(api, device)).into_owned();
    let address = String::from_utf8_lossy(&bus(api, device)).parse().ok();
    let uuid = has_uuid.then(|| gpus::uuid(uuid.bytes.map(|byte| byte as u8)));
    Gpu {
        name,
        uuid,
        address,
    }
}

/// The devices of the driver that are offered.
///
/// # Errors
/// The choice does not fit them.
pub(super) fn devices(api: &Api, choice: &Choice) -> Result<Vec<i32>, Unmatched> {
    let mut count = 0;
    cu!(api, cuDeviceGetCount(&raw mut count));
    let all = (0..count).filter_map(|ordinal| {
        let mut device = 0;
        (cu!(api, cuDeviceGet(&raw mut device, ordinal)) == 0).then_some(device)
    });
    let all: Vec<i32> = all.collect();
    if choice.is_all() {
        return Ok(all);
    }
    let gpus: Vec<Gpu> = all.iter().map(|device| gpu(api, *device)).collect();
    let selected = choice.of(&gpus)?;
    Ok(selected.into_iter().map(|at| all[at]).collect())
}

impl Server {
    fn device_info(&self, device: i32) -> DeviceInfo {
        let api = &self.backend.api;
        let (mut uuid, mut memory) = (CUuuid { bytes: [0; 16] }, 0);
        cu!(api, cuDeviceGetUuid_v2(&raw mut uuid, device));
        cu!(api, cuDeviceTotalMem_v2(&raw mut memory, device));
        let attributes = (0..ATTRIBUTES).map(|number| {
            let mut value = 0;
            let attribute = CUdevice_attribute_enum(number);
            match cu!(api, cuDeviceGetAttribute(&raw mut value, attribute, device)) {
                0 => value,
                _ => i32::MIN,
            }
        });
        DeviceInfo {
            name: Blob(name(api, device)),
            uuid: uuid.bytes.map(|byte| byte as u8),
            memory: (memory as u64).min(self.quota.limit()),
            bus: Blob(bus(api, device)),
            attributes: attributes.collect(),
        }
    }

    /// Has the client's ordinals denote these of the devices that they denote now.
    pub(super) fn select(&mut self, places: &[u32]) -> Result<(), i32> {
        let backend = &mut self.backend;
        let has_context = backend
            .objects
            .iter()
            .any(|(_, object)| object.kind == Kind::Context);
        if has_context || places.is_empty() || places.len() > backend.devices.len() {
            return Err(codes::INVALID_VALUE);
        }
        let mut chosen = Vec::with_capacity(places.len());
        for place in places {
            let device = backend.devices.get(*place as usize);
            let device = device.filter(|device| !chosen.contains(*device));
            chosen.push(*device.ok_or(codes::INVALID_VALUE)?);
        }
        backend.devices = chosen;
        Ok(())
    }

    pub(super) fn started(&self) -> Started {
        let mut version = 0;
        cu!(self.backend.api, cuDriverGetVersion(&raw mut version));
        let start = self.window.data();
        let window = self.window.at(start, 0).map_or(0, |at| at as u64 - start);
        let devices = self.backend.devices.iter();
        Started {
            version: version.unsigned_abs(),
            window,
            devices: devices.map(|device| self.device_info(*device)).collect(),
        }
    }

    /// The driver's description of an error.
    pub(super) fn describe(&mut self, error: i32) -> Result<Blob, i32> {
        let mut words = std::ptr::null();
        outcome(cu!(
            self.backend.api,
            cuGetErrorString(cudaError_enum(error.unsigned_abs()), &raw mut words)
        ))?;
        if words.is_null() {
            return Ok(Blob::default());
        }
        // SAFETY: the driver's texts are zero-terminated and static.
        Ok(Blob(unsafe { CStr::from_ptr(words) }.to_bytes().to_vec()))
    }
}
