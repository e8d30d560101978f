//! The memory that devices can reach: the guest's RAM, and memory of other devices.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard},
};

use base::Unpoisoned;
use device_model::memory::{GuestMemory, GuestRam, HostMemory};
use virtio::{discard::Discards, plugged::Blocks};
use vm_memory::{Address, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

/// Guest-physical memory, shared by all address spaces of a VM.
pub struct Reachable {
    memory: GuestMemory,
    /// Held while there are devices.
    discards: Arc<Discards>,
    /// Device memory by guest-physical address.
    peers: Mutex<BTreeMap<u64, HostMemory>>,
}

/// Memory that is contiguous for the guest and in this process, and is added and removed as a
/// whole.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Piece {
    /// Guest-physical address.
    pub guest: u64,
    /// Length in bytes.
    pub len: u64,
    /// Its address in this process.
    pub host: *mut u8,
    /// It belongs to another device.
    pub is_peer: bool,
}

impl Piece {
    /// The part of it that starts at `guest`, which is inside it; at most `most` bytes.
    fn part(&self, guest: u64, most: u64) -> Self {
        let skipped = guest - self.guest;
        Self {
            guest,
            len: (self.len - skipped).min(most),
            // Within the same mapping.
            host: self.host.wrapping_add(skipped as usize),
            is_peer: self.is_peer,
        }
    }

    fn contains(&self, guest: u64) -> bool {
        guest >= self.guest && guest - self.guest < self.len
    }
}

impl Reachable {
    /// Creates an instance with RAM only.
    pub fn new(memory: GuestMemory, discards: Arc<Discards>) -> Self {
        Self {
            memory,
            discards,
            peers: Mutex::default(),
        }
    }

    /// Returns RAM to the host.
    pub fn discards(&self) -> &Discards {
        &self.discards
    }

    /// The current regions of RAM.
    pub fn ram(&self) -> impl std::ops::Deref<Target = GuestRam> {
        vm_memory::GuestAddressSpace::memory(&self.memory)
    }

    /// Device memory by guest-physical address.
    pub fn peers(&self) -> MutexGuard<'_, BTreeMap<u64, HostMemory>> {
        self.peers.lock_unpoisoned()
    }

    /// All RAM that the guest currently has.
    pub fn all_ram(&self, blocks: &Blocks) -> Vec<Piece> {
        let ram = self.ram();
        let regions = ram.iter().filter_map(|region| {
            let guest = region.start_addr().raw_value();
            let len = region.len();
            (!blocks.is_managed(guest)).then_some((guest, len))
        });
        regions
            .chain(blocks.plugged())
            .filter_map(|(guest, len)| piece(&ram, guest, len))
            .collect()
    }

    /// The consecutive pieces of `len` bytes (not 0) at `guest`; an error is the address of the
    /// first byte that is not memory. `guest + len` does not exceed 2^64.
    pub fn pieces(&self, blocks: &Blocks, guest: u64, len: u64) -> Result<Vec<Piece>, u64> {
        let ram = self.ram();
        let mut pieces = Vec::new();
        let (mut at, mut left) = (guest, len);
        while left > 0 {
            let found = self.ram_at(&ram, blocks, at).or_else(|| self.peer_at(at));
            let part = found.ok_or(at)?.part(at, left);
            pieces.push(part);
            left -= part.len;
            // Wraps around only when nothing is left.
            at = at.wrapping_add(part.len);
        }
        Ok(pieces)
    }

    /// The RAM that contains an address: a region, or a block if it is plugged in blocks.
    fn ram_at(&self, ram: &GuestRam, blocks: &Blocks, at: u64) -> Option<Piece> {
        if blocks.is_managed(at) {
            let (guest, len) = blocks.plugged_at(at)?;
            return piece(ram, guest, len);
        }
        let region = ram.find_region(GuestAddress(at))?;
        piece(ram, region.start_addr().raw_value(), region.len())
    }

    fn peer_at(&self, at: u64) -> Option<Piece> {
        let peers = self.peers();
        let (guest, memory) = peers.range(..=at).next_back()?;
        let piece = Piece {
            guest: *guest,
            len: memory.len,
            host: memory.address,
            is_peer: true,
        };
        piece.contains(at).then_some(piece)
    }
}

