//! Accelerators whose calls are served by worker processes, or by a server VM's process.

use std::{
    sync::{Arc, Mutex},
    time::SystemTime,
};

use devices::{
    accel::{Accel, Options, Resources, moving},
    gate::{self, Gate},
    pci::SharedFunction,
};
use vmm_config::{AccelApi, AccelConfig, AccelVia, GateConfig, RingConfig};

use super::{
    super::{
        devices::{DeviceKind, Made, MadeFunction, Surroundings},
        error::DeviceError,
    },
    Handle, gate_resources, thread_name,
};

/// The name under which compiled programs are kept: the configured one, or one that is unique to this run.
fn compiled(named: Option<&str>) -> String {
    match named {
        Some("off") => String::new(),
        Some(name) => name.to_owned(),
        None => {
            let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
            let nanos = since.map_or(0, |since| since.as_nanos());
            // A configured name contains no dot, so the two cannot collide.
            format!("run.{}.{nanos:x}", std::process::id())
        }
    }
}

impl DeviceKind for AccelConfig {
    const NAME: &'static str = "accel";
    const CALLED: &'static str = "accelerator";

    fn make(&self, id: &str, surroundings: &Surroundings) -> Result<Made, DeviceError> {
        if let Some(missing) = self.missing_pool() {
            log::warn!("{id}: {missing}; applications of the guest find no device until then");
        }
        let (function, handle): (SharedFunction, _) = match &self.via {
            AccelVia::Ring(ring) => {
                // A port through which workers have already restored applications.
                let early = surroundings.ports.take(id, surroundings.archive.clone());
                let port = match early {
                    Some(port) => port,
                    None => port(self.api, ring, id, surroundings)?,
                };
                let handle = Handle::Accel(port.handle());
                (Arc::new(Mutex::new(port)), handle)
            }
            AccelVia::Gate(gate) => {
                let client = client(gate, id, surroundings)?;
                (Arc::new(Mutex::new(client)), Handle::None)
            }
        };
        Ok(Made {
            function: MadeFunction::Pci(function),
            handle,
        })
    }
}

/// Creates the port of an arriving accelerator, for workers that restore applications before the device arrives.
pub fn stand_by(
    config: &AccelConfig,
    id: &str,
    surroundings: &Surroundings,
) -> Result<moving::Handle, DeviceError> {
    let AccelVia::Ring(ring) = &config.via else {
        return Err(DeviceError::of(NoPort));
    };
    surroundings.ports.find(id, || {
        let port = port(config.api, ring, id, surroundings)?;
        port.stand_by().map_err(DeviceError::of)?;
        Ok(port)
    })
}

/// Applications that are served by another VM cannot be migrated.
#[derive(Debug, thiserror::Error)]
#[error("no worker takes applications up by a gate")]
struct NoPort;

/// Creates the port through which applications reach workers.
fn port(
    api: AccelApi,
    ring: &RingConfig,
    id: &str,
    surroundings: &Surroundings,
) -> Result<Accel, DeviceError> {
    let options = Options {
        thread_name: thread_name(AccelConfig::NAME, id),
        apis: api.offered(),
        socket: ring.pool(api).to_owned(),
        slices: ring.slices,
        slice_size: ring.window / u64::from(ring.slices.max(1)),
        device: ring.device.clone().unwrap_or_default(),
        weight: ring.weight,
        latency: ring.latency.unwrap_or(0),
        memory: ring.memory.unwrap_or(0),
        // Unique among all clients of a host: one process is one VM.
        client: format!("{}/{id}", std::process::id()),
        pages: ring.pages.unwrap_or(0),
        compiled: compiled(ring.compiler_cache.as_deref()),
        archive: surroundings.archive.clone(),
    };
    let physical = surroundings.physical.resources();
    let resources = Resources {
        msi: Arc::clone(&surroundings.msi),
        lines: physical.lines,
        doorbells: Arc::clone(&surroundings.doorbells),
        space: physical.space,
        spawner: Arc::clone(&surroundings.spawner),
    };
    let port = Accel::new(options, resources).map_err(DeviceError::of)?;
    if let Some(pages) = port.pages() {
        surroundings.device_pages.add(pages);
    }
    Ok(port)
}

/// Creates a client of a server VM.
fn client(config: &GateConfig, id: &str, surroundings: &Surroundings) -> Result<Gate, DeviceError> {
    let options = gate::Options {
        thread_name: thread_name("gate", id),
        side: gate::Side::Client {
            server: config.server.clone(),
            shared: config.shared,
        },
    };
    Gate::new(options, gate_resources(id, surroundings)).map_err(DeviceError::of)
}
