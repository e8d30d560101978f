//! The platforms and devices of the host.

use std::{ptr::null_mut, sync::Arc};

use super::{
    driver::{
        api::{Api, Handle},
        cl,
    },
    objects::Device,
    provenance::DeviceRecord,
};
use crate::{
    apis::opencl::{
        calls::{DeviceId, Offered},
        codes,
    },
    session::table::Table,
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

impl Platform {
    /// All platforms of the host that have devices whose names contain `wanted`. These devices are
    /// added to the table.
    pub fn all(api: &Api, wanted: &str, table: &mut Table<Device>) -> Vec<Self> {
        let mut count = 0;
        if cl!(api, clGetPlatformIDs(0, null_mut(), &raw mut count)) != 0 {
            return Vec::new();
        }
        let mut raws = vec![0; count as usize];
        if cl!(api, clGetPlatformIDs(count, raws.as_mut_ptr(), null_mut())) != 0 {
            return Vec::new();
        }
        let mut next = 0;
        let mut platforms = Vec::new();
        for raw in raws {
            let place = platforms.len();
            let all = u64::from(u32::MAX);
            let mut count = 0;
            if cl!(api, clGetDeviceIDs(raw, all, 0, null_mut(), &raw mut count)) != 0 {
                continue;
            }
            let mut devices = vec![0; count as usize];
            let got = cl!(
                api,
                clGetDeviceIDs(raw, all, count, devices.as_mut_ptr(), null_mut())
            );
            if got != 0 {
                continue;
            }
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
                .filter(|&device| wanted.is_empty() || name(api, device).contains(wanted))
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
            if devices.is_empty() && !wanted.is_empty() {
                continue;
            }
            platforms.push(Self {
                raw,
                version,
                tells_arguments,
                devices,
            });
        }
        platforms
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
