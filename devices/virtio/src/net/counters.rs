//! How much a card has carried.

use std::sync::atomic::AtomicU64;

/// Traffic of a card; bytes without virtio headers.
#[derive(Debug, Default)]
pub struct Counters {
    pub rx_bytes: AtomicU64,
    pub rx_frames: AtomicU64,
    pub tx_bytes: AtomicU64,
    pub tx_frames: AtomicU64,
}
