//! A device of the host, through sysfs and the kernel's VFIO.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use base::Unpoisoned;
use device_model::memory::HostMemory;
use pci::Bdf;
use vfio_bindings::bindings::vfio::{
    VFIO_IRQ_INFO_NORESIZE, VFIO_PCI_ERR_IRQ_INDEX, VFIO_PCI_REQ_IRQ_INDEX,
    VFIO_REGION_INFO_FLAG_MMAP, VFIO_REGION_INFO_FLAG_WRITE,
};
use vfio_ioctls::{VfioDevice, VfioRegionInfoCap};
use virtio::iommu::Endpoints;
use vmm_sys_util::eventfd::EventFd;

use super::{
    Error, Iommu,
    device::{Device, Irqs, Mappable, ResetError},
    host_device::HostDevice,
    ioctl,
    iommu::Attached,
};

/// A device that a kernel driver gives to this process through VFIO.
pub struct Physical {
    address: String,
    device: Arc<VfioDevice>,
    /// Dropped after the device.
    attached: Attached,
    /// Set if it is behind a virtual IOMMU.
    behind: Option<Behind>,
}

/// A device's registration with a virtual IOMMU.
struct Behind {
    endpoints: Endpoints,
    /// Its endpoint ID there, while it is plugged in.
    number: Mutex<Option<u32>>,
}

impl Behind {
    fn set(&self, number: Option<u32>) {
        let mut current = self.number.lock_unpoisoned();
        if let Some(old) = std::mem::replace(&mut *current, number) {
            self.endpoints.remove(old);
        }
    }
}

impl Physical {
    /// Takes over a device. It reaches all RAM or, behind a virtual IOMMU (`behind`), what the
    /// guest maps once the device is plugged in.
    pub fn open(
        host_device: HostDevice,
        iommu: &Arc<Iommu>,
        behind: Option<&Endpoints>,
    ) -> Result<Self, Error> {
        let attached = iommu.attach(&host_device, behind.is_some())?;
        let Some(device) = attached.device().map(Arc::clone) else {
            return Err(Error::NoDevice {
                path: host_device.path,
            });
        };
        Ok(Self {
            address: host_device.address,
            device,
            attached,
            behind: behind.map(|endpoints| Behind {
                endpoints: endpoints.clone(),
                number: Mutex::default(),
            }),
        })
    }
}

impl Physical {
    /// Its address on the host, such as `0000:01:00.0`.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Connects events: `wanted` is raised, repeatedly, when the host wants the device back, and
    /// `failed` when the device has an unrecoverable error (PCI Express AER).
    pub fn report(&self, wanted: &EventFd, failed: &EventFd) -> io::Result<()> {
        let events = [
            (VFIO_PCI_REQ_IRQ_INDEX, wanted),
            (VFIO_PCI_ERR_IRQ_INDEX, failed),
        ];
        for (index, eventfd) in events {
            // Only PCI Express devices report errors.
            let info = self.device.get_irq_info(index);
            if info.is_some_and(|info| info.count > 0) {
                ioctl::connect_irqs(&*self.device, index, 0, &[eventfd.as_raw_fd()])?;
            }
        }
        Ok(())
    }

    /// Retries while the host's error recovery holds the device, for at most a second.
    fn reset_itself(&self) -> io::Result<()> {
        const PATIENCE: Duration = Duration::from_secs(1);
        const PAUSE: Duration = Duration::from_millis(10);
        let start = Instant::now();
        loop {
            match ioctl::reset(&*self.device) {
                Err(error)
                    if error.raw_os_error() == Some(libc::EAGAIN) && start.elapsed() < PATIENCE =>
                {
                    thread::sleep(PAUSE);
                }
                other => return other,
            }
        }
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        // SAFETY: the device keeps its descriptor open as long as `self` lives.
        unsafe { BorrowedFd::borrow_raw(self.device.as_raw_fd()) }
    }

    /// Offset of a region access in the device's file; `None` if it extends beyond the region.
    /// `VfioDevice::region_read` would log that each time that the guest does it.
    fn place_of(&self, region: u32, offset: u64, len: usize) -> Option<u64> {
        let end = offset.checked_add(len as u64)?;
        let start = self.device.get_region_offset(region);
        (end <= self.region_size(region)).then(|| start.checked_add(offset))?
    }
}

impl Device for Physical {
    fn name(&self) -> &str {
        &self.address
    }

    fn region_size(&self, region: u32) -> u64 {
        self.device.get_region_size(region)
    }

