//! Accelerators whose calls are served by worker processes, or by a server VM's process.

use std::path::{Path, PathBuf};

use devices::{
    accel::{ApiId, LONGEST_NAME, MOST_SLICES, SMALLEST_SLICE},
    gate::MOST_SHARED,
};
use serde::{Deserialize, Serialize};

use super::{
    check::{self, Invalid, Placement, Problem},
    common::CommonConfig,
    syntax::{IOMMU, Key, PLACE, SyntaxError, ValueType, parse},
};

/// Where `gantry-accel serve` listens by default.
const SOCKET: &str = "/run/gantry/opencl.sock";
/// The window by default: address space, and memory only where it is used.
const WINDOW: u64 = 4 << 30;
/// Applications at a time by default.
const SLICES: u32 = 8;
/// Memory shared with a server by default.
const SHARED: u64 = 1 << 20;
/// The largest window.
const LARGEST_WINDOW: u64 = 1 << 40;

/// Which API of an accelerator the guest's applications call.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub enum AccelApi {
    /// OpenCL, on any device that the host has an OpenCL driver for.
    #[default]
    Opencl,
}

impl AccelApi {
    /// The same for workers.
    pub fn id(self) -> ApiId {
        match self {
            Self::Opencl => ApiId::OpenCl,
        }
    }
}

/// How calls get to who carries them out.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub enum AccelTransport {
    /// By rings in shared memory: a worker process of the host polls them.
    #[default]
    Ring,
    /// The caller's vCPU executes a process of a server VM, without an exit.
    Gate,
}

/// An accelerator port.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct AccelConfig {
    /// What its applications call.
    #[serde(default, alias = "backend")]
    pub api: AccelApi,
    /// How calls get to who carries them out. What is said about workers is for the ring.
    #[serde(default)]
    pub transport: AccelTransport,
    /// By the gate: socket of the server's machine (`--accel-server`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server: Option<PathBuf>,
    /// By the gate: bytes of memory shared with the server, whole pages up to 16 MiB.
    #[serde(default = "shared")]
    pub shared: u64,
    /// Socket of the worker pool (`gantry-accel serve`).
    #[serde(default = "socket")]
    pub socket: PathBuf,
    /// Part of the names of the devices that the guest gets; all if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Share of the device against other VMs'.
    #[serde(default = "weight")]
    pub weight: u32,
    /// Bytes of device memory that the VM's applications may have by this port, together; all that
    /// there is if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<u64>,
    /// Bytes of memory shared with workers, a power of two.
    #[serde(default = "window")]
    pub window: u64,
    /// Applications at a time, a power of two up to 64; each has an equal part of the window.
    #[serde(default = "slices")]
    pub slices: u32,
    /// What the machine's compiled programs are called with the worker pool, which keeps them for a
    /// machine of this name; `off`: none are kept. Without it they are kept as long as the machine
    /// runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compiler_cache: Option<String>,
    /// Behind a virtual IOMMU.
    #[serde(default)]
    pub iommu: bool,
    /// Its name, and where it is.
    #[serde(flatten)]
    pub common: CommonConfig,
}

fn socket() -> PathBuf {
    SOCKET.into()
}

fn weight() -> u32 {
    1
}

fn window() -> u64 {
    WINDOW
}

fn slices() -> u32 {
    SLICES
}

fn shared() -> u64 {
    SHARED
}

impl Default for AccelConfig {
    fn default() -> Self {
        Self {
            api: AccelApi::default(),
            transport: AccelTransport::default(),
            server: None,
            shared: shared(),
            socket: socket(),
            device: None,
            weight: weight(),
            memory: None,
            window: window(),
            slices: slices(),
            compiler_cache: None,
            iommu: false,
            common: CommonConfig::default(),
        }
    }
}

const KEYS: &[Key] = &[
    Key::new("api", ValueType::Choice(&[("opencl", "Opencl")])),
    Key::new(
        "transport",
        ValueType::Choice(&[("ring", "Ring"), ("gate", "Gate")]),
    ),
    Key::new("server", ValueType::Text),
    Key::new("shared", ValueType::Size),
    Key::new("socket", ValueType::Text),
    Key::new("device", ValueType::Text),
    Key::new("weight", ValueType::Number),
    Key::new("memory", ValueType::Size),
    Key::new("window", ValueType::Size),
    Key::new("slices", ValueType::Number),
    Key::new("compiler_cache", ValueType::Text),
];

impl AccelConfig {
    /// How it is written on the command line.
    pub const SYNTAX: &[&[Key]] = &[KEYS, IOMMU, PLACE];

