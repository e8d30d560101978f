//! Machines that are stopped while they serve others through the gate.

use devices::gate::Event;
use vmfunc_gate::port::Reason;
use vmm_api::{ApiError, Request, VmState};

use super::Control;

impl Control {
    /// Handles that a guest process has started to serve, was woken, or has stopped serving.
    pub(super) fn gate(&mut self, id: &str, event: Event) {
        let Some(machine) = self.life.machine_mut() else {
            return;
        };
        let why = match event {
            Event::Frozen => {
                self.monitor.emit("vm", "frozen", &[("id", id)]);
                return;
            }
            // Not if it was given up in the meantime.
            Event::Woken if machine.thaw_woken() => "slow work",
            Event::Woken => return,
            Event::Over => match machine.server_over() {
                Some(why) => return self.given_up(id, why),
                None => return,
            },
        };
        self.thawed(id, why);
    }

    fn thawed(&mut self, id: &str, why: &str) {
        let properties = [("id", id), ("reason", why)];
        self.monitor.emit("vm", "thawed", &properties);
    }

    fn given_up(&mut self, id: &str, why: Reason) {
        let why = match why {
            Reason::Lost => {
                log::error!(
                    "device {id:?}: a client was ended inside of the guest's kernel: the guest \
                     goes on, but boot it again before it serves others"
                );
                "lost"
            }
            Reason::Resumed => "resumed",
            _ => "its client or its own process has gone",
        };
        self.thawed(id, why);
    }

    /// Ends the guest's service, because a request needs it to run.
    pub(super) fn give_up_server(&mut self) {
        let server = self.life.config().and_then(|vm| vm.accel_server.as_ref());
        let id = server.and_then(|server| server.common.id.clone());
        let machine = self.life.machine_mut();
        let given_up = machine.and_then(|machine| machine.give_up_server(Reason::Resumed));
        if let (Some(id), Some(why)) = (id, given_up) {
            self.given_up(&id, why);
        }
    }

    /// Refuses requests that need the guest's vCPU, or exclusive use of the guest's memory.
    pub(super) fn refuse_if_frozen(&self, request: &Request) -> Result<(), ApiError> {
        let allowed = matches!(
            request,
            Request::VmmPing
                | Request::VmmShutdown
                | Request::VmmMetrics
                | Request::VmInfo
                | Request::VmCounters
                | Request::VmResume
                | Request::VmShutdown
                | Request::VmReboot
                | Request::VmDelete
                | Request::VmCreate(_)
                | Request::VmRestore(..)
                | Request::VmBoot
        );
        if allowed || self.life.state() != Some(VmState::Frozen) {
            return Ok(());
        }
        Err(ApiError::wrong_state(
            "the VM is frozen: a process of it serves another VM's by the gate, and its vCPU stands \
             still; vm.resume ends that",
        ))
    }
}
