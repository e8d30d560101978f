//! A guest's own driver, Debian's nouveau without parameters, on a model of a GPU that another process serves.

use std::{
    fs::{self, File},
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use serde_json::json;

use super::{Context, Entry};
use crate::{
    gantry::{Gantry, PATIENCE, merge, with_gpu_driver},
    guest::Guest,
    rig::images::L2_GPU,
};

/// The scenarios, which share an L1.
pub const SCENARIOS: &[Entry] = &[
    (
        "gf100: a guest's nouveau drives the GPU: copies, semaphores, BAR 1, eviction, all its channels",
        works,
    ),
    (
        "gf100: nouveau without messages uses the line; a GPU that is killed costs its device only, \
         and comes back",
        killed,
    ),
];

/// Number of the GPU's 128 channels that are left when nouveau itself has two, and what a program prints that has used
/// these, up to the highest number.
pub(crate) const ALL_CHANNELS: u32 = 126;
pub(crate) const HAVE_COPIED: &str = "126 channels have copied, up to Some(127)";

/// A process that serves the GPU until this is dropped.
struct Server {
    child: Child,
    socket: PathBuf,
}

impl Server {
    fn start(context: &Context, vram: &str) -> Result<Self> {
        let socket = context.dir.join("gpu.sock");
        let _ = fs::remove_file(&socket);
        let log = File::options()
            .create(true)
            .append(true)
            .open(context.dir.join("gf100.log"))?;
        let child = Command::new("/bin/gantry-gf100")
            .arg("--socket")
            .arg(&socket)
            .args(["--vram", vram, "-v"])
            .stdin(Stdio::null())
            .stderr(log)
            .spawn()
            .context("cannot start gantry-gf100")?;
        let server = Self { child, socket };
        let deadline = Instant::now() + PATIENCE;
        while !server.socket.exists() {
            ensure!(Instant::now() < deadline, "gantry-gf100 does not listen");
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(server)
    }
}

impl Drop for Server {
    /// Like `kill -9`.
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Boots a guest with the GPU.
fn boot(context: &Context, server: &Server, words: &str) -> Result<(Gantry, Guest)> {
    let mut config = with_gpu_driver(words);
    let more = json!({
        "memory": {"size": 512_u64 << 20, "shared": true},
        "user_devices": [{"socket": server.socket, "id": "gpu"}],
    });
    merge(&mut config, more);
    Gantry::boot(&context.dir, config)
}

/// Loads those of these modules that the image contains, in order: some may be part of the kernel.
pub(crate) fn insert(guest: &mut Guest, modules: &[&str]) -> Result<()> {
    let modules = modules.join(" ");
    guest.run(&format!(
        "for m in {modules}; do [ ! -e /modules/$m.ko ] || insmod /modules/$m.ko || exit 1; done"
    ))?;
    Ok(())
}

/// Loads nouveau with its dependencies, and waits until programs can use it.
pub(crate) fn load(guest: &mut Guest) -> Result<()> {
    insert(guest, L2_GPU)?;
    let listed = guest.run("agent gpu-list")?;
    ensure!(
        listed.contains("renderD128") && listed.contains("0x10de:0x06d8 nouveau"),
        "what there is: {listed}"
    );
    let parameters = guest.run("cat /proc/cmdline")?;
    ensure!(!parameters.contains("nouveau"), "{parameters}");
    Ok(())
}

/// Runs a command of the guest's program, and checks its output.
pub(crate) fn does(guest: &mut Guest, what: &str, words: &str) -> Result<()> {
    let said = guest.run(&format!("agent {what}"))?;
    ensure!(said.contains(words), "{what}: {said}");
    Ok(())
}

/// Number of interrupts that nouveau has received.
pub(crate) fn interrupts(guest: &mut Guest) -> Result<(String, u64)> {
    let text = guest.run("grep nvkm /proc/interrupts")?;
    let count = text.split_whitespace().nth(1).unwrap_or_default();
    let count = count.parse().with_context(|| format!("no count: {text}"))?;
    Ok((text, count))
}

fn works(context: &Context) -> Result<()> {
    let server = Server::start(context, "64M")?;
    let (_gantry, mut guest) = boot(context, &server, "")?;
    load(&mut guest)?;
    does(&mut guest, "gpu-check", "gpu works")?;
    let (text, count) = interrupts(&mut guest)?;
    ensure!(text.contains("MSI") && count > 0, "interrupts: {text}");
    does(&mut guest, "gpu-evict", "were kept")?;
    does(
        &mut guest,
        &format!("gpu-channels {ALL_CHANNELS}"),
        HAVE_COPIED,
    )?;
    // Each ends its own channel, and nothing else.
    for what in ["fault", "method"] {
        does(&mut guest, &format!("gpu-misuse {what}"), "is over")?;
    }
    does(&mut guest, "gpu-m2mf", "m2mf works")?;
    does(&mut guest, "gpu-compute", "sums are right")?;
    endless(&mut guest)
}

/// Channels that never end by themselves. Others work meanwhile, and after nouveau has ended these channels, for which
/// it waits 15 seconds. It polls without a pause, and its kernel does not preempt itself: with one vCPU nothing else of
/// the guest runs then, and a channel that waits for the guest exceeds the time limit of a mediator. So these channels
/// are freed after the others' work.
pub(crate) fn endless(guest: &mut Guest) -> Result<()> {
    const WHAT: [&str; 3] = ["loop", "kernel", "wait"];
    for what in WHAT {
        guest.run(&format!(
            "(agent gpu-misuse {what} /tmp/free >/tmp/{what} 2>&1) &"
        ))?;
        guest.eventually(&format!("cat /tmp/{what}"), |text| {
            text.contains("is submitted")
        })?;
    }
    does(guest, "gpu-check", "gpu works")?;
    guest.run("touch /tmp/free")?;
    for what in WHAT {
        guest.eventually(&format!("cat /tmp/{what}"), |text| text.contains("is over"))?;
    }
    does(guest, "gpu-check", "gpu works")
}

fn killed(context: &Context) -> Result<()> {
    let server = Server::start(context, "64M")?;
    // The kernel's own switch: nouveau has no parameter here either.
    let (gantry, mut guest) = boot(context, &server, "pci=nomsi")?;
    load(&mut guest)?;
    does(&mut guest, "gpu-check", "gpu works")?;
    let (text, count) = interrupts(&mut guest)?;
    ensure!(!text.contains("MSI") && count > 0, "interrupts: {text}");
    drop(server);
    gantry.info_until("the device is lost", |info| {
        info["device_tree"]["gpu"]["state"] == "lost"
    })?;
    guest.run("true")?;
    drop(guest);
    gantry.act("vm.shutdown")?;
    let _server = Server::start(context, "64M")?;
    gantry.act("vm.boot")?;
    let mut guest = Guest::connect(&gantry.serial)?;
    guest.wait_ready()?;
    load(&mut guest)?;
    does(&mut guest, "gpu-check", "gpu works")
}
