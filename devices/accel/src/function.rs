//! The PCI function.

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    fs::File,
    io, mem,
    os::fd::OwnedFd,
    sync::{Arc, Mutex, atomic::Ordering},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use base::Unpoisoned;
use device_model::{
    bus::BusDevice,
    doorbell,
    memory::{AddressSpace, HostMemory, Mapping},
    msi::MsiController,
    thread::{ThreadRole, ThreadSpawner},
};
use pci::{
    BarIndex, BarKind, BarRequest, Bdf, ConfigSpace, ConfigSpaceState, Identity, LifecycleError,
    Lines, MsixCapability, MsixState, MsixTable, PciFunction,
    config::{COMMAND_INTERRUPT_DISABLE, STATUS_INTERRUPT},
    offsets,
};
use remoting_proto::{
    apis::spoken,
    port::{self, Attachment, DOORBELL, MOST_SLICES, registers as at},
};
use remoting_transport::{account::Account, control, window::SMALLEST};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use vm_memory::GuestAddress;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{
    Error, Options,
    attach::{Attach, Pool},
    handle::{Coming, Handle, NATIVE},
    lend::Desk,
    line::PortLine,
    page_requests::Requests,
    pages::{self, Pages},
    registers::{Doorbells, Registers},
    saved_slice::{SavedSlice, check_pieces},
    service::Service,
    slices::{Claim, Slices},
    window::Window,
};

const REGISTERS: u8 = 0;
const DOORBELLS: u8 = 1;
const WINDOW: u8 = 2;
const PAGES: u8 = 4;
const PAGE: u64 = 4096;
/// Timeout for workers to end.
const PATIENCE: Duration = Duration::from_secs(5);
/// Interval of the checks meanwhile.
const SOON: Duration = Duration::from_millis(2);

/// What a port needs from the VM.
#[derive(Clone)]
pub struct Resources {
    /// Allocates interrupt vectors.
    pub msi: Arc<dyn MsiController>,
    /// Provides interrupt lines.
    pub lines: Arc<dyn Lines>,
    /// Delivers doorbells without exits to userspace.
    pub doorbells: Arc<dyn doorbell::Doorbells>,
    /// Maps the window at the address of its BAR.
    pub space: Arc<dyn AddressSpace>,
    /// Starts the port's threads.
    pub spawner: Arc<dyn ThreadSpawner>,
}

/// The saved state of a port. Older states lack the fields that were added later.
#[derive(Debug, Serialize, Deserialize)]
struct PortState {
    config: ConfigSpaceState,
    msix: MsixState,
    /// Whether the agent uses interrupts from the line.
    #[serde(default)]
    line: bool,
    /// Pending notes for the agent: a bit per slice, and whether a state has changed.
    #[serde(default)]
    noted: (u64, bool),
    /// Number of changes of slice states.
    #[serde(default)]
    changes: u32,
    /// Slices that are not free. Their applications are in the archive that accompanies the state.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    slices: Vec<SavedSlice>,
}

/// An accelerator port on a PCI bus.
pub struct Accel {
    config: ConfigSpace,
    msix_capability: MsixCapability,
    msix: Arc<MsixTable>,
    line: Arc<PortLine>,
    /// Its address on the bus, while it is plugged in.
    place: Option<Bdf>,
    registers: Arc<Registers>,
    doorbells: Arc<[EventFd]>,
    trapped_doorbells: Arc<Doorbells>,
    /// Address at which the doorbells are registered with KVM.
    listening: Option<u64>,
    /// The guest's mapping of the window; dropped before the window.
    placed: Option<Box<dyn Mapping>>,
    /// The guest's mapping of the pages; dropped before them.
    shown: Option<Box<dyn Mapping>>,
    slices: Arc<Slices>,
    window: Arc<Window>,
    /// What is behind BAR 4.
    pages: Option<Arc<Pages>>,
    account: Arc<(Account, OwnedFd)>,
    /// Passes slices to workers.
    attach: Arc<Attach>,
    /// Lends workers to other threads.
    desk: Arc<Desk>,
    /// The saved applications, while a snapshot is being written.
    saved: Arc<Mutex<Option<Vec<SavedSlice>>>>,
    /// The applications of a snapshot that is being restored, until the guest runs.
    coming: Arc<Mutex<Coming>>,
    options: Options,
    pub(super) resources: Resources,
    thread: Option<JoinHandle<()>>,
    /// A failure that the guest can trigger at will is logged once.
    warned: bool,
}

