//! The guest-physical address space: fixed addresses, and ranges that depend on the sizes of the
//! machine.
//!
//! ```text
//!            0  real-mode vectors                     3 GiB  BARs below 4 GiB   [mmio32]
//!        0x500  GDT, IDT                        0xe800_0000  ECAM, 1 MiB a bus
//!       0x6000  PVH start info                  0xfe80_0000  ACPI controllers (hot-plug, GED)
//!       0x7000  zero page                       0xfec0_0000  IOAPIC
//!       0x8000  boot stack (grows down to it)   0xfee0_0000  local APIC
//!       0x9000  page tables                     0xfeff_c000  KVM identity map and TSS
//!      0x20000  command line                         4 GiB  RAM, the rest
//!      0x9fc00  end of conventional memory     next 1 GiB   RAM that can be plugged  [hotplug]
//!      0xa0000  ACPI tables                     next 1 GiB  memory of devices
//!                                                                      [device_memory]
//!      0xe0000  RSDP                            next 1 TiB  BARs above 4 GiB  [mmio64]
//!      0xf0000  SMBIOS
//!        1 MiB  kernel
//!      ... RAM up to 3 GiB, initramfs at its end
//! ```
//!
//! [`AddressMap::new`] is deterministic: a restored or migrated machine gets the same map from the
//! same four arguments, so save those.

use serde::{Deserialize, Serialize};

/// One KiB in bytes.
pub const KIB: u64 = 1 << 10;
/// One MiB in bytes.
pub const MIB: u64 = 1 << 20;
/// One GiB in bytes.
pub const GIB: u64 = 1 << 30;
/// One TiB in bytes.
pub const TIB: u64 = 1 << 40;
/// Size of a small page in bytes.
pub const PAGE_SIZE: u64 = 4 * KIB;

// Low memory. All of it is guest RAM up to the ACPI tables.

/// The GDT that a Linux kernel is entered with, four 8-byte descriptors.
pub const GDT_START: u64 = 0x500;
/// An empty IDT: the guest loads its own before it enables interrupts.
pub const IDT_START: u64 = 0x520;
/// `hvm_start_info` of the PVH boot protocol.
pub const PVH_INFO_START: u64 = 0x6000;
/// `hvm_modlist_entry` of the initramfs.
pub const PVH_MODLIST_START: u64 = 0x6040;
/// `hvm_memmap_table_entry` array, up to the zero page.
pub const PVH_MEMMAP_START: u64 = 0x6100;
/// `boot_params` of the Linux boot protocol, one page.
pub const ZERO_PAGE_START: u64 = 0x7000;
/// Initial stack pointer of the 64-bit entry.
pub const BOOT_STACK_POINTER: u64 = 0x8ff0;
/// Page map level 4, one page.
pub const PML4_START: u64 = 0x9000;
/// Page directory pointer table, one page.
pub const PDPT_START: u64 = 0xa000;
/// Page directories, four pages: 4 GiB in pages of 2 MiB.
pub const PD_START: u64 = 0xb000;
/// The kernel command line, zero terminated.
pub const CMDLINE_START: u64 = 0x2_0000;
/// Size reserved for the command line, including the terminating zero.
pub const CMDLINE_MAX_SIZE: u64 = 64 * KIB;
/// End of conventional memory. A BIOS keeps its data (EBDA) in the partial page above it.
pub const EBDA_START: u64 = 0x9_fc00;
/// First ACPI table. Tables are written upward from here.
pub const ACPI_TABLES_START: u64 = 0xa_0000;
/// End (exclusive) of the space for ACPI tables.
pub const ACPI_TABLES_END: u64 = 0xd_f000;
/// The VM generation ID, 16 bytes in a page of its own.
pub const GENERATION_ID_START: u64 = 0xd_f000;
/// The ACPI root pointer, in the area that an operating system scans for it.
pub const RSDP_START: u64 = 0xe_0000;
/// SMBIOS entry point and structures.
pub const SMBIOS_START: u64 = 0xf_0000;
/// End (exclusive) of the space for SMBIOS.
pub const SMBIOS_END: u64 = RESET_VECTOR;
/// The BIOS entry point: where a processor in real mode starts after a reset.
pub const RESET_VECTOR: u64 = 0xf_fff0;
/// Lowest address that a kernel may occupy, and the load address of relocatable kernels.
pub const HIGH_RAM_START: u64 = MIB;

