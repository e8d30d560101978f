//! `adopt`: replaces the CUDA libraries in a Python virtual environment by Gantry's, and restores them.
//!
//! Packages name the folders of their libraries themselves, and those take precedence over everything that a user can
//! tell the loader. So each library that Gantry provides is replaced by a link, and the original is kept beside it
//! under another name. These names are the only record: after an interruption, the operation can be repeated or undone.

use std::{
    fmt,
    fs::{self, DirEntry},
    io::{self, ErrorKind, Write},
    os::unix::{
        ffi::OsStrExt,
        fs::{MetadataExt, symlink},
    },
    path::{Path, PathBuf},
};

use crate::file_error::{FileError, failed};

/// The libraries that packages bring and Gantry provides. Other major versions are not replaced.
const REPLACED: [&str; 3] = ["libcudart.so.13", "libcublas.so.13", "libcublasLt.so.13"];
/// The driver, which the loader has to find by itself.
const DRIVER: &str = "libcuda.so.1";
/// The suffix for the original of a library that was replaced by a link.
const BEFORE: &str = ".before-gantry";
/// The suffix for a file that is being created and will be renamed.
const NEW: &str = ".new-gantry";
/// The maximum folder depth: deeper folders contain no libraries of a package.
const DEEPEST: usize = 12;

/// Why an environment is not changed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file operation failed.
    #[error(transparent)]
    File(#[from] FileError),
    /// The folder is not an environment.
    #[error(
        "{} is no virtual environment of Python's: it has no pyvenv.cfg (`python3 -m venv {}` makes one)",
        .0.display(), .0.display()
    )]
    NoEnvironment(PathBuf),
    /// The packages are outside the environment.
    #[error("{} is a link: nothing outside of the environment is changed", .0.display())]
    Elsewhere(PathBuf),
    /// Another user could exchange folders and files for links while they are changed.
    #[error("other users may write to {}: `chmod go-w {}` changes that", .0.display(), .0.display())]
    Open(PathBuf),
    /// The same, since a folder belongs to another user.
    #[error(
        "{} belongs to user {owner}: run this as that user",
        folder.display()
    )]
    Foreign {
        /// The environment, or a folder in it or above it.
        folder: PathBuf,
        /// Its owner.
        owner: u32,
    },
    /// A library of Gantry is missing.
    #[error(
        "{} has no {library}: docs/user/cuda.md says how to make Gantry's CUDA libraries; --libraries \
         names their folder",
        folder.display()
    )]
    NoLibrary {
        /// The folder in which it should be.
        folder: PathBuf,
        /// The name of the missing library.
        library: &'static str,
    },
    /// There is nothing to replace.
    #[error(
        "{} has none of {}: install its packages first, for CUDA 13",
        .0.display(), REPLACED.join(", ")
    )]
    NothingThere(PathBuf),
    /// The report cannot be written.
    #[error("cannot write to the standard output")]
    Say(#[source] io::Error),
}

/// What happened to a library.
#[derive(Debug, PartialEq, Eq)]
enum Done {
    Linked(PathBuf),
    Unchanged(PathBuf),
    Restored(PathBuf),
    /// It was installed after Gantry's link, which is gone.
    Newer(PathBuf),
    /// Its package is gone.
    Gone(PathBuf),
}

impl fmt::Display for Done {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Linked(path) => write!(f, "linked {}", path.display()),
            Self::Unchanged(path) => write!(f, "{} is linked", path.display()),
            Self::Restored(path) => write!(f, "restored {}", path.display()),
            Self::Newer(path) => write!(
                f,
                "{} has been replaced since: left as it is",
                path.display()
            ),
            Self::Gone(path) => write!(f, "{} has been uninstalled since", path.display()),
        }
    }
}

fn beside(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(ending);
    path.with_file_name(name)
}

