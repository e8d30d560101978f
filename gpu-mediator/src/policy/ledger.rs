//! Corrects the time slices of a device that serves its clients in turn by itself, so that each gets what it is due.
//!
//! The device preempts kernels and serves all clients that have work, each for its slice. Slices alone do not hold
//! weights: a client whose kernel fits into its slice gives the rest of it away, and one that waits for its results is
//! often away when its slice comes. The ledger therefore compares what each client is due with what it has used, and
//! changes the slices:
//!
//! - Due: while several clients have work, time is divided among them by weight. A client that waits for its results
//!   and is usually back within half a millisecond counts as having work meanwhile; otherwise waiting would cost it
//!   its share ([`Presence`](remoting_turns::presence::Presence)).
//! - Use: as reported, but together the time for which somebody had work. A part that nobody accounts for is charged by
//!   what each is due, up to a bound. More is charged to those whose kernels are too long to be measured, else to all who
//!   had work, by their slices. Reports of more than there was are scaled down.
//! - Credit: what it was due, less what it has used, within bounds, so that neither a debt nor a claim lasts.
//! - Every 40 ms, slices follow the ratio of due and use, and the credit. Their sum stays about 2 ms per client, which
//!   bounds how long each waits.
//! - A client that overdraws with the least slice is stopped until it is level, while another one is owed time, but no longer
//!   than until 1 ms of the device have become due to it, so that a step waits for about that. The more its debt grows all the
//!   same, the longer are its stops, up to [`LONGEST_STOP`]. Larger debts are forgiven, so weights of more than about 1 to 20 are not
//!   held exactly.
//! - A client that is away after it had work saves a part of what it would be due, up to [`SAVED`], so that requests which come now and then are
//!   not stopped for what the client does not need in between.
//! - If the owed completes nothing during a stop of at least [`TELLING`], because it waits for something else than the device, it loses its credit,
//!   and nobody is stopped for it until it has completed something.
//!
//! A client of the class [`Latency`](Class::Latency) earns its part of the time while others have work, whether it has some or not,
//! up to the largest credit. The others divide by weight what it leaves. Their slices are shortened so that in sum they are not longer
//! than it is to wait, unless it has overdrawn; its own slice is [`UNINTERRUPTED`] while it has credit.
//!
//! One of the class [`Idle`](Class::Idle) is due nothing, and stopped while one of another class has work, and for [`FREE`] after that.
//!
//! Reports decide: a worker that hides its use gets more than its part of the time.
//!
//! Each command costs a call of the driver that takes its locks. Slices that are nearly right are therefore left alone,
//! and after a stop there is none for twenty times as long as the calls for the last one took.

use std::{collections::BTreeMap, time::Duration};

use super::{Class, ClientId, Delay, Weight, delays::Delays};
use crate::Moment;

/// How often the caller asks for commands ([`Ledger::review`]).
pub const PERIOD: Duration = Duration::from_millis(1);
/// The slice of a client that has just joined: the driver's own.
pub const FIRST_SLICE: Duration = Duration::from_micros(2048);
/// The longest stop.
pub const LONGEST_STOP: Duration = Duration::from_millis(60);
/// The shortest slice: with shorter ones, switching costs too much.
pub const LEAST_SLICE: Duration = Duration::from_micros(350);

/// How long a client runs at least between two stops.
const BETWEEN_STOPS: Duration = Duration::from_millis(8);
/// A stop for the least debt lasts at most until this much device time has become due to the client, in milliseconds.
const STOPPED_FOR: f64 = 1.0;
/// A stop that was shorter tells nothing about who completes something meanwhile.
const TELLING: Duration = Duration::from_millis(4);
/// A stop that the client has not confirmed for so long has ended by itself, or was not possible.
const UNCONFIRMED: Duration = Duration::from_millis(40);
/// Up to this part of the time, what nobody accounts for is switching between clients and pauses of the device, and is
/// charged by what clients are due; where somebody runs a kernel that is too long to be measured, only the first part.
const SWITCHING: f64 = 0.08;
const PAUSES: f64 = 0.3;
/// Use is reported when kernels have completed, so that reports are late or early by up to so many milliseconds.
const GRANULARITY: f64 = 6.0;
/// What was used in one review's time and more counts in the next ones, up to so many milliseconds.
const LUMP: f64 = 100.0;
/// Stops and starts take at most one in this many parts of the time.
const STOPPING: u32 = 20;
/// The longest report of the time for a stop that counts.
const LONGEST_SWITCH: Duration = Duration::from_millis(10);
/// Use is settled after so long, and slices are corrected after so many settlements.
const SETTLEMENT: Duration = Duration::from_millis(20);
const CORRECTION: u32 = 2;
/// The shortest and longest slice, in milliseconds.
const LEAST: f64 = LEAST_SLICE.as_micros() as f64 / 1e3;
const LONGEST_SLICE: f64 = 30.0;
/// The sum of all slices, in milliseconds per client that has used or was due something.
const CYCLE: f64 = 2.0;
/// How much a client saves while it is away, in milliseconds.
const SAVED: f64 = 20.0;
/// Bounds of a credit, in milliseconds.
const MOST_CREDIT: f64 = 40.0;
const MOST_DEBT: f64 = 60.0;
/// The bound of a debt is its part of that, but at least this many times the debt for which a client is stopped, so that stops can
/// become longer before debts are forgiven.
const LEAST_BOUND: f64 = 4.0;
/// The exponent with which slices follow the ratio of due and use: below one, so that they do not oscillate.
const GAIN: f64 = 0.35;
/// A credit of so many milliseconds doubles a slice, if it could do so at once.
const CREDIT_SCALE: f64 = 60.0;
/// By how much a credit or debt changes a slice at most in one correction.
const CREDIT_EFFECT: f64 = 0.3;
/// The bounds of one correction.
const SMALLEST_STEP: f64 = 0.6;
const LARGEST_STEP: f64 = 1.6;
/// Milliseconds that are added to due and use, so that the ratio of two small times is near one.
const GRAIN: f64 = 0.05;
/// A smaller relative change of a slice is not worth a call.
const WORTH: f64 = 0.05;
/// A client with a larger debt, in milliseconds for each client that has work, is stopped if its slice is the least one.
const OVERDRAWN: f64 = 1.0;
/// A slice counts as the least one up to this multiple of it.
const NEAR_LEAST: f64 = 1.5;
/// Debts and credits up to this many milliseconds count as none.
const LEVEL: f64 = 1.0;

