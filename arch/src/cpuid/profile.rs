//! CPU profiles: which host features a guest sees.
//!
//! A named profile shows the guest the same features on every host that has them, so that the guest
//! can be migrated between different hosts. The levels are those of the x86-64 psABI, plus the
//! system features that every such processor has. Everything newer is hidden, including speculation
//! controls: a guest that needs those uses `host`, and migrates only between identical hosts.

use std::fmt;
use std::str::FromStr;

use kvm_bindings::kvm_cpuid_entry2;
use serde::{Deserialize, Serialize};

use super::check::{self, Register, Word};
use super::{CpuidError, LEAF_ADDRESS_SIZES, LEAF_EXTENDED_FEATURES, find_mut};

/// Upper bound of the features of a vCPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Profile {
    /// Everything that KVM supports on the host.
    #[default]
    #[serde(rename = "host")]
    Host,
    /// SSE 4.2, SSSE3, POPCNT, CMPXCHG16B.
    #[serde(rename = "x86-64-v2")]
    V2,
    /// AVX2, BMI1, BMI2, F16C, FMA, LZCNT, MOVBE, XSAVE, and all of [`Profile::V2`].
    #[serde(rename = "x86-64-v3")]
    V3,
}

/// The name of a profile that does not exist.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown CPU profile {0:?}; use host, x86-64-v2 or x86-64-v3")]
pub struct UnknownProfile(String);

impl Profile {
    /// All profiles.
    pub const ALL: [Self; 3] = [Self::Host, Self::V2, Self::V3];

    /// The name that users specify.
    pub fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::V2 => "x86-64-v2",
            Self::V3 => "x86-64-v3",
        }
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Profile {
    type Err = UnknownProfile;

    fn from_str(name: &str) -> Result<Self, UnknownProfile> {
        Self::ALL
            .into_iter()
            .find(|profile| profile.name() == name)
            .ok_or_else(|| UnknownProfile(name.to_owned()))
    }
}

/// The bits at these positions.
const fn bits<const N: usize>(positions: [u32; N]) -> u32 {
    let mut value = 0;
    let mut at = 0;
    while at < N {
        value |= 1 << positions[at];
        at += 1;
    }
    value
}

/// SSE3, SSSE3, CMPXCHG16B, SSE4.1, SSE4.2, POPCNT.
const V2_1_ECX: u32 = bits([0, 9, 13, 19, 20, 23]);
/// FMA, MOVBE, XSAVE, AVX, F16C.
const V3_1_ECX: u32 = V2_1_ECX | bits([12, 22, 26, 28, 29]);
/// FPU, DE, PSE, TSC, MSR, PAE, MCE, CX8, APIC, SEP, MTRR, PGE, MCA, CMOV, PAT, PSE36,
/// CLFLUSH, MMX, FXSR, SSE, SSE2.
const ANY_1_EDX: u32 = bits([
    0, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 14, 15, 16, 17, 19, 23, 24, 25, 26,
]);
/// BMI1, AVX2, BMI2.
const V3_7_EBX: u32 = bits([3, 5, 8]);
/// x87, SSE and AVX state.
const V3_XCR0: u32 = bits([0, 1, 2]);
/// LAHF in 64-bit mode.
const V2_EXTENDED_ECX: u32 = bits([0]);
/// LZCNT.
const V3_EXTENDED_ECX: u32 = V2_EXTENDED_ECX | bits([5]);
/// SYSCALL, NX, long mode. The bits that AMD repeats from leaf 1 are not required.
const ANY_EXTENDED_EDX: u32 = bits([11, 20, 29]);
/// The bits that AMD repeats from EDX of leaf 1, limited to [`ANY_1_EDX`].
const REPEATED_EXTENDED_EDX: u32 =
    bits([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 14, 15, 16, 17, 23, 24]);
/// Size in bytes of x87, SSE and AVX state in the standard format.
const AVX_STATE_SIZE: u32 = 832;

