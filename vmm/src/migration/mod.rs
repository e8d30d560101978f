//! Live migration: a running VM moves to another Gantry.
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
//! Until GO, whatever fails leaves the source running as before, and the destination drops what it
//! has. Between GO and RUNNING the source cannot know who runs the VM if the connection breaks: the
//! disk locks say it. The source goes on if it gets all of them back, or is told that the
//! destination does not run; a VM without exclusive locks waits for `vm.resolve-migration`.
//!
//! Both sides take each other for hostile: lengths are bounded before memory is taken, frames have
//! checksums, and what arrives is the input of the same checks as a snapshot.
//!
//! With `local=on` both are on one host, and memory is not sent: its files are handed over with the
//! offer. There are no rounds then, and the VM stands still only for the state of its devices.
//!
//! - [`frame`]: the format on the wire; [`connection`]: streams that can be interrupted;
//!   [`vectors`]: memory that goes out and comes in without a buffer; [`listener`]: waiting for the source;
//!   [`dial`]: connecting to a host that may not answer;
//!   [`lanes`]: further connections, for pages; [`tunnel`]: TLS.
//! - [`pages`]: which pages are sent, and how they are received; [`files`]: what is handed over;
//!   [`archive`]: what accelerators' applications have saved; [`copies`]: of them, while they go on.
//! - [`postcopy`]: contents of applications that follow.
//! - [`source`], [`destination`]: the phases of each side.
//! - [`progress`]: what `vm.migration` shows, and how a migration is cancelled.

pub mod archive;
pub mod connection;
pub mod copies;
pub mod destination;
mod dial;
pub mod files;
pub mod frame;
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

/// Version of the protocol. The destination says which it takes.
///
/// 2: files that go with the offer. 3: several connections. 4: applications of accelerators. 5: contents of theirs that
/// follow. An offer has the version that it needs, so that older destinations take what they know.
pub const PROTOCOL: u32 = 5;

/// The oldest version of which offers are taken.
pub const OLDEST_PROTOCOL: u32 = 1;

/// A migration failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The URL says nothing that can be connected to.
    #[error("{0:?} is no URL of a migration: use unix:PATH or tcp:HOST:PORT")]
    Url(String),
    /// The connection could not be made.
    #[error("cannot {action} {url}")]
    Connect {
        /// `connect to` or `listen at`.
        action: &'static str,
        /// The URL.
        url: String,
        /// Why.
        source: io::Error,
    },
    /// The connection broke.
    #[error("the connection broke while {doing}")]
    Broken {
        /// What was going on.
        doing: &'static str,
        /// Why.
        source: io::Error,
    },
    /// The other host is gone.
    #[error(
        "the other host does not answer any more while {doing}: it has lost its power or its network, or a \
         firewall between the two has forgotten the connection"
    )]
    HostGone {
        /// What was going on.
        doing: &'static str,
        /// How it was noticed.
        source: io::Error,
    },
    /// Nothing arrives or leaves.
    #[error("the other side has not answered for {seconds} s while {doing}")]
    Stalled {
        /// What was going on.
        doing: &'static str,
        /// For how long.
        seconds: u64,
    },
    /// Too many have connected that were no source.
    #[error(
        "{count} connections came, and none was from a Gantry that sends a VM; of the last: {last}"
    )]
    Strangers {
        /// How many.
        count: u32,
        /// Why the last was none.
        last: String,
    },
    /// A client asked for it.
    #[error("the migration was cancelled")]
    Cancelled,
    /// What arrived is no frame, or not the one that has to come.
    #[error("the other side does not keep to the protocol: {0}")]
    Protocol(String),
    /// The other side says no, with all its reasons.
    #[error("the other side refuses: {}", .0.join("; "))]
    Refused(Vec<String>),
    /// The VM cannot leave.
    #[error("the VM cannot move: {}", .0.join("; "))]
    Stays(Vec<String>),
    /// The time is over.
    #[error(
        "the VM writes its memory faster than it can be sent: after {seconds} s it would still \
         stand still for {predicted_ms} ms; allow a longer downtime_ms, or timeout_strategy=Ignore"
    )]
    Timeout {
        /// The time that it had.
        seconds: u64,
        /// Milliseconds.
        predicted_ms: u64,
    },
    /// Further rounds would not shorten the stop.
    #[error(
        "the VM writes its memory as fast as it is sent, and is slowed down as far as it may be: it would stand \
         still for {predicted_ms} ms, of which its memory takes {memory_ms}; allow a longer downtime_ms, more \
         max_throttle, or timeout_strategy=Ignore"
    )]
    Useless {
        /// Milliseconds.
        predicted_ms: u64,
        /// Milliseconds of them that memory takes.
        memory_ms: u64,
    },
    /// The memory that arrived is not that which was sent.
    #[error("the memory that arrived differs from that which was sent: this is a defect of Gantry")]
    Differs,
    /// The machine.
    #[error("{0}")]
    Machine(String),
    /// KVM.
    #[error("cannot follow what the guest writes")]
    Log(#[from] hypervisor::Error),
    /// The kernel.
    #[error("cannot follow what devices write: the kernel has no membarrier")]
    Order(#[source] io::Error),
}

impl Error {
    /// That a connection has failed so.
    fn lost(doing: &'static str, source: io::Error) -> Self {
        match base::tcp::is_gone(&source) {
            true => Self::HostGone { doing, source },
            false => Self::Broken { doing, source },
        }
    }
}

/// Result of a step.
pub type Result<T> = std::result::Result<T, Error>;
