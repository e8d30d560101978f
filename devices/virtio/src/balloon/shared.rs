//! What a balloon, its worker and its handles share.

use std::sync::{
    Arc,
    atomic::{AtomicU32, AtomicU64},
};

use crate::{config_change::ConfigChange, discard::Discards};

/// State shared by the device, its worker and its handles.
#[derive(Default)]
pub struct Shared {
    pub(super) wanted: AtomicU32,
    pub(super) actual: AtomicU32,
    /// Total bytes returned to the host.
    pub discarded: AtomicU64,
    pub(super) change: ConfigChange,
    pub discards: Arc<Discards>,
}
