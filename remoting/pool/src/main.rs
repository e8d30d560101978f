//! `gantry-accel`: the pool of worker processes, and the workers.

#![cfg_attr(not(test), deny(clippy::print_stderr, clippy::print_stdout))]

use std::{
    ffi::{c_int, c_ulong, c_void},
    io::{self, Read, Write},
    path::PathBuf,
    process::ExitCode,
    time::{Duration, Instant},
};

use base::{
    Output,
    paths::{CUDA_SOCKET, OPENCL_SOCKET},
};
use clap::{CommandFactory, Parser, Subcommand};
use manual::Manual;
use remoting_pool::{
    gate, leases,
    moves::{self, Request, To, Which},
    options, placement,
    pool::{self, ListenConfig},
    probe, process, slices,
};
use remoting_proto::wire::api::ApiId;
use remoting_stream::address::Listen;
use remoting_timeslice as timeslice;

/// How often what takes long says how far it is.
const PROGRESS: Duration = Duration::from_secs(2);

/// Serves this machine's accelerators to applications elsewhere.
#[derive(Parser)]
#[command(name = "gantry-accel", version)]
struct Arguments {
    #[command(subcommand)]
    command: Role,
}

#[derive(Subcommand)]
enum Role {
    /// Listen for applications and keep workers ready for them.
    Serve {
        /// The socket to listen on, for applications and virtual machines of this machine: /run/gantry/opencl.sock if
        /// neither it nor --listen is named, or /run/gantry/cuda.sock where --api begins with cuda.
        #[arg(long, value_name = "PATH")]
        socket: Option<PathBuf>,
        /// Where to listen for applications of other machines: tcp:ADDRESS:PORT, with TLS; or for
        /// those that share no memory: unix:PATH.
        #[arg(long, value_name = "WHERE", conflicts_with = "socket")]
        listen: Option<Listen>,
        /// For a port: the private key of the certificate, in PEM.
        #[arg(
            long,
            requires = "listen",
            conflicts_with = "socket",
            value_name = "FILE"
        )]
        tls_key: Option<PathBuf>,
        /// Serve a port of this machine alone (127.0.0.1 or ::1) without TLS, to all of its users.
        #[arg(long, requires = "listen", conflicts_with = "socket")]
        plain: bool,
        /// How many applications are served at a time by --listen; others wait.
        #[arg(long, requires = "listen", conflicts_with = "socket", default_value_t = 16, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..))]
        connections: u16,
        /// How many workers the applications and virtual machines of one user may have at a time
        /// by --socket; one for each application in a guest.
        #[arg(long, conflicts_with = "listen", default_value_t = 128, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
        per_user: u32,
        /// A further socket, for this user and root, on which applications can be moved from one
        /// worker to another while they run (gantry-accel move).
        #[arg(long, conflicts_with = "listen", value_name = "PATH")]
        control: Option<PathBuf>,
        /// A further socket, on which the pool tells its figures to this user, to the group of the socket's file and to
        /// root: NAME.pool in a folder of gantry-exporter.
        #[arg(long, value_name = "PATH")]
        metrics_socket: Option<PathBuf>,
        /// How many workers wait for applications.
        #[arg(long, default_value_t = 2, value_name = "COUNT")]
        spare: usize,
        /// Begin when a byte comes by the standard input, and not if it ends before (started by `leases`).
        #[arg(long, hide = true)]
        leased: bool,
        #[command(flatten)]
        options: options::Options,
    },
    /// Grant leases: pools with a name, a weight and a sum of device memory, for jobs of a scheduler. Asked by lines of
    /// JSON at FOLDER/socket, by root and the group of its file. Leases last when the service ends, and are found again.
    Leases {
        #[command(flatten)]
        options: leases::Options,
    },
    /// Move applications to fresh workers while they run, or to another pool: each stands still until the commands that
    /// are under way have ended and its objects are made again, and notices nothing else. Prints a
    /// line for each; one that cannot be moved stays, and the line says why.
    #[command(group = clap::ArgGroup::new("which").required(true).args(["pid", "all", "list"]))]
    Move {
        /// The pool's --control socket.
        #[arg(long, value_name = "PATH")]
        control: PathBuf,
        /// The application's process id (in a virtual machine: the VMM's), or its worker's.
        #[arg(long, value_name = "PID", value_parser = clap::value_parser!(i32).range(1..))]
        pid: Option<i32>,
        /// All applications.
        #[arg(long)]
        all: bool,
        /// Move none: print which applications are served, and by which worker.
        #[arg(long)]
        list: bool,
        /// Move them to another pool: the address that GANTRY_OPENCL would have for it, a socket's
        /// path, tls://HOST:PORT, or in a virtual machine that of its agent. The application goes
        /// there by itself, with all that it has; files for TLS are those of its own environment
        /// (GANTRY_TLS_CA and the like). Or `parked`: nobody serves it, it keeps its state in its own
        /// memory, and its calls wait until it is sent somewhere (--pid ... --to ADDRESS). If this pool
        /// ends meanwhile, it goes to where it was served at first, and fails if nobody serves there
        /// within 30 s.
        #[arg(long, value_name = "ADDRESS", conflicts_with = "list")]
        to: Option<String>,
        /// Go on before all memory has come (postcopy): each stands still for a shorter time, contents of large
        /// buffers and images that it has written lately follow, and a command waits for those that it names. Returns
        /// when all have come. If the worker before is killed until then, the application has an error.
        #[arg(long, conflicts_with_all = ["list", "to"])]
        postcopy: bool,
        /// Milliseconds to wait for the commands that are under way; an application whose commands
        /// take longer stays. With --to also until it has connected, and unmapped what it has mapped.
        #[arg(long, default_value_t = 10_000, value_name = "MS")]
        drain: u64,
    },
    /// Measure how far apart this machine's processors are, in nanoseconds for a word there and
    /// back, and name those that are nearest to each other: calls are fastest if applications (or
    /// their virtual processors) and workers run on such.
    Distances {
        /// How many are named.
        #[arg(long, default_value_t = 4, value_name = "COUNT")]
        group: usize,
    },
    /// Try this machine's driver as a worker would use it, confined alike, and print what each step
    /// says. If one fails, try again without one part of the confinement after the other, and say
    /// which part the driver does not get along with.
    Probe {
        /// Try instead whether the GPU's time slices can be set, and processes stopped, as sharing by the hardware
        /// needs it: with NVIDIA's driver 580, on a GPU that nobody else uses. Takes a few seconds.
        #[arg(long)]
        slices: bool,
        #[command(flatten)]
        options: options::Options,
    },
    /// Try the driver in this process (started by `probe`).
    #[command(hide = true)]
    Tried {
        #[command(flatten)]
        options: options::Options,
    },
    /// Run kernels as told on the standard input, and set time slices (started by `probe --slices`).
    #[command(hide = true)]
    Sliced {
        /// After how many seconds it ends.
        #[arg(long)]
        seconds: u32,
        #[command(flatten)]
        options: options::Options,
    },
    /// Serve applications behind this virtual machine's exitless gate (gantry --accel-server): each
    /// lends its own CPU for its calls. The machine stands still otherwise.
    Passive {
        /// Have applications send each delegation as a message to this socket: for machines
        /// without a gate.
        #[arg(long, value_name = "PATH")]
        messages: Option<PathBuf>,
        #[command(flatten)]
        options: gate::Options,
    },
    /// Serve the application that pairs with this process (started by `passive`).
    #[command(hide = true)]
    Paired {
        #[command(flatten)]
        options: gate::Options,
    },
    /// Serve the one application that is connected to the standard input (started by `passive`).
    #[command(hide = true)]
    Connected {
        #[command(flatten)]
        options: gate::Options,
    },
    /// Serve one application (started by `serve`).
    #[command(hide = true)]
    Worker {
        #[command(flatten)]
        options: options::Options,
    },
    /// What the program prints about itself.
    #[command(flatten)]
    Manual(Manual),
}

