//! Frames: a header of 24 bytes, followed by the contents.
//!
//! | bytes | what |
//! |---|---|
//! | 0-3 | `GMIG` |
//! | 4 | kind |
//! | 5 | flags: bit 0: no checksum of the contents |
//! | 6-7 | stream, of several connections |
//! | 8-11 | round |
//! | 12-15 | length of the contents |
//! | 16-19 | CRC-32 of the contents |
//! | 20-23 | CRC-32 of the 20 bytes before |
//!
//! All numbers are little-endian.

use super::{Error, Result, archive, lanes::TOKEN};

/// Size of a header in bytes.
pub const HEADER: usize = 24;
/// Magic number at the start of a header.
pub(super) const MAGIC: [u8; 4] = *b"GMIG";

/// Flag: the contents have no checksum. Only for pages on a connection that guarantees integrity.
const UNCHECKED: u8 = 1;

/// Maximum number of bytes of pages in a frame.
pub const MAX_PAGES: usize = 1 << 20;
/// Maximum number of runs of pages in a frame.
pub const MAX_RUNS: usize = 1024;
/// Size of an encoded run in bytes.
pub const RUN: usize = 16;

/// Kind of a frame.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u8)]
pub enum Kind {
    /// To the destination: the machine to migrate.
    Offer = 1,
    /// To the source: the machine has been created and has memory.
    Prepared = 2,
    /// Pages.
    Pages = 3,
    /// The round is over; acknowledged with the same kind when everything has arrived.
    Barrier = 4,
    /// State of devices and vCPUs.
    State = 5,
    /// To the source: the machine is ready to run.
    Ready = 6,
    /// To the destination: the locks are released; run the machine.
    Go = 7,
    /// To the source: the machine runs at the destination.
    Running = 8,
    /// Either way: the migration has failed, with reasons.
    Failed = 9,
    /// To the source: the machine does not and will not run at the destination, although GO has arrived.
    Denied = 10,
    /// To the destination, right after the offer: a file that is handed over with the machine.
    File = 11,
    /// To the destination, first frame of a further connection: it will carry pages; acknowledged with the same kind.
    Join = 12,
    /// To the destination, before the state or a copy: a part of the applications' saved state.
    Archive = 13,
    /// To the destination: the frames before were a copy of applications, which still run; acknowledged with the same
    /// kind when workers have restored it.
    Copy = 14,
    /// To the source, when the machine runs: requests contents of an application's memory that were left to follow.
    Fetch = 15,
    /// To the destination, after archive frames: these were all, or why there are none.
    Fetched = 16,
    /// To the source: an application needs no more contents.
    Drained = 17,
}

impl Kind {
    fn from_byte(byte: u8) -> Option<Self> {
        [
            Self::Offer,
            Self::Prepared,
            Self::Pages,
            Self::Barrier,
            Self::State,
            Self::Ready,
            Self::Go,
            Self::Running,
            Self::Failed,
            Self::Denied,
            Self::File,
            Self::Join,
            Self::Archive,
            Self::Copy,
            Self::Fetch,
            Self::Fetched,
            Self::Drained,
        ]
        .into_iter()
        .find(|kind| *kind as u8 == byte)
    }

    /// Maximum length of its contents in bytes.
    pub fn limit(self) -> usize {
        match self {
            Self::Offer => 16 << 20,
            Self::Pages => 4 + MAX_RUNS * RUN + MAX_PAGES,
            Self::State => 256 << 20,
            Self::File => 4 << 10,
            Self::Join => TOKEN,
            Self::Archive => archive::FRAME,
            Self::Copy => 16 << 20,
            Self::Failed
            | Self::Prepared
            | Self::Denied
            | Self::Fetch
            | Self::Fetched
            | Self::Drained => 64 << 10,
            Self::Barrier | Self::Ready | Self::Go | Self::Running => 0,
        }
    }
}

/// A header.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Header {
    /// Kind of the frame.
    pub kind: Kind,
    /// Number of the round, from 0; 0 outside of rounds.
    pub round: u32,
    /// Length of the contents in bytes: at most [`Kind::limit`].
    pub length: usize,
    crc: Option<u32>,
}

