//! QEMU's `edu` device driven from user space: a driver for a few registers (QEMU, docs/specs/edu).
//!
//! The device stands in for an accelerator: it has registers, DMA and message-signaled interrupts,
//! and it computes something.

use std::{
    fs,
    io::{Read, Seek, SeekFrom, Write},
    os::{fd::AsRawFd, unix::fs::OpenOptionsExt as _},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};

use crate::edu_server::{COUNTER, MSIX_TABLE};

const IDENTIFICATION: usize = 0x00;
pub(crate) const LIVENESS: usize = 0x04;
const FACTORIAL: usize = 0x08;
const STATUS: usize = 0x20;
const RAISE: usize = 0x60;
const ACKNOWLEDGE: usize = 0x64;
const DMA_SOURCE: usize = 0x80;
const DMA_TARGET: usize = 0x88;
const DMA_COUNT: usize = 0x90;
const DMA_COMMAND: usize = 0x98;
/// Address of the device's buffer, for its DMA engine.
pub(crate) const BUFFER: u64 = 0x4_0000;
pub(crate) const DMA_START: u64 = 1;
pub(crate) const DMA_FROM_DEVICE: u64 = 2;
/// Size of the registers in bytes.
pub(crate) const REGISTERS: usize = 1 << 20;

pub(crate) const PAGE: usize = 4096;
/// Offset of the first BAR in configuration space.
const BAR0: usize = 0x10;

/// An interrupt vector that no driver in the guest's kernel uses.
const VECTOR: u16 = 0xe7;

/// The device.
pub(crate) struct Edu {
    /// Its folder in sysfs.
    pub folder: PathBuf,
    /// Address of its registers in this process.
    pub registers: *mut u8,
}

impl Edu {
    fn find() -> Result<Self> {
        for entry in fs::read_dir("/sys/bus/pci/devices")? {
            let folder = entry?.path();
            let id = |name| fs::read_to_string(folder.join(name)).unwrap_or_default();
            if id("vendor").trim() == "0x1234" && id("device").trim() == "0x11e8" {
                return Self::at(folder);
            }
        }
        bail!("there is no edu device")
    }

    fn at(folder: PathBuf) -> Result<Self> {
        fs::write(folder.join("enable"), "1").context("cannot enable the device")?;
        let registers = map(&folder.join("resource0"), REGISTERS)?;
        let edu = Self { folder, registers };
        // Enables memory and bus mastering.
        edu.write_config(4, &6_u16.to_le_bytes())?;
        Ok(edu)
    }

    /// Guest-physical address of the registers.
    fn address(&self) -> Result<u64> {
        let text = fs::read_to_string(self.folder.join("resource"))?;
        let digits = text.split_whitespace().next().unwrap_or("");
        Ok(u64::from_str_radix(digits.trim_start_matches("0x"), 16)?)
    }

    fn config(&self) -> Result<fs::File> {
        let path = self.folder.join("config");
        Ok(fs::File::options().read(true).write(true).open(path)?)
    }

    fn write_config(&self, offset: u64, data: &[u8]) -> Result<()> {
        let mut config = self.config()?;
        config.seek(SeekFrom::Start(offset))?;
        Ok(config.write_all(data)?)
    }

    /// Reads a register.
    pub fn read(&self, register: usize) -> u32 {
        // SAFETY: within the mapping, aligned; the device may change it at any time.
        unsafe { self.registers.add(register).cast::<u32>().read_volatile() }
    }

    /// Writes a register.
    pub fn write(&self, register: usize, value: u32) {
        // SAFETY: as in `read`.
        unsafe {
            self.registers
                .add(register)
                .cast::<u32>()
                .write_volatile(value)
        }
    }

    fn write_wide(&self, register: usize, value: u64) {
        // SAFETY: as in `read`.
        unsafe {
            self.registers
                .add(register)
                .cast::<u64>()
                .write_volatile(value)
        }
    }

    /// Whether the device is present and may use DMA.
    fn is_there(&self) -> Result<bool> {
        let mut header = [0; 6];
        self.config()?.read_exact(&mut header)?;
        Ok(header[..2] == [0x34, 0x12] && header[4] & 4 != 0)
    }

