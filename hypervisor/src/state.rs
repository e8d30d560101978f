//! What survives a snapshot.

use kvm_bindings::{
    kvm_clock_data, kvm_cpuid_entry2, kvm_debugregs, kvm_irqchip, kvm_lapic_state, kvm_mp_state,
    kvm_msr_entry, kvm_pit_state2, kvm_regs, kvm_sregs, kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use serde::{Deserialize, Serialize};

/// Clock, timer and interrupt controllers of a VM.
#[derive(Serialize, Deserialize)]
pub struct VmState {
    /// The paravirtual clock.
    pub clock: kvm_clock_data,
    /// The 8254 timer.
    pub pit: kvm_pit_state2,
    /// The first 8259.
    pub pic_master: kvm_irqchip,
    /// The second 8259.
    pub pic_slave: kvm_irqchip,
    /// The I/O APIC.
    pub ioapic: kvm_irqchip,
}

/// One virtual processor.
#[derive(Serialize, Deserialize)]
pub struct VcpuState {
    /// The CPUID leaves that the guest has seen.
    pub cpuid: Vec<kvm_cpuid_entry2>,
    /// Frequency of the time-stamp counter in kHz, if KVM tells it.
    pub tsc_khz: Option<u32>,
    /// Run state (running, halted, waiting for a start-up interrupt ...).
    pub mp_state: kvm_mp_state,
    /// General registers.
    pub regs: kvm_regs,
    /// Segment and control registers.
    pub sregs: kvm_sregs,
    /// Floating point and vector registers.
    pub xsave: kvm_xsave,
    /// Extended control registers.
    pub xcrs: kvm_xcrs,
    /// Debug registers.
    pub debug: kvm_debugregs,
    /// Local APIC.
    pub lapic: kvm_lapic_state,
    /// Model-specific registers.
    pub msrs: Vec<kvm_msr_entry>,
    /// Pending exceptions, interrupts and NMIs.
    pub events: kvm_vcpu_events,
}
