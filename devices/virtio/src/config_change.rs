//! Notifies the driver that the device's configuration has changed, or delays this until there is a
//! driver: a size that is set while the VM is paused must not be lost.

use std::sync::{Arc, Mutex, MutexGuard};

use base::Unpoisoned;

use super::device::VirtioInterrupt;

/// Configuration changes that are pending for the driver.
#[derive(Default)]
pub struct ConfigChange(Mutex<Link>);

#[derive(Default)]
struct Link {
    /// Set while the device is active.
    interrupt: Option<Arc<dyn VirtioInterrupt>>,
    /// There is a change of which the driver has not been notified.
    pending: bool,
}

impl ConfigChange {
    /// Announces a change: interrupts the driver now, or as soon as the device is activated.
    pub fn announce(&self) {
        let mut link = self.lock();
        link.pending = true;
        link.tell();
    }

    /// Sets whether the device is active (`Some`) or not (`None`).
    pub fn connect(&self, interrupt: Option<Arc<dyn VirtioInterrupt>>) {
        let mut link = self.lock();
        link.interrupt = interrupt;
        link.tell();
    }

    /// Drops a pending change when the device is reset: the next driver reads the configuration
    /// anyway.
    pub fn forget(&self) {
        self.lock().pending = false;
    }

    fn lock(&self) -> MutexGuard<'_, Link> {
        self.0.lock_unpoisoned()
    }
}

impl Link {
    fn tell(&mut self) {
        let Some(interrupt) = self.interrupt.as_ref().filter(|_| self.pending) else {
            return;
        };
        match interrupt.config() {
            Ok(()) => self.pending = false,
            Err(error) => log::error!("cannot tell the guest of a changed device: {error}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::testing::simple::Interrupts;

    #[test]
    fn a_change_is_announced_once_and_waits_for_a_driver() {
        let interrupts = Arc::new(Interrupts::default());
        let announced = || interrupts.config.load(Ordering::SeqCst);
        let change = ConfigChange::default();
        change.announce();
        change.announce();
        change.connect(Some(interrupts.clone()));
        assert_eq!(announced(), 1);
        change.announce();
        assert_eq!(announced(), 2);
        change.connect(None);
        change.connect(Some(interrupts.clone()));
        assert_eq!(announced(), 2, "nothing has changed since");
        change.connect(None);
        change.announce();
        change.forget();
        change.connect(Some(interrupts.clone()));
        assert_eq!(announced(), 2, "the next driver reads it anyway");
    }
}
