//! Instructions in executable form: registers are numbered, and addresses and types are resolved.

use crate::ptx::{Space, Type};

/// A register of the running function.
pub type Reg = u32;

/// A kernel with all functions that it may call.
#[derive(Debug)]
pub struct Program {
    /// Functions, starting with the kernel.
    pub functions: Vec<Function>,
    /// Offset and size in bytes of each parameter.
    pub parameters: Vec<(u64, u64)>,
    /// Size of all parameters in bytes.
    pub parameter_bytes: u64,
    /// Size in bytes of static shared memory; dynamic memory follows it.
    pub shared: u64,
    /// Maximum number of threads per block.
    pub max_threads: u32,
}

/// A kernel or a function.
#[derive(Debug)]
pub struct Function {
    /// Its name.
    pub name: String,
    /// Its instructions.
    pub code: Vec<Instruction>,
    /// Number of registers.
    pub registers: u32,
    /// Size in bytes of its variables in a thread's memory, including parameters of functions.
    pub frame: u64,
    /// Offset in the frame and size in bytes of each parameter; empty for a kernel.
    pub takes: Vec<(u64, u64)>,
    /// The same for each return value.
    pub returns: Vec<(u64, u64)>,
}

/// An instruction.
#[derive(Debug)]
pub struct Instruction {
    /// The instruction is executed if this predicate is true or, where negated, false.
    pub guard: Option<(Reg, bool)>,
    /// The operation.
    pub op: Op,
    /// Its line in PTX.
    pub line: u32,
}

/// A value to read.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Src {
    /// A register.
    Reg(Reg),
    /// A constant, or an address.
    Value(u64),
    /// An offset in the function's frame, as an address of a thread's memory.
    Frame(u64),
    /// A special register.
    Special(Special),
}

/// Special registers (PTX ISA 9.0, 10).
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Special {
    Tid(u8),
    Ntid(u8),
    Ctaid(u8),
    Nctaid(u8),
    LaneId,
    WarpId,
    WarpCount,
    GridId,
    LaneMask(Relation),
    Clock,
    GlobalTimer,
    DynamicShared,
    TotalShared,
    /// The start of dynamic shared memory, plus an offset.
    DynamicBase(u64),
}

/// A relation of two numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Relation {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
}

/// A comparison of an instruction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Compare {
    /// False if either operand is NaN.
    Ordered(Relation),
    /// True if either operand is NaN.
    Unordered(Relation),
    /// Whether neither operand is NaN.
    Numbers,
    /// Whether either operand is NaN.
    NotNumbers,
}

/// Operations on predicates.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Logic {
    And,
    Or,
    Xor,
}

/// How a number is rounded.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Round {
    #[default]
    Nearest,
    Zero,
    Down,
    Up,
}

/// Modifiers of arithmetic.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Mode {
    /// Subnormal numbers are flushed to zero.
    pub ftz: bool,
    /// Results saturate.
    pub sat: bool,
    /// How results are rounded.
    pub round: Round,
}

/// Operations with one operand.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Unary {
    Neg,
    Abs,
    Not,
    Cnot,
    Popc,
    Clz,
    Brev,
    Bfind,
    BfindShift,
    Sqrt,
    Rsqrt,
    Rcp,
    Sin,
    Cos,
    Ex2,
    Lg2,
    Tanh,
}

/// Operations with two operands.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Binary {
    Add,
    Sub,
    MulLo,
    MulHi,
    MulWide,
    Div,
    Rem,
    Min,
    Max,
    MinNan,
    MaxNan,
    And,
    Or,
    Xor,
    Shl,
    Shr,
    CopySign,
}

/// Operations with three operands.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Ternary {
    MadLo,
    MadHi,
    MadWide,
    Fma,
    Bfe,
    Prmt,
    Lop3(u8),
    ShiftLeft { wrap: bool },
    ShiftRight { wrap: bool },
    Sad,
    Dp4a { unsigned_b: bool },
}

/// Atomic operations.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Atomic {
    Add,
    And,
    Or,
    Xor,
    Min,
    Max,
    Inc,
    Dec,
    Exchange,
    CompareAndSwap,
}

/// How a shuffle selects a lane.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Shuffle {
    Up,
    Down,
    Butterfly,
    Index,
}

/// What a warp votes on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Vote {
    All,
    Any,
    Uniform,
    Ballot,
}

