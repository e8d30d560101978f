//! A guest's program moves, while it runs, between the guest's own pool on a passed-through device and the host's pool.
//! The device leaves and comes back meanwhile, and the VM migrates without it, even if no other device serves the
//! program until it arrives.
//!
//! The device's driver is imitated by PoCL in the guest, in a pool that holds `edu`'s file, and by the kernel's driver
//! for unknown devices, which has a node in /dev.

use std::{
    fs,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use serde_json::{Value, json};

use super::{
    Context, Entry,
    accelerator::{accel, counter},
    hotplug::gone,
    migration::{self, Waiting, phase_until},
};
use crate::{
    gantry::{self, Gantry},
    guest::Guest,
    host_device::{EDU, HostDevice},
    http,
    opencl::{self, Compiled, DISK, Pool, ROOT, load_uio, until},
};

pub const SCENARIOS: &[Entry] = &[(
    "passthrough: a VM moves while a program computes on its device, which leaves and comes back, or waits for it",
    moves,
)];

/// How many times the program leaves its device and comes back in the measurement.
const MEASURED: usize = 25;

/// The program's compiled kernel, in the guest.
const COMPILED: &str = "/tmp/compiled";

/// The command that starts the agent with its own pool.
const STARTED: &str = "/usr/local/sbin/gantry-agent --local 'sh /tmp/local'";

/// Makes the guest's agent run PoCL as its device's driver: the pool and whatever it starts hold the device's file
/// open.
fn start_agent(guest: &mut Guest, size: u64, compiled: &Compiled) -> Result<()> {
    guest.run("gantry-agent install")?;
    guest.run(&format!(
        "mkdir -p {ROOT} && mount -t ext4 -o ro /dev/vda {ROOT} && \
         for d in proc sys dev run tmp; do mount -o bind /$d {ROOT}/$d || exit 1; done; \
         head -c {size} /dev/vdb >/tmp/gantry-accel && chmod +x /tmp/gantry-accel && \
         head -c {} /dev/vdc >{COMPILED}",
        compiled.size
    ))?;
    guest.run(&format!(
        "echo 'for d in /sys/bus/pci/devices/*; do \
         read v <$d/vendor; read m <$d/device; [ $v$m = 0x12340x11e8 ] && \
         exec 9<$d/resource0; done; \
         exec chroot {ROOT} /tmp/gantry-accel serve --spare 1 \"$@\"' >/tmp/local"
    ))?;
    opencl::start_agent(guest, STARTED)?;
    let local = "/run/gantry/opencl.local.sock";
    guest.eventually(&format!("ls {local}"), |text| text == local)?;
    Ok(())
}

/// Counts the processes that hold the device's file.
pub(super) const HOLDERS: &str = "ls -l /proc/[0-9]*/fd 2>/dev/null | grep -c resource0; true";

/// A guest whose program computes on its device.
pub(super) struct Computing {
    pub gantry: Gantry,
    pub guest: Guest,
    /// The device's configuration, as plugged.
    device: Value,
    /// The host's pool for applications.
    pub pool: Pool,
}

impl Computing {
    /// Boots a guest with a device and its own pool, which no program uses yet.
    pub fn boot(dir: &Path) -> Result<Self> {
        let pool = Pool::start(dir)?;
        let edu = HostDevice::take(EDU, 0)?;
        // Given to the guest as a disk.
        let program = fs::read("/bin/gantry-accel")?;
        let path = dir.join("gantry-accel.raw");
        let mut padded = program.clone();
        padded.resize(program.len().next_multiple_of(512), 0);
        fs::write(&path, padded)?;
        let compiled = Compiled::moving()?;
        let device = json!({"path": edu.path, "id": "edu", "tracked": "a"});
        let more = json!({
            "memory": {"size": 640 << 20},
            "payload": {"initramfs": opencl::guest_files(dir)?},
            "disks": [
                {"path": DISK, "readonly": true, "image_type": "Raw"},
                {"path": path, "readonly": true, "image_type": "Raw"},
                {"path": compiled.file, "readonly": true, "image_type": "Raw"},
            ],
            "accels": [accel(&pool)],
            "devices": [device],
        });
        let (gantry, mut guest) = Gantry::boot(dir, more)?;
        load_uio(&mut guest)?;
        guest.run("echo 1234 11e8 >/sys/bus/pci/drivers/uio_pci_generic/new_id")?;
        start_agent(&mut guest, program.len() as u64, &compiled)?;
        Ok(Self {
            gantry,
            guest,
            device,
            pool,
        })
    }

    /// Starts the program on the guest's device, with these variables and arguments.
    pub fn begins(&mut self, environment: &str, arguments: &str) -> Result<()> {
        self.guest.run(&format!(
            "rm -f /tmp/stop; ({environment} OPENCL_MOVING_BINARY={COMPILED} \
             opencl-moving /tmp/stop {arguments} >/tmp/moving 2>&1; echo ended $? >>/tmp/moving) & true"
        ))?;
        self.goes_on()?;
        ensure!(
            counter(&self.gantry, "slices_in_use")? == 0,
            "the host serves it"
        );
        Ok(())
    }

    /// Boots a guest and starts its program.
    fn start(dir: &Path) -> Result<Self> {
        let mut computing = Self::boot(dir)?;
        computing.begins("", "")?;
        Ok(computing)
    }

    /// Waits until the program has computed another round.
    pub fn goes_on(&mut self) -> Result<()> {
        let before = self.guest.run("grep -c round /tmp/moving; true")?;
        let said = self
            .guest
            .eventually("grep -c round /tmp/moving; tail -n 2 /tmp/moving", |now| {
                now.lines().next() != Some(before.trim()) || now.contains("ended")
            })?;
        ensure!(!said.contains("ended"), "{said}");
        Ok(())
    }

    /// How many lines about its rounds the program has printed.
    fn told(&mut self) -> Result<u64> {
        Ok(self.guest.run("wc -l </tmp/moving")?.trim().parse()?)
    }

    /// Duration in milliseconds of its longest round since it had printed `told` lines.
    fn longest_since(&mut self, told: u64) -> Result<u64> {
        self.goes_on()?;
        let longest = self.guest.run(&format!(
            "awk 'NR > {told} && $6 + 0 > x {{ x = $6 }} END {{ print x + 0 }}' /tmp/moving"
        ))?;
        Ok(longest.trim().parse()?)
    }

    /// Checks that the guest's pool serves the program and holds the device.
    pub fn is_local(&mut self) -> Result<()> {
        until("the host's slices are free", || {
            Ok(counter(&self.gantry, "slices_in_use")? == 0)
        })?;
        // Whoever has waited is about to be served.
        self.guest
            .eventually(HOLDERS, |holders| holders.trim() != "0")
            .context("nobody has the device")?;
        self.goes_on()
    }

    fn goes(&mut self, seat: &str) -> Result<()> {
        self.goes_to(json!({"seat": seat}))
    }

    /// Moves the program to a seat, which may be an address.
    pub fn goes_to(&mut self, seat: Value) -> Result<()> {
        let mut body = json!({"id": "a"});
        gantry::merge(&mut body, seat.clone());
        let moved = self.gantry.put("vm.move-accel", body);
        let moved = moved.or_else(|error| {
            let log = self
                .guest
                .run("cat /tmp/agent.log; tail /tmp/moving; ps; true")?;
            Err(error.context(log))
        })?;
        ensure!(moved["applications"] == 1, "{seat}: {moved}");
        Ok(())
    }

    /// Moves the program from the device to the host's pool, removes the device and adds it again, and moves the
    /// program back. Returns how long the program's two moves took.
    fn round(&mut self) -> Result<[Duration; 2]> {
        self.is_local()?;
        let began = Instant::now();
        self.goes("Host")?;
        let left = began.elapsed();
        ensure!(counter(&self.gantry, "slices_in_use")? == 1);
        let holders = self.guest.run(HOLDERS)?;
        ensure!(holders.trim() == "0", "{holders} still have the device");
        self.gantry.put("vm.remove-device", json!({"id": "edu"}))?;
        gone(&self.gantry, "edu")?;
        self.goes_on()?;
        self.gantry.put("vm.add-device", self.device.clone())?;
        self.guest.eventually(
            "cat /sys/bus/pci/devices/*/device | grep -c 0x11e8",
            |count| count.trim() == "1",
        )?;
        let began = Instant::now();
        self.goes("Local")?;
        self.goes_on()?;
        Ok([left, began.elapsed()])
    }

    /// Ends the program, and checks that everything it computed is right.
    pub fn ends(&mut self) -> Result<()> {
        self.guest.run("touch /tmp/stop")?;
        let end = self
            .guest
            .eventually("tail -n 2 /tmp/moving", |text| text.contains("ended"))?;
        ensure!(
            end.contains("rounds were right") && end.contains("ended 0"),
            "{end}"
        );
        Ok(())
    }

    /// If another process has the device open, a migration to a waiting Gantry fails, and the error names the
    /// process.
    fn stays_while_held(&mut self, waiting: &Waiting) -> Result<()> {
        self.guest.run(
            "u=$(ls $(dirname $(grep -l 0x11e8 /sys/bus/pci/devices/*/device))/uio) && \
             { sleep 1000 8</dev/$u & echo $! >/tmp/holder; }",
        )?;
        self.send(waiting, "Remote")?;
        let info = phase_until(&self.gantry, &["Completed", "Failed"])?;
        let said = info["error"].to_string();
        ensure!(
            said.contains("PID") && said.contains(") has /dev/uio"),
            "{info}"
        );
        self.is_local()?;
        self.guest.run("kill $(cat /tmp/holder)")?;
        Ok(())
    }

    /// Milliseconds that a program in the guest takes with the driver itself, from its start until it has computed once
    /// and ends. The other program computes meanwhile, as it does when it comes back.
    fn natively(&mut self) -> Result<u64> {
        let said = self.guest.run(&format!(
            "cp $(which opencl-moving) /tmp/natively; begun=$(cut -d ' ' -f 1 /proc/uptime); \
             POCL_CACHE_DIR=/tmp HOME=/tmp OPENCL_MOVING_BINARY={COMPILED} \
             chroot {ROOT} /tmp/natively /dev/null; echo; echo $begun $(cut -d ' ' -f 1 /proc/uptime)"
        ))?;
        ensure!(said.contains("all 1 rounds were right"), "{said}");
        let times = said.lines().last().unwrap_or_default();
        let times: Vec<f64> = times.split(' ').map(str::parse).collect::<Result<_, _>>()?;
        let [begun, ended] = times[..] else {
            bail!("{said}");
        };
        Ok(((ended - begun) * 1000.0) as u64)
    }

    fn send(&self, waiting: &Waiting, passthrough: &str) -> Result<()> {
        self.gantry
            .put("vm.send-migration", sent(waiting, passthrough))?;
        Ok(())
    }

    /// The VM stays if a migration is refused, if another process has the device, or if the destination dies.
    fn stays(&mut self, dir: &Path) -> Result<()> {
        let mut waiting = migration::wait_in(dir, &self.gantry.serial)?;
        let body = Some(sent(&waiting, "Refuse"));
        (self.gantry).refused("vm.send-migration", body, 400, "passthrough=Remote")?;
        let port = Some(json!({"id": "a"}));
        self.gantry
            .refused("vm.remove-device", port, 400, "tracks physical device")?;
        self.stays_while_held(&waiting)?;
        // The destination has been contacted, and still waits.
        self.send(&waiting, "Park")?;
        let info = phase_until(&self.gantry, &["Rounds", "Completed", "Failed"])?;
        ensure!(info["phase"] == "Rounds", "{info}");
        gone(&self.gantry, "edu")?;
        self.is_parked()?;
        waiting.gantry.kill()?;
        phase_until(&self.gantry, &["Failed"])?;
        self.is_local()
    }

    /// Checks that the program waits, and that no process has the device or serves the program.
    fn is_parked(&mut self) -> Result<()> {
        let told = self.told()?;
        ensure!(
            counter(&self.gantry, "slices_in_use")? == 0,
            "the host serves it"
        );
        let left = self.guest.run(&format!("pidof gantry-accel; {HOLDERS}"))?;
        ensure!(left.trim() == "0", "the guest has {left}");
        let said = self.guest.run("tail -n 1 /tmp/agent.log")?;
        ensure!(said.contains("1 applications are parked"), "{said}");
        ensure!(self.told()? == told, "it computes");
        Ok(())
    }

    /// If a control group leaves the program hardly any more memory, the program stays where it is, and the error names
    /// the group.
    fn stays_in_a_small_group(&mut self) -> Result<()> {
        const SMALL: &str = "/sys/fs/cgroup/small";
        self.guest.run(&format!(
            "mount -t cgroup2 none /sys/fs/cgroup && \
             echo +memory >/sys/fs/cgroup/cgroup.subtree_control && mkdir {SMALL} && \
             pidof opencl-moving >{SMALL}/cgroup.procs && echo 4096 >{SMALL}/memory.high"
        ))?;
        let body = Some(json!({"id": "a", "seat": "Parked"}));
        let named = format!("{SMALL}/memory.high");
        (self.gantry).refused("vm.move-accel", body, 500, &named)?;
        self.guest.run(&format!("echo max >{SMALL}/memory.high"))?;
        self.is_local()
    }

    /// Kills the agent while it has the program parked, and starts it again. The program continues, or gets an error if
    /// the pool died with the agent before the program's state was saved. Meanwhile no process has the device, and the
    /// next program computes on it.
    fn loses_its_agent(&mut self) -> Result<()> {
        let socket = self.gantry.socket.clone();
        let parking = thread::spawn(move || {
            let body = json!({"id": "a", "seat": "Parked"}).to_string();
            http::request(&socket, "PUT", "vm.move-accel", Some(&body))
        });
        self.guest.run("sleep 0.2; kill -9 $(pidof gantry-agent)")?;
        let left = format!("pidof gantry-accel; {HOLDERS}");
        (self.guest).eventually(&left, |left| left.trim() == "0")?;
        opencl::start_agent(&mut self.guest, STARTED)?;
        // Whatever it answers to the request that the first agent got.
        let answer = parking.join().map_err(|_| anyhow!("nobody has asked"))?;
        answer.context("nobody has answered")?;
        self.gantry
            .put("vm.move-accel", json!({"id": "a", "seat": "Local"}))?;
        self.guest.run("touch /tmp/stop")?;
        let end = (self.guest).eventually("tail -n 2 /tmp/moving", |end| end.contains("ended"))?;
        ensure!(
            end.contains("rounds were right") || end.contains("failed with code"),
            "{end}"
        );
        self.begins("", "")?;
        self.is_local()
    }

    /// Migrates the VM with the program to another Gantry, where the program returns to the device plugged there. Until
    /// then the host serves the program, or nobody does (`passthrough=Park`). `returned` is how often the agent has
    /// already brought it back by itself.
    fn moves(mut self, dir: &Path, how: Value, returned: usize) -> Result<(Self, Timeline)> {
        let is_parked = how["passthrough"] == "Park";
        let waiting = migration::wait_in(dir, &self.gantry.serial)?;
        let told = self.told()?;
        let mut timeline = Timeline::new();
        let mut body = json!({
            "destination_url": waiting.url, "preserve_source": true, "downtime_ms": 2000,
        });
        gantry::merge(&mut body, how);
        self.gantry.put("vm.send-migration", body)?;
        let info = timeline.phases(&self.gantry)?;
        ensure!(
            info["phase"] == "Completed",
            "{info}\n{}",
            self.gantry.log()
        );
        let there = waiting.arrived()?;
        let mut source = std::mem::replace(&mut self.gantry, there);
        source.act("vmm.shutdown")?;
        source.wait_exit()?;
        self.guest = Guest::connect(&self.gantry.serial)?;
        let mut away = 0;
        if is_parked {
            self.is_parked()?;
        } else {
            away = self.longest_since(told)?;
            ensure!(counter(&self.gantry, "slices_in_use")? == 1);
        }
        let told = self.told()?;
        self.gantry.put("vm.add-device", self.device.clone())?;
        timeline.step("plugged in there");
        until("the host's slices are free", || {
            Ok(counter(&self.gantry, "slices_in_use")? == 0)
        })?;
        timeline.step("local again");
        self.is_local()?;
        let back = self.longest_since(told)?;
        timeline.native = self.natively()?;
        let agent = self
            .guest
            .eventually("grep 'come back' /tmp/agent.log; true", |said| {
                said.lines().count() == returned + 1
            })?;
        timeline.agent = agent.lines().last().unwrap_or_default().to_owned();
        timeline.longest = [away, back];
        timeline.stood = info["downtime_ms"].to_string();
        Ok((self, timeline))
    }
}

/// The body of a migration that takes a while.
fn sent(waiting: &Waiting, passthrough: &str) -> Value {
    json!({"destination_url": waiting.url, "passthrough": passthrough, "bandwidth": 4 << 20})
}

/// Times of events since the start of a migration.
struct Timeline {
    began: Instant,
    steps: Vec<(String, Duration)>,
    /// Downtime of the VM in milliseconds.
    stood: String,
    /// The program's longest rounds in milliseconds, before and after its arrival.
    longest: [u64; 2],
    /// What the agent reports of the program's return.
    agent: String,
    /// Milliseconds that a program takes with the driver itself.
    native: u64,
}

impl Timeline {
    fn new() -> Self {
        Self {
            began: Instant::now(),
            steps: Vec::new(),
            stood: String::new(),
            longest: [0; 2],
            agent: String::new(),
            native: 0,
        }
    }

    fn step(&mut self, what: &str) {
        if self.steps.last().is_none_or(|(last, _)| last != what) {
            self.steps.push((what.to_owned(), self.began.elapsed()));
        }
    }

    /// Records the phases of a migration until it ends.
    fn phases(&mut self, gantry: &Gantry) -> Result<Value> {
        loop {
            let info = gantry.ok("GET", "vm.migration", None)?;
            let phase = info["phase"].as_str().context("no phase")?;
            self.step(phase);
            if ["Completed", "Failed"].contains(&phase) {
                return Ok(info);
            }
            ensure!(
                self.began.elapsed() < Duration::from_secs(120),
                "it does not end: {info}"
            );
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Rows of a table, next to the figures published by Crane's authors (SYSTOR 2017, 6.4 and 6.5).
    fn rows(&self, row: &mut dyn FnMut(&str, String)) {
        for (what, at) in &self.steps {
            row(
                &format!("a move, from its beginning (ms): {what}"),
                at.as_millis().to_string(),
            );
        }
        row("the VM stood still (ms)", self.stood.clone());
        let [away, back] = self.longest;
        row(
            "the program's longest round until it has arrived (ms; Crane with 16 MiB: stops 100)",
            away.to_string(),
        );
        row(
            "the same until it is on the device again (ms; Crane with 16 MiB: stops 830)",
            back.to_string(),
        );
        let numbers = |word: &str| word.trim_matches([',', ':']).parse::<u64>().ok();
        let said: Vec<_> = self.agent.split(' ').filter_map(numbers).collect();
        let [_, back, started, listened, moved] = said[..] else {
            row("its return, as the agent says", self.agent.clone());
            return;
        };
        let steps = [
            ("the pool is asked to start", started),
            ("it listens, and the program is told", listened),
            ("the program has moved", moved),
            ("the agent knows that all have", back),
        ];
        for (what, at) in steps {
            row(
                &format!("its return, from the driver's `bind` (ms; Crane waits 10 s): {what}"),
                at.to_string(),
            );
        }
        row(
            "the same by the driver itself: a program's start, and its first round (ms)",
            self.native.to_string(),
        );
        row(
            "its return without that (ms)",
            back.saturating_sub(self.native).to_string(),
        );
    }
}

fn moves(context: &Context) -> Result<()> {
    let mut computing = Computing::start(&context.dir)?;
    computing.round()?;
    computing.stays(&context.dir.join("second"))?;
    // The program came back by itself when the destination had died. Its buffers are too small to follow it: this shows
    // that both can be requested together.
    let how = json!({"passthrough": "Remote", "accel_postcopy": true});
    let (computing, _) = computing.moves(&context.dir.join("again"), how, 1)?;
    let how = json!({"passthrough": "Park"});
    let (mut computing, _) = computing.moves(&context.dir.join("parked"), how, 2)?;
    computing.stays_in_a_small_group()?;
    computing.loses_its_agent()?;
    computing.ends()
}

/// Makes the program leave its device and come back many times and migrate with its VM, and passes on a row for each
/// figure.
pub fn measure(row: &mut dyn FnMut(&str, String)) -> Result<()> {
    let dir = Path::new("/tmp/bench-seats");
    fs::create_dir_all(dir)?;
    let mut computing = Computing::start(dir)?;
    let mut waiting = migration::wait_in(&dir.join("held"), &computing.gantry.serial)?;
    computing.stays_while_held(&waiting)?;
    waiting.gantry.kill()?;
    row(
        "a move while another process has the device's file open",
        "refused, naming it".to_owned(),
    );
    let mut times = Vec::new();
    for round in 1..=MEASURED {
        let [left, back] = computing.round()?;
        let figures = format!("{}, {}", left.as_millis(), back.as_millis());
        row(
            &format!("changes {round} to the host's pool, and to the device (ms)"),
            figures,
        );
        times.push([left, back]);
    }
    let (mut computing, timeline) =
        computing.moves(&dir.join("there"), json!({"passthrough": "Remote"}), 0)?;
    computing.ends()?;
    timeline.rows(row);
    for (at, what) in ["to the host's pool", "to the device"]
        .into_iter()
        .enumerate()
    {
        let mut times: Vec<_> = times.iter().map(|times| times[at].as_millis()).collect();
        times.sort_unstable();
        row(
            &format!("change {what} (ms; median and longest of {MEASURED})"),
            format!("{}, {}", times[times.len() / 2], times[times.len() - 1]),
        );
    }
    row("wrong results", "0".to_owned());
    Ok(())
}
