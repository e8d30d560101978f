//! `gantry-arbiter`: shares this machine's accelerator among virtual machines by weight.

#![cfg_attr(not(test), deny(clippy::print_stderr, clippy::print_stdout))]

use std::{path::PathBuf, process::ExitCode, time::Duration};

use base::{Output, limits::file_size_is_an_error, paths::ARBITER_SOCKET};
use clap::{CommandFactory, Parser, value_parser};
use gpu_mediator::{arbiter::Arbiter, policy::Name, scheduler::LONGEST_PAUSE, status};
use manual::Manual;
use remoting_turns::pauses::LONGEST;

/// Shares one accelerator among the workers of virtual machines.
#[derive(Parser)]
#[command(
    name = "gantry-arbiter",
    version,
    args_conflicts_with_subcommands = true,
    disable_help_subcommand = true
)]
struct Arguments {
    #[command(subcommand)]
    manual: Option<Manual>,
    /// Path of the socket for the workers' pools; its status is at PATH.status.
    #[arg(long, default_value = ARBITER_SOCKET, value_name = "PATH")]
    socket: PathBuf,
    /// Path of a further socket for its status, which the group of the socket's file can read, too: NAME.arbiter in a
    /// folder of gantry-exporter.
    #[arg(long, value_name = "PATH")]
    metrics_socket: Option<PathBuf>,
    /// Policy by which clients get the device: ledger, which sets the GPU's time slices where all workers can, and gives turns
    /// as fair otherwise; or in turns, by fair, band, fair-preemptive, credit or fifo.
    #[arg(long, default_value = "ledger", value_name = "NAME")]
    policy: Name,
    /// Maximum time in milliseconds for which one request may have the device in turns; a worker that exceeds it is killed. 0
    /// means no limit, so a single client can keep the device forever. With time slices, no request is too long, and a worker
    /// that does not stop for so long (10 s for 0) is killed.
    #[arg(long, value_name = "MS", default_value_t = 10_000)]
    limit: u64,
    /// Maximum time in milliseconds, up to 200, for which the device is kept for a client between
    /// two batches, if the client is usually back by then and its share is due. 0 disables this.
    #[arg(
        long,
        value_name = "MS",
        default_value_t = LONGEST_PAUSE.as_millis() as u64,
        value_parser = value_parser!(u64).range(..=LONGEST.as_millis() as u64)
    )]
    longest_pause: u64,
}

fn run() -> Result<(), Box<dyn std::error::Error>> {
    let arguments = Arguments::parse();
    if let Some(manual) = arguments.manual {
        return Ok(manual.write(Arguments::command(), &mut Output::standard())?);
    }
    let limit = (arguments.limit > 0).then(|| Duration::from_millis(arguments.limit));
    let mut arbiter = Arbiter::new(&arguments.socket, arguments.policy, limit)?;
    if let Some(path) = &arguments.metrics_socket
        && let Err(error) = status::relay(&arguments.socket, path)
    {
        // Others may write to the folder of metrics sockets, and may have taken the name.
        log::warn!("metrics are not served at {}: {error}", path.display());
    }
    log::info!("serving at {}", arguments.socket.display());
    arbiter.set_longest_pause(Duration::from_millis(arguments.longest_pause));
    Ok(arbiter.run()?)
}

fn main() -> ExitCode {
    file_size_is_an_error();
    base::note::log_records("gantry-arbiter", log::LevelFilter::Info);
    base::note::end("gantry-arbiter", run())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_makes_sense() {
        manual::check::<Arguments>(
            &[
                "",
                "--socket /s --metrics-socket /m",
                "man",
                "man /pages",
                "completions zsh",
            ],
            &["--socket", "--socket /s man", "completions"],
        );
    }
}
