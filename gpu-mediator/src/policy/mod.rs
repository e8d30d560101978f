//! The order in which clients get the device.
//!
//! | policy | order | after | turn |
//! |---|---|---|---|
//! | [`Fifo`] | order of arrival | | one request |
//! | [`Credit`] | clients with credit first, round-robin | Xen's credit scheduler | 30 ms |
//! | [`Band`] | remaining reserved bandwidth | Gdev, GPUvm | one request |
//! | [`Fair`] | start tags | FairGV | 6 ms or 30 ms |
//!
//! A policy gives a device to one client at a time. It learns how much the client used when the
//! turn is over. On a device that cannot be interrupted, that may be any multiple of the turn.
//!
//! [`ledger`] is for devices that serve several clients at a time, in time slices. Where one of the workers cannot set its
//! slices, [`Name::Ledger`] gives turns as [`Name::Fair`] does.

mod band;
mod credit;
mod delays;
mod fair;
mod fifo;
pub mod ledger;
#[cfg(test)]
mod tests;

use std::{fmt, num::NonZeroU32, str::FromStr, time::Duration};

pub use band::Band;
pub use credit::Credit;
pub use delays::Delay;
pub use fair::Fair;
pub use fifo::Fifo;

use crate::{Moment, Slice};

/// Number of a client. A client is a virtual machine, not one of its applications.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClientId(pub u32);

impl fmt::Display for ClientId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Weight of a client: its share of the device relative to the weights of the others, 1 to 10,000.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Weight(NonZeroU32);

/// A number that is not a valid weight.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} is no weight: give a whole number from 1 to {max}", max = Weight::LARGEST)]
pub struct NoWeight(String);

impl Weight {
    /// The largest weight.
    pub const LARGEST: u32 = 10_000;
    /// The weight of a client that was not given any.
    pub const ONE: Self = Self(NonZeroU32::MIN);

    /// The weight as a number.
    pub fn get(self) -> u32 {
        self.0.get()
    }
}

impl TryFrom<u32> for Weight {
    type Error = NoWeight;

    fn try_from(number: u32) -> Result<Self, NoWeight> {
        NonZeroU32::new(number)
            .filter(|number| number.get() <= Self::LARGEST)
            .map(Self)
            .ok_or_else(|| NoWeight(number.to_string()))
    }
}

impl FromStr for Weight {
    type Err = NoWeight;

    fn from_str(text: &str) -> Result<Self, NoWeight> {
        text.parse()
            .ok()
            .and_then(|number: u32| Self::try_from(number).ok())
            .ok_or_else(|| NoWeight(text.to_owned()))
    }
}

/// When a client gets its part of a device that serves several in time slices. Turns do not depend on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Class {
    /// By its weight.
    #[default]
    Shared,
    /// By its weight, of all the time in which others have work; and the slices of others that it waits for are in sum not longer
    /// than this, as long as it has not overdrawn.
    Latency(Duration),
    /// While no client that is not idle has work.
    Idle,
}

/// What to do with a free device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Give it to this client.
    Turn(ClientId, Slice),
    /// Ask again at this time, or when another client comes: it pays to wait for a light client.
    At(Moment),
    /// Nobody wants it.
    Nobody,
}

/// How a client starts to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Comes {
    /// It did not want the device before.
    Anew,
    /// It was only away for a moment between two batches: it is still owed what it was owed before.
    Back,
    /// Its turn has just ended, and it has more work.
    Again,
}

/// The rank that a client which does not wait would have among those that do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rank {
    /// Another client would be next.
    Behind,
    /// It would be next.
    First,
    /// It would be next, and is more than a turn behind its share.
    Owed,
}

/// The order of turns. The caller must follow the protocol: a client joins, wants the device, is
/// chosen by `next`, is charged, and may want the device again.
pub trait Policy: fmt::Debug + Send {
    /// Adds a client that does not want the device yet.
    fn join(&mut self, client: ClientId, weight: Weight, now: Moment);
    /// The client's weight changes.
    fn set_weight(&mut self, client: ClientId, weight: Weight, now: Moment);
    /// Removes a client, whether it waits or not.
    fn leave(&mut self, client: ClientId, now: Moment);
    /// The client waits for the device from now on.
    fn want(&mut self, client: ClientId, comes: Comes, now: Moment);
    /// The rank that a client which does not wait would have. If nobody waits, it is never
    /// [`Rank::Behind`].
    fn rank(&self, client: ClientId) -> Rank;
    /// The client's turn is over, and others wait. Returns whether it would be next if it waited,
    /// too, so that it may as well continue. What it has used has been charged.
    fn goes_on(&mut self, client: ClientId) -> bool {
        let _ = client;
        false
    }
    /// The client no longer waits.
    fn unwant(&mut self, client: ClientId);
    /// The client has used the device for this time.
    fn charge(&mut self, client: ClientId, used: Duration, now: Moment);
    /// The device was free for this time while somebody waited, because scheduling takes time.
    fn overhead(&mut self, time: Duration) {
        let _ = time;
    }
    /// The device is free. The chosen client no longer waits.
    fn next(&mut self, now: Moment) -> Next;
}

/// Returns how many whole periods have passed since `last`, and advances `last` to the end of the
/// latest one.
fn periods_over(last: &mut Moment, period: Duration, now: Moment) -> u128 {
    let periods = now.since(*last).as_nanos() / period.as_nanos();
    // Lossless, since it is at most 2^64 ns.
    *last += Duration::from_nanos((periods * period.as_nanos()) as u64);
    periods
}

/// The policies by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Name {
    /// [`Fifo`].
    Fifo,
    /// [`Credit`].
    Credit,
    /// [`Band`].
    Band,
    /// [`Fair`], with turns for devices that cannot be interrupted.
    Fair,
    /// [`Fair`], with turns for devices that can be interrupted.
    FairPreemptive,
    /// [`ledger`] on devices that serve several clients in time slices, otherwise [`Self::Fair`].
    Ledger,
}

impl Name {
    /// All policies that give turns.
    pub const ALL: [Self; 5] = [
        Self::Fifo,
        Self::Credit,
        Self::Band,
        Self::Fair,
        Self::FairPreemptive,
    ];

    /// Creates the policy for turns, with its published settings.
    pub fn make(self) -> Box<dyn Policy> {
        match self {
            Self::Fifo => Box::new(Fifo::default()),
            Self::Credit => Box::new(Credit::default()),
            Self::Band => Box::new(Band::default()),
            Self::Fair | Self::Ledger => Box::new(Fair::new(fair::WHOLE)),
            Self::FairPreemptive => Box::new(Fair::new(fair::PREEMPTIVE)),
        }
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Fifo => "fifo",
            Self::Credit => "credit",
            Self::Band => "band",
            Self::Fair => "fair",
            Self::FairPreemptive => "fair-preemptive",
            Self::Ledger => "ledger",
        })
    }
}

/// A name of no policy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown policy {0:?}: use ledger, fair, band, fair-preemptive, credit or fifo")]
pub struct Unknown(String);

impl FromStr for Name {
    type Err = Unknown;

    fn from_str(text: &str) -> Result<Self, Unknown> {
        Self::ALL
            .into_iter()
            .chain([Self::Ledger])
            .find(|name| name.to_string() == text)
            .ok_or_else(|| Unknown(text.to_owned()))
    }
}
