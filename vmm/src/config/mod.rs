//! The machine's configuration, as the REST API and `config.json` of a snapshot carry it.
//!
//! Names, defaults and types are those of Cloud Hypervisor's API, so that its clients can drive
//! Gantry. One file per topic: the type, its command-line syntax, and what of it can be done. The
//! list of the kinds of devices is at the end of this file.

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
    // The kinds of devices, in the order in which a machine plugs them: the field of `VmConfig`, which
    // says how many there can be, and the option of the command line. Root ports come before the
    // devices behind them.
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
    /// Makes a process of this VM the accelerator of others.
    accel_server: Option<AccelServerConfig> = "accel-server",
    /// Virtual GPUs, of which a mediator has the physical one.
    gpus: Option<Vec<GpuConfig>> = "gpu",
    /// Devices of other processes.
    user_devices: Option<Vec<UserDeviceConfig>> = "user-device",
    /// Balloon.
    balloon: Option<BalloonConfig> = "balloon",
    /// Sockets between guest and host.
    vsock: Option<VsockConfig> = "vsock",
    /// Devices of a test, which shows that a line is all that a kind needs here.
    #[cfg(test)]
    scratches: Option<Vec<scratch::ScratchConfig>> = "scratch",
}

#[cfg(test)]
mod tests;
