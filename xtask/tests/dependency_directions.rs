//! The direction of dependencies among the workspace's crates.
//!
//! A crate may use crates of its own directory and of directories below it: see `docs/dev/architecture.md`. Existing
//! exceptions are listed here with their reasons. Any other dependency fails the test, and so does a listed one that no
//! longer exists: the list is what remains to be done.

use std::{collections::BTreeSet, path::Path, process::Command};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// Directories of crates, from top to bottom.
const FOLDERS: &[&str] = &[
    // Starts, tests and measures everything else.
    "xtask",
    "tests",
    // The machine.
    "vmm",
    "devices",
    // Metrics of machines, pools and arbiters.
    "exporter",
    // Parts of devices for containers.
    "kube",
    "gpu-mediator",
    "gf100",
    // The client side of devices that other processes serve.
    "vfio-client",
    "vmfunc-gate",
    // Accelerators: drivers in a guest use the messages to a worker, and their transport.
    "guest",
    // Kernels that take turns like workers do.
    "gloop",
    "remoting",
    // Code that knows nothing about devices.
    "arch",
    "hypervisor",
    // TLS for migrations, in a separate process.
    "tunnel",
    // Help of command lines, and manual pages.
    "manual",
    "base",
];

/// Directories whose crates use no workspace crates outside these directories.
const LEAVES: &[(&str, &[&str])] = &[
    ("gf100", &["manual", "base"]),
    ("manual", &[]),
    ("base", &[]),
];

/// Existing upward dependencies: the user, the used crate, and the reason.
const VIOLATIONS: &[(&str, &str, &str)] = &[
    (
        "vfio",
        "gantry-tests",
        "tests of VFIO devices drive the edu device of the rigs; it becomes a test double of its own",
    ),
    (
        "gpu",
        "gantry-tests",
        "the recorder's test reads what it wrote by the recording's format, which is in the rigs",
    ),
    (
        "gantry-client",
        "vmfunc-gate",
        "a client of a gate calls through the gate's user library, which becomes a leaf below remoting",
    ),
    (
        "remoting-pool",
        "gantry-cuda",
        "the CUDA backend's tests call it by the guest's driver; they move to that driver's crate",
    ),
    (
        "remoting-pool",
        "gantry-cuda-driver",
        "the same tests serve the stand-in driver",
    ),
    (
        "remoting-pool",
        "gantry-malloc",
        "and preload the guest's allocator",
    ),
    (
        "remoting-pool",
        "gantry-cublas",
        "the same tests call the guest's cuBLAS",
    ),
    ("remoting-pool", "gantry-cudart", "and the guest's runtime"),
    (
        "remoting-pool",
        "gantry-nvml",
        "and ask the guest's management library",
    ),
    ("remoting-pool", "gantry-smi", "and show what its users see"),
    (
        "remoting-pool",
        "gantry-cuda-blas",
        "and serve the stand-in for the host's",
    ),
    (
        "remoting-pool",
        "vmfunc-gate",
        "a server behind a gate is one by the gate's user library, as above",
    ),
];

/// What serves applications: no driver or agent in a guest uses it.
const WORKERS: &[&str] = &[
    "remoting-cuda",
    "remoting-opencl",
    "remoting-pool",
    "remoting-session",
];

/// The crates of remoting that know of each other, from top to bottom. Those of one row know nothing of each other.
const REMOTING: &[&[&str]] = &[
    &["remoting-pool"],
    &["remoting-cuda", "remoting-opencl"],
    &["remoting-session"],
    &["remoting-stream", "remoting-turns"],
    &["remoting-transport"],
    &["remoting-proto", "remoting-relocation"],
    &["cuda-definition"],
];

/// A crate of the workspace.
struct Crate {
    name: String,
    /// The first directory of its path.
    folder: String,
    /// Its dependencies, including those for tests only.
    dependencies: Vec<Dependency>,
}

struct Dependency {
    name: String,
    tests_only: bool,
}

fn text(value: &Value) -> Result<&str> {
    value
        .as_str()
        .with_context(|| format!("not a text: {value}"))
}

fn list(value: &Value) -> Result<&[Value]> {
    let list = value.as_array().map(Vec::as_slice);
    list.with_context(|| format!("not a list: {value}"))
}

fn dependency(value: &Value) -> Result<Dependency> {
    Ok(Dependency {
        name: text(&value["name"])?.to_owned(),
        tests_only: value["kind"] == "dev",
    })
}

