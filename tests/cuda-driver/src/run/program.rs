//! Instructions as they are executed: registers by number, addresses and types decided.

use crate::ptx::{Space, Type};

/// A register of the function that runs.
pub type Reg = u32;

/// A kernel with all functions that it may call.
#[derive(Debug)]
pub struct Program {
    /// The kernel first.
    pub functions: Vec<Function>,
    /// Where each parameter lies, and its bytes.
    pub parameters: Vec<(u64, u64)>,
    /// Bytes of all parameters.
    pub parameter_bytes: u64,
    /// Bytes of shared memory besides the dynamic one, which follows.
    pub shared: u64,
    /// Threads of a block at most.
    pub max_threads: u32,
}

/// A kernel or a function.
#[derive(Debug)]
pub struct Function {
    /// Its name.
    pub name: String,
    /// What it does.
    pub code: Vec<Instruction>,
    /// How many registers it has.
    pub registers: u32,
    /// Bytes of its variables in a thread's memory, parameters of functions included.
    pub frame: u64,
    /// Offset in the frame and bytes of each parameter; none for a kernel.
    pub takes: Vec<(u64, u64)>,
    /// The same of what it returns.
    pub returns: Vec<(u64, u64)>,
}

/// An instruction.
#[derive(Debug)]
pub struct Instruction {
    /// Executed if this predicate is true, or false where negated.
    pub guard: Option<(Reg, bool)>,
    /// What it does.
    pub op: Op,
    /// Where PTX has it.
    pub line: u32,
}

/// What is read.
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
    /// Where dynamic shared memory begins, and an offset.
    DynamicBase(u64),
}

/// How two numbers relate.
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
    /// False if either is not a number.
    Ordered(Relation),
    /// True if either is not a number.
    Unordered(Relation),
    /// Whether both are numbers.
    Numbers,
    /// Whether either is none.
    NotNumbers,
}

/// Operations of predicates.
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

/// Flags of arithmetic.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Mode {
    /// Subnormal numbers are zero.
    pub ftz: bool,
    /// Results are clamped.
    pub sat: bool,
    /// How results are rounded.
    pub round: Round,
}

/// Operations of one operand.
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

/// Operations of two operands.
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

/// Operations of three operands.
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

/// How a shuffle picks its lane.
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

/// What threads of a warp do together.
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

/// What a barrier computes.
#[derive(Clone, Copy, Debug)]
pub enum BarrierResult {
    Count(Reg),
    And(Reg),
    Or(Reg),
}

/// Functions that the driver brings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Builtin {
    Print,
    Assert,
}

/// Whom a call calls.
#[derive(Clone, Copy, Debug)]
pub enum Callee {
    /// A function of the program.
    Function(usize),
    /// One of the driver's.
    Builtin(Builtin),
    /// By address.
    Address(Src),
}

/// An address: a base and an offset.
#[derive(Clone, Copy, Debug)]
pub struct Address {
    pub space: Space,
    pub base: Src,
    pub offset: u64,
}

/// What an instruction does.
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
    /// To a generic address, or from one.
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
