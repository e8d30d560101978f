//! The virtual IOMMU itself, without devices behind it.

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use super::{
    Context, Entry,
    lifecycle::reconnect,
    snapshots::{restored, take},
};
use crate::{
    gantry::{Gantry, merge, with_iommu_driver},
    guest::Guest,
};

/// The scenarios, on the board whose guests may have a kernel that supports virtual IOMMUs.
pub const SCENARIOS: &[Entry] = &[
    (
        "virtual IOMMU: a stock guest finds it, and again after a reboot",
        found,
    ),
    (
        "virtual IOMMU: it is there after a restore, and for the next driver",
        restore,
    ),
    (
        "virtual IOMMU: it stays, and a guest without a driver for it boots",
        stays,
    ),
];

/// A guest whose second segment is behind an IOMMU.
fn behind() -> Value {
    let mut config = with_iommu_driver("");
    let platform = json!({"num_pci_segments": 2, "iommu_segments": [1]});
    merge(&mut config, json!({"platform": platform}));
    config
}

/// Checks that the guest's driver is bound to the IOMMU, whose addresses have this many bits.
fn is_bound(guest: &mut Guest, bits: u8) -> Result<()> {
    let bound = guest.run("ls -d /sys/bus/virtio/drivers/virtio_iommu/virtio*")?;
    let name = bound.rsplit('/').next().unwrap_or("");
    let seen = guest.run(&format!("readlink -f /sys/bus/virtio/devices/{name}"))?;
    ensure!(seen.contains("0000:00:01.0"), "it is at {seen}");
    let iommus = guest.run("ls /sys/class/iommu")?;
    ensure!(iommus == "0000:00:01.0", "IOMMUs: {iommus}");
    let said = guest.run("dmesg | grep virtio_iommu")?;
    for words in [
        format!("input address: {bits} bits"),
        "page mask: 0xfffffffffffff000".to_owned(),
    ] {
        ensure!(said.contains(&words), "no {words:?} in {said}");
    }
    // The machine's table describes it before any device is found, so that devices wait for its
    // driver.
    let table = guest.run("od -An -tx1 -j64 -N20 /sys/firmware/acpi/tables/VIOT | tr -d '\\n'")?;
    // All of segment 1 except its host bridge.
    let range = "01 00 18 00 08 00 01 00 01 00 01 00 08 00 ff ff 30 00 00 00";
    ensure!(table.trim() == range, "a range of {table}");
    Ok(())
}

fn found(context: &Context) -> Result<()> {
    let (gantry, mut guest) = Gantry::boot(&context.dir, behind())?;
    is_bound(&mut guest, 48)?;
    guest.send("reboot -f")?;
    let mut guest = reconnect(&gantry, guest)?;
    is_bound(&mut guest, 48)?;
    gantry.act("vm.shutdown")?;
    gantry.act("vm.delete")?;
    let mut config = behind();
    merge(
        &mut config,
        json!({"platform": {"iommu_address_width_bits": 39}}),
    );
    let mut guest = gantry.create_and_boot(config)?;
    is_bound(&mut guest, 39)
}

fn restore(context: &Context) -> Result<()> {
    let (mut gantry, mut guest) = Gantry::boot(&context.dir, behind())?;
    is_bound(&mut guest, 48)?;
    take(&gantry, context)?;
    gantry.kill()?;
    let (_gantry, mut guest) = restored(context, json!({}))?;
    is_bound(&mut guest, 48)?;
    // The driver resets it, and sets it up again.
    guest.run(
        "cd /sys/bus/virtio/drivers/virtio_iommu; v=$(ls -d virtio*); dmesg -c > /dev/null; \
         echo $v > unbind; [ ! -e $v ] && echo $v > bind",
    )?;
    is_bound(&mut guest, 48)
}

fn stays(context: &Context) -> Result<()> {
    let more = json!({"platform": {"num_pci_segments": 2, "iommu_segments": [1]}});
    let (gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    let id = guest.run("cat /sys/bus/pci/devices/0000:00:01.0/device")?;
    ensure!(id == "0x1057", "slot 1 has {id}");
    let body = json!({"id": "_iommu"});
    gantry.refused("vm.remove-device", Some(body), 400, "_iommu")
}