/// The slice of a client that is not to wait, in milliseconds, and the credit from which on it has such ones.
const UNINTERRUPTED: f64 = 8.0;
const CREDITED: f64 = 6.0;
/// How long all clients that are not idle must have been without work before idle ones run.
const FREE: Duration = Duration::from_millis(8);
/// Who has the device alone, and is seen by its record alone, seems to have no work. If it has some within this time after idle clients
/// were started, these wait for longer the next time, up to so long.
const REGRETTED: Duration = Duration::from_millis(250);
const PATIENCE: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(8)];
/// For how long slices stay short for a client that has no work.
const EXPECTED: Duration = Duration::from_secs(1);

/// What is to be done on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// The client's slices last this long from now on.
    Slice(ClientId, Duration),
    /// Take the client off the device.
    Stop(ClientId),
    /// Let a stopped client continue.
    Start(ClientId),
}

/// What a client reports for the time since its last report. Nothing of it is trusted beyond what the ledger says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// For how long it had work, or counted as having some.
    pub present: Duration,
    /// For how long its kernels have used the device, without those that are too long to be measured: as others
    /// interrupt them, their length is not known.
    pub used: Duration,
    /// Whether it runs such a kernel.
    pub long: bool,
    /// Whether any of its requests has completed.
    pub completed: bool,
    /// Whether it is stopped.
    pub stopped: bool,
    /// How long stopping and starting it took.
    pub switching: Duration,
    /// Whether its work is known by the device's record alone, which has nothing of a client that has the device alone.
    pub recorded: bool,
}

/// Times are in milliseconds.
#[derive(Debug)]
struct Account {
    weight: Weight,
    class: Class,
    /// Whether it is stopped because others have work.
    is_held: bool,
    /// Whether its work is not known while it has the device alone.
    is_recorded: bool,
    /// When it last had work, or counted as having some.
    seen: Option<Moment>,
    /// The slice that it has while it has credit, in milliseconds: [`UNINTERRUPTED`], if no other one waits for it.
    preferred: Option<f64>,
    slice: f64,
    /// Since when it is to be stopped, and whether it is.
    stopped: Option<Moment>,
    confirmed: bool,
    /// For how long it is stopped at most.
    stop: Duration,
    /// When its last stop ended.
    started: Option<Moment>,
    /// Whether it has completed something since the last stop of another client began.
    completes: bool,
    /// Whether it had completed nothing when that stop ended, and still has not.
    waits: bool,
    credit: f64,
    /// Since the last review.
    present: f64,
    used: f64,
    long: bool,
    /// Since the last settlement: for how long it was present, and was so without being stopped; what it was due for that, what
    /// went to its credit, and its reported use.
    presence: f64,
    running: f64,
    due: f64,
    earned: f64,
    measured: f64,
    was_long: bool,
    /// Since the last correction.
    due_before: f64,
    used_before: f64,
    /// Since [`Ledger::take_charged`].
    charged: f64,
    /// Whether it had work at the last review, or counted as having some.
    works: bool,
    delays: Delays,
}

impl Account {
    /// Whether it has work that the device does not do fast enough; `present` is the part of the last review for which it
    /// had work.
    fn is_owed(&self, present: f64) -> bool {
        self.credit > LEVEL && present > 0.5 && self.stopped.is_none() && !self.waits
    }

    /// Whether it has work, or is kept from it, and is due some time.
    fn takes_part(&self) -> bool {
        (self.works || self.stopped.is_some()) && !self.is_held
    }

    fn is_idle(&self) -> bool {
        self.class == Class::Idle
    }

    /// Whether it has had work lately.
    fn is_expected(&self, now: Moment) -> bool {
        self.seen.is_some_and(|seen| now.since(seen) < EXPECTED)
    }

    fn has_latency(&self) -> bool {
        matches!(self.class, Class::Latency(_))
    }

    /// The slice that it has now, in milliseconds.
    fn current(&self) -> f64 {
        self.slice.max(self.preferred.unwrap_or_default())
    }

    /// The slice that would suit it, whatever those of others.
    fn wanted(&self) -> f64 {
        let ratio = (self.due_before + GRAIN) / (self.used_before + GRAIN);
        let credit = (self.credit / CREDIT_SCALE).clamp(-CREDIT_EFFECT, CREDIT_EFFECT);
        let step = (ratio.powf(GAIN) * (1.0 + credit)).clamp(SMALLEST_STEP, LARGEST_STEP);
        (self.slice * step).clamp(LEAST, LONGEST_SLICE)
    }

    fn add(&mut self, credit: f64) {
        self.credit = (self.credit + credit).clamp(-MOST_DEBT, MOST_CREDIT);
    }
}

/// The accounts of a device's clients.
#[derive(Debug)]
pub struct Ledger {
    accounts: BTreeMap<ClientId, Account>,
    /// When the last review was.
    reviewed: Moment,
    /// The time since the last settlement in which somebody had work, in milliseconds.
    busy: f64,
    /// By how much less than that time was charged than reported as used, within [`GRANULARITY`].
    unsettled: f64,
    /// When use was settled last, and settlements since the last correction.
    settled: Moment,
    settlements: u32,
    /// Until when nobody is stopped.
    unstopped: Moment,
    /// When one that is not idle last had work, for how long none must have had any until idle ones run, and when these were started
    /// if none has had any since.
    worked: Option<Moment>,
    patience: Duration,
    released: Option<Moment>,
}

impl Ledger {
    /// Creates a ledger without clients.
    pub fn new(now: Moment) -> Self {
        Self {
            accounts: BTreeMap::new(),
            reviewed: now,
            busy: 0.0,
            unsettled: 0.0,
            settled: now,
            settlements: 0,
            unstopped: now,
            worked: None,
            patience: FREE,
            released: None,
        }
    }

    /// Adds a client that has no work yet. Its slice is [`FIRST_SLICE`].
    pub fn join(&mut self, client: ClientId, weight: Weight) {
        let account = Account {
            weight,
            class: Class::Shared,
            is_held: false,
            is_recorded: false,
            seen: None,
            preferred: None,
            slice: millis(FIRST_SLICE),
            stopped: None,
            confirmed: false,
            stop: Duration::ZERO,
            started: None,
            completes: true,
            waits: false,
            credit: 0.0,
            present: 0.0,
            used: 0.0,
            long: false,
            presence: 0.0,
            running: 0.0,
            due: 0.0,
            earned: 0.0,
            measured: 0.0,
            was_long: false,
            due_before: 0.0,
            used_before: 0.0,
            charged: 0.0,
            works: false,
            delays: Delays::default(),
        };
        self.accounts.insert(client, account);
    }

