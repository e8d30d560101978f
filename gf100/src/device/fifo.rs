//! Channels: rings of push buffers, the run list, and the interpreter of their methods.
//!
//! A channel's state is read from its instance block when it first runs and after each kick. What
//! the CPU may look at (the progress of the channel) is written back.
//!
//! An engine executes one command at a time, and nothing but its reset stops it inside: a channel
//! that is disabled, leaves the run list or is kicked leaves its engine when its command is over.

use std::collections::VecDeque;

use log::{debug, warn};

use super::{
    compute,
    copy::{self, Copy, Release},
    graphics,
    host::{self, Acquire, Host},
    kept::{Kept, Name},
    m2mf::{self, Inline},
    mmu::{Access, BadAddress, Memory, PhysicalAddress},
    tlb::User,
};
use crate::{
    format::{
        PAGE_SHIFT, Target,
        instance::{self, InstanceBlock, Space},
        push::{Decoder, ENTRY_BYTES, GpEntry, Method, Word},
        ramfc::{self, Ramfc},
        userd,
    },
    registers::{
        CHANNELS, ChannelEntry, Engine, Fault, RunList,
        interrupts::{CommandError, unit},
    },
};

/// Cost limit of one slice of a channel's work: a thousand methods, or copies of 256 KiB. This also
/// limits how long the CPU waits for registers: about a millisecond on an emulated processor.
const SLICE: u32 = 1 << 10;
/// Cost of fetching a ring entry.
const ENTRY_COST: u32 = 16;
/// Cost of binding an object.
const OBJECT_COST: u32 = 64;
/// Number of push buffer words that are fetched at once.
const FETCH: usize = 256;
/// Methods below this are host methods, which every channel has.
const HOST_METHODS: u16 = 0x100;

/// The class does not have this method, or does not accept this word for it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Refused;

/// The remaining budget of a slice.
#[derive(Debug)]
pub struct Budget(u32);

impl Budget {
    /// Creates a budget of this cost.
    pub fn new(cost: u32) -> Self {
        Self(cost)
    }

    /// Spends a cost. Returns false if nothing was left. The last cost may exceed the budget.
    pub fn spend(&mut self, cost: u32) -> bool {
        if self.0 == 0 {
            return false;
        }
        self.0 = self.0.saturating_sub(cost);
        true
    }
}

/// The last words that were written to an object's methods.
pub struct Registers(Box<[u32; 0x1000]>);

impl Registers {
    fn new() -> Self {
        Self(Box::new([0; 0x1000]))
    }

    /// Returns the last word, initially 0. `at` is a multiple of 4 below 0x4000.
    pub fn get(&self, at: u16) -> u32 {
        self.0[usize::from(at / 4) & 0xfff]
    }

