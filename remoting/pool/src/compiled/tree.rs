//! Folders that somebody hostile writes to: looked through and removed without following a link,
//! whatever is in there, however deep it is, and while it changes.

use std::{
    ffi::{CStr, CString},
    io,
    os::fd::{AsFd, OwnedFd},
    path::Path,
};

use rustix::fs::{
    self, AtFlags, CWD, Dir, FileType, Mode, OFlags, Stat, chmod, fstat, openat, renameat, statat,
    unlinkat,
};

/// How deep a driver's files lie at most below an entry; what is deeper is no driver's.
const DEEPEST: u32 = 16;
/// What each file and folder is charged at least, in bytes: there is a limit to their number, too.
pub const LEAST: u64 = 4096;

/// The names in a folder.
fn names(folder: impl AsFd) -> io::Result<impl Iterator<Item = CString>> {
    Ok(Dir::read_from(folder)?
        .filter_map(Result::ok)
        .map(|entry| entry.file_name().to_owned())
        .filter(|name| !matches!(name.as_bytes(), b"." | b"..")))
}

/// Opens a folder in another one, and nothing through a link. Who has made it may have taken the
/// right to look into it away; that is given back.
pub fn open(parent: impl AsFd, name: &CStr) -> io::Result<OwnedFd> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let place = openat(parent, name, flags | OFlags::PATH, Mode::empty())?;
    let mode = Mode::from_raw_mode(fstat(&place)?.st_mode);
    if !mode.contains(Mode::RWXU) {
        use std::os::fd::AsRawFd;
        // The very folder that is open, whatever has its name by now.
        let itself = format!("/proc/self/fd/{}", place.as_raw_fd());
        chmod(itself, Mode::RWXU)?;
    }
    Ok(openat(&place, c".", flags, Mode::empty())?)
}

/// Removes all that is in a folder. Nothing is gone into: what lies deeper is brought up first, so
/// that no depth needs more than two open folders.
pub fn empty(folder: impl AsFd) -> io::Result<()> {
    let folder = folder.as_fd();
    let mut number = 0u64;
    loop {
        // A pass removes what it finds, or brings up what is in there.
        let mut progress = false;
        let mut failed = None;
        let mut found = false;
        for name in names(folder)? {
            found = true;
            if unlinkat(folder, &name, AtFlags::empty()).is_ok()
                || unlinkat(folder, &name, AtFlags::REMOVEDIR).is_ok()
            {
                progress = true;
                continue;
            }
            let inner = match open(folder, &name) {
                Ok(inner) => inner,
                Err(error) => {
                    failed = Some(error);
                    continue;
                }
            };
            for child in names(&inner)? {
                if unlinkat(&inner, &child, AtFlags::empty()).is_ok()
                    || unlinkat(&inner, &child, AtFlags::REMOVEDIR).is_ok()
                {
                    progress = true;
                    continue;
                }
                // A folder that cannot be opened cannot be moved either.
                let moved = open(&inner, &child).and_then(|_| {
                    number += 1;
                    let name = format!("deeper-{number}");
                    Ok(renameat(&inner, &child, folder, name)?)
                });
                match moved {
                    Ok(()) => progress = true,
                    Err(error) => failed = Some(error),
                }
            }
            progress |= unlinkat(folder, &name, AtFlags::REMOVEDIR).is_ok();
        }
        if !found {
            return Ok(());
        }
        if !progress {
            return Err(failed.unwrap_or_else(|| io::ErrorKind::DirectoryNotEmpty.into()));
        }
    }
}

/// Removes a folder and all that is in it.
pub fn remove(path: &Path) -> io::Result<()> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    empty(openat(CWD, path, flags, Mode::empty())?)?;
    Ok(unlinkat(CWD, path, AtFlags::REMOVEDIR)?)
}

/// A file or folder that is kept or removed as a whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its name and those of the folders that it is in.
    pub path: Vec<CString>,
    /// When it was last used, in seconds since 1970.
    pub used: i64,
    /// Bytes that it takes, counted in whole pages.
    pub charge: u64,
}

/// There is more in a folder than anybody looks through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooMuch;

/// Looks through a folder.
pub struct Search {
    /// How many files and folders are still looked at.
    left: u64,
    entries: Vec<Entry>,
}

impl Search {
    /// The entries of a folder: what lies `levels` folders deep in it as a whole, and single files
    /// and empty folders above. At most so many files and folders are looked at.
    pub fn entries(folder: impl AsFd, levels: usize, most: u64) -> Result<Vec<Entry>, TooMuch> {
        let mut search = Self {
            left: most,
            entries: Vec::new(),
        };
        search.descend(folder, &mut Vec::new(), levels)?;
        Ok(search.entries)
    }

