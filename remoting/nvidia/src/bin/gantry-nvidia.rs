//! `gantry-nvidia`: makes calls on NVIDIA's device files for programs that run under `libgantry_nvidia.so`, on this
//! machine or in the guests of its virtual machines.

use std::{path::PathBuf, process::ExitCode};

use base::{
    limits::{Limit, file_size_is_an_error},
    paths::NVIDIA_SOCKET,
};
use clap::Parser;
use gantry_nvidia::{
    confine::confine,
    device::Kernel,
    machine, pool,
    record::Record,
    server::{Listener, Worker},
};

/// Makes calls on NVIDIA's device files for programs that have none.
#[derive(Parser)]
struct Options {
    /// The socket that programs connect to.
    #[arg(long, default_value = NVIDIA_SOCKET)]
    socket: PathBuf,
    /// Serve virtual machines (gantry --accel api=nvidia) that connect here, with a process for each, and no programs of
    /// this machine.
    #[arg(long, value_name = "SOCKET", conflicts_with_all = ["socket", "slice", "record"])]
    vm: Option<PathBuf>,
    /// Most memory that a program shares with its devices, in MiB. It is committed as it is touched. (Of the programs of a
    /// virtual machine: gantry's option window.)
    #[arg(long, default_value_t = 16384, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    slice: u64,
    /// Most video memory of all programs together, of each virtual machine with --vm, in MiB (default: what the devices
    /// have). Programs see it as the devices' size.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=1 << 30))]
    memory: Option<u64>,
    /// Records the structure of calls in this file, without contents.
    #[arg(long)]
    record: Option<PathBuf>,
}

fn run(options: &Options) -> Result<(), Box<dyn std::error::Error>> {
    Limit::raise()?;
    let record = options.record.as_deref().map(Record::create).transpose()?;
    let memory = options.memory.map(|mib| mib << 20);
    if let Some(path) = &options.vm {
        let error = pool::serve(path, |connection| {
            let served = machine::serve(&connection, |machine, limit, account| {
                let limits = [memory, limit].into_iter().flatten();
                Worker::of_machine(Box::new(Kernel), machine, limits.min(), account, None)
            });
            if let Err(error) = served {
                base::note::error("gantry-nvidia", &error);
            }
        });
        return Err(error.into());
    }
    let worker = Worker::new(Box::new(Kernel), options.slice << 20, memory, record)?;
    let listener = Listener::bind(&options.socket)?;
    confine(worker.branch())?;
    Ok(worker.serve(&listener)?)
}

fn main() -> ExitCode {
    file_size_is_an_error();
    match run(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            base::note::error("gantry-nvidia", error.as_ref());
            ExitCode::FAILURE
        }
    }
}
