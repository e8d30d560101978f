//! The options that describe a virtual machine.

use std::path::PathBuf;

use clap::Args;

use super::option;
use crate::config::{
    AccelConfig, AccelServerConfig, BalloonConfig, ConsoleConfig, CpusConfig, DebugConsoleConfig,
    DeviceConfig, DiskConfig, FsConfig, GenericVhostUserConfig, Invalid, LandlockConfig,
    MemoryConfig, MemoryZoneConfig, NetConfig, NumaConfig, PayloadConfig, PciRootPortConfig,
    PciSegmentConfig, PlatformConfig, PmemConfig, RateLimitGroupConfig, RngConfig, RtcConfig,
    SerialConfig, TpmConfig, UserDeviceConfig, VdpaConfig, VmConfig, VsockConfig,
};

/// A virtual machine cannot be made of the options.
#[derive(Debug, thiserror::Error)]
pub enum VmArgsError {
    /// There is nothing to boot.
    #[error("the options describe a VM, but not what it boots; add --kernel")]
    NoPayload,
    /// A saved VM is what it was.
    #[error(
        "the VM of --restore is as it was saved: leave out the options that describe a VM, and \
         change it once it runs (gantry ctl)"
    )]
    Restored,
    /// The options contradict each other or ask for what cannot be done.
    #[error("the options describe no valid VM")]
    Invalid(#[from] Invalid),
}

/// The virtual machine.
#[derive(Args, Clone, Debug, Default, PartialEq)]
#[command(next_help_heading = "Virtual machine")]
pub struct VmArgs {
    /// Linux kernel to boot: a bzImage, or an ELF file with a PVH entry.
    #[arg(long, value_name = "FILE")]
    pub kernel: Option<PathBuf>,

    /// Kernel command line.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub cmdline: Option<String>,

    /// Initial file system.
    #[arg(long, value_name = "FILE")]
    pub initramfs: Option<PathBuf>,

    /// Firmware to boot (not supported yet).
    #[arg(long, value_name = "FILE")]
    pub firmware: Option<PathBuf>,

    /// Virtual processors: boot=N,max=N,topology=threads:cores:dies:packages,
    /// affinity=[VCPU@[CPUS]],profile=host|x86-64-v2|x86-64-v3,nested=on|off,max_phys_bits=N,
    /// core_scheduling=vm|vcpu|off.
    #[arg(long = "cpus", value_name = "KEYS", value_parser = option(CpusConfig::parse))]
    pub cpus: Option<CpusConfig>,

    /// Memory: size=SIZE,shared=on|off,hugepages=on|off,hugepage_size=SIZE,
    /// hotplug_size=SIZE,hotplugged_size=SIZE,hotplug_method=acpi|virtio-mem,prefault=on|off,
    /// thp=on|off,mergeable=on|off,reserve=on|off.
    #[arg(long = "memory", value_name = "KEYS", value_parser = option(MemoryConfig::parse))]
    pub memory: Option<MemoryConfig>,

    /// A part of memory with its own backing: id=NAME,size=SIZE,file=PATH,host_numa_node=N,
    /// shared=on|off,hugepages=on|off,hugepage_size=SIZE,hotplug_size=SIZE,hotplugged_size=SIZE,
    /// prefault=on|off,mergeable=on|off,reserve=on|off.
    #[arg(long = "memory-zone", value_name = "KEYS", num_args = 1.., value_parser = option(MemoryZoneConfig::parse))]
    pub memory_zone: Vec<MemoryZoneConfig>,

    /// Disks: path=FILE,readonly=on|off,direct=on|off,image_type=raw|qcow2,backing_files=on|off,
    /// sparse=on|off,lock_granularity=byte-range|full,serial=TEXT,num_queues=N,queue_size=N,
    /// queue_affinity=[QUEUE@[CPUS]],rate_limit_group=NAME,bw_size=SIZE,bw_one_time_burst=SIZE,
    /// bw_refill_time=MS,ops_size=N,ops_one_time_burst=N,ops_refill_time=MS,id=NAME.
    #[arg(long = "disk", value_name = "KEYS", num_args = 1.., value_parser = option(DiskConfig::parse))]
    pub disk: Vec<DiskConfig>,

    /// Network cards: tap=NAME,mac=MAC,host_mac=MAC,ip=ADDRESS,mask=MASK,fd=[N,N],num_queues=N,
    /// queue_size=N,mtu=N,offload_tso=on|off,offload_ufo=on|off,offload_csum=on|off,bw_size=SIZE,
    /// bw_one_time_burst=SIZE,bw_refill_time=MS,ops_size=N,ops_one_time_burst=N,
    /// ops_refill_time=MS,id=NAME.
    #[arg(long = "net", value_name = "KEYS", num_args = 1.., value_parser = option(NetConfig::parse))]
    pub net: Vec<NetConfig>,

