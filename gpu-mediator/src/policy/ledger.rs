//! Corrects the time slices of a device that serves its clients in turn by itself, so that each gets what it is due.
//!
//! The device preempts kernels and serves all clients that have work, each for its slice. Slices alone do not hold
//! weights: a client whose kernel fits into its slice gives the rest of it away, and one that waits for its results is
//! often away when its slice comes. The ledger therefore compares what each client is due with what it has used, and
//! changes the slices:
//!
//! - Due: while several clients have work, time is divided among them by weight. A client that waits for its results
//!   and is usually back within half a millisecond counts as having work meanwhile; otherwise waiting would cost it
//!   its share.
//! - Credit: what it was due, less what it has used, within bounds, so that neither a debt nor a claim lasts.
//! - Every 40 ms, slices follow the ratio of due and use, and the credit. Their sum stays about 2 ms per client, which
//!   bounds how long each waits.
//! - A client that overdraws with the least slice is stopped until it is level, while another one is owed time.
//!
//! What is not handled yet: an owed client that has work, but cannot use the device (it waits for a word or a function of
//! its program), keeps others stopped, so that the device idles. A debt is in time of the device: 80 ms of it at weights of
//! 1 to 99 are a stop of up to eight seconds. A stop that ended by itself is not known here. Nothing but the simulator uses this.
//!
//! Each command costs a call of the driver that takes its locks. Slices that are nearly right are therefore left alone.

use std::{collections::BTreeMap, time::Duration};

use super::{ClientId, Weight};
use crate::{Expected, Moment};

/// How often the caller asks for commands ([`Ledger::review`]).
pub const PERIOD: Duration = Duration::from_millis(4);
/// The slice of a client that has just joined: the driver's own.
pub const FIRST_SLICE: Duration = Duration::from_micros(2048);

/// Slices are corrected once in so many reviews.
const CORRECTION: u32 = 10;
/// The shortest slice, in milliseconds: with shorter ones, switching costs too much.
const LEAST_SLICE: f64 = 0.5;
/// The longest slice, in milliseconds.
const LONGEST_SLICE: f64 = 30.0;
/// The sum of all slices, in milliseconds per client that has used or was due something.
const CYCLE: f64 = 2.0;
/// A client that is usually back within this time counts as having work.
const PRESENT: Duration = Duration::from_micros(500);
/// Bounds of a credit, in milliseconds.
const MOST_CREDIT: f64 = 40.0;
const MOST_DEBT: f64 = 80.0;
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
/// A client with a larger debt, in milliseconds, is stopped if its slice is the least one.
const OVERDRAWN: f64 = 6.0;
/// A slice counts as the least one up to this multiple of it.
const NEAR_LEAST: f64 = 1.5;
/// Debts and credits up to this many milliseconds count as none.
const LEVEL: f64 = 1.0;

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

/// Whether a client counts as having work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    Has,
    /// It has none, and is expected back at this time at the latest.
    ExpectedBy(Moment),
    None,
}

/// Times are in milliseconds.
#[derive(Debug)]
struct Account {
    weight: Weight,
    work: Work,
    slice: f64,
    stopped: bool,
    credit: f64,
    /// Since the last review.
    due: f64,
    used: f64,
    /// Since the last correction.
    due_before: f64,
    used_before: f64,
}

impl Account {
    fn counts(&self, at: Moment) -> bool {
        match self.work {
            Work::Has => true,
            Work::ExpectedBy(end) => end > at,
            Work::None => false,
        }
    }

    /// Whether it has work that the device does not do fast enough.
    fn is_owed(&self) -> bool {
        self.credit > LEVEL && self.work == Work::Has && !self.stopped
    }

    /// The slice that would suit it, whatever those of others.
    fn wanted(&self) -> f64 {
        let ratio = (self.due_before + GRAIN) / (self.used_before + GRAIN);
        let credit = (self.credit / CREDIT_SCALE).clamp(-CREDIT_EFFECT, CREDIT_EFFECT);
        let step = (ratio.powf(GAIN) * (1.0 + credit)).clamp(SMALLEST_STEP, LARGEST_STEP);
        (self.slice * step).clamp(LEAST_SLICE, LONGEST_SLICE)
    }
}

/// The accounts of a device's clients.
#[derive(Debug)]
pub struct Ledger {
    accounts: BTreeMap<ClientId, Account>,
    /// Until when dues are distributed.
    until: Moment,
    reviews: u32,
}

impl Ledger {
    /// Creates a ledger without clients.
    pub fn new(now: Moment) -> Self {
        Self {
            accounts: BTreeMap::new(),
            until: now,
            reviews: 0,
        }
    }

