//! Replaces the constants of `module/gate.h` in the trampoline's source, as the C preprocessor does
//! for the kernel module.

use std::{collections::BTreeMap, env, fs, path::Path};

fn main() {
    // Cargo runs this in the crate's folder, which may be a different one than when it was built.
    let module = Path::new("module");
    let header = module.join("gate.h");
    let source = module.join("trampoline.inc");
    for file in [&header, &source] {
        println!("cargo:rerun-if-changed={}", file.display());
    }
    let header = fs::read_to_string(&header).expect("module/gate.h is part of this crate");
    let source = fs::read_to_string(&source).expect("module/trampoline.inc is part of this crate");
    let names: BTreeMap<_, _> = header
        .lines()
        .filter_map(|line| line.strip_prefix("#define ")?.split_once(' '))
        .filter(|(name, _)| name.starts_with("GATE_"))
        .collect();
    let mut replaced = String::new();
    for part in source.split_inclusive(|c: char| !c.is_ascii_alphanumeric() && c != '_') {
        let name = part.trim_end_matches(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        match names.get(name) {
            Some(number) => replaced += &part.replacen(name, number, 1),
            None => replaced += part,
        }
    }
    let out = env::var_os("OUT_DIR").expect("cargo sets it");
    fs::write(Path::new(&out).join("trampoline.s"), replaced).expect("cargo made the folder");
}
