//! What a guest may do to the state of a physical device: sleep states, resets, interrupts.

use anyhow::{Result, ensure};
use serde_json::json;

use super::{Context, Entry, hotplug::gone};
use crate::{
    exits::per_read,
    gantry::{CMDLINE, Gantry},
    guest::Guest,
    host_device::{EDU, HostDevice, NVME},
    net::sh,
};

pub const SCENARIOS: &[Entry] = &[
    (
        "passthrough: a guest that puts its device to sleep or resets it goes on",
        sleep_and_reset,
    ),
    (
        "passthrough: a driver without messages gets interrupts by the line",
        line,
    ),
    (
        "passthrough: memory is locked as the guest plugs it, and not before",
        memory,
    ),
    (
        "passthrough: a device comes to a VM that Landlock confines",
        landlock,
    ),
    (
        "passthrough: reading blocks of an NVMe disk asks nothing of Gantry",
        exits,
    ),
];

/// One MiB in bytes.
pub const MIB: u64 = 1 << 20;

/// Writes a pattern to the guest's NVMe disk and reads it back.
pub fn disk_works(guest: &mut Guest, pattern: &str) -> Result<()> {
    guest.eventually("ls /dev/nvme0n1", |text| text == "/dev/nvme0n1")?;
    guest.run(&format!(
        "yes {pattern} | dd of=/tmp/pattern bs=1M count=4 iflag=fullblock 2>/dev/null; \
         dd if=/tmp/pattern of=/dev/nvme0n1 bs=1M conv=fsync 2>/dev/null && \
         echo 3 > /proc/sys/vm/drop_caches && \
         dd if=/dev/nvme0n1 bs=1M count=4 2>/dev/null | cmp - /tmp/pattern"
    ))?;
    Ok(())
}

/// Number of interrupt vectors of L1 that physical devices use.
fn host_vectors() -> Result<usize> {
    let count = sh("grep -c vfio-msix /proc/interrupts || true")?;
    Ok(count.trim().parse()?)
}

