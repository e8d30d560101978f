//! The device: options, features and activation.

use std::{
    fs::File,
    io,
    net::IpAddr,
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex, MutexGuard, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

use base::Unpoisoned;
use device_model::{
    lifecycle::{ActivateError, StateError},
    rate_limiter::{RateLimiter, RateLimiterConfig},
    thread::{ThreadRole, ThreadSpawner},
    throttle::{SharedRateLimiter, Throttle},
    worker::Worker,
};
use serde::{Deserialize, Serialize};
use virtio_bindings::bindings::virtio_net::{
    VIRTIO_NET_F_CSUM, VIRTIO_NET_F_CTRL_GUEST_OFFLOADS, VIRTIO_NET_F_CTRL_VQ,
    VIRTIO_NET_F_GUEST_ANNOUNCE, VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_ECN,
    VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_TSO6, VIRTIO_NET_F_GUEST_UFO,
    VIRTIO_NET_F_HOST_ECN, VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_HOST_TSO6, VIRTIO_NET_F_HOST_UFO,
    VIRTIO_NET_F_MAC, VIRTIO_NET_F_MQ, VIRTIO_NET_F_MRG_RXBUF, VIRTIO_NET_F_MTU,
    VIRTIO_NET_F_STATUS,
};

use super::{
    announce,
    control::{self, Choice, ControlQueue},
    counters::Counters,
    frames::{PairWorker, Transmitter},
    interface::Interface,
    receive::Receiver,
    tap::{Tap, TapError},
};
use crate::{
    device::{Activation, ActiveQueue, DeviceType, VirtioDevice, VirtioInterrupt},
    served::{COMMON_FEATURES, ServedQueue, read_config_bytes},
};

const TYPE: DeviceType = DeviceType {
    number: 1,
    name: "network card",
    class: 0x02_0000,
};

/// Size of the control queue.
const CONTROL_SIZE: u16 = 64;

/// The link is up.
const STATUS_LINK_UP: u16 = 1;
/// The driver should announce the guest's location to the network.
const STATUS_ANNOUNCE: u16 = 2;

/// A network card's configuration.
#[derive(Debug)]
pub struct Options {
    /// Prefix of the thread names: `_net0` results in `_net0_qp0` ...
    pub thread_name: String,
    /// Name of the interface; chosen by the kernel if absent.
    pub tap: Option<String>,
    /// File descriptors of a tap that is already open, one per queue, instead of a name.
    pub fds: Vec<OwnedFd>,
    /// The host's IP address and netmask.
    pub address: Option<(IpAddr, IpAddr)>,
    /// The host's IP address and netmask for an interface that is created here, if `address` is
    /// absent.
    pub made_address: Option<(IpAddr, IpAddr)>,
    /// The guest's MAC address; random if absent.
    pub mac: Option<[u8; 6]>,
    /// The host's MAC address.
    pub host_mac: Option<[u8; 6]>,
    /// MTU in bytes; the interface's if absent.
    pub mtu: Option<u16>,
    /// Number of queues, two per pair, without the control queue.
    pub num_queues: u16,
    /// Size of each queue, a power of two.
    pub queue_size: u16,
    /// TCP segmentation offload.
    pub offload_tso: bool,
    /// UDP fragmentation offload.
    pub offload_ufo: bool,
    /// Checksum offload.
    pub offload_csum: bool,
    /// Rate limits for each direction, for all queues together.
    pub rate_limiter: Option<RateLimiterConfig>,
}

/// Why a network card cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The host's interface cannot be used.
    #[error(transparent)]
    Tap(#[from] TapError),
    /// Unsupported number of queues.
    #[error("a network card has 2 to 256 queues, an even number, not {0}")]
    NumQueues(u16),
    /// Unsupported queue size.
    #[error("the size of a network card's queues is a power of two from 2 to 32768, not {0}")]
    QueueSize(u16),
    /// The number of descriptors differs from the number of queue pairs.
    #[error("{fds} descriptors of a tap came for {pairs} pairs of queues")]
    Descriptors {
        /// Number of descriptors.
        fds: usize,
        /// Number of queue pairs.
        pairs: usize,
    },
    /// The descriptors belong to more than one interface.
    #[error("descriptors of one tap are needed, these are of {first:?} and of {other:?}")]
    Interfaces {
        /// Interface of the first descriptor.
        first: String,
        /// Interface of another descriptor.
        other: String,
    },
    /// A host resource is unavailable.
    #[error("cannot {action}")]
    Host {
        /// The action that failed.
        action: &'static str,
        /// The cause.
        source: io::Error,
    },
}

/// Saved state of a network card.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// The guest's MAC address.
    pub mac: [u8; 6],
    /// MTU as the guest knows it.
    pub mtu: u16,
    /// Number of queue pairs that the guest uses.
    pub pairs: u16,
    /// Offloads for received frames, as feature bits, if the guest has chosen any.
    #[serde(default)]
    pub offloads: Option<u64>,
    /// The host's MAC address, which the guest may have in its ARP table.
    #[serde(default)]
    pub host_mac: Option<[u8; 6]>,
}

