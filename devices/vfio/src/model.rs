//! The model of a device as a guest's driver sees it, to compare a device with its replacement.

use std::{fmt, fs, io, path::Path};

/// The model of a PCI device or mediated device, from sysfs.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Model {
    /// A mediated device's type, which is the only information that the host provides.
    mediated: Option<String>,
    vendor: String,
    device: String,
    subsystem_vendor: String,
    subsystem: String,
    class: String,
    revision: String,
    /// Length and kind of each BAR and of the ROM.
    regions: Vec<(u64, u64)>,
}

/// The low bits of a resource's flags in sysfs: type, prefetchable, 64 bits wide (ioport.h).
const KIND: u64 = 0x0010_2f00;
/// Number of BARs, plus the ROM.
const REGIONS: usize = 7;

impl Model {
    /// Reads the model of the device at a sysfs path.
    pub fn of(path: &Path) -> io::Result<Self> {
        if let Ok(kind) = fs::read_link(path.join("mdev_type")) {
            let kind = kind.file_name().unwrap_or_default();
            return Ok(Self {
                mediated: Some(kind.display().to_string()),
                ..Self::default()
            });
        }
        let read = |name: &str| -> io::Result<String> {
            Ok(fs::read_to_string(path.join(name))?.trim().to_owned())
        };
        let resources = read("resource")?;
        let regions = resources.lines().take(REGIONS).map(|line| {
            let mut numbers = line.split_whitespace().map(|number| {
                let digits = number.trim_start_matches("0x");
                u64::from_str_radix(digits, 16).unwrap_or(0)
            });
            let [start, end, flags] = [(); 3].map(|()| numbers.next().unwrap_or(0));
            let len = if end == 0 {
                0
            } else {
                end.wrapping_sub(start).wrapping_add(1)
            };
            (len, flags & KIND)
        });
        Ok(Self {
            mediated: None,
            vendor: read("vendor")?,
            device: read("device")?,
            subsystem_vendor: read("subsystem_vendor")?,
            subsystem: read("subsystem_device")?,
            class: read("class")?,
            revision: read("revision")?,
            regions: regions.collect(),
        })
    }

    /// The first difference of `other` that a driver could notice; `None` if there is none.
    pub fn difference(&self, other: &Self) -> Option<String> {
        if self.mediated != other.mediated {
            let kind = |model: &Self| {
                let kind = model.mediated.as_ref();
                kind.map_or("a PCI device".to_owned(), |kind| format!("a {kind}"))
            };
            return Some(format!("it is {} instead of {}", kind(other), kind(self)));
        }
        let pairs = [
            ("vendor", &self.vendor, &other.vendor),
            ("device", &self.device, &other.device),
            (
                "subsystem vendor",
                &self.subsystem_vendor,
                &other.subsystem_vendor,
            ),
            ("subsystem", &self.subsystem, &other.subsystem),
            ("class", &self.class, &other.class),
            ("revision", &self.revision, &other.revision),
        ];
        if let Some((what, ours, theirs)) = pairs.into_iter().find(|(_, a, b)| a != b) {
            return Some(format!("its {what} is {theirs} instead of {ours}"));
        }
        let regions = self.regions.iter().zip(&other.regions);
        let (at, (ours, theirs)) = (0..).zip(regions).find(|(_, (a, b))| a != b)?;
        let name: &dyn fmt::Display = if at == 6 {
            &"its ROM"
        } else {
            &format!("BAR {at}")
        };
        let (ours, theirs) = (ours.0, theirs.0);
        Some(if ours == theirs {
            format!("{name} is of another kind")
        } else {
            format!("{name} has {theirs:#x} bytes instead of {ours:#x}")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let resource = "0x00000000fea00000 0x00000000feafffff 0x0000000000040200\n\
                        0x0000000000000000 0x0000000000000000 0x0000000000000000\n";
        let usual = [
            ("vendor", "0x1234\n"),
            ("device", "0x11e8\n"),
            ("subsystem_vendor", "0x1af4\n"),
            ("subsystem_device", "0x1100\n"),
            ("class", "0x00ff00\n"),
            ("revision", "0x10\n"),
            ("resource", resource),
        ];
        for (name, text) in usual.iter().chain(files) {
            fs::write(dir.path().join(name), text).unwrap();
        }
        dir
    }

    fn difference(files: &[(&str, &str)]) -> Option<String> {
        let (one, other) = (device(&[]), device(files));
        let one = Model::of(one.path()).unwrap();
        one.difference(&Model::of(other.path()).unwrap())
    }

    #[test]
    fn devices_of_one_model_may_be_at_other_addresses() {
        let moved = "0x00000000fe900000 0x00000000fe9fffff 0x0000000000040200\n\
                     0x0000000000000000 0x0000000000000000 0x0000000000000000\n";
        assert_eq!(difference(&[("resource", moved)]), None);
    }

    #[test]
    fn what_differs_is_named() {
        let said = difference(&[("subsystem_device", "0x1101\n")]);
        let expected = "its subsystem is 0x1101 instead of 0x1100";
        assert_eq!(said.as_deref(), Some(expected));
        let larger = "0x00000000fe800000 0x00000000fe9fffff 0x0000000000040200\n";
        assert_eq!(
            difference(&[("resource", larger)]).as_deref(),
            Some("BAR 0 has 0x200000 bytes instead of 0x100000")
        );
        let wide = "0x00000000fea00000 0x00000000feafffff 0x0000000000140204\n";
        assert_eq!(
            difference(&[("resource", wide)]).as_deref(),
            Some("BAR 0 is of another kind")
        );
    }

    #[test]
    fn mediated_devices_are_of_one_model_if_they_are_of_one_type() {
        let mediated = |kind: &str| {
            let dir = tempfile::tempdir().unwrap();
            let link = dir.path().join("mdev_type");
            std::os::unix::fs::symlink(format!("../mdev_supported_types/{kind}"), link).unwrap();
            Model::of(dir.path()).unwrap()
        };
        let one = mediated("mtty-1");
        assert_eq!(one.difference(&mediated("mtty-1")), None);
        let said = one.difference(&mediated("mtty-2"));
        let expected = "it is a mtty-2 instead of a mtty-1";
        assert_eq!(said.as_deref(), Some(expected));
        let said = one.difference(&Model::of(device(&[]).path()).unwrap());
        assert!(said.unwrap().starts_with("it is a PCI device instead"));
    }

    #[test]
    fn what_is_no_device_has_no_model() {
        assert!(Model::of(Path::new("/tmp")).is_err());
    }
}
