//! Modules of one folder use each other in one direction, in all crates.
//!
//! What counts are paths that begin with `crate`, `super` or `self` in the text of a crate's files, except its tests. A
//! path to what a folder's `mod.rs` exports again is a path to that folder. Existing circles are listed here with their
//! reasons. A new one fails the test, and so does a listed one that is gone: the list may only become shorter.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// One type whose methods are in several files, each with a topic of its own.
const ONE_TYPE: &str = "the methods of one type, in files by topic";

/// What is to be moved below both.
const TO_MOVE: &str = "what both need is to be moved below them";

/// Folders of modules in which some use each other: the crate, the folder, and the reason.
const CIRCLES: &[(&str, &str, &str)] = &[
    ("gantry-client", "", ONE_TYPE),
    ("gantry-cuda", "", TO_MOVE),
    ("gantry-cuda-driver", "driver", ONE_TYPE),
    ("gantry-nvidia", "", ONE_TYPE),
    ("gantry-opencl", "", TO_MOVE),
    ("gantry-tests", "", TO_MOVE),
    ("gf100", "device", ONE_TYPE),
    ("remoting-cuda", "", ONE_TYPE),
    ("remoting-opencl", "", ONE_TYPE),
    ("remoting-pool", "", TO_MOVE),
    ("remoting-session", "", ONE_TYPE),
    ("vmm-control", "", ONE_TYPE),
    ("vmm-control", "migration", ONE_TYPE),
    ("vmm-machine", "", TO_MOVE),
    ("vmm-migration", "", TO_MOVE),
];

/// A module's path below its crate's root.
type Module = Vec<String>;

/// The text of each module of a crate.
type Texts = BTreeMap<Module, String>;

/// The modules of one folder that each of them uses.
type Uses = BTreeMap<String, BTreeSet<String>>;

/// The text of a file without comments and without a test module at its end. Test modules in files of their own, which
/// are declared above the code, end nothing.
fn code(text: &str) -> String {
    let tests = text.match_indices("#[cfg(test)]\nmod ").find(|(at, _)| {
        let line = text[*at..].lines().nth(1);
        line.is_some_and(|line| !line.ends_with(';'))
    });
    let end = tests.map_or(text.len(), |(at, _)| at);
    let lines = text[..end].lines();
    lines
        .map(|line| line.split("//").next().unwrap_or_default())
        .collect::<Vec<_>>()
        .join("\n")
}

/// Reads the modules in a folder and below it, except tests and further programs.
fn read(folder: &Path, module: &Module, texts: &mut Texts) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let stem = path.file_stem().context("a file without a name")?;
        let stem = stem.to_string_lossy().into_owned();
        if stem.contains("test") || (module.is_empty() && stem == "bin") {
            continue;
        }
        let own = match stem.as_str() {
            "mod" | "lib" | "main" => module.clone(),
            _ => [module.as_slice(), &[stem]].concat(),
        };
        if path.is_dir() {
            read(&path, &own, texts)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            texts
                .entry(own)
                .or_default()
                .push_str(&code(&fs::read_to_string(&path)?));
        }
    }
    Ok(())
}

/// The paths of a tree such as `a::{b, c::{d, self}}`, which begins at the text's beginning, below those of `head`.
fn tree(text: &str, head: &[String], paths: &mut Vec<Vec<String>>) -> usize {
    let mut path = head.to_vec();
    let mut name = String::new();
    let bytes = text.as_bytes();
    let mut at = 0;
    while at < bytes.len() {
        let character = char::from(bytes[at]);
        match character {
            '{' => {
                at += 1;
                while at < bytes.len() && bytes[at] != b'}' {
                    at += tree(&text[at..], &path, paths);
                    at += usize::from(bytes.get(at) == Some(&b','));
                }
                return (at + 1).min(bytes.len());
            }
            ':' if !name.is_empty() => path.push(std::mem::take(&mut name)),
            ':' | '\n' => {}
            ' ' if name.is_empty() => {}
            _ if character.is_ascii_alphanumeric() || character == '_' => name.push(character),
            // An alias follows, or the end.
            _ => break,
        }
        at += 1;
    }
    if !name.is_empty() {
        path.push(name);
    }
    if path.len() > head.len() {
        paths.push(path);
    }
    // Past an alias, but not past what ends a branch.
    at + text[at..].find([',', '}', ';']).unwrap_or(text.len() - at)
}

/// The paths in a module's text that begin in its own crate.
fn paths(code: &str) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    let mut at = 0;
    let next = |at: usize| {
        let places = ["crate::", "super::", "self::"].map(|begin| code[at..].find(begin));
        places.into_iter().flatten().min().map(|more| at + more)
    };
    while let Some(begin) = next(at) {
        let before = code[..begin].chars().next_back();
        let inside = |character: char| {
            character.is_ascii_alphanumeric() || character == '_' || character == ':'
        };
        at = begin + "self::".len();
        if !before.is_some_and(inside) {
            let length = tree(&code[begin..], &[], &mut found);
            // What is in a group has been seen.
            if code[begin..begin + length].contains("::{") {
                at = begin + length;
            }
        }
    }
    found
}

/// The module that a path in `module` leads to, or into.
fn target(texts: &Texts, module: &Module, path: &[String]) -> Option<Module> {
    let mut full = module.clone();
    let mut rest = path;
    if path.first()? == "crate" {
        full.clear();
        rest = &path[1..];
    }
    while let Some(name @ ("super" | "self")) = rest.first().map(String::as_str) {
        if name == "super" {
            full.pop()?;
        }
        rest = &rest[1..];
    }
    full.extend_from_slice(rest);
    while !full.is_empty() && !texts.contains_key(&full) {
        full.pop();
    }
    Some(full)
}

