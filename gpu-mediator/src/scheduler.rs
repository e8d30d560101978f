//! A device, who has it, who waits for it, and what each client has had of it.
//!
//! Whatever the policy, a client that is between two batches is anticipated: for as long as it is
//! expected to stay away ([`Expected`]) it keeps its turn, or the free device is kept for it, and what
//! that costs is charged to it. That is for who would be next anyway, if it is back in a moment or has
//! fallen behind its part; and only if it uses a fair part of what is kept for it. For others' pauses
//! somebody else has the device, if possible for no longer than they last. Who is back within
//! the longest pause that is waited for has lost nothing of what it is owed; who stays away for longer than was expected is not
//! waited for.

use std::{collections::BTreeMap, time::Duration};

use crate::{
    Expected, Moment, Slice,
    policy::{ClientId, Comes, Next, Policy, Rank, Weight},
};

/// More synchronous calls than this in [`INTERACTIVE_TIME`] of its turns make a client one whose
/// CPU must run while it has the device (FairGV, section 3.2.3).
const INTERACTIVE_CALLS: u128 = 10;
const INTERACTIVE_TIME: Duration = Duration::from_millis(10);

/// The longest pause that is waited for, if nothing else is said.
pub const LONGEST_PAUSE: Duration = Duration::from_millis(10);
/// A pause up to this is waited for rather than passing the turn on and back, which takes a GPU as
/// long: 150 us for its change to another process and 200 us for the way to the worker, twice.
const SHORT: Duration = Duration::from_micros(500);
/// Who uses less of what is kept for it than one in so many parts is not waited for.
const LEAST_PART: u32 = 3;
/// A turn in another client's pause is not shorter.
const SHORTEST_FILL: Duration = Duration::from_millis(1);

/// What a client has had so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// How long it had the device.
    pub device_time: Duration,
    /// How long it waited for it.
    pub queueing_time: Duration,
    /// How often it got it.
    pub turns: u64,
    /// Synchronous calls during its turns.
    pub synchronous_calls: u64,
}

/// A turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// Whose it is.
    pub client: ClientId,
    /// For how long.
    pub slice: Slice,
    /// Whether the client's processor should be woken now: it made so many synchronous calls in
    /// its last turns that the device would wait for it.
    pub coschedule: bool,
}

/// What to do now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dispatch {
    /// Give the device away.
    Grant(Grant),
    /// Ask again then, or when something happens.
    At(Moment),
    /// Ask again when something happens.
    Nothing,
}

/// A client that is between two batches.
#[derive(Clone, Copy, Debug)]
struct Away {
    /// When it is usually back, and when at the latest if it is trusted: until then it is waited for.
    usual: Moment,
    until: Moment,
    /// Until when it keeps what it is owed. That costs nobody anything.
    owed: Moment,
    /// Whether it uses enough of what is kept for it.
    pays: bool,
}

impl Away {
    /// What is expected may come from a hostile client. Nobody is waited for who may stay away for
    /// longer than the `longest` pause.
    fn new(expected: Expected, since: Moment, longest: Duration) -> Self {
        let within = match expected.within {
            within if within > longest => Duration::ZERO,
            within => within,
        };
        Self {
            usual: since + expected.usual.min(longest),
            until: since + within,
            owed: since + longest,
            pays: expected.usual / (LEAST_PART - 1) <= expected.batch,
        }
    }

    /// Whether the device is kept for it, if that is its `rank` among those who wait; `holds` says
    /// that it has a turn that is not over.
    fn is_waited_for(self, rank: Rank, holds: bool, now: Moment) -> bool {
        let soon = self.usual.since(now) <= SHORT;
        self.pays
            && now < self.until
            && match rank {
                Rank::Behind => holds && soon,
                Rank::First => soon,
                Rank::Owed => true,
            }
    }
}

#[derive(Debug)]
struct Client {
    waits_since: Option<Moment>,
    /// It does not wait, and is expected back.
    away: Option<Away>,
    /// Calls and time of the last turns; halved as they grow, so that old ones fade.
    calls: u128,
    held: Duration,
    /// When it was charged for what it has used after its turns.
    late: Moment,
    figures: Figures,
}

impl Client {
    fn interactive(&self) -> bool {
        self.calls * INTERACTIVE_TIME.as_nanos() > INTERACTIVE_CALLS * self.held.as_nanos()
    }
}

#[derive(Clone, Copy, Debug)]
struct Holder {
    client: ClientId,
    /// Up to when it has been charged.
    charged: Moment,
}

/// Gives one device to one client at a time.
#[derive(Debug)]
pub struct Scheduler {
    policy: Box<dyn Policy>,
    longest_pause: Duration,
    clients: BTreeMap<ClientId, Client>,
    waiting: usize,
    holder: Option<Holder>,
    /// Since when the device has been free although somebody waits.
    wasted_since: Option<Moment>,
    /// For whom a free device is kept, and up to when that has been charged.
    kept: Option<Holder>,
    /// Whose turn is just over: if it wants the device before somebody gets it, it goes on.
    last: Option<ClientId>,
}

