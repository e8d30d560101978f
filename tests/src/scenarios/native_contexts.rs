//! Guests whose programs use device files by way of a worker, on a stand-in for NVIDIA's driver. The pages that they are
//! shown are those of a real device.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use serde_json::json;

use super::{
    Context, Entry,
    accelerator::counter,
    migration::{phase_until, wait_in},
    snapshots::{restored, url},
};
use crate::{
    gantry::Gantry,
    guest::Guest,
    net::sh,
    opencl::{Arbiter, guest_files_with_native, load_uio, start_agent, until},
    rig::native::{MODULE, STAND_IN, WORKER},
};

pub const SCENARIOS: &[Entry] = &[(
    "native contexts: a killed process fails only its own users, and a suspended program goes on in another VMM",
    served,
)];

/// Where the agent in the guest listens.
const AGENT: &str = "/run/gantry/nvidia.sock";
const RIGHT: &str = "device pages and window memory are right";
/// Of the machine, among those of the arbiter.
const WEIGHT: u32 = 3;
/// What a program says of its pages when its worker has ended.
const BLANK: &str = "the pages are blank";
const PROGRAM: &str =
    "LD_PRELOAD=/usr/local/lib/gantry-cuda/libgantry_nvidia_preload.so native-programs";

/// The host's device files, while this is in scope.
struct DeviceFiles;

impl DeviceFiles {
    fn make() -> Result<Self> {
        sh(&format!(
            "insmod /modules/{MODULE}.ko && mknod /dev/nvidiactl c 195 255 && mknod /dev/nvidia0 c 195 0"
        ))?;
        Ok(Self)
    }

    /// Removes them, which the kernel refuses as long as anybody has one open or mapped.
    fn remove(self) -> Result<()> {
        let removed = sh(&format!("rmmod {MODULE}"));
        drop(self);
        removed.map(|_| ())
    }
}

impl Drop for DeviceFiles {
    fn drop(&mut self) {
        let _ = sh(&format!(
            "rmmod {MODULE} 2>/dev/null; rm -f /dev/nvidiactl /dev/nvidia0"
        ));
    }
}

/// The workers of virtual machines. They are killed when it is dropped.
struct Workers {
    child: Child,
    socket: PathBuf,
}

impl Workers {
    /// Starts them; an arbiter with this socket divides the device among them.
    fn start(dir: &Path, arbiter: Option<&Path>) -> Result<Self> {
        let socket = dir.join("nvidia-vm.sock");
        let log = fs::File::options()
            .create(true)
            .append(true)
            .open(dir.join("worker.log"))?;
        let child = Command::new(WORKER)
            .arg(&socket)
            .args(arbiter)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("cannot start the workers")?;
        let workers = Self { child, socket };
        until("the workers' socket is there", || {
            Ok(workers.socket.exists())
        })?;
        Ok(workers)
    }

    /// The process that serves the only machine.
    fn serving(&self) -> Result<Option<u32>> {
        let pool = self.child.id();
        let text = fs::read_to_string(format!("/proc/{pool}/task/{pool}/children"))?;
        Ok(text
            .split_whitespace()
            .next_back()
            .and_then(|id| id.parse().ok()))
    }

    /// That process, where there must be one.
    fn worker(&self) -> Result<u32> {
        self.serving()?.context("no worker serves")
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_file(&self.socket);
    }
}

/// Number of open files of a process.
fn files(process: u32) -> Result<usize> {
    Ok(fs::read_dir(format!("/proc/{process}/fd"))?.count())
}

fn has_ended(process: u32) -> bool {
    !Path::new(&format!("/proc/{process}")).exists()
}

/// Programs of the guest.
trait Programs {
    /// Starts an agent, and waits until it serves.
    fn serve(&mut self) -> Result<()>;
    /// Runs a program to its end, which must have seen everything.
    fn once(&mut self) -> Result<()>;
    /// Runs a program to its end, which must have seen nothing.
    fn is_refused(&mut self) -> Result<()>;
    /// Starts a program whose words go to a file, and waits until it goes on.
    fn begin(&mut self, file: &str) -> Result<()> {
        self.begin_as("endless", file)
    }
    /// Starts a program of this kind in the same way.
    fn begin_as(&mut self, kind: &str, file: &str) -> Result<()>;
    /// Waits until that program has had two more rounds.
    fn goes_on(&mut self, file: &str) -> Result<()>;
    /// Waits until that program is told that it has lost its device, and checks what it sees then.
    fn loses(&mut self, file: &str, sees: &str) -> Result<()>;
    /// The last line of a program.
    fn last(&mut self, file: &str) -> Result<String>;
    /// Checks that a program has no further rounds for a while.
    fn stands_still(&mut self, file: &str) -> Result<()>;
    /// Checks that a program has computed all of its rounds right.
    fn is_right(&mut self, file: &str) -> Result<()>;
}

