//! Divides up the GPU: who has which part of it, and when.
//!
//! The channels of one VM run at a time. A turn ends when the VM has nothing left to do, or when its time is over and
//! others wait. What still runs then is stopped, and continues in the VM's next turn. Nothing stops the GPU inside a
//! command, so the next turn begins when all channels have left the engines. A command that takes longer than the limit
//! is lost, and its channel ends. For what a front wants to stop, the limit is [`SHORT`].

mod places;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    fs::File,
    io,
    ops::Range,
    os::fd::OwnedFd,
    time::Duration,
};

use gf100::{
    format::{Gfn, PAGE, PAGE_NUMBER_BITS},
    registers::CHANNELS,
};
use log::{debug, info, warn};

use super::{
    channel::Channel,
    memory::{DmaPage, Pages, PhysPage, Reserve, is_safe_to_map},
    partition::{PER_LARGE, Partition, RamRange, dma_pages},
    physical::{Failure, Physical},
    space::{self, Quota, Refused, Spaces, Wanted},
    wire::{Event, Request, VERSION},
};
use crate::{
    Moment, Slice,
    policy::{ClientId, Name, NoWeight, Weight},
    scheduler::{Dispatch, Scheduler},
    status::{Client, Waits},
};

/// Minimum size of a partition: the least that nouveau starts with.
pub const SMALLEST: u64 = 64 << 20;
/// Fraction of VRAM that the mediator reserves, and the bounds of that size.
const RESERVE_PART: u64 = 8;
const RESERVE: std::ops::RangeInclusive<u64> = 16 << 20..=1 << 30;
/// Alignment of a partition in pages.
const ALIGN: u32 = 256;
/// Length of a turn of one submission, and extra time for what runs at the end of a turn.
const REQUEST: Duration = Duration::from_millis(30);
const GRACE: Duration = Duration::from_millis(2);
/// Length and extra time of turns by bandwidth. Credit only makes up for an overlong turn when it is next given out,
/// and eight machines get 12 ms each out of 100.
const QUANTUM: Duration = Duration::from_micros(1600);
const QUANTUM_GRACE: Duration = Duration::from_micros(200);
/// How long a command may go on that its front has stopped, whose channel has ended, or that runs in another VM's turn.
/// A guest's processor waits for this.
const SHORT: Duration = Duration::from_millis(20);
/// How long a command of a VM that is being paused may go on. Its front gives this process up after 10 s.
const PAUSING: Duration = Duration::from_secs(5);
/// Interval at which channels that leave the engines are looked at.
const LEAVING: Duration = Duration::from_micros(500);
/// Interval at which completion words are checked without an interrupt.
pub(super) const LOOK: Duration = Duration::from_millis(10);
/// The most that counts as GPU time of what passes between two looks. If more passes, the host has not let this process
/// run, and probably not the GPU's server either.
const MOST_COUNTED: Duration = Duration::from_secs(1);
/// Number of failed commands after which a channel ends, since each one costs this process time.
const MOST_ERRORS: u32 = 1000;
/// Number of pages for a channel's instance block and submission page.
const INSTANCE_PAGES: u32 = 2;
const INSTANCE: Wanted = Wanted {
    count: INSTANCE_PAGES,
    align: 1,
};
/// GPU bus pages for RAM: all but the first large page.
const ADDRESSES: Range<u32> = PER_LARGE..1 << PAGE_NUMBER_BITS;
/// Size of the run list, which has room for the channels of all VMs.
const RUN_LIST_PAGES: u32 = 1;

/// Why a front's request failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The GPU is lost.
    #[error(transparent)]
    Gpu(#[from] Failure),
    /// The front violates the protocol.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// The front has a different version.
    #[error("it speaks version {0} and this is {VERSION}")]
    Version(u32),
    /// The weight is invalid.
    #[error(transparent)]
    Weight(#[from] NoWeight),
    /// There is not enough memory.
    #[error("{wanted} MiB of VRAM are wanted: give at least 64, and no more than are free")]
    Vram {
        /// Requested size in MiB.
        wanted: u64,
    },
    /// RAM overlaps, or its file can shrink or uses huge pages.
    #[error("RAM at page {0:#x} overlaps other RAM, or its file may shrink or has huge pages")]
    Ram(u32),
    /// The VM has more RAM than the GPU can address for it.
    #[error(
        "it has more RAM than the {most} MiB that the GPU can address for so much VRAM: give it more"
    )]
    Window {
        /// Maximum size in MiB.
        most: u64,
    },
    /// The front has sent a second handshake.
    #[error("it sends a second handshake")]
    Handshake,
    /// There are too many submissions in flight.
    #[error("channel {0} has too many submissions under way")]
    Full(u8),
    /// A resource of the host is exhausted.
    #[error("cannot make a partition's memory")]
    Memory(#[source] io::Error),
}

