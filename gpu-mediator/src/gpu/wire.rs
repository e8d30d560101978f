//! The protocol between a virtual GPU's front and the mediator.
//!
//! A message is one packet of a `SOCK_SEQPACKET` socket with at most [`MOST`] bytes: eight bytes with opcode and
//! number, then fixed-width little-endian fields. Only [`Request::Hello`] and [`Request::Ram`] carry descriptors. A
//! front is hostile: every count is checked before anything is allocated, and a message that is too short, too long or
//! unknown ends the connection.
//!
//! Numbers of pages, tables, spaces and channels are the guest's own. None of them is physical.

use std::time::Duration;

use gf100::format::{Gfn, PAGE_NUMBER_BITS, Target, VramPage};

/// Maximum size of a message in bytes.
pub const MOST: usize = 32 << 10;
/// Version of this protocol.
pub const VERSION: u32 = 6;
/// Maximum number of runs in a message.
pub const MOST_RUNS: usize = 1024;
/// Maximum number of ring entries in a submission.
pub const MOST_ENTRIES: usize = 120;
/// Maximum number of incomplete submissions per channel.
pub const MOST_BATCHES: usize = 4;
/// Maximum number of tables per VM.
pub const MOST_TABLES: u32 = 1 << 14;
/// Maximum number of address spaces per VM.
pub const MOST_SPACES: u32 = 1 << 10;

const HEAD: usize = 8;
const RUN: usize = 16;

/// Page size of a table.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Size {
    /// 4 KiB.
    Small,
    /// 128 KiB.
    Large,
}

/// Consecutive entries of a table that map consecutive pages, or that are not present.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Run {
    /// First entry.
    pub index: u16,
    /// Number of entries, at least 1.
    pub count: u16,
    /// The first 4 KiB of the first page; `None` if nothing is mapped.
    pub first: Option<Target>,
    /// Whether the pages are read-only.
    pub read_only: bool,
    /// Storage kind, as in page table entries.
    pub kind: u8,
}

/// A page directory entry; it refers to tables by number.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Directory {
    /// The table of small pages.
    pub small: Option<u32>,
    /// The table of large pages.
    pub large: Option<u32>,
    /// log2 of the divisor of a full table of large pages for its size, 0 to 3.
    pub large_shift: u8,
}

/// A request of a front.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Request {
    /// The first message. A front that has had a partition of an earlier mediator sends its file with it; the new
    /// partition then has that file's contents.
    Hello {
        /// [`VERSION`].
        version: u32,
        /// Bytes of VRAM, whole MiB.
        vram: u64,
        /// Maximum number of channels at a time, 1 to 128.
        channels: u8,
        /// Weight relative to other VMs.
        weight: u32,
    },
    /// The guest has RAM at these pages; the message carries the file.
    Ram {
        /// The first page.
        first: Gfn,
        /// Number of pages, at least 1.
        count: u32,
        /// Offset in the file.
        offset: u64,
    },
    /// A table that maps nothing yet.
    Table {
        /// Its number, which must be free.
        table: u32,
        /// Size of its pages.
        size: Size,
        /// The space that will refer to it first, whose quota it counts towards.
        space: u32,
    },
    /// A table is removed; no directory refers to it.
    TableGone {
        /// Its number.
        table: u32,
    },
    /// Sets entries of a table.
    Map {
        /// The table.
        table: u32,
        /// The entries.
        runs: Vec<Run>,
    },
    /// An address space that maps nothing yet.
    Space {
        /// Its number, which must be free.
        space: u32,
    },
    /// An address space is removed; no channel is bound to it.
    SpaceGone {
        /// Its number.
        space: u32,
    },
    /// Sets a directory entry.
    Link {
        /// The space.
        space: u32,
        /// Index of the entry.
        index: u16,
        /// Its value.
        entry: Directory,
    },
    /// Binds an unbound channel to an address space.
    Bind {
        /// The channel.
        channel: u8,
        /// The space.
        space: u32,
        /// Virtual addresses of the engines' state, as in an instance block.
        engines: [Option<u64>; gf100::format::instance::ENGINE_COUNT],
    },
    /// Sets new addresses of the engines' state of a bound channel.
    Engines {
        /// The channel.
        channel: u8,
        /// Virtual addresses, as in an instance block.
        engines: [Option<u64>; gf100::format::instance::ENGINE_COUNT],
    },
    /// Stops a channel's work where it is, and unbinds the channel.
    Unbind {
        /// The channel.
        channel: u8,
    },
    /// Stops the work of a bound channel where it is, or lets it continue. Its submissions wait meanwhile, and its time
    /// limit does not run.
    Stop {
        /// The channel.
        channel: u8,
        /// Whether it is stopped.
        stopped: bool,
    },
    /// Submits ring entries of a channel, to be executed after the earlier ones.
    Submit {
        /// The channel.
        channel: u8,
        /// The ring entries as the guest wrote them.
        entries: Vec<u64>,
    },
    /// Requests a reply when all earlier messages have been handled.
    Sync {
        /// Returned in [`Event::Synced`].
        number: u32,
    },
    /// Stops the work of all channels where it is, because the VM is paused, or lets it continue.
    /// Submissions wait meanwhile, and the time limit does not run.
    Hold {
        /// Whether the VM is paused.
        held: bool,
    },
}

