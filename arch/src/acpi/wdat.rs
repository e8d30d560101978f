//! The watchdog (WDAT; Microsoft, "Hardware Watchdog Timers Design Specification", revision 1).
//!
//! The table is a program: for each action of the guest's driver, the register to read or write and
//! the value. Linux runs it with `wdat_wdt`.

use super::table;
use crate::layout::ACPI_WATCHDOG_PORT;

/// The watchdog's registers, by their offsets from [`ACPI_WATCHDOG_PORT`].
pub mod registers {
    /// Whether it runs, 8 bits: writing [`RUNNING`] starts it, 0 stops it.
    pub const CONTROL: u16 = 0;
    /// Whether it has reset the machine, 8 bits: [`EXPIRED`] or 0; a write clears it.
    pub const STATUS: u16 = 1;
    /// The time to which it is set, in periods, 16 bits. A write also begins it anew.
    pub const COUNTDOWN: u16 = 2;
    /// The time that is left, in periods, 16 bits. A write begins the whole time anew.
    pub const LEFT: u16 = 4;
    /// Value of [`CONTROL`].
    pub const RUNNING: u8 = 1;
    /// Value of [`STATUS`].
    pub const EXPIRED: u8 = 1;
}

/// Duration of a period, in milliseconds.
pub const PERIOD_MS: u16 = 100;
/// Minimum of the countdown, in periods.
pub const MIN_COUNT: u16 = 10;
/// Maximum of the countdown, in periods.
pub const MAX_COUNT: u16 = u16::MAX;

/// Size of the part between the table's header and its instructions.
const HEADER_SIZE: u32 = 32;
/// No PCI function has the registers.
const NO_PCI: u8 = 0xff;
const ENABLED: u8 = 1;
const SYSTEM_IO: u8 = 1;

const READ_VALUE: u8 = 0;
const READ_COUNTDOWN: u8 = 1;
const WRITE_VALUE: u8 = 2;
const WRITE_COUNTDOWN: u8 = 3;

const RESET: u8 = 1;
const GET_CURRENT_COUNTDOWN: u8 = 4;
const GET_COUNTDOWN: u8 = 5;
const SET_COUNTDOWN: u8 = 6;
const GET_RUNNING_STATE: u8 = 8;
const SET_RUNNING_STATE: u8 = 9;
const GET_STOPPED_STATE: u8 = 10;
const SET_STOPPED_STATE: u8 = 11;
const GET_STATUS: u8 = 32;
const SET_STATUS: u8 = 33;

/// What the driver does for each action: instruction, register, its width in bytes, value.
const PROGRAM: [(u8, u8, u16, u8, u8); 10] = [
    (RESET, WRITE_VALUE, registers::LEFT, 2, 1),
    (GET_CURRENT_COUNTDOWN, READ_COUNTDOWN, registers::LEFT, 2, 0),
    (GET_COUNTDOWN, READ_COUNTDOWN, registers::COUNTDOWN, 2, 0),
    (SET_COUNTDOWN, WRITE_COUNTDOWN, registers::COUNTDOWN, 2, 0),
    (
        GET_RUNNING_STATE,
        READ_VALUE,
        registers::CONTROL,
        1,
        registers::RUNNING,
    ),
    (
        SET_RUNNING_STATE,
        WRITE_VALUE,
        registers::CONTROL,
        1,
        registers::RUNNING,
    ),
    (GET_STOPPED_STATE, READ_VALUE, registers::CONTROL, 1, 0),
    (SET_STOPPED_STATE, WRITE_VALUE, registers::CONTROL, 1, 0),
    (
        GET_STATUS,
        READ_VALUE,
        registers::STATUS,
        1,
        registers::EXPIRED,
    ),
    (SET_STATUS, WRITE_VALUE, registers::STATUS, 1, 0),
];

pub(super) fn wdat() -> Vec<u8> {
    let mut body = Vec::new();
    body.extend_from_slice(&HEADER_SIZE.to_le_bytes());
    body.extend_from_slice(&u16::from(NO_PCI).to_le_bytes());
    body.extend_from_slice(&[NO_PCI, NO_PCI, NO_PCI, 0, 0, 0]);
    for field in [PERIOD_MS, MAX_COUNT, MIN_COUNT] {
        body.extend_from_slice(&u32::from(field).to_le_bytes());
    }
    body.extend_from_slice(&[ENABLED, 0, 0, 0]);
    body.extend_from_slice(&(PROGRAM.len() as u32).to_le_bytes());
    for (action, instruction, register, width, value) in PROGRAM {
        body.extend_from_slice(&[action, instruction, 0, 0]);
        // The code of a width of 1 or 2 bytes is the same number.
        body.extend_from_slice(&[SYSTEM_IO, width * 8, 0, width]);
        let port = u64::from(ACPI_WATCHDOG_PORT + register);
        body.extend_from_slice(&port.to_le_bytes());
        body.extend_from_slice(&u32::from(value).to_le_bytes());
        let mask: u32 = if width == 1 { 0xff } else { 0xffff };
        body.extend_from_slice(&mask.to_le_bytes());
    }
    let mut wdat = table(*b"WDAT", 1);
    wdat.append_slice(&body);
    wdat.as_slice().to_vec()
}
