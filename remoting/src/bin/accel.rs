//! `gantry-accel`: the pool of worker processes, and the workers.

use std::{path::PathBuf, process::ExitCode};

use clap::{Parser, Subcommand};
use gantry_remoting::worker::pool;

/// Serves this machine's accelerators to applications elsewhere.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: Role,
}

#[derive(Subcommand)]
enum Role {
    /// Listen for applications and keep workers ready for them.
    Serve {
        /// The socket to listen on.
        #[arg(long, value_name = "PATH")]
        socket: PathBuf,
        /// How many workers wait for applications.
        #[arg(long, default_value_t = 2, value_name = "COUNT")]
        spare: usize,
        #[command(flatten)]
        options: pool::Options,
    },
    /// Serve one application (started by `serve`).
    #[command(hide = true)]
    Worker {
        #[command(flatten)]
        options: pool::Options,
    },
}

fn run() -> Result<(), Box<dyn std::error::Error>> {
    match Arguments::parse().command {
        Role::Serve {
            socket,
            spare,
            options,
        } => pool::run(socket, spare, &std::env::current_exe()?, &options)?,
        Role::Worker { options } => pool::work(&options)?,
    }
    Ok(())
}

fn main() -> ExitCode {
    let Err(error) = run() else {
        return ExitCode::SUCCESS;
    };
    eprintln!("gantry-accel: {error}");
    let mut source = error.source();
    while let Some(cause) = source {
        eprintln!("  because {cause}");
        source = cause.source();
    }
    ExitCode::FAILURE
}
