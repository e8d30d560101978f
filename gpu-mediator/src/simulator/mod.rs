//! Simulates policies in virtual time.
//!
//! The scheduler, the policies and the workers' meter are the real ones. The device, the clients
//! and the clock are simulated. Simulating six virtual machines for ten minutes takes seconds, and
//! the same seed gives the same figures.
//!
//! - [`Experiment::run`]: a device that one client has at a time; [`Experiment::run_sliced`]: one that
//!   serves several in time slices.
//! - [`Program`]: what a client does; [`fairness`]: what it should have got.
//! - [`picture`]: draws shares over time.

pub mod fairness;
mod machine;
pub mod picture;
mod program;
mod slices;

use std::time::Duration;

pub use program::{Lengths, Program};
pub use slices::{Slices, SwitchCosts};

use crate::{
    Moment,
    policy::{Class, Name},
    scheduler::LONGEST_PAUSE,
};

/// Costs in addition to the kernels themselves.
#[derive(Clone, Copy, Debug)]
pub struct Costs {
    /// Time for a worker to submit a request.
    pub submit: Duration,
    /// Time from the submission to the start of a kernel, if the device is idle.
    pub start: Duration,
    /// Time from the end of a kernel until the worker notices it.
    pub notice: Duration,
    /// Time from the end of a turn until the next worker knows that it has the device.
    pub grant: Duration,
    /// Time for the device to switch from one process to another.
    pub switch: Duration,
    /// Time to wake up a client's sleeping vCPU.
    pub wake: Duration,
    /// Whether the device of [`Name::FairPreemptive`] can be interrupted in the middle of a kernel.
    /// With the other policies, it never is.
    pub interrupts: bool,
}

impl Default for Costs {
    /// An enqueue takes 3 us, and an enqueue with a finish 8 us, as on an H200
    /// (measurements/opencl-figures.md). A grant takes two process wake-ups. The other values are
    /// assumptions.
    fn default() -> Self {
        Self {
            submit: Duration::from_micros(3),
            start: Duration::from_micros(3),
            notice: Duration::from_micros(2),
            grant: Duration::from_micros(15),
            switch: Duration::from_micros(25),
            wake: Duration::from_micros(50),
            interrupts: true,
        }
    }
}

/// Settings of the arbiter.
#[derive(Clone, Copy, Debug)]
pub struct Arbiter {
    /// The policy.
    pub policy: Name,
    /// The longest pause between two batches for which the device is kept
    /// ([`Scheduler::set_longest_pause`](crate::scheduler::Scheduler::set_longest_pause)).
    pub longest_pause: Duration,
}

impl From<Name> for Arbiter {
    fn from(policy: Name) -> Self {
        Self {
            policy,
            longest_pause: LONGEST_PAUSE,
        }
    }
}

/// A simulated virtual machine.
#[derive(Clone, Debug)]
pub struct Vm {
    /// Its weight, 1 to 10,000.
    pub weight: u32,
    /// What it does.
    pub program: Program,
    /// When it gets its part of a device that serves several.
    pub class: Class,
}

impl Vm {
    /// One that gets its part by weight.
    pub fn new(weight: u32, program: Program) -> Self {
        Self {
            weight,
            program,
            class: Class::Shared,
        }
    }
}

/// Virtual machines that share a device.
#[derive(Clone, Debug)]
pub struct Experiment {
    /// The name of the experiment.
    pub name: &'static str,
    /// The participants.
    pub vms: Vec<Vm>,
}

/// Width of the windows of an outcome.
pub const WINDOW: Duration = Duration::from_millis(500);

/// The results; unknown ones are empty.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// The share of the device that each client should have got.
    pub ideal: Vec<f64>,
    /// The share that each client got in each [`WINDOW`].
    pub shares: Vec<Vec<f64>>,
    /// The share that each client uses if nobody else wants the device.
    pub alone: Vec<f64>,
    /// The fraction of the time that each client was charged for: its kernels, the pauses in which
    /// the device was kept for it, and the ways to it and back.
    pub charged: Vec<f64>,
    /// The time that each batch of each client took in addition to its kernels, in ascending order.
    pub delays: Vec<Vec<Duration>>,
    /// The fraction of the time for which the driver was busy with time slices, stops and starts.
    pub driver: f64,
}

impl Outcome {
    /// Adds what the clients received in `time`.
    fn add(&mut self, had: Vec<Had>, time: Duration) {
        for had in had {
            let windows = had.done.into_iter().map(|done| share(done, WINDOW));
            self.shares.push(windows.collect());
            self.charged.push(share(had.charged, time));
            self.delays.push(had.delays);
        }
    }

    /// The share that each client got in the first `windows` windows.
    fn got(&self, windows: usize) -> Vec<f64> {
        let windows = windows.max(1);
        self.shares
            .iter()
            .map(|shares| shares.iter().take(windows).sum::<f64>() / windows as f64)
            .collect()
    }

