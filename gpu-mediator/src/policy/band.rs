//! Gdev's bandwidth-aware scheduler for devices that cannot be interrupted, as GPUvm uses it.
//!
//! Each client reserves bandwidth in proportion to its weight. Every 30 ms it gets the credit of its reservation, and a
//! request costs the time that it used. The client with the most credit is next. GPUvm adds that the time in which the
//! scheduler leaves the device unused is charged to all clients in equal parts; otherwise, credit that cannot be used
//! accumulates until it decides nothing.
//!
//! There are two departures. Gdev and GPUvm both keep the device free for 500 us if only clients without credit wait,
//! so that a client with credit that submits requests one at a time can ask. That leaves up to a third of a device
//! unused; the scheduler's own anticipation replaces it. And the client that is next keeps the device for as long as it
//! would be next at each request, without giving it back in between.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use super::{ClientId, Comes, Next, Policy, Rank, Weight, periods_over};
use crate::{Moment, Slice};

/// Interval at which credit is given out, and the maximum that a client can save.
const PERIOD: Duration = Duration::from_millis(30);
const LIMIT: i64 = PERIOD.as_nanos() as i64;
/// Maximum number of periods that are made up for at once: they pay for ten seconds of debt.
const PERIODS: u128 = 1 << 20;

#[derive(Debug)]
struct Client {
    weight: Weight,
    /// Nanoseconds of device time.
    credit: i64,
}

/// Gdev's bandwidth-aware scheduler.
#[derive(Debug, Default)]
pub struct Band {
    clients: BTreeMap<ClientId, Client>,
    waiting: VecDeque<ClientId>,
    given: Moment,
}

impl Band {
    fn give(&mut self, now: Moment) {
        let periods = periods_over(&mut self.given, PERIOD, now);
        if periods == 0 {
            return;
        }
        let weights = self.clients.values().map(|client| client.weight.get());
        let total: i64 = weights.map(i64::from).sum();
        for client in self.clients.values_mut() {
            let part = LIMIT * i64::from(client.weight.get()) / total;
            let credit = part.saturating_mul(periods.min(PERIODS) as i64);
            client.credit = client.credit.saturating_add(credit).min(LIMIT);
        }
    }
}

