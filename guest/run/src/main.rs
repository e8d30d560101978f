//! `gantry-cuda run PROGRAM`: runs a program with Gantry's CUDA libraries, whatever libraries it
//! brings itself, or with its own libraries and Gantry's worker for NVIDIA's device files. Only the
//! program's environment is changed; see the auditing library in `lib.rs`.

#![cfg_attr(not(test), deny(clippy::print_stderr, clippy::print_stdout))]

use std::{
    env,
    ffi::{OsStr, OsString},
    fs, io,
    os::unix::{
        ffi::OsStrExt,
        fs::{FileTypeExt, PermissionsExt},
        process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

use base::{
    Output,
    paths::{NVIDIA_SOCKET, cuda_libraries},
};
use clap::{CommandFactory, Parser, Subcommand};
use gantry_cuda_audit::VARIABLE;
use manual::Manual;

/// The auditing library.
const AUDITOR: &str = "libgantry_cuda_audit.so";
/// The library that carries calls on NVIDIA's device files.
const PRELOADED: &str = "libgantry_nvidia_preload.so";
/// The variable with the socket that it connects to.
const SOCKET: &str = "GANTRY_NVIDIA_SOCKET";
/// The libraries that the folder must contain in addition.
const NEEDED: [&str; 4] = [
    "libcuda.so.1",
    "libcudart.so.13",
    "libcublas.so.13",
    "libcublasLt.so.13",
];
/// The maximum number of bytes of a program to look at.
const HEAD: u64 = 1 << 16;

const EXAMPLES: &str = "Examples:
  gantry-cuda run python3 train.py           PyTorch of any environment, without changing it
  gantry-cuda run --libraries DIR ./program  with the libraries of another folder
  gantry-cuda run --native python3 train.py  with NVIDIA's libraries, and device files by gantry-nvidia";

/// Runs programs with Gantry's CUDA libraries.
#[derive(Debug, Parser)]
#[command(
    name = "gantry-cuda",
    version,
    after_help = EXAMPLES,
    disable_help_subcommand = true
)]
struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Run a program, and everything that it starts, with Gantry's libcuda, libcudart, libcublas
    /// and libcublasLt instead of those that it would find.
    Run {
        /// The folder of Gantry's libraries (default: lib/gantry-cuda beside this program's folder, or
        /// /usr/local/lib/gantry-cuda).
        #[arg(long, value_name = "DIR")]
        libraries: Option<PathBuf>,
        /// Use the program's own NVIDIA libraries (a native context): calls on device files go to a gantry-nvidia; in
        /// a virtual machine, through gantry-agent to that of the host.
        #[arg(long)]
        native: bool,
        /// The socket of gantry-nvidia or gantry-agent.
        #[arg(long, default_value = NVIDIA_SOCKET, value_name = "PATH", requires = "native")]
        socket: PathBuf,
        /// The program and its arguments.
        #[arg(
            trailing_var_arg = true,
            allow_hyphen_values = true,
            required = true,
            value_name = "PROGRAM"
        )]
        program: Vec<OsString>,
    },
    /// What the program prints about itself.
    #[command(flatten)]
    Manual(Manual),
}

/// Why a program is not run.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(
        "{} has no {file}: docs/user/cuda.md says how to make Gantry's CUDA libraries; --libraries names \
         their folder",
        folder.display()
    )]
    NoLibrary { folder: PathBuf, file: &'static str },
    #[error(
        "{} cannot be named in a list of the loader's, for a ':', ';' or space in it: give the libraries another folder",
        .0.display()
    )]
    Unlistable(PathBuf),
    #[error(
        "nobody serves native contexts at {}: start gantry-nvidia, or gantry-agent in a virtual machine that has \
         --accel api=nvidia; --socket names another socket",
        path.display()
    )]
    NoWorker { path: PathBuf, source: io::Error },
    #[error(
        "{} has no {PRELOADED}: docs/user/native-contexts.md says how to make it; --libraries names its folder",
        .0.display()
    )]
    NoPreloaded(PathBuf),
    #[error("there is no program {}", .0.display())]
    NoProgram(PathBuf),
    #[error(
        "{} is statically linked: it loads no libraries that could be others",
        .0.display()
    )]
    Static(PathBuf),
    #[error("cannot run {}", program.display())]
    Run { program: PathBuf, source: io::Error },
    #[error("cannot write to the standard output")]
    Say(#[source] io::Error),
}

/// The path of a program, as the shell would find it.
fn find(program: &OsStr) -> Option<PathBuf> {
    if program.as_bytes().contains(&b'/') {
        return Some(program.into());
    }
    let path = env::var_os("PATH")?;
    env::split_paths(&path)
        .map(|folder| folder.join(program))
        .find(|file| {
            fs::metadata(file)
                .is_ok_and(|data| data.is_file() && data.permissions().mode() & 0o111 != 0)
        })
}

/// Whether these are the first bytes of a program for this kind of machine that has no interpreter
/// (loader).
fn is_static(head: &[u8]) -> bool {
    const INTERPRETER: u32 = 3;
    let at = |place: usize, bytes: usize| {
        let part = head.get(place..place.checked_add(bytes)?)?;
        let mut word = [0; 8];
        word[..bytes].copy_from_slice(part);
        Some(u64::from_le_bytes(word))
    };
    if !head.starts_with(b"\x7fELF\x02\x01") {
        return false;
    }
    let headers = || {
        Some((
            at(32, 8)? as usize,
            at(54, 2)? as usize,
            at(56, 2)? as usize,
        ))
    };
    let Some((start, size, count)) = headers() else {
        return false;
    };
    // Not reported as static unless all program headers are visible.
    let kinds = (0..count).map(|index| at(start.checked_add(index * size)?, 4));
    let kinds: Option<Vec<u64>> = kinds.collect();
    kinds.is_some_and(|kinds| !kinds.contains(&u64::from(INTERPRETER)))
}

