//! The REST API: the requests of clients, and their way to the machine.
//!
//! ```text
//!  client ── HTTP on a Unix socket ──> Server (thread http-server)
//!                                        │ routes: path and body -> Request
//!                                        v
//!                                      ApiSender ──> queue + eventfd ──> ApiReceiver (vmm thread)
//!                                        ^                                  │ Handler::handle
//!                                        └────────── Result<Response, ApiError> ─┘
//! ```
//!
//! The thread that owns the machine carries out requests one after the other. Meanwhile the server
//! keeps accepting connections and reading requests.

#![cfg_attr(not(test), deny(clippy::print_stderr, clippy::print_stdout))]

mod body;
mod channel;
mod connection;
mod error;
mod fields;
mod http;
mod listener;
pub mod metrics;
mod migration;
pub mod model;
mod request;
mod routes;
mod server;

pub use body::SAY_NOTHING;
pub use channel::{ApiReceiver, ApiSender, Reply, channel};
pub use error::{ApiError, Status};
pub use fields::fields;
pub use http::{Head, MAX_BODY, MAX_HEAD, parse_head};
pub use listener::{Access, ApiSocket, ListenError, Listener};
pub use migration::{
    AccelMigration, MigrationMode, PassthroughMigration, ReceiveMigration, Rename,
    ResolveMigration, RunsAt, SendMigration, TimeoutStrategy,
};
pub use model::{
    AccelInSnapshot, AccelSeat, DeviceNode, InProgress, MemoryRestoreMode, MovedAccel, OnFailure,
    Operation, PciDeviceInfo, RestoreConfig, RestoredAccel, RestoredClock, RestoredNet,
    VmCoredumpData, VmCounters, VmInfo, VmMemoryZoneUpdate, VmMoveAccel, VmRemoveDevice, VmResize,
    VmResizeDisk, VmResizeZone, VmSnapshotConfig, VmState, VmSwapDevice, VmmPingResponse,
};
pub use request::{Handler, Request, Response};
pub use routes::{PREFIX, Refusal, Route, route, routes};
pub use server::{MAX_CONNECTIONS, Server};

#[cfg(test)]
mod tests;
