//! Parses tokens into a module.

use super::{
    Error, Function, Initial, Instruction, Module, Operand, Space, Statement, Type, Variable,
    lex::{Token, tokens},
};

/// Maximum size of a variable in bytes.
const LARGEST: u64 = 1 << 30;
/// Maximum number of registers that a line may declare.
const REGISTERS: u64 = 1 << 16;
/// Maximum nesting depth of operands.
const DEPTH: u32 = 8;

/// Parses a module.
///
/// # Errors
/// The text is not PTX, or uses features that compilers do not emit.
pub fn parse(text: &str) -> Result<Module, Error> {
    let mut parser = Parser {
        tokens: tokens(text)?,
        at: 0,
    };
    let mut module = Module::default();
    while parser.at < parser.tokens.len() {
        parser.item(&mut module)?;
    }
    if module.target == 0 {
        return Err(Error::new(0, "the module has no .target"));
    }
    Ok(module)
}

struct Parser {
    tokens: Vec<(Token, u32)>,
    at: usize,
}

impl Parser {
    fn line(&self) -> u32 {
        let last = self.tokens.len().saturating_sub(1);
        self.tokens
            .get(self.at.min(last))
            .map_or(0, |(_, line)| *line)
    }

    fn error<T>(&self, what: impl Into<String>) -> Result<T, Error> {
        Err(Error::new(self.line(), what))
    }

    fn peek(&self) -> Option<&Token> {
        self.tokens.get(self.at).map(|(token, _)| token)
    }

    fn peek_mark(&self, mark: char) -> bool {
        self.peek() == Some(&Token::Mark(mark))
    }

    fn next(&mut self) -> Option<Token> {
        let token = self.peek().cloned();
        self.at += 1;
        token
    }

    fn take(&mut self, mark: char) -> bool {
        let found = self.peek_mark(mark);
        self.at += usize::from(found);
        found
    }

    fn expect(&mut self, mark: char) -> Result<(), Error> {
        if self.take(mark) {
            return Ok(());
        }
        self.error(format!("{mark} expected, not {:?}", self.peek()))
    }

    fn dot(&mut self) -> Option<String> {
        match self.peek() {
            Some(Token::Dot(name)) => {
                let name = name.clone();
                self.at += 1;
                Some(name)
            }
            _ => None,
        }
    }

    fn word(&mut self) -> Result<String, Error> {
        match self.next() {
            Some(Token::Word(word)) => Ok(word),
            other => {
                self.at -= 1;
                self.error(format!("a name expected, not {other:?}"))
            }
        }
    }

    fn integer(&mut self) -> Result<u64, Error> {
        let negative = self.take('-');
        match self.next() {
            Some(Token::Integer(value)) if negative => Ok(value.wrapping_neg()),
            Some(Token::Integer(value)) => Ok(value),
            other => {
                self.at -= 1;
                self.error(format!("a number expected, not {other:?}"))
            }
        }
    }

    /// Skips a block in braces.
    fn skip_braces(&mut self) -> Result<(), Error> {
        self.expect('{')?;
        let mut depth = 1;
        while depth > 0 {
            match self.next() {
                Some(Token::Mark('{')) => depth += 1,
                Some(Token::Mark('}')) => depth -= 1,
                Some(_) => {}
                None => return self.error("an open brace"),
            }
        }
        Ok(())
    }