    fn mappable(&self, region: u32) -> Option<Mappable<'_>> {
        let flags = self.device.get_region_flags(region);
        if flags & VFIO_REGION_INFO_FLAG_MMAP == 0 {
            return None;
        }
        let mut capabilities = self.device.get_region_caps(region).into_iter();
        let sparse = capabilities.find_map(|capability| match capability {
            VfioRegionInfoCap::SparseMmap(sparse) => Some(sparse.areas),
            _ => None,
        });
        let areas = match sparse {
            Some(areas) => areas
                .iter()
                .map(|area| (area.offset, area.offset.saturating_add(area.size)))
                .collect(),
            None => vec![(0, self.region_size(region))],
        };
        Some(Mappable {
            file: self.descriptor(),
            offset: self.device.get_region_offset(region),
            areas,
            writable: flags & VFIO_REGION_INFO_FLAG_WRITE != 0,
        })
    }

    fn read(&self, region: u32, offset: u64, data: &mut [u8]) {
        let read = self.place_of(region, offset, data.len()).map(|at| {
            rustix::io::retry_on_intr(|| rustix::io::pread(self.descriptor(), &mut *data, at))
        });
        if read != Some(Ok(data.len())) {
            data.fill(0xff);
        }
    }

    fn write(&self, region: u32, offset: u64, data: &[u8]) {
        if let Some(at) = self.place_of(region, offset, data.len()) {
            // Writes that a failed device does not accept are lost.
            let _ = rustix::io::retry_on_intr(|| rustix::io::pwrite(self.descriptor(), data, at));
        }
    }

    fn irq_count(&self, irqs: Irqs) -> u32 {
        let info = self.device.get_irq_info(irqs as u32);
        info.map_or(0, |info| info.count)
    }

    fn irqs_grow(&self, irqs: Irqs) -> bool {
        let info = self.device.get_irq_info(irqs as u32);
        info.is_some_and(|info| info.flags & VFIO_IRQ_INFO_NORESIZE == 0)
    }

    fn connect(&self, irqs: Irqs, first: u16, eventfds: &[Option<&EventFd>]) -> io::Result<()> {
        let eventfds: Vec<_> = eventfds
            .iter()
            .map(|eventfd| eventfd.map_or(-1, AsRawFd::as_raw_fd))
            .collect();
        ioctl::connect_irqs(&*self.device, irqs as u32, first.into(), &eventfds)
    }

    fn connect_line(&self, assert: &EventFd, served: &EventFd) -> io::Result<()> {
        let index = Irqs::Line as u32;
        ioctl::connect_irqs(&*self.device, index, 0, &[assert.as_raw_fd()])?;
        ioctl::unmask_line_by(&*self.device, served.as_raw_fd()).map_err(|error| {
            // It would assert the line once and never again.
            let _ = self.disconnect(Irqs::Line);
            let why = format!("its driver has no eventfd unmask its interrupt line ({error})");
            io::Error::new(error.kind(), why)
        })
    }

    fn disconnect(&self, irqs: Irqs) -> io::Result<()> {
        ioctl::disconnect_irqs(&*self.device, irqs as u32)
    }

    fn offer(&self, guest: u64, memory: HostMemory) -> Option<Box<dyn Send>> {
        // The kernel maps for reading and writing.
        let memory = Some(memory).filter(|memory| !memory.read_only)?;
        Some(Box::new(self.attached.offer(guest, memory)?))
    }

    fn plugged(&self, bdf: Bdf) -> io::Result<()> {
        let Some(behind) = &self.behind else {
            return Ok(());
        };
        let number = u32::from(bdf.segment) << 16 | u32::from(bdf.requester_id());
        let space = Arc::clone(self.attached.space());
        let added = behind.endpoints.add(number, space);
        added.map_err(io::Error::other)?;
        behind.set(Some(number));
        Ok(())
    }

    fn unplugged(&self) {
        if let Some(behind) = &self.behind {
            behind.set(None);
        }
    }

    /// Uses the device's own reset or, without one, that of its bus if no other user is on it.
    fn reset(&self) -> Result<(), ResetError> {
        let own = match self.reset_itself() {
            Ok(()) => return Ok(()),
            Err(error) => error,
        };
        let together = match ioctl::reset_together(&*self.device) {
            Ok(devices) => devices,
            // vfio-pci and other drivers return this for a device without a reset.
            Err(_) if matches!(own.raw_os_error(), Some(libc::EINVAL | libc::ENOTTY)) => {
                return Err(ResetError::None);
            }
            Err(_) => return Err(own.into()),
        };
        self.attached.reset_bus(&self.device, &together)
    }

    fn prepare_bus_reset(&self) {
        self.attached.begin_idleness();
    }

    /// The guest requests a reset of the bus, which a device may need more than its own. It is done
    /// once for all devices on the bus, and only if the VM owns all of them.
    fn reset_bus(&self) -> Result<bool, ResetError> {
        let together = ioctl::reset_together(&*self.device);
        let reset = together.map(|together| self.attached.reset_bus(&self.device, &together));
        self.attached.end_idleness();
        match reset {
            Ok(Ok(())) => Ok(true),
            _ => self.reset().map(|()| false),
        }
    }
}

impl Drop for Physical {
    fn drop(&mut self) {
        self.unplugged();
    }
}