/// A network card.
pub struct Net {
    taps: Vec<Tap>,
    /// Gantry created the interface, and its MAC address is not configured.
    adopts_host_mac: bool,
    mac: [u8; 6],
    mtu: u16,
    features: u64,
    queue_sizes: Vec<u16>,
    receive_limit: Option<SharedRateLimiter>,
    transmit_limit: Option<SharedRateLimiter>,
    thread_name: String,
    counters: Arc<Counters>,
    choice: Arc<Mutex<Choice>>,
    /// The guest was restored here from elsewhere, and the network has not been notified.
    has_moved: bool,
    /// The driver has been asked to announce the guest, and has not acknowledged it.
    announcing: Arc<AtomicBool>,
    spawner: Arc<dyn ThreadSpawner>,
    workers: Vec<Worker<PairWorker>>,
    /// Queues without a worker, because the driver has enabled only half of a pair.
    idle: Vec<ActiveQueue>,
}

/// Makes up an address of a card.
///
/// # Errors
/// The host has no random numbers.
pub fn random_mac() -> io::Result<[u8; 6]> {
    let mut mac = [0_u8; 6];
    // SAFETY: the buffer outlives the call and has the given length.
    let got = unsafe { libc::getrandom(mac.as_mut_ptr().cast(), mac.len(), 0) };
    if usize::try_from(got).ok() != Some(mac.len()) {
        return Err(io::Error::last_os_error());
    }
    // Locally administered, unicast.
    mac[0] = mac[0] & 0xfc | 0x02;
    Ok(mac)
}

impl Options {
    /// Number of queue pairs, after validation.
    fn pairs(&self) -> Result<usize, Error> {
        if !(2..=256).contains(&self.num_queues) || !self.num_queues.is_multiple_of(2) {
            return Err(Error::NumQueues(self.num_queues));
        }
        if !self.queue_size.is_power_of_two() || !(2..=32768).contains(&self.queue_size) {
            return Err(Error::QueueSize(self.queue_size));
        }
        Ok(usize::from(self.num_queues / 2))
    }

    /// The features offered to the driver.
    fn features(&self) -> u64 {
        let mut features = COMMON_FEATURES;
        let mut offer = |bits: &[u32]| bits.iter().for_each(|bit| features |= 1 << bit);
        offer(&[
            VIRTIO_NET_F_MAC,
            VIRTIO_NET_F_STATUS,
            VIRTIO_NET_F_MTU,
            VIRTIO_NET_F_CTRL_VQ,
            VIRTIO_NET_F_GUEST_ANNOUNCE,
            VIRTIO_NET_F_MRG_RXBUF,
        ]);
        if self.num_queues > 2 {
            offer(&[VIRTIO_NET_F_MQ]);
        }
        if self.offload_csum {
            offer(&[
                VIRTIO_NET_F_CSUM,
                VIRTIO_NET_F_GUEST_CSUM,
                VIRTIO_NET_F_CTRL_GUEST_OFFLOADS,
            ]);
            if self.offload_tso {
                offer(&[
                    VIRTIO_NET_F_HOST_TSO4,
                    VIRTIO_NET_F_HOST_TSO6,
                    VIRTIO_NET_F_HOST_ECN,
                    VIRTIO_NET_F_GUEST_TSO4,
                    VIRTIO_NET_F_GUEST_TSO6,
                    VIRTIO_NET_F_GUEST_ECN,
                ]);
            }
            if self.offload_ufo {
                offer(&[VIRTIO_NET_F_HOST_UFO, VIRTIO_NET_F_GUEST_UFO]);
            }
        }
        features
    }
}