/// A virtual machine.
struct Vm {
    weight: Weight,
    partition: Partition,
    spaces: Spaces,
    channels: BTreeMap<u8, Channel>,
    /// Channels that are bound to a space that has ended. They do nothing.
    dead: BTreeSet<u8>,
    /// Maximum number of its channels that may have a place on the GPU at a time.
    most: u8,
    events: VecDeque<Event>,
    /// Whether tables have changed since the last TLB flush.
    dirty: bool,
    /// It is paused: none of its channels runs.
    held: bool,
    /// The last question that was not answered yet: a channel is leaving the engines. Its answer answers all earlier ones.
    asked: Option<u32>,
    figures: Figures,
}

/// Counters of a VM.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Figures {
    /// Completed submissions.
    pub submissions: u64,
    /// Messages received from its front.
    pub messages: u64,
    /// Page table entries written.
    pub entries: u64,
    /// Page table entries refused.
    pub refused: u64,
    /// Channels that have faulted or exceeded the time limit.
    pub ended: u64,
    /// How often its channels were stopped, in favour of other VMs or for a pause.
    pub stopped: u64,
    /// How often its channels have lost their places on the GPU to others.
    pub displaced: u64,
    /// Address spaces that ended because the quota was used up.
    pub spaces_ended: u64,
}

impl Vm {
    /// Whether something of it can run.
    fn is_active(&self) -> bool {
        !self.held && self.has_work()
    }

    fn has_work(&self) -> bool {
        self.channels.values().any(Channel::has_work)
    }

    /// Stops the work of its channels, each when its current command is over.
    fn stop(&mut self, gpu: &mut Physical) -> Result<(), Failure> {
        for channel in self.channels.values_mut() {
            if channel.freeze(gpu)? {
                self.figures.stopped += 1;
            }
        }
        Ok(())
    }

    /// Reports the submissions of a channel that have completed.
    fn collect(&mut self, channel: u8, reserve: &Reserve) {
        let bound = self.channels.get_mut(&channel);
        for _ in 0..bound.map_or(0, |bound| bound.completed(reserve)) {
            self.figures.submissions += 1;
            self.events.push_back(Event::Done { channel });
        }
    }

    /// Whether a command of it that was stopped still runs.
    fn is_leaving(&self, gpu: &Physical) -> bool {
        self.channels.values().any(|its| its.is_leaving(gpu))
    }

    /// Answers the front's question once nothing runs that was stopped. What had completed is reported before.
    fn answer(&mut self, gpu: &Physical, reserve: &Reserve) {
        if self.is_leaving(gpu) {
            return;
        }
        let Some(number) = self.asked.take() else {
            return;
        };
        let held = self.held;
        let channels = self.channels.iter();
        let stopped = channels.filter(|(_, channel)| held || channel.stopped);
        let stopped: Vec<_> = stopped.map(|(number, _)| *number).collect();
        for channel in stopped {
            self.collect(channel, reserve);
        }
        self.events.push_back(Event::Synced { number });
    }

    /// Ends a channel, and says why.
    fn end(&mut self, number: u8, event: Event) {
        if let Some(channel) = self.channels.get_mut(&number)
            && !channel.ended
        {
            channel.end();
            self.figures.ended += 1;
            self.events.push_back(event);
        }
    }

    /// Flushes the GPU's translations if tables have changed.
    fn flush(&mut self, gpu: &mut Physical) -> Result<(), Failure> {
        if self.dirty || self.spaces.quota.awaits_flush() {
            gpu.flush()?;
            self.dirty = false;
            self.spaces.quota.flushed();
        }
        Ok(())
    }

    fn is_flying(&self) -> bool {
        self.channels.values().any(Channel::is_flying)
    }
}

/// Lengths of turns.
#[derive(Clone, Copy)]
struct Lengths {
    /// For all turns, whatever the policy says.
    quantum: Option<Duration>,
    /// Extra time for what runs at the end of a turn.
    grace: Duration,
}

impl Lengths {
    fn of(policy: Name) -> Self {
        let quantum = (policy == Name::Band).then_some(QUANTUM);
        let grace = if quantum.is_some() {
            QUANTUM_GRACE
        } else {
            GRACE
        };
        Self { quantum, grace }
    }
}

#[derive(Clone, Copy)]
struct Turn {
    vm: u32,
    slice: Slice,
    since: Moment,
    launched: u32,
    completed: u32,
    /// It is over, and its channels leave the engines.
    ending: bool,
}

impl Turn {
    fn is_over(&self, now: Moment) -> bool {
        match self.slice {
            Slice::Request => self.completed > 0 || now.since(self.since) > REQUEST,
            Slice::Time(length) => now.since(self.since) >= length,
        }
    }

