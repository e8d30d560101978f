//! What survives a snapshot.

use kvm_bindings::{
    kvm_clock_data, kvm_cpuid_entry2, kvm_debugregs, kvm_irqchip, kvm_lapic_state, kvm_mp_state,
    kvm_msr_entry, kvm_pit_state2, kvm_regs, kvm_sregs, kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use serde::{Deserialize, Serialize};

use crate::raw;

/// Clock, timer and interrupt controllers of a VM.
#[derive(Serialize, Deserialize)]
pub struct VmState {
    /// The paravirtual clock.
    #[serde(with = "raw")]
    pub clock: kvm_clock_data,
    /// The 8254 timer.
    #[serde(with = "raw")]
    pub pit: kvm_pit_state2,
    /// The first 8259.
    #[serde(with = "raw")]
    pub pic_master: kvm_irqchip,
    /// The second 8259.
    #[serde(with = "raw")]
    pub pic_slave: kvm_irqchip,
    /// The I/O APIC.
    #[serde(with = "raw")]
    pub ioapic: kvm_irqchip,
}

/// One virtual processor.
#[derive(Serialize, Deserialize)]
pub struct VcpuState {
    /// The CPUID leaves that the guest has seen.
    #[serde(with = "raw::list")]
    pub cpuid: Vec<kvm_cpuid_entry2>,
    /// Frequency of the time-stamp counter in kHz, if KVM tells it.
    pub tsc_khz: Option<u32>,
    /// Run state (running, halted, waiting for a start-up interrupt ...).
    #[serde(with = "raw")]
    pub mp_state: kvm_mp_state,
    /// General registers.
    #[serde(with = "raw")]
    pub regs: kvm_regs,
    /// Segment and control registers.
    #[serde(with = "raw")]
    pub sregs: kvm_sregs,
    /// Floating point and vector registers.
    #[serde(with = "raw")]
    pub xsave: kvm_xsave,
    /// Extended control registers.
    #[serde(with = "raw")]
    pub xcrs: kvm_xcrs,
    /// Debug registers.
    #[serde(with = "raw")]
    pub debug: kvm_debugregs,
    /// Local APIC.
    #[serde(with = "raw")]
    pub lapic: kvm_lapic_state,
    /// Model-specific registers.
    #[serde(with = "raw::list")]
    pub msrs: Vec<kvm_msr_entry>,
    /// Pending exceptions, interrupts and NMIs.
    #[serde(with = "raw")]
    pub events: kvm_vcpu_events,
    /// What KVM keeps of a guest that is a hypervisor itself (`struct kvm_nested_state`); empty
    /// while the guest does not use VMX or SVM.
    #[serde(with = "raw::list", default)]
    pub nested: Vec<u8>,
}
