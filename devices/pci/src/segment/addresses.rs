//! Address assignment for BARs.

use std::sync::Arc;

use base::Unpoisoned;
use vm_allocator::{AddressAllocator, AllocPolicy};

use super::{PciError, PciSegment, SharedFunction, is_io};
use crate::bar::{BarAddress, BarIndex, BarKind, BarRequest, DecodedBar};

impl PciSegment {
    /// The addresses to which a reset returns a restored function's BARs: their current ones, if
    /// possible.
    pub(super) fn home_of(&self, bus: u8, function: &SharedFunction) -> Vec<BarAddress> {
        let mut requests = Vec::new();
        let mut here = Vec::new();
        {
            let function = function.lock_unpoisoned();
            let config = function.config();
            for bar in config.bars() {
                requests.push(bar);
                let address = config.bar_address(bar.index).unwrap_or(0);
                let mut windows = self.config.windows(bar.kind);
                if windows.any(|window| window.contains(address, bar.size)) {
                    let index = bar.index;
                    here.push(BarAddress { index, address });
                }
            }
        }
        // A BAR that the guest had placed outside the windows may stay there.
        self.place(bus, &requests, &here).unwrap_or(here)
    }

    /// Assigns addresses to BARs on a bus: the given ones, else free ones. The largest BARs are
    /// placed first.
    pub(super) fn place(
        &self,
        bus: u8,
        requests: &[BarRequest],
        given: &[BarAddress],
    ) -> Result<Vec<BarAddress>, PciError> {
        let mut taken = self.addresses_in_use();
        let mut places = Vec::new();
        let address_of = |index: BarIndex| given.iter().find(|bar| bar.index == index);
        for bar in requests {
            if let Some(&BarAddress { index, address }) = address_of(bar.index) {
                taken.push(DecodedBar { bar: *bar, address });
                places.push(BarAddress { index, address });
            }
        }
        let mut rest: Vec<_> = requests
            .iter()
            .filter(|bar| address_of(bar.index).is_none())
            .collect();
        rest.sort_by_key(|bar| std::cmp::Reverse(bar.size));
        for bar in rest {
            let Some(address) = self.find_gap(bus, *bar, &taken) else {
                let error = PciError::NoAddress {
                    segment: self.config.segment,
                    index: bar.index.get(),
                    kind: bar.kind,
                    size: bar.size,
                };
                if !is_dispensable(bar.kind) {
                    return Err(error);
                }
                log::info!("{error}: the device has to do without");
                continue;
            };
            taken.push(DecodedBar { bar: *bar, address });
            let index = bar.index;
            places.push(BarAddress { index, address });
        }
        Ok(places)
    }

    /// The addresses of all BARs in the segment, decoded or not, and those to which a reset returns
    /// them.
    fn addresses_in_use(&self) -> Vec<DecodedBar> {
        let slots: Vec<_> = self
            .slots
            .lock_unpoisoned()
            .values()
            .map(|slot| (Arc::clone(&slot.function), slot.home.clone()))
            .collect();
        let mut taken = Vec::new();
        for (function, home) in slots {
            let function = function.lock_unpoisoned();
            let config = function.config();
            for bar in config.bars() {
                let now = config.bar_address(bar.index);
                let at_reset = home.iter().find(|home| home.index == bar.index);
                let addresses = now.into_iter().chain(at_reset.map(|home| home.address));
                taken.extend(addresses.map(|address| DecodedBar { bar, address }));
            }
        }
        taken
    }

    fn find_gap(&self, bus: u8, bar: BarRequest, taken: &[DecodedBar]) -> Option<u64> {
        // The guest moves BARs at will, so the free ranges are computed each time.
        let mut windows = self.config.windows_on(bus, bar.kind);
        windows.find_map(|window| {
            let len = window.last.checked_sub(window.first)?.checked_add(1)?;
            let mut free = AddressAllocator::new(window.first, len).ok()?;
            let mut taken = taken.to_vec();
            // BARs are aligned to their sizes: if two overlap, the larger covers the smaller.
            taken.sort_by_key(|used| std::cmp::Reverse(used.bar.size));
            for used in taken {
                let same_space = is_io(used.bar.kind) == is_io(bar.kind);
                if same_space && window.contains(used.address, used.bar.size) {
                    // An error means that it is already taken, which is fine.
                    let at = AllocPolicy::ExactMatch(used.address);
                    let _ = free.allocate(used.bar.size, used.bar.size, at);
                }
            }
            // At least a page apart, so that a guest can map BARs individually.
            let align = if is_io(bar.kind) {
                bar.size
            } else {
                bar.size.max(0x1000)
            };
            let mut policies = policies(bus, bar).iter();
            let range = policies.find_map(|policy| free.allocate(bar.size, align, *policy).ok())?;
            Some(range.start())
        })
    }
}

/// Where a place for a BAR is looked for first, and then. Small ones of bus 0 go to the end of the
/// window below 4 GiB, so that they leave its aligned start to large ones, which may be plugged in
/// later.
fn policies(bus: u8, bar: BarRequest) -> &'static [AllocPolicy] {
    /// Smaller BARs are small.
    const SMALL: u64 = 1 << 20;
    match bar.kind {
        BarKind::Memory32 { .. } if bus == 0 && bar.size < SMALL => {
            &[AllocPolicy::LastMatch, AllocPolicy::FirstMatch]
        }
        _ => &[AllocPolicy::FirstMatch],
    }
}

/// BARs that exist only for firmware and old drivers: an endpoint must not depend on I/O BARs (PCI
/// Express 1.3.2.2), nor a driver on the ROM.
fn is_dispensable(kind: BarKind) -> bool {
    matches!(kind, BarKind::Io | BarKind::Rom)
}
