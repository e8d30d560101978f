//! PTX as text and as a syntax tree. The meaning of instructions is decided when they are lowered.

mod lex;
mod parse;

pub use parse::parse;

/// An error in a module, with the PTX line that contains it, or 0 if no line is to blame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// Counted from 1.
    pub line: u32,
    /// Description of the error.
    pub what: String,
}

impl Error {
    /// An error in a line.
    pub fn new(line: u32, what: impl Into<String>) -> Self {
        Self {
            line,
            what: what.into(),
        }
    }
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "line {}: {}", self.line, self.what)
    }
}

impl std::error::Error for Error {}

/// A fundamental type (PTX ISA 9.0, 5.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Type {
    /// A predicate.
    Pred,
    /// Untyped bits: 1, 2, 4 or 8 bytes.
    B(u8),
    /// Unsigned.
    U(u8),
    /// Signed.
    S(u8),
    /// A float: 2, 4 or 8 bytes.
    F(u8),
}

impl Type {
    /// The type with this name, which follows a dot.
    pub fn named(name: &str) -> Option<Self> {
        Some(match name {
            "pred" => Self::Pred,
            "b8" => Self::B(1),
            "b16" => Self::B(2),
            "b32" => Self::B(4),
            "b64" => Self::B(8),
            "u8" => Self::U(1),
            "u16" => Self::U(2),
            "u32" => Self::U(4),
            "u64" => Self::U(8),
            "s8" => Self::S(1),
            "s16" => Self::S(2),
            "s32" => Self::S(4),
            "s64" => Self::S(8),
            "f16" => Self::F(2),
            "f32" => Self::F(4),
            "f64" => Self::F(8),
            _ => return None,
        })
    }

    /// Size in memory in bytes.
    pub fn size(self) -> u8 {
        match self {
            Self::Pred => 1,
            Self::B(size) | Self::U(size) | Self::S(size) | Self::F(size) => size,
        }
    }
}

/// A state space (PTX ISA 9.0, 5.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Space {
    /// Any of the others, depending on the address.
    Generic,
    /// The device's memory.
    Global,
    /// Device memory that is read-only.
    Const,
    /// Memory of a block.
    Shared,
    /// Memory of a thread.
    Local,
    /// Parameters of kernels and functions.
    Param,
}

/// A module.
#[derive(Debug, Default)]
pub struct Module {
    /// The architecture it was compiled for: 75 for `sm_75`.
    pub target: u32,
    /// Variables outside functions.
    pub variables: Vec<Variable>,
    /// Kernels and functions, including declarations.
    pub functions: Vec<Function>,
}

/// A variable or a parameter.
#[derive(Clone, Debug)]
pub struct Variable {
    /// Its name.
    pub name: String,
    /// Its state space.
    pub space: Space,
    /// Alignment in bytes; a power of two.
    pub align: u64,
    /// Size in bytes; 0 for dynamic shared memory.
    pub size: u64,
    /// Type of an element.
    pub of: Type,
    /// Initial values of the first elements; the rest is zero.
    pub initial: Vec<Initial>,
    /// Whether it is only declared here.
    pub external: bool,
    /// Whether the host can access it directly: `.attribute(.managed)`.
    pub managed: bool,
}

/// An element's initial value.
#[derive(Clone, Debug)]
pub enum Initial {
    /// The value as bits.
    Bits(u64),
    /// The address of another variable, plus an offset.
    Address(String, u64),
}

/// A kernel or a function.
#[derive(Debug)]
pub struct Function {
    /// Its name.
    pub name: String,
    /// Whether it is a kernel.
    pub entry: bool,
    /// Return values.
    pub returns: Vec<Variable>,
    /// Parameters.
    pub parameters: Vec<Variable>,
    /// Maximum number of threads per block, from `.maxntid` or `.reqntid`.
    pub max_threads: Option<u32>,
    /// None for a declaration.
    pub body: Option<Vec<Statement>>,
    /// Its line.
    pub line: u32,
}

/// A statement of a function's body.
#[derive(Debug)]
pub enum Statement {
    /// `{`
    Enter,
    /// `}`
    Leave,
    /// A label.
    Label(String),
    /// Labels for an indexed branch.
    Targets(String, Vec<String>),
    /// Registers: a name and the number of registers, numbered from 0; None for a single register
    /// of this very name.
    Registers(String, Option<u32>),
    /// A variable.
    Variable(Variable),
    /// An instruction.
    Instruction(Instruction),
}

/// An instruction.
#[derive(Debug)]
pub struct Instruction {
    /// The predicate that guards it, and whether it is negated.
    pub guard: Option<(String, bool)>,
    /// The opcode, split at its dots.
    pub opcode: Vec<String>,
    /// Its operands.
    pub operands: Vec<Operand>,
    /// Its line.
    pub line: u32,
}

/// An operand.
#[derive(Clone, Debug, PartialEq)]
pub enum Operand {
    /// A register, variable, function, label or special register.
    Name(String),
    /// A name and an offset.
    Offset(String, u64),
    /// A constant as bits.
    Bits(u64),
    /// `0f...`: the bits of a 32-bit float.
    Float(u32),
    /// `0d...`: the bits of a 64-bit float.
    Double(u64),
    /// `!p`
    Not(String),
    /// `{a, b}`
    Vector(Vec<Operand>),
    /// `[a + offset]`
    Address(Box<Operand>, u64),
    /// `p|q`
    Pair(Box<Operand>, Box<Operand>),
    /// `(a, b)`
    Group(Vec<Operand>),
}
