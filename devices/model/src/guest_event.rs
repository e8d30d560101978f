//! What a guest requests of the VM through its devices.

use serde::{Deserialize, Serialize};

/// A request that the guest made by writing to a device's register.
///
/// The guest decides when and how often it asks, so handlers must expect repetition: a guest whose
/// reset is in progress may well request another one.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub enum GuestEvent {
    /// Restart from the firmware or kernel.
    Reset,
    /// Power off (ACPI S5).
    Shutdown,
    /// The guest has released vCPU number `.0` after the VMM asked it to. Its slot already reads as
    /// empty; its thread has yet to be stopped.
    CpuEjected(u32),
    /// The guest's kernel has panicked.
    Panicked,
    /// The guest's kernel has panicked, and its crash kernel takes over.
    CrashLoaded,
}

/// Receives the requests of guests.
///
/// It is called on the thread of the vCPU that made the request, which enters the guest again as
/// soon as the handler returns. A handler must only record the request and wake the thread that
/// acts on it; stopping vCPUs in here would wait for the calling thread itself.
pub type GuestEventHandler = Box<dyn Fn(GuestEvent) + Send + Sync>;
