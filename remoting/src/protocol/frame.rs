//! The header before each message.

use super::wire::{Malformed, Reader, Wire};

/// Size of a header in bytes.
pub const HEADER: usize = 16;
/// The largest message, in bytes, that is put together from fragments: a program's binary is
/// the largest thing that travels outside of the window.
pub const LARGEST: usize = 64 << 20;

/// Properties of a message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flags(pub u16);

impl Flags {
    /// The sender waits for an answer.
    pub const ANSWER: Self = Self(1);
    /// The message goes on in the next frame.
    pub const MORE: Self = Self(2);

    /// No other thread of the sender's application has made a call.
    pub const ALONE: Self = Self(4);

    /// Whether all of `other` is set.
    pub fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Both.
    #[must_use]
    pub fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// What stands before each message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Bytes of the message that follow the header.
    pub length: u32,
    /// Which call, or which kind of answer, it is.
    pub opcode: u16,
    /// Its properties.
    pub flags: Flags,
    /// The number that an answer repeats.
    pub sequence: u64,
}

impl Header {
    /// The header as bytes.
    pub fn to_bytes(self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[..4].copy_from_slice(&self.length.to_le_bytes());
        bytes[4..6].copy_from_slice(&self.opcode.to_le_bytes());
        bytes[6..8].copy_from_slice(&self.flags.0.to_le_bytes());
        bytes[8..].copy_from_slice(&self.sequence.to_le_bytes());
        bytes
    }

    /// Reads a header. The length is the peer's claim; whoever reads on checks it.
    pub fn from_bytes(bytes: &[u8; HEADER]) -> Self {
        let mut reader = Reader::new(bytes);
        // The array is exactly as long as these four fields, so that none of them is missing.
        let read = |reader: &mut Reader<'_>| -> Result<Self, Malformed> {
            Ok(Self {
                length: u32::take(reader)?,
                opcode: u16::take(reader)?,
                flags: Flags(u16::take(reader)?),
                sequence: u64::take(reader)?,
            })
        };
        read(&mut reader).unwrap_or(Self {
            length: 0,
            opcode: 0,
            flags: Flags(0),
            sequence: 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_survives_the_way_through_bytes() {
        let header = Header {
            length: 0x0102_0304,
            opcode: 0x0506,
            flags: Flags::ANSWER.with(Flags::MORE),
            sequence: 0x0708_090a_0b0c_0d0e,
        };
        assert_eq!(Header::from_bytes(&header.to_bytes()), header);
    }
}