    fn length(&self) -> Duration {
        match self.slice {
            Slice::Request => REQUEST,
            Slice::Time(length) => length,
        }
    }

    /// How long the turn has been over.
    fn overtime(&self, now: Moment) -> Duration {
        now.since(self.since).saturating_sub(self.length())
    }

    /// When to check it again.
    fn again(&self, grace: Duration, now: Moment) -> Duration {
        match self.length().saturating_sub(now.since(self.since)) {
            Duration::ZERO => grace,
            left => left,
        }
    }
}

/// The shared GPU.
pub struct Mediator {
    gpu: Physical,
    reserve: Reserve,
    vram: Pages,
    vms: BTreeMap<u32, Vm>,
    /// Owner and virtual channel number, by physical channel.
    owners: Vec<Option<(u32, u8)>>,
    list: PhysPage,
    /// Number of pages for the shadows of all VMs.
    reserved: u32,
    /// Pages of all partitions.
    shared: Range<u32>,
    scheduler: Scheduler,
    lengths: Lengths,
    turn: Option<Turn>,
    looked: Moment,
    limit: Duration,
    next: u32,
    /// How often channels got something to do.
    uses: u64,
}

impl Mediator {
    /// Shares a GPU by a policy. A channel that has it for longer than `limit` without completing anything is ended.
    pub fn new(mut gpu: Physical, policy: Name, limit: Duration) -> Result<Self, Error> {
        let all = gpu.vram();
        let part = (all / RESERVE_PART).clamp(*RESERVE.start(), *RESERVE.end());
        let part = part.next_multiple_of(1 << 20).min(all / 2);
        let mut reserve = Reserve::new(part).map_err(Error::Memory)?;
        // What an earlier mediator may have left belongs to nobody.
        gpu.unback(0..all)?;
        gpu.back(0..part, reserve.file())?;
        let list = reserve.take(RUN_LIST_PAGES, 1);
        let list = list.ok_or(Refused::Quota { limit: 0 })?;
        let first = (part / PAGE) as u32;
        let shared = first..(all / PAGE) as u32;
        Ok(Self {
            vram: Pages::new(first, shared.end - first),
            // All pages but page 0 and the list, in whole large pages.
            reserved: first.saturating_sub(PER_LARGE),
            shared,
            gpu,
            reserve,
            vms: BTreeMap::new(),
            owners: vec![None; usize::from(CHANNELS)],
            list,
            scheduler: Scheduler::new(policy.make()),
            lengths: Lengths::of(policy),
            turn: None,
            looked: Moment::now(),
            limit,
            next: 1,
            uses: 0,
        })
    }

    /// The GPU, to wait for.
    pub fn gpu(&self) -> &Physical {
        &self.gpu
    }

    /// Adds a VM and returns its number. Its front gets [`Self::partition`], unless it has `kept` one.
    pub fn join(
        &mut self,
        vram: u64,
        channels: u8,
        weight: u32,
        kept: Option<File>,
        now: Moment,
    ) -> Result<u32, Error> {
        let weight = Weight::try_from(weight)?;
        let wanted = Error::Vram { wanted: vram >> 20 };
        if vram < SMALLEST || !vram.is_multiple_of(1 << 20) {
            return Err(wanted);
        }
        let count = u32::try_from(vram / PAGE).ok();
        let first = count.and_then(|count| Some((self.vram.take(count, ALIGN)?, count)));
        let Some((first, count)) = first else {
            return Err(wanted);
        };
        let partition = match Partition::new(PhysPage(first), count, kept) {
            Ok(partition) => partition,
            Err(error) => {
                self.vram.give(first, count);
                return Err(Error::Memory(error));
            }
        };
        // The same fraction as of VRAM.
        let limit = self.shadows(count);
        let Some(shadows) = self.reserve.take(limit, PER_LARGE) else {
            self.vram.give(first, count);
            return Err(Error::Vram { wanted: vram >> 20 });
        };
        let start = u64::from(first) * PAGE;
        if let Err(failure) = self.gpu.back(start..start + vram, partition.file()) {
            self.vram.give(first, count);
            self.reserve.give(shadows, limit);
            return Err(match failure.is_refusal() {
                // A file that a front has kept may be anything.
                true => Error::Memory(io::ErrorKind::InvalidInput.into()),
                false => failure.into(),
            });
        }
        let id = self.next;
        self.next += 1;
        let vm = Vm {
            weight,
            partition,
            spaces: Spaces::new(Quota::new(shadows, limit)),
            channels: BTreeMap::new(),
            dead: BTreeSet::new(),
            most: channels,
            events: VecDeque::new(),
            dirty: false,
            held: false,
            asked: None,
            figures: Figures::default(),
        };
        self.vms.insert(id, vm);
        self.scheduler.join(ClientId(id), weight, now);
        info!("virtual machine {id} has {} MiB of VRAM", vram >> 20);
        Ok(id)
    }

