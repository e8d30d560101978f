//! Applications that wait for their results, and think in between: whether weights hold for them.
//!
//! Wanted is what [`Outcome::ideal`] says: parts by weight, nobody more than it uses alone. How far
//! that can be reached is a matter of the kernels: while an application thinks, others' kernels have
//! the device, cannot be interrupted and may end too late for it.

use super::*;

const TIME: Duration = Duration::from_secs(5);
/// What an application needs to begin its next batch: it wakes up, looks and enqueues.
const AT_ONCE: Duration = Duration::from_micros(80);
const WEIGHTED: [Name; 2] = [Name::Fair, Name::FairPreemptive];

/// Kernels of so many microseconds, and how many of them are waited for together.
type Batch = (u32, u64);
const FOUR_LONG: Batch = (4, 5_000);
const MANY_SHORT: Batch = (64, 100);
const FEW_SHORT: Batch = (4, 100);
const TWO_LONGEST: Batch = (2, 20_000);

fn sync((kernels, micros): Batch, think: Duration) -> Program {
    Program::closed(kernels, Duration::from_micros(micros), think)
}

/// The next batch is enqueued before the last one is waited for.
fn ahead((kernels, micros): Batch) -> Program {
    Program {
        in_flight: kernels * 2,
        ..Program::busy(Lengths::Always(Duration::from_micros(micros)))
    }
}

fn experiment(clients: &[(u32, Program)]) -> Experiment {
    let vm = |(weight, program): &(u32, Program)| Vm {
        weight: *weight,
        program: program.clone(),
    };
    Experiment {
        name: "closed loops",
        vms: clients.iter().map(vm).collect(),
    }
}

/// What came out, and what it is compared with.
struct Row {
    got: Vec<f64>,
    wanted: Vec<f64>,
    /// What each would use of its part of the time, alone.
    least: Vec<f64>,
    outcome: Outcome,
}

fn row(clients: &[(u32, Program)], policy: Name) -> Row {
    let experiment = experiment(clients);
    // As real ones: none stops in the middle of a kernel.
    let costs = Costs {
        interrupts: false,
        ..Costs::default()
    };
    let outcome = experiment.run(policy, costs, TIME, 1);
    let weights: Vec<u32> = clients.iter().map(|client| client.0).collect();
    let total = f64::from(weights.iter().sum::<u32>());
    let least = weights.iter().zip(&outcome.alone);
    Row {
        got: outcome.got(windows(TIME)),
        wanted: outcome.ideal.clone(),
        least: least
            .map(|(&weight, alone)| alone * f64::from(weight) / total)
            .collect(),
        outcome,
    }
}

/// What is wrong with a row: a share that is neither wanted nor what its application would make of its
/// part of the time alone, nor between them; or a device that is less used than so.
fn wrong(what: &str, policy: Name, clients: &[(u32, Program)], tolerance: f64) -> Option<String> {
    let Row {
        got, wanted, least, ..
    } = row(clients, policy);
    let off = (0..got.len()).any(|client| {
        let (least, most) = (least[client].min(wanted[client]), wanted[client]);
        !(least - tolerance..=most + tolerance).contains(&got[client])
    });
    let used = got.iter().sum::<f64>() / least.iter().sum::<f64>();
    (off || used < 0.97).then(|| {
        format!(
            "{policy}, {what}: {got:.3?}, wanted {wanted:.3?}, alone {least:.3?}, used {used:.3}"
        )
    })
}

/// The rows of two applications that were measured on an H100, with what is tolerated of each: a
/// switch costs more of a batch that is shorter than a millisecond.
fn measured() -> Vec<(&'static str, Vec<(u32, Program)>, f64)> {
    let sync = |batch| sync(batch, AT_ONCE);
    let row = |what, one, other, tolerance| (what, vec![(1, one), (3, other)], tolerance);
    vec![
        row(
            "4 x 5 ms ahead; the same",
            ahead(FOUR_LONG),
            ahead(FOUR_LONG),
            0.02,
        ),
        row(
            "4 x 5 ms sync; the same",
            sync(FOUR_LONG),
            sync(FOUR_LONG),
            0.02,
        ),
        row(
            "4 x 5 ms sync; 64 x 100 us sync",
            sync(FOUR_LONG),
            sync(MANY_SHORT),
            0.02,
        ),
        row(
            "4 x 5 ms sync; 4 x 100 us sync",
            sync(FOUR_LONG),
            sync(FEW_SHORT),
            0.05,
        ),
        row(
            "64 x 100 us sync; 2 x 20 ms sync",
            sync(MANY_SHORT),
            sync(TWO_LONGEST),
            0.02,
        ),
        row(
            "4 x 5 ms sync; 64 x 100 us ahead",
            sync(FOUR_LONG),
            ahead(MANY_SHORT),
            0.02,
        ),
        row(
            "4 x 5 ms ahead; 64 x 100 us sync",
            ahead(FOUR_LONG),
            sync(MANY_SHORT),
            0.02,
        ),
    ]
}

