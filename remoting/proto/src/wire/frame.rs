//! The header before each message.

/// Size of a header in bytes.
pub const HEADER: usize = 16;
/// The largest message, in bytes, that may be assembled from fragments. A program's binary is the
/// largest thing that is sent outside the window.
pub const LARGEST: usize = 64 << 20;

/// Properties of a message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flags(pub u16);

impl Flags {
    /// The sender waits for an answer.
    pub const ANSWER: Self = Self(1);
    /// The message continues in the next frame.
    pub const MORE: Self = Self(2);

    /// No other thread of the sender's application has made a call.
    pub const ALONE: Self = Self(4);

    /// Whether all flags of `other` are set.
    pub fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// The union of both.
    #[must_use]
    pub fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// The header before each message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Number of bytes of the message that follow the header.
    pub length: u32,
    /// Which call, or which kind of answer, the message is.
    pub opcode: u16,
    /// The message's flags.
    pub flags: Flags,
    /// The sequence number, which the answer repeats.
    pub sequence: u64,
}

impl Header {
    /// The header as bytes.
    pub fn to_bytes(self) -> [u8; HEADER] {
        let word = u128::from(self.length)
            | u128::from(self.opcode) << 32
            | u128::from(self.flags.0) << 48
            | u128::from(self.sequence) << 64;
        word.to_le_bytes()
    }

    /// Decodes a header. The length is the peer's claim; the caller checks it.
    pub fn from_bytes(bytes: &[u8; HEADER]) -> Self {
        let word = u128::from_le_bytes(*bytes);
        Self {
            length: word as u32,
            opcode: (word >> 32) as u16,
            flags: Flags((word >> 48) as u16),
            sequence: (word >> 64) as u64,
        }
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
