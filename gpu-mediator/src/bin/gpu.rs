//! `gantry-gpu`: shares one GPU among virtual machines, each with its guest's own driver.

#![cfg_attr(not(test), deny(clippy::print_stderr, clippy::print_stdout))]

use std::{path::PathBuf, process::ExitCode, time::Duration};

use base::{
    Output,
    confine::{ONE_THREAD, confine},
};
use clap::{CommandFactory, Parser, Subcommand};
use gpu_mediator::{
    gpu::server::{Server, Settings},
    policy::Name,
};
use manual::Manual;

/// Shares a GPU among virtual machines whose guests use it with their own drivers.
///
/// Each virtual machine started with --gpu has its own part of the GPU's memory and its own
/// channels. None can access another's, and turns are given by weight.
#[derive(Parser)]
#[command(
    name = "gantry-gpu",
    version,
    disable_help_subcommand = true,
    after_help = EXAMPLES
)]
struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Serves virtual machines until the connection to the GPU is lost.
    Serve(Serve),
    #[command(flatten)]
    Manual(Manual),
}

#[derive(clap::Args)]
struct Serve {
    /// Path of the socket of the GPU's server: gantry-gf100 --trap.
    #[arg(long, value_name = "PATH")]
    model: PathBuf,
    /// Path of the socket on which to serve virtual machines.
    #[arg(long, value_name = "PATH")]
    socket: PathBuf,
    /// Policy by which virtual machines get the GPU: fifo, credit, band, fair or fair-preemptive.
    #[arg(long, default_value = "fair", value_name = "NAME")]
    policy: Name,
    /// Maximum time in milliseconds for which a channel may have the GPU without completing
    /// anything; after that, its driver gets an error.
    #[arg(long, value_name = "MS", default_value_t = 10_000)]
    limit: u64,
    /// Do not confine the process (Landlock, seccomp).
    #[arg(long)]
    no_sandbox: bool,
    /// Log more: -v logs errors of guests' channels.
    #[arg(short, action = clap::ArgAction::Count)]
    verbose: u8,
}

const EXAMPLES: &str = "Examples:
  gantry-gf100 --socket /run/gf100.sock --vram 1G --trap
  gantry-gpu serve --model /run/gf100.sock --socket /run/gpu.sock
  gantry --kernel vmlinuz --memory size=1G,shared=on --gpu socket=/run/gpu.sock,vram=256M";

/// System calls for serving; the fronts' files are also checked.
const CALLS: &[&[libc::c_long]] = &[ONE_THREAD, &[libc::SYS_fstatfs]];

fn run(arguments: Arguments) -> Result<(), Box<dyn std::error::Error>> {
    let serve = match arguments.what {
        What::Manual(manual) => {
            return Ok(manual.write(Arguments::command(), &mut Output::standard())?);
        }
        What::Serve(serve) => serve,
    };
    let level = match serve.verbose {
        0 => log::LevelFilter::Info,
        _ => log::LevelFilter::Debug,
    };
    base::note::log_records("gantry-gpu", level);
    let settings = Settings {
        policy: serve.policy,
        limit: Duration::from_millis(serve.limit.max(1)),
    };
    let mut server = Server::new(&serve.model, &serve.socket, settings)?;
    if !serve.no_sandbox {
        confine(CALLS)?;
    }
    log::info!("serving at {}", serve.socket.display());
    Ok(server.run()?)
}

fn main() -> ExitCode {
    base::limits::file_size_is_an_error();
    base::note::end("gantry-gpu", run(Arguments::parse()))
}

#[cfg(test)]
mod tests {
    use base::memfd::sealed;
    use gpu_mediator::gpu::memory::is_safe_to_map;

    use super::*;

    #[test]
    fn a_confined_process_can_tell_whether_memory_is_safe_to_map() {
        let file = sealed(c"ram", 4096).expect("there is room");
        let confined = std::thread::spawn(move || {
            confine(CALLS).expect("the kernel has both");
            is_safe_to_map(&file)
        });
        assert!(confined.join().expect("it has not failed"));
    }

    #[test]
    fn the_command_line_makes_sense() {
        manual::check::<Arguments>(
            &[
                "serve --model /m --socket /s",
                "serve --model /m --socket /s --policy band --limit 5 -v --no-sandbox",
                "man",
                "completions zsh",
            ],
            &[
                "",
                "serve --socket /s",
                "completions",
                "serve --model /m --socket /s --policy no",
            ],
        );
    }
}
