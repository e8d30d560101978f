//! Whether this machine has the memory that a suspended program takes, and the limits that are in its way.
//!
//! The contents of device memory become anonymous memory of the program. If there is too little, the driver's function
//! fails or the kernel kills the program; so it is looked at before.

use std::{
    fmt, fs, io,
    path::{Path, PathBuf},
    ptr::null_mut,
};

use crate::process::Process;

const MIB: u64 = 1 << 20;
/// What each program takes beside the contents.
const MARGIN: u64 = 256 * MIB;

/// Bytes, for people.
pub struct Size(pub u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = self.0 as f64 / MIB as f64;
        if mib < 1024.0 {
            write!(f, "{mib:.0} MiB")
        } else {
            write!(f, "{:.1} GiB", mib / 1024.0)
        }
    }
}

/// What suspending a program takes.
#[derive(Clone, Debug)]
pub struct Need {
    /// The program.
    pub process: Process,
    /// The most that it has on devices, in bytes.
    pub bytes: u64,
}

impl Need {
    fn with_margin(&self) -> u64 {
        self.bytes
            .saturating_add(self.bytes / 20)
            .saturating_add(MARGIN)
    }
}

/// Why these programs do not fit into memory; nothing if they do. `total`: the most that all of them have together.
pub fn shortages(needs: &[Need], total: u64) -> Vec<String> {
    let mut found = Vec::new();
    let margins = MARGIN * needs.len() as u64;
    let wanted = total.saturating_add(total / 20).saturating_add(margins);
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let overcommit = fs::read_to_string("/proc/sys/vm/overcommit_memory").unwrap_or_default();
    for (room, what) in rooms(&meminfo, overcommit.trim()) {
        if room < wanted {
            let (wanted, room) = (Size(wanted), Size(room));
            found.push(format!(
                "{wanted} of memory are needed and {room} {what}: end other programs, or add memory"
            ));
        }
    }
    for need in needs {
        for (group, room) in groups(&need.process) {
            let in_it = needs
                .iter()
                .filter(|other| groups(&other.process).any(|(its, _)| its == group));
            let all = in_it.fold(0u64, |sum, need| sum.saturating_add(need.with_margin()));
            let wanted = all.min(wanted);
            if room < wanted {
                let (process, wanted, room) = (&need.process, Size(wanted), Size(room));
                found.push(format!(
                    "{process}: its control group has room for {room}, {wanted} are needed: raise {}",
                    group.join("memory.max").display()
                ));
                break;
            }
        }
    }
    found
}

/// The memory that is left, by each of the kernel's counts.
fn rooms(meminfo: &str, overcommit: &str) -> Vec<(u64, &'static str)> {
    let field = |name| field(meminfo, name);
    let mut rooms = Vec::new();
    rooms.extend(field("MemAvailable:").map(|room| (room, "are available")));
    if overcommit == "2"
        && let (Some(limit), Some(used)) = (field("CommitLimit:"), field("Committed_AS:"))
    {
        let room = limit.saturating_sub(used);
        rooms.push((room, "may be committed (vm.overcommit_memory is 2)"));
    }
    rooms
}

/// The control groups (version 2) of a process that limit memory, and the room in each.
fn groups(process: &Process) -> impl Iterator<Item = (PathBuf, u64)> {
    let text = base::proc::read(format!("/proc/{}/cgroup", process.number));
    let text = text.unwrap_or_default();
    let path = text.lines().find_map(|line| line.strip_prefix("0::/"));
    let root = Path::new("/sys/fs/cgroup");
    let innermost = root.join(path.unwrap_or_default());
    let groups: Vec<_> = innermost
        .ancestors()
        .take_while(|group| *group != root)
        .map(Path::to_owned)
        .collect();
    groups.into_iter().filter_map(|group| {
        let number = |file: &str| {
            let text = fs::read_to_string(group.join(file)).ok()?;
            text.trim().parse::<u64>().ok()
        };
        // "max" (no limit) does not parse.
        let room = number("memory.max")?.saturating_sub(number("memory.current")?);
        Some((group, room))
    })
}

/// A process's limit of data memory (`ulimit -d`): soft and hard, in bytes.
pub type DataLimit = [u64; 2];

/// A process's limit of data memory.
///
/// # Errors
/// The process has ended, or is another user's.
pub fn limit_of(process: &Process) -> io::Result<DataLimit> {
    limit(process.number, None)
}

/// Raises a process's limit of data memory so that `bytes` more fit. Answers whether that was necessary.
///
/// # Errors
/// The hard limit would have to be raised, too, and this user may not do that.
pub fn raise_limit(process: &Process, bytes: u64) -> io::Result<bool> {
    let raised = raised_limit(process, bytes)?;
    if let Some(raised) = raised {
        limit(process.number, Some(raised))?;
    }
    Ok(raised.is_some())
}

