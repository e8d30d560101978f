//! FairGV's fair queueing (section 3.2.1), which is start-time fair queueing.
//!
//! Each client has a start tag S. A turn of length L moves it to the finish tag F = S + L / w. The client with the
//! smallest tag is next. A client that wakes up starts at the virtual time, so that it cannot claim what it has left
//! unused.
//!
//! There are three departures from this. First, a client that was only away for a moment between two batches keeps its
//! own tag, though at most a fixed number of turns (`OWED`) before the virtual time. It is owed what others had
//! meanwhile, but a client that uses little for a long time cannot lock others out of the device for long afterwards.
//! Second, a client that wakes up keeps its own tag if that is later than the virtual time. Otherwise, sleeping for a
//! moment after a long kernel would wipe out its debt. Third, once the device has been idle for a turn, all clients
//! start equal, since a debt is owed to those who waited.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use super::{ClientId, Comes, Next, Policy, Rank, Weight};
use crate::{Moment, Slice};

/// Length of a turn on devices that cannot be interrupted: short, since it ends late anyway.
pub const WHOLE: Duration = Duration::from_millis(6);
/// Length of a turn on devices that can be interrupted: long, since interrupting costs time.
pub const PREEMPTIVE: Duration = Duration::from_millis(30);

/// Maximum number of turns that a client is owed if it has only been away for moments.
const OWED: u32 = 20;

/// Device time divided by weight, in nanoseconds / 2^20. Weights have at most 14 bits, so rounding loses less than 2^-6
/// ns. 128 bits hold any time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct VirtualTime(u128);

impl VirtualTime {
    fn after(self, used: Duration, weight: Weight) -> Self {
        Self(self.0 + (used.as_nanos() << 20) / u128::from(weight.get()))
    }

    fn before(self, used: Duration, weight: Weight) -> Self {
        let time = (used.as_nanos() << 20) / u128::from(weight.get());
        Self(self.0.saturating_sub(time))
    }

    /// How much device time a client of this weight uses between `earlier` and this; `None` if `earlier` is later.
    fn since(self, earlier: Self, weight: Weight) -> Option<Duration> {
        let time = self.0.checked_sub(earlier.0)?;
        let nanos = (time >> 20).saturating_mul(u128::from(weight.get()));
        Some(Duration::from_nanos(nanos.try_into().unwrap_or(u64::MAX)))
    }
}

#[derive(Debug)]
struct Client {
    weight: Weight,
    tag: VirtualTime,
    /// Its position among the waiting clients with the same tag, in order of arrival.
    waits: Option<u64>,
}

/// Fair queueing by start tags.
#[derive(Debug)]
pub struct Fair {
    turn: Duration,
    clients: BTreeMap<ClientId, Client>,
    /// The waiting clients, by start tag and position.
    waiting: BTreeSet<(VirtualTime, u64, ClientId)>,
    /// The next position.
    place: u64,
    /// The start tag of the latest turn.
    now: VirtualTime,
    /// Since when nobody has had or wanted the device.
    idle_since: Option<Moment>,
}

impl Fair {
    /// Creates fair queueing with turns of this length.
    pub fn new(turn: Duration) -> Self {
        Self {
            turn,
            clients: BTreeMap::new(),
            waiting: BTreeSet::new(),
            place: 0,
            now: VirtualTime::default(),
            idle_since: None,
        }
    }
}

impl Policy for Fair {
    fn join(&mut self, client: ClientId, weight: Weight, _: Moment) {
        let new = Client {
            weight,
            tag: self.now,
            waits: None,
        };
        self.clients.insert(client, new);
    }

    fn set_weight(&mut self, client: ClientId, weight: Weight, _: Moment) {
        if let Some(client) = self.clients.get_mut(&client) {
            client.weight = weight;
        }
    }

    fn leave(&mut self, client: ClientId, _: Moment) {
        self.unwant(client);
        self.clients.remove(&client);
    }

    fn want(&mut self, id: ClientId, comes: Comes, now: Moment) {
        if self
            .idle_since
            .take()
            .is_some_and(|since| now.since(since) >= self.turn)
        {
            let tags = self.clients.values().map(|client| client.tag);
            self.now = tags.max().unwrap_or_default().max(self.now);
        }
        let Some(client) = self.clients.get_mut(&id) else {
            return;
        };
        let owed = match comes {
            Comes::Back | Comes::Again => self.turn * OWED,
            Comes::Anew => Duration::ZERO,
        };
        client.tag = client.tag.max(self.now.before(owed, client.weight));
        self.place += 1;
        client.waits = Some(self.place);
        self.waiting.insert((client.tag, self.place, id));
    }

    fn rank(&self, id: ClientId) -> Rank {
        let Some(client) = self.clients.get(&id) else {
            return Rank::Behind;
        };
        let Some((first, _, other)) = self.waiting.first() else {
            return Rank::First;
        };
        let weight = self.clients.get(other).map(|other| other.weight);
        match first.since(client.tag, weight.unwrap_or(Weight::ONE)) {
            None => Rank::Behind,
            Some(ahead) if ahead < WHOLE => Rank::First,
            Some(_) => Rank::Owed,
        }
    }

    fn goes_on(&mut self, id: ClientId) -> bool {
        let (Some(client), Some((first, ..))) = (self.clients.get(&id), self.waiting.first())
        else {
            return false;
        };
        let goes_on = client.tag < *first;
        if goes_on {
            // As if its next turn began.
            self.now = self.now.max(client.tag);
        }
        goes_on
    }

    fn unwant(&mut self, id: ClientId) {
        if let Some(client) = self.clients.get_mut(&id)
            && let Some(place) = client.waits.take()
        {
            self.waiting.remove(&(client.tag, place, id));
        }
    }

    fn charge(&mut self, id: ClientId, used: Duration, _: Moment) {
        let Some(client) = self.clients.get_mut(&id) else {
            return;
        };
        if let Some(place) = client.waits {
            self.waiting.remove(&(client.tag, place, id));
        }
        client.tag = client.tag.after(used, client.weight);
        if let Some(place) = client.waits {
            self.waiting.insert((client.tag, place, id));
        }
        // A client that is alone advances the virtual time, so that a client that arrives later starts next to it.
        if self.waiting.is_empty() {
            self.now = self.now.max(client.tag);
        }
    }

    fn next(&mut self, now: Moment) -> Next {
        let Some((tag, _, id)) = self.waiting.pop_first() else {
            self.idle_since.get_or_insert(now);
            return Next::Nobody;
        };
        self.now = self.now.max(tag);
        if let Some(client) = self.clients.get_mut(&id) {
            client.waits = None;
        }
        Next::Turn(id, Slice::Time(self.turn))
    }
}
