//! Lowers a module's syntax tree to a kernel's program. [`opcode`]: one instruction.

mod opcode;

use std::collections::HashMap;

use super::{
    memory::CODE_WINDOW,
    program::{Address, Builtin, Callee, Function, Instruction, Op, Program, Reg, Special, Src},
};
use crate::ptx::{self, Error, Module, Operand, Space, Statement, Variable};

/// Maximum size of a function's variables in bytes.
const FRAME: u64 = 512 << 10;
/// Maximum number of registers of a function.
const REGISTERS: u32 = 1 << 17;

/// Addresses of variables outside functions.
pub type Globals = HashMap<String, u64>;

/// Lowers a kernel to a program.
///
/// # Errors
/// It uses something unsupported or an undeclared name.
pub fn lower(module: &Module, kernel: &ptx::Function, globals: &Globals) -> Result<Program, Error> {
    let mut shared = Shared::default();
    let mut names = vec![kernel.name.clone()];
    let mut functions = Vec::new();
    let mut parameters = Vec::new();
    let mut parameter_bytes = 0;
    for parameter in &kernel.parameters {
        let at = align(parameter_bytes, parameter.align)?;
        parameters.push((at, parameter.size));
        parameter_bytes = at + parameter.size;
    }
    while functions.len() < names.len() {
        let name = names[functions.len()].clone();
        let found = module
            .functions
            .iter()
            .find(|f| f.name == name && f.body.is_some());
        let Some(function) = found else {
            return Err(Error::new(
                kernel.line,
                format!("nobody defines the function {name}"),
            ));
        };
        let lowering = Lowering {
            module,
            globals,
            function,
            kernel_parameters: &parameters,
            shared: &mut shared,
            names: &mut names,
            scopes: vec![HashMap::new()],
            targets: HashMap::new(),
            labels: HashMap::new(),
            registers: 0,
            frame: 0,
            line: function.line,
        };
        functions.push(lowering.function()?);
    }
    Ok(Program {
        functions,
        parameters,
        parameter_bytes,
        shared: shared.end()?,
        max_threads: kernel.max_threads.unwrap_or(1024).min(1024),
    })
}

fn align(at: u64, to: u64) -> Result<u64, Error> {
    at.checked_next_multiple_of(to.max(1))
        .filter(|at| *at <= 1 << 31)
        .ok_or_else(|| Error::new(0, "variables are too large"))
}

/// The shared variables that a kernel uses. Those of dynamic size come last.
#[derive(Default)]
struct Shared {
    size: u64,
    dynamic_align: u64,
    known: HashMap<String, u64>,
    /// Their start is known only after all others have been placed: a special register holds it.
    dynamic: bool,
}

/// Placeholder for the offset of dynamic memory.
const DYNAMIC: u64 = u64::MAX / 2;

impl Shared {
    fn offset(&mut self, variable: &Variable, scope: &str) -> Result<u64, Error> {
        if variable.external && variable.size == 0 {
            self.dynamic = true;
            self.dynamic_align = self.dynamic_align.max(variable.align);
            return Ok(DYNAMIC);
        }
        let key = format!("{scope} {}", variable.name);
        if let Some(at) = self.known.get(&key) {
            return Ok(*at);
        }
        let at = align(self.size, variable.align)?;
        self.size = at + variable.size;
        self.known.insert(key, at);
        Ok(at)
    }

    fn end(&self) -> Result<u64, Error> {
        // Dynamic memory is aligned to at least 16 bytes.
        if self.dynamic {
            align(self.size, self.dynamic_align.max(16))
        } else {
            Ok(self.size)
        }
    }
}

/// Meaning of a name.
#[derive(Clone, Copy, Debug)]
enum Meaning {
    Register(Reg),
    /// A variable in the frame, accessible by both `ld.param` and `ld.local`.
    Frame(u64),
    /// A kernel's parameter.
    Parameter(u64),
    Shared(u64),
    Global(u64),
    Function(usize),
}

/// Resolves names in operands while instructions are decoded.
pub struct Lowering<'a> {
    module: &'a Module,
    globals: &'a Globals,
    function: &'a ptx::Function,
    kernel_parameters: &'a [(u64, u64)],
    shared: &'a mut Shared,
    names: &'a mut Vec<String>,
    scopes: Vec<HashMap<String, Meaning>>,
    targets: HashMap<String, Vec<String>>,
    labels: HashMap<String, usize>,
    registers: u32,
    frame: u64,
    line: u32,
}

