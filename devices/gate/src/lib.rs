//! The gate's port, through which processes of a guest become servers or clients of exitless calls.
//!
//! ```text
//!   server's guest ── registers ──> Server ── server's descriptor, wake-up ──> Client <── registers ── client's guest
//!                                     │  <────────── shared memory ────────────  │
//!                                     v                                          v
//!                       module: register, wake, sleep, retire       module: register, pair, unpair
//! ```
//!
//! - [`function`]: the PCI function with its two BARs, in the layout of [`vmfunc_gate::port`].
//! - [`server`]: a process that serves, and its frozen VM; [`client`]: a paired process. Each has a
//!   thread for its end of the connection between the two VMs.
//! - [`hello`]: the messages between the VMs; [`stand_in`]: the memory in a client's window without
//!   a pair; [`process`]: whether a process of the guest is still alive.
//!
//! Calls of the module that concern a vCPU are made on its thread, during the access with which the
//! guest's process issues the command: the vCPU's registers are those of that process then. Only
//! registering takes time, because it pins a server's memory.
//!
//! A server's guest is trusted by its clients; a client's guest is trusted by nobody. The
//! client's guest can wake the server as often as it likes, which costs only the server's own vCPU,
//! and it reaches only a server that has no other client.

pub mod client;
pub mod function;
mod hello;
mod process;
pub mod server;
pub mod side;
mod stand_in;

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use device_model::named_socket::NameError;
pub use function::{Gate, Resources};
use pci::ConfigError;
use rustix::event::Timespec;
pub use server::{GivenUp, Server};
use vmfunc_gate::port::Reason;
use vmm_sys_util::eventfd::EventFd;

/// Maximum size of shared memory in bytes; the library uses one page of it.
pub const MOST_SHARED: u64 = vmfunc_gate::window::SHARED_PAGES * vmfunc_gate::window::PAGE;

/// Interval of the checks whether a process is still alive.
const WATCH: Duration = Duration::from_millis(100);

/// The side of the gate that a port belongs to.
#[derive(Clone, Debug)]
pub enum Side {
    /// A process of this VM serves.
    Server {
        /// Socket to which clients' VMs connect. It is created, and removed in the end.
        socket: PathBuf,
    },
    /// A process of this VM delegates calls.
    Client {
        /// Socket on which the server's VM listens.
        server: PathBuf,
        /// Size in bytes of the memory that both share: whole pages, at least two, at most
        /// [`MOST_SHARED`].
        shared: u64,
    },
}

/// Configuration of a port.
#[derive(Clone, Debug)]
pub struct Options {
    /// Name of its thread.
    pub thread_name: String,
    /// Its side of the gate.
    pub side: Side,
}

/// The state of the vCPU that performs an access to the port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Caller {
    /// CR3.
    pub cr3: u64,
    /// FS base.
    pub fs_base: u64,
    /// GS base.
    pub gs_base: u64,
    /// Privilege level: 0 for the kernel, 3 for a process.
    pub ring: u8,
    /// Determines where the CPU enters the kernel on a system call or an exception: control
    /// registers, entry point, per-CPU data, tables. Kernels for which all of it is equal can
    /// substitute for each other.
    pub kernel: [u64; KERNEL],
}

/// Number of values in [`Caller::kernel`].
pub const KERNEL: usize = 10;

/// The vCPU whose access is being handled. All methods are called on its thread.
pub trait CallingVcpu: Send + Sync {
    /// Its registers.
    fn caller(&self) -> io::Result<Caller>;

    /// Calls `work` with its descriptor.
    fn with_fd(&self, work: &mut dyn FnMut(BorrowedFd<'_>)) -> io::Result<()>;

    /// Stops it from executing anything from now on, until the VMM thaws it; or undoes that.
    fn freeze(&self, frozen: bool) -> io::Result<()>;
}

/// An event of a server, on which the VMM acts.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Event {
    /// Its vCPU is frozen, and clients may enter.
    Frozen,
    /// A client requests slow work: the vCPU must run.
    Woken,
    /// The port has given up the server: its client has gone, or the module reports that it is
    /// lost. [`Server::over`] returns the details, unless another thread has already handled it.
    Over,
}

/// Receiver of events. Called on any thread.
pub type Report = Arc<dyn Fn(Event) + Send + Sync>;

/// Why a port cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Invalid amount of shared memory.
    #[error(
        "{0} bytes cannot be shared with a server: give whole pages, 8 KiB to {MOST_SHARED} bytes"
    )]
    Shared(u64),
    /// The server's socket cannot be created.
    #[error(transparent)]
    Socket(#[from] NameError),
    /// Memory cannot be allocated.
    #[error("cannot reserve memory for a gate port's window")]
    Memory(#[source] io::Error),
    /// An eventfd cannot be created.
    #[error("cannot create an eventfd for a gate port")]
    EventFd(#[source] io::Error),
    /// The configuration space cannot be laid out.
    #[error("cannot lay out a gate port's configuration space")]
    Config(#[from] ConfigError),
}

/// Why a command failed: the reason and the error number in the registers.
type Refusal = (Reason, u32);

fn refusal(error: &vmfunc_gate::host::Error) -> Refusal {
    let number = error.number().unwrap_or(0);
    let reason = match error {
        vmfunc_gate::host::Error::Refused { .. } => Reason::Refused,
        _ => Reason::Host,
    };
    (reason, number.unsigned_abs())
}

fn host_error(error: &io::Error) -> Refusal {
    log::warn!("the gate cannot ask its machine: {error}");
    let number = error.raw_os_error().unwrap_or(0);
    (Reason::Invalid, number.unsigned_abs())
}

/// Wakes a port's thread.
fn kick(event: &EventFd) {
    // Fails only if the counter is full, in which case the thread has already been woken.
    let _ = event.write(1);
}

fn borrowed(event: &EventFd) -> BorrowedFd<'_> {
    // SAFETY: the event is open as long as the result borrows it.
    unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) }
}

fn timespec(duration: Duration) -> Timespec {
    Timespec {
        tv_sec: duration.as_secs().cast_signed(),
        tv_nsec: duration.subsec_nanos().into(),
    }
}

#[cfg(test)]
mod ending_tests;
#[cfg(test)]
mod tests;