/// What is wrong with rows under all policies that know weights.
fn all_wrong(rows: &[(String, Vec<(u32, Program)>, f64)]) -> Vec<String> {
    let policies = WEIGHTED.into_iter();
    policies
        .flat_map(|policy| {
            rows.iter().filter_map(move |(what, clients, tolerance)| {
                wrong(what, policy, clients, *tolerance)
            })
        })
        .collect()
}

#[test]
fn two_applications_that_wait_for_their_results_get_parts_by_weight() {
    let rows: Vec<_> = (measured().into_iter())
        .map(|(what, clients, tolerance)| (what.to_owned(), clients, tolerance))
        .collect();
    let wrong = all_wrong(&rows);
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn weights_hold_whatever_the_time_between_two_batches() {
    let mut rows = Vec::new();
    for micros in [100, 500, 1_000, 2_000, 5_000] {
        let think = Duration::from_micros(micros);
        if micros < 1_000 {
            // With longer pauses it uses less than a third of what would be kept for it.
            let few = sync(FEW_SHORT, think);
            let what = format!("{think:?}: 4 x 5ms sync; 4 x 100us sync");
            rows.push((what, vec![(1, sync(FOUR_LONG, think)), (3, few)], 0.05));
        }
        for (one, other, tolerance) in [
            (sync(FOUR_LONG, think), sync(FOUR_LONG, think), 0.02),
            (sync(FOUR_LONG, think), sync(MANY_SHORT, think), 0.02),
            (sync(MANY_SHORT, think), sync(FOUR_LONG, think), 0.02),
            (sync(MANY_SHORT, think), sync(TWO_LONGEST, think), 0.02),
            (ahead(FOUR_LONG), sync(MANY_SHORT, think), 0.02),
            (sync(MANY_SHORT, think), ahead(FOUR_LONG), 0.02),
            (sync(FOUR_LONG, think), ahead(MANY_SHORT), 0.02),
            (ahead(MANY_SHORT), sync(FOUR_LONG, think), 0.02),
        ] {
            let name = |program: &Program| {
                let Lengths::Always(length) = program.lengths else {
                    return String::new();
                };
                let kind = if program.batches { "sync" } else { "ahead" };
                format!("{} x {length:?} {kind}", program.in_flight)
            };
            let what = format!("{think:?}: {}; {}", name(&one), name(&other));
            rows.push((what, vec![(1, one), (3, other)], tolerance));
        }
    }
    let wrong = all_wrong(&rows);
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn weights_hold_among_three_and_six_applications() {
    let mut rows = Vec::new();
    let varied = |batch, micros| Program {
        varies: Duration::from_micros(micros),
        ..sync(batch, AT_ONCE)
    };
    for (what, weights) in [("three", vec![1, 2, 3]), ("six", vec![1, 2, 2, 3, 3, 4])] {
        for (kind, programs) in [
            ("sync", vec![sync(FOUR_LONG, AT_ONCE)]),
            (
                "sync, mixed",
                vec![
                    sync(FOUR_LONG, AT_ONCE),
                    sync(MANY_SHORT, AT_ONCE),
                    sync(TWO_LONGEST, AT_ONCE),
                ],
            ),
            (
                "sync and ahead",
                vec![
                    ahead(FOUR_LONG),
                    sync(MANY_SHORT, AT_ONCE),
                    ahead(MANY_SHORT),
                ],
            ),
            (
                "0 to 5 ms at random",
                vec![varied(FOUR_LONG, 5_000), varied(MANY_SHORT, 5_000)],
            ),
            (
                "0 to 1 ms at random and ahead",
                vec![varied(MANY_SHORT, 1_000), ahead(FOUR_LONG)],
            ),
        ] {
            let clients = weights.iter().zip(programs.iter().cycle().cloned());
            let clients = clients.map(|(&weight, program)| (weight, program));
            rows.push((format!("{what} {kind}"), clients.collect(), 0.02));
        }
    }
    let wrong = all_wrong(&rows);
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn a_short_request_beside_a_hog_waits_for_a_turn_and_the_kernel_under_way_at_most() {
    let (kernel, switches) = (Duration::from_millis(5), Duration::from_micros(200));
    for (policy, turn) in [(Name::Fair, 6), (Name::FairPreemptive, 30)] {
        let often = Program {
            varies: Duration::from_millis(19),
            ..sync((1, 100), Duration::from_millis(1))
        };
        let Row { outcome, .. } = row(&[(1, often), (1, ahead(FOUR_LONG))], policy);
        let late = outcome.delay(0).unwrap();
        let bound = Duration::from_millis(turn) + kernel + switches;
        assert!(late <= bound, "{policy}: {late:?}");
    }
}
