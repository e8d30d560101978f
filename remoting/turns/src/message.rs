//! The messages between workers, pools and the arbiter.

use std::io::{self, Read, Write};

/// The first bytes of a worker's first message.
const MAGIC: [u8; 8] = *b"GANTRYTN";
/// Incremented when messages or pages change their meaning.
pub const VERSION: u32 = 5;
/// The version whose arbiters hang up on workers of another version without a message: see
/// [`hello`].
const SILENT: u32 = 1;
/// Maximum size of a client's name in bytes.
pub const NAME: usize = 64;
/// Size of [`Join`] in bytes.
pub const JOIN: usize = 24 + NAME;
/// Where its flags are, and its latency.
const FLAGS: usize = 16;
const LATENCY: usize = 20;
/// The weight of a client that gets the device only while nobody else has work.
pub const IDLE: u32 = 0;

/// Size of a [`hello`] in bytes.
pub const HELLO: usize = 12;

/// The start of every first message, whatever its version. It is also the arbiter's only reply to a
/// worker whose first message it does not understand.
pub fn hello() -> [u8; HELLO] {
    let mut bytes = [0; HELLO];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..].copy_from_slice(&VERSION.to_le_bytes());
    bytes
}

/// The version of the sender, if this is one of Gantry's messages.
fn version(start: &[u8; HELLO]) -> Option<u32> {
    let number = start.strip_prefix(&MAGIC)?.try_into().ok()?;
    Some(u32::from_le_bytes(number))
}

/// The arbiter is of another build than the worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the arbiter speaks version {theirs} of its protocol and this worker {VERSION}: install \
     gantry-accel and gantry-arbiter of one release"
)]
pub struct OtherArbiter {
    /// The arbiter's version.
    pub theirs: u32,
}

impl OtherArbiter {
    /// The mismatch that an arbiter's [`hello`] shows, if it has another version.
    pub fn of(hello: &[u8; HELLO]) -> Option<Self> {
        let theirs = version(hello)?;
        (theirs != VERSION).then_some(Self { theirs })
    }
}

/// An arbiter that repeatedly hangs up before it has sent anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the arbiter hangs up on this worker, whose application waits: its log says why. One of version \
     {SILENT} of its protocol does so, and this worker speaks {VERSION}: install gantry-accel and \
     gantry-arbiter of one release"
)]
pub struct HangsUp;

/// A worker's first message: the client that it works for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Join {
    /// The client: a virtual machine. Workers with the same name share its turns.
    pub name: String,
    /// The client's weight, 1 to 10,000, or [`IDLE`].
    pub weight: u32,
    /// For how many milliseconds it waits at most for slices of others, 1 to 1,000; zero if it does not matter.
    pub latency: u32,
    /// Whether the worker sets the time slices of its contexts, and stops them, as the arbiter says.
    pub sliced: bool,
}

/// A first message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum First {
    /// A worker's.
    Worker(Join),
    /// A pool's that asks whether to try the time slices of the device with this name: see [`trial`](super::trial).
    Trial(String),
    /// That the client of this name is to have this weight from now on: see [`weight`](super::weight). No worker joins.
    Weight(Join),
    /// The same for its latency.
    Latency(Join),
}

/// Flags of a first message.
const SLICED: u8 = 1;
const TRIAL: u8 = 2;
const WEIGHT: u8 = 4;
const WAITS: u8 = 8;

impl First {
    /// The message as bytes; a longer name is truncated.
    pub fn to_bytes(&self) -> [u8; JOIN] {
        match self {
            Self::Worker(join) => join.to_bytes(),
            Self::Weight(client) => {
                let mut bytes = client.to_bytes();
                bytes[FLAGS] = WEIGHT;
                bytes
            }
            Self::Latency(client) => {
                let mut bytes = client.to_bytes();
                bytes[FLAGS] = WAITS;
                bytes
            }
            Self::Trial(device) => {
                let join = Join {
                    name: device.clone(),
                    weight: 0,
                    latency: 0,
                    sliced: false,
                };
                let mut bytes = join.to_bytes();
                bytes[FLAGS] = TRIAL;
                bytes
            }
        }
    }

    /// Reads the message.
    ///
    /// # Errors
    /// Another version of the protocol, or an invalid name.
    pub fn from_bytes(bytes: &[u8; JOIN]) -> Result<Self, Refused> {
        let join = Join::from_bytes(bytes)?;
        Ok(match bytes[FLAGS] & (TRIAL | WEIGHT | WAITS) {
            0 => Self::Worker(join),
            WEIGHT => Self::Weight(join),
            WAITS => Self::Latency(join),
            _ => Self::Trial(join.name),
        })
    }
}

