//! The guest's channels: what it submits, and what the mediator has received.

use std::collections::VecDeque;

use device_model::memory::GuestMemory;
use gf100::{
    format::{
        Aperture, PAGE, PAGE_SHIFT, Target,
        instance::{self, InstanceBlock},
        push::{ENTRY_BYTES, GpEntry},
        ramfc::{self, Ramfc},
        userd,
    },
    registers::{
        ChannelEntry, Fault,
        interrupts::{CommandError, Reason, unit},
    },
};
use gpu_mediator::gpu::wire::{Event, MOST_BATCHES, MOST_ENTRIES, Request};
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace};

use super::{
    deadline::Deadline,
    link::Link,
    memory::Vram,
    recorder::{Memory, Recorder},
    tables,
    tables::Tables,
    views::Views,
};

/// An event for the guest's registers.
#[derive(Clone, Copy, Debug)]
pub enum Happening {
    /// An address could not be accessed.
    Fault(Fault),
    /// A command could not be executed.
    Command(CommandError),
    /// An interrupt requested by a program.
    NonStall,
    /// A channel has used the GPU for too long.
    Timeout(u8),
}

/// A submission in flight at the mediator.
struct Flight {
    /// GP_GET value after it is done.
    get: u32,
    /// Address after its last command.
    end: u64,
}

/// A channel that is bound at the mediator.
struct Bound {
    block: InstanceBlock,
    ring: Ramfc,
    entries: u32,
    /// Index after the ring entries that were sent to the mediator, and after those that are done.
    sent: u32,
    done: u32,
    flights: VecDeque<Flight>,
    /// The mediator has been asked to stop it.
    is_stopped: bool,
    /// The index of the next ring entry in its instance block, since the channel was made to leave the engines.
    left_at: Option<u32>,
    /// The mediator has reported its end: none of its work is running.
    is_over: bool,
}

/// A channel.
#[derive(Default)]
pub struct Channel {
    entry: ChannelEntry,
    listed: bool,
    /// The GP_PUT value that the guest has submitted.
    put: Option<u32>,
    bound: Option<Bound>,
    /// The directory of the address space in which it is about to be bound: its tables have not
    /// been sent completely yet.
    joins: Option<u32>,
    /// It has ended, until the guest creates it again.
    ended: bool,
}

/// What channels operate on.
pub struct World<'a> {
    /// The VM's VRAM.
    pub vram: &'a Vram,
    /// Its RAM.
    pub ram: &'a GuestMemory,
    /// The page tables known to the mediator.
    pub tables: &'a mut Tables,
    /// The parts of VRAM that the guest sees and may have written.
    pub views: &'a mut Views,
    /// Connection to the mediator.
    pub link: &'a mut Link,
    /// Recorder of the guest's accesses, if any.
    pub recorder: &'a mut Option<Recorder>,
    /// Events for the registers.
    pub happenings: &'a mut Vec<Happening>,
    /// Channels whose submissions wait until tables have been sent.
    pub waiting: &'a mut VecDeque<u8>,
    /// When the work must stop for now.
    pub until: Deadline,
}

impl World<'_> {
    /// Sends the changes in an address space to the mediator. Returns whether all are sent;
    /// otherwise the channel's submissions wait.
    fn sync(&mut self, directory: u32, channel: u8) -> bool {
        let (views, vram, link) = (&mut *self.views, self.vram, &mut *self.link);
        let is_done = self.tables.sync(directory, views, vram, link, self.until);
        is_done || self.wait(channel)
    }

    /// Finishes the work on tables that was left. Returns whether it is finished; otherwise the
    /// channel's submissions wait.
    fn settle(&mut self, channel: u8) -> bool {
        let (views, vram, link) = (&mut *self.views, self.vram, &mut *self.link);
        self.tables.advance(views, vram, link, self.until) || self.wait(channel)
    }

    /// Makes a channel's submissions wait; false.
    fn wait(&mut self, channel: u8) -> bool {
        if !self.waiting.contains(&channel) {
            self.waiting.push_back(channel);
        }
        false
    }

    fn read(&self, target: Target, offset: u64, data: &mut [u8]) -> bool {
        match target {
            Target::Vram(page) => self.vram.read(page.address() + offset, data),
            Target::Ram(page) => {
                let at = GuestAddress(page.address() + offset);
                self.ram.memory().read_slice(data, at).is_ok()
            }
        }
    }

    fn write(&self, target: Target, offset: u64, data: &[u8]) -> bool {
        match target {
            Target::Vram(page) => self.vram.write(page.address() + offset, data),
            Target::Ram(page) => {
                let at = GuestAddress(page.address() + offset);
                self.ram.memory().write_slice(data, at).is_ok()
            }
        }
    }
}

