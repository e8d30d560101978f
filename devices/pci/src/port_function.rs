//! A root port as a function on its bus.

use serde_json::Value;

use super::{
    config::ConfigSpace,
    function::{LifecycleError, PciFunction},
    root_port::RootPort,
};

impl PciFunction for RootPort {
    fn config(&self) -> &ConfigSpace {
        &self.config
    }

    fn config_mut(&mut self) -> &mut ConfigSpace {
        &mut self.config
    }

    fn write_config(&mut self, offset: usize, data: &[u8]) {
        let held = self.holds_reset();
        self.config.write(offset, data);
        // Setting and clearing the bit while a reset is in progress starts no further reset.
        self.resetting |= !held && self.holds_reset();
    }

    fn is_resetting(&self) -> bool {
        self.resetting
    }

    /// All functions on its bus have been reset.
    fn end_reset(&mut self) {
        self.resetting = false;
    }

    fn root_port(&self) -> Option<&RootPort> {
        Some(self)
    }

    fn root_port_mut(&mut self) -> Option<&mut RootPort> {
        Some(self)
    }

    fn pause(&mut self) -> Result<(), LifecycleError> {
        Ok(())
    }

    fn resume(&mut self) -> Result<(), LifecycleError> {
        Ok(())
    }

    fn save(&mut self) -> Result<Value, LifecycleError> {
        Ok(serde_json::to_value(self.config.save())?)
    }

    fn restore(&mut self, state: Value) -> Result<(), LifecycleError> {
        Ok(self.config.restore(&serde_json::from_value(state)?)?)
    }

    fn reset(&mut self) -> Result<(), LifecycleError> {
        self.config.reset();
        self.resetting = false;
        if let Some((bus, windows)) = self.home {
            self.give_bus(bus, windows);
        }
        Ok(())
    }
}
