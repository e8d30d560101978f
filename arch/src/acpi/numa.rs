//! NUMA affinity and distances (SRAT and SLIT; ACPI 6.5, 5.2.16, 5.2.17).

use acpi_tables::slit::SLIT;

use super::{AcpiError, Machine, OEM_ID, OEM_REVISION, OEM_TABLE_ID, bytes_of, table};
use crate::layout::AddressRange;

const PROCESSOR_AFFINITY: u8 = 0;
const MEMORY_AFFINITY: u8 = 1;
const INITIATOR_AFFINITY: u8 = 5;
/// An initiator is identified by its PCI address.
const PCI_HANDLE: u8 = 1;
const ENABLED: u32 = 1 << 0;
const HOT_PLUGGABLE: u32 = 1 << 1;
/// Distance of a node to itself.
const LOCAL_DISTANCE: u8 = 10;
/// Default distance between two nodes.
const REMOTE_DISTANCE: u8 = 20;
/// Maximum number of nodes: the distance table grows with the square of their number.
const MAX_NODES: usize = 64;

/// A device that belongs to a node as processors do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Initiator {
    /// Its PCI segment.
    pub segment: u16,
    /// Its requester ID: bus, device and function.
    pub requester: u16,
}

/// One NUMA node. Nodes are numbered from zero in the order of the list.
#[derive(Clone, Debug, Default)]
pub struct NumaNode {
    /// RAM present at boot.
    pub memory: Vec<AddressRange>,
    /// Ranges for hot-plugged memory.
    pub hotplug: Vec<AddressRange>,
    /// Indices of vCPUs.
    pub vcpus: Vec<u32>,
    /// Devices.
    pub initiators: Vec<Initiator>,
    /// Distances to other nodes, each 10 to 254; 20 if not given. Distances are symmetric.
    pub distances: Vec<(u32, u8)>,
}

pub(super) fn srat(machine: &Machine) -> Result<Vec<u8>, AcpiError> {
    let mut body = Vec::new();
    // Reserved: one, then zeros.
    body.extend_from_slice(&1u32.to_le_bytes());
    body.extend_from_slice(&[0; 8]);
    // At most `MAX_NODES`, which `slit` also checks.
    for (number, node) in (0u32..).zip(machine.numa) {
        for vcpu in &node.vcpus {
            if *vcpu >= machine.topology.vcpus() {
                return Err(AcpiError::Numa {
                    node: number,
                    what: "vCPU",
                    value: u64::from(*vcpu),
                });
            }
            let domain = number.to_le_bytes();
            // At most 254.
            let apic_id = machine.topology.apic_id(*vcpu) as u8;
            body.extend_from_slice(&[PROCESSOR_AFFINITY, 16, domain[0], apic_id]);
            body.extend_from_slice(&ENABLED.to_le_bytes());
            body.extend_from_slice(&[0, domain[1], domain[2], domain[3]]);
            body.extend_from_slice(&0u32.to_le_bytes());
        }
        for range in &node.memory {
            push_memory(&mut body, number, *range, ENABLED);
        }
        for range in &node.hotplug {
            push_memory(&mut body, number, *range, ENABLED | HOT_PLUGGABLE);
        }
        for initiator in &node.initiators {
            body.extend_from_slice(&[INITIATOR_AFFINITY, 32, 0, PCI_HANDLE]);
            body.extend_from_slice(&number.to_le_bytes());
            body.extend_from_slice(&initiator.segment.to_le_bytes());
            // The bus first (ACPI 6.5, table 5.66).
            body.extend_from_slice(&initiator.requester.to_be_bytes());
            body.extend_from_slice(&[0; 12]);
            body.extend_from_slice(&ENABLED.to_le_bytes());
            body.extend_from_slice(&[0; 4]);
        }
    }
    let mut srat = table(*b"SRAT", 3);
    srat.append_slice(&body);
    Ok(srat.as_slice().to_vec())
}

fn push_memory(body: &mut Vec<u8>, domain: u32, range: AddressRange, flags: u32) {
    body.extend_from_slice(&[MEMORY_AFFINITY, 40]);
    body.extend_from_slice(&domain.to_le_bytes());
    body.extend_from_slice(&[0; 2]);
    body.extend_from_slice(&range.start.to_le_bytes());
    body.extend_from_slice(&range.size.to_le_bytes());
    body.extend_from_slice(&[0; 4]);
    body.extend_from_slice(&flags.to_le_bytes());
    body.extend_from_slice(&[0; 8]);
}

pub(super) fn slit(nodes: &[NumaNode]) -> Result<Vec<u8>, AcpiError> {
    let count = nodes.len();
    if count > MAX_NODES {
        return Err(AcpiError::Numa {
            node: MAX_NODES as u32,
            what: "the number of nodes",
            value: count as u64,
        });
    }
    let mut slit = SLIT::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION, count as u32);
    for to in 0..count {
        for from in 0..to {
            slit.set_distance(from, to, REMOTE_DISTANCE);
        }
    }
    for (from, node) in nodes.iter().enumerate() {
        for (to, distance) in &node.distances {
            let invalid = |what, value| AcpiError::Numa {
                node: from as u32,
                what,
                value,
            };
            let Some(other) = usize::try_from(*to).ok().filter(|to| *to < count) else {
                return Err(invalid("a distance to node", u64::from(*to)));
            };
            let local = *distance == LOCAL_DISTANCE;
            if !(LOCAL_DISTANCE..=254).contains(distance) || (other == from && !local) {
                return Err(invalid("the distance", u64::from(*distance)));
            }
            if other != from {
                slit.set_distance(from, other, *distance);
            }
        }
    }
    Ok(bytes_of(&slit))
}