fn sleep_and_reset(context: &Context) -> Result<()> {
    const DEVICE: &str = "/sys/bus/pci/devices/0000:00:0c.0";
    let nvme = HostDevice::take(NVME, 0)?;
    let more = json!({
        "memory": {"size": 512 << 20},
        "devices": [{"path": nvme.path, "id": "nvme", "pci_device_id": 12}],
    });
    let (gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    disk_works(&mut guest, "one")?;
    let table = guest.run("grep -c nvme0q /proc/interrupts")?;
    let (table, host): (usize, _) = (table.trim().parse()?, host_vectors()?);
    ensure!(
        host == table,
        "the guest uses {table} vectors, and the host gives {host}"
    );
    guest.run(&format!("echo 0000:00:0c.0 > {DEVICE}/driver/unbind"))?;
    ensure!(host_vectors()? == 0, "vectors without a driver");
    let said = guest.run(&format!("agent pci-sleep {DEVICE}"))?;
    ensure!(said.contains("slept well"), "{said}");
    let methods = guest.run(&format!("cat {DEVICE}/reset_method"))?;
    ensure!(methods == "flr", "the guest can reset it by {methods:?}");
    guest.run(&format!("echo 1 > {DEVICE}/reset"))?;
    guest.run("echo 0000:00:0c.0 > /sys/bus/pci/drivers/nvme/bind")?;
    disk_works(&mut guest, "two")?;
    let log = gantry.log();
    ensure!(!log.contains("WARN"), "{log}");
    Ok(())
}

/// NVMe's driver without MSI-X and MSI.
fn line(context: &Context) -> Result<()> {
    let nvme = HostDevice::take(NVME, 0)?;
    let more = json!({
        "memory": {"size": 512 * MIB},
        "payload": {"cmdline": format!("{CMDLINE} pci=nomsi")},
        "devices": [{"path": nvme.path, "id": "nvme", "pci_device_id": 12}],
    });
    let (gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    disk_works(&mut guest, "one")?;
    let counted = guest.run("grep nvme0q /proc/interrupts")?;
    ensure!(counted.contains("IO-APIC"), "{counted}");
    let count = counted.split_whitespace().nth(1).unwrap_or("0");
    let count: u64 = count.parse()?;
    ensure!(count > 8, "{count} interrupts for 8 MiB");
    ensure!(host_vectors()? == 0, "it has messages after all");
    // The line is released, and requested again.
    gantry.put("vm.remove-device", json!({"id": "nvme"}))?;
    gone(&gantry, "nvme")?;
    let config = json!({"path": nvme.path, "id": "nvme", "pci_device_id": 13});
    gantry.put("vm.add-device", config)?;
    disk_works(&mut guest, "two")?;
    let log = gantry.log();
    ensure!(!log.contains("WARN"), "{log}");
    Ok(())
}

/// Memory in MiB that is locked for physical devices. iommufd calls it pinned.
pub fn locked(gantry: &Gantry) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", gantry.pid()))?;
    let kib = |name| -> Result<u64> {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        let kib = line.unwrap_or("").trim().trim_end_matches(" kB");
        Ok(kib.parse()?)
    };
    Ok((kib("VmLck:")? + kib("VmPin:")?) / 1024)
}

/// A scenario for any board.
pub fn memory(context: &Context) -> Result<()> {
    let edu = HostDevice::take(EDU, 0)?;
    let more = json!({
        "memory": {"hotplug_size": 512 * MIB, "hotplug_method": "VirtioMem"},
        "devices": [{"path": edu.path, "id": "edu"}],
    });
    let (gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    guest.run("echo online_movable > /sys/devices/system/memory/auto_online_blocks")?;
    ensure!(locked(&gantry)? == 256, "{} MiB at first", locked(&gantry)?);
    let resize = |mib: u64| {
        gantry.put("vm.resize", json!({"desired_ram": mib * MIB}))?;
        gantry.info_until("memory has another size", |info| {
            info["memory_actual_size"] == mib * MIB
        })
    };
    resize(384)?;
    ensure!(locked(&gantry)? == 384, "{} MiB of 384", locked(&gantry)?);
    let said = guest.run("agent edu-check")?;
    ensure!(said.contains("edu works"), "{said}");
    resize(256)?;
    ensure!(locked(&gantry)? == 256, "{} MiB of 256", locked(&gantry)?);
    // Blocks that were plugged before the device belong to the device's mappings from the start.
    gantry.put("vm.remove-device", json!({"id": "edu"}))?;
    gone(&gantry, "edu")?;
    ensure!(locked(&gantry)? == 0, "{} MiB without", locked(&gantry)?);
    resize(384)?;
    gantry.put("vm.add-device", json!({"path": edu.path, "id": "edu"}))?;
    ensure!(locked(&gantry)? == 384, "{} MiB again", locked(&gantry)?);
    Ok(())
}

/// A scenario for any board.
pub fn landlock(context: &Context) -> Result<()> {
    let edu = HostDevice::take(EDU, 0)?;
    let serial = context.dir.join("serial");
    std::fs::create_dir(&serial)?;
    let more = json!({
        "landlock_enable": true,
        "serial": {"mode": "Socket", "socket": serial.join("serial.sock")},
    });
    let mut gantry = Gantry::start(&context.dir, &[])?;
    gantry.serial = serial.join("serial.sock");
    let mut guest = gantry.create_and_boot(more)?;
    gantry.put("vm.add-device", json!({"path": edu.path, "id": "edu"}))?;
    guest.eventually("agent edu-check", |said| said.contains("edu works"))?;
    // A device of a different model is refused before anything happens.
    let nvme = HostDevice::take(NVME, 0)?;
    let swap = json!({"id": "edu", "path": nvme.path});
    gantry.refused("vm.swap-device", Some(swap), 400, "not of the same model")?;
    guest.run("agent edu-check").map(|_| ())
}

/// Number of reads of the shorter run.
const READS: u32 = 500;

fn exits(context: &Context) -> Result<()> {
    const DISK: &str = "/dev/nvme0n1";
    let nvme = HostDevice::take(NVME, 0)?;
    let (gantry, mut guest) = Gantry::boot(&context.dir, json!({"memory": {"size": 512 * MIB}}))?;
    let mut asked = |excluded: &[u8]| -> Result<f64> {
        gantry.put(
            "vm.add-device",
            json!({"path": nvme.path, "id": "nvme", "x_exclude_mmap_bars": excluded}),
        )?;
        guest.eventually("ls /dev/nvme0n1", |text| text == DISK)?;
        let cost = per_read(&mut guest, gantry.pid(), DISK, READS)?;
        gantry.put("vm.remove-device", json!({"id": "nvme"}))?;
        gone(&gantry, "nvme")?;
        Ok(cost.exits.to_vmm)
    };
    let mapped = asked(&[])?;
    // With trapped registers, each read rings two doorbells.
    let trapped = asked(&[0])?;
    ensure!(trapped > 1.9, "{trapped} exits of a read with trapped BARs");
    ensure!(
        mapped < 0.1,
        "a read asks something of Gantry {mapped} times"
    );
    Ok(())
}
