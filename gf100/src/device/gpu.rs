//! The GPU: registers in front of engines and memories.

use std::{fs::File, io, ops::Range, sync::Arc};

use log::{debug, warn};

use super::{
    bars::{Mapped, View},
    fifo::{Event, Fifo, Left},
    mapping::memory_file,
    mmu::{BadAddress, Memory, PhysicalAddress},
    ram::Ram,
    tlb::Flushes,
    vram::BackError,
};
use crate::{
    format::{Target, userd::Window},
    registers::{
        Bar, CHANNELS, ChannelEntry, Effects, Engine, Fault, Flush, Registers, RunList,
        interrupts::unit,
    },
};

/// Minimum and maximum size of VRAM in bytes: the least that nouveau starts with, and the most that
/// its addresses reach.
pub const VRAM_BYTES: std::ops::RangeInclusive<u64> = 64 << 20..=32 << 30;

/// An address beyond all VRAM.
const NOWHERE: u64 = 1 << 60;

/// A flush of all translations.
const ALL: Flush = Flush {
    directory: None,
    hub_only: false,
};

/// Interval in nanoseconds at which a semaphore that a channel waits for is polled.
const POLL: u64 = 1_000_000;

/// How long requests take, in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub struct Delays {
    /// A flush of translations.
    pub flush: u64,
    /// A new run list.
    pub run_list: u64,
}

/// These are assumptions: no document tells the hardware's times.
impl Default for Delays {
    fn default() -> Self {
        Self {
            flush: 5_000,
            run_list: 10_000,
        }
    }
}

/// When there is more work.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Next {
    /// Now.
    Now,
    /// At this time, in nanoseconds.
    At(u64),
    /// When something is written.
    Never,
}

/// The GPU.
pub struct Gpu {
    registers: Registers,
    engines: Engines,
}

struct Engines {
    memory: Memory,
    fifo: Fifo,
    bar1: View,
    bar3: View,
    mapped: Option<Mapped>,
    window: Option<Window>,
    /// The address in VRAM that BAR 0's window shows.
    base: u64,
    flushes: Flushes,
    /// The run list that has not taken effect yet, and when it will.
    run_list: Option<(RunList, u64)>,
    delays: Delays,
    /// Current time in nanoseconds.
    now: u64,
}

impl Gpu {
    /// Creates a GPU after power-on, with this many bytes of VRAM (whole MiB). With `map`, BAR 3
    /// and BAR 0's window are files that clients map.
    pub fn new(vram: u64, map: bool, delays: Delays, now: u64) -> io::Result<Self> {
        let memory = Memory::new(vram)?;
        Ok(Self {
            registers: Registers::new(vram, now),
            engines: Engines {
                memory,
                fifo: Fifo::new(vram),
                bar1: View::default(),
                bar3: View::default(),
                mapped: map.then(Mapped::new).transpose()?,
                window: None,
                base: 0,
                flushes: Flushes::new(delays.flush),
                run_list: None,
                delays,
                now,
            },
        })
    }

    /// Resets everything but memory: VRAM keeps its contents, and lent memory stays lent.
    pub fn reset(&mut self, now: u64) {
        let engines = &mut self.engines;
        self.registers = Registers::new(engines.memory.vram.len(), now);
        engines.fifo = Fifo::new(engines.memory.vram.len());
        engines.bar1 = View::default();
        engines.bar3 = View::default();
        engines.window = None;
        engines.base = 0;
        engines.flushes = Flushes::new(engines.delays.flush);
        engines.run_list = None;
        engines.memory.forget(&[ALL]);
        engines.follow();
    }

    /// The file of BAR 3, if it has one.
    pub fn bar3_file(&self) -> Option<&File> {
        self.engines.mapped.as_ref().map(Mapped::bar3_file)
    }

    /// The file of BAR 0's window, at its offset in BAR 0, if it has one.
    pub fn window_file(&self) -> Option<&File> {
        self.engines.mapped.as_ref().map(Mapped::window_file)
    }

    /// System memory that is lent to the GPU.
    pub fn ram(&mut self) -> &mut Ram {
        &mut self.engines.memory.ram
    }

