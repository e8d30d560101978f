//! Cards on substitutes for taps, and on real taps where the tap is what is tested.

mod control;
mod frames;
mod host;
mod limits;
mod merge;

use std::{
    os::{fd::OwnedFd, unix::net::UnixDatagram},
    sync::Arc,
    time::Duration,
};

use device_model::thread::Unconfined;
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace};

use super::{
    Error, Net, Options,
    tap::{HEADER, Substitute, Tap},
};
use crate::{
    VirtioDevice,
    testing::simple::{Guest, GuestQueue},
};

/// Maximum time to wait for an expected frame.
const PATIENCE: Duration = Duration::from_secs(20);

/// Options of a card with one queue pair on its own interface.
fn options() -> Options {
    Options {
        thread_name: "_net0".to_owned(),
        tap: None,
        fds: Vec::new(),
        address: None,
        made_address: None,
        mac: Some([2, 0, 0, 0, 0, 1]),
        host_mac: None,
        mtu: None,
        num_queues: 2,
        queue_size: 16,
        offload_tso: true,
        offload_ufo: true,
        offload_csum: true,
        rate_limiter: None,
    }
}

/// A card that uses a socket per queue pair in place of a tap.
struct Card {
    net: Net,
    /// The other ends: each message is one frame with its header.
    wires: Vec<UnixDatagram>,
    /// The requests of the card to each tap.
    asked: Vec<Arc<Substitute>>,
}

fn card(change: impl FnOnce(&mut Options)) -> Card {
    let mut options = options();
    change(&mut options);
    let (mut taps, mut wires, mut asked) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..options.num_queues / 2 {
        let (near, far) = UnixDatagram::pair().unwrap();
        far.set_read_timeout(Some(PATIENCE)).unwrap();
        let tap = Tap::substitute(OwnedFd::from(near));
        asked.extend(tap.asked());
        taps.push(tap);
        wires.push(far);
    }
    let net = Net::on_substitutes(options, taps, Arc::new(Unconfined)).unwrap();
    Card { net, wires, asked }
}

impl Card {
    /// The value of a counter.
    fn count(&self, name: &str) -> u64 {
        let counters = self.net.counters();
        let found = counters.iter().find(|(counter, _)| *counter == name);
        found.unwrap().1
    }
}

/// A frame with its header, `len` bytes in total, filled with `mark`.
fn frame(mark: u8, len: usize) -> Vec<u8> {
    let mut frame = vec![0; HEADER];
    frame.resize(len, mark);
    frame
}

/// Reads guest memory.
fn bytes(guest: &Guest, at: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    let memory = guest.memory.memory();
    memory.read_slice(&mut bytes, GuestAddress(at)).unwrap();
    bytes
}

/// Makes `count` chains of one buffer of `len` bytes available, 4 KiB apart.
fn post(queue: &GuestQueue, first: u64, count: u64, len: u32) {
    for number in first..first + count {
        queue.submit(&[(queue.buffers() + (number << 12), len, true)]);
    }
}
