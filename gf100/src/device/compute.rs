//! Class 90c0: compute kernels, whose threads are executed one after another. They share nothing:
//! barriers, shared memory and textures are unknown instructions, which end the launch.
//!
//! | method | |
//! |---|---|
//! | 0x238, 0x23c | blocks in the grid: x (15:0) and y, z |
//! | 0x3ac, 0x3b0 | threads in a block, likewise |
//! | 0x3b4 | start of the kernel, relative to the code address |
//! | 0x1608, 0x160c | code address, high and low half |
//! | 0x2380, 0x2384, 0x2388 | constant buffer: size, and address, high and low half |
//! | 0x1694 | binds it to a bank: bit 0, number in 12:8 |
//! | 0x238c, 0x2390 | writes words into it from an offset on |
//! | 0x368 | launch |

use super::{
    fifo::{Budget, Refused, Registers},
    mmu::{BadAddress, Memory},
    tlb::User,
};
use crate::format::{
    instance::Space,
    instruction::{ALWAYS, Instruction, NONE, Operation, PREDICATES, REGISTERS, Source, special},
};

const GRID: u16 = 0x238;
const BLOCK: u16 = 0x3ac;
const START: u16 = 0x3b4;
/// Launches a kernel.
pub const LAUNCH: u16 = 0x368;
const CODE: u16 = 0x1608;
const BIND: u16 = 0x1694;
const CONSTANTS: u16 = 0x2380;
const POSITION: u16 = 0x238c;
const DATA: std::ops::Range<u16> = 0x2390..0x23d0;

/// Maximum number of threads in a block.
const MOST_THREADS: u64 = 1024;
/// Cost of an instruction.
const COST: u32 = 8;

/// A constant bank.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
struct Bank {
    address: u64,
    bytes: u32,
}

/// State of the class in addition to its registers.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct State {
    banks: [Bank; 16],
    position: u32,
}

/// A thread.
#[derive(Clone, Debug, Eq, PartialEq)]
struct Thread {
    at: u64,
    registers: [u32; REGISTERS],
    predicates: [bool; PREDICATES],
    carry: bool,
}

/// A launch in progress.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Launch {
    start: u64,
    banks: [Bank; 16],
    grid: [u32; 3],
    block: [u32; 3],
    /// The current thread, and the number of threads.
    number: u64,
    count: u64,
    thread: Thread,
}

/// What a method requests.
pub enum Work {
    /// Nothing.
    None,
    /// Write a word.
    Constant {
        /// The address.
        address: u64,
        /// The word.
        word: u32,
    },
    /// Launch a kernel.
    Launch(Box<Launch>),
}

/// Why a launch cannot continue.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Bad {
    /// A bad address.
    Address(BadAddress),
    /// A bad instruction.
    Instruction(u64),
}

impl From<BadAddress> for Bad {
    fn from(bad: BadAddress) -> Self {
        Self::Address(bad)
    }
}

/// Executes a method whose word is already in `registers`. Returns `None` for methods of other
/// units.
pub fn method(
    state: &mut State,
    registers: &Registers,
    address: u16,
    data: u32,
) -> Option<Result<Work, Refused>> {
    let wide =
        |at: u16| u64::from(registers.get(at) & 0xff) << 32 | u64::from(registers.get(at + 4));
    match address {
        BIND => {
            let bank = state.banks.get_mut((data >> 8 & 0x1f) as usize);
            let Some(bank) = bank else {
                return Some(Err(Refused));
            };
            *bank = match data & 1 {
                0 => Bank::default(),
                _ => Bank {
                    address: wide(CONSTANTS + 4),
                    bytes: registers.get(CONSTANTS) & 0x1_ffff,
                },
            };
            Some(Ok(Work::None))
        }
        POSITION => {
            state.position = data & 0xfffc;
            Some(Ok(Work::None))
        }
        _ if DATA.contains(&address) => {
            let at = wide(CONSTANTS + 4) + u64::from(state.position);
            state.position = state.position.wrapping_add(4) & 0xfffc;
            Some(Ok(Work::Constant {
                address: at,
                word: data,
            }))
        }
        LAUNCH => Some(launch(state, registers).map(Work::Launch)),
        _ => None,
    }
}

fn launch(state: &State, registers: &Registers) -> Result<Box<Launch>, Refused> {
    let extent = |at: u16| {
        let both = registers.get(at);
        [both & 0xffff, both >> 16, registers.get(at + 4) & 0xffff]
    };
    let (grid, block) = (extent(GRID), extent(BLOCK));
    let product = |extent: [u32; 3]| extent.into_iter().map(u64::from).product::<u64>();
    let (blocks, threads) = (product(grid), product(block));
    if threads == 0 || threads > MOST_THREADS {
        return Err(Refused);
    }
    let code = u64::from(registers.get(CODE) & 0xff) << 32 | u64::from(registers.get(CODE + 4));
    let start = code + u64::from(registers.get(START));
    Ok(Box::new(Launch {
        start,
        banks: state.banks,
        grid,
        block,
        number: 0,
        // Less than 2^48 times 2^10.
        count: blocks * threads,
        thread: Thread::new(start),
    }))
}

impl Thread {
    fn new(start: u64) -> Self {
        Self {
            at: start,
            registers: [0; REGISTERS],
            predicates: [false; PREDICATES],
            carry: false,
        }
    }

    fn get(&self, register: u8) -> u32 {
        let found = self.registers.get(usize::from(register));
        found.copied().unwrap_or(0)
    }

    fn set(&mut self, register: u8, word: u32) {
        if let Some(its) = self.registers.get_mut(usize::from(register)) {
            *its = word;
        }
    }

