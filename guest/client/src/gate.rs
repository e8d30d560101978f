//! Whether the worker is behind an exitless gate, and is served by this process's own CPU.

use std::path::Path;

use gantry_remoting::link::{gate::Delegate, messages::Messages};

use crate::driver::Driver;

/// What the address is for who wants to hear why there is no gate. Without it, one is used
/// where it is offered.
pub const NAME: &str = "gate";
/// What it begins with for a server that is reached by messages, at the socket of the path that
/// follows.
const MESSAGES: &str = "messages:";

/// The way through a gate; none if there is no gate or something else is `wanted`.
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

/// Says why there is no connection through a gate that is offered or wanted.
pub(crate) fn note<D: Driver>(error: &dyn std::fmt::Display) {
    base::note!("{}: not through the gate: {error}", D::NAME);
}

/// Pairs with the server that this virtual machine is offered; none if it is not offered one and
/// this process was not told that it is.
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
