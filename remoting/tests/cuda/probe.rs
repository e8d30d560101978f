//! `gantry-accel probe`: the stand-in works as workers are confined, and where it does not, the part of the
//! confinement is named.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use crate::library::beside;

const ACCEL: &str = env!("CARGO_BIN_EXE_gantry-accel");

/// A driver that says something where its worker talks with the pool, and has nothing of what is asked for.
const LOUD: &str = r#"
#include <unistd.h>
__attribute__((constructor)) static void loud(void) {
    if (write(1, "there is no licence\n", 20) < 0) _exit(9);
}
"#;

fn probe(readable: bool) -> Output {
    let driver = beside("libgantry_cuda_driver.so");
    let folder = driver.parent().expect("it is in a folder");
    let mut command = Command::new(ACCEL);
    command
        .args(["probe", "--api", "cuda", "--heap", "262144", "--cache"])
        .arg(std::env::temp_dir())
        .arg("--library")
        .arg(&driver)
        // The loader's variables are readable, too, and Cargo's name this folder.
        .env_remove("LD_LIBRARY_PATH");
    if readable {
        command.arg("--readable").arg(folder);
    }
    command.output().expect("it runs")
}

#[test]
fn a_driver_is_tried_as_a_worker_would_use_it() {
    let tried = probe(true);
    let text = String::from_utf8_lossy(&tried.stdout);
    assert!(tried.status.success(), "{text}");
    for step in [
        "device: 1",
        "in the arena",
        "on both sides",
        "kernel: right",
        "the driver works in a worker",
    ] {
        assert!(text.contains(step), "no {step:?} in\n{text}");
    }
}

#[test]
fn the_part_of_the_confinement_that_a_driver_fails_for_is_named() {
    let tried = probe(false);
    let text = String::from_utf8_lossy(&tried.stdout);
    assert!(!tried.status.success(), "{text}");
    let last = text.lines().last().unwrap_or_default();
    if text.contains("the driver works in a worker") {
        // A kernel without Landlock.
        return;
    }
    assert!(last.ends_with("confinement: landlock"), "{text}");
    assert!(text.contains("driver: FAILED"), "{text}");
}

#[test]
fn what_the_program_says_need_not_be_read() {
    let driver = beside("libgantry_cuda_driver.so");
    let folder = driver.parent().expect("it is in a folder");
    manual::check_unread(ACCEL, &["--help", "--version", "man", "completions bash"]);
    let words = ["probe", "--api", "cuda", "--heap", "262144", "--cache"].map(Path::new);
    let cache = std::env::temp_dir();
    let more = [
        &cache,
        Path::new("--library"),
        &driver,
        Path::new("--readable"),
        folder,
    ];
    manual::check_unread_of(ACCEL, words.into_iter().chain(more));
}

#[test]
fn a_file_too_few_or_too_large_is_an_error() {
    let socket = std::env::temp_dir().join(format!("gantry-few-{}", std::process::id()));
    let line = format!("serve --socket {}", socket.display());
    manual::check_scarce(ACCEL, "serve --socket /proc/none/socket", Some(&line));
    let _ = std::fs::remove_file(socket);
}

#[test]
fn a_worker_that_cannot_be_started_is_an_error() {
    let folder = tempfile::tempdir().expect("there is room");
    let all = fs::Permissions::from_mode(0o777);
    fs::set_permissions(folder.path(), all).expect("it is ours");
    let socket = folder.path().join("socket");
    manual::check_alone(ACCEL, &format!("serve --socket {}", socket.display()));
}

/// What a pool says whose workers cannot open this library, until it gives up.
fn gives_up(name: &str, library: impl FnOnce(&Path) -> PathBuf) -> String {
    let folder = std::env::temp_dir().join(format!("gantry-{name}-{}", std::process::id()));
    // One that was killed may have left it.
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir(&folder).expect("it is new");
    let said = Command::new("timeout")
        .args(["300", ACCEL, "serve", "--api", "cuda", "--library"])
        .arg(library(&folder))
        .arg("--readable")
        .arg(&folder)
        .arg("--socket")
        .arg(folder.join("socket"))
        .arg("--cache")
        .arg(folder.join("cache"))
        .output()
        .expect("it runs");
    std::fs::remove_dir_all(&folder).expect("it is there");
    let text = String::from_utf8_lossy(&said.stderr).into_owned();
    assert_eq!(said.status.code(), Some(1), "{text}");
    assert!(text.contains("the messages above say why"), "{text}");
    text
}

#[test]
fn a_pool_without_a_driver_says_so_once() {
    let text = gives_up("no-driver", |_| "libnowhere.so.1".into());
    assert_eq!(
        text.matches("libnowhere.so.1: install").count(),
        1,
        "{text}"
    );
}

#[test]
fn what_a_driver_prints_before_it_fails_is_passed_on_once() {
    let text = gives_up("loud-driver", |folder| {
        let (source, library) = (folder.join("loud.c"), folder.join("libloud.so.1"));
        std::fs::write(&source, LOUD).expect("there is room");
        let compiled = Command::new("cc")
            .args(["-shared", "-fPIC", "-o"])
            .args([&library, &source])
            .status();
        assert!(compiled.expect("cc (apt install gcc)").success());
        library
    });
    assert_eq!(text.matches("there is no licence").count(), 1, "{text}");
}
