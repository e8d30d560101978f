//! The two interfaces that the kernel has for the I/O page tables of devices.

use std::{collections::BTreeSet, os::fd::RawFd, sync::Arc};

use iommufd_ioctls::IommuFd;
use vfio_ioctls::VfioDeviceFd;

use super::{
    Error,
    groups::{self, Groups},
    host_device::Way,
    iommufd::Iommufd,
    tables::Tables,
};

/// Creates address spaces of one kind.
pub enum Provider {
    /// Containers.
    Groups(Arc<VfioDeviceFd>),
    /// Address spaces of this one iommufd: a bus reset requires all devices on the bus to be bound
    /// to it.
    Iommufd(Arc<IommuFd>, Arc<VfioDeviceFd>),
}

impl Provider {
    /// `hypervisor` is KVM's VFIO device, through which KVM learns which devices the VM uses.
    pub fn new(way: Way, hypervisor: VfioDeviceFd) -> Result<Self, Error> {
        let hypervisor = Arc::new(hypervisor);
        Ok(match way {
            Way::Groups => Self::Groups(hypervisor),
            Way::Iommufd(file) => Self::Iommufd(Arc::new(IommuFd::new_from_fd(file)), hypervisor),
        })
    }

    /// Creates an address space without devices and mappings.
    pub fn tables(&self) -> Result<Box<dyn Tables>, Error> {
        Ok(match self {
            Self::Groups(hypervisor) => Box::new(Groups::new(Arc::clone(hypervisor))?),
            Self::Iommufd(file, hypervisor) => {
                Box::new(Iommufd::new(Arc::clone(file), Arc::clone(hypervisor))?)
            }
        })
    }

    /// What the limit of locked memory applies to, for messages.
    pub fn limit_of(&self) -> &'static str {
        match self {
            Self::Groups(_) => "this process",
            Self::Iommufd(..) => "all processes of this user together",
        }
    }

    /// Descriptors that prove to the kernel that the devices of these groups belong to this VM.
    pub fn proof(&self, groups: &BTreeSet<&str>) -> Vec<RawFd> {
        match self {
            Self::Groups(_) => groups::descriptors(groups),
            // The kernel knows the owner of each device.
            Self::Iommufd(..) => Vec::new(),
        }
    }
}
