//! Records what a driver does with a GPU in a file: its accesses to the BARs in order, what the GPU reads from system
//! memory for its commands, and the completions that the driver had seen before it continued. This is enough to replay
//! the same on another GPU of the same size, without the driver.
//!
//! ```text
//!   magic, MiB of VRAM
//!   records: a type byte, then its numbers (LEB128; differences in zigzag encoding)
//! ```
//!
//! Accesses of one kind at equal distances, with values at equal distances, form one record: a driver that clears a
//! page table takes a dozen bytes. A recording is untrusted input: the size of the file bounds every length in it, and
//! [`MOST_ACCESSES`] bounds the accesses.

/// The first bytes of a recording; the last one is the version.
const MAGIC: &[u8; 8] = b"GF100rw\x01";
/// Maximum number of accesses in a recording: enough for a dozen driver start-ups with all accesses recorded.
pub const MOST_ACCESSES: u64 = 1 << 24;
/// Maximum length of an encoded number in bytes.
const NUMBER: usize = 10;

const WRITE: u8 = 1;
const RAM: u8 = 2;
const DONE: u8 = 3;
const KIND: u8 = 3;
/// Fields of an access: its place, log2 of its size in bytes, and whether it is the first of several.
const PLACE_SHIFT: u8 = 2;
const SIZE_SHIFT: u8 = 4;
const SEVERAL: u8 = 1 << 6;

/// The target of an access.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Place {
    /// BAR 0.
    Registers,
    /// BAR 1.
    Bar1,
    /// BAR 3.
    Bar3,
}

impl Place {
    fn parse(bits: u8) -> Option<Self> {
        [Self::Registers, Self::Bar1, Self::Bar3]
            .get(usize::from(bits))
            .copied()
    }
}

/// Accesses at equal distances.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Run {
    /// The target.
    pub place: Place,
    /// Whether these are writes.
    pub write: bool,
    /// log2 of the size of an access in bytes, 0 to 3.
    pub size: u8,
    /// Offset of the first access.
    pub offset: u64,
    /// Number of accesses, 1 or more.
    pub count: u64,
    /// Distance between two offsets; wraps.
    pub stride: u64,
    /// Value of the first write; 0 for reads.
    pub value: u64,
    /// Difference between two values; wraps.
    pub step: u64,
}

impl Run {
    /// Iterates over the offsets and values.
    pub fn accesses(self) -> impl Iterator<Item = (u64, u64)> {
        (0..self.count).map(move |nth| {
            let offset = self.offset.wrapping_add(nth.wrapping_mul(self.stride));
            let value = self.value.wrapping_add(nth.wrapping_mul(self.step));
            (offset, value)
        })
    }

    fn last(&self) -> (u64, u64) {
        let nth = self.count - 1;
        (
            self.offset.wrapping_add(nth.wrapping_mul(self.stride)),
            self.value.wrapping_add(nth.wrapping_mul(self.step)),
        )
    }

    /// Appends another access if it continues the run. Returns whether it did.
    fn take(&mut self, other: &Self) -> bool {
        let is_same = (self.place, self.write, self.size) == (other.place, other.write, other.size);
        let (offset, value) = self.last();
        let stride = other.offset.wrapping_sub(offset);
        let step = other.value.wrapping_sub(value);
        if !is_same || self.count > 1 && (stride, step) != (self.stride, self.step) {
            return false;
        }
        (self.stride, self.step) = (stride, step);
        self.count += 1;
        true
    }
}

/// A record.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Record {
    /// The driver accesses the GPU.
    Access(Run),
    /// The GPU will find these bytes in system memory.
    Ram {
        /// Address of the first byte.
        at: u64,
        /// The bytes.
        bytes: Vec<u8>,
    },
    /// A submission has completed.
    Done {
        /// The channel.
        channel: u8,
        /// Number of ring entries that have been fetched by then.
        get: u32,
        /// Number of entries of the ring, a power of two.
        entries: u32,
    },
}

