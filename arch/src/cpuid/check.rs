//! Compares feature bits: does this host have what a saved machine has seen?

use std::fmt;

use kvm_bindings::kvm_cpuid_entry2;

use super::{
    CMP_LEGACY, HTT, HYPERVISOR, LEAF_ADDRESS_SIZES, LEAF_EXTENDED_FEATURES, LEAF_KVM_FEATURES,
    LEAF_SVM, OSPKE, OSXSAVE, TOPOLOGY_EXTENSIONS, TSC_DEADLINE, X2APIC, find,
};

/// A register that CPUID returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Register {
    Eax,
    Ebx,
    Ecx,
    Edx,
}

impl Register {
    fn of(self, entry: &kvm_cpuid_entry2) -> u32 {
        match self {
            Self::Eax => entry.eax,
            Self::Ebx => entry.ebx,
            Self::Ecx => entry.ecx,
            Self::Edx => entry.edx,
        }
    }

    pub(super) fn of_mut(self, entry: &mut kvm_cpuid_entry2) -> &mut u32 {
        match self {
            Self::Eax => &mut entry.eax,
            Self::Ebx => &mut entry.ebx,
            Self::Ecx => &mut entry.ecx,
            Self::Edx => &mut entry.edx,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Eax => "EAX",
            Self::Ebx => "EBX",
            Self::Ecx => "ECX",
            Self::Edx => "EDX",
        }
    }
}

/// 32 feature bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Word {
    pub(super) function: u32,
    pub(super) index: u32,
    pub(super) register: Register,
}

impl Word {
    pub(super) const fn new(function: u32, index: u32, register: Register) -> Self {
        Self {
            function,
            index,
            register,
        }
    }

    /// The bits that this CPUID has; 0 if it lacks the leaf.
    fn read(&self, cpuid: &[kvm_cpuid_entry2]) -> u32 {
        find(cpuid, self.function, self.index).map_or(0, |entry| self.register.of(entry))
    }
}

/// Something that this host lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Missing(Kind);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Bit(Word, u32),
    PhysBits { saved: u8, host: u8 },
}

impl Missing {
    /// Whether it is Intel AMX, or what AMX needs: its registers' state, and that this can be switched off.
    pub fn is_of_amx(&self) -> bool {
        const AMX: [(Word, u32); 5] = [
            (Word::new(7, 1, Register::Eax), 1 << 21),
            (Word::new(7, 1, Register::Edx), 1 << 8),
            (E7D, 1 << 22 | 1 << 24 | 1 << 25),
            (Word::new(0xd, 0, Register::Eax), 1 << 17 | 1 << 18),
            (Word::new(0xd, 1, Register::Eax), 1 << 4),
        ];
        let Kind::Bit(word, bit) = self.0 else {
            return false;
        };
        AMX.iter()
            .any(|(of_amx, bits)| *of_amx == word && bits & (1 << bit) != 0)
    }
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self.0 {
            Kind::PhysBits { saved, host } => {
                write!(f, "{saved} physical address bits (the host has {host})")
            }
            Kind::Bit(word, bit) => {
                if let Some((_, _, name)) = NAMES
                    .iter()
                    .find(|(named, at, _)| *named == word && *at == bit)
                {
                    write!(f, "{name} (")?;
                }
                let Word {
                    function, index, ..
                } = word;
                let register = word.register.name();
                write!(f, "CPUID {function:#x}.{index:#x}:{register}[{bit}]")?;
                if NAMES
                    .iter()
                    .any(|(named, at, _)| *named == word && *at == bit)
                {
                    f.write_str(")")?;
                }
                Ok(())
            }
        }
    }
}

/// Words in which a set bit is a feature, with the bits that are not compared: those that KVM
/// provides or maintains whatever the host has, and those that describe the topology.
const WORDS: [(Word, u32); 20] = [
    (
        Word::new(1, 0, Register::Ecx),
        HYPERVISOR | X2APIC | TSC_DEADLINE | OSXSAVE,
    ),
    (Word::new(1, 0, Register::Edx), HTT),
    (Word::new(6, 0, Register::Eax), 0),
    (Word::new(7, 0, Register::Ebx), 0),
    (Word::new(7, 0, Register::Ecx), OSPKE),
    (Word::new(7, 0, Register::Edx), 0),
    (Word::new(7, 1, Register::Eax), 0),
    (Word::new(7, 1, Register::Edx), 0),
    (Word::new(7, 2, Register::Edx), 0),
    (Word::new(0xd, 0, Register::Eax), 0),
    (Word::new(0xd, 0, Register::Edx), 0),
    (Word::new(0xd, 1, Register::Eax), 0),
    (Word::new(0xd, 1, Register::Ecx), 0),
    (
        Word::new(LEAF_EXTENDED_FEATURES, 0, Register::Ecx),
        CMP_LEGACY | TOPOLOGY_EXTENSIONS,
    ),
    (Word::new(LEAF_EXTENDED_FEATURES, 0, Register::Edx), 0),
    (Word::new(0x8000_0007, 0, Register::Edx), 0),
    (Word::new(LEAF_ADDRESS_SIZES, 0, Register::Ebx), 0),
    (Word::new(LEAF_SVM, 0, Register::Edx), 0),
    (Word::new(0x8000_0021, 0, Register::Eax), 0),
    (Word::new(LEAF_KVM_FEATURES, 0, Register::Eax), 0),
];