    /// The client's weight changes.
    pub fn set_weight(&mut self, client: ClientId, weight: Weight) {
        if let Some(account) = self.accounts.get_mut(&client) {
            account.weight = weight;
        }
    }

    /// The client's class changes.
    pub fn set_class(&mut self, client: ClientId, class: Class) {
        if let Some(account) = self.accounts.get_mut(&client) {
            account.class = class;
        }
    }

    /// Whether the client has joined.
    pub fn has(&self, client: ClientId) -> bool {
        self.accounts.contains_key(&client)
    }

    /// Removes a client. If it was stopped, the caller starts it.
    pub fn leave(&mut self, client: ClientId) {
        self.accounts.remove(&client);
    }

    /// Removes all clients but these. If one was stopped, the caller starts it.
    pub fn retain(&mut self, which: impl Fn(ClientId) -> bool) {
        self.accounts.retain(|client, _| which(*client));
    }

    /// The device is shared in another way, or by slices again: nobody is stopped, and what has passed meanwhile is not of the
    /// next review.
    pub fn interrupt(&mut self, now: Moment) {
        self.reviewed = now;
        for account in self.accounts.values_mut() {
            (account.stopped, account.is_held) = (None, false);
            account.confirmed = false;
            (account.present, account.used, account.long) = (0.0, 0.0, false);
            account.delays.end();
        }
    }

    /// The client reports for the time since the last review. Several reports add up.
    pub fn report(&mut self, client: ClientId, report: Report) {
        let pause = report.switching.min(LONGEST_SWITCH) * STOPPING;
        self.unstopped = self.unstopped.max(self.reviewed + pause);
        if let Some(account) = self.accounts.get_mut(&client) {
            account.present += millis(report.present);
            account.used += millis(report.used);
            account.long |= report.long;
            account.confirmed = report.stopped;
            account.is_recorded = report.recorded;
            if report.completed {
                (account.completes, account.waits) = (true, false);
            }
        }
    }

    /// The device time that a client was charged for since this was asked last.
    pub fn take_charged(&mut self, client: ClientId) -> Duration {
        let account = self.accounts.get_mut(&client);
        let charged = account.map_or(0.0, |one| std::mem::take(&mut one.charged));
        Duration::from_secs_f64(charged / 1e3)
    }

    /// The longest time, 20 ms at least, for which a client had work and got nothing, since this was asked last. What a kernel has
    /// that is too long to be measured is not known, and no delay.
    pub fn take_delay(&mut self, client: ClientId) -> Option<Delay> {
        self.accounts.get_mut(&client)?.delays.take()
    }

    /// Whether the client is to be stopped.
    pub fn is_stopped(&self, client: ClientId) -> bool {
        let account = self.accounts.get(&client);
        account.is_some_and(|account| account.stopped.is_some())
    }

    /// The client's slice.
    pub fn slice(&self, client: ClientId) -> Option<Duration> {
        let account = self.accounts.get(&client)?;
        Some(Duration::from_secs_f64(account.current() / 1e3))
    }

    /// Reviews all accounts. Returns what is to be done, in this order.
    pub fn review(&mut self, now: Moment) -> Vec<Command> {
        let passed = now.since(self.reviewed);
        let period = millis(passed);
        self.reviewed = now;
        if period <= 0.0 {
            return Vec::new();
        }
        // A client that is held has work which is not being done.
        let part = |account: &Account| match account.is_held && account.confirmed {
            true => 0.0,
            false => (account.present / period).clamp(0.0, 1.0),
        };
        let mut others = self.accounts.values().filter(|one| !one.is_idle());
        let others_work = others.any(|account| part(account) > 0.0);
        if others_work {
            self.worked = Some(now);
        }
        let due_by = |account: &Account| match account.is_idle() && others_work {
            true => 0.0,
            false => weight(account) * part(account),
        };
        let total: f64 = self.accounts.values().map(due_by).sum();
        // Those with a latency earn in any case, and the others divide the rest.
        let of = |which: fn(&Account) -> bool| self.accounts.values().filter(move |one| which(one));
        let quick = of(Account::has_latency);
        let rest: f64 = of(|one| !one.has_latency()).map(due_by).sum();
        let all = rest + quick.clone().map(weight).sum::<f64>();
        let away = self.accounts.values().map(|account| 1.0 - part(account));
        let busy = period * (1.0 - away.product::<f64>());
        // What they take beyond what they may is what the others are owed.
        let may = |one: &Account| busy * weight(one) / all + one.credit.max(0.0);
        let taken: f64 = quick.map(|one| one.used.min(period).min(may(one))).sum();
        self.busy += busy;
        let mut owed = Vec::new();
        let used = self.accounts.iter().filter(|(_, one)| one.used > 0.0);
        let most = used.max_by(|(_, one), (_, other)| one.used.total_cmp(&other.used));
        let most = most.map(|(id, _)| *id);
        for (id, account) in &mut self.accounts {
            let part = part(account);
            match part > 0.5 && account.used <= 0.0 && !account.long {
                true => account.delays.wait(passed, most),
                false => account.delays.end(),
            }
            let (due, earned) = match due_by(account) {
                by if account.has_latency() => {
                    let due = if by > 0.0 { busy * by / total } else { 0.0 };
                    (due, busy * weight(account) / all)
                }
                by if by > 0.0 && taken > 0.0 => {
                    let due = (busy - taken).max(0.0) * by / rest;
                    (due, due)
                }
                by if by > 0.0 => (busy * by / total, busy * by / rest),
                _ if busy > 0.0 && !account.is_idle() && account.is_expected(now) => {
                    let earned = busy * weight(account) / (total + weight(account));
                    (0.0, earned.min((SAVED - account.credit).max(0.0)))
                }
                _ => (0.0, 0.0),
            };
            // Reports may come in lumps.
            let used = account.used.min(period);
            account.used = (account.used - used).min(LUMP);
            account.presence += part * period;
            if account.stopped.is_none() || !account.confirmed {
                account.running += part * period;
                account.was_long |= account.long;
            }
            account.due += due;
            account.earned += earned;
            account.measured += used;
            account.add(earned - used);
            (account.present, account.long) = (0.0, false);
            account.works = part > 0.0;
            if account.works {
                account.seen = Some(now);
            }
            if account.is_idle() && others_work {
                account.credit = 0.0;
            }
            if account.is_owed(part) {
                owed.push(*id);
            }
        }
        let settled = now.since(self.settled) + PERIOD / 2 >= SETTLEMENT;
        if settled {
            self.settled = now;
            self.settle();
        }
        let mut commands = Vec::new();
        self.hold(now, &mut commands);
        self.prefer(now, &mut commands);
        self.stop_and_start(&owed, now, &mut commands);
        if settled {
            self.settlements += 1;
            if self.settlements >= CORRECTION {
                self.settlements = 0;
                self.correct(now, &mut commands);
            }
        }
        commands
    }

