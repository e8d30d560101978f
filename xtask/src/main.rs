//! Gantry's development commands.
//!
//! - [`demo`]: boots a stock Debian guest and shows its console.
//! - [`fuzz`]: fuzzes what guests, clients and files can do.
//! - [`guard`]: ends what a command has started, however the command ends.
//! - [`test`]: the tests, nested ones included; [`unit_tests`]: the crates' unit tests; [`quick`]: the scenarios that run
//!   by default; [`changed`]: the tests that a change can affect; [`built`]: what scenarios need; [`workspace`]: the
//!   crates.
//! - [`release`]: builds what users install; [`package`]: packages of it.
//!
//! What they run is in `tests/`: `tests/host` has the scenarios that need no rig, `tests/product` those with stock
//! software from source, `tests/bench` the benchmarks, and `tests/build` builds their programs. [`cuda`] runs
//! `xtask/cuda`, which generates the definition of the CUDA API.

mod again;
mod built;
mod changed;
mod count;
mod cuda;
mod demo;
#[cfg(test)]
mod documents;
mod fuzz;
mod guard;
mod package;
mod quick;
mod release;
mod test;
mod unit_tests;
mod workspace;

use clap::{Parser, Subcommand};
use gantry_bench as bench;

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
    CudaKernels(cuda::Options),
    /// Measure boot, memory, snapshots and the cost of an exit, and print a table.
    Bench(Box<bench::Options>),
    /// Build firmware that boots UEFI images (edk2), and a disk that boots with it.
    Firmware(gantry_product_tests::firmware::Options),
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
        Command::CudaKernels(options) => cuda::run("cuda-kernels", options),
        Command::CudaDefinition(options) => cuda::run("cuda-definition", options),
        Command::Demo(options) => demo::run(options),
        Command::Bench(options) => bench::run(options),
        Command::Firmware(options) => gantry_product_tests::firmware::run(options),
        Command::Fuzz(options) => fuzz::run(options),
        Command::Package(options) => package::run(options),
        Command::Release(options) => release::run(options),
        Command::Test(options) => test::run(options),
    }
}
