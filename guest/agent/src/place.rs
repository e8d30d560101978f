//! Places files such that running programs keep the versions they have, and removes exactly what
//! was placed.
//!
//! A record in the same file system ([`RECORD`]) has one line for each file and link that was
//! placed, with the CRC-32 of its contents (for a link: of its target), and one for each folder
//! that was created for them. The record is written before the files are placed, with both the old
//! and the new contents, and again afterwards. If an installation is interrupted at any point, a
//! later one completes it, and what it has left can be removed.

use std::{
    borrow::Cow,
    collections::BTreeSet,
    ffi::OsStr,
    fmt,
    fs::{self, File, Permissions},
    io::{self, ErrorKind, Write},
    os::unix::{
        ffi::OsStrExt,
        fs::{PermissionsExt, symlink},
    },
    path::{Path, PathBuf},
};

use crate::file_error::{FileError, failed};

/// The path of the record, in the file system that it describes.
pub const RECORD: &str = "/var/lib/gantry-agent/installed";

/// Why something could not be placed or removed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An operation on a file, link or folder failed.
    #[error(transparent)]
    File(#[from] FileError),
    /// A link in the tree leads out of it.
    #[error(
        "{} leads to {}, out of {}: nothing is placed there",
        path.display(), to.display(), root.display()
    )]
    Outside {
        /// The folder in the tree.
        path: PathBuf,
        /// Its actual location.
        to: PathBuf,
        /// The tree.
        root: PathBuf,
    },
    /// The record is invalid.
    #[error("{} has a line that says nothing: {line:?}", path.display())]
    Record {
        /// The record.
        path: PathBuf,
        /// The line.
        line: String,
    },
}

/// An item to place.
#[derive(Debug)]
pub struct Piece {
    /// The path, relative to the root of the file system.
    pub path: PathBuf,
    /// The item.
    pub what: What,
}

/// The kind of an item.
#[derive(Debug)]
pub enum What {
    /// A file with these permissions.
    File {
        /// The contents.
        bytes: Cow<'static, [u8]>,
        /// The permissions, regardless of the umask.
        mode: u32,
    },
    /// A symbolic link to this path.
    Link(PathBuf),
}

impl What {
    fn sum(&self) -> u32 {
        match self {
            Self::File { bytes, .. } => crc32fast::hash(bytes),
            Self::Link(to) => crc32fast::hash(to.as_os_str().as_bytes()),
        }
    }

    /// Whether the path already is this item.
    fn is_at(&self, path: &Path) -> bool {
        match self {
            Self::File { bytes, mode } => {
                let found = fs::symlink_metadata(path);
                found.is_ok_and(|found| {
                    found.is_file()
                        && found.permissions().mode() & 0o7777 == *mode
                        && found.len() == bytes.len() as u64
                }) && fs::read(path).is_ok_and(|found| found == **bytes)
            }
            Self::Link(to) => fs::read_link(path).is_ok_and(|found| found == *to),
        }
    }

    /// Creates the item, which atomically replaces whatever is at the path.
    fn put(&self, path: &Path) -> io::Result<()> {
        let new = unfinished(path);
        remove(&new)?;
        match self {
            Self::File { bytes, mode } => {
                let mut file = File::create_new(&new)?;
                file.write_all(bytes)?;
                file.set_permissions(Permissions::from_mode(*mode))?;
                // Otherwise a power loss might leave the name without the contents.
                file.sync_all()?;
            }
            Self::Link(to) => symlink(to, &new)?,
        }
        fs::rename(&new, path)
    }
}

/// The path of a file until it is complete.
fn unfinished(path: &Path) -> PathBuf {
    let mut name = OsStr::new(".").to_owned();
    name.push(path.file_name().unwrap_or_default());
    name.push(".new");
    path.with_file_name(name)
}

/// Removes a file or a link, if it exists.
fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

/// The checksum of what is at a path, if anything: of a file's contents, or of a link's target.
fn sum_at(path: &Path) -> io::Result<Option<u32>> {
    let contents = match fs::symlink_metadata(path) {
        Ok(found) if found.is_symlink() => {
            fs::read_link(path)?.into_os_string().into_encoded_bytes()
        }
        Ok(_) => fs::read(path)?,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    Ok(Some(crc32fast::hash(&contents)))
}

/// A line of the record.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Line {
    /// A folder that was created.
    Folder(PathBuf),
    /// An item that was placed, or was about to be.
    Piece(PathBuf, u32),
}

