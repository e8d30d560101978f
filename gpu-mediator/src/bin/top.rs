//! `gantry-top`: shows who uses a shared accelerator.

#![cfg_attr(not(test), deny(clippy::print_stderr, clippy::print_stdout))]

use std::{
    io,
    path::{Path, PathBuf},
    process::ExitCode,
};

use base::{Output, paths::ARBITER_SOCKET};
use clap::{CommandFactory, Parser};
use gpu_mediator::top;
use manual::Manual;
use remoting_turns::weight::{self, Change};

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
    /// Give a client of gantry-arbiter another weight, 1 to 10,000 or idle, for as long as the arbiter remembers it, and show
    /// nothing.
    #[arg(long, value_name = "CLIENT=WEIGHT", value_parser = weighed, conflicts_with = "set_latency")]
    set_weight: Option<(String, Change)>,
    /// Have a client of gantry-arbiter wait at most for so many milliseconds, 1 to 1000 or off, for time slices of others, for as
    /// long as the arbiter remembers it, and show nothing.
    #[arg(long, value_name = "CLIENT=MS", value_parser = quick)]
    set_latency: Option<(String, Change)>,
}

/// A client's name, which may contain `=`, and a value.
fn named<'a>(text: &'a str, usage: &str) -> Result<(String, &'a str), String> {
    match text.rsplit_once('=') {
        None => Err(usage.to_owned()),
        Some(("", _)) => Err("name a client, as gantry top shows it".to_owned()),
        Some((name, value)) => Ok((name.to_owned(), value)),
    }
}

fn weighed(text: &str) -> Result<(String, Change), String> {
    let (name, weight) = named(text, "use CLIENT=WEIGHT")?;
    let weight = weight::parse(weight).map_err(|error| error.to_string())?;
    Ok((name, Change::Weight(weight)))
}

fn quick(text: &str) -> Result<(String, Change), String> {
    let (name, latency) = named(text, "use CLIENT=MS")?;
    let number = latency.parse().ok();
    let latency = match latency {
        "off" => 0,
        _ => number
            .filter(|number| (1..=1000).contains(number))
            .ok_or("invalid latency: use 1 to 1000, or off")?,
    };
    Ok((name, Change::Latency(latency)))
}

/// Changes what a client may expect.
fn change(socket: &Path, name: &str, change: Change) -> Result<(), String> {
    match weight::set(socket, name, change) {
        Ok(true) => Ok(()),
        Ok(false) => Err(format!(
            "gantry-arbiter has no client {name:?}: gantry top shows their names"
        )),
        Err(error) => Err(format!(
            "no arbiter at {} has changed that: {error}; is gantry-arbiter running with this --socket, is this its user or \
             root, and has no idle client a latency?",
            socket.display()
        )),
    }
}

fn main() -> ExitCode {
    base::limits::file_size_is_an_error();
    let arguments = Arguments::parse();
    if let Some(manual) = arguments.manual {
        let written = manual.write(Arguments::command(), &mut Output::standard());
        return base::note::end("gantry-top", written);
    }
    let socket = arguments.socket;
    if let Some((name, to)) = arguments.set_weight.or(arguments.set_latency) {
        return base::note::end("gantry-top", change(&socket, &name, to));
    }
    let shown = top::run(&socket).map_err(|error| match error.kind() {
        io::ErrorKind::Unsupported => error.to_string(),
        _ => format!(
            "cannot show who shares a device at {}: {error}; is gantry-arbiter or gantry-gpu running with this \
             --socket, and is this its user or root?",
            socket.display()
        ),
    });
    base::note::end("gantry-top", shown)
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
                "--set-weight 812/gpu=idle",
                "--set-latency 812/gpu=2",
                "--set-latency 812/gpu=off",
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
                "--set-latency gpu=0",
                "--set-latency gpu=2 --set-weight gpu=2",
            ],
        );
    }
}
