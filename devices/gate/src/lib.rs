//! The gate's port: how processes of a guest become server or client of exitless calls.
//!
//! ```text
//!   server's guest ── registers ──> Server ── server's descriptor, wake-up ──> Client <── registers ── client's guest
//!                                     │  <────────── shared memory ────────────  │
//!                                     v                                          v
//!                       module: register, wake, sleep, retire       module: register, pair, unpair
//! ```
//!
//! - [`function`]: the PCI function with its two BARs, as [`vmfunc_gate::port`] lays them out.
//! - [`server`]: a process that serves, and its VM that stands still; [`client`]: a process that is
//!   paired. Each has a thread for its end of the connection between both machines.
//! - [`hello`]: what the machines say to each other; [`stand_in`]: what a client finds without a pair;
//!   [`process`]: whether a process of the guest is still there.
//!
//! Calls of the module that are about a vCPU are made on its thread, in the middle of the access by
//! which the guest's process asks: its registers are those of that process then. They take time
//! once: a server's memory is pinned.
//!
//! A server's guest is trusted by its clients, a client's guest by nobody. It can wake the server as
//! often as it likes, which costs the server's own vCPU; and all that it reaches is a server that
//! has no other client.

pub mod client;
pub mod function;
mod hello;
mod process;
pub mod server;
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

/// Most bytes of shared memory, a page of which is the library's.
pub const MOST_SHARED: u64 = vmfunc_gate::window::SHARED_PAGES * vmfunc_gate::window::PAGE;

/// How often it is looked whether a process is still there.
const WATCH: Duration = Duration::from_millis(100);

/// What a port is for.
#[derive(Clone, Debug)]
pub enum Side {
    /// A process of this VM serves.
    Server {
        /// Where clients' machines connect; it is made, and removed in the end.
        socket: PathBuf,
    },
    /// A process of this VM delegates.
    Client {
        /// Where the server's machine listens.
        server: PathBuf,
        /// Bytes of memory that both share: whole pages, two at least, [`MOST_SHARED`] at most.
        shared: u64,
    },
}

/// How a port is made.
#[derive(Clone, Debug)]
pub struct Options {
    /// Name of its thread.
    pub thread_name: String,
    /// What it is for.
    pub side: Side,
}

/// What an access to the port is made by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Caller {
    /// CR3.
    pub cr3: u64,
    /// FS base.
    pub fs_base: u64,
    /// GS base.
    pub gs_base: u64,
    /// Privilege level: 0 is the kernel, 3 a process.
    pub ring: u8,
    /// Where the CPU leads a system call and an exception to: control registers, entry point,
    /// per-CPU data, tables. Kernels for which all of it is the same can stand in for each other.
    pub kernel: [u64; KERNEL],
}

/// Numbers of [`Caller::kernel`].
pub const KERNEL: usize = 10;

/// The vCPU whose access is just handled, on whose thread all of this is called.
pub trait CallingVcpu: Send + Sync {
    /// Its registers.
    fn caller(&self) -> io::Result<Caller>;

    /// Does something with its descriptor.
    fn with_fd(&self, work: &mut dyn FnMut(BorrowedFd<'_>)) -> io::Result<()>;

    /// Keeps it from executing anything from now on, until the machine thaws it; or takes that back.
    fn freeze(&self, frozen: bool) -> io::Result<()>;
}

/// What happens to a server, for the machine to act on.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Event {
    /// Its vCPU has stopped, and clients may enter.
    Frozen,
    /// A client asks for slow work: the vCPU is to run.
    Woken,
    /// The port has given the server up: its client has gone, or the module says that it is lost.
    /// [`Server::over`] has the rest, unless somebody was faster.
    Over,
}

/// Where events go. Called on any thread.
pub type Report = Arc<dyn Fn(Event) + Send + Sync>;

/// Why there is no port.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The amount of shared memory.
    #[error(
        "{0} bytes cannot be shared with a server: give whole pages, 8 KiB to {MOST_SHARED} bytes"
    )]
    Shared(u64),
    /// The server's socket.
    #[error(transparent)]
    Socket(#[from] NameError),
    /// Memory.
    #[error("cannot reserve memory for a gate port's window")]
    Memory(#[source] io::Error),
    /// Eventfds.
    #[error("cannot create an eventfd for a gate port")]
    EventFd(#[source] io::Error),
    /// The configuration space.
    #[error("cannot lay out a gate port's configuration space")]
    Config(#[from] ConfigError),
}

/// A register block's failure: why, and the error number.
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
    // Fails only if the counter is full: then the thread has been woken.
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
