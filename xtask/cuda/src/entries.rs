//! Entry points: names, versions and rules.

use std::{collections::HashMap, fmt::Write};

use anyhow::{Result, ensure};

use super::{
    Api, Names,
    annotations::{Annotations, Class},
    header::{Body, Field, Header, Type},
    rust::{Types, field_name},
};

/// Text before the tables.
pub const DOCUMENTATION: &str = "# CUDA entry points\n\n\
    Written by `cargo xtask cuda-definition`, from the vendor's headers, `remoting/cuda-definition/annotations.txt` and \
    the sources of the guest's libraries.\n\n\
    Served: the call is executed, as far as the requested features are supported. Stub: the call reports that it is not \
    supported; \"wanted\" marks stubs that examined programs use. Posted: the guest continues, and an error is reported \
    later. Answered: the guest waits for the worker. Guest: the guest knows the answer itself. Older versions of a symbol, \
    and those for per-thread default streams, are not listed.\n";

/// The default meaning of parameters without an annotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Convention {
    /// Pointers refer to host memory: read if const, otherwise written, one element each.
    Core,
    /// Pointers refer to device memory, except for scalars, whose location depends on the pointer mode, and for results
    /// of functions about the library itself.
    LinearAlgebra,
}

/// An entry point.
pub struct Entry {
    /// The symbol that C calls.
    pub symbol: String,
    /// Its type in Rust.
    pub signature: String,
    name: String,
    since: u32,
    current: bool,
    per_thread: bool,
    class: Class,
    wanted: bool,
    parameters: Vec<(String, String, String)>,
}

impl Entry {
    /// Returns its row of the table.
    pub fn in_rust(&self) -> String {
        let streams = if self.per_thread {
            "PerThread"
        } else {
            "Legacy"
        };
        let state = if self.wanted { "Wanted" } else { "Stub" };
        let mut text = format!(
            "    EntryPoint {{ name: {:?}, symbol: {:?}, since: {}, current: {}, streams: Streams::{streams}, \
             class: Class::{:?}, state: State::{state}, parameters: &[",
            self.name, self.symbol, self.since, self.current, self.class
        );
        let parameter = |(name, of, rule): &(String, String, String)| {
            format!("Parameter {{ name: {name:?}, of: {of:?}, rule: {rule} }}")
        };
        let parameters: Vec<_> = self.parameters.iter().map(parameter).collect();
        text += &parameters.join(", ");
        text + "] },\n"
    }

    fn lacks_a_rule(&self) -> bool {
        self.parameters
            .iter()
            .any(|(_, _, rule)| rule == "Rule::Unwritten")
    }
}

/// Returns all entry points of a header, in order.
///
/// # Errors
/// An annotation does not match anything, or a type is unknown.
pub fn all(
    api: &Api,
    header: &Header,
    types: &mut Types<'_>,
    annotations: &Annotations,
    names: &Names,
) -> Result<Vec<Entry>> {
    let mut entries: Vec<Entry> = Vec::new();
    for function in &header.functions {
        let symbol = &function.symbol;
        if !api.owns(symbol) || entries.iter().any(|entry| entry.symbol == *symbol) {
            continue;
        }
        let whole = symbol.trim_end_matches("_ptds").trim_end_matches("_ptsz");
        let per_thread = whole.len() != symbol.len();
        let name = base(whole);
        let mut parameters = Vec::new();
        let calls_back = function
            .parameters
            .iter()
            .any(|field| is_callback(header, &field.of));
        for field in &function.parameters {
            let key = (name.to_owned(), field.name.clone());
            let rule = match annotations.rules.get(&key) {
                Some(rule) => rule.clone(),
                None => match api.convention {
                    Convention::Core => rule(header, field, calls_back),
                    Convention::LinearAlgebra => algebra(header, name, field),
                },
            };
            let of = types.name(&field.of);
            parameters.push((field_name(&field.name), of, rule));
        }
        let current = match names.macros.iter().find(|(from, _)| from == name) {
            Some((_, to)) => to == whole,
            None => name == whole,
        };
        entries.push(Entry {
            signature: types.name(&function.of),
            symbol: symbol.clone(),
            name: name.to_owned(),
            since: 0,
            current,
            per_thread,
            class: annotations.class(name),
            wanted: annotations.wanted.contains(name),
            parameters,
        });
    }
    number(&mut entries, &names.versions)?;
    check(&entries, annotations)?;
    Ok(entries)
}

