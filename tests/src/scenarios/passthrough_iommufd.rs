//! Physical devices through iommufd, with a kernel that also has groups.

use std::{fs, path::PathBuf};

use anyhow::{Context as _, Result, ensure};
use serde_json::json;

use super::{
    Context, Entry,
    hotplug::gone,
    passthrough::{self, edu_works, node},
    passthrough_state::{self, MIB, disk_works, locked},
    passthrough_topology, passthrough_unprivileged,
};
use crate::{
    gantry::{BZIMAGE, Gantry},
    guest::Guest,
    host_device::{EDU, HostDevice, NVME},
    net::sh,
};

/// The scenarios, which share an L1.
pub const SCENARIOS: &[Entry] = &[
    ("iommufd: devices at start, and no group is open", at_start),
    (
        "iommufd: a device cannot reach beyond the guest's memory",
        isolation,
    ),
    (
        "iommufd: kill -9, and the device starts again in another VM",
        killed,
    ),
    (
        "iommufd: plugged and unplugged again and again leaves nothing behind",
        cycles,
    ),
    ("iommufd: swapped for another device, and back", swap),
    (
        "iommufd: memory is locked as the guest plugs it, and a device reaches it",
        memory,
    ),
    (
        "iommufd: functions without a reset of their own are reset together",
        reset_together,
    ),
    (
        "iommufd: a device comes to a VM that Landlock confines",
        landlock,
    ),
    (
        "iommufd: a device that cannot be given says why, and leaves nothing open",
        refused,
    ),
    (
        "iommufd: groups are used where it is missing, unless it is asked for",
        missing,
    ),
    (
        "iommufd: a user who is not root is told what is missing",
        unprivileged,
    ),
];

/// The open files of VFIO and the IOMMU of a process, in order.
fn open_files(gantry: &Gantry) -> Result<Vec<String>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(format!("/proc/{}/fd", gantry.pid()))? {
        let target = fs::read_link(entry?.path()).unwrap_or_default();
        let target = target.to_string_lossy();
        if target.starts_with("/dev/vfio") || target == "/dev/iommu" {
            files.push(target.into_owned());
        }
    }
    files.sort();
    Ok(files)
}

/// Ends a scenario that also runs with groups: checks that they were not used this time.
fn without_groups(context: &Context) -> Result<()> {
    let log = fs::read_to_string(context.dir.join("gantry.log"))?;
    ensure!(
        log.contains("comes through iommufd") && !log.contains("comes through its IOMMU group"),
        "{log}"
    );
    Ok(())
}

