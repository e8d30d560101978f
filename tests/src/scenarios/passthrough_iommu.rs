//! Physical devices behind a virtual IOMMU, in a guest whose kernel has a driver for it.

use std::{path::Path, thread, time::Duration};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};

use super::{
    Context, Entry,
    hotplug::gone,
    passthrough::{has_leaked, holdings},
    passthrough_iommufd::Hidden,
    passthrough_state::{MIB, disk_works, locked},
};
use crate::{
    edu::HostPage,
    gantry::{Gantry, merge, with_iommu_driver},
    guest::Guest,
    host_device::{EDU, EDU_OF_TWO, HostDevice, NVME},
};

/// The scenarios, which share an L1 with the same kernel as L2. It has iommufd, which is hidden
/// where groups are tested.
pub const SCENARIOS: &[Entry] = &[
    (
        "passthrough: a guest's program chooses addresses behind the virtual IOMMU",
        own_addresses,
    ),
    (
        "passthrough: the same behind the virtual IOMMU, through iommufd",
        own_addresses_by_iommufd,
    ),
    (
        "passthrough: NVMe with the stock driver behind the virtual IOMMU",
        nvme,
    ),
    (
        "passthrough: NVMe behind the virtual IOMMU, through iommufd",
        nvme_by_iommufd,
    ),
    (
        "passthrough: plugged and unplugged under load behind the virtual IOMMU",
        cycles,
    ),
    (
        "passthrough: swapped behind the virtual IOMMU, of a VM that Landlock confines",
        swap,
    ),
    (
        "passthrough: kill -9 with a device behind the virtual IOMMU, and it starts again",
        killed,
    ),
    (
        "passthrough: a guest that passes its virtual IOMMU by, with memory that it gets later",
        bypass,
    ),
    (
        "passthrough: a guest that passes its virtual IOMMU by, through iommufd",
        bypass_by_iommufd,
    ),
    (
        "passthrough: one device reaches the other's memory through the virtual IOMMU",
        peers,
    ),
    (
        "passthrough: what cannot be behind the virtual IOMMU is refused with words",
        refused,
    ),
];

/// Address of a device by its slot.
fn at(slot: u8) -> String {
    format!("0001:00:{slot:02x}.0")
}

/// A guest with a driver for the IOMMU, with segment 1 behind it, and `words` on its command line.
fn vm_with(words: &str, more: Value) -> Value {
    let mut config = with_iommu_driver(words);
    let own = json!({
        "memory": {"size": 512 * MIB},
        "platform": {"num_pci_segments": 2, "iommu_segments": [1]},
    });
    merge(&mut config, own);
    merge(&mut config, more);
    config
}

fn vm(more: Value) -> Value {
    vm_with("", more)
}

/// The device's program runs in the guest, and the device cannot reach what the program does not
/// map.
fn edu_works(guest: &mut Guest) -> Result<String> {
    let said = guest.run("agent edu-vfio")?;
    ensure!(said.contains("edu works behind the IOMMU"), "{said}");
    Ok(said)
}

fn present(guest: &mut Guest, slot: u8) -> Result<()> {
    let folder = format!("/sys/bus/pci/devices/{}", at(slot));
    guest.eventually(&format!("ls -d {folder}"), |found| found == folder)?;
    Ok(())
}

/// The type of address space that the guest's kernel uses for a device.
fn domain(guest: &mut Guest, slot: u8) -> Result<String> {
    guest.run(&format!(
        "cat /sys/bus/pci/devices/{}/iommu_group/type",
        at(slot)
    ))
}

fn own_addresses(context: &Context) -> Result<()> {
    // The file exists once the first device is bound.
    HostDevice::take(EDU, 0)?;
    let _hidden = Hidden::new()?;
    own_addresses_and_no_others(context)?;
    let log = std::fs::read_to_string(context.dir.join("gantry.log"))?;
    ensure!(log.contains("comes through its IOMMU group"), "{log}");
    Ok(())
}

fn own_addresses_by_iommufd(context: &Context) -> Result<()> {
    own_addresses_and_no_others(context)?;
    came_through_iommufd(&context.dir)
}

fn came_through_iommufd(folder: &Path) -> Result<()> {
    let log = std::fs::read_to_string(folder.join("gantry.log"))?;
    ensure!(log.contains("comes through iommufd"), "{log}");
    Ok(())
}