/// Takes over taps that another process has opened.
fn from_fds(fds: Vec<OwnedFd>, pairs: usize) -> Result<Vec<Tap>, Error> {
    if fds.len() != pairs {
        let fds = fds.len();
        return Err(Error::Descriptors { fds, pairs });
    }
    let taps: Vec<Tap> = fds
        .into_iter()
        .map(Tap::from_fd)
        .collect::<Result<_, _>>()?;
    if let [first, others @ ..] = taps.as_slice()
        && let Some(other) = others.iter().find(|tap| tap.name() != first.name())
    {
        return Err(Error::Interfaces {
            first: first.name().to_owned(),
            other: other.name().to_owned(),
        });
    }
    Ok(taps)
}

impl Net {
    /// Opens the tap, configures it and brings it up.
    pub fn new(mut options: Options, spawner: Arc<dyn ThreadSpawner>) -> Result<Self, Error> {
        let pairs = options.pairs()?;
        let fds = std::mem::take(&mut options.fds);
        let made = match &options.tap {
            _ if !fds.is_empty() => false,
            None => true,
            Some(name) => !Interface::new(name)?.exists()?,
        };
        let own = fds.is_empty();
        let taps = if own {
            Tap::open(options.tap.as_deref(), pairs)?
        } else {
            from_fds(fds, pairs)?
        };
        let mut mtu = 1500;
        if let Some(first) = taps.first() {
            let interface = Interface::new(first.name())?;
            let default = options.made_address.filter(|_| made);
            if let Some((ip, mask)) = options.address.or(default) {
                interface.set_address(ip, mask)?;
            }
            if let Some(mac) = options.host_mac {
                interface.set_mac(mac)?;
            }
            if let Some(mtu) = options.mtu {
                interface.set_mtu(mtu)?;
            }
            match interface.up() {
                // The process that passed the descriptors manages the interface, and may not permit
                // this.
                Err(error) if !own && options.address.is_none() => {
                    log::debug!("leaving {} as it is: {error}", first.name());
                }
                result => result?,
            }
            mtu = interface.mtu().unwrap_or(1500);
        }
        let adopts_host_mac = made && options.host_mac.is_none();
        Self::build(options, taps, mtu, adopts_host_mac, spawner)
    }

    /// Creates a card on substitutes for a tap (see [`Tap::substitute`]), one per queue pair.
    #[cfg(any(test, feature = "test-support"))]
    pub fn on_substitutes(
        options: Options,
        taps: Vec<Tap>,
        spawner: Arc<dyn ThreadSpawner>,
    ) -> Result<Self, Error> {
        let pairs = options.pairs()?;
        if taps.len() != pairs {
            let fds = taps.len();
            return Err(Error::Descriptors { fds, pairs });
        }
        Self::build(options, taps, 1500, false, spawner)
    }

