//! `gantry-gf100`: serves a model of NVIDIA's GF100 by vfio-user.

#![cfg_attr(not(test), deny(clippy::print_stderr, clippy::print_stdout))]

use std::{path::PathBuf, process::ExitCode};

use base::Output;
use clap::{CommandFactory, Parser};
use gf100::device::{
    gpu::VRAM_BYTES,
    server::{Settings, serve},
};
use manual::Manual;

/// Serves a model of a GPU, NVIDIA's GF100 of 2010, to one virtual machine.
///
/// A Linux guest's own driver, nouveau, runs on it: memory, channels, copies, semaphores and
/// interrupts work; there is no display, nothing is drawn, and of compute kernels simple integer ones run.
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
    /// The socket at which the virtual machine finds it.
    #[arg(long, required = true, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Memory of the GPU, 64M to 32G. What is not used takes no room.
    #[arg(long, default_value = "256M", value_name = "SIZE", value_parser = size)]
    vram: u64,
    /// Have each access to BAR 3 and to BAR 0's window be a message, instead of memory that both
    /// sides map: slower by far, and exact also where a page is shown twice.
    #[arg(long)]
    trap: bool,
    /// Keep access to files and all system calls, where a kernel or a debugger needs it.
    #[arg(long)]
    no_sandbox: bool,
    /// Log more: -v what clients do, -vv registers that are not known.
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

/// A line each to the error output.
struct Lines;

impl log::Log for Lines {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        base::note!("gantry-gf100: {}", record.args());
    }

    fn flush(&self) {}
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
    };
    Ok(serve(&socket, settings)?)
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if log::set_logger(&Lines).is_ok() {
        log::set_max_level(match arguments.verbose {
            0 => log::LevelFilter::Info,
            1 => log::LevelFilter::Debug,
            _ => log::LevelFilter::Trace,
        });
    }
    let Err(error) = run(arguments) else {
        return ExitCode::SUCCESS;
    };
    base::note::error("gantry-gf100", &*error);
    ExitCode::FAILURE
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
