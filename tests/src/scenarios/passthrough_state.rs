//! What a guest may do to the state of a physical device: sleep, resets, interrupts.

use anyhow::{Result, ensure};
use serde_json::json;

use super::{Context, Entry};
use crate::{
    gantry::Gantry,
    guest::Guest,
    host_device::{HostDevice, NVME},
    net::sh,
};

pub const SCENARIOS: &[Entry] = &[(
    "passthrough: a guest that puts its device to sleep or resets it goes on",
    sleep_and_reset,
)];

/// Writes a pattern to the guest's NVMe disk and reads it back.
fn disk_works(guest: &mut Guest, pattern: &str) -> Result<()> {
    guest.eventually("ls /dev/nvme0n1", |text| text == "/dev/nvme0n1")?;
    guest.run(&format!(
        "yes {pattern} | dd of=/tmp/pattern bs=1M count=4 iflag=fullblock 2>/dev/null; \
         dd if=/tmp/pattern of=/dev/nvme0n1 bs=1M conv=fsync 2>/dev/null && \
         echo 3 > /proc/sys/vm/drop_caches && \
         dd if=/dev/nvme0n1 bs=1M count=4 2>/dev/null | cmp - /tmp/pattern"
    ))?;
    Ok(())
}

/// Interrupt vectors of L1 that physical devices have.
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
