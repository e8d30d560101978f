//! Generates an entry point for each public symbol of cuBLAS and cuBLASLt, except those that are
//! written by hand in `src`. Symbols that the worker serves are forwarded to it; the rest report
//! that they are not supported.

use std::{collections::HashSet, env, fmt::Write, fs, path::Path};

use cuda_definition::{EntryPoint, Rule, State, cublas, cublaslt};

/// The entry points that are written by hand.
fn by_hand() -> HashSet<String> {
    let mut found = HashSet::new();
    for entry in fs::read_dir("src").expect("the crate has sources") {
        let path = entry.expect("a folder can be read").path();
        let text = fs::read_to_string(&path).expect("sources are text");
        for line in text.lines() {
            let rest = line
                .strip_prefix("    fn cublas")
                .or_else(|| line.strip_prefix("pub unsafe extern \"C\" fn cublas"));
            if let Some((name, _)) = rest.and_then(|rest| rest.split_once('(')) {
                found.insert(format!("cublas{name}"));
            }
            // Lists of names from which a macro generates functions.
            let names = line.trim_end_matches(");").split_whitespace();
            if line.starts_with("    cublas")
                && names.clone().all(|name| name.starts_with("cublas"))
            {
                found.extend(names.map(str::to_owned));
            }
        }
    }
    found
}

/// An expression for the size of a scalar whose type another parameter specifies. None if no
/// parameter does.
fn typed(entry: &EntryPoint) -> Option<String> {
    let untyped = entry
        .parameters
        .iter()
        .any(|one| one.rule == Rule::Unified && one.of.ends_with("c_void"));
    if !untyped {
        return Some("0".to_owned());
    }
    let has = |name: &str| entry.parameters.iter().any(|one| one.name == name);
    if has("computeType") && has("Ctype") {
        return Some("crate::scalars::of_compute(computeType.0, Ctype.0)".to_owned());
    }
    let name = ["resultType", "alphaType", "csType"]
        .into_iter()
        .find(|name| has(name))?;
    Some(format!("crate::scalars::of_type({name}.0)"))
}

fn write(out: &mut String, entries: &[EntryPoint], module: &str, by_hand: &HashSet<String>) {
    let mut number = 0;
    for entry in entries {
        let symbol = entry.symbol;
        let served = entry.state == State::Wanted;
        if !by_hand.contains(symbol) {
            let names = entry.parameters.iter().map(|one| one.name);
            let names: Vec<_> = names.collect();
            let body = match typed(entry).filter(|_| served) {
                Some(typed) => {
                    let words: Vec<_> = names.iter().map(|name| format!("word({name})")).collect();
                    let words = words.join(", ");
                    format!("cublasStatus_t(crate::handles::blas({number}, &[{words}], {typed}).0)")
                }
                None => format!(
                    "let _ = ({}); cublasStatus_t(crate::call::unsupported(\"{symbol}\").0)",
                    names
                        .iter()
                        .map(|name| format!("{name},"))
                        .collect::<String>()
                ),
            };
            let each = entry.parameters.iter();
            let each: Vec<_> = each
                .map(|one| format!("{}: {}", one.name, one.of))
                .collect();
            writeln!(
                out,
                "    #[unsafe(no_mangle)] pub unsafe extern \"C\" fn {symbol}({}) -> cublasStatus_t {{ {body} }}\n    \
                 const _: cuda_definition::{module}::signatures::{symbol} = {symbol};",
                each.join(", ")
            )
            .expect("a string can be written to");
        }
        number += usize::from(served);
    }
}

fn main() {
    println!("cargo:rerun-if-changed=src");
    println!("cargo:rerun-if-changed=build.rs");
    let by_hand = by_hand();
    let mut text = String::new();
    for (module, entries) in [
        ("cublas", cublas::ENTRY_POINTS),
        ("cublaslt", cublaslt::ENTRY_POINTS),
    ] {
        writeln!(
            text,
            "pub mod {module} {{\n    use super::*;\n    use cuda_definition::{module}::types::*;"
        )
        .expect("a string can be written to");
        write(&mut text, entries, module, &by_hand);
        text.push_str("}\n");
    }
    let out = env::var("OUT_DIR").expect("Cargo sets it");
    fs::write(Path::new(&out).join("entry_points.rs"), text).expect("the folder can be written to");
}
