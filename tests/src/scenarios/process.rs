//! The VMM process: confinement, idleness, and what it leaves behind.

use std::{fs, os::unix::process::ExitStatusExt, time::Duration};

use anyhow::{Context as _, Result, ensure};
use serde_json::json;

use super::{Context, Entry, disks::image};
use crate::{gantry::Gantry, hijack, net::sh};

pub const SCENARIOS: &[Entry] = &[
    (
        "process: kill -9 leaves nothing that stops the next start",
        killed,
    ),
    ("process: every thread is confined by seccomp", seccomp),
    (
        "process: a forbidden system call on any of its threads ends it",
        forbidden_call,
    ),
    ("process: Landlock keeps it from other files", landlock),
    ("process: an idle guest costs next to nothing", idle),
    (
        "process: threads carry the names that tools look for",
        names,
    ),
    ("process: SIGTERM ends it in an orderly way", sigterm),
];

fn killed(context: &Context) -> Result<()> {
    let path = context.dir.join("disk.raw");
    image(&path, 4 << 20)?;
    let more = json!({
        "disks": [{"path": path, "image_type": "Raw"}],
        "net": [{"tap": "tap-k", "ip": "192.168.77.1", "mask": "255.255.255.0"}],
        "vsock": {"cid": 3, "socket": context.dir.join("vsock")},
        "console": {"mode": "Socket", "socket": context.dir.join("console.sock")},
    });
    for _ in 0..2 {
        let (mut gantry, _guest) = Gantry::boot(&context.dir, more.clone())?;
        gantry.kill()?;
    }
    let (_gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    guest.run("dd if=/dev/vda of=/dev/null bs=1M 2>/dev/null")?;
    Ok(())
}

/// A thread of the process under test.
struct Thread {
    id: i32,
    name: String,
    /// `/proc/.../status`.
    status: String,
}

impl Thread {
    /// Number of voluntary context switches, that is, how often the thread went to sleep.
    fn sleeps(&self) -> Result<u64> {
        self.status
            .lines()
            .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))
            .and_then(|count| count.trim().parse().ok())
            .with_context(|| format!("no count of switches of {}", self.name))
    }
}

fn threads(gantry: &Gantry) -> Result<Vec<Thread>> {
    let mut threads = Vec::new();
    for entry in fs::read_dir(format!("/proc/{}/task", gantry.pid()))? {
        let entry = entry?;
        let file = |name| fs::read_to_string(entry.path().join(name));
        // A thread that served a connection may have ended.
        let (Ok(name), Ok(status)) = (file("comm"), file("status")) else {
            continue;
        };
        threads.push(Thread {
            id: entry.file_name().to_string_lossy().parse()?,
            name: name.trim().to_owned(),
            status,
        });
    }
    Ok(threads)
}

fn seccomp(context: &Context) -> Result<()> {
    let path = context.dir.join("disk.raw");
    image(&path, 4 << 20)?;
    let more = json!({"disks": [{"path": path, "image_type": "Raw"}]});
    let (gantry, _guest) = Gantry::boot(&context.dir, more)?;
    for thread in threads(&gantry)? {
        // Mode 2 is a filter.
        ensure!(
            thread.status.contains("Seccomp:\t2"),
            "thread {} is not confined",
            thread.name
        );
    }
    Ok(())
}

/// Tries what an attacker who has taken over a thread would try first: executing another program.
/// It happens on threads of the running process, not on a thread made for the test.
fn forbidden_call(context: &Context) -> Result<()> {
    for name in ["vcpu0", "_console", "http-server", "main"] {
        let (mut gantry, _guest) = Gantry::boot(&context.dir, json!({}))?;
        let all = threads(&gantry)?;
        let thread = all
            .iter()
            .find(|thread| match name {
                "main" => thread.id.unsigned_abs() == gantry.pid(),
                name => thread.name.starts_with(name),
            })
            .with_context(|| {
                let names: Vec<_> = all.iter().map(|thread| &thread.name).collect();
                format!("no thread {name} among {names:?}")
            })?;
        hijack::execve(thread.id)?;
        let status = gantry.wait_exit()?;
        ensure!(
            status.signal() == Some(libc::SIGSYS),
            "after execve on {name}, gantry ended with {status}"
        );
    }
    Ok(())
}

