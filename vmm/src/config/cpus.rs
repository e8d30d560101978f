//! Virtual processors.

use serde::{Deserialize, Serialize};

/// Host processors that a vCPU may run on.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct CpuAffinity {
    /// The vCPU's number.
    pub vcpu: u32,
    /// Numbers of host CPUs.
    pub host_cpus: Vec<usize>,
}

/// Features beyond the profile.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct CpuFeatures {
    /// Intel AMX.
    #[serde(default)]
    pub amx: bool,
}

/// How vCPUs are grouped.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct CpuTopology {
    /// Threads of a core.
    pub threads_per_core: u16,
    /// Cores of a die.
    pub cores_per_die: u16,
    /// Dies of a package.
    pub dies_per_package: u16,
    /// Packages.
    pub packages: u16,
}

/// Which vCPUs may share a physical core at the same time.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub enum CoreScheduling {
    /// Those of the same VM.
    #[default]
    Vm,
    /// None.
    Vcpu,
    /// Any.
    Off,
}

/// Virtual processors.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct CpusConfig {
    /// vCPUs at boot, from 1.
    pub boot_vcpus: u32,
    /// vCPUs that can be plugged in, `boot_vcpus` to 255.
    pub max_vcpus: u32,
    /// Grouping; one thread per core and one package if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub topology: Option<CpuTopology>,
    /// Hyper-V enlightenments.
    #[serde(default)]
    pub kvm_hyperv: bool,
    /// Physical address width in bits; the host's if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_phys_bits: Option<u8>,
    /// The guest may itself run virtual machines.
    #[serde(default = "yes")]
    pub nested: bool,
    /// Pinning.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub affinity: Option<Vec<CpuAffinity>>,
    /// Features beyond the profile.
    #[serde(default)]
    pub features: CpuFeatures,
    /// Core scheduling.
    #[serde(default)]
    pub core_scheduling: CoreScheduling,
    /// Features that the guest sees: `host`, or a profile for migration between hosts.
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