    fn set(&mut self, at: u16, word: u32) {
        self.0[usize::from(at / 4) & 0xfff] = word;
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Class {
    Copy0,
    Copy1,
    MemoryToMemory,
    Graphics(graphics::Kind),
    /// The driver's own class: it is notified by an interrupt.
    Software,
}

impl Class {
    fn new(id: u32) -> Self {
        match id & 0xffff {
            0x90b5 => Self::Copy0,
            0x90b8 => Self::Copy1,
            0x9039 => Self::MemoryToMemory,
            0x9097 => Self::Graphics(graphics::Kind::Draw),
            0x90c0 => Self::Graphics(graphics::Kind::Compute),
            _ => Self::Software,
        }
    }

    /// The number of the unit in fault registers.
    fn unit(self) -> u8 {
        match self {
            Self::Copy0 => unit::COPY0,
            Self::Copy1 => unit::COPY1,
            Self::MemoryToMemory | Self::Graphics(_) => unit::GRAPHICS,
            Self::Software => unit::FIFO,
        }
    }
}

struct Object {
    class: Class,
    registers: Registers,
    compute: compute::State,
}

/// What the channel is currently doing.
enum Work {
    None,
    Copy {
        copy: Copy,
        unit: u8,
        interrupt: bool,
    },
    Wait(Acquire),
    /// Runs a kernel, for the object on a subchannel.
    Kernel(Box<compute::Launch>, u8),
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Status {
    /// The channel continues when it may run.
    Ready,
    /// Stopped until the driver has acknowledged the failed command.
    Stopped,
    /// Stopped for good.
    Faulted,
}

/// A channel whose instance block has been read.
struct Context {
    /// Identifies it among the contexts of this FIFO.
    id: u64,
    block: InstanceBlock,
    ramfc: Ramfc,
    entries: u32,
    /// The rest of the current push buffer: address of the next word, and number of words.
    segment: (u64, u32),
    fetched: VecDeque<u32>,
    decoder: Decoder,
    objects: [Option<Object>; 8],
    inline: Option<Inline>,
    host: Host,
    work: Work,
    status: Status,
    /// The state in memory is newer: read it again before the channel runs.
    stale: bool,
    /// The name in its instance block; none before it has left the engines.
    name: Name,
}

#[derive(Default)]
struct Channel {
    entry: ChannelEntry,
    listed: bool,
    context: Option<Box<Context>>,
}

/// The context whose command each engine is executing, if any.
#[derive(Default)]
struct Engines {
    holders: [Option<u64>; Engine::ALL.len()],
    /// Whether a context has not got its engine since this was last looked at.
    is_wanted: bool,
}

impl Engines {
    /// Gives the context the engine that its current command needs, if any. Returns false if
    /// another context has it.
    fn enter(&mut self, context: &Context) -> bool {
        let Some(engine) = context.engine() else {
            return true;
        };
        let has = *self.holders[engine as usize].get_or_insert(context.id) == context.id;
        self.is_wanted |= !has;
        has
    }

    fn leave(&mut self, context: &Context) {
        for holder in &mut self.holders {
            holder.take_if(|holder| *holder == context.id);
        }
    }

    /// Whether the context is inside a command.
    fn has(&self, context: &Context) -> bool {
        self.holders.contains(&Some(context.id))
    }
}

/// A context without a channel: when its command is over, it is dropped.
struct Orphan {
    channel: u8,
    instance: Target,
    context: Box<Context>,
}

/// An event that is visible outside.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Event {
    /// An address could not be used. The channel has ended.
    Fault(Fault),
    /// A command failed. The channel has stopped.
    Command(CommandError),
    /// A non-stall interrupt.
    NonStall,
}

/// What is left to do after a slice.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Left {
    /// Nothing, until something is submitted.
    Nothing,
    /// A channel is waiting for a semaphore.
    Waiting,
    /// There is more work.
    More,
}

/// All channels.
pub struct Fifo {
    channels: Vec<Channel>,
    /// The channel that ran last.
    last: usize,
    /// Contexts of channels that are not in the channel table.
    kept: Kept<Box<Context>>,
    next_id: u64,
    /// The contexts whose commands the engines are executing.
    engines: Engines,
    /// Contexts inside a command, whose channels have been removed from the channel table.
    orphans: VecDeque<Orphan>,
    /// The channel that is being kicked.
    kicked: Option<u8>,
    /// Events for the caller to take.
    pub events: Vec<Event>,
}

impl Fifo {
    /// Creates a FIFO without channels, for a GPU with this many bytes of VRAM.
    pub fn new(vram: u64) -> Self {
        Self {
            channels: (0..CHANNELS).map(|_| Channel::default()).collect(),
            last: 0,
            kept: Kept::new(vram),
            next_id: 0,
            engines: Engines::default(),
            orphans: VecDeque::new(),
            kicked: None,
            events: Vec::new(),
        }
    }

    /// Handles a write of a channel table entry. A context that has left the engines is kept until
    /// its instance block is in the table again. One that is inside a command goes on with that.
    pub fn entry(&mut self, number: u8, entry: ChannelEntry, memory: &Memory) {
        let Some(channel) = self.channels.get_mut(usize::from(number)) else {
            return;
        };
        let old = std::mem::replace(&mut channel.entry, entry);
        if old.instance == entry.instance {
            return;
        }
        if let Some(context) = channel.context.take()
            && let Some(instance) = old.instance
        {
            if self.engines.has(&context) {
                warn!("channel {number} is removed inside a command");
                self.orphans.push_back(Orphan {
                    channel: number,
                    instance,
                    context,
                });
            } else if context.stale && context.status != Status::Faulted {
                self.kept.keep(context.name, instance, context, memory);
            }
        }
        let instance = entry.instance;
        channel.context = instance.and_then(|instance| self.kept.take(instance, memory));
        self.finish_kick(memory);
    }