/// RAM within one region.
fn piece(ram: &GuestRam, guest: u64, len: u64) -> Option<Piece> {
    let host = ram.get_host_address(GuestAddress(guest)).ok()?;
    Some(Piece {
        guest,
        len,
        host,
        is_peer: false,
    })
}

#[cfg(test)]
mod tests {
    use vm_memory::GuestMemoryAtomic;

    use super::*;

    const BLOCK: u64 = 0x20_0000;
    /// Two adjacent regions, a gap, memory in blocks, a gap, a device.
    const REGIONS: [(u64, u64); 3] = [(0, 0x4000), (0x4000, 0x4000), (BLOCK, 4 * BLOCK)];
    const BAR: u64 = 0x8000_0000;

    fn reachable() -> Reachable {
        let regions = REGIONS.map(|(at, len)| (GuestAddress(at), len as usize));
        let ram = GuestRam::from_ranges(&regions).unwrap();
        let discards = Arc::new(Discards::default());
        discards.blocks().manage(BLOCK, 4 * BLOCK);
        let reachable = Reachable::new(GuestMemoryAtomic::new(ram), discards);
        let memory = HostMemory {
            address: std::ptr::without_provenance_mut(0x7000_0000),
            len: 0x10_0000,
            read_only: false,
        };
        reachable.peers().insert(BAR, memory);
        reachable
    }

    fn found(reachable: &Reachable, guest: u64, len: u64) -> Result<Vec<(u64, u64)>, u64> {
        let blocks = reachable.discards().blocks().lock();
        let pieces = reachable.pieces(&blocks, guest, len)?;
        let ram = reachable.ram();
        for piece in &pieces {
            let host = match piece.guest {
                BAR.. => {
                    std::ptr::without_provenance_mut((piece.guest - BAR + 0x7000_0000) as usize)
                }
                guest => ram.get_host_address(GuestAddress(guest)).unwrap(),
            };
            assert_eq!(piece.host, host);
        }
        Ok(pieces
            .iter()
            .map(|piece| (piece.guest, piece.len))
            .collect())
    }

    #[test]
    fn a_range_may_span_regions_and_consists_of_nothing_but_memory() {
        let reachable = reachable();
        assert_eq!(
            found(&reachable, 0x1000, 0x1000),
            Ok(vec![(0x1000, 0x1000)])
        );
        assert_eq!(
            found(&reachable, 0x3000, 0x2000),
            Ok(vec![(0x3000, 0x1000), (0x4000, 0x1000)])
        );
        assert_eq!(found(&reachable, 0x7000, 0x2000), Err(0x8000));
        assert_eq!(
            found(&reachable, u64::MAX - 0xfff, 0x1000),
            Err(u64::MAX - 0xfff)
        );
        assert_eq!(
            found(&reachable, BAR + 0xf_f000, 0x1000),
            Ok(vec![(BAR + 0xf_f000, 0x1000)])
        );
        assert_eq!(
            found(&reachable, BAR + 0xf_f000, 0x2000),
            Err(BAR + 0x10_0000)
        );
    }

    #[test]
    fn blocks_are_there_while_they_are_plugged_each_by_itself() {
        let reachable = reachable();
        assert_eq!(found(&reachable, BLOCK, 0x1000), Err(BLOCK));
        let blocks = reachable.discards().blocks();
        blocks.plug(BLOCK..3 * BLOCK, BLOCK).unwrap();
        assert_eq!(
            found(&reachable, 2 * BLOCK - 0x1000, 0x2000),
            Ok(vec![(2 * BLOCK - 0x1000, 0x1000), (2 * BLOCK, 0x1000)])
        );
        assert_eq!(found(&reachable, BLOCK, 3 * BLOCK), Err(3 * BLOCK));
        let all = reachable.all_ram(&blocks.lock());
        let all: Vec<_> = all.iter().map(|piece| (piece.guest, piece.len)).collect();
        assert_eq!(
            all,
            [
                (0, 0x4000),
                (0x4000, 0x4000),
                (BLOCK, BLOCK),
                (2 * BLOCK, BLOCK)
            ]
        );
    }
}
