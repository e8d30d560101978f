//! The server side of the gate: a VM whose process is executed by other VMs' processes.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{
    VmConfig,
    check::{Invalid, Problem},
    common::{CommonConfig, has_common_config},
    kind::{Configured, Device, FileUse},
    syntax::{Key, PLACE, SyntaxError, ValueType, parse},
};

/// A process of the guest serves a client's process; the VM is stopped meanwhile.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct AccelServerConfig {
    /// The socket to which clients' VMs connect.
    pub socket: PathBuf,
    /// Start of a range of guest-physical addresses without RAM, in which clients' page tables may
    /// be. Handlers can make system calls only if the client's page table is in this range, or at
    /// another address where this VM has no RAM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hole_start: Option<u64>,
    /// End (exclusive) of that range.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hole_end: Option<u64>,
    /// Its name and location.
    #[serde(flatten)]
    pub common: CommonConfig,
}

const KEYS: &[Key] = &[
    Key::new("socket", ValueType::Text),
    Key::new("hole_start", ValueType::Size),
    Key::new("hole_end", ValueType::Size),
];

has_common_config!(AccelServerConfig);

impl Configured for AccelServerConfig {
    const HELP: &'static str = "Make a process of this VM serve a process of another one, without exits, while this VM \
        stands still: socket=PATH,hole_start=SIZE,hole_end=SIZE,id=NAME";

    const SYNTAX: &'static [&'static [Key]] = &[KEYS, PLACE];

    fn parse(input: &str) -> Result<Self, SyntaxError> {
        let parsed = parse("--accel-server", input, Self::SYNTAX)?;
        parsed.require("socket", "socket")?;
        parsed.build()
    }
}

impl Device for AccelServerConfig {
    fn validate(&self) -> Result<(), Invalid> {
        if self.socket.as_os_str().is_empty() {
            return Err(Problem::Missing("name the socket for clients' machines").at("socket"));
        }
        if self.hole_start.is_some() != self.hole_end.is_some() {
            return Err(Problem::Missing("a hole has a start and an end").at("hole_end"));
        }
        self.placement().validate()
    }

    /// A client's vCPU can take over the state of one CPU only.
    fn validate_in(&self, vm: &VmConfig) -> Result<(), Invalid> {
        if vm.cpus.max_vcpus == 1 {
            return Ok(());
        }
        let with = "more than one vCPU";
        let advice = "start a server VM with --cpus boot=1";
        Err(Problem::Conflict { with, advice }.at(""))
    }

    fn files(&self) -> Vec<FileUse> {
        vec![FileUse::create(&self.socket)]
    }

    fn cannot_move(&self) -> Option<&'static str> {
        Some("gate")
    }
}

impl AccelServerConfig {
    /// Start and end (exclusive) of the hole, if there is one.
    pub fn hole(&self) -> Option<(u64, u64)> {
        self.hole_start.zip(self.hole_end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_is_described_in_one_option() {
        let config =
            AccelServerConfig::parse("socket=/s,hole_start=64M,hole_end=192M,id=a").unwrap();
        assert_eq!(config.hole(), Some((64 << 20, 192 << 20)));
        assert_eq!(config.validate(), Ok(()));
        assert!(AccelServerConfig::parse("id=a").is_err());
        let half = AccelServerConfig::parse("socket=/s,hole_start=64M").unwrap();
        assert_eq!(half.validate().unwrap_err().place(), "hole_end");
    }
}