    /// Handles a new run list.
    pub fn list(&mut self, list: RunList, memory: &Memory) {
        for channel in &mut self.channels {
            channel.listed = false;
        }
        let first = PhysicalAddress::of(list.at);
        for index in 0..u64::from(list.count) {
            let Some(word) = memory.word(first.after(index * 8)) else {
                warn!("the run list at {:?} goes beyond memory", list.at);
                return;
            };
            let channel = self.channels.get_mut(word as u32 as usize);
            if let Some(channel) = channel {
                channel.listed = true;
            }
        }
    }

    /// Handles a submission of ring entries up to `put`.
    pub fn submit(&mut self, channel: u8, put: u32, memory: &Memory) {
        let index = usize::from(channel);
        if !self.load(index, memory) {
            debug!("channel {channel} is off, and was submitted to");
            return;
        }
        let Some(context) = self.channels[index].context.as_mut() else {
            return;
        };
        if put >= context.entries {
            context.status = Status::Stopped;
            self.events.push(Event::Command(CommandError {
                channel,
                status: CommandError::POINTER,
                method: (0, 0),
                data: put,
            }));
            return;
        }
        context.ramfc.gp_put = put;
    }

    /// Handles a kick: the channel leaves the engines when its current command is over. Its
    /// instance block then contains the state that the driver may look at.
    pub fn kick(&mut self, channel: u8, memory: &Memory) {
        if self.kicked.is_some() {
            warn!("a kick of channel {channel} is lost: an earlier one is not over");
            return;
        }
        self.kicked = Some(channel);
        self.finish_kick(memory);
    }

    /// Whether a channel is being kicked.
    pub fn is_kicking(&self) -> bool {
        self.kicked.is_some()
    }

    /// Completes the kick if its channel is not inside a command.
    fn finish_kick(&mut self, memory: &Memory) {
        let Some(channel) = self.kicked else { return };
        let channel = self.channels.get_mut(usize::from(channel));
        let context = channel.and_then(|its| Some((its.entry.instance?, its.context.as_mut()?)));
        let Some((instance, context)) = context else {
            self.kicked = None;
            return;
        };
        if self.engines.has(context) {
            return;
        }
        self.kicked = None;
        let mut block = [0; ramfc::BYTES];
        let place = PhysicalAddress::of(instance);
        if memory.read(place, &mut block) {
            context.ramfc.get = context.segment.0;
            context.ramfc.encode(&mut block);
            memory.write(place, &block);
        }
        context.name = self.kept.name(instance, memory);
        context.stale = true;
    }

    /// The channel whose command an engine is executing.
    pub fn channel_on(&self, engine: Engine) -> Option<u8> {
        let id = self.engines.holders[engine as usize]?;
        let mut channels = (0_u8..).zip(&self.channels);
        let channel = channels.find_map(|(number, channel)| {
            let context = channel.context.as_ref()?;
            (context.id == id).then_some(number)
        });
        let mut orphans = self.orphans.iter();
        channel.or_else(|| Some(orphans.find(|orphan| orphan.context.id == id)?.channel))
    }

    /// Resets an engine: the channel whose command it is executing ends.
    pub fn reset(&mut self, engine: Engine, memory: &Memory) {
        let Some(id) = self.engines.holders[engine as usize].take() else {
            return;
        };
        self.orphans.retain(|orphan| orphan.context.id != id);
        let contexts = self.channels.iter_mut();
        let mut contexts = contexts.filter_map(|channel| channel.context.as_mut());
        if let Some(context) = contexts.find(|context| context.id == id) {
            context.work = Work::None;
            context.status = Status::Faulted;
        }
        self.finish_kick(memory);
    }