impl Line {
    fn from_text(text: &str) -> Option<Self> {
        let (kind, rest) = text.split_once(' ')?;
        match kind {
            "folder" => Some(Self::Folder(rest.into())),
            "piece" => {
                let (sum, path) = rest.split_once(' ')?;
                Some(Self::Piece(path.into(), u32::from_str_radix(sum, 16).ok()?))
            }
            _ => None,
        }
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Folder(path) => write!(f, "folder {}", path.display()),
            Self::Piece(path, sum) => write!(f, "piece {sum:08x} {}", path.display()),
        }
    }
}

type Record = BTreeSet<Line>;

/// What happened to a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Done {
    /// It was created.
    Placed(PathBuf),
    /// It replaced something else.
    Replaced(PathBuf),
    /// It was already there.
    Unchanged(PathBuf),
    /// It was removed.
    Removed(PathBuf),
    /// It is not what was placed, and was left alone.
    Kept(PathBuf),
}

impl fmt::Display for Done {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Placed(path) => write!(f, "placed {}", path.display()),
            Self::Replaced(path) => write!(f, "replaced {}", path.display()),
            Self::Unchanged(path) => write!(f, "{} is up to date", path.display()),
            Self::Removed(path) => write!(f, "removed {}", path.display()),
            Self::Kept(path) => {
                write!(f, "kept {}, which has been changed since", path.display())
            }
        }
    }
}

/// A file system, identified by the folder where it is mounted.
pub struct Tree {
    root: PathBuf,
}

impl Tree {
    /// The file system at this folder.
    pub fn new(root: &Path) -> Result<Self, Error> {
        let root = fs::canonicalize(root).map_err(failed("find", root))?;
        Ok(Self { root })
    }

    /// Whether it is the file system that this program runs in.
    pub fn is_own(&self) -> bool {
        self.root == Path::new("/")
    }

    /// Whether this path was placed here.
    pub fn has(&self, path: &Path) -> Result<bool, Error> {
        let is = |line: &Line| matches!(line, Line::Piece(placed, _) if placed == path);
        Ok(self.record()?.iter().any(is))
    }

    /// Places what is not there already. Returns what happened to each piece, in order.
    pub fn place(&self, pieces: &[Piece]) -> Result<Vec<Done>, Error> {
        let mut done = Vec::new();
        for piece in pieces {
            let at = self.at(&piece.path);
            self.check_folder(&at)?;
            done.push(match fs::symlink_metadata(&at) {
                _ if piece.what.is_at(&at) => Done::Unchanged(piece.path.clone()),
                Ok(_) => Done::Replaced(piece.path.clone()),
                Err(_) => Done::Placed(piece.path.clone()),
            });
        }
        let unchanged = |done: &Done| matches!(done, Done::Unchanged(_));
        if done.iter().all(unchanged) {
            // Not even the record is written: the file system may be read-only.
            return Ok(done);
        }
        let record = self.at(Path::new(RECORD));
        let made = self.missing_folders(pieces);
        self.make_folder_of(&record)?;
        let _lock = self.lock()?;
        let before = self.record()?;
        let mut during = before.clone();
        during.extend(made.into_iter().map(Line::Folder));
        let was_placed = |path: &Path| {
            let is = |line: &Line| matches!(line, Line::Piece(placed, _) if placed == path);
            before.iter().any(is)
        };
        // What was there before, and was not placed by an installation, must not be removed.
        let own = |(piece, done): (&Piece, &Done)| {
            (!unchanged(done) || was_placed(&piece.path))
                .then(|| Line::Piece(piece.path.clone(), piece.what.sum()))
        };
        let lines: Vec<_> = pieces.iter().zip(&done).filter_map(own).collect();
        during.extend(lines.iter().cloned());
        self.write(&during)?;
        for (piece, done) in pieces.iter().zip(&done) {
            let at = self.at(&piece.path);
            if !unchanged(done) {
                self.make_folder_of(&at)?;
                piece.what.put(&at).map_err(failed("place", &at))?;
            }
        }
        // The earlier contents have been replaced.
        let is_old = |line: &Line| match line {
            Line::Folder(_) => false,
            Line::Piece(path, _) => {
                pieces.iter().any(|piece| piece.path == *path) && !lines.contains(line)
            }
        };
        during.retain(|line| !is_old(line));
        self.write(&during)?;
        Ok(done)
    }

