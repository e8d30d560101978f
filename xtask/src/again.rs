//! Retries the few failed tests of a whole run one by one. A test that passes then has failed by chance, which is also
//! a defect. It does not make the run fail, but is listed at its end, with the reason of its failure.

use std::sync::Mutex;

use anyhow::Result;
use base::Unpoisoned;

use crate::{count::Count, unit_tests};

/// If more tests than this have failed, it was not by chance.
const MOST: usize = 5;

/// Reruns the failed tests (a scenario by its name with `scenario`), and counts those that pass now among the passed
/// ones.
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
    // A name selects everything that contains it. Here, that is one scenario, or none if the name is not a scenario's.
    let ran = names
        .into_iter()
        .fold(tried, |before, name| before.and(scenario(name, &second)));
    if let Err(error) = ran {
        println!("the second attempt was cut short: {error:#}");
    }
    count.passed_at_second(&second.lock_unpoisoned().passed);
}
