//! Requests from the driver (virtio 1.2, 5.2.6), read once and validated.
//!
//! The device makes no assumption about how a request is split into descriptors (virtio 1.2,
//! 2.7.4.1): the first 16 readable bytes are the header, the last writable byte is the status.

use std::ops::Deref;

use device_model::memory::GuestRam;
use virtio_bindings::bindings::virtio_blk::{
    VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN,
    VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES,
};
use virtio_queue::DescriptorChain;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

/// Maximum number of descriptors in a request: the advertised `seg_max` plus the two around the
/// data, with room for drivers that count differently. Bounds the memory that a chain costs.
pub const MAX_DESCRIPTORS: usize = 1024;

/// Size of a header in bytes.
const HEADER: usize = 16;

/// Size of a discard or write-zeroes segment in bytes.
const SEGMENT: usize = 16;

/// One direction of a descriptor chain: a list of pieces of guest memory.
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

    /// The remaining pieces.
    pub fn iter(&self) -> impl Iterator<Item = (GuestAddress, u32)> + '_ {
        self.pieces[self.first..].iter().copied()
    }

    /// The pieces of `len` bytes from `first` on; fewer if the pieces end before that.
    pub fn range(&self, first: u64, len: u64) -> impl Iterator<Item = (GuestAddress, u32)> + '_ {
        let (mut skip, mut left) = (first, len);
        self.iter().filter_map(move |(address, len)| {
            let skipped = skip.min(u64::from(len));
            skip -= skipped;
            let count = (u64::from(len) - skipped).min(left);
            left -= count;
            // A wrapped address is not RAM. At most `len`, which is a u32.
            let address = GuestAddress(address.0.wrapping_add(skipped));
            (count > 0).then_some((address, count as u32))
        })
    }

    /// Length in bytes. A chain has less than 2^32 bytes (virtio 1.2, 2.7.5.2; `DescriptorChain`
    /// stops there).
    pub fn len(&self) -> u64 {
        self.iter().map(|(_, len)| u64::from(len)).sum()
    }

    fn is_empty(&self) -> bool {
        self.first == self.pieces.len()
    }

    /// Consumes bytes from the front; false if there are too few or they are not in RAM.
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

    /// Removes the last byte and returns its address.
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

    /// Writes as much as fits to the front. Returns the number of bytes, or `None` if the target is
    /// not RAM.
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
    /// Number of sectors.
    pub count: u32,
    /// `VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP` and reserved bits.
    pub flags: u32,
}

/// The operation that a request asks for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Command {
    /// Read sectors into the writable pieces.
    Read {
        /// First sector.
        sector: u64,
    },
    /// Write the readable pieces to sectors.
    Write {
        /// First sector.
        sector: u64,
    },
    /// Make completed writes stable.
    Flush,
    /// Return the serial number.
    GetId,
    /// Discard sectors that are no longer needed.
    Discard(Range),
    /// Make sectors read as zeroes.
    WriteZeroes(Range),
    /// A request type that the device does not support.
    Unknown(u32),
    /// The header or segment is missing, or there is more than one segment.
    Invalid,
}

/// Parses descriptor chains. Reuses its allocations from one request to the next.
#[derive(Debug, Default)]
pub struct Parser {
    /// What the driver sends, without the header.
    pub readable: Pieces,
    /// What the device fills, without the status.
    pub writable: Pieces,
}

impl Parser {
    /// Parses a request: its command, and the address of its status. `None` if the chain has no
    /// valid status field, or is malformed, so that the driver cannot be sent a status.
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
                // A readable descriptor after a writable one (virtio 1.2, 2.7.4.2).
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

    /// The only segment of a discard or write-zeroes request; the configuration tells the driver
    /// not to send more than one.
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