    /// Source of entropy: src=FILE (/dev/urandom).
    #[arg(long = "rng", value_name = "KEYS", value_parser = option(RngConfig::parse))]
    pub rng: Option<RngConfig>,

    /// Memory balloon: size=SIZE,deflate_on_oom=on|off,free_page_reporting=on|off.
    #[arg(long = "balloon", value_name = "KEYS", value_parser = option(BalloonConfig::parse))]
    pub balloon: Option<BalloonConfig>,

    /// Persistent memory: file=FILE,size=SIZE,discard_writes=on|off,id=NAME.
    #[arg(long = "pmem", value_name = "KEYS", num_args = 1.., value_parser = option(PmemConfig::parse))]
    pub pmem: Vec<PmemConfig>,

    /// Accelerators whose calls are served by gantry-accel:
    /// api=opencl,socket=PATH,device=NAME,weight=N,memory=SIZE,window=SIZE,slices=N,
    /// compiler_cache=NAME|off,id=NAME; or by a process of a server VM, without exits: transport=gate,server=PATH,shared=SIZE,id=NAME.
    #[arg(long = "accel", value_name = "KEYS", num_args = 1.., value_parser = option(AccelConfig::parse))]
    pub accel: Vec<AccelConfig>,

    /// Make a process of this VM serve a process of another one, without exits, while this VM
    /// stands still: socket=PATH,hole_start=SIZE,hole_end=SIZE,id=NAME.
    #[arg(long = "accel-server", value_name = "KEYS", value_parser = option(AccelServerConfig::parse))]
    pub accel_server: Option<AccelServerConfig>,

    /// Sockets between guest and host: cid=N,socket=PATH.
    #[arg(long = "vsock", value_name = "KEYS", value_parser = option(VsockConfig::parse))]
    pub vsock: Option<VsockConfig>,

    /// Serial port: off|null|pty|tty|file=PATH|socket=PATH.
    #[arg(long = "serial", value_name = "KEYS", value_parser = option(SerialConfig::parse))]
    pub serial: Option<SerialConfig>,

    /// Virtio console: off|null|pty|tty|file=PATH|socket=PATH.
    #[arg(long = "console", value_name = "KEYS", value_parser = option(ConsoleConfig::parse))]
    pub console: Option<ConsoleConfig>,

    /// Debug console: off|pty|tty|file=PATH,iobase=PORT.
    #[arg(long = "debug-console", value_name = "KEYS", value_parser = option(DebugConsoleConfig::parse))]
    pub debug_console: Option<DebugConsoleConfig>,

    /// NUMA nodes: guest_numa_id=N,cpus=[N-N],distances=[N@N],memory_zones=[NAME].
    #[arg(long = "numa", value_name = "KEYS", num_args = 1.., value_parser = option(NumaConfig::parse))]
    pub numa: Vec<NumaConfig>,

    /// Platform: num_pci_segments=N,iommu_segments=[N,N-N],iommu_address_width=BITS,
    /// iommufd=on|off,vfio_p2p_dma=on|off,serial_number=TEXT,uuid=UUID,oem_strings=[TEXT],
    /// system_manufacturer=TEXT,system_product_name=TEXT,system_version=TEXT,system_family=TEXT,
    /// system_sku_number=TEXT,chassis_asset_tag=TEXT.
    #[arg(long = "platform", value_name = "KEYS", value_parser = option(PlatformConfig::parse))]
    pub platform: Option<PlatformConfig>,

    /// PCI segments, for tools that name them: pci_segment=N. All have equal shares of the windows
    /// for BARs.
    #[arg(long = "pci-segment", value_name = "KEYS", num_args = 1.., value_parser = option(PciSegmentConfig::parse))]
    pub pci_segment: Vec<PciSegmentConfig>,

    /// PCI Express root ports, which devices name as parents: id=NAME,pci_segment=N,pci_device_id=N.
    #[arg(long = "pci-root-port", value_name = "KEYS", num_args = 1.., value_parser = option(PciRootPortConfig::parse))]
    pub pci_root_port: Vec<PciRootPortConfig>,

    /// Limits that disks share: id=NAME,bw_size=SIZE,bw_one_time_burst=SIZE,bw_refill_time=MS,
    /// ops_size=N,ops_one_time_burst=N,ops_refill_time=MS.
    #[arg(long = "rate-limit-group", value_name = "KEYS", num_args = 1.., value_parser = option(RateLimitGroupConfig::parse))]
    pub rate_limit_group: Vec<RateLimitGroupConfig>,

