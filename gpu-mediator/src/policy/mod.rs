//! In what order clients get the device.
//!
//! | policy | order | after | turn |
//! |---|---|---|---|
//! | [`Fifo`] | as they came | | one request |
//! | [`Credit`] | who has credit first, in turn | Xen's credit scheduler | 30 ms |
//! | [`Band`] | by what is left of a reserved bandwidth | Gdev, GPUvm | one request |
//! | [`Fair`] | by start tags | FairGV | 6 ms or 30 ms |
//!
//! A policy gives a device to one client at a time. It learns what the client used when the turn
//! is over: on a device that cannot be interrupted, that may be any multiple of the turn.

mod band;
mod credit;
mod fair;
mod fifo;
#[cfg(test)]
mod tests;

use std::{fmt, num::NonZeroU32, str::FromStr, time::Duration};

pub use band::Band;
pub use credit::Credit;
pub use fair::Fair;
pub use fifo::Fifo;

use crate::{Moment, Slice};

/// A client's number: a virtual machine, not one of its applications.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClientId(pub u32);

impl fmt::Display for ClientId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// A client's part of the device, in proportion to the weights of the others: 1 to 10,000.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Weight(NonZeroU32);

/// A number that is no weight.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} is no weight: give a whole number from 1 to {max}", max = Weight::LARGEST)]
pub struct NoWeight(String);

impl Weight {
    /// The largest weight.
    pub const LARGEST: u32 = 10_000;
    /// The weight of who has not been given any.
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

/// What to do with a free device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Give it to this client.
    Turn(ClientId, Slice),
    /// Ask again then, or when somebody comes: waiting for a light client pays.
    At(Moment),
    /// Nobody wants it.
    Nobody,
}

/// How a client comes to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Comes {
    /// It has wanted nothing.
    Anew,
    /// It was away between two batches for a moment only: it is owed what it was owed before.
    Back,
    /// Its turn is just over, and it has more to do.
    Again,
}

/// Where a client that does not wait would be among those who do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rank {
    /// Another one would go first.
    Behind,
    /// It would be named next.
    First,
    /// It would be, and has fallen behind its part by more than a turn.
    Owed,
}

/// The order of turns. The caller keeps to the protocol: a client joins, then wants the device,
/// is named by `next`, is charged, and wants it again, or not.
pub trait Policy: fmt::Debug + Send {
    /// A client that does not want the device yet.
    fn join(&mut self, client: ClientId, weight: Weight, now: Moment);
    /// The client is gone, whether it waits or not.
    fn leave(&mut self, client: ClientId, now: Moment);
    /// The client waits for the device from now on.
    fn want(&mut self, client: ClientId, comes: Comes, now: Moment);
    /// Where a client that does not wait would be if it did. While nobody waits, that is nowhere
    /// behind.
    fn rank(&self, client: ClientId) -> Rank;
    /// The turn of the client is over, and others wait: whether it would be named next if it waited too,
    /// so that it may as well go on. What it has used has been charged.
    fn goes_on(&mut self, client: ClientId) -> bool {
        let _ = client;
        false
    }
    /// The client does not wait any longer.
    fn unwant(&mut self, client: ClientId);
    /// The client has used the device for so long.
    fn charge(&mut self, client: ClientId, used: Duration, now: Moment);
    /// The device was free for so long while somebody waited, because scheduling takes time.
    fn overhead(&mut self, time: Duration) {
        let _ = time;
    }
    /// The device is free. Who is named does not wait any longer.
    fn next(&mut self, now: Moment) -> Next;
}

/// How many whole periods are over since `last`, which then is the end of the latest of them.
fn periods_over(last: &mut Moment, period: Duration, now: Moment) -> u128 {
    let periods = now.since(*last).as_nanos() / period.as_nanos();
    // Lossless: at most 2^64 ns.
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
    /// [`Fair`], with the turn for devices that cannot be interrupted.
    Fair,
    /// [`Fair`], with the turn for devices that can.
    FairPreemptive,
}

impl Name {
    /// All policies.
    pub const ALL: [Self; 5] = [
        Self::Fifo,
        Self::Credit,
        Self::Band,
        Self::Fair,
        Self::FairPreemptive,
    ];

    /// The policy, with its published settings.
    pub fn make(self) -> Box<dyn Policy> {
        match self {
            Self::Fifo => Box::new(Fifo::default()),
            Self::Credit => Box::new(Credit::default()),
            Self::Band => Box::new(Band::default()),
            Self::Fair => Box::new(Fair::new(fair::WHOLE)),
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
        })
    }
}

/// A name that no policy has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no policy {0}: use fifo, credit, band, fair or fair-preemptive")]
pub struct Unknown(String);

impl FromStr for Name {
    type Err = Unknown;

    fn from_str(text: &str) -> Result<Self, Unknown> {
        Self::ALL
            .into_iter()
            .find(|name| name.to_string() == text)
            .ok_or_else(|| Unknown(text.to_owned()))
    }
}
