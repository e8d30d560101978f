//! Prints what time slices of the device and the ledger that corrects them give to mixes of programs, in virtual time.
//! It is not a test; the simulator's tests hold the most important rows.
//!
//!     cargo run -p gpu-mediator --example time_slices

use std::{io::Write, time::Duration};

use gpu_mediator::{
    policy::Class,
    simulator::{Experiment, Lengths, Outcome, Program, Slices, SwitchCosts, Vm},
};

const TIME: Duration = Duration::from_secs(8);
/// Number of random mixes.
const RANDOM: u64 = 60;

fn mixes() -> Vec<Experiment> {
    let (train, decode, ahead) = (
        Program::training,
        Program::decoding,
        Program::training_ahead,
    );
    let often_away = || Program::steps(Duration::from_micros(1600), Duration::from_micros(3300));
    let mix = |name, vms: Vec<(u32, Program)>| {
        let vm = |(weight, program)| Vm::new(weight, program);
        let vms = vms.into_iter().map(vm).collect();
        Experiment { name, vms }
    };
    // The first one's class is another one.
    let first = |class, mut mix: Experiment| {
        mix.vms.iter_mut().take(1).for_each(|vm| vm.class = class);
        mix
    };
    let latency = Class::Latency(Duration::from_millis(2));
    let asks = || Program::steps(Duration::from_micros(1600), Duration::from_millis(20));
    vec![
        mix("train, train", vec![(1, train()), (3, train())]),
        mix("decode, train", vec![(1, decode()), (3, train())]),
        mix("decode, ahead", vec![(1, decode()), (3, ahead())]),
        mix("often away, train", vec![(1, often_away()), (3, train())]),
        mix(
            "train, decode, ahead",
            vec![(1, train()), (2, decode()), (3, ahead())],
        ),
        mix(
            "six times train",
            [1, 2, 2, 3, 3, 4].map(|weight| (weight, train())).to_vec(),
        ),
        first(
            latency,
            mix(
                "decode with latency, train",
                vec![(1, decode()), (3, train())],
            ),
        ),
        first(
            latency,
            mix(
                "decode with latency, ahead",
                vec![(1, decode()), (3, ahead())],
            ),
        ),
        mix("asks, train", vec![(1, asks()), (3, train())]),
        first(
            latency,
            mix("asks with latency, train", vec![(1, asks()), (3, train())]),
        ),
        mix(
            "asks, three times train",
            vec![(1, asks()), (1, train()), (2, train()), (3, train())],
        ),
        first(
            latency,
            mix(
                "asks with latency, three times train",
                vec![(1, asks()), (1, train()), (2, train()), (3, train())],
            ),
        ),
        first(
            Class::Idle,
            mix("ahead as idle, train", vec![(1, ahead()), (1, train())]),
        ),
    ]
}

/// Two to six programs with weights 1 to 4, steps of 0.2 to 20 ms and pauses of 0.02 to 3 ms; some enqueue ahead.
fn random_mix(seed: u64) -> Experiment {
    let mut random = fastrand::Rng::with_seed(seed);
    let count = random.choice([2, 2, 3, 4, 6]).unwrap_or(2);
    let micros = Duration::from_micros;
    let vms = std::iter::repeat_with(|| {
        let step = random.choice([200, 500, 1600, 4000, 10_000, 20_000]);
        let step = micros(step.unwrap_or(200)).mul_f64(0.8 + 0.4 * random.f64());
        let pause = micros(random.choice([20, 100, 300, 1000, 3000]).unwrap_or(20));
        let mut program = Program::steps(step, pause);
        if random.u32(..4) == 0 {
            (program.in_flight, program.batches) = (3, false);
        }
        let weight = random.choice([1, 1, 2, 3, 4]).unwrap_or(1);
        Vm::new(weight, program)
    });
    Experiment {
        name: "random",
        vms: vms.take(count).collect(),
    }
}

/// Each client's part of the time that all used.
fn shares(outcome: &Outcome) -> Vec<f64> {
    let sum: f64 = outcome.charged.iter().sum();
    outcome.charged.iter().map(|used| used / sum).collect()
}

/// The 99th percentile of the time for a step, in milliseconds.
fn tail(vm: &Vm, outcome: &Outcome, index: usize) -> String {
    let Lengths::Between(_, longest) = vm.program.lengths else {
        return String::new();
    };
    let delay = outcome.delay(index).filter(|_| vm.program.batches);
    delay.map_or("-".to_owned(), |delay| {
        format!("{:.1}", (delay + longest).as_secs_f64() * 1e3)
    })
}

fn main() -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(
        out,
        "| mix | slices | weights | shares | P99 (ms) | sum of rates / alone | driver, of the time |\n\
         |---|---|---|---|---|---|---|"
    )?;
    for mix in mixes() {
        for (name, slices) in [("default", Slices::Default), ("ledger", Slices::Ledger)] {
            let outcome = mix.run_sliced(slices, SwitchCosts::default(), TIME, 1);
            let join = |parts: Vec<String>| parts.join(", ");
            let weights = mix.vms.iter().map(|vm| vm.weight.to_string()).collect();
            let parts = shares(&outcome)
                .iter()
                .map(|share| format!("{share:.3}"))
                .collect();
            let numbered = mix.vms.iter().enumerate();
            let tails = numbered
                .map(|(index, vm)| tail(vm, &outcome, index))
                .collect();
            let both = outcome.charged.iter().zip(&outcome.alone);
            let rates: f64 = both.map(|(used, alone)| used / alone).sum();
            writeln!(
                out,
                "| {} | {name} | {} | {} | {} | {rates:.2} | {:.1} % |",
                mix.name,
                join(weights),
                join(parts),
                join(tails),
                outcome.driver * 100.0
            )?;
        }
    }
    for (name, slices) in [("default", Slices::Default), ("ledger", Slices::Ledger)] {
        let mut errors: Vec<f64> = (0..RANDOM)
            .map(|seed| {
                let outcome = random_mix(seed).run_sliced(slices, SwitchCosts::default(), TIME, 1);
                let ideal: f64 = outcome.ideal.iter().sum();
                let errors = shares(&outcome)
                    .into_iter()
                    .zip(&outcome.ideal)
                    .map(|(share, should)| (share - should / ideal).abs());
                errors.fold(0.0, f64::max)
            })
            .collect();
        errors.sort_by(f64::total_cmp);
        writeln!(
            out,
            "{RANDOM} random mixes, {name}: error of the worst share, median {:.3}, nine tenths {:.3}",
            errors[errors.len() / 2],
            errors[errors.len() * 9 / 10]
        )?;
    }
    Ok(())
}
