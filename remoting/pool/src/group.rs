//! Control groups (cgroup v2): common limits for a worker and everything that it starts.
//!
//! On a CPU device, kernels are native code. A process's own limits apply anew to each process that such code starts,
//! and do not count shared memory; a group counts all of them. Groups are used only if the pool's own group was
//! delegated to it (`Delegate=memory pids` of its service). The pool then creates groups in its own, and moves into one
//! itself, since a group that contains groups has no processes:
//! ```text
//! gantry-accel.service/ pool          the pool
//!                       worker-17     one for each worker, with limits
//! ```

use std::{
    fs::{self, File, OpenOptions},
    io::{self, ErrorKind, Write},
    os::{fd::BorrowedFd, unix::fs::MetadataExt},
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

/// Where control groups are mounted.
const ROOT: &str = "/sys/fs/cgroup";
/// The pool's own group.
const POOL: &str = "pool";
/// Prefix of the names of workers' groups.
const WORKER: &str = "worker-";
/// Bytes for everything besides a worker's heap and window: programs and libraries, kernel memory of a process, and
/// files that are being written.
const MORE: u64 = 512 << 20;
/// Maximum number of processes and threads of a worker: a base, and more for each processor, since drivers start some.
const TASKS: (usize, usize) = (256, 16);
/// Number of polls for which processes left behind by a killed pool may take to end.
const LOOKS: u32 = 100;
const LOOK: Duration = Duration::from_millis(10);

/// The limits of each worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Limits {
    /// Bytes of memory of any kind.
    pub memory: u64,
    /// Processes and threads.
    pub tasks: usize,
}

impl Limits {
    /// For workers with a heap and a window of this many bytes.
    pub fn new(heap: u64, window: u64) -> Self {
        let processors = thread::available_parallelism().map_or(1, usize::from);
        Self {
            memory: heap.saturating_add(window).saturating_add(MORE),
            tasks: TASKS.0 + TASKS.1 * processors,
        }
    }
}

/// The group that was delegated to the pool.
#[derive(Debug)]
pub(super) struct Groups {
    folder: PathBuf,
    limits: Limits,
}

impl Groups {
    /// None if no group was delegated to the pool.
    pub fn open(limits: Limits) -> io::Result<Option<Self>> {
        let Some(folder) = own().filter(|folder| is_given(folder)) else {
            return Ok(None);
        };
        let groups = Self { folder, limits };
        groups.take()?;
        Ok(Some(groups))
    }

    /// Prepares the delegated group for groups in it.
    fn take(&self) -> io::Result<()> {
        self.remove_left()?;
        let pool = self.folder.join(POOL);
        match fs::create_dir(&pool) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
            _ => set(&pool, "cgroup.procs", "0")?,
        }
        set(&self.folder, "cgroup.subtree_control", "+memory +pids").inspect_err(|_| {
            // Others are in the delegated group too: everything is undone.
            let back = set(&self.folder, "cgroup.procs", "0");
            let _ = back.and_then(|()| fs::remove_dir(&pool));
        })
    }

    /// Kills what a killed pool's workers have left running, and removes their groups. A later pool removes groups that
    /// do not end now.
    fn remove_left(&self) -> io::Result<()> {
        let folders = fs::read_dir(&self.folder)?.filter_map(Result::ok);
        let mut left: Vec<Group> = folders
            .filter(|entry| entry.file_name().to_string_lossy().starts_with(WORKER))
            .map(|entry| Group(entry.path()))
            .collect();
        for group in &left {
            // This file exists from Linux 5.14 on.
            let _ = set(&group.0, "cgroup.kill", "1");
        }
        for _ in 0..LOOKS {
            left.retain(|group| group.remove().is_err());
            if left.is_empty() {
                break;
            }
            thread::sleep(LOOK);
        }
        Ok(())
    }

    /// Creates a worker's group.
    pub fn create(&self, number: u64) -> io::Result<Group> {
        let group = Group(self.folder.join(format!("{WORKER}{number}")));
        fs::create_dir(&group.0)?;
        let Limits { memory, tasks } = self.limits;
        let set = |file, value: String| set(&group.0, file, &value);
        set("memory.max", memory.to_string())
            // A worker without memory is to end, and not to fill the disk.
            .and_then(|()| set("memory.swap.max", "0".to_owned()).or_else(no_swap))
            // When one of its processes is killed, all are.
            .and_then(|()| set("memory.oom.group", "1".to_owned()))
            .and_then(|()| set("pids.max", tasks.to_string()))?;
        Ok(group)
    }
}