    fn build(
        options: Options,
        taps: Vec<Tap>,
        mtu: u16,
        adopts_host_mac: bool,
        spawner: Arc<dyn ThreadSpawner>,
    ) -> Result<Self, Error> {
        let features = options.features();
        let mac = match options.mac {
            Some(mac) => mac,
            None => random_mac().map_err(|source| Error::Host {
                action: "make up a MAC address",
                source,
            })?,
        };
        let mut queue_sizes = vec![options.queue_size; options.num_queues.into()];
        queue_sizes.push(CONTROL_SIZE);
        let limiter = || {
            let config = options.rate_limiter.as_ref();
            let limiter = config.map(RateLimiter::new).transpose();
            let limiter = limiter.map_err(|source| Error::Host {
                action: "set up a rate limit",
                source,
            })?;
            Ok::<_, Error>(limiter.map(|limiter| Arc::new(Mutex::new(limiter))))
        };
        Ok(Self {
            receive_limit: limiter()?,
            transmit_limit: limiter()?,
            taps,
            adopts_host_mac,
            mac,
            mtu,
            features,
            queue_sizes,
            thread_name: options.thread_name,
            counters: Arc::default(),
            choice: Arc::default(),
            has_moved: false,
            announcing: Arc::default(),
            spawner,
            workers: Vec::new(),
            idle: Vec::new(),
        })
    }

    /// Name of the host's interface.
    pub fn tap_name(&self) -> &str {
        self.taps.first().map_or("", Tap::name)
    }

    /// The files of the interface's queues, for another process.
    pub fn shared_queues(&self) -> Vec<Weak<File>> {
        self.taps.iter().map(Tap::share).collect()
    }

    /// The guest's MAC address.
    pub fn mac(&self) -> [u8; 6] {
        self.mac
    }

    fn choice(&self) -> MutexGuard<'_, Choice> {
        self.choice.lock_unpoisoned()
    }

    fn start(&mut self, activation: Activation) -> io::Result<()> {
        let Activation {
            memory,
            interrupt,
            queues,
            features,
        } = activation;
        let negotiated = |bit: u32| features & 1 << bit != 0;
        let name = self.thread_name.clone();
        let serve = |active| {
            let (memory, interrupt) = (memory.clone(), Arc::clone(&interrupt));
            ServedQueue::new(active, memory, interrupt, features, &name)
        };
        // A driver without multi-queue uses one pair, and its control queue has index 2 (5.1.2).
        let multi_queue = negotiated(VIRTIO_NET_F_MQ);
        let pairs = if multi_queue { self.taps.len() } else { 1 };
        let control_index = negotiated(VIRTIO_NET_F_CTRL_VQ).then_some(2 * pairs);
        let mut control = None;
        let mut halves: Vec<[Option<ActiveQueue>; 2]> = (0..pairs).map(|_| [None, None]).collect();
        for active in queues {
            let index = usize::from(active.index);
            if Some(index) == control_index {
                control = Some(active);
            } else if let Some(pair) = halves.get_mut(index / 2) {
                pair[index % 2] = Some(active);
            } else {
                self.idle.push(active);
            }
        }
        let choice = *self.choice();
        control::attach(&self.taps, if multi_queue { choice.pairs } else { 1 })?;
        control::set_offloads(&self.taps, features & choice.offloads.unwrap_or(u64::MAX))?;
        let throttle = |limit: &Option<SharedRateLimiter>| {
            let limit = limit.as_ref().map(Arc::clone);
            limit.map(Throttle::new).transpose()
        };
        for (number, (tap, pair)) in self.taps.iter().zip(halves).enumerate() {
            let [Some(receive), Some(transmit)] = pair else {
                self.idle.extend(pair.into_iter().flatten());
                continue;
            };
            let control = control.take().map(|active| {
                let taps: io::Result<_> = self.taps.iter().map(Tap::try_clone).collect();
                Ok::<_, io::Error>(ControlQueue {
                    queue: serve(active),
                    features,
                    choice: Arc::clone(&self.choice),
                    announcing: Arc::clone(&self.announcing),
                    taps: taps?,
                })
            });
            let counters = &self.counters;
            let worker = PairWorker {
                receive: Receiver::new(
                    serve(receive),
                    negotiated(VIRTIO_NET_F_MRG_RXBUF),
                    throttle(&self.receive_limit)?,
                    Arc::clone(counters),
                ),
                transmit: Transmitter::new(
                    serve(transmit),
                    throttle(&self.transmit_limit)?,
                    Arc::clone(counters),
                ),
                control: control.transpose()?,
                tap: tap.try_clone()?,
            };
            self.workers.push(Worker::spawn(
                &*self.spawner,
                ThreadRole::Net,
                &format!("{name}_qp{number}"),
                worker,
            )?);
        }
        self.idle.extend(control);
        if std::mem::take(&mut self.has_moved) {
            self.announce(&*interrupt, negotiated(VIRTIO_NET_F_GUEST_ANNOUNCE));
        }
        Ok(())
    }

    /// Announces the guest's location to the network: with a frame of our own for switches, which
    /// learn from any frame, and through the driver, if it supports that, because it knows the
    /// guest's addresses.
    fn announce(&self, interrupt: &dyn VirtioInterrupt, by_driver: bool) {
        if let Some(tap) = self.taps.first()
            && let Err(error) = announce::send(tap, self.mac)
        {
            log::warn!("the network of {} learns later: {error}", tap.name());
        }
        if by_driver {
            self.announcing.store(true, Ordering::SeqCst);
            if let Err(error) = interrupt.config() {
                log::warn!("the guest does not announce itself: {error}");
            }
        }
    }
}

