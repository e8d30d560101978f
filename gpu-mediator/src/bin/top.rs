//! `gantry-top`: shows who uses a shared accelerator.

#![cfg_attr(not(test), deny(clippy::print_stderr, clippy::print_stdout))]

use std::{
    io,
    path::{Path, PathBuf},
    process::ExitCode,
};

use base::{Output, paths::ARBITER_SOCKET};
use clap::{CommandFactory, Parser};
use gpu_mediator::{policy::Weight, top};
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
    /// Give a client of gantry-arbiter another weight, 1 to 10,000, for as long as the arbiter remembers it, and show nothing.
    #[arg(long, value_name = "CLIENT=WEIGHT", value_parser = weighed)]
    set_weight: Option<(String, u32)>,
}

/// A client's name, which may contain `=`, and its weight.
fn weighed(text: &str) -> Result<(String, u32), String> {
    let (name, weight) = text.rsplit_once('=').ok_or("use CLIENT=WEIGHT")?;
    let weight = weight
        .parse()
        .ok()
        .filter(|weight| Weight::try_from(*weight).is_ok());
    match weight {
        Some(weight) if !name.is_empty() => Ok((name.to_owned(), weight)),
        Some(_) => Err("name a client, as gantry top shows it".to_owned()),
        None => Err(format!("invalid weight: use 1 to {}", Weight::LARGEST)),
    }
}

/// Changes a weight.
fn set_weight(socket: &Path, name: &str, weight: u32) -> ExitCode {
    match remoting_turns::weight::set(socket, name, weight) {
        Ok(true) => return ExitCode::SUCCESS,
        Ok(false) => base::note!(
            "gantry-top: gantry-arbiter has no client {name:?}: gantry top shows their names"
        ),
        Err(error) => base::note!(
            "gantry-top: no arbiter at {} has changed the weight: {error}; is gantry-arbiter running with \
             this --socket, and is this its user or root?",
            socket.display()
        ),
    }
    ExitCode::FAILURE
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
    if let Some((name, weight)) = arguments.set_weight {
        return set_weight(&socket, &name, weight);
    }
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
            &[
                "",
                "--socket /s",
                "--set-weight 812/gpu=3",
                "man",
                "man /pages",
                "completions zsh",
            ],
            &[
                "--socket",
                "--socket /s man",
                "completions",
                "--set-weight gpu",
                "--set-weight gpu=0",
                "--set-weight =3",
            ],
        );
    }
}
