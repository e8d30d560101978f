//! The L2 guest, controlled through its serial port.
//!
//! L2's init reads commands from the port, runs them in its shell, and ends each output with a
//! marker and the exit status.

use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};

use crate::gantry::PATIENCE;

/// Printed by init when it takes commands.
pub const READY: &str = "@ready@";
/// Printed after a command's output, before its exit status.
pub const STATUS: &str = "@status=";

/// Timeout of a boot in the rig, on a host that is busy with other things, too.
pub const BOOT: Duration = Duration::from_secs(150);
/// Timeout of a command. The slowest, piglit's `cl-api-build-program` next to another emulated
/// machine, has taken more than 90 s.
pub const COMMAND: Duration = Duration::from_secs(150);

/// The guest's console.
pub struct Guest {
    stream: UnixStream,
    /// Everything that the guest has printed.
    seen: String,
    /// Start of the part that has not been looked at.
    at: usize,
}

/// The MD5 sum in the output of `md5sum`, whatever else is on the console.
pub fn md5_in(said: &str) -> Result<String> {
    let is_sum = |word: &&str| word.len() == 32 && word.bytes().all(|b| b.is_ascii_hexdigit());
    let sum = said.split_whitespace().find(is_sum);
    Ok(sum
        .with_context(|| format!("no MD5 sum: {said}"))?
        .to_owned())
}

impl Guest {
    /// Connects to the Unix socket of the guest's serial port.
    pub fn connect(socket: &Path) -> Result<Self> {
        let deadline = Instant::now() + PATIENCE;
        let stream = loop {
            match UnixStream::connect(socket) {
                Ok(stream) => break stream,
                Err(_) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                Err(error) => {
                    return Err(error)
                        .with_context(|| format!("cannot reach the console {}", socket.display()));
                }
            }
        };
        stream.set_read_timeout(Some(Duration::from_millis(200)))?;
        Ok(Self {
            stream,
            seen: String::new(),
            at: 0,
        })
    }

    /// Waits until the guest prints `text`, and returns what it printed before.
    pub fn wait_for(&mut self, text: &str, limit: Duration) -> Result<String> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(found) = self.seen[self.at..].find(text) {
                let before = self.seen[self.at..self.at + found].to_owned();
                self.at += found + text.len();
                return Ok(before);
            }
            ensure!(
                Instant::now() < deadline,
                "the guest did not print {text:?} within {limit:?}; its last words:\n{}",
                self.last_words()
            );
            self.read()?;
        }
    }

    /// Waits until init takes commands.
    pub fn wait_ready(&mut self) -> Result<()> {
        self.wait_for(READY, BOOT)
            .map(|_| ())
            .context("the guest does not boot")
    }

    /// Runs a shell command and returns its output. An exit status other than 0 is an error.
    pub fn run(&mut self, command: &str) -> Result<String> {
        self.send(command)?;
        self.ended(command)
    }

    /// Waits for the end of a command that was sent, and returns its output. An exit status other
    /// than 0 is an error.
    pub fn ended(&mut self, command: &str) -> Result<String> {
        let (status, output) = self.end_of(command)?;
        ensure!(
            status == 0,
            "{command:?} ended with {status} in the guest:\n{output}"
        );
        Ok(output)
    }

    /// The MD5 sum of a shell command's output.
    pub fn md5_of(&mut self, command: &str) -> Result<String> {
        let said = self.run(&format!("{command} | md5sum"))?;
        md5_in(&said)
    }

    /// Runs a shell command and returns its exit status and output.
    pub fn status_of(&mut self, command: &str) -> Result<(i32, String)> {
        self.send(command)?;
        self.end_of(command)
    }

    fn end_of(&mut self, command: &str) -> Result<(i32, String)> {
        let output = self
            .wait_for(STATUS, COMMAND)
            .with_context(|| format!("{command:?} does not end in the guest"))?;
        let status = self.wait_for("@", COMMAND)?;
        let status = status
            .trim()
            .parse()
            .with_context(|| format!("status {status:?}"))?;
        Ok((status, output.replace('\r', "").trim().to_owned()))
    }

    /// Starts a command in the background and waits until it has printed `says`, which may be
    /// before or after the shell takes the next command.
    pub fn start(&mut self, command: &str, says: &str) -> Result<()> {
        let from = self.at;
        self.run(&format!("{command} & true"))?;
        let answered = self.at;
        self.at = from;
        self.wait_for(says, COMMAND)?;
        self.at = self.at.max(answered);
        Ok(())
    }

    /// Sends a command without waiting for its end.
    pub fn send(&mut self, command: &str) -> Result<()> {
        // The port's input buffer has 16 bytes, but the host waits for room, so a line of any
        // length is fine.
        self.stream.write_all(format!("{command}\n").as_bytes())?;
        Ok(())
    }

    /// Repeats a command until its output satisfies `is`.
    pub fn eventually(&mut self, command: &str, is: impl Fn(&str) -> bool) -> Result<String> {
        let deadline = Instant::now() + COMMAND;
        loop {
            let (_, output) = self.status_of(command)?;
            if is(&output) {
                return Ok(output);
            }
            ensure!(
                Instant::now() < deadline,
                "{command:?} still says in the guest: {output}"
            );
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    /// Everything that the guest has printed since `connect`.
    pub fn transcript(&self) -> &str {
        &self.seen
    }

    /// Reads what is available; waits a little if there is nothing.
    pub fn read(&mut self) -> Result<()> {
        let mut buffer = [0; 4096];
        match self.stream.read(&mut buffer) {
            Ok(0) => bail!(
                "the guest's console was closed; its last words:\n{}",
                self.last_words()
            ),
            Ok(read) => self
                .seen
                .push_str(&String::from_utf8_lossy(&buffer[..read])),
            Err(error)
                if matches!(
                    error.kind(),
                    std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut
                ) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    fn last_words(&self) -> &str {
        let start = self.seen.len().saturating_sub(1500);
        let start = (start..self.seen.len()).find(|&at| self.seen.is_char_boundary(at));
        &self.seen[start.unwrap_or(self.seen.len())..]
    }
}
