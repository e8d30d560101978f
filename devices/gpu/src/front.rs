//! The registers and BARs that the guest accesses.

use std::{
    collections::VecDeque,
    io,
    os::fd::AsFd,
    sync::{Arc, MutexGuard},
    time::{Duration, Instant},
};

use device_model::{
    bus::BusDevice,
    fair_lock::FairLock,
    memory::{AddressSpace, GuestMemory},
};
use gf100::{
    format::{
        Gfn, PAGE, Target,
        instance::{BYTES, InstanceBlock},
        userd::Window,
    },
    recording::{Access, Place},
    registers::{
        self, Bar, CHANNELS, ChannelEntry, Effects, Flush, Registers, RunList, is_plain, is_quiet,
    },
};
use gpu_mediator::gpu::wire::{Event, Request};
use vm_memory::{
    Address, Bytes, GuestAddress, GuestAddressSpace, GuestMemoryBackend, GuestMemoryRegion,
};

use super::{
    Error, Options,
    channels::{Channel, Happening, World},
    counters::{self, Counters},
    deadline::Deadline,
    lines::Lines,
    link::{Again, Link, PATIENCE, Question, Receiver, Wanted},
    memory::Vram,
    mirror::Mirror,
    recorder::Recorder,
    tables::Tables,
    views::Views,
};

/// Offset of the window in BAR 0.
const WINDOW_START: u64 = 0x70_0000;
/// For how long work that a guest has caused may hold the lock at a time. The rest is left to
/// [`Front::work`], which holds it no longer at a time, so that a guest keeps neither its own vCPUs
/// nor the thread that owns the VM waiting.
const STEP: Duration = Duration::from_millis(2);
/// The same while accesses are recorded: nothing is left, so that what an access has caused is in
/// the recording before the access is.
const RECORDED_STEP: Duration = Duration::from_secs(3600);
/// Byte in the mirror of PCI configuration space that rearms the MSI.
const REARM: u64 = 0x08_8704;

/// Counters.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    reads: u64,
    writes: u64,
    bar_reads: u64,
    bar_writes: u64,
    doorbells: u64,
    flushes: u64,
    reconnections: u64,
}

/// State that register accesses change.
struct Engines {
    vram: Vram,
    ram: GuestMemory,
    link: Link,
    tables: Tables,
    channels: Vec<Channel>,
    views: Views,
    user: Option<Window>,
    happenings: Vec<Happening>,
    /// Channels with a timeout that is not reported yet: the registers report one at a time.
    late: VecDeque<u8>,
    counts: Counts,
    recorder: Option<Recorder>,
    lazy: bool,
    lost: bool,
    /// The VM is paused, and the mediator holds its channels.
    held: bool,
    /// Directories of address spaces that are to be flushed.
    flushing: Vec<u32>,
    /// A flush is done when the mediator has answered this.
    awaited: Option<Question>,
    /// The mediator must be asked before the flush is done.
    must_ask: bool,
    /// Channels whose submissions wait until tables have been sent.
    waiting: VecDeque<u8>,
    /// When the current work must stop for now.
    until: Deadline,
}

struct State {
    registers: Registers,
    mirror: Mirror,
    engines: Engines,
    lines: Lines,
    /// What the guest's registers show.
    shown: Progress,
}

/// What the guest waits for, as registers show it.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
struct Progress {
    /// A flush of tables is in progress.
    is_flushing: bool,
    /// A BAR does not show yet what its tables say.
    is_showing: bool,
}

impl Progress {
    /// The value of a register, which contains `word` if nothing is in progress.
    fn seen(self, at: u32, word: u32) -> u32 {
        match at & !3 {
            registers::TRANSLATIONS if self.is_flushing => word & !registers::TRANSLATED,
            registers::BAR_FLUSH if self.is_showing => word | registers::BAR_FLUSHING,
            _ => word,
        }
    }
}

/// The virtual GPU, shared by vCPUs and its threads.
pub struct Front {
    name: String,
    state: FairLock<State>,
    counters: Counters,
    /// Every access is recorded.
    records: bool,
    step: Duration,
    start: Instant,
}

