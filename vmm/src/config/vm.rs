//! The whole machine.

use std::path::PathBuf;

use arch::layout::{MAX_PCI_BUSES, MAX_ROOT_PORTS};
use serde::{Deserialize, Serialize};

use super::{
    check::{self, Invalid, Placement, Problem},
    syntax::{Key, SyntaxError, ValueType, parse},
};

use super::{
    AccelConfig, AccelServerConfig, BalloonConfig, ConsoleConfig, CpusConfig, DebugConsoleConfig,
    DeviceConfig, DiskConfig, FsConfig, GenericVhostUserConfig, HotplugMethod, MemoryConfig,
    NetConfig, NumaConfig, PayloadConfig, PciRootPortConfig, PciSegmentConfig, PlatformConfig,
    PmemConfig, RateLimitGroupConfig, RngConfig, RtcConfig, SerialConfig, TpmConfig,
    UserDeviceConfig, VdpaConfig, VsockConfig,
};

/// A path that Gantry may use under Landlock.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct LandlockConfig {
    /// The file or directory.
    pub path: PathBuf,
    /// `r`, `w` or `rw`.
    pub access: String,
}

/// The whole machine.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct VmConfig {
    /// Virtual processors.
    #[serde(default)]
    pub cpus: CpusConfig,
    /// Memory.
    #[serde(default)]
    pub memory: MemoryConfig,
    /// What it boots.
    pub payload: PayloadConfig,
    /// Limits that disks share.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate_limit_groups: Option<Vec<RateLimitGroupConfig>>,
    /// Disks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disks: Option<Vec<DiskConfig>>,
    /// Network cards.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub net: Option<Vec<NetConfig>>,
    /// Entropy.
    #[serde(default)]
    pub rng: RngConfig,
    /// Balloon.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub balloon: Option<BalloonConfig>,
    /// Shared folders.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fs: Option<Vec<FsConfig>>,
    /// Other vhost-user devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generic_vhost_user: Option<Vec<GenericVhostUserConfig>>,
    /// Persistent memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pmem: Option<Vec<PmemConfig>>,
    /// Serial port.
    #[serde(default)]
    pub serial: SerialConfig,
    /// Virtio console.
    #[serde(default)]
    pub console: ConsoleConfig,
    /// Debug console.
    #[serde(default)]
    pub debug_console: DebugConsoleConfig,
    /// Physical devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub devices: Option<Vec<DeviceConfig>>,
    /// Accelerators whose calls are served by worker processes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accels: Option<Vec<AccelConfig>>,
    /// Makes a process of this VM the accelerator of others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accel_server: Option<AccelServerConfig>,
    /// Devices of other processes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_devices: Option<Vec<UserDeviceConfig>>,
    /// vDPA devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vdpa: Option<Vec<VdpaConfig>>,
    /// Sockets between guest and host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vsock: Option<VsockConfig>,
    /// NUMA nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numa: Option<Vec<NumaConfig>>,
    /// A virtual IOMMU.
    #[serde(default)]
    pub iommu: bool,
    /// A watchdog.
    #[serde(default)]
    pub watchdog: bool,
    /// A virtio clock.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rtc: Option<RtcConfig>,
    /// A panic device.
    #[serde(default)]
    pub pvpanic: bool,
    /// Shares of PCI segments.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pci_segments: Option<Vec<PciSegmentConfig>>,
    /// PCI Express root ports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pci_root_ports: Option<Vec<PciRootPortConfig>>,
    /// Platform.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub platform: Option<PlatformConfig>,
    /// Trusted platform module.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tpm: Option<TpmConfig>,
    /// Restrict Gantry to the files of its configuration (Landlock).
    #[serde(default)]
    pub landlock_enable: bool,
    /// Further files that it may use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub landlock_rules: Option<Vec<LandlockConfig>>,
}

const LANDLOCK: &[Key] = &[
    Key::new("path", ValueType::Text),
    Key::new("access", ValueType::Text),
];

impl LandlockConfig {
    /// How it is written on the command line.
    pub const SYNTAX: &[&[Key]] = &[LANDLOCK];

