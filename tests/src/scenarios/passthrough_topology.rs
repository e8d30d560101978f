//! Slots with several functions, and root ports.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};

use super::{
    Context, Entry,
    hotplug::gone,
    passthrough_state::disk_works,
    snapshots::{restored, url},
};
use crate::{
    gantry::{CMDLINE, Gantry},
    guest::Guest,
    host_device::{EDU, EDU_OF_PORT, EDU_OF_TWO, EXPRESS_CARD, EXPRESS_RNG, HostDevice, NVME},
};

pub const SCENARIOS: &[Entry] = &[
    (
        "passthrough: two functions behind a root port, unplugged and plugged again",
        behind_a_port,
    ),
    (
        "passthrough: two functions of a slot of bus 0, and one that comes too late",
        of_one_slot,
    ),
    (
        "passthrough: one of two functions is swapped, and the other comes back",
        swap_of_one_slot,
    ),
    (
        "passthrough: the interrupt line of a disk behind a root port",
        line,
    ),
    (
        "passthrough: functions without a reset of their own are reset together",
        reset_together,
    ),
    (
        "passthrough: a guest stops the DMA behind a root port, and resets its bus",
        bus_reset,
    ),
    (
        "passthrough: a device with an error is taken away, and comes back",
        failed,
    ),
    (
        "passthrough: extended capabilities, without those that are the host's",
        extended_capabilities,
    ),
    (
        "passthrough: a snapshot keeps root ports, and what comes behind one afterwards works",
        saved_port,
    ),
];

/// Reads a register of configuration space in sysfs.
fn config(run: &mut dyn FnMut(&str) -> Result<String>, bdf: &str, at: usize) -> Result<u32> {
    let digits = run(&format!(
        "dd if={SYSFS}/{bdf}/config bs=4 skip={} count=1 2>/dev/null | od -A n -t x4",
        at / 4
    ))?;
    Ok(u32::from_str_radix(digits.trim(), 16)?)
}

/// The extended capabilities of a device: their offsets by ID.
fn extended(
    run: &mut dyn FnMut(&str) -> Result<String>,
    bdf: &str,
) -> Result<BTreeMap<u32, usize>> {
    let mut found = BTreeMap::new();
    let mut at = 0x100;
    while at != 0 && found.len() < 16 {
        let header = config(run, bdf, at)?;
        if header & 0xffff != 0 {
            found.insert(header & 0xffff, at);
        }
        at = (header >> 20) as usize;
    }
    Ok(found)
}