impl Header {
    /// The header of a frame with the given contents.
    pub fn of(kind: Kind, round: u32, contents: &[u8], checked: bool) -> Self {
        Self {
            kind,
            round,
            length: contents.len(),
            crc: checked.then(|| crc32fast::hash(contents)),
        }
    }

    /// The header of a page frame: a list of runs, followed by `pages` bytes of pages, with the checksum `crc`.
    pub fn of_pages(round: u32, list: &[u8], pages: usize, crc: Option<u32>) -> Self {
        Self {
            kind: Kind::Pages,
            round,
            length: list.len() + pages,
            crc,
        }
    }

    /// Encodes the header.
    pub fn encode(&self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4] = self.kind as u8;
        bytes[5] = if self.crc.is_none() { UNCHECKED } else { 0 };
        bytes[8..12].copy_from_slice(&self.round.to_le_bytes());
        // Far below 4 GiB: see `Kind::limit`.
        bytes[12..16].copy_from_slice(&(self.length as u32).to_le_bytes());
        bytes[16..20].copy_from_slice(&self.crc.unwrap_or(0).to_le_bytes());
        let crc = crc32fast::hash(&bytes[..20]);
        bytes[20..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// Decodes a header from untrusted bytes.
    pub fn decode(bytes: &[u8; HEADER]) -> Result<Self> {
        let number = |at: usize| {
            let mut number = [0; 4];
            number.copy_from_slice(&bytes[at..at + 4]);
            u32::from_le_bytes(number)
        };
        if bytes[..4] != MAGIC {
            return Err(protocol("what arrives is no frame of a migration"));
        }
        if crc32fast::hash(&bytes[..20]) != number(20) {
            return Err(protocol("the header of a frame is damaged"));
        }
        let kind = Kind::from_byte(bytes[4])
            .ok_or_else(|| protocol(format!("frames of kind {} are unknown", bytes[4])))?;
        if bytes[5] & !UNCHECKED != 0 || bytes[6..8] != [0, 0] {
            return Err(protocol("a frame has flags or a stream that are unknown"));
        }
        let unchecked = bytes[5] & UNCHECKED != 0;
        if unchecked && kind != Kind::Pages {
            return Err(protocol(format!("{kind:?} without a checksum")));
        }
        let length = number(12) as usize;
        if length > kind.limit() {
            let limit = kind.limit();
            return Err(protocol(format!(
                "{kind:?} with {length} bytes, more than the {limit} that it may have"
            )));
        }
        Ok(Self {
            kind,
            round: number(8),
            length,
            crc: (!unchecked).then(|| number(16)),
        })
    }

    /// Checks the contents against the header's checksum.
    pub fn check(&self, contents: &[u8]) -> Result<()> {
        self.check_crc(|| crc32fast::hash(contents))
    }

    /// Checks the CRC-32 of the contents against the header's checksum.
    pub fn check_crc(&self, of_contents: impl FnOnce() -> u32) -> Result<()> {
        match self.crc {
            Some(crc) if of_contents() != crc => {
                Err(protocol(format!("{:?} arrived damaged", self.kind)))
            }
            _ => Ok(()),
        }
    }
}

/// Consecutive pages.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Run {
    /// Guest-physical address of the first page.
    pub guest: u64,
    /// Number of pages, at least 1.
    pub pages: u32,
    /// The pages are all zero and not contained in the frame.
    pub zero: bool,
}

/// Encodes the list of runs with which the contents of a page frame begin. The pages of the non-zero runs follow it.
pub fn encode_runs(runs: &[Run], into: &mut Vec<u8>) {
    into.clear();
    // At most MAX_RUNS.
    into.extend_from_slice(&(runs.len() as u32).to_le_bytes());
    for run in runs {
        into.extend_from_slice(&run.guest.to_le_bytes());
        into.extend_from_slice(&run.pages.to_le_bytes());
        into.extend_from_slice(&u32::from(run.zero).to_le_bytes());
    }
}

