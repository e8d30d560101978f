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
//! A machine that serves others through the gate is also frozen: by its guest, until it is woken for slow work or its
//! client leaves. Resuming it ends the service.

use vmm_api::VmState;
use vmm_config::VmConfig;
use vmm_machine::Machine;

/// The state of the VM.
#[derive(Default)]
pub enum Life {
    /// There is no VM.
    #[default]
    None,
    /// Configured but never booted.
    Created(Box<VmConfig>),
    /// The machine exists.
    Live {
        /// Its configuration, including changes made since it was created.
        config: Box<VmConfig>,
        /// The machine.
        machine: Box<Machine>,
        /// Whether its vCPUs and devices run.
        run: RunState,
    },
    /// Powered off.
    Shutdown(Box<VmConfig>),
}

/// Whether a machine runs, as set by the API. It does not include that a guest has frozen its own vCPU: only the port
/// knows that ([`Machine::is_frozen`]), and a copy would be out of date.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunState {
    /// vCPUs and devices run.
    Running,
    /// vCPUs and devices are stopped.
    Paused,
}

impl Life {
    /// The state in the API's terms.
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
