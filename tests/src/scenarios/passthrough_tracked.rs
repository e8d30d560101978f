//! A guest's program moves, while it runs, between the guest's own pool on a passed-through device and the host's pool.
//! The device leaves and comes back meanwhile, and the VM migrates without it, even if no other device serves the
//! program until it arrives.
//!
//! The device's driver is imitated by PoCL in the guest, in a pool that holds `edu`'s file, and by the kernel's driver
//! for unknown devices, which has a node in /dev.

use std::{fs, path::Path, thread};

use anyhow::{Context as _, Result, anyhow, ensure};
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
    /// program back.
    fn round(&mut self) -> Result<()> {
        self.is_local()?;
        self.goes("Host")?;
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
        self.goes("Local")?;
        self.goes_on()
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
    fn moves(mut self, dir: &Path, how: Value, returned: usize) -> Result<Self> {
        let is_parked = how["passthrough"] == "Park";
        let waiting = migration::wait_in(dir, &self.gantry.serial)?;
        let mut body = json!({
            "destination_url": waiting.url, "preserve_source": true, "downtime_ms": 2000,
        });
        gantry::merge(&mut body, how);
        self.gantry.put("vm.send-migration", body)?;
        let info = phase_until(&self.gantry, &["Completed", "Failed"])?;
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
        if is_parked {
            self.is_parked()?;
        } else {
            self.goes_on()?;
            ensure!(counter(&self.gantry, "slices_in_use")? == 1);
        }
        self.gantry.put("vm.add-device", self.device.clone())?;
        until("the host's slices are free", || {
            Ok(counter(&self.gantry, "slices_in_use")? == 0)
        })?;
        self.is_local()?;
        self.guest
            .eventually("grep 'come back' /tmp/agent.log; true", |said| {
                said.lines().count() == returned + 1
            })?;
        Ok(self)
    }
}

/// The body of a migration that takes a while.
fn sent(waiting: &Waiting, passthrough: &str) -> Value {
    json!({"destination_url": waiting.url, "passthrough": passthrough, "bandwidth": 4 << 20})
}

fn moves(context: &Context) -> Result<()> {
    let mut computing = Computing::start(&context.dir)?;
    computing.round()?;
    computing.stays(&context.dir.join("second"))?;
    // The program came back by itself when the destination had died. Its buffers are too small to follow it: this shows
    // that both can be requested together.
    let how = json!({"passthrough": "Remote", "accel_postcopy": true});
    let computing = computing.moves(&context.dir.join("again"), how, 1)?;
    let how = json!({"passthrough": "Park"});
    let mut computing = computing.moves(&context.dir.join("parked"), how, 2)?;
    computing.stays_in_a_small_group()?;
    computing.loses_its_agent()?;
    computing.ends()
}
