//! Configuration space and features (virtio 1.2, 5.2.3 and 5.2.4).

use disk::{Disk, SECTOR};
use virtio_bindings::bindings::{
    virtio_blk::{
        VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH,
        VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_TOPOLOGY,
        VIRTIO_BLK_F_WRITE_ZEROES,
    },
    virtio_config::VIRTIO_F_VERSION_1,
    virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC},
};

/// Length of the configuration space in bytes.
const LEN: usize = 60;

/// Offset of `blk_size`.
const BLOCK: usize = 20;
/// Offset of `physical_block_exp`: the physical block is 2^this logical ones.
const EXPONENT: usize = 24;
/// Offset of `min_io_size`.
const MIN_IO: usize = 26;

/// Offset of `writeback`, the only field that the driver writes.
pub const WRITEBACK: u64 = 32;

/// Maximum number of sectors in one discard or write-zeroes request: 1 GiB, so that a request
/// completes in reasonable time on any file system.
pub const MAX_RANGE: u32 = 1 << 21;

/// Maximum number of data descriptors per request; larger requests gain nothing.
const MAX_SEGMENTS: u32 = 254;

/// Whether bit number `bit` is set in `features`.
pub fn has(features: u64, bit: u32) -> bool {
    features & (1 << bit) != 0
}

/// The features offered for a disk.
pub fn features(disk: &Disk, read_only: bool, num_queues: u16) -> u64 {
    let offers = [
        (VIRTIO_F_VERSION_1, true),
        (VIRTIO_RING_F_EVENT_IDX, true),
        (VIRTIO_RING_F_INDIRECT_DESC, true),
        (VIRTIO_BLK_F_SEG_MAX, true),
        (VIRTIO_BLK_F_BLK_SIZE, true),
        (VIRTIO_BLK_F_TOPOLOGY, true),
        (VIRTIO_BLK_F_FLUSH, true),
        (VIRTIO_BLK_F_CONFIG_WCE, true),
        (VIRTIO_BLK_F_RO, read_only),
        (VIRTIO_BLK_F_MQ, num_queues > 1),
        (VIRTIO_BLK_F_DISCARD, disk.can_discard()),
        (VIRTIO_BLK_F_WRITE_ZEROES, disk.can_write_zeroes()),
    ];
    offers
        .iter()
        .filter(|(_, offered)| *offered)
        .fold(0, |bits, (bit, _)| bits | 1 << bit)
}

/// The part of the configuration that is constant for the lifetime of the device.
#[derive(Clone, Debug)]
pub struct Config {
    bytes: [u8; LEN],
}

impl Config {
    /// The configuration of `disk`.
    pub fn new(disk: &Disk, num_queues: u16, queue_size: u16) -> Self {
        let geometry = disk.geometry();
        let discard_alignment = u64::from(geometry.physical_block) / SECTOR;
        let mut config = Self { bytes: [0; LEN] };
        // seg_max: all but header and status, in case the driver uses no indirect descriptors.
        config.put(
            12,
            &u32::from(queue_size - 2).min(MAX_SEGMENTS).to_le_bytes(),
        );
        config.set_blocks(geometry.logical_block, geometry.physical_block);
        config.put(34, &num_queues.to_le_bytes());
        if disk.can_discard() {
            config.put(36, &MAX_RANGE.to_le_bytes());
            config.put(40, &1_u32.to_le_bytes());
            config.put(44, &(discard_alignment as u32).to_le_bytes());
        }
        if disk.can_write_zeroes() {
            config.put(48, &MAX_RANGE.to_le_bytes());
            config.put(52, &1_u32.to_le_bytes());
            config.put(56, &[u8::from(disk.can_discard())]);
        }
        config
    }

    /// Size of a block in bytes.
    pub fn block(&self) -> u32 {
        let mut size = [0; 4];
        size.copy_from_slice(&self.bytes[BLOCK..BLOCK + 4]);
        u32::from_le_bytes(size)
    }

    /// Has the guest go on with larger blocks, of a power of two in bytes.
    pub fn set_block(&mut self, size: u32) {
        let physical = self.block() << self.bytes[EXPONENT];
        self.set_blocks(size, physical.max(size));
    }

    /// Sets the sizes of blocks, both powers of two in bytes.
    fn set_blocks(&mut self, logical: u32, physical: u32) {
        let logical_per_physical = physical / logical;
        self.put(BLOCK, &logical.to_le_bytes());
        // The exponent fits.
        self.put(EXPONENT, &[logical_per_physical.trailing_zeros() as u8]);
        // In logical blocks.
        let min_io = u16::try_from(logical_per_physical).unwrap_or(1);
        self.put(MIN_IO, &min_io.to_le_bytes());
    }

    fn put(&mut self, at: usize, value: &[u8]) {
        self.bytes[at..at + value.len()].copy_from_slice(value);
    }

    /// Fills `data` with the configuration from `offset`, including the fields that change.
    pub fn read(&self, capacity: u64, writeback: bool, offset: u64, data: &mut [u8]) {
        let mut now = self.clone();
        now.put(0, &(capacity / SECTOR).to_le_bytes());
        now.put(WRITEBACK as usize, &[u8::from(writeback)]);
        data.fill(0);
        let tail = usize::try_from(offset)
            .ok()
            .and_then(|offset| now.bytes.get(offset..))
            .unwrap_or_default();
        let count = tail.len().min(data.len());
        data[..count].copy_from_slice(&tail[..count]);
    }
}