/// Writes recordings.
pub struct Encoder {
    out: Vec<u8>,
    run: Option<Run>,
    /// Offset after the last access to each place.
    next: [u64; 3],
}

impl Encoder {
    /// Starts a recording for a GPU with this many bytes of VRAM, whole MiB.
    pub fn new(vram: u64) -> Self {
        let mut encoder = Self {
            out: MAGIC.to_vec(),
            run: None,
            next: [0; 3],
        };
        encoder.number(vram >> 20);
        encoder
    }

    /// Records that the driver reads this many bytes, or writes these. Accesses have 1, 2, 4 or 8 bytes; others are
    /// recorded byte by byte.
    pub fn access(&mut self, place: Place, offset: u64, access: Access<'_>) {
        let (len, data) = match access {
            Access::Read(len) => (len, None),
            Access::Write(data) => (data.len(), Some(data)),
        };
        let size = match len {
            1 | 2 | 4 | 8 => len,
            _ => 1,
        };
        for (offset, at) in (offset..).step_by(size).zip((0..len).step_by(size)) {
            let mut value = [0; 8];
            if let Some(data) = data {
                value[..size].copy_from_slice(&data[at..at + size]);
            }
            let one = Run {
                place,
                write: data.is_some(),
                size: size.trailing_zeros() as u8,
                offset,
                count: 1,
                stride: 0,
                value: u64::from_le_bytes(value),
                step: 0,
            };
            if !self.run.as_mut().is_some_and(|run| run.take(&one)) {
                self.end_run();
                self.run = Some(one);
            }
        }
    }

    /// Records bytes that the GPU will find in system memory.
    pub fn ram(&mut self, at: u64, bytes: &[u8]) {
        self.end_run();
        self.out.push(RAM);
        self.number(at);
        self.number(bytes.len() as u64);
        self.out.extend(bytes);
    }

    /// Records that a submission has completed.
    pub fn done(&mut self, channel: u8, get: u32, entries: u32) {
        self.end_run();
        self.out.extend([DONE, channel]);
        self.number(get.into());
        self.number(entries.into());
    }

    /// Returns the bytes recorded since the last call. Accesses that may still be extended to a longer run are only
    /// included if `end` is set.
    pub fn take(&mut self, end: bool) -> Vec<u8> {
        if end {
            self.end_run();
        }
        std::mem::take(&mut self.out)
    }

    /// Number of bytes that can be taken.
    pub fn len(&self) -> usize {
        self.out.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.out.is_empty()
    }

    fn end_run(&mut self) {
        let Some(run) = self.run.take() else { return };
        let place = run.place as u8;
        let mut head = place << PLACE_SHIFT | run.size << SIZE_SHIFT;
        if run.write {
            head |= WRITE;
        }
        if run.count > 1 {
            head |= SEVERAL;
        }
        self.out.push(head);
        let next = &mut self.next[usize::from(place)];
        let distance = run.offset.wrapping_sub(*next);
        *next = run.last().0.wrapping_add(1 << run.size);
        self.difference(distance);
        if run.write {
            self.number(run.value);
        }
        if run.count > 1 {
            self.number(run.count);
            self.difference(run.stride);
            if run.write {
                self.difference(run.step);
            }
        }
    }

    fn number(&mut self, mut number: u64) {
        while number >= 0x80 {
            self.out.push(number as u8 | 0x80);
            number >>= 7;
        }
        self.out.push(number as u8);
    }

    fn difference(&mut self, number: u64) {
        // The sign is in the lowest bit.
        self.number(number << 1 ^ 0_u64.wrapping_sub(number >> 63));
    }
}

/// An access by the driver.
#[derive(Clone, Copy, Debug)]
pub enum Access<'a> {
    /// It reads this many bytes.
    Read(usize),
    /// It writes these bytes.
    Write(&'a [u8]),
}

/// Why bytes are not a recording.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Bad {
    /// The magic number or the version is different.
    #[error("this is no recording of a GPU's driver, or of another version")]
    Magic,
    /// A record is of an unknown type, or is truncated.
    #[error("the record at byte {0} is none, or is cut off")]
    Record(usize),
    /// There are more accesses than allowed.
    #[error("there are more than {MOST_ACCESSES} accesses")]
    Long,
}

