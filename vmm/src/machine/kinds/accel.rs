//! Accelerators whose calls are served by worker processes, or by a server VM's process.

use std::{
    sync::{Arc, Mutex},
    time::SystemTime,
};

use devices::{
    accel::{Accel, Options, Resources},
    gate::{self, Gate},
};

use super::{
    super::{
        devices::{DeviceKind, Made, MadeFunction, Surroundings},
        error::DeviceError,
    },
    Handle, gate_resources, thread_name,
};
use crate::config::{AccelConfig, AccelTransport};

/// What the machine's compiled programs are called: as it was said, or a name that no other run of
/// a machine has.
fn compiled(named: Option<&str>) -> String {
    match named {
        Some("off") => String::new(),
        Some(name) => name.to_owned(),
        None => {
            let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
            let nanos = since.map_or(0, |since| since.as_nanos());
            // A name that is said has no dot.
            format!("run.{}.{nanos:x}", std::process::id())
        }
    }
}

impl DeviceKind for AccelConfig {
    const NAME: &'static str = "accel";

    fn make(&self, id: &str, surroundings: &Surroundings) -> Result<Made, DeviceError> {
        if self.transport == AccelTransport::Gate {
            let options = gate::Options {
                thread_name: thread_name("gate", id),
                side: gate::Side::Client {
                    server: self.server.clone().unwrap_or_default(),
                    shared: self.shared,
                },
            };
            let gate = Gate::new(options, gate_resources(id, surroundings))?;
            return Ok(Made {
                function: MadeFunction::Pci(Arc::new(Mutex::new(gate))),
                handle: Handle::None,
            });
        }
        let options = Options {
            thread_name: thread_name(Self::NAME, id),
            api: self.api.id(),
            socket: self.socket.clone(),
            slices: self.slices,
            slice_size: self.window / u64::from(self.slices.max(1)),
            device: self.device.clone().unwrap_or_default(),
            weight: self.weight,
            memory: self.memory.unwrap_or(0),
            // Of all clients of a host: a process is one VM.
            client: format!("{}/{id}", std::process::id()),
            compiled: compiled(self.compiler_cache.as_deref()),
        };
        let physical = surroundings.physical.resources();
        let resources = Resources {
            msi: Arc::clone(&surroundings.msi),
            lines: physical.lines,
            doorbells: Arc::clone(&surroundings.doorbells),
            space: physical.space,
            spawner: Arc::clone(&surroundings.spawner),
        };
        let accel = Accel::new(options, resources)?;
        Ok(Made {
            function: MadeFunction::Pci(Arc::new(Mutex::new(accel))),
            handle: Handle::None,
        })
    }
}
