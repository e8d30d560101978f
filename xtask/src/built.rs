//! What a run's scenarios need: the gate's hosts, and programs and images of the nested rig. A whole run installs and
//! builds all of it while its checks and unit tests leave CPUs idle.

use std::{
    collections::BTreeSet,
    fs,
    path::Path,
    thread::{self, JoinHandle},
};

use anyhow::Result;
use gantry_build::{programs, progress::Step, release, target};
use gantry_host_tests::{described, gate, gloop, opencl, ring};
use gantry_tests::{
    report::Outcome,
    rig::{self, Cache, Images, Rig, packages, python},
};

/// Maximum size of the gantry program: 6 MiB.
const MOST_BYTES: u64 = 6 << 20;

/// What was built, and the outcome of checks made while building.
#[derive(Default)]
pub struct Built {
    /// Names and outcomes of checks.
    pub checks: Vec<(String, Outcome)>,
    /// The gate's hosts that run.
    pub hosts: gate::Hosts,
    /// The rig for nested scenarios, if any are selected and the rig could be built.
    pub rig: Option<Rig>,
}

impl Built {
    /// Builds what the selected scenarios need, with or without nested ones. A build that fails counts as a failed
    /// check.
    pub fn new(words: &[String], is_nested: bool) -> Self {
        let mut built = Self::default();
        let checks = &mut built.checks;
        let hosts = gate::prepare(words, |name, outcome| {
            checks.push((name.to_owned(), outcome.clone()));
        });
        match hosts {
            Ok(hosts) => built.hosts = hosts,
            Err(error) => built.lacks("check: the gate's hosts can be built", &error),
        }
        if is_nested {
            built.add_rig(words);
        }
        built
    }

    /// Like [`Built::new`], for nested scenarios only.
    pub fn nested(words: &[String]) -> Self {
        let mut built = Self::default();
        built.add_rig(words);
        built
    }

    /// Builds everything that the selected scenarios need and installs packages, in the background.
    pub fn ahead(needed: Packages, words: Vec<String>) -> JoinHandle<Self> {
        thread::spawn(move || {
            let is_all = words.is_empty();
            let fetched = thread::spawn(move || fetch(needed, is_all));
            // A failure recurs below, where it is reported.
            let _ = programs::build();
            // Not at the same time as what follows: both fill the cache.
            let _ = fetched.join();
            Self::new(&words, true)
        })
    }

    fn add_rig(&mut self, words: &[String]) {
        // All words may name scenarios of this machine, which need no rig.
        if rig::chosen(words).is_empty() {
            return;
        }
        match self.nested_rig(words) {
            Ok(rig) => self.rig = Some(rig),
            Err(error) => self.lacks("check: what nested scenarios need can be built", &error),
        }
    }

    fn nested_rig(&mut self, words: &[String]) -> Result<Rig> {
        let binaries = programs::build()?;
        if words.is_empty() {
            let gantry = &binaries.gantry;
            for (name, outcome) in [
                ("size: gantry is at most 6 MiB", small_enough(gantry)?),
                (
                    "release: an address in gantry has a function and a line where the file beside it is",
                    release::names_lines(gantry)?,
                ),
            ] {
                self.checks.push((name.to_owned(), outcome));
            }
        }
        let step = Step::new("fetching Debian's kernel and building images");
        let work = target().join("rig");
        let cache = Cache::open()?;
        let mut images = Images::build(&cache, &binaries, &work)?;
        let chosen = rig::chosen(words);
        let others: BTreeSet<_> = chosen
            .iter()
            .filter_map(|one| one.board.other_kernel())
            .collect();
        for other in others {
            images.add(other, &cache, &binaries)?;
        }
        step.finish();
        Ok(Rig {
            images,
            logs: target().join("rig-logs"),
        })
    }

    /// Records something that could not be built.
    fn lacks(&mut self, name: &str, error: &anyhow::Error) {
        let chain = error.chain().map(ToString::to_string).collect();
        self.checks.push((name.to_owned(), Outcome::Failed(chain)));
    }
}

/// Programs, and the Debian packages that contain them.
type Packages = Vec<(&'static str, &'static str)>;

/// Installs these packages and those that scenarios need, and meanwhile fetches what else all of them need, which mostly
/// means waiting. A failure recurs where the result is needed, and is reported there.
fn fetch(mut needed: Packages, is_all: bool) {
    for packages in [
        opencl::PROGRAMS,
        opencl::MOVED,
        gloop::PROGRAMS,
        ring::PROGRAMS,
        python::PROGRAMS,
        rig::opencl::NEEDED,
        rig::packages::FOR_MODULES,
    ] {
        needed.extend(packages);
    }
    let _ = packages::install(&needed);
    if !is_all {
        return;
    }
    let _ = described::library();
    let _ = Cache::open().and_then(|cache| rig::nvrtc::folder(&cache));
}

/// Whether a release program is no larger than gantry may be.
fn small_enough(program: &Path) -> Result<Outcome> {
    let bytes = fs::metadata(program)?.len();
    if bytes <= MOST_BYTES {
        return Ok(Outcome::Passed);
    }
    Ok(Outcome::Failed(vec![format!(
        "{} has {bytes} bytes, {MOST_BYTES} are allowed: `nm --size-sort` of a build with \
         CARGO_PROFILE_RELEASE_STRIP=none tells what they are",
        program.display()
    )]))
}
