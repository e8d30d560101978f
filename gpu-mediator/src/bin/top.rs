//! `gantry-top`: watches who uses a shared accelerator.

use std::{path::PathBuf, process::ExitCode};

use clap::Parser;

/// Shows the clients of an arbiter, their parts of the device and how long they wait for it.
#[derive(Parser)]
#[command(name = "gantry-top", version)]
struct Arguments {
    /// The arbiter's socket.
    #[arg(long, value_name = "PATH")]
    socket: PathBuf,
}

fn main() -> ExitCode {
    let socket = Arguments::parse().socket;
    match gpu_mediator::top::run(&socket) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!(
                "gantry-top: cannot show the arbiter at {}: {error}; is gantry-arbiter running \
                 with this --socket?",
                socket.display()
            );
            ExitCode::FAILURE
        }
    }
}