    /// Removes everything that was placed and has not been changed since. Returns what happened to
    /// each path.
    pub fn take_away(&self) -> Result<Vec<Done>, Error> {
        let record_file = self.at(Path::new(RECORD));
        if !record_file.exists() {
            return Ok(Vec::new());
        }
        let _lock = self.lock()?;
        let record = self.record()?;
        let mut done = Vec::new();
        // In the order of paths: the file in /etc that names the library is removed before the
        // library.
        for line in &record {
            let Line::Piece(path, _) = line else {
                continue;
            };
            let at = self.at(path);
            self.check_folder(&at)?;
            let unfinished = unfinished(&at);
            remove(&unfinished).map_err(failed("remove", &unfinished))?;
            let Some(found) = sum_at(&at).map_err(failed("read", &at))? else {
                continue;
            };
            if record.contains(&Line::Piece(path.clone(), found)) {
                fs::remove_file(&at).map_err(failed("remove", &at))?;
                done.push(Done::Removed(path.clone()));
            } else if done.last() != Some(&Done::Kept(path.clone())) {
                done.push(Done::Kept(path.clone()));
            }
        }
        // The deepest first. A folder that contains other files is kept.
        let remove_folders = || {
            for line in record.iter().rev() {
                if let Line::Folder(path) = line {
                    let _ = fs::remove_dir(self.at(path));
                }
            }
        };
        remove_folders();
        fs::remove_file(&record_file).map_err(failed("remove", &record_file))?;
        remove_folders();
        Ok(done)
    }

    fn at(&self, path: &Path) -> PathBuf {
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// Fails if the folder of a path, or its nearest existing ancestor, is outside the tree.
    fn check_folder(&self, at: &Path) -> Result<(), Error> {
        let there = at.ancestors().skip(1).find(|folder| folder.exists());
        let path = there.unwrap_or(&self.root);
        let to = fs::canonicalize(path).map_err(failed("find", path))?;
        if to.starts_with(&self.root) {
            return Ok(());
        }
        Err(Error::Outside {
            path: path.to_owned(),
            to,
            root: self.root.clone(),
        })
    }

    /// The folders that the pieces and the record need and that do not exist.
    fn missing_folders(&self, pieces: &[Piece]) -> BTreeSet<PathBuf> {
        let paths = pieces.iter().map(|piece| piece.path.as_path());
        let above = paths
            .chain([Path::new(RECORD)])
            .flat_map(|path| path.ancestors().skip(1));
        above
            .filter(|folder| !self.at(folder).exists())
            .map(Path::to_owned)
            .collect()
    }

    /// Creates the missing folders above a file, readable by everybody.
    fn make_folder_of(&self, at: &Path) -> Result<(), Error> {
        self.check_folder(at)?;
        let missing: Vec<_> = at
            .ancestors()
            .skip(1)
            .take_while(|folder| !folder.exists())
            .collect();
        for folder in missing.into_iter().rev() {
            fs::create_dir(folder)
                .and_then(|()| fs::set_permissions(folder, Permissions::from_mode(0o755)))
                .map_err(failed("make the folder", folder))?;
        }
        Ok(())
    }

    /// Blocks other installations into this tree until the returned file is closed.
    fn lock(&self) -> Result<File, Error> {
        let folder = self.at(Path::new(RECORD).parent().unwrap_or(Path::new("/")));
        let file = File::open(&folder).map_err(failed("open", &folder))?;
        file.lock().map_err(failed("lock", &folder))?;
        Ok(file)
    }

    fn record(&self) -> Result<Record, Error> {
        let path = self.at(Path::new(RECORD));
        let text = match fs::read_to_string(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
            text => text.map_err(failed("read", &path))?,
        };
        let line = |text: &str| {
            Line::from_text(text).ok_or_else(|| Error::Record {
                path: path.clone(),
                line: text.to_owned(),
            })
        };
        text.lines().map(line).collect()
    }

    fn write(&self, record: &Record) -> Result<(), Error> {
        let path = self.at(Path::new(RECORD));
        let text: String = record.iter().map(|line| format!("{line}\n")).collect();
        let file = What::File {
            bytes: text.into_bytes().into(),
            mode: 0o644,
        };
        Ok(file.put(&path).map_err(failed("write", &path))?)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::{io::Read, os::unix::fs::MetadataExt};

    use tempfile::TempDir;

    use super::*;

    const LIBRARY: &str = "/usr/local/lib/library.so";
    const NAME: &str = "/etc/vendors/name";
    const LINK: &str = "/etc/wants/name";

    fn pieces(contents: &'static [u8]) -> Vec<Piece> {
        let file = |path: &str, bytes: &'static [u8], mode| Piece {
            path: path.into(),
            what: What::File {
                bytes: bytes.into(),
                mode,
            },
        };
        vec![
            file(LIBRARY, contents, 0o755),
            file(NAME, b"library.so\n", 0o644),
            Piece {
                path: LINK.into(),
                what: What::Link(NAME.into()),
            },
        ]
    }

    /// A file system with something in it.
    fn tree() -> (TempDir, Tree) {
        let folder = TempDir::new().unwrap();
        fs::create_dir_all(folder.path().join("etc/vendors")).unwrap();
        fs::write(folder.path().join("etc/vendors/other"), "other.so\n").unwrap();
        let tree = Tree::new(folder.path()).unwrap();
        (folder, tree)
    }

    /// Everything in it: path, inode and contents.
    fn all(tree: &Tree) -> BTreeSet<(PathBuf, u64, Option<u32>)> {
        let mut found = BTreeSet::new();
        let mut folders = vec![tree.root.clone()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                let meta = fs::symlink_metadata(&path).unwrap();
                let sum = if meta.is_dir() {
                    folders.push(path.clone());
                    None
                } else {
                    sum_at(&path).unwrap()
                };
                found.insert((path, meta.ino(), sum));
            }
        }
        found
    }

