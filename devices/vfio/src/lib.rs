//! Passthrough of physical devices to a guest (VFIO).
//!
//! A kernel driver, either vfio-pci or a vendor's own, gives a device to this process, and the
//! guest sees it as a PCI function of its own:
//!
//! ```text
//!   guest driver ── BAR, mapped ──────────────────────────> device      (no exit)
//!        │       ── BAR page with the MSI-X table ──> trapped, MsixTable
//!        │       ── configuration space ──> Function ──> vfio-pci
//!        └<── interrupt <── KVM irqfd <── eventfd <── vfio-pci <── device (no user space)
//!   guest RAM <── IOMMU (Space: guest-physical addresses, or <───── device DMA
//!                        what the guest maps)
//! ```
//!
//! - [`iommu`]: the devices and their address spaces ([`space`]); the memory that they can reach:
//!   [`reachable`].
//! - [`host_device`]: where a device is on the host, and how to open it.
//! - [`tables`]: the kernel's two interfaces to let devices reach RAM: [`groups`] and
//!   [`mod@iommufd`].
//! - [`reach`]: the addresses that the IOMMU translates; [`host_reserved`]: those that no IOMMU of
//!   the host translates.
//! - [`device`]: the interface of a device, independent of who serves it.
//! - [`physical`]: a device of the host, through the kernel.
//! - [`capabilities`] and [`extended`]: the capabilities that the guest sees.
//! - [`mapping`] and [`bar`]: its memory in the guest.
//! - [`interrupts`]: the interrupts that reach the guest.
//! - [`power`]: power states, which are emulated.
//! - [`function`]: the PCI function; [`model`]: its model, to compare a replacement.
//! - [`user`]: devices that another process serves.

mod bar;
mod capabilities;
mod device;
mod extended;
mod function;
mod groups;
mod host_device;
mod host_reserved;
mod interrupts;
mod ioctl;
mod iommu;
mod iommufd;
mod mapping;
mod model;
mod physical;
mod power;
mod provider;
mod reach;
mod reachable;
mod space;
mod tables;
#[cfg(any(test, feature = "test-support"))]
pub mod testing;
#[cfg(test)]
mod tests;
pub mod user;

use std::{
    io,
    path::{Path, PathBuf},
};

pub use capabilities::NoClique;
pub use device::{Device, IrqRun, Irqs, Mappable, ResetError};
pub use function::{Function, Resources};
pub use host_device::{Given, HostDevice, IOMMUFD, Way, folder_of, is_mediated, is_of_vfio};
pub use host_reserved::reserved_by_all;
pub use iommu::Iommu;
pub use model::Model;
pub use physical::Physical;

/// Advice for a file that cannot be opened and that a kernel module creates.
fn cure(path: &Path, why: &io::Error, module: &str) -> String {
    if why.kind() != io::ErrorKind::PermissionDenied {
        return format!(": load the module {module}, and give Gantry access");
    }
    // SAFETY: the call has no preconditions.
    match unsafe { libc::geteuid() } {
        0 => ": Gantry runs as root, so allow it in the container that Gantry runs in".to_owned(),
        user => {
            let path = path.display();
            format!(
                " as user {user}: give it to that user (chown {user} {path}, or a rule of udev)"
            )
        }
    }
}

