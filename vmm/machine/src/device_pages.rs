//! Pages of devices that workers have shown the guest through accelerators.

use std::sync::{Arc, Mutex, Weak};

use base::Unpoisoned;
use devices::accel::Pages;

use crate::cpu::DeviceMemory;

/// The pages of all accelerators.
#[derive(Default)]
pub struct DevicePages(Mutex<Vec<Weak<Pages>>>);

impl DevicePages {
    /// Adds those of an accelerator, for as long as it exists.
    pub fn add(&self, pages: &Arc<Pages>) {
        let mut all = self.0.lock_unpoisoned();
        all.retain(|known| known.strong_count() > 0);
        all.push(Arc::downgrade(pages));
    }
}

impl DeviceMemory for DevicePages {
    fn revoke(&self) -> bool {
        let all = self.0.lock_unpoisoned();
        // Each one: which of them is meant is not known.
        let all = all.iter().filter_map(Weak::upgrade);
        all.filter(|pages| pages.revoke()).count() > 0
    }
}
