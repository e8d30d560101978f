//! `gantry-top`: shows who uses a shared accelerator.

#![cfg_attr(not(test), deny(clippy::print_stderr, clippy::print_stdout))]

use std::{io, path::PathBuf, process::ExitCode};

use base::{Output, paths::ARBITER_SOCKET};
use clap::{CommandFactory, Parser};
use gpu_mediator::top;
use manual::Manual;

/// Shows the clients of gantry-arbiter or gantry-gpu, their shares of the device, and how long they
/// wait for it.
#[derive(Parser)]
#[command(
    name = "gantry-top",
    version,
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    disable_help_subcommand = true
)]
struct Arguments {
    #[command(subcommand)]
    manual: Option<Manual>,
    /// Path of its socket; the default is that of the arbiter's installed unit.
    #[arg(long, default_value = ARBITER_SOCKET, value_name = "PATH")]
    socket: PathBuf,
}

fn main() -> ExitCode {
    base::limits::file_size_is_an_error();
    let arguments = Arguments::parse();
    if let Some(manual) = arguments.manual {
        return match manual.write(Arguments::command(), &mut Output::standard()) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                base::note!("gantry-top: {error}");
                ExitCode::FAILURE
            }
        };
    }
    let socket = arguments.socket;
    match top::run(&socket) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.kind() == io::ErrorKind::Unsupported => {
            base::note!("gantry-top: {error}");
            ExitCode::FAILURE
        }
        Err(error) => {
            base::note!(
                "gantry-top: cannot show who shares a device at {}: {error}; is gantry-arbiter or gantry-gpu \
                 running with this --socket, and is this its user or root?",
                socket.display()
            );
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_makes_sense() {
        manual::check::<Arguments>(
            &["", "--socket /s", "man", "man /pages", "completions zsh"],
            &["--socket", "--socket /s man", "completions"],
        );
    }
}