impl Lowering<'_> {
    /// An error in the current line.
    pub fn error<T>(&self, what: impl Into<String>) -> Result<T, Error> {
        Err(Error::new(self.line, what))
    }

    fn define(&mut self, name: &str, meaning: Meaning) {
        if let Some(scope) = self.scopes.last_mut() {
            scope.insert(name.to_owned(), meaning);
        }
    }

    fn in_frame(&mut self, variable: &Variable) -> Result<u64, Error> {
        let at = align(self.frame, variable.align)?;
        self.frame = at + variable.size;
        if self.frame > FRAME {
            return self.error(format!(
                "{} makes a frame of {} bytes",
                variable.name, self.frame
            ));
        }
        Ok(at)
    }

    fn function(mut self) -> Result<Function, Error> {
        let function = self.function;
        let mut takes = Vec::new();
        let mut returns = Vec::new();
        if function.entry {
            let places = self.kernel_parameters.iter();
            let all: Vec<_> = function.parameters.iter().zip(places).collect();
            for (parameter, (at, _)) in all {
                self.define(&parameter.name, Meaning::Parameter(*at));
            }
        } else {
            for (list, places) in [
                (&function.parameters, &mut takes),
                (&function.returns, &mut returns),
            ] {
                for variable in list {
                    let at = self.in_frame(variable)?;
                    places.push((at, variable.size));
                    self.define(&variable.name, Meaning::Frame(at));
                }
            }
        }
        let body = function.body.as_deref().unwrap_or_default();
        // Find all labels first, because branches may go forward.
        let mut count = 0;
        for statement in body {
            match statement {
                Statement::Label(name) => {
                    self.labels.insert(name.clone(), count);
                }
                Statement::Targets(name, targets) => {
                    self.targets.insert(name.clone(), targets.clone());
                }
                Statement::Instruction(_) => count += 1,
                _ => {}
            }
        }
        let mut code = Vec::with_capacity(count + 1);
        for statement in body {
            self.statement(statement, &mut code)?;
        }
        code.push(Instruction {
            guard: None,
            op: Op::Return,
            line: self.line,
        });
        Ok(Function {
            name: function.name.clone(),
            code,
            registers: self.registers,
            frame: self.frame.next_multiple_of(16),
            takes,
            returns,
        })
    }

    fn statement(
        &mut self,
        statement: &Statement,
        code: &mut Vec<Instruction>,
    ) -> Result<(), Error> {
        match statement {
            Statement::Enter => self.scopes.push(HashMap::new()),
            Statement::Leave => {
                if self.scopes.len() > 1 {
                    self.scopes.pop();
                }
            }
            Statement::Label(_) | Statement::Targets(..) => {}
            Statement::Registers(name, count) => {
                let first = self.registers;
                self.registers = first.saturating_add(count.unwrap_or(1));
                if self.registers > REGISTERS {
                    return self.error("too many registers");
                }
                match count {
                    Some(count) => {
                        for number in 0..*count {
                            let register = Meaning::Register(first + number);
                            self.define(&format!("{name}{number}"), register);
                        }
                    }
                    None => self.define(name, Meaning::Register(first)),
                }
            }
            Statement::Variable(variable) => {
                let meaning = match variable.space {
                    Space::Shared => {
                        let scope = self.function.name.clone();
                        Meaning::Shared(self.shared.offset(variable, &scope)?)
                    }
                    Space::Local | Space::Param => Meaning::Frame(self.in_frame(variable)?),
                    _ => {
                        return self.error(format!(
                            "{}: a global variable of a function",
                            variable.name
                        ));
                    }
                };
                self.define(&variable.name, meaning);
            }
            Statement::Instruction(instruction) => {
                self.line = instruction.line;
                let guard = match &instruction.guard {
                    Some((name, negated)) => Some((self.register_named(name)?, *negated)),
                    None => None,
                };
                let op = opcode::decode(self, instruction)?;
                code.push(Instruction {
                    guard,
                    op,
                    line: instruction.line,
                });
            }
        }
        Ok(())
    }

    fn meaning(&mut self, name: &str) -> Result<Meaning, Error> {
        if let Some(meaning) = self.scopes.iter().rev().find_map(|scope| scope.get(name)) {
            return Ok(*meaning);
        }
        if let Some(address) = self.globals.get(name) {
            return Ok(Meaning::Global(*address));
        }
        let module = self.module;
        let shared =
            |variable: &&Variable| variable.name == name && variable.space == Space::Shared;
        if let Some(variable) = module.variables.iter().find(shared) {
            return Ok(Meaning::Shared(self.shared.offset(variable, "")?));
        }
        if module
            .functions
            .iter()
            .any(|f| f.name == name && f.body.is_some() && !f.entry)
        {
            return Ok(Meaning::Function(self.number_of(name)));
        }
        self.error(format!("nobody declares {name}"))
    }

    fn number_of(&mut self, name: &str) -> usize {
        let known = self.names.iter().position(|known| known == name);
        known.unwrap_or_else(|| {
            self.names.push(name.to_owned());
            self.names.len() - 1
        })
    }

    fn register_named(&mut self, name: &str) -> Result<Reg, Error> {
        match self.meaning(name)? {
            Meaning::Register(register) => Ok(register),
            _ => self.error(format!("{name} is no register")),
        }
    }

    /// A register to write.
    pub fn register(&mut self, operand: &Operand) -> Result<Reg, Error> {
        match operand {
            Operand::Name(name) => self.register_named(name),
            other => self.error(format!("{other:?} is no register")),
        }
    }

    /// A register to write, or none (`_`).
    pub fn register_or_none(&mut self, operand: &Operand) -> Result<Option<Reg>, Error> {
        match operand {
            Operand::Name(name) if name == "_" => Ok(None),
            other => self.register(other).map(Some),
        }
    }

    /// A register, constant or address to read.
    pub fn source(&mut self, operand: &Operand) -> Result<Src, Error> {
        let (name, offset) = match operand {
            Operand::Bits(bits) | Operand::Double(bits) => return Ok(Src::Value(*bits)),
            Operand::Float(bits) => return Ok(Src::Value(u64::from(*bits))),
            Operand::Name(name) => (name, 0),
            Operand::Offset(name, offset) => (name, *offset),
            other => return self.error(format!("{other:?} is no value")),
        };
        if let Some(special) = special(name) {
            return Ok(special);
        }
        if name == "WARP_SZ" {
            return Ok(Src::Value(32));
        }
        let value = match self.meaning(name)? {
            Meaning::Register(_) if offset != 0 => return self.error("a register with an offset"),
            Meaning::Register(register) => return Ok(Src::Reg(register)),
            Meaning::Frame(at) => return Ok(Src::Frame(at.wrapping_add(offset))),
            Meaning::Shared(at) if at == DYNAMIC => {
                return Ok(Src::Special(Special::DynamicBase(offset)));
            }
            Meaning::Parameter(at) | Meaning::Shared(at) | Meaning::Global(at) => at,
            Meaning::Function(number) => CODE_WINDOW + number as u64,
        };
        Ok(Src::Value(value.wrapping_add(offset)))
    }

    /// A predicate to read, and whether it is negated.
    pub fn predicate(&mut self, operand: &Operand) -> Result<(Src, bool), Error> {
        match operand {
            Operand::Not(name) => Ok((Src::Reg(self.register_named(name)?), true)),
            other => Ok((self.source(other)?, false)),
        }
    }

    /// An address in a space.
    pub fn address(&mut self, operand: &Operand, mut space: Space) -> Result<Address, Error> {
        let Operand::Address(base, offset) = operand else {
            return self.error(format!("{operand:?} is no address"));
        };
        let base = self.source(base)?;
        // Parameters of functions are in their frames.
        if space == Space::Param && matches!(base, Src::Frame(_)) {
            space = Space::Local;
        }
        Ok(Address {
            space,
            base,
            offset: *offset,
        })
    }

    /// Target of a branch to a label.
    pub fn label(&self, operand: &Operand) -> Result<usize, Error> {
        match operand {
            Operand::Name(name) => match self.labels.get(name) {
                Some(place) => Ok(*place),
                None => self.error(format!("there is no label {name}")),
            },
            other => self.error(format!("{other:?} is no label")),
        }
    }

    /// Targets of an indexed branch.
    pub fn labels(&self, operand: &Operand) -> Result<Vec<usize>, Error> {
        let Operand::Name(name) = operand else {
            return self.error(format!("{operand:?} is no list of labels"));
        };
        let Some(targets) = self.targets.get(name) else {
            return self.error(format!("there is no list of labels {name}"));
        };
        targets
            .iter()
            .map(|target| self.label(&Operand::Name(target.clone())))
            .collect()
    }

    /// A call: `(returns), callee, (arguments)`.
    pub fn call(&mut self, operands: &[Operand]) -> Result<Op, Error> {
        let mut rest = operands;
        let mut returns = Vec::new();
        if let Some((Operand::Group(names), after)) = rest.split_first() {
            returns = self.places(names)?;
            rest = after;
        }
        let Some((Operand::Name(name), after)) = rest.split_first() else {
            return self.error("a call of nobody");
        };
        let takes = match after.first() {
            Some(Operand::Group(names)) => self.places(names)?,
            _ => Vec::new(),
        };
        let defined = self
            .module
            .functions
            .iter()
            .any(|f| f.name == *name && f.body.is_some());
        let who = match name.as_str() {
            "vprintf" => Callee::Builtin(Builtin::Print),
            "__assertfail" => Callee::Builtin(Builtin::Assert),
            _ if defined => Callee::Function(self.number_of(name)),
            _ if self.module.functions.iter().any(|f| f.name == *name) => {
                return self.error(format!("nobody defines the function {name}"));
            }
            _ => Callee::Address(self.source(&Operand::Name(name.clone()))?),
        };
        let wanted = match who {
            Callee::Builtin(Builtin::Print) => 2,
            Callee::Builtin(Builtin::Assert) => 5,
            _ => takes.len(),
        };
        if takes.len() != wanted {
            return self.error(format!("{name} takes {wanted} arguments"));
        }
        Ok(Op::Call {
            who,
            takes,
            returns,
        })
    }

    fn places(&mut self, names: &[Operand]) -> Result<Vec<(u64, u64)>, Error> {
        let mut all = Vec::new();
        for name in names {
            match self.source(name)? {
                // The callee knows the actual size: the bound here is the rest of the frame.
                Src::Frame(at) => all.push((at, self.frame.saturating_sub(at))),
                _ => return self.error("arguments in registers are not supported"),
            }
        }
        Ok(all)
    }
}

