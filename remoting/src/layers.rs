//! Which modules of the crate may use which others. The test reads the production code and fails on
//! a use that goes up the layers.

use std::{fs, path::Path};

/// The top-level modules, each with those that it may use besides itself. Modules that are not
/// listed (descriptors, accounts, ports and the like) may use only the wire and the link.
const ROOMS: [(&str, &[&str]); 8] = [
    ("wire", &[]),
    ("apis", &["wire"]),
    ("link", &["wire"]),
    ("turns", &["link", "wire"]),
    ("session", &["link", "turns", "wire"]),
    ("backends", &["apis", "link", "session", "turns", "wire"]),
    (
        "host",
        &["apis", "backends", "link", "session", "turns", "wire"],
    ),
    (
        "bin",
        &[
            "apis", "backends", "host", "link", "session", "turns", "wire",
        ],
    ),
];

/// The text of a file without its comments and its tests, which may name anything.
fn production(text: &str) -> String {
    let end = text.find("#[cfg(test)]").or(text.find("#[cfg(all(test"));
    let text = &text[..end.unwrap_or(text.len())];
    let lines = text
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"));
    lines.collect::<Vec<_>>().join("\n")
}

/// The first segment of every path that begins at the crate's root.
fn named(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (at, root) in text.match_indices("crate::") {
        let rest = &text[at + root.len()..];
        if let Some(group) = rest.strip_prefix('{') {
            // For a group, only the names at its first level.
            let (mut depth, mut word) = (0, String::new());
            for letter in group.chars() {
                match letter {
                    '{' => depth += 1,
                    '}' if depth == 0 => break,
                    '}' => depth -= 1,
                    ',' if depth == 0 => found.push(std::mem::take(&mut word)),
                    letter if depth == 0 => word.push(letter),
                    _ => {}
                }
            }
            found.push(word);
        } else {
            found.push(rest.to_owned());
        }
    }
    let first = |path: &String| {
        let name = path
            .trim()
            .split(|c: char| !c.is_alphanumeric() && c != '_');
        name.take(1).collect::<String>()
    };
    found
        .iter()
        .map(first)
        .filter(|name| !name.is_empty())
        .collect()
}

/// Reads all files below a folder.
fn files(folder: &Path, each: &mut dyn FnMut(&Path, &str)) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files(&path, each);
        } else {
            each(&path, &fs::read_to_string(&path).unwrap());
        }
    }
}

#[test]
fn rooms_name_only_what_is_below_them() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut wrong = Vec::new();
    let mut seen = 0;
    for (room, may) in ROOMS {
        files(&source.join(room), &mut |path, text| {
            let name = path.file_stem().unwrap_or_default().to_string_lossy();
            if name == "tests" || name.ends_with("_tests") || name == "testing" {
                return;
            }
            seen += 1;
            for module in named(&production(text)) {
                let is_room = ROOMS.iter().any(|(room, _)| *room == module);
                if is_room && module != room && !may.contains(&module.as_str()) {
                    wrong.push(format!("{} names {module}", path.display()));
                }
            }
        });
    }
    assert!(seen > 60, "only {seen} files were read");
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn a_path_is_found_in_groups_and_alone() {
    let text = "use crate::{\n    apis::{a, b},\n    wire::c,\n};\ncrate::host::x();";
    assert_eq!(named(text), ["apis", "wire", "host"]);
    assert_eq!(production("a\n// crate::host\n#[cfg(test)]\nb"), "a");
}