    /// Backs a range of VRAM by the bytes of a file from `offset`, until [`Self::unback`]. Pages
    /// that BAR 3 or the window shows as files have their bytes in those files, not in this one, so
    /// whoever backs VRAM must use a GPU without `map`.
    pub fn back(
        &mut self,
        range: Range<u64>,
        file: Arc<File>,
        offset: u64,
    ) -> Result<(), BackError> {
        self.engines.show_nothing();
        let backed = self.engines.memory.vram.back(range, file, offset);
        self.engines.follow();
        backed
    }

    /// Backs a range of VRAM by new, zeroed memory.
    pub fn unback(&mut self, range: Range<u64>) -> Result<(), BackError> {
        let len = range.end.saturating_sub(range.start);
        let new = memory_file(c"gf100-vram", len)
            .map_err(|source| BackError::Map(range.clone(), source))?;
        self.back(range, Arc::new(new), 0)
    }

    /// Reads bytes of VRAM. Returns whether all of them exist.
    pub fn read_vram(&self, at: u64, data: &mut [u8]) -> bool {
        self.engines.memory.vram.read(at, data)
    }

    /// Writes bytes of VRAM. Returns whether all of them fit.
    pub fn write_vram(&mut self, at: u64, data: &[u8]) -> bool {
        self.engines.memory.vram.write(at, data)
    }

    /// Reads the register at `at`.
    pub fn read_register(&mut self, at: u32, now: u64) -> u32 {
        self.catch_up(now);
        self.registers.read(at, now, &mut self.engines)
    }

    /// Writes the register at `at`.
    pub fn write_register(&mut self, at: u32, value: u32, now: u64) {
        self.catch_up(now);
        self.registers.write(at, value, now, &mut self.engines);
        self.report();
    }

    /// Reads through a BAR; returns all ones where it maps nothing.
    pub fn read_bar(&mut self, bar: Bar, at: u64, data: &mut [u8], now: u64) {
        self.catch_up(now);
        let engines = &self.engines;
        let (view, unit) = engines.view(bar);
        if let Err(bad) = view.read(&engines.memory, at, data) {
            data.fill(0xff);
            self.bar_fault(bar, unit, bad);
        }
    }

    /// Writes through a BAR; the write is dropped where it maps nothing. Returns whether this was a
    /// submission to a channel.
    pub fn write_bar(&mut self, bar: Bar, at: u64, data: &[u8], now: u64) -> bool {
        self.catch_up(now);
        let engines = &mut self.engines;
        let (view, unit) = engines.view(bar);
        if let Err(bad) = view.write(&engines.memory, at, data) {
            self.bar_fault(bar, unit, bad);
            return false;
        }
        let window = engines.window.filter(|_| bar == Bar::One);
        let doorbell = window.and_then(|window| window.doorbell(at, data, CHANNELS));
        if let Some((channel, put)) = doorbell {
            engines.fifo.submit(channel, put, &engines.memory);
            self.report();
        }
        doorbell.is_some()
    }

    fn bar_fault(&mut self, bar: Bar, unit: u8, bad: BadAddress) {
        debug!("BAR {bar:?}: {bad:x?}");
        self.registers.interrupts.fault(Fault {
            unit,
            instance: 0,
            address: bad.address,
            write: bad.access == super::mmu::Access::Write,
            reason: bad.reason,
        });
    }

    /// Runs one slice of work.
    pub fn work(&mut self, now: u64) -> Next {
        self.catch_up(now);
        let engines = &mut self.engines;
        let left = engines.fifo.run(&engines.memory, now);
        let poll = (left == Left::Waiting).then_some(now + POLL);
        let list = engines.run_list.map(|(_, end)| end);
        self.report();
        let events = [poll, list, self.registers.next_alarm()];
        match (left, events.into_iter().flatten().min()) {
            (Left::More, _) => Next::Now,
            (_, Some(at)) => Next::At(at),
            (_, None) => Next::Never,
        }
    }

    /// Does what requests have come to by now.
    fn catch_up(&mut self, now: u64) {
        self.engines.now = now;
        self.engines.finish_flushes();
        if self.engines.finish_run_list() {
            self.registers.run_list_done();
        }
    }

