//! Live migration: moves a running VM to another Gantry process.
//!
//! ```text
//!   source                                   destination
//!   Seats, Detach   what stays here leaves the guest, if the destination would take it so
//!   Offer     versions, configuration ─────> refuses with all reasons, or
//!   Prepare                           <───── has a machine with memory
//!   Rounds    pages, a barrier each   ─────> memory
//!             copies of applications  ─────> workers that make what is in them
//!   Quiesce   accelerators' applications stand still; vCPUs still run
//!   Final     paused: last pages, state ───> devices and vCPUs as saved, READY
//!   Go        disk locks given up, GO  ────> takes the locks, RUNNING, runs
//!   Postcopy  contents of applications <───> if that is wished: workers ask for them
//! ```
//!
//! Until GO, any failure leaves the source running as before, and the destination drops what it has. If the connection
//! breaks between GO and RUNNING, the source cannot know which side runs the VM: the disk locks decide. The source
//! continues if it gets all of them back, or if the destination reports that it does not run the VM; a VM without
//! exclusive locks waits for `vm.resolve-migration`.
//!
//! Each side treats the other as hostile: lengths are bounded before memory is allocated, frames have checksums, and
//! received state passes the same checks as a snapshot.
//!
//! With `local=on` both sides are on one host, and memory is not sent: its files are handed over with the offer. There
//! are no rounds then, and the VM is stopped only while the state of its devices is transferred.
//!
//! - [`frame`]: the wire format; [`connection`]: interruptible connections; [`vectors`]: vectored I/O on memory without
//!   a buffer; [`listener`]: waiting for the source; `dial`: connecting to a host that may not answer; [`lanes`]:
//!   further connections, for pages; [`tunnel`]: TLS.
//! - [`pages`]: which pages are sent, and how they are received; [`files`]: files that are handed over; [`archive`]:
//!   saved state of accelerators' applications, and copies of those that still run.
//! - [`postcopy`]: contents of applications that follow after the machine runs.
//! - [`source`], [`destination`]: the phases of each side.
//! - [`progress`]: what `vm.migration` reports, and how a migration is cancelled.

#![cfg_attr(not(test), deny(clippy::print_stderr, clippy::print_stdout))]

pub mod archive;
pub mod connection;
pub mod destination;
mod dial;
pub mod files;
pub mod frame;
pub mod gpu_driver;
pub mod lanes;
pub mod listener;
pub mod offer;
pub mod pages;
pub mod postcopy;
pub mod progress;
pub mod source;
#[cfg(test)]
mod tests;
pub mod tunnel;
pub mod vectors;

use std::io;

/// Version of the protocol. The destination refuses versions that it does not support.
///
/// 2: files that follow the offer. 3: several connections. 4: applications of accelerators. 5: contents of applications
/// that follow after the machine runs. An offer states the version that it needs, so that older destinations accept
/// what they support.
pub const PROTOCOL: u32 = 5;

/// The oldest supported protocol version of an offer.
pub const OLDEST_PROTOCOL: u32 = 1;

/// A migration failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The URL is not a valid address.
    #[error("{0:?} is no URL of a migration: use unix:PATH or tcp:HOST:PORT")]
    Url(String),
    /// The connection could not be established.
    #[error("cannot {action} {url}")]
    Connect {
        /// `connect to` or `listen at`.
        action: &'static str,
        /// The URL.
        url: String,
        /// The cause.
        source: io::Error,
    },
    /// The connection broke.
    #[error("the connection broke while {doing}")]
    Broken {
        /// The activity at that time.
        doing: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// The other host is gone.
    #[error(
        "the other host does not answer any more while {doing}: it has lost its power or its network, or a \
         firewall between the two has forgotten the connection"
    )]
    HostGone {
        /// The activity at that time.
        doing: &'static str,
        /// How it was noticed.
        source: io::Error,
    },
    /// Nothing has arrived or left within the timeout.
    #[error("the other side has not answered for {seconds} s while {doing}")]
    Stalled {
        /// The activity at that time.
        doing: &'static str,
        /// The timeout in seconds.
        seconds: u64,
    },
    /// Too many peers connected that were not a source.
    #[error(
        "{count} connections came, and none was from a Gantry that sends a VM; of the last: {last}"
    )]
    Strangers {
        /// Number of connections.
        count: u32,
        /// Why the last one was not a source.
        last: String,
    },
    /// A client asked for it.
    #[error("the migration was cancelled")]
    Cancelled,
    /// Received data is not a valid frame, or not a frame that is expected now.
    #[error("the other side does not keep to the protocol: {0}")]
    Protocol(String),
    /// The peer refuses, with all its reasons.
    #[error("the other side refuses: {}", .0.join("; "))]
    Refused(Vec<String>),
    /// The VM cannot be migrated.
    #[error("the VM cannot move: {}", .0.join("; "))]
    Stays(Vec<String>),
    /// The timeout has expired.
    #[error(
        "the VM writes its memory faster than it can be sent: after {seconds} s it would still \
         stand still for {predicted_ms} ms; allow a longer downtime_ms, or timeout_strategy=Ignore"
    )]
    Timeout {
        /// The timeout in seconds.
        seconds: u64,
        /// The predicted downtime in milliseconds.
        predicted_ms: u64,
    },
    /// Further rounds would not shorten the downtime.
    #[error(
        "the VM writes its memory as fast as it is sent, and is slowed down as far as it may be: it would stand \
         still for {predicted_ms} ms, of which its memory takes {memory_ms}; allow a longer downtime_ms, more \
         max_throttle, or timeout_strategy=Ignore"
    )]
    Useless {
        /// The predicted downtime in milliseconds.
        predicted_ms: u64,
        /// The part of it that memory takes, in milliseconds.
        memory_ms: u64,
    },
    /// The received memory differs from the memory that was sent.
    #[error("the memory that arrived differs from that which was sent: this is a defect of Gantry")]
    Differs,
    /// An error of the machine.
    #[error("{0}")]
    Machine(String),
    /// An error of KVM's dirty log.
    #[error("cannot follow what the guest writes")]
    Log(#[from] hypervisor::Error),
    /// The kernel lacks membarrier(2), without which writes of devices cannot be tracked.
    #[error("cannot follow what devices write: the kernel has no membarrier")]
    Order(#[source] io::Error),
}

impl Error {
    /// The error for a connection that failed with `source`.
    fn lost(doing: &'static str, source: io::Error) -> Self {
        match base::tcp::is_gone(&source) {
            true => Self::HostGone { doing, source },
            false => Self::Broken { doing, source },
        }
    }
}

/// Result of a migration step.
pub type Result<T> = std::result::Result<T, Error>;
