//! What a driver does with a GPU, as a file: its accesses to the BARs, in their order, what the GPU reads of the
//! machine's RAM for its commands, and the completions that the driver had seen before it went on. Enough to do
//! the same with another GPU of the same size, without the driver.
//!
//! ```text
//!   magic, MiB of VRAM
//!   records: a byte that says what it is, then its numbers (LEB128; differences zigzag)
//! ```
//!
//! Accesses of one kind at equal distances, with values at equal distances, are one record: a driver that
//! clears a page table is a dozen bytes. A file is what somebody gives: every length in it is bounded by the
//! file's own, and accesses by [`MOST_ACCESSES`].

/// What a recording begins with; the last byte is the version.
const MAGIC: &[u8; 8] = b"GF100rw\x01";
/// Accesses in a recording, at most: a dozen starts of a driver all of whose accesses are recorded.
pub const MOST_ACCESSES: u64 = 1 << 24;
/// Bytes of a number, at most.
const NUMBER: usize = 10;

const WRITE: u8 = 1;
const RAM: u8 = 2;
const DONE: u8 = 3;
const KIND: u8 = 3;
/// Of an access: where, log2 of its bytes, and whether it is the first of several.
const PLACE_SHIFT: u8 = 2;
const SIZE_SHIFT: u8 = 4;
const SEVERAL: u8 = 1 << 6;

/// Where an access goes.
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
    /// Where.
    pub place: Place,
    /// Whether they are writes.
    pub write: bool,
    /// log2 of the bytes of one, 0 to 3.
    pub size: u8,
    /// The first one's offset.
    pub offset: u64,
    /// How many, 1 or more.
    pub count: u64,
    /// From one to the next; wraps.
    pub stride: u64,
    /// What the first writes; 0 if they are reads.
    pub value: u64,
    /// From one value to the next; wraps.
    pub step: u64,
}

impl Run {
    /// The offsets and values.
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

    /// Takes another access in, if it continues the run.
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
    /// The GPU is going to find this in RAM.
    Ram {
        /// The first byte's address.
        at: u64,
        /// What is there.
        bytes: Vec<u8>,
    },
    /// A submission is done.
    Done {
        /// Its channel.
        channel: u8,
        /// Ring entries that have been fetched by then.
        get: u32,
        /// Entries of the ring, a power of two.
        entries: u32,
    },
}

/// Writes recordings.
pub struct Encoder {
    out: Vec<u8>,
    run: Option<Run>,
    /// Offsets behind the last access to each place.
    next: [u64; 3],
}

impl Encoder {
    /// Of a GPU with so many bytes of VRAM, whole MiB.
    pub fn new(vram: u64) -> Self {
        let mut encoder = Self {
            out: MAGIC.to_vec(),
            run: None,
            next: [0; 3],
        };
        encoder.number(vram >> 20);
        encoder
    }

    /// The driver reads so many bytes, or writes these. Accesses are of 1, 2, 4 or 8 bytes; others are recorded
    /// byte by byte.
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

    /// The GPU is going to find bytes in RAM.
    pub fn ram(&mut self, at: u64, bytes: &[u8]) {
        self.end_run();
        self.out.push(RAM);
        self.number(at);
        self.number(bytes.len() as u64);
        self.out.extend(bytes);
    }

    /// A submission is done.
    pub fn done(&mut self, channel: u8, get: u32, entries: u32) {
        self.end_run();
        self.out.extend([DONE, channel]);
        self.number(get.into());
        self.number(entries.into());
    }

    /// The bytes since the last call. Accesses that may become more of a run are among them only if all is to
    /// `end` here.
    pub fn take(&mut self, end: bool) -> Vec<u8> {
        if end {
            self.end_run();
        }
        std::mem::take(&mut self.out)
    }

    /// Bytes that can be taken.
    pub fn len(&self) -> usize {
        self.out.len()
    }

    /// Whether there is none.
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
        // The sign in the lowest bit.
        self.number(number << 1 ^ 0_u64.wrapping_sub(number >> 63));
    }
}

/// What a driver does.
#[derive(Clone, Copy, Debug)]
pub enum Access<'a> {
    /// It reads so many bytes.
    Read(usize),
    /// It writes these.
    Write(&'a [u8]),
}

/// Bytes that are no recording.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Bad {
    /// Another beginning.
    #[error("this is no recording of a GPU's driver, or of another version")]
    Magic,
    /// A record that there is not, or that is cut off.
    #[error("the record at byte {0} is none, or is cut off")]
    Record(usize),
    /// More accesses than are allowed.
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
    /// What a file says. It may end after any record.
    ///
    /// # Errors
    /// It is no recording.
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
            // The tenth byte has one bit: others are lost.
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

    /// Single accesses: place, whether it writes, bytes, offset, value.
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
