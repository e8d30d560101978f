//! A guest's library before a pool of workers, both of this build, started once for all tests.

use std::{
    cell::Cell,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::Command,
    sync::{Mutex, MutexGuard, OnceLock, PoisonError},
    thread,
    time::Duration,
};

use libloading::Library;

thread_local! {
    /// How many turns this thread has.
    static TURNS: Cell<u32> = const { Cell::new(0) };
}

/// Tests run one after the other: what waits for all of a context's kernels in a worker's one thread would
/// wait for one that waits for another test's next call.
pub struct Turn(#[allow(dead_code)] Option<MutexGuard<'static, ()>>);

/// Waits until it is this thread's turn, if it is not.
pub fn turn() -> Turn {
    static ONE: Mutex<()> = Mutex::new(());
    let first = TURNS.replace(TURNS.get() + 1) == 0;
    Turn(first.then(|| ONE.lock().unwrap_or_else(PoisonError::into_inner)))
}

impl Drop for Turn {
    fn drop(&mut self) {
        TURNS.set(TURNS.get() - 1);
    }
}

/// Bytes of device memory that the application may have, in MiB.
pub const MEMORY: u64 = 1024;

/// A library that Cargo has put beside this program.
pub fn beside(name: &str) -> PathBuf {
    let program = std::env::current_exe().expect("a test knows its own path");
    program.with_file_name(name)
}

/// A folder with the stand-in for cuBLAS under the names of both libraries.
fn libraries(folder: &Path) -> PathBuf {
    let libraries = folder.join("libraries");
    std::fs::create_dir_all(&libraries).expect("there is room for files");
    for name in ["libcublas.so.13", "libcublasLt.so.13"] {
        let link = libraries.join(name);
        std::os::unix::fs::symlink(beside("libgantry_cuda_blas.so"), link).expect("it is new");
    }
    libraries
}

/// The newest archive of a crate's name beside this program: Cargo keeps one per set of features.
pub fn archive(name: &str) -> PathBuf {
    let folder = beside("");
    let all = std::fs::read_dir(folder).expect("Cargo's folder can be read");
    let all = all.filter_map(Result::ok).map(|entry| entry.path());
    let archives = all.filter(|path| {
        let file = path.file_name().unwrap_or_default().to_string_lossy();
        file.starts_with(name) && file.ends_with(".a")
    });
    let age = |path: &PathBuf| {
        std::fs::metadata(path)
            .and_then(|data| data.modified())
            .ok()
    };
    archives
        .max_by_key(age)
        .expect("the archive is built with this test")
}

/// A folder with the guest's cuBLAS and cuBLASLt, linked as users' are.
pub fn shims() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        // Cargo's own, so that each run takes the place of the one before.
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cublas");
        std::fs::create_dir_all(&folder).expect("there is room for files");
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../guest/cublas/link.sh");
        let linked = Command::new(script)
            .arg(archive("libgantry_cublas"))
            .arg(&folder)
            .status();
        assert!(linked.expect("it can be started").success());
        folder
    })
}

/// Both, open: they find the driver that this process has.
pub fn blas() -> &'static (Library, Library) {
    static BOTH: OnceLock<(Library, Library)> = OnceLock::new();
    BOTH.get_or_init(|| {
        library();
        // SAFETY: opening them runs no code of their own.
        let open = |name: &str| unsafe { Library::new(shims().join(name)) }.expect("it is linked");
        (open("libcublas.so.13"), open("libcublasLt.so.13"))
    })
}

/// A pool's place, for a process that is to start none.
pub const GIVEN: &str = "GANTRY_CUDA";

/// Whether there is a pool for this process already, which it has not started.
pub fn is_given() -> bool {
    static GIVEN_TO_THIS: OnceLock<bool> = OnceLock::new();
    // Before it is set for a pool of this process's own.
    *GIVEN_TO_THIS.get_or_init(|| std::env::var_os(GIVEN).is_some())
}

/// A pool, which ends with the thread that starts it.
pub fn serving(folder: &Path) -> Command {
    serving_apis(folder, "cuda")
}

/// The same, for these APIs.
pub fn serving_apis(folder: &Path, apis: &str) -> Command {
    serving_within(folder, apis, "--memory")
}

/// The same, with [`MEMORY`] in the sense of this option.
pub fn serving_within(folder: &Path, apis: &str, memory: &str) -> Command {
    let driver = beside("libgantry_cuda_driver.so");
    let mut command = Command::new(env!("CARGO_BIN_EXE_gantry-accel"));
    command
        .args(["serve", "--api", apis, "--spare", "1"])
        .args([memory, &MEMORY.to_string()])
        // What is refused has been refused by a worker or a library, not by the driver.
        .env("GANTRY_STAND_IN_TRUSTS", "1")
        // The stand-in reserves addresses that count as memory.
        .args(["--heap", "262144"])
        .arg("--library")
        .arg(format!("cuda={}", driver.display()))
        .arg("--readable")
        .arg(driver.parent().expect("it is in a folder"))
        .arg("--cuda-libraries")
        .arg(libraries(folder))
        .arg("--cache")
        .arg(folder);
    // SAFETY: an async-signal-safe call between fork and exec.
    unsafe {
        command.pre_exec(|| {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM);
            Ok(())
        });
    }
    command
}

/// Starts a pool of this process's own with this many devices: its socket.
pub fn start(devices: u32) -> PathBuf {
    start_lending(devices, "")
}

/// The same, of whose devices these are lent.
pub fn start_lending(devices: u32, lent: &'static str) -> PathBuf {
    let name = format!("gantry-cuda-test-{}-{devices}-{lent}", std::process::id());
    let folder = std::env::temp_dir().join(name);
    std::fs::create_dir_all(&folder).expect("there is room for files");
    let socket = folder.join("cuda.sock");
    let path = socket.clone();
    // The thread that starts the pool must stay: the pool ends with it.
    thread::spawn(move || {
        let mut pool = serving(&folder);
        pool.env("GANTRY_CUDA_DEVICES", devices.to_string());
        pool.args(["--devices", lent]);
        let pool = pool.arg("--socket").arg(folder.join("cuda.sock")).spawn();
        let _ = pool.expect("the pool starts").wait();
    });
    // There before anybody listens.
    while std::os::unix::net::UnixStream::connect(&path).is_err() {
        thread::sleep(Duration::from_millis(10));
    }
    socket
}

/// The library.
pub fn library() -> &'static Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        if !is_given() {
            let socket = start(1);
            // SAFETY: tests look at no variable; the library does when it is first called.
            unsafe { std::env::set_var(GIVEN, socket) };
        }
        // SAFETY: opening it runs no code of its own.
        let library = unsafe { Library::new(beside("libgantry_cuda.so")) };
        library.expect("the guest's library is built with this test")
    })
}
