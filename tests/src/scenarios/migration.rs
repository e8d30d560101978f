//! VMs that migrate from one Gantry to another on one host.

use std::{
    fs,
    io::Write,
    os::unix::{fs::PermissionsExt, net::UnixStream},
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use super::{
    Context, Entry,
    disks::{image, write_pattern},
    lifecycle::{next_count, start_counting},
};
use crate::{
    gantry::{GANTRY, Gantry, PATIENCE},
    guest::Guest,
    http,
};

pub const SCENARIOS: &[Entry] = &[
    (
        "migration: a guest moves back and forth, counts on and keeps its memory and disk",
        back_and_forth,
    ),
    (
        "migration: a destination that is killed leaves the guest where it is, and another build takes it over",
        killed_and_upgraded,
    ),
    (
        "migration: what cannot move is refused with all reasons, and a migration is cancelled",
        refused,
    ),
];

/// Maximum wait for a migration.
const MOVE: Duration = Duration::from_secs(120);

/// A Gantry that waits for a VM.
pub(crate) struct Waiting {
    /// The process.
    pub(crate) gantry: Gantry,
    /// Its URL.
    pub(crate) url: String,
    pub(crate) answer: thread::JoinHandle<Result<http::Answer>>,
}

/// Starts a Gantry in a directory of its own that waits for a VM whose serial port is at `serial`.
pub(crate) fn wait_in(dir: &Path, serial: &Path) -> Result<Waiting> {
    wait_with(dir, serial, &[])
}

/// Like [`wait_in`]; in addition, these files of the host have other names there.
pub(crate) fn wait_with(dir: &Path, serial: &Path, renames: &[(&Path, &Path)]) -> Result<Waiting> {
    fs::create_dir_all(dir)?;
    wait_by(Gantry::start(dir, &[])?, dir, serial, renames)
}

/// Like [`wait_with`], with a Gantry that has been started.
fn wait_by(
    gantry: Gantry,
    dir: &Path,
    serial: &Path,
    renames: &[(&Path, &Path)],
) -> Result<Waiting> {
    let path = dir.join("migration.sock");
    let url = format!("unix:{}", path.display());
    let how = json!({"receiver_url": url});
    receive(gantry, how, serial, renames, || Ok(path.exists()))
}

/// Makes a Gantry wait for a VM as specified by `how`. Returns once it listens.
pub(crate) fn receive(
    gantry: Gantry,
    how: Value,
    serial: &Path,
    renames: &[(&Path, &Path)],
    listens: impl Fn() -> Result<bool>,
) -> Result<Waiting> {
    let all = [(serial, &*gantry.serial)];
    let all = all.iter().chain(renames);
    let renames: Vec<_> = all
        .map(|(from, to)| json!({"from": from, "to": to}))
        .collect();
    let url = how["receiver_url"].as_str().unwrap_or_default().to_owned();
    let mut body = json!({"renames": renames});
    crate::gantry::merge(&mut body, how);
    let socket = gantry.socket.clone();
    let answer = thread::spawn(move || {
        http::request(
            &socket,
            "PUT",
            "vm.receive-migration",
            Some(&body.to_string()),
        )
    });
    let deadline = Instant::now() + PATIENCE;
    while !listens()? {
        ensure!(Instant::now() < deadline, "nobody waits: {}", gantry.log());
        thread::sleep(Duration::from_millis(20));
    }
    // It replies to other requests meanwhile.
    gantry.ok("GET", "vmm.ping", None)?;
    Ok(Waiting {
        gantry,
        url,
        answer,
    })
}

impl Waiting {
    /// Checks that the VM runs there.
    pub(crate) fn arrived(self) -> Result<Gantry> {
        let answer = self.answer.join().ok().context("the client panicked")??;
        ensure!(
            matches!(answer.status, 200 | 204),
            "no VM has arrived: {}\n{}",
            answer.text,
            self.gantry.log()
        );
        Ok(self.gantry)
    }
}

/// Waits until `vm.migration` reports one of `phases`.
pub(crate) fn phase_until(gantry: &Gantry, phases: &[&str]) -> Result<Value> {
    let deadline = Instant::now() + MOVE;
    loop {
        let info = gantry.ok("GET", "vm.migration", None)?;
        if phases.iter().any(|phase| info["phase"] == *phase) {
            return Ok(info);
        }
        ensure!(Instant::now() < deadline, "it never was {phases:?}: {info}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// Migrates the VM to a new Gantry in `dir`.
fn move_to(source: Gantry, dir: &Path) -> Result<(Gantry, Guest)> {
    let waiting = wait_in(dir, &source.serial)?;
    go(source, waiting, json!({"verify": true}))
}

/// Migrates the VM to a Gantry that waits for it.
pub(crate) fn go(mut source: Gantry, waiting: Waiting, how: Value) -> Result<(Gantry, Guest)> {
    let mut body = json!({
        "destination_url": waiting.url, "preserve_source": true, "downtime_ms": 2000,
    });
    if let (Some(body), Value::Object(how)) = (body.as_object_mut(), how) {
        body.extend(how);
    }
    source.put("vm.send-migration", body)?;
    // Meanwhile it replies, and does not let the machine be changed.
    source.ok("GET", "vm.info", None)?;
    let info = phase_until(&source, &["Completed", "Failed"])?;
    ensure!(
        info["phase"] == "Completed",
        "{info}\n{}\n{}",
        source.log(),
        waiting.gantry.log()
    );
    println!("migration: {info}");
    ensure!(
        source.state()? == "Shutdown",
        "the source is {}",
        source.state()?
    );
    let gantry = waiting.arrived()?;
    ensure!(gantry.state()? == "Running", "it is {}", gantry.state()?);
    source.act("vmm.shutdown")?;
    source.wait_exit()?;
    let guest = Guest::connect(&gantry.serial)?;
    Ok((gantry, guest))
}

fn back_and_forth(context: &Context) -> Result<()> {
    let path = context.dir.join("disk.raw");
    image(&path, 32 << 20)?;
    let first = context.dir.join("0");
    fs::create_dir(&first)?;
    let more = json!({
        "cpus": {"boot_vcpus": 2, "max_vcpus": 2},
        "disks": [{"path": path, "image_type": "Raw"}],
        "balloon": {"size": 0},
    });
    let (mut gantry, mut guest) = Gantry::boot(&first, more)?;
    let sum = write_pattern(&mut guest, "/dev/vda", 8)?;
    // Memory with known contents, and memory that is written all the time.
    guest.run("dd if=/dev/urandom of=/known bs=1M count=16 2>/dev/null")?;
    let known = guest.md5_of("cat /known")?;
    guest.run("(while true; do dd if=/dev/urandom of=/busy bs=64k count=4 2>/dev/null; sleep 0.1; done) & true")?;
    start_counting(&mut guest)?;
    let mut last = next_count(&mut guest)?;
    for turn in 1..=5 {
        let dir: PathBuf = context.dir.join(turn.to_string());
        (gantry, guest) = move_to(gantry, &dir)?;
        let count = next_count(&mut guest)?;
        ensure!(count >= last, "{last} before, {count} after move {turn}");
        last = next_count(&mut guest)?;
        ensure!(last > count, "it does not go on after move {turn}");
        let now = guest.md5_of("cat /known")?;
        ensure!(now == known, "memory differs after move {turn}: {now}");
    }
    guest.run("echo 3 > /proc/sys/vm/drop_caches")?;
    let now = guest.md5_of("dd if=/dev/vda bs=1M count=8 2>/dev/null")?;
    ensure!(now == sum, "the disk differs: {now}, not {sum}");
    write_pattern(&mut guest, "/dev/vda", 8)?;
    let other = context.dir.join("other.raw");
    image(&other, 1 << 20)?;
    gantry.put("vm.add-disk", json!({"path": other}))?;
    guest.eventually("ls /dev/vdb", |text| text.contains("/dev/vdb"))?;
    Ok(())
}

/// A Gantry that reports a different version.
fn other_build(dir: &Path) -> Result<PathBuf> {
    const OTHER: &str = "9.9.9";
    let this = env!("CARGO_PKG_VERSION").as_bytes();
    ensure!(
        this.len() == OTHER.len(),
        "versions of one length are needed"
    );
    let mut binary = fs::read(GANTRY)?;
    let places: Vec<_> = (0..binary.len() - this.len())
        .filter(|&at| binary[at..].starts_with(this))
        .collect();
    for at in places {
        binary[at..at + this.len()].copy_from_slice(OTHER.as_bytes());
    }
    let path = dir.join("gantry-other");
    fs::write(&path, binary)?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
    let output = Command::new(&path).arg("--version").output()?;
    let version = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(version.contains(OTHER), "it is {version}");
    Ok(path)
}

/// The VM migrates to a Gantry of another build, which takes over its memory.
fn upgrade(source: Gantry, disk: &Path, context: &Context) -> Result<()> {
    let dir = context.dir.join("upgraded");
    fs::create_dir(&dir)?;
    let mut guest = Guest::connect(&source.serial)?;
    guest.run("dd if=/dev/urandom of=/known bs=1M count=16 2>/dev/null")?;
    let known = guest.md5_of("cat /known")?;
    start_counting(&mut guest)?;
    let last = next_count(&mut guest)?;
    let next = Gantry::start_binary(&dir, &other_build(&dir)?)?;
    let waiting = wait_by(next, &dir, &source.serial, &[])?;
    // Somebody who connects to the wrong socket does not end the wait.
    let stranger = waiting.url.trim_start_matches("unix:");
    UnixStream::connect(stranger)?.write_all(b"GET / HTTP/1.1\r\n\r\n")?;
    let body = json!({
        "destination_url": waiting.url, "local": true, "preserve_source": true,
    });
    source.put("vm.send-migration", body)?;
    let info = phase_until(&source, &["Completed", "Failed"])?;
    let gantry = waiting.arrived()?;
    println!("upgrade: {info}");
    ensure!(
        info["phase"] == "Completed" && info["sent_bytes"] == 0,
        "{info}\n{}",
        gantry.log()
    );
    ensure!(gantry.state()? == "Running" && source.state()? == "Shutdown");
    drop(source);
    let mut guest = Guest::connect(&gantry.serial)?;
    let count = next_count(&mut guest)?;
    ensure!(count >= last, "{last} before, {count} after");
    let now = guest.md5_of("cat /known")?;
    ensure!(now == known, "memory differs: {now}, not {known}");
    let sum = write_pattern(&mut guest, "/dev/vda", 2)?;
    guest.run("echo 3 > /proc/sys/vm/drop_caches")?;
    let now = guest.md5_of("dd if=/dev/vda bs=1M count=2 2>/dev/null")?;
    ensure!(now == sum, "the disk differs: {now}, not {sum}");
    refused_as_in_use(disk, &context.dir.join("fourth"))
}

/// Another VM does not get the disk.
fn refused_as_in_use(disk: &Path, dir: &Path) -> Result<()> {
    fs::create_dir(dir)?;
    let other = Gantry::start(dir, &[])?;
    let mut config = crate::gantry::vm(&other.serial);
    crate::gantry::merge(&mut config, json!({"disks": [{"path": disk}]}));
    other.put("vm.create", config)?;
    other.refused("vm.boot", None, 500, "in use")
}

fn killed_and_upgraded(context: &Context) -> Result<()> {
    let path = context.dir.join("disk.raw");
    image(&path, 4 << 20)?;
    let more = json!({
        "disks": [{"path": path, "image_type": "Raw"}],
        "memory": {"shared": true},
    });
    let (gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    let mut waiting = wait_in(&context.dir.join("other"), &gantry.serial)?;
    // Slow enough to be killed in the middle of it.
    let body = json!({"destination_url": waiting.url, "bandwidth": 1 << 20});
    gantry.put("vm.send-migration", body)?;
    phase_until(&gantry, &["Rounds", "Quiesce", "Final"])?;
    waiting.gantry.kill()?;
    let info = phase_until(&gantry, &["Completed", "Failed"])?;
    ensure!(info["phase"] == "Failed", "{info}");
    ensure!(gantry.state()? == "Running");
    guest.run("dd if=/dev/zero of=/dev/vda bs=4k count=1 2>/dev/null; sync; echo alive")?;
    // Its disk is locked as before.
    refused_as_in_use(&path, &context.dir.join("third"))?;
    drop(guest);
    upgrade(gantry, &path, context)
}

fn refused(context: &Context) -> Result<()> {
    let (gantry, mut guest) = Gantry::boot(&context.dir, json!({}))?;
    let send = |url: &str| Some(json!({"destination_url": url}));
    gantry.refused("vm.send-migration", send("http://x"), 400, "unix:PATH")?;
    gantry.refused("vm.cancel-migration", None, 405, "no migration")?;
    let resolve = json!({"runs_at": "Source"});
    gantry.refused("vm.resolve-migration", Some(resolve), 405, "decision")?;
    let local = json!({"destination_url": "unix:/nowhere", "local": true});
    gantry.refused("vm.send-migration", Some(local), 400, "shared=on")?;
    // Nobody is there: the VM continues.
    gantry.put(
        "vm.send-migration",
        json!({"destination_url": "unix:/nowhere"}),
    )?;
    let info = phase_until(&gantry, &["Failed"])?;
    ensure!(
        info["error"].to_string().contains("cannot connect"),
        "{info}"
    );
    guest.run("true")?;
    // A Gantry that has a VM refuses immediately; one that waits can be told to stop waiting.
    let waiting = wait_in(&context.dir.join("other"), &gantry.serial)?;
    let create = crate::gantry::vm(&waiting.gantry.serial);
    waiting
        .gantry
        .refused("vm.create", Some(create), 405, "awaited")?;
    gantry.put(
        "vm.send-migration",
        json!({"destination_url": waiting.url, "dry_run": true}),
    )?;
    phase_until(&gantry, &["Completed"])?;
    ensure!(gantry.state()? == "Running");
    waiting.gantry.act("vm.cancel-migration")?;
    let answer = waiting
        .answer
        .join()
        .ok()
        .context("the client panicked")??;
    ensure!(answer.text.contains("cancelled"), "{}", answer.text);
    guest.run("true")?;
    Ok(())
}
