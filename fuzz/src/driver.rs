//! A driver that does with its queues whatever the input says.
//!
//! The device only runs between two steps of the driver: its worker is started, kicked for every
//! queue and stopped, and it does not stop before it has seen the kicks. An input therefore always
//! has the same effect.

use devices::{
    testing::{raw::RawQueue, simple::Guest},
    virtio::VirtioDevice,
};
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace};

use crate::input::Input;

/// Number of entries of every queue.
const SIZE: u16 = 16;

/// Maximum number of device runs per input.
const MAX_RUNS: usize = 4;

/// Drives a device with all of its queues, up to 16. The device must be inactive, and is inactive
/// again afterwards.
///
/// # Panics
/// If the device's worker panics, or if the device does not save its state.
pub fn drive(guest: &Guest, device: &mut dyn VirtioDevice, bytes: &[u8]) {
    let count = device.queue_sizes().len().min(16) as u16;
    let queues: Vec<_> = (0..count)
        .map(|index| RawQueue::new(guest, index, SIZE))
        .collect();
    let mut input = Input::new(bytes);
    // The features that the driver refuses.
    let refused = input.u64();
    let mut held = None;
    for _ in 0..MAX_RUNS {
        prepare(guest, device, &queues, &mut input);
        // A driver cannot get any further without VIRTIO_F_VERSION_1.
        let mut activation = guest.activation_with(&[], 0);
        activation.features = device.features() & !(refused & !(1 << 32));
        activation.queues = held
            .take()
            .unwrap_or_else(|| queues.iter().map(RawQueue::active).collect());
        device.activate(activation).expect("all queues are there");
        queues.iter().for_each(RawQueue::kick);
        let back = device.deactivate();
        assert_eq!(back.len(), queues.len(), "the worker died");
        held = Some(back);
        let state = device.save().expect("an inactive device can be saved");
        drop(state);
        if input.is_empty() {
            break;
        }
    }
}

/// What the driver does before the device runs.
fn prepare(guest: &Guest, device: &mut dyn VirtioDevice, queues: &[RawQueue], input: &mut Input) {
    while !input.is_empty() {
        let step = input.u8();
        let queue = &queues[usize::from(step >> 4) % queues.len()];
        match step & 0xf {
            0..=4 => describe(queue, queue.table(), input),
            // Into a table that an indirect descriptor may point to.
            5 | 6 => describe(queue, queue.free(), input),
            7..=9 => queue.offer(input.u16() % (SIZE + 1)),
            10 | 11 => {
                let at = address(queue, input);
                let len = usize::from(input.u8() % 65);
                // The address may be outside RAM.
                let _ = guest
                    .memory
                    .memory()
                    .write_slice(input.bytes(len), GuestAddress(at));
            }
            12 => {
                let (offset, len) = (u64::from(input.u16() % 128), usize::from(input.u8() % 9));
                device.write_config(offset, input.bytes(len));
                device.read_config(offset, &mut vec![0; len]);
            }
            13 => queue.set_used_event(input.u16()),
            14 => queue.set_available(input.u16()),
            _ => return,
        }
    }
}

fn describe(queue: &RawQueue, table: u64, input: &mut Input) {
    let slot = u16::from(input.u8()) % SIZE;
    let at = address(queue, input);
    let kind = input.u8();
    let len = match kind >> 6 {
        0 => u32::from(input.u8()),
        1 => u32::from(input.u16()),
        2 => u32::from(input.u8()) * 16,
        _ => input.u32(),
    };
    queue.describe(
        table,
        slot,
        (at, len),
        u16::from(kind & 7),
        u16::from(input.u8()) % (SIZE + 1),
    );
}

/// Usually an address near the queue.
fn address(queue: &RawQueue, input: &mut Input) -> u64 {
    match input.u8() {
        0..=127 => queue.free() + u64::from(input.u8()) * 16,
        128..=223 => queue.free() + u64::from(input.u16()) * 4,
        224..=247 => u64::from(input.u32()),
        _ => input.u64(),
    }
}