/// Host leaves that a named profile keeps: vendor, features, caches, identification.
const KEPT: [u32; 18] = [
    0,
    1,
    2,
    4,
    6,
    7,
    0xd,
    super::LEAF_HYPERVISOR,
    super::LEAF_KVM_FEATURES,
    super::LEAF_EXTENDED,
    LEAF_EXTENDED_FEATURES,
    0x8000_0002,
    0x8000_0003,
    0x8000_0004,
    0x8000_0005,
    0x8000_0006,
    LEAF_ADDRESS_SIZES,
    super::LEAF_AMD_CACHE,
];

/// The feature words that a profile defines, with exactly the bits that it has.
fn required(profile: Profile) -> Vec<(Word, u32)> {
    let v3 = profile == Profile::V3;
    let pick = |v3_value, v2_value| if v3 { v3_value } else { v2_value };
    vec![
        (Word::new(1, 0, Register::Ecx), pick(V3_1_ECX, V2_1_ECX)),
        (Word::new(1, 0, Register::Edx), ANY_1_EDX),
        (Word::new(7, 0, Register::Ebx), pick(V3_7_EBX, 0)),
        (Word::new(0xd, 0, Register::Eax), pick(V3_XCR0, 0)),
        (
            Word::new(LEAF_EXTENDED_FEATURES, 0, Register::Ecx),
            pick(V3_EXTENDED_ECX, V2_EXTENDED_ECX),
        ),
        (
            Word::new(LEAF_EXTENDED_FEATURES, 0, Register::Edx),
            ANY_EXTENDED_EDX,
        ),
    ]
}

/// The host's CPUID without the features that `profile` hides.
pub(super) fn apply(
    profile: Profile,
    supported: &[kvm_cpuid_entry2],
) -> Result<Vec<kvm_cpuid_entry2>, CpuidError> {
    if profile == Profile::Host {
        return Ok(supported.to_vec());
    }
    let required = required(profile);
    let missing = check::missing_bits(&required, supported);
    if !missing.is_empty() {
        return Err(CpuidError::Profile { profile, missing });
    }
    let mut cpuid: Vec<kvm_cpuid_entry2> = supported
        .iter()
        .filter(|entry| KEPT.contains(&entry.function))
        .filter(|entry| match entry.function {
            7 => entry.index == 0 && profile == Profile::V3,
            // The components of extended state: none, or legacy, compaction and AVX.
            0xd => entry.index <= 2 && profile == Profile::V3,
            _ => true,
        })
        .copied()
        .collect();
    for entry in &mut cpuid {
        hide(entry);
    }
    for (word, value) in required {
        if let Some(entry) = find_mut(&mut cpuid, word.function, word.index) {
            let optional = match (word.function, word.register) {
                (LEAF_EXTENDED_FEATURES, Register::Edx) => REPEATED_EXTENDED_EDX,
                _ => 0,
            };
            let register = word.register.of_mut(entry);
            *register &= value | optional;
        }
    }
    Ok(cpuid)
}

/// Clears the registers that contain features of no named profile.
fn hide(entry: &mut kvm_cpuid_entry2) {
    match (entry.function, entry.index) {
        // Always-running APIC timer; without it Linux distrusts the timer in idle states.
        (6, _) => (entry.eax, entry.ebx, entry.ecx, entry.edx) = (entry.eax & 1 << 2, 0, 0, 0),
        (7, _) => (entry.eax, entry.ecx, entry.edx) = (0, 0, 0),
        (0xd, 0) => (entry.ebx, entry.ecx, entry.edx) = (AVX_STATE_SIZE, AVX_STATE_SIZE, 0),
        (0xd, 1) => (entry.eax, entry.ebx, entry.ecx, entry.edx) = (0, 0, 0, 0),
        (LEAF_ADDRESS_SIZES, _) => (entry.ebx, entry.edx) = (0, 0),
        _ => {}
    }
}
