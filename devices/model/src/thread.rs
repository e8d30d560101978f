//! Threads that devices request. The VM decides how each kind is confined.

use std::{io, thread};

/// The purpose of a thread; the VM has one seccomp filter per role.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum ThreadRole {
    /// The control loop that owns the VM.
    Vmm,
    /// Serves the REST API.
    Api,
    /// Runs a virtual CPU.
    Vcpu,
    /// Serial port and virtio console.
    Console,
    /// Disk queues.
    Disk,
    /// Network queues.
    Net,
    /// Entropy.
    Rng,
    /// Sockets between guest and host (vsock).
    Vsock,
    /// Balloon and virtio-mem: returns memory to the host.
    Memory,
    /// Persistent memory.
    Pmem,
    /// Connects a guest's accelerator calls to workers.
    Accel,
    /// Connects VMs whose processes execute each other's code.
    Gate,
    /// Handles messages of a GPU's mediator, and timers.
    Gpu,
    /// Fills guest memory during a lazy restore.
    PageFault,
    /// Watches the server of a vfio-user device.
    UserDevice,
    /// Speaks to the back end of a vhost-user device.
    VhostUser,
    /// Maps memory for passthrough devices as the guest's IOMMU requests.
    Iommu,
    /// Resets passthrough devices for the guest.
    Reset,
    /// Migrates the VM to or from another host.
    Migration,
    /// Transfers memory during a migration, over one of several connections.
    Lane,
    /// Writes a snapshot or a core dump.
    Snapshot,
    /// Reads a snapshot, and opens the disk images of its VM.
    Restore,
}

/// Starts threads.
pub trait ThreadSpawner: Send + Sync {
    /// Starts a thread that runs `body`. `name` appears in `/proc` (at most 15 bytes), and follows
    /// Cloud Hypervisor's convention, on which management tools rely: `vcpuN`, `_disk0_q0`,
    /// `_net1_qp0`, `_rng`.
    fn spawn(
        &self,
        role: ThreadRole,
        name: &str,
        body: Box<dyn FnOnce() + Send>,
    ) -> io::Result<thread::JoinHandle<()>>;

    /// Runs `work` on the thread that creates the others, which inherit some of its properties, and waits until it is done.
    fn prepare(&self, work: Box<dyn FnOnce() + Send>) -> io::Result<()> {
        work();
        Ok(())
    }
}

/// Maximum number of CPUs that a Linux host can have (x86's `CONFIG_NR_CPUS`); `cpu_set_t` has room
/// for only 1,024.
const MAX_HOST_CPUS: usize = 8192;

/// Pins the calling thread to the host CPUs `cpus`.
pub fn pin_current_thread(cpus: &[usize]) -> io::Result<()> {
    const BITS: usize = libc::c_ulong::BITS as usize;
    let mut mask = [0 as libc::c_ulong; MAX_HOST_CPUS / BITS];
    for &cpu in cpus {
        let word = mask.get_mut(cpu / BITS).ok_or_else(|| {
            let message = format!("host CPUs have numbers below {MAX_HOST_CPUS}, not {cpu}");
            io::Error::new(io::ErrorKind::InvalidInput, message)
        })?;
        *word |= 1 << (cpu % BITS);
    }
    // SAFETY: the kernel reads at most the `size_of_val(&mask)` bytes of `mask`, which outlives
    // the call; 0 is the calling thread.
    if unsafe { libc::sched_setaffinity(0, size_of_val(&mask), mask.as_ptr().cast()) } == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Starts threads without confinement: for unit tests, fuzzers and `--seccomp false`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unconfined;

impl ThreadSpawner for Unconfined {
    fn spawn(
        &self,
        _role: ThreadRole,
        name: &str,
        body: Box<dyn FnOnce() + Send>,
    ) -> io::Result<thread::JoinHandle<()>> {
        thread::Builder::new().name(name.to_owned()).spawn(body)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_stays_where_it_is_pinned_and_no_cpu_number_is_too_large_to_refuse() {
        let spawned = thread::spawn(|| {
            // SAFETY: the call has no arguments.
            let cpu = unsafe { libc::sched_getcpu() } as usize;
            pin_current_thread(&[cpu]).unwrap();
            for _ in 0..100 {
                thread::yield_now();
                // SAFETY: as above.
                assert_eq!(unsafe { libc::sched_getcpu() } as usize, cpu);
            }
            for too_large in [MAX_HOST_CPUS, usize::MAX] {
                let error = pin_current_thread(&[cpu, too_large]).unwrap_err();
                assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
            }
        });
        spawned.join().unwrap();
    }
}
