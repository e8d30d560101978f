//! Guests that compute with CUDA, using a driver that needs no GPU.

use std::{fs, path::Path};

use anyhow::{Context as _, Result, ensure};
use gpu_mediator::{simulator::fairness::min_max_ratio, status::Client};
use serde_json::{Value, json};

use super::{
    Context, Entry,
    accelerator::{accel, counter, goes_on},
};
use crate::{
    gantry::{Gantry, merge},
    guest::Guest,
    net::sh,
    opencl::{self, Arbiter, Pool, until},
    report::Skipped,
    rig::nvrtc,
};

pub const SCENARIOS: &[Entry] = &[
    (
        "cuda: programs of two guests compute on the host's driver by weight, one pool serves them OpenCL too, by \
         the same port or one more, and whoever is killed of worker, arbiter, pool and VMM fails its own alone",
        compute,
    ),
    (
        "cuda: NVIDIA's compiler makes a guest's programs in the guest",
        compiled,
    ),
];

/// Device memory of each machine in MiB.
const MEMORY: u64 = 64;
const RIGHT: &str = "sums, counts and products are right";

/// Weights of the two machines.
const WEIGHTS: [u32; 2] = [1, 3];

/// A port for programs of one API or of both.
fn port(pool: &Pool, api: &str, weight: u32) -> Value {
    let mut port = accel(pool);
    port["api"] = json!(api);
    port["memory"] = json!(MEMORY << 20);
    port["weight"] = json!(weight);
    port
}

/// One port for both APIs.
fn shared_port(pool: &Pool, weight: u32) -> Value {
    json!([port(pool, "OpenclCuda", weight)])
}

/// A port for each API.
fn port_each(pool: &Pool, weight: u32) -> Value {
    let mut for_opencl = accel(pool);
    for_opencl["id"] = json!("cl");
    json!([port(pool, "Cuda", weight), for_opencl])
}

/// A machine whose programs call CUDA and OpenCL.
struct Vm {
    gantry: Gantry,
    guest: Guest,
    /// Its name at the arbiter.
    name: String,
}

impl Vm {
    fn boot(dir: &Path, ports: Value, more: Value) -> Result<Self> {
        fs::create_dir_all(dir)?;
        let mut config = json!({
            "payload": {"initramfs": opencl::guest_files(dir)?},
            "accels": ports,
        });
        merge(&mut config, more);
        let (gantry, mut guest) = Gantry::boot(dir, config)?;
        // With UIO, programs that wait for kernels sleep meanwhile.
        opencl::load_uio(&mut guest)?;
        opencl::start_agent(&mut guest, "gantry-agent")?;
        // As in vmm/machine/src/kinds/accel.rs.
        let name = format!("{}/a", gantry.pid());
        Ok(Self {
            gantry,
            guest,
            name,
        })
    }

    /// Starts a program that computes until it gets an error, and waits until it has computed.
    fn start(&mut self) -> Result<()> {
        let program = "cuda-programs endless >>/tmp/moving 2>&1";
        self.guest
            .run(&format!(": >/tmp/moving; {program} & true"))?;
        goes_on(&mut self.guest)
    }

    /// Checks that the computing program is told that it has lost its device, that everything it computed before was
    /// right, and that nothing of it is left in the port.
    fn loses(&mut self) -> Result<()> {
        let tail = "tail -n 3 /tmp/moving; pidof cuda-programs; true";
        let end = self
            .guest
            .eventually(tail, |text| text.contains("ended: "))?;
        ensure!(end.contains("CUDA_ERROR"), "{end}");
        until("the slice is free", || {
            Ok(counter(&self.gantry, "slices_in_use")? == 0)
        })
    }
}

/// What serves the machines. Both the arbiter and the pool are restarted after they were killed.
struct Host<'a> {
    dir: &'a Path,
    arbiter: Arbiter,
    pool: Pool,
}

