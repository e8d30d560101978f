//! Manual pages and shell completions of the programs, from their command lines: two subcommands that
//! each program has.

use std::{
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
};

use clap::{Command, Subcommand};
pub use clap_complete::Shell;

/// What each program prints about itself.
#[derive(Clone, Debug, PartialEq, Eq, Subcommand)]
pub enum Manual {
    /// Print a completion script.
    Completions {
        /// For which shell.
        shell: Shell,
    },
    /// Print the manual page, or write those of all subcommands to a folder.
    Man {
        /// Where to write them, each to a file of its own; the folder is made if it is not there.
        folder: Option<PathBuf>,
    },
}

impl Manual {
    /// Prints it for a program to `out`, or writes it to the folder.
    pub fn write(&self, mut program: Command, out: &mut dyn Write) -> io::Result<()> {
        match self {
            Self::Completions { shell } => {
                let name = program.get_name().to_owned();
                // Its own way of writing panics if nobody reads.
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

/// The pages of the program and of all of its subcommands, as PROGRAM-SUBCOMMAND.1.
fn pages(program: Command, folder: &Path) -> io::Result<()> {
    let failed = |error: io::Error| {
        let text = format!("cannot write manual pages to {}: {error}", folder.display());
        io::Error::new(error.kind(), text)
    };
    fs::create_dir_all(folder).map_err(failed)?;
    clap_mangen::generate_to(program, folder).map_err(failed)
}

/// For tests: runs a program with each of `lines` of arguments while nobody reads its output, as in a shell's
/// `program | head -1` after the first line, and checks that it ends well all the same and says nothing of it.
///
/// # Panics
/// If it is not so.
#[cfg(feature = "testing")]
pub fn check_unread(program: &str, lines: &[&str]) {
    for line in lines {
        check_unread_of(program, line.split_whitespace());
    }
}

/// The same of one line, whose arguments may have spaces.
///
/// # Panics
/// As [`check_unread`].
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

/// For tests: checks that a program's description of its command line makes sense, that it takes
/// `lines` of arguments, and that it refuses `wrong` ones. An empty line has no arguments.
///
/// # Panics
/// If it is not so.
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