    /// Parses the value of `--accel`.
    pub fn parse(input: &str) -> Result<Self, SyntaxError> {
        parse("--accel", input, Self::SYNTAX)?.build()
    }

    /// What it says can be done.
    pub fn validate(&self) -> Result<(), Invalid> {
        if self.transport == AccelTransport::Gate {
            let server = self.server.as_deref().unwrap_or(Path::new(""));
            if server.as_os_str().is_empty() {
                let what = "name the socket of the server's machine (its --accel-server socket=)";
                return Err(Problem::Missing(what).at("server"));
            }
            let valid =
                self.shared.is_multiple_of(4096) && (8192..=MOST_SHARED).contains(&self.shared);
            let expected = "whole pages of 4 KiB, two (8192) at least, and at most 16 MiB";
            check::number("shared", self.shared, valid, expected)?;
        } else if self.server.is_some() {
            let with = "the ring transport";
            let advice = "add transport=gate, or leave server out";
            return Err(Problem::Conflict { with, advice }.at("server"));
        }
        if self.socket.as_os_str().is_empty() {
            return Err(Problem::Missing("name the worker pool's socket").at("socket"));
        }
        if let Some(device) = &self.device {
            let valid = (1..=LONGEST_NAME).contains(&device.len());
            check::text("device", device, valid, "a part of a name, up to 64 bytes")?;
        }
        if let Some(name) = &self.compiler_cache {
            let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
            let valid = (1..=LONGEST_NAME).contains(&name.len()) && name.bytes().all(plain);
            let expected = "\"off\", or a name of letters, digits, - and _, up to 64 of them";
            check::text("compiler_cache", name, valid, expected)?;
        }
        check::range("weight", self.weight, 1, 10_000)?;
        if let Some(memory) = self.memory {
            check::number(
                "memory",
                memory,
                memory >= 1 << 20,
                "1 MiB (1048576) or more",
            )?;
        }
        let valid = self.slices.is_power_of_two() && self.slices <= MOST_SLICES;
        check::number("slices", self.slices, valid, "a power of two up to 64")?;
        let smallest = u64::from(self.slices) * SMALLEST_SLICE;
        let valid =
            self.window.is_power_of_two() && (smallest..=LARGEST_WINDOW).contains(&self.window);
        let expected =
            "a power of two of at least 8 MiB (8388608) for each slice, and at most 1 TiB";
        check::number("window", self.window, valid, expected)?;
        self.placement().validate()
    }

    pub(super) fn placement(&self) -> Placement<'_> {
        Placement {
            iommu: self.iommu,
            ..self.common.placement()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_accelerator_is_described_in_one_option() {
        let config = AccelConfig::parse(
            "api=opencl,socket=/s,device=H200,weight=3,memory=8G,window=1G,slices=4,\
             compiler_cache=web-1,id=a",
        )
        .unwrap();
        let expected = AccelConfig {
            socket: "/s".into(),
            device: Some("H200".to_owned()),
            weight: 3,
            memory: Some(8 << 30),
            window: 1 << 30,
            slices: 4,
            compiler_cache: Some("web-1".to_owned()),
            common: CommonConfig::named("a"),
            ..AccelConfig::default()
        };
        assert_eq!(config, expected);
        assert_eq!(config.validate(), Ok(()));
        assert!(AccelConfig::parse("api=direct3d").is_err());
    }

    #[test]
    fn the_gate_needs_a_server_and_little_memory() {
        let parse = |text| AccelConfig::parse(text).unwrap();
        let config = parse("transport=gate,server=/s,shared=64K,id=a");
        assert_eq!(config.transport, AccelTransport::Gate);
        assert_eq!(config.validate(), Ok(()));
        for (text, place) in [
            ("transport=gate", "server"),
            ("server=/s", "server"),
            ("transport=gate,server=/s,shared=32M", "shared"),
            ("transport=gate,server=/s,shared=5000", "shared"),
        ] {
            assert_eq!(parse(text).validate().unwrap_err().place(), place, "{text}");
        }
    }

    #[test]
    fn what_makes_no_port_is_refused_by_its_place() {
        for (text, place) in [
            ("window=24M,slices=1", "window"),
            ("window=8M,slices=2", "window"),
            ("window=2T", "window"),
            ("slices=3", "slices"),
            ("slices=128", "slices"),
            ("weight=0", "weight"),
            ("compiler_cache=../x", "compiler_cache"),
            ("compiler_cache=run.7.1", "compiler_cache"),
            ("memory=1K", "memory"),
            ("iommu=on", "iommu"),
        ] {
            let invalid = AccelConfig::parse(text).unwrap().validate().unwrap_err();
            assert_eq!(invalid.place(), place, "{text}: {invalid}");
        }
    }
}
