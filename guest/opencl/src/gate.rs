//! Whether the worker is behind an exitless gate, and is served by this process's own CPU.

use std::path::Path;

use gantry_remoting::transport::{
    gate::{Delegate, Gate},
    messages::Messages,
};

use crate::link::{Link, PATIENCE};

/// What `GANTRY_OPENCL` is for who wants to hear why there is no gate. Without it, one is used
/// where it is offered.
pub const NAME: &str = "gate";
/// What it begins with for a server that is reached by messages, at the socket of the path that
/// follows.
const MESSAGES: &str = "messages:";

/// A connection through a gate; none if there is no gate or something else is `wanted`. Says why
/// there is none where one is offered or wanted.
pub fn open(wanted: Option<&str>) -> Option<Link> {
    let way = match wanted {
        Some(name) if name.starts_with(MESSAGES) => {
            let path = Path::new(&name[MESSAGES.len()..]);
            Messages::connect(path)
                .map(|way| Box::new(way) as Box<dyn Delegate>)
                .map_err(|error| format!("{}: {error}", path.display()))
        }
        #[cfg(test)]
        None => Ok(crate::testing::worker()),
        #[cfg(not(test))]
        None => pair(false)?,
        Some(NAME) => pair(true)?,
        Some(_) => return None,
    };
    let link = way.and_then(|way| {
        let (gate, window) = Gate::open(way, PATIENCE).map_err(|error| error.to_string())?;
        Link::through(gate, window).map_err(|error| error.to_string())
    });
    link.inspect_err(|error| gantry_remoting::note!("gantry-opencl: not through the gate: {error}"))
        .ok()
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