// The hole below 4 GiB.

/// End (exclusive) of RAM below 4 GiB, and start of the 32-bit BAR window.
pub const HOLE_START: u64 = 3 * GIB;
/// End (exclusive) of the hole.
pub const HOLE_END: u64 = 4 * GIB;
/// PCI configuration space (ECAM), one bus after another: all buses of segment 0, then those of
/// segment 1, and so on.
pub const ECAM_START: u64 = 0xe800_0000;
/// Configuration space of a bus: 4 KiB for each of 256 functions.
pub const ECAM_BUS_SIZE: u64 = MIB;
/// Maximum number of PCI buses: each segment has one, and each root port adds one.
pub const MAX_PCI_BUSES: u16 = 96;
/// Maximum number of PCI segments.
pub const MAX_PCI_SEGMENTS: u16 = MAX_PCI_BUSES;
/// Maximum number of root ports per segment: one per slot of its bus, except the host bridge's.
pub const MAX_ROOT_PORTS: u8 = 31;
/// Registers of the CPU hot-plug controller.
pub const CPU_HOTPLUG_START: u64 = 0xfe80_0000;
/// Size of the CPU hot-plug register window, in bytes.
pub const CPU_HOTPLUG_SIZE: u64 = PAGE_SIZE;
/// Registers of the memory hot-plug controller.
pub const MEMORY_HOTPLUG_START: u64 = 0xfe80_1000;
/// Size of the memory hot-plug register window, in bytes.
pub const MEMORY_HOTPLUG_SIZE: u64 = PAGE_SIZE;
/// Registers of the generic event device.
pub const GED_START: u64 = 0xfe80_2000;
/// Size of the generic event device's register window, in bytes.
pub const GED_SIZE: u64 = PAGE_SIZE;
/// Registers of the PCI hot-plug controller.
pub const PCI_HOTPLUG_START: u64 = 0xfe80_3000;
/// Size of the PCI hot-plug register window, for all segments together, in bytes.
pub const PCI_HOTPLUG_SIZE: u64 = PAGE_SIZE;
/// The in-kernel IOAPIC.
pub const IOAPIC_START: u64 = 0xfec0_0000;
/// Size of the IOAPIC's registers.
pub const IOAPIC_SIZE: u64 = PAGE_SIZE;
/// The local APICs.
pub const LAPIC_START: u64 = 0xfee0_0000;
/// Size of the local APIC window, in which message-signalled interrupts are decoded, too.
pub const LAPIC_SIZE: u64 = MIB;
/// Page that KVM uses for its identity map (`KVM_SET_IDENTITY_MAP_ADDR`).
pub const KVM_IDENTITY_MAP_START: u64 = 0xfeff_c000;
/// Three pages that KVM uses for its task state segment (`KVM_SET_TSS_ADDR`).
pub const KVM_TSS_START: u64 = 0xfeff_d000;
/// Size of [`KVM_TSS_START`]'s range.
pub const KVM_TSS_SIZE: u64 = 3 * PAGE_SIZE;

// I/O ports.

