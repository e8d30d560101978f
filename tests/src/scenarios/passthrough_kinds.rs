//! Physical devices of other kinds, and in other slots.

use anyhow::{Result, ensure};
use serde_json::json;

use super::{Context, Entry, hotplug::gone, network::reaches, passthrough::edu_works};
use crate::{
    gantry::Gantry,
    guest::Guest,
    host_device::{CARD, EDU, EDU_BEHIND_PORT, EDU_OF_TWO, HostDevice, TESTDEV},
    rig::l1::{FILE, FILE_LINE, FILE_SERVER, FILE_SIZE},
};

pub const SCENARIOS: &[Entry] = &[
    (
        "passthrough: I/O ports of a device, on bus 0 and behind a root port",
        ports,
    ),
    (
        "passthrough: a ROM, a reset by the bus, and a second PCI segment",
        rom_and_reset,
    ),
    (
        "passthrough: two functions of one slot, which share a group",
        functions,
    ),
    ("passthrough: traffic of a network card", card),
    (
        "passthrough: one device reaches the other's memory, and no longer when that has gone",
        peers,
    ),
    (
        "passthrough: no device reaches another's memory if that is switched off",
        no_peers,
    ),
];

fn ports(context: &Context) -> Result<()> {
    let device = HostDevice::take(TESTDEV, 0)?;
    let on_bus_0 = json!({"path": device.path, "id": "testdev", "pci_device_id": 9});
    let behind_port = json!({"path": device.path, "id": "testdev", "parent": "port"});
    let more = json!({"pci_root_ports": [{"id": "port"}], "devices": [on_bus_0]});
    let (gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    let mut answer = |bdf: &str| -> Result<()> {
        present(&mut guest, bdf)?;
        guest.run(&format!("echo 1 > /sys/bus/pci/devices/{bdf}/enable"))?;
        // The first of its port tests; its name is preceded by 16 bytes.
        let name = guest.run(&format!(
            "cd /sys/bus/pci/devices/{bdf}; \
             printf '\\0' | dd of=resource1 bs=1 conv=notrunc 2>/dev/null; \
             dd if=resource1 bs=1 skip=16 count=17 2>/dev/null"
        ))?;
        ensure!(
            name == "portio-no-eventfd",
            "the ports of {bdf} say {name:?}"
        );
        Ok(())
    };
    answer("0000:00:09.0")?;
    gantry.put("vm.remove-device", json!({"id": "testdev"}))?;
    gone(&gantry, "testdev")?;
    gantry.put("vm.add-device", behind_port)?;
    answer("0000:01:00.0")
}

fn rom_and_reset(context: &Context) -> Result<()> {
    const DEVICE: &str = "/sys/bus/pci/devices/0001:00:07.0";
    let edu = HostDevice::take(EDU, EDU_BEHIND_PORT)?;
    let config = json!({"path": edu.path, "id": "edu", "pci_segment": 1, "pci_device_id": 7});
    let more = json!({"platform": {"num_pci_segments": 2}, "devices": [config]});
    let (gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    edu_works(&mut guest)?;
    // The image takes half of the ROM.
    let pattern: String = (0x40..0x48)
        .map(|at| format!("{:02x}", at ^ 0x5a))
        .collect();
    let rom = guest.run(&format!(
        "echo 1 > {DEVICE}/rom; cat {DEVICE}/rom > /tmp/rom; wc -c < /tmp/rom; \
         dd if=/tmp/rom bs=1 skip=64 count=8 2>/dev/null | od -A n -t x1 | tr -d ' '"
    ))?;
    ensure!(rom == format!("4096\n{pattern}"), "the ROM has {rom:?}");
    gantry.put("vm.remove-device", json!({"id": "edu"}))?;
    gone(&gantry, "edu")?;
    gantry.put("vm.add-device", config)?;
    guest.eventually(&format!("ls -d {DEVICE}"), |found| found == DEVICE)?;
    edu_works(&mut guest)?;
    let log = gantry.log();
    ensure!(!log.contains("what its last user left"), "{log}");
    // A device that cannot be reset is passed through, too, but with a warning.
    let other = HostDevice::take(EDU, 0)?;
    gantry.put("vm.add-device", json!({"path": other.path}))?;
    gantry.log_until("what its last user left")?;
    Ok(())
}

fn functions(context: &Context) -> Result<()> {
    let [one, other] = [EDU_OF_TWO, EDU_OF_TWO + 1].map(|index| HostDevice::take(EDU, index));
    let (one, other) = (one?, other?);
    let more = json!({"devices": [
        {"path": one.path, "id": "one", "pci_device_id": 9},
        {"path": other.path, "id": "other", "pci_device_id": 10},
    ]});
    let (gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    edu_works(&mut guest)?;
    // The VM keeps the group as long as it has one of them.
    gantry.put("vm.remove-device", json!({"id": "one"}))?;
    gone(&gantry, "one")?;
    edu_works(&mut guest)?;
    let config = json!({"path": one.path, "id": "one", "pci_device_id": 9});
    gantry.put("vm.add-device", config.clone())?;
    present(&mut guest, "0000:00:09.0")?;
    edu_works(&mut guest)?;
    for id in ["other", "one"] {
        gantry.put("vm.remove-device", json!({"id": id}))?;
        gone(&gantry, id)?;
    }
    gantry.put("vm.add-device", config)?;
    present(&mut guest, "0000:00:09.0")?;
    edu_works(&mut guest)
}

fn present(guest: &mut Guest, bdf: &str) -> Result<()> {
    let folder = format!("/sys/bus/pci/devices/{bdf}");
    guest.eventually(&format!("ls -d {folder}"), |found| found == folder)?;
    Ok(())
}

fn card(context: &Context) -> Result<()> {
    let device = HostDevice::take(CARD, 0)?;
    let more = json!({"devices": [{"path": device.path, "id": "card"}]});
    let (gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    for _ in 0..2 {
        guest.eventually("ls /sys/class/net", |names| names.contains("eth0"))?;
        guest.run("ifconfig eth0 10.0.2.15 netmask 255.255.255.0 up")?;
        reaches(&mut guest, FILE_SERVER)?;
        guest.run(&format!("cd /tmp; tftp -g -b 1408 -r {FILE} {FILE_SERVER}"))?;
        let line = FILE_LINE.trim_end();
        guest.run(&format!(
            "yes {line} | head -c {FILE_SIZE} | cmp - /tmp/{FILE}"
        ))?;
        let counted = guest.run("grep -c 'input.0' /proc/interrupts")?;
        ensure!(counted == "1", "{counted} interrupts for what comes in");
        gantry.put("vm.remove-device", json!({"id": "card"}))?;
        gone(&gantry, "card")?;
        gantry.put("vm.add-device", json!({"path": device.path, "id": "card"}))?;
    }
    Ok(())
}

fn peers(context: &Context) -> Result<()> {
    const SYSFS: &str = "/sys/bus/pci/devices";
    let (one, other) = (HostDevice::take(EDU, 0)?, HostDevice::take(EDU, 1)?);
    let config = json!({"path": other.path, "id": "other", "pci_device_id": 10});
    let more = json!({
        "devices": [{"path": one.path, "id": "one", "pci_device_id": 9}, config],
    });
    let (gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    let both_ways = |guest: &mut Guest| -> Result<()> {
        for (from, to) in [("09", "0a"), ("0a", "09")] {
            let [from, to] = [from, to].map(|slot| format!("{SYSFS}/0000:00:{slot}.0"));
            let said = guest.run(&format!("agent edu-peers {from} {to}"))?;
            ensure!(said.contains("they reach each other"), "{said}");
        }
        Ok(())
    };
    both_ways(&mut guest)?;
    let resource = guest.run(&format!("head -n 1 {SYSFS}/0000:00:0a.0/resource"))?;
    let address = resource.split_whitespace().next().unwrap_or("").to_owned();
    gantry.put("vm.remove-device", json!({"id": "other"}))?;
    gone(&gantry, "other")?;
    guest.run(&format!("agent edu-write-outside {address}"))?;
    gantry.log_until("was kept from memory")?;
    gantry.put("vm.add-device", config)?;
    present(&mut guest, "0000:00:0a.0")?;
    both_ways(&mut guest)
}

fn no_peers(context: &Context) -> Result<()> {
    const SYSFS: &str = "/sys/bus/pci/devices";
    let (one, other) = (HostDevice::take(EDU, 0)?, HostDevice::take(EDU, 1)?);
    let more = json!({
        "platform": {"vfio_p2p_dma": false},
        "devices": [
            {"path": one.path, "id": "one", "pci_device_id": 9},
            {"path": other.path, "id": "other", "pci_device_id": 10},
        ],
    });
    let (gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    edu_works(&mut guest)?;
    let [one, other] = ["09", "0a"].map(|slot| format!("{SYSFS}/0000:00:{slot}.0"));
    let (status, said) = guest.status_of(&format!("agent edu-peers {one} {other}"))?;
    ensure!(status != 0, "{said}");
    gantry.log_until("was kept from memory")?;
    edu_works(&mut guest)
}
