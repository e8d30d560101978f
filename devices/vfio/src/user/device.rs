//! A device that another process serves.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::Path,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use base::{Chain, Unpoisoned};
use device_model::{memory::GuestMemory, thread::ThreadSpawner};
use rustix::fs::SealFlags;
use vfio_bindings::bindings::vfio::{
    VFIO_IRQ_SET_ACTION_TRIGGER, VFIO_IRQ_SET_ACTION_UNMASK, VFIO_IRQ_SET_DATA_EVENTFD,
    VFIO_IRQ_SET_DATA_NONE, VFIO_PCI_CONFIG_REGION_INDEX, VFIO_REGION_INFO_FLAG_MMAP,
    VFIO_REGION_INFO_FLAG_WRITE,
};
use vfio_client::{
    connection::{self, Answer, Connection, Deadline},
    wire::{self, DeviceInfo, IrqInfo, Lie, RegionInfo},
};
use vfio_user::{Command, DmaMapFlags};
use vm_memory::{Address, GuestAddressSpace, GuestMemoryBackend, GuestMemoryRegion};
use vmm_sys_util::eventfd::EventFd;

use super::{Error, Failure, watch::watch};
use crate::{
    capabilities::{self, CapabilityKind},
    device::{Device, IrqRun, Irqs, Mappable, ResetError},
};

/// Timeouts for a server.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// For all replies until its device is set up.
    pub open: Duration,
    /// For each reply after that.
    pub answer: Duration,
}

impl Default for Patience {
    /// A vCPU waits for a reply, so this must be less than the 20 s after which a Linux guest
    /// considers the vCPU dead.
    fn default() -> Self {
        Self {
            open: Duration::from_secs(10),
            answer: Duration::from_secs(5),
        }
    }
}

/// Maximum length of a reply without variable data.
const SHORT: usize = 256;
/// Maximum width of a region access in bytes.
const WIDEST: usize = 8;
const PAGE: u64 = 4096;

/// State of the connection.
enum Link {
    Alive(Connection),
    /// It failed, or the device is being removed.
    Ended,
}

/// State shared by all users of the connection.
struct Shared {
    name: String,
    link: Mutex<Link>,
    /// Called once, when the server is lost.
    lost: Box<dyn Fn(&Failure) + Send + Sync>,
}

impl Shared {
    fn link(&self) -> MutexGuard<'_, Link> {
        self.link.lock_unpoisoned()
    }

    /// Ends the connection; false if it had already ended.
    fn end(&self) -> bool {
        let link = std::mem::replace(&mut *self.link(), Link::Ended);
        let Link::Alive(connection) = link else {
            return false;
        };
        // Wakes the watcher thread; the socket may already be shut down.
        let _ = connection.stream().shutdown(std::net::Shutdown::Both);
        true
    }

    fn lose(&self, failure: &Failure) {
        if self.end() {
            (self.lost)(failure);
        }
    }
}

/// The register bit that enables a kind of interrupts.
struct Control {
    irqs: Irqs,
    /// Offset in configuration space.
    at: usize,
    /// The enable bit.
    enable: u16,
}

struct Region {
    info: RegionInfo,
    /// The memory behind it, if it can be mapped.
    file: Option<OwnedFd>,
}

/// A device that another process serves.
pub struct UserDevice {
    shared: Arc<Shared>,
    info: DeviceInfo,
    regions: Vec<Region>,
    /// The interrupts of each kind.
    irqs: Vec<IrqInfo>,
    /// The message control registers of MSI and MSI-X.
    controls: Vec<Control>,
    patience: Patience,
    memory: GuestMemory,
    /// Mapped RAM: length by guest-physical address.
    mapped: Mutex<BTreeMap<u64, u64>>,
    /// A server's refusals are logged once: the guest could repeat its access at will.
    warned: AtomicBool,
    watcher: Option<JoinHandle<()>>,
}

/// What a device of another process needs from the VM.
pub struct Surroundings<'a> {
    /// The memory that it can reach.
    pub memory: GuestMemory,
    /// Starts its threads.
    pub spawner: &'a dyn ThreadSpawner,
    /// Name of its thread.
    pub thread: &'a str,
    /// Timeouts for its server.
    pub patience: Patience,
    /// Called once, when the server is lost.
    pub lost: Box<dyn Fn(&Failure) + Send + Sync>,
}

impl UserDevice {
    /// Connects to the server that listens on a socket.
    pub fn connect(path: &Path, surroundings: Surroundings) -> Result<Self, Error> {
        let stream = connection::connect(path).map_err(Failure::Connect)?;
        Self::new(&path.to_string_lossy(), stream, surroundings)
    }