impl Programs for Guest {
    fn serve(&mut self) -> Result<()> {
        self.run(&format!("rm -f {AGENT}"))?;
        let variables = format!("STAND_IN={STAND_IN} LD_LIBRARY_PATH={STAND_IN}");
        start_agent(self, &format!("{variables} gantry-agent"))?;
        self.eventually(&format!("ls {AGENT}; cat /tmp/agent.log"), |text| {
            text.starts_with(AGENT)
        })?;
        Ok(())
    }

    fn once(&mut self) -> Result<()> {
        let said = self.run(&format!("{PROGRAM} 2>&1; cat /tmp/agent.log"))?;
        ensure!(said.contains(RIGHT), "{said}");
        Ok(())
    }

    fn is_refused(&mut self) -> Result<()> {
        let said = self.run(&format!("{PROGRAM} 2>&1 || true"))?;
        ensure!(!said.contains(RIGHT), "{said}");
        Ok(())
    }

    fn begin_as(&mut self, kind: &str, file: &str) -> Result<()> {
        self.run(&format!(
            ": >{file}; {{ LD_LIBRARY_PATH={STAND_IN} {PROGRAM} {kind} >{file} 2>&1 & }}; echo $! >{file}.pid"
        ))?;
        self.goes_on(file)
    }

    fn goes_on(&mut self, file: &str) -> Result<()> {
        let rounds = format!("grep -c round {file}; tail -n 1 {file}");
        let count = |text: &str| text.split_whitespace().next()?.parse::<u32>().ok();
        let before = count(&self.status_of(&rounds)?.1).unwrap_or(0);
        self.eventually(&rounds, |text| count(text) >= Some(before + 2))?;
        Ok(())
    }

    fn loses(&mut self, file: &str, sees: &str) -> Result<()> {
        let end = self.eventually(&format!("tail -n 2 {file}"), |text| text.contains("ended"))?;
        ensure!(end.contains(sees), "{end}");
        Ok(())
    }

    fn last(&mut self, file: &str) -> Result<String> {
        self.run(&format!("tail -n 1 {file}"))
    }

    fn stands_still(&mut self, file: &str) -> Result<()> {
        let before = self.last(file)?;
        thread::sleep(Duration::from_millis(500));
        ensure!(self.last(file)? == before, "a suspended program goes on");
        Ok(())
    }

    fn is_right(&mut self, file: &str) -> Result<()> {
        let said = self.last(file)?;
        let round = said.split_whitespace().nth(1).context("it has no rounds")?;
        let expected = self.run(&format!("native-programs expected {round}"))?;
        ensure!(said.trim() == expected.trim(), "{said}: {expected}");
        Ok(())
    }
}