fn extended_capabilities(context: &Context) -> Result<()> {
    const ERRORS: u32 = 0x0001;
    const SERIAL_NUMBER: u32 = 0x0003;
    const TRANSLATION: u32 = 0x000f;
    const CARD: &str = "0000:01:00.0";
    const RNG: &str = "0000:02:00.0";
    let (card, rng) = (
        HostDevice::take(EXPRESS_CARD, 0)?,
        HostDevice::take(EXPRESS_RNG, 0)?,
    );
    let more = json!({
        "pci_root_ports": [{"id": "one"}, {"id": "other"}],
        "devices": [
            {"path": card.path, "parent": "one"},
            {"path": rng.path, "parent": "other"},
        ],
    });
    let (_gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    let mut in_host = |command: &str| crate::net::sh(command);
    let host = extended(&mut in_host, &rng.address)?;
    ensure!(
        host.contains_key(&TRANSLATION),
        "the host's device has {host:x?}"
    );
    let mut in_guest = |command: &str| guest.run(command);
    let seen = extended(&mut in_guest, RNG)?;
    ensure!(
        seen.keys().eq([&ERRORS]),
        "the guest sees {seen:x?} of {host:x?}"
    );
    let host = extended(&mut in_host, &card.address)?;
    let seen = extended(&mut in_guest, CARD)?;
    ensure!(
        seen.keys().eq([&ERRORS, &SERIAL_NUMBER]),
        "the guest sees {seen:x?} of {host:x?}"
    );
    for (id, at) in &seen {
        ensure!(
            host.get(id) == Some(at),
            "{id:#x} is at {at:#x} instead of {host:x?}"
        );
    }
    let number = seen[&SERIAL_NUMBER];
    for at in [number + 4, number + 8] {
        let [there, here] = [
            config(&mut in_host, &card.address, at)?,
            config(&mut in_guest, CARD, at)?,
        ];
        ensure!(
            there == here && there != 0,
            "{there:#x} and {here:#x} at {at:#x}"
        );
    }
    // The host decides which errors count.
    let mask = seen[&ERRORS] + 8;
    let before = config(&mut in_host, &card.address, mask)?;
    in_guest(&format!(
        "printf '\\377\\377\\377\\377' | dd of={SYSFS}/{CARD}/config bs=4 seek={} \
         conv=notrunc 2>/dev/null",
        mask / 4
    ))?;
    let after = config(&mut in_host, &card.address, mask)?;
    ensure!(
        before == after,
        "the guest's mask is {after:#x} instead of {before:#x}"
    );
    Ok(())
}

/// The devices of a guest.
pub const SYSFS: &str = "/sys/bus/pci/devices";

fn take_two() -> Result<[HostDevice; 2]> {
    let [one, other] = [EDU_OF_TWO, EDU_OF_TWO + 1].map(|index| HostDevice::take(EDU, index));
    Ok([one?, other?])
}

/// Tests registers, DMA and an interrupt of the device at an address in the guest.
pub fn works(guest: &mut Guest, bdf: &str) -> Result<()> {
    let folder = format!("{SYSFS}/{bdf}");
    guest.eventually(&format!("ls -d {folder}"), |found| found == folder)?;
    let said = guest.run(&format!("agent edu-check {folder}"))?;
    ensure!(said.contains("edu works"), "{bdf}: {said}");
    Ok(())
}

/// Checks that the guest's kernel treats the functions as those of one slot.
fn are_one_slot(guest: &mut Guest, functions: [&str; 2]) -> Result<()> {
    for bdf in functions {
        let header = guest.run(&format!(
            "dd if={SYSFS}/{bdf}/config bs=1 skip=14 count=1 2>/dev/null | od -A n -t x1"
        ))?;
        ensure!(header.trim() == "80", "{bdf} has header type {header}");
    }
    Ok(())
}

fn none_left(guest: &mut Guest, functions: [&str; 2]) -> Result<()> {
    for bdf in functions {
        guest.eventually(
            &format!("ls -d {SYSFS}/{bdf} 2>/dev/null || true"),
            str::is_empty,
        )?;
    }
    Ok(())
}

/// First and last addresses that a function decodes or forwards: `resource` in sysfs.
fn resources(guest: &mut Guest, bdf: &str) -> Result<Vec<(u64, u64)>> {
    let text = guest.run(&format!("cat {SYSFS}/{bdf}/resource"))?;
    let ranges = text.lines().filter_map(|line| {
        let mut numbers = line
            .split_whitespace()
            .map(|number| u64::from_str_radix(number.trim_start_matches("0x"), 16));
        Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
    });
    Ok(ranges.filter(|(_, last)| *last > 0).collect())
}

fn behind_a_port(context: &Context) -> Result<()> {
    const PORT: &str = "0000:00:14.0";
    const FUNCTIONS: [&str; 2] = ["0000:01:00.0", "0000:01:00.1"];
    let [one, other] = take_two()?;
    let zero = json!({"path": one.path, "id": "zero", "parent": "port"});
    let first = json!({"path": other.path, "id": "first", "parent": "port", "pci_function": 1});
    let more = json!({
        "pci_root_ports": [{"id": "port", "pci_device_id": 20}, {"id": "spare"}],
        "devices": [zero, first],
    });
    let (gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    let tree = &gantry.info()?["device_tree"];
    ensure!(
        tree["port"]["pci_bdf"] == PORT && tree["port"]["children"] == json!(["first", "zero"]),
        "{tree}"
    );
    ensure!(tree["first"]["pci_bdf"] == FUNCTIONS[1], "{tree}");
    let class = guest.run(&format!("cat {SYSFS}/{PORT}/class"))?;
    ensure!(class == "0x060400", "the port is of class {class}");
    for bdf in FUNCTIONS {
        let path = guest.run(&format!("readlink -f {SYSFS}/{bdf}"))?;
        ensure!(
            path == format!("/sys/devices/pci0000:00/{PORT}/{bdf}"),
            "{path}"
        );
    }
    are_one_slot(&mut guest, FUNCTIONS)?;
    let check = |guest: &mut Guest| -> Result<()> {
        let windows = resources(guest, PORT)?;
        for bdf in FUNCTIONS {
            works(guest, bdf)?;
            let bars = resources(guest, bdf)?;
            let is_forwarded = |bar: &(u64, u64)| {
                let mut windows = windows.iter();
                windows.any(|window| window.0 <= bar.0 && bar.1 <= window.1)
            };
            ensure!(
                !bars.is_empty() && bars.iter().all(is_forwarded),
                "{bdf} is at {bars:x?}, and the port forwards {windows:x?}"
            );
        }
        Ok(())
    };
    check(&mut guest)?;
    // Removing one removes the other one, too.
    gantry.put("vm.remove-device", json!({"id": "first"}))?;
    gone(&gantry, "first")?;
    gone(&gantry, "zero")?;
    none_left(&mut guest, FUNCTIONS)?;
    gantry.put("vm.add-device", first)?;
    none_left(&mut guest, FUNCTIONS)?;
    let answer = gantry.put("vm.add-device", zero)?;
    ensure!(answer["bdf"] == FUNCTIONS[0], "{answer}");
    check(&mut guest)?;
    are_one_slot(&mut guest, FUNCTIONS)?;
    let nowhere = json!({"path": one.path, "parent": "zero"});
    gantry.refused(
        "vm.add-device",
        Some(nowhere),
        400,
        "no PCI root port 'zero'",
    )?;
    let port = json!({"id": "port"});
    gantry.refused("vm.remove-device", Some(port), 400, "cannot be removed")?;
    // A port without a device when the guest started.
    gantry.put("vm.remove-device", json!({"id": "zero", "force": true}))?;
    gone(&gantry, "first")?;
    none_left(&mut guest, FUNCTIONS)?;
    gantry.put(
        "vm.add-device",
        json!({"path": one.path, "id": "zero", "parent": "spare"}),
    )?;
    works(&mut guest, "0000:02:00.0")?;
    gantry.act("vm.reboot")?;
    let mut guest = Guest::connect(&gantry.serial)?;
    guest.wait_ready()?;
    works(&mut guest, "0000:02:00.0")?;
    let log = gantry.log();
    ensure!(!log.contains("is not decoded"), "{log}");
    Ok(())
}

/// Configuration of a device in the slot of these scenarios.
fn in_slot(device: &HostDevice, id: &str, function: u8) -> Value {
    json!({
        "path": device.path,
        "id": id,
        "pci_device_id": 9,
        "pci_function": function,
    })
}

fn of_one_slot(context: &Context) -> Result<()> {
    const FUNCTIONS: [&str; 2] = ["0000:00:09.0", "0000:00:09.3"];
    let [one, other] = take_two()?;
    let (zero, third) = (in_slot(&one, "zero", 0), in_slot(&other, "third", 3));
    let more = json!({"devices": [zero, third]});
    let (gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    are_one_slot(&mut guest, FUNCTIONS)?;
    for bdf in FUNCTIONS {
        works(&mut guest, bdf)?;
    }
    gantry.put("vm.remove-device", json!({"id": "zero"}))?;
    gone(&gantry, "zero")?;
    gone(&gantry, "third")?;
    gantry.put("vm.add-device", zero.clone())?;
    works(&mut guest, FUNCTIONS[0])?;
    gantry.refused("vm.add-device", Some(third.clone()), 400, "comes too late")?;
    gantry.put("vm.remove-device", json!({"id": "zero"}))?;
    gone(&gantry, "zero")?;
    for device in [third, zero] {
        gantry.put("vm.add-device", device)?;
    }
    for bdf in FUNCTIONS {
        works(&mut guest, bdf)?;
    }
    are_one_slot(&mut guest, FUNCTIONS)
}

fn swap_of_one_slot(context: &Context) -> Result<()> {
    const FUNCTIONS: [&str; 2] = ["0000:00:09.0", "0000:00:09.3"];
    let [zero, third] = take_two()?;
    let (spare, absent) = (HostDevice::take(EDU, 0)?, HostDevice::take(EDU, 1)?);
    absent.release()?;
    let more = json!({"devices": [in_slot(&zero, "zero", 0), in_slot(&third, "third", 3)]});
    let (gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    let mut swap = |id: &str,
                    to: &HostDevice,
                    on_failure: &str,
                    expected: [Option<&HostDevice>; 2]|
     -> Result<()> {
        let body = json!({"id": id, "path": to.path, "on_failure": on_failure});
        gantry.put("vm.swap-device", body)?;
        let paths = ["zero", "third"].into_iter().zip(expected);
        let paths: BTreeMap<_, _> = paths
            .filter_map(|(id, device)| Some((id, json!(device?.path))))
            .collect();
        gantry.info_until(&format!("there are {paths:?}"), |info| {
            let devices = info["config"]["devices"].as_array().into_iter().flatten();
            let now =
                devices.filter_map(|device| Some((device["id"].as_str()?, device["path"].clone())));
            let tree = &info["device_tree"];
            let is_over = ["zero", "third"]
                .iter()
                .all(|id| tree[id]["state"].is_null());
            is_over && now.collect::<BTreeMap<_, _>>() == paths
        })?;
        for (bdf, device) in FUNCTIONS.into_iter().zip(expected) {
            if device.is_some() {
                works(&mut guest, bdf)?;
            }
        }
        Ok(())
    };
    swap("third", &spare, "Restore", [Some(&zero), Some(&spare)])?;
    swap("zero", &third, "Restore", [Some(&third), Some(&spare)])?;
    // The device that is swapped is restored, and so is the other one.
    for id in ["zero", "third"] {
        swap(id, &absent, "Restore", [Some(&third), Some(&spare)])?;
    }
    swap("third", &absent, "Without", [Some(&third), None])?;
    let log = gantry.log();
    ensure!(log.matches("device-swap-undone").count() == 2, "{log}");
    Ok(())
}

/// NVMe's driver without MSI-X and MSI.
fn line(context: &Context) -> Result<()> {
    let nvme = HostDevice::take(NVME, 0)?;
    let device = json!({"path": nvme.path, "id": "nvme", "parent": "second"});
    let more = json!({
        "memory": {"size": 512 << 20},
        "payload": {"cmdline": format!("{CMDLINE} pci=nomsi")},
        "pci_root_ports": [{"id": "first"}, {"id": "second", "pci_device_id": 20}],
        "devices": [device],
    });
    let (gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    disk_works(&mut guest, "one")?;
    let counted = guest.run("grep nvme0q /proc/interrupts")?;
    ensure!(counted.contains("IO-APIC"), "{counted}");
    gantry.put("vm.remove-device", json!({"id": "nvme"}))?;
    gone(&gantry, "nvme")?;
    gantry.put("vm.add-device", device)?;
    disk_works(&mut guest, "two")
}

/// A scenario for any board.
pub fn reset_together(context: &Context) -> Result<()> {
    const FUNCTIONS: [&str; 2] = ["0000:01:00.0", "0000:01:00.1"];
    let [one, other] = [EDU_OF_PORT, EDU_OF_PORT + 1].map(|index| HostDevice::take(EDU, index));
    let (one, other) = (one?, other?);
    let zero = json!({"path": one.path, "id": "zero", "parent": "port"});
    let first = json!({"path": other.path, "id": "first", "parent": "port", "pci_function": 1});
    let more = json!({"pci_root_ports": [{"id": "port"}], "devices": [zero, first]});
    let (gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    for _ in 0..2 {
        for bdf in FUNCTIONS {
            works(&mut guest, bdf)?;
        }
        gantry.put("vm.remove-device", json!({"id": "zero"}))?;
        gone(&gantry, "zero")?;
        gone(&gantry, "first")?;
        for device in [&first, &zero] {
            gantry.put("vm.add-device", device.clone())?;
        }
    }
    let log = gantry.log();
    ensure!(
        log.contains("has to wait until"),
        "one was reset before the other left: {log}"
    );
    // iommufd does not let a device reach another one's memory, and reports this.
    let is_warning = |line: &str| line.contains("WARN") && !line.contains("(peer-to-peer)");
    ensure!(!log.lines().any(is_warning), "{log}");
    Ok(())
}

/// The command that writes a byte of configuration space.
pub fn write_of(bdf: &str, at: usize, value: u8) -> String {
    format!(
        "printf '\\{value:03o}' | dd of={SYSFS}/{bdf}/config bs=1 seek={at} conv=notrunc 2>/dev/null"
    )
}

/// Writes a byte of configuration space.
pub fn set_config(guest: &mut Guest, bdf: &str, at: usize, value: u8) -> Result<()> {
    guest.run(&write_of(bdf, at, value))?;
    Ok(())
}

fn bus_reset(context: &Context) -> Result<()> {
    const PORT: &str = "0000:00:14.0";
    const FUNCTIONS: [&str; 2] = ["0000:01:00.0", "0000:01:00.1"];
    const CARD: &str = "0000:02:00.0";
    const NVME_DISK: &str = "0000:03:00.0";
    const COMMAND: usize = 4;
    const MASTER: u8 = 4;
    const BRIDGE_CONTROL: usize = 0x3e;
    const RESET: u8 = 0x40;
    let [one, other] = [EDU_OF_PORT, EDU_OF_PORT + 1].map(|index| HostDevice::take(EDU, index));
    let (one, other) = (one?, other?);
    let (card, nvme) = (
        HostDevice::take(EXPRESS_CARD, 0)?,
        HostDevice::take(NVME, 0)?,
    );
    let more = json!({
        "memory": {"size": 512 << 20},
        "pci_root_ports": [{"id": "port", "pci_device_id": 20}, {"id": "cards"}, {"id": "disks"}],
        "devices": [
            {"path": one.path, "id": "one", "parent": "port"},
            {"path": other.path, "id": "other", "parent": "port", "pci_function": 1},
            {"path": card.path, "id": "card", "parent": "cards"},
            {"path": nvme.path, "id": "nvme", "parent": "disks"},
        ],
    });
    let (gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    let bus_resets = || -> Result<[Option<u64>; 3]> {
        let counters = gantry.ok("GET", "vm.counters", None)?;
        Ok(["one", "other", "nvme"].map(|id| counters[id]["bus_resets"].as_u64()))
    };
    for bdf in FUNCTIONS {
        works(&mut guest, bdf)?;
    }
    set_config(&mut guest, PORT, COMMAND, 2)?;
    let mut in_host = |command: &str| crate::net::sh(command);
    for device in [&one, &other] {
        let command = config(&mut in_host, &device.address, COMMAND)?;
        ensure!(command & u32::from(MASTER) == 0, "{command:#x}");
    }
    let check = format!("agent edu-check {SYSFS}/{}", FUNCTIONS[0]);
    let (status, said) = guest.status_of(&check)?;
    ensure!(status != 0, "DMA goes past the port: {said}");
    set_config(&mut guest, PORT, COMMAND, 2 | MASTER)?;
    for bdf in FUNCTIONS {
        works(&mut guest, bdf)?;
    }
    // Both at once, since they have no reset of their own. The guest detects them again.
    for bdf in FUNCTIONS {
        guest.run(&format!("echo 1 > {SYSFS}/{bdf}/remove"))?;
    }
    ensure!(bus_resets()? == [Some(0); 3], "{:?}", bus_resets()?);
    for control in [RESET, 0] {
        set_config(&mut guest, PORT, BRIDGE_CONTROL, control)?;
    }
    let rescan = format!(
        "echo 1 > /sys/bus/pci/rescan; ls -d {SYSFS}/{}",
        FUNCTIONS[1]
    );
    guest.eventually(&format!("{rescan} 2>/dev/null || true"), |found| {
        !found.is_empty()
    })?;
    for bdf in FUNCTIONS {
        works(&mut guest, bdf)?;
    }
    let both = [Some(1), Some(1), Some(0)];
    ensure!(bus_resets()? == both, "{:?}", bus_resets()?);
    // The kernel's own reset, with a register that no driver has set. It is not counted: QEMU's
    // port does not report that its link is up again, which L1 takes for a failure.
    const TIMER: u64 = 0x170;
    guest.run(&format!("echo 1 > {SYSFS}/{CARD}/enable"))?;
    let (base, _) = resources(&mut guest, CARD)?[0];
    let register = format!("devmem {:#x} 32", base + TIMER);
    guest.run(&format!("{register} 0x1234"))?;
    let set = guest.run(&register)?;
    ensure!(set == "0x00001234", "the card's register is {set}");
    guest.run(&format!(
        "echo bus > {SYSFS}/{CARD}/reset_method && echo 1 > {SYSFS}/{CARD}/reset"
    ))?;
    let after = guest.run(&register)?;
    ensure!(
        after == "0x00000000",
        "the card's register is {after} after a reset"
    );
    // On a bus of the host that cannot be reset, a device's own reset must suffice.
    disk_works(&mut guest, "one")?;
    guest.run(&format!(
        "echo bus > {SYSFS}/{NVME_DISK}/reset_method && echo 1 > {SYSFS}/{NVME_DISK}/reset"
    ))?;
    disk_works(&mut guest, "two")?;
    ensure!(bus_resets()? == both, "{:?}", bus_resets()?);
    let log = gantry.log();
    ensure!(!log.contains("WARN"), "{log}");
    Ok(())
}

/// Makes the kernel believe that a device has reported an error that is uncorrectable, but not
/// fatal for its link (`struct aer_error_inj` of the kernel's aer_inject).
fn inject_error(device: &HostDevice) -> Result<()> {
    const COMPLETION_TIMEOUT: u32 = 1 << 14;
    crate::net::sh("[ -d /sys/module/aer_inject ] || insmod /modules/aer_inject.ko")?;
    let numbers = device.address.split([':', '.']);
    let numbers: Vec<_> = numbers
        .map(|number| u8::from_str_radix(number, 16))
        .collect::<Result<_, _>>()?;
    let [0, bus, slot, function] = numbers[..] else {
        bail!("{} is not in segment 0", device.address);
    };
    let mut error = vec![bus, slot, function, 0];
    for word in [COMPLETION_TIMEOUT, 0, 0, 0, 0, 0, 0] {
        error.extend(u32::to_le_bytes(word));
    }
    std::fs::write("/dev/aer_inject", error).context("cannot inject an error")
}

fn failed(context: &Context) -> Result<()> {
    const CARD: &str = "/sys/bus/pci/devices/0000:01:00.0";
    let card = HostDevice::take(EXPRESS_CARD, 0)?;
    let device = json!({"path": card.path, "id": "card", "parent": "port"});
    let more = json!({"pci_root_ports": [{"id": "port"}], "devices": [device]});
    let (gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    for _ in 0..2 {
        guest.eventually(&format!("ls -d {CARD}"), |found| found == CARD)?;
        inject_error(&card)?;
        gone(&gantry, "card")?;
        none_left(&mut guest, ["0000:01:00.0"; 2])?;
        gantry.put("vm.add-device", device.clone())?;
    }
    guest.eventually(&format!("ls -d {CARD}"), |found| found == CARD)?;
    let log = gantry.log();
    ensure!(log.matches("cannot be corrected").count() == 2, "{log}");
    Ok(())
}

fn saved_port(context: &Context) -> Result<()> {
    let edu = HostDevice::take(EDU, 0)?;
    let device = json!({"path": edu.path, "id": "edu", "parent": "port"});
    let more = json!({"pci_root_ports": [{"id": "port"}], "devices": [device]});
    let (mut gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    works(&mut guest, "0000:01:00.0")?;
    gantry.put("vm.remove-device", json!({"id": "edu"}))?;
    gone(&gantry, "edu")?;
    gantry.act("vm.pause")?;
    gantry.put("vm.snapshot", json!({"destination_url": url(context)}))?;
    gantry.kill()?;
    let (gantry, mut guest) = restored(context, json!({}))?;
    gantry.put("vm.add-device", device)?;
    works(&mut guest, "0000:01:00.0")
}
