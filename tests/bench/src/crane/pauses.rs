//! The application whose rounds are measured: `opencl_pauses`.

use std::{
    io::{BufRead, BufReader, Write},
    process::{ChildStdout, Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use gantry_host_tests::shared_device::Process;

/// Its report on the rounds since the last request.
#[derive(Clone, Copy, Debug)]
pub struct Rounds {
    pub count: f64,
    pub seconds: f64,
    /// Longest round in milliseconds.
    pub longest: f64,
    /// Median round in milliseconds.
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

    /// Rounds per second.
    pub fn rate(&self) -> f64 {
        self.count / self.seconds
    }

    /// How much longer the longest round took than the median, in milliseconds.
    pub fn stop(&self) -> f64 {
        self.longest - self.median
    }
}

/// The running application.
pub struct Application {
    process: Process,
    output: BufReader<ChildStdout>,
}

impl Application {
    /// Starts the application by this command, with `size` MiB of state of which `changed` MiB
    /// change per round.
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

    /// Returns the rounds since the last request.
    pub fn rounds(&mut self) -> Result<Rounds> {
        let input = self.process.0.stdin.as_mut().context("no input")?;
        input.write_all(b"\n")?;
        let line = self.line()?;
        Rounds::of(&line).with_context(|| format!("the application said {line:?}"))
    }

    /// Ends the application.
    ///
    /// # Errors
    /// Its memory is not what it should be.
    pub fn end(mut self) -> Result<String> {
        drop(self.process.0.stdin.take());
        let said = self.line()?;
        ensure!(said.starts_with("right "), "the application said {said:?}");
        Ok(said)
    }
}
