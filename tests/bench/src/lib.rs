//! `cargo xtask bench`: prints figures as a table with a description of the machine.
//!
//! - [`crane`]: the cost of moving applications.
//! - [`fairness`]: how accelerators are shared, simulated in virtual time; [`sharing`]: how a real one is.
//! - [`gloop`]: kernels that yield the GPU by themselves.
//! - [`gpuvm`]: what a guest's driver does with a virtual GPU; [`guest_gpu`]: CUDA programs in Linux guests.
//! - [`ring`]: calls over an accelerator's rings from ring 3 of a guest.
//! - [`gpu_machine`]: what is measured on a machine with a GPU; [`elsewhere`]: where nothing can be built.

mod crane;
mod elsewhere;
mod fairness;
mod gloop;
mod gpu_machine;
mod gpuvm;
mod guest_gpu;
mod ring;
mod sharing;

use std::path::{Path, PathBuf};

use anyhow::Result;
use gantry_build::{cargo, programs, progress::Step, target};
use gantry_tests::{
    gpuvm::shares,
    report::BENCH,
    rig::{
        Board, Cache, Images, NEEDED, Rig,
        images::{Beside, with_others},
        packages,
    },
    starts,
};

use self::elsewhere::Elsewhere;

/// Options of `cargo xtask bench`.
#[derive(clap::Args)]
pub struct Options {
    /// Run only these measurements of the nested rig: boot, process, snapshot, net, migration, passthrough, idle; or
    /// `start`, on this machine itself: the resources that `gantry` and programs next to it have used when their API
    /// replies, alternating. Or run one of these alone: `fairness`: how fairly schedulers share an accelerator, in
    /// virtual time (writes measurements/); `ring`: cost of a call over an accelerator's rings, from ring 3 of a guest
    /// on /dev/kvm; `sharing`: how fairly this machine's OpenCL device is shared in practice; `gloop`: cost for kernels of giving back
    /// an NVIDIA GPU by themselves; `cuda`: CUDA natively and through Gantry; `guest-gpu`: CUDA programs in Linux guests
    /// next to native ones; `crane`: cost of movability and of moves for applications, next to Crane's figures; `gpu`:
    /// all of these except `fairness`, `gloop`, `cuda`, `guest-gpu` and `crane`, for a machine with a GPU, with its
    /// output kept; `gpuvm`: exits and page table scans of a guest with a virtual GPU, in the nested rig.
    names: Vec<String>,
    /// boot, start: another VMM that boots the same guest, alternating: an older gantry, or any VMM that accepts its
    /// options, such as Cloud Hypervisor. Can be repeated.
    #[arg(long, value_name = "NAME=PROGRAM", value_parser = beside)]
    beside: Vec<Beside>,
    #[command(flatten)]
    elsewhere: Elsewhere,
    #[command(flatten)]
    sharing: sharing::Options,
    #[command(flatten)]
    gpu: gpu_machine::Options,
    #[command(flatten)]
    crane: crane::Options,
    #[command(flatten)]
    ring: ring::Options,
}

