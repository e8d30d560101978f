//! Results on their way from L1 to the host, one per line.
//!
//! Lines of the protocol start with a marker, because the kernel writes to serial ports, too.

use std::fmt;

use anyhow::Result;
use serde::{Deserialize, Serialize};

const MARKER: &str = "@gantry@";

/// The order to run the demonstration, sent in place of a scenario's name.
pub const DEMO: &str = "--demo";

/// The order to run measurements, sent in place of a scenario's name. Names of measurements may
/// follow.
pub const BENCH: &str = "--bench";

/// The order to let guests share a device, sent in place of a scenario's name. The policy, the
/// seconds and the guests' weights follow.
pub const SHARING: &str = "--sharing";

/// The order to take orders from another L1 from now on, sent in place of a scenario's name.
pub const BESIDE: &str = "--beside";

/// What L1 tells the host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Report {
    /// L1 is up, and the runner takes orders.
    Ready,
    /// A scenario is over.
    Finished {
        /// Its name.
        name: String,
        /// How it ended.
        outcome: Outcome,
        /// Seconds that it took.
        seconds: f64,
    },
    /// A log line of the scenario that is about to be reported as failed.
    Log {
        /// The file that it comes from.
        file: String,
        /// The line.
        line: String,
    },
    /// A line for a human reader.
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

/// The error of a scenario that cannot run here, with the reason.
#[derive(Debug)]
pub struct Skipped(pub String);

impl fmt::Display for Skipped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Skipped {}

impl Outcome {
    /// The outcome of a scenario that returned this result.
    pub fn of(result: Result<()>) -> Self {
        match result {
            Ok(()) => Self::Passed,
            Err(error) if error.is::<Skipped>() => Self::Skipped(error.to_string()),
            Err(error) => Self::Failed(error.chain().map(ToString::to_string).collect()),
        }
    }
}

impl Report {
    /// The line that carries the report, without a line end.
    pub fn to_line(&self) -> String {
        // Strings and finite numbers always serialize.
        format!(
            "{MARKER}{}",
            serde_json::to_string(self).unwrap_or_default()
        )
    }

    /// The report in a line, if the line has one.
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
