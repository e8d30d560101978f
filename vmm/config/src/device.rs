//! Physical devices.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{
    AccelApi, HasCommonConfig, VmConfig,
    check::{self, Invalid, Placement, Problem, is_zero},
    common::{CommonConfig, has_common_config},
    kind::{Configured, Device, HotPlug, Refused},
    syntax::{FUNCTION, IOMMU, Key, PLACE, SyntaxError, SyntaxProblem, ValueType, parse},
};

/// A physical device (VFIO).
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct DeviceConfig {
    /// Its directory in sysfs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
    /// Behind the virtual IOMMU, as are all devices in the IOMMU's segments; if no segment is given, the device is
    /// placed in the first of them.
    #[serde(default)]
    pub iommu: bool,
    /// Segment behind the virtual IOMMU in which the device is placed. Short for `pci_segment` with `iommu`; it also
    /// adds the segment to the platform's list before the VM starts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iommu_segment: Option<u16>,
    /// Its name and location.
    #[serde(flatten)]
    pub common: CommonConfig,
    /// Function number within the slot, 0 to 7.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub pci_function: u8,
    /// The root port behind which it is placed, in that port's only slot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// The accelerator port that applications on this device use while the device is removed from the VM. They return
    /// to the device when it is back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tracked: Option<String>,
    /// GPUDirect clique, 0 to 15, which NVIDIA's driver reads: GPUs of the same clique reach each other's memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub x_nv_gpudirect_clique: Option<u8>,
    /// BARs that are not mapped into the guest.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub x_exclude_mmap_bars: Vec<u64>,
}

/// Finds the sysfs directory of a device from the names that people use: its address, with or without the domain, a
/// mediated device's UUID, or the directory itself.
pub fn host_device(text: &str) -> Option<String> {
    let is_hexadecimal =
        |part: &str, len| part.len() == len && part.bytes().all(|byte| byte.is_ascii_hexdigit());
    if text.starts_with('/') {
        return (!text.contains('=')).then(|| text.to_owned());
    }
    let lengths = [8, 4, 4, 4, 12];
    let parts: Vec<_> = text.split('-').collect();
    let mut fitting = parts.iter().zip(lengths);
    if parts.len() == lengths.len() && fitting.all(|(part, len)| is_hexadecimal(part, len)) {
        return Some(format!("/sys/bus/mdev/devices/{}", text.to_lowercase()));
    }
    let (place, function) = text.rsplit_once('.')?;
    let (domain, place) = match place.matches(':').count() {
        1 => ("0000", place),
        2 => place.split_once(':')?,
        _ => return None,
    };
    let (bus, slot) = place.split_once(':')?;
    let fits = (4..=8).any(|len| is_hexadecimal(domain, len))
        && is_hexadecimal(bus, 2)
        && is_hexadecimal(slot, 2)
        && matches!(function.as_bytes(), [b'0'..=b'7']);
    fits.then(|| format!("/sys/bus/pci/devices/{domain}:{place}.{function}").to_lowercase())
}

const KEYS: &[Key] = &[
    Key::new("path", ValueType::Text),
    Key::new("iommu_segment", ValueType::Number),
    Key::new("tracked", ValueType::Text),
    Key::new("x_nv_gpudirect_clique", ValueType::Number),
    Key::new("x_exclude_mmap_bars", ValueType::Numbers),
];

has_common_config!(DeviceConfig);

impl Configured for DeviceConfig {
    const HELP: &'static str = "Physical devices: ADDRESS or path=FOLDER,id=NAME,pci_device_id=N, \
        pci_function=N,parent=ROOTPORT,iommu=on|off,iommu_segment=N,tracked=ACCEL,x_exclude_mmap_bars=[N,N], \
        x_nv_gpudirect_clique=N";

    const HOT_PLUG: Option<HotPlug> = Some(HotPlug {
        about: "Give the VM a physical device",
        help: "As for --device: ADDRESS or path=FOLDER,id=NAME,...",
    });

