//! Runs all measurements for a machine with a GPU in one command, and keeps their output.

use std::{
    fs::{self, File},
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Instant,
};

use anyhow::{Context, Result, ensure};
use gantry_build::{cargo, copy, programs, progress::Step, root, target};
use gantry_host_tests::ring;
use gantry_tests::rig::packages;

use crate::{
    elsewhere::{Elsewhere, takes_results},
    processors, sharing,
};

/// What is built for the part that is not a guest, and for the measurements.
const BUILT: &[&str] = &[
    "gantry-arbiter",
    "libgantry_malloc.so",
    "libgantry_opencl.so",
    "xtask",
    "examples/opencl_figures",
    "examples/opencl_turns",
];

/// Scripts that are run as they are.
const SCRIPTS: &[&str] = &[
    "guest/opencl/tests/turns.py",
    "remoting/measure.sh",
    "remoting/medians.awk",
    "remoting/certificates.sh",
];

/// Options of `cargo xtask bench gpu`.
#[derive(clap::Args)]
#[group(skip)]
pub struct Options {
    /// gpu: file for the output; pictures of shares go to FOLDER/pictures (target/gpu) [default:
    /// measurements/gpu-machine.txt]
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// gpu, gloop, cuda, guest-gpu, crane: only build, into target/gpu, target/gloop, target/cuda-run, target/guest-gpu
    /// or target/crane, for a machine where nothing can be built: copy the directory there, and run `FOLDER/xtask bench
    /// gpu --built FOLDER --vendors VENDORS --output FILE`, or what the command prints.
    #[arg(long, conflicts_with_all = ["built", "output"])]
    pack: bool,
    /// cuda: a checkout of NVIDIA's cuda-samples; the samples listed in remoting/cuda-machine/samples.txt are packed
    #[arg(long, value_name = "FOLDER")]
    samples: Option<PathBuf>,
}

impl Options {
    /// Whether to build only.
    pub fn pack(&self) -> bool {
        self.pack
    }
}

/// Measures CUDA natively and through Gantry on this machine, or packs this for another one.
pub fn cuda(options: &Options) -> Result<()> {
    let (folder, results) = (target().join("cuda-run"), target().join("cuda-results"));
    let mut pack = Command::new(root().join("remoting/cuda-machine/pack.sh"));
    pack.arg(&folder)
        .args(options.samples.as_deref().map(absolute).transpose()?);
    packages::run(&mut pack)?;
    ring::pack(&folder.join("ring"))?;
    if options.pack {
        println!(
            "bring {0} there, and run FOLDER/run.sh RESULTS",
            folder.display()
        );
        return Ok(());
    }
    let mut run = Command::new(folder.join("run.sh"));
    packages::run(run.arg(&results))?;
    println!("kept in {}", results.display());
    Ok(())
}

/// A part of the measurements.
struct Part {
    command: Command,
    /// Why it is left out here.
    left_out: Option<String>,
}

/// Runs all measurements and keeps the output, or only builds what is needed.
pub fn run(options: &Options, elsewhere: &Elsewhere, sharing: &sharing::Options) -> Result<()> {
    if options.pack {
        println!("everything is in {}", pack()?.display());
        return Ok(());
    }
    let output = options.output.clone();
    let output = output.unwrap_or_else(|| root().join("measurements/gpu-machine.txt"));
    let folder = output.parent().filter(|path| !path.as_os_str().is_empty());
    takes_results(folder.unwrap_or(Path::new(".")), "--output")?;
    let (built, vendors) = match elsewhere.programs() {
        Some(given) => (given.built.to_owned(), given.vendors.to_owned()),
        None => (pack()?, PathBuf::from("/etc/OpenCL/vendors")),
    };
    let (built, vendors) = (absolute(&built)?, absolute(&vendors)?);
    let mut kept =
        File::create(&output).with_context(|| format!("cannot write {}", output.display()))?;
    say(&mut kept, &processors())?;
    let mut failed = Vec::new();
    for mut part in parts(&built, &vendors, sharing)? {
        let words: Vec<_> = std::iter::once(part.command.get_program())
            .chain(part.command.get_args())
            .map(|word| word.to_string_lossy().into_owned())
            .collect();
        // Readers do not need to know where they are.
        let words = (words.join(" "))
            .replace(&*built.to_string_lossy(), "FOLDER")
            .replace(&*vendors.to_string_lossy(), "VENDORS");
        say(&mut kept, &format!("\n$ {words}"))?;
        if let Some(why) = part.left_out {
            say(&mut kept, &format!("(left out: {why})"))?;
            continue;
        }
        let start = Instant::now();
        if let Err(error) = tee(&mut part.command, &mut kept) {
            say(&mut kept, &format!("({error})"))?;
            failed.push(words);
        }
        say(&mut kept, &format!("({} s)", start.elapsed().as_secs()))?;
    }
    ensure!(failed.is_empty(), "these failed: {}", failed.join("; "));
    println!("kept in {}", output.display());
    Ok(())
}

