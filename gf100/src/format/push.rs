//! Commands: a ring of entries that point to push buffers. A push buffer is a sequence of methods,
//! which are words for registers of an engine's class (NVIDIA's `cl906f.h`).

/// Size of a ring entry in bytes.
pub const ENTRY_BYTES: u64 = 8;

/// A ring entry, which points to a push buffer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct GpEntry {
    /// Virtual address of its first word, 40 bits, a multiple of 4.
    pub address: u64,
    /// Number of words, 21 bits.
    pub words: u32,
}

impl GpEntry {
    /// Parses an entry. Every value is valid.
    pub fn parse(raw: u64) -> Self {
        Self {
            address: raw & 0xff_ffff_fffc,
            words: (raw >> 42 & 0x1f_ffff) as u32,
        }
    }

    /// Encodes the entry.
    pub fn encode(self) -> u64 {
        self.address & 0xff_ffff_fffc | u64::from(self.words & 0x1f_ffff) << 42
    }
}

/// A word for a register of a class.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Method {
    /// Index of the channel's object, 0 to 7.
    pub subchannel: u8,
    /// Byte address of the register, a multiple of 4 below 0x4000.
    pub address: u16,
    /// The word.
    pub data: u32,
}

/// A method header, which says how to interpret the words after it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Header {
    /// No operation.
    Nop,
    /// Words for consecutive registers.
    Increasing(Run),
    /// Words for one register.
    Constant(Run),
    /// The first word is for one register, all others are for the next one.
    IncreasingOnce(Run),
    /// The word is in the header itself.
    Immediate(Method),
    /// The rest of the push buffer is skipped.
    End,
}

/// The words that a header announces.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Run {
    /// Index of the channel's object, 0 to 7.
    pub subchannel: u8,
    /// The first register.
    pub address: u16,
    /// Number of words, 13 bits.
    pub count: u16,
}

/// A word that is not a method header.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{0:#010x} is no method header")]
pub struct BadHeader(pub u32);

impl Header {
    /// Parses a word.
    pub fn parse(raw: u32) -> Result<Self, BadHeader> {
        let run = Run {
            subchannel: (raw >> 13 & 7) as u8,
            address: (raw as u16 & 0xfff) << 2,
            count: (raw >> 16 & 0x1fff) as u16,
        };
        Ok(match raw >> 29 {
            // GPU group masks do not apply to this GPU; zero fills unused words.
            0 if raw == 0 => Self::Nop,
            1 => Self::Increasing(run),
            3 => Self::Constant(run),
            4 => Self::Immediate(Method {
                subchannel: run.subchannel,
                address: run.address,
                data: u32::from(run.count),
            }),
            5 => Self::IncreasingOnce(run),
            7 => Self::End,
            _ => return Err(BadHeader(raw)),
        })
    }

    /// Encodes the header.
    pub fn encode(self) -> u32 {
        let word = |op: u32, subchannel: u8, address: u16, count: u32| {
            op << 29
                | (count & 0x1fff) << 16
                | u32::from(subchannel & 7) << 13
                | u32::from(address >> 2 & 0xfff)
        };
        let of = |op, run: Run| word(op, run.subchannel, run.address, u32::from(run.count));
        match self {
            Self::Nop => 0,
            Self::Increasing(run) => of(1, run),
            Self::Constant(run) => of(3, run),
            Self::Immediate(method) => word(4, method.subchannel, method.address, method.data),
            Self::IncreasingOnce(run) => of(5, run),
            Self::End => 7 << 29,
        }
    }
}

/// How the register address advances after a word.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Step {
    Each,
    Never,
    Once,
}

/// Meaning of a word in a push buffer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Word {
    /// A header, or no operation.
    Header,
    /// A method.
    Method(Method),
    /// The rest of the push buffer is skipped.
    End,
}

/// Decodes push buffers word by word. The words of a header may continue in the next push buffer.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Decoder {
    run: Option<(Run, Step)>,
}

impl Decoder {
    /// Decodes the next word.
    pub fn next(&mut self, word: u32) -> Result<Word, BadHeader> {
        let Some((mut run, mut step)) = self.run.take() else {
            return self.header(word);
        };
        let method = Method {
            subchannel: run.subchannel,
            address: run.address,
            data: word,
        };
        // A run has at least one word left.
        run.count -= 1;
        if step != Step::Never {
            run.address = (run.address + 4) & 0x3ffc;
        }
        if step == Step::Once {
            step = Step::Never;
        }
        self.run = (run.count > 0).then_some((run, step));
        Ok(Word::Method(method))
    }

    fn header(&mut self, word: u32) -> Result<Word, BadHeader> {
        let (run, step) = match Header::parse(word)? {
            Header::Nop => return Ok(Word::Header),
            Header::Immediate(method) => return Ok(Word::Method(method)),
            Header::End => return Ok(Word::End),
            Header::Increasing(run) => (run, Step::Each),
            Header::Constant(run) => (run, Step::Never),
            Header::IncreasingOnce(run) => (run, Step::Once),
        };
        self.run = (run.count > 0).then_some((run, step));
        Ok(Word::Header)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn methods(words: &[u32]) -> Vec<(u8, u16, u32)> {
        let mut decoder = Decoder::default();
        words
            .iter()
            .filter_map(|word| match decoder.next(*word) {
                Ok(Word::Method(method)) => Some((method.subchannel, method.address, method.data)),
                _ => None,
            })
            .collect()
    }

    proptest! {
        #[test]
        fn a_ring_entry_keeps_its_meaning(raw: u64) {
            let entry = GpEntry::parse(raw);
            prop_assert_eq!(GpEntry::parse(entry.encode()), entry);
        }

        #[test]
        fn a_header_keeps_its_meaning(raw: u32) {
            if let Ok(header) = Header::parse(raw) {
                prop_assert_eq!(Header::parse(header.encode()), Ok(header));
            }
        }

        #[test]
        fn methods_stay_in_the_register_space(words: Vec<u32>) {
            for (subchannel, address, _) in methods(&words) {
                prop_assert!(subchannel < 8 && address < 0x4000 && address % 4 == 0);
            }
        }
    }

    #[test]
    fn each_kind_of_run_addresses_its_registers() {
        let run = Run {
            subchannel: 4,
            address: 0x30c,
            count: 3,
        };
        let of = |header: Header| methods(&[header.encode(), 7, 8, 9]);
        assert_eq!(
            of(Header::Increasing(run)),
            [(4, 0x30c, 7), (4, 0x310, 8), (4, 0x314, 9)]
        );
        assert_eq!(
            of(Header::Constant(run)),
            [(4, 0x30c, 7), (4, 0x30c, 8), (4, 0x30c, 9)]
        );
        assert_eq!(
            of(Header::IncreasingOnce(run)),
            [(4, 0x30c, 7), (4, 0x310, 8), (4, 0x310, 9)]
        );
    }

    #[test]
    fn a_fence_as_nouveau_writes_it() {
        // Five words to register 0x10 of subchannel 0.
        let words = [0x2005_0004, 1, 0x1000, 42, 2, 0, 0x8000_0014];
        let expected = [
            (0, 0x10, 1),
            (0, 0x14, 0x1000),
            (0, 0x18, 42),
            (0, 0x1c, 2),
            (0, 0x20, 0),
            (0, 0x50, 0),
        ];
        assert_eq!(methods(&words), expected);
    }
}
