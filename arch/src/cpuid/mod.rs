//! The CPUID leaves of each vCPU (Intel SDM 2A, CPUID; AMD APM 3, appendix E).
//!
//! They are based on what KVM supports on the host (`KVM_GET_SUPPORTED_CPUID`). A [`Profile`]
//! removes features. Then the leaves that depend on the machine or the vCPU are filled in:
//! topology, APIC IDs, cache sharing, address width, clock frequencies.

mod amx;
mod check;
mod profile;

use kvm_bindings::{KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};

pub use amx::has_amx;
pub use check::{Missing, missing};
pub use profile::{Profile, UnknownProfile};

use crate::layout::MIN_PHYS_BITS;
use crate::topology::Topology;

// Leaf 1, ECX.
const VMX: u32 = 1 << 5;
const PCID: u32 = 1 << 17;
const X2APIC: u32 = 1 << 21;
const TSC_DEADLINE: u32 = 1 << 24;
const OSXSAVE: u32 = 1 << 27;
const HYPERVISOR: u32 = 1 << 31;
// Leaf 1, EDX.
const HTT: u32 = 1 << 28;
// Leaf 7.0, EBX.
const INVPCID: u32 = 1 << 10;
// Leaf 7.0, ECX.
const OSPKE: u32 = 1 << 4;
const LA57: u32 = 1 << 16;
// Leaf 0x8000_0001, ECX.
const CMP_LEGACY: u32 = 1 << 1;
const SVM: u32 = 1 << 2;
const TOPOLOGY_EXTENSIONS: u32 = 1 << 22;

const LEAF_EXTENDED_TOPOLOGY: u32 = 0xb;
const LEAF_DIE_TOPOLOGY: u32 = 0x1f;
const LEAF_TSC: u32 = 0x15;
const LEAF_FREQUENCIES: u32 = 0x16;
const LEAF_HYPERVISOR: u32 = 0x4000_0000;
const LEAF_KVM_FEATURES: u32 = 0x4000_0001;
const LEAF_HYPERVISOR_TIMING: u32 = 0x4000_0010;
const LEAF_EXTENDED: u32 = 0x8000_0000;
const LEAF_EXTENDED_FEATURES: u32 = 0x8000_0001;
const LEAF_ADDRESS_SIZES: u32 = 0x8000_0008;
const LEAF_SVM: u32 = 0x8000_000a;
const LEAF_AMD_CACHE: u32 = 0x8000_001d;
const LEAF_AMD_TOPOLOGY: u32 = 0x8000_001e;

/// Level types of leaves 0xb and 0x1f.
const LEVEL_THREAD: u32 = 1;
const LEVEL_CORE: u32 = 2;
const LEVEL_DIE: u32 = 5;

/// "KVMKVMKVM\0\0\0" in EBX, ECX and EDX.
const KVM_SIGNATURE: [u32; 3] = [0x4b4d_564b, 0x564b_4d56, 0x4d];
/// KVM's local APIC timer counts nanoseconds.
const APIC_BUS_KHZ: u32 = 1_000_000;

/// Why no CPUID can be built.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CpuidError {
    /// The host's processor or KVM lacks features of the profile.
    #[error(
        "this host lacks features of CPU profile {profile}: {}; choose a lower profile or \
         another host",
        list(missing)
    )]
    Profile {
        /// The profile.
        profile: Profile,
        /// What the host lacks.
        missing: Vec<Missing>,
    },
    /// AMX is wanted, and the host has none.
    #[error(
        "this host's processor or KVM has no AMX (Linux 5.17 or newer is needed): leave amx out of \
         the features, or use another host"
    )]
    Amx,
    /// There is no such vCPU.
    #[error("vCPU {vcpu} does not exist, the CPU topology has {vcpus}")]
    Vcpu {
        /// The requested vCPU.
        vcpu: u32,
        /// Number of vCPUs.
        vcpus: u32,
    },
    /// The host does not support this address width.
    #[error(
        "{bits} physical address bits are not supported, the host has {host}; use \
         {MIN_PHYS_BITS} to {host}"
    )]
    PhysBits {
        /// Requested address bits.
        bits: u8,
        /// Address bits of the host.
        host: u8,
    },
}

fn list(missing: &[Missing]) -> String {
    let names: Vec<String> = missing.iter().map(ToString::to_string).collect();
    names.join(", ")
}