    /// Number of pages of the mediator's memory that a VM may use for shadows and channels. It is the same fraction as
    /// the VM's part of VRAM, so that no VM can exhaust another's.
    fn shadows(&self, count: u32) -> u32 {
        // The partition is part of what is shared, so that is not empty.
        let part = u64::from(self.reserved) * u64::from(count) / self.shared.len() as u64;
        part as u32 / PER_LARGE * PER_LARGE
    }

    /// The GPU bus pages for a VM's RAM, in whole large pages. They are the same fraction of all bus pages as the
    /// partition is of VRAM, and at the same relative place, so that no VM can exhaust another's.
    fn window(&self, partition: &Partition) -> Range<u32> {
        let (first, count) = partition.pages();
        let all = (ADDRESSES.end - ADDRESSES.start) / PER_LARGE;
        let at = |page: u32| {
            // The partition is part of what is shared, so that is not empty.
            let before = u64::from(page - self.shared.start);
            let large = u64::from(all) * before / self.shared.len() as u64;
            ADDRESSES.start + large as u32 * PER_LARGE
        };
        at(first.0)..at(first.0 + count)
    }

    /// The file with a VM's memory.
    pub fn partition(&self, vm: u32) -> Option<&File> {
        Some(self.vms.get(&vm)?.partition.file())
    }

    /// Counters of a VM.
    pub fn figures(&self, vm: u32) -> Option<Figures> {
        let vm = self.vms.get(&vm)?;
        let refused = vm.spaces.refused;
        Some(Figures {
            refused,
            ..vm.figures
        })
    }

    /// All VMs and their use of the GPU.
    pub fn clients(&self, now: Moment) -> Vec<Client> {
        let client = |(id, vm): (&u32, &Vm)| {
            let used = self
                .scheduler
                .figures(ClientId(*id), now)
                .unwrap_or_default();
            Client {
                name: format!("virtual machine {id}"),
                weight: vm.weight.get(),
                latency: 0,
                workers: vm.channels.len(),
                // A turn is charged when it is over.
                device_time: (used.device_time + self.scheduler.held_by(ClientId(*id), now))
                    .as_nanos() as u64,
                queueing_time: used.queueing_time.as_nanos() as u64,
                turns: used.turns,
                calls: vm.figures.submissions,
                synchronous_calls: 0,
                waits: Waits::default(),
                delay: None,
                memory: vm.partition.bytes(),
                killed: vm.figures.ended,
                holds: self.scheduler.holder() == Some(ClientId(*id)),
                beside: false,
            }
        };
        self.vms.iter().map(client).collect()
    }

    /// A VM's front has disconnected: frees everything that the VM had.
    pub fn leave(&mut self, id: u32, now: Moment) -> Result<(), Failure> {
        let Some(mut vm) = self.vms.remove(&id) else {
            return Ok(());
        };
        self.scheduler.leave(ClientId(id), now);
        self.turn = self.turn.filter(|turn| turn.vm != id);
        vm.stop(&mut self.gpu)?;
        let channels: Vec<_> = vm.channels.keys().copied().collect();
        for channel in channels {
            self.stop(&mut vm, channel)?;
        }
        for channel in std::mem::take(&mut vm.channels).into_values() {
            self.release(&mut vm, &channel)?;
        }
        self.write_list()?;
        self.gpu.flush()?;
        let (shadows, limit) = vm.spaces.quota.all();
        self.reserve.give(shadows, limit);
        let (first, count) = vm.partition.pages();
        self.gpu
            .unback(first.address()..first.address() + u64::from(count) * PAGE)?;
        self.vram.give(first.0, count);
        for range in vm.partition.ram() {
            self.gpu.take_back(range.dma, range.count)?;
        }
        info!("virtual machine {id} has gone: {:?}", vm.figures);
        Ok(())
    }

    /// Makes a channel leave the engines, and waits until it has. A command that this takes too long is lost.
    fn stop(&mut self, vm: &mut Vm, number: u8) -> Result<(), Failure> {
        let Some(channel) = vm.channels.get_mut(&number) else {
            return Ok(());
        };
        channel.freeze(&mut self.gpu)?;
        let Some(physical) = channel.physical else {
            return Ok(());
        };
        self.gpu.leaving()?;
        if self.gpu.is_leaving(physical) {
            // No further command of it begins, for which another such wait would be needed.
            vm.stop(&mut self.gpu)?;
        }
        for lost in self.gpu.wait_for_leaving(physical, SHORT)? {
            if let Some((id, channel)) = self.owners[usize::from(lost)] {
                let after = SHORT;
                // This VM is not among the others now.
                let vm = self.vms.get_mut(&id).unwrap_or(vm);
                vm.end(channel, Event::Late { channel, after });
            }
        }
        Ok(())
    }

