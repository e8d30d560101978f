//! Runs scenarios on this machine, selected by words in their names.

use std::time::Instant;

use anyhow::Result;
use gantry_tests::report::Outcome;

/// Runs the scenarios that the words select, or all if there are no words. Prepares once, unless
/// nothing is selected, and reports the name, the outcome and the duration in seconds of each.
pub fn run<S, P>(
    scenarios: &[(&str, S)],
    words: &[String],
    prepare: impl FnOnce() -> Result<P>,
    call: impl Fn(&S, &P) -> Result<()>,
    mut report: impl FnMut(&str, &Outcome, f64),
) -> Result<()> {
    let wanted = |name: &str| words.is_empty() || words.iter().any(|word| name.contains(word));
    let mut selected = scenarios.iter().filter(|(name, _)| wanted(name)).peekable();
    if selected.peek().is_none() {
        return Ok(());
    }
    let prepared = prepare()?;
    for (name, scenario) in selected {
        let start = Instant::now();
        let outcome = Outcome::of(call(scenario, &prepared));
        report(name, &outcome, start.elapsed().as_secs_f64());
    }
    Ok(())
}
