//! This process as the client of a gate of its virtual machine.

use std::{
    cell::Cell,
    fmt, fs, mem,
    os::fd::OwnedFd,
    path::Path,
    ptr::NonNull,
    sync::atomic::{AtomicU64, Ordering},
};

use gantry_remoting::link::gate::{Delegate, Failed};
use vmfunc_gate::guest::{Client, Error, Failure};

/// PCI functions, one of which offers a gate.
const FUNCTIONS: &str = "/sys/bus/pci/devices";

/// Why there is no pair.
pub enum NoPair {
    /// This virtual machine has no gate.
    NotOffered(String),
    /// It has one that cannot be used.
    Failed(String),
}

/// A process that is paired with a server. Its threads that delegate stay on one vCPU, until this is
/// dropped.
pub struct Paired {
    client: Client,
    /// Tells it from other pairs of this process: never zero.
    number: u64,
    cpus: libc::cpu_set_t,
    /// Where the pairing thread could run before.
    before: libc::cpu_set_t,
}

impl fmt::Debug for Paired {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Paired")
    }
}

/// The calling thread.
const SELF: libc::pid_t = 0;

/// The processors that a thread of this process may use.
fn cpus(thread: libc::pid_t) -> libc::cpu_set_t {
    // SAFETY: all zeroes are a valid set, which is filled in within its size.
    unsafe {
        let mut set = mem::zeroed();
        libc::sched_getaffinity(thread, size_of_val(&set), &raw mut set);
        set
    }
}

/// Has a thread of this process use these processors only.
fn stay_on(thread: libc::pid_t, set: &libc::cpu_set_t) {
    // SAFETY: a set of the size that is passed beside it. Where it fails, delegations do, too.
    unsafe { libc::sched_setaffinity(thread, size_of_val(set), set) };
}

impl Paired {
    /// Pairs this process, and keeps the calling thread on the vCPU where it is.
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
        // For which pair the thread stays.
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
    /// Lets threads run where they could: those that have delegated, and those that they have started.
    fn drop(&mut self) {
        let threads = fs::read_dir("/proc/self/task").into_iter().flatten();
        let names = threads.filter_map(|thread| thread.ok()?.file_name().into_string().ok());
        for thread in names.filter_map(|name| name.parse().ok()) {
            // SAFETY: two sets that are there.
            if unsafe { libc::CPU_EQUAL(&cpus(thread), &self.cpus) } {
                stay_on(thread, &self.before);
            }
        }
    }
}
