//! Guests that share L1's OpenCL device by weight: what each gets of it.
//!
//! L1 has one emulated processor, which is the device, too. So a guest's application enqueues many
//! kernels and sleeps while they run, and what is compared is time of the device, not of a clock.

use std::{
    fs,
    ops::ControlFlow,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use gpu_mediator::{simulator::WINDOW, status::Client};
use serde_json::{Value, json};

use crate::{
    gantry::Gantry,
    guest::Guest,
    opencl::{Arbiter, Compiled, Pool, guest_files, load_uio, start_agent, until},
};

/// Lengths in microseconds that the kernels of every guest have, at random, if nothing else runs.
const LENGTHS: [u32; 3] = [3_000, 6_000, 12_000];
/// Kernels that a guest has enqueued at a time.
const IN_FLIGHT: u32 = 32;
/// Kernels that a guest waits for together before it enqueues others.
const BATCH: u32 = 4;
/// Turns that the guest with the fewest has had before what is had counts.
const WARM: u64 = 3;
/// The longest wait for all guests to compute.
const PATIENCE: Duration = Duration::from_secs(150);

/// A guest, and its application.
struct Vm {
    /// Of its client.
    name: String,
    guest: Guest,
    gantry: Gantry,
}

impl Vm {
    /// Restores a guest, with this weight, and starts its application: one that always has kernels
    /// enqueued, or one that `waits` for its results before it goes on.
    fn start(
        dir: &Path,
        snapshot: &Path,
        weight: u32,
        waits: bool,
        iteration: &str,
    ) -> Result<Self> {
        let copy = dir.join("snapshot");
        fs::create_dir_all(&copy)?;
        for file in ["state.json", "memory-ranges"] {
            fs::hard_link(snapshot.join(file), copy.join(file))?;
        }
        let gantry = Gantry::start(dir, &[])?;
        let mut config: Value = serde_json::from_slice(&fs::read(snapshot.join("config.json"))?)?;
        config["serial"]["socket"] = json!(gantry.serial);
        config["accels"][0]["weight"] = json!(weight);
        fs::write(copy.join("config.json"), config.to_string())?;
        // What a guest does not touch is not there six times.
        gantry.put(
            "vm.restore",
            json!({
                "source_url": format!("file://{}", copy.display()), "resume": true,
                "memory_restore_mode": "OnDemand",
            }),
        )?;
        let mut guest = Guest::connect(&gantry.serial)?;
        let lengths = LENGTHS.map(|length| length.to_string()).join(",");
        let (closed, in_flight) = match waits {
            true => ("OPENCL_TURNS_THINK=0", BATCH),
            false => ("", IN_FLIGHT),
        };
        guest.run(&format!(
            "{closed} GANTRY_OPENCL_SPIN=20 OPENCL_TURNS_BINARY=/tmp/turns \
             opencl-turns {lengths} {in_flight} 0 {iteration} </tmp/in >/tmp/out 2>&1 & \
             sleep 1000000 >/tmp/in & true"
        ))?;
        // Looking from here makes the guest start programs again and again, while others compute.
        let said = guest.run("until [ -s /tmp/out ]; do sleep 1; done; cat /tmp/out")?;
        ensure!(
            said.starts_with("running "),
            "the application of a guest said {said:?}"
        );
        Ok(Self {
            // As in vmm/src/machine/kinds/accel.rs.
            name: format!("{}/a", gantry.pid()),
            guest,
            gantry,
        })
    }
}

/// Boots a guest until everything is ready for its application, and saves it: several guests that
/// boot take an emulated processor minutes.
fn ready(dir: &Path, pool: &Pool, compiled: &Compiled, snapshot: &Path) -> Result<()> {
    fs::create_dir_all(dir)?;
    let Compiled { file, size } = compiled;
    let accel = json!({
        "socket": pool.socket, "window": 16 << 20, "slices": 1, "id": "a", "memory": 256 << 20,
    });
    let disk = json!({"path": file, "readonly": true, "image_type": "Raw"});
    let payload = json!({"initramfs": guest_files(dir)?});
    let more = json!({"payload": payload, "accels": [accel], "disks": [disk]});
    let (gantry, mut guest) = Gantry::boot(dir, more)?;
    guest.run("gantry-agent install --driver-only")?;
    load_uio(&mut guest)?;
    start_agent(&mut guest, "gantry-agent")?;
    guest.run(&format!(
        "mkfifo /tmp/in; head -c {size} /dev/vda >/tmp/turns"
    ))?;
    gantry.act("vm.pause")?;
    let destination = format!("file://{}", snapshot.display());
    gantry.put("vm.snapshot", json!({"destination_url": destination}))?;
    Ok(())
}

/// Guests on one device.
pub struct Vms {
    vms: Vec<Vm>,
    pool: Pool,
    arbiter: Arbiter,
}

impl Vms {
    /// Starts a guest for each weight, all from one snapshot, and in each its application, which does
    /// not begin yet. The application of the guest `waiting` waits for its results, batch by batch.
    pub fn start(
        dir: &Path,
        policy: &str,
        weights: &[u32],
        waiting: Option<usize>,
    ) -> Result<Self> {
        let (arbiter, pool) = Arbiter::start_with_pool(dir, policy)?;
        let (compiled, iteration) = Compiled::turns()?;
        let snapshot = dir.join("snapshot");
        ready(&dir.join("first"), &pool, &compiled, &snapshot)?;
        let mut vms = Vec::new();
        for (index, weight) in weights.iter().enumerate() {
            let dir = dir.join(format!("vm{index}"));
            let waits = waiting == Some(index);
            vms.push(Vm::start(&dir, &snapshot, *weight, waits, &iteration)?);
        }
        Ok(Self { vms, pool, arbiter })
    }

    /// Has all applications begin, and waits until each has had the device a few times.
    pub fn go(&mut self) -> Result<()> {
        self.all("echo >/tmp/in")?;
        self.each(|_, client| client.turns > WARM)
    }

    /// How often a sleeping application of each guest was woken by an interrupt.
    pub fn wakes(&self) -> Result<Vec<u64>> {
        let of = |vm: &Vm| {
            let counters = vm.gantry.ok("GET", "vm.counters", None)?;
            let count = counters["a"]["sleepers_woken"].as_u64();
            count.with_context(|| format!("no count of woken sleepers in {counters}"))
        };
        self.vms.iter().map(of).collect()
    }

    /// What the arbiter and the guests' applications say, for a test that has failed.
    pub fn state(&mut self) -> Result<String> {
        let mut text = String::new();
        for (client, vm) in self.clients()?.into_iter().zip(&mut self.vms) {
            let application = vm.guest.run(
                "cat /tmp/out; for p in $(pidof opencl-turns); do cat /proc/$p/wchan /proc/$p/stat; done; \
                 grep uio /proc/interrupts; true",
            )?;
            text += &format!("{client:?}\n{application}\n");
        }
        Ok(text)
    }

    /// Waits until something is so for each guest.
    fn each(&self, is: impl Fn(usize, &Client) -> bool) -> Result<()> {
        let start = Instant::now();
        loop {
            let clients = self.clients()?;
            if clients
                .iter()
                .enumerate()
                .all(|(vm, client)| is(vm, client))
            {
                return Ok(());
            }
            ensure!(
                start.elapsed() < PATIENCE,
                "not all guests compute: {clients:?}"
            );
            thread::sleep(Duration::from_millis(100));
        }
    }

    /// Has an application without scruples take the place of the last guest's: its worker refuses
    /// what it asks for, or ends, or it is killed itself. Meanwhile the others compute, and its guest
    /// has a worker for the next one, which is an honest one.
    pub fn one_does_wrong(&mut self) -> Result<()> {
        const HOSTILE: &str = "opencl-hostile /run/gantry/opencl.sock";
        /// What each does, and says. A number: it is killed after so many steps.
        const ATTACKS: [(&str, &str); 9] = [
            ("0", "Killed"),
            ("3", "Killed"),
            ("5", "Killed"),
            ("7", "Killed"),
            ("garbage", "ended"),
            ("length", "ended"),
            ("index", "ended"),
            ("outside", "refused"),
            ("quota", "refused"),
        ];
        let last = self.vms.len() - 1;
        self.vms[last].guest.run("killall -9 opencl-turns")?;
        for (attack, said) in ATTACKS {
            let before = self.clients()?;
            let command = format!("{HOSTILE} {attack} 2>/tmp/hostile || cat /tmp/hostile");
            let heard = self.vms[last].guest.run(&command)?;
            if heard.trim() != said {
                let agent = self.vms[last].guest.run("cat /tmp/agent.log")?;
                bail!("{attack}: {heard:?}\n{agent}{}", self.state()?);
            }
            self.each(|vm, now| vm == last || now.calls > before[vm].calls)?;
        }
        let guest = &mut self.vms[last].guest;
        guest.run("(sleep 1000000 | opencl-idle >/tmp/idle 2>&1) & true")?;
        guest.eventually("cat /tmp/idle", |text| text.starts_with("idle "))?;
        Ok(())
    }

    /// Kills the process of the guest that came last, in the middle of what it computes: its worker
    /// goes and nothing of it is left with the arbiter, and each of the others computes more than it
    /// had enqueued by then.
    pub fn lose_one(&mut self) -> Result<()> {
        let mut lost = self.vms.pop().context("there is no guest")?;
        let workers = self.pool.workers()?.len();
        lost.gantry.kill()?;
        let before = self.clients()?;
        until("nothing is left of a killed VM", || {
            let gone = |client: &Client| client.workers == 0 && client.memory == 0 && !client.holds;
            let gone = (self.arbiter.clients()?.iter())
                .all(|client| client.name != lost.name || gone(client));
            Ok(gone && self.pool.workers()?.len() < workers)
        })?;
        self.each(|vm, now| now.calls > before[vm].calls + u64::from(IN_FLIGHT))
    }

    /// Runs a command in all guests at a time.
    fn all(&mut self, command: &str) -> Result<()> {
        for vm in &mut self.vms {
            vm.guest.send(command)?;
        }
        for vm in &mut self.vms {
            vm.guest.ended(command)?;
        }
        Ok(())
    }

    /// What each guest has had, in the guests' order.
    fn clients(&self) -> Result<Vec<Client>> {
        let clients = self.arbiter.clients()?;
        let of = |vm: &Vm| {
            let found = clients.iter().find(|client| client.name == vm.name);
            let found = found.cloned();
            found.with_context(|| format!("{} is no client of the arbiter: {clients:?}", vm.name))
        };
        self.vms.iter().map(of).collect()
    }

    /// Looks again and again at the seconds for which each guest has had the device since now, and
    /// hands on the time that has passed and them, for as long as it is told to.
    pub fn watch(
        &self,
        every: Duration,
        mut each: impl FnMut(Duration, &[f64]) -> Result<ControlFlow<()>>,
    ) -> Result<()> {
        let before = self.clients()?;
        let start = Instant::now();
        for round in 1.. {
            thread::sleep((every * round).saturating_sub(start.elapsed()));
            let (passed, now) = (start.elapsed(), self.clients()?);
            let had: Vec<_> = (before.iter().zip(&now))
                .map(|(before, now)| now.device_time.saturating_sub(before.device_time))
                .map(|nanos| nanos as f64 / 1e9)
                .collect();
            if each(passed, &had)?.is_break() {
                break;
            }
        }
        Ok(())
    }

    /// Has all applications end: each says how many kernels it had run.
    pub fn end(&mut self) -> Result<Vec<u64>> {
        let mut kernels = Vec::new();
        self.all("killall sleep")?;
        for vm in &mut self.vms {
            let said = vm
                .guest
                .eventually("sed -n 2p /tmp/out", |text| !text.is_empty())?;
            let count = said.split(' ').next().and_then(|word| word.parse().ok());
            kernels
                .push(count.with_context(|| format!("the application of a guest said {said:?}"))?);
        }
        Ok(kernels)
    }
}

/// Has guests of these weights share the device for so long, and hands on a line every so often:
/// the seconds that have passed, and those for which each has had the device.
pub fn show(
    dir: &Path,
    policy: &str,
    weights: &[u32],
    time: Duration,
    mut line: impl FnMut(String),
) -> Result<()> {
    let mut vms = Vms::start(dir, policy, weights, None)?;
    vms.go()?;
    vms.watch(WINDOW, |passed, had| {
        let numbers = [&[passed.as_secs_f64()], had].concat();
        let words: Vec<_> = numbers
            .iter()
            .map(|number| format!("{number:.6}"))
            .collect();
        line(words.join(" "));
        Ok(match passed < time {
            true => ControlFlow::Continue(()),
            false => ControlFlow::Break(()),
        })
    })
}