fn own_addresses_and_no_others(context: &Context) -> Result<()> {
    let edu = HostDevice::take(EDU, 0)?;
    let hosts = HostPage::beyond(512 * MIB)?;
    // The segment exists because the device refers to it.
    let more = json!({
        "platform": null,
        "devices": [{"path": edu.path, "id": "edu", "iommu_segment": 1, "pci_device_id": 9}],
    });
    let (gantry, mut guest) = Gantry::boot(&context.dir, vm(more))?;
    let bdf = &gantry.info()?["device_tree"]["edu"]["pci_bdf"];
    ensure!(*bdf == at(9), "the device is at {bdf}");
    // Without a driver that maps something, it cannot reach any address.
    guest.run(&format!("agent edu-write-outside {:#x}", hosts.address))?;
    hosts.check()?;
    gantry.log_until(&format!("{:#x}", hosts.address))?;
    ensure!(
        guest.status_of("agent edu-check")?.0 != 0,
        "DMA without an address"
    );
    kept_away(&gantry, &mut guest)?;
    ensure!(
        locked(&gantry)? == 0,
        "{} MiB stay locked",
        locked(&gantry)?
    );
    gantry.act("vm.reboot")?;
    let mut guest = Guest::connect(&gantry.serial)?;
    guest.wait_ready()?;
    edu_works(&mut guest).map(|_| ())
}

/// Addresses from which the device's program keeps it are in the log.
fn kept_away(gantry: &Gantry, guest: &mut Guest) -> Result<()> {
    for _ in 0..3 {
        // The host's kernel reports about three faults in five seconds, and QEMU's IOMMU loses a
        // fault that arrives before the previous one was read.
        thread::sleep(Duration::from_secs(6));
        let said = edu_works(guest)?;
        let kept_from = said.split_once("did not reach ").context("no addresses")?.1;
        let mut addresses = kept_from.split(" and ");
        thread::sleep(Duration::from_secs(1));
        let log = gantry.log();
        if addresses.any(|address| log.contains(&format!("fault addr {} ", address.trim()))) {
            return Ok(());
        }
    }
    let log = gantry.log();
    bail!("of what the device was kept from, the log has nothing: {log}")
}

fn nvme(context: &Context) -> Result<()> {
    // The file exists once the first device is bound.
    let nvme = HostDevice::take(NVME, 0)?;
    let _hidden = Hidden::new()?;
    nvme_works(context, &nvme)
}

fn nvme_by_iommufd(context: &Context) -> Result<()> {
    nvme_works(context, &HostDevice::take(NVME, 0)?)?;
    came_through_iommufd(&context.dir.join("strict-1"))
}

fn nvme_works(context: &Context, nvme: &HostDevice) -> Result<()> {
    for (strict, domain_type) in [(1, "DMA"), (0, "DMA-FQ")] {
        let folder = context.dir.join(format!("strict-{strict}"));
        std::fs::create_dir(&folder)?;
        let more = json!({
            "devices": [{"path": nvme.path, "id": "nvme", "iommu": true, "pci_device_id": 12}],
        });
        let config = vm_with(&format!("iommu.strict={strict}"), more);
        let (gantry, mut guest) = Gantry::boot(&folder, config)?;
        let bdf = &gantry.info()?["device_tree"]["nvme"]["pci_bdf"];
        ensure!(*bdf == at(12), "the device is at {bdf}");
        disk_works(&mut guest, "small")?;
        let kind = domain(&mut guest, 12)?;
        ensure!(
            kind == domain_type,
            "its addresses are of the kind {kind:?}"
        );
        guest.run(
            "dd if=/dev/urandom of=/tmp/p bs=1M count=16 2>/dev/null && \
             dd if=/tmp/p of=/dev/nvme0n1 bs=1M conv=fsync 2>/dev/null && \
             echo 3 > /proc/sys/vm/drop_caches",
        )?;
        let sum = guest.run("md5sum < /tmp/p")?;
        let read = guest.run("dd if=/dev/nvme0n1 bs=1M count=16 2>/dev/null | md5sum")?;
        ensure!(read == sum, "{read} instead of {sum}");
        // Its queues and what the driver keeps mapped, not the guest's whole memory.
        let locked = locked(&gantry)?;
        ensure!(locked < 64, "{locked} MiB are locked");
        gantry.put("vm.remove-device", json!({"id": "nvme"}))?;
        gone(&gantry, "nvme")?;
    }
    Ok(())
}

/// Number of plug and unplug rounds.
const CYCLES: usize = 10;