    fn paths(done: &[Done], is: fn(&Done) -> Option<&PathBuf>) -> Vec<&str> {
        let found = done.iter().filter_map(is);
        found.map(|path| path.to_str().unwrap()).collect()
    }

    fn removed(done: &Done) -> Option<&PathBuf> {
        match done {
            Done::Removed(path) => Some(path),
            _ => None,
        }
    }

    #[test]
    fn what_is_placed_is_taken_away_and_nothing_else() {
        let (_folder, tree) = tree();
        let before = all(&tree);
        let done = tree.place(&pieces(b"one")).unwrap();
        let placed = [LIBRARY, NAME, LINK].map(|path| Done::Placed(path.into()));
        assert_eq!(done, placed);
        let library = fs::metadata(tree.at(LIBRARY.as_ref())).unwrap();
        assert_eq!(library.permissions().mode() & 0o777, 0o755);
        assert_eq!(
            fs::read_link(tree.at(LINK.as_ref())).unwrap(),
            Path::new(NAME)
        );
        assert!(tree.has(LIBRARY.as_ref()).unwrap());
        let done = tree.take_away().unwrap();
        assert_eq!(paths(&done, removed), [NAME, LINK, LIBRARY]);
        assert_eq!(all(&tree), before);
        assert_eq!(tree.take_away().unwrap(), []);
    }

    #[test]
    fn what_is_there_is_not_touched() {
        let (_folder, tree) = tree();
        tree.place(&pieces(b"one")).unwrap();
        let before = all(&tree);
        let done = tree.place(&pieces(b"one")).unwrap();
        let unchanged = [LIBRARY, NAME, LINK].map(|path| Done::Unchanged(path.into()));
        assert_eq!(done, unchanged);
        assert_eq!(all(&tree), before);
    }

