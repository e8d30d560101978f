//! Programs in C as the compiler's host code would have them, linked with Gantry's CUDA runtime and run
//! over the stand-in driver.

use std::{
    ffi::{CString, OsStr, c_char, c_void},
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::OnceLock,
    time::SystemTime,
};

use cuda_definition::runtime::ENTRY_POINTS;
use tempfile::TempDir;

/// Images by the names that programs use.
const KERNELS: &[(&str, &str)] = &[
    (
        "VECTOR_ADD",
        include_str!("../kernels/vector_add.compute_75.ptx"),
    ),
    ("ORDER", include_str!("../kernels/order.compute_75.ptx")),
    ("SYMBOLS", include_str!("../kernels/symbols.compute_75.ptx")),
];

/// A folder with `libcudart.so.13` and `libcuda.so.1`, and the folder of programs.
fn libraries() -> &'static Path {
    static FOLDER: OnceLock<TempDir> = OnceLock::new();
    FOLDER.get_or_init(link).path()
}

/// Where Cargo puts what it builds: beside this program.
fn built() -> PathBuf {
    let program = std::env::current_exe().expect("a test knows its own path");
    program.parent().expect("it is in a folder").to_owned()
}

/// The runtime's archive: the newest, as Cargo keeps one per set of features.
fn archive() -> PathBuf {
    let age = |path: &Path| {
        fs::metadata(path)
            .and_then(|data| data.modified())
            .unwrap_or(SystemTime::UNIX_EPOCH)
    };
    let all = fs::read_dir(built())
        .expect("Cargo's folder can be read")
        .filter_map(Result::ok);
    let archives = all.map(|entry| entry.path()).filter(|path| {
        let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
        name.starts_with("libgantry_cudart") && name.ends_with(".a")
    });
    archives
        .max_by_key(|path| age(path))
        .expect("the runtime is built with this test")
}

fn link() -> TempDir {
    let folder = tempfile::tempdir().expect("there is room for temporary files");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../guest/cudart/link.sh");
    run(Command::new(script).arg(archive()).arg(folder.path()));
    let driver = built().join("libgantry_cuda_driver.so");
    std::os::unix::fs::symlink(driver, folder.path().join("libcuda.so.1")).expect("it is new");
    let mut header = String::new();
    for (name, ptx) in KERNELS {
        header += &format!("static const char {name}[] =\n");
        for line in ptx.lines() {
            header += &format!("    {:?}\n", format!("{line}\n"));
        }
        header += "    ;\n";
    }
    fs::write(folder.path().join("kernels.h"), header).expect("there is room for a header");
    folder
}

fn run(command: &mut Command) -> Output {
    let output = command.output().expect("it can be started");
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    output
}

/// Compiles and runs a program; what it writes to its error output.
fn program(name: &str) -> String {
    let folder = libraries();
    let source = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/runtime")
        .join(name)
        .with_extension("c");
    let made = folder.join(name);
    let mut cc = Command::new("cc");
    cc.args([
        "-std=gnu11",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-unused-function",
        "-Wno-unused-variable",
    ]);
    cc.args([
        "-Wno-pointer-sign",
        "-Wno-cast-function-type",
        "-pthread",
        "-I",
    ])
    .arg(folder);
    run(cc
        .arg(source)
        .arg("-o")
        .arg(&made)
        .arg("-L")
        .arg(folder)
        .arg("-lcudart"));
    let output = run(Command::new(made).env("LD_LIBRARY_PATH", folder));
    assert_eq!(output.stdout, b"done\n");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn kernels_are_launched_as_compiled_programs_do_it() {
    program("launch");
}

#[test]
fn variables_and_constants_are_found_by_their_shadows() {
    program("symbols");
}

#[test]
fn streams_keep_their_order_and_threads_have_their_own() {
    program("streams");
}

#[test]
fn graphs_do_what_was_captured_or_made_of_nodes() {
    program("graphs");
}

#[test]
fn memory_of_all_kinds_is_made_copied_and_told_apart() {
    let said = program("memory");
    assert_eq!(
        said.matches("cudaIpcGetMemHandle is not supported").count(),
        1,
        "{said}"
    );
}

#[test]
fn errors_are_each_thread_s_and_a_fault_stays() {
    program("errors");
}

#[test]
fn every_entry_point_is_exported_in_the_version_that_programs_ask_for() {
    #[link(name = "dl")]
    unsafe extern "C" {
        fn dlopen(path: *const c_char, flags: i32) -> *mut c_void;
        fn dlvsym(
            library: *mut c_void,
            symbol: *const c_char,
            version: *const c_char,
        ) -> *mut c_void;
    }
    let path = libraries().join("libcudart.so.13");
    let path = CString::new(path.into_os_string().into_encoded_bytes()).expect("a path");
    // SAFETY: a path; opening the library runs no code of its own. RTLD_NOW
    let library = unsafe { dlopen(path.as_ptr(), 2) };
    assert!(!library.is_null());
    let more = [
        "cudaMemcpy_ptds",
        "cudaMemcpyAsync_ptsz",
        "cudaLaunchKernel_ptsz",
        "cudaGraphLaunch_ptsz",
    ];
    for symbol in ENTRY_POINTS.iter().map(|entry| entry.symbol).chain(more) {
        let name = CString::new(symbol).expect("a name");
        // SAFETY: an open library and two strings.
        let found = unsafe { dlvsym(library, name.as_ptr(), c"libcudart.so.13".as_ptr()) };
        assert!(!found.is_null(), "{symbol}");
    }
}

#[test]
fn nothing_else_is_exported() {
    let output = run(Command::new("nm")
        .args(["-D", "--defined-only"])
        .arg(libraries().join("libcudart.so.13")));
    let text = String::from_utf8_lossy(&output.stdout);
    for symbol in text
        .lines()
        .filter_map(|line| line.split_whitespace().nth(2))
    {
        let name = symbol.split('@').next().unwrap_or_default();
        let ours =
            name.starts_with("cuda") || name.starts_with("__cuda") || name == "libcudart.so.13";
        assert!(ours, "{symbol}");
    }
}
