//! Native contexts: what the agent in a guest, the worker on the host and the machine between them say to each other.
//!
//! ```text
//!   program ─ socket ─> agent ─ rings of the slice ─> worker ─ device files
//!      │                                                │
//!      └─ window, device pages <─ the machine <─ pages ─┘
//! ```
//!
//! A port for native contexts has one slice: its whole window. The worker serves all programs of the guest, and hands
//! out parts of the window's data. The agent carries the packets of each program's connection, as `nvidia-abi`'s wire
//! defines them, as messages over the slice's rings. The first 16 bytes of a message are the frame's header; the rest is
//! its body.
//!
//! Over the connection that the attachment came with, the worker then has the machine show pages of device files in
//! BAR 4 of the port: a [`PageRequest`] each, which the machine answers with a [`PageAnswer`] before the next.

use crate::wire::{
    api::{ApiId, Spoken},
    hello::{NUMBER, Version},
};

/// The version of these messages.
const VERSION: u64 = 1;

/// Native contexts, as this build speaks them.
pub const SPOKEN: Spoken = Spoken {
    api: ApiId::Nvidia,
    version: Version {
        number: NUMBER,
        fingerprint: VERSION,
    },
};

/// Numbers of the agent's messages, in the header's `opcode`.
pub mod to_worker {
    /// A program connects. `sequence`: the number of its session, which no other program has; the body is the number of
    /// its user, 4 bytes.
    pub const BEGIN: u16 = 1;
    /// A program's request. `sequence`: its session; the body is the packet. A session has one request at a time.
    pub const REQUEST: u16 = 2;
    /// A program has disconnected, and its process does not use the memory of the window any longer that it had taken.
    /// `sequence`: its session. The worker answers [`ENDED`](super::to_agent::ENDED) when nothing of the session is under
    /// way any longer, also if it has ended the session by itself before.
    pub const END: u16 = 3;
    /// Nobody has a file any longer. `sequence`: its number.
    pub const CLOSE: u16 = 4;
}

/// Numbers of the worker's messages, in the header's `opcode`.
pub mod to_agent {
    /// The answer to a session's request. `sequence`: the session; the body is the packet.
    pub const ANSWER: u16 = 1;
    /// A file has an event. `sequence`: its number.
    pub const EVENT: u16 = 2;
    /// A session has ended. `sequence`: its number, which another program may have once the agent has said
    /// [`END`](super::to_worker::END) and this is the answer. Without that, the worker has ended it by itself; the memory
    /// that the program had taken stays its own.
    pub const ENDED: u16 = 3;
}

/// What the worker wants of BAR 4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageRequest {
    /// Show the first `length` bytes of the first file that comes along at `offset` of BAR 4, and keep the second one open
    /// as long: what the driver frees when the worker's files are closed is then not freed before, even if the worker is
    /// killed.
    Place {
        /// A multiple of [`PAGE`].
        offset: u64,
        /// A multiple of [`PAGE`], not 0.
        length: u64,
        /// Whether the guest may write there.
        writable: bool,
    },
    /// Show nothing any longer where `length` bytes were placed at `offset`. The guest's accesses have no effect on the
    /// device once this is answered.
    Remove {
        /// As it was placed.
        offset: u64,
        /// As it was placed.
        length: u64,
    },
}

/// The unit of places in BAR 4, in bytes.
pub const PAGE: u64 = 4096;

impl PageRequest {
    /// Encoded size in bytes.
    pub const SIZE: usize = 24;

    /// The request as bytes.
    pub fn to_bytes(self) -> [u8; Self::SIZE] {
        let (kind, offset, length) = match self {
            Self::Place {
                offset,
                length,
                writable,
            } => (1 + u64::from(writable), offset, length),
            Self::Remove { offset, length } => (3, offset, length),
        };
        let mut bytes = [0; Self::SIZE];
        for (place, word) in bytes.chunks_exact_mut(8).zip([kind, offset, length]) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Decodes a request. `None`: it is none. The caller checks that its range lies in BAR 4.
    pub fn from_bytes(bytes: &[u8; Self::SIZE]) -> Option<Self> {
        let word = |at: usize| {
            let word = bytes.get(at..)?.first_chunk()?;
            Some(u64::from_le_bytes(*word))
        };
        let (offset, length) = (word(8)?, word(16)?);
        let fits = offset.is_multiple_of(PAGE) && length.is_multiple_of(PAGE) && length > 0;
        let kind = word(0).filter(|_| fits && offset.checked_add(length).is_some())?;
        match kind {
            1 | 2 => Some(Self::Place {
                offset,
                length,
                writable: kind == 2,
            }),
            3 => Some(Self::Remove { offset, length }),
            _ => None,
        }
    }
}

/// The machine's answer to a [`PageRequest`]: 0, or an error number of the system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageAnswer(pub u32);

impl PageAnswer {
    /// Encoded size in bytes.
    pub const SIZE: usize = 4;

    /// The answer as bytes.
    pub fn to_bytes(self) -> [u8; Self::SIZE] {
        self.0.to_le_bytes()
    }

    /// Decodes an answer.
    pub fn from_bytes(bytes: [u8; Self::SIZE]) -> Self {
        Self(u32::from_le_bytes(bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_request_survives_the_way_through_bytes() {
        let place = |writable| PageRequest::Place {
            offset: 0x3_0000,
            length: 0x1_0000,
            writable,
        };
        let remove = PageRequest::Remove {
            offset: 4096,
            length: 4096,
        };
        for request in [place(false), place(true), remove] {
            assert_eq!(PageRequest::from_bytes(&request.to_bytes()), Some(request));
        }
    }

    #[test]
    fn a_range_that_is_no_whole_pages_or_wraps_is_no_request() {
        for (offset, length) in [(1, 4096), (0, 0), (0, 4095), (u64::MAX - 4095, 8192)] {
            let request = PageRequest::Remove { offset, length };
            assert_eq!(PageRequest::from_bytes(&request.to_bytes()), None);
        }
        let unknown = PageRequest::Remove {
            offset: 0,
            length: 4096,
        };
        for kind in [0, 4, u8::MAX] {
            let mut bytes = unknown.to_bytes();
            bytes[0] = kind;
            assert_eq!(PageRequest::from_bytes(&bytes), None);
        }
    }
}
