//! Disks.

use std::path::PathBuf;

pub use devices::disk::{ImageType, LockGranularity};
use serde::{Deserialize, Serialize};

use super::{
    VmConfig,
    check::{self, Invalid, Placement, Problem},
    common::{CommonConfig, has_common_config},
    kind::{
        Configured, Device, FileUse, HotPlug, Refused, check_shared_memory, needs_shared_memory,
    },
    syntax::{IOMMU, Key, LIMITS, PLACE, Part, SyntaxError, ValueType, parse},
};

/// Host CPUs that serve a queue.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct VirtQueueAffinity {
    /// The queue's number.
    pub queue_index: u16,
    /// Numbers of host CPUs.
    pub host_cpus: Vec<usize>,
}

/// Rate limits that several disks share.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct RateLimitGroupConfig {
    /// Its name.
    pub id: String,
    /// The limits.
    pub rate_limiter_config: devices::rate_limiter::RateLimiterConfig,
}

/// A disk.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct DiskConfig {
    /// The image file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
    /// The guest cannot write to it.
    #[serde(default)]
    pub readonly: bool,
    /// Bypasses the host's page cache.
    #[serde(default)]
    pub direct: bool,
    /// Behind a virtual IOMMU.
    #[serde(default)]
    pub iommu: bool,
    /// Number of queues.
    #[serde(default = "one")]
    pub num_queues: u16,
    /// Number of entries per queue, a power of two.
    #[serde(default = "queue_size")]
    pub queue_size: u16,
    /// Another process serves the device.
    #[serde(default)]
    pub vhost_user: bool,
    /// That process's socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vhost_socket: Option<PathBuf>,
    /// Rate limits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate_limiter_config: Option<devices::rate_limiter::RateLimiterConfig>,
    /// Group of rate limits shared with other disks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate_limit_group: Option<String>,
    /// Its name and location.
    #[serde(flatten)]
    pub common: CommonConfig,
    /// Serial number, at most 20 printable ASCII characters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
    /// Pinning of queues to host CPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue_affinity: Option<Vec<VirtQueueAffinity>>,
    /// Images may name backing files.
    #[serde(default)]
    pub backing_files: bool,
    /// Blocks that the guest discards are returned to the host.
    #[serde(default = "yes")]
    pub sparse: bool,
    /// Image format.
    #[serde(default)]
    pub image_type: ImageType,
    /// What the lock covers.
    #[serde(default)]
    pub lock_granularity: LockGranularity,
    /// Size of the blocks that the guest sees, 512 or 4096 bytes; that of the image's storage if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logical_block_size: Option<u32>,
}

fn one() -> u16 {
    1
}

fn queue_size() -> u16 {
    128
}

fn yes() -> bool {
    true
}

impl Default for DiskConfig {
    fn default() -> Self {
        Self {
            path: None,
            readonly: false,
            direct: false,
            iommu: false,
            num_queues: one(),
            queue_size: queue_size(),
            vhost_user: false,
            vhost_socket: None,
            rate_limiter_config: None,
            rate_limit_group: None,
            common: CommonConfig::default(),
            serial: None,
            queue_affinity: None,
            backing_files: false,
            sparse: true,
            image_type: ImageType::default(),
            lock_granularity: LockGranularity::default(),
            logical_block_size: None,
        }
    }
}

const KEYS: &[Key] = &[
    Key::new("path", ValueType::Text),
    Key::new("readonly", ValueType::Switch),
    Key::new("direct", ValueType::Switch),
    Key::new("num_queues", ValueType::Number),
    Key::new("queue_size", ValueType::Number),
    Key::new("vhost_user", ValueType::Switch),
    Key::named("socket", "vhost_socket", ValueType::Text),
    Key::new("rate_limit_group", ValueType::Text),
    Key::new("serial", ValueType::Text),
    Key::new(
        "queue_affinity",
        ValueType::Pairs(
            Part("queue_index", &ValueType::Number),
            Part("host_cpus", &ValueType::Numbers),
        ),
    ),
    Key::new("backing_files", ValueType::Switch),
    Key::new("sparse", ValueType::Switch),
    Key::new(
        "image_type",
        ValueType::Choice(&[
            ("raw", "Raw"),
            ("qcow2", "Qcow2"),
            ("fixedvhd", "FixedVhd"),
            ("vhd", "FixedVhd"),
            ("vhdx", "Vhdx"),
            ("unknown", "Unknown"),
        ]),
    ),
    Key::new(
        "lock_granularity",
        ValueType::Choice(&[("byte-range", "ByteRange"), ("full", "Full")]),
    ),
    Key::new("logical_block_size", ValueType::Number),
];

const GROUP: &[Key] = &[Key::new("id", ValueType::Text)];

impl RateLimitGroupConfig {
    /// Its syntax on the command line.
    pub const SYNTAX: &[&[Key]] = &[GROUP, LIMITS];

    /// Parses the value of `--rate-limit-group`.
    pub fn parse(input: &str) -> Result<Self, SyntaxError> {
        let mut parsed = parse("--rate-limit-group", input, Self::SYNTAX)?;
        parsed.require("id", "id")?;
        parsed.default("rate_limiter_config", serde_json::Map::new());
        parsed.build()
    }
}

has_common_config!(DiskConfig);

impl Configured for DiskConfig {
    const HELP: &'static str = "Disks: path=FILE,readonly=on|off,direct=on|off,image_type=raw|qcow2,backing_files=on|off, \
        sparse=on|off,lock_granularity=byte-range|full,logical_block_size=512|4096,serial=TEXT,num_queues=N,queue_size=N, \
        queue_affinity=[QUEUE@[CPUS]],rate_limit_group=NAME,bw_size=SIZE,bw_one_time_burst=SIZE, \
        bw_refill_time=MS,ops_size=N,ops_one_time_burst=N,ops_refill_time=MS,id=NAME. A disk of another \
        process (vhost-user): vhost_user=on,socket=PATH,num_queues=N,queue_size=N,id=NAME. The memory has to be shared (see --memory)";

