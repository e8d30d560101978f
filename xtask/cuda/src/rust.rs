//! Generates C's types in Rust.

use std::{collections::BTreeSet, fmt::Write};

use anyhow::{Context, Result, bail};

use super::{
    c::{Body, Definition, Field, Header, Tag, Type},
    layout::Layout,
};

/// Generates types, and remembers which ones were requested.
pub struct Types<'a> {
    header: &'a Header,
    layout: &'a Layout,
    wanted: BTreeSet<String>,
    waiting: Vec<String>,
}

impl<'a> Types<'a> {
    /// Creates a generator for one header.
    pub fn new(header: &'a Header, layout: &'a Layout) -> Self {
        Self {
            header,
            layout,
            wanted: BTreeSet::new(),
            waiting: Vec::new(),
        }
    }

    /// Returns a type's name in Rust.
    ///
    /// # Errors
    /// No public function has used such a type so far.
    pub fn name(&mut self, of: &Type) -> Result<String> {
        Ok(match of {
            Type::Base(words) => base(words)?.to_owned(),
            Type::Named(name) => match name.as_str() {
                "size_t" => "usize".to_owned(),
                "uint64_t" => "u64".to_owned(),
                "uint32_t" => "u32".to_owned(),
                "int64_t" => "i64".to_owned(),
                "int32_t" => "i32".to_owned(),
                "uint16_t" => "u16".to_owned(),
                "uint8_t" => "u8".to_owned(),
                "int8_t" => "i8".to_owned(),
                // C's own file type, which is opaque here.
                "FILE" => "c_void".to_owned(),
                _ => self.want(name),
            },
            Type::Tagged(_, name) => self.want(name),
            Type::Pointer(of, constant) => match &**of {
                Type::Function(returns, parameters) => {
                    format!("Option<{}>", self.function(returns, parameters)?)
                }
                Type::Base(void) if void == "void" => {
                    format!("*{} c_void", if *constant { "const" } else { "mut" })
                }
                of => format!(
                    "*{} {}",
                    if *constant { "const" } else { "mut" },
                    self.name(of)?
                ),
            },
            Type::Array(of, length) => {
                let length = self
                    .layout
                    .get(length)
                    .with_context(|| format!("[{length}]"))?;
                format!("[{}; {length}]", self.name(of)?)
            }
            Type::Function(..) => bail!("a function is no value"),
        })
    }

    /// Returns a function's type in Rust.
    ///
    /// # Errors
    /// As for [`Types::name`].
    pub fn function(&mut self, returns: &Type, parameters: &[Field]) -> Result<String> {
        let parameters: Result<Vec<_>> = parameters
            .iter()
            .map(|field| {
                Ok(format!(
                    "{}: {}",
                    field_name(&field.name),
                    self.name(&field.of)?
                ))
            })
            .collect();
        let returns = match returns {
            Type::Base(void) if void == "void" => String::new(),
            other => format!(" -> {}", self.name(other)?),
        };
        Ok(format!(
            "unsafe extern \"C\" fn({}){returns}",
            parameters?.join(", ")
        ))
    }

    fn want(&mut self, name: &str) -> String {
        if self.wanted.insert(name.to_owned()) {
            self.waiting.push(name.to_owned());
        }
        name.to_owned()
    }

    /// Generates all requested types, and those that they consist of.
    ///
    /// # Errors
    /// A type is not declared, or is of an unknown kind.
    pub fn write(mut self) -> Result<String> {
        let mut all = std::collections::BTreeMap::new();
        while let Some(name) = self.waiting.pop() {
            let text = self
                .one(&name)
                .with_context(|| format!("the type {name}"))?;
            all.insert(name, text);
        }
        Ok(all.into_values().collect::<Vec<_>>().join("\n"))
    }

    fn one(&mut self, name: &str) -> Result<String> {
        if let Some(definition) = self.header.definitions.get(name) {
            return self.definition(name, definition);
        }
        match self.header.typedefs.get(name) {
            Some(Type::Tagged(_, tag)) if tag == name => Ok(opaque(name)),
            Some(of) => Ok(format!("pub type {name} = {};\n", self.name(&of.clone())?)),
            // A structure that is only used through pointers.
            None => Ok(opaque(name)),
        }
    }