    /// The Min-Max Ratio over the first `time`.
    pub fn min_max_ratio(&self, time: Duration) -> f64 {
        fairness::min_max_ratio(&self.got(windows(time)), &self.ideal)
    }

    /// The 99th percentile of the time that a client's batches took in addition to their kernels;
    /// `None` if it has no batches.
    pub fn delay(&self, client: usize) -> Option<Duration> {
        let delays = self.delays.get(client)?;
        delays
            .get(delays.len().saturating_sub(1) * 99 / 100)
            .copied()
    }

    /// The aggregated overhead over the first `time`.
    pub fn overhead(&self, time: Duration) -> f64 {
        fairness::overhead(&self.got(windows(time)), &self.ideal)
    }
}

fn windows(time: Duration) -> usize {
    (time.as_nanos() / WINDOW.as_nanos()) as usize
}

impl Experiment {
    /// The three and the six virtual machines of FairGV's evaluation (sections 5.4.3 and 5.4.4),
    /// with kernels of 20 us to 100 ms: first each machine with its own length, where the lightest
    /// has the longest kernels; then all lengths on each machine.
    pub fn published() -> Vec<Self> {
        let three = [1, 2, 3];
        let six = [1, 2, 2, 3, 3, 4];
        let micros = |lengths: &[u64]| -> Vec<Lengths> {
            let always = |&length| Lengths::Always(Duration::from_micros(length));
            lengths.iter().map(always).collect()
        };
        let make = |name, weights: &[u32], lengths: Vec<Lengths>| Self {
            name,
            vms: weights
                .iter()
                .zip(lengths)
                .map(|(&weight, lengths)| Vm::new(weight, Program::busy(lengths)))
                .collect(),
        };
        let mixed = Lengths::AnyOf(
            [20, 100, 400, 2_000, 10_000, 100_000]
                .map(Duration::from_micros)
                .to_vec(),
        );
        let any = Lengths::Between(Duration::from_micros(20), Duration::from_millis(100));
        vec![
            make(
                "3 VMs, one length each",
                &three,
                micros(&[100_000, 1_000, 20]),
            ),
            make("3 VMs, six kernels each", &three, vec![mixed.clone(); 3]),
            make("3 VMs, any length", &three, vec![any.clone(); 3]),
            make(
                "6 VMs, one length each",
                &six,
                micros(&[100_000, 10_000, 2_000, 400, 100, 20]),
            ),
            make("6 VMs, six kernels each", &six, vec![mixed; 6]),
            make("6 VMs, any length", &six, vec![any; 6]),
        ]
    }

    /// Runs the experiment for `time` on the simulated clock.
    pub fn run(
        &self,
        arbiter: impl Into<Arbiter>,
        costs: Costs,
        time: Duration,
        seed: u64,
    ) -> Outcome {
        let arbiter = arbiter.into();
        let wants: Vec<f64> = self
            .vms
            .iter()
            .map(|vm| {
                // What it would use if it had the device to itself, without the costs of an
                // arbiter.
                let free = Costs {
                    grant: Duration::ZERO,
                    switch: Duration::ZERO,
                    wake: Duration::ZERO,
                    ..costs
                };
                let time = Duration::from_secs(2).max(time / 10);
                let alone = std::slice::from_ref(vm);
                let got = &simulate(alone, Name::Fair.into(), free, time, seed)[0].done;
                share(got.iter().sum(), WINDOW * got.len().max(1) as u32)
            })
            .collect();
        let weights: Vec<u32> = self.vms.iter().map(|vm| vm.weight).collect();
        let mut outcome = Outcome {
            ideal: fairness::ideal(&weights, &wants),
            alone: wants,
            ..Outcome::default()
        };
        outcome.add(simulate(&self.vms, arbiter, costs, time, seed), time);
        outcome
    }

    /// Runs the experiment for `time` on a device that serves several clients in time slices.
    pub fn run_sliced(
        &self,
        slices: Slices,
        costs: SwitchCosts,
        time: Duration,
        seed: u64,
    ) -> Outcome {
        let run = |vms: &[Vm], slices| slices::simulate(vms, slices, costs, time, seed);
        let alone = self.vms.iter().map(|vm| {
            let (had, _) = run(std::slice::from_ref(vm), Slices::Default);
            had.iter().map(|had| share(had.charged, time)).sum()
        });
        let alone: Vec<f64> = alone.collect();
        let weights: Vec<u32> = self.vms.iter().map(|vm| vm.weight).collect();
        let (had, driver) = run(&self.vms, slices);
        let mut outcome = Outcome {
            ideal: fairness::ideal(&weights, &alone),
            alone,
            driver: share(driver, time),
            ..Outcome::default()
        };
        outcome.add(whole(had, time), time);
        outcome
    }
}

