//! `gantry-nvidia`: makes calls on NVIDIA's device files for programs that run under `libgantry_nvidia_preload.so`, on
//! this machine or in the guests of its virtual machines.

use std::{
    error::Error,
    path::{Path, PathBuf},
    process::ExitCode,
};

use base::{
    Output,
    gpus::Selection,
    limits::{Limit, file_size_is_an_error},
    note,
    paths::NVIDIA_SOCKET,
};
use clap::{CommandFactory, Parser, Subcommand};
use gantry_nvidia::{
    confine::{Serving, confine},
    device::{Device, Kernel, Shown, Visible},
    driver_image, gpus, machine, pool,
    record::Record,
    server::{Listener, Worker},
    sharing::{Share, introducer},
};
use manual::Manual;

const EXAMPLES: &str = "Examples:
  gantry-nvidia                                 programs of this machine
  gantry-nvidia --vm /run/gantry/nvidia-vm.sock virtual machines: gantry --accel api=nvidia
  gantry-nvidia --gpu 0+2                       programs that see two of this machine's GPUs
  gantry-nvidia driver-image /var/lib/gantry/nvidia.img
                                                this host's driver libraries, as a disk for guests
  gantry-nvidia driver-image --list             which files those are";

/// Makes calls on NVIDIA's device files for programs that have none.
#[derive(Debug, Parser)]
#[command(
    name = "gantry-nvidia",
    version,
    after_help = EXAMPLES,
    args_conflicts_with_subcommands = true,
    disable_help_subcommand = true
)]
struct Arguments {
    #[command(subcommand)]
    other: Option<Other>,
    /// The socket that programs connect to.
    #[arg(long, default_value = NVIDIA_SOCKET)]
    socket: PathBuf,
    /// Serve virtual machines (gantry --accel api=nvidia) that connect here, with a process for each, and no programs of
    /// this machine.
    #[arg(long, value_name = "SOCKET", conflicts_with_all = ["socket", "slice", "record"])]
    vm: Option<PathBuf>,
    /// Most memory that a program shares with its devices, in MiB. It is committed as it is touched. For the programs of a
    /// virtual machine, gantry's option window says it.
    #[arg(long, default_value_t = 16384, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    slice: u64,
    /// Most video memory of all programs together, in MiB; with --vm, of each virtual machine's (default: what the devices
    /// have). Programs see it as the devices' size.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=1 << 30))]
    memory: Option<u64>,
    /// Which of this machine's GPUs programs see, joined by +: an index in the order of PCI addresses, a UUID or its
    /// beginning (GPU-1a2b3c4d), a PCI address, or a part of a model's name (H200). All of them by default.
    #[arg(
        long,
        default_value = "",
        hide_default_value = true,
        value_name = "GPU[+GPU...]"
    )]
    gpu: Selection,
    /// Socket of the arbiter (gantry-arbiter) that divides a GPU among all that use it. Programs see one GPU then.
    #[arg(long, value_name = "SOCKET")]
    arbiter: Option<PathBuf>,
    /// Whose this machine's programs are: those of one name share one part of the GPU. The programs of a virtual machine are
    /// that machine's.
    #[arg(long, value_name = "NAME", requires = "arbiter", conflicts_with = "vm")]
    name: Option<String>,
    /// The part of the GPU that this machine's programs get, in proportion to those of others: 1 to 10,000. For the programs
    /// of a virtual machine, gantry's option weight says it.
    #[arg(long, value_name = "NUMBER", requires = "arbiter", conflicts_with = "vm", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    weight: Option<u32>,
    /// For how many milliseconds, 1 to 1000, this machine's programs wait at most for time slices of others, as long as they have
    /// had no more than their part. For the programs of a virtual machine, gantry's option latency says it.
    #[arg(long, value_name = "MS", requires = "arbiter", conflicts_with = "vm", value_parser = clap::value_parser!(u32).range(1..=1000))]
    latency: Option<u32>,
    /// Records the structure of calls in this file, without contents.
    #[arg(long)]
    record: Option<PathBuf>,
}

/// Operations other than serving.
#[derive(Debug, Subcommand)]
enum Other {
    /// Make a disk image with this host's driver libraries, which guests need in exactly this version.
    ///
    /// The image is an ext4 file system with the folders lib and bin, and a manifest of sizes and checksums. Make it anew
    /// after each update of the host's driver.
    DriverImage(driver_image::Options),
    /// What the program prints about itself.
    #[command(flatten)]
    Manual(Manual),
}

fn run(arguments: Arguments) -> Result<(), Box<dyn Error>> {
    match arguments.other {
        Some(Other::Manual(manual)) => {
            Ok(manual.write(Arguments::command(), &mut Output::standard())?)
        }
        Some(Other::DriverImage(options)) => {
            let version = Kernel.version().map_err(driver_image::Error::Version)?;
            Ok(driver_image::make(
                &options,
                &version,
                &mut Output::standard(),
            )?)
        }
        None => serve(&arguments),
    }
}

