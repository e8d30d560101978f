//! Folders of pools and of their workers, all of which are removed in the end.

use std::{
    fs::{DirBuilder, File},
    hash::{BuildHasher, RandomState},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
    time::Duration,
};

use super::compiled::tree;

/// Prefix of the names of pools' folders.
const FOLDER: &str = "gantry-accel-";
/// The file in it on which the pool holds a lock as long as it lives.
const LOCK: &str = "lock";
/// The same before it is locked.
const NEW_LOCK: &str = "lock-new";
/// How long after making its folder a pool that lives has the lock.
const STARTS_WITHIN: Duration = Duration::from_mins(1);

/// A worker's folder, which is removed on drop.
#[derive(Debug)]
pub(super) struct Folder(pub(super) PathBuf);

impl Folder {
    pub(super) fn create(path: PathBuf) -> io::Result<Self> {
        std::fs::create_dir(&path)?;
        Ok(Self(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // Removes whatever was written there. What cannot be removed now is removed with the pool's folder.
        let _ = tree::remove(&self.0);
    }
}

/// The folder of a pool, with one for each of its workers. A pool that was killed leaves its folder behind; the next
/// pool finds the lock free and removes the folder.
#[derive(Debug)]
pub(super) struct Cache {
    /// Its path.
    pub(super) folder: PathBuf,
    _lock: File,
}

impl Cache {
    pub(super) fn open(below: &Path) -> io::Result<Self> {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(below)?;
        for entry in std::fs::read_dir(below)?.filter_map(Result::ok) {
            let name = entry.file_name();
            let is_pools = name.to_string_lossy().starts_with(FOLDER);
            let path = entry.path();
            match is_pools.then(|| left(&path)).flatten() {
                Some(Left::Whole) => {
                    let _ = tree::remove(&path);
                }
                Some(Left::Beginning) => {
                    let _ = std::fs::remove_file(path.join(NEW_LOCK));
                    // Fails if there is anything else: it is no pool's then, or one whose lock somebody has removed.
                    let _ = std::fs::remove_dir(&path);
                }
                None => {}
            }
        }
        let folder = create(below)?;
        let lock = lock(&folder)?;
        Ok(Self {
            folder,
            _lock: lock,
        })
    }
}

/// Creates a pool's folder. Where everybody may create files, others may have taken its usual name; a random one they
/// cannot foresee.
fn create(below: &Path) -> io::Result<PathBuf> {
    let mut builder = DirBuilder::new();
    // Other users' processes must not see what is compiled here.
    builder.mode(0o700);
    let usual = below.join(format!("{FOLDER}{}", std::process::id()));
    match builder.create(&usual) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        done => return done.map(|()| usual),
    }
    // The keys of a new hash table are random.
    let random = RandomState::new().hash_one(std::process::id());
    let other = below.join(format!("{FOLDER}{}-{random:016x}", std::process::id()));
    builder.create(&other)?;
    Ok(other)
}

/// Creates the lock file of a folder, already locked. Otherwise a pool that starts at this moment would take the folder
/// for that of a killed pool.
fn lock(folder: &Path) -> io::Result<File> {
    let new = folder.join(NEW_LOCK);
    let lock = File::create(&new)?;
    lock.lock()?;
    std::fs::rename(&new, folder.join(LOCK))?;
    Ok(lock)
}

/// What a killed pool has left.
#[derive(Debug, PartialEq, Eq)]
enum Left {
    /// A folder with its lock, and with what its workers had.
    Whole,
    /// What there is before there is a lock.
    Beginning,
}

/// What a killed pool of this user has left there, if it is one's folder. Other users may put there what they like.
fn left(folder: &Path) -> Option<Left> {
    // SAFETY: a plain call.
    let user = unsafe { libc::geteuid() };
    let mine = folder.symlink_metadata();
    if !mine.is_ok_and(|folder| folder.is_dir() && folder.uid() == user) {
        return None;
    }
    match File::open(folder.join(LOCK)) {
        Ok(lock) => lock.try_lock().is_ok().then_some(Left::Whole),
        // Its pool was killed before it had the lock, or is about to have it.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            is_older(folder, STARTS_WITHIN).then_some(Left::Beginning)
        }
        Err(_) => None,
    }
}