impl Host<'_> {
    /// The worker that serves a program in addition to `others`. One more worker waits for a program.
    fn serving(&self, others: &[u32], start: impl FnOnce() -> Result<()>) -> Result<u32> {
        until("one worker waits", || {
            Ok(self.pool.workers()?.len() == others.len() + 1)
        })?;
        let waiting = self.pool.workers()?;
        let waiting = waiting.into_iter().find(|worker| !others.contains(worker));
        start()?;
        waiting.context("no worker waits")
    }

    /// The arbiter's record of a machine.
    fn client(&self, vm: &Vm) -> Result<Client> {
        let clients = self.arbiter.clients()?;
        let found = clients.into_iter().find(|client| client.name == vm.name);
        Ok(found.unwrap_or_default())
    }

    /// Waits until the arbiter holds nothing for a machine.
    fn forgets(&self, vm: &Vm) -> Result<()> {
        until("the arbiter has nothing of the machine", || {
            let client = self.client(vm)?;
            Ok(client.workers == 0 && client.memory == 0 && !client.holds)
        })
    }

    /// Number of open files of the pool and of the arbiter, once no program is served.
    fn files(&self) -> Result<[usize; 2]> {
        let count = |process: u32| Ok(fs::read_dir(format!("/proc/{process}/fd"))?.count());
        until("only one worker is left, which waits", || {
            Ok(self.pool.workers()?.len() == 1)
        })?;
        [self.pool.pid(), self.arbiter.pid()]
            .into_iter()
            .map(count)
            .collect::<Result<Vec<_>>>()?
            .try_into()
            .map_err(|_| anyhow::anyhow!("two are counted"))
    }
}

fn is_gone(process: u32) -> bool {
    !Path::new(&format!("/proc/{process}")).exists()
}

fn compute(context: &Context) -> Result<()> {
    let arbiter = Arbiter::start(&context.dir, "fair")?;
    let pool = Pool::start_for_both(&context.dir)?;
    let [one, other] = WEIGHTS;
    let ports = shared_port(&pool, one);
    let mut first = Vm::boot(&context.dir.join("first"), ports, json!({}))?;
    programs(&mut first.guest)?;
    let ports = port_each(&pool, other);
    let mut second = Vm::boot(&context.dir.join("second"), ports, json!({}))?;
    for vm in [&mut first, &mut second] {
        with_opencl(vm)?;
    }
    let dir = &context.dir;
    let host = Host { dir, arbiter, pool };
    by_weight(&mut [&mut first, &mut second])?;
    lose_worker(&host, &mut first, &mut second)?;
    let host = lose_arbiter(host, &mut first, &mut second)?;
    let host = lose_pool(host, &mut first, &mut second)?;
    lose_vmm(&host, first, &mut second)
}

/// Checks what programs compute and print, and what they are refused.
fn programs(guest: &mut Guest) -> Result<()> {
    let said = guest.run("cuda-programs 2>&1 || cat /tmp/agent.log")?;
    let printed = "a kernel says: block 0 thread 3 of 32:  1.50 d 123456789abf %";
    for expected in [RIGHT, printed, &format!("{MEMORY} MiB of device memory")] {
        ensure!(said.contains(expected), "no {expected:?} in: {said}");
    }
    let said = guest.run("cuda-programs memory 2>&1")?;
    ensure!(
        said.contains(&format!("{MEMORY} MiB were allocated"))
            && said.contains("CUDA_ERROR_OUT_OF_MEMORY"),
        "{said}"
    );
    Ok(())
}

/// A program that calls OpenCL is served while a program that calls CUDA computes.
fn with_opencl(vm: &mut Vm) -> Result<()> {
    vm.start()?;
    vm.guest.run("gantry-agent install")?;
    let list = vm.guest.run("clinfo -l; cat /tmp/agent.log")?;
    ensure!(list.contains("Device #0"), "{list}");
    goes_on(&mut vm.guest)?;
    ensure!(counter(&vm.gantry, "workers_lost")? == 0);
    vm.guest.run("killall -9 cuda-programs")?;
    until("the slices are free", || {
        Ok(counter(&vm.gantry, "slices_in_use")? == 0)
    })
}

