//! Shader instructions of 64 bits: those that an integer kernel needs.
//!
//! | bits | |
//! |---|---|
//! | 3:0 | instruction kind; its operation is in 63:58 |
//! | 12:10, 13 | predicate on which execution depends, 7 for none; negation of the predicate |
//! | 19:14 | destination; 63 is no register, and reads as 0 |
//! | 25:20, 31:26, 54:49 | sources |
//! | 47:46 | replaces the second source: 1 by a constant (offset in 41:26, bank in 45:42), 3 by the
//! signed number in 45:26 |
//!
//! The encodings are those that Mesa's compiler emits for this chip.

/// The register that reads as 0.
pub const NONE: u8 = 63;
/// The predicate that is always true.
pub const ALWAYS: u8 = 7;
/// Number of registers per thread.
pub const REGISTERS: usize = 63;
/// Number of predicates per thread.
pub const PREDICATES: usize = 7;

/// Special registers.
pub mod special {
    /// Index of the thread in its block, first of three axes.
    pub const THREAD: u8 = 0x21;
    /// Index of the block in the grid.
    pub const BLOCK: u8 = 0x25;
    /// Number of threads per block.
    pub const THREADS: u8 = 0x29;
    /// Number of blocks in the grid.
    pub const BLOCKS: u8 = 0x2d;
}

/// A source operand that may be a constant.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Source {
    /// A register.
    Register(u8),
    /// A word of a constant bank.
    Constant {
        /// The bank, 0 to 15.
        bank: u8,
        /// Byte offset in the bank.
        offset: u16,
    },
    /// A signed 20-bit number.
    Number(i32),
}

/// What an instruction does.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Operation {
    /// Does nothing.
    Nop,
    /// Ends the thread.
    Exit,
    /// Jumps by this many bytes, relative to the next instruction.
    Branch(i32),
    /// Reads a special register.
    Special(u8),
    /// Loads a 32-bit immediate.
    Immediate(u32),
    /// Moves a word.
    Move(Source),
    /// Adds.
    Add {
        /// First summand.
        a: u8,
        /// Second summand.
        b: Source,
        /// Also adds the carry of the last addition that kept one.
        with_carry: bool,
        /// Keeps the carry.
        keep_carry: bool,
    },
    /// Multiplies, keeps the low word, and adds.
    MultiplyAdd {
        /// First factor.
        a: u8,
        /// Second factor.
        b: Source,
        /// Summand.
        c: u8,
    },
    /// Shifts left.
    Shift {
        /// The value.
        a: u8,
        /// Number of bits; 32 and more give 0.
        b: Source,
    },
    /// Compares; the destination is a predicate.
    Compare {
        /// Left operand.
        a: u8,
        /// Right operand.
        b: Source,
        /// Condition: bits 0, 1 and 2 for less, equal and greater.
        how: u8,
        /// Whether the operands are signed.
        signed: bool,
    },
    /// Loads a word from the virtual address in two registers, of which this is the first.
    Load {
        /// Register with the low half of the address.
        address: u8,
        /// Offset that is added to the address.
        offset: i32,
    },
    /// Stores a word to such an address; the register field is the source.
    Store {
        /// Register with the low half of the address.
        address: u8,
        /// Offset that is added to the address.
        offset: i32,
    },
}

/// An instruction.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Instruction {
    /// The operation.
    pub operation: Operation,
    /// The register, or predicate, that it operates on; [`NONE`] if there is none.
    pub register: u8,
    /// The instruction is executed if this predicate is true.
    pub predicate: u8,
    /// Executes if the predicate is false instead.
    pub unless: bool,
}

/// An unknown instruction.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("instruction {0:#018x} is not known")]
pub struct Unknown(pub u64);

/// Bits of the operation and the kind.
const OPERATION: u64 = 0xfc00_0000_0000_000f;
const EXIT: u64 = 0x8000_0000_0000_0007;
const BRANCH: u64 = 0x4000_0000_0000_0007;
/// Regardless of the condition codes.
const ANY: u64 = 0x1e0;
const NOP: u64 = 0x4000_0000_0000_0004;
const SPECIAL: u64 = 0x2c00_0000_0000_0004;
const MOVE: u64 = 0x2800_0000_0000_0004;
const LANES: u64 = 0x1e0;
const IMMEDIATE: u64 = 0x1800_0000_0000_0002;
const ADD: u64 = 0x4800_0000_0000_0003;
const WITH_CARRY: u64 = 1 << 6;
const KEEP_CARRY: u64 = 1 << 48;
const MULTIPLY_ADD: u64 = 0x2000_0000_0000_0003;
const SHIFT: u64 = 0x6000_0000_0000_0003;
/// The condition is in bits 58:55.
const COMPARE: u64 = 0x1800_0000_0000_0003;
const COMPARE_MASK: u64 = 0xf800_0000_0000_000f;
const SIGNED: u64 = 1 << 5;
/// No second predicate, neither as a destination nor as a source.
const COMPARE_ALONE: u64 = 0x000e_0000_0001_c000;
/// A second predicate, signs and absolute values, which are not supported.
const COMPARE_MORE: u64 = 0x0070_0000_0000_03c0;
/// A 64-bit address, and an access of one word.
const WIDE: u64 = 1 << 58;
const WORD: u64 = 4 << 5;
const LOAD: u64 = 0x8000_0000_0000_0005 | WIDE;
const STORE: u64 = 0x9000_0000_0000_0005 | WIDE;
const MEMORY_MASK: u64 = OPERATION | 7 << 5;