fn cycles(context: &Context) -> Result<()> {
    let nvme = HostDevice::take(NVME, 0)?;
    let _hidden = Hidden::new()?;
    let (gantry, mut guest) = Gantry::boot(&context.dir, vm(json!({})))?;
    guest.run(
        "(while true; do dd if=/dev/nvme0n1 of=/dev/null bs=64k count=64 2>/dev/null || \
         sleep 0.1; echo 3 > /proc/sys/vm/drop_caches; done) & true",
    )?;
    let config = json!({"path": nvme.path, "id": "nvme", "iommu": true, "pci_device_id": 12});
    let mut before = None;
    for round in 0..CYCLES {
        gantry.put("vm.add-device", config.clone())?;
        if round % 3 == 0 {
            disk_works(&mut guest, &round.to_string())?;
        } else {
            guest.eventually("ls /dev/nvme0n1", |text| text == "/dev/nvme0n1")?;
        }
        // Sometimes against the guest's will.
        let force = round % 4 == 3;
        gantry.put("vm.remove-device", json!({"id": "nvme", "force": force}))?;
        gone(&gantry, "nvme")?;
        guest.eventually("ls /dev/nvme0n1 2>/dev/null || echo gone", |text| {
            text == "gone"
        })?;
        ensure!(
            locked(&gantry)? == 0,
            "{} MiB stay locked",
            locked(&gantry)?
        );
        before.get_or_insert(holdings(&gantry)?);
    }
    let after = holdings(&gantry)?;
    ensure!(
        before.is_some_and(|before| !has_leaked(before, after, CYCLES)),
        "descriptors, mappings and threads: {before:?} before, {after:?} after {CYCLES} rounds"
    );
    gantry.put("vm.add-device", config)?;
    disk_works(&mut guest, "last")
}

fn swap(context: &Context) -> Result<()> {
    let (first, second) = (HostDevice::take(EDU, 0)?, HostDevice::take(EDU, 1)?);
    let serial = context.dir.join("serial");
    std::fs::create_dir(&serial)?;
    let mut gantry = Gantry::start(&context.dir, &[])?;
    gantry.serial = serial.join("serial.sock");
    let mut guest = gantry.create_and_boot(vm(json!({
        "landlock_enable": true,
        "serial": {"mode": "Socket", "socket": gantry.serial},
    })))?;
    let config = json!({"path": first.path, "id": "edu", "iommu_segment": 1, "pci_device_id": 9});
    gantry.put("vm.add-device", config)?;
    present(&mut guest, 9)?;
    edu_works(&mut guest)?;
    guest.run("(while true; do agent edu-vfio-copy >> /tmp/load 2>&1; sleep 0.1; done) & true")?;
    for to in [&second, &first, &second] {
        guest.eventually("cat /tmp/load", |text| text.contains("copied"))?;
        let info = gantry.swap_device("edu", &to.path)?;
        let bdf = &info["device_tree"]["edu"]["pci_bdf"];
        ensure!(*bdf == at(9), "the device is at {bdf}");
        guest.run("! grep 'byte' /tmp/load")?;
        guest.run("echo > /tmp/load")?;
    }
    guest
        .eventually("cat /tmp/load", |text| text.contains("copied"))
        .map(|_| ())
}

fn killed(context: &Context) -> Result<()> {
    let edu = HostDevice::take(EDU, 0)?;
    let more = json!({"devices": [{"path": edu.path, "iommu": true}]});
    for way in ["by-iommufd", "by-group"] {
        let _hidden = (way == "by-group").then(Hidden::new).transpose()?;
        let folder = context.dir.join(way);
        std::fs::create_dir(&folder)?;
        let (mut gantry, mut guest) = Gantry::boot(&folder, vm(more.clone()))?;
        guest.run("agent edu-vfio-copy")?;
        guest.run("(while true; do agent edu-vfio-copy; done) > /dev/null 2>&1 & true")?;
        gantry.kill()?;
    }
    // The host's IOMMU keeps nothing of the killed processes.
    let (_gantry, mut guest) = Gantry::boot(&context.dir, vm(more))?;
    edu_works(&mut guest).map(|_| ())
}

fn bypass(context: &Context) -> Result<()> {
    let edu = HostDevice::take(EDU, 0)?;
    let _hidden = Hidden::new()?;
    let more = json!({
        "memory": {"hotplug_size": 512 * MIB, "hotplug_method": "VirtioMem"},
        "devices": [{"path": edu.path, "id": "edu", "iommu": true, "pci_device_id": 9}],
    });
    let config = vm_with("iommu.passthrough=1", more);
    let (gantry, mut guest) = Gantry::boot(&context.dir, config)?;
    guest.run("echo online_movable > /sys/devices/system/memory/auto_online_blocks")?;
    ensure!(locked(&gantry)? == 0, "{} MiB at first", locked(&gantry)?);
    // The kernel maps memory for a device when a driver is bound, and the mapping remains when it
    // is unbound.
    guest.run("agent edu-vfio-copy")?;
    let folder = format!("/sys/bus/pci/devices/{}", at(9));
    guest.run(&format!(
        "echo > {folder}/driver_override; echo {} > {folder}/driver/unbind",
        at(9)
    ))?;
    let kind = domain(&mut guest, 9)?;
    ensure!(kind == "identity", "its addresses are of the kind {kind:?}");
    ensure!(locked(&gantry)? == 512, "{} MiB of 512", locked(&gantry)?);
    guest.run("agent edu-check")?;
    gantry.put("vm.resize", json!({"desired_ram": 768 * MIB}))?;
    gantry.info_until("memory has another size", |info| {
        info["memory_actual_size"] == 768 * MIB
    })?;
    ensure!(locked(&gantry)? == 768, "{} MiB of 768", locked(&gantry)?);
    guest.eventually("agent edu-check", |said| {
        let address = said.split_once("with the page at 0x").map(|(_, rest)| rest);
        let address = address.and_then(|text| u64::from_str_radix(text.trim(), 16).ok());
        address.is_some_and(|address| address >= 512 * MIB)
    })?;
    gantry.put("vm.resize", json!({"desired_ram": 512 * MIB}))?;
    gantry.info_until("memory has another size", |info| {
        info["memory_actual_size"] == 512 * MIB
    })?;
    ensure!(locked(&gantry)? == 512, "{} MiB of 512", locked(&gantry)?);
    guest.run("agent edu-check")?;
    // A program's own address space, and back.
    edu_works(&mut guest)?;
    ensure!(locked(&gantry)? == 512, "{} MiB of 512", locked(&gantry)?);
    gantry.put("vm.remove-device", json!({"id": "edu"}))?;
    gone(&gantry, "edu")?;
    ensure!(locked(&gantry)? == 0, "{} MiB without", locked(&gantry)?);
    Ok(())
}

