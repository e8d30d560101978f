//! Which of the worker's devices a program sees, and in which order: `CUDA_VISIBLE_DEVICES` and `CUDA_DEVICE_ORDER`.
//! Both are read once, by the first `cuInit` that succeeds.

use std::{
    env,
    ffi::OsStr,
    sync::{Mutex, OnceLock},
};

use base::Unpoisoned;
use remoting_proto::apis::cuda::{
    calls::{DeviceInfo, Select},
    codes,
};

use crate::{
    entry::Outcome,
    link::{self, Link},
};

/// The places of the program's devices among the worker's.
static VISIBLE: OnceLock<Vec<usize>> = OnceLock::new();

/// Has the worker number the devices as the program does.
///
/// # Errors
/// The program sees no device.
pub fn choose(link: &Link) -> Outcome {
    static CHOOSING: Mutex<()> = Mutex::new(());
    let _choosing = CHOOSING.lock_unpoisoned();
    if VISIBLE.get().is_some() {
        return Ok(());
    }
    let devices = &link::started(link)?.devices;
    let (wanted, order) = ["CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"]
        .map(env::var_os)
        .into();
    let by_address = order.is_some_and(|order| order == "PCI_BUS_ID");
    let chosen = chosen(devices, wanted.as_deref(), by_address);
    if chosen.is_empty() {
        return Err(codes::NO_DEVICE);
    }
    if !chosen.iter().copied().eq(0..devices.len()) {
        let devices = chosen.iter().map(|place| *place as u32).collect();
        link.ask(&Select { devices })?;
    }
    let _ = VISIBLE.set(chosen);
    Ok(())
}

/// What the worker says of the device with this ordinal.
///
/// # Errors
/// There is none.
pub fn device(link: &Link, ordinal: usize) -> Outcome<&DeviceInfo> {
    let place = VISIBLE.get().and_then(|visible| visible.get(ordinal));
    let place = place.ok_or(codes::INVALID_DEVICE)?;
    let device = link::started(link)?.devices.get(*place);
    device.ok_or(codes::INVALID_DEVICE)
}

/// The number of devices that the program sees.
pub fn count() -> usize {
    VISIBLE.get().map_or(0, Vec::len)
}

/// The places of the devices that `wanted` names, in its order, up to the first entry that names none. A device that is
/// named twice leaves none, as natively.
fn chosen(devices: &[DeviceInfo], wanted: Option<&OsStr>, by_address: bool) -> Vec<usize> {
    let mut order: Vec<usize> = (0..devices.len()).collect();
    if by_address {
        order.sort_by_key(|place| devices[*place].bus.0.to_ascii_lowercase());
    }
    let Some(wanted) = wanted else {
        return order;
    };
    // An entry that is not text names no device.
    let wanted = wanted.to_string_lossy();
    let mut chosen = Vec::new();
    for entry in wanted.split(',') {
        let named = match entry.starts_with("GPU-") {
            true => by_uuid(devices, entry),
            false => number(entry).and_then(|ordinal| order.get(ordinal).copied()),
        };
        let Some(place) = named else {
            break;
        };
        if chosen.contains(&place) {
            return Vec::new();
        }
        chosen.push(place);
    }
    chosen
}

/// The number that an entry begins with, as `strtol` reads it. None if it is negative, or if there is none.
fn number(entry: &str) -> Option<usize> {
    let entry = entry.trim_start();
    let digits = entry.strip_prefix('+').unwrap_or(entry);
    let end = digits.find(|one: char| !one.is_ascii_digit());
    digits[..end.unwrap_or(digits.len())].parse().ok()
}

/// The only device whose UUID begins like this.
fn by_uuid(devices: &[DeviceInfo], prefix: &str) -> Option<usize> {
    let mut found = devices
        .iter()
        .enumerate()
        .filter(|(_, device)| uuid(&device.uuid).starts_with(prefix))
        .map(|(place, _)| place);
    found.next().filter(|_| found.next().is_none())
}

/// A UUID as NVIDIA's tools write it.
fn uuid(bytes: &[u8; 16]) -> String {
    let mut text = String::from("GPU");
    for (place, byte) in bytes.iter().enumerate() {
        if matches!(place, 0 | 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

#[cfg(test)]
mod tests {
    use remoting_proto::wire::Blob;

    use super::*;

    /// Four devices, whose addresses are in descending order.
    fn devices() -> Vec<DeviceInfo> {
        let one = |place: u8| DeviceInfo {
            name: Blob::default(),
            uuid: [
                0xab,
                place / 2,
                0,
                place,
                0,
                0,
                0,
                0,
                0,
                0,
                0,
                0,
                0,
                0,
                0,
                place,
            ],
            memory: 0,
            bus: Blob(format!("0000:{:02X}:00.0", 0x1c - place).into_bytes()),
            attributes: Vec::new(),
        };
        (0..4).map(one).collect()
    }

    fn chosen_by(wanted: &str) -> Vec<usize> {
        chosen(&devices(), Some(wanted.as_ref()), false)
    }

    #[test]
    fn without_the_variable_all_devices_are_visible() {
        assert_eq!(chosen(&devices(), None, false), [0, 1, 2, 3]);
        assert_eq!(chosen(&devices(), None, true), [3, 2, 1, 0]);
    }

    #[test]
    fn ordinals_choose_and_order_devices() {
        assert_eq!(chosen_by("2,0"), [2, 0]);
        assert_eq!(chosen_by(" 3, +1"), [3, 1]);
        assert_eq!(chosen_by("1gpu2,2ampere"), [1, 2]);
        assert_eq!(chosen(&devices(), Some("0,2".as_ref()), true), [3, 1]);
    }

    #[test]
    fn the_first_entry_that_names_no_device_ends_the_list() {
        for (wanted, seen) in [
            ("", &[][..]),
            ("-1", &[]),
            ("none", &[]),
            ("MIG-ab00", &[]),
            ("1,-1,2", &[1]),
            ("3,4,1", &[3]),
            ("0,,1", &[0]),
            ("0,1x,99999999999999999999999,2", &[0, 1]),
            ("2,GPU-cd,1", &[2]),
        ] {
            assert_eq!(chosen_by(wanted), seen, "{wanted:?}");
        }
    }

    #[test]
    fn uuids_choose_devices_by_as_much_as_is_unique() {
        let whole = "GPU-ab010002-0000-0000-0000-000000000002";
        assert_eq!(chosen_by(whole), [2]);
        assert_eq!(chosen_by("GPU-ab010003,GPU-ab000000"), [3, 0]);
        assert_eq!(chosen_by("GPU-ab010003,1"), [3, 1]);
        // Two begin like this.
        assert!(chosen_by("GPU-ab01").is_empty());
        assert!(chosen_by(&format!("{whole}0")).is_empty());
        // An order by address is one of ordinals.
        assert_eq!(chosen(&devices(), Some(whole.as_ref()), true), [2]);
    }

    #[test]
    fn a_device_that_is_named_twice_leaves_none() {
        assert!(chosen_by("0,1,0").is_empty());
        assert!(chosen_by("3,GPU-ab010003").is_empty());
        assert_eq!(chosen_by("0,7,0"), [0]);
    }
}
