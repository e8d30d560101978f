//! What a scenario has seen, with the state of the files that it depends on.

use std::{
    fmt::Write as _,
    fs,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use gantry_build::root;

/// What a run has seen.
pub struct Record {
    lines: String,
    start: Instant,
}

impl Record {
    pub(crate) fn new() -> Self {
        Self {
            lines: String::new(),
            start: Instant::now(),
        }
    }

    /// Notes and prints what was seen.
    pub fn saw(&mut self, what: &str) {
        let line = format!("{:5} s  {what}", self.elapsed().as_secs());
        println!("    {line}");
        self.lines.push_str(&line);
        self.lines.push('\n');
    }

    fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    pub(crate) fn write(self, name: &str, to: &str, of: &[&str]) -> Result<()> {
        let mut text = format!(
            "{name}\n\nOutput of `cargo xtask test --product`; seconds since its start. In brackets: git's objects of the files that\nit depends on.\n\n{}\n",
            self.lines
        );
        for path in of {
            writeln!(text, "[{path} {}]", object(path)?)?;
        }
        let to = root().join(to);
        fs::write(&to, text).with_context(|| format!("cannot write {}", to.display()))
    }
}

/// The object that the current commit has for a path.
fn object(path: &str) -> Result<String> {
    let mut git = Command::new("git");
    let output = git
        .args(["rev-parse", &format!("HEAD:{path}")])
        .current_dir(root())
        .output()?;
    ensure!(
        output.status.success(),
        "git knows no {path} in the current commit: {}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}

/// Why a record does not hold any more.
pub(crate) fn outdated(record: &str, of: &[&str]) -> Result<Option<String>> {
    let Ok(text) = fs::read_to_string(root().join(record)) else {
        return Ok(Some(format!("{record} is missing")));
    };
    for path in of {
        if !text.contains(&format!("[{path} {}]", object(path)?)) {
            return Ok(Some(format!("{path} has changed since {record}")));
        }
    }
    Ok(None)
}
