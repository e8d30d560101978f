//! `gantry-gf100`: serves a model of NVIDIA's GF100 over vfio-user.

#![cfg_attr(not(test), deny(clippy::print_stderr, clippy::print_stdout))]

use std::{path::PathBuf, process::ExitCode};

use base::Output;
use clap::{CommandFactory, Parser};
use gf100::device::{
    gpu::{Delays, VRAM_BYTES},
    server::{Settings, serve},
};
use manual::Manual;

/// Serves a model of a GPU, NVIDIA's GF100 of 2010, to one virtual machine.
///
/// The guest's own Linux driver, nouveau, runs on it: memory, channels, copies, semaphores and
/// interrupts work. There is no display, and nothing is drawn. Of compute kernels, only simple
/// integer ones run.
#[derive(Parser)]
#[command(
    name = "gantry-gf100",
    version,
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    disable_help_subcommand = true,
    after_help = EXAMPLES
)]
struct Arguments {
    #[command(subcommand)]
    manual: Option<Manual>,
    /// Path of the socket on which to serve the virtual machine.
    #[arg(long, required = true, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Size of the GPU's memory, 64M to 32G. Unused memory is not allocated.
    #[arg(long, default_value = "256M", value_name = "SIZE", value_parser = size)]
    vram: u64,
    /// Forward each access to BAR 3 and to BAR 0's window as a message instead of mapping shared
    /// memory. Much slower, but exact even where a page is mapped twice.
    #[arg(long)]
    trap: bool,
    /// Keep access to files and all system calls, for kernels or debuggers that need it.
    #[arg(long)]
    no_sandbox: bool,
    /// Log more: -v logs what clients do, -vv also unknown registers.
    #[arg(short, action = clap::ArgAction::Count)]
    verbose: u8,
}

const EXAMPLES: &str = "Examples:
  gantry-gf100 --socket /run/gpu.sock --vram 1G
  gantry --kernel vmlinuz --memory size=1G,shared=on --user-device socket=/run/gpu.sock";

/// A size in MiB or GiB.
fn size(text: &str) -> Result<u64, String> {
    let unit = |digits: &str, shift: u32| {
        let number: u64 = digits.parse().ok()?;
        number.checked_mul(1 << shift)
    };
    let bytes = match (text.strip_suffix(['M', 'm']), text.strip_suffix(['G', 'g'])) {
        (Some(digits), _) => unit(digits, 20),
        (_, Some(digits)) => unit(digits, 30),
        _ => None,
    };
    bytes
        .filter(|bytes| VRAM_BYTES.contains(bytes))
        .ok_or_else(|| format!("{text} is not between 64M and 32G"))
}

fn run(arguments: Arguments) -> Result<(), Box<dyn std::error::Error>> {
    if let Some(manual) = arguments.manual {
        return Ok(manual.write(Arguments::command(), &mut Output::standard())?);
    }
    let socket = arguments.socket.unwrap_or_default();
    let settings = Settings {
        vram: arguments.vram,
        map: !arguments.trap,
        confine: !arguments.no_sandbox,
        delays: Delays::default(),
    };
    Ok(serve(&socket, settings)?)
}

fn main() -> ExitCode {
    base::limits::file_size_is_an_error();
    let arguments = Arguments::parse();
    let level = match arguments.verbose {
        0 => log::LevelFilter::Info,
        1 => log::LevelFilter::Debug,
        _ => log::LevelFilter::Trace,
    };
    base::note::log_records("gantry-gf100", level);
    base::note::end("gantry-gf100", run(arguments))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_makes_sense() {
        manual::check::<Arguments>(
            &[
                "--socket /s",
                "--socket /s --vram 1G --trap --no-sandbox -vv",
                "man",
                "man /pages",
                "completions zsh",
            ],
            &[
                "",
                "--socket /s --vram 1M",
                "--socket /s man",
                "completions",
            ],
        );
    }
}
