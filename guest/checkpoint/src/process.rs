//! Processes, as /proc shows them.

use std::{
    fmt, fs, io,
    path::{Path, PathBuf},
};

use base::{paths::is_in_cuda_libraries, proc::has_ended};

/// The driver's library, with its version.
const DRIVER: &str = "libcuda.so";

/// A process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// Its number.
    pub number: u32,
    /// Its name.
    pub name: String,
    /// When it started, in clock ticks since boot. Together with the number it identifies the process.
    pub start: u64,
}

impl fmt::Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PID {} ({})", self.number, self.name)
    }
}

fn folder(number: u32) -> PathBuf {
    Path::new("/proc").join(number.to_string())
}

impl Process {
    /// A running process.
    ///
    /// # Errors
    /// No process has this number.
    pub fn find(number: u32) -> io::Result<Self> {
        let stat = base::proc::read(folder(number).join("stat"))?;
        let (name, start) = of_stat(&stat).ok_or(io::ErrorKind::InvalidData)?;
        if is_zombie(&stat) {
            return Err(io::ErrorKind::NotFound.into());
        }
        Ok(Self {
            number,
            name: name.to_owned(),
            start,
        })
    }

    /// Whether it still runs, as far as can be told.
    pub fn is_alive(&self) -> bool {
        match Self::find(self.number) {
            Ok(found) => found.start == self.start,
            Err(error) => !has_ended(&error),
        }
    }

    /// The driver's library that it has mapped.
    pub fn driver(&self) -> Option<PathBuf> {
        let maps = base::proc::read(folder(self.number).join("maps")).ok()?;
        mapped(&maps)
            .find(|path| file_name(path).starts_with(DRIVER))
            .map(PathBuf::from)
    }

    /// NVIDIA's device files that it has open or mapped, each once.
    ///
    /// # Errors
    /// They are hidden from this user, or the process has ended.
    pub fn device_files(&self) -> io::Result<Vec<String>> {
        let folder = folder(self.number);
        let mut files = Vec::new();
        for entry in fs::read_dir(folder.join("fd"))?.flatten() {
            if let Ok(target) = fs::read_link(entry.path()) {
                files.push(target.to_string_lossy().into_owned());
            }
        }
        let maps = base::proc::read(folder.join("maps"))?;
        files.extend(mapped(&maps).map(str::to_owned));
        files.retain(|file| file.starts_with("/dev/nvidia"));
        files.sort();
        files.dedup();
        Ok(files)
    }
}

/// The processes that have NVIDIA's driver library loaded, other than this one.
///
/// # Errors
/// Some cannot be looked at, for another reason than that they are hidden or have ended.
pub fn with_driver() -> io::Result<Vec<Process>> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let number = name.to_str().and_then(|name| name.parse::<u32>().ok());
        let Some(number) = number.filter(|number| *number != std::process::id()) else {
            continue;
        };
        match Process::find(number) {
            Ok(process) => found.push(process),
            Err(error) if has_ended(&error) => {}
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
            Err(error) => return Err(error),
        }
    }
    found.retain(|process| {
        let driver = process.driver();
        driver.is_some_and(|path| !is_in_cuda_libraries(&path))
    });
    found.sort_by_key(|process| process.number);
    Ok(found)
}

/// The paths of mapped files.
fn mapped(maps: &str) -> impl Iterator<Item = &str> {
    maps.lines()
        .filter_map(|line| line.splitn(6, ' ').nth(5))
        .map(str::trim_start)
        .filter(|path| path.starts_with('/'))
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or_default()
}

/// Whether it has ended, and its parent has not taken note of that.
fn is_zombie(stat: &str) -> bool {
    let rest = stat.rsplit_once(") ").map(|(_, rest)| rest);
    rest.is_some_and(|rest| rest.starts_with(['Z', 'X']))
}

/// Name and time of start. The name is in parentheses, and may contain parentheses and spaces itself.
fn of_stat(stat: &str) -> Option<(&str, u64)> {
    let (before, rest) = stat.rsplit_once(") ")?;
    let (_, name) = before.split_once('(')?;
    // The state is field 3, the time of start field 22.
    let start = rest.split(' ').nth(19)?.parse().ok()?;
    Some((name, start))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::{Entry, Journal};

    #[test]
    fn a_name_may_contain_anything() {
        let stat = "7 (a) b (c) S 1 7 7 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 98765 0 0";
        assert_eq!(of_stat(stat), Some(("a) b (c", 98765)));
        assert!(!is_zombie(stat) && is_zombie("7 (a) b) Z 1"));
        assert_eq!(of_stat("7 (a"), None);
        assert_eq!(of_stat("7 (a) S 1"), None);
    }

    #[test]
    fn mapped_files_have_names_with_spaces() {
        let maps = "7f0-7f1 r-xp 00000000 fe:00 12   /opt/my driver/libcuda.so.580.1\n\
                    7f2-7f3 rw-p 00000000 00:00 0 \n\
                    7f4-7f5 rw-p 00000000 00:00 0    [stack]\n";
        let found: Vec<_> = mapped(maps).collect();
        assert_eq!(found, ["/opt/my driver/libcuda.so.580.1"]);
        assert_eq!(file_name(found[0]), "libcuda.so.580.1");
    }

    #[test]
    fn a_process_whose_name_is_cut_within_a_letter_is_found() {
        let folder = tempfile::tempdir().expect("there is room");
        // The kernel keeps 15 bytes.
        let program = folder.path().join("0123456789abc\u{8bad}");
        std::os::unix::fs::symlink("/bin/sleep", &program).expect("there is room");
        let journal = Journal::open(&folder.path().join("journal")).expect("it is new");
        let mut child = std::process::Command::new(&program)
            .arg("60")
            .spawn()
            .expect("it is a program");
        // It has its name a moment after it has begun.
        let name = || fs::read(super::folder(child.id()).join("comm")).expect("it runs");
        let name = std::iter::repeat_with(name).find(|name| name.starts_with(b"0123"));
        let found = Process::find(child.id());
        let has_entry = found.as_ref().ok().map(|process| {
            let entry = Entry::of(process);
            journal.write(process, &entry).expect("there is room");
            (
                process.is_alive(),
                journal.programs().expect("it is readable"),
            )
        });
        child.kill().and_then(|()| child.wait()).expect("it runs");
        assert!(name.is_some_and(|name| str::from_utf8(&name).is_err()));
        let process = found.expect("it ran");
        assert_eq!(process.name, "0123456789abc\u{fffd}");
        assert_eq!(has_entry, Some((true, vec![process.clone()])));
        assert!(!process.is_alive());
        assert_eq!(journal.programs().expect("it is readable"), []);
    }

    #[test]
    fn this_process_is_found_and_another_with_its_number_is_not() {
        let own = Process::find(std::process::id()).expect("it runs");
        assert!(own.is_alive());
        let other = Process {
            start: own.start + 1,
            ..own
        };
        assert!(!other.is_alive());
    }
}
