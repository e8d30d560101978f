//! Measures what movability costs applications, and what a move costs, next to the figures that Crane's authors
//! published for theirs (SYSTOR 2017). Everything runs as processes of this machine: pools of workers on its OpenCL
//! driver, and applications.
//!
//! - [`pauses`]: the application whose rounds are measured; [`tracking`]: cost for an application that is never moved;
//!   [`moves`]: cost of moves; [`foreign`] and [`hashcat`]: both for third-party programs; [`link`]: a whole VM and its
//!   application over a network.

mod foreign;
mod hashcat;
mod link;
mod moves;
mod pauses;
mod tracking;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail, ensure};
use gantry_build::{programs, progress::Step, target};
use gantry_host_tests::{
    moved_guest::{GANTRY, GUEST},
    opencl::pool::Pool,
    ring,
};
use gantry_tests::rig::packages;

use crate::{elsewhere::Elsewhere, processors, sharing};

/// What is built for a machine where nothing can be built.
const BUILT: &[&str] = &[
    GANTRY,
    "gantry-accel",
    "libgantry_opencl.so",
    "xtask",
    "examples/opencl_figures",
    "examples/opencl_pauses",
];

/// Options of `cargo xtask bench crane`.
#[derive(clap::Args)]
#[group(skip)]
pub struct Options {
    /// crane: number of moves of one application for the check of its results and of the pools' resources.
    #[arg(long, default_value_t = 200, value_name = "COUNT")]
    moves: usize,
    /// crane: run only this part: stops, rates, moves, kernels, link, clpeak, x264, hashcat (can be repeated). gpuvm:
    /// only `shares`, which measures in the rig how two guests share the GPU; `record`, which records in the rig what a
    /// guest with nouveau does (writes tests/recordings/); or `replay`, which repeats that on this machine's /dev/kvm.
    #[arg(long, value_name = "PART")]
    pub part: Vec<String>,
    /// crane: give each of the two pools a GPU of its own, numbered as in CUDA_VISIBLE_DEVICES: 0,1.
    #[arg(long, value_delimiter = ',', value_name = "GPU,GPU")]
    gpus: Vec<u32>,
}

/// A measurement with the two pools.
type Part = fn(&[Movable; 2], &Options) -> Result<()>;

/// All parts by name, starting with those that nothing else measures.
const PARTS: &[(&str, Part)] = &[
    ("stops", |pools, _| moves::stops(pools)),
    ("rates", |pools, _| moves::rates(pools)),
    ("moves", |pools, options| moves::many(pools, options.moves)),
    ("kernels", |pools, _| tracking::kernels(&pools[0])),
    ("link", |pools, _| link::link(pools)),
    ("clpeak", |pools, _| foreign::clpeak(pools)),
    ("x264", |pools, _| foreign::x264(pools)),
    ("hashcat", |pools, _| hashcat::passwords(pools)),
];

/// Measures and prints, or only builds what is needed.
pub fn run(options: &Options, elsewhere: &Elsewhere, pack_only: bool) -> Result<()> {
    if pack_only {
        println!("everything is in {}", pack()?.display());
        return Ok(());
    }
    let (release, vendors) = match elsewhere.programs() {
        Some(given) => (
            fs::canonicalize(given.built)?,
            fs::canonicalize(given.vendors)?,
        ),
        None => {
            packages::install(foreign::PACKAGES)?;
            packages::install(link::PACKAGES)?;
            packages::install(sharing::hashcat::PACKAGES)?;
            (programs::folder()?, PathBuf::from("/etc/OpenCL/vendors"))
        }
    };
    let gpus = match options.gpus[..] {
        [] => [None; 2],
        [one, two] => [Some(one), Some(two)],
        _ => bail!("--gpus names two, such as 0,1"),
    };
    let pools = [
        Movable::start(&vendors, &release, "one", gpus[0])?,
        Movable::start(&vendors, &release, "two", gpus[1])?,
    ];
    let device = device(&vendors)?;
    println!("Host: {}. Device: {device}.", processors());
    if let [Some(one), Some(two)] = gpus {
        println!("The first pool has GPU {one}, the second one GPU {two}.");
    }
    println!();
    println!("| what | Crane | here |\n|---|---|---|");
    let mut failed = Vec::new();
    for (name, part) in PARTS {
        if !options.part.is_empty() && !options.part.iter().any(|one| one == name) {
            continue;
        }
        let step = Step::new(format!("measuring {name}"));
        // If one fails, the others still report their figures.
        if let Err(error) = part(&pools, options) {
            row(name, "", "failed");
            failed.push(format!("{name}: {error:#}"));
        }
        step.finish();
    }
    ensure!(failed.is_empty(), "{}", failed.join("\n"));
    Ok(())
}

