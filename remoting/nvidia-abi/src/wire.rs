//! Messages between a program's library and the worker.
//!
//! Each is one packet of a connection (`SOCK_SEQPACKET`): a [`Request`] or [`Answer`], [`HEADER`] bytes in little
//! endian, then `length` bytes. Files travel with the packet. The library sends one request at a time.

use crate::walk::Kind;

/// The version of these messages. Both sides compare it in [`Operation::Hello`].
pub const VERSION: u32 = 4;
/// Bytes of a header.
pub const HEADER: usize = 32;
/// The most bytes that follow a header: more than the longest call carries.
pub const MOST: usize = 64 << 10;
/// Bytes of the token of a file.
pub const TOKEN: usize = 16;

/// Where a mapping is from: the slice.
pub const SLICE: u64 = 0;
/// Where a mapping is from: the descriptor that comes along.
pub const DEVICE: u64 = 1;
/// Where a mapping is from: the slice, and it is managed memory. Whoever unmaps all of it frees the range.
pub const MANAGED: u64 = 2;

/// What a request asks for. The words `a` and `b` and the bytes are what the variant says; the rest is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Operation {
    /// The first request. `a`: [`VERSION`]. Answer: `a` bytes of the slice, whose file comes along; the bytes are
    /// the driver's version.
    Hello = 1,
    /// Opens the device file whose path the bytes are. `a`: flags of `open`. Answer: `a` is the file's number, `b`
    /// its [`Kind`]; the bytes are its token; the program's descriptor comes along.
    Open,
    /// What `stat` says of the device file whose path the bytes are. Answer: `a` is the device, `b` the mode.
    Stat,
    /// The token of the file whose descriptor comes along. Answer: the bytes.
    Identify,
    /// Uses the file whose token the bytes are. Answer: as for `Open`, without bytes and descriptor.
    Adopt,
    /// Makes a call on `file`. `a`: the argument; `b`: the command. The bytes are its segments. Answer: its result and
    /// the segments. Descriptor memory lies in the slice, or in the file of shared memory whose descriptor comes along;
    /// its block has the offset there instead of the address.
    Call,
    /// Where to map `file` from. `a`: the offset; `b`: the length. Answer: `a` is [`SLICE`], [`MANAGED`] or [`DEVICE`],
    /// and `b` the offset there.
    Map,
    /// Takes `a` bytes of the slice. Answer: `a` is their offset.
    Pages,
    /// Gives back what begins at offset `a` of the slice.
    Return,
}

impl Operation {
    fn from_number(number: u32) -> Option<Self> {
        use Operation::{Adopt, Call, Hello, Identify, Map, Open, Pages, Return, Stat};
        let all = [Hello, Open, Stat, Identify, Adopt, Call, Map, Pages, Return];
        all.into_iter()
            .find(|operation| *operation as u32 == number)
    }
}

impl Kind {
    /// Its number in an answer.
    #[must_use]
    pub fn number(self) -> u64 {
        match self {
            Self::Frontend => 0,
            Self::Uvm => 1,
        }
    }

    /// The kind with this number.
    #[must_use]
    pub fn from_number(number: u64) -> Option<Self> {
        [Self::Frontend, Self::Uvm]
            .into_iter()
            .find(|kind| kind.number() == number)
    }
}

/// What begins a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// What it asks for.
    pub operation: Operation,
    /// The number of the file that it is about.
    pub file: u32,
    /// A word.
    pub a: u64,
    /// A word.
    pub b: u64,
    /// Bytes that follow, at most [`MOST`].
    pub length: u32,
}

/// What begins an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// What the call returned, or a negative error number.
    pub result: i32,
    /// A word.
    pub a: u64,
    /// A word.
    pub b: u64,
    /// Bytes that follow, at most [`MOST`].
    pub length: u32,
}

impl Request {
    /// Its bytes.
    #[must_use]
    pub fn to_bytes(self) -> [u8; HEADER] {
        header(
            self.operation as u32,
            self.file,
            self.a,
            self.b,
            self.length,
        )
    }

    /// The request that a packet begins with, and the bytes that follow. `None`: the packet is no request.
    #[must_use]
    pub fn from_packet(packet: &[u8]) -> Option<(Self, &[u8])> {
        let (head, bytes) = packet.split_first_chunk()?;
        let [operation, file, length] = words(head);
        let request = Self {
            operation: Operation::from_number(operation)?,
            file,
            a: long(head, 16),
            b: long(head, 24),
            length,
        };
        follows(bytes, length).then_some((request, bytes))
    }
}

impl Answer {
    /// Its bytes.
    #[must_use]
    pub fn to_bytes(self) -> [u8; HEADER] {
        header(self.result.cast_unsigned(), 0, self.a, self.b, self.length)
    }

    /// The answer that a packet begins with, and the bytes that follow. `None`: the packet is no answer.
    #[must_use]
    pub fn from_packet(packet: &[u8]) -> Option<(Self, &[u8])> {
        let (head, bytes) = packet.split_first_chunk()?;
        let [result, _, length] = words(head);
        let answer = Self {
            result: result.cast_signed(),
            a: long(head, 16),
            b: long(head, 24),
            length,
        };
        follows(bytes, length).then_some((answer, bytes))
    }
}

fn follows(bytes: &[u8], length: u32) -> bool {
    bytes.len() <= MOST && bytes.len() == length as usize
}

fn header(first: u32, second: u32, a: u64, b: u64, length: u32) -> [u8; HEADER] {
    let mut bytes = [0; HEADER];
    bytes[..4].copy_from_slice(&first.to_le_bytes());
    bytes[4..8].copy_from_slice(&second.to_le_bytes());
    bytes[8..12].copy_from_slice(&length.to_le_bytes());
    bytes[16..24].copy_from_slice(&a.to_le_bytes());
    bytes[24..32].copy_from_slice(&b.to_le_bytes());
    bytes
}

fn words(head: &[u8; HEADER]) -> [u32; 3] {
    [0, 4, 8]
        .map(|at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]))
}

fn long(head: &[u8; HEADER], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&head[at..at + 8]);
    u64::from_le_bytes(word)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    extern crate std;
    use std::vec::Vec;

    proptest! {
        #[test]
        fn a_packet_is_read_as_it_was_written(a: u64, b: u64, file: u32, result: i32, bytes: Vec<u8>) {
            let length = bytes.len() as u32;
            let request = Request { operation: Operation::Call, file, a, b, length };
            let packet = [&request.to_bytes()[..], &bytes].concat();
            prop_assert_eq!(Request::from_packet(&packet), Some((request, &bytes[..])));
            let answer = Answer { result, a, b, length };
            let packet = [&answer.to_bytes()[..], &bytes].concat();
            prop_assert_eq!(Answer::from_packet(&packet), Some((answer, &bytes[..])));
        }

        #[test]
        fn a_packet_of_another_length_than_it_says_is_none(bytes: Vec<u8>, length: u32) {
            prop_assume!(bytes.len() != length as usize);
            let answer = Answer { length, ..Answer::default() };
            let packet = [&answer.to_bytes()[..], &bytes].concat();
            prop_assert_eq!(Answer::from_packet(&packet), None);
        }
    }

    #[test]
    fn an_unknown_operation_or_a_short_packet_is_none() {
        for number in [0, 10, u32::MAX] {
            assert_eq!(Request::from_packet(&header(number, 0, 0, 0, 0)), None);
        }
        assert_eq!(
            Request::from_packet(&header(1, 0, 0, 0, 0)[..HEADER - 1]),
            None
        );
    }
}
