//! Virtual machines of the nested rig that share a device by weight, and a picture of what each one
//! gets.

use std::fs;

use anyhow::{Context, Result, bail, ensure};
use gantry_build::{programs, progress::Step, target};
use gantry_tests::{
    report::SHARING,
    rig::{Cache, Images, NEEDED, Rig, packages},
};
use gpu_mediator::simulator::{
    Outcome,
    fairness::{ideal, min_max_ratio},
    picture,
};

use super::Options;

/// Measures one machine of each weight, prints a row of a table and draws the picture.
pub fn run(options: &Options) -> Result<()> {
    let weights = &options.weights;
    let vms = weights.len();
    packages::install(NEEDED)?;
    let binaries = programs::build()?;
    let step = Step::new("fetching Debian's kernel and building images");
    let images = Images::build(&Cache::open()?, &binaries, &target().join("rig"))?;
    step.finish();
    let rig = Rig {
        images,
        logs: target().join("rig-logs"),
    };
    let list: Vec<_> = weights.iter().map(u32::to_string).collect();
    let Options {
        policy, seconds, ..
    } = options;
    let step = Step::new(format!("{vms} VMs share L1's device for {seconds} s"));
    let mut lines = Vec::new();
    rig.show(
        &format!("{SHARING} {policy} {seconds} {}", list.join(",")),
        |line| lines.push(line.to_owned()),
    )?;
    step.finish();
    let measured = Measured::parse(&lines, weights)?;
    println!("| policy | weights | seconds | of the device, each | MMR |\n|---|---|---|---|---|");
    println!(
        "| {policy} | {weights:?} | {:.1} | {:.1?} | {:.3} |",
        measured.seconds,
        measured.had,
        min_max_ratio(&measured.had, &measured.outcome.ideal)
    );
    let names: Vec<_> = (weights.iter().enumerate())
        .map(|(vm, weight)| format!("VM {}, weight {weight}", vm + 1))
        .collect();
    let title = format!("{vms} VMs in the nested rig: each one's part of what the device gives");
    let file = format!("sharing-vms-{vms}-{policy}.svg");
    let path = options.pictures.join(file);
    let panel = [(policy.clone(), &measured.outcome)];
    fs::write(&path, picture::draw(&title, &names, &panel))
        .with_context(|| format!("cannot write {}", path.display()))
}

/// What the machines got.
struct Measured {
    seconds: f64,
    /// Seconds of device time, by machine.
    had: Vec<f64>,
    /// Shares over time, relative to what all machines got: a single emulated processor also runs
    /// the machines, so how much is left for the device does not depend on sharing.
    outcome: Outcome,
}

impl Measured {
    /// Parses lines with the elapsed seconds and each machine's seconds of device time.
    fn parse(lines: &[String], weights: &[u32]) -> Result<Self> {
        let mut shares = vec![Vec::new(); weights.len()];
        let (mut seconds, mut had) = (0.0, vec![0.0; weights.len()]);
        for line in lines {
            let numbers: Result<Vec<f64>, _> = line.split(' ').map(str::parse).collect();
            let numbers = numbers.with_context(|| format!("the rig said {line:?}"))?;
            let [passed, now @ ..] = &numbers[..] else {
                bail!("the rig said nothing");
            };
            ensure!(now.len() == had.len(), "the rig said {line:?}");
            let all: f64 = now.iter().zip(&had).map(|(now, then)| now - then).sum();
            for ((shares, now), then) in shares.iter_mut().zip(now).zip(&had) {
                shares.push((now - then) / all.max(f64::MIN_POSITIVE));
            }
            (seconds, had) = (*passed, now.to_vec());
        }
        Ok(Self {
            seconds,
            had,
            outcome: Outcome {
                ideal: ideal(weights, &vec![1.0; weights.len()]),
                shares,
                ..Outcome::default()
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_parts_of_what_all_had_since_the_line_before() {
        let lines = ["0.5 0.1 0.3", "1.0 0.2 0.3"].map(str::to_owned);
        let measured = Measured::parse(&lines, &[1, 3]).unwrap();
        assert_eq!(measured.outcome.ideal, [0.25, 0.75]);
        let near = |a: f64, b: f64| (a - b).abs() < 1e-9;
        let [one, other] = &measured.outcome.shares[..] else {
            panic!("not two machines");
        };
        assert!(near(one[0], 0.25) && near(one[1], 1.0));
        assert!(near(other[0], 0.75) && near(other[1], 0.0));
        assert_eq!(measured.had, [0.2, 0.3]);
        assert!(Measured::parse(&["0.5 0.1".to_owned()], &[1, 3]).is_err());
    }
}
