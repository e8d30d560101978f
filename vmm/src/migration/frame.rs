//! Frames: a header of 24 bytes and what follows it.
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

/// Bytes of a header.
pub const HEADER: usize = 24;
/// The first bytes of a header.
pub(super) const MAGIC: [u8; 4] = *b"GMIG";

/// The contents have no checksum: they are pages, on a connection that keeps bytes intact.
const UNCHECKED: u8 = 1;

/// Most bytes of pages in a frame.
pub const MAX_PAGES: usize = 1 << 20;
/// Most runs of pages in a frame.
pub const MAX_RUNS: usize = 1024;
/// Bytes of a run.
pub const RUN: usize = 16;

/// What a frame is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u8)]
pub enum Kind {
    /// To the destination: what is to move.
    Offer = 1,
    /// To the source: the machine has memory.
    Prepared = 2,
    /// Pages.
    Pages = 3,
    /// The round is over; answered in kind when everything has arrived.
    Barrier = 4,
    /// Devices and vCPUs.
    State = 5,
    /// To the source: the machine could run.
    Ready = 6,
    /// To the destination: the locks are free; the machine is yours.
    Go = 7,
    /// To the source: the machine runs here.
    Running = 8,
    /// Either way: it is over, for a reason.
    Failed = 9,
    /// To the source: the machine does not run here and will not, though GO came.
    Denied = 10,
    /// To the destination, right after the offer: a file that goes with the machine.
    File = 11,
    /// To the destination, on another connection: it carries pages; answered in kind.
    Join = 12,
    /// To the destination, before the state or a copy: a piece of what applications have saved.
    Archive = 13,
    /// To the destination: what came before is a copy of applications, which go on; answered in kind when
    /// workers have made it.
    Copy = 14,
    /// To the source, when the machine runs: contents of an application's memory that are to follow.
    Fetch = 15,
    /// To the destination, after archives' frames: these were all, or why there are none.
    Fetched = 16,
    /// To the source: an application needs nothing more.
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

    /// Most bytes that its contents have.
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
    /// What it is.
    pub kind: Kind,
    /// Round, from 0; 0 outside of rounds.
    pub round: u32,
    /// Bytes that follow: at most as many as the kind has.
    pub length: usize,
    crc: Option<u32>,
}

impl Header {
    /// The header of a frame with these contents.
    pub fn of(kind: Kind, round: u32, contents: &[u8], checked: bool) -> Self {
        Self {
            kind,
            round,
            length: contents.len(),
            crc: checked.then(|| crc32fast::hash(contents)),
        }
    }

    /// The header of a frame of pages: a list of runs, and so many bytes of pages that have the checksum.
    pub fn of_pages(round: u32, list: &[u8], pages: usize, crc: Option<u32>) -> Self {
        Self {
            kind: Kind::Pages,
            round,
            length: list.len() + pages,
            crc,
        }
    }

    /// Its bytes.
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

    /// The header in bytes that may be anything.
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

    /// Whether these are the contents that were sent.
    pub fn check(&self, contents: &[u8]) -> Result<()> {
        self.check_crc(|| crc32fast::hash(contents))
    }

    /// Whether the contents, whose CRC-32 this is, are those that were sent.
    pub fn check_crc(&self, of_contents: impl FnOnce() -> u32) -> Result<()> {
        match self.crc {
            Some(crc) if of_contents() != crc => {
                Err(protocol(format!("{:?} arrived damaged", self.kind)))
            }
            _ => Ok(()),
        }
    }
}

/// Pages that follow each other.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Run {
    /// Guest-physical address of the first.
    pub guest: u64,
    /// How many, from 1.
    pub pages: u32,
    /// They are all zero, and not in the frame.
    pub zero: bool,
}

/// The list of runs with which the contents of a frame of pages begin. The pages of those that are not zero follow.
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

/// Bytes of the runs of which there are as many as the first word of contents says, which may be anything.
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

/// The runs in bytes that may be anything, which so many bytes of pages follow: exactly as many as the runs say.
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
        // Only pages may go without a checksum.
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