/// The commands to run, in order.
fn parts(built: &Path, vendors: &Path, shared: &sharing::Options) -> Result<Vec<Part>> {
    let xtask = |what: &[&str]| {
        let mut command = Command::new(built.join("xtask"));
        command.arg("bench").args(what);
        command
            .arg("--built")
            .arg(built)
            .arg("--vendors")
            .arg(vendors);
        command
    };
    let mut gpu = Command::new("nvidia-smi");
    gpu.args([
        "--query-gpu=name,driver_version,clocks.sm,clocks.mem",
        "--format=csv",
    ]);
    let mut figures = Command::new("sh");
    figures
        .arg(built.join("measure.sh"))
        .arg(vendors)
        .arg(built);
    let mut guest = Command::new(built.join("gantry-ring-bench"));
    guest.arg(built).env("OCL_ICD_VENDORS", vendors.join(""));
    let kvm = File::options().read(true).write(true).open("/dev/kvm");
    let pictures = built.join("pictures");
    fs::create_dir_all(&pictures)?;
    let seconds = shared.seconds.to_string();
    let mut sharing = xtask(&["sharing", "--policy", &shared.policy, "--seconds", &seconds]);
    sharing.arg("--pictures").arg(&pictures);
    let closed = xtask(&["sharing", "--closed", "--policy", &shared.policy]);
    let part = |command, left_out| Part { command, left_out };
    let nvidia = Path::new("/dev/nvidiactl").exists();
    Ok(vec![
        part(gpu, (!nvidia).then(|| "no device of NVIDIA's".to_owned())),
        part(figures, None),
        part(guest, kvm.err().map(|error| format!("/dev/kvm: {error}"))),
        part(sharing, None),
        part(closed, None),
    ])
}

/// Runs a command and writes its output to the terminal and to the file.
fn tee(command: &mut Command, kept: &mut File) -> Result<()> {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {}", command.get_program().display()))?;
    if let Some(printed) = child.stdout.take() {
        for line in BufReader::new(printed).lines() {
            say(kept, &line?)?;
        }
    }
    let status = child.wait()?;
    ensure!(status.success(), "{status}");
    Ok(())
}

fn say(kept: &mut File, line: &str) -> Result<()> {
    println!("{line}");
    writeln!(kept, "{line}").context("cannot write what was measured")
}

fn absolute(path: &Path) -> Result<PathBuf> {
    fs::canonicalize(path).with_context(|| format!("there is no {}", path.display()))
}

/// Builds everything into one directory.
fn pack() -> Result<PathBuf> {
    let folder = target().join("gpu");
    fs::create_dir_all(folder.join("examples"))?;
    let guest = ring::build()?;
    let release = programs::folder()?;
    let step = Step::new("building the measurements (release)");
    packages::run(cargo().args(["build", "--release", "--quiet", "-p", "xtask"]))?;
    step.finish();
    let built = BUILT.iter().map(|name| (release.join(name), *name));
    let scripts = SCRIPTS.iter().map(|path| {
        let name = path.rsplit('/').next().unwrap_or(path);
        (root().join(path), name)
    });
    for (from, name) in built.chain(scripts) {
        copy(&from, &folder.join(name))?;
    }
    sharing::hashcat::pack(&folder.join("hashcat"))?;
    for entry in fs::read_dir(&guest)? {
        let entry = entry?;
        copy(&entry.path(), &folder.join(entry.file_name()))?;
    }
    Ok(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_part_prints_before_it_fails_is_kept() {
        let path = std::env::temp_dir().join(format!("kept-{}", std::process::id()));
        let mut kept = File::create(&path).unwrap();
        let part = |script| {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            command
        };
        tee(&mut part("echo a figure"), &mut kept).unwrap();
        let error = tee(&mut part("echo another; exit 3"), &mut kept).unwrap_err();
        assert!(error.to_string().contains('3'), "{error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), "a figure\nanother\n");
        fs::remove_file(path).unwrap();
    }
}
