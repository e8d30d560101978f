//! A PCI Express root port: a bridge with its own bus, for one device with up to eight functions.
//!
//! The VMM takes the role of firmware: the port has a bus number and address windows before the
//! guest starts, and again after a reset. The guest may change them.

use super::{
    bar::{BarKind, DecodedBar},
    config::{COMMAND_BUS_MASTER, COMMAND_IO, COMMAND_MEMORY, ConfigSpace, Identity},
    windows::{PortWindows, Window},
};

/// A generic root port, for which operating systems have no quirks.
const IDENTITY: Identity = Identity {
    vendor: 0x1b36,
    device: 0x000c,
    subsystem_vendor: 0,
    subsystem: 0,
    revision: 0,
    class: 0x06_0400,
};

// Offsets in a bridge's header (PCI-to-PCI Bridge 1.2, figure 3-1).
/// Number of the bus that the bridge is on.
const PRIMARY: usize = 0x18;
/// Number of the bus behind it.
const SECONDARY: usize = 0x19;
/// Base and limit of the I/O window, a byte each.
const IO_BASE: usize = 0x1c;
const MEMORY_BASE: usize = 0x20;
const MEMORY_LIMIT: usize = 0x22;
const PREFETCHABLE_BASE: usize = 0x24;
const PREFETCHABLE_LIMIT: usize = 0x26;
const PREFETCHABLE_UPPER_BASE: usize = 0x28;
const PREFETCHABLE_UPPER_LIMIT: usize = 0x2c;
const CONTROL: usize = 0x3e;
/// Offset after the last register that controls forwarding.
pub const FORWARDING_END: usize = CONTROL + 2;

/// The memory window registers hold bits 20 to 31 of an address.
const WINDOW_BITS: u16 = 0xfff0;
/// Prefetchable window: addresses have 64 bits.
const WINDOW_WIDE: u16 = 1;
const WINDOW_UNIT: u64 = 1 << 20;
/// The I/O window registers hold bits 12 to 15 of a port.
const IO_BITS: u8 = 0xf0;
const IO_UNIT: u64 = 1 << 12;
/// Bridge control: the reset bit, and bits such as parity, SERR# and VGA that have no effect here.
const CONTROL_WRITABLE: u16 = 0x003f | CONTROL_RESET;
/// Bridge control: the bus behind the port is in reset while this is set.
const CONTROL_RESET: u16 = 1 << 6;

const EXPRESS: u8 = 0x10;

/// The PCI Express capability after ID and link (PCI Express 5.0, 7.5.3): version 2, a root port
/// whose own slot is not implemented, with the fastest and widest link that exists, so that it does
/// not limit the link that a device behind it reports.
const EXPRESS_BODY: [(usize, u16); 6] = [
    // Capabilities.
    (0, 0x42),
    // Device: role-based error reporting.
    (2, 1 << 15),
    // Link: 32 GT/s, 16 lanes, both as capability and as current status.
    (10, LINK),
    (16, LINK),
    // Link 2: all speeds up to 32 GT/s are supported, which is also the target.
    (42, 0x3e),
    (46, 5),
];
const LINK: u16 = 0x105;
/// Size in bytes of the capability after ID and link.
const EXPRESS_LEN: usize = 0x3a;
/// Registers that the guest may write without any effect: device control (payload and request
/// sizes, error reporting, ordering), link control (except retraining, which is momentary), and
/// root control.
const EXPRESS_WRITABLE: [(usize, u16); 3] = [(6, 0x7fff), (14, 0x0fdb), (26, 0x001f)];

/// What a port forwards in either direction.
#[derive(Clone, Copy, Debug, Default)]
pub struct Forwarding {
    /// Downstream: the bus number that the guest assigned; 0 if none.
    pub bus: u8,
    /// Downstream: memory windows.
    windows: [Option<Window>; 2],
    /// Downstream: the I/O window.
    io: Option<Window>,
    /// Upstream: DMA and interrupt messages.
    pub upstream: bool,
}

impl Forwarding {
    /// Whether a BAR behind the port is reachable.
    pub fn reaches(&self, decoded: &DecodedBar) -> bool {
        let DecodedBar { bar, address } = decoded;
        let windows = match bar.kind {
            BarKind::Io => std::slice::from_ref(&self.io),
            _ => &self.windows[..],
        };
        let mut windows = windows.iter().flatten();
        windows.any(|window| window.contains(*address, bar.size))
    }
}

/// A root port.
pub struct RootPort {
    pub(super) config: ConfigSpace,
    pub(super) home: Option<(u8, PortWindows)>,
    /// The guest has reset the bus, and the functions on it have not been reset yet.
    pub(super) resetting: bool,
}

