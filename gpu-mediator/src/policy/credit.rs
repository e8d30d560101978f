//! Xen's credit scheduler for one device.
//!
//! Every 30 ms, 30 ms of credit are distributed by weight to the active clients; using the device
//! consumes it. Clients with credit go before those without, and clients that wake up with credit
//! go before both. Within a priority, clients are served round-robin. Credit and debt are limited
//! to 30 ms: a client that uses more at once, as with a kernel that cannot be interrupted, is
//! forgiven the rest. This is the cause of its unfairness between short and long kernels.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use super::{ClientId, Comes, Next, Policy, Rank, Weight, periods_over};
use crate::{Moment, Slice};

/// Interval at which credit is given out, limit of a client's credit and debt, and length of a
/// turn.
const PERIOD: Duration = Duration::from_millis(30);
const LIMIT: i64 = PERIOD.as_nanos() as i64;
/// A remainder of a turn that is shorter than this is not continued.
const SHORTEST: Duration = Duration::from_millis(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Priority {
    /// Woke up with credit.
    Boost,
    /// Has credit.
    Under,
    /// Has no credit.
    Over,
}

#[derive(Debug)]
struct Client {
    weight: Weight,
    /// Nanoseconds of device time.
    credit: i64,
    boost: bool,
    /// The unused rest of its last turn.
    left: Duration,
    /// Whether it participates: from its first want on, until it has saved too much.
    active: bool,
}

impl Client {
    /// Whether enough of its turn is left to continue it.
    fn goes_on(&self) -> bool {
        self.left >= SHORTEST
    }

    fn priority(&self) -> Priority {
        match self.credit {
            ..0 => Priority::Over,
            _ if self.boost => Priority::Boost,
            _ => Priority::Under,
        }
    }
}

/// Xen's credit scheduler.
#[derive(Debug, Default)]
pub struct Credit {
    clients: BTreeMap<ClientId, Client>,
    waiting: VecDeque<ClientId>,
    /// The client that had the last turn: it does not wake up, but continues.
    last: Option<ClientId>,
    /// When credit was last given out.
    given: Moment,
}

impl Credit {
    /// Gives out credit for the periods that have passed.
    fn give(&mut self, now: Moment) {
        let periods = periods_over(&mut self.given, PERIOD, now);
        if periods == 0 {
            return;
        }
        let active = self.clients.values().filter(|client| client.active);
        let total: i64 = active.map(|client| i64::from(client.weight.get())).sum();
        for client in self.clients.values_mut().filter(|client| client.active) {
            let part = LIMIT * i64::from(client.weight.get()) / total;
            // More periods than this fill every account.
            let periods = periods.min(u128::from(Weight::LARGEST) * 1000) as i64;
            client.credit = client.credit.saturating_add(part.saturating_mul(periods));
            if client.credit > LIMIT {
                // It does not use what it gets, so others get it.
                client.credit = LIMIT / 2;
                client.active = false;
            }
        }
    }
}

impl Policy for Credit {
    fn join(&mut self, client: ClientId, weight: Weight, now: Moment) {
        self.give(now);
        let new = Client {
            weight,
            credit: 0,
            boost: false,
            left: Duration::ZERO,
            active: false,
        };
        self.clients.insert(client, new);
    }

    fn set_weight(&mut self, client: ClientId, weight: Weight, now: Moment) {
        self.give(now);
        if let Some(client) = self.clients.get_mut(&client) {
            client.weight = weight;
        }
    }

    fn leave(&mut self, client: ClientId, now: Moment) {
        self.give(now);
        self.unwant(client);
        self.clients.remove(&client);
    }

    fn want(&mut self, id: ClientId, comes: Comes, now: Moment) {
        self.give(now);
        let Some(client) = self.clients.get_mut(&id) else {
            return;
        };
        client.active = true;
        client.boost = comes == Comes::Anew && self.last != Some(id);
        if comes == Comes::Back && client.goes_on() {
            self.waiting.push_front(id);
        } else {
            client.left = Duration::ZERO;
            self.waiting.push_back(id);
        }
    }

    /// Within a priority, clients take turns. A client that is away before its turn is over
    /// continues that turn; otherwise it is last.
    fn rank(&self, id: ClientId) -> Rank {
        let priority = |id| self.clients.get(id).map(Client::priority);
        let Some(first) = self.waiting.iter().filter_map(priority).min() else {
            return Rank::First;
        };
        match self.clients.get(&id) {
            Some(client) if client.priority() < first.max(Priority::Under) => Rank::Owed,
            Some(client) if client.priority() <= first && client.goes_on() => Rank::First,
            _ => Rank::Behind,
        }
    }

    fn unwant(&mut self, client: ClientId) {
        self.waiting.retain(|waiting| *waiting != client);
    }

    fn charge(&mut self, client: ClientId, time: Duration, now: Moment) {
        if let Some(client) = self.clients.get_mut(&client) {
            let used = i64::try_from(time.as_nanos()).unwrap_or(i64::MAX);
            client.left = client.left.saturating_sub(time);
            client.credit = client.credit.saturating_sub(used).max(-LIMIT);
        }
        self.give(now);
    }

    fn next(&mut self, now: Moment) -> Next {
        self.give(now);
        let clients = &self.clients;
        let first = self
            .waiting
            .iter()
            .enumerate()
            // Stable: among equals, the one that came first.
            .min_by_key(|(_, id)| clients.get(id).map(Client::priority))
            .map(|(index, _)| index);
        let Some(client) = first.and_then(|index| self.waiting.remove(index)) else {
            self.last = None;
            return Next::Nobody;
        };
        self.last = Some(client);
        let mut turn = PERIOD;
        if let Some(client) = self.clients.get_mut(&client) {
            client.boost = false;
            if !client.goes_on() {
                client.left = PERIOD;
            }
            turn = client.left;
        }
        Next::Turn(client, Slice::Time(turn))
    }
}