    /// Takes over the device of the server at the other end of `stream`, and gives it access to
    /// RAM. `name` is used in messages.
    pub fn new(name: &str, stream: UnixStream, surroundings: Surroundings) -> Result<Self, Error> {
        let deadline = Deadline::after(surroundings.patience.open);
        let mut connection = Connection::new(stream, deadline)?;
        let mut ask =
            |command, body: &[u8], max| connection.ask(command, &[body], &[], max, deadline);
        let command = Command::DeviceGetInfo;
        let answer = ask(command, &wire::device_info(), SHORT)?;
        let info = DeviceInfo::parse(&answer.body).map_err(|source| lie(command, source))?;

        let mut regions = Vec::new();
        for index in 0..=VFIO_PCI_CONFIG_REGION_INDEX {
            let command = Command::DeviceGetRegionInfo;
            let max = wire::MAX_REGION_INFO as usize;
            let answer = ask(command, &wire::region_info(index), max)?;
            regions.push(region(name, index, answer).map_err(|source| lie(command, source))?);
        }
        // At least the header of configuration space is read below.
        let config = regions.last().map_or(0, |region| region.info.size);
        if !(0x100..=0x1000).contains(&config) {
            return Err(Error::Config { size: config });
        }
        let mut irqs = Vec::new();
        for index in 0..info.irqs {
            let command = Command::GetIrqInfo;
            let answer = ask(command, &wire::irq_info(index), SHORT)?;
            let info = IrqInfo::parse(&answer.body, index);
            irqs.push(info.map_err(|source| lie(command, source))?);
        }
        let stream = connection.stream().try_clone().map_err(Error::Watch)?;
        let shared = Arc::new(Shared {
            name: name.to_owned(),
            link: Mutex::new(Link::Alive(connection)),
            lost: surroundings.lost,
        });
        let mut device = Self {
            shared: Arc::clone(&shared),
            info,
            regions,
            irqs,
            controls: Vec::new(),
            patience: surroundings.patience,
            memory: surroundings.memory,
            mapped: Mutex::default(),
            warned: AtomicBool::new(false),
            watcher: None,
        };
        device.find_controls();
        device.map_ram(deadline)?;
        let gone = move || shared.lose(&Failure::Closed);
        let watcher = watch(stream, surroundings.thread, surroundings.spawner, gone);
        device.watcher = Some(watcher.map_err(Error::Watch)?);
        Ok(device)
    }

    fn deadline(&self) -> Deadline {
        Deadline::after(self.patience.answer)
    }

    /// Whether the server is connected and has violated no rule of the protocol.
    pub fn is_alive(&self) -> bool {
        matches!(*self.shared.link(), Link::Alive(_))
    }

    /// Maps RAM that was added and unmaps RAM that was removed. Does nothing if the server is lost.
    pub fn memory_changed(&self) -> Result<(), Error> {
        match self.map_ram(self.deadline()) {
            Err(Error::Gone) => Ok(()),
            mapped => mapped,
        }
    }

    fn map_ram(&self, deadline: Deadline) -> Result<(), Error> {
        let mut mapped = self.mapped.lock_unpoisoned();
        let ram = self.memory.memory();
        let starts: BTreeSet<_> = ram
            .iter()
            .map(|region| region.start_addr().raw_value())
            .collect();
        let gone: Vec<_> = mapped
            .iter()
            .filter(|(guest, _)| !starts.contains(guest))
            .map(|(guest, len)| (*guest, *len))
            .collect();
        for (guest, len) in gone {
            let body = wire::dma_unmap(guest, len);
            self.ask(Command::DmaUnmap, &[&body], &[], SHORT, deadline)?;
            mapped.remove(&guest);
        }
        for region in ram.iter() {
            let (guest, len) = (region.start_addr().raw_value(), region.len());
            if mapped.contains_key(&guest) {
                continue;
            }
            let shared = region.get_mmap().flags() & libc::MAP_SHARED != 0;
            let Some(file) = region.file_offset().filter(|_| shared) else {
                return Err(Error::Private { guest });
            };
            let flags = DmaMapFlags::READ_WRITE.bits();
            let body = wire::dma_map(flags, file.start(), guest, len);
            let descriptor = [file.file().as_fd()];
            self.ask(Command::DmaMap, &[&body], &descriptor, SHORT, deadline)?;
            mapped.insert(guest, len);
        }
        Ok(())
    }

