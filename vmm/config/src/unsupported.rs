//! Features that API clients may ask for but Gantry does not support yet. Their configuration is
//! parsed so that the error can name them.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{
    common::CommonConfig,
    syntax::{IOMMU, Key, PLACE, SyntaxError, ValueType, parse},
};

/// Any vhost-user device.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct GenericVhostUserConfig {
    /// The server's socket.
    pub socket: PathBuf,
    /// Number of entries of each queue.
    pub queue_sizes: Vec<u16>,
    /// Virtio device type.
    pub device_type: u32,
    /// Its name and location.
    #[serde(flatten)]
    pub common: CommonConfig,
}

/// A vDPA device.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct VdpaConfig {
    /// Its device node.
    pub path: PathBuf,
    /// Number of queues.
    #[serde(default = "one")]
    pub num_queues: u16,
    /// Behind a virtual IOMMU.
    #[serde(default)]
    pub iommu: bool,
    /// Its name and location.
    #[serde(flatten)]
    pub common: CommonConfig,
}

/// A trusted platform module.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct TpmConfig {
    /// The emulator's socket.
    pub socket: PathBuf,
}

/// A virtio clock.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct RtcConfig {
    /// Behind a virtual IOMMU.
    #[serde(default)]
    pub iommu: bool,
    /// Its name and location.
    #[serde(flatten)]
    pub common: CommonConfig,
}

fn one() -> u16 {
    1
}

const SOCKET: &[Key] = &[Key::new("socket", ValueType::Text)];
const VHOST_USER: &[Key] = &[
    Key::new("queue_sizes", ValueType::Numbers),
    Key::named("virtio_id", "device_type", ValueType::Number),
    Key::new("device_type", ValueType::Number),
];
const VDPA: &[Key] = &[
    Key::new("path", ValueType::Text),
    Key::new("num_queues", ValueType::Number),
];

impl GenericVhostUserConfig {
    /// Parses the value of `--generic-vhost-user`.
    pub fn parse(input: &str) -> Result<Self, SyntaxError> {
        let tables = &[VHOST_USER, SOCKET, PLACE];
        let parsed = parse("--generic-vhost-user", input, tables)?;
        parsed.require("socket", "socket")?;
        parsed.require("queue_sizes", "queue_sizes")?;
        parsed.require("virtio_id", "device_type")?;
        parsed.build()
    }
}

impl VdpaConfig {
    /// Parses the value of `--vdpa`.
    pub fn parse(input: &str) -> Result<Self, SyntaxError> {
        let mut parsed = parse("--vdpa", input, &[VDPA, IOMMU, PLACE])?;
        parsed.require("path", "path")?;
        parsed.default("num_queues", 1);
        parsed.build()
    }
}

impl TpmConfig {
    /// Parses the value of `--tpm`.
    pub fn parse(input: &str) -> Result<Self, SyntaxError> {
        let parsed = parse("--tpm", input, &[SOCKET])?;
        parsed.require("socket", "socket")?;
        parsed.build()
    }
}

impl RtcConfig {
    /// Parses the value of `--rtc`.
    pub fn parse(input: &str) -> Result<Self, SyntaxError> {
        parse("--rtc", input, &[IOMMU, PLACE])?.build()
    }
}