impl Accel {
    /// Creates a port without applications.
    ///
    /// # Errors
    /// The sizes are invalid, or the host lacks what the port needs.
    pub fn new(options: Options, resources: Resources) -> Result<Self, Error> {
        Self::with_devices(options, resources, pages::MAJOR)
    }

    /// Like [`Accel::new`], for device files with this major number.
    pub(super) fn with_devices(
        options: Options,
        resources: Resources,
        major: u32,
    ) -> Result<Self, Error> {
        let Options {
            slices: count,
            slice_size: size,
            ..
        } = options;
        let whole = window_size(count, size).ok_or(Error::Sizes {
            slices: count,
            size,
        })?;
        let mut config = ConfigSpace::new(Identity {
            vendor: port::VENDOR,
            device: port::DEVICE,
            subsystem_vendor: port::VENDOR,
            subsystem: port::DEVICE,
            revision: options.apis.interface() as u8,
            class: port::CLASS,
        });
        let flat = BarKind::Memory32 {
            prefetchable: false,
        };
        let wide = BarKind::Memory64 { prefetchable: true };
        for (bar, kind, size) in [
            (REGISTERS, flat, at::SIZE),
            (DOORBELLS, flat, u64::from(count) * DOORBELL),
            (WINDOW, wide, whole),
        ] {
            let index = bar_index(bar);
            config.add_bar(BarRequest { index, kind, size })?;
        }
        if options.pages > 0 {
            // Not prefetchable, so that the guest's kernel has it mapped uncached, as device pages
            // are on the host.
            config.add_bar(BarRequest {
                index: bar_index(PAGES),
                kind: BarKind::Memory64 {
                    prefetchable: false,
                },
                size: options.pages,
            })?;
        }
        // At most MOST_SLICES + 1.
        let vectors = count as u16 + 1;
        let registers = bar_index(REGISTERS);
        let msix_capability = MsixCapability::add(
            &mut config,
            vectors,
            (registers, at::TABLE as u32),
            (registers, at::PENDING as u32),
        )?;
        let msix = Arc::new(MsixTable::new(vectors));
        config.set(offsets::INTERRUPT_PIN, &[1]);
        let line = Arc::<PortLine>::default();
        let slices = Arc::new(Slices::new(count).map_err(Error::EventFd)?);
        let pages = match options.pages {
            0 => None,
            size => Some(Arc::new(Pages::new(size, major, Arc::clone(&slices))?)),
        };
        let bells: Result<Vec<_>, _> = (0..count).map(|_| EventFd::new(EFD_NONBLOCK)).collect();
        let doorbells: Arc<[EventFd]> = bells.map_err(Error::EventFd)?.into();
        let window = Arc::new(Window::new(count, size)?);
        let account = Arc::new(Account::create()?);
        let pool = Pool {
            socket: options.socket.clone(),
            device: options.device.clone(),
        };
        let attach = Arc::new(Attach::new(
            (Arc::clone(&slices), Arc::clone(&window)),
            Arc::clone(&account),
            Arc::clone(&doorbells),
            Arc::clone(&msix),
            (options.apis, attachment(&options), pool),
        ));
        Ok(Self {
            config,
            msix_capability,
            registers: Arc::new(Registers {
                slices: Arc::clone(&slices),
                apis: options.apis,
                slice_size: size,
                msix: Arc::clone(&msix),
                line: Arc::clone(&line),
                mailbox: Arc::default(),
            }),
            msix,
            line,
            place: None,
            trapped_doorbells: Arc::new(Doorbells(Arc::clone(&doorbells))),
            doorbells,
            listening: None,
            placed: None,
            shown: None,
            window,
            pages,
            account,
            attach,
            desk: Arc::new(Desk::new(
                Arc::clone(&slices),
                Arc::clone(&resources.spawner),
                &options.thread_name,
            )),
            saved: Arc::default(),
            coming: Arc::default(),
            slices,
            options,
            resources,
            thread: None,
            warned: false,
        })
    }

