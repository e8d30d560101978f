//! The program while nobody reads its output.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::{fs, path::Path};

use manual::{check_scarce, check_unread, check_unread_of};

const AGENT: &str = env!("CARGO_BIN_EXE_gantry-agent");
const LIBRARIES: [&str; 4] = [
    "libcuda.so.1",
    "libcudart.so.13",
    "libcublas.so.13",
    "libcublasLt.so.13",
];

#[test]
fn what_it_says_of_itself_need_not_be_read() {
    check_unread(AGENT, &["--help", "--version", "man", "completions bash"]);
}

#[test]
fn a_file_that_is_too_large_is_an_error() {
    check_scarce(AGENT, "--socket /proc/none/socket", None);
}

#[test]
fn what_was_begun_is_done_to_its_end_though_nobody_reads_of_it() {
    let folder = tempfile::tempdir().unwrap();
    let [environment, libraries] = ["venv", "gantry"].map(|name| folder.path().join(name));
    let packages = environment.join("lib/python3.12/site-packages/nvidia/cu13/lib");
    fs::create_dir_all(&packages).unwrap();
    fs::create_dir(&libraries).unwrap();
    fs::write(environment.join("pyvenv.cfg"), "home = /usr/bin\n").unwrap();
    for library in LIBRARIES {
        fs::write(libraries.join(library), "Gantry's").unwrap();
        fs::write(packages.join(library), "theirs").unwrap();
    }
    let adopted = |library: &&str| packages.join(library).is_symlink();
    let replaced = &LIBRARIES[1..];
    let [adopt, undo, uninstall] = ["adopt", "--undo", "uninstall"].map(Path::new);
    let [of, root] = ["--libraries", "--root"].map(Path::new);
    check_unread_of(AGENT, [adopt, &environment, of, &libraries]);
    assert!(replaced.iter().all(adopted));
    check_unread_of(AGENT, [adopt, &environment, undo]);
    assert!(!replaced.iter().any(adopted));
    check_unread_of(AGENT, [uninstall, root, folder.path()]);
}