    /// Bytes that a folder's contents take, and when they were last used.
    pub fn total(folder: impl AsFd, most: u64) -> Result<(u64, i64), TooMuch> {
        let mut search = Self {
            left: most,
            entries: Vec::new(),
        };
        search.measure(folder, DEEPEST)
    }

    fn look(&mut self) -> Result<(), TooMuch> {
        self.left = self.left.checked_sub(1).ok_or(TooMuch)?;
        Ok(())
    }

    /// Adds the entries of a folder; whether there was anything in it.
    fn descend(
        &mut self,
        folder: impl AsFd,
        path: &mut Vec<CString>,
        levels: usize,
    ) -> Result<bool, TooMuch> {
        let folder = folder.as_fd();
        // What cannot be read is gone, or not for long.
        let Ok(names) = names(folder) else {
            return Ok(false);
        };
        let mut any = false;
        for name in names {
            self.look()?;
            let Ok(stat) = statat(folder, &name, AtFlags::SYMLINK_NOFOLLOW) else {
                continue;
            };
            any = true;
            let (mut charge, mut used) = (charge(&stat), used(&stat));
            path.push(name);
            let name = &path[path.len() - 1];
            let mut whole = true;
            if is_folder(&stat)
                && let Ok(inner) = open(folder, name)
            {
                if path.len() <= levels {
                    whole = !self.descend(inner, path, levels)?;
                } else {
                    let (more, later) = self.measure(inner, DEEPEST)?;
                    charge = charge.saturating_add(more);
                    used = later.max(used);
                }
            }
            if whole {
                self.entries.push(Entry {
                    path: path.clone(),
                    used,
                    charge,
                });
            }
            path.pop();
        }
        Ok(any)
    }

    fn measure(&mut self, folder: impl AsFd, deeper: u32) -> Result<(u64, i64), TooMuch> {
        let folder = folder.as_fd();
        let (mut total, mut last) = (0u64, 0);
        let Ok(names) = names(folder) else {
            return Ok((0, 0));
        };
        for name in names {
            self.look()?;
            let Ok(stat) = statat(folder, &name, AtFlags::SYMLINK_NOFOLLOW) else {
                continue;
            };
            total = total.saturating_add(charge(&stat));
            last = last.max(used(&stat));
            if is_folder(&stat)
                && let Ok(inner) = open(folder, &name)
            {
                let (more, later) = match deeper.checked_sub(1) {
                    Some(deeper) => self.measure(inner, deeper)?,
                    None => return Err(TooMuch),
                };
                total = total.saturating_add(more);
                last = last.max(later);
            }
        }
        Ok((total, last))
    }
}

fn is_folder(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::Directory
}

/// What a file or folder takes of its file system.
fn charge(stat: &Stat) -> u64 {
    // The unit is 512 bytes whatever the file system's blocks are (stat(2)).
    (stat.st_blocks.unsigned_abs() * 512).max(LEAST)
}

/// Reading is using, where the file system notes it. Folders are read by whoever looks for something.
fn used(stat: &Stat) -> i64 {
    if is_folder(stat) {
        stat.st_mtime
    } else {
        stat.st_mtime.max(stat.st_atime)
    }
}

/// Where things go before they are removed: at once for everybody else, and never by halves.
#[derive(Debug)]
pub struct Trash {
    folder: OwnedFd,
    number: u64,
}

impl Trash {
    /// In a folder of this process's own.
    pub fn create(path: &Path) -> io::Result<Self> {
        fs::mkdir(path, Mode::RWXU)?;
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let folder = openat(CWD, path, flags, Mode::empty())?;
        Ok(Self { folder, number: 0 })
    }

    /// Takes what is at a path below a folder, on the same file system.
    pub fn take(&mut self, below: impl AsFd, path: &[CString]) -> io::Result<()> {
        let Some((name, folders)) = path.split_last() else {
            return Ok(());
        };
        let mut folder = below.as_fd().try_clone_to_owned()?;
        for name in folders {
            folder = open(folder, name)?;
        }
        // A folder without rights cannot be moved; others are none, or are gone.
        drop(open(&folder, name));
        self.number += 1;
        Ok(renameat(
            &folder,
            name,
            &self.folder,
            self.number.to_string(),
        )?)
    }