    fn service(&self) -> Service {
        self.desk.open();
        Service {
            slices: Arc::clone(&self.slices),
            window: Arc::clone(&self.window),
            msix: Arc::clone(&self.msix),
            line: Arc::clone(&self.line),
            attach: Arc::clone(&self.attach),
            desk: Arc::clone(&self.desk),
            requests: self
                .pages
                .clone()
                .map(|pages| RefCell::new(Requests::new(pages))),
            name: self.options.thread_name.clone(),
            warnings: RefCell::default(),
        }
    }

    /// What is behind BAR 4, if the port has that.
    pub fn pages(&self) -> Option<&Arc<Pages>> {
        self.pages.as_ref()
    }

    /// A handle to move its applications.
    pub fn handle(&self) -> Handle {
        Handle {
            attach: Arc::clone(&self.attach),
            slices: Arc::clone(&self.slices),
            mailbox: Arc::clone(&self.registers.mailbox),
            desk: Arc::clone(&self.desk),
            spawner: Arc::clone(&self.resources.spawner),
            thread_name: self.options.thread_name.clone(),
            saved: Arc::clone(&self.saved),
            coming: Arc::clone(&self.coming),
        }
    }

    /// Allocates what workers need before the port is plugged in, so that they can take over
    /// applications that still run elsewhere ([`Handle::prepare`]).
    ///
    /// # Errors
    /// The platform has no interrupts left.
    pub fn stand_by(&self) -> io::Result<()> {
        // The requester ID is unknown until it is plugged in, but the messages are set by then.
        let vectors = self.resources.msi.allocate(self.msix.count(), 0)?;
        self.msix.attach(vectors);
        Ok(())
    }

    /// Sets the archive of its applications, from the snapshot or migration that it is restored
    /// from.
    pub fn set_archive(&mut self, archive: Option<Arc<File>>) {
        self.options.archive = archive;
    }

    /// Restores the applications of a snapshot: the contents of their slices, and the images that
    /// workers must take over before the guest runs ([`Handle::take_up`]).
    fn restore_slices(&mut self, slices: &[SavedSlice]) -> Result<(), LifecycleError> {
        // The archive uses the host's memory, and is read once.
        let archive = self.options.archive.take();
        let archive = archive.filter(|_| !slices.is_empty());
        if archive.is_none() && !slices.is_empty() {
            return Err(LifecycleError::WrongState(
                "the state has applications of the accelerator, but their archive is not there",
            ));
        }
        if slices.len() > self.slices.count() as usize {
            return Err(LifecycleError::WrongState(
                "the state has more applications than the accelerator has slices",
            ));
        }
        let host = |source| LifecycleError::Host {
            action: "read the state of an accelerator's applications",
            source,
        };
        check_pieces(slices).map_err(host)?;
        let standby = mem::take(&mut self.coming.lock_unpoisoned().standby);
        let mut wanted = BTreeSet::new();
        let mut images = Vec::new();
        let mut seen = BTreeSet::new();
        for (one, archive) in slices.iter().zip(archive.iter().cycle()) {
            let slice = one.slice as usize;
            if !seen.insert(slice) {
                return Err(LifecycleError::WrongState(
                    "the state has two applications in one slice of the accelerator",
                ));
            }
            let known = standby.get(&slice).map(|known| known.rounds);
            if let Some(image) = self.restore_slice(one, archive, known)? {
                images.push((slice, image));
            }
            if one.rounds > 0 {
                wanted.insert(slice);
            }
        }
        let all = standby.into_iter();
        let (standby, unwanted): (_, BTreeMap<_, _>) =
            all.partition(|(slice, _)| wanted.contains(slice));
        for slice in unwanted.keys().filter(|slice| !seen.contains(slice)) {
            // Its application has ended since it was copied; the next one needs rings of all
            // zeroes.
            let renewed = self.window.renew(*slice);
            renewed.map_err(|error| host(io::Error::other(error)))?;
            self.slices.set_claim(*slice, Claim::default());
        }
        let mut coming = self.coming.lock_unpoisoned();
        coming.images = images;
        coming.standby = standby;
        coming.unwanted = unwanted;
        Ok(())
    }