const E1C: Word = Word::new(1, 0, Register::Ecx);
const E7B: Word = Word::new(7, 0, Register::Ebx);
const E7C: Word = Word::new(7, 0, Register::Ecx);
const E7D: Word = Word::new(7, 0, Register::Edx);
const X1C: Word = Word::new(LEAF_EXTENDED_FEATURES, 0, Register::Ecx);
const X1D: Word = Word::new(LEAF_EXTENDED_FEATURES, 0, Register::Edx);

/// Names of the bits that differ most often between hosts.
const NAMES: [(Word, u32, &str); 54] = [
    (E1C, 0, "SSE3"),
    (E1C, 1, "PCLMULQDQ"),
    (E1C, 5, "VMX"),
    (E1C, 9, "SSSE3"),
    (E1C, 12, "FMA"),
    (E1C, 13, "CMPXCHG16B"),
    (E1C, 17, "PCID"),
    (E1C, 19, "SSE4.1"),
    (E1C, 20, "SSE4.2"),
    (E1C, 22, "MOVBE"),
    (E1C, 23, "POPCNT"),
    (E1C, 25, "AES"),
    (E1C, 26, "XSAVE"),
    (E1C, 28, "AVX"),
    (E1C, 29, "F16C"),
    (E1C, 30, "RDRAND"),
    (E7B, 0, "FSGSBASE"),
    (E7B, 3, "BMI1"),
    (E7B, 4, "HLE"),
    (E7B, 5, "AVX2"),
    (E7B, 7, "SMEP"),
    (E7B, 8, "BMI2"),
    (E7B, 9, "ERMS"),
    (E7B, 10, "INVPCID"),
    (E7B, 11, "RTM"),
    (E7B, 14, "MPX"),
    (E7B, 16, "AVX512F"),
    (E7B, 17, "AVX512DQ"),
    (E7B, 18, "RDSEED"),
    (E7B, 19, "ADX"),
    (E7B, 20, "SMAP"),
    (E7B, 23, "CLFLUSHOPT"),
    (E7B, 24, "CLWB"),
    (E7B, 29, "SHA"),
    (E7B, 30, "AVX512BW"),
    (E7B, 31, "AVX512VL"),
    (E7C, 2, "UMIP"),
    (E7C, 3, "PKU"),
    (E7C, 8, "GFNI"),
    (E7C, 9, "VAES"),
    (E7C, 11, "AVX512_VNNI"),
    (E7C, 16, "LA57"),
    (E7C, 22, "RDPID"),
    (E7D, 22, "AMX-BF16"),
    (E7D, 24, "AMX-TILE"),
    (E7D, 26, "SPEC_CTRL"),
    (E7D, 29, "ARCH_CAPABILITIES"),
    (E7D, 31, "SSBD"),
    (X1C, 0, "LAHF_LM"),
    (X1C, 2, "SVM"),
    (X1C, 5, "LZCNT"),
    (X1C, 6, "SSE4A"),
    (X1D, 20, "NX"),
    (X1D, 26, "1 GiB pages"),
];

/// Returns the features that the machine's `saved` CPUID has and this host's KVM lacks, so that a
/// restore can be refused with a reason. A feature counts as present if it is `supported`, or
/// `given` to every vCPU whether requested or not. If the list is empty, the machine can run here.
pub fn missing(
    saved: &[kvm_cpuid_entry2],
    supported: &[kvm_cpuid_entry2],
    given: &[kvm_cpuid_entry2],
) -> Vec<Missing> {
    let wanted: Vec<(Word, u32)> = WORDS
        .iter()
        .map(|(word, ignored)| (*word, word.read(saved) & !ignored & !word.read(given)))
        .collect();
    let mut missing = missing_bits(&wanted, supported);
    let width = |cpuid| find(cpuid, LEAF_ADDRESS_SIZES, 0).map_or(0, |entry| entry.eax as u8);
    let (saved, host) = (width(saved), width(supported));
    if saved > host {
        missing.push(Missing(Kind::PhysBits { saved, host }));
    }
    missing
}

/// Returns the bits of `wanted` that `supported` lacks.
pub(super) fn missing_bits(wanted: &[(Word, u32)], supported: &[kvm_cpuid_entry2]) -> Vec<Missing> {
    wanted
        .iter()
        .flat_map(|(word, bits)| {
            let lacking = bits & !word.read(supported);
            (0..u32::BITS)
                .filter(move |bit| lacking & 1 << bit != 0)
                .map(|bit| Missing(Kind::Bit(*word, bit)))
        })
        .collect()
}
