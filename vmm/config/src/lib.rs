//! The configuration of a machine, in the form of the REST API and of a snapshot's `config.json`.
//!
//! Names, defaults and types are those of Cloud Hypervisor's API, so that its clients can drive Gantry. There is one
//! file per topic, with the type, its command-line syntax and its validation. The list of the kinds of devices is at
//! the end of this file.

#![cfg_attr(not(test), deny(clippy::print_stderr, clippy::print_stdout))]

mod accel;
mod accel_server;
mod balloon;
mod check;
mod common;
mod console;
mod cpus;
mod descriptor;
mod device;
mod disk;
mod fs;
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
pub mod syntax;
mod unsupported;
mod user_device;
mod vm;
mod vsock;

pub use accel::{
    AccelApi, AccelConfig, AccelTransport, AccelVia, DRAIN_MS, GateConfig, RingConfig, SHARED,
};
pub use accel_server::AccelServerConfig;
pub use balloon::BalloonConfig;
pub use check::{Invalid, Placement, Problem};
pub use common::{CommonConfig, HasCommonConfig};
pub use console::{ConsoleConfig, ConsoleMode, DebugConsoleConfig, SerialConfig};
pub use cpus::{CoreScheduling, CpuAffinity, CpuFeatures, CpuTopology, CpusConfig};
pub use descriptor::Descriptor;
pub use device::{DeviceConfig, DeviceFiles, host_device};
pub use disk::{DiskConfig, ImageType, LockGranularity, RateLimitGroupConfig, VirtQueueAffinity};
pub use fs::FsConfig;
pub use gpu::GpuConfig;
pub use kind::{Configured, Device, Field, FileAccess, FileUse, HotPlug, Kind, Refused};
pub use memory::{HotplugMethod, MemoryConfig, MemoryZoneConfig};
pub use nearest::nearest;
pub use net::NetConfig;
pub use payload::PayloadConfig;
pub use platform::{NumaConfig, NumaDistance, PciSegmentConfig, PlatformConfig};
pub use pmem::PmemConfig;
pub use rng::RngConfig;
pub use root_port::PciRootPortConfig;
pub use unsupported::{GenericVhostUserConfig, RtcConfig, TpmConfig, VdpaConfig};
pub use user_device::UserDeviceConfig;
pub use vm::LandlockConfig;
pub use vsock::VsockConfig;

/// Passes the list of the kinds of devices to a macro, in the order in which a machine plugs them in: the field of
/// [`VmConfig`], whose type tells how many there can be, and the command-line option.
#[macro_export]
macro_rules! for_each_kind {
    ($of:path) => {
        $of! {
            /// PCI Express root ports.
            pci_root_ports: Option<Vec<$crate::PciRootPortConfig>> = "pci-root-port",
            /// Entropy.
            rng: $crate::RngConfig = "rng",
            /// Virtio console.
            console: $crate::ConsoleConfig = "console",
            /// Disks.
            disks: Option<Vec<$crate::DiskConfig>> = "disk",
            /// Network cards.
            net: Option<Vec<$crate::NetConfig>> = "net",
            /// Shared folders.
            fs: Option<Vec<$crate::FsConfig>> = "fs",
            /// Persistent memory.
            pmem: Option<Vec<$crate::PmemConfig>> = "pmem",
            /// Physical devices.
            devices: Option<Vec<$crate::DeviceConfig>> = "device",
            /// Accelerators whose calls are served by worker processes.
            accels: Option<Vec<$crate::AccelConfig>> = "accel",
            /// Lets other VMs use a process of this VM as their accelerator.
            accel_server: Option<$crate::AccelServerConfig> = "accel-server",
            /// Virtual GPUs, which share a physical GPU through a mediator.
            gpus: Option<Vec<$crate::GpuConfig>> = "gpu",
            /// Devices that other processes serve.
            user_devices: Option<Vec<$crate::UserDeviceConfig>> = "user-device",
            /// Balloon.
            balloon: Option<$crate::BalloonConfig> = "balloon",
            /// Sockets between guest and host.
            vsock: Option<$crate::VsockConfig> = "vsock",
        }
    };
}

for_each_kind!(vm::vm_config);

#[cfg(test)]
mod tests;