    #[test]
    fn who_has_opened_the_library_keeps_it() {
        let (_folder, tree) = tree();
        tree.place(&pieces(b"one")).unwrap();
        let mut open = File::open(tree.at(LIBRARY.as_ref())).unwrap();
        let done = tree.place(&pieces(b"two")).unwrap();
        assert_eq!(done[0], Done::Replaced(LIBRARY.into()));
        assert_eq!(done[1], Done::Unchanged(NAME.into()));
        let mut text = String::new();
        open.read_to_string(&mut text).unwrap();
        assert_eq!(text, "one");
        assert_eq!(fs::read(tree.at(LIBRARY.as_ref())).unwrap(), b"two");
        assert_eq!(tree.take_away().unwrap().len(), 3);
    }

    #[test]
    fn what_others_have_placed_or_changed_is_theirs() {
        let (_folder, tree) = tree();
        // The same file, placed by somebody else before.
        fs::write(tree.at(NAME.as_ref()), "library.so\n").unwrap();
        fs::set_permissions(tree.at(NAME.as_ref()), Permissions::from_mode(0o644)).unwrap();
        tree.place(&pieces(b"one")).unwrap();
        // A package's library, installed later, and a file in a folder that was created.
        fs::write(tree.at(LIBRARY.as_ref()), "of a package").unwrap();
        fs::write(tree.at("/etc/wants/more".as_ref()), "").unwrap();
        let done = tree.take_away().unwrap();
        assert_eq!(paths(&done, removed), [LINK]);
        assert!(done.contains(&Done::Kept(LIBRARY.into())));
        assert!(tree.at(NAME.as_ref()).exists());
        assert!(tree.at("/etc/wants/more".as_ref()).exists());
        assert!(!tree.at(RECORD.as_ref()).exists());
    }

    #[test]
    fn wherever_an_installation_breaks_off_it_can_be_completed_and_taken_away() {
        for installed in [None, Some(b"one".as_slice())] {
            for (obstacle, completes) in [LIBRARY, NAME, LINK]
                .into_iter()
                .flat_map(|path| [(path, false), (path, true)])
            {
                let (_folder, tree) = tree();
                let before = all(&tree);
                if let Some(contents) = installed {
                    tree.place(&pieces(contents)).unwrap();
                    let _ = fs::remove_file(tree.at(obstacle.as_ref()));
                }
                // A folder that is not empty cannot be replaced.
                let in_the_way = tree.at(obstacle.as_ref()).join("x");
                fs::create_dir_all(&in_the_way).unwrap();
                tree.place(&pieces(b"two")).unwrap_err();
                assert!(
                    unfinished(&tree.at(obstacle.as_ref()))
                        .symlink_metadata()
                        .is_ok()
                );
                fs::remove_dir_all(tree.at(obstacle.as_ref())).unwrap();
                if completes {
                    tree.place(&pieces(b"two")).unwrap();
                    assert_eq!(tree.take_away().unwrap().len(), 3);
                } else {
                    let done = tree.take_away().unwrap();
                    assert_eq!(paths(&done, removed).len(), done.len(), "{done:?}");
                }
                // The obstacle's folders belong to nobody.
                let left = all(&tree);
                let files = |all: &BTreeSet<(PathBuf, u64, Option<u32>)>| -> Vec<_> {
                    let files = all.iter().filter(|(.., sum)| sum.is_some());
                    files.cloned().collect()
                };
                assert_eq!(files(&left), files(&before), "{obstacle}");
            }
        }
    }

    #[test]
    fn a_link_out_of_the_tree_is_not_followed() {
        let (_folder, tree) = tree();
        let outside = TempDir::new().unwrap();
        symlink(outside.path(), tree.at("/usr".as_ref())).unwrap();
        let error = tree.place(&pieces(b"one")).unwrap_err().to_string();
        assert!(error.contains("out of"), "{error}");
        assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_damaged_record_is_named_and_nothing_is_removed() {
        let (_folder, tree) = tree();
        tree.place(&pieces(b"one")).unwrap();
        let record = tree.at(RECORD.as_ref());
        let text = fs::read_to_string(&record).unwrap();
        fs::write(&record, text.replace("piece", "peace")).unwrap();
        let before = all(&tree);
        let error = tree.take_away().unwrap_err().to_string();
        assert!(error.contains("peace"), "{error}");
        assert_eq!(all(&tree), before);
    }
}
