//! What drivers have compiled, kept for the next application of the same owner.
//!
//! Drivers keep what they compile in files and find it when the same program is built again. Here
//! each [owner](owner) has a folder for that, which outlives its workers: a worker may use it from
//! the moment on that it knows whose application it serves, together with the owner's other
//! workers. Drivers see to it themselves that several processes use one cache and that one that is
//! killed leaves nothing broken behind; they do natively.
//!
//! ```text
//!   FOLDER/gantry-compiled-UID/           the pool's user alone
//!       user-1000/own/                    a user of this machine
//!       vm-64055-web/user-1000/           a user in a guest, as its agent says
//!       subject-9f86.../own/              who a certificate was signed for
//!           pocl/ nv/ ...                 drivers, each in its own way
//! ```
//!
//! What applications make workers write there is hostile. It is read by workers of the same owner
//! and by nobody else: before a worker serves, Landlock takes the others' folders from it
//! ([`enter`]). The pool [looks through](tree) the folders without trusting what is in them, and
//! keeps them [within limits](sweep). Several pools of one user may share a folder: who uses a unit
//! has a lock on it ([`InUse`]), which ends with the process however that ends.

pub mod owner;
pub mod sweep;
pub mod tree;

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    str::FromStr,
    thread,
    time::{Duration, Instant},
};

use rustix::fs::{
    AtFlags, CWD, FlockOperation, Mode, OFlags, Timespec, Timestamps, UTIME_NOW, fchmod, flock,
    fstat, mkdir, mkdirat, openat, statat, utimensat,
};

use super::confine::{self, Later};
use owner::{CacheDirectory, Owner};

/// What the folder's name begins with.
const FOLDER: &str = "gantry-compiled-";
/// The folder in a worker's own folder that drivers are told of.
const TOLD: &str = "compiled";
/// A folder, and not what a link leads to.
const FOLDER_ITSELF: OFlags = OFlags::DIRECTORY
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);
/// How often a worker looks for its unit, which may just be removed.
const TRIES: usize = 8;

/// How much each unit may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit(
    /// Bytes; none if nothing is kept.
    pub Option<u64>,
);

/// Text that is no limit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is neither \"off\" nor a size of 16M at least, such as 256M or 1G")]
pub struct NoLimit(String);

impl FromStr for Limit {
    type Err = NoLimit;

    fn from_str(text: &str) -> Result<Self, NoLimit> {
        if text == "off" {
            return Ok(Self(None));
        }
        let (number, unit) = match text.char_indices().next_back() {
            Some((at, 'M')) => (&text[..at], 1 << 20),
            Some((at, 'G')) => (&text[..at], 1 << 30),
            _ => (text, 1),
        };
        let bytes = number
            .parse()
            .ok()
            .and_then(|number: u64| number.checked_mul(unit));
        match bytes {
            Some(bytes @ 0x100_0000..=0x1000_0000_0000) => Ok(Self(Some(bytes))),
            _ => Err(NoLimit(text.to_owned())),
        }
    }
}

impl std::fmt::Display for Limit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Some(bytes) if bytes.is_multiple_of(1 << 20) => write!(f, "{}M", bytes >> 20),
            Some(bytes) => write!(f, "{bytes}"),
            None => write!(f, "off"),
        }
    }
}

/// Where all owners' folders are.
pub fn folder(below: &Path) -> PathBuf {
    // SAFETY: a plain call.
    let user = unsafe { libc::geteuid() };
    below.join(format!("{FOLDER}{user}"))
}

/// Makes the folder of all if it is not there, and sees that nobody else reaches it. It is there as
/// long as what is returned, though it is in `/tmp`.
pub fn create(folder: &Path) -> io::Result<OwnedFd> {
    match mkdir(folder, Mode::RWXU) {
        Ok(()) | Err(rustix::io::Errno::EXIST) => {}
        Err(error) => return Err(error.into()),
    }
    let opened = open(folder)?;
    fchmod(&opened, Mode::RWXU)?;
    // Those who tidy /tmp up leave a folder alone that somebody has a lock on.
    let _ = flock(&opened, FlockOperation::NonBlockingLockShared);
    Ok(opened)
}