    /// Waits a few seconds for a condition.
    pub fn wait(&self, what: &str, done: impl Fn() -> bool) -> Result<()> {
        let start = Instant::now();
        while !done() {
            ensure!(start.elapsed().as_secs() < 5, "{what} does not end");
            thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Copies 64 bytes.
    pub fn dma(&self, from: u64, to: u64, command: u64) -> Result<()> {
        self.dma_of(64, from, to, command)
    }

    /// Copies `count` bytes, at most 4,096.
    pub fn dma_of(&self, count: u64, from: u64, to: u64, command: u64) -> Result<()> {
        self.write_wide(DMA_SOURCE, from);
        self.write_wide(DMA_TARGET, to);
        self.write_wide(DMA_COUNT, count);
        self.write_wide(DMA_COMMAND, command);
        self.wait("DMA", || u64::from(self.read(DMA_COMMAND)) & DMA_START == 0)
    }
}

/// Maps a BAR permanently.
fn map(resource: &Path, len: usize) -> Result<*mut u8> {
    let file = fs::File::options().read(true).write(true).open(resource)?;
    map_file(&file, len, 0)
}

/// Maps a part of a device's file permanently.
pub fn map_file(file: &fs::File, len: usize, offset: u64) -> Result<*mut u8> {
    // SAFETY: a new mapping at an address that the kernel picks; it is never unmapped.
    let bar = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            offset as libc::off_t,
        )
    };
    ensure!(bar != libc::MAP_FAILED, "cannot map the device");
    Ok(bar.cast())
}

/// A page of this process that stays in RAM permanently, and its guest-physical address.
pub fn page() -> Result<(*mut u8, u64)> {
    // SAFETY: new memory, never unmapped.
    let page = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            PAGE,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_LOCKED | libc::MAP_POPULATE,
            -1,
            0,
        )
    };
    ensure!(page != libc::MAP_FAILED, "no memory");
    let mut pagemap = fs::File::open("/proc/self/pagemap")?;
    pagemap.seek(SeekFrom::Start((page as usize / PAGE * 8) as u64))?;
    let mut entry = [0; 8];
    pagemap.read_exact(&mut entry)?;
    // Bits 0 to 54: the page frame number (Documentation/admin-guide/mm/pagemap.rst).
    let frame = u64::from_le_bytes(entry) & ((1 << 55) - 1);
    ensure!(frame != 0, "no permission to see page frames");
    Ok((page.cast(), frame * PAGE as u64))
}

/// A page of this process that a device could reach if there were no IOMMU, and that the guest does
/// not have.
pub struct HostPage {
    /// Its physical address. The guest has nothing at this address.
    pub address: u64,
    memory: *mut u8,
}

impl HostPage {
    /// Fills a page with a pattern, for guests whose memory ends at `end`. Relies on the kernel to
    /// hand out high pages first.
    pub fn beyond(end: u64) -> Result<Self> {
        let pages: Vec<_> = (0..16).map(|_| page()).collect::<Result<_>>()?;
        let found = pages.into_iter().find(|(_, address)| *address >= end);
        let (memory, address) =
            found.with_context(|| format!("there is no memory beyond {end:#x}"))?;
        for at in 0..PAGE {
            // SAFETY: within the page.
            unsafe { memory.add(at).write_volatile(at as u8 ^ 0xa5) };
        }
        Ok(Self { address, memory })
    }

    /// Checks that the pattern is unchanged.
    pub fn check(&self) -> Result<()> {
        for at in 0..PAGE {
            // SAFETY: within the page.
            let value = unsafe { self.memory.add(at).read_volatile() };
            ensure!(
                value == at as u8 ^ 0xa5,
                "byte {at} of the host's memory is {value:#x}"
            );
        }
        Ok(())
    }
}

/// Checks registers, computation, DMA in both directions and an interrupt.
pub fn check(path: Option<&str>) -> Result<()> {
    let edu = match path {
        Some(path) => Edu::at(path.into())?,
        None => Edu::find()?,
    };
    let address = works(&edu)?;
    interrupt(&edu)?;
    println!("edu works, with the page at {address:#x}");
    Ok(())
}

/// Like [`check`], without an interrupt. Returns the guest-physical address of the page that it
/// copies from and to.
fn works(edu: &Edu) -> Result<u64> {
    let id = edu.read(IDENTIFICATION);
    ensure!(id & 0xff == 0xed, "identification {id:#x}");
    edu.write(LIVENESS, 0x1234_5678);
    ensure!(
        edu.read(LIVENESS) == !0x1234_5678,
        "the device is not alive"
    );
    edu.write(FACTORIAL, 10);
    edu.wait("the computation", || edu.read(STATUS) & 1 == 0)?;
    ensure!(edu.read(FACTORIAL) == 3_628_800, "wrong factorial");
    let (memory, address) = page()?;
    for at in 0..64 {
        // SAFETY: within the page.
        unsafe { memory.add(at).write_volatile(at as u8 ^ 0x5a) };
    }
    edu.dma(address, BUFFER, DMA_START)?;
    edu.dma(BUFFER, address + 2048, DMA_START | DMA_FROM_DEVICE)?;
    for at in 0..64 {
        // SAFETY: within the page.
        let byte = unsafe { memory.add(2048 + at).read_volatile() };
        ensure!(byte == at as u8 ^ 0x5a, "byte {at} is {byte:#x} after DMA");
    }
    Ok(address)
}