    /// Sends a request to the server. After any failure other than a refusal, the server is lost.
    fn ask(
        &self,
        command: Command,
        body: &[&[u8]],
        descriptors: &[BorrowedFd],
        max: usize,
        deadline: Deadline,
    ) -> Result<Answer, Error> {
        let mut link = self.shared.link();
        let Link::Alive(connection) = &mut *link else {
            return Err(Error::Gone);
        };
        let answer = connection.ask(command, body, descriptors, max, deadline);
        drop(link);
        answer.map_err(|failure| self.failed(failure))
    }

    fn failed(&self, failure: Failure) -> Error {
        if !failure.is_refusal() {
            self.shared.lose(&failure);
        }
        Error::Server(failure)
    }

    /// Checks a reply; a server that sends an invalid one is lost.
    fn checked<T>(&self, command: Command, answer: Result<T, Lie>) -> Result<T, Error> {
        answer.map_err(|source| self.failed(lie(command, source)))
    }

    /// Reads from a region, until `deadline`: a vCPU waits for all pieces.
    fn read_within(
        &self,
        region: u32,
        offset: u64,
        data: &mut [u8],
        deadline: Deadline,
    ) -> Result<(), Error> {
        for piece in pieces(offset, data.len(), widest(region)) {
            let at = offset + piece.start as u64;
            self.read_piece(region, at, &mut data[piece], deadline)?;
        }
        Ok(())
    }

    /// Writes to a region, until `deadline`.
    fn write_within(
        &self,
        region: u32,
        offset: u64,
        data: &[u8],
        deadline: Deadline,
    ) -> Result<(), Error> {
        for piece in pieces(offset, data.len(), widest(region)) {
            let at = offset + piece.start as u64;
            self.write_piece(region, at, &data[piece], deadline)?;
        }
        Ok(())
    }

    fn read_piece(
        &self,
        region: u32,
        offset: u64,
        data: &mut [u8],
        deadline: Deadline,
    ) -> Result<(), Error> {
        // At most WIDEST.
        let count = data.len() as u32;
        let command = Command::RegionRead;
        let body = wire::access(region, offset, count);
        let max = wire::ACCESS + WIDEST;
        let answer = self.ask(command, &[&body], &[], max, deadline)?;
        let read = wire::parse_read(&answer.body, region, offset, count);
        data.copy_from_slice(self.checked(command, read)?);
        Ok(())
    }

    fn write_piece(
        &self,
        region: u32,
        offset: u64,
        data: &[u8],
        deadline: Deadline,
    ) -> Result<(), Error> {
        let count = data.len() as u32;
        let command = Command::RegionWrite;
        let body = wire::access(region, offset, count);
        let max = wire::ACCESS + WIDEST;
        let answer = self.ask(command, &[&body, data], &[], max, deadline)?;
        let written = wire::parse_write(&answer.body, region, offset, count);
        self.checked(command, written)
    }

    /// Whether an access is within a region; a server need not check this.
    fn has(&self, region: u32, offset: u64, len: usize) -> bool {
        offset.saturating_add(len as u64) <= self.region_size(region)
    }

    fn warn(&self, action: &str, error: &Error) {
        if !matches!(error, Error::Gone) && !self.warned.swap(true, Ordering::Relaxed) {
            let why = Chain(error);
            log::warn!("device {}: {action} failed: {why}", self.shared.name);
        }
    }

    fn region(&self, index: u32) -> Option<&Region> {
        self.regions.get(index as usize)
    }

    fn irq_info(&self, irqs: Irqs) -> Option<&IrqInfo> {
        self.irqs.get(irqs as usize)
    }

    fn find_controls(&mut self) {
        let mut header = [0; 0x100];
        self.read_config(0, &mut header);
        for capability in capabilities::visible(&header) {
            let (irqs, enable) = match capability.kind {
                CapabilityKind::Msi => (Irqs::Msi, 1 << 0),
                CapabilityKind::Msix => (Irqs::Msix, 1 << 15),
                _ => continue,
            };
            self.controls.push(Control {
                irqs,
                at: capability.at + 2,
                enable,
            });
        }
    }

    /// Enables or disables a kind of interrupts in the device's own configuration space, as the
    /// kernel does for a device of the host: servers evaluate it in addition to their eventfds.
    fn enable(&self, irqs: Irqs, on: bool, deadline: Deadline) {
        let Some(control) = self.controls.iter().find(|control| control.irqs == irqs) else {
            return;
        };
        // `find_controls` has found it within configuration space.
        let (region, at) = (VFIO_PCI_CONFIG_REGION_INDEX, control.at as u64);
        let change = || {
            let mut bytes = [0; 2];
            self.read_within(region, at, &mut bytes, deadline)?;
            let value = u16::from_ne_bytes(bytes) & !control.enable;
            let value = value | if on { control.enable } else { 0 };
            self.write_within(region, at, &value.to_ne_bytes(), deadline)
        };
        if let Err(error) = change() {
            self.warn("changing its interrupts", &error);
        }
    }

