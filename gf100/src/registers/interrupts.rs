//! Interrupt sources: PMC's summary, and the registers of PFIFO and the command units.

use std::collections::VecDeque;

/// Units that access addresses, by their numbers in fault registers.
pub mod unit {
    /// Graphics, including M2MF.
    pub const GRAPHICS: u8 = 0x00;
    /// BAR 1.
    pub const BAR1: u8 = 0x04;
    /// BAR 3.
    pub const BAR3: u8 = 0x05;
    /// Commands and host semaphores.
    pub const FIFO: u8 = 0x07;
    /// The copy engine of class 90b5.
    pub const COPY0: u8 = 0x15;
    /// The copy engine of class 90b8.
    pub const COPY1: u8 = 0x16;
}

/// Number of units that have fault registers.
const UNITS: usize = 32;
/// Number of command units (PBDMAs).
const PBDMAS: usize = 3;
/// Number of engines whose non-stall interrupts are distinguished.
const ENGINES: usize = 8;
/// Maximum number of faults that wait for the acknowledgement of an earlier one. A channel ends with its fault.
const MOST_FURTHER: usize = super::CHANNELS as usize;

const PMC_FIFO: u32 = 1 << 8;
const PMC_TIMER: u32 = 1 << 20;

const SCHEDULE_ERROR: u32 = 1 << 8;
const FAULT: u32 = 1 << 28;
const PBDMA: u32 = 1 << 29;
const RUN_LIST: u32 = 1 << 30;
const ENGINE: u32 = 1 << 31;
/// Bits of PFIFO's register that summarize other registers.
const SUMMARIES: u32 = FAULT | PBDMA | RUN_LIST | ENGINE;

const RUN_LIST_DONE: u32 = 1 << 28;

/// Why an address could not be used.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Reason {
    /// The page directory entry has no table.
    NoTable = 0,
    /// The table is too short.
    TableTooShort = 1,
    /// The page table entry is not present.
    NoPage = 2,
    /// The address is beyond the limit of the space.
    Limit = 3,
    /// The channel has no address space.
    NoChannel = 4,
    /// A write to a read-only page.
    ReadOnly = 6,
    /// The page's storage kind does not allow this access.
    Kind = 0xc,
}

impl Reason {
    /// Decodes the form of fault registers; unknown values become a missing page.
    pub fn from_register(value: u8) -> Self {
        match value {
            0 => Self::NoTable,
            1 => Self::TableTooShort,
            3 => Self::Limit,
            4 => Self::NoChannel,
            6 => Self::ReadOnly,
            0xc => Self::Kind,
            _ => Self::NoPage,
        }
    }
}

/// An address that could not be used.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Fault {
    /// The unit that used it, one of [`unit`].
    pub unit: u8,
    /// Page number of the instance block, with its aperture in bits 29:28.
    pub instance: u32,
    /// The address.
    pub address: u64,
    /// Whether it was a write.
    pub write: bool,
    /// The reason.
    pub reason: Reason,
}

/// A command that failed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct CommandError {
    /// The channel.
    pub channel: u8,
    /// [`CommandError::ILLEGAL`] or one of the others.
    pub status: u32,
    /// Subchannel and address of the method.
    pub method: (u8, u16),
    /// Its word.
    pub data: u32,
}

impl CommandError {
    /// The class has no such method, or does not accept this word for it.
    pub const ILLEGAL: u32 = 0x0020_0000;
    /// The subchannel has no object, or a software object.
    pub const EMPTY: u32 = 0x0080_0000;
    /// The pointers of the ring are invalid.
    pub const POINTER: u32 = 0x0000_2000;
}

#[derive(Clone, Copy, Default)]
struct Pbdma {
    status: u32,
    enabled: u32,
    method: u32,
    data: u32,
    channel: u32,
    control: u32,
}