    /// Adds a client that has no work yet. Its slice is [`FIRST_SLICE`].
    pub fn join(&mut self, client: ClientId, weight: Weight, now: Moment) {
        self.distribute(now);
        let account = Account {
            weight,
            work: Work::None,
            slice: millis(FIRST_SLICE),
            stopped: false,
            credit: 0.0,
            due: 0.0,
            used: 0.0,
            due_before: 0.0,
            used_before: 0.0,
        };
        self.accounts.insert(client, account);
    }

    /// Removes a client. If it was stopped, the caller starts it.
    pub fn leave(&mut self, client: ClientId, now: Moment) {
        self.distribute(now);
        self.accounts.remove(&client);
    }

    /// The client has work from now on.
    pub fn works(&mut self, client: ClientId, now: Moment) {
        self.change(client, Work::Has, now);
    }

    /// The client has finished all of its work, and is expected to continue as its pauses up to now tell.
    pub fn rests(&mut self, client: ClientId, expected: Expected, now: Moment) {
        let work = match expected.within {
            Duration::ZERO => Work::None,
            within if expected.usual <= PRESENT => Work::ExpectedBy(now + within),
            _ => Work::None,
        };
        self.change(client, work, now);
    }

    fn change(&mut self, client: ClientId, work: Work, now: Moment) {
        self.distribute(now);
        if let Some(account) = self.accounts.get_mut(&client) {
            account.work = work;
        }
    }

    /// The client has used the device for this time since the last report, whichever: credit and slices have bounds.
    pub fn used(&mut self, client: ClientId, time: Duration) {
        if let Some(account) = self.accounts.get_mut(&client) {
            account.used += millis(time);
        }
    }

    /// Divides the time that has passed among those who had work in it.
    fn distribute(&mut self, now: Moment) {
        // Each round but the last passes the time at which a client no longer counts.
        while self.until < now {
            let from = self.until;
            let ends = self.accounts.values().filter_map(|account| {
                let Work::ExpectedBy(end) = account.work else {
                    return None;
                };
                (end > from).then_some(end)
            });
            self.until = ends.min().unwrap_or(now).min(now);
            let time = millis(self.until.since(from));
            let present = || {
                self.accounts
                    .values()
                    .filter(|account| account.counts(from))
            };
            let total: f64 = present().map(weight).sum();
            let counts = self.accounts.values_mut();
            for account in counts.filter(|account| account.counts(from)) {
                account.due += time * weight(account) / total;
            }
        }
    }

    /// Reviews all accounts. Returns what is to be done, in this order.
    pub fn review(&mut self, now: Moment) -> Vec<Command> {
        self.distribute(now);
        for account in self.accounts.values_mut() {
            let (due, used) = (account.due, account.used);
            (account.due, account.used) = (0.0, 0.0);
            account.due_before += due;
            account.used_before += used;
            account.credit = (account.credit + due - used).clamp(-MOST_DEBT, MOST_CREDIT);
        }
        let mut commands = Vec::new();
        self.stop_and_start(&mut commands);
        self.reviews += 1;
        if self.reviews == CORRECTION {
            self.reviews = 0;
            self.correct(&mut commands);
        }
        commands
    }

    fn stop_and_start(&mut self, commands: &mut Vec<Command>) {
        let owed: Vec<ClientId> = self
            .accounts
            .iter()
            .filter_map(|(id, account)| account.is_owed().then_some(*id))
            .collect();
        for (&id, account) in &mut self.accounts {
            let other_is_owed = owed.iter().any(|other| *other != id);
            if account.stopped {
                if account.credit >= -LEVEL || !other_is_owed {
                    account.stopped = false;
                    commands.push(Command::Start(id));
                }
            } else if account.credit < -OVERDRAWN
                && account.slice <= LEAST_SLICE * NEAR_LEAST
                && other_is_owed
            {
                account.stopped = true;
                commands.push(Command::Stop(id));
            }
        }
    }