/// The library of Gantry that a file name asks for. Vendored libraries have a hash in their name.
fn wanted(name: &[u8]) -> Option<&'static str> {
    REPLACED.into_iter().find(|library| {
        let (start, end) = library.split_once('.').unwrap_or((library, ""));
        let rest = name.strip_prefix(start.as_bytes());
        let Some(rest) = rest.and_then(|rest| rest.strip_suffix(end.as_bytes())) else {
            return false;
        };
        let Some(hash) = rest.strip_suffix(b".") else {
            return false;
        };
        let is_hash = |hash: &[u8]| !hash.is_empty() && hash.iter().all(u8::is_ascii_hexdigit);
        hash.is_empty() || hash.strip_prefix(b"-").is_some_and(is_hash)
    })
}

/// Whose a folder may be.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Owner {
    /// This user's.
    Own,
    /// This user's, or root's.
    OwnOrRoot,
}

/// Refuses a folder in which another user could exchange what is changed.
fn check(folder: &Path, expected: Owner) -> Result<(), Error> {
    const GROUP_WRITES: u32 = 0o020;
    const OTHERS_WRITE: u32 = 0o002;
    const STICKY: u32 = 0o1000;
    let found = fs::symlink_metadata(folder).map_err(failed("look at", folder))?;
    let (owner, mode) = (found.uid(), found.mode());
    // SAFETY: plain calls.
    let (user, group) = unsafe { (libc::geteuid(), libc::getegid()) };
    let is_own = owner == user;
    if !is_own && (expected == Owner::Own || owner != 0) {
        let folder = folder.to_owned();
        return Err(Error::Foreign { folder, owner });
    }
    // Users have a group of their own each; root's is not for root alone.
    let is_own_group = user != 0 && found.gid() == group;
    let is_open = mode & OTHERS_WRITE != 0 || mode & GROUP_WRITES != 0 && !is_own_group;
    // Above the environment nobody can exchange what is not theirs. In it, others could add files.
    let is_sticky = expected == Owner::OwnOrRoot && mode & STICKY != 0;
    match is_open && !is_sticky {
        true => Err(Error::Open(folder.to_owned())),
        false => Ok(()),
    }
}

/// Visits each file below a folder of this user. Does not follow links to folders: they may lead out of it, or form cycles.
fn visit(
    folder: &Path,
    depth: usize,
    look: &mut impl FnMut(&DirEntry) -> Result<(), Error>,
) -> Result<(), Error> {
    check(folder, Owner::Own)?;
    let entries = fs::read_dir(folder).map_err(failed("read", folder))?;
    let entries: Result<Vec<_>, _> = entries.collect();
    let mut entries = entries.map_err(failed("read", folder))?;
    entries.sort_by_key(DirEntry::file_name);
    for entry in entries {
        let kind = entry.file_type();
        if !kind.map_err(failed("look at", &entry.path()))?.is_dir() {
            look(&entry)?;
        } else if depth < DEEPEST {
            visit(&entry.path(), depth + 1, look)?;
        }
    }
    Ok(())
}

/// Creates a link, which atomically replaces the existing file. The original is kept beside it.
fn link(path: &Path, to: &Path) -> Result<Done, FileError> {
    let found = fs::symlink_metadata(path).map_err(failed("look at", path))?;
    let before = beside(path, BEFORE);
    if !found.is_symlink() {
        // A second name for the original, which replaces an older original.
        let new = beside(path, NEW);
        remove(&new)?;
        fs::hard_link(path, &new).map_err(failed("give a second name to", path))?;
        fs::rename(&new, &before).map_err(failed("make", &before))?;
        // rename(2) does nothing if both names refer to the same file.
        remove(&new)?;
    } else if fs::read_link(path).is_ok_and(|there| there == to) {
        return Ok(Done::Unchanged(path.to_owned()));
    } else if fs::symlink_metadata(&before).is_err() {
        // A link of somebody else.
        fs::rename(path, &before).map_err(failed("rename", path))?;
    } else if !is_gantrys(path) {
        // There is only one name for the original.
        return Ok(Done::Newer(path.to_owned()));
    }
    let new = beside(path, NEW);
    remove(&new)?;
    symlink(to, &new).map_err(failed("make the link", &new))?;
    fs::rename(&new, path).map_err(failed("replace", path))?;
    Ok(Done::Linked(path.to_owned()))
}