impl Bound {
    /// Shows the channel's progress to the guest.
    fn show(&self, get: u32, end: u64, vram: &Vram) {
        for (at, word) in [
            (userd::GET_HIGH, (end >> 32) as u32),
            (userd::GET, end as u32),
            (userd::GP_GET, get),
        ] {
            vram.write(self.ring.userd + at, &word.to_le_bytes());
        }
    }

    fn directory(&self) -> u32 {
        self.block.space.number
    }

    /// Writes the ring's state to its instance block.
    fn save(&self, instance: Target, world: &World) {
        let mut head = [0; ramfc::BYTES];
        if world.read(instance, 0, &mut head) {
            let mut ring = Ramfc::parse(&head);
            ring.gp_get = self.done;
            ring.gp_put = self.sent;
            ring.encode(&mut head);
            world.write(instance, 0, &head);
        }
    }

    /// Completes the channel's oldest submission; false if there is none.
    fn complete(&mut self, number: u8, world: &mut World) -> bool {
        let Some(flight) = self.flights.pop_front() else {
            return false;
        };
        self.done = flight.get;
        self.show(flight.get, flight.end, world.vram);
        if let Some(recorder) = world.recorder {
            recorder.done(number, flight.get, self.entries, world.ram);
        }
        world.happenings.push(Happening::NonStall);
        true
    }
}

impl Channel {
    /// Whether the mediator has work of this channel in an address space. That of a channel that
    /// was ended here, by a ring that is not mapped, goes on.
    pub fn is_flying_in(&self, directory: u32) -> bool {
        let bound = self.bound.as_ref().filter(|bound| !bound.is_over);
        bound.is_some_and(|bound| bound.directory() == directory && !bound.flights.is_empty())
    }

    /// Whether it is bound in an address space, or is about to be.
    pub fn is_bound_in(&self, directory: u32) -> bool {
        let bound = self.bound.as_ref();
        self.joins == Some(directory) || bound.is_some_and(|bound| bound.directory() == directory)
    }

    /// Handles a write to its entry in the channel table.
    pub fn set(&mut self, number: u8, entry: ChannelEntry, world: &mut World) {
        let old = std::mem::replace(&mut self.entry, entry);
        if old.instance != entry.instance {
            self.unbind(number, old.instance, world);
            self.joins = None;
            self.put = None;
            self.ended = false;
        } else if !entry.enabled && old.enabled {
            self.stop(number, world);
        } else if entry.enabled && !old.enabled {
            self.pump(number, world);
        }
    }

    /// Sets whether it is in the run list.
    pub fn list(&mut self, number: u8, listed: bool, world: &mut World) {
        let before = std::mem::replace(&mut self.listed, listed);
        if before && !listed {
            self.stop(number, world);
        } else if listed && !before {
            self.pump(number, world);
        }
    }

    /// Asks the mediator to stop its work, if it leaves the run list. Returns whether the mediator
    /// must answer before the channel is [unlisted](Self::list).
    pub fn begin_to_leave(&mut self, number: u8, link: &mut Link) -> bool {
        self.listed && self.begin_to_stop(number, link)
    }

    /// Asks the mediator to stop its work. Returns whether there is any that may be running.
    fn begin_to_stop(&mut self, number: u8, link: &mut Link) -> bool {
        let (true, Some(bound)) = (self.is_flying(), &mut self.bound) else {
            return false;
        };
        let may_run = !std::mem::replace(&mut bound.is_stopped, true);
        if may_run {
            let (channel, stopped) = (number, true);
            link.send(&Request::Stop { channel, stopped });
        }
        may_run
    }

    /// Stops the channel: none of its work is running when this returns, and what it had completed
    /// is shown. It continues where it was, with the engines' state, when it may run again.
    fn stop(&mut self, number: u8, world: &mut World) {
        self.joins = None;
        if self.begin_to_stop(number, world.link) {
            world.link.sync();
        }
        if self.is_flying() {
            for event in world.link.inbox.take_of(number) {
                self.event(number, event, world);
            }
        }
    }

    /// Lets a channel that was stopped continue.
    fn go_on(&mut self, number: u8, world: &mut World) {
        let Some(bound) = &mut self.bound else { return };
        if std::mem::take(&mut bound.is_stopped) {
            let (channel, stopped) = (number, false);
            world.link.send(&Request::Stop { channel, stopped });
        }
    }

    /// Unbinds it at the mediator, and saves the ring's state for the next binding.
    fn unbind(&mut self, number: u8, instance: Option<Target>, world: &mut World) {
        let (Some(bound), Some(instance)) = (self.leave(number, instance, world), instance) else {
            return;
        };
        // Submissions that were not done are submitted again when it is bound again.
        bound.save(instance, world);
    }

