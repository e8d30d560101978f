//! The program where its log may not grow.

#[test]
fn a_file_that_is_too_large_is_an_error() {
    let program = env!("CARGO_BIN_EXE_gantry-nvidia");
    manual::check_scarce(program, "--socket /proc/none/socket", None);
}
