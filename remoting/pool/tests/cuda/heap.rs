//! Programs whose large allocations may be in a window (`libgantry_malloc.so`): that of OpenCL, not that of CUDA, where
//! ordinary memory may be used again as soon as the call that copies it has returned.

use std::{
    ffi::c_void,
    process::Command,
    ptr::null_mut,
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
    thread,
    time::Duration,
};

use cuda_definition::driver::types::*;

use crate::{
    driver::{context, device, ok, values},
    library,
};

const BYTES: usize = 1 << 20;

/// Whether this process has the library.
fn is_preloaded() -> bool {
    // SAFETY: the name is a C string.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"gantry_malloc_serve".as_ptr()) };
    !found.is_null()
}

fn copies() {
    let _context = context();
    let (mut stream, mut gate) = (null_mut(), null_mut::<c_void>());
    ok!(cuStreamCreate(&mut stream, 1));
    ok!(cuMemHostAlloc(&mut gate, 4, 2));
    // SAFETY: of that size, and never freed.
    let gate = unsafe { AtomicU32::from_ptr(gate.cast()) };
    let close = || {
        gate.store(0, Ordering::SeqCst);
        let at = std::ptr::from_ref(gate) as u64;
        ok!(cuStreamWaitValue32_v2(stream, at, 1, 0));
    };
    let (memory, mut own) = (device(&vec![0u8; BYTES]), vec![7u8; BYTES]);
    // To the device: it has been read when the call returns.
    close();
    let from = own.as_ptr().cast();
    ok!(cuMemcpyHtoDAsync_v2(memory, from, BYTES, stream));
    own.fill(9);
    gate.store(1, Ordering::SeqCst);
    ok!(cuStreamSynchronize(stream));
    assert!(values::<u8>(memory, BYTES) == [7; BYTES]);
    // To the host: it has been written when the call returns.
    close();
    let is_open = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            // Time in which a call that does not wait returns.
            thread::sleep(Duration::from_millis(300));
            is_open.store(true, Ordering::SeqCst);
            gate.store(1, Ordering::SeqCst);
        });
        let to = own.as_mut_ptr().cast();
        ok!(cuMemcpyDtoHAsync_v2(to, memory, BYTES, stream));
        assert!(is_open.load(Ordering::SeqCst), "the copy is under way");
    });
    assert!(own == [7; BYTES]);
}

#[test]
fn copies_of_allocations_do_not_depend_on_where_they_are() {
    if is_preloaded() {
        return copies();
    }
    let program = std::env::current_exe().expect("a test knows its own path");
    let ended = Command::new(program)
        .args([
            "--exact",
            "heap::copies_of_allocations_do_not_depend_on_where_they_are",
            "--nocapture",
        ])
        .env("LD_PRELOAD", library::beside("libgantry_malloc.so"))
        .output()
        .expect("it runs again");
    let [text, errors] = [&ended.stdout, &ended.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    assert!(
        ended.status.success() && text.contains("1 passed"),
        "{text}{errors}"
    );
}
