//! The results as a document.

use std::{collections::BTreeSet, fmt::Write as _};

use gantry_host_tests::opencl::programs::results::Results;

use super::known;

/// The rows of the tables.
#[derive(Default)]
pub struct Tables {
    /// Name of the host's platform.
    pub platform: String,
    /// The command that produces the document.
    pub command: String,
    suites: String,
    differences: String,
    /// Tests that pass neither natively nor through Gantry.
    neither: String,
    /// Tests whose results differ for an unknown reason.
    pub unexplained: Vec<String>,
}

/// Result of a test that exists on the other side only.
const ABSENT: &str = "not there";

impl Tables {
    pub fn new(platform: String, command: String) -> Self {
        Self {
            platform,
            command,
            ..Self::default()
        }
    }

    /// Adds the results of a suite.
    pub fn add(&mut self, name: &str, native: &Results, remoted: &Results) {
        let tests: BTreeSet<_> = native.keys().chain(remoted.keys()).collect();
        let good = |result: &str| result.starts_with("pass");
        let passed = |results: &Results| results.values().filter(|result| good(result)).count();
        let mut same = 0;
        // Writing to a string cannot fail.
        for test in &tests {
            let of = |results: &'_ Results| {
                let result = results.get(*test).map_or(ABSENT, String::as_str);
                result.to_owned()
            };
            let (one, other) = (of(native), of(remoted));
            if one != other {
                let why = known::why(&self.platform, test, &one, &other);
                if why.is_none() {
                    self.unexplained
                        .push(format!("{test}: {one} natively, {other} through Gantry"));
                }
                let why = why.unwrap_or("not explained");
                let _ = writeln!(self.differences, "| {test} | {one} | {other} | {why} |");
                continue;
            }
            same += 1;
            if !good(&one) {
                let _ = writeln!(self.neither, "| {test} | {one} |");
            }
        }
        let _ = writeln!(
            self.suites,
            "| {name} | {} | {} | {} | {same} |",
            tests.len(),
            passed(native),
            passed(remoted)
        );
    }

    /// The document so far.
    pub fn text(&self) -> String {
        let Self {
            platform,
            command,
            suites,
            differences,
            neither,
            ..
        } = self;
        let part = |head: &str, rows: &str, none: &str| match rows {
            "" => format!("{none}\n"),
            _ => format!("{head}{rows}"),
        };
        let differences = part(
            "| what differs | natively | through Gantry | why |\n|---|---|---|---|\n",
            differences,
            "There is no difference.",
        );
        let neither = part(
            "| what passes neither way | natively and through Gantry |\n|---|---|\n",
            neither,
            "Everything passes one way or the other.",
        );
        format!(
            "# Third-party programs, natively and through the OpenCL driver\n\n\
             Written by `{command}`.\nThe driver of both: {platform}.\n\n\
             | programs | tests | pass natively | pass through Gantry | same result |\n\
             |---|---|---|---|---|\n{suites}\n{differences}\n{neither}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(result: &str) -> Results {
        Results::from([("a".to_owned(), result.to_owned())])
    }

    #[test]
    fn what_differs_is_named_and_unexplained_unless_it_is_known() {
        let mut tables = Tables::default();
        tables.add("x", &one("pass"), &one("fail"));
        tables.add("y", &one("fail"), &Results::new());
        assert_eq!(
            tables.suites,
            "| x | 1 | 1 | 0 | 0 |\n| y | 1 | 0 | 0 | 0 |\n"
        );
        assert_eq!(
            tables.differences,
            "| a | pass | fail | not explained |\n| a | fail | not there | not explained |\n"
        );
        assert_eq!(tables.unexplained.len(), 2);

        let mut tables = Tables::new("PoCL 3.1".to_owned(), String::new());
        let of = |result: &str| {
            let test = "cl-api-create-command-queue -auto".to_owned();
            Results::from([(test, result.to_owned())])
        };
        tables.add("x", &of("no result"), &of("pass"));
        assert!(tables.differences.contains("PoCL ends the process"));
        assert!(tables.unexplained.is_empty());
    }

    #[test]
    fn what_fails_either_way_is_named_and_no_difference() {
        let mut tables = Tables::default();
        tables.add("x", &one("fail"), &one("fail"));
        tables.add("y", &one("pass"), &one("pass"));
        assert_eq!(tables.neither, "| a | fail |\n");
        assert!(tables.text().contains("There is no difference."));
        assert!(tables.unexplained.is_empty());
    }
}