    /// Charges for all the time in which somebody had work, and for no more.
    fn settle(&mut self) {
        let busy = std::mem::take(&mut self.busy);
        let measured: f64 = self.accounts.values().map(|one| one.measured).sum();
        let present = |account: &Account| account.presence > 0.0;
        let any_long = self.accounts.values().any(|account| account.was_long);
        let alone = self.accounts.values().filter(|one| present(one)).count() <= 1;
        let pays = |account: &Account| match account.was_long || !any_long {
            true => account.running * account.slice,
            false => 0.0,
        };
        let unsettled = match alone {
            true => busy - measured,
            false => self.unsettled + busy - measured,
        };
        self.unsettled = match alone {
            true => 0.0,
            false => unsettled.clamp(-GRANULARITY, GRANULARITY),
        };
        let missing = unsettled - self.unsettled;
        let usual = busy * if any_long { SWITCHING } else { PAUSES };
        let usual = missing.clamp(0.0, usual);
        let rest = missing.max(0.0) - usual;
        let due: f64 = self.accounts.values().map(|one| one.due).sum();
        let scale = match measured > 0.0 {
            true => (1.0 + missing.min(0.0) / measured).max(0.0),
            false => 1.0,
        };
        let all: f64 = self.accounts.values().map(pays).sum();
        for account in self.accounts.values_mut() {
            let part = |of: f64, all: f64| if all > 0.0 { of / all } else { 0.0 };
            let surplus = rest * part(pays(account), all) + usual * part(account.due, due);
            let used = account.measured * scale + surplus;
            account.add(account.measured - used);
            if alone && present(account) {
                // Whoever was alone owes nothing, and nothing is owed to it.
                account.add(used - account.earned);
            }
            // Pauses of a lone client are nobody's.
            account.charged += match alone && !account.was_long {
                true => account.measured * scale,
                false => used,
            };
            account.due_before += account.due;
            account.used_before += used;
            (account.presence, account.running) = (0.0, 0.0);
            (account.due, account.earned, account.measured) = (0.0, 0.0, 0.0);
            account.was_long = false;
        }
        for account in self.accounts.values_mut().filter(|one| one.is_held) {
            account.credit = 0.0;
        }
        self.forgive();
    }

    /// Forgives debts that would take longer than a stop.
    fn forgive(&mut self) {
        // Those that are away keep their debts, within [`MOST_DEBT`].
        let debts = self.debts();
        for account in self.accounts.values_mut().filter(|one| one.takes_part()) {
            account.credit = account.credit.max(-debts.most(account));
        }
    }

    fn debts(&self) -> Debts {
        let all = || self.accounts.values().filter(|one| one.takes_part());
        Debts {
            total: all().map(weight).sum(),
            overdrawn: (OVERDRAWN * all().count() as f64).min(MOST_DEBT / 2.0),
        }
    }

    /// Stops idle clients while others have work.
    fn hold(&mut self, now: Moment, commands: &mut Vec<Command>) {
        let mut others = self.accounts.values().filter(|one| !one.is_idle());
        if !others.any(|one| one.is_recorded) {
            (self.patience, self.released) = (FREE, None);
        } else if let (Some(worked), Some(released)) = (self.worked, self.released)
            && worked > released
        {
            let [least, most] = PATIENCE;
            self.patience = match worked.since(released) < REGRETTED {
                true => (self.patience * 2).clamp(least, most),
                false => FREE,
            };
            self.released = None;
        }
        let is_free = (self.worked).is_none_or(|last| now.since(last) >= self.patience);
        for (&id, account) in &mut self.accounts {
            let hold = account.is_idle() && !is_free;
            if account.is_held && !hold {
                (account.is_held, account.stopped) = (false, None);
                account.started = Some(now);
                self.released = Some(now);
                commands.push(Command::Start(id));
            } else if hold && !account.is_held && account.works && now >= self.unstopped {
                account.is_held = true;
                if account.stopped.is_none() {
                    (account.stopped, account.confirmed) = (Some(now), false);
                    commands.push(Command::Stop(id));
                }
            }
        }
    }

    /// Has clients with a latency that have credit not be interrupted.
    fn prefer(&mut self, now: Moment, commands: &mut Vec<Command>) {
        // What others with a latency leave: their own, less the slices of all but them.
        let present = |one: &Account| one.is_expected(now);
        let sum: f64 = self
            .accounts
            .values()
            .filter(|one| present(one))
            .map(|one| one.slice)
            .sum();
        let quick = self.accounts.iter().filter(|(_, one)| present(one));
        let left = quick.filter_map(|(id, one)| match one.class {
            Class::Latency(longest) => Some((*id, millis(longest) - (sum - one.slice))),
            _ => None,
        });
        let left: Vec<(ClientId, f64)> = left.collect();
        for (&id, account) in &mut self.accounts {
            let others = left.iter().filter(|(other, _)| *other != id);
            let most = others.map(|(_, left)| left + account.slice);
            let most = most.fold(UNINTERRUPTED, f64::min);
            let least = if account.preferred.is_some() {
                LEVEL
            } else {
                CREDITED
            };
            let prefer = account.has_latency() && account.credit > least;
            let before = account.current();
            account.preferred = prefer.then_some(most);
            let changed = (account.current() - before).abs() > WORTH * before;
            if changed {
                let slice = Duration::from_secs_f64(account.current() / 1e3);
                commands.push(Command::Slice(id, slice));
            }
        }
    }