    /// Whether the interrupt line is asserted.
    pub fn line(&mut self, now: u64) -> bool {
        self.registers.line(now)
    }

    /// Reports the events of channels to the registers.
    fn report(&mut self) {
        for event in self.engines.fifo.events.drain(..) {
            match event {
                Event::Fault(fault) => self.registers.interrupts.fault(fault),
                Event::Command(error) => self.registers.interrupts.command_error(error),
                Event::NonStall => self.registers.interrupts.non_stall(0),
            }
        }
    }
}

impl Engines {
    fn view(&self, bar: Bar) -> (View, u8) {
        match bar {
            Bar::One => (self.bar1, unit::BAR1),
            Bar::Three => (self.bar3, unit::BAR3),
        }
    }

    fn finish_flushes(&mut self) {
        let finished = self.flushes.finished(self.now);
        if finished.is_empty() {
            return;
        }
        self.memory.forget(&finished);
        let directory = self.bar3.directory();
        let covers = |flush: &Flush| flush.directory.is_none() || flush.directory == directory;
        if directory.is_some() && finished.iter().any(covers) {
            self.follow();
        }
    }

    /// Returns whether a new run list has taken effect.
    fn finish_run_list(&mut self) -> bool {
        let is_over = |(_, end): &mut (RunList, u64)| *end <= self.now;
        match self.run_list.take_if(is_over) {
            Some((list, _)) => {
                self.fifo.list(list, &self.memory);
                true
            }
            None => false,
        }
    }

    /// Makes the files show nothing.
    fn show_nothing(&mut self) {
        if let Some(mapped) = &mut self.mapped {
            mapped.follow(View::default(), NOWHERE, &mut self.memory);
        }
    }

    /// Makes the files follow BAR 3's page table and the window's base.
    fn follow(&mut self) {
        if let Some(mapped) = &mut self.mapped {
            mapped.follow(self.bar3, self.base, &mut self.memory);
        }
    }
}

impl Effects for Engines {
    fn window_read(&mut self, at: u64) -> u32 {
        let mut bytes = [0xff; 4];
        if !self.memory.read(PhysicalAddress::Vram(at), &mut bytes) {
            bytes = [0xff; 4];
        }
        u32::from_le_bytes(bytes)
    }

    fn window_write(&mut self, at: u64, value: u32) {
        self.memory
            .write(PhysicalAddress::Vram(at), &value.to_le_bytes());
    }

    fn window_base(&mut self, at: u64) {
        self.base = at;
        self.follow();
    }

    fn bar(&mut self, bar: Bar, instance: Option<Target>) {
        match bar {
            Bar::One => self.bar1.bind(instance, &self.memory),
            Bar::Three => {
                self.bar3.bind(instance, &self.memory);
                self.follow();
            }
        }
    }

    fn flush(&mut self, flush: Flush) {
        if !self.flushes.request(flush, self.now) {
            warn!("a flush of translations is lost: the queue of flushes is full");
        }
    }

    fn pending_flushes(&self) -> u8 {
        self.flushes.pending()
    }

    fn bar_flush(&mut self) {}

    fn user_window(&mut self, window: Option<Window>) {
        self.window = window;
    }

    fn channel(&mut self, channel: u8, entry: ChannelEntry) {
        self.fifo.entry(channel, entry, &self.memory);
    }

    fn run_list(&mut self, list: RunList) {
        if self.run_list.is_some() {
            warn!("a run list is lost: an earlier one has not taken effect yet");
            return;
        }
        // It is read at the end, so its memory must stay as it is until then.
        self.run_list = Some((list, self.now.saturating_add(self.delays.run_list)));
    }

    fn has_pending_run_list(&self) -> bool {
        self.run_list.is_some()
    }

    fn kick(&mut self, channel: u8) {
        self.fifo.kick(channel, &self.memory);
    }

    fn is_kicking(&self) -> bool {
        self.fifo.is_kicking()
    }

    fn channel_on(&self, engine: Engine) -> Option<u8> {
        self.fifo.channel_on(engine)
    }

    fn engine_off(&mut self, engine: Engine) {
        self.fifo.reset(engine, &self.memory);
    }

    fn command_error_seen(&mut self) {
        self.fifo.command_error_seen();
    }
}