impl Scheduler {
    /// A free device.
    pub fn new(policy: Box<dyn Policy>) -> Self {
        Self {
            policy,
            longest_pause: LONGEST_PAUSE,
            clients: BTreeMap::new(),
            waiting: 0,
            holder: None,
            wasted_since: None,
            kept: None,
            last: None,
        }
    }

    /// Has nobody waited for who may stay away for longer than this between two batches.
    pub fn set_longest_pause(&mut self, longest: Duration) {
        self.longest_pause = longest;
    }

    /// A client that does not want the device yet. Its number must be new.
    pub fn join(&mut self, id: ClientId, weight: Weight, now: Moment) {
        self.policy.join(id, weight, now);
        let client = Client {
            waits_since: None,
            away: None,
            calls: 0,
            held: Duration::ZERO,
            late: now,
            figures: Figures::default(),
        };
        self.clients.insert(id, client);
    }

    /// The client is gone. If it had the device, that is free now.
    pub fn leave(&mut self, id: ClientId, now: Moment) {
        self.give_up(id, now);
        if self.holder.is_some_and(|holder| holder.client == id) {
            self.holder = None;
        }
        self.kept = self.kept.filter(|kept| kept.client != id);
        self.policy.leave(id, now);
        self.clients.remove(&id);
    }

    /// The client wants the device. Wanting it twice, or while having it, changes nothing.
    pub fn want(&mut self, id: ClientId, now: Moment) {
        let held = self.holder.is_some_and(|holder| holder.client == id);
        let Some(client) = self.clients.get_mut(&id) else {
            return;
        };
        if held || client.waits_since.is_some() {
            return;
        }
        client.waits_since = Some(now);
        let in_time = (client.away.take()).is_some_and(|away| now <= away.owed);
        let comes = match in_time {
            true => Comes::Back,
            false if self.last == Some(id) => Comes::Again,
            false => Comes::Anew,
        };
        self.waiting += 1;
        if self.holder.is_none() {
            self.wasted_since.get_or_insert(now);
        }
        self.policy.want(id, comes, now);
    }

    /// Until when the holder keeps the device, which has been charged until now and is between two
    /// batches `since` then; none if others shall have it. `in_turn` says that its turn is not over.
    pub fn keeps(
        &self,
        expected: Expected,
        since: Moment,
        in_turn: bool,
        now: Moment,
    ) -> Option<Moment> {
        let away = Away::new(expected, since, self.longest_pause);
        let rank = self.policy.rank(self.holder?.client);
        let keeps = away.is_waited_for(rank, in_turn, now);
        keeps.then_some(away.until)
    }

    /// The holder's turn is over, and it has been charged until now: whether it goes on, as its next turn
    /// would come before all others'.
    pub fn goes_on(&mut self, now: Moment) -> bool {
        let Some(holder) = self.holder else {
            return false;
        };
        // For one that is away the device may be kept, or it comes back in a shorter turn.
        self.anticipate(now) == Err(None) && self.policy.goes_on(holder.client)
    }

    /// A client that has given the device back is between two batches `since` then. One that waits
    /// is not.
    pub fn away(&mut self, id: ClientId, expected: Expected, since: Moment, now: Moment) {
        let away = Away::new(expected, since, self.longest_pause);
        if let Some(client) = self.clients.get_mut(&id)
            && client.waits_since.is_none()
            && now < away.owed
        {
            client.away = Some(away);
        }
    }

    /// Charges who a free device has been kept for.
    fn charge_kept(&mut self, now: Moment) {
        let Some(kept) = self.kept.take() else {
            return;
        };
        let time = now.since(kept.charged);
        self.policy.charge(kept.client, time, now);
        if let Some(client) = self.clients.get_mut(&kept.client) {
            client.figures.device_time += time;
        }
        // That was no work of the scheduler's.
        self.wasted_since = Some(now);
    }

    /// Who of those that are away the device is kept for, and until when to look again; or how long
    /// a turn may be that is given in the pause of one that would be next.
    fn anticipate(&mut self, now: Moment) -> Result<(ClientId, Moment), Option<Duration>> {
        let mut best: Option<(Rank, ClientId)> = None;
        let mut first: Option<Moment> = None;
        let mut fill: Option<Duration> = None;
        for (&id, client) in &mut self.clients {
            let Some(away) = client.away.filter(|away| now < away.owed) else {
                client.away = None;
                continue;
            };
            if now >= away.until {
                continue;
            }
            let rank = self.policy.rank(id);
            if away.is_waited_for(rank, false, now) {
                best = best.max(Some((rank, id)));
                first = Some(first.map_or(away.until, |first| first.min(away.until)));
            } else if rank != Rank::Behind {
                let left = away.usual.since(now).max(SHORTEST_FILL);
                fill = Some(fill.map_or(left, |fill| fill.min(left)));
            }
        }
        match best.zip(first) {
            Some(((_, id), until)) => Ok((id, until)),
            None => Err(fill),
        }
    }