/// A message of the mediator.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Event {
    /// The reply to [`Request::Hello`]; it carries the file of the partition.
    Welcome {
        /// [`VERSION`].
        version: u32,
        /// Size of VRAM in bytes, as requested.
        vram: u64,
    },
    /// The reply to [`Request::Sync`].
    Synced {
        /// Its number.
        number: u32,
    },
    /// The oldest submission of a channel has completed.
    Done {
        /// The channel.
        channel: u8,
    },
    /// A non-stall interrupt of some channel.
    NonStall,
    /// An address could not be used. The channel has ended.
    Fault {
        /// The channel.
        channel: u8,
        /// The unit that accessed it, as numbered in fault registers.
        unit: u8,
        /// The reason, as encoded in fault registers.
        reason: u8,
        /// Whether it was a write.
        write: bool,
        /// The address.
        address: u64,
    },
    /// A command failed and was skipped.
    Command {
        /// The channel.
        channel: u8,
        /// The status, as in the command unit's register.
        status: u32,
        /// Subchannel and address of the method.
        method: u32,
        /// Its word.
        data: u32,
    },
    /// A channel has kept the GPU for too long, and has ended.
    Late {
        /// The channel.
        channel: u8,
        /// The time that it took.
        after: Duration,
    },
}

/// An invalid message.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Nonsense {
    /// It has the wrong length.
    #[error("a message with opcode {opcode} has {len} bytes")]
    Length {
        /// Its opcode.
        opcode: u32,
        /// Its size in bytes.
        len: usize,
    },
    /// The opcode is unknown.
    #[error("there is no message with opcode {0}")]
    Opcode(u32),
    /// A field is out of range.
    #[error("{what} cannot be {value:#x}")]
    Value {
        /// The field.
        what: &'static str,
        /// Its value.
        value: u64,
    },
}

/// Reads consecutive fields.
struct Reader<'a> {
    opcode: u32,
    len: usize,
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn new(message: &'a [u8]) -> Result<(Self, u32), Nonsense> {
        let mut reader = Self {
            opcode: 0,
            len: message.len(),
            rest: message,
        };
        reader.opcode = reader.u32()?;
        let number = reader.u32()?;
        Ok((reader, number))
    }

    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], Nonsense> {
        let Some((head, rest)) = self.rest.split_first_chunk::<N>() else {
            return Err(self.length());
        };
        self.rest = rest;
        Ok(*head)
    }

    fn length(&self) -> Nonsense {
        Nonsense::Length {
            opcode: self.opcode,
            len: self.len,
        }
    }

    fn u32(&mut self) -> Result<u32, Nonsense> {
        self.bytes().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, Nonsense> {
        self.bytes().map(u64::from_le_bytes)
    }

    fn u16(&mut self) -> Result<u16, Nonsense> {
        self.bytes().map(u16::from_le_bytes)
    }

    fn u8(&mut self) -> Result<u8, Nonsense> {
        self.bytes().map(|[byte]| byte)
    }

    /// Number of records in the rest, 1 to `most`.
    fn count(&self, record: usize, most: usize) -> Result<usize, Nonsense> {
        let count = self.rest.len() / record;
        if !self.rest.len().is_multiple_of(record) || !(1..=most).contains(&count) {
            return Err(self.length());
        }
        Ok(count)
    }

    fn end<T>(self, value: T) -> Result<T, Nonsense> {
        if self.rest.is_empty() {
            Ok(value)
        } else {
            Err(self.length())
        }
    }
}

