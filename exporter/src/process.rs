//! What the kernel says about a source's process (`/proc`), so that the process need not be believed.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Instant,
};

use base::Unpoisoned;

use crate::{kind::Kind, metrics, series::Series};

/// Maximum number of a process's threads that are looked at.
const MOST_THREADS: usize = 1024 + 64;
/// Prefix of the names of vCPU threads.
const VCPU: &str = "vcpu";

/// The kernel's files about processes, and its units.
#[derive(Clone, Debug)]
pub struct Processes {
    proc: PathBuf,
    /// Clock ticks per second.
    ticks: f64,
    /// Size of a page in bytes.
    page: f64,
    /// When the machine started, as Unix time.
    boot: f64,
    /// Processes whose threads have been looked at.
    seen: Arc<Mutex<BTreeSet<i32>>>,
}

/// A thread's line of `stat`.
#[derive(Debug, PartialEq)]
struct Stat<'a> {
    name: &'a str,
    /// User and system time in clock ticks.
    ticks: u64,
    /// Start after the machine's in clock ticks.
    start: u64,
    /// Resident pages.
    pages: u64,
}

impl<'a> Stat<'a> {
    fn of(line: &'a str) -> Option<Self> {
        // The name may contain spaces and parentheses.
        let (before, after) = line.rsplit_once(')')?;
        let (_, name) = before.split_once('(')?;
        let fields: Vec<_> = after.split_ascii_whitespace().collect();
        let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
        Some(Self {
            name,
            ticks: field(14)?.saturating_add(field(15)?),
            start: field(22)?,
            pages: field(24)?,
        })
    }
}

impl Processes {
    /// Those of this machine.
    ///
    /// # Errors
    /// `/proc` cannot be read.
    pub fn open() -> io::Result<Self> {
        Self::at(Path::new("/proc"))
    }

    fn at(proc: &Path) -> io::Result<Self> {
        // SAFETY: no pointers are involved.
        let of = |name| unsafe { libc::sysconf(name) } as f64;
        Ok(Self {
            proc: proc.to_owned(),
            ticks: of(libc::_SC_CLK_TCK),
            page: of(libc::_SC_PAGESIZE),
            boot: boot_time(proc)?,
            seen: Arc::default(),
        })
    }

    /// The same to begin with anew: the clock may have been set since, and threads are looked at once.
    #[must_use]
    pub fn refreshed(&self) -> Self {
        Self {
            boot: boot_time(&self.proc).unwrap_or(self.boot),
            seen: Arc::default(),
            ..self.clone()
        }
    }

    /// The figures of the process behind a source; none if the kernel does not tell this user. Threads are looked at
    /// until a point in time, and those of a process for the first of its sources.
    pub fn series(&self, kind: Kind, source: &str, pid: i32, until: Instant) -> Series {
        let mut series = Series::default();
        // 0 stands for a process in another PID namespace.
        if pid <= 0 {
            return series;
        }
        let folder = self.proc.join(pid.to_string());
        let labels = [kind.name(), source];
        let line = base::proc::read(folder.join("stat")).unwrap_or_default();
        let Some(stat) = Stat::of(&line) else {
            return series;
        };
        let seconds = |ticks: u64| ticks as f64 / self.ticks;
        series.set(metrics::PROCESS_CPU, labels, seconds(stat.ticks));
        let resident = stat.pages as f64 * self.page;
        series.set(metrics::PROCESS_RESIDENT, labels, resident);
        let start = self.boot + seconds(stat.start);
        series.set(metrics::PROCESS_START, labels, start);
        if kind == Kind::Vm && self.seen.lock_unpoisoned().insert(pid) {
            for (vcpu, ticks) in vcpus(&folder.join("task"), until) {
                let labels = [source, &vcpu.to_string()];
                series.set(metrics::VM_VCPU_SECONDS, labels, seconds(ticks));
            }
        }
        series
    }
}

/// When the machine started, as Unix time.
fn boot_time(proc: &Path) -> io::Result<f64> {
    let stat = fs::read_to_string(proc.join("stat"))?;
    let boot = stat.lines().find_map(|line| line.strip_prefix("btime "));
    Ok(boot.and_then(|time| time.parse().ok()).unwrap_or(0.0))
}

/// The clock ticks of the vCPUs among these threads.
fn vcpus(threads: &Path, until: Instant) -> BTreeMap<u32, u64> {
    let threads = fs::read_dir(threads).into_iter().flatten().flatten();
    let threads = threads.take_while(|_| Instant::now() < until);
    let stats = threads.take(MOST_THREADS).filter_map(|thread| {
        let line = base::proc::read(thread.path().join("stat")).ok()?;
        let stat = Stat::of(&line)?;
        Some((stat.name.strip_prefix(VCPU)?.parse().ok()?, stat.ticks))
    });
    stats.collect()
}

#[cfg(test)]
mod tests {
    use std::{
        thread,
        time::{Duration, SystemTime},
    };

    use super::*;

    #[test]
    fn a_name_cannot_forge_fields() {
        let rest = (3..53).map(|field| field.to_string());
        let rest = rest.collect::<Vec<_>>().join(" ");
        let line = format!("7 (a) R 1 (b) {rest}");
        let stat = Stat::of(&line).unwrap();
        let expected = Stat {
            name: "a) R 1 (b",
            ticks: 14 + 15,
            start: 22,
            pages: 24,
        };
        assert_eq!(stat, expected);
        assert_eq!(Stat::of("7 (a) R 1"), None);
        assert_eq!(Stat::of(""), None);
    }

    #[test]
    fn this_process_has_time_memory_and_a_vcpu() {
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let (runs, running) = std::sync::mpsc::channel();
        let vcpu = thread::Builder::new()
            .name("vcpu3".to_owned())
            .spawn(move || {
                // It has its name now.
                runs.send(()).unwrap();
                stopped.recv()
            })
            .unwrap();
        running.recv().unwrap();
        let processes = Processes::open().unwrap();
        let pid = std::process::id().cast_signed();
        let soon = Instant::now() + Duration::from_secs(60);
        let text = processes.series(Kind::Vm, "me", pid, soon).text();
        let value = |name: &str| -> f64 {
            let line = text.lines().find(|line| line.starts_with(name));
            let line = line.unwrap_or_else(|| panic!("{name} is missing in {text}"));
            line.rsplit(' ').next().unwrap().parse().unwrap()
        };
        let now = SystemTime::UNIX_EPOCH.elapsed().unwrap();
        let age = now.as_secs_f64() - value(metrics::PROCESS_START.name);
        assert!((-2.0..Duration::from_secs(86_400).as_secs_f64()).contains(&age));
        assert!(value(metrics::PROCESS_RESIDENT.name) > 100_000.0);
        assert!(text.contains("gantry_vm_vcpu_seconds_total{vm=\"me\",vcpu=\"3\"} "));
        let again = processes.series(Kind::Vm, "me too", pid, soon).text();
        assert!(
            again.contains("resident") && !again.contains("vcpu"),
            "{again}"
        );
        let anew = processes.refreshed().series(Kind::Vm, "me", pid, soon);
        assert!(anew.text().contains("vcpu"));
        drop(stop);
        assert!(vcpu.join().unwrap().is_err());
        assert_eq!(processes.series(Kind::Vm, "no", 0, soon), Series::default());
    }
}