impl VirtioDevice for Net {
    fn device_type(&self) -> DeviceType {
        TYPE
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
        let announce = match self.announcing.load(Ordering::SeqCst) {
            true => STATUS_ANNOUNCE,
            false => 0,
        };
        for value in [STATUS_LINK_UP | announce, self.taps.len() as u16, self.mtu] {
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
        self.start(activation).map_err(|source| {
            // The transport considers the device inactive.
            self.deactivate();
            ActivateError::Host {
                action: "start a network card's threads",
                source,
            }
        })
    }

    fn deactivate(&mut self) -> Vec<ActiveQueue> {
        let mut queues = std::mem::take(&mut self.idle);
        for worker in std::mem::take(&mut self.workers)
            .into_iter()
            .filter_map(Worker::stop)
        {
            let control = worker.control.map(|control| control.queue);
            let all = [worker.receive.queue, worker.transmit.queue];
            let all = all.into_iter().chain(control);
            queues.extend(all.map(|queue| queue.active));
        }
        queues.sort_by_key(|queue| queue.index);
        queues
    }

    fn reset(&mut self) {
        // One pair until the driver requests more (5.1.6.5.5), with the offloads that it
        // negotiates.
        *self.choice() = Choice::default();
        // The next driver announces itself when it starts.
        self.announcing.store(false, Ordering::SeqCst);
        self.has_moved = false;
    }

    fn save(&self) -> Result<serde_json::Value, StateError> {
        let Choice { pairs, offloads } = *self.choice();
        let interface = Interface::new(self.tap_name());
        let host_mac = interface.and_then(|interface| interface.mac()).ok();
        Ok(serde_json::to_value(State {
            mac: self.mac,
            mtu: self.mtu,
            pairs,
            offloads,
            host_mac,
        })?)
    }

    fn restore(&mut self, state: serde_json::Value) -> Result<(), StateError> {
        let state: State = serde_json::from_value(state)?;
        let host_mac_is_unicast = state.host_mac.is_none_or(|mac| mac[0] & 1 == 0);
        if !(1..=self.taps.len()).contains(&state.pairs.into())
            || state.mac[0] & 1 != 0
            || !host_mac_is_unicast
        {
            return Err(StateError::Mismatch(format!(
                "{} pairs of queues were in use, the card has {}; its address was {:x?}, the \
                 host's {:x?}",
                state.pairs,
                self.taps.len(),
                state.mac,
                state.host_mac
            )));
        }
        self.mac = state.mac;
        self.mtu = state.mtu;
        self.has_moved = true;
        *self.choice() = Choice {
            pairs: state.pairs,
            offloads: state.offloads,
        };
        if let Some(mac) = state.host_mac.filter(|_| self.adopts_host_mac) {
            let interface = Interface::new(self.tap_name());
            if let Err(error) = interface.and_then(|interface| interface.set_mac(mac)) {
                // The guest learns the new address after some time.
                log::warn!("{error}; the guest knew another address");
            }
        }
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
