//! The platforms and devices of the host.

use std::{collections::HashSet, ptr::null_mut, sync::Arc};

use base::gpus::{self, Address, Choice, Gpu, Unmatched};
use remoting_proto::apis::opencl::{
    calls::{DeviceId, Offered},
    codes,
};
use remoting_session::table::Table;

use super::{
    driver::{
        api::{Api, Handle},
        cl,
    },
    objects::Device,
    provenance::DeviceRecord,
};

/// A platform of the host.
#[derive(Debug)]
pub struct Platform {
    /// The driver's handle.
    pub raw: Handle,
    /// Its OpenCL version: major * 10 + minor.
    pub version: u32,
    /// Whether its compiler tells the kinds of kernels' arguments without being asked to (PoCL).
    pub tells_arguments: bool,
    /// Its root devices.
    pub devices: Vec<Offered>,
}

/// What the driver has: its platforms, each with the handles of its devices.
fn driver_devices(api: &Api) -> Vec<(Handle, Vec<Handle>)> {
    let mut count = 0;
    if cl!(api, clGetPlatformIDs(0, null_mut(), &raw mut count)) != 0 {
        return Vec::new();
    }
    let mut raws = vec![0; count as usize];
    if cl!(api, clGetPlatformIDs(count, raws.as_mut_ptr(), null_mut())) != 0 {
        return Vec::new();
    }
    let devices = |raw| {
        let all = u64::from(u32::MAX);
        let mut count = 0;
        if cl!(api, clGetDeviceIDs(raw, all, 0, null_mut(), &raw mut count)) != 0 {
            return None;
        }
        let mut devices = vec![0; count as usize];
        let got = cl!(
            api,
            clGetDeviceIDs(raw, all, count, devices.as_mut_ptr(), null_mut())
        );
        (got == 0).then_some((raw, devices))
    };
    raws.into_iter().filter_map(devices).collect()
}

impl Platform {
    /// All platforms of the host that have offered devices. These devices are added to the table, in the driver's
    /// order.
    ///
    /// # Errors
    /// The choice does not fit the devices of all platforms.
    pub fn all(
        api: &Api,
        choice: &Choice,
        table: &mut Table<Device>,
    ) -> Result<Vec<Self>, Unmatched> {
        let found = driver_devices(api);
        let is_all = choice.is_all();
        let handles = || found.iter().flat_map(|(_, devices)| devices);
        let gpus: Vec<Gpu> = match is_all {
            true => Vec::new(),
            false => handles().map(|device| gpu(api, *device)).collect(),
        };
        let selected: HashSet<usize> = choice.of(&gpus)?.into_iter().collect();
        let (mut next, mut position) = (0, 0);
        let mut platforms = Vec::new();
        for (raw, devices) in found {
            let place = platforms.len();
            let mut text = [0u8; 256];
            cl!(
                api,
                clGetPlatformInfo(
                    raw,
                    codes::PLATFORM_VERSION,
                    text.len(),
                    text.as_mut_ptr().cast(),
                    null_mut(),
                )
            );
            let (version, tells_arguments) = (version(&text), is_pocl(&text));
            let devices: Vec<_> = devices
                .into_iter()
                .filter(|_| {
                    let at = position;
                    position += 1;
                    is_all || selected.contains(&at)
                })
                .map(|device| {
                    let mut kind = 0u64;
                    cl!(
                        api,
                        clGetDeviceInfo(
                            device,
                            codes::DEVICE_TYPE,
                            size_of::<u64>(),
                            (&raw mut kind).cast(),
                            null_mut(),
                        )
                    );
                    let id = DeviceId(next);
                    next += 1;
                    table.put(
                        id.0,
                        Ok(Device {
                            raw: device,
                            platform: place,
                            svm: version >= 20 && has_svm(api, device),
                            record: Arc::new(DeviceRecord::Offered(id)),
                            pinned: false,
                        }),
                    );
                    Offered { id, kind }
                })
                .collect();
            if devices.is_empty() && !is_all {
                continue;
            }
            platforms.push(Self {
                raw,
                version,
                tells_arguments,
                devices,
            });
        }
        Ok(platforms)
    }
}

/// What a device is selected by.
fn gpu(api: &Api, device: Handle) -> Gpu {
    let (mut uuid, mut place) = ([0u8; 16], [0u32; 4]);
    // Drivers without an extension refuse its query.
    let asked = |what, size, to: *mut std::ffi::c_void| {
        cl!(api, clGetDeviceInfo(device, what, size, to, null_mut())) == 0
    };
    let has_uuid = asked(
        codes::DEVICE_UUID,
        size_of_val(&uuid),
        (&raw mut uuid).cast(),
    );
    let has_place = asked(
        codes::DEVICE_PCI_BUS_INFO,
        size_of_val(&place),
        (&raw mut place).cast(),
    );
    let address = || {
        let [domain, bus, device, _function] = place;
        Some(Address {
            domain,
            bus: bus.try_into().ok()?,
            device: device.try_into().ok()?,
        })
    };
    Gpu {
        name: name(api, device),
        uuid: has_uuid.then(|| gpus::uuid(uuid)),
        address: has_place.then(address).flatten(),
    }
}

/// Whether the version of a platform is PoCL's: "OpenCL 3.0 PoCL 3.1".
fn is_pocl(version: &[u8]) -> bool {
    let mut words = version.split(|byte| *byte == b' ');
    words.any(|word| word.eq_ignore_ascii_case(b"pocl"))
}

/// `CL_DEVICE_NAME`; empty if the driver does not tell.
fn name(api: &Api, device: Handle) -> String {
    let mut text = [0u8; 256];
    let code = cl!(
        api,
        clGetDeviceInfo(
            device,
            codes::DEVICE_NAME,
            text.len(),
            text.as_mut_ptr().cast(),
            null_mut(),
        )
    );
    if code != 0 {
        return String::new();
    }
    let text = text.split(|&byte| byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(text).into_owned()
}

/// Whether a device supports buffers in shared virtual memory.
fn has_svm(api: &Api, device: Handle) -> bool {
    let mut capabilities = 0u64;
    let code = cl!(
        api,
        clGetDeviceInfo(
            device,
            codes::DEVICE_SVM_CAPABILITIES,
            size_of::<u64>(),
            (&raw mut capabilities).cast(),
            null_mut(),
        )
    );
    code == 0 && capabilities & codes::DEVICE_SVM_COARSE_GRAIN_BUFFER != 0
}

/// The OpenCL version of "OpenCL 3.0 ...".
fn version(text: &[u8]) -> u32 {
    let digits = text.strip_prefix(b"OpenCL ").unwrap_or_default();
    match digits {
        [major @ b'0'..=b'9', b'.', minor @ b'0'..=b'9', ..] => {
            u32::from(major - b'0') * 10 + u32::from(minor - b'0')
        }
        _ => 10,
    }
}