/// A recording.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Recording {
    /// Bytes of VRAM, whole MiB.
    pub vram: u64,
    /// The records.
    pub records: Vec<Record>,
}

impl Recording {
    /// Parses a file, which may end after any record.
    ///
    /// # Errors
    /// It is not a recording.
    pub fn parse(bytes: &[u8]) -> Result<Self, Bad> {
        let mut reader = Reader {
            rest: bytes.strip_prefix(MAGIC).ok_or(Bad::Magic)?,
            next: [0; 3],
        };
        let mib = reader.number().filter(|mib| *mib < 1 << 20);
        let mut recording = Self {
            vram: mib.ok_or(Bad::Magic)? << 20,
            records: Vec::new(),
        };
        let mut accesses = 0_u64;
        while !reader.rest.is_empty() {
            let at = bytes.len() - reader.rest.len();
            let record = reader.record().ok_or(Bad::Record(at))?;
            if let Record::Access(run) = &record {
                accesses = accesses.saturating_add(run.count);
                if accesses > MOST_ACCESSES {
                    return Err(Bad::Long);
                }
            }
            recording.records.push(record);
        }
        Ok(recording)
    }
}

struct Reader<'a> {
    rest: &'a [u8],
    next: [u64; 3],
}

impl Reader<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.rest.split_first()?;
        self.rest = rest;
        Some(*first)
    }

    fn number(&mut self) -> Option<u64> {
        let mut number = 0;
        for nth in 0..NUMBER {
            let byte = self.byte()?;
            // Only one bit of the tenth byte fits; higher bits are dropped.
            number |= u64::from(byte & 0x7f) << (7 * nth);
            if byte & 0x80 == 0 {
                return Some(number);
            }
        }
        None
    }

    fn difference(&mut self) -> Option<u64> {
        let number = self.number()?;
        Some(number >> 1 ^ 0_u64.wrapping_sub(number & 1))
    }

    fn record(&mut self) -> Option<Record> {
        let head = self.byte()?;
        match head & KIND {
            RAM if head == RAM => {
                let at = self.number()?;
                let len = usize::try_from(self.number()?).ok()?;
                let (bytes, rest) = self.rest.split_at_checked(len)?;
                self.rest = rest;
                let bytes = bytes.to_vec();
                Some(Record::Ram { at, bytes })
            }
            DONE if head == DONE => Some(Record::Done {
                channel: self.byte()?,
                get: u32::try_from(self.number()?).ok()?,
                entries: u32::try_from(self.number()?)
                    .ok()
                    .filter(|entries| entries.is_power_of_two())?,
            }),
            RAM | DONE => None,
            kind => self.run(head, kind == WRITE).map(Record::Access),
        }
    }

    fn run(&mut self, head: u8, write: bool) -> Option<Run> {
        let place = Place::parse(head >> PLACE_SHIFT & 3)?;
        let size = head >> SIZE_SHIFT & 3;
        let next = self.next[place as usize];
        let mut run = Run {
            place,
            write,
            size,
            offset: next.wrapping_add(self.difference()?),
            count: 1,
            stride: 0,
            value: 0,
            step: 0,
        };
        if head & 0x80 != 0 {
            return None;
        }
        if write {
            run.value = self.number()?;
        }
        if head & SEVERAL != 0 {
            run.count = self.number().filter(|count| *count > 1)?;
            run.stride = self.difference()?;
            if write {
                run.step = self.difference()?;
            }
        }
        self.next[place as usize] = run.last().0.wrapping_add(1 << size);
        Some(run)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Step {
        Read(u8, u64, u8),
        Write(u8, u64, Vec<u8>),
        Ram(u64, Vec<u8>),
        Done(u8, u32, u32),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let offset = || prop_oneof![0..64_u64, any::<u64>()];
        let bytes = || prop::collection::vec(prop_oneof![Just(0_u8), any::<u8>()], 1..9);
        let step = prop_oneof![
            (0..3_u8, offset(), 1..9_u8).prop_map(|(bar, at, len)| Step::Read(bar, at, len)),
            (0..3_u8, offset(), bytes()).prop_map(|(bar, at, data)| Step::Write(bar, at, data)),
            (any::<u64>(), bytes()).prop_map(|(at, data)| Step::Ram(at, data)),
            (any::<u8>(), any::<u32>(), 0..21_u32).prop_map(|(channel, get, log2)| Step::Done(
                channel,
                get,
                1 << log2
            )),
        ];
        prop::collection::vec(step, 0..60)
    }

    /// A single access: place, whether it is a write, log2 of its size, offset, value.
    type Single = (Place, bool, u8, u64, u64);

    fn singles(records: &[Record]) -> Vec<Result<Single, Record>> {
        let mut all = Vec::new();
        for record in records {
            match record {
                Record::Access(run) => all.extend(
                    run.accesses()
                        .map(|(at, value)| Ok((run.place, run.write, run.size, at, value))),
                ),
                other => all.push(Err(other.clone())),
            }
        }
        all
    }

    fn recorded(steps: &[Step]) -> (Vec<u8>, Vec<Result<Single, Record>>) {
        let mut encoder = Encoder::new(64 << 20);
        let mut expected = Vec::new();
        let mut bytes = Vec::new();
        for step in steps.iter().cloned() {
            let (bar, at, len, data) = match step {
                Step::Read(bar, at, len) => (bar, at, usize::from(len), None),
                Step::Write(bar, at, data) => (bar, at, data.len(), Some(data)),
                Step::Ram(at, bytes) => {
                    encoder.ram(at, &bytes);
                    expected.push(Err(Record::Ram { at, bytes }));
                    continue;
                }
                Step::Done(channel, get, entries) => {
                    encoder.done(channel, get, entries);
                    expected.push(Err(Record::Done {
                        channel,
                        get,
                        entries,
                    }));
                    continue;
                }
            };
            let place = Place::parse(bar).expect("below 3");
            let access = data.as_deref().map_or(Access::Read(len), Access::Write);
            encoder.access(place, at, access);
            let size = if len.is_power_of_two() { len } else { 1 };
            for first in (0..len).step_by(size) {
                let mut value = [0; 8];
                if let Some(data) = &data {
                    value[..size].copy_from_slice(&data[first..first + size]);
                }
                let at = at.wrapping_add(first as u64);
                let size = size.trailing_zeros() as u8;
                let value = u64::from_le_bytes(value);
                expected.push(Ok((place, data.is_some(), size, at, value)));
            }
            bytes.extend(encoder.take(false));
        }
        bytes.extend(encoder.take(true));
        (bytes, expected)
    }

    proptest! {
        #[test]
        fn what_was_recorded_is_read(steps in steps()) {
            let (bytes, expected) = recorded(&steps);
            let recording = Recording::parse(&bytes).expect("it was recorded");
            prop_assert_eq!(recording.vram, 64 << 20);
            prop_assert_eq!(singles(&recording.records), expected);
        }

        #[test]
        fn any_bytes_are_a_recording_or_an_error(
            steps in steps(),
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
            end: prop::sample::Index,
        ) {
            let (mut bytes, _) = recorded(&steps);
            for (at, byte) in changes {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            bytes.truncate(end.index(bytes.len() + 1));
            if let Ok(recording) = Recording::parse(&bytes) {
                prop_assert!(recording.records.len() <= bytes.len());
            }
        }
    }

    #[test]
    fn a_table_that_is_cleared_is_one_record_of_a_dozen_bytes() {
        let mut encoder = Encoder::new(64 << 20);
        let before = encoder.take(true).len();
        for at in (0x1000..0x4_1000).step_by(4) {
            encoder.access(Place::Bar3, at, Access::Write(&[0; 4]));
        }
        assert!(encoder.take(true).len() < 12);
        assert!(before < 16);
    }
}