    fn item(&mut self, module: &mut Module) -> Result<(), Error> {
        if self.take(';') {
            return Ok(());
        }
        let Some(directive) = self.dot() else {
            return self.error(format!("a directive expected, not {:?}", self.peek()));
        };
        match directive.as_str() {
            "version" => {
                self.integer()?;
            }
            "target" => {
                let name = self.word()?;
                let digits: String = name.chars().filter(char::is_ascii_digit).collect();
                module.target = digits.parse().unwrap_or(0);
                while self.take(',') {
                    self.word()?;
                }
            }
            "address_size" => {
                if self.integer()? != 64 {
                    return self.error("addresses of 32 bits are not supported");
                }
            }
            "section" => {
                self.next();
                self.skip_braces()?;
            }
            "pragma" => {
                while !self.take(';') {
                    if self.next().is_none() {
                        return self.error("an open .pragma");
                    }
                }
            }
            "extern" | "visible" | "weak" | "common" => {
                let external = directive == "extern";
                let Some(next) = self.dot() else {
                    return self.error("a directive expected after a linkage");
                };
                self.declared(&next, external, module)?;
            }
            other => self.declared(other, false, module)?,
        }
        Ok(())
    }

    fn declared(
        &mut self,
        directive: &str,
        external: bool,
        module: &mut Module,
    ) -> Result<(), Error> {
        match directive {
            "entry" | "func" => {
                let function = self.function(directive == "entry")?;
                module.functions.push(function);
            }
            "global" | "const" | "shared" => {
                let space = space(directive);
                loop {
                    let mut variable = self.variable(space)?;
                    variable.external = external;
                    module.variables.push(variable);
                    if !self.take(',') {
                        break;
                    }
                }
                self.expect(';')?;
            }
            other => return self.error(format!(".{other} is not supported")),
        }
        Ok(())
    }

    fn function(&mut self, entry: bool) -> Result<Function, Error> {
        let line = self.line();
        let returns = if !entry && self.peek_mark('(') {
            self.parameters()?
        } else {
            Vec::new()
        };
        let name = self.word()?;
        let parameters = if self.peek_mark('(') {
            self.parameters()?
        } else {
            Vec::new()
        };
        let mut max_threads = None;
        while let Some(directive) = self.dot() {
            match directive.as_str() {
                "maxntid" | "reqntid" => {
                    let mut threads = self.integer()?;
                    while self.take(',') {
                        threads = threads.saturating_mul(self.integer()?);
                    }
                    max_threads = u32::try_from(threads).ok();
                }
                "minnctapersm" | "maxnreg" | "maxnctapersm" | "maxclusterrank" => {
                    self.integer()?;
                }
                "noreturn" | "explicitcluster" | "blocksareclusters" => {}
                "reqnctapercluster" => return self.error(".reqnctapercluster is not supported"),
                "pragma" => {
                    self.next();
                    self.expect(';')?;
                }
                other => return self.error(format!(".{other} is not supported")),
            }
        }
        let body = if self.take(';') {
            None
        } else {
            Some(self.body()?)
        };
        Ok(Function {
            name,
            entry,
            returns,
            parameters,
            max_threads,
            body,
            line,
        })
    }

    fn parameters(&mut self) -> Result<Vec<Variable>, Error> {
        self.expect('(')?;
        let mut all = Vec::new();
        while !self.take(')') {
            match self.dot().as_deref() {
                Some("param" | "reg") => all.push(self.variable(Space::Param)?),
                _ => return self.error("a parameter expected"),
            }
            self.take(',');
        }
        Ok(all)
    }

