//! Runs the program while nobody reads its output.

#![cfg(feature = "device")]

#[test]
fn what_the_program_says_of_itself_need_not_be_read() {
    let program = env!("CARGO_BIN_EXE_gantry-gf100");
    let lines = ["--help", "--version", "man", "completions bash"];
    manual::check_unread(program, &lines);
}

#[test]
fn a_file_too_few_or_too_large_or_no_thread_is_an_error() {
    // Nobody else has this name, and all users may write there.
    let socket = std::env::temp_dir().join(format!("gantry-gf100-{}", std::process::id()));
    let line = format!("--socket {}", socket.display());
    let program = env!("CARGO_BIN_EXE_gantry-gf100");
    manual::check_scarce(program, "--socket /proc/none/socket", Some(&line));
    let _ = std::fs::remove_file(&socket);
    manual::check_alone(program, &line);
    let _ = std::fs::remove_file(socket);
}
