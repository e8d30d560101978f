//! Events of a machine that the control loop has to act on.

use std::{
    collections::VecDeque,
    io,
    sync::{Arc, Mutex, MutexGuard},
};

use base::Unpoisoned;
use devices::{acpi::WatchdogTimer, gate, guest_event::GuestEvent, pci::Bdf};
use vmm_snapshot::lazy::MemoryLost;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::alarms::Alarms;
use crate::cpu::CpuEvent;

/// An event that the control loop has to act on.
#[derive(Debug)]
pub enum MachineEvent {
    /// The guest made a request through a device.
    Guest(GuestEvent),
    /// A vCPU cannot continue.
    Cpu(CpuEvent),
    /// Memory that is restored on demand cannot be loaded. Threads that need it wait for ever, so the machine must be
    /// [abandoned](super::Machine::abandon).
    MemoryLost(MemoryLost),
    /// The guest has ejected the PCI device in a slot.
    PciEjected {
        /// The slot's function 0.
        slot: Bdf,
    },
    /// The process that serves a device is gone or has become unusable.
    DeviceLost {
        /// Name of the device.
        id: String,
        /// What happened.
        reason: String,
    },
    /// A guest process has started or stopped serving others through the gate.
    Gate {
        /// Name of the device.
        id: String,
        /// What happened.
        event: gate::Event,
    },
    /// Applications of an accelerator have moved to other workers, or failed to.
    AccelMoved {
        /// Name of the device.
        id: String,
        /// Number of the move.
        number: u64,
        /// The outcome.
        moved: devices::accel::moving::Moved,
    },
    /// A guest's agent has changed which worker serves its applications, or failed to.
    AccelSeated {
        /// Name of the device.
        id: String,
        /// Number of the request.
        number: u64,
        /// The outcome.
        seated: devices::accel::moving::Seated,
    },
    /// The guest has moved the BARs of a physical device.
    PeersChanged,
    /// The guest has requested the reset of a device or a bus, or one has ended.
    PciReset,
    /// The guest refuses to give up the PCI device in a slot.
    PciRefused {
        /// The slot's function 0.
        slot: Bdf,
        /// The reason, as a status code of ACPI's `_OST`.
        status: u32,
    },
}

impl MachineEvent {
    /// Whether this event adds nothing to `other`, which the control loop has not handled yet. True
    /// for everything that a guest can cause as often as it likes. This bounds the queue: there are
    /// a few hundred slots and vCPUs.
    fn repeats(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Guest(event), Self::Guest(other)) => event == other,
            // How to react depends on the state that the server is in by then.
            (
                Self::Gate { id, event },
                Self::Gate {
                    id: of,
                    event: other,
                },
            ) => id == of && event == other,
            (Self::PciEjected { slot }, Self::PciEjected { slot: other })
            | (Self::PciRefused { slot, .. }, Self::PciRefused { slot: other, .. }) => {
                slot == other
            }
            (Self::Cpu(CpuEvent::Reset), Self::Cpu(CpuEvent::Reset))
            | (Self::PciReset, Self::PciReset)
            | (Self::PeersChanged, Self::PeersChanged) => true,
            _ => false,
        }
    }
}

struct Queue {
    events: Mutex<VecDeque<MachineEvent>>,
    wake: EventFd,
    alarms: Arc<Alarms>,
    watchdog: Arc<WatchdogTimer>,
}

impl Queue {
    fn events(&self) -> MutexGuard<'_, VecDeque<MachineEvent>> {
        self.events.lock_unpoisoned()
    }
}

/// Sends events to the control loop from any thread, without blocking.
#[derive(Clone)]
pub struct EventSender(Arc<Queue>);

/// The control loop's end of the queue.
pub struct EventReceiver(Arc<Queue>);

/// Creates an event queue.
pub fn queue() -> io::Result<(EventSender, EventReceiver)> {
    let queue = Arc::new(Queue {
        events: Mutex::default(),
        wake: EventFd::new(EFD_NONBLOCK)?,
        alarms: Arc::new(Alarms::new()?),
        watchdog: Arc::new(WatchdogTimer::new()?),
    });
    Ok((EventSender(Arc::clone(&queue)), EventReceiver(queue)))
}

impl EventSender {
    /// Alarms of physical devices, which the control loop watches separately.
    pub fn alarms(&self) -> &Arc<Alarms> {
        &self.0.alarms
    }

    /// The timer of the watchdog, which the control loop watches separately.
    pub fn watchdog(&self) -> &Arc<WatchdogTimer> {
        &self.0.watchdog
    }

    /// Queues an event, unless an equal one is already waiting, and wakes the control loop.
    pub fn send(&self, event: MachineEvent) {
        let mut events = self.0.events();
        if events.iter().any(|other| event.repeats(other)) {
            return;
        }
        log::debug!("{event:?}");
        events.push_back(event);
        drop(events);
        if let Err(error) = self.0.wake.write(1) {
            log::error!("cannot wake the control loop: {error}");
        }
    }
}

impl EventReceiver {
    /// Readable when there are events.
    pub fn wake_event(&self) -> &EventFd {
        &self.0.wake
    }

    /// Returns the number of waiting events and clears the wake-up. Events that are sent later
    /// signal it again.
    pub fn waiting(&self) -> usize {
        // Fails with an empty counter if the wake-up was spurious.
        let _ = self.0.wake.read();
        self.0.events().len()
    }

    /// The next event, if there is one.
    pub fn next(&self) -> Option<MachineEvent> {
        self.0.events().pop_front()
    }

    /// Discards events left over from a machine that no longer exists.
    pub fn clear(&self) {
        self.0.events().clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_repeats_itself_makes_no_more_work() {
        let (sender, receiver) = queue().unwrap();
        let slot = |device| Bdf {
            device,
            ..Bdf::default()
        };
        for _ in 0..1000 {
            for slot in [slot(1), slot(2)] {
                sender.send(MachineEvent::PciEjected { slot });
            }
            sender.send(MachineEvent::Guest(GuestEvent::Reset));
            sender.send(MachineEvent::Guest(GuestEvent::CpuEjected(1)));
            sender.send(MachineEvent::Cpu(CpuEvent::Reset));
        }
        assert_eq!(receiver.waiting(), 5);
        let first = receiver.next().unwrap();
        assert!(matches!(first, MachineEvent::PciEjected { slot } if slot.device == 1));
        // An event that has been handled may occur again.
        sender.send(first);
        assert_eq!(receiver.waiting(), 5);
    }

    #[test]
    fn clients_that_come_and_go_make_no_more_work_for_a_servers_machine() {
        let (sender, receiver) = queue().unwrap();
        let gate = |id: &str, event| MachineEvent::Gate {
            id: id.to_owned(),
            event,
        };
        for _ in 0..1000 {
            sender.send(gate("server", gate::Event::Over));
            sender.send(gate("server", gate::Event::Woken));
        }
        sender.send(gate("another", gate::Event::Over));
        assert_eq!(receiver.waiting(), 3);
    }

    #[test]
    fn what_comes_while_events_are_acted_on_wakes_the_loop_again() {
        let (sender, receiver) = queue().unwrap();
        sender.send(MachineEvent::Guest(GuestEvent::Reset));
        assert_eq!(receiver.waiting(), 1);
        receiver.next();
        sender.send(MachineEvent::Guest(GuestEvent::Reset));
        assert_eq!(receiver.wake_event().read().unwrap(), 1);
        receiver.clear();
        assert_eq!(receiver.waiting(), 0);
    }
}