/// Collective operations of a warp's threads.
#[derive(Clone, Copy, Debug)]
pub enum Together {
    Shuffle {
        how: Shuffle,
        d: Reg,
        p: Option<Reg>,
        a: Src,
        b: Src,
        c: Src,
    },
    Vote {
        how: Vote,
        d: Reg,
        p: Src,
        negated: bool,
    },
    Match {
        all: bool,
        size: u8,
        d: Reg,
        p: Option<Reg>,
        a: Src,
    },
    Reduce {
        how: Atomic,
        of: Type,
        d: Reg,
        a: Src,
    },
    Barrier,
}

/// The result that a barrier computes.
#[derive(Clone, Copy, Debug)]
pub enum BarrierResult {
    Count(Reg),
    And(Reg),
    Or(Reg),
}

/// Functions provided by the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Builtin {
    Print,
    Assert,
}

/// Target of a call.
#[derive(Clone, Copy, Debug)]
pub enum Callee {
    /// A function of the program.
    Function(usize),
    /// A function provided by the driver.
    Builtin(Builtin),
    /// A function's address.
    Address(Src),
}

/// An address: base plus offset.
#[derive(Clone, Copy, Debug)]
pub struct Address {
    pub space: Space,
    pub base: Src,
    pub offset: u64,
}

/// Operation of an instruction.
#[derive(Debug)]
pub enum Op {
    Nothing,
    Move {
        d: Reg,
        a: Src,
        size: u8,
    },
    Pack {
        d: Reg,
        parts: Vec<Src>,
        size: u8,
    },
    Unpack {
        parts: Vec<Option<Reg>>,
        a: Src,
        size: u8,
    },
    Load {
        of: Type,
        to: Vec<Option<Reg>>,
        at: Address,
    },
    Store {
        of: Type,
        from: Vec<Src>,
        at: Address,
    },
    Unary {
        op: Unary,
        of: Type,
        mode: Mode,
        d: Reg,
        a: Src,
    },
    Binary {
        op: Binary,
        of: Type,
        mode: Mode,
        d: Reg,
        a: Src,
        b: Src,
    },
    /// With a carry in or out: `add.cc`, `addc`, `sub.cc`, `subc`.
    Carry {
        subtract: bool,
        takes: bool,
        gives: bool,
        of: Type,
        d: Reg,
        a: Src,
        b: Src,
    },
    /// The same for `mad.cc` and `madc`.
    MadCarry {
        high: bool,
        takes: bool,
        gives: bool,
        of: Type,
        d: Reg,
        a: Src,
        b: Src,
        c: Src,
    },
    Ternary {
        op: Ternary,
        of: Type,
        mode: Mode,
        d: Reg,
        a: Src,
        b: Src,
        c: Src,
    },
    BitInsert {
        size: u8,
        d: Reg,
        a: Src,
        b: Src,
        c: Src,
        e: Src,
    },
    SetPredicate {
        how: Compare,
        of: Type,
        ftz: bool,
        with: Option<(Logic, Src, bool)>,
        p: Reg,
        q: Option<Reg>,
        a: Src,
        b: Src,
    },
    Set {
        how: Compare,
        to: Type,
        of: Type,
        ftz: bool,
        with: Option<(Logic, Src, bool)>,
        d: Reg,
        a: Src,
        b: Src,
    },
    Select {
        size: u8,
        d: Reg,
        a: Src,
        b: Src,
        p: Src,
    },
    SelectSign {
        size: u8,
        by: Type,
        d: Reg,
        a: Src,
        b: Src,
        c: Src,
    },
    NotANumber {
        of: Type,
        class: &'static str,
        d: Reg,
        a: Src,
    },
    Convert {
        to: Type,
        from: Type,
        round: Option<Round>,
        to_integer: bool,
        mode: Mode,
        d: Reg,
        a: Src,
    },
    /// Conversion to or from a generic address.
    ToGeneric {
        space: Space,
        d: Reg,
        a: Src,
    },
    FromGeneric {
        space: Space,
        d: Reg,
        a: Src,
    },
    IsSpace {
        space: Space,
        d: Reg,
        a: Src,
    },
    Branch(usize),
    BranchIndexed {
        to: Vec<usize>,
        index: Src,
    },
    Call {
        who: Callee,
        takes: Vec<(u64, u64)>,
        returns: Vec<(u64, u64)>,
    },
    Return,
    Exit,
    Trap,
    Barrier {
        id: Src,
        threads: Option<Src>,
        arrive: bool,
        result: Option<(BarrierResult, Src, bool)>,
    },
    Together {
        what: Together,
        mask: Src,
    },
    ActiveMask(Reg),
    Atomic {
        op: Atomic,
        of: Type,
        d: Option<Reg>,
        at: Address,
        b: Src,
        c: Src,
    },
    Fence,
    Yield,
    Copy {
        to: Address,
        from: Address,
        size: u64,
        filled: Option<Src>,
    },
}
