//! NVIDIA's driver and GPUs of a host. Suspended CUDA programs go on only where both are of the kind that they had.

use std::{fs, io, path::Path};

use serde::{Deserialize, Serialize};

/// What a host has.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct GpuDriver {
    /// Version of the kernel driver, such as `580.159.04`.
    pub version: String,
    /// Types of its GPUs, such as `NVIDIA H200`, each once, sorted.
    pub models: Vec<String>,
    /// Whether programs of the machine use it now.
    #[serde(default)]
    pub is_used: bool,
}

impl GpuDriver {
    /// This host's.
    ///
    /// # Errors
    /// Not found: the driver is not loaded. Otherwise it may not be read, as under Landlock, or where `/sys` or `/proc` lacks it.
    pub fn read() -> io::Result<Self> {
        Self::read_below(Path::new("/"))
    }

    fn read_below(root: &Path) -> io::Result<Self> {
        let hidden = io::Error::other;
        let modules = root.join("sys/module");
        let version = fs::read_to_string(modules.join("nvidia/version")).map_err(|error| {
            match modules.is_dir() {
                true => error,
                false => hidden(error),
            }
        })?;
        let mut models = Vec::new();
        for gpu in fs::read_dir(root.join("proc/driver/nvidia/gpus")).map_err(hidden)? {
            let information = gpu.map_err(hidden)?.path().join("information");
            let text = fs::read_to_string(information).map_err(hidden)?;
            let model = text.lines().find_map(|line| line.strip_prefix("Model:"));
            models.extend(model.map(|model| model.trim().to_owned()));
        }
        models.sort();
        models.dedup();
        Ok(Self {
            version: version.trim().to_owned(),
            models,
            is_used: false,
        })
    }

    /// Why programs that were suspended with this driver, which is untrusted, would not go on here.
    pub fn reasons(&self, here: &io::Result<Self>) -> Vec<String> {
        let here = match here {
            Ok(here) => here,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return vec![
                    "the guest's CUDA programs, which may be suspended or start later, need NVIDIA's driver, and this host has \
                     none loaded: load it, or leave the accelerator behind (accel=Detach) if there are none"
                        .to_owned(),
                ];
            }
            // What may not be looked at is found out when they resume.
            Err(_) => return Vec::new(),
        };
        let mut reasons = Vec::new();
        if self.version != here.version {
            reasons.push(format!(
                "the guest's CUDA programs are for version {} of NVIDIA's driver, and this host has {}: install the \
                 same version, or leave the accelerator behind (accel=Detach) if there are none",
                self.version, here.version
            ));
        }
        // Of several types, it is not known which one the machine has. Programs that start later take any.
        let is_common = |model| here.models.contains(model);
        if self.is_used && !self.models.is_empty() && !self.models.iter().any(is_common) {
            reasons.push(format!(
                "the guest's CUDA programs use a GPU of type {}, and this host has {}",
                self.models.join(" or "),
                match here.models.is_empty() {
                    true => "none".to_owned(),
                    false => here.models.join(", "),
                }
            ));
        }
        reasons
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn host(version: &str, models: &[&str]) -> io::Result<GpuDriver> {
        let root = tempfile::tempdir()?;
        let place = |path: &str, text: String| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap())?;
            fs::write(path, text)
        };
        place("sys/module/nvidia/version", format!("{version}\n"))?;
        fs::create_dir_all(root.path().join("proc/driver/nvidia/gpus"))?;
        for (index, model) in models.iter().enumerate() {
            let path = format!("proc/driver/nvidia/gpus/0000:0{index}:00.0/information");
            place(&path, format!("Model: \t\t {model}\nIRQ:   \t\t 7\n"))?;
        }
        GpuDriver::read_below(root.path())
    }

    #[test]
    fn programs_go_on_with_the_same_version_and_a_gpu_of_the_same_type() {
        let used = |models: &[&str]| GpuDriver {
            is_used: true,
            ..host("580.1", models).unwrap()
        };
        let there = used(&["NVIDIA H200", "NVIDIA H200"]);
        assert_eq!(there.models, ["NVIDIA H200"]);
        for models in [&["NVIDIA H200"][..], &["NVIDIA H100", "NVIDIA H200"]] {
            assert_eq!(there.reasons(&host("580.1", models)), [""; 0]);
        }
        let why = there.reasons(&host("580.2", &["NVIDIA H100"]));
        assert!(why[0].contains("version 580.1"), "{why:?}");
        assert!(why[0].contains("this host has 580.2"), "{why:?}");
        assert!(
            why[1].contains("type NVIDIA H200, and this host has NVIDIA H100"),
            "{why:?}"
        );
        let why = there.reasons(&host("580.1", &[]));
        assert!(why[0].contains("has none"), "{why:?}");
        // Which of them it is, is not known.
        let both = used(&["NVIDIA H100", "NVIDIA H200"]);
        assert_eq!(both.reasons(&host("580.1", &["NVIDIA H100"])), [""; 0]);
        let why = both.reasons(&host("580.1", &["NVIDIA L4"]));
        assert!(why[0].contains("NVIDIA H100 or NVIDIA H200"), "{why:?}");
        // Programs that start later take any GPU.
        let unused = host("580.1", &["NVIDIA H200"]).unwrap();
        assert_eq!(unused.reasons(&host("580.1", &["NVIDIA L4"])), [""; 0]);
    }

    #[test]
    fn a_driver_that_is_missing_is_a_reason_and_one_that_is_hidden_is_none() {
        let there = host("580.1", &["NVIDIA H200"]).unwrap();
        let root = tempfile::tempdir().unwrap();
        let here = || GpuDriver::read_below(root.path());
        assert_eq!(there.reasons(&here()), [""; 0], "there is no /sys");
        fs::create_dir_all(root.path().join("sys/module")).unwrap();
        let why = there.reasons(&here());
        assert!(why[0].contains("none loaded"), "{why:?}");
        fs::create_dir_all(root.path().join("sys/module/nvidia")).unwrap();
        fs::write(root.path().join("sys/module/nvidia/version"), "580.1\n").unwrap();
        assert_eq!(
            there.reasons(&here()),
            [""; 0],
            "/proc does not show its GPUs"
        );
        let hidden = Err(io::ErrorKind::PermissionDenied.into());
        assert_eq!(there.reasons(&hidden), [""; 0]);
    }
}
