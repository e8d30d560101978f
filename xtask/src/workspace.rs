//! The workspace's crates, as Cargo knows them.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use gantry_build::{cargo, root};
use serde_json::Value;

/// A crate of the workspace.
#[derive(Debug)]
pub struct Package {
    /// Its name.
    pub name: String,
    /// Relative to the root.
    pub folder: PathBuf,
    /// Workspace crates that it or its tests use.
    pub uses: Vec<String>,
}

/// All crates of the workspace.
///
/// # Errors
/// Cargo cannot be run.
pub fn packages() -> Result<Vec<Package>> {
    let metadata = cargo()
        .args(["metadata", "--no-deps", "--format-version", "1"])
        .output()?;
    let metadata = serde_json::from_slice(&metadata.stdout).context("cargo metadata")?;
    Ok(parsed(&metadata, &root()))
}

fn parsed(metadata: &Value, root: &Path) -> Vec<Package> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    list(&metadata["packages"])
        .iter()
        .map(|package| {
            let manifest = PathBuf::from(text(&package["manifest_path"]));
            let folder = manifest.parent().unwrap_or(root);
            let uses = list(&package["dependencies"]);
            let uses = uses.iter().filter(|one| one["path"].is_string());
            Package {
                name: text(&package["name"]),
                folder: folder.strip_prefix(root).unwrap_or(folder).to_owned(),
                uses: uses.map(|one| text(&one["name"])).collect(),
            }
        })
        .collect()
}

/// Names of the crates that have tests.
///
/// # Errors
/// Cargo cannot be run, or a source file cannot be read.
pub fn tested() -> Result<Vec<String>> {
    let mut names = Vec::new();
    for package in packages()? {
        if has_tests(&root().join(&package.folder))? {
            names.push(package.name);
        }
    }
    Ok(names)
}

/// Whether a test is in the sources of a crate, without those of crates in its folder.
fn has_tests(folder: &Path) -> Result<bool> {
    for entry in fs::read_dir(folder).with_context(|| format!("no folder {}", folder.display()))? {
        let path = entry?.path();
        let found = if path.is_dir() {
            path.file_name().is_some_and(|name| name != "target")
                && !path.join("Cargo.toml").exists()
                && has_tests(&path)?
        } else {
            path.extension().is_some_and(|end| end == "rs")
                && fs::read_to_string(&path)?.contains("#[test]")
        };
        if found {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crates_with_tests_are_found_and_those_in_their_folders_are_not_theirs() {
        let tested = tested().unwrap();
        let has = |name: &str| tested.iter().any(|one| one == name);
        assert!(has("xtask") && has("pci") && has("vmm"), "{tested:?}");
        // It consists of other crates.
        assert!(!has("devices"), "{tested:?}");
    }
}
