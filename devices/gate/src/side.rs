//! What the two sides of the gate have in common.

use device_model::bus::BusDevice;

/// One side of the gate, as its function uses it.
pub trait End: BusDevice {
    /// The registers are now decoded at this address, or nowhere.
    fn registers_at(&self, address: Option<u64>);
    /// The window is now decoded at this address, or nowhere.
    fn window_at(&self, address: Option<u64>);
    /// The body of its thread.
    fn run(&self);
    /// Stops the thread.
    fn stop(&self);
    /// Returns to the initial state.
    fn reset(&self);
    /// Whether a process uses it.
    fn in_use(&self) -> bool;
    /// Counters, as (name, value) pairs.
    fn counters(&self) -> Vec<(&'static str, u64)>;
}