    /// Unbinds it at the mediator, if it is bound there. When this returns, none of its work is
    /// running, and all earlier events of the mediator about it have been handled. Returns its
    /// former binding.
    fn leave(&mut self, number: u8, instance: Option<Target>, world: &mut World) -> Option<Bound> {
        let mut bound = self.bound.take()?;
        world.link.send(&Request::Unbind { channel: number });
        if !bound.flights.is_empty() {
            // After this, the guest may reuse the memory that its work could write to.
            world.link.sync();
            // Events that have arrived belong to this binding: the next one must not receive them.
            for event in world.link.inbox.take_of(number) {
                match event {
                    Event::Done { .. } => {
                        bound.complete(number, world);
                    }
                    other => self.end(number, other, instance, world),
                }
            }
        }
        Some(bound)
    }

    /// Makes it leave the engines, which keep their state of it. Its instance block then has the
    /// ring's state, which the guest may change.
    pub fn kick(&mut self, number: u8, world: &mut World) {
        if self.ended {
            self.unbind(number, self.entry.instance, world);
        } else if !self.entry.enabled
            && let (Some(bound), Some(instance)) = (&mut self.bound, self.entry.instance)
        {
            bound.save(instance, world);
            bound.left_at = Some(bound.done);
        }
    }

    /// Handles a submission of ring entries up to `put`.
    pub fn submit(&mut self, number: u8, put: u32, world: &mut World) {
        self.put = Some(put);
        self.pump(number, world);
    }

    /// Handles an event of the mediator for this channel.
    pub fn event(&mut self, number: u8, event: Event, world: &mut World) {
        match event {
            Event::Done { .. } => {
                let bound = self.bound.as_mut();
                if bound.is_some_and(|bound| bound.complete(number, world)) {
                    self.pump(number, world);
                }
            }
            other => self.end(number, other, self.entry.instance, world),
        }
    }

    /// Ends it, as the mediator reported.
    fn end(&mut self, number: u8, event: Event, instance: Option<Target>, world: &mut World) {
        if let Some(bound) = &mut self.bound {
            bound.is_over = true;
        }
        match event {
            Event::Fault {
                unit,
                reason,
                write,
                address,
                ..
            } => {
                let fault = Fault {
                    unit,
                    instance: 0,
                    address,
                    write,
                    reason: Reason::from_register(reason),
                };
                self.fault(fault, instance, world);
            }
            Event::Late { .. } => {
                self.ended = true;
                world.happenings.push(Happening::Timeout(number));
            }
            _ => {}
        }
    }

    /// Ends it with a fault.
    fn fault(&mut self, mut fault: Fault, instance: Option<Target>, world: &mut World) {
        let Some(instance) = instance else {
            return;
        };
        self.ended = true;
        // Bits 29:28 contain its aperture; 0 is VRAM.
        let aperture = if matches!(instance, Target::Ram(_)) {
            2
        } else {
            0
        };
        fault.instance = (instance.address() >> PAGE_SHIFT) as u32 | aperture << 28;
        world.happenings.push(Happening::Fault(fault));
    }

    /// Handles the loss of the mediator, and with it the engines' state of the channel: it ends. A
    /// channel that has not submitted anything yet continues when the mediator is back.
    pub fn lose(&mut self, world: &mut World) {
        self.joins = None;
        if self.bound.take().is_some() {
            let fault = Fault {
                unit: unit::FIFO,
                instance: 0,
                address: 0,
                write: false,
                reason: Reason::NoChannel,
            };
            self.fault(fault, self.entry.instance, world);
        }
    }

    /// Whether the mediator has work of this channel.
    fn is_flying(&self) -> bool {
        let bound = self.bound.as_ref();
        bound.is_some_and(|bound| !bound.flights.is_empty())
    }

    /// Sends the guest's submissions to the mediator, up to the limit of batches in flight.
    pub fn pump(&mut self, number: u8, world: &mut World) {
        if !self.entry.enabled || !self.listed || self.ended || world.link.is_lost() {
            return;
        }
        let (Some(put), Some(instance)) = (self.put, self.entry.instance) else {
            // An invalid submission keeps none of the earlier ones from continuing. Whether the guest has moved the
            // ring meanwhile is seen with the next valid one.
            self.go_on(number, world);
            return;
        };
        if !self.bind(number, instance, world) {
            return;
        }
        self.go_on(number, world);
        let Some(bound) = &mut self.bound else { return };
        bound.left_at = None;
        if put >= bound.entries {
            self.put = None;
            world.happenings.push(Happening::Command(CommandError {
                channel: number,
                status: CommandError::POINTER,
                method: (0, 0),
                data: put,
            }));
            return;
        }
        if bound.sent != put {
            let directory = bound.directory();
            if !world.sync(directory, number) {
                return;
            }
        }
        while bound.sent != put && bound.flights.len() < MOST_BATCHES {
            match gather(bound, put, world) {
                Ok((entries, flight)) => {
                    record(number, bound, &entries, world);
                    bound.sent = flight.get;
                    bound.flights.push_back(flight);
                    let channel = number;
                    world.link.send(&Request::Submit { channel, entries });
                }
                Err(address) => {
                    let fault = Fault {
                        unit: unit::FIFO,
                        instance: 0,
                        address,
                        write: false,
                        reason: Reason::NoPage,
                    };
                    self.fault(fault, Some(instance), world);
                    return;
                }
            }
        }
    }

