//! From creation to deletion.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::json;

use super::{Context, Entry};
use crate::{
    gantry::{BZIMAGE, CMDLINE, Gantry, INITRAMFS, PATIENCE, vm},
    guest::{BOOT, Guest, READY},
};

pub const SCENARIOS: &[Entry] = &[
    (
        "lifecycle: states from create to delete, and boot again after shutdown",
        states,
    ),
    (
        "lifecycle: options of the command line boot a guest",
        command_line,
    ),
    ("lifecycle: a paused guest stands still and goes on", pause),
    ("lifecycle: reboot by the guest and by the API", reboot),
    (
        "lifecycle: a console's file keeps what was printed before a reboot",
        console_file,
    ),
    (
        "lifecycle: the power button shuts the guest down",
        power_button,
    ),
    ("lifecycle: an NMI reaches the guest", nmi),
    ("lifecycle: a core dump holds all memory", coredump),
    ("lifecycle: events are reported", events),
];

fn states(context: &Context) -> Result<()> {
    let mut gantry = Gantry::start(&context.dir, &[])?;
    gantry.put("vm.create", vm(&gantry.serial))?;
    ensure!(gantry.state()? == "Created");
    for _ in 0..2 {
        gantry.act("vm.boot")?;
        ensure!(gantry.state()? == "Running");
        Guest::connect(&gantry.serial)?.wait_ready()?;
        gantry.act("vm.shutdown")?;
        ensure!(gantry.state()? == "Shutdown");
    }
    gantry.act("vm.delete")?;
    ensure!(gantry.request("GET", "vm.info", None)?.status == 404);
    gantry.act("vmm.shutdown")?;
    let status = gantry.wait_exit()?;
    ensure!(status.success(), "gantry ended with {status}");
    ensure!(!gantry.socket.exists(), "the API socket is left behind");
    Ok(())
}

fn command_line(context: &Context) -> Result<()> {
    let serial = format!("socket={}", context.dir.join("serial.sock").display());
    let mut gantry = Gantry::start(
        &context.dir,
        &[
            "--kernel",
            BZIMAGE,
            "--initramfs",
            INITRAMFS,
            "--cmdline",
            CMDLINE,
            "--cpus",
            "boot=2,max=3",
            "--memory",
            "size=256M,shared=on",
            "--console",
            "off",
            "--serial",
            &serial,
        ],
    )?;
    let mut guest = Guest::connect(&gantry.serial)?;
    guest.wait_ready()?;
    ensure!(guest.run("nproc")? == "2");
    guest.send("poweroff -f")?;
    let status = gantry.wait_exit()?;
    ensure!(
        status.success(),
        "gantry ended with {status}: {}",
        gantry.log()
    );
    Ok(())
}

/// Starts a counter in the guest that prints ten numbers per second.
pub fn start_counting(guest: &mut Guest) -> Result<()> {
    guest.start(
        "(i=0; while true; do i=$((i+1)); echo count=$i; sleep 0.1; done)",
        "count=3",
    )
}

/// Waits until the counter continues, and returns its value.
pub fn next_count(guest: &mut Guest) -> Result<u64> {
    guest.wait_for("count=", BOOT)?;
    Ok(guest.wait_for("\n", BOOT)?.trim().parse()?)
}

fn pause(context: &Context) -> Result<()> {
    let (gantry, mut guest) = Gantry::boot(&context.dir, json!({}))?;
    start_counting(&mut guest)?;
    gantry.act("vm.pause")?;
    ensure!(gantry.state()? == "Paused");
    // Output from before the pause may still be in transit.
    let mut before = 0;
    while guest.transcript().len() > before {
        before = guest.transcript().len();
        guest.read()?;
    }
    let cpu = gantry.cpu_time()?;
    for _ in 0..5 {
        guest.read()?;
    }
    ensure!(guest.transcript().len() == before, "a paused guest prints");
    ensure!(
        gantry.cpu_time()? - cpu < Duration::from_millis(200),
        "a paused guest runs"
    );
    gantry.refused("vm.pause", None, 405, "paused")?;
    gantry.act("vm.resume")?;
    let now = next_count(&mut guest)?;
    ensure!(next_count(&mut guest)? > now);
    gantry.refused("vm.resume", None, 405, "not paused")
}

fn reboot(context: &Context) -> Result<()> {
    let (gantry, mut guest) = Gantry::boot(&context.dir, json!({}))?;
    guest.send("reboot -f")?;
    let mut guest = reconnect(&gantry, guest)?;
    guest.run("true")?;
    gantry.act("vm.reboot")?;
    let mut guest = reconnect(&gantry, guest)?;
    guest.run("true")?;
    ensure!(gantry.state()? == "Running");
    Ok(())
}

