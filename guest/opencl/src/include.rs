//! Headers in the application's file system: options name their folders (`-I`), but the compiler
//! that reads them is on the host. The headers that a source includes are sent along with it.

use std::{
    collections::BTreeSet,
    ffi::OsStr,
    fs,
    os::unix::ffi::OsStrExt,
    path::{Component, Path, PathBuf},
};

use remoting_proto::{apis::opencl::calls::HeaderFile, wire::Blob};

/// The maximum number of files that are sent with a source, and the maximum of their total size.
const MOST_FILES: usize = 1024;
const MOST_BYTES: usize = 32 << 20;

/// What a build is given: its options without folders, and the headers in those.
#[derive(Debug, Default, PartialEq)]
pub struct Included {
    pub options: Vec<u8>,
    /// The number of folders that the options name.
    pub folders: u32,
    pub headers: Vec<HeaderFile>,
}

/// Splits options at spaces outside of quotation marks, which are removed.
fn words(options: &[u8]) -> Vec<Vec<u8>> {
    let (mut words, mut word, mut quoted, mut any) = (Vec::new(), Vec::new(), false, false);
    for &byte in options {
        match byte {
            b'"' => (quoted, any) = (!quoted, true),
            b' ' | b'\t' | b'\n' if !quoted => {
                if any {
                    words.push(std::mem::take(&mut word));
                }
                any = false;
            }
            _ => {
                word.push(byte);
                any = true;
            }
        }
    }
    if any {
        words.push(word);
    }
    words
}

/// The names that a source includes, and whether they are in quotation marks. Conditions and macros
/// are ignored: sending a file that is not needed does no harm.
fn names(source: &[u8]) -> impl Iterator<Item = (&OsStr, bool)> {
    source.split(|&byte| byte == b'\n').filter_map(|line| {
        let rest = line.trim_ascii_start().strip_prefix(b"#")?;
        let rest = rest.trim_ascii_start().strip_prefix(b"include")?;
        let rest = rest.trim_ascii_start();
        let (end, quoted) = match rest.first()? {
            b'"' => (b'"', true),
            b'<' => (b'>', false),
            _ => return None,
        };
        let name = rest[1..].split(|&byte| byte == end).next()?;
        Some((OsStr::from_bytes(name), quoted))
    })
}

/// A path below a folder, without `..` components. None if it leaves the folder.
fn below(path: &Path) -> Option<PathBuf> {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::Normal(name) => plain.push(name),
            Component::CurDir => {}
            Component::ParentDir => {
                if !plain.pop() {
                    return None;
                }
            }
            Component::RootDir | Component::Prefix(_) => return None,
        }
    }
    (!plain.as_os_str().is_empty()).then_some(plain)
}

/// What a build of a source with these options needs. None if they name no folder.
pub fn gather(source: &[u8], options: &[u8]) -> Option<Included> {
    if !options.windows(2).any(|pair| pair == b"-I") {
        return None;
    }
    let mut folders = Vec::new();
    let mut rest = Vec::new();
    let mut words = words(options).into_iter();
    while let Some(word) = words.next() {
        match word.strip_prefix(b"-I") {
            Some(b"") => folders.extend(words.next()),
            Some(folder) => folders.push(folder.to_vec()),
            None => {
                if !rest.is_empty() {
                    rest.push(b' ');
                }
                let quote = word.contains(&b' ');
                rest.extend(quote.then_some(b'"'));
                rest.extend(&word);
                rest.extend(quote.then_some(b'"'));
            }
        }
    }
    if folders.is_empty() {
        return None;
    }
    let paths: Vec<_> = (folders.iter())
        .map(|folder| Path::new(OsStr::from_bytes(folder)))
        .collect();
    Some(Included {
        options: rest,
        folders: folders.len() as u32,
        headers: headers(source, &paths),
    })
}

/// The files that a source includes, directly and indirectly.
fn headers(source: &[u8], folders: &[&Path]) -> Vec<HeaderFile> {
    let mut found: Vec<HeaderFile> = Vec::new();
    let mut known = BTreeSet::new();
    let mut bytes = 0;
    // The texts to search: the source, and then each file found. Each file is in one of the
    // folders, and other files are looked for beside it.
    let mut next = 0;
    let mut text = source.to_vec();
    let mut beside: Option<(usize, PathBuf)> = None;
    loop {
        for (name, quoted) in names(&text) {
            let near = beside.iter().filter(|_| quoted);
            let near = near.map(|(folder, place)| (*folder, place.join(name)));
            let all = (0..folders.len()).map(|folder| (folder, PathBuf::from(name)));
            let hit = near.chain(all).find_map(|(folder, path)| {
                let path = below(&path)?;
                let contents = fs::read(folders[folder].join(&path)).ok()?;
                Some((folder, path, contents))
            });
            let Some((folder, path, contents)) = hit else {
                continue;
            };
            bytes += contents.len();
            if known.len() == MOST_FILES || bytes > MOST_BYTES {
                return found;
            }
            if known.insert((folder, path.clone())) {
                found.push(HeaderFile {
                    folder: folder as u32,
                    name: Blob(path.into_os_string().as_bytes().to_vec()),
                    contents: Blob(contents),
                });
            }
        }
        let Some(header) = found.get(next) else {
            return found;
        };
        next += 1;
        text.clone_from(&header.contents.0);
        let place = Path::new(OsStr::from_bytes(&header.name.0));
        let place = place.parent().unwrap_or(Path::new("")).to_owned();
        beside = Some((header.folder as usize, place));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_found_as_a_compiler_finds_them_and_never_outside_of_their_folders() {
        let root = std::env::temp_dir().join(format!("gantry include {}", std::process::id()));
        let (one, two) = (root.join("one"), root.join("two"));
        fs::create_dir_all(one.join("sub")).unwrap();
        fs::create_dir_all(&two).unwrap();
        fs::write(root.join("secret.h"), "0").unwrap();
        fs::write(one.join("sub/a.h"), "#include \"b.h\"\n#include <b.h>\n").unwrap();
        fs::write(one.join("sub/b.h"), " #  include \"../c.h\"\n").unwrap();
        fs::write(
            one.join("c.h"),
            "#include \"sub/a.h\"\n#include \"../secret.h\"\n",
        )
        .unwrap();
        fs::write(two.join("b.h"), "2").unwrap();
        let source = b"// #include\n#include \"sub/a.h\"\n#include MACRO\n#include \"missing.h\"\n";
        let options = format!(
            "-DX=1 -I \"{}\" -cl-mad-enable \"-I{}\"",
            one.display(),
            two.display()
        );
        let included = gather(source, options.as_bytes()).unwrap();
        assert_eq!(included.options, b"-DX=1 -cl-mad-enable");
        assert_eq!(included.folders, 2);
        let names: Vec<_> = (included.headers.iter())
            .map(|header| {
                (
                    header.folder,
                    String::from_utf8_lossy(&header.name.0).into_owned(),
                )
            })
            .collect();
        let expected = [(0, "sub/a.h"), (0, "sub/b.h"), (1, "b.h"), (0, "c.h")];
        assert_eq!(
            names,
            expected.map(|(folder, name)| (folder, name.to_owned()))
        );
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn options_without_folders_are_left_alone() {
        assert_eq!(
            gather(b"#include <a.h>", b"-cl-std=CL1.2 -DI=\"a b\""),
            None
        );
        assert_eq!(gather(b"", b"-I"), None);
    }
}
