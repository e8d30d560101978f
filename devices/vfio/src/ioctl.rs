//! VFIO ioctls (linux/vfio.h) that vfio-ioctls lacks, or whose result it hides.

use std::{
    io,
    os::fd::{AsRawFd, RawFd},
};

use vfio_bindings::bindings::vfio::{
    VFIO_BASE, VFIO_DMA_MAP_FLAG_READ, VFIO_DMA_MAP_FLAG_WRITE, VFIO_DMA_UNMAP_FLAG_ALL,
    VFIO_IRQ_SET_ACTION_TRIGGER, VFIO_IRQ_SET_ACTION_UNMASK, VFIO_IRQ_SET_DATA_EVENTFD,
    VFIO_IRQ_SET_DATA_NONE, VFIO_PCI_HOT_RESET_FLAG_DEV_ID, VFIO_PCI_INTX_IRQ_INDEX, VFIO_TYPE,
    vfio_iommu_type1_dma_map, vfio_iommu_type1_dma_unmap,
};
use virtio::iommu::Access;
use vmm_sys_util::{
    ioctl::{
        ioctl_with_mut_ptr, ioctl_with_mut_ref, ioctl_with_ptr, ioctl_with_ref, ioctl_with_val,
    },
    ioctl_io_nr,
};

use super::{host_device, reach::Reach};

ioctl_io_nr!(VFIO_DEVICE_SET_IRQS, VFIO_TYPE.into(), VFIO_BASE + 10);
ioctl_io_nr!(VFIO_DEVICE_RESET, VFIO_TYPE.into(), VFIO_BASE + 11);
ioctl_io_nr!(
    VFIO_DEVICE_GET_PCI_HOT_RESET_INFO,
    VFIO_TYPE.into(),
    VFIO_BASE + 12
);
ioctl_io_nr!(VFIO_DEVICE_PCI_HOT_RESET, VFIO_TYPE.into(), VFIO_BASE + 13);
ioctl_io_nr!(VFIO_IOMMU_GET_INFO, VFIO_TYPE.into(), VFIO_BASE + 12);
ioctl_io_nr!(VFIO_IOMMU_MAP_DMA, VFIO_TYPE.into(), VFIO_BASE + 13);
ioctl_io_nr!(VFIO_IOMMU_UNMAP_DMA, VFIO_TYPE.into(), VFIO_BASE + 14);

/// Maximum number of functions that one reset affects: all of a bus.
const MAX_TOGETHER: u32 = 256;

/// A device that is reset together with another one.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Neighbour {
    /// Its address, such as `0000:01:00.0`.
    pub address: String,
    /// Its IOMMU group.
    pub group: String,
}

/// Connects `eventfds` (-1: none) to the interrupts of a kind, from index `first` on.
pub fn connect_irqs(
    device: &impl AsRawFd,
    index: u32,
    first: u32,
    eventfds: &[RawFd],
) -> io::Result<()> {
    let flags = VFIO_IRQ_SET_DATA_EVENTFD | VFIO_IRQ_SET_ACTION_TRIGGER;
    set_irqs(device, flags, index, first, eventfds)
}

/// Unmasks the interrupt line when `served` is written, which means that the guest has served the
/// interrupt. vfio-pci masks the line after each interrupt.
pub fn unmask_line_by(device: &impl AsRawFd, served: RawFd) -> io::Result<()> {
    let flags = VFIO_IRQ_SET_DATA_EVENTFD | VFIO_IRQ_SET_ACTION_UNMASK;
    set_irqs(device, flags, VFIO_PCI_INTX_IRQ_INDEX, 0, &[served])
}

/// Disables the interrupts of a kind.
pub fn disconnect_irqs(device: &impl AsRawFd, index: u32) -> io::Result<()> {
    let flags = VFIO_IRQ_SET_DATA_NONE | VFIO_IRQ_SET_ACTION_TRIGGER;
    set_irqs(device, flags, index, 0, &[])
}