impl Policy for Band {
    fn join(&mut self, client: ClientId, weight: Weight, now: Moment) {
        self.give(now);
        let new = Client { weight, credit: 0 };
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

    fn want(&mut self, id: ClientId, _: Comes, now: Moment) {
        self.give(now);
        if self.clients.contains_key(&id) {
            self.waiting.push_back(id);
        }
    }

    fn rank(&self, id: ClientId) -> Rank {
        let credit = |id| {
            self.clients
                .get(id)
                .map_or(i64::MIN, |client| client.credit)
        };
        let Some(most) = self.waiting.iter().map(credit).max() else {
            return Rank::First;
        };
        match credit(&id).saturating_sub(most) {
            ..=0 => Rank::Behind,
            ahead if ahead < LIMIT / 4 => Rank::First,
            _ => Rank::Owed,
        }
    }

    fn goes_on(&mut self, id: ClientId) -> bool {
        self.rank(id) != Rank::Behind
    }

    fn unwant(&mut self, client: ClientId) {
        self.waiting.retain(|waiting| *waiting != client);
    }

    fn charge(&mut self, client: ClientId, used: Duration, now: Moment) {
        if let Some(client) = self.clients.get_mut(&client) {
            let used = i64::try_from(used.as_nanos()).unwrap_or(i64::MAX);
            client.credit = client.credit.saturating_sub(used);
        }
        self.give(now);
    }

    fn overhead(&mut self, time: Duration) {
        let count = self.clients.len().max(1) as u128;
        let part = i64::try_from(time.as_nanos() / count).unwrap_or(i64::MAX);
        for client in self.clients.values_mut() {
            client.credit = client.credit.saturating_sub(part);
        }
    }

    fn next(&mut self, now: Moment) -> Next {
        self.give(now);
        let credit = |id: &ClientId| self.clients.get(id).map_or(0, |client| client.credit);
        let best = self
            .waiting
            .iter()
            .enumerate()
            // Among equals, the one that came first: `max_by_key` returns the last one.
            .rev()
            .max_by_key(|(_, id)| credit(id))
            .map(|(index, _)| index);
        let Some(client) = best.and_then(|index| self.waiting.remove(index)) else {
            return Next::Nobody;
        };
        let next = self.waiting.iter().map(credit).max();
        let ahead = next.map_or(0, |next| credit(&client).saturating_sub(next));
        let slice = match u64::try_from(ahead.min(LIMIT)) {
            Ok(nanos @ 1..) => Slice::Time(Duration::from_nanos(nanos)),
            _ => Slice::Request,
        };
        Next::Turn(client, slice)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::scheduler::{Dispatch, Scheduler};

    /// Shares a policy between a scheduler and the test.
    #[derive(Clone, Debug, Default)]
    struct Seen(Arc<Mutex<Band>>);

    impl Seen {
        fn credits(&self) -> Vec<i64> {
            let band = self.0.lock().unwrap();
            band.clients.values().map(|client| client.credit).collect()
        }
    }

    impl Policy for Seen {
        fn join(&mut self, client: ClientId, weight: Weight, now: Moment) {
            self.0.lock().unwrap().join(client, weight, now);
        }
        fn set_weight(&mut self, client: ClientId, weight: Weight, now: Moment) {
            self.0.lock().unwrap().set_weight(client, weight, now);
        }
        fn leave(&mut self, client: ClientId, now: Moment) {
            self.0.lock().unwrap().leave(client, now);
        }
        fn want(&mut self, client: ClientId, comes: Comes, now: Moment) {
            self.0.lock().unwrap().want(client, comes, now);
        }
        fn rank(&self, client: ClientId) -> Rank {
            self.0.lock().unwrap().rank(client)
        }
        fn unwant(&mut self, client: ClientId) {
            self.0.lock().unwrap().unwant(client);
        }
        fn charge(&mut self, client: ClientId, used: Duration, now: Moment) {
            self.0.lock().unwrap().charge(client, used, now);
        }
        fn overhead(&mut self, time: Duration) {
            self.0.lock().unwrap().overhead(time);
        }
        fn next(&mut self, now: Moment) -> Next {
            self.0.lock().unwrap().next(now)
        }
    }

    #[test]
    fn time_in_which_the_scheduler_leaves_the_device_free_is_charged_to_all_in_equal_parts() {
        const MILLI: i64 = 1_000_000;
        let millis = |count| Moment::START + Duration::from_millis(count);
        let seen = Seen::default();
        let mut scheduler = Scheduler::new(Box::new(seen.clone()));
        for (id, weight) in [(0, 1), (1, 2), (2, 3)] {
            let weight = Weight::try_from(weight).unwrap();
            scheduler.join(ClientId(id), weight, Moment::START);
        }
        scheduler.want(ClientId(0), millis(30));
        scheduler.want(ClientId(1), millis(30));
        assert_eq!(seen.credits(), [5 * MILLI, 10 * MILLI, 15 * MILLI]);
        let Dispatch::Grant(first) = scheduler.dispatch(millis(30)) else {
            panic!("nobody has the device");
        };
        assert_eq!(first.client, ClientId(1));
        scheduler.charge(Duration::from_millis(4), 0, millis(34));
        scheduler.done(millis(34));
        assert_eq!(seen.credits(), [5 * MILLI, 6 * MILLI, 15 * MILLI]);
        // One client waits, and gets the device 3 ms later.
        assert!(matches!(scheduler.dispatch(millis(37)), Dispatch::Grant(_)));
        assert_eq!(seen.credits(), [4 * MILLI, 5 * MILLI, 14 * MILLI]);
        // While nobody waits, the time is charged to nobody.
        scheduler.charge(Duration::from_millis(1), 0, millis(38));
        scheduler.done(millis(38));
        scheduler.want(ClientId(2), millis(50));
        assert!(matches!(scheduler.dispatch(millis(50)), Dispatch::Grant(_)));
        assert_eq!(seen.credits(), [3 * MILLI, 5 * MILLI, 14 * MILLI]);
    }
}