    const SYNTAX: &'static [&'static [Key]] = &[KEYS, IOMMU, PLACE, FUNCTION];

    /// The first word may be the device itself: `0000:01:00.0`, `01:00.0`, a mediated device's UUID, or its directory.
    fn parse(input: &str) -> Result<Self, SyntaxError> {
        let first = input.split(',').next().unwrap_or_default().trim();
        let named = host_device(first);
        let rest = match &named {
            Some(_) => &input[input.find(',').unwrap_or(input.len())..],
            None => input,
        };
        let mut parsed = parse("--device", rest, Self::SYNTAX)?;
        if let Some(path) = named {
            if parsed.object.contains_key("path") {
                return Err(parsed.error(SyntaxProblem::Twice("path")));
            }
            parsed.object.insert("path".to_owned(), path.into());
        }
        parsed.require("path", "path")?;
        let mut config: Self = parsed.build()?;
        // As above, after `path=`.
        let path = config.path.as_deref().and_then(Path::to_str);
        if let Some(path) = path.and_then(host_device) {
            config.path = Some(path.into());
        }
        Ok(config)
    }
}

impl Device for DeviceConfig {
    fn validate(&self) -> Result<(), Invalid> {
        if self.path.is_none() {
            return Err(Problem::Missing("name its folder in sysfs").at("path"));
        }
        if let Some(clique) = self.x_nv_gpudirect_clique {
            check::range("x_nv_gpudirect_clique", clique, 0, 15)?;
        }
        for &bar in &self.x_exclude_mmap_bars {
            check::range("x_exclude_mmap_bars", bar, 0, 5)?;
        }
        if let Some(segment) = self.iommu_segment
            && ![0, segment].contains(&self.common.pci_segment)
        {
            let with = "another pci_segment";
            let advice = "leave pci_segment out";
            return Err(Problem::Conflict { with, advice }.at("iommu_segment"));
        }
        if self.parent.is_some() && (self.iommu || self.iommu_segment.is_some()) {
            let with = "the virtual IOMMU";
            let advice = "leave it out: behind the virtual IOMMU there are no root ports";
            return Err(Problem::Conflict { with, advice }.at("parent"));
        }
        self.placement().validate()
    }

    fn placement(&self) -> Placement<'_> {
        Placement {
            function: self.pci_function,
            parent: self.parent.as_deref(),
            ..self.common.placement()
        }
    }

    fn normalize_segment(&mut self, behind: &[u16]) {
        if let Some(segment) = self.iommu_segment.take() {
            self.common.pci_segment = segment;
            self.iommu = true;
            return;
        }
        // Clients that always send a segment send 0 if they mean none.
        let is_named = self.common.pci_segment != 0 || behind.contains(&0);
        if let Some(first) = behind.first()
            && self.iommu
            && !is_named
        {
            self.common.pci_segment = *first;
        }
    }

    fn validate_in(&self, vm: &VmConfig) -> Result<(), Invalid> {
        let platform = vm.platform.as_ref();
        if self.x_nv_gpudirect_clique.is_some() && platform.is_some_and(|it| !it.vfio_p2p_dma) {
            let with = "vfio_p2p_dma=off";
            let advice = "leave one of them out: devices of a clique access each other's BARs";
            let problem = Problem::Conflict { with, advice };
            return Err(problem.at("x_nv_gpudirect_clique"));
        }
        self.check_tracked(vm)
            .map_err(|problem| problem.at("tracked"))
    }

    fn needs(&self) -> Option<&str> {
        self.tracked.as_deref()
    }

    fn check_joins(&self, vm: &VmConfig, _running: bool) -> Result<(), Refused> {
        self.check_tracked(vm)
            .map_err(|problem| Refused(format!("tracked: {problem}")))
    }
}

