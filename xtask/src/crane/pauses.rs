//! The application whose rounds are looked at: `opencl_pauses`.

use std::{
    io::{BufRead, BufReader, Write},
    process::{ChildStdout, Command, Stdio},
};

use anyhow::{Context, Result, ensure};

use crate::shared_device::Process;

/// What it says of the rounds since it was asked last.
#[derive(Clone, Copy, Debug)]
pub struct Rounds {
    pub count: f64,
    pub seconds: f64,
    /// Milliseconds.
    pub longest: f64,
    /// Milliseconds.
    pub median: f64,
}

impl Rounds {
    fn of(line: &str) -> Option<Self> {
        let mut words = line.split_whitespace().map(str::parse);
        let mut next = || words.next()?.ok();
        Some(Self {
            count: next()?,
            seconds: next()?,
            longest: next()?,
            median: next()?,
        })
    }

    /// Rounds a second.
    pub fn rate(&self) -> f64 {
        self.count / self.seconds
    }

    /// How much longer the longest round took than others, in milliseconds.
    pub fn stop(&self) -> f64 {
        self.longest - self.median
    }
}

/// The application, computing.
pub struct Application {
    process: Process,
    output: BufReader<ChildStdout>,
}

impl Application {
    /// By this command, which runs the program, on so many MiB of which so many change in a round.
    pub fn start(mut command: Command, size: usize, changed: usize) -> Result<Self> {
        let mut child = command
            .args([size.to_string(), changed.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {}", command.get_program().display()))?;
        let output = child.stdout.take().context("no output")?;
        let mut application = Self {
            process: Process(child),
            output: BufReader::new(output),
        };
        let said = application.line()?;
        ensure!(said == "running", "the application said {said:?}");
        Ok(application)
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        Ok(line.trim_end().to_owned())
    }

    /// How its rounds were since this was asked last.
    pub fn rounds(&mut self) -> Result<Rounds> {
        let input = self.process.0.stdin.as_mut().context("no input")?;
        input.write_all(b"\n")?;
        let line = self.line()?;
        Rounds::of(&line).with_context(|| format!("the application said {line:?}"))
    }

    /// Ends it.
    ///
    /// # Errors
    /// Its memory is not what it is to be.
    pub fn end(mut self) -> Result<String> {
        drop(self.process.0.stdin.take());
        let said = self.line()?;
        ensure!(said.starts_with("right "), "the application said {said:?}");
        Ok(said)
    }
}
