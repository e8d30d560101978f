//! The eaters: programs that keep a GPU to themselves, written for GLoop. Each has three versions
//! from one source (`gloop/programs/`): vanilla, split into many short kernels, and as a loop.
//! Their outputs are compared, also after many random stops, and the cost of GLoop is measured.
//! Echo has only the loop version, since it computes nothing: what it returns is compared with what
//! was sent.

mod bed;
mod compile;
mod figures;
mod files;
mod hostile;
mod images;
mod kv;
mod run;
mod servers;
mod single;
mod sorting;

use std::{path::PathBuf, time::Duration};

use anyhow::Result;
use clap::{Parser, Subcommand};

/// GLoop's programs: compiled, compared and measured.
///
/// Examples:
///   gloop-eaters compile --nvrtc libnvrtc.so.13 --arch sm_90 --into cubins
///   gloop-eaters check --cubins cubins --stops 10000
///   gloop-eaters bench --cubins cubins
///   gloop-eaters run --cubins cubins --arbiter /run/arbiter --client me --weight 3 lavamd
#[derive(Parser)]
#[command(name = "gloop-eaters", verbatim_doc_comment)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Print the header that is generated from the layout (gloop/include/gloop/layout.cuh).
    Header,
    /// Compile all programs. No GPU is needed.
    Compile {
        /// The compiler's library.
        #[arg(long, value_name = "FILE", default_value = "libnvrtc.so.13")]
        nvrtc: PathBuf,
        /// The GPU architectures to compile for.
        #[arg(long, value_delimiter = ',', default_value = "sm_90")]
        arch: Vec<String>,
        /// The folder to write the machine code to (default: do not write it).
        #[arg(long, value_name = "FOLDER")]
        into: Option<PathBuf>,
    },
    /// Compare the outputs of the programs' versions after random stops.
    Check {
        /// The folder that `compile` has written.
        #[arg(long, value_name = "FOLDER")]
        cubins: PathBuf,
        /// The number of stops of each program.
        #[arg(long, default_value_t = 10_000)]
        stops: u64,
        /// The maximum time for each program, in seconds.
        #[arg(long, default_value_t = 30)]
        seconds: u64,
        /// The seed of the random numbers.
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// Run only these programs.
        programs: Vec<String>,
    },
    /// Run a program repeatedly, in turns with other processes if there is an arbiter.
    Run {
        /// The folder that `compile` has written.
        #[arg(long, value_name = "FOLDER")]
        cubins: PathBuf,
        #[command(flatten)]
        sharing: run::Sharing,
        /// How long to run, in seconds. The round in progress is completed.
        #[arg(long, default_value_t = 10)]
        seconds: u64,
        /// The average time that a server's client sleeps before a request, in milliseconds.
        #[arg(long, default_value_t = 0)]
        think: u64,
        /// throttle, lavamd, tpacf, grep, img or matmul.
        program: String,
    },
    /// Run a kernel that breaks the rules, and report what happens.
    Hostile {
        /// The folder that `compile` has written.
        #[arg(long, value_name = "FOLDER")]
        cubins: PathBuf,
        #[command(flatten)]
        sharing: run::Sharing,
        /// requests, words, grants, wild or endless.
        kernel: String,
    },
    /// Measure, and print a table.
    Bench {
        /// The folder that `compile` has written.
        #[arg(long, value_name = "FOLDER")]
        cubins: PathBuf,
        /// Measure only these: points, split, stops, lavamd, tpacf, hybridsort, grep, img, matmul,
        /// free.
        figures: Vec<String>,
    },
}

fn main() {
    base::limits::file_size_is_an_error();
    let result = match Arguments::parse().command {
        Command::Header => gloop::layout::header()
            .map(|header| print!("{header}"))
            .map_err(Into::into),
        Command::Compile { nvrtc, arch, into } => compile::run(&nvrtc, &arch, into.as_deref()),
        Command::Check {
            cubins,
            stops,
            seconds,
            seed,
            programs,
        } => check(cubins, stops, seconds, seed, &programs),
        Command::Run {
            cubins,
            sharing,
            seconds,
            think,
            program,
        } => bed::Bed::open(cubins).and_then(|bed| {
            let mut runner = run::Runner::new(sharing)?;
            let think = Duration::from_millis(think);
            run::run(&bed, &program, seconds, think, &mut runner)
        }),
        Command::Hostile {
            cubins,
            sharing,
            kernel,
        } => bed::Bed::open(cubins).and_then(|bed| {
            let mut runner = run::Runner::new(sharing)?;
            hostile::run(&bed, &kernel, &mut runner)
        }),
        Command::Bench { cubins, figures } => {
            bed::Bed::open(cubins).and_then(|bed| figures::run(&bed, &figures))
        }
    };
    if let Err(error) = result {
        base::note!("error: {error:#}");
        std::process::exit(1);
    }
}

type Check = fn(&bed::Bed, &mut bed::Stops) -> Result<()>;

const PROGRAMS: &[(&str, Check)] = &[
    ("throttle", single::throttle),
    ("lavamd", single::lavamd),
    ("tpacf", single::tpacf),
    ("hybridsort", sorting::hybridsort),
    ("grep", files::grep),
    ("img", images::img),
    ("echo", servers::echo),
    ("matmul", servers::matmul),
    ("kv", kv::kv),
];

fn check(cubins: PathBuf, stops: u64, seconds: u64, seed: u64, only: &[String]) -> Result<()> {
    let bed = bed::Bed::open(cubins)?;
    println!("{}", bed.machine());
    let mut failed = 0;
    for (name, check) in PROGRAMS {
        if !only.is_empty() && !only.iter().any(|one| one == name) {
            continue;
        }
        let mut random = bed::Stops::new(stops, seconds, seed);
        match check(&bed, &mut random) {
            Ok(()) => println!("{name}: outputs are equal after {random}"),
            Err(error) => {
                println!("{name}: FAILED after {random}: {error:#}");
                failed += 1;
            }
        }
    }
    anyhow::ensure!(failed == 0, "{failed} programs failed");
    Ok(())
}
