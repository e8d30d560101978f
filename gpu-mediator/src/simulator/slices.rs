//! The simulated device that serves its clients by itself: round robin, each for its time slice.
//!
//! It is fitted to an H200 (measurements/sharing.md). The ledger and the workers' records of pauses and presence are the
//! real ones. Clients report as workers do: the use of kernels that have completed, and only that they run those that are
//! longer than a slice.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, VecDeque},
    time::Duration,
};

use remoting_turns::{pauses::Pauses, presence::Presence};

use super::{Had, Program, Vm, WINDOW, note};
use crate::{
    Moment,
    policy::{
        ClientId, Weight,
        ledger::{Command, FIRST_SLICE, Ledger, PERIOD, Report},
    },
};

/// Who sets the slices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slices {
    /// Nobody: all are the driver's own, and weights have no effect.
    Default,
    /// [`Ledger`].
    Ledger,
}

/// What the device and its driver take for themselves.
#[derive(Clone, Copy, Debug)]
pub struct SwitchCosts {
    /// Time to switch to another client in the middle of a kernel.
    pub preempted: Duration,
    /// Time to switch to another client when one has no more work.
    pub idle: Duration,
    /// Time for which the driver is busy when a slice is set. It does not delay the device.
    pub set: Duration,
    /// Time for which the driver is busy when a client is stopped or started.
    pub stop: Duration,
}

impl Default for SwitchCosts {
    /// As measured on an H200 with driver 580.159, where a stopped kernel has one SM. A stop takes 2.7 ms if the kernel fills
    /// the GPU, so that the time of the driver is too low for stops of such kernels.
    fn default() -> Self {
        Self {
            preempted: Duration::from_micros(90),
            idle: Duration::from_micros(50),
            set: Duration::from_micros(250),
            stop: Duration::from_micros(300),
        }
    }
}

/// A kernel that has not completed.
struct Kernel {
    left: Duration,
    length: Duration,
    /// When its batch began.
    since: Moment,
}

struct Client {
    program: Program,
    random: fastrand::Rng,
    kernels: VecDeque<Kernel>,
    pauses: Pauses,
    presence: Presence,
    slice: Duration,
    stopped: bool,
    used: Duration,
    /// What was reported of the presence, and what is going to be reported with the next review: the use of kernels that
    /// have completed, whether one was too long for that, and the driver's time.
    reported: Duration,
    report: Report,
    /// Number of kernels of the batch that have completed, and their length.
    batch: (u32, Duration),
    delays: Vec<Duration>,
    done: Vec<Duration>,
}

impl Client {
    fn is_ready(&self) -> bool {
        !self.stopped && !self.kernels.is_empty()
    }

    /// Whether others interrupt the kernel, so that its length is not known.
    fn is_long(&self, kernel: &Kernel) -> bool {
        !self.program.short && kernel.length > self.slice
    }
}

/// Runs the clients for `time`. Returns what each received, and for how long the driver was busy.
pub(super) fn simulate(
    vms: &[Vm],
    slices: Slices,
    costs: SwitchCosts,
    time: Duration,
    seed: u64,
) -> (Vec<Had>, Duration) {
    let mut device = Device::new(vms, slices, costs, seed);
    device.run(Moment::START + time);
    let had = device.clients.into_iter().map(|client| Had {
        done: client.done,
        charged: client.used,
        delays: client.delays,
    });
    (had.collect(), device.driver)
}

struct Device {
    now: Moment,
    clients: Vec<Client>,
    /// Who has the device, and until when.
    current: usize,
    slice_end: Moment,
    /// Calls that have not come, by time and client; each brings so many kernels.
    calls: BinaryHeap<Reverse<(Moment, usize, u32)>>,
    ledger: Option<Ledger>,
    review: Moment,
    costs: SwitchCosts,
    driver: Duration,
}

impl Device {
    fn new(vms: &[Vm], slices: Slices, costs: SwitchCosts, seed: u64) -> Self {
        let mut ledger = (slices == Slices::Ledger).then(|| Ledger::new(Moment::START));
        let mut calls = BinaryHeap::new();
        let clients = vms.iter().enumerate().map(|(index, vm)| {
            if let Some(ledger) = &mut ledger {
                let weight = Weight::try_from(vm.weight).unwrap_or(Weight::ONE);
                let id = ClientId(index as u32);
                ledger.join(id, weight);
                ledger.set_class(id, vm.class);
            }
            calls.push(Reverse((Moment::START, index, vm.program.in_flight)));
            Client {
                program: vm.program.clone(),
                random: fastrand::Rng::with_seed(seed.wrapping_add(index as u64)),
                kernels: VecDeque::new(),
                pauses: Pauses::default(),
                presence: Presence::default(),
                slice: FIRST_SLICE,
                stopped: false,
                used: Duration::ZERO,
                reported: Duration::ZERO,
                report: Report::default(),
                batch: (0, Duration::ZERO),
                delays: Vec::new(),
                done: Vec::new(),
            }
        });
        Self {
            clients: clients.collect(),
            now: Moment::START,
            current: 0,
            slice_end: Moment::START,
            calls,
            ledger,
            review: Moment::START + PERIOD,
            costs,
            driver: Duration::ZERO,
        }
    }

