//! QEMU's `edu` device behind the guest's IOMMU, driven by a program through the guest kernel's
//! VFIO: the program chooses the addresses at which the device finds its memory.

use std::{
    ffi::CString,
    fs, io,
    os::{
        fd::{AsRawFd, FromRawFd, RawFd},
        unix::fs::FileExt,
    },
    path::PathBuf,
};

use anyhow::{Context, Result, ensure};
use vfio_bindings::bindings::vfio::{
    VFIO_DMA_MAP_FLAG_READ, VFIO_DMA_MAP_FLAG_WRITE, VFIO_PCI_BAR0_REGION_INDEX,
    VFIO_PCI_CONFIG_REGION_INDEX, VFIO_TYPE1v2_IOMMU, vfio_iommu_type1_dma_map,
    vfio_iommu_type1_dma_unmap, vfio_region_info,
};
use vmm_sys_util::ioctl::{ioctl_with_mut_ref, ioctl_with_ptr, ioctl_with_ref, ioctl_with_val};

use self::calls::{
    VFIO_DEVICE_GET_REGION_INFO, VFIO_GROUP_GET_DEVICE_FD, VFIO_GROUP_SET_CONTAINER,
    VFIO_IOMMU_MAP_DMA, VFIO_IOMMU_UNMAP_DMA, VFIO_SET_IOMMU,
};

use crate::{
    edu::{BUFFER, DMA_FROM_DEVICE, DMA_START, Edu, LIVENESS, PAGE, REGISTERS, map_file, page},
    host_device::{EDU, HostDevice},
};

/// The ioctl numbers.
mod calls {
    use vfio_bindings::bindings::vfio::{VFIO_BASE, VFIO_TYPE};
    use vmm_sys_util::ioctl_io_nr;

    ioctl_io_nr!(VFIO_SET_IOMMU, VFIO_TYPE.into(), VFIO_BASE + 2);
    ioctl_io_nr!(VFIO_GROUP_SET_CONTAINER, VFIO_TYPE.into(), VFIO_BASE + 4);
    ioctl_io_nr!(VFIO_GROUP_GET_DEVICE_FD, VFIO_TYPE.into(), VFIO_BASE + 6);
    ioctl_io_nr!(VFIO_DEVICE_GET_REGION_INFO, VFIO_TYPE.into(), VFIO_BASE + 8);
    ioctl_io_nr!(VFIO_IOMMU_MAP_DMA, VFIO_TYPE.into(), VFIO_BASE + 13);
    ioctl_io_nr!(VFIO_IOMMU_UNMAP_DMA, VFIO_TYPE.into(), VFIO_BASE + 14);
}

const READ: u32 = VFIO_DMA_MAP_FLAG_READ;
const WRITE: u32 = VFIO_DMA_MAP_FLAG_WRITE;

/// An address at which the guest has no memory.
const OWN: u64 = 0x12_3450_0000;

