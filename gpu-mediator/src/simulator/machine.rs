//! The simulated machine: a device, workers that submit to it, and the clients that call them.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, VecDeque},
    time::Duration,
};

use remoting_turns::{
    meter::{Meter, Slice, Verdict},
    pauses::Pauses,
};

use super::{
    Arbiter, Costs, Had, Vm, note,
    program::{Program, Request},
};
use crate::{
    Moment,
    policy::{ClientId, Name, Weight},
    scheduler::{Dispatch, Scheduler},
};

/// How long a worker keeps the device if its client makes no calls.
const PATIENCE: Duration = Duration::from_micros(50);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A client's next call reaches its worker.
    Call(usize),
    /// A worker has submitted its next request.
    Submitted(usize),
    /// The device has finished a kernel, unless it was interrupted since.
    Done(u64),
    /// A worker notices that its oldest request has completed.
    Noticed(usize),
    /// A worker learns that it has the device.
    Granted(usize),
    /// A worker has waited long enough for calls, unless there was one since.
    Patience(usize, u64),
    /// A worker whose client is away is due back, unless it has come back.
    Late(usize, u64),
    /// A turn on a device that can be interrupted is over, unless it ended before.
    Interrupt(usize, u64),
    /// The policy asked to be called again.
    Ask,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    /// The worker has no calls to execute.
    None,
    /// It waits for the device.
    Waits,
    /// It has been given the device.
    Has,
    /// It has the device but nothing to do, and does not actively wait for calls.
    Parked,
    /// The same while others wait: its client is expected back.
    Paused,
}

struct Worker {
    program: Program,
    random: fastrand::Rng,
    /// Calls that have not been executed.
    calls: VecDeque<Request>,
    /// The next request is on its way to the device.
    submitting: Option<Request>,
    /// The interrupted kernels.
    interrupted: VecDeque<Job>,
    meter: Meter,
    pauses: Pauses,
    turn: Turn,
    slice: Slice,
    /// When its turn should end.
    due: Moment,
    /// Counts turns and calls, so that timers can tell whether they are still valid.
    epoch: u64,
    turns: u64,
    /// Whether the client's vCPU sleeps.
    asleep: bool,
    synchronous: u64,
    charged: Duration,
    /// Number of kernels of the batch that have not completed, and when its first call came.
    batch: (u32, Moment),
    /// Total length of its kernels.
    length: Duration,
    /// Time that batches took in addition to their kernels.
    delays: Vec<Duration>,
    /// Kernel time completed in each window of the outcome.
    done: Vec<Duration>,
}

#[derive(Clone, Copy, Debug)]
struct Job {
    worker: usize,
    left: Duration,
}

#[derive(Default)]
struct Device {
    queue: VecDeque<Job>,
    /// The running kernel, and since when.
    running: Option<(Job, Moment)>,
    started: u64,
    last: Option<usize>,
}

pub(super) struct Machine {
    now: Moment,
    sequence: u64,
    events: BinaryHeap<Reverse<(Moment, u64, Event)>>,
    scheduler: Scheduler,
    preemptive: bool,
    costs: Costs,
    workers: Vec<Worker>,
    device: Device,
    window: Duration,
}

impl Machine {
    pub(super) fn new(
        vms: &[Vm],
        arbiter: Arbiter,
        costs: Costs,
        window: Duration,
        seed: u64,
    ) -> Self {
        let mut scheduler = Scheduler::new(arbiter.policy.make());
        scheduler.set_longest_pause(arbiter.longest_pause);
        let workers = vms
            .iter()
            .enumerate()
            .map(|(index, vm)| {
                let weight = Weight::try_from(vm.weight).unwrap_or(Weight::ONE);
                scheduler.join(ClientId(index as u32), weight, Moment::START);
                Worker {
                    program: vm.program.clone(),
                    random: fastrand::Rng::with_seed(seed.wrapping_add(index as u64)),
                    calls: VecDeque::new(),
                    submitting: None,
                    interrupted: VecDeque::new(),
                    meter: Meter::default(),
                    pauses: Pauses::default(),
                    turn: Turn::None,
                    slice: Slice::Request,
                    due: Moment::START,
                    epoch: 0,
                    turns: 0,
                    asleep: false,
                    synchronous: 0,
                    charged: Duration::ZERO,
                    batch: (0, Moment::START),
                    length: Duration::ZERO,
                    delays: Vec::new(),
                    done: Vec::new(),
                }
            })
            .collect();
        Self {
            now: Moment::START,
            sequence: 0,
            events: BinaryHeap::new(),
            scheduler,
            preemptive: arbiter.policy == Name::FairPreemptive && costs.interrupts,
            costs,
            workers,
            device: Device::default(),
            window,
        }
    }

