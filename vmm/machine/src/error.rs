//! Errors of creating, changing and saving a machine.

use std::{error::Error, io, path::PathBuf};

use arch::{
    acpi::AcpiError, boot::BootError, layout::LayoutError, smbios::SmbiosError,
    topology::TopologyError,
};
use devices::{
    acpi::{CpuHotplugError, MemoryHotplugError},
    bus::BusError,
    console::ConsoleError,
    disk::DiskError,
    legacy::SerialRestoreError,
    pci::{LifecycleError, PciError},
    virtio::pci::VirtioPciError,
};
use vmm_memory::RamError;
use vmm_snapshot::{
    lazy::LazyError, lock::LockError, memory_file::MemoryFileError, state_file::StateFileError,
};

use crate::cpu::CpusError;

/// A device could not be created from its configuration.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// An error of the device itself.
    #[error(transparent)]
    Device(Box<dyn Error + Send + Sync>),
    /// An error of VFIO or vfio-user.
    #[error(transparent)]
    Physical(#[from] devices::vfio::Error),
    /// An error of the hypervisor.
    #[error(transparent)]
    Hypervisor(#[from] hypervisor::Error),
    /// Another host operation failed.
    #[error("cannot {action}")]
    Host {
        /// The attempted operation.
        action: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// The configuration is invalid.
    #[error("{0}")]
    Invalid(String),
}

impl DeviceError {
    /// Wraps the error of a device.
    pub fn of(error: impl Error + Send + Sync + 'static) -> Self {
        Self::Device(Box::new(error))
    }
}

/// An operation on a machine failed.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// KVM.
    #[error("the hypervisor failed")]
    Hypervisor(#[from] hypervisor::Error),
    /// The address space.
    #[error("the machine does not fit its address space")]
    Layout(#[from] LayoutError),
    /// The topology.
    #[error("the vCPUs cannot be arranged as configured")]
    Topology(#[from] TopologyError),
    /// The configuration is invalid.
    #[error("{0}")]
    Invalid(String),
    /// Memory.
    #[error("the guest's memory cannot be set up")]
    Ram(#[from] RamError),
    /// vCPUs.
    #[error("the vCPUs failed")]
    Cpus(#[from] CpusError),
    /// The file to boot from.
    #[error("cannot open the {what} {}", path.display())]
    OpenPayload {
        /// Kernel, firmware or initramfs.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Nobody waits for the machine any more.
    #[error("the VM is not made: it was cancelled")]
    Cancelled,
    /// Nothing to boot.
    #[error(
        "there is nothing to boot: set payload.kernel (--kernel) or payload.firmware (--firmware)"
    )]
    NoKernel,
    /// The kernel or the firmware.
    #[error("cannot boot {}", path.display())]
    Boot {
        /// The kernel or the firmware.
        path: PathBuf,
        /// The cause.
        source: BootError,
    },
    /// ACPI tables.
    #[error("cannot describe the machine to the guest (ACPI)")]
    Acpi(#[from] AcpiError),
    /// SMBIOS tables.
    #[error("cannot describe the machine to the guest (SMBIOS)")]
    Smbios(#[from] SmbiosError),
    /// Physical devices cannot reach new RAM.
    #[error("cannot give the VM's physical devices access to the new memory")]
    PhysicalMemory(#[source] Box<devices::vfio::Error>),
    /// A register range.
    #[error("two devices claim the same addresses")]
    Bus(#[from] BusError),
    /// A console.
    #[error("cannot set up the {what}")]
    Console {
        /// Which.
        what: &'static str,
        /// The cause.
        source: ConsoleError,
    },
    /// A host operation failed.
    #[error("cannot {action}")]
    Host {
        /// The attempted operation.
        action: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// A device.
    #[error("cannot add {kind} {id:?}")]
    Device {
        /// Kind of device.
        kind: &'static str,
        /// Its name.
        id: String,
        /// The cause.
        source: Box<DeviceError>,
    },
    /// A device could not be made a PCI function.
    #[error("cannot make a PCI function of device {id:?}")]
    Function {
        /// Its name.
        id: String,
        /// The cause.
        source: VirtioPciError,
    },
    /// A device could not be placed on PCI.
    #[error("device {id:?} has no place")]
    Pci {
        /// Its name.
        id: String,
        /// The cause.
        source: PciError,
    },
    /// A device failed to pause, resume or otherwise change its state.
    #[error("device {id:?} failed")]
    Lifecycle {
        /// Its name.
        id: String,
        /// The cause.
        source: LifecycleError,
    },
    /// Applications of accelerators could not be saved.
    #[error("the applications of accelerators cannot be saved")]
    Applications(#[from] devices::accel::saved::Error),
    /// Applications of accelerators that no worker could restore.
    #[error("cannot go on with the applications of accelerators: {}", .0.join("; "))]
    TakeUp(Vec<String>),
    /// The name is already in use.
    #[error("there is a device {0:?} already: choose another id")]
    DuplicateId(String),
    /// There is no device with this name.
    #[error("there is no device {0:?}")]
    NoDevice(String),
    /// The device is not removable.
    #[error("device {0:?} is part of the machine and cannot be removed")]
    NotRemovable(String),
    /// There is no root port with this name.
    #[error("there is no PCI root port '{0}': give the VM one with --pci-root-port id={0}")]
    NoRootPort(String),
    /// The device is emulated by Gantry, so it cannot be behind the virtual IOMMU.
    #[error(
        "PCI segment {segment} is behind the virtual IOMMU, which can hold physical devices only: of \
         {kind}, the VMM serves what it does itself, and an IOMMU would keep it from nothing. Choose \
         another pci_segment"
    )]
    BehindIommu {
        /// Kind of device.
        kind: &'static str,
        /// The segment.
        segment: u16,
    },
    /// The VM has no virtual IOMMU.
    #[error(
        "the VM has no virtual IOMMU, which it gets when it starts: name the PCI segments behind it \
         with --platform num_pci_segments=2,iommu_segments=[1]"
    )]
    NoIommu,
    /// A device that must be behind the virtual IOMMU is not.
    #[error(
        "PCI segment {segment} is not behind the virtual IOMMU: those behind it are {behind:?}"
    )]
    NotBehindIommu {
        /// The segment.
        segment: u16,
        /// The segments that are.
        behind: Vec<u16>,
    },
    /// The guest has already scanned the slot.
    #[error(
        "function {function} comes too late: the guest knows what is in slot {slot}. Plug function 0 \
         last: remove what is there (a slot leaves as a whole), and add the functions again"
    )]
    TooLate {
        /// The function number.
        function: u8,
        /// Its slot.
        slot: devices::pci::Bdf,
    },
    /// There is no such PCI segment.
    #[error(
        "there is no PCI segment {segment}: the machine has {count} (platform.num_pci_segments)"
    )]
    NoSegment {
        /// The requested segment.
        segment: u16,
        /// Number of segments.
        count: u16,
    },
    /// vCPU hot-plug.
    #[error("cannot change the number of vCPUs")]
    CpuHotplug(#[from] CpuHotplugError),
    /// A vCPU removal is still in progress.
    #[error("the guest is still removing vCPUs: try again when it has")]
    CpuRemovalPending,
    /// Memory hot-plug.
    #[error("cannot plug memory")]
    MemoryHotplug(#[from] MemoryHotplugError),
    /// The device is not of the required kind.
    #[error("device {id:?} is no {expected}")]
    WrongKind {
        /// Its name.
        id: String,
        /// The required kind.
        expected: &'static str,
    },
    /// A disk could not be resized.
    #[error("cannot resize disk {id:?}")]
    ResizeDisk {
        /// Its name.
        id: String,
        /// The cause.
        source: devices::disk::DiskError,
    },
    /// Disks could not be flushed for a snapshot.
    #[error("cannot write to stable storage what the guest has written to its disks")]
    FlushDisks(#[source] std::io::Error),
    /// The serial port's state.
    #[error("the snapshot's serial port is not valid")]
    SerialState(#[from] SerialRestoreError),
    /// The snapshot has a device missing or one too many.
    #[error("the snapshot does not fit its configuration: {0}")]
    SnapshotMismatch(String),
    /// A snapshot's directory.
    #[error(transparent)]
    SnapshotInUse(#[from] LockError),
    /// Memory of a snapshot.
    #[error("the snapshot's memory failed")]
    MemoryFile(#[from] MemoryFileError),
    /// State of a snapshot.
    #[error("cannot use the state file {}", path.display())]
    StateFile {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: StateFileError,
    },
    /// Configuration of a snapshot.
    #[error("cannot use the configuration {}", path.display())]
    ConfigFile {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Another process would see memory that is not there yet as zeroes.
    #[error(
        "the VM's memory is still being restored on demand, and this device's server needs all of it: wait until the \
         log says that it is all there"
    )]
    StillLoading,
    /// The storage of the snapshot does not answer.
    #[error(
        "a device waits for memory that is restored on demand, and the snapshot's storage has not answered"
    )]
    MemoryAwaited,
    /// On-demand restore.
    #[error("memory cannot be restored on demand")]
    Lazy(#[from] LazyError),
    /// An invalid destination for a snapshot or core dump.
    #[error("{url:?} is no place for this: give file:///absolute/path")]
    Url {
        /// The given URL.
        url: String,
    },
    /// A coredump.
    #[error("cannot write the core dump {}", path.display())]
    Coredump {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

impl MachineError {
    /// The disk whose lock another process holds, if that was the cause.
    pub fn taken_disk(&self) -> Option<&str> {
        let Self::Device { id, source, .. } = self else {
            return None;
        };
        let DeviceError::Device(error) = &**source else {
            return None;
        };
        matches!(
            error.downcast_ref(),
            Some(devices::virtio::blk::Error::Disk(DiskError::Locked { .. }))
        )
        .then_some(id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_that_cannot_be_asked_for_is_nobodys() {
        let error = |source| MachineError::Device {
            kind: "disk",
            id: "disk0".to_owned(),
            source: Box::new(DeviceError::of(devices::virtio::blk::Error::Disk(source))),
        };
        let locked = DiskError::Locked {
            path: "/d".into(),
            read_only: false,
        };
        assert_eq!(error(locked).taken_disk(), Some("disk0"));
        let unreachable = DiskError::Lock {
            path: "/d".into(),
            source: io::Error::from_raw_os_error(libc::ENOLCK),
        };
        assert_eq!(error(unreachable).taken_disk(), None);
    }
}
