//! Runs hashcat next to an application that always has kernels ready. hashcat is a third-party program that waits for
//! its results and reports how much it has done.

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{ChildStdout, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use gantry_build::copy;
use gantry_host_tests::shared_device::{Load, Machine, Process, Programs};
use gantry_tests::rig::packages;
use gpu_mediator::status::Client;
use serde_json::Value;

/// Debian's program, and its files in addition to its data.
const INSTALLED: &str = "/usr/bin/hashcat";
/// Its Debian package.
pub const PACKAGES: &[(&str, &str)] = &[(INSTALLED, "hashcat")];
const DATA: &str = "/usr/share/hashcat";
const MODULES: &str = "/usr/lib/hashcat/modules";
/// Kernels for MD5 of all passwords of a length, their includes, and what hashcat requires at start-up.
const KERNELS: &[&str] = &[
    "inc_",
    "amp_",
    "markov_",
    "shared.cl",
    "m00000_",
    "m00400-pure.cl",
];
/// The application has weight 1, and hashcat 3.
pub const WEIGHTS: [u32; 2] = [1, 3];

/// Finds hashcat next to what was built elsewhere, or installed.
pub fn find(built: &Path) -> Option<PathBuf> {
    let packed = built.join("hashcat/hashcat");
    let places = [packed, PathBuf::from(INSTALLED)];
    places.into_iter().find(|place| place.exists())
}

/// Copies what it needs for one kind of hash: 7 MB of 110.
pub fn pack(folder: &Path) -> Result<()> {
    packages::install(PACKAGES)?;
    for name in ["OpenCL", "modules", "tunings", "libraries"] {
        fs::create_dir_all(folder.join(name))?;
    }
    copy(Path::new(INSTALLED), &folder.join("hashcat"))?;
    for name in ["hashcat.hcstat2", "tunings"] {
        let from = Path::new(DATA).join(name);
        match fs::read_dir(&from) {
            Ok(entries) => copy_all(entries, &folder.join(name), |_| true)?,
            Err(_) => copy(&from, &folder.join(name))?,
        }
    }
    let kernels = fs::read_dir(Path::new(DATA).join("OpenCL"))?;
    let wanted = |name: &str| KERNELS.iter().any(|kernel| name.starts_with(kernel));
    copy_all(kernels, &folder.join("OpenCL"), wanted)?;
    let module = "module_00000.so";
    copy(
        &Path::new(MODULES).join(module),
        &folder.join("modules").join(module),
    )?;
    let libraries = packages::output(Command::new("ldd").arg(INSTALLED))?;
    for line in libraries.lines() {
        let Some((name, path)) = line.split_once(" => ") else {
            continue;
        };
        let (name, path) = (name.trim(), path.split(' ').next().unwrap_or_default());
        // The C library is that of the other machine.
        if ["libminizip", "libxxhash", "libz."]
            .iter()
            .any(|one| name.starts_with(one))
        {
            copy(Path::new(path), &folder.join("libraries").join(name))?;
        }
    }
    Ok(())
}

fn copy_all(entries: fs::ReadDir, to: &Path, wanted: impl Fn(&str) -> bool) -> Result<()> {
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name();
        if wanted(&name.to_string_lossy()) {
            copy(&entry.path(), &to.join(name))?;
        }
    }
    Ok(())
}

/// Adds the arguments that every call has here: it searches for MD5 hashes by trying all passwords, with OpenCL, and
/// stores nothing.
pub fn prepare(command: &mut Command, program: &Path) -> Result<()> {
    command
        .args([
            "-m",
            "0",
            "-a",
            "3",
            "--force",
            "--quiet",
            "--backend-ignore-cuda",
        ])
        .args([
            "--potfile-disable",
            "--restore-disable",
            "--logfile-disable",
        ])
        .env_remove("OCL_ICD_FILENAMES")
        .stdin(Stdio::null())
        .stderr(Stdio::inherit());
    if let Some(libraries) = program.parent().map(|folder| folder.join("libraries"))
        && libraries.is_dir()
    {
        let others = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
        let all = std::iter::once(libraries).chain(std::env::split_paths(&others));
        command.env("LD_LIBRARY_PATH", std::env::join_paths(all)?);
    }
    Ok(())
}

/// A running hashcat.
struct Hashcat {
    _process: Process,
    output: BufReader<ChildStdout>,
}

