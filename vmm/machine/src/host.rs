//! The host resources that a machine needs.

use std::{fs::File, sync::Arc, time::Instant};

use devices::thread::ThreadSpawner;
use hypervisor::{Kvm, Vm};
use vmm_memory::GivenMemory;

use super::{events::EventSender, handover::Given, images::Images};

/// A VM without memory and vCPUs. Creating it takes KVM longer than the rest of a restore, so it is
/// created ahead of time.
pub struct Shell {
    /// The hypervisor.
    pub kvm: Kvm,
    /// The VM.
    pub vm: Arc<Vm>,
}

impl Shell {
    /// Creates a shell.
    pub fn new() -> hypervisor::Result<Self> {
        let kvm = Kvm::open()?;
        let vm = kvm.create_vm(
            arch::layout::KVM_TSS_START,
            arch::layout::KVM_IDENTITY_MAP_START,
        )?;
        Ok(Self {
            kvm,
            vm: Arc::new(vm),
        })
    }
}

/// The host resources that a machine needs.
pub struct Host {
    /// The VM that becomes the machine.
    pub shell: Shell,
    /// Starts threads, each with the seccomp filter of its role.
    pub spawner: Arc<dyn ThreadSpawner>,
    /// Sends events to the control loop.
    pub events: EventSender,
    /// The machine comes from another host, which still holds the locks of the disks.
    pub arriving: bool,
    /// The archive of accelerators' applications in the snapshot that is being restored.
    pub archive: Option<Arc<File>>,
    /// The machine's memory, if another process of this host created it.
    pub memory: Option<Vec<GivenMemory>>,
    /// Disk images that are open already.
    pub images: Arc<Images>,
    /// Sockets and taps that another process of this host handed over with the machine.
    pub given: Arc<Given>,
    /// When the process started, as the reference for the guest's boot marks.
    pub start: Instant,
}
