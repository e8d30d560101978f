//! Guests that share L1's OpenCL device by weight: what each of them gets.
//!
//! L1 has a single emulated CPU, which is also the device. So each guest's application enqueues many kernels and sleeps
//! while they run, and tests compare device time, not wall-clock time.

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

/// Kernel lengths in microseconds if nothing else runs; every guest's kernels draw from these at random.
const LENGTHS: [u32; 3] = [3_000, 6_000, 12_000];
/// Maximum number of kernels that a guest has enqueued at a time.
const IN_FLIGHT: u32 = 32;
/// Kernels in a batch, which a guest waits for before it enqueues the next batch.
const BATCH: u32 = 4;
/// Every guest must have had more than this many turns before measurements start.
const WARM: u64 = 3;
/// Timeout for all guests to make progress.
const PATIENCE: Duration = Duration::from_secs(150);

/// A guest and its application.
struct Vm {
    /// Name of its client at the arbiter.
    name: String,
    guest: Guest,
    gantry: Gantry,
}

impl Vm {
    /// Restores a guest with this weight and starts its application, which either always keeps kernels enqueued, or, if
    /// it `waits`, waits for the results of a batch before it goes on.
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
        // On demand, so that RAM that no guest touches is not loaded once per guest.
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
        // Wait in the guest: polling from here would make it start programs over and over while other guests compute.
        let said = guest.run("until [ -s /tmp/out ]; do sleep 1; done; cat /tmp/out")?;
        ensure!(
            said.starts_with("running "),
            "the application of a guest said {said:?}"
        );
        Ok(Self {
            // As in vmm/machine/src/kinds/accel.rs.
            name: format!("{}/a", gantry.pid()),
            guest,
            gantry,
        })
    }
}

/// Boots a guest until everything is ready for its application, and saves it. Booting several guests would take minutes
/// on an emulated CPU.
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

/// What a guest has had in a period, in seconds.
#[derive(Clone, Copy, Debug)]
pub struct Had {
    /// How long it had the device.
    pub device: f64,
    /// How long it waited for the device. For the rest of the period it had nothing to do there.
    pub queued: f64,
}

/// Guests on one device.
pub struct Vms {
    vms: Vec<Vm>,
    pool: Pool,
    arbiter: Arbiter,
}

impl Vms {
    /// Starts a guest for each weight, all from one snapshot, and in each its application, which does not begin to
    /// compute yet. The application of guest `waiting` waits for its results batch by batch.
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

    /// Lets all applications begin, and waits until each has had several turns on the device.
    pub fn go(&mut self) -> Result<()> {
        self.all("echo >/tmp/in")?;
        self.each(|_, client| client.turns > WARM)
    }

    /// How often an interrupt woke each guest's sleeping application.
    pub fn wakes(&self) -> Result<Vec<u64>> {
        let of = |vm: &Vm| {
            let counters = vm.gantry.ok("GET", "vm.counters", None)?;
            let count = counters["a"]["sleepers_woken"].as_u64();
            count.with_context(|| format!("no count of woken sleepers in {counters}"))
        };
        self.vms.iter().map(of).collect()
    }

    /// What the arbiter and the guests' applications report, for the message of a failed test.
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

    /// Waits until a condition holds for every guest.
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

    /// Replaces the last guest's application with hostile ones. Their worker refuses what they ask for, or ends, or
    /// they are killed. Meanwhile the other guests keep computing, and afterwards the guest gets a worker for an honest
    /// application.
    pub fn one_does_wrong(&mut self) -> Result<()> {
        const HOSTILE: &str = "opencl-hostile /run/gantry/opencl.sock";
        /// Each attack and what the program prints. A number kills the program after that many steps.
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

    /// Kills the VMM of the last guest in the middle of its computation. Its worker must go and the arbiter must hold
    /// nothing for it, and each of the other guests must compute more than it had enqueued by then.
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

    /// Runs a command in all guests at once.
    fn all(&mut self, command: &str) -> Result<()> {
        for vm in &mut self.vms {
            vm.guest.send(command)?;
        }
        for vm in &mut self.vms {
            vm.guest.ended(command)?;
        }
        Ok(())
    }

    /// The arbiter's view of each guest, in the guests' order.
    fn clients(&self) -> Result<Vec<Client>> {
        let clients = self.arbiter.clients()?;
        let of = |vm: &Vm| {
            let found = clients.iter().find(|client| client.name == vm.name);
            let found = found.cloned();
            found.with_context(|| format!("{} is no client of the arbiter: {clients:?}", vm.name))
        };
        self.vms.iter().map(of).collect()
    }

    /// Every interval, passes to `each` the time elapsed and what each guest has had since this call, until `each`
    /// breaks.
    pub fn watch(
        &self,
        every: Duration,
        mut each: impl FnMut(Duration, &[Had]) -> Result<ControlFlow<()>>,
    ) -> Result<()> {
        let before = self.clients()?;
        let start = Instant::now();
        for round in 1.. {
            thread::sleep((every * round).saturating_sub(start.elapsed()));
            let (passed, now) = (start.elapsed(), self.clients()?);
            let seconds = |before: u64, now: u64| now.saturating_sub(before) as f64 / 1e9;
            let had: Vec<_> = (before.iter().zip(&now))
                .map(|(before, now)| Had {
                    device: seconds(before.device_time, now.device_time),
                    queued: seconds(before.queueing_time, now.queueing_time),
                })
                .collect();
            if each(passed, &had)?.is_break() {
                break;
            }
        }
        Ok(())
    }

    /// Ends all applications. Each reports how many kernels it ran.
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

/// Lets guests with these weights share the device for `time`, and regularly passes on a line: the seconds elapsed, and
/// the seconds for which each guest has had the device.
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
        let device = had.iter().map(|had| had.device);
        let words: Vec<_> = std::iter::once(passed.as_secs_f64())
            .chain(device)
            .map(|number| format!("{number:.6}"))
            .collect();
        line(words.join(" "));
        Ok(match passed < time {
            true => ControlFlow::Continue(()),
            false => ControlFlow::Break(()),
        })
    })
}