    /// Parses the value of `--landlock-rules`.
    pub fn parse(input: &str) -> Result<Self, SyntaxError> {
        let parsed = parse("--landlock-rules", input, Self::SYNTAX)?;
        parsed.require("path", "path")?;
        parsed.require("access", "access")?;
        parsed.build()
    }

    /// What it says can be done.
    pub fn validate(&self) -> Result<(), Invalid> {
        let valid = matches!(self.access.as_str(), "r" | "w" | "rw");
        check::text("access", &self.access, valid, "one of r, w, rw")
    }
}

impl VmConfig {
    /// Whether a machine can be built from it, as far as can be said without looking at files.
    pub fn validate(&self) -> Result<(), Invalid> {
        let within = |place: &'static str| move |invalid: Invalid| invalid.within(place);
        self.refuse_unsupported()?;
        self.cpus.validate().map_err(within("cpus"))?;
        self.memory.validate().map_err(within("memory"))?;
        self.payload.validate().map_err(within("payload"))?;
        if let Some(platform) = &self.platform {
            platform.validate().map_err(within("platform"))?;
        }
        self.rng.validate().map_err(within("rng"))?;
        self.serial.validate().map_err(within("serial"))?;
        self.console.validate().map_err(within("console"))?;
        self.debug_console
            .validate()
            .map_err(within("debug_console"))?;
        if let Some(balloon) = &self.balloon {
            balloon.validate().map_err(within("balloon"))?;
            let memory = self.memory.total();
            check::range("size", balloon.size, 0, memory).map_err(within("balloon"))?;
        }
        if let Some(vsock) = &self.vsock {
            vsock.validate().map_err(within("vsock"))?;
        }
        each("disks", self.disks.as_deref(), DiskConfig::validate)?;
        each("net", self.net.as_deref(), NetConfig::validate)?;
        each("devices", self.devices.as_deref(), DeviceConfig::validate)?;
        each("accels", self.accels.as_deref(), AccelConfig::validate)?;
        if let Some(server) = &self.accel_server {
            server.validate().map_err(within("accel_server"))?;
            // What a client's vCPU finds in its place is the state of one CPU.
            if self.cpus.max_vcpus != 1 {
                let with = "more than one vCPU";
                let advice = "start a server VM with --cpus boot=1";
                let problem = Problem::Conflict { with, advice };
                return Err(problem.at("accel_server"));
            }
        }
        each("pmem", self.pmem.as_deref(), PmemConfig::validate)?;
        each("user_devices", self.user_devices.as_deref(), |device| {
            device.validate()?;
            if self.memory.is_shared() {
                return Ok(());
            }
            let with = "memory that its server cannot map";
            let advice = "start the VM with --memory shared=on";
            Err(Problem::Conflict { with, advice }.at("socket"))
        })?;
        let rules = self.landlock_rules.as_deref();
        each("landlock_rules", rules, LandlockConfig::validate)?;
        let segments = self.segments();
        each("pci_segments", self.pci_segments.as_deref(), |segment| {
            segment.validate(segments)
        })?;
        let ports = self.pci_root_ports.as_deref();
        each("pci_root_ports", ports, PciRootPortConfig::validate)?;
        let nodes = self.numa.as_deref().unwrap_or_default();
        let zones = self.memory.zones.as_deref().unwrap_or_default();
        each("numa", self.numa.as_deref(), |node| {
            node.validate(nodes, self.cpus.max_vcpus, zones)
        })?;
        self.validate_groups()?;
        // Its devices have no place of their own to be configured.
        if self.memory.hotplug_method == HotplugMethod::VirtioMem
            && self.iommu_segments().contains(&0)
        {
            let with = "virtio-mem, whose devices are in segment 0";
            let advice = "name other segments, or use hotplug_method=Acpi";
            let problem = Problem::Conflict { with, advice };
            return Err(problem.at("platform.iommu_segments"));
        }
        self.validate_placements()
    }

    /// Segments behind the virtual IOMMU; if there are none, there is no virtual IOMMU.
    pub fn iommu_segments(&self) -> &[u16] {
        let platform = self.platform.as_ref();
        let segments = platform.and_then(|platform| platform.iommu_segments.as_deref());
        segments.unwrap_or_default()
    }

