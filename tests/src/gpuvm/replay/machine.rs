//! The processes of a virtual machine with a virtual GPU, and their resource usage.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    os::fd::AsRawFd,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    ptr::null_mut,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use gantry_gpu_replay::{CLASS_BITS, DESK, Desk, END, LOG, STEPS, State, Step};

use super::steps::{CLASSES, Plan};
use crate::{http, programs::Programs};

/// Maximum duration of a part: with all accesses trapped, there are a million exits.
const PATIENCE: Duration = Duration::from_secs(240);
/// Time for pending activity to end: an interrupt is in flight, a thread goes to sleep.
const DRAIN: Duration = Duration::from_millis(200);
/// VRAM of the physical GPU.
const VRAM: &str = "256M";
const CHANNELS: u8 = 48;

/// Counters by name.
pub type Counters = BTreeMap<String, u64>;

/// Resources used up to a time, or between two times.
#[derive(Clone, Debug, Default)]
pub struct Used {
    /// The virtual GPU's counters.
    pub counters: Counters,
    /// CPU nanoseconds of Gantry's threads, except the vCPU.
    pub front: u64,
    /// CPU nanoseconds of the mediator.
    pub mediator: u64,
    /// CPU nanoseconds of the model: what silicon would do.
    pub model: u64,
}

impl Used {
    /// Returns the median of several.
    pub fn median(all: &[&Self]) -> Self {
        let of = |value: &dyn Fn(&Self) -> u64| median(all.iter().map(|its| value(its)).collect());
        let names = all.iter().flat_map(|its| its.counters.keys().cloned());
        let names: std::collections::BTreeSet<String> = names.collect();
        let counters = names.into_iter().map(|name| {
            let count = of(&|its: &Self| its.counters.get(&name).copied().unwrap_or(0));
            (name, count)
        });
        Self {
            counters: counters.collect(),
            front: of(&|its| its.front),
            mediator: of(&|its| its.mediator),
            model: of(&|its| its.model),
        }
    }

    /// Returns the difference to an earlier time.
    pub fn since(&self, before: &Self) -> Self {
        let counters = self.counters.iter().map(|(name, count)| {
            let earlier = before.counters.get(name).copied().unwrap_or(0);
            (name.clone(), count.saturating_sub(earlier))
        });
        Self {
            counters: counters.collect(),
            front: self.front.saturating_sub(before.front),
            mediator: self.mediator.saturating_sub(before.mediator),
            model: self.model.saturating_sub(before.model),
        }
    }
}

/// A process that is killed when the value is dropped.
struct Process(Child);

impl Process {
    fn start(command: &mut Command) -> Result<Self> {
        let child = command.stdin(Stdio::null()).spawn();
        let child = child.with_context(|| format!("cannot start {:?}", command.get_program()))?;
        Ok(Self(child))
    }

    fn id(&self) -> u32 {
        self.0.id()
    }

