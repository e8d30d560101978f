//! What kernels print.

use std::{process::Command, ptr::null_mut};

use cuda_definition::driver::types::*;

use crate::driver::{argument, context, device, function, launch, module, ok};

const PRINT: &str = include_str!("../kernels/print.compute_75.ptx");

/// Set in a process of its own, whose output is what is tested.
const PRINTS: &str = "GANTRY_TEST_PRINTS";

fn prints() {
    let _context = context();
    let print = function(module(PRINT), "print");
    let (word, factor) = (device(b"word\0"), 1.25f64);
    let arguments = [argument(&word), argument(&factor)];
    let result = launch(print, [2, 1, 1], [32, 1, 1], 0, null_mut(), &arguments);
    assert_eq!(result, CUresult::CUDA_SUCCESS);
    ok!(cuCtxSynchronize());
}

#[test]
fn kernels_print_when_the_host_waits_for_them() {
    if std::env::var_os(PRINTS).is_some() {
        return prints();
    }
    let program = std::env::current_exe().expect("a test knows its own path");
    let printed = Command::new(program)
        .args([
            "--exact",
            "print::kernels_print_when_the_host_waits_for_them",
            "--nocapture",
        ])
        .env(PRINTS, "1")
        .output()
        .expect("it runs again");
    assert!(printed.status.success());
    let text = String::from_utf8(printed.stdout).expect("it is text");
    let found: Vec<_> = text
        .lines()
        .filter(|line| line.contains("word: "))
        .collect();
    let mut expected = Vec::new();
    for block in 0..2 {
        for thread in 0..4u64 {
            let real = 1.25 * thread as f64;
            let letter = char::from(b'a' + thread as u8);
            let number = 0x1234_5678_9abc_u64 + thread;
            expected.push(format!(
                "word: block {block} thread {thread} of 32: {real:5.2} {letter} {number:x} %"
            ));
        }
    }
    let found: Vec<_> = found
        .iter()
        .map(|line| &line[line.find("word: ").unwrap_or(0)..])
        .collect();
    assert_eq!(found, expected);
}
