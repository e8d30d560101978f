//! The program where its output may not grow.

#![cfg(feature = "eaters")]

#[test]
fn a_file_that_is_too_large_is_an_error() {
    let program = env!("CARGO_BIN_EXE_gloop-eaters");
    manual::check_scarce(program, "check --cubins /proc/none", None);
}