fn head(path: &Path) -> io::Result<Vec<u8>> {
    use std::io::Read;
    let mut head = Vec::new();
    fs::File::open(path)?.take(HEAD).read_to_end(&mut head)?;
    Ok(head)
}

/// A list of paths with another path prepended.
fn first(path: &Path, variable: &str) -> OsString {
    let mut list = path.as_os_str().to_owned();
    if let Some(others) = env::var_os(variable).filter(|others| !others.is_empty()) {
        list.push(":");
        list.push(others);
    }
    list
}

/// The real path of a folder that can be named in a list of the loader's, which is split at these characters.
fn listable(folder: &Path, split: &[u8]) -> Result<PathBuf, Error> {
    let folder = fs::canonicalize(folder).unwrap_or_else(|_| folder.to_owned());
    let bytes = folder.as_os_str().as_bytes();
    if bytes.iter().any(|byte| split.contains(byte)) {
        return Err(Error::Unlistable(folder));
    }
    Ok(folder)
}

/// The program with Gantry's libraries.
fn with_libraries(libraries: &Path, program: &[OsString]) -> Result<Command, Error> {
    let folder = listable(libraries, b":;")?;
    for file in NEEDED.into_iter().chain([AUDITOR]) {
        if !folder.join(file).is_file() {
            return Err(Error::NoLibrary { folder, file });
        }
    }
    let mut command = command(program)?;
    command
        .env("LD_AUDIT", first(&folder.join(AUDITOR), "LD_AUDIT"))
        .env("LD_LIBRARY_PATH", first(&folder, "LD_LIBRARY_PATH"))
        .env(VARIABLE, &folder);
    Ok(command)
}

/// The program with its own libraries, and the worker at `socket` for device files.
fn with_worker(libraries: &Path, socket: &Path, program: &[OsString]) -> Result<Command, Error> {
    let preloaded = listable(libraries, b": ")?.join(PRELOADED);
    if !preloaded.is_file() {
        return Err(Error::NoPreloaded(libraries.to_owned()));
    }
    let no_worker = |source: io::Error| Error::NoWorker {
        path: socket.to_owned(),
        source,
    };
    // The program may change its folder.
    let socket = fs::canonicalize(socket).map_err(no_worker)?;
    if !fs::metadata(&socket).is_ok_and(|found| found.file_type().is_socket()) {
        return Err(no_worker(io::ErrorKind::NotConnected.into()));
    }
    let mut command = command(program)?;
    command
        .env("LD_PRELOAD", first(&preloaded, "LD_PRELOAD"))
        .env(SOCKET, &socket);
    Ok(command)
}

/// A program that the loader looks for libraries for.
fn command(program: &[OsString]) -> Result<Command, Error> {
    let (name, arguments) = program
        .split_first()
        .ok_or(Error::NoProgram(PathBuf::new()))?;
    let path = find(name).filter(|path| path.exists());
    let path = path.ok_or_else(|| Error::NoProgram(name.into()))?;
    // A program that cannot be read can still be run.
    if head(&path).is_ok_and(|head| is_static(&head)) {
        return Err(Error::Static(path));
    }
    let mut command = Command::new(path);
    command.arg0(name).args(arguments);
    Ok(command)
}

/// Replaces this process by the program.
fn become_program(mut command: Command) -> Error {
    let source = command.exec();
    Error::Run {
        program: command.get_program().into(),
        source,
    }
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().what {
        What::Run {
            libraries,
            native: true,
            socket,
            program,
        } => with_worker(&libraries.unwrap_or_else(cuda_libraries), &socket, &program)
            .and_then(|command| Err(become_program(command))),
        What::Run {
            libraries, program, ..
        } => with_libraries(&libraries.unwrap_or_else(cuda_libraries), &program)
            .and_then(|command| Err(become_program(command))),
        What::Manual(manual) => manual
            .write(Arguments::command(), &mut Output::standard())
            .map_err(Error::Say),
    };
    base::note::end("gantry-cuda", outcome)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_makes_sense() {
        Arguments::command().debug_assert();
        let line = "gantry-cuda run --libraries x python3 --version -c y";
        let asked = Arguments::try_parse_from(line.split(' ')).unwrap();
        let What::Run {
            libraries,
            native,
            program,
            ..
        } = asked.what
        else {
            panic!("it does not run anything");
        };
        assert_eq!(
            (libraries, native, program.len()),
            (Some(PathBuf::from("x")), false, 4)
        );
        let line = "gantry-cuda run --socket /run/x python3";
        let no_native = Arguments::try_parse_from(line.split(' ')).unwrap_err();
        assert_eq!(no_native.exit_code(), 2);
        let nothing = Arguments::try_parse_from(["gantry-cuda", "run"]).unwrap_err();
        assert_eq!(nothing.exit_code(), 2);
    }

    #[test]
    fn programs_that_name_no_loader_are_told_from_others() {
        let own = head(&env::current_exe().unwrap()).unwrap();
        assert!(!is_static(&own));
        let mut changed = own.clone();
        let (start, size) = (usize::from(own[32]), usize::from(own[54]));
        for index in 0..usize::from(own[56]) {
            changed[start + index * size] &= !3;
        }
        assert!(is_static(&changed));
        assert!(!is_static(&own[..60]));
        assert!(!is_static(b"#!/bin/sh\n"));
        // Headers beyond the end of the file, and where sums would overflow.
        changed[32..40].copy_from_slice(&[0xff; 8]);
        assert!(!is_static(&changed));
    }
}
