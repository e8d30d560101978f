//! A guest's channel on the physical GPU, with a ring of its own.
//!
//! The guest's ring is not given to the GPU. Its entries are copied into a shadow ring, and each
//! submission is followed by an entry of the mediator that writes a completion word and raises an
//! interrupt. The mediator therefore decides when a channel starts, and knows when it is done.

use std::{collections::VecDeque, time::Duration};

use gf100::format::{
    PAGE,
    instance::{self, InstanceBlock, Space},
    push::{GpEntry, Header, Run},
    ramfc::{self, Ramfc, SIGNATURE},
    userd,
};

use super::{
    memory::{PhysPage, Reserve},
    physical::{Failure, Physical},
    space::Slot,
    wire::{MOST_BATCHES, MOST_ENTRIES},
};

/// log2 of the number of entries of a shadow ring, which has one page.
const LOG2: u32 = 9;
const ENTRIES: u32 = 1 << LOG2;
/// All submissions that may be in flight fit, each with the mediator's entry.
const _: () = assert!(MOST_BATCHES * (MOST_ENTRIES + 1) < ENTRIES as usize);
/// Size in bytes of the mediator's push buffer for a submission.
const TRAILER: u64 = 64;

/// A submission that has been given to the GPU.
#[derive(Clone, Copy, Debug)]
struct Flying {
    /// Total number of entries fetched when it is done.
    end: u64,
    /// Value of the completion word when it is done.
    number: u32,
}

/// A channel.
pub struct Channel {
    /// Its number on the GPU; `None` until something is to run, and while other channels need its
    /// place.
    pub physical: Option<u8>,
    /// When it last got something to do, counted in such events.
    pub used: u64,
    /// Its instance block; the submission page is the next page.
    pub instance: PhysPage,
    /// Its control memory.
    pub slot: Slot,
    queued: VecDeque<Vec<u64>>,
    flying: VecDeque<Flying>,
    /// Total number of entries given to the GPU, and fetched by it.
    put: u64,
    got: u64,
    number: u32,
    /// Whether it must not run until its VM's next turn: it has left the engines, or is leaving them.
    pub frozen: bool,
    /// Whether its front has stopped it.
    pub stopped: bool,
    /// Whether it has ended: nothing more is executed.
    pub ended: bool,
    /// Whether its space has ended and has taken its control memory back.
    pub detached: bool,
    /// GPU time since something of it last completed.
    pub busy: Duration,
    /// GPU time since it got its place.
    pub held: Duration,
    /// Number of failed commands.
    pub errors: u32,
}

impl Channel {
    /// Creates a channel and writes its instance block.
    pub fn new(
        instance: PhysPage,
        slot: Slot,
        directory: PhysPage,
        engines: [Option<u64>; instance::ENGINE_COUNT],
        reserve: &Reserve,
    ) -> Self {
        let block = InstanceBlock {
            space: Space {
                aperture: gf100::format::Aperture::Vram,
                number: directory.0,
                limit: (1 << gf100::format::VA_BITS) - 1,
            },
            engines,
        };
        let mut bytes = [0; instance::BYTES];
        block.encode(&mut bytes);
        let mut head = [0; ramfc::BYTES];
        Ramfc {
            userd: instance.address() + PAGE,
            signature: SIGNATURE,
            gp_base: slot.ring_va,
            gp_log2: LOG2,
            ..Ramfc::default()
        }
        .encode(&mut head);
        bytes[..ramfc::BYTES].copy_from_slice(&head);
        reserve.write(instance.address(), &bytes);
        Self {
            physical: None,
            used: 0,
            instance,
            slot,
            queued: VecDeque::new(),
            flying: VecDeque::new(),
            put: 0,
            got: 0,
            number: 0,
            frozen: false,
            stopped: false,
            ended: false,
            detached: false,
            busy: Duration::ZERO,
            held: Duration::ZERO,
            errors: 0,
        }
    }

    /// Sets new addresses of the engines' state in its space.
    pub fn set_engines(&self, engines: [Option<u64>; instance::ENGINE_COUNT], reserve: &Reserve) {
        let first = self.instance.address() + instance::ENGINES as u64;
        for (at, engine) in (first..).step_by(0x10).zip(engines) {
            reserve.set64(at, engine.map_or(0, |va| va & 0xff_ffff_f000 | 4));
        }
    }

