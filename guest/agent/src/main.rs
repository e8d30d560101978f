//! `gantry-agent`: gives a guest's applications their slices of the accelerator port.
//!
//! ```text
//!   application ─ hello ─> agent ─ hello in the slice, command ─> port ─> worker
//!               <─ hello, window, doorbells, place ─               (outside of this VM)
//! ```
//!
//! - `port`: the PCI function by its files in sysfs; no kernel module.
//! - `server`: the socket and its clients.
//! - `survive`: a device that goes away under a mapping does not end the agent.
//!
//! Who may connect to the socket decides who may use the accelerator. The files that an application
//! gets are those of the whole window and of all doorbells: sysfs has no file for a part of a BAR.
//! So the applications of one port trust each other as far as they do on a machine whose GPU they
//! share through one device node; those that must not get a port each (`--device`, and a socket of
//! their own). Nothing of this concerns the host, whose workers have one slice each.

mod port;
mod server;
mod survive;

use std::{path::PathBuf, process::ExitCode};

const USAGE: &str = "usage: gantry-agent [--socket PATH] [--device ADDRESS] [--group NAME]

Gives applications their slices of Gantry's accelerator ports.

  --socket PATH     where applications connect (/run/gantry/opencl.sock)
  --device ADDRESS  only the port at this PCI address, such as 0000:00:05.0 (all ports)
  --group NAME      the group that may connect; everybody may without it
  --version         print the version of agent and protocol";

/// What the command line says.
struct Options {
    socket: PathBuf,
    device: Option<String>,
    group: Option<String>,
}

fn options() -> Result<Options, String> {
    let mut options = Options {
        socket: "/run/gantry/opencl.sock".into(),
        device: None,
        group: None,
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word} needs a value\n{USAGE}"));
        match word.as_str() {
            "--socket" => options.socket = value()?.into(),
            "--device" => options.device = Some(value()?),
            "--group" => options.group = Some(value()?),
            "--version" => {
                return Err(format!(
                    "gantry-agent {}, protocol {}",
                    env!("CARGO_PKG_VERSION"),
                    gantry_remoting::protocol::VERSION
                ));
            }
            "--help" => return Err(USAGE.to_owned()),
            _ => return Err(format!("{word:?} is no option\n{USAGE}")),
        }
    }
    Ok(options)
}

fn main() -> ExitCode {
    let options = match options() {
        Ok(options) => options,
        Err(text) => {
            eprintln!("{text}");
            return ExitCode::from(2);
        }
    };
    survive::install();
    let error = match server::Server::new(&options.socket, options.device, options.group.as_deref())
    {
        Ok(server) => server.run(),
        Err(error) => error,
    };
    eprintln!("gantry-agent: {error}");
    let mut source = std::error::Error::source(&error);
    while let Some(cause) = source {
        eprintln!("  because {cause}");
        source = cause.source();
    }
    ExitCode::FAILURE
}