/// Opens the folder of all. It may be below one that everybody can write to: what is there now may
/// be another user's.
fn open(folder: &Path) -> io::Result<OwnedFd> {
    let opened = openat(CWD, folder, FOLDER_ITSELF, Mode::empty())?;
    // SAFETY: a plain call.
    let user = unsafe { libc::geteuid() };
    if fstat(&opened)?.st_uid != user {
        return Err(io::Error::other("it is another user's"));
    }
    Ok(opened)
}

/// The variables that tell drivers where to keep what they compile, in a worker's own folder.
pub fn variables(own: &Path) -> [(&'static str, PathBuf); 3] {
    let told = own.join(TOLD);
    [
        ("POCL_CACHE_DIR", told.join("pocl")),
        ("CUDA_CACHE_PATH", told.join("nv")),
        // Intel's, AMD's and Mesa's drivers.
        ("XDG_CACHE_HOME", told),
    ]
}

/// Gives a worker its owner's folder, and takes those of all others from it for good. Without an
/// owner, or where there is no room for a folder, it keeps one that goes with it. For a process of
/// one thread: others would keep what they have. What a driver has in its folder already stays there.
pub fn enter(
    folder: &Path,
    own: &Path,
    owner: Option<&Owner>,
    confined: Later,
) -> Result<Option<InUse>, confine::Error> {
    let made = owner.map(Owner::directory).and_then(|directory| {
        let made = make(folder, &directory).and_then(|made| lead(own, &made.path).map(|()| made));
        let said = |error: &io::Error| {
            base::note!(
                "gantry-accel: cannot make {} for compiled programs ({error}): is there room, and \
                 is it this user's? One application's are compiled anew",
                folder.join(&directory.unit).display()
            );
        };
        made.inspect_err(said).ok()
    });
    confined.enter(made.as_ref().map(|made| made.path.as_path()))?;
    Ok(made)
}

/// A unit that somebody uses, of this pool or of another one: it is not removed unless there is far
/// too much in it.
#[derive(Debug)]
pub struct InUse {
    /// The unit's name.
    pub unit: String,
    /// The owner's folder in it.
    path: PathBuf,
    _lock: OwnedFd,
}

/// Makes an owner's folder.
fn make(folder: &Path, directory: &CacheDirectory) -> io::Result<InUse> {
    let all = open(folder)?;
    for tried in 1..=TRIES {
        let lock = make_folder(&all, &directory.unit)?;
        // Who holds it alone is about to remove the unit, and soon done. Or it is a hostile worker of
        // the unit, for whose sake nobody else goes without; and some file systems have no locks.
        let locked = flock(&lock, FlockOperation::NonBlockingLockShared);
        if locked == Err(rustix::io::Errno::WOULDBLOCK) && tried < TRIES {
            thread::sleep(Duration::from_millis(1));
            continue;
        }
        let named = statat(&all, &directory.unit, AtFlags::SYMLINK_NOFOLLOW);
        if !named.is_ok_and(|named| fstat(&lock).is_ok_and(|lock| named.st_ino == lock.st_ino)) {
            continue;
        }
        let part = make_folder(&lock, &directory.part)?;
        for driver in ["pocl", "nv"] {
            // The application's to make something else of.
            let _ = make_folder(&part, driver);
        }
        return Ok(InUse {
            unit: directory.unit.clone(),
            path: folder.join(&directory.unit).join(&directory.part),
            _lock: lock,
        });
    }
    Err(io::Error::other("it is removed again and again"))
}

/// Opens a folder, which is made if it is not there.
fn make_folder(parent: impl AsFd, name: &str) -> io::Result<OwnedFd> {
    let parent = parent.as_fd();
    match mkdirat(parent, name, Mode::RWXU) {
        Ok(()) | Err(rustix::io::Errno::EXIST) => {}
        Err(error) => return Err(error.into()),
    }
    Ok(openat(parent, name, FOLDER_ITSELF, Mode::empty())?)
}

/// Notes that a unit is used, so that it is not taken for one that nobody has used for long. For the
/// pool: workers cannot say when a file was used.
pub fn note_use(folder: &Path, unit: &str) {
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: UTIME_NOW,
    };
    let now = Timestamps {
        last_access: now,
        last_modification: now,
    };
    // One that has been removed meanwhile is not used.
    let _ = utimensat(CWD, folder.join(unit), &now, AtFlags::SYMLINK_NOFOLLOW);
}

