//! The memory that there is for this process: of the machine, and within the limits of its control groups.
//!
//! Others may take memory at the same time as this process does. Who writes much asks at the beginning whether
//! all of it is there, and again as it goes ([`Steps`]): what others have taken meanwhile is seen then.

use std::{
    fmt, fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

/// Where control groups are (version 2).
const GROUPS: &str = "/sys/fs/cgroup";
/// What limits a group: what it may have at all, and from where on the kernel slows it down to take memory back.
const LIMITS: [&str; 2] = ["memory.max", "memory.high"];
/// What of a group's memory the kernel gives to others as soon as it is needed: files' contents.
const RECLAIMABLE: [&str; 2] = ["active_file", "inactive_file"];
/// Bytes between one look and the next of who writes much.
const STEP: u64 = 64 << 20;

/// Memory that can be had now without taking it from others, but for an eighth that is left for what they do
/// meanwhile.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Spare {
    /// How many bytes.
    pub bytes: u64,
    /// The file of the control group that allows no more; none if it is the machine that has no more.
    limit: Option<PathBuf>,
}

impl fmt::Display for Spare {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = self.bytes >> 20;
        match &self.limit {
            None => write!(f, "{mib} MiB of memory are free"),
            Some(file) => write!(f, "{mib} MiB of memory are left of {}", file.display()),
        }
    }
}

/// That of this process; none if the kernel does not say.
pub fn spare() -> Option<Spare> {
    let machine = available(&fs::read_to_string("/proc/meminfo").ok()?)?;
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let least = left_of(Path::new(GROUPS), &groups);
    let (bytes, limit) = match least {
        Some((left, file)) if left < machine => (left, Some(file)),
        _ => (machine, None),
    };
    Some(Spare {
        bytes: bytes - bytes / 8,
        limit,
    })
}

fn available(meminfo: &str) -> Option<u64> {
    let mut lines = meminfo.lines();
    let line = lines.find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib.saturating_mul(1024))
}

/// What the limits of a process's group and of those around it leave, the least of all, and the file that says so.
/// `groups`: as the kernel lists them for a process.
fn left_of(root: &Path, groups: &str) -> Option<(u64, PathBuf)> {
    let own = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let around = Path::new(own).ancestors().map(|group| root.join(group));
    around.flat_map(|group| left(&group)).min()
}

/// The same of one group.
fn left(group: &Path) -> Vec<(u64, PathBuf)> {
    let read = |name: &str| fs::read_to_string(group.join(name)).ok();
    let number = |name: &str| read(name)?.trim().parse::<u64>().ok();
    let Some(taken) = number("memory.current") else {
        return Vec::new();
    };
    let statistics = read("memory.stat").unwrap_or_default();
    let reclaimable = statistics.lines().filter_map(|line| {
        let (name, bytes) = line.split_once(' ')?;
        RECLAIMABLE
            .contains(&name)
            .then(|| bytes.parse::<u64>().ok())?
    });
    let taken = taken.saturating_sub(reclaimable.fold(0, u64::saturating_add));
    // `max` is no limit.
    let left = |name| Some((number(name)?.saturating_sub(taken), group.join(name)));
    LIMITS.into_iter().filter_map(left).collect()
}

/// Looks at what memory there is while much is written.
#[derive(Debug, Default)]
pub struct Steps(AtomicU64);

impl Steps {
    /// So many bytes are about to be written.
    ///
    /// # Errors
    /// There is hardly any memory left: as much as this.
    pub fn take(&self, bytes: u64) -> Result<(), Spare> {
        self.take_of(bytes, spare)
    }

    fn take_of(&self, bytes: u64, spare: impl Fn() -> Option<Spare>) -> Result<(), Spare> {
        let before = self.0.fetch_add(bytes, Ordering::Relaxed);
        if before / STEP == before.saturating_add(bytes) / STEP {
            return Ok(());
        }
        match spare() {
            Some(spare) if spare.bytes < STEP.max(bytes) => Err(spare),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_can_be_had_is_read_as_the_kernel_writes_it() {
        let text = "MemTotal:       24000000 kB\nMemAvailable:       8 kB\nBuffers: 1 kB\n";
        assert_eq!(available(text), Some(8 << 10));
        for other in [
            "",
            "MemFree: 8 kB\n",
            "MemAvailable: 8\n",
            "MemAvailable: x kB\n",
        ] {
            assert_eq!(available(other), None, "{other:?}");
        }
        let spare = spare().unwrap();
        assert!(spare.bytes > 0, "{spare}");
    }

    #[test]
    fn the_narrowest_limit_of_a_group_and_those_around_it_counts() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        let write = |file: &str, text: &str| {
            let file = root.join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        };
        let least = |groups: &str| left_of(root, groups);
        // The first group of all has no limits.
        assert_eq!(least("0::/\n"), None);
        write("a/memory.current", "1000\n");
        write("a/memory.max", "max\n");
        write("a/memory.high", "5000\n");
        write("a/b/memory.current", "900\n");
        write(
            "a/b/memory.stat",
            "anon 500\nactive_file 100\ninactive_file 200\n",
        );
        write("a/b/memory.max", "max\n");
        write("a/b/memory.high", "max\n");
        let of_a = Some((4000, root.join("a/memory.high")));
        assert_eq!(least("1:name=systemd:/x\n0::/a/b\n"), of_a);
        write("a/b/memory.max", "1500\n");
        assert_eq!(least("0::/a/b\n"), Some((900, root.join("a/b/memory.max"))));
        assert_eq!(least("0::/a\n"), of_a);
        // More than it may have, by now.
        write("a/memory.max", "10\n");
        assert_eq!(least("0::/a/b\n"), Some((0, root.join("a/memory.max"))));
        for none in ["", "0::/other\n", "4:memory:/a\n"] {
            assert_eq!(least(none), None, "{none:?}");
        }
    }

    #[test]
    fn who_writes_much_sees_what_others_have_taken_meanwhile() {
        let of = |bytes| move || Some(Spare { bytes, limit: None });
        let steps = Steps::default();
        // Nobody looks for the first bytes.
        steps.take_of(STEP - 1, of(0)).unwrap();
        steps.take_of(1, of(STEP)).unwrap();
        steps.take_of(STEP - 1, of(0)).unwrap();
        let short = steps.take_of(1, of(STEP - 1)).unwrap_err();
        assert_eq!(short.to_string(), "63 MiB of memory are free");
        let large = steps.take_of(3 * STEP, of(2 * STEP));
        assert!(large.is_err(), "more at once than there is");
        steps.take_of(STEP, || None).unwrap();
    }
}
