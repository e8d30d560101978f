//! Machines that serve others through the gate: the vCPU is stopped meanwhile.

use std::sync::Arc;

use devices::gate::{GivenUp, Server};
use vmfunc_gate::port::Reason;

use super::{Machine, kinds::Handle};

impl Machine {
    /// A configuration has at most one.
    fn server(&self) -> Option<&Arc<Server>> {
        self.devices
            .iter()
            .find_map(|(_, device)| match &device.handle {
                Handle::GateServer(server) => Some(server),
                _ => None,
            })
    }

    /// Whether a guest process is serving, with the vCPU stopped for that.
    pub fn is_frozen(&self) -> bool {
        self.server().is_some_and(|server| server.is_frozen())
    }

    /// Releases the vCPU if the server was woken for slow work; returns whether it was.
    pub fn thaw_woken(&mut self) -> bool {
        let woken = self.server().is_some_and(|server| server.thaw());
        if woken {
            self.cpus.thaw();
        }
        woken
    }

    /// Releases the vCPU if the port has given up the server; returns the reason.
    pub fn server_over(&mut self) -> Option<Reason> {
        let over = self.server()?.over();
        self.let_go(over)
    }

    /// Ends the service of a guest process, if there is one, and releases the vCPU; returns the
    /// final reason.
    pub fn give_up_server(&mut self, why: Reason) -> Option<Reason> {
        let given_up = self.server()?.give_up(why);
        self.let_go(given_up)
    }

    fn let_go(&self, server: Option<GivenUp>) -> Option<Reason> {
        let GivenUp { standing, why } = server?;
        if standing {
            self.cpus.thaw();
        }
        Some(why)
    }
}