    fn stop_and_start(&mut self, owed: &[ClientId], now: Moment, commands: &mut Vec<Command>) {
        let stopped = |account: &Account| account.stopped.is_some() && !account.is_held;
        let one_is_stopped = self.accounts.values().any(stopped);
        let debts = self.debts();
        let before = commands.len();
        let mut tells = false;
        for (&id, account) in self.accounts.iter_mut().filter(|(_, one)| !one.is_held) {
            let other_is_owed = owed.iter().any(|other| *other != id);
            if let Some(since) = account.stopped {
                let stopped = now.since(since);
                let ended = !account.confirmed && stopped >= UNCONFIRMED;
                let over = account.confirmed && stopped + PERIOD / 2 >= account.stop;
                let paid = account.credit >= -LEVEL || !account.works || !other_is_owed;
                if paid || ended || over {
                    account.stopped = None;
                    account.started = Some(now);
                    account.completes = true;
                    tells |= stopped >= TELLING;
                    commands.push(Command::Start(id));
                }
            } else if account.works
                && account.credit < -debts.overdrawn
                && account.slice <= LEAST * NEAR_LEAST
                && other_is_owed
                && now >= self.unstopped
                && (account.started).is_none_or(|start| now.since(start) >= BETWEEN_STOPS)
            {
                account.stopped = Some(now);
                account.confirmed = false;
                account.stop = debts.stop(account);
                commands.push(Command::Stop(id));
            }
        }
        let stops = |command: &Command| matches!(command, Command::Stop(_));
        let stops = commands[before..].iter().any(stops);
        for (id, account) in &mut self.accounts {
            if tells && owed.contains(id) && !account.completes {
                (account.waits, account.credit) = (true, account.credit.min(0.0));
            }
            if stops && !one_is_stopped {
                // A client that is owed nothing is not judged by this stop.
                account.completes = !owed.contains(id);
            }
        }
    }

    fn correct(&mut self, now: Moment, commands: &mut Vec<Command>) {
        let active = |account: &Account| account.due_before > 0.0 || account.used_before > 0.0;
        let wanted = || self.accounts.values().filter(|account| active(account));
        let sum: f64 = wanted().map(Account::wanted).sum();
        let mut scale = CYCLE * wanted().count() as f64 / sum;
        let overdrawn = self.debts().overdrawn;
        for account in self.accounts.values() {
            if let Class::Latency(longest) = account.class
                && account.is_expected(now)
                && account.credit >= -overdrawn
            {
                let own = if active(account) {
                    account.wanted()
                } else {
                    0.0
                };
                scale = scale.min(millis(longest) / (sum - own).max(LEAST));
            }
        }
        for (&id, account) in &mut self.accounts {
            if active(account) {
                let slice = (account.wanted() * scale).clamp(LEAST, LONGEST_SLICE);
                if (slice - account.slice).abs() > WORTH * account.slice {
                    account.slice = slice;
                    if account.preferred.is_none() {
                        let slice = Duration::from_secs_f64(slice / 1e3);
                        commands.push(Command::Slice(id, slice));
                    }
                }
            }
            (account.due_before, account.used_before) = (0.0, 0.0);
        }
    }
}

/// Which debts are how large, in milliseconds, among those that take part now.
struct Debts {
    /// The sum of their weights.
    total: f64,
    /// A larger debt has a client stopped.
    overdrawn: f64,
}

impl Debts {
    /// The part of the time that is due to a client.
    fn part(&self, account: &Account) -> f64 {
        weight(account) / self.total
    }

    /// The debt above which it is forgiven.
    fn most(&self, account: &Account) -> f64 {
        let bound = (MOST_DEBT * self.part(account)).max(LEAST_BOUND * self.overdrawn);
        bound.min(MOST_DEBT)
    }

    /// For how long a client with its debt is stopped at most. Its steps wait for so long, so stops are only as long as the
    /// debt's growth requires.
    fn stop(&self, account: &Account) -> Duration {
        let longest = match account.class {
            Class::Latency(longest) => longest.min(LONGEST_STOP),
            _ => LONGEST_STOP,
        };
        let least = (STOPPED_FOR / self.part(account)).min(millis(longest));
        let grown = (-account.credit - self.overdrawn) / (self.most(account) - self.overdrawn);
        let longer = (millis(LONGEST_STOP) - least) * grown.clamp(0.0, 1.0).powi(2);
        Duration::from_secs_f64((least + longer) / 1e3)
    }
}

