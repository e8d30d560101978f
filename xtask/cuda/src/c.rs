//! Parses the declarations of a preprocessed C header: typedefs, structures, unions, enumerations and functions.
//! Function bodies are skipped; expressions are kept as text, for the C compiler.

use std::{collections::BTreeMap, iter::Peekable, vec::IntoIter};

use anyhow::{Context, Result, bail};

/// A C type. Only the constness of what a pointer points to is kept, no other qualifiers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Type {
    /// A base type by its words in C's usual order: `unsigned int`.
    Base(String),
    /// The name of a typedef.
    Named(String),
    /// A structure, union or enumeration by its tag.
    Tagged(Tag, String),
    /// The pointee, and whether it is const.
    Pointer(Box<Type>, bool),
    /// The element type, and the length as a C expression.
    Array(Box<Type>, String),
    /// The return type and the parameters.
    Function(Box<Type>, Vec<Field>),
}

/// The kind of a tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Tag {
    /// `struct`
    Structure,
    /// `union`
    Union,
    /// `enum`
    Enumeration,
}

/// A member of a structure, or a parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    /// Empty if C omits it.
    pub name: String,
    /// Its type.
    pub of: Type,
}

/// The members of a tagged type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body {
    /// Members of a structure or a union.
    Fields(Vec<Field>),
    /// Names of the values of an enumeration.
    Values(Vec<String>),
}

/// A tagged type with its members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Definition {
    /// Its kind.
    pub tag: Tag,
    /// Its name in C: `struct X`, or `X` if only a typedef names it; empty if it is nested in another one.
    pub c: String,
    /// Its members.
    pub body: Body,
    /// Whether it specifies an alignment of its own.
    pub aligned: bool,
}

/// A function declaration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Function {
    /// The symbol.
    pub symbol: String,
    /// Its parameters, in order.
    pub parameters: Vec<Field>,
    /// Its return type.
    pub returns: Type,
}

/// All declarations of a header.
#[derive(Debug, Default)]
pub struct Header {
    /// Typedefs by name.
    pub typedefs: BTreeMap<String, Type>,
    /// Structures, unions and enumerations by their Rust name.
    pub definitions: BTreeMap<String, Definition>,
    /// Functions in the order of the header.
    pub functions: Vec<Function>,
}

/// Parses the output of `cc -E`.
///
/// # Errors
/// The text uses C syntax that headers of libraries do not usually use.
pub fn parse(text: &str) -> Result<Header> {
    let mut parser = Parser {
        tokens: tokens(text)?.into_iter().peekable(),
        header: Header::default(),
    };
    while parser.tokens.peek().is_some() {
        parser.item()?;
    }
    Ok(parser.header)
}

fn tokens(text: &str) -> Result<Vec<String>> {
    let mut all = Vec::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let mut rest = line.trim_start();
        while let Some(first) = rest.chars().next() {
            let length = if first.is_alphanumeric() || first == '_' {
                let word = |c: char| c.is_alphanumeric() || c == '_' || c == '.';
                rest.find(|c| !word(c)).unwrap_or(rest.len())
            } else if first == '"' || first == '\'' {
                let end = rest[1..].find(first);
                2 + end.with_context(|| format!("an open literal: {line}"))?
            } else if let Some(long) = ["...", "<<", ">>", "->"]
                .iter()
                .find(|t| rest.starts_with(**t))
            {
                long.len()
            } else {
                first.len_utf8()
            };
            all.push(rest[..length].to_owned());
            rest = rest[length..].trim_start();
        }
    }
    Ok(all)
}

const BASE: &[&str] = &[
    "void", "char", "short", "int", "long", "float", "double", "signed", "unsigned", "_Bool",
];
const IGNORED: &[&str] = &[
    "extern",
    "static",
    "inline",
    "__inline",
    "__inline__",
    "volatile",
    "__extension__",
    "__restrict",
    "restrict",
    "__const",
    "register",
    "_Noreturn",
];