impl Front {
    /// Connects to the mediator and creates a virtual GPU.
    pub fn new(
        options: &Options,
        space: &Arc<dyn AddressSpace>,
        ram: GuestMemory,
    ) -> Result<Self, Error> {
        let (mut link, vram) = Link::connect(Wanted {
            socket: options.socket.clone(),
            vram: options.vram,
            channels: options.channels,
            weight: options.weight,
        })?;
        lend(&ram, &mut link)?;
        let record = |path: &std::path::PathBuf| {
            Recorder::create(path, options.vram).map_err(|source| Error::Record {
                path: path.clone(),
                source,
            })
        };
        let recorder = options.record.as_ref().map(record).transpose()?;
        let (trapped, scans) = (!options.remap, !options.watch);
        let views = Views::new(options.vram, space, trapped, scans).map_err(Error::Memory)?;
        let registers = Registers::new(options.vram, 0);
        let mirror = Mirror::new(registers.plain_values(), Arc::clone(space), trapped);
        let engines = Engines {
            views,
            ram,
            link,
            tables: Tables::new(options.vram),
            channels: (0..CHANNELS).map(|_| Channel::default()).collect(),
            user: None,
            happenings: Vec::new(),
            late: VecDeque::new(),
            counts: Counts::default(),
            recorder,
            lazy: options.lazy,
            lost: false,
            held: false,
            flushing: Vec::new(),
            awaited: None,
            must_ask: false,
            waiting: VecDeque::new(),
            until: Deadline::after(STEP),
            vram,
        };
        let state = State {
            registers,
            mirror: mirror.map_err(Error::Memory)?,
            engines,
            lines: Lines::default(),
            shown: Progress::default(),
        };
        let front = Self {
            name: options.thread_name.clone(),
            state: FairLock::new(state),
            counters: Counters::default(),
            records: options.record.is_some(),
            step: match options.record {
                Some(_) => RECORDED_STEP,
                None => STEP,
            },
            start: Instant::now(),
        };
        front.with(|state| state.engines.window_base(0));
        Ok(front)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        let mut state = self.state.lock();
        state.engines.until = Deadline::after(self.step);
        state
    }

    /// Nanoseconds since the start; a u64 holds centuries of them.
    fn now(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }

    /// Runs `work` on the state, and raises the resulting interrupts.
    fn with<T>(&self, work: impl FnOnce(&mut State) -> T) -> T {
        let now = self.now();
        let mut state = self.lock();
        let before = (state.engines.has_work(), state.engines.is_behind());
        let done = work(&mut state);
        self.publish(&mut state, before, now);
        done
    }

    /// Shows others what has changed: the guest by interrupts and registers, the worker by waking it
    /// if there is work and was none `before`, and the API by counters.
    fn publish(&self, state: &mut State, before: (bool, bool), now: u64) {
        let (had_work, was_behind) = before;
        state.raise_interrupts(now);
        state.show_progress();
        let engines = &state.engines;
        if !had_work && engines.has_work() || !was_behind && engines.is_behind() {
            engines.link.inbox.look();
        }
        self.counters.publish(state.counts());
    }

    /// The body of the thread that handles the mediator's events, alarms, and the line when it was
    /// served.
    pub fn work(&self, served: Option<&Arc<vmm_sys_util::eventfd::EventFd>>) {
        use std::os::fd::AsRawFd;
        let inbox = Arc::clone(&self.lock().engines.link.inbox);
        loop {
            let now = self.now();
            let (alarm, has_work, waits) = {
                let state = self.lock();
                let engines = &state.engines;
                let has_work = engines.has_work() || inbox.has_more();
                let waits = engines.awaited.is_some();
                (state.registers.next_alarm(), has_work, waits)
            };
            let patience = alarm.map(|at| Duration::from_nanos(at.saturating_sub(now)));
            // An answer wakes this thread; a mediator that gives none must be noticed, too.
            let patience = [patience, waits.then_some(PATIENCE)].into_iter().flatten();
            let patience = match has_work {
                true => Some(Duration::ZERO),
                false => patience.min(),
            };
            let entry = |fd| libc::pollfd {
                fd,
                events: libc::POLLIN,
                revents: 0,
            };
            let line = served.map_or(-1, AsRawFd::as_raw_fd);
            let mut entries = [entry(inbox.wake.as_raw_fd()), entry(line)];
            if let Err(error) = base::poll::poll(&mut entries, patience) {
                let name = &self.name;
                log::error!("{name}: cannot wait, so there are no more interrupts: {error}");
                return;
            }
            if entries[0].revents != 0 {
                let _ = inbox.wake.read();
            }
            let is_served = entries[1].revents != 0;
            if is_served && let Some(served) = served {
                let _ = served.read();
            }
            self.with(|state| {
                if is_served {
                    state.lines.served();
                }
                while let Some(event) = inbox.next() {
                    state.engines.event(event);
                    if state.engines.until.is_over() {
                        break;
                    }
                }
                state.engines.advance();
            });
            if inbox.has_ended() {
                return;
            }
            // Checks the current link, with the lock held: the receiver may have reconnected to the
            // mediator meanwhile.
            if inbox.is_lost()
                && self.with(|state| state.engines.link.is_lost() && state.engines.lose())
            {
                log::warn!(
                    "{}: gantry-gpu is lost: channels have ended; it is waited for",
                    self.name
                );
            }
        }
    }

