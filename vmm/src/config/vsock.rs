//! Sockets between guest and host.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{
    check::{self, Invalid, Placement, Problem},
    common::CommonConfig,
    syntax::{IOMMU, Key, PLACE, SyntaxError, ValueType, parse},
};

/// Sockets between guest and host.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct VsockConfig {
    /// The guest's context id, from 3.
    pub cid: u64,
    /// The Unix socket through which the host reaches the guest.
    pub socket: PathBuf,
    /// Behind a virtual IOMMU.
    #[serde(default)]
    pub iommu: bool,
    /// Its name, and where it is.
    #[serde(flatten)]
    pub common: CommonConfig,
}

const KEYS: &[Key] = &[
    Key::new("cid", ValueType::Number),
    Key::new("socket", ValueType::Text),
];

impl VsockConfig {
    /// How it is written on the command line.
    pub const SYNTAX: &[&[Key]] = &[KEYS, IOMMU, PLACE];

    /// Parses the value of `--vsock`.
    pub fn parse(input: &str) -> Result<Self, SyntaxError> {
        let parsed = parse("--vsock", input, Self::SYNTAX)?;
        parsed.require("cid", "cid")?;
        parsed.require("socket", "socket")?;
        parsed.build()
    }

    /// What it says can be done.
    pub fn validate(&self) -> Result<(), Invalid> {
        // 0 to 2 are well known, the last one means "any" (virtio 1.2, 5.10.4).
        check::range("cid", self.cid, 3, u64::from(u32::MAX) - 1)?;
        if self.socket.as_os_str().is_empty() {
            return Err(Problem::Missing("name a path for the socket").at("socket"));
        }
        self.placement().validate()
    }

    pub(super) fn placement(&self) -> Placement<'_> {
        Placement {
            iommu: self.iommu,
            ..self.common.placement()
        }
    }
}