/// Length in bytes of the list of runs, from the count in the first word of untrusted contents.
pub fn runs_length(count: [u8; 4], contents: usize) -> Result<usize> {
    let count = u32::from_le_bytes(count) as usize;
    if count > MAX_RUNS {
        return Err(protocol(format!("{count} runs of pages in a frame")));
    }
    match count * RUN + 4 <= contents {
        true => Ok(count * RUN),
        false => Err(protocol("a frame of pages ends too soon")),
    }
}

/// Decodes the runs from untrusted bytes. `data` is the number of bytes of pages that follow and must match the runs
/// exactly.
pub fn decode_runs(list: &[u8], data: usize) -> Result<Vec<Run>> {
    let mut runs = Vec::with_capacity(list.len() / RUN);
    let mut bytes = 0_usize;
    for entry in list.chunks_exact(RUN) {
        let number = |at: usize| {
            let mut number = [0; 4];
            number.copy_from_slice(&entry[at..at + 4]);
            u32::from_le_bytes(number)
        };
        let run = Run {
            guest: u64::from(number(0)) | u64::from(number(4)) << 32,
            pages: number(8),
            zero: match number(12) {
                0 => false,
                1 => true,
                other => return Err(protocol(format!("a run of pages of kind {other}"))),
            },
        };
        if run.pages == 0 || !run.guest.is_multiple_of(4096) {
            return Err(protocol("a run of no pages, or beside a page's start"));
        }
        if !run.zero {
            // Cannot overflow: at most 1024 runs of 2^32 pages.
            bytes += run.pages as usize * 4096;
        }
        runs.push(run);
    }
    if bytes != data {
        return Err(protocol(format!(
            "a frame has {data} bytes of pages, and says {bytes}"
        )));
    }
    Ok(runs)
}

pub(super) fn protocol(what: impl Into<String>) -> Error {
    Error::Protocol(what.into())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn any_flipped_bit_of_a_header_is_noticed() {
        let header = Header::of(Kind::State, 7, b"contents", true);
        let bytes = header.encode();
        assert_eq!(Header::decode(&bytes).unwrap(), header);
        header.check(b"contents").unwrap();
        assert!(header.check(b"c0ntents").is_err());
        for bit in 0..HEADER * 8 {
            let mut damaged = bytes;
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(Header::decode(&damaged).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn lengths_are_bounded_by_what_a_frame_is() {
        for kind in (0..=255).filter_map(Kind::from_byte) {
            let length = kind.limit() + 1;
            let header = Header {
                kind,
                round: 0,
                length,
                crc: Some(0),
            };
            assert!(Header::decode(&header.encode()).is_err(), "{kind:?}");
        }
        // Only pages may be sent without a checksum.
        let state = Header::of(Kind::State, 0, b"", false);
        assert!(Header::decode(&state.encode()).is_err());
        let pages = Header::of(Kind::Pages, 0, b"", false);
        assert_eq!(Header::decode(&pages.encode()).unwrap(), pages);
    }

    proptest! {
        #[test]
        fn runs_come_back_and_no_bytes_make_the_parser_panic(
            runs in proptest::collection::vec((0_u64..1 << 40, 1_u32..9, any::<bool>()), 0..20),
            noise in proptest::collection::vec(any::<u8>(), 0..200),
        ) {
            let runs: Vec<Run> = runs
                .into_iter()
                .map(|(page, pages, zero)| Run { guest: page * 4096, pages, zero })
                .collect();
            let pages: u32 = runs.iter().filter(|run| !run.zero).map(|run| run.pages).sum();
            let data = pages as usize * 4096;
            let mut list = Vec::new();
            encode_runs(&runs, &mut list);
            let (count, rest) = list.split_first_chunk().unwrap();
            prop_assert_eq!(runs_length(*count, list.len() + data).unwrap(), rest.len());
            prop_assert!(runs_length(*count, list.len() - 1).is_err());
            prop_assert_eq!(decode_runs(rest, data).unwrap(), runs);
            prop_assert!(decode_runs(rest, data + 1).is_err());
            if let Some((count, rest)) = noise.split_first_chunk() {
                let _ = runs_length(*count, noise.len());
                let _ = decode_runs(rest, 0);
            }
        }
    }
}
