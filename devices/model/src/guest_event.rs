//! What a guest asks of the machine through its devices.

use serde::{Deserialize, Serialize};

/// A request that the guest made by writing to a device's register.
///
/// The guest decides when and how often it asks, so handlers expect repetition: a guest whose
/// reset is on its way may well ask for another one.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub enum GuestEvent {
    /// Start again from the firmware or kernel.
    Reset,
    /// Power off (ACPI S5).
    Shutdown,
    /// The guest has given up vCPU number `.0` after the machine asked it to. Its slot
    /// already reads as empty; its thread is left to be stopped.
    CpuEjected(u32),
}

/// Receives what guests ask for.
///
/// It is called on the thread of the vCPU that asked, which enters the guest again as soon as the
/// handler returns. So a handler only records the request and wakes the thread that acts on it;
/// stopping vCPUs in here would wait for the calling thread itself.
pub type GuestEventHandler = Box<dyn Fn(GuestEvent) + Send + Sync>;
