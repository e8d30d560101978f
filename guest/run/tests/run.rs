//! A program that brings libraries of its own, by a path that takes precedence over everything a
//! user can set, runs with others.
#![allow(clippy::unwrap_used)]

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

/// Creates a library of this name that says whose it is.
fn library(folder: &Path, name: &str, whose: &str) {
    fs::create_dir_all(folder).unwrap();
    let source = folder.join("library.c");
    fs::write(
        &source,
        format!(
            "const char *{}(void) {{ return \"{whose}\"; }}\n",
            symbol(name)
        ),
    )
    .unwrap();
    compile(
        &source,
        &folder.join(name),
        &["-shared", "-fPIC", &format!("-Wl,-soname,{name}")],
    );
}

fn symbol(name: &str) -> String {
    name.split('.').next().unwrap_or_default().to_owned()
}

fn compile(source: &Path, to: &Path, options: &[&str]) {
    let compiled = Command::new("cc")
        .arg("-o")
        .arg(to)
        .arg(source)
        .args(options)
        .status();
    assert!(compiled.unwrap().success());
}

/// A program linked with a library from its own folder, which opens another one by its path.
const PROGRAM: &str = r#"
#include <dlfcn.h>
#include <stdio.h>
const char *libcudart(void);
int main(int count, char **arguments) {
    void *other = dlopen(arguments[1], RTLD_NOW);
    const char *(*whose)(void) = (const char *(*)(void))dlsym(other, "libcublas");
    printf("%s %s\n", libcudart(), whose());
    return count - 2;
}
"#;

struct Rig {
    folder: tempfile::TempDir,
}

impl Rig {
    fn new() -> Self {
        let rig = Self {
            folder: tempfile::TempDir::new().unwrap(),
        };
        for name in ["libcudart.so.13", "libcublas.so.13"] {
            library(&rig.theirs(), name, "theirs");
            library(&rig.ours(), name, "Gantry's");
        }
        for name in ["libcuda.so.1", "libcublasLt.so.13"] {
            fs::write(rig.ours().join(name), "").unwrap();
        }
        let auditor = std::env::current_exe()
            .unwrap()
            .with_file_name("libgantry_cuda_audit.so");
        fs::copy(auditor, rig.ours().join("libgantry_cuda_audit.so")).unwrap();
        let source = rig.folder.path().join("program.c");
        fs::write(&source, PROGRAM).unwrap();
        let theirs = rig.theirs().join("libcudart.so.13");
        let path = format!("-Wl,--disable-new-dtags,-rpath,{}", rig.theirs().display());
        compile(
            &source,
            &rig.program(),
            &[theirs.to_str().unwrap(), &path, "-ldl"],
        );
        rig
    }

    fn theirs(&self) -> PathBuf {
        self.folder.path().join("theirs")
    }

    fn ours(&self) -> PathBuf {
        self.folder.path().join("gantry-cuda")
    }

    fn program(&self) -> PathBuf {
        self.folder.path().join("program")
    }

    fn run(&self, mut command: Command) -> Output {
        command
            .arg(self.theirs().join("libcublas.so.13"))
            .output()
            .unwrap()
    }
}

#[test]
fn a_program_runs_with_gantrys_libraries_whatever_paths_it_has_and_is_not_changed() {
    let rig = Rig::new();
    let native = rig.run(Command::new(rig.program()));
    assert_eq!(String::from_utf8_lossy(&native.stdout), "theirs theirs\n");
    let gantry = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gantry-cuda"));
        command.arg("run").arg("--libraries").arg(rig.ours());
        command
    };
    let mut direct = gantry();
    direct.arg(rig.program());
    let ran = rig.run(direct);
    assert_eq!(
        String::from_utf8_lossy(&ran.stdout),
        "Gantry's Gantry's\n",
        "{ran:?}"
    );
    assert!(ran.status.success());
    // So does a program that it starts.
    let mut started = gantry();
    started
        .args(["sh", "-c", "exec \"$0\" \"$1\""])
        .arg(rig.program());
    let ran = rig.run(started);
    assert_eq!(
        String::from_utf8_lossy(&ran.stdout),
        "Gantry's Gantry's\n",
        "{ran:?}"
    );
    let again = rig.run(Command::new(rig.program()));
    assert_eq!(String::from_utf8_lossy(&again.stdout), "theirs theirs\n");
}

