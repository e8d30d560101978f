//! Children of processes that use CUDA, by fork, vfork, clone and by starting programs. The same programs are run
//! natively on a GPU (cuda-machine/fork).

use std::{
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::OnceLock,
};

use crate::library::{archive, beside, library};

/// Where the programs are.
fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../cuda-machine/fork")
}

/// A folder with a guest's libraries by the names that programs know, and the program.
fn folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fork");
        // Whatever an earlier run has left.
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).expect("there is room for files");
        for (library, name) in [
            ("libgantry_cuda.so", "libcuda.so.1"),
            ("libgantry_nvml.so", "libnvidia-ml.so.1"),
        ] {
            symlink(beside(library), folder.join(name)).expect("it is new");
        }
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../guest/cudart/link.sh");
        done(
            Command::new(script)
                .arg(archive("libgantry_cudart"))
                .arg(&folder),
        );
        done(
            Command::new("cc")
                .args(["-Wall", "-Wextra", "-Werror", "-O1", "-o"])
                .arg(folder.join("fork"))
                .arg(sources().join("fork.c"))
                .args(["-ldl", "-lpthread"]),
        );
        folder
    })
}

fn done(command: &mut Command) -> Output {
    let output = command.output().expect("it can be started");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}{}",
        output.status,
        text(&output.stdout),
        text(&output.stderr)
    );
    output
}

/// What a program says that finds a guest's libraries, and the pool of this process.
fn said(command: &mut Command) -> String {
    library();
    let output = done(command.env("LD_LIBRARY_PATH", folder()));
    String::from_utf8(output.stdout).expect("it is text")
}

/// Runs a scenario, which must say exactly this.
fn says(scenario: &str, expected: &[&str]) {
    let said = said(Command::new(folder().join("fork")).arg(scenario));
    let (first, last) = (format!("== {scenario}"), "status 0");
    let expected: Vec<_> = std::iter::once(first.as_str())
        .chain(expected.iter().copied())
        .chain([last])
        .collect();
    assert_eq!(said.lines().collect::<Vec<_>>(), expected, "{said}");
}

#[test]
fn each_call_of_a_child_is_refused_and_its_parent_notices_nothing() {
    let said = said(Command::new(folder().join("fork")).arg("one-child-calls"));
    let lines: Vec<_> = said.lines().collect();
    let calls = lines.iter().filter(|line| line.starts_with("  CU"));
    let calls: Vec<_> = calls.copied().collect();
    assert!(calls.len() > 20, "{said}");
    for call in &calls {
        // An error's name is no business of the device.
        let expected = if call.contains("cuGetErrorName") {
            ": 0"
        } else {
            ": 3"
        };
        assert!(call.ends_with(expected), "{call}");
    }
    let others = [
        "  its name: CUDA_ERROR_NOT_INITIALIZED",
        "child: status 5",
        "parent: right",
        "parent again: right",
        "status 0",
    ];
    assert_eq!(lines[calls.len() + 1..], others, "{said}");
}

#[test]
fn a_parent_computes_while_children_call() {
    says(
        "many-children-call",
        &["parent: 400 of 400 right; 60 of 60 children were refused"],
    );
}

#[test]
fn children_share_pinned_memory_with_their_parent_and_its_device() {
    says(
        "pinned-memory-is-shared",
        &[
            "child: what it finds is right",
            "parent: what the child wrote is right",
            "device: it is right",
            "child: status 0",
            "parent: right",
        ],
    );
}

#[test]
fn registered_memory_of_a_child_is_its_own() {
    says(
        "registered-memory-is-private",
        &[
            "child: it finds 1",
            "child: status 0",
            "parent: it finds 1",
            "parent: it finds 4",
        ],
    );
}

#[test]
fn children_exit_and_have_children_without_effect_on_their_parent() {
    says(
        "children-exit",
        &[
            "  at its exit: 3",
            "child that exits: status 9",
            "grandchild: status 3",
            "child: status 3",
            "parent: right",
        ],
    );
}

#[test]
fn programs_that_a_parent_starts_have_connections_of_their_own() {
    let own = "  a program of its own: right";
    says(
        "children-execute",
        &[
            own,
            "fork and exec: status 0",
            own,
            "vfork and exec: status 0",
            own,
            "posix_spawn: status 0",
            "parent: right",
        ],
    );
}

#[test]
fn a_child_waits_for_no_lock_that_another_thread_had() {
    says(
        "one-of-many-threads-forks",
        &["50 of 50 children were refused; 0 wrong", "parent: right"],
    );
}

#[test]
fn signal_handlers_and_raw_clones_make_children_like_others() {
    says(
        "a-signal-handler-forks",
        &["in the handler's child: refused; parent: right"],
    );
    says(
        "a-child-of-clone-calls",
        &["child: status 3", "parent: right"],
    );
}

#[test]
fn children_of_a_parent_that_only_asked_about_devices_compute() {
    says(
        "after-nvml-children-compute",
        &[
            "parent: devices: some",
            "child: right",
            "child: status 0",
            "child: right",
            "child: status 0",
            "parent: right",
            "child: status 3",
            "parent: right",
        ],
    );
    says(
        "after-the-version-a-child-computes",
        &["child: right", "child: status 0", "parent: right"],
    );
}

#[test]
fn the_runtime_refuses_a_child_all_but_the_number_of_devices() {
    says(
        "the-runtime-is-refused",
        &[
            "  cudaGetDeviceCount: 0, 1 device",
            "  cudaSetDevice: 3",
            "  cudaMalloc: 3",
            "  cudaMemset: 3",
            "  cudaDeviceSynchronize: 3",
            "  cudaStreamCreate: 3",
            "  cudaGetLastError: 3",
            "child: status 0",
            "parent: it finds 2",
            "parent: right",
        ],
    );
}

#[test]
fn loaders_fill_pinned_memory_by_each_way_to_start_processes() {
    let said = said(Command::new("python3").arg(sources().join("loaders.py")));
    // A loader of forkserver or spawn is a program of its own.
    let asking = |way| if way == "fork" { "(3, 3)" } else { "(0, 0)" };
    let expected: String = ["fork", "forkserver", "spawn"]
        .map(|way| {
            format!(
                "{way}: 64 of 64 batches are right, loaders ended with [0, 0, 0, 0]\n\
                 {way}: a loader that calls cuInit and cuDeviceGetCount gets {}\n\
                 {way}: the parent's copies are right\n",
                asking(way)
            )
        })
        .concat();
    assert_eq!(said, expected);
}
