//! The command line: Cloud Hypervisor's options for starting a VM, and Gantry's commands.

mod client;
mod console;
mod ctl;
mod deferred;
mod devices;
mod find;
mod migrations;
mod move_accel;
mod short;
mod top;
mod unknown;
mod values;
mod vm;

use std::{io, os::fd::RawFd, path::PathBuf, str::FromStr};

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use manual::Manual;
use vmm_api::{ApiSocket, RestoreConfig, model::COMPATIBLE_BUILD};
use vmm_config::syntax::{SyntaxError, SyntaxProblem};
use vmm_confinement::seccomp::Enforcement;

use crate::logging;

pub use self::{
    client::{Client, ClientError},
    ctl::{Ctl, CtlError},
    deferred::Deferred,
    find::{FindError, Found, Running},
    top::{Top, TopError},
    values::{Places, Values},
    vm::{VmArgs, VmArgsError},
};

const EXAMPLES: &str = "\
Examples:
  Boot a kernel with a disk and a network card:
    gantry --kernel vmlinuz --cmdline 'console=hvc0 root=/dev/vda' \\
           --cpus boot=2 --memory size=1G --disk path=disk.img --net tap=tap0
  Wait for requests, and send them; with several VMs, name the one that is meant (--socket):
    gantry --api-socket /tmp/gantry.sock &
    gantry ctl create vm.json
    gantry ctl boot
    gantry ctl console
  Give the VM a physical device, and one that another process serves:
    gantry ctl add-device 0000:01:00.0,id=gpu0
    gantry ctl add-user-device socket=/run/device.sock,id=accel0
  Bring a saved VM back:
    gantry --api-socket /tmp/gantry.sock --restore source_url=file:///var/vm,resume=on

Besides its own keys, each device takes id=NAME,pci_segment=N,pci_device_id=N.

Exit status: 0 the VM or the command ended as it should; 1 an error, printed with its causes;
2 the command line is wrong; 3 the guest was lost; 4 several VMMs run, and gantry ctl was not told
which one is meant.

Called under the name cloud-hypervisor (a link), --version names the version of Cloud Hypervisor
whose interface Gantry has, for programs that look at it.";

/// A virtual machine monitor for Linux and KVM.
#[derive(Debug, Parser)]
#[command(
    name = "gantry",
    after_help = EXAMPLES,
    args_conflicts_with_subcommands = true,
    disable_help_subcommand = true
)]
pub struct Cli {
    /// Command to run instead of starting a VM.
    #[command(subcommand)]
    pub command: Option<Command>,

    /// The virtual machine.
    #[command(flatten)]
    pub vm: VmArgs,

    /// Unix socket on which to serve the REST API: PATH, path=PATH, or fd=N for an inherited one.
    #[arg(long, value_name = "SOCKET", help_heading = "Gantry")]
    pub api_socket: Option<ApiSocket>,

    /// Unix socket on which to serve metrics and nothing else, to the group of its file, too.
    #[arg(long, value_name = "PATH", help_heading = "Gantry")]
    pub metrics_socket: Option<PathBuf>,

    /// Stay when the guest powers off, as after vm.shutdown: vm.boot starts the VM again.
    #[arg(long, requires = "api_socket", help_heading = "Gantry")]
    pub no_shutdown: bool,

    /// Where to write events as JSON: path=FILE or fd=N.
    #[arg(long, value_name = "TARGET", help_heading = "Gantry")]
    pub event_monitor: Option<EventTarget>,

    /// File to which the log is appended, instead of standard error.
    #[arg(long, value_name = "FILE", help_heading = "Gantry")]
    pub log_file: Option<PathBuf>,

    /// Form of the log's lines: text, json (an object), or journal (text with its priority in front; the default if
    /// standard error is the journal).
    #[arg(
        long,
        value_name = "FORMAT",
        default_value = "text",
        hide_default_value = true,
        help_heading = "Gantry"
    )]
    pub log_format: logging::Format,

    /// Log more; can be repeated.
    #[arg(short, long = "verbose", action = clap::ArgAction::Count, help_heading = "Gantry")]
    pub verbosity: u8,

    /// Filter system calls: true kills the VMM on a forbidden one, log only logs it.
    #[arg(
        long,
        value_name = "true|false|log",
        default_value = "true",
        hide_default_value = false,
        help_heading = "Gantry"
    )]
    pub seccomp: Enforcement,

    /// Show help for all options.
    #[arg(long, exclusive = true, help_heading = "Gantry")]
    help_all: bool,

    /// Restore a saved VM: source_url=URL,prefault=on|off,resume=on|off,
    /// memory_restore_mode=copy|ondemand,clock=advance|continue,net_fds=[ID@[FD,FD]],accels=[ID@SOCKET],
    /// renames=[OLD@NEW].
    #[arg(
        long,
        value_name = "RESTORE",
        value_parser = option(RestoreConfig::parse),
        conflicts_with_all = ["kernel", "firmware"],
        help_heading = "Gantry"
    )]
    pub restore: Option<RestoreConfig>,
}

