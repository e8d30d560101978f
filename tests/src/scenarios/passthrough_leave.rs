//! Physical devices that leave a guest: at the host's request, against the guest's will, under
//! load.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use serde_json::json;

use super::{Context, Entry, hotplug::gone};
use crate::{
    edu::HostPage,
    gantry::Gantry,
    guest::{COMMAND, Guest},
    host_device::{EDU, HostDevice},
    net::sh,
};

pub const SCENARIOS: &[Entry] = &[
    (
        "passthrough: 100 times plugged and unplugged while the device copies",
        hundred,
    ),
    (
        "passthrough: swapped while the device copies",
        swap_under_load,
    ),
    (
        "passthrough: DMA beyond the guest touches nothing, and the log says so",
        beyond,
    ),
    (
        "passthrough: a device that the host wants back is given back",
        wanted_back,
    ),
    (
        "passthrough: a removal is refused by the guest, or cancelled",
        refused_or_cancelled,
    ),
    (
        "passthrough: a snapshot that takes the device away first",
        snapshot,
    ),
];

/// Descriptors and mappings of a process. Connections of the API come and go.
fn holdings(gantry: &Gantry) -> Result<[u64; 3]> {
    let process = format!("/proc/{}", gantry.pid());
    let mut descriptors = 0;
    for entry in std::fs::read_dir(format!("{process}/fd"))? {
        let target = std::fs::read_link(entry?.path()).unwrap_or_default();
        descriptors += u64::from(!target.to_string_lossy().starts_with("socket:"));
    }
    let mappings = std::fs::read_to_string(format!("{process}/maps"))?;
    let status = std::fs::read_to_string(format!("{process}/status"))?;
    let locked = status.lines().find_map(|line| line.strip_prefix("VmLck:"));
    let locked = locked.unwrap_or("").trim().trim_end_matches(" kB");
    Ok([
        descriptors,
        mappings.lines().count() as u64,
        locked.parse()?,
    ])
}

/// Host memory in use in MiB, without what can be reclaimed at any time.
fn host_memory() -> Result<i64> {
    let text = sh("echo 3 > /proc/sys/vm/drop_caches; cat /proc/meminfo")?;
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        let kib = line.unwrap_or("").trim().trim_end_matches(" kB");
        kib.parse::<i64>().unwrap_or(0)
    };
    Ok((field("MemTotal:") - field("MemFree:")) / 1024)
}

/// Number of page table pages of the host's IOMMU.
fn iommu_pages() -> Result<u64> {
    let text =
        sh("grep -E '^nr_(page_table_pages|iommu_pages|sec_page_table_pages) ' /proc/vmstat")?;
    let counts = text.lines().filter_map(|line| line.split(' ').nth(1));
    Ok(counts.filter_map(|count| count.parse::<u64>().ok()).sum())
}

/// Makes the available edu device copy back and forth forever.
const COPY: &str = "(while true; do agent edu-copy >> /tmp/load 2>&1; sleep 0.05; done) & true";

const CYCLES: usize = 100;

fn hundred(context: &Context) -> Result<()> {
    let edu = HostDevice::take(EDU, 0)?;
    let (gantry, mut guest) = Gantry::boot(&context.dir, json!({}))?;
    guest.run(COPY)?;
    let config = json!({"path": edu.path, "id": "edu", "pci_device_id": 9});
    let cycle = |guest: &mut Guest, works: bool| {
        gantry.put("vm.add-device", config.clone())?;
        if works {
            guest.run("! grep -s wrong /tmp/load && echo > /tmp/load")?;
            guest.eventually("cat /tmp/load", |text| text.contains("copied"))?;
        }
        gantry.put("vm.remove-device", json!({"id": "edu"}))?;
        gone(&gantry, "edu")
    };
    // This creates what is created once: the container, and caches of both kernels.
    for works in [true, false] {
        cycle(&mut guest, works)?;
    }
    let (held, memory, pages) = (holdings(&gantry)?, host_memory()?, iommu_pages()?);
    // In most rounds, the guest is asked to give up the device before it has used it.
    for round in 0..CYCLES {
        cycle(&mut guest, round % 10 == 0)?;
    }
    // What a vCPU has just read, and connections of the API, take a moment longer to disappear.
    let deadline = Instant::now() + Duration::from_secs(10);
    while holdings(&gantry)? != held && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(200));
    }
    let (held_after, memory_after, pages_after) =
        (holdings(&gantry)?, host_memory()?, iommu_pages()?);
    // A leak grows in every round.
    let grown = held
        .iter()
        .zip(&held_after)
        .map(|(b, a)| a.saturating_sub(*b));
    ensure!(
        grown.max() < Some(CYCLES as u64 / 2),
        "descriptors, mappings, locked memory: {held:?} before, {held_after:?} after {CYCLES} \
         rounds; open are: {}",
        sh(&format!("ls -l /proc/{}/fd", gantry.pid()))?
    );
    ensure!(
        memory_after - memory < 8,
        "the host uses {memory} MiB before, {memory_after} after"
    );
    // 256 MiB in 4 KiB pages take 128 page table pages for each time that they are not freed.
    ensure!(
        pages_after < pages + 128,
        "{pages} page-table pages before, {pages_after} after"
    );
    // As long as the device existed, its copies were correct, or failed.
    guest.run("! grep wrong /tmp/load").map(|_| ())
}