fn run() -> Result<ExitCode, Box<dyn std::error::Error>> {
    match Arguments::parse().command {
        Role::Serve {
            socket,
            listen,
            tls_key,
            plain,
            connections,
            per_user,
            control,
            metrics_socket,
            spare,
            leased,
            options,
        } => {
            if leased {
                // It has been written down which process this is.
                io::stdin().read_exact(&mut [0])?;
            }
            let place = match (socket, listen) {
                (_, Some(listen)) => ListenConfig::Streams {
                    listen,
                    key: tls_key,
                    plain,
                    most: connections.into(),
                },
                (socket, None) => ListenConfig::Rings {
                    path: socket.unwrap_or_else(|| usual(&options.apis).into()),
                    per_user: per_user as usize,
                    control,
                },
            };
            let program = std::env::current_exe()?;
            pool::run(place, spare, &program, &options, metrics_socket.as_deref())?;
        }
        Role::Leases { options } => leases::run(options, &std::env::current_exe()?)?,
        Role::Move {
            control,
            pid,
            all: _,
            list,
            to,
            postcopy,
            drain,
        } => {
            let which = pid.map_or(Which::All, Which::Process);
            let to = match (to, postcopy) {
                (Some(address), _) => To::Address(address),
                (None, true) => To::WorkerFirst,
                (None, false) => To::Worker,
            };
            let request = match list {
                true => Request::List,
                false => Request::Move(which, Duration::from_millis(drain), to),
            };
            if !moves::ask(&control, &request, &mut Output::standard())? {
                return Ok(ExitCode::FAILURE);
            }
        }
        Role::Probe {
            slices: true,
            options,
        } => {
            let program = std::env::current_exe()?;
            if !slices::run(&program, &options, &mut Output::standard())? {
                return Ok(ExitCode::FAILURE);
            }
        }
        Role::Probe {
            slices: false,
            options,
        } => {
            let program = std::env::current_exe()?;
            let mut works = true;
            for options in options.each() {
                works &= probe::run(&program, &options, &mut Output::standard())?;
            }
            if !works {
                return Ok(ExitCode::FAILURE);
            }
        }
        Role::Tried { options } => {
            if !probe::tried(&options, &mut Output::standard())? {
                return Ok(ExitCode::FAILURE);
            }
        }
        Role::Sliced { seconds, options } => {
            slices::sliced(&options, seconds, &mut Output::standard())?;
        }
        Role::Distances { group } => distances(group, &mut Output::standard())?,
        Role::Passive { messages, options } => {
            let program = std::env::current_exe()?;
            match messages {
                Some(path) => gate::listen(path, &program, &options)?,
                None => gate::stand(&program, &options)?,
            }
        }
        Role::Paired { options } => {
            if gate::paired(&options)? {
                return Ok(ExitCode::from(gate::NEXT));
            }
        }
        Role::Connected { options } => gate::connected(&options)?,
        Role::Worker { options } => process::work(&options)?,
        Role::Manual(manual) => manual.write(Arguments::command(), &mut Output::standard())?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Where applications and machines look for a pool of the first of these APIs.
fn usual(apis: &[ApiId]) -> &'static str {
    match apis {
        [ApiId::Cuda, ..] => CUDA_SOCKET,
        _ => OPENCL_SOCKET,
    }
}

/// Prints the table, and the processors that are near each other in the form that `taskset -c`
/// takes.
fn distances(group: usize, out: &mut impl Write) -> io::Result<()> {
    let cpus = placement::processors()?;
    let mut shown = Instant::now();
    let table = placement::distances(&cpus, |done, all| {
        if shown.elapsed() >= PROGRESS {
            shown = Instant::now();
            base::note!("gantry-accel: {done} of {all} measurements are done");
        }
    })?;
    for (cpu, row) in cpus.iter().zip(&table) {
        let row: Vec<_> = row
            .iter()
            .map(|time| format!("{:5}", time.as_nanos()))
            .collect();
        writeln!(out, "{cpu:4}: {}", row.join(""))?;
    }
    let near: Vec<_> = placement::nearest(&table, group)
        .into_iter()
        .map(|place| cpus[place].to_string())
        .collect();
    writeln!(out, "near: {}", near.join(","))
}

/// The C function, for the CUDA driver's library: its calls are noted on their way to the kernel.
///
/// # Safety
/// As for the C function.
// The library passes one argument, which C passes as if the function were not variadic.
#[unsafe(no_mangle)]
unsafe extern "C" fn ioctl(file: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { timeslice::ioctl(file, request, argument) }
}

fn main() -> ExitCode {
    base::limits::file_size_is_an_error();
    let error = match run() {
        Ok(code) => return code,
        Err(error) => error,
    };
    base::note::error("gantry-accel", &*error);
    ExitCode::FAILURE
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, Parser};

    #[test]
    fn the_command_line_makes_sense() {
        super::Arguments::command().debug_assert();
    }

    #[test]
    fn what_has_no_effect_is_refused() {
        let is_taken = |line: &str| {
            let words = ["gantry-accel", "serve"].into_iter();
            super::Arguments::try_parse_from(words.chain(line.split(' '))).is_ok()
        };
        for line in [
            "--spare 1",
            "--socket /s",
            "--socket /s --per-user 4 --metrics-socket /m.pool",
            "--listen unix:/s --metrics-socket /m.pool",
            "--listen unix:/s --connections 4",
            "--memory-total 64",
            "--listen tcp:127.0.0.1:1 --plain",
            "--listen tcp:0.0.0.0:1 --tls-key k --tls-cert c --tls-client-ca a",
        ] {
            assert!(is_taken(line), "{line}");
        }
        for line in [
            "--socket /s --listen unix:/s",
            "--socket /s --connections 4",
            "--memory-total 64 --memory 64",
            "--memory-total 0",
            "--socket /s --tls-key k",
            "--tls-key k",
            "--plain",
            "--connections 4",
            "--socket /s --plain",
            "--listen unix:/s --per-user 4",
        ] {
            assert!(!is_taken(line), "{line}");
        }
    }
}