impl RootPort {
    /// Creates a port without a bus; the segment assigns one.
    #[allow(
        clippy::expect_used,
        reason = "one capability of constant length on an empty list always has room"
    )]
    pub fn new() -> Self {
        let mut config = ConfigSpace::bridge(IDENTITY);
        config.set_writable(PRIMARY, &[0xff; 3]);
        config.set_writable(IO_BASE, &[IO_BITS; 2]);
        for register in [
            MEMORY_BASE,
            MEMORY_LIMIT,
            PREFETCHABLE_BASE,
            PREFETCHABLE_LIMIT,
        ] {
            config.set_writable(register, &WINDOW_BITS.to_le_bytes());
        }
        for register in [PREFETCHABLE_BASE, PREFETCHABLE_LIMIT] {
            config.set(register, &WINDOW_WIDE.to_le_bytes());
        }
        for register in [PREFETCHABLE_UPPER_BASE, PREFETCHABLE_UPPER_LIMIT] {
            config.set_writable(register, &[0xff; 4]);
        }
        config.set_writable(CONTROL, &CONTROL_WRITABLE.to_le_bytes());
        let [body, writable] = [&EXPRESS_BODY[..], &EXPRESS_WRITABLE].map(|registers| {
            let mut bytes = [0; EXPRESS_LEN];
            for (at, value) in registers {
                bytes[*at..at + 2].copy_from_slice(&value.to_le_bytes());
            }
            bytes
        });
        config
            .add_capability(EXPRESS, &body, &writable)
            .expect("there is room for one capability");
        let mut port = Self {
            config,
            home: None,
            resetting: false,
        };
        port.close();
        port
    }

    /// Assigns the port its bus and windows.
    pub(super) fn give_bus(&mut self, bus: u8, windows: PortWindows) {
        self.home = Some((bus, windows));
        self.close();
        // Secondary and subordinate number: no further bus is behind the port.
        self.config.set(SECONDARY, &[bus, bus]);
        if let Some(Window { first, last }) = windows.io {
            let bits = |port: u64| (port >> 8) as u8 & IO_BITS;
            self.config.set(IO_BASE, &[bits(first), bits(last)]);
        }
        if let Some(Window { first, last }) = windows.mmio32 {
            self.set_window(MEMORY_BASE, first);
            self.set_window(MEMORY_LIMIT, last);
        }
        if let Some(Window { first, last }) = windows.mmio64 {
            self.set_window(PREFETCHABLE_BASE, first);
            self.set_window(PREFETCHABLE_LIMIT, last);
            let [first, last] = [first, last].map(|address| ((address >> 32) as u32).to_le_bytes());
            self.config.set(PREFETCHABLE_UPPER_BASE, &first);
            self.config.set(PREFETCHABLE_UPPER_LIMIT, &last);
        }
    }

    /// The VMM's number of its bus, regardless of the number that the guest assigned.
    pub fn home_bus(&self) -> Option<u8> {
        self.home.map(|(bus, _)| bus)
    }

    pub(super) fn holds_reset(&self) -> bool {
        self.config.read_u16(CONTROL) & CONTROL_RESET != 0
    }

    /// What it forwards at present: nothing while its bus is in reset.
    pub(super) fn forwarding(&self) -> Forwarding {
        if self.resetting || self.holds_reset() {
            return Forwarding::default();
        }
        let low = |register| u64::from(self.config.read_u16(register) & WINDOW_BITS) << 16;
        let high = |register| u64::from(self.config.read_u32(register)) << 32;
        let enabled = |bit| self.config.command() & bit != 0;
        let window = |first: u64, last: u64| {
            let last = last | (WINDOW_UNIT - 1);
            (enabled(COMMAND_MEMORY) && first <= last).then_some(Window { first, last })
        };
        let ports = self.config.read_u16(IO_BASE).to_le_bytes();
        let [first, last] = ports.map(|bits| u64::from(bits & IO_BITS) << 8);
        let io = Window {
            first,
            last: last | (IO_UNIT - 1),
        };
        let [_, bus] = self.config.read_u16(PRIMARY).to_le_bytes();
        Forwarding {
            bus,
            windows: [
                window(low(MEMORY_BASE), low(MEMORY_LIMIT)),
                window(
                    high(PREFETCHABLE_UPPER_BASE) | low(PREFETCHABLE_BASE),
                    high(PREFETCHABLE_UPPER_LIMIT) | low(PREFETCHABLE_LIMIT),
                ),
            ],
            io: (enabled(COMMAND_IO) && first <= last).then_some(io),
            upstream: self.config.command() & COMMAND_BUS_MASTER != 0,
        }
    }

    /// Closes all windows: each ends before it begins.
    fn close(&mut self) {
        self.config.set(IO_BASE, &[IO_BITS, 0]);
        for register in [MEMORY_BASE, PREFETCHABLE_BASE] {
            self.set_window(register, u64::from(u32::MAX));
            self.set_window(register + 2, 0);
        }
    }

    /// Sets a window register, and keeps its read-only bits.
    fn set_window(&mut self, register: usize, address: u64) {
        let kept = self.config.read_u16(register) & !WINDOW_BITS;
        // Takes the upper half of the low 32 bits.
        let bits = (address >> 16) as u16 & WINDOW_BITS;
        self.config.set(register, &(kept | bits).to_le_bytes());
    }
}

impl Default for RootPort {
    fn default() -> Self {
        Self::new()
    }
}
