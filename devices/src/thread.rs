//! Threads that devices ask for. The machine decides how each kind is confined.

use std::{io, thread};

/// What a thread is for; the machine has one seccomp filter per role.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum ThreadRole {
    /// The control loop that owns the machine.
    Vmm,
    /// Serves the REST API.
    Api,
    /// Runs a virtual CPU.
    Vcpu,
    /// Turns signals into requests to the control loop.
    Signal,
    /// Serial port and virtio console.
    Console,
    /// Disk queues.
    Disk,
    /// Network queues.
    Net,
    /// Entropy.
    Rng,
    /// Sockets between guest and host.
    Vsock,
    /// Balloon and virtio-mem: gives memory back to the host.
    Memory,
    /// Persistent memory.
    Pmem,
    /// Finds workers for a guest's accelerator calls.
    Accel,
    /// Fills guest memory during a lazy restore.
    PageFault,
    /// Sees the server of a vfio-user device go.
    UserDevice,
}

/// Starts threads.
pub trait ThreadSpawner: Send + Sync {
    /// Starts a thread that runs `body`. `name` appears in `/proc` (15 bytes at most) and follows
    /// the convention of Cloud Hypervisor that management tools rely on: `vcpuN`, `_disk0_q0`,
    /// `_net1_qp0`, `_rng`.
    fn spawn(
        &self,
        role: ThreadRole,
        name: &str,
        body: Box<dyn FnOnce() + Send>,
    ) -> io::Result<thread::JoinHandle<()>>;
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