    /// The address in two registers, plus an offset.
    fn address(&self, register: u8, offset: i32) -> u64 {
        let high = match register {
            NONE => 0,
            register => self.get(register + 1),
        };
        let address = u64::from(high) << 32 | u64::from(self.get(register));
        address.wrapping_add_signed(offset.into())
    }

    fn is_to(&self, instruction: Instruction) -> bool {
        let found = self.predicates.get(usize::from(instruction.predicate));
        let value = found.copied().unwrap_or(instruction.predicate == ALWAYS);
        value != instruction.unless
    }
}

impl Launch {
    /// Continues until all threads have ended or the budget is spent. Returns whether all have
    /// ended.
    pub fn advance(
        &mut self,
        memory: &Memory,
        space: Space,
        budget: &mut Budget,
    ) -> Result<bool, Bad> {
        while self.number < self.count {
            if !budget.spend(COST) {
                return Ok(false);
            }
            let mut bytes = [0; 8];
            memory.read_at(User::Engine, space, self.thread.at, &mut bytes)?;
            let raw = u64::from_le_bytes(bytes);
            let instruction = Instruction::parse(raw).map_err(|_| Bad::Instruction(raw))?;
            self.thread.at = self.thread.at.wrapping_add(8);
            if self.thread.is_to(instruction) && self.step(instruction, memory, space)? {
                self.number += 1;
                self.thread = Thread::new(self.start);
            }
        }
        Ok(true)
    }

    fn source(&self, source: Source, memory: &Memory, space: Space) -> Result<u32, BadAddress> {
        Ok(match source {
            Source::Register(register) => self.thread.get(register),
            Source::Number(number) => number as u32,
            Source::Constant { bank, offset } => {
                // Bank numbers have four bits. Reads beyond the end return 0.
                let bank = self.banks[usize::from(bank & 15)];
                let mut word = [0; 4];
                if u32::from(offset) + 4 <= bank.bytes {
                    memory.read_at(
                        User::Engine,
                        space,
                        bank.address + u64::from(offset & !3),
                        &mut word,
                    )?;
                }
                u32::from_le_bytes(word)
            }
        })
    }

    fn special(&self, which: u8) -> u32 {
        let threads = self.block.map(u64::from);
        let within = self.number % (threads[0] * threads[1] * threads[2]);
        let block = self.number / (threads[0] * threads[1] * threads[2]);
        let grid = self.grid.map(u64::from);
        // Extents have 16 bits, and none is 0 if there are threads.
        let place = |at: u64, extent: [u64; 3], axis: u8| match axis {
            0 => at % extent[0],
            1 => at / extent[0] % extent[1],
            _ => at / extent[0] / extent[1],
        } as u32;
        let axis = |first: u8| which.checked_sub(first).filter(|axis| *axis < 3);
        if let Some(axis) = axis(special::THREAD) {
            place(within, threads, axis)
        } else if let Some(axis) = axis(special::BLOCK) {
            place(block, grid, axis)
        } else if let Some(axis) = axis(special::THREADS) {
            self.block[usize::from(axis)]
        } else if let Some(axis) = axis(special::BLOCKS) {
            self.grid[usize::from(axis)]
        } else {
            0
        }
    }

    /// Executes an instruction. Returns whether the thread has ended.
    fn step(
        &mut self,
        instruction: Instruction,
        memory: &Memory,
        space: Space,
    ) -> Result<bool, BadAddress> {
        let register = instruction.register;
        let result = match instruction.operation {
            Operation::Nop => return Ok(false),
            Operation::Exit => return Ok(true),
            Operation::Branch(distance) => {
                self.thread.at = self.thread.at.wrapping_add_signed(distance.into());
                return Ok(false);
            }
            Operation::Special(which) => self.special(which),
            Operation::Immediate(word) => word,
            Operation::Move(source) => self.source(source, memory, space)?,
            Operation::Add {
                a,
                b,
                with_carry,
                keep_carry,
            } => {
                let b = self.source(b, memory, space)?;
                let carry = u64::from(with_carry && self.thread.carry);
                let sum = u64::from(self.thread.get(a)) + u64::from(b) + carry;
                if keep_carry {
                    self.thread.carry = sum >> 32 != 0;
                }
                sum as u32
            }
            Operation::MultiplyAdd { a, b, c } => {
                let b = self.source(b, memory, space)?;
                let product = self.thread.get(a).wrapping_mul(b);
                product.wrapping_add(self.thread.get(c))
            }
            Operation::Shift { a, b } => {
                let by = self.source(b, memory, space)?;
                self.thread.get(a).checked_shl(by).unwrap_or(0)
            }
            Operation::Compare { a, b, how, signed } => {
                let (a, b) = (self.thread.get(a), self.source(b, memory, space)?);
                let order = match signed {
                    true => (a as i32).cmp(&(b as i32)),
                    false => a.cmp(&b),
                };
                let bit = match order {
                    std::cmp::Ordering::Less => 1,
                    std::cmp::Ordering::Equal => 2,
                    std::cmp::Ordering::Greater => 4,
                };
                if let Some(its) = self.thread.predicates.get_mut(usize::from(register)) {
                    *its = how & bit != 0;
                }
                return Ok(false);
            }
            Operation::Load { address, offset } => {
                let mut word = [0; 4];
                let at = self.thread.address(address, offset);
                memory.read_at(User::Engine, space, at, &mut word)?;
                u32::from_le_bytes(word)
            }
            Operation::Store { address, offset } => {
                let at = self.thread.address(address, offset);
                memory.write_at(
                    User::Engine,
                    space,
                    at,
                    &self.thread.get(register).to_le_bytes(),
                )?;
                return Ok(false);
            }
        };
        self.thread.set(register, result);
        Ok(false)
    }
}
