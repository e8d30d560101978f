//! Runs the program while nobody reads its output.

#![cfg(feature = "device")]

#[test]
fn what_the_program_says_of_itself_need_not_be_read() {
    let program = env!("CARGO_BIN_EXE_gantry-gf100");
    let lines = ["--help", "--version", "man", "completions bash"];
    manual::check_unread(program, &lines);
}
