//! The state that a snapshot contains.

use std::time::Duration;

use kvm_bindings::{
    kvm_clock_data, kvm_cpuid_entry2, kvm_debugregs, kvm_irqchip, kvm_lapic_state, kvm_mp_state,
    kvm_msr_entry, kvm_pit_state2, kvm_regs, kvm_sregs, kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use serde::{Deserialize, Serialize};

use crate::raw;

/// Time-stamp counter.
pub(crate) const IA32_TSC: u32 = 0x10;

/// State of a VM's clock, timer and interrupt controllers.
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

/// State of one vCPU.
#[derive(Serialize, Deserialize)]
pub struct VcpuState {
    /// The CPUID leaves that the guest has seen.
    #[serde(with = "raw::list")]
    pub cpuid: Vec<kvm_cpuid_entry2>,
    /// Frequency of the time-stamp counter in kHz, if KVM reports it.
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
    /// The part of them that does not fit there: the tiles of AMX.
    #[serde(with = "raw::list", default, skip_serializing_if = "Vec::is_empty")]
    pub xsave_rest: Vec<u32>,
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
    /// Nested state that KVM keeps if the guest is a hypervisor itself (`struct kvm_nested_state`).
    /// Empty while the guest does not use VMX or SVM.
    #[serde(with = "raw::list", default)]
    pub nested: Vec<u8>,
}

impl VmState {
    /// Advances the guest's clock as if the VM had run for this time since it was saved.
    pub fn advance(&mut self, by: Duration) {
        let nanoseconds = u64::try_from(by.as_nanos()).unwrap_or(u64::MAX);
        self.clock.clock = self.clock.clock.saturating_add(nanoseconds);
    }
}

impl VcpuState {
    /// Advances the time-stamp counter as if the vCPU had run for this time since it was saved.
    /// Timers that expired in between fire at once. Does nothing if the frequency is unknown.
    pub fn advance(&mut self, by: Duration) {
        let Some(khz) = self.tsc_khz else { return };
        // Saturates instead of overflowing: 2^32 times 2^96.
        let ticks = by.as_nanos().saturating_mul(u128::from(khz)) / 1_000_000;
        for msr in self.msrs.iter_mut().filter(|msr| msr.index == IA32_TSC) {
            // The counter wraps around as hardware's does.
            msr.data = msr.data.wrapping_add(ticks as u64);
        }
    }
}

/// What a vCPU on another host must support to run a guest that has seen this vCPU.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CpuNeeds {
    /// The CPUID leaves that the guest has seen.
    #[serde(with = "raw::list")]
    pub cpuid: Vec<kvm_cpuid_entry2>,
    /// Indices of the vCPU's model-specific registers.
    pub msrs: Vec<u32>,
    /// Frequency of the time-stamp counter in kHz, if KVM reports it.
    pub tsc_khz: Option<u32>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_goes_on_for_clock_and_counter_alike() {
        let mut vm: VmState = VmState {
            clock: kvm_clock_data {
                clock: 1000,
                ..Default::default()
            },
            pit: Default::default(),
            pic_master: Default::default(),
            pic_slave: Default::default(),
            ioapic: Default::default(),
        };
        vm.advance(Duration::from_millis(5));
        assert_eq!(vm.clock.clock, 5_001_000);
        vm.advance(Duration::MAX);
        assert_eq!(vm.clock.clock, u64::MAX);
    }
}
