//! The steps by which an application moves are taken in one place.
//!
//! `remoting_relocation` has their order. Whoever sends a worker the command of a step without it has an order of its own.
//! Those that do are listed here. Another one fails the test, and so does a listed one that is gone.

use std::{fs, path::Path, process::Command};

use anyhow::{Context, Result, ensure};

/// The commands of the steps that a source takes.
const STEPS: [&str; 3] = ["Command::Precopy(", "Command::SaveRest(", "Command::Leave("];

/// The files that name them, and why.
const FILES: [(&str, &str); 4] = [
    (
        "devices/accel/src/rounds.rs",
        "the applications of a machine are copied together, between rounds of its memory",
    ),
    (
        "devices/accel/src/saved.rs",
        "the applications of a machine stop together",
    ),
    ("remoting/pool/src/standby.rs", "a worker takes them"),
    (
        "remoting/transport/src/worker_control.rs",
        "the ports of a move",
    ),
];

/// Whether a file's text, without its comments and the tests at its end, names a step.
fn names_step(text: &str) -> bool {
    let end = text.find("#[cfg(test)]\n").unwrap_or(text.len());
    let mut lines = text[..end].lines();
    lines.any(|line| {
        let code = line.split("//").next().unwrap_or_default();
        STEPS.iter().any(|step| code.contains(step))
    })
}

#[test]
fn steps_of_a_move_are_named_by_the_sequencers_ports_and_by_few_others() -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let list = Command::new("git")
        .args(["ls-files", "devices/accel", "guest", "remoting", "vmm"])
        .current_dir(&root)
        .output()?;
    let list = String::from_utf8(list.stdout)?;
    let is_product = |path: &&str| path.ends_with(".rs") && !path.contains("test");
    let mut found = Vec::new();
    for path in list.lines().filter(is_product) {
        let text = fs::read_to_string(root.join(path)).context("a file of the repository")?;
        if names_step(&text) {
            found.push(path);
        }
    }
    let listed = FILES.map(|(path, _)| path);
    ensure!(
        found == listed,
        "take the steps of a move by remoting_relocation: {found:#?} name them, and {listed:#?} may"
    );
    Ok(())
}
