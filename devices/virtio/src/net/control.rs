//! The control queue (virtio 1.2, 5.1.6.5): number of queue pairs, offloads, announcements.

use std::{
    io::{self, Read, Write},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

use base::Unpoisoned;
use device_model::memory::GuestRam;
use virtio_bindings::bindings::virtio_net::{
    VIRTIO_NET_F_CTRL_GUEST_OFFLOADS, VIRTIO_NET_F_GUEST_ANNOUNCE, VIRTIO_NET_F_GUEST_CSUM,
    VIRTIO_NET_F_GUEST_ECN, VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_TSO6,
    VIRTIO_NET_F_GUEST_UFO, VIRTIO_NET_F_MQ,
};
use virtio_queue::DescriptorChain;

use super::tap::Tap;
use crate::served::{Chain, ServedQueue};

const OK: u8 = 0;
const ERROR: u8 = 1;

const ANNOUNCE: u8 = 3;
const ACKNOWLEDGE: u8 = 0;
const MULTI_QUEUE: u8 = 4;
const SET_PAIRS: u8 = 0;
const GUEST_OFFLOADS: u8 = 5;
const SET_OFFLOADS: u8 = 0;

/// The driver's choices through the control queue; valid until it resets the device.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Choice {
    /// Number of queue pairs in use, from 1.
    pub pairs: u16,
    /// Offloads for received frames, as feature bits; if absent, all negotiated ones.
    pub offloads: Option<u64>,
}

impl Default for Choice {
    fn default() -> Self {
        Self {
            pairs: 1,
            offloads: None,
        }
    }
}

/// Serves the control queue.
pub struct ControlQueue {
    pub queue: ServedQueue,
    /// The negotiated features.
    pub features: u64,
    /// The driver's choices.
    pub choice: Arc<Mutex<Choice>>,
    /// The driver has been asked to announce the guest.
    pub announcing: Arc<AtomicBool>,
    /// All tap queues of the interface.
    pub taps: Vec<Tap>,
}

impl ControlQueue {
    pub fn serve(&mut self) {
        self.queue.acknowledge_kick();
        let Self {
            queue,
            features,
            choice,
            announcing,
            taps,
        } = self;
        queue.serve(|chain, ram| {
            let mut choice = choice.lock_unpoisoned();
            let done = command(chain.clone(), ram)
                .and_then(|command| carry_out(command, *features, &mut choice, announcing, taps));
            let result = if done.is_some() { OK } else { ERROR };
            match chain
                .writer(ram)
                .map(|mut writer| writer.write_all(&[result]))
            {
                Ok(Ok(())) => Chain::Used(1),
                _ => Chain::Used(0),
            }
        });
    }
}

#[derive(Clone, Copy)]
enum Command {
    Announced,
    SetPairs(u16),
    SetOffloads(u64),
}

/// Parses the command in a chain; `None` if it is invalid.
fn command(chain: DescriptorChain<&GuestRam>, ram: &GuestRam) -> Option<Command> {
    let mut reader = chain.reader(ram).ok()?;
    let mut head = [0; 2];
    reader.read_exact(&mut head).ok()?;
    match head {
        [ANNOUNCE, ACKNOWLEDGE] => Some(Command::Announced),
        [MULTI_QUEUE, SET_PAIRS] => {
            let mut pairs = [0; 2];
            reader.read_exact(&mut pairs).ok()?;
            Some(Command::SetPairs(u16::from_le_bytes(pairs)))
        }
        [GUEST_OFFLOADS, SET_OFFLOADS] => {
            let mut offloads = [0; 8];
            reader.read_exact(&mut offloads).ok()?;
            Some(Command::SetOffloads(u64::from_le_bytes(offloads)))
        }
        _ => None,
    }
}

/// Executes a command. Returns `None`, with nothing changed, if it is invalid or fails.
fn carry_out(
    command: Command,
    features: u64,
    choice: &mut Choice,
    announcing: &AtomicBool,
    taps: &[Tap],
) -> Option<()> {
    let negotiated = |bit: u32| features & 1 << bit != 0;
    match command {
        // The driver has announced the guest (5.1.6.5.4).
        Command::Announced if negotiated(VIRTIO_NET_F_GUEST_ANNOUNCE) => {
            announcing.store(false, Ordering::SeqCst);
        }
        Command::Announced => return None,
        // Frames for queues that the driver does not use would be lost (5.1.6.5.5).
        Command::SetPairs(pairs) => {
            let possible = (1..=taps.len()).contains(&pairs.into());
            if !negotiated(VIRTIO_NET_F_MQ) || !possible {
                return None;
            }
            if let Err(error) = attach(taps, pairs) {
                log::debug!("using {pairs} queues of a tap: {error}");
                // Restore the previous setting, as far as possible.
                let _ = attach(taps, choice.pairs);
                return None;
            }
            choice.pairs = pairs;
        }
        Command::SetOffloads(offloads) => {
            if !negotiated(VIRTIO_NET_F_CTRL_GUEST_OFFLOADS)
                || offloads & !(features & GUEST_FEATURES) != 0
            {
                return None;
            }
            set_offloads(taps, offloads).ok()?;
            choice.offloads = Some(offloads);
        }
    }
    Some(())
}

/// Offloads for received frames, and the kernel's flags for them.
const OFFLOADS: [(u32, u32); 5] = [
    (VIRTIO_NET_F_GUEST_CSUM, libc::TUN_F_CSUM),
    (VIRTIO_NET_F_GUEST_TSO4, libc::TUN_F_TSO4),
    (VIRTIO_NET_F_GUEST_TSO6, libc::TUN_F_TSO6),
    (VIRTIO_NET_F_GUEST_ECN, libc::TUN_F_TSO_ECN),
    (VIRTIO_NET_F_GUEST_UFO, libc::TUN_F_UFO),
];

/// The same offloads as feature bits.
const GUEST_FEATURES: u64 = 1 << VIRTIO_NET_F_GUEST_CSUM
    | 1 << VIRTIO_NET_F_GUEST_TSO4
    | 1 << VIRTIO_NET_F_GUEST_TSO6
    | 1 << VIRTIO_NET_F_GUEST_ECN
    | 1 << VIRTIO_NET_F_GUEST_UFO;

/// Lets the kernel deliver frames with the offloads among `features`.
pub fn set_offloads(taps: &[Tap], features: u64) -> io::Result<()> {
    let flags = OFFLOADS
        .iter()
        .filter(|(feature, _)| features & 1 << feature != 0)
        .fold(0, |flags, (_, flag)| flags | flag);
    // The kernel supports segmentation offload only together with checksum offload.
    let flags = if flags & libc::TUN_F_CSUM == 0 {
        0
    } else {
        flags
    };
    // Offloads are a property of the interface, whichever queue sets them.
    taps.first().map_or(Ok(()), |tap| tap.set_offloads(flags))
}

/// Lets the kernel distribute frames to the first `pairs` queues.
pub fn attach(taps: &[Tap], pairs: u16) -> io::Result<()> {
    if taps.len() < 2 {
        return Ok(());
    }
    taps.iter()
        .enumerate()
        .try_for_each(|(number, tap)| tap.attach(number < pairs.into()))
}