/// Configuration of the vCPUs of a machine.
#[derive(Clone, Debug)]
pub struct Config {
    /// Their arrangement.
    pub topology: Topology,
    /// Upper bound of their features.
    pub profile: Profile,
    /// Physical address bits that the [`crate::layout::AddressMap`] was created for; at most
    /// [`phys_bits`] of the host.
    pub phys_bits: u8,
    /// Whether the guest may run virtual machines of its own, if the host supports it.
    pub nested: bool,
    /// Whether a gate connects the guest's processes with others'. The guest's page tables then
    /// have four levels, and its TLB entries no tags (PCID), whatever the host supports.
    pub gate: bool,
    /// Whether the guest has Intel AMX, which needs [`Profile::Host`].
    pub amx: bool,
    /// Frequency of the guest's TSC in kHz (`KVM_GET_TSC_KHZ`), if it is known and stable.
    pub tsc_khz: Option<u32>,
}

/// Physical address bits of the host, from KVM's supported CPUID; 36 if it does not report them.
pub fn phys_bits(supported: &[kvm_cpuid_entry2]) -> u8 {
    find(supported, LEAF_ADDRESS_SIZES, 0).map_or(MIN_PHYS_BITS, |entry| entry.eax as u8)
}

/// Builds the CPUID of vCPU number `vcpu` from what KVM supports on the host.
///
/// # Errors
///
/// [`CpuidError`] if the host lacks what the configuration requires, or there is no such vCPU.
pub fn for_vcpu(
    supported: &[kvm_cpuid_entry2],
    config: &Config,
    vcpu: u32,
) -> Result<Vec<kvm_cpuid_entry2>, CpuidError> {
    let vcpus = config.topology.vcpus();
    if vcpu >= vcpus {
        return Err(CpuidError::Vcpu { vcpu, vcpus });
    }
    let host = phys_bits(supported);
    if !(MIN_PHYS_BITS..=host).contains(&config.phys_bits) {
        return Err(CpuidError::PhysBits {
            bits: config.phys_bits,
            host,
        });
    }
    let mut cpuid = profile::apply(config.profile, supported)?;
    match config.amx {
        true if !amx::is_supported(&cpuid) => return Err(CpuidError::Amx),
        true => {}
        false => amx::hide(&mut cpuid),
    }
    let vendor = Vendor::of(&cpuid);
    set_features(&mut cpuid, config, vcpu);
    set_topology(&mut cpuid, config, vendor, vcpu);
    set_cache_sharing(&mut cpuid, &config.topology);
    set_address_sizes(&mut cpuid, config, vendor);
    set_frequencies(&mut cpuid, config.tsc_khz, vendor);
    set_max_leaves(&mut cpuid);
    Ok(cpuid)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Vendor {
    /// AMD, or Hygon, which is compatible with it.
    Amd,
    /// Intel, or a compatible vendor.
    Intel,
}

impl Vendor {
    fn of(cpuid: &[kvm_cpuid_entry2]) -> Self {
        let amd = find(cpuid, 0, 0).is_some_and(|entry| {
            // The first four letters: "Auth" or "Hygo".
            [*b"Auth", *b"Hygo"].contains(&entry.ebx.to_le_bytes())
        });
        if amd { Self::Amd } else { Self::Intel }
    }
}

fn find(cpuid: &[kvm_cpuid_entry2], function: u32, index: u32) -> Option<&kvm_cpuid_entry2> {
    cpuid
        .iter()
        .find(|entry| entry.function == function && entry.index == index)
}

fn find_mut(
    cpuid: &mut [kvm_cpuid_entry2],
    function: u32,
    index: u32,
) -> Option<&mut kvm_cpuid_entry2> {
    cpuid
        .iter_mut()
        .find(|entry| entry.function == function && entry.index == index)
}

/// Replaces all subleaves of a leaf by these values of EAX to EDX. The index is significant only if
/// there are several.
fn replace(cpuid: &mut Vec<kvm_cpuid_entry2>, function: u32, values: &[[u32; 4]]) {
    cpuid.retain(|entry| entry.function != function);
    let flags = match values.len() {
        ..=1 => 0,
        _ => KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
    };
    for (index, [eax, ebx, ecx, edx]) in (0..).zip(values.iter().copied()) {
        cpuid.push(kvm_cpuid_entry2 {
            function,
            index,
            flags,
            eax,
            ebx,
            ecx,
            edx,
            ..Default::default()
        });
    }
}

/// Sets feature bits that do not come from the host.
fn set_features(cpuid: &mut Vec<kvm_cpuid_entry2>, config: &Config, vcpu: u32) {
    let several = config.topology.threads_per_package() > 1;
    if let Some(leaf) = find_mut(cpuid, 1, 0) {
        // Number of addressable IDs in the package. It has 8 bits, as does the APIC ID.
        let ids = (1u32 << config.topology.package_shift()).min(255);
        leaf.ebx = leaf.ebx & 0xffff | ids << 16 | config.topology.apic_id(vcpu) << 24;
        // KVM provides these with its in-kernel interrupt controllers, whatever the host has.
        leaf.ecx |= HYPERVISOR | X2APIC | TSC_DEADLINE;
        // KVM derives this bit from CR4.
        leaf.ecx &= !OSXSAVE;
        if !config.nested {
            leaf.ecx &= !VMX;
        }
        if config.gate {
            leaf.ecx &= !PCID;
        }
        leaf.edx = if several {
            leaf.edx | HTT
        } else {
            leaf.edx & !HTT
        };
    }
    if let Some(leaf) = find_mut(cpuid, 7, 0) {
        leaf.ecx &= !OSPKE;
        if config.gate {
            leaf.ebx &= !INVPCID;
            leaf.ecx &= !LA57;
        }
    }
    if !config.nested {
        if let Some(leaf) = find_mut(cpuid, LEAF_EXTENDED_FEATURES, 0) {
            leaf.ecx &= !SVM;
        }
        cpuid.retain(|entry| entry.function != LEAF_SVM);
    }
}

fn set_topology(cpuid: &mut Vec<kvm_cpuid_entry2>, config: &Config, vendor: Vendor, vcpu: u32) {
    let topology = &config.topology;
    let apic_id = topology.apic_id(vcpu);
    let level = |index: u32, kind: u32, shift: u32, threads: u32| {
        [shift, threads, kind << 8 | index, apic_id]
    };
    let thread = level(
        0,
        LEVEL_THREAD,
        topology.core_shift(),
        topology.threads_per_core(),
    );
    // Leaf 0xb does not describe dies: there, the cores fill the package.
    let core = level(
        1,
        LEVEL_CORE,
        topology.package_shift(),
        topology.threads_per_package(),
    );
    let end = |index: u32| level(index, 0, 0, 0);
    replace(cpuid, LEAF_EXTENDED_TOPOLOGY, &[thread, core, end(2)]);
    match vendor {
        Vendor::Intel if topology.dies_per_package() > 1 => {
            let core = level(
                1,
                LEVEL_CORE,
                topology.die_shift(),
                topology.threads_per_die(),
            );
            let die = level(
                2,
                LEVEL_DIE,
                topology.package_shift(),
                topology.threads_per_package(),
            );
            replace(cpuid, LEAF_DIE_TOPOLOGY, &[thread, core, die, end(3)]);
        }
        _ => cpuid.retain(|entry| entry.function != LEAF_DIE_TOPOLOGY),
    }
    if vendor == Vendor::Amd {
        set_amd_topology(cpuid, topology, vcpu);
    }
}

fn set_amd_topology(cpuid: &mut Vec<kvm_cpuid_entry2>, topology: &Topology, vcpu: u32) {
    let several = topology.threads_per_package() > 1;
    let Some(leaf) = find_mut(cpuid, LEAF_EXTENDED_FEATURES, 0) else {
        return;
    };
    leaf.ecx = if several {
        leaf.ecx | CMP_LEGACY
    } else {
        leaf.ecx & !CMP_LEGACY
    };
    leaf.ecx |= TOPOLOGY_EXTENSIONS;
    let ids = topology.ids(vcpu);
    // AMD calls dies nodes. Core numbers count within the package.
    let core = ids.die << (topology.die_shift() - topology.core_shift()) | ids.core;
    let node = ids.package * topology.dies_per_package() + ids.die;
    let nodes = (topology.dies_per_package() - 1).min(7);
    replace(
        cpuid,
        LEAF_AMD_TOPOLOGY,
        &[[
            topology.apic_id(vcpu),
            (topology.threads_per_core() - 1) << 8 | core & 0xff,
            nodes << 8 | node & 0xff,
            0,
        ]],
    );
}

/// Sets which vCPUs share each cache: L1 and L2 belong to a core, L3 to a die.
fn set_cache_sharing(cpuid: &mut [kvm_cpuid_entry2], topology: &Topology) {
    for leaf in cpuid {
        let intel = leaf.function == 4;
        if !(intel || leaf.function == LEAF_AMD_CACHE) || leaf.eax & 0x1f == 0 {
            continue;
        }
        // IDs occupy whole bits, so sharing is counted in powers of two.
        let shift = match leaf.eax >> 5 & 7 {
            ..=2 => topology.core_shift(),
            _ => topology.die_shift(),
        };
        leaf.eax = leaf.eax & 0x3fff | ((1u32 << shift) - 1) << 14;
        if intel {
            let cores = 1u32 << (topology.package_shift() - topology.core_shift());
            leaf.eax |= (cores - 1).min(63) << 26;
        }
    }
}

fn set_address_sizes(cpuid: &mut [kvm_cpuid_entry2], config: &Config, vendor: Vendor) {
    let Some(leaf) = find_mut(cpuid, LEAF_ADDRESS_SIZES, 0) else {
        return;
    };
    // The byte above the linear address bits would report a different width for guests.
    leaf.eax = leaf.eax & 0xff00 | u32::from(config.phys_bits);
    if vendor == Vendor::Amd {
        let topology = &config.topology;
        leaf.ecx = topology.package_shift() << 12 | (topology.threads_per_package() - 1);
    }
}

/// Reports the clock frequencies, so that the guest need not measure them.
fn set_frequencies(cpuid: &mut Vec<kvm_cpuid_entry2>, tsc_khz: Option<u32>, vendor: Vendor) {
    // The host's frequencies need not apply to the guest.
    cpuid.retain(|entry| {
        ![LEAF_TSC, LEAF_FREQUENCIES, LEAF_HYPERVISOR_TIMING].contains(&entry.function)
    });
    let Some(khz) = tsc_khz.filter(|khz| *khz > 0) else {
        return;
    };
    replace(cpuid, LEAF_HYPERVISOR_TIMING, &[[khz, APIC_BUS_KHZ, 0, 0]]);
    if vendor == Vendor::Intel
        && let Some([denominator, numerator]) = tsc_ratio(khz)
    {
        let crystal_hz = APIC_BUS_KHZ * 1000;
        replace(cpuid, LEAF_TSC, &[[denominator, numerator, crystal_hz, 0]]);
        let mhz = (khz / 1000) & 0xffff;
        replace(cpuid, LEAF_FREQUENCIES, &[[mhz, mhz, 0, 0]]);
    }
}

/// The TSC frequency as a fraction (denominator, numerator) of the APIC timer's frequency, which
/// Linux takes as the crystal frequency. `None` if Linux, which multiplies in 32 bits, would
/// overflow.
fn tsc_ratio(khz: u32) -> Option<[u32; 2]> {
    let (mut a, mut b) = (khz, APIC_BUS_KHZ);
    while b != 0 {
        (a, b) = (b, a % b);
    }
    // `a` is the greatest common divisor of two positive numbers.
    let (numerator, denominator) = (khz / a, APIC_BUS_KHZ / a);
    numerator
        .checked_mul(APIC_BUS_KHZ)
        .map(|_| [denominator, numerator])
}

/// Sets the highest leaf numbers to those of the leaves that exist.
fn set_max_leaves(cpuid: &mut Vec<kvm_cpuid_entry2>) {
    let highest = |cpuid: &[kvm_cpuid_entry2], base: u32| {
        cpuid
            .iter()
            .map(|entry| entry.function)
            .filter(|function| function >> 16 == base >> 16)
            .max()
            .unwrap_or(base)
    };
    let basic = highest(cpuid, 0);
    if let Some(leaf) = find_mut(cpuid, 0, 0) {
        leaf.eax = basic;
    }
    let extended = highest(cpuid, LEAF_EXTENDED);
    if let Some(leaf) = find_mut(cpuid, LEAF_EXTENDED, 0) {
        leaf.eax = extended;
    }
    let hypervisor = highest(cpuid, LEAF_HYPERVISOR).max(LEAF_KVM_FEATURES);
    let [ebx, ecx, edx] = KVM_SIGNATURE;
    replace(cpuid, LEAF_HYPERVISOR, &[[hypervisor, ebx, ecx, edx]]);
}

#[cfg(test)]
mod tests;