    /// Connects eventfds to consecutive interrupts, from index `first` on.
    fn set_irqs(
        &self,
        irqs: Irqs,
        first: usize,
        eventfds: &[&EventFd],
        deadline: Deadline,
    ) -> Result<(), Error> {
        let most = match &*self.shared.link() {
            Link::Alive(connection) => connection.limits().descriptors,
            Link::Ended => return Err(Error::Gone),
        };
        for (number, chunk) in eventfds.chunks(most).enumerate() {
            let flags = VFIO_IRQ_SET_DATA_EVENTFD | VFIO_IRQ_SET_ACTION_TRIGGER;
            // Less than the number of interrupts, which the caller has checked.
            let start = (first + number * most) as u32;
            let body = wire::set_irqs(irqs as u32, flags, start, chunk.len() as u32);
            let descriptors: Vec<_> = chunk
                .iter()
                // SAFETY: the caller's eventfds are open until this function returns.
                .map(|fd| unsafe { BorrowedFd::borrow_raw(fd.as_raw_fd()) })
                .collect();
            self.ask(Command::SetIrqs, &[&body], &descriptors, SHORT, deadline)?;
        }
        Ok(())
    }

    /// Connects runs of interrupts. There may be a thousand, but the server has no more time for
    /// all of them than for one, because a vCPU waits.
    fn connect_irqs<'a>(
        &self,
        irqs: Irqs,
        runs: impl Iterator<Item = (u16, &'a [Option<&'a EventFd>])>,
    ) -> Result<(), Error> {
        let deadline = self.deadline();
        let count = self.irq_count(irqs);
        for (first, eventfds) in runs {
            let mut at = usize::from(first);
            let wanted = at + eventfds.len();
            if wanted > count as usize {
                return Err(Error::Interrupts { wanted, count });
            }
            // A message cannot skip an interrupt.
            for run in eventfds.split(Option::is_none) {
                let run: Vec<_> = run.iter().copied().flatten().collect();
                self.set_irqs(irqs, at, &run, deadline)?;
                at += run.len() + 1;
            }
        }
        self.enable(irqs, true, deadline);
        Ok(())
    }
}

fn lie(command: Command, source: Lie) -> Failure {
    Failure::Lie { command, source }
}

/// Parses the reply about a region, and determines whether its memory can be mapped.
fn region(name: &str, index: u32, answer: Answer) -> Result<Region, Lie> {
    let info = RegionInfo::parse(&answer.body, index)?;
    let mappable = info.flags & VFIO_REGION_INFO_FLAG_MMAP != 0;
    let descriptor = answer.descriptors.into_iter().next();
    let file = descriptor.filter(|_| mappable).and_then(|file| {
        let end = info.areas.iter().map(|(_, end)| *end).max().unwrap_or(0);
        match check_memory(&file, info.offset, end) {
            Ok(()) => Some(file),
            Err(why) => {
                log::warn!(
                    "device {name}: BAR {index} is not mapped into the guest, each access goes to \
                     the server: {why}"
                );
                None
            }
        }
    });
    Ok(Region { info, file })
}

/// Checks that memory exists up to `end` and cannot shrink: it is sealed against shrinking here,
/// unless it already is.
fn check_memory(file: &OwnedFd, offset: u64, end: u64) -> Result<(), String> {
    if !offset.is_multiple_of(PAGE) {
        return Err(format!("its memory starts at {offset:#x}, within a page"));
    }
    let seals = rustix::fs::fcntl_get_seals(file);
    if !seals.is_ok_and(|seals| seals.contains(SealFlags::SHRINK)) {
        rustix::fs::fcntl_add_seals(file, SealFlags::SHRINK).map_err(|_| {
            "its memory could be taken away at any time; the server should create it with \
             memfd_create and MFD_ALLOW_SEALING"
                .to_owned()
        })?;
    }
    let len = file
        .try_clone()
        .map(File::from)
        .and_then(|file| file.metadata());
    let len = len.map_err(|error| error.to_string())?.len();
    match offset.checked_add(end) {
        Some(needed) if needed <= len => Ok(()),
        _ => Err(format!("its memory has only {len:#x} bytes")),
    }
}

/// Splits an access into aligned pieces of at most `widest` bytes, as on a bus.
fn pieces(offset: u64, len: usize, widest: usize) -> impl Iterator<Item = std::ops::Range<usize>> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let left = len - at;
        let mut width = widest;
        while width > left || !(offset + at as u64).is_multiple_of(width as u64) {
            width /= 2;
            if width == 0 {
                return None;
            }
        }
        at += width;
        Some(at - width..at)
    })
}