    /// Frees the number and memory of a channel that has left the engines.
    fn release(&mut self, vm: &mut Vm, channel: &Channel) -> Result<(), Failure> {
        if let Some(physical) = channel.physical {
            self.gpu.channel(physical, None, false)?;
            self.owners[usize::from(physical)] = None;
        }
        if !channel.detached {
            vm.spaces.give_slot(channel.slot);
        }
        vm.spaces.quota.give(channel.instance, INSTANCE_PAGES);
        Ok(())
    }

    fn write_list(&mut self) -> Result<(), Failure> {
        let mut count = 0;
        for (physical, owner) in (0_u64..).zip(&self.owners) {
            if owner.is_some() {
                let at = self.list.address() + u64::from(count) * 8;
                // The channel, then its type.
                self.reserve.set64(at, physical | 4 << 32);
                count += 1;
            }
        }
        self.gpu.run_list(self.list, count)
    }

    /// Executes a request of a VM's front. After any error other than the loss of the GPU, the front must be
    /// disconnected.
    pub fn request(
        &mut self,
        id: u32,
        request: Request,
        files: Vec<OwnedFd>,
        now: Moment,
    ) -> Result<(), Error> {
        let Some(mut vm) = self.vms.remove(&id) else {
            return Ok(());
        };
        vm.figures.messages += 1;
        let done = self.carry_out(&mut vm, id, request, files, now);
        self.vms.insert(id, vm);
        done
    }

    fn carry_out(
        &mut self,
        vm: &mut Vm,
        id: u32,
        request: Request,
        files: Vec<OwnedFd>,
        now: Moment,
    ) -> Result<(), Error> {
        let entries = request.entries();
        match request {
            Request::Hello { .. } => return Err(Error::Handshake),
            Request::Ram {
                first,
                count,
                offset,
            } => self.add_ram(vm, first, count, offset, files)?,
            Request::Table { table, size, space } => {
                if vm.spaces.directory(space)?.is_some() {
                    self.make_room(vm, id, Some(space), &[space::table(size)])?;
                }
                let reserve = &mut self.reserve;
                vm.spaces.add_table(reserve, table, size, space)?;
            }
            Request::TableGone { table } => {
                vm.spaces.remove_table(table)?;
            }
            Request::Map { table, runs } => {
                vm.figures.entries += entries;
                vm.spaces.map(&self.reserve, &vm.partition, table, &runs)?;
                vm.dirty = true;
            }
            Request::Space { space } => {
                self.make_room(vm, id, None, space::SPACE)?;
                vm.spaces.add_space(&mut self.reserve, space)?;
            }
            Request::SpaceGone { space } => {
                vm.spaces.remove_space(space)?;
            }
            Request::Link {
                space,
                index,
                entry,
            } => {
                vm.spaces.link(&self.reserve, space, index, entry)?;
                vm.dirty = true;
                if vm.spaces.is_poor(entry) {
                    self.end_space(vm, id, space)?;
                }
            }
            Request::Bind {
                channel,
                space,
                engines,
            } => self.bind(vm, id, channel, space, engines)?,
            Request::Engines { channel, engines } => {
                if let Some(bound) = vm.channels.get(&channel) {
                    bound.set_engines(engines, &self.reserve);
                }
            }
            Request::Unbind { channel } => {
                vm.dead.remove(&channel);
                self.stop(vm, channel)?;
                // Completed submissions must not be submitted again.
                vm.collect(channel, &self.reserve);
                if let Some(bound) = vm.channels.remove(&channel) {
                    self.release(vm, &bound)?;
                    if bound.physical.is_some() {
                        self.write_list()?;
                    }
                }
            }
            Request::Stop { channel, stopped } => {
                let Some(bound) = vm.channels.get_mut(&channel) else {
                    return Ok(());
                };
                bound.stopped = stopped;
                if stopped {
                    bound.freeze(&mut self.gpu)?;
                    self.gpu.leaving()?;
                    // If it has left the engines, nothing is left to be reported while it is stopped.
                    vm.collect(channel, &self.reserve);
                } else if bound.has_work() && !vm.held {
                    self.scheduler.want(ClientId(id), now);
                }
            }
            Request::Submit { channel, .. } if vm.dead.contains(&channel) => {}
            Request::Submit { channel, entries } => {
                let what = "channel";
                let number = channel.into();
                let bound = vm.channels.get_mut(&channel);
                let bound = bound.ok_or(Refused::Unknown { what, number })?;
                // A channel that has ended drops all submissions until it is bound again.
                if !bound.ended && !bound.queue(entries) {
                    return Err(Error::Full(channel));
                }
                if bound.has_work() && !vm.held {
                    self.scheduler.want(ClientId(id), now);
                }
            }
            Request::Sync { number } => {
                vm.flush(&mut self.gpu)?;
                vm.asked = Some(number);
                vm.answer(&self.gpu, &self.reserve);
            }
            Request::Hold { held } => {
                vm.held = held;
                if held {
                    // Its turn ends when the clock is looked at next: it is no longer active.
                    vm.stop(&mut self.gpu)?;
                    self.gpu.leaving()?;
                    // If all have left the engines, nothing is left to be reported while it is paused.
                    let channels: Vec<_> = vm.channels.keys().copied().collect();
                    for channel in channels {
                        vm.collect(channel, &self.reserve);
                    }
                } else if vm.has_work() {
                    self.scheduler.want(ClientId(id), now);
                }
            }
        }
        Ok(())
    }

