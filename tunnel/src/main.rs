//! `gantry-tunnel`: TLS for migrations of VMs.

use std::{path::PathBuf, process::ExitCode};

use clap::Parser;

/// Serves the VMMs of this user with TLS 1.3 for their migrations. Keys stay in this process.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Where VMMs ask for tunnels.
    #[arg(long, value_name = "PATH", default_value = "/run/gantry-tunnel/socket")]
    socket: PathBuf,
}

fn main() -> ExitCode {
    let Arguments { socket } = Arguments::parse();
    let error = match gantry_tunnel::serve::listen(&socket) {
        Ok(listener) => gantry_tunnel::serve::run(&listener),
        Err(error) => error,
    };
    eprintln!(
        "gantry-tunnel: cannot serve at {}: {error}",
        socket.display()
    );
    ExitCode::FAILURE
}
