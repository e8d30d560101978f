//! The GPU as a vfio-user device, for one client at a time.

use std::{
    fs::File,
    io,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::Path,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use log::{debug, info};
use vfio_bindings::bindings::vfio::{
    VFIO_IRQ_INFO_AUTOMASKED, VFIO_IRQ_INFO_EVENTFD, VFIO_IRQ_SET_ACTION_MASK,
    VFIO_IRQ_SET_ACTION_TRIGGER, VFIO_IRQ_SET_ACTION_UNMASK, VFIO_PCI_CONFIG_REGION_INDEX,
    VFIO_PCI_INTX_IRQ_INDEX, VFIO_PCI_MSI_IRQ_INDEX, VFIO_PCI_MSIX_IRQ_INDEX,
    VFIO_REGION_INFO_FLAG_MMAP, VFIO_REGION_INFO_FLAG_READ, VFIO_REGION_INFO_FLAG_WRITE,
    vfio_region_info, vfio_region_sparse_mmap_area,
};
use vfio_user::{DmaMapFlags, DmaUnmapFlags, IrqInfo, Server, ServerBackend, ServerRegion};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{
    bars::{BAR1_BYTES, BAR3_BYTES, WINDOW_BYTES, WINDOW_START},
    config::{self, Config},
    confine::confine,
    gpu::{Delays, Gpu, Next},
    lines::{Lines, Way},
};
use crate::registers::{BAR0_BYTES, Bar};

const BAR0: u32 = 0;
const BAR1: u32 = 1;
const BAR3: u32 = 3;

/// The byte in the mirror of the PCI configuration space that re-arms the MSI.
const REARM: u64 = 0x08_8704;

/// Memory that a client lends at or above this address backs VRAM, from offset 0 on. The GPU's bus has 40 address bits,
/// so no other memory can be there. A mediator uses this to share partitions of VRAM with others without copies.
pub const VRAM_ADDRESS: u64 = 1 << 63;

/// How often the worker yields to a client before its next slice, and for how long each time.
const COURTESY: u32 = 100;
const PAUSE: Duration = Duration::from_micros(20);

/// Why a server cannot start.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Memory cannot be allocated.
    #[error("cannot make {0} MiB of VRAM: is there an address-space limit (ulimit -v)?")]
    Memory(u64, #[source] io::Error),
    /// The worker's eventfd or thread cannot be created.
    #[error("cannot start the thread that does the GPU's work")]
    Worker(#[source] io::Error),
    /// The socket cannot be created.
    #[error("cannot listen at {0}: does its folder exist, and is nobody else there?")]
    Listen(String, #[source] vfio_user::Error),
    /// The process cannot be confined.
    #[error("cannot confine this process; --no-sandbox does without")]
    Confine(#[from] base::confine::Error),
}

/// State that clients and the worker share.
struct Device {
    gpu: Gpu,
    config: Config,
    lines: Lines,
}

impl Device {
    fn way(&self) -> Way {
        match (self.config.has_msi(), self.config.has_line()) {
            (true, _) if self.config.is_master() => Way::Message,
            (false, true) => Way::Line,
            _ => Way::None,
        }
    }

    fn update(&mut self, now: u64) {
        let level = self.gpu.line(now);
        self.lines.level(level, self.way());
    }
}

struct Shared {
    device: Mutex<Device>,
    /// Wakes the worker.
    wake: EventFd,
    /// Number of client accesses that wait for the device.
    waiting: AtomicU32,
    start: Instant,
}

impl Shared {
    /// Locks the device for a client. This comes before the worker's next slice.
    fn device(&self) -> MutexGuard<'_, Device> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let device = self.device.lock().unwrap_or_else(PoisonError::into_inner);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        device
    }

    /// Locks the device for the worker. Locks are not fair, so otherwise the worker would hold it as long as it has
    /// work.
    fn device_between_clients(&self) -> MutexGuard<'_, Device> {
        for _ in 0..COURTESY {
            if self.waiting.load(Ordering::Relaxed) == 0 {
                break;
            }
            std::thread::sleep(PAUSE);
        }
        self.device.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Nanoseconds since the start; 64 bits last for centuries.
    fn now(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }

    fn wake(&self) {
        // This fails if the counter is full; then the worker is awake anyway.
        let _ = self.wake.write(1);
    }

    /// Runs the GPU forever, one slice at a time.
    fn work(&self) {
        loop {
            let mut device = self.device_between_clients();
            let now = self.now();
            let next = device.gpu.work(now);
            device.update(now);
            let unmask = device.lines.unmask_eventfd();
            drop(device);
            let timeout = match next {
                Next::Now => Some(0),
                Next::At(at) => Some(at.saturating_sub(now)),
                Next::Never => None,
            };
            if wait(&self.wake, unmask.as_ref(), timeout) {
                let mut device = self.device();
                let way = device.way();
                device.lines.unmask(way);
            }
        }
    }
}

/// Waits for either eventfd, for at most this many nanoseconds. Returns whether the line is to be unmasked.
fn wait(wake: &EventFd, unmask: Option<&OwnedFd>, timeout: Option<u64>) -> bool {
    let poll = |fd| libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    let mut polls = [
        poll(wake.as_raw_fd()),
        poll(unmask.map_or(-1, AsRawFd::as_raw_fd)),
    ];
    let time = timeout.map(|nanoseconds| libc::timespec {
        tv_sec: (nanoseconds / 1_000_000_000) as libc::time_t,
        tv_nsec: (nanoseconds % 1_000_000_000) as libc::c_long,
    });
    let time = time.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: two structures and a timeout, which outlive the call.
    let ready = unsafe { libc::ppoll(polls.as_mut_ptr(), 2, time, std::ptr::null()) };
    if ready <= 0 {
        return false;
    }
    if polls[0].revents & libc::POLLIN != 0 {
        let _ = wake.read();
    }
    let mut count = [0_u8; 8];
    polls[1].revents & libc::POLLIN != 0
        && unmask.is_some_and(|fd| {
            // SAFETY: eight bytes; the descriptor is open.
            unsafe { libc::read(fd.as_raw_fd(), count.as_mut_ptr().cast(), 8) == 8 }
        })
}

fn regions(device: &Device) -> Vec<ServerRegion> {
    let plain = VFIO_REGION_INFO_FLAG_READ | VFIO_REGION_INFO_FLAG_WRITE;
    let bar3 = device.gpu.bar3_file().map(AsRawFd::as_raw_fd);
    let window = device.gpu.window_file().map(AsRawFd::as_raw_fd);
    (0..=VFIO_PCI_CONFIG_REGION_INDEX)
        .map(|index| {
            let (size, mmap_fd) = match index {
                BAR0 => (u64::from(BAR0_BYTES), window),
                BAR1 => (BAR1_BYTES, None),
                BAR3 => (BAR3_BYTES, bar3),
                VFIO_PCI_CONFIG_REGION_INDEX => (config::BYTES as u64, None),
                _ => (0, None),
            };
            let flags = match (size, mmap_fd) {
                (0, _) => 0,
                (_, None) => plain,
                (_, Some(_)) => plain | VFIO_REGION_INFO_FLAG_MMAP,
            };
            let (offset, len) = match index {
                BAR0 => (WINDOW_START, WINDOW_BYTES),
                _ => (0, size),
            };
            let area = vfio_region_sparse_mmap_area { offset, size: len };
            ServerRegion {
                region_info: vfio_region_info {
                    argsz: size_of::<vfio_region_info>() as u32,
                    flags,
                    index,
                    size,
                    ..Default::default()
                },
                sparse_areas: mmap_fd
                    .map(|_| vfio_user::SparseArea { area })
                    .into_iter()
                    .collect(),
                mmap_fd,
            }
        })
        .collect()
}

fn irqs() -> Vec<IrqInfo> {
    (0..=VFIO_PCI_MSIX_IRQ_INDEX)
        .map(|index| IrqInfo {
            index,
            flags: match index {
                VFIO_PCI_INTX_IRQ_INDEX => VFIO_IRQ_INFO_EVENTFD | VFIO_IRQ_INFO_AUTOMASKED,
                _ => VFIO_IRQ_INFO_EVENTFD,
            },
            count: u32::from(index != VFIO_PCI_MSIX_IRQ_INDEX && index <= VFIO_PCI_MSI_IRQ_INDEX),
        })
        .collect()
}

/// The settings of the server.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Bytes of VRAM, whole MiB.
    pub vram: u64,
    /// Whether clients may map BAR 3 and BAR 0's window.
    pub map: bool,
    /// Whether to give up permissions that the server does not need.
    pub confine: bool,
    /// How long requests take.
    pub delays: Delays,
}

/// Removes the stale socket of a server that was killed.
fn remove_leftover(socket: &Path) {
    let refused = UnixStream::connect(socket).err().map(|error| error.kind());
    if refused == Some(io::ErrorKind::ConnectionRefused) {
        // If this fails, listening reports the error.
        let _ = std::fs::remove_file(socket);
    }
}

/// Listens at a path, confines this process, and serves one client after another until the process ends. A client finds
/// VRAM as the previous one left it, and everything else as after power-on.
pub fn serve(socket: &Path, settings: Settings) -> Result<(), Error> {
    let start = Instant::now();
    let mebibytes = settings.vram >> 20;
    let gpu = Gpu::new(settings.vram, settings.map, settings.delays, 0)
        .map_err(|source| Error::Memory(mebibytes, source))?;
    let device = Device {
        gpu,
        config: Config::default(),
        lines: Lines::default(),
    };
    let regions = regions(&device);
    let shared = Arc::new(Shared {
        device: Mutex::new(device),
        wake: EventFd::new(EFD_NONBLOCK).map_err(Error::Worker)?,
        waiting: AtomicU32::new(0),
        start,
    });
    remove_leftover(socket);
    let server = Server::new(socket, true, irqs(), regions)
        .map_err(|source| Error::Listen(socket.display().to_string(), source))?;
    if settings.confine {
        confine()?;
    }
    let worker = Arc::clone(&shared);
    std::thread::Builder::new()
        .name("engines".to_owned())
        .spawn(move || worker.work())
        .map_err(Error::Worker)?;
    info!(
        "serving {mebibytes} MiB of VRAM at {}: give Gantry --user-device socket={0}",
        socket.display()
    );
    loop {
        let mut client = Client {
            shared: Arc::clone(&shared),
            lent: Vec::new(),
        };
        match server.run(&mut client) {
            Ok(()) => info!("the client has gone"),
            // A client that disconnects in the middle of a message is treated like any other that disconnects.
            Err(error) => info!("the client is lost: {error}"),
        }
        client.leave();
    }
}

/// A connected client.
struct Client {
    shared: Arc<Shared>,
    lent: Vec<u64>,
}

impl Client {
    fn leave(&mut self) {
        let mut device = self.shared.device();
        for address in self.lent.drain(..) {
            device.gpu.ram().take_back(address);
        }
        device.gpu.reset(self.shared.now());
        device.config = Config::default();
        device.lines = Lines::default();
    }

    fn write_registers(&self, device: &mut Device, offset: u64, data: &[u8], now: u64) {
        if offset <= REARM && REARM < offset + data.len() as u64 {
            let way = device.way();
            device.lines.rearm(way);
            return;
        }
        let mut at = offset;
        let mut data = data;
        while !data.is_empty() {
            // Up to the end of the word; the caller has checked that this is within BAR 0.
            let first = (at % 4) as usize;
            let len = data.len().min(4 - first);
            let (piece, rest) = data.split_at(len);
            let mut word = match len {
                4 => [0; 4],
                _ => device.gpu.read_register(at as u32, now).to_le_bytes(),
            };
            word[first..first + len].copy_from_slice(piece);
            device
                .gpu
                .write_register(at as u32, u32::from_le_bytes(word), now);
            at += len as u64;
            data = rest;
        }
    }

    fn read_registers(device: &mut Device, offset: u64, data: &mut [u8], now: u64) {
        let mut at = offset;
        let mut data = data;
        while !data.is_empty() {
            let first = (at % 4) as usize;
            let len = data.len().min(4 - first);
            let word = device.gpu.read_register(at as u32, now).to_le_bytes();
            let (piece, rest) = data.split_at_mut(len);
            piece.copy_from_slice(&word[first..first + len]);
            at += len as u64;
            data = rest;
        }
    }
}

/// Checks that an access lies within a region.
fn check(region: u32, offset: u64, len: usize) -> io::Result<()> {
    let size = match region {
        BAR0 => u64::from(BAR0_BYTES),
        BAR1 => BAR1_BYTES,
        BAR3 => BAR3_BYTES,
        VFIO_PCI_CONFIG_REGION_INDEX => config::BYTES as u64,
        _ => 0,
    };
    match offset.checked_add(len as u64) {
        Some(end) if end <= size => Ok(()),
        _ => Err(io::ErrorKind::InvalidInput.into()),
    }
}

impl ServerBackend for Client {
    fn region_read(&mut self, region: u32, offset: u64, data: &mut [u8]) -> io::Result<()> {
        check(region, offset, data.len())?;
        let now = self.shared.now();
        let mut device = self.shared.device();
        match region {
            BAR0 => Self::read_registers(&mut device, offset, data, now),
            BAR1 => device.gpu.read_bar(Bar::One, offset, data, now),
            BAR3 => device.gpu.read_bar(Bar::Three, offset, data, now),
            _ => device.config.read(offset, data),
        }
        Ok(())
    }

    fn region_write(&mut self, region: u32, offset: u64, data: &[u8]) -> io::Result<()> {
        check(region, offset, data.len())?;
        let now = self.shared.now();
        let mut device = self.shared.device();
        let mut more = Next::Never;
        match region {
            BAR0 => {
                self.write_registers(&mut device, offset, data, now);
                // The write may have changed run lists or alarms.
                more = Next::Now;
            }
            BAR1 => {
                if device.gpu.write_bar(Bar::One, offset, data, now) {
                    more = device.gpu.work(now);
                }
            }
            BAR3 => {
                device.gpu.write_bar(Bar::Three, offset, data, now);
            }
            _ => device.config.write(offset, data),
        }
        device.update(now);
        drop(device);
        if more != Next::Never && self.is_worth_waking(region, offset) {
            self.shared.wake();
        }
        Ok(())
    }

    fn dma_map(
        &mut self,
        flags: DmaMapFlags,
        offset: u64,
        address: u64,
        size: u64,
        fd: Option<File>,
    ) -> io::Result<()> {
        debug!("memory at {address:#x}, {size:#x} bytes ({flags:?})");
        let fd = fd.ok_or(io::ErrorKind::InvalidInput)?;
        let mut device = self.shared.device();
        if let Some(start) = address.checked_sub(VRAM_ADDRESS) {
            let end = start.checked_add(size).ok_or(io::ErrorKind::InvalidInput)?;
            let backed = device.gpu.back(start..end, Arc::new(fd), offset);
            return backed.map_err(io::Error::other);
        }
        device.gpu.ram().lend(address, &fd, offset, size)?;
        self.lent.push(address);
        Ok(())
    }

    fn dma_unmap(&mut self, _flags: DmaUnmapFlags, address: u64, size: u64) -> io::Result<()> {
        let mut device = self.shared.device();
        if let Some(start) = address.checked_sub(VRAM_ADDRESS) {
            let end = start.checked_add(size).ok_or(io::ErrorKind::InvalidInput)?;
            return device.gpu.unback(start..end).map_err(io::Error::other);
        }
        device.gpu.ram().take_back(address);
        self.lent.retain(|lent| *lent != address);
        Ok(())
    }

    fn reset(&mut self) -> io::Result<()> {
        let mut device = self.shared.device();
        device.gpu.reset(self.shared.now());
        device.config = Config::default();
        Ok(())
    }

    fn set_irqs(
        &mut self,
        index: u32,
        flags: u32,
        start: u32,
        count: u32,
        fds: Vec<File>,
    ) -> io::Result<()> {
        let mut device = self.shared.device();
        let way = device.way();
        let fd = fds.into_iter().next();
        let is_line = index == VFIO_PCI_INTX_IRQ_INDEX;
        if flags & VFIO_IRQ_SET_ACTION_UNMASK != 0 && is_line {
            match fd {
                Some(fd) => device.lines.unmask_by(Some(fd)),
                None => device.lines.unmask(way),
            }
        } else if flags & VFIO_IRQ_SET_ACTION_TRIGGER != 0 && start == 0 {
            let fd = fd.filter(|_| count > 0);
            match index {
                VFIO_PCI_INTX_IRQ_INDEX => {
                    if fd.is_none() {
                        device.lines.unmask_by(None);
                    }
                    device.lines.line = fd;
                }
                VFIO_PCI_MSI_IRQ_INDEX => device.lines.message = fd,
                _ => return Err(io::ErrorKind::InvalidInput.into()),
            }
        } else if flags & VFIO_IRQ_SET_ACTION_MASK == 0 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        drop(device);
        // The worker has to wait for a different eventfd now.
        self.shared.wake();
        Ok(())
    }
}

impl Client {
    /// Most register writes create no work for the worker.
    fn is_worth_waking(&self, region: u32, offset: u64) -> bool {
        match region {
            BAR0 => matches!(
                offset,
                0x00_2270..0x00_2278 | 0x00_3000..0x00_3400 | 0x00_9100..0x00_9500
                    | 0x04_0000..0x04_6000
            ),
            _ => true,
        }
    }
}