/// Keyboard controller data, first of ports 0x60 to 0x64.
pub const I8042_PORT: u16 = 0x60;
/// Ports that the keyboard controller decodes.
pub const I8042_PORT_COUNT: u16 = 5;
/// Index of the CMOS clock's registers; the next port is their data.
pub const CMOS_PORT: u16 = 0x70;
/// Ports that the CMOS clock decodes.
pub const CMOS_PORT_COUNT: u16 = 2;
/// POST codes.
pub const DEBUG_PORT: u16 = 0x80;
/// Debug console: bytes that are written to it appear in the log.
pub const DEBUG_CONSOLE_PORT: u16 = 0xe9;
/// First serial port, eight ports.
pub const SERIAL_PORT: u16 = 0x3f8;
/// Ports that a serial port decodes.
pub const SERIAL_PORT_COUNT: u16 = 8;
/// ACPI reset register (FADT `RESET_REG`): writing [`ACPI_RESET_VALUE`] resets the machine.
pub const ACPI_RESET_PORT: u16 = 0x600;
/// Value that resets the machine when it is written to [`ACPI_RESET_PORT`].
pub const ACPI_RESET_VALUE: u8 = 1;
/// ACPI sleep control register (FADT `SLEEP_CONTROL_REG`; ACPI 6.5, 4.8.3.7).
pub const ACPI_SLEEP_CONTROL_PORT: u16 = 0x601;
/// ACPI sleep status register (FADT `SLEEP_STATUS_REG`; ACPI 6.5, 4.8.3.7).
pub const ACPI_SLEEP_STATUS_PORT: u16 = 0x602;
/// The sleep type of S5 (soft off) in the sleep control register's bits 2 to 4.
pub const ACPI_SLEEP_TYPE_S5: u8 = 5;
/// ACPI power management timer, four ports.
pub const ACPI_PM_TIMER_PORT: u16 = 0x608;
/// Ports that the timer decodes.
pub const ACPI_PM_TIMER_PORT_COUNT: u16 = 4;
/// The watchdog's registers, eight ports.
pub const ACPI_WATCHDOG_PORT: u16 = 0x610;
/// Ports that the watchdog decodes.
pub const ACPI_WATCHDOG_PORT_COUNT: u16 = 8;
/// First port for I/O BARs of PCI segment 0. The range extends to the last port, so it is 15/16 of
/// all ports. Nothing else decodes any of them.
pub const PCI_IO_START: u16 = 0x1000;
/// Last port for I/O BARs of PCI segment 0.
pub const PCI_IO_LAST: u16 = u16::MAX;
/// Number of I/O ports of a root port of segment 0, the minimum (PCI-to-PCI Bridge 1.2, 3.2.5.6).
pub const PCI_IO_OF_ROOT_PORT: u32 = 0x1000;
/// Maximum number of root ports that have I/O ports; bus 0 keeps the other half.
pub const ROOT_PORTS_WITH_IO: u8 = 8;

// Interrupts.

/// Interrupt line of the first serial port.
pub const SERIAL_GSI: u32 = 4;
/// Interrupt line of the generic event device.
pub const GED_GSI: u32 = 5;
/// First of the four interrupt lines for PCI INTx.
pub const PCI_INTX_GSI: u32 = 16;
/// Number of interrupt lines of the IOAPIC.
pub const IOAPIC_PINS: u32 = 24;

/// Minimum guest RAM in bytes.
pub const MIN_RAM: u64 = MIB;
/// Physical address bits of the narrowest supported processor.
pub const MIN_PHYS_BITS: u8 = 36;
/// Maximum number of address bits that the map uses. Linux with four-level page tables supports 46,
/// and KVM with four-level nested page tables 48, whatever the processor reports.
pub const MAX_USED_PHYS_BITS: u8 = 46;
/// BAR space that the 64-bit window is designed for. The window is twice this per bus where the
/// address width allows, because a BAR is aligned to its own size.
const BAR_SPACE: u64 = TIB;
/// Maximum size of the range for memory that devices provide.
const DEVICE_MEMORY_MAX: u64 = TIB / 2;
/// Addresses that AMD processors reserve for HyperTransport. An IOMMU does not translate them, so a
/// passed-through device could not reach a BAR there.
const HYPERTRANSPORT: AddressRange = AddressRange {
    start: 0xfd_0000_0000,
    size: 3 * 4 * GIB,
};

/// A range of guest-physical addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AddressRange {
    /// First address.
    pub start: u64,
    /// Size in bytes; may be zero.
    pub size: u64,
}

impl AddressRange {
    /// The range from `start` to the address before `end`; empty if `end` is not above `start`.
    pub const fn from_bounds(start: u64, end: u64) -> Self {
        Self {
            start,
            size: end.saturating_sub(start),
        }
    }

    /// The first address after the range.
    pub const fn end(&self) -> u64 {
        self.start.saturating_add(self.size)
    }

    /// Whether the range is empty.
    pub const fn is_empty(&self) -> bool {
        self.size == 0
    }

