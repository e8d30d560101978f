//! `gantry-tunnel`: TLS for migrations of VMs.

#![cfg_attr(not(test), deny(clippy::print_stderr, clippy::print_stdout))]

use std::{
    io,
    path::{Path, PathBuf},
    process::ExitCode,
};

use base::{
    Output,
    limits::{Limit, file_size_is_an_error},
    paths::TUNNEL_SOCKET,
};
use clap::{CommandFactory, Parser};
use gantry_tunnel::serve;
use manual::Manual;

/// Provides the VMMs of this user with TLS 1.3 for their migrations. Keys stay in this process.
#[derive(Parser)]
#[command(
    name = "gantry-tunnel",
    version,
    args_conflicts_with_subcommands = true,
    disable_help_subcommand = true
)]
struct Arguments {
    #[command(subcommand)]
    manual: Option<Manual>,
    /// Unix socket at which VMMs request tunnels.
    #[arg(long, value_name = "PATH", default_value = TUNNEL_SOCKET)]
    socket: PathBuf,
}

fn run(socket: &Path) -> io::Error {
    // Each tunnel takes two descriptors.
    if let Err(error) = Limit::raise() {
        base::note!("gantry-tunnel: cannot have more files open: {error}");
    }
    match serve::listen(socket) {
        Ok(listener) => {
            base::note!("gantry-tunnel: serving at {}", socket.display());
            serve::run(&listener)
        }
        Err(error) => error,
    }
}

fn main() -> ExitCode {
    file_size_is_an_error();
    let Arguments { manual, socket } = Arguments::parse();
    if let Some(manual) = manual {
        let written = manual.write(Arguments::command(), &mut Output::standard());
        return base::note::end("gantry-tunnel", written);
    }
    let error = run(&socket);
    base::note!(
        "gantry-tunnel: cannot serve at {}: {error}",
        socket.display()
    );
    ExitCode::FAILURE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_makes_sense() {
        let taken = ["", "--socket /s", "man", "man /pages", "completions zsh"];
        manual::check::<Arguments>(&taken, &["--socket", "--socket /s man", "serve"]);
    }
}
