//! What the application has been told about its devices: they give the same answers until it ends,
//! whichever worker serves it.
//!
//! The worker records it, too, so that the application is not moved to a device that lacks any of
//! it. What this driver queries for itself promises the application nothing.

use std::{collections::BTreeMap, sync::Mutex};

use base::Unpoisoned;
use remoting_proto::{
    apis::opencl::calls::{Answered, CompareDevices, DeviceId, Target},
    wire::Blob,
};

use crate::{abi::Outcome, object::SUB_DEVICES, platform};

/// An answer.
struct Known {
    value: Vec<u8>,
    /// Whether the application has received it.
    told: bool,
}

/// The answers, by device and parameter.
static KNOWN: Mutex<BTreeMap<(u32, u32), Known>> = Mutex::new(BTreeMap::new());

/// Answers that change: whether the device is available (`CL_DEVICE_AVAILABLE`), and how much
/// memory is free (`CL_DEVICE_GLOBAL_FREE_MEMORY_AMD`).
const CHANGES: [u32; 2] = [0x1027, 0x4039];

/// A device's answer to a query, for the application.
pub fn answer(id: DeviceId, name: u32) -> Outcome<Vec<u8>> {
    known(id, name, true)
}

/// A device's answer to a query, for this driver.
pub fn own(id: DeviceId, name: u32) -> Outcome<Vec<u8>> {
    known(id, name, false)
}

/// Answers that do not change while a device exists are requested only once.
fn known(id: DeviceId, name: u32, told: bool) -> Outcome<Vec<u8>> {
    if id.0 >= SUB_DEVICES || CHANGES.contains(&name) {
        return platform::ask(Target::Device(id), name);
    }
    if let Some(known) = KNOWN.lock_unpoisoned().get(&(id.0, name))
        && (known.told || !told)
    {
        return Ok(known.value.clone());
    }
    let of = match told {
        true => Target::Relied(id),
        false => Target::Device(id),
    };
    let value = platform::ask(of, name)?;
    let known = Known {
        value: value.clone(),
        told,
    };
    KNOWN.lock_unpoisoned().insert((id.0, name), known);
    Ok(value)
}

/// The request that checks whether other devices have everything that the application has been
/// told.
pub fn compared() -> CompareDevices {
    let all = KNOWN.lock_unpoisoned();
    let told = all.iter().filter(|(_, known)| known.told);
    let answered = |(&(device, parameter), known): (&(u32, u32), &Known)| Answered {
        device: DeviceId(device),
        parameter,
        answer: Blob(known.value.clone()),
    };
    CompareDevices {
        told: told.map(answered).collect(),
    }
}