fn done(result: libc::c_int) -> io::Result<RawFd> {
    match result {
        0.. => Ok(result),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Devices that share an address space.
struct Space {
    container: fs::File,
    /// Stay open as long as the devices are used.
    groups: Vec<fs::File>,
}

/// A device in the address space.
struct Owned {
    edu: Edu,
    _file: fs::File,
}

impl Space {
    fn new() -> Result<Self> {
        // This also loads the modules.
        HostDevice::take(EDU, 0)?;
        Ok(Self {
            container: open("/dev/vfio/vfio".into())?,
            groups: Vec::new(),
        })
    }

    /// Takes over the guest's edu device number `index`.
    fn take(&mut self, index: usize) -> Result<Owned> {
        const UNSAFE: &str = "/sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts";
        let device = HostDevice::take(EDU, index)?;
        // A virtual IOMMU does not remap interrupts.
        fs::write(UNSAFE, "Y")?;
        let link = fs::read_link(device.path.join("iommu_group")).context("it is in no group")?;
        let number = link.file_name().context("it is in no group")?;
        let group = open(PathBuf::from("/dev/vfio").join(number))?;
        let container = self.container.as_raw_fd();
        // SAFETY: the call reads a descriptor.
        done(unsafe { ioctl_with_ref(&group, VFIO_GROUP_SET_CONTAINER(), &container) })
            .context("the group cannot be had")?;
        if self.groups.is_empty() {
            let kind = VFIO_TYPE1v2_IOMMU.into();
            // SAFETY: no memory is involved.
            done(unsafe { ioctl_with_val(&self.container, VFIO_SET_IOMMU(), kind) })
                .context("the IOMMU cannot be used")?;
        }
        let name = CString::new(device.address.clone())?;
        // SAFETY: the call reads a string, up to its end.
        let file =
            done(unsafe { ioctl_with_ptr(&group, VFIO_GROUP_GET_DEVICE_FD(), name.as_ptr()) })
                .context("the device cannot be had")?;
        // SAFETY: just created by the call.
        let file = unsafe { fs::File::from_raw_fd(file) };
        self.groups.push(group);
        let bar = region(&file, VFIO_PCI_BAR0_REGION_INDEX)?;
        let registers = map_file(&file, REGISTERS, bar)?;
        // Memory and bus mastering.
        let config = region(&file, VFIO_PCI_CONFIG_REGION_INDEX)?;
        file.write_all_at(&6_u16.to_le_bytes(), config + 4)?;
        let edu = Edu {
            folder: device.path,
            registers,
        };
        Ok(Owned { edu, _file: file })
    }

    fn map(&self, at: u64, memory: *mut u8, len: usize, flags: u32) -> Result<()> {
        let map = vfio_iommu_type1_dma_map {
            argsz: size_of::<vfio_iommu_type1_dma_map>() as u32,
            flags,
            vaddr: memory as u64,
            iova: at,
            size: len as u64,
        };
        // SAFETY: the kernel reads `argsz` bytes. The memory belongs to this process permanently,
        // and is accessed as bytes that may change at any time.
        done(unsafe { ioctl_with_ref(&self.container, VFIO_IOMMU_MAP_DMA(), &map) })
            .with_context(|| format!("cannot map {len:#x} bytes at {at:#x}"))?;
        Ok(())
    }

    fn unmap(&self, at: u64, len: usize) -> Result<()> {
        let mut unmap = vfio_iommu_type1_dma_unmap {
            argsz: size_of::<vfio_iommu_type1_dma_unmap>() as u32,
            iova: at,
            size: len as u64,
            ..Default::default()
        };
        // SAFETY: the kernel reads and writes `argsz` bytes.
        done(unsafe { ioctl_with_mut_ref(&self.container, VFIO_IOMMU_UNMAP_DMA(), &mut unmap) })
            .with_context(|| format!("cannot unmap {len:#x} bytes at {at:#x}"))?;
        ensure!(
            unmap.size == len as u64,
            "{:#x} bytes were there",
            unmap.size
        );
        Ok(())
    }
}

fn open(path: PathBuf) -> Result<fs::File> {
    let file = fs::File::options().read(true).write(true).open(&path);
    file.with_context(|| format!("cannot open {}", path.display()))
}

/// Offset of a region in the device's file.
fn region(device: &fs::File, index: u32) -> Result<u64> {
    let mut info = vfio_region_info {
        argsz: size_of::<vfio_region_info>() as u32,
        index,
        ..Default::default()
    };
    // SAFETY: the kernel reads and writes `argsz` bytes.
    done(unsafe { ioctl_with_mut_ref(device, VFIO_DEVICE_GET_REGION_INFO(), &mut info) })
        .context("no region")?;
    Ok(info.offset)
}

/// Fills 64 bytes with a pattern.
fn fill(memory: *mut u8, seed: u8) {
    for at in 0..64 {
        // SAFETY: within the caller's memory.
        unsafe { memory.add(at).write_volatile(at as u8 ^ seed) };
    }
}

/// Checks that 64 bytes have a pattern.
fn has(memory: *mut u8, seed: u8) -> Result<()> {
    for at in 0..64 {
        // SAFETY: within the caller's memory.
        let byte = unsafe { memory.add(at).read_volatile() };
        ensure!(byte == at as u8 ^ seed, "byte {at} is {byte:#x}");
    }
    Ok(())
}

/// Allocates memory of this process permanently.
fn memory(len: usize) -> Result<*mut u8> {
    // SAFETY: new memory that is never unmapped.
    let memory = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    ensure!(memory != libc::MAP_FAILED, "no memory");
    Ok(memory.cast())
}

/// Tests DMA in both directions at addresses that this program chooses, and that no other address
/// is reachable.
pub fn check() -> Result<()> {
    let mut space = Space::new()?;
    let device = space.take(0)?;
    let edu = &device.edu;
    to_and_fro(&space, edu)?;
    // A range of many pages, somewhere in between.
    const MANY: usize = 1024;
    let many = memory(MANY * PAGE)?;
    let far = OWN + 0x1000_0000;
    space.map(far, many, MANY * PAGE, READ | WRITE)?;
    for number in [0, 1, 511, 777, MANY - 1] {
        let (at, page) = (
            far + (number * PAGE) as u64,
            many.wrapping_add(number * PAGE),
        );
        fill(page, number as u8);
        edu.dma(at, BUFFER, DMA_START)?;
        edu.dma(BUFFER, at + 2048, DMA_START | DMA_FROM_DEVICE)?;
        has(page.wrapping_add(2048), number as u8).context("of many pages")?;
    }
    space.unmap(far, MANY * PAGE)?;
    // A read-only mapping.
    let (first, _) = page()?;
    fill(first, 0x77);
    space.map(OWN, first, PAGE, READ)?;
    edu.dma(OWN, BUFFER, DMA_START)?;
    fill(first, 0x66);
    edu.dma(BUFFER, OWN, DMA_START | DMA_FROM_DEVICE)?;
    has(first, 0x66).context("written, though it is to be read only")?;
    space.unmap(OWN, PAGE)?;
    // The device has the bytes that it was able to read.
    space.map(OWN, first, PAGE, READ | WRITE)?;
    edu.dma(BUFFER, OWN, DMA_START | DMA_FROM_DEVICE)?;
    has(first, 0x77).context("read from what is to be read only")?;
    // An address that was unmapped, and one that was never mapped: a page of this program at its
    // own address.
    space.unmap(OWN, PAGE)?;
    fill(first, 0x44);
    edu.dma(BUFFER, OWN, DMA_START | DMA_FROM_DEVICE)?;
    has(first, 0x44).context("written, though it is mapped no more")?;
    let (second, address) = page()?;
    fill(second, 0x55);
    edu.dma(BUFFER, address, DMA_START | DMA_FROM_DEVICE)?;
    has(second, 0x55).context("written, though it was never mapped")?;
    println!("edu works behind the IOMMU, and did not reach {OWN:#x} and {address:#x}");
    Ok(())
}

/// Tests DMA in both directions.
fn to_and_fro(space: &Space, edu: &Edu) -> Result<()> {
    let (page, address) = page()?;
    fill(page, 0x5a);
    space.map(OWN, page, PAGE, READ | WRITE)?;
    edu.dma(OWN, BUFFER, DMA_START)?;
    edu.dma(BUFFER, OWN + 2048, DMA_START | DMA_FROM_DEVICE)?;
    has(page.wrapping_add(2048), 0x5a)
        .with_context(|| format!("with the page {address:#x} at {OWN:#x}"))?;
    space.unmap(OWN, PAGE)
}

/// Copies in both directions once, for loads that repeat this.
pub fn copy() -> Result<()> {
    let mut space = Space::new()?;
    let device = space.take(0)?;
    for _ in 0..20 {
        to_and_fro(&space, &device.edu)?;
    }
    println!("copied");
    Ok(())
}

/// One device writes to a register of another one, which this program has mapped for both.
pub fn peers() -> Result<()> {
    const VALUE: u32 = 0x600d_1dea;
    let mut space = Space::new()?;
    let (one, other) = (space.take(0)?, space.take(1)?);
    let (one, other) = (&one.edu, &other.edu);
    let (page, _) = page()?;
    // SAFETY: within the page, aligned.
    unsafe { page.cast::<u32>().write_volatile(VALUE) };
    space.map(OWN, page, PAGE, READ | WRITE)?;
    let far = OWN + 0x1000_0000;
    space.map(far, other.registers, PAGE, READ | WRITE)?;
    one.dma_of(4, OWN, BUFFER, DMA_START)?;
    other.write(LIVENESS, 0);
    one.dma_of(
        4,
        BUFFER,
        far + LIVENESS as u64,
        DMA_START | DMA_FROM_DEVICE,
    )?;
    let answer = other.read(LIVENESS);
    ensure!(answer == !VALUE, "the other device has {answer:#x}");
    println!("they reach each other");
    Ok(())
}