/// Whether a link looks like one made by an earlier `adopt`, possibly to another folder.
fn is_gantrys(link: &Path) -> bool {
    fs::read_link(link).is_ok_and(|to| {
        to.is_absolute()
            && to
                .file_name()
                .is_some_and(|name| REPLACED.iter().any(|library| name == *library))
    })
}

fn remove(path: &Path) -> Result<(), FileError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        result => result.map_err(failed("remove", path)),
    }
}

/// Undoes a link, given the name of its original.
fn restore(before: &Path) -> Result<Done, FileError> {
    let bytes = before.as_os_str().as_bytes();
    let path = bytes.strip_suffix(BEFORE.as_bytes()).unwrap_or(bytes);
    let path = PathBuf::from(std::ffi::OsStr::from_bytes(path));
    match fs::symlink_metadata(&path) {
        Ok(found) if found.is_symlink() && is_gantrys(&path) => {
            fs::rename(before, &path).map_err(failed("restore", &path))?;
            Ok(Done::Restored(path))
        }
        Ok(found) => {
            let own = fs::symlink_metadata(before).map_err(failed("look at", before))?;
            remove(before)?;
            // Interrupted before there was a link.
            let same = (found.dev(), found.ino()) == (own.dev(), own.ino());
            Ok(if same {
                Done::Restored(path)
            } else {
                Done::Newer(path)
            })
        }
        Err(error) if error.kind() == ErrorKind::NotFound => {
            remove(before)?;
            Ok(Done::Gone(path))
        }
        Err(error) => Err(failed("look at", &path)(error)),
    }
}

fn say(out: &mut dyn Write, line: &dyn fmt::Display) -> Result<(), Error> {
    writeln!(out, "{line}").map_err(Error::Say)
}

/// Whether the loader finds Gantry's driver, according to its cache.
fn loader_finds(driver: &Path) -> bool {
    let cache = fs::read("/etc/ld.so.cache").unwrap_or_default();
    let found = |path: &[u8]| {
        let path = Path::new(std::ffi::OsStr::from_bytes(path));
        path.file_name().is_some_and(|name| name == DRIVER)
            && fs::canonicalize(path).ok() == fs::canonicalize(driver).ok()
    };
    cache.split(|byte| *byte == 0).any(found)
}

/// The folder of an environment's packages, for all versions of Python.
fn environment(folder: &Path) -> Result<PathBuf, Error> {
    let folder = fs::canonicalize(folder).map_err(failed("find", folder))?;
    if !folder.join("pyvenv.cfg").is_file() {
        return Err(Error::NoEnvironment(folder));
    }
    for above in folder.ancestors().skip(1) {
        check(above, Owner::OwnOrRoot)?;
    }
    check(&folder, Owner::Own)?;
    let packages = folder.join("lib");
    if packages.is_symlink() {
        return Err(Error::Elsewhere(packages));
    }
    // Of an environment that is refused, nothing is changed.
    visit(&packages, 0, &mut |_| Ok(()))?;
    Ok(packages)
}

/// Places links to Gantry's CUDA libraries in an environment. Reports what it does.
pub fn adopt(folder: &Path, libraries: &Path, out: &mut dyn Write) -> Result<(), Error> {
    let packages = environment(folder)?;
    let libraries = fs::canonicalize(libraries).unwrap_or_else(|_| libraries.to_owned());
    for library in [DRIVER].into_iter().chain(REPLACED) {
        if !libraries.join(library).is_file() {
            let folder = libraries;
            return Err(Error::NoLibrary { folder, library });
        }
    }
    let mut count = 0;
    visit(&packages, 0, &mut |entry| {
        // The libraries may be in the environment themselves.
        if entry.path().starts_with(&libraries) {
            return Ok(());
        }
        if let Some(library) = wanted(entry.file_name().as_bytes()) {
            count += 1;
            say(out, &link(&entry.path(), &libraries.join(library))?)?;
        }
        Ok(())
    })?;
    if count == 0 {
        return Err(Error::NothingThere(folder.to_owned()));
    }
    let driver = libraries.join(DRIVER);
    if !loader_finds(&driver) {
        let hint = format!(
            "the loader does not find {} by itself: write {} to /etc/ld.so.conf.d/gantry-cuda.conf and run \
             ldconfig, or set LD_LIBRARY_PATH",
            driver.display(),
            libraries.display()
        );
        say(out, &hint)?;
    }
    Ok(())
}

