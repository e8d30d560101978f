//! Snapshots.

use std::{
    ffi::CString,
    fs,
    os::unix::{ffi::OsStrExt, fs::symlink},
    time::{Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use super::{
    Context, Entry,
    disks::{image, write_pattern},
    lifecycle::{next_count, start_counting},
    memory::HugePages,
};
use crate::{
    gantry::{BZIMAGE, Gantry, INITRAMFS, PATIENCE, with_iommu_driver},
    guest::{COMMAND, Guest},
};

pub const SCENARIOS: &[Entry] = &[
    (
        "snapshot: kill -9, restore, and the guest goes on counting",
        |c| restore(c, "Copy"),
    ),
    ("snapshot: restore on demand", |c| restore(c, "OnDemand")),
    ("snapshot: devices work after a restore", devices),
    (
        "snapshot: a directory that another process uses is refused",
        in_use,
    ),
    ("snapshot: huge pages are restored on demand", huge_pages),
    (
        "snapshot: clocks advance by its age, and sleepers wake",
        age,
    ),
    (
        "snapshot: what is no regular file is refused at once",
        special_files,
    ),
    (
        "snapshot: a damaged or foreign snapshot is refused",
        damaged,
    ),
];

/// On the board whose guests may have a kernel that knows of generation IDs.
pub const COPIES: &[Entry] = &[(
    "snapshot: each copy draws random numbers of its own",
    copies,
)];

pub(super) fn url(context: &Context) -> String {
    format!("file://{}", context.dir.join("snapshot").display())
}

pub(super) fn take(gantry: &Gantry, context: &Context) -> Result<()> {
    let body = json!({"destination_url": url(context)});
    gantry.refused("vm.snapshot", Some(body.clone()), 405, "pause")?;
    gantry.act("vm.pause")?;
    gantry.put("vm.snapshot", body)?;
    Ok(())
}

/// Starts a new process that restores the guest.
pub(super) fn restored(context: &Context, more: Value) -> Result<(Gantry, Guest)> {
    let dir = context.dir.join("restored");
    fs::create_dir_all(&dir)?;
    let gantry = Gantry::start(&dir, &[])?;
    let mut body = json!({"source_url": url(context), "resume": true});
    crate::gantry::merge(&mut body, more);
    gantry.put("vm.restore", body)?;
    // The socket of the serial port is where the configuration says.
    let guest = Guest::connect(&context.dir.join("serial.sock"))?;
    Ok((gantry, guest))
}

fn restore(context: &Context, mode: &str) -> Result<()> {
    let more = json!({"cpus": {"boot_vcpus": 2, "max_vcpus": 2}});
    let (mut gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    start_counting(&mut guest)?;
    let before = next_count(&mut guest)?;
    take(&gantry, context)?;
    gantry.kill()?;
    let (gantry, mut guest) = restored(context, json!({"memory_restore_mode": mode}))?;
    let after = next_count(&mut guest)?;
    ensure!(after >= before, "{before} before, {after} after");
    ensure!(after < before + 100, "{before} before, {after} after");
    ensure!(next_count(&mut guest)? > after);
    ensure!(gantry.state()? == "Running");
    // The counter prints in between.
    let output = guest.run("echo cpus=$(nproc)")?;
    ensure!(output.contains("cpus=2"), "{output}");
    Ok(())
}

fn huge_pages(context: &Context) -> Result<()> {
    let _pages = HugePages::reserve(140)?;
    let more = json!({"memory": {"hugepages": true}});
    let (mut gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    guest.run("dd if=/dev/urandom of=/tmp/fill bs=1M count=40 2>/dev/null")?;
    let sum = guest.md5_of("cat /tmp/fill")?;
    take(&gantry, context)?;
    gantry.kill()?;
    let (gantry, mut guest) = restored(context, json!({"memory_restore_mode": "OnDemand"}))?;
    ensure!(guest.md5_of("cat /tmp/fill")? == sum, "memory is lost");
    gantry.log_until("has been brought in")?;
    ensure!(guest.md5_of("cat /tmp/fill")? == sum, "memory is lost");
    ensure!(gantry.state()? == "Running");
    Ok(())
}

/// L1's wall clock runs ahead by so many seconds until this is dropped.
struct Ahead(i64);

impl Ahead {
    fn by(seconds: i64) -> Result<Self> {
        set_ahead(seconds)?;
        Ok(Self(seconds))
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        // The scenario is over in any case.
        let _ = set_ahead(-self.0);
    }
}

fn set_ahead(seconds: i64) -> Result<()> {
    let now = wall_time()?;
    let time = libc::timespec {
        tv_sec: now + seconds,
        tv_nsec: 0,
    };
    // SAFETY: the time outlives the call.
    let set = unsafe { libc::clock_settime(libc::CLOCK_REALTIME, &raw const time) };
    ensure!(set == 0, "{}", std::io::Error::last_os_error());
    Ok(())
}

fn wall_time() -> Result<i64> {
    let since = SystemTime::now().duration_since(UNIX_EPOCH)?;
    Ok(i64::try_from(since.as_secs())?)
}

/// Seconds by which the guest's wall clock differs from L1's, and its uptime.
fn clocks(guest: &mut Guest) -> Result<(i64, i64)> {
    let before = wall_time()?;
    let said = guest.run("echo $(date +%s) $(cut -d. -f1 /proc/uptime)")?;
    let last = said.lines().last().unwrap_or_default();
    let (date, uptime) = last.split_once(' ').context("no two numbers")?;
    Ok((date.parse::<i64>()? - before, uptime.parse()?))
}

fn age(context: &Context) -> Result<()> {
    const MONTH: i64 = 30 * 24 * 3600;
    // The rig is slow, and commands take a while. Both are far below a month.
    const NEAR: std::ops::Range<i64> = -60..60;
    const SOON: std::ops::Range<i64> = 0..3600;
    let more = json!({"cpus": {"boot_vcpus": 2, "max_vcpus": 2}});
    let (mut gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    let (off, uptime) = clocks(&mut guest)?;
    // It must sleep when the snapshot is taken.
    guest.run(
        "(sleep 2000000; echo wo''ke) & until grep -qF '(sleep) S' /proc/[0-9]*/stat; do :; done",
    )?;
    take(&gantry, context)?;
    gantry.kill()?;
    let _ahead = Ahead::by(MONTH)?;
    let (mut gantry, mut guest) = restored(context, json!({}))?;
    // 23 days would be left.
    guest.wait_for("woke", COMMAND)?;
    let (later, up) = clocks(&mut guest)?;
    ensure!(
        NEAR.contains(&(later - off)),
        "the clock is {later} s off, it was {off} s off"
    );
    ensure!(
        SOON.contains(&(up - uptime - MONTH)),
        "up {up} s after {uptime} s"
    );
    let source = guest.run("cat /sys/devices/system/clocksource/*/current_clocksource")?;
    ensure!(source.contains("kvm-clock"), "{source}");
    // Watchdogs of both vCPUs have looked by then.
    guest.run("sleep 25")?;
    let said = guest.run("dmesg | grep -iE 'lockup|stall|blocked for|unstable|skew'; true")?;
    ensure!(said.is_empty(), "{said}");
    gantry.kill()?;
    fs::remove_dir_all(context.dir.join("restored"))?;
    let (_gantry, mut guest) = restored(context, json!({"clock": "Continue"}))?;
    let (later, up) = clocks(&mut guest)?;
    ensure!(
        SOON.contains(&(off - later - MONTH)),
        "the clock is {later} s off, it was {off} s off"
    );
    ensure!(SOON.contains(&(up - uptime)), "up {up} s after {uptime} s");
    Ok(())
}

fn special_files(context: &Context) -> Result<()> {
    let (gantry, _guest) = Gantry::boot(&context.dir, json!({}))?;
    take(&gantry, context)?;
    gantry.act("vm.delete")?;
    let snapshot = context.dir.join("snapshot");
    let request = json!({"source_url": url(context)});
    let on_demand = json!({"source_url": url(context), "memory_restore_mode": "OnDemand"});
    for file in ["config.json", "state.json", "applications", "memory-ranges"] {
        let (path, aside) = (snapshot.join(file), context.dir.join("aside"));
        let was_there = path.exists();
        if was_there {
            fs::rename(&path, &aside)?;
        }
        fifo(&path)?;
        gantry.refused("vm.restore", Some(request.clone()), 500, "a FIFO")?;
        if file == "memory-ranges" {
            gantry.refused("vm.restore", Some(on_demand.clone()), 500, "a FIFO")?;
        }
        fs::remove_file(&path)?;
        symlink("/dev/zero", &path)?;
        gantry.refused("vm.restore", Some(request.clone()), 500, "a symbolic link")?;
        fs::remove_file(&path)?;
        if was_there {
            fs::rename(&aside, &path)?;
        }
    }
    let path = context.dir.join("fifo");
    fifo(&path)?;
    let itself = json!({"source_url": format!("file://{}", path.display())});
    gantry.refused(
        "vm.restore",
        Some(itself),
        500,
        "cannot open the snapshot directory",
    )?;
    for payload in [
        json!({"kernel": path, "initramfs": INITRAMFS}),
        json!({"kernel": BZIMAGE, "initramfs": path}),
    ] {
        let mut config = crate::gantry::vm(&gantry.serial);
        config["payload"] = payload;
        gantry.put("vm.create", config)?;
        gantry.refused("vm.boot", None, 500, "a FIFO")?;
        gantry.act("vm.delete")?;
    }
    Ok(())
}

fn fifo(path: &std::path::Path) -> Result<()> {
    let name = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: a terminated string.
    let made = unsafe { libc::mkfifo(name.as_ptr(), 0o600) };
    ensure!(made == 0, "{}", std::io::Error::last_os_error());
    Ok(())
}

fn copies(context: &Context) -> Result<()> {
    const SAID: &str = "dmesg | grep -c 'crng reseeded due to virtual machine fork'; true";
    let (mut gantry, mut guest) = Gantry::boot(&context.dir, with_iommu_driver(""))?;
    ensure!(guest.run(SAID)? == "0", "it is no copy");
    take(&gantry, context)?;
    gantry.kill()?;
    let mut drawn = Vec::new();
    for mode in ["Copy", "OnDemand"] {
        let (mut gantry, mut guest) = restored(context, json!({"memory_restore_mode": mode}))?;
        let deadline = Instant::now() + PATIENCE;
        while guest.run(SAID)? != "1" {
            ensure!(
                Instant::now() < deadline,
                "the guest is not told that it is a copy"
            );
        }
        drawn
            .push(guest.run("cat /proc/sys/kernel/random/uuid; head -c 16 /dev/urandom | md5sum")?);
        gantry.kill()?;
        fs::remove_dir_all(context.dir.join("restored"))?;
    }
    for (one, other) in drawn[0].lines().zip(drawn[1].lines()) {
        ensure!(one != other, "both have drawn {one}");
    }
    Ok(())
}

fn in_use(context: &Context) -> Result<()> {
    let (gantry, mut guest) = Gantry::boot(&context.dir, json!({}))?;
    let directory = context.dir.join("snapshot");
    fs::create_dir(&directory)?;
    let lock = fs::File::open(&directory)?;
    lock.lock_shared()?;
    gantry.act("vm.pause")?;
    let body = json!({"destination_url": url(context)});
    gantry.refused("vm.snapshot", Some(body.clone()), 500, "another process")?;
    ensure!(fs::read_dir(&directory)?.next().is_none(), "files in there");
    lock.unlock()?;
    gantry.put("vm.snapshot", body)?;
    lock.lock()?;
    let other = context.dir.join("other");
    fs::create_dir(&other)?;
    let second = Gantry::start(&other, &[])?;
    let body = json!({"source_url": url(context)});
    second.refused("vm.restore", Some(body), 500, "another process")?;
    gantry.act("vm.resume")?;
    guest.run("true")?;
    Ok(())
}

fn devices(context: &Context) -> Result<()> {
    let path = context.dir.join("disk.raw");
    image(&path, 32 << 20)?;
    let more = json!({
        "disks": [{"path": path, "image_type": "Raw"}],
        "net": [{"tap": "tap-s", "ip": "192.168.77.1", "mask": "255.255.255.0"}],
        "balloon": {"size": 0},
        "vsock": {"cid": 3, "socket": context.dir.join("vsock")},
    });
    let (mut gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    super::network::set_up(&mut guest, "eth0")?;
    let sum = write_pattern(&mut guest, "/dev/vda", 8)?;
    take(&gantry, context)?;
    gantry.kill()?;
    let (gantry, mut guest) = restored(context, json!({}))?;
    guest.run("echo 3 > /proc/sys/vm/drop_caches")?;
    ensure!(guest.md5_of("dd if=/dev/vda bs=1M count=8 2>/dev/null")? == sum);
    write_pattern(&mut guest, "/dev/vda", 8)?;
    // The guest still has its neighbour's MAC address in its cache.
    super::network::reaches(&mut guest, "192.168.77.1")?;
    guest.run("dd if=/dev/hwrng bs=64 count=1 2>/dev/null | wc -c")?;
    // Hot-plug also still works.
    let hot = context.dir.join("hot.raw");
    image(&hot, 1 << 20)?;
    gantry.put("vm.add-disk", json!({"path": hot}))?;
    guest.eventually("ls /dev/vdb", |text| text == "/dev/vdb")?;
    Ok(())
}

fn damaged(context: &Context) -> Result<()> {
    let (gantry, _guest) = Gantry::boot(&context.dir, json!({}))?;
    take(&gantry, context)?;
    gantry.act("vm.delete")?;
    let snapshot = context.dir.join("snapshot");
    let request = json!({"source_url": url(context)});
    let state = fs::read(snapshot.join("state.json"))?;
    let mut broken = state.clone();
    let middle = broken.len() / 2;
    broken[middle] ^= 1;
    fs::write(snapshot.join("state.json"), &broken)?;
    gantry.refused("vm.restore", Some(request.clone()), 500, "damaged")?;
    let text = String::from_utf8_lossy(&state);
    let (before, after) = text
        .split_once("\"version\":")
        .context("the state has no version")?;
    let after = after.trim_start_matches(|digit: char| digit.is_ascii_digit());
    fs::write(
        snapshot.join("state.json"),
        format!("{before}\"version\":99{after}"),
    )?;
    gantry.refused("vm.restore", Some(request.clone()), 500, "version 99")?;
    fs::write(snapshot.join("state.json"), &state)?;
    let memory = fs::File::options()
        .write(true)
        .open(snapshot.join("memory-ranges"))?;
    memory.set_len(1 << 20)?;
    gantry.refused("vm.restore", Some(request), 500, "truncated")?;
    let nowhere = json!({"source_url": "file:///nowhere"});
    gantry.refused("vm.restore", Some(nowhere), 500, "nowhere")?;
    gantry.refused(
        "vm.restore",
        Some(json!({"source_url": "nowhere"})),
        400,
        "file://",
    )
}
