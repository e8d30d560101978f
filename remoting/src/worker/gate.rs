//! The process behind a gate: one application after the other, each with a process of its own.
//!
//! What an application leaves behind goes with that process: handles, memory, the driver's state.

use std::{
    io,
    mem::ManuallyDrop,
    os::{
        fd::{FromRawFd, OwnedFd},
        unix::net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::Arc,
    thread,
};

use super::{
    lent::{Cpu, Drained},
    passive::{Offer, Passive},
    quota::Quota,
    server::cl,
};
use crate::{
    opencl::{Api, api},
    transport::{gate, messages},
};

/// What a process behind a gate offers.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// The OpenCL loader to open.
    #[arg(long, default_value = "libOpenCL.so.1", value_name = "FILE")]
    pub library: String,
    /// Part of the names of the devices that are offered; all by default.
    #[arg(
        long,
        default_value = "",
        hide_default_value = true,
        value_name = "NAME"
    )]
    pub device: String,
    /// Device memory in MiB that the application may have; all that there is by default.
    #[arg(
        long,
        default_value_t = 0,
        hide_default_value = true,
        value_name = "MIB"
    )]
    pub memory: u64,
    /// Carry calls out on this machine's own CPU, not on the application's: for drivers that have
    /// threads, as those for CPUs do.
    #[arg(long)]
    pub own_cpu: bool,
}

/// Why there is no serving behind a gate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The driver.
    #[error(transparent)]
    Driver(#[from] api::Error),
    /// The socket that stands for a gate.
    #[error("cannot listen on {path}: is another process there, or is the folder missing?")]
    Listen {
        /// Its path.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The connection that stands for a gate.
    #[error("the connection to the application failed")]
    Connection(#[source] io::Error),
    /// A process for an application.
    #[error("cannot start a process for an application")]
    Start(#[source] io::Error),
}

/// A worker whose driver is open.
fn open(options: &Options) -> Result<Passive, Error> {
    let api = Api::open(&options.library)?;
    // Drivers do much when they are first asked; nobody waits for it yet.
    let mut count = 0;
    cl!(
        api,
        clGetPlatformIDs(0, std::ptr::null_mut(), &raw mut count)
    );
    Ok(Passive::new(Offer {
        api: Arc::new(api),
        device: options.device.clone(),
        quota: Quota::new(options.memory.saturating_mul(1 << 20)),
        own: options.own_cpu,
    }))
}

/// Accepts applications by messages, for ever; `program` with the arguments `connected` serves
/// each.
pub fn listen(path: PathBuf, program: &Path, options: &Options) -> Result<(), Error> {
    if UnixStream::connect(&path).is_err() {
        // A socket that nobody listens on is left from a process that was killed.
        let _ = std::fs::remove_file(&path);
    }
    let listener = UnixListener::bind(&path).map_err(|source| Error::Listen { path, source })?;
    loop {
        let (stream, _) = listener.accept().map_err(Error::Connection)?;
        let mut command = Command::new(program);
        command.arg("connected");
        command.args(["--library", &options.library]);
        command.args(["--memory", &options.memory.to_string()]);
        command.args(["--device", &options.device]);
        if options.own_cpu {
            command.arg("--own-cpu");
        }
        // The host's loader must not find this machine's own remoting driver.
        command.env("GANTRY_OPENCL", "off");
        command.stdin(Stdio::from(OwnedFd::from(stream)));
        let mut child = command.spawn().map_err(Error::Start)?;
        thread::spawn(move || child.wait());
    }
}

/// Serves the application whose connection is the standard input.
pub fn connected(options: &Options) -> Result<(), Error> {
    let mut passive = open(options)?;
    // SAFETY: the parent has put it there, and it stays open.
    let stream = ManuallyDrop::new(unsafe { UnixStream::from_raw_fd(libc::STDIN_FILENO) });
    let handler = |index, shared| match index {
        gate::GREET => {
            // SAFETY: the memory is mapped until the last message, and nobody else uses it here.
            let served = unsafe { passive.greet(shared) };
            if served { gate::EMPTY } else { gate::ENDED }
        }
        gate::DRAIN => match passive.drain(Cpu::Lent) {
            // A real gate wakes the process for that.
            Some(Drained::Own) => reply(passive.drain(Cpu::Own)),
            drained => reply(drained),
        },
        _ => gate::ENDED,
    };
    messages::serve(&stream, handler).map_err(Error::Connection)
}

/// What a handler returns.
fn reply(drained: Option<Drained>) -> u64 {
    match drained {
        Some(Drained::Empty) => gate::EMPTY,
        // Nothing is left to the own CPU there.
        Some(Drained::More | Drained::Own) => gate::MORE,
        None => gate::ENDED,
    }
}
