//! The states of a VM.
//!
//! ```text
//!           create            boot              pause
//!   None ──────────> Created ──────> Live ──────────────> Live, paused
//!     ^  restore        │             │ ^    resume          │
//!     ├───────────────> │ <─ ─ ─ ─ ─ ─│ └──────────────────┘ │
//!     │                 │  boot       │ shutdown             │
//!     │     delete      v             v                      │
//!     └──────────────────────────  Shutdown <────────────────┘
//! ```
//!
//! A machine that serves others by the gate is frozen besides: by its guest, until it is woken for
//! slow work, or its client leaves. A resume gives the server up.

use crate::{
    api::VmState,
    config::{HasCommonConfig, VmConfig},
    machine::Machine,
};

/// The state of the VM.
#[derive(Default)]
pub enum Life {
    /// There is no VM.
    #[default]
    None,
    /// Configured, never booted.
    Created(Box<VmConfig>),
    /// There is a machine.
    Live {
        /// What it was made from, and has become since.
        config: Box<VmConfig>,
        /// The machine.
        machine: Box<Machine>,
        /// Whether its vCPUs and devices run.
        run: RunState,
    },
    /// Switched off.
    Shutdown(Box<VmConfig>),
}

/// Whether a machine runs, as the API has set it. That a guest has frozen its own vCPU is not part of
/// it: only the port knows ([`Machine::is_frozen`]), and a copy would be out of date.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunState {
    /// vCPUs and devices run.
    Running,
    /// vCPUs and devices stand still.
    Paused,
}

impl Life {
    /// As the API calls it.
    pub fn state(&self) -> Option<VmState> {
        match self {
            Self::None => None,
            Self::Created(_) => Some(VmState::Created),
            Self::Live { machine, .. } if machine.is_frozen() => Some(VmState::Frozen),
            Self::Live { run, .. } => Some(match run {
                RunState::Running => VmState::Running,
                RunState::Paused => VmState::Paused,
            }),
            Self::Shutdown(_) => Some(VmState::Shutdown),
        }
    }

    /// The configuration, if there is a VM.
    pub fn config(&self) -> Option<&VmConfig> {
        match self {
            Self::None => None,
            Self::Created(config) | Self::Live { config, .. } | Self::Shutdown(config) => {
                Some(config)
            }
        }
    }

    /// The machine, if there is one.
    pub fn machine_mut(&mut self) -> Option<&mut Machine> {
        match self {
            Self::Live { machine, .. } => Some(machine),
            _ => None,
        }
    }
}

/// Takes a device out of a configuration; false if it is not there.
pub fn forget_device(config: &mut VmConfig, id: &str) -> bool {
    fn one<C: HasCommonConfig>(device: &mut Option<C>, id: &str) -> bool {
        device.take_if(|device| named(device, id)).is_some()
    }
    fn of<C: HasCommonConfig>(list: &mut Option<Vec<C>>, id: &str) -> bool {
        let Some(devices) = list else { return false };
        let before = devices.len();
        devices.retain(|device| !named(device, id));
        let found = devices.len() < before;
        if devices.is_empty() {
            *list = None;
        }
        found
    }
    of(&mut config.disks, id)
        || of(&mut config.net, id)
        || of(&mut config.pmem, id)
        || of(&mut config.devices, id)
        || of(&mut config.accels, id)
        || of(&mut config.user_devices, id)
        || one(&mut config.vsock, id)
        || one(&mut config.accel_server, id)
}

/// Whether a device of a configuration has that name.
pub fn has_device(config: &VmConfig, id: &str) -> bool {
    fn any<'a, C: HasCommonConfig + 'a>(
        devices: impl IntoIterator<Item = &'a C>,
        id: &str,
    ) -> bool {
        devices.into_iter().any(|device| named(device, id))
    }
    any(config.disks.iter().flatten(), id)
        || any(config.net.iter().flatten(), id)
        || any(config.pmem.iter().flatten(), id)
        || any(config.devices.iter().flatten(), id)
        || any(config.accels.iter().flatten(), id)
        || any(config.user_devices.iter().flatten(), id)
        || any(config.pci_root_ports.iter().flatten(), id)
        || any(&config.accel_server, id)
        || any(&config.vsock, id)
        || any(&config.balloon, id)
        || named(&config.rng, id)
        || named(&config.console, id)
}

fn named(device: &impl HasCommonConfig, id: &str) -> bool {
    device.common().id.as_deref() == Some(id)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{CommonConfig, DiskConfig};

    #[test]
    fn a_removed_device_leaves_the_configuration() {
        let disk = |id: &str| DiskConfig {
            common: CommonConfig::named(id),
            ..Default::default()
        };
        let mut config = VmConfig {
            disks: Some(vec![disk("a"), disk("b")]),
            ..Default::default()
        };
        assert!(has_device(&config, "a"));
        assert!(forget_device(&mut config, "a"));
        assert!(!forget_device(&mut config, "a"));
        assert!(forget_device(&mut config, "b"));
        assert_eq!(config.disks, None);
    }
}