fn bypass_by_iommufd(context: &Context) -> Result<()> {
    let edu = HostDevice::take(EDU, 0)?;
    let more = json!({"devices": [{"path": edu.path, "iommu": true, "pci_device_id": 9}]});
    let config = vm_with("iommu.passthrough=1", more);
    let (gantry, mut guest) = Gantry::boot(&context.dir, config)?;
    // All RAM is mapped for the device when a driver is bound and when the program has ended, and
    // none of it in between.
    edu_works(&mut guest)?;
    ensure!(locked(&gantry)? == 512, "{} MiB of 512", locked(&gantry)?);
    came_through_iommufd(&context.dir)
}

fn peers(context: &Context) -> Result<()> {
    let (one, other) = (HostDevice::take(EDU, 0)?, HostDevice::take(EDU, 1)?);
    let _hidden = Hidden::new()?;
    let more = json!({"devices": [
        {"path": one.path, "id": "one", "iommu": true, "pci_device_id": 9},
        {"path": other.path, "id": "other", "iommu": true, "pci_device_id": 10},
    ]});
    let (_gantry, mut guest) = Gantry::boot(&context.dir, vm(more))?;
    let said = guest.run("agent edu-vfio-peers")?;
    ensure!(said.contains("they reach each other"), "{said}");
    edu_works(&mut guest).map(|_| ())
}

fn refused(context: &Context) -> Result<()> {
    let edu = HostDevice::take(EDU, 0)?;
    let [first, second] = [EDU_OF_TWO, EDU_OF_TWO + 1].map(|index| HostDevice::take(EDU, index));
    let (first, second) = (first?, second?);
    let disk = context.dir.join("disk.raw");
    super::disks::image(&disk, MIB)?;
    let (gantry, mut guest) = Gantry::boot(&context.dir, vm(json!({})))?;
    let add =
        |config: Value, status, words| gantry.refused("vm.add-device", Some(config), status, words);
    let config = json!({"path": edu.path, "id": "x", "iommu_segment": 2});
    add(config, 400, "there is no PCI segment 2")?;
    let config = json!({"path": disk, "id": "x", "image_type": "Raw", "pci_segment": 1});
    gantry.refused(
        "vm.add-disk",
        Some(config),
        400,
        "can hold physical devices only",
    )?;
    // A group has one address space.
    let config = |device: &HostDevice, iommu| json!({"path": device.path, "iommu": iommu});
    gantry.put("vm.add-device", config(&first, true))?;
    for iommu in [true, false] {
        add(config(&second, iommu), 500, "does not tell their DMA apart")?;
    }
    gantry.put("vm.add-device", json!({"path": edu.path, "iommu": true}))?;
    guest.eventually("ls -d /sys/bus/pci/devices/0001:00:*.0 | wc -l", |count| {
        count == "3"
    })?;
    // Without an IOMMU at start, there is none.
    let folder = context.dir.join("without");
    std::fs::create_dir(&folder)?;
    let without = Gantry::start(&folder, &[])?;
    let config = json!({
        "payload": {"kernel": crate::gantry::BZIMAGE},
        "devices": [{"path": edu.path, "iommu": true}],
    });
    without.put("vm.create", config)?;
    without.refused("vm.boot", None, 400, "the VM has no virtual IOMMU")?;
    let named = json!({"path": second.path, "id": "x", "iommu_segment": 0});
    add(named, 400, "PCI segment 0 is not behind the virtual IOMMU")?;
    Ok(())
}
