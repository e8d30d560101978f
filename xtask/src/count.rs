//! Test results: one line for each test, and a line with the counts.

use std::time::Instant;

use anyhow::{Result, bail};
use gantry_tests::report::Outcome;

/// Number of last lines of a failure's reason that are repeated at the end.
const REASON: usize = 20;

/// Number of slowest tests that are listed at the end of a whole run.
const SLOWEST: usize = 10;

/// The tests that have run, and their outcomes.
#[derive(Default)]
pub struct Count {
    /// Names of the passed tests.
    pub passed: Vec<String>,
    /// Failed tests, except those that passed at a second attempt.
    pub failed: Vec<Failure>,
    /// Tests that failed at first and then passed.
    by_chance: Vec<Failure>,
    skipped: usize,
    /// Seconds and name of each test whose duration is known.
    times: Vec<(f64, String)>,
    /// Start of each part of the run, in order.
    parts: Vec<(Instant, &'static str)>,
}

/// A failed test.
pub struct Failure {
    /// Name of the test.
    pub name: String,
    /// Last lines of the reason.
    reason: Vec<String>,
}

impl Failure {
    fn tell(&self, how: &str) {
        println!("{how}: {}", self.name);
        for line in &self.reason {
            println!("    {line}");
        }
    }
}

impl Count {
    /// Adds something that could not be started. The rest still runs.
    pub fn lacks(&mut self, name: &str, error: &anyhow::Error) {
        let chain = error.chain().map(ToString::to_string).collect();
        self.add(name, &Outcome::Failed(chain), None);
    }

    /// Begins a part of the run.
    pub fn begin(&mut self, part: &'static str) {
        self.parts.push((Instant::now(), part));
    }

    /// Moves the failed tests that have passed since to the passed ones.
    pub fn passed_at_second(&mut self, passed: &[String]) {
        let has_passed = |failure: &mut Failure| passed.contains(&failure.name);
        for failure in self.failed.extract_if(.., has_passed) {
            self.passed.push(failure.name.clone());
            self.by_chance.push(failure);
        }
    }

    /// Counts a test and prints its outcome, and its duration in seconds if known.
    pub fn add(&mut self, name: &str, outcome: &Outcome, seconds: Option<f64>) {
        let time = seconds
            .map(|seconds| format!(" ({seconds:.1} s)"))
            .unwrap_or_default();
        self.times
            .extend(seconds.map(|seconds| (seconds, name.to_owned())));
        match outcome {
            Outcome::Passed => {
                self.passed.push(name.to_owned());
                println!("test {name} ... ok{time}");
            }
            Outcome::Failed(chain) => {
                let reason: Vec<_> = chain.iter().flat_map(|cause| cause.lines()).collect();
                println!("test {name} ... FAILED{time}");
                for line in &reason {
                    println!("    {line}");
                }
                let last = reason.len().saturating_sub(REASON);
                self.failed.push(Failure {
                    name: name.to_owned(),
                    reason: reason[last..].iter().map(ToString::to_string).collect(),
                });
            }
            Outcome::Skipped(why) => {
                self.skipped += 1;
                println!("test {name} ... skipped: {why}");
            }
        }
    }

    fn closing_line(&self) {
        println!(
            "{} passed, {} failed, {} skipped",
            self.passed.len(),
            self.failed.len(),
            self.skipped
        );
    }

    /// Prints a summary of the tests that the words selected, or of all tests if there are no
    /// words.
    ///
    /// # Errors
    /// A test has failed, or there was none.
    pub fn summary(mut self, words: &[String]) -> Result<()> {
        if words.is_empty() {
            println!("parts of the run:");
            let ends = self.parts.iter().skip(1).map(|&(start, _)| start);
            for (&(start, part), end) in self.parts.iter().zip(ends.chain([Instant::now()])) {
                println!("    {:6.1} s  {part}", (end - start).as_secs_f64());
            }
            println!("slowest tests:");
            for (seconds, name) in slowest(&mut self.times) {
                println!("    {seconds:6.1} s  {name}");
            }
        }
        // Repeated here for those who see only the end of the output.
        for failure in &self.by_chance {
            failure.tell("passed only at the second attempt");
        }
        for failure in &self.failed {
            failure.tell("failed");
        }
        self.closing_line();
        if !self.failed.is_empty() {
            bail!("{} tests failed", self.failed.len());
        }
        if self.passed.len() + self.skipped == 0 {
            bail!("no test's name contains {}", words.join(" or "));
        }
        Ok(())
    }
}

/// Returns the longest of these durations, longest first.
fn slowest(times: &mut Vec<(f64, String)>) -> &[(f64, String)] {
    times.sort_by(|a, b| b.0.total_cmp(&a.0));
    times.truncate(SLOWEST);
    times
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slowest_tests_are_listed_longest_first() {
        let mut times: Vec<_> = (0..20).map(|n| (f64::from(n), n.to_string())).collect();
        let seconds: Vec<_> = slowest(&mut times).iter().map(|(time, _)| *time).collect();
        assert_eq!(seconds.len(), SLOWEST);
        assert_eq!((seconds[0], seconds[SLOWEST - 1]), (19.0, 10.0));
    }

    #[test]
    fn what_passes_at_the_second_attempt_is_counted_once_and_named() {
        let mut count = Count::default();
        for name in ["crate: good", "crate: chance", "crate: bad"] {
            let outcome = match name {
                "crate: good" => Outcome::Passed,
                _ => Outcome::Failed(vec!["why".to_owned()]),
            };
            count.add(name, &outcome, None);
        }
        count.passed_at_second(&["crate: chance".to_owned()]);
        assert_eq!(count.passed, ["crate: good", "crate: chance"]);
        let names = |failures: &[Failure]| -> Vec<_> {
            failures.iter().map(|one| one.name.clone()).collect()
        };
        assert_eq!(names(&count.failed), ["crate: bad"]);
        assert_eq!(names(&count.by_chance), ["crate: chance"]);
    }
}
