//! What a program is told of its work when the worker ends with it.

use std::{
    ffi::c_void,
    fs,
    process::Command,
    ptr::null_mut,
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
    thread,
    time::{Duration, Instant},
};

use cuda_definition::driver::types::*;

use crate::driver::{context, ok};

/// Set in a process of its own, which has a pool of its own.
const LOST: &str = "GANTRY_TEST_LOST";
/// How many functions and callbacks are due in no certain order: one of them comes last.
const COUNT: usize = 64;
/// How long to wait for what only a hang prevents.
const LONG: Duration = Duration::from_secs(100);

static CALLED: AtomicBool = AtomicBool::new(false);
static TOLD: AtomicU32 = AtomicU32::new(0);
static WRONG: AtomicBool = AtomicBool::new(false);

unsafe extern "C" fn call(_: *mut c_void) {
    CALLED.store(true, Ordering::SeqCst);
}

unsafe extern "C" fn tell(_: CUstream, result: CUresult, _: *mut c_void) {
    if result == CUresult::CUDA_SUCCESS {
        WRONG.store(true, Ordering::SeqCst);
    }
    TOLD.fetch_add(1, Ordering::SeqCst);
}

/// All descendants of a process.
fn descendants(of: u32) -> Vec<u32> {
    let all = fs::read_dir("/proc").unwrap().filter_map(Result::ok);
    let parents: Vec<(u32, u32)> = all
        .filter_map(|entry| {
            let process = entry.file_name().to_str()?.parse().ok()?;
            let text = fs::read_to_string(entry.path().join("stat")).ok()?;
            // Behind the name, which ends with the last parenthesis, and the state.
            let parent = text.rsplit_once(") ")?.1.split(' ').nth(1)?;
            Some((process, parent.parse().ok()?))
        })
        .collect();
    let mut found = vec![of];
    let mut place = 0;
    while let Some(&parent) = found.get(place) {
        let children = parents.iter().filter(|(_, of)| *of == parent);
        found.extend(children.map(|(process, _)| *process));
        place += 1;
    }
    found.split_off(1)
}

fn lose() {
    let _context = std::mem::ManuallyDrop::new(context());
    let (mut stream, mut gate) = (null_mut(), null_mut::<c_void>());
    ok!(cuStreamCreate(&mut stream, 1));
    ok!(cuMemHostAlloc(&mut gate, 4, 2));
    // SAFETY: of that size; nothing else uses it.
    unsafe { gate.cast::<u32>().write(0) };
    ok!(cuStreamWaitValue32_v2(stream, gate as u64, 1, 0));
    for _ in 0..COUNT {
        ok!(cuLaunchHostFunc(stream, Some(call), null_mut()));
        ok!(cuStreamAddCallback(stream, Some(tell), null_mut(), 0));
    }
    for process in descendants(std::process::id()) {
        // SAFETY: processes of this one's pool.
        unsafe { libc::kill(process.cast_signed(), libc::SIGKILL) };
    }
    let start = Instant::now();
    while TOLD.load(Ordering::SeqCst) < COUNT as u32 {
        assert!(start.elapsed() < LONG, "callbacks are not told");
        thread::sleep(Duration::from_millis(1));
    }
    assert!(
        !WRONG.load(Ordering::SeqCst),
        "a callback is told of success"
    );
    assert!(!CALLED.load(Ordering::SeqCst), "a function is called");
}

#[test]
fn functions_are_not_called_for_work_that_a_worker_has_lost() {
    if std::env::var_os(LOST).is_some() {
        return lose();
    }
    let program = std::env::current_exe().expect("a test knows its own path");
    let ended = Command::new(program)
        .args([
            "--exact",
            "lost::functions_are_not_called_for_work_that_a_worker_has_lost",
            "--nocapture",
        ])
        .env(LOST, "1")
        .env_remove(crate::library::GIVEN)
        .output()
        .expect("it runs again");
    let [text, errors] = [&ended.stdout, &ended.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    assert!(
        ended.status.success() && text.contains("1 passed"),
        "{text}{errors}"
    );
}