/// Removes the version suffix from a symbol.
fn base(symbol: &str) -> &str {
    // The suffix for 64-bit sizes is part of the name.
    match symbol.rsplit_once("_v") {
        Some((name, version)) if version.parse::<u32>().is_ok() => name,
        _ => symbol,
    }
}

/// The headers list versions of a signature, not of a symbol; both are in order.
fn number(entries: &mut [Entry], versions: &[String]) -> Result<()> {
    let mut by_name: HashMap<(String, bool), Vec<u32>> = HashMap::new();
    for version in versions {
        let whole = version.trim_end_matches("_ptds").trim_end_matches("_ptsz");
        let Some((name, number)) = whole.rsplit_once("_v") else {
            continue;
        };
        let key = (name.to_owned(), whole.len() != version.len());
        by_name
            .entry(key)
            .or_default()
            .push(number.parse().unwrap_or(0));
    }
    for ((name, per_thread), mut numbers) in by_name {
        numbers.sort_unstable();
        let mut mine: Vec<_> = entries
            .iter_mut()
            .filter(|entry| entry.name == name && entry.per_thread == per_thread)
            .collect();
        mine.sort_by_key(|entry| entry.symbol.len().max(1) * 1000 + suffix(&entry.symbol));
        // The newest versions certainly exist.
        for (entry, number) in mine.iter_mut().rev().zip(numbers.iter().rev()) {
            entry.since = *number;
        }
    }
    Ok(())
}

fn suffix(symbol: &str) -> usize {
    let whole = symbol.trim_end_matches("_ptds").trim_end_matches("_ptsz");
    whole
        .rsplit_once("_v")
        .and_then(|(_, v)| v.parse().ok())
        .unwrap_or(1)
}

fn check(entries: &[Entry], annotations: &Annotations) -> Result<()> {
    let known = |name: &String| entries.iter().any(|entry| entry.name == *name);
    for name in annotations.wanted.iter().chain(annotations.classes.keys()) {
        ensure!(
            known(name),
            "annotations.txt names {name}, which no header declares"
        );
    }
    for (name, parameter) in annotations.rules.keys() {
        let raw = field_name(parameter);
        let found = entries
            .iter()
            .filter(|entry| entry.name == *name)
            .any(|entry| entry.parameters.iter().any(|(own, _, _)| *own == raw));
        ensure!(
            found,
            "annotations.txt: {name} has no parameter {parameter}"
        );
    }
    Ok(())
}

fn resolved<'a>(header: &'a Header, mut of: &'a Type) -> &'a Type {
    while let Type::Named(name) = of {
        match header.typedefs.get(name) {
            Some(next) if next != of => of = next,
            _ => break,
        }
    }
    of
}

fn is_callback(header: &Header, of: &Type) -> bool {
    matches!(resolved(header, of), Type::Pointer(of, _) if matches!(**of, Type::Function(..)))
}

/// A structure with invisible members is only used through pointers.
fn is_handle(header: &Header, of: &Type) -> bool {
    let Type::Pointer(of, _) = resolved(header, of) else {
        return false;
    };
    let definition = match &**of {
        Type::Named(name) => header.definitions.get(name),
        _ => None,
    };
    definition.is_some_and(|one| one.body == Body::Opaque)
}

/// The default rule of a parameter, by convention.
fn rule(header: &Header, field: &Field, calls_back: bool) -> String {
    let void = |of: &Type| resolved(header, of).is_void();
    let char = |of: &Type| *of == Type::Own("c_char".to_owned());
    if is_callback(header, &field.of) || (calls_back && field.name == "userData") {
        return "Rule::Callback".to_owned();
    }
    match &field.of {
        Type::Named(name) if name.starts_with("CUdeviceptr") => "Rule::Device",
        of if is_handle(header, of) => "Rule::Handle",
        Type::Pointer(of, true) if char(of) => "Rule::Text",
        Type::Pointer(of, _) if void(of) || char(of) => "Rule::Unwritten",
        // An array of addresses, or an address for the caller; this cannot be determined.
        Type::Pointer(of, _) if matches!(**of, Type::Pointer(..)) && !is_handle(header, of) => {
            "Rule::Unwritten"
        }
        Type::Pointer(_, true) => "Rule::In(\"1\")",
        Type::Pointer(_, false) => "Rule::Out(\"1\")",
        _ => "Rule::Value",
    }
    .to_owned()
}

