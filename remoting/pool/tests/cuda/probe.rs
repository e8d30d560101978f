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

/// A driver that says in which file the `ioctl` is that it calls.
const CALLER: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>
__attribute__((constructor)) static void say(void) {
    Dl_info found;
    if (!dladdr((void *)ioctl, &found)) _exit(9);
    write(2, "ioctl is in ", 12);
    write(2, found.dli_fname, strlen(found.dli_fname));
    write(2, "\n", 1);
}
"#;

/// A library of this C source.
fn compiled(folder: &Path, name: &str, text: &str) -> PathBuf {
    let source = folder.join(format!("{name}.c"));
    let library = folder.join(format!("lib{name}.so.1"));
    fs::write(&source, text).expect("there is room");
    let compiled = Command::new("cc")
        .args(["-shared", "-fPIC", "-o"])
        .args([&library, &source])
        .status();
    assert!(compiled.expect("cc (apt install gcc)").success());
    library
}

fn probe(readable: bool) -> Output {
    command(readable).output().expect("it runs")
}

fn command(readable: bool) -> Command {
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
    command
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
fn a_drivers_device_calls_go_through_the_workers_program() {
    let folder = tempfile::tempdir().expect("there is room");
    let library = compiled(folder.path(), "caller", CALLER);
    let tried = Command::new(ACCEL)
        .args([
            "probe",
            "--api",
            "cuda",
            "--without",
            "landlock",
            "--library",
        ])
        .arg(library)
        .output()
        .expect("it runs");
    let text = String::from_utf8_lossy(&tried.stderr);
    assert!(text.contains(&format!("ioctl is in {ACCEL}")), "{text}");
}

#[test]
fn a_driver_that_makes_no_channels_has_no_time_slices() {
    let tried = command(true).arg("--slices").output().expect("it runs");
    let text = String::from_utf8_lossy(&tried.stderr);
    assert_eq!(tried.status.code(), Some(1), "{text}");
    // With NVIDIA's kernel driver beside the stand-in, or without.
    let says = |why: &str| text.contains(&format!("cannot start: {why}"));
    assert!(
        says("the driver makes 0 contexts") || says("cannot read the version"),
        "{text}"
    );
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
    let text = gives_up("loud-driver", |folder| compiled(folder, "loud", LOUD));
    assert_eq!(text.matches("there is no licence").count(), 1, "{text}");
}

/// The processes that a process has started.
fn children(of: u32) -> Vec<u32> {
    let all = fs::read_dir("/proc").expect("there is /proc");
    let all = all.filter_map(Result::ok);
    let numbers = all.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let parent = format!("PPid:\t{of}\n");
    // One that has ended meanwhile has no status.
    let is_child = |id: &u32| {
        let status = fs::read_to_string(format!("/proc/{id}/status"));
        status.is_ok_and(|status| status.contains(&parent))
    };
    numbers.filter(is_child).collect()
}

#[test]
fn workers_do_not_have_the_standard_error_of_their_pool() {
    let folder = tempfile::tempdir().expect("there is room");
    let said = folder.path().join("said");
    let mut pool = crate::library::serving(folder.path())
        .arg("--socket")
        .arg(folder.path().join("socket"))
        .stderr(fs::File::create(&said).expect("there is room"))
        .spawn()
        .expect("it starts");
    let error = |id| fs::read_link(format!("/proc/{id}/fd/2"));
    // Until it has executed the program, a child has what the pool has.
    let is_apart = |id| error(id).is_ok_and(|error| error.to_string_lossy().starts_with("pipe:"));
    let start = std::time::Instant::now();
    while !children(pool.id()).into_iter().any(is_apart) {
        assert!(start.elapsed().as_secs() < 60, "{:?}", fs::read(&said));
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    assert_eq!(error(pool.id()).expect("it runs"), said);
    pool.kill().expect("it runs");
    pool.wait().expect("it ends");
}
