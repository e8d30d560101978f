//! The types of devices: their queues and features, and the part of their configuration that Gantry knows.

use virtio::DeviceType;
use virtio_bindings::bindings::{
    virtio_blk::{
        VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_GEOMETRY,
        VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_SIZE_MAX,
        VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_WRITE_ZEROES,
    },
    virtio_config::VIRTIO_F_VERSION_1,
    virtio_net::{
        VIRTIO_NET_F_CSUM, VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_ECN,
        VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_TSO6, VIRTIO_NET_F_GUEST_UFO,
        VIRTIO_NET_F_HOST_ECN, VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_HOST_TSO6,
        VIRTIO_NET_F_HOST_UFO, VIRTIO_NET_F_MAC, VIRTIO_NET_F_MRG_RXBUF, VIRTIO_NET_F_MTU,
        VIRTIO_NET_F_STATUS, VIRTIO_NET_S_LINK_UP,
    },
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

/// Features of a network card that depend on its configuration only, whatever the back end has.
const CARD: u64 = 1 << VIRTIO_NET_F_MAC | 1 << VIRTIO_NET_F_STATUS;

/// Offloads of a network card, which can be switched off: checksums, TCP, UDP.
const CSUM: u64 = 1 << VIRTIO_NET_F_CSUM | 1 << VIRTIO_NET_F_GUEST_CSUM;
const TSO: u64 = 1 << VIRTIO_NET_F_GUEST_TSO4
    | 1 << VIRTIO_NET_F_GUEST_TSO6
    | 1 << VIRTIO_NET_F_GUEST_ECN
    | 1 << VIRTIO_NET_F_HOST_TSO4
    | 1 << VIRTIO_NET_F_HOST_TSO6
    | 1 << VIRTIO_NET_F_HOST_ECN;
const UFO: u64 = 1 << VIRTIO_NET_F_GUEST_UFO | 1 << VIRTIO_NET_F_HOST_UFO;

/// Length of a shared folder's name in its configuration.
const TAG: usize = 36;

/// A device, as far as its type decides about it.
#[derive(Clone, Debug)]
pub struct Model {
    /// The type.
    pub(crate) device_type: DeviceType,
    /// Features that may be offered if the back end has them.
    pub(crate) allowed: u64,
    /// Features that are offered whatever the back end has, which is not told of them then.
    pub(crate) own: u64,
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
            own: 0,
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
            own: 0,
            // The first is for requests that are urgent (virtio 1.2, 5.11.2).
            queue_sizes: vec![queue_size; usize::from(queues) + 1],
            least_queues: 2,
            config: Config::Own(config),
            // Another server knows none of the files that the guest has open.
            resumes: false,
        }
    }

    /// A network card with one pair of queues. Its offloads are for checksums, TCP and UDP, if the back end has them.
    pub fn net(mac: [u8; 6], mtu: Option<u16>, offloads: [bool; 3], queue_size: u16) -> Self {
        // virtio 1.2, 5.1.4: address, status, number of pairs, MTU.
        let mut config = mac.to_vec();
        for field in [VIRTIO_NET_S_LINK_UP as u16, 1, mtu.unwrap_or(0)] {
            config.extend_from_slice(&field.to_le_bytes());
        }
        let offloads = [CSUM, TSO, UFO].into_iter().zip(offloads);
        let offloads = offloads.filter_map(|(bits, is_on)| is_on.then_some(bits));
        let mtu = u64::from(mtu.is_some()) << VIRTIO_NET_F_MTU;
        Self {
            device_type: DeviceType {
                number: 1,
                name: "network card",
                class: 0x02_0000,
            },
            allowed: offloads.fold(RING | 1 << VIRTIO_NET_F_MRG_RXBUF, |all, bits| all | bits),
            own: CARD | mtu,
            queue_sizes: vec![queue_size; 2],
            least_queues: 2,
            config: Config::Own(config),
            resumes: true,
        }
    }

    /// Whether a back end that can serve this device can serve the other one.
    pub fn is_like(&self, other: &Self) -> bool {
        (self.device_type, &self.queue_sizes) == (other.device_type, &other.queue_sizes)
    }

    /// Number of queues.
    pub(crate) fn queues(&self) -> u16 {
        // At most as many as a configuration can name.
        self.queue_sizes.len() as u16
    }
}