    /// The body of the thread that receives, and reconnects to the mediator if it is lost.
    pub fn receiver(self: &Arc<Self>) -> io::Result<impl FnOnce() + Send + use<>> {
        let (mut receiver, wanted, kept) = {
            let state = self.lock();
            let link = &state.engines.link;
            (link.receiver()?, link.wanted(), state.engines.vram.keep()?)
        };
        let front = Arc::clone(self);
        Ok(move || {
            while receiver.receive() {
                receiver = loop {
                    let again = wanted.again(kept.as_fd());
                    // The problem was logged when it was lost; it may not be running yet.
                    if let Some(found) = again.ok().and_then(|again| front.go_on(again)) {
                        break found;
                    }
                    if !receiver.pause() {
                        return;
                    }
                };
            }
        })
    }

    /// Continues with a reconnected mediator: sends it RAM, and channels as they submit.
    fn go_on(&self, again: Again) -> Option<Receiver> {
        let done = self.with(|state| {
            let engines = &mut state.engines;
            if engines.link.inbox.has_ended() {
                return None;
            }
            // The worker may not have handled the loss yet.
            engines.lose();
            let receiver = engines.link.go_on(again).ok()?;
            lend(&engines.ram, &mut engines.link).ok()?;
            let held = engines.held;
            engines.link.send(&Request::Hold { held });
            engines.lost = false;
            engines.counts.reconnections += 1;
            for number in 0..CHANNELS {
                engines.with_channel(number, |its, world| its.pump(number, world));
            }
            Some(receiver)
        });
        if done.is_some() {
            log::info!("{}: gantry-gpu is back", self.name);
        }
        done
    }

    /// Stops the work of all channels where it is, because the VM is paused, or lets it continue.
    /// None of it runs when this returns, and what it has completed until then has been handled.
    pub fn hold(&self, held: bool) {
        self.with(|state| {
            let engines = &mut state.engines;
            engines.held = held;
            engines.link.send(&Request::Hold { held });
            if !held {
                return;
            }
            engines.link.sync();
            let inbox = Arc::clone(&engines.link.inbox);
            while let Some(event) = inbox.next() {
                engines.event(event);
            }
        });
    }

    /// Disconnects from the mediator.
    #[cfg(test)]
    pub fn cut(&self) {
        self.lock().engines.link.drop();
    }

    /// Whether an event of the mediator has arrived that has not been handled yet.
    #[cfg(test)]
    pub fn has_heard(&self, is: impl Fn(&Event) -> bool) -> bool {
        self.lock().engines.link.inbox.has(is)
    }

    /// Runs `work` while the state is locked.
    #[cfg(test)]
    pub fn locked<T>(&self, work: impl FnOnce() -> T) -> T {
        let _state = self.lock();
        work()
    }

    /// Sets for how long an access may hold the lock: with zero, each does the least work that it
    /// can, and leaves the rest.
    #[cfg(test)]
    pub fn set_step(&mut self, step: Duration) {
        self.step = step;
    }

    /// Ends the threads.
    pub fn end(&self) {
        self.lock().engines.link.end();
    }

    /// Runs `work` on the interrupts.
    pub fn with_lines<T>(&self, work: impl FnOnce(&mut Lines) -> T) -> T {
        self.with(|state| work(&mut state.lines))
    }