    fn add_ram(
        &mut self,
        vm: &mut Vm,
        first: Gfn,
        count: u32,
        offset: u64,
        files: Vec<OwnedFd>,
    ) -> Result<(), Error> {
        let window = self.window(&vm.partition);
        // Ranges are consecutive: none is taken back before all are.
        let dma = DmaPage(window.start + vm.partition.dma_pages());
        if dma_pages(count) > window.end - dma.0 {
            let most = (window.len() as u64 * PAGE) >> 20;
            return Err(Error::Window { most });
        }
        let file = files.into_iter().next().map(File::from);
        let file =
            file.filter(|file| is_safe_to_map(file) && vm.partition.has_room_for(first, count));
        let Some(file) = file else {
            return Err(Error::Ram(first.0));
        };
        // The server refuses a file that is too short.
        if let Err(failure) = self.gpu.lend(dma, count, &file, offset) {
            return Err(match failure.is_refusal() {
                true => Error::Ram(first.0),
                false => failure.into(),
            });
        }
        vm.partition.add(RamRange { first, count, dma });
        Ok(())
    }

    fn bind(
        &mut self,
        vm: &mut Vm,
        id: u32,
        channel: u8,
        space: u32,
        engines: [Option<u64>; gf100::format::instance::ENGINE_COUNT],
    ) -> Result<(), Error> {
        if vm.channels.contains_key(&channel) || vm.dead.contains(&channel) {
            let (what, number) = ("channel", channel.into());
            return Err(Refused::Taken { what, number }.into());
        }
        // An error if there is no such space.
        let lives = vm.spaces.directory(space)?.is_some();
        if lives {
            let mut wanted = vec![INSTANCE];
            wanted.extend(vm.spaces.slot(space));
            self.make_room(vm, id, Some(space), &wanted)?;
        }
        let Some(directory) = vm.spaces.directory(space)? else {
            vm.dead.insert(channel);
            vm.events.push_back(places::without_memory(channel));
            return Ok(());
        };
        let quota = &mut vm.spaces.quota;
        let instance = quota.take(&mut self.reserve, INSTANCE_PAGES, 1)?;
        let slot = match vm.spaces.take_slot(&mut self.reserve, space) {
            Ok(slot) => slot,
            Err(refused) => {
                let quota = &mut vm.spaces.quota;
                quota.give(instance, INSTANCE_PAGES);
                return Err(refused.into());
            }
        };
        let bound = Channel::new(instance, slot, directory, engines, &self.reserve);
        vm.channels.insert(channel, bound);
        vm.dirty = true;
        Ok(())
    }

    /// Returns the next event for a VM's front.
    pub fn event(&mut self, vm: u32) -> Option<Event> {
        self.vms.get_mut(&vm)?.events.pop_front()
    }

    /// Handles an interrupt of the GPU.
    pub fn interrupt(&mut self) -> Result<(), Failure> {
        // On an error, the interrupt was read by others and none is pending.
        let _ = self.gpu.interrupt().read();
        let pending = self.gpu.register(0x00_2100)?;
        if pending & 1 << 28 != 0 {
            self.faults()?;
        }
        if pending & 1 << 29 != 0 {
            self.command_errors()?;
        }
        if pending & 1 << 30 != 0 {
            self.gpu.acknowledge(0x00_2a00)?;
        }
        if pending & 1 << 31 != 0 {
            self.gpu.acknowledge(0x00_25a8)?;
            let holder = self.turn.and_then(|turn| self.vms.get_mut(&turn.vm));
            if let Some(vm) = holder {
                vm.events.push_back(Event::NonStall);
            }
        }
        self.gpu.rearm()
    }

