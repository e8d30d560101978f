//! An accelerator that this process serves over vfio-user: QEMU's `edu` (docs/specs/edu), extended
//! by MSI-X and a BAR of memory.
//!
//! - BAR 0: the registers, as [`edu`](crate::edu) drives them; MSI-X table and pending bits.
//! - BAR 2: 64 KiB, of which all but the last page can be mapped. Its first page is the buffer that
//!   the DMA engine reads and writes. The last page counts the accesses to this BAR that arrived as
//!   messages.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, Read, Write},
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    path::Path,
    ptr::NonNull,
};

use anyhow::{Context, Result};
use vfio_bindings::bindings::vfio::{
    VFIO_IRQ_INFO_AUTOMASKED, VFIO_IRQ_INFO_EVENTFD, VFIO_IRQ_SET_ACTION_UNMASK,
    VFIO_PCI_CONFIG_REGION_INDEX, VFIO_PCI_INTX_IRQ_INDEX, VFIO_PCI_MSI_IRQ_INDEX,
    VFIO_PCI_MSIX_IRQ_INDEX, VFIO_REGION_INFO_FLAG_MMAP, VFIO_REGION_INFO_FLAG_READ,
    VFIO_REGION_INFO_FLAG_WRITE, vfio_region_info, vfio_region_sparse_mmap_area,
};
use vfio_user::{
    DmaMapFlags, DmaUnmapFlags, IrqInfo, Server, ServerBackend, ServerRegion, SparseArea,
};

const PAGE: usize = 4096;
/// Size of BAR 0 in bytes.
const REGISTERS: u64 = 1 << 20;
/// Size of BAR 2 in bytes.
const MEMORY: u64 = 64 << 10;
/// The page of BAR 2 that counts accesses.
pub const COUNTER: u64 = MEMORY - PAGE as u64;
/// Address of the buffer for the DMA engine.
const BUFFER: u64 = 0x4_0000;
/// Offset of the MSI-X table in BAR 0.
pub const MSIX_TABLE: u64 = 0x8_0000;
/// Number of MSI and of MSI-X vectors.
const VECTORS: u32 = 4;
const BAR0: u32 = 0;
const BAR2: u32 = 2;
/// Command register: bus mastering enabled.
const BUS_MASTER: u8 = 4;
const DMA_START: u64 = 1;
const DMA_FROM_DEVICE: u64 = 2;
const DMA_INTERRUPT: u64 = 4;

/// Memory of a file, mapped until this is dropped.
struct Mapped {
    address: NonNull<u8>,
    len: usize,
}

// SAFETY: plain memory that this value owns; others only access it as bytes that may change at any
// time.
unsafe impl Send for Mapped {}

impl Mapped {
    fn new(file: &impl AsRawFd, offset: u64, len: u64) -> io::Result<Self> {
        let len = usize::try_from(len).map_err(io::Error::other)?;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                libc::off_t::try_from(offset).map_err(io::Error::other)?,
            )
        };
        match NonNull::new(address.cast::<u8>()) {
            Some(address) if address.as_ptr().cast() != libc::MAP_FAILED => {
                Ok(Self { address, len })
            }
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn has(&self, at: u64, len: usize) -> bool {
        at.checked_add(len as u64)
            .is_some_and(|end| end <= self.len as u64)
    }

    /// Reads bytes. Returns whether they exist; otherwise they are zero.
    fn read(&self, at: u64, data: &mut [u8]) -> bool {
        let has = self.has(at, data.len());
        for (index, byte) in data.iter_mut().enumerate() {
            *byte = if has {
                // SAFETY: within the mapping, as checked above.
                unsafe {
                    self.address
                        .as_ptr()
                        .add(at as usize + index)
                        .read_volatile()
                }
            } else {
                0
            };
        }
        has
    }

    fn write(&self, at: u64, data: &[u8]) -> bool {
        let has = self.has(at, data.len());
        for (index, byte) in data.iter().enumerate().filter(|_| has) {
            // SAFETY: within the mapping, as checked above.
            unsafe {
                self.address
                    .as_ptr()
                    .add(at as usize + index)
                    .write_volatile(*byte);
            }
        }
        has
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and not used after this.
        unsafe { libc::munmap(self.address.as_ptr().cast(), self.len) };
    }
}

