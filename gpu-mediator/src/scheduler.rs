//! Schedules a device: who has it, who waits for it, and how much each client has had.
//!
//! Whatever the policy, a client that is between two batches is anticipated. For as long as it is expected to be away
//! ([`Expected`]), it keeps its turn, or the free device is kept for it, and it is charged for that. This applies to a
//! client that would be next anyway, and that is back in a moment or has fallen behind its share; and only if it uses a
//! fair part of the time that is kept for it. In the pauses of other clients, somebody else gets the device, if
//! possible for no longer than the pause. A client that is back within the longest pause that is waited for keeps
//! everything that it is owed. A client that stays away for longer than expected is not waited for.

use std::{collections::BTreeMap, time::Duration};

use crate::{
    Expected, Moment, Slice,
    policy::{ClientId, Comes, Next, Policy, Rank, Weight},
};

/// More synchronous calls than this in [`INTERACTIVE_TIME`] of its turns make a client interactive: its vCPU must run
/// while it has the device (FairGV, section 3.2.3).
const INTERACTIVE_CALLS: u128 = 10;
const INTERACTIVE_TIME: Duration = Duration::from_millis(10);

/// The default for the longest pause that is waited for.
pub const LONGEST_PAUSE: Duration = Duration::from_millis(10);
/// The device is kept for a pause up to this length instead of passing the turn on and back, which takes a GPU about as
/// long: 150 us for switching to another process and 200 us for the way to the worker, twice.
const SHORT: Duration = Duration::from_micros(500);
/// A client that uses less than one in this many parts of the time that is kept for it is not waited for.
const LEAST_PART: u32 = 3;
/// Minimum length of a turn in another client's pause.
const SHORTEST_FILL: Duration = Duration::from_millis(1);

/// What a client has had so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Time for which it had the device.
    pub device_time: Duration,
    /// Time for which it waited for the device.
    pub queueing_time: Duration,
    /// Number of turns that it got.
    pub turns: u64,
    /// Synchronous calls during its turns.
    pub synchronous_calls: u64,
}

/// A turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// The client.
    pub client: ClientId,
    /// The length of the turn.
    pub slice: Slice,
    /// Whether the client's vCPU should be woken now: it made so many synchronous calls in its recent turns that the
    /// device would have to wait for it.
    pub coschedule: bool,
}

/// What the caller must do now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dispatch {
    /// Give the device to a client.
    Grant(Grant),
    /// Call again at this time, or when something happens.
    At(Moment),
    /// Call again when something happens.
    Nothing,
}

/// A client that is between two batches.
#[derive(Clone, Copy, Debug)]
struct Away {
    /// When it is usually back, and the latest time at which it is expected back. The device is kept for it until then.
    usual: Moment,
    until: Moment,
    /// Until when it keeps what it is owed. This costs nobody anything.
    owed: Moment,
    /// Whether it uses enough of the time that is kept for it.
    pays: bool,
}

impl Away {
    /// The expectation may come from a hostile client. A client that may stay away for longer than the `longest` pause
    /// is not waited for.
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

    /// Whether the device is kept for the client, given its `rank` among those that wait; `holds` says that it has a
    /// turn that is not over.
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
    /// Set if it does not wait and is expected back.
    away: Option<Away>,
    /// Calls and device time of the recent turns; both are halved as they grow, so that old turns fade.
    calls: u128,
    held: Duration,
    /// When it was last charged for use after its turns.
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
    /// The time until which it has been charged.
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
    /// The client for which the free device is kept, and until when that has been charged.
    kept: Option<Holder>,
    /// The client whose turn has just ended: if it wants the device before somebody else gets it, it continues.
    last: Option<ClientId>,
}

impl Scheduler {
    /// Creates a scheduler of a free device.
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

    /// Sets the longest pause between two batches that is waited for. Clients that may be away for longer are not
    /// waited for.
    pub fn set_longest_pause(&mut self, longest: Duration) {
        self.longest_pause = longest;
    }