    fn correct(&mut self, commands: &mut Vec<Command>) {
        let active = |account: &Account| account.due_before > 0.0 || account.used_before > 0.0;
        let wanted = || self.accounts.values().filter(|account| active(account));
        let sum: f64 = wanted().map(Account::wanted).sum();
        let scale = CYCLE * wanted().count() as f64 / sum;
        for (&id, account) in &mut self.accounts {
            if active(account) {
                let slice = (account.wanted() * scale).clamp(LEAST_SLICE, LONGEST_SLICE);
                if (slice - account.slice).abs() > WORTH * account.slice {
                    account.slice = slice;
                    let slice = Duration::from_secs_f64(slice / 1e3);
                    commands.push(Command::Slice(id, slice));
                }
            }
            (account.due_before, account.used_before) = (0.0, 0.0);
        }
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

    /// A ledger with two clients of these weights that have work, at its start.
    fn two(weights: [u32; 2]) -> Ledger {
        let mut ledger = Ledger::new(Moment::START);
        for (id, weight) in [ONE, OTHER].into_iter().zip(weights) {
            ledger.join(id, Weight::try_from(weight).unwrap(), Moment::START);
            ledger.works(id, Moment::START);
        }
        ledger
    }

    /// Reviews so often, while each uses this part of the device. Returns all commands.
    fn reviews(ledger: &mut Ledger, parts: [f64; 2], count: u32) -> Vec<Command> {
        let mut commands = Vec::new();
        for _ in 0..count {
            for (id, part) in [ONE, OTHER].into_iter().zip(parts) {
                ledger.used(id, PERIOD.mul_f64(part));
            }
            commands.extend(ledger.review(ledger.until + PERIOD));
        }
        commands
    }

    fn slice(ledger: &Ledger, id: ClientId) -> f64 {
        ledger.accounts[&id].slice
    }

    #[test]
    fn nothing_is_done_while_everybody_gets_its_due() {
        let mut ledger = two([1, 1]);
        assert_eq!(reviews(&mut ledger, [0.5, 0.5], 1000), []);
    }

    #[test]
    fn slices_follow_the_ratio_of_due_and_use() {
        let mut ledger = two([1, 3]);
        let commands = reviews(&mut ledger, [0.5, 0.5], CORRECTION);
        let slices = [ONE, OTHER].map(|id| slice(&ledger, id));
        assert!(slices[0] < 1.6 && slices[1] > 2.4, "{slices:?}");
        assert!((slices[0] + slices[1] - 2.0 * CYCLE).abs() < 0.01);
        assert!(matches!(
            commands[..],
            [Command::Slice(ONE, _), Command::Slice(OTHER, _)]
        ));
    }

    #[test]
    fn who_overdraws_with_the_least_slice_is_stopped_until_level() {
        let mut ledger = two([1, 3]);
        let commands = reviews(&mut ledger, [0.5, 0.5], 100);
        let stop = commands
            .iter()
            .position(|command| matches!(command, Command::Stop(_)));
        assert_eq!(commands[stop.unwrap()], Command::Stop(ONE));
        assert!(slice(&ledger, ONE) <= LEAST_SLICE * NEAR_LEAST);
        // Stopped, it uses nothing.
        let commands = reviews(&mut ledger, [0.0, 1.0], 100);
        assert!(commands.contains(&Command::Start(ONE)), "{commands:?}");
    }

    #[test]
    fn the_stopped_is_started_when_the_owed_leaves() {
        let mut ledger = two([1, 3]);
        let commands = reviews(&mut ledger, [0.5, 0.5], 100);
        let last = commands
            .iter()
            .rfind(|command| !matches!(command, Command::Slice(..)));
        assert_eq!(last, Some(&Command::Stop(ONE)));
        ledger.leave(OTHER, ledger.until);
        let commands = ledger.review(ledger.until + PERIOD);
        assert_eq!(commands.first(), Some(&Command::Start(ONE)));
    }

    #[test]
    fn a_short_usual_pause_counts_as_work_until_it_is_late() {
        let expected = |usual, within| Expected {
            within: Duration::from_micros(within),
            usual: Duration::from_micros(usual),
            batch: Duration::ZERO,
        };
        for (expected, due) in [
            (expected(200, 1000), 0.5),
            (expected(501, 1000), 0.0),
            // Not expected at all.
            (expected(0, 0), 0.0),
        ] {
            let mut ledger = two([1, 1]);
            ledger.rests(ONE, expected, Moment::START);
            ledger.distribute(Moment::START + Duration::from_millis(10));
            assert!((ledger.accounts[&ONE].due - due).abs() < 1e-9);
            assert!((ledger.accounts[&OTHER].due - (10.0 - due)).abs() < 1e-9);
        }
    }

    #[test]
    fn credit_and_debt_are_bounded_whatever_is_reported() {
        let mut ledger = two([1, 1]);
        for _ in 0..100 {
            ledger.used(ONE, Duration::MAX);
            ledger.review(ledger.until + PERIOD);
        }
        assert_eq!(ledger.accounts[&ONE].credit, -MOST_DEBT);
        assert_eq!(ledger.accounts[&OTHER].credit, MOST_CREDIT);
        let slices = [ONE, OTHER].map(|id| slice(&ledger, id));
        assert!(
            slices[0] == LEAST_SLICE && slices[1] < 2.0 * CYCLE,
            "{slices:?}"
        );
    }
}