/// Why a worker's first message is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// It is not one of Gantry's messages.
    #[error("what has connected is no worker of Gantry")]
    NotGantry,
    /// The worker is of another build.
    #[error(
        "the worker speaks version {theirs} of the arbiter's protocol and this side {VERSION}: \
         install gantry-accel and gantry-arbiter of one release"
    )]
    Version {
        /// The worker's version.
        theirs: u32,
    },
    /// The name is missing or invalid.
    #[error("the worker's client has no name, or one that is no text")]
    Name,
}

impl Join {
    /// The message as bytes; a longer name is truncated.
    pub fn to_bytes(&self) -> [u8; JOIN] {
        let mut bytes = [0; JOIN];
        bytes[..HELLO].copy_from_slice(&hello());
        bytes[12..16].copy_from_slice(&self.weight.to_le_bytes());
        bytes[FLAGS] = if self.sliced { SLICED } else { 0 };
        bytes[LATENCY..LATENCY + 4].copy_from_slice(&self.latency.to_le_bytes());
        let mut length = self.name.len().min(NAME);
        while !self.name.is_char_boundary(length) {
            length -= 1;
        }
        bytes[24..24 + length].copy_from_slice(&self.name.as_bytes()[..length]);
        bytes
    }

    /// Whether a message with these first bytes may be one of this version, as far as it has
    /// arrived. Messages of other versions may be shorter.
    pub fn check(start: &[u8]) -> Result<(), Refused> {
        let Some(start) = start.first_chunk() else {
            return Ok(());
        };
        match version(start) {
            Some(VERSION) => Ok(()),
            Some(theirs) => Err(Refused::Version { theirs }),
            None => Err(Refused::NotGantry),
        }
    }

    /// Reads the message.
    pub fn from_bytes(bytes: &[u8; JOIN]) -> Result<Self, Refused> {
        Self::check(bytes)?;
        let number = |at: usize| {
            let number = bytes[at..].first_chunk().copied();
            u32::from_le_bytes(number.unwrap_or_default())
        };
        let name = bytes[24..].split(|byte| *byte == 0).next();
        let name = std::str::from_utf8(name.unwrap_or_default()).map_err(|_| Refused::Name)?;
        if name.is_empty() || name.contains(char::is_control) {
            return Err(Refused::Name);
        }
        Ok(Self {
            name: name.to_owned(),
            weight: number(12),
            latency: number(LATENCY),
            sliced: bytes[FLAGS] & SLICED != 0,
        })
    }
}

/// A worker's later messages: one byte each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Word {
    /// It wants the device.
    Want = b'w',
    /// Its turn is over, and it wants another one.
    Again = b'a',
    /// Its turn is over.
    Done = b'd',
    /// Its client is between two batches: the worker does not use the device, and may keep it until
    /// it is taken away.
    Pause = b'p',
}

impl Word {
    /// The word with this byte.
    pub fn from_byte(byte: u8) -> Option<Self> {
        [Self::Want, Self::Again, Self::Done, Self::Pause]
            .into_iter()
            .find(|word| *word as u8 == byte)
    }

    /// Sends the word.
    pub fn say(self, mut to: impl Write) -> io::Result<()> {
        to.write_all(&[self as u8])
    }
}

/// Waits for one byte, which signals that the other side has changed something.
pub fn listen(mut from: impl Read) -> io::Result<()> {
    from.read_exact(&mut [0])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_join_survives_the_way_through_bytes() {
        let join = Join {
            name: "vm-é".to_owned(),
            weight: 7,
            latency: 2,
            sliced: true,
        };
        assert_eq!(Join::from_bytes(&join.to_bytes()), Ok(join.clone()));
        let unsliced = Join {
            sliced: false,
            ..join.clone()
        };
        for first in [
            First::Worker(join),
            First::Trial("GPU-1 é".to_owned()),
            First::Weight(unsliced.clone()),
            First::Latency(unsliced),
        ] {
            assert_eq!(First::from_bytes(&first.to_bytes()), Ok(first));
        }
    }

    #[test]
    fn names_that_would_spoil_a_log_and_other_versions_are_refused() {
        for name in ["", "a\nb"] {
            let join = Join {
                name: name.to_owned(),
                weight: 1,
                latency: 0,
                sliced: false,
            };
            assert_eq!(Join::from_bytes(&join.to_bytes()), Err(Refused::Name));
        }
        let mut bytes = [0; JOIN];
        assert_eq!(Join::from_bytes(&bytes), Err(Refused::NotGantry));
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8] = 9;
        let text = Join::from_bytes(&bytes).unwrap_err().to_string();
        assert!(
            text.contains("version 9") && text.contains(&format!("this side {VERSION}")),
            "{text}"
        );
    }

    #[test]
    fn a_name_that_is_too_long_is_cut_between_characters() {
        let join = Join {
            name: "é".repeat(40),
            weight: 1,
            latency: 0,
            sliced: false,
        };
        let read = Join::from_bytes(&join.to_bytes()).unwrap();
        assert_eq!(read.name, "é".repeat(32));
    }
}