    fn definition(&mut self, name: &str, definition: &Definition) -> Result<String> {
        let fields = match &definition.body {
            Body::Values(values) => return self.enumeration(name, values),
            Body::Fields(fields) if fields.is_empty() => return Ok(opaque(name)),
            Body::Fields(fields) => fields,
        };
        let align = self.layout.get(&format!("align {name}"));
        let mut text = match (definition.aligned, align) {
            (true, Some(align)) => format!("#[repr(C, align({align}))]\n"),
            (true, None) => bail!("its alignment is unknown"),
            _ => "#[repr(C)]\n".to_owned(),
        };
        let word = if definition.tag == Tag::Union {
            "union"
        } else {
            "struct"
        };
        let _ = writeln!(text, "#[derive(Clone, Copy)]\npub {word} {name} {{");
        let mut checks = String::new();
        for (at, field) in fields.iter().enumerate() {
            let own = if field.name.is_empty() {
                format!("anonymous{at}")
            } else {
                field.name.clone()
            };
            let _ = writeln!(
                text,
                "    pub {}: {},",
                field_name(&own),
                self.name(&field.of)?
            );
            let offset = self.layout.get(&format!("offset {name} {}", field.name));
            if let Some(offset) = offset.filter(|_| definition.tag == Tag::Structure) {
                let own = field_name(&own);
                let _ = writeln!(
                    checks,
                    "    assert!(offset_of!({name}, {own}) == {offset});"
                );
            }
        }
        text.push_str("}\n");
        if let (Some(size), Some(align)) = (self.layout.get(&format!("size {name}")), align) {
            let _ = write!(
                text,
                "const _: () = {{\n    assert!(size_of::<{name}>() == {size} && align_of::<{name}>() == {align});\n{checks}}};\n"
            );
        }
        Ok(text)
    }

    /// A number, since callers may pass any value.
    fn enumeration(&self, name: &str, values: &[String]) -> Result<String> {
        let numbers: Result<Vec<i64>> = values
            .iter()
            .map(|value| self.layout.get(value).with_context(|| value.clone()))
            .collect();
        let numbers = numbers?;
        let number = if numbers.iter().any(|number| *number < 0) {
            "i32"
        } else {
            "u32"
        };
        let mut text =
            "#[repr(transparent)]\n#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]\n".to_owned();
        let _ = writeln!(text, "pub struct {name}(pub {number});\nimpl {name} {{");
        for (value, number) in values.iter().zip(numbers) {
            let _ = writeln!(text, "    pub const {value}: Self = Self({number});");
        }
        if matches!(name, "cudaError_enum" | "cudaError") {
            text.push_str("    /// Names with their values.\n");
            text.push_str("    pub const NAMES: &'static [(&'static str, Self)] = &[\n");
            for value in values {
                let _ = writeln!(text, "        (\"{value}\", Self::{value}),");
            }
            text.push_str("    ];\n");
        }
        text.push_str("}\n");
        Ok(text)
    }
}

fn opaque(name: &str) -> String {
    format!("#[repr(C)]\npub struct {name} {{\n    _opaque: [u8; 0],\n}}\n")
}

/// The name of a field or a parameter.
pub fn field_name(name: &str) -> String {
    match name {
        "type" | "ref" | "in" | "match" | "fn" | "move" | "mod" | "use" | "final" | "virtual" => {
            format!("r#{name}")
        }
        _ => name.to_owned(),
    }
}

fn base(words: &str) -> Result<&'static str> {
    Ok(match words {
        "char" => "c_char",
        "signed char" => "c_schar",
        "unsigned char" => "c_uchar",
        "short" | "short int" => "c_short",
        "unsigned short" | "short unsigned int" => "c_ushort",
        "int" | "signed" | "signed int" => "c_int",
        "unsigned int" | "unsigned" => "c_uint",
        "long" | "long int" => "c_long",
        "unsigned long" | "long unsigned int" => "c_ulong",
        "long long" | "long long int" => "c_longlong",
        "unsigned long long" | "unsigned long long int" | "long long unsigned int" => "c_ulonglong",
        "float" => "f32",
        "double" => "f64",
        "void" => "c_void",
        _ => bail!("{words} has no equal in Rust"),
    })
}
