//! `gantry-top`: watches who uses a shared accelerator.

use std::{
    io::{self, Write},
    path::PathBuf,
    process::ExitCode,
};

use clap::Parser;
use gpu_mediator::{arbiter::status, metrics, top};

/// Shows the clients of an arbiter, their parts of the device and how long they wait for it.
#[derive(Parser)]
#[command(name = "gantry-top", version)]
struct Arguments {
    /// The arbiter's socket.
    #[arg(long, value_name = "PATH")]
    socket: PathBuf,
    /// Print the figures once, as Prometheus' text, and end.
    #[arg(long)]
    metrics: bool,
}

fn run(arguments: &Arguments) -> io::Result<()> {
    if !arguments.metrics {
        return top::run(&arguments.socket);
    }
    let status = status::read(&arguments.socket)?;
    io::stdout().write_all(metrics::render(&status).as_bytes())
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!(
                "gantry-top: cannot show the arbiter at {}: {error}; is gantry-arbiter running \
                 with this --socket?",
                arguments.socket.display()
            );
            ExitCode::FAILURE
        }
    }
}
