//! Devices that another process serves.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{
    VmConfig,
    check::{Invalid, Placement, Problem, is_zero},
    common::{CommonConfig, has_common_config},
    kind::{Configured, Device, HotPlug, Refused, check_shared_memory, needs_shared_memory},
    syntax::{FUNCTION, Key, PLACE, SyntaxError, ValueType, parse},
};

/// A device of another process (vfio-user).
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct UserDeviceConfig {
    /// That process's socket.
    pub socket: PathBuf,
    /// Its name and location.
    #[serde(flatten)]
    pub common: CommonConfig,
    /// Function number within the slot, 0 to 7.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub pci_function: u8,
    /// The root port behind which it is placed, in that port's only slot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
}

const KEYS: &[Key] = &[Key::new("socket", ValueType::Text)];

has_common_config!(UserDeviceConfig);

impl Configured for UserDeviceConfig {
    const HELP: &'static str = "Devices that other processes serve (vfio-user): socket=PATH,id=NAME,pci_function=N, \
        parent=ROOTPORT. Memory has to be shared with them (see --memory)";

    const HOT_PLUG: Option<HotPlug> = Some(HotPlug {
        about: "Give the VM a device that another process serves (vfio-user)",
        help: "As for --user-device: socket=PATH,id=NAME,...",
    });

    const SYNTAX: &'static [&'static [Key]] = &[KEYS, PLACE, FUNCTION];

    fn parse(input: &str) -> Result<Self, SyntaxError> {
        let parsed = parse("--user-device", input, Self::SYNTAX)?;
        parsed.require("socket", "socket")?;
        parsed.build()
    }
}

impl Device for UserDeviceConfig {
    fn validate(&self) -> Result<(), Invalid> {
        if self.socket.as_os_str().is_empty() {
            return Err(Problem::Missing("name the socket of its server").at("socket"));
        }
        self.placement().validate()
    }

    fn placement(&self) -> Placement<'_> {
        Placement {
            function: self.pci_function,
            parent: self.parent.as_deref(),
            ..self.common.placement()
        }
    }

    fn validate_in(&self, vm: &VmConfig) -> Result<(), Invalid> {
        needs_shared_memory(vm, "socket")
    }

    fn check_joins(&self, vm: &VmConfig, _running: bool) -> Result<(), Refused> {
        check_shared_memory(vm)
    }

    fn cannot_move(&self) -> Option<&'static str> {
        Some("device of another process")
    }
}