/// A kernel without swap has no such limit.
fn no_swap(error: io::Error) -> io::Result<()> {
    match error.kind() {
        ErrorKind::NotFound => Ok(()),
        _ => Err(error),
    }
}

/// A worker's group; removed on drop if it is empty.
#[derive(Debug)]
pub(super) struct Group(PathBuf);

impl Group {
    /// The file through which a process enters: see [`enter`].
    pub fn entrance(&self) -> io::Result<File> {
        let path = self.0.join("cgroup.procs");
        OpenOptions::new().write(true).open(path)
    }

    /// Whether anything in it was killed because its memory was exhausted.
    pub fn was_short(&self) -> bool {
        let events = fs::read_to_string(self.0.join("memory.events"));
        events.is_ok_and(|events| count(&events, "oom_kill") > 0)
    }

    /// Fails as long as some of its processes have not ended.
    pub fn remove(&self) -> io::Result<()> {
        match fs::remove_dir(&self.0) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            removed => removed,
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = self.remove();
    }
}

/// Moves the calling process into a group. Async-signal-safe: a child calls it before exec.
pub(super) fn enter(entrance: BorrowedFd<'_>) -> io::Result<()> {
    Ok(rustix::io::write(entrance, b"0").map(drop)?)
}

fn set(folder: &Path, file: &str, value: &str) -> io::Result<()> {
    let path = folder.join(file);
    // The files of groups exist or do not: none is created.
    let mut file = OpenOptions::new().write(true).open(path)?;
    file.write_all(value.as_bytes())
}

/// The number in a line such as `oom_kill 1`.
fn count(lines: &str, name: &str) -> u64 {
    let mut lines = lines.lines();
    let number = lines.find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
    number.unwrap_or(0)
}

/// This process's group, if it has the required controllers.
fn own() -> Option<PathBuf> {
    let groups = base::proc::read("/proc/self/cgroup").ok()?;
    let folder = folder_of(&groups)?;
    let controllers = fs::read_to_string(folder.join("cgroup.controllers")).ok()?;
    let has = |name| controllers.split_whitespace().any(|other| other == name);
    (has("memory") && has("pids")).then_some(folder)
}

/// The path of the group that `/proc/self/cgroup` names.
fn folder_of(groups: &str) -> Option<PathBuf> {
    let path = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    // Outside this process's cgroup namespace.
    let outside = path.split('/').any(|part| part == "..");
    (!outside).then(|| Path::new(ROOT).join(path))
}

/// Whether a group is delegated to this user: systemd marks groups that it delegates, and makes users other than root
/// their owners.
fn is_given(folder: &Path) -> bool {
    let marked = |name| {
        let mut value = [0; 1];
        let read = rustix::fs::getxattr(folder, name, &mut value[..]);
        read.is_ok_and(|length| value[..length] == *b"1")
    };
    // SAFETY: a plain call.
    let user = unsafe { libc::geteuid() };
    marked("user.delegate")
        || marked("trusted.delegate")
        || user != 0 && folder.metadata().is_ok_and(|folder| folder.uid() == user)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_found_below_the_root_of_all_and_nowhere_else() {
        let of = |groups| folder_of(groups).map(|folder| folder.display().to_string());
        let unit = "/sys/fs/cgroup/system.slice/gantry-accel.service";
        assert_eq!(
            of("12:pids:/\n0::/system.slice/gantry-accel.service\n").as_deref(),
            Some(unit)
        );
        assert_eq!(of("0::/\n").as_deref(), Some("/sys/fs/cgroup/"));
        assert_eq!(of("0::/../../other\n"), None);
        assert_eq!(of("4:memory:/here\n"), None);
    }

    #[test]
    fn events_are_counted_by_their_whole_name() {
        let events = "low 0\nmax 7\noom 3\noom_kill 2\noom_group_kill 1\n";
        assert_eq!(count(events, "oom_kill"), 2);
        assert_eq!(count(events, "oom"), 3);
        assert_eq!(count(events, "high"), 0);
    }

    #[test]
    fn what_nobody_could_use_up_is_not_taken_for_little() {
        assert_eq!(Limits::new(u64::MAX, 1).memory, u64::MAX);
        assert_eq!(Limits::new(1 << 20, 2 << 20).memory, (3 << 20) + MORE);
    }
}