/// Registers after a reset.
#[derive(Default)]
struct Registers {
    liveness: u32,
    factorial: u32,
    interrupts: u32,
    source: u64,
    target: u64,
    count: u64,
}

/// How the device asserts its interrupt line.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Line {
    /// Once, like the kernel's vfio-pci: from then on it is masked, until the client unmasks it.
    Automasked,
    /// On each interrupt. It cannot be masked.
    Free,
}

/// The device.
struct EduDevice {
    config: [u8; 256],
    registers: Registers,
    memory: Mapped,
    /// Number of accesses to BAR 2 that were messages.
    accesses: u32,
    /// Guest memory by guest-physical address.
    guest: BTreeMap<u64, Mapped>,
    /// Eventfds by interrupt type and number.
    eventfds: BTreeMap<(u32, u32), File>,
    line: Line,
    /// Whether the line was asserted and not unmasked since.
    masked: bool,
    /// Signalled when the line is to be unmasked.
    unmask: Option<File>,
}

fn memory_file() -> io::Result<OwnedFd> {
    // SAFETY: the name is a C string; the result is checked.
    let fd =
        unsafe { libc::memfd_create(c"edu".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: just created, and owned by nobody else.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(MEMORY)?;
    Ok(file.into())
}

fn config_space() -> [u8; 256] {
    let mut config = [0; 256];
    let mut set = |at: usize, bytes: &[u8]| config[at..at + bytes.len()].copy_from_slice(bytes);
    set(0x00, &0x1234_u16.to_le_bytes());
    set(0x02, &0x11e8_u16.to_le_bytes());
    // The device has capabilities.
    set(0x06, &0x10_u16.to_le_bytes());
    // Revision 0x10, class "other".
    set(0x08, &[0x10, 0, 0xff, 0]);
    // BAR 0: 32 bits; BAR 2: 64 bits, prefetchable.
    set(0x10, &0_u32.to_le_bytes());
    set(0x18, &0xc_u32.to_le_bytes());
    set(0x2c, &0x1af4_1100_u32.to_le_bytes());
    set(0x34, &[0x40]);
    // Interrupt pin A.
    set(0x3d, &[1]);
    // MSI: four vectors, 64-bit addresses.
    set(0x40, &[0x05, 0x50]);
    set(0x42, &(2_u16 << 1 | 1 << 7).to_le_bytes());
    // MSI-X: the table is in BAR 0, followed by the pending bits.
    set(0x50, &[0x11, 0]);
    set(0x52, &(VECTORS as u16 - 1).to_le_bytes());
    set(0x54, &(MSIX_TABLE as u32).to_le_bytes());
    set(0x58, &(MSIX_TABLE as u32 + 0x1000).to_le_bytes());
    config
}

fn regions(memory: &OwnedFd) -> Vec<ServerRegion> {
    let plain = VFIO_REGION_INFO_FLAG_READ | VFIO_REGION_INFO_FLAG_WRITE;
    (0..=VFIO_PCI_CONFIG_REGION_INDEX)
        .map(|index| {
            let size = match index {
                BAR0 => REGISTERS,
                BAR2 => MEMORY,
                VFIO_PCI_CONFIG_REGION_INDEX => 256,
                _ => 0,
            };
            let flags = match index {
                BAR2 => plain | VFIO_REGION_INFO_FLAG_MMAP,
                _ if size > 0 => plain,
                _ => 0,
            };
            let area = vfio_region_sparse_mmap_area {
                offset: 0,
                size: COUNTER,
            };
            let mapped = index == BAR2;
            ServerRegion {
                region_info: vfio_region_info {
                    argsz: size_of::<vfio_region_info>() as u32,
                    flags,
                    index,
                    size,
                    ..Default::default()
                },
                sparse_areas: mapped.then_some(SparseArea { area }).into_iter().collect(),
                mmap_fd: mapped.then(|| memory.as_raw_fd()),
            }
        })
        .collect()
}

fn irqs(line: Line) -> Vec<IrqInfo> {
    (0..=VFIO_PCI_MSIX_IRQ_INDEX)
        .map(|index| IrqInfo {
            index,
            flags: match (index, line) {
                (VFIO_PCI_INTX_IRQ_INDEX, Line::Automasked) => {
                    VFIO_IRQ_INFO_EVENTFD | VFIO_IRQ_INFO_AUTOMASKED
                }
                _ => VFIO_IRQ_INFO_EVENTFD,
            },
            count: match index {
                VFIO_PCI_INTX_IRQ_INDEX => 1,
                VFIO_PCI_MSI_IRQ_INDEX | VFIO_PCI_MSIX_IRQ_INDEX => VECTORS,
                _ => 0,
            },
        })
        .collect()
}

/// Serves the device on a socket, to one client after another, until this process ends.
pub fn serve(socket: &Path) -> Result<()> {
    serve_with(socket, Line::Automasked)
}

/// Like [`serve`], with a line of this kind.
pub fn serve_with(socket: &Path, line: Line) -> Result<()> {
    // The socket may be left over from a server that was killed.
    let _ = std::fs::remove_file(socket);
    let memory = memory_file().context("no memory for the device")?;
    let server = Server::new(socket, true, irqs(line), regions(&memory))
        .with_context(|| format!("cannot listen at {}", socket.display()))?;
    loop {
        let mut device = EduDevice {
            config: config_space(),
            registers: Registers::default(),
            memory: Mapped::new(&memory, 0, MEMORY)?,
            accesses: 0,
            guest: BTreeMap::new(),
            eventfds: BTreeMap::new(),
            line,
            masked: false,
            unmask: None,
        };
        // A client that disconnects in the middle of a message is treated like any other that
        // disconnects.
        if let Err(error) = server.run(&mut device) {
            eprintln!("edu: {error}");
        }
    }
}

impl EduDevice {
    fn read_register(&self, offset: u64) -> u64 {
        match offset {
            0x00 => 0x0100_00ed,
            0x04 => u64::from(!self.registers.liveness),
            0x08 => u64::from(self.registers.factorial),
            0x24 => u64::from(self.registers.interrupts),
            0x80 => self.registers.source,
            0x88 => self.registers.target,
            0x90 => self.registers.count,
            // Computation and DMA end before the write of their register returns.
            _ => 0,
        }
    }

    fn write_register(&mut self, offset: u64, value: u64) {
        let registers = &mut self.registers;
        match offset {
            0x04 => registers.liveness = value as u32,
            0x08 => {
                registers.factorial = (1..=value as u32).take(64).fold(1, u32::wrapping_mul);
            }
            0x60 => self.raise(value as u32),
            0x64 => registers.interrupts &= !(value as u32),
            0x80 => registers.source = value,
            0x88 => registers.target = value,
            0x90 => registers.count = value,
            0x98 if value & DMA_START != 0 => self.dma(value),
            _ => {}
        }
    }

    fn is_bus_master(&self) -> bool {
        self.config[4] & BUS_MASTER != 0
    }

    /// Raises the MSI or MSI-X vectors whose bits are set in `value`.
    fn raise(&mut self, value: u32) {
        self.registers.interrupts |= value;
        if !self.is_bus_master() {
            return;
        }
        let msix = self.config[0x53] & 0x80 != 0;
        let msi = self.config[0x42] & 1 != 0;
        let is_on = |kind| match kind {
            VFIO_PCI_MSIX_IRQ_INDEX => msix,
            VFIO_PCI_MSI_IRQ_INDEX => msi,
            _ => !msix && !msi,
        };
        if self.masked && self.unmask.as_mut().is_some_and(take_signal) {
            self.masked = false;
        }
        for ((kind, vector), mut eventfd) in &self.eventfds {
            let is_line = *kind == VFIO_PCI_INTX_IRQ_INDEX;
            if value & 1 << vector != 0 && is_on(*kind) && !(is_line && self.masked) {
                self.masked |= is_line && self.line == Line::Automasked;
                // A full counter is a raised interrupt, too.
                let _ = eventfd.write(&1_u64.to_ne_bytes());
            }
        }
    }

    fn dma(&mut self, command: u64) {
        let Registers {
            source,
            target,
            count,
            ..
        } = self.registers;
        let (guest, buffer) = if command & DMA_FROM_DEVICE != 0 {
            (target, source)
        } else {
            (source, target)
        };
        let mut data = vec![0; count.min(PAGE as u64) as usize];
        let at = buffer.wrapping_sub(BUFFER);
        let found = self.guest.range(..=guest).next_back();
        if let Some((start, memory)) = found
            && self.is_bus_master()
            && at.saturating_add(data.len() as u64) <= PAGE as u64
        {
            if command & DMA_FROM_DEVICE != 0 {
                self.memory.read(at, &mut data);
                memory.write(guest - start, &data);
            } else if memory.read(guest - start, &mut data) {
                self.memory.write(at, &data);
            }
        }
        if command & DMA_INTERRUPT != 0 {
            self.raise(0x100);
        }
    }
}

impl ServerBackend for EduDevice {
    fn region_read(&mut self, region: u32, offset: u64, data: &mut [u8]) -> io::Result<()> {
        data.fill(0);
        match region {
            BAR0 => {
                let value = self.read_register(offset).to_le_bytes();
                let len = data.len().min(8);
                data[..len].copy_from_slice(&value[..len]);
            }
            BAR2 => {
                self.accesses += 1;
                if offset >= COUNTER {
                    let value = u64::from(self.accesses).to_le_bytes();
                    let len = data.len().min(8);
                    data[..len].copy_from_slice(&value[..len]);
                } else {
                    self.memory.read(offset, data);
                }
            }
            VFIO_PCI_CONFIG_REGION_INDEX => {
                let config = self.config.get(offset as usize..).unwrap_or_default();
                for (to, from) in data.iter_mut().zip(config) {
                    *to = *from;
                }
            }
            _ => return Err(io::ErrorKind::InvalidInput.into()),
        }
        Ok(())
    }

    fn region_write(&mut self, region: u32, offset: u64, data: &[u8]) -> io::Result<()> {
        match region {
            BAR0 => {
                let mut value = [0; 8];
                let len = data.len().min(8);
                value[..len].copy_from_slice(&data[..len]);
                self.write_register(offset, u64::from_le_bytes(value));
            }
            BAR2 => {
                self.accesses += 1;
                self.memory.write(offset, data);
            }
            // The command register and those that enable MSI and MSI-X are writable; the rest is
            // fixed.
            VFIO_PCI_CONFIG_REGION_INDEX => match (offset, data) {
                (4, [command, ..]) => self.config[4] = command & 7,
                (0x42, [control, ..]) => self.config[0x42] = self.config[0x42] & !1 | control & 1,
                (0x52, [_, control, ..]) => self.config[0x53] = control & 0xc0,
                _ => {}
            },
            _ => return Err(io::ErrorKind::InvalidInput.into()),
        }
        Ok(())
    }

    fn dma_map(
        &mut self,
        _flags: DmaMapFlags,
        offset: u64,
        address: u64,
        size: u64,
        fd: Option<File>,
    ) -> io::Result<()> {
        let fd = fd.ok_or(io::ErrorKind::InvalidInput)?;
        self.guest.insert(address, Mapped::new(&fd, offset, size)?);
        Ok(())
    }

    fn dma_unmap(&mut self, _flags: DmaUnmapFlags, address: u64, _size: u64) -> io::Result<()> {
        self.guest.remove(&address);
        Ok(())
    }

    fn reset(&mut self) -> io::Result<()> {
        self.registers = Registers::default();
        self.config = config_space();
        self.memory.write(0, &[0; PAGE]);
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
        if flags & VFIO_IRQ_SET_ACTION_UNMASK != 0 {
            if self.line == Line::Free {
                return Err(io::ErrorKind::Unsupported.into());
            }
            self.unmask = fds.into_iter().next();
            return Ok(());
        }
        if count == 0 {
            self.eventfds.retain(|(kind, _), _| *kind != index);
        }
        for (number, fd) in fds.into_iter().enumerate() {
            let vector = start.saturating_add(number as u32);
            if vector >= VECTORS {
                return Err(io::ErrorKind::InvalidInput.into());
            }
            self.eventfds.insert((index, vector), fd);
        }
        Ok(())
    }
}

/// Whether an eventfd of either kind was signalled since the last call.
fn take_signal(eventfd: &mut File) -> bool {
    let mut poll = libc::pollfd {
        fd: eventfd.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one structure, which outlives the call.
    let ready = unsafe { libc::poll(&raw mut poll, 1, 0) };
    ready == 1 && eventfd.read(&mut [0; 8]).is_ok()
}