    /// Adds a submission. Returns whether there was room.
    pub fn queue(&mut self, entries: Vec<u64>) -> bool {
        if self.queued.len() + self.flying.len() >= MOST_BATCHES {
            return false;
        }
        self.queued.push_back(entries);
        true
    }

    /// Whether a submission waits to be given to the GPU.
    pub fn has_queued(&self) -> bool {
        !self.ended && !self.queued.is_empty()
    }

    /// Whether a submission is in flight on the GPU.
    pub fn is_flying(&self) -> bool {
        !self.ended && !self.flying.is_empty()
    }

    /// Whether it has something to do and may do it.
    pub fn has_work(&self) -> bool {
        !self.stopped && (self.has_queued() || self.is_flying())
    }

    /// Whether it has something to do but no place on the GPU.
    pub fn needs_place(&self) -> bool {
        self.physical.is_none() && self.has_work()
    }

    /// Whether the GPU is working for it now.
    pub fn runs(&self) -> bool {
        self.physical.is_some() && !self.frozen && self.is_flying()
    }

    /// Stops its work when its current command is over. Returns whether anything ran.
    pub fn freeze(&mut self, gpu: &mut Physical) -> Result<bool, Failure> {
        let ran = self.runs();
        if let Some(physical) = self.physical
            && !std::mem::replace(&mut self.frozen, true)
        {
            gpu.stop(physical)?;
        }
        Ok(ran)
    }

    /// Whether a command of it that was stopped still runs.
    pub fn is_leaving(&self, gpu: &Physical) -> bool {
        self.physical
            .is_some_and(|physical| gpu.is_leaving(physical))
    }

    /// Ends the channel and drops everything that has not completed.
    pub fn end(&mut self) {
        self.ended = true;
        self.queued.clear();
        self.flying.clear();
    }

    /// Writes the oldest submission into the ring. Returns the value for the doorbell.
    pub fn launch(&mut self, reserve: &Reserve) -> Option<u32> {
        let entries = self.queued.pop_front()?;
        for raw in entries {
            // It points into the guest's own space, or faults there.
            self.push(GpEntry::parse(raw), reserve);
        }
        self.number = self.number.wrapping_add(1);
        let nth = u64::from(self.number) % MOST_BATCHES as u64;
        let offset = PAGE + nth * TRAILER;
        let words = self.trailer();
        for (at, word) in (self.slot.ring + offset..).step_by(4).zip(words) {
            reserve.set32(at, word);
        }
        let trailer = GpEntry {
            address: self.slot.ring_va + offset,
            words: words.len() as u32,
        };
        self.push(trailer, reserve);
        self.flying.push_back(Flying {
            end: self.put,
            number: self.number,
        });
        Some((self.put % u64::from(ENTRIES)) as u32)
    }

    fn push(&mut self, entry: GpEntry, reserve: &Reserve) {
        let at = self.put % u64::from(ENTRIES);
        reserve.set64(self.slot.ring + at * 8, entry.encode());
        self.put += 1;
    }

    /// Commands that write the completion word once all engines are idle, and raise an interrupt.
    fn trailer(&self) -> [u32; 7] {
        let run = |address, count| {
            Header::Increasing(Run {
                subchannel: 0,
                address,
                count,
            })
            .encode()
        };
        let at = self.slot.word_va;
        [
            run(0x10, 4),
            (at >> 32) as u32,
            at as u32,
            self.number,
            // Release of four bytes.
            1 << 24 | 2,
            run(0x20, 1),
            0,
        ]
    }

    /// Returns how many submissions have completed since the last call. The guest's engines can
    /// write the completion word and thus report completion too early. They cannot write how much
    /// of the ring was fetched, which is past the end of all submissions but the last.
    pub fn completed(&mut self, reserve: &Reserve) -> usize {
        let userd = self.instance.address() + PAGE;
        let get = u64::from(reserve.get32(userd + userd::GP_GET) % ENTRIES);
        let before = self.got % u64::from(ENTRIES);
        let fetched = (get + u64::from(ENTRIES) - before) % u64::from(ENTRIES);
        self.got = (self.got + fetched).min(self.put);
        let word = reserve.get32(self.slot.word);
        let got = self.got;
        let done =
            |flying: &Flying| flying.end <= got && word.wrapping_sub(flying.number) as i32 >= 0;
        let mut count = 0;
        while self.flying.front().is_some_and(done) {
            self.flying.pop_front();
            count += 1;
        }
        if count > 0 {
            self.busy = Duration::ZERO;
            self.held = Duration::ZERO;
        }
        count
    }
}
