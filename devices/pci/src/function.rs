//! The interface of every PCI function.

use std::{io, sync::Arc, time::Duration};

use device_model::{
    bus::BusDevice,
    lifecycle::{ActivateError, StateError, Unanswered},
};
use serde_json::Value;

use super::{
    bar::BarIndex,
    bdf::Bdf,
    config::{ConfigError, ConfigSpace},
    root_port::RootPort,
};

/// Why a lifecycle step of a function failed.
#[derive(Debug, thiserror::Error)]
pub enum LifecycleError {
    /// This kind of function does not support the step.
    #[error("this kind of device does not support {0}")]
    Unsupported(&'static str),
    /// The function is in the wrong state for the step: running, or without a required state.
    #[error("{0}")]
    WrongState(&'static str),
    /// The device's state could not be saved or restored.
    #[error("cannot save or restore the device")]
    State(#[from] StateError),
    /// The configuration space could not be restored.
    #[error("cannot restore the configuration space")]
    Config(#[from] ConfigError),
    /// The device could not be activated again.
    #[error("cannot start the device again")]
    Activate(#[from] ActivateError),
    /// The host has not completed the device's requests.
    #[error(transparent)]
    Unanswered(#[from] Unanswered),
    /// A host resource is unavailable.
    #[error("cannot {action}")]
    Host {
        /// The action that failed.
        action: &'static str,
        /// The cause.
        source: io::Error,
    },
}

impl From<serde_json::Error> for LifecycleError {
    fn from(error: serde_json::Error) -> Self {
        Self::State(StateError::Format(error))
    }
}

/// The slow part of a reset, which may take seconds: for a thread that may block, without the
/// function's lock.
pub type SlowReset = Box<dyn FnOnce() + Send>;

/// A PCI function that can be plugged into a [`PciSegment`](super::PciSegment).
///
/// The segment calls every method with the function's lock held. A vCPU that accesses a trapped BAR
/// does not take that lock: it uses the device that `bar_device` returned.
///
/// The default lifecycle methods return an error.
pub trait PciFunction: Send {
    /// The configuration space; its BARs are the function's requests to the segment.
    fn config(&self) -> &ConfigSpace;

    /// The configuration space, for the segment to assign addresses to BARs.
    fn config_mut(&mut self) -> &mut ConfigSpace;

    /// Handles a guest read of configuration space, at any offset and width.
    fn read_config(&mut self, offset: usize, data: &mut [u8]) {
        self.config().read(offset, data);
    }

    /// Handles a guest write to configuration space, at any offset and width. Afterwards the
    /// segment checks the BARs and the command register.
    fn write_config(&mut self, offset: usize, data: &[u8]) {
        self.config_mut().write(offset, data);
    }

    /// The root port, if this is one. Its registers, which the guest writes, determine which BARs
    /// of the functions behind it are decoded.
    fn root_port(&self) -> Option<&RootPort> {
        None
    }

    /// The root port, if this is one, for the segment to assign a bus.
    fn root_port_mut(&mut self) -> Option<&mut RootPort> {
        None
    }

    /// The device that handles accesses to a BAR; `None` for a BAR that is memory, which the
    /// function maps itself in [`PciFunction::bar_mapped`].
    fn bar_device(&self, index: BarIndex) -> Option<Arc<dyn BusDevice>> {
        let _ = index;
        None
    }

    /// A BAR is now decoded at an address (`Some`), or no longer (`None`). The function updates
    /// whatever depends on the address (ioeventfds, memory slots). A move is a `None` followed by a
    /// `Some`.
    fn bar_mapped(&mut self, index: BarIndex, address: Option<u64>) {
        let _ = (index, address);
    }

    /// Sets whether the bridges between the function and memory forward its DMA and messages. Until
    /// the first call, they do.
    fn set_upstream(&mut self, forwarded: bool) {
        let _ = forwarded;
    }

    /// Whether the guest has requested a reset that is not complete: of the function or, for a root
    /// port, of the bus behind it. What is being reset does not respond.
    fn is_resetting(&self) -> bool {
        false
    }

    /// The guest resets the function's bus. [`PciFunction::begin_reset`] follows, when this has
    /// been called for all functions on the bus. The guest does not reach them until
    /// [`PciFunction::end_reset`].
    fn prepare_bus_reset(&mut self) {}

    /// Begins the reset that the guest has requested, and returns its slow part, if any.
    /// [`PciFunction::end_reset`] follows when that is complete.
    fn begin_reset(&mut self) -> Result<Option<SlowReset>, LifecycleError> {
        self.reset().map(|()| None)
    }

    /// The reset is complete: the function is in its power-on state and responds again.
    fn end_reset(&mut self) {}

    /// Assigns the function its place on the bus, before the guest can see it.
    fn plugged(&mut self, bdf: Bdf) -> io::Result<()> {
        let _ = bdf;
        Ok(())
    }

    /// Prepares the removal of the function: it starts no new requests to the host, and waits in
    /// bounded time for those in flight. After an error it continues as before.
    fn quiesce(&mut self) -> Result<(), LifecycleError> {
        Ok(())
    }

    /// Holds back new requests to the host, as [`PciFunction::quiesce`] does, but does not wait for those in flight:
    /// fails as long as there are some. The caller, which has `waited` for them until now, repeats it, or calls
    /// [`PciFunction::carry_on`]. It holds although the driver resets the device; resuming the function ends it.
    fn hold(&mut self, waited: Duration) -> Result<(), LifecycleError> {
        let _ = waited;
        Ok(())
    }

    /// Undoes [`PciFunction::quiesce`] and [`PciFunction::hold`]: the removal was cancelled.
    fn carry_on(&mut self) {}

    /// The function was removed from the bus: it stops and releases the guest's resources.
    fn unplugged(&mut self) {}

    /// Stops accesses to guest memory and interrupts. The VM stops the vCPUs before, and saves the
    /// interrupt controllers afterwards: requests in flight may still raise an interrupt.
    fn pause(&mut self) -> Result<(), LifecycleError> {
        Err(LifecycleError::Unsupported("pause"))
    }

    /// Continues after a pause or a restore.
    fn resume(&mut self) -> Result<(), LifecycleError> {
        Err(LifecycleError::Unsupported("resume"))
    }

    /// Releases, within seconds, what prevents a paused function from being saved: the guest loses
    /// it.
    fn detach(&mut self) -> Result<(), LifecycleError> {
        Ok(())
    }

    /// The complete state of a paused function, including its configuration space.
    fn save(&mut self) -> Result<Value, LifecycleError> {
        Err(LifecycleError::Unsupported("snapshots"))
    }

    /// Loads a saved state, which is untrusted input; the function stays paused until `resume`.
    /// Call [`PciSegment::restore`](super::PciSegment::restore) instead, because the BARs move.
    fn restore(&mut self, state: Value) -> Result<(), LifecycleError> {
        let _ = state;
        Err(LifecycleError::Unsupported("snapshots"))
    }

    /// Returns to the power-on state.
    fn reset(&mut self) -> Result<(), LifecycleError> {
        Err(LifecycleError::Unsupported("reset"))
    }

    /// Whether a driver of the guest has used the function, as far as the function knows.
    fn had_driver(&self) -> bool {
        false
    }

    /// Counters for `vm.counters` and the metrics, as (name, value) pairs.
    fn counters(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }
}