    /// The client does not want the device any longer.
    pub fn give_up(&mut self, id: ClientId, now: Moment) {
        let Some(client) = self.clients.get_mut(&id) else {
            return;
        };
        if let Some(since) = client.waits_since.take() {
            client.figures.queueing_time += now.since(since);
            self.waiting -= 1;
            self.policy.unwant(id);
        }
    }

    /// Who has the device.
    pub fn holder(&self) -> Option<ClientId> {
        self.holder.map(|holder| holder.client)
    }

    /// Whether somebody waits.
    pub fn contended(&self) -> bool {
        self.waiting > 0
    }

    /// Charges the holder for `used` since it was charged last, at most the time since then.
    /// To be done before another client wants a device that its holder has had alone: so that
    /// both start from what has been used by then.
    pub fn charge(&mut self, used: Duration, synchronous_calls: u64, now: Moment) {
        let Some(holder) = &mut self.holder else {
            return;
        };
        let used = used.min(now.since(holder.charged));
        holder.charged = now;
        let id = holder.client;
        self.policy.charge(id, used, now);
        if let Some(client) = self.clients.get_mut(&id) {
            client.figures.device_time += used;
            client.figures.synchronous_calls += synchronous_calls;
            client.held += used;
            client.calls += u128::from(synchronous_calls);
            while client.held > INTERACTIVE_TIME * 2 {
                client.held /= 2;
                client.calls /= 2;
            }
        }
    }

    /// How long the holder has had the device since it was charged last.
    pub fn held(&self, now: Moment) -> Duration {
        self.holder
            .map_or(Duration::ZERO, |holder| now.since(holder.charged))
    }

    /// How long a client has had the device since it was charged last.
    pub fn held_by(&self, id: ClientId, now: Moment) -> Duration {
        match self.holder() == Some(id) {
            true => self.held(now),
            false => Duration::ZERO,
        }
    }

    /// Charges a client for what it has used after its turn, of others' turns, as its worker says:
    /// no more than the time since the last such charge. How much that is.
    pub fn charge_late(&mut self, id: ClientId, used: Duration, now: Moment) -> Duration {
        let Some(client) = self.clients.get_mut(&id) else {
            return Duration::ZERO;
        };
        let used = used.min(now.since(client.late));
        client.late = now;
        client.figures.device_time += used;
        self.policy.charge(id, used, now);
        used
    }

    /// The holder's turn is over.
    pub fn done(&mut self, now: Moment) {
        self.last = self.holder.take().map(|holder| holder.client);
        if self.waiting > 0 {
            self.wasted_since = Some(now);
        }
    }

    /// What to do with the device now.
    pub fn dispatch(&mut self, now: Moment) -> Dispatch {
        if self.holder.is_some() {
            return Dispatch::Nothing;
        }
        self.last = None;
        self.charge_kept(now);
        let mut fill = None;
        if self.waiting > 0 {
            match self.anticipate(now) {
                Ok((client, until)) => {
                    self.kept = Some(Holder {
                        client,
                        charged: now,
                    });
                    return Dispatch::At(until);
                }
                Err(left) => fill = left,
            }
        }
        match self.policy.next(now) {
            Next::Nobody => Dispatch::Nothing,
            Next::At(moment) => Dispatch::At(moment),
            Next::Turn(id, slice) => {
                if let Some(since) = self.wasted_since.take() {
                    self.policy.overhead(now.since(since));
                }
                self.holder = Some(Holder {
                    client: id,
                    charged: now,
                });
                self.waiting = self.waiting.saturating_sub(1);
                let mut coschedule = false;
                if let Some(client) = self.clients.get_mut(&id) {
                    if let Some(since) = client.waits_since.take() {
                        client.figures.queueing_time += now.since(since);
                    }
                    client.figures.turns += 1;
                    coschedule = client.interactive();
                }
                let slice = match (slice, fill) {
                    (Slice::Time(length), Some(fill)) => Slice::Time(length.min(fill)),
                    _ => slice,
                };
                Dispatch::Grant(Grant {
                    client: id,
                    slice,
                    coschedule,
                })
            }
        }
    }

    /// What a client has had so far, a wait that goes on included.
    pub fn figures(&self, id: ClientId, now: Moment) -> Option<Figures> {
        let client = self.clients.get(&id)?;
        let mut figures = client.figures;
        if let Some(since) = client.waits_since {
            figures.queueing_time += now.since(since);
        }
        Some(figures)
    }
}