fn bad(what: &'static str, value: impl Into<u64>) -> Nonsense {
    Nonsense::Value {
        what,
        value: value.into(),
    }
}

fn channel(number: u32) -> Result<u8, Nonsense> {
    u8::try_from(number)
        .ok()
        .filter(|channel| *channel < gf100::registers::CHANNELS)
        .ok_or(bad("a channel", number))
}

fn below(what: &'static str, number: u32, end: u32) -> Result<u32, Nonsense> {
    if number < end {
        Ok(number)
    } else {
        Err(bad(what, number))
    }
}

fn page(number: u32) -> Result<Gfn, Nonsense> {
    below("a page", number, 1 << PAGE_NUMBER_BITS).map(Gfn)
}

const NOTHING: u8 = 0;
const VRAM: u8 = 1;
const RAM: u8 = 2;
const READ_ONLY: u8 = 0x80;

impl Run {
    fn parse(reader: &mut Reader) -> Result<Self, Nonsense> {
        let (index, count) = (reader.u16()?, reader.u16()?);
        let number = reader.u32()?;
        let (flags, kind) = (reader.u8()?, reader.u8()?);
        reader.bytes::<6>()?;
        below("a page", number, 1 << PAGE_NUMBER_BITS)?;
        if count == 0 {
            return Err(bad("a run's length", count));
        }
        let first = match flags & !READ_ONLY {
            NOTHING => None,
            VRAM => Some(Target::Vram(VramPage(number))),
            RAM => Some(Target::Ram(Gfn(number))),
            _ => return Err(bad("a run's memory", flags)),
        };
        Ok(Self {
            index,
            count,
            first,
            read_only: flags & READ_ONLY != 0,
            kind,
        })
    }

    fn encode(&self, to: &mut Vec<u8>) {
        let (flags, number) = match self.first {
            None => (NOTHING, 0),
            Some(Target::Vram(page)) => (VRAM, page.0),
            Some(Target::Ram(page)) => (RAM, page.0),
        };
        to.extend(self.index.to_le_bytes());
        to.extend(self.count.to_le_bytes());
        to.extend(number.to_le_bytes());
        to.push(flags | if self.read_only { READ_ONLY } else { 0 });
        to.push(self.kind);
        to.extend([0; 6]);
    }
}

type Engines = [Option<u64>; gf100::format::instance::ENGINE_COUNT];

fn engines(reader: &mut Reader) -> Result<Engines, Nonsense> {
    let mut engines = [None; gf100::format::instance::ENGINE_COUNT];
    for engine in &mut engines {
        let raw = reader.u64()?;
        *engine = (raw & 4 != 0).then_some(raw & 0xff_ffff_f000);
    }
    Ok(engines)
}

fn put_engines(engines: &Engines, message: &mut Vec<u8>) {
    for engine in engines {
        let raw = engine.map_or(0, |at| at & 0xff_ffff_f000 | 4);
        message.extend(raw.to_le_bytes());
    }
}

/// Starts a message.
fn start(opcode: u32, number: u32) -> Vec<u8> {
    let mut message = Vec::with_capacity(HEAD + 24);
    message.extend(opcode.to_le_bytes());
    message.extend(number.to_le_bytes());
    message
}

const NO_TABLE: u32 = u32::MAX;

impl Request {
    /// The number of page table entries that it sets.
    pub fn entries(&self) -> u64 {
        match self {
            Self::Map { runs, .. } => runs.iter().map(|run| u64::from(run.count)).sum(),
            _ => 0,
        }
    }