/// Why a physical device cannot be given to the guest.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The path does not name a device.
    #[error(
        "{path} is no PCI device and no mediated device: name its folder in sysfs, such as \
         /sys/bus/pci/devices/0000:01:00.0 or /sys/bus/mdev/devices/UUID"
    )]
    NoDevice {
        /// The path.
        path: PathBuf,
    },
    /// VFIO does not own the device.
    #[error(
        "{device} is bound to {driver} instead of vfio-pci or another driver that gives its device \
         to VFIO: write the name of such a driver to \
         /sys/bus/pci/devices/{device}/driver_override, {device} to \
         /sys/bus/pci/devices/{device}/driver/unbind and to /sys/bus/pci/drivers_probe{instead}"
    )]
    Driver {
        /// Its address.
        device: String,
        /// The driver, or "no driver".
        driver: String,
        /// Alternatives; empty, or a further sentence.
        instead: String,
    },
    /// Its vendor's driver has no vGPU type configured for it.
    #[error(
        "{device} is a virtual function without a vGPU type: write a number from \
         /sys/bus/pci/devices/{device}/nvidia/creatable_vgpu_types to current_vgpu_type beside it"
    )]
    NoVgpuType {
        /// Its address.
        device: String,
    },
    /// VFIO owns both the virtual and the physical function.
    #[error(
        "{device} is a virtual function of {physical}, which VFIO has, too, so that each of its \
         functions needs a token, which Gantry does not give: have {physical} bound to a driver of \
         the host"
    )]
    NeedsToken {
        /// Its address.
        device: String,
        /// Address of the physical function.
        physical: String,
    },
    /// Its driver refuses to open it.
    #[error("{driver}, the driver of {device}, does not give it: the kernel's log may say why")]
    Withheld {
        /// Its address.
        device: String,
        /// The driver.
        driver: String,
        /// The driver's error.
        source: io::Error,
    },
    /// A VFIO device that is not a PCI device.
    #[error("{device} is a device of VFIO, but none of PCI: its driver is {driver}")]
    NotPci {
        /// Its name.
        device: String,
        /// The driver.
        driver: String,
    },
    /// There is no IOMMU for it.
    #[error(
        "{device} is in no IOMMU group: switch the IOMMU on in the firmware and on the kernel's \
         command line (intel_iommu=on)"
    )]
    NoGroup {
        /// Its address.
        device: String,
    },
    /// It is in use.
    #[error("IOMMU group {group} of {device} is in use: another VM has a device of it")]
    Busy {
        /// Its address.
        device: String,
        /// Its group.
        group: String,
    },
    /// The device is already in the VM.
    #[error("the VM has this device already: {device}")]
    Twice {
        /// Its address.
        device: String,
    },
    /// Another device of the group is in another address space.
    #[error(
        "{device} is in IOMMU group {group} with {other}, which the VM has: the host does not tell \
         their DMA apart, so that neither can be behind the virtual IOMMU while the VM has the other"
    )]
    GroupApart {
        /// Its address.
        device: String,
        /// Its group.
        group: String,
        /// Address of the other device.
        other: String,
    },
    /// The host uses another device of the group.
    #[error(
        "IOMMU group {group} of {device} has devices that the host uses: bind all of \
         /sys/kernel/iommu_groups/{group}/devices to vfio-pci or other drivers of VFIO"
    )]
    GroupNotViable {
        /// Its address.
        device: String,
        /// Its group.
        group: String,
    },
    /// The device could send arbitrary interrupts to the host.
    #[error(
        "the host's IOMMU does not remap interrupts, so that {device} could send the host any \
         interrupt: switch remapping on in the firmware (not nointremap on the kernel's command \
         line); or, if the guest is trusted, load the module {module} with \
         allow_unsafe_interrupts=1"
    )]
    UnsafeInterrupts {
        /// Its address.
        device: String,
        /// The module with an option to permit it.
        module: &'static str,
    },
    /// The kernel refuses it for one of two possible reasons.
    #[error(
        "the kernel does not give {device} to iommufd: another process has a device of IOMMU group \
         {group}, which has to end or give it up first; or the host's IOMMU does not remap \
         interrupts: switch remapping on in the firmware, or, if the guest is trusted, load the \
         module iommufd with allow_unsafe_interrupts=1 (/dev/vfio/{group}, which would tell, cannot \
         be opened)"
    )]
    Refused {
        /// Its address.
        device: String,
        /// Its group.
        group: String,
    },
    /// A file of VFIO cannot be opened.
    #[error("cannot open {}{}", path.display(), cure(path, source, "vfio-pci"))]
    Open {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The kernel provides no device file for it.
    #[error(
        "{device} has no file in /dev/vfio/devices, which iommufd needs: the host needs a kernel \
         with CONFIG_IOMMUFD and CONFIG_VFIO_DEVICE_CDEV; or have IOMMU groups used, without \
         iommufd in the platform or access to /dev/iommu"
    )]
    NoNode {
        /// Its address.
        device: String,
    },
    /// A file that iommufd requires cannot be opened.
    #[error(
        "cannot open {}, which iommufd needs{}; or have IOMMU groups used, without iommufd in the \
         platform or access to /dev/iommu",
        path.display(),
        cure(path, source, "iommufd")
    )]
    OpenIommufd {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Its IOMMU reserves addresses that are in use.
    #[error(
        "{device} is behind an IOMMU that reserves addresses at which the VM has RAM: give the VM \
         less memory"
    )]
    Collides {
        /// Its address.
        device: String,
    },
    /// A descriptor is another file's.
    #[error(
        "the descriptor for {device} is not that of its file: open the one in /dev/vfio/devices"
    )]
    NotItsFile {
        /// Its address.
        device: String,
    },
    /// It is to be tied to another iommufd than the VM's other devices.
    #[error(
        "the iommufd for {device} is not that of the VM's other devices: give all the same one"
    )]
    OtherIommufd {
        /// Its address.
        device: String,
    },
    /// The device's file is tied to an iommufd already, or another process has the device.
    #[error(
        "the file of {device} belongs to another iommufd, or another process has the device: end \
         that, and open the file and an iommufd anew for each VM"
    )]
    Bound {
        /// Its address.
        device: String,
    },
    /// It cannot be in a GPUDirect clique.
    #[error("{device} cannot be in a GPUDirect clique: {source}; leave x_nv_gpudirect_clique out")]
    Clique {
        /// Its address.
        device: String,
        /// The reason.
        source: NoClique,
    },
    /// Another VFIO error.
    #[error("cannot {action}")]
    Vfio {
        /// The action that failed.
        action: &'static str,
        /// The cause.
        source: vfio_ioctls::VfioError,
    },
    /// Another error of the host.
    #[error("cannot {action}")]
    Host {
        /// The action that failed.
        action: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// RAM cannot be locked in memory.
    #[error(
        "cannot lock {len} bytes of RAM at {guest:#x} in memory for the device: the limit of {of} \
         (in bytes) is {limit}; raise it to somewhat more than the VM's size (ulimit -l, \
         LimitMEMLOCK= of a systemd unit, limits.conf), or free memory of the host"
    )]
    MemoryLimit {
        /// Guest-physical address.
        guest: u64,
        /// Length in bytes.
        len: u64,
        /// Whose memory counts towards the limit.
        of: &'static str,
        /// The limit, as `ulimit -l` prints it.
        limit: String,
    },
    /// RAM is beyond the width of the IOMMU's addresses.
    #[error(
        "the device cannot reach {len} bytes of RAM at {guest:#x}: its IOMMU translates addresses \
         up to {end:#x}; give the VM less memory (hot-plug memory included), or use a host whose \
         IOMMU is wider"
    )]
    BeyondWidth {
        /// Guest-physical address.
        guest: u64,
        /// Length in bytes.
        len: u64,
        /// The last address that is translated.
        end: u64,
    },
    /// RAM is at addresses that the host's IOMMU does not translate.
    #[error(
        "the device cannot reach {len} bytes of RAM at {guest:#x}: the host reserves addresses in \
         it, and its IOMMU translates {ranges} only; give the VM less memory"
    )]
    Reserved {
        /// Guest-physical address.
        guest: u64,
        /// Length in bytes.
        len: u64,
        /// The ranges that are translated.
        ranges: String,
    },
    /// Guest RAM cannot be mapped for the device.
    #[error("cannot give the device access to {len} bytes of RAM at {guest:#x}")]
    MapRam {
        /// Guest-physical address.
        guest: u64,
        /// Length in bytes.
        len: u64,
        /// The cause.
        source: std::io::Error,
    },
    /// The host's limit of mappings is reached.
    #[error(
        "the host maps no more ranges of memory for the device, of which {len} bytes at {guest:#x} \
         would be one: load the module vfio_iommu_type1 with a higher dma_entry_limit, or have the \
         guest map larger ranges"
    )]
    TooManyMappings {
        /// Guest-physical address.
        guest: u64,
        /// Length in bytes.
        len: u64,
    },
    /// A BAR cannot be mapped.
    #[error("cannot map BAR {bar} of the device")]
    MapBar {
        /// Index of the BAR.
        bar: u8,
        /// The cause.
        source: io::Error,
    },
    /// A device that another process serves cannot be used.
    #[error("cannot use the device at {}", socket.display())]
    User {
        /// Socket of its server.
        socket: PathBuf,
        /// The cause.
        source: Box<user::Error>,
    },
    /// The device is a bridge.
    #[error("{device} is a bridge (header type {header:#x}): only endpoints can be given to a VM")]
    Bridge {
        /// Its address.
        device: String,
        /// Header type.
        header: u8,
    },
    /// Its configuration space cannot be presented to the guest.
    #[error("cannot lay out the configuration space of {device}")]
    Config {
        /// Its address.
        device: String,
        /// The cause.
        source: pci::ConfigError,
    },
}
