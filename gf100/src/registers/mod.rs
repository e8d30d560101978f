//! The registers in BAR 0.
//!
//! - [`file`](mod@file): stores the written words and the power-on values.
//! - [`power_on`]: values of registers after power-on.
//! - [`prom`]: the ROM with a minimal VBIOS.
//! - [`timer`]: nanoseconds and an alarm.
//! - [`interrupts`]: interrupt sources, and whether the line is asserted.
//! - [`falcon`]: memories of the embedded processors, none of which runs.
//!
//! Most registers just hold what was written. [`Registers::write`] handles those that do something.
//! Their effects elsewhere go through [`Effects`], so that the model's engines and a virtual GPU's
//! front share one register file. Nothing here blocks, and every access takes bounded time.

pub mod falcon;
pub mod file;
pub mod interrupts;
pub mod power_on;
pub mod prom;
pub mod timer;

use log::trace;

pub use self::interrupts::{Fault, Interrupts};
use self::{falcon::Falcons, file::File, timer::Timer};
use crate::format::{Aperture, Target, userd::Window};

/// Size of BAR 0 in bytes.
pub const BAR0_BYTES: u32 = 16 << 20;
/// Number of channels.
pub const CHANNELS: u8 = 128;

/// Mirror of the PCI configuration space.
const PCI_MIRROR: u32 = 0x08_8000;
const WINDOW: u32 = 0x70_0000;
const WINDOW_END: u32 = 0x80_0000;
const CHANNEL_TABLE: u32 = 0x00_3000;
/// Reason of the channel scheduler's interrupt, and the status of the engines; the index of the
/// first copy engine among them.
const SCHEDULE_REASON: u32 = 0x00_254c;
const CONTEXT_TIMEOUT: u32 = 0x0a;
const ENGINE_STATUS: u32 = 0x00_2640;
const COPY0: u32 = 4;
/// Which engines are on.
pub const ENGINES_ON: u32 = 0x00_0200;
/// The channel to kick: it leaves the engines. A bit says that it has not left them yet.
pub const KICK: u32 = 0x00_2634;
/// See [`KICK`].
pub const KICKING: u32 = 1 << 20;
/// Makes CPU writes through BARs visible to the GPU, and its bit that says that this is in progress.
pub const BAR_FLUSH: u32 = 0x07_0000;
/// See [`BAR_FLUSH`].
pub const BAR_FLUSHING: u32 = 1 << 1;
/// Status of the run list, and its bit that says that a new one has not taken effect yet.
const RUN_LIST_STATUS: u32 = 0x00_227c;
const RUN_LIST_PENDING: u32 = 1 << 20;
/// Status of TLB requests.
pub const TRANSLATIONS: u32 = 0x10_0c80;
/// Its value when all are done. Bits 23:16 are the number of further requests for which there is room.
pub const ROOM: u32 = 0x00ff_8000;
/// Its bit that says that all are done.
pub const TRANSLATED: u32 = 1 << 15;

/// Whether all registers in the 4 KiB page at an address are plain: reading one changes nothing,
/// and its value only changes when it is itself written. Such a page can be mapped as memory for
/// reading.
pub fn is_plain(at: u32) -> bool {
    let page = at & !0xfff;
    let is_live = matches!(page, 0x00_0000 | 0x00_2000 | 0x00_9000)
        || (0x04_0000..0x04_6000).contains(&page)
        || (WINDOW..WINDOW_END).contains(&page)
        || falcon::BASES.contains(&page);
    !is_live && page < BAR0_BYTES
}

/// Whether all registers in the 4 KiB page at an address are quiet: they contain what was written
/// to them, and writing has no other effect. Such a page can be memory that the driver writes.
pub fn is_quiet(at: u32) -> bool {
    let page = at & !0xfff;
    let has_effects = matches!(
        page,
        0x00_1000 | CHANNEL_TABLE | 0x07_0000 | PCI_MIRROR | 0x10_0000 | 0x40_4000
    ) || (prom::START..prom::END).contains(&page);
    is_plain(at) && !has_effects
}

/// A BAR that shows an address space.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Bar {
    /// For applications: buffers, and the channels' submission pages.
    One,
    /// For the driver: page tables, instance blocks and the like.
    Three,
}

