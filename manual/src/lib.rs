//! Manual pages and shell completions, generated from the command line definitions of the programs. Every program has
//! these two subcommands.

use std::{
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
};

use clap::{Command, Subcommand};
pub use clap_complete::Shell;

/// Output that describes a program.
#[derive(Clone, Debug, PartialEq, Eq, Subcommand)]
pub enum Manual {
    /// Print a completion script.
    Completions {
        /// The shell to generate it for.
        shell: Shell,
    },
    /// Print the manual page, or write the pages of all subcommands to a directory.
    Man {
        /// Directory to write the pages to, one file each. It is created if it does not exist.
        folder: Option<PathBuf>,
    },
}

impl Manual {
    /// Prints the output for a program to `out`, or writes it to the directory.
    pub fn write(&self, mut program: Command, out: &mut dyn Write) -> io::Result<()> {
        match self {
            Self::Completions { shell } => {
                let name = program.get_name().to_owned();
                // The crate's own output function panics if nobody reads.
                let mut script = Vec::new();
                clap_complete::generate(*shell, &mut program, name, &mut script);
                out.write_all(&script)
            }
            Self::Man { folder: None } => clap_mangen::Man::new(program).render(out),
            Self::Man {
                folder: Some(folder),
            } => pages(program, folder),
        }
    }
}

/// Writes the pages of the program and of all its subcommands, as PROGRAM-SUBCOMMAND.1.
fn pages(program: Command, folder: &Path) -> io::Result<()> {
    let failed = |error: io::Error| {
        let text = format!("cannot write manual pages to {}: {error}", folder.display());
        io::Error::new(error.kind(), text)
    };
    fs::create_dir_all(folder).map_err(failed)?;
    clap_mangen::generate_to(program, folder).map_err(failed)
}

/// For tests: runs a program with each of `lines` of arguments while nobody reads its output, like in a shell's
/// `program | head -1` after the first line. Checks that the program still succeeds and reports no error.
///
/// # Panics
/// If a check fails.
#[cfg(feature = "testing")]
pub fn check_unread(program: &str, lines: &[&str]) {
    for line in lines {
        check_unread_of(program, line.split_whitespace());
    }
}

/// Like [`check_unread`] for one line, whose arguments may contain spaces.
///
/// # Panics
/// As for [`check_unread`].
#[cfg(feature = "testing")]
pub fn check_unread_of<A: AsRef<std::ffi::OsStr>>(
    program: &str,
    line: impl IntoIterator<Item = A>,
) {
    let (reader, writer) = io::pipe().expect("there are descriptors");
    drop(reader);
    let mut command = std::process::Command::new(program);
    let said = command
        .args(line)
        .stdin(std::process::Stdio::null())
        .stdout(writer)
        .output()
        .expect("the program can be run");
    assert!(
        said.status.success() && said.stderr.is_empty(),
        "{command:?}: {said:?}"
    );
}

/// Whether a program has ended with an error: not by a signal, nor by a panic (101).
#[cfg(feature = "testing")]
fn is_error(status: std::process::ExitStatus) -> bool {
    status.code().is_some_and(|code| code != 0 && code != 101)
}

/// For tests: runs a program that cannot do what its arguments ask for while its log may not grow, and on a full disk,
/// and with a descriptor too few for other arguments. Checks that it ends with an error, not by a signal, and that it
/// says why.
///
/// # Panics
/// If a check fails.
#[cfg(feature = "testing")]
pub fn check_scarce(program: &str, impossible: &str, needs_files: Option<&str>) {
    let run = |limit: &str, line: &str, log| {
        let mut command = std::process::Command::new("sh");
        command
            .args([
                "-c",
                &format!("ulimit {limit}; exec \"$0\" \"$@\""),
                program,
            ])
            .args(line.split_whitespace())
            .stdin(std::process::Stdio::null())
            .stderr(log);
        let said = command.output().expect("there is a shell");
        assert!(is_error(said.status), "{command:?}: {said:?}");
        said
    };
    let name = format!("gantry-scarce-{}", std::process::id());
    let path = std::env::temp_dir().join(name);
    let log = std::fs::File::create(&path).expect("there is room");
    run("-f 0", impossible, log.into());
    std::fs::remove_file(path).expect("it is there");
    let full = std::fs::File::options().write(true).open("/dev/full");
    run("-c 0", impossible, full.expect("it is there").into());
    let Some(line) = needs_files else {
        return;
    };
    let said = run("-n 4", line, std::process::Stdio::piped());
    let text = String::from_utf8_lossy(&said.stderr);
    assert!(text.contains("Too many open files"), "{text}");
    assert!(!text.contains("panicked"), "{text}");
}

/// For tests: runs a program that needs threads or processes where none can be started. Checks that it ends with an
/// error, and that it says why.
///
/// # Panics
/// If a check fails.
#[cfg(feature = "testing")]
pub fn check_alone(program: &str, line: &str) {
    let Some(mut command) = with_one_process(program, line) else {
        return;
    };
    let said = command.output().expect("there is a shell");
    assert!(is_error(said.status), "{command:?}: {said:?}");
    let text = String::from_utf8_lossy(&said.stderr);
    assert!(text.contains("Resource temporarily unavailable"), "{text}");
    let what = ["thread", "process"];
    assert!(what.iter().any(|what| text.contains(what)), "{text}");
    assert!(!text.contains("panicked"), "{text}");
}

/// For tests: a command that runs a program as a user of its own, who may have one process: no thread can be started.
/// `None`, and a word about it, unless the test is run by root and other users can run the program.
///
/// # Panics
/// If there is no `/proc`.
#[cfg(feature = "testing")]
pub fn with_one_process(program: &str, line: &str) -> Option<std::process::Command> {
    use std::{
        os::unix::{fs::MetadataExt, process::CommandExt},
        process::{Command, Stdio, id},
        sync::atomic::{AtomicU32, Ordering},
    };

    /// Users of this process's tests.
    static USERS: AtomicU32 = AtomicU32::new(0);
    let user = 1_000_000 + id() * 8 + USERS.fetch_add(1, Ordering::Relaxed) % 8;
    let own = std::fs::metadata("/proc/self").expect("there is /proc");
    let as_user = |program: &str| {
        let mut command = Command::new(program);
        command.uid(user).gid(user).stdin(Stdio::null());
        command
    };
    let is_reachable = || {
        let status = as_user("test").args(["-x", program]).status();
        status.is_ok_and(|status| status.success())
    };
    if own.uid() != 0 || !is_reachable() {
        eprintln!("not tested: {program} cannot be run as another user here");
        return None;
    }
    let mut command = as_user("bash");
    command
        .args(["-c", "ulimit -u 1; exec \"$0\" \"$@\"", program])
        .args(line.split_whitespace());
    Some(command)
}

/// For tests: checks that a program's command line definition is consistent, that it accepts `lines` of arguments, and
/// that it rejects the `wrong` ones. An empty line has no arguments.
///
/// # Panics
/// If a check fails.
#[cfg(feature = "testing")]
pub fn check<P: clap::Parser>(lines: &[&str], wrong: &[&str]) {
    P::command().debug_assert();
    let is_taken = |line: &str| {
        let words = std::iter::once("program").chain(line.split_whitespace());
        P::try_parse_from(words).is_ok()
    };
    for line in lines {
        assert!(is_taken(line), "{line:?} is refused");
    }
    for line in wrong {
        assert!(!is_taken(line), "{line:?} is taken");
    }
}
