//! The crates that a package's programs consist of, in the format of CycloneDX 1.5.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use anyhow::{Context, Result, ensure};
use gantry_build::cargo;
use gantry_tests::rig::packages;
use serde_json::{Value, json};

use super::version::Version;

/// The list of the crates that these crates of the workspace and their dependencies are: those that are linked, and
/// those that run while they are built. Cargo's features are those of the whole workspace, so optional crates may be
/// among them that one program does not contain.
///
/// # Errors
/// Cargo does not know one of them.
pub fn of(sources: &Path, package: &str, crates: &[&str], version: &Version) -> Result<String> {
    let text = packages::output(
        cargo()
            .current_dir(sources)
            .args(["metadata", "--locked", "--format-version", "1"])
            .args(["--filter-platform", "x86_64-unknown-linux-gnu"]),
    )?;
    let metadata: Value = serde_json::from_str(&text).context("cargo metadata")?;
    let list = listed(&metadata, package, crates, version)?;
    Ok(serde_json::to_string_pretty(&list)? + "\n")
}

fn listed(metadata: &Value, package: &str, crates: &[&str], version: &Version) -> Result<Value> {
    fn list<'a>(value: &'a Value, key: &str) -> impl Iterator<Item = &'a Value> {
        value[key].as_array().into_iter().flatten()
    }
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let known: BTreeMap<_, _> = list(metadata, "packages")
        .map(|package| (text(&package["id"]), package))
        .collect();
    let nodes: BTreeMap<_, _> = list(&metadata["resolve"], "nodes")
        .map(|node| (text(&node["id"]), node))
        .collect();
    let is_asked = |package: &Value| crates.iter().any(|name| package["name"] == *name);
    let mut left: Vec<_> = known
        .iter()
        .filter(|(_, package)| package["source"].is_null() && is_asked(package))
        .map(|(id, _)| id.clone())
        .collect();
    ensure!(
        left.len() == crates.iter().collect::<BTreeSet<_>>().len(),
        "Cargo does not know all of {crates:?}"
    );
    let mut found = BTreeSet::new();
    while let Some(id) = left.pop() {
        if !found.insert(id.clone()) {
            continue;
        }
        let node = nodes
            .get(&id)
            .with_context(|| format!("no dependencies of {id}"))?;
        for dependency in list(node, "deps") {
            let is_test = list(dependency, "dep_kinds").all(|kind| kind["kind"] == "dev");
            if !is_test {
                left.push(text(&dependency["pkg"]));
            }
        }
    }
    let mut components: Vec<_> = found
        .iter()
        .filter_map(|id| known.get(id))
        .map(|package| {
            let (name, version) = (text(&package["name"]), text(&package["version"]));
            let named = format!("{name}@{version}");
            let mut component = json!({
                "type": "library",
                "bom-ref": named,
                "name": name,
                "version": version,
                // Some crates write the operator as in old manifests.
                "licenses": [{"expression": text(&package["license"]).replace('/', " OR ")}],
            });
            // The workspace's own crates are not those of the same names in Cargo's registry.
            if !package["source"].is_null() {
                component["purl"] = format!("pkg:cargo/{named}").into();
            }
            component
        })
        .collect();
    components.sort_by_key(|one| text(&one["bom-ref"]));
    Ok(json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "component": {"type": "application", "name": package, "version": version.package},
        },
        "components": components,
    }))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use gantry_build::root;

    #[test]
    fn linked_crates_are_listed_with_their_licences_and_those_of_tests_are_not() {
        let version = Version::of_commit(&root()).unwrap();
        let text = of(&root(), "gantry", &["vmm", "gantry-tunnel"], &version).unwrap();
        let list: Value = serde_json::from_str(&text).unwrap();
        let components = list["components"].as_array().unwrap();
        let names: Vec<_> = components
            .iter()
            .filter_map(|one| one["name"].as_str())
            .collect();
        for name in ["kvm-ioctls", "rustls", "vmm-migration", "libc"] {
            assert!(names.contains(&name), "{name} is missing");
        }
        for name in ["proptest", "tempfile", "remoting-cuda"] {
            assert!(!names.contains(&name), "{name} is not linked");
        }
        for one in components {
            let licence = one["licenses"][0]["expression"].as_str().unwrap();
            assert!(!licence.is_empty(), "{one}");
        }
        let purl = |name: &str| {
            let mut of = components.iter().filter(|one| one["name"] == name);
            of.next().unwrap()["purl"].as_str()
        };
        assert!(purl("libc").unwrap().starts_with("pkg:cargo/libc@0."));
        // There is a crate `base` of somebody else.
        assert_eq!(purl("base"), None);
        assert!(of(&root(), "gantry", &["vmm", "no-such-crate"], &version).is_err());
    }
}
