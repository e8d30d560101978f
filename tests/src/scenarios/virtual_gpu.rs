//! One GPU as many: guests with nouveau as Debian ships it, each on its part of a GPU that a mediator
//! shares out.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use gpu_mediator::status::{self, Status};
use serde_json::{Value, json};

use super::{
    Context, Entry,
    gf100::{ALL_CHANNELS, HAVE_COPIED, does, endless, insert, interrupts, load},
    lifecycle::reconnect,
};
use crate::{
    gantry::{Gantry, PATIENCE, merge, with_gpu_driver},
    gpuvm::{doorbells_of_a_submission, exits_of_a_flush},
    guest::Guest,
    opencl::until,
    rig::images::L2_BALLOON,
};

const MIB: u64 = 1 << 20;
/// Size of a guest's RAM, and of what it gives back by a balloon.
const RAM: u64 = 384 * MIB;
const GIVEN_BACK: u64 = 128 * MIB;

/// Places on the GPU for a guest whose programs have more channels.
const PLACES: u8 = 4;

/// The scenarios, which share an L1.
pub const SCENARIOS: &[Entry] = &[
    (
        "virtual GPU: a guest's nouveau drives its part of a GPU; what it does wrong ends its channel",
        alone,
    ),
    (
        "virtual GPU: two guests at once, one by messages and one by the line, keep their contents, each with all its \
         channels; what root of one does with registers and tables, and its end, cost the other nothing",
        together,
    ),
    (
        "virtual GPU: a mediator or a GPU that is killed amid work costs guests channels, and comes back; a further GPU is plugged",
        killed,
    ),
];

/// The GPU's server and the mediator, until dropped.
pub struct Mediated {
    /// The server, and then the mediator.
    children: Vec<Child>,
    model: PathBuf,
    socket: PathBuf,
    policy: String,
}