    const HOT_PLUG: Option<HotPlug> = Some(HotPlug {
        about: "Plug in a disk",
        help: "As for --disk: path=FILE,readonly=on|off,id=NAME,...",
    });

    const SYNTAX: &'static [&'static [Key]] = &[KEYS, LIMITS, IOMMU, PLACE];

    /// Parses the value of `--disk`. Text without `=` is the path.
    fn parse(input: &str) -> Result<Self, SyntaxError> {
        if !input.contains('=') && !input.is_empty() {
            return Ok(Self {
                path: Some(PathBuf::from(input)),
                ..Self::default()
            });
        }
        parse("--disk", input, Self::SYNTAX)?.build()
    }
}

impl Device for DiskConfig {
    fn validate(&self) -> Result<(), Invalid> {
        if !self.has_image() {
            self.validate_served()?;
        } else if self.vhost_socket.is_some() {
            return Err(Problem::Missing("a socket is that of a vhost-user disk").at("vhost_user"));
        } else if self
            .path
            .as_ref()
            .is_none_or(|path| path.as_os_str().is_empty())
        {
            return Err(Problem::Missing("name an image file or a block device").at("path"));
        }
        check::unsupported(
            matches!(self.image_type, ImageType::FixedVhd | ImageType::Vhdx),
            "image_type",
            "VHD and VHDX images",
            "convert the image with qemu-img convert -O qcow2",
        )?;
        if let Some(size) = self.logical_block_size {
            let valid = [512, 4096].contains(&size);
            check::number("logical_block_size", size, valid, "512 or 4096")?;
        }
        check::range("num_queues", self.num_queues, 1, Self::MAX_QUEUES)?;
        check::queue_size(self.queue_size)?;
        if let Some(serial) = &self.serial {
            // An ASCII string (virtio 1.2, 5.2.6.1).
            let printable = serial.bytes().all(|byte| (b' '..=b'~').contains(&byte));
            check::text(
                "serial",
                serial,
                serial.len() <= 20 && printable,
                "a serial number of at most 20 printable characters of ASCII",
            )?;
        }
        if self.rate_limit_group.is_some() && self.rate_limiter_config.is_some() {
            let with = "rate_limiter_config";
            let advice = "a disk has limits of its own or those of a group";
            return Err(Problem::Conflict { with, advice }.at("rate_limit_group"));
        }
        for (index, affinity) in self.queue_affinity.iter().flatten().enumerate() {
            let place = format!("queue_affinity[{index}].queue_index");
            check::range(
                &place,
                affinity.queue_index,
                0,
                u64::from(self.num_queues) - 1,
            )?;
        }
        self.placement().validate()
    }

    fn placement(&self) -> Placement<'_> {
        Placement {
            iommu: self.iommu,
            ..self.common.placement()
        }
    }

    /// Checks that a named group of rate limits exists, and that another process can map the memory if it has to.
    fn validate_in(&self, vm: &VmConfig) -> Result<(), Invalid> {
        if !self.has_image() {
            needs_shared_memory(vm, "vhost_user")?;
        }
        let mut groups = vm.rate_limit_groups.iter().flatten();
        match &self.rate_limit_group {
            Some(name) if !groups.any(|group| group.id == *name) => {
                let what = "rate limit group";
                let name = name.clone();
                Err(Problem::Unknown { what, name }.at("rate_limit_group"))
            }
            _ => Ok(()),
        }
    }

    fn files(&self) -> Vec<FileUse> {
        let path = self.path.iter();
        path.map(|path| FileUse::open(path, self.readonly))
            .collect()
    }

    fn check_joins(&self, vm: &VmConfig, _running: bool) -> Result<(), Refused> {
        match self.has_image() {
            true => Ok(()),
            false => check_shared_memory(vm),
        }
    }

    fn cannot_move(&self) -> Option<&'static str> {
        (!self.has_image()).then_some("disk of another process")
    }

    fn cannot_be_saved(&self) -> bool {
        !self.has_image()
    }
}

impl DiskConfig {
    /// Whether Gantry serves the disk, from an image; otherwise another process does.
    pub fn has_image(&self) -> bool {
        !self.vhost_user
    }

    /// Checks a disk that another process serves.
    fn validate_served(&self) -> Result<(), Invalid> {
        let is_named = |path: &PathBuf| !path.as_os_str().is_empty();
        if !self.vhost_socket.as_ref().is_some_and(is_named) {
            return Err(Problem::Missing("name the socket of its back end").at("vhost_socket"));
        }
        let is_theirs = [
            ("path", self.path.is_some()),
            ("readonly", self.readonly),
            ("direct", self.direct),
            ("serial", self.serial.is_some()),
            ("rate_limiter_config", self.rate_limiter_config.is_some()),
            ("rate_limit_group", self.rate_limit_group.is_some()),
            ("queue_affinity", self.queue_affinity.is_some()),
            ("backing_files", self.backing_files),
            ("image_type", self.image_type != ImageType::default()),
            ("logical_block_size", self.logical_block_size.is_some()),
        ];
        match is_theirs.iter().find(|(_, is_set)| *is_set) {
            Some((place, _)) => {
                let with = "vhost_user";
                let advice = "the disk's back end decides about that";
                Err(Problem::Conflict { with, advice }.at(*place))
            }
            None => Ok(()),
        }
    }

    /// Maximum number of queues: one for each vCPU.
    const MAX_QUEUES: u64 = 255;
}
