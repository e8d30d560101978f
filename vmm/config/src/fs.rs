//! Shared folders.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{
    VmConfig,
    check::{self, Invalid, Problem},
    common::{CommonConfig, has_common_config},
    kind::{Configured, Device, HotPlug, Refused, check_shared_memory, needs_shared_memory},
    syntax::{Key, PLACE, SyntaxError, ValueType, parse},
};

/// A shared folder (virtio-fs), which another process serves.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct FsConfig {
    /// Its name in the guest.
    pub tag: String,
    /// That process's socket.
    pub socket: PathBuf,
    /// Number of queues for requests; one more is for requests that are urgent.
    #[serde(default = "one")]
    pub num_queues: u16,
    /// Number of entries per queue.
    #[serde(default = "queue_size")]
    pub queue_size: u16,
    /// Its name and location.
    #[serde(flatten)]
    pub common: CommonConfig,
}

fn one() -> u16 {
    1
}

fn queue_size() -> u16 {
    1024
}

const KEYS: &[Key] = &[
    Key::new("tag", ValueType::Text),
    Key::new("socket", ValueType::Text),
    Key::new("num_queues", ValueType::Number),
    Key::new("queue_size", ValueType::Number),
];

has_common_config!(FsConfig);

impl Configured for FsConfig {
    const HELP: &'static str = "Shared folders, which another process such as virtiofsd serves (vhost-user): tag=NAME, \
        socket=PATH,num_queues=N,queue_size=N,id=NAME. Memory has to be shared with it (see --memory)";

    const HOT_PLUG: Option<HotPlug> = Some(HotPlug {
        about: "Give the VM a shared folder (virtio-fs)",
        help: "As for --fs: tag=NAME,socket=PATH,id=NAME,...",
    });

    const SYNTAX: &'static [&'static [Key]] = &[KEYS, PLACE];

    fn parse(input: &str) -> Result<Self, SyntaxError> {
        let parsed = parse("--fs", input, Self::SYNTAX)?;
        parsed.require("tag", "tag")?;
        parsed.require("socket", "socket")?;
        parsed.build()
    }
}

impl Device for FsConfig {
    fn validate(&self) -> Result<(), Invalid> {
        // virtio 1.2, 5.11.4.
        let valid = (1..=36).contains(&self.tag.len()) && !self.tag.contains('\0');
        check::text("tag", &self.tag, valid, "a name of 1 to 36 bytes")?;
        if self.socket.as_os_str().is_empty() {
            return Err(Problem::Missing("name the socket of its server").at("socket"));
        }
        check::range("num_queues", self.num_queues, 1, 255)?;
        check::queue_size(self.queue_size)?;
        self.placement().validate()
    }

    fn validate_in(&self, vm: &VmConfig) -> Result<(), Invalid> {
        needs_shared_memory(vm, "socket")
    }

    fn check_joins(&self, vm: &VmConfig, _running: bool) -> Result<(), Refused> {
        check_shared_memory(vm)
    }

    fn cannot_move(&self) -> Option<&'static str> {
        Some("shared folder")
    }

    fn cannot_be_saved(&self) -> bool {
        true
    }
}