fn start(context: &Context, program: &str, arguments: &[&str], socket: &Path) -> Result<Child> {
    let log = File::options()
        .create(true)
        .append(true)
        .open(context.dir.join(format!("{program}.log")))?;
    let child = Command::new(format!("/bin/{program}"))
        .args(arguments)
        .stdin(Stdio::null())
        .stderr(log)
        .spawn()
        .with_context(|| format!("cannot start {program}"))?;
    let deadline = Instant::now() + PATIENCE;
    while !socket.exists() {
        ensure!(Instant::now() < deadline, "{program} does not listen");
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(child)
}

impl Mediated {
    /// Starts both, in the scenario's folder.
    pub fn start(context: &Context) -> Result<Self> {
        Self::start_with(context, "fair")
    }

    /// Starts both, with a policy.
    pub fn start_with(context: &Context, policy: &str) -> Result<Self> {
        let mut started = Self {
            children: Vec::new(),
            model: context.dir.join("model.sock"),
            socket: context.dir.join("gpu.sock"),
            policy: policy.to_owned(),
        };
        started.start_gpu(context)?;
        started.start_mediator(context)?;
        Ok(started)
    }

    fn start_gpu(&mut self, context: &Context) -> Result<()> {
        let _ = fs::remove_file(&self.model);
        let at = self.model.display().to_string();
        let gpu = ["--socket", &at, "--vram", "256M", "--trap", "-v"];
        self.children
            .push(start(context, "gantry-gf100", &gpu, &self.model)?);
        Ok(())
    }

    fn start_mediator(&mut self, context: &Context) -> Result<()> {
        let _ = fs::remove_file(&self.socket);
        let (at, to) = (
            self.model.display().to_string(),
            self.socket.display().to_string(),
        );
        let mediator = [
            "serve",
            "--model",
            &at,
            "--socket",
            &to,
            "--policy",
            &self.policy,
            "-v",
        ];
        self.children
            .push(start(context, "gantry-gpu", &mediator, &self.socket)?);
        Ok(())
    }

    /// As `kill -9` of the mediator alone.
    pub(super) fn kill_mediator(&mut self) -> Result<()> {
        let mut mediator = self.children.pop().context("there is a mediator")?;
        mediator.kill()?;
        mediator.wait()?;
        Ok(())
    }

    /// As `kill -9` of the GPU's server alone, with which the mediator ends.
    pub(super) fn kill_gpu(&mut self) -> Result<()> {
        let gpu = self.children.first_mut().context("there is a GPU")?;
        gpu.kill()?;
        for mut child in self.children.drain(..) {
            child.wait()?;
        }
        Ok(())
    }

    /// Starts what was killed.
    pub(super) fn start_again(&mut self, context: &Context) -> Result<()> {
        if self.children.is_empty() {
            self.start_gpu(context)?;
        }
        self.start_mediator(context)
    }

    /// What the mediator shows of itself.
    pub fn status(&self) -> Result<Status> {
        status::read(&self.socket).context("gantry-gpu shows nothing of itself")
    }

    /// Boots a guest with a virtual GPU.
    pub(super) fn boot(
        &self,
        context: &Context,
        name: &str,
        words: &str,
    ) -> Result<(Gantry, Guest)> {
        self.boot_with(context, name, words, json!({}))
    }

    /// Boots a guest with a virtual GPU, of which more is configured.
    pub fn boot_with(
        &self,
        context: &Context,
        name: &str,
        words: &str,
        gpu: Value,
    ) -> Result<(Gantry, Guest)> {
        let dir = context.dir.join(name);
        fs::create_dir_all(&dir)?;
        let mut config = with_gpu_driver(words);
        let mut its = json!(
            {"socket": self.socket, "vram": 64 * MIB, "channels": 48, "id": "gpu"}
        );
        merge(&mut its, gpu);
        let more = json!({
            "memory": {"size": RAM, "shared": true},
            "balloon": {"size": 0},
            "gpus": [its],
        });
        merge(&mut config, more);
        Gantry::boot(&dir, config)
    }
}

impl Drop for Mediated {
    /// As `kill -9`, the mediator first.
    fn drop(&mut self) {
        for child in self.children.iter_mut().rev() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn alone(context: &Context) -> Result<()> {
    drives(context).with_context(|| {
        let log = fs::read_to_string(context.dir.join("gantry-gpu.log"));
        format!("the mediator says: {}", log.unwrap_or_default())
    })
}

fn drives(context: &Context) -> Result<()> {
    let gpu = Mediated::start(context)?;
    // Fewer places on the GPU than its programs have channels.
    let places = json!({"channels": PLACES});
    let (gantry, mut guest) = gpu.boot_with(context, "alone", "", places)?;
    let exits = exits_of_a_flush(&gantry, &mut guest)?;
    ensure!(exits <= 8.0, "{exits} exits for a flush");
    load(&mut guest)?;
    does(&mut guest, "gpu-check", "gpu works")?;
    let (text, count) = interrupts(&mut guest)?;
    ensure!(text.contains("MSI") && count > 0, "interrupts: {text}");
    let counters = gantry.ok("GET", "vm.counters", None)?;
    println!("nouveau's start and the copy test: {}", counters["gpu"]);
    // Page tables and data were written through BARs, more than a million words.
    let by_bars = (
        &counters["gpu"]["bar_reads"],
        &counters["gpu"]["bar_writes"],
    );
    ensure!(
        by_bars == (&json!(0), &json!(0)),
        "exits by BARs: {by_bars:?}"
    );
    let doorbells = doorbells_of_a_submission(&gantry, &mut guest)?;
    ensure!(doorbells <= 2.0, "{doorbells} doorbells for a submission");
    let clients = gpu.status()?.clients;
    ensure!(
        clients.len() == 1 && clients[0].calls > 0 && clients[0].device_time > 0,
        "what the mediator shows: {clients:?}"
    );
    given_back(&gantry, &mut guest)?;
    does(&mut guest, "gpu-evict", "were kept")?;
    does(&mut guest, "gpu-channels 12", "channels have copied")?;
    for what in ["fault", "method"] {
        does(&mut guest, &format!("gpu-misuse {what}"), "is over")?;
    }
    does(&mut guest, "gpu-m2mf", "m2mf works")?;
    does(&mut guest, "gpu-compute", "sums are right")?;
    endless(&mut guest)?;
    let guest = reset(&gantry, guest)?;
    drop((gantry, guest));
    displaced(context)
}

/// The VM is reset while the GPU works, and boots: its driver finds a GPU as at the first boot.
fn reset(gantry: &Gantry, mut guest: Guest) -> Result<Guest> {
    guest.run("(while agent gpu-check; do :; done) >/tmp/until 2>&1 & true")?;
    guest.eventually("cat /tmp/until", |text| text.contains("gpu works"))?;
    gantry.act("vm.reboot")?;
    let mut guest = reconnect(gantry, guest)?;
    load(&mut guest)?;
    does(&mut guest, "gpu-check", "gpu works")?;
    Ok(guest)
}

/// The guest gives RAM back to the host by a balloon, and takes it again, while its programs use the GPU.
fn given_back(gantry: &Gantry, guest: &mut Guest) -> Result<()> {
    insert(guest, L2_BALLOON)?;
    guest.run(
        "(while [ ! -e /tmp/end ]; do agent gpu-check || echo failed; done; echo finished) \
               >/tmp/beside 2>&1 &",
    )?;
    guest.eventually("cat /tmp/beside", |text| text.contains("gpu works"))?;
    for size in [GIVEN_BACK, 0] {
        gantry.put("vm.resize", json!({"desired_balloon": size}))?;
        gantry.info_until("the balloon has its size", |info| {
            info["memory_actual_size"] == RAM - size
        })?;
    }
    guest.run("touch /tmp/end")?;
    guest.eventually("cat /tmp/beside", |text| text.contains("finished"))?;
    let said = guest.run("cat /tmp/beside")?;
    ensure!(!said.contains("failed"), "it says: {said}");
    Ok(())
}

/// Channels have lost their places to others, as the mediator says when the guest has gone.
fn displaced(context: &Context) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let log = fs::read_to_string(context.dir.join("gantry-gpu.log"))?;
        let gone = log.lines().find(|line| line.contains("has gone"));
        if let Some(figures) = gone {
            ensure!(
                !figures.contains("displaced: 0"),
                "no channel was: {figures}"
            );
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "the guest is not gone: {log}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn together(context: &Context) -> Result<()> {
    let gpu = Mediated::start(context)?;
    let places = json!({"channels": 128});
    let (mut one, mut first) = gpu.boot_with(context, "one", "", places)?;
    // The kernel's own switch: nouveau has no parameter.
    let (_other, mut second) = gpu.boot(context, "other", "pci=nomsi")?;
    let work = "(for i in 1 2 3; do agent gpu-check || echo failed; done; agent gpu-evict; \
                echo finished) >/tmp/work 2>&1 &";
    // While one works, root of the other does without a driver what no driver would.
    load(&mut first)?;
    first.run(
        "(while [ ! -e /tmp/end ]; do agent gpu-check || echo failed; done; echo finished) \
               >/tmp/beside 2>&1 &",
    )?;
    let said = second.run("agent gpu-attack")?;
    println!("the attacks: {said}");
    ensure!(said.contains("attacks did nothing"), "it says: {said}");
    first.run("touch /tmp/end")?;
    first.eventually("cat /tmp/beside", |text| text.contains("finished"))?;
    let beside = first.run("cat /tmp/beside")?;
    ensure!(
        beside.contains("gpu works") && !beside.contains("failed"),
        "it says: {beside}"
    );
    load(&mut second)?;
    for guest in [&mut first, &mut second] {
        guest.run(work)?;
    }
    for guest in [&mut first, &mut second] {
        guest.eventually("cat /tmp/work", |text| text.contains("finished"))?;
        let said = guest.run("cat /tmp/work")?;
        let works = said.matches("gpu works").count();
        ensure!(works == 3 && said.contains("were kept"), "it says: {said}");
    }
    all_channels(&gpu, [&mut first, &mut second])?;
    for guest in [&mut first, &mut second] {
        // libdrm's, as Debian ships it.
        let said = guest.run("drmdevice")?;
        ensure!(
            said.contains("renderD128") && said.contains("10de") && said.contains("06d8"),
            "drmdevice says: {said}"
        );
    }
    let (text, count) = interrupts(&mut second)?;
    ensure!(!text.contains("MSI") && count > 0, "interrupts: {text}");
    // One is killed amid its work: the other's goes on, and nothing of the first is left.
    first.run("(while agent gpu-check; do :; done) >/tmp/until 2>&1 & true")?;
    first.eventually("cat /tmp/until", |text| text.contains("gpu works"))?;
    second.run(
        "(for i in 1 2; do agent gpu-check || echo failed; done; echo finished) >/tmp/on 2>&1 &",
    )?;
    one.kill()?;
    second.eventually("cat /tmp/on", |text| text.contains("finished"))?;
    let said = second.run("cat /tmp/on")?;
    ensure!(said.matches("gpu works").count() == 2, "it says: {said}");
    until("the mediator knows that one has gone", || {
        Ok(gpu.status()?.clients.len() == 1)
    })
}

/// Both have all the channels that nouveau leaves to programs, twice as many as there are places on the GPU, and use them
/// at once.
fn all_channels(gpu: &Mediated, mut guests: [&mut Guest; 2]) -> Result<()> {
    for guest in &mut guests {
        guest.run(&format!(
            "(agent gpu-channels {ALL_CHANNELS} /tmp/go; echo finished) >/tmp/all 2>&1 &"
        ))?;
    }
    for guest in &mut guests {
        let said = guest.eventually("cat /tmp/all", |text| {
            text.contains("are told") || text.contains("finished")
        })?;
        ensure!(said.contains("are told"), "it says: {said}");
    }
    let clients = gpu.status()?.clients;
    let bound: Vec<_> = clients.iter().map(|client| client.workers).collect();
    ensure!(
        bound.len() == 2 && bound.iter().all(|count| *count >= ALL_CHANNELS as usize),
        "channels that the mediator knows: {bound:?}"
    );
    for guest in &mut guests {
        guest.run("touch /tmp/go")?;
    }
    for guest in &mut guests {
        let said = guest.eventually("cat /tmp/all", |text| text.contains("finished"))?;
        ensure!(said.contains(HAVE_COPIED), "it says: {said}");
    }
    Ok(())
}

fn killed(context: &Context) -> Result<()> {
    let mut gpu = Mediated::start(context)?;
    let (gantry, mut guest) = gpu.boot(context, "killed", "")?;
    // Before there is a driver.
    let before = reconnections(&gantry)?;
    gpu.kill_mediator()?;
    gpu.start_again(context)?;
    until_found_again(&gantry, before)?;
    load(&mut guest)?;
    does(&mut guest, "gpu-check", "gpu works")?;
    // What comes back knows nothing: programs go on without a boot.
    let kills: [fn(&mut Mediated) -> Result<()>; 2] = [Mediated::kill_mediator, Mediated::kill_gpu];
    for kill in kills {
        guest.run(
            "rm -f /tmp/amid /tmp/end; (while [ ! -e /tmp/end ]; do agent gpu-check; done; \
             echo over) >/tmp/amid 2>&1 & true",
        )?;
        guest.eventually("cat /tmp/amid", |text| text.contains("gpu works"))?;
        let before = reconnections(&gantry)?;
        kill(&mut gpu)?;
        gpu.start_again(context)?;
        until_found_again(&gantry, before)?;
        guest.run("touch /tmp/end")?;
        guest.eventually("cat /tmp/amid", |text| text.contains("over"))?;
        does(&mut guest, "gpu-check", "gpu works")?;
    }
    plugged(&gpu, &gantry, &mut guest)
}

/// How often a VM's front has found its mediator again.
pub(super) fn reconnections(gantry: &Gantry) -> Result<u64> {
    let counters = gantry.ok("GET", "vm.counters", None)?;
    let count = counters["gpu"]["reconnections"].as_u64();
    count.context("the GPU has no counter of reconnections")
}

/// Waits until the front has found the mediator once more than `before`.
pub(super) fn until_found_again(gantry: &Gantry, before: u64) -> Result<()> {
    until("the mediator is found again", || {
        Ok(reconnections(gantry)? > before)
    })
}

/// Hot-plugs a second GPU into a running VM, whose driver binds to it.
fn plugged(gpu: &Mediated, gantry: &Gantry, guest: &mut Guest) -> Result<()> {
    let further = json!({"socket": gpu.socket, "vram": 64 * MIB, "channels": 16, "id": "more"});
    gantry.put("vm.add-gpu", further)?;
    guest.eventually("drmdevice 2>&1; dmesg | tail -5", |text| {
        text.contains("renderD129")
    })?;
    ensure!(
        gpu.status()?.clients.len() == 2,
        "the mediator has not two clients"
    );
    does(guest, "gpu-check", "gpu works")
}