/// Measures and prints.
pub fn run(options: &Options) -> Result<()> {
    if options.names == ["fairness"] {
        return fairness::run();
    }
    if options.names == ["ring"] {
        return ring::bench(&options.ring);
    }
    let is_gpuvm = options.names == ["gpuvm"];
    let part = match is_gpuvm {
        true => gpuvm::Part::of(&options.crane.part)?,
        false => gpuvm::Part::Counts,
    };
    if part == gpuvm::Part::Replay {
        return gpuvm::replay();
    }
    if options.names == ["gloop"] {
        return gloop::bench(options.gpu.pack());
    }
    if options.names == ["cuda"] {
        return gpu_machine::cuda(&options.gpu);
    }
    if options.names == ["guest-gpu"] {
        return guest_gpu::bench(options.gpu.pack());
    }
    if options.names == ["crane"] {
        return crane::run(&options.crane, &options.elsewhere, options.gpu.pack());
    }
    if options.names == ["gpu"] {
        return gpu_machine::run(&options.gpu, &options.elsewhere, &options.sharing);
    }
    if options.names == ["sharing"] {
        return sharing::run(&options.sharing, &options.elsewhere);
    }
    if options.names == ["start"] {
        let gantry = programs::gantry()?;
        println!("{}", processors());
        println!("| what | figure |\n|---|---|");
        return starts(&gantry, &options.beside);
    }
    packages::install(NEEDED)?;
    let binaries = programs::build()?;
    let step = Step::new("fetching Debian's kernel and building images");
    let cache = Cache::open()?;
    let mut images = Images::build(&cache, &binaries, &target().join("rig"))?;
    match Board::Gpu.other_kernel().filter(|_| is_gpuvm) {
        Some(kernel) => images.add(kernel, &cache, &binaries)?,
        None => images = with_others(&images, &options.beside)?,
    }
    step.finish();
    if part == gpuvm::Part::Record {
        let logs = target().join("rig-logs");
        return gpuvm::record(&Rig { images, logs });
    }
    println!("{}", machine());
    println!("| what | figure |\n|---|---|");
    if options.names.is_empty() {
        here(&binaries.gantry, &options.beside)?;
    }
    let rig = Rig {
        images,
        logs: target().join("rig-logs"),
    };
    let shares = [shares::NAME.to_owned()];
    let names = match part {
        gpuvm::Part::Shares => &shares,
        _ => &options.names[..],
    };
    let order = [&[BENCH.to_owned()], names].concat().join(" ");
    let board = match is_gpuvm {
        true => Board::Gpu,
        false => Board::Intel,
    };
    rig.show_on(board, &order, |row| println!("{row}"))
}

/// Parses the name and the program of another VMM.
fn beside(text: &str) -> Result<Beside, String> {
    let (name, program) = text
        .split_once('=')
        .filter(|(name, _)| !name.is_empty() && !name.contains('/'))
        .ok_or("a name without '/', '=' and the program, such as before=/tmp/gantry")?;
    let program = std::fs::canonicalize(program).map_err(|error| format!("{program}: {error}"))?;
    Ok(Beside {
        name: name.to_owned(),
        program,
    })
}

/// Number of measured starts of each VMM.
const STARTS: usize = 31;

/// This gantry, and the others.
fn vmms(gantry: &Path, beside: &[Beside]) -> Vec<(String, PathBuf)> {
    let others = beside
        .iter()
        .map(|vmm| (vmm.name.clone(), vmm.program.clone()));
    std::iter::once(("gantry".to_owned(), gantry.to_owned()))
        .chain(others)
        .collect()
}

/// Measures the resources that they have used when their API replies.
fn starts(gantry: &Path, beside: &[Beside]) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let mut row = |what: &str, figure: String| println!("| {what} | {figure} |");
    starts::measure(&vmms(gantry, beside), folder.path(), STARTS, &mut row)
}

/// Runs the measurements that do not need the rig.
fn here(gantry: &Path, beside: &[Beside]) -> Result<()> {
    for (name, program) in vmms(gantry, beside) {
        let size = std::fs::metadata(program)?.len();
        println!("| {name}: release binary (KiB) | {} |", size >> 10);
    }
    starts(gantry, beside)?;
    // Prints its own row, or why it cannot.
    packages::output(cargo().args([
        "bench",
        "--quiet",
        "--package",
        "vmm",
        "--bench",
        "pio_exit",
    ]))
    .map(|row| print!("{row}"))
}

/// Describes the machine of the measurements.
fn machine() -> String {
    format!(
        "Host: {}. Boot, memory and snapshots: in the nested rig (QEMU TCG with AMD-V, Debian's \
         kernel as L1 and L2).",
        processors()
    )
}

/// This machine's processors and kernel.
fn processors() -> String {
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpuinfo
        .lines()
        .find_map(|line| line.strip_prefix("model name"))
        .unwrap_or("");
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    format!(
        "{} ({cores} CPUs), Linux {}",
        model.trim_start_matches([' ', '\t', ':']),
        kernel.trim()
    )
}

/// The median.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}
