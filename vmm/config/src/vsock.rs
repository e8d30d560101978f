//! Sockets between guest and host.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{
    check::{self, Invalid, Placement, Problem},
    common::{CommonConfig, has_common_config},
    kind::{Configured, Device, FileUse, HotPlug},
    syntax::{IOMMU, Key, PLACE, SyntaxError, ValueType, parse},
};

/// Sockets between guest and host.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct VsockConfig {
    /// The guest's context ID, at least 3.
    pub cid: u64,
    /// The Unix socket through which the host reaches the guest.
    pub socket: PathBuf,
    /// Behind a virtual IOMMU.
    #[serde(default)]
    pub iommu: bool,
    /// Its name and location.
    #[serde(flatten)]
    pub common: CommonConfig,
}

const KEYS: &[Key] = &[
    Key::new("cid", ValueType::Number),
    Key::new("socket", ValueType::Text),
];

has_common_config!(VsockConfig);

impl Configured for VsockConfig {
    const HELP: &'static str = "Sockets between guest and host: cid=N,socket=PATH";

    const HOT_PLUG: Option<HotPlug> = Some(HotPlug {
        about: "Plug in sockets between guest and host",
        help: "As for --vsock: cid=N,socket=PATH,id=NAME,...",
    });

    const SYNTAX: &'static [&'static [Key]] = &[KEYS, IOMMU, PLACE];

    fn parse(input: &str) -> Result<Self, SyntaxError> {
        let parsed = parse("--vsock", input, Self::SYNTAX)?;
        parsed.require("cid", "cid")?;
        parsed.require("socket", "socket")?;
        parsed.build()
    }
}

impl Device for VsockConfig {
    fn validate(&self) -> Result<(), Invalid> {
        // 0 to 2 are reserved, and the last one means "any" (virtio 1.2, 5.10.4).
        check::range("cid", self.cid, 3, u64::from(u32::MAX) - 1)?;
        if self.socket.as_os_str().is_empty() {
            return Err(Problem::Missing("name a path for the socket").at("socket"));
        }
        self.placement().validate()
    }

    fn placement(&self) -> Placement<'_> {
        Placement {
            iommu: self.iommu,
            ..self.common.placement()
        }
    }

    fn files(&self) -> Vec<FileUse> {
        vec![FileUse::create(&self.socket)]
    }
}
