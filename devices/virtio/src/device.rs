//! The contract between a virtio device and its transport.
//!
//! A device is either *inactive* (it owns its backend, the transport owns the queues) or *active*
//! (its worker owns both). Reset, pause and snapshot all begin with the step back to inactive:
//!
//! ```text
//!              activate(queues)
//!   inactive ────────────────────> active
//!      ^  │ save, restore, reset     │
//!      │  └─────                     │
//!      └──────── deactivate() ───────┘   (in-flight requests finished, queues handed back)
//! ```
//!
//! After a pause or a restore, the transport reactivates the device with the queues in their
//! previous state: the driver must not notice. When the driver resets the device, or the device is
//! unplugged, the transport discards the queues and calls [`VirtioDevice::reset`], in which the
//! device discards all state that belongs to this driver. A reboot of the VM creates all devices
//! anew.

use std::{io, sync::Arc, time::Duration};

use device_model::{
    lifecycle::{ActivateError, StateError, Unanswered},
    memory::GuestMemory,
};
use virtio_queue::Queue;
use vmm_sys_util::eventfd::EventFd;

/// A device type as the guest sees it. Each device's folder defines its own.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct DeviceType {
    /// Device ID (virtio 1.2, section 5).
    pub number: u16,
    /// Name used in log messages.
    pub name: &'static str,
    /// PCI class code, which identifies the device to a guest without a virtio driver.
    pub class: u32,
}

impl DeviceType {
    /// Class code of devices for which PCI defines no class.
    pub const UNCLASSIFIED: u32 = 0xff_0000;
}

/// Raises a device's interrupts. Safe to call from any thread; costs one write to an eventfd.
pub trait VirtioInterrupt: Send + Sync {
    /// Used-buffer notification for queue `index`.
    fn queue(&self, index: u16) -> io::Result<()>;

    /// Configuration-change notification.
    fn config(&self) -> io::Result<()>;

    /// Tells the driver that the device is broken until it is reset (virtio 1.2, 2.1.1,
    /// `DEVICE_NEEDS_RESET`). For queues that the guest has made unusable.
    fn needs_reset(&self);
}

/// A queue that the driver enabled.
#[derive(Debug)]
pub struct ActiveQueue {
    /// Queue index.
    pub index: u16,
    /// The queue; the transport has checked `is_valid`.
    pub queue: Queue,
    /// Becomes readable when the driver notifies the device (ioeventfd).
    pub kick: EventFd,
}

/// Everything that a device needs to run.
pub struct Activation {
    /// Guest RAM.
    pub memory: GuestMemory,
    /// Interrupts.
    pub interrupt: Arc<dyn VirtioInterrupt>,
    /// The queues that the driver enabled, in ascending order of index.
    pub queues: Vec<ActiveQueue>,
    /// The negotiated features; a subset of [`VirtioDevice::features`].
    pub features: u64,
}

/// A virtio device without its transport.
///
/// The transport never calls methods concurrently, and calls `deactivate` before it drops an active
/// device.
pub trait VirtioDevice: Send {
    /// The type of device.
    fn device_type(&self) -> DeviceType;

    /// Maximum size of each queue: powers of two, constant for the lifetime of the device.
    fn queue_sizes(&self) -> &[u16];

    /// Features offered: the device's own, `VIRTIO_F_VERSION_1` and the ring features.
    fn features(&self) -> u64;

    /// Features that the driver of a saved device may have although they are not offered here: requests that need them
    /// are answered as unsupported.
    fn refused_features(&self) -> u64 {
        0
    }

    /// Reads the device-specific configuration at `offset`. Bytes beyond its end read as zero.
    fn read_config(&self, offset: u64, data: &mut [u8]);

    /// Writes the device-specific configuration. Writes to read-only fields or beyond its end are
    /// ignored.
    fn write_config(&mut self, offset: u64, data: &[u8]) {
        let _ = (offset, data);
    }

    /// The eventfd by which the kernel tells whoever serves a queue of new requests, if that is another process. That
    /// process may do with it as it likes, so that nobody here writes or reads it but a thread of the device. It is one
    /// eventfd for the lifetime of the device. The default is the one of [`ActiveQueue::kick`].
    fn doorbell(&self, index: u16) -> Option<&EventFd> {
        let _ = index;
        None
    }

    /// Starts serving the queues.
    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError>;

    /// Prepares an active device for [`VirtioDevice::deactivate`]: accepts no new requests, and
    /// waits up to `patience` for the host to complete those in flight. After an error the device
    /// still accepts no requests: retry, or call [`VirtioDevice::carry_on`].
    ///
    /// The default returns immediately. It suits devices that complete each request synchronously.
    fn quiesce(&mut self, patience: Duration) -> Result<(), Unanswered> {
        let _ = patience;
        Ok(())
    }

    /// Prepares an active device for [`VirtioDevice::deactivate`] and [`VirtioDevice::reset`], as
    /// [`VirtioDevice::quiesce`] does for the former. The driver waits on a vCPU for up to
    /// `patience`, and polls again if that was too short. This step cannot be undone.
    ///
    /// The default suits devices that discard their driver's state immediately.
    fn prepare_reset(&mut self, patience: Duration) -> Result<(), Unanswered> {
        self.quiesce(patience)
    }

    /// Undoes [`VirtioDevice::quiesce`]. The caller must kick the queues afterwards.
    fn carry_on(&mut self) {}

    /// Does for an inactive device the part of [`VirtioDevice::quiesce`] that does not concern its
    /// queues: waits up to `patience` for what the host does on its own, or stores what the device
    /// keeps in memory of completed requests.
    ///
    /// The default suits devices that keep nothing.
    fn settle(&mut self, patience: Duration) -> Result<(), Unanswered> {
        let _ = patience;
        Ok(())
    }

    /// Whether the host has stored all that a quiet device had to; an error says what is missing.
    fn settled(&self) -> io::Result<()> {
        Ok(())
    }

    /// Stops serving: finishes requests in flight in bounded time and returns the queues in the
    /// order in which they were passed in. An inactive device returns none.
    fn deactivate(&mut self) -> Vec<ActiveQueue>;

    /// Discards everything that this driver has configured or started, so that the next driver
    /// finds the device in its initial state (virtio 1.2, 2.4). Called when the driver has written
    /// 0 to the status, or when the device leaves the bus. The device is inactive then. The call
    /// may come from a vCPU thread, so it must neither block nor open files. A device with nothing
    /// to discard documents why.
    fn reset(&mut self);

    /// Saves the device's own state, while it is inactive. The transport saves queues, features and
    /// interrupts.
    fn save(&self) -> Result<serde_json::Value, StateError>;

    /// Loads a saved state, before the first activation. The state is untrusted input.
    fn restore(&mut self, state: serde_json::Value) -> Result<(), StateError>;

    /// Releases the named resources that the device holds on the host, such as a socket file.
    /// Called once, when the device is unplugged. Dropping the device closes the rest, but the drop
    /// may happen on a vCPU thread, which may not access the file system.
    fn close(&mut self) {}

    /// Counters of this device for `vm.counters` and the metrics, as (name, value) pairs.
    fn counters(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }
}