fn console_file(context: &Context) -> Result<()> {
    let file = context.dir.join("console.txt");
    std::fs::write(&file, "of another VM")?;
    let more = json!({"console": {"mode": "File", "file": file}});
    let (gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    guest.run("echo before > /dev/hvc0")?;
    gantry.act("vm.reboot")?;
    let mut guest = reconnect(&gantry, guest)?;
    guest.run("echo after > /dev/hvc0")?;
    let text = std::fs::read_to_string(&file)?.replace('\r', "");
    ensure!(text == "before\nafter\n", "console file: {text:?}");
    Ok(())
}

/// The console is closed when a machine ends; a new one listens at the same path.
pub(super) fn reconnect(gantry: &Gantry, mut old: Guest) -> Result<Guest> {
    if old.wait_for(READY, BOOT).is_ok() {
        return Ok(old);
    }
    let mut guest = Guest::connect(&gantry.serial)?;
    guest.wait_ready()?;
    Ok(guest)
}

fn power_button(context: &Context) -> Result<()> {
    let (mut gantry, mut guest) = Gantry::boot(&context.dir, json!({}))?;
    guest.start("agent-power-button", "waiting for the button")?;
    gantry.act("vm.power-button")?;
    let status = gantry.wait_exit()?;
    ensure!(status.success(), "gantry ended with {status}");
    Ok(())
}

fn nmi(context: &Context) -> Result<()> {
    let (gantry, mut guest) = Gantry::boot(&context.dir, json!({}))?;
    let before: u64 = nmis(&mut guest)?;
    gantry.act("vm.nmi")?;
    let after = nmis(&mut guest)?;
    ensure!(after == before + 1, "{before} NMIs before, {after} after");
    Ok(())
}

fn nmis(guest: &mut Guest) -> Result<u64> {
    // The kernel prints its own message about an NMI that nobody handles.
    let text = guest.run("awk '/NMI:/ {print \"nmis=\" $2}' /proc/interrupts")?;
    let (_, count) = text.split_once("nmis=").context("no line for NMIs")?;
    Ok(count
        .split_whitespace()
        .next()
        .unwrap_or_default()
        .parse()?)
}

fn coredump(context: &Context) -> Result<()> {
    let (gantry, mut guest) = Gantry::boot(&context.dir, json!({}))?;
    guest.run("true")?;
    let path = context.dir.join("core");
    let body = json!({"destination_url": format!("file://{}", path.display())});
    gantry.refused("vm.coredump", Some(body.clone()), 405, "pause")?;
    gantry.act("vm.pause")?;
    gantry.put("vm.coredump", body)?;
    let file = std::fs::read(&path)?;
    std::fs::remove_file(&path)?;
    ensure!(file.starts_with(b"\x7fELF\x02\x01\x01"), "no ELF file");
    ensure!(file.len() as u64 >= 256 << 20, "{} bytes", file.len());
    let text = b"Linux version 6.1";
    let found = file.windows(text.len()).any(|window| window == text);
    ensure!(found, "the kernel's banner is not in the dump");
    gantry.act("vm.resume")?;
    guest.run("true")?;
    Ok(())
}

fn events(context: &Context) -> Result<()> {
    let path = context.dir.join("events");
    let argument = format!("path={}", path.display());
    let gantry = Gantry::start(&context.dir, &["--event-monitor", &argument])?;
    let mut guest = gantry.create_and_boot(json!({"watchdog": true, "pvpanic": true}))?;
    // A part of some kernels.
    let watchdog = "insmod /modules/watchdog.ko 2>/dev/null; insmod /modules/wdat_wdt.ko";
    guest.run(watchdog)?;
    // It is written to once, and never again.
    guest.send("watchdog -T 1 -t 1000 /dev/watchdog0")?;
    let mut guest = reconnect(&gantry, guest)?;
    guest.run(watchdog)?;
    let status = "cat /sys/class/watchdog/watchdog0/bootstatus";
    ensure!(
        guest.run(status)? == "32",
        "the guest does not know why it was reset"
    );
    gantry.act("vm.pause")?;
    gantry.act("vm.resume")?;
    guest.run("insmod /modules/pvpanic.ko && insmod /modules/pvpanic-pci.ko")?;
    guest.send("echo c > /proc/sysrq-trigger")?;
    let deadline = Instant::now() + PATIENCE;
    let is_there = |events: &str| events.contains("\"panic\"") && events.contains("\"reset\"");
    while !is_there(&std::fs::read_to_string(&path)?) {
        ensure!(
            Instant::now() < deadline,
            "no panic and reset were reported"
        );
        std::thread::sleep(Duration::from_millis(50));
    }
    gantry.act("vm.delete")?;
    let text = std::fs::read_to_string(&path)?;
    for event in [
        "starting", "booting", "booted", "expired", "panic", "reset", "pausing", "paused",
        "deleted",
    ] {
        ensure!(
            text.contains(&format!("\"event\": \"{event}\"")),
            "no {event} in {text}"
        );
    }
    Ok(())
}