    /// Runs until `end`.
    pub(super) fn run(mut self, end: Moment) -> Vec<Had> {
        for index in 0..self.workers.len() {
            for _ in 0..self.workers[index].program.in_flight {
                self.at(Duration::ZERO, Event::Call(index));
            }
        }
        while let Some(Reverse((moment, _, event))) = self.events.pop() {
            if moment > end {
                break;
            }
            self.now = moment;
            self.handle(event);
        }
        let scheduler = &self.scheduler;
        let had = self.workers.into_iter().enumerate().map(|(index, worker)| {
            let figures = scheduler.figures(ClientId(index as u32), end);
            Had {
                done: worker.done,
                charged: figures.unwrap_or_default().device_time,
                delays: worker.delays,
            }
        });
        had.collect()
    }

    fn at(&mut self, after: Duration, event: Event) {
        // Events at the same time happen in the order of their creation.
        self.sequence += 1;
        self.events
            .push(Reverse((self.now + after, self.sequence, event)));
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Call(index) => self.call(index),
            Event::Submitted(index) => {
                if let Some(request) = self.workers[index].submitting.take() {
                    self.device.queue.push_back(Job {
                        worker: index,
                        left: request.length,
                    });
                    self.start();
                }
                self.pump(index);
            }
            Event::Done(number) if number == self.device.started => self.done(),
            Event::Noticed(index) => self.noticed(index),
            Event::Granted(index) => self.granted(index),
            Event::Patience(index, epoch) if epoch == self.workers[index].epoch => {
                self.patience(index);
            }
            Event::Late(index, epoch) if epoch == self.workers[index].epoch => {
                self.review(index);
                self.dispatch();
            }
            Event::Interrupt(index, turn) if turn == self.workers[index].turns => {
                self.interrupt(index);
            }
            Event::Ask => self.dispatch(),
            Event::Done(_) | Event::Patience(..) | Event::Late(..) | Event::Interrupt(..) => {}
        }
    }

    /// Handles a call that has arrived.
    fn call(&mut self, index: usize) {
        let worker = &mut self.workers[index];
        let request = worker.program.request(&mut worker.random);
        worker.calls.push_back(request);
        worker.synchronous += u64::from(worker.program.in_flight == 1);
        if worker.program.batches {
            if worker.batch.0 == 0 {
                worker.batch.1 = self.now;
            }
            worker.batch.0 += 1;
            worker.length += request.length;
        }
        worker.epoch += 1;
        worker.pauses.end(worker.meter.busy(), self.now);
        match worker.turn {
            Turn::None => self.want(index),
            Turn::Parked | Turn::Paused => {
                worker.turn = Turn::Has;
                self.pump(index);
            }
            Turn::Has => self.pump(index),
            Turn::Waits => {}
        }
    }

    fn want(&mut self, index: usize) {
        self.workers[index].turn = Turn::Waits;
        if let Some(ClientId(holder)) = self.scheduler.holder()
            && !self.scheduler.contended()
        {
            let holder = holder as usize;
            // A client that was alone pays for what it has used, not for time that nobody else
            // wanted.
            let busy = self.workers[holder].meter.busy_until(self.now);
            self.charge(holder, busy.saturating_sub(self.workers[holder].charged));
            // Until now, it could have continued forever.
            let due = &mut self.workers[holder].due;
            *due = (*due).max(self.now);
        }
        self.scheduler.want(ClientId(index as u32), self.now);
        if let Some(ClientId(holder)) = self.scheduler.holder() {
            self.review(holder as usize);
        }
        self.dispatch();
    }

    fn charge(&mut self, index: usize, used: Duration) {
        let worker = &mut self.workers[index];
        worker.charged = worker.meter.busy_until(self.now);
        let calls = std::mem::take(&mut worker.synchronous);
        self.scheduler.charge(used, calls, self.now);
    }

    fn dispatch(&mut self) {
        match self.scheduler.dispatch(self.now) {
            Dispatch::Grant(grant) => {
                let index = grant.client.0 as usize;
                let worker = &mut self.workers[index];
                worker.slice = grant.slice;
                worker.asleep &= !grant.coschedule;
                self.at(self.costs.grant, Event::Granted(index));
            }
            Dispatch::At(moment) => self.at(moment.since(self.now), Event::Ask),
            Dispatch::Nothing => {}
        }
    }

    fn granted(&mut self, index: usize) {
        let worker = &mut self.workers[index];
        worker.turn = Turn::Has;
        worker.turns += 1;
        worker.meter.begin(worker.slice, self.now);
        worker.charged = worker.meter.busy_until(self.now);
        worker.due = match worker.slice {
            Slice::Time(length) => self.now + length,
            Slice::Request => self.now,
        };
        let turn = worker.turns;
        let interrupted = std::mem::take(&mut worker.interrupted);
        self.device.queue.extend(interrupted);
        self.start();
        if self.preemptive
            && let Slice::Time(length) = self.workers[index].slice
        {
            self.at(length, Event::Interrupt(index, turn));
        }
        self.pump(index);
    }

    /// Continues with a worker that may have something to do.
    fn pump(&mut self, index: usize) {
        let alone = !self.scheduler.contended();
        let worker = &mut self.workers[index];
        if worker.turn != Turn::Has || worker.submitting.is_some() {
            return;
        }
        let Some(&request) = worker.calls.front() else {
            if worker.meter.outstanding() == 0 {
                worker.pauses.begin(self.now);
                let epoch = worker.epoch;
                self.at(PATIENCE, Event::Patience(index, epoch));
            }
            return;
        };
        match worker.meter.verdict(request.kind, alone, self.now) {
            Verdict::Submit => {
                worker.calls.pop_front();
                worker.meter.submitted(request.kind, self.now);
                worker.submitting = Some(request);
                self.at(self.costs.submit, Event::Submitted(index));
            }
            Verdict::Wait | Verdict::Filled => {}
            Verdict::Over => self.end(index, true),
        }
    }

    fn patience(&mut self, index: usize) {
        let worker = &mut self.workers[index];
        if worker.turn == Turn::Has && worker.meter.outstanding() == 0 {
            worker.turn = Turn::Parked;
            self.review(index);
        }
    }

    /// Checks whether a holder whose client is away keeps the device.
    fn review(&mut self, index: usize) {
        let worker = &self.workers[index];
        if !matches!(worker.turn, Turn::Parked | Turn::Paused) || !self.scheduler.contended() {
            return;
        }
        let expected = worker.pauses.expected();
        let since = worker.pauses.since().unwrap_or(self.now);
        let (in_turn, epoch) = (self.now < worker.due, worker.epoch);
        self.charge(index, Duration::MAX);
        let until = (self.scheduler).keeps(expected, since, in_turn, self.now);
        let id = ClientId(index as u32);
        if let Some(until) = until {
            self.workers[index].turn = Turn::Paused;
            self.at(until.since(self.now), Event::Late(index, epoch));
        } else {
            self.end(index, false);
            self.scheduler.away(id, expected, since, self.now);
            self.dispatch();
        }
    }

    fn end(&mut self, index: usize, more: bool) {
        let worker = &mut self.workers[index];
        worker.turn = Turn::None;
        worker.turns += 1;
        // Its client's vCPU has had nothing to poll for, for a long time.
        worker.asleep = worker.program.in_flight == 1;
        // The whole turn: nobody else had the device.
        self.charge(index, Duration::MAX);
        self.scheduler.done(self.now);
        if more {
            self.workers[index].turn = Turn::Waits;
            self.scheduler.want(ClientId(index as u32), self.now);
            self.dispatch();
        }
    }

    /// Starts the next kernel on the device.
    fn start(&mut self) {
        if self.device.running.is_some() {
            return;
        }
        let Some(job) = self.device.queue.pop_front() else {
            return;
        };
        let switch = if self.device.last.replace(job.worker) == Some(job.worker) {
            Duration::ZERO
        } else {
            self.costs.switch
        };
        let begin = self.now + self.costs.start + switch;
        self.device.running = Some((job, begin));
        self.device.started += 1;
        let number = self.device.started;
        self.at(begin.since(self.now) + job.left, Event::Done(number));
    }

    /// The device has finished a kernel.
    fn done(&mut self) {
        if let Some((job, since)) = self.device.running.take() {
            note(
                &mut self.workers[job.worker].done,
                self.window,
                since,
                self.now,
            );
            self.at(self.costs.notice, Event::Noticed(job.worker));
            // The kernels that the driver has queued follow immediately.
            if let Some(next) = self.device.queue.pop_front() {
                self.device.running = Some((next, self.now));
                self.device.last = Some(next.worker);
                self.device.started += 1;
                let number = self.device.started;
                self.at(next.left, Event::Done(number));
            }
        }
    }

    fn noticed(&mut self, index: usize) {
        let worker = &mut self.workers[index];
        worker.meter.completed(self.now);
        let mut calls = 1;
        if worker.program.batches {
            worker.batch.0 -= 1;
            if worker.batch.0 > 0 {
                return self.pump(index);
            }
            calls = worker.program.in_flight;
            let took = self.now.since(worker.batch.1);
            let length = std::mem::take(&mut worker.length);
            worker.delays.push(took.saturating_sub(length));
            worker.synchronous += 1;
        }
        let mut delay = worker.program.pause(&mut worker.random);
        if std::mem::take(&mut worker.asleep) {
            delay += self.costs.wake;
        }
        for _ in 0..calls {
            if delay.is_zero() {
                self.call(index);
            } else {
                self.at(delay, Event::Call(index));
            }
        }
        self.pump(index);
    }

    /// Takes the device from a worker in the middle of its kernel.
    fn interrupt(&mut self, index: usize) {
        let worker = &mut self.workers[index];
        if worker.turn != Turn::Has {
            return;
        }
        if !self.scheduler.contended() || worker.submitting.is_some() {
            let turn = worker.turns;
            self.at(self.costs.submit, Event::Interrupt(index, turn));
            return;
        }
        if let Some((mut job, since)) = self.device.running.take() {
            self.device.started += 1;
            job.left = job.left.saturating_sub(self.now.since(since));
            note(
                &mut self.workers[job.worker].done,
                self.window,
                since,
                self.now,
            );
            self.workers[index].interrupted.push_back(job);
        }
        let queued = std::mem::take(&mut self.device.queue);
        self.workers[index].interrupted.extend(queued);
        self.end(index, true);
    }
}
