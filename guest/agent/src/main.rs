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

use std::{io::Write, path::PathBuf, process::ExitCode};

const USAGE: &str = "usage: gantry-agent [--socket PATH] [--device ADDRESS] [--group NAME]

Gives applications their slices of Gantry's accelerator ports.

  --socket PATH     where applications connect (/run/gantry/opencl.sock)
  --device ADDRESS  only the port at this PCI address, such as 0000:00:05.0 (all ports)
  --group NAME      the group that may connect; everybody may without it
  -h, --help        print this text
  -V, --version     print the version of agent and protocol";

/// What the command line says.
#[derive(Debug)]
struct Options {
    socket: PathBuf,
    device: Option<String>,
    group: Option<String>,
}

/// What the command line asks for.
#[derive(Debug)]
enum Asked {
    /// To serve.
    Serve(Options),
    /// To be told something, and nothing else.
    Say(String),
}

fn asked(mut words: impl Iterator<Item = String>) -> Result<Asked, String> {
    let mut options = Options {
        socket: "/run/gantry/opencl.sock".into(),
        device: None,
        group: None,
    };
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word} needs a value\n{USAGE}"));
        match word.as_str() {
            "--socket" => options.socket = value()?.into(),
            "--device" => options.device = Some(value()?),
            "--group" => options.group = Some(value()?),
            "--version" | "-V" => {
                return Ok(Asked::Say(format!(
                    "gantry-agent {}, protocol {}",
                    env!("CARGO_PKG_VERSION"),
                    gantry_remoting::protocol::VERSION
                )));
            }
            "--help" | "-h" => return Ok(Asked::Say(USAGE.to_owned())),
            _ => return Err(format!("{word:?} is no option\n{USAGE}")),
        }
    }
    Ok(Asked::Serve(options))
}

fn main() -> ExitCode {
    let options = match asked(std::env::args().skip(1)) {
        Ok(Asked::Serve(options)) => options,
        Ok(Asked::Say(text)) => {
            // If nobody listens, nobody wants to know.
            let _ = writeln!(std::io::stdout(), "{text}");
            return ExitCode::SUCCESS;
        }
        Err(text) => {
            eprintln!("gantry-agent: {text}");
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn ask(line: &str) -> Result<Asked, String> {
        asked(line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn who_asks_for_help_or_the_version_has_made_no_mistake() {
        for (line, part) in [
            ("--help", "usage:"),
            ("-h", "--socket PATH"),
            ("--version", "protocol"),
            ("--group render -V", "gantry-agent "),
        ] {
            match ask(line) {
                Ok(Asked::Say(text)) => assert!(text.contains(part), "{text}"),
                other => panic!("{line}: {other:?}"),
            }
        }
        assert!(ask("--colour").unwrap_err().contains("is no option"));
        assert!(ask("--socket").unwrap_err().contains("needs a value"));
    }

    #[test]
    fn what_is_served_is_said_by_options() {
        let Ok(Asked::Serve(options)) = ask("--device 0000:00:05.0 --group render") else {
            panic!("it does not serve");
        };
        assert_eq!(options.socket, PathBuf::from("/run/gantry/opencl.sock"));
        assert_eq!(options.device.as_deref(), Some("0000:00:05.0"));
        assert_eq!(options.group.as_deref(), Some("render"));
    }
}