/// A request to invalidate translations.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Flush {
    /// The page directory of the space; `None` for all spaces.
    pub directory: Option<Target>,
    /// Whether only the BARs' translations are invalidated.
    pub hub_only: bool,
}

/// A list in memory of channels that may run.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct RunList {
    /// The address of the list.
    pub at: Target,
    /// Number of entries, at most 4,095. Each has eight bytes, of which the first word is a
    /// channel.
    pub count: u32,
}

/// An engine that executes commands.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Engine {
    /// Graphics, compute and M2MF.
    Graphics,
    /// Copies of class 90b5.
    Copy0,
    /// Copies of class 90b8.
    Copy1,
}

impl Engine {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Graphics, Self::Copy0, Self::Copy1];

    /// Address of the register that shows the channel whose command it is executing.
    pub fn status(self) -> u32 {
        let index = match self {
            Self::Graphics => 0,
            Self::Copy0 => COPY0,
            Self::Copy1 => COPY0 + 1,
        };
        ENGINE_STATUS + 4 * index
    }

    /// The channel in the value of that register, if it is executing a command.
    pub fn channel(status: u32) -> Option<u8> {
        (status & 1 << 31 != 0).then_some((status & 0x7f) as u8)
    }

    /// Its bit in the register that turns engines off and on.
    pub fn bit(self) -> u32 {
        match self {
            Self::Graphics => 1 << 12,
            Self::Copy0 => 1 << 6,
            Self::Copy1 => 1 << 7,
        }
    }
}

/// An entry of the channel table.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct ChannelEntry {
    /// The channel's instance block; `None` if the entry is disabled or refers to an aperture that
    /// does not exist.
    pub instance: Option<Target>,
    /// Whether the channel may run.
    pub enabled: bool,
}

impl ChannelEntry {
    /// Parses the two words of the table.
    pub fn parse(instance: u32, control: u32) -> Self {
        let aperture = Aperture::from_entry(u64::from(instance) >> 28);
        let on = instance & 1 << 31 != 0;
        Self {
            instance: aperture
                .filter(|_| on)
                .map(|aperture| Target::new(aperture, u64::from(instance))),
            enabled: control & 1 != 0,
        }
    }
}

/// Effects of register writes elsewhere. The calls come in the order of the writes.
pub trait Effects {
    /// Reads the word at an address of VRAM, a multiple of 4, for the CPU's window.
    fn window_read(&mut self, at: u64) -> u32;
    /// Writes the word at an address of VRAM.
    fn window_write(&mut self, at: u64, value: u32);
    /// Makes the CPU's window show VRAM from another address, a multiple of 64 KiB.
    fn window_base(&mut self, at: u64);
    /// Makes a BAR show the address space of another instance block, or nothing.
    fn bar(&mut self, bar: Bar, instance: Option<Target>);
    /// Invalidates translations.
    fn flush(&mut self, flush: Flush);
    /// Number of invalidations that have not finished. There is room for 255.
    fn pending_flushes(&self) -> u8;
    /// Makes CPU writes through BARs visible to the GPU, and vice versa.
    fn bar_flush(&mut self);
    /// Moves the channels' submission pages to another place in BAR 1, or closes the window.
    fn user_window(&mut self, window: Option<Window>);
    /// An entry of the channel table was written; `channel` is less than [`CHANNELS`].
    fn channel(&mut self, channel: u8, entry: ChannelEntry);
    /// There is a new list of channels that may run.
    fn run_list(&mut self, list: RunList);
    /// Whether a run list has not taken effect yet. If so, [`Registers::run_list_done`] is called when it has.
    fn has_pending_run_list(&self) -> bool;
    /// Removes a channel from the engines. Its state is in its instance block when this is done.
    fn kick(&mut self, channel: u8);
    /// Whether that is not done yet.
    fn is_kicking(&self) -> bool {
        false
    }
    /// The channel whose command an engine is executing, if this is known.
    fn channel_on(&self, _engine: Engine) -> Option<u8> {
        None
    }
    /// Turns an engine off: it forgets its command.
    fn engine_off(&mut self, _engine: Engine) {}
    /// The driver has acknowledged a channel's failed command.
    fn command_error_seen(&mut self);
    /// This register was never written and is unknown to the model: it reads as 0.
    fn unknown_read(&mut self, at: u32) {
        trace!("register {at:#08x} is read, and not known");
    }
}

