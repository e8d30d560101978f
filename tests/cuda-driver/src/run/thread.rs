//! One thread of a kernel.

use super::{
    Fault, FaultKind, arith,
    kernel::Launch,
    memory::{self, Bytes, CODE_WINDOW, LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW, WINDOW},
    print,
    program::{Address, Builtin, Callee, Function, Instruction, Op, Reg, Relation, Special, Src},
};
use crate::ptx::{Space, Type};

/// Maximum size of a thread's frames in bytes.
const STACK: usize = 512 << 10;
/// Maximum depth of calls.
const DEPTH: usize = 1024;

/// State of a thread.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum State {
    /// It can run.
    Ready,
    /// It waits for its block at barrier `id`, for this number of threads; 0 for all.
    Barrier { id: u8, threads: u32 },
    /// It waits for these lanes of its warp.
    Warp { mask: u32 },
    /// It is done.
    Done,
}

/// A call in progress.
#[derive(Clone, Copy, Debug)]
struct Frame {
    function: usize,
    pc: usize,
    registers: usize,
    local: usize,
}

/// A thread.
#[derive(Debug)]
pub struct Thread {
    pub state: State,
    pub at: [u32; 3],
    pub number: u32,
    frames: Vec<Frame>,
    registers: Vec<u64>,
    local: Bytes,
    carry: bool,
    ticks: u64,
}

/// A thread's view of its block.
pub struct Around<'a> {
    pub launch: &'a Launch<'a>,
    pub block: [u32; 3],
    pub shared: &'a mut Bytes,
    /// Lanes of the warp that are not done.
    pub active: u32,
}

fn nonsense(what: impl Into<String>) -> Fault {
    Fault::new(FaultKind::IllegalInstruction, what)
}

impl Thread {
    /// Creates a thread at the start of a kernel.
    pub fn new(at: [u32; 3], number: u32, kernel: &Function) -> Self {
        Self {
            state: State::Ready,
            at,
            number,
            frames: vec![Frame {
                function: 0,
                pc: 0,
                registers: 0,
                local: 0,
            }],
            registers: vec![0; kernel.registers as usize],
            local: Bytes(vec![0; usize::try_from(kernel.frame).unwrap_or(0)]),
            carry: false,
            ticks: 0,
        }
    }

    fn frame(&self) -> Frame {
        self.frames.last().copied().unwrap_or(Frame {
            function: 0,
            pc: 0,
            registers: 0,
            local: 0,
        })
    }