    fn faults(&mut self) -> Result<(), Failure> {
        let units = self.gpu.register(0x00_259c)?;
        for unit in (0..32_u8).filter(|unit| units & 1 << unit != 0) {
            let base = 0x00_2800 + u32::from(unit) * 0x10;
            let instance = self.gpu.register(base)? & 0xfff_ffff;
            let low = self.gpu.register(base + 4)?;
            let high = self.gpu.register(base + 8)?;
            let kind = self.gpu.register(base + 12)?;
            self.gpu.set(0x00_259c, 1 << unit)?;
            let event = |channel| Event::Fault {
                channel,
                unit,
                reason: (kind & 0xf) as u8,
                write: kind & 1 << 7 != 0,
                address: u64::from(high) << 32 | u64::from(low),
            };
            let Some((vm, number)) = self.find(instance) else {
                debug!("a fault of unit {unit:#x} is nobody's (instance {instance:#x})");
                continue;
            };
            debug!("virtual machine {vm}: {:x?}", event(number));
            self.end(vm, number, event(number));
        }
        Ok(())
    }

    /// Finds the owner of an instance block.
    fn find(&self, instance: u32) -> Option<(u32, u8)> {
        self.vms.iter().find_map(|(id, vm)| {
            let mut channels = vm.channels.iter();
            let (number, _) = channels.find(|(_, channel)| channel.instance.0 == instance)?;
            Some((*id, *number))
        })
    }

    fn end(&mut self, vm: u32, number: u8, event: Event) {
        if let Some(vm) = self.vms.get_mut(&vm) {
            vm.end(number, event);
        }
    }

    /// Stops a channel that has ended.
    fn freeze(&mut self, vm: u32, number: u8) -> Result<(), Failure> {
        let vm = self.vms.get_mut(&vm);
        match vm.and_then(|vm| vm.channels.get_mut(&number)) {
            Some(channel) => channel.freeze(&mut self.gpu).map(drop),
            None => Ok(()),
        }
    }

    /// Reports failed commands to the owners of their channels.
    fn command_errors(&mut self) -> Result<(), Failure> {
        let units = self.gpu.register(0x00_25a0)?;
        for unit in (0..3_u32).filter(|unit| units & 1 << unit != 0) {
            let base = 0x04_0000 + unit * 0x2000;
            let status = self.gpu.register(base + 0x108)?;
            let method = self.gpu.register(base + 0xc0)?;
            let data = self.gpu.register(base + 0xc4)?;
            let physical = self.gpu.register(base + 0x120)? & 0x7f;
            // This lets all channels that stopped for an error continue. Their drivers are told, but need not do
            // anything.
            self.gpu.set(base + 0x108, status)?;
            let owner = self.owners.get(physical as usize).copied().flatten();
            let Some((id, number)) = owner else {
                continue;
            };
            let event = Event::Command {
                channel: number,
                status,
                method,
                data,
            };
            let Some(vm) = self.vms.get_mut(&id) else {
                continue;
            };
            let Some(channel) = vm.channels.get_mut(&number) else {
                continue;
            };
            channel.errors += 1;
            if channel.errors < MOST_ERRORS {
                vm.events.push_back(event);
            } else if !channel.ended {
                warn!("virtual machine {id}: channel {number} makes errors only, and ends");
                let after = Duration::ZERO;
                let channel = number;
                self.end(id, number, Event::Late { channel, after });
                self.freeze(id, number)?;
            }
        }
        Ok(())
    }

    /// Collects completions, ends channels that exceed the limit, and gives turns. Returns the maximum time until it
    /// must be called again.
    pub fn tick(&mut self, now: Moment) -> Result<Option<Duration>, Failure> {
        self.collect(now)?;
        self.follow_leaving()?;
        let mut again = None;
        loop {
            let Some(turn) = self.turn else {
                match self.scheduler.dispatch(now) {
                    Dispatch::Grant(grant) => {
                        // Others have nothing to do, or have been stopped, unless they lie about what is done.
                        let others = self.vms.iter_mut();
                        for (_, vm) in others.filter(|(id, _)| **id != grant.client.0) {
                            vm.stop(&mut self.gpu)?;
                        }
                        self.gpu.leaving()?;
                        self.turn = Some(Turn {
                            vm: grant.client.0,
                            slice: self.lengths.quantum.map_or(grant.slice, Slice::Time),
                            since: now,
                            launched: 0,
                            completed: 0,
                            ending: false,
                        });
                        continue;
                    }
                    Dispatch::At(at) => {
                        again = Some(at.since(now));
                        break;
                    }
                    Dispatch::Nothing => break,
                }
            };
            if !self.advance(turn, now)? {
                break;
            }
        }
        if let Some(turn) = self.turn {
            again = Some(again.unwrap_or(LOOK).min(LOOK));
            if self.scheduler.contended() {
                again = Some(turn.again(self.lengths.grace, now).min(GRACE));
            }
        }
        if self.gpu.has_leaving() {
            again = Some(again.unwrap_or(LEAVING).min(LEAVING));
        }
        Ok(again)
    }

