//! The device: options, features, activation.

use std::{
    io,
    net::IpAddr,
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicU16, Ordering},
    },
};

use serde::{Deserialize, Serialize};
use virtio_bindings::bindings::virtio_net::{
    VIRTIO_NET_F_CSUM, VIRTIO_NET_F_CTRL_GUEST_OFFLOADS, VIRTIO_NET_F_CTRL_VQ,
    VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_ECN, VIRTIO_NET_F_GUEST_TSO4,
    VIRTIO_NET_F_GUEST_TSO6, VIRTIO_NET_F_GUEST_UFO, VIRTIO_NET_F_HOST_ECN, VIRTIO_NET_F_HOST_TSO4,
    VIRTIO_NET_F_HOST_TSO6, VIRTIO_NET_F_HOST_UFO, VIRTIO_NET_F_MAC, VIRTIO_NET_F_MQ,
    VIRTIO_NET_F_MTU, VIRTIO_NET_F_STATUS,
};

use super::{
    control::{self, ControlQueue},
    frames::{Counters, PairWorker},
    tap::{Interface, Tap, TapError},
};
use crate::{
    rate_limiter::{RateLimiter, RateLimiterConfig},
    thread::{ThreadRole, ThreadSpawner},
    virtio::{
        device::{ActivateError, Activation, ActiveQueue, DeviceType, StateError, VirtioDevice},
        served::{COMMON_FEATURES, ServedQueue, read_config_bytes},
        worker::Worker,
    },
};

/// Entries of the control queue.
const CONTROL_SIZE: u16 = 64;

/// The link is up.
const STATUS_LINK_UP: u16 = 1;

/// A network card's configuration.
#[derive(Debug)]
pub struct Options {
    /// Start of the thread names: `_net0` makes `_net0_qp0` ...
    pub thread_name: String,
    /// Name of the interface; made up if absent.
    pub tap: Option<String>,
    /// Queues of a tap that is open already, instead of a name.
    pub fds: Vec<OwnedFd>,
    /// The host's address and mask.
    pub address: Option<(IpAddr, IpAddr)>,
    /// The guest's MAC address; random if absent.
    pub mac: Option<[u8; 6]>,
    /// The host's MAC address.
    pub host_mac: Option<[u8; 6]>,
    /// Largest packet in bytes; the interface's if absent.
    pub mtu: Option<u16>,
    /// Queues, two for each pair, without the control queue.
    pub num_queues: u16,
    /// Entries of a queue, a power of two.
    pub queue_size: u16,
    /// TCP segmentation offload.
    pub offload_tso: bool,
    /// UDP fragmentation offload.
    pub offload_ufo: bool,
    /// Checksum offload.
    pub offload_csum: bool,
    /// Limits of each direction.
    pub rate_limiter: Option<RateLimiterConfig>,
}

/// A network card cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The host's interface.
    #[error(transparent)]
    Tap(#[from] TapError),
    /// A number of queues that cannot be had.
    #[error("a network card has 2 to 256 queues, an even number, not {0}")]
    NumQueues(u16),
    /// A queue size that cannot be had.
    #[error("the size of a network card's queues is a power of two from 2 to 32768, not {0}")]
    QueueSize(u16),
    /// Another number of descriptors than queue pairs.
    #[error("{fds} descriptors of a tap came for {pairs} pairs of queues")]
    Descriptors {
        /// Descriptors.
        fds: usize,
        /// Pairs of queues.
        pairs: usize,
    },
    /// A host resource could not be had.
    #[error("cannot {action}")]
    Host {
        /// What was tried.
        action: &'static str,
        /// Why.
        source: io::Error,
    },
}

/// What a snapshot keeps of a network card.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// The guest's MAC address.
    pub mac: [u8; 6],
    /// Largest packet, as the guest knows it.
    pub mtu: u16,
    /// Queue pairs that the guest uses.
    pub pairs: u16,
}

/// A network card.
pub struct Net {
    taps: Vec<Tap>,
    mac: [u8; 6],
    mtu: u16,
    features: u64,
    queue_sizes: Vec<u16>,
    rate_limiter: Option<RateLimiterConfig>,
    thread_name: String,
    counters: Arc<Counters>,
    /// Queue pairs that the driver uses.
    in_use: Arc<AtomicU16>,
    spawner: Arc<dyn ThreadSpawner>,
    workers: Vec<Worker<PairWorker>>,
}

/// The kernel's offload flags for what the driver has taken of the features.
pub fn offloads(features: u64) -> u32 {
    let pairs = [
        (VIRTIO_NET_F_GUEST_CSUM, libc::TUN_F_CSUM),
        (VIRTIO_NET_F_GUEST_TSO4, libc::TUN_F_TSO4),
        (VIRTIO_NET_F_GUEST_TSO6, libc::TUN_F_TSO6),
        (VIRTIO_NET_F_GUEST_ECN, libc::TUN_F_TSO_ECN),
        (VIRTIO_NET_F_GUEST_UFO, libc::TUN_F_UFO),
    ];
    let flags = pairs
        .iter()
        .filter(|(feature, _)| features & 1 << feature != 0)
        .fold(0, |flags, (_, flag)| flags | *flag);
    // The kernel takes segmentation only together with checksums.
    if flags & libc::TUN_F_CSUM == 0 {
        0
    } else {
        flags
    }
}