/// A descriptor: its members are public, so that a caller can allocate it, but are meaningless to the caller.
fn is_opaque(header: &Header, of: &Type) -> bool {
    let Type::Pointer(of, _) = resolved(header, of) else {
        return false;
    };
    matches!(&**of, Type::Named(name) if name.ends_with("Opaque_t"))
}

/// Scalars of linear algebra. They are in host or device memory, depending on the handle's pointer mode.
const SCALARS: &[&str] = &[
    "alpha", "beta", "result", "param", "c", "s", "d1", "d2", "x1", "y1",
];

/// The default rules for cuBLAS.
fn algebra(header: &Header, function: &str, field: &Field) -> String {
    let own = ["Create", "Destroy", "Get", "Set", "Logger", "Init", "Check"];
    let short = function
        .trim_start_matches("cublasLt")
        .trim_start_matches("cublas");
    let about_itself = own.iter().any(|word| short.contains(word));
    let rotation = short.get(1..).is_some_and(|rest| rest.starts_with("rotg"));
    let pointer = matches!(field.of, Type::Pointer(..));
    if is_opaque(header, &field.of) {
        return "Rule::Handle".to_owned();
    }
    match (about_itself, pointer) {
        (true, _) | (_, false) => rule(header, field, false),
        _ if is_handle(header, &field.of) => "Rule::Handle".to_owned(),
        _ if SCALARS.contains(&field.name.as_str()) || rotation => "Rule::Unified".to_owned(),
        // Arrays of grouped calls have one element per group; what they point to is in device memory.
        _ if field.name.ends_with("_array") || field.name == "group_size" => {
            "Rule::In(\"group_count\")".to_owned()
        }
        // The number of the invalid argument, which is returned immediately; the one of each matrix is in device
        // memory.
        _ if field.name == "info" && !short.ends_with("matinvBatched") => {
            "Rule::Out(\"1\")".to_owned()
        }
        _ => "Rule::Device".to_owned(),
    }
}

/// Returns how many are wanted, and how many of these cannot be generated yet.
pub fn counts(all: &[Entry]) -> (usize, usize) {
    let wanted = || {
        all.iter()
            .filter(|entry| entry.wanted && entry.current && !entry.per_thread)
    };
    let lacking = wanted().filter(|entry| entry.lacks_a_rule());
    for entry in lacking.clone() {
        let names = entry
            .parameters
            .iter()
            .filter(|(_, _, rule)| rule == "Rule::Unwritten");
        let names: Vec<_> = names.map(|(name, of, _)| format!("{name}: {of}")).collect();
        println!("  {} lacks rules for {}", entry.name, names.join(", "));
    }
    (wanted().count(), lacking.count())
}

/// Generates the table of an API.
pub fn documentation(title: &str, all: &[Entry], served: Option<&dyn Fn(&str) -> bool>) -> String {
    let is_served = |entry: &Entry| served.map_or(entry.wanted, |served| served(&entry.symbol));
    let shown = || {
        all.iter()
            .filter(|entry| entry.current && !entry.per_thread)
    };
    let mut text = format!(
        "\n## {title}\n\n{} symbols; {} entry points, {} of them served.\n\n\
        | entry point | symbol | since | state | class |\n|---|---|---|---|---|\n",
        all.len(),
        shown().count(),
        shown().filter(|entry| is_served(entry)).count(),
    );
    for entry in shown() {
        let since = match entry.since {
            0 => String::new(),
            since => format!("{}.{}", since / 1000, since % 1000 / 10),
        };
        let symbol = if entry.symbol == entry.name {
            ""
        } else {
            &entry.symbol
        };
        let (state, class) = match (is_served(entry), entry.class) {
            (false, _) if entry.wanted => ("stub (wanted)", ""),
            (false, _) => ("stub", ""),
            (true, Class::Posted) => ("served", "posted"),
            (true, Class::Answered) => ("served", "answered"),
            (true, Class::Guest) => ("served", "guest"),
        };
        let _ = writeln!(
            text,
            "| {} | {symbol} | {since} | {state} | {class} |",
            entry.name
        );
    }
    text
}
