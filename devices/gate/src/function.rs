//! The PCI function.

use std::{io, path::Path, sync::Arc, thread::JoinHandle};

use device_model::{
    bus::BusDevice,
    doorbell::Doorbells,
    memory::{AddressSpace, GuestMemory},
    thread::{ThreadRole, ThreadSpawner},
};
use pci::{
    BarIndex, BarKind, BarRequest, Bdf, ConfigSpace, ConfigSpaceState, Identity, LifecycleError,
    PciFunction,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use vmfunc_gate::{
    host,
    port::{self, Lack, registers as at},
};

use super::{
    CallingVcpu, Error, MOST_SHARED, Options, Report, Side, client::Client, server::Server,
    side::End,
};

const REGISTERS: u8 = 0;
const WINDOW: u8 = 2;

/// What a port needs from the VM.
#[derive(Clone)]
pub struct Resources {
    /// Delivers doorbells without exits to userspace.
    pub doorbells: Arc<dyn Doorbells>,
    /// Guest RAM, which contains the page tables of processes.
    pub memory: GuestMemory,
    /// Maps the window's pages at the address of its BAR.
    pub space: Arc<dyn AddressSpace>,
    /// The vCPU that performs an access.
    pub vcpu: Arc<dyn CallingVcpu>,
    /// Starts the port's thread.
    pub spawner: Arc<dyn ThreadSpawner>,
    /// Receives the events of a server.
    pub report: Report,
}

/// The saved state of an unused port.
#[derive(Debug, Serialize, Deserialize)]
struct PortState {
    config: ConfigSpaceState,
}

/// A gate port on a PCI bus.
pub struct Gate {
    config: ConfigSpace,
    end: Arc<dyn End>,
    /// Set if this is a server's port.
    server: Option<Arc<Server>>,
    name: String,
    spawner: Arc<dyn ThreadSpawner>,
    thread: Option<JoinHandle<()>>,
}

impl Gate {
    /// Creates an unused port. If the host lacks something that it needs, the guest can read what.
    pub fn new(options: Options, resources: Resources) -> Result<Self, Error> {
        Self::on(host::missing(Path::new("/")), options, resources)
    }

    /// Like [`Gate::new`], with an explicit list of what the host lacks.
    pub fn on(lacks: Vec<Lack>, options: Options, resources: Resources) -> Result<Self, Error> {
        let name = options.thread_name;
        if !lacks.is_empty() {
            let lacks: Vec<_> = lacks.iter().map(|lack| lack.text()).collect();
            log::warn!("{name}: nobody can use the gate: {}", lacks.join("; "));
        }
        let lacks = lacks
            .into_iter()
            .fold(0, |sum, lack: Lack| sum | lack as u32);
        let mut config = ConfigSpace::new(Identity {
            vendor: port::VENDOR,
            device: port::DEVICE,
            subsystem_vendor: port::VENDOR,
            subsystem: port::DEVICE,
            revision: at::INTERFACE as u8,
            class: port::CLASS,
        });
        let flat = BarKind::Memory32 {
            prefetchable: false,
        };
        let wide = BarKind::Memory64 { prefetchable: true };
        for (bar, kind, size) in [
            (REGISTERS, flat, at::SIZE),
            (WINDOW, wide, port::WINDOW_BAR),
        ] {
            let index = bar_index(bar);
            config.add_bar(BarRequest { index, kind, size })?;
        }
        let spawner = Arc::clone(&resources.spawner);
        let (end, server): (Arc<dyn End>, _) = match options.side {
            Side::Server { socket } => {
                let server = Arc::new(Server::new(&name, &socket, lacks, resources)?);
                (Arc::clone(&server) as _, Some(server))
            }
            Side::Client { server, shared } => {
                let pages = shared / 4096;
                if !(8192..=MOST_SHARED).contains(&shared) || !shared.is_multiple_of(4096) {
                    return Err(Error::Shared(shared));
                }
                // At most 4096.
                let client = Client::new(&name, server, pages as u32, lacks, resources)?;
                (Arc::new(client), None)
            }
        };
        Ok(Self {
            config,
            end,
            server,
            name,
            spawner,
            thread: None,
        })
    }

    /// The server, if this is a server's port.
    pub fn server(&self) -> Option<&Arc<Server>> {
        self.server.as_ref()
    }

    fn stop(&mut self) {
        self.end.stop();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("{}: its thread has panicked", self.name);
        }
    }
}

/// Index of one of the two BARs.
fn bar_index(bar: u8) -> BarIndex {
    BarIndex::new(bar).unwrap_or(BarIndex::ZERO)
}

/// The registers as a bus device.
struct Trapped(Arc<dyn End>);

impl BusDevice for Trapped {
    fn read(&self, offset: u64, data: &mut [u8]) {
        self.0.read(offset, data);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        self.0.write(offset, data);
    }
}

impl PciFunction for Gate {
    fn config(&self) -> &ConfigSpace {
        &self.config
    }

    fn config_mut(&mut self) -> &mut ConfigSpace {
        &mut self.config
    }

    fn bar_device(&self, index: BarIndex) -> Option<Arc<dyn BusDevice>> {
        (index.get() == REGISTERS).then(|| Arc::new(Trapped(Arc::clone(&self.end))) as _)
    }

    fn bar_mapped(&mut self, index: BarIndex, address: Option<u64>) {
        match index.get() {
            REGISTERS => self.end.registers_at(address),
            WINDOW => self.end.window_at(address),
            _ => {}
        }
    }

    fn plugged(&mut self, _bdf: Bdf) -> io::Result<()> {
        let end = Arc::clone(&self.end);
        self.thread = Some(self.spawner.spawn(
            ThreadRole::Gate,
            &self.name,
            Box::new(move || end.run()),
        )?);
        Ok(())
    }

    fn unplugged(&mut self) {
        self.stop();
        self.end.reset();
    }

    /// Pairs stay in place: the paused vCPU of a client inside a server keeps the server to itself.
    fn pause(&mut self) -> Result<(), LifecycleError> {
        Ok(())
    }

    fn resume(&mut self) -> Result<(), LifecycleError> {
        Ok(())
    }

    /// Ends the pair, and gives up the server.
    fn detach(&mut self) -> Result<(), LifecycleError> {
        self.end.reset();
        Ok(())
    }

    fn save(&mut self) -> Result<Value, LifecycleError> {
        if self.end.in_use() {
            return Err(LifecycleError::WrongState(
                "a process of the guest uses the gate: end it, or let the snapshot take the gate \
                 from it (detach)",
            ));
        }
        Ok(serde_json::to_value(PortState {
            config: self.config.save(),
        })?)
    }

    fn restore(&mut self, state: Value) -> Result<(), LifecycleError> {
        let state: PortState = serde_json::from_value(state)?;
        self.config.restore(&state.config)?;
        Ok(())
    }

    fn reset(&mut self) -> Result<(), LifecycleError> {
        self.end.reset();
        self.config.reset();
        Ok(())
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        self.end.counters()
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.stop();
        self.end.reset();
    }
}