fn at_start(context: &Context) -> Result<()> {
    let (edu, nvme) = (HostDevice::take(EDU, 0)?, HostDevice::take(NVME, 0)?);
    let more = json!({
        "memory": {"size": 512 * MIB},
        "devices": [
            {"path": edu.path, "id": "edu", "pci_device_id": 9},
            {"path": nvme.path, "id": "nvme", "pci_device_id": 12},
        ],
    });
    let (gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    let mut nodes = [node(&edu)?, node(&nvme)?];
    nodes.sort();
    let is_open = |expected: &[&str]| -> Result<()> {
        let mut files = open_files(&gantry)?;
        // A mapping needs no descriptor of its own, and vfio-pci needs none for interrupts.
        files.dedup();
        ensure!(files == expected, "{files:?} are open, not {expected:?}");
        Ok(())
    };
    is_open(&["/dev/iommu", &nodes[0], &nodes[1]])?;
    edu_works(&mut guest)?;
    disk_works(&mut guest, "one")?;
    // All addresses except those of interrupt messages: what the IOMMU of this board translates.
    gantry.log_until("devices reach the addresses 0x0-0xfedfffff, 0xfef00000-0xffffffffffff\n")?;
    ensure!(
        locked(&gantry)? == 512,
        "{} MiB are locked",
        locked(&gantry)?
    );
    gantry.put("vm.remove-device", json!({"id": "edu"}))?;
    gone(&gantry, "edu")?;
    is_open(&["/dev/iommu", &node(&nvme)?])?;
    disk_works(&mut guest, "two")?;
    gantry.put("vm.remove-device", json!({"id": "nvme"}))?;
    gone(&gantry, "nvme")?;
    is_open(&[])?;
    ensure!(locked(&gantry)? == 0, "{} MiB are locked", locked(&gantry)?);
    gantry.put("vm.add-device", json!({"path": edu.path, "id": "edu"}))?;
    guest.eventually("agent edu-check", |said| said.contains("edu works"))?;
    // The kernel does not map another device's memory, and nobody misses it.
    gantry.put("vm.add-device", json!({"path": nvme.path, "id": "nvme"}))?;
    disk_works(&mut guest, "three")?;
    edu_works(&mut guest)?;
    gantry
        .log_until("(peer-to-peer), and have to go through RAM")
        .map(|_| ())
}

fn isolation(context: &Context) -> Result<()> {
    passthrough::isolation(context)?;
    without_groups(context)
}

fn killed(context: &Context) -> Result<()> {
    passthrough::killed(context)?;
    without_groups(context)
}

fn cycles(context: &Context) -> Result<()> {
    passthrough::cycles(context)?;
    without_groups(context)
}

fn swap(context: &Context) -> Result<()> {
    passthrough::swap(context)?;
    without_groups(context)
}

fn reset_together(context: &Context) -> Result<()> {
    passthrough_topology::reset_together(context)?;
    without_groups(context)
}

fn landlock(context: &Context) -> Result<()> {
    passthrough_state::landlock(context)?;
    without_groups(context)
}

/// The guest page that the device reads and writes.
fn page_of_dma(guest: &mut Guest) -> Result<u64> {
    let said = guest.run("agent edu-check")?;
    let address = said
        .split_once("with the page at 0x")
        .with_context(|| said.clone())?
        .1;
    Ok(u64::from_str_radix(address.trim(), 16)?)
}

fn memory(context: &Context) -> Result<()> {
    passthrough_state::memory(context)?;
    without_groups(context)?;
    // With ACPI hot-plug, one module at a time.
    let edu = HostDevice::take(EDU, 0)?;
    let folder = context.dir.join("second");
    fs::create_dir(&folder)?;
    let more = json!({
        "memory": {"hotplug_size": 512 * MIB},
        "devices": [{"path": edu.path, "id": "edu"}],
    });
    let (gantry, mut guest) = Gantry::boot(&folder, more)?;
    guest.run("echo online_movable > /sys/devices/system/memory/auto_online_blocks")?;
    let before = page_of_dma(&mut guest)?;
    ensure!(before < 256 * MIB, "the guest has a page at {before:#x}");
    gantry.put("vm.resize", json!({"desired_ram": 512 * MIB}))?;
    guest.eventually("agent edu-check", |said| {
        let address = said.split_once("with the page at 0x").map(|(_, rest)| rest);
        let address = address.and_then(|text| u64::from_str_radix(text.trim(), 16).ok());
        address.is_some_and(|address| address >= 256 * MIB)
    })?;
    ensure!(
        locked(&gantry)? == 512,
        "{} MiB are locked",
        locked(&gantry)?
    );
    Ok(())
}

fn refused(context: &Context) -> Result<()> {
    passthrough::refused(context)?;
    without_groups(context)?;
    // A VM has the device through its group: the other kind of refusal.
    let edu = HostDevice::take(EDU, 0)?;
    let group = fs::read_link(edu.path.join("iommu_group"))?;
    let group = PathBuf::from("/dev/vfio").join(group.file_name().context("no group")?);
    let other = fs::File::options().read(true).write(true).open(group)?;
    let third = context.dir.join("again");
    fs::create_dir(&third)?;
    let gantry = Gantry::start(&third, &[])?;
    let config = json!({"payload": {"kernel": BZIMAGE}, "devices": [{"path": edu.path}]});
    gantry.put("vm.create", config)?;
    gantry.refused("vm.boot", None, 500, "another VM has a device of it")?;
    let files = open_files(&gantry)?;
    ensure!(files.is_empty(), "{files:?} are open");
    drop(other);
    gantry.act("vm.boot")?;
    let files = open_files(&gantry)?;
    ensure!(files.contains(&node(&edu)?), "{files:?} are open");
    Ok(())
}

fn unprivileged(context: &Context) -> Result<()> {
    passthrough_unprivileged::with_iommufd(context)?;
    without_groups(context)
}

/// The kernel's file for iommufd, which is moved away until this is dropped.
pub struct Hidden;

impl Hidden {
    /// Moves the file away.
    pub fn new() -> Result<Self> {
        sh("mv /dev/iommu /dev/iommu.hidden")?;
        Ok(Self)
    }
}

impl Drop for Hidden {
    fn drop(&mut self) {
        // Otherwise, the next scenario reports that it is missing.
        let _ = sh("mv /dev/iommu.hidden /dev/iommu");
    }
}

fn missing(context: &Context) -> Result<()> {
    let edu = HostDevice::take(EDU, 0)?;
    let hidden = Hidden::new()?;
    let gantry = Gantry::start(&context.dir, &[])?;
    let config = json!({
        "payload": {"kernel": BZIMAGE},
        "platform": {"iommufd": true},
        "devices": [{"path": edu.path}],
    });
    gantry.put("vm.create", config)?;
    gantry.refused("vm.boot", None, 500, "cannot open /dev/iommu")?;
    gantry.act("vm.delete")?;
    let more = json!({"devices": [{"path": edu.path, "id": "edu"}]});
    let mut guest = gantry.create_and_boot(more)?;
    edu_works(&mut guest)?;
    let files = open_files(&gantry)?;
    ensure!(
        files.iter().any(|file| file == "/dev/vfio/vfio"),
        "{files:?} are open"
    );
    drop(hidden);
    // All devices use the interface of the VM's first device.
    let other = HostDevice::take(EDU, 1)?;
    gantry.put("vm.add-device", json!({"path": other.path}))?;
    gantry.log_until(&format!("{} comes through its IOMMU group", other.address))?;
    Ok(())
}