    /// A variable after its state space: `.align 8 .b8 name[16] = {1, 2}`.
    fn variable(&mut self, space: Space) -> Result<Variable, Error> {
        let (mut align, mut of, mut lanes) = (None, None, 1);
        let mut managed = false;
        while let Some(word) = self.dot() {
            match word.as_str() {
                "attribute" => {
                    self.expect('(')?;
                    match self.dot().as_deref() {
                        Some("managed") => managed = true,
                        _ => return self.error("only the attribute .managed is supported"),
                    }
                    self.expect(')')?;
                }
                "align" => align = Some(self.integer()?),
                "v2" => lanes = 2,
                "v4" => lanes = 4,
                // What a kernel's pointer parameter points to.
                "ptr" | "global" | "const" | "shared" | "local" => {}
                other => match Type::named(other) {
                    Some(named) => of = Some(named),
                    None => return self.error(format!("a variable of .{other} is not supported")),
                },
            }
        }
        let Some(of) = of else {
            return self.error("a variable without a type");
        };
        let name = self.word()?;
        let mut count = lanes;
        let mut last = None;
        while self.take('[') {
            let length = if self.peek_mark(']') {
                0
            } else {
                self.integer()?
            };
            self.expect(']')?;
            count = u64::saturating_mul(count, length);
            last = Some(length);
        }
        let mut initial = Vec::new();
        if self.take('=') {
            self.initial(&mut initial, 0)?;
        }
        if last == Some(0) {
            count = initial.len() as u64;
        }
        let size = count.saturating_mul(u64::from(of.size()));
        let align = align.unwrap_or(lanes * u64::from(of.size()));
        if size > LARGEST || !align.is_power_of_two() || align > 1 << 16 {
            return self.error(format!(
                "{name}: {size} bytes aligned to {align} are not supported"
            ));
        }
        if initial.len() as u64 > count {
            return self.error(format!("{name} has more values than elements"));
        }
        Ok(Variable {
            name,
            space,
            align,
            size,
            of,
            initial,
            external: false,
            managed,
        })
    }

    fn initial(&mut self, values: &mut Vec<Initial>, depth: u32) -> Result<(), Error> {
        if depth > DEPTH {
            return self.error("initial values nest too deeply");
        }
        if self.take('{') {
            while !self.take('}') {
                self.initial(values, depth + 1)?;
                self.take(',');
            }
            return Ok(());
        }
        let value = match self.peek() {
            Some(Token::Word(word)) if word == "generic" => {
                self.at += 1;
                self.expect('(')?;
                let name = self.word()?;
                self.expect(')')?;
                let offset = if self.take('+') { self.integer()? } else { 0 };
                Initial::Address(name, offset)
            }
            Some(Token::Word(word)) if word.starts_with(|c: char| c.is_ascii_digit()) => {
                return self.error("a number expected");
            }
            Some(Token::Word(_)) => {
                let name = self.word()?;
                let offset = if self.take('+') { self.integer()? } else { 0 };
                Initial::Address(name, offset)
            }
            Some(Token::Float(bits)) => {
                let bits = u64::from(*bits);
                self.at += 1;
                Initial::Bits(bits)
            }
            Some(Token::Double(bits)) => {
                let bits = *bits;
                self.at += 1;
                Initial::Bits(bits)
            }
            _ => Initial::Bits(self.integer()?),
        };
        values.push(value);
        Ok(())
    }

    fn body(&mut self) -> Result<Vec<Statement>, Error> {
        self.expect('{')?;
        let (mut depth, mut all) = (1, Vec::new());
        loop {
            if self.take('{') {
                depth += 1;
                all.push(Statement::Enter);
            } else if self.take('}') {
                depth -= 1;
                if depth == 0 {
                    return Ok(all);
                }
                all.push(Statement::Leave);
            } else if !self.take(';') {
                self.statement(&mut all)?;
            }
        }
    }

    fn statement(&mut self, all: &mut Vec<Statement>) -> Result<(), Error> {
        if let Some(directive) = self.dot() {
            match directive.as_str() {
                "reg" => return self.registers(all),
                "local" | "shared" | "param" | "global" | "const" => loop {
                    let variable = self.variable(space(&directive))?;
                    all.push(Statement::Variable(variable));
                    if !self.take(',') {
                        break;
                    }
                },
                "pragma" => {
                    self.next();
                }
                "section" => {
                    self.next();
                    return self.skip_braces();
                }
                other => return self.error(format!(".{other} is not supported")),
            }
            return self.expect(';');
        }
        let line = self.line();
        let guard = if self.take('@') {
            let negated = self.take('!');
            Some((self.word()?, negated))
        } else {
            None
        };
        let first = self.word()?;
        if guard.is_none() && self.take(':') {
            return self.labelled(first, all);
        }
        let mut opcode = vec![first];
        while let Some(part) = self.dot() {
            opcode.push(part);
        }
        let mut operands = Vec::new();
        while !self.take(';') {
            operands.push(self.operand(0)?);
            if !self.peek_mark(';') {
                self.expect(',')?;
            }
        }
        all.push(Statement::Instruction(Instruction {
            guard,
            opcode,
            operands,
            line,
        }));
        Ok(())
    }

