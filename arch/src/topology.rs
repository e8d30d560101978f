//! Threads, cores, dies and packages, and the APIC IDs that encode them.

use serde::{Deserialize, Serialize};

/// Maximum number of vCPUs of a machine.
pub const MAX_VCPUS: u32 = 255;
/// Highest APIC ID that every interrupt source can address. Without interrupt remapping, 255 is the
/// broadcast address of an interrupt message.
pub const MAX_APIC_ID: u32 = 254;

/// Why a topology is rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TopologyError {
    /// A level is empty, or there are too many vCPUs.
    #[error(
        "{packages} packages of {dies} dies of {cores} cores of {threads} threads are not 1 to \
         {MAX_VCPUS} vCPUs"
    )]
    Count {
        /// Packages.
        packages: u16,
        /// Dies in each package.
        dies: u16,
        /// Cores in each die.
        cores: u16,
        /// Threads in each core.
        threads: u16,
    },
    /// Each level occupies whole bits of the APIC ID, and there are too few bits.
    #[error(
        "this CPU topology needs APIC ids up to {apic_id}, the highest is {MAX_APIC_ID}; use \
         powers of two for threads, cores and dies, or fewer packages"
    )]
    ApicId {
        /// Highest ID that the topology would need.
        apic_id: u32,
    },
}

/// How the vCPUs of a machine are arranged; each count is at least one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Counts", into = "Counts")]
pub struct Topology {
    counts: Counts,
}

/// The numbers of a [`Topology`] before validation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Counts {
    threads_per_core: u16,
    cores_per_die: u16,
    dies_per_package: u16,
    packages: u16,
}

/// The position of one vCPU; each number counts within the level above.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TopologyIds {
    /// Package.
    pub package: u32,
    /// Die within its package.
    pub die: u32,
    /// Core within its die.
    pub core: u32,
    /// Thread within its core.
    pub thread: u32,
}

impl TryFrom<Counts> for Topology {
    type Error = TopologyError;

    fn try_from(counts: Counts) -> Result<Self, TopologyError> {
        Self::new(
            counts.threads_per_core,
            counts.cores_per_die,
            counts.dies_per_package,
            counts.packages,
        )
    }
}

impl From<Topology> for Counts {
    fn from(topology: Topology) -> Self {
        topology.counts
    }
}

impl Topology {
    /// A machine with `packages` packages, and so on down to threads.
    ///
    /// # Errors
    ///
    /// [`TopologyError`] if the product is not 1 to 255 vCPUs, or the APIC IDs do not suffice.
    pub fn new(
        threads_per_core: u16,
        cores_per_die: u16,
        dies_per_package: u16,
        packages: u16,
    ) -> Result<Self, TopologyError> {
        let counts = Counts {
            threads_per_core,
            cores_per_die,
            dies_per_package,
            packages,
        };
        let total = [threads_per_core, cores_per_die, dies_per_package, packages]
            .into_iter()
            .try_fold(1u32, |product, n| product.checked_mul(u32::from(n)));
        let Some(total @ 1..=MAX_VCPUS) = total else {
            return Err(TopologyError::Count {
                packages,
                dies: dies_per_package,
                cores: cores_per_die,
                threads: threads_per_core,
            });
        };
        let topology = Self { counts };
        let apic_id = topology.apic_id(total - 1);
        if apic_id > MAX_APIC_ID {
            return Err(TopologyError::ApicId { apic_id });
        }
        Ok(topology)
    }

    /// One package with `vcpus` cores of one thread each.
    ///
    /// # Errors
    ///
    /// [`TopologyError::Count`] unless `vcpus` is 1 to 255.
    pub fn flat(vcpus: u16) -> Result<Self, TopologyError> {
        Self::new(1, vcpus, 1, 1)
    }

    /// Number of vCPUs in the machine, including those that can be hot-plugged.
    pub fn vcpus(&self) -> u32 {
        self.threads_per_package() * u32::from(self.counts.packages)
    }

    /// Threads in a core.
    pub fn threads_per_core(&self) -> u32 {
        u32::from(self.counts.threads_per_core)
    }

    /// Cores in a die.
    pub fn cores_per_die(&self) -> u32 {
        u32::from(self.counts.cores_per_die)
    }

