//! The options that describe a virtual machine.

use std::path::PathBuf;

use clap::Args;
use vmm_api::RestoreConfig;
use vmm_config::{
    ConsoleMode, CpusConfig, DebugConsoleConfig, GenericVhostUserConfig, Invalid, LandlockConfig,
    MemoryConfig, MemoryZoneConfig, NumaConfig, PayloadConfig, PciSegmentConfig, PlatformConfig,
    RateLimitGroupConfig, RtcConfig, SerialConfig, TpmConfig, VdpaConfig, VmConfig,
};

use super::{devices::DeviceArgs, option};

/// Help heading of options that Gantry refuses.
pub const UNSUPPORTED: &str = "Not supported yet, and refused";

/// The options do not describe a valid virtual machine.
#[derive(Debug, thiserror::Error)]
pub enum VmArgsError {
    /// There is nothing to boot.
    #[error("the options describe a VM, but not what it boots; add --kernel or --firmware")]
    NoPayload,
    /// Options that describe a VM cannot be combined with `--restore`.
    #[error(
        "the VM of --restore is as it was saved: leave out the options that describe a VM, and \
         change it once it runs (gantry ctl)"
    )]
    Restored,
    /// The options contradict each other or request something that is not possible.
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

    /// Firmware to boot, which finds the system on a disk: an ELF file with a PVH entry, such as edk2's CLOUDHV.fd.
    #[arg(long, value_name = "FILE", conflicts_with = "kernel")]
    pub firmware: Option<PathBuf>,

    /// Kernel command line.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub cmdline: Option<String>,

    /// Initial file system.
    #[arg(long, value_name = "FILE")]
    pub initramfs: Option<PathBuf>,

    /// Virtual processors: boot=N,max=N,topology=threads:cores:dies:packages,
    /// affinity=[VCPU@[CPUS]],features=[amx],profile=host|x86-64-v2|x86-64-v3,nested=on|off,max_phys_bits=N,
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

    /// Devices, with one option for each kind.
    #[command(flatten)]
    pub devices: DeviceArgs,

    /// Serial port: off|null|pty|tty|file=PATH|socket=PATH.
    #[arg(long = "serial", value_name = "KEYS", value_parser = option(SerialConfig::parse))]
    pub serial: Option<SerialConfig>,

    /// Debug console: off|pty|tty|file=PATH,iobase=PORT.
    #[arg(long = "debug-console", value_name = "KEYS", value_parser = option(DebugConsoleConfig::parse))]
    pub debug_console: Option<DebugConsoleConfig>,

    /// NUMA nodes: guest_numa_id=N,cpus=[N-N],distances=[N@N],memory_zones=[NAME],pci_segments=[N],device_id=NAME.
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

    /// Rate limits that disks share: id=NAME,bw_size=SIZE,bw_one_time_burst=SIZE,bw_refill_time=MS,
    /// ops_size=N,ops_one_time_burst=N,ops_refill_time=MS.
    #[arg(long = "rate-limit-group", value_name = "KEYS", num_args = 1.., value_parser = option(RateLimitGroupConfig::parse))]
    pub rate_limit_group: Vec<RateLimitGroupConfig>,

    /// Devices of other processes, vhost-user (not supported yet).
    #[arg(long = "generic-vhost-user", help_heading = UNSUPPORTED, value_name = "KEYS", num_args = 1.., value_parser = option(GenericVhostUserConfig::parse))]
    pub generic_vhost_user: Vec<GenericVhostUserConfig>,

    /// vDPA devices (not supported yet).
    #[arg(long = "vdpa", help_heading = UNSUPPORTED, value_name = "KEYS", num_args = 1.., value_parser = option(VdpaConfig::parse))]
    pub vdpa: Vec<VdpaConfig>,

    /// Trusted platform module (not supported yet).
    #[arg(long = "tpm", help_heading = UNSUPPORTED, value_name = "KEYS", value_parser = option(TpmConfig::parse))]
    pub tpm: Option<TpmConfig>,

    /// Virtio clock (not supported yet).
    #[arg(long = "rtc", help_heading = UNSUPPORTED, value_name = "KEYS", value_parser = option(RtcConfig::parse), num_args = 0..=1, default_missing_value = "")]
    pub rtc: Option<RtcConfig>,

    /// Watchdog (ACPI WDAT, Linux' driver wdat_wdt), which resets a guest that no longer writes to it.
    #[arg(long)]
    pub watchdog: bool,

    /// Panic device: event `panic` of `--event-monitor` says that the guest's kernel has panicked.
    #[arg(long)]
    pub pvpanic: bool,

    /// Which files the VMM may use.
    #[command(flatten)]
    pub confinement: Confinement,
}

/// Which files the VMM of a VM may use.
#[derive(Args, Clone, Debug, Default, PartialEq)]
pub struct Confinement {
    /// Restrict the VMM to the files of its VM, for good.
    #[arg(long)]
    pub landlock: bool,

    /// Additional files that Landlock allows: path=PATH,access=r|w|rw.
    #[arg(long = "landlock-rules", value_name = "KEYS", num_args = 1.., value_parser = option(LandlockConfig::parse))]
    pub landlock_rules: Vec<LandlockConfig>,
}

impl Confinement {
    /// The rules in the form of a request.
    pub(super) fn rules(&self) -> Option<Vec<LandlockConfig>> {
        list(self.landlock_rules.clone())
    }

    /// Adds it to a request to restore a VM.
    pub(super) fn put_into(&self, request: &mut RestoreConfig) {
        request.landlock_enable |= self.landlock;
        if let Some(rules) = self.rules() {
            request.landlock_rules.get_or_insert_default().extend(rules);
        }
    }
}

impl VmArgs {
    /// Builds the configuration; `None` if no option describes a VM. That is required for a VM that is `restored`,
    /// whose request gets the confinement instead.
    pub fn into_config(
        mut self,
        restored: Option<&mut RestoreConfig>,
    ) -> Result<Option<Box<VmConfig>>, VmArgsError> {
        if let Some(request) = restored {
            std::mem::take(&mut self.confinement).put_into(request);
            return match self == Self::default() {
                true => Ok(None),
                false => Err(VmArgsError::Restored),
            };
        }
        if self == Self::default() {
            return Ok(None);
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
            generic_vhost_user: list(self.generic_vhost_user),
            serial: self.serial.unwrap_or_default(),
            debug_console: self.debug_console.unwrap_or_default(),
            vdpa: list(self.vdpa),
            numa: list(self.numa),
            iommu: false,
            watchdog: self.watchdog,
            rtc: self.rtc,
            pvpanic: self.pvpanic,
            pci_segments: list(self.pci_segment),
            platform: self.platform,
            tpm: self.tpm,
            landlock_enable: self.confinement.landlock,
            landlock_rules: self.confinement.rules(),
            ..VmConfig::default()
        };
        // The terminal is the serial port's, unless --console says something else.
        if config.serial.mode == ConsoleMode::Tty {
            config.console.mode = ConsoleMode::Off;
        }
        self.devices.put_into(&mut config);
        config.normalize();
        config.validate()?;
        Ok(Some(Box::new(config)))
    }
}

fn list<T>(items: Vec<T>) -> Option<Vec<T>> {
    (!items.is_empty()).then_some(items)
}
