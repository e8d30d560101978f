//! Physical devices.

use std::{
    os::fd::{AsRawFd, OwnedFd, RawFd},
    path::{Path, PathBuf},
    sync::{Arc, atomic::AtomicBool},
};

use serde::{Deserialize, Serialize};

use super::{
    AccelApi, HasCommonConfig, VmConfig,
    check::{self, Invalid, Placement, Problem, is_zero},
    common::{CommonConfig, has_common_config},
    descriptor::Descriptor,
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
    /// The device's file, open, in place of access to it; never part of a request body.
    #[serde(skip)]
    pub files: Option<DeviceFiles>,
}

/// The open files by which a process that may open neither of them reaches a physical device. The kernel ties the
/// device to that iommufd until its file is closed, so both stay open while the configuration has the device.
#[derive(Clone, Debug)]
pub struct DeviceFiles {
    /// `/dev/vfio/devices/vfioN`.
    pub device: Descriptor,
    /// `/dev/iommu`, the same one for all devices of a VM.
    pub iommufd: Descriptor,
    /// Whether this process has tied the first one to the second one, at an earlier boot.
    pub bound: Arc<AtomicBool>,
}

impl DeviceFiles {
    /// Files of which this process has made no use.
    fn new(device: Descriptor, iommufd: Descriptor) -> Self {
        Self {
            device,
            iommufd,
            bound: Arc::default(),
        }
    }
}

impl PartialEq for DeviceFiles {
    fn eq(&self, other: &Self) -> bool {
        (&self.device, &self.iommufd) == (&other.device, &other.iommufd)
    }
}

impl Eq for DeviceFiles {}

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
    Key::named("fd", "", ValueType::Number),
    Key::named("iommufd_fd", "", ValueType::Number),
    Key::new("iommu_segment", ValueType::Number),
    Key::new("tracked", ValueType::Text),
    Key::new("x_nv_gpudirect_clique", ValueType::Number),
    Key::new("x_exclude_mmap_bars", ValueType::Numbers),
];

has_common_config!(DeviceConfig);

impl Configured for DeviceConfig {
    const HELP: &'static str = "Physical devices: ADDRESS or path=FOLDER,fd=N,iommufd_fd=N,id=NAME,pci_device_id=N, \
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
        let files = match (parsed.take("fd"), parsed.take("iommufd_fd")) {
            (None, None) => None,
            (Some(device), Some(iommufd)) => Some(DeviceFiles::new(
                Descriptor::Inherited(device),
                Descriptor::Inherited(iommufd),
            )),
            (Some(_), None) => return Err(parsed.error(SyntaxProblem::Missing("iommufd_fd"))),
            (None, Some(_)) => return Err(parsed.error(SyntaxProblem::Missing("fd"))),
        };
        if files.is_none() {
            parsed.require("path", "path")?;
        }
        let mut config: Self = parsed.build()?;
        if let Some(files) = &files
            && config.path.is_none()
        {
            // Validation says that there is none.
            config.path = devices::vfio::folder_of(files.device.as_raw_fd()).ok();
        }
        config.files = files;
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
            let advice = match self.files {
                None => "name its folder in sysfs",
                Some(_) => {
                    "the descriptor is none of a device's file: open /dev/vfio/devices/vfioN"
                }
            };
            return Err(Problem::Missing(advice).at("path"));
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
        self.check_files(vm)
            .map_err(|problem| problem.at("iommufd_fd"))?;
        self.check_clique(vm)
            .map_err(|problem| problem.at("x_nv_gpudirect_clique"))?;
        self.check_tracked(vm)
            .map_err(|problem| problem.at("tracked"))
    }

    fn needs(&self) -> Option<&str> {
        self.tracked.as_deref()
    }

    fn descriptors(&self) -> Vec<RawFd> {
        let files = self.files.iter();
        let both = files.flat_map(|files| [&files.device, &files.iommufd]);
        both.map(AsRawFd::as_raw_fd).collect()
    }

    fn take_descriptors(&mut self, descriptors: Vec<OwnedFd>) -> Result<(), Refused> {
        let count = descriptors.len();
        let [device, iommufd] = <[OwnedFd; 2]>::try_from(descriptors).map_err(|_| {
            Refused(format!(
                "{count} descriptors came with the request: send that of the device's file \
                 (/dev/vfio/devices/vfioN) and that of /dev/iommu, in this order"
            ))
        })?;
        self.files = Some(DeviceFiles::new(device.into(), iommufd.into()));
        Ok(())
    }

    fn check_joins(&self, vm: &VmConfig, _running: bool) -> Result<(), Refused> {
        self.check_files(vm)
            .map_err(|problem| Refused(format!("iommufd_fd: {problem}")))?;
        self.check_clique(vm)
            .map_err(|problem| Refused(format!("x_nv_gpudirect_clique: {problem}")))?;
        self.check_tracked(vm)
            .map_err(|problem| Refused(format!("tracked: {problem}")))
    }
}

impl DeviceConfig {
    /// Checks that the devices of a VM are all opened by descriptors, or all by their paths: they have one iommufd.
    fn check_files(&self, vm: &VmConfig) -> Result<(), Problem> {
        let mut devices = vm.devices.iter().flatten();
        let differs = |other: &Self| other.files.is_some() != self.files.is_some();
        match devices.any(differs) {
            true => Err(Problem::Conflict {
                with: "devices that are opened by their paths",
                advice: "give descriptors for all devices of the VM, or for none",
            }),
            false => Ok(()),
        }
    }

    /// Checks that the device may access the BARs of others, if it is in a clique.
    fn check_clique(&self, vm: &VmConfig) -> Result<(), Problem> {
        let platform = vm.platform.as_ref();
        match self.x_nv_gpudirect_clique {
            Some(_) if platform.is_some_and(|it| !it.vfio_p2p_dma) => Err(Problem::Conflict {
                with: "vfio_p2p_dma=off",
                advice: "leave one of them out: devices of a clique access each other's BARs",
            }),
            _ => Ok(()),
        }
    }

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
    fn descriptors_stand_for_access_to_a_devices_files() {
        let device = DeviceConfig::parse("01:00.0,fd=5,iommufd_fd=6,id=g").unwrap();
        assert_eq!(device.descriptors(), [5, 6]);
        assert_eq!(device.validate(), Ok(()));
        for (input, missing) in [("01:00.0,fd=5", "iommufd_fd="), ("iommufd_fd=6", "fd=")] {
            let error = DeviceConfig::parse(input).unwrap_err().to_string();
            assert!(error.contains(missing), "{error}");
        }
        // Whose file it is says where the device is.
        let none = DeviceConfig::parse("fd=1048576,iommufd_fd=6").unwrap();
        let error = none.validate().unwrap_err().to_string();
        assert!(error.contains("/dev/vfio/devices/vfioN"), "{error}");
        let vm = VmConfig {
            devices: Some(vec![
                device.clone(),
                DeviceConfig::parse("02:00.0").unwrap(),
            ]),
            ..VmConfig::default()
        };
        let error = device.validate_in(&vm).unwrap_err().to_string();
        assert!(error.contains("for all devices of the VM"), "{error}");
    }

    #[test]
    fn a_request_for_a_device_comes_with_both_descriptors_or_none() {
        let mut device = DeviceConfig::parse("01:00.0").unwrap();
        let open = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let Err(Refused(said)) = device.take_descriptors(vec![open()]) else {
            panic!("one is enough");
        };
        assert!(said.contains("/dev/iommu"), "{said}");
        device.take_descriptors(vec![open(), open()]).unwrap();
        assert_eq!(device.descriptors().len(), 2);
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