    fn labelled(&mut self, name: String, all: &mut Vec<Statement>) -> Result<(), Error> {
        match self.peek() {
            Some(Token::Dot(directive)) if directive == "branchtargets" => {
                self.at += 1;
                let mut targets = vec![self.word()?];
                while self.take(',') {
                    targets.push(self.word()?);
                }
                self.expect(';')?;
                all.push(Statement::Targets(name, targets));
            }
            // Ignored: the callee knows its own parameters.
            Some(Token::Dot(directive)) if directive == "callprototype" => {
                while !self.take(';') {
                    if self.next().is_none() {
                        return self.error("an open .callprototype");
                    }
                }
            }
            _ => all.push(Statement::Label(name)),
        }
        Ok(())
    }

    fn registers(&mut self, all: &mut Vec<Statement>) -> Result<(), Error> {
        match self.dot() {
            Some(word) if Type::named(&word).is_some() => {}
            other => return self.error(format!("registers of {other:?} are not supported")),
        }
        loop {
            let name = self.word()?;
            let count = if self.take('<') {
                let count = self.integer()?;
                self.expect('>')?;
                if count > REGISTERS {
                    return self.error(format!("{count} registers are too many"));
                }
                Some(u32::try_from(count).unwrap_or(0))
            } else {
                None
            };
            all.push(Statement::Registers(name, count));
            if !self.take(',') {
                return self.expect(';');
            }
        }
    }

    fn operand(&mut self, depth: u32) -> Result<Operand, Error> {
        if depth > DEPTH {
            return self.error("operands nest too deeply");
        }
        let Some(token) = self.next() else {
            return self.error("an operand expected");
        };
        let operand = match token {
            Token::Mark('{') => Operand::Vector(self.list('}', depth)?),
            Token::Mark('(') => Operand::Group(self.list(')', depth)?),
            Token::Mark('[') => {
                let base = self.operand(depth + 1)?;
                self.expect(']')?;
                match base {
                    Operand::Offset(name, offset) => {
                        Operand::Address(Box::new(Operand::Name(name)), offset)
                    }
                    base => Operand::Address(Box::new(base), 0),
                }
            }
            Token::Mark('!') => Operand::Not(self.word()?),
            Token::Mark('-') => Operand::Bits(self.integer()?.wrapping_neg()),
            Token::Integer(bits) => Operand::Bits(bits),
            Token::Float(bits) => Operand::Float(bits),
            Token::Double(bits) => Operand::Double(bits),
            Token::Word(mut name) => {
                if name.starts_with('%')
                    && let Some(Token::Dot(part)) = self.peek()
                {
                    name = format!("{name}.{part}");
                    self.at += 1;
                }
                if self.take('+') || self.peek_mark('-') {
                    Operand::Offset(name, self.integer()?)
                } else {
                    Operand::Name(name)
                }
            }
            other => {
                self.at -= 1;
                return self.error(format!("an operand expected, not {other:?}"));
            }
        };
        if self.take('|') {
            let second = self.operand(depth + 1)?;
            return Ok(Operand::Pair(Box::new(operand), Box::new(second)));
        }
        Ok(operand)
    }

    fn list(&mut self, end: char, depth: u32) -> Result<Vec<Operand>, Error> {
        let mut all = Vec::new();
        while !self.take(end) {
            all.push(self.operand(depth + 1)?);
            self.take(',');
        }
        Ok(all)
    }
}

fn space(directive: &str) -> Space {
    match directive {
        "global" => Space::Global,
        "const" => Space::Const,
        "shared" => Space::Shared,
        "local" => Space::Local,
        _ => Space::Param,
    }
}
