//! The configuration of a machine, in the form of the REST API and of a snapshot's `config.json`.
//!
//! Names, defaults and types are those of Cloud Hypervisor's API, so that its clients can drive Gantry. There is one
//! file per topic, with the type, its command-line syntax and its validation. The list of the kinds of devices is at
//! the end of this file.

mod accel;
mod accel_server;
mod balloon;
mod check;
mod common;
mod console;
mod cpus;
mod device;
mod disk;
mod gpu;
mod kind;
mod memory;
mod nearest;
mod net;
mod payload;
mod platform;
mod pmem;
mod rng;
mod root_port;
#[cfg(test)]
mod scratch;
pub mod syntax;
mod unsupported;
mod user_device;
mod vm;
mod vsock;

pub use accel::{AccelApi, AccelConfig, AccelTransport, AccelVia, GateConfig, RingConfig, SHARED};
pub use accel_server::AccelServerConfig;
pub use balloon::BalloonConfig;
pub use check::{Invalid, Placement, Problem};
pub use common::{CommonConfig, HasCommonConfig};
pub use console::{ConsoleConfig, ConsoleMode, DebugConsoleConfig, SerialConfig};
pub use cpus::{CoreScheduling, CpuAffinity, CpuFeatures, CpuTopology, CpusConfig};
pub use device::{DeviceConfig, host_device};
pub use disk::{DiskConfig, ImageType, LockGranularity, RateLimitGroupConfig, VirtQueueAffinity};
pub use gpu::GpuConfig;
pub use kind::{Configured, Device, FileAccess, FileUse, HotPlug, Kind, Refused};
pub use memory::{HotplugMethod, MemoryConfig, MemoryZoneConfig};
pub use nearest::nearest;
pub use net::{NetConfig, TapFd};
pub use payload::PayloadConfig;
pub use platform::{NumaConfig, NumaDistance, PciSegmentConfig, PlatformConfig};
pub use pmem::PmemConfig;
pub use rng::RngConfig;
pub use root_port::PciRootPortConfig;
pub use unsupported::{FsConfig, GenericVhostUserConfig, RtcConfig, TpmConfig, VdpaConfig};
pub use user_device::UserDeviceConfig;
pub use vm::LandlockConfig;
pub use vsock::VsockConfig;

vm::vm_config! {
    // The kinds of devices, in the order in which a machine plugs them in: the field of `VmConfig`, whose type tells
    // how many there can be, and the command-line option. Root ports come before the devices behind them.
    /// PCI Express root ports.
    pci_root_ports: Option<Vec<PciRootPortConfig>> = "pci-root-port",
    /// Entropy.
    rng: RngConfig = "rng",
    /// Virtio console.
    console: ConsoleConfig = "console",
    /// Disks.
    disks: Option<Vec<DiskConfig>> = "disk",
    /// Network cards.
    net: Option<Vec<NetConfig>> = "net",
    /// Persistent memory.
    pmem: Option<Vec<PmemConfig>> = "pmem",
    /// Physical devices.
    devices: Option<Vec<DeviceConfig>> = "device",
    /// Accelerators whose calls are served by worker processes.
    accels: Option<Vec<AccelConfig>> = "accel",
    /// Lets other VMs use a process of this VM as their accelerator.
    accel_server: Option<AccelServerConfig> = "accel-server",
    /// Virtual GPUs, which share a physical GPU through a mediator.
    gpus: Option<Vec<GpuConfig>> = "gpu",
    /// Devices that other processes serve.
    user_devices: Option<Vec<UserDeviceConfig>> = "user-device",
    /// Balloon.
    balloon: Option<BalloonConfig> = "balloon",
    /// Sockets between guest and host.
    vsock: Option<VsockConfig> = "vsock",
    /// Devices for a test, which shows that a kind needs no more than one line here.
    #[cfg(test)]
    scratches: Option<Vec<scratch::ScratchConfig>> = "scratch",
}

#[cfg(test)]
mod tests;
