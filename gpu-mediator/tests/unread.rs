//! Runs the programs while nobody reads their output.

#![allow(clippy::unwrap_used, reason = "tests")]

use manual::{check_scarce, check_unread};

const LINES: [&str; 4] = ["--help", "--version", "man", "completions bash"];

#[test]
fn what_the_programs_say_of_themselves_need_not_be_read() {
    check_unread(env!("CARGO_BIN_EXE_gantry-arbiter"), &LINES);
    check_unread(env!("CARGO_BIN_EXE_gantry-gpu"), &LINES);
    #[cfg(feature = "top")]
    check_unread(env!("CARGO_BIN_EXE_gantry-top"), &LINES);
}

#[test]
fn a_file_too_few_or_too_large_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let at = format!("--socket {}", socket.display());
    let arbiter = env!("CARGO_BIN_EXE_gantry-arbiter");
    check_scarce(arbiter, "--socket /proc/none/socket", Some(&at));
    let gpu = env!("CARGO_BIN_EXE_gantry-gpu");
    check_scarce(
        gpu,
        "serve --model /proc/none/model --socket /proc/none/socket",
        None,
    );
    #[cfg(feature = "top")]
    check_scarce(
        env!("CARGO_BIN_EXE_gantry-top"),
        "--socket /proc/none/socket",
        None,
    );
}

#[cfg(feature = "top")]
#[test]
fn figures_on_a_terminal_need_not_be_read() {
    use std::{
        io::{BufRead, BufReader},
        process::{Command, Stdio},
    };

    let folder = tempfile::tempdir().unwrap();
    let [socket, said] = ["socket", "said"].map(|name| folder.path().join(name));
    let mut arbiter = Command::new(env!("CARGO_BIN_EXE_gantry-arbiter"))
        .arg("--socket")
        .arg(&socket)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let mut begun = BufReader::new(arbiter.stderr.take().unwrap());
    begun.read_line(&mut line).unwrap();
    // The reader ends before anything is drawn, and then after some of it.
    for reader in ["true", "head -c 64"] {
        let line = format!(
            "set -o pipefail; exec 2> '{}'; timeout --foreground 300 '{}' --socket '{}' | {reader} > /dev/null",
            said.display(),
            env!("CARGO_BIN_EXE_gantry-top"),
            socket.display()
        );
        // On a terminal of its own, from which it reads keys.
        let shown = Command::new("script")
            .args(["--quiet", "--return", "--command"])
            .arg(format!("bash -c \"{line}\""))
            .arg("/dev/null")
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let said = std::fs::read_to_string(&said).unwrap();
        assert!(
            shown.status.success() && said.is_empty(),
            "{reader}: {said} {shown:?}"
        );
    }
    arbiter.kill().unwrap();
    arbiter.wait().unwrap();
}
