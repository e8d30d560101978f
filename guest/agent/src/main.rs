//! `gantry-agent`: gives a guest's applications their slices of the accelerator port.
//!
//! ```text
//!   application ─ hello ─> agent ─ hello in the slice, command ─> port ─> worker
//!               <─ hello, window, doorbells, alarm, place ─        (outside of this VM)
//! ```
//!
//! - `port`: the PCI function, through its files in sysfs; Gantry needs no kernel module. `interrupts`: wakes those
//!   that wait for a long time.
//! - `server`: the socket and its clients; `removals`: events of devices that appear and disappear.
//! - `local_pool`: this guest's own pool, on a device that was passed through; `seats`: applications that move between
//!   it and the port; `tracked`: devices that leave and come back; `holders`: other processes that use them.
//! - `native`: programs that use NVIDIA's own libraries (native contexts), through a port of their own.
//! - `children`: the ends of processes that this one has started.
//! - `adopt`: Gantry's CUDA libraries in a Python virtual environment.
//! - `driver`: NVIDIA's user-mode driver, on a disk that the host provides.
//! - `file_error`: errors of file operations.
//! - `survive`: keeps the agent alive when a device is removed under a mapping, and when a file becomes too large.
//! - `setup`: installs this program, its unit and the OpenCL driver, and removes them; `carried`: those files, all of
//!   which are contained in this program; `place`: places and removes files atomically.
//!
//! Access to the socket is access to the accelerator. The files that an application gets cover the whole window and all
//! doorbells: sysfs has no file for a part of a BAR. So the applications of one port have to trust each other as much
//! as on a machine on which they share a GPU through one device node. Those that must not trust each other get a port
//! each (`--device`, and a separate socket). The host is not affected: each of its workers has one slice only.

#![cfg_attr(not(test), deny(clippy::print_stderr, clippy::print_stdout))]

mod adopt;
mod carried;
mod children;
mod driver;
mod file_error;
mod holders;
mod interrupts;
mod local_pool;
mod native;
mod place;
mod port;
mod removals;
mod seats;
mod server;
mod setup;
mod survive;
mod tracked;

use std::{
    error::Error,
    ffi::OsStr,
    os::{
        linux::net::SocketAddrExt,
        unix::{
            ffi::OsStrExt,
            net::{SocketAddr, UnixDatagram},
        },
    },
    path::PathBuf,
    process::ExitCode,
    sync::LazyLock,
};

use base::{
    Output,
    paths::{OPENCL_SOCKET, cuda_libraries},
};
use clap::{CommandFactory, Parser, Subcommand};
use manual::Manual;
use remoting_proto::apis;

static VERSION: LazyLock<String> = LazyLock::new(|| {
    let driver = if carried::CARRIES_DRIVER {
        "with the"
    } else {
        "without a"
    };
    let spoken = apis::ALL.map(|spoken| format!("{} {}", spoken.api, spoken.version));
    format!(
        "{}, protocol {}, {driver} driver",
        env!("CARGO_PKG_VERSION"),
        spoken.join(", ")
    )
});

const EXAMPLES: &str = "Examples:
  gantry-agent install               OpenCL for the programs of this machine, from now on
  gantry-agent install --root /mnt   the same in an image, from its next boot on
  gantry-agent uninstall             none of it any more
  gantry-agent adopt ~/venv          Gantry's CUDA libraries in a virtual environment
  gantry-agent driver                NVIDIA's libraries, of the disk that the host provides
  gantry-agent --group render        what the installed unit runs";

/// Gives applications their slices of Gantry's accelerator ports.
#[derive(Debug, Parser)]
#[command(
    name = "gantry-agent",
    version = VERSION.as_str(),
    after_help = EXAMPLES,
    args_conflicts_with_subcommands = true,
    disable_help_subcommand = true
)]
struct Arguments {
    #[command(subcommand)]
    other: Option<Other>,
    /// The socket on which to listen for applications.
    #[arg(long, default_value = OPENCL_SOCKET, value_name = "PATH")]
    socket: PathBuf,
    /// Use only the port at this PCI address, such as 0000:00:05.0 (default: all ports).
    #[arg(long, value_name = "ADDRESS")]
    device: Option<String>,
    /// Run this guest's own pool, on a device that was passed through to it: gantry-accel serve and its options,
    /// without --socket and --window. The pool serves OpenCL applications until the host asks for the device (gantry
    /// ctl move-accel ID --to host). They then continue on the port's workers, while they run, and the pool ends.
    #[arg(long, value_name = "COMMAND")]
    local: Option<String>,
    /// The group whose members may connect (default: everybody).
    #[arg(long, value_name = "NAME")]
    group: Option<String>,
}