    /// The driver has acknowledged failed commands, so their channels continue.
    pub fn command_error_seen(&mut self) {
        let contexts = self.channels.iter_mut();
        for context in contexts.filter_map(|channel| channel.context.as_mut()) {
            if context.status == Status::Stopped {
                context.status = Status::Ready;
            }
        }
    }

    /// Reads a channel's instance block if needed. Returns whether the channel has one.
    fn load(&mut self, index: usize, memory: &Memory) -> bool {
        let Some(channel) = self.channels.get_mut(index) else {
            return false;
        };
        let Some(instance) = channel.entry.instance else {
            return false;
        };
        if channel
            .context
            .as_ref()
            .is_some_and(|context| !context.stale)
        {
            return true;
        }
        let mut bytes = [0; instance::BYTES];
        let mut head = [0; ramfc::BYTES];
        if !memory.read(PhysicalAddress::of(instance), &mut bytes) {
            warn!("channel {index}'s instance block {instance:?} is outside of memory");
            return false;
        }
        head.copy_from_slice(&bytes[..ramfc::BYTES]);
        let mut ramfc = Ramfc::parse(&head);
        let (Some(block), Some(entries)) = (InstanceBlock::parse(&bytes), ramfc.entries()) else {
            warn!("channel {index}'s instance block {instance:?} makes no sense");
            return false;
        };
        // The number of entries is a power of two. Without masking, GET could never reach PUT.
        ramfc.gp_get &= entries - 1;
        ramfc.gp_put &= entries - 1;
        match channel.context.as_mut() {
            // State that the engines keep is preserved.
            Some(context) => {
                context.block = block;
                context.entries = entries;
                context.ramfc = ramfc;
                context.stale = false;
            }
            None => {
                self.next_id += 1;
                channel.context = Some(Box::new(Context {
                    id: self.next_id,
                    block,
                    ramfc,
                    entries,
                    segment: (0, 0),
                    fetched: VecDeque::new(),
                    decoder: Decoder::default(),
                    objects: [const { None }; 8],
                    inline: None,
                    host: Host::default(),
                    work: Work::None,
                    status: Status::Ready,
                    stale: false,
                    name: Name::default(),
                }));
            }
        }
        true
    }

    /// Runs one channel for one slice. `now` is in nanoseconds.
    pub fn run(&mut self, memory: &Memory, now: u64) -> Left {
        let mut waiting = false;
        let count = self.channels.len();
        for step in 1..=count {
            let index = (self.last + step) % count;
            let channel = &self.channels[index];
            let Some(context) = &channel.context else {
                continue;
            };
            // Less than 128.
            let number = index as u8;
            let may_begin = channel.entry.enabled && channel.listed && self.kicked != Some(number);
            if !(may_begin || self.engines.has(context)) || !self.load(index, memory) {
                continue;
            }
            let channel = &mut self.channels[index];
            let (Some(context), Some(instance)) =
                (channel.context.as_mut(), channel.entry.instance)
            else {
                continue;
            };
            match context.can_run(memory) {
                Ok(Left::Nothing) => continue,
                Ok(Left::Waiting) => {
                    waiting = true;
                    continue;
                }
                // If another one has the engine, that one runs.
                Ok(Left::More) if !self.engines.enter(context) => continue,
                Ok(Left::More) => {
                    let run = Run {
                        channel: number,
                        context,
                        memory,
                        now,
                        budget: Budget::new(SLICE),
                        engines: &mut self.engines,
                        may_begin,
                        events: &mut self.events,
                    };
                    run.slice(instance);
                }
                Err(bad) => {
                    context.fault(bad, unit::FIFO, instance, &mut self.events);
                }
            }
            self.finish_kick(memory);
            self.last = index;
            self.run_orphan(memory, now);
            return Left::More;
        }
        match (self.run_orphan(memory, now), waiting) {
            (true, _) => Left::More,
            (false, true) => Left::Waiting,
            (false, false) => Left::Nothing,
        }
    }