    /// Restores the contents of a slice. `known` is the number of rounds that a standby worker has
    /// received. Returns the image that a worker must take over, if any.
    fn restore_slice(
        &self,
        one: &SavedSlice,
        archive: &File,
        known: Option<u32>,
    ) -> Result<Option<File>, LifecycleError> {
        let slice = one.slice as usize;
        let host = |source| LifecycleError::Host {
            action: "read the state of an accelerator's applications",
            source,
        };
        let is_rest = one.rounds > 0;
        if is_rest && (known != Some(one.rounds) || one.image.is_none()) {
            return Err(LifecycleError::WrongState(
                "the state has the rest of an application of which nothing has come before",
            ));
        }
        if known.is_some() && !is_rest {
            // Memory that another worker has received must not be used for anything else.
            let renewed = self.window.renew(slice);
            renewed.map_err(|error| host(io::Error::other(error)))?;
        }
        let fits = one.window.length == self.options.slice_size;
        let file = self.handle().window(slice).ok().filter(|_| fits);
        let Some(file) = file else {
            return Err(LifecycleError::WrongState(
                "the state is of an accelerator with other slices",
            ));
        };
        let read = match is_rest {
            true => one.window.read_changed(archive, &file, &one.kept),
            false => one.window.read(archive, &file),
        };
        read.map_err(host)?;
        let Some(image) = &one.image else {
            return Ok(None);
        };
        let file = control::image().map_err(host)?;
        image.read(archive, &file).map_err(host)?;
        self.slices.set_claim(slice, one.claim);
        Ok(Some(file))
    }

    fn warn(&mut self, action: &str, error: &io::Error) {
        if !self.warned {
            self.warned = true;
            log::warn!("{}: cannot {action}: {error}", self.options.thread_name);
        }
    }

    /// Registers the doorbells with KVM at a new address, and removes the earlier registrations.
    fn listen_at(&mut self, address: Option<u64>) {
        let mut failed = None;
        let before = self.listening.take();
        for (slice, bell) in self.doorbells.iter().enumerate() {
            let at = |base: u64| base.saturating_add(slice as u64 * DOORBELL);
            if let Some(base) = before {
                // Fails if the doorbell was not registered.
                let _ = self.resources.doorbells.unregister(bell, at(base));
            }
            if let Some(base) = address {
                failed = self
                    .resources
                    .doorbells
                    .register(bell, at(base))
                    .err()
                    .or(failed);
            }
        }
        self.listening = address;
        if let Some(error) = failed {
            // Writes are trapped instead.
            self.warn("have KVM take doorbells", &error);
        }
    }

    fn place(&mut self, address: Option<u64>) {
        self.placed = None;
        let memory = (self.window.base(), self.window.size());
        self.placed = self.map(memory, address);
    }

    fn show(&mut self, address: Option<u64>) {
        self.shown = None;
        let Some(pages) = &self.pages else { return };
        let memory = (pages.base(), pages.size());
        self.shown = self.map(memory, address);
    }

