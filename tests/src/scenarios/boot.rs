//! Booting a stock Debian kernel.

use anyhow::{Result, ensure};
use serde_json::json;

use super::{Context, Entry};
use crate::gantry::{Gantry, VMLINUX};

pub const SCENARIOS: &[Entry] = &[
    ("boot: bzImage with 1 vCPU", |c| cpus(c, 1)),
    ("boot: bzImage with 2 vCPUs", |c| cpus(c, 2)),
    ("boot: bzImage with 4 vCPUs", |c| cpus(c, 4)),
    (
        "boot: 12 vCPUs in 2 packages of 3 cores with 2 threads",
        topology,
    ),
    ("boot: ELF kernel through PVH", pvh),
    ("boot: shared memory in two zones and two NUMA nodes", zones),
    ("boot: named CPU profile hides features", profile),
    ("boot: strings of the platform reach SMBIOS", smbios),
];

fn cpus(context: &Context, count: u32) -> Result<()> {
    let more = json!({"cpus": {"boot_vcpus": count, "max_vcpus": count}});
    let (_gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    ensure!(guest.run("nproc")? == count.to_string());
    let memory: u64 = guest
        .run("awk '/MemTotal/ {print $2}' /proc/meminfo")?
        .parse()?;
    ensure!(
        (180_000..262_144).contains(&memory),
        "{memory} KiB of memory"
    );
    Ok(())
}

/// Three cores are not a power of two, so the local APIC IDs have gaps.
fn topology(context: &Context) -> Result<()> {
    let topology =
        json!({"threads_per_core": 2, "cores_per_die": 3, "dies_per_package": 1, "packages": 2});
    let more = json!({"cpus": {"boot_vcpus": 12, "max_vcpus": 12, "topology": topology}});
    let (_gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    ensure!(guest.run("nproc")? == "12");
    for (list, wanted) in [
        ("thread_siblings_list", "0-1 10-11 2-3 4-5 6-7 8-9"),
        ("core_siblings_list", "0-5 6-11"),
    ] {
        let found = guest.run(&format!(
            "echo $(cat /sys/devices/system/cpu/cpu*/topology/{list} | sort -u)"
        ))?;
        ensure!(found == wanted, "{list}: {found}");
    }
    let ids = guest.run("echo $(awk '/^apicid/ {print $3}' /proc/cpuinfo)")?;
    ensure!(ids == "0 1 2 3 4 5 8 9 10 11 12 13", "APIC ids {ids}");
    Ok(())
}

fn pvh(context: &Context) -> Result<()> {
    let (_gantry, mut guest) = Gantry::boot(&context.dir, json!({"payload": {"kernel": VMLINUX}}))?;
    guest.run("test -e /sys/firmware/acpi/tables/DSDT")?;
    Ok(())
}

fn zones(context: &Context) -> Result<()> {
    let zone = |id| json!({"id": id, "size": 128 << 20, "shared": true});
    let more = json!({
        "cpus": {"boot_vcpus": 2, "max_vcpus": 3},
        "platform": {"num_pci_segments": 2},
        "rng": {"src": "/dev/urandom", "pci_segment": 1},
        "memory": {"size": 0, "zones": [zone("a"), zone("b")]},
        "numa": [
            {"guest_numa_id": 0, "cpus": [0], "memory_zones": ["a"],
             "distances": [{"destination": 1, "distance": 30}]},
            {"guest_numa_id": 1, "cpus": [1, 2], "memory_zones": ["b"], "pci_segments": [1],
             "distances": [{"destination": 0, "distance": 30}]},
        ],
    });
    let (gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    let nodes = guest.run("ls -d /sys/devices/system/node/node[0-9]* | wc -l")?;
    ensure!(nodes == "2", "{nodes} nodes");
    let distances = guest.run("cat /sys/devices/system/node/node0/distance")?;
    ensure!(distances == "10 30", "distances {distances}");
    let node = guest.run("cat /sys/bus/pci/devices/0001:00:01.0/numa_node")?;
    ensure!(
        node == "1",
        "a device of the node's segment is in node {node}"
    );
    // Linux forgets the SRAT entry of an unplugged vCPU.
    for wanted in [3, 2, 3] {
        gantry.put("vm.resize", json!({"desired_vcpus": wanted}))?;
        let present = "ls -d /sys/devices/system/cpu/cpu[0-9]* | wc -l";
        guest.eventually(present, |text| text == wanted.to_string())?;
    }
    guest.run("test -e /sys/devices/system/cpu/cpu2/node1")?;
    Ok(())
}

fn profile(context: &Context) -> Result<()> {
    let more = json!({"cpus": {"profile": "x86-64-v2"}});
    let (_gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    guest.run("grep -qw sse4_2 /proc/cpuinfo")?;
    guest.run("! grep -qw avx2 /proc/cpuinfo")?;
    Ok(())
}

fn smbios(context: &Context) -> Result<()> {
    let more = json!({"platform": {
        "serial_number": "S-1234",
        "uuid": "12345678-9abc-def0-1234-56789abcdef0",
        "num_pci_segments": 2,
    }});
    let (_gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    ensure!(guest.run("cat /sys/class/dmi/id/product_serial")? == "S-1234");
    let uuid = guest.run("cat /sys/class/dmi/id/product_uuid")?;
    ensure!(
        uuid == "12345678-9abc-def0-1234-56789abcdef0",
        "uuid {uuid}"
    );
    guest.run("test -d /sys/devices/pci0001:00")?;
    Ok(())
}