    /// A BAR is now decoded at an address, or nowhere.
    pub fn place(&self, bar: u8, address: Option<u64>) -> io::Result<()> {
        self.with(|state| {
            let State {
                mirror, engines, ..
            } = state;
            let (views, vram) = (&mut engines.views, &engines.vram);
            match bar {
                0 => {
                    let mirrored = mirror.place(address);
                    // In any case: the window must not stay at its previous address.
                    let address = address.map(|at| at + WINDOW_START);
                    views.window.place(address, vram).and(mirrored)
                }
                1 => views.bar(0).place(address, vram),
                _ => views.bar(1).place(address, vram),
            }
        })
    }

    /// Returns to the power-on state, except for VRAM's contents.
    pub fn reset(&self) {
        let now = self.now();
        self.with(|state| {
            let State {
                registers,
                mirror,
                engines,
                shown,
                ..
            } = state;
            *shown = Progress::default();
            *registers = Registers::new(engines.vram.len(), now);
            if let Err(error) = mirror.reset(registers.plain_values()) {
                log::warn!("{}: cannot reset registers: {error}", self.name);
            }
            // Tables are forgotten in steps.
            engines.reset();
        });
    }

    /// Counters, as (name, value) pairs.
    pub fn counters(&self) -> Vec<(&'static str, u64)> {
        // Everything that is counted must be in the recording.
        if self.records
            && let Some(recorder) = &mut self.lock().engines.recorder
        {
            recorder.flush();
        }
        self.counters.all()
    }
}

/// Shares all of RAM with the GPU.
fn lend(ram: &GuestMemory, link: &mut Link) -> Result<(), Error> {
    for region in ram.memory().iter() {
        let (guest, len) = (region.start_addr().raw_value(), region.len());
        let shared = region.get_mmap().flags() & libc::MAP_SHARED != 0;
        let Some(file) = region.file_offset().filter(|_| shared) else {
            return Err(Error::Private(guest));
        };
        let number = |bytes: u64| u32::try_from(bytes / PAGE).map_err(|_| Error::Private(guest));
        let request = Request::Ram {
            first: Gfn(number(guest)?),
            count: number(len)?,
            offset: file.start(),
        };
        link.send_with(&request, &[file.file().as_fd()]);
    }
    Ok(())
}

impl State {
    /// The counters, in the order of their names.
    fn counts(&self) -> [u64; counters::COUNT] {
        let engines = &self.engines;
        let (counts, tables) = (engines.counts, engines.tables.counts);
        let (views, watch) = (&engines.views, engines.views.watch.counts);
        [
            counts.reads,
            counts.writes,
            counts.bar_reads,
            counts.bar_writes,
            counts.doorbells,
            counts.flushes,
            tables.syncs,
            tables.walks,
            tables.compared,
            tables.told,
            tables.refused,
            watch.refreshes,
            watch.written,
            views.apertures().map(|its| its.armed).sum(),
            views.apertures().map(|its| its.mapped).sum(),
            engines.link.sent,
            counts.reconnections,
            self.lines.raised,
        ]
    }

    /// Shows the guest what is in progress.
    fn show_progress(&mut self) {
        let progress = self.engines.progress();
        if std::mem::replace(&mut self.shown, progress) != progress {
            let done = [
                (registers::TRANSLATIONS, registers::ROOM),
                (registers::BAR_FLUSH, 0),
            ];
            for (at, word) in done {
                self.mirror.set(at, progress.seen(at, word));
            }
        }
    }

    /// Updates the interrupt registers from the events, and then the line.
    fn raise_interrupts(&mut self, now: u64) {
        let interrupts = &mut self.registers.interrupts;
        for happening in self.engines.happenings.drain(..) {
            match happening {
                Happening::Fault(fault) => interrupts.fault(fault),
                Happening::Command(error) => interrupts.command_error(error),
                Happening::NonStall => interrupts.non_stall(0),
                Happening::Timeout(channel) if self.engines.late.contains(&channel) => {}
                Happening::Timeout(channel) => self.engines.late.push_back(channel),
            }
        }
        if !self.registers.has_timeout()
            && let Some(channel) = self.engines.late.pop_front()
        {
            self.registers.channel_timeout(channel);
        }
        self.lines.set(self.registers.line(now));
    }
}

impl Engines {
    fn split(&mut self) -> (&mut Vec<Channel>, World<'_>) {
        let world = World {
            vram: &self.vram,
            ram: &self.ram,
            tables: &mut self.tables,
            views: &mut self.views,
            link: &mut self.link,
            recorder: &mut self.recorder,
            happenings: &mut self.happenings,
            waiting: &mut self.waiting,
            until: self.until,
        };
        (&mut self.channels, world)
    }