/// A capability's offset in configuration space, and the configuration space.
fn capability(edu: &Edu, id: u8) -> Result<(u64, [u8; 256])> {
    let mut header = [0; 256];
    // Unprivileged, only 64 bytes are visible.
    edu.config()?.read_exact(&mut header)?;
    let mut at = usize::from(header[0x34]);
    while at != 0 && header[at] != id {
        at = usize::from(header[at + 1]);
    }
    ensure!(at != 0, "the device has no capability {id:#x}");
    Ok((at as u64, header))
}

/// Makes the device send a message to an unused vector. The kernel logs a complaint about it.
fn interrupt(edu: &Edu) -> Result<()> {
    let (offset, header) = capability(edu, 5)?;
    edu.write_config(offset + 4, &0xfee0_0000_u32.to_le_bytes())?;
    let wide = header[offset as usize + 2] & 0x80 != 0;
    if wide {
        edu.write_config(offset + 8, &0_u32.to_le_bytes())?;
    }
    let data = offset + if wide { 12 } else { 8 };
    edu.write_config(data, &VECTOR.to_le_bytes())?;
    edu.write_config(offset + 2, &1_u16.to_le_bytes())?;
    raise(edu)?;
    edu.write_config(offset + 2, &0_u16.to_le_bytes())
}

fn raise(edu: &Edu) -> Result<()> {
    let complaints = || {
        let log = crate::net::sh("dmesg").unwrap_or_default();
        // Linux 6.12 changed the order of the words.
        let vector = format!(".{VECTOR}");
        let lines = log
            .lines()
            .filter(|line| line.contains("No irq handler for"));
        lines.filter(|line| line.contains(&vector)).count()
    };
    let before = complaints();
    edu.write(RAISE, 1);
    edu.wait("waiting for the interrupt", || complaints() > before)?;
    edu.write(ACKNOWLEDGE, 1);
    Ok(())
}

/// Like [`interrupt`], with the first vector of the MSI-X table.
pub fn msix() -> Result<()> {
    let edu = Edu::find()?;
    let (offset, _) = capability(&edu, 0x11)?;
    let entry = MSIX_TABLE as usize;
    edu.write(entry, 0xfee0_0000);
    edu.write(entry + 4, 0);
    edu.write(entry + 8, VECTOR.into());
    edu.write(entry + 12, 0);
    edu.write_config(offset + 2, &0x8000_u16.to_le_bytes())?;
    raise(&edu)?;
    edu.write_config(offset + 2, &0_u16.to_le_bytes())?;
    edu.write(entry + 12, 1);
    println!("MSI-X works");
    Ok(())
}

/// Reads and writes the device's memory without its server being involved, and makes its DMA engine
/// do the same.
pub fn memory() -> Result<()> {
    let edu = Edu::find()?;
    let bar = map(&edu.folder.join("resource2"), COUNTER as usize + PAGE)?;
    // SAFETY: the last page of the mapping; the device may change it at any time.
    let accesses = || unsafe { bar.add(COUNTER as usize).cast::<u32>().read_volatile() };
    let before = accesses();
    let (memory, address) = page()?;
    for at in 0..64 {
        // SAFETY: within the page.
        unsafe { memory.add(at).write_volatile(at as u8 ^ 0x3c) };
    }
    edu.dma(address, BUFFER, DMA_START)?;
    for at in 0..64 {
        // SAFETY: within the mapping.
        let byte = unsafe { bar.add(at).read_volatile() };
        ensure!(
            byte == at as u8 ^ 0x3c,
            "byte {at} of its memory is {byte:#x}"
        );
        // SAFETY: as above.
        unsafe { bar.add(at).write_volatile(!byte) };
    }
    edu.dma(BUFFER, address + 2048, DMA_START | DMA_FROM_DEVICE)?;
    for at in 0..64 {
        // SAFETY: within the page.
        let byte = unsafe { memory.add(2048 + at).read_volatile() };
        ensure!(
            byte == !(at as u8 ^ 0x3c),
            "byte {at} is {byte:#x} after DMA"
        );
    }
    let asked = accesses() - before;
    ensure!(
        asked == 1,
        "its server was asked {asked} times, not only now"
    );
    println!("memory works");
    Ok(())
}

