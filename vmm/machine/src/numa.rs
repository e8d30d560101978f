//! NUMA nodes of the guest.

use arch::{
    acpi::{Initiator, NumaNode},
    layout::AddressMap,
};
use vmm_config::{NumaConfig, VmConfig};
use vmm_memory::{Ram, RegionKind};

use super::{devices::Devices, error::MachineError};

/// The NUMA node of vCPU `vcpu`, if one is configured.
pub fn node_of(config: &VmConfig, vcpu: u32) -> Option<u32> {
    let has = |node: &&NumaConfig| node.cpus.iter().flatten().any(|of_node| *of_node == vcpu);
    let node = config.numa.iter().flatten().find(has)?;
    Some(node.guest_numa_id)
}

/// The nodes of PCI segments, as (segment, node).
pub fn segments(config: &VmConfig) -> Vec<(u16, u32)> {
    let mut nodes = Vec::new();
    for node in config.numa.iter().flatten() {
        let segments = node.pci_segments.iter().flatten();
        nodes.extend(segments.map(|segment| (*segment, node.guest_numa_id)));
    }
    nodes
}

/// The nodes of a configuration, sorted by number.
///
/// # Errors
/// [`MachineError::NoDevice`] if a node names a device that is not plugged in.
pub fn nodes(
    config: &VmConfig,
    map: &AddressMap,
    ram: &Ram,
    devices: &Devices,
) -> Result<Vec<NumaNode>, MachineError> {
    // Valid configurations number them from 0 without gaps.
    let mut configured: Vec<_> = config.numa.iter().flatten().collect();
    configured.sort_by_key(|node| node.guest_numa_id);
    let mut nodes = Vec::new();
    for node in configured {
        let zones = node.memory_zones.clone().unwrap_or_default();
        let regions = |kind: RegionKind| {
            ram.regions()
                .iter()
                .filter(|region| region.kind == kind && zones.contains(&region.zone))
                .map(|region| arch::layout::AddressRange {
                    start: region.guest,
                    size: region.mapping.size() as u64,
                })
                .collect::<Vec<_>>()
        };
        let mut hotplug = regions(RegionKind::VirtioMem);
        // Memory that is hot-plugged by ACPI belongs to the first node.
        if node.guest_numa_id == 0 && hotplug.is_empty() && !map.hotplug().is_empty() {
            hotplug.push(map.hotplug());
        }
        let initiator = match &node.device_id {
            Some(id) => {
                let device = devices.get(id);
                let device = device.ok_or_else(|| MachineError::NoDevice(id.clone()))?;
                Some(Initiator {
                    segment: device.bdf.segment,
                    requester: device.bdf.requester_id(),
                })
            }
            None => None,
        };
        nodes.push(NumaNode {
            memory: regions(RegionKind::Boot),
            hotplug,
            vcpus: node.cpus.clone().unwrap_or_default(),
            initiators: initiator.into_iter().collect(),
            distances: node
                .distances
                .iter()
                .flatten()
                .map(|distance| (distance.destination, distance.distance))
                .collect(),
        });
    }
    Ok(nodes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vcpu_is_in_the_node_that_names_it() {
        let config: VmConfig = serde_json::from_value(serde_json::json!({
            "payload": {"kernel": "/k"},
            "numa": [{"guest_numa_id": 1, "cpus": [0, 2]}, {"guest_numa_id": 0, "cpus": [1]}],
        }))
        .unwrap();
        let nodes = [0, 1, 2, 3].map(|vcpu| node_of(&config, vcpu));
        assert_eq!(nodes, [Some(1), Some(0), Some(1), None]);
    }
}