/// The register file.
pub struct Registers {
    file: File,
    rom: Vec<u8>,
    timer: Timer,
    falcons: Falcons,
    /// The interrupt sources.
    pub interrupts: Interrupts,
}

impl Registers {
    /// The state after power-on of a GPU with `vram` bytes of memory (whole MiB; the remainder is
    /// not reported). `now` is the current time in nanoseconds, here and in all other calls.
    pub fn new(vram: u64, now: u64) -> Self {
        Self {
            file: File::new(power_on::values(vram)),
            rom: prom::image(),
            timer: Timer::new(now),
            falcons: Falcons::default(),
            interrupts: Interrupts::default(),
        }
    }

    /// Reads the word at `at`, whose lowest two bits are ignored.
    pub fn read(&mut self, at: u32, now: u64, effects: &mut impl Effects) -> u32 {
        let at = at & !3 & (BAR0_BYTES - 1);
        self.interrupts.timer = self.timer.alarm_pending(now);
        if let Some(value) = self.interrupts.read(at) {
            return value;
        }
        match at {
            // The "busy" bits of requests that are already done when the write returns.
            BAR_FLUSH | 0x07_0004 | 0x07_0010 => 0,
            0x00_9000..0x00_9500 => self
                .timer
                .read(at, now)
                .unwrap_or_else(|| self.file.read(at).unwrap_or(0)),
            TRANSLATIONS => match effects.pending_flushes() {
                0 => ROOM,
                pending => (ROOM & !TRANSLATED) - (u32::from(pending) << 16),
            },
            // A power change of the graphics engine is done.
            0x40_4170 => self.file.read(at).unwrap_or(0) & !0x10,
            // Three command fetch units (PBDMAs).
            0x00_2204 => self.file.read(at).unwrap_or(0) & 7,
            RUN_LIST_STATUS => {
                let status = self.file.read(at).unwrap_or(0) & !RUN_LIST_PENDING;
                status | (u32::from(effects.has_pending_run_list()) * RUN_LIST_PENDING)
            }
            KICK => {
                let channel = self.file.read(at).unwrap_or(0) & 0x7f;
                channel | (u32::from(effects.is_kicking()) * KICKING)
            }
            ENGINE_STATUS..0x00_2658 => {
                let engine = Engine::ALL.into_iter().find(|its| its.status() == at);
                let channel = engine.and_then(|engine| effects.channel_on(engine));
                match channel {
                    Some(channel) => 1 << 31 | u32::from(channel),
                    None => self.file.read(at).unwrap_or(0),
                }
            }
            prom::START..prom::END => prom::word(&self.rom, at - prom::START),
            WINDOW..WINDOW_END => {
                let base = self.window_base();
                effects.window_read(base + u64::from(at - WINDOW))
            }
            PCI_MIRROR..0x08_9000 => self.file.read(at).unwrap_or(0),
            _ => {
                if let Some(value) = self.falcons.read(at) {
                    return value;
                }
                self.file.read(at).unwrap_or_else(|| {
                    effects.unknown_read(at);
                    0
                })
            }
        }
    }

    /// Writes the word at `at`, whose lowest two bits are ignored.
    pub fn write(&mut self, at: u32, value: u32, now: u64, effects: &mut impl Effects) {
        let at = at & !3 & (BAR0_BYTES - 1);
        if self.interrupts.write(at, value) {
            if at == 0x00_2100 && value & 1 << 8 != 0 {
                self.file.write(ENGINE_STATUS + 4 * COPY0, 0);
            }
            if (0x04_0000..0x04_6000).contains(&at) && at & 0x1fff == 0x108 {
                effects.command_error_seen();
            }
            return;
        }
        if self.timer.write(at, value, now) || self.falcons.write(at, value) {
            return;
        }
        match at {
            prom::START..prom::END => return,
            WINDOW..WINDOW_END => {
                let base = self.window_base();
                effects.window_write(base + u64::from(at - WINDOW), value);
                return;
            }
            _ => {}
        }
        self.file.write(at, value);
        match at {
            0x00_1700 => effects.window_base(self.window_base()),
            0x00_1704 => effects.bar(Bar::One, bar_instance(value)),
            0x00_1714 => effects.bar(Bar::Three, bar_instance(value)),
            0x00_2254 => effects.user_window(Window::parse(value)),
            0x00_2274 => self.run_list(value, effects),
            KICK => effects.kick((value & 0x7f) as u8),
            ENGINES_ON => {
                for engine in Engine::ALL {
                    if value & engine.bit() == 0 {
                        effects.engine_off(engine);
                    }
                }
            }
            CHANNEL_TABLE..0x00_3400 => self.channel_entry(at, effects),
            BAR_FLUSH => effects.bar_flush(),
            0x10_0cbc if value & 1 << 31 != 0 => self.flush(value, effects),
            _ => {}
        }
    }

