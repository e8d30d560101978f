//! Decides whether the worker is behind an exitless gate and runs on this process's own CPU.

use std::path::Path;

use remoting_transport::{gate::Delegate, messages::Messages};

use crate::driver::Driver;

/// The address that requires a gate, so that a failure is reported. Without an address, a gate is
/// used if it is offered.
pub const NAME: &str = "gate";
/// The address prefix of a server that is reached by messages. The path of its socket follows.
const MESSAGES: &str = "messages:";

/// Opens the way through a gate. None if there is no gate or something else is `wanted`.
pub(crate) fn way(wanted: Option<&str>) -> Option<Result<Box<dyn Delegate>, String>> {
    match wanted {
        Some(name) if name.starts_with(MESSAGES) => {
            let path = Path::new(&name[MESSAGES.len()..]);
            let way = Messages::connect(path)
                .map(|way| Box::new(way) as Box<dyn Delegate>)
                .map_err(|error| format!("{}: {error}", path.display()));
            Some(way)
        }
        None => pair(false),
        Some(NAME) => pair(true),
        Some(_) => None,
    }
}

/// Reports why there is no connection through a gate that is offered or wanted.
pub(crate) fn note<D: Driver>(error: &dyn std::fmt::Display) {
    base::note!("{}: not through the gate: {error}", D::NAME);
}

/// Pairs with the server that this VM is offered. None if it is not offered one and this process
/// was not told to expect one.
#[cfg(feature = "gate")]
fn pair(told: bool) -> Option<Result<Box<dyn Delegate>, String>> {
    use crate::paired::{NoPair, Paired};
    match Paired::new() {
        Ok(paired) => Some(Ok(Box::new(paired))),
        Err(NoPair::NotOffered(_)) if !told => None,
        Err(NoPair::NotOffered(error) | NoPair::Failed(error)) => Some(Err(error)),
    }
}

/// As above, in a driver that was built without the gate.
#[cfg(not(feature = "gate"))]
fn pair(told: bool) -> Option<Result<Box<dyn Delegate>, String>> {
    told.then(|| Err("this driver was built without it".to_owned()))
}
