//! This repository's units under systemd, in a guest whose init is systemd.

use anyhow::{Result, ensure};
use serde_json::json;

use super::{Context, Entry, accelerator::accel};
use crate::{
    gantry::{CMDLINE, Gantry},
    guest::Guest,
    opencl::{self, Pool},
};

pub const SCENARIOS: &[Entry] = &[(
    "services: systemd runs agent, pool, arbiter and tunnel as their units say, and again when they are killed",
    units,
)];

/// Directory of the host's disk with PoCL in the guest.
const POCL: &str = "/opencl";

fn units(context: &Context) -> Result<()> {
    let pool = Pool::start(&context.dir)?;
    let more = json!({
        "memory": {"size": 768_u64 << 20},
        "payload": {
            "initramfs": opencl::guest_files_with_systemd(&context.dir)?,
            "cmdline": format!("{CMDLINE} lsm=landlock"),
        },
        "disks": [{"path": opencl::DISK, "readonly": true}],
        "accels": [accel(&pool)],
    });
    let (_gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    let said = guest.run("gantry-agent install 2>&1")?;
    ensure!(said.ends_with("started gantry-agent.service"), "{said}");
    // What has been started is listening.
    let list = guest.run("clinfo -l 2>&1")?;
    ensure!(list.contains("Device #0"), "{list}");
    for unit in [
        "gantry-agent",
        "gantry-accel",
        "gantry-arbiter",
        "gantry-tunnel",
    ] {
        let found = guest.run(&format!("systemd-analyze verify {unit}.service 2>&1"))?;
        ensure!(found.is_empty(), "{found}");
    }
    encrypted_by_tunnel(&mut guest)?;
    served_by_agent(&mut guest)?;
    guest.run("systemctl --no-ask-password disable --now gantry-agent 2>&1")?;
    served_by_pool(&mut guest)?;
    shared_by_arbiter(&mut guest)?;
    installed_and_removed(&mut guest)
}

fn main_process(guest: &mut Guest, unit: &str) -> Result<String> {
    guest.run(&format!("systemctl show --property MainPID --value {unit}"))
}

/// Kills a unit's process, and waits until a new one listens.
fn killed(guest: &mut Guest, unit: &str) -> Result<()> {
    let before = main_process(guest, unit)?;
    guest.run(&format!("kill -9 {before}"))?;
    let state = format!("systemctl is-active {unit}; systemctl show -P NRestarts {unit}");
    guest.eventually(&state, |text| text == "active\n1")?;
    let after = main_process(guest, unit)?;
    ensure!(after != before && after != "0", "{before}, then {after}");
    Ok(())
}

fn finds_a_device(guest: &mut Guest) -> Result<()> {
    let command = "clinfo -l 2>&1 | grep 'Device #0' || systemctl status 'gantry-*' | tail -n 20";
    guest.eventually(command, |text| text.contains("Device #0"))?;
    Ok(())
}

/// Output of `stat` for the socket.
fn socket(guest: &mut Guest) -> Result<String> {
    guest.run("stat -c '%A %U %G' /run/gantry/opencl.sock")
}

/// The tunnel reads root's keys, has none of root's privileges, and serves nobody but root.
fn encrypted_by_tunnel(guest: &mut Guest) -> Result<()> {
    guest.run(
        "chmod 600 /etc/gantry/tls/1/*; systemctl --no-ask-password enable --now gantry-tunnel 2>&1",
    )?;
    // A reply: it has read the keys, and listens at that port.
    const ASK: &str = "agent ask /run/gantry-tunnel/socket \
         '{\"listen\":{\"at\":\"127.0.0.1:4444\",\"tls_dir\":\"/etc/gantry/tls/1\"}}' 2>&1";
    guest.eventually(ASK, |answer| answer == "\"ready\"")?;
    let shown = guest.run("stat -c '%A %U' /run/gantry-tunnel /run/gantry-tunnel/socket")?;
    ensure!(shown == "drwx------ root\nsrw------- root", "{shown}");
    let process = main_process(guest, "gantry-tunnel")?;
    let status = guest.run(&format!("cat /proc/{process}/status"))?;
    ensure!(
        status.contains("NoNewPrivs:\t1")
            && status.contains("CapEff:\t0000000000000000")
            && status.contains("CapBnd:\t0000000000000000"),
        "{status}"
    );
    killed(guest, "gantry-tunnel")?;
    guest.eventually(ASK, |answer| answer == "\"ready\"")?;
    Ok(())
}

fn served_by_agent(guest: &mut Guest) -> Result<()> {
    finds_a_device(guest)?;
    let shown = socket(guest)?;
    ensure!(shown == "srw-rw---- root render", "{shown}");
    // No more privileges than it needs, and its own view of the file system.
    let process = main_process(guest, "gantry-agent")?;
    let status = guest.run(&format!("cat /proc/{process}/status"))?;
    ensure!(
        status.contains("NoNewPrivs:\t1") && status.contains("CapBnd:\t00000000002a0003"),
        "{status}"
    );
    has_interrupts(guest)?;
    killed(guest, "gantry-agent")?;
    finds_a_device(guest)?;
    has_interrupts(guest)
}

/// Its unit has loaded the kernel's driver, and gives it access to interrupts.
fn has_interrupts(guest: &mut Guest) -> Result<()> {
    let agent = main_process(guest, "gantry-agent")?;
    let found = guest.run(&format!("ls -l /proc/{agent}/fd; cat /proc/interrupts"))?;
    ensure!(
        found.contains("/dev/uio0") && found.contains("uio_pci_generic"),
        "{found}"
    );
    Ok(())
}

/// This guest is a host for its own programs.
fn served_by_pool(guest: &mut Guest) -> Result<()> {
    let libraries = "usr/lib/x86_64-linux-gnu";
    guest.run(&format!(
        "mkdir -p {POCL} /{libraries} && mount -t ext4 -o ro /dev/vda {POCL} && \
         ln -s {POCL}/{libraries}/pocl /{libraries}/pocl"
    ))?;
    guest.run(&format!(
        "d=/etc/systemd/system/gantry-accel.service.d; mkdir -p $d && \
         printf '[Service]\\nEnvironment=OCL_ICD_VENDORS={POCL}/etc/OpenCL/vendors \
         LD_LIBRARY_PATH={POCL}/{libraries}\\n' >$d/pocl.conf"
    ))?;
    guest.run("systemctl --no-ask-password enable --now gantry-accel 2>&1")?;
    finds_a_device(guest)?;
    let shown = socket(guest)?;
    ensure!(
        shown.starts_with("srwxrwx--- ") && shown.ends_with(" kvm") && !shown.contains("root"),
        "{shown}"
    );
    let process = main_process(guest, "gantry-accel")?;
    let status = guest.run(&format!("cat /proc/{process}/status"))?;
    ensure!(
        status.contains("NoNewPrivs:\t1")
            && status.contains("CapBnd:\t0000000000000000")
            && !status.contains("Uid:\t0"),
        "{status}"
    );
    each_in_a_group(guest)?;
    killed(guest, "gantry-accel")?;
    finds_a_device(guest)?;
    each_in_a_group(guest)
}

/// The service's workers have control groups with limits, and its pool has one without.
fn each_in_a_group(guest: &mut Guest) -> Result<()> {
    let service = "/sys/fs/cgroup/system.slice/gantry-accel.service";
    let limits = format!(
        "cd {service} && for g in */; do echo $g $(cat $g/pids.max $g/memory.oom.group) \
         $(wc -l <$g/cgroup.procs); done"
    );
    let is = |text: &str| {
        let lines: Vec<&str> = text.lines().collect();
        let workers = lines.iter().filter(|line| line.starts_with("worker-"));
        let (mut limited, mut count) = (true, 0);
        for line in workers {
            count += 1;
            limited &= !line.contains("max") && line.ends_with(" 1 1");
        }
        limited && count == 2 && lines.contains(&"pool/ max 0 1")
    };
    guest.eventually(&limits, is)?;
    Ok(())
}

/// The same pool shares through an arbiter, which its own unit starts.
fn shared_by_arbiter(guest: &mut Guest) -> Result<()> {
    guest.run(
        "mv /lib/systemd/system/arbiter.conf /etc/systemd/system/gantry-accel.service.d && \
         systemctl daemon-reload && systemctl --no-ask-password restart gantry-accel 2>&1",
    )?;
    let found = guest.run("systemd-analyze verify gantry-accel.service 2>&1")?;
    ensure!(found.is_empty(), "{found}");
    finds_a_device(guest)?;
    has_workers(guest)?;
    let shown = guest.run("stat -c '%A %U' /run/gantry-arbiter/socket")?;
    ensure!(
        shown.starts_with("srw------- ") && !shown.contains("root"),
        "{shown}"
    );
    // The pool's directory is removed with the pool, and the arbiter's stays.
    guest.run("systemctl --no-ask-password stop gantry-accel 2>&1")?;
    let left = guest.run("ls -d /run/gantry /run/gantry-arbiter/socket 2>/dev/null || true")?;
    ensure!(left == "/run/gantry-arbiter/socket", "{left}");
    guest.run("systemctl --no-ask-password start gantry-accel 2>&1")?;
    killed(guest, "gantry-arbiter")?;
    has_workers(guest)
}

/// The agent installs the driver when it starts, reports when it must be restarted, and leaves nothing behind.
fn installed_and_removed(guest: &mut Guest) -> Result<()> {
    const DRIVER: &str = "/usr/local/lib/libgantry_opencl.so";
    const IS_ENABLED: &str = "systemctl is-enabled gantry-agent 2>&1 || true";
    guest.run("systemctl --no-ask-password disable --now gantry-accel 2>&1")?;
    ensure!(guest.run(IS_ENABLED)? == "disabled");
    guest.run(&format!("rm {DRIVER} && systemctl start gantry-agent"))?;
    guest.run(&format!("ls {DRIVER}"))?;
    let said = guest.run("gantry-agent install 2>&1")?;
    ensure!(
        said.contains("placed /etc/systemd") && said.contains("systemctl restart gantry-agent"),
        "{said}"
    );
    ensure!(guest.run(IS_ENABLED)? == "enabled");
    finds_a_device(guest)?;
    let said = guest.run("gantry-agent uninstall 2>&1")?;
    ensure!(said.starts_with("stopped gantry-agent.service"), "{said}");
    let left = guest.run(
        "find / -xdev -name '*gantry?agent*' -o -name '*gantry?opencl*' -o -name gantry.icd; \
         ls -d /run/gantry 2>/dev/null; pidof gantry-agent; systemctl is-active gantry-agent; true",
    )?;
    ensure!(left == "/bin/gantry-agent\ninactive", "{left}");
    Ok(())
}

/// Waits until a worker is connected to the arbiter, as long as it has an application. Both ends of a connection belong
/// to the network namespace of the connecting process, the pool's.
fn has_workers(guest: &mut Guest) -> Result<()> {
    guest
        .run("(touch /tmp/on; while [ -e /tmp/on ]; do clinfo -l; done) >/dev/null 2>&1 & true")?;
    let process = main_process(guest, "gantry-accel")?;
    let sockets = format!("grep gantry-arbiter/socket$ /proc/{process}/net/unix");
    guest.eventually(&sockets, |found| found.contains("gantry-arbiter"))?;
    guest.run("rm /tmp/on")?;
    Ok(())
}