    /// The instruction at which a waiting thread waits.
    pub fn waiting_at<'a>(&self, launch: &Launch<'a>) -> Option<(&'a Instruction, (usize, usize))> {
        let frame = self.frame();
        let function = launch.program.functions.get(frame.function)?;
        Some((function.code.get(frame.pc)?, (frame.function, frame.pc)))
    }

    /// Continues after the instruction at which the thread waited.
    pub fn resume(&mut self) {
        if let Some(frame) = self.frames.last_mut() {
            frame.pc += 1;
        }
        self.state = State::Ready;
    }

    /// Sets a register.
    pub fn set(&mut self, register: Reg, value: u64) {
        let base = self.frame().registers;
        if let Some(place) = self.registers.get_mut(base + register as usize) {
            *place = value;
        }
    }

    /// Reads an operand.
    pub fn get(&self, source: Src, around: &Around<'_>) -> u64 {
        match source {
            Src::Reg(register) => {
                let base = self.frame().registers;
                self.registers
                    .get(base + register as usize)
                    .copied()
                    .unwrap_or(0)
            }
            Src::Value(value) => value,
            Src::Frame(offset) => (self.frame().local as u64).wrapping_add(offset),
            Src::Special(special) => self.special(special, around),
        }
    }

    fn special(&self, special: Special, around: &Around<'_>) -> u64 {
        let launch = around.launch;
        let lane = self.number % 32;
        let of =
            |all: [u32; 3], lane: u8| u64::from(all.get(usize::from(lane)).copied().unwrap_or(0));
        match special {
            Special::Tid(lane) => of(self.at, lane),
            Special::Ntid(lane) => of(launch.block, lane),
            Special::Ctaid(lane) => of(around.block, lane),
            Special::Nctaid(lane) => of(launch.grid, lane),
            Special::LaneId => u64::from(lane),
            Special::WarpId => u64::from(self.number / 32),
            Special::WarpCount => u64::from(launch.threads().div_ceil(32)),
            Special::GridId => launch.id,
            Special::LaneMask(relation) => u64::from(match relation {
                Relation::Lt => (1 << lane) - 1,
                Relation::Le => u32::MAX >> (31 - lane),
                Relation::Gt => !(u32::MAX >> (31 - lane)),
                Relation::Ge => u32::MAX << lane,
                _ => 1u32 << lane,
            }),
            Special::Clock => self.ticks,
            Special::GlobalTimer => launch
                .started
                .elapsed()
                .as_nanos()
                .try_into()
                .unwrap_or(u64::MAX),
            Special::DynamicShared => launch.dynamic,
            Special::TotalShared => launch.program.shared + launch.dynamic,
            Special::DynamicBase(offset) => launch.program.shared.wrapping_add(offset),
        }
    }

    /// Executes up to a number of instructions.
    ///
    /// # Errors
    /// A fault of the kernel, with its location.
    pub fn run(&mut self, around: &mut Around<'_>, steps: u32) -> Result<(), Fault> {
        for _ in 0..steps {
            if self.state != State::Ready {
                break;
            }
            if let Err(fault) = self.step(around) {
                let place = self.waiting_at(around.launch);
                let line = place.map_or(0, |(instruction, _)| instruction.line);
                let name = &around.launch.program.functions[self.frame().function].name;
                let what = format!(
                    "{name}, line {line} of its PTX, block {:?}, thread {:?}: {}",
                    around.block, self.at, fault.what
                );
                return Err(Fault { what, ..fault });
            }
        }
        Ok(())
    }

    fn step(&mut self, around: &mut Around<'_>) -> Result<(), Fault> {
        self.ticks += 1;
        let program = around.launch.program;
        let frame = self.frame();
        let instruction = &program.functions[frame.function].code[frame.pc];
        if let Some((p, negated)) = instruction.guard
            && (self.get(Src::Reg(p), around) & 1 == 1) == negated
        {
            self.resume();
            return Ok(());
        }
        let mut next = frame.pc + 1;
        match &instruction.op {
            Op::Nothing | Op::Fence | Op::Yield => {}
            Op::Move { d, a, size } => {
                let value = self.get(*a, around) & arith::mask(*size);
                self.set(*d, value);
            }
            Op::Pack { d, parts, size } => {
                let part = 8 * u32::from(*size) / u32::try_from(parts.len()).unwrap_or(1);
                let mut value = 0;
                for (at, source) in (0..).zip(parts) {
                    value |= (self.get(*source, around) & (u64::MAX >> (64 - part))) << (part * at);
                }
                self.set(*d, value);
            }
            Op::Unpack { parts, a, size } => {
                let part = 8 * u32::from(*size) / u32::try_from(parts.len()).unwrap_or(1);
                let value = self.get(*a, around);
                for (at, d) in (0..).zip(parts) {
                    if let Some(d) = d {
                        self.set(*d, value >> (part * at) & (u64::MAX >> (64 - part)));
                    }
                }
            }
            Op::Load { of, to, at } => self.load(*of, to, at, around)?,
            Op::Store { of, from, at } => self.store(*of, from, at, around)?,
            Op::Unary { op, of, mode, d, a } => {
                let value = arith::unary(*op, *of, *mode, self.get(*a, around));
                self.set(*d, value);
            }
            Op::Binary {
                op,
                of,
                mode,
                d,
                a,
                b,
            } => {
                let value =
                    arith::binary(*op, *of, *mode, self.get(*a, around), self.get(*b, around));
                self.set(*d, value);
            }
            Op::Ternary {
                op,
                of,
                mode,
                d,
                a,
                b,
                c,
            } => {
                let (a, b, c) = (
                    self.get(*a, around),
                    self.get(*b, around),
                    self.get(*c, around),
                );
                self.set(*d, arith::ternary(*op, *of, *mode, a, b, c));
            }
            Op::Carry {
                subtract,
                takes,
                gives,
                of,
                d,
                a,
                b,
            } => {
                let carry = *takes && self.carry;
                let (a, b) = (self.get(*a, around), self.get(*b, around));
                let (value, out) = arith::carried(*subtract, *of, a, b, carry);
                self.carry = if *gives { out } else { self.carry };
                self.set(*d, value);
            }
            Op::MadCarry {
                high,
                takes,
                gives,
                of,
                d,
                a,
                b,
                c,
            } => {
                use super::program::{Binary, Mode};
                let carry = *takes && self.carry;
                let op = if *high { Binary::MulHi } else { Binary::MulLo };
                let (a, b) = (self.get(*a, around), self.get(*b, around));
                let product = arith::binary(op, *of, Mode::default(), a, b);
                let (value, out) = arith::carried(false, *of, product, self.get(*c, around), carry);
                self.carry = if *gives { out } else { self.carry };
                self.set(*d, value);
            }
            Op::BitInsert {
                size,
                d,
                a,
                b,
                c,
                e,
            } => {
                let (a, b) = (self.get(*a, around), self.get(*b, around));
                let (c, e) = (self.get(*c, around), self.get(*e, around));
                self.set(*d, arith::insert(*size, a, b, c, e));
            }
            Op::SetPredicate {
                how,
                of,
                ftz,
                with,
                p,
                q,
                a,
                b,
            } => {
                let holds =
                    arith::compare(*how, *of, *ftz, self.get(*a, around), self.get(*b, around));
                let (yes, no) = (
                    self.with(holds, *with, around),
                    self.with(!holds, *with, around),
                );
                self.set(*p, u64::from(yes));
                if let Some(q) = q {
                    self.set(*q, u64::from(no));
                }
            }
            Op::Set {
                how,
                to,
                of,
                ftz,
                with,
                d,
                a,
                b,
            } => {
                let holds =
                    arith::compare(*how, *of, *ftz, self.get(*a, around), self.get(*b, around));
                let value = match (self.with(holds, *with, around), to) {
                    (false, _) => 0,
                    (true, Type::F(_)) => u64::from(1f32.to_bits()),
                    (true, to) => arith::masked(*to, u64::MAX),
                };
                self.set(*d, value);
            }
            Op::Select { size, d, a, b, p } => {
                let chosen = if self.get(*p, around) & 1 == 1 { a } else { b };
                let value = self.get(*chosen, around) & arith::mask(*size);
                self.set(*d, value);
            }
            Op::SelectSign {
                size,
                by,
                d,
                a,
                b,
                c,
            } => {
                use super::program::Compare;
                let c = self.get(*c, around);
                let first = arith::compare(Compare::Ordered(Relation::Ge), *by, false, c, 0);
                let value = self.get(if first { *a } else { *b }, around) & arith::mask(*size);
                self.set(*d, value);
            }
            Op::NotANumber { of, class, d, a } => {
                let holds = arith::class(*of, class, self.get(*a, around));
                self.set(*d, u64::from(holds));
            }
            Op::Convert {
                to,
                from,
                round,
                to_integer,
                mode,
                d,
                a,
            } => {
                let value = self.get(*a, around);
                self.set(
                    *d,
                    arith::convert(*to, *from, *round, *to_integer, *mode, value),
                );
            }
            Op::ToGeneric { space, d, a } => {
                let value = self.get(*a, around);
                self.set(*d, value.wrapping_add(window(*space)));
            }
            Op::FromGeneric { space, d, a } => {
                let value = self.get(*a, around);
                self.set(*d, value.wrapping_sub(window(*space)));
            }
            Op::IsSpace { space, d, a } => {
                let value = self.get(*a, around);
                let start = window(*space);
                let windows = [SHARED_WINDOW, LOCAL_WINDOW, PARAM_WINDOW];
                let inside = |start: u64| value >= start && value - start < WINDOW;
                let holds = if start == 0 {
                    !windows.into_iter().any(inside)
                } else {
                    inside(start)
                };
                self.set(*d, u64::from(holds));
            }
            Op::Branch(target) => next = *target,
            Op::BranchIndexed { to, index } => {
                let index = usize::try_from(self.get(*index, around)).unwrap_or(usize::MAX);
                next = *to
                    .get(index)
                    .ok_or_else(|| nonsense("a branch to no label of its list"))?;
            }
            Op::Call {
                who,
                takes,
                returns,
            } => return self.call(*who, takes, returns, around),
            Op::Return => return self.leave(around),
            Op::Exit => {
                self.state = State::Done;
                return Ok(());
            }
            Op::Trap => return Err(nonsense("trap")),
            Op::Barrier {
                id,
                threads,
                arrive,
                ..
            } => return self.barrier(*id, *threads, *arrive, around),
            Op::Together { mask, .. } => {
                let mask = (self.get(*mask, around) & arith::mask(4)) as u32;
                if mask & 1 << (self.number % 32) == 0 {
                    return Err(nonsense("a thread that is not in its own mask"));
                }
                self.state = State::Warp { mask };
                return Ok(());
            }
            Op::ActiveMask(d) => self.set(*d, u64::from(around.active)),
            Op::Atomic {
                op,
                of,
                d,
                at,
                b,
                c,
            } => {
                let (b, c) = (self.get(*b, around), self.get(*c, around));
                let old = match self.place(at, around)? {
                    (Space::Shared, place) => {
                        let old = around.shared.load(place, of.size(), "shared")?;
                        let new = memory::modify(*of, *op, old, b, c);
                        around.shared.store(place, of.size(), new, "shared")?;
                        old
                    }
                    (Space::Global, place) => around.launch.memory.atomic(place, *of, *op, b, c)?,
                    (space, _) => return Err(nonsense(format!("an atomic in {space:?} memory"))),
                };
                if let Some(d) = d {
                    self.set(*d, old);
                }
            }
            Op::Copy {
                to,
                from,
                size,
                filled,
            } => {
                let filled =
                    filled.map_or(*size, |filled| self.get(filled, around) & arith::mask(4));
                for at in 0..*size {
                    let from = Address {
                        offset: from.offset.wrapping_add(at),
                        ..*from
                    };
                    let to = Address {
                        offset: to.offset.wrapping_add(at),
                        ..*to
                    };
                    let byte = if at < filled {
                        self.read(&from, 1, around)?
                    } else {
                        0
                    };
                    self.write(&to, 1, byte, around)?;
                }
            }
        }
        if let Some(frame) = self.frames.last_mut() {
            frame.pc = next;
        }
        Ok(())
    }

    fn with(
        &self,
        holds: bool,
        with: Option<(super::program::Logic, Src, bool)>,
        around: &Around<'_>,
    ) -> bool {
        use super::program::Logic;
        let Some((logic, p, negated)) = with else {
            return holds;
        };
        let p = (self.get(p, around) & 1 == 1) != negated;
        match logic {
            Logic::And => holds & p,
            Logic::Or => holds | p,
            Logic::Xor => holds ^ p,
        }
    }

    /// The space and offset that an address refers to.
    fn place(&self, at: &Address, around: &Around<'_>) -> Result<(Space, u64), Fault> {
        let address = self.get(at.base, around).wrapping_add(at.offset);
        Ok(match at.space {
            // These may be 32 bits wide.
            Space::Shared | Space::Local if address >= WINDOW => {
                (at.space, address & arith::mask(4))
            }
            Space::Const => (Space::Global, address),
            Space::Generic => {
                let window = address & !(WINDOW - 1);
                match window {
                    SHARED_WINDOW => (Space::Shared, address - window),
                    LOCAL_WINDOW => (Space::Local, address - window),
                    PARAM_WINDOW => (Space::Param, address - window),
                    _ => (Space::Global, address),
                }
            }
            space => (space, address),
        })
    }

    fn read(&self, at: &Address, size: u8, around: &Around<'_>) -> Result<u64, Fault> {
        match self.place(at, around)? {
            (Space::Shared, place) => around.shared.load(place, size, "shared"),
            (Space::Local, place) => self.local.load(place, size, "local"),
            (Space::Param, place) => around.launch.parameters.load(place, size, "parameter"),
            (_, place) => around.launch.memory.load(place, size),
        }
    }

    fn write(
        &mut self,
        at: &Address,
        size: u8,
        value: u64,
        around: &mut Around<'_>,
    ) -> Result<(), Fault> {
        match self.place(at, around)? {
            (Space::Shared, place) => around.shared.store(place, size, value, "shared"),
            (Space::Local, place) => self.local.store(place, size, value, "local"),
            (Space::Param, _) => Err(nonsense("a store to a kernel's parameters")),
            (_, place) => around.launch.memory.store(place, size, value),
        }
    }

    fn vector(
        &self,
        of: Type,
        lanes: usize,
        at: &Address,
        around: &Around<'_>,
    ) -> Result<(), Fault> {
        let bytes = u64::from(of.size()) * lanes as u64;
        if lanes > 1 && at.space != Space::Param {
            let (_, place) = self.place(at, around)?;
            if !place.is_multiple_of(bytes) {
                let what = format!("a vector of {bytes} bytes at {place:#x}");
                return Err(Fault::new(FaultKind::Misaligned, what));
            }
        }
        Ok(())
    }

    fn load(
        &mut self,
        of: Type,
        to: &[Option<Reg>],
        at: &Address,
        around: &Around<'_>,
    ) -> Result<(), Fault> {
        self.vector(of, to.len(), at, around)?;
        // The base is read before a lane overwrites it.
        let base = Src::Value(self.get(at.base, around));
        let at = Address { base, ..*at };
        for (lane, register) in (0..).zip(to) {
            let at = Address {
                offset: at.offset.wrapping_add(lane * u64::from(of.size())),
                ..at
            };
            let value = self.read(&at, of.size(), around)?;
            if let Some(register) = register {
                self.set(*register, arith::extended(of, value));
            }
        }
        Ok(())
    }

    fn store(
        &mut self,
        of: Type,
        from: &[Src],
        at: &Address,
        around: &mut Around<'_>,
    ) -> Result<(), Fault> {
        self.vector(of, from.len(), at, around)?;
        for (lane, source) in (0..).zip(from) {
            let at = Address {
                offset: at.offset.wrapping_add(lane * u64::from(of.size())),
                ..*at
            };
            let value = self.get(*source, around);
            self.write(&at, of.size(), value, around)?;
        }
        Ok(())
    }

    fn barrier(
        &mut self,
        id: Src,
        threads: Option<Src>,
        arrive: bool,
        around: &Around<'_>,
    ) -> Result<(), Fault> {
        let id = self.get(id, around) & arith::mask(4);
        let threads = threads.map_or(0, |threads| self.get(threads, around) & arith::mask(4));
        if id > 15 || threads > 1024 || !threads.is_multiple_of(32) {
            return Err(nonsense(format!("barrier {id} of {threads} threads")));
        }
        if arrive {
            return Err(nonsense("bar.arrive is not supported"));
        }
        self.state = State::Barrier {
            id: id as u8,
            threads: threads as u32,
        };
        Ok(())
    }

    fn call(
        &mut self,
        who: Callee,
        takes: &[(u64, u64)],
        returns: &[(u64, u64)],
        around: &mut Around<'_>,
    ) -> Result<(), Fault> {
        let program = around.launch.program;
        let base = self.frame().local as u64;
        let number = match who {
            Callee::Builtin(builtin) => {
                let mut arguments = [0; 5];
                for (value, (at, bytes)) in arguments.iter_mut().zip(takes) {
                    *value = self
                        .local
                        .load(base + at, if *bytes < 8 { 4 } else { 8 }, "local")?;
                }
                let result = self.builtin(builtin, arguments, around)?;
                if let Some((at, bytes)) = returns.first()
                    && *bytes >= 4
                {
                    self.local.store(base + at, 4, result, "local")?;
                }
                if let Some(frame) = self.frames.last_mut() {
                    frame.pc += 1;
                }
                return Ok(());
            }
            Callee::Function(number) => number,
            Callee::Address(address) => {
                let address = self.get(address, around);
                let number = usize::try_from(address.wrapping_sub(CODE_WINDOW)).unwrap_or(0);
                if number == 0 || number >= program.functions.len() {
                    return Err(nonsense(format!(
                        "a call of {address:#x}, which is no function"
                    )));
                }
                number
            }
        };
        let callee = &program.functions[number];
        let local = self.local.0.len();
        let registers = self.registers.len();
        let size = usize::try_from(callee.frame).unwrap_or(usize::MAX);
        if self.frames.len() >= DEPTH || local.saturating_add(size) > STACK {
            return Err(Fault::new(
                FaultKind::IllegalAddress,
                "the calls are too deep",
            ));
        }
        if takes.len() != callee.takes.len() || returns.len() > callee.returns.len() {
            return Err(nonsense(format!(
                "a call of {} with other arguments",
                callee.name
            )));
        }
        self.local.0.resize(local + size, 0);
        for ((from, there), (to, bytes)) in takes.iter().zip(&callee.takes) {
            if bytes > there {
                return Err(nonsense(format!(
                    "a call of {} with shorter arguments",
                    callee.name
                )));
            }
            self.copy(base + from, local as u64 + to, *bytes)?;
        }
        self.registers
            .resize(registers + callee.registers as usize, 0);
        self.frames.push(Frame {
            function: number,
            pc: 0,
            registers,
            local,
        });
        Ok(())
    }

    fn copy(&mut self, from: u64, to: u64, bytes: u64) -> Result<(), Fault> {
        for at in 0..bytes {
            let byte = self.local.load(from + at, 1, "local")?;
            self.local.store(to + at, 1, byte, "local")?;
        }
        Ok(())
    }

    fn leave(&mut self, around: &Around<'_>) -> Result<(), Fault> {
        let program = around.launch.program;
        let left = self.frame();
        self.frames.pop();
        let Some(caller) = self.frames.last().copied() else {
            self.state = State::Done;
            return Ok(());
        };
        let code = &program.functions[caller.function].code;
        if let Some(Op::Call { returns, .. }) = code.get(caller.pc).map(|i| &i.op) {
            let callee = &program.functions[left.function];
            for ((to, there), (from, bytes)) in returns.iter().zip(&callee.returns) {
                self.copy(
                    left.local as u64 + from,
                    caller.local as u64 + to,
                    *bytes.min(there),
                )?;
            }
        }
        self.local.0.truncate(left.local);
        self.registers.truncate(left.registers);
        self.resume();
        Ok(())
    }

    /// Reads a byte at a generic address.
    fn byte(&self, at: u64, around: &Around<'_>) -> Result<u8, Fault> {
        let at = Address {
            space: Space::Generic,
            base: Src::Value(at),
            offset: 0,
        };
        self.read(&at, 1, around).map(|byte| byte as u8)
    }

    fn builtin(
        &self,
        builtin: Builtin,
        arguments: [u64; 5],
        around: &Around<'_>,
    ) -> Result<u64, Fault> {
        let byte = |at: u64| self.byte(at, around);
        match builtin {
            Builtin::Print => {
                let (text, count) = print::formatted(arguments[0], arguments[1], &byte)?;
                around.launch.output.say(&text);
                Ok(count)
            }
            Builtin::Assert => {
                let what = print::text(arguments[0], &byte)?;
                let file = print::text(arguments[1], &byte)?;
                let line = arguments[2] & arith::mask(4);
                let function = print::text(arguments[3], &byte)?;
                let said = [
                    file,
                    format!(":{line}: ").into_bytes(),
                    function,
                    b": assertion `".to_vec(),
                    what,
                ]
                .concat();
                let said = String::from_utf8_lossy(&said).into_owned() + "` failed";
                Err(Fault::new(FaultKind::Assert, said))
            }
        }
    }
}

fn window(space: Space) -> u64 {
    match space {
        Space::Shared => SHARED_WINDOW,
        Space::Local => LOCAL_WINDOW,
        Space::Param => PARAM_WINDOW,
        _ => 0,
    }
}
