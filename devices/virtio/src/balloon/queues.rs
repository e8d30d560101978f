//! Handles the queues: lists of pages, and free ranges.

use std::{
    io::Read,
    sync::{Arc, atomic::Ordering},
};

use device_model::{memory::GuestRam, worker::DeviceWorker};
use event_manager::{EventOps, Events, MutEventSubscriber};
use virtio_queue::DescriptorChain;
use vm_memory::GuestAddress;
use vmm_sys_util::epoll::EventSet;

use super::shared::Shared;
use crate::served::{Chain, ServedQueue};

/// Page frame numbers count pages of 4 KiB, independent of the guest's page size.
const PAGE: u64 = 4096;

/// Maximum number of page frame numbers in one chain: Linux sends 256, Windows 1024. Each may cost
/// a system call, and a pause waits for up to one queue's worth of chains.
const MAX_PFNS: usize = 1024;

/// Maximum number of free ranges in one chain: Linux sends 32.
const MAX_RANGES: usize = 256;

const INFLATE: u32 = 0;
const DEFLATE: u32 = 1;
const REPORT: u32 = 2;

/// Serves a balloon's queues.
pub struct BalloonWorker {
    pub inflate: ServedQueue,
    pub deflate: ServedQueue,
    pub report: Option<ServedQueue>,
    /// Free page reporting was negotiated.
    pub reporting: bool,
    pub shared: Arc<Shared>,
    /// Memory could not be returned to the host. Logged once, or a guest could flood the log.
    pub failing: bool,
}

impl BalloonWorker {
    fn inflate(&mut self) {
        let (shared, failing) = (&self.shared, &mut self.failing);
        self.inflate.serve(|chain, ram| {
            let mut pages = read_pfns(chain, ram);
            // Merge adjacent pages: this saves many system calls.
            pages.sort_unstable();
            pages.dedup();
            for run in pages.chunk_by(|a, b| a + 1 == *b) {
                let Some(first) = run.first() else { continue };
                let len = run.len() as u64 * PAGE;
                give_back(ram, u64::from(*first) * PAGE, len, shared, failing);
            }
            Chain::Used(0)
        });
    }

    fn deflate(&mut self) {
        // Nothing to do: the host provides deflated pages again when the guest touches them.
        self.deflate.serve(|chain, ram| {
            read_pfns(chain, ram);
            Chain::Used(0)
        });
    }

    fn report(&mut self) {
        let (shared, failing) = (&self.shared, &mut self.failing);
        let (true, Some(queue)) = (self.reporting, &mut self.report) else {
            return;
        };
        queue.serve(|chain, ram| {
            for buffer in chain.writable().take(MAX_RANGES) {
                let len = u64::from(buffer.len()) / PAGE * PAGE;
                if buffer.addr().0.is_multiple_of(PAGE) && len > 0 {
                    give_back(ram, buffer.addr().0, len, shared, failing);
                }
            }
            Chain::Used(0)
        });
    }
}

fn give_back(ram: &GuestRam, address: u64, len: u64, shared: &Shared, failing: &mut bool) {
    match shared.discards.discard(ram, GuestAddress(address), len) {
        Ok(given) => {
            shared.discarded.fetch_add(given, Ordering::Relaxed);
            *failing = false;
        }
        Err(error) => {
            if !std::mem::replace(failing, true) {
                log::warn!("memory of the balloon stays with the guest: {error}");
            }
        }
    }
}

/// The page frame numbers in a chain, up to the limit; the rest are ignored.
fn read_pfns(chain: DescriptorChain<&GuestRam>, ram: &GuestRam) -> Vec<u32> {
    let Ok(reader) = chain.reader(ram) else {
        return Vec::new();
    };
    let mut bytes = Vec::new();
    if reader
        .take(MAX_PFNS as u64 * 4)
        .read_to_end(&mut bytes)
        .is_err()
    {
        return Vec::new();
    }
    bytes
        .chunks_exact(4)
        .map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]))
        .collect()
}

impl MutEventSubscriber for BalloonWorker {
    fn init(&mut self, ops: &mut EventOps) {
        let queues = [
            (Some(&self.inflate), INFLATE),
            (Some(&self.deflate), DEFLATE),
            (self.report.as_ref(), REPORT),
        ];
        for (queue, token) in queues {
            let Some(queue) = queue else { continue };
            let events = Events::with_data(&queue.active.kick, token, EventSet::IN);
            if let Err(error) = ops.add(events) {
                log::error!("a balloon cannot watch its queues: {error}");
            }
        }
    }

    fn process(&mut self, events: Events, _ops: &mut EventOps) {
        match events.data() {
            INFLATE => {
                self.inflate.acknowledge_kick();
                self.inflate();
            }
            DEFLATE => {
                self.deflate.acknowledge_kick();
                self.deflate();
            }
            _ => {
                if let Some(queue) = &self.report {
                    queue.acknowledge_kick();
                }
                self.report();
            }
        }
    }
}

impl DeviceWorker for BalloonWorker {}
