//! A segment on its buses, and guest accesses to it.

use std::sync::Arc;

use device_model::testing::{FakeDoorbells, FakeMsi, guest_memory};
use device_model::{bus::Bus, memory::GuestMemory};

use crate::{
    BarIndex, Bdf, CONFIG_PORTS_BASE, CONFIG_PORTS_LEN, ConfigPorts, ECAM_SIZE, Ecam, PciFunction,
    PciSegment, PortWindows, Seat, SegmentConfig, Window,
};

/// Address of the ECAM window.
pub const ECAM_BASE: u64 = 0xe000_0000;
/// The rig's window below 4 GiB.
pub const MMIO32: Window = Window {
    first: 0xc000_0000,
    last: 0xdfff_ffff,
};
/// The rig's window above 4 GiB: 4 TiB.
pub const MMIO64: Window = Window {
    first: 1 << 42,
    last: (1 << 43) - 1,
};
/// The windows of the rig's two root ports, if they are plugged in. The second one has no I/O
/// window.
pub const PORT_WINDOWS: [PortWindows; 2] = [
    PortWindows {
        mmio32: Some(Window {
            first: 0xd000_0000,
            last: 0xd7ff_ffff,
        }),
        mmio64: Some(Window {
            first: 30 << 38,
            last: (31 << 38) - 1,
        }),
        io: Some(Window {
            first: 0xf000,
            last: 0xffff,
        }),
    },
    PortWindows {
        mmio32: Some(Window {
            first: 0xd800_0000,
            last: 0xdfff_ffff,
        }),
        mmio64: Some(Window {
            first: 31 << 38,
            last: (32 << 38) - 1,
        }),
        io: None,
    },
];
/// The rig's I/O window.
pub const PORTS: Window = Window {
    first: 0x1000,
    last: 0xffff,
};

/// A VM with one PCI segment of up to three buses, and nothing else.
pub struct Rig {
    /// The memory-space bus.
    pub mmio: Arc<Bus>,
    /// The I/O port bus.
    pub pio: Arc<Bus>,
    /// The segment.
    pub segment: Arc<PciSegment>,
    /// Interrupt vectors.
    pub msi: FakeMsi,
    /// Doorbells.
    pub doorbells: FakeDoorbells,
    /// 1 MiB of RAM.
    pub memory: GuestMemory,
}

impl Rig {
    /// Creates a rig whose segment contains only the host bridge.
    ///
    /// # Panics
    /// If the buses refuse the windows, which are constants.
    #[allow(
        clippy::unwrap_used,
        reason = "the ranges are constants on empty buses"
    )]
    pub fn new() -> Self {
        let (mmio, pio) = (Arc::new(Bus::new()), Arc::new(Bus::new()));
        let config = SegmentConfig {
            segment: 0,
            mmio32: Some(MMIO32),
            mmio64: Some(MMIO64),
            io: Some(PORTS),
            ports: PORT_WINDOWS.to_vec(),
        };
        let segment = PciSegment::new(config, Arc::clone(&mmio), Arc::clone(&pio));
        mmio.insert(ECAM_BASE, 3 * ECAM_SIZE, Ecam::new(&segment))
            .unwrap();
        let ports = ConfigPorts::new(&segment);
        pio.insert(CONFIG_PORTS_BASE, CONFIG_PORTS_LEN, ports)
            .unwrap();
        Self {
            mmio,
            pio,
            segment,
            msi: FakeMsi::default(),
            doorbells: FakeDoorbells::default(),
            memory: guest_memory(1 << 20),
        }
    }

    /// Plugs a function into the first free slot.
    ///
    /// # Panics
    /// If there is no room for it.
    #[allow(
        clippy::unwrap_used,
        reason = "a test whose device has no room can only fail"
    )]
    pub fn plug(&self, function: impl PciFunction + 'static) -> Bdf {
        let function = Arc::new(std::sync::Mutex::new(function));
        self.segment.plug(function, Seat::ANY, &[]).unwrap()
    }

    /// Carries out a reset that the guest has asked for.
    pub fn reset(&self, at: Bdf) {
        if let Some(slow) = self.segment.begin_reset(at) {
            slow();
        }
        self.segment.end_reset(at);
    }

    fn config_address(bdf: Bdf, offset: u16) -> u64 {
        ECAM_BASE + (u64::from(bdf.requester_id()) << 12) + u64::from(offset & 0xfff)
    }

    /// Reads 32 bits of configuration space.
    pub fn config_read(&self, bdf: Bdf, offset: u16) -> u32 {
        self.read(Self::config_address(bdf, offset))
    }

    /// Reads configuration space, any width up to 8 bytes.
    pub fn config_read_bytes(&self, bdf: Bdf, offset: u16, data: &mut [u8]) {
        self.mmio.read(Self::config_address(bdf, offset), data);
    }

    /// Writes configuration space, any width up to 8 bytes.
    pub fn config_write(&self, bdf: Bdf, offset: u16, data: &[u8]) {
        self.mmio.write(Self::config_address(bdf, offset), data);
    }

    /// Switches decoding and bus mastering on or off.
    pub fn enable(&self, bdf: Bdf, enabled: bool) {
        let command = if enabled { 7u16 } else { 0 };
        self.config_write(bdf, 4, &command.to_le_bytes());
    }

    /// The address in a 64-bit BAR.
    pub fn bar64(&self, bdf: Bdf, index: BarIndex) -> u64 {
        let offset = index.offset() as u16;
        let low = u64::from(self.config_read(bdf, offset) & !0xf);
        low | u64::from(self.config_read(bdf, offset + 4)) << 32
    }

    /// Writes a 64-bit BAR, the lower half first.
    pub fn set_bar64(&self, bdf: Bdf, index: BarIndex, address: u64) {
        let offset = index.offset() as u16;
        let halves = address.to_le_bytes();
        self.config_write(bdf, offset, &halves[..4]);
        self.config_write(bdf, offset + 4, &halves[4..]);
    }

    /// Offset of the first capability with `id` behind `after` (0 for the first of all).
    pub fn capability(&self, bdf: Bdf, id: u8, after: u16) -> Option<u16> {
        let link = if after == 0 { 0x34 } else { after + 1 };
        let mut byte = [0];
        self.config_read_bytes(bdf, link, &mut byte);
        // A list longer than the space it is in is a loop.
        for _ in 0..64 {
            let at = u16::from(byte[0]);
            if at == 0 {
                return None;
            }
            let header = self.config_read(bdf, at).to_le_bytes();
            if header[0] == id {
                return Some(at);
            }
            byte[0] = header[1];
        }
        None
    }

    /// Reads 32 bits of memory space.
    pub fn read(&self, address: u64) -> u32 {
        let mut data = [0; 4];
        self.mmio.read(address, &mut data);
        u32::from_le_bytes(data)
    }

    /// Writes memory space as a guest does: doorbells first.
    pub fn write(&self, address: u64, data: &[u8]) {
        if !self.doorbells.ring(address) {
            self.mmio.write(address, data);
        }
    }
}

impl Default for Rig {
    fn default() -> Self {
        Self::new()
    }
}