    /// Whether the ranges share an address; false if either is empty.
    pub const fn overlaps(&self, other: &Self) -> bool {
        !self.is_empty()
            && !other.is_empty()
            && self.start < other.end()
            && other.start < self.end()
    }

    /// Whether `other` lies completely within this range.
    pub const fn contains(&self, other: &Self) -> bool {
        self.start <= other.start && other.end() <= self.end()
    }
}

/// Type of a range in a firmware memory map (e820 or PVH); both use these values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum MemoryKind {
    /// Usable RAM.
    Ram = 1,
    /// Not available to the operating system.
    Reserved = 2,
}

/// An entry of the firmware memory map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryMapEntry {
    /// The addresses.
    pub range: AddressRange,
    /// Their type.
    pub kind: MemoryKind,
}

/// Why no address map can be created.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// The RAM is smaller than the boot data structures.
    #[error("guest memory of {size} bytes is too small; give it at least {MIN_RAM} bytes")]
    RamTooSmall {
        /// Requested RAM in bytes.
        size: u64,
    },
    /// The RAM size is not a multiple of the page size.
    #[error("memory size {size} is not a multiple of {PAGE_SIZE} bytes; round it to whole pages")]
    RamNotPageAligned {
        /// The requested size in bytes.
        size: u64,
    },
    /// The number of address bits is too small, or too large to be used.
    #[error(
        "{bits} physical address bits are not supported; use {MIN_PHYS_BITS} to 52 (the host's \
         processor must have them)"
    )]
    PhysBits {
        /// Requested address bits.
        bits: u8,
    },
    /// There are no or too many PCI segments.
    #[error("{segments} PCI segments are not supported; use 1 to {MAX_PCI_SEGMENTS}")]
    Segments {
        /// Requested segments.
        segments: usize,
    },
    /// There are too many PCI root ports.
    #[error(
        "{ports} root ports in {segments} PCI segments are not supported; use at most \
         {MAX_ROOT_PORTS} in a segment, and {MAX_PCI_BUSES} segments and ports together"
    )]
    RootPorts {
        /// Requested root ports.
        ports: usize,
        /// Requested segments.
        segments: usize,
    },
    /// The hole is not inside RAM.
    #[error(
        "RAM cannot have a hole from {start:#x} to {end:#x}: it has to be whole pages, with RAM \
         from 1 MiB to its start, and from its end to at most 3 GiB"
    )]
    Hole {
        /// First address.
        start: u64,
        /// End (exclusive).
        end: u64,
    },
    /// RAM and the smallest BAR windows do not fit in the address space.
    #[error(
        "{ram} bytes of memory, {hotplug} bytes of hot-plug memory and {buses} PCI buses \
         do not fit in {bits} physical address bits; use less memory or raise max_phys_bits"
    )]
    NoRoom {
        /// RAM in bytes.
        ram: u64,
        /// Hot-pluggable memory, in bytes.
        hotplug: u64,
        /// Number of PCI segments and root ports.
        buses: u64,
        /// Address bits.
        bits: u8,
    },
}

/// The BAR windows of one PCI bus.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BusWindows {
    /// For 32-bit BARs; start and size are multiples of 1 MiB.
    pub mmio32: AddressRange,
    /// For 64-bit BARs; start and size are multiples of 1 GiB.
    pub mmio64: AddressRange,
}

/// The configuration space and the BAR windows of one PCI segment, for all its buses together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentWindows {
    /// Configuration space.
    pub ecam: AddressRange,
    /// For 32-bit BARs; start and size are multiples of 1 MiB.
    pub mmio32: AddressRange,
    /// For 64-bit BARs; start and size are multiples of 1 GiB.
    pub mmio64: AddressRange,
}

/// The addresses of RAM, hot-plug memory and device windows of one machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddressMap {
    phys_bits: u8,
    /// Number of root ports of each segment.
    ports: Vec<u8>,
    low_ram: AddressRange,
    hole: AddressRange,
    high_ram: AddressRange,
    hotplug: AddressRange,
    device_memory: AddressRange,
    mmio64: AddressRange,
}