    /// Runs an orphan for one slice. Returns whether there was one.
    fn run_orphan(&mut self, memory: &Memory, now: u64) -> bool {
        let Some(mut orphan) = self.orphans.pop_front() else {
            return false;
        };
        let run = Run {
            channel: orphan.channel,
            context: &mut orphan.context,
            memory,
            now,
            budget: Budget::new(SLICE),
            engines: &mut self.engines,
            may_begin: false,
            events: &mut self.events,
        };
        run.slice(orphan.instance);
        if self.engines.has(&orphan.context) {
            self.orphans.push_back(orphan);
        }
        true
    }
}

impl Context {
    fn space(&self) -> Space {
        self.block.space
    }

    /// The engine that its current command needs.
    fn engine(&self) -> Option<Engine> {
        match self.work {
            Work::None | Work::Wait(_) => None,
            Work::Copy { unit, .. } => match unit {
                unit::COPY0 => Some(Engine::Copy0),
                unit::COPY1 => Some(Engine::Copy1),
                _ => Some(Engine::Graphics),
            },
            Work::Kernel(..) => Some(Engine::Graphics),
        }
    }

    fn can_run(&mut self, memory: &Memory) -> Result<Left, BadAddress> {
        if self.status != Status::Ready {
            return Ok(Left::Nothing);
        }
        if let Work::Wait(acquire) = self.work {
            if !acquire.is_met(memory, self.space())? {
                return Ok(Left::Waiting);
            }
            self.work = Work::None;
        }
        let idle = matches!(self.work, Work::None)
            && self.segment.1 == 0
            && self.fetched.is_empty()
            && self.ramfc.gp_get == self.ramfc.gp_put;
        Ok(if idle { Left::Nothing } else { Left::More })
    }

    fn fault(&mut self, bad: BadAddress, unit: u8, instance: Target, events: &mut Vec<Event>) {
        self.status = Status::Faulted;
        events.push(Event::Fault(Fault {
            unit,
            instance: (instance.address() >> PAGE_SHIFT) as u32,
            address: bad.address,
            write: bad.access == Access::Write,
            reason: bad.reason,
        }));
    }

    /// Makes a word visible to the CPU. If the page does not exist, that is the driver's mistake.
    fn show(&self, memory: &Memory, at: u64, word: u32) {
        let place = PhysicalAddress::Vram(self.ramfc.userd + at);
        if !memory.write(place, &word.to_le_bytes()) {
            debug!("USERD at {:#x} is outside of VRAM", self.ramfc.userd);
        }
    }
}

/// Why a channel does not continue.
#[derive(Clone, Copy)]
enum Stop {
    Address(BadAddress, u8),
    Command(CommandError),
}

/// One slice of a channel's work.
struct Run<'a> {
    channel: u8,
    context: &'a mut Context,
    memory: &'a Memory,
    now: u64,
    budget: Budget,
    engines: &'a mut Engines,
    /// Whether it may begin another command.
    may_begin: bool,
    events: &'a mut Vec<Event>,
}