fn field(raw: u64, at: u32, bits: u32) -> u64 {
    raw >> at & ((1 << bits) - 1)
}

/// Sign-extends a number of this many bits.
fn signed(raw: u64, bits: u32) -> i32 {
    let shift = 64 - bits;
    ((raw << shift) as i64 >> shift) as i32
}

impl Source {
    fn parse(raw: u64) -> Option<Self> {
        Some(match field(raw, 46, 2) {
            0 => Self::Register(field(raw, 26, 6) as u8),
            1 => Self::Constant {
                bank: field(raw, 42, 4) as u8,
                offset: field(raw, 26, 16) as u16,
            },
            3 => Self::Number(signed(field(raw, 26, 20), 20)),
            _ => return None,
        })
    }

    fn encode(self) -> u64 {
        match self {
            Self::Register(register) => u64::from(register & 63) << 26,
            Self::Constant { bank, offset } => {
                1 << 46 | u64::from(bank & 15) << 42 | u64::from(offset) << 26
            }
            Self::Number(number) => 3 << 46 | (number as u64 & 0xf_ffff) << 26,
        }
    }
}

impl Instruction {
    /// An instruction that is always executed, and operates on a register.
    pub fn new(register: u8, operation: Operation) -> Self {
        Self {
            operation,
            register,
            predicate: ALWAYS,
            unless: false,
        }
    }

    /// The same instruction, executed only if a predicate is true.
    pub fn when(self, predicate: u8) -> Self {
        Self { predicate, ..self }
    }

    /// Decodes a word.
    pub fn parse(raw: u64) -> Result<Self, Unknown> {
        let unknown = Unknown(raw);
        let register = |at| field(raw, at, 6) as u8;
        let source = || Source::parse(raw).ok_or(unknown);
        let mut destination = register(14);
        let operation = match raw & OPERATION {
            NOP => Operation::Nop,
            EXIT if raw & ANY == ANY => Operation::Exit,
            BRANCH if raw & ANY == ANY => Operation::Branch(signed(field(raw, 26, 24), 24)),
            SPECIAL => Operation::Special(field(raw, 26, 8) as u8),
            MOVE if raw & LANES == LANES => Operation::Move(source()?),
            IMMEDIATE if raw & LANES == LANES => Operation::Immediate(field(raw, 26, 32) as u32),
            // Neither negated nor saturated.
            ADD if raw & (0x300 | SIGNED) == 0 => Operation::Add {
                a: register(20),
                b: source()?,
                with_carry: raw & WITH_CARRY != 0,
                keep_carry: raw & KEEP_CARRY != 0,
            },
            MULTIPLY_ADD if field(raw, 4, 6) & !0xa == 0 => Operation::MultiplyAdd {
                a: register(20),
                b: source()?,
                c: register(49),
            },
            SHIFT if raw & 1 << 9 == 0 => Operation::Shift {
                a: register(20),
                b: source()?,
            },
            _ if raw & COMPARE_MASK == COMPARE
                && raw & COMPARE_ALONE == COMPARE_ALONE
                && raw & COMPARE_MORE == 0 =>
            {
                destination = field(raw, 17, 3) as u8;
                Operation::Compare {
                    a: register(20),
                    b: source()?,
                    how: field(raw, 55, 3) as u8,
                    signed: raw & SIGNED != 0,
                }
            }
            _ if raw & MEMORY_MASK == LOAD | WORD => Operation::Load {
                address: register(20),
                offset: field(raw, 26, 32) as i32,
            },
            _ if raw & MEMORY_MASK == STORE | WORD => Operation::Store {
                address: register(20),
                offset: field(raw, 26, 32) as i32,
            },
            _ => return Err(unknown),
        };
        Ok(Self {
            operation,
            register: destination,
            predicate: field(raw, 10, 3) as u8,
            unless: raw & 1 << 13 != 0,
        })
    }