/// Command to run instead of starting a VM.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Send a request to a running Gantry.
    Ctl(Deferred<Ctl>),
    /// Check whether this host has everything that VMs need, and tell how to fix problems.
    Doctor,
    /// Watch the usage of a shared accelerator (gantry-top, with all of its options).
    Top(Deferred<Top>),
    /// Print possible completions of a command line.
    #[command(hide = true)]
    Values(Values),
    /// Print the version.
    Version,
    /// Show help for the program, or for one of its commands.
    Help {
        /// Name of the command, and of its subcommand.
        command: Vec<String>,
    },
    /// Output about the program itself.
    #[command(flatten)]
    Manual(Manual),
}

/// Destination of events.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum EventTarget {
    /// A file or FIFO.
    Path(PathBuf),
    /// An inherited descriptor.
    Fd(RawFd),
}

impl FromStr for EventTarget {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('=') {
            Some(("path", path)) if !path.is_empty() => Ok(Self::Path(PathBuf::from(path))),
            Some(("fd", fd)) => match fd.parse() {
                Ok(fd) if fd > 0 => Ok(Self::Fd(fd)),
                _ => Err(format!("'{fd}' is no number of a descriptor")),
            },
            _ => Err("write path=FILE or fd=N".to_owned()),
        }
    }
}

impl Cli {
    /// Parses the arguments of the process; exits if they ask for help or are invalid.
    pub fn from_process() -> Self {
        let name = std::env::args_os().next().unwrap_or_default();
        let mut command = short::of(command(&name));
        let words: Vec<_> = std::env::args_os().collect();
        let matches = command
            .try_get_matches_from_mut(&words)
            .unwrap_or_else(|error| {
                let words = words.iter().filter_map(|word| word.to_str());
                unknown::explain(error, &mut command, words).exit()
            });
        Self::from_arg_matches(&matches).unwrap_or_else(|error| error.exit())
    }

    /// Parses arguments; the first one is the name of the program.
    pub fn from_arguments(arguments: &[&str]) -> Result<Self, clap::Error> {
        let name = arguments.first().copied().unwrap_or_default();
        let mut command = command(name.as_ref());
        let matches = command
            .try_get_matches_from_mut(arguments)
            .map_err(|error| unknown::explain(error, &mut command, arguments.iter().copied()))?;
        Self::from_arg_matches(&matches)
    }

    /// Whether help for all options is requested.
    pub fn asks_for_all_help(&self) -> bool {
        self.help_all
    }

    /// Whether there is nothing to do.
    pub fn is_idle(&self) -> bool {
        self.command.is_none()
            && self.api_socket.is_none()
            && self.restore.is_none()
            && self.vm == VmArgs::default()
    }
}

/// Parses a size for clap.
fn size(text: &str) -> Result<u64, String> {
    vmm_config::syntax::size(text)
        .ok_or_else(|| "invalid size: use a number such as 4096, 512M, 2G or 2GiB".to_owned())
}

/// The description of the command line for a program called `name`.
pub fn command(name: &std::ffi::OsStr) -> clap::Command {
    let stem = std::path::Path::new(name).file_name();
    if stem.is_some_and(|stem| stem == "cloud-hypervisor") {
        let command = Cli::command().name("cloud-hypervisor");
        return command.version(COMPATIBLE_BUILD);
    }
    Cli::command().version(concat!("v", env!("CARGO_PKG_VERSION")))
}

/// The help for all options.
pub fn help_all() -> String {
    command("gantry".as_ref()).render_long_help().to_string()
}

/// The help of a command, identified by its name after those of its parent commands. Fails with the
/// first name that does not exist.
pub fn help_of<'a>(words: impl IntoIterator<Item = &'a str>) -> Result<String, String> {
    let mut command = short::of(command("gantry".as_ref()));
    command.build();
    let mut found = &mut command;
    for word in words {
        found = found
            .find_subcommand_mut(word)
            .ok_or_else(|| word.to_owned())?;
    }
    Ok(found.render_long_help().to_string())
}

/// Prints what the program documents about itself, or writes its manual pages.
pub fn write_manual(manual: &Manual, out: &mut dyn io::Write) -> io::Result<()> {
    // The program gantry-top writes its own page gantry-top.1.
    let own = |top: clap::Command| top.hide(matches!(manual, Manual::Man { folder: Some(_) }));
    let program = command("gantry".as_ref()).mut_subcommand("top", own);
    let Manual::Completions { shell } = manual else {
        return manual.write(program, out);
    };
    let mut options = Vec::new();
    manual.write(program, &mut options)?;
    let options = String::from_utf8_lossy(&options);
    out.write_all(values::script(*shell, &options).as_bytes())
}

/// Adapts a parser to clap, which adds the option and value to errors itself.
fn option<T: 'static>(
    parse: fn(&str) -> Result<T, SyntaxError>,
) -> impl Fn(&str) -> Result<T, SyntaxProblem> + Clone + Send + Sync + 'static {
    move |text| parse(text).map_err(|error| error.problem().clone())
}

#[cfg(test)]
mod tests;