/// The device files that programs see, those of all GPUs for `None`.
fn device(gpus: Option<&[Shown]>) -> Box<dyn Device> {
    match gpus {
        None => Box::new(Kernel),
        Some(gpus) => Box::new(Visible {
            device: Kernel,
            gpus: gpus.to_vec(),
        }),
    }
}

fn serve(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    Limit::raise()?;
    let memory = arguments.memory.map(|mib| mib << 20);
    let gpus = (!arguments.gpu.is_all())
        .then(|| gpus::files(&arguments.gpu, Path::new(gpus::LISTED)))
        .transpose()?;
    if arguments.arbiter.is_some() {
        can_be_shared(&arguments.gpu)?;
    }
    // While this process has one thread.
    let introduced = || arguments.arbiter.as_deref().map(introducer).transpose();
    let device = || device(gpus.as_deref());
    if let Some(path) = &arguments.vm {
        let serve = |connection| {
            let control = match introduced() {
                Ok(control) => control,
                Err(error) => return note::error("gantry-nvidia", &error),
            };
            let served = machine::serve(&connection, |machine, limit, account| {
                let limits = [memory, limit].into_iter().flatten();
                Worker::of_machine(device(), machine, limits.min(), account, control)
            });
            if let Err(error) = served {
                note::error("gantry-nvidia", &error);
            }
        };
        return Err(pool::serve(path, serve).into());
    }
    let record = arguments.record.as_deref().map(Record::create);
    let slice = arguments.slice << 20;
    let record = record.transpose()?;
    let worker = match introduced()? {
        Some(control) => {
            let name = arguments.name.clone();
            let share = Share {
                control,
                name: name.unwrap_or_else(|| format!("gantry-nvidia-{}", std::process::id())),
                weight: arguments.weight.unwrap_or(1),
                latency: arguments.latency.unwrap_or(0),
            };
            Worker::shared(device(), slice, memory, record, share)?
        }
        None => Worker::new(device(), slice, memory, record)?,
    };
    let listener = Listener::bind(&arguments.socket)?;
    confine(worker.branch(), Serving::Programs, |node| {
        worker.shows(node)
    })?;
    Ok(worker.serve(&listener)?)
}

/// Why an arbiter cannot divide a GPU among programs here.
#[derive(Debug, thiserror::Error)]
enum Unshared {
    #[error(
        "with --arbiter, programs see one GPU, and {0} are selected: select one by --gpu, and start a gantry-nvidia for each"
    )]
    Gpus(usize),
    #[error(
        "a GPU is divided into instances (MIG), which are not divided by weight: leave --arbiter out"
    )]
    Instances,
}

fn can_be_shared(gpus: &Selection) -> Result<(), Box<dyn Error>> {
    let shown = gpus::files(gpus, Path::new(gpus::LISTED))?;
    if shown.len() != 1 {
        return Err(Unshared::Gpus(shown.len()).into());
    }
    if remoting_timeslice::has_instances() {
        return Err(Unshared::Instances.into());
    }
    Ok(())
}

fn main() -> ExitCode {
    file_size_is_an_error();
    note::end("gantry-nvidia", run(Arguments::parse()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_serves_whom_is_said_by_options() {
        Arguments::command().debug_assert();
        let ask = |line: &str| {
            let words = line.split_whitespace();
            Arguments::try_parse_from(["gantry-nvidia"].into_iter().chain(words))
        };
        for line in [
            "",
            "--socket /tmp/x --slice 64 --memory 8192",
            "--vm /tmp/x --memory 8192",
            "--gpu 0+GPU-1a2b3c4d+65:00.0",
            "--vm /tmp/x --gpu H200",
            "--vm /tmp/x --arbiter /tmp/a",
            "--arbiter /tmp/a --name web --weight 3",
            "--arbiter /tmp/a --latency 2",
            "driver-image /tmp/x --video",
            "driver-image --list",
            "completions bash",
        ] {
            ask(line).unwrap_or_else(|error| panic!("{line}: {error}"));
        }
        for line in [
            "--vm /tmp/x --socket /tmp/y",
            "--vm /tmp/x --slice 64",
            "--memory 0",
            "--weight 3",
            "--vm /tmp/x --arbiter /tmp/a --weight 3",
            "--arbiter /tmp/a --weight 0",
            "--arbiter /tmp/a --weight idle",
            "--arbiter /tmp/a --latency 0",
            "--latency 2",
            "--gpu GPU-1",
            "--gpu 0,1",
            "--gpu 0+",
            "driver-image",
            "--memory 1 driver-image /tmp/x",
        ] {
            let error = ask(line).err().map(|error| error.exit_code());
            assert_eq!(error, Some(2), "{line}");
        }
    }
}
