//! What processes of guests do with the gate, on Linux, as root.
//!
//! A server's process [registers](Server::register) handlers and [serves](Server::serve): its VM is
//! frozen from then on. A client's process is [paired](Client::pair) and
//! [delegates](Client::delegate).
//!
//! ```text
//!   server's VM: register, serve ──────── frozen ──────── slow work ── frozen ── serve returns
//!   client's VM:            pair, delegate, delegate, delegate(slow) ── delegate, drop
//! ```
//!
//! The pages of the window are in a BAR of one of the machine's PCI functions ([`port`]). They are
//! mapped through `/dev/mem`, since sysfs provides no executable memory. A kernel in lockdown mode
//! (secure boot) forbids that.
//!
//! # Slow work
//!
//! A handler cannot block: the server's kernel is frozen. It returns [`slow`] instead, with two
//! numbers. The client's library wakes the server, which calls the closure of [`Server::serve`] on
//! its own vCPU, where it can use its kernel without restrictions. The client waits, polling first.
//! The numbers and the answer pass through a page of the shared memory, which a hostile client may
//! write: like a handler's arguments, the closure's are whatever that client likes.

mod client;
mod place;
mod server;

use std::{io, ptr::NonNull, string::String, vec::Vec};

use thiserror::Error;

pub use client::Client;
pub use server::{Ended, Server, slow};

pub use crate::{client::Failure, trampoline::Handler};
use crate::{
    port::{self, Lack, Reason, Slow},
    window,
};

/// The address of the window in processes of clients and servers.
pub const WINDOW: u64 = 0x40_0000_0000;

/// The address of the memory for arguments and results, on both sides.
pub const SHARED: u64 = WINDOW + window::SHARED + port::SLOW_BYTES;

/// Why a process cannot use the gate.
#[derive(Debug, Error)]
pub enum Error {
    /// There is no port with this role.
    #[error(
        "this VM has no gate port for a {0}: start it with --accel transport=gate,server=PATH (a \
         client) or --accel-server socket=PATH (a server)"
    )]
    NoPort(&'static str),
    /// The host lacks something.
    #[error("the host of this VM lacks what the gate needs: {}", texts(.0))]
    Host(Vec<Lack>),
    /// An operation of this guest's kernel failed.
    #[error("cannot {what}: {source}")]
    Guest {
        /// What was tried.
        what: &'static str,
        /// Why.
        source: io::Error,
    },
    /// A sysfs file has unexpected contents.
    #[error("{0} does not say where the port is")]
    Sysfs(String),
    /// The machine refused.
    #[error("{} (error {number})", cause(*.reason))]
    Refused {
        /// The reason.
        reason: Reason,
        /// The host's error number, or 0.
        number: u32,
    },
}

fn texts(lacks: &[Lack]) -> String {
    let texts: Vec<_> = lacks.iter().map(|lack| lack.text()).collect();
    texts.join("; ")
}

fn cause(reason: Reason) -> &'static str {
    match reason {
        Reason::None => "the machine does not say why it failed",
        Reason::Host => "the host lacks what the gate needs",
        Reason::Refused => {
            "the host's module refused: see the log of gantry, and dmesg of the host"
        }
        Reason::Unreachable => "no machine listens at the server's socket: start it",
        Reason::Taken => "the server has another client: one process serves one client",
        Reason::NotServing => "no process of the server's VM serves now: try again",
        Reason::Gone => "the other side has ended",
        Reason::Resumed => "the server's VM was resumed, and does not serve any more",
        Reason::Lost => "the server was given up: its VM should be booted again",
        Reason::Invalid => {
            "the port refused the command: one process of ring 3, on one vCPU, with memory decoding \
             enabled"
        }
        Reason::NoKernel => {
            "this process's page table hides memory of the server's kernel: try in another process"
        }
        Reason::OtherKernel => {
            "the kernels of client and server differ: boot one image in both, with the same end of \
             RAM, nokaslr and pti=off"
        }
    }
}

fn failed(what: &'static str) -> Error {
    let source = io::Error::last_os_error();
    Error::Guest { what, source }
}

/// The memory for arguments and results in the server's process, which is the same as
/// [`Client::shared`]. For use in a handler, and in the closure of [`Server::serve`]. The client
/// may change it at any time: read each value once, then check it.
///
/// # Panics
/// Elsewhere the memory does not exist, and looking up its length ends the process.
#[must_use]
pub fn shared() -> NonNull<[u8]> {
    server::shared()
}

/// The first page of the shared memory.
fn slow_page() -> *mut Slow {
    (WINDOW + window::SHARED) as *mut Slow
}

/// What the gate switches in addition to the general registers, as far as this vCPU has it enabled.
fn features() -> u64 {
    use core::arch::x86_64::{__cpuid, __cpuid_count};

    const OSXSAVE: u32 = 1 << 27;
    const OSPKE: u32 = 1 << 4;
    const AVX_STATE: u64 = 6;
    let mut features = 0;
    if __cpuid(1).ecx & OSXSAVE != 0 {
        let (low, high): (u32, u32);
        // SAFETY: OSXSAVE indicates that it is enabled.
        unsafe {
            core::arch::asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") high,
                options(nomem, nostack, preserves_flags));
        }
        if (u64::from(low) | u64::from(high) << 32) & AVX_STATE == AVX_STATE {
            features |= window::FEATURE_AVX;
        }
    }
    if __cpuid(0).eax >= 7 && __cpuid_count(7, 0).ecx & OSPKE != 0 {
        features |= window::FEATURE_PKU;
    }
    features
}
