//! Results on their way from L1 to the host: one line each.
//!
//! Lines that belong to the protocol start with a marker, because the kernel writes to serial
//! ports as well.

use std::fmt;

use anyhow::Result;
use serde::{Deserialize, Serialize};

const MARKER: &str = "@gantry@";

/// The order to show the demonstration, instead of the name of a scenario.
pub const DEMO: &str = "--demo";

/// The order to measure, instead of the name of a scenario. Names of measurements may follow.
pub const BENCH: &str = "--bench";

/// The order to have guests share a device, instead of the name of a scenario. The policy, the
/// seconds and the guests' weights follow.
pub const SHARING: &str = "--sharing";

/// The order to take orders of another L1 from now on, instead of the name of a scenario.
pub const BESIDE: &str = "--beside";

/// What L1 tells the host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Report {
    /// L1 is up and the runner takes orders.
    Ready,
    /// A scenario is over.
    Finished {
        /// Its name.
        name: String,
        /// How.
        outcome: Outcome,
        /// Seconds that it took.
        seconds: f64,
    },
    /// A line of a log of the scenario that is about to be reported as failed.
    Log {
        /// Where it comes from.
        file: String,
        /// The line.
        line: String,
    },
    /// A line for people.
    Note(String),
}

/// How a scenario ended.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub enum Outcome {
    /// As it should.
    Passed,
    /// With an error, outermost sentence first.
    Failed(Vec<String>),
    /// Not run, and why.
    Skipped(String),
}

/// What a scenario fails with that cannot be run here: why.
#[derive(Debug)]
pub struct Skipped(pub String);

impl fmt::Display for Skipped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Skipped {}

impl Outcome {
    /// How a scenario has ended that has returned this.
    pub fn of(result: Result<()>) -> Self {
        match result {
            Ok(()) => Self::Passed,
            Err(error) if error.is::<Skipped>() => Self::Skipped(error.to_string()),
            Err(error) => Self::Failed(error.chain().map(ToString::to_string).collect()),
        }
    }
}

impl Report {
    /// The line that carries the report, without its end.
    pub fn to_line(&self) -> String {
        // Strings and finite numbers always serialize.
        format!(
            "{MARKER}{}",
            serde_json::to_string(self).unwrap_or_default()
        )
    }

    /// The report in a line, if there is one.
    pub fn parse(line: &str) -> Option<Self> {
        let at = line.find(MARKER)?;
        serde_json::from_str(line[at + MARKER.len()..].trim_end()).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_survive_the_serial_port_and_kernel_messages_are_no_reports() {
        let report = Report::Note("two\nlines".to_owned());
        let line = format!("[    1.2] noise {}\r\n", report.to_line());
        assert_eq!(Report::parse(&line), Some(report));
        assert_eq!(Report::parse("[    1.2] virtio_blk virtio0"), None);
    }
}