impl DeviceConfig {
    /// Checks whether applications can move from the device to the accelerator that it names.
    fn check_tracked(&self, vm: &VmConfig) -> Result<(), Problem> {
        let Some(name) = &self.tracked else {
            return Ok(());
        };
        let mut accels = vm.accels.iter().flatten();
        let named = accels.find(|accel| accel.common().id.as_ref() == Some(name));
        let Some(accel) = named else {
            let (what, name) = ("accelerator (--accel id=NAME)", name.clone());
            return Err(Problem::Unknown { what, name });
        };
        let advice = "name an accelerator for OpenCL that a pool serves";
        let with = match accel.api {
            _ if accel.is_gate() => "an accelerator behind a gate",
            AccelApi::Cuda => "an accelerator for CUDA, whose applications stay where they are",
            AccelApi::Nvidia => {
                "an accelerator for native contexts, whose programs stay where they are"
            }
            AccelApi::Opencl | AccelApi::OpenclCuda => return Ok(()),
        };
        Err(Problem::Conflict { with, advice })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(input: &str) -> String {
        let config = DeviceConfig::parse(input).unwrap();
        config.path.unwrap().display().to_string()
    }

    #[test]
    fn a_device_is_named_by_what_people_call_it() {
        const FOLDER: &str = "/sys/bus/pci/devices/0000:01:00.0";
        for input in [
            "0000:01:00.0",
            "01:00.0",
            FOLDER,
            "path=01:00.0",
            "id=g,path=0000:01:00.0",
            &format!("path={FOLDER}"),
            "0000:01:00.0,id=g,pci_device_id=9",
        ] {
            assert_eq!(path(input), FOLDER, "{input}");
        }
        assert_eq!(path("10000:E1:1f.7"), "/sys/bus/pci/devices/10000:e1:1f.7");
        assert_eq!(
            path("83B8F4F2-509f-382f-3c1e-e6bfe0fa1001,id=port"),
            "/sys/bus/mdev/devices/83b8f4f2-509f-382f-3c1e-e6bfe0fa1001"
        );
        assert_eq!(path("path=gpu"), "gpu", "a path as any other");
    }

    #[test]
    fn an_accelerator_leaves_with_another_one_of_its_slot_and_its_devices_may_do_so_too() {
        let vm = VmConfig {
            devices: Some(vec![
                DeviceConfig::parse("01:00.0,id=gpu,tracked=a").unwrap(),
            ]),
            ..VmConfig::default()
        };
        let of = |leaving: &[&str]| {
            let leaving: Vec<_> = leaving.iter().map(ToString::to_string).collect();
            vm.tracker_among(&leaving)
                .map(|(accel, device)| (accel.to_owned(), device.to_owned()))
        };
        let refused = Some(("a".to_owned(), "gpu".to_owned()));
        assert_eq!(of(&["a"]), refused);
        assert_eq!(of(&["net", "a"]), refused);
        assert_eq!(of(&["gpu", "a"]), None);
        assert_eq!(of(&["gpu"]), None);
    }

    #[test]
    fn only_an_accelerator_whose_applications_can_change_tracks_a_device() {
        use crate::AccelConfig;

        let device = DeviceConfig::parse("01:00.0,tracked=a").unwrap();
        let accel = |text: &str| Some(vec![AccelConfig::parse(text).unwrap()]);
        let with = |accels| VmConfig {
            accels,
            ..VmConfig::default()
        };
        for ok in ["id=a", "id=a,api=opencl,cuda"] {
            assert!(device.validate_in(&with(accel(ok))).is_ok(), "{ok}");
        }
        for (accels, words) in [
            (None, "there is no accelerator"),
            (accel("id=b"), "'a'"),
            (accel("id=a,api=cuda"), "CUDA"),
            (accel("id=a,transport=gate,server=/s"), "gate"),
        ] {
            let vm = with(accels);
            let said = device.validate_in(&vm).unwrap_err().to_string();
            assert!(
                said.starts_with("tracked: ") && said.contains(words),
                "{said}"
            );
            let Err(Refused(said)) = device.check_joins(&vm, true) else {
                panic!("{vm:?} takes it");
            };
            assert!(said.contains(words), "{said}");
        }
    }

    #[test]
    fn what_is_no_device_is_an_unknown_key() {
        for input in [
            "01:00",
            "01:00.8",
            "1:00.0",
            "gpu",
            "g:01:00.0",
            "01-02-03-04-05",
            "",
        ] {
            assert!(DeviceConfig::parse(input).is_err(), "{input}");
        }
        let twice = DeviceConfig::parse("01:00.0,path=/x").unwrap_err();
        assert!(twice.to_string().contains("stands there twice"));
    }
}
