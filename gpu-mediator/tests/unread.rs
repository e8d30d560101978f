//! The programs while nobody reads their output.

use manual::check_unread;

const LINES: [&str; 4] = ["--help", "--version", "man", "completions bash"];

#[test]
fn what_the_programs_say_of_themselves_need_not_be_read() {
    check_unread(env!("CARGO_BIN_EXE_gantry-arbiter"), &LINES);
    check_unread(env!("CARGO_BIN_EXE_gantry-gpu"), &LINES);
    #[cfg(feature = "top")]
    check_unread(env!("CARGO_BIN_EXE_gantry-top"), &LINES);
}