    /// Maps host memory into the guest.
    fn map(&mut self, (base, len): (*mut u8, u64), at: Option<u64>) -> Option<Box<dyn Mapping>> {
        let memory = HostMemory {
            address: base,
            len,
            read_only: false,
        };
        let mapped = self
            .resources
            .space
            .map(memory, PAGE, Some(GuestAddress(at?)));
        mapped
            .map_err(|error| self.warn("map its memory into the guest", &error))
            .ok()
    }

    /// Updates the interrupts from the guest's registers.
    fn update_interrupts(&self) {
        let before = self.msix.is_enabled();
        self.msix_capability.update(&self.config, &self.msix);
        let disabled = self.config.command() & COMMAND_INTERRUPT_DISABLE != 0;
        self.line.disable(disabled);
        if self.msix.is_enabled() != before {
            self.slices.wake();
        }
    }

    fn join_line(&self) -> io::Result<()> {
        let Some(place) = self.place else {
            return Ok(());
        };
        self.line.join(&*self.resources.lines, place)?;
        self.slices.wake();
        Ok(())
    }

    fn stop(&mut self) {
        self.slices.stop();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("{}: its thread has panicked", self.options.thread_name);
        }
    }
}

/// The part of the attachment that is equal for all slices; each slice has its own API.
fn attachment(options: &Options) -> Attachment {
    let api = options.apis.first().unwrap_or_default();
    let mut attachment = Attachment::new(spoken(api), options.slice_size);
    attachment.memory = options.memory;
    attachment.weight = options.weight;
    attachment.latency = options.latency;
    attachment.client.clone_from(&options.client);
    attachment.compiled.clone_from(&options.compiled);
    attachment
}

/// Size of the window in bytes, if the number and size of slices are valid.
fn window_size(slices: u32, slice: u64) -> Option<u64> {
    let fits = slices.is_power_of_two()
        && slices <= MOST_SLICES
        && slice.is_power_of_two()
        && slice >= SMALLEST;
    let whole = u64::from(slices).checked_mul(slice)?;
    (fits && whole <= 1 << 46).then_some(whole)
}

/// Index of one of the BARs.
fn bar_index(bar: u8) -> BarIndex {
    BarIndex::new(bar).unwrap_or(BarIndex::ZERO)
}

impl PciFunction for Accel {
    fn config(&self) -> &ConfigSpace {
        &self.config
    }

    fn config_mut(&mut self) -> &mut ConfigSpace {
        &mut self.config
    }

    fn read_config(&mut self, offset: usize, data: &mut [u8]) {
        self.config.read(offset, data);
        let status = offsets::STATUS.checked_sub(offset);
        if let Some(status) = status.and_then(|at| data.get_mut(at))
            && self.line.is_due()
        {
            *status |= STATUS_INTERRUPT;
        }
    }

    fn write_config(&mut self, offset: usize, data: &[u8]) {
        self.config.write(offset, data);
        self.update_interrupts();
    }

    fn bar_device(&self, index: BarIndex) -> Option<Arc<dyn BusDevice>> {
        match index.get() {
            REGISTERS => Some(Arc::clone(&self.registers) as Arc<dyn BusDevice>),
            DOORBELLS => Some(Arc::clone(&self.trapped_doorbells) as Arc<dyn BusDevice>),
            _ => None,
        }
    }

    fn bar_mapped(&mut self, index: BarIndex, address: Option<u64>) {
        match index.get() {
            DOORBELLS => self.listen_at(address),
            WINDOW => self.place(address),
            PAGES => self.show(address),
            _ => {}
        }
    }

    fn plugged(&mut self, bdf: Bdf) -> io::Result<()> {
        if self.msix.vectors().is_none() {
            let vectors = self.msix.count();
            let vectors = self.resources.msi.allocate(vectors, bdf.requester_id())?;
            self.msix.attach(vectors);
        }
        self.place = Some(bdf);
        self.join_line()?;
        let service = self.service();
        self.thread = Some(self.resources.spawner.spawn(
            ThreadRole::Accel,
            &self.options.thread_name,
            Box::new(move || service.run()),
        )?);
        Ok(())
    }