/// The interrupt sources.
pub struct Interrupts {
    /// Whether the timer's alarm has gone off.
    pub(super) timer: bool,
    /// PMC: whether each of the two summaries may assert the line.
    armed: [bool; 2],
    /// PMC: the sources that each summary includes. All are included at power-on.
    masks: [u32; 2],
    /// PFIFO's own pending bits, without the summary bits.
    fifo: u32,
    fifo_enabled: u32,
    faulted: u32,
    faults: [[u32; 4]; UNITS],
    /// The faults of units whose registers have one that has not been acknowledged.
    further: VecDeque<(usize, [u32; 4])>,
    run_list: u32,
    engines: [u32; ENGINES],
    engines_enabled: u32,
    pbdmas: [Pbdma; PBDMAS],
}

impl Default for Interrupts {
    fn default() -> Self {
        Self {
            timer: false,
            armed: [false; 2],
            masks: [u32::MAX; 2],
            fifo: 0,
            fifo_enabled: 0,
            faulted: 0,
            faults: [[0; 4]; UNITS],
            further: VecDeque::new(),
            run_list: 0,
            engines: [0; ENGINES],
            engines_enabled: 0,
            pbdmas: [Pbdma::default(); PBDMAS],
        }
    }
}

impl Interrupts {
    fn pbdma_summary(&self) -> u32 {
        let pending =
            |(index, unit): (usize, &Pbdma)| u32::from(unit.status & unit.enabled != 0) << index;
        self.pbdmas.iter().enumerate().map(pending).sum()
    }

    fn engine_summary(&self) -> u32 {
        let pending = |(index, bits): (usize, &u32)| u32::from(*bits != 0) << index;
        self.engines.iter().enumerate().map(pending).sum()
    }

    fn fifo_pending(&self) -> u32 {
        let summary = |on: bool, bit: u32| if on { bit } else { 0 };
        self.fifo & !SUMMARIES
            | summary(self.faulted != 0, FAULT)
            | summary(self.pbdma_summary() != 0, PBDMA)
            | summary(self.run_list != 0, RUN_LIST)
            | summary(self.engine_summary() != 0, ENGINE)
    }

    fn pending(&self) -> u32 {
        let mut pending = 0;
        if self.fifo_pending() & self.fifo_enabled != 0 {
            pending |= PMC_FIFO;
        }
        if self.timer {
            pending |= PMC_TIMER;
        }
        pending
    }

    /// Whether the interrupt line is asserted.
    pub(super) fn line(&self) -> bool {
        let pending = self.pending();
        let mut summaries = self.armed.iter().zip(self.masks);
        summaries.any(|(armed, mask)| *armed && pending & mask != 0)
    }

    /// A new run list has taken effect.
    pub(super) fn run_list_done(&mut self) {
        self.run_list |= RUN_LIST_DONE;
    }

    /// An address could not be used.
    pub fn fault(&mut self, fault: Fault) {
        let unit = usize::from(fault.unit) % UNITS;
        // From the hub, client 0.
        let kind = fault.reason as u32 | 1 << 6 | u32::from(fault.write) << 7;
        let registers = [
            fault.instance,
            fault.address as u32,
            (fault.address >> 32) as u32,
            kind,
        ];
        // Faults of BARs are of no channel: the last one is told.
        if self.faulted & 1 << unit == 0 || fault.instance == 0 {
            self.faulted |= 1 << unit;
            self.faults[unit] = registers;
        } else if self.further.len() < MOST_FURTHER {
            // Each is of another channel: the guest's driver would never learn that this one has ended.
            self.further.push_back((unit, registers));
        }
    }

    /// Acknowledges faults of units, which then have their next ones.
    fn acknowledge(&mut self, units: u32) {
        self.faulted &= !units;
        let (faulted, faults) = (&mut self.faulted, &mut self.faults);
        self.further.retain(|(unit, registers)| {
            let waits = *faulted & 1 << *unit != 0;
            if !waits {
                *faulted |= 1 << *unit;
                faults[*unit] = *registers;
            }
            waits
        });
    }

