//! Virtual GPUs, which share a physical GPU through a mediator.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{
    VmConfig,
    check::{self, Invalid, Problem},
    common::{CommonConfig, has_common_config},
    kind::{Configured, Device, FileUse, HotPlug, Refused, check_shared_memory},
    syntax::{Key, PLACE, SyntaxError, ValueType, parse},
};

/// Default and minimum size of VRAM in bytes.
const VRAM: u64 = 256 << 20;
const SMALLEST: u64 = 64 << 20;
/// Default and maximum number of channels.
const CHANNELS: u8 = 64;
const MOST_CHANNELS: u8 = 128;

/// A virtual GPU.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct GpuConfig {
    /// Socket of the mediator (`gantry-gpu serve`).
    pub socket: PathBuf,
    /// Size of VRAM in bytes, a multiple of 1 MiB.
    #[serde(default = "vram")]
    pub vram: u64,
    /// Maximum number of channels in use at the same time, 1 to 128.
    #[serde(default = "channels")]
    pub channels: u8,
    /// Weight against other VMs when the GPU is shared.
    #[serde(default = "weight")]
    pub weight: u32,
    /// BARs are mapped into the guest; otherwise each access is trapped.
    #[serde(default = "on")]
    pub remap: bool,
    /// Changed page tables are shadowed when they are next used; otherwise as soon as they change.
    #[serde(default = "on")]
    pub lazy: bool,
    /// Only the written parts of page tables are compared; otherwise whole tables.
    #[serde(default = "on")]
    pub watch: bool,
    /// File to which everything that the guest does with it is recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub record: Option<PathBuf>,
    /// Its name and location.
    #[serde(flatten)]
    pub common: CommonConfig,
}

fn vram() -> u64 {
    VRAM
}

fn channels() -> u8 {
    CHANNELS
}

fn weight() -> u32 {
    1
}

fn on() -> bool {
    true
}

const KEYS: &[Key] = &[
    Key::new("socket", ValueType::Text),
    Key::new("vram", ValueType::Size),
    Key::new("channels", ValueType::Number),
    Key::new("weight", ValueType::Number),
    Key::new("remap", ValueType::Switch),
    Key::new("lazy", ValueType::Switch),
    Key::new("watch", ValueType::Switch),
    Key::new("record", ValueType::Text),
];

has_common_config!(GpuConfig);

impl Configured for GpuConfig {
    const HELP: &'static str = "Virtual GPUs for the guest's own driver, parts of the one that gantry-gpu has: \
        socket=PATH,vram=SIZE,channels=N,weight=N,remap=on|off,lazy=on|off,watch=on|off,record=FILE,id=NAME";

    const HOT_PLUG: Option<HotPlug> = Some(HotPlug {
        about: "Give the VM a virtual GPU",
        help: "As for --gpu: socket=PATH,vram=SIZE,channels=N,weight=N,id=NAME,...",
    });

    const SYNTAX: &'static [&'static [Key]] = &[KEYS, PLACE];

    fn parse(input: &str) -> Result<Self, SyntaxError> {
        let parsed = parse("--gpu", input, Self::SYNTAX)?;
        parsed.require("socket", "socket")?;
        parsed.build()
    }
}

impl Device for GpuConfig {
    fn files(&self) -> Vec<FileUse> {
        self.record.iter().map(FileUse::create).collect()
    }

    fn cannot_move(&self) -> Option<&'static str> {
        Some("virtual GPU")
    }

    fn validate(&self) -> Result<(), Invalid> {
        if self.socket.as_os_str().is_empty() {
            return Err(Problem::Missing("name the socket of gantry-gpu").at("socket"));
        }
        let valid = self.vram.is_multiple_of(1 << 20) && self.vram >= SMALLEST;
        check::number(
            "vram",
            self.vram,
            valid,
            "whole MiB, 64 MiB (67108864) or more",
        )?;
        check::range(
            "channels",
            u32::from(self.channels),
            1,
            MOST_CHANNELS.into(),
        )?;
        check::range("weight", self.weight, 1, 10_000)?;
        if self.record.is_some() && self.remap {
            // Most accesses of the guest would not be recorded.
            let (with, advice) = ("remap=on", "write remap=off");
            return Err(Problem::Conflict { with, advice }.at("record"));
        }
        self.placement().validate()
    }

    fn validate_in(&self, vm: &VmConfig) -> Result<(), Invalid> {
        let (with, advice) = if !vm.memory.is_shared() {
            let advice = "start the VM with --memory shared=on";
            ("memory that the GPU cannot reach", advice)
        } else if vm.memory.has_huge_pages() {
            // A huge page that the guest has given back would terminate the GPU's server when it is
            // next accessed.
            let advice = "start the VM with --memory hugepages=off";
            ("memory of huge pages", advice)
        } else {
            return Ok(());
        };
        Err(Problem::Conflict { with, advice }.at("socket"))
    }

    fn check_joins(&self, vm: &VmConfig, _running: bool) -> Result<(), Refused> {
        check_shared_memory(vm)?;
        self.validate_in(vm)
            .map_err(|invalid| Refused(invalid.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryConfig;

    #[test]
    fn a_virtual_gpu_is_described_in_one_option() {
        let config = GpuConfig::parse("socket=/s,vram=64M,weight=3,id=a").unwrap();
        assert_eq!(
            (config.vram, config.channels, config.weight),
            (SMALLEST, 64, 3)
        );
        assert_eq!(config.validate(), Ok(()));
        assert!(config.remap && config.lazy && config.watch);
        let naive = GpuConfig::parse("socket=/s,remap=off,lazy=off,watch=off").unwrap();
        assert!(!naive.remap && !naive.lazy && !naive.watch);
        assert!(GpuConfig::parse("id=a").is_err());
        for (wrong, key) in [
            ("vram=63M", "vram"),
            ("vram=65537K", "vram"),
            ("channels=0", "channels"),
            ("channels=129", "channels"),
            ("weight=0", "weight"),
        ] {
            let config = GpuConfig::parse(&format!("socket=/s,{wrong}")).unwrap();
            assert_eq!(config.validate().unwrap_err().place(), key);
        }
    }

    #[test]
    fn what_a_guest_does_is_recorded_if_all_of_it_is_trapped() {
        let config = GpuConfig::parse("socket=/s,record=/r").unwrap();
        let error = config.validate().unwrap_err();
        assert_eq!(error.place(), "record");
        assert!(error.to_string().contains("remap=off"), "{error}");
        let config = GpuConfig::parse("socket=/s,remap=off,record=/r").unwrap();
        assert_eq!(config.validate(), Ok(()));
        assert_eq!(config.files(), [FileUse::create("/r")]);
    }

    #[test]
    fn memory_of_huge_pages_is_refused() {
        let config = GpuConfig::parse("socket=/s").unwrap();
        let with = |memory: &str| VmConfig {
            memory: MemoryConfig::parse(memory).unwrap(),
            ..VmConfig::default()
        };
        let valid = with("size=1G,shared=on");
        assert_eq!(config.validate_in(&valid), Ok(()));
        assert!(config.check_joins(&valid, true).is_ok());
        for wrong in ["size=1G", "size=1G,shared=on,hugepages=on"] {
            let wrong = with(wrong);
            assert!(config.validate_in(&wrong).is_err());
            assert!(config.check_joins(&wrong, true).is_err());
        }
    }
}