    /// The client's weight changes.
    pub fn set_weight(&mut self, client: ClientId, weight: Weight, now: Moment) {
        self.policy.set_weight(client, weight, now);
    }

    /// Adds a client that does not want the device yet. Its number must be new.
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

    /// Removes a client. If it had the device, the device is free now.
    pub fn leave(&mut self, id: ClientId, now: Moment) {
        self.give_up(id, now);
        if self.holder.is_some_and(|holder| holder.client == id) {
            self.holder = None;
        }
        self.kept = self.kept.filter(|kept| kept.client != id);
        self.policy.leave(id, now);
        self.clients.remove(&id);
    }

    /// The client wants the device. This has no effect if it already wants or has it.
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

    /// Returns until when the holder keeps the device, or `None` if others shall have it. The holder has been charged
    /// until now and has been between two batches since `since`. `in_turn` says that its turn is not over.
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

    /// The holder's turn is over, and it has been charged until now. Returns whether it continues, since its next turn
    /// would come before all others'.
    pub fn goes_on(&mut self, now: Moment) -> bool {
        let Some(holder) = self.holder else {
            return false;
        };
        // The device may have to be kept for a client that is away, or that client needs a shorter turn before it comes
        // back.
        self.anticipate(now) == Err(None) && self.policy.goes_on(holder.client)
    }

    /// Notes that a client that has given the device back has been between two batches since `since`. This has no
    /// effect on a client that waits.
    pub fn away(&mut self, id: ClientId, expected: Expected, since: Moment, now: Moment) {
        let away = Away::new(expected, since, self.longest_pause);
        if let Some(client) = self.clients.get_mut(&id)
            && client.waits_since.is_none()
            && now < away.owed
        {
            client.away = Some(away);
        }
    }

    /// Charges the client for which a free device has been kept.
    fn charge_kept(&mut self, now: Moment) {
        let Some(kept) = self.kept.take() else {
            return;
        };
        let time = now.since(kept.charged);
        self.policy.charge(kept.client, time, now);
        if let Some(client) = self.clients.get_mut(&kept.client) {
            client.figures.device_time += time;
        }
        // This was not overhead of the scheduler.
        self.wasted_since = Some(now);
    }

    /// Returns the absent client for which the device is kept, and when to check again. Otherwise returns the maximum
    /// length of a turn that is given in the pause of a client that would be next.
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

    /// The client no longer wants the device.
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

    /// The client that has the device.
    pub fn holder(&self) -> Option<ClientId> {
        self.holder.map(|holder| holder.client)
    }

    /// Whether somebody waits.
    pub fn contended(&self) -> bool {
        self.waiting > 0
    }

    /// Charges the holder for `used` since it was last charged, at most the time since then. This must be called before
    /// another client wants a device that its holder has had alone, so that both start from the use until then.
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

    /// Time for which the holder has had the device since it was last charged.
    pub fn held(&self, now: Moment) -> Duration {
        self.holder
            .map_or(Duration::ZERO, |holder| now.since(holder.charged))
    }

    /// Time for which a client has had the device since it was last charged.
    pub fn held_by(&self, id: ClientId, now: Moment) -> Duration {
        match self.holder() == Some(id) {
            true => self.held(now),
            false => Duration::ZERO,
        }
    }

    /// Charges a client for the use of others' turns after its own, as reported by its worker, but at most for the time
    /// since the last such charge. Returns the charged time.
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

    /// Decides what to do with the device now.
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

    /// What a client has had so far, including a wait in progress.
    pub fn figures(&self, id: ClientId, now: Moment) -> Option<Figures> {
        let client = self.clients.get(&id)?;
        let mut figures = client.figures;
        if let Some(since) = client.waits_since {
            figures.queueing_time += now.since(since);
        }
        Some(figures)
    }
}
