//! Generates an entry point for each public symbol of the driver API, except those that are written
//! by hand in `src`. Symbols in the list of forwarded ones are forwarded, variants for the
//! per-thread default stream call the regular ones, and the rest report that they are not
//! supported.

use std::{collections::HashMap, env, fmt::Write, fs, path::Path};

use cuda_definition::{EntryPoint, Streams, driver::ENTRY_POINTS};

/// The list of forwarded entry points: their symbols are its string literals that begin with `cu`.
const FORWARDED: &str = "../../remoting/proto/src/apis/cuda/forwarded.rs";

/// The entry points that are written by hand, with their modules.
fn by_hand() -> HashMap<String, String> {
    let mut found = HashMap::new();
    for entry in fs::read_dir("src").expect("the crate has sources") {
        let path = entry.expect("a folder can be read").path();
        let text = fs::read_to_string(&path).expect("sources are text");
        let module = path.file_stem().unwrap_or_default().to_string_lossy();
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("    fn cu")
                && let Some((name, _)) = rest.split_once('(')
                && name.starts_with(char::is_uppercase)
            {
                found.insert(format!("cu{name}"), module.to_string());
            }
        }
    }
    found
}

fn forwarded() -> Vec<String> {
    let text = fs::read_to_string(FORWARDED).expect("the list is there");
    let symbols = text.split('"').skip(1).step_by(2);
    let symbols = symbols.filter(|text| text.starts_with("cu"));
    symbols.map(str::to_owned).collect()
}

fn parameters(entry: &EntryPoint) -> String {
    let each = entry.parameters.iter();
    let each = each.map(|one| format!("{}: {}", one.name, one.of));
    each.collect::<Vec<_>>().join(", ")
}

fn names(entry: &EntryPoint) -> impl Iterator<Item = &'static str> {
    entry.parameters.iter().map(|one| one.name)
}

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    println!("cargo:rerun-if-changed=src");
    println!("cargo:rerun-if-changed={FORWARDED}");
    let (by_hand, forwarded) = (by_hand(), forwarded());
    let (mut functions, mut table) = (String::new(), String::new());
    for entry in ENTRY_POINTS {
        let symbol = entry.symbol;
        let base = symbol
            .strip_suffix("_ptsz")
            .or_else(|| symbol.strip_suffix("_ptds"))
            .filter(|_| entry.streams == Streams::PerThread);
        let place = |symbol: &str| match by_hand.get(symbol) {
            Some(module) => Some(format!("crate::{module}::{symbol}")),
            None if forwarded.iter().any(|one| one == symbol) => Some(symbol.to_owned()),
            None => None,
        };
        let address = match place(symbol) {
            Some(place) if by_hand.contains_key(symbol) => place,
            own => {
                let body = match (own, base.and_then(place)) {
                    (Some(_), _) => {
                        let words: Vec<_> =
                            names(entry).map(|name| format!("word({name})")).collect();
                        let words = words.join(", ");
                        format!("unsafe {{ crate::forward::entry(\"{symbol}\", &[{words}]) }}")
                    }
                    (None, Some(base)) => {
                        let names = names(entry).collect::<Vec<_>>().join(", ");
                        format!("crate::context::per_thread(|| unsafe {{ {base}({names}) }})")
                    }
                    (None, None) => {
                        let names = names(entry).collect::<Vec<_>>().join(", ");
                        format!("let _ = ({names}); crate::names::unsupported(\"{symbol}\")")
                    }
                };
                let parameters = parameters(entry);
                writeln!(
                    functions,
                    "#[unsafe(no_mangle)] pub unsafe extern \"C\" fn {symbol}({parameters}) -> CUresult {{ {body} }}\n\
                     const _: cuda_definition::driver::signatures::{symbol} = {symbol};"
                )
                .expect("a string can be written to");
                symbol.to_owned()
            }
        };
        writeln!(
            table,
            "    Symbol {{ name: \"{symbol}\", address: {address} as *const () }},"
        )
        .expect("a string can be written to");
    }
    let text =
        format!("{functions}\n/// All symbols.\npub static SYMBOLS: &[Symbol] = &[\n{table}];\n");
    let out = env::var("OUT_DIR").expect("Cargo sets it");
    fs::write(Path::new(&out).join("entry_points.rs"), text).expect("the folder can be written to");
}
