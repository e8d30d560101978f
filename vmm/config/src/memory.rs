//! Guest memory.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{
    check::{self, Invalid, Problem},
    syntax::{Key, SyntaxError, ValueType, parse},
};

/// How memory is hot-plugged.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub enum HotplugMethod {
    /// Whole modules, announced through ACPI.
    #[default]
    Acpi,
    /// Blocks of 2 MiB of a virtio-mem device; they can also be unplugged.
    VirtioMem,
}

/// A part of memory with its own backing.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct MemoryZoneConfig {
    /// Its name.
    pub id: String,
    /// Size at boot in bytes.
    pub size: u64,
    /// Backing file, or a directory for an unnamed file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<PathBuf>,
    /// The host may merge identical pages.
    #[serde(default)]
    pub mergeable: bool,
    /// Other processes can map the memory.
    #[serde(default)]
    pub shared: bool,
    /// Uses huge pages of the host.
    #[serde(default)]
    pub hugepages: bool,
    /// Size of the huge pages in bytes; the host's default if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hugepage_size: Option<u64>,
    /// NUMA node of the host from which it is allocated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_numa_node: Option<u32>,
    /// Number of bytes that can be hot-plugged (virtio-mem).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hotplug_size: Option<u64>,
    /// Number of bytes that are currently hot-plugged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hotplugged_size: Option<u64>,
    /// Touches every page at start.
    #[serde(default)]
    pub prefault: bool,
    /// Counts the memory against the host's commit limit.
    #[serde(default)]
    pub reserve: bool,
}

/// Guest memory.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct MemoryConfig {
    /// Size at boot in bytes; 0 with zones.
    pub size: u64,
    /// Number of bytes that can be hot-plugged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hotplug_size: Option<u64>,
    /// Number of bytes that are currently hot-plugged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hotplugged_size: Option<u64>,
    /// The host may merge identical pages.
    #[serde(default)]
    pub mergeable: bool,
    /// How memory is hot-plugged.
    #[serde(default)]
    pub hotplug_method: HotplugMethod,
    /// Other processes can map the memory.
    #[serde(default)]
    pub shared: bool,
    /// Uses huge pages of the host.
    #[serde(default)]
    pub hugepages: bool,
    /// Size of the huge pages in bytes; the host's default if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hugepage_size: Option<u64>,
    /// Touches every page at start.
    #[serde(default)]
    pub prefault: bool,
    /// Counts the memory against the host's commit limit.
    #[serde(default)]
    pub reserve: bool,
    /// The host may use transparent huge pages.
    #[serde(default = "yes")]
    pub thp: bool,
    /// Parts with their own backing, instead of `size`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zones: Option<Vec<MemoryZoneConfig>>,
}

fn yes() -> bool {
    true
}

impl Default for MemoryConfig {
    fn default() -> Self {
        Self {
            size: 512 << 20,
            hotplug_size: None,
            hotplugged_size: None,
            mergeable: false,
            hotplug_method: HotplugMethod::default(),
            shared: false,
            hugepages: false,
            hugepage_size: None,
            prefault: false,
            reserve: false,
            thp: true,
            zones: None,
        }
    }
}

const BACKING: &[Key] = &[
    Key::new("size", ValueType::Size),
    Key::new("hotplug_size", ValueType::Size),
    Key::new("hotplugged_size", ValueType::Size),
    Key::new("mergeable", ValueType::Switch),
    Key::new("shared", ValueType::Switch),
    Key::new("hugepages", ValueType::Switch),
    Key::new("hugepage_size", ValueType::Size),
    Key::new("prefault", ValueType::Switch),
    Key::new("reserve", ValueType::Switch),
];

const MEMORY: &[Key] = &[
    Key::new(
        "hotplug_method",
        ValueType::Choice(&[("acpi", "Acpi"), ("virtio-mem", "VirtioMem")]),
    ),
    Key::new("thp", ValueType::Switch),
];

const ZONE: &[Key] = &[
    Key::new("id", ValueType::Text),
    Key::new("file", ValueType::Text),
    Key::new("host_numa_node", ValueType::Number),
];

/// Memory sizes must be multiples of this, like virtio-mem's blocks and huge pages.
const UNIT: u64 = 2 << 20;

/// The settings that memory and its zones have in common.
struct Sizes {
    size: u64,
    hotplug: Option<u64>,
    hotplugged: Option<u64>,
    hugepages: bool,
    hugepage_size: Option<u64>,
}

