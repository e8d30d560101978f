//! `gantry-checkpoint`: suspends the CUDA programs of a machine, and resumes them.
//!
//! It uses the checkpoint functions of NVIDIA's driver library. A suspended program has the contents of its device
//! memory in its own memory, and nothing of a device: the memory of the (virtual) machine is then all that has to be
//! saved or moved. Programs may use a device directly, one that is passed through, or a native context.
//!
//! - `operation`: the order of the steps, and what is undone when one fails.
//! - `driver`: the driver library. `inventory`: what NVML knows of devices and processes.
//! - `process`: what /proc shows. `memory`: whether there is enough.
//! - `journal`: what was suspended.

#![cfg_attr(not(test), deny(clippy::print_stderr, clippy::print_stdout))]

mod driver;
mod inventory;
mod journal;
mod memory;
mod operation;
mod process;

use std::{path::PathBuf, process::ExitCode, time::Duration};

use base::Output;
use clap::{Args, CommandFactory, Parser, Subcommand};
use journal::Journal;
use manual::Manual;
use operation::{Chosen, OperationError, Resumption, Suspension};

const EXAMPLES: &str = "Examples:
  gantry-checkpoint list               programs that use the driver, and those that are suspended
  gantry-checkpoint suspend 812        the contents of its device memory into host memory
  gantry-checkpoint suspend --all      all programs, or none
  gantry-checkpoint resume --all       all that were suspended go on
  gantry-checkpoint resume 812 --gpu GPU-OLD=GPU-NEW

Exit status: 0 done, 1 nothing was changed, all was undone or a program stays suspended, 2 wrong usage,
3 a program is lost.
Signals take effect when the operation is complete.";

/// Suspends CUDA programs in host memory, and resumes them.
#[derive(Debug, Parser)]
#[command(
    name = "gantry-checkpoint",
    version,
    after_help = EXAMPLES,
    disable_help_subcommand = true
)]
struct Arguments {
    #[command(subcommand)]
    operation: Operation,
    /// The folder with what was suspended (default: /run/gantry-checkpoint for root).
    #[arg(long, value_name = "DIR", global = true)]
    journal: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
enum Operation {
    /// List programs that use the driver or are suspended: PID, state, device memory, name.
    List,
    /// Move the contents of programs' device memory to their own memory, and free their devices.
    ///
    /// If one program cannot be suspended, all go on.
    Suspend {
        #[command(flatten)]
        which: Which,
        /// The most time in seconds in which a program's calls have to end.
        #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=3600))]
        limit: u64,
        /// Fail if a program still has a device file open afterwards, as those with NVML do.
        #[arg(long)]
        released: bool,
        /// Use drivers that are known to fail, and do not look for memory first.
        #[arg(long)]
        force: bool,
        /// Only say whether it could be done, as far as is known before anything stops.
        #[arg(long)]
        check: bool,
    },
    /// Let suspended programs go on.
    Resume {
        #[command(flatten)]
        which: Which,
        /// A device that takes another's place, by UUID (repeatable). Default: the same one, else by position.
        #[arg(long, value_name = "OLD=NEW", value_parser = pair)]
        gpu: Vec<(String, String)>,
        /// Do not look for device memory first, and do not use NVML if it fails.
        #[arg(long)]
        force: bool,
    },
    /// What the program prints about itself.
    #[command(flatten)]
    Manual(Manual),
}

#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
struct Which {
    /// Processes, by number.
    #[arg(value_name = "PID")]
    processes: Vec<u32>,
    /// All programs that use the driver, or that were suspended.
    #[arg(long)]
    all: bool,
}

impl Which {
    fn chosen(self) -> Chosen {
        if self.all {
            Chosen::All
        } else {
            Chosen::Processes(self.processes)
        }
    }
}

fn pair(text: &str) -> Result<(String, String), String> {
    let pair = text.split_once('=').filter(|(old, new)| {
        [old, new]
            .into_iter()
            .all(|text| driver::uuid(text).is_some())
    });
    let (old, new) =
        pair.ok_or("use OLD=NEW with UUIDs as nvidia-smi -L prints them: GPU-...=GPU-...")?;
    Ok((old.to_owned(), new.to_owned()))
}

fn run(arguments: Arguments) -> Result<(), OperationError> {
    let out = &mut Output::standard();
    let journal = || Journal::open(&arguments.journal.clone().unwrap_or_else(Journal::usual));
    match arguments.operation {
        Operation::List => operation::list(&journal()?, out),
        Operation::Suspend {
            which,
            limit,
            released,
            force,
            check,
        } => {
            let options = Suspension {
                chosen: which.chosen(),
                limit: Duration::from_secs(limit),
                force,
                released,
                is_trial: check,
            };
            operation::suspend(&options, &journal()?, out)
        }
        Operation::Resume { which, gpu, force } => {
            let options = Resumption {
                chosen: which.chosen(),
                gpus: gpu,
                force,
            };
            operation::resume(&options, &journal()?, out)
        }
        Operation::Manual(manual) => Ok(manual.write(Arguments::command(), out)?),
    }
}

/// Ending this program amid a step of the driver would cost the program that it works on.
fn hold_signals() {
    // SAFETY: the set is initialized before it is used, and the old one is not asked for.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for signal in [
            libc::SIGHUP,
            libc::SIGINT,
            libc::SIGQUIT,
            libc::SIGTERM,
            libc::SIGTSTP,
        ] {
            libc::sigaddset(&raw mut set, signal);
        }
        libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
    }
}

fn main() -> ExitCode {
    base::limits::file_size_is_an_error();
    // Programs have their devices, whichever the caller sees.
    // SAFETY: there are no other threads yet.
    unsafe { std::env::remove_var("CUDA_VISIBLE_DEVICES") };
    let arguments = Arguments::parse();
    if !matches!(arguments.operation, Operation::Manual(_)) {
        hold_signals();
    }
    let Err(error) = run(arguments) else {
        return ExitCode::SUCCESS;
    };
    base::note::error("gantry-checkpoint", &error);
    ExitCode::from(error.status())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(line: &str) -> Result<Arguments, clap::Error> {
        let words = line.split_whitespace();
        Arguments::try_parse_from(["gantry-checkpoint"].into_iter().chain(words))
    }

    #[test]
    fn programs_are_named_one_by_one_or_all() {
        Arguments::command().debug_assert();
        for line in [
            "list",
            "suspend 1 2",
            "suspend --all --limit 3 --released",
            "suspend 1 --check",
            "resume --all --journal /tmp/x",
            "resume 7 --gpu GPU-00000000-0000-0000-0000-00000000000a=GPU-00000000-0000-0000-0000-00000000000b",
        ] {
            ask(line).unwrap_or_else(|error| panic!("{line}: {error}"));
        }
        for line in [
            "",
            "suspend",
            "suspend 1 --all",
            "suspend x",
            "resume 1 --gpu 0=1",
            "suspend 1 --limit 0",
        ] {
            assert_eq!(
                ask(line).err().map(|error| error.exit_code()),
                Some(2),
                "{line}"
            );
        }
    }
}