fn random_mac() -> io::Result<[u8; 6]> {
    let mut mac = [0_u8; 6];
    // SAFETY: the buffer outlives the call and has the length given.
    let got = unsafe { libc::getrandom(mac.as_mut_ptr().cast(), mac.len(), 0) };
    if usize::try_from(got).ok() != Some(mac.len()) {
        return Err(io::Error::last_os_error());
    }
    // Locally administered, for one receiver.
    mac[0] = mac[0] & 0xfc | 0x02;
    Ok(mac)
}

impl Net {
    /// Opens the tap, sets it up and switches it on.
    pub fn new(options: Options, spawner: Arc<dyn ThreadSpawner>) -> Result<Self, Error> {
        let Options {
            num_queues,
            queue_size,
            ..
        } = options;
        if !(2..=256).contains(&num_queues) || num_queues % 2 != 0 {
            return Err(Error::NumQueues(num_queues));
        }
        if !queue_size.is_power_of_two() || !(2..=32768).contains(&queue_size) {
            return Err(Error::QueueSize(queue_size));
        }
        let pairs = usize::from(num_queues / 2);
        let taps = if options.fds.is_empty() {
            Tap::open(options.tap.as_deref(), pairs)?
        } else {
            if options.fds.len() != pairs {
                return Err(Error::Descriptors {
                    fds: options.fds.len(),
                    pairs,
                });
            }
            options
                .fds
                .into_iter()
                .map(Tap::from_fd)
                .collect::<Result<_, _>>()?
        };
        let mut mtu = 1500;
        if let Some(first) = taps.first() {
            let interface = Interface::new(first.name())?;
            if let Some((ip, mask)) = options.address {
                interface.set_address(ip, mask)?;
            }
            if let Some(mac) = options.host_mac {
                interface.set_mac(mac)?;
            }
            if let Some(mtu) = options.mtu {
                interface.set_mtu(mtu)?;
            }
            // Whoever hands over descriptors looks after the interface, and may not let us.
            match interface.up() {
                Err(error) if options.tap.is_some() || options.address.is_some() => {
                    return Err(error.into());
                }
                _ => {}
            }
            mtu = interface.mtu().unwrap_or(1500);
        }
        let mac = match options.mac {
            Some(mac) => mac,
            None => random_mac().map_err(|source| Error::Host {
                action: "make up a MAC address",
                source,
            })?,
        };
        let mut features = COMMON_FEATURES;
        let mut offer = |bits: &[u32]| bits.iter().for_each(|bit| features |= 1 << bit);
        offer(&[
            VIRTIO_NET_F_MAC,
            VIRTIO_NET_F_STATUS,
            VIRTIO_NET_F_MTU,
            VIRTIO_NET_F_CTRL_VQ,
        ]);
        if pairs > 1 {
            offer(&[VIRTIO_NET_F_MQ]);
        }
        if options.offload_csum {
            offer(&[
                VIRTIO_NET_F_CSUM,
                VIRTIO_NET_F_GUEST_CSUM,
                VIRTIO_NET_F_CTRL_GUEST_OFFLOADS,
            ]);
            if options.offload_tso {
                offer(&[
                    VIRTIO_NET_F_HOST_TSO4,
                    VIRTIO_NET_F_HOST_TSO6,
                    VIRTIO_NET_F_HOST_ECN,
                    VIRTIO_NET_F_GUEST_TSO4,
                    VIRTIO_NET_F_GUEST_TSO6,
                    VIRTIO_NET_F_GUEST_ECN,
                ]);
            }
            if options.offload_ufo {
                offer(&[VIRTIO_NET_F_HOST_UFO, VIRTIO_NET_F_GUEST_UFO]);
            }
        }
        let mut queue_sizes = vec![queue_size; num_queues.into()];
        queue_sizes.push(CONTROL_SIZE);
        Ok(Self {
            taps,
            mac,
            mtu,
            features,
            queue_sizes,
            rate_limiter: options.rate_limiter,
            thread_name: options.thread_name,
            counters: Arc::default(),
            in_use: Arc::new(AtomicU16::new(1)),
            spawner,
            workers: Vec::new(),
        })
    }

    /// Name of the host's interface.
    pub fn tap_name(&self) -> &str {
        self.taps.first().map_or("", Tap::name)
    }

    /// The guest's MAC address.
    pub fn mac(&self) -> [u8; 6] {
        self.mac
    }

