//! Interrupts to the guest, as MSI or through the line.

use std::{io, sync::Arc};

use device_model::msi::{MsiMessage, MsiVectors};
use pci::{Bdf, Line, Lines as Machine, line_of};
use vmm_sys_util::eventfd::EventFd;

/// The interrupts of the function, and their state.
#[derive(Default)]
pub struct Lines {
    vectors: Option<Box<dyn MsiVectors>>,
    message: Option<MsiMessage>,
    line: Option<Box<dyn Line>>,
    /// The guest's command register disables the line.
    disabled: bool,
    /// The line has been asserted, and has not been served since.
    asserted: bool,
    level: bool,
    /// Number of interrupts raised.
    pub raised: u64,
}

impl Lines {
    /// Sets the function's MSI vector.
    pub fn attach(&mut self, vectors: Option<Box<dyn MsiVectors>>) {
        self.vectors = vectors;
        self.message = None;
    }

    /// Joins the VM's line for a slot. Returns an event that becomes readable when the guest has
    /// served the line.
    pub fn join(&mut self, machine: &dyn Machine, slot: Bdf) -> io::Result<Arc<EventFd>> {
        let line = machine.join(line_of(slot))?;
        let served = Arc::new(line.served().try_clone()?);
        self.line = Some(line);
        Ok(served)
    }

    /// Leaves the VM's line.
    pub fn leave(&mut self) {
        self.line = None;
    }

    /// Applies the guest's settings in configuration space.
    pub fn choose(&mut self, message: Option<MsiMessage>, disabled: bool) -> io::Result<()> {
        self.disabled = disabled;
        if message != self.message {
            // Without a route, the previous message stays: raising must not create the vector, as
            // the filter of the GPU's threads does not allow that.
            if let Some(vectors) = &self.vectors {
                vectors.route(0, message)?;
            }
            self.message = message;
        }
        if self.level {
            self.raise();
        }
        Ok(())
    }

    /// Sets the interrupt level.
    pub fn set(&mut self, level: bool) {
        let rises = level && !self.level;
        self.level = level;
        if rises || level && self.message.is_none() && !self.asserted {
            self.raise();
        }
    }

    /// The driver is ready for another MSI.
    pub fn rearm(&mut self) {
        if self.level && self.message.is_some() {
            self.raise();
        }
    }

    /// The guest has served the line.
    pub fn served(&mut self) {
        self.asserted = false;
        self.set(self.level);
    }

    fn raise(&mut self) {
        match (self.message, &self.vectors, &self.line) {
            (Some(_), Some(vectors), _) => {
                if let Some(irqfd) = vectors.made_irqfd(0) {
                    // Fails only if the counter is full, in which case the interrupt is pending.
                    let _ = irqfd.write(1);
                    self.raised += 1;
                }
            }
            (None, _, Some(line)) if !self.disabled => {
                self.asserted = true;
                let _ = line.assert().write(1);
                self.raised += 1;
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    /// A vector that may have no route.
    struct Vectors {
        refuses: Arc<AtomicBool>,
        raised: EventFd,
    }

    impl MsiVectors for Vectors {
        fn route(&self, _: u16, _: Option<MsiMessage>) -> io::Result<()> {
            match self.refuses.load(Ordering::Relaxed) {
                true => Err(io::ErrorKind::StorageFull.into()),
                false => Ok(()),
            }
        }

        fn raise(&self, _: u16, _: MsiMessage) -> io::Result<()> {
            unreachable!("the function has an eventfd")
        }

        fn irqfd(&self, _: u16) -> io::Result<&EventFd> {
            Ok(&self.raised)
        }

        fn made_irqfd(&self, _: u16) -> Option<&EventFd> {
            Some(&self.raised)
        }
    }

    #[test]
    fn without_a_route_interrupts_go_where_they_went() {
        let refuses = Arc::new(AtomicBool::new(false));
        let raised = EventFd::new(0).unwrap();
        let mut lines = Lines::default();
        lines.attach(Some(Box::new(Vectors {
            refuses: Arc::clone(&refuses),
            raised: raised.try_clone().unwrap(),
        })));
        let message = |data| {
            Some(MsiMessage {
                address: 0xfee0_0000,
                data,
            })
        };
        lines.choose(message(1), false).unwrap();
        refuses.store(true, Ordering::Relaxed);
        for refused in [message(2), None] {
            lines.choose(refused, false).unwrap_err();
            assert_eq!(lines.message, message(1));
            // The same choice again needs no route.
            lines.choose(message(1), false).unwrap();
            lines.set(true);
            assert_eq!(raised.read().unwrap(), 1);
            lines.set(false);
        }
        refuses.store(false, Ordering::Relaxed);
        lines.choose(None, false).unwrap();
        lines.set(true);
        assert_eq!(lines.raised, 2, "it has neither a message nor a line");
    }
}