fn set_irqs(
    device: &impl AsRawFd,
    flags: u32,
    index: u32,
    first: u32,
    eventfds: &[RawFd],
) -> io::Result<()> {
    // struct vfio_irq_set: argsz, flags, index, start, count, then the descriptors.
    let count = eventfds.len() as u32;
    let mut words = vec![0, flags, index, first, count];
    words.extend(eventfds.iter().map(|fd| *fd as u32));
    words[0] = size_of_val(&words[..]) as u32;
    // SAFETY: the kernel reads `argsz` bytes, which is the size of `words`.
    done(unsafe { ioctl_with_ptr(device, VFIO_DEVICE_SET_IRQS(), words.as_ptr()) })
}

/// Resets a device by its own (function-level) reset.
pub fn reset(device: &impl AsRawFd) -> io::Result<()> {
    // SAFETY: no memory is involved.
    done(unsafe { ioctl_with_val(device, VFIO_DEVICE_RESET(), 0) })
}

/// The devices that a reset of the device's bus or slot affects, including itself. ENODEV: neither
/// can be reset.
pub fn reset_together(device: &impl AsRawFd) -> io::Result<Vec<Neighbour>> {
    // struct vfio_pci_hot_reset_info: argsz, flags, count, then two words per device.
    let mut words = vec![0_u32; 3 + 2 * MAX_TOGETHER as usize];
    words[0] = size_of_val(&words[..]) as u32;
    // SAFETY: the kernel writes at most `argsz` bytes, which is the size of `words`.
    done(unsafe {
        ioctl_with_mut_ptr(
            device,
            VFIO_DEVICE_GET_PCI_HOT_RESET_INFO(),
            words.as_mut_ptr(),
        )
    })?;
    let count = words[2].min(MAX_TOGETHER) as usize;
    let has_groups = words[1] & VFIO_PCI_HOT_RESET_FLAG_DEV_ID == 0;
    Ok(words[3..]
        .chunks_exact(2)
        .take(count)
        .map(|words| neighbour(words, has_groups))
        .collect())
}

/// struct vfio_pci_dependent_device: the group, then segment, bus and devfn. For a device that was
/// opened by its own file, the first word is an ID of iommufd.
fn neighbour(words: &[u32], has_group: bool) -> Neighbour {
    let [segment_low, segment_high, bus, devfn] = words[1].to_le_bytes();
    let segment = u16::from_le_bytes([segment_low, segment_high]);
    let address = format!("{segment:04x}:{bus:02x}:{:02x}.{}", devfn >> 3, devfn & 7);
    let group = match has_group {
        true => words[0].to_string(),
        // A missing group equals that of none of the VM's devices.
        false => host_device::group_of(&address).unwrap_or_default(),
    };
    Neighbour { address, group }
}

/// Resets the bus or slot of a device. `groups`, descriptors of IOMMU groups, prove that the caller
/// owns all devices on it; devices that were opened by their own files need none.
pub fn reset_bus(device: &impl AsRawFd, groups: &[RawFd]) -> io::Result<()> {
    // struct vfio_pci_hot_reset: argsz, flags, count, then the descriptors.
    let mut words = vec![0, 0, groups.len() as u32];
    words.extend(groups.iter().map(|fd| *fd as u32));
    words[0] = size_of_val(&words[..]) as u32;
    // SAFETY: the kernel reads `argsz` bytes, which is the size of `words`.
    done(unsafe { ioctl_with_ptr(device, VFIO_DEVICE_PCI_HOT_RESET(), words.as_ptr()) })
}

