//! Guests whose programs use device files by way of a worker, on a stand-in for NVIDIA's driver. The pages that they are
//! shown are those of a real device.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use anyhow::{Context as _, Result, ensure};
use serde_json::json;

use super::{Context, Entry, accelerator::counter};
use crate::{
    gantry::Gantry,
    guest::Guest,
    net::sh,
    opencl::{guest_files_with_native, load_uio, start_agent, until},
    rig::native::{MODULE, WORKER},
};

pub const SCENARIOS: &[Entry] = &[(
    "native contexts: a killed process fails only its own users",
    served,
)];

/// Where the agent in the guest listens.
const AGENT: &str = "/run/gantry/nvidia.sock";
const RIGHT: &str = "device pages and window memory are right";
/// What a program says of its pages when its worker has ended.
const BLANK: &str = "the pages are blank";
const PROGRAM: &str = "LD_PRELOAD=/lib/libgantry_nvidia_preload.so native-programs";

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
    fn start(dir: &Path) -> Result<Self> {
        let socket = dir.join("nvidia-vm.sock");
        let log = fs::File::options()
            .create(true)
            .append(true)
            .open(dir.join("worker.log"))?;
        let child = Command::new(WORKER)
            .arg(&socket)
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
    /// Starts a program whose words go to a file, and waits until it goes on.
    fn begin(&mut self, file: &str) -> Result<()>;
    /// Waits until that program has had two more rounds.
    fn goes_on(&mut self, file: &str) -> Result<()>;
    /// Waits until that program is told that it has lost its device, and checks what it sees then.
    fn loses(&mut self, file: &str, sees: &str) -> Result<()>;
}

impl Programs for Guest {
    fn serve(&mut self) -> Result<()> {
        self.run(&format!("rm -f {AGENT}"))?;
        start_agent(self, "gantry-agent")?;
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

    fn begin(&mut self, file: &str) -> Result<()> {
        self.run(&format!(
            ": >{file}; {{ {PROGRAM} endless >{file} 2>&1 & }}; echo $! >{file}.pid"
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
}

fn served(context: &Context) -> Result<()> {
    let (one, two) = ("/tmp/one", "/tmp/two");
    let devices = DeviceFiles::make()?;
    let workers = Workers::start(&context.dir)?;
    let more = json!({
        "payload": {"initramfs": guest_files_with_native(&context.dir)?},
        "accels": [{
            "api": "Nvidia",
            "socket": workers.socket,
            "window": 64_u64 << 20,
            "pages": 1 << 20,
            "id": "a",
        }],
    });
    let (mut gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    load_uio(&mut guest)?;
    guest.serve()?;
    ensure!(workers.serving()?.is_none(), "a worker without programs");
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
    ensure!(counter(&gantry, "workers_lost")? == 0);

    // The worker is killed: its programs lose their devices, the next one has another worker.
    guest.begin(two)?;
    ensure!(workers.worker()? == worker, "one worker for all programs");
    sh(&format!("kill -9 {worker}"))?;
    guest.loses(one, BLANK)?;
    guest.loses(two, BLANK)?;
    guest.once()?;
    ensure!(counter(&gantry, "workers_lost")? == 1);

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
    let workers = Workers::start(&context.dir)?;
    guest.loses(one, BLANK)?;
    guest.once()?;

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