fn weight(account: &Account) -> f64 {
    f64::from(account.weight.get())
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: ClientId = ClientId(1);
    const OTHER: ClientId = ClientId(2);
    /// Reviews of a settlement.
    const REVIEWS: u32 = 20;

    /// A ledger with two clients of these weights, at its start.
    fn two(weights: [u32; 2]) -> Ledger {
        let mut ledger = Ledger::new(Moment::START);
        for (id, weight) in [ONE, OTHER].into_iter().zip(weights) {
            ledger.join(id, Weight::try_from(weight).unwrap());
        }
        ledger
    }

    /// A client that always has work, and uses this part of the device.
    fn uses(part: f64) -> Report {
        Report {
            present: PERIOD,
            used: PERIOD.mul_f64(part),
            completed: true,
            ..Report::default()
        }
    }

    /// Reviews so often, after these reports each time. Stopped clients report no use, and are stopped. Returns all
    /// commands.
    fn reviews(ledger: &mut Ledger, reports: [Report; 2], count: u32) -> Vec<Command> {
        let mut commands = Vec::new();
        for _ in 0..count {
            for (id, mut report) in [ONE, OTHER].into_iter().zip(reports) {
                if ledger.accounts[&id].stopped.is_some() {
                    (report.used, report.completed) = (Duration::ZERO, false);
                    report.stopped = true;
                }
                ledger.report(id, report);
            }
            commands.extend(ledger.review(ledger.reviewed + PERIOD));
        }
        commands
    }

    fn slice(ledger: &Ledger, id: ClientId) -> f64 {
        ledger.accounts[&id].slice
    }

    fn charged(ledger: &Ledger) -> [f64; 2] {
        [ONE, OTHER].map(|id| ledger.accounts[&id].charged)
    }

    #[test]
    fn nothing_is_done_while_everybody_gets_its_due() {
        let mut ledger = two([1, 1]);
        assert_eq!(reviews(&mut ledger, [uses(0.5); 2], 1000), []);
    }

    #[test]
    fn use_that_is_reported_in_lumps_counts_as_such_that_is_not() {
        let mut ledger = two([1, 3]);
        let mut reported = [0.0; 2];
        for number in 1..=1000 {
            for (index, part) in [0.15, 0.75].into_iter().enumerate() {
                // Every 20 ms, and by the other one every 12 ms.
                reported[index] += part;
                let due = number % [20, 12][index] == 0;
                let lump = if due {
                    std::mem::take(&mut reported[index])
                } else {
                    0.0
                };
                ledger.report([ONE, OTHER][index], uses(lump));
            }
            ledger.review(ledger.reviewed + PERIOD);
        }
        let [one, other] = charged(&ledger);
        // A tenth is switching, which is charged by weight.
        let expected = [0.15 + 0.1 / 4.0, 0.75 + 0.3 / 4.0];
        for (charged, expected) in [one, other].into_iter().zip(expected) {
            let part = charged / 1000.0 / millis(PERIOD);
            assert!((part - expected).abs() < 0.01, "{one} {other}");
        }
    }

    #[test]
    fn slices_follow_the_ratio_of_due_and_use() {
        let mut ledger = two([1, 3]);
        let commands = reviews(&mut ledger, [uses(0.5); 2], REVIEWS * CORRECTION);
        let slices = [ONE, OTHER].map(|id| slice(&ledger, id));
        assert!(slices[0] < 1.6 && slices[1] > 2.4, "{slices:?}");
        assert!((slices[0] + slices[1] - 2.0 * CYCLE).abs() < 0.01);
        assert!(matches!(
            commands[..],
            [Command::Slice(ONE, _), Command::Slice(OTHER, _)]
        ));
    }

    /// Reviews until the first client is to be stopped.
    fn stop_one(ledger: &mut Ledger, reports: [Report; 2]) {
        while ledger.accounts[&ONE].stopped.is_none() {
            assert!(ledger.reviewed < Moment::START + PERIOD * 1000);
            reviews(ledger, reports, 1);
        }
    }

    #[test]
    fn who_overdraws_with_the_least_slice_is_stopped_until_level() {
        let mut ledger = two([1, 3]);
        stop_one(&mut ledger, [uses(0.5); 2]);
        assert!(slice(&ledger, ONE) <= LEAST * NEAR_LEAST);
        // A quarter of the time is its.
        let paid = millis(PERIOD) / 4.0;
        ledger.accounts.get_mut(&ONE).unwrap().credit = -LEVEL - 0.9 * paid;
        let commands = reviews(&mut ledger, [uses(0.0), uses(1.0)], 1);
        assert_eq!(commands, [Command::Start(ONE)]);
    }

    #[test]
    fn nobody_is_stopped_while_it_has_no_work() {
        let mut ledger = two([1, 3]);
        stop_one(&mut ledger, [uses(0.5); 2]);
        let idle = [Report::default(), uses(0.5)];
        let commands = reviews(&mut ledger, idle, 1);
        assert_eq!(commands, [Command::Start(ONE)]);
        ledger.accounts.get_mut(&ONE).unwrap().credit = -MOST_DEBT;
        let third = ClientId(3);
        ledger.join(third, Weight::try_from(3).unwrap());
        for _ in 0..250 {
            // Another one is owed time.
            ledger.report(third, uses(0.2));
            let commands = reviews(&mut ledger, idle, 1);
            assert!(!commands.contains(&Command::Stop(ONE)), "{commands:?}");
        }
    }

    /// Has the first client stopped for so many milliseconds that it owes.
    fn owe(ledger: &mut Ledger, debt: f64) {
        reviews(ledger, [uses(0.5); 2], 1);
        let account = ledger.accounts.get_mut(&ONE).unwrap();
        (account.slice, account.credit) = (LEAST, -debt);
        ledger.accounts.get_mut(&OTHER).unwrap().credit = debt;
        let commands = reviews(ledger, [uses(0.5); 2], 1);
        assert_eq!(commands, [Command::Stop(ONE)]);
    }

    #[test]
    fn a_stop_is_as_short_as_the_debt_allows() {
        // A quarter of the time is its due. Stops end with the nearest review.
        for (debt, most) in [(2.5, 4.0), (4.0, 6.0), (8.0, 17.0), (15.0, 60.0)] {
            let mut ledger = two([1, 3]);
            owe(&mut ledger, debt);
            ledger.accounts.get_mut(&ONE).unwrap().credit = -MOST_DEBT;
            let begin = ledger.reviewed;
            while ledger.accounts[&ONE].stopped.is_some() {
                reviews(&mut ledger, [uses(0.0), uses(0.9)], 1);
            }
            let most = Duration::from_secs_f64(most / 1e3);
            assert_eq!(ledger.reviewed.since(begin), most);
        }
    }

    #[test]
    fn the_first_stop_of_a_client_with_latency_is_no_longer_than_it() {
        let mut ledger = two([1, 3]);
        with_latency(&mut ledger, &[ONE]);
        owe(&mut ledger, 2.1);
        let begin = ledger.reviewed;
        while ledger.accounts[&ONE].stopped.is_some() {
            reviews(&mut ledger, [uses(0.0), uses(0.9)], 1);
        }
        assert_eq!(ledger.reviewed.since(begin), Duration::from_millis(2));
    }

    #[test]
    fn a_client_that_is_away_pays_its_debt_and_saves_a_bounded_credit() {
        let mut ledger = two([1, 3]);
        reviews(&mut ledger, [uses(0.5); 2], 1);
        ledger.accounts.get_mut(&ONE).unwrap().credit = -10.0;
        let away = [Report::default(), uses(1.0)];
        // A quarter of the time is its.
        reviews(&mut ledger, away, 60);
        let credit = ledger.accounts[&ONE].credit;
        assert!((credit - 5.0).abs() < 1.0, "{credit}");
        reviews(&mut ledger, away, 400);
        assert!((ledger.accounts[&ONE].credit - SAVED).abs() < 0.01);
        // The other one had it alone, and owes nothing.
        assert!(ledger.accounts[&OTHER].credit.abs() < 1.0);
        // A client that was never here, or long ago, saves nothing.
        let third = ClientId(3);
        ledger.join(third, Weight::ONE);
        reviews(&mut ledger, away, 600);
        assert!(ledger.accounts[&third].credit.abs() < 0.01);
        ledger.accounts.get_mut(&ONE).unwrap().credit = 0.0;
        reviews(&mut ledger, away, 400);
        assert!(ledger.accounts[&ONE].credit.abs() < 0.01);
    }

    #[test]
    fn rare_reviews_settle_as_often_as_time_says() {
        let mut ledger = two([1, 1]);
        let report = |part: f64| Report {
            present: PERIOD * 20,
            used: (PERIOD * 20).mul_f64(part),
            completed: true,
            ..Report::default()
        };
        // One is alone, with pauses, and reviews are far apart.
        for _ in 0..19 {
            ledger.report(ONE, report(0.5));
            ledger.review(ledger.reviewed + PERIOD * 20);
        }
        ledger.report(ONE, report(0.5));
        ledger.report(OTHER, report(0.5));
        ledger.review(ledger.reviewed + PERIOD * 20);
        let credit = ledger.accounts[&ONE].credit;
        assert!(credit.abs() < 1.0, "{credit}");
    }

    #[test]
    fn a_client_that_comes_during_a_stop_of_others_keeps_its_credit() {
        for seldom in [false, true] {
            let mut ledger = two([1, 3]);
            owe(&mut ledger, 2.5);
            let third = ClientId(3);
            ledger.join(third, Weight::ONE);
            ledger.accounts.get_mut(&third).unwrap().credit = 10.0;
            while ledger.accounts[&ONE].stopped.is_some() {
                // It has work, and completes nothing; it was not there when the stop began, or the other one has been stopped for
                // too short a time.
                ledger.report(
                    third,
                    Report {
                        completed: false,
                        ..uses(0.0)
                    },
                );
                if seldom {
                    ledger.accounts.get_mut(&ONE).unwrap().stop = PERIOD;
                    ledger.accounts.get_mut(&third).unwrap().completes = false;
                }
                reviews(&mut ledger, [uses(0.0), uses(0.9)], 1);
            }
            assert!(ledger.accounts[&third].credit > 10.0);
        }
    }

    #[test]
    fn a_late_stop_is_one_all_the_same() {
        let mut ledger = two([1, 1]);
        owe(&mut ledger, 5.0);
        // Two reviews pass until the driver has taken it off the device.
        for stopped in [false, false, true] {
            for id in [ONE, OTHER] {
                let report = Report {
                    stopped: stopped && id == ONE,
                    ..uses(0.5)
                };
                ledger.report(id, report);
            }
            ledger.review(ledger.reviewed + PERIOD);
            assert_eq!(ledger.is_stopped(ONE), !stopped);
        }
    }

    #[test]
    fn costly_stops_keep_weights_too() {
        // As of kernels that fill the device, in many processes, whose slices add up.
        for (weights, took) in [([1, 1], 0.5), ([1, 1], 3.0), ([1, 3], 1.0)] {
            let mut ledger = two(weights);
            // Others have been here before.
            for gone in 3..40 {
                ledger.join(ClientId(gone), Weight::ONE);
            }
            for _ in 0..5000 {
                let was = ledger.is_stopped(ONE);
                let mut one = if was { uses(0.0) } else { uses(0.8) };
                (one.stopped, one.completed) = (was, !was);
                one.switching =
                    Duration::from_secs_f64(took / 1e3).mul_f64(f64::from(u8::from(was)));
                ledger.report(ONE, one);
                ledger.report(OTHER, if was { uses(1.0) } else { uses(0.2) });
                ledger.review(ledger.reviewed + PERIOD);
            }
            let [one, other] = charged(&ledger);
            let (part, due) = (
                one / (one + other),
                1.0 / f64::from(weights[0] + weights[1]),
            );
            assert!(part < due + 0.04, "{weights:?}, {took} ms: {part:.3}");
        }
    }

    #[test]
    fn the_stopped_is_started_when_the_owed_leaves() {
        let mut ledger = two([1, 3]);
        stop_one(&mut ledger, [uses(0.5); 2]);
        ledger.leave(OTHER);
        let commands = ledger.review(ledger.reviewed + PERIOD);
        assert_eq!(commands.first(), Some(&Command::Start(ONE)));
    }

    #[test]
    fn no_stop_is_longer_than_the_longest_whatever_the_weights() {
        let mut ledger = two([1, 10_000]);
        stop_one(&mut ledger, [uses(0.9), uses(0.1)]);
        let most = LONGEST_STOP.as_nanos().div_ceil(PERIOD.as_nanos()) as u32;
        let reports = [uses(0.9), uses(0.1)];
        let commands = reviews(&mut ledger, reports, most + 1);
        assert!(commands.contains(&Command::Start(ONE)), "{commands:?}");
        // It runs for a while before it is stopped again.
        assert_eq!(commands.last(), Some(&Command::Start(ONE)));
    }

    #[test]
    fn nobody_is_stopped_for_who_completes_nothing() {
        for weights in [[1, 1], [1, 3], [1, 100]] {
            let mut ledger = two(weights);
            let blocked = Report {
                long: true,
                completed: false,
                ..uses(0.0)
            };
            let mut stopped = 0;
            let reviews_made = 2500;
            for _ in 0..reviews_made {
                reviews(&mut ledger, [uses(0.9), blocked], 1);
                stopped += u32::from(ledger.accounts[&ONE].stopped.is_some());
            }
            // Once, until that is known.
            assert!(
                PERIOD * stopped <= LONGEST_STOP + PERIOD,
                "{weights:?}: {stopped}"
            );
            // As soon as it completes something, it is owed again.
            while ledger.accounts[&ONE].stopped.is_none() {
                reviews(&mut ledger, [uses(0.9), uses(0.05)], 1);
            }
        }
    }

    #[test]
    fn who_hides_its_use_pays_nevertheless() {
        let mut ledger = two([1, 1]);
        // Each has half of the device in fact.
        reviews(&mut ledger, [uses(0.5), uses(0.0)], 250);
        let [one, other] = charged(&ledger);
        assert!(other > 0.5 * one, "{one} {other}");
    }

    #[test]
    fn what_nobody_measures_is_the_use_of_a_long_kernel() {
        let mut ledger = two([1, 1]);
        let endless = Report {
            present: PERIOD,
            long: true,
            ..Report::default()
        };
        reviews(&mut ledger, [uses(0.3), endless], REVIEWS);
        let before = charged(&ledger);
        reviews(&mut ledger, [uses(0.3), endless], REVIEWS);
        let after = charged(&ledger);
        let switching = 20.0 * SWITCHING / 2.0;
        let expected = [6.0 + switching, 14.0 - switching];
        for (index, expected) in expected.into_iter().enumerate() {
            let charged = after[index] - before[index];
            assert!((charged - expected).abs() < 0.01, "{before:?} {after:?}");
        }
    }

    #[test]
    fn the_stopped_does_not_pay_for_what_nobody_uses_meanwhile() {
        let mut ledger = two([1, 3]);
        let long = Report {
            used: Duration::ZERO,
            long: true,
            ..uses(0.0)
        };
        stop_one(&mut ledger, [long, uses(0.2)]);
        reviews(&mut ledger, [long, uses(0.2)], 1);
        ledger.settle();
        let before = charged(&ledger);
        let mut stopped = 0;
        while ledger.accounts[&ONE].stopped.is_some() {
            reviews(&mut ledger, [long, uses(0.2)], 1);
            stopped += 1;
        }
        ledger.settle();
        let one = charged(&ledger)[0] - before[0];
        // Nothing but its part of the usual pauses, and of what was not settled before.
        let most = f64::from(stopped) * millis(PERIOD) * PAUSES / 4.0 + GRANULARITY / 4.0;
        assert!(one <= most + 0.01, "{one} {most}");
    }

    #[test]
    fn a_stop_that_is_not_confirmed_counts_as_ended() {
        let mut ledger = two([1, 100]);
        stop_one(&mut ledger, [uses(0.5); 2]);
        let mut passed = 0;
        while ledger.accounts[&ONE].stopped.is_some() {
            for id in [ONE, OTHER] {
                ledger.report(id, uses(0.5));
            }
            ledger.review(ledger.reviewed + PERIOD);
            passed += 1;
        }
        assert_eq!(PERIOD * passed, UNCONFIRMED);
    }

    #[test]
    fn stops_take_a_bounded_part_of_the_time() {
        let mut ledger = two([1, 3]);
        let slow = Report {
            // As of a worker that lies, or was frozen.
            switching: Duration::MAX,
            ..uses(0.5)
        };
        reviews(&mut ledger, [slow, uses(0.5)], 1);
        let until = LONGEST_SWITCH * STOPPING;
        let count = (until.as_nanos() / PERIOD.as_nanos()) as u32;
        let commands = reviews(&mut ledger, [uses(0.5); 2], count - 2);
        assert!(!commands.contains(&Command::Stop(ONE)), "{commands:?}");
        let commands = reviews(&mut ledger, [uses(0.5); 2], 100);
        assert!(commands.contains(&Command::Stop(ONE)), "{commands:?}");
    }

    fn with_latency(ledger: &mut Ledger, ids: &[ClientId]) {
        for id in ids {
            ledger.set_class(*id, Class::Latency(Duration::from_millis(2)));
        }
    }

    #[test]
    fn who_overdraws_is_stopped_whatever_its_latency() {
        let mut ledger = two([1, 3]);
        with_latency(&mut ledger, &[ONE]);
        let commands = reviews(&mut ledger, [uses(0.7), uses(0.35)], 500);
        assert!(
            commands.contains(&Command::Stop(ONE)),
            "it takes more than its part"
        );
        assert!(!commands.contains(&Command::Stop(OTHER)));
    }

    #[test]
    fn who_is_preferred_does_not_delay_another_one_with_a_latency() {
        let mut ledger = two([1, 1]);
        let third = ClientId(3);
        ledger.join(third, Weight::ONE);
        with_latency(&mut ledger, &[ONE, OTHER]);
        let mut preferred = false;
        for number in 0..1000 {
            ledger.report(third, uses(0.4));
            // The other one is away for half a second, and earns all the same.
            let other = if number % 250 < 125 {
                Report::default()
            } else {
                uses(0.3)
            };
            reviews(&mut ledger, [uses(0.3), other], 1);
            preferred |= ledger.accounts[&OTHER].preferred.is_some();
            let slice = ledger.slice(OTHER).unwrap();
            // Slices were the driver's at first.
            assert!(
                number < 20 || slice <= Duration::from_micros(2100),
                "{slice:?}"
            );
        }
        assert!(preferred);
    }

    #[test]
    fn who_is_seen_by_the_record_alone_keeps_idle_clients_off_for_longer_and_longer() {
        let mut ledger = two([1, 1]);
        ledger.set_class(ONE, Class::Idle);
        let mut ran = 0;
        let (mut since, mut held) = (0, false);
        for _ in 0..15_000 {
            let now_held = ledger.is_stopped(ONE);
            since = if now_held == held { since + 1 } else { 0 };
            held = now_held;
            ran += u32::from(!held);
            // After 100 ms alone, it seems to have no work; 60 ms after another one has come, it is seen again.
            let is_seen = if held { since < 25 } else { since > 15 };
            let recorded = true;
            let other = match is_seen {
                true => Report {
                    recorded,
                    ..uses(0.5)
                },
                false => Report {
                    recorded,
                    ..Report::default()
                },
            };
            reviews(&mut ledger, [uses(0.5), other], 1);
        }
        // In a minute.
        assert!(ran < 300, "{ran} of 15,000");
        // It leaves.
        ledger.leave(OTHER);
        reviews_of_one(&mut ledger, 2100);
        assert!(!ledger.is_stopped(ONE));
    }

    /// Reviews with reports of the first client alone.
    fn reviews_of_one(ledger: &mut Ledger, count: u32) {
        for _ in 0..count {
            let stopped = ledger.is_stopped(ONE);
            ledger.report(
                ONE,
                Report {
                    stopped,
                    ..uses(0.0)
                },
            );
            ledger.review(ledger.reviewed + PERIOD);
        }
    }

    #[test]
    fn who_gets_nothing_is_delayed_by_who_uses_the_device() {
        let mut ledger = two([1, 1]);
        reviews(&mut ledger, [uses(0.0), uses(1.0)], 40);
        let delay = |count| Delay {
            by: OTHER,
            time: PERIOD * count,
        };
        // It goes on.
        assert_eq!(ledger.take_delay(ONE), Some(delay(40)));
        reviews(&mut ledger, [uses(0.0), uses(1.0)], 1);
        reviews(&mut ledger, [uses(0.5), uses(0.5)], 1);
        assert_eq!(ledger.take_delay(ONE), Some(delay(41)));
        assert_eq!(ledger.take_delay(OTHER), None);
        // It has no work.
        let idle = [Report::default(), uses(1.0)];
        reviews(&mut ledger, idle, 40);
        reviews(&mut ledger, [uses(0.5), uses(0.5)], 1);
        assert_eq!(ledger.take_delay(ONE), None);
    }

    #[test]
    fn who_is_alone_neither_owes_nor_is_owed() {
        let mut ledger = two([1, 1]);
        reviews(&mut ledger, [uses(0.5), Report::default()], 100);
        let credit = ledger.accounts[&ONE].credit;
        assert!(credit.abs() < 0.01, "{credit}");
        let [one, _] = charged(&ledger);
        assert!((one - 50.0 * millis(PERIOD)).abs() < 1.0, "{one}");
    }

    #[test]
    fn credit_and_debt_are_bounded_whatever_is_reported() {
        let mut ledger = two([1, 1]);
        for _ in 0..1000 {
            ledger.report(
                ONE,
                Report {
                    present: Duration::MAX,
                    used: Duration::MAX,
                    ..Report::default()
                },
            );
            ledger.report(OTHER, uses(0.0));
            ledger.review(ledger.reviewed + PERIOD);
        }
        for account in ledger.accounts.values() {
            assert!((-MOST_DEBT..=MOST_CREDIT).contains(&account.credit));
            assert!((LEAST..=LONGEST_SLICE).contains(&account.slice));
            assert!(account.charged.is_finite());
        }
    }
}
