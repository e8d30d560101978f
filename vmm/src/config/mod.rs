//! The machine's configuration, as the REST API and `config.json` of a snapshot carry it.
//!
//! Names, defaults and types are those of Cloud Hypervisor's API, so that its clients can drive
//! Gantry. One file per topic: the type, its command-line syntax, and what of it can be done.

mod accel;
mod accel_server;
mod balloon;
mod check;
mod common;
mod console;
mod cpus;
mod device;
mod disk;
mod memory;
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

pub use accel::{AccelApi, AccelConfig, AccelTransport, AccelVia, GateConfig, RingConfig};
pub use accel_server::AccelServerConfig;
pub use balloon::BalloonConfig;
pub use check::{Invalid, Problem};
pub use common::{CommonConfig, HasCommonConfig};
pub use console::{ConsoleConfig, ConsoleMode, DebugConsoleConfig, SerialConfig};
pub use cpus::{CoreScheduling, CpuAffinity, CpuFeatures, CpuTopology, CpusConfig};
pub use device::DeviceConfig;
pub use disk::{DiskConfig, ImageType, LockGranularity, RateLimitGroupConfig, VirtQueueAffinity};
pub use memory::{HotplugMethod, MemoryConfig, MemoryZoneConfig};
pub use net::{NetConfig, TapFd};
pub use payload::PayloadConfig;
pub use platform::{NumaConfig, NumaDistance, PciSegmentConfig, PlatformConfig};
pub use pmem::PmemConfig;
pub use rng::RngConfig;
pub use root_port::PciRootPortConfig;
pub use unsupported::{FsConfig, GenericVhostUserConfig, RtcConfig, TpmConfig, VdpaConfig};
pub use user_device::UserDeviceConfig;
pub use vm::{LandlockConfig, VmConfig};
pub use vsock::VsockConfig;

#[cfg(test)]
mod tests;
