//! The control queue (virtio 1.2, 5.1.6.5): number of queue pairs, offloads.

use std::{
    io::{self, Write},
    sync::{
        Arc,
        atomic::{AtomicU16, Ordering},
    },
};

use virtio_queue::DescriptorChain;

use super::{device::offloads, tap::Tap};
use crate::{
    memory::GuestRam,
    virtio::served::{Chain, ServedQueue},
};

const OK: u8 = 0;
const ERROR: u8 = 1;

const MULTI_QUEUE: u8 = 4;
const SET_PAIRS: u8 = 0;
const GUEST_OFFLOADS: u8 = 5;
const SET_OFFLOADS: u8 = 0;

/// Serves the control queue.
pub struct ControlQueue {
    pub queue: ServedQueue,
    /// Queue pairs that the driver uses.
    pub in_use: Arc<AtomicU16>,
    /// Offloads that the driver may choose from, as feature bits.
    pub features: u64,
    /// All queues of the interface.
    pub taps: Vec<Tap>,
}

impl ControlQueue {
    pub fn serve(&mut self) {
        self.queue.acknowledge_kick();
        let Self {
            queue,
            in_use,
            features,
            taps,
        } = self;
        queue.serve(|chain, ram| {
            let result = if command(chain.clone(), ram, in_use, *features, taps) {
                OK
            } else {
                ERROR
            };
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

/// Carries out a command; false if it makes no sense or fails.
fn command(
    chain: DescriptorChain<&GuestRam>,
    ram: &GuestRam,
    in_use: &AtomicU16,
    features: u64,
    taps: &[Tap],
) -> bool {
    let Ok(mut reader) = chain.reader(ram) else {
        return false;
    };
    let mut read = |bytes: &mut [u8]| std::io::Read::read_exact(&mut reader, bytes).is_ok();
    let mut head = [0; 2];
    if !read(&mut head) {
        return false;
    }
    match head {
        // Frames for other queues than those that the driver uses would be lost (5.1.6.5.5).
        [MULTI_QUEUE, SET_PAIRS] => {
            let mut wanted = [0; 2];
            if !read(&mut wanted) {
                return false;
            }
            let wanted = u16::from_le_bytes(wanted);
            if !(1..=taps.len()).contains(&usize::from(wanted)) {
                return false;
            }
            in_use.store(wanted, Ordering::SeqCst);
            attach(taps, wanted).is_ok()
        }
        [GUEST_OFFLOADS, SET_OFFLOADS] => {
            let mut wanted = [0; 8];
            if !read(&mut wanted) {
                return false;
            }
            let wanted = u64::from_le_bytes(wanted);
            wanted & !features == 0
                && taps
                    .iter()
                    .all(|tap| tap.set_offloads(offloads(wanted)).is_ok())
        }
        _ => false,
    }
}

/// Has the kernel spread frames over the first `in_use` queues.
pub fn attach(taps: &[Tap], in_use: u16) -> io::Result<()> {
    if taps.len() < 2 {
        return Ok(());
    }
    taps.iter()
        .enumerate()
        .try_for_each(|(number, tap)| tap.attach(number < in_use.into()))
}