impl Sizes {
    fn validate(&self) -> Result<(), Invalid> {
        let unit = match (self.hugepages, self.hugepage_size) {
            (true, Some(size)) => size,
            (false, Some(_)) => {
                let advice = "switch hugepages on";
                let with = "hugepages=off";
                return Err(Problem::Conflict { with, advice }.at("hugepage_size"));
            }
            (_, None) => UNIT,
        };
        check::number(
            "hugepage_size",
            unit,
            unit.is_power_of_two() && unit >= UNIT,
            "a size of huge pages, such as 2 MiB or 1 GiB",
        )?;
        let multiple = "a multiple of the page size (2 MiB without hugepage_size)";
        check::number("size", self.size, self.size.is_multiple_of(unit), multiple)?;
        let hotplug = self.hotplug.unwrap_or(0);
        check::number(
            "hotplug_size",
            hotplug,
            hotplug.is_multiple_of(unit),
            multiple,
        )?;
        let hotplugged = self.hotplugged.unwrap_or(0);
        check::range("hotplugged_size", hotplugged, 0, hotplug)?;
        let whole = hotplugged.is_multiple_of(unit);
        check::number("hotplugged_size", hotplugged, whole, multiple)?;
        let total = self.size.checked_add(hotplug);
        check::number(
            "size",
            self.size,
            total.is_some_and(|total| total <= 1 << 46),
            "a size that fits 64 TiB together with hotplug_size",
        )
    }
}

impl MemoryZoneConfig {
    /// Its syntax on the command line.
    pub const SYNTAX: &[&[Key]] = &[ZONE, BACKING];

    /// Parses the value of `--memory-zone`.
    pub fn parse(input: &str) -> Result<Self, SyntaxError> {
        let parsed = parse("--memory-zone", input, Self::SYNTAX)?;
        parsed.require("id", "id")?;
        parsed.require("size", "size")?;
        parsed.build()
    }

    /// Checks whether the configuration is valid.
    pub fn validate(&self) -> Result<(), Invalid> {
        check::text("id", &self.id, !self.id.is_empty(), "a name")?;
        check::number("size", self.size, self.size > 0, "more than 0")?;
        let sizes = Sizes {
            size: self.size,
            hotplug: self.hotplug_size,
            hotplugged: self.hotplugged_size,
            hugepages: self.hugepages,
            hugepage_size: self.hugepage_size,
        };
        sizes.validate()
    }
}

impl MemoryConfig {
    /// Its syntax on the command line.
    pub const SYNTAX: &[&[Key]] = &[BACKING, MEMORY];

    /// Parses the value of `--memory`. A bare size is the size.
    pub fn parse(input: &str) -> Result<Self, SyntaxError> {
        if !input.contains('=') && !input.is_empty() {
            return Self::parse(&format!("size={input}"));
        }
        let mut parsed = parse("--memory", input, Self::SYNTAX)?;
        parsed.default("size", Self::default().size);
        parsed.build()
    }

    /// Current size of the guest's memory in bytes, over all zones.
    pub fn total(&self) -> u64 {
        let zones = self.zones.iter().flatten();
        zones
            .map(|zone| (zone.size, zone.hotplugged_size))
            .chain([(self.size, self.hotplugged_size)])
            .fold(0, |sum, (size, plugged)| {
                sum.saturating_add(size)
                    .saturating_add(plugged.unwrap_or(0))
            })
    }

    /// Whether any of it consists of huge pages.
    pub fn has_huge_pages(&self) -> bool {
        let mut zones = self.zones.iter().flatten();
        (self.size > 0 && self.hugepages) || zones.any(|zone| zone.hugepages)
    }

    /// Whether other processes can map all of it.
    pub fn is_shared(&self) -> bool {
        let mut zones = self.zones.iter().flatten();
        (self.size == 0 || self.shared) && zones.all(|zone| zone.shared)
    }

    /// Checks whether the configuration is valid.
    pub fn validate(&self) -> Result<(), Invalid> {
        let sizes = Sizes {
            size: self.size,
            hotplug: self.hotplug_size,
            hotplugged: self.hotplugged_size,
            hugepages: self.hugepages,
            hugepage_size: self.hugepage_size,
        };
        sizes.validate()?;
        let Some(zones) = self.zones.as_deref().filter(|zones| !zones.is_empty()) else {
            return check::number("size", self.size, self.size > 0, "more than 0");
        };
        if self.size > 0 {
            let advice = "set size to 0: the zones are all the memory there is";
            let with = "zones";
            return Err(Problem::Conflict { with, advice }.at("size"));
        }
        for (index, zone) in zones.iter().enumerate() {
            let place = format!("zones[{index}]");
            zone.validate().map_err(|invalid| invalid.within(&place))?;
            if let Some(other) = zones[..index].iter().position(|other| other.id == zone.id) {
                let what = format!("'{}'", zone.id);
                let other = format!("memory.zones[{other}]");
                return Err(Problem::Taken { what, other }.at(format!("{place}.id")));
            }
        }
        Ok(())
    }
}
