//! `gantry-arbiter`: shares this machine's accelerator among virtual machines by weight.

use std::{path::PathBuf, process::ExitCode, time::Duration};

use clap::Parser;
use gpu_mediator::{
    arbiter::{Arbiter, Error},
    policy::Name,
};

/// Shares one accelerator among the workers of virtual machines.
#[derive(Parser)]
#[command(name = "gantry-arbiter", version)]
struct Arguments {
    /// The socket at which workers' pools find it; its figures are at PATH.status.
    #[arg(long, value_name = "PATH")]
    socket: PathBuf,
    /// Who gets the device: fifo, credit, band, fair or fair-preemptive.
    #[arg(long, default_value = "fair", value_name = "NAME")]
    policy: Name,
    /// Milliseconds for which one request may have the device; whoever takes longer loses its
    /// worker. 0: no limit, so that a single client can keep the device for ever.
    #[arg(long, value_name = "MS", default_value_t = 10_000)]
    limit: u64,
}

/// Warnings go to the error output, a line each.
struct Lines;

impl log::Log for Lines {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        eprintln!("gantry-arbiter: {}", record.args());
    }

    fn flush(&self) {}
}

fn run() -> Result<(), Error> {
    let arguments = Arguments::parse();
    let limit = (arguments.limit > 0).then(|| Duration::from_millis(arguments.limit));
    Arbiter::new(&arguments.socket, arguments.policy, limit)?.run()
}

fn main() -> ExitCode {
    if log::set_logger(&Lines).is_ok() {
        log::set_max_level(log::LevelFilter::Info);
    }
    let Err(error) = run() else {
        return ExitCode::SUCCESS;
    };
    eprintln!("gantry-arbiter: {error}");
    let mut source = std::error::Error::source(&error);
    while let Some(cause) = source {
        eprintln!("  because {cause}");
        source = cause.source();
    }
    ExitCode::FAILURE
}
