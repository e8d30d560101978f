//! A device, who has it, who waits for it, and what each client has had of it.

use std::{collections::BTreeMap, time::Duration};

use crate::{
    Moment, Slice,
    policy::{ClientId, Next, Policy, Weight},
};

/// More synchronous calls than this in [`INTERACTIVE_TIME`] of its turns make a client one whose
/// CPU must run while it has the device (FairGV, section 3.2.3).
const INTERACTIVE_CALLS: u128 = 10;
const INTERACTIVE_TIME: Duration = Duration::from_millis(10);

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

#[derive(Debug)]
struct Client {
    waits_since: Option<Moment>,
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
    clients: BTreeMap<ClientId, Client>,
    waiting: usize,
    holder: Option<Holder>,
    /// Since when the device has been free although somebody waits.
    wasted_since: Option<Moment>,
}

impl Scheduler {
    /// A free device.
    pub fn new(policy: Box<dyn Policy>) -> Self {
        Self {
            policy,
            clients: BTreeMap::new(),
            waiting: 0,
            holder: None,
            wasted_since: None,
        }
    }

    /// A client that does not want the device yet. Its number must be new.
    pub fn join(&mut self, id: ClientId, weight: Weight, now: Moment) {
        self.policy.join(id, weight, now);
        let client = Client {
            waits_since: None,
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
        self.waiting += 1;
        if self.holder.is_none() {
            self.wasted_since.get_or_insert(now);
        }
        self.policy.want(id, now);
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
        self.holder = None;
        if self.waiting > 0 {
            self.wasted_since = Some(now);
        }
    }

    /// What to do with the device now.
    pub fn dispatch(&mut self, now: Moment) -> Dispatch {
        if self.holder.is_some() {
            return Dispatch::Nothing;
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