    fn run(&mut self, end: Moment) {
        while self.now < end {
            self.take_calls();
            if self.now >= self.review {
                self.review();
            }
            if self.choose() {
                self.work(end);
            } else {
                let call = self.calls.peek().map(|Reverse((at, ..))| *at);
                self.now = self.review.min(end).min(call.unwrap_or(end));
            }
        }
    }

    /// Takes the calls that have come up to now.
    fn take_calls(&mut self) {
        while let Some(&Reverse((at, index, kernels))) = self.calls.peek()
            && at <= self.now
        {
            self.calls.pop();
            let client = &mut self.clients[index];
            if client.kernels.is_empty() {
                client.pauses.end(client.used, at);
                client.presence.begin(at);
            }
            for _ in 0..kernels {
                let length = client.program.request(&mut client.random).length;
                client.kernels.push_back(Kernel {
                    left: length,
                    length,
                    since: at,
                });
            }
        }
    }

    fn review(&mut self) {
        self.review = self.now + PERIOD;
        let Some(ledger) = &mut self.ledger else {
            return;
        };
        for (index, client) in self.clients.iter_mut().enumerate() {
            let total = client.presence.total(self.now);
            let is_long = |kernel: &Kernel| client.is_long(kernel);
            let report = Report {
                present: total.saturating_sub(client.reported),
                long: client.report.long || client.kernels.front().is_some_and(is_long),
                stopped: client.stopped,
                ..std::mem::take(&mut client.report)
            };
            client.reported = total;
            ledger.report(ClientId(index as u32), report);
        }
        for command in ledger.review(self.now) {
            self.driver += match command {
                Command::Slice(..) => self.costs.set,
                Command::Stop(_) | Command::Start(_) => self.costs.stop,
            };
            match command {
                Command::Slice(ClientId(index), slice) => {
                    self.clients[index as usize].slice = slice;
                }
                Command::Stop(ClientId(index)) => {
                    let client = &mut self.clients[index as usize];
                    client.stopped = true;
                    client.report.switching += self.costs.stop;
                }
                Command::Start(ClientId(index)) => {
                    let client = &mut self.clients[index as usize];
                    client.stopped = false;
                    client.report.switching += self.costs.stop;
                }
            }
        }
    }

    /// Switches to another client if the slice has ended, or the current one cannot continue. Returns whether any
    /// client has the device.
    fn choose(&mut self) -> bool {
        let count = self.clients.len();
        let current = &self.clients[self.current];
        if current.is_ready() && self.now < self.slice_end {
            return true;
        }
        let next = (1..=count)
            .map(|step| (self.current + step) % count)
            .find(|&index| self.clients[index].is_ready());
        let Some(next) = next else {
            return false;
        };
        if next != self.current {
            let switch = match current.kernels.is_empty() {
                true => self.costs.idle,
                false => self.costs.preempted,
            };
            self.current = next;
            self.now += switch;
        }
        self.slice_end = self.now + self.clients[next].slice;
        true
    }

    /// Lets the current client work until its kernel or its slice ends, or something else is to be done.
    fn work(&mut self, end: Moment) {
        let client = &mut self.clients[self.current];
        let Some(kernel) = client.kernels.front_mut() else {
            return;
        };
        let from = self.now;
        let most = self.slice_end.min(self.review.max(from)).min(end);
        let time = kernel.left.min(most.since(from));
        kernel.left -= time;
        client.used += time;
        self.now += time;
        note(&mut client.done, WINDOW, from, self.now);
        let completed = kernel.left.is_zero();
        if client.program.short {
            client.report.used += time;
        }
        if completed {
            self.take_calls();
            self.completed();
        }
    }