    /// Says what is said in short as the machine wants it: there are the segments behind the virtual
    /// IOMMU that devices go into, and each device says by `pci_segment` where it is. For use before
    /// [`VmConfig::validate`].
    pub fn normalize(&mut self) {
        let devices = self.devices.iter().flatten();
        for segment in devices.filter_map(|device| device.iommu_segment) {
            let platform = self.platform.get_or_insert_default();
            // A number that is too large is refused later.
            let count = segment.saturating_add(1).max(platform.num_pci_segments);
            platform.num_pci_segments = count;
            let behind = platform.iommu_segments.get_or_insert_default();
            if !behind.contains(&segment) {
                behind.push(segment);
            }
        }
        let behind = self.iommu_segments().to_vec();
        for device in self.devices.iter_mut().flatten() {
            device.normalize_segment(&behind);
        }
    }

    /// Whether processes of the VM use the gate, as clients or as a server.
    pub fn has_gate(&self) -> bool {
        let accels = self.accels.iter().flatten();
        let mut gates = accels.filter(|accel| accel.is_gate());
        self.accel_server.is_some() || gates.next().is_some()
    }

    /// PCI segments.
    fn segments(&self) -> u16 {
        self.platform
            .as_ref()
            .map_or(1, |platform| platform.num_pci_segments)
    }

    /// PCI Express root ports of each segment.
    pub fn root_ports(&self) -> Vec<u8> {
        let mut counts = vec![0_u8; self.segments().into()];
        for port in self.pci_root_ports.iter().flatten() {
            if let Some(count) = counts.get_mut(usize::from(port.common.pci_segment)) {
                *count = count.saturating_add(1);
            }
        }
        counts
    }

