//! Guests that compute on the host's accelerators.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use super::{
    Context, Entry,
    hotplug::gone,
    migration,
    snapshots::{restored, url},
};
use crate::{
    gantry::Gantry,
    guest::Guest,
    net::sh,
    opencl::{self, Pool, load_uio, until},
};

pub const SCENARIOS: &[Entry] = &[
    (
        "accelerator: programs of the guest compute on the host's device",
        compute,
    ),
    (
        "accelerator: one file and one command give a guest OpenCL, and take it away again",
        installed,
    ),
    (
        "accelerator: it comes and goes, and a killed worker fails its application only",
        deaths,
    ),
    (
        "accelerator: a snapshot is refused while applications use it, or takes it from them",
        saved,
    ),
    (
        "accelerator: an application goes on with another pool's worker, and in a snapshot",
        moved,
    ),
    (
        "accelerator: a worker has so much memory, and so many processes, with all that it starts",
        limited,
    ),
    (
        "accelerator: a host that lacks what the gate needs says so, to its users and to guests",
        no_gate,
    ),
];

/// Installs the driver and starts the agent that was installed with it.
pub(super) fn start_agent(guest: &mut Guest) -> Result<()> {
    guest.run("gantry-agent install")?;
    opencl::start_agent(guest, "/usr/local/sbin/gantry-agent")
}

/// Number of port interrupts that a guest has received.
fn interrupts(guest: &mut Guest) -> Result<u64> {
    let counted = guest.run(
        "awk '/uio_pci_generic/ { for (i = 2; $i ~ /^[0-9]+$/; i++) n += $i } END { print n + 0 }' \
         /proc/interrupts",
    )?;
    counted
        .parse()
        .with_context(|| format!("no count: {counted}"))
}

/// Reads a counter of the accelerator.
pub(super) fn counter(gantry: &Gantry, name: &str) -> Result<u64> {
    let counters = gantry.ok("GET", "vm.counters", None)?;
    counters["a"][name]
        .as_u64()
        .with_context(|| format!("no counter {name} in {counters}"))
}

pub fn accel(pool: &Pool) -> Value {
    json!({"socket": pool.socket, "window": 256_u64 << 20, "slices": 4, "id": "a"})
}