fn served(context: &Context) -> Result<()> {
    let (one, two) = ("/tmp/one", "/tmp/two");
    let devices = DeviceFiles::make()?;
    let workers = Workers::start(&context.dir, None)?;
    let more = json!({
        "payload": {"initramfs": guest_files_with_native(&context.dir)?},
        // Suspended programs have what was on their devices in it.
        "memory": {"size": 512_u64 << 20},
        "accels": [{
            "api": "Nvidia",
            "socket": workers.socket,
            "window": 64_u64 << 20,
            "pages": 1 << 20,
            "weight": WEIGHT,
            "id": "a",
        }],
    });
    let (gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    load_uio(&mut guest)?;
    guest.serve()?;
    ensure!(workers.serving()?.is_none(), "a worker without programs");

    // A weight needs an arbiter, which shows the machine for as long as it has programs.
    guest.is_refused()?;
    let log = fs::read_to_string(context.dir.join("worker.log"))?;
    ensure!(log.contains("start gantry-nvidia with --arbiter"), "{log}");
    // Those that refused the machine.
    let lost = counter(&gantry, "workers_lost")?;
    drop(workers);
    let arbiter = Arbiter::start(&context.dir, "ledger")?;
    let workers = Workers::start(&context.dir, Some(arbiter.socket()))?;
    let clients = || -> Result<Vec<(String, u32)>> {
        let clients = arbiter.clients()?.into_iter();
        Ok(clients
            .filter(|client| client.workers > 0)
            .map(|client| (client.name, client.weight))
            .collect::<Vec<_>>())
    };
    guest.begin(one)?;
    let own = format!("{}/a", gantry.pid());
    until("the arbiter shows the machine", || {
        Ok(clients()? == [(own.clone(), WEIGHT)])
    })?;
    guest.run(&format!("kill -9 $(cat {one}.pid)"))?;
    until("the arbiter's worker has ended", || {
        Ok(clients()?.is_empty())
    })?;
    guest.once()?;
    until("the worker ends after the last program", || {
        Ok(workers.serving()?.is_none())
    })?;

    // A program is killed: its neighbour goes on, and nothing of it is left in the worker.
    guest.begin(one)?;
    let worker = workers.worker()?;
    let with_one = files(worker)?;
    guest.begin(two)?;
    guest.run(&format!("kill -9 $(cat {two}.pid)"))?;
    until("the worker has closed a killed program's files", || {
        Ok(files(worker)? == with_one)
    })?;
    guest.once()?;
    guest.goes_on(one)?;
    ensure!(counter(&gantry, "workers_lost")? == lost);

    // The worker is killed: its programs lose their devices, the next one has another worker.
    guest.begin(two)?;
    ensure!(workers.worker()? == worker, "one worker for all programs");
    sh(&format!("kill -9 {worker}"))?;
    guest.loses(one, BLANK)?;
    guest.loses(two, BLANK)?;
    guest.once()?;
    ensure!(counter(&gantry, "workers_lost")? == lost + 1);

    // The agent is killed: so do its programs, whose pages stay until the next agent closes the slice.
    guest.begin(one)?;
    let worker = workers.worker()?;
    guest.run("killall -9 gantry-agent")?;
    guest.loses(one, "the pages are a device's")?;
    guest.serve()?;
    until("the worker of the killed agent ends", || {
        Ok(has_ended(worker))
    })?;
    guest.once()?;

    // All of the host's workers are killed, and others are started.
    guest.begin(one)?;
    let worker = workers.worker()?;
    drop(workers);
    guest.goes_on(one)?;
    sh(&format!("kill -9 {worker}"))?;
    let workers = Workers::start(&context.dir, Some(arbiter.socket()))?;
    guest.loses(one, BLANK)?;
    guest.once()?;

    let (mut gantry, mut guest, workers) = suspended(context, gantry, guest, workers, &arbiter)?;

    // The VMM is killed: the worker ends with it, and nobody has the device any longer.
    guest.begin(one)?;
    let worker = workers.worker()?;
    gantry.kill()?;
    until("the worker ends with the machine", || Ok(has_ended(worker)))?;
    until("nobody has the device", || {
        Ok(
            fs::read_to_string(format!("/sys/module/{}/refcnt", MODULE.replace('-', "_")))?.trim()
                == "0",
        )
    })?;
    devices.remove()
}

/// Restores the snapshot once more, with workers for another device.
fn clone(context: &Context, arbiter: &Arbiter) -> Result<(Gantry, Guest, Workers)> {
    let dir = context.dir.join("clone");
    fs::create_dir_all(&dir)?;
    let gantry = Gantry::start(&dir, &[])?;
    let serial = context.dir.join("serial.sock");
    let socket = dir.join("nvidia-vm.sock");
    let body = json!({
        "source_url": url(context),
        "resume": true,
        "renames": [{"from": serial, "to": gantry.serial}],
        "accels": [{"id": "a", "socket": socket}],
    });
    gantry.put("vm.restore", body)?;
    let mut guest = Guest::connect(&gantry.serial)?;
    guest.run(&format!("sed -i 's/0a /0b /' {STAND_IN}/gpu"))?;
    let workers = Workers::start(&dir, Some(arbiter.socket()))?;
    Ok((gantry, guest, workers))
}

/// A program is suspended with its VM, and goes on: here, in another VMM that restores it, and in a third one that it
/// moves to; each time with another worker.
fn suspended(
    context: &Context,
    mut gantry: Gantry,
    mut guest: Guest,
    workers: Workers,
    arbiter: &Arbiter,
) -> Result<(Gantry, Guest, Workers)> {
    let (other, program) = ("/tmp/other", "/tmp/program");
    let seat = |seat: &str| json!({"id": "a", "seat": seat});
    let save = json!({"destination_url": url(context), "accel": "save"});

    // One that cannot be suspended keeps all, and is named before anything stops.
    guest.begin_as("computes", program)?;
    let worker = workers.worker()?;
    let with_one = files(worker)?;
    guest.begin(other)?;
    let why = "(native-programs) does not use the driver";
    gantry.refused("vm.move-accel", Some(seat("Parked")), 500, why)?;
    gantry.refused("vm.snapshot", Some(save.clone()), 500, why)?;
    ensure!(gantry.state()? == "Running");
    guest.goes_on(other)?;
    guest.goes_on(program)?;
    guest.run(&format!("kill -9 $(cat {other}.pid)"))?;

    // In place: nothing is left in the host.
    until("the killed program has left", || {
        Ok(files(worker)? == with_one)
    })?;
    let parked = gantry.put("vm.move-accel", seat("Parked"));
    parked.with_context(|| guest.run("cat /tmp/agent.log").unwrap_or_default())?;
    ensure!(
        workers.serving()?.is_none(),
        "a suspended program has a worker"
    );
    guest.stands_still(program)?;
    // Nor does the agent have to be there. The next one leaves it as it is until the host has it go on.
    guest.run("killall -9 gantry-agent")?;
    guest.serve()?;
    gantry.put("vm.move-accel", seat("Parked"))?;
    guest.stands_still(program)?;
    gantry.put("vm.move-accel", seat("Host"))?;
    guest.goes_on(program)?;
    guest.is_right(program)?;

    // A VM that is paused cannot suspend its programs.
    gantry.act("vm.pause")?;
    gantry.refused("vm.snapshot", Some(save.clone()), 405, "resume the VM")?;
    gantry.act("vm.resume")?;

    // Where it cannot be saved, nothing stops.
    let said = guest.run("wc -l </tmp/agent.log")?;
    let nowhere = json!({"destination_url": "file:///proc/none", "accel": "save"});
    gantry.refused("vm.snapshot", Some(nowhere), 500, "/proc/none")?;
    ensure!(
        guest.run("wc -l </tmp/agent.log")? == said,
        "programs were suspended"
    );

    // Saved while it runs, it goes on; also where it is restored.
    gantry.put("vm.snapshot", save)?;
    ensure!(gantry.state()? == "Running");
    guest.goes_on(program)?;
    gantry.kill()?;
    drop((gantry, guest, workers));
    let (gantry, mut guest) = restored(context, json!({}))?;
    // There is no worker yet: it stays suspended, and is tried again.
    guest.eventually("cat /tmp/agent.log", |log| {
        log.contains("not all programs are resumed")
    })?;
    guest.stands_still(program)?;
    // Another one that is restored from the same snapshot has a device of its own by another worker.
    let (clone, mut cloned, theirs) = clone(context, arbiter)?;
    let workers = Workers::start(&context.dir, Some(arbiter.socket()))?;
    guest.goes_on(program)?;
    guest.is_right(program)?;
    let worker = workers.worker()?;
    cloned.goes_on(program)?;
    cloned.is_right(program)?;
    ensure!(cloned.run("cat /tmp/pairs")?.trim() == "a=b");
    ensure!(guest.run("cat /tmp/pairs")?.trim().is_empty());
    drop((clone, cloned, theirs));
    guest.goes_on(program)?;

    // Moved.
    let serial = context.dir.join("serial.sock");
    let waiting = wait_in(&context.dir.join("third"), &serial)?;
    let send = |url: &str, dry_run: bool| {
        let body = json!({"destination_url": url, "accel": "Move", "dry_run": dry_run});
        gantry.put("vm.send-migration", body)
    };
    send(&waiting.url, true)?;
    phase_until(&gantry, &["Completed"])?;
    guest.goes_on(program)?;
    // First one that is cancelled while programs are being suspended: they go on here.
    guest.run("touch /tmp/hold")?;
    send(&waiting.url, false)?;
    phase_until(&gantry, &["Quiesce"])?;
    gantry.act("vm.cancel-migration")?;
    phase_until(&gantry, &["Failed"])?;
    guest.run("rm /tmp/hold")?;
    guest.goes_on(program)?;
    guest.is_right(program)?;
    drop(waiting);
    let waiting = wait_in(&context.dir.join("fourth"), &serial)?;
    send(&waiting.url, false)?;
    phase_until(&gantry, &["Completed"])?;
    let gantry_there = waiting.arrived()?;
    until("the first worker ends", || Ok(has_ended(worker)))?;
    drop((gantry, guest));
    let mut guest = Guest::connect(&gantry_there.serial)?;
    guest.goes_on(program)?;
    guest.is_right(program)?;
    guest.run(&format!("kill -9 $(cat {program}.pid)"))?;
    Ok((gantry_there, guest, workers))
}
