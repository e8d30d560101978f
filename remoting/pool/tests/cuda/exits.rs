//! Calls while a program exits: its objects' destructors and the compiler's code free what they have then.

use std::{
    process::Command,
    sync::atomic::{AtomicU64, Ordering},
};

use cuda_definition::driver::types::*;

use crate::driver::{context, cuda, device};

/// Set in a process of its own.
const EXITS: &str = "GANTRY_TEST_EXITS";
static MEMORY: AtomicU64 = AtomicU64::new(0);

extern "C" fn at_exit() {
    let mut current = std::ptr::null_mut();
    let asked = cuda!(cuCtxGetCurrent(&mut current));
    let freed = cuda!(cuMemFree_v2(MEMORY.load(Ordering::SeqCst)));
    let good = (asked, freed) == (CUresult::CUDA_SUCCESS, CUresult::CUDA_SUCCESS);
    println!(
        "{}",
        if good && !current.is_null() {
            "freed"
        } else {
            "failed"
        }
    );
}

#[test]
fn memory_is_freed_while_a_program_exits() {
    if std::env::var_os(EXITS).is_some() {
        let context = context();
        MEMORY.store(device(&[1u32]), Ordering::SeqCst);
        std::mem::forget(context);
        // SAFETY: a function without arguments, as is wanted.
        unsafe { libc::atexit(at_exit) };
        std::process::exit(0);
    }
    let program = std::env::current_exe().expect("a test knows its own path");
    let ended = Command::new(program)
        .args([
            "--exact",
            "exits::memory_is_freed_while_a_program_exits",
            "--nocapture",
        ])
        .env(EXITS, "1")
        .output()
        .expect("it runs again");
    let text = String::from_utf8_lossy(&ended.stdout);
    let errors = String::from_utf8_lossy(&ended.stderr);
    assert!(
        ended.status.success() && text.contains("freed"),
        "{text}{errors}"
    );
}