    /// Threads in a die.
    pub fn threads_per_die(&self) -> u32 {
        self.threads_per_core() * self.cores_per_die()
    }

    /// Dies in a package.
    pub fn dies_per_package(&self) -> u32 {
        u32::from(self.counts.dies_per_package)
    }

    /// Threads in a package.
    pub fn threads_per_package(&self) -> u32 {
        self.threads_per_die() * self.dies_per_package()
    }

    /// Packages in the machine.
    pub fn packages(&self) -> u32 {
        u32::from(self.counts.packages)
    }

    /// Number of APIC ID bits below the core number.
    pub fn core_shift(&self) -> u32 {
        bits_for(self.threads_per_core())
    }

    /// Number of APIC ID bits below the die number.
    pub fn die_shift(&self) -> u32 {
        self.core_shift() + bits_for(self.cores_per_die())
    }

    /// Number of APIC ID bits below the package number.
    pub fn package_shift(&self) -> u32 {
        self.die_shift() + bits_for(self.dies_per_package())
    }

    /// The position of vCPU `index`: threads of a core are adjacent, then cores of a die, and so
    /// on.
    pub fn ids(&self, index: u32) -> TopologyIds {
        TopologyIds {
            thread: index % self.threads_per_core(),
            core: index / self.threads_per_core() % self.cores_per_die(),
            die: index / self.threads_per_die() % self.dies_per_package(),
            package: index / self.threads_per_package(),
        }
    }

    /// The APIC ID of vCPU `index`.
    pub fn apic_id(&self, index: u32) -> u32 {
        let ids = self.ids(index);
        ids.package << self.package_shift()
            | ids.die << self.die_shift()
            | ids.core << self.core_shift()
            | ids.thread
    }
}

/// Number of bits that distinguish `count` (at least one) members.
fn bits_for(count: u32) -> u32 {
    u32::BITS - count.saturating_sub(1).leading_zeros()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn counts_that_are_no_powers_of_two_leave_gaps_in_the_ids() {
        let topology = Topology::new(2, 3, 1, 2).unwrap();
        let ids: Vec<u32> = (0..12).map(|n| topology.apic_id(n)).collect();
        assert_eq!(ids, [0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 12, 13]);
    }

    #[test]
    fn a_flat_machine_numbers_its_vcpus() {
        for vcpus in [1, 2, 3, 254, 255] {
            let topology = Topology::flat(vcpus).unwrap();
            assert_eq!(topology.vcpus(), u32::from(vcpus));
            assert_eq!(topology.apic_id(topology.vcpus() - 1), u32::from(vcpus) - 1);
        }
    }

    #[test]
    fn impossible_topologies_are_refused() {
        assert!(matches!(
            Topology::flat(0),
            Err(TopologyError::Count { .. })
        ));
        assert!(matches!(
            Topology::flat(256),
            Err(TopologyError::Count { .. })
        ));
        assert!(matches!(
            Topology::new(u16::MAX, u16::MAX, u16::MAX, u16::MAX),
            Err(TopologyError::Count { .. })
        ));
        assert_eq!(
            Topology::new(1, 85, 1, 3),
            Err(TopologyError::ApicId { apic_id: 340 })
        );
    }

    proptest! {
        #[test]
        fn ids_ascend_and_decode_to_the_place(
            threads in 1u16..=4, cores in 1u16..=64, dies in 1u16..=4, packages in 1u16..=8,
        ) {
            let Ok(topology) = Topology::new(threads, cores, dies, packages) else {
                return Ok(());
            };
            let mut last = None;
            for index in 0..topology.vcpus() {
                let id = topology.apic_id(index);
                prop_assert!(Some(id) > last && id <= MAX_APIC_ID);
                last = Some(id);
                let ids = topology.ids(index);
                let below = |shift: u32| id & ((1 << shift) - 1);
                prop_assert_eq!(ids.package, id >> topology.package_shift());
                prop_assert_eq!(ids.die, below(topology.package_shift()) >> topology.die_shift());
                prop_assert_eq!(ids.core, below(topology.die_shift()) >> topology.core_shift());
                prop_assert_eq!(ids.thread, below(topology.core_shift()));
            }
        }
    }
}
