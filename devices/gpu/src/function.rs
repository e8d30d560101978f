//! The PCI function.

use std::{
    io,
    sync::{Arc, Mutex},
    thread::JoinHandle,
};

use base::Unpoisoned;
use device_model::{
    bus::BusDevice,
    memory::{AddressSpace, GuestMemory},
    msi::MsiController,
    thread::{ThreadRole, ThreadSpawner},
};
use pci::{
    BarIndex, BarKind, BarRequest, Bdf, ConfigSpace, Identity, LifecycleError, Lines,
    MsiCapability, PciFunction, config::COMMAND_INTERRUPT_DISABLE, offsets,
};
use vmm_sys_util::eventfd::EventFd;

use super::{
    Error, Options,
    front::{Bar0, Front, Shown},
    views::{BAR1_BYTES, BAR3_BYTES},
};

const BAR0_BYTES: u64 = gf100::registers::BAR0_BYTES as u64;
/// Offset of the MSI capability, and its control register: one message, 64-bit addresses.
const MSI: usize = 0x68;
const MSI_CONTROL: u16 = 0x80;

/// What a virtual GPU needs from the VM.
#[derive(Clone)]
pub struct Resources {
    /// Allocates interrupt vectors.
    pub msi: Arc<dyn MsiController>,
    /// Provides interrupt lines.
    pub lines: Arc<dyn Lines>,
    /// Maps memory at the addresses of BARs.
    pub space: Arc<dyn AddressSpace>,
    /// Guest RAM, which the GPU accesses.
    pub memory: GuestMemory,
    /// Starts its threads.
    pub spawner: Arc<dyn ThreadSpawner>,
}

/// A virtual GPU on a PCI bus.
pub struct Gpu {
    config: ConfigSpace,
    msi: MsiCapability,
    front: Arc<Front>,
    options: Options,
    resources: Resources,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// A failure that the guest can trigger at will is logged once.
    warned: bool,
}

impl Gpu {
    /// Connects to the mediator and creates a virtual GPU.
    pub fn new(options: Options, resources: Resources) -> Result<Self, Error> {
        let mut config = ConfigSpace::new(Identity {
            vendor: 0x10de,
            device: 0x06d8,
            subsystem_vendor: 0x10de,
            subsystem: 0x06d8,
            revision: 0xa3,
            // A 3D controller.
            class: 0x03_0200,
        });
        let wide = BarKind::Memory64 { prefetchable: true };
        let flat = BarKind::Memory32 {
            prefetchable: false,
        };
        for (bar, kind, size) in [
            (0, flat, BAR0_BYTES),
            (1, wide, BAR1_BYTES),
            (3, wide, BAR3_BYTES),
        ] {
            let index = BarIndex::new(bar).unwrap_or(BarIndex::ZERO);
            config.add_bar(BarRequest { index, kind, size })?;
        }
        let msi = MsiCapability::place(&mut config, MSI, MSI_CONTROL)?;
        config.set(offsets::INTERRUPT_PIN, &[1]);
        let front = Front::new(&options, &resources.space, resources.memory.clone())?;
        Ok(Self {
            config,
            msi,
            front: Arc::new(front),
            options,
            resources,
            threads: Mutex::default(),
            warned: false,
        })
    }

    fn update_interrupts(&mut self) {
        let message = self.msi.messages(&self.config).first().copied();
        let disabled = self.config.command() & COMMAND_INTERRUPT_DISABLE != 0;
        let chosen = self
            .front
            .with_lines(|lines| lines.choose(message, disabled));
        if let Err(error) = chosen {
            self.warn("change its interrupts", &error);
        }
    }

    fn warn(&mut self, action: &str, error: &io::Error) {
        if !self.warned {
            self.warned = true;
            log::warn!("{}: cannot {action}: {error}", self.options.thread_name);
        }
    }

    fn spawn(&self, body: Box<dyn FnOnce() + Send>) -> io::Result<()> {
        let name = &self.options.thread_name;
        let thread = self.resources.spawner.spawn(ThreadRole::Gpu, name, body)?;
        self.threads.lock_unpoisoned().push(thread);
        Ok(())
    }

    fn stop(&mut self) {
        self.front.end();
        for thread in self.threads.lock_unpoisoned().drain(..) {
            if thread.join().is_err() {
                log::error!("{}: a thread has panicked", self.options.thread_name);
            }
        }
    }
}

impl PciFunction for Gpu {
    fn config(&self) -> &ConfigSpace {
        &self.config
    }

    fn config_mut(&mut self) -> &mut ConfigSpace {
        &mut self.config
    }

    fn write_config(&mut self, offset: usize, data: &[u8]) {
        self.config.write(offset, data);
        self.update_interrupts();
    }

    fn bar_device(&self, index: BarIndex) -> Option<Arc<dyn BusDevice>> {
        let front = Arc::clone(&self.front);
        match index.get() {
            0 => Some(Arc::new(Bar0(front))),
            1 => Some(Arc::new(Shown(front, 0))),
            3 => Some(Arc::new(Shown(front, 1))),
            _ => None,
        }
    }

    fn bar_mapped(&mut self, index: BarIndex, address: Option<u64>) {
        if let Err(error) = self.front.place(index.get(), address) {
            // Accesses are trapped instead.
            self.warn("map a BAR into the guest", &error);
        }
    }

    fn plugged(&mut self, bdf: Bdf) -> io::Result<()> {
        let vectors = self.resources.msi.allocate(1, bdf.requester_id())?;
        let served: Arc<EventFd> = self.front.with_lines(|lines| {
            lines.attach(Some(vectors));
            lines.join(&*self.resources.lines, bdf)
        })?;
        let receiver = self.front.receiver()?;
        self.spawn(Box::new(receiver))?;
        let front = Arc::clone(&self.front);
        self.spawn(Box::new(move || front.work(Some(&served))))
    }

    fn unplugged(&mut self) {
        self.stop();
        self.front.with_lines(|lines| {
            lines.attach(None);
            lines.leave();
        });
    }

    fn reset(&mut self) -> Result<(), LifecycleError> {
        self.front.reset();
        self.config.reset();
        self.update_interrupts();
        Ok(())
    }

    /// The GPU stops where it is. If the mediator does not answer, it is given up as lost, and the
    /// GPU's work for this VM ends.
    fn pause(&mut self) -> Result<(), LifecycleError> {
        self.front.hold(true);
        Ok(())
    }

    fn resume(&mut self) -> Result<(), LifecycleError> {
        self.front.hold(false);
        Ok(())
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        self.front.counters()
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        self.stop();
    }
}