/// Makes the device copy back and forth until it goes away.
pub fn copy() -> Result<()> {
    let edu = Edu::find()?;
    let (memory, address) = page()?;
    let (from, to) = (memory, memory.wrapping_add(2048));
    for round in 0_u32.. {
        for at in 0..64 {
            // SAFETY: within the page.
            unsafe { from.add(at).write_volatile(at as u8 ^ round as u8) };
            // SAFETY: as above.
            unsafe { to.add(at).write_volatile(0) };
        }
        edu.dma(address, BUFFER, DMA_START)?;
        edu.dma(BUFFER, address + 2048, DMA_START | DMA_FROM_DEVICE)?;
        // SAFETY: within the page.
        let right = |at: usize| unsafe { to.add(at).read_volatile() } == at as u8 ^ round as u8;
        if (0..64).all(right) {
            println!("copied");
        } else {
            // A device that is about to go, or is gone, copies nothing.
            ensure!(edu.is_there()?, "the device has gone");
            println!("wrong");
        }
    }
    Ok(())
}

/// Makes the device at address `one` in sysfs write to a register of the device at `other`, without
/// going through the guest's RAM.
pub fn peers(one: &str, other: &str) -> Result<()> {
    const VALUE: u32 = 0x600d_1dea;
    let [one, other] = [one, other].map(|path| Edu::at(path.into()));
    let (one, other) = (one?, other?);
    let (memory, address) = page()?;
    // SAFETY: within the page, aligned.
    unsafe { memory.cast::<u32>().write_volatile(VALUE) };
    one.dma_of(4, address, BUFFER, DMA_START)?;
    let register = other.address()? + LIVENESS as u64;
    other.write(LIVENESS, 0);
    // The VMM may still be about to map it.
    other.wait("waiting for the other device's write", || {
        let written = one.dma_of(4, BUFFER, register, DMA_START | DMA_FROM_DEVICE);
        written.is_ok() && other.read(LIVENESS) == !VALUE
    })?;
    println!("they reach each other");
    Ok(())
}

/// Maps the registers of a device at a physical address permanently.
fn map_registers(address: u64) -> Result<*mut u8> {
    let mut options = fs::File::options();
    // Uncached.
    options.read(true).write(true).custom_flags(libc::O_SYNC);
    map_file(&options.open("/dev/mem")?, REGISTERS, address)
}

/// Moves the memory BAR of the device at a path in sysfs without the knowledge of the guest's
/// kernel. Checks that the device answers and copies at its new address, and that nothing answers
/// at the old one.
pub fn move_to(path: &str, target: u64) -> Result<()> {
    let folder = PathBuf::from(path);
    let target_bits = u32::try_from(target).context("the BAR has 32 bits")?;
    let mut edu = Edu {
        registers: std::ptr::null_mut(),
        folder,
    };
    let mut header = [0; 0x14];
    edu.config()?.read_exact(&mut header)?;
    let bar = &header[BAR0..];
    let source = u32::from_le_bytes([bar[0], bar[1], bar[2], bar[3]]) & !0xf;
    let [before, after] = [source.into(), target].map(map_registers);
    let (before, after) = (before?, after?);
    edu.registers = before;
    ensure!(
        edu.read(IDENTIFICATION) & 0xff == 0xed,
        "it is not at {source:#x}"
    );
    edu.write_config(BAR0 as u64, &target_bits.to_le_bytes())?;
    let left = edu.read(IDENTIFICATION);
    ensure!(left == u32::MAX, "{left:#x} is still at {source:#x}");
    edu.registers = after;
    works(&edu)?;
    println!("moved from {source:#x} to {target:#x}");
    Ok(())
}

/// Makes the device at a path in sysfs write 32 bits to an address.
pub fn poke(path: &str, target: u64, value: u32) -> Result<()> {
    let edu = Edu::at(path.into())?;
    let (memory, address) = page()?;
    // SAFETY: within the page, aligned.
    unsafe { memory.cast::<u32>().write_volatile(value) };
    edu.dma_of(4, address, BUFFER, DMA_START)?;
    edu.dma_of(4, BUFFER, target, DMA_START | DMA_FROM_DEVICE)
}

/// Makes the device write to an address that the guest does not have.
pub fn write_outside(address: u64) -> Result<()> {
    let edu = Edu::find()?;
    edu.dma(BUFFER, address, DMA_START | DMA_FROM_DEVICE)
}