/// Programs of both machines always have kernels of the same length in flight. The numbers of kernels that end, by the
/// programs' own count, must be in proportion to the weights. Equal parts would yield 0.33 of that.
fn by_weight(vms: &mut [&mut Vm; 2]) -> Result<()> {
    /// Minimum ratio of the worse-off machine to the better-off one, as where OpenCL is shared.
    const FAIR: f64 = 0.8;
    /// Maximum number of measurements until one is fair: a machine whose vCPU has to wait for the busy CPU on which all
    /// of this is emulated submits its next kernels late.
    const STRETCHES: usize = 3;
    /// Kernels of the machine with the lowest weight in a measurement, and before the first one.
    const LEAST: u32 = 100;
    const WARM: u32 = 10;
    const COUNT: &str = "wc -l </tmp/busy";
    let done = |vms: &mut [&mut Vm; 2]| -> Result<[u32; 2]> {
        for vm in &mut *vms {
            vm.guest.send(COUNT)?;
        }
        let mut counts = [0; 2];
        for (vm, count) in vms.iter_mut().zip(&mut counts) {
            *count = vm.guest.ended(COUNT)?.parse()?;
        }
        Ok(counts)
    };
    let wait = |vm: &mut Vm, count: u32| -> Result<()> {
        // Wait in the guest: polling from here would make it start programs over and over while others compute. On a
        // busy host this takes longer than a command may, so that it is several commands.
        let is = format!("[ $({COUNT}) -ge {count} ]");
        let some = format!("for i in $(seq 12); do {is} && break; sleep 5; done; {COUNT}");
        let mut last = None;
        loop {
            let now: u32 = vm.guest.run(&some)?.parse()?;
            if now >= count {
                return Ok(());
            }
            ensure!(last != Some(now), "{now} kernels have ended, and no more");
            last = Some(now);
        }
    };
    for vm in &mut *vms {
        let program = "GANTRY_CUDA_SPIN=20 cuda-programs busy /tmp/stop";
        vm.guest
            .run(&format!(": >/tmp/busy; {program} >>/tmp/busy 2>&1 & true"))?;
    }
    for vm in &mut *vms {
        wait(vm, WARM)?;
    }
    let ideal = WEIGHTS.map(f64::from);
    let mut stretches = Vec::new();
    while stretches
        .last()
        .is_none_or(|counts: &[f64; 2]| min_max_ratio(counts, &ideal) <= FAIR)
    {
        ensure!(
            stretches.len() < STRETCHES,
            "machines of weights {WEIGHTS:?} had so many kernels run, stretch by stretch: {stretches:?}"
        );
        let before = done(vms)?;
        wait(vms[0], before[0] + LEAST)?;
        let after = done(vms)?;
        stretches.push([0, 1].map(|vm| f64::from(after[vm] - before[vm])));
    }
    for vm in vms {
        vm.guest.run("touch /tmp/stop")?;
        let end = vm
            .guest
            .eventually("tail -n 1 /tmp/busy; pidof cuda-programs", |text| {
                !text.contains("has ended")
            })?;
        ensure!(end.contains("kernels were right"), "{end}");
    }
    Ok(())
}

/// Kills the worker of one machine's program. That machine's next program is served, and the other machine's program is
/// not affected.
fn lose_worker(host: &Host<'_>, first: &mut Vm, second: &mut Vm) -> Result<()> {
    let of_first = host.serving(&[], || first.start())?;
    let of_second = host.serving(&[of_first], || second.start())?;
    sh(&format!("kill -9 {of_second}"))?;
    second.loses()?;
    // The program is told before the worker is counted.
    until("the lost worker is counted", || {
        Ok(counter(&second.gantry, "workers_lost")? == 1)
    })?;
    host.forgets(second)?;
    let said = second
        .guest
        .run("cuda-programs 2>&1 || cat /tmp/agent.log")?;
    ensure!(said.contains(RIGHT), "{said}");
    goes_on(&mut first.guest)?;
    ensure!(counter(&first.gantry, "workers_lost")? == 0);
    ensure!(host.pool.workers()?.contains(&of_first));
    second.start()
}