/// Looks whether [`raise_limit`] would succeed, as far as that can be seen without doing it.
///
/// # Errors
/// As of that.
pub fn can_raise_limit(process: &Process, bytes: u64) -> io::Result<()> {
    /// Bit of the capability that raising a hard limit takes (`CAP_SYS_RESOURCE`).
    const RESOURCE: u64 = 1 << 24;
    let Some([_, hard]) = raised_limit(process, bytes)? else {
        return Ok(());
    };
    let raises_hard = hard > limit_of(process)?[1];
    match raises_hard && !has_capability(&base::proc::read("/proc/self/status")?, RESOURCE) {
        true => Err(io::ErrorKind::PermissionDenied.into()),
        false => Ok(()),
    }
}

/// Whether a process with this /proc/PID/status has a capability, as far as that is known.
fn has_capability(status: &str, bit: u64) -> bool {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let set = line.and_then(|line| u64::from_str_radix(line.trim(), 16).ok());
    set.is_none_or(|set| set & bit != 0)
}

/// The limit with which `bytes` more fit. `None`: they do.
fn raised_limit(process: &Process, bytes: u64) -> io::Result<Option<DataLimit>> {
    let [soft, hard] = limit_of(process)?;
    let status = base::proc::read(format!("/proc/{}/status", process.number))?;
    let used = field(&status, "VmData:").unwrap_or(u64::MAX / 2);
    let wanted = used.saturating_add(bytes).saturating_add(MARGIN);
    Ok((soft < wanted).then(|| [wanted, hard.max(wanted)]))
}

/// Sets a process's limit of data memory.
///
/// # Errors
/// The process has ended, or this user may not do that.
pub fn set_limit(process: &Process, to: DataLimit) -> io::Result<()> {
    limit(process.number, Some(to)).map(|_| ())
}

/// Bytes of a process's data memory, and of its resident memory. `None`: it has ended.
pub fn of(process: &Process) -> Option<[u64; 2]> {
    let status = base::proc::read(format!("/proc/{}/status", process.number)).ok()?;
    Some([field(&status, "VmData:")?, field(&status, "VmRSS:")?])
}

/// Bytes of a field that is given in KiB.
fn field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kib * 1024)
}

fn limit(process: u32, to: Option<DataLimit>) -> io::Result<DataLimit> {
    let new = to.map(|[soft, hard]| libc::rlimit {
        rlim_cur: soft,
        rlim_max: hard,
    });
    let mut old = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    let given = new
        .as_ref()
        .map_or(null_mut(), |new| std::ptr::from_ref(new).cast_mut());
    // SAFETY: the kernel reads the new limit, if there is one, and writes the old one.
    let result = unsafe {
        libc::prlimit(
            process.cast_signed(),
            libc::RLIMIT_DATA,
            given,
            &raw mut old,
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok([old.rlim_cur, old.rlim_max])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_may_not_be_committed_counts_where_the_kernel_is_strict() {
        let meminfo = "MemAvailable:    2048 kB\nCommitLimit:  1000 kB\nCommitted_AS:    400 kB\n";
        assert_eq!(rooms(meminfo, "0"), [(2048 << 10, "are available")]);
        assert_eq!(rooms(meminfo, "2")[1].0, 600 << 10);
        assert_eq!(rooms("", "2"), []);
    }

    #[test]
    fn sizes_have_three_digits_or_so() {
        assert_eq!(Size(4_617_089_843).to_string(), "4.3 GiB");
        assert_eq!(Size(300 << 20).to_string(), "300 MiB");
    }

    #[test]
    fn a_capability_is_read_as_the_kernel_writes_it() {
        assert!(has_capability(
            "Name:\tx\nCapEff:\t000001ffffffffff\n",
            1 << 24
        ));
        assert!(!has_capability("CapEff:\t00000000a80425fb\n", 1 << 24));
    }

    #[test]
    fn a_program_that_is_larger_than_the_machine_does_not_fit() {
        let process = Process::find(std::process::id()).expect("it runs");
        let need = |bytes| Need {
            process: process.clone(),
            bytes,
        };
        assert_eq!(shortages(&[need(1)], 1).len(), 0);
        let large = 1 << 60;
        let found = shortages(&[need(large)], large);
        assert!(found[0].contains("are available"), "{found:?}");
    }

    #[test]
    fn a_limit_of_data_memory_is_raised_by_what_is_needed_and_set_back() {
        let mut child = std::process::Command::new("sleep")
            .arg("1000")
            .spawn()
            .expect("it starts");
        let process = Process::find(child.id()).expect("it runs");
        set_limit(&process, [64 * MIB, u64::MAX]).expect("it is lower");
        assert!(raise_limit(&process, 1 << 30).expect("the hard limit allows it"));
        let [soft, hard] = limit_of(&process).expect("it runs");
        assert!(soft >= (1 << 30) + MARGIN && hard == u64::MAX);
        assert!(!raise_limit(&process, 1 << 20).expect("it runs"));
        set_limit(&process, [64 * MIB, u64::MAX]).expect("it runs");
        child.kill().expect("it runs");
        child.wait().expect("it was killed");
    }
}
