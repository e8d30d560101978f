//! A device plugin for Kubernetes: containers ask for shares of accelerators (`gantry.dev/accel: 25`), and get a lease.
//!
//! ```text
//!   kubelet ──Allocate(0-0 ... 0-24)──> plugin ──grant──> gantry-accel leases ──starts──> a pool for the container
//!      ^                                  │
//!      └── mounts (the pool's socket, libraries) and environment
//! ```
//!
//! - [`share`]: a device is so many shares, of which kubelet counts and chooses by their IDs.
//! - [`plugin`]: what kubelet calls; [`kubelet`]: registration, also with a kubelet that was started again.
//! - [`leases`]: the service that grants leases; [`reclaim`]: ends leases whose containers are gone.
//! - [`proto`]: kubelet's interfaces.

#![cfg_attr(not(test), deny(clippy::print_stderr, clippy::print_stdout))]

pub mod kubelet;
pub mod leases;
pub mod plugin;
pub mod reclaim;
pub mod share;

/// Kubelet's interfaces, generated from the files in `proto`.
#[allow(missing_docs, clippy::all, clippy::pedantic)]
pub mod proto {
    /// Device plugins.
    pub mod v1beta1 {
        tonic::include_proto!("v1beta1");
    }
    /// What pods have.
    pub mod v1 {
        tonic::include_proto!("v1");
    }
}