/// Has the folder that drivers were told of lead to another one.
fn lead(own: &Path, to: &Path) -> io::Result<()> {
    let told = own.join(TOLD);
    if told.exists() {
        std::fs::rename(&told, own.join("before"))?;
    }
    std::os::unix::fs::symlink(to, told)
}

/// Whether this process has one thread; one that is about to end may take so long.
pub fn alone(patience: Duration) -> bool {
    let start = Instant::now();
    let one = || std::fs::read_dir("/proc/self/task").is_ok_and(|tasks| tasks.count() == 1);
    while !one() {
        if start.elapsed() >= patience {
            return false;
        }
        thread::sleep(Duration::from_micros(100));
    }
    true
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_they_are_written() {
        for (text, limit) in [
            ("off", None),
            ("256M", Some(256 << 20)),
            ("1G", Some(1 << 30)),
            ("16777217", Some((16 << 20) + 1)),
        ] {
            let read: Limit = text.parse().unwrap();
            assert_eq!(read, Limit(limit), "{text}");
            assert_eq!(read.to_string().parse(), Ok(read), "{text}");
        }
        for text in ["", "G", "15M", "1T", "-1G", "16 M", "99999999999G", "ö"] {
            assert!(text.parse::<Limit>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn a_folder_of_all_that_is_a_link_is_not_used() {
        let scratch = std::env::temp_dir().join(format!("gantry-all-{}", std::process::id()));
        std::fs::create_dir(&scratch).unwrap();
        std::fs::create_dir(scratch.join("elsewhere")).unwrap();
        std::os::unix::fs::symlink(scratch.join("elsewhere"), scratch.join("link")).unwrap();
        assert!(create(&scratch.join("link")).is_err());
        create(&scratch.join("new")).unwrap();
        create(&scratch.join("new")).unwrap();
        tree::remove(&scratch).unwrap();
    }

    #[test]
    fn a_folder_of_all_that_has_become_another_users_is_not_used() {
        // SAFETY: a plain call.
        if unsafe { libc::geteuid() } != 0 {
            eprintln!("not tested: only root gives folders away");
            return;
        }
        let scratch = std::env::temp_dir().join(format!("gantry-other-{}", std::process::id()));
        std::fs::create_dir(&scratch).unwrap();
        let directory = Owner::User(7).directory();
        assert!(make(&scratch, &directory).is_ok());
        std::os::unix::fs::chown(&scratch, Some(65534), None).unwrap();
        assert!(make(&scratch, &directory).is_err() && create(&scratch).is_err());
        tree::remove(&scratch).unwrap();
    }

    #[test]
    fn what_an_application_made_of_its_folders_keeps_no_other_from_them() {
        let scratch = std::env::temp_dir().join(format!("gantry-make-{}", std::process::id()));
        let all = scratch.join("all");
        std::fs::create_dir_all(&all).unwrap();
        let directory = Owner::User(7).directory();
        let first = make(&all, &directory).unwrap();
        std::fs::remove_dir(first.path.join("pocl")).unwrap();
        std::os::unix::fs::symlink(&scratch, first.path.join("pocl")).unwrap();
        // It has what the first one is locked by, and may lock it for itself.
        flock(&first._lock, FlockOperation::NonBlockingLockExclusive).unwrap();
        let second = make(&all, &directory).unwrap();
        assert_eq!(second.path, first.path);
        // A link is no owner's folder.
        let other = Owner::User(8).directory();
        std::os::unix::fs::symlink(&first.path, all.join(&other.unit)).unwrap();
        assert!(make(&all, &other).is_err());
        tree::remove(&scratch).unwrap();
    }
}
