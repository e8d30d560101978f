//! What happens in a machine on its own account, for the control loop to act on.

use std::{
    io,
    sync::{Arc, mpsc},
};

use devices::guest_event::GuestEvent;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::cpu::CpuEvent;

/// Something that the control loop has to act on.
#[derive(Debug)]
pub enum MachineEvent {
    /// The guest asks for something through a device.
    Guest(GuestEvent),
    /// A vCPU cannot go on.
    Cpu(CpuEvent),
    /// The guest has ejected the PCI device in a slot.
    PciEjected {
        /// PCI segment.
        segment: u16,
        /// Device number.
        slot: u8,
    },
}

/// Hands events to the control loop from any thread, without blocking.
#[derive(Clone)]
pub struct EventSender {
    queue: mpsc::Sender<MachineEvent>,
    wake: Arc<EventFd>,
}

/// The control loop's end.
pub struct EventReceiver {
    queue: mpsc::Receiver<MachineEvent>,
    wake: Arc<EventFd>,
}

/// A queue of events.
pub fn queue() -> io::Result<(EventSender, EventReceiver)> {
    let (sender, receiver) = mpsc::channel();
    let wake = Arc::new(EventFd::new(EFD_NONBLOCK)?);
    let sender = EventSender {
        queue: sender,
        wake: Arc::clone(&wake),
    };
    Ok((
        sender,
        EventReceiver {
            queue: receiver,
            wake,
        },
    ))
}

impl EventSender {
    /// Queues an event and wakes the control loop.
    pub fn send(&self, event: MachineEvent) {
        log::debug!("{event:?}");
        // Nobody listens any more only while the process ends.
        if self.queue.send(event).is_ok()
            && let Err(error) = self.wake.write(1)
        {
            log::error!("cannot wake the control loop: {error}");
        }
    }
}

impl EventReceiver {
    /// Readable when there are events.
    pub fn wake_event(&self) -> &EventFd {
        &self.wake
    }

    /// The next event, if there is one.
    pub fn next(&self) -> Option<MachineEvent> {
        // Empty if the wake-up was spurious.
        let _ = self.wake.read();
        self.queue.try_recv().ok()
    }

    /// Throws away what a machine that is gone has left.
    pub fn clear(&self) {
        while self.next().is_some() {}
    }
}
