//! This process as the client of a gate of its virtual machine.

use std::{cell::Cell, fmt, mem, path::Path, ptr::NonNull};

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

/// A process that is paired with a server. Its threads that delegate stay on one vCPU.
pub struct Paired {
    client: Client,
    cpus: libc::cpu_set_t,
}

impl fmt::Debug for Paired {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Paired")
    }
}

/// The processors that the calling thread may use.
fn cpus() -> libc::cpu_set_t {
    // SAFETY: all zeroes are a valid set, which is filled in within its size.
    unsafe {
        let mut set = mem::zeroed();
        libc::sched_getaffinity(0, size_of_val(&set), &raw mut set);
        set
    }
}

/// Has the calling thread use these processors only.
fn stay_on(set: &libc::cpu_set_t) {
    // SAFETY: a set of the size that is passed beside it. Where it fails, delegations do, too.
    unsafe { libc::sched_setaffinity(0, size_of_val(set), set) };
}

impl Paired {
    /// Pairs this process, and keeps the calling thread on the vCPU where it is.
    pub fn new() -> Result<Self, NoPair> {
        if !Path::new(FUNCTIONS).exists() {
            let text = format!("there is no {FUNCTIONS}: is sysfs mounted?");
            return Err(NoPair::NotOffered(text));
        }
        let before = cpus();
        match Client::pair() {
            Ok(client) => Ok(Self {
                client,
                cpus: cpus(),
            }),
            Err(error) => {
                stay_on(&before);
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
        thread_local!(static STAYS: Cell<bool> = const { Cell::new(false) });
        if !STAYS.replace(true) {
            stay_on(&self.cpus);
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
}
