//! Pairs this process with a server through the VM's gate.

use std::{
    cell::Cell,
    fmt, fs, mem,
    os::fd::OwnedFd,
    path::Path,
    ptr::NonNull,
    sync::atomic::{AtomicU64, Ordering},
};

use remoting_transport::gate::{Delegate, Failed};
use vmfunc_gate::guest::{Client, Error, Failure};

/// The PCI functions, one of which offers a gate.
const FUNCTIONS: &str = "/sys/bus/pci/devices";

/// Why there is no pair.
pub enum NoPair {
    /// This VM has no gate.
    NotOffered(String),
    /// The gate cannot be used.
    Failed(String),
}

/// A process that is paired with a server. Until this is dropped, its threads that delegate stay on
/// one vCPU.
pub struct Paired {
    client: Client,
    /// Distinguishes this pair from other pairs of the process. Never zero.
    number: u64,
    cpus: libc::cpu_set_t,
    /// The CPUs that the pairing thread was allowed to run on before.
    before: libc::cpu_set_t,
}

impl fmt::Debug for Paired {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Paired")
    }
}

/// The calling thread.
const SELF: libc::pid_t = 0;

/// The CPUs that a thread of this process may run on.
fn cpus(thread: libc::pid_t) -> libc::cpu_set_t {
    // SAFETY: all zeroes are a valid set, which is filled in within its size.
    unsafe {
        let mut set = mem::zeroed();
        libc::sched_getaffinity(thread, size_of_val(&set), &raw mut set);
        set
    }
}

/// Restricts a thread of this process to these CPUs.
fn stay_on(thread: libc::pid_t, set: &libc::cpu_set_t) {
    // SAFETY: the set has the size that is passed along. If this fails, delegations fail, too.
    unsafe { libc::sched_setaffinity(thread, size_of_val(set), set) };
}

impl Paired {
    /// Pairs this process, and pins the calling thread to its current vCPU.
    pub fn new() -> Result<Self, NoPair> {
        if !Path::new(FUNCTIONS).exists() {
            let text = format!("there is no {FUNCTIONS}: is sysfs mounted?");
            return Err(NoPair::NotOffered(text));
        }
        static PAIRS: AtomicU64 = AtomicU64::new(1);
        let before = cpus(SELF);
        match Client::pair() {
            Ok(client) => Ok(Self {
                client,
                number: PAIRS.fetch_add(1, Ordering::Relaxed),
                cpus: cpus(SELF),
                before,
            }),
            Err(error) => {
                stay_on(SELF, &before);
                let text = error.to_string();
                Err(match error {
                    Error::NoPort(_) => NoPair::NotOffered(text),
                    _ => NoPair::Failed(text),
                })
            }
        }
    }
}

impl Delegate for Paired {
    fn delegate(&self, handler: usize, first: u64, second: u64) -> Result<u64, Failed> {
        // The pair that this thread is pinned for.
        thread_local!(static STAYS: Cell<u64> = const { Cell::new(0) });
        if STAYS.replace(self.number) != self.number {
            stay_on(SELF, &self.cpus);
        }
        self.client
            .delegate(handler, first, second)
            .map_err(|failure| match failure {
                Failure::Busy | Failure::Awake => Failed::Busy,
                other => Failed::Ended(other.to_string()),
            })
    }

    fn shared(&self) -> NonNull<[u8]> {
        self.client.shared()
    }

    fn memory(&self) -> Option<(OwnedFd, u64)> {
        let (file, start) = self.client.memory().ok()?;
        Some((file.into(), start))
    }
}

impl Drop for Paired {
    /// Restores the CPU affinity of threads that have delegated, and of threads that they have
    /// started.
    fn drop(&mut self) {
        let threads = fs::read_dir("/proc/self/task").into_iter().flatten();
        let names = threads.filter_map(|thread| thread.ok()?.file_name().into_string().ok());
        for thread in names.filter_map(|name| name.parse().ok()) {
            // SAFETY: both sets exist.
            if unsafe { libc::CPU_EQUAL(&cpus(thread), &self.cpus) } {
                stay_on(thread, &self.before);
            }
        }
    }
}