impl Run<'_> {
    fn slice(mut self, instance: Target) {
        let stop = self.go().err();
        if stop.is_some() || self.context.engine().is_none() {
            self.engines.leave(self.context);
        }
        if let Some(stop) = stop {
            self.stop(stop, instance);
        }
    }

    fn stop(self, stop: Stop, instance: Target) {
        match stop {
            Stop::Address(bad, unit) => {
                debug!("channel {}: {bad:x?} by unit {unit:#x}", self.channel);
                self.context.fault(bad, unit, instance, self.events);
            }
            Stop::Command(error) => {
                debug!("channel {}: {error:x?}", self.channel);
                self.context.status = Status::Stopped;
                self.events.push(Event::Command(error));
            }
        }
    }

    /// Runs until there is nothing left, the channel waits, or the budget is spent.
    fn go(&mut self) -> Result<(), Stop> {
        loop {
            if !self.engines.enter(self.context) || !self.advance()? {
                return Ok(());
            }
            self.engines.leave(self.context);
            // After a command, another channel may have the engine.
            if !self.may_begin || std::mem::take(&mut self.engines.is_wanted) {
                return Ok(());
            }
            let Some(word) = self.context.fetched.pop_front() else {
                if !self.fetch()? {
                    return Ok(());
                }
                continue;
            };
            if !self.budget.spend(1) {
                self.context.fetched.push_front(word);
                return Ok(());
            }
            match self.context.decoder.next(word) {
                Ok(Word::Header) => {}
                Ok(Word::End) => {
                    self.context.fetched.clear();
                    self.context.segment.1 = 0;
                    self.show_get();
                }
                Ok(Word::Method(method)) => self.method(method)?,
                Err(bad) => {
                    return Err(Stop::Command(CommandError {
                        channel: self.channel,
                        status: CommandError::ILLEGAL,
                        method: (0, 0),
                        data: bad.0,
                    }));
                }
            }
        }
    }

    /// Continues a long operation. Returns whether it is done.
    fn advance(&mut self) -> Result<bool, Stop> {
        let space = self.context.space();
        match &mut self.context.work {
            Work::None => Ok(true),
            Work::Wait(acquire) => {
                let met = acquire
                    .is_met(self.memory, space)
                    .map_err(|bad| Stop::Address(bad, unit::FIFO))?;
                if met {
                    self.context.work = Work::None;
                }
                Ok(met)
            }
            Work::Copy {
                copy,
                unit,
                interrupt,
            } => {
                let (unit, interrupt) = (*unit, *interrupt);
                let done = copy
                    .advance(self.memory, space, self.now, &mut self.budget)
                    .map_err(|bad| Stop::Address(bad, unit))?;
                if done {
                    self.context.work = Work::None;
                    if interrupt {
                        self.events.push(Event::NonStall);
                    }
                }
                Ok(done)
            }
            Work::Kernel(launch, subchannel) => {
                let subchannel = *subchannel;
                let stop = match launch.advance(self.memory, space, &mut self.budget) {
                    Ok(false) => return Ok(false),
                    Ok(true) => None,
                    Err(compute::Bad::Address(bad)) => Some(Stop::Address(bad, unit::GRAPHICS)),
                    Err(compute::Bad::Instruction(raw)) => Some(Stop::Command(CommandError {
                        channel: self.channel,
                        status: CommandError::ILLEGAL,
                        method: (subchannel, compute::LAUNCH),
                        // The half that contains the operation.
                        data: (raw >> 32) as u32,
                    })),
                };
                self.context.work = Work::None;
                stop.map_or(Ok(true), Err)
            }
        }
    }

    /// Fetches words of the push buffer, or the next ring entry. Returns whether there was
    /// anything.
    fn fetch(&mut self) -> Result<bool, Stop> {
        let space = self.context.space();
        let bad = |bad| Stop::Address(bad, unit::FIFO);
        let (address, words) = self.context.segment;
        if words > 0 {
            // At most FETCH.
            let count = (words as usize).min(FETCH);
            let mut bytes = [0; FETCH * 4];
            let bytes = &mut bytes[..count * 4];
            self.memory
                .read_at(User::Engine, space, address, bytes)
                .map_err(bad)?;
            let new = bytes
                .chunks_exact(4)
                .map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]));
            self.context.fetched.extend(new);
            self.context.segment = (address + count as u64 * 4, words - count as u32);
            if self.context.segment.1 == 0 {
                self.show_get();
            }
            return Ok(true);
        }
        let ramfc = &mut self.context.ramfc;
        if ramfc.gp_get == ramfc.gp_put || !self.budget.spend(ENTRY_COST) {
            return Ok(false);
        }
        let mut entry = [0; 8];
        let at = ramfc.gp_base + u64::from(ramfc.gp_get) * ENTRY_BYTES;
        // The ring may have shrunk since the index was checked.
        ramfc.gp_get = (ramfc.gp_get + 1) & (self.context.entries - 1);
        let gp_get = ramfc.gp_get;
        self.memory
            .read_at(User::Engine, space, at, &mut entry)
            .map_err(bad)?;
        let entry = GpEntry::parse(u64::from_le_bytes(entry));
        self.context.segment = (entry.address, entry.words);
        self.context.show(self.memory, userd::GP_GET, gp_get);
        Ok(true)
    }

    fn show_get(&self) {
        let get = self.context.segment.0;
        self.context
            .show(self.memory, userd::GET_HIGH, (get >> 32) as u32);
        self.context.show(self.memory, userd::GET, get as u32);
    }

    fn method(&mut self, method: Method) -> Result<(), Stop> {
        let error = |status| {
            Stop::Command(CommandError {
                channel: self.channel,
                status,
                method: (method.subchannel, method.address),
                data: method.data,
            })
        };
        let (illegal, empty) = (error(CommandError::ILLEGAL), error(CommandError::EMPTY));
        // Less than 8.
        let index = usize::from(method.subchannel & 7);
        if method.address == 0 {
            let class = Class::new(method.data);
            // This clears the object's registers. Overspending the budget by this cost is
            // negligible.
            self.budget.spend(OBJECT_COST);
            self.context.objects[index] = Some(Object {
                class,
                registers: Registers::new(),
                compute: compute::State::default(),
            });
            return match class {
                Class::Software => Err(empty),
                _ => Ok(()),
            };
        }
        if method.address < HOST_METHODS {
            return self.host(method);
        }
        let Some(object) = &mut self.context.objects[index] else {
            return Err(empty);
        };
        object.registers.set(method.address, method.data);
        let Object {
            class,
            registers,
            compute,
        } = object;
        let (class, registers) = (*class, &*registers);
        let unit = class.unit();
        let (address, data) = (method.address, method.data);
        match class {
            Class::Software => Err(empty),
            Class::Copy0 | Class::Copy1 => {
                let work = copy::method(registers, address, data);
                if let Some(copy) = work.map_err(|Refused| illegal)? {
                    self.context.work = Work::Copy {
                        copy,
                        unit,
                        interrupt: false,
                    };
                }
                Ok(())
            }
            Class::MemoryToMemory => {
                let work = m2mf::method(registers, address, data);
                match work.map_err(|Refused| illegal)? {
                    m2mf::Work::None => {}
                    m2mf::Work::Copy(copy, interrupt) => {
                        self.context.work = Work::Copy {
                            copy,
                            unit,
                            interrupt,
                        };
                    }
                    m2mf::Work::Inline(inline) => self.context.inline = Some(inline),
                    m2mf::Work::Data(bytes) => return self.inline(bytes),
                }
                Ok(())
            }
            Class::Graphics(kind) => {
                let work = match kind {
                    graphics::Kind::Compute => compute::method(compute, registers, address, data),
                    graphics::Kind::Draw => None,
                };
                match work.transpose().map_err(|Refused| illegal)? {
                    None => {}
                    Some(compute::Work::None) => return Ok(()),
                    Some(compute::Work::Constant { address, word }) => {
                        let release = Release {
                            address,
                            payload: word,
                            with_time: false,
                        };
                        return self.release(release, unit);
                    }
                    Some(compute::Work::Launch(launch)) => {
                        self.context.work = Work::Kernel(launch, method.subchannel);
                        return Ok(());
                    }
                }
                let work = graphics::method(kind, registers, address, data);
                match work.map_err(|Refused| illegal)? {
                    Some(release) => self.release(release, unit),
                    None => Ok(()),
                }
            }
        }
    }

    fn inline(&mut self, bytes: [u8; 4]) -> Result<(), Stop> {
        let space = self.context.space();
        if let Some(inline) = &mut self.context.inline {
            let done = inline
                .store(bytes, self.memory, space, self.now)
                .map_err(|bad| Stop::Address(bad, unit::GRAPHICS))?;
            if done {
                self.context.inline = None;
            }
        }
        Ok(())
    }

    fn release(&self, release: Release, unit: u8) -> Result<(), Stop> {
        release
            .write(self.memory, self.context.space(), self.now)
            .map_err(|bad| Stop::Address(bad, unit))
    }

    fn host(&mut self, method: Method) -> Result<(), Stop> {
        match self.context.host.method(method.address, method.data) {
            host::Work::None => {}
            host::Work::Acquire(acquire) => self.context.work = Work::Wait(acquire),
            host::Work::Release(release) => return self.release(release, unit::FIFO),
            host::Work::NonStall => self.events.push(Event::NonStall),
            host::Work::Reference(number) => {
                self.context.show(self.memory, userd::REFERENCE, number);
            }
        }
        Ok(())
    }
}
