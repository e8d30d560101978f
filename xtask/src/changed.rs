//! Determines what a change can affect: the crates whose unit tests must run, and the scenarios.

use std::{collections::BTreeSet, path::Path, process::Command};

use anyhow::{Context, Result, bail};
use gantry_build::root;

use crate::workspace::{Package, packages};

/// Scenarios that a file can affect: the first row whose prefix matches the file's path. An empty
/// list means none; a file that matches no row can affect all scenarios.
const SCENARIOS: &[(&str, &[&str])] = &[
    ("docs/", &[]),
    ("measurements/", &[]),
    ("fuzz/", &[]),
    ("manual/", &["command line"]),
    ("vmfunc-gate/", &["gate:", "ring-3"]),
    ("gpu-mediator/", &["sharing:"]),
    ("remoting/", REMOTING),
    ("guest/", REMOTING),
    ("devices/accel/src/", REMOTING),
    ("devices/gate/src/", &["gate:"]),
    ("devices/vfio/src/user/", &["vfio-user:"]),
    (
        "devices/vfio/src/",
        &["passthrough:", "iommufd:", "vfio-user:"],
    ),
    ("devices/virtio/src/iommu/", &["IOMMU"]),
    ("devices/virtio/src/vsock/", &["vsock:", "snapshot:"]),
    ("devices/virtio/src/balloon/", &["memory:", "snapshot:"]),
    (
        "devices/virtio/src/mem/",
        &["memory:", "hot-plug:", "snapshot:"],
    ),
    (
        "devices/virtio/src/blk/",
        &["disk:", "hot-plug:", "snapshot:"],
    ),
    ("devices/disk/src/", &["disk:", "hot-plug:", "snapshot:"]),
];

/// A document whose commands a scenario runs, and the word that selects that scenario.
const GUIDE: (&str, &str) = ("docs/user/ten-minutes.md", "commands of the guide");

/// Scenarios affected by everything between an application's call and the host's device.
const REMOTING: &[&str] = &[
    "opencl:",
    "cuda:",
    "accelerator:",
    "native contexts:",
    "sharing:",
    "services:",
    "stream:",
    "ring-3",
    "gate:seats",
];

/// The selected tests.
#[derive(Debug, Eq, PartialEq)]
pub struct Selection {
    /// Crates whose unit tests must run.
    pub crates: BTreeSet<String>,
    /// Words that select scenarios; `None` for all scenarios.
    pub words: Option<Vec<String>>,
}

/// Returns what the difference between a commit and the working tree can affect.
pub fn since(base: &str) -> Result<Selection> {
    let files = files(base)?;
    Ok(Selection {
        crates: dependents(&packages()?, &files),
        words: words(&files),
    })
}

/// Files that differ from a commit, including new files, relative to the root.
fn files(base: &str) -> Result<Vec<String>> {
    let mut files = Vec::new();
    for arguments in [
        &["diff", "--name-only", base, "--"][..],
        &["ls-files", "--others", "--exclude-standard"],
    ] {
        let output = Command::new("git")
            .args(arguments)
            .current_dir(root())
            .output()
            .context("cannot run git")?;
        if !output.status.success() {
            bail!(
                "git cannot compare with {base:?}: {}",
                String::from_utf8_lossy(&output.stderr).trim()
            );
        }
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        files.extend(text.lines().map(str::to_owned));
    }
    Ok(files)
}

/// Words that select what the files can affect; `None` if that is everything.
fn words(files: &[String]) -> Option<Vec<String>> {
    let mut words = BTreeSet::new();
    if files.iter().any(|file| file == GUIDE.0) {
        words.insert(GUIDE.1.to_owned());
    }
    for file in files.iter().filter(|file| !file.ends_with(".md")) {
        let (_, affected) = SCENARIOS
            .iter()
            .find(|(prefix, _)| file.starts_with(prefix))?;
        words.extend(affected.iter().map(ToString::to_string));
    }
    Some(words.into_iter().collect())
}

/// The crates that contain the files, and their direct and indirect users. A file of no crate (a
/// manifest, a lock file) affects all crates.
fn dependents(packages: &[Package], files: &[String]) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for file in files.iter().filter(|file| !file.ends_with(".md")) {
        let within = |package: &&Package| Path::new(file).starts_with(&package.folder);
        let deepest = |package: &&Package| package.folder.components().count();
        match packages.iter().filter(within).max_by_key(deepest) {
            Some(package) => _ = found.insert(package.name.clone()),
            None if ["docs/", "measurements/", "fuzz/"]
                .iter()
                .any(|folder| file.starts_with(folder)) => {}
            None => {
                return packages
                    .iter()
                    .map(|package| package.name.clone())
                    .collect();
            }
        }
    }
    loop {
        let more: Vec<_> = packages
            .iter()
            .filter(|package| !found.contains(&package.name))
            .filter(|package| package.uses.iter().any(|used| found.contains(used)))
            .map(|package| package.name.clone())
            .collect();
        if more.is_empty() {
            return found;
        }
        found.extend(more);
    }
}

#[cfg(test)]
mod tests {
    use gantry_tests::rig;

    use super::*;

    fn list(items: &[&str]) -> Vec<String> {
        items.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_change_selects_the_crates_that_use_it() {
        let package = |name: &str, folder: &str, uses: &[&str]| Package {
            name: name.to_owned(),
            folder: folder.into(),
            uses: list(uses),
        };
        let all = [
            package("gate", "gate", &[]),
            package("rig", "gate/rig", &["gate"]),
            package("devices", "devices", &["gate"]),
            package("vmm", "vmm", &["devices"]),
            package("manual", "manual", &[]),
        ];
        let affected = |files: &[&str]| Vec::from_iter(dependents(&all, &list(files)));
        assert_eq!(affected(&["gate/rig/src/main.rs"]), ["rig"]);
        assert_eq!(
            affected(&["gate/src/lib.rs"]),
            ["devices", "gate", "rig", "vmm"]
        );
        assert_eq!(affected(&["docs/user/gpu.md", "vmm/README.md"]), [""; 0]);
        assert_eq!(affected(&["Cargo.lock"]).len(), all.len());
    }

    #[test]
    fn a_change_selects_the_scenarios_that_it_can_affect_and_all_if_that_is_unknown() {
        assert_eq!(
            words(&list(&["docs/user/gpu.md", "README.md"])),
            Some(vec![])
        );
        assert_eq!(
            words(&list(&[GUIDE.0, "README.md"])),
            Some(list(&[GUIDE.1]))
        );
        let device = list(&["devices/vfio/src/user/wire.rs"]);
        assert_eq!(words(&device), Some(list(&["vfio-user:"])));
        assert_eq!(
            words(&list(&["devices/vfio/src/user/wire.rs", "vmm/src/lib.rs"])),
            None
        );
    }

    #[test]
    fn the_folders_that_select_scenarios_are_there() {
        for (folder, _) in SCENARIOS {
            assert!(root().join(folder).is_dir(), "{folder}");
        }
        assert!(root().join(GUIDE.0).is_file());
        assert_eq!(rig::chosen(&[GUIDE.1.to_owned()]).len(), 1);
    }
}