/// A library that is loaded first, and says where it would connect to.
const PRELOADED: &str = r#"
#include <stdio.h>
#include <stdlib.h>
__attribute__((constructor)) static void loaded(void) { puts(getenv("GANTRY_NVIDIA_SOCKET")); fflush(stdout); }
"#;

#[test]
fn a_program_keeps_its_libraries_if_only_device_files_are_carried() {
    let rig = Rig::new();
    let socket = rig.folder.path().join("nvidia.sock");
    let run = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gantry-cuda"));
        command.arg("run").arg("--libraries").arg(rig.ours());
        command
            .args(["--native", "--socket", "nvidia.sock"])
            .arg(rig.program());
        command.current_dir(rig.folder.path());
        rig.run(command)
    };
    let said = |ran: &Output| String::from_utf8_lossy(&ran.stderr).into_owned();
    let without = run();
    assert!(
        said(&without).contains("has no libgantry_nvidia_preload.so"),
        "{without:?}"
    );
    let source = rig.folder.path().join("preloaded.c");
    fs::write(&source, PRELOADED).unwrap();
    compile(
        &source,
        &rig.ours().join("libgantry_nvidia_preload.so"),
        &["-shared", "-fPIC"],
    );
    let without = run();
    assert!(
        said(&without).contains("nobody serves native contexts at nvidia.sock"),
        "{without:?}"
    );
    fs::write(&socket, "").unwrap();
    let without = run();
    assert!(
        said(&without).contains("nobody serves native contexts at nvidia.sock"),
        "{without:?}"
    );
    fs::remove_file(&socket).unwrap();
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let ran = run();
    let socket = fs::canonicalize(&socket).unwrap();
    let expected = format!("{}\ntheirs theirs\n", socket.display());
    assert_eq!(String::from_utf8_lossy(&ran.stdout), expected, "{ran:?}");
}

#[test]
fn what_cannot_be_run_so_says_why() {
    let rig = Rig::new();
    let says = |libraries: &Path, program: &Path| {
        let said = Command::new(env!("CARGO_BIN_EXE_gantry-cuda"))
            .arg("run")
            .arg("--libraries")
            .arg(libraries)
            .arg(program)
            .output()
            .unwrap();
        assert!(!said.status.success());
        String::from_utf8_lossy(&said.stderr).into_owned()
    };
    let cut = rig.folder.path().join("gantry:cuda");
    fs::create_dir(&cut).unwrap();
    assert!(says(&cut, &rig.program()).contains("give the libraries another folder"));
    let nowhere = says(&rig.theirs(), &rig.program());
    assert!(nowhere.contains("has no libcuda.so.1"), "{nowhere}");
    let missing = says(&rig.ours(), Path::new("/nowhere/program"));
    assert!(
        missing.contains("there is no program /nowhere/program"),
        "{missing}"
    );
    let source = rig.folder.path().join("static.c");
    fs::write(&source, "int main(void) { return 0; }\n").unwrap();
    let fixed = rig.folder.path().join("static");
    compile(&source, &fixed, &["-static"]);
    let refused = says(&rig.ours(), &fixed);
    assert!(refused.contains("statically linked"), "{refused}");
}

#[test]
fn what_the_program_says_of_itself_need_not_be_read() {
    let program = env!("CARGO_BIN_EXE_gantry-cuda");
    let lines = ["--help", "--version", "man", "completions bash"];
    manual::check_unread(program, &lines);
}
