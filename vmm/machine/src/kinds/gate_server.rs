//! The server side of the gate: processes of this VM that other VMs' processes call.

use std::sync::{Arc, Mutex};

use devices::gate::{Gate, Options, Side};
use vmm_config::AccelServerConfig;

use super::{
    super::{
        devices::{DeviceKind, Made, MadeFunction, Surroundings},
        error::DeviceError,
    },
    Handle, gate_resources, thread_name,
};

impl DeviceKind for AccelServerConfig {
    const NAME: &'static str = "accel-server";
    const CALLED: &'static str = "accelerator server";

    fn make(&self, id: &str, surroundings: &Surroundings) -> Result<Made, DeviceError> {
        let options = Options {
            thread_name: thread_name("gate", id),
            side: Side::Server {
                socket: self.socket.clone(),
            },
        };
        let gate = Gate::new(options, gate_resources(id, surroundings));
        let gate = gate.map_err(DeviceError::of)?;
        let handle = match gate.server() {
            Some(server) => Handle::GateServer(Arc::clone(server)),
            None => Handle::None,
        };
        Ok(Made {
            function: MadeFunction::Pci(Arc::new(Mutex::new(gate))),
            handle,
        })
    }
}
