//! A second attempt at the few tests of a whole run that have failed, one by one: what passes then has failed by
//! chance, which is a defect as well. It does not end the run with an error, but is named at its end, with why it
//! failed.

use std::sync::Mutex;

use anyhow::Result;
use base::Unpoisoned;

use crate::{count::Count, unit_tests};

/// If more than so many tests have failed, it was not by chance.
const MOST: usize = 5;

/// Runs the tests again that have failed, a scenario by its name with `scenario`, and counts those among the passed
/// ones that pass now.
pub fn run(count: &mut Count, scenario: impl Fn(String, &Mutex<Count>) -> Result<()>) {
    if count.failed.is_empty() || count.failed.len() > MOST {
        return;
    }
    count.begin("a second attempt at what has failed");
    let names: Vec<_> = count.failed.iter().map(|one| one.name.clone()).collect();
    let second = Mutex::new(Count::default());
    let tried = unit_tests::again(&names, |name, outcome| {
        second.lock_unpoisoned().add(name, outcome, None);
    });
    // What a name chooses is what contains it, which here is one scenario, or none where it is no scenario's.
    let ran = names
        .into_iter()
        .fold(tried, |before, name| before.and(scenario(name, &second)));
    if let Err(error) = ran {
        println!("the second attempt was cut short: {error:#}");
    }
    count.passed_at_second(&second.lock_unpoisoned().passed);
}
