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

use crate::{api::VmState, config::VmConfig, machine::Machine};

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
        /// Its vCPUs and devices stand still.
        paused: bool,
    },
    /// Switched off.
    Shutdown(Box<VmConfig>),
}

impl Life {
    /// As the API calls it.
    pub fn state(&self) -> Option<VmState> {
        match self {
            Self::None => None,
            Self::Created(_) => Some(VmState::Created),
            Self::Live { machine, .. } if machine.is_frozen() => Some(VmState::Frozen),
            Self::Live { paused: false, .. } => Some(VmState::Running),
            Self::Live { paused: true, .. } => Some(VmState::Paused),
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
    fn forget<T>(list: &mut Option<Vec<T>>, is: impl Fn(&T) -> bool) -> bool {
        let Some(items) = list else { return false };
        let before = items.len();
        items.retain(|item| !is(item));
        let found = items.len() < before;
        if items.is_empty() {
            *list = None;
        }
        found
    }
    let named = |name: &Option<String>| name.as_deref() == Some(id);
    if config.vsock.as_ref().is_some_and(|vsock| named(&vsock.id)) {
        config.vsock = None;
        return true;
    }
    forget(&mut config.disks, |disk| named(&disk.id))
        || forget(&mut config.net, |net| named(&net.id))
        || forget(&mut config.pmem, |pmem| named(&pmem.id))
        || forget(&mut config.devices, |device| named(&device.id))
        || forget(&mut config.accels, |accel| named(&accel.id))
        || forget(&mut config.user_devices, |device| named(&device.id))
        || forget_server(config, id)
}

fn forget_server(config: &mut VmConfig, id: &str) -> bool {
    let of = config.accel_server.as_ref();
    let found = of.is_some_and(|server| server.id.as_deref() == Some(id));
    if found {
        config.accel_server = None;
    }
    found
}

/// Whether a device of a configuration has that name.
pub fn has_device(config: &VmConfig, id: &str) -> bool {
    let ids = config
        .disks
        .iter()
        .flatten()
        .map(|disk| &disk.id)
        .chain(config.net.iter().flatten().map(|net| &net.id))
        .chain(config.pmem.iter().flatten().map(|pmem| &pmem.id))
        .chain(config.devices.iter().flatten().map(|device| &device.id))
        .chain(config.accels.iter().flatten().map(|accel| &accel.id))
        .chain(
            config
                .user_devices
                .iter()
                .flatten()
                .map(|device| &device.id),
        )
        .chain(config.accel_server.iter().map(|server| &server.id))
        .chain(config.vsock.iter().map(|vsock| &vsock.id))
        .chain(config.balloon.iter().map(|balloon| &balloon.id))
        .chain(config.pci_root_ports.iter().flatten().map(|port| &port.id))
        .chain([&config.rng.id, &config.console.id]);
    ids.flatten().any(|name| name == id)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::DiskConfig;

    #[test]
    fn a_removed_device_leaves_the_configuration() {
        let disk = |id: &str| DiskConfig {
            id: Some(id.to_owned()),
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
