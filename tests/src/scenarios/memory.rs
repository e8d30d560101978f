//! Hot-pluggable memory.

use std::fs;

use anyhow::{Result, ensure};
use serde_json::json;

use super::{Context, Entry};
use crate::{
    gantry::{Gantry, PATIENCE},
    guest::Guest,
};

pub const SCENARIOS: &[Entry] = &[
    ("memory: balloon inflates and deflates", balloon),
    (
        "memory: a guest that runs out takes from its balloon",
        out_of_memory,
    ),
    ("memory: free pages are reported to the host", reporting),
    (
        "memory: plugged by ACPI, and there again after a reboot",
        acpi,
    ),
    ("memory: virtio-mem grows and shrinks", virtio_mem),
    ("memory: huge pages, as far as there are any", huge_pages),
    ("memory: prefaulted before the guest runs", prefault),
];

const MIB: u64 = 1 << 20;

/// Brings plugged memory online.
const ONLINE: &str = "for m in /sys/devices/system/memory/memory*/state; \
     do echo online > $m 2>/dev/null; done; true";

fn total(guest: &mut Guest) -> Result<u64> {
    Ok(guest
        .run("awk '/MemTotal/ {print $2}' /proc/meminfo")?
        .parse::<u64>()?
        * 1024)
}

/// Resident memory of the process in bytes.
fn resident(gantry: &Gantry) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{}/status", gantry.pid()))?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .unwrap_or("0 kB");
    Ok(line.trim().trim_end_matches(" kB").parse::<u64>()? * 1024)
}

