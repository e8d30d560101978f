//! Address windows for the BARs of a segment.

use super::bar::BarKind;

/// A range of addresses, including both ends.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Window {
    /// First address.
    pub first: u64,
    /// Last address.
    pub last: u64,
}

impl Window {
    /// A window of `len` bytes from `first`; `None` if it is empty or wraps around.
    pub fn new(first: u64, len: u64) -> Option<Self> {
        let last = first.checked_add(len.checked_sub(1)?)?;
        Some(Self { first, last })
    }

    /// Whether `len` bytes (not 0) from `address` are inside.
    pub(super) fn contains(&self, address: u64, len: u64) -> bool {
        let last = len.checked_sub(1).and_then(|len| address.checked_add(len));
        address >= self.first && last.is_some_and(|last| last <= self.last)
    }

    /// The part of it before the start of `end`.
    fn before(self, end: Option<Self>) -> Option<Self> {
        let last = end.map_or(self.last, |end| end.first.saturating_sub(1).min(self.last));
        (self.first <= last).then_some(Self { last, ..self })
    }
}

/// The address windows that a root port initially forwards to its bus.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct PortWindows {
    /// Memory below 4 GiB, in units of 1 MiB.
    pub mmio32: Option<Window>,
    /// Memory above 4 GiB, in units of 1 MiB.
    pub mmio64: Option<Window>,
    /// I/O ports, in units of 4 KiB.
    pub io: Option<Window>,
}

/// Number and address windows of a segment. Windows of different segments must not overlap each
/// other or RAM.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct SegmentConfig {
    /// Segment number, as in `_SEG`.
    pub segment: u16,
    /// Memory below 4 GiB.
    pub mmio32: Option<Window>,
    /// Memory above 4 GiB.
    pub mmio64: Option<Window>,
    /// I/O ports, for segment 0.
    pub io: Option<Window>,
    /// Shares for root ports, one per port that can be plugged in: consecutive parts at the ends of
    /// `mmio32`, `mmio64` and `io`. The port with the first share has bus 1 behind it.
    pub ports: Vec<PortWindows>,
}

impl SegmentConfig {
    /// Number of the last bus.
    pub fn last_bus(&self) -> u8 {
        // At most as many as a bus has slots.
        self.ports.len() as u8
    }

    /// The windows in which a BAR may be decoded, regardless of the function's location.
    pub(super) fn windows(&self, kind: BarKind) -> impl Iterator<Item = Window> {
        in_order(kind, self.io, self.mmio32, self.mmio64)
    }

    /// The windows in which a BAR of a function on `bus` is placed, in order of preference.
    pub(super) fn windows_on(&self, bus: u8, kind: BarKind) -> impl Iterator<Item = Window> {
        let first = self.ports.first().copied().unwrap_or_default();
        let (io, mmio32, mmio64) = match usize::from(bus).checked_sub(1) {
            None => (
                self.io.and_then(|window| window.before(first.io)),
                self.mmio32.and_then(|window| window.before(first.mmio32)),
                self.mmio64.and_then(|window| window.before(first.mmio64)),
            ),
            Some(port) => {
                let own = self.ports.get(port).copied().unwrap_or_default();
                (own.io, own.mmio32, own.mmio64)
            }
        };
        // Behind a bridge only prefetchable memory may be above 4 GiB (PCI-to-PCI Bridge 1.2,
        // 3.2.5.9).
        let narrow_first =
            bus > 0 && matches!(kind, BarKind::Memory64 { prefetchable } if !prefetchable);
        let mut windows: Vec<_> = in_order(kind, io, mmio32, mmio64).collect();
        if narrow_first {
            windows.reverse();
        }
        windows.into_iter()
    }
}

fn in_order(
    kind: BarKind,
    io: Option<Window>,
    mmio32: Option<Window>,
    mmio64: Option<Window>,
) -> impl Iterator<Item = Window> {
    let windows = match kind {
        BarKind::Io => [io, None],
        BarKind::Memory32 { .. } | BarKind::Rom => [mmio32, None],
        BarKind::Memory64 { .. } => [mmio64, mmio32],
    };
    windows.into_iter().flatten()
}