impl AddressMap {
    /// Creates a map for `segments` PCI segments without root ports; otherwise like
    /// [`AddressMap::with_root_ports`].
    ///
    /// # Errors
    ///
    /// As for [`AddressMap::with_root_ports`].
    pub fn new(
        ram_size: u64,
        hotplug_size: u64,
        phys_bits: u8,
        segments: u16,
    ) -> Result<Self, LayoutError> {
        let ports = vec![0; segments.into()];
        Self::with_root_ports(ram_size, hotplug_size, phys_bits, &ports)
    }

    /// Places `ram_size` bytes of RAM, room for `hotplug_size` more, and the windows of the PCI
    /// segments in an address space of `phys_bits` bits. `ports` has the number of root ports of
    /// each segment.
    ///
    /// `phys_bits` is what CPUID reports to the guest. If devices are passed through, it must not
    /// exceed the address width that the IOMMU accepts.
    ///
    /// # Errors
    ///
    /// [`LayoutError`] if an argument is out of range or not everything fits. On processors with 36
    /// to 41 address bits, the 64-bit window gets whatever space memory leaves, at least 1 GiB per
    /// bus.
    pub fn with_root_ports(
        ram_size: u64,
        hotplug_size: u64,
        phys_bits: u8,
        ports: &[u8],
    ) -> Result<Self, LayoutError> {
        if ram_size < MIN_RAM {
            return Err(LayoutError::RamTooSmall { size: ram_size });
        }
        if !ram_size.is_multiple_of(PAGE_SIZE) {
            return Err(LayoutError::RamNotPageAligned { size: ram_size });
        }
        if !(MIN_PHYS_BITS..=52).contains(&phys_bits) {
            return Err(LayoutError::PhysBits { bits: phys_bits });
        }
        let segments = ports.len();
        if !(1..=usize::from(MAX_PCI_SEGMENTS)).contains(&segments) {
            return Err(LayoutError::Segments { segments });
        }
        let buses = buses(ports);
        let too_many = ports.iter().any(|ports| *ports > MAX_ROOT_PORTS);
        if too_many || buses > MAX_PCI_BUSES.into() {
            let ports = ports.iter().map(|ports| usize::from(*ports)).sum();
            return Err(LayoutError::RootPorts { ports, segments });
        }
        Self::place(ram_size, hotplug_size, phys_bits, ports).ok_or(LayoutError::NoRoom {
            ram: ram_size,
            hotplug: hotplug_size,
            buses,
            bits: phys_bits,
        })
    }

    /// The map for arguments that are each in range; `None` if they do not fit together.
    fn place(ram_size: u64, hotplug_size: u64, phys_bits: u8, ports: &[u8]) -> Option<Self> {
        let top = 1u64 << phys_bits.min(MAX_USED_PHYS_BITS);
        let low_ram = AddressRange::from_bounds(0, ram_size.min(HOLE_START));
        let high_ram = AddressRange {
            start: HOLE_END,
            size: ram_size - low_ram.size,
        };
        let hotplug = AddressRange {
            start: align_up(high_ram.start.checked_add(high_ram.size)?, GIB)?,
            size: align_up(hotplug_size, GIB)?,
        };
        let hotplug_end = hotplug.start.checked_add(hotplug.size)?;
        let room = top.checked_sub(hotplug_end)?;
        // One eighth of what is left keeps persistent memory useful on narrow processors. The upper
        // limit keeps the range away from HyperTransport's addresses on machines of common size.
        let device_memory = AddressRange {
            start: hotplug_end,
            size: align_down((room / 8).min(DEVICE_MEMORY_MAX), GIB),
        };
        let mmio64 = mmio64_window(device_memory.end(), top, buses(ports))?;
        Some(Self {
            phys_bits,
            ports: ports.to_vec(),
            low_ram,
            hole: AddressRange { start: 0, size: 0 },
            high_ram,
            hotplug,
            device_memory,
            mmio64,
        })
    }

