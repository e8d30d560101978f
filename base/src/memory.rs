//! The memory that is available to this process: on the machine, and within the limits of its control groups.
//!
//! Other processes may take memory at the same time. A process that writes much therefore checks at the start whether
//! all of it is available, and again while it writes ([`Steps`]), to notice what others have taken meanwhile.

use std::{
    fmt, fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

/// Mount point of the control groups (version 2).
const GROUPS: &str = "/sys/fs/cgroup";
/// The limits of a group: its maximum, and the usage above which the kernel throttles the group to reclaim memory.
const LIMITS: [&str; 2] = ["memory.max", "memory.high"];
/// The part of a group's memory that the kernel reclaims as soon as it is needed: file contents.
const RECLAIMABLE: [&str; 2] = ["active_file", "inactive_file"];
/// Bytes written between two checks.
const STEP: u64 = 64 << 20;

/// Memory that can be allocated now without taking it from others. One eighth is kept back for what they do meanwhile.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Spare {
    /// Available bytes.
    pub bytes: u64,
    /// The control group's file that sets the limit; `None` if the machine itself is the limit.
    pub limit: Option<PathBuf>,
}

impl Spare {
    fn new(bytes: u64, limit: Option<PathBuf>) -> Self {
        Self {
            bytes: bytes - bytes / 8,
            limit,
        }
    }
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

/// Memory available to this process; `None` if the kernel does not report it.
pub fn spare() -> Option<Spare> {
    let machine = spare_of_machine()?;
    let groups = crate::proc::read("/proc/self/cgroup").unwrap_or_default();
    let least = left_of(Path::new(GROUPS), &groups);
    let least = least.map(|(left, file)| Spare::new(left, Some(file)));
    Some(match least {
        Some(least) if least.bytes < machine.bytes => least,
        _ => machine,
    })
}

/// Memory available on the machine, ignoring this process's control groups: for memory that another process allocates,
/// to which that process's groups apply. `None` if the kernel does not report it.
pub fn spare_of_machine() -> Option<Spare> {
    let bytes = available(&fs::read_to_string("/proc/meminfo").ok()?)?;
    Some(Spare::new(bytes, None))
}

fn available(meminfo: &str) -> Option<u64> {
    let mut lines = meminfo.lines();
    let line = lines.find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib.saturating_mul(1024))
}

/// Returns the smallest remainder under the limits of a process's group and its ancestors, and the file with that
/// limit. `groups` is the kernel's list for the process (`/proc/PID/cgroup`).
fn left_of(root: &Path, groups: &str) -> Option<(u64, PathBuf)> {
    let own = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let around = Path::new(own).ancestors().map(|group| root.join(group));
    around.flat_map(|group| left(&group)).min()
}

/// The remainders under the limits of one group.
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
    // `max` means no limit.
    let left = |name| Some((number(name)?.saturating_sub(taken), group.join(name)));
    LIMITS.into_iter().filter_map(left).collect()
}

/// Checks the available memory while much is written.
#[derive(Debug)]
pub struct Steps {
    taken: AtomicU64,
    look: fn() -> Option<Spare>,
}

impl Default for Steps {
    fn default() -> Self {
        Self::of(spare)
    }
}

impl Steps {
    /// Checks with `look`. The default is [`spare`].
    pub fn of(look: fn() -> Option<Spare>) -> Self {
        Self {
            taken: AtomicU64::new(0),
            look,
        }
    }

    /// Announces that `bytes` are about to be written, of at most `most` in total.
    ///
    /// # Errors
    /// Too little memory is left; the error says how much.
    pub fn take(&self, bytes: u64, most: u64) -> Result<(), Spare> {
        let before = self.taken.fetch_add(bytes, Ordering::Relaxed);
        if before / STEP == before.saturating_add(bytes) / STEP {
            return Ok(());
        }
        // Enough until the next check, or until the end.
        let wanted = STEP.min(most.saturating_sub(before)).max(bytes);
        match (self.look)() {
            Some(spare) if spare.bytes < wanted => Err(spare),
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
        // Whatever this machine and the control group of the tests have left.
        let machine = spare_of_machine().unwrap();
        assert_eq!(machine.limit, None);
        assert!(spare().is_some());
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
        // The root group has no limits.
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
        // The group already uses more than its limit.
        write("a/memory.max", "10\n");
        assert_eq!(least("0::/a/b\n"), Some((0, root.join("a/memory.max"))));
        for none in ["", "0::/other\n", "4:memory:/a\n"] {
            assert_eq!(least(none), None, "{none:?}");
        }
    }

    fn spare_of<const BYTES: u64>() -> Option<Spare> {
        Some(Spare {
            bytes: BYTES,
            limit: None,
        })
    }

    #[test]
    fn who_writes_much_sees_what_others_have_taken_meanwhile() {
        let looks = |steps: Steps, look| Steps { look, ..steps };
        let most = u64::MAX;
        // The first bytes are not checked.
        let steps = Steps::of(spare_of::<0>);
        steps.take(STEP - 1, most).unwrap();
        let steps = looks(steps, spare_of::<STEP>);
        steps.take(1, most).unwrap();
        let steps = looks(steps, spare_of::<0>);
        steps.take(STEP - 1, most).unwrap();
        let steps = looks(steps, spare_of::<{ STEP - 1 }>);
        let short = steps.take(1, most).unwrap_err();
        assert_eq!(short.to_string(), "63 MiB of memory are free");
        let steps = looks(steps, spare_of::<{ 2 * STEP }>);
        let large = steps.take(3 * STEP, most);
        assert!(large.is_err(), "more at once than there is");
        looks(steps, || None).take(STEP, most).unwrap();
    }

    #[test]
    fn who_has_little_left_to_write_wants_no_more_than_that() {
        let most = STEP + 10;
        let steps = Steps::of(spare_of::<11>);
        steps.take(STEP - 1, most).unwrap();
        steps.take(1, most).unwrap();
        let steps = Steps::of(spare_of::<10>);
        steps.take(STEP - 1, most).unwrap();
        assert!(steps.take(1, most).is_err());
        // After more than the announced total, only the current write counts.
        let steps = Steps::of(spare_of::<10>);
        steps.take(2 * STEP - 10, STEP).unwrap_err();
        steps.take(10, STEP).unwrap();
    }
}
