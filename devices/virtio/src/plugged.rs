//! Tracks which blocks of RAM the guest has plugged, for users that must know before they access
//! them.
//!
//! A memory device (virtio-mem) reports the blocks. Passthrough devices follow it, because they may
//! reach plugged blocks only. Unplugged blocks use no host memory.

use std::{
    collections::BTreeMap,
    io,
    ops::Range,
    sync::{MutexGuard, Weak},
};

use device_model::fair_lock::FairLock;

/// Is notified as blocks are plugged and unplugged.
pub trait Follower: Send + Sync {
    /// The guest is about to get a block. An error refuses it.
    fn plugged(&self, address: u64, len: u64) -> io::Result<()>;

    /// The guest has given up a block. After an error the guest keeps it.
    fn unplugged(&self, address: u64, len: u64) -> io::Result<()>;
}

/// The blocks, locked at one moment.
#[derive(Default)]
pub struct Blocks {
    managed: Vec<Range<u64>>,
    /// Maps address to length.
    plugged: BTreeMap<u64, u64>,
    follower: Option<Weak<dyn Follower>>,
}

impl Blocks {
    /// Whether an address lies in a range whose blocks are plugged and unplugged.
    pub fn is_managed(&self, address: u64) -> bool {
        self.managed.iter().any(|range| range.contains(&address))
    }

    /// The plugged blocks in ascending order, as (address, length).
    pub fn plugged(&self) -> impl Iterator<Item = (u64, u64)> {
        self.plugged.iter().map(|(address, len)| (*address, *len))
    }

    /// The plugged block that contains `address`, as (start address, length).
    pub fn plugged_at(&self, address: u64) -> Option<(u64, u64)> {
        let (start, len) = self.plugged.range(..=address).next_back()?;
        (address - start < *len).then_some((*start, *len))
    }

    fn follower(&self) -> Option<std::sync::Arc<dyn Follower>> {
        self.follower.as_ref()?.upgrade()
    }

    fn take(&mut self, address: u64, len: u64) -> io::Result<()> {
        if let Some(follower) = self.follower() {
            follower.unplugged(address, len)?;
        }
        self.plugged.remove(&address);
        Ok(())
    }
}

/// All blocks of a VM. The lock is fair: a guest whose IOMMU looks up blocks constantly cannot
/// starve other users.
#[derive(Default)]
pub struct PluggedBlocks(FairLock<Blocks>);

impl PluggedBlocks {
    /// Starts to manage `len` bytes at `address`. None of their blocks is plugged yet.
    pub fn manage(&self, address: u64, len: u64) {
        let range = address..address.saturating_add(len);
        self.lock().managed.push(range);
    }

    /// Notifies `follower` from now on, instead of any earlier follower.
    pub fn follow(&self, follower: Weak<dyn Follower>) {
        self.lock().follower = Some(follower);
    }

    /// Plugs the blocks of `block` bytes in `range`: all of them, or none if the follower refuses.
    pub fn plug(&self, range: Range<u64>, block: u64) -> io::Result<()> {
        let mut blocks = self.lock();
        let mut done = Vec::new();
        for address in starts(&range, block) {
            let plugged = blocks
                .follower()
                .map_or(Ok(()), |follower| follower.plugged(address, block));
            if let Err(error) = plugged {
                for address in done {
                    blocks.take(address, block)?;
                }
                return Err(error);
            }
            blocks.plugged.insert(address, block);
            done.push(address);
        }
        Ok(())
    }

    /// Unplugs those blocks of `block` bytes in `range` that are plugged.
    pub fn unplug(&self, range: Range<u64>, block: u64) -> io::Result<()> {
        let mut blocks = self.lock();
        for address in starts(&range, block) {
            if blocks.plugged.contains_key(&address) {
                blocks.take(address, block)?;
            }
        }
        Ok(())
    }

    /// Locks the blocks: they do not change until the guard is dropped.
    pub fn lock(&self) -> MutexGuard<'_, Blocks> {
        self.0.lock()
    }
}

fn starts(range: &Range<u64>, block: u64) -> impl Iterator<Item = u64> + use<> {
    // The caller's block size is not 0.
    range
        .clone()
        .step_by(usize::try_from(block.max(1)).unwrap_or(usize::MAX))
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    /// A follower with room for two blocks.
    #[derive(Default)]
    struct Small(Mutex<Vec<u64>>);

    impl Follower for Small {
        fn plugged(&self, address: u64, _len: u64) -> io::Result<()> {
            let mut blocks = self.0.lock().unwrap();
            if blocks.len() == 2 {
                return Err(io::ErrorKind::OutOfMemory.into());
            }
            blocks.push(address);
            Ok(())
        }

        fn unplugged(&self, address: u64, _len: u64) -> io::Result<()> {
            self.0.lock().unwrap().retain(|at| *at != address);
            Ok(())
        }
    }

    #[test]
    fn a_follower_that_refuses_gets_none_of_the_range() {
        let blocks = PluggedBlocks::default();
        let follower = Arc::new(Small::default());
        blocks.manage(0x1000, 0x4000);
        blocks.follow(Arc::downgrade(&follower) as Weak<dyn Follower>);
        let plug = |range| blocks.plug(range, 0x1000);
        plug(0x1000..0x2000).unwrap();
        plug(0x2000..0x4000).unwrap_err();
        assert_eq!(*follower.0.lock().unwrap(), [0x1000]);
        assert_eq!(
            blocks.lock().plugged().collect::<Vec<_>>(),
            [(0x1000, 0x1000)]
        );
        // Unplugging blocks that are not plugged is not an error.
        blocks.unplug(0x1000..0x5000, 0x1000).unwrap();
        assert!(follower.0.lock().unwrap().is_empty());
        plug(0x2000..0x4000).unwrap();
        assert!(blocks.lock().is_managed(0x4fff));
        assert!(!blocks.lock().is_managed(0x5000));
    }
}