fn swap_under_load(context: &Context) -> Result<()> {
    let (first, second) = (HostDevice::take(EDU, 0)?, HostDevice::take(EDU, 1)?);
    let more = json!({"devices": [{"path": first.path, "id": "edu", "pci_device_id": 7}]});
    let (gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    guest.run(COPY)?;
    guest.eventually("cat /tmp/load", |text| text.contains("copied"))?;
    for to in [&second, &first, &second] {
        gantry.swap_device("edu", &to.path)?;
        guest.run("! grep wrong /tmp/load")?;
        guest.run("echo > /tmp/load")?;
        guest.eventually("cat /tmp/load", |text| text.contains("copied"))?;
    }
    Ok(())
}

/// First address that the guest does not have.
const END: u64 = 256 << 20;

fn beyond(context: &Context) -> Result<()> {
    let edu = HostDevice::take(EDU, 0)?;
    let hosts = HostPage::beyond(END)?;
    let more = json!({"devices": [{"path": edu.path, "id": "edu"}]});
    let (gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    guest.run("agent edu-check")?;
    guest.run(&format!("agent edu-write-outside {:#x}", hosts.address))?;
    hosts.check()?;
    let log = gantry.log_until("was kept from memory")?;
    ensure!(log.contains(&format!("{:#x}", hosts.address)), "{log}");
    guest.run("agent edu-check").map(|_| ())
}

fn wanted_back(context: &Context) -> Result<()> {
    let edu = HostDevice::take(EDU, 0)?;
    let more = json!({"devices": [{"path": edu.path, "id": "edu"}]});
    let (gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    guest.run("agent edu-check")?;
    let unbind = |device: &HostDevice| {
        let (path, address) = (device.path.clone(), device.address.clone());
        thread::spawn(move || std::fs::write(path.join("driver/unbind"), address))
    };
    let ended = |unbound: thread::JoinHandle<std::io::Result<()>>| match unbound.join() {
        Ok(result) => Ok(result?),
        Err(_) => anyhow::bail!("the unbinding has panicked"),
    };
    // The guest is asked, and gives the device up.
    ended(unbind(&edu))?;
    gone(&gantry, "edu")?;
    guest.eventually("ls /sys/bus/pci/devices | wc -l", |count| count == "2")?;
    // A paused guest is not waited for forever.
    edu.bind()?;
    gantry.put("vm.add-device", json!({"path": edu.path, "id": "edu"}))?;
    guest.eventually("agent edu-check", |said| said.contains("edu works"))?;
    gantry.act("vm.pause")?;
    ended(unbind(&edu))?;
    gone(&gantry, "edu")?;
    gantry.act("vm.resume")?;
    guest.eventually("ls /sys/bus/pci/devices | wc -l", |count| count == "2")?;
    edu.bind()
}

fn refused_or_cancelled(context: &Context) -> Result<()> {
    let edu = HostDevice::take(EDU, 0)?;
    let more = json!({"devices": [{"path": edu.path, "id": "edu", "pci_device_id": 9}]});
    let (gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    let state = |expected: Option<&str>| {
        gantry.info_until(&format!("the device is {expected:?}"), |info| {
            let node = &info["device_tree"]["edu"];
            !node.is_null() && node["state"].as_str() == expected
        })
    };
    // A paused guest has not received the request.
    gantry.act("vm.pause")?;
    gantry.put("vm.remove-device", json!({"id": "edu"}))?;
    state(Some("removing"))?;
    gantry.put("vm.remove-device", json!({"id": "edu", "cancel": true}))?;
    state(None)?;
    let again = json!({"id": "edu", "cancel": true});
    gantry.refused("vm.remove-device", Some(again), 400, "nothing to cancel")?;
    gantry.act("vm.resume")?;
    guest.run("agent edu-check")?;
    // This program replies instead of the kernel.
    // Only after the shell has replied: from then on, the guest runs nothing else.
    guest.start("(sleep 1; agent refuse-eject 9 0x81)", "nothing else runs")?;
    gantry.put("vm.remove-device", json!({"id": "edu"}))?;
    guest.wait_for("refused", COMMAND)?;
    state(None)?;
    let log = gantry.log();
    ensure!(log.contains("will not give up device \"edu\""), "{log}");
    guest.run("agent edu-check")?;
    gantry.put("vm.remove-device", json!({"id": "edu"}))?;
    gone(&gantry, "edu")
}

fn snapshot(context: &Context) -> Result<()> {
    let edu = HostDevice::take(EDU, 0)?;
    let more = json!({"devices": [{"path": edu.path, "id": "edu"}]});
    let (mut gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    guest.run("agent edu-check")?;
    let url = format!("file://{}", context.dir.join("snapshot").display());
    let body = |detach| json!({"destination_url": url, "detach": detach});
    gantry.refused("vm.snapshot", Some(body(true)), 405, "pause")?;
    guest.run("agent edu-check")?;
    gantry.act("vm.pause")?;
    gantry.refused("vm.snapshot", Some(body(false)), 500, "edu")?;
    gantry.put("vm.snapshot", body(true))?;
    ensure!(gantry.info()?["device_tree"]["edu"].is_null());
    gantry.kill()?;
    let dir = context.dir.join("restored");
    std::fs::create_dir(&dir)?;
    let gantry = Gantry::start(&dir, &[])?;
    gantry.put("vm.restore", json!({"source_url": url, "resume": true}))?;
    let mut guest = Guest::connect(&context.dir.join("serial.sock"))?;
    guest.eventually("ls /sys/bus/pci/devices | wc -l", |count| count == "2")?;
    gantry.put("vm.add-device", json!({"path": edu.path, "id": "edu"}))?;
    guest.eventually("agent edu-check", |said| said.contains("edu works"))?;
    Ok(())
}