    /// Removes what was taken.
    pub fn empty(&self) -> io::Result<()> {
        empty(&self.folder)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::{
        fs::{File, create_dir, create_dir_all, set_permissions, write},
        os::unix::{fs::PermissionsExt, fs::symlink},
        path::PathBuf,
        thread,
    };

    use super::*;
    use crate::confine;

    fn scratch(name: &str) -> PathBuf {
        let name = format!("gantry-tree-{name}-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let _ = remove(&path);
        create_dir(&path).unwrap();
        path
    }

    fn opened(path: &Path) -> OwnedFd {
        File::open(path).unwrap().into()
    }

    /// A folder with so many folders in each other, of which none is reached by a path.
    fn dig(path: &Path, depth: usize) {
        let mut inner = opened(path);
        for _ in 0..depth {
            rustix::fs::mkdirat(&inner, c"d", Mode::RWXU).unwrap();
            inner = open(&inner, c"d").unwrap();
        }
    }

    #[test]
    fn folders_deeper_than_a_path_and_than_descriptors_are_removed() {
        let path = scratch("deep");
        dig(&path, 2500);
        write(path.join("d/file"), "").unwrap();
        remove(&path).unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn what_a_link_leads_to_is_neither_looked_at_nor_removed() {
        let path = scratch("link");
        let (inside, outside) = (path.join("inside"), path.join("outside"));
        for folder in [&inside, &outside] {
            create_dir(folder).unwrap();
        }
        write(outside.join("precious"), vec![1; 1 << 20]).unwrap();
        symlink(&outside, inside.join("folder")).unwrap();
        symlink(outside.join("precious"), inside.join("file")).unwrap();
        assert!(open(opened(&inside), c"folder").is_err());
        let found = Search::entries(opened(&inside), 3, 100).unwrap();
        assert_eq!(found.len(), 2);
        assert!(found.iter().all(|entry| entry.charge == LEAST));
        remove(&inside).unwrap();
        assert!(outside.join("precious").exists());
        remove(&path).unwrap();
    }

    #[test]
    fn pipes_and_folders_without_rights_are_counted_and_removed() {
        let path = scratch("odd");
        let locked = path.join("a/b/c");
        create_dir_all(&locked).unwrap();
        write(locked.join("file"), "").unwrap();
        rustix::fs::mknodat(CWD, path.join("a/pipe"), FileType::Fifo, Mode::RUSR, 0).unwrap();
        for folder in ["a/b/c", "a/b", "a"] {
            let nothing = std::fs::Permissions::from_mode(0o000);
            set_permissions(path.join(folder), nothing).unwrap();
        }
        let looking = || {
            // Root looks into whatever it likes.
            confine::give_up_capabilities().unwrap();
            Search::entries(opened(&path), 2, 100).unwrap()
        };
        let found = thread::scope(|scope| scope.spawn(looking).join().unwrap());
        let mut names: Vec<_> = found
            .iter()
            .map(|entry| entry.path.last().unwrap().to_str().unwrap())
            .collect();
        names.sort_unstable();
        assert_eq!(names, ["c", "pipe"]);
        remove(&path).unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn more_files_or_deeper_ones_than_a_driver_has_are_too_much() {
        let path = scratch("many");
        for number in 0..50 {
            write(path.join(number.to_string()), "").unwrap();
        }
        assert_eq!(Search::entries(opened(&path), 3, 49), Err(TooMuch));
        assert_eq!(Search::entries(opened(&path), 3, 50).unwrap().len(), 50);
        dig(&path, 4 + DEEPEST as usize);
        assert!(Search::entries(opened(&path), 3, 1000).is_ok());
        dig(&path.join("d"), 0);
        remove(&path.join("d")).unwrap();
        dig(&path, 6 + DEEPEST as usize);
        assert_eq!(Search::entries(opened(&path), 3, 1000), Err(TooMuch));
        remove(&path).unwrap();
    }

    #[test]
    fn an_entry_vanishes_at_once_and_takes_with_it_what_lies_in_it() {
        let path = scratch("trash");
        create_dir_all(path.join("unit/pocl/AB/CD/kernel")).unwrap();
        write(path.join("unit/pocl/AB/CD/kernel/k.so"), vec![1; 10_000]).unwrap();
        let unit = opened(&path.join("unit"));
        let found = Search::entries(&unit, 2, 100).unwrap();
        assert_eq!(found.len(), 1);
        assert!(found[0].charge >= 10_000 + 2 * LEAST, "{found:?}");
        let mut trash = Trash::create(&path.join("gone")).unwrap();
        trash.take(&unit, &found[0].path).unwrap();
        assert!(path.join("unit/pocl/AB").exists());
        assert!(!path.join("unit/pocl/AB/CD").exists());
        trash.empty().unwrap();
        assert_eq!(std::fs::read_dir(path.join("gone")).unwrap().count(), 0);
        remove(&path).unwrap();
    }
}