    /// Encodes the instruction.
    pub fn encode(self) -> u64 {
        let first = |register: u8| u64::from(register & 63) << 20;
        let raw = match self.operation {
            Operation::Nop => NOP | ANY,
            Operation::Exit => EXIT | ANY,
            Operation::Branch(distance) => BRANCH | ANY | (distance as u64 & 0xff_ffff) << 26,
            Operation::Special(special) => SPECIAL | u64::from(special) << 26,
            Operation::Immediate(word) => IMMEDIATE | LANES | u64::from(word) << 26,
            Operation::Move(source) => MOVE | LANES | source.encode(),
            Operation::Add {
                a,
                b,
                with_carry,
                keep_carry,
            } => {
                let carry = |set, bit| if set { bit } else { 0 };
                ADD | first(a)
                    | b.encode()
                    | carry(with_carry, WITH_CARRY)
                    | carry(keep_carry, KEEP_CARRY)
            }
            Operation::MultiplyAdd { a, b, c } => {
                MULTIPLY_ADD | first(a) | b.encode() | u64::from(c & 63) << 49
            }
            Operation::Shift { a, b } => SHIFT | first(a) | b.encode(),
            Operation::Compare { a, b, how, signed } => {
                COMPARE
                    | COMPARE_ALONE
                    | first(a)
                    | b.encode()
                    | u64::from(how & 7) << 55
                    | if signed { SIGNED } else { 0 }
            }
            Operation::Load { address, offset } => {
                LOAD | WORD | first(address) | u64::from(offset as u32) << 26
            }
            Operation::Store { address, offset } => {
                STORE | WORD | first(address) | u64::from(offset as u32) << 26
            }
        };
        let register = match self.operation {
            Operation::Compare { .. } => u64::from(self.register & 7) << 17,
            _ => u64::from(self.register & 63) << 14,
        };
        let predicate = u64::from(self.predicate & 7) << 10 | u64::from(self.unless) << 13;
        raw | register | predicate
    }
}

/// A kernel that adds vectors of words. Constants in bank 0: the 64-bit addresses of both summands
/// and of the sum, and the number of words.
pub fn vector_add() -> Vec<u64> {
    const INDEX: u8 = 0;
    const AT: u8 = 2;
    const A: u8 = 4;
    const B: u8 = 5;
    let constant = |offset| Source::Constant { bank: 0, offset };
    let new = Instruction::new;
    let mut kernel = vec![
        new(INDEX, Operation::Special(special::BLOCK)),
        new(A, Operation::Special(special::THREADS)),
        new(B, Operation::Special(special::THREAD)),
        new(
            INDEX,
            Operation::MultiplyAdd {
                a: INDEX,
                b: Source::Register(A),
                c: B,
            },
        ),
        // Not less: beyond the last word.
        new(
            0,
            Operation::Compare {
                a: INDEX,
                b: constant(24),
                how: 6,
                signed: false,
            },
        ),
        new(0, Operation::Exit).when(0),
        new(
            INDEX,
            Operation::Shift {
                a: INDEX,
                b: Source::Number(2),
            },
        ),
    ];
    let address = |offset| {
        let add = |register, a, b, with_carry| {
            let operation = Operation::Add {
                a,
                b,
                with_carry,
                keep_carry: !with_carry,
            };
            new(register, operation)
        };
        [
            add(AT, INDEX, constant(offset), false),
            add(AT + 1, NONE, constant(offset + 4), true),
        ]
    };
    let (address_of, offset) = (AT, 0);
    for (summand, register) in [(0, A), (8, B)] {
        kernel.extend(address(summand));
        let load = Operation::Load {
            address: address_of,
            offset,
        };
        kernel.push(new(register, load));
    }
    kernel.push(new(
        A,
        Operation::Add {
            a: A,
            b: Source::Register(B),
            with_carry: false,
            keep_carry: false,
        },
    ));
    kernel.extend(address(16));
    let store = Operation::Store {
        address: address_of,
        offset,
    };
    kernel.push(new(A, store));
    kernel.push(new(0, Operation::Exit));
    kernel.into_iter().map(Instruction::encode).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn an_instruction_keeps_its_meaning(raw: u64) {
            if let Ok(instruction) = Instruction::parse(raw) {
                prop_assert_eq!(Instruction::parse(instruction.encode()), Ok(instruction));
            }
        }

        #[test]
        fn known_kinds_are_found(low in 0_u64..16, high in 0_u64..64, rest: u64) {
            let raw = low | high << 58 | rest & !OPERATION;
            if let Ok(instruction) = Instruction::parse(raw) {
                prop_assert!(instruction.register < 64 && instruction.predicate < 8);
            }
        }
    }

    #[test]
    fn encodings_are_those_of_the_chip() {
        // As Mesa's compiler writes them: S2R $r0 $tidx, MOV32I, EXIT, NOP.
        for (raw, instruction) in [
            (
                0x2c00_0000_8400_1c04,
                Instruction::new(0, Operation::Special(special::THREAD)),
            ),
            (
                0x1800_0000_0400_5de2,
                Instruction::new(1, Operation::Immediate(1)),
            ),
            (0x8000_0000_0000_1de7, Instruction::new(0, Operation::Exit)),
            (0x4000_0000_0000_1de4, Instruction::new(0, Operation::Nop)),
        ] {
            assert_eq!(Instruction::parse(raw), Ok(instruction), "{raw:#x}");
            assert_eq!(instruction.encode(), raw, "{instruction:?}");
        }
        assert_eq!(Instruction::parse(u64::MAX), Err(Unknown(u64::MAX)));
        for raw in vector_add() {
            let instruction = Instruction::parse(raw).expect("it is known");
            assert_eq!(instruction.encode(), raw);
        }
    }
}