    fn completed(&mut self) {
        let client = &mut self.clients[self.current];
        let Some(kernel) = client.kernels.pop_front() else {
            return;
        };
        client.report.completed = true;
        match client.is_long(&kernel) {
            true => client.report.long = true,
            false if client.program.short => {}
            false => client.report.used += kernel.length,
        }
        let mut calls = 1;
        if client.program.batches {
            client.batch.0 += 1;
            client.batch.1 += kernel.length;
            calls = 0;
            if client.batch.0 == client.program.in_flight {
                let (_, length) = std::mem::take(&mut client.batch);
                let took = self.now.since(kernel.since);
                client.delays.push(took.saturating_sub(length));
                calls = client.program.in_flight;
            }
        }
        if client.kernels.is_empty() {
            client.pauses.begin(self.now);
            client.presence.rest(client.pauses.expected(), self.now);
        }
        if calls > 0 {
            let pause = client.program.pause(&mut client.random);
            self.calls
                .push(Reverse((self.now + pause, self.current, calls)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        policy::Class,
        simulator::{Experiment, Lengths, Outcome},
    };

    const TIME: Duration = Duration::from_secs(8);

    fn train(weight: u32) -> Vm {
        Vm::new(weight, Program::training())
    }

    fn decode(weight: u32) -> Vm {
        Vm::new(weight, Program::decoding())
    }

    fn hog(weight: u32) -> Vm {
        Vm::new(weight, Program::training_ahead())
    }

    fn with(class: Class, vm: Vm) -> Vm {
        Vm { class, ..vm }
    }

    /// The 99th percentile of the time for a step, in milliseconds, as if all its steps were the longest.
    fn tail(vms: &[Vm], outcome: &Outcome, index: usize) -> f64 {
        let Lengths::Between(_, longest) = vms[index].program.lengths else {
            panic!("it has steps");
        };
        let delay = outcome.delay(index).expect("it has steps");
        (delay + longest).as_secs_f64() * 1e3
    }

    fn run(vms: &[Vm], slices: Slices) -> Outcome {
        let experiment = Experiment {
            name: "slices",
            vms: vms.to_vec(),
        };
        experiment.run_sliced(slices, SwitchCosts::default(), TIME, 1)
    }

    /// Shares of the time that all used.
    fn shares(outcome: &Outcome) -> Vec<f64> {
        let sum: f64 = outcome.charged.iter().sum();
        outcome.charged.iter().map(|used| used / sum).collect()
    }

    /// The sum of what each got, relative to what it gets alone.
    fn rates(outcome: &Outcome) -> f64 {
        let both = outcome.charged.iter().zip(&outcome.alone);
        both.map(|(used, alone)| used / alone).sum()
    }

    #[track_caller]
    fn assert_near(values: &[f64], expected: &[f64], tolerance: f64) {
        assert_eq!(values.len(), expected.len());
        let near = |(value, expected): (&f64, &f64)| (value - expected).abs() <= tolerance;
        assert!(values.iter().zip(expected).all(near), "{values:?}");
    }

    #[test]
    fn default_slices_give_each_what_fits_into_them() {
        for (vms, expected) in [
            ([train(1), train(3)], [0.5, 0.5]),
            ([decode(1), train(3)], [0.18, 0.82]),
        ] {
            assert_near(&shares(&run(&vms, Slices::Default)), &expected, 0.02);
        }
    }

    #[test]
    fn the_ledger_gives_two_programs_their_weights() {
        for (vms, least) in [
            ([train(1), train(3)], 1.05),
            ([decode(1), train(3)], 1.15),
            ([decode(1), hog(3)], 1.1),
        ] {
            let outcome = run(&vms, Slices::Ledger);
            assert_near(&shares(&outcome), &[0.25, 0.75], 0.02);
            assert!(rates(&outcome) > least, "{}", rates(&outcome));
            assert!(outcome.driver < 0.005, "{}", outcome.driver);
        }
    }

    #[test]
    fn the_ledger_gives_six_programs_their_weights() {
        let weights = [1, 2, 2, 3, 3, 4];
        let outcome = run(&weights.map(train), Slices::Ledger);
        let parts = weights.map(|weight| f64::from(weight) / 15.0);
        assert_near(&shares(&outcome), &parts, 0.02);
        assert!(rates(&outcome) > 1.04, "{}", rates(&outcome));
        assert!(outcome.driver < 0.03, "{}", outcome.driver);
    }

    #[test]
    fn stops_help_where_the_least_slice_is_too_long() {
        let outcome = run(&[train(1), decode(2), hog(3)], Slices::Ledger);
        // Slices alone give 0.319, 0.277 and 0.404.
        assert_near(&shares(&outcome), &[1.0 / 6.0, 2.0 / 6.0, 3.0 / 6.0], 0.06);
    }

    #[test]
    fn a_program_that_is_often_away_gets_what_it_wants() {
        let program = Program::steps(Duration::from_micros(1600), Duration::from_micros(3300));
        let often_away = Vm::new(1, program);
        let outcome = run(&[often_away, train(3)], Slices::Ledger);
        assert_near(&shares(&outcome), &[0.163, 0.837], 0.02);
        assert!(rates(&outcome) > 1.3, "{}", rates(&outcome));
    }

    #[test]
    fn one_program_alone_is_never_stopped_nor_slowed() {
        let outcome = run(&[train(1)], Slices::Ledger);
        assert_near(&outcome.charged, &outcome.alone, 1e-3);
        assert!(outcome.delays[0].iter().all(Duration::is_zero));
    }

    /// What a change of the ledger must not make worse, for mixes that were measured on a GPU: how even the shares are, and for
    /// how long the steps of each last.
    #[test]
    fn shares_and_tails_of_measured_mixes_hold() {
        let six = [1, 2, 2, 3, 3, 4].map(train).to_vec();
        for (vms, tails) in [
            (vec![train(1), train(3)], &[9.0, 2.8][..]),
            (vec![decode(1), train(3)], &[2.2, 3.1]),
            (vec![decode(1), hog(3)], &[1.8]),
            (six, &[36.0, 19.0, 19.0, 15.0, 15.0, 10.0]),
        ] {
            let outcome = run(&vms, Slices::Ledger);
            let even = outcome.min_max_ratio(TIME);
            assert!(even > 0.93, "{even} {:?}", shares(&outcome));
            let got = (0..tails.len()).map(|index| tail(&vms, &outcome, index));
            let got: Vec<f64> = got.collect();
            assert!(
                got.iter().zip(tails).all(|(got, most)| got <= most),
                "{got:?}"
            );
        }
    }

    #[test]
    fn who_gives_a_latency_waits_no_longer_and_its_neighbours_keep_their_parts() {
        let millis = |time: f64| Duration::from_secs_f64(time / 1e3);
        let asks = || Vm::new(1, Program::steps(millis(1.6), millis(20.0)));
        let asks_seldom = || Vm::new(1, Program::steps(millis(5.0), millis(200.0)));
        // How long the 99th percentile is at most beyond a step: of few steps, those until something is saved count.
        for (own, others, beyond) in [
            (decode(1), vec![train(3)], 2.5),
            (decode(1), vec![hog(3)], 2.5),
            (asks(), vec![train(3)], 2.5),
            (asks_seldom(), vec![train(3)], 2.5),
            (asks(), vec![train(1), hog(3)], 2.5),
            (asks(), vec![train(1), train(2), train(3)], 6.0),
        ] {
            let vms = |class| [vec![with(class, own.clone())], others.clone()].concat();
            let (without, vms) = (vms(Class::Shared), vms(Class::Latency(millis(2.0))));
            let [before, after] = [&without, &vms].map(|vms| run(vms, Slices::Ledger));
            let [slow, quick] = [&before, &after].map(|outcome| tail(&vms, outcome, 0));
            let Lengths::Between(_, step) = own.program.lengths else {
                panic!("it has steps");
            };
            let step = step.as_secs_f64() * 1e3;
            assert!(quick < step + beyond, "{quick}");
            assert!(step < 1.0 || slow > quick + 2.0, "{slow} {quick}");
            // What is left of what all used, by weight.
            let shares = shares(&after);
            let rest: f64 = shares[1..].iter().sum();
            let parts: Vec<f64> = shares[1..].iter().map(|share| share / rest).collect();
            let sum: u32 = others.iter().map(|vm| vm.weight).sum();
            let due = others
                .iter()
                .map(|vm| f64::from(vm.weight) / f64::from(sum));
            assert_near(&parts, &due.collect::<Vec<_>>(), 0.02);
            assert!(shares[0] < 1.0 / f64::from(1 + sum) + 0.02, "{shares:?}");
        }
    }

    #[test]
    fn who_wants_more_than_its_part_gets_no_more_by_a_latency() {
        let latency = Class::Latency(Duration::from_millis(2));
        let micros = Duration::from_micros;
        let short = Vm::new(3, Program::steps(micros(200), micros(20)));
        for others in [short, train(3)] {
            for own in [hog(1), train(1)] {
                let shares = shares(&run(&[with(latency, own), others.clone()], Slices::Ledger));
                assert!(shares[0] < 0.27, "{shares:?}");
            }
        }
    }

    #[test]
    fn who_is_idle_gets_what_others_leave_and_delays_nobody() {
        let idle = || with(Class::Idle, hog(1));
        let vms = [train(1), idle()];
        let outcome = run(&vms, Slices::Ledger);
        let lost = 1.0 - outcome.charged[0] / outcome.alone[0];
        assert!(lost < 0.01, "{lost}");
        assert!(tail(&vms, &outcome, 0) < 1.8);
        // One that works for 20 ms of 100 leaves most of the rest.
        let program = Program::steps(Duration::from_millis(20), Duration::from_millis(80));
        let vms = [Vm::new(1, program), idle()];
        let outcome = run(&vms, Slices::Ledger);
        assert!(outcome.charged[1] > 0.6, "{:?}", outcome.charged);
        // A round of slices and a stop.
        assert!(tail(&vms, &outcome, 0) < 20.6 + 6.0);
        // Idle ones share by halves.
        let outcome = run(&[idle(), idle()], Slices::Ledger);
        assert_near(&shares(&outcome), &[0.5, 0.5], 0.02);
    }
}