    fn with_channel(&mut self, channel: u8, work: impl FnOnce(&mut Channel, &mut World)) {
        let (channels, mut world) = self.split();
        if let Some(channel) = channels.get_mut(usize::from(channel)) {
            work(channel, &mut world);
        }
    }

    /// Records a guest access to a BAR, after its effects.
    fn record(&mut self, place: Place, offset: u64, access: Access<'_>) {
        if let Some(recorder) = &mut self.recorder {
            recorder.access(place, offset, access);
        }
    }

    fn event(&mut self, event: Event) {
        match event {
            Event::Done { channel }
            | Event::Fault { channel, .. }
            | Event::Late { channel, .. } => {
                self.with_channel(channel, |its, world| its.event(channel, event, world));
            }
            Event::NonStall => self.happenings.push(Happening::NonStall),
            Event::Command {
                channel,
                status,
                method,
                data,
            } => {
                // In the register's format.
                let method = ((method >> 16 & 7) as u8, (method & 0x3ffc) as u16);
                let error = gf100::registers::interrupts::CommandError {
                    channel,
                    status,
                    method,
                    data,
                };
                self.happenings.push(Happening::Command(error));
            }
            Event::Welcome { .. } | Event::Synced { .. } => {}
        }
    }

    /// Handles the loss of the mediator; false if it was already known.
    fn lose(&mut self) -> bool {
        if std::mem::replace(&mut self.lost, true) {
            return false;
        }
        for number in 0..CHANNELS {
            self.with_channel(number, Channel::lose);
        }
        self.tables.lose(&mut self.views.watch, &self.vram);
        (self.awaited, self.must_ask) = (None, false);
        true
    }

    fn reset(&mut self) {
        self.run(|_| false);
        let none = ChannelEntry::default();
        for number in 0..CHANNELS {
            self.with_channel(number, |channel, world| channel.set(number, none, world));
        }
        for directory in self.tables.directories() {
            self.forget(directory);
        }
        self.flushing.clear();
        self.waiting.clear();
        (self.awaited, self.must_ask) = (None, false);
        self.user_window(None);
        self.bar(Bar::One, None);
        self.bar(Bar::Three, None);
        self.window_base(0);
    }

    /// Whether work is left that [`Self::advance`] can do now.
    fn has_work(&self) -> bool {
        let has_flush = !self.flushing.is_empty() || self.must_ask;
        has_flush || !self.waiting.is_empty() || self.views.is_behind() || self.tables.is_behind()
    }

    /// Whether work is left, or an answer of the mediator is awaited.
    fn is_behind(&self) -> bool {
        self.has_work() || self.awaited.is_some()
    }

    /// What is in progress that the guest waits for.
    fn progress(&self) -> Progress {
        let is_asking = self.must_ask || self.awaited.is_some();
        let is_showing = self.views.is_behind();
        Progress {
            is_flushing: is_asking || !self.flushing.is_empty() || is_showing,
            is_showing,
        }
    }

    /// Continues the work that is left, until it must stop for now.
    fn advance(&mut self) {
        if self.views.advance(&self.vram, self.until) && self.flush_tables() {
            self.finish_flush();
        }
        // Each channel once: one that still has to wait comes last.
        for _ in 0..self.waiting.len() {
            let Some(number) = self.waiting.pop_front() else {
                break;
            };
            self.with_channel(number, |its, world| its.pump(number, world));
            if self.until.is_over() {
                return;
            }
        }
        let (views, vram, link) = (&mut self.views, &self.vram, &mut self.link);
        self.tables.advance(views, vram, link, self.until);
    }

    /// Flushes address spaces. Returns whether none is left.
    fn flush_tables(&mut self) -> bool {
        while let Some(directory) = self.flushing.pop() {
            let mut channels = self.channels.iter();
            if !channels.any(|channel| channel.is_bound_in(directory)) {
                // Its memory may have another use by now.
                self.forget(directory);
                continue;
            }
            let mut channels = self.channels.iter();
            let flies = channels.any(|channel| channel.is_flying_in(directory));
            if flies || !self.lazy {
                let (views, vram, link) = (&mut self.views, &self.vram, &mut self.link);
                if !self.tables.sync(directory, views, vram, link, self.until) {
                    self.flushing.push(directory);
                    return false;
                }
                self.must_ask |= flies;
            }
        }
        true
    }

