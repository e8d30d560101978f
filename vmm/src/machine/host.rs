//! What a machine needs of the host.

use std::{fs::File, sync::Arc, time::Instant};

use devices::thread::ThreadSpawner;
use hypervisor::{Kvm, Vm};

use super::{events::EventSender, handover::Given};
use crate::memory::GivenMemory;

/// A VM without memory and vCPUs. Making it takes KVM longer than all the rest of a restore, so
/// that one is made while nobody waits for it.
pub struct Shell {
    /// The hypervisor.
    pub kvm: Kvm,
    /// The VM.
    pub vm: Vm,
}

impl Shell {
    /// Makes one.
    pub fn new() -> hypervisor::Result<Self> {
        let kvm = Kvm::open()?;
        let vm = kvm.create_vm(
            arch::layout::KVM_TSS_START,
            arch::layout::KVM_IDENTITY_MAP_START,
        )?;
        Ok(Self { kvm, vm })
    }
}

/// What a machine needs of the host.
pub struct Host {
    /// What becomes the machine.
    pub shell: Shell,
    /// Starts threads, each under the filter of its role.
    pub spawner: Arc<dyn ThreadSpawner>,
    /// The control loop's ear.
    pub events: EventSender,
    /// The machine comes from another host, which has the locks of the disks still.
    pub arriving: bool,
    /// What the snapshot that the machine comes from has of accelerators' applications.
    pub archive: Option<Arc<File>>,
    /// The machine's memory, if another process of this host has made it.
    pub memory: Option<Vec<GivenMemory>>,
    /// Sockets and taps of a machine that comes from another process of this host.
    pub given: Arc<Given>,
    /// When the process started, for the guest's boot marks.
    pub start: Instant,
}