    /// Removes the RAM in a range, which the guest sees as reserved. What lies above keeps its
    /// address, and the RAM shrinks by the size of the hole.
    ///
    /// # Errors
    ///
    /// [`LayoutError::Hole`] unless there is RAM on both sides, above 1 MiB and below 3 GiB.
    pub fn with_hole(mut self, hole: AddressRange) -> Result<Self, LayoutError> {
        let AddressRange { start, size } = hole;
        let end = hole.end();
        let aligned = start.is_multiple_of(PAGE_SIZE) && size.is_multiple_of(PAGE_SIZE);
        if !aligned || hole.is_empty() || start <= HIGH_RAM_START || end >= self.low_ram.end() {
            return Err(LayoutError::Hole { start, end });
        }
        self.hole = hole;
        Ok(self)
    }

    /// The hole in the RAM below 3 GiB; usually empty.
    pub fn hole(&self) -> AddressRange {
        self.hole
    }

    /// Number of physical address bits of the map.
    pub fn phys_bits(&self) -> u8 {
        self.phys_bits
    }

    /// Number of PCI segments that share the windows.
    pub fn segments(&self) -> u16 {
        // At most MAX_PCI_SEGMENTS.
        self.ports.len() as u16
    }

    /// Number of root ports of each segment.
    pub fn root_ports(&self) -> &[u8] {
        &self.ports
    }

    /// RAM below 3 GiB, including a [`AddressMap::hole`].
    pub fn low_ram(&self) -> AddressRange {
        self.low_ram
    }

    /// RAM from 4 GiB on; empty if all RAM fits below 3 GiB.
    pub fn high_ram(&self) -> AddressRange {
        self.high_ram
    }

    /// The ranges of RAM present at boot, in ascending order.
    pub fn ram(&self) -> impl Iterator<Item = AddressRange> {
        let [below, above] = self.low_parts();
        [below, above, self.high_ram]
            .into_iter()
            .filter(|range| !range.is_empty())
    }

    /// RAM below 3 GiB, before and after the hole. Without a hole, the first part has all of it.
    fn low_parts(&self) -> [AddressRange; 2] {
        let (start, end) = (self.low_ram.start, self.low_ram.end());
        if self.hole.is_empty() {
            return [self.low_ram, AddressRange::from_bounds(end, end)];
        }
        [
            AddressRange::from_bounds(start, self.hole.start),
            AddressRange::from_bounds(self.hole.end(), end),
        ]
    }

    /// Range for hot-plugged memory; start and size are multiples of 1 GiB.
    pub fn hotplug(&self) -> AddressRange {
        self.hotplug
    }

    /// Range for memory that devices provide; its size is a multiple of 1 GiB, and can be zero in a
    /// full address space.
    pub fn device_memory(&self) -> AddressRange {
        self.device_memory
    }

    /// Range for BARs below 4 GiB, for all segments.
    pub fn mmio32(&self) -> AddressRange {
        AddressRange::from_bounds(HOLE_START, ECAM_START)
    }

    /// Range for BARs above 4 GiB, for all segments.
    pub fn mmio64(&self) -> AddressRange {
        self.mmio64
    }

    /// Configuration space of all segments.
    pub fn ecam(&self) -> AddressRange {
        AddressRange {
            start: ECAM_START,
            size: buses(&self.ports) * ECAM_BUS_SIZE,
        }
    }

    /// The windows of `segment`; `None` if there is no such segment.
    pub fn segment(&self, segment: u16) -> Option<SegmentWindows> {
        let (before, from) = self.ports.split_at_checked(segment.into())?;
        let first = buses(before);
        let count = u64::from(*from.first()?) + 1;
        Some(SegmentWindows {
            ecam: AddressRange {
                start: ECAM_START + first * ECAM_BUS_SIZE,
                size: count * ECAM_BUS_SIZE,
            },
            mmio32: self.share(self.mmio32(), first, count, MIB),
            mmio64: self.share(self.mmio64, first, count, GIB),
        })
    }

    /// The windows of one bus of `segment`. The buses of root ports are numbered from 1. `None` if
    /// there is no such bus.
    pub fn bus(&self, segment: u16, bus: u8) -> Option<BusWindows> {
        let (before, from) = self.ports.split_at_checked(segment.into())?;
        let at = buses(before) + u64::from(bus);
        (bus <= *from.first()?).then(|| BusWindows {
            mmio32: self.share(self.mmio32(), at, 1, MIB),
            mmio64: self.share(self.mmio64, at, 1, GIB),
        })
    }

