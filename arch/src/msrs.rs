//! Model-specific registers: their values at boot, and which ones to save.

use kvm_bindings::kvm_msr_entry;

/// Time-stamp counter.
pub const TSC: u32 = 0x10;
const APIC_BASE: u32 = 0x1b;
const SYSENTER_CS: u32 = 0x174;
const SYSENTER_ESP: u32 = 0x175;
const SYSENTER_EIP: u32 = 0x176;
const MISC_ENABLE: u32 = 0x1a0;
const MTRR_PHYS_BASE_0: u32 = 0x200;
/// Eight pairs of base and mask, all that KVM supports.
const MTRR_VARIABLE_COUNT: u32 = 16;
const MTRR_FIX_64K: u32 = 0x250;
const MTRR_FIX_16K_80000: u32 = 0x258;
const MTRR_FIX_16K_A0000: u32 = 0x259;
/// First of eight.
const MTRR_FIX_4K: u32 = 0x268;
const PAT: u32 = 0x277;
const MTRR_DEF_TYPE: u32 = 0x2ff;
/// Deadline of the local APIC's timer.
pub const TSC_DEADLINE: u32 = 0x6e0;
const STAR: u32 = 0xc000_0081;
const LSTAR: u32 = 0xc000_0082;
const CSTAR: u32 = 0xc000_0083;
const SYSCALL_MASK: u32 = 0xc000_0084;
const KERNEL_GS_BASE: u32 = 0xc000_0102;

/// Fast string operations.
const MISC_ENABLE_FAST_STRINGS: u64 = 1;
/// MTRRs enabled, with write-back as the default memory type.
const MTRR_ENABLE_WRITE_BACK: u64 = 1 << 11 | 6;

/// The values that firmware would leave in every vCPU at boot.
pub fn boot() -> Vec<kvm_msr_entry> {
    [
        (SYSENTER_CS, 0),
        (SYSENTER_ESP, 0),
        (SYSENTER_EIP, 0),
        (STAR, 0),
        (LSTAR, 0),
        (CSTAR, 0),
        (SYSCALL_MASK, 0),
        (KERNEL_GS_BASE, 0),
        (TSC, 0),
        (MISC_ENABLE, MISC_ENABLE_FAST_STRINGS),
        (MTRR_DEF_TYPE, MTRR_ENABLE_WRITE_BACK),
    ]
    .into_iter()
    .map(|(index, data)| kvm_msr_entry {
        index,
        data,
        ..Default::default()
    })
    .collect()
}

/// The registers to save, in the order in which they must be restored: KVM's index list
/// (`supported`) without what is saved elsewhere, plus the memory type registers, which older KVM
/// versions save and restore but do not list.
///
/// A register that KVM lists may still be absent on this processor or with this CPUID. KVM then
/// stops there, and the caller continues with the next one.
/// stops there, and the caller goes on with the next one.
pub fn to_save(supported: &[u32]) -> Vec<u32> {
    let memory_types = (MTRR_PHYS_BASE_0..MTRR_PHYS_BASE_0 + MTRR_VARIABLE_COUNT)
        .chain([MTRR_FIX_64K, MTRR_FIX_16K_80000, MTRR_FIX_16K_A0000])
        .chain(MTRR_FIX_4K..MTRR_FIX_4K + 8)
        .chain([PAT, MTRR_DEF_TYPE]);
    let mut list: Vec<u32> = supported
        .iter()
        .copied()
        // The APIC base is part of the special registers (`kvm_sregs`).
        .filter(|index| *index != APIC_BASE)
        .chain(memory_types)
        .collect();
    list.sort_unstable();
    list.dedup();
    // The deadline is armed relative to the TSC, so it is restored last.
    list.sort_by_key(|index| *index == TSC_DEADLINE);
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_timer_deadline_is_restored_after_the_counter() {
        let list = to_save(&[TSC_DEADLINE, APIC_BASE, STAR, TSC, 0x4b56_4d01]);
        assert_eq!(list.last(), Some(&TSC_DEADLINE));
        assert!(list.contains(&TSC) && list.contains(&0x4b56_4d01));
        assert!(!list.contains(&APIC_BASE));
    }

    #[test]
    fn a_register_is_saved_once() {
        let list = to_save(&[PAT, PAT, MTRR_DEF_TYPE, TSC]);
        let mut unique = list.clone();
        unique.sort_unstable();
        unique.dedup();
        assert_eq!(list.len(), unique.len());
    }

    #[test]
    fn memory_is_cached_from_the_start() {
        let msrs = boot();
        assert!(
            msrs.iter()
                .any(|msr| msr.index == 0x2ff && msr.data == 0x806)
        );
    }
}