    /// There is a bus for each root port, and a root port for each `parent`.
    fn validate_parents(&self, placements: &[(String, Placement<'_>)]) -> Result<(), Invalid> {
        let counts = self.root_ports();
        for count in &counts {
            check::range("pci_root_ports", *count, 0, MAX_ROOT_PORTS.into())?;
        }
        let ports: u64 = counts.iter().map(|count| u64::from(*count)).sum();
        let most = MAX_PCI_BUSES.saturating_sub(self.segments());
        check::range("pci_root_ports", ports, 0, most.into())?;
        for (place, placement) in placements {
            let Some(parent) = placement.parent else {
                continue;
            };
            let mut ports = self.pci_root_ports.iter().flatten();
            let Some(port) = ports.find(|port| port.common.id.as_deref() == Some(parent)) else {
                let (what, name) = ("PCI root port", parent.to_owned());
                return Err(Problem::Unknown { what, name }.at(format!("{place}.parent")));
            };
            if ![0, port.common.pci_segment].contains(&placement.segment) {
                let with = "a root port of another segment";
                let advice = "leave it out";
                let problem = Problem::Conflict { with, advice };
                return Err(problem.at(format!("{place}.pci_segment")));
            }
        }
        Ok(())
    }

    fn refuse_unsupported(&self) -> Result<(), Invalid> {
        let has = |count: Option<usize>| count.is_some_and(|count| count > 0);
        let lists = [
            (
                "fs",
                self.fs.as_ref().map(Vec::len),
                "shared folders (virtio-fs)",
            ),
            (
                "generic_vhost_user",
                self.generic_vhost_user.as_ref().map(Vec::len),
                "devices of other processes (vhost-user)",
            ),
            ("vdpa", self.vdpa.as_ref().map(Vec::len), "vDPA devices"),
        ];
        for (place, count, what) in lists {
            check::unsupported(has(count), place, what, "leave them out")?;
        }
        let switches = [
            ("tpm", self.tpm.is_some(), "a trusted platform module"),
            ("rtc", self.rtc.is_some(), "a virtio clock"),
            ("iommu", self.iommu, "a virtual IOMMU"),
            ("watchdog", self.watchdog, "a watchdog"),
            ("pvpanic", self.pvpanic, "a panic device"),
        ];
        for (place, wanted, what) in switches {
            check::unsupported(wanted, place, what, "leave it out")?;
        }
        Ok(())
    }

    /// Disks name groups that exist.
    fn validate_groups(&self) -> Result<(), Invalid> {
        let groups = self.rate_limit_groups.as_deref().unwrap_or_default();
        each("disks", self.disks.as_deref(), |disk| {
            match &disk.rate_limit_group {
                Some(name) if !groups.iter().any(|group| group.id == *name) => {
                    let what = "rate limit group";
                    let name = name.clone();
                    Err(Problem::Unknown { what, name }.at("rate_limit_group"))
                }
                _ => Ok(()),
            }
        })
    }

    /// No two devices have the same name or the same slot, and all segments exist.
    fn validate_placements(&self) -> Result<(), Invalid> {
        let last = u64::from(self.segments().saturating_sub(1));
        let placements = self.placements();
        for (index, (place, placement)) in placements.iter().enumerate() {
            let field = |field: &str| format!("{place}.{field}");
            check::range(&field("pci_segment"), placement.segment, 0, last)?;
            let others = &placements[..index];
            if let Some(id) = placement.id
                && let Some((other, _)) = others.iter().find(|(_, other)| other.id == Some(id))
            {
                let what = format!("'{id}'");
                let other = other.clone();
                return Err(Problem::Taken { what, other }.at(field("id")));
            }
            if let Some(seat) = placement.seat()
                && let Some((other, _)) =
                    others.iter().find(|(_, other)| other.seat() == Some(seat))
            {
                let (what, key) = match seat {
                    (_, Some(parent), _, function) => (
                        format!("function {function} behind '{parent}'"),
                        "pci_function",
                    ),
                    (segment, None, slot, 0) => {
                        (format!("slot {slot} of segment {segment}"), "pci_device_id")
                    }
                    (segment, None, slot, function) => (
                        format!("function {function} of slot {slot} of segment {segment}"),
                        "pci_function",
                    ),
                };
                let other = other.clone();
                return Err(Problem::Taken { what, other }.at(field(key)));
            }
        }
        self.validate_parents(&placements)
    }

    /// All PCI devices, by their place in the configuration.
    fn placements(&self) -> Vec<(String, Placement<'_>)> {
        fn list<'a, T>(
            name: &'a str,
            items: Option<&'a Vec<T>>,
            placement: fn(&T) -> Placement<'_>,
        ) -> impl Iterator<Item = (String, Placement<'a>)> {
            let items = items.into_iter().flatten().enumerate();
            items.map(move |(index, item)| (format!("{name}[{index}]"), placement(item)))
        }
        let mut all = vec![
            ("rng".to_owned(), self.rng.placement()),
            ("console".to_owned(), self.console.placement()),
        ];
        let ports = self.pci_root_ports.as_ref();
        all.extend(list("pci_root_ports", ports, PciRootPortConfig::placement));
        let balloon = self.balloon.iter().map(BalloonConfig::placement);
        all.extend(balloon.map(|placement| ("balloon".to_owned(), placement)));
        let vsock = self.vsock.iter().map(VsockConfig::placement);
        all.extend(vsock.map(|placement| ("vsock".to_owned(), placement)));
        all.extend(list("disks", self.disks.as_ref(), DiskConfig::placement));
        all.extend(list("net", self.net.as_ref(), NetConfig::placement));
        all.extend(list("pmem", self.pmem.as_ref(), PmemConfig::placement));
        let accels = self.accels.as_ref();
        all.extend(list("accels", accels, AccelConfig::placement));
        let server = self.accel_server.iter().map(AccelServerConfig::placement);
        all.extend(server.map(|placement| ("accel_server".to_owned(), placement)));
        let devices = self.devices.as_ref();
        all.extend(list("devices", devices, DeviceConfig::placement));
        let devices = self.user_devices.as_ref();
        all.extend(list("user_devices", devices, UserDeviceConfig::placement));
        all
    }
}

/// Validates every item of a list.
fn each<T>(
    name: &str,
    items: Option<&[T]>,
    validate: impl Fn(&T) -> Result<(), Invalid>,
) -> Result<(), Invalid> {
    for (index, item) in items.unwrap_or_default().iter().enumerate() {
        validate(item).map_err(|invalid| invalid.within(&format!("{name}[{index}]")))?;
    }
    Ok(())
}