struct Parser {
    tokens: Peekable<IntoIter<String>>,
    header: Header,
}

impl Parser {
    fn next(&mut self) -> Result<String> {
        self.tokens
            .next()
            .context("the header ends in a declaration")
    }

    fn take(&mut self, what: &str) -> bool {
        self.tokens.next_if(|token| token == what).is_some()
    }

    fn expect(&mut self, what: &str) -> Result<()> {
        let next = self.next()?;
        if next != what {
            let after: Vec<_> = self.tokens.by_ref().take(8).collect();
            bail!("{what} expected, not {next} {}", after.join(" "));
        }
        Ok(())
    }

    /// Returns the text between brackets, without the outer ones.
    fn bracketed(&mut self, open: &str, close: &str) -> Result<String> {
        self.expect(open)?;
        let (mut depth, mut text) = (1, Vec::new());
        loop {
            let token = self.next()?;
            if token == open {
                depth += 1;
            } else if token == close {
                depth -= 1;
                if depth == 0 {
                    return Ok(text.join(" "));
                }
            }
            text.push(token);
        }
    }

    /// Skips attributes and other words without a meaning here. Returns whether an alignment was among them.
    fn skip(&mut self) -> Result<bool> {
        let mut aligned = false;
        loop {
            if self
                .tokens
                .next_if(|t| IGNORED.contains(&t.as_str()))
                .is_some()
            {
                continue;
            }
            let Some(token) = self.tokens.next_if(|t| {
                matches!(
                    t.as_str(),
                    "__attribute__" | "_Alignas" | "__asm__" | "asm" | "__declspec"
                )
            }) else {
                return Ok(aligned);
            };
            aligned |= self.bracketed("(", ")")?.contains("align") || token == "_Alignas";
        }
    }

    fn item(&mut self) -> Result<()> {
        if self.take(";") {
            return Ok(());
        }
        self.skip()?;
        let typedef = self.take("typedef");
        let (base, fresh) = self.specifiers("")?;
        if self.take(";") {
            return Ok(());
        }
        loop {
            let field = self.declarator(base.clone())?;
            self.skip()?;
            if typedef {
                self.typedef(field, fresh.as_deref());
            } else if let Type::Function(returns, parameters) = field.of {
                self.header.functions.push(Function {
                    symbol: field.name,
                    parameters,
                    returns: *returns,
                });
            } else if self.take("=") {
                while self.tokens.next_if(|t| t != ";" && t != ",").is_some() {}
            }
            if self.tokens.peek().is_some_and(|token| token == "{") {
                self.bracketed("{", "}")?;
                return Ok(());
            }
            if !self.take(",") {
                break;
            }
        }
        self.expect(";")
    }

    /// A typedef of an unnamed tag gives it a name.
    fn typedef(&mut self, field: Field, fresh: Option<&str>) {
        if let (Type::Tagged(tag, name), Some(fresh)) = (&field.of, fresh)
            && name == fresh
            && let Some(mut definition) = self.header.definitions.remove(fresh)
        {
            definition.c.clone_from(&field.name);
            self.header
                .definitions
                .insert(field.name.clone(), definition);
            let of = Type::Tagged(*tag, field.name.clone());
            self.header.typedefs.insert(field.name, of);
            return;
        }
        self.header.typedefs.insert(field.name, field.of);
    }

