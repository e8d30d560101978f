//! Gantry's development commands.
//!
//! - [`cuda`]: generates the definition of the CUDA API from the vendor's headers.
//! - [`demo`]: boots a stock Debian guest and shows its console.
//! - [`bench`]: prints figures as a table.
//! - [`crane`]: the cost of moving applications.
//! - [`fairness`]: how accelerators are shared, simulated in virtual time.
//! - [`fuzz`]: fuzzes what guests, clients and files can do.
//! - [`gloop`]: kernels that yield the GPU by themselves.
//! - [`guard`]: ends what a command has started, however the command ends.
//! - [`moved_guest`]: a VM that migrates together with its application.
//! - [`ring`]: calls over an accelerator's rings from ring 3 of a guest.
//! - [`sharing`]: one device for several applications, by weight; [`sharing_figures`]: how fair that is;
//!   [`sharing_closed`]: the same if they wait for their results; [`sharing_hashcat`]: a real program of this kind;
//!   [`shared_device`]: the processes for all of these.
//! - [`test`]: the tests, nested ones included; [`unit_tests`]: the crates' unit tests; [`quick`]: the scenarios that run
//!   by default; [`changed`]: the tests that a change can affect.
//! - [`opencl`]: the OpenCL driver's scenarios on this machine, and third-party programs.
//! - [`programs`]: builds what the others run; [`built`]: what scenarios need; [`progress`]: progress messages;
//!   [`release`]: builds what users install; [`workspace`]: the crates.
//! - [`package`]: packages of it.

mod again;
mod bench;
mod built;
mod changed;
mod count;
mod crane;
mod cuda;
mod demo;
mod described;
#[cfg(test)]
mod documents;
mod elsewhere;
mod fairness;
mod fuzz;
mod gate;
mod gloop;
mod gloop_turns;
mod gpu_machine;
mod gpuvm;
mod guard;
mod guest_gpu;
mod moved_guest;
mod opencl;
mod package;
mod programs;
mod progress;
mod quick;
mod release;
mod ring;
mod selected;
mod shared_device;
mod sharing;
mod sharing_closed;
mod sharing_figures;
mod sharing_hashcat;
mod sharing_vms;
mod test;
mod unit_tests;
mod workspace;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Gantry's development commands")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Boot a stock Debian guest under Gantry and show its console.
    Demo(demo::Options),
    /// Write the definition of the CUDA API anew, from the vendor's headers.
    CudaDefinition(cuda::Options),
    /// Compile the kernels of the CUDA tests anew, by the vendor's compiler.
    CudaKernels(cuda::kernels::Options),
    /// Measure boot, memory, snapshots and the cost of an exit, and print a table.
    Bench(Box<bench::Options>),
    /// Try at random what guests, clients and files may do.
    Fuzz(fuzz::Options),
    /// Build the host's programs, and what makes their backtraces readable in files beside them.
    Release(release::Options),
    /// Make the packages that users install.
    Package(package::Options),
    /// Run checks, unit tests and short scenarios; with --all, every test; with words, only the scenarios whose
    /// names contain one of them.
    Test(test::Options),
}

fn main() {
    let command = Arguments::parse().command;
    let result = guard::keep().and_then(|()| run(&command));
    if let Err(error) = result {
        eprintln!("error: {error}");
        for cause in error.chain().skip(1) {
            eprintln!("  because: {cause}");
        }
        std::process::exit(1);
    }
}

fn run(command: &Command) -> anyhow::Result<()> {
    match command {
        Command::CudaKernels(options) => cuda::kernels::run(options),
        Command::CudaDefinition(options) => cuda::run(options),
        Command::Demo(options) => demo::run(options),
        Command::Bench(options) => bench::run(options),
        Command::Fuzz(options) => fuzz::run(options),
        Command::Package(options) => package::run(options),
        Command::Release(options) => release::run(options),
        Command::Test(options) => test::run(options),
    }
}
