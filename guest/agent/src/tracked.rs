//! Devices that leave this guest and come back, as its kernel shows them.

use std::{
    collections::BTreeSet,
    fmt, fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

/// The maximum number of devices to look at. The text that names them has room for fewer.
const MOST: usize = 32;

/// A device that is expected to come back.
#[derive(Debug)]
struct Device {
    address: String,
    /// The vendor and device IDs. None if the guest did not have the device when the agent was told
    /// of it.
    model: Option<[String; 2]>,
}

/// Devices that are expected to come back.
#[derive(Debug)]
pub struct Tracked {
    pci: PathBuf,
    missing: Vec<Device>,
    /// The functions that existed when the devices were about to leave. One that is added later
    /// differs from all of them, even at the same address.
    before: BTreeSet<(String, u64)>,
}

impl Tracked {
    /// Tracks the devices at these comma-separated addresses. `pci` is the folder in which the
    /// kernel shows PCI functions.
    pub fn of(pci: PathBuf, addresses: &str) -> Self {
        let missing = addresses.split(',').take(MOST).map(|address| Device {
            address: address.to_owned(),
            model: model(&pci.join(address)),
        });
        Self {
            missing: missing.collect(),
            before: functions(&pci).collect(),
            pci,
        }
    }

    /// The devices' folders.
    pub fn folders(&self) -> impl Iterator<Item = PathBuf> {
        self.missing
            .iter()
            .map(|device| self.pci.join(&device.address))
    }

    /// Whether all devices are back and have drivers: for each there is a new function of the same
    /// model, or at the same address if the model is unknown. Devices that are back are not looked
    /// for again.
    pub fn are_back(&mut self) -> bool {
        let (pci, before) = (&self.pci, &mut self.before);
        self.missing.retain(|device| {
            let back = functions(pci).find(|(address, inode)| {
                let folder = pci.join(address);
                let alike = match &device.model {
                    Some(known) => model(&folder).as_ref() == Some(known),
                    None => *address == device.address,
                };
                alike
                    && !before.contains(&(address.clone(), *inode))
                    && folder.join("driver").exists()
            });
            // Each function counts for one device only.
            back.map(|function| before.insert(function)).is_none()
        });
        self.missing.is_empty()
    }

    /// Whether all devices have drivers, both those that are back and those that never left.
    pub fn have_drivers(&self) -> bool {
        let bound =
            functions(&self.pci).filter(|(at, _)| self.pci.join(at).join("driver").exists());
        let (old, mut new): (Vec<_>, Vec<_>) = bound.partition(|it| self.before.contains(it));
        self.missing.iter().all(|device| {
            let is_there = |(address, _): &(String, u64)| *address == device.address;
            let alike = |it: &(String, u64)| {
                let is_model = |known| model(&self.pci.join(&it.0)).as_ref() == Some(known);
                is_there(it) || device.model.as_ref().is_some_and(is_model)
            };
            // Each function counts for one device only.
            let mut back = || new.iter().position(alike).map(|at| new.swap_remove(at));
            old.iter().any(is_there) || back().is_some()
        })
    }
}

/// The missing devices, by their previous addresses.
impl fmt::Display for Tracked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, device) in self.missing.iter().enumerate() {
            let comma = if number == 0 { "" } else { ", " };
            write!(f, "{comma}{}", device.address)?;
        }
        Ok(())
    }
}

/// All functions, by address and an inode number that distinguishes a function from a later one
/// there.
fn functions(pci: &Path) -> impl Iterator<Item = (String, u64)> {
    let entries = fs::read_dir(pci).into_iter().flatten().flatten();
    entries.filter_map(|entry| {
        let inode = fs::metadata(entry.path()).ok()?.ino();
        Some((entry.file_name().into_string().ok()?, inode))
    })
}

fn model(folder: &Path) -> Option<[String; 2]> {
    let read = |name| fs::read_to_string(folder.join(name)).ok();
    Some([read("vendor")?, read("device")?])
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Adds a function as the kernel shows it. A previous one keeps its inode number as long as
    /// `old` exists.
    fn plug(pci: &Path, address: &str, device: &str, has_driver: bool) {
        let folder = pci.join(address);
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("vendor"), "0x10de\n").unwrap();
        fs::write(folder.join("device"), device).unwrap();
        if has_driver {
            bind(pci, address);
        }
    }

    fn bind(pci: &Path, address: &str) {
        fs::create_dir(pci.join(address).join("driver")).unwrap();
    }

    #[test]
    fn a_device_is_back_when_a_new_one_of_its_model_has_a_driver() {
        let folder = tempfile::tempdir().unwrap();
        let (pci, old) = (folder.path().join("pci"), folder.path().join("old"));
        fs::create_dir(&pci).unwrap();
        // Another device of the same model stays.
        for address in ["0000:00:05.0", "0000:00:09.0"] {
            plug(&pci, address, "gpu", true);
        }
        let mut tracked = Tracked::of(pci.clone(), "0000:00:09.0");
        let folders: Vec<_> = tracked.folders().collect();
        assert_eq!(folders, [pci.join("0000:00:09.0")]);
        assert!(!tracked.are_back());
        fs::rename(pci.join("0000:00:09.0"), &old).unwrap();
        assert!(!tracked.are_back());
        plug(&pci, "0000:00:08.0", "disk", true);
        // At another address, which is just as good.
        plug(&pci, "0000:00:0a.0", "gpu", false);
        assert!(!tracked.are_back());
        bind(&pci, "0000:00:0a.0");
        assert!(tracked.are_back());
    }

    #[test]
    fn a_device_that_has_not_left_has_its_driver_and_another_one_when_it_is_back() {
        let folder = tempfile::tempdir().unwrap();
        let (pci, old) = (folder.path().join("pci"), folder.path().join("old"));
        fs::create_dir(&pci).unwrap();
        for address in ["0000:00:05.0", "0000:00:09.0", "0000:00:0a.0"] {
            plug(&pci, address, "gpu", true);
        }
        let tracked = Tracked::of(pci.clone(), "0000:00:09.0,0000:00:0a.0");
        assert!(tracked.have_drivers());
        fs::rename(pci.join("0000:00:09.0"), &old).unwrap();
        assert!(!tracked.have_drivers());
        plug(&pci, "0000:00:0b.0", "gpu", false);
        assert!(!tracked.have_drivers());
        bind(&pci, "0000:00:0b.0");
        assert!(tracked.have_drivers());
        fs::remove_dir(pci.join("0000:00:0a.0/driver")).unwrap();
        assert!(!tracked.have_drivers(), "one is not two");
    }

    #[test]
    fn all_are_waited_for_and_one_that_was_not_there_is_known_by_its_address() {
        let folder = tempfile::tempdir().unwrap();
        let (pci, old) = (folder.path().join("pci"), folder.path().join("old"));
        fs::create_dir(&pci).unwrap();
        plug(&pci, "0000:00:09.0", "gpu", true);
        let mut tracked = Tracked::of(pci.clone(), "0000:00:09.0,0000:00:0a.0");
        fs::rename(pci.join("0000:00:09.0"), &old).unwrap();
        plug(&pci, "0000:00:09.0", "gpu", true);
        assert!(!tracked.are_back());
        plug(&pci, "0000:00:0b.0", "gpu", true);
        assert!(!tracked.are_back());
        plug(&pci, "0000:00:0a.0", "other", true);
        assert!(tracked.are_back());
    }
}