/// Prints a row of the table.
fn row(what: &str, crane: &str, here: &str) {
    println!("| {what} | {crane} | {here} |");
}

/// A pool whose applications can be moved.
struct Movable {
    pool: Pool,
    control: PathBuf,
}

impl Movable {
    fn start(vendors: &Path, release: &Path, name: &str, gpu: Option<u32>) -> Result<Self> {
        let control =
            std::env::temp_dir().join(format!("gantry-crane-{name}-{}", std::process::id()));
        let path = control.display().to_string();
        let options = ["--control", &path];
        let (vendors, release) = (vendors.to_owned(), release.to_owned());
        let visible = gpu.map(|gpu| format!("CUDA_VISIBLE_DEVICES={gpu}"));
        let program = visible.as_deref().map(|visible| ["env", visible]);
        let program = program.as_ref().map_or(&[][..], |program| &program[..]);
        let pool = Pool::before_under(program, vendors, name, release, &options)?;
        Ok(Self { pool, control })
    }

    /// Moves its only application to another worker, or to another pool.
    fn move_all(&self, to: Option<&Self>) -> Result<()> {
        match to {
            Some(to) => self.move_by(&["--to", &to.pool.address]),
            None => self.move_by(&[]),
        }
    }

    /// Moves its only application with these options.
    fn move_by(&self, options: &[&str]) -> Result<()> {
        let mut command = Command::new("timeout");
        command
            .arg("60")
            .arg(self.pool.release.join("gantry-accel"));
        command.arg("move").arg("--control").arg(&self.control);
        command.arg("--all");
        command.args(options);
        let said = packages::output(&mut command)?;
        ensure!(
            said.matches(" moved ").count() == 1,
            "no move of one application:\n{said}{}",
            self.pool.log()?
        );
        Ok(())
    }
}

impl Drop for Movable {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.control);
    }
}

/// The name of the device, according to its driver or the system.
fn device(vendors: &Path) -> Result<String> {
    let mut smi = Command::new("nvidia-smi");
    smi.args(["--query-gpu=name,driver_version", "--format=csv,noheader"]);
    if let Ok(output) = smi.output()
        && output.status.success()
    {
        return Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned());
    }
    let names = fs::read_dir(vendors)?.filter_map(Result::ok);
    let names: Vec<_> = names
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    Ok(format!("that of {}", names.join(", ")))
}

/// Builds everything into one directory.
fn pack() -> Result<PathBuf> {
    let folder = target().join("crane");
    fs::create_dir_all(folder.join("examples"))?;
    let release = programs::folder()?;
    packages::run(gantry_build::cargo().args(["build", "--release", "--quiet", "-p", "xtask"]))?;
    for name in BUILT {
        gantry_build::pack(&release.join(name), &folder.join(name))
            .with_context(|| format!("packing {name}"))?;
    }
    gantry_build::copy(&ring::guests()?.join(GUEST), &folder.join(GUEST))?;
    foreign::pack(&folder)?;
    sharing::hashcat::pack(&folder.join("hashcat"))?;
    Ok(folder)
}
