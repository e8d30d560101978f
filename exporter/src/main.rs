//! `gantry-exporter`: metrics of a machine's VMs, arbiters and pools for Prometheus.

#![cfg_attr(not(test), deny(clippy::print_stderr, clippy::print_stdout))]

use std::{
    io::{self, Write},
    net::{SocketAddr, TcpListener},
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
};

use base::{
    Output,
    confine::{self, Files, ONE_THREAD, THREADS, confine_except},
    limits::{Limit, file_size_is_an_error},
    paths::METRICS,
};
use clap::{CommandFactory, Parser};
use gantry_exporter::{
    process::Processes,
    scrape::Scraper,
    serve::{self, Hosts},
    source::Source,
};
use libc::c_long;
use manual::Manual;

/// What Tokio, listing folders, reading /proc and asking sources need in addition to [`ONE_THREAD`] and [`THREADS`].
const CALLS: &[c_long] = &[
    libc::SYS_connect,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_wait,
    libc::SYS_getdents64,
    libc::SYS_getsockopt,
    libc::SYS_lseek,
    libc::SYS_openat,
    libc::SYS_setsockopt,
    libc::SYS_socket,
];

/// Serves metrics of this machine's VMs, arbiters and pools to Prometheus, at /metrics.
#[derive(Parser)]
#[command(
    name = "gantry-exporter",
    version,
    args_conflicts_with_subcommands = true,
    disable_help_subcommand = true
)]
struct Arguments {
    #[command(subcommand)]
    manual: Option<Manual>,
    /// Address and port at which to serve.
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:9470")]
    listen: SocketAddr,
    /// Serve at an address that other machines can reach: whoever reaches it reads names and figures, without a
    /// password and unencrypted.
    #[arg(long)]
    insecure_public: bool,
    /// Folder of sockets to ask: NAME.vm of gantry, NAME.arbiter of gantry-arbiter or gantry-gpu, NAME.pool of
    /// gantry-accel serve (--metrics-socket). Can be repeated.
    #[arg(long, value_name = "FOLDER", default_values = [METRICS])]
    folder: Vec<PathBuf>,
    /// Socket to ask, wherever it is, with what is behind it: vm, arbiter or pool. Can be repeated.
    #[arg(long, value_name = "KIND=PATH")]
    source: Vec<Source>,
    /// Print the metrics once, and exit.
    #[arg(long)]
    once: bool,
}

/// The exporter cannot run.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(
        "anybody who reaches {0} reads names and figures: serve at 127.0.0.1 behind a proxy with TLS, or add \
         --insecure-public"
    )]
    Public(SocketAddr),
    #[error("cannot listen at {address}")]
    Listen {
        address: SocketAddr,
        source: io::Error,
    },
    #[error("cannot read /proc")]
    Proc(#[source] io::Error),
    #[error("cannot start")]
    Start(#[source] io::Error),
    #[error("cannot confine itself")]
    Confine(#[from] confine::Error),
    #[error("cannot write what was asked for")]
    Output(#[source] io::Error),
}

fn run(arguments: Arguments) -> Result<(), Error> {
    if let Some(manual) = arguments.manual {
        let written = manual.write(Arguments::command(), &mut Output::standard());
        return written.map_err(Error::Output);
    }
    let address = arguments.listen;
    if !address.ip().is_loopback() && !arguments.insecure_public {
        return Err(Error::Public(address));
    }
    if let Err(error) = Limit::raise() {
        base::note!("gantry-exporter: cannot have more files open: {error}");
    }
    let processes = Processes::open().map_err(Error::Proc)?;
    let scraper = Arc::new(Scraper::new(arguments.folder, arguments.source, processes));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(Error::Start)?;
    let listener = match arguments.once {
        true => None,
        false => Some(listen(address).map_err(|source| Error::Listen { address, source })?),
    };
    let folders = [
        (Path::new("/"), Files::List),
        (Path::new("/proc"), Files::Read),
    ];
    confine_except(&folders, &[ONE_THREAD, THREADS, CALLS])?;
    let hosts = match arguments.insecure_public {
        true => Hosts::Any,
        false => Hosts::Local,
    };
    let result = runtime.block_on(async {
        let Some(listener) = listener else {
            let text = scraper.text().await;
            let written = Output::standard().write_all(&text);
            return written.map_err(Error::Output);
        };
        let (listener, here) = listener;
        let listener = tokio::net::TcpListener::from_std(listener).map_err(Error::Start)?;
        base::note!("gantry-exporter: serving at http://{here}/metrics");
        serve::run(listener, scraper, hosts).await;
        Ok(())
    });
    // A thread that asks a source may hang.
    runtime.shutdown_background();
    result
}

/// Listens, and tells at which port.
fn listen(address: SocketAddr) -> io::Result<(TcpListener, SocketAddr)> {
    let listener = TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    let here = listener.local_addr()?;
    Ok((listener, here))
}

fn main() -> ExitCode {
    file_size_is_an_error();
    base::note::end("gantry-exporter", run(Arguments::parse()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_makes_sense() {
        manual::check::<Arguments>(
            &[
                "",
                "--listen [::1]:0 --folder /a --folder /b --source vm=/s --once",
                "--listen 0.0.0.0:9470 --insecure-public",
                "man",
                "man /pages",
                "completions zsh",
            ],
            &[
                "--listen",
                "--listen x",
                "--source s",
                "--once man",
                "completions",
            ],
        );
    }

    #[test]
    fn a_public_address_is_refused_unless_it_is_asked_for() {
        let words = ["gantry-exporter", "--listen", "0.0.0.0:0"];
        let refused = run(Arguments::parse_from(words)).unwrap_err();
        assert!(matches!(refused, Error::Public(_)), "{refused}");
    }
}