fn special(name: &str) -> Option<Src> {
    use super::program::Relation;
    let lane = |name: &str| match name {
        "x" => Some(0),
        "y" => Some(1),
        "z" => Some(2),
        _ => None,
    };
    let name = name.strip_prefix('%')?;
    if let Some((name, part)) = name.split_once('.') {
        let special = match name {
            "tid" => Special::Tid(lane(part)?),
            "ntid" => Special::Ntid(lane(part)?),
            "ctaid" | "clusterid" => Special::Ctaid(lane(part)?),
            "nctaid" | "nclusterid" => Special::Nctaid(lane(part)?),
            // A cluster has a single block.
            "cluster_ctaid" => return Some(Src::Value(0)),
            "cluster_nctaid" => return Some(Src::Value(1)),
            _ => return None,
        };
        return Some(Src::Special(special));
    }
    let special = match name {
        "laneid" => Special::LaneId,
        "warpid" => Special::WarpId,
        "nwarpid" => Special::WarpCount,
        "gridid" => Special::GridId,
        "lanemask_eq" => Special::LaneMask(Relation::Eq),
        "lanemask_lt" => Special::LaneMask(Relation::Lt),
        "lanemask_le" => Special::LaneMask(Relation::Le),
        "lanemask_gt" => Special::LaneMask(Relation::Gt),
        "lanemask_ge" => Special::LaneMask(Relation::Ge),
        "clock" | "clock64" => Special::Clock,
        "globaltimer" => Special::GlobalTimer,
        "dynamic_smem_size" => Special::DynamicShared,
        "total_smem_size" => Special::TotalShared,
        "smid" | "cluster_ctarank" => return Some(Src::Value(0)),
        "nsmid" | "cluster_nctarank" => return Some(Src::Value(1)),
        _ => return None,
    };
    Some(Src::Special(special))
}
