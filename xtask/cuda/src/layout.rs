//! Sizes, offsets and values, all computed by the C compiler.

use std::{
    collections::HashMap,
    fmt::Write,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};
use gantry_tests::rig::packages;

use super::c::{Body, Header, Tag, Type};

/// The compiler's answers, by the text of the question.
pub struct Layout(HashMap<String, i64>);

impl Layout {
    /// Asks the compiler about everything that a header declares.
    ///
    /// # Errors
    /// There is no C compiler, or it rejects the header.
    pub fn of(header: &Header, includes: &[PathBuf], prologue: &str) -> Result<Self> {
        let mut program =
            format!("#include <stdio.h>\n#include <stddef.h>\n{prologue}\nint main(void) {{\n");
        let mut ask = |key: &str, expression: &str| {
            let _ = writeln!(
                program,
                "printf(\"%lld {key}\\n\", (long long)({expression}));"
            );
        };
        for (name, definition) in &header.definitions {
            let c = &definition.c;
            match &definition.body {
                Body::Values(values) => {
                    for value in values {
                        ask(value, value);
                    }
                }
                Body::Fields(fields) => {
                    for field in fields {
                        lengths(&field.of, &mut ask);
                        if !c.is_empty() && !field.name.is_empty() {
                            let key = format!("offset {name} {}", field.name);
                            ask(&key, &format!("offsetof({c}, {})", field.name));
                        }
                    }
                }
            }
            let known = definition.tag != Tag::Enumeration && !c.is_empty();
            if known && definition.body != Body::Fields(Vec::new()) {
                ask(&format!("size {name}"), &format!("sizeof({c})"));
                ask(&format!("align {name}"), &format!("_Alignof({c})"));
            }
        }
        program.push_str("}\n");
        let folder = tempfile::tempdir()?;
        let (source, binary) = (folder.path().join("layout.c"), folder.path().join("layout"));
        fs::write(&source, program)?;
        let mut cc = Command::new("cc");
        cc.arg("-w")
            .args(includes.iter().flat_map(|folder| [Path::new("-I"), folder]))
            .arg(&source)
            .arg("-o")
            .arg(&binary);
        packages::run(&mut cc).context("cannot ask the C compiler about the headers' layouts")?;
        let said = packages::output(&mut Command::new(&binary))?;
        let pairs = said.lines().filter_map(|line| {
            let (value, key) = line.split_once(' ')?;
            Some((key.to_owned(), value.parse().ok()?))
        });
        Ok(Self(pairs.collect()))
    }

    /// Returns the value of an enumerator, of `size NAME`, `align NAME` or `offset NAME FIELD`, or
    /// the length of an array.
    pub fn get(&self, key: &str) -> Option<i64> {
        self.0.get(key).copied()
    }
}

fn lengths(of: &Type, ask: &mut impl FnMut(&str, &str)) {
    if let Type::Array(of, length) = of {
        ask(length, length);
        lengths(of, ask);
    }
}