    /// Parses a declaration's type without its declarator. Also returns the name given to an unnamed tag.
    fn specifiers(&mut self, outer: &str) -> Result<(Type, Option<String>)> {
        let mut words: Vec<String> = Vec::new();
        let mut constant = false;
        loop {
            self.skip()?;
            if self.take("const") {
                constant = true;
                continue;
            }
            let Some(token) = self.tokens.peek().cloned() else {
                bail!("the header ends in a type");
            };
            let tag = match token.as_str() {
                "struct" => Tag::Structure,
                "union" => Tag::Union,
                "enum" => Tag::Enumeration,
                word if BASE.contains(&word) => {
                    words.push(self.next()?);
                    continue;
                }
                _ if !words.is_empty() => break,
                _ => {
                    let named = Type::Named(self.next()?);
                    return Ok((self.qualified(named, constant), None));
                }
            };
            self.next()?;
            let aligned = self.skip()?;
            let (name, fresh) = if self.tokens.peek().is_some_and(|token| token == "{") {
                let name = self.unnamed(outer);
                (name.clone(), Some(name))
            } else {
                (self.next()?, None)
            };
            if self.tokens.peek().is_some_and(|token| token == "{") {
                self.body(tag, &name, fresh.is_some(), aligned)?;
            }
            return Ok((self.qualified(Type::Tagged(tag, name), constant), fresh));
        }
        Ok((self.qualified(Type::Base(words.join(" ")), constant), None))
    }

    /// Creates a name for what C leaves unnamed. It is the same whenever the header is parsed.
    fn unnamed(&self, outer: &str) -> String {
        let free = |name: &String| !self.header.definitions.contains_key(name);
        let mut names = (1..).map(|number| format!("{outer}_unnamed{number}"));
        names.find(free).unwrap_or_default()
    }

    /// A `const` before a type is remembered until a pointer takes it.
    fn qualified(&mut self, of: Type, constant: bool) -> Type {
        if self.take("const") || constant {
            return Type::Pointer(Box::new(of), true);
        }
        of
    }

    fn body(&mut self, tag: Tag, name: &str, unnamed: bool, mut aligned: bool) -> Result<()> {
        self.expect("{")?;
        // Its place is reserved first, since names of nested types count the definitions.
        let word = match tag {
            Tag::Structure => "struct",
            Tag::Union => "union",
            Tag::Enumeration => "enum",
        };
        let c = if unnamed {
            String::new()
        } else {
            format!("{word} {name}")
        };
        let empty = Definition {
            tag,
            c,
            body: Body::Fields(Vec::new()),
            aligned,
        };
        self.header.definitions.insert(name.to_owned(), empty);
        let body = if tag == Tag::Enumeration {
            let mut values = Vec::new();
            while !self.take("}") {
                values.push(self.next()?);
                self.skip()?;
                if self.take("=") {
                    while self.tokens.next_if(|t| t != "," && t != "}").is_some() {}
                }
                self.take(",");
            }
            Body::Values(values)
        } else {
            let mut fields = Vec::new();
            while !self.take("}") {
                aligned |= self.skip()?;
                let (base, _) = self.specifiers(name)?;
                if self.take(";") {
                    fields.push(Field {
                        name: String::new(),
                        of: base,
                    });
                    continue;
                }
                loop {
                    let field = self.declarator(base.clone())?;
                    if self.take(":") {
                        bail!("{name}.{} is a bit field", field.name);
                    }
                    aligned |= self.skip()?;
                    fields.push(field);
                    if !self.take(",") {
                        break;
                    }
                }
                self.expect(";")?;
            }
            Body::Fields(fields)
        };
        aligned |= self.skip()?;
        if let Some(definition) = self.header.definitions.get_mut(name) {
            definition.body = body;
            definition.aligned = aligned;
        }
        Ok(())
    }