/// What a client has received.
struct Had {
    /// Kernel time completed in each window.
    done: Vec<Duration>,
    /// Device time that it was charged for.
    charged: Duration,
    /// Time that its batches took in addition to their kernels.
    delays: Vec<Duration>,
}

/// Records in windows of this width that a client's kernel ran from `since` until `now`.
fn note(done: &mut Vec<Duration>, window: Duration, mut since: Moment, now: Moment) {
    let window = window.as_nanos() as u64;
    while since < now {
        let number = since.nanos() / window;
        let end = Moment::from_nanos((number + 1) * window).min(now);
        if done.len() <= number as usize {
            done.resize(number as usize + 1, Duration::ZERO);
        }
        done[number as usize] += end.since(since);
        since = end;
    }
}

fn share(part: Duration, whole: Duration) -> f64 {
    part.as_secs_f64() / whole.as_secs_f64()
}

/// Simulates the machines. The results cover whole windows.
fn simulate(vms: &[Vm], arbiter: Arbiter, costs: Costs, time: Duration, seed: u64) -> Vec<Had> {
    let machine = machine::Machine::new(vms, arbiter, costs, WINDOW, seed);
    whole(machine.run(Moment::START + time), time)
}

/// Makes what the clients received cover whole windows, and sorts their delays.
fn whole(mut had: Vec<Had>, time: Duration) -> Vec<Had> {
    for had in &mut had {
        had.done.resize(windows(time), Duration::ZERO);
        had.delays.sort_unstable();
    }
    had
}

#[cfg(test)]
mod closed_loop_tests;

#[cfg(test)]
mod tests {
    use super::*;

    /// Long enough for what is tested, and short enough for every test run.
    const TIME: Duration = Duration::from_secs(5);

    fn run(experiment: &Experiment, policy: Name) -> Outcome {
        experiment.run(policy, Costs::default(), TIME, 1)
    }

    /// Weights 1, 2 and 3; the lightest has the longest kernels.
    fn mixed() -> Experiment {
        let vms = [(1, 20_000), (2, 2_000), (3, 200)].map(|(weight, micros)| {
            let length = Lengths::Always(Duration::from_micros(micros));
            Vm::new(weight, Program::busy(length))
        });
        Experiment {
            name: "mixed",
            vms: vms.to_vec(),
        }
    }

    #[test]
    fn fair_queueing_gives_parts_by_weight_whatever_the_kernels_length() {
        let outcome = run(&mixed(), Name::Fair);
        let (ratio, overhead) = (outcome.min_max_ratio(TIME), outcome.overhead(TIME));
        assert!(ratio > 0.97, "{ratio}");
        assert!(overhead < 1.01, "{overhead}");
    }

    #[test]
    fn first_come_first_served_gives_the_device_to_who_has_the_longest_kernels() {
        let outcome = run(&mixed(), Name::Fifo);
        assert!(outcome.min_max_ratio(TIME) < 0.01);
        assert!(outcome.got(windows(TIME))[0] > 0.85);
    }

    #[test]
    fn a_light_client_gets_what_it_wants_and_the_rest_is_used() {
        let light = Program::interactive(Duration::from_micros(100), Duration::from_millis(20));
        let heavy = Program::busy(Lengths::Always(Duration::from_micros(400)));
        let vms = [light, heavy].map(|program| Vm::new(1, program));
        let experiment = Experiment {
            name: "light and heavy",
            vms: vms.to_vec(),
        };
        for policy in [Name::Fair, Name::Credit, Name::FairPreemptive] {
            let outcome = run(&experiment, policy);
            let got = outcome.got(windows(TIME));
            assert!(got[0] > outcome.ideal[0] * 0.4, "{policy}: {got:?}");
            assert!(got[0] + got[1] > 0.95, "{policy}: {got:?}");
        }
    }

    #[test]
    fn waking_the_processor_of_who_is_next_saves_an_interactive_client_time() {
        let interactive = Program::interactive(Duration::from_micros(50), Duration::from_micros(5));
        let experiment = Experiment {
            name: "interactive",
            vms: vec![Vm::new(1, interactive); 2],
        };
        let slow = Costs {
            wake: Duration::from_millis(1),
            ..Costs::default()
        };
        // With the hint, the wake-up is over when the turn begins: it costs nothing, however slow
        // it is.
        let (quick, slow) = (
            experiment.run(Name::Fair, Costs::default(), TIME, 1),
            experiment.run(Name::Fair, slow, TIME, 1),
        );
        let more = slow.overhead(TIME) / quick.overhead(TIME);
        assert!(more < 1.01, "{more}");
    }

    #[test]
    fn the_same_seed_gives_the_same_shares() {
        let mut experiment = mixed();
        let any = Lengths::Between(Duration::from_micros(200), Duration::from_millis(20));
        experiment.vms[0].program = Program::busy(any);
        let (one, two) = (run(&experiment, Name::Band), run(&experiment, Name::Band));
        assert_eq!(one.shares, two.shares);
    }
}
