//! Counts system calls by tracing, without another program.

use std::{
    collections::BTreeMap,
    fmt,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use gantry_ring_client::COUNTED;

/// Maximum number of stops of one thread that are handled in one go.
const STOPS: usize = 64;

/// A traced thread.
struct Thread {
    process: &'static str,
    name: String,
    /// Whether its next stop is the exit from a system call.
    inside: bool,
    /// How often each system call was entered, by number.
    calls: BTreeMap<i64, u64>,
}

/// Counts the system calls of all threads of several processes.
pub struct Tracer(BTreeMap<i32, Thread>);

impl Tracer {
    /// Starts tracing. Processes and threads that end meanwhile are left out.
    ///
    /// # Errors
    /// Tracing is not permitted.
    pub fn attach(processes: &[(&'static str, i32)]) -> Result<Self> {
        let mut tracer = Self(BTreeMap::new());
        for (process, id) in processes {
            let Ok(entries) = std::fs::read_dir(format!("/proc/{id}/task")) else {
                continue;
            };
            for entry in entries {
                let Ok(entry) = entry else {
                    break;
                };
                let Ok(thread) = entry.file_name().to_string_lossy().parse::<i32>() else {
                    continue;
                };
                let name = std::fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
                // SAFETY: plain calls; no memory is passed.
                let attached = unsafe {
                    libc::ptrace(libc::PTRACE_SEIZE, thread, 0, libc::PTRACE_O_TRACESYSGOOD) == 0
                        && libc::ptrace(libc::PTRACE_INTERRUPT, thread, 0, 0) == 0
                };
                let error = std::io::Error::last_os_error();
                if !attached && error.raw_os_error() == Some(libc::ESRCH) {
                    continue;
                }
                ensure!(
                    attached,
                    "cannot trace {process}'s thread {thread}: {error}"
                );
                tracer.0.insert(
                    thread,
                    Thread {
                        process,
                        name: name.trim().to_owned(),
                        inside: false,
                        calls: BTreeMap::new(),
                    },
                );
            }
        }
        Ok(tracer)
    }

    /// Handles all threads that have stopped.
    pub fn step(&mut self) -> Result<()> {
        let stopped: Vec<i32> = self.0.keys().copied().collect();
        for id in stopped {
            self.look(id)?;
        }
        Ok(())
    }

    /// Handles one thread as long as it stops again, but not forever: others have stopped, too.
    fn look(&mut self, id: i32) -> Result<()> {
        for _ in 0..STOPS {
            let mut status = 0;
            // SAFETY: a local for the status.
            let got = unsafe { libc::waitpid(id, &raw mut status, libc::__WALL | libc::WNOHANG) };
            if got != id {
                return Ok(());
            }
            if !libc::WIFSTOPPED(status) {
                self.0.remove(&id);
                return Ok(());
            }
            let Some(thread) = self.0.get_mut(&id) else {
                return Ok(());
            };
            let mut signal = 0;
            if libc::WSTOPSIG(status) == libc::SIGTRAP | 0x80 {
                thread.inside = !thread.inside;
                if thread.inside {
                    let number = number(id)?;
                    *thread.calls.entry(number).or_default() += 1;
                }
            } else if status >> 16 == 0 {
                signal = libc::WSTOPSIG(status);
            }
            // SAFETY: the thread is stopped; no memory is passed.
            unsafe { libc::ptrace(libc::PTRACE_SYSCALL, id, 0, signal) };
        }
        Ok(())
    }

    /// Handles threads for this time.
    pub fn pass(&mut self, time: Duration) -> Result<()> {
        let start = Instant::now();
        while start.elapsed() < time {
            self.step()?;
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Resets the counts.
    pub fn forget(&mut self) {
        self.0.values_mut().for_each(|thread| thread.calls.clear());
    }

    /// Calls by process, thread and number.
    pub fn calls(&self) -> Vec<(String, i64, u64)> {
        let mut all = Vec::new();
        for thread in self.0.values() {
            let of = format!("{}'s {}", thread.process, thread.name);
            let calls = thread.calls.iter();
            all.extend(calls.map(|(number, count)| (of.clone(), *number, *count)));
        }
        all
    }
}

impl Drop for Tracer {
    /// Detaches from the threads: a process with traced threads does not end when it is killed.
    fn drop(&mut self) {
        for id in self.0.keys() {
            // SAFETY: no memory is passed.
            unsafe { libc::ptrace(libc::PTRACE_INTERRUPT, *id, 0, 0) };
        }
        let start = Instant::now();
        while !self.0.is_empty() && start.elapsed() < Duration::from_secs(5) {
            self.0.retain(|id, _| {
                let mut status = 0;
                // SAFETY: a local for the status; no memory is passed.
                unsafe {
                    libc::waitpid(*id, &raw mut status, libc::__WALL | libc::WNOHANG) != *id
                        || (libc::WIFSTOPPED(status)
                            && libc::ptrace(libc::PTRACE_DETACH, *id, 0, 0) != 0)
                }
            });
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// The number of the system call that a stopped thread is about to make.
fn number(thread: i32) -> Result<i64> {
    // SAFETY: all-zero registers are valid.
    let mut registers: libc::user_regs_struct = unsafe { std::mem::zeroed() };
    // SAFETY: a local of the size that the kernel fills.
    let got = unsafe { libc::ptrace(libc::PTRACE_GETREGS, thread, 0, &raw mut registers) };
    ensure!(got == 0, "cannot read a thread's registers");
    i64::try_from(registers.orig_rax).context("a system call has no number")
}

/// What happened during [`COUNTED`] calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counts {
    /// The kind of calls.
    pub of: &'static str,
    /// System calls: thread, call and count.
    pub calls: Vec<(String, i64, u64)>,
    /// KVM's counters of the vCPU, by its own names; empty if KVM does not count.
    pub exits: BTreeMap<String, u64>,
}

impl Counts {
    /// Total number of system calls.
    pub fn system_calls(&self) -> u64 {
        self.calls.iter().map(|(_, _, count)| count).sum()
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "in {COUNTED} {}", self.of)?;
        for (name, count) in &self.exits {
            write!(f, ", {count} {name}")?;
        }
        if self.exits.is_empty() {
            write!(f, ", exits unknown (this KVM does not count them)")?;
        }
        write!(f, "; in as many more, {} system calls", self.system_calls())?;
        for (of, number, count) in &self.calls {
            write!(f, "\n  {count} of number {number} by {of}")?;
        }
        Ok(())
    }
}
