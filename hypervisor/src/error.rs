//! Errors of KVM operations.

use std::{io, path::PathBuf};

/// An operation on KVM failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The device node cannot be opened.
    #[error(
        "cannot open {path}: load the module kvm_intel or kvm_amd, check that virtualization is \
         enabled in the firmware, and that this user may read and write the device"
    )]
    Open {
        /// The device node.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The kernel's KVM lacks a capability that Gantry needs.
    #[error("this host's KVM lacks {missing}; a Linux kernel of 5.10 or newer has it")]
    Missing {
        /// Names of the missing capabilities, separated by commas.
        missing: String,
    },
    /// KVM has a different API version.
    #[error("KVM has API version {0}, Gantry needs 12")]
    ApiVersion(i32),
    /// The kernel does not permit AMX.
    #[error(
        "the kernel does not permit this process's vCPUs to have AMX: use a host whose processor has \
         it, with Linux 5.17 or newer, or leave amx out of the features; if another VM ran in this \
         process without AMX, start a new process"
    )]
    Amx(#[source] io::Error),
    /// A saved vCPU has more vector state than vCPUs have here.
    #[error(
        "the saved vector state of vCPU {vcpu} has {saved} bytes, on this host it has {here}: use a \
         host whose processor has the same vector extensions (AMX)"
    )]
    VectorState {
        /// Number of the vCPU.
        vcpu: u8,
        /// Size of the saved state in bytes.
        saved: usize,
        /// Size of the state here in bytes.
        here: usize,
    },
    /// An ioctl failed.
    #[error("KVM cannot {action}")]
    Ioctl {
        /// The operation that was requested of KVM.
        action: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// KVM accepted only part of a list of model-specific registers.
    #[error("KVM refused MSR {index:#x} (value {value:#x}) of a saved or initial state")]
    Msr {
        /// Index of the first rejected register.
        index: u32,
        /// The value that it should have been set to.
        value: u64,
    },
    /// The vCPU cannot continue.
    #[error("vCPU {vcpu} stopped: {reason}")]
    Stopped {
        /// Number of the vCPU.
        vcpu: u8,
        /// What KVM reported.
        reason: String,
    },
    /// This kernel has no dirty log with manual clearing.
    #[error(
        "this host's KVM keeps no log of the pages that a guest writes; a Linux kernel of 5.7 or \
         newer does"
    )]
    NoDirtyLog,
    /// The slot already has a dirty log.
    #[error("writes to this memory are being logged already")]
    Watched,
    /// The slot has been unmapped.
    #[error("the memory is not the guest's any more")]
    NoSlot,
    /// The guest runs VMs of its own, and KVM cannot save that state.
    #[error(
        "vCPU {vcpu} uses hardware virtualization itself, and this host's KVM cannot save that: \
         end the guest's own VMs first"
    )]
    Nested {
        /// Number of the vCPU.
        vcpu: u8,
    },
    /// No interrupt route is free.
    #[error("no interrupt route is left: KVM has {limit}")]
    NoRoute {
        /// Number of routes that KVM supports.
        limit: u32,
    },
}

impl Error {
    pub(crate) fn ioctl(action: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> Self {
        move |error| Self::Ioctl {
            action,
            source: error.into(),
        }
    }
}