    /// Waits until the mediator has flushed, too, if it must.
    fn finish_flush(&mut self) {
        if std::mem::take(&mut self.must_ask) {
            self.awaited = Some(self.link.ask());
        }
        let link = &self.link;
        self.awaited
            .take_if(|question| link.wait(*question, self.until));
    }

    /// Applies a new run list: the channels for which `listed` is true.
    fn run(&mut self, listed: impl Fn(u8) -> bool) {
        // First those that leave it: the mediator stops them all before it answers.
        let mut must_wait = false;
        for number in (0..CHANNELS).filter(|number| !listed(*number)) {
            let channel = self.channels.get_mut(usize::from(number));
            must_wait |= channel.is_some_and(|its| its.begin_to_leave(number, &mut self.link));
        }
        if must_wait {
            self.link.sync();
        }
        for wanted in [false, true] {
            for number in (0..CHANNELS).filter(|number| listed(*number) == wanted) {
                self.with_channel(number, |its, world| its.list(number, wanted, world));
            }
        }
    }

    fn forget(&mut self, directory: u32) {
        let watch = &mut self.views.watch;
        self.tables.forget(directory, watch, &mut self.link);
    }

    /// Address in VRAM of an offset in a BAR.
    fn in_bar(&self, index: usize, offset: u64) -> Option<u64> {
        let page = self.views.at(index, offset)?;
        Some(u64::from(page) * PAGE + offset % PAGE)
    }

    fn write_bar(&mut self, index: usize, offset: u64, data: &[u8]) {
        self.counts.bar_writes += 1;
        if let Some(at) = self.in_bar(index, offset) {
            self.vram.write(at, data);
        }
        let window = self.user.filter(|_| index == 0);
        let doorbell = window.and_then(|window| window.doorbell(offset, data, CHANNELS));
        if let Some((channel, put)) = doorbell {
            self.counts.doorbells += 1;
            self.counts.bar_writes -= 1;
            self.with_channel(channel, |its, world| its.submit(channel, put, world));
        }
    }
}

impl Effects for Engines {
    /// The page with this register is shown by [`State::show_progress`].
    fn pending_flushes(&self) -> u8 {
        0
    }

    fn has_pending_run_list(&self) -> bool {
        false
    }