/// Without an arbiter, programs wait. No program loses anything, and the next arbiter gets the weights.
fn lose_arbiter<'a>(host: Host<'a>, first: &mut Vm, second: &mut Vm) -> Result<Host<'a>> {
    let Host { dir, arbiter, pool } = host;
    drop(arbiter);
    let arbiter = Arbiter::start(dir, "fair")?;
    let host = Host { dir, arbiter, pool };
    for (vm, weight) in [first, second].into_iter().zip(WEIGHTS) {
        goes_on(&mut vm.guest)?;
        let client = host.client(vm)?;
        ensure!(client.weight == weight && client.workers == 1, "{client:?}");
        ensure!(counter(&vm.gantry, "workers_lost")? <= 1);
    }
    Ok(host)
}

/// When a pool dies, its workers die with it. The next pool serves the next program of each machine.
fn lose_pool<'a>(host: Host<'a>, first: &mut Vm, second: &mut Vm) -> Result<Host<'a>> {
    let Host { dir, arbiter, pool } = host;
    let mut workers = pool.workers()?;
    workers.push(pool.pid());
    drop(pool);
    let pool = Pool::start_for_both(dir)?;
    let host = Host { dir, arbiter, pool };
    for vm in [&mut *first, &mut *second] {
        vm.loses()?;
        host.forgets(vm)?;
    }
    until("nothing is left of the pool", || {
        Ok(workers.iter().all(|process| is_gone(*process)))
    })?;
    Ok(host)
}

/// The worker of a machine's program ends with the machine; the other machine's program continues.
fn lose_vmm(host: &Host<'_>, mut first: Vm, second: &mut Vm) -> Result<()> {
    let files = host.files()?;
    let of_first = host.serving(&[], || first.start())?;
    let of_second = host.serving(&[of_first], || second.start())?;
    first.gantry.kill()?;
    until("the worker is gone", || Ok(is_gone(of_first)))?;
    host.forgets(&first)?;
    goes_on(&mut second.guest)?;
    ensure!(host.pool.workers()?.contains(&of_second));
    second.guest.run("killall -9 cuda-programs")?;
    host.forgets(second)?;
    until("as many files are open as before", || {
        Ok(host.files()? == files)
    })
}

/// The vendor's unmodified library compiles CUDA C++ to PTX in the guest, and the guest's driver passes it to the
/// host's.
fn compiled(context: &Context) -> Result<()> {
    if let Ok(why) = fs::read_to_string(nvrtc::MISSING) {
        return Err(Skipped(why).into());
    }
    let _arbiter = Arbiter::start(&context.dir, "fair")?;
    let pool = Pool::start_for_both(&context.dir)?;
    let find = format!("grep -lx {} /sys/block/*/serial; true", nvrtc::SERIAL);
    let found = sh(&find)?;
    let disk = Path::new(found.trim()).parent().and_then(Path::file_name);
    let disk = disk.context("the disk with NVRTC was built, and is not to be found")?;
    let disk = Path::new("/dev").join(disk);
    let more = json!({
        "memory": {"size": 512_u64 << 20},
        "disks": [{"path": disk, "readonly": true, "image_type": "Raw"}],
    });
    let mut vm = Vm::boot(&context.dir, port_each(&pool, 1), more)?;
    vm.guest
        .run("mkdir /nvrtc && mount -t ext4 -o ro /dev/vda /nvrtc")?;
    let said = vm
        .guest
        .run("LD_LIBRARY_PATH=/nvrtc cuda-programs compile 2>&1 || cat /tmp/agent.log")?;
    ensure!(
        said.contains("what was compiled here for compute_80 is right"),
        "{said}"
    );
    Ok(())
}
