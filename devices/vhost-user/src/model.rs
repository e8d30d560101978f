//! The types of devices: their queues and features, and the part of their configuration that Gantry knows.

use virtio::DeviceType;
use virtio_bindings::bindings::{
    virtio_blk::{
        VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_GEOMETRY,
        VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_SIZE_MAX,
        VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_WRITE_ZEROES,
    },
    virtio_config::VIRTIO_F_VERSION_1,
    virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC},
};

/// Features of any device with split queues.
const RING: u64 =
    1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_RING_F_EVENT_IDX | 1 << VIRTIO_RING_F_INDIRECT_DESC;

/// A disk's, but for `CONFIG_WCE`: the driver would write the configuration.
const BLOCK: u64 = RING
    | 1 << VIRTIO_BLK_F_SIZE_MAX
    | 1 << VIRTIO_BLK_F_SEG_MAX
    | 1 << VIRTIO_BLK_F_GEOMETRY
    | 1 << VIRTIO_BLK_F_RO
    | 1 << VIRTIO_BLK_F_BLK_SIZE
    | 1 << VIRTIO_BLK_F_FLUSH
    | 1 << VIRTIO_BLK_F_TOPOLOGY
    | 1 << VIRTIO_BLK_F_MQ
    | 1 << VIRTIO_BLK_F_DISCARD
    | 1 << VIRTIO_BLK_F_WRITE_ZEROES;

/// A disk's configuration, as far as write-zeroes requests (virtio 1.2, 5.2.4).
const BLOCK_LEN: usize = 60;
/// Offset of `num_queues`.
const BLOCK_QUEUES: usize = 34;

/// Length of a shared folder's name in its configuration.
const TAG: usize = 36;

/// A device, as far as its type decides about it.
#[derive(Clone, Debug)]
pub struct Model {
    /// The type.
    pub(crate) device_type: DeviceType,
    /// Features that may be offered if the back end has them.
    pub(crate) allowed: u64,
    /// Maximum size of each queue.
    pub(crate) queue_sizes: Vec<u16>,
    /// Number of queues of a back end that does not say how many it has.
    pub(crate) least_queues: u16,
    pub(crate) config: Config,
    /// Requests are not lost with the back end, if it notes in shared memory which ones it has begun.
    pub(crate) resumes: bool,
}

/// Where the device's configuration comes from.
#[derive(Clone, Debug)]
pub(crate) enum Config {
    /// This many bytes from the back end, with these bytes at an offset.
    Theirs { len: usize, own: (usize, Vec<u8>) },
    /// Gantry.
    Own(Vec<u8>),
}

impl Model {
    /// A disk.
    pub fn disk(queues: u16, queue_size: u16) -> Self {
        Self {
            device_type: DeviceType {
                number: 2,
                name: "disk",
                class: 0x01_8000,
            },
            allowed: BLOCK,
            queue_sizes: vec![queue_size; queues.into()],
            least_queues: 1,
            config: Config::Theirs {
                len: BLOCK_LEN,
                own: (BLOCK_QUEUES, queues.to_le_bytes().to_vec()),
            },
            resumes: true,
        }
    }

    /// A shared folder of this name, with so many queues for requests.
    pub fn fs(tag: &str, queues: u16, queue_size: u16) -> Self {
        let mut config = tag.as_bytes().to_vec();
        config.resize(TAG, 0);
        config.extend_from_slice(&u32::from(queues).to_le_bytes());
        Self {
            device_type: DeviceType {
                number: 26,
                name: "shared folder",
                class: DeviceType::UNCLASSIFIED,
            },
            allowed: RING,
            // The first is for requests that are urgent (virtio 1.2, 5.11.2).
            queue_sizes: vec![queue_size; usize::from(queues) + 1],
            least_queues: 2,
            config: Config::Own(config),
            // Another server knows none of the files that the guest has open.
            resumes: false,
        }
    }

    /// The type of device.
    pub fn device_type(&self) -> DeviceType {
        self.device_type
    }

    /// Number of queues.
    pub fn queues(&self) -> u16 {
        // At most as many as a configuration can name.
        self.queue_sizes.len() as u16
    }
}
