//! Requests as the driver writes them (virtio 1.2, 5.2.6), read once and checked.
//!
//! The device makes no assumption on how a request is split into descriptors (virtio 1.2,
//! 2.7.4.1): the first 16 readable bytes are the header, the last writable byte is the status.

use std::ops::Deref;

use device_model::memory::GuestRam;
use virtio_bindings::bindings::virtio_blk::{
    VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN,
    VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES,
};
use virtio_queue::DescriptorChain;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

/// Descriptors that a request may have: what the driver is told (`seg_max`) and the two around
/// the data, with room for drivers that count otherwise. Bounds the memory that a chain costs.
pub const MAX_DESCRIPTORS: usize = 1024;

/// Bytes in a header.
const HEADER: usize = 16;

/// Bytes in a discard or write-zeroes segment.
const SEGMENT: usize = 16;

/// A part of a descriptor chain: guest memory in pieces.
#[derive(Debug, Default)]
pub struct Pieces {
    pieces: Vec<(GuestAddress, u32)>,
    first: usize,
}

impl Pieces {
    fn clear(&mut self) {
        self.pieces.clear();
        self.first = 0;
    }

    fn push(&mut self, address: GuestAddress, len: u32) {
        if len > 0 {
            self.pieces.push((address, len));
        }
    }

    /// What is left of it.
    pub fn iter(&self) -> impl Iterator<Item = (GuestAddress, u32)> + '_ {
        self.pieces[self.first..].iter().copied()
    }

    /// Length in bytes. A chain has less than 2^32 (virtio 1.2, 2.7.5.2; `DescriptorChain` ends
    /// it there).
    pub fn len(&self) -> u64 {
        self.iter().map(|(_, len)| u64::from(len)).sum()
    }

    fn is_empty(&self) -> bool {
        self.first == self.pieces.len()
    }

    /// Reads and drops bytes from the front; false if there are too few or they are not RAM.
    fn take_front(&mut self, memory: &GuestRam, mut bytes: &mut [u8]) -> bool {
        while !bytes.is_empty() {
            let Some((address, len)) = self.pieces.get_mut(self.first) else {
                return false;
            };
            let count = bytes.len().min(*len as usize);
            let (head, tail) = bytes.split_at_mut(count);
            if memory.read_slice(head, *address).is_err() {
                return false;
            }
            // Cannot wrap: the piece was just read. `count` is at most `len`.
            *address = GuestAddress(address.0.wrapping_add(count as u64));
            *len -= count as u32;
            if *len == 0 {
                self.first += 1;
            }
            bytes = tail;
        }
        true
    }

    /// Drops the last byte and says where it is.
    fn take_last(&mut self) -> Option<GuestAddress> {
        let (address, len) = self.pieces.last_mut()?;
        // Pieces are never empty. A wrapped address fails when it is used.
        *len -= 1;
        let at = GuestAddress(address.0.wrapping_add(u64::from(*len)));
        if *len == 0 {
            self.pieces.pop();
        }
        Some(at)
    }

    /// Writes to the front, as much as fits; the count, or `None` if that is not RAM.
    pub fn write(&self, memory: &GuestRam, mut bytes: &[u8]) -> Option<u32> {
        let mut written = 0;
        for (address, len) in self.iter() {
            let (head, tail) = bytes.split_at(bytes.len().min(len as usize));
            memory.write_slice(head, address).ok()?;
            written += head.len() as u32;
            bytes = tail;
        }
        Some(written)
    }
}

/// A range of sectors to discard or zero.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Range {
    /// First sector.
    pub sector: u64,
    /// How many.
    pub count: u32,
    /// `VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP` and reserved bits.
    pub flags: u32,
}

/// What a request wants.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Command {
    /// Sectors to the writable pieces.
    Read {
        /// First sector.
        sector: u64,
    },
    /// Readable pieces to sectors.
    Write {
        /// First sector.
        sector: u64,
    },
    /// Writes that have completed become stable.
    Flush,
    /// The serial number.
    GetId,
    /// Sectors that are no longer needed.
    Discard(Range),
    /// Sectors that shall read as zeroes.
    WriteZeroes(Range),
    /// Something that the device does not know.
    Unknown(u32),
    /// No header, no segment, or not exactly one.
    Invalid,
}

/// Takes descriptor chains apart. Keeps its allocations from one request to the next.
#[derive(Debug, Default)]
pub struct Parser {
    /// What the driver sends, without the header.
    pub readable: Pieces,
    /// What the device fills, without the status.
    pub writable: Pieces,
}

impl Parser {
    /// Reads a request: its command, and where its status goes. `None` if there is no place for
    /// a status, so that the driver cannot be answered.
    pub fn parse<M>(
        &mut self,
        chain: DescriptorChain<M>,
        memory: &GuestRam,
    ) -> Option<(Command, GuestAddress)>
    where
        M: Deref<Target = GuestRam>,
    {
        self.readable.clear();
        self.writable.clear();
        for (number, descriptor) in chain.enumerate() {
            if number >= MAX_DESCRIPTORS {
                return None;
            }
            if descriptor.is_write_only() {
                self.writable.push(descriptor.addr(), descriptor.len());
            } else if self.writable.is_empty() {
                self.readable.push(descriptor.addr(), descriptor.len());
            } else {
                // Readable after writable (virtio 1.2, 2.7.4.2).
                return None;
            }
        }
        let status = self.writable.take_last()?;
        if !memory.address_in_range(status) {
            return None;
        }
        Some((self.command(memory), status))
    }

    fn command(&mut self, memory: &GuestRam) -> Command {
        let mut header = [0; HEADER];
        if !self.readable.take_front(memory, &mut header) {
            return Command::Invalid;
        }
        let kind = number(&header, 0, 4) as u32;
        let sector = number(&header, 8, 8);
        match kind {
            VIRTIO_BLK_T_IN => Command::Read { sector },
            VIRTIO_BLK_T_OUT => Command::Write { sector },
            VIRTIO_BLK_T_FLUSH => Command::Flush,
            VIRTIO_BLK_T_GET_ID => Command::GetId,
            VIRTIO_BLK_T_DISCARD => self
                .range(memory)
                .map_or(Command::Invalid, Command::Discard),
            VIRTIO_BLK_T_WRITE_ZEROES => self
                .range(memory)
                .map_or(Command::Invalid, Command::WriteZeroes),
            other => Command::Unknown(other),
        }
    }

    /// The only segment of a discard or write-zeroes request; the driver is told not to send
    /// more than one.
    fn range(&mut self, memory: &GuestRam) -> Option<Range> {
        let mut segment = [0; SEGMENT];
        (self.readable.take_front(memory, &mut segment) && self.readable.is_empty()).then(|| {
            Range {
                sector: number(&segment, 0, 8),
                count: number(&segment, 8, 4) as u32,
                flags: number(&segment, 12, 4) as u32,
            }
        })
    }
}

/// The little-endian number of `len` bytes at `at`.
fn number(bytes: &[u8], at: usize, len: usize) -> u64 {
    bytes[at..at + len]
        .iter()
        .rev()
        .fold(0, |value, byte| value << 8 | u64::from(*byte))
}