    /// Waits for one of its sockets.
    fn listens(&mut self, socket: &Path) -> Result<()> {
        let start = Instant::now();
        while !socket.exists() {
            if let Some(status) = self.0.try_wait()? {
                bail!("a program has ended ({status}): see its message above");
            }
            ensure!(
                start.elapsed() < Duration::from_secs(20),
                "nobody listens at {}",
                socket.display()
            );
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The guest's RAM.
struct Ram {
    start: *mut u8,
}

impl Ram {
    /// Finds it among a process's descriptors: the in-memory file with the same length.
    fn of(process: u32) -> Result<Self> {
        let start = Instant::now();
        loop {
            match Self::find(process)? {
                Some(path) => return Self::map(&path),
                // Gantry listens before it creates the machine.
                None if start.elapsed() < Duration::from_secs(20) => {
                    std::thread::sleep(Duration::from_millis(10));
                }
                None => bail!("the guest's RAM is not among Gantry's files"),
            }
        }
    }

    fn find(process: u32) -> Result<Option<PathBuf>> {
        for entry in fs::read_dir(format!("/proc/{process}/fd"))? {
            let path = entry?.path();
            let Ok(name) = fs::read_link(&path) else {
                continue;
            };
            let is_memory = name.to_string_lossy().starts_with("/memfd:");
            if is_memory && fs::metadata(&path).is_ok_and(|its| its.len() == END) {
                return Ok(Some(path));
            }
        }
        Ok(None)
    }

    fn map(path: &Path) -> Result<Self> {
        let file = File::options().read(true).write(true).open(path)?;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start = unsafe {
            libc::mmap(
                null_mut(),
                END as usize,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        ensure!(
            start != libc::MAP_FAILED,
            "cannot map the guest's RAM: {}",
            std::io::Error::last_os_error()
        );
        let start = start.cast();
        Ok(Self { start })
    }

    fn at(&self, address: u64) -> *mut u8 {
        debug_assert!(address < END);
        self.start.wrapping_add(address as usize)
    }
}

impl Drop for Ram {
    fn drop(&mut self) {
        // SAFETY: mapped by `of`; everything that borrows from it borrows this value.
        unsafe { libc::munmap(self.start.cast(), END as usize) };
    }
}

/// A virtual machine whose guest waits for steps.
pub struct Machine {
    /// How often the guest had started to wait when it was last told to continue.
    waits: u64,
    ram: Ram,
    gantry: Process,
    mediator: Process,
    model: Process,
    api: PathBuf,
    /// The directory of the sockets; it is dropped last.
    _folder: tempfile::TempDir,
}

impl Machine {
    /// Starts it with some of the mechanisms.
    pub fn start(programs: &Programs, vram: u64, [remap, lazy, watch]: [bool; 3]) -> Result<Self> {
        let folder = tempfile::tempdir().context("cannot make a folder for sockets")?;
        let path = |name| folder.path().join(name);
        let (at, to, api) = (path("model"), path("gpu"), path("api"));
        let mut model = Command::new(programs.path("gantry-gf100"));
        model.args(["--vram", VRAM, "--trap", "--socket"]).arg(&at);
        let mut model = Process::start(&mut model)?;
        model.listens(&at)?;
        let mut mediator = Command::new(programs.path("gantry-gpu"));
        mediator.arg("serve").arg("--model").arg(&at);
        let mut mediator = Process::start(mediator.arg("--socket").arg(&to))?;
        mediator.listens(&to)?;
        let switch = |on| if on { "on" } else { "off" };
        let gpu = format!(
            "socket={},vram={}M,channels={CHANNELS},remap={},lazy={},watch={}",
            to.display(),
            vram >> 20,
            switch(remap),
            switch(lazy),
            switch(watch)
        );
        let mut gantry = Command::new(programs.path("gantry"));
        gantry
            .arg("--kernel")
            .arg(programs.path("gantry-gpu-guest"))
            .args(["--cpus", "boot=1", "--memory"])
            .arg(format!("size={}M,shared=on", END >> 20))
            .arg("--gpu")
            .arg(gpu)
            .args(["--serial", "off", "--console", "off", "--api-socket"])
            .arg(&api);
        let mut gantry = Process::start(&mut gantry)?;
        gantry.listens(&api)?;
        Ok(Self {
            waits: 0,
            ram: Ram::of(gantry.id())?,
            gantry,
            mediator,
            model,
            api,
            _folder: folder,
        })
    }

    /// The status that the guest reports.
    pub fn desk(&self) -> &Desk {
        // SAFETY: within the RAM, aligned, and mapped as long as the value lives. All bytes are
        // valid, and both sides only use atomics.
        unsafe { &*self.ram.at(DESK).cast() }
    }

    /// Waits until the guest is in this state.
    pub fn becomes(&mut self, wanted: State) -> Result<()> {
        let start = Instant::now();
        loop {
            let state = self.desk().state();
            if state == wanted && self.desk().waits() > self.waits {
                return Ok(());
            }
            let step = self.desk().at();
            ensure!(
                !matches!(state, State::NoGpu | State::Stuck | State::Nonsense),
                "the guest is {state:?} at step {step}"
            );
            if let Some(status) = self.gantry.0.try_wait()? {
                bail!("gantry has ended ({status}): see its message above");
            }
            ensure!(
                start.elapsed() < PATIENCE,
                "the guest is still {state:?}, and not {wanted:?}"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Gives the waiting guest its steps.
    pub fn load(&self, plan: &Plan) {
        let steps = size_of_val(plan.steps.as_slice());
        // SAFETY: the plan has checked that both fit. The guest is waiting, and reads them later.
        unsafe {
            let to = self.ram.at(STEPS).cast::<Step>();
            to.copy_from_nonoverlapping(plan.steps.as_ptr(), plan.steps.len());
            let to = self.ram.at(STEPS).add(steps);
            to.copy_from_nonoverlapping(plan.bytes.as_ptr(), plan.bytes.len());
        }
    }

    /// Lets the guest continue.
    pub fn go(&mut self) {
        self.waits = self.desk().waits();
        self.desk().go();
    }

    /// Times of the accesses since the guest last continued, by class.
    pub fn times(&self) -> Vec<Vec<u64>> {
        let mut times = vec![Vec::new(); CLASSES];
        for nth in 0..self.desk().logged() {
            // SAFETY: within the log, which the guest does not write while it waits.
            let word = unsafe { self.ram.at(LOG + nth * 8).cast::<u64>().read_volatile() };
            let class = word as usize & ((1 << CLASS_BITS) - 1);
            if let Some(times) = times.get_mut(class) {
                times.push(word >> CLASS_BITS);
            }
        }
        times
    }

    /// Returns the resources used so far, once all processes are idle.
    pub fn used(&self) -> Result<Used> {
        std::thread::sleep(DRAIN);
        let answer = http::request(&self.api, "GET", "vm.counters", None)?;
        let all: BTreeMap<String, Counters> =
            serde_json::from_value(answer.body).context("vm.counters makes no sense")?;
        let gpu = all.into_iter().find(|(name, _)| name.contains("gpu"));
        let (_, counters) = gpu.context("there are no counters of a GPU")?;
        Ok(Used {
            counters,
            front: processors(self.gantry.id(), |name| name.contains("gpu"))?,
            mediator: processors(self.mediator.id(), |_| true)?,
            model: processors(self.model.id(), |_| true)?,
        })
    }
}

/// The median of numbers; 0 if there are none.
pub fn median(mut all: Vec<u64>) -> u64 {
    all.sort_unstable();
    all.get(all.len() / 2).copied().unwrap_or(0)
}

/// CPU nanoseconds of a process's threads.
fn processors(process: u32, is_meant: impl Fn(&str) -> bool) -> Result<u64> {
    let mut sum = 0;
    let mut count = 0;
    for thread in fs::read_dir(format!("/proc/{process}/task"))? {
        let thread = thread?.path();
        if !is_meant(fs::read_to_string(thread.join("comm"))?.trim()) {
            continue;
        }
        let times = fs::read_to_string(thread.join("schedstat"))?;
        let first = times.split_whitespace().next();
        sum += first.context("an empty schedstat")?.parse::<u64>()?;
        count += 1;
    }
    ensure!(count > 0, "process {process} has no such threads");
    Ok(sum)
}

/// Counts of the time-stamp counter per microsecond.
pub fn clock() -> f64 {
    // SAFETY: every processor that KVM runs on has this instruction.
    let now = || unsafe { std::arch::x86_64::_rdtsc() };
    let (time, counts) = (Instant::now(), now());
    std::thread::sleep(Duration::from_millis(200));
    (now() - counts) as f64 / time.elapsed().as_secs_f64() / 1e6
}
