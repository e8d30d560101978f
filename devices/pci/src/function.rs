//! What every PCI function can do.

use std::{io, sync::Arc};

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

/// A step of a function's life failed.
#[derive(Debug, thiserror::Error)]
pub enum LifecycleError {
    /// This kind of function cannot do it.
    #[error("this kind of device does not support {0}")]
    Unsupported(&'static str),
    /// The function is running, or still needs a state, and must not be for this step.
    #[error("{0}")]
    WrongState(&'static str),
    /// The device's state could not be saved or restored.
    #[error("cannot save or restore the device")]
    State(#[from] StateError),
    /// The configuration space could not be restored.
    #[error("cannot restore the configuration space")]
    Config(#[from] ConfigError),
    /// The device did not start again.
    #[error("cannot start the device again")]
    Activate(#[from] ActivateError),
    /// The host does not answer the device.
    #[error(transparent)]
    Unanswered(#[from] Unanswered),
    /// A host resource could not be had.
    #[error("cannot {action}")]
    Host {
        /// What was tried.
        action: &'static str,
        /// Why it failed.
        source: io::Error,
    },
}

impl From<serde_json::Error> for LifecycleError {
    fn from(error: serde_json::Error) -> Self {
        Self::State(StateError::Format(error))
    }
}

/// What of a reset takes time, up to seconds: for a thread that may wait, without the function's lock.
pub type SlowReset = Box<dyn FnOnce() + Send>;

/// A PCI function that can be plugged into a [`PciSegment`](super::PciSegment).
///
/// The segment calls every method with the function's lock held. A vCPU that touches a trapped
/// BAR does not take that lock: it goes to the device that `bar_device` gave out.
///
/// The lifecycle methods refuse unless a function implements them.
pub trait PciFunction: Send {
    /// The configuration space; its BARs are what the function asks the segment for.
    fn config(&self) -> &ConfigSpace;

    /// The configuration space, for the segment to place BARs.
    fn config_mut(&mut self) -> &mut ConfigSpace;

    /// A guest's read of configuration space, any offset and width.
    fn read_config(&mut self, offset: usize, data: &mut [u8]) {
        self.config().read(offset, data);
    }

    /// A guest's write to configuration space, any offset and width. The segment looks at the
    /// BARs and the command register afterwards.
    fn write_config(&mut self, offset: usize, data: &[u8]) {
        self.config_mut().write(offset, data);
    }

    /// The root port that it is. What the guest writes to its registers decides which memory of the
    /// functions behind it is decoded.
    fn root_port(&self) -> Option<&RootPort> {
        None
    }

    /// The root port that it is, for the segment to give it a bus.
    fn root_port_mut(&mut self) -> Option<&mut RootPort> {
        None
    }

    /// What decodes accesses to a BAR; `None` for a BAR that is memory, which the function maps
    /// itself when it hears of the address.
    fn bar_device(&self, index: BarIndex) -> Option<Arc<dyn BusDevice>> {
        let _ = index;
        None
    }

    /// A BAR is decoded at an address from now on (`Some`), or nowhere (`None`). What follows the
    /// address (ioeventfds, memory slots) is changed here. A move is a `None` and a `Some`.
    fn bar_mapped(&mut self, index: BarIndex, address: Option<u64>) {
        let _ = (index, address);
    }

    /// Whether the bridges between it and memory forward what it sends: DMA and messages. Until this
    /// is called, they do.
    fn set_upstream(&mut self, forwarded: bool) {
        let _ = forwarded;
    }

    /// Whether the guest has asked for a reset that has not ended yet: of the function, or of the bus
    /// behind it if it is a root port. Whoever is being reset does not answer.
    fn is_resetting(&self) -> bool {
        false
    }

    /// The guest resets the bus on which the function is. [`PciFunction::begin_reset`] follows, when
    /// this has been called for all functions of the bus; until [`PciFunction::end_reset`], the guest
    /// does not reach them.
    fn prepare_bus_reset(&mut self) {}

    /// Begins the reset that the guest has asked for, and returns what of it takes time, if anything
    /// does. [`PciFunction::end_reset`] follows when that is done.
    fn begin_reset(&mut self) -> Result<Option<SlowReset>, LifecycleError> {
        self.reset().map(|()| None)
    }

    /// The function is as after power-on, and answers again.
    fn end_reset(&mut self) {}

    /// The function got its place on the bus, before the guest can see it.
    fn plugged(&mut self, bdf: Bdf) -> io::Result<()> {
        let _ = bdf;
        Ok(())
    }

    /// Prepares the end of the function: it asks the host for nothing more, and waits in bounded
    /// time for what it has asked for. With an error it goes on as before.
    fn quiesce(&mut self) -> Result<(), LifecycleError> {
        Ok(())
    }

    /// The end that [`PciFunction::quiesce`] has prepared does not come.
    fn carry_on(&mut self) {}

    /// The function was taken off the bus: it stops and gives up what it holds of the guest.
    fn unplugged(&mut self) {}

    /// Stops touching guest memory and raising interrupts. The machine stops the vCPUs before, and
    /// saves the interrupt controllers after: what was in flight may still raise an interrupt.
    fn pause(&mut self) -> Result<(), LifecycleError> {
        Err(LifecycleError::Unsupported("pause"))
    }

    /// Goes on after a pause or a restore.
    fn resume(&mut self) -> Result<(), LifecycleError> {
        Err(LifecycleError::Unsupported("resume"))
    }

    /// Gives up, within seconds, what keeps a paused function from being saved: the guest loses it.
    fn detach(&mut self) -> Result<(), LifecycleError> {
        Ok(())
    }

    /// The whole state of a paused function, configuration space included.
    fn save(&mut self) -> Result<Value, LifecycleError> {
        Err(LifecycleError::Unsupported("snapshots"))
    }

    /// Takes a saved state over; the function stays paused until `resume`. It is untrusted input.
    /// Call [`PciSegment::restore`](super::PciSegment::restore) rather than this: the BARs move.
    fn restore(&mut self, state: Value) -> Result<(), LifecycleError> {
        let _ = state;
        Err(LifecycleError::Unsupported("snapshots"))
    }

    /// Back to the state after power-on.
    fn reset(&mut self) -> Result<(), LifecycleError> {
        Err(LifecycleError::Unsupported("reset"))
    }

    /// Counters for `vm.counters` and the metrics: name and value.
    fn counters(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }
}