impl Hashcat {
    /// Starts hashcat and waits until it has tried passwords.
    fn start(program: &Path, environment: impl Fn(&mut Command)) -> Result<Self> {
        let mut command = Command::new(program);
        prepare(&mut command, program)?;
        command
            .args(["--status", "--status-json", "--status-timer", "1"])
            // A hash whose password is not found within the time of a benchmark.
            .args(["0123456789abcdef0123456789abcdef", "?b?b?b?b?b?b?b"])
            .stdout(Stdio::piped());
        environment(&mut command);
        let mut child = command.spawn().context("cannot start hashcat")?;
        let output = child.stdout.take().context("no output")?;
        let mut hashcat = Self {
            output: BufReader::new(output),
            _process: Process(child),
        };
        while hashcat.tried()?.1 == 0.0 {}
        Ok(hashcat)
    }

    /// Returns how many passwords it has tried so far, which it reports every second.
    fn tried(&mut self) -> Result<(Instant, f64)> {
        let mut said = String::new();
        loop {
            let mut line = String::new();
            let bytes = self.output.read_line(&mut line)?;
            ensure!(bytes > 0, "hashcat has ended, and said: {}", said.trim());
            // There are warnings in between.
            let status: Option<Value> = serde_json::from_str(&line).ok();
            match status.and_then(|status| status["progress"][0].as_f64()) {
                Some(tried) => return Ok((Instant::now(), tried)),
                None => said += &line,
            }
        }
    }

    /// Measures how many passwords per second it tries, over this many seconds.
    fn rate(&mut self, seconds: u64) -> Result<f64> {
        let (begun, first) = self.tried()?;
        loop {
            let (now, last) = self.tried()?;
            let time = now.duration_since(begun);
            if time >= Duration::from_secs(seconds) {
                return Ok((last - first) / time.as_secs_f64());
            }
        }
    }
}

/// Measures its native rate when it runs alone.
pub fn alone(programs: Programs, hashcat: &Path, seconds: u64) -> Result<f64> {
    let native = |command: &mut Command| {
        command.env("OCL_ICD_VENDORS", programs.vendors.join(""));
        // One device, as in a pool.
        command.args(["-d", "1"]);
    };
    Hashcat::start(hashcat, native)?.rate(seconds)
}

/// Results of both.
pub struct Shared {
    /// hashcat's rate relative to when it runs alone.
    pub hashcat: f64,
    /// Fraction of the time that the other application's kernels take by themselves.
    pub hog: f64,
    /// Their shares of the time according to the arbiter: the other application's and hashcat's.
    pub had: [f64; 2],
}

/// Runs hashcat next to an application that always has such kernels ready.
pub fn measure(
    programs: Programs,
    policy: &str,
    seconds: u64,
    (hashcat, rate_alone): (&Path, f64),
    hog: &Load,
    iteration: Option<f64>,
) -> Result<Shared> {
    let mut machine = Machine::start(programs, &["--policy", policy], &WEIGHTS)?;
    machine.iteration = iteration;
    let mut hog = machine.run(0, hog, 0)?;
    let mut hashcat = Hashcat::start(hashcat, |command| machine.environment(1, command))?;
    hog.go()?;
    thread::sleep(Duration::from_secs(1));
    let (before, begun) = (machine.clients()?, Instant::now());
    let rate = hashcat.rate(seconds)?;
    let (after, took) = (machine.clients()?, begun.elapsed().as_secs_f64());
    let line = hog.end()?;
    let numbers: Vec<f64> = line
        .split(' ')
        .filter_map(|word| word.parse().ok())
        .collect();
    let [_, of, own, ..] = numbers[..] else {
        bail!("an application said {line:?}");
    };
    let had = [0, 1].map(|client| {
        let time = |clients: &BTreeMap<usize, Client>| {
            clients.get(&client).map_or(0, |client| client.device_time)
        };
        time(&after).saturating_sub(time(&before)) as f64 / 1e9 / took
    });
    Ok(Shared {
        hashcat: rate / rate_alone,
        hog: own / of,
        had,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Prints what hashcat reports on the hash of its test, without a device.
    #[test]
    #[ignore = "installs Debian's package: cargo test -p gantry-bench hashcat -- --ignored"]
    fn what_is_packed_of_hashcat_starts_by_itself() {
        let folder = std::env::temp_dir().join(format!("packed-hashcat-{}", std::process::id()));
        pack(&folder).unwrap();
        let mut command = Command::new(folder.join("hashcat"));
        command.env("LD_LIBRARY_PATH", folder.join("libraries"));
        let said = packages::output(command.args(["-m", "0", "--example-hashes"])).unwrap();
        assert!(said.contains("MD5"), "{said}");
        fs::remove_dir_all(folder).unwrap();
    }
}
