//! Devices that another process serves (vfio-user), in a guest.

use std::{
    fs,
    os::unix::net::{UnixListener, UnixStream},
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use super::{
    Context, Entry,
    hotplug::gone,
    passthrough::{edu_works, has_leaked, holdings},
};
use crate::{
    gantry::{Gantry, PATIENCE},
    guest::Guest,
    liar::{Liar, Spoil},
};

pub const SCENARIOS: &[Entry] = &[
    (
        "vfio-user: registers, memory, DMA and interrupts of another process's device",
        at_start,
    ),
    (
        "vfio-user: plugged and unplugged again and again leaves nothing behind",
        cycles,
    ),
    (
        "vfio-user: a server that is killed in use costs its device, which can come back",
        killed,
    ),
    (
        "vfio-user: a server that hangs or lies costs its device, and nothing else",
        liars,
    ),
    ("vfio-user: what cannot be done says why", refused),
];

/// A process that serves a device until this is dropped.
struct Server {
    child: Child,
    socket: PathBuf,
}

impl Server {
    fn start(socket: PathBuf) -> Result<Self> {
        let _ = fs::remove_file(&socket);
        let child = Command::new(std::env::current_exe()?)
            .arg("edu-server")
            .arg(&socket)
            .stdin(Stdio::null())
            .spawn()
            .context("cannot start the server of the device")?;
        let server = Self { child, socket };
        let deadline = Instant::now() + PATIENCE;
        // The socket exists before anybody listens.
        while UnixStream::connect(&server.socket).is_err() {
            ensure!(Instant::now() < deadline, "the server does not listen");
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(server)
    }

    fn config(&self) -> Value {
        json!({"socket": self.socket, "id": "edu"})
    }
}

impl Drop for Server {
    /// Like `kill -9`.
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn memory() -> Value {
    json!({"size": 256 << 20, "shared": true})
}

/// Registers, DMA, memory that both sides access, and both types of interrupts.
fn all_works(guest: &mut Guest) -> Result<()> {
    edu_works(guest)?;
    let said = guest.run("agent edu-memory")?;
    ensure!(said.contains("memory works"), "{said}");
    let said = guest.run("agent edu-msix")?;
    ensure!(said.contains("MSI-X works"), "{said}");
    Ok(())
}

fn found(guest: &mut Guest) -> Result<String> {
    guest.eventually("cat /sys/bus/pci/devices/*/device", |text| {
        text.contains("0x11e8")
    })
}

fn at_start(context: &Context) -> Result<()> {
    let server = Server::start(context.dir.join("edu.sock"))?;
    let mut device = server.config();
    device["pci_device_id"] = json!(9);
    let more = json!({"memory": memory(), "user_devices": [device]});
    let (gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    let info = gantry.info()?;
    let bdf = &info["device_tree"]["edu"]["pci_bdf"];
    ensure!(bdf == "0000:00:09.0", "the device is at {bdf}");
    let socket = &info["config"]["user_devices"][0]["socket"];
    ensure!(*socket == json!(server.socket), "its server is at {socket}");
    all_works(&mut guest)?;
    gantry.act("vm.pause")?;
    let url = format!("file://{}", context.dir.join("s").display());
    let body = json!({"destination_url": url});
    gantry.refused("vm.snapshot", Some(body), 500, "edu")?;
    gantry.act("vm.resume")?;
    all_works(&mut guest)?;
    gantry.act("vm.reboot")?;
    let mut guest = Guest::connect(&gantry.serial)?;
    guest.wait_ready()?;
    all_works(&mut guest)
}

/// Number of plug and unplug rounds.
const CYCLES: usize = 8;

fn cycles(context: &Context) -> Result<()> {
    let server = Server::start(context.dir.join("edu.sock"))?;
    let (gantry, mut guest) = Gantry::boot(&context.dir, json!({"memory": memory()}))?;
    let mut before = None;
    for round in 0..CYCLES {
        gantry.put("vm.add-user-device", server.config())?;
        found(&mut guest)?;
        if round % 4 == 0 {
            all_works(&mut guest)?;
        }
        gantry.put("vm.remove-device", json!({"id": "edu"}))?;
        gone(&gantry, "edu")?;
        before.get_or_insert(holdings(&gantry)?);
    }
    let after = holdings(&gantry)?;
    ensure!(
        before.is_some_and(|before| !has_leaked(before, after, CYCLES)),
        "descriptors, mappings and threads: {before:?} before, {after:?} after {CYCLES} rounds"
    );
    no_connection_is_left()?;
    let configured = &gantry.info()?["config"]["user_devices"];
    ensure!(configured.is_null(), "still configured: {configured}");
    Ok(())
}

/// Waits until the server has nothing open but its listening socket.
fn no_connection_is_left() -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let sockets = fs::read_to_string("/proc/net/unix")?;
        let open = sockets.lines().filter(|line| line.ends_with("edu.sock"));
        let open = open.count();
        if open == 1 {
            return Ok(());
        }
        ensure!(
            Instant::now() < deadline,
            "{open} sockets of the server are open"
        );
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn killed(context: &Context) -> Result<()> {
    let events = context.dir.join("events");
    let argument = format!("path={}", events.display());
    let gantry = Gantry::start(&context.dir, &["--event-monitor", &argument])?;
    let socket = context.dir.join("edu.sock");
    let server = Server::start(socket.clone())?;
    let config = server.config();
    let more = json!({"memory": memory(), "user_devices": [config]});
    let mut guest = gantry.create_and_boot(more)?;
    all_works(&mut guest)?;
    guest.run("(while agent edu-check; do :; done) >/tmp/loop 2>&1 & true")?;
    guest.eventually("cat /tmp/loop", |text| text.contains("edu works"))?;
    let lost = |guest: &mut Guest| {
        gantry.info_until("the device is lost", |info| {
            info["device_tree"]["edu"]["state"] == "lost"
        })?;
        let (status, said) = guest.status_of("agent edu-check")?;
        ensure!(status != 0, "the device is dead, and {said}");
        guest.run("true")
    };
    drop(server);
    lost(&mut guest)?;
    gantry.put("vm.remove-device", json!({"id": "edu"}))?;
    gone(&gantry, "edu")?;
    let server = Server::start(socket.clone())?;
    gantry.put("vm.add-user-device", config.clone())?;
    found(&mut guest)?;
    all_works(&mut guest)?;
    // Nobody uses it now.
    drop(server);
    lost(&mut guest)?;
    gantry.put("vm.remove-device", json!({"id": "edu", "force": true}))?;
    guest.eventually("ls /sys/bus/pci/devices | wc -l", |count| count == "2")?;
    let text = fs::read_to_string(&events)?;
    let count = text.matches("\"event\": \"device-lost\"").count();
    ensure!(count == 2, "{count} times device-lost in {text}");
    let _server = Server::start(socket)?;
    gantry.put("vm.add-user-device", config)?;
    found(&mut guest)?;
    all_works(&mut guest)
}

fn liars(context: &Context) -> Result<()> {
    let server = Server::start(context.dir.join("honest.sock"))?;
    let socket = context.dir.join("edu.sock");
    let liar = Liar::start(&socket, server.socket.clone())?;
    let config = json!({"socket": socket, "id": "edu"});
    let (gantry, mut guest) = Gantry::boot(&context.dir, json!({"memory": memory()}))?;
    for spoil in [Spoil::Huge, Spoil::Short, Spoil::Noise, Spoil::Swallow] {
        gantry.put("vm.add-user-device", config.clone())?;
        found(&mut guest)?;
        edu_works(&mut guest)?;
        liar.spoil(spoil);
        // A vCPU waits for the reply all the time.
        guest.run("(agent edu-check >/dev/null 2>&1) & true")?;
        gantry.act("vm.pause")?;
        gantry.act("vm.resume")?;
        guest.run("true")?;
        gantry.info_until("the device is lost", |info| {
            info["device_tree"]["edu"]["state"] == "lost"
        })?;
        gantry.put("vm.remove-device", json!({"id": "edu", "force": true}))?;
        guest.eventually("ls /sys/bus/pci/devices | wc -l", |count| count == "2")?;
        liar.spoil(spoil);
        gantry.refused(
            "vm.add-user-device",
            Some(config.clone()),
            500,
            "its server",
        )?;
        liar.spoil(Spoil::Nothing);
    }
    gantry.put("vm.add-user-device", config)?;
    found(&mut guest)?;
    edu_works(&mut guest)
}

fn refused(context: &Context) -> Result<()> {
    let socket = context.dir.join("nobody.sock");
    let config = json!({"socket": socket, "id": "edu"});
    let more = json!({"memory": memory()});
    let (gantry, _guest) = Gantry::boot(&context.dir, more)?;
    let words = "start the device's server first";
    gantry.refused("vm.add-user-device", Some(config.clone()), 500, words)?;
    // A server that listens, but never accepts connections.
    let _listener = UnixListener::bind(&socket)?;
    let words = "has not answered Version within 10 s";
    gantry.refused("vm.add-user-device", Some(config.clone()), 500, words)?;
    gantry.act("vm.delete")?;
    let private = json!({
        "payload": {"kernel": crate::gantry::BZIMAGE},
        "user_devices": [config],
    });
    gantry.refused("vm.create", Some(private), 400, "--memory shared=on")?;
    let private = json!({"payload": {"kernel": crate::gantry::BZIMAGE}});
    gantry.put("vm.create", private)?;
    let words = "--memory shared=on";
    gantry.refused(
        "vm.add-user-device",
        Some(json!({"socket": "/s"})),
        400,
        words,
    )
}