/// Which modules of each folder use which.
fn uses(texts: &Texts) -> BTreeMap<Module, Uses> {
    let mut folders: BTreeMap<Module, Uses> = BTreeMap::new();
    for (module, text) in texts {
        for path in paths(text) {
            let Some(used) = target(texts, module, &path) else {
                continue;
            };
            let common = module.iter().zip(&used).take_while(|(a, b)| a == b).count();
            if let (Some(user), Some(name)) = (module.get(common), used.get(common)) {
                folders
                    .entry(module[..common].to_vec())
                    .or_default()
                    .entry(user.clone())
                    .or_default()
                    .insert(name.clone());
            }
        }
    }
    folders
}

/// Modules that all use one another, if there are any: those that remain after repeatedly removing
/// modules that use none of the others, or are used by none.
fn circle(mut uses: Uses) -> Uses {
    loop {
        let users: BTreeSet<String> = uses.keys().cloned().collect();
        let used: BTreeSet<String> = uses.values().flatten().cloned().collect();
        let before = uses.len();
        uses.retain(|module, of| {
            of.retain(|name| users.contains(name));
            !of.is_empty() && used.contains(module)
        });
        if uses.len() == before {
            return uses;
        }
    }
}

/// The names and folders of the workspace's crates.
fn crates() -> Result<Vec<(String, PathBuf)>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent();
    let metadata = ["metadata", "--no-deps", "--format-version=1", "--offline"];
    let said = Command::new(env!("CARGO"))
        .args(metadata)
        .current_dir(root.context("xtask has no parent")?)
        .output()?;
    let error = String::from_utf8_lossy(&said.stderr);
    ensure!(said.status.success(), "{error}");
    let metadata: Value = serde_json::from_slice(&said.stdout)?;
    let packages = metadata["packages"].as_array().context("no packages")?;
    (packages.iter())
        .map(|package| {
            let name = package["name"].as_str().context("no name")?;
            let manifest = package["manifest_path"].as_str().context("no manifest")?;
            let folder = Path::new(manifest).parent().context("no folder")?;
            Ok((name.to_owned(), folder.to_owned()))
        })
        .collect()
}

#[test]
fn modules_use_each_other_in_one_direction() -> Result<()> {
    let (mut found, mut read_all) = (BTreeMap::new(), 0);
    for (name, folder) in crates()? {
        let mut texts = Texts::new();
        let source = folder.join("src");
        if source.is_dir() {
            read(&source, &Module::new(), &mut texts)?;
        }
        read_all += texts.len();
        for (folder, uses) in uses(&texts) {
            let circle = circle(uses);
            if !circle.is_empty() {
                found.insert((name.clone(), folder.join("::")), circle);
            }
        }
    }
    ensure!(read_all > 600, "only {read_all} modules were read");
    let listed: BTreeSet<_> = (CIRCLES.iter())
        .map(|(name, folder, _)| ((*name).to_owned(), (*folder).to_owned()))
        .collect();
    for (place, circle) in &found {
        ensure!(
            listed.contains(place),
            "modules of {place:?} use each other; move what both need into one below them: {circle:#?}"
        );
    }
    let gone: Vec<_> = listed
        .iter()
        .filter(|place| !found.contains_key(place))
        .collect();
    ensure!(
        gone.is_empty(),
        "take these out of CIRCLES, they are gone: {gone:?}"
    );
    Ok(())
}

#[test]
fn a_circle_is_found_and_a_chain_is_none() {
    let text = "#[cfg(test)]\nmod y_tests;\nuse crate::{\n    b::{C, D as E}, // crate::x\n    e,\n};\nuse super::{f, super::g::{self, H}};\n\
                /// [`crate::y`]\nfn i() { crate::j::k(); self::l(); supercrate::m() }\n\
                #[cfg(test)]\nmod tests { use crate::z; }";
    let found: BTreeSet<_> = (paths(&code(text)).iter())
        .map(|path| path.join("::"))
        .collect();
    let all = [
        "crate::b::C",
        "crate::b::D",
        "crate::e",
        "crate::j::k",
        "self::l",
        "super::f",
        "super::super::g::H",
        "super::super::g::self",
    ];
    assert_eq!(found, all.map(str::to_owned).into());
    let texts = |list: &[(&str, &str)]| -> Texts {
        let module = |path: &str| path.split("::").map(str::to_owned).collect();
        (list.iter())
            .map(|(path, text)| (module(path), (*text).to_owned()))
            .collect()
    };
    let chain = texts(&[("a", "use crate::b::X;"), ("b", "super::c::y()"), ("c", "")]);
    assert!(
        uses(&chain)
            .into_values()
            .all(|uses| circle(uses).is_empty())
    );
    let planted = texts(&[
        ("a", ""),
        ("a::b", "use super::{c::X, d};"),
        ("a::c", "fn f() { crate::a::b::g() }"),
        ("a::d", "use super::Y;"),
    ]);
    let found = uses(&planted).remove(["a".to_owned()].as_slice());
    let circle: Vec<_> = circle(found.unwrap_or_default()).into_keys().collect();
    assert_eq!(circle, ["b", "c"]);
}
