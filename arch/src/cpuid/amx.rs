//! Intel AMX: matrix instructions whose registers are 8 KiB of state in each vCPU.
//!
//! KVM lists them as supported only after the process has got the permission for that state, which
//! it keeps. So they are hidden from guests that have not asked for them.

use kvm_bindings::kvm_cpuid_entry2;

use super::{find, find_mut};

// Leaf 7.0, EDX.
const AMX_BF16: u32 = 1 << 22;
const AMX_TILE: u32 = 1 << 24;
const AMX_INT8: u32 = 1 << 25;
// Leaf 7.1, EAX and EDX.
const AMX_FP16: u32 = 1 << 21;
const AMX_COMPLEX: u32 = 1 << 8;
/// Leaf 0xd.1, EAX: state components can be switched off.
const XFD: u32 = 1 << 4;
/// Tile configuration and tile data, the components of leaf 0xd.
const COMPONENTS: [u32; 2] = [17, 18];
const LEAF_STATE: u32 = 0xd;
const LEAF_TILE: u32 = 0x1d;
const LEAF_TILE_MULTIPLY: u32 = 0x1e;

/// Whether the guest can have it.
pub(super) fn is_supported(supported: &[kvm_cpuid_entry2]) -> bool {
    let state = find(supported, LEAF_STATE, 0).map_or(0, |leaf| leaf.eax);
    has_amx(supported) && COMPONENTS.iter().all(|bit| state & 1 << bit != 0)
}

/// Whether a guest with this CPUID has it.
pub fn has_amx(cpuid: &[kvm_cpuid_entry2]) -> bool {
    find(cpuid, 7, 0).is_some_and(|leaf| leaf.edx & AMX_TILE != 0)
}

/// Removes it.
pub(super) fn hide(cpuid: &mut Vec<kvm_cpuid_entry2>) {
    if let Some(leaf) = find_mut(cpuid, 7, 0) {
        leaf.edx &= !(AMX_BF16 | AMX_TILE | AMX_INT8);
    }
    if let Some(leaf) = find_mut(cpuid, 7, 1) {
        leaf.eax &= !AMX_FP16;
        leaf.edx &= !AMX_COMPLEX;
    }
    // Nothing else uses it.
    if let Some(leaf) = find_mut(cpuid, LEAF_STATE, 1) {
        leaf.eax &= !XFD;
    }
    let is_of_amx = |entry: &kvm_cpuid_entry2| {
        [LEAF_TILE, LEAF_TILE_MULTIPLY].contains(&entry.function)
            || entry.function == LEAF_STATE && COMPONENTS.contains(&entry.index)
    };
    cpuid.retain(|entry| !is_of_amx(entry));
    // The size of all state that is left: where the last component ends.
    let others = |leaf: &&kvm_cpuid_entry2| leaf.function == LEAF_STATE && leaf.index > 1;
    let ends = cpuid.iter().filter(others);
    // Supervisor components, which have the bit set, are not in the standard format.
    let ends = ends
        .filter(|leaf| leaf.ecx & 1 == 0)
        .map(|leaf| leaf.eax.saturating_add(leaf.ebx));
    /// Size in bytes of x87 and SSE state, and the header.
    const LEGACY: u32 = 576;
    let size = ends.max().unwrap_or(LEGACY).max(LEGACY);
    if let Some(leaf) = find_mut(cpuid, LEAF_STATE, 0)
        && COMPONENTS.iter().any(|bit| leaf.eax & 1 << bit != 0)
    {
        leaf.eax &= COMPONENTS
            .iter()
            .fold(u32::MAX, |mask, bit| mask & !(1 << bit));
        leaf.ecx = size;
    }
}
