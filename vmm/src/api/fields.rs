//! The names of all fields of the API's bodies, for naming the one that was meant.

use crate::config::VmConfig;

/// The names of all fields, as the description of the API has them
/// (`resources/openapi/gantry.yaml`).
pub fn fields() -> impl Iterator<Item = &'static str> {
    let devices = VmConfig::KINDS.iter().map(|kind| kind.key);
    OTHERS.iter().copied().chain(devices)
}

/// Those that are not for devices of a kind.
const OTHERS: &[&str] = &[
    "accel",
    "accel_bytes",
    "accel_copies",
    "accel_stop_bytes",
    "access",
    "address",
    "affinity",
    "amx",
    "api",
    "applications",
    "backing_files",
    "bandwidth",
    "bdf",
    "boot_vcpus",
    "build_version",
    "bytes_per_second",
    "cancel",
    "channels",
    "chassis_asset_tag",
    "children",
    "cid",
    "cmdline",
    "compiler_cache",
    "config",
    "connections",
    "core_scheduling",
    "cores_per_die",
    "cpus",
    "debug_console",
    "deflate_on_oom",
    "desired_balloon",
    "desired_ram",
    "desired_size",
    "desired_vcpus",
    "destination",
    "destination_url",
    "detach",
    "device",
    "device_id",
    "device_tree",
    "device_type",
    "dies_per_package",
    "direct",
    "direction",
    "discard_writes",
    "distance",
    "distances",
    "downtime_ms",
    "drain_ms",
    "dry_run",
    "elapsed_ms",
    "error",
    "features",
    "file",
    "firmware",
    "force",
    "free_page_reporting",
    "from",
    "fs",
    "generic_vhost_user",
    "guest_numa_id",
    "hole_end",
    "hole_start",
    "host_cpus",
    "host_data",
    "host_mac",
    "host_numa_node",
    "hotplug_method",
    "hotplug_size",
    "hotplugged_size",
    "hugepage_size",
    "hugepages",
    "id",
    "igvm",
    "image_type",
    "initramfs",
    "iobase",
    "iommu",
    "iommu_address_width_bits",
    "iommu_segment",
    "iommu_segments",
    "iommufd",
    "ip",
    "kernel",
    "kvm_hyperv",
    "landlock_enable",
    "landlock_rules",
    "lazy",
    "local",
    "lock_granularity",
    "mac",
    "mask",
    "max_phys_bits",
    "max_throttle",
    "max_vcpus",
    "memory",
    "memory_actual_size",
    "memory_mode",
    "memory_restore_mode",
    "memory_zones",
    "mergeable",
    "mmio32_aperture_weight",
    "mmio64_aperture_weight",
    "mode",
    "mtu",
    "nested",
    "net_fds",
    "num_fds",
    "num_pci_segments",
    "num_queues",
    "numa",
    "oem_strings",
    "offload_csum",
    "offload_tso",
    "offload_ufo",
    "on_failure",
    "one_time_burst",
    "ops",
    "packages",
    "parent",
    "passthrough",
    "path",
    "payload",
    "pci_bdf",
    "pci_device_id",
    "pci_function",
    "pci_segment",
    "pci_segments",
    "phase",
    "pid",
    "platform",
    "predicted_downtime_ms",
    "prefault",
    "preserve_source",
    "profile",
    "pvpanic",
    "queue_affinity",
    "queue_index",
    "queue_size",
    "queue_sizes",
    "rate_limit_group",
    "rate_limit_groups",
    "rate_limiter_config",
    "readonly",
    "receiver_url",
    "record",
    "refill_time",
    "remaining_bytes",
    "remap",
    "renames",
    "reserve",
    "resources",
    "resume",
    "rounds",
    "rtc",
    "runs_at",
    "seat",
    "sent_bytes",
    "serial",
    "serial_number",
    "server",
    "sev_snp",
    "shared",
    "size",
    "slice",
    "slices",
    "socket",
    "source_url",
    "sparse",
    "src",
    "stall_s",
    "state",
    "system_family",
    "system_manufacturer",
    "system_product_name",
    "system_serial_number",
    "system_sku_number",
    "system_uuid",
    "system_version",
    "tag",
    "tap",
    "tdx",
    "thp",
    "threads_per_core",
    "throttle_percent",
    "timeout",
    "timeout_s",
    "timeout_strategy",
    "tls_dir",
    "to",
    "topology",
    "total_bytes",
    "tpm",
    "tracked",
    "transport",
    "tunnel",
    "url",
    "uuid",
    "vcpu",
    "vdpa",
    "verify",
    "version",
    "vfio_p2p_dma",
    "vhost_mode",
    "vhost_socket",
    "vhost_user",
    "vram",
    "watch",
    "watchdog",
    "weight",
    "window",
    "x_exclude_mmap_bars",
    "x_nv_gpudirect_clique",
    "zero_pages",
    "zone_updates",
    "zones",
];

/// Letters of a name that may be wrong.
const MOST: usize = 3;

/// The name among `known` that is nearest to one that is unknown, if any is near.
pub fn nearest<'a>(unknown: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    // A third of the letters at most: others are no slip.
    let most = MOST.min(unknown.chars().count() / 3);
    let near = known
        .into_iter()
        .map(|name| (distance(unknown, name), name));
    let (_, name) = near.filter(|(distance, _)| *distance <= most).min()?;
    Some(name)
}

/// How many letters are to be changed, added or left out, or exchanged with their neighbours, to get
/// from one to the other (optimal string alignment).
fn distance(one: &str, other: &str) -> usize {
    // Longer names than any that is known are not near.
    const LONGEST: usize = 64;
    let (one, other): (Vec<_>, Vec<_>) = (one.chars().collect(), other.chars().collect());
    if one.len() > LONGEST || other.len() > LONGEST {
        return usize::MAX;
    }
    let mut before = vec![0; other.len() + 1];
    let mut last: Vec<_> = (0..=other.len()).collect();
    for row in 1..=one.len() {
        let mut line = vec![row; other.len() + 1];
        for column in 1..=other.len() {
            let differs = usize::from(one[row - 1] != other[column - 1]);
            line[column] = (last[column] + 1)
                .min(line[column - 1] + 1)
                .min(last[column - 1] + differs);
            let swapped = row > 1
                && column > 1
                && one[row - 1] == other[column - 2]
                && one[row - 2] == other[column - 1];
            if swapped {
                line[column] = line[column].min(before[column - 2] + 1);
            }
        }
        before = last;
        last = line;
    }
    last[other.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_name_is_found_and_what_is_far_is_not() {
        let near = |name| nearest(name, fields());
        assert_eq!(near("memry"), Some("memory"));
        assert_eq!(near("dikss"), Some("disks"));
        assert_eq!(near("boot_vcpu"), Some("boot_vcpus"));
        assert_eq!(near("payload_"), Some("payload"));
        assert_eq!(near("completely_else"), None);
        assert_eq!(near(""), None);
        assert_eq!(near(&"x".repeat(100_000)), None);
        assert_eq!(distance("kitten", "sitting"), 3);
        assert_eq!(distance("", "abc"), 3);
    }
}