    /// Further files that Landlock allows: path=PATH,access=r|w|rw.
    #[arg(long = "landlock-rules", value_name = "KEYS", num_args = 1.., value_parser = option(LandlockConfig::parse))]
    pub landlock_rules: Vec<LandlockConfig>,

    /// Physical devices: path=/sys/bus/pci/devices/ADDRESS,id=NAME,pci_device_id=N,
    /// pci_function=N,parent=ROOTPORT,iommu=on|off,iommu_segment=N,x_exclude_mmap_bars=[N,N].
    #[arg(long = "device", value_name = "KEYS", num_args = 1.., value_parser = option(DeviceConfig::parse))]
    pub device: Vec<DeviceConfig>,

    /// Devices that other processes serve (vfio-user): socket=PATH,id=NAME,pci_function=N,
    /// parent=ROOTPORT. Memory has to be shared with them (see --memory).
    #[arg(long = "user-device", value_name = "KEYS", num_args = 1.., value_parser = option(UserDeviceConfig::parse))]
    pub user_device: Vec<UserDeviceConfig>,

    /// Shared folders (not supported yet).
    #[arg(long = "fs", value_name = "KEYS", num_args = 1.., value_parser = option(FsConfig::parse))]
    pub fs: Vec<FsConfig>,

    /// Devices of other processes, vhost-user (not supported yet).
    #[arg(long = "generic-vhost-user", value_name = "KEYS", num_args = 1.., value_parser = option(GenericVhostUserConfig::parse))]
    pub generic_vhost_user: Vec<GenericVhostUserConfig>,

    /// vDPA devices (not supported yet).
    #[arg(long = "vdpa", value_name = "KEYS", num_args = 1.., value_parser = option(VdpaConfig::parse))]
    pub vdpa: Vec<VdpaConfig>,

    /// Trusted platform module (not supported yet).
    #[arg(long = "tpm", value_name = "KEYS", value_parser = option(TpmConfig::parse))]
    pub tpm: Option<TpmConfig>,

    /// Virtio clock (not supported yet).
    #[arg(long = "rtc", value_name = "KEYS", value_parser = option(RtcConfig::parse), num_args = 0..=1, default_missing_value = "")]
    pub rtc: Option<RtcConfig>,

    /// Watchdog (not supported yet).
    #[arg(long)]
    pub watchdog: bool,

    /// Panic device (not supported yet).
    #[arg(long)]
    pub pvpanic: bool,

    /// Restrict the VMM to the files that the options name.
    #[arg(long)]
    pub landlock: bool,
}

impl VmArgs {
    /// The configuration; `None` if no option describes a VM, as it has to be for one that is
    /// `restored`.
    pub fn into_config(self, restored: bool) -> Result<Option<Box<VmConfig>>, VmArgsError> {
        if self == Self::default() {
            return Ok(None);
        }
        if restored {
            return Err(VmArgsError::Restored);
        }
        if self.kernel.is_none() && self.firmware.is_none() {
            return Err(VmArgsError::NoPayload);
        }
        let mut memory = self.memory.unwrap_or_default();
        memory.zones = list(self.memory_zone);
        let mut config = VmConfig {
            cpus: self.cpus.unwrap_or_default(),
            memory,
            payload: PayloadConfig {
                kernel: self.kernel,
                cmdline: self.cmdline,
                initramfs: self.initramfs,
                firmware: self.firmware,
                ..PayloadConfig::default()
            },
            rate_limit_groups: list(self.rate_limit_group),
            disks: list(self.disk),
            net: list(self.net),
            rng: self.rng.unwrap_or_default(),
            balloon: self.balloon,
            fs: list(self.fs),
            generic_vhost_user: list(self.generic_vhost_user),
            accels: list(self.accel),
            accel_server: self.accel_server,
            pmem: list(self.pmem),
            serial: self.serial.unwrap_or_default(),
            console: self.console.unwrap_or_default(),
            debug_console: self.debug_console.unwrap_or_default(),
            devices: list(self.device),
            user_devices: list(self.user_device),
            vdpa: list(self.vdpa),
            vsock: self.vsock,
            numa: list(self.numa),
            iommu: false,
            watchdog: self.watchdog,
            rtc: self.rtc,
            pvpanic: self.pvpanic,
            pci_segments: list(self.pci_segment),
            pci_root_ports: list(self.pci_root_port),
            platform: self.platform,
            tpm: self.tpm,
            landlock_enable: self.landlock,
            landlock_rules: list(self.landlock_rules),
        };
        config.normalize();
        config.validate()?;
        Ok(Some(Box::new(config)))
    }
}

fn list<T>(items: Vec<T>) -> Option<Vec<T>> {
    (!items.is_empty()).then_some(items)
}