    fn limiter(&self) -> io::Result<Option<RateLimiter>> {
        self.rate_limiter.as_ref().map(RateLimiter::new).transpose()
    }

    fn start(&mut self, activation: Activation) -> io::Result<()> {
        let Activation {
            memory,
            interrupt,
            queues,
            features,
        } = activation;
        let name = self.thread_name.clone();
        let pairs = self.taps.len();
        let control_index = 2 * pairs;
        let mut control = None;
        let mut halves: Vec<[Option<ServedQueue>; 2]> = (0..pairs).map(|_| [None, None]).collect();
        for active in queues {
            let index = usize::from(active.index);
            let queue =
                ServedQueue::new(active, memory.clone(), interrupt.clone(), features, &name);
            // A driver without multi-queue has its control queue at number 2 (5.1.2).
            let multi_queue = features & 1 << VIRTIO_NET_F_MQ != 0;
            if index == control_index || (!multi_queue && index == 2) {
                let taps = self
                    .taps
                    .iter()
                    .map(Tap::try_clone)
                    .collect::<io::Result<_>>()?;
                control = Some(ControlQueue {
                    queue,
                    in_use: Arc::clone(&self.in_use),
                    features,
                    taps,
                });
            } else if let Some(pair) = halves.get_mut(index / 2) {
                pair[index % 2] = Some(queue);
            }
        }
        let multi_queue = features & 1 << VIRTIO_NET_F_MQ != 0;
        let in_use = if multi_queue {
            self.in_use.load(Ordering::SeqCst)
        } else {
            1
        };
        control::attach(&self.taps, in_use)?;
        for (number, (tap, pair)) in self.taps.iter().zip(halves).enumerate() {
            let [Some(receive), Some(transmit)] = pair else {
                continue;
            };
            tap.set_offloads(offloads(features))?;
            let worker = PairWorker {
                receive,
                transmit,
                control: control.take(),
                tap: tap.try_clone()?,
                counters: Arc::clone(&self.counters),
                receive_limit: self.limiter()?,
                transmit_limit: self.limiter()?,
                tap_readable: true,
                vectors: Vec::new(),
            };
            let name = format!("{name}_qp{number}");
            self.workers.push(Worker::spawn(
                &*self.spawner,
                ThreadRole::Net,
                &name,
                worker,
            )?);
        }
        Ok(())
    }
}

impl VirtioDevice for Net {
    fn device_type(&self) -> DeviceType {
        DeviceType::Net
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.queue_sizes
    }

    fn features(&self) -> u64 {
        self.features
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        // struct virtio_net_config: mac, status, pairs, mtu.
        let mut config = self.mac.to_vec();
        // At most 128.
        for value in [STATUS_LINK_UP, self.taps.len() as u16, self.mtu] {
            config.extend(value.to_le_bytes());
        }
        read_config_bytes(&config, offset, data);
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        if activation.queues.len() < 2 {
            return Err(ActivateError::MissingQueues {
                got: activation.queues.len(),
                needed: 2,
            });
        }
        self.start(activation)
            .map_err(|source| ActivateError::Host {
                action: "start a network card's threads",
                source,
            })
    }

    fn deactivate(&mut self) -> Vec<ActiveQueue> {
        let mut queues = Vec::new();
        for worker in std::mem::take(&mut self.workers)
            .into_iter()
            .filter_map(Worker::stop)
        {
            let control = worker.control.map(|control| control.queue);
            let all = [worker.receive, worker.transmit].into_iter().chain(control);
            queues.extend(all.map(|queue| queue.active));
        }
        queues.sort_by_key(|queue| queue.index);
        queues
    }

    fn reset(&mut self) {
        // One pair until the driver asks for more (5.1.6.5.5).
        self.in_use.store(1, Ordering::SeqCst);
    }

    fn save(&self) -> Result<serde_json::Value, StateError> {
        Ok(serde_json::to_value(State {
            mac: self.mac,
            mtu: self.mtu,
            pairs: self.in_use.load(Ordering::SeqCst),
        })?)
    }

    fn restore(&mut self, state: serde_json::Value) -> Result<(), StateError> {
        let state: State = serde_json::from_value(state)?;
        if !(1..=self.taps.len()).contains(&state.pairs.into()) || state.mac[0] & 1 != 0 {
            return Err(StateError::Mismatch(format!(
                "{} pairs of queues were in use, the card has {}; its address was {:x?}",
                state.pairs,
                self.taps.len(),
                state.mac
            )));
        }
        self.mac = state.mac;
        self.mtu = state.mtu;
        self.in_use.store(state.pairs, Ordering::SeqCst);
        Ok(())
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        let load = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        vec![
            ("rx_bytes", load(&self.counters.rx_bytes)),
            ("rx_frames", load(&self.counters.rx_frames)),
            ("tx_bytes", load(&self.counters.tx_bytes)),
            ("tx_frames", load(&self.counters.tx_frames)),
        ]
    }
}
