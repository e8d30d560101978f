//! What machines of this process share.

use std::{sync::Arc, time::Instant};

use devices::thread::ThreadSpawner;
use hypervisor::Kvm;

use super::events::EventSender;

/// What machines of this process share.
pub struct Host {
    /// The hypervisor.
    pub kvm: Kvm,
    /// Starts threads, each under the filter of its role.
    pub spawner: Arc<dyn ThreadSpawner>,
    /// The control loop's ear.
    pub events: EventSender,
    /// When the process started, for the guest's boot marks.
    pub start: Instant,
}
