//! Splits the bytes of a connection into frames.

use remoting_proto::wire::frame::{HEADER, Header};
pub use remoting_proto::wire::messages::DATA;
use remoting_transport::endpoint::Gone;

/// Maximum bytes of window data in a frame.
pub const CHUNK: usize = 64 << 10;
/// Maximum size of a frame's body in bytes: four of them fit into a ring of 1 MiB.
pub const LARGEST: usize = 256 << 10;
/// Maximum bytes collected before they are written.
pub const BATCH: usize = 128 << 10;

/// Received bytes, consumed frame by frame. Holds one frame of maximum size.
#[derive(Debug)]
pub struct Received {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Default for Received {
    fn default() -> Self {
        Self {
            bytes: vec![0; HEADER + LARGEST].into_boxed_slice(),
            start: 0,
            end: 0,
        }
    }
}

impl Received {
    /// The buffer to receive into: never empty after [`take`](Self::take) has returned `None`.
    pub fn space(&mut self) -> &mut [u8] {
        if self.start > 0 {
            self.bytes.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        &mut self.bytes[self.end..]
    }

    /// Records that `count` bytes were received into the buffer.
    pub fn fill(&mut self, count: usize) {
        self.end = (self.end + count).min(self.bytes.len());
    }

    /// The next frame, if it is complete.
    pub fn take(&mut self) -> Result<Option<(Header, &[u8])>, Gone> {
        let held = &self.bytes[self.start..self.end];
        let Some((header, rest)) = held.split_first_chunk() else {
            return Ok(None);
        };
        let header = Header::from_bytes(header);
        let length = header.length as usize;
        let most = if header.opcode == DATA {
            CHUNK
        } else {
            LARGEST
        };
        if length > most {
            return Err(Gone::Length(length));
        }
        if rest.len() < length {
            return Ok(None);
        }
        let body = self.start + HEADER;
        self.start = body + length;
        Ok(Some((header, &self.bytes[body..self.start])))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use remoting_proto::wire::Flags;

    fn header(opcode: u16, length: u32) -> Header {
        Header {
            length,
            opcode,
            flags: Flags::default(),
            sequence: 7,
        }
    }

    #[test]
    fn a_length_that_may_not_be_is_refused_by_its_header_alone() {
        for (opcode, length) in [
            (10, LARGEST + 1),
            (DATA, CHUNK + 1),
            (10, u32::MAX as usize),
        ] {
            let mut received = Received::default();
            received.space()[..HEADER].copy_from_slice(&header(opcode, length as u32).to_bytes());
            received.fill(HEADER);
            assert_eq!(received.take(), Err(Gone::Length(length)));
        }
    }

    proptest! {
        #[test]
        fn frames_come_out_as_they_went_in_however_the_bytes_are_cut(
            lengths in prop::collection::vec(0usize..70_000, 1..12),
            cuts in prop::collection::vec(1usize..100_000, 1..40),
        ) {
            let mut bytes = Vec::new();
            for (index, &length) in lengths.iter().enumerate() {
                bytes.extend(header(index as u16 + 10, length as u32).to_bytes());
                bytes.extend(std::iter::repeat_n(index as u8, length));
            }
            let mut received = Received::default();
            let mut rest = &bytes[..];
            let mut cuts = cuts.iter().cycle();
            let mut seen = 0;
            while seen < lengths.len() {
                while let Some((header, body)) = received.take().unwrap() {
                    prop_assert_eq!(usize::from(header.opcode), seen + 10);
                    prop_assert!(body.len() == lengths[seen]);
                    prop_assert!(body.iter().all(|byte| usize::from(*byte) == seen));
                    seen += 1;
                }
                let space = received.space();
                prop_assert!(!space.is_empty());
                let count = (*cuts.next().unwrap()).min(space.len()).min(rest.len());
                space[..count].copy_from_slice(&rest[..count]);
                rest = &rest[count..];
                received.fill(count);
            }
        }
    }
}
