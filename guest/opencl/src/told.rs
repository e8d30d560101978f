//! What the application has been told of its devices: they answer so until it ends, whoever serves it.
//!
//! The worker takes note of it, too, so that the application goes to no device that lacks something of it. What this
//! driver asks for itself promises the application nothing.

use std::{collections::BTreeMap, sync::Mutex};

use base::Unpoisoned;
use gantry_remoting::{
    apis::opencl::calls::{Answered, CompareDevices, DeviceId, Target},
    wire::Blob,
};

use crate::{abi::Outcome, object::SUB_DEVICES, platform};

/// An answer.
struct Known {
    value: Vec<u8>,
    /// Whether the application has it.
    told: bool,
}

/// Answers by device and parameter.
static KNOWN: Mutex<BTreeMap<(u32, u32), Known>> = Mutex::new(BTreeMap::new());

/// What a device says of itself that changes: whether it is there (`CL_DEVICE_AVAILABLE`), and how much memory is
/// free (`CL_DEVICE_GLOBAL_FREE_MEMORY_AMD`).
const CHANGES: [u32; 2] = [0x1027, 0x4039];

/// What a device says of itself, for the application.
pub fn answer(id: DeviceId, name: u32) -> Outcome<Vec<u8>> {
    known(id, name, true)
}

/// What a device says of itself, for this driver.
pub fn own(id: DeviceId, name: u32) -> Outcome<Vec<u8>> {
    known(id, name, false)
}

/// What does not change while a device exists is asked for once.
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

/// The question whether other devices have all that the application has been told.
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
