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
//! keeps them [within limits](sweep).

pub mod owner;
pub mod sweep;
pub mod tree;

use std::{
    io,
    path::{Path, PathBuf},
    str::FromStr,
    thread,
    time::{Duration, Instant},
};

use rustix::fs::{
    AtFlags, CWD, Mode, OFlags, Timespec, Timestamps, UTIME_NOW, fchmod, fstat, mkdir, openat,
    utimensat,
};

use super::confine::{self, Later};
use owner::{Owner, Place};

/// What the folder's name begins with.
const FOLDER: &str = "gantry-compiled-";
/// The folder in a worker's own folder that drivers are told of.
const TOLD: &str = "compiled";

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

/// Makes the folder of all if it is not there, and sees that nobody else reaches it.
pub fn create(folder: &Path) -> io::Result<()> {
    match mkdir(folder, Mode::RWXU) {
        Ok(()) | Err(rustix::io::Errno::EXIST) => {}
        Err(error) => return Err(error.into()),
    }
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let opened = openat(CWD, folder, flags, Mode::empty())?;
    // SAFETY: a plain call.
    let user = unsafe { libc::geteuid() };
    if fstat(&opened)?.st_uid != user {
        return Err(io::Error::other("it is another user's"));
    }
    Ok(fchmod(&opened, Mode::RWXU)?)
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
/// owner it keeps a folder that goes with it. For a process of one thread: others would keep what
/// they have. What a driver has in its folder already stays there.
pub fn enter(
    folder: &Path,
    own: &Path,
    owner: Option<&Owner>,
    confined: Later,
) -> Result<Option<Place>, Error> {
    let Some(owner) = owner else {
        confined.enter(None)?;
        return Ok(None);
    };
    let place = owner.place();
    let path = make(folder, &place).map_err(|source| Error::Folder {
        path: folder.join(&place.unit),
        source,
    })?;
    confined.enter(Some(&path))?;
    lead(own, &path).map_err(Error::Lead)?;
    Ok(Some(place))
}

/// Makes an owner's folder.
fn make(folder: &Path, place: &Place) -> io::Result<PathBuf> {
    let unit = folder.join(&place.unit);
    let path = unit.join(&place.part);
    for folder in [&unit, &path, &path.join("pocl"), &path.join("nv")] {
        match mkdir(folder, Mode::RWXU) {
            // The last two are the application's to make something else of.
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            Err(error) => return Err(error.into()),
        }
    }
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: UTIME_NOW,
    };
    // So that it is not taken for one that nobody uses.
    let now = Timestamps {
        last_access: now,
        last_modification: now,
    };
    utimensat(CWD, &unit, &now, AtFlags::SYMLINK_NOFOLLOW)?;
    Ok(path)
}

/// Has the folder that drivers were told of lead to another one.
fn lead(own: &Path, to: &Path) -> io::Result<()> {
    let told = own.join(TOLD);
    if told.exists() {
        std::fs::rename(&told, own.join("before"))?;
    }
    std::os::unix::fs::symlink(to, told)
}

/// Why a worker has no owner's folder.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Making it.
    #[error(
        "cannot make {path} for compiled programs: is there room, and is it this user's? \
         --compiler-cache off does without"
    )]
    Folder {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Telling drivers of it.
    #[error("cannot lead drivers to the folder for compiled programs")]
    Lead(#[source] io::Error),
    /// Taking others' away.
    #[error(transparent)]
    Confine(#[from] confine::Error),
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

#[cfg(all(test, not(loom)))]
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
        std::os::unix::fs::symlink("/tmp", scratch.join("link")).unwrap();
        assert!(create(&scratch.join("link")).is_err());
        create(&scratch.join("new")).unwrap();
        create(&scratch.join("new")).unwrap();
        tree::remove(&scratch).unwrap();
    }
}