/// Operations other than serving.
#[derive(Debug, Subcommand)]
enum Other {
    /// Install the OpenCL driver, this program and its systemd unit, and start the agent.
    ///
    /// This program contains all of them. Running programs keep the driver that they have loaded. Files that are
    /// already up to date are left as they are.
    Install {
        /// The root of the file system to install into; for an image, nothing is started.
        #[arg(long, default_value = "/", value_name = "DIR")]
        root: PathBuf,
        /// Install only the driver, as the unit does before it serves, so that the versions of driver and agent match.
        #[arg(long)]
        driver_only: bool,
    },
    /// Stop the agent, and remove the installed files that have not been changed since.
    Uninstall {
        /// The root of the file system to remove from.
        #[arg(long, default_value = "/", value_name = "DIR")]
        root: PathBuf,
    },
    /// Replace the CUDA libraries in a Python virtual environment by links to Gantry's.
    ///
    /// The originals are kept beside the links; --undo restores them. Can be repeated after packages were updated.
    /// Nothing outside the environment is changed.
    Adopt {
        /// The environment: a folder that contains pyvenv.cfg.
        environment: PathBuf,
        /// The folder of Gantry's libraries: libcuda.so.1, libcudart.so.13, libcublas.so.13, libcublasLt.so.13
        /// (default: lib/gantry-cuda beside this program's folder, or /usr/local/lib/gantry-cuda).
        #[arg(long, value_name = "DIR")]
        libraries: Option<PathBuf>,
        /// Restore the original libraries.
        #[arg(long, conflicts_with = "libraries")]
        undo: bool,
    },
    /// Use NVIDIA's driver libraries of a disk that the host provides (gantry-nvidia driver-image).
    ///
    /// The disk is mounted at /run/gantry/nvidia, and the loader finds its libraries. Until the next boot.
    Driver {
        /// The disk (default: the only one with the label GNV-VERSION).
        #[arg(long, value_name = "PATH")]
        disk: Option<PathBuf>,
        /// Compare the contents of all files with their checksums, not only the sizes.
        #[arg(long)]
        verify: bool,
        /// Do not use it any longer.
        #[arg(long, conflicts_with_all = ["disk", "verify"])]
        undo: bool,
    },
    /// What the program prints about itself.
    #[command(flatten)]
    Manual(Manual),
}

fn run() -> Result<(), Box<dyn Error>> {
    let arguments = Arguments::parse();
    let out = &mut Output::standard();
    match arguments.other {
        Some(Other::Install { root, driver_only }) => setup::install(&root, driver_only, out)?,
        Some(Other::Uninstall { root }) => setup::uninstall(&root, out)?,
        Some(Other::Adopt {
            environment,
            undo: true,
            ..
        }) => adopt::undo(&environment, out)?,
        Some(Other::Adopt {
            environment,
            libraries,
            ..
        }) => adopt::adopt(&environment, &libraries.unwrap_or_else(cuda_libraries), out)?,
        Some(Other::Driver { undo: true, .. }) => driver::unmount_all(out)?,
        Some(Other::Driver { disk, verify, .. }) => driver::mount(disk.as_deref(), verify, out)?,
        Some(Other::Manual(manual)) => manual.write(Arguments::command(), out)?,
        None => {
            survive::install();
            let group = arguments.group.as_deref();
            let local = arguments.local.as_deref().unwrap_or_default();
            let seats = seats::Seats::new(local, arguments.socket.clone());
            let server = server::Server::new(&arguments.socket, arguments.device, group, seats)?;
            tell_systemd();
            return Err(server.run().into());
        }
    }
    Ok(())
}

/// Tells systemd, if it has started this program, that applications may connect (sd_notify(3)). Errors are ignored: if
/// systemd does not get the message, it ends this program after a timeout.
fn tell_systemd() {
    let Some(path) = std::env::var_os("NOTIFY_SOCKET") else {
        return;
    };
    let address = match path.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
        path => SocketAddr::from_pathname(OsStr::from_bytes(path)),
    };
    let _ = address.and_then(|to| UnixDatagram::unbound()?.send_to_addr(b"READY=1", &to));
}

fn main() -> ExitCode {
    survive::file_size();
    base::note::end("gantry-agent", run())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn ask(line: &str) -> Result<Arguments, clap::Error> {
        let words = line.split_whitespace();
        Arguments::try_parse_from(["gantry-agent"].into_iter().chain(words))
    }

    #[test]
    fn who_asks_for_help_or_the_version_has_made_no_mistake() {
        Arguments::command().debug_assert();
        for (line, part) in [
            ("--help", "Usage:"),
            ("-h", "--socket <PATH>"),
            ("--help", "gantry-agent install --root /mnt"),
            ("--version", "protocol"),
            ("--group render -V", "gantry-agent "),
        ] {
            let answer = ask(line).unwrap_err();
            assert_eq!(answer.exit_code(), 0, "{line}");
            assert!(answer.to_string().contains(part), "{answer}");
        }
        for line in [
            "--colour",
            "--socket",
            "--group render install",
            "uninstall --driver-only",
            "adopt",
            "adopt venv --undo --libraries x",
        ] {
            assert_eq!(ask(line).unwrap_err().exit_code(), 2, "{line}");
        }
    }

    #[test]
    fn what_is_served_is_said_by_options() {
        let asked = ask("--device 0000:00:05.0 --group render").unwrap();
        assert!(asked.other.is_none());
        assert_eq!(asked.socket, PathBuf::from("/run/gantry/opencl.sock"));
        assert_eq!(asked.device.as_deref(), Some("0000:00:05.0"));
        assert_eq!(asked.group.as_deref(), Some("render"));
    }

    #[test]
    fn what_is_installed_is_said_by_options() {
        for (line, expected) in [
            ("install", ("/", false)),
            ("install --root /mnt", ("/mnt", false)),
            ("install --driver-only", ("/", true)),
        ] {
            let Some(Other::Install { root, driver_only }) = ask(line).unwrap().other else {
                panic!("{line} does not install");
            };
            assert_eq!(
                (root.as_path(), driver_only),
                (expected.0.as_ref(), expected.1)
            );
        }
    }
}