    /// Aborts the command that keeps channels from leaving the engines, if it takes too long, and tells fronts that wait.
    fn follow_leaving(&mut self) -> Result<(), Failure> {
        if let Some((physical, after)) = self.gpu.leaving()?
            && let Some((id, number)) = self.owners[usize::from(physical)]
            && let Some(vm) = self.vms.get_mut(&id)
            && let Some(channel) = vm.channels.get(&number)
        {
            let patience = match channel {
                its if its.ended || its.stopped => SHORT,
                _ if self.turn.is_some_and(|turn| turn.vm != id) => SHORT,
                _ if vm.held => PAUSING,
                its => self.limit.saturating_sub(its.busy),
            };
            if after > patience {
                let after = channel.busy + after;
                warn!(
                    "virtual machine {id}: a command of channel {number} does not end, and is lost"
                );
                let channel = number;
                vm.end(number, Event::Late { channel, after });
                self.gpu.reset_engine_of(physical)?;
            }
        }
        for vm in self.vms.values_mut() {
            vm.answer(&self.gpu, &self.reserve);
        }
        Ok(())
    }

    /// Advances a turn. Returns whether it has ended.
    fn advance(&mut self, mut turn: Turn, now: Moment) -> Result<bool, Failure> {
        let contended = self.scheduler.contended();
        let id = ClientId(turn.vm);
        let Some(vm) = self.vms.get(&turn.vm) else {
            self.turn = None;
            return Ok(true);
        };
        let active = vm.is_active();
        let mut over = turn.ending || contended && turn.is_over(now);
        if over && active && !turn.ending && self.goes_on(now) {
            turn.since = now;
            over = false;
        }
        if active && !over {
            let mut others = self.vms.iter().filter(|(id, _)| **id != turn.vm);
            if self.gpu.has_leaving() && others.any(|(_, vm)| vm.is_leaving(&self.gpu)) {
                return Ok(false);
            }
            let one = contended && turn.slice == Slice::Request;
            self.launch(&mut turn, one)?;
            self.turn = Some(turn);
            return Ok(false);
        }
        let Some(vm) = self.vms.get_mut(&turn.vm) else {
            return Ok(true);
        };
        if !turn.ending {
            if vm.is_flying() && turn.overtime(now) < self.lengths.grace && active {
                return Ok(false);
            }
            if vm.is_flying() {
                vm.stop(&mut self.gpu)?;
                self.gpu.leaving()?;
            }
            turn.ending = true;
            self.turn = Some(turn);
        }
        if vm.is_leaving(&self.gpu) {
            return Ok(false);
        }
        let held = self.scheduler.held(now);
        self.scheduler.charge(held.min(MOST_COUNTED), 0, now);
        self.scheduler.done(now);
        self.turn = None;
        if active {
            self.scheduler.want(id, now);
        }
        Ok(true)
    }

    /// Whether the holder of the GPU would also get the next turn.
    fn goes_on(&mut self, now: Moment) -> bool {
        let held = self.scheduler.held(now);
        self.scheduler.charge(held.min(MOST_COUNTED), 0, now);
        self.scheduler.goes_on(now)
    }

    fn collect(&mut self, now: Moment) -> Result<(), Failure> {
        let passed = now.since(self.looked).min(MOST_COUNTED);
        self.looked = now;
        let Some(turn) = &mut self.turn else {
            return Ok(());
        };
        let id = turn.vm;
        let Some(vm) = self.vms.get_mut(&id) else {
            return Ok(());
        };
        let mut late = Vec::new();
        for (number, channel) in &mut vm.channels {
            if !channel.is_flying() {
                continue;
            }
            if channel.runs() {
                channel.busy += passed;
                channel.held += passed;
            }
            let count = channel.completed(&self.reserve);
            for _ in 0..count {
                vm.events.push_back(Event::Done { channel: *number });
            }
            vm.figures.submissions += count as u64;
            turn.completed += count as u32;
            if channel.is_flying() && channel.busy > self.limit {
                late.push((*number, channel.busy));
            }
        }
        for (channel, after) in late {
            warn!(
                "virtual machine {id}: channel {channel} has had the GPU for {after:?}, and ends"
            );
            self.end(id, channel, Event::Late { channel, after });
            self.freeze(id, channel)?;
        }
        Ok(())
    }
}