    /// Binds it at the mediator as its instance block says; false if that is impossible, or must
    /// wait.
    fn bind(&mut self, number: u8, instance: Target, world: &mut World) -> bool {
        let mut bytes = [0; instance::BYTES];
        if !world.read(instance, 0, &mut bytes) {
            return false;
        }
        let mut head = [0; ramfc::BYTES];
        head.copy_from_slice(&bytes[..ramfc::BYTES]);
        let ring = Ramfc::parse(&head);
        let (Some(block), Some(entries)) = (InstanceBlock::parse(&bytes), ring.entries()) else {
            return false;
        };
        let is_same = |bound: &Bound| {
            bound.block.space == block.space
                && (bound.ring.gp_base, bound.ring.gp_log2, bound.ring.userd)
                    == (ring.gp_base, ring.gp_log2, ring.userd)
                && bound.left_at.is_none_or(|at| at == ring.gp_get)
        };
        if let Some(bound) = self.bound.as_mut().filter(|bound| is_same(bound)) {
            if bound.block.engines != block.engines {
                bound.block = block;
                let (channel, engines) = (number, block.engines);
                world.link.send(&Request::Engines { channel, engines });
            }
            return true;
        }
        // The guest has written the state of another ring.
        self.leave(number, Some(instance), world);
        if self.ended {
            return false;
        }
        if block.space.aperture != Aperture::Vram || ring.userd + PAGE > world.vram.len() {
            return false;
        }
        let directory = block.space.number;
        // What leaves makes room.
        if !world.settle(number) {
            return false;
        }
        let World {
            tables,
            views,
            vram,
            link,
            ..
        } = world;
        let Some(space) = tables.space(directory, views, vram, link) else {
            return false;
        };
        if self.joins != Some(directory) {
            // The page may have been a different directory before.
            world.tables.touch(directory);
        }
        self.joins = Some(directory);
        if !world.sync(directory, number) {
            return false;
        }
        self.joins = None;
        world.link.send(&Request::Bind {
            channel: number,
            space,
            engines: block.engines,
        });
        let get = ring.gp_get & (entries - 1);
        if let Some(recorder) = world.recorder {
            recorder.begin(number);
        }
        self.bound = Some(Bound {
            block,
            ring,
            entries,
            sent: get,
            done: get,
            flights: VecDeque::new(),
            is_stopped: false,
            left_at: None,
            is_over: false,
        });
        true
    }
}

/// Records the ring entries that a channel submits.
fn record(number: u8, bound: &Bound, entries: &[u64], world: &mut World) {
    let Some(recorder) = world.recorder else {
        return;
    };
    let memory = Memory {
        space: bound.block.space,
        vram: world.vram,
        ram: world.ram,
    };
    let first = bound.sent;
    let last = bound.entries - 1;
    let ring = (0..).map(|nth: u32| {
        let index = first.wrapping_add(nth) & last;
        bound.ring.gp_base + u64::from(index) * ENTRY_BYTES
    });
    recorder.submit(number, ring, entries, &memory);
}

/// The next ring entries up to `put`; an error is an address that is not mapped.
fn gather(bound: &Bound, put: u32, world: &World) -> Result<(Vec<u64>, Flight), u64> {
    let mut entries = Vec::new();
    let mut get = bound.sent;
    while get != put && entries.len() < MOST_ENTRIES {
        // A ring has at most 2^20 entries, and addresses have 40 bits.
        let address = bound.ring.gp_base + u64::from(get) * ENTRY_BYTES;
        let found = tables::translate(bound.block.space, address, world.vram);
        let (target, offset, _) = found.ok_or(address)?;
        let mut word = [0; 8];
        if !world.read(target, offset, &mut word) {
            return Err(address);
        }
        entries.push(u64::from_le_bytes(word));
        get = (get + 1) & (bound.entries - 1);
    }
    let last = GpEntry::parse(entries.last().copied().unwrap_or(0));
    let end = last.address + u64::from(last.words) * 4;
    Ok((entries, Flight { get, end }))
}