/// All crates of the workspace.
fn crates() -> Result<Vec<Crate>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent();
    let root = root.context("xtask has no parent")?;
    let said = Command::new(env!("CARGO"))
        .args([
            "metadata",
            "--no-deps",
            "--format-version",
            "1",
            "--offline",
        ])
        .current_dir(root)
        .output()?;
    ensure!(
        said.status.success(),
        "{}",
        String::from_utf8_lossy(&said.stderr)
    );
    let metadata: Value = serde_json::from_slice(&said.stdout)?;
    (list(&metadata["packages"])?.iter())
        .map(|package| {
            let manifest = Path::new(text(&package["manifest_path"])?);
            let folder = manifest.strip_prefix(root)?.components().next();
            let folder = folder.context("a manifest without a folder")?;
            Ok(Crate {
                name: text(&package["name"])?.to_owned(),
                folder: folder.as_os_str().to_string_lossy().into_owned(),
                dependencies: (list(&package["dependencies"])?.iter())
                    .map(dependency)
                    .collect::<Result<_>>()?,
            })
        })
        .collect()
}

/// How far from the top a directory is.
fn depth(folder: &str) -> Result<usize> {
    (FOLDERS.iter().position(|known| *known == folder))
        .with_context(|| format!("{folder}/ has no place among FOLDERS in {}", file!()))
}

/// Whether a crate in one directory may use a crate in another.
fn may_use(user: &str, used: &str) -> Result<bool> {
    if user == used {
        return Ok(true);
    }
    match LEAVES.iter().find(|(leaf, _)| *leaf == user) {
        Some((_, uses)) => Ok(uses.contains(&used)),
        None => Ok(depth(user)? < depth(used)?),
    }
}

#[test]
fn crates_use_what_is_below_them_but_for_the_violations_that_are_listed() -> Result<()> {
    let crates = crates()?;
    let mut found = BTreeSet::new();
    for user in &crates {
        depth(&user.folder)?;
        for dependency in &user.dependencies {
            let used = crates.iter().find(|known| known.name == dependency.name);
            if let Some(used) = used
                && !may_use(&user.folder, &used.folder)?
            {
                found.insert((user.name.as_str(), used.name.as_str()));
            }
        }
    }
    let listed: BTreeSet<_> = (VIOLATIONS.iter())
        .map(|(user, used, _)| (*user, *used))
        .collect();
    let new: Vec<_> = found.difference(&listed).collect();
    ensure!(
        new.is_empty(),
        "dependencies that point upwards (user, used): {new:?}; use something below, or move it there"
    );
    let gone: Vec<_> = listed.difference(&found).collect();
    ensure!(
        gone.is_empty(),
        "take these out of VIOLATIONS, they are gone: {gone:?}"
    );
    Ok(())
}

#[test]
fn what_is_installed_in_a_guest_has_no_worker_linked_into_it() -> Result<()> {
    let crates = crates()?;
    let guests = crates.iter().filter(|user| user.folder == "guest");
    let mut checked = 0;
    for user in guests {
        let own = |dependency: &&Dependency| !dependency.tests_only;
        for dependency in user.dependencies.iter().filter(own) {
            checked += usize::from(dependency.name == "remoting-transport");
            let name = dependency.name.as_str();
            ensure!(!WORKERS.contains(&name), "{} has {name}", user.name);
        }
    }
    ensure!(
        checked > 0,
        "no crate in guest/ uses remoting-transport: is it named otherwise now?"
    );
    Ok(())
}

#[test]
fn sessions_know_no_api_and_no_backend_knows_another() -> Result<()> {
    let row = |name: &str| REMOTING.iter().position(|row| row.contains(&name));
    let crates = crates()?;
    let mut checked = 0;
    for user in &crates {
        let Some(at) = row(&user.name) else { continue };
        for dependency in user.dependencies.iter().filter(|one| !one.tests_only) {
            if let Some(used) = row(&dependency.name) {
                checked += 1;
                let below = at < used;
                ensure!(below, "{} uses {}", user.name, dependency.name);
            }
        }
    }
    ensure!(checked > 10, "only {checked} dependencies were looked at");
    Ok(())
}

#[test]
fn the_rule_tells_below_from_above() -> Result<()> {
    assert!(may_use("vmm", "base")? && may_use("guest", "remoting")?);
    assert!(
        may_use("guest", "guest")?,
        "a folder's crates use each other"
    );
    assert!(!may_use("remoting", "guest")? && !may_use("base", "manual")?);
    assert!(may_use("gf100", "base")? && !may_use("gf100", "remoting")?);
    assert!(may_use("a new folder", "base").is_err());
    Ok(())
}
