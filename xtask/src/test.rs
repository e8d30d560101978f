//! Runs every test with one line of output each, and prints a summary line.

use std::{
    path::Path,
    process::{Command, Stdio},
    sync::{Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use base::Unpoisoned;
use gantry_tests::{
    report::Outcome,
    rig::{Before, Cache, ScenarioResult, images, packages, side_by_side},
};

use crate::{
    again,
    built::Built,
    changed::{self, Selection},
    count::Count,
    described, fuzz, gate, gloop, moved_guest, opencl,
    programs::{self, cargo, root, target},
    progress::Step,
    release, ring, sharing, unit_tests,
};

/// Programs that tests need, and the Debian packages that contain them.
pub const PROGRAMS: &[(&str, &str)] = &[
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("/usr/share/seabios/bios-256k.bin", "seabios"),
    ("qemu-img", "qemu-utils"),
    ("cpio", "cpio"),
    ("iasl", "acpica-tools"),
    ("lz4", "lz4"),
    (images::DRM_DEVICE, "libdrm-tests"),
];

/// Programs that unit tests, the gate and images need.
fn needed() -> Vec<(&'static str, &'static str)> {
    [PROGRAMS, gate::PROGRAMS, release::PROGRAMS].concat()
}

/// Minutes after which a whole run begins no nested scenario. `.ci/run` took 54 minutes on one host with two CPUs, and over 105
/// on another.
const MINUTES: u64 = 70;

/// Options of `cargo xtask test`.
#[derive(Clone, clap::Args)]
pub struct Options {
    /// Only scenarios whose names contain one of these words. `gate:` chooses the gate's
    /// checks; gate:bare, gate:6.1, gate:6.12, gate:linux and gate:seats are their parts.
    words: Vec<String>,
    /// Leave out the nested scenarios.
    #[arg(long, conflicts_with = "words")]
    no_rig: bool,
    /// Only what the difference between this commit and the working tree can affect: the unit tests
    /// of crates that use what was changed, and scenarios by folder.
    #[arg(long, value_name = "COMMIT", conflicts_with_all = ["words", "no_rig"])]
    #[arg(num_args = 0..=1, default_missing_value = "HEAD")]
    changed: Option<String>,
    /// After so many minutes (70 for a whole run), nested scenarios are skipped that have not begun,
    /// and failed tests are not repeated.
    #[arg(long)]
    minutes: Option<u64>,
}

/// Runs the tests. An error means that not all of them passed.
pub fn run(options: &Options) -> Result<()> {
    let start = Instant::now();
    let selection = options.changed.as_deref().map(changed::since).transpose()?;
    packages::install(fuzz::PROGRAMS)?;
    programs::only_test();
    let mut count = Count::default();
    let is_whole = options.words.is_empty() && !options.no_rig && selection.is_none();
    let minutes = options.minutes.or(is_whole.then_some(MINUTES));
    let end = minutes.map(|minutes| start + Duration::from_mins(minutes));
    // Unit tests leave CPUs idle most of the time, and so do linking and the last crates of each
    // build.
    let ahead = is_whole.then(|| Built::ahead(needed()));
    if !is_whole {
        packages::install(&needed())?;
    }
    if options.words.is_empty() {
        count.begin("checks");
        if let Err(error) = checks(&mut count) {
            count.lacks("check: the checks can be run", &error);
        }
        if !is_whole {
            count.begin("models");
            if let Err(error) = models("0", |name, outcome| count.add(name, outcome, None)) {
                count.lacks("check: the models can be run", &error);
            }
        }
        count.begin("unit tests, and building what scenarios need");
        packages::install(&needed())?;
        let ran = unit_tests::run(
            |name| {
                let crates = selection.as_ref().map(|selection| &selection.crates);
                crates.is_none_or(|crates| crates.contains(name))
            },
            |name, outcome| count.add(name, outcome, None),
        );
        if let Err(error) = ran {
            count.lacks("check: the unit tests can be run", &error);
        }
    }
    let words = match selection {
        // Without words, all scenarios would be selected.
        Some(Selection {
            words: Some(words), ..
        }) if words.is_empty() => return count.summary(&options.words),
        Some(Selection { words, .. }) => words.unwrap_or_default(),
        None => options.words.clone(),
    };
    let options = &Options {
        words,
        ..options.clone()
    };
    count.begin("building the rest of what scenarios need");
    let built = ahead.and_then(|ahead| ahead.join().ok());
    let built = built.unwrap_or_else(|| Built::new(&options.words, !options.no_rig));
    let count = Mutex::new(count);
    let ran = gate_and_scenarios(options, is_whole, end, built, &count);
    let mut count = count.into_inner().unwrap_or_else(PoisonError::into_inner);
    if is_whole {
        again::run(&mut count, |name, second| {
            if end.is_some_and(|end| Instant::now() >= end) {
                return Ok(());
            }
            let options = Options {
                words: vec![name],
                no_rig: false,
                changed: None,
                ..options.clone()
            };
            let built = Built::nested(&options.words);
            gate_and_scenarios(&options, false, None, built, second)
        });
    }
    // Also after an early end: the summary names what has failed until then.
    let all_passed = count.summary(&options.words);
    ran.and(all_passed)
}

/// Runs the gate's hosts next to what this machine runs itself, and the nested scenarios until `end`.
fn gate_and_scenarios(
    options: &Options,
    is_whole: bool,
    end: Option<Instant>,
    built: Built,
    count: &Mutex<Count>,
) -> Result<()> {
    let report = |name: &str, outcome: &Outcome| count.lock_unpoisoned().add(name, outcome, None);
    let Built { checks, hosts, rig } = built;
    for (name, outcome) in checks {
        report(&name, &outcome);
    }
    let nothing: Before<'_> = Box::new(|| Ok(()));
    let gate = match options.no_rig || options.words.iter().any(|word| gate::has(word)) {
        true => {
            hosts.run(2, report)?;
            nothing
        }
        // What this machine runs itself leaves CPUs idle most of the time.
        false => Box::new(|| hosts.run(1, report)),
    };
    if options.no_rig {
        return Ok(());
    }
    let before = [gate, Box::new(|| scenarios(&options.words, count))];
    thread::scope(|scope| {
        // Everything from here on waits at times and leaves CPUs idle.
        let models = is_whole.then(|| scope.spawn(|| models("19", report)));
        let result = match rig {
            Some(rig) => rig.run(&options.words, before, end, |result| told(result, count)),
            None => side_by_side(before, |_| Ok(())),
        };
        let models = models.map_or(Ok(Ok(())), thread::ScopedJoinHandle::join);
        result.and(models.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })
}

/// Runs the scenarios that need no nested rig.
fn scenarios(words: &[String], count: &Mutex<Count>) -> Result<()> {
    let report = |name: &str, outcome: &Outcome, seconds| {
        count.lock_unpoisoned().add(name, outcome, Some(seconds));
    };
    let begin = |part| count.lock_unpoisoned().begin(part);
    begin("scenarios of the API's description");
    described::run(words, report)?;
    begin("scenarios of OpenCL");
    opencl::run(words, report)?;
    begin("scenarios of sharing, of the ring and of GLoop, and the first nested ones");
    sharing::run(words, report)?;
    ring::run(words, report)?;
    moved_guest::run(words, report)?;
    gloop::run(words, report)?;
    begin("nested scenarios");
    Ok(())
}

/// Reports a nested scenario.
fn told(result: ScenarioResult, count: &Mutex<Count>) {
    let ScenarioResult {
        name,
        outcome,
        seconds,
        log,
    } = result;
    count.lock_unpoisoned().add(&name, &outcome, Some(seconds));
    if matches!(outcome, Outcome::Failed(_)) {
        for line in log.iter().rev().take(40).rev() {
            println!("    | {line}");
        }
    }
}

/// Checks format, lints, licenses and advisories.
fn checks(count: &mut Count) -> Result<()> {
    let mut fmt = cargo();
    fmt.args(["fmt", "--all", "--check"]);
    count.add("check: source is formatted", &outcome(fmt)?, None);
    let step = Step::new("linting");
    let mut clippy = cargo();
    clippy.args([
        "clippy",
        "--workspace",
        "--all-targets",
        "--quiet",
        "--",
        "-D",
        "warnings",
    ]);
    let result = outcome(clippy)?;
    step.finish();
    count.add("check: clippy has nothing to say", &result, None);
    let step = Step::new("checking the fuzz targets");
    let mut fuzz = cargo();
    // Most of its dependencies are already built from running clippy.
    fuzz.args(["check", "--quiet", "--locked"])
        .args(["--manifest-path", "fuzz/Cargo.toml", "--target-dir"])
        .arg(target());
    let result = outcome(fuzz)?;
    step.finish();
    count.add("check: the fuzz targets compile", &result, None);
    let step = Step::new("linting the gate's programs for bare metal");
    let bare = outcome(gate::lint())?;
    step.finish();
    count.add(
        "check: the gate's programs for bare metal are formatted and clippy has nothing to say",
        &bare,
        None,
    );
    let step = Step::new("linting the guest of the ring's measurement");
    let guest = outcome(ring::lint())?;
    step.finish();
    count.add(
        "check: the ring's guest is formatted and clippy has nothing to say",
        &guest,
        None,
    );
    let deny = deny()?;
    for (what, name) in [
        (
            "licenses",
            "check: licences of all dependencies are allowed",
        ),
        ("bans", "check: no dependency is banned"),
        ("sources", "check: all dependencies come from the registry"),
    ] {
        let mut check = Command::new(&deny);
        check.args(["--offline", "check", what]).current_dir(root());
        count.add(name, &outcome(check)?, None);
        for (of, manifest) in [("bare metal", gate::BARE), ("ring guest", ring::MANIFEST)] {
            let mut check = Command::new(&deny);
            check
                .args(["--offline", "--manifest-path", manifest])
                .args(["check", what])
                .current_dir(root());
            count.add(&format!("{name} ({of})"), &outcome(check)?, None);
        }
    }
    count.add(
        "check: no dependency has a known advisory",
        &advisories(&deny)?,
        None,
    );
    Ok(())
}

/// `cargo-deny`, built once and kept in the cache.
fn deny() -> Result<std::path::PathBuf> {
    let tools = Cache::open()?.dir.join("tools");
    let deny = tools.join("bin/cargo-deny");
    if !deny.exists() {
        let step = Step::new("building cargo-deny (once)");
        let mut install = cargo();
        install
            .args([
                "install",
                "--quiet",
                "--locked",
                "--debug",
                "cargo-deny",
                "--root",
            ])
            .arg(&tools)
            // It is not part of this workspace, and its profile only matters for build time.
            .current_dir(tools.parent().unwrap_or(&tools))
            .env("CARGO_PROFILE_DEV_DEBUG", "false")
            .env("CARGO_TARGET_DIR", tools.join("target"));
        std::fs::create_dir_all(&tools)?;
        packages::run(&mut install).context("cannot build cargo-deny: check the network")?;
        // Only the installed program is needed.
        let _ = std::fs::remove_dir_all(tools.join("target"));
        step.finish();
    }
    Ok(deny)
}

/// Checks advisories. Their database is fetched from a source other than the registry.
fn advisories(deny: &Path) -> Result<Outcome> {
    let step = Step::new("fetching the advisory database");
    let fetched = Command::new("timeout")
        .arg("60")
        .arg(deny)
        .args(["fetch", "db"])
        .current_dir(root())
        .stdin(Stdio::null())
        .output()?;
    step.finish();
    if !fetched.status.success() {
        return Ok(Outcome::Skipped(
            "the RustSec advisory database cannot be reached from here".to_owned(),
        ));
    }
    let mut check = Command::new(deny);
    check
        .args(["--offline", "check", "advisories"])
        .current_dir(root());
    outcome(check)
}

/// The outcome of a command; if it failed, with its output.
fn outcome(mut command: Command) -> Result<Outcome> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot run {}", command.get_program().display()))?;
    if output.status.success() {
        return Ok(Outcome::Passed);
    }
    let text = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    Ok(Outcome::Failed(vec![text]))
}

/// Checks, up to a bound, every interleaving of the rings' two sides and of who sleeps and who
/// rings the doorbell. Uses a separate build, at this nice value.
fn models(nice: &str, mut report: impl FnMut(&str, &Outcome)) -> Result<()> {
    for (package, features, name) in [
        (
            "gantry-remoting",
            "std",
            "check: no interleaving breaks the ring or sleeps through an alarm",
        ),
        (
            "gantry-gloop",
            "",
            "check: no interleaving breaks the rings between a GPU's block and the host",
        ),
    ] {
        let step = Step::new(format!("checking models of {package} (loom)"));
        let mut test = Command::new("nice");
        test.args(["-n", nice])
            .arg(cargo().get_program())
            .current_dir(root());
        test.args(["test", "--quiet", "--release", "--lib", "--package"])
            .args([package, "--no-default-features", "--features", features])
            .arg("model::")
            .env("RUSTFLAGS", "--cfg loom")
            .env("CARGO_TARGET_DIR", target().join("loom"))
            // Options for shipped programs would only cost time here.
            .env("CARGO_PROFILE_RELEASE_LTO", "off")
            .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16");
        let result = outcome(test)?;
        step.finish();
        report(name, &result);
    }
    Ok(())
}
