//! Interrupt routing: where each global system interrupt (GSI) is delivered.
//!
//! GSIs 0 to 23 are the pins of the PICs and the I/O APIC. Higher GSIs carry MSIs: they are
//! allocated here and raised through irqfds. KVM takes the routing table as a whole, so it has a
//! single owner.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvm_bindings::{
    KVM_IRQ_ROUTING_IRQCHIP, KVM_IRQ_ROUTING_MSI, KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER,
    KVM_IRQCHIP_PIC_SLAVE, KvmIrqRouting, kvm_irq_routing_entry, kvm_irq_routing_irqchip,
    kvm_irq_routing_msi,
};
use kvm_ioctls::{Cap, VmFd};

use crate::{Error, Result};

/// Number of I/O APIC pins.
pub const IOAPIC_PINS: u32 = 24;

/// Destination of a message-signalled interrupt.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct MsiRoute {
    /// Message address.
    pub address: u64,
    /// Message data.
    pub data: u32,
}

#[derive(Clone, Copy, Debug, Default)]
enum Message {
    #[default]
    Free,
    Unrouted,
    Routed(MsiRoute),
}

#[derive(Debug, Default)]
struct Table {
    /// The message at index `i` is that of GSI `IOAPIC_PINS + i`.
    messages: Vec<Message>,
    /// Whether updates of the table are deferred.
    held: bool,
}

/// The routing table of one VM.
#[derive(Debug)]
pub struct Gsis {
    vm: Arc<VmFd>,
    table: Mutex<Table>,
    limit: u32,
}

impl Gsis {
    pub(crate) fn new(vm: Arc<VmFd>) -> Self {
        let limit = u32::try_from(vm.check_extension_int(Cap::IrqRouting)).unwrap_or(0);
        // KVM routed the pins when it created the interrupt controllers.
        Self {
            vm,
            table: Mutex::default(),
            limit: limit.max(IOAPIC_PINS),
        }
    }

    /// Allocates a GSI for an MSI. It has no route yet.
    pub fn allocate(&self) -> Result<u32> {
        let messages = &mut self.lock().messages;
        let free = messages
            .iter()
            .position(|message| matches!(message, Message::Free))
            .unwrap_or(messages.len());
        // The PIC and I/O APIC pins take 40 entries of the table.
        if free as u32 + IOAPIC_PINS + 16 >= self.limit {
            return Err(Error::NoRoute { limit: self.limit });
        }
        if free == messages.len() {
            messages.push(Message::Unrouted);
        } else {
            messages[free] = Message::Unrouted;
        }
        Ok(IOAPIC_PINS + free as u32)
    }

    /// Routes the MSI of `gsi` to `route`; `None` removes the route.
    pub fn route(&self, gsi: u32, route: Option<MsiRoute>) -> Result<()> {
        self.set(gsi, route.map_or(Message::Unrouted, Message::Routed))
    }

    /// Frees a GSI.
    pub fn release(&self, gsi: u32) -> Result<()> {
        self.set(gsi, Message::Free)
    }

    fn set(&self, gsi: u32, new: Message) -> Result<()> {
        let mut table = self.lock();
        let Some(message) = gsi
            .checked_sub(IOAPIC_PINS)
            .and_then(|index| table.messages.get_mut(index as usize))
        else {
            return Ok(());
        };
        let old = std::mem::replace(message, new);
        let same = match (old, new) {
            (Message::Routed(old), Message::Routed(new)) => old == new,
            (Message::Routed(_), _) | (_, Message::Routed(_)) => false,
            _ => true,
        };
        if same || table.held {
            Ok(())
        } else {
            self.publish(&table.messages)
        }
    }

    /// Applies the route changes that `change` makes as one update of KVM's table when it returns.
    /// Each update makes KVM wait for all vCPUs.
    pub fn together<T>(&self, change: impl FnOnce() -> T) -> Result<T> {
        self.lock().held = true;
        let result = change();
        let mut table = self.lock();
        table.held = false;
        self.publish(&table.messages)?;
        Ok(result)
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn publish(&self, messages: &[Message]) -> Result<()> {
        let mut entries = Vec::with_capacity(messages.len() + 40);
        for pin in 0..IOAPIC_PINS {
            entries.push(pin_entry(pin, KVM_IRQCHIP_IOAPIC, pin));
            match pin {
                0..8 => entries.push(pin_entry(pin, KVM_IRQCHIP_PIC_MASTER, pin)),
                8..16 => entries.push(pin_entry(pin, KVM_IRQCHIP_PIC_SLAVE, pin - 8)),
                _ => {}
            }
        }
        for (gsi, message) in (IOAPIC_PINS..).zip(messages) {
            if let Message::Routed(route) = message {
                entries.push(message_entry(gsi, *route));
            }
        }
        let table = KvmIrqRouting::from_entries(&entries)
            .map_err(|_| Error::NoRoute { limit: self.limit })?;
        self.vm
            .set_gsi_routing(&table)
            .map_err(Error::ioctl("route interrupts"))
    }
}

fn pin_entry(gsi: u32, chip: u32, pin: u32) -> kvm_irq_routing_entry {
    let mut entry = kvm_irq_routing_entry {
        gsi,
        type_: KVM_IRQ_ROUTING_IRQCHIP,
        ..Default::default()
    };
    entry.u.irqchip = kvm_irq_routing_irqchip { irqchip: chip, pin };
    entry
}

fn message_entry(gsi: u32, route: MsiRoute) -> kvm_irq_routing_entry {
    let mut entry = kvm_irq_routing_entry {
        gsi,
        type_: KVM_IRQ_ROUTING_MSI,
        ..Default::default()
    };
    entry.u.msi = kvm_irq_routing_msi {
        address_lo: route.address as u32,
        address_hi: (route.address >> 32) as u32,
        data: route.data,
        ..Default::default()
    };
    entry
}