/// Undoes all links. Reports what it does.
pub fn undo(folder: &Path, out: &mut dyn Write) -> Result<(), Error> {
    let packages = environment(folder)?;
    let mut count = 0;
    visit(&packages, 0, &mut |entry| {
        let name = entry.file_name();
        if name.as_bytes().ends_with(BEFORE.as_bytes()) {
            count += 1;
            say(out, &restore(&entry.path())?)?;
        } else if name.as_bytes().ends_with(NEW.as_bytes()) {
            // Left by an interrupted run.
            remove(&entry.path())?;
        }
        Ok(())
    })?;
    if count == 0 {
        say(out, &"nothing is linked there")?;
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    struct Rig(TempDir);

    impl Rig {
        /// An environment with packages, and Gantry's libraries.
        fn new() -> Self {
            let rig = Self(TempDir::new().unwrap());
            fs::create_dir_all(rig.packages().join("nvidia/cu13/lib")).unwrap();
            fs::create_dir_all(rig.packages().join("torchvision.libs")).unwrap();
            fs::write(rig.environment().join("pyvenv.cfg"), "home = /usr/bin\n").unwrap();
            for name in rig.theirs() {
                fs::write(&name, "theirs").unwrap();
            }
            fs::write(
                rig.packages().join("nvidia/cu13/lib/libcudart.so.12"),
                "old",
            )
            .unwrap();
            fs::create_dir(rig.libraries()).unwrap();
            for library in [DRIVER].into_iter().chain(REPLACED) {
                fs::write(rig.libraries().join(library), "Gantry's").unwrap();
            }
            rig
        }

        fn environment(&self) -> PathBuf {
            self.0.path().join("venv")
        }

        fn packages(&self) -> PathBuf {
            self.environment().join("lib/python3.12/site-packages")
        }

        fn libraries(&self) -> PathBuf {
            self.0.path().join("gantry-cuda")
        }

        fn theirs(&self) -> Vec<PathBuf> {
            let own = REPLACED.map(|library| format!("nvidia/cu13/lib/{library}"));
            let vendored = "torchvision.libs/libcudart-c3a75b33.so.13".to_owned();
            let all = own.into_iter().chain([vendored]);
            all.map(|name| self.packages().join(name)).collect()
        }

        fn adopt(&self) -> String {
            let mut said = Vec::new();
            adopt(&self.environment(), &self.libraries(), &mut said).unwrap();
            String::from_utf8(said).unwrap()
        }

        fn undo(&self) -> String {
            let mut said = Vec::new();
            undo(&self.environment(), &mut said).unwrap();
            String::from_utf8(said).unwrap()
        }

        fn contents(&self) -> Vec<String> {
            let read = |path: &PathBuf| fs::read_to_string(path).unwrap();
            self.theirs().iter().map(read).collect()
        }

        fn count(&self) -> usize {
            let mut count = 0;
            visit(&self.environment(), 0, &mut |_| {
                count += 1;
                Ok(())
            })
            .unwrap();
            count
        }
    }

    #[test]
    fn an_environment_has_gantrys_libraries_until_they_are_taken_back() {
        let rig = Rig::new();
        let before = rig.count();
        let said = rig.adopt();
        assert_eq!(said.matches("linked ").count(), 4, "{said}");
        assert!(said.contains("ldconfig"), "{said}");
        assert!(rig.contents().iter().all(|text| text == "Gantry's"));
        let again = rig.adopt();
        assert_eq!(again.matches(" is linked").count(), 4, "{again}");
        let old = rig.packages().join("nvidia/cu13/lib/libcudart.so.12");
        assert_eq!(fs::read_to_string(old).unwrap(), "old");
        let said = rig.undo();
        assert_eq!(said.matches("restored ").count(), 4, "{said}");
        assert!(rig.contents().iter().all(|text| text == "theirs"));
        assert_eq!(rig.count(), before);
        assert_eq!(rig.undo(), "nothing is linked there\n");
    }

    #[test]
    fn an_environment_of_another_user_is_left_alone() {
        let rig = Rig::new();
        // SAFETY: a plain call.
        let user = unsafe { libc::geteuid() };
        if user != 0 {
            eprintln!("not tested: only root can give a folder to another user");
            return;
        }
        let libraries = rig.libraries();
        let within = rig.packages().join("torchvision.libs");
        let folders = [rig.0.path().to_owned(), rig.environment(), within];
        for folder in &folders {
            std::os::unix::fs::chown(folder, Some(1234), None).unwrap();
            for outcome in [
                adopt(&rig.environment(), &libraries, &mut Vec::new()),
                undo(&rig.environment(), &mut Vec::new()),
            ] {
                assert!(matches!(outcome, Err(Error::Foreign { owner: 1234, .. })));
            }
            assert!(rig.contents().iter().all(|text| text == "theirs"));
            std::os::unix::fs::chown(folder, Some(0), None).unwrap();
        }
        rig.adopt();
    }

    #[test]
    fn an_environment_that_everybody_can_change_is_left_alone() {
        use std::os::unix::fs::PermissionsExt;

        let rig = Rig::new();
        let within = rig.packages().join("nvidia/cu13");
        for folder in [rig.0.path().to_owned(), rig.environment(), within] {
            let mode = |mode| fs::set_permissions(&folder, fs::Permissions::from_mode(mode));
            // SAFETY: a plain call.
            let is_root = unsafe { libc::geteuid() } == 0;
            // Others cannot exchange entries of a sticky folder; a user's own group may write.
            for (bits, is_refused) in [
                (0o777, true),
                (0o1777, folder != rig.0.path()),
                (0o775, is_root),
            ] {
                mode(bits).unwrap();
                let outcome = adopt(&rig.environment(), &rig.libraries(), &mut Vec::new());
                let is_open = matches!(outcome, Err(Error::Open(open)) if open == folder);
                assert_eq!(is_open, is_refused, "{bits:o} {}", folder.display());
                mode(0o755).unwrap();
            }
        }
        rig.adopt();
    }

    #[test]
    fn what_packages_have_brought_since_is_kept() {
        let rig = Rig::new();
        rig.adopt();
        let [updated, removed] = [&rig.theirs()[0], &rig.theirs()[1]];
        fs::remove_file(updated).unwrap();
        fs::write(updated, "newer").unwrap();
        fs::remove_file(removed).unwrap();
        let said = rig.undo();
        assert!(said.contains("has been replaced since"), "{said}");
        assert!(said.contains("has been uninstalled since"), "{said}");
        assert_eq!(fs::read_to_string(updated).unwrap(), "newer");
        assert!(!removed.exists() && !beside(removed, BEFORE).exists());
        fs::write(removed, "theirs").unwrap();
        // An update is adopted, too, and restored.
        rig.adopt();
        assert!(rig.contents().iter().all(|text| text == "Gantry's"));
        rig.undo();
        assert_eq!(fs::read_to_string(updated).unwrap(), "newer");
    }

    #[test]
    fn what_was_broken_off_is_completed_or_undone() {
        let rig = Rig::new();
        let first = &rig.theirs()[0];
        // Interrupted before there was a link.
        fs::hard_link(first, beside(first, BEFORE)).unwrap();
        rig.undo();
        assert_eq!(fs::read_to_string(first).unwrap(), "theirs");
        assert!(!beside(first, BEFORE).exists());
        fs::hard_link(first, beside(first, BEFORE)).unwrap();
        symlink("/nowhere", beside(first, NEW)).unwrap();
        rig.adopt();
        assert!(rig.contents().iter().all(|text| text == "Gantry's"));
        rig.undo();
        assert!(rig.contents().iter().all(|text| text == "theirs"));
    }

    #[test]
    fn links_that_are_not_gantrys_are_kept() {
        let rig = Rig::new();
        let [mine, dangling] = [&rig.theirs()[0], &rig.theirs()[1]];
        fs::remove_file(dangling).unwrap();
        symlink("/nowhere/libcublas.so", dangling).unwrap();
        rig.adopt();
        // Links to another folder are Gantry's, too.
        let other = rig.0.path().join("other");
        fs::rename(rig.libraries(), &other).unwrap();
        let mut said = Vec::new();
        adopt(&rig.environment(), &other, &mut said).unwrap();
        fs::remove_file(mine).unwrap();
        symlink("/somewhere/mine.so", mine).unwrap();
        adopt(&rig.environment(), &other, &mut said).unwrap();
        rig.undo();
        assert_eq!(
            fs::read_link(mine).unwrap(),
            Path::new("/somewhere/mine.so")
        );
        assert_eq!(
            fs::read_link(dangling).unwrap(),
            Path::new("/nowhere/libcublas.so")
        );
    }

    #[test]
    fn gantrys_own_libraries_in_an_environment_are_left_alone() {
        let rig = Rig::new();
        let inside = rig.environment().join("lib/gantry-cuda");
        fs::rename(rig.libraries(), &inside).unwrap();
        let mut said = Vec::new();
        adopt(&rig.environment(), &inside, &mut said).unwrap();
        let own = fs::read_to_string(inside.join(REPLACED[0]));
        assert_eq!(own.unwrap(), "Gantry's");
        assert!(rig.contents().iter().all(|text| text == "Gantry's"));
        fs::write(beside(&rig.theirs()[0], NEW), "broken off").unwrap();
        rig.undo();
        assert!(!beside(&rig.theirs()[0], NEW).exists());
    }

    #[test]
    fn packages_outside_of_an_environment_are_left_alone() {
        let rig = Rig::new();
        let [lib, elsewhere] = ["venv/lib", "elsewhere"].map(|name| rig.0.path().join(name));
        fs::rename(&lib, &elsewhere).unwrap();
        symlink(&elsewhere, &lib).unwrap();
        let refused = adopt(&rig.environment(), &rig.libraries(), &mut Vec::new()).unwrap_err();
        assert!(refused.to_string().contains("is a link"), "{refused}");
    }

    #[test]
    fn what_is_no_environment_or_has_nothing_to_replace_is_left_alone() {
        let rig = Rig::new();
        let mut out = Vec::new();
        let refused = adopt(&rig.packages(), &rig.libraries(), &mut out).unwrap_err();
        assert!(refused.to_string().contains("no pyvenv.cfg"), "{refused}");
        let refused = undo(&rig.packages(), &mut out).unwrap_err();
        assert!(refused.to_string().contains("no pyvenv.cfg"), "{refused}");
        fs::remove_file(rig.libraries().join(DRIVER)).unwrap();
        let refused = adopt(&rig.environment(), &rig.libraries(), &mut out).unwrap_err();
        assert!(
            refused.to_string().contains("has no libcuda.so.1"),
            "{refused}"
        );
        assert!(out.is_empty() && rig.contents().iter().all(|text| text == "theirs"));
        fs::write(rig.libraries().join(DRIVER), "Gantry's").unwrap();
        for name in rig.theirs() {
            fs::remove_file(name).unwrap();
        }
        let refused = adopt(&rig.environment(), &rig.libraries(), &mut out).unwrap_err();
        assert!(
            refused.to_string().contains("install its packages"),
            "{refused}"
        );
    }

    #[test]
    fn names_ask_for_a_library_with_or_without_a_hash() {
        for (name, library) in [
            ("libcudart.so.13", Some("libcudart.so.13")),
            ("libcudart-0f3a.so.13", Some("libcudart.so.13")),
            ("libcublasLt.so.13", Some("libcublasLt.so.13")),
            ("libcudart-x.so.13", None),
            ("libcudart.so.13.before-gantry", None),
            ("libcudart.so.12", None),
            ("libcublas2.so.13", None),
        ] {
            assert_eq!(wanted(name.as_bytes()), library, "{name}");
        }
    }
}
