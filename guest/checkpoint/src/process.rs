//! Processes, as /proc shows them.

use std::{
    fmt, fs, io,
    path::{Path, PathBuf},
};

use base::paths::is_in_cuda_libraries;

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
        let stat = fs::read_to_string(folder(number).join("stat"))?;
        let (name, start) = of_stat(&stat).ok_or(io::ErrorKind::InvalidData)?;
        if has_ended(&stat) {
            return Err(io::ErrorKind::NotFound.into());
        }
        Ok(Self {
            number,
            name: name.to_owned(),
            start,
        })
    }

    /// Whether it still runs.
    pub fn is_alive(&self) -> bool {
        Self::find(self.number).is_ok_and(|found| found.start == self.start)
    }

    /// The driver's library that it has mapped.
    pub fn driver(&self) -> Option<PathBuf> {
        let maps = fs::read_to_string(folder(self.number).join("maps")).ok()?;
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
        let maps = fs::read_to_string(folder.join("maps"))?;
        files.extend(mapped(&maps).map(str::to_owned));
        files.retain(|file| file.starts_with("/dev/nvidia"));
        files.sort();
        files.dedup();
        Ok(files)
    }
}

/// The processes that have NVIDIA's driver library loaded, other than this one.
pub fn with_driver() -> Vec<Process> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let mut found: Vec<_> = numbers
        .filter(|number| *number != std::process::id())
        .filter_map(|number| Process::find(number).ok())
        .filter(|process| {
            process
                .driver()
                .is_some_and(|path| !is_in_cuda_libraries(&path))
        })
        .collect();
    found.sort_by_key(|process| process.number);
    found
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
fn has_ended(stat: &str) -> bool {
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

    #[test]
    fn a_name_may_contain_anything() {
        let stat = "7 (a) b (c) S 1 7 7 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 98765 0 0";
        assert_eq!(of_stat(stat), Some(("a) b (c", 98765)));
        assert!(!has_ended(stat) && has_ended("7 (a) b) Z 1"));
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
