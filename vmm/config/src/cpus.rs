//! Virtual processors.

use serde::{Deserialize, Serialize};

use super::{
    check::{self, Invalid, Problem},
    syntax::{Key, Part, SyntaxError, ValueType, parse},
};

/// Host CPUs on which a vCPU may run.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct CpuAffinity {
    /// The vCPU's number.
    pub vcpu: u32,
    /// Numbers of host CPUs.
    pub host_cpus: Vec<usize>,
}

/// CPU features beyond those of the profile.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct CpuFeatures {
    /// Intel AMX, which the host must have.
    #[serde(default)]
    pub amx: bool,
}

/// How vCPUs are grouped.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct CpuTopology {
    /// Threads per core.
    pub threads_per_core: u16,
    /// Cores per die.
    pub cores_per_die: u16,
    /// Dies per package.
    pub dies_per_package: u16,
    /// Number of packages.
    pub packages: u16,
}

/// Which vCPUs may share a physical core at the same time, on hosts whose kernel supports core
/// scheduling.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub enum CoreScheduling {
    /// vCPUs of the same VM.
    #[default]
    Vm,
    /// No vCPU shares a core with another.
    Vcpu,
    /// Any vCPUs.
    Off,
}

/// Virtual processors.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct CpusConfig {
    /// Number of vCPUs at boot, at least 1.
    pub boot_vcpus: u32,
    /// Maximum number of vCPUs, including hot-plugged ones: `boot_vcpus` to 255.
    pub max_vcpus: u32,
    /// Topology; one thread per core and one package if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub topology: Option<CpuTopology>,
    /// Hyper-V enlightenments.
    #[serde(default)]
    pub kvm_hyperv: bool,
    /// Physical address width in bits; the host's if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_phys_bits: Option<u8>,
    /// The guest may run virtual machines itself.
    #[serde(default = "yes")]
    pub nested: bool,
    /// Pinning of vCPUs to host CPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub affinity: Option<Vec<CpuAffinity>>,
    /// CPU features beyond those of the profile.
    #[serde(default)]
    pub features: CpuFeatures,
    /// Core scheduling.
    #[serde(default)]
    pub core_scheduling: CoreScheduling,
    /// CPU features that the guest sees: `host`, or a profile for migration between different
    /// hosts.
    #[serde(default = "host")]
    pub profile: String,
}

fn yes() -> bool {
    true
}

fn host() -> String {
    "host".to_owned()
}

impl Default for CpusConfig {
    fn default() -> Self {
        Self {
            boot_vcpus: 1,
            max_vcpus: 1,
            topology: None,
            kvm_hyperv: false,
            max_phys_bits: None,
            nested: true,
            affinity: None,
            features: CpuFeatures::default(),
            core_scheduling: CoreScheduling::default(),
            profile: host(),
        }
    }
}

const KEYS: &[Key] = &[
    Key::named("boot", "boot_vcpus", ValueType::Number),
    Key::named("max", "max_vcpus", ValueType::Number),
    Key::new(
        "topology",
        ValueType::Fields(&[
            "threads_per_core",
            "cores_per_die",
            "dies_per_package",
            "packages",
        ]),
    ),
    Key::new("kvm_hyperv", ValueType::Switch),
    Key::new("max_phys_bits", ValueType::Number),
    Key::new("nested", ValueType::Switch),
    Key::new(
        "affinity",
        ValueType::Pairs(
            Part("vcpu", &ValueType::Number),
            Part("host_cpus", &ValueType::Numbers),
        ),
    ),
    Key::new("features", ValueType::Switches),
    Key::new(
        "core_scheduling",
        ValueType::Choice(&[("vm", "Vm"), ("vcpu", "Vcpu"), ("off", "Off")]),
    ),
    Key::new("profile", ValueType::Text),
];

impl CpusConfig {
    /// Its syntax on the command line.
    pub const SYNTAX: &[&[Key]] = &[KEYS];

    /// Maximum number of vCPUs: local APIC IDs have 8 bits, and the last one is the broadcast
    /// address.
    pub const MAX: u32 = arch::topology::MAX_VCPUS;

    /// Parses the value of `--cpus`. A bare number is the number of vCPUs at boot.
    pub fn parse(input: &str) -> Result<Self, SyntaxError> {
        if input.parse::<u32>().is_ok() {
            return Self::parse(&format!("boot={input}"));
        }
        let mut parsed = parse("--cpus", input, Self::SYNTAX)?;
        parsed.default("boot_vcpus", 1);
        if let Some(boot) = parsed.object.get("boot_vcpus").cloned() {
            parsed.default("max_vcpus", boot);
        }
        parsed.build()
    }

    /// Checks whether the configuration is valid.
    pub fn validate(&self) -> Result<(), Invalid> {
        check::range("boot_vcpus", self.boot_vcpus, 1, u64::from(Self::MAX))?;
        check::range(
            "max_vcpus",
            self.max_vcpus,
            u64::from(self.boot_vcpus),
            u64::from(Self::MAX),
        )?;
        if let Some(topology) = &self.topology {
            let vcpus = [
                topology.threads_per_core,
                topology.cores_per_die,
                topology.dies_per_package,
                topology.packages,
            ]
            .into_iter()
            // Cannot overflow: four factors of 16 bits.
            .fold(1, |product, factor| product * u64::from(factor));
            check::number(
                "topology",
                vcpus,
                vcpus == u64::from(self.max_vcpus),
                "the number of vCPUs (max_vcpus), as the product of all levels",
            )?;
        }
        for (index, affinity) in self.affinity.iter().flatten().enumerate() {
            let place = format!("affinity[{index}].vcpu");
            check::range(&place, affinity.vcpu, 0, u64::from(self.max_vcpus) - 1)?;
        }
        if let Some(bits) = self.max_phys_bits {
            check::range("max_phys_bits", bits, 32, 52)?;
        }
        check::unsupported(
            self.kvm_hyperv,
            "kvm_hyperv",
            "Hyper-V enlightenments",
            "leave kvm_hyperv out or off",
        )?;
        check::text(
            "profile",
            &self.profile,
            self.profile.parse::<arch::cpuid::Profile>().is_ok(),
            "a CPU profile: host, x86-64-v2 or x86-64-v3",
        )?;
        if self.features.amx && self.profile != host() {
            let with = "a CPU profile, none of which has AMX";
            let advice = "leave amx out, or use profile=host";
            return Err(Problem::Conflict { with, advice }.at("features.amx"));
        }
        Ok(())
    }
}