    /// Parses a message.
    pub fn parse(message: &[u8]) -> Result<Self, Nonsense> {
        let (mut reader, number) = Reader::new(message)?;
        let table = || below("a table", number, MOST_TABLES);
        let space = |number| below("a space", number, MOST_SPACES);
        let request = match reader.opcode {
            1 => Self::Hello {
                version: number,
                vram: reader.u64()?,
                channels: match reader.u32()? {
                    count @ 1..=128 => count as u8,
                    count => return Err(bad("a number of channels", count)),
                },
                weight: reader.u32()?,
            },
            2 => Self::Ram {
                first: page(number)?,
                count: match reader.u32()? {
                    0 => return Err(bad("a number of pages", 0_u32)),
                    count => below("a number of pages", count, (1 << PAGE_NUMBER_BITS) + 1)?,
                },
                offset: reader.u64()?,
            },
            4 => Self::Table {
                table: table()?,
                size: match reader.u32()? {
                    0 => Size::Small,
                    1 => Size::Large,
                    size => return Err(bad("a size of pages", size)),
                },
                space: space(reader.u32()?)?,
            },
            5 => Self::TableGone { table: table()? },
            6 => {
                let count = reader.count(RUN, MOST_RUNS)?;
                let mut runs = Vec::with_capacity(count);
                for _ in 0..count {
                    runs.push(Run::parse(&mut reader)?);
                }
                Self::Map {
                    table: table()?,
                    runs,
                }
            }
            7 => Self::Space {
                space: space(number)?,
            },
            8 => Self::SpaceGone {
                space: space(number)?,
            },
            9 => Self::link(space(number)?, &mut reader)?,
            10 => {
                let channel = channel(number)?;
                let space = space(reader.u32()?)?;
                Self::Bind {
                    channel,
                    space,
                    engines: engines(&mut reader)?,
                }
            }
            11 => Self::Unbind {
                channel: channel(number)?,
            },
            12 => {
                let count = reader.count(8, MOST_ENTRIES)?;
                let mut entries = Vec::with_capacity(count);
                for _ in 0..count {
                    entries.push(reader.u64()?);
                }
                Self::Submit {
                    channel: channel(number)?,
                    entries,
                }
            }
            13 => Self::Sync { number },
            15 => Self::Hold {
                held: below("a hold", number, 2)? == 1,
            },
            14 => Self::Engines {
                channel: channel(number)?,
                engines: engines(&mut reader)?,
            },
            16 => Self::Stop {
                channel: channel(number)?,
                stopped: below("a stop", reader.u32()?, 2)? == 1,
            },
            opcode => return Err(Nonsense::Opcode(opcode)),
        };
        reader.end(request)
    }

    fn link(space: u32, reader: &mut Reader) -> Result<Self, Nonsense> {
        let index = reader.u16()?;
        let large_shift = reader.u16()?;
        let mut table = || match reader.u32()? {
            NO_TABLE => Ok(None),
            number => below("a table", number, MOST_TABLES).map(Some),
        };
        let (small, large) = (table()?, table()?);
        let entries = gf100::format::directory::ENTRIES;
        if usize::from(index) >= entries || large_shift > 3 {
            return Err(bad("an entry of a directory", index));
        }
        let entry = Directory {
            small,
            large,
            large_shift: large_shift as u8,
        };
        Ok(Self::Link {
            space,
            index,
            entry,
        })
    }

    /// Encodes the message.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Hello {
                version,
                vram,
                channels,
                weight,
            } => {
                let mut message = start(1, *version);
                message.extend(vram.to_le_bytes());
                message.extend(u32::from(*channels).to_le_bytes());
                message.extend(weight.to_le_bytes());
                message
            }
            Self::Ram {
                first,
                count,
                offset,
            } => {
                let mut message = start(2, first.0);
                message.extend(count.to_le_bytes());
                message.extend(offset.to_le_bytes());
                message
            }
            Self::Table { table, size, space } => {
                let mut message = start(4, *table);
                message.extend(u32::from(*size == Size::Large).to_le_bytes());
                message.extend(space.to_le_bytes());
                message
            }
            Self::TableGone { table } => start(5, *table),
            Self::Map { table, runs } => {
                let mut message = start(6, *table);
                runs.iter().for_each(|run| run.encode(&mut message));
                message
            }
            Self::Space { space } => start(7, *space),
            Self::SpaceGone { space } => start(8, *space),
            Self::Link {
                space,
                index,
                entry,
            } => {
                let mut message = start(9, *space);
                message.extend(index.to_le_bytes());
                message.extend(u16::from(entry.large_shift).to_le_bytes());
                message.extend(entry.small.unwrap_or(NO_TABLE).to_le_bytes());
                message.extend(entry.large.unwrap_or(NO_TABLE).to_le_bytes());
                message
            }
            Self::Bind {
                channel,
                space,
                engines,
            } => {
                let mut message = start(10, u32::from(*channel));
                message.extend(space.to_le_bytes());
                put_engines(engines, &mut message);
                message
            }
            Self::Engines { channel, engines } => {
                let mut message = start(14, u32::from(*channel));
                put_engines(engines, &mut message);
                message
            }
            Self::Unbind { channel } => start(11, u32::from(*channel)),
            Self::Stop { channel, stopped } => {
                let mut message = start(16, u32::from(*channel));
                message.extend(u32::from(*stopped).to_le_bytes());
                message
            }
            Self::Submit { channel, entries } => {
                let mut message = start(12, u32::from(*channel));
                entries
                    .iter()
                    .for_each(|entry| message.extend(entry.to_le_bytes()));
                message
            }
            Self::Sync { number } => start(13, *number),
            Self::Hold { held } => start(15, u32::from(*held)),
        }
    }
}