fn is_older(folder: &Path, age: Duration) -> bool {
    let modified = folder
        .symlink_metadata()
        .and_then(|folder| folder.modified());
    modified.is_ok_and(|at| at.elapsed().is_ok_and(|since| since > age))
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicBool, AtomicUsize, Ordering},
        thread,
    };

    use rustix::fs::{CWD, FileType, Mode};

    use super::*;

    #[test]
    fn a_killed_pools_folder_is_removed_and_a_living_ones_is_not() {
        let below = std::env::temp_dir().join(format!("gantry-pool-test-{}", std::process::id()));
        let (dead, living) = (below.join("gantry-accel-1"), below.join("gantry-accel-2"));
        for folder in [&dead, &living] {
            std::fs::create_dir_all(folder.join("7")).unwrap();
            File::create(folder.join(LOCK)).unwrap();
        }
        let held = File::open(living.join(LOCK)).unwrap();
        held.lock().unwrap();
        let cache = Cache::open(&below).unwrap();
        assert!(!dead.exists() && living.exists() && cache.folder.exists());
        tree::remove(&below).unwrap();
    }

    #[test]
    fn a_folder_is_at_no_moment_of_its_pools_start_a_killed_ones() {
        let folder = std::env::temp_dir().join(format!("gantry-pool-start-{}", std::process::id()));
        // Odd while its pool lives.
        let lives = AtomicUsize::new(0);
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            let other = scope.spawn(|| {
                while !done.load(Ordering::SeqCst) {
                    let before = lives.load(Ordering::SeqCst);
                    let left = left(&folder).is_some();
                    let same = lives.load(Ordering::SeqCst) == before;
                    if left && same && before % 2 == 1 {
                        return false;
                    }
                }
                true
            });
            for _ in 0..2000 {
                lives.fetch_add(1, Ordering::SeqCst);
                std::fs::create_dir(&folder).unwrap();
                let held = lock(&folder).unwrap();
                lives.fetch_add(1, Ordering::SeqCst);
                drop(held);
                tree::remove(&folder).unwrap();
            }
            done.store(true, Ordering::SeqCst);
            assert!(other.join().unwrap());
        });
    }

    #[test]
    fn a_folder_whose_pool_was_killed_before_it_had_the_lock_is_removed() {
        let below = std::env::temp_dir().join(format!("gantry-pool-early-{}", std::process::id()));
        let (dead, starting) = (below.join("gantry-accel-1"), below.join("gantry-accel-2"));
        for folder in [&dead, &starting] {
            std::fs::create_dir_all(folder).unwrap();
        }
        let before = std::time::SystemTime::now() - 2 * STARTS_WITHIN;
        File::open(&dead).unwrap().set_modified(before).unwrap();
        let others = below.join("gantry-accel-logs");
        std::fs::create_dir_all(&others).unwrap();
        std::fs::write(others.join("log"), "").unwrap();
        File::open(&others).unwrap().set_modified(before).unwrap();
        let cache = Cache::open(&below).unwrap();
        assert!(!dead.exists() && starting.exists() && cache.folder.exists());
        assert!(others.join("log").exists());
        tree::remove(&below).unwrap();
    }

    #[test]
    fn a_name_that_others_have_taken_is_not_needed() {
        let below = std::env::temp_dir().join(format!("gantry-pool-taken-{}", std::process::id()));
        let usual = below.join(format!("{FOLDER}{}", std::process::id()));
        std::fs::create_dir_all(&usual).unwrap();
        let cache = Cache::open(&below).unwrap();
        assert!(cache.folder != usual && cache.folder.exists());
        tree::remove(&below).unwrap();
    }

    #[test]
    fn a_folder_that_is_not_there_is_made() {
        let above = std::env::temp_dir().join(format!("gantry-pool-new-{}", std::process::id()));
        let cache = Cache::open(&above.join("cache")).unwrap();
        assert!(cache.folder.exists());
        tree::remove(&above).unwrap();
    }

    #[test]
    fn another_users_folder_is_neither_looked_into_nor_removed() {
        // SAFETY: a plain call.
        if unsafe { libc::geteuid() } != 0 {
            eprintln!("not tested: only root gives folders away");
            return;
        }
        let below = std::env::temp_dir().join(format!("gantry-pool-others-{}", std::process::id()));
        let theirs = below.join("gantry-accel-1");
        std::fs::create_dir_all(&theirs).unwrap();
        // Opening it blocks for ever.
        let pipe = theirs.join(LOCK);
        rustix::fs::mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR, 0).unwrap();
        std::os::unix::fs::chown(&theirs, Some(65534), None).unwrap();
        assert!(Cache::open(&below).is_ok() && theirs.exists());
        tree::remove(&below).unwrap();
    }
}