fn landlock(context: &Context) -> Result<()> {
    let lsms = fs::read_to_string("/sys/kernel/security/lsm").unwrap_or_default();
    ensure!(lsms.contains("landlock"), "L1 has no Landlock: {lsms:?}");
    let allowed = context.dir.join("allowed.raw");
    let other = context.dir.join("other.raw");
    image(&allowed, 1 << 20)?;
    image(&other, 1 << 20)?;
    // In its own folder, because the console's socket makes its folder accessible.
    let serial = context.dir.join("serial");
    fs::create_dir(&serial)?;
    let more = json!({
        "landlock_enable": true,
        "disks": [{"path": allowed, "image_type": "Raw"}],
        "serial": {"mode": "Socket", "socket": serial.join("serial.sock")},
    });
    let mut gantry = Gantry::start(&context.dir, &[])?;
    gantry.serial = serial.join("serial.sock");
    let mut guest = gantry.create_and_boot(more)?;
    guest.run("dd if=/dev/vda of=/dev/null bs=1M 2>/dev/null")?;
    gantry.refused(
        "vm.add-disk",
        Some(json!({"path": other})),
        500,
        "other.raw",
    )
}

fn idle(context: &Context) -> Result<()> {
    let path = context.dir.join("disk.raw");
    image(&path, 4 << 20)?;
    let more = json!({
        "disks": [{"path": path, "image_type": "Raw"}],
        "net": [{"tap": "tap-i", "ip": "192.168.77.1", "mask": "255.255.255.0"}],
        "balloon": {"size": 0},
        "vsock": {"cid": 3, "socket": context.dir.join("vsock")},
    });
    let (gantry, _guest) = Gantry::boot(&context.dir, more)?;
    std::thread::sleep(Duration::from_secs(2));
    let mut last = rests(&gantry);
    for _ in 1..RESTS {
        if last.is_ok() {
            break;
        }
        last = rests(&gantry);
    }
    last.with_context(|| format!("{RESTS} times, the last"))
}

/// How many times an idle guest is watched until it is at rest. On a busy host, the guest's kernel
/// may ask for entropy, and the host may send frames, even long after the boot.
const RESTS: usize = 12;

/// Checks that nothing happens for four seconds.
fn rests(gantry: &Gantry) -> Result<()> {
    let (before, start) = (threads(gantry)?, gantry.cpu_time()?);
    std::thread::sleep(Duration::from_secs(4));
    let (after, used) = (threads(gantry)?, gantry.cpu_time()? - start);
    // A busy thread would use four seconds. The guest's own ticks take some time in the rig.
    ensure!(used < Duration::from_secs(1), "{used:?} of CPU time in 4 s");
    // Only a vCPU has its own reasons to wake up.
    for thread in after
        .iter()
        .filter(|thread| !thread.name.starts_with("vcpu"))
    {
        let earlier = before.iter().find(|earlier| earlier.id == thread.id);
        let earlier = earlier.with_context(|| format!("thread {} is new", thread.name))?;
        let woken = thread.sleeps()? - earlier.sleeps()?;
        // A thread that wakes up every second does so at least three times in each measurement. The
        // thread of an unused vsock device never wakes up.
        let allowed = if thread.name.starts_with("_vsock") {
            0
        } else {
            2
        };
        ensure!(
            woken <= allowed,
            "{} woke up {woken} times in 4 s",
            thread.name
        );
    }
    Ok(())
}

fn names(context: &Context) -> Result<()> {
    let path = context.dir.join("disk.raw");
    image(&path, 4 << 20)?;
    let more = json!({
        "cpus": {"boot_vcpus": 2, "max_vcpus": 2},
        "disks": [{"path": path, "image_type": "Raw"}],
        "net": [{"tap": "tap-n", "ip": "192.168.77.1", "mask": "255.255.255.0"}],
    });
    let (gantry, _guest) = Gantry::boot(&context.dir, more)?;
    let names: Vec<_> = threads(&gantry)?
        .into_iter()
        .map(|thread| thread.name)
        .collect();
    for prefix in ["vcpu0", "vcpu1", "_disk", "_net", "_rng"] {
        ensure!(
            names.iter().any(|name| name.starts_with(prefix)),
            "no {prefix} in {names:?}"
        );
    }
    Ok(())
}

fn sigterm(context: &Context) -> Result<()> {
    let (mut gantry, _guest) = Gantry::boot(&context.dir, json!({}))?;
    sh(&format!("kill -TERM {}", gantry.pid()))?;
    let status = gantry.wait_exit()?;
    ensure!(status.success(), "gantry ended with {status}");
    ensure!(
        !gantry.socket.exists() && !gantry.serial.exists(),
        "sockets are left behind"
    );
    Ok(())
}