    /// Ends the workers: the thread closes their connections.
    fn unplugged(&mut self) {
        self.stop();
        self.line.leave();
        self.place = None;
        self.msix.reset();
    }

    /// Workers complete the calls that they have received, and then idle, because no application
    /// sends more. They reach no guest memory but their slices, which only the guest's applications
    /// access. A worker that was stopped during its turn would keep other clients from the device.
    /// The line is left, so that no saved interrupt controller has it asserted forever.
    fn pause(&mut self) -> Result<(), LifecycleError> {
        self.line.leave();
        Ok(())
    }

    fn resume(&mut self) -> Result<(), LifecycleError> {
        let port = self.handle();
        let coming = mem::take(&mut *port.coming());
        if !coming.images.is_empty() {
            return Err(LifecycleError::WrongState(
                "no worker has taken up the accelerator's applications",
            ));
        }
        for worker in coming.workers {
            let slice = worker.slice();
            if let Err(error) = worker.go(&port) {
                let name = &self.options.thread_name;
                log::warn!("{name}: the application of slice {slice} is gone: {error}");
                self.slices.lose(slice);
            }
        }
        self.join_line().map_err(|source| LifecycleError::Host {
            action: "connect an accelerator port with its interrupt line",
            source,
        })
    }

    /// Ends all workers: to their applications, the device fails.
    fn detach(&mut self) -> Result<(), LifecycleError> {
        self.slices.close_all();
        let start = Instant::now();
        while self.slices.in_use() > 0 {
            if start.elapsed() > PATIENCE {
                return Err(LifecycleError::WrongState(
                    "its workers do not end: see the log of gantry-accel",
                ));
            }
            thread::sleep(SOON);
        }
        Ok(())
    }

    fn save(&mut self) -> Result<Value, LifecycleError> {
        let slices = self.saved.lock_unpoisoned().clone();
        if slices.is_none() && self.slices.in_use() > 0 {
            return Err(LifecycleError::WrongState(match self.pages {
                None => {
                    "applications of the guest use the accelerator: end them, let the snapshot \
                         have them (accel=save), or let it take the accelerator from them (detach)"
                }
                Some(_) => NATIVE,
            }));
        }
        Ok(serde_json::to_value(PortState {
            config: self.config.save(),
            msix: self.msix.save(),
            line: self.line.is_wanted(),
            noted: self.line.noted(),
            changes: self.slices.changes(),
            slices: slices.unwrap_or_default(),
        })?)
    }

    fn restore(&mut self, state: Value) -> Result<(), LifecycleError> {
        let state: PortState = serde_json::from_value(state)?;
        self.config.restore(&state.config)?;
        self.msix.restore(&state.msix)?;
        self.line.want(state.line);
        self.line.renote(state.noted);
        self.restore_slices(&state.slices)?;
        let states = state.slices.iter();
        let states = states.map(|one| (one.slice as usize, one.state, one.claim));
        self.slices.restore(states, state.changes);
        // The capability is what the guest reads, so it takes precedence.
        self.update_interrupts();
        Ok(())
    }

    fn reset(&mut self) -> Result<(), LifecycleError> {
        self.line.want(false);
        self.slices.close_all();
        self.registers.mailbox.withdraw();
        self.msix.reset();
        self.config.reset();
        self.line.disable(false);
        Ok(())
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        vec![
            ("slices_in_use", self.slices.in_use() as u64),
            (
                "workers_started",
                self.slices.opened.load(Ordering::Relaxed),
            ),
            ("workers_lost", self.slices.lost.load(Ordering::Relaxed)),
            (
                "contents_followed",
                self.slices.followed.load(Ordering::Relaxed),
            ),
            ("device_memory_bytes", self.account.0.total()),
            ("line_interrupts", self.line.asserted()),
            ("sleepers_woken", self.line.rings()),
        ]
    }
}

impl Drop for Accel {
    fn drop(&mut self) {
        self.stop();
    }
}