    fn window_read(&mut self, at: u64) -> u32 {
        let mut bytes = [0xff; 4];
        self.vram.read(at, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    fn window_write(&mut self, at: u64, value: u32) {
        self.vram.write(at, &value.to_le_bytes());
    }

    fn window_base(&mut self, at: u64) {
        self.views.show_window(at, &self.vram);
    }

    fn bar(&mut self, bar: Bar, instance: Option<Target>) {
        let index = usize::from(bar == Bar::Three);
        let root = instance.and_then(|instance| {
            let mut block = [0; BYTES];
            let Target::Vram(page) = instance else {
                return None;
            };
            let read = self.vram.read(page.address(), &mut block);
            read.then(|| InstanceBlock::parse(&block))?
                .map(|block| block.space)
        });
        self.views.set_root(index, root, &self.vram);
        self.views.advance(&self.vram, self.until);
    }

    fn flush(&mut self, flush: Flush) {
        self.counts.flushes += 1;
        let is_meant = |directory: Target| flush.directory.is_none_or(|its| its == directory);
        for index in [0, 1] {
            if self.views.directory(index).is_some_and(is_meant) {
                self.views.look_at(index, &self.vram);
            }
        }
        for directory in self.tables.directories() {
            let vram = gf100::format::VramPage(directory);
            if !is_meant(Target::Vram(vram)) {
                continue;
            }
            self.tables.touch(directory);
            if !self.flushing.contains(&directory) {
                self.flushing.push(directory);
            }
        }
        self.advance();
    }

    fn bar_flush(&mut self) {}

    fn user_window(&mut self, window: Option<Window>) {
        self.user = window;
        let first = window.map_or(0, |window| (window.start / PAGE) as usize);
        let count = window.map_or(0, |_| usize::from(CHANNELS));
        let pages = first..first + count;
        if let Err(error) = self.views.bar(0).trap_writes(pages, &self.vram) {
            log::warn!("cannot see submissions: {error}");
        }
    }

    fn channel(&mut self, channel: u8, entry: ChannelEntry) {
        self.with_channel(channel, |its, world| its.set(channel, entry, world));
    }

    fn run_list(&mut self, list: RunList) {
        let mut listed = vec![false; usize::from(CHANNELS)];
        for index in 0..u64::from(list.count) {
            let mut bytes = [0; 4];
            let at = list.at.address() + index * 8;
            let read = match list.at {
                Target::Vram(_) => self.vram.read(at, &mut bytes),
                Target::Ram(_) => {
                    let ram = self.ram.memory();
                    ram.read_slice(&mut bytes, GuestAddress(at)).is_ok()
                }
            };
            let channel = u32::from_le_bytes(bytes) as usize;
            if read && let Some(listed) = listed.get_mut(channel) {
                *listed = true;
            }
        }
        self.run(|channel| listed[usize::from(channel)]);
    }

    fn kick(&mut self, channel: u8) {
        self.with_channel(channel, |its, world| its.kick(channel, world));
    }

    fn command_error_seen(&mut self) {}
}

/// BAR 0 as a bus device.
pub struct Bar0(pub Arc<Front>);

impl BusDevice for Bar0 {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let now = self.0.now();
        self.0.with(|state| {
            let State {
                registers,
                mirror,
                engines,
                ..
            } = state;
            engines.counts.reads += 1;
            let mut at = offset;
            let bytes = data.len();
            let mut rest = data;
            while !rest.is_empty() {
                let first = (at % 4) as usize;
                let len = rest.len().min(4 - first);
                // Offsets in BAR 0 have 24 bits.
                let word = match is_quiet(at as u32) {
                    true => mirror.get(at as u32),
                    false => registers.read(at as u32, now, engines),
                };
                let word = engines.progress().seen(at as u32, word).to_le_bytes();
                let (piece, more) = rest.split_at_mut(len);
                piece.copy_from_slice(&word[first..first + len]);
                at += len as u64;
                rest = more;
            }
            engines.record(Place::Registers, offset, Access::Read(bytes));
        });
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let now = self.0.now();
        self.0.with(|state| {
            let State {
                registers,
                mirror,
                engines,
                lines,
                ..
            } = state;
            engines.counts.writes += 1;
            if (offset..offset + data.len() as u64).contains(&REARM) {
                lines.rearm();
                engines.record(Place::Registers, offset, Access::Write(data));
                return;
            }
            let mut at = offset;
            let mut rest = data;
            while !rest.is_empty() {
                let first = (at % 4) as usize;
                let len = rest.len().min(4 - first);
                let (piece, more) = rest.split_at(len);
                let quiet = is_quiet(at as u32);
                let mut word = match len {
                    4 => [0; 4],
                    _ if quiet => mirror.get(at as u32).to_le_bytes(),
                    _ => registers.read(at as u32, now, engines).to_le_bytes(),
                };
                word[first..first + len].copy_from_slice(piece);
                let word = u32::from_le_bytes(word);
                if quiet {
                    mirror.set(at as u32, word);
                } else {
                    registers.write(at as u32, word, now, engines);
                    if is_plain(at as u32) {
                        let word = registers.read(at as u32, now, engines);
                        mirror.set(at as u32, engines.progress().seen(at as u32, word));
                    }
                }
                at += len as u64;
                rest = more;
            }
            engines.record(Place::Registers, offset, Access::Write(data));
            if (0x00_9100..0x00_9500).contains(&offset) {
                engines.link.inbox.look();
            }
        });
    }
}

/// BAR 1 or BAR 3, for accesses that are not mapped.
pub struct Shown(pub Arc<Front>, pub usize);

impl Shown {
    fn place(&self) -> Place {
        match self.1 {
            0 => Place::Bar1,
            _ => Place::Bar3,
        }
    }
}

impl BusDevice for Shown {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        self.0.with(|state| {
            state.engines.counts.bar_reads += 1;
            if let Some(at) = state.engines.in_bar(self.1, offset) {
                state.engines.vram.read(at, data);
            }
            let len = data.len();
            state
                .engines
                .record(self.place(), offset, Access::Read(len));
        });
    }

    fn write(&self, offset: u64, data: &[u8]) {
        self.0.with(|state| {
            state.engines.write_bar(self.1, offset, data);
            state
                .engines
                .record(self.place(), offset, Access::Write(data));
        });
    }
}