/// The addresses that a container's IOMMU translates.
pub fn reach_of_container(container: &impl AsRawFd) -> io::Result<Reach> {
    // struct vfio_iommu_type1_info, followed by capabilities.
    let mut bytes = vec![0_u64; 512];
    let mut len = size_of_val(&bytes[..]);
    loop {
        // `argsz`, the first member, has 32 bits; the kernel fills in the second one.
        bytes[0] = len as u64;
        // SAFETY: the kernel writes at most `argsz` bytes, which is the size of `bytes`.
        done(unsafe { ioctl_with_mut_ptr(container, VFIO_IOMMU_GET_INFO(), bytes.as_mut_ptr()) })?;
        let needed = (bytes[0] as u32) as usize;
        if needed <= len {
            break;
        }
        bytes = vec![0; needed.div_ceil(8)];
        len = size_of_val(&bytes[..]);
    }
    let bytes: Vec<u8> = bytes.into_iter().flat_map(u64::to_le_bytes).collect();
    Ok(Reach::parse(&bytes))
}

/// Maps `len` bytes of this process's memory in a container. `VfioContainer::vfio_dma_map` supports
/// only mappings for both reading and writing.
///
/// # Safety
/// Until it is unmapped again, the memory must stay mapped in this process, and be accessed only as
/// bytes that may change at any time.
pub unsafe fn map_in_container(
    container: &impl AsRawFd,
    at: u64,
    len: u64,
    host: *mut u8,
    access: Access,
) -> io::Result<()> {
    let flag = |wanted, flag| if wanted { flag } else { 0 };
    let map = vfio_iommu_type1_dma_map {
        argsz: size_of::<vfio_iommu_type1_dma_map>() as u32,
        flags: flag(access.read, VFIO_DMA_MAP_FLAG_READ)
            | flag(access.write, VFIO_DMA_MAP_FLAG_WRITE),
        vaddr: host as u64,
        iova: at,
        size: len,
    };
    // SAFETY: the kernel reads `argsz` bytes, which is the size of `map`; the caller guarantees the
    // memory.
    done(unsafe { ioctl_with_ref(container, VFIO_IOMMU_MAP_DMA(), &map) })
}

/// Removes all mappings of a container. EINVAL: the kernel (before Linux 5.11) does not support
/// that in one call.
pub fn clear_container(container: &impl AsRawFd) -> io::Result<()> {
    let mut unmap = vfio_iommu_type1_dma_unmap {
        argsz: size_of::<vfio_iommu_type1_dma_unmap>() as u32,
        flags: VFIO_DMA_UNMAP_FLAG_ALL,
        ..Default::default()
    };
    // SAFETY: the kernel reads and writes `argsz` bytes, which is the size of `unmap`.
    done(unsafe { ioctl_with_mut_ref(container, VFIO_IOMMU_UNMAP_DMA(), &mut unmap) })
}

/// Converts the result of an ioctl.
pub fn done(result: libc::c_int) -> io::Result<()> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    // A positive result is the number of interrupts that would have been possible.
    if result > 0 {
        return Err(io::ErrorKind::StorageFull.into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_neighbour_has_the_address_that_sysfs_gives_it() {
        let words = [7, u32::from_le_bytes([0x34, 0x12, 0xab, 0x1f << 3 | 5])];
        let expected = Neighbour {
            address: "1234:ab:1f.5".to_owned(),
            group: "7".to_owned(),
        };
        assert_eq!(neighbour(&words, true), expected);
        let group = String::new();
        assert_eq!(neighbour(&words, false), Neighbour { group, ..expected });
    }

    const READ: Access = Access {
        read: true,
        write: false,
    };

    #[test]
    fn what_is_no_device_is_refused() {
        let file = std::fs::File::open("/dev/null").unwrap();
        for result in [
            connect_irqs(&file, 2, 0, &[-1]),
            disconnect_irqs(&file, 2),
            reset(&file),
            reset_together(&file).map(drop),
            reset_bus(&file, &[]),
            reach_of_container(&file).map(drop),
            clear_container(&file),
            // SAFETY: the file does not support the ioctl, so nothing is mapped.
            unsafe { map_in_container(&file, 0, 0, std::ptr::null_mut(), READ) },
        ] {
            assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::ENOTTY));
        }
    }
}