    fn declarator(&mut self, base: Type) -> Result<Field> {
        // A pointer that `qualified` created is a const type until the first star.
        let (mut of, mut constant) = match base {
            Type::Pointer(of, true) => (*of, true),
            other => (other, false),
        };
        self.skip()?;
        while self.take("*") {
            of = Type::Pointer(Box::new(of), constant);
            self.skip()?;
            constant = self.take("const");
            self.skip()?;
        }
        if self.take("(") {
            // A pointer to a function: ( * name ) ( parameters )
            self.skip()?;
            self.expect("*")?;
            self.skip()?;
            let name = match self.tokens.peek() {
                Some(token) if token != ")" => self.next()?,
                _ => String::new(),
            };
            self.expect(")")?;
            let parameters = self.parameters()?;
            let function = Type::Function(Box::new(of), parameters);
            return Ok(Field {
                name,
                of: Type::Pointer(Box::new(function), false),
            });
        }
        let identifier = |token: &String| {
            token
                .chars()
                .next()
                .is_some_and(|c| c.is_alphabetic() || c == '_')
        };
        let name = self.tokens.next_if(identifier).unwrap_or_default();
        self.skip()?;
        if self.tokens.peek().is_some_and(|token| token == "(") {
            let parameters = self.parameters()?;
            return Ok(Field {
                name,
                of: Type::Function(Box::new(of), parameters),
            });
        }
        let mut lengths = Vec::new();
        while self.tokens.peek().is_some_and(|token| token == "[") {
            lengths.push(self.bracketed("[", "]")?);
        }
        for length in lengths.into_iter().rev() {
            of = Type::Array(Box::new(of), length);
        }
        Ok(Field { name, of })
    }

    fn parameters(&mut self) -> Result<Vec<Field>> {
        self.expect("(")?;
        let mut all = Vec::new();
        while !self.take(")") {
            if self.take("...") {
                continue;
            }
            let (base, _) = self.specifiers("")?;
            let constant = matches!(base, Type::Pointer(_, true));
            let mut field = self.declarator(base)?;
            if field.name.is_empty() && field.of == Type::Base("void".to_owned()) {
                self.expect(")")?;
                break;
            }
            // As a parameter, an array is a pointer.
            if let Type::Array(of, _) = field.of {
                field.of = Type::Pointer(of, constant);
            }
            if field.name.is_empty() {
                field.name = format!("argument{}", all.len());
            }
            all.push(field);
            // A C++ default argument.
            if self.take("=") {
                while self.tokens.next_if(|t| t != "," && t != ")").is_some() {}
            }
            self.take(",");
        }
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(name: &str) -> Type {
        Type::Named(name.to_owned())
    }

    #[test]
    fn a_function_with_pointers_of_all_kinds_is_read() {
        let header = parse(
            "extern R f(const char **names, void *const *v, int (*back)(void *), char s[4]);",
        );
        let header = header.expect("it is C");
        let f = &header.functions[0];
        assert_eq!(f.symbol, "f");
        assert_eq!(f.returns, named("R"));
        let char = Type::Base("char".to_owned());
        let names = Type::Pointer(Box::new(Type::Pointer(Box::new(char.clone()), true)), false);
        assert_eq!(f.parameters[0].of, names);
        let void = Type::Base("void".to_owned());
        let v = Type::Pointer(Box::new(Type::Pointer(Box::new(void), false)), true);
        assert_eq!(f.parameters[1].of, v);
        assert!(
            matches!(&f.parameters[2].of, Type::Pointer(f, false) if matches!(**f, Type::Function(..)))
        );
        assert_eq!(f.parameters[3].of, Type::Pointer(Box::new(char), false));
    }

    #[test]
    fn a_typedef_names_a_structure_without_a_tag() {
        let header =
            parse("typedef struct { int a; union { int b; long c[2]; }; } T; typedef T U;");
        let header = header.expect("it is C");
        let Body::Fields(fields) = &header.definitions["T"].body else {
            panic!("it has fields");
        };
        assert_eq!(fields.len(), 2);
        assert_eq!(fields[0].name, "a");
        assert!(matches!(&fields[1].of, Type::Tagged(Tag::Union, _)));
        assert_eq!(header.typedefs["U"], named("T"));
        assert_eq!(header.definitions["T"].c, "T");
    }

    #[test]
    fn enumerations_keep_their_names_and_bodies_are_skipped() {
        let text = "enum E { A = 1 << 2, B, C = sizeof(int), }; static inline int f(void) { if (1) { } return 0; }";
        let header = parse(text).expect("it is C");
        let values = ["A", "B", "C"].map(str::to_owned).to_vec();
        assert_eq!(header.definitions["E"].body, Body::Values(values));
        assert_eq!(header.definitions["E"].c, "enum E");
    }
}