/// Maximum access width: registers of configuration space are at most 4 bytes wide.
fn widest(region: u32) -> usize {
    if region == VFIO_PCI_CONFIG_REGION_INDEX {
        4
    } else {
        WIDEST
    }
}

impl Device for UserDevice {
    fn name(&self) -> &str {
        &self.shared.name
    }

    fn region_size(&self, region: u32) -> u64 {
        self.region(region).map_or(0, |region| region.info.size)
    }

    fn mappable(&self, region: u32) -> Option<Mappable<'_>> {
        let Region { info, file } = self.region(region)?;
        Some(Mappable {
            file: file.as_ref()?.as_fd(),
            offset: info.offset,
            areas: info.areas.clone(),
            writable: info.flags & VFIO_REGION_INFO_FLAG_WRITE != 0,
        })
    }

    fn read(&self, region: u32, offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        if !self.has(region, offset, data.len()) {
            return;
        }
        if let Err(error) = self.read_within(region, offset, data, self.deadline()) {
            data.fill(0xff);
            self.warn("a read", &error);
        }
    }

    fn write(&self, region: u32, offset: u64, data: &[u8]) {
        if !self.has(region, offset, data.len()) {
            return;
        }
        if let Err(error) = self.write_within(region, offset, data, self.deadline()) {
            self.warn("a write", &error);
        }
    }

    fn irq_count(&self, irqs: Irqs) -> u32 {
        self.irq_info(irqs).map_or(0, |info| info.count)
    }

    fn irqs_grow(&self, irqs: Irqs) -> bool {
        self.irq_info(irqs).is_some_and(|info| info.grows)
    }

    fn connect(&self, irqs: Irqs, first: u16, eventfds: &[Option<&EventFd>]) -> io::Result<()> {
        unless_gone(self.connect_irqs(irqs, std::iter::once((first, eventfds))))
    }

    fn connect_runs(&self, irqs: Irqs, runs: &[IrqRun]) -> io::Result<()> {
        let runs = runs.iter().map(|(first, eventfds)| (*first, &**eventfds));
        unless_gone(self.connect_irqs(irqs, runs))
    }

    fn connect_line(&self, assert: &EventFd, served: &EventFd) -> io::Result<()> {
        let deadline = self.deadline();
        let connect = || {
            self.set_irqs(Irqs::Line, 0, &[assert], deadline)?;
            let flags = VFIO_IRQ_SET_DATA_EVENTFD | VFIO_IRQ_SET_ACTION_UNMASK;
            let body = wire::set_irqs(Irqs::Line as u32, flags, 0, 1);
            // SAFETY: the caller's eventfd is open until this function returns.
            let served = unsafe { BorrowedFd::borrow_raw(served.as_raw_fd()) };
            let command = Command::SetIrqs;
            match self.ask(command, &[&body], &[served], SHORT, deadline) {
                // It does not mask its line when asserting it, and asserts it again by itself.
                Err(Error::Server(failure)) if failure.is_refusal() => Ok(()),
                answer => answer.map(drop),
            }
        };
        unless_gone(connect())
    }

    fn disconnect(&self, irqs: Irqs) -> io::Result<()> {
        let deadline = self.deadline();
        self.enable(irqs, false, deadline);
        let flags = VFIO_IRQ_SET_DATA_NONE | VFIO_IRQ_SET_ACTION_TRIGGER;
        let body = wire::set_irqs(irqs as u32, flags, 0, 0);
        let answer = self.ask(Command::SetIrqs, &[&body], &[], SHORT, deadline);
        unless_gone(answer.map(drop))
    }

    fn reset(&self) -> Result<(), ResetError> {
        if !self.info.resettable {
            let source = io::Error::new(io::ErrorKind::Unsupported, "its server offers none");
            return Err(ResetError::Failed(source));
        }
        let answer = self.ask(Command::DeviceReset, &[], &[], SHORT, self.deadline());
        Ok(unless_gone(answer.map(drop))?)
    }
}

/// A lost device raises no interrupts and has no state, so there is nothing to change.
fn unless_gone(result: Result<(), Error>) -> io::Result<()> {
    match result {
        Err(Error::Gone) => Ok(()),
        result => result.map_err(io::Error::other),
    }
}

impl Drop for UserDevice {
    fn drop(&mut self) {
        self.shared.end();
        if let Some(watcher) = self.watcher.take()
            && watcher.join().is_err()
        {
            log::error!("the thread that watched {} has panicked", self.shared.name);
        }
    }
}
