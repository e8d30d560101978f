//! A program of a test suite.

use std::{
    ffi::OsString,
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Context, Result};

use super::results::Results;

/// A program, and how its output is turned into results.
pub struct Case {
    /// Its path, or its name in `PATH`.
    pub program: OsString,
    /// Its arguments.
    pub arguments: Vec<OsString>,
    results: fn(String, &str, bool) -> Results,
    /// Time limit in seconds.
    pub seconds: u32,
}

impl Case {
    /// A program that runs for five minutes at most, in an empty folder.
    pub fn new<const N: usize>(
        program: impl Into<OsString>,
        arguments: [&str; N],
        results: fn(String, &str, bool) -> Results,
    ) -> Self {
        Self {
            program: program.into(),
            arguments: arguments.iter().map(OsString::from).collect(),
            results,
            seconds: 300,
        }
    }

    /// The program and its arguments without directories.
    pub fn name(&self) -> String {
        let words = std::iter::once(&self.program).chain(&self.arguments);
        let words = words.map(|word| {
            let name = Path::new(word).file_name().unwrap_or(word);
            name.to_string_lossy().into_owned()
        });
        words.collect::<Vec<_>>().join(" ")
    }

    /// Runs it by this command, with its caches and files in a directory of its own.
    pub fn run(&self, mut command: Command, scratch: &Path) -> Result<Results> {
        command.env("XDG_CACHE_HOME", scratch.join("cache"));
        command.current_dir(scratch);
        let output = command
            .args(&self.arguments)
            .stdin(Stdio::null())
            .output()
            .with_context(|| format!("cannot run {}", self.name()))?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned()
            + &String::from_utf8_lossy(&output.stderr);
        if output.status.code() == Some(TIMED_OUT) {
            return Ok(Results::from([(self.name(), "no end".to_owned())]));
        }
        Ok((self.results)(self.name(), &text, output.status.success()))
    }
}

/// The exit status of `timeout` on a timeout.
const TIMED_OUT: i32 = 124;