    /// The I/O ports of the root port with this bus in `segment`. The first root ports of segment 0
    /// get shares of equal size, which end at the last port; empty for all others.
    pub fn io(&self, segment: u16, bus: u8) -> AddressRange {
        let ports = self.ports.first().filter(|_| segment == 0);
        let count = ports.map_or(0, |ports| (*ports).min(ROOT_PORTS_WITH_IO));
        let size = u64::from(PCI_IO_OF_ROOT_PORT);
        let at_end = u64::from(PCI_IO_LAST) + 1;
        if bus == 0 || bus > count {
            return AddressRange { start: 0, size: 0 };
        }
        AddressRange {
            // At most eight shares of a sixteenth each.
            start: at_end - u64::from(count - bus + 1) * size,
            size,
        }
    }

    /// Divides `window` into as many equal shares as there are buses, and returns `count` of them
    /// from `first` on.
    fn share(
        &self,
        window: AddressRange,
        first: u64,
        count: u64,
        granularity: u64,
    ) -> AddressRange {
        let size = align_down(window.size / buses(&self.ports), granularity);
        AddressRange {
            // Cannot overflow: these are some of the buses, so this stays in the window.
            start: window.start + first * size,
            size: count * size,
        }
    }

    /// The firmware memory map, in ascending order and without overlaps.
    ///
    /// It does not contain hot-plug memory, which ACPI or virtio-mem announces.
    pub fn memory_map(&self) -> Vec<MemoryMapEntry> {
        let ram = |start, end| MemoryMapEntry {
            range: AddressRange::from_bounds(start, end),
            kind: MemoryKind::Ram,
        };
        let reserved = |start, end| MemoryMapEntry {
            range: AddressRange::from_bounds(start, end),
            kind: MemoryKind::Reserved,
        };
        let [below, above] = self.low_parts();
        [
            ram(0, EBDA_START),
            reserved(EBDA_START, HIGH_RAM_START),
            ram(HIGH_RAM_START, below.end()),
            reserved(self.hole.start, self.hole.end()),
            ram(above.start, above.end()),
            reserved(ECAM_START, self.ecam().end()),
            reserved(KVM_IDENTITY_MAP_START, KVM_TSS_START + KVM_TSS_SIZE),
            ram(self.high_ram.start, self.high_ram.end()),
        ]
        .into_iter()
        .filter(|entry| !entry.range.is_empty())
        .collect()
    }
}

/// Number of buses of segments with these numbers of root ports.
fn buses(ports: &[u8]) -> u64 {
    ports.iter().map(|ports| 1 + u64::from(*ports)).sum()
}

/// The window for 64-bit BARs between `start` (a multiple of 1 GiB) and `top`; `None` if there is
/// less than 1 GiB per bus.
fn mmio64_window(start: u64, top: u64, buses: u64) -> Option<AddressRange> {
    // At most 96 * 2 TiB, so this cannot overflow.
    let wanted = buses * 2 * BAR_SPACE;
    // Starting at a multiple of 1 TiB makes a BAR of 1 TiB fit, and is above HyperTransport's
    // addresses.
    let roomy = align_up(start, TIB)?;
    let window = if roomy
        .checked_add(2 * BAR_SPACE)
        .is_some_and(|end| end <= top)
    {
        AddressRange::from_bounds(roomy, top)
    } else {
        let below = AddressRange::from_bounds(start, top.min(HYPERTRANSPORT.start));
        let above = AddressRange::from_bounds(start.max(HYPERTRANSPORT.end()), top);
        if below.size >= above.size {
            below
        } else {
            above
        }
    };
    let size = align_down(window.size.min(wanted), GIB);
    (size >= buses * GIB).then_some(AddressRange {
        start: window.start,
        size,
    })
}

/// Rounds `value` up to a multiple of `align` (a power of two).
pub(crate) fn align_up(value: u64, align: u64) -> Option<u64> {
    value
        .checked_add(align - 1)
        .map(|value| align_down(value, align))
}

/// Rounds `value` down to a multiple of `align` (a power of two).
pub(crate) const fn align_down(value: u64, align: u64) -> u64 {
    value & !(align - 1)
}

#[cfg(test)]
mod tests;
