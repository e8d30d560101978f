//! In the crates listed here, no two modules use each other, directly or indirectly.
//!
//! What counts is `crate::` in the text of a crate's files, except its tests. Modules are the files
//! and directories of `src`.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};

/// Crates that have no such circle.
const CRATES: &[&str] = &[
    "arch",
    "base",
    "devices/accel",
    "devices/acpi",
    "devices/console",
    "devices/disk",
    "devices/gate",
    "devices/gpu",
    "devices/legacy",
    "devices/model",
    "devices/pci",
    "devices/vfio",
    "devices/virtio",
    "gf100",
    "gpu-mediator",
    "guest/agent",
    "hypervisor",
    "remoting",
    "remoting/nvidia",
    "remoting/nvidia-abi",
    "remoting/pool",
    "remoting/proto",
    "remoting/stream",
    "remoting/transport",
    "remoting/turns",
    "tunnel",
    "vfio-client",
    "vmfunc-gate",
    "vmm",
    "vmm/api",
    "vmm/config",
    "vmm/confinement",
    "vmm/control",
    "vmm/machine",
    "vmm/memory",
    "vmm/migration",
    "vmm/snapshot",
];

/// The modules that each module uses.
type Uses = BTreeMap<String, BTreeSet<String>>;

/// The Rust files in a directory and below it, except tests.
fn files(folder: &Path, into: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let stem = path.file_stem().context("a file without a name")?;
        if stem.to_string_lossy().contains("test") {
            continue;
        }
        if path.is_dir() {
            files(&path, into)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            into.push(path);
        }
    }
    Ok(())
}

/// The text of a file without comments and without a test module at its end.
fn code(text: &str) -> String {
    let end = text.find("#[cfg(test)]\nmod ").unwrap_or(text.len());
    let lines = text[..end].lines();
    lines
        .map(|line| line.split("//").next().unwrap_or_default())
        .collect::<Vec<_>>()
        .join("\n")
}

/// The first name of each path below `crate::`, including those in brace groups.
fn names(code: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for (at, prefix) in code.match_indices("crate::") {
        let rest = &code[at + prefix.len()..];
        let Some(group) = rest.strip_prefix('{') else {
            found.insert(first_name(rest));
            continue;
        };
        let (mut depth, mut begin) = (0, 0);
        for (at, character) in group.char_indices() {
            match character {
                '{' => depth += 1,
                '}' if depth > 0 => depth -= 1,
                ',' | '}' if depth == 0 => {
                    found.insert(first_name(&group[begin..at]));
                    begin = at + 1;
                    if character == '}' {
                        break;
                    }
                }
                _ => {}
            }
        }
    }
    found.remove("");
    found
}

fn first_name(path: &str) -> String {
    let name = |character: &char| character.is_ascii_alphanumeric() || *character == '_';
    path.trim_start().chars().take_while(name).collect()
}

/// Which modules of a crate use which.
fn uses(source: &Path) -> Result<Uses> {
    let mut all = Vec::new();
    files(source, &mut all)?;
    let mut uses = Uses::new();
    for path in all {
        let first = path.strip_prefix(source)?.components().next();
        let first = Path::new(first.context("a file without a name")?.as_os_str());
        let module = first.file_stem().context("a module without a name")?;
        let module = module.to_string_lossy().into_owned();
        uses.entry(module)
            .or_default()
            .extend(names(&code(&fs::read_to_string(&path)?)));
    }
    let modules: BTreeSet<String> = uses.keys().cloned().collect();
    for (module, used) in &mut uses {
        used.retain(|name| name != module && modules.contains(name));
    }
    Ok(uses)
}

/// Modules that all use one another, if there are any: those that remain after repeatedly removing
/// modules that use none of the others, or are used by none.
fn circle(mut uses: Uses) -> BTreeSet<String> {
    loop {
        let used: BTreeSet<String> = uses.values().flatten().cloned().collect();
        let gone = |(module, uses): &(&String, &BTreeSet<String>)| {
            uses.is_empty() || !used.contains(*module)
        };
        let Some(gone) = uses.iter().find(gone).map(|(module, _)| module.clone()) else {
            return uses.into_keys().collect();
        };
        uses.remove(&gone);
        for used in uses.values_mut() {
            used.remove(&gone);
        }
    }
}

#[test]
fn modules_use_each_other_in_one_direction() -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent();
    let root = root.context("xtask has no parent")?;
    for name in CRATES {
        let uses = uses(&root.join(name).join("src"))?;
        ensure!(!uses.is_empty(), "{name} has no modules");
        let edges: Vec<_> = uses.clone().into_iter().collect();
        let circle = circle(uses);
        let among = |(module, used): &(String, BTreeSet<String>)| {
            let used: Vec<_> = used.intersection(&circle).cloned().collect();
            (circle.contains(module) && !used.is_empty()).then(|| format!("{module} -> {used:?}"))
        };
        let edges: Vec<_> = edges.iter().filter_map(among).collect();
        ensure!(
            circle.is_empty(),
            "modules of {name} use each other; move what both need into one below them: {edges:#?}"
        );
    }
    Ok(())
}

#[test]
fn a_circle_is_found_and_a_chain_is_none() {
    let text = "use crate::{\n    b::{C, D}, // crate::x\n    e,\n};\n/// [`crate::y`]\nfn f() { crate::g::h() }\n\
                #[cfg(test)]\nmod tests { use crate::z; }";
    let found: Vec<_> = names(&code(text)).into_iter().collect();
    assert_eq!(found, ["b", "e", "g"]);
    let graph = |edges: &[(&str, &[&str])]| -> Uses {
        let own = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let edge = |(module, used): &(&str, &[&str])| ((*module).to_owned(), own(used));
        edges.iter().map(edge).collect()
    };
    let chain = graph(&[("a", &["b", "c"]), ("b", &["c"]), ("c", &[])]);
    assert!(circle(chain).is_empty());
    let three = graph(&[("a", &["b"]), ("b", &["c"]), ("c", &["b"]), ("d", &[])]);
    let found: Vec<_> = circle(three).into_iter().collect();
    assert_eq!(found, ["b", "c"]);
}
