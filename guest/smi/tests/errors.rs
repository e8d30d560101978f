//! What is reported if there is no device to show, and how it can be fixed.
#![allow(clippy::unwrap_used)]

use std::{
    os::unix::fs::symlink,
    path::Path,
    process::{Command, Output},
};

fn smi(libraries: &Path, cuda: &str, options: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_gantry-smi"))
        .arg("--libraries")
        .arg(libraries)
        .args(options)
        .env("GANTRY_CUDA", cuda)
        .output()
        .unwrap()
}

#[test]
fn who_has_no_devices_is_told_what_to_start_or_to_install() {
    let folder = tempfile::TempDir::new().unwrap();
    let said = |cuda: &str, options: &[&str]| {
        let said = smi(folder.path(), cuda, options);
        assert!(said.stdout.is_empty(), "{said:?}");
        let text = String::from_utf8(said.stderr).unwrap();
        (said.status.code().unwrap(), text)
    };
    let (status, text) = said("off", &[]);
    assert_eq!(status, 9);
    assert!(
        text.contains("libcuda.so.1") && text.contains("--libraries"),
        "{text}"
    );
    let driver = std::env::current_exe().unwrap();
    let driver = driver.with_file_name("libgantry_cuda.so");
    symlink(driver, folder.path().join("libcuda.so.1")).unwrap();
    let socket = folder.path().join("cuda.sock");
    let socket = socket.to_str().unwrap();
    let (status, text) = said(socket, &["-L"]);
    assert_eq!(status, 9);
    assert!(
        text.contains("start gantry-agent")
            && text.contains(&format!("gantry-accel serve --api cuda --socket {socket}")),
        "{text}"
    );
    // A server that is not listening.
    drop(std::os::unix::net::UnixListener::bind(socket).unwrap());
    let (status, text) = said(socket, &[]);
    assert_eq!(status, 9);
    assert!(text.contains("gantry-accel probe --api cuda"), "{text}");
    let (status, text) = said("off", &[]);
    assert_eq!(status, 9);
    assert!(text.contains("GANTRY_CUDA is off"), "{text}");
}

#[test]
fn a_field_that_there_is_not_is_refused_and_those_that_there_are_named() {
    let folder = tempfile::TempDir::new().unwrap();
    let options = ["--query-gpu=name,serial", "--format=csv"];
    let refused = smi(folder.path(), "off", &options);
    let text = String::from_utf8(refused.stderr).unwrap();
    assert_eq!(refused.status.code(), Some(2));
    assert!(
        text.contains("serial") && text.contains("memory.free"),
        "{text}"
    );
}

#[test]
fn what_the_program_says_of_itself_need_not_be_read() {
    let program = env!("CARGO_BIN_EXE_gantry-smi");
    let lines = ["--help", "--version", "man", "completions bash"];
    manual::check_unread(program, &lines);
}

#[test]
fn a_file_that_is_too_large_is_an_error() {
    let program = env!("CARGO_BIN_EXE_gantry-smi");
    manual::check_scarce(program, "--libraries /proc/none", None);
}
