//! Generates C's types in Rust.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write,
};

use super::header::{Body, Definition, Field, Header, Type};

/// Generates types, and remembers which ones were requested.
pub struct Types<'a> {
    header: &'a Header,
    wanted: BTreeSet<String>,
    waiting: Vec<String>,
}

impl<'a> Types<'a> {
    /// Creates a generator for one header.
    pub fn new(header: &'a Header) -> Self {
        Self {
            header,
            wanted: BTreeSet::new(),
            waiting: Vec::new(),
        }
    }

    /// Returns a type's name in Rust.
    pub fn name(&mut self, of: &Type) -> String {
        match of {
            Type::Own(name) => name.clone(),
            // C's own file type, which is opaque here.
            Type::Named(name) if name == "FILE" => "c_void".to_owned(),
            Type::Named(name) => self.want(name),
            Type::Pointer(of, constant) => match &**of {
                function @ Type::Function(..) => format!("Option<{}>", self.name(function)),
                of => {
                    let word = if *constant { "const" } else { "mut" };
                    format!("*{word} {}", self.name(of))
                }
            },
            Type::Array(of, length) => format!("[{}; {length}]", self.name(of)),
            Type::Function(returns, parameters) => {
                let mut parameter = |field: &Field| {
                    format!("{}: {}", field_name(&field.name), self.name(&field.of))
                };
                let parameters: Vec<_> = parameters.iter().map(&mut parameter).collect();
                let returns = returns.as_ref().map(|of| format!(" -> {}", self.name(of)));
                format!(
                    "unsafe extern \"C\" fn({}){}",
                    parameters.join(", "),
                    returns.unwrap_or_default()
                )
            }
        }
    }

    fn want(&mut self, name: &str) -> String {
        if self.wanted.insert(name.to_owned()) {
            self.waiting.push(name.to_owned());
        }
        name.to_owned()
    }

    /// Generates all requested types, and those that they consist of.
    pub fn write(mut self) -> String {
        let mut all = BTreeMap::new();
        while let Some(name) = self.waiting.pop() {
            let text = self.one(&name);
            all.insert(name, text);
        }
        all.into_values().collect::<Vec<_>>().join("\n")
    }

    fn one(&mut self, name: &str) -> String {
        if let Some(definition) = self.header.definitions.get(name) {
            return self.definition(name, definition);
        }
        match self.header.typedefs.get(name) {
            Some(of) => format!("pub type {name} = {};\n", self.name(of)),
            // A structure that is only used through pointers.
            None => opaque(name),
        }
    }

    fn definition(&mut self, name: &str, definition: &Definition) -> String {
        let (word, fields) = match &definition.body {
            Body::Opaque => return opaque(name),
            Body::Values(values) => return enumeration(name, values),
            Body::Structure(fields) => ("struct", fields),
            Body::Union(fields) => ("union", fields),
        };
        let layout = self.header.size(name);
        let mut text = match layout {
            Some((_, align)) if definition.aligned => format!("#[repr(C, align({align}))]\n"),
            _ => "#[repr(C)]\n".to_owned(),
        };
        let _ = writeln!(text, "#[derive(Clone, Copy)]\npub {word} {name} {{");
        let mut checks = String::new();
        for (at, field) in fields.iter().enumerate() {
            let own = match field.name.as_str() {
                "" => format!("anonymous{at}"),
                name => field_name(name),
            };
            let _ = writeln!(text, "    pub {own}: {},", self.name(&field.of));
            if let Some(offset) = self.header.offset(name, &field.name)
                && word == "struct"
            {
                let _ = writeln!(
                    checks,
                    "    assert!(offset_of!({name}, {own}) == {offset});"
                );
            }
        }
        text.push_str("}\n");
        // What C leaves unnamed is checked with what contains it.
        if let Some((size, align)) = layout.filter(|_| !name.contains("_unnamed")) {
            let _ = write!(
                text,
                "const _: () = {{\n    assert!(size_of::<{name}>() == {size} && align_of::<{name}>() == {align});\n{checks}}};\n"
            );
        }
        text
    }
}

/// A number, since callers may pass any value.
fn enumeration(name: &str, values: &[(String, i64)]) -> String {
    let number = match values.iter().any(|(_, number)| *number < 0) {
        true => "i32",
        false => "u32",
    };
    let mut text =
        "#[repr(transparent)]\n#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]\n".to_owned();
    let _ = writeln!(text, "pub struct {name}(pub {number});\nimpl {name} {{");
    for (value, number) in values {
        let _ = writeln!(text, "    pub const {value}: Self = Self({number});");
    }
    if matches!(name, "cudaError_enum" | "cudaError") {
        text.push_str("    /// Names with their values.\n");
        text.push_str("    pub const NAMES: &'static [(&'static str, Self)] = &[\n");
        for (value, _) in values {
            let _ = writeln!(text, "        (\"{value}\", Self::{value}),");
        }
        text.push_str("    ];\n");
    }
    text.push_str("}\n");
    text
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
