//! Guests that share L1's OpenCL device by weight: what each gets of it.
//!
//! L1 has one emulated processor, which is the device, too. So a guest's application enqueues many
//! kernels and sleeps while they run, and what is compared is time of the device, not of a clock.

use std::{
    fs,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use gpu_mediator::arbiter::status::Client;
use serde_json::json;

use crate::{
    gantry::Gantry,
    guest::Guest,
    opencl::{Arbiter, Compiled, compile, guest_files},
};

/// Lengths in microseconds that the kernels of every guest have, at random, if nothing else runs.
const LENGTHS: [u32; 3] = [3_000, 6_000, 12_000];
/// Kernels that a guest has enqueued at a time.
const IN_FLIGHT: u32 = 32;
/// Turns that the guest with the fewest has had before what is had counts.
const WARM: u64 = 3;
/// The longest wait for all guests to compute.
const PATIENCE: Duration = Duration::from_secs(60);

/// A guest, and its application.
struct Vm {
    /// Of its client.
    name: String,
    guest: Guest,
    _gantry: Gantry,
}

/// Guests on one device.
pub struct Vms {
    vms: Vec<Vm>,
    arbiter: Arbiter,
}

impl Vms {
    /// Boots a guest for each weight, one after the other, and starts its application, which waits.
    pub fn start(dir: &Path, policy: &str, weights: &[u32]) -> Result<Self> {
        let arbiter = Arbiter::start(dir, policy)?;
        let files = guest_files(dir)?;
        let Compiled {
            file,
            size,
            iteration,
        } = compile()?;
        let mut vms = Vec::new();
        for (index, weight) in weights.iter().enumerate() {
            let dir = dir.join(format!("vm{index}"));
            fs::create_dir_all(&dir)?;
            let accel = json!({
                "socket": arbiter.pool.socket, "weight": weight, "window": 16 << 20, "slices": 1,
                "id": "a",
            });
            let disk = json!({"path": file, "readonly": true, "image_type": "Raw"});
            let payload = json!({"initramfs": files});
            let more = json!({"payload": payload, "accels": [accel], "disks": [disk]});
            let (gantry, mut guest) = Gantry::boot(&dir, more)?;
            guest.run(&format!(
                "gantry-agent >/tmp/agent.log 2>&1 & mkfifo /tmp/in; \
                 head -c {size} /dev/vda >/tmp/turns"
            ))?;
            let port = "/run/gantry/opencl.sock";
            guest.eventually(&format!("ls {port}"), |text| text == port)?;
            let lengths = LENGTHS.map(|length| length.to_string()).join(",");
            guest.run(&format!(
                "GANTRY_OPENCL_SPIN=20 OPENCL_TURNS_BINARY=/tmp/turns \
                 opencl-turns {lengths} {IN_FLIGHT} 0 {iteration} </tmp/in >/tmp/out 2>&1 & \
                 sleep 1000000 >/tmp/in & true"
            ))?;
            let said = guest.eventually("cat /tmp/out", |text| !text.is_empty())?;
            ensure!(
                said.starts_with("running "),
                "the application of a guest said {said:?}"
            );
            vms.push(Vm {
                // As in vmm/src/machine/kinds/accel.rs.
                name: format!("{}/a", gantry.pid()),
                guest,
                _gantry: gantry,
            });
        }
        Ok(Self { vms, arbiter })
    }

    /// Has all applications begin, and waits until each has had the device a few times.
    pub fn go(&mut self) -> Result<()> {
        for vm in &mut self.vms {
            vm.guest.run("echo >/tmp/in")?;
        }
        let start = Instant::now();
        while self.clients()?.iter().any(|client| client.turns <= WARM) {
            ensure!(
                start.elapsed() < PATIENCE,
                "not all guests compute: {:?}",
                self.clients()?
            );
            thread::sleep(Duration::from_millis(100));
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

    /// Nanoseconds for which each guest has had the device so far.
    pub fn device_times(&self) -> Result<Vec<u64>> {
        let clients = self.clients()?;
        Ok(clients.iter().map(|client| client.device_time).collect())
    }

    /// Has all applications end: each says how many kernels it had run.
    pub fn end(&mut self) -> Result<Vec<u64>> {
        let mut kernels = Vec::new();
        for vm in &mut self.vms {
            vm.guest.run("killall sleep")?;
        }
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
