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
//! After a pause or a restore the transport activates the device again with the queues as they
//! were: the driver must not notice. When the driver resets the device or the device is
//! unplugged, the transport forgets the queues and calls [`VirtioDevice::reset`], with which the
//! device forgets all that it has of this driver. A reboot of the whole machine makes all devices
//! anew.

use std::{io, sync::Arc, time::Duration};

use device_model::{
    lifecycle::{ActivateError, StateError, Unanswered},
    memory::GuestMemory,
};
use virtio_queue::Queue;
use vmm_sys_util::eventfd::EventFd;

/// A type of device, by which a guest knows it. Each device has its own in its folder.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct DeviceType {
    /// Its number (virtio 1.2, section 5).
    pub number: u16,
    /// What the log calls it.
    pub name: &'static str,
    /// PCI class code, by which a guest without a virtio driver knows it.
    pub class: u32,
}

impl DeviceType {
    /// The class of devices that have none.
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
    /// Its number.
    pub index: u16,
    /// The queue; `is_valid` was checked by the transport.
    pub queue: Queue,
    /// Becomes readable when the driver notifies the device (ioeventfd).
    pub kick: EventFd,
}

/// All that a device needs to run.
pub struct Activation {
    /// Guest RAM.
    pub memory: GuestMemory,
    /// Interrupts.
    pub interrupt: Arc<dyn VirtioInterrupt>,
    /// The queues that the driver enabled, by ascending index.
    pub queues: Vec<ActiveQueue>,
    /// The features that were negotiated; a subset of [`VirtioDevice::features`].
    pub features: u64,
}

/// A virtio device without its transport.
///
/// The transport calls every method from one thread at a time, and `deactivate` before it drops
/// an active device.
pub trait VirtioDevice: Send {
    /// The type of device.
    fn device_type(&self) -> DeviceType;

    /// The largest size of each queue: powers of two, fixed for the life of the device.
    fn queue_sizes(&self) -> &[u16];

    /// The features offered: the device's own, `VIRTIO_F_VERSION_1` and the ring's.
    fn features(&self) -> u64;

    /// Reads the device-specific configuration at `offset`; bytes outside of it read as zero.
    fn read_config(&self, offset: u64, data: &mut [u8]);

    /// Writes the device-specific configuration; what is read-only or outside is ignored.
    fn write_config(&mut self, offset: u64, data: &[u8]) {
        let _ = (offset, data);
    }

    /// Starts serving the queues.
    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError>;

    /// Prepares an active device for [`VirtioDevice::deactivate`]: takes no more requests, and
    /// waits for at most `patience` until the host has answered those in flight. With an error
    /// the device still holds back: try again, or let it [`VirtioDevice::carry_on`].
    ///
    /// By default there is nothing to wait for: for devices that do a request in one go.
    fn quiesce(&mut self, patience: Duration) -> Result<(), Unanswered> {
        let _ = patience;
        Ok(())
    }

    /// Prepares an active device for [`VirtioDevice::deactivate`] and [`VirtioDevice::reset`], as
    /// [`VirtioDevice::quiesce`] does for the former; the driver waits, on a vCPU, for at most
    /// `patience`, and looks again later if that was too short. What this has begun is not taken
    /// back.
    ///
    /// By default for devices that forget their driver in no time.
    fn prepare_reset(&mut self, patience: Duration) -> Result<(), Unanswered> {
        self.quiesce(patience)
    }

    /// Ends the wait that [`VirtioDevice::quiesce`] began; the queues have to be kicked.
    fn carry_on(&mut self) {}

    /// Stops serving: finishes what is in flight in bounded time and hands the queues back, in
    /// the order they came. An inactive device returns none.
    fn deactivate(&mut self) -> Vec<ActiveQueue>;

    /// Forgets what this driver has chosen and begun, so that the next one finds the device as a
    /// new one (virtio 1.2, 2.4): the driver has written 0 to the status, or the device leaves
    /// the bus. Called while the device is inactive, from a vCPU's thread too: it must neither
    /// wait nor open files. A device that has nothing to forget says why.
    fn reset(&mut self);

    /// The device's own state, while it is inactive. Queues, features and interrupts are the
    /// transport's to save.
    fn save(&self) -> Result<serde_json::Value, StateError>;

    /// Takes a saved state over, before the first activation. It is untrusted input.
    fn restore(&mut self, state: serde_json::Value) -> Result<(), StateError>;

    /// Gives up what the device holds on the host under a name, such as a socket's file. Called
    /// once, when the device is unplugged. Dropping it closes the rest, but that may happen on a
    /// vCPU's thread, which may not touch the file system.
    fn close(&mut self) {}

    /// Counters of this device for `vm.counters` and the metrics: name and value.
    fn counters(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }
}