    /// Reports that a channel below [`CHANNELS`] has kept the first copy engine busy for too long.
    pub fn channel_timeout(&mut self, channel: u8) {
        self.file.write(SCHEDULE_REASON, CONTEXT_TIMEOUT);
        // Busy, and about to switch to another channel.
        self.file
            .write(ENGINE_STATUS + 4 * COPY0, 0x8004_1000 | u32::from(channel));
        self.interrupts.schedule_error();
    }

    /// Whether the driver has not yet acknowledged the last such channel.
    pub fn has_timeout(&self) -> bool {
        self.file
            .read(ENGINE_STATUS + 4 * COPY0)
            .is_some_and(|status| status != 0)
    }

    /// Power-on values of [plain](is_plain) registers, where they are not 0.
    pub fn plain_values(&self) -> impl Iterator<Item = (u32, u32)> {
        let file = self.file.power_on().filter(|(at, _)| is_plain(*at));
        let rom = (prom::START..prom::END).step_by(4);
        let rom = rom.map(|at| (at, prom::word(&self.rom, at - prom::START)));
        file.chain(rom).chain(std::iter::once((TRANSLATIONS, ROOM)))
    }

    /// When the timer's alarm goes off, if it is set.
    pub fn next_alarm(&self) -> Option<u64> {
        self.timer.next_alarm()
    }

    /// Whether the interrupt line is asserted.
    pub fn line(&mut self, now: u64) -> bool {
        self.interrupts.timer = self.timer.alarm_pending(now);
        self.interrupts.line()
    }

    /// Byte address in VRAM that the window shows. At most 2^48.
    fn window_base(&self) -> u64 {
        u64::from(self.file.read(0x00_1700).unwrap_or(0) & 0xff_ffff) << 16
    }

    fn run_list(&mut self, value: u32, effects: &mut impl Effects) {
        let place = u64::from(self.file.read(0x00_2270).unwrap_or(0));
        if let Some(aperture) = Aperture::from_entry(place >> 28) {
            let list = RunList {
                at: Target::new(aperture, place),
                count: value & 0xfff,
            };
            effects.run_list(list);
        }
        if !effects.has_pending_run_list() {
            self.run_list_done();
        }
    }

    /// Reports that the new run list has taken effect.
    pub fn run_list_done(&mut self) {
        self.interrupts.run_list_done();
    }

    fn channel_entry(&self, at: u32, effects: &mut impl Effects) {
        let word = |at| self.file.read(at).unwrap_or(0);
        let entry = ChannelEntry::parse(word(at & !7), word(at | 4));
        // 128 entries of eight bytes.
        effects.channel(((at - CHANNEL_TABLE) / 8) as u8, entry);
    }

    fn flush(&self, request: u32, effects: &mut impl Effects) {
        let place = u64::from(self.file.read(0x10_0cb8).unwrap_or(0));
        let aperture = Aperture::from_entry(place).unwrap_or(Aperture::Vram);
        let directory = Target::new(aperture, place >> 4);
        effects.flush(Flush {
            directory: (request & 2 == 0).then_some(directory),
            hub_only: request & 4 != 0,
        });
    }
}

/// The instance block that a BAR's register refers to; it is in VRAM.
fn bar_instance(value: u32) -> Option<Target> {
    (value & 1 << 31 != 0).then(|| Target::new(Aperture::Vram, u64::from(value & 0xfff_ffff)))
}

#[cfg(test)]
mod tests;