fn balloon(context: &Context) -> Result<()> {
    let more = json!({"balloon": {"size": 0}, "memory": {"thp": false}});
    let (gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    // Touch much of the memory first.
    guest.run("dd if=/dev/zero of=/tmp/fill bs=1M count=120 2>/dev/null; rm /tmp/fill")?;
    let (before, held) = (total(&mut guest)?, resident(&gantry)?);
    gantry.put("vm.resize", json!({"desired_balloon": 64 * MIB}))?;
    gantry.info_until("the balloon has inflated", |info| {
        info["memory_actual_size"] == 192 * MIB
    })?;
    let (inflated, holds) = (total(&mut guest)?, resident(&gantry)?);
    ensure!(
        inflated + 60 * MIB < before,
        "{before} bytes before, {inflated} inflated"
    );
    ensure!(
        holds + 48 * MIB < held,
        "the host holds {holds} bytes, {held} before"
    );
    gantry.put("vm.resize", json!({"desired_balloon": 0}))?;
    gantry.info_until("the balloon has deflated", |info| {
        info["memory_actual_size"] == 256 * MIB
    })?;
    ensure!(total(&mut guest)? == before);
    Ok(())
}

fn out_of_memory(context: &Context) -> Result<()> {
    let more = json!({"balloon": {"size": 0, "deflate_on_oom": true}});
    let (gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    gantry.put("vm.resize", json!({"desired_balloon": 128 * MIB}))?;
    gantry.info_until("the balloon has inflated", |info| {
        info["memory_actual_size"] == 128 * MIB
    })?;
    let free = guest.run("awk '/MemAvailable/ {print $2}' /proc/meminfo")?;
    let free = free.parse::<u64>()? * 1024;
    ensure!(
        free < 110 * MIB,
        "{free} bytes are left without the balloon's"
    );
    guest.run("dd if=/dev/zero of=/tmp/fill bs=1M count=120 2>/dev/null")?;
    let killed = guest.run("dmesg | grep -c 'Killed process'; true")?;
    ensure!(killed == "0", "{killed} processes were killed");
    gantry.info_until("the balloon has shrunk", |info| {
        info["memory_actual_size"].as_u64() > Some(128 * MIB)
    })?;
    Ok(())
}

fn reporting(context: &Context) -> Result<()> {
    let more =
        json!({"balloon": {"size": 0, "free_page_reporting": true}, "memory": {"thp": false}});
    let (gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    guest.run("dd if=/dev/zero of=/tmp/fill bs=1M count=120 2>/dev/null")?;
    let full = resident(&gantry)?;
    guest.run(
        "rm /tmp/fill; echo 3 > /proc/sys/vm/drop_caches; echo 1 > /proc/sys/vm/compact_memory",
    )?;
    let deadline = std::time::Instant::now() + PATIENCE;
    while resident(&gantry)? + 60 * MIB > full {
        ensure!(
            std::time::Instant::now() < deadline,
            "the host still holds {} of {full} bytes",
            resident(&gantry)?
        );
        std::thread::sleep(std::time::Duration::from_millis(200));
    }
    Ok(())
}

fn acpi(context: &Context) -> Result<()> {
    let more = json!({"memory": {"hotplug_size": 1024 * MIB}});
    let (gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    let before = total(&mut guest)?;
    gantry.put("vm.resize", json!({"desired_ram": 512 * MIB}))?;
    guest.eventually(
        "ls -d /sys/devices/system/memory/memory* | wc -l",
        |blocks| blocks.parse::<u32>().is_ok_and(|blocks| blocks >= 4),
    )?;
    guest.run(ONLINE)?;
    let after = total(&mut guest)?;
    ensure!(
        after >= before + 240 * MIB,
        "{before} bytes before, {after} after"
    );
    let info = gantry.info()?;
    ensure!(info["memory_actual_size"] == 512 * MIB, "{info}");
    let odd = json!({"desired_ram": 513 * MIB});
    gantry.refused("vm.resize", Some(odd), 400, "multiples")?;
    gantry.refused(
        "vm.resize",
        Some(json!({"desired_ram": 8192 * MIB})),
        400,
        "hotplug_size",
    )?;
    gantry.act("vm.reboot")?;
    let mut guest = Guest::connect(&gantry.serial)?;
    guest.wait_ready()?;
    guest.run(ONLINE)?;
    let rebooted = total(&mut guest)?;
    ensure!(
        rebooted >= before + 240 * MIB,
        "{after} bytes before the reboot, {rebooted} after"
    );
    Ok(())
}

fn virtio_mem(context: &Context) -> Result<()> {
    let more = json!({"memory": {"hotplug_size": 512 * MIB, "hotplug_method": "VirtioMem"}});
    let (gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    guest.run("echo online_movable > /sys/devices/system/memory/auto_online_blocks")?;
    let before = total(&mut guest)?;
    gantry.put("vm.resize", json!({"desired_ram": 512 * MIB}))?;
    gantry.info_until("memory has grown", |info| {
        info["memory_actual_size"] == 512 * MIB
    })?;
    // The guest brings blocks online after it has plugged them.
    guest.eventually("awk '/MemTotal/ {print $2}' /proc/meminfo", |total| {
        let grown = total.parse::<u64>().unwrap_or(0) * 1024;
        grown >= before + 200 * MIB
    })?;
    gantry.put("vm.resize", json!({"desired_ram": 256 * MIB}))?;
    gantry.info_until("memory has shrunk", |info| {
        info["memory_actual_size"] == 256 * MIB
    })?;
    ensure!(total(&mut guest)? <= before + 16 * MIB);
    Ok(())
}

/// Sets the number of 2 MiB huge pages that the host reserves, and frees them in the end.
/// Huge pages of L1; given back when dropped.
pub(super) struct HugePages;

impl HugePages {
    const COUNT: &str = "/proc/sys/vm/nr_hugepages";

    pub(super) fn reserve(count: u64) -> Result<Self> {
        // Earlier scenarios have fragmented the memory.
        fs::write("/proc/sys/vm/drop_caches", "3")?;
        fs::write("/proc/sys/vm/compact_memory", "1")?;
        fs::write(Self::COUNT, count.to_string())?;
        let got = fs::read_to_string(Self::COUNT)?;
        ensure!(got.trim() == count.to_string(), "only {got} huge pages");
        Ok(Self)
    }

    fn free() -> Result<u64> {
        let meminfo = fs::read_to_string("/proc/meminfo")?;
        let free = meminfo
            .lines()
            .find_map(|line| line.strip_prefix("HugePages_Free:"));
        Ok(free.unwrap_or("0").trim().parse()?)
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        // The scenario is over in any case.
        let _ = fs::write(Self::COUNT, "0");
    }
}

fn huge_pages(context: &Context) -> Result<()> {
    let pages = HugePages::reserve(140)?;
    let more = json!({"memory": {"hugepages": true}});
    let (mut gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    guest.run("dd if=/dev/zero of=/tmp/fill bs=1M count=100 2>/dev/null")?;
    let left = HugePages::free()?;
    ensure!(left < 90, "{left} of 140 huge pages are free");
    gantry.kill()?;
    ensure!(HugePages::free()? == 140, "huge pages were not given back");
    drop(pages);
    // Half of what the guest needs.
    let _pages = HugePages::reserve(64)?;
    let dir = context.dir.join("short");
    fs::create_dir_all(&dir)?;
    let gantry = Gantry::start(&dir, &[])?;
    let mut config = crate::gantry::vm(&gantry.serial);
    config["memory"]["hugepages"] = json!(true);
    gantry.put("vm.create", config)?;
    gantry.refused("vm.boot", None, 500, "reserve more huge pages")?;
    ensure!(
        HugePages::free()? == 64,
        "what did not suffice is still held"
    );
    Ok(())
}

fn prefault(context: &Context) -> Result<()> {
    let gantry = Gantry::start(&context.dir, &[])?;
    let mut config = crate::gantry::vm(&gantry.serial);
    config["memory"]["prefault"] = json!(true);
    gantry.put("vm.create", config)?;
    gantry.act("vm.boot")?;
    let held = resident(&gantry)?;
    ensure!(held >= 256 * MIB, "only {held} bytes are there");
    Ok(())
}
