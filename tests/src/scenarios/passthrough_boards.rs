//! Physical devices behind the IOMMUs of real hosts, each on a board of its own.

use anyhow::{Result, ensure};
use serde_json::json;

use super::{
    Context, Scenario,
    hotplug::gone,
    passthrough::edu_works,
    passthrough_state::{MIB, disk_works},
};
use crate::{
    edu::HostPage,
    gantry::Gantry,
    guest::Guest,
    host_device::{EDU, HostDevice, NVME},
    net::sh,
    rig::Board,
};

/// The scenarios, each of which needs an L1 of its own.
pub fn scenarios() -> Vec<Scenario> {
    let scenario = |name, run, board| Scenario { name, run, board };
    vec![
        scenario(
            "boards: Intel's IOMMU with 39 address bits",
            intel39,
            Board::Intel39,
        ),
        scenario("boards: AMD's IOMMU", amd, Board::Amd),
        scenario(
            "boards: the paravirtual IOMMU, without interrupt remapping",
            paravirtual,
            Board::Virtio,
        ),
    ]
}

fn intel39(context: &Context) -> Result<()> {
    let gantry = devices_work(context, 1 << 39)?;
    gantry.log_until("was kept from memory").map(|_| ())
}

/// The first address that AMD's IOMMU does not translate.
const HYPERTRANSPORT: u64 = 0xfd_0000_0000;

/// The log is not checked for faults: the kernel does not report them with QEMU's model of this
/// IOMMU.
fn amd(context: &Context) -> Result<()> {
    devices_work(context, HYPERTRANSPORT).map(|_| ())
}

fn paravirtual(context: &Context) -> Result<()> {
    const UNSAFE: &str = "/sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts";
    let edu = HostDevice::take(EDU, 0)?;
    // A device could send any interrupt to the host, so the host's owner must allow this.
    let gantry = Gantry::start(&context.dir, &[])?;
    let config = json!({
        "payload": {"kernel": crate::gantry::BZIMAGE},
        "devices": [{"path": edu.path}],
    });
    gantry.put("vm.create", config)?;
    gantry.refused("vm.boot", None, 500, "allow_unsafe_interrupts")?;
    drop(gantry);
    sh(&format!("echo Y > {UNSAFE}"))?;
    let gantry = devices_work(context, 1 << 48)?;
    gantry.log_until("was kept from memory").map(|_| ())
}

/// A VM with an edu and an NVMe device exercises them fully, with its 64-bit BAR below `end`, and
/// writes nothing outside guest memory.
fn devices_work(context: &Context, end: u64) -> Result<Gantry> {
    let (edu, nvme) = (HostDevice::take(EDU, 0)?, HostDevice::take(NVME, 0)?);
    let more = json!({
        "memory": {"size": 512 * MIB},
        "devices": [
            {"path": edu.path, "id": "edu", "pci_device_id": 9},
            {"path": nvme.path, "id": "nvme", "pci_device_id": 12},
        ],
    });
    let (gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    edu_works(&mut guest)?;
    disk_works(&mut guest, "one")?;
    let bar = bar_of(&mut guest, "0000:00:0c.0")?;
    ensure!(
        (1 << 32..end).contains(&bar),
        "the 64-bit BAR is at {bar:#x}"
    );
    let hosts = HostPage::beyond(512 * MIB)?;
    guest.run(&format!("agent edu-write-outside {:#x}", hosts.address))?;
    hosts.check()?;
    edu_works(&mut guest)?;
    gantry.put("vm.remove-device", json!({"id": "nvme"}))?;
    gone(&gantry, "nvme")?;
    let config = json!({"path": nvme.path, "id": "nvme", "pci_device_id": 12});
    gantry.put("vm.add-device", config)?;
    disk_works(&mut guest, "two")?;
    Ok(gantry)
}

/// Address of a device's first BAR in the guest.
fn bar_of(guest: &mut Guest, bdf: &str) -> Result<u64> {
    let text = guest.run(&format!("head -n 1 /sys/bus/pci/devices/{bdf}/resource"))?;
    let digits = text.split_whitespace().next().unwrap_or("");
    Ok(u64::from_str_radix(digits.trim_start_matches("0x"), 16)?)
}
