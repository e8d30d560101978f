//! Everything that SPECIFICATION.md names as upholding a promise exists, and a default run of the tests checks every
//! promise that it can.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::{collections::BTreeSet, fs, path::Path};

/// What a default run of the tests leaves out: the size of the shipped program, and two hosts (`cargo xtask test --all`).
const ONLY_ALL: &[&str] = &["size: ", "migration: between two hosts"];

/// Benchmarks (`cargo xtask bench`): their promises are measured, not asserted.
const BENCHMARKS: &[&str] = &[
    "boot",
    "process",
    "idle",
    "ring",
    "sharing",
    "fairness",
    "migration",
];

/// Fuzz targets (`cargo xtask fuzz`) whose promise has no other test.
const FUZZED: &[&str] = &[
    "virtio_net",
    "remoting_worker",
    "vfio_user",
    "http_request",
    "snapshot_state",
];

/// The names of all unit tests.
fn tests(code: &str) -> BTreeSet<&str> {
    let mut lines = code.lines().map(str::trim);
    let mut names = BTreeSet::new();
    while lines.any(|line| line == "#[test]") {
        let function = lines.find_map(|line| line.strip_prefix("fn "));
        names.extend(function.and_then(|line| line.split('(').next()));
    }
    names
}

fn sources(folder: &Path, text: &mut String) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if path.is_dir() {
            if name != "target" && !name.starts_with('.') {
                sources(&path, text);
            }
        } else if name.ends_with(".rs") && name != "specification.rs" {
            text.push_str(&fs::read_to_string(&path).unwrap());
            text.push('\n');
        }
    }
}

#[test]
fn every_promise_has_what_it_names_and_a_quick_test() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let specification = fs::read_to_string(root.join("SPECIFICATION.md")).unwrap();
    let quick = fs::read_to_string(root.join("xtask/src/quick.rs")).unwrap();
    let mut code = String::new();
    sources(&root, &mut code);
    let tests = tests(&code);
    let mut promises = 0;
    for row in specification.lines().filter(|line| line.starts_with("| ")) {
        let [_, promise, holders, _] = row.split('|').collect::<Vec<_>>()[..] else {
            panic!("not two columns: {row}");
        };
        if promise.trim() == "promise" {
            continue;
        }
        promises += 1;
        let names: Vec<&str> = holders.split('`').skip(1).step_by(2).collect();
        assert!(!names.is_empty(), "nothing holds: {promise}");
        let mut has_quick = false;
        for name in names {
            let is_test = tests.contains(name);
            let is_scenario = name.contains(": ") && code.contains(&format!("\"{name}\""));
            let is_measured = BENCHMARKS.contains(&name) && code.contains(&format!("\"{name}\""));
            let is_fuzzed = root.join(format!("fuzz/targets/{name}.rs")).exists();
            assert!(
                is_test || is_scenario || is_measured || is_fuzzed,
                "there is no {name:?}"
            );
            has_quick |= is_test || is_measured;
            has_quick |= is_fuzzed && FUZZED.contains(&name);
            has_quick |= quick.contains(&format!("\"{name}\""));
            has_quick |= ONLY_ALL.iter().any(|prefix| name.starts_with(prefix));
        }
        assert!(has_quick, "no quick test: {promise}");
    }
    assert!(promises > 15, "{promises} promises were read");
}
