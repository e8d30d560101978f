//! Placement of memory in the guest's address space.

use arch::layout::AddressMap;
use vmm_config::{HotplugMethod, MemoryConfig, MemoryZoneConfig, VmConfig};
use vmm_memory::{Backing, Ram, RegionKind, is_on_hugetlbfs};

use super::error::MachineError;

/// Name of the only zone of a machine that is configured without zones.
pub const DEFAULT_ZONE: &str = "mem0";

/// Alignment of virtio-mem regions: a multiple of Linux's memory block size and of the largest huge
/// page size.
const ZONE_ALIGNMENT: u64 = 1 << 30;

/// The memory zones of a configuration; a single one for `memory.size` if there are none.
pub fn zones(memory: &MemoryConfig) -> Vec<MemoryZoneConfig> {
    if let Some(zones) = &memory.zones {
        return zones.clone();
    }
    vec![MemoryZoneConfig {
        id: DEFAULT_ZONE.to_owned(),
        size: memory.size,
        mergeable: memory.mergeable,
        shared: memory.shared,
        hugepages: memory.hugepages,
        hugepage_size: memory.hugepage_size,
        hotplug_size: match memory.hotplug_method {
            HotplugMethod::VirtioMem => memory.hotplug_size,
            HotplugMethod::Acpi => None,
        },
        hotplugged_size: memory.hotplugged_size,
        prefault: memory.prefault,
        reserve: memory.reserve,
        ..Default::default()
    }]
}

/// Whether pages are touched at the start.
pub fn is_prefaulted(memory: &MemoryConfig) -> bool {
    zones(memory).iter().any(|zone| zone.prefault)
}

/// Bytes of RAM at boot, over all zones.
pub fn boot_size(config: &VmConfig) -> u64 {
    zones(&config.memory)
        .iter()
        .fold(0, |sum, zone| sum.saturating_add(zone.size))
}

/// Bytes that can be hot-plugged, over all zones and methods.
pub fn hotplug_size(config: &VmConfig) -> u64 {
    let zones = zones(&config.memory);
    let of_zones = zones.iter().fold(0_u64, |sum, zone| {
        let size = zone.hotplug_size.unwrap_or(0);
        sum.saturating_add(
            size.checked_next_multiple_of(ZONE_ALIGNMENT)
                .unwrap_or(u64::MAX),
        )
    });
    let by_acpi = match config.memory.hotplug_method {
        HotplugMethod::Acpi => config.memory.hotplug_size.unwrap_or(0),
        HotplugMethod::VirtioMem => 0,
    };
    of_zones.saturating_add(by_acpi)
}

/// How the memory of a zone is allocated.
pub fn backing(memory: &MemoryConfig, zone: &MemoryZoneConfig) -> Backing {
    Backing {
        shared: zone.shared,
        hugepages: zone.hugepages.then(|| zone.hugepage_size.unwrap_or(0)),
        file: zone.file.clone(),
        transparent_hugepages: memory.thp,
        mergeable: zone.mergeable,
        prefault: zone.prefault,
        // If the host has no huge page left when the guest touches one, the guest is killed.
        reserve: zone.reserve
            || zone.hugepages
            || zone.file.as_deref().is_some_and(is_on_hugetlbfs),
        host_numa_node: zone.host_numa_node,
    }
}

/// Adds the regions that virtio-mem devices plug and unplug: one for each zone with a
/// `hotplug_size`, one after the other in the hot-plug window.
pub fn add_virtio_mem(
    ram: &mut Ram,
    map: &AddressMap,
    memory: &MemoryConfig,
) -> Result<(), MachineError> {
    let mut guest = map.hotplug().start;
    for zone in zones(memory) {
        let Some(len) = zone.hotplug_size.filter(|&len| len > 0) else {
            continue;
        };
        // Only memory that the guest has plugged in takes host memory.
        let backing = Backing {
            prefault: false,
            reserve: false,
            ..backing(memory, &zone)
        };
        ram.add(&zone.id, RegionKind::VirtioMem, guest, len, &backing)?;
        guest += len.next_multiple_of(ZONE_ALIGNMENT);
    }
    Ok(())
}

/// Adds the RAM that is present at boot: zones in their order, around the hole below 4 GiB.
pub fn add_boot_ram(
    ram: &mut Ram,
    map: &AddressMap,
    memory: &MemoryConfig,
) -> Result<(), MachineError> {
    let mut ranges = map.ram();
    let mut free = ranges.next();
    for zone in zones(memory) {
        let mut rest = zone.size;
        while rest > 0 {
            let Some(range) = &mut free else { break };
            let len = rest.min(range.size);
            ram.add(
                &zone.id,
                RegionKind::Boot,
                range.start,
                len,
                &backing(memory, &zone),
            )?;
            rest -= len;
            range.start += len;
            range.size -= len;
            if range.is_empty() {
                free = ranges.next();
            }
        }
    }
    Ok(())
}