fn compute(context: &Context) -> Result<()> {
    let pool = Pool::start(&context.dir)?;
    let mut accel = accel(&pool);
    accel["compiler_cache"] = json!("web");
    let more = json!({
        "payload": {"initramfs": opencl::guest_files(&context.dir)?},
        "accels": [accel],
    });
    let (mut gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    load_uio(&mut guest)?;
    start_agent(&mut guest)?;
    let list = guest.run("clinfo -l; cat /tmp/agent.log")?;
    ensure!(list.contains("Device #0"), "clinfo finds no device: {list}");
    let shared = guest.run("GANTRY_OPENCL_SPIN=20 opencl-shared 2>&1 || true")?;
    ensure!(shared.contains("followed 1000 nodes"), "{shared}");
    let figures =
        guest.run("GANTRY_OPENCL_SPIN=20 opencl-figures --brief || cat /tmp/agent.log")?;
    ensure!(figures.contains("numbers is right"), "{figures}");
    // An application that waits for long is woken by interrupts; if the module is not loaded,
    // without them.
    ensure!(counter(&gantry, "sleepers_woken")? > 0);
    let interrupts = interrupts(&mut guest)?;
    let raised = counter(&gantry, "line_interrupts")?;
    ensure!(
        interrupts > 0 && interrupts <= raised,
        "{raised} interrupts were raised, and the guest had {interrupts}: {}",
        guest.run("cat /proc/interrupts /tmp/agent.log")?
    );
    ensure!(counter(&gantry, "workers_started")? == 3);
    ensure!(counter(&gantry, "workers_lost")? == 0);
    // Kept for the next application of this guest user, whom the agent has identified.
    let compiled = pool.compiled("vm-0-web/user-0")?;
    ensure!(
        !compiled.is_empty(),
        "nothing was kept of what was compiled"
    );
    // A worker that serves an application of the guest ends with the VMM, whatever it is doing.
    guest.run("GANTRY_OPENCL_SPIN=20 opencl-figures >/dev/null 2>&1 & true")?;
    until("a worker serves", || {
        Ok(counter(&gantry, "workers_started")? == 4)
    })?;
    let serving = pool.workers()?;
    gantry.kill()?;
    // As before, one worker waits for an application.
    until("the worker is gone", || {
        let left = pool.workers()?;
        Ok(left.len() == 1 && !serving.iter().all(|worker| left.contains(worker)))
    })
}

/// Kernels on a CPU device are native code, which can start processes and share memory.
fn limited(context: &Context) -> Result<()> {
    const LOG: &str = "gantry.log";
    let sizes = ["--heap", "256", "--window", "64"];
    let (pool, group) = Pool::start_in_group(&context.dir, &sizes)?;
    let groups = || -> Result<Vec<PathBuf>> {
        let entries = fs::read_dir(&group)?.filter_map(Result::ok);
        let is_group = |entry: &fs::DirEntry| entry.path().is_dir();
        Ok(entries.filter(is_group).map(|entry| entry.path()).collect())
    };
    // The group of one waiting worker, and the pool's own.
    let alone = || Ok(groups()?.len() == 2);
    let log = || fs::read_to_string(context.dir.join(LOG));
    until("a worker has a group", alone)?;
    let limits = |path: &Path| -> Result<[String; 3]> {
        let read =
            |name| -> Result<String> { Ok(fs::read_to_string(path.join(name))?.trim().to_owned()) };
        Ok([
            read("memory.max")?,
            read("memory.oom.group")?,
            read("pids.max")?,
        ])
    };
    let workers = groups()?.into_iter().find(|path| !path.ends_with("pool"));
    let workers = workers.context("no worker has a group")?;
    let memory = (256 + 64 + 512_u64) << 20;
    let tasks = 256 + 16 * thread::available_parallelism()?.get();
    let expected = [memory.to_string(), "1".to_owned(), tasks.to_string()];
    // They are set one after another.
    until(&format!("a group has the limits {expected:?}"), || {
        Ok(limits(&workers)? == expected)
    })?;
    let hostile = |attack: &str| {
        let mut command = Command::new("opencl-hostile");
        command.arg(&pool.socket).arg(attack);
        command
    };
    // As many processes as possible; they end with the worker.
    let mut child = hostile("processes").stdin(Stdio::piped()).spawn()?;
    let stopped = || {
        let events = groups()?.into_iter().map(|path| path.join("pids.events"));
        let events = events.filter_map(|path| fs::read_to_string(path).ok());
        Ok(events
            .into_iter()
            .any(|events| !events.starts_with("max 0")))
    };
    let reached = until("a worker has no more processes", stopped);
    drop(child.stdin.take());
    child.wait()?;
    reached?;
    until("a worker's processes and its group are gone", alone)?;
    // As much memory as possible; others are not affected.
    let output = hostile("memory").output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    ensure!(said == "ended\n", "{output:?}");
    until("the log says why", || Ok(log()?.contains("no more memory")))?;
    let pools = fs::read_to_string(group.join("pool/memory.events"))?;
    ensure!(pools.contains("oom_kill 0"), "{pools}");
    until("the group is gone", alone)?;
    // The groups of a killed pool are reused by the next one.
    drop(pool);
    let (pool, _) = Pool::start_in_group(&context.dir, &sizes)?;
    until("a worker has a group again", alone)?;
    let output = Command::new("opencl-hostile")
        .arg(&pool.socket)
        .arg("garbage")
        .output()?;
    ensure!(output.stdout == b"ended\n", "{output:?}");
    Ok(())
}

/// Starts with a guest that has nothing of Gantry but the agent's file, and ends with a guest that
/// has nothing else again. The other scenarios use what is installed this way.
fn installed(context: &Context) -> Result<()> {
    // Without mounted file systems, including /tmp.
    const ALL: &str = "find / -xdev | sort";
    const PLACED: [&str; 5] = [
        "/usr/local/lib/libgantry_opencl.so",
        "/etc/OpenCL/vendors/gantry.icd",
        "/usr/local/sbin/gantry-agent",
        "/usr/local/lib/systemd/system/gantry-agent.service",
        "/etc/systemd/system/multi-user.target.wants/gantry-agent.service",
    ];
    let of_all =
        |said: &str, line: fn(&str) -> String| PLACED.iter().all(|path| said.contains(&line(path)));
    let pool = Pool::start(&context.dir)?;
    let more = json!({
        "payload": {"initramfs": opencl::guest_files(&context.dir)?},
        "accels": [accel(&pool)],
    });
    let (_gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    let of_gantry = guest.run(&format!(
        "mkdir -p /run; {ALL} >/tmp/before; grep gantry /tmp/before"
    ))?;
    ensure!(of_gantry == "/bin/gantry-agent", "{of_gantry}");
    start_agent(&mut guest)?;
    let found = guest.run("clinfo -l; cat /tmp/agent.log")?;
    ensure!(found.contains("Device #0"), "{found}");
    let again = guest.run("gantry-agent install")?;
    ensure!(
        of_all(&again, |path| format!("{path} is up to date"))
            && again.contains("systemd does not run here"),
        "{again}"
    );
    let replaced = guest.run(&format!(
        "cp {0} /tmp/same && echo >>{0} && gantry-agent install && cmp /tmp/same {0}",
        PLACED[0]
    ))?;
    ensure!(
        replaced.contains(&format!("replaced {}", PLACED[0])),
        "{replaced}"
    );
    let found = guest.run("clinfo -l")?;
    ensure!(found.contains("Device #0"), "{found}");
    let removed = guest.run("/usr/local/sbin/gantry-agent uninstall")?;
    ensure!(
        of_all(&removed, |path| format!("removed {path}")),
        "{removed}"
    );
    let found = guest.status_of("clinfo -l")?.1;
    ensure!(!found.contains("Device #0"), "{found}");
    guest.run("killall gantry-agent; while pidof gantry-agent; do sleep 0.1; done")?;
    let nothing = guest.run("gantry-agent uninstall")?;
    ensure!(nothing == "nothing is installed", "{nothing}");
    let left = guest.run(&format!("{ALL} | diff /tmp/before -"))?;
    ensure!(left.is_empty(), "{left}");
    Ok(())
}

fn deaths(context: &Context) -> Result<()> {
    let pool = Pool::start(&context.dir)?;
    let more = json!({"payload": {"initramfs": opencl::guest_files(&context.dir)?}});
    let (gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    // When a port is plugged or unplugged, the kernel's driver is bound to it or unbound.
    load_uio(&mut guest)?;
    start_agent(&mut guest)?;
    // Without a port there is no device, but no error either.
    let none = guest.status_of("clinfo -l")?.1;
    ensure!(!none.contains("Device #0"), "{none}");
    gantry.put("vm.add-accel", accel(&pool))?;
    guest.eventually("clinfo -l 2>&1; cat /tmp/agent.log", |text| {
        text.contains("Device #0")
    })?;
    // An application loses its worker while the worker compiles the program, which takes long here.
    guest.run(
        "(GANTRY_OPENCL_SPIN=20 opencl-figures >/tmp/figures 2>&1; \
         echo ended $? >>/tmp/figures) & true",
    )?;
    guest.eventually("cat /tmp/figures", |text| text.contains("PoCL"))?;
    let before = pool.workers()?;
    sh(&format!(
        "kill -9 {}",
        before
            .iter()
            .map(u32::to_string)
            .collect::<Vec<_>>()
            .join(" ")
    ))?;
    let end = guest.eventually("cat /tmp/figures", |text| text.contains("ended"))?;
    ensure!(end.contains("failed with code"), "{end}");
    // The program is told first.
    until("the lost worker is counted", || {
        Ok(counter(&gantry, "workers_lost")? == 1)
    })?;
    ensure!(counter(&gantry, "sleepers_woken")? > 0);
    // A new worker serves the next application.
    let list = guest.run("clinfo -l")?;
    ensure!(list.contains("Device #0"), "{list}");
    guest.run("GANTRY_OPENCL_SPIN=20 opencl-figures >/dev/null 2>&1 & true")?;
    gantry.put("vm.remove-device", json!({"id": "a"}))?;
    gone(&gantry, "a")?;
    guest.run("pidof gantry-agent && ! ls /dev/uio* 2>/dev/null")?;
    let none = guest.status_of("clinfo -l")?.1;
    ensure!(!none.contains("Device #0"), "{none}");
    Ok(())
}

fn saved(context: &Context) -> Result<()> {
    let pool = Pool::start(&context.dir)?;
    let more = json!({
        "payload": {"initramfs": opencl::guest_files(&context.dir)?},
        "accels": [accel(&pool)],
    });
    let (mut gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    start_agent(&mut guest)?;
    guest.run(
        "(GANTRY_OPENCL_SPIN=20 opencl-figures >/tmp/figures 2>&1; \
         echo ended $? >>/tmp/figures) & true",
    )?;
    guest.eventually("cat /tmp/figures", |text| text.contains("PoCL"))?;
    gantry.act("vm.pause")?;
    let body = json!({"destination_url": url(context)});
    gantry.refused("vm.snapshot", Some(body), 500, "use the accelerator")?;
    ensure!(counter(&gantry, "slices_in_use")? == 1);
    let body = json!({"destination_url": url(context), "detach": true});
    gantry.put("vm.snapshot", body)?;
    ensure!(counter(&gantry, "slices_in_use")? == 0);
    // The module is not loaded here.
    ensure!(counter(&gantry, "sleepers_woken")? == 0);
    gantry.kill()?;
    let (gantry, mut guest) = restored(context, json!({}))?;
    let end = guest.eventually("cat /tmp/figures", |text| text.contains("ended"))?;
    ensure!(end.contains("failed with code"), "{end}");
    let list = guest.run("clinfo -l")?;
    ensure!(list.contains("Device #0"), "{list}");
    ensure!(counter(&gantry, "workers_started")? == 1);
    Ok(())
}

/// Waits until the program that writes to /tmp/moving has computed something new, or anything at
/// all.
pub(crate) fn goes_on(guest: &mut Guest) -> Result<()> {
    let before = guest.run("grep -c round /tmp/moving; true")?;
    let said = guest.eventually("grep -c round /tmp/moving; tail -n 1 /tmp/moving", |now| {
        now.lines().next() != Some(before.trim()) || now.contains("ended")
    })?;
    ensure!(!said.contains("ended"), "{said}");
    Ok(())
}

/// A program of the guest computes while its worker is replaced, and its machine restored.
fn moved(context: &Context) -> Result<()> {
    let pool = Pool::start(&context.dir)?;
    let other = Pool::start_other(&context.dir)?;
    let more = json!({
        "payload": {"initramfs": opencl::guest_files(&context.dir)?},
        "accels": [accel(&pool)],
    });
    let (mut gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    start_agent(&mut guest)?;
    guest.run("(opencl-moving /tmp/stop >/tmp/moving 2>&1; echo ended $? >>/tmp/moving) & true")?;
    goes_on(&mut guest)?;
    let serving = pool.workers()?;
    let to = |pool: &Pool| json!({"id": "a", "socket": pool.socket});
    let moved = gantry.put("vm.move-accel", to(&other))?;
    ensure!(moved["slices"] == json!([0]), "{moved}");
    until("the first worker is gone", || {
        let left = pool.workers()?;
        Ok(!serving.iter().all(|worker| left.contains(worker)))
    })?;
    goes_on(&mut guest)?;
    // Nobody is there, so it stays where it is.
    let nowhere = json!({"id": "a", "socket": "/opencl/run/nobody", "slice": 0});
    gantry.refused("vm.move-accel", Some(nowhere), 500, "slice 0 stays")?;
    let none = json!({"id": "a", "slice": 3});
    gantry.refused("vm.move-accel", Some(none), 500, "slice 3")?;
    goes_on(&mut guest)?;
    // New applications are served where all others went.
    let before = other.workers()?;
    let list = guest.run("clinfo -l")?;
    ensure!(list.contains("Device #0"), "{list}");
    ensure!(other.workers()? != before, "the first pool has served it");
    gantry.act("vm.pause")?;
    let body = json!({"destination_url": url(context)});
    gantry.refused("vm.snapshot", Some(body), 500, "use the accelerator")?;
    let body = json!({"destination_url": url(context), "accel": "save"});
    gantry.put("vm.snapshot", body)?;
    // The application is saved and continues.
    gantry.act("vm.resume")?;
    goes_on(&mut guest)?;
    gantry.kill()?;
    let (gantry, mut guest) = restored(context, json!({"accels": [to(&pool)]}))?;
    goes_on(&mut guest)?;
    // It moves to another VMM with its machine, and to the other pool.
    let workers = other.workers()?;
    let dir = context.dir.join("there");
    // The socket of the serial port is where the first configuration says.
    let serial = context.dir.join("serial.sock");
    let there = migration::wait_with(&dir, &serial, &[(&pool.socket, &other.socket)])?;
    let (gantry, mut guest) = migration::go(gantry, there, json!({"accel": "Move"}))?;
    goes_on(&mut guest)?;
    let serving = other.workers()?;
    ensure!(
        serving.iter().any(|worker| !workers.contains(worker)),
        "the other pool does not serve it: {workers:?} {serving:?}"
    );
    guest.run("touch /tmp/stop")?;
    let end = guest.eventually("cat /tmp/moving", |text| text.contains("ended"))?;
    ensure!(
        end.contains("rounds were right") && end.contains("ended 0"),
        "{end}"
    );
    ensure!(counter(&gantry, "workers_lost")? == 0);
    // The VM can also migrate without its accelerator; a computing application gets an error and
    // ends.
    guest.run(
        "rm /tmp/stop; (opencl-moving /tmp/stop >/tmp/moving 2>&1; echo ended $? >>/tmp/moving) & true",
    )?;
    goes_on(&mut guest)?;
    let dir = context.dir.join("without");
    let there = migration::wait_with(&dir, &gantry.serial, &[])?;
    let (gantry, mut guest) = migration::go(gantry, there, json!({"accel": "Detach"}))?;
    let end = guest.eventually("cat /tmp/moving", |text| text.contains("ended"))?;
    ensure!(!end.contains("rounds were right"), "{end}");
    let info = gantry.ok("GET", "vm.info", None)?;
    ensure!(info["config"]["accels"].is_null(), "{info}");
    let list = guest.status_of("clinfo -l")?.1;
    ensure!(!list.contains("Device #0"), "{list}");
    Ok(())
}

/// The test hosts have no VT-x.
fn no_gate(context: &Context) -> Result<()> {
    // Registers of the port (vmfunc-gate/src/port.rs) and their values.
    const STATE: u64 = 0x0c;
    const REASON: u64 = 0x10;
    const COMMAND: u64 = 0x18;
    const LACKS: u64 = 0x38;
    let socket = context.dir.join("gate");
    let more = json!({
        "accel_server": {"socket": socket, "id": "server"},
        "accels": [{"transport": "Gate", "server": socket, "shared": 65536, "id": "client"}],
    });
    let (gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    let log = gantry.log_until("nobody can use the gate")?;
    ensure!(
        log.contains("no VT-x") && log.contains("no module"),
        "{log}"
    );
    let find = "for f in /sys/bus/pci/devices/*; do \
                grep -q 0x4754 $f/device && echo 1 >$f/enable && \
                head -n 1 $f/resource | cut -d ' ' -f 1; done; true";
    let ports = guest.run(find)?;
    let ports: Vec<_> = ports
        .split_whitespace()
        .filter_map(|port| u64::from_str_radix(port.trim_start_matches("0x"), 16).ok())
        .collect();
    ensure!(ports.len() == 2, "{ports:x?}");
    for port in ports {
        let mut read = |register: u64| -> Result<u64> {
            let text = guest.run(&format!("devmem {:#x} 32", port + register))?;
            let text = text.trim().trim_start_matches("0x");
            u64::from_str_radix(text, 16).with_context(|| format!("devmem says {text:?}"))
        };
        // VT-x and the module are missing.
        let lacks = read(LACKS)?;
        ensure!(lacks & 33 == 33, "{lacks:#x}");
        // Freeze and connect: one does not apply to this port, and the other one fails.
        for command in [1, 2] {
            guest.run(&format!("devmem {:#x} 32 {command}", port + COMMAND))?;
        }
        let mut read = |register: u64| guest.run(&format!("devmem {:#x} 32", port + register));
        let (state, reason) = (read(STATE)?, read(REASON)?);
        ensure!(state.trim() == "0x00000004", "{state} {reason}");
    }
    // The guest continues, and the ports do not prevent a pause.
    ensure!(gantry.state()? == "Running");
    gantry.act("vm.pause")?;
    gantry.act("vm.resume")?;
    guest.run("true")?;
    Ok(())
}