    /// Reports a failed command.
    pub fn command_error(&mut self, error: CommandError) {
        let unit = &mut self.pbdmas[0];
        unit.status |= error.status;
        unit.method = u32::from(error.method.0) << 16 | u32::from(error.method.1);
        unit.data = error.data;
        unit.channel = u32::from(error.channel);
    }

    /// The channel scheduler has an event; other registers describe it.
    pub(super) fn schedule_error(&mut self) {
        self.fifo |= SCHEDULE_ERROR;
    }

    /// Raises a non-stall interrupt of an engine below 8.
    pub fn non_stall(&mut self, engine: u8) {
        self.engines[usize::from(engine) % ENGINES] |= 1;
    }

    /// Reads a register, if it belongs here.
    pub(super) fn read(&self, at: u32) -> Option<u32> {
        Some(match at {
            0x00_0100 => self.pending() & self.masks[0],
            0x00_0104 => self.pending() & self.masks[1],
            0x00_0140 => u32::from(self.armed[0]),
            0x00_0144 => u32::from(self.armed[1]),
            0x00_0640 => self.masks[0],
            0x00_0644 => self.masks[1],
            0x00_2100 => self.fifo_pending(),
            0x00_2140 => self.fifo_enabled,
            0x00_259c => self.faulted,
            0x00_25a0 => self.pbdma_summary(),
            0x00_25a4 => self.engine_summary(),
            0x00_25a8..0x00_25c8 => self.engines[word(at, 0x00_25a8)],
            0x00_2628 => self.engines_enabled,
            0x00_2800..0x00_2a00 => {
                let index = word(at, 0x00_2800);
                self.faults[index / 4][index % 4]
            }
            0x00_2a00 => self.run_list,
            _ => {
                let unit = &self.pbdmas[pbdma(at)?];
                match at & 0x1fff {
                    0x0c0 => unit.method,
                    0x0c4 => unit.data,
                    0x108 => unit.status,
                    0x10c => unit.enabled,
                    0x120 => unit.channel,
                    0x13c => unit.control,
                    _ => return None,
                }
            }
        })
    }

    /// Writes a register, if it belongs here.
    pub(super) fn write(&mut self, at: u32, value: u32) -> bool {
        match at {
            0x00_0100 | 0x00_0104 => {}
            0x00_0140 => self.armed[0] = value & 1 != 0,
            0x00_0144 => self.armed[1] = value & 1 != 0,
            0x00_0640 => self.masks[0] = value,
            0x00_0644 => self.masks[1] = value,
            0x00_2100 => self.fifo &= !value,
            0x00_2140 => self.fifo_enabled = value,
            0x00_259c => self.acknowledge(value),
            0x00_25a0 | 0x00_25a4 => {}
            0x00_25a8..0x00_25c8 => self.engines[word(at, 0x00_25a8)] &= !value,
            0x00_2628 => self.engines_enabled = value,
            0x00_2800..0x00_2a00 => {}
            0x00_2a00 => self.run_list &= !value,
            _ => {
                let Some(unit) = pbdma(at).map(|index| &mut self.pbdmas[index]) else {
                    return false;
                };
                match at & 0x1fff {
                    0x0c0 => unit.method = value,
                    0x0c4 => unit.data = value,
                    0x108 => unit.status &= !value,
                    0x10c => unit.enabled = value,
                    0x120 => unit.channel = value,
                    0x13c => unit.control = value,
                    _ => return false,
                }
            }
        }
        true
    }
}

fn word(at: u32, first: u32) -> usize {
    ((at - first) / 4) as usize
}

fn pbdma(at: u32) -> Option<usize> {
    let index = at.checked_sub(0x04_0000)? as usize / 0x2000;
    (index < PBDMAS).then_some(index)
}