impl Event {
    /// Parses a message. The mediator is trusted no more than a front.
    pub fn parse(message: &[u8]) -> Result<Self, Nonsense> {
        let (mut reader, number) = Reader::new(message)?;
        let event = match reader.opcode {
            1 => Self::Welcome {
                version: number,
                vram: reader.u64()?,
            },
            2 => Self::Synced { number },
            3 => Self::Done {
                channel: channel(number)?,
            },
            4 => Self::NonStall,
            5 => Self::Fault {
                channel: channel(number)?,
                unit: reader.u8()?,
                reason: reader.u8()?,
                write: reader.u16()? != 0,
                address: reader.u64()?,
            },
            6 => Self::Command {
                channel: channel(number)?,
                status: reader.u32()?,
                method: reader.u32()?,
                data: reader.u32()?,
            },
            7 => Self::Late {
                channel: channel(number)?,
                after: Duration::from_millis(reader.u32()?.into()),
            },
            opcode => return Err(Nonsense::Opcode(opcode)),
        };
        reader.end(event)
    }

    /// Encodes the message.
    pub fn encode(&self) -> Vec<u8> {
        match *self {
            Self::Welcome { version, vram } => {
                let mut message = start(1, version);
                message.extend(vram.to_le_bytes());
                message
            }
            Self::Synced { number } => start(2, number),
            Self::Done { channel } => start(3, channel.into()),
            Self::NonStall => start(4, 0),
            Self::Fault {
                channel,
                unit,
                reason,
                write,
                address,
            } => {
                let mut message = start(5, channel.into());
                message.extend([unit, reason]);
                message.extend(u16::from(write).to_le_bytes());
                message.extend(address.to_le_bytes());
                message
            }
            Self::Command {
                channel,
                status,
                method,
                data,
            } => {
                let mut message = start(6, channel.into());
                message.extend(status.to_le_bytes());
                message.extend(method.to_le_bytes());
                message.extend(data.to_le_bytes());
                message
            }
            Self::Late { channel, after } => {
                let mut message = start(7, channel.into());
                let millis = u32::try_from(after.as_millis()).unwrap_or(u32::MAX);
                message.extend(millis.to_le_bytes());
                message
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_can_be_read_is_written_alike(
            opcode in 0_u32..17,
            number in 0_u32..200,
            body in prop::collection::vec(any::<u8>(), 0..100),
        ) {
            let mut message = start(opcode, number);
            message.extend(body);
            if let Ok(request) = Request::parse(&message) {
                prop_assert_eq!(Request::parse(&request.encode()), Ok(request));
            }
            if let Ok(event) = Event::parse(&message) {
                prop_assert_eq!(Event::parse(&event.encode()), Ok(event));
            }
        }
    }

    #[test]
    fn counts_are_bounded() {
        let entries = |count| Request::Submit {
            channel: 1,
            entries: vec![0; count],
        };
        assert!(Request::parse(&entries(MOST_ENTRIES).encode()).is_ok());
        assert!(Request::parse(&entries(MOST_ENTRIES + 1).encode()).is_err());
        assert!(Request::parse(&entries(0).encode()).is_err());
        for number in [128, u32::MAX] {
            assert!(Request::parse(&start(11, number)).is_err(), "a channel");
        }
        let mut long = Request::Sync { number: 1 }.encode();
        long.push(0);
        assert!(Request::parse(&long).is_err());
    }
}
